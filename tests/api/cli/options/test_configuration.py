"""Options from files and from the environment, and what is said about those that cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from slipstream.cli.generate import add_generate
from slipstream.cli.main import main
from slipstream.cli.options import configuration
from slipstream.cli.options.parser import Parser
from slipstream.cli.options.sampling_options import sampling_params_of
from slipstream.cli.options.stack_options import given_settings
from slipstream.cli.run_batch import add_run_batch
from slipstream.cli.serving.serve import add_serve
from slipstream.stack.settings import StackSettings


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    """Variables of the machine that runs the tests do not count."""
    monkeypatch.setattr("os.environ", {"PATH": "/usr/bin:/bin"})


@pytest.fixture
def written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a long path is shortened in errors

    def write(text: str) -> str:
        (tmp_path / "server.yaml").write_text(text)
        (tmp_path / "server.yaml").chmod(0o600)
        return "server.yaml"

    return write


def serve_parser() -> Parser:
    parser = Parser(prog="slipstream serve")
    add_serve(parser)
    return parser


def settings(*words: str) -> dict[str, Any]:
    return given_settings(serve_parser().parse_args(words))


# ---- files ---------------------------------------------------------------------------------


def test_a_file_holds_options_by_their_long_names(written):
    file = written(
        "# a comment\n"
        "model: simulated:step_ms=1\n"
        "max-num-seqs: 64\n"
        "gpu_memory_utilization: 0.5\n"
        "port: 8001\n"
        "access-log: off\n"  # a word here, although YAML has it as False
        "enable-prefix-caching: no\n"
        "insecure: true\n"
        "tokenizer: null\n"
        "cuda-graph-sizes: [1, 8]\n"
        "api-key: 0123\n"  # as it is written
    )
    assert settings("--config", file) == {
        "model": "simulated:step_ms=1",
        "max_num_seqs": 64,
        "gpu_memory_utilization": 0.5,
        "http_port": 8001,
        "access_log": "off",
        "enable_prefix_caching": False,
        "insecure": True,
        "cuda_graph_sizes": (1, 8),
        "api_key": ("0123",),
    }


def test_a_file_may_be_json_or_empty(written):
    assert settings("--config", written('{"max-num-seqs": 7}')) == {"max_num_seqs": 7}
    assert settings("--config", written("")) == {}


def test_the_command_line_comes_first_then_variables_then_the_file(written, monkeypatch):
    file = written("max-num-seqs: 1\nblock-size: 2\nthreads: 3\nmodel: a\napi-key: [x, y]\n")
    monkeypatch.setenv("SLIPSTREAM_MAX_NUM_SEQS", "10")
    monkeypatch.setenv("SLIPSTREAM_BLOCK_SIZE", "20")
    monkeypatch.setenv("SLIPSTREAM_THREADS", "")  # as if it were not set
    words = ["b", "--max-num-seqs", "100", "--api-key", "z", f"--config={file}"]
    assert settings(*words) == {
        "model": "b",
        "max_num_seqs": 100,
        "block_size": 20,
        "threads": 3,
        "api_key": ("z",),
    }


def test_every_option_of_serve_can_stand_in_a_file_and_in_a_variable(written, monkeypatch):
    values = {"true": True, "N": 7, "GIB": 0.5, "MIB": 0.5, "SECONDS": 2.5, "FRACTION": 0.25}
    examples: dict[str, Any] = {}
    for action in serve_parser()._actions:
        name = action.dest
        if name not in StackSettings.__struct_fields__ or name in examples:
            continue
        metavar = str(action.metavar)
        examples[name] = values.get(metavar, True if action.nargs == 0 else f"a-{name}")
        if metavar.startswith("{"):
            examples[name] = metavar.strip("{}").split(",")[-1]
    examples |= {"http_port": 81, "enable_prefix_caching": False, "stream_interval": 3}
    examples |= dict.fromkeys(("native", "spare_worker", "spare_core"), False)
    examples["cuda_graph_sizes"] = 4
    examples["master_port"] = 29501
    examples["quantization"] = "q8_0"
    examples["metrics_prefix"] = "vllm"
    assert set(examples) == set(StackSettings.__struct_fields__)
    file = written("".join(f"{name}: {json.dumps(value)}\n" for name, value in examples.items()))
    expected = {
        name: (value,) if isinstance(getattr(StackSettings(), name), tuple) else value
        for name, value in examples.items()
    }
    assert settings("--config", file) == expected
    for name in configuration.SETTINGS:
        monkeypatch.setenv(f"SLIPSTREAM_{name.upper()}", str(examples[name]))
    expected = {name: value for name, value in expected.items() if name in configuration.SETTINGS}
    assert settings() == expected


def test_lists_in_variables_have_commas(monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_ALLOWED_HOSTS", "a.example,b.example")
    assert settings() == {"allowed_hosts": ("a.example", "b.example")}


def test_what_serve_alone_has(written, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_NO_HTTP", "1")
    monkeypatch.setenv("SLIPSTREAM_RUNTIME_DIR", "/somewhere")
    monkeypatch.setenv("SLIPSTREAM_CONFIG", written("max-num-seqs: 5"))
    arguments = serve_parser().parse_args([])
    assert (arguments.no_http, arguments.runtime_dir) == (True, "/somewhere")
    assert given_settings(arguments) == {"max_num_seqs": 5}


def test_other_commands_have_sampling_options_in_files_and_few_variables(written, monkeypatch):
    parser = Parser(prog="slipstream generate")
    add_generate(parser)
    monkeypatch.setenv("SLIPSTREAM_HTTP_PORT", "1")  # not for a server that one command starts
    monkeypatch.setenv("SLIPSTREAM_MODEL", "a")
    file = written("temperature: 0\nmax-tokens: 5\nstop: [x, y]\nnum-blocks: 9\n")
    arguments = parser.parse_args(["text", "--config", file, "--max-tokens", "6"])
    params = sampling_params_of(arguments)
    assert (params.temperature, params.max_tokens, params.stop) == (0.0, 6, ("x", "y"))
    assert given_settings(arguments) == {"model": "a", "num_blocks": 9}


def test_options_with_types_of_their_own_are_converted(written, capsys):
    parser = Parser(prog="slipstream run-batch")
    add_run_batch(parser)
    file = written("concurrency: 9")
    assert parser.parse_args(["in", "out", "--config", file]).concurrency == 9
    file = written("concurrency: many")
    with pytest.raises(SystemExit):
        parser.parse_args(["in", "out", "--config", file])
    assert "line 1: concurrency: got 'many', allowed: an integer" in capsys.readouterr().err


@hypothesis_settings(max_examples=40)  # a parser for each
@given(st.from_regex(r"[A-Za-z0-9._/:=-]{1,20}", fullmatch=True))
@example("--")
def test_a_value_means_what_it_means_on_the_command_line(tmp_path_factory, text):
    """YAML's own types have no say: `off`, `012`, `1e3`, `null`-like words, dates, sexagesimals."""
    file = tmp_path_factory.mktemp("config") / "server.yaml"
    file.write_text(f"served-model-name: '{text}'\n")
    assert settings("--config", str(file)) == settings(f"--served-model-name={text}")


