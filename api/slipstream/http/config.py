"""Settings of the front's process.

API keys are part of them: the config reaches the process through a pipe and is not written to disk.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class Limits(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits on one connection, and on all of them together."""

    header_bytes: int = 64 * 1024  # of one request's line and headers
    headers: int = 128  # of one request
    body_bytes: int = 16 * 2**20  # of one request's body
    stray_body_bytes: int = 4096  # of a body that is discarded, as the method takes none
    write_buffer_bytes: int = 64 * 1024  # unsent, before a stream's chunks are held and merged
    requests_bytes: int = 64 * 2**20  # of pending requests, over all connections
    held_bytes: int = 8 * 2**20  # held for a slow reader, before its connection is dropped
    idle_s: float = 75.0  # between two requests
    header_s: float = 15.0  # from a request's first byte to the end of its headers
    body_s: float = 120.0  # from there to the end of its body
    body_stall_s: float = 10.0  # between two pieces of its body
    stall_s: float = 60.0  # without a byte sent from a full write buffer
    linger_s: float = 2.0  # of reading on after a refusal, so that it is not lost
    resume_s: float = 10.0  # that streams run on after a client with event ids disconnects
    connections: int = 16_384  # at a time; fewer if file descriptors are scarce
    drain_s: float = 1.0  # at shutdown, for the last answers to be sent


class FrontConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the front's process.

    client_address: as of `Client`: a worker's client socket, or the members of a fleet. keys: for
    tcp:// addresses, a folder made by `slipstream keys`, or a client's secret file in it. insecure:
    connect to tcp:// on this machine without keys. is_router: whether its servers are started by
    others, and may come and go. tokenizer: a folder or a hub id; empty: the server's own.
    model_name: the model's name in metrics until the worker has told it. port: 0 picks a free one.
    timeout_s: how long a request waits for a disconnected worker; six times that once the worker
    has accepted it. hang_timeout_s: silence of the supervisor after which it counts as hung.
    trace: the path of the merged timeline; this process writes its part beside it.
    """

    client_address: str
    tokenizer: str
    model_name: str = ""
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()  # with none, and no file of them: no request needs a key
    api_key_file: str | None = None  # of more keys
    priority_key_file: str | None = None  # of those of them whose priority counts; see `ApiKeys`
    lora_key_file: str | None = None  # of those of them that may change adapters
    timeout_s: float = 10.0
    hang_timeout_s: float = 10.0
    limits: Limits = Limits()
    trace: str | None = None
    allowed_origins: tuple[str, ...] = ()  # of pages that may read answers; see `cors`
    allowed_hosts: tuple[str, ...] = ()  # accepted in the Host header; see `hosts`
    uds: str | None = None  # path of a unix socket, instead of host and port
    ssl_certfile: str | None = None  # if set, every connection is TLS
    ssl_keyfile: str | None = None
    strict_fields: bool = False  # refuse unknown fields of bodies; else ignore them
    metrics_prefix: str = "slipstream"
    strict_finish: bool = False  # a named function's call finishes with `stop`
    access_log: Literal["off", "text", "json"] = "off"
    forwarded_allow_ips: tuple[str, ...] = ("127.0.0.1", "::1")  # see `trusted_proxies`
    is_traced: bool = False  # whether the worker exports traces of requests
    keys: str | None = None
    insecure: bool = False
    is_router: bool = False
