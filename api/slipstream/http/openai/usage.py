"""The usage of a request in OpenAI's shape: tokens of its prompts and answers."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, Struct, UnsetType

from slipstream_ipc.messages import End


class PromptTokensDetails(Struct, frozen=True):
    """cached_tokens: found in the prefix cache when the prompts were first computed."""

    cached_tokens: int


class CompletionTokensDetails(Struct, frozen=True):
    """reasoning_tokens: between the delimiters of reasoning. accepted_prediction_tokens: of the
    prediction, that came as foreseen; rejected_prediction_tokens: its others. Both are 0 where
    answers are not drafted.
    """

    reasoning_tokens: int
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(Struct, frozen=True):
    """The tokens of a request. The details are known at the end."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


def usage_of(num_prompt_tokens: int, num_answer_tokens: int) -> Usage:
    """The usage without details."""
    return Usage(num_prompt_tokens, num_answer_tokens, num_prompt_tokens + num_answer_tokens)


def final_usage(usage: Usage, ends: Sequence[End], num_answers: int) -> Usage:
    """The usage with its details. ends: of all answers, `num_answers` to each prompt in turn."""
    # a prompt's other answers find what its first one has computed
    num_cached = sum(
        min(end.num_cached_tokens for end in ends[at : at + num_answers])
        for at in range(0, len(ends), num_answers)
    )
    num_reasoning = sum(end.num_reasoning_tokens for end in ends)
    return Usage(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.total_tokens,
        PromptTokensDetails(num_cached),
        CompletionTokensDetails(
            min(usage.completion_tokens, num_reasoning),
            sum(end.num_accepted_prediction_tokens for end in ends),
            sum(end.num_rejected_prediction_tokens for end in ends),
        ),
    )
