"""The last change of each adapter's name."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slipstream_ipc.adapter_records import RecordTable
from slipstream_ipc.messages import AdapterRecord, AdapterRef

records = st.builds(
    AdapterRecord,
    st.sampled_from(["a", "b", "c"]),
    st.integers(0, 3),
    st.binary(min_size=1, max_size=1),
)


def with_files(record: AdapterRecord) -> AdapterRecord:
    """The content goes by what makes a record another."""
    content = bytes([record.version]) + record.operation
    path = "" if record.operation[0] % 3 == 0 else f"/{content.hex()}"
    return AdapterRecord(
        record.name, record.version, record.operation, path, content if path else b""
    )


@given(st.lists(records.map(with_files)), st.randoms())
def test_the_order_of_hearing_does_not_count(heard, random) -> None:
    table = RecordTable(heard)
    shuffled = [*heard, *heard[:2]]
    random.shuffle(shuffled)
    assert RecordTable(shuffled).all == table.all
    for each in heard:
        its = [it for it in heard if it.name == each.name]
        assert table.get(each.name) == max(its, key=lambda it: (it.version, it.operation))
        assert table.next_version > each.version


@given(st.lists(records.map(with_files)), st.lists(records.map(with_files)))
def test_what_is_not_done_makes_two_the_same(ours, theirs) -> None:
    mine, other = RecordTable(ours), RecordTable(theirs)
    served = [AdapterRef(it.name, it.path, it.digest) for it in other.all if it.path]
    for each in mine.not_done(other, served):
        assert other.take(each)
    assert other.all == RecordTable([*ours, *theirs]).all


def test_what_it_has_a_record_of_and_does_not_serve_is_not_done() -> None:
    loaded = AdapterRecord("x", 1, b"1", "/x", b"one")
    table = RecordTable([loaded])
    assert table.not_done(table, []) == (loaded,)
    assert table.not_done(table, [AdapterRef("x", "/", b"other")]) == (loaded,)
    assert table.not_done(table, [AdapterRef("x", "/", b"one")]) == ()


def test_names_that_are_gone_are_remembered_to_a_bound() -> None:
    table = RecordTable(AdapterRecord(f"{at}", at, b"") for at in range(1, 400))
    table.take(AdapterRecord("x", 1, b"", "/x", b"one"))
    assert len(table.all) == 257
    assert table.get("143") is None
    assert table.get("144") is not None
