"""docs/from-vllm.md, line by line: what it calls the same is there, what it calls missing is
not.
"""

from __future__ import annotations

import inspect
import re
import typing
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

import slipstream
from slipstream.cli.main import _parser
from slipstream.client.call_options import options_for_many, options_for_one
from slipstream.errors import SlipstreamError
from slipstream.http.api_errors import ApiError
from slipstream.http.endpoints.openapi import ENDPOINTS
from slipstream.http.planning.chat import read_chat
from slipstream.http.planning.completions import read_completion
from slipstream.request.requests import checked_params
from slipstream.vllm_names import CALL_OPTIONS, LLM_MEMBERS, SAMPLING_PARAMS

PAGE = (Path(__file__).parents[2] / "docs" / "from-vllm.md").read_text()
MISSING = "\N{EN DASH}"


class Line(NamedTuple):
    """A line of a table. ours: a name of Slipstream; None where there is none."""

    theirs: str
    ours: str | None


def lines(title: str, number: int = 0) -> list[Any]:
    """The lines of a table below a title, as parameters of a test."""
    [section] = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    table = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)[number]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]
    found = []
    for theirs, ours, _note in rows:
        name = theirs.split("` `")[0].strip("`")
        same = {"same": name, MISSING: None}
        found.append(pytest.param(Line(name, same.get(ours, ours.strip("`"))), id=name))
    return found


def test_every_line_is_read() -> None:
    titles = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    read = sum(len(lines(title)) for title in titles) + len(lines("HTTP", 1))
    assert read == len(re.findall(r"^\| `", PAGE, re.MULTILINE)) > 150


# ---- Python --------------------------------------------------------------------------------------


def is_there(name: str) -> bool:
    """Whether `slipstream` has `Class`, `Class.member` or `Class.method(parameter=)`."""
    match = re.fullmatch(r"(\w+)(?:\.(\w+))?(?:\((\w+)=\))?", name)
    assert match is not None, name
    owner, member, parameter = match.groups()
    if owner not in slipstream.__all__:
        return False
    found = getattr(slipstream, owner)
    if member is not None:
        if not hasattr(found, member):
            return False
        found = getattr(found, member)
    return parameter is None or parameter in parameters(found)


def parameters(function: Any) -> set[str]:
    """The names that a function takes, those of its unpacked options included."""
    found = set(inspect.signature(function).parameters)
    given = re.search(r"Unpack\[(\w+)\]", str(inspect.signature(function)))
    if given is not None:
        options = getattr(inspect.getmodule(function), given[1])
        found |= set(typing.get_type_hints(options))
    return found


@pytest.mark.parametrize("line", [*lines("Offline"), *lines("Outputs")])
def test_names_of_the_python_interface(line: Line) -> None:
    assert is_there(line.ours or line.theirs) == (line.ours is not None)


def missing(title: str) -> set[str]:
    return {line.values[0].theirs for line in lines(title) if line.values[0].ours is None}


def test_members_of_the_llm_that_are_missing_say_so() -> None:
    llm = object.__new__(slipstream.LLM)
    members = {name.removeprefix("LLM.") for name in missing("Offline") if "(" not in name}
    assert members == LLM_MEMBERS
    for name in members:
        with pytest.raises(AttributeError, match=rf"LLM.{name}: not supported yet; see docs"):
            getattr(llm, name)
    with pytest.raises(AttributeError, match="'LLM' object has no attribute 'nonsense'"):
        llm.nonsense  # noqa: B018


def options_with(name: str, value: Any) -> list[Any]:
    """What each call makes of an option."""
    return [
        options_for_one(None, {name: value}),  # type: ignore[misc]
        options_for_many(["x"], None, {name: value}),  # type: ignore[misc]
        options_for_one(slipstream.SamplingParams(), {name: value}),  # type: ignore[misc]
    ]


@pytest.mark.parametrize("name", [*CALL_OPTIONS, *SAMPLING_PARAMS])
def test_options_of_a_call_that_are_not_supported(name: str) -> None:
    for value in (None, *{**CALL_OPTIONS, **SAMPLING_PARAMS}[name]):
        assert all(options_with(name, value))
    with pytest.raises(slipstream.BadRequestError) as caught:
        options_with(name, "something else")
    assert caught.value.field == name
    assert str(caught.value).startswith(f"{name}: not supported yet: got 'something else', ")
    assert str(caught.value).endswith("; see docs/from-vllm.md")


def test_every_missing_option_of_a_call_is_known() -> None:
    called = re.findall(r"LLM\.\w+\((\w+)=\)", " ".join(missing("Offline")))
    assert set(called) == set(CALL_OPTIONS)
    assert missing("SamplingParams") - {"output_kind"} == set(SAMPLING_PARAMS)


