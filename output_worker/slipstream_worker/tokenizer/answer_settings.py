"""The settings by which the worker's reader reads the answer to a chat.

It is a function of the request alone, so that a worker that renders a prompt again gets the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from slipstream_ipc.errors import BadRequest, Summary
from slipstream_ipc.formats.answer_format import (
    AnswerFormat,
    delimiters,
    digest,
    has_nested_elements,
    spelled_literals,
)
from slipstream_ipc.formats.tool_types import decode_tool_types, encode_tool_types
from slipstream_ipc.messages import AnswerOptions, AnswerSettings, ReasoningIds, StructuredForm
from slipstream_ipc.messages.answer import MAX_ANSWER_TOOLS_CHARS
from slipstream_worker.formats.call_grammar import (
    Opened,
    call_grammar,
    frame_beside_calls,
    free_call_grammar,
    has_format,
    refusal,
    structured_frame,
    tagged_frame,
)
from slipstream_worker.formats.channel_grammar import ROLE
from slipstream_worker.formats.compiled_format import CompiledFormat, compile_format
from slipstream_worker.formats.delimiter_tables import Place
from slipstream_worker.formats.property_types import Looks, property_types
from slipstream_worker.formats.reasoning_ids import (
    Spellings,
    channel_headers,
    find_spellings,
    reasoning_ids,
)
from slipstream_worker.formats.start_state import start_state
from slipstream_worker.tokenizer.open_turn import split_at

_BLANKS = ("\n", "\n\n", " ", "\r\n", "\t")  # that models write before they reason


class ReadFormat(NamedTuple):
    """The format of a model's answers, and what follows from its vocabulary.

    literals: by which an answer that has begun is found in a prompt. blank_ids: of tokens that are
    white space.
    """

    format: AnswerFormat
    compiled: CompiledFormat
    digest: bytes
    literals: tuple[str, ...]
    spellings: Spellings
    blank_ids: tuple[int, ...] = ()

    def settings(
        self,
        options: AnswerOptions,
        tools: Sequence[Mapping[str, Any]] | None,
        opened: str,
    ) -> AnswerSettings:
        """opened: what the prompt has of the answer, see `open_turn`. Without tools nothing is a
        call.
        """
        if not tools:
            options = replace(options, tool_choice="none")
        known = compact_tools(tools or (), is_nested=has_nested_elements(self.format))
        pieces = split_at(opened, self.spellings.token_ids)
        start = start_state(self.compiled, pieces, decode_tool_types(known), options)
        return AnswerSettings(self.format.name, self.digest, start, known, options)

    def reasoning_ids(self, settings: AnswerSettings, opened: str) -> ReasoningIds | None:
        """The ids by which the core can follow the answer's reasoning; None if it cannot."""
        return reasoning_ids(
            self.format,
            self.spellings,
            self.blank_ids,
            self._place(settings),
            is_start=not opened.strip(),
        )

    def call_grammar(
        self,
        settings: AnswerSettings,
        tools: Sequence[Mapping[str, Any]],
        opened: str,
        *,
        is_followed: bool,
    ) -> str:
        """The grammar of an answer that has to be calls; is_followed: behind its reasoning. Raises
        BadRequest.
        """
        options = settings.options
        found = self._opened(settings, opened)
        if found is None:
            raise refusal(options.tool_choice, "a turn that has begun a call")
        return call_grammar(
            self.format,
            self.spellings.token_ids,
            tools,
            options.tool_choice,
            is_parallel=options.parallel_tool_calls,
            opened=found,
            is_followed=is_followed,
        )

    def free_calls(
        self,
        settings: AnswerSettings,
        tools: Sequence[Mapping[str, Any]],
        opened: str,
        reasoning: ReasoningIds | None,
    ) -> tuple[str, ReasoningIds | None]:
        """The grammar of the calls of an answer that need have none, and how the core follows it;
        empty where nothing asks for one, or the core cannot follow it. Raises BadRequest.
        """
        options = settings.options
        is_asked = asks_for_grammar(options, tools)
        has_formats = any(has_format(each["function"]) for each in tools)
        if options.tool_choice != "auto" or not (is_asked or has_formats):
            return "", reasoning
        found = self._opened(settings, opened)
        if found is None or (reasoning is None and self.format.reasoning is not None):
            return "", None
        grammar, triggers = free_call_grammar(
            self.format,
            self.spellings,
            tools,
            is_parallel=options.parallel_tool_calls,
            opened=found,
        )
        if not triggers:
            return grammar, reasoning
        if reasoning is None:
            reasoning = ReasoningIds("content", begins=(), ends=())
        longer = replace(reasoning.sequences, triggers=self.spellings.longer(triggers))
        return grammar, replace(
            reasoning,
            triggers=self.spellings.ids(triggers),
            is_single=not options.parallel_tool_calls,
            sequences=longer,
        )

    def structured_frame(
        self,
        settings: AnswerSettings,
        tools: Sequence[Mapping[str, Any]],
        opened: str,
        reasoning: ReasoningIds | None,
        form: StructuredForm,
    ) -> tuple[str, ReasoningIds | None]:
        """The frame of structured output of this form (see Admit): beside calls, in messages of
        channels, between tags; empty if it stands alone. And the ids by which the core follows it.
        Raises BadRequest.
        """
        channels, token_ids = self.format.channels, self.spellings.token_ids
        found = self._opened(settings, opened)
        if channels is None:
            frame = ""
            if tools and found is not None:
                frame = frame_beside_calls(
                    self.format,
                    token_ids,
                    tools,
                    is_parallel=settings.options.parallel_tool_calls,
                    opened=found,
                    is_followed=reasoning is not None,
                    form=form,
                )
            if not frame:
                frame, reasoning = tagged_frame(self.format, token_ids), _without_calls(reasoning)
            return frame, reasoning
        if found is None:
            given = Summary("a turn that has begun a call, or the header of a message")
            raise BadRequest(
                "structured_outputs", given, "one that has not, in this model's format"
            )
        ends = tuple(each.literal for each in channels.ends)
        is_message_next = found.is_start or found.is_header or opened.rstrip().endswith(ends)
        if not (is_message_next or found.is_reasoning):
            return "", reasoning
        return structured_frame(channels, token_ids, tools, found), reasoning

    def _opened(self, settings: AnswerSettings, opened: str) -> Opened | None:
        """The beginning of the answer that the prompt contains; None: a part of a call."""
        place, channels = self._place(settings), self.format.channels
        if channels is not None and opened.rstrip().endswith(channels.start.literal + ROLE):
            return Opened(is_header=True)
        if place is None:
            return None
        return Opened(not opened.strip(), place.is_reasoning, place.at_border or not opened)

    def _place(self, settings: AnswerSettings) -> Place | None:
        """The place of the answer at which the prompt ends; None: within a call."""
        types = decode_tool_types(settings.tools)
        return self.compiled.reader(types, settings.options, settings.start).place


