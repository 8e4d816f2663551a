"""Handles clients' messages, and prompts that come back from the tokenizer process.

- A submission is idempotent by its stream id; the same id with other content is a conflict.
- Clients' messages are handled only once all earlier streams are known (SyncDone; see `worker`), so
  that "unknown" is final.
- A failure while handling a client's message is reported to that client and affects no other.
- The answers of one submission share the decoding, the checks and the hash of its prompt.
- A stream that was aborted before it was accepted is never started later.
"""

from __future__ import annotations

import logging

from msgspec import Raw, structs

from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import (
    ANSWERS_INSPECT,
    ANSWERS_STAGES,
    ONE_TENANT,
    Abort,
    Cancel,
    Cancelled,
    ChangeAdapter,
    ClientToWorker,
    Detokenize,
    Embed,
    Embedded,
    Fault,
    Goodbye,
    Hello,
    Inspect,
    KnowsAdapters,
    Locate,
    Located,
    MediaSize,
    ModelCard,
    Ping,
    Recall,
    Rejected,
    Render,
    Rendered,
    Resume,
    Submit,
    Superseded,
    Tokenize,
    UnknownStreams,
)
from slipstream_ipc.telemetry.logs import of_requests
from slipstream_ipc.transport.router import Session
from slipstream_ipc.validation.media import why_no_media
from slipstream_ipc.validation.pooling import served_for
from slipstream_ipc.validation.request_spec import among_own
from slipstream_worker.clients.core_queries import CoreQueries
from slipstream_worker.clients.inspections import Inspections
from slipstream_worker.clients.load_notices import LoadNotices
from slipstream_worker.clients.ports import FrontAcceptor, Receipt
from slipstream_worker.clients.queries import UNREAD, ClientQueries
from slipstream_worker.clients.readers import accepted
from slipstream_worker.config import WorkerConfig
from slipstream_worker.detokenizer.factory import DetokenizerFactory
from slipstream_worker.lifecycle.lifecycle import MAX_STRIKES, StreamLifecycle
from slipstream_worker.lifecycle.recall_queue import RecallQueue
from slipstream_worker.lifecycle.stream_store import StreamStore
from slipstream_worker.streams.registration import (
    BadWords,
    Submission,
    answers_of,
    check_answer,
    open_output,
    register,
)
from slipstream_worker.streams.stream import ResumePoint, Stage, WorkerStream
from slipstream_worker.streams.stream_trace import StreamTrace, context_of, times_of
from slipstream_worker.tokenizer.client import RenderSource
from slipstream_worker.tokenizer.queue import RenderQueue

logger = logging.getLogger(__name__)

_CONFLICT = Fault("conflict", "this stream id is used by another request", "stream_id")


