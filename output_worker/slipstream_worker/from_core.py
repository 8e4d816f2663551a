"""What each message of the core does.

Owns: the attach to the core (what is stated, what is replayed), and the hot path: a step's tokens
to their streams. Does not know: clients, how a stream's text is made.

Rules (STREAMS II, IV):
- After an attach a fresh worker takes what the core replays; any other states its positions.
- An exception while handling one stream ends that stream and nothing else.
"""

from __future__ import annotations

import logging

import numpy as np
from msgspec import structs

from slipstream_ipc.columns import check_step, pack_u32, pack_u64, u32
from slipstream_ipc.errors import ProtocolError
from slipstream_ipc.log import history_digest
from slipstream_ipc.messages import (
    Admitted,
    CoreToWorker,
    Forget,
    ModelCard,
    Positions,
    Refusal,
    Refused,
    Registered,
    Step,
    SyncDone,
    Unknown,
    Welcome,
)
from slipstream_worker.core_hop import CoreHop
from slipstream_worker.detokenizer import DetokenizerFactory
from slipstream_worker.lives import Lives
from slipstream_worker.logprobs import split_logprobs
from slipstream_worker.registration import open_output
from slipstream_worker.streams import Stage, Stream

logger = logging.getLogger(__name__)

_POSITIONS_A_MESSAGE = 16384


class FromCore:
    """Handles the core's messages. `card` is set by the first Welcome."""

    def __init__(
        self,
        core: CoreHop,
        lives: Lives,
        detokenizers: DetokenizerFactory,
        *,
        tokenizer: str,
    ) -> None:
        """`tokenizer`: where clients find it."""
        self._core = core
        self._lives = lives
        self._detokenizers = detokenizers
        self._tokenizer = tokenizer
        self.card: ModelCard | None = None
        self.is_synced = False

    def handle(self, message: CoreToWorker) -> None:
        """Do what a message says; ProtocolError where it says what no core may say."""
        lives = self._lives
        match message:
            case Step():
                self._step(message)
            case Admitted():
                stream = lives.streams.get(message.stream_id)
                if stream is None:
                    self._core.state(Forget((message.stream_id,)))
                else:
                    lives.admitted(stream, message.row)
            case Welcome():
                self._attached(message)
            case Registered():
                self._registered(message)
            case Refused():
                stream = lives.streams.get(message.stream_id)
                if stream is not None:
                    lives.refused(stream, message.fault)
            case Unknown():
                self._readmit(message)
            case SyncDone():
                self.is_synced = True
                self._core.is_fresh = False
            case Refusal():
                logger.error("the core refuses us: %s", message.fault.message)
            case _:
                raise ProtocolError(f"{type(message).__name__} is not for a worker")

    def _attached(self, welcome: Welcome) -> None:
        self.card = structs.replace(welcome.model, path=self._tokenizer)
        self._core.restart()
        self._lives.streams.displace_all()
        if not self.is_synced:
            # we attached fresh, perhaps not for the first time: the core replays everything
            self._core.is_fresh = True
            self._lives.streams.clear()
            return
        known = [stream for stream in self._lives.streams.all() if stream.output is not None]
        for cut in range(0, max(len(known), 1), _POSITIONS_A_MESSAGE):
            part = known[cut : cut + _POSITIONS_A_MESSAGE]
            histories = [np.array(_token_ids(stream), np.uint32) for stream in part]
            self._core.state(
                Positions(
                    tuple(stream.stream_id for stream in part),
                    pack_u32([len(history) for history in histories]),
                    pack_u64([history_digest(history) for history in histories]),
                    cut + _POSITIONS_A_MESSAGE >= len(known),
                )
            )

    def _registered(self, message: Registered) -> None:
        """A stream of the life before this one."""
        admit = message.registration
        lives = self._lives
        if lives.streams.get(admit.stream_id) is not None:
            return
        try:
            output = open_output(admit, self._detokenizers)
        except Exception:
            logger.exception("stream %s cannot be taken up again", admit.stream_id.hex())
            self._core.state(Forget((admit.stream_id,)))
            return
        stream = Stream(admit.stream_id, Stage.RUNNING)
        lives.streams.add(stream)
        lives.register(stream, admit, output)
        lives.streams.place(stream, message.row)
        # its tokens are yet to come; where an abort or an error ended it, they come before that end
        if message.end is not None:
            stream.pending_end = message.end
            lives.push(stream, [])

    def _readmit(self, message: Unknown) -> None:
        """The core knows nothing of these: give it all we have of those that go on."""
        for stream_id in message.stream_ids:
            stream = self._lives.streams.get(stream_id)
            if stream is None or stream.stage is Stage.ENDED:
                continue
            assert stream.registration is not None
            outputs = pack_u32(_token_ids(stream))
            self._core.state(structs.replace(stream.registration, output_ids=outputs))

    def _step(self, step: Step) -> None:
        """New tokens of many streams: the hot path."""
        check_step(step)
        rows = u32(step.rows).tolist()
        token_ids = u32(step.token_ids).tolist()
        counts = u32(step.counts).tolist() if step.counts else None
        starts = u32(step.starts).tolist() if step.counts else None
        logprobs = split_logprobs(step.logprobs, counts, len(rows))
        stream_at = self._lives.streams.at
        at = 0
        for i, row in enumerate(rows):
            count = 1 if counts is None else counts[i]
            stream = stream_at(row)
            if stream is not None:
                try:
                    if starts is not None:
                        _check_start(stream, starts[i])
                    if logprobs is not None:
                        stream.logprobs += logprobs[i]
                    self._lives.push(stream, token_ids[at : at + count])
                except ProtocolError:
                    raise
                except Exception as error:
                    logger.exception("stream %s failed", stream.stream_id.hex())
                    why = f"{type(error).__name__} while its output was handled"
                    self._lives.fail(stream, why)
            at += count
        self._core.checked(step.step)


def _token_ids(stream: Stream) -> list[int]:
    assert stream.output is not None
    return stream.output.token_ids


def _check_start(stream: Stream, start: int) -> None:
    """ProtocolError unless a catch-up begins where our copy ends."""
    assert stream.registration is not None
    have = len(stream.registration.prompt_ids) // 4 + len(_token_ids(stream))
    if stream.stage is not Stage.ENDED and start != have:
        raise ProtocolError(f"a catch-up from {start} for a stream of {have} tokens")
