"""The numbers of one end of a link: what is sent, received, acknowledged and owed.

They fill in and judge the numbers of a `Frame`.

- Every attach has a new epoch; a frame of another epoch is stale.
- Frames with a body for the streams are numbered 1, 2, 3 …; at most `window` of them are
  unacknowledged, which is the sender's credit. All others (acknowledgements, pings, the handshake)
  need no credit and repeat the last number sent, so that a lost tail shows as a gap too.
- Acknowledgements are cumulative. The receipt of a numbered frame is kept until it is acknowledged.
- A gap ends the link: the attaching end attaches anew and resends from positions, not from a queue.

Every message passes `LinkNumbers` at both ends, so it is in C (`link_numbers.c`).
"""

from __future__ import annotations

from enum import Enum
from typing import get_args

from slipstream_ipc._native import LinkNumbers, prepare_link_numbers
from slipstream_ipc.messages import Control, Frame, Load

__all__ = ["UNNUMBERED", "LinkNumbers", "LinkVerdict"]

UNNUMBERED = frozenset({*get_args(Control), Load, type(None)})  # types of bodies


class LinkVerdict(Enum):
    """The action for a received frame."""

    DELIVER = "deliver"
    IGNORE = "ignore"  # stale or a duplicate
    GAP = "gap"  # a frame was lost: attach anew


prepare_link_numbers(Frame, UNNUMBERED, (LinkVerdict.DELIVER, LinkVerdict.IGNORE, LinkVerdict.GAP))
