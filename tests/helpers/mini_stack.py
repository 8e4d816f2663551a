"""A core, a worker and clients in one thread, each of which a test can kill between two steps."""

from __future__ import annotations

import secrets
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from msgspec import structs
from tests.helpers.core_box import await_grammar
from tests.helpers.patience import PATIENCE_S, Patience

from slipstream.demo_model import MODEL_PATH
from slipstream.prompt_logprobs import PromptPieces
from slipstream_core.config import CoreConfig
from slipstream_core.engine.build import Core, assemble_core
from slipstream_core.runner.factory import load_runner
from slipstream_ipc.columns import check_deltas, pack_u32, u32
from slipstream_ipc.history.token_log import history_digest
from slipstream_ipc.messages import (
    Abort,
    Accepted,
    AdapterChanged,
    AdapterList,
    AnswerEvent,
    AnswerSettings,
    Cancelled,
    ChangeAdapter,
    ClientToWorker,
    Deltas,
    End,
    EventKind,
    Fault,
    Goodbye,
    KnowsAdapters,
    Load,
    Located,
    OtherAnswer,
    PromptLogprobs,
    ReasoningIds,
    Recall,
    Recalled,
    Rejected,
    Render,
    Rendered,
    Resume,
    SamplingParams,
    Submit,
    Superseded,
    TokenizerReady,
    UnknownStreams,
    Welcome,
    WorkerToClient,
)
from slipstream_ipc.transport.codec import client_codec, encode_params
from slipstream_ipc.transport.curve import Access
from slipstream_ipc.transport.dealer import Dealer, LinkOptions
from slipstream_worker.build import assemble_worker
from slipstream_worker.config import WorkerConfig
from slipstream_worker.detokenizer.factory import DetokenizerFactory
from slipstream_worker.worker import Worker

MODEL = f"simulated:step_ms=0.2,prefill_us=0,tokenizer={MODEL_PATH}"


CHAIN = MODEL + ",mode=chain"  # each token depends on all tokens before it


_OF_THE_WORKER = (
    "grace_s",
    "client_timeout_s",
    "stream_interval",
    "listen",
    "keys",
    "share_prefix_cache",
)
_LONGEST_TURN_S = 0.02
_PIECE_S = 0.5  # of `let_pass`: shorter than any timeout that a test sets
_MOMENT_S = 0.001  # of a turn in which the device computes
_TURNS_PER_PIECE = 8  # enough to send a ping, and for a second beat


class InstantPrompts:
    """In place of the tokenizer process: answers at once, or not at all while `is_held`."""

    def __init__(
        self,
        tokenizer: object,
        answer: AnswerSettings | None = None,
        reasoning: ReasoningIds | None = None,
    ) -> None:
        """`answer`, `reasoning`: of the prompts whose answers are to be read as events."""
        self._tokenizer = tokenizer
        self._answer = answer
        self._reasoning = reasoning
        self.asked: list[Render] = []
        self._key = 0
        self.is_held = False

    def ask(self, request: Render, _tenant: bytes = b"") -> int:
        self._key += 1
        text = request.text or " ".join(message.content for message in request.messages)
        asked = Render(self._key, text, answer=request.answer, prediction=request.prediction)
        self.asked.append(asked)
        return self._key

    def withdraw(self, key: int) -> bool:
        self.asked = [r for r in self.asked if r.key != key]
        return True

    def receive(self) -> list[Rendered | TokenizerReady]:
        if self.is_held:
            return []
        asked, self.asked = self.asked, []
        return [
            Rendered(
                r.key,
                pack_u32(self._ids(r.text or "")),
                answer=None if r.answer is None else self._answer,
                reasoning=None if r.answer is None else self._reasoning,
                prediction_ids=pack_u32(self._ids(r.prediction)),
            )
            for r in asked
        ]

    def beat(self, now: float) -> list[Rendered]:
        return []

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids  # type: ignore[attr-defined]
        return ids


@dataclass
class Received:
    """A client's copy of one stream."""

    stream_id: bytes
    submit: Submit
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    events: list[AnswerEvent] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    logprobs: bytearray = field(default_factory=bytearray)  # f32 values of all candidates
    num_deltas: int = 0
    accepted: int = 0
    end: End | None = None
    fault: Fault | None = None
    is_unknown: bool = False
    is_aborted: bool = False
    is_superseded: bool = False
    wants_prompt: bool = False  # prompt log-probabilities, complete before the first delta
    prompt: PromptPieces = field(default_factory=PromptPieces)
    prompt_len: int = 0

    @property
    def is_over(self) -> bool:
        return self.end is not None or self.fault is not None


