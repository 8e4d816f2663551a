"""Decides whether a stream can be admitted, and turns its registration into a scheduler request.

- The worker has checked the request against the model card. Checked again here are limits that only
  the core knows, and everything that could harm the core.
- A stream is refused if its registration, at full length and with all log-probabilities, would not
  fit into one message: it could be neither replayed nor admitted again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from slipstream_core.grammar.matcher import GrammarMatcher
from slipstream_core.grammar.reasoning.reasoning_state import ReasoningState
from slipstream_core.media.places import MediaPlaces
from slipstream_core.scheduler.constraint_columns import token_constraints
from slipstream_core.scheduler.request_table import NewRequest
from slipstream_core.workers.adapters import Adapters
from slipstream_core.workers.stream_table import CoreStream
from slipstream_ipc.columns import check_entry, num_scored, u32
from slipstream_ipc.crash_note import ID_BYTES
from slipstream_ipc.errors import BadRequest, ProtocolError
from slipstream_ipc.messages import Admit, Fault, ModelCard, ReasoningIds
from slipstream_ipc.messages.budgets import MAX_CORE_MESSAGE_BYTES
from slipstream_ipc.validation.media import media_bytes, why_no_media
from slipstream_ipc.validation.request_spec import content_of
from slipstream_ipc.validation.sampling_params import check_logprob_bytes, check_num_logprobs
from slipstream_ipc.validation.structured_output import check_ending
from slipstream_ipc.validation.token_constraints import check_rules, unpack_words

_STRIKES_TO_SUSPECT = 2
_OTHER_BYTES = 2**23  # bytes of a registration besides its columns: its settings


class WaitingLoad(NamedTuple):
    """The number of requests and tokens that wait: of all tenants, and of the request's own."""

    num: int
    num_tokens: int
    own_num: int
    own_tokens: int


@dataclass(frozen=True, slots=True)
class Admission:
    """The limits of admission. `fits(n)`: whether the cache could ever hold a request of n tokens.

    All tenants together may have twice `max_waiting` requests and twice `max_waiting_tokens` tokens
    waiting. A tenant may have no more of that than is still free: a tenant alone is limited to
    half, and there is always room for another.
    """

    card: ModelCard
    fits: Callable[[int], bool]
    max_waiting: int  # of a tenant while it is the only one
    max_readmitted: int  # the same for a request that was accepted once
    max_waiting_tokens: int
    max_readmitted_tokens: int
    engine_objection: Callable[[Admit], Fault | None]  # what only the engine knows
    adapters: Adapters

    def objection(self, admit: Admit, waiting: WaitingLoad) -> Fault | None:
        """The reason why a stream cannot be admitted while `waiting` waits; None if it can.

        Raises ProtocolError for malformed columns.
        """
        if len(admit.stream_id) != ID_BYTES:
            why = f"{len(admit.stream_id)} bytes, allowed: {ID_BYTES}"
            return Fault("bad_request", why, "stream_id")
        derived = admit.derived
        prompt = u32(admit.prompt_ids, "prompt_ids")
        outputs = u32(admit.begun.output_ids, "output_ids")
        prediction = u32(derived.prediction_ids, "prediction_ids")
        total = len(prompt) + derived.max_tokens
        for field, largest in (
            ("prompt_token_ids", int(prompt.max(initial=0))),
            ("output_ids", int(outputs.max(initial=0))),
            ("stop_token_ids", max(derived.stop_token_ids, default=0)),
            ("reasoning", _largest(derived.reasoning)),
            ("prediction_ids", int(prediction.max(initial=0))),
        ):
            if largest >= self.card.vocab_size:
                why = f"token id {largest}, allowed: [0, {self.card.vocab_size})"
                return Fault("bad_request", why, field)
        if not len(prompt) or total > self.card.max_model_len:
            why = f"{total} tokens, allowed: at most {self.card.max_model_len}, with a prompt"
            return Fault("bad_request", why, "prompt")
        if len(outputs) >= derived.max_tokens:
            why = f"{len(outputs)} outputs already, allowed: fewer than {derived.max_tokens}"
            return Fault("bad_request", why, "output_ids")
        try:
            check_ending(admit.spec.params, derived.stop_token_ids)
        except BadRequest as error:
            return error.fault
        if not self.fits(total):
            why = f"prompt and max_tokens: {total} tokens would never fit into the cache"
            return Fault("bad_request", why, "max_tokens")
        try:
            check_rules(
                admit.spec.params,
                unpack_words(derived.bad_word_ids, derived.bad_word_counts),
                vocab_size=self.card.vocab_size,
                stop_ids=derived.stop_token_ids,
                max_tokens=derived.max_tokens,
            )
        except BadRequest as error:
            return error.fault
        return (
            self._media_objection(admit)
            or self._logprobs_objection(admit, total)
            or self.adapters.objection(admit.spec)
            or self.engine_objection(admit)
            or self._overload(admit, waiting)
        )

    def _media_objection(self, admit: Admit) -> Fault | None:
        if admit.media and (why := why_no_media(self.card)):
            return Fault("bad_request", why, "media")
        if admit.media and admit.spec.params.prompt_logprobs is not None:
            return Fault("bad_request", "with images, allowed: None", "prompt_logprobs")
        return None

    def _logprobs_objection(self, admit: Admit, total: int) -> Fault | None:
        params, num_prompt = admit.spec.params, len(admit.prompt_ids) // 4
        try:
            check_num_logprobs(params, self.card)
            check_logprob_bytes(params, num_prompt, admit.derived.max_tokens, self.card.vocab_size)
        except BadRequest as error:
            return error.fault
        if -1 in (params.logprobs, params.prompt_logprobs):
            return Fault("bad_request", "-1, allowed: the number that it stands for", "logprobs")
        if params.logprob_token_ids is not None and params.logprobs is None:
            return Fault(
                "bad_request", "None, allowed: the number of logprob_token_ids", "logprobs"
            )
        if admit.begun.prompt_logprobs is not None:
            prompt_width = 0 if params.prompt_logprobs is None else 1 + params.prompt_logprobs
            try:
                check_entry(admit.begun.prompt_logprobs, num_prompt - 1, prompt_width)
            except ProtocolError as error:
                return Fault("bad_request", str(error), "prompt_logprobs")
        width = 0 if admit.spec.params.logprobs is None else 1 + admit.spec.params.logprobs
        if admit.begun.logprobs is not None:
            try:
                check_entry(admit.begun.logprobs, num_scored(admit), width)
            except ProtocolError as error:
                return Fault("bad_request", str(error), "logprobs")
        num_bytes = 4 * total + admit.derived.max_tokens * (8 * width + 4) + _OTHER_BYTES
        num_bytes += 0 if admit.spec.keep is None else len(admit.spec.keep.record)
        num_bytes += len(admit.derived.prediction_ids) + media_bytes(admit.media)
        if num_bytes > MAX_CORE_MESSAGE_BYTES:
            why = (
                f"{total} tokens with {width} log-probabilities to an output may take {num_bytes} "
                f"bytes, allowed: {MAX_CORE_MESSAGE_BYTES}"
            )
            return Fault("bad_request", why, "logprobs" if width else "prompt")
        return None

    def _overload(self, admit: Admit, waiting: WaitingLoad) -> Fault | None:
        most, most_tokens = self.max_waiting, self.max_waiting_tokens
        if admit.begun.was_accepted:
            most, most_tokens = self.max_readmitted, self.max_readmitted_tokens
        # no more than is still free of twice the bound
        if waiting.own_num >= 2 * most - waiting.num:
            return Fault("overloaded", _full(waiting.own_num, waiting.num, "requests"))
        num_tokens = waiting.own_tokens + num_tokens_of(admit)
        if num_tokens > 2 * most_tokens - waiting.num_tokens:
            return Fault("overloaded", _full(waiting.own_tokens, waiting.num_tokens, "tokens"))
        return None


