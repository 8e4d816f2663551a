"""Turns the settings of a stack into the processes to start and their configs.

It resolves the model and the tokenizer, places the sockets and distributes the options. Processes
are known by module name and config fields only; tests check that both sides agree.
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import psutil

from slipstream.client.endpoints import check_listener, client_address
from slipstream.demo_model import MODEL_NAME, MODEL_PATH
from slipstream.errors import BadRequestError, bad_request, missing_option, wrong_option
from slipstream.stack.children.process import ChildSpec
from slipstream.stack.children.roles import CORE, WORKER
from slipstream.stack.events import SupervisorConfig
from slipstream.stack.log_level import check_log_level
from slipstream.stack.model_source import check_hub, folder_or_hub_id
from slipstream.stack.settings import StackSettings
from slipstream.tls import tls_context
from slipstream.tracing.part_files import checked_trace
from slipstream.trusted_proxies import TrustedProxies
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.formats.choose import check_format_names
from slipstream_ipc.messages import Fault
from slipstream_ipc.process import process_name, role_of
from slipstream_ipc.transport.sockets import check_address
from slipstream_ipc.validation.simulated_model import SIMULATED, parse_simulated
from slipstream_ipc.worker_deal import worker_address

API_KEY_VARIABLE = "SLIPSTREAM_API_KEY"
CORE_SOCKET = "core.sock"
FRONT = "http"  # the role of the HTTP fronts
_INCARNATION_BITS = 48
_KEYS = "printable ASCII without spaces, not empty"
RANDOM = "random:"

_TOKENIZER = "tokenizer="
_ANSWERS = "answers="
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9][\w.-]*", re.ASCII)
_ORIGIN = re.compile(r"https?://[A-Za-z0-9.\[\]:-]+")
_OTLP_PATH = "/v1/traces"
_OTEL = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")
_CARDS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # device files of their drivers
_FORKED = ("slipstream_core.main", "slipstream_worker.main")  # in the order of their imports
_CORE_OPTIONS = (
    "dtype",
    "device",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "block_size",
    "kv_cache_gib",
    "gpu_memory_utilization",
    "enforce_eager",
    "cuda_graph_sizes",
    "enable_prefix_caching",
    "num_blocks",
    "threads",
    "native",
    "max_waiting",
    "max_waiting_tokens",
    "max_logprobs",
    "logprobs_gib",
    "response_store_mib",
    "step_timeout_s",
    "trust_remote_code",
)
_WORKER_OPTIONS = (
    "stream_interval",
    "client_timeout_s",
    "grace_s",
    "hang_timeout_s",
    "trust_remote_code",
    "tool_format",
    "reasoning_format",
)


def plan_stack(
    settings: StackSettings,
    runtime_dir: Path,
    parent_pid: int | None = None,
    *,
    may_return: bool = True,
    replica: str = "",
) -> SupervisorConfig:
    """The supervisor's config. may_return: another stack may follow in `runtime_dir`. replica: the
    stack's name among replicas.

    Raises: BadRequestError for a model or tokenizer that is invalid or cannot be had, an invalid
    format, trace, listener, API key or log level, or a `runtime_dir` whose path is too long for a
    socket.
    """
    check_log_level()
    try:
        check_format_names(settings.tool_format, settings.reasoning_format)
    except BadRequest as error:
        raise bad_request(error) from None
    model, tokenizer = model_and_tokenizer(settings.model, settings.tokenizer)
    _check_cache(settings, model)
    for option, value in (("model", model), ("tokenizer", tokenizer)):
        if not value.startswith((SIMULATED, RANDOM, "/")):
            check_hub(option, value)
    address = client_address(runtime_dir)
    core_address = f"ipc://{runtime_dir / CORE_SOCKET}"
    trace = checked_trace(settings.trace)
    otlp_traces_endpoint = checked_otlp_endpoint(settings.otlp_traces_endpoint)
    keys = check_listener(settings.listen, settings.keys, insecure=settings.insecure)
    if settings.listen is not None:
        _check_ports(settings.listen, settings.output_workers)
    try:
        check_address(worker_address(address, settings.output_workers - 1))
        check_address(core_address)
    except ValueError as error:
        raise wrong_option("runtime_dir", str(runtime_dir), "a shorter absolute path") from error
    children = [
        _child_spec(
            CORE,
            "slipstream_core.main",
            {
                "model": model,
                "served_model_name": _model_name(settings),
                "address": core_address,
                "runtime_dir": str(runtime_dir),
                "trace": trace,
                **{name: getattr(settings, name) for name in _CORE_OPTIONS},
                **(_demo_options(settings) if model == str(MODEL_PATH) else {}),
            },
            has_spare=settings.spare_core,
        ),
        *_worker_specs(
            settings,
            {
                "tokenizer": tokenizer,
                "core_address": core_address,
                "runtime_dir": str(runtime_dir),
                "cache_dir": str(cache_dir(runtime_dir)),
                "keys": None if keys is None else str(keys),
                "insecure": settings.insecure,
                "may_return": may_return or settings.listen is not None,
                "replica": replica,
                "stack_incarnation": secrets.randbits(_INCARNATION_BITS),
                "trace": trace,
                "otlp_traces_endpoint": otlp_traces_endpoint,
                **{name: getattr(settings, name) for name in _WORKER_OPTIONS},
            },
            address,
        ),
        *_front_specs(
            settings,
            {
                "client_address": address,
                "tokenizer": tokenizer,
                "model_name": _model_name(settings),
                "trace": trace,
            },
        ),
    ]
    if may_fork(settings.device, model):
        children = [_forkable(spec) for spec in children]
    return _supervisor_config(settings, children, address, runtime_dir, parent_pid)


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
        "model_name": settings.served_model_name or "",
        "keys": None if keys is None else os.path.abspath(keys),
        "insecure": settings.insecure,
        "is_router": True,
    }
    children = _front_specs(settings, front)
    return _supervisor_config(settings, children, address, runtime_dir, parent_pid)


def _supervisor_config(
    settings: StackSettings,
    children: list[ChildSpec],
    address: str,
    runtime_dir: Path,
    parent_pid: int | None,
) -> SupervisorConfig:
    return SupervisorConfig(
        tuple(children),
        address,
        str(runtime_dir),
        parent_pid,
        hang_timeout_s=settings.hang_timeout_s,
        max_restarts=settings.max_restarts,
        restart_window_s=settings.restart_window_s,
        drain_s=settings.drain_s,
        log_stats_interval_s=settings.log_stats_interval_s,
        listen=None if settings.http_port is None else (settings.host, settings.http_port),
        uds=None if settings.uds is None else os.path.abspath(settings.uds),
    )


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
        _child_spec(
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


def _model_name(settings: StackSettings) -> str:
    """The model's name, as clients and metrics have it."""
    return settings.served_model_name or settings.model or MODEL_NAME


