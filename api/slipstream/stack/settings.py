"""The settings of a stack: names, defaults, ranges and descriptions.

The Python API and the command line both take them from here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal, TypedDict

import msgspec
from msgspec import Meta, Struct, inspect

from slipstream.errors import wrong_option
from slipstream.stack.children.listeners import MAX_FRONTS


def _about(text: str) -> Meta:
    return Meta(description=text)


class StackSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a stack. Make one with `settings_from`, whose errors name the invalid option."""

    model: Annotated[
        str | None,
        _about(
            "a folder, a hub id, simulated:OPTION=VALUE,... or random:NAME; "
            "default: the bundled demo model"
        ),
    ] = None
    served_model_name: Annotated[
        str | None, _about("what clients are told that they talk to; default: MODEL as given")
    ] = None
    tokenizer: Annotated[
        str | None, _about("a folder or hub id, where it is not the model's own")
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        _about("what the model computes in; auto is float32 on a CPU, else the checkpoint's own"),
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"], _about("auto takes a GPU where there is one")
    ] = "auto"
    max_num_seqs: Annotated[int, Meta(ge=1), _about("requests that run at the same time")] = 256
    max_num_batched_tokens: Annotated[
        int, Meta(ge=1), _about("tokens of one step, over all requests")
    ] = 2048
    max_model_len: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        _about("tokens of prompt and output together; default: what the model allows"),
    ] = None
    max_waiting: Annotated[
        int, Meta(ge=1), _about("requests that may wait; more are turned away")
    ] = 16384
    max_waiting_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        _about("tokens of requests that may wait; default: what fits into 1/16 of memory"),
    ] = None
    max_logprobs: Annotated[
        int,
        Meta(ge=-1, le=2**31 - 1),
        _about("log-probabilities to a token that a request may have; -1: the whole vocabulary's"),
    ] = 20
    logprobs_gib: Annotated[
        float,
        Meta(gt=0),
        _about("GiB that all requests' log-probabilities may take in a process; others wait"),
    ] = 2.0
    kv_cache_gib: Annotated[
        float, Meta(gt=0), _about("memory of the key-value cache on the CPU, in GiB")
    ] = 1.0
    gpu_memory_utilization: Annotated[
        float,
        Meta(gt=0, lt=1),
        _about(
            "share of a GPU's memory that may be used in all, as in vLLM: what the model and its "
            "largest step leave of it is the cache's"
        ),
    ] = 0.9
    enforce_eager: Annotated[
        bool, _about("on a GPU: record no CUDA graphs, which makes small steps slower")
    ] = False
    cuda_graph_sizes: Annotated[
        tuple[Annotated[int, Meta(ge=1)], ...],
        Meta(max_length=1024),
        _about("numbers of requests to record decode steps for, in place of 1, 2, 4, 8, 16, 24, …"),
    ] = ()
    enable_prefix_caching: Annotated[
        bool, _about("compute equal beginnings of requests once, and keep them while there is room")
    ] = True
    num_blocks: Annotated[
        Annotated[int, Meta(ge=1)] | None, _about("blocks of the cache, in place of its memory")
    ] = None
    block_size: Annotated[int, Meta(ge=1, le=256), _about("tokens of one block of the cache")] = 16
    threads: Annotated[
        Annotated[int, Meta(ge=1)] | None, _about("threads that compute on the CPU")
    ] = None
    native: Annotated[
        bool,
        _about(
            "kernels of our own: on a GPU by Triton, on a CPU in float32 with a recorded forward"
        ),
    ] = True
    trust_remote_code: Annotated[
        bool, _about("let code from the model's folder run, with all that a program may do")
    ] = False
    stream_interval: Annotated[
        Annotated[int, Meta(ge=1)] | Literal["auto"],
        _about("tokens between two deltas of a stream, at least; auto: when its reader has room"),
    ] = "auto"
    client_timeout_s: Annotated[
        float, Meta(gt=0), _about("silence after which a client is asked whether it lives")
    ] = 5.0
    grace_s: Annotated[
        float, Meta(ge=0), _about("how long a stream goes on whose client has vanished")
    ] = 60.0
    hang_timeout_s: Annotated[
        float, Meta(ge=1), _about("silence after which a process counts as hung, and is replaced")
    ] = 10.0
    step_timeout_s: Annotated[
        float, Meta(gt=0), _about("how long a step may take before its device counts as stuck")
    ] = 600.0
    max_restarts: Annotated[
        int, Meta(ge=0), _about("of each process within restart_window_s; one more ends the stack")
    ] = 10
    restart_window_s: Annotated[
        float, Meta(gt=0), _about("the time that max_restarts is counted over")
    ] = 300.0
    spare_worker: Annotated[
        bool, _about("keep a second worker waiting, which takes over when the first one dies")
    ] = True
    spare_core: Annotated[
        bool, _about("keep a second core waiting, with its imports done and no model loaded")
    ] = True
    drain_s: Annotated[
        float, Meta(ge=0), _about("what runs may go on for so long after a signal to stop")
    ] = 10.0
    listen: Annotated[
        str | None,
        _about("tcp://HOST:PORT for clients on other machines, too; needs keys, or insecure"),
    ] = None
    keys: Annotated[
        str | None, _about("the folder of keys for listen; `slipstream keys` makes one")
    ] = None
    insecure: Annotated[
        bool, _about("let listen do without keys: open to every user of this machine, no others")
    ] = False
    http_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        _about(
            "of the OpenAI-compatible HTTP front; 0: any free one; `serve` takes 8000, others none"
        ),
    ] = None
    http_workers: Annotated[
        int, Meta(ge=1, le=MAX_FRONTS), _about("HTTP fronts: processes that share one port")
    ] = 1
    host: Annotated[
        str, _about("where the HTTP front listens; anything but loopback opens it to the network")
    ] = "127.0.0.1"
    api_key: Annotated[
        str | tuple[str, ...],
        _about("a key that HTTP clients may send; $SLIPSTREAM_API_KEY too; none: all are served"),
    ] = ()
    allowed_origins: Annotated[
        str | tuple[str, ...],
        _about("an origin (http://HOST:PORT) whose pages browsers may let read answers; *: any"),
    ] = ()
    allowed_hosts: Annotated[
        str | tuple[str, ...],
        _about(
            "a name (HOST, *.DOMAIN or *) that HTTP clients may call the server by, besides "
            "loopback's; none: any where it has a key or listens on the network, else loopback's"
        ),
    ] = ()
    uds: Annotated[
        str | None,
        _about("a path for a unix socket that the HTTP front listens at, in place of a port"),
    ] = None
    ssl_certfile: Annotated[
        str | None, _about("a certificate (PEM, with its chain): the HTTP front speaks TLS alone")
    ] = None
    ssl_keyfile: Annotated[
        str | None, _about("its private key (PEM), where ssl_certfile does not have it")
    ] = None
    access_log: Annotated[
        Literal["off", "text", "json"],
        _about("a line on standard error for each HTTP answer"),
    ] = "off"
    forwarded_allow_ips: Annotated[
        str | tuple[str, ...],
        _about(
            "a proxy (address, network, unix or *) whose X-Forwarded-For and X-Forwarded-Proto the "
            "access log believes"
        ),
    ] = ("127.0.0.1", "::1")
    trace: Annotated[
        str | None,
        _about("a file for a timeline of all processes (JSON for Perfetto), written at the end"),
    ] = None


