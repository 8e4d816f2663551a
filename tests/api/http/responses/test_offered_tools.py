"""Which tools of a response the model is offered, and how their calls are answered."""

from __future__ import annotations

import json
import re
from typing import Any, get_args

import msgspec
import pytest
from openai.types.responses.response_input_item_param import ResponseInputItemParam
from openai.types.responses.tool_param import ToolParam
from tests.helpers.fake_worker import MODEL

from slipstream.http.answers.answer_plan import AnswerPlan
from slipstream.http.api_errors import ApiError
from slipstream.http.openai.ignored_fields import IgnoredFields
from slipstream.http.responses.response_plan import echo_of, new_response
from slipstream.http.responses.responses_request import read_response_request
from slipstream_ipc.messages import ChatMessage

F = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
G = {"type": "function", "name": "g", "description": "Gets."}
PATCH = {"type": "custom", "name": "patch", "description": "Patches."}
MULTI = {"type": "namespace", "name": "multi", "description": "For many.", "tools": [G, PATCH]}
REGEX = {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"}
NESTED = {"type": "grammar", "syntax": "lark", "definition": 'start: "(" start? ")"'}
LARK = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}


def planned(ignored: IgnoredFields | None = None, **fields: Any) -> AnswerPlan:
    body = {"input": "hi", **fields}
    return new_response(read_response_request(json.dumps(body).encode(), ignored), MODEL)[0]


def request_of(plan: AnswerPlan) -> Any:
    return plan.states[0].request


def offered(*tools: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    """The functions that the model is shown."""
    template = request_of(planned(IgnoredFields(), tools=list(tools), **fields)).template
    return [tool["function"] for tool in json.loads(template.tools or "[]")]


def header(**fields: Any) -> str:
    ignored = IgnoredFields()
    planned(ignored, **fields)
    return str(ignored)


def refused(*, is_strict: bool = False, **fields: Any) -> str | None:
    with pytest.raises(ApiError) as caught:
        planned(None if is_strict else IgnoredFields(), **fields)
    assert caught.value.status == 400
    return caught.value.body.error.param


def literals(union: Any) -> list[str]:
    """The values of `type` in openai's union of typed dictionaries."""
    found: dict[str, None] = {}
    for each in get_args(union):
        kind = each.__annotations__.get("type")
        text = getattr(kind, "__forward_arg__", str(kind))
        found.update(dict.fromkeys(re.findall(r"""['"](\w+)['"]""", text)))
    return list(found)


TOOLS = literals(ToolParam)
ITEMS = literals(ResponseInputItemParam)


@pytest.mark.parametrize("kind", [*TOOLS, "web_search_2025_08_26", "of_next_year"])
def test_a_tool_of_any_type_is_taken(kind: str) -> None:
    given = {"namespace": MULTI, "custom": PATCH, "function": F}.get(kind, {"type": kind, "x": 1})
    functions = offered(G, given)
    is_known = kind in ("namespace", "custom", "function")
    assert len(functions) == 1 + is_known + (kind == "namespace")
    named = header(tools=[G, given])
    assert named.partition(" ")[0] == ("" if is_known else f"tools.{kind}")
    if not is_known:
        assert refused(tools=[G, given], is_strict=True) == "tools[1].type"
        assert refused(tools=[G, given], tool_choice={"type": kind}) == "tool_choice"
        choice = {"type": "function", "name": kind}
        assert refused(tools=[G, given], tool_choice=choice) == "tool_choice"


def test_openais_own_types_are_all_of_these() -> None:
    assert {"function", "custom", "namespace", "mcp", "local_shell"} <= set(TOOLS)
    assert {"message", "custom_tool_call", "web_search_call", "compaction"} <= set(ITEMS)


def test_a_misspelt_type_is_hinted_at() -> None:
    assert header(tools=[{**F, "type": "fucntion"}]) == "tools.fucntion (did you mean function?)"


@pytest.mark.parametrize("kind", [None, 1, {}])
def test_a_tool_has_a_type(kind: Any) -> None:
    assert refused(tools=[{**F, "type": kind}]) == "tools[0].type"


def test_a_namespace_is_part_of_its_functions_names() -> None:
    one, other = offered(MULTI)
    assert (one["name"], one["description"]) == ("multi__g", "For many.\n\nGets.")
    assert (other["name"], other["description"]) == ("multi__patch", "Patches.")
    [mcp] = offered({"type": "namespace", "name": "mcp__files__", "tools": [G]})
    assert mcp["name"] == "mcp__files__g"


def test_what_a_namespace_cannot_hold_is_named() -> None:
    tools = [{**MULTI, "tools": [G, {"type": "web_search"}]}]
    assert [each["name"] for each in offered(*tools)] == ["multi__g"]
    assert header(tools=tools) == "tools.namespace.web_search"


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{**MULTI, "name": None}], "tools[0].name"),
        ([{**MULTI, "tools": None}], "tools[0].tools"),
        ([{**MULTI, "tools": [1]}], "tools[0].tools"),
        ([MULTI, {**F, "name": "multi__g"}], "tools[1].name"),
        ([{**F, "name": "multi__g"}, MULTI], "tools[1].tools[0].name"),
        ([MULTI, MULTI], "tools[1].tools[0].name"),
        ([PATCH, PATCH], "tools[1].name"),
        ([PATCH, {**F, "name": "patch"}], "tools[1].name"),
        ([{**MULTI, "name": "n" * 256}], "tools[0].tools[0].name"),
    ],
)
def test_names_tell_tools_apart(tools: list[dict[str, Any]], param: str) -> None:
    assert refused(tools=tools) == param


