"""Recognises panics of libraries written in Rust.

`tokenizers` panics where another library would raise: some decoders do on an empty token. pyo3
turns a panic into a `PanicException`, which is not an `Exception`: uncaught, one bad request would
end the process, and with it every stream.
"""

from __future__ import annotations

__all__ = ["PanicError", "is_panic"]


class PanicError(RuntimeError):
    """A library panicked on its input."""


def is_panic(error: BaseException) -> bool:
    """True if the exception is a panic. Each library has its own class of this name."""
    return type(error).__name__ == "PanicException"