class RawClient:
    """A client that speaks the protocol directly; asserts that nothing is duplicated, lost or
    reordered.
    """

    def __init__(
        self,
        stack: MiniStack,
        address: str | None = None,
        access: Access | None = None,
        wants: int = 0,
    ) -> None:
        self._stack = stack
        self._poller = zmq.Poller()
        self._waiting: list[ClientToWorker] = []
        self.streams: dict[int, Received] = {}
        self.recalled: dict[int, Recalled] = {}
        self.cancelled: dict[int, Cancelled] = {}
        self.located: dict[int, Located] = {}
        self.loads: list[Load] = []
        self.changed: dict[int, AdapterChanged] = {}
        self.served: list[AdapterList] = []
        self.tells_what_it_knows = True
        self._changes: dict[int, ChangeAdapter] = {}  # not answered yet
        self.welcome: Welcome | None = None  # the latest
        self._recalls: dict[int, Recall] = {}  # not answered yet
        self.is_reading = True
        self.resubmits = True
        self.hop: Dealer[ClientToWorker, WorkerToClient, None] = Dealer(
            stack.context,
            address or stack.client_address,
            client_codec(),
            self._poller,
            identity=secrets.token_bytes(16),
            now=stack.now(),
            access=access,
            options=LinkOptions(wants, welcome_within_s=0.2),
        )

    def submit(
        self,
        prompt: str | list[int],
        stream_id: bytes | None = None,
        scope: bytes = b"",
        adapter: str = "",
        cache_salt: str = "",
        prediction: str = "",
        **params: object,
    ) -> Received:
        handle = len(self.streams)
        submit = Submit(
            handle,
            secrets.token_bytes(16) if stream_id is None else stream_id,
            encode_params(SamplingParams(**{"temperature": 0.0, **params})),  # type: ignore[arg-type]
            text=prompt if isinstance(prompt, str) else None,
            token_ids=b"" if isinstance(prompt, str) else pack_u32(prompt),
            scope=scope,
            adapter=adapter,
            cache_salt=cache_salt,
            prediction=prediction,
        )
        received = self.send_submit(submit)
        received.wants_prompt = params.get("prompt_logprobs") is not None
        return received

    def send_submit(self, submit: Submit) -> Received:
        received = self.streams[submit.handle] = Received(submit.stream_id, submit)
        self._waiting.append(submit)
        return received

    def submit_together(
        self, prompt: str | list[int], seeds: Sequence[int], **params: object
    ) -> list[Received]:
        """Several answers to one prompt, submitted in one message; resubmitted one by one."""
        streams = [self.submit(prompt, **params, seed=seed) for seed in seeds]
        del self._waiting[-len(seeds) :]
        others = tuple(
            OtherAnswer(it.submit.handle, it.stream_id, seed)
            for it, seed in zip(streams[1:], seeds[1:], strict=True)
        )
        self._waiting.append(structs.replace(streams[0].submit, others=others))
        return streams

    def resumption(self, it: Received) -> Resume:
        digest = history_digest(np.array(it.token_ids, np.uint32))
        handle = it.submit.handle
        num_chars, num_tokens = len(it.text), len(it.token_ids)
        return Resume(handle, it.stream_id, num_chars, num_tokens, digest, scope=it.submit.scope)

    def take_over(
        self, it: Received, num_chars: int = 0, num_tokens: int = 0, *, scope: bytes = b""
    ) -> Received:
        """Take over another client's stream from a position on, without its history."""
        handle = len(self.streams)
        taken = Received(it.stream_id, structs.replace(it.submit, handle=handle))
        taken.text, taken.token_ids = it.text[:num_chars], it.token_ids[:num_tokens]
        self.streams[handle] = taken
        self._waiting.append(Resume(handle, it.stream_id, num_chars, num_tokens, scope=scope))
        return taken

    def recall(self, stream_id: bytes, scope: bytes = b"", *, forget: bool = False) -> Recalled:
        """What the worker has kept; steps the stack until it answers."""
        number = self.send_recall(stream_id, scope, forget=forget)
        self._stack.until(lambda: number in self.recalled)
        return self.recalled[number]

    def send_recall(self, stream_id: bytes, scope: bytes = b"", *, forget: bool = False) -> int:
        """Ask what the worker has kept; returns the number of the answer in `recalled`."""
        number = len(self._recalls) + len(self.recalled)
        self._waiting.append(Recall(number, stream_id, scope, forget))
        self._recalls[number] = self._waiting[-1]
        return number

    def send_change(self, name: str, path: str = "", *, load_inplace: bool = False) -> int:
        """Ask for a change of adapters; returns the number of the answer in `changed`."""
        number = len(self._changes) + len(self.changed)
        operation = secrets.token_bytes(16)
        change = ChangeAdapter(number, operation, name, path, load_inplace)
        self._changes[number] = change
        self._waiting.append(change)
        return number

    def change(self, name: str, path: str = "", *, load_inplace: bool = False) -> AdapterChanged:
        """Change adapters; steps the stack until it answers."""
        number = self.send_change(name, path, load_inplace=load_inplace)
        self._stack.until(lambda: number in self.changed)
        return self.changed[number]

    def abort(self, received: Received) -> None:
        received.is_aborted = True
        self._waiting.append(Abort(received.stream_id, received.submit.handle))

    def goodbye(self) -> None:
        assert self.hop.send(Goodbye(), None)
        self.is_reading = False

    def send(self, body: ClientToWorker) -> None:
        self._waiting.append(body)

    def step(self) -> None:
        if not self.is_reading:
            return
        for body in self.hop.receive(self._stack.now()):
            self._take(body)
        while self._waiting and self.hop.send(self._waiting[0], None):
            self._waiting.pop(0)
        self.hop.beat(self._stack.now())

    def _take(self, body: WorkerToClient) -> None:
        match body:
            case Welcome():
                self.welcome = body
                again = Resume | Recall | ChangeAdapter | KnowsAdapters
                self._waiting = [b for b in self._waiting if not isinstance(b, again)]
                self._waiting += self._recalls.values()
                self._waiting += self._changes.values()
                for handle, it in self.streams.items():
                    if it.is_over or it.is_superseded:
                        continue
                    if it.accepted:
                        self._waiting.append(self.resumption(it))
                    elif not self._is_waiting(it):
                        self._waiting.append(it.submit)
                    if it.is_aborted:
                        self._waiting.append(Abort(it.stream_id, handle))
            case Accepted():
                it = self.streams[body.handle]
                it.accepted += 1
                it.submit = structs.replace(it.submit, adapter_digest=body.adapter_digest)
                self.streams[body.handle].prompt_len = len(u32(body.prompt_ids))
            case PromptLogprobs():
                it = self.streams[body.handle]
                assert it.accepted
                assert it.prompt.add_piece(body.start, body.logprobs, it.prompt_len - 1)
            case Rejected():
                assert not self.streams[body.handle].is_over
                self.streams[body.handle].fault = body.fault
            case UnknownStreams():
                for handle in body.handles:
                    self._lost(self.streams[handle])
            case Superseded():
                self.streams[body.handle].is_superseded = True
            case Deltas():
                self._take_deltas(body)
            case Recalled():
                self._recalls.pop(body.number, None)
                self.recalled[body.number] = body
            case Located():
                self.located[body.number] = body
            case Load():
                self.loads.append(body)
            case Cancelled():
                self.cancelled[body.number] = body
            case AdapterChanged():
                self._changes.pop(body.number, None)
                self.changed[body.number] = body
            case AdapterList():
                self.served.append(body)
                if self.tells_what_it_knows:
                    self._waiting.append(KnowsAdapters(body.number))
            case other:
                raise AssertionError(f"unexpected {other}")

    def _is_waiting(self, it: Received) -> bool:
        """Whether a Submit of the stream, alone or with others, is still to be sent."""
        submits = [body for body in self._waiting if isinstance(body, Submit)]
        return any(
            it.stream_id in (submit.stream_id, *(other.stream_id for other in submit.others))
            for submit in submits
        )

    def _lost(self, it: Received) -> None:
        """The stream is unknown to the worker: submit it again with the output so far."""
        it.is_unknown = True
        if self.resubmits:
            again = structs.replace(
                it.submit,
                was_accepted=True,
                output_ids=pack_u32(it.token_ids),
                num_chars=len(it.text),
            )
            self._waiting.append(again)

    def _take_deltas(self, deltas: Deltas) -> None:
        check_deltas(deltas)
        num = len(deltas.texts)
        counts = u32(deltas.counts).tolist() if deltas.counts else [1] * num
        token_ids = u32(deltas.token_ids).tolist()
        kinds = u32(deltas.kinds).tolist() if deltas.kinds else [0] * num
        events = dict(zip(u32(deltas.event_entries).tolist(), deltas.events, strict=True))
        widths = [0] * num
        ranks: list[int] = []
        values, begin = b"", 0
        if deltas.logprobs is not None:
            columns = deltas.logprobs
            values = columns.values
            widths = u32(columns.widths).tolist() if columns.widths else [columns.width] * num
            ranks = u32(columns.ranks).tolist()
        touched = []
        for i, handle in enumerate(u32(deltas.handles).tolist()):
            it = self.streams[handle]
            touched.append(it)
            assert it.end is None, "something came after the end"
            assert it.prompt.is_whole or not it.wants_prompt
            assert u32(deltas.chars)[i] == len(it.text)
            assert u32(deltas.tokens)[i] == len(it.token_ids)
            it.text += deltas.texts[i]
            if kinds[i]:
                kind, call = EventKind(kinds[i] & 0xFF), kinds[i] >> 8
                it.events.append(AnswerEvent(kind, deltas.texts[i], call))
            it.events += events.get(i, ())
            it.token_ids += token_ids[: counts[i]]
            del token_ids[: counts[i]]
            if widths[i]:
                it.ranks += ranks[: counts[i]]
                del ranks[: counts[i]]
                end = begin + 4 * counts[i] * widths[i]
                it.logprobs += values[begin:end]
                begin = end
            it.num_deltas += 1
        for i, end in zip(u32(deltas.ended).tolist(), deltas.ends, strict=True):
            touched[i].end = end
            assert end.num_tokens == len(touched[i].token_ids)