@pytest.mark.parametrize(
    ("choice", "function"),
    [
        ({"type": "function", "name": "f"}, "f"),
        ({"type": "function", "name": "g"}, "multi__g"),
        ({"type": "function", "name": "g", "namespace": "multi"}, "multi__g"),
        ({"type": "custom", "name": "patch", "namespace": "multi"}, "multi__patch"),
        ({"type": "custom", "name": "patch"}, "patch"),
    ],
)
def test_a_choice_names_a_tool_as_its_client_does(choice: Any, function: str) -> None:
    plan = planned(tools=[F, PATCH, MULTI], tool_choice=choice)
    assert request_of(plan).answer.tool_choice == f"function:{function}"


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "name": "f"},
        {"type": "function", "name": "patch"},
        {"type": "function", "name": "g", "namespace": "other"},
        {"type": "function", "name": "f", "namespace": {}},
        {"type": "function", "name": "h"},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "no"}]},
    ],
)
def test_a_choice_of_what_is_not_offered_is_refused(choice: Any) -> None:
    param = refused(tools=[F, PATCH, MULTI, {"type": "web_search"}], tool_choice=choice)
    assert param in ("tool_choice", "tool_choice.tools")


def test_two_namespaces_may_have_functions_of_one_name() -> None:
    tools = [MULTI, {**MULTI, "name": "other"}]
    assert [each["name"] for each in offered(*tools)] == [
        *("multi__g", "multi__patch", "other__g", "other__patch"),
    ]
    assert refused(tools=tools, tool_choice={"type": "function", "name": "g"}) == "tool_choice"


def test_allowed_tools_may_be_a_namespace() -> None:
    for listed in ([MULTI], [MULTI, MULTI], [{**G, "namespace": "multi"}, MULTI]):
        choice = {"type": "allowed_tools", "mode": "auto", "tools": listed}
        found = offered(F, MULTI, tool_choice=choice)
        assert [each["name"] for each in found] == ["multi__g", "multi__patch"]


@pytest.mark.parametrize(
    ("grammar", "choice", "named"),
    [
        (None, "auto", ""),
        ({"type": "text"}, "auto", ""),
        (LARK, "auto", ""),
        (NESTED, "auto", "tools.custom.format"),
        (LARK, "required", ""),
        (NESTED, "required", "tools.custom.format"),
        (REGEX, "auto", ""),
        (REGEX, "required", ""),
        (REGEX, {"type": "custom", "name": "patch"}, ""),
    ],
)
def test_a_format_that_is_no_pattern_is_named(grammar: Any, choice: Any, named: str) -> None:
    fields = {"tools": [{**PATCH, "format": grammar}], "tool_choice": choice}
    assert header(**fields) == named
    if named:
        assert refused(**fields, is_strict=True) == "tools[0].format"


def test_the_response_repeats_the_tools_that_are_offered() -> None:
    tools = [F, {"type": "web_search"}, PATCH, {**MULTI, "tools": [G, {"type": "mcp"}]}]
    body = {"input": "x", "tools": tools}
    response = echo_of(read_response_request(json.dumps(body).encode(), IgnoredFields()), MODEL)
    assert json.loads(bytes(response.tools)) == [F, PATCH, {**MULTI, "tools": [G]}]


