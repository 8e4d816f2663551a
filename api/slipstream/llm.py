"""Offline batches: `LLM` starts a stack of its own and answers lists of prompts.

Owns: what a batch is, its outputs and its progress. Shapes and names are vLLM's, so that people
can switch. Does not know: how streams work, how a stack is kept.

Rules:
- Results are in the prompts' order, whatever order they end in.
- The first prompt that cannot be taken or fails raises its error, and the others are aborted, as
  in vLLM. What can be checked here is checked for all of them before any is sent.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping, Sequence
from itertools import count
from types import TracebackType
from typing import Any, Unpack

import msgspec
import numpy as np
from tqdm import tqdm

from slipstream.errors import ClosedError, ConnectionLostError, bad_request
from slipstream.outputs import RequestOutput
from slipstream.requests import Conversation, Prompt, is_prompt_mapping
from slipstream.stack.settings import SHORT_LIVED
from slipstream.stack.stack import Stack, StackArguments, StackError
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import ChatMessage, SamplingParams

_CONVERSATIONS = "a list of messages with role and content, or a list of such lists"
_STREAM_INTERVAL = 64  # nobody reads along, so the answers travel in large pieces


class LLM:
    """A model that answers batches of prompts. Use it as a context manager, or `close` it.

    model, settings: see `Stack`; but no spare processes unless they are asked for.
    """

    def __init__(
        self, model: str | os.PathLike[str] | None = None, **settings: Unpack[StackArguments]
    ) -> None:
        for_a_batch: StackArguments = {**SHORT_LIVED, **settings}
        self._stack = Stack(model, **for_a_batch)
        try:
            self._client = self._stack.client()
        except BaseException:
            self._stack.stop()
            raise
        self._stack.when_ended(self._client.close)  # so nothing waits for an answer from it
        self._ids = count()
        self._is_closed = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Go on with each prompt: a text or a sequence of token ids, or a list of these.

        A prompt may also be `{"prompt": TEXT}` or `{"prompt_token_ids": IDS}`, as in vLLM.

        sampling_params: one for all, or one for each prompt; None is `SamplingParams()`. use_tqdm:
        show a progress bar on standard error. params: the former name of sampling_params.

        Raises: as `Client.generate_many`; StackError where the stack ends in the meantime.
        """
        given = _renamed(sampling_params, params)
        return self._answer([prompts] if _is_one_prompt(prompts) else prompts, given, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of a list of them. The rest is as in `generate`."""
        given = _renamed(sampling_params, params)
        return self._answer(_conversations(messages), given, use_tqdm)

    def close(self) -> None:
        """End the stack. Idempotent."""
        self._is_closed = True
        self._client.close()
        self._stack.stop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _answer(
        self,
        prompts: Any,  # of kinds that the client checks
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        coarse = _coarse(SamplingParams() if params is None else params)
        begin, num_tokens = time.monotonic(), 0
        with tqdm(
            total=_num_answers(len(prompts), coarse),
            desc="answers",
            dynamic_ncols=True,
            disable=not use_tqdm,
        ) as bar:

            def on_done(completion: RequestOutput) -> None:
                nonlocal num_tokens
                num_tokens += completion.num_tokens
                rate = num_tokens / (time.monotonic() - begin)
                bar.set_postfix_str(f"{rate:,.0f} output tok/s", refresh=False)
                bar.update()

            try:
                completions = self._client.generate_many(prompts, coarse, on_done=on_done)
            except (ClosedError, ConnectionLostError) as error:
                if self._is_closed or self._stack.is_running:
                    raise
                raise StackError("the stack ended; standard error says why") from error
        return [
            msgspec.structs.replace(completion, request_id=str(next(self._ids)))
            for completion in completions
        ]


def _renamed(sampling_params: Any, params: Any) -> Any:
    """What was given under either name. Raises: BadRequestError where it was under both."""
    if params is None:
        return sampling_params
    if sampling_params is not None:
        raise bad_request(BadRequest("params", params, "sampling_params alone: its new name"))
    warnings.warn(
        "params= is called sampling_params= now, and goes with the next release",
        DeprecationWarning,
        stacklevel=3,
    )
    return params


def _num_answers(num_prompts: int, params: Any) -> int:
    """How many are to come; whatever is no params is the client's to refuse."""
    if isinstance(params, Sequence):
        return sum(getattr(each, "n", 1) for each in params)
    return num_prompts * getattr(params, "n", 1)


def _is_one_prompt(prompts: Any) -> bool:
    """Raises: BadRequestError for what is neither a prompt nor a list."""
    if isinstance(prompts, str | np.ndarray | Mapping):
        return True
    if not _is_list(prompts):
        raise bad_request(BadRequest("prompts", prompts, "a prompt, or a list of prompts"))
    if not prompts or is_prompt_mapping(prompts[0]):
        return False
    return isinstance(prompts[0], int | np.integer | ChatMessage | Mapping)


def _conversations(given: Any) -> list[Any]:
    """One conversation or several as a list of them. Raises: BadRequestError."""
    is_one = isinstance(given, Sequence) and len(given) > 0 and _is_turn(given[0])
    several = [given] if is_one else given
    for each in several if _is_list(several) else [several]:
        if not _is_list(each) or not each or not all(map(_is_turn, each)):
            raise bad_request(BadRequest("messages", each, _CONVERSATIONS))
    return list(several)


def _is_list(given: object) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, str | bytes)


def _is_turn(given: object) -> bool:
    return isinstance(given, ChatMessage | Mapping)


def _coarse(params: Any) -> Any:
    """The same, with a wider stream interval; whatever is no params is the client's to refuse."""
    if isinstance(params, Sequence):
        return [_coarse(each) for each in params]
    if not isinstance(params, SamplingParams) or not isinstance(params.stream_interval, int):
        return params
    interval = max(params.stream_interval, _STREAM_INTERVAL) if params.stream_interval > 0 else 0
    return msgspec.structs.replace(params, stream_interval=interval)
