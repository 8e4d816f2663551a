"""What a worker and its prompt process say to each other."""

from __future__ import annotations

from msgspec import Struct

from slipstream_ipc.messages.request import ChatMessage, TemplateOptions
from slipstream_ipc.messages.shared import Fault


class Render(Struct, array_like=True, frozen=True):
    """Turn a prompt into token ids; one of `text` and `messages`, or neither. So with bad words.

    Where `token_ids` are given they are turned into their text instead.
    """

    key: int
    text: str | None = None
    messages: tuple[ChatMessage, ...] = ()
    bad_words: tuple[str, ...] = ()
    template: TemplateOptions = TemplateOptions()  # of `messages`
    add_special_tokens: bool | None = None  # None: to a text, not to messages
    with_strings: bool = False
    is_question: bool = False  # its answer goes to a client as it is, and is bounded for that
    token_ids: bytes | None = None
    skip_special_tokens: bool = False
    # more cannot be run, or told: what has them need not be tokenised to its end; 0: any number
    max_tokens: int = 0


class Rendered(Struct, array_like=True, frozen=True, tag=0):
    """The ids of a prompt, or why there are none."""

    key: int
    token_ids: bytes = b""
    fault: Fault | None = None
    bad_word_ids: bytes = b""  # as in Admit
    bad_word_counts: bytes = b""
    strings: tuple[str, ...] = ()
    text: str = ""


class PromptReady(Struct, array_like=True, frozen=True, tag=1):
    """The tokenizer is loaded. `table_path` is "" where its decoder does not compile."""

    tokenizer_path: str  # its tokenizer.json
    table_path: str
    why_not: str = ""
    error: str = ""  # it could not be loaded at all
    pid: int = 0  # of the process that says so


class PromptBeat(Struct, array_like=True, frozen=True, tag=2):
    """The prompt process' loop goes round."""


FromPromptProcess = Rendered | PromptReady | PromptBeat
