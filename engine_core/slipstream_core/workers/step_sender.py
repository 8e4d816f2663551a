"""The tokens that a step gave its rows are sent in C (`step_sender.c`): written as a frame, counted
and sent in one call, in which acknowledgements of earlier steps are taken in, too.

`StepSender` sends what `WorkerSender` would send, to the byte, or leaves the step alone.
"""

from __future__ import annotations

from slipstream_core._native import SentRows, StepSender

__all__ = ["AWAITED", "RECEIPTS", "SENT", "SentRows", "StepSender"]

# what becomes of a step: 0 if it was not sent, else SENT, with AWAITED if its check is awaited, and
# RECEIPTS if the link has receipts left to be taken
SENT, AWAITED, RECEIPTS = 1, 2, 4