def test_only_kept_answers_with_such_tools_go_on_by_their_id() -> None:
    for tools, store, can_resume in (
        ([F], False, True),
        ([F, PATCH], True, True),
        ([F, PATCH], False, False),
        ([MULTI], False, False),
    ):
        assert planned(tools=tools, store=store, stream=True).can_resume is can_resume


# ---- histories -----------------------------------------------------------------------------------

ACTION = {"type": "exec", "command": ["ls"]}
OPERATION = {"type": "delete_file", "path": "a"}
SHELL = [{"stdout": "a\n", "stderr": "b", "outcome": {"type": "exit", "exit_code": 0}}]
READ: dict[str, tuple[dict[str, Any], Any]] = {
    "function_call": (
        {"call_id": "c", "name": "g", "namespace": "multi", "arguments": "{}"},
        ("multi__g", {}),
    ),
    "custom_tool_call": (
        {"call_id": "c", "name": "patch", "input": 'a "b"'},
        ("patch", {"input": 'a "b"'}),
    ),
    "local_shell_call": ({"call_id": "c", "action": ACTION}, ("local_shell", ACTION)),
    "shell_call": (
        {"call_id": "c", "action": {"commands": ["ls"]}},
        ("shell", {"commands": ["ls"]}),
    ),
    "apply_patch_call": ({"call_id": "c", "operation": OPERATION}, ("apply_patch", OPERATION)),
    "function_call_output": ({"call_id": "c", "output": "done"}, "done"),
    "custom_tool_call_output": ({"call_id": "c", "output": "done"}, "done"),
    "local_shell_call_output": ({"id": "c", "output": "done"}, "done"),
    "shell_call_output": ({"call_id": "c", "max_output_length": 9, "output": SHELL}, "a\nb"),
    "apply_patch_call_output": ({"call_id": "c", "status": "failed"}, "failed"),
}
OTHERS = ("message", "reasoning", "item_reference")


def turns(*items: dict[str, Any], ignored: IgnoredFields | None = None) -> list[ChatMessage]:
    user = {"role": "user", "content": "hi"}
    return list(request_of(planned(ignored, input=[user, *items])).messages)[1:]


@pytest.mark.parametrize("kind", READ)
def test_a_call_of_a_clients_tool_and_its_output_are_read(kind: str) -> None:
    fields, expected = READ[kind]
    [turn] = turns({"type": kind, **fields})
    if kind.endswith("output"):
        assert (turn.role, turn.content, turn.tool_call_id) == ("tool", expected, "c")
        return
    [call] = turn.tool_calls or ()
    assert call.id == "c"
    assert (call.function.name, json.loads(call.function.arguments)) == expected


@pytest.mark.parametrize("kind", [kind for kind in ITEMS if kind not in (*READ, *OTHERS)])
def test_what_openais_servers_did_is_left_out_and_named(kind: str) -> None:
    item = {"type": kind, "id": "x", "output": {"type": "y"}, "action": 1, "tools": [], "role": 7}
    ignored = IgnoredFields()
    before, after = ({"role": "assistant", "content": text} for text in "ab")
    found = turns(before, item, after, ignored=ignored)
    assert [turn.content for turn in found] == ["a", "b"]
    assert str(ignored) == f"input.{kind}"
    user = {"role": "user", "content": "hi"}
    assert refused(input=[user, {"type": kind}], is_strict=True) == "input[1].type"


def test_items_of_other_types_are_refused() -> None:
    assert refused(input=[{"type": "telepathy_call", "id": "x"}]) == "input[0].type"


def test_an_input_of_nothing_that_is_read_is_refused() -> None:
    assert refused(input=[{"type": "compaction", "encrypted_content": "x"}]) == "input"


@pytest.mark.parametrize("tools", [[PATCH] * 1000, [F] * 20_000, [MULTI]])
def test_many_choices_of_tools_cost_little(tools: list[dict[str, Any]]) -> None:
    listed = [{**G, "namespace": "multi"}, MULTI, {**F, "name": "no"}] * 10_000
    choice = {"type": "allowed_tools", "mode": "auto", "tools": listed}
    assert refused(tools=tools, tool_choice=choice) in ("tool_choice.tools", "tools[1].name")


def test_a_record_holds_what_was_given() -> None:
    item = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "x"}
    body = read_response_request(json.dumps({"input": [item]}).encode())
    assert msgspec.to_builtins(body.input)[0] == item
