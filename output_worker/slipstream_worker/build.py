"""Builds an output worker from its parts.

Independent of processes and signals, so that benchmarks and tests build the same worker within
their own process.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import zmq

from slipstream_ipc.messages import WANTS_LOAD, TokenizerReady
from slipstream_ipc.telemetry.trace import open_tracer
from slipstream_ipc.transport.codec import front_codec
from slipstream_ipc.transport.connections import Connections
from slipstream_ipc.transport.curve import load_server_keys
from slipstream_ipc.transport.link import WINDOW
from slipstream_ipc.transport.router import Router
from slipstream_ipc.transport.sockets import Listener, listen
from slipstream_worker.clients.ports import FrontAcceptor
from slipstream_worker.config import WorkerConfig
from slipstream_worker.core_link import CoreLink
from slipstream_worker.detokenizer.factory import (
    DetokenizerFactory,
    TableDetokenizerFactory,
    WindowDetokenizerFactory,
)
from slipstream_worker.detokenizer.table import load_table
from slipstream_worker.lifecycle.core_messages import AnswerForm
from slipstream_worker.request_spans import RequestSpans
from slipstream_worker.tokenizer.client import RenderSource
from slipstream_worker.worker import Worker

logger = logging.getLogger(__name__)


def assemble_worker(
    config: WorkerConfig,
    prompts: RenderSource,
    detokenizers: DetokenizerFactory,
    context: zmq.Context[zmq.Socket[bytes]],
    poller: zmq.Poller,
    connections: Connections | None = None,
    spans: RequestSpans | None = None,
    answers: AnswerForm | None = None,
) -> Worker:
    """A worker between `config.core_address` and `config.client_address`.

    connections: limits the number of its clients' connections. spans, answers: see
    `Worker`.

    Raises: ValueError, OSError or zmq.ZMQError if an address or its keys cannot be used.
    """
    at_most = {} if connections is None else {"max_local": connections.max_local}
    sockets = listen(
        context, config.client_address, _listener(config), connections=connections, **at_most
    )
    front: FrontAcceptor = Router(
        sockets.router,
        front_codec(),
        window=WINDOW,
        ping_after_s=config.client_timeout_s,
        dead_after_s=config.client_timeout_s,
        stalled_after_s=2 * config.client_timeout_s + config.grace_s,  # as a vanished client
        connections=connections,
        local=sockets.local,
    )
    core = CoreLink(
        context,
        config.core_address,
        poller,
        identity=b"worker-%d" % config.index,
        incarnation=config.incarnation,
        now=time.monotonic(),
        wants=0 if config.index else WANTS_LOAD,  # the first worker tells it for the stack
    )
    return Worker(
        config,
        core,
        sockets,
        front,
        prompts,
        detokenizers,
        poller,
        answers=answers,
        tracer=open_tracer(config.trace, "worker"),
        spans=spans,
    )


def _listener(config: WorkerConfig) -> Listener | None:
    if config.listen is None:
        return None
    keys = None if config.keys is None else load_server_keys(Path(config.keys))
    return Listener(config.listen, keys, config.insecure)


def detokenizers_from(ready: TokenizerReady) -> DetokenizerFactory:
    """The detokenisers of the compiled table, or of the tokenizer itself where it has no table."""
    if ready.table_path:
        table = load_table(Path(ready.table_path))
        return TableDetokenizerFactory(table, ready.delimiter_ids)
    logger.warning("text is detokenised without a token table, which is slower: %s", ready.why_not)
    as_json = Path(ready.tokenizer_path).read_bytes()
    return WindowDetokenizerFactory(as_json, ready.delimiter_ids)