VLLMS_DEFAULTS: dict[str, Any] = {
    "n": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "stop": (),  # a list there
    "stop_token_ids": (),
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "detokenize": True,
    "skip_special_tokens": True,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": None,  # an empty list there
    "structured_outputs": None,
    "repetition_detection": None,
    "thinking_token_budget": None,
}


@pytest.mark.parametrize("line", lines("SamplingParams"))
def test_fields_of_sampling_params(line: Line) -> None:
    if line.ours is not None:
        default = VLLMS_DEFAULTS[line.theirs]
        assert getattr(slipstream.SamplingParams(), line.ours) == default
        checked_params(None, {line.ours: default})
    else:
        with pytest.raises(slipstream.BadRequestError, match=line.theirs):
            checked_params(None, {line.theirs: 1})
        with pytest.raises((TypeError, slipstream.BadRequestError), match=line.theirs):
            slipstream.SamplingParams(**{line.theirs: "else"})  # type: ignore[arg-type]
        for neutral in SAMPLING_PARAMS.get(line.theirs, ()):
            same = slipstream.SamplingParams(**{line.theirs: neutral})
            assert same == slipstream.SamplingParams()


FORMS: dict[str, dict[str, Any]] = {
    "json": {"json": {"type": "integer"}},
    "regex": {"regex": "a+"},
    "choice": {"choice": ["a", "b"]},
    "grammar": {"grammar": 'start: "a"'},
    "json_object": {"json_object": True},
    "disable_any_whitespace": {"json_object": True, "disable_any_whitespace": True},
}


@pytest.mark.parametrize("line", lines("StructuredOutputs"))
def test_fields_of_structured_outputs(line: Line) -> None:
    if line.ours is not None:
        fields = FORMS[line.ours]
        as_object = checked_params(
            slipstream.SamplingParams(structured_outputs=slipstream.StructuredOutputs(**fields)), {}
        )
        assert as_object == checked_params(None, {"structured_outputs": fields})
    else:
        with pytest.raises(SlipstreamError, match=line.theirs):
            checked_params(None, {"structured_outputs": {"regex": "a", line.theirs: True}})


# ---- the server ----------------------------------------------------------------------------------


def options_of(command: str) -> set[str]:
    """The options of a command of `slipstream`."""
    [subcommands] = [each for each in _parser()._actions if isinstance(each.choices, dict)]
    parser = subcommands.choices[command]
    parser.load()
    return {option for action in parser._actions for option in action.option_strings}


@pytest.mark.parametrize("line", lines("Server"))
def test_options_of_the_server(line: Line) -> None:
    assert ((line.ours or line.theirs) in options_of("serve")) == (line.ours is not None)


@pytest.mark.parametrize("line", lines("HTTP"))
def test_routes(line: Line) -> None:
    assert ((line.ours or line.theirs) in ENDPOINTS) == (line.ours is not None)


SAMPLES: dict[str, Any] = {
    "top_k": 3,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "stop_token_ids": [1],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "min_tokens": 1,
    "skip_special_tokens": False,
    "allowed_token_ids": [1],
    "bad_words": ["x"],
    "prompt_logprobs": 1,
    "structured_outputs": {"regex": "a"},
    "repetition_detection": {"max_pattern_size": 20, "min_count": 4},
    "thinking_token_budget": 5,
    "response_format": {"type": "json_object"},
    "priority": 1,
    "cache_salt": "x",
    "return_token_ids": True,
    "add_generation_prompt": False,
    "continue_final_message": True,
    "chat_template_kwargs": {"a": 1},
    "chat_template": "{{ messages }}",
    "documents": [{"text": "a"}],
    "use_beam_search": True,
    "length_penalty": 2.0,
    "truncate_prompt_tokens": 5,
    "spaces_between_special_tokens": False,
    "add_special_tokens": "neither",  # true in chats and false in completions are refused, too
    "guided_json": {"type": "object"},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": 'start: "a"',
    "guided_json_object": True,
    "request_id": "me",
}
ONLY_CHAT = {"add_generation_prompt", "continue_final_message", "chat_template_kwargs"}


@pytest.mark.parametrize("line", lines("HTTP", 1))
def test_fields_of_a_body(line: Line) -> None:
    field = line.ours or line.theirs
    plain: dict[str, Any] = {"prompt": "x"}
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    bodies: list[tuple[Any, dict[str, Any]]] = [(read_chat, chat)]
    if field not in ONLY_CHAT | {"chat_template", "documents"}:
        bodies.append((read_completion, plain))
    for read, body in bodies:
        encoded = msgspec.json.encode({**body, field: SAMPLES[field]})
        if line.ours is not None:
            assert getattr(read(encoded), field) is not None
        else:
            with pytest.raises(ApiError, match=field):
                read(encoded)
