import pytest

from slipstream_ipc.formats.answer_format import DIGEST_BYTES, Delimiter, delimiters, digest
from slipstream_ipc.formats.table import CALLS, NONE, REASONING, WHOLE, compose, find_format

NAMES = [
    *WHOLE,
    *(f"{reasoning}+{calls}" for reasoning in [NONE, *REASONING] for calls in [NONE, *CALLS]),
]
NAMES.remove(f"{NONE}+{NONE}")


@pytest.mark.parametrize("name", NAMES)
def test_every_format_is_found_by_its_name(name: str) -> None:
    found = find_format(name)
    assert found is not None
    assert found.name == name
    assert len(digest(found)) == DIGEST_BYTES


@pytest.mark.parametrize("name", ["", "+", "none", "none+none", "hermes", "x+hermes", "qwen3+x"])
def test_other_names_are_no_formats(name: str) -> None:
    assert find_format(name) is None


def test_digests_differ() -> None:
    assert len({digest(find_format(name)) for name in NAMES}) == len(NAMES)


def test_delimiters_are_found_in_every_part() -> None:
    literals = {part.literal for part in delimiters(find_format("qwen3+mistral"))}
    assert literals == {"<think>", "</think>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"}


def test_a_part_that_is_not_there_has_no_delimiters() -> None:
    found = compose(None, CALLS["hermes"])
    assert found.name == "none+hermes"
    assert set(delimiters(found)) == {Delimiter("<tool_call>"), Delimiter("</tool_call>")}
