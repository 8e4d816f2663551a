"""The tokenizer process is watched as the stack's other processes are.

With a child that tests play, on a clock of their own; then with real ones, which are stopped,
killed, and robbed of their tokenizer.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import zmq
from tests.helpers.patience import PATIENCE_S, Patience
from tests.helpers.played_prompts import Child, PlayedPrompts

from slipstream.demo_model import MODEL_PATH
from slipstream_ipc.columns import u32
from slipstream_ipc.messages import (
    ChatMessage,
    Render,
    Rendered,
    TokenizerReady,
)
from slipstream_ipc.process import BEAT_S, SILENT_S
from slipstream_ipc.restart_backoff import STEADY_S
from slipstream_worker.tokenizer.client import LOAD_S, LONG_CHARS_PER_S, LONG_S, TokenizerClient
from slipstream_worker.tokenizer.long_prompts import LONG_CHARS, lane_of
from slipstream_worker.tokenizer.process import beating
from slipstream_worker.tokenizer.render_note import RenderNote

PATIENCE_MS = int(PATIENCE_S * 1e3)
HANG_TIMEOUT_S = 10.0
WAIT_S = 30.0
READY = TokenizerReady("", "table")


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as found:
        yield found


class Played(PlayedPrompts):
    """One that speaks for its children, four beats a second."""

    def say(self, what: TokenizerReady | Rendered) -> None:
        if isinstance(what, TokenizerReady) and not what.pid:
            what = msgspec.structs.replace(what, pid=self.children[-1].pid)
        self.socket.send(msgspec.msgpack.encode(what))
        assert self.prompts.socket.poll(PATIENCE_MS)
        list(self.prompts.receive())

    def beat(self) -> None:
        """A beat of the child."""
        self.prompts._note.beat()

    def pass_time(self, seconds: float) -> list[Rendered]:
        """With a beat of the worker's four times a second."""
        refused = []
        end = self.now + seconds
        while self.now < end:
            self.now += 0.25
            refused += self.prompts.beat(self.now)
        return refused


@pytest.fixture
def played(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Played]:
    found = Played(context, monkeypatch, tmp_path, hang_timeout_s=HANG_TIMEOUT_S, wait_s=WAIT_S)
    yield found
    found.close()


def test_a_child_that_beats_no_more_is_replaced(played: Played) -> None:
    played.say(READY)
    played.pass_time(1)
    assert played.prompts.condition(played.now).state == "ready"
    for _ in range(100):
        played.pass_time(HANG_TIMEOUT_S - 2)
        played.beat()
        played.pass_time(0.25)
        assert played.prompts.condition(played.now).state == "ready"
    played.pass_time(SILENT_S)
    assert played.prompts.condition(played.now).state == "silent"
    played.pass_time(HANG_TIMEOUT_S)
    assert len(played.children) == 2
    assert played.prompts.condition(played.now).state == "restarting"
    played.say(READY)
    assert played.prompts.condition(played.now).state == "ready"


def test_an_answer_says_that_it_lives_and_so_does_one_that_is_unread(played: Played) -> None:
    """Where the worker itself was stopped, what its child said meanwhile lies there unread."""
    played.say(READY)
    played.pass_time(1)
    played.socket.send(msgspec.msgpack.encode(Rendered(76)))
    assert played.prompts.socket.poll(PATIENCE_MS)
    played.now += 100 * HANG_TIMEOUT_S
    played.pass_time(1)
    list(played.prompts.receive())
    played.beat()
    played.now += 100 * HANG_TIMEOUT_S
    played.pass_time(HANG_TIMEOUT_S - 2)
    played.say(Rendered(77))
    played.pass_time(HANG_TIMEOUT_S - 2)
    assert len(played.children) == 1


def test_the_first_may_load_for_as_long_as_it_takes_and_a_successor_while_it_beats(
    played: Played,
) -> None:
    played.pass_time(10 * LOAD_S)
    assert played.prompts.condition(played.now).state == "starting"
    assert len(played.children) == 1
    played.say(READY)
    played.pass_time(STEADY_S + 1)
    played.children[-1].kill()
    between_s = WAIT_S / 2 - 1
    for _ in range(int(LOAD_S / between_s)):
        played.pass_time(between_s)
        played.beat()
        assert len(played.children) == 2
    played.pass_time(between_s)
    assert len(played.children) == 3


