"""The memory that this machine has for a model, and that loading one takes.

This is checked before loading, because a process that exceeds its memory is killed with SIGKILL and
no message. Only memory that cannot be reclaimed counts: pages of a mapped checkpoint are read again
on demand, so parameters that are the mapping itself need no memory. On systems other than Linux the
sizes are unknown and nothing is refused.

- A control group's limit counts like the machine's, and so do those of its parents.
- torch is not imported here: a core with a simulated model does without it.
- Weights must fit into the memory available now. The cache takes memory only as it fills, so
  weights and cache together must fit into the total; a cache that does not fit into what is
  available now is only warned about.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream_core.load_error import ModelLoadError, NoRoomError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_GIB = 2**30
_MAX_HEADER_BYTES = 100 << 20  # safetensors' own limit
_DTYPES = {"F32": "torch.float32", "BF16": "torch.bfloat16", "F16": "torch.float16"}


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory of the machine or of the tightest control group, in bytes, swap included."""

    total: int
    available: int
    limit: str  # what sets the limit, for messages


def read_host_memory(root: Path = Path("/")) -> HostMemory | None:
    """The memory limits of this process, or None if unknown. `root` is the parent of proc and
    sys.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        found = {
            name: int(rest.split()[0]) << 10 for name, _, rest in (x.partition(":") for x in lines)
        }
        swap, free_swap = found.get("SwapTotal", 0), found.get("SwapFree", 0)
        memory = HostMemory(
            found["MemTotal"] + swap, found["MemAvailable"] + free_swap, "this machine"
        )
    except (OSError, KeyError, ValueError, IndexError):
        return None
    for group in _groups(root):
        # a group's own swap limit is ignored: better to refuse too little than too much
        total = group.total + swap
        available = max(0, group.available) + free_swap
        if total < memory.total:
            memory = HostMemory(total, min(available, memory.available), group.limit)
        elif available < memory.available:
            memory = HostMemory(memory.total, available, memory.limit)
    return memory


def _groups(root: Path) -> Iterator[HostMemory]:
    """The limits of this process's control groups, version 1 or 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    base = root / "sys/fs/cgroup"
    for line in lines:
        number, _, rest = line.partition(":")
        kinds, _, path = rest.partition(":")
        if number == "0" and not kinds:
            yield from _limits(base, path, "memory.max", "memory.current", ("file",))
        elif "memory" in kinds.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            yield from _limits(base / "memory", path, *names, ("total_cache",))


def _limits(
    base: Path, path: str, limit: str, usage: str, reclaimable: tuple[str, ...]
) -> Iterator[HostMemory]:
    """The limits of a group and its parents.

    In a container the group's path often does not exist, but the root does.
    """
    folder = base / path.strip("/")
    while True:
        try:
            total = int((folder / limit).read_text())  # "max" raises ValueError: no limit
            used = int((folder / usage).read_text())
            stat = dict(
                line.split() for line in (folder / "memory.stat").read_text().splitlines() if line
            )
            cached = sum(int(stat.get(name, 0)) for name in reclaimable)
            cached -= int(stat.get("total_shmem", stat.get("shmem", 0)))  # counted, not reclaimable
            yield HostMemory(total, total - used + max(0, cached), "this control group")
        except (OSError, ValueError):
            pass
        if folder == base or base not in folder.parents:
            return
        folder = folder.parent


def unmapped_bytes(folder: Path, dtype: torch.dtype) -> int | None:
    """Bytes of a checkpoint's tensors that loading as `dtype` converts out of its mapping.

    Read from the headers of the safetensors files; None if there are none, or one is unreadable.
    """
    # what stays mapped is no memory of ours and never refused (decision 028)
    paths = sorted(folder.glob("*.safetensors"))
    num_bytes = 0
    for path in paths:
        try:
            with path.open("rb") as file:
                [length] = struct.unpack("<Q", file.read(8))
                if length > _MAX_HEADER_BYTES:
                    return None
                header = json.loads(file.read(length))
            for name, tensor in header.items():
                if name != "__metadata__" and _DTYPES.get(tensor["dtype"]) != str(dtype):
                    num_bytes += dtype.itemsize * _numel(tensor["shape"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
            return None
    return num_bytes if paths else None


def _numel(shape: list[int]) -> int:
    num = 1
    for size in shape:
        num *= int(size)
    return num


def refuse_weights(name: str, nbytes: int, memory: HostMemory | None) -> None:
    """Raise ModelLoadError if the `nbytes` of the weights that are not mapped do not fit."""
    if memory is not None and nbytes > memory.available:
        raise NoRoomError(
            name,
            f"its weights take {_gib(nbytes)} of memory, but {_gib(memory.available)} of "
            f"{memory.limit}'s {_gib(memory.total)} are available; use a smaller model or dtype "
            "(a checkpoint in its own dtype is memory-mapped and takes none), or stop other "
            "processes",
        )


def default_cache(nbytes: int, weights: int, memory: HostMemory | None) -> int:
    """Bytes of a cache whose size nobody has asked for: `nbytes`, or on a small machine or in a
    small control group half of what the weights, loaded already, leave.
    """
    if memory is None:
        return nbytes
    room = max(0, memory.total - weights) // 2
    if nbytes <= room:
        return nbytes
    logger.info(
        "the KV cache gets %s, as %s has %s; kv_cache_gib sets it",
        _gib(room),
        memory.limit,
        _gib(memory.total),
    )
    return room


def refuse_cache(
    name: str,
    weights: int,
    cache: int,
    memory: HostMemory | None,
    *,
    states: int = 0,
    adapters: int = 0,
) -> None:
    """Raise ModelLoadError if the cache can never fill beside the weights, loaded already.

    states: bytes of the cache that are recurrent states, those of the prefix cache included.
    adapters: bytes of what is loaded beside the weights, or may be.
    """
    if memory is None:
        return
    if weights + adapters + cache > memory.total:
        room = max(0, memory.total - weights - adapters)
        settings = "kv_cache_gib, num_blocks" + (
            ", max_num_seqs, state_cache_gib" if states else ""
        )
        of_states = f" ({_gib(states)} of it recurrent states)" if states else ""
        of_adapters = f", adapters of {_gib(adapters)} (lora_gib)" if adapters else ""
        raise ModelLoadError(
            name,
            f"a cache of {_gib(cache)}{of_states}{of_adapters} and weights of {_gib(weights)} do "
            f"not fit into {memory.limit}'s {_gib(memory.total)}; give less than {_gib(room)} of "
            f"cache ({settings}), or a smaller model or dtype",
        )
    if cache > memory.available:
        logger.warning(
            "the KV cache may grow to %s, but %s of memory are available now; lower kv_cache_gib%s "
            "if other processes need that memory",
            _gib(cache),
            _gib(memory.available),
            " or max_num_seqs" if states else "",
        )


def _gib(num: int) -> str:
    return f"{num / _GIB:.2f} GiB"
