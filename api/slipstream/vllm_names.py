"""vLLM's names that Slipstream does not have: other names for the same, and what is not supported.

What is not supported is accepted with the values that change nothing, so that ported code runs, and
otherwise refused as such. docs/from-vllm.md lists it all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.errors import BadRequestError
from slipstream_ipc.errors import shown
from slipstream_ipc.messages import Fault

_PAGE = "see docs/from-vllm.md"
_FORMER = {
    "guided_choice": "structured_outputs.choice",
    "guided_decoding": "structured_outputs",
    "guided_grammar": "structured_outputs.grammar",
    "guided_json": "structured_outputs.json",
    "guided_json_object": "structured_outputs.json_object",
    "guided_regex": "structured_outputs.regex",
}

# The values, besides None, that change nothing
CALL_OPTIONS: dict[str, tuple[Any, ...]] = {
    "chat_template": (),
    "chat_template_content_format": ("auto", "string"),
    "mm_processor_kwargs": ({},),
}
SAMPLING_PARAMS: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "extra_args": ({},),
    "flat_logprobs": (False,),
    "logits_processors": ([],),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
}
LLM_MEMBERS = frozenset(
    {
        "beam_search",
        "collective_rpc",
        "encode",
        "llm_engine",
        "reset_prefix_cache",
        "sleep",
        "wake_up",
    }
)


def structured_outputs_name(name: str) -> str:
    """`; it is NAME now` for a former name of vLLM's, to follow `unknown field`; else empty."""
    return f"; it is {_FORMER[name]} now" if name in _FORMER else ""


def unsupported_value(field: str, value: object, neutral: tuple[Any, ...]) -> str | None:
    """The reason why the value of a field that is not supported is refused; None if it changes
    nothing.
    """
    if value is None or any(_same(value, one) for one in neutral):
        return None
    allowed = " or ".join([repr(one) for one in (*neutral, None)])
    return f"{field}: not supported yet: got {shown(value)}, allowed: {allowed}"


def without_unsupported(
    options: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """The options without those of `neutral`, where these change nothing.

    Raises: BadRequestError where one would change something.
    """
    rest = dict(options)
    for name in neutral.keys() & options.keys():
        wrong = unsupported_value(name, rest.pop(name), neutral[name])
        if wrong is not None:
            raise BadRequestError(Fault("bad_request", f"{wrong}; {_PAGE}", name))
    return rest


def missing_member(owner: str, name: str) -> AttributeError:
    """The error for a member that vLLM's class of this name has."""
    return AttributeError(f"{owner}.{name}: not supported yet; {_PAGE}", name=name)


def _same(value: object, neutral: object) -> bool:
    """Equal, without taking True for 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
