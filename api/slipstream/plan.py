"""What a stack consists of: from settings to the processes to start and their configs.

Owns: what MODEL may be, which sockets lie where, which option goes to which process. Does not
know: how processes are started, and the processes themselves beyond their module's name and the
names of their config's fields (tests hold both sides together).
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import msgspec

from slipstream.demo import MODEL_NAME, MODEL_PATH
from slipstream.endpoints import check_listener, client_address
from slipstream.events import SupervisorConfig
from slipstream.processes import ChildSpec
from slipstream.settings import StackSettings, wrong_option
from slipstream.tracing.parts import checked_trace
from slipstream_ipc.sockets import check_address

API_KEY_VARIABLE = "SLIPSTREAM_API_KEY"
CORE_SOCKET = "core.sock"
FRONT = "http"  # the front's name among the processes
SIMULATED = "simulated:"

_TOKENIZER = "tokenizer="
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_CORE_OPTIONS = (
    "dtype",
    "device",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "block_size",
    "kv_cache_gib",
    "gpu_memory_utilization",
    "enable_prefix_caching",
    "num_blocks",
    "threads",
    "native",
    "max_waiting",
    "max_logprobs",
    "step_timeout_s",
    "trust_remote_code",
)
_WORKER_OPTIONS = ("stream_interval", "client_timeout_s", "grace_s", "trust_remote_code")


def plan_stack(
    settings: StackSettings, runtime_dir: Path, parent_pid: int | None = None
) -> SupervisorConfig:
    """The supervisor's config.

    Raises: BadRequestError, for a model, tokenizer, trace or listener that cannot be, or a
    `runtime_dir` whose path is too long for a socket.
    """
    model, tokenizer = model_and_tokenizer(settings.model, settings.tokenizer)
    address = client_address(runtime_dir)
    core_address = f"ipc://{runtime_dir / CORE_SOCKET}"
    trace = checked_trace(settings.trace)
    keys = check_listener(settings.listen, settings.keys, insecure=settings.insecure)
    try:
        check_address(address)
        check_address(core_address)
    except ValueError as error:
        raise wrong_option("runtime_dir", str(runtime_dir), "a shorter absolute path") from error
    core = {
        "model": model,
        "served_model_name": settings.served_model_name or settings.model or MODEL_NAME,
        "address": core_address,
        "runtime_dir": str(runtime_dir),
        "trace": trace,
        **{name: getattr(settings, name) for name in _CORE_OPTIONS},
    }
    if model == str(MODEL_PATH) and settings.dtype == "auto":
        # stored in bfloat16 for its size alone; in float32 its texts do not depend on the batch
        core["dtype"] = "float32"
    if model == str(MODEL_PATH) and settings.threads is None:
        core["threads"] = 1  # too small for two threads to be worth their meeting
    worker = {
        "tokenizer": tokenizer,
        "client_address": address,
        "core_address": core_address,
        "runtime_dir": str(runtime_dir),
        "cache_dir": str(_cache_dir()),
        "listen": settings.listen,
        "keys": None if keys is None else str(keys),
        "insecure": settings.insecure,
        "trace": trace,
        **{name: getattr(settings, name) for name in _WORKER_OPTIONS},
    }
    children = [
        _module("core", "slipstream_core.main", core, has_spare=settings.spare_core),
        _module(
            "worker",
            "slipstream_worker.main",
            worker,
            has_spare=settings.spare_worker,
            drains=True,
        ),
    ]
    if settings.http_port is not None:
        front = {
            "client_address": address,
            "tokenizer": tokenizer,
            "host": settings.host,
            "port": settings.http_port,
            "api_keys": api_keys(settings),
            "trace": trace,
        }
        children.append(
            _module(FRONT, "slipstream.http.main", front, drains=True, hears_condition=True)
        )
    return SupervisorConfig(
        tuple(children),
        address,
        str(runtime_dir),
        parent_pid,
        hang_timeout_s=settings.hang_timeout_s,
        max_restarts=settings.max_restarts,
        restart_window_s=settings.restart_window_s,
        drain_s=settings.drain_s,
    )


def api_keys(settings: StackSettings) -> tuple[str, ...]:
    """Every key that HTTP clients may send. Raises: BadRequestError."""
    given = (settings.api_key,) if isinstance(settings.api_key, str) else settings.api_key
    if not all(key and key.isascii() and key.isprintable() and " " not in key for key in given):
        raise wrong_option("api_key", given, "printable ASCII without spaces, not empty")
    from_environment = os.environ.get(API_KEY_VARIABLE)
    return (*given, from_environment) if from_environment else given


def model_and_tokenizer(model: str | None, tokenizer: str | None) -> tuple[str, str]:
    """What the core loads, and where the worker finds its tokenizer.

    A folder becomes its absolute path, and a simulated model says which tokenizer it plays back.
    Raises: BadRequestError.
    """
    if model is None or model == MODEL_NAME:
        found = str(MODEL_PATH)
    elif f"{model}:".startswith(SIMULATED):
        return _simulated(f"{model}:" if ":" not in model else model, tokenizer)
    else:
        found = _folder_or_hub_id("model", model, f"{SIMULATED}OPTION=VALUE,...")
    if tokenizer is None:
        return found, found
    return found, _folder_or_hub_id("tokenizer", tokenizer)


def _simulated(model: str, tokenizer: str | None) -> tuple[str, str]:
    options = [option for option in model.removeprefix(SIMULATED).split(",") if option]
    own = [option for option in options if option.startswith(_TOKENIZER)]
    if own and tokenizer is not None:
        allowed = f"a tokenizer in one place, not in {model!r} too"
        raise wrong_option("tokenizer", tokenizer, allowed)
    given = own[0].removeprefix(_TOKENIZER) if own else tokenizer
    path = Path(MODEL_PATH if given is None else given).expanduser().absolute()
    if not path.exists() or "," in str(path):
        allowed = "an existing tokenizer.json, or a folder with one, without a comma in its path"
        raise wrong_option("tokenizer", given, allowed)
    others = [option for option in options if not option.startswith(_TOKENIZER)]
    played = SIMULATED + ",".join([*others, f"{_TOKENIZER}{path}"])
    return played, str(path.parent if path.is_file() else path)


def _folder_or_hub_id(option: str, value: str, more: str = "") -> str:
    path = Path(value).expanduser()
    if path.is_dir() and (option == "tokenizer" or (path / "config.json").is_file()):
        return str(path.absolute())
    if path.exists() or not _HUB_ID.fullmatch(value):
        folder = "a folder with a tokenizer" if option == "tokenizer" else "a model's folder"
        allowed = [folder, "a hub id (NAME or ORGANISATION/NAME)", more]
        raise wrong_option(option, value, ", ".join(filter(None, allowed)))
    return value


def _cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "slipstream"


def _module(name: str, module: str, config: dict[str, Any], **traits: bool) -> ChildSpec:
    argv = (sys.executable, "-P", "-m", module)
    return ChildSpec(name, argv, msgspec.Raw(msgspec.json.encode(config)), **traits)
