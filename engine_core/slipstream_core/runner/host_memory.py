"""How much memory this machine has for a model, and what loading one takes of it.

Asked before anything is loaded: the kernel ends a process that takes more than there is with
SIGKILL, which says nothing. Only what cannot be given back counts: pages of a mapped checkpoint are
read again when they are needed, so parameters that are the mapping itself need no memory of their
own. Linux alone; elsewhere nothing is known, and nothing is refused.

Rules:
- A control group's limit counts like the machine's, that of each group above it too.
- Weights must fit into what is available now. The cache is memory only as it fills, so weights and
  cache together must fit into what the machine could ever give, and a warning says where they do
  not fit into what is available now.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from slipstream_core.runner.load_error import ModelLoadError

logger = logging.getLogger(__name__)

_GIB = 2**30
_MAX_HEADER_BYTES = 100 << 20  # the limit of safetensors itself
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes: what the machine, or the tightest control group, may give at all, and gives now."""

    total: int
    available: int
    limit: str  # what limits it, for messages


def read_host_memory(root: Path = Path("/")) -> HostMemory | None:
    """Of this process; None where it is not known. `root`: where /proc and /sys lie."""
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
        # a group's own limit of swap is not looked at: to refuse too little is better than too much
        total = group.total + swap
        available = max(0, group.available) + free_swap
        if total < memory.total:
            memory = HostMemory(total, min(available, memory.available), group.limit)
        elif available < memory.available:
            memory = HostMemory(memory.total, available, memory.limit)
    return memory


def _groups(root: Path) -> Iterator[HostMemory]:
    """The limits of the control groups that this process is in, version 1 or 2."""
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
    """Of a group and those above it; in a container its path is often not there, but its root."""
    folder = base / path.strip("/")
    while True:
        try:
            total = int((folder / limit).read_text())  # "max" is no number
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
    """Bytes of a checkpoint's tensors once they are `dtype` that are no longer its mapping, from
    its headers; None where the folder has no safetensors, or one that cannot be read.
    """
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
                if name != "__metadata__" and _DTYPES.get(tensor["dtype"]) != dtype:
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
    """Weights of which `nbytes` are no mapping are not loaded where they do not fit. Raises
    ModelLoadError.
    """
    if memory is not None and nbytes > memory.available:
        raise ModelLoadError(
            name,
            f"its weights take {_gib(nbytes)} of memory, but {_gib(memory.available)} of "
            f"{memory.limit}'s {_gib(memory.total)} are available; give a smaller model or dtype "
            "(a checkpoint in its own dtype is mapped, and takes none), or end what else runs",
        )


def refuse_cache(name: str, weights: int, cache: int, memory: HostMemory | None) -> None:
    """A cache that could never fill beside the weights is not begun; those are loaded already.
    Raises ModelLoadError.
    """
    if memory is None:
        return
    if weights + cache > memory.total:
        room = max(0, memory.total - weights)
        raise ModelLoadError(
            name,
            f"a cache of {_gib(cache)} and weights of {_gib(weights)} do not fit into "
            f"{memory.limit}'s {_gib(memory.total)}; give less than {_gib(room)} of cache "
            "(kv_cache_gib, num_blocks), or a smaller model or dtype",
        )
    if cache > memory.available:
        logger.warning(
            "the cache may grow to %s, and %s of memory are available now; lower kv_cache_gib "
            "if others need that memory",
            _gib(cache),
            _gib(memory.available),
        )


def _gib(num: int) -> str:
    return f"{num / _GIB:.2f} GiB"
