"""The table's entries of tool calls that are JSON objects with the function's name in them. Names
are those of vLLM's tool parsers.
"""

from __future__ import annotations

from slipstream_ipc.formats.answer_format import (
    Blank,
    CallFormat,
    Delimiter,
    JsonCall,
    Section,
    Signature,
)

JSON_CALL_FORMATS = (
    CallFormat(
        name="hermes",
        sections=(
            Section(
                (
                    Delimiter("<tool_call>"),
                    Blank("\n"),
                    JsonCall(),
                    Blank("\n"),
                    Delimiter("</tool_call>"),
                )
            ),
        ),
        quotable=True,
        signatures=(
            Signature(
                in_template=("<tool_call>", "</tool_call>", '"arguments"'),
                not_in_template=("<function=", "<arg_key>"),
            ),
            Signature(
                in_template=("<tool_call>", "</tool_call>", '\\"arguments\\"'),
                not_in_template=("<function=", "<arg_key>"),
            ),
        ),
    ),
)
