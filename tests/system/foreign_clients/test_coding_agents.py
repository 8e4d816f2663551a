"""Coding agents run a whole tool loop: two calls in one answer, their results, the answer to them,
and a further question to the same session.

Each is the program that npm installs (`scripts/foreign-clients --set-up`), with a home of its own,
and is asked nothing but over loopback. The model's template takes a system turn only first. What an
agent sends is recorded without its texts (`agent_bodies`), for tests that run without it.
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
from tests.helpers.agent_recordings import RECORDINGS, Request, as_lines, recorded_requests
from tests.helpers.foreign_bodies import shape_of
from tests.helpers.patience import PATIENCE_S
from tests.helpers.recording_proxy import Recorded, recording
from tests.helpers.stacks import spareless_stack
from tests.system.foreign_clients.coding_agents import (
    AGAIN,
    AGENTS,
    ANSWER,
    ANSWER_AGAIN,
    FILES,
    MODEL,
    OFFLINE,
    QUESTION,
    Agent,
)

from slipstream import Stack

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PACKAGES = ROOT / ".venv-clients/agents/node_modules"
IS_RECORDED = "RECORD_BODIES" in os.environ
IGNORED = "x-slipstream-ignored-fields"


def played(agent: str) -> str:
    """The model's answer to an agent's question: two calls."""
    called = AGENTS[agent]
    calls = [{"name": called.tool, "arguments": called.arguments(file)} for file in FILES]
    written = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls]
    return "\n".join(["<think>Two files.</think>\nI read both.", *written])


def write_tokenizer(folder: Path) -> None:
    """The demo model's tokenizer with the tokens of a model that reasons and calls tools."""
    demo = ROOT / "api/slipstream/demo/model"
    data = json.loads((demo / "tokenizer.json").read_text())
    first = max(data["model"]["vocab"].values()) + 1
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    names = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]
    data["added_tokens"] += [
        {"id": first + at, "content": name, "special": name.startswith("<|im"), **flags}
        for at, name in enumerate(names)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(data))
    config = json.loads((demo / "tokenizer_config.json").read_text())
    config |= {"eos_token": "<|im_end|>", "model_max_length": 1_000_000}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("strict")
    write_tokenizer(folder)
    shutil.copy(HERE / "strict_template.jinja", folder / "chat_template.jinja")
    lines = [{"text": "A title."}]
    lines += [{"text": played(name), "when": QUESTION.format(agent=name)} for name in AGENTS]
    lines += [{"text": f"<think>Both are here.</think>\n{ANSWER}", "when": FILES["two.txt"]}]
    lines += [{"text": ANSWER_AGAIN, "when": AGAIN}]
    answers = folder / "answers.jsonl"
    answers.write_text("\n".join(map(json.dumps, lines)))
    model = f"simulated:step_ms=1,max_model_len=200000,answers={answers},tokenizer={folder}"
    formats: Any = {"tool_format": "hermes", "reasoning_format": "qwen3"}
    with spareless_stack(model, http_port=0, served_model_name=MODEL, **formats) as running:
        yield running


class Session:
    """An agent with a home and a folder of work of its own."""

    def __init__(self, name: str, folder: Path, server: str) -> None:
        self.agent: Agent = AGENTS[name]
        self.home, self.work = folder / "home", folder / "work"
        self._name, self._server = name, server
        for path in (self.home, self.work):
            path.mkdir()
        for file, text in {**FILES, **self.agent.files}.items():
            is_of_work = file in FILES or file.startswith("work/")
            path = (self.work if is_of_work else self.home) / file.removeprefix("work/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace("{server}", server))

    def ask(self, arguments: tuple[str, ...]) -> str:
        """What the agent prints. Skips where it is not installed."""
        program = PACKAGES / self.agent.program
        if not program.exists():
            pytest.skip(
                "scripts/foreign-clients --set-up did not run, or npm has no such agent here"
            )
        own = {name: each.replace("{server}", self._server) for name, each in self._environment()}
        done = subprocess.run(
            [str(program), *[each.replace("{agent}", self._name) for each in arguments]],
            cwd=self.work,
            env={"PATH": os.environ["PATH"], "HOME": str(self.home), **OFFLINE, **own},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    def _environment(self) -> Iterator[tuple[str, str]]:
        yield from self.agent.environment.items()


def generations(recorded: list[Recorded]) -> list[Recorded]:
    """The requests for answers."""
    return [one for one in recorded if isinstance(one.body, dict)]


@pytest.mark.parametrize("name", AGENTS)
def test_an_agents_tool_loop(stack: Stack, name: str, tmp_path: Path) -> None:
    with recording(stack.http_address) as proxy:
        session = Session(name, tmp_path, proxy.address)
        assert ANSWER in session.ask(session.agent.ask)
        num_asked = len(proxy.recorded)
        if session.agent.go_on:
            assert ANSWER_AGAIN in session.ask(session.agent.go_on)
    asked, again = proxy.recorded[:num_asked], proxy.recorded[num_asked:]
    wrong = [one for one in proxy.recorded if one.status != 200 and one.body is not None]
    assert not wrong, [(one.path, one.answer) for one in wrong]
    named = {one.headers.get(IGNORED, "") for one in generations(proxy.recorded)} - {""}
    assert {each for names in named for each in names.split(", ")} == session.agent.ignored
    sent = [json.dumps(one.body, ensure_ascii=False) for one in generations(asked)]
    question = QUESTION.format(agent=name)
    with_results = [each for each in sent if all(text in each for text in FILES.values())]
    assert any(question in each for each in with_results)
    going_on = [json.dumps(one.body, ensure_ascii=False) for one in generations(again)]
    assert not session.agent.go_on or any(
        question in each and ANSWER in each and AGAIN in each for each in going_on
    )
    own = [question, AGAIN, ANSWER, ANSWER_AGAIN, *FILES, *FILES.values()]
    requests = [Request(one.path.partition("?")[0], one.body) for one in proxy.recorded if one.body]
    lines = as_lines(requests, own)
    assert not re.search(re.escape(str(tmp_path)) + "|" + re.escape(str(Path.home())), lines)
    if IS_RECORDED:
        (RECORDINGS / f"{name}.jsonl").write_text(lines)
    kept = {json.dumps([each.path, shape_of(each.body)]) for each in recorded_requests(name)}
    found = [Request(**json.loads(line)) for line in lines.splitlines()]
    news = {json.dumps([each.path, shape_of(each.body)]) for each in found} - kept
    assert not news, "record them anew"


def test_the_documented_versions_are_the_tested_ones() -> None:
    page = (ROOT / "docs/tools.md").read_text()
    section = page.partition("\n## Coding agents\n")[2].partition("\n## ")[0]
    written = dict(re.findall(r"^\| `([^`]+)` \| ([\d.]+) \|", section, re.MULTILINE))
    environment = json.loads((HERE / "environments/agents/package.json").read_text())
    assert written == environment["dependencies"]
    assert written.keys() == {agent.package for agent in AGENTS.values()}
