"""Questions on their way through the tokenizer process, which tests play."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from slipstream_ipc.columns import pack_u32
from slipstream_ipc.messages import (
    Cancelled,
    ChatMessage,
    Detokenize,
    Detokenized,
    Fault,
    MediaCard,
    MediaSize,
    ModelCard,
    Render,
    Rendered,
    Tokenize,
    Tokenized,
)
from slipstream_ipc.validation.chat_template import (
    MAX_QUERY_CHARS,
    MAX_QUERY_TOKENS,
    MAX_SPELLED_TOKENS,
)
from slipstream_worker.clients import queries as module
from slipstream_worker.clients import query_queue as lane
from slipstream_worker.clients.queries import ClientQueries
from slipstream_worker.tokenizer.long_prompts import LONG_CHARS, size_of

MODEL = ModelCard("m", "/nowhere", vocab_size=1000, max_model_len=99, eos_token_ids=())
ME = b"me"
LONG = "x" * (LONG_CHARS + 1)


class Port:
    def __init__(self) -> None:
        self.said: list[Any] = []  # what is sent stays here, unread
        self.num_unsent_bytes = 0
        self.session = self
        self.is_open = True
        self.public_key = b""

    def enqueue(self, body: Any, *, num_bytes: int = 0) -> None:
        self.said.append(body)
        self.num_unsent_bytes += num_bytes

    @property
    def num_unsent(self) -> int:
        return len(self.said)


class Readers:
    """Clients by their ports."""

    def __init__(self) -> None:
        self.ports = {ME: Port()}

    def is_here(self, client: bytes) -> bool:
        port = self.ports.get(client)
        return port is not None and port.is_open

    def port(self, client: bytes) -> Port:
        return self.ports[client]


class Prompts:
    def __init__(self) -> None:
        self.asked: list[Render] = []
        self.withdrawn: list[int] = []
        self.has_begun = False

    def ask(self, request: Render, _tenant: bytes = b"") -> int:
        self.asked.append(request)
        return len(self.asked)

    def withdraw(self, key: int) -> bool:
        if self.has_begun:
            return False
        self.withdrawn.append(key)
        return True

    @property
    def texts(self) -> list[str | None]:
        return [render.text for render in self.asked]


@pytest.fixture
def readers() -> Readers:
    return Readers()


@pytest.fixture
def prompts() -> Prompts:
    return Prompts()


@pytest.fixture
def queries(readers: Any, prompts: Any) -> ClientQueries:
    return ClientQueries(readers, prompts, None)  # type: ignore[arg-type]


def test_each_gets_its_own_answer(queries, readers, prompts):
    queries.tokenize(ME, Tokenize(7, "hi", with_strings=True, add_special_tokens=False), MODEL)
    queries.detokenize(ME, Detokenize(7, pack_u32([1, 2]), skip_special_tokens=True), MODEL)
    first, second = prompts.asked
    assert (first.text, first.with_strings, first.add_special_tokens) == ("hi", True, False)
    assert (second.token_ids, second.skip_special_tokens) == (pack_u32([1, 2]), True)
    assert first.is_query
    assert queries.answered(Rendered(2, text="ab"))
    assert queries.answered(Rendered(1, pack_u32([5]), strings=("h",)))
    assert readers.ports[ME].said == [Detokenized(7, "ab"), Tokenized(7, pack_u32([5]), ("h",))]
    assert not queries.answered(Rendered(1))  # is answered; it is some stream's


def test_a_fault_is_an_answer(queries, readers):
    fault = Fault("bad_request", "no", "prompt")
    queries.tokenize(ME, Tokenize(1, messages=(ChatMessage("user", "x"),)), MODEL)
    assert queries.answered(Rendered(1, fault=fault))
    assert readers.ports[ME].said == [Tokenized(1, fault=fault)]


def test_who_has_gone_is_not_answered(queries, readers):
    queries.tokenize(ME, Tokenize(1, "x"), MODEL)
    port = readers.ports.pop(ME)
    assert queries.answered(Rendered(1, pack_u32([5])))
    assert port.said == []


@pytest.mark.parametrize("asked", [Tokenize(4), Tokenize(4, "x", (ChatMessage("user", "x"),))])
def test_one_prompt_to_a_question(queries, readers, prompts, asked):
    queries.tokenize(ME, asked, MODEL)
    (answer,) = readers.ports[ME].said
    assert (answer.number, answer.fault.field) == (4, "prompt")
    assert not prompts.asked


def test_wrong_ids_are_refused_before_anybody_is_asked(queries, readers, prompts):
    queries.detokenize(ME, Detokenize(4, pack_u32([1000])), MODEL)
    (answer,) = readers.ports[ME].said
    assert (answer.number, answer.fault.code, answer.fault.field) == (4, "bad_request", "token_ids")
    assert not prompts.asked


@pytest.mark.parametrize(
    ("name", "is_long"),
    [("MAX_WAITING", False), ("MAX_WAITING", True), ("MAX_WAITING_CHARS", True)],
)
def test_who_asks_too_much_is_turned_away(queries, readers, prompts, monkeypatch, name, is_long):
    text, other = (LONG, "short") if is_long else ("short", LONG)
    monkeypatch.setattr(lane, name, 8 * (1 if name == "MAX_WAITING" else len(text)))
    readers.ports[b"other"] = Port()
    for number in range(5):
        queries.tokenize(ME, Tokenize(number, text), MODEL)
    (answer,) = readers.ports[ME].said
    assert (answer.number, answer.fault.code) == (4, "overloaded")
    for number in range(3):
        queries.tokenize(b"other", Tokenize(number, text), MODEL)
    (answer,) = readers.ports[b"other"].said
    assert (answer.number, answer.fault.code) == (2, "overloaded"), "half of what was left"
    assert queries.answered(Rendered(1))
    queries.tokenize(b"other", Tokenize(3, text), MODEL)
    assert len(readers.ports[b"other"].said) == 1
    queries.tokenize(ME, Tokenize(5, other), MODEL)
    assert other in prompts.texts


def test_prompts_of_streams_wait_for_few_characters_of_questions(queries, prompts):
    """What the tokenizer process has not been asked yet does not lie before them."""
    text = "x" * LONG_CHARS
    for number in range(9):
        queries.tokenize(ME, Tokenize(number, text), MODEL)
    assert len(prompts.asked) == module.MAX_CHARS_IN_PROCESS // LONG_CHARS == 4
    for key in range(1, 6):
        assert queries.answered(Rendered(key))
        assert len(prompts.asked) == 4 + key


def test_questions_pass_much_longer_ones_of_which_one_is_asked(queries, readers, prompts):
    for number in range(15):
        queries.tokenize(ME, Tokenize(number, "x" * MAX_QUERY_CHARS), MODEL)
    huge, long = "x" * (MAX_QUERY_CHARS - 1), 3 * LONG
    for number, text in enumerate((huge, long, long, LONG, "hello"), start=15):
        queries.tokenize(ME, Tokenize(number, text), MODEL)
    queries.detokenize(ME, Detokenize(20, pack_u32([5])), MODEL)
    assert not readers.ports[ME].said
    asked = [size_of(render) for render in prompts.asked]
    assert asked == [MAX_QUERY_CHARS, len(long), 5, 1]
    assert queries.answered(Rendered(2))
    assert prompts.texts[4:] == [LONG], "of one lane the shorter goes first"
    assert queries.answered(Rendered(1))
    assert prompts.texts[5:] == [huge]


def test_clients_take_turns(queries, readers, prompts):
    readers.ports |= {b"b": Port(), b"c": Port()}
    for client in (ME, b"b", b"c"):
        for number in range(3):
            text = f"{client.decode()}{number} {LONG}"
            queries.tokenize(client, Tokenize(number, text), MODEL)
    for key in range(1, 10):
        assert queries.answered(Rendered(key))
    turns = [text.split()[0] for text in prompts.texts if text is not None]
    assert turns == ["me0", "me1", "b0", "c0", "me2", "b1", "c1", "b2", "c2"]


@pytest.mark.parametrize("key", [b"", b"key"])
def test_the_tenants_of_one_client_take_turns(queries, readers, prompts, key):
    """An HTTP front names them; a client with a key of its own is its key's tenant."""
    readers.ports[ME].public_key = key
    for tenant in (b"a", b"b"):
        for number in range(3):
            text = f"{tenant.decode()}{number} {LONG}"
            queries.tokenize(ME, Tokenize(number, text, tenant=tenant), MODEL)
    queries.detokenize(ME, Detokenize(9, pack_u32([1] * 2**15), tenant=b"c"), MODEL)
    for answered in range(1, 8):
        assert queries.answered(Rendered(answered))
    turns = [text.split()[0] if text else "c" for text in prompts.texts]
    expected = ["a0", "a1", "b0", "c", "a2", "b1", "b2"]
    assert turns == (["a0", "a1", "a2", "b0", "b1", "b2", "c"] if key else expected)


