"""Sends a load to any OpenAI-compatible server, in the request form that the server accepts.

- A request is encoded before its clock starts.
- Prompts of /v1/completions are sent as token ids, and usage is requested. If the server refuses
  token ids, prompts are sent as words (`has_words`); if it refuses usage, usage is not requested.
"""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import product
from typing import Any, Literal

import msgspec
from msgspec import Struct

from slipstream.errors import BadRequestError, SlipstreamError
from slipstream_bench.common.load.datasets import DatasetRequest
from slipstream_bench.common.load.failures import RequestFailedError
from slipstream_bench.common.load.http_stream import HttpClient
from slipstream_bench.common.load.openai_answers import OpenAIAnswer
from slipstream_bench.common.load.run_load import Ask
from slipstream_bench.common.measures import RequestTimeline
from slipstream_ipc.messages import Fault

Endpoint = Literal["completions", "chat"]
PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_REFUSALS = ("http_400", "http_422")  # refusals of the request's form


class Asking(Struct, frozen=True):
    """How every request of a load is sent. timeout_s: for the whole answer. stream_interval: a
    Slipstream extension; None leaves it to the server.
    """

    endpoint: Endpoint
    is_streamed: bool
    temperature: float
    logprobs: int | None
    ignore_eos: bool
    timeout_s: float
    stream_interval: int | None = None


class _Model(Struct):
    id: str


class _Models(Struct):
    data: list[_Model]


async def first_model(http: HttpClient) -> str:
    """The first model of /v1/models. Raises: SlipstreamError."""
    body = bytearray()
    try:
        await http.exchange("GET", "/v1/models", None, body.extend)
        return msgspec.json.decode(body, type=_Models).data[0].id
    except (RequestFailedError, msgspec.DecodeError, IndexError) as error:
        why = f"no model's name from /v1/models ({error}); is the server there? else give --model"
        raise _failed(why) from error


class OpenAITarget:
    """One server and one of its models."""

    def __init__(
        self, http: HttpClient, model: str, asking: Asking, problems: dict[str, str]
    ) -> None:
        """problems: receives the message of the first failure of each kind."""
        self.model = model
        self._http = http
        self._asking = asking
        self._problems = problems
        self.has_words = asking.endpoint == "chat"  # instead of token ids
        self._asks_usage = asking.is_streamed

    async def settle(self, sample: DatasetRequest) -> None:
        """Find the form that the server accepts, by requesting one token.

        Raises: BadRequestError if it refuses every form, SlipstreamError if it fails.
        """
        sample = DatasetRequest(sample.prompt, 1)
        words = (False, True) if not self.has_words and not sample.is_text else (self.has_words,)
        usages = (True, False) if self._asks_usage else (False,)
        first_error: RequestFailedError | None = None
        for self._asks_usage, self.has_words in product(usages, words):
            try:
                await self._answer(self._body(sample), self._new_answer(sample))
                return
            except RequestFailedError as error:
                if error.reason not in _REFUSALS:
                    raise _failed(f"the server does not answer as it should: {error}") from error
                first_error = first_error or error
        assert first_error is not None
        why = f"the server refuses this request in every form: {first_error}"
        raise BadRequestError(Fault("bad_request", why))

    def prepared(self, request: DatasetRequest) -> Ask:
        """The request, ready to be sent."""
        return partial(self._ask, request, self._body(request))

    async def _ask(self, request: DatasetRequest, body: bytes) -> RequestTimeline:
        answer = self._new_answer(request)
        try:
            return await self._answer(body, answer)
        except RequestFailedError as error:
            self._problems.setdefault(error.reason, error.detail)
            answer.timeline.failure = error.reason
            return answer.timeline

    def _new_answer(self, request: DatasetRequest) -> OpenAIAnswer:
        is_known = not self.has_words and not request.is_text
        return OpenAIAnswer(
            max_tokens=request.max_tokens,
            prompt_len=len(request.prompt) if is_known else None,
            ignore_eos=self._asking.ignore_eos,
        )

    async def _answer(self, body: bytes, answer: OpenAIAnswer) -> RequestTimeline:
        path = PATHS[self._asking.endpoint]
        whole = bytearray()
        sink = answer.take_piece if self._asking.is_streamed else whole.extend
        try:
            async with asyncio.timeout(self._asking.timeout_s):
                await self._http.exchange("POST", path, body, sink)
        except TimeoutError:
            raise RequestFailedError("timeout", f"no end in {self._asking.timeout_s} s") from None
        if not self._asking.is_streamed:
            answer.take_whole(bytes(whole))
        return answer.finish()

    def _body(self, request: DatasetRequest) -> bytes:
        asking = self._asking
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.max_tokens,
            "temperature": asking.temperature,
            "stream": asking.is_streamed,
        }
        if asking.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": request.text}]
            if asking.logprobs is not None:
                body |= {"logprobs": True, "top_logprobs": asking.logprobs}
        else:
            body["prompt"] = request.text if self.has_words else request.prompt
            if asking.logprobs is not None:
                body["logprobs"] = asking.logprobs
        if asking.ignore_eos:
            body["ignore_eos"] = True
        if asking.stream_interval is not None:
            body["stream_interval"] = asking.stream_interval
        if self._asks_usage:
            body["stream_options"] = {"include_usage": True}
        return msgspec.json.encode(body)


def _failed(message: str) -> SlipstreamError:
    return SlipstreamError(Fault("engine", message))
