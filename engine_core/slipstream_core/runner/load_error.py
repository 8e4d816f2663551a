"""The error raised when a model cannot be served with the given settings."""

from __future__ import annotations


class ModelLoadError(ValueError):
    """A model cannot be served as requested; the message says what is wrong and what would work."""

    def __init__(self, model: str, problem: str) -> None:
        super().__init__(f"cannot load the model {model!r}: {problem}")
        self.model = model


class NoRoomError(ModelLoadError):
    """The memory that is free now does not suffice."""


def brief(error: Exception) -> str:
    """The type and first line of an error: transformers' messages run to paragraphs."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
