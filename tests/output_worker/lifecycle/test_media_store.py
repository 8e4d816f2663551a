"""The files that a worker's streams have, against a list of who holds what."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slipstream_ipc.messages import MediaItem
from slipstream_ipc.validation.media import media_item
from slipstream_worker.lifecycle import media_store
from slipstream_worker.lifecycle.media_store import MediaStore

FILES = [b"a" * size for size in (1, 20, 300)]
streams = st.binary(min_size=1, max_size=1)
tenants = st.sampled_from([b"", b"one", b"two"])


def items(sizes: list[int]) -> tuple[MediaItem, ...]:
    return tuple(media_item("image", bytes(FILES[each])) for each in sizes)  # new objects each time


@given(
    st.lists(
        st.tuples(streams, tenants, st.lists(st.integers(0, 2), max_size=3), st.booleans()),
        max_size=30,
    )
)
def test_each_file_counts_once_for_each_tenant_while_a_stream_holds_it(
    events: list[tuple[bytes, bytes, list[int], bool]],
) -> None:
    store, held = MediaStore(), dict[bytes, tuple[bytes, set[int]]]()
    for stream, tenant, sizes, is_over in events:
        if is_over:
            store.release(stream)
            held.pop(stream, None)
        else:
            owner = held[stream][0] if stream in held else tenant
            given_items = items(sizes)
            assert store.hold(stream, owner, given_items) == given_items
            if sizes:
                held.setdefault(stream, (owner, set(sizes)))
        alive = {(owner, size) for owner, some in held.values() for size in some}
        assert store.num_bytes == sum(len(FILES[size]) for _, size in alive)
    for stream in held:
        store.release(stream)
    assert store.num_bytes == 0


def test_equal_files_of_a_tenant_are_one_object() -> None:
    store = MediaStore()
    first, second = items([2]), items([2])
    store.hold(b"1", b"t", first)
    assert store.hold(b"2", b"t", second)[0] is first[0]
    assert store.hold(b"3", b"u", second)[0] is second[0]


def test_a_tenant_leaves_room_for_another() -> None:
    """One that has files already is never full for the same ones again."""
    store = MediaStore()
    most = media_store.MAX_MEDIA_BYTES
    big = tuple(MediaItem("image", bytes([number]), bytes(most // 2)) for number in range(5))
    for number in range(2):
        assert not store.why_full(b"t", big[number : number + 1])
        store.hold(bytes([number]), b"t", big[number : number + 1])
    assert store.why_full(b"t", big[2:3])
    assert not store.why_full(b"t", big[:1])
    assert not store.why_full(b"u", big[2:3])
