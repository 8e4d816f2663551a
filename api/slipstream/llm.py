"""Offline inference: `LLM` starts a stack and answers lists of prompts, with vLLM's interface.

- Outputs are in the order of the prompts.
- The first prompt that is rejected or fails raises its error and aborts the others, as in vLLM.
  All prompts are checked before any is sent.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any, Unpack

import msgspec
import numpy as np
from tqdm import tqdm

from slipstream import sampling_params
from slipstream.client.call_options import CallOptions, CheckedOptions, options_for_many
from slipstream.demo_model import MODEL_NAME
from slipstream.errors import ClosedError, ConnectionLostError, bad_request
from slipstream.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from slipstream.progress import Progress
from slipstream.request.embedding_inputs import (
    ClassifyOptions,
    EmbeddingInput,
    EmbeddingOptions,
    embedding_inputs,
)
from slipstream.request.prompts import Conversation, Prompt, is_prompt_mapping
from slipstream.request.scoring_inputs import RankedDocument, ScoreInput, ScoringOptions
from slipstream.stack.settings import SHORT_LIVED
from slipstream.stack.stack import Stack, StackArguments
from slipstream.stack.supervisor_process import StackError
from slipstream.vllm_names import LLM_MEMBERS, missing_member
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.hub_id import split_revision
from slipstream_ipc.messages import ChatMessage, SamplingParams
from slipstream_ipc.tokenizer_file import follow_tokenizer_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONVERSATIONS = "a list of messages with role and content, or a list of such lists"
_STREAM_INTERVAL = 64  # tokens: partial output is not shown, so large deltas are cheaper


class LLM:
    """A model that answers batches of prompts. Use it as a context manager, or `close` it.

    Standard error shows the start.

    model, settings: as in `Stack`, except that spare processes are off by default.
    seed: a request without a seed gets one of this and of the request's number, which counts from
    0: the same calls in the same order give the same answers. None: such requests draw one each.

    Raises: the errors of `Stack`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        seed: int | None = None,
        **settings: Unpack[StackArguments],
    ) -> None:
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise bad_request(BadRequest("seed", seed, "an integer, or None"))
        for_a_batch: StackArguments = {**SHORT_LIVED, **settings}
        name = MODEL_NAME if model is None else os.fspath(model)
        with Progress(f"starting {name}", done=f"started {name}: ready"):
            self._stack = Stack(model, **for_a_batch)
        try:
            self._client = self._stack.client()
        except BaseException:
            self._stack.stop()
            raise
        self._stack.when_ended(self._client.close)  # so that no call waits for a dead stack
        self._download_dir = settings.get("download_dir")
        self._trust_remote_code = settings.get("trust_remote_code", False)
        self._ids = count()
        self._seed = seed
        self._num_prompts = 0
        self._is_closed = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., tqdm[Any]] = True,
        **options: Unpack[CallOptions],
    ) -> list[RequestOutput]:
        """Generate a completion for each prompt; outputs are in the order of the prompts.

        prompts: a text, a sequence of token ids, or a list of these; a prompt may also be
            `{"prompt": TEXT}` or `{"prompt_token_ids": IDS}`, as in vLLM.
        sampling_params: one for all prompts, or one for each; or give fields as keyword options
            (`max_tokens=100`), for all.
        use_tqdm: show a progress bar on standard error; or what makes the bar in tqdm's place.

        Further keyword options are those of `Client.generate_many`.

        Raises: the errors of `Client.generate_many`; StackError where the stack ends meanwhile.
        """
        several: Any = [prompts] if _is_one_prompt(prompts) else prompts
        checked = options_for_many(several, sampling_params, options)
        return self._answer(several, checked, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., tqdm[Any]] = True,
        **options: Unpack[CallOptions],
    ) -> list[RequestOutput]:
        """Answer a conversation or each of a list of conversations. Otherwise as `generate`.

        `tools`, `chat_template_kwargs`, `add_generation_prompt` and `continue_final_message` go to
        the model's chat template; `tool_choice`, `parallel_tool_calls`, `stop_scope` and
        `parse_answer` say how the answer is read. All are those of `Client.stream`.
        """
        conversations = _conversations(messages)
        checked = options_for_many(conversations, sampling_params, options)
        return self._answer(conversations, checked, use_tqdm)

    def embed(
        self,
        prompts: EmbeddingInput | Sequence[EmbeddingInput],
        use_tqdm: bool | Callable[..., tqdm[Any]] = True,
        **options: Unpack[EmbeddingOptions],
    ) -> list[EmbeddingRequestOutput]:
        """Embed each prompt, with a model that is served for embeddings; outputs are in the order
        of the prompts. `Client.embed` returns one array instead.

        prompts: a text, a sequence of token ids, or a list of these, in the forms of `generate`.
        use_tqdm: without effect: there is no bar.

        Raises: as `Client.embed`.
        """
        inputs = embedding_inputs(prompts)
        found = self._client.embed(inputs, **options)
        return [
            EmbeddingRequestOutput(
                str(next(self._ids)), EmbeddingOutput(vector), num_tokens, _text_of(given)
            )
            for vector, num_tokens, given in zip(
                found.vectors.tolist(), found.num_prompt_tokens, inputs, strict=True
            )
        ]

    def classify(
        self,
        prompts: EmbeddingInput | Sequence[EmbeddingInput],
        use_tqdm: bool | Callable[..., tqdm[Any]] = True,
        **options: Unpack[ClassifyOptions],
    ) -> list[ClassificationRequestOutput]:
        """Classify each prompt, with a model that is served for classes; otherwise as `embed`."""
        inputs = embedding_inputs(prompts)
        found = self._client.classify(inputs, **options)
        return [
            ClassificationRequestOutput(
                str(next(self._ids)), ClassificationOutput(probs), num_tokens, _text_of(given)
            )
            for probs, num_tokens, given in zip(
                found.probs.tolist(), found.num_prompt_tokens, inputs, strict=True
            )
        ]

    def score(
        self,
        data_1: ScoreInput | Sequence[ScoreInput],
        data_2: ScoreInput | Sequence[ScoreInput],
        use_tqdm: bool | Callable[..., tqdm[Any]] = True,
        **options: Unpack[ScoringOptions],
    ) -> list[ScoringRequestOutput]:
        """Score pairs of texts: one with each of several, or as many of both. `Client.score`
        returns one array instead.

        use_tqdm: without effect: there is no bar.

        Raises: as `Client.score`.
        """
        found = self._client.score(data_1, data_2, **options)
        return [
            ScoringRequestOutput(str(next(self._ids)), ScoringOutput(score), num_tokens)
            for score, num_tokens in zip(
                found.scores.tolist(), found.num_prompt_tokens, strict=True
            )
        ]

    def rerank(
        self,
        query: ScoreInput,
        documents: Sequence[ScoreInput],
        *,
        top_n: int | None = None,
        **options: Unpack[ScoringOptions],
    ) -> list[RankedDocument]:
        """The documents that fit a query best. See `Client.rerank`."""
        return self._client.rerank(query, documents, top_n=top_n, **options)

    def load_lora_adapter(
        self, lora_name: str, lora_path: str | os.PathLike[str], *, load_inplace: bool = False
    ) -> None:
        """Load an adapter. See `Client.load_lora_adapter`."""
        self._client.load_lora_adapter(lora_name, lora_path, load_inplace=load_inplace)

    def unload_lora_adapter(self, lora_name: str) -> None:
        """Let requests find an adapter no longer. See `Client.unload_lora_adapter`."""
        self._client.unload_lora_adapter(lora_name)

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, loaded by transformers in this process.

        `Client.tokenize` asks the server instead, and loads nothing.

        Raises: OSError, ValueError where transformers cannot load it.
        """
        from transformers import AutoTokenizer

        name, revision = split_revision(self._client.model.path)
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            name,
            revision=revision,
            cache_dir=self._download_dir,
            trust_remote_code=self._trust_remote_code,
        )
        follow_tokenizer_file(tokenizer, name, revision=revision, cache_dir=self._download_dir)
        return tokenizer

    def get_default_sampling_params(self) -> sampling_params.SamplingParams:
        """The sampling parameters that the model's makers recommend; they are not applied unless
        they are given.
        """
        defaults = msgspec.structs.asdict(self._client.model.default_sampling)
        return sampling_params.SamplingParams(
            **{name: value for name, value in defaults.items() if value is not None}
        )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            if name in LLM_MEMBERS:
                raise missing_member("LLM", name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def close(self) -> None:
        """Stop the stack. Idempotent."""
        self._is_closed = True
        self._client.close()
        self._stack.stop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(
        self,
        prompts: Sequence[Prompt],
        options: CheckedOptions,
        use_tqdm: bool | Callable[..., tqdm[Any]],
    ) -> list[RequestOutput]:
        coarse = [_with_batch_interval(each) for each in options.params]
        if self._seed is not None:
            coarse = [
                params if params.seed is not None else self._with_seed(params, number)
                for number, params in enumerate(coarse, self._num_prompts)
            ]
        self._num_prompts += len(coarse)
        begin, num_tokens = time.monotonic(), 0
        with (use_tqdm if callable(use_tqdm) else tqdm)(
            total=sum(each.n for each in coarse),
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
                completions = self._client._run_all(
                    prompts, replace(options, params=coarse), on_done
                )
            except (ClosedError, ConnectionLostError) as error:
                if self._is_closed or self._stack.is_running:
                    raise
                raise StackError("the stack ended; standard error says why") from error
        return [
            msgspec.structs.replace(completion, request_id=str(next(self._ids)))
            for completion in completions
        ]

    def _with_seed(self, params: SamplingParams, number: int) -> SamplingParams:
        """Params with a seed that follows from the model's and the request's number."""
        # a hash, not a sum: answers of one prompt have consecutive seeds (decision 022)
        text = f"{self._seed} {number}".encode()
        digest = hashlib.blake2b(text, digest_size=8).digest()
        return msgspec.structs.replace(params, seed=int.from_bytes(digest, "little", signed=True))


def _is_one_prompt(prompts: Any) -> bool:
    """True for a single prompt. Raises: BadRequestError if `prompts` is neither a prompt nor a
    list.
    """
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


def _text_of(given: EmbeddingInput) -> str | None:
    if isinstance(given, Mapping):
        given = given.get("prompt")  # type: ignore[assignment]
    return given if isinstance(given, str) else None


def _is_list(given: object) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, str | bytes)


def _is_turn(given: object) -> bool:
    return isinstance(given, ChatMessage | Mapping)


def _with_batch_interval(params: SamplingParams) -> SamplingParams:
    """Params with a larger stream interval."""
    interval = max(params.stream_interval, _STREAM_INTERVAL)
    return msgspec.structs.replace(params, stream_interval=interval)
