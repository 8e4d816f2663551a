"""Pairs of texts to be scored: checked, cut into queries, and scores made of their answers.

A model that classifies reads both texts of a pair at once. An embedder gives each text a vector,
and a score is the cosine of two, as in vLLM.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from slipstream.errors import bad_request
from slipstream.request.embedding_inputs import (
    checked_bool,
    checked_texts,
    cut_texts,
    prompt_of,
    side_of,
    truncated_len,
)
from slipstream_ipc.arrays import Float32s
from slipstream_ipc.errors import BadRequest, Summary
from slipstream_ipc.messages import Embed, ModelCard
from slipstream_ipc.validation.pooling import card_for

ScoreInput = str | Mapping[str, Any]

_TEXTS = "a text, or a list of texts"


class Scores(Struct, frozen=True, eq=False):
    """The scores of a call's pairs of texts.

    scores: float32, [pairs]. num_prompt_tokens: of each pair.
    """

    scores: npt.NDArray[np.float32]
    num_prompt_tokens: list[int]


class RankedDocument(Struct, frozen=True):
    """A document of `rerank`, with the names of Cohere's answers. index: among those given."""

    index: int
    relevance_score: float
    document: str


class ScoringOptions(TypedDict, total=False):
    """The options of a call for scores.

    truncate_prompt_tokens: tokens that longer inputs are cut to, special ones included: a pair, or
        with an embedder each text; -1: as many as the model takes; None: longer ones are refused.
    truncation_side: the side on which tokens are left out then.
    max_tokens_per_query, max_tokens_per_doc: tokens that each first and second text is cut to, at
        its end and without special ones; None and 0: they are not.
    use_activation: whether scores are those that the model's files speak of, between 0 and 1 as a
        rule; False: what its head computes. None: as the server says. An embedder has none.
    instruction: for the model's template, where the server has one (`--chat-template`).
    """

    truncate_prompt_tokens: int | None
    truncation_side: str | None
    max_tokens_per_query: int | None
    max_tokens_per_doc: int | None
    use_activation: bool | None
    instruction: str | None


@dataclass(frozen=True, slots=True)
class PairNames:
    """The names of the two texts of pairs in errors."""

    first: str = "text_1"
    second: str = "text_2"


@dataclass(frozen=True, slots=True)
class ScoringPlan:
    """The queries of a call. nums: of first texts and of second ones. is_embedded: they are inputs
    of their own, the first ones before the second ones.
    """

    queries: list[Embed]
    nums: tuple[int, int]
    names: PairNames
    is_embedded: bool

    def name_of(self, index: int) -> str:
        """The name of an input in errors."""
        name, num = self.names.second, self.nums[1]
        if self.is_embedded and index < self.nums[0]:
            name, num = self.names.first, self.nums[0]
        elif self.is_embedded:
            index -= self.nums[0]
        return name if num == 1 else f"{name}[{index}]"

    def scores(self, rows: Float32s, num_tokens: Sequence[int]) -> Scores:
        """The scores of all pairs, of what the queries' inputs have got."""
        if not self.is_embedded:
            return Scores(rows[:, 0], list(num_tokens))
        num = self.nums[0]
        first, second = rows[:num], rows[num:]
        found = (first * second).sum(1)
        of_first = list(num_tokens[:num]) * (len(second) if num == 1 else 1)
        pairs = zip(of_first, num_tokens[num:], strict=True)
        return Scores(found, [one + other for one, other in pairs])