def _largest(reasoning: ReasoningIds | None) -> int:
    if reasoning is None:
        return 0
    ids = (reasoning.begins, reasoning.ends, reasoning.calls, reasoning.borders, reasoning.blanks)
    longer = reasoning.sequences
    sequences = (longer.begins, longer.ends, longer.calls, longer.borders, longer.triggers)
    every = (*ids, reasoning.triggers, *chain.from_iterable(sequences))
    return max(max(each, default=0) for each in every)


def is_suspect(admit: Admit) -> bool:
    """True for a request that cores died of: it runs alone, and its images are encoded alone."""
    return admit.begun.strikes >= _STRIKES_TO_SUSPECT


def num_tokens_of(admit: Admit) -> int:
    """Tokens that have to be computed before the next output."""
    return (len(admit.prompt_ids) + len(admit.begun.output_ids)) // 4


def _full(own: int, num: int, what: str) -> str:
    if own == num:
        return f"{num} {what} are waiting already"
    return f"{own} {what} of this tenant are waiting already, {num} in all"


def is_same(one: Admit, other: Admit) -> bool:
    """True if two registrations are of the same request, whatever their progress."""
    if one.derived.fingerprint or other.derived.fingerprint:
        return one.derived.fingerprint == other.derived.fingerprint
    names = ("stop_token_ids", "seed", "max_tokens")
    is_alike = all(getattr(one.derived, name) == getattr(other.derived, name) for name in names)
    is_alike = is_alike and one.prompt_ids == other.prompt_ids
    return is_alike and content_of(one.spec) == content_of(other.spec)


def has_other_adapter(stream: CoreStream, admit: Admit) -> bool:
    """True if a registration of a stream's request has another version of its adapter."""
    before, spec = stream.registration.spec, admit.spec
    is_other = before.adapter_digest != spec.adapter_digest
    return is_other and before.adapter == spec.adapter and is_same(stream.registration, admit)


def wants_prompt(admit: Admit) -> bool:
    """True if the log-probabilities of the prompt have to be computed here."""
    return admit.spec.params.prompt_logprobs is not None and admit.begun.prompt_logprobs is None


def new_request(
    stream: CoreStream,
    grammar: GrammarMatcher | None = None,
    reasoning: ReasoningState | None = None,
    adapter: int = -1,
    media: MediaPlaces | None = None,
) -> NewRequest:
    """The scheduler's request for a registration. adapter: its place; -1: none. media: the places
    of its images.
    """
    admit = stream.registration
    params, derived = admit.spec.params, admit.derived
    end_ids = () if grammar is None else grammar.end_ids
    return NewRequest(
        row=stream.row,
        prompt_len=stream.prompt_len,
        max_tokens=derived.max_tokens,
        spec=admit.spec,
        seed=derived.seed,
        prefix_root=derived.prefix_root,
        stop_token_ids=derived.stop_token_ids,
        worker_ends=bool(derived.stop_token_ids or params.stop or params.repetition_detection),
        is_suspect=is_suspect(admit),
        use_prefix_cache=not wants_prompt(admit),
        num_prompt_logprobs=(params.prompt_logprobs or 0) if wants_prompt(admit) else -1,
        constraints=token_constraints(
            params, unpack_words(derived.bad_word_ids, derived.bad_word_counts)
        ),
        has_grammar=grammar is not None,
        reasoning=reasoning,
        masked_ids=() if reasoning is None else reasoning.masked_ids(end_ids),
        adapter=adapter,
        prediction_ids=derived.prediction_ids,
        media=media,
    )
