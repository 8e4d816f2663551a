"""The base of `Client` and `AsyncClient`: connections, and streams made of checked arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from slipstream.client.call_options import CheckedOptions, check_kind
from slipstream.client.connection.embedding_call import EmbeddingCall
from slipstream.client.connection.thread_io import ThreadIO
from slipstream.client.endpoints import ServerEndpoint
from slipstream.client.stream import ClientConnection, OutputKind
from slipstream.client.streams.stream_state import StreamState
from slipstream.errors import (
    BadRequestError,
    ConnectionLostError,
    bad_request,
    of_prompt,
    unknown_option,
)
from slipstream.outputs import RequestOutput, together
from slipstream.request.embedding_inputs import (
    ClassifyOptions,
    EmbeddingOptions,
    classify_queries,
    embed_queries,
    embedding_inputs,
)
from slipstream.request.parallel_sampling import params_of_answers
from slipstream.request.prompts import Prompt
from slipstream.request.requests import checked_cache_key, new_resume, new_submit, new_submits
from slipstream.request.scoring_inputs import (
    PairNames,
    ScoringOptions,
    ScoringPlan,
    checked_top_n,
    plan_scores,
    texts_of,
)
from slipstream.request.served_models import base_of, checked_model, with_adapter
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import Fault, ModelCard, SamplingParams
from slipstream_ipc.telemetry.trace import open_tracer

if TYPE_CHECKING:
    from slipstream.client.connection.loop_io import LoopIO

_DEFAULT_TIMEOUT_S = 10.0


def open_io(
    endpoint: ServerEndpoint, timeout_s: float | None, trace: str | None = None
) -> ThreadIO:
    """Open the connection of a blocking client, driven by a thread. Raises: BadRequestError."""
    return ThreadIO(
        endpoint.address,
        timeout_or_default(timeout_s),
        open_tracer(trace, "client"),
        access=endpoint.access,
        fails_early=timeout_s is None,
    )


def timeout_or_default(timeout_s: float | None) -> float:
    """A client's checked timeout. Raises: BadRequestError."""
    if timeout_s is None:
        return _DEFAULT_TIMEOUT_S
    if not timeout_s > 0:
        raise bad_request(BadRequest("timeout_s", timeout_s, "a number of seconds > 0, or None"))
    return timeout_s


def model_of_call(io: ClientConnection, name: str | None) -> ModelCard | None:
    """The served model that a call is for. name: as given; None where there is only one. None while
    none is known, which a name is no use for.

    Raises: BadRequestError where it is not served, or not the only one; ConnectionLostError for a
    name before the first connection.
    """
    if io.models:
        return checked_model(io.models, name)
    if name is not None:
        why = f"not connected yet, so whether {name!r} is served is not known"
        raise ConnectionLostError(Fault("engine", why))
    return None


def _model_for(
    io: ClientConnection, options: CheckedOptions, at: int, model: ModelCard | None
) -> ModelCard | None:
    """The model of a call's prompt number `at`: `model`, or an adapter of it."""
    wanted = options.loras[at] if options.loras else None
    if wanted is None:
        return model
    if not io.models:
        why = f"not connected yet, so whether {wanted.lora_name!r} is served is not known"
        raise ConnectionLostError(Fault("engine", why))
    return with_adapter(io.models, options.model, wanted)


def submit_request(
    io: ClientConnection, prompt: Prompt, options: CheckedOptions, kind: OutputKind
) -> StreamState:
    """Submit one request. Raises: BadRequestError, and `model_of_call`'s."""
    check_kind(kind)
    model = _model_for(io, options, 0, model_of_call(io, options.model))
    submit = new_submit(
        prompt,
        options.params[0],
        label=options.label,
        model=model,
        stream_id=options.stream_id,
        template=options.template,
        answer=options.answer,
        trace_headers=options.trace_headers,
        **options.asked,
    )
    state = StreamState(
        submit,
        wants_whole=kind == "final",
        prompt_cache_key=checked_cache_key(options.prompt_cache_key),
        model="" if model is None else base_of(model),
    )
    io.submit(state)
    return state


