"""The error raised when a model cannot be served with the given settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from slipstream_ipc.messages import Status


class ModelLoadError(ValueError):
    """A model cannot be served as requested; the message says what is wrong and what would work."""

    def __init__(self, model: str, problem: str) -> None:
        super().__init__(f"cannot load the model {model!r}: {problem}")
        self.model = model


class NoRoomError(ModelLoadError):
    """The memory that is free now does not suffice."""


class RanksMissingError(ModelLoadError):
    """Ranks on other machines have not come, or cannot."""


def load_status(model: str, error: ValueError | MemoryError) -> Status:
    """The status of a process that could not load its model or serve it with its settings."""
    if isinstance(error, MemoryError):
        return Status(error=f"{model} does not fit into memory: {error}")
    if isinstance(error, NoRoomError | RanksMissingError):
        return Status(error=str(error))
    is_hub_id = not model.startswith("/") and ":" not in model
    # a hub may be reached later, and may change
    return Status(error=str(error), is_misconfigured=not is_hub_id)


def brief(error: Exception) -> str:
    """The type and first line of an error: transformers' messages run to paragraphs."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@contextmanager
def compiling(model: str, what: str) -> Iterator[None]:
    """Turn errors into ModelLoadError, except OutOfMemoryError, which the caller handles."""
    import torch  # which not every process that reports such errors needs

    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ModelLoadError(
            model,
            f"its {what} kernels cannot be compiled for this card ({brief(error)}); set native "
            "to false to use torch instead, which is slower",
        ) from error
