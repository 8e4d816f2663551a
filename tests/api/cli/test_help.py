"""What `--help` shows of every command of this package."""

from __future__ import annotations

import re
import shlex

import pytest

from slipstream.cli.main import _COMMANDS, main
from slipstream.cli.options.parser import Parser
from slipstream.stack.settings import GROUPS, StackSettings, group_of, metavar_of

OF_RAY = [["ray", name] for name in ("up", "status", "scale", "down")]
COMMANDS = [*([name] for name in _COMMANDS), ["demo", "kill"], *OF_RAY, []]
NOT_ENGLISH = re.compile(r"\b(who|whoever|nobody|somebody|told|of our own)\b")


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main([*words, "--help"])
    assert caught.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_is_plain_and_fits(capsys, monkeypatch, words):
    monkeypatch.setenv("COLUMNS", "80")
    text = shown(capsys, *words)
    assert text.startswith("usage: " + " ".join(["slipstream", *words]))
    assert all(len(line) <= 80 for line in text.splitlines() if not line.startswith("  slipstre"))
    assert not NOT_ENGLISH.search(text)
    assert not re.search(r"--(?!\w+-penalty)[a-z-]+ X\b", text)


def examples_in(text: str) -> list[str]:
    block = text.partition("\nexamples:\n")[2].partition("\n\n")[0]
    return [line.strip() for line in block.splitlines()]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_examples_come_first_and_are_commands_that_are_parsed(capsys, monkeypatch, words):
    text = shown(capsys, *words)
    if words in (["demo"], ["ray"]):
        return
    examples = examples_in(text)
    assert 1 <= len(examples) <= 3
    assert text.index("examples:") < text.index("options:")
    for example in examples:
        command = example.split("   ")[0].partition("<")[0]
        name, *arguments = shlex.split(command)[1:]
        if "--config" in arguments:
            continue  # needs the file
        parser = Parser(prog=f"slipstream {name}", target=_COMMANDS[name].target)
        assert parser.parse_args(arguments).prog.startswith(f"slipstream {name}")


@pytest.mark.parametrize(
    ("words", "most_lines"),
    [(["generate"], 75), (["chat"], 70), (["run-batch"], 45), (["trace"], 25), (["keys"], 20)],
    ids=lambda each: each[0] if isinstance(each, list) else None,
)
def test_help_of_what_is_no_server_is_short(capsys, monkeypatch, words, most_lines):
    monkeypatch.setenv("COLUMNS", "80")
    text = shown(capsys, *words)
    assert len(text.splitlines()) <= most_lines
    assert "--max-num-batched-tokens" not in text


def test_serve_shows_every_setting_in_its_group_with_its_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    text = shown(capsys, "serve")
    titles = [line[:-1] for line in text.splitlines() if re.fullmatch(r"[A-Za-z].*:", line)]
    assert titles == ["examples", "arguments", "options", *GROUPS]
    for title in GROUPS:
        section = " ".join(text.partition(f"\n{title}:\n")[2].partition("\n\n")[0].split())
        for name in StackSettings.__struct_fields__:
            option = f"--{name.replace('_', '-')}"
            is_here = re.search(rf"(^|[ ,]){option} ", section) is not None
            assert is_here == (group_of(name) == title) or name == "insecure"
    plain = " ".join(text.split())
    assert "--port PORT, --http-port PORT" in plain
    assert "requests that run at the same time (default: 256; 1024 on a large GPU)" in plain
    assert "(1 to 256; default: 16)" in plain
    assert "(default: 127.0.0.1 ::1; may be given several times)" in plain
    assert "--dtype {auto,bfloat16,float16,float32}" in plain


def test_placeholders_say_what_is_meant():
    expected = {"max_num_seqs": "N", "http_port": "PORT", "grace_s": "SECONDS", "keys": "DIR"}
    expected |= {"native": "{true,false}", "kv_cache_gib": "GIB", "device": "{auto,cpu,cuda}"}
    assert {name: metavar_of(name) for name in expected} == expected
