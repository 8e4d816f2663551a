"""Agents' libraries run a whole tool loop over HTTP, streamed and not.

Each is a program in an environment of its own (`scripts/foreign-clients --set-up`), which says what
the library has shown. Requests pass a proxy that keeps them: their fields are those of the files in
`bodies`, which other tests read, and none is unknown to the server. If a new release sends others,
`scripts/foreign-clients --record` writes the files anew.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.foreign_bodies import BODIES, as_lines, recorded_bodies, shape_of
from tests.helpers.patience import PATIENCE_S
from tests.helpers.recording_proxy import Recorded, recording
from tests.helpers.stacks import spareless_stack
from tests.system.foreign_clients.programs import scenario

from slipstream import Stack

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
ENVIRONMENTS = ROOT / ".venv-clients"
NAMES = [scenario.MODEL, "second", "third", "fourth", "fifth"]
CALLS = [["weather", {"city": "Zürich", "days": 2}], ["weather", {"city": "Oslo", "days": 3}]]
REASONING = ["Two cities: I ask for both.", "Both are here."]
REASONS = {
    "/v1/chat/completions": ["tool_calls", "stop"],
    "/v1/messages": ["tool_use", "end_turn"],
    "/v1/responses": ["completed", "completed"],
}
TEXT = "Sleet in both."
ALL = {"calls", "text", "reasoning", "finish_reasons", "usage"}
# the environment of each program, what its library shows, and what it does not show of a stream
CLIENTS: dict[str, tuple[str, set[str], set[str]]] = {
    "anthropic_messages": ("current", ALL, set()),
    "langchain_messages": ("current", ALL, set()),
    "pydantic_ai_messages": ("current", ALL, set()),
    "openai_responses": ("current", ALL, set()),
    "openai_agents_responses": ("current", ALL - {"finish_reasons"}, set()),
    "openai_chat": ("current", ALL, set()),
    "openai_agents_chat": ("current", ALL - {"finish_reasons"}, set()),
    "pydantic_ai_chat": ("current", ALL, set()),
    "langchain_chat": ("current", ALL - {"reasoning"}, set()),
    "smolagents_chat": ("current", {"calls", "text", "usage"}, set()),
    "litellm_chat": ("openai_2", ALL, set()),
    "openai_node": ("npm", ALL, {"reasoning"}),
    "ai_sdk": ("npm", ALL, set()),
}
# the file and the argument of the programs that know several interfaces
SEVERAL = {
    "langchain_chat": ("langchain_model", "chat"),
    "langchain_messages": ("langchain_model", "messages"),
    "openai_agents_chat": ("openai_agents", "chat"),
    "openai_agents_responses": ("openai_agents", "responses"),
    "pydantic_ai_chat": ("pydantic_ai_agent", "chat"),
    "pydantic_ai_messages": ("pydantic_ai_agent", "messages"),
}
# Nothing but the server is to be asked for anything: not for prices, templates or updates, and no
# trace is to be sent.
OFFLINE = {
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "NO_PROXY": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LANGSMITH_TRACING": "false",
}
IS_RECORDED = "RECORD_BODIES" in os.environ


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    model = f"simulated:step_ms=1,answers={HERE / 'answers.jsonl'}"
    formats: Any = {"tool_format": "hermes", "reasoning_format": "qwen3"}
    with spareless_stack(model, http_port=0, served_model_name=NAMES, **formats) as running:
        yield running


def command(program: str, environment: str, address: str) -> tuple[list[str], Path]:
    """How a program is run, and its standard input. Skips where its environment is missing."""
    folder = ENVIRONMENTS / environment
    if environment == "npm":
        node = shutil.which("node")
        if node is None or not folder.exists():
            pytest.skip("node and npm are missing, or scripts/foreign-clients --set-up did not run")
        names = ("MODEL", "KEY", "QUESTION", "WEATHER")
        told = {name.lower(): getattr(scenario, name) for name in names}
        # node finds packages from the folder in which it runs if the program is its standard input
        arguments = [node, "--input-type=module", "-", address, json.dumps(told)]
        return arguments, HERE / "programs" / f"{program}.mjs"
    python = folder / "bin/python"
    if not python.exists():
        pytest.skip("scripts/foreign-clients --set-up makes the environments of foreign clients")
    file, *arguments = SEVERAL.get(program, (program,))
    file = str(HERE / "programs" / f"{file}.py")
    return [str(python), file, address, *arguments], Path(os.devnull)


def play(stack: Stack, program: str, environment: str) -> tuple[dict[str, Any], list[Recorded]]:
    """What a program reports, by run, and the requests that it has made."""
    with recording(stack.http_address) as proxy:
        report = run(program, environment, proxy.address)
    # anthropic's client asks for a thread first, and goes on without
    refused = [one for one in proxy.recorded if one.status != 200]
    assert all(b"thread_unsupported_request" in one.answer for one in refused), refused
    ignored = [one.headers.get("x-slipstream-ignored-fields") for one in proxy.recorded]
    assert ignored == [None] * len(ignored)
    bodies = [one.body for one in proxy.recorded]
    if IS_RECORDED:
        (BODIES / f"{program}.jsonl").write_text(as_lines(bodies))
    # other texts, and calls in another order, are no news
    kept = recorded_bodies(program)
    assert list(map(shape_of, bodies)) == list(map(shape_of, kept)), "record them anew"
    answered = [one for one in proxy.recorded if one not in refused]
    return report, answered


def run(program: str, environment: str, address: str) -> dict[str, Any]:
    """What a program reports."""
    arguments, source = command(program, environment, address)
    with source.open() as program_or_nothing:
        done = subprocess.run(
            arguments,
            cwd=ENVIRONMENTS / environment,
            env={name: os.environ.get(name, "") for name in ("PATH", "HOME")} | OFFLINE,
            stdin=program_or_nothing,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def usage_of(answer: Recorded) -> list[int]:
    """Tokens of the prompt and of the answer, as the server has said them."""
    last = answer.events[-1]
    match answer.path.partition("?")[0], last.get("type"):
        case "/v1/chat/completions", _:
            return [last["usage"][name] for name in ("prompt_tokens", "completion_tokens")]
        case "/v1/messages", "message_stop":
            usage = answer.events[0]["message"]["usage"] | answer.events[-2]["usage"]
        case "/v1/messages", _:
            usage = last["usage"]
        case _:
            usage = last.get("response", last)["usage"]
    cached = [usage.get(f"cache_{kind}_input_tokens", 0) for kind in ("read", "creation")]
    return [usage["input_tokens"] + sum(cached), usage["output_tokens"]]


@pytest.mark.parametrize("program", CLIENTS)
def test_a_tool_loop(stack: Stack, program: str) -> None:
    environment, shown, whole_only = CLIENTS[program]
    runs, recorded = play(stack, program, environment)
    assert len(recorded) == 2 * len(runs)
    for number, (name, run) in enumerate(runs.items()):
        asked, ended = recorded[2 * number : 2 * number + 2]
        is_stream = name.startswith("streamed")
        assert [one.body.get("stream", False) for one in (asked, ended)] == [is_stream] * 2
        assert run.keys() == (shown - whole_only if is_stream else shown)
        calls = [[name, json.loads(it) if isinstance(it, str) else it] for name, it in run["calls"]]
        assert (calls, run["text"]) == (CALLS, TEXT)
        assert run.get("reasoning", REASONING) == REASONING
        reasons = REASONS[asked.path.partition("?")[0]]
        assert run.get("finish_reasons", reasons) == reasons
        assert run["usage"] == [usage_of(asked), usage_of(ended)]


def test_instructor_extracts_an_object(stack: Stack) -> None:
    """By a forced call and by a schema; the first answer is asked for again, as it is invalid."""
    runs, recorded = play(stack, "instructor_extraction", "openai_2")
    assert {run["object"] == {"city": "Oslo", "days": 3} for run in runs.values()} == {True}
    assert runs["tools"]["finish_reasons"] == ["tool_calls"] * 2
    assert runs["json_schema"]["finish_reasons"] == ["stop"] * 2
    usage = runs["tools"]["usage"] + runs["json_schema"]["usage"]
    assert usage == [usage_of(one) for one in recorded[:4]]
    assert [one.body.get("stream", False) for one in recorded] == [False] * 4 + [True] * 2


def test_agents_call_tools_and_end_with_an_object(stack: Stack) -> None:
    """Its schema comes with each of their requests, beside the tools."""
    runs, recorded = play(stack, "typed_agents", "current")
    assert len(runs) == 5
    for run in runs.values():
        assert run == {"calls": CALLS, "answer": {"city": "Oslo", "days": 3}}
    assert len(recorded) == 2 * len(runs)
    for one in recorded:
        assert "tools" in one.body
        assert "response_format" in one.body or "format" in one.body["text"]


def test_models_are_listed_page_by_page(stack: Stack) -> None:
    found = run("anthropic_models", "current", str(stack.http_address))
    assert found["forwards"] == found["by_hand"] == found["beta"] == NAMES
    assert sorted(found["backwards"]) == sorted(NAMES[:-1])  # the last pages first


# ---- what is written down about them -----------------------------------------------------------


def installed() -> dict[str, set[str]]:
    """The versions of all packages by their names."""
    found: dict[str, set[str]] = {}
    for path in (HERE / "environments").glob("*.txt"):
        for name, version in re.findall(r"^([\w.-]+)==([^\s;]+)", path.read_text(), re.MULTILINE):
            found.setdefault(name, set()).add(version)
    packages = json.loads((HERE / "environments/package.json").read_text())
    for name, version in packages["dependencies"].items():
        found.setdefault(f"{name} (npm)", set()).add(version)
    return found


def test_the_documented_versions_are_the_tested_ones() -> None:
    page = (ROOT / "docs/tools.md").read_text().partition("\n## Tested clients\n")[2]
    rows = re.findall(r"^\| `([^`]+)`( \(npm\))? \| ([\d., ]+) \|", page, re.MULTILINE)
    assert len(rows) >= 9
    versions = installed()
    for name, where, written in rows:
        assert set(written.split(", ")) == versions[name + where]
