"""The adapters that a runner's model has in memory: reads them, and puts them where steps find
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from slipstream_core.adapters.adapter_file import Adapter, read_adapter
from slipstream_core.adapters.adapter_table import AdapterTable
from slipstream_core.adapters.roots import Roots
from slipstream_core.adapters.sites import Site


class FolderAdapters:
    """Implements AdapterStore."""

    def __init__(
        self,
        table: AdapterTable,
        sites: Mapping[str, Site],
        max_rank: int,
        why_no_site: Callable[[str], str],
        vocab_size: int,
    ) -> None:
        """See `read_adapter`."""
        self.table = table
        self._sites = sites
        self._max_rank = max_rank
        self._why_no_site = why_no_site
        self._vocab_size = vocab_size
        self._num_bytes: dict[int, int] = {}  # by place

    def prepare_thread(self) -> None:
        """Make ready a thread that reads: its own products are of one thread."""
        torch.set_num_threads(1)

    def read(self, path: str, roots: Sequence[str] | None = None) -> Adapter:
        """The adapter in a folder, below one of `roots` unless they are None. Can be called from
        any thread. Raises AdapterError.
        """
        allowed = None if roots is None else Roots(roots)
        return read_adapter(
            Path(path) if allowed is None else allowed.folder(path),
            self._sites,
            self._max_rank,
            self._why_no_site,
            vocab_size=self._vocab_size,
            roots=allowed,
        )

    def put(self, place: int, adapter: Adapter) -> None:
        """Let a place have an adapter; no step may use it meanwhile."""
        self.table.put(place, adapter.factors)
        self._num_bytes[place] = adapter.num_bytes

    def clear(self, place: int) -> None:
        """Free a place; no step may use it meanwhile."""
        self.table.clear(place)
        self._num_bytes.pop(place, None)

    def num_bytes(self, place: int) -> int:
        """Memory of what is at a place."""
        return self._num_bytes.get(place, 0)
