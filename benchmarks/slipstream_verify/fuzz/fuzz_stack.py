"""A stack in one thread: a real worker and a real core on the simulated model, over real sockets.

- No exception is caught here: one that leaves a loop is what the benchmark looks for.
- Errors that a component logs with a traceback are kept and reported. Protocol errors are not,
  unless the worker reports one of the core, which is honest.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import zmq
from tokenizers import Tokenizer

from slipstream.demo_model import MODEL_PATH
from slipstream_core.config import CoreConfig
from slipstream_core.engine.build import assemble_core
from slipstream_core.runner.factory import load_runner
from slipstream_ipc.columns import pack_u32
from slipstream_ipc.errors import ProtocolError
from slipstream_ipc.messages import (
    CoreToWorker,
    Positions,
    Render,
    Rendered,
    SyncDone,
    TokenizerReady,
    Welcome,
    WorkerToCore,
)
from slipstream_ipc.transport.codec import worker_codec
from slipstream_ipc.transport.dealer import Dealer
from slipstream_worker.build import assemble_worker
from slipstream_worker.config import WorkerConfig
from slipstream_worker.detokenizer.compiler import compile_table
from slipstream_worker.detokenizer.factory import TableDetokenizerFactory

# each token depends on all before it, so a lost or changed one shows in all that follow
MODEL = f"simulated:step_ms=0.2,prefill_us=0,mode=chain,tokenizer={MODEL_PATH}"
GRACE_S = 0.5  # short, so that abandoned streams expire during the run
_BEAT_S = 0.05
_WAIT_MS = 2
_WORKER = b"worker-0"
_WORKERS_LOGS = "slipstream_worker."
_MAX_ERRORS_KEPT = 20


class FuzzStack:
    """One core and one worker."""

    def __init__(
        self,
        folder: Path,
        *,
        client_timeout_s: float = GRACE_S,
        grace_s: float = GRACE_S,
        **settings: Any,
    ) -> None:
        """`folder`: a private one, for the sockets. `settings`: override the core's settings."""
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.client_address = f"ipc://{folder}/client"
        self.core_address = f"ipc://{folder}/core"
        self._poller = zmq.Poller()
        self._beat_at = 0.0
        self.longest_turn_s = 0.0  # CPU time of this thread, without tokenising
        tokenizer = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
        own = {"max_num_seqs": 256, "max_model_len": 512} | settings
        core = CoreConfig(model=MODEL, address=self.core_address, **own)
        worker = WorkerConfig(
            tokenizer=str(MODEL_PATH),
            client_address=self.client_address,
            core_address=self.core_address,
            runtime_dir=str(folder),
            cache_dir=str(folder),
            client_timeout_s=client_timeout_s,
            grace_s=grace_s,
        )
        self.core = assemble_core(core, load_runner(core), self.context, self._poller)
        detokenizers = TableDetokenizerFactory(compile_table(tokenizer))
        self._prompts = _PromptsHere(tokenizer)
        self.worker = assemble_worker(
            worker, self._prompts, detokenizers, self.context, self._poller
        )

    def turn(self) -> None:
        """Run one turn of worker and core."""
        now = time.monotonic()
        begin_s = time.thread_time() - self._prompts.cpu_s
        self.core.engine.run_once(wait=False)
        self.worker.run_once(now)
        if now >= self._beat_at:
            self._beat_at = now + _BEAT_S
            self.worker.beat(now)
        took_s = time.thread_time() - self._prompts.cpu_s - begin_s
        self.longest_turn_s = max(self.longest_turn_s, took_s)

    def wait(self) -> None:
        """Wait until there may be something to do, or a moment has passed."""
        self._poller.poll(_WAIT_MS)

    def deserted_workers(self) -> list[bytes]:
        """The names of attacking workers that left streams in the core."""
        streams = self.core.handler._streams._by_id.values()  # the product needs no such accessor
        return sorted({stream.worker for stream in streams} - {_WORKER})

    @property
    def held(self) -> dict[str, int]:
        """What worker and core hold for streams and peers; all zero without any, except for the
        worker's entry in the core.
        """
        scheduler = self.core.scheduler
        return {
            "worker_streams": len(self.worker.streams),
            "worker_clients": self.worker.readers.num_clients,
            "core_streams": self.core.handler.num_streams,
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "blocks": scheduler.num_blocks - 1 - scheduler.num_free_blocks,
            "history_pages": self.core.tokens.num_pages_used,
        }

    def close(self) -> None:
        """Close worker and core."""
        self.worker.close()
        self.core.close()
        self.context.destroy(linger=0)


class SuccessorWorker:
    """Attaches under the name of a dead worker and claims none of its streams, so that the core
    drops them.

    A core keeps the streams of a dead worker for a successor of the same name.
    """

    def __init__(self, stack: FuzzStack, name: bytes) -> None:
        self._dealer: Dealer[WorkerToCore, CoreToWorker, None] = Dealer(
            stack.context,
            stack.core_address,
            worker_codec(),
            zmq.Poller(),
            identity=name,
            now=time.monotonic(),
            incarnation=2**31 - 1,  # later than almost all that attackers send
            fresh=False,
        )
        self.is_done = False

    def turn(self) -> None:
        """Attach, state that no stream is claimed, and close."""
        if self.is_done:
            return
        now = time.monotonic()
        for body in self._dealer.receive(now):
            if isinstance(body, Welcome):
                self._dealer.send(Positions((), b"", b"", True), None)
            elif isinstance(body, SyncDone):
                self.close()
                return
        self._dealer.beat(now)

    def close(self) -> None:
        """Close the socket."""
        self.is_done = True
        self._dealer.close()


class ErrorLog(logging.Handler):
    """Keeps records that are logged with a traceback, except for protocol errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.num_errors = 0
        self.errors: list[str] = []

    def __enter__(self) -> ErrorLog:
        root = logging.getLogger()
        self._before = root.handlers[:]
        root.handlers[:] = [self]  # keeps a million protocol errors off standard error
        return self

    def __exit__(self, *_exception: object) -> None:
        logging.getLogger().handlers[:] = self._before

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        is_attack = isinstance(error, ProtocolError) and not record.name.startswith(_WORKERS_LOGS)
        if error is None or is_attack:
            return
        self.num_errors += 1
        if len(self.errors) < _MAX_ERRORS_KEPT:
            self.errors.append(logging.Formatter().format(record))


class _PromptsHere:
    """Replaces the tokenizer process: tokenises in this process."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._asked: list[Render] = []
        self._key = 0
        self.cpu_s = 0.0

    def ask(self, request: Render, _tenant: bytes = b"") -> int:
        self._key += 1
        self._asked.append(Render(self._key, request.text, request.messages))
        return self._key

    def withdraw(self, key: int) -> bool:
        self._asked = [render for render in self._asked if render.key != key]
        return True

    def is_among(self, arrived: object) -> bool:
        return bool(self._asked)

    def receive(self) -> list[Rendered | TokenizerReady]:
        asked, self._asked = self._asked, []
        begin_s = time.thread_time()
        answers = [Rendered(render.key, pack_u32(self._ids(render))) for render in asked]
        self.cpu_s += time.thread_time() - begin_s
        return [*answers]

    def beat(self, now: float) -> list[Rendered]:
        return []

    def _ids(self, render: Render) -> list[int]:
        text = render.text
        if text is None:
            text = "".join(message.content for message in render.messages)
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids
