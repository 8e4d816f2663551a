"""Builds a ready TorchRunner from the core's settings: loads the model and sizes its cache."""

from __future__ import annotations

import errno
import logging
import os
import sys
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial

import torch

from slipstream_core.adapters.adapter_file import TENSORS
from slipstream_core.adapters.first_adapters import as_left
from slipstream_core.attention.cache_formats import CACHE_FORMATS
from slipstream_core.config import CoreConfig, LoraConfig
from slipstream_core.kernels.card.triton_support import unready
from slipstream_core.kernels.cpu.cpu_threads import num_cores
from slipstream_core.kernels.cpu.kernels import kernels
from slipstream_core.load_error import ModelLoadError
from slipstream_core.model.host_memory import (
    HostMemory,
    default_cache,
    read_host_memory,
    refuse_cache,
)
from slipstream_core.model.loader import LoadedModel, load_model
from slipstream_core.runner.capture_sizes import graph_sizes, token_buckets
from slipstream_core.runner.draft_model import check_draft_model, num_parameters
from slipstream_core.runner.graph_capture import CaptureConfig
from slipstream_core.runner.kv_cache_size import (
    PROFILE_BLOCKS,
    Meter,
    block_bytes,
    blocks_in,
    blocks_on_card,
    check_length,
    free_before_loading,
    no_room,
)
from slipstream_core.runner.state_memory import (
    num_draft_states,
    num_snapshots,
    states_bytes,
    with_states,
)
from slipstream_core.runner.torch_runner import KernelConfig, TorchRunner
from slipstream_core.runner.warm_up import decode_times, keep_freed_memory, warm_up
from slipstream_core.sharding.collectives import least_over_ranks
from slipstream_core.sharding.rank import Rank
from slipstream_core.step.plan import NOT_DRAFTED
from slipstream_ipc.telemetry.trace import open_tracer

logger = logging.getLogger(__name__)

# How long a thread on a card may hold the GIL while another wants it, in seconds. By default 5 ms:
# several steps of a small model, for which the thread that enqueues them would wait.
_SWITCH_S = 0.0002