def test_a_child_that_lacks_a_cpu_has_as_much_longer_for_its_beat(played: Played) -> None:
    played.say(READY)
    played.pass_time(1)
    played.beat()
    played.pass_time(0.25)  # heard now
    played.pass_time(HANG_TIMEOUT_S / 2)
    played.run_delay_s += 7.0
    played.pass_time(HANG_TIMEOUT_S / 2 + 6.75)
    assert len(played.children) == 1
    played.beat()  # what it lacked before a beat is no credit
    played.pass_time(0.25 + HANG_TIMEOUT_S - 0.25)
    assert len(played.children) == 1
    played.pass_time(0.5)
    assert len(played.children) == 2


def test_a_successor_that_lacks_a_cpu_has_as_much_longer_to_load(played: Played) -> None:
    played.say(READY)
    played.pass_time(STEADY_S + 1)
    played.children[-1].kill()
    played.pass_time(0.5)
    assert len(played.children) == 2
    played.run_delay_s += 50.0
    for _ in range(int(LOAD_S + 49.0)):
        played.beat()
        played.pass_time(1.0)
    assert len(played.children) == 2
    for _ in range(2):
        played.beat()
        played.pass_time(1.0)
    assert len(played.children) == 3


def test_prompts_outwait_a_successor_that_hangs_while_it_loads(played: Played) -> None:
    played.say(READY)
    played.pass_time(STEADY_S + 1)
    key = played.prompts.ask(Render(0, "innocent"))
    played.children[-1].kill()
    assert played.pass_time(WAIT_S / 2 + 2) == []
    assert len(played.children) == 3
    assert asked(played) == [key]  # by the first
    played.say(READY)
    assert asked(played) == [key]
    assert played.pass_time(HANG_TIMEOUT_S - 1) == []


@pytest.mark.parametrize(
    "said", [TokenizerReady("", "", error="no file"), TokenizerReady("", "another table")]
)
def test_a_successor_with_no_tokenizer_or_another_is_tried_again_with_pauses(
    played: Played, said: TokenizerReady
) -> None:
    played.say(READY)
    played.pass_time(STEADY_S + 1)
    key = played.prompts.ask(Render(0, "innocent"))
    played.children[-1].kill()
    refused = []
    started_at = []
    while not refused:
        num = len(played.children)
        refused += played.pass_time(0.25)
        if len(played.children) > num:
            started_at.append(played.now)
            played.say(said)
            assert played.prompts.condition(played.now).state == "restarting"
        assert len(started_at) < 100
    pauses = [later - earlier for earlier, later in pairwise(started_at)]
    # each death is seen with the beat after it
    assert pauses == [0.75, 1.25, 2.25, 4.25, 8.25, 10.25]
    (answer,) = refused
    assert answer.key == key
    assert answer.fault is not None
    assert answer.fault.code == "overloaded"  # over HTTP 503: later it may be answered
    later = played.prompts.ask(Render(0, "asked while there is none"))
    assert [answer.key for answer in played.pass_time(0.25)] == [later]
    num = len(played.children)
    while len(played.children) == num:
        played.pass_time(0.25)
    played.say(READY)
    assert played.prompts.condition(played.now).state == "ready"
    asked = played.prompts.ask(Render(0, "a prompt"))
    while True:
        assert played.socket.poll(PATIENCE_MS)
        if msgspec.msgpack.decode(played.socket.recv(), type=Render).key == asked:
            break
    assert played.pass_time(1) == []


def test_what_a_dead_one_said_last_is_not_its_successors(played: Played) -> None:
    played.say(READY)
    played.pass_time(STEADY_S + 1)
    played.children[-1].kill()
    played.pass_time(0.25)
    played.say(TokenizerReady("", "", error="no file", pid=1))
    played.pass_time(1)
    assert len(played.children) == 2
    played.say(TokenizerReady("", "table", pid=1))
    assert played.prompts.condition(played.now).state == "restarting"


def asked(played: Played) -> list[int]:
    """The keys of the prompts that were sent since the last call."""
    keys = []
    while played.socket.poll(100):
        keys.append(msgspec.msgpack.decode(played.socket.recv(), type=Render).key)
    return keys


