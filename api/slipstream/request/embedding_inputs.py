"""The inputs of a call for embeddings or classes, checked and cut into queries.

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

from slipstream.errors import bad_request
from slipstream.request.prompts import TextPrompt, TokensPrompt, checked_utf8
from slipstream_ipc.columns import pack_u32
from slipstream_ipc.errors import BadRequest, Summary, one_of
from slipstream_ipc.messages import MAX_EMBEDDED, Embed, ModelCard, PoolingCard, PoolingTask
from slipstream_ipc.validation.chat_template import MAX_QUERY_CHARS
from slipstream_ipc.validation.pooling import card_for, check_dimensions
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


class ClassifyOptions(TypedDict, total=False):
    """The options of a call for classes.

    truncate_prompt_tokens, truncation_side, add_special_tokens: as in `EmbeddingOptions`.
    use_activation: whether numbers are probabilities, or what else the model's files say; False:
        logits. None: as the server says.
    """

    truncate_prompt_tokens: int | None
    truncation_side: str | None
    use_activation: bool | None
    add_special_tokens: bool | None


def classify_queries(
    inputs: Sequence[EmbeddingInput], model: ModelCard, options: ClassifyOptions
) -> list[Embed]:
    """The queries of a call for classes, like those of `embed_queries`. Raises: BadRequestError."""
    activates = options.get("use_activation")
    others: EmbeddingOptions = {
        "truncate_prompt_tokens": options.get("truncate_prompt_tokens"),
        "truncation_side": options.get("truncation_side"),
        "add_special_tokens": options.get("add_special_tokens"),
        "normalize": activates,
    }
    try:
        checked_bool("use_activation", activates)
    except BadRequest as error:
        raise bad_request(error) from None
    return embed_queries(inputs, model, others, "classify")


def embed_queries(
    inputs: Sequence[EmbeddingInput],
    model: ModelCard,
    options: EmbeddingOptions,
    task: PoolingTask = "embed",
) -> list[Embed]:
    """The queries of a call; `PendingQueries.ask` sets their numbers. Raises: BadRequestError."""
    try:
        pooling = card_for(task, model)
        texts, columns = _told_apart(inputs)
        prompt = prompt_of(options.get("prompt_name"), pooling, is_text=bool(texts))
        asked = Embed(
            0,
            dimensions=_dimensions(options.get("dimensions"), pooling),
            truncate_to=truncated_len(options.get("truncate_prompt_tokens"), model),
            truncates_left=side_of(options.get("truncation_side")) == "left",
            normalizes=checked_bool("normalize", options.get("normalize")),
            add_special_tokens=checked_bool("add_special_tokens", options.get("add_special_tokens"))
            is not False,
            call=secrets.token_bytes(8),
            task=task,
        )
        if texts:
            return cut_texts(asked, [prompt + text for text in texts])
        return list(_cut_columns(asked, columns))
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
            texts.append(_checked_text(field, value))
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


def checked_texts(name: str, texts: Sequence[str]) -> None:
    """Check the texts of a call. Raises: BadRequest, which names the text."""
    for at, text in enumerate(texts):
        _checked_text(name if len(texts) == 1 else f"{name}[{at}]", text)


def _checked_text(field: str, text: str) -> str:
    if len(text) > MAX_QUERY_CHARS:
        raise BadRequest(field, Summary(f"{len(text)} characters"), f"at most {MAX_QUERY_CHARS}")
    return checked_utf8(field, text)


def cut_texts(asked: Embed, texts: Sequence[str], pairs: Sequence[str] = ()) -> list[Embed]:
    """Queries of texts, or of pairs with as many second texts."""
    sizes = [len(each) for each in texts]
    if pairs:
        sizes = [size + len(each) for size, each in zip(sizes, pairs, strict=True)]
    return [
        replace(asked, texts=tuple(texts[begin:end]), pairs=tuple(pairs[begin:end]))
        for begin, end in _cuts(sizes)
    ]


def _cut_columns(asked: Embed, columns: list[npt.NDArray[np.uint32]]) -> Iterator[Embed]:
    sizes = [len(each) for each in columns]
    for begin, end in _cuts(sizes):
        ids = pack_u32(np.concatenate(columns[begin:end]))
        yield replace(asked, token_ids=ids, counts=pack_u32(sizes[begin:end]))


def _cuts(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The inputs of each query: from the first one to before the second one."""
    begin, size = 0, 0
    for at, each in enumerate(sizes):
        if at > begin and (at - begin == MAX_EMBEDDED or size + each > _QUERY_CHARS):
            yield begin, at
            begin, size = at, 0
        size += each
    yield begin, len(sizes)


def prompt_of(name: object, pooling: PoolingCard, *, is_text: bool) -> str:
    """The text in front of each input. Raises: BadRequest."""
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


def truncated_len(given: object, model: ModelCard) -> int:
    """Tokens that inputs are cut to; 0: they are not. Raises: BadRequest."""
    if given is None:
        return 0
    is_number = isinstance(given, int) and not isinstance(given, bool)
    if not is_number or not (given == -1 or 1 <= given <= model.max_model_len):  # type: ignore[operator]
        allowed = f"1 to {model.max_model_len}, -1 for as many, or None"
        raise BadRequest("truncate_prompt_tokens", given, allowed)
    assert isinstance(given, int)
    return model.max_model_len if given == -1 else given


def side_of(given: object) -> object:
    """The side on which tokens are left out. Raises: BadRequest."""
    if given not in (None, "left", "right"):
        raise BadRequest("truncation_side", given, "left, right, or None")
    return given


def checked_bool(name: str, given: object) -> bool | None:
    """Raises: BadRequest."""
    if given is not None and not isinstance(given, bool):
        raise BadRequest(name, given, "true, false, or None")
    return given
