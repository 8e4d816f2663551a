"""The worker's loop: tokens in, text out, and the life of every stream in between.

Owns: what each message of a client, the core or the prompt process does to which stream. Does not
know: sockets' options, how text is made, how messages are cut.

Rules (STREAMS III, IV, V):
- Every stream that a client submits gets exactly one answer (accepted or rejected), and every
  accepted one exactly one end.
- An exception while handling one stream ends that stream and nothing else.
- The report to the core leaves before the deltas to the clients.
- An ended stream is kept for the grace time, then forgotten here and in the core.
"""

from __future__ import annotations

import hashlib
import heapq
import logging
import time

import numpy as np
from msgspec import structs

from slipstream_ipc.accept import Session
from slipstream_ipc.codec import decode_params
from slipstream_ipc.columns import check_step, pack_u32, pack_u64, u32
from slipstream_ipc.errors import BadRequest, ProtocolError
from slipstream_ipc.log import history_digest
from slipstream_ipc.messages import (
    Abort,
    Accepted,
    Admit,
    Admitted,
    ClientToWorker,
    CoreToWorker,
    End,
    Fault,
    Forget,
    Goodbye,
    Hello,
    ModelCard,
    Ping,
    Positions,
    PromptReady,
    Refusal,
    Refused,
    Registered,
    Rejected,
    Render,
    Rendered,
    Resume,
    Step,
    Submit,
    SyncDone,
    Unknown,
    UnknownStreams,
    Welcome,
    Withdraw,
)
from slipstream_ipc.params import check_params, check_prompt, stop_strings
from slipstream_ipc.text_log import START
from slipstream_worker.clients import ClientPort, FrontAcceptor, Receipt
from slipstream_worker.core_hop import CoreHop
from slipstream_worker.detokenizer import DetokenizerFactory
from slipstream_worker.logprobs import split_logprobs
from slipstream_worker.output import StreamOutput
from slipstream_worker.prompts import Prompts
from slipstream_worker.stop_strings import StopStrings
from slipstream_worker.streams import Stage, Stream, StreamTable

logger = logging.getLogger(__name__)

_STREAM_ID_BYTES = 16
_POSITIONS_A_MESSAGE = 16384


