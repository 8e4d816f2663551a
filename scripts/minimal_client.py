"""Slipstream's client protocol (PROTOCOL.md) in 30 lines: streams one completion, greedily.

usage: python minimal_client.py ADDRESS PROMPT [MAX_TOKENS]      (needs pyzmq and msgspec)
"""

import secrets
import sys

import msgspec
import zmq

address, prompt, max_tokens = (*sys.argv[1:], "64")[:3]
socket = zmq.Context().socket(zmq.DEALER)
socket.setsockopt(zmq.ROUTING_ID, secrets.token_bytes(16))
socket.connect(address)
received = 0


def send(seq: int, body: object) -> None:
    socket.send(msgspec.msgpack.encode((1, seq, received, body)))  # in epoch 1


send(0, (0, 2, secrets.token_bytes(16), True))  # Hello: version, identity, fresh
while True:
    _, seq, _, body = msgspec.msgpack.decode(socket.recv())
    tag = body[0] if body else None
    if tag == 1:  # Welcome
        params = {"temperature": 0.0, "max_tokens": int(max_tokens)}
        send(1, (10, 0, secrets.token_bytes(16), params, prompt))  # Submit
    elif tag in (2, 3, 21, 24):  # Reattach, AttachRefused, Rejected, Superseded
        sys.exit(f"refused: {body[1:]}")
    elif tag in (4, 20, 22):  # Ping (which repeats the last number), Accepted, Deltas
        received = seq
        send(1, None)  # acknowledge, and so make room for more
        if tag == 22:
            sys.stdout.write("".join(body[4]))
            sys.stdout.flush()
            if body[7]:  # some entry is its stream's last
                send(2, (13,))  # Goodbye
                sys.exit(0)
