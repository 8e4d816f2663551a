"""The options of another engine than our own: vLLM's, in this environment or in another one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from slipstream.errors import wrong_option
from slipstream.stack.plan.models.model_options import json_object
from slipstream.stack.plan.models.model_source import RANDOM, is_gguf
from slipstream.stack.settings import StackSettings
from slipstream_ipc.validation.simulated_model import SIMULATED

VLLM = "vllm"

_IMPORTED_AT_ONCE = ("msgspec", "numpy", "psutil", "zmq")  # by a core, beside our packages
_ASK = """
import sys
from importlib.util import find_spec

print("{}.{}".format(*sys.version_info))
print(*[name for name in sys.argv[1:] if find_spec(name) is None])
"""

OF_OUR_ENGINE = (
    "attention_backend",
    "block_size",
    "cuda_graph_sizes",
    "cuda_graphs_over_ranks",
    "device",
    "enable_torch_symm_mem",
    "kv_cache_dtype",
    "language_model_only",
    "native",
    "nnodes",
    "quantization",
    "speculative_config",
    "state_cache_gib",
    "tensor_parallel_size",
)
"""Settings that say how our own engine computes."""

_DENIED = {
    "1; --replicas runs whole servers side by side": """
        data_parallel_size data_parallel_size_local data_parallel_rank""",
    "one device; several have not been tried with this engine": """
        tensor_parallel_size pipeline_parallel_size decode_context_parallel_size
        prefill_context_parallel_size distributed_executor_backend nnodes""",
    "nothing: the engine sets it": """
        disable_log_stats scheduler_cls scheduling_policy worker_extension_cls""",
    "nothing: only text is generated": "convert pooler_config runner task",
    "nothing: it is not supported yet with this engine": """
        ec_transfer_config enable_prompt_embeds enable_return_routed_experts
        kv_transfer_config return_sampling_mask""",
    "nothing: log-probabilities are the model's own": "logprobs_mode",
    "nothing: the output worker has the tokenizer": "skip_tokenizer_init",
}
DENIED: Mapping[str, str] = {
    name: allowed for allowed, names in _DENIED.items() for name in names.split()
}
"""Fields of `EngineArgs` that `engine_args` may not have, and what is allowed instead."""

NAMED_HERE = {
    "model": "MODEL",
    "num_gpu_blocks_override": "--num-blocks",
    "kv_cache_memory_bytes": "--kv-cache-gib on a CPU, --gpu-memory-utilization on a card",
    "tokenizer_revision": "--revision",
} | {
    name: f"--{name.replace('_', '-')}"
    for name in (
        "dtype",
        "download_dir",
        "enable_lora",
        "enable_prefix_caching",
        "enforce_eager",
        "generation_config",
        "gpu_memory_utilization",
        "hf_overrides",
        "lora_modules",
        "max_logprobs",
        "max_lora_rank",
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_seqs",
        "override_generation_config",
        "revision",
        "served_model_name",
        "tokenizer",
        "trust_remote_code",
    )
}
"""Fields of `EngineArgs` that an option here sets."""

_START_S = 60.0


def check_engine(settings: StackSettings, model: str) -> None:
    """Check that the engine can have the model, as it was asked for. Raises: BadRequestError."""
    if settings.engine == VLLM and (model.startswith((SIMULATED, RANDOM)) or is_gguf(model)):
        raise wrong_option("engine", VLLM, f"slipstream with the model {model}")


def engine_options(settings: StackSettings) -> dict[str, Any]:
    """The engine's options of the core's config. Raises: BadRequestError."""
    if settings.engine != VLLM:
        for name in ("engine_args", "engine_python"):
            if getattr(settings, name) is not None:
                raise wrong_option(name, getattr(settings, name), "None without engine=vllm")
        return {}
    defaults = {each.name: each.default for each in msgspec.structs.fields(StackSettings)}
    for name in OF_OUR_ENGINE:
        given = getattr(settings, name)
        if given != defaults[name]:
            allowed = f"{defaults[name]} with engine=vllm: give vLLM's own by engine_args"
            raise wrong_option(name, given, allowed)
    args = json_object("engine_args", settings.engine_args)
    for name, value in args.items():
        if name in NAMED_HERE:
            allowed = f"fields that no option here names; {NAMED_HERE[name]} sets this one"
            raise wrong_option("engine_args", f"{name}: {value}", allowed)
        if name in DENIED:
            raise wrong_option("engine_args", f"{name}: {value}", DENIED[name])
    return {"engine_args": args}


def engine_python(settings: StackSettings) -> str | None:
    """The Python that the core runs with, if it is another environment's. Raises: BadRequestError.

    It has to be of this one's minor version, as our packages have extensions, and to have what a
    core imports at once, which vLLM's environments have. Whether vLLM can serve, the core says.
    """
    given = settings.engine_python
    if given is None:
        return None
    python = os.path.abspath(os.path.expanduser(given))
    own = "{}.{}".format(*sys.version_info)
    try:
        found, *lacking = subprocess.run(
            [python, "-I", "-c", _ASK, *_IMPORTED_AT_ONCE],
            capture_output=True,
            text=True,
            timeout=_START_S,
            check=True,
        ).stdout.split() or [""]
    except (OSError, subprocess.SubprocessError) as error:
        allowed = f"the Python {own} of an environment ({error})"
        raise wrong_option("engine_python", given, allowed) from None
    if found != own:
        raise wrong_option("engine_python", f"Python {found}, {given}", f"a Python {own}")
    if lacking:
        allowed = f"the Python {own} of an environment with vLLM"
        what = f"a Python without {', '.join(lacking)}, {given}"
        raise wrong_option("engine_python", what, allowed)
    return python
