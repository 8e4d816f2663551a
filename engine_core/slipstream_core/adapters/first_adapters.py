"""The adapters that a core has from its start: those of its options, or of the core before it."""

from __future__ import annotations

import logging

from msgspec.structs import replace

from slipstream_core.adapters.adapter_error import AdapterError
from slipstream_core.adapters.names_file import read_names
from slipstream_core.config import CoreConfig, LoraConfig
from slipstream_core.load_error import ModelLoadError
from slipstream_core.step.plan import AdapterStore
from slipstream_ipc.messages import AdapterRef

logger = logging.getLogger(__name__)


def as_left(config: CoreConfig, lora: LoraConfig) -> LoraConfig:
    """The adapters that the core before served last, where there was one that changed them."""
    has_predecessor = config.predecessor_ended_s > 0
    names = read_names(config.runtime_dir, has_predecessor=has_predecessor)
    if names is None:
        return lora
    modules = tuple([(each.name, each.path) for each in names.served])
    return replace(lora, modules=modules, retired=names.retired)


def read_first(
    model: str, store: AdapterStore, lora: LoraConfig, *, is_left_out: bool
) -> tuple[tuple[AdapterRef, ...], tuple[AdapterRef, ...]]:
    """Put all adapters at their places: those that are served first, then the retired ones. Returns
    both. Raises ModelLoadError for one that cannot be read, unless those are left out.
    """
    served: list[AdapterRef] = []
    for name, path in lora.modules:
        try:
            adapter = store.read(path)
        except AdapterError as error:
            if not is_left_out:
                raise ModelLoadError(model, f"the adapter {name!r}: {error}") from None
            logger.error("the adapter %r is not served any more: %s", name, error)
            continue
        store.put(len(served), adapter)
        served.append(AdapterRef(name, path, adapter.digest))
        logger.info("adapter %r: %.1f MB", name, adapter.num_bytes / 1e6)
        if adapter.warning:
            logger.warning("adapter %r: %s", name, adapter.warning)
    retired: list[AdapterRef] = []
    for ref in lora.retired:
        try:
            adapter = store.read(ref.path)
        except AdapterError as error:
            logger.error("the adapter %r of before: %s", ref.name, error)
            continue
        if adapter.digest == ref.digest and ref not in served:
            store.put(len(served) + len(retired), adapter)
            retired.append(ref)
    return tuple(served), tuple(retired)
