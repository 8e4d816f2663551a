"""`n` answers to one prompt: their parameters, and one message for all of them."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from slipstream_ipc.messages import OtherAnswer, SamplingParams, Submit


def params_of_answers(params: SamplingParams) -> list[SamplingParams]:
    """The parameters of each of a prompt's `n` answers, with consecutive seeds. params: checked."""
    if params.n == 1:
        return [params]
    one = msgspec.structs.replace(params, n=1)
    answers = [one] * params.n
    if params.seed is not None:
        seeds = [(params.seed + index + 2**63) % 2**64 - 2**63 for index in range(params.n)]
        answers = [msgspec.structs.replace(one, seed=seed) for seed in seeds]
    # the first answer brings the prompt's log-probabilities for all of them
    others = [msgspec.structs.replace(each, prompt_logprobs=None) for each in answers[1:]]
    return [answers[0], *others]


def joined(submit: Submit, others: Iterable[Submit]) -> Submit:
    """One Submit for all of these answers, which have to satisfy `can_join`."""
    own = tuple(OtherAnswer(other.handle, other.stream_id, other.seed) for other in others)
    return msgspec.structs.replace(submit, others=own)


def can_join(submit: Submit, other: Submit) -> bool:
    """True if both come from one call of `new_submits` and differ at most in their seeds."""
    return (
        submit.params is other.params
        and submit.text is other.text
        and submit.token_ids is other.token_ids
        and submit.messages is other.messages
    )