# ---- what cannot be ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max-num-seqs: many", "{0}, line 1: max-num-seqs: got 'many', allowed: an integer >= 1"),
        (
            "# x\nblock_size: 257\n",
            "{0}, line 2: block_size: got '257', allowed: an integer >= 1 a",
        ),
        (
            "max_num_seq: 4",
            "{0}, line 1: key: got 'max_num_seq', allowed: an option of `slipstream ",
        ),
        ("max_num_seq: 4", "did you mean max-num-seqs? (see slipstream serve --help)"),
        ("config: other.yaml", "line 1: key: got 'config', allowed: an option"),
        ("help: true", "line 1: key: got 'help', allowed: an option"),
        (
            "port: 1\nhttp_port: 2",
            "{0}, line 2: got 'http_port', allowed: one value for an option;",
        ),
        (
            "port: 1\nport: 1",
            "{0}, line 2: got 'port', allowed: one value for an option; {0}, line",
        ),
        (
            "port: {a: 1}",
            "{0}, line 1: port: got 'more keys', allowed: a value, or a list of values",
        ),
        ("max_num_seqs: lots", "serve: {0}, line 1: max_num_seqs: got 'lots', allowed: an integer"),
        ("port: abc", "{0}, line 1: port: got 'abc', allowed: an integer >= 0 and <= 65535"),
        (
            "http_port: abc",
            "{0}, line 1: http_port: got 'abc', allowed: an integer >= 0 and <= 65535",
        ),
        ("port: [1, 2]", "{0}, line 1: port: got ['1', '2'], allowed: a single value"),
        ("no-http: maybe", "{0}, line 1: no-http: got 'maybe', allowed: true or false"),
        ("native: maybe", "{0}, line 1: native: got 'maybe', allowed: true or false"),
        (
            "- max-num-seqs",
            "{0}, line 1: got '- a list', allowed: an option, a colon and a value, ",
        ),
        ("# x\nport 8001", "{0}, line 2: got 'port 8001', allowed: an option, a colon and a value"),
        ("a: [", "--config: got '{0}', allowed: a file in YAML ("),
    ],
)
def test_an_error_names_file_line_key_and_range(written, capsys, text, said):
    file = written(text)
    try:
        code: Any = main(["serve", "--config", file])
    except SystemExit as caught:
        code = caught.code
    shown = capsys.readouterr()
    assert (code, shown.out) == (2, "")
    assert shown.err.startswith("slipstream serve: ")
    assert said.format(file) in shown.err
    assert shown.err.count("\n") == 1


