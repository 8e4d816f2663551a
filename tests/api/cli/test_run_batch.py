"""`slipstream run-batch` with real stacks, and killed for real."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.patience import PATIENCE_S, Patience
from tests.helpers.processes import started
from tests.helpers.stacks import spareless_stack

from slipstream import Client, Stack
from slipstream.cli.main import main
from slipstream.client.endpoints import KEYS_VARIABLE


@pytest.fixture(scope="module")
def stack():
    with spareless_stack("simulated:step_ms=1,mode=chain") as running:
        yield running


def request(number: int, **body: Any) -> dict[str, Any]:
    url = "/v1/completions"
    body = {"prompt": f"request {number}", "temperature": 0, "max_tokens": 30, **body}
    return {"custom_id": f"number {number}", "method": "POST", "url": url, "body": body}


def lines_with(body: str) -> str:
    """A line of JSON, and one with this body."""
    second = {**request(2), "body": 0}
    return f"{json.dumps(request(1))}\n{json.dumps(second).replace('0', body)}\n"


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def answers(path: Path) -> dict[str, Any]:
    """By custom id; each is there once."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {line["custom_id"]: line["response"] for line in lines}
    assert len(found) == len(lines)
    assert all(line["error"] is None for line in lines)
    return found


def run(stack: Stack, *paths: Path) -> int:
    return main(["run-batch", *map(str, paths), "--address", stack.address])


def text_of(answer: dict[str, Any]) -> str:
    assert answer["status_code"] == 200
    text: str = answer["body"]["choices"][0]["text"]
    return text


def test_every_request_has_its_answer(stack, tmp_path, capsys):
    turns = [{"role": "user", "content": "What is a list?"}]
    chat = {
        "custom_id": "chat",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": turns, "temperature": 0, "max_tokens": 5},
    }
    given = written(
        tmp_path / "in",
        *(request(number) for number in range(20)),
        request(20, temperature=-1),
        request(21, stream=True),
        {**request(22), "url": "/v1/models"},
        chat,
    )
    with given.open("ab") as file:  # not UTF-8
        file.write(json.dumps(request(23, stream="?")).encode().replace(b"?", b"\xff") + b"\n")
    for _ in range(2):  # the second run finds all answers there
        assert run(stack, given, tmp_path / "out") == 3
        assert f": 4 of 25 failed: see {tmp_path}/out\n" in capsys.readouterr().err
    found = answers(tmp_path / "out")
    with Client(stack.address) as client:
        prompts = [f"request {number}" for number in range(20)]
        wholes = client.generate_many(prompts, temperature=0, max_tokens=30)
        said = client.generate(turns, temperature=0, max_tokens=5).text
    for number, whole in enumerate(wholes):
        assert text_of(found[f"number {number}"]) == whole.text
    assert found["chat"]["body"]["choices"][0]["message"]["content"] == said
    for number, param in ((20, "temperature"), (21, "stream"), (22, "url"), (23, "stream")):
        refused = found[f"number {number}"]
        assert (refused["status_code"], refused["body"]["error"]["param"]) == (400, param)


