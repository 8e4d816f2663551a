"""The error of a model that cannot be served as asked."""

from __future__ import annotations


class ModelLoadError(ValueError):
    """A model cannot be served as asked: what was given, what is wrong, what would do."""

    def __init__(self, model: str, problem: str) -> None:
        super().__init__(f"cannot load the model {model!r}: {problem}")
        self.model = model


def brief(error: Exception) -> str:
    """An error's first line: transformers' messages run to paragraphs."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
