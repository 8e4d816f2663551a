"""The process of the HTTP front: start-up, event loop, drain, shutdown.

- The front listens at once, so /health answers while the model loads and /ready returns 503. It
  reports ready once the worker has answered. Requests wait for that where the front replaces
  another and the engine has served before.
- It accepts connections on the sockets inherited from its parent, and binds its own only if there
  are none.
- While draining, /health and /ready say so and no stream begins. The drain is complete once the
  running answers have been sent.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from functools import partial
from typing import Any

import uvloop

from slipstream.client.connection.loop_io import LoopIO
from slipstream.client.endpoints import (
    ServerEndpoint,
    http_address,
    http_detail,
    server_endpoint,
)
from slipstream.client.placing.discovery import names_fleet
from slipstream.errors import ConnectionLostError, SlipstreamError
from slipstream.http.app import App
from slipstream.http.config import FrontConfig
from slipstream.http.counters import with_router
from slipstream.http.credentials import Credentials
from slipstream.http.endpoints.model_endpoints import ModelEndpoints
from slipstream.http.logprobs.vocabulary import TextsByModel
from slipstream.http.planning.served_model import tokenizer_of
from slipstream.http.server.access_log import AccessLog, access_logger
from slipstream.http.server.cors import Cors
from slipstream.http.server.hosts import hosts_of
from slipstream.http.server.server import Server
from slipstream.loopback import is_loopback
from slipstream.stack.children.listeners import Listeners
from slipstream.trusted_proxies import TrustedProxies
from slipstream_ipc.messages import Status
from slipstream_ipc.process import (
    BEAT_S,
    Beats,
    Condition,
    Drain,
    ParentCommands,
    Reload,
    StopSignal,
    freeze_gc,
    next_multiple,
    report,
    run_child,
    start_child,
    wait_for_activation,
)
from slipstream_ipc.telemetry.statistics import FrontNumbers, Statistics
from slipstream_ipc.telemetry.trace import open_tracer
from slipstream_ipc.transport.addresses import IPC

# Allocations between two collections. Requests and connections leave no cycles behind, but hundreds
# of requests at once are many young objects: at the default of 700, scanning them and everything
# that older collections scan took a sixth of a short request's time.
_YOUNG_OBJECTS = 10_000  # decision 023
_NAME = "http"  # in logs and timelines
_logger = logging.getLogger(__name__)


def main() -> int:
    """Run until SIGTERM. Returns 0, or 1 if an address, a key or the certificate cannot be used."""
    config, stop = start_child(_NAME, FrontConfig)
    commands, beats = ParentCommands(), Beats()
    listeners = Listeners.inherited()
    if wait_for_activation(commands, stop, beats) is None:
        return 0
    if listeners is None:
        try:
            if config.uds is not None:
                listeners = Listeners.at_path(config.uds)
            else:
                listeners = Listeners.at(config.host, config.port)
        except OSError as error:
            where = http_address(config.host, config.port, uds=config.uds)
            option = "http_port" if config.uds is None else "uds"
            report(Status(error=f"cannot listen at {where}: {error} ({option} sets another)"))
            return 1
    try:
        credentials = Credentials(config)
    except OSError as error:
        why = f"ssl_certfile: {config.ssl_certfile}: {error}"
        report(Status(error=why, is_misconfigured=True))
        return 1
    except SlipstreamError as error:
        report(Status(error=str(error), is_misconfigured=True))
        return 1
    try:
        endpoint = _endpoint(config)
    except SlipstreamError as error:
        report(Status(error=str(error), is_misconfigured=True))
        return 1
    return uvloop.run(_serve(config, endpoint, listeners, credentials, stop, commands, beats))


def _endpoint(config: FrontConfig) -> ServerEndpoint:
    """The endpoint that the front connects to. Raises: BadRequestError, ConnectionLostError."""
    if config.client_address.startswith(IPC) and not names_fleet(config.client_address):
        return ServerEndpoint(config.client_address)  # its folder is the parent's concern
    return server_endpoint(config.client_address, config.keys, insecure=config.insecure)


async def _serve(
    config: FrontConfig,
    endpoint: ServerEndpoint,
    listeners: Listeners,
    credentials: Credentials,
    stop: StopSignal,
    commands: ParentCommands,
    beats: Beats,
) -> int:
    stopped, drain_requested = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_command() -> None:
        for command in commands.read():
            app.health.note_report(time.monotonic())
            if isinstance(command, Drain):
                drain_requested.set()
            elif isinstance(command, Condition):
                app.health.processes = command.processes
            elif isinstance(command, Reload):
                credentials.look(is_asked=True)
            elif isinstance(command, Statistics):
                app.statistics = command
                app.live.add(command)

    def numbers() -> FrontNumbers:
        return with_router(server.numbers(), io.cluster.counters)

    def beat() -> None:
        beats.beat(time.monotonic(), numbers)
        credentials.look()
        loop.call_at(next_multiple(loop.time(), BEAT_S), beat)

    io = LoopIO(
        endpoint.address,
        config.timeout_s,
        open_tracer(config.trace, _NAME),
        access=endpoint.access,
        outlives_server=config.is_router,
    )
    has_keys = bool(config.api_keys) or config.api_key_file is not None
    cors = Cors(config.allowed_origins)
    hosts = hosts_of(
        config.host if config.uds is None else "",  # no browser reaches a unix socket
        has_keys=has_keys,
        allowed=config.allowed_hosts,
        origins=config.allowed_origins,
    )
    endpoints = ModelEndpoints(
        io,
        credentials.keys,
        TextsByModel(partial(tokenizer_of, io, config.tokenizer)),
        config.limits,
        is_traced=config.is_traced,
        strict_fields=config.strict_fields,
        strict_finish=config.strict_finish,
    )
    app = App(
        io,
        credentials.keys,
        endpoints,
        cors,
        hosts,
        config.model_name,
        config.hang_timeout_s,
        metrics_prefix=config.metrics_prefix,
    )
    options: dict[str, Any] = {}
    if config.access_log != "off":
        trusted = TrustedProxies(config.forwarded_allow_ips)
        options["access_log"] = access_logger(_NAME, config.access_log)
        options["access_log_class"] = partial(AccessLog, trusted=trusted)
        options["access_log_format"] = config.access_log
    server = Server(app, config.limits, credentials.tls, **options)
    credentials.on_certificate(server.use_tls)
    loop.add_reader(stop.fileno(), stopped.set)
    loop.add_reader(commands.fileno(), on_command)
    on_command()  # commands that came with the activation
    beat()
    try:
        port = listeners.port or config.port  # None for a unix socket, or once closed
        where = http_address(config.host, port, uds=config.uds, has_tls=credentials.tls is not None)
        server.listen(listeners)
        is_local = config.uds is not None or is_loopback(config.host)
        if not has_keys and not is_local:
            _logger.warning(
                "listening on %s without an API key: every client that reaches it is served",
                config.host,
            )
        others = [
            asyncio.ensure_future(_report_ready(io, server, http_detail(where))),
            asyncio.ensure_future(_drain(server, drain_requested)),
        ]
        await stopped.wait()
        for other in others:
            other.cancel()
    finally:
        server.stop_listening()
        await io.close()
        await server.close()
    return 0


async def _drain(server: Server, requested: asyncio.Event) -> None:
    """On the command to drain: let the running answers finish, begin nothing else."""
    await requested.wait()
    await server.drain()
    report(Status(drained=True))


async def _report_ready(io: LoopIO, server: Server, detail: str) -> None:
    """Report ready once the worker has answered, however long the model takes to load."""
    while not io.models:
        try:
            await io.connect()
        except ConnectionLostError:
            server.begin_waiting()  # they are refused: they have waited long enough
        except SlipstreamError as error:
            report(Status(error=str(error)))
            return
    server.begin_waiting()
    freeze_gc()
    gc.set_threshold(_YOUNG_OBJECTS)
    report(Status(ready=True, detail=detail))


if __name__ == "__main__":
    run_child(main)
