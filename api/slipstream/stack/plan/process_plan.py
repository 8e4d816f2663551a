"""Turns the settings of a stack into the processes to start and their configs.

It resolves the model and the tokenizer, places the sockets and distributes the options. Processes
are known by module name and config fields only; tests check that both sides agree.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import msgspec
import psutil

from slipstream.client.endpoints import check_listener, client_address
from slipstream.client.placing.discovery import checked_members
from slipstream.demo_model import MODEL_NAME, MODEL_PATH
from slipstream.errors import bad_request, wrong_option
from slipstream.stack.children.process import ChildSpec
from slipstream.stack.children.roles import CORE, WORKER
from slipstream.stack.plan.adapters import lora_options
from slipstream.stack.plan.child_spec import child_spec
from slipstream.stack.plan.engine_options import VLLM, check_engine, engine_options, engine_python
from slipstream.stack.plan.front_plan import front_specs
from slipstream.stack.plan.log_level import check_log_level
from slipstream.stack.plan.models.gguf_folder import with_gguf_folder
from slipstream.stack.plan.models.model_options import core_model_options, worker_model_options
from slipstream.stack.plan.models.model_source import (
    RANDOM,
    has_ends,
    hub_environment,
    model_and_tokenizer,
    with_model_revision,
)
from slipstream.stack.plan.nodes import nodes_options
from slipstream.stack.plan.otlp_endpoint import checked_otlp_endpoint
from slipstream.stack.plan.speculation import speculative_options
from slipstream.stack.runtime_dir import cache_dir
from slipstream.stack.settings import StackSettings, passed_to
from slipstream.stack.supervisor_events import SupervisorConfig
from slipstream.tracing.part_files import checked_trace
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.formats.choose import check_format_names
from slipstream_ipc.messages import MAX_ALIASES, MAX_LABEL_CHARS
from slipstream_ipc.process import process_name
from slipstream_ipc.transport.addresses import TCP, check_server_address
from slipstream_ipc.transport.sockets import check_address
from slipstream_ipc.validation.simulated_model import SIMULATED
from slipstream_ipc.worker_deal import worker_address

CORE_SOCKET = "core.sock"
_INCARNATION_BITS = 48
_KV_CACHE_GIB = 1.0  # by default
_CARDS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # device files of their drivers
_FORKED = (  # in the order of their imports
    "slipstream_core.main",
    "slipstream_core.ranks.remote_follower",
    "slipstream_worker.main",
)
_CARD_DEFAULTS = ("max_num_seqs", "max_num_batched_tokens")


def plan_stack(
    settings: StackSettings,
    runtime_dir: Path,
    parent_pid: int | None = None,
    *,
    may_return: bool = True,
    replica: str = "",
    members: tuple[str, ...] = (),
) -> SupervisorConfig:
    """The supervisor's config. may_return: another stack may follow in `runtime_dir`. replica: the
    stack's name among replicas. members: the addresses of all of them, beside those in `settings`.

    Raises: BadRequestError for a model or tokenizer that is invalid or cannot be had, an invalid
    format, trace, listener, list of members, API key or log level, or a `runtime_dir` whose path is
    too long for a socket.
    """
    check_log_level()
    try:
        check_format_names(settings.tool_format, settings.reasoning_format)
    except BadRequest as error:
        raise bad_request(error) from None
    model, tokenizer = model_and_tokenizer(settings.model, settings.tokenizer)
    check_engine(settings, model)
    model, tokenizer = with_model_revision(settings, model, tokenizer)
    _check_cache(settings, model)
    if settings.tensor_parallel_size > 1 and model.startswith((SIMULATED, RANDOM)):
        given = settings.tensor_parallel_size
        raise wrong_option("tensor_parallel_size", given, f"1 with the model {model}")
    drafts = speculative_options(settings) or {}
    environment = hub_environment(settings, model, tokenizer, drafts.get("model"))
    address = client_address(runtime_dir)
    core_address = f"ipc://{runtime_dir / CORE_SOCKET}"
    trace = checked_trace(settings.trace)
    otlp_traces_endpoint = checked_otlp_endpoint(settings.otlp_traces_endpoint)
    nodes = nodes_options(settings)
    if settings.node_rank:
        allowed = "0, which serves; `slipstream serve` runs on the other machines"
        raise wrong_option("node_rank", settings.node_rank, allowed)
    keys = _check_listener(settings)
    if settings.listen is not None:
        _check_ports(settings.listen, settings.output_workers)
    try:
        check_address(worker_address(address, settings.output_workers - 1))
        check_address(core_address)
    except ValueError as error:
        raise wrong_option("runtime_dir", str(runtime_dir), "a shorter absolute path") from error
    model, tokenizer = with_gguf_folder(settings, model, tokenizer, environment)
    is_own = tokenizer == model or model.startswith(SIMULATED)  # whose options name theirs
    children = [
        child_spec(
            CORE,
            "slipstream_core.main",
            {
                **core_config(settings, model),
                "tokenizer": None if is_own else tokenizer,
                "address": core_address,
                "runtime_dir": str(runtime_dir),
                "trace": trace,
                "nodes": nodes,
            },
            has_spare=settings.spare_core,
            python=engine_python(settings),
        ),
        *_worker_specs(
            settings,
            {
                "tokenizer": tokenizer,
                "ends_at_eos": has_ends(model),
                "core_address": core_address,
                "runtime_dir": str(runtime_dir),
                "cache_dir": str(cache_dir(runtime_dir)),
                "keys": None if keys is None else str(keys),
                "insecure": settings.insecure,
                "may_return": may_return or settings.listen is not None,
                "replica": replica,
                "members": [*members, *_given_members(settings)],
                "stack_incarnation": secrets.randbits(_INCARNATION_BITS),
                "trace": trace,
                "otlp_traces_endpoint": otlp_traces_endpoint,
                **passed_to("worker", settings),
                **worker_model_options(settings),
            },
            address,
        ),
        *front_specs(
            settings,
            {
                "client_address": address,
                "tokenizer": tokenizer,
                "model_name": _model_name(settings),
                "trace": trace,
            },
        ),
    ]
    children = forked(children, settings.device, model, engine=settings.engine)
    config = supervisor_config(settings, children, address, runtime_dir, parent_pid)
    return msgspec.structs.replace(config, environment=environment)


def core_config(settings: StackSettings, model: str) -> dict[str, Any]:
    """A core's config but for its place in a stack."""
    return {
        "model": model,
        "served_model_name": _model_name(settings),
        "aliases": _served_names(settings)[1:],
        **_core_options(settings),
        **core_model_options(settings),
        **engine_options(settings),
        "speculative_config": speculative_options(settings),
        "lora": lora_options(settings, model, _all_names(settings)),
        "kv_cache_gib": _kv_cache_gib(settings),
        "touches_cache": _has_cache_size(settings),
        **(_demo_options(settings) if model == str(MODEL_PATH) else {}),
    }