def _check_cache(settings: StackSettings, model: str) -> None:
    """Refuse a cache that this machine can never hold. The core checks it beside the weights, and
    within the limits of control groups. Raises: BadRequestError.
    """
    if settings.num_blocks is not None or settings.device == "cuda" or model.startswith(SIMULATED):
        return
    total_gib = psutil.virtual_memory().total / 2**30
    if settings.kv_cache_gib > total_gib:
        allowed = f"less than this machine's memory, {total_gib:.1f} GiB"
        raise wrong_option("kv_cache_gib", settings.kv_cache_gib, allowed)


def _demo_options(settings: StackSettings) -> dict[str, Any]:
    """The core's options that differ for the bundled demo model."""
    options: dict[str, Any] = {}
    if settings.dtype == "auto":
        # stored in bfloat16 only for its size; in float32 its output does not depend on the batch
        options["dtype"] = "float32"
    if settings.threads is None:
        options["threads"] = 1  # too small to gain from two threads that synchronise
    return options


def _front_specs(settings: StackSettings, front: dict[str, Any]) -> list[ChildSpec]:
    """The processes of the HTTP fronts. front: what their server is. Raises: BadRequestError."""
    if settings.http_port is None and settings.uds is None:
        if settings.http_workers > 1:
            allowed = "1 without http_port and uds"
            raise wrong_option("http_workers", settings.http_workers, allowed)
        for name in ("ssl_certfile", "ssl_keyfile"):
            if (value := getattr(settings, name)) is not None:
                raise wrong_option(name, value, "None without http_port and uds")
        return []
    if settings.http_port is not None and settings.uds is not None:
        raise wrong_option(
            "uds", settings.uds, "None with http_port: a front listens at one of them"
        )
    certfile, keyfile = _certificates(settings)
    config = {
        **front,
        "host": settings.host,
        "port": settings.http_port or 0,
        "api_keys": api_keys(settings),
        "hang_timeout_s": settings.hang_timeout_s,
        "allowed_origins": allowed_origins(settings),
        "allowed_hosts": allowed_hosts(settings),
        "uds": None if settings.uds is None else os.path.abspath(settings.uds),
        "ssl_certfile": certfile,
        "ssl_keyfile": keyfile,
        "access_log": settings.access_log,
        "forwarded_allow_ips": forwarded_allow_ips(settings),
        "strict_fields": settings.strict_fields,
        "strict_finish": settings.openai_strict_finish,
        "is_traced": settings.otlp_traces_endpoint is not None,
    }
    return [
        _child_spec(
            name,
            "slipstream.http.main",
            config,
            drains=True,
            receives_condition=True,
            front_index=front_index,
        )
        for front_index, name in enumerate(front_names(settings.http_workers))
    ]


