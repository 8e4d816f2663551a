"""The names of the table's entries, as options give them and as the worker finds them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slipstream_ipc.formats.answer_format import delimiters
from slipstream_ipc.formats.choose import check_format_names, choose_format, delimiter_ids
from slipstream_ipc.formats.table import CALLS, NONE, REASONING, WHOLE, find_format


def test_every_name_of_the_table_is_an_option_and_has_one_entry():
    for name in (*CALLS, *WHOLE):
        check_format_names(name, None)
    for name in (*REASONING, *WHOLE):
        check_format_names(None, name)
    assert not {NONE, ""} & {*CALLS, *REASONING, *WHOLE}
    assert not WHOLE.keys() & (CALLS.keys() | REASONING.keys())
    assert all("+" not in name for name in (*CALLS, *REASONING, *WHOLE))


def test_what_is_chosen_is_found_by_its_name():
    """So the worker, which is told the name alone, has the same format."""
    for reasoning_name in (*REASONING, *WHOLE, None):
        for name in (*CALLS, NONE) if reasoning_name not in WHOLE else (None,):
            found = choose_format(None, (), tool_format=name, reasoning_format=reasoning_name)
            if found.format is not None:
                assert find_format(found.format.name) == found.format


@given(st.sampled_from([*REASONING.values(), *CALLS.values(), *WHOLE.values()]), st.data())
def test_a_model_with_a_signature_alone_has_its_format(entry, data):
    """Or fits several, of which no one is taken: an option names it then."""
    if not entry.signatures:
        return
    signature = data.draw(st.sampled_from(entry.signatures))
    found = choose_format(" ".join(signature.in_template) or "x", signature.tokens)
    assert found.is_ambiguous or found.format is not None
    literals = {each.literal for each in delimiters(entry)}
    ids = {literal: at for at, literal in enumerate(sorted(literals))}
    assert delimiter_ids(ids) == ids
