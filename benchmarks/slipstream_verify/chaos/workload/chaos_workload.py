"""The requests of a chaos run, covering every kind that can go wrong. Pure: the same seed gives the
same requests.

- Every request fixes all that determines its tokens: a seed, a stream id from which the seed is
  derived, or temperature 0.
- Top-p and min-p are combined with a top-k within the sampler's candidates, so that one forward
  pass can verify the tokens (`reference_model`).
- Requests over HTTP have a seed, because the HTTP front draws the stream ids.
- A grammar's answer ends by the model's end token, or by one that the request names: a simulated
  model has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import numpy as np
from msgspec import Struct, structs

from slipstream.answers.answer_options import ToolChoice
from slipstream.request.prompts import Prompt
from slipstream_bench.common.load.datasets import as_words
from slipstream_ipc.messages import (
    ChatMessage,
    SamplingParams,
    StopScope,
    StructuredOutputs,
)

Via = Literal["client", "http"]
Picked = TypeVar("Picked")

_FIRST_ID = 100  # above the special tokens; any model has ids up to _LAST_ID
_LAST_ID = 999
_WORDS = 60  # fewer than `as_words` has distinct words
_SIGNS = ("naïve café", "漢字とかな", "🙂🙃", "x := [1, 2]", "Ünïcödé")
_STOPS = ("()", "ly ", "\n\n", "e o", "}", ". ", "ould", "zx")  # frequent to absent in random text
_GRAMMARS = (
    StructuredOutputs(
        json={
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 40},
                "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 5},
                "is_new": {"type": "boolean"},
            },
            "required": ["name", "sizes"],
            "additionalProperties": False,
        }
    ),
    StructuredOutputs(regex=r"([a-z]{2,8} [0-9]{3}[;,] ){3,30}"),
    StructuredOutputs(choice=("yes, certainly", "no, not at all", "naïve 漢字 🙂")),
    StructuredOutputs(grammar='start: "(" (word | start)* ")"\nword: /[a-z]{1,6}/ " "'),
    StructuredOutputs(json_object=True),
)
_GRAMMAR_SHARE = 0.2
_END_ID = 1  # of the bundled tokenizer, which decodes it to nothing
_HTTP_SHARE = 0.12
_SLOW_SHARE = 0.1
_LONG_PROMPT = 500  # tokens, more than fit a step beside other requests
_BEGINNINGS = 3  # different ones that prompts have in common
_BEGINNING_LEN = 200  # tokens or words
_REPEATED_SHARE = 0.25


class Pause(Struct, frozen=True):
    """Reading pauses for a time after a number of tokens."""

    num_tokens: int
    seconds: float


class ChatSettings(Struct, frozen=True):
    """How the answer of a chat is made and read, by the names of the clients' options."""

    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: ToolChoice | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    stop_scope: StopScope = "content"

    @property
    def is_forced(self) -> bool:
        """Whether the answer has to be calls."""
        return self.tool_choice != "auto"


class ChaosRequest(Struct, frozen=True):
    """One request. Exactly one of text, token_ids and messages is the prompt.

    chat: of a request whose answer's events are compared. prediction: what the answer will probably
    say.
    """

    index: int
    stream_id: str
    params: SamplingParams
    text: str | None = None
    token_ids: tuple[int, ...] = ()
    messages: tuple[ChatMessage, ...] = ()
    via: Via = "client"
    client: int = 0  # index of the client process
    pauses: tuple[Pause, ...] = ()
    chat: ChatSettings | None = None
    is_streamed: bool = True
    prediction: str = ""

    @property
    def has_usage(self) -> bool:
        """True if the usage of an answer over HTTP is compared."""
        return self.chat is not None or bool(self.prediction)

    @property
    def prompt(self) -> Prompt:
        """The prompt in the form that clients take."""
        if self.text is not None:
            return self.text
        return self.messages or self.token_ids


class WorkloadShape(Struct, frozen=True):
    """The overall shape of a run's requests.

    min_len, max_len: output lengths in tokens. vocab_size: of the model. has_grammars: whether the
    model has a tokenizer that grammars can be compiled for. has_beginnings: whether prompts of text
    and of ids begin as others do, for the prefix cache. has_repeats: whether some ask what others
    ask, for drafts from what was answered.
    """

    num_requests: int
    min_len: int
    max_len: int
    num_clients: int
    vocab_size: int
    has_grammars: bool = False
    has_beginnings: bool = False
    has_repeats: bool = False


def make_requests(seed: int, shape: WorkloadShape) -> list[ChaosRequest]:
    """All requests of a run."""
    requests = [
        _request(np.random.default_rng((seed, 1, i)), i, shape) for i in range(shape.num_requests)
    ]
    if shape.has_beginnings:
        requests = _with_beginnings(seed, requests)
    return _with_repeats(seed, requests) if shape.has_repeats else requests


def _with_repeats(seed: int, requests: Sequence[ChaosRequest]) -> list[ChaosRequest]:
    """Some ask what one before them asks, with its parameters, and a few with another seed."""
    random = np.random.default_rng((seed, 6))
    found: list[ChaosRequest] = []
    for each in requests:
        before = [one for one in found if one.via == each.via]
        if not before or random.random() >= _REPEATED_SHARE:
            found.append(each)
            continue
        one = pick(random, before)
        params = one.params
        if random.random() < 0.3:
            params = structs.replace(params, seed=int(random.integers(2**62)))
        same = {"text": one.text, "token_ids": one.token_ids, "messages": one.messages}
        found.append(structs.replace(each, params=params, **same))
    return found