def test_a_long_prompt_has_as_many_beats_as_its_size_takes(played: Played) -> None:
    played.say(READY)
    size = 8 * LONG_CHARS_PER_S
    hung, other = (played.prompts.ask(Render(0, letter * size)) for letter in "xy")
    short = played.prompts.ask(Render(0, "short"))
    assert asked(played) == [hung, short]
    note, lane = played.prompts._note, lane_of(Render(0, "x" * size))
    for _ in range(1000):  # it has not begun with it
        played.beat()
        assert played.pass_time(0.25) == []
    note.begin(hung, lane=lane)
    most = int((LONG_S + 8) / (BEAT_S / 2))
    for num_deaths in (1, 2):  # it begins anew where another process does
        for _ in range(most - 1):
            played.beat()
            assert played.pass_time(0.25) == []
        if num_deaths == 1:
            note.end(lane=lane)  # it is not to blame for the death
            played.children[-1].kill()
            played.pass_time(0.5)
            played.say(READY)
            assert asked(played) == [hung, short]
            note.begin(hung, lane=lane)
    num_children = len(played.children)
    note.begin(short, lane=0)
    played.beat()
    (refusal,) = played.pass_time(1.0)
    assert refusal.key == hung
    assert refusal.fault is not None
    assert refusal.fault.code == "engine"
    assert "not tokenised within 68 s" in refusal.fault.message
    assert len(played.children) == num_children + 1
    played.say(READY)
    assert asked(played) == [short, other]
    note.begin(short, lane=0)  # dies of it: the first time that it is charged
    played.children[-1].kill()
    assert played.pass_time(2.0) == []


# ---- real processes ----------------------------------------------------------------------------


