"""Steps in which the same rows get a token each, as in the step before, are sent in C
(`plain_step.c`): written as a frame, counted and sent in one call, in which acknowledgements of
earlier ones are taken in, too.

`PlainStepSender` sends what `WorkerSender` would send, to the byte, or leaves the step alone.
"""

from __future__ import annotations

from slipstream_core._native import PlainStepSender

__all__ = ["AWAITED", "RECEIPTS", "SENT", "PlainStepSender"]

# what becomes of a step: 0 if it was not sent, else SENT, with AWAITED if its check is awaited, and
# RECEIPTS if the link has receipts left to be taken
SENT, AWAITED, RECEIPTS = 1, 2, 4