def _with_beginnings(seed: int, requests: Sequence[ChaosRequest]) -> list[ChaosRequest]:
    random = np.random.default_rng((seed, 3))
    texts = [make_text(random, _BEGINNING_LEN) for _ in range(_BEGINNINGS)]
    ids = random.integers(_FIRST_ID, _LAST_ID + 1, (_BEGINNINGS, _BEGINNING_LEN)).tolist()
    at = random.integers(_BEGINNINGS, size=len(requests)).tolist()
    return [
        structs.replace(
            each,
            text=None if each.text is None else f"{texts[i]} {each.text}",
            token_ids=(*ids[i], *each.token_ids) if each.token_ids else (),
        )
        for i, each in zip(at, requests, strict=True)
    ]


def _request(random: np.random.Generator, index: int, shape: WorkloadShape) -> ChaosRequest:
    is_http = random.random() < _HTTP_SHARE
    params = _params(random, shape, is_http=is_http)
    kind = pick(random, ("text", "ids", "chat"))
    is_long = random.random() < 0.1
    num = int(random.integers(100, _LONG_PROMPT) if is_long else random.integers(1, 40))
    messages: tuple[ChatMessage, ...] = ()
    text, token_ids = None, ()
    if kind == "text":
        text = make_text(random, num)
    elif kind == "ids":
        token_ids = tuple(random.integers(_FIRST_ID, _LAST_ID + 1, num).tolist())
    else:
        turns = ("user", "assistant", "user")[: pick(random, (1, 3))]
        messages = tuple(ChatMessage(role, make_text(random, 1 + num // 3)) for role in turns)
    pauses = () if is_http else pauses_of(random, params)
    return ChaosRequest(
        index,
        random.bytes(16).hex(),
        params,
        text,
        token_ids,
        messages,
        "http" if is_http else "client",
        client_of(random, shape, is_http=is_http),
        pauses,
    )


def pauses_of(random: np.random.Generator, params: SamplingParams) -> tuple[Pause, ...]:
    """The pauses of a request's reader; most have none."""
    if random.random() >= _SLOW_SHARE:
        return ()
    at = sorted(random.integers(0, max(1, params.max_tokens or 1), 2).tolist())
    return tuple(Pause(tokens, float(random.uniform(0.2, 3.0))) for tokens in at)


def client_of(random: np.random.Generator, shape: WorkloadShape, *, is_http: bool) -> int:
    """The index of a request's client process."""
    return 0 if is_http else int(random.integers(shape.num_clients))


def stops_of(random: np.random.Generator) -> tuple[str, ...]:
    """One to three stop strings."""
    return tuple(random.choice(_STOPS, int(random.integers(1, 4)), replace=False).tolist())


def _params(random: np.random.Generator, shape: WorkloadShape, *, is_http: bool) -> SamplingParams:
    is_short = random.random() < 0.1
    most = min(4, shape.max_len) if is_short else shape.max_len
    max_tokens = int(random.integers(1 if is_short else shape.min_len, most + 1))
    temperature = pick(random, (0.0, 0.7, 1.0))
    is_cut = random.random() < 0.4
    has_stops, has_ids = random.random() < 0.5, random.random() < 0.2
    is_silent = not has_stops and not is_http and random.random() < 0.05
    last_id = min(_LAST_ID, shape.vocab_size - 1)
    params = SamplingParams(
        temperature=temperature,
        top_k=pick(random, (5, 40)) if is_cut else 0,
        top_p=pick(random, (1.0, 0.9)) if is_cut else 1.0,
        min_p=pick(random, (0.0, 0.02)) if is_cut else 0.0,
        seed=int(random.integers(2**62)) if is_http or random.random() < 0.7 else None,
        stop=stops_of(random) if has_stops else (),
        stop_token_ids=tuple(random.integers(_FIRST_ID, last_id + 1, 6).tolist())
        if has_ids
        else (),
        include_stop_str_in_output=has_stops and random.random() < 0.3,
        ignore_eos=random.random() < 0.5,
        max_tokens=max_tokens,
        min_tokens=int(random.integers(0, max_tokens + 1)) if random.random() < 0.3 else 0,
        logprobs=pick(random, (None, None, 0, 5)) if not is_http else None,
        skip_special_tokens=random.random() < 0.8,
        detokenize=not is_silent,
        stream_interval=pick(random, (1, 1, 1, 4, 16)),
    )
    if not shape.has_grammars or random.random() >= _GRAMMAR_SHARE:
        return params
    return structs.replace(
        params,
        structured_outputs=pick(random, _GRAMMARS),
        stop_token_ids=(_END_ID,),
        ignore_eos=False,
        min_tokens=0,
    )


def pick(random: np.random.Generator, choices: Sequence[Picked]) -> Picked:
    """One of them."""
    return choices[int(random.integers(len(choices)))]


def make_text(random: np.random.Generator, num_words: int) -> str:
    """So many words, or some signs more."""
    words = as_words(random.integers(_WORDS, size=num_words).tolist())
    return f"{words} {pick(random, _SIGNS)}" if random.random() < 0.3 else words
