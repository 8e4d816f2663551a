"""Adapters that vLLM loads and computes, in the places that requests name.

- vLLM has the factors, under a number of its own for each version: a number is never used again,
  as vLLM takes what it has under one for what is meant. The files are read here for their digest,
  before and after vLLM reads them.
- vLLM keeps as many adapters as there are places and some more, so it never drops one that streams
  have, to read other files in its stead later.
- What is read and not put at a place, or cleared, vLLM drops as the object goes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from weakref import finalize

from slipstream_core.adapters.adapter_error import AdapterError
from slipstream_core.adapters.adapter_file import read_digest
from slipstream_core.adapters.roots import Roots
from slipstream_core.config import LoraConfig
from slipstream_core.load_error import brief

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM takes as `max_lora_rank`
_MOST_IN_STEP = 8  # adapters that vLLM has memory for in one step, where --engine-args says nothing
_MORE = 8  # that vLLM keeps beside those at places: read, and not served yet
_MOST_BYTES = 8 << 30  # of a file of tensors


@dataclass(frozen=True, eq=False)
class VllmAdapter:
    """An adapter that vLLM has read. request: vLLM's LoRARequest."""

    digest: bytes
    num_bytes: int
    request: Any
    warning: str = ""


class VllmAdapters:
    """Implements AdapterStore."""

    def __init__(self, core: Any, call: Callable[[Callable[[], Any]], Future[Any]]) -> None:
        """call: runs a function on the thread that drives vLLM's engine core."""
        self._core = core
        self._call = call
        self._numbers = count(1)
        self._at: dict[int, VllmAdapter] = {}  # by place

    def prepare_thread(self) -> None:
        """Nothing: vLLM computes elsewhere."""

    def read(self, path: str, roots: Sequence[str] | None = None) -> VllmAdapter:
        """Let vLLM read the adapter in a folder. Raises AdapterError."""
        from vllm.lora.request import LoRARequest

        allowed = None if roots is None else Roots(roots)
        folder = Path(path) if allowed is None else allowed.folder(path)
        digest, num_bytes = read_digest(folder, _MOST_BYTES, allowed)
        number = next(self._numbers)
        # vLLM takes requests of one name for the same, and its prefix cache goes by it
        request = LoRARequest(
            lora_name=f"{digest.hex()}-{number}", lora_int_id=number, lora_path=str(folder)
        )
        adapter = VllmAdapter(digest, num_bytes, request)
        finalize(adapter, self._drop, number)
        try:
            self._call(partial(self._core.add_lora, request)).result()
        except CancelledError:
            raise AdapterError("the engine has stopped") from None
        except Exception as error:  # vLLM says so by several classes
            raise AdapterError(f"vLLM: {brief(error)}") from None
        if read_digest(folder, _MOST_BYTES, allowed)[0] != digest:
            raise AdapterError(f"the files in {folder} were changed while they were read")
        return adapter

    def put(self, place: int, adapter: VllmAdapter) -> None:
        """Let a place have an adapter."""
        self._at[place] = adapter

    def clear(self, place: int) -> None:
        """Free a place."""
        del self._at[place]

    def num_bytes(self, place: int) -> int:
        """The size of the file of what is at a place."""
        return self._at[place].num_bytes

    def request_at(self, place: int) -> Any:
        """vLLM's LoRARequest of the adapter at a place; None for -1."""
        return None if place < 0 else self._at[place].request

    def _drop(self, number: int) -> None:
        self._call(partial(self._core.remove_lora, number))


def engine_args_of(lora: LoraConfig) -> dict[str, Any]:
    """The fields of vLLM's `EngineArgs` that make room for adapters."""
    return {
        "enable_lora": True,
        "max_lora_rank": next(each for each in _RANKS if each >= lora.max_rank),
        "max_loras": min(lora.max_loras, _MOST_IN_STEP),
        "max_cpu_loras": lora.max_loras + _MORE,
    }
