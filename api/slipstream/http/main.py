"""The front's process: start-up, loop, shutdown.

It listens at once, so that /health answers and /ready says that it is too early; it reports ready
when the worker has answered.
"""

from __future__ import annotations

import asyncio
import gc
import logging

import uvloop

from slipstream.endpoints import http_address, http_detail
from slipstream.errors import ConnectionLostError, SlipstreamError
from slipstream.http.app import App
from slipstream.http.auth import Keys
from slipstream.http.config import FrontConfig
from slipstream.http.server import Server
from slipstream.http.token_texts import TokenTexts
from slipstream.loop_io import LoopIO
from slipstream_ipc.child import StopSignal, report, start_child
from slipstream_ipc.messages import Status

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_logger = logging.getLogger(__name__)


def main() -> int:
    """Run until SIGTERM. Exit code 0, or 1 where the address cannot be listened at."""
    config, stop = start_child("http", FrontConfig)
    return uvloop.run(_serve(config, stop))


async def _serve(config: FrontConfig, stop: StopSignal) -> int:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_reader(stop.fileno(), stopped.set)
    io = LoopIO(config.client_address, config.timeout_s)
    app = App(io, Keys(config.api_keys), TokenTexts(config.tokenizer), config.limits.held_bytes)
    server = Server(app, config.limits)
    try:
        try:
            port = await server.listen(config.host, config.port)
        except OSError as error:
            where = http_address(config.host, config.port)
            report(Status(error=f"cannot listen at {where}: {error} (http_port chooses another)"))
            return 1
        if not config.api_keys and config.host not in _LOOPBACK:
            _logger.warning("listening on %s without an API key: anybody may ask", config.host)
        ready = asyncio.ensure_future(_report_ready(io, http_detail(config.host, port)))
        await stopped.wait()
        ready.cancel()
    finally:
        server.stop_listening()
        await io.close()
        await server.close()
    return 0


async def _report_ready(io: LoopIO, detail: str) -> None:
    """When the worker is there, however long the model takes to load."""
    while io.model is None:
        try:
            await io.connect()
        except ConnectionLostError:
            continue
        except SlipstreamError as error:
            report(Status(error=str(error)))
            return
    # what is loaded stays: the collector need not look at it again
    gc.collect()
    gc.freeze()
    report(Status(ready=True, detail=detail))


if __name__ == "__main__":
    raise SystemExit(main())
