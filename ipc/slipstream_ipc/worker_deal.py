"""The output worker of a stack that a stream is dealt to, and the address of each worker.

The deal is a function of the stream id alone, so whatever knows an id and the number of workers
finds the stream: clients, and HTTP fronts that have never seen it.
"""

from __future__ import annotations

from slipstream_ipc.transport.addresses import TCP

# the last ones: ids that begin with a time or end with a counter spread as well (decision 008)
_DEAL_BYTES = 2


def worker_of(stream_id: bytes, num_workers: int) -> int:
    """The index of the worker that this stream is dealt to."""
    return int.from_bytes(stream_id[-_DEAL_BYTES:], "little") % num_workers


def dealt_with(first: bytes, stream_id: bytes) -> bytes:
    """`stream_id`, changed so that it is dealt to the worker of `first`, however many there are."""
    return stream_id[:-_DEAL_BYTES] + first[-_DEAL_BYTES:]


def worker_address(address: str, worker: int) -> str:
    """The address at which clients connect to a worker, if `address` is that of the first one: a
    socket whose name ends with the worker's index, or the port that many further.
    """
    if not worker:
        return address
    if address.startswith(TCP):
        host, _, port = address.rpartition(":")
        return f"{host}:{int(port) + worker}"
    return f"{address}.{worker}"