def plan_fronts(
    settings: StackSettings,
    address: str,
    runtime_dir: Path,
    parent_pid: int | None = None,
    *,
    keys: str | None = None,
) -> SupervisorConfig:
    """The config of a supervisor of HTTP fronts alone, over servers that others start.

    Of the settings, those of HTTP and restarts count. address: of the servers, as `Client` takes
    it. runtime_dir: the supervisor's own. keys: for tcp:// addresses, as `Client` takes them.

    Raises: BadRequestError, as `plan_stack` does.
    """
    check_log_level()
    front = {
        "client_address": address,
        "tokenizer": settings.tokenizer or "",
        "model_name": next(iter(_served_names(settings)), ""),
        "keys": None if keys is None else os.path.abspath(keys),
        "insecure": settings.insecure,
        "is_router": True,
    }
    children = _forked_where_imported(front_specs(settings, front))
    return supervisor_config(settings, children, address, runtime_dir, parent_pid)


def supervisor_config(
    settings: StackSettings,
    children: list[ChildSpec],
    address: str,
    runtime_dir: Path,
    parent_pid: int | None = None,
) -> SupervisorConfig:
    """A supervisor of these children. address: where what it runs is reached."""
    return SupervisorConfig(
        tuple(children),
        address,
        str(runtime_dir),
        parent_pid,
        **passed_to("supervisor", settings),
        listen=None if settings.http_port is None else (settings.host, settings.http_port),
        uds=None if settings.uds is None else os.path.abspath(settings.uds),
    )


def _check_listener(settings: StackSettings) -> Path | None:
    """The folder of the keys of `listen`. Raises: BadRequestError."""
    if settings.listen is None and settings.nnodes > 1:
        return None  # they are for the other machines
    return check_listener(settings.listen, settings.keys, insecure=settings.insecure)


def _check_ports(listen: str, num_workers: int) -> None:
    """Check that every worker has a port. Raises: BadRequestError."""
    port = int(listen.rpartition(":")[2])
    if port + num_workers > 2**16:
        allowed = f"a port of at most {2**16 - num_workers} with output_workers={num_workers}"
        raise wrong_option("listen", listen, allowed)


def _worker_specs(settings: StackSettings, config: dict[str, Any], address: str) -> list[ChildSpec]:
    """The processes of the output workers. config: what all of them share; address: where clients
    connect to the first one.
    """
    num, listen = settings.output_workers, settings.listen
    return [
        child_spec(
            process_name(WORKER, index, num),
            "slipstream_worker.main",
            {
                **config,
                "index": index,
                "num_workers": num,
                "client_address": worker_address(address, index),
                "listen": None if listen is None else worker_address(listen, index),
                "response_store_mib": settings.response_store_mib / num,
            },
            has_spare=settings.spare_worker,
            drains=True,
        )
        for index in range(num)
    ]


