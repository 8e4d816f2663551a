"""A step that is one token of each of some rows, written as a frame and sent in one call
(`plain_step.c`), as `Router.send` sends it. Where the C extension is not to be had, `Router.send`
does it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

from slipstream_ipc.columns import UInt32s
from slipstream_ipc.messages import LogprobColumns
from slipstream_ipc.native.extension import MSGPACK_HEADER, load_extension
from slipstream_ipc.transport import link_numbers

# link, write, step, rows (a u32 column), token_ids, logprobs, is_awaited, receipt -> whether it was
# sent: False without credit, or where `write` does not take it
SendPlainStep = Callable[
    [Any, Callable[[bytes], bool], int, bytes, UInt32s, LogprobColumns | None, bool, Any], bool
]


@cache
def native_send_plain_step() -> SendPlainStep | None:
    """`send_plain_step` of the C extension; None where that, or a link in C, is not to be had."""
    numbers = link_numbers.NativeLinkNumbers
    headers = (link_numbers.HEADER, MSGPACK_HEADER)
    native: Any = load_extension("plain_step", Path(__file__).with_name("plain_step.c"), headers)
    if numbers is None or native is None:
        return None
    native.prepare(numbers)
    return cast("SendPlainStep", native.send_plain_step)
