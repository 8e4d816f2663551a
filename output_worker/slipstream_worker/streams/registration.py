"""Turns a client's submission into the registration that core and worker work from.

Decides what a request means: its seed, its stop ids, its token limit. Also opens the output side of
a registered stream. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import msgspec
from msgspec import structs

from slipstream_ipc.arrays import UInt32s
from slipstream_ipc.columns import u32
from slipstream_ipc.errors import BadRequest, Summary, one_of
from slipstream_ipc.messages import (
    Admit,
    AnswerSettings,
    Begun,
    Derived,
    LeftOut,
    MediaSize,
    ModelCard,
    ReasoningIds,
    RequestSpec,
    SamplingParams,
    StructuredForm,
    StructuredOutputs,
    Submit,
    TurnChanges,
)
from slipstream_ipc.messages.answer import FUNCTION_CHOICE
from slipstream_ipc.messages.budgets import LOGPROB_BYTES, MESSAGE_BUDGET_BYTES
from slipstream_ipc.transport.codec import decode_params
from slipstream_ipc.validation.media import check_media, sizes_of
from slipstream_ipc.validation.request_spec import content_of, root_digest, spec_of
from slipstream_ipc.validation.sampling_params import (
    check_params,
    check_prompt,
    stop_strings,
    with_num_logprobs,
)
from slipstream_ipc.validation.structured_output import check_ending, kind_of
from slipstream_ipc.validation.token_constraints import check_rules, unpack_words, with_distinct_ids
from slipstream_worker.detokenizer.factory import DetokenizerFactory
from slipstream_worker.formats.call_grammar import shown_choice
from slipstream_worker.output.answer_output import AnswerOutput
from slipstream_worker.output.answer_reading import open_reader
from slipstream_worker.output.repetition import detector_of
from slipstream_worker.output.stop_strings import StopStrings
from slipstream_worker.output.stream_output import StopCriteria, StreamOutput

_STREAM_ID_BYTES = 16
_TOOL_CHOICES = ("auto", "none", "required")


@dataclass(frozen=True, slots=True)
class BadWords:
    """The token sequences of a request's bad words, as columns of `Derived`."""

    ids: bytes = b""
    counts: bytes = b""


_NO_BAD_WORDS = BadWords()


class Submission:
    """A Submit, decoded, checked and hashed once for all of its answers."""

    def __init__(self, submit: Submit, client: bytes = b"") -> None:
        """For client, see `spec_of`. Raises BadRequest for errors that are visible before the
        prompt is rendered.
        """
        params = with_distinct_ids(_checked_params(submit))
        self._submit = submit
        self._params = params
        self.spec = spec_of(submit, params, client)
        self._digest = b""  # hash of what the answers share
        self._media_sizes: tuple[MediaSize, ...] | BadRequest | None = None

    @property
    def bad_words(self) -> tuple[str, ...]:
        """Strings that its answers must not contain."""
        return self._params.bad_words or ()

    @property
    def structured_form(self) -> StructuredForm | None:
        """The form of the structured output of its answers; JSON without blanks is other."""
        outputs = self._params.structured_outputs
        if outputs is None:
            return None
        kind = kind_of(outputs)
        if kind == "grammar":
            return "grammar"
        is_loose = kind in ("json", "json_object") and not outputs.disable_any_whitespace
        return "json" if is_loose else "other"

    def spec_of(self, answer: Submit) -> RequestSpec:
        """The spec of one of its answers; each allowed token id is listed once."""
        if answer.seed is None:
            return self.spec
        return structs.replace(self.spec, params=structs.replace(self._params, seed=answer.seed))

    def media_sizes(self, card: ModelCard) -> tuple[MediaSize, ...]:
        """The sizes of its images (`sizes_of`), whose headers are read once, also where one is
        refused. Raises: BadRequest.
        """
        if self._media_sizes is None:
            try:
                self._media_sizes = sizes_of(self._submit.media, card)
            except BadRequest as error:
                self._media_sizes = error
        if isinstance(self._media_sizes, BadRequest):
            raise self._media_sizes
        return self._media_sizes

    def fingerprint(self, answer: Submit) -> bytes:
        """Hash of an answer's content, 16 bytes; tells a duplicate from a conflict under the same
        id.

        Independent of the client handle, of what `content_of` leaves out, of the other answers of
        the Submit, and of how much of the answer its sender has.
        """
        submit = self._submit
        if not self._digest:
            shared: tuple[object, ...] = (
                content_of(self.spec),
                submit.text,
                submit.token_ids,
                submit.messages,
                submit.template,
            )
            if submit.media:
                shared = (*shared, [item.digest for item in submit.media])
            self._digest = hashlib.blake2b(msgspec.msgpack.encode(shared)).digest()
        seed = self._params.seed if answer.seed is None else answer.seed
        own = (self._digest, answer.stream_id, seed)
        return hashlib.blake2b(msgspec.msgpack.encode(own), digest_size=16).digest()