@pytest.mark.parametrize("has_begun", [False, True])
def test_who_leaves_asks_no_more(queries, readers, prompts, has_begun):
    readers.ports[b"other"] = Port()
    prompts.has_begun = has_begun
    for number in range(3):
        queries.tokenize(ME, Tokenize(number, LONG), MODEL)
    queries.tokenize(ME, Tokenize(3, "hello"), MODEL)
    queries.tokenize(b"other", Tokenize(0, LONG + "y"), MODEL)
    assert prompts.texts == [LONG, "hello"]
    queries.beat()
    assert not prompts.withdrawn
    readers.ports[ME].is_open = False
    queries.beat()
    if has_begun:
        assert len(prompts.asked) == 2
        assert queries.answered(Rendered(1))
        assert queries.answered(Rendered(2))
    else:
        assert prompts.withdrawn == [1, 2]
    assert prompts.texts[2:] == [LONG + "y"]
    assert queries.answered(Rendered(3))
    assert not readers.ports[ME].said
    assert [answer.number for answer in readers.ports[b"other"].said] == [0]


def test_how_many_tokens_there_may_be(queries, prompts):
    queries.tokenize(ME, Tokenize(1, "x"), MODEL)
    queries.tokenize(ME, Tokenize(2, "x", with_strings=True), MODEL)
    limits = [render.max_tokens for render in prompts.asked]
    assert limits == [MAX_QUERY_TOKENS, MAX_SPELLED_TOKENS]


