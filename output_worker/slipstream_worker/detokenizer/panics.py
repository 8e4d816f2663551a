"""A panic of a library written in Rust: to be told from what ends a process on purpose.

Owns: what a panic is. Does not know: which library, whose request.

`tokenizers` panics where another library would raise: some decoders do on an empty token. pyo3
makes a `PanicException` of it, which is no `Exception`, so that nothing catches it in passing: it
would end the process, and with it every stream, where one request is at fault.
"""

from __future__ import annotations

__all__ = ["PanicError", "is_panic"]


class PanicError(RuntimeError):
    """A library panicked on what it was given."""


def is_panic(error: BaseException) -> bool:
    """Whether it is one, of whichever library: each has a class of its own by this name."""
    return type(error).__name__ == "PanicException"