def answers_of(submit: Submit) -> Iterator[Submit]:
    """Each answer of the submission, as a Submit for it alone."""
    yield structs.replace(submit, others=()) if submit.others else submit
    for other in submit.others:
        yield structs.replace(
            submit, handle=other.handle, stream_id=other.stream_id, seed=other.seed, others=()
        )


def check_answer(answer: Submit) -> None:
    """Raise BadRequest for errors in one of the answers of a Submit."""
    if len(answer.stream_id) != _STREAM_ID_BYTES:
        raise BadRequest("stream_id", answer.stream_id, f"{_STREAM_ID_BYTES} bytes")
    if not 0 <= answer.handle < 2**32:
        raise BadRequest("handle", answer.handle, "an integer in [0, 2**32)")


def _checked_params(submit: Submit) -> SamplingParams:
    """The params of a Submit, of which all is checked but the rest of its spec."""
    if submit.others and (submit.was_accepted or submit.output_ids or submit.num_tokens):
        allowed = "none for a stream that was accepted before"
        raise BadRequest("others", Summary(f"{len(submit.others)} of them"), allowed)
    params = decode_params(submit.params)
    check_params(params)
    if params.n != 1:
        raise BadRequest("n", params.n, "1, as a stream is one answer")
    given = (submit.text is not None) + bool(submit.token_ids) + bool(submit.messages)
    if given != 1:
        raise BadRequest(
            "prompt", Summary(f"{given} prompts"), "one of text, token_ids and messages"
        )
    if len(submit.token_ids) % 4:
        raise BadRequest(
            "prompt_token_ids", Summary(f"{len(submit.token_ids)} bytes"), "u32 values"
        )
    if len(submit.output_ids) % 4:
        raise BadRequest("output_ids", Summary(f"{len(submit.output_ids)} bytes"), "u32 values")
    check_media(submit)
    if submit.media and params.prompt_logprobs is not None:
        allowed = "None with images, whose placeholders are no text"
        raise BadRequest("prompt_logprobs", params.prompt_logprobs, allowed)
    if params.thinking_token_budget not in (None, -1) and not submit.messages:
        allowed = "None without messages: reasoning is told apart in answers to chats"
        raise BadRequest("thinking_token_budget", params.thinking_token_budget, allowed)
    if submit.answer is not None:
        _check_choice(submit.answer.tool_choice, params)
    if submit.keep is not None and submit.others:
        raise BadRequest("keep", Summary("several answers"), "one answer to a Submit with it")
    return params


def _check_choice(choice: str, params: SamplingParams) -> None:
    """Raise BadRequest for a choice of tools that is not allowed, or not with these params."""
    if choice not in _TOOL_CHOICES and not choice.startswith(FUNCTION_CHOICE):
        raise BadRequest("tool_choice", choice, '"auto", "none", "required" or a function')
    if choice in ("auto", "none"):
        return
    for field, is_given in (
        ("structured_outputs", params.structured_outputs is not None),
        ("min_tokens", params.min_tokens > 0),
        ("detokenize=False", not params.detokenize),
    ):
        if is_given:
            given = Summary(f"{shown_choice(choice)} with {field}")
            allowed = '"auto" or "none" with it: a forced call decides the form of the answer'
            raise BadRequest("tool_choice", given, allowed)