def _certificates(settings: StackSettings) -> tuple[str | None, str | None]:
    """The fronts' certificate and key files, read once as a check. Raises: BadRequestError."""
    certfile, keyfile = settings.ssl_certfile, settings.ssl_keyfile
    if certfile is None:
        if keyfile is not None:
            raise wrong_option("ssl_keyfile", keyfile, "None without ssl_certfile")
        return None, None
    files = [None if each is None else os.path.abspath(each) for each in (certfile, keyfile)]
    assert files[0] is not None
    try:
        tls_context(files[0], files[1])
    except OSError as error:
        what = f"a certificate in PEM and its key in ssl_keyfile, unencrypted ({error})"
        raise wrong_option("ssl_certfile", certfile, what) from None
    return files[0], files[1]


def forwarded_allow_ips(settings: StackSettings) -> tuple[str, ...]:
    """The checked list of trusted proxies. Raises: BadRequestError."""
    given = settings.forwarded_allow_ips
    found = (given,) if isinstance(given, str) else given
    names = tuple(each.strip() for one in found for each in one.split(","))
    try:
        TrustedProxies(names)
    except ValueError:
        allowed = "addresses, networks (10.0.0.0/8), unix, or *"
        raise wrong_option("forwarded_allow_ips", given, allowed) from None
    return names


def checked_otlp_endpoint(given: str | None) -> str | None:
    """The URL that traces are sent to; one without a path gets OTLP's. Raises: BadRequestError."""
    if given is None:
        return None
    option = "otlp_traces_endpoint"
    try:
        url = urlsplit(given)
        is_url = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # of the port or the brackets of an address
        is_url = False
    if not is_url or url.username is not None or url.query or url.fragment:
        allowed = (
            "http(s)://HOST[:PORT][/PATH] without a user (OTEL_EXPORTER_OTLP_HEADERS has keys)"
        )
        raise wrong_option(option, _without_user(given), allowed)
    if not all(map(_is_installed, _OTEL)):
        allowed = "None without the OpenTelemetry SDK: pip install 'slipstream[otel]'"
        raise wrong_option(option, given, allowed)
    return given if url.path.strip("/") else given.rstrip("/") + _OTLP_PATH


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent
        return False


def _without_user(url: str) -> str:
    scheme, _, rest = url.rpartition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}" if scheme else rest.rpartition("@")[2]


def front_names(number: int) -> list[str]:
    """The process names of the fronts."""
    return [process_name(FRONT, index, number) for index in range(number)]


def is_front(name: str) -> bool:
    """Whether this is the process name of a front."""
    return role_of(name) == FRONT


def api_keys(settings: StackSettings) -> tuple[str, ...]:
    """All valid API keys: the given ones, those in the file, and $SLIPSTREAM_API_KEY.

    Raises: BadRequestError, without a key.
    """
    given = (settings.api_key,) if isinstance(settings.api_key, str) else settings.api_key
    if not all(map(_is_key, given)):
        raise wrong_option("api_key", given, _KEYS)
    in_file = () if settings.api_key_file is None else _keys_in(settings.api_key_file)
    from_environment = os.environ.get(API_KEY_VARIABLE) or None
    if from_environment is None:
        return (*given, *in_file)
    if not _is_key(from_environment):
        raise wrong_option(f"${API_KEY_VARIABLE}", "(not shown)", _KEYS)
    return (*given, *in_file, from_environment)


def _keys_in(path: str) -> tuple[str, ...]:
    """The keys in a file, which has one on each line. Raises: BadRequestError."""
    try:
        lines = Path(path).read_bytes().decode("ascii", "replace").splitlines()
    except OSError as error:
        allowed = f"a file that can be read ({error.strerror})"
        raise wrong_option("api_key_file", path, allowed) from None
    for number, line in enumerate(lines, start=1):
        if line.strip() and not _is_key(line):
            raise wrong_option("api_key_file", path, f"a key on each line: {_KEYS} (line {number})")
    keys = tuple(line for line in lines if line.strip())
    if not keys:
        raise wrong_option("api_key_file", path, "a file with at least one key")
    return keys


