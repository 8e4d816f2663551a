"""The command line, in this process where it can be, else as a user calls it."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading

import pytest
from tests.helpers.patience import PATIENCE_S
from tests.helpers.stacks import spareless_stack

from slipstream import Client
from slipstream.cli.main import main

COMMAND = [sys.executable, "-m", "slipstream"]


@pytest.fixture(scope="module")
def address():
    with spareless_stack("simulated:step_ms=1,mode=chain") as stack:
        yield stack.address


@pytest.fixture
def texts(address):
    """What the server says to a prompt."""

    def text(prompt, **options):
        with Client(address) as client:
            return client.generate(prompt, temperature=0, **options).text

    return text


@pytest.fixture
def typed(monkeypatch):
    """Standard input holds this text."""
    return lambda text: monkeypatch.setattr("sys.stdin", io.StringIO(text))


def wait_for(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        return process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()


# ---- generate ------------------------------------------------------------------------------


@pytest.mark.process
def test_generate_writes_the_text_and_nothing_else(address, texts, capsys):
    options = ["--prompt", "Once", "--max-tokens", "20", "--temperature", "0"]
    assert main(["generate", "--address", address, *options]) == 0
    assert capsys.readouterr() == (texts("Once", max_tokens=20), "")


@pytest.mark.process
def test_generate_reads_its_prompt_from_standard_input(address, texts, capsys, typed):
    typed("Once\nupon")
    assert main(["generate", "--address", address, "--prompt", "-", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == texts("Once\nupon", max_tokens=256)


@pytest.mark.process
def test_generate_samples_as_it_is_told(address, capsys):
    def text(*options: str) -> str:
        common = ["--address", address, "--prompt", "Once", "--max-tokens", "12"]
        assert main(["generate", *common, *options]) == 0
        return capsys.readouterr().out

    seeded = text("--seed", "7", "--top-k", "50", "--top-p", "0.9", "--min-p", "0.01")
    assert seeded == text("--seed", "7", "--top-k", "50", "--top-p", ".9", "--min-p", "1e-2")
    greedy = text("--temperature", "0")
    stop = greedy[4:7]
    stopped = text("--temperature", "0", "--stop", "not there", "--stop", stop)
    assert stopped == greedy[: greedy.index(stop)]


@pytest.mark.process
def test_generate_writes_json_lines_with_logprobs(address, texts, capsys):
    options = ["--prompt", "Once", "--max-tokens", "5", "--temperature", "0", "--logprobs", "2"]
    assert main(["generate", "--address", address, "--json", *options]) == 0
    deltas = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert "".join(delta["text"] for delta in deltas) == texts("Once", max_tokens=5)
    assert deltas[-1]["finish_reason"] == "length"
    ids = [token_id for delta in deltas for token_id in delta["token_ids"]]
    logprobs = [token for delta in deltas for token in delta["logprobs"]]
    assert [token[0]["token_id"] for token in logprobs] == ids


@pytest.mark.process
def test_generate_writes_the_prompts_logprobs_first(address, capsys):
    options = ["--prompt", "Once upon", "--max-tokens", "3", "--prompt-logprobs", "1"]
    options += ["--cache-salt", "mine", "--presence-penalty", "-0.5"]
    assert main(["generate", "--address", address, "--json", *options]) == 0
    first, *deltas = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert first["prompt_logprobs"][0] is None
    assert all(len(token) in (1, 2) for token in first["prompt_logprobs"][1:])
    assert sum(len(delta["token_ids"]) for delta in deltas) == 3


@pytest.mark.process
def test_generate_says_why_nothing_was_written(address, texts, capsys):
    stop = texts("Once", max_tokens=1)
    options = ["--address", address, "--temperature", "0", "--max-tokens", "1"]
    assert main(["generate", "Once", *options, "--stop", stop]) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == (
        f"slipstream generate: the answer is empty: it begins with {stop!r}, where --stop ends it\n"
    )
    assert main(["generate", "Once", *options, "--stop", stop, "--json"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.process
def test_generate_ends_when_nobody_reads_on(address):
    process = subprocess.Popen(
        [*COMMAND, "generate", "--address", address, "--prompt", "x", "--max-tokens", "3000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(PATIENCE_S) == 1
    process.stderr.close()


@pytest.mark.process
def test_ctrl_c_ends_generate_in_one_line(address):
    process = subprocess.Popen(
        [*COMMAND, "generate", "--address", address, "--prompt", "x", "--max-tokens", "3000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = wait_for(process)
    assert (process.returncode, err) == (1, "slipstream generate: interrupted\n")


# ---- how commands fail ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["serv"],
            "slipstream: unknown command 'serv'; did you mean serve? (see slipstream --help",
        ),
        (["serve", "--prot", "1"], "slipstream serve: unknown option --prot; did you mean --port?"),
        (["gpt"], "slipstream: unknown command 'gpt'; there are serve, chat, generate, "),
        (["demo", "kil"], "slipstream demo: unknown demo 'kil'; did you mean kill?"),
        (["bench", "thruput"], "slipstream bench: unknown benchmark 'thruput'; did you mean thr"),
        (["keys"], "slipstream keys: DIR is missing (see slipstream keys --help)"),
        (
            ["run-batch"],
            "slipstream run-batch: IN, OUT are missing (see slipstream run-batch --help)",
        ),
        (
            ["generate", "x", "--temprature", "0"],
            "slipstream generate: unknown option --temprature; did you mean --temperature? (see ",
        ),
        (
            ["serve", "--max-num-seq", "3"],
            "slipstream serve: unknown option --max-num-seq; did you mean --max-num-seqs? ",
        ),
        (["serve", "--max_num_seq=3"], "slipstream serve: unknown option --max-num-seq; did you"),
        (["serve", "--qqqqqqqqqqqq"], "slipstream serve: unknown option --qqqqqqqqqqqq (see "),
        (
            ["serve", "--pipeline-parallel-size=2"],
            "slipstream serve: --pipeline-parallel-size: got '2', allowed: 1: of several devices ",
        ),
        (
            ["serve", "--tensor-split", "1"],
            "slipstream serve: unknown option --tensor-split: of several devices only --tensor-par",
        ),
        (["serve", "--insecur"], "slipstream serve: unknown option --insecur (see "),
        (["serve", "--trust-remote-cod"], "slipstream serve: unknown option --trust-remote-cod ("),
        (["serve", "--nonsense", "4"], "slipstream serve: unknown option --nonsense (see "),
        (["serve", "gpt2", "gpt3"], "slipstream serve: unexpected argument 'gpt3'"),
        (["serve", "gpt2", "--model", "gpt3"], "slipstream serve: two models are given, 'gpt2' "),
        (["bench", "throughput", "--num-request", "1"], "slipstream bench throughput: unknown opt"),
    ],
)
def test_usage_errors_are_one_line_and_code_2(arguments, said, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    shown = capsys.readouterr()
    assert (caught.value.code, shown.out) == (2, "")
    assert shown.err.startswith(said)
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "--prompt", "x", "--top-p", "3"], "generate: --top-p: got 3.0, allowed: "),
        (
            ["generate", "--prompt", "x", "--seed", "a"],
            "generate: --seed: got 'a', allowed: an integer",
        ),
        (
            ["generate", "--prompt", "x", "--logprobs", "2"],
            "generate: --logprobs: got 2, allowed: ",
        ),
        (
            ["generate", "--prompt", "x", "--prompt-logprobs", "2"],
            "generate: --prompt-logprobs: got 2, allowed: ",
        ),
        (["generate", "./none", "--prompt", "x"], "generate: MODEL: got './none', allowed: "),
        (["serve", "./none"], "serve: MODEL: got './none', allowed: "),
        (["serve", "--model", "./none"], "serve: --model: got './none', allowed: "),
        (["serve", "--block-size", "0"], "serve: --block-size: got '0', allowed: an integer >= 1"),
        (["serve", "--http-port", "1", "--no-http"], "serve: --http-port: got 1, allowed: nothing"),
        (
            ["generate", "--api-key", "s", "--address", "ipc:///x", "--prompt", "x"],
            "generate: --api-key: got '(not shown)', allowed: nothing where --address is given",
        ),
        (["chat", "--address", "tcp://x"], "chat: --address: got 'tcp://x', allowed: "),
        (
            ["bench", "throughput", "--num-requests", "x"],
            "bench throughput: --num-requests: got 'x', allowed: an integer >= 1",
        ),
        (
            ["generate", "x", "--url", "y"],
            "generate: --url is --address here\nslipstream generate: --address: got 'y', allowed: ",
        ),
        (["generate"], "generate: TEXT is missing: give a text to continue, or - for standard inp"),
        (["generate", ""], "generate: TEXT is missing: the one given is empty"),
        (["chat", ""], "chat: QUESTION is missing: the one given is empty"),
        (["chat", "--quick", " "], "chat: QUESTION is missing: the one given is empty"),
        (["chat", "a", "b c", "-q", "d"], "chat: --quick: got 'd', allowed: one question; "),
        (["chat", "a", "b c", "--model", "d"], "chat: --model: got 'a', allowed: one model; "),
        (["serve", "random:qwen3-0.6b"], "serve: --tokenizer is missing: a model of random weig"),
        (
            ["serve", "--port", "x"],
            "serve: --port: got 'x', allowed: an integer >= 0 and <= 65535",
        ),
        (
            ["serve", "simulated:step=1"],
            "serve: MODEL: simulated:step=1: unknown option 'step'; known: step_ms, ",
        ),
        (
            ["serve", "--kv-cache-gib", "400000"],
            "serve: --kv-cache-gib: got 400000.0, allowed: less than this machine's memory, ",
        ),
        (["serve", "./docs"], "serve: MODEL: got './docs', allowed: a folder with a config.json, "),
        (
            ["generate", "x", "--address", "http://127.0.0.1:8000"],
            "generate: --address: got 'http://127.0.0.1:8000', allowed: ipc:///PATH or tcp://HOST:P",
        ),
        (["serve", "--native=x"], "serve: --native: got 'x', allowed: true or false\n"),
        (
            ["generate", "x", "--max-tokens", "x"],
            "generate: --max-tokens: got 'x', allowed: an int",
        ),
        (
            ["serve", "--max_num_seqs", "0"],
            "serve: --max-num-seqs: got '0', allowed: an integer >= 1",
        ),
        (["serve", "--port", "1", "--no-http"], "serve: --port: got 1, allowed: nothing"),
        (
            ["bench", "throughput", "--input-len", "0"],
            "bench throughput: --input-len: got 0, allowed: ",
        ),
    ],
)
def test_values_that_cannot_be_are_one_line_and_code_2(arguments, said, capsys):
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"slipstream {said}")
    assert shown.err.count("\n") == 1 + said.count(" here\n")


@pytest.mark.parametrize(
    ("arguments", "listed"),
    [([], ["serve", "chat", "bench"]), (["demo"], ["kill"]), (["bench"], ["serve", "overlap"])],
)
def test_without_a_command_there_is_a_list(arguments, listed, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    shown = capsys.readouterr()
    assert (caught.value.code, shown.out) == (2, "")
    assert all(f"\n    {name} " in shown.err for name in listed)


def test_a_file_that_is_not_there_is_named(capsys):
    assert main(["trace", "/no/such/file"]) == 1
    said = "slipstream trace: /no/such/file: No such file or directory\n"
    assert capsys.readouterr() == ("", said)


@pytest.mark.process
def test_what_the_server_refuses_is_one_line_and_code_2(address, capsys):
    options = ["--address", address, "--prompt", "x", "--max-tokens", "1000000"]
    assert main(["generate", *options]) == 2
    assert capsys.readouterr().err.startswith("slipstream generate: --max-tokens: got 1000000")


@pytest.mark.process
def test_a_stack_that_fails_is_one_line_and_code_1(tmp_path):
    process = subprocess.Popen(
        [*COMMAND, "generate", "simulated:vocab_size=5", "--prompt", "x"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    out, err = wait_for(process)
    assert (process.returncode, out) == (1, "")
    started, error = err.splitlines()
    assert started == "no server runs: starting one with simulated:vocab_size=5 ..."
    assert error.startswith("slipstream generate: core: option 'vocab_size' is 5, but ")


@pytest.mark.process
def test_a_server_that_is_misconfigured_is_one_line_and_code_2(tmp_path):
    process = subprocess.Popen(
        [*COMMAND, "serve", "simulated:vocab_size=5", "--no-http"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    out, err = wait_for(process)
    assert (process.returncode, out) == (2, "starting simulated:vocab_size=5 ...\n")
    assert err.startswith("slipstream serve: core: option 'vocab_size' is 5, but ")
    assert err.count("\n") == 1


def test_a_fault_of_our_own_is_told_as_such(monkeypatch, capsys):
    monkeypatch.setattr("slipstream.cli.generate.connected", None)
    assert main(["generate", "--prompt", "x"]) == 1
    assert "TypeError" in (err := capsys.readouterr().err)
    assert "SLIPSTREAM_LOG_LEVEL=debug shows where" in err
    monkeypatch.setenv("SLIPSTREAM_LOG_LEVEL", "debug")
    with pytest.raises(TypeError):
        main(["generate", "--prompt", "x"])


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("slipstream 0.")


# ---- chat ----------------------------------------------------------------------------------


@pytest.mark.process
def test_chat_answers_line_by_line_and_remembers(address, texts, capsys, typed):
    typed("What is a list?\n\nAnd a dict?\n")
    options = ["--max-tokens", "9", "--temperature", "0", "--system", "Be brief."]
    assert main(["chat", "--address", address, *options]) == 0
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is a list?"},
    ]
    first = texts(turns, max_tokens=9)
    turns += [
        {"role": "assistant", "content": first},
        {"role": "user", "content": "And a dict?"},
    ]
    second = texts(turns, max_tokens=9)
    assert capsys.readouterr() == (f"{first}\n\n{second}\n", "")


@pytest.mark.process
def test_chat_forgets_its_oldest_turns_when_the_model_is_full(capsys, address, texts, typed):
    long = "word " * 3000  # as many tokens: the model holds one such turn, and not two
    typed(f"{long}\n{long}\nshort\n")
    options = ["--max-tokens", "4", "--temperature", "0"]
    assert main(["chat", "--address", address, *options]) == 0
    shown = capsys.readouterr()
    assert shown.err.count("its oldest turn is forgotten") >= 1
    assert shown.out.endswith("\n")


@pytest.mark.process
def test_chat_goes_on_after_a_line_that_cannot_be_answered(address, texts, capsys, typed):
    typed("word " * 6000 + "\nshort\n")
    options = ["--max-tokens", "4", "--temperature", "0"]
    assert main(["chat", "--address", address, *options]) == 0
    shown = capsys.readouterr()
    assert shown.err.startswith("slipstream chat: prompt: got ")
    assert shown.out == texts([{"role": "user", "content": "short"}], max_tokens=4) + "\n"


@pytest.mark.process
def test_ctrl_c_ends_an_answer_but_not_the_chat(address):
    process = subprocess.Popen(
        [*COMMAND, "chat", "--address", address, "--ignore-eos"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdin.write("tell me everything\n")
    process.stdin.flush()
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    process.stdin.close()
    with process:
        assert process.stdout.read().endswith("\n")
        assert process.stderr.read() == ""
        assert process.wait(PATIENCE_S) == 0


# ---- bench ---------------------------------------------------------------------------------


@pytest.mark.process
def test_bench_tells_a_table_and_writes_rows(address, tmp_path, capsys):
    rows = tmp_path / "rows.json"
    load = ["--num-requests", "6", "--input-len", "9", "--output-len", "5", "--concurrency", "3"]
    assert main(["bench", "throughput", "--address", address, *load, "--json", str(rows)]) == 0
    shown = capsys.readouterr().out
    assert "The model is simulated" in shown
    assert "6 requests, 3 at a time, 9 + 5 tokens" in shown
    (row,) = json.loads(rows.read_text())
    assert row["is_simulated"] is True
    assert row["output_tokens"] == 30
    assert row["output_tokens_per_s"] > 0
    assert row["ttft_p99_ms"] >= row["ttft_median_ms"] > 0
    assert row["tpot_mean_ms"] > 0
    assert not any(isinstance(value, dict | list) for value in row.values())


@pytest.mark.process
def test_bench_refuses_a_load_that_the_model_cannot_hold(address, capsys):
    load = ["--input-len", "4000", "--output-len", "4000"]
    assert main(["bench", "throughput", "--address", address, *load]) == 2
    assert "--input-len + --output-len: got 8000" in capsys.readouterr().err


# ---- serve ---------------------------------------------------------------------------------


@pytest.mark.process
def test_serve_says_what_is_ready_and_how_to_use_it_and_ends_on_ctrl_c(tmp_path):
    folder = tmp_path / "run"
    serve = [*COMMAND, "serve", "simulated:step_ms=1", "--runtime-dir", str(folder)]
    serve += ["--http-port", "0", "--api-key", "a-secret"]
    process = subprocess.Popen(
        serve, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = threading.Timer(PATIENCE_S, process.kill)
    deadline.start()
    try:
        assert process.stdout.readline() == "starting simulated:step_ms=1 ...\n"
        lines = [process.stdout.readline() for _ in range(8)]
        assert lines.pop(3) == "\n"
        ready = {line.split(" (process ")[0]: line for line in lines[:3]}
        assert set(ready) == {"core ready", "worker ready", "http ready"}
        http_address = ready["http ready"].split("serving on ")[1].strip()
        assert http_address.startswith("http://127.0.0.1:")
        address = f"ipc://{folder}/client.sock"
        assert lines[3].startswith(f"serving at {address}")
        assert lines[4] == f"open {http_address} in a browser, or try:\n"
        assert address in lines[5]
        curl = f"curl -N {http_address}/v1/chat/completions"
        assert lines[6].strip().startswith(curl)
        example = lines[6].strip().replace("YOUR_KEY", "a-secret")
        streamed = subprocess.run(example, shell=True, capture_output=True, text=True, check=True)
        assert streamed.stdout.endswith("data: [DONE]\n\n")
        with Client(address) as client:
            assert client.generate("x", max_tokens=3).num_tokens == 3

        second = subprocess.run(serve, capture_output=True, text=True, timeout=PATIENCE_S)
        assert (second.returncode, second.stdout) == (1, "")
        assert second.stderr.startswith(f"slipstream serve: runtime directory {folder} is in use")
        assert "another --runtime-dir (and --http-port)" in second.stderr
        assert second.stderr.count("\n") == 1

        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        out, err = wait_for(process)
        assert process.returncode == 0
        assert out == "stopping\n"
        assert "Traceback" not in err
        assert "a-secret" not in err + "".join(lines)
        assert "supervisor INFO draining (SIGINT)" in err
        assert not folder.exists()
    finally:
        deadline.cancel()
        process.kill()
