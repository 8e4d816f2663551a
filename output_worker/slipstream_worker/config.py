"""The worker's configuration object, validated when it is decoded."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct


class WorkerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one output worker. Unknown names and values out of range raise ValidationError.

    stream_interval: minimum number of tokens between two deltas of a stream; "auto" sends a delta
    when few of its reader's messages are unacknowledged.
    grace_s: how long an ended stream can still be read, and how long a stream continues after its
    client has vanished.
    response_store_mib: what answers that are kept after their streams may take; 0 keeps none.
    client_timeout_s: silence after which a client is pinged; after as long again it counts as gone.
    hang_timeout_s: silence after which the tokenizer process counts as hung.
    index, num_workers: which one this is of the stack's output workers.
    trace: file that the timeline will be written to; this process leaves its part beside it.
    tool_format, reasoning_format: names in the table of formats, "none", or None for the one that
    the model's chat template tells.
    chat_template: in place of the tokenizer's own. default_chat_template_kwargs: its variables
    where a request sets none.
    ends_at_eos: answers end at the end tokens of tokenizer and chat template beside the model's.
    listen: a tcp:// address to accept clients on as well.
    keys: folder of the CURVE keys for `listen`.
    insecure: `listen` has no keys; only for an address on this machine.
    otlp_traces_endpoint: the URL where a collector takes traces of requests; None exports none.
    predecessor_ended_s: when the worker before this one ended (CLOCK_MONOTONIC); 0.0: there was
    none.
    replica: the stack's name among replicas, the same after a restart; empty: it has none.
    members: addresses of all replicas, for clients that know one of them.
    stack_incarnation: another one after each start of the stack.
    share_prefix_cache: whether tenants that are named in requests share cached prompts.
    may_return: another stack may start at these addresses after this one has stopped, so clients
    are told to wait for it.
    """

    tokenizer: str  # a folder or a hub id
    client_address: str  # ipc:// endpoint that clients connect to
    core_address: str  # ipc:// endpoint of the core
    runtime_dir: str  # private folder for the worker's own sockets
    cache_dir: str  # compiled token tables are kept here
    index: Annotated[int, Meta(ge=0)] = 0
    num_workers: Annotated[int, Meta(ge=1)] = 1
    incarnation: Annotated[int, Meta(ge=0)] = 0
    replica: Annotated[str, Meta(pattern=r"^[!-~]{0,64}$")] = ""
    members: tuple[str, ...] = ()
    stack_incarnation: Annotated[int, Meta(ge=0)] = 0
    stream_interval: Annotated[int, Meta(ge=1)] | Literal["auto"] = "auto"
    client_timeout_s: Annotated[float, Meta(gt=0)] = 5.0
    grace_s: Annotated[float, Meta(ge=0)] = 60.0
    response_store_mib: Annotated[float, Meta(ge=0)] = 64.0
    hang_timeout_s: Annotated[float, Meta(gt=0)] = 10.0
    trust_remote_code: bool = False
    tool_format: str | None = None
    reasoning_format: str | None = None
    chat_template: str | None = None
    default_chat_template_kwargs: dict[str, Any] = {}
    ends_at_eos: bool = True
    trace: str | None = None
    listen: str | None = None
    keys: str | None = None
    insecure: bool = False
    may_return: bool = False
    share_prefix_cache: bool = False
    otlp_traces_endpoint: str | None = None
    predecessor_ended_s: Annotated[float, Meta(ge=0)] = 0.0