def register(
    submit: Submit,
    prompt_ids: bytes,
    client: bytes,
    card: ModelCard,
    *,
    bad_words: BadWords = _NO_BAD_WORDS,
    spec: RequestSpec,
    fingerprint: bytes,
    shares_prefixes: bool = True,
    answer: AnswerSettings | None = None,
    call_grammar: str = "",
    reasoning: ReasoningIds | None = None,
    frame: str = "",
    changed_turns: TurnChanges = (),
    formats: LeftOut = (),
    is_for_formats: bool = False,
    prediction_ids: bytes = b"",
) -> Admit:
    """The registration of an answer whose prompt is tokenised. Raises BadRequest if it cannot run.

    answer: how it is read as events; None: it is text alone. call_grammar: of an answer that has to
    be calls, or of calls alone; the core is given it as a grammar of the request's own. reasoning:
    how the core can follow reasoning and calls, where there is something that depends on it. frame:
    what structured output stands in. changed_turns: what was done to the chat. formats: paths of
    formats that only call_grammar can enforce; is_for_formats: nothing else asks for it.
    prediction_ids: of what it will probably say.

    shares_prefixes: False lets no other tenant share the prefixes of one that the Submit names.
    `spec` and `fingerprint` come from its Submission. Without a given seed, the seed follows from
    the stream's id.
    """
    params = spec.params
    eos = () if params.ignore_eos else card.eos_token_ids
    stop_token_ids = tuple(dict.fromkeys(eos + params.stop_token_ids))
    is_free = reasoning is not None and reasoning.has_triggers
    is_forced = answer is not None and answer.options.forces_calls
    target = None if answer is None else answer.options.reasoning_target
    if target is not None and params.thinking_token_budget is None:
        with_budget = structs.replace(params, thinking_token_budget=target)
        with suppress(BadRequest):
            _check_budget(with_budget, reasoning, stop_token_ids, bad_words)
            params = with_budget
    if call_grammar and not is_forced and not is_free:  # it is of the whole answer
        has_least = params.min_tokens > 0
        is_other = params.structured_outputs is not None or not stop_token_ids
        if is_other or (has_least and is_for_formats):
            call_grammar = ""
        elif has_least:
            allowed = "0 where a function is strict, or there is one call at most"
            raise BadRequest("min_tokens", params.min_tokens, allowed)
    if reasoning is not None and is_free and not stop_token_ids:
        reasoning = _without_triggers(reasoning)  # it goes on without an end
        call_grammar = ""
    elif call_grammar:
        params = structs.replace(params, structured_outputs=StructuredOutputs(grammar=call_grammar))
    if params.thinking_token_budget == -1:
        params = structs.replace(params, thinking_token_budget=None)
    has_grammar = params.structured_outputs is not None
    if params.thinking_token_budget is None and (
        not has_grammar or (reasoning is not None and reasoning.in_grammar)
    ):
        reasoning = None
    max_tokens = check_prompt(u32(prompt_ids), params, card)
    check_rules(
        params,
        unpack_words(bad_words.ids, bad_words.counts),
        vocab_size=card.vocab_size,
        stop_ids=stop_token_ids,
        max_tokens=max_tokens,
    )
    if is_forced and not stop_token_ids:
        given = Summary("a forced call without an id that ends the answer")
        raise BadRequest("tool_choice", given, "one: the model's, or one of stop_token_ids")
    if is_free and reasoning is not None and reasoning.is_single and params.min_tokens > 0:
        raise BadRequest("min_tokens", params.min_tokens, "0 where parallel_tool_calls is false")
    check_ending(params, stop_token_ids)
    _check_budget(params, reasoning, stop_token_ids, bad_words)
    if answer is not None and not params.detokenize:
        allowed = "true where the answer is read as reasoning, content and tool calls"
        raise BadRequest("detokenize", False, allowed)
    spec = _with_adapter(spec, submit, card)
    params, seed = with_num_logprobs(params, card.vocab_size), params.seed
    if seed is not None:
        params = structs.replace(params, seed=None)
    # a hit in the prefix cache tells what others have asked (decision 015)
    alone = b"" if shares_prefixes else submit.tenant
    derived = Derived(
        seed_of(submit.stream_id) if seed is None else seed,
        max_tokens,
        stop_token_ids,
        fingerprint,
        prefix_root=root_digest(card.name, spec, alone),
        bad_word_ids=bad_words.ids,
        bad_word_counts=bad_words.counts,
        answer=answer,
        reasoning=reasoning,
        frame=frame,
        changed_turns=changed_turns,
        left_out=() if call_grammar else formats,
        prediction_ids=_ids_of_model(prediction_ids, card),
    )
    begun = Begun(
        submit.output_ids,
        was_accepted=submit.was_accepted,
        strikes=submit.strikes,
        owner=client,
        handle=submit.handle,
        moves=submit.moves,
    )
    if params is not spec.params:
        spec = structs.replace(spec, params=params)
    return Admit(submit.stream_id, prompt_ids, spec, derived, begun, media=submit.media)


def _ids_of_model(prediction_ids: bytes, card: ModelCard) -> bytes:
    """The ids up to one that the tokenizer has and the model does not."""
    ids = u32(prediction_ids)
    beyond = (ids >= card.vocab_size).nonzero()[0]
    return prediction_ids[: 4 * int(beyond[0])] if len(beyond) else prediction_ids


