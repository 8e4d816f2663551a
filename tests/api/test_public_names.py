"""What `slipstream` exports, and that asking for a client stays cheap."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

import slipstream
from slipstream_ipc.messages import Fault

PUBLIC = {
    "LLM",
    "AsyncClient",
    "AsyncStream",
    "AsyncStreams",
    "BadRequestError",
    "ChatMessage",
    "Client",
    "ClosedError",
    "Completion",
    "CompletionOutput",
    "ConflictError",
    "ConnectionLostError",
    "Delta",
    "EngineError",
    "Logprob",
    "ModelCard",
    "OverloadedError",
    "RequestError",
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


def test_import_loads_nothing_heavy() -> None:
    heavy = "torch transformers tokenizers jinja2 tqdm slipstream.stack slipstream.llm"
    program = f"import sys, slipstream; print(*set('{heavy}'.split()) & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""


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
