"""Every message between Slipstream's processes; types alone, no logic. A module to a hop.

Rules:
- Immutable msgspec Structs, arrays on the wire, one tagged union per direction of each hop.
- Fields are appended with defaults, never reordered; PROTOCOL_VERSION changes when that fails.
- Whatever there is one of per request and step travels as a column: the bytes of a little-endian
  numpy array, u32 unless its comment says otherwise. `slipstream_ipc.columns` checks and reads
  them.
- Every number has a range and every list a length: the decoder refuses what lies outside
  (`slipstream_ipc.codec` says which field it was). What is allowed inside is checked elsewhere:
  `slipstream_ipc.params` for what callers give.

A hop has an attaching end (worker towards core, client towards worker) and an accepting end.
"""

from __future__ import annotations

from slipstream_ipc.messages.attaching import (
    PROTOCOL_VERSION,
    Control,
    Hello,
    Ping,
    Reattach,
    Refusal,
    Starting,
    Welcome,
)
from slipstream_ipc.messages.client_worker import (
    Abort,
    Accepted,
    Cancel,
    Cancelled,
    ClientToWorker,
    Deltas,
    Detokenize,
    Detokenized,
    Goodbye,
    OtherAnswer,
    PromptLogprobs,
    Rejected,
    Resume,
    Submit,
    Superseded,
    Tokenize,
    Tokenized,
    UnknownStreams,
    WorkerToClient,
)
from slipstream_ipc.messages.fields import (
    MAX_CANCELLED,
    MAX_CHAT_TURNS,
    MAX_IDENTITY_BYTES,
    MAX_LABEL_CHARS,
    MAX_OTHERS,
    MAX_TEMPLATE_CHARS,
    MAX_TOOL_CALLS,
    CancelledState,
    ErrorCode,
    FinishReason,
)
from slipstream_ipc.messages.grammar_process import GrammarProcessConfig, Tried
from slipstream_ipc.messages.prompt_process import (
    FromPromptProcess,
    PromptBeat,
    PromptReady,
    Render,
    Rendered,
)
from slipstream_ipc.messages.requests import (
    ChatMessage,
    FunctionCall,
    SamplingOptions,
    SamplingParams,
    StructuredOptions,
    StructuredOutputs,
    TemplateOptions,
    ToolCall,
)
from slipstream_ipc.messages.shared import (
    End,
    Fault,
    Frame,
    LogprobColumns,
    ModelCard,
    SamplingDefaults,
)
from slipstream_ipc.messages.status import State, Status
from slipstream_ipc.messages.worker_core import (
    Admit,
    Admitted,
    CoreToWorker,
    Forget,
    Forgotten,
    Positions,
    PromptScores,
    Refused,
    Registered,
    Report,
    Step,
    Suspects,
    SyncDone,
    Unknown,
    Withdraw,
    WorkerToCore,
)

__all__ = [
    "MAX_CANCELLED",
    "MAX_CHAT_TURNS",
    "MAX_IDENTITY_BYTES",
    "MAX_LABEL_CHARS",
    "MAX_OTHERS",
    "MAX_TEMPLATE_CHARS",
    "MAX_TOOL_CALLS",
    "PROTOCOL_VERSION",
    "Abort",
    "Accepted",
    "Admit",
    "Admitted",
    "Cancel",
    "Cancelled",
    "CancelledState",
    "ChatMessage",
    "ClientToWorker",
    "Control",
    "CoreToWorker",
    "Deltas",
    "Detokenize",
    "Detokenized",
    "End",
    "ErrorCode",
    "Fault",
    "FinishReason",
    "Forget",
    "Forgotten",
    "Frame",
    "FromPromptProcess",
    "FunctionCall",
    "Goodbye",
    "GrammarProcessConfig",
    "Hello",
    "LogprobColumns",
    "ModelCard",
    "OtherAnswer",
    "Ping",
    "Positions",
    "PromptBeat",
    "PromptLogprobs",
    "PromptReady",
    "PromptScores",
    "Reattach",
    "Refusal",
    "Refused",
    "Registered",
    "Rejected",
    "Render",
    "Rendered",
    "Report",
    "Resume",
    "SamplingDefaults",
    "SamplingOptions",
    "SamplingParams",
    "Starting",
    "State",
    "Status",
    "Step",
    "StructuredOptions",
    "StructuredOutputs",
    "Submit",
    "Superseded",
    "Suspects",
    "SyncDone",
    "TemplateOptions",
    "Tokenize",
    "Tokenized",
    "ToolCall",
    "Tried",
    "Unknown",
    "UnknownStreams",
    "Welcome",
    "Withdraw",
    "WorkerToClient",
    "WorkerToCore",
]
