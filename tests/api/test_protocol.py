"""PROTOCOL.md against the code, and a client that knows nothing but that page."""

from __future__ import annotations

import ast
import hashlib
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tests.helpers.patience import PATIENCE_S
from tests.helpers.stacks import spareless_stack

from slipstream.answers.tool_calls import call_id
from slipstream_ipc import messages
from slipstream_ipc.columns import check_deltas, f32, u32
from slipstream_ipc.history.token_log import history_digest
from slipstream_ipc.messages.budgets import MAX_MESSAGE_BYTES, MAX_PARAMS_BYTES
from slipstream_ipc.transport.codec import client_codec, front_codec
from slipstream_ipc.transport.link import WINDOW
from slipstream_ipc.validation import (
    chat_template,
    sampling_params,
    structured_output,
    token_constraints,
)

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "PROTOCOL.md").read_text()
CLIENT = ROOT / "scripts" / "minimal_client.py"
ROWS = re.findall(r"^\| (\d+) \| (\w+) \| ?([\w, ]*?) ?\|$", PAGE, re.MULTILINE)


def test_every_message_of_the_hop_is_documented() -> None:
    union = {*messages.ClientToWorker.__args__, *messages.WorkerToClient.__args__}
    assert {name for _, name, _ in ROWS} == {struct.__name__ for struct in union}


@pytest.mark.parametrize(("tag", "name", "fields"), ROWS)
def test_tags_and_fields_are_those_of_the_code(tag: str, name: str, fields: str) -> None:
    struct = getattr(messages, name)
    assert struct.__struct_config__.tag == int(tag)
    documented = [field for field in fields.split(", ") if field]
    assert documented == [field.name for field in msgspec.structs.fields(struct)]