def test_a_child_without_a_pidfd_is_served_by_and_its_death_is_noticed(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where the kernel has no pidfds, or no descriptor is left for one."""
    children: list[Child] = []

    def start(*_: object) -> Child:
        children.append(Child(os.getpid()))
        return children[-1]

    monkeypatch.setattr("slipstream_worker.tokenizer.client.start_tokenizer_process", start)
    prompts = TokenizerClient(context, f"ipc://{tmp_path}/p", {})
    list(prompts.beat(0.0))
    children[0].kill()
    for now in (1.0, 1.0 + STEADY_S):
        list(prompts.beat(now))
    assert len(children) == 2
    prompts.close()


class Real:
    """Prompts with a real child, and the turns of a worker's loop."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], path: Path, **options: float):
        self.model = path / "model"
        shutil.copytree(MODEL_PATH, self.model)
        config: dict[str, object] = {"tokenizer": str(self.model), "cache_dir": str(path / "c")}
        self.prompts = TokenizerClient(context, f"ipc://{path}/p", config, **options)
        self.answers: dict[int, Rendered] = {}
        self.num_heard = 0  # beats that the last turn found
        self.wait_for("ready")

    @property
    def pid(self) -> int:
        child = self.prompts._child
        assert child is not None
        return child.pid

    def turn(self) -> None:
        self.prompts.socket.poll(50)
        found = [*self.prompts.receive()]
        self.num_heard = self.prompts._note.num_beats - self.prompts._num_beats
        found += self.prompts.beat(time.monotonic())
        self.answers |= {one.key: one for one in found if isinstance(one, Rendered)}

    def wait_for(self, condition: str) -> None:
        patience = Patience()
        while (found := self.prompts.condition(time.monotonic()).state) != condition:
            patience.check(found)
            self.turn()

    def ask(self, text: str) -> int:
        return self.prompts.ask(Render(0, text))

    def answer(self, key: int) -> Rendered:
        patience = Patience()
        while key not in self.answers:
            patience.check()
            self.turn()
        return self.answers[key]

    def ids(self, text: str) -> list[int]:
        answer = self.answer(self.ask(text))
        assert answer.fault is None
        return u32(answer.token_ids).tolist()


@pytest.fixture
def make_real(context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path):
    made: list[Real] = []

    def make(**options: float) -> Real:
        made.append(Real(context, tmp_path, **options))
        return made[-1]

    yield make
    for one in made:
        one.prompts.close()


def test_a_stopped_process_is_seen_and_replaced_and_what_it_was_asked_is_answered(
    make_real,
) -> None:
    real = make_real(hang_timeout_s=3.0)
    expected = real.ids("a prompt")
    before = real.pid
    os.kill(before, signal.SIGSTOP)
    key = real.ask("a prompt")
    real.wait_for("silent")
    assert u32(real.answer(key).token_ids).tolist() == expected
    assert real.pid != before


def test_a_process_beats_while_it_loads() -> None:
    note = RenderNote()
    at_workers = RenderNote(os.dup(note.fd))
    patience = Patience()
    with beating(note):
        while at_workers.num_beats < 3:
            patience.wait()
    num_beats = at_workers.num_beats
    note.beat()
    assert at_workers.num_beats == num_beats + 1, "it is the caller's from now on"
    note.close()
    at_workers.close()


def test_the_loop_beats_beside_a_long_prompt(make_real) -> None:
    real = make_real()
    text = "Once upon a time, naïve 日本 said what is said. "
    key = real.ask(text * (100 * LONG_CHARS // len(text)))
    num_beats = 0
    patience = Patience()
    while key not in real.answers:
        patience.check()
        real.turn()
        num_beats += real.num_heard if key not in real.answers else 0
    assert num_beats, "none, as long as it was worked at"
    assert len(u32(real.answers[key].token_ids)) > LONG_CHARS


@pytest.mark.process
def test_a_long_prompt_that_never_ends_is_refused_and_harms_no_other(make_real) -> None:
    real = make_real(long_s=2.0)
    (real.model / "chat_template.jinja").write_text(
        "{{ messages[0].content }}{% if 'never' in messages[0].content %}"
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
        "{% endif %}"
    )
    os.kill(real.pid, signal.SIGKILL)  # the next one has this template
    real.wait_for("restarting")
    real.wait_for("ready")
    before = real.pid
    expected = real.ids("a prompt")

    def long_chat(word: str) -> int:
        said = (word + " ") * (2 * LONG_CHARS // len(word))
        return real.prompts.ask(Render(0, messages=(ChatMessage("user", said),)))

    hung, fine = long_chat("never"), long_chat("ever")
    patience = Patience()
    while hung not in real.answers:
        patience.check("it is worked at for ever")
        assert real.ids("a prompt") == expected
    fault = real.answers[hung].fault
    assert fault is not None
    assert (fault.code, "was not tokenised within" in fault.message) == ("engine", True)
    assert real.answer(fine).fault is None
    assert real.ids("a prompt") == expected
    assert real.pid != before


@pytest.mark.process
def test_two_kills_of_an_idle_process_refuse_nobody(make_real) -> None:
    real = make_real()
    expected = real.ids("a prompt")
    os.kill(real.pid, signal.SIGKILL)
    real.wait_for("restarting")
    key = real.ask("a prompt")
    for _ in range(3):  # each before it has got so far as to be asked
        before = real.pid
        os.kill(before, signal.SIGKILL)
        patience = Patience()
        while real.prompts._child is None or real.pid == before:
            patience.check()
            real.turn()
    assert u32(real.answer(key).token_ids).tolist() == expected


def test_a_process_that_is_killed_while_it_is_idle_and_asked_at_once(make_real) -> None:
    """It was sent the prompt, and never began with it."""
    real = make_real()
    expected = real.ids("a prompt")
    key = 0
    for _ in range(2):
        os.kill(real.pid, signal.SIGSTOP)
        key = key or real.ask("a prompt")
        os.kill(real.pid, signal.SIGKILL)
        real.wait_for("restarting")
        real.wait_for("ready")
    assert u32(real.answer(key).token_ids).tolist() == expected


@pytest.mark.process
@pytest.mark.parametrize("is_broken", [False, True], ids=["vanished", "broken"])
def test_a_tokenizer_that_is_gone_is_waited_for_and_prompts_are_refused_as_ours(
    make_real, is_broken: bool
) -> None:
    real = make_real(wait_s=5.0)
    expected = real.ids("a prompt")
    for path in real.model.iterdir():
        if path.name != "tokenizer.json":
            continue
        kept = path.rename(path.with_suffix(".kept"))
        if is_broken:
            path.write_text(kept.read_text()[:1000])
    os.kill(real.pid, signal.SIGKILL)
    real.wait_for("restarting")
    fault = real.answer(real.ask("a prompt")).fault
    assert fault is not None
    assert fault.code == "overloaded"
    assert real.prompts.condition(time.monotonic()).state == "restarting"
    kept.rename(real.model / "tokenizer.json")
    real.wait_for("ready")
    assert real.ids("a prompt") == expected
