"""The header of a message in a channel."""

from __future__ import annotations

from typing import NamedTuple

from slipstream_ipc.formats.answer_format import ChannelFormat

MAX_HEADER_CHARS = 1024


class ChannelHeader(NamedTuple):
    """channel: its name; recipient: empty for the user."""

    channel: str
    recipient: str


def parse_header(text: str, channels: ChannelFormat) -> ChannelHeader:
    """`text`: from the start of the message up to its text, with the delimiters spelled out.

    The recipient may stand before or after the channel; what it is constrained to is ignored.
    """
    for literal in (channels.channel, channels.constrain, channels.message):
        text = text.replace(literal.literal, f" {literal.literal} ")
    words = text.split()
    channel = recipient = last = ""
    for word in words:
        if last == channels.channel.literal:
            channel = word
        elif word.startswith("to=") and last != channels.constrain.literal:
            recipient = word.removeprefix("to=")
        last = word
    return ChannelHeader(channel, recipient)