class Worker:
    """All streams of one worker."""

    def __init__(
        self,
        core: CoreHop,
        front: FrontAcceptor,
        prompts: Prompts,
        detokenizers: DetokenizerFactory,
        *,
        tokenizer: str,
        stream_interval: int,
        grace_s: float,
    ) -> None:
        """`tokenizer` is what clients are told of where it is found."""
        self._core = core
        self._front = front
        self._prompts = prompts
        self._detokenizers = detokenizers
        self._tokenizer = tokenizer
        self._stream_interval = stream_interval
        self._grace_s = grace_s
        self._streams = StreamTable()
        self._clients: dict[bytes, ClientPort] = {}
        self._rendering: dict[int, Stream] = {}  # by the prompt process' key
        self._leaving: list[tuple[float, int, bytes]] = []  # heap: when to forget which stream
        self._num_left = 0
        self._vanished: list[tuple[float, bytes]] = []  # clients, and when they count as dead
        self._early: list[tuple[Session[Receipt], Resume]] = []  # resumes before SyncDone
        self._is_synced = False
        self.card: ModelCard | None = None

    @property
    def num_streams(self) -> int:
        """Streams not yet forgotten."""
        return len(self._streams)

    def run_once(self, now: float) -> None:
        """Take in everything that has arrived, send everything that is due."""
        for message in self._core.receive(now):
            self._from_core(message)
        if self.card is not None:
            for session, body in self._front.receive(now):
                self._from_client(session, body)
        for answer in self._prompts.receive():
            self._from_prompts(answer)
        self._core.flush()
        for port in self._clients.values():
            for stream in port.flush():
                self._leave_in(stream, now + self._grace_s)

    def beat(self, now: float) -> None:
        """What only the clock brings: signs of life, and what is to be forgotten."""
        self._core.beat(now)
        self._front.beat(now)
        for rendered in self._prompts.beat():
            self._from_prompts(rendered)
        for session in self._front.take_lost():
            self._vanished.append((now + self._grace_s, session.identity))
        while self._vanished and self._vanished[0][0] <= now:
            _, identity = self._vanished.pop(0)
            port = self._clients.get(identity)
            if port is not None and not port.is_attached:
                self._dismiss(identity)
        gone = []
        while self._leaving and self._leaving[0][0] <= now:
            stream = self._streams.get(heapq.heappop(self._leaving)[2])
            if stream is not None:
                self._remove(stream)
                gone.append(stream.stream_id)
        if gone:
            self._core.state(Forget(tuple(gone)))

    # ---- from the core -------------------------------------------------------------------

    def _from_core(self, message: CoreToWorker) -> None:
        match message:
            case Step():
                self._step(message)
            case Admitted():
                self._admitted(message)
            case Welcome():
                self._attached(message)
            case Registered():
                self._registered(message)
            case Refused():
                stream = self._streams.get(message.stream_id)
                if stream is not None:
                    self._refused(stream, message.fault)
            case Unknown():
                for stream_id in message.stream_ids:
                    stream = self._streams.get(stream_id)
                    if stream is not None and stream.stage is not Stage.ENDED:
                        self._ask_core(stream)
            case SyncDone():
                self._synced()
            case Refusal():
                logger.error("the core refuses us: %s", message.fault.message)
            case _:
                raise ProtocolError(f"{type(message).__name__} is not for a worker")

    def _attached(self, welcome: Welcome) -> None:
        """State what we have of every stream; the core sends what lies behind it."""
        self.card = ModelCard(
            welcome.model.name,
            self._tokenizer,
            welcome.model.vocab_size,
            welcome.model.max_model_len,
            welcome.model.eos_token_ids,
        )
        self._core.restart()
        self._streams.displace_all()
        if not self._is_synced:
            return  # we attached fresh: the core replays everything
        ids: list[bytes] = []
        lens: list[int] = []
        digests: list[int] = []
        for stream in self._streams.all():
            if stream.output is not None:
                ids.append(stream.stream_id)
                lens.append(len(stream.output.token_ids))
                digests.append(history_digest(np.array(stream.output.token_ids, np.uint32)))
        cuts = range(0, max(len(ids), 1), _POSITIONS_A_MESSAGE)
        for cut in cuts:
            part = slice(cut, cut + _POSITIONS_A_MESSAGE)
            self._core.state(
                Positions(
                    tuple(ids[part]),
                    pack_u32(lens[part]),
                    pack_u64(digests[part]),
                    cut == cuts[-1],
                )
            )

    def _admitted(self, message: Admitted) -> None:
        stream = self._streams.get(message.stream_id)
        if stream is None:
            self._core.state(Forget((message.stream_id,)))
            return
        self._streams.place(stream, message.row)
        if stream.output is not None and stream.output.end is not None:
            self._tell_end(stream)  # it ended while the core did not hear
        elif stream.stage is Stage.SUBMITTED:
            stream.stage = Stage.RUNNING
            self._accept(stream)

    def _registered(self, message: Registered) -> None:
        """A stream of the life before this one."""
        admit = message.registration
        if self._streams.get(admit.stream_id) is not None:
            return
        stream = Stream(admit.stream_id, Stage.RUNNING)
        self._streams.add(stream)
        self._streams.place(stream, message.row)
        self._set_up(stream, admit)
        assert stream.output is not None
        if message.end is not None:
            stream.output.finish(message.end.reason, message.end.fault)
            stream.stage = Stage.ENDED

    def _synced(self) -> None:
        self._is_synced = True
        for session, resume in self._early:
            if session.is_open:
                self._resume(session, resume)
        self._early.clear()

    def _step(self, step: Step) -> None:
        """New tokens of many streams: the hot path."""
        check_step(step)
        rows = u32(step.rows).tolist()
        token_ids = u32(step.token_ids).tolist()
        counts = u32(step.counts).tolist() if step.counts else None
        logprobs = split_logprobs(step.logprobs, counts, len(rows))
        at = 0
        for i, row in enumerate(rows):
            count = 1 if counts is None else counts[i]
            stream = self._streams.at(row)
            if stream is not None:
                try:
                    if logprobs is not None:
                        stream.logprobs += logprobs[i]
                    self._push(stream, token_ids[at : at + count])
                except Exception as error:
                    logger.exception("stream %s failed", stream.stream_id.hex())
                    self._fail(stream, f"{type(error).__name__} while handling its output")
            at += count
        self._core.checked(step.step)

    def _push(self, stream: Stream, token_ids: list[int]) -> None:
        output = stream.output
        assert output is not None
        if output.end is not None:
            return
        if output.push(token_ids):
            self._end(stream)
            self._tell_end(stream)
        if stream.reader is not None:
            self._clients[stream.reader.client].mark(stream)

    # ---- from clients --------------------------------------------------------------------

    def _from_client(self, session: Session[Receipt], body: ClientToWorker) -> None:
        assert self.card is not None
        match body:
            case Hello():
                port = self._clients.get(session.identity)
                if port is None:
                    self._clients[session.identity] = ClientPort(self._front, session)
                else:
                    port.attach(session)
                self._front.welcome(session, self.card)
            case Submit():
                self._submit(session, body)
            case Resume():
                if self._is_synced:
                    self._resume(session, body)
                else:
                    self._early.append((session, body))
            case Abort():
                stream = self._streams.get(body.stream_id)
                if stream is not None:
                    self._abort(stream)
            case Goodbye():
                self._front.close(session)
                self._dismiss(session.identity)
            case Ping():
                pass  # the acceptor has answered it

    def _submit(self, session: Session[Receipt], submit: Submit) -> None:
        port = self._clients[session.identity]
        known = self._streams.get(submit.stream_id)
        if known is not None:
            same = known.submit == submit and known.reader is not None
            if not same or known.reader is None or known.reader.client != session.identity:
                fault = Fault("conflict", "this stream id is taken by another request", "stream_id")
                port.state(Rejected(submit.handle, fault))
            elif known.stage in (Stage.RUNNING, Stage.ENDED):
                port.read(known, submit.handle, known.reader.cursor)
                self._accept(known)
            return
        try:
            if len(submit.stream_id) != _STREAM_ID_BYTES:
                raise BadRequest("stream_id", submit.stream_id, f"{_STREAM_ID_BYTES} bytes")
            params = decode_params(submit.params)
            check_params(params)
            given = (submit.text is not None) + bool(submit.token_ids) + bool(submit.messages)
            if given != 1:
                raise BadRequest("prompt", f"{given} prompts", "text, token_ids or messages")
        except BadRequest as error:
            port.state(Rejected(submit.handle, error.fault))
            return
        stream = Stream(submit.stream_id, Stage.RENDERING, submit)
        stream.interval = max(params.stream_interval, self._stream_interval)
        self._streams.add(stream)
        port.read(stream, submit.handle, START)
        if submit.token_ids:
            self._rendered(stream, Rendered(0, submit.token_ids))
        else:
            key = self._prompts.ask(Render(0, submit.text, submit.messages))
            self._rendering[key] = stream

    def _from_prompts(self, answer: Rendered | PromptReady) -> None:
        if isinstance(answer, PromptReady):
            return  # a child that was started again
        stream = self._rendering.pop(answer.key, None)
        if stream is not None and self._streams.get(stream.stream_id) is stream:
            self._rendered(stream, answer)

    def _rendered(self, stream: Stream, answer: Rendered) -> None:
        """The prompt is known: check the request as a whole, ask the core."""
        assert self.card is not None
        assert stream.submit is not None
        if stream.is_aborted:
            return
        if answer.fault is not None:
            self._reject(stream, answer.fault)
            return
        try:
            params = decode_params(stream.submit.params)
            prompt = u32(answer.token_ids, "prompt_token_ids")
            max_tokens = check_prompt(prompt, params, self.card)
        except BadRequest as error:
            self._reject(stream, error.fault)
            return
        except ProtocolError as error:
            self._reject(stream, Fault("bad_request", str(error), "prompt_token_ids"))
            return
        eos = () if params.ignore_eos else self.card.eos_token_ids
        reader = stream.reader
        admit = Admit(
            stream_id=stream.stream_id,
            prompt_ids=answer.token_ids,
            params=params,
            stop_token_ids=tuple(dict.fromkeys(eos + params.stop_token_ids)),
            seed=_seed(stream.stream_id) if params.seed is None else params.seed,
            max_tokens=max_tokens,
            priority=stream.submit.priority,
            label=stream.submit.label,
            owner=b"" if reader is None else reader.client,
            handle=stream.submit.handle,
        )
        self._set_up(stream, admit)
        self._ask_core(stream)

    def _set_up(self, stream: Stream, admit: Admit) -> None:
        """Give a stream its registration and its output side."""
        params = admit.params
        stops = stop_strings(params)
        prompt = u32(admit.prompt_ids).tolist()
        stream.registration = admit
        stream.interval = max(params.stream_interval, self._stream_interval)
        stream.width = 0 if params.logprobs is None else 1 + params.logprobs
        stream.output = StreamOutput(
            detokenizer=self._detokenizers.create(prompt, params.skip_special_tokens)
            if params.detokenize
            else None,
            stops=StopStrings(stops, params.include_stop_str_in_output) if stops else None,
            stop_ids=frozenset(admit.stop_token_ids),
            eos_ids=frozenset(admit.stop_token_ids) - frozenset(params.stop_token_ids),
            min_tokens=params.min_tokens,
            max_tokens=admit.max_tokens,
            include_stop=params.include_stop_str_in_output,
        )
        stream.output.push(u32(admit.output_ids).tolist())

    def _ask_core(self, stream: Stream) -> None:
        """Have the core run a stream, from wherever it is."""
        assert stream.registration is not None
        assert stream.output is not None
        admit = stream.registration
        if stream.output.token_ids:
            admit = structs.replace(admit, output_ids=pack_u32(stream.output.token_ids))
        if stream.stage is Stage.RENDERING:
            stream.stage = Stage.SUBMITTED
        self._core.state(admit)

    def _resume(self, session: Session[Receipt], resume: Resume) -> None:
        port = self._clients[session.identity]
        stream = self._streams.get(resume.stream_id)
        if stream is None:
            port.state(UnknownStreams((resume.handle,)))
            return
        before = stream.reader
        if before is not None and before.client != session.identity:
            self._clients[before.client].leave(stream)
        if stream.output is None:
            port.read(stream, resume.handle, START)
            return
        cursor = stream.output.log.find(resume.num_chars, resume.num_tokens)
        if cursor is None:
            fault = Fault("diverged", "the stream has no such position", "num_tokens")
            port.state(Rejected(resume.handle, fault))
            return
        port.read(stream, resume.handle, cursor)
        if stream.stage is not Stage.SUBMITTED:
            self._accept(stream)

    # ---- ends ----------------------------------------------------------------------------

    def _accept(self, stream: Stream) -> None:
        reader, admit = stream.reader, stream.registration
        if reader is not None and admit is not None:
            self._clients[reader.client].state(Accepted(reader.handle, admit.prompt_ids))

    def _refused(self, stream: Stream, fault: Fault) -> None:
        """The core did not take a stream, or had to end it."""
        if stream.stage is Stage.SUBMITTED:
            self._reject(stream, fault)
        elif stream.output is not None and stream.output.end is None:
            stream.output.finish("error", fault)
            self._end(stream)

    def _reject(self, stream: Stream, fault: Fault) -> None:
        """A stream that was never accepted is not kept."""
        if stream.reader is not None:
            self._clients[stream.reader.client].state(Rejected(stream.reader.handle, fault))
        self._remove(stream)

    def _fail(self, stream: Stream, why: str) -> None:
        assert stream.output is not None
        if stream.output.end is None:
            num_tokens = len(stream.output.token_ids)
            stream.output.end = End("error", num_tokens, fault=Fault("engine", why))
            stream.output.log.append("", num_tokens)
            self._end(stream)
            self._tell_end(stream)

    def _abort(self, stream: Stream) -> None:
        """End a stream at its reader's wish, wherever it is on its way."""
        if stream.stage is Stage.RENDERING:
            stream.is_aborted = True
            self._reject(stream, Fault("bad_request", "aborted before it was accepted"))
        elif stream.output is not None and stream.output.end is None:
            was_accepted = stream.stage is Stage.RUNNING
            stream.output.finish("abort")
            if not was_accepted:
                self._accept(stream)
            self._end(stream)
            self._tell_end(stream)

    def _end(self, stream: Stream) -> None:
        """A stream's end is known."""
        stream.stage = Stage.ENDED
        if stream.reader is not None:
            self._clients[stream.reader.client].mark(stream)
        else:
            self._leave_in(stream, time.monotonic() + self._grace_s)

    def _tell_end(self, stream: Stream) -> None:
        """Tell the core of an end that we named."""
        assert stream.output is not None
        end = stream.output.end
        assert end is not None
        if end.reason in ("stop", "length"):
            if stream.row is not None:
                self._core.ended(stream.row, end.num_tokens)
        else:
            self._core.state(Withdraw(stream.stream_id, end))

    def _leave_in(self, stream: Stream, when: float) -> None:
        self._num_left += 1  # ties in the heap never compare ids
        heapq.heappush(self._leaving, (when, self._num_left, stream.stream_id))

    def _dismiss(self, identity: bytes) -> None:
        """A client is gone for good: so is everything that only it could read."""
        port = self._clients.pop(identity, None)
        if port is None:
            return
        for stream in list(port.streams):
            stream.reader = None
            if stream.stage is Stage.ENDED:
                self._leave_in(stream, 0.0)
            elif stream.stage is Stage.RENDERING:
                self._remove(stream)
            else:
                self._abort(stream)
                self._leave_in(stream, 0.0)

    def _remove(self, stream: Stream) -> None:
        if stream.reader is not None:
            port = self._clients.get(stream.reader.client)
            if port is not None:
                port.leave(stream)
        self._streams.remove(stream)


def _seed(stream_id: bytes) -> int:
    """The seed of a stream that was given none (STREAMS 15)."""
    digest = hashlib.blake2b(stream_id, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
