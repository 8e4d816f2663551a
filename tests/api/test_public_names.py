"""What `slipstream` exports, and that asking for a client stays cheap."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

import slipstream
from slipstream_ipc.messages import Fault

PUBLIC = {
    "Classes",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "ClassifyOptions",
    "RankedDocument",
    "Scores",
    "ScoringOptions",
    "ScoringOutput",
    "ScoringRequestOutput",
    "LLM",
    "AsyncClient",
    "AsyncStream",
    "AsyncStreams",
    "BadRequestError",
    "CallOptions",
    "ChatMessage",
    "Client",
    "ClosedError",
    "Completion",
    "CompletionOutput",
    "ConflictError",
    "ConnectionLostError",
    "ContentDelta",
    "Delta",
    "EmbeddingOptions",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Embeddings",
    "EngineError",
    "LoRARequest",
    "Logprob",
    "ModelCard",
    "OverloadedError",
    "ReasoningDelta",
    "RepetitionDetection",
    "RequestError",
    "RequestMetrics",
    "RequestOptions",
    "RequestOutput",
    "SamplingParams",
    "SlipstreamError",
    "Stack",
    "StackError",
    "Stream",
    "StreamLostError",
    "Streams",
    "StructuredOutputs",
    "SupersededError",
    "TextPrompt",
    "TokensPrompt",
    "ToolCall",
    "ToolCallArguments",
    "ToolCallDelta",
    "ToolCallEnd",
    "ToolCallStart",
    "UnknownStreamError",
}


def test_all_is_what_we_promise() -> None:
    assert set(slipstream.__all__) == PUBLIC
    assert len(slipstream.__all__) == len(PUBLIC)
    assert set(dir(slipstream)) >= PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_is_there_and_documented(name: str) -> None:
    assert getattr(slipstream, name).__doc__


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        slipstream.Nothing  # noqa: B018


HEAVY = {"torch", "transformers", "tokenizers", "jinja2", "tqdm", "llguidance", "matplotlib"}
ALL_THAT_COSTS = HEAVY | {"numpy", "zmq", "msgspec", "asyncio", "uvloop", "slipstream_ipc"}


def loaded(program: str) -> set[str]:
    """The modules that a fresh interpreter has loaded when it is through with the program."""
    program += "\nimport sys; print('\\n' + ' '.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


def called(*arguments: str) -> str:
    """A program that runs the command line and outlives its end."""
    return (
        "from contextlib import suppress\nfrom slipstream.cli.main import main\n"
        f"with suppress(SystemExit): main({list(arguments)})"
    )


def test_import_loads_nothing_but_itself() -> None:
    modules = loaded("import slipstream")
    assert {name for name in modules if name.startswith("slipstream")} == {"slipstream"}
    assert not modules & ALL_THAT_COSTS


def test_a_client_needs_no_server() -> None:
    modules = loaded("from slipstream import AsyncClient, Client, Delta, SamplingParams")
    assert "slipstream.client.client" in modules
    assert not modules & (
        HEAVY | {"slipstream.stack.stack", "slipstream.llm", "slipstream.stack.settings"}
    )


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_the_command_line_loads_no_command_to_speak_of_itself(option: str) -> None:
    modules = loaded(called(option))
    own = {name for name in modules if name.startswith("slipstream.")}
    assert own == {
        "slipstream.cli",
        "slipstream.cli.options",
        "slipstream.cli.options.foreign_options",
        "slipstream.cli.main",
        "slipstream.cli.options.option_names",
        "slipstream.cli.options.parser",
        "slipstream.spelling",
    }
    assert not modules & ALL_THAT_COSTS


@pytest.mark.parametrize(
    ("arguments", "module"),
    [
        (("keys", "--help"), "slipstream.cli.keys"),
        (("chat", "--help"), "slipstream.cli.chat"),
        (("demo", "kill", "--help"), "slipstream.demo.kill"),
    ],
)
def test_a_command_loads_no_other(arguments: tuple[str, ...], module: str) -> None:
    commands = {
        "slipstream.cli.serving.serve",
        "slipstream.cli.generate",
        "slipstream.cli.chat",
        "slipstream.cli.run_batch",
        "slipstream.cli.trace",
        "slipstream.cli.keys",
        "slipstream.demo.kill",
        "slipstream.http.app",
    }
    modules = loaded(called(*arguments))
    assert modules & commands == {module}
    assert not modules & HEAVY


def test_whose_fault_an_error_is() -> None:
    assert issubclass(slipstream.BadRequestError, slipstream.RequestError)
    assert issubclass(slipstream.BadRequestError, ValueError)
    assert issubclass(slipstream.ConnectionLostError, ConnectionError)
    assert issubclass(slipstream.UnknownStreamError, slipstream.RequestError)
    assert issubclass(slipstream.StreamLostError, slipstream.EngineError)
    assert not issubclass(slipstream.OverloadedError, slipstream.RequestError)
    assert not issubclass(slipstream.SupersededError, slipstream.RequestError)
    names = [getattr(slipstream, name) for name in PUBLIC if name.endswith("Error")]
    assert all(issubclass(error, slipstream.SlipstreamError) for error in names)


@pytest.mark.parametrize(
    "name", sorted(n for n in PUBLIC if n.endswith("Error") and n != "StackError")
)
def test_errors_survive_pickling(name: str) -> None:
    error = getattr(slipstream, name)(Fault("bad_request", "no", "stop"))
    error.text = "so far"
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy)) == (type(error), "no")
    assert (copy.fault, copy.text) == (error.fault, "so far")