def _with_adapter(spec: RequestSpec, submit: Submit, card: ModelCard) -> RequestSpec:
    """The spec with the digest of its adapter: of a stream that has begun, the one that it began
    with; else that of the adapter as it is, or of what it was when the stream was accepted, if the
    name is gone. Raises BadRequest for one that is not served.
    """
    if not spec.adapter:
        return spec
    digest = next((each.digest for each in card.adapters if each.name == spec.adapter), None)
    has_begun = bool(submit.output_ids or submit.num_tokens)
    if has_begun and spec.adapter_digest:
        return spec
    if digest is None and submit.was_accepted and spec.adapter_digest:
        return spec  # a core keeps what its streams have, without a name
    if digest is None:
        names = [each.name for each in card.adapters]
        allowed = one_of(names) if names else "none: no adapter is served"
        raise BadRequest("model", spec.adapter, allowed)
    return structs.replace(spec, adapter_digest=digest)


def _without_triggers(reasoning: ReasoningIds) -> ReasoningIds:
    longer = structs.replace(reasoning.sequences, triggers=())
    return structs.replace(reasoning, triggers=(), sequences=longer)


def _check_budget(
    params: SamplingParams,
    reasoning: ReasoningIds | None,
    stop_token_ids: tuple[int, ...],
    bad_words: BadWords,
) -> None:
    """Raise BadRequest for a budget that cannot be kept."""
    budget, field = params.thinking_token_budget, "thinking_token_budget"
    if budget is None:
        return
    end = () if reasoning is None else reasoning.forced_end
    if not end:
        allowed = (
            "None with this model, whose reasoning has no end that is made of tokens, or whose "
            "format is not known (see `slipstream formats`)"
        )
        raise BadRequest(field, budget, allowed)
    words, stop_ids = unpack_words(bad_words.ids, bad_words.counts), set(stop_token_ids)
    for other, excludes in (
        (
            "allowed_token_ids",
            params.allowed_token_ids is not None and not set(end) <= set(params.allowed_token_ids),
        ),
        ("bad_words", any(word[-1] in end for word in words)),
        ("min_tokens", params.min_tokens > 0 and not stop_ids.isdisjoint(end)),
    ):
        if excludes:
            ids = f"token {end[0]}, which ends" if len(end) == 1 else f"the tokens {end}, which end"
            allowed = f"None with {other} that exclude {ids} reasoning"
            raise BadRequest(field, budget, allowed)


def open_output(
    admit: Admit, detokenizers: DetokenizerFactory, outputs: UInt32s | None = None
) -> StreamOutput:
    """The output side of a registered stream. outputs: tokens to push; None: the registration's.

    Raises UnknownFormat if the stream is to be read by a format that this worker lacks.
    """
    params = admit.spec.params
    stops = stop_strings(params)
    detokenizer = None
    if params.detokenize:
        prompt = memoryview(admit.prompt_ids).cast("I")  # not a copy: prompts may be long
        detokenizer = detokenizers.create(prompt, params.skip_special_tokens)
    matcher = StopStrings(stops, params.include_stop_str_in_output) if stops else None
    stop_ids = frozenset(admit.derived.stop_token_ids)
    criteria = StopCriteria(
        stop_ids=stop_ids,
        eos_ids=stop_ids - frozenset(params.stop_token_ids),
        min_tokens=params.min_tokens,
        max_tokens=admit.derived.max_tokens,
        include_stop=params.include_stop_str_in_output,
    )
    repetition = detector_of(params.repetition_detection, params.min_tokens)
    unit_tokens = _unit_tokens(params)
    output: StreamOutput
    if admit.derived.answer is None or detokenizer is None:
        output = StreamOutput(detokenizer, matcher, criteria, unit_tokens, repetition)
    else:
        reader, delimiter_ids = open_reader(
            admit.derived.answer, detokenizers.delimiter_ids, admit.stream_id
        )
        scope = admit.derived.answer.options.stop_scope
        output = AnswerOutput(
            reader,
            delimiter_ids,
            scope,
            detokenizer,
            matcher,
            criteria,
            unit_tokens,
            repetition,
        )
    output.push((u32(admit.begun.output_ids) if outputs is None else outputs).tolist())
    return output


def output_without_text() -> StreamOutput:
    """The output side of a stream that cannot be read here, and is to be ended."""
    return StreamOutput(None, None, StopCriteria())


def _unit_tokens(params: SamplingParams) -> int:
    """Number of tokens that fit into a message with their log-probabilities."""
    width = 0 if params.logprobs is None else 1 + params.logprobs
    return max(1, MESSAGE_BUDGET_BYTES // (8 + LOGPROB_BYTES * width))


def seed_of(stream_id: bytes) -> int:
    """The seed of a stream whose client gives none."""
    digest = hashlib.blake2b(stream_id, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
