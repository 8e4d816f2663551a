"""The table of answer formats. A reasoning part and a calls part are chosen apart and composed; a
format that is one of both has an entry of its own.

Names: "REASONING+CALLS" with "none" for a part that is not there, or the entry's own name.
"""

from __future__ import annotations

from collections.abc import Mapping

from slipstream_ipc.formats.answer_format import AnswerFormat, CallFormat, ReasoningFormat
from slipstream_ipc.formats.delimited_calls import DELIMITED_CALL_FORMATS
from slipstream_ipc.formats.harmony import HARMONY
from slipstream_ipc.formats.json_calls import FORCED_CALLS, JSON_CALL_FORMATS
from slipstream_ipc.formats.reasoning import REASONING_FORMATS
from slipstream_ipc.formats.tagged_json_calls import TAGGED_JSON_CALL_FORMATS
from slipstream_ipc.formats.typed_calls import TYPED_CALL_FORMATS

NONE = "none"

REASONING: dict[str, ReasoningFormat] = {entry.name: entry for entry in REASONING_FORMATS}
CALLS: dict[str, CallFormat] = {
    entry.name: entry
    for entry in (
        *JSON_CALL_FORMATS,
        *DELIMITED_CALL_FORMATS,
        *TAGGED_JSON_CALL_FORMATS,
        *TYPED_CALL_FORMATS,
    )
}
WHOLE: dict[str, AnswerFormat] = {HARMONY.name: HARMONY}


def stop_token_ids(name: str, token_ids: Mapping[str, int]) -> tuple[int, ...]:
    """The ids with which answers of a format end, whatever a model's configuration says; empty for
    an unknown name. token_ids: of the literals that are one token.
    """
    found = find_format(name)
    if found is None or found.channels is None:
        return ()
    return tuple(
        token_ids[each.literal] for each in found.channels.stops if each.literal in token_ids
    )


def compose(reasoning: ReasoningFormat | None, calls: CallFormat | None) -> AnswerFormat:
    """The format of answers with these parts."""
    name = f"{reasoning.name if reasoning else NONE}+{calls.name if calls else NONE}"
    return AnswerFormat(name, reasoning, calls)


def forced_format(found: AnswerFormat | None) -> AnswerFormat | None:
    """The format of forced calls from a model whose answers have the format `found`, or none that
    is known; None where that has calls of its own.
    """
    if found is None:
        return compose(None, FORCED_CALLS)
    if found.calls is not None or found.channels is not None:
        return None
    return compose(found.reasoning, FORCED_CALLS)


def find_format(name: str) -> AnswerFormat | None:
    """The format with this name; None where the table has no such entry."""
    if name in WHOLE:
        return WHOLE[name]
    reasoning_name, plus, calls_name = name.partition("+")
    if not plus or reasoning_name == calls_name == NONE:
        return None
    reasoning = REASONING.get(reasoning_name)
    calls = FORCED_CALLS if calls_name == FORCED_CALLS.name else CALLS.get(calls_name)
    if (reasoning is None) != (reasoning_name == NONE) or (calls is None) != (calls_name == NONE):
        return None
    return compose(reasoning, calls)