def test_a_file_that_is_not_there(capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(["serve", "--config", str(tmp_path / "none.yaml")])
    assert "No such file or directory" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["serve", "--config"])
    assert "--config: expected one argument" in capsys.readouterr().err


def test_an_error_names_the_variable(monkeypatch, capsys):
    monkeypatch.setenv("SLIPSTREAM_BLOCK_SIZE", "257")
    assert main(["serve"]) == 2
    said = "slipstream serve: $SLIPSTREAM_BLOCK_SIZE: got '257', allowed: an integer"
    assert capsys.readouterr().err.startswith(said)
    assert main(["serve", "--block-size", "0"]) == 2  # this one is the command line's
    assert capsys.readouterr().err.startswith("slipstream serve: --block-size: got '0'")


def test_no_secret_of_a_file_is_shown(written, capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--config", written("api-key: hidden\napi_key: hidden\n")])
    assert main(["serve", "--config", written("api-key: 'hid den'\n")]) == 2
    shown = capsys.readouterr().err
    assert "api_key" in shown
    assert "hid" not in shown


@pytest.mark.parametrize(
    "line", ["api-key:", "api-key: ''", "api_key: []", "api-key-file:", "keys: ''", "ssl-keyfile:"]
)
def test_a_key_that_was_not_filled_in_is_refused(written, capsys, line):
    """Without it the server would be open."""
    with pytest.raises(SystemExit):
        main(["serve", "--config", written(f"port: 1\n{line}\n")])
    said = f"server.yaml, line 2: {line.partition(':')[0]}: got 'nothing', allowed: a value"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "variable", ["API_KEY", "API_KEY_FILE", "SSL_CERTFILE", "SSL_KEYFILE", "CONFIG"]
)
@pytest.mark.parametrize("command", ["serve", "route"])
def test_a_variable_of_access_that_is_empty_is_refused(monkeypatch, capsys, variable, command):
    monkeypatch.setenv(f"SLIPSTREAM_{variable}", "")
    words = [command, "tcp://127.0.0.1:1", "--insecure"][: 1 if command == "serve" else 3]
    try:
        code: Any = main(words)
    except SystemExit as caught:
        code = caught.code
    assert code == 2
    assert f"$SLIPSTREAM_{variable}: got ''" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--api-key", "--api-key-file", "--config"])
def test_an_empty_key_of_the_command_line_is_refused(capsys, option):
    try:
        code: Any = main(["serve", option, ""])
    except SystemExit as caught:
        code = caught.code
    assert code == 2
    assert f"{option}: got " in capsys.readouterr().err


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602])
def test_a_file_with_keys_that_others_can_read_is_refused(written, capsys, mode):
    file = written("api-key: secret\n")
    Path(file).chmod(mode)
    with pytest.raises(SystemExit):
        main(["serve", "--config", file])
    assert f"mode {mode:04o} of user " in capsys.readouterr().err
    file = written("port: 8001\n")
    Path(file).chmod(mode)
    assert settings("--config", file) == {"http_port": 8001}


def test_a_variable_of_former_releases_is_answered_with_the_reason(monkeypatch, capsys):
    monkeypatch.setenv("SLIPSTREAM_PURE_PYTHON", "1")
    assert settings() == {}
    assert capsys.readouterr().err == (
        "slipstream serve: warning: $SLIPSTREAM_PURE_PYTHON has no effect any more: what is in C "
        "has no other way in Python\n"
    )


def test_variables_that_are_no_options_are_named_once(monkeypatch, capsys):
    monkeypatch.setenv("SLIPSTREAM_MAX_NUM_SEQ", "4")
    monkeypatch.setenv("SLIPSTREAM_QQQ", "4")
    monkeypatch.setenv("SLIPSTREAM_LOG_LEVEL", "debug")
    monkeypatch.setenv("SLIPSTREAM_ADDRESS", "ipc:///x")
    assert settings() == {}
    assert capsys.readouterr().err == (
        "slipstream serve: warning: $SLIPSTREAM_MAX_NUM_SEQ (did you mean "
        "$SLIPSTREAM_MAX_NUM_SEQS?), $SLIPSTREAM_QQQ are no option\n"
    )


def test_keys_of_the_environment_are_used_where_a_server_listens(monkeypatch, capsys):
    monkeypatch.setenv("SLIPSTREAM_KEYS", "/no/such/folder")
    assert main(["serve", "--listen", "tcp://127.0.0.1:5555", "--no-http"]) == 2
    assert "slipstream serve: $SLIPSTREAM_KEYS: got '/no/such/folder'" in capsys.readouterr().err


def test_the_file_of_the_documentation_is_read(written):
    text = Path(__file__).parents[4].joinpath("docs/serving.md").read_text()
    block = text.partition("```yaml\n")[2].partition("```")[0]
    assert {"model", "max_num_seqs"} < settings("--config", written(block)).keys()