def test_a_text_that_is_too_long_is_not_tokenised(queries, readers, prompts):
    queries.tokenize(ME, Tokenize(1, "x" * (MAX_QUERY_CHARS + 1)), MODEL)
    turns = tuple([ChatMessage("user", "x" * (MAX_QUERY_CHARS // 2))] * 2)
    queries.tokenize(ME, Tokenize(2, messages=turns), MODEL)
    faults = [(answer.number, answer.fault.field) for answer in readers.ports[ME].said]
    assert faults == [(1, "prompt"), (2, "prompt")]
    assert not prompts.asked


def test_what_is_said_can_be_written():
    for body in (Cancelled(9, ("ended",)), Tokenized(1, strings=("a",)), Detokenized(2, "b")):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(body), type=type(body)) == body


def test_who_asks_and_does_not_read_costs_a_bounded_number_of_bytes(
    readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_UNREAD_BYTES", 1000)
    prompts = Prompts()
    queries = ClientQueries(readers, prompts, None)  # type: ignore[arg-type]
    for number in range(20):
        queries.tokenize(ME, Tokenize(number, "a"), MODEL)
        key = len(prompts.asked)
        assert queries.answered(Rendered(key, token_ids=bytes(400)))
    said = readers.ports[ME].said
    assert [each.number for each in said] == list(range(20))  # each has its answer
    assert sum(len(each.token_ids) for each in said) == 1200
    assert {each.fault.code for each in said[3:]} == {"overloaded"}


def test_sizes_of_images_go_along_within_the_models_limit(
    queries: ClientQueries, readers: Readers, prompts: Prompts
) -> None:
    card = replace(MODEL, media=MediaCard(7, max_pixels=100))
    turn = ChatMessage("user", "", parts=(0, 1))
    sizes = (MediaSize("image", 5, 4), MediaSize("image", 40, 10))
    queries.tokenize(ME, Tokenize(1, messages=(turn,), media=sizes), card)
    assert prompts.asked[0].media == (sizes[0], MediaSize("image", 20, 5))
    for number, (model, media) in enumerate(((MODEL, sizes), (card, sizes[:1])), start=2):
        queries.tokenize(ME, Tokenize(number, messages=(turn,), media=media), model)
        assert readers.ports[ME].said[-1].fault.field == "media"
    assert len(prompts.asked) == 1