class ClientMessages:
    """Handles clients' messages."""

    def __init__(
        self,
        config: WorkerConfig,
        front: FrontAcceptor,
        lifecycle: StreamLifecycle,
        store: StreamStore,
        render_queue: RenderQueue[WorkerStream],
        prompts: RenderSource,
        detokenizers: DetokenizerFactory,
        load_notices: LoadNotices,
        core_queries: CoreQueries,
        *,
        is_traced: bool = False,
    ) -> None:
        """is_traced: whether spans are made of requests."""
        self._config = config
        self._is_traced = is_traced
        self._front = front
        self._lifecycle = lifecycle
        self._streams = store.table
        self._readers = store.readers
        self._retention = store.retention
        self._render_queue = render_queue
        self._detokenizers = detokenizers
        self._load_notices = load_notices
        self._core_queries = core_queries
        self._adapters, embeddings = core_queries.adapters, core_queries.embeddings
        self._embeddings = embeddings
        self._queries = ClientQueries(store.readers, prompts, embeddings)
        self.inspections = Inspections(store.readers)
        self._recalls = RecallQueue(lifecycle, self._queries, store.retention)
        self.is_draining = False  # new requests are rejected

    def handle(self, session: Session[Receipt], body: ClientToWorker, card: ModelCard) -> None:
        """Handle a message of a session."""
        lifecycle, config = self._lifecycle, self._config
        match body:
            case Hello():
                self._queries.withdraw(session.identity)  # it repeats its queries after an attach
                self._core_queries.withdraw(session.identity)
                self._readers.attach_client(session)
                self._front.welcome(
                    session,
                    card,
                    worker=config.index,
                    num_workers=config.num_workers,
                    replica=config.replica.encode(),
                    members=config.members,
                    answers=ANSWERS_INSPECT
                    | ANSWERS_STAGES
                    | (ONE_TENANT if session.public_key else 0),
                    incarnation=config.stack_incarnation,
                )
                self._adapters.welcomed(session.identity, card.adapters)
                if config.index == 0:  # which speaks for the stack
                    self._load_notices.welcomed(session)
            case Submit():
                self._submit_all(session, body, card)
            case Resume():
                self._try_to_resume(session, body)
            case Abort():
                stream = self._streams.get(body.stream_id)
                if stream is not None and self._readers.is_reader(
                    stream, session.identity, body.handle
                ):
                    if body.has_moved:
                        lifecycle.moved_away(stream)
                    else:
                        lifecycle.abort(stream)
            case Tokenize():
                self._queries.tokenize(session.identity, body, card)
            case Detokenize():
                self._queries.detokenize(session.identity, body, card)
            case Embed():
                self._embed(session, body, card)
            case Cancel():
                scope = session.public_key or body.scope
                found = tuple([lifecycle.cancel(each, scope) for each in body.stream_ids])
                self._readers.port(session.identity).enqueue(Cancelled(body.number, found))
            case Locate():
                self._locate(session, body)
            case Inspect():
                is_refused = self._queries.leaves_much_unread(session.identity)
                self.inspections.ask(session.identity, body.number, is_refused=is_refused)
            case ChangeAdapter():
                has_own_key = bool(session.public_key)
                self._adapters.ask(session.identity, body, has_own_key=has_own_key)
            case KnowsAdapters():
                self._adapters.known(session.identity, body.number)
            case Recall():
                self._recalls.add(session, body)
            case Goodbye():
                self._queries.withdraw(session.identity)
                self._core_queries.withdraw(session.identity)
                self._front.close(session)
                lifecycle.remove_client(session.identity)
            case Ping():
                pass  # the router has answered it

    def rendered(self, answer: Rendered, card: ModelCard) -> None:
        """Continue with the streams whose prompt the tokenizer process has finished."""
        if self._queries.answered(answer):
            return
        for stream in self._render_queue.answered(answer.key):
            if self._streams.get(stream.stream_id) is not stream:
                continue  # aborted meanwhile
            if answer.fault is not None:
                self._lifecycle.reject(stream, answer.fault)
                continue
            try:
                self._register_and_submit(stream, answer, card)
            except Exception as error:
                logger.exception("a stream failed", extra=of_requests(stream.label))
                why = f"{type(error).__name__} while accepting the request"
                self._lifecycle.fail(stream, why)

    @property
    def has_waiting(self) -> bool:
        """True if `flush` has anything to do."""
        return len(self._recalls) > 0 or self._adapters.has_to_tell

    def flush(self) -> None:
        """Answer Recalls, and say what all clients know. Call it in each turn, behind `handle`."""
        self._recalls.flush()
        self._adapters.flush()

    def beat(self) -> None:
        """Drop queries of clients that have gone. Call it regularly."""
        self._queries.beat()
        self._recalls.beat()
        self._embeddings.beat()

    def _embed(self, session: Session[Receipt], embed: Embed, card: ModelCard) -> None:
        fault = None
        if self.is_draining:
            fault = Fault("overloaded", "the server is shutting down")
        elif self._queries.leaves_much_unread(session.identity):
            fault = UNREAD
        if fault is None:
            self._queries.embed(session.identity, embed, card)
        else:
            self._readers.port(session.identity).enqueue(Embedded(embed.number, fault=fault))

    def _submit_all(self, session: Session[Receipt], submit: Submit, card: ModelCard) -> None:
        lifecycle = self._lifecycle
        if session.public_key:  # a client with a key cannot choose its tenant and scope
            key, keep = session.public_key, submit.keep
            keep = None if keep is None else structs.replace(keep, scope=key)
            submit = structs.replace(submit, tenant=key, scope=key, keep=keep)
            submit = among_own(submit)
        trace = context_of(submit) if self._is_traced else None  # all answers are in one
        if submit.trace != trace:
            submit = structs.replace(submit, trace=trace)
        submission = _read(submit, session.identity)
        first = self._streams.get(submit.stream_id)
        num_answers = 1 + len(submit.others) if first is None else first.num_answers
        for answer in answers_of(submit):
            known = self._streams.get(answer.stream_id)
            if isinstance(submission, Fault):
                fault = submission if known is None else _CONFLICT
                self._reject(session, answer, fault)
                continue
            try:
                self._submit(session, answer, submission, card)
            except Exception as error:
                logger.exception("a submission failed", extra=of_requests(submit.label))
                why = f"{type(error).__name__} while accepting the request"
                taken_in = self._streams.get(answer.stream_id)
                if taken_in is not None and taken_in is not known:
                    lifecycle.fail(taken_in, why)
                else:
                    self._reject(session, answer, Fault("engine", why))
        first = self._streams.get(submit.stream_id)
        if first is not None and not submit.was_accepted:
            first.num_answers = num_answers

    def _submit(
        self, session: Session[Receipt], submit: Submit, submission: Submission, card: ModelCard
    ) -> None:
        """Accept one answer of a submission, or reject it."""
        lifecycle = self._lifecycle
        known = self._streams.get(submit.stream_id)
        fingerprint = submission.fingerprint(submit)
        if (
            known is not None
            and (submit.moves > known.moves or (_is_first(submit) and known.logprobs_from))
            and _is_same(known, submit, fingerprint)
        ):
            lifecycle.replaced(known, session.identity, submit.handle, moves=submit.moves)
            known = None
        if known is not None and not known.is_deleted:
            self._submit_again(session, submit, known, fingerprint)
            return
        fault = self._retention.why_gone(submit.stream_id, submit.moves, submit.scope)
        if known is not None and fault is None:
            fault = _CONFLICT
        if fault is None and submit.strikes >= MAX_STRIKES:
            fault = Fault("engine", f"this request crashed the engine {submit.strikes} times")
        if fault is not None:
            self._reject(session, submit, fault)
            return
        if self.is_draining and not submit.was_accepted:
            fault = Fault("overloaded", "the server is shutting down")
            # a client asks the next stack (decision 012)
            self._reject(session, submit, fault, is_leaving=self._config.may_return)
            return
        try:
            check_answer(submit)
        except BadRequest as error:
            self._reject(session, submit, error.fault)
            return
        if card.pooling is not None:
            why = f"this model is served {served_for(card.pooling)}: it generates no text"
            self._reject(session, submit, Fault("bad_request", why))
            return
        if submit.media and (why := why_no_media(card)):
            self._reject(session, submit, Fault("bad_request", why, "media"))
            return
        try:
            sizes = submission.media_sizes(card)
        except BadRequest as error:
            self._reject(session, submit, error.fault)
            return
        render = _render_of(submit, submission, card, sizes)
        spec = submission.spec_of(submit)
        tenant = spec.tenant
        if render is not None and not submit.was_accepted:
            why = self._render_queue.why_full(render, tenant)
            if why:
                self._reject(session, submit, Fault("overloaded", why))
                return
        if submit.media and not submit.was_accepted:
            why = lifecycle.media.why_full(tenant, submit.media)
            if why:
                self._reject(session, submit, Fault("overloaded", why))
                return
        scope = submit.scope if submit.keep is None else submit.keep.scope
        if lifecycle.keeper.is_of_another(submit.stream_id, scope):
            self._reject(session, submit, _CONFLICT)
            return
        if submit.keep is not None:
            why = lifecycle.keeper.why_full(submit.keep, was_accepted=submit.was_accepted)
            if why:
                self._reject(session, submit, Fault("overloaded", why))
                return
        media = lifecycle.media.hold(submit.stream_id, tenant, submit.media)
        if media is not submit.media:
            submit = structs.replace(submit, media=media)
        stream = WorkerStream(submit.stream_id, Stage.RENDERING, submit, fingerprint=fingerprint)
        stream.asked = spec
        stream.owner = session.identity
        stream.arrived_at = self._retention.now
        if self._is_traced:
            stream.trace = StreamTrace(times_of(submit, self._retention.now))
        self._streams.add(stream)
        lifecycle.keeper.expect_answer(stream)
        self._readers.read(stream, session.identity, submit.handle, _position(submit))
        if render is None:
            self._register_and_submit(stream, Rendered(0), card)
        else:
            stream.submit = structs.replace(
                submit, params=Raw(), text=None, messages=(), prediction=""
            )
            self._render_queue.ask(stream, render, tenant)

    def _submit_again(
        self, session: Session[Receipt], submit: Submit, known: WorkerStream, fingerprint: bytes
    ) -> None:
        """A duplicate: its client attached again before it got an answer, or was replaced.

        One that was never accepted is no older reader's: that one would know of the moves.
        """
        is_older = submit.moves < known.moves and not _is_first(submit)
        if is_older and known.is_open_to(submit.scope):
            self._readers.port(session.identity).enqueue(Superseded(submit.handle))
            return
        if not _is_same(known, submit, fingerprint):
            self._reject(session, submit, _CONFLICT)
            return
        self._readers.read(known, session.identity, submit.handle, _position(submit))
        if known.stage in (Stage.RUNNING, Stage.ENDED):
            self._readers.accept(known)

    def _register_and_submit(
        self, stream: WorkerStream, rendered: Rendered, card: ModelCard
    ) -> None:
        """Register a stream whose tokens are all known, and submit it to the core."""
        assert stream.submit is not None
        assert stream.asked is not None
        try:
            prompt_ids = stream.submit.token_ids or rendered.token_ids
            admit = register(
                stream.submit,
                prompt_ids,
                stream.owner if stream.reader is None else stream.reader.client,
                card,
                bad_words=BadWords(rendered.bad_word_ids, rendered.bad_word_counts),
                spec=stream.asked,
                fingerprint=stream.fingerprint,
                shares_prefixes=self._config.share_prefix_cache,
                answer=rendered.answer,
                call_grammar=rendered.call_grammar,
                reasoning=rendered.reasoning,
                frame=rendered.frame,
                changed_turns=rendered.changed_turns,
                formats=rendered.formats,
                is_for_formats=rendered.is_for_formats,
                prediction_ids=rendered.prediction_ids,
            )
        except BadRequest as error:
            self._lifecycle.reject(stream, error.fault)
            return
        if stream.trace is not None:
            origin = structs.replace(stream.trace.origin, rendered_s=self._retention.now)
            stream.trace.origin = origin
            admit = structs.replace(admit, begun=structs.replace(admit.begun, times=origin))
        output = open_output(admit, self._detokenizers)
        self._lifecycle.register(stream, admit, output)
        self._lifecycle.submit(stream)

    def _try_to_resume(self, session: Session[Receipt], resume: Resume) -> None:
        try:
            self._resume(session, resume)
        except Exception as error:
            stream = self._streams.get(resume.stream_id)
            label = "" if stream is None else stream.label
            logger.exception("a stream cannot be resumed", extra=of_requests(label))
            if stream is not None:
                why = f"{type(error).__name__} while resuming the stream"
                self._lifecycle.fail(stream, why)
            reader = None if stream is None else stream.reader
            is_told = reader is not None and reader.matches(session.identity, resume.handle)
            if reader is None or not is_told or reader.is_waiting:  # it would not get the end
                self._readers.port(session.identity).enqueue(UnknownStreams((resume.handle,)))

    def _resume(self, session: Session[Receipt], resume: Resume) -> None:
        stream = self._streams.get(resume.stream_id)
        scope = session.public_key or resume.scope
        may_read = stream is not None and (
            stream.is_open_to(scope)
            or (stream.is_deleted and _is_its_reader(stream, session.identity, resume.handle))
        )
        if stream is None or not may_read or stream.moves < resume.moves:
            self._readers.port(session.identity).enqueue(UnknownStreams((resume.handle,)))
            return
        position = ResumePoint(resume.num_chars, resume.num_tokens, resume.digest, resume.checksum)
        if stream.stage in (Stage.RUNNING, Stage.ENDED) and stream.registration is not None:
            port = self._readers.port(session.identity)
            admit = stream.registration
            port.enqueue(accepted(resume.handle, admit), stream.worker_row)
            port.enqueue_prompt_logprobs(stream, resume.handle)
        is_own = self._readers.is_reader(stream, session.identity, None)
        if stream.trace is not None and not is_own:
            stream.trace.note_event(self._retention.now, "resumed by another client")
        self._readers.read(stream, session.identity, resume.handle, position)

    def _locate(self, session: Session[Receipt], locate: Locate) -> None:
        moves: list[int] = []
        if not self._queries.leaves_much_unread(session.identity):
            scope = session.public_key or locate.scope
            found = [self._streams.get(stream_id) for stream_id in locate.stream_ids]
            moves = [
                0 if stream is None or not stream.is_open_to(scope) else 1 + stream.moves
                for stream in found
            ]
        self._queries.respond(session.identity, Located(locate.number, tuple(moves)))

    def _reject(
        self, session: Session[Receipt], submit: Submit, fault: Fault, *, is_leaving: bool = False
    ) -> None:
        self._lifecycle.count_rejection(submit.label, fault)
        self._readers.port(session.identity).enqueue(Rejected(submit.handle, fault, is_leaving))