def test_numbers_are_those_of_the_code() -> None:
    assert f"version {messages.PROTOCOL_VERSION}" in PAGE.splitlines()[0]
    assert f"{MAX_MESSAGE_BYTES:,} bytes" in PAGE
    assert f"At most {WINDOW} numbered messages" in PAGE
    page = " ".join(PAGE.split())
    for number, of in (
        (messages.MAX_IDENTITY_BYTES, "an identity at most {} bytes"),
        (messages.MAX_CHAT_TURNS, "a chat {} messages"),
        (messages.MAX_TOOL_CALLS, "of at most {} tool calls"),
        (messages.MAX_TEMPLATE_CHARS, "tools and variables {} characters each"),
        (messages.MAX_LABEL_CHARS, "a label or a cache salt {} characters"),
        (messages.MAX_OTHERS, "at most {} further answers"),
        (messages.MAX_CANCELLED, "end these streams (at most {})"),
        (messages.MAX_RECORD_BYTES, "record (at most {} bytes"),
        (MAX_PARAMS_BYTES // 2**20, "params {} MiB"),
        (token_constraints.MAX_LOGIT_BIASES, "integers to floats, at most {};"),
        (token_constraints.MAX_ALLOWED_TOKEN_IDS, "at most {} `allowed_token_ids`"),
        (token_constraints.MAX_BAD_WORDS, "and {} `bad_words`"),
        (token_constraints.MAX_BAD_WORD_CHARS, "`bad_words` of at most {} characters"),
        (token_constraints.MAX_BAD_WORD_TOKENS, "characters and {} tokens each"),
        (sampling_params.MAX_PATTERN_SIZE, "`max_pattern_size` (at most {};"),
        (sampling_params.MAX_PATTERN_COUNT, "`min_count` (2 to {})"),
        (structured_output.MAX_CHOICES, "array of 1 to {} strings"),
        (structured_output.MAX_SCHEMA_BYTES // 1024, "text of at most {} KiB"),
        (structured_output.MAX_REGEX_BYTES // 1024, "`regex` ({} KiB"),
        (structured_output.MAX_GRAMMAR_BYTES // 1024, "`grammar` ({} KiB"),
        (structured_output.MAX_CHOICE_BYTES // 1024, "strings, {} KiB in all"),
        (sampling_params.MAX_LOGPROB_BYTES // 2**20, "may take {} MiB."),
        (chat_template.MAX_QUERY_TOKENS, "A query may be about {} tokens"),
        (chat_template.MAX_SPELLED_TOKENS, "or {} with their spelling"),
        (chat_template.MAX_QUERY_CHARS, "a Tokenize have {} characters"),
    ):
        assert of.format(f"{number:,}") in page, of


def test_the_digest_is_what_it_says() -> None:
    ids, number = re.search(r"Tokens ([\d, ]+) give\s+(\d+)", PAGE).groups()  # type: ignore[union-attr]
    column = b"".join(int(each).to_bytes(4, "little") for each in ids.split(", "))
    digest = hashlib.blake2b(column, digest_size=8).digest()
    assert int.from_bytes(digest, "little") == int(number) == history_digest(u32(column))


def test_every_kind_of_event_is_documented() -> None:
    kinds = re.findall(r"^\| (\d) \| `([a-z ]+)` \|", PAGE, re.MULTILINE)
    named = {(str(kind.value), kind.name.lower().replace("_", " ")) for kind in messages.EventKind}
    assert set(kinds) == named


def test_the_id_of_a_call_is_what_it_says() -> None:
    [shown] = re.findall(r"is `(call_[0-9a-f]+)`", PAGE)
    assert call_id(bytes(16), 0) == shown


def test_every_code_of_a_fault_is_documented() -> None:
    [codes] = re.findall(r"Codes: (.*?)\.\n\n", PAGE, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", codes)) == set(messages.ErrorCode.__args__)


def test_the_hexdump_is_the_message_it_says() -> None:
    [dump] = re.findall(r"```hexdump\n(.*?)```", PAGE, re.DOTALL)
    data = bytes.fromhex("".join(line[6:53] for line in dump.splitlines()))
    frame = client_codec().decode(data)
    assert (frame.epoch, frame.seq, frame.ack) == (1, 7, 4)
    deltas = frame.body
    assert isinstance(deltas, messages.Deltas)
    check_deltas(deltas)
    assert deltas.texts == [" wörld", "Hi"]
    assert u32(deltas.token_ids).tolist() == [17, 300, 42]
    assert deltas.ends == (messages.End("stop", 1, "\n\n"),)
    assert deltas.logprobs is not None
    assert f32(deltas.logprobs.values).tolist() == [-0.5, -0.5, -1.5]
    assert u32(deltas.logprobs.widths).tolist() == [0, 3]
    assert front_codec().encode(frame) == data  # type: ignore[arg-type]
    for offset, start in re.findall(r"^\| ([0-9a-f]{4}) \| `([0-9a-f ]+)", PAGE, re.MULTILINE):
        expected = bytes.fromhex(start)
        assert data[int(offset, 16) :].startswith(expected), offset


def test_the_minimal_client_is_minimal() -> None:
    tree = ast.parse(CLIENT.read_text())
    imported = {
        name.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }
    assert imported - set(sys.stdlib_module_names) == {"zmq", "msgspec"}
    code = CLIENT.read_text().split('"""')[2]
    assert len([line for line in code.splitlines() if line.strip()]) <= 30


@pytest.mark.process
def test_the_minimal_client_streams_what_ours_does() -> None:
    with spareless_stack("simulated:step_ms=1") as stack, stack.client() as client:
        expected = client.generate("Hello there", temperature=0, max_tokens=40).text
        arguments = [sys.executable, str(CLIENT), stack.address, "Hello there", "40"]
        done = subprocess.run(
            arguments, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert (done.returncode, done.stdout) == (0, expected)
        arguments[3] = ""
        done = subprocess.run(
            arguments, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == 1
        assert "at least one token" in done.stderr