class MiniStack:
    """One core, one worker and any number of clients, stepped by the test."""

    def __init__(
        self,
        directory: Path,
        model: str,
        tokenizer: object,
        detokenizers: DetokenizerFactory,
        *,
        core_tokenizer: str | None = None,
        **settings: object,
    ) -> None:
        self.directory = directory
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.poller = zmq.Poller()
        self.client_address = f"ipc://{directory}/client"
        self._answer: Any = settings.pop("answer", None)
        self._reasoning: Any = settings.pop("reasoning", None)
        self.prompts = InstantPrompts(tokenizer, self._answer, self._reasoning)
        self.detokenizers = detokenizers
        self.clients: list[RawClient] = []
        self._hops: list[Dealer[Any, Any, None]] = []  # of clients that have left, too
        self._tokenizer = tokenizer
        self._worker_settings = {
            name: settings.pop(name) for name in _OF_THE_WORKER if name in settings
        }
        store = {name: settings[name] for name in ("response_store_mib",) if name in settings}
        self._worker_settings.update(store)  # for worker and core
        self._core_settings: dict[str, object] = {
            "model": model,
            "tokenizer": core_tokenizer,
            "max_num_seqs": 64,
            "max_model_len": 512,
            **settings,
        }
        self._now_s = self._looked_s = time.monotonic()
        self._is_clock_held = False
        self._incarnation = 0
        self._core_ended_s = self.worker_ended_s = 0.0  # monotonic
        self.core: Core | None = None
        self.worker: Worker | None = None
        self.start_core()
        self.start_worker()

    def now(self) -> float:
        """The clock of the worker and the clients. It advances by at most `_LONGEST_TURN_S` per
        call, so that a pause of this thread on a busy machine causes no timeout."""
        looked_s = time.monotonic()
        if not self._is_clock_held:
            self._now_s += min(looked_s - self._looked_s, _LONGEST_TURN_S)
        self._looked_s = looked_s
        return self._now_s

    def start_core(self) -> None:
        config = CoreConfig(
            address=f"ipc://{self.directory}/core",
            predecessor_ended_s=self._core_ended_s,
            **self._core_settings,  # type: ignore[arg-type]
        )
        self.core = assemble_core(config, load_runner(config), self.context, self.poller)

    def start_worker(self) -> None:
        self._incarnation += 1
        self.worker = assemble_worker(
            self._worker_config(), self.prompts, self.detokenizers, self.context, self.poller
        )

    def _worker_config(self, **settings: object) -> WorkerConfig:
        given = {"client_address": self.client_address, **self._worker_settings, **settings}
        return WorkerConfig(
            tokenizer=str(MODEL_PATH),
            core_address=f"ipc://{self.directory}/core",
            runtime_dir=str(self.directory),
            cache_dir=str(self.directory),
            incarnation=self._incarnation,
            predecessor_ended_s=self.worker_ended_s,
            **given,  # type: ignore[arg-type]
        )

    def kill_core(self) -> None:
        """Drop the core, as kill -9 does: its state is lost and its address is free."""
        assert self.core is not None
        self.core.close()
        self._core_ended_s = time.monotonic()
        self.core = None

    def kill_worker(self) -> None:
        """Drop the worker, as kill -9 does."""
        assert self.worker is not None
        self.worker.close()
        self.worker_ended_s = time.monotonic()
        self.prompts = InstantPrompts(self._tokenizer, self._answer, self._reasoning)
        self.worker = None

    def client(
        self, address: str | None = None, access: Access | None = None, wants: int = 0
    ) -> RawClient:
        """A client; by default one over ipc://. wants: see `Hello`."""
        client = RawClient(self, address, access, wants)
        self.clients.append(client)
        self._hops.append(client.hop)
        return client

    def step(self) -> None:
        if self.core is not None:
            await_grammar(self.core)
            self.core.engine.run_once(wait=False)
        if self.worker is not None:
            now = self.now()
            self.worker.run_once(now)
            self.worker.beat(now)
        for client in self.clients:
            client.step()

    def until(self, condition: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
        """Step until `condition`, with a deadline."""
        patience = Patience(within_s)
        while not condition():
            patience.check()
            self.step()
            self._leave_it_to_the_device()

    def _leave_it_to_the_device(self) -> None:
        """Wait for the thread that computes for a moment. It takes the GIL before and after each of
        torch's operators, which a loop that never blocks leaves it every 5 ms alone.
        """
        if self.core is not None and self.core.engine._in_flight:
            device = self.core.engine._runner.fileno()
            if device is not None:
                select.select([device], [], [], _MOMENT_S)

    def pass_time(self, seconds: float) -> None:
        """Advance the clock of the worker and the clients at once, as if all had slept."""
        self._now_s += seconds

    def let_pass(self, seconds: float) -> None:
        """Advance the clock for processes that are awake: in pieces, in each of which every peer
        that listens attaches and answers pings, however long the sockets take for that.
        """
        end_s = self._now_s + seconds
        while self._now_s < end_s:
            self.until(lambda: all(hop.is_attached for hop in self._listening_hops()))
            self._now_s += _PIECE_S
            self._is_clock_held = True
            try:
                for _ in range(_TURNS_PER_PIECE):
                    self.step()
                self.until(self._is_every_ping_answered)
            finally:
                self._is_clock_held = False

    def _listening_hops(self) -> list[Dealer[Any, Any, Any]]:
        """What is to be attached, as its peer is there."""
        if self.worker is None:
            return []
        of_worker = [] if self.core is None else [self.worker._core._dealer]
        return of_worker + [client.hop for client in self.clients if client.is_reading]

    def _is_every_ping_answered(self) -> bool:
        hops = [hop for hop in self._listening_hops() if hop.is_attached]
        epochs = {(hop._identity, hop.epoch) for hop in hops}
        links = [hop.link for hop in hops]
        if self.worker is not None:
            links += [
                session.link
                for session in self.worker._front.sessions
                if (session.identity, session.link.epoch) in epochs
            ]
        return all(link._pinged_at is None for link in links)

    def close(self) -> None:
        for hop in [*self._hops, *(client.hop for client in self.clients)]:
            hop.close()
        if self.worker is not None:
            self.worker.close()
        if self.core is not None:
            self.core.close()
        self.context.destroy(linger=0)

    @property
    def held(self) -> dict[str, int]:
        """What the stack holds for streams; all zero if it has none."""
        assert self.core is not None
        assert self.worker is not None
        scheduler = self.core.scheduler
        return {
            "worker streams": len(self.worker.streams),
            "core streams": self.core.handler.num_streams,
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "blocks": scheduler.num_blocks - 1 - scheduler.num_free_blocks,
            "history pages": self.core.tokens.num_pages_used,
        }

    def holds_nothing(self) -> bool:
        return not any(self.held.values())


def texts(streams: list[Received]) -> list[tuple[str, list[int]]]:
    return [(s.text, s.token_ids) for s in streams]
