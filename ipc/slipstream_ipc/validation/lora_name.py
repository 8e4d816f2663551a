"""The names that adapters may have."""

from __future__ import annotations

from slipstream_ipc.messages import MAX_LORA_NAME_CHARS


def why_no_lora_name(name: str) -> str:
    """The names that are allowed, if this is none of them; else empty."""
    is_one = 1 <= len(name) <= MAX_LORA_NAME_CHARS and not name.endswith("*")
    if is_one and name.isprintable():
        return ""
    return f"a name of 1 to {MAX_LORA_NAME_CHARS} characters, without * at its end"