def _is_first(submit: Submit) -> bool:
    """True if the sender of `submit` has received nothing of the stream."""
    return submit.moves == 0 and not submit.was_accepted


def _read(submit: Submit, client: bytes) -> Submission | Fault:
    """The checked submission, or why none of its answers can be accepted."""
    try:
        return Submission(submit, client)
    except BadRequest as error:
        return error.fault
    except Exception as error:
        logger.exception("a submission failed", extra=of_requests(submit.label))
        return Fault("engine", f"{type(error).__name__} while accepting the request")


def _render_of(
    submit: Submit, submission: Submission, card: ModelCard, sizes: tuple[MediaSize, ...]
) -> Render | None:
    """The request to the tokenizer process for a submission; None if nothing has to be done. sizes:
    of its images.
    """
    bad_words = submission.bad_words
    prediction = submit.prediction if card.is_drafted else ""
    if submit.token_ids and not bad_words and not prediction:
        return None
    return Render(
        0,
        submit.text,
        submit.messages,
        bad_words,
        template=submit.template,
        max_tokens=card.max_model_len,
        answer=submit.answer if submit.messages else None,
        structured=submission.structured_form,
        prediction=prediction,
        media=sizes if submit.messages else (),
    )


def _is_its_reader(stream: WorkerStream, client: bytes, handle: int) -> bool:
    return stream.reader is not None and stream.reader.matches(client, handle)


def _is_same(known: WorkerStream, submit: Submit, fingerprint: bytes) -> bool:
    """True if the stream belongs to this request, and its scope allows the sender."""
    return known.fingerprint == fingerprint and known.is_open_to(submit.scope)


def _position(submit: Submit) -> ResumePoint:
    if submit.output_ids:
        return ResumePoint(submit.num_chars, len(submit.output_ids) // 4)
    return ResumePoint(submit.num_chars, submit.num_tokens, checksum=submit.checksum)