def load_runner(config: CoreConfig, rank: Rank | None = None) -> TorchRunner:
    """Load the model, or a rank's slice of it, and size its cache. Raises ModelLoadError.

    Call it in a process dedicated to the core: it leaves the calling thread with a single torch
    thread. libgomp's teams spin between loops only while the process has no more OpenMP threads
    than cores, so a team left over from loading would cost the device's team a third of its speed.
    """
    size, num_local = (1, 1) if rank is None else (rank.size, rank.num_local)
    threads = config.threads or max(1, num_cores() // num_local)
    torch.set_num_threads(1)
    if config.device != "cpu" and torch.cuda.is_available():
        sys.setswitchinterval(_SWITCH_S)
    free_before = free_before_loading(config)
    model = load_model(
        config.model,
        dtype=config.dtype,
        device=config.device,
        max_model_len=config.max_model_len,
        trust_remote_code=config.trust_remote_code,
        hf_overrides=config.hf_overrides,
        generation_config=config.generation_config,
        override_generation_config=config.override_generation_config,
        quantization=config.quantization,
        rank=rank,
        takes_images=True,
        why_no_images=_why_no_images(config),
    )
    model = replace(model, cache_format=CACHE_FORMATS[config.kv_cache_dtype])
    given, kept, draft_share = config.speculative_config, model.kept_bytes, 0.0
    if given is not None and given.model is not None:
        model = replace(model, draft=load_draft_model(model, given.model, config, rank))
        assert model.draft is not None
        kept += model.draft.kept_bytes
        draft_share = num_parameters(model.draft) / num_parameters(model)

    cache = 0
    if model.device.type == "cpu" and (config.num_blocks is None or model.states):
        cache = int(config.kv_cache_gib * 2**30)  # of all ranks together
        if config.num_blocks is None and not config.touches_cache:  # nobody has asked for this size
            cache = default_cache(cache, num_local * kept, read_host_memory())
    snapshots = draft_states = 0
    if model.states:
        draft_states = num_draft_states(model, config, cache)
        snapshots = num_snapshots(model, config, cache - draft_states * model.state_bytes)
        kept_states = (snapshots + draft_states) * model.state_bytes
        config = with_states(model, config, cache - kept_states)
    elif config.state_cache_gib is not None:
        logger.warning("state_cache_gib has no effect: %s carries no recurrent states", model.name)
    states = states_bytes(model, config) + (snapshots + draft_states) * model.state_bytes
    native = config.native
    if rank is not None and native:
        # one without a compiler would order its rows otherwise, and record and sample otherwise
        is_able = kernels() is not None if model.device.type == "cpu" else unready() is None
        native = bool(least_over_ranks(int(is_able), model.device))
        if is_able and not native:
            logger.warning("torch's operators compute: another rank cannot compile kernels")
    kernel_config = KernelConfig(native, config.attention_backend, threads=threads)
    lora = None if config.lora is None else as_left(config, config.lora)
    make = partial(
        TorchRunner,
        model,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        num_snapshots=snapshots,
        num_draft_states=draft_states,
    )

    sizes = graph_sizes(model, config)
    capture = CaptureConfig(sizes, token_buckets(config.max_num_batched_tokens) if sizes else ())
    num_blocks = config.num_blocks
    if num_blocks is None and model.device.type == "cuda":
        longest = min(model.max_model_len, config.max_num_batched_tokens)
        with closing(
            make(num_blocks=PROFILE_BLOCKS, max_row_len=longest, kernel_config=kernel_config)
        ) as small:
            num_blocks = blocks_on_card(
                model,
                config,
                Meter(model.device),
                small,
                free_before=free_before,
                capture=capture,
            )
    elif num_blocks is None:
        num_blocks = blocks_in(model, config, (cache - states) // size)
    if rank is not None:
        num_blocks = least_over_ranks(num_blocks, model.device)
    check_length(model, config, num_blocks)
    if model.device.type == "cpu":
        keep_freed_memory()
        memory = read_host_memory()
        cache = num_blocks * block_bytes(model, config.block_size) + states
        refuse_cache(
            model.name,
            num_local * kept,
            num_local * cache,
            memory,
            states=states,
            adapters=0 if lora is None else bytes_of_adapters(lora),
        )
        kernel_config = replace(kernel_config, packs=packs_weights(model, memory))
    try:
        runner = make(
            num_blocks=num_blocks,
            tracer=open_tracer(config.trace, "device") if rank is None or rank.leads else None,
            kernel_config=replace(kernel_config, capture=capture),
            lora=lora,
            has_predecessor=config.predecessor_ended_s > 0,
        )
        if model.device.type == "cpu" and rank is None:  # ranks do it together
            warm_up(runner, runner, config)
            if config.speculative_config is not None and runner.info.takes_drafts:
                runner.info = replace(
                    runner.info,
                    decode_s=decode_times(runner, config),
                    draft_s=decode_times(runner, config, of_draft_model=True),
                    draft_share=draft_share,
                )
        return runner
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise no_room(model, config, num_blocks, states) from error
    except (OSError, RuntimeError) as error:  # from mmap, or from torch's allocator
        if getattr(error, "errno", 0) == errno.ENOMEM or "can't allocate memory" in str(error):
            raise no_room(model, config, num_blocks, states) from error
        raise


def _why_no_images(config: CoreConfig) -> str:
    """The reason in these settings to serve a vision model as text; empty: there is none."""
    if config.language_model_only:
        return "language_model_only is set"
    return "" if config.lora is None else "enable_lora is set, and adapters do not reach its images"


def load_draft_model(
    model: LoadedModel, name: str, config: CoreConfig, rank: Rank | None = None
) -> LoadedModel:
    """Load the draft model of a model. Raises ModelLoadError, also where it cannot draft for it."""
    if rank is not None or model.device.type != "cpu":
        where = "several ranks compute it" if rank is not None else "it is on a card"
        why = f"speculative_config.model is {name!r}, but nothing is drafted of {model.name}"
        raise ModelLoadError(model.name, f"{why}, as {where}: {NOT_DRAFTED}")
    draft = load_model(
        name,
        dtype="float32",
        device="cpu",
        trust_remote_code=config.trust_remote_code,
        generation_config="vllm",
    )
    check_draft_model(model, draft, config.tokenizer)
    return draft


def bytes_of_adapters(lora: LoraConfig) -> int:
    """Memory of adapters: all that they may take, or else what lies in their folders now."""
    if lora.gib is not None:
        return int(lora.gib * 2**30)
    num = 0
    for _, path in lora.modules:
        with suppress(OSError, ValueError):
            num += os.stat(os.path.join(path, TENSORS)).st_size
    return num


def packs_weights(model: LoadedModel, memory: HostMemory | None) -> bool:
    """True if memory suffices to copy mapped weights into a faster layout; warns if it does not."""
    mapped = sum(weight.nbytes for weight in model.module.parameters()) - model.kept_bytes
    if model.sight.vision is not None:
        mapped += model.kept_bytes  # its module keeps weights of its own
    if memory is None or mapped <= memory.available:
        return True
    logger.warning(
        "not enough memory to copy the weights of %s: they stay memory-mapped, and steps are "
        "slower and may read the file again",
        model.name,
    )
    return False
