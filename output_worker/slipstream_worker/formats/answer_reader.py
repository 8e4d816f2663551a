"""Reads one answer as events.

The state is one of: plain text, which is content or reasoning; between two elements of a call; in
an element that a scanner reads. Characters are *held* while it is not decided what they are. Until
a call begins, all of its section is held, and becomes plain text if it fails.

- The events do not depend on how the text was divided; what was given is never taken back.
- Every character is decided once, in order; the cost is linear.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from enum import IntEnum
from typing import NamedTuple

import msgspec

from slipstream_ipc.formats.answer_format import ChannelFormat, Delimiter
from slipstream_ipc.formats.call_ids import repeated_id
from slipstream_ipc.formats.tool_types import ToolTypes
from slipstream_ipc.messages.answer import (
    MAX_CALLS,
    MAX_NAME_CHARS,
    AnswerEvent,
    AnswerOptions,
    EventKind,
)
from slipstream_worker.formats.call_graph import (
    END,
    Branch,
    CallGraph,
    Scan,
    is_call,
    make_scanner,
)
from slipstream_worker.formats.call_ids import id_digest, made_call_id
from slipstream_worker.formats.channel_header import (
    MAX_HEADER_CHARS,
    ChannelHeader,
    parse_header,
)
from slipstream_worker.formats.delimiter_tables import (
    FormatTables,
    Move,
    Place,
    PlaceAction,
    Triggers,
)
from slipstream_worker.formats.literals import Literals
from slipstream_worker.formats.scanners.scanner import (
    BLANKS,
    MAX_HELD_CHARS,
    ScanContext,
    Scanner,
    ScanStatus,
    skip_blanks,
)

MAX_BLANKS = 1024  # beside a delimiter; what is more is text
_MAX_PART_CHARS = 2**14  # so that copies of what is left of a text cost little


class LocatedEvent(NamedTuple):
    """An event and the virtual characters that it was made of: those of the text in which every
    delimiter is spelled out. The text of content and reasoning is these characters themselves.
    """

    event: AnswerEvent
    start: int
    end: int


class _State(IntEnum):
    PLAIN = 0
    BETWEEN = 1  # two elements of a section
    SCAN = 2
    HEADER = 3  # of a message in a channel


class _Border(IntEnum):
    NONE = 0
    START = 1  # of the answer: blanks are content if content follows
    DELIMITER = 2  # blanks belong to it
    LABEL = 3  # as DELIMITER, and so does the label of reasoning, if it follows


class AnswerReader:
    """The reader of one stream. num_fed, num_decided: virtual characters; those between are held.
    They are negative while text of the prompt is. reasoning_end: where what last ended reasoning
    begins.
    """

    def __init__(
        self,
        tables: FormatTables,
        tools: ToolTypes | None,
        options: AnswerOptions,
        state: bytes = b"",
        stream_id: bytes = b"",
    ) -> None:
        """`state`: of a reader of the same format with nothing held, or of `start_state`.
        stream_id: for calls without an id, in formats whose ids are Mistral's.
        """
        self._tables = tables
        self._tools = tools
        calls = tables.format.calls
        self._id_source = stream_id if calls is not None and calls.call_id == "mistral" else b""
        self._reads_calls = tables.graph is not None and options.tool_choice != "none"
        self.num_fed = 0
        self.num_decided = 0
        self.reasoning_end = -1
        self.is_reasoning = False
        self._state = _State.PLAIN
        self._border = _Border.START if tables.has_borders else _Border.NONE
        self._failed_at = 0
        self._node = END  # of BETWEEN
        self._scan: Scan | None = None
        self._scanner: Scanner | None = None
        self._held: list[str] = []  # taken by the section, not decided
        self._num_held = 0
        self._pending = ""  # given and not taken: blanks, the beginning of a literal
        self._name = ""
        self._call_id = ""
        self._num_calls = 0
        self._id_digests: list[int] = []  # of the calls' ids
        self._has_begun = False
        self._section_has_calls = False
        self._is_final = False  # no text follows: what begins a literal is none
        self._pieces: list[LocatedEvent] = []
        if state:
            self._load(state)

    # What is asked of the reader

    @property
    def kind(self) -> int:
        """The event that plain text would be: an EventKind, with the number of its call above 8
        bits; 0: the reader must see it.
        """
        if self._state is _State.PLAIN:
            if self._border or self._pending:
                return 0
            return EventKind.REASONING if self.is_reasoning else EventKind.CONTENT
        if self._scanner is None or not self._has_begun or self._num_held:
            return 0
        if self._scanner.string_hazards is None:
            return 0
        return EventKind.CALL_ARGUMENTS | self._num_calls << 8

    @property
    def is_settled(self) -> bool:
        """True if nothing is held, and plain text would be one event of `kind`."""
        return self.kind != 0

    @property
    def hazard_chars(self) -> frozenset[str]:
        """The characters without which text is harmless to a settled reader."""
        if self._state is _State.PLAIN:
            return self._triggers.hazard_chars
        return (self._scanner and self._scanner.string_hazards) or frozenset()

    @property
    def mode(self) -> Hashable:
        """Readers of one compiled format with equal modes answer `is_harmless` alike."""
        if self._state is _State.PLAIN:
            return self._place if self.is_settled else 0
        return self.hazard_chars if self.is_settled else 0

    def is_harmless(self, text: str) -> bool:
        """True if text that is fed to this settled reader is one event of `kind`, whole, and leaves
        the same state.
        """
        if not text or not self.is_settled:
            return False
        if self.hazard_chars.isdisjoint(text):
            return True
        if self._state is not _State.PLAIN or text[-1] in BLANKS:
            return False
        return self._triggers.texts.find(text, 0)[0] == len(text)

    @property
    def state(self) -> bytes:
        """The state from which another reader can go on. Only where nothing is held."""
        return self.save(self._num_calls)

    @property
    def is_between_calls(self) -> bool:
        """True if nothing is held and no call is open."""
        return self._state in (_State.PLAIN, _State.BETWEEN) and self.num_decided == self.num_fed

    @property
    def place(self) -> Place | None:
        """The place of plain text in the answer; None within a call."""
        return self._place if self._state is _State.PLAIN else None

    # What is fed

    def feed(self, text: str) -> list[LocatedEvent]:
        """Text that follows."""
        self.num_fed += len(text)
        scanner = self._scanner
        if scanner is not None and self._has_begun and not self._num_held:
            hazards = scanner.string_hazards
            if hazards is not None and text and hazards.isdisjoint(text):
                self._emit(EventKind.CALL_ARGUMENTS, text, len(text))
                return self._take()
        for start in range(0, len(text), _MAX_PART_CHARS):
            self._feed(text[start : start + _MAX_PART_CHARS])
        return self._take()

    def feed_delimiter(self, token_id: int) -> list[LocatedEvent]:
        """One of the format's delimiter tokens follows."""
        literal = self._tables.literals[token_id]
        if token_id in self._tables.spelled:
            return self.feed(literal)
        self.num_fed += len(literal)
        self._drain()
        while not self._delimiter(token_id, literal):
            pass
        return self._take()

    def finish(self) -> list[LocatedEvent]:
        """The answer is over: decides what is held. Nothing more is fed."""
        self._drain()
        if self._state is not _State.PLAIN:
            self._fail()
        if self._border not in (_Border.DELIMITER, _Border.LABEL):
            self._emit_plain(self._pending)
        self.num_decided = self.num_fed
        self._pending = ""
        return self._take()

    # Steps

    def _feed(self, text: str) -> None:
        if self._pending:
            text = self._pending + text
            self._pending = ""
        pos = 0
        while pos < len(text):
            match self._state:
                case _State.PLAIN:
                    pos = self._plain_text(text, pos)
                case _State.BETWEEN:
                    pos = self._text_between(text, pos)
                case _State.SCAN:
                    pos = self._scanned_text(text, pos)
                case _State.HEADER:
                    pos = self._header_text(text, pos)

    def _drain(self) -> None:
        """No text follows: of what is pending, only blanks stay so."""
        if self._pending:
            self._is_final = True
            self._feed("")
            self._is_final = False

    def _delimiter(self, token_id: int, literal: str) -> bool:
        """Handle a delimiter token, or change the state and return False."""
        match self._state:
            case _State.PLAIN:
                action = self._triggers.ids.get(token_id)
                if self._border in (_Border.DELIMITER, _Border.LABEL):
                    self._drop_pending()
                if action is None:
                    self._border = _Border.NONE
                    self._emit_plain(self._pending + literal)
                else:
                    self._act(action, self._pending + literal, literal)
                self._pending = ""
            case _State.BETWEEN:
                node = self._graph.nodes[self._node]
                branch = node.ids.get(token_id)
                scan = next((scan for scan in node.scans if scan.first_chars is None), None)
                if branch is not None:
                    literal, self._pending = self._pending + literal, ""
                    self._follow(branch, literal)
                elif scan is not None:
                    self._hold(self._pending)
                    self._pending = ""
                    self._enter_scan(scan)
                    return False
                else:
                    self._fail()
                    return False
            case _State.SCAN:
                return self._scanned_delimiter(literal)
            case _State.HEADER:
                _, ids = self._headers
                return self._header_delimiter(ids.get(token_id), literal)
        return True

    @property
    def _headers(self) -> tuple[Literals[Delimiter], Mapping[int, Delimiter]]:
        assert self._tables.headers is not None
        return self._tables.headers

    @property
    def _graph(self) -> CallGraph:
        assert self._tables.graph is not None
        return self._tables.graph

    # Plain text

    @property
    def _place(self) -> Place:
        return Place(
            self.is_reasoning, self._border is not _Border.NONE, self._reads_calls, self._failed_at
        )

    @property
    def _triggers(self) -> Triggers:
        return self._tables.triggers[self._place]

    def _plain_text(self, text: str, pos: int) -> int:
        if self._border:
            return self._text_at_border(text, pos)
        triggers = self._triggers
        found, literal = triggers.texts.find(text, pos, self._is_final)
        end = _rstrip(text, pos, found)
        num_blanks = found - end
        if num_blanks >= MAX_BLANKS:
            end += num_blanks - num_blanks % MAX_BLANKS
        self._emit_plain(text[pos:end])
        if not literal:
            self._pending = text[end:]
            return len(text)
        behind = found + len(literal)
        self._act(triggers.texts.meanings[literal], text[end:behind], literal)
        return behind

    def _text_at_border(self, text: str, pos: int) -> int:
        first = skip_blanks(text, pos)
        if self._border in (_Border.DELIMITER, _Border.LABEL):
            self._drop(first - pos)
            pos = first
            if self._border is _Border.LABEL and first < len(text):
                return self._label(text, first)
        elif first - pos >= MAX_BLANKS:
            self._border = _Border.NONE
            return pos
        if first == len(text):
            self._pending = text[pos:]
            return first
        triggers = self._triggers
        literal = triggers.texts.match(text, first)
        if literal:
            behind = first + len(literal)
            self._act(triggers.texts.meanings[literal], text[pos:behind], literal)
            return behind
        if not self._is_final and triggers.texts.begins(text, first):
            self._pending = text[pos:]
            return len(text)
        for scan in triggers.scans:
            if scan.first_chars is None or text[first] in scan.first_chars:
                self._section_has_calls = False
                self._hold(text[pos:first])
                self._enter_scan(scan)
                return first
        self._border = _Border.NONE
        return pos

    def _label(self, text: str, pos: int) -> int:
        """Read the label that may stand at the start of reasoning; return the position behind
        it.
        """
        reasoning = self._tables.format.reasoning
        assert reasoning is not None
        label, end = reasoning.label, pos + len(reasoning.label)
        if len(text) <= end and label.startswith(text[pos:]) and not self._is_final:
            self._pending = text[pos:]
            return len(text)
        self._border = _Border.DELIMITER
        if not text.startswith(label, pos) or text[end : end + 1] not in ("", *BLANKS):
            return pos
        self._drop(len(label))
        return end

    def _act(self, action: PlaceAction, text: str, literal: str) -> None:
        """Carry out the action of the delimiter `literal`. text: the delimiter and the blanks
        before it.
        """
        match action.move:
            case Move.OPEN_SECTION:
                self._section_has_calls = self._failed_at != 0
                self._follow(Branch(action.node), text)
                return
            case Move.CLOSE_CALL:
                self._section_has_calls = True
                self._follow(Branch(action.node, closes=True), text)
                return
            case Move.OPEN_HEADER:
                self._section_has_calls = False
                self._state = _State.HEADER
                self._hold(text)
                return
            case Move.BEGIN_REASONING:
                self.is_reasoning = True
                reasoning = self._tables.format.reasoning
                if reasoning is not None and reasoning.label:
                    self._drop(len(text))
                    self._border = _Border.LABEL
                    return
            case Move.END_REASONING | Move.END_MESSAGE:
                self._end_reasoning(len(text) - len(literal))
        self._drop(len(text))
        self._border = _Border.DELIMITER

    def _end_reasoning(self, num_chars: int) -> None:
        """Reasoning ends, if it is open, `num_chars` behind what is decided."""
        if self.is_reasoning:
            self.reasoning_end = self.num_decided + num_chars
        self.is_reasoning = False

    # Headers of messages in channels

    def _header_text(self, text: str, pos: int) -> int:
        literals, _ = self._headers
        found, literal = literals.find(text, pos, self._is_final)
        room = MAX_HEADER_CHARS - self._num_held
        if found - pos > room:
            self._hold(text[pos : pos + room])
            self._fail()
            return pos + room
        self._hold(text[pos:found])
        if literal:
            taken = self._header_delimiter(literals.meanings[literal], literal)
            return found + len(literal) if taken else found
        self._pending = text[found:]
        return len(text)

    def _header_delimiter(self, delimiter: Delimiter | None, literal: str) -> bool:
        channels = self._tables.format.channels
        assert channels is not None
        if delimiter == channels.message:
            self._hold(literal)
            self._end_header(parse_header("".join(self._held), channels), channels)
            return True
        if delimiter is None or delimiter not in (channels.channel, channels.constrain):
            self._fail()
            return False
        self._hold(literal)
        return True

    def _end_header(self, header: ChannelHeader, channels: ChannelFormat) -> None:
        name = header.recipient.removeprefix(channels.function_prefix)
        if name != header.recipient:
            if self._reads_calls and self._is_allowed(name):
                self._name = name
                self._arrive(self._graph.openings[0], closes=False)
            else:
                self._fail()
            return
        self._drop_held()
        self.is_reasoning = header.channel in channels.reasoning
        self._state = _State.PLAIN
        self._border = _Border.DELIMITER
        self._failed_at = 0

    # Between two elements

    def _text_between(self, text: str, pos: int) -> int:
        node = self._graph.nodes[self._node]
        first = skip_blanks(text, pos)
        if first - pos < MAX_BLANKS:
            literal = first < len(text) and node.texts.match(text, first)
            if literal:
                behind = first + len(literal)
                self._follow(node.texts.meanings[literal], text[pos:behind])
                return behind
            if first == len(text) or (not self._is_final and node.texts.begins(text, first)):
                self._pending = text[pos:]
                return len(text)
            for scan in node.scans:
                if scan.first_chars is None or text[first] in scan.first_chars:
                    self._hold(text[pos:first])
                    self._enter_scan(scan)
                    return first
        self._fail()
        return pos

    def _follow(self, branch: Branch, text: str) -> None:
        """A literal of the section was read; `text`: it and the blanks before it."""
        if branch.is_empty_call:
            if not self._begin(self._name, self._call_id):
                self._fail()
                self._emit_plain(text)
                return
            self._emit(EventKind.CALL_ARGUMENTS, "{}", 0)
            self._end()
        self._hold(text)
        self._arrive(branch.target, branch.closes)

    def _arrive(self, node: int, closes: bool) -> None:
        if closes or node == END:
            self._drop_held()
        self._scan = self._scanner = None
        self._node = node
        if node == END:
            self._state = _State.PLAIN
            self._border = _Border.DELIMITER
            self._failed_at = 0
        else:
            self._state = _State.BETWEEN

    def _fail(self) -> None:
        """Give up the section that was being read: it breaks off, or is none after all."""
        if self._state is _State.PLAIN:
            return
        scan, scanner = self._scan, self._scanner
        node = scan.recovery if scan else self._node
        if self._has_begun:
            assert scanner is not None
            if rest := scanner.break_off():
                self._emit(EventKind.CALL_ARGUMENTS, rest, self._num_held)
                self._forget_held()
            self._has_begun = False
            self._num_calls += 1
            self._section_has_calls = True
            self._border = _Border.NONE
        else:
            self._border = _Border.NONE if self._num_held else _Border.DELIMITER
        self._failed_at = node if self._section_has_calls else 0
        self._state = _State.PLAIN
        self._scan = self._scanner = None
        text = "".join(self._held)
        self._forget_held()
        self._emit_plain(text)
        self._name = self._call_id = ""

    # Scanners

    def _enter_scan(self, scan: Scan) -> None:
        self._state = _State.SCAN
        self._scan = scan
        tables = self._tables
        context = ScanContext(self._name, self._tools, tables.tokens, tables.unquotable)
        self._scanner = make_scanner(scan.element, context)

    def _scanned_text(self, text: str, pos: int) -> int:
        assert self._scanner is not None
        room = MAX_HELD_CHARS - self._num_held
        if not self._has_begun and room < len(text) - pos:
            if room <= 0:
                self._fail()
                return pos
            text = text[: pos + room]
        end, status = self._scanner.feed(text, pos)
        self._scanned(text[pos:end], status)
        return end

    def _scanned_delimiter(self, literal: str) -> bool:
        scanner = self._scanner
        assert scanner is not None
        if scanner.string_hazards is not None and literal not in self._tables.unquotable:
            # the word `<think>` within an argument, as its token
            _, status = scanner.feed(literal, 0)
            taken = True
        else:
            taken, status = scanner.feed_delimiter(literal)
        self._scanned(literal if taken else "", status)
        return taken

    def _scanned(self, text: str, status: ScanStatus) -> None:
        scan, scanner = self._scan, self._scanner
        assert scan is not None
        assert scanner is not None
        self._hold(text)
        if status is ScanStatus.BEGIN and not self._begin(
            scanner.name or self._name, scanner.call_id or self._call_id
        ):
            self._fail()
            return
        if self._has_begun:
            self._emit_arguments()
        if status is ScanStatus.FAILED:
            self._fail()
        elif status is ScanStatus.DONE:
            if is_call(scan.element):
                self._end()
                self._arrive(scan.target, closes=True)
                return
            self._name = scanner.name or self._name
            self._call_id = scanner.call_id or self._call_id
            if scanner.name and not self._is_allowed(scanner.name):
                self._fail()
            else:
                self._arrive(scan.target, closes=False)

    def _is_allowed(self, name: str) -> bool:
        if not 0 < len(name) <= MAX_NAME_CHARS or self._num_calls >= MAX_CALLS:
            return False
        return self._tools is None or name in self._tools

    def _begin(self, name: str, call_id: str) -> bool:
        if not self._is_allowed(name):
            return False
        if self._id_source and not call_id:
            call_id = made_call_id(self._id_source, self._num_calls)
        call_id = self._unlike_earlier(call_id)
        self._end_reasoning(0)
        self._emit(EventKind.CALL_BEGINS, name, self._num_held, call_id)
        self._forget_held()
        self._name = name
        self._has_begun = True
        self._section_has_calls = True
        return True

    def _unlike_earlier(self, call_id: str) -> str:
        """The id, unless an earlier call of the answer has it."""
        if not call_id:
            return ""
        given, number = call_id, self._num_calls
        while id_digest(call_id) in self._id_digests:
            if self._id_source:
                call_id = made_call_id(self._id_source, number)
            else:
                call_id = repeated_id(given, number)
            number += 1  # a model may write what is made of an id here
        self._id_digests.append(id_digest(call_id))
        return call_id

    def _end(self) -> None:
        self._emit(EventKind.CALL_ENDS, "", self._num_held)
        self._forget_held()
        self._has_begun = False
        self._num_calls += 1
        self._name = self._call_id = ""

    # What is held and what is given

    def _hold(self, text: str) -> None:
        if text:
            self._held.append(text)
            self._num_held += len(text)

    def _forget_held(self) -> None:
        self._held.clear()
        self._num_held = 0

    def _drop_held(self) -> None:
        self._drop(self._num_held)
        self._forget_held()

    def _drop_pending(self) -> None:
        self._drop(len(self._pending))
        self._pending = ""

    def _drop(self, num_chars: int) -> None:
        self.num_decided += num_chars

    def _emit(self, kind: EventKind, text: str, num_chars: int, call_id: str = "") -> None:
        """An event of a call, made of the next `num_chars` characters."""
        start = self.num_decided
        self.num_decided += num_chars
        event = AnswerEvent(kind, text, self._num_calls, call_id)
        self._pieces.append(LocatedEvent(event, start, self.num_decided))

    def _emit_arguments(self) -> None:
        assert self._scanner is not None
        text = self._scanner.take()
        num_held = self._scanner.num_held
        num_chars = self._num_held - num_held
        if text:
            self._emit(EventKind.CALL_ARGUMENTS, text, num_chars)
        else:
            self._drop(num_chars)
        if num_chars:
            tail = "".join(self._held)[num_chars:] if num_held else ""
            self._forget_held()
            self._hold(tail)

    def _emit_plain(self, text: str) -> None:
        if text:
            start = self.num_decided
            self.num_decided += len(text)
            text = text[max(0, -start) :]  # without what the prompt has of it
            if text:
                kind = EventKind.REASONING if self.is_reasoning else EventKind.CONTENT
                piece = LocatedEvent(AnswerEvent(kind, text), max(0, start), self.num_decided)
                self._pieces.append(piece)

    def _take(self) -> list[LocatedEvent]:
        pieces = self._pieces
        self._pieces = []
        return pieces

    # States

    def save(self, num_calls: int) -> bytes:
        """The state, as if so many calls had been there."""
        assert not self._num_held
        assert not self._pending
        scanning = self._scan is not None and self._scanner is not None
        return msgspec.msgpack.encode(
            [
                self.is_reasoning,
                int(self._border),
                self._failed_at,
                num_calls,
                self._section_has_calls,
                self._name,
                self._node,
                int(self._state),
                self._graph.scans.index(self._scan) if scanning else 0,
                self._scanner.save() if scanning and self._scanner else [],
                self._id_digests if num_calls else [],
                [],
            ]
        )

    def _load(self, state: bytes) -> None:
        (
            self.is_reasoning,
            border,
            self._failed_at,
            self._num_calls,
            self._section_has_calls,
            self._name,
            self._node,
            state_number,
            scan,
            saved,
            self._id_digests,
            replayed,
        ) = msgspec.msgpack.decode(state)
        self._border = _Border(border)
        self._state = _State(state_number)
        if self._state is _State.SCAN:
            self._enter_scan(self._graph.scans[scan])
            assert self._scanner is not None
            self._scanner.load(saved)
            self._has_begun = True
        self._replay(replayed)

    def _replay(self, items: list[str | int]) -> None:
        """The end of the prompt, which the answer continues: of its events, those of a call that it
        leaves open are the answer's.
        """
        literals = self._tables.literals
        num_chars = sum(len(item if isinstance(item, str) else literals[item]) for item in items)
        self.num_fed = self.num_decided = -num_chars
        pieces: list[LocatedEvent] = []
        for item in items:
            pieces += self.feed(item) if isinstance(item, str) else self.feed_delimiter(item)
        self._pieces = [
            LocatedEvent(piece.event, 0, 0)
            for piece in pieces
            if piece.event.kind not in (EventKind.CONTENT, EventKind.REASONING)
        ]


def _rstrip(text: str, start: int, end: int) -> int:
    """The position at which the blanks before `end` begin."""
    while end > start and text[end - 1] in BLANKS:
        end -= 1
    return end
