"""Messages between a worker and its tokenizer process."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from slipstream_ipc.messages.answer import AnswerOptions, AnswerSettings, ReasoningIds
from slipstream_ipc.messages.fields import LeftOut, TurnChanges
from slipstream_ipc.messages.media import MediaSize
from slipstream_ipc.messages.request import ChatMessage, TemplateOptions
from slipstream_ipc.messages.shared import Fault

# what structured output may have around it: blanks before JSON, calls that begin with a token alone
# beside a grammar of the request's own
StructuredForm = Literal["json", "grammar", "other"]


class Render(Struct, array_like=True, frozen=True):
    """Tokenize a prompt, `text` or `messages`, if either is given, the bad words, and a prediction.

    If `token_ids` are given, detokenize them instead; if `texts` are, tokenize each of them.
    """

    key: int
    text: str | None = None
    messages: tuple[ChatMessage, ...] = ()
    bad_words: tuple[str, ...] = ()
    template: TemplateOptions = TemplateOptions()  # of `messages`
    add_special_tokens: bool | None = None  # None: added to a text, not to messages
    with_strings: bool = False
    is_query: bool = False  # the answer goes to a client, in one message of bounded size
    token_ids: bytes | None = None
    skip_special_tokens: bool = False
    # a longer prompt cannot be run or returned, so tokenizing may stop there; 0: no limit
    max_tokens: int = 0
    answer: AnswerOptions | None = None  # of `messages`; as in Submit
    structured: StructuredForm | None = None  # the answer is to be structured output
    prediction: str = ""  # of the answer, to be tokenised as well
    texts: tuple[str, ...] = ()  # as in Embed, and the two below
    truncate_to: int = 0
    truncates_left: bool = False
    media: tuple[MediaSize, ...] = ()  # of `messages`, whose ids get their placeholders
    pairs: tuple[str, ...] = ()  # as in Embed, and what is below
    max_first: int = 0
    max_second: int = 0
    template_kwargs: str = ""
    needs_template: bool = False  # of pairs; as in PoolingCard


class Rendered(Struct, array_like=True, frozen=True, tag=0):
    """The ids of a prompt, or a fault."""

    key: int
    token_ids: bytes = b""
    fault: Fault | None = None
    bad_word_ids: bytes = b""  # as in Admit
    bad_word_counts: bytes = b""
    strings: tuple[str, ...] = ()
    text: str = ""
    answer: AnswerSettings | None = None  # None also where the model's format is unknown
    call_grammar: str = ""  # of an answer that is to be calls; empty: its form is free
    reasoning: ReasoningIds | None = None  # None also where it is not followed by ids
    frame: str = ""  # as in Admit
    changed_turns: TurnChanges = ()  # as in Admit
    formats: LeftOut = ()  # paths of custom tools' formats, which only `call_grammar` can enforce
    is_for_formats: bool = False  # nothing else asks for `call_grammar`
    prediction_ids: bytes = b""  # as in Admit
    counts: bytes = b""  # of `texts`: tokens of each, a u32 column
    index: int | None = None  # among `texts`, of the one that the fault is about
    first_lens: bytes = b""  # as in Pool


class TokenizerReady(Struct, array_like=True, frozen=True, tag=1):
    """The tokenizer is loaded. `table_path` is "" if its decoder does not compile."""

    tokenizer_path: str  # its tokenizer.json
    table_path: str
    why_not: str = ""
    error: str = ""  # why it could not be loaded at all
    pid: int = 0  # of the tokenizer process
    answer_format: str = ""  # its name in the table of formats; empty: unknown
    delimiter_ids: dict[str, int] = {}  # literals of the table that are one token here
    eos_token_ids: tuple[int, ...] = ()  # by which tokenizer and template end an answer
    why_no_images: str = ""  # why images have no place in a prompt; empty: they have


FromTokenizerProcess = Rendered | TokenizerReady
