"""The inputs of a call for embeddings, checked and cut into queries.

A query has few inputs and little text, so that calls of many clients can take turns, and the answer
fits a message.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from slipstream.errors import BadRequestError, bad_request
from slipstream.request.prompts import TextPrompt, TokensPrompt, checked_utf8
from slipstream_ipc.columns import pack_u32
from slipstream_ipc.errors import BadRequest, Summary, one_of
from slipstream_ipc.messages import MAX_EMBEDDED, Embed, Fault, ModelCard, PoolingCard
from slipstream_ipc.validation.chat_template import MAX_QUERY_CHARS
from slipstream_ipc.validation.pooling import check_dimensions
from slipstream_ipc.validation.sampling_params import token_ids_from

EmbeddingInput = str | Sequence[int] | npt.NDArray[np.integer[Any]] | TextPrompt | TokensPrompt

_QUERY_CHARS = 2**14  # of a query with several texts; a token id counts as one
_KINDS = "a text, token ids, or a list of several of either"


class EmbeddingOptions(TypedDict, total=False):
    """The options of a call for embeddings.

    dimensions: the length that vectors are cut to, where the model's are made for that; None: all.
    truncate_prompt_tokens: tokens that longer inputs are cut to, special ones included; -1: as many
        as the model takes; None: longer ones are refused.
    truncation_side: the side on which tokens are left out then.
    prompt_name: of the model's own prompt in front of each text; None: the default one, if any.
    normalize: whether vectors get length 1; None: as the model's files say.
    add_special_tokens: whether the tokenizer puts its own around a text.
    """

    dimensions: int | None
    truncate_prompt_tokens: int | None
    truncation_side: str | None
    prompt_name: str | None
    normalize: bool | None
    add_special_tokens: bool | None


def embedding_inputs(given: Any) -> list[EmbeddingInput]:
    """The inputs of a call, which may have one alone. Raises: BadRequestError."""
    if isinstance(given, str | Mapping):
        return [given]  # type: ignore[list-item]
    if not isinstance(given, Sequence | np.ndarray) or isinstance(given, bytes | bytearray):
        raise bad_request(BadRequest("input", type(given).__name__, _KINDS))
    if not len(given):
        raise bad_request(BadRequest("input", Summary("an empty list"), _KINDS))
    is_one = isinstance(given[0], int | np.integer) and not isinstance(given[0], bool)
    return [given] if is_one else list(given)


def embed_queries(
    inputs: Sequence[EmbeddingInput], model: ModelCard, options: EmbeddingOptions
) -> list[Embed]:
    """The queries of a call; `PendingQueries.ask` sets their numbers. Raises: BadRequestError."""
    pooling = model.pooling
    if pooling is None:
        why = f"{model.name!r} generates text: it is not served for embeddings (--runner pooling)"
        raise BadRequestError(Fault("bad_request", why))
    try:
        texts, columns = _told_apart(inputs)
        prompt = _prompt(options.get("prompt_name"), pooling, is_text=bool(texts))
        asked = Embed(
            0,
            dimensions=_dimensions(options.get("dimensions"), pooling),
            truncate_to=_truncate_to(options.get("truncate_prompt_tokens"), model),
            truncates_left=_side(options.get("truncation_side")) == "left",
            normalizes=_bool("normalize", options.get("normalize")),
            add_special_tokens=_bool("add_special_tokens", options.get("add_special_tokens"))
            is not False,
            call=secrets.token_bytes(8),
        )
        return list(_cut(asked, [prompt + text for text in texts], columns))
    except BadRequest as error:
        raise bad_request(error) from None


def _told_apart(
    inputs: Sequence[EmbeddingInput],
) -> tuple[list[str], list[npt.NDArray[np.uint32]]]:
    """All inputs as texts, or all as token ids. Raises: BadRequest."""
    texts: list[str] = []
    columns: list[npt.NDArray[np.uint32]] = []
    for index, each in enumerate(inputs):
        field = input_name(index, len(inputs))
        value: Any = each
        if isinstance(value, Mapping):
            value = value.get("prompt", value.get("prompt_token_ids"))
        if isinstance(value, str):
            if len(value) > MAX_QUERY_CHARS:
                given = Summary(f"{len(value)} characters")
                raise BadRequest(field, given, f"at most {MAX_QUERY_CHARS}")
            texts.append(checked_utf8(field, value))
        else:
            columns.append(_token_ids(field, value))
        if texts and columns:
            raise BadRequest(field, Summary("texts and token ids"), "one of both in a call")
    return texts, columns


def _token_ids(field: str, given: Any) -> npt.NDArray[np.uint32]:
    try:
        ids = token_ids_from(given)
    except BadRequest:
        raise BadRequest(field, type(given).__name__, "a text, or token ids") from None
    if not len(ids):
        raise BadRequest(field, Summary("no tokens"), "at least one")
    return ids


def input_name(index: int, num: int) -> str:
    """The name of an input of `num` in errors."""
    return "input" if num == 1 else f"input[{index}]"


def _cut(asked: Embed, texts: list[str], columns: list[npt.NDArray[np.uint32]]) -> Iterator[Embed]:
    part: list[Any] = []
    size = 0

    def query() -> Embed:
        if texts:
            return replace(asked, texts=tuple(part))
        ids = pack_u32(np.concatenate(part))
        return replace(asked, token_ids=ids, counts=pack_u32([len(each) for each in part]))

    for each in texts or columns:
        if part and (len(part) == MAX_EMBEDDED or size + len(each) > _QUERY_CHARS):
            yield query()
            part, size = [], 0
        part.append(each)
        size += len(each)
    yield query()


def _prompt(name: object, pooling: PoolingCard, *, is_text: bool) -> str:
    """The text in front of each input."""
    prompts = {each.name: each.text for each in pooling.prompts}
    if name is None:
        return prompts.get(pooling.default_prompt, "") if is_text else ""
    if not is_text:
        raise BadRequest("prompt_name", name, "None with token ids, which get no prompt")
    if not isinstance(name, str) or name not in prompts:
        names = sorted(prompts)
        allowed = one_of(names) if names else "None: the model has no prompts"
        raise BadRequest("prompt_name", name, allowed)
    return prompts[name]


def _dimensions(given: object, pooling: PoolingCard) -> int:
    if given is None:
        return 0
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise BadRequest("dimensions", given, f"1 to {pooling.dimensions}, or None")
    check_dimensions(given, pooling)
    return given


def _truncate_to(given: object, model: ModelCard) -> int:
    if given is None:
        return 0
    is_number = isinstance(given, int) and not isinstance(given, bool)
    if not is_number or not (given == -1 or 1 <= given <= model.max_model_len):  # type: ignore[operator]
        allowed = f"1 to {model.max_model_len}, -1 for as many, or None"
        raise BadRequest("truncate_prompt_tokens", given, allowed)
    assert isinstance(given, int)
    return model.max_model_len if given == -1 else given


def _side(given: object) -> object:
    if given not in (None, "left", "right"):
        raise BadRequest("truncation_side", given, "left, right, or None")
    return given


def _bool(name: str, given: object) -> bool | None:
    if given is not None and not isinstance(given, bool):
        raise BadRequest(name, given, "true, false, or None")
    return given