@pytest.mark.process
def test_a_run_that_was_killed_is_gone_on_with(stack, tmp_path):
    """No request is done twice, none is forgotten, and half a line is no answer."""
    num = 400
    given = written(tmp_path / "in", *(request(number) for number in range(num)))
    output = tmp_path / "out"
    command = [sys.executable, "-m", "slipstream.cli.main", "run-batch", given, output]
    command += ["--address", stack.address, "--concurrency", "8"]
    patience = Patience()
    with started(command, stderr=subprocess.DEVNULL) as process:
        while not (output.exists() and output.read_bytes().count(b"\n") >= 40):
            patience.check("it answers nothing")
            assert process.poll() is None
    before = output.read_bytes()
    assert before.count(b"\n") < num
    with output.open("ab") as file:
        file.write(b'{"id": "half a li')
    assert run(stack, given, output) == 0
    assert output.read_bytes().startswith(before[: before.rindex(b"\n") + 1])
    found = answers(output)
    assert set(found) == {f"number {number}" for number in range(num)}
    with Client(stack.address) as client:
        prompts = [f"request {number}" for number in range(num)]
        wholes = client.generate_many(prompts, temperature=0, max_tokens=30)
    assert [text_of(found[f"number {n}"]) for n in range(num)] == [one.text for one in wholes]
    again = output.read_bytes()
    assert run(stack, given, output) == 0
    assert output.read_bytes() == again


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ('{"custom_id": "a"}\n', "line 1: method: missing, allowed: POST"),
        ('{"custom_id": 5, }\n', "line 1: custom_id: got an integer, allowed: a string"),
        ("no JSON\n", "line 1: got 'no JSON', allowed: JSON with custom_id, method (POST), url"),
        (2 * (json.dumps(request(1)) + "\n"), "line 2"),
        (json.dumps({**request(1), "body": 7}) + "\n", "line 1: body: got '7', allowed: an object"),
        # bytes that are no UTF-8, and lists nested too deeply
        ('{"custom_id": "\udcff"}\n', 'line 1: got \'{"custom_id": "\ufffd"}\', allowed: JSON'),
        (lines_with('"\udcff"'), "line 2: body: got '\"\ufffd\"', allowed: an object"),
        (lines_with(9999 * "[" + 9999 * "]"), "line 2: got '{"),
    ],
)
def test_a_file_that_is_wrong_is_refused_before_anything_is_done(
    stack, tmp_path, capsys, lines, complaint
):
    (tmp_path / "in").write_bytes(lines.encode(errors="surrogateescape"))
    assert run(stack, tmp_path / "in", tmp_path / "out") == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_files_that_cannot_be_used_are_refused_before_anything_is_done(tmp_path, capsys):
    """Without a stack, which would have to be started."""
    given = written(tmp_path / "in", request(1))
    before = given.read_bytes()
    os.mkfifo(tmp_path / "pipe")
    for names, said in (
        (("nowhere", "out"), "IN: got '{}/nowhere', allowed: a file to read (No such file"),
        ((".", "out"), "IN: got '{}', allowed: a regular file"),
        (("pipe", "out"), "IN: got '{}/pipe', allowed: a regular file"),
        (("in", "no/out"), "OUT: got '{}/no/out', allowed: a file to write, in a folder that"),
        (("in", "."), "OUT: got '{}', allowed: a file to write"),
        (("in", "in"), "OUT: got '{}/in', allowed: another file than IN"),
    ):
        paths = [str(tmp_path / name) for name in names]
        assert main(["run-batch", *paths, "--new-stack"]) == 2
        assert said.format(tmp_path) in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    assert given.read_bytes() == before


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--address", "ipc:///nowhere/client.sock"], 1, "no Slipstream server at ipc:///nowhere"),
        (["--address", "ipc:///a/client.sock,ipc:///b/client.sock"], 2, "allowed: one ipc://"),
        (["/nowhere/model"], 2, "MODEL: got '/nowhere/model'"),
        (["--new-stack", "--max-num-seqs", "0"], 2, "--max-num-seqs: got '0'"),
    ],
)
def test_without_a_server_no_output_is_made(tmp_path, capsys, options, code, said):
    given = written(tmp_path / "in", request(1))
    assert main(["run-batch", str(given), str(tmp_path / "out"), *options]) == code
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").touch()  # another one's is left
    assert main(["run-batch", str(given), str(tmp_path / "out"), *options]) == code
    assert (tmp_path / "out").exists()


def test_a_full_disk_leaves_whole_lines_and_the_next_run_goes_on(stack, tmp_path):
    """A limit on the file's size stands for the disk: the kernel writes what still fits."""
    given = written(tmp_path / "in", *(request(number) for number in range(20)))
    output = tmp_path / "out"
    command = [sys.executable, "-m", "slipstream.cli.main", "run-batch", given, output]
    command += ["--address", stack.address, "--concurrency", "4"]
    limit = 3000  # a few answers, and a part of one
    done = subprocess.run(
        command,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 1
    assert "File too large" in done.stderr
    before = answers(output)
    assert 0 < len(before) < 20
    assert run(stack, given, output) == 0
    found = answers(output)
    assert len(found) == 20
    assert {name: found[name] for name in before} == before


def test_two_runs_do_not_write_to_one_file(stack, tmp_path, capsys):
    given = written(tmp_path / "in", request(0))
    output = tmp_path / "out"
    with output.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert run(stack, given, output) == 2
    assert "a file that no other run writes to" in capsys.readouterr().err
    assert run(stack, given, output) == 0
    assert len(answers(output)) == 1


def test_an_output_that_is_something_else_is_left_alone(stack, tmp_path, capsys):
    given = written(tmp_path / "in", request(1))
    (tmp_path / "out").write_text("my diary\n")
    assert run(stack, given, tmp_path / "out") == 2
    assert "line 1" in capsys.readouterr().err
    assert (tmp_path / "out").read_text() == "my diary\n"


@pytest.mark.parametrize("has_keys", [False, True])
def test_another_machines_stack_is_refused(tmp_path, capsys, monkeypatch, has_keys):
    monkeypatch.delenv(KEYS_VARIABLE, raising=False)
    if has_keys:
        assert main(["keys", str(tmp_path / "keys")]) == 0
        monkeypatch.setenv(KEYS_VARIABLE, str(tmp_path / "keys"))
    given = written(tmp_path / "in", request(1))
    command = ["run-batch", str(given), str(tmp_path / "out"), "--address", "tcp://127.0.0.1:1"]
    assert main(command) == 2
    assert ("ipc://" if has_keys else "keys") in capsys.readouterr().err