def _is_key(text: str) -> bool:
    return bool(text) and text.isascii() and text.isprintable() and " " not in text


def allowed_origins(settings: StackSettings) -> tuple[str, ...]:
    """The checked origins whose pages may read a front's answers. Raises: BadRequestError."""
    given = settings.allowed_origins
    origins = (given,) if isinstance(given, str) else given
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise wrong_option("allowed_origins", origin, "http(s)://HOST[:PORT], or *")
    return origins


def allowed_hosts(settings: StackSettings) -> tuple[str, ...]:
    """The checked host names by which HTTP clients may address a front. Raises: BadRequestError."""
    given = settings.allowed_hosts
    hosts = (given,) if isinstance(given, str) else given
    for host in hosts:
        if host != "*" and not _HOST.fullmatch(host) and not _is_address(host):
            raise wrong_option("allowed_hosts", host, "HOST or *.DOMAIN without a port, or *")
    return hosts


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def model_and_tokenizer(model: str | None, tokenizer: str | None) -> tuple[str, str]:
    """The model that the core loads, and the tokenizer that the worker loads.

    A folder becomes its absolute path, and a simulated model gets the tokenizer that it plays back.
    A model of random weights (`random:NAME`) requires `tokenizer`.

    Raises: BadRequestError.
    """
    if model is None or model == MODEL_NAME:
        found = str(MODEL_PATH)
    elif f"{model}:".startswith(SIMULATED):
        return _simulated(f"{model}:" if ":" not in model else model, tokenizer)
    elif model.startswith(RANDOM):
        if tokenizer is None:
            why = "a model of random weights has none; give a folder or a hub id"
            raise missing_option("tokenizer", why)
        found = model
    else:
        found = folder_or_hub_id("model", model, f"{SIMULATED}OPTION=VALUE,... or {RANDOM}NAME")
    if tokenizer is None:
        return found, found
    return found, folder_or_hub_id("tokenizer", tokenizer)


def _simulated(model: str, tokenizer: str | None) -> tuple[str, str]:
    options = [option for option in model.removeprefix(SIMULATED).split(",") if option]
    own = [option for option in options if option.startswith(_TOKENIZER)]
    if own and tokenizer is not None:
        allowed = f"None, as {model!r} names a tokenizer"
        raise wrong_option("tokenizer", tokenizer, allowed)
    given = own[0].removeprefix(_TOKENIZER) if own else tokenizer
    path = Path(MODEL_PATH if given is None else given).expanduser().absolute()
    if not path.exists() or "," in str(path):
        allowed = "an existing tokenizer.json, or a folder with one, without a comma in its path"
        raise wrong_option("tokenizer", given, allowed)
    others = []
    for option in options:
        if option.startswith(_ANSWERS):
            answers = Path(option.removeprefix(_ANSWERS)).expanduser().absolute()
            if not answers.is_file() or "," in str(answers):
                allowed = "an existing file of JSON lines, without a comma in its path"
                raise wrong_option("answers", option.removeprefix(_ANSWERS), allowed)
            others.append(f"{_ANSWERS}{answers}")
        elif not option.startswith(_TOKENIZER):
            others.append(option)
    played = SIMULATED + ",".join([*others, f"{_TOKENIZER}{path}"])
    try:
        parse_simulated(played)
    except ValueError as error:
        message = str(error).replace(played, model)
        raise BadRequestError(Fault("bad_request", f"model: {message}", "model")) from None
    return played, str(path.parent if path.is_file() else path)


def cache_dir(runtime_dir: Path) -> Path:
    """The folder where compiled token tables are cached; made here.

    Containers often have no home, or one that is not writable: then the cache is a folder beside
    the sockets, and tables are compiled again in each new runtime directory.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(base) if base else Path.home() / ".cache") / "slipstream"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: the user has no home
        pass
    return runtime_dir / "cache"


def may_fork(device: str, model: str) -> bool:
    """Whether a stack's processes may be forks of one that has imported torch: not where a card
    might be used, whose driver does not survive a fork. With a simulated model it does not pay.
    """
    if device == "cuda" or model.startswith(SIMULATED):
        return False
    return device == "cpu" or not any(map(os.path.exists, _CARDS))


def _forkable(spec: ChildSpec) -> ChildSpec:
    module = spec.argv[-1]
    return msgspec.structs.replace(spec, forks=module) if module in _FORKED else spec


def _child_spec(name: str, module: str, config: dict[str, Any], **traits: Any) -> ChildSpec:
    argv = (sys.executable, "-P", "-m", module)
    return ChildSpec(name, argv, msgspec.Raw(msgspec.json.encode(config)), **traits)