def plan_scores(
    text_1: object,
    text_2: object,
    model: ModelCard,
    options: ScoringOptions,
    names: PairNames = PairNames(),
) -> ScoringPlan:
    """The queries for the scores of pairs: a text with each of several, or as many of both. Raises:
    BadRequestError.
    """
    try:
        first, second = texts_of(names.first, text_1), texts_of(names.second, text_2)
        if len(first) not in (1, len(second)):
            given = Summary(f"{len(first)} and {len(second)} texts")
            raise BadRequest(names.first, given, f"1, or as many as of {names.second}")
        embeds = model.pooling is not None and model.pooling.task == "embed"
        pooling = card_for("embed" if embeds else "classify", model)
        if not embeds and len(pooling.labels) != 1:
            given = Summary(f"a model of {len(pooling.labels)} labels")
            raise BadRequest("model", given, "one that has one label, or embeds; see /classify")
        asked = _asked(model, options, embeds=embeds)
        for name, texts in ((names.first, first), (names.second, second)):
            checked_texts(name, texts)
        if embeds:
            prompt = prompt_of(None, pooling, is_text=True)
            bare = replace(asked, max_second=0)
            queries = cut_texts(bare, [prompt + each for each in first])
            per_doc = replace(bare, max_first=asked.max_second)
            queries += cut_texts(per_doc, [prompt + each for each in second])
        else:
            queries = cut_texts(asked, first * (len(second) // len(first)), second)
    except BadRequest as error:
        raise bad_request(error) from None
    return ScoringPlan(queries, (len(first), len(second)), names, embeds)


def texts_of(name: str, given: object) -> list[str]:
    """The texts of one side. Raises: BadRequest."""
    several = given if isinstance(given, list | tuple) else [given]
    if not several:
        raise BadRequest(name, Summary("an empty list"), _TEXTS)
    return [
        _text_of(name if len(several) == 1 else f"{name}[{at}]", each)
        for at, each in enumerate(several)
    ]


def _text_of(name: str, given: object) -> str:
    """A text, which may stand in an object as Cohere's and vLLM's clients write it."""
    value = given
    if isinstance(given, Mapping):
        value = given.get("text", given.get("content"))
    if isinstance(value, list):  # vLLM's parts
        parts = [each.get("text") for each in value if isinstance(each, Mapping)]
        texts = [each for each in parts if isinstance(each, str)]
        value = "".join(texts) if len(texts) == len(value) else None
    if not isinstance(value, str):
        raise BadRequest(name, Summary(type(given).__name__), "a text: images are not scored")
    return value


def ranked(scores: Scores, documents: Sequence[str], top_n: int | None) -> list[RankedDocument]:
    """The documents by falling score; of equal ones the first before. top_n: how many; 0 and None:
    all.
    """
    order = np.argsort(-scores.scores, kind="stable")[: top_n or None]
    return [RankedDocument(at, float(scores.scores[at]), documents[at]) for at in order.tolist()]


def checked_top_n(given: object) -> int | None:
    """Raises: BadRequest."""
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise BadRequest("top_n", given, "a number of documents, 0 or None for all")
    return given


def _asked(model: ModelCard, options: ScoringOptions, *, embeds: bool) -> Embed:
    """A query without its inputs. Raises: BadRequest."""
    instruction = options.get("instruction")
    if instruction is not None and not isinstance(instruction, str):
        raise BadRequest("instruction", instruction, "a text, or None")
    if instruction and embeds:
        raise BadRequest("instruction", Summary("a text"), "none: this model embeds each text")
    activates = checked_bool("use_activation", options.get("use_activation"))
    kwargs = {"instruction": instruction} if instruction else {}
    return Embed(
        0,
        truncate_to=truncated_len(options.get("truncate_prompt_tokens"), model),
        truncates_left=side_of(options.get("truncation_side")) == "left",
        normalizes=True if embeds else activates,
        call=secrets.token_bytes(8),
        task="embed" if embeds else "classify",
        max_first=_most("max_tokens_per_query", options.get("max_tokens_per_query"), model),
        max_second=_most("max_tokens_per_doc", options.get("max_tokens_per_doc"), model),
        template_kwargs=msgspec.json.encode(kwargs).decode() if kwargs else "",
    )


def _most(name: str, given: object, model: ModelCard) -> int:
    if given is None:
        return 0
    is_number = isinstance(given, int) and not isinstance(given, bool)
    if not is_number or not 0 <= given < model.max_model_len:  # type: ignore[operator]
        raise BadRequest(name, given, f"1 to {model.max_model_len - 1}, 0 or None for no limit")
    assert isinstance(given, int)
    return given