class StackOptions(TypedDict, total=False):
    """The settings of a stack as keyword options, without the model. Lists may stand for tuples."""

    served_model_name: str | None
    tokenizer: str | None
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    device: Literal["auto", "cpu", "cuda"]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None
    max_waiting: int
    max_waiting_tokens: int | None
    max_logprobs: int
    logprobs_gib: float
    kv_cache_gib: float
    gpu_memory_utilization: float
    enforce_eager: bool
    cuda_graph_sizes: Sequence[int]
    enable_prefix_caching: bool
    num_blocks: int | None
    block_size: int
    threads: int | None
    native: bool
    trust_remote_code: bool
    stream_interval: int | Literal["auto"]
    client_timeout_s: float
    grace_s: float
    hang_timeout_s: float
    step_timeout_s: float
    max_restarts: int
    restart_window_s: float
    spare_worker: bool
    spare_core: bool
    drain_s: float
    listen: str | None
    keys: str | None
    insecure: bool
    http_port: int | None
    http_workers: int
    host: str
    api_key: str | Sequence[str]
    allowed_origins: str | Sequence[str]
    allowed_hosts: str | Sequence[str]
    uds: str | None
    ssl_certfile: str | None
    ssl_keyfile: str | None
    access_log: Literal["off", "text", "json"]
    forwarded_allow_ips: str | Sequence[str]
    trace: str | None


# for the stack of one command or batch: a spare would be ready no sooner than the answer, and
# preparing it takes CPU time from the model
SHORT_LIVED: StackOptions = {"spare_worker": False, "spare_core": False}

_FIELDS = {field.name: field for field in msgspec.structs.fields(StackSettings)}


def settings_from(options: Mapping[str, Any], *, from_text: bool = False) -> StackSettings:
    """Settings from keyword options, or from the strings of a command line (`from_text`).

    Raises: BadRequestError (a ValueError) with the option, its value and what is allowed.
    """
    for name, value in options.items():
        if name not in _FIELDS:
            raise wrong_option("option", name, "one of " + ", ".join(sorted(_FIELDS)))
        try:
            msgspec.convert(value, _FIELDS[name].type, strict=not from_text)
        except msgspec.ValidationError:
            raise wrong_option(name, value, allowed_values(name)) from None
    return msgspec.convert(dict(options), StackSettings, strict=not from_text)


@cache  # the command line reads each option once for each command
def _type_info(name: str) -> inspect.Type:
    return inspect.type_info(_FIELDS[name].type)


def description(name: str) -> str:
    """An option's description, for help texts."""
    info = _type_info(name)
    assert isinstance(info, inspect.Metadata), f"{name} lacks a description"
    assert info.extra_json_schema is not None
    return str(info.extra_json_schema["description"])


def allowed_values(name: str) -> str:
    """An option's allowed values, for help texts and errors."""
    return _allowed(_type_info(name))


def _allowed(info: inspect.Type) -> str:
    match info:
        case inspect.Metadata(type=inner):
            return _allowed(inner)
        case inspect.UnionType(types=types):
            return " or ".join(_allowed(one) for one in types)
        case inspect.LiteralType(values=values):
            names = ", ".join(str(value) for value in values)
            return f"one of {names}" if len(values) > 1 else names
        case inspect.IntType():
            return "an integer" + _bounds(info)
        case inspect.FloatType():
            return "a number" + _bounds(info)
        case inspect.VarTupleType(item_type=item):
            is_text = isinstance(item, inspect.StrType)
            return "a list of strings" if is_text else f"a list of: {_allowed(item)}"
        case inspect.BoolType():
            return "True or False"
        case inspect.NoneType():
            return "None"
        case _:
            return "a string"


def _bounds(info: inspect.IntType | inspect.FloatType) -> str:
    bounds = (("> ", info.gt), (">= ", info.ge), ("< ", info.lt), ("<= ", info.le))
    shown = " and ".join(f"{sign}{bound:g}" for sign, bound in bounds if bound is not None)
    return f" {shown}" if shown else ""
