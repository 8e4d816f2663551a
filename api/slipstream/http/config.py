"""What the front is told when it starts. Types alone.

Rules:
- API keys travel in this config, on a pipe; nothing writes them anywhere.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class Limits(Struct, frozen=True, forbid_unknown_fields=True):
    """What one connection may take, in bytes and seconds; and all of them together."""

    header_bytes: int = 64 * 1024  # of one request's line and headers
    headers: int = 128  # of one request
    body_bytes: int = 16 * 2**20  # of one request's body
    stray_body_bytes: int = 4096  # of a body that is dropped, as the method takes none
    ahead_bytes: int = 64 * 1024  # of requests sent ahead, before the rest is left unread
    write_buffer_bytes: int = 64 * 1024  # unsent, before a stream's chunks are held and merged
    requests_bytes: int = 256 * 2**20  # of all connections' requests that have not been begun
    held_bytes: int = 8 * 2**20  # held for a reader that does not read, before it is dropped
    idle_s: float = 75.0  # between two requests
    header_s: float = 15.0  # from a request's first byte to the end of its headers
    body_s: float = 120.0  # from there to the end of its body
    body_stall_s: float = 10.0  # in which nothing of its body comes
    stall_s: float = 60.0  # a reader may take nothing of a full buffer
    linger_s: float = 2.0  # a refused request's rest is read, so that its refusal arrives
    resume_s: float = 10.0  # streams run on for a client that left and may come back for the rest
    connections: int = 16_384  # at a time; fewer where there are not as many descriptors
    drain_s: float = 1.0  # at the end, until the last answers have left


class FrontConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the front's process.

    client_address: the worker's, where this process is a client. tokenizer: a folder or hub id.
    port: 0 takes any free one. timeout_s: how long a request waits for a worker that is away; six
    times that where the worker has accepted it.
    trace: the file that a timeline is to become; this process leaves its part beside it.
    """

    client_address: str
    tokenizer: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()  # none: whoever can connect may ask
    timeout_s: float = 10.0
    limits: Limits = Limits()
    trace: str | None = None
    allowed_origins: tuple[str, ...] = ()  # of pages that may read answers; see `cors`
    allowed_hosts: tuple[str, ...] = ()  # names that requests may call it by; see `hosts`
    uds: str | None = None  # a unix socket's path, in place of host and port
    ssl_certfile: str | None = None  # with it, every connection is TLS
    ssl_keyfile: str | None = None
    access_log: Literal["off", "text", "json"] = "off"
    forwarded_allow_ips: tuple[str, ...] = ("127.0.0.1", "::1")  # see `trusted_proxies`