def resume_stream(
    io: ClientConnection, stream_id: str, num_chars: int, num_tokens: int, kind: OutputKind
) -> StreamState:
    """Request the rest of a stream that is running, or has ended and is still kept.

    Raises: BadRequestError.
    """
    check_kind(kind)
    resume = new_resume(stream_id, num_chars, num_tokens)
    state = StreamState(resume, wants_whole=kind == "final")
    io.submit(state)
    return state


def new_state(
    model: ModelCard | None, prompt: Prompt, params: SamplingParams, *, kind: OutputKind
) -> StreamState:
    """A stream that is ready to submit. model: None where it is not known yet. params: checked.

    Raises: BadRequestError.
    """
    return StreamState(
        new_submit(prompt, params, model=model),
        wants_whole=kind == "final",
        model="" if model is None else base_of(model),
    )


def new_states(
    io: ClientConnection,
    prompts: Sequence[Prompt],
    options: CheckedOptions,
    *,
    kind: OutputKind = "final",
) -> list[StreamState]:
    """Streams ready to submit, `n` for each prompt.

    Raises: BadRequestError, naming the index of the prompt where the call has several; and
    `model_of_call`'s.
    """
    of_call = model_of_call(io, options.model)
    states: list[StreamState] = []
    cache_key = checked_cache_key(options.prompt_cache_key)
    for index, (prompt, params) in enumerate(zip(prompts, options.params, strict=True)):
        where = f"prompts[{index}]" if options.has_many_prompts else ""
        model = _model_for(io, options, index, of_call)
        try:
            submits = new_submits(
                prompt,
                params_of_answers(params),
                stream_ids=[None] * params.n,
                model=model,
                template=options.template,
                answer=options.answer,
                trace_headers=options.trace_headers,
                **options.asked,
            )
        except BadRequestError as error:
            raise (of_prompt(error, where) if where else error) from None
        states += [
            StreamState(
                submit,
                wants_whole=kind == "final",
                where=where,
                prompt_cache_key=cache_key,
                model="" if model is None else base_of(model),
            )
            for submit in submits
        ]
    return states


def by_prompt(
    answers: Sequence[RequestOutput], params: Sequence[SamplingParams]
) -> list[RequestOutput]:
    """Group the answers of all prompts, `n` to each prompt, into one output for each prompt."""
    rest = iter(answers)
    return [together(list(islice(rest, each.n))) for each in params]


def check_option_names(options: Mapping[str, object], kind: type) -> None:
    """Check that a call's options are those of a TypedDict. Raises: TypeError."""
    unknown = options.keys() - kind.__annotations__.keys()
    if unknown:
        raise unknown_option(min(unknown), kind.__annotations__)


def classify_call(
    io: ThreadIO | LoopIO, inputs: object, model: ModelCard, options: ClassifyOptions
) -> EmbeddingCall:
    """Ask for the classes of inputs. Raises: BadRequestError."""
    check_option_names(options, ClassifyOptions)
    queries = classify_queries(embedding_inputs(inputs), model, options)
    return EmbeddingCall(queries, partial(io.ask, model=base_of(model)))


def scoring_call(io: ThreadIO | LoopIO, plan: ScoringPlan, model: ModelCard) -> EmbeddingCall:
    """Ask for the scores of pairs."""
    ask = partial(io.ask, model=base_of(model))
    return EmbeddingCall(plan.queries, ask, name_of=plan.name_of)


def rerank_plan(
    query: object, documents: object, model: ModelCard, top_n: object, options: ScoringOptions
) -> tuple[ScoringPlan | None, list[str], int | None]:
    """The plan of a call of `rerank`, its documents and their number; no plan: there are none.
    Raises: BadRequestError.
    """
    check_option_names(options, ScoringOptions)
    try:
        most = checked_top_n(top_n)
        texts = texts_of("documents", documents) if documents or documents == "" else []
    except BadRequest as error:
        raise bad_request(error) from None
    if not texts:
        return None, [], most
    return plan_scores(query, texts, model, options, PairNames("query", "documents")), texts, most


def embedding_call(
    io: ThreadIO | LoopIO, inputs: object, model: ModelCard, options: EmbeddingOptions
) -> EmbeddingCall:
    """Ask for the vectors of inputs. Raises: BadRequestError."""
    check_option_names(options, EmbeddingOptions)
    queries = embed_queries(embedding_inputs(inputs), model, options)
    return EmbeddingCall(queries, partial(io.ask, model=base_of(model)))