def _core_options(settings: StackSettings) -> dict[str, Any]:
    """The core options that are set; the core knows the defaults of the others."""
    given = passed_to("core", settings)
    return {
        **{name: value for name, value in given.items() if value is not None},
        "card_defaults": [name for name in _CARD_DEFAULTS if given[name] is None],
    }


def _model_name(settings: StackSettings) -> str:
    """The model's name, as clients and metrics have it."""
    return next(iter(_served_names(settings)), None) or settings.model or MODEL_NAME


def _all_names(settings: StackSettings) -> tuple[str, ...]:
    """The names that clients may use for the model itself."""
    return _served_names(settings) or (_model_name(settings),)


def _served_names(settings: StackSettings) -> tuple[str, ...]:
    """The names that clients may use, if any are given. Raises: BadRequestError."""
    given = settings.served_model_name or ()
    names = tuple(dict.fromkeys([given] if isinstance(given, str) else given))
    if names and names[0].endswith("*"):
        raise wrong_option("served_model_name", names[0], "a first name without * at its end")
    for name in names:
        if not 1 <= len(name) <= MAX_LABEL_CHARS:
            allowed = f"names of 1 to {MAX_LABEL_CHARS} characters"
            raise wrong_option("served_model_name", name, allowed)
    if len(names) > MAX_ALIASES + 1:
        raise wrong_option("served_model_name", len(names), f"at most {MAX_ALIASES + 1} names")
    return names


def _given_members(settings: StackSettings) -> tuple[str, ...]:
    """The addresses of `members`. Raises: BadRequestError."""
    if settings.members is None:
        return ()
    given = [each.strip() for each in settings.members.split(",")]
    try:
        return checked_members(given, _check_member_form)
    except BadRequest as error:
        allowed = f"addresses separated by commas ({error})"
        raise wrong_option("members", settings.members, allowed) from None


def _check_member_form(address: str) -> None:
    check_server_address(address, has_keys=address.startswith(TCP), insecure=False)


def _check_cache(settings: StackSettings, model: str) -> None:
    """Refuse a cache that this machine can never hold. The core checks it beside the weights, and
    within the limits of control groups. Raises: BadRequestError.
    """
    size = settings.kv_cache_gib
    if size is None or settings.num_blocks is not None or settings.device == "cuda":
        return
    total_gib = psutil.virtual_memory().total / 2**30
    if size > total_gib and not model.startswith(SIMULATED):
        allowed = f"less than this machine's memory, {total_gib:.1f} GiB"
        raise wrong_option("kv_cache_gib", size, allowed)


def _kv_cache_gib(settings: StackSettings) -> float:
    return _KV_CACHE_GIB if settings.kv_cache_gib is None else settings.kv_cache_gib


def _has_cache_size(settings: StackSettings) -> bool:
    """True if the cache's memory was asked for, so that the core may take it before it is used."""
    return settings.kv_cache_gib is not None or settings.num_blocks is not None


def _demo_options(settings: StackSettings) -> dict[str, Any]:
    """The core's options that differ for the bundled demo model."""
    options: dict[str, Any] = {}
    if settings.dtype == "auto":
        # stored in bfloat16 only for its size; in float32 its output does not depend on the batch
        options["dtype"] = "float32"
    if settings.threads is None:
        options["threads"] = 1  # too small to gain from two threads that synchronise
    return options


def forked(
    children: list[ChildSpec], device: str, model: str, *, engine: str = "slipstream"
) -> list[ChildSpec]:
    """Return the children as forks of a process that has imported torch: not where a card might be
    used, whose driver does not survive a fork. With a simulated model it does not pay to import for
    them: they are forks only of a supervisor that has imported everything already. A core of
    vLLM's is never one, as its import starts threads and reads the environment.
    """
    if engine == VLLM:
        return [spec if spec.name == CORE else _forkable(spec) for spec in children]
    if model.startswith(SIMULATED):
        return _forked_where_imported(children)
    if device == "cuda":
        return children
    if device != "cpu" and any(map(os.path.exists, _CARDS)):
        return children
    return [_forkable(spec) for spec in children]


def _forked_where_imported(children: list[ChildSpec]) -> list[ChildSpec]:
    return [msgspec.structs.replace(spec, forks=spec.argv[-1]) for spec in children]


def _forkable(spec: ChildSpec) -> ChildSpec:
    module = spec.argv[-1]
    if module not in _FORKED:
        return spec
    return msgspec.structs.replace(spec, forks=module, preloads=True)