def asks_for_grammar(options: AnswerOptions, tools: Sequence[Mapping[str, Any]]) -> bool:
    """True if calls of an answer that need have none must have a grammar; if none asks for one, it
    is for formats of custom tools at most.
    """
    is_strict = any(each["function"].get("strict") is True for each in tools)
    return is_strict or not options.parallel_tool_calls


def _without_calls(reasoning: ReasoningIds | None) -> ReasoningIds | None:
    """The ids of an answer in which there can be no calls."""
    if reasoning is None:
        return None
    return replace(reasoning, calls=(), sequences=replace(reasoning.sequences, calls=()))


def read_format(
    found: AnswerFormat,
    added_tokens: Mapping[str, int],
    encode: Callable[[str], Sequence[int]] | None = None,
    id_of: Callable[[str], int | None] = lambda _: None,
) -> ReadFormat:
    """The format, for a vocabulary with these added tokens. encode: a text to its ids. id_of: the
    id of the token with exactly this text.
    """
    literals = tuple(dict.fromkeys(each.literal for each in delimiters(found)))
    token_ids = {each: added_tokens[each] for each in literals if each in added_tokens}
    blank_ids = sorted({each for blanks in _BLANKS for each in encode(blanks)}) if encode else ()
    spellings = Spellings(token_ids)
    if encode:
        headers = channel_headers(found.channels)
        spellings = find_spellings((*literals, *headers), token_ids, encode, id_of)
    return ReadFormat(
        found,
        compile_format(found, token_ids),
        digest(found),
        tuple(each for each in literals if each not in spelled_literals(found)),
        spellings,
        tuple(blank_ids),
    )


def compact_tools(
    tools: Sequence[Mapping[str, Any]],
    max_chars: int = MAX_ANSWER_TOOLS_CHARS,
    *,
    is_nested: bool = False,
) -> str:
    """The tools' names and the types of their properties, for `AnswerSettings`. is_nested: also
    those of properties of properties, if they are not too long.

    Where that is too long, the tools with the longest types have none; empty (the tools are
    unknown) where the names alone are too long.
    """
    if not tools:
        return ""
    looks = Looks()
    types = {
        each["function"]["name"]: property_types(each["function"], is_nested=is_nested, looks=looks)
        for each in tools
    }
    text = encode_tool_types(types)
    num_chars = len(text)
    if num_chars <= max_chars:
        return text
    if is_nested:
        return compact_tools(tools, max_chars)
    sizes = {name: len(encode_tool_types({"": each})) for name, each in types.items()}
    for name in sorted(types, key=sizes.__getitem__, reverse=True):
        if num_chars <= max_chars:
            break
        num_chars -= sizes[name] - len(encode_tool_types({"": {}}))
        types[name] = {}
    return encode_tool_types(types) if num_chars <= max_chars else ""
