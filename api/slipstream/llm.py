"""Offline inference: `LLM` starts a stack and answers lists of prompts, with vLLM's interface.

- Outputs are in the order of the prompts.
- The first prompt that is rejected or fails raises its error and aborts the others, as in vLLM.
  All prompts are checked before any is sent.
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
_STREAM_INTERVAL = 64  # tokens: partial output is not shown, so large deltas are cheaper


class LLM:
    """A model that answers batches of prompts. Use it as a context manager, or `close` it.

    model, settings: as in `Stack`, except that spare processes are off by default.

    Raises: the errors of `Stack`.
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
        self._stack.when_ended(self._client.close)  # so that no call waits for a dead stack
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
        """Generate a completion for each prompt; outputs are in the order of the prompts.

        prompts: a text, a sequence of token ids, or a list of these; a prompt may also be
            `{"prompt": TEXT}` or `{"prompt_token_ids": IDS}`, as in vLLM.
        sampling_params: one for all prompts, or one for each; None means `SamplingParams()`.
        use_tqdm: show a progress bar on standard error.
        params: the former name of sampling_params, deprecated.

        Raises: the errors of `Client.generate_many`; StackError where the stack ends meanwhile.
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
        """Answer a conversation or each of a list of conversations. Otherwise as `generate`."""
        given = _renamed(sampling_params, params)
        return self._answer(_conversations(messages), given, use_tqdm)

    def close(self) -> None:
        """Stop the stack. Idempotent."""
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
        prompts: Any,  # checked by the client
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
    """The argument given under either name. Raises: BadRequestError for both."""
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
    """The number of answers to expect. The client rejects invalid params later."""
    if isinstance(params, Sequence):
        return sum(getattr(each, "n", 1) for each in params)
    return num_prompts * getattr(params, "n", 1)


def _is_one_prompt(prompts: Any) -> bool:
    """Whether this is a single prompt. Raises: BadRequestError if neither a prompt nor a list."""
    if isinstance(prompts, str | np.ndarray | Mapping):
        return True
    if not _is_list(prompts):
        raise bad_request(BadRequest("prompts", prompts, "a prompt, or a list of prompts"))
    if not prompts or is_prompt_mapping(prompts[0]):
        return False
    return isinstance(prompts[0], int | np.integer | ChatMessage | Mapping)


def _conversations(given: Any) -> list[Any]:
    """One conversation or several, as a list of conversations. Raises: BadRequestError."""
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
    """Params with a larger stream interval. The client rejects invalid params later."""
    if isinstance(params, Sequence):
        return [_coarse(each) for each in params]
    if not isinstance(params, SamplingParams) or not isinstance(params.stream_interval, int):
        return params
    interval = max(params.stream_interval, _STREAM_INTERVAL) if params.stream_interval > 0 else 0
    return msgspec.structs.replace(params, stream_interval=interval)
