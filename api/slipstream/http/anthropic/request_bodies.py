"""Types of the bodies of POST /v1/messages and /v1/messages/count_tokens.

Fields are supported, `Ignored` or `Unsupported` as in `openai.request_bodies`, and unknown ones are
ignored and named, or refused, in the same way.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from slipstream.http.openai.request_bodies import Ignored, Unsupported


class InputBlock(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="block"
):
    """A block of a message's content."""

    cache_control: Ignored = None  # every prompt is cached


class TextBlock(InputBlock, frozen=True, kw_only=True, tag="text"):
    """Text."""

    text: str
    citations: Ignored = None


class ThinkingBlock(InputBlock, frozen=True, kw_only=True, tag="thinking"):
    """An assistant's reasoning."""

    thinking: str
    signature: Ignored = None


class RedactedThinkingBlock(InputBlock, frozen=True, kw_only=True, tag="redacted_thinking"):
    """Reasoning that only its author can read: left out."""

    data: Ignored = None


class ToolUseBlock(InputBlock, frozen=True, kw_only=True, tag="tool_use"):
    """A call of a tool, in an assistant's turn."""

    id: str
    name: str
    input: dict[str, Any]
    caller: Ignored = None


class ImageBlock(InputBlock, frozen=True, kw_only=True, tag="image"):
    """An image. source: an `ImageSource`."""

    source: dict[str, Any] | None = None


class ImageSource(Struct, frozen=True, tag_field="type", tag="base64"):
    """An image's file in base64. media_type: without effect: the file's first bytes say it."""

    data: str
    media_type: str = ""


class DocumentBlock(InputBlock, frozen=True, kw_only=True, tag="document"):
    """A document: text, or refused. source: a `DocumentSource` where it is text."""

    source: dict[str, Any] | None = None
    title: str | None = None
    context: str | None = None
    citations: Ignored = None  # answers have none


class TextSource(Struct, frozen=True, tag_field="type", tag="text"):
    """A document that is text."""

    data: str
    media_type: Literal["text/plain"] = "text/plain"


class PartsSource(Struct, frozen=True, tag_field="type", tag="content"):
    """A document of blocks of text."""

    content: str | tuple[TextBlock, ...]


DocumentSource = TextSource | PartsSource


class SearchResultBlock(InputBlock, frozen=True, kw_only=True, tag="search_result"):
    """Text that a search found."""

    source: str
    title: str
    content: tuple[TextBlock, ...]
    citations: Ignored = None  # answers have none


class ToolReferenceBlock(InputBlock, frozen=True, kw_only=True, tag="tool_reference"):
    """A tool that a search for tools found: its name, as all tools are shown from the start."""

    tool_name: str


ResultContent = TextBlock | SearchResultBlock | ToolReferenceBlock | ImageBlock | DocumentBlock


class ToolResultBlock(InputBlock, frozen=True, kw_only=True, tag="tool_result"):
    """The result of a tool, in a user's turn."""

    tool_use_id: str
    content: str | tuple[ResultContent, ...] | None = None
    is_error: bool | None = None


ContentBlock = (
    TextBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | SearchResultBlock
    | ImageBlock
    | DocumentBlock
)


class Turn(Struct, frozen=True, forbid_unknown_fields=True):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | tuple[ContentBlock, ...]


class OfferedTool(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool of the client. type: `custom`; others are tools of Anthropic's, and refused."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None  # required of a tool of the client
    type: str | None = None
    strict: bool | None = None

    allowed_callers: Ignored = None
    cache_control: Ignored = None
    defer_loading: Ignored = None
    eager_input_streaming: Ignored = None
    input_examples: Ignored = None


class MessagesToolChoice(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The choice of tools to call. name: for type `tool`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The setting of reasoning before the answer."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None  # a target: a limit where the model's format can keep one
    display: Ignored = None


class OutputFormat(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The JSON Schema that the answer has to match."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The form of the answer. effort: given to the chat template as `reasoning_effort`."""

    effort: str | None = None
    format: OutputFormat | None = None


class PromptFields(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that the prompt is made of; null means the default."""

    model: str
    messages: tuple[Turn, ...]
    system: str | tuple[TextBlock, ...] | None = None
    tools: tuple[OfferedTool, ...] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    cache_control: Ignored = None
    context_management: Ignored = None  # the client's history is taken as it is

    mcp_servers: Unsupported = None


class CountTokensRequest(PromptFields, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens."""


class MessagesRequest(PromptFields, frozen=True, kw_only=True):
    """POST /v1/messages."""

    max_tokens: int
    stop_sequences: tuple[str, ...] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    thinking_token_budget: int | None = None  # vLLM's: a limit, or a 400

    inference_geo: Ignored = None
    metadata: Ignored = None
    service_tier: Ignored = None
    speed: Ignored = None

    container: Unsupported = None
    thread: Any = None  # a conversation that the server holds: refused (see `chat_request`)
