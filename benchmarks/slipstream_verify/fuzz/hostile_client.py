"""The messages of a hostile client, about its own streams, other clients' streams and none at all.

Attackers use their own ids and each other's (`shared`); an honest client's ids are only reachable
by guessing, which is tried.
"""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec

_PING, _SUBMIT, _RESUME, _ABORT, _GOODBYE, _RECALL = 4, 10, 11, 12, 13, 19
_NUM_SHARED = 64
_TEMPLATE = ("", "", True, False)
_WORDS = ("In", "Python,", "the", "function", "returns", "é", "漢字", "🙂", "\n", "x" * 40)
_STOPS: tuple[Any, ...] = ("the", (), ("e", "\n"), ("()", "zzz", "a b c"))


class HostileClient:
    """The messages of one client."""

    def __init__(self, random: Random, shared: list[bytes], vocab_size: int) -> None:
        """`shared`: stream ids that all attackers know."""
        self._random = random
        self._shared = shared
        self._vocab_size = vocab_size
        self._next_handle = 0

    def body(self) -> tuple[Any, ...] | None:
        random = self._random
        roll = random.random()
        if roll < 0.16:
            return None
        if roll < 0.24:
            return (_PING,)
        if roll < 0.28:
            number = random.choice((0, 1, 2**32 - 1))
            return (_RECALL, number, self._some_id(), self._scope(), random.random() < 0.3)
        if roll < 0.4:
            return self._submit(self._new_id())
        if roll < 0.46:
            return self._submit(self._some_id())
        if roll < 0.68:
            return self._resume()
        if roll < 0.96:
            return self._abort()
        if roll < 0.995:
            return (0, random.choice((1, 1, 0, 2, 2**32 - 1)), random.randbytes(16), True)
        return (_GOODBYE,)

    def heard(self, tag: int, fields: list[Any]) -> None:
        pass

    def attached(self) -> list[tuple[Any, ...]]:
        return [self._resume() for _ in range(self._random.randrange(3))]

    def _new_id(self) -> bytes:
        stream_id = self._random.randbytes(16)
        if len(self._shared) < _NUM_SHARED:
            self._shared.append(stream_id)
        else:
            self._shared[self._random.randrange(_NUM_SHARED)] = stream_id
        return stream_id

    def _some_id(self) -> bytes:
        """An id in use, an unused one, or an invalid one."""
        random = self._random
        roll = random.random()
        if roll < 0.7 and self._shared:
            return random.choice(self._shared)
        if roll < 0.85:
            return random.randbytes(16)
        return random.choice((b"", bytes(16), b"\xff" * 16, bytes(15), b"x"))

    def _handle(self) -> int:
        """Mostly the next handle, sometimes one in use."""
        random = self._random
        if random.random() < 0.1:
            return random.choice((0, 1, 2**32 - 1, random.randrange(max(1, self._next_handle))))
        self._next_handle += 1
        return self._next_handle

    def _params(self) -> Any:
        random = self._random
        params: dict[str, Any] = {"max_tokens": random.choice((1, 1, 2, 3, 8, 40, None))}
        if params["max_tokens"] is None and random.random() < 0.8:
            params["max_tokens"] = 2
        if random.random() < 0.3:
            params["stop"] = random.choice(_STOPS)
        if random.random() < 0.2:
            params["logprobs"] = random.choice((0, 1, 5, 20))
        if random.random() < 0.3:
            params["temperature"] = random.choice((0.0, 0.7, 1e30))
        if random.random() < 0.3:
            params["seed"] = random.choice((0, 1, -1, 2**63 - 1, -(2**63)))
        if random.random() < 0.1:
            params["min_tokens"] = 1
            params["stop_token_ids"] = (0, 5, self._vocab_size - 1)
        if random.random() < 0.1:
            params["top_k"], params["top_p"], params["min_p"] = 3, 0.5, 0.1
        if random.random() < 0.1:
            params["stream_interval"] = random.choice((1, 2, 100))
        if random.random() < 0.1:
            params["logit_bias"] = {random.randrange(self._vocab_size): 5.0}
            params["bad_words"] = random.choice((("the",), ("é", "a b"), ()))
            params["repetition_penalty"], params["presence_penalty"] = 1.1, -0.5
        if random.random() < 0.1:
            size = random.choice((1, 20, 2048))
            params["repetition_detection"] = {
                "max_pattern_size": size,
                "min_pattern_size": random.choice((0, 1, size)),
                "min_count": random.choice((2, 4, 65_536)),
            }
        if random.random() < 0.03:
            params["allowed_token_ids"] = tuple(range(random.choice((1, 300, 60_000))))
        if random.random() < 0.06:  # values that are validated after decoding
            name, value = random.choice(_WRONG)
            params[name] = value
        return params

    def _submit(self, stream_id: bytes) -> tuple[Any, ...]:
        random = self._random
        text: str | None = None
        ids = b""
        turns: tuple[dict[str, str], ...] = ()
        roll = random.random()
        if roll < 0.5:
            ids = self._ids(random.choice((1, 2, 5, 17, 100)))
        elif roll < 0.9:
            text = " ".join(random.choices(_WORDS, k=random.choice((0, 1, 5, 30))))
        else:
            turns = tuple(
                {"role": random.choice(("user", "assistant", "")), "content": random.choice(_WORDS)}
                for _ in range(random.choice((1, 2, 9)))
            )
        if random.random() < 0.02:
            text = random.choice((None, "", "both"))
        if random.random() < 0.002:
            text, ids, turns = "word " * 50_000, b"", ()
        body: tuple[Any, ...] = (
            _SUBMIT,
            self._handle(),
            stream_id,
            self._params(),
            text,
            ids,
            turns,
        )
        if random.random() < 0.3:
            body += (random.choice(("", "mine", "x" * 1024)), random.choice((0, 1, -5, 2**31 - 1)))
            if random.random() < 0.5:  # as if the stream had run before
                outputs = self._ids(random.choice((0, 1, 2, 7)))
                body += (True, outputs, random.choice((0, 1, 3, 20, 2**40)))
                if random.random() < 0.5:  # as if its token ids had been lost
                    body += ("", _TEMPLATE, random.choice((0, 1, 7, 2**32 - 1)), self._checksum())
                    if random.random() < 0.5:
                        record = bytes(random.choice((0, 5, 1000, 2**20, 2**20 + 1)))
                        keep = (record, self._scope(), random.random() < 0.5)
                        body += (None, (), b"", None, None, random.choice((None, keep)))
        return body

    def _ids(self, num: int) -> bytes:
        random = self._random
        most = self._vocab_size if random.random() < 0.97 else 2**32
        return b"".join(random.randrange(most).to_bytes(4, "little") for _ in range(num))

    def _resume(self) -> tuple[Any, ...]:
        random = self._random
        num_tokens = random.choice((0, 0, 1, 2, 5, 1000, 2**32 - 1))
        body: tuple[Any, ...] = (
            _RESUME,
            self._handle(),
            self._some_id(),
            random.choice((0, 0, 1, 7, 2**40)),
            num_tokens,
        )
        if random.random() < 0.4:
            body += (random.choice((None, 0, 2**64 - 1, random.getrandbits(64))),)
            if random.random() < 0.5:
                body += (self._checksum(),)
        return body

    def _scope(self) -> bytes:
        return self._random.choice((b"", b"s", b"t", bytes(64), bytes(65)))

    def _checksum(self) -> int | None:
        random = self._random
        return random.choice((None, 0, 2**32 - 1, random.getrandbits(32)))

    def _abort(self) -> tuple[Any, ...]:
        random = self._random
        stream_id = self._some_id()
        if random.random() < 0.3:
            return (_ABORT, stream_id)
        return (_ABORT, stream_id, random.choice((None, 0, self._handle(), 2**32 - 1)))


_WRONG: tuple[tuple[str, Any], ...] = (
    ("temperature", -1.0),
    ("temperature", float("nan")),
    ("top_p", 0.0),
    ("max_tokens", 0),
    ("max_tokens", 2**64 - 1),
    ("stop", ""),
    ("stop", ("x",) * 65),
    ("stop", "x" * 2000),
    ("stop_token_ids", (2**32,)),
    ("stop_token_ids", (2**31,)),
    ("logprobs", 2**40),
    ("detokenize", False),
    ("stream_interval", 0),
    ("seed", 2**64 - 1),
    ("unheard_of", 1),
    ("logit_bias", {2**40: 1.0}),
    ("logit_bias", {1: float("inf")}),
    ("allowed_token_ids", ()),
    ("bad_words", ("",)),
    ("repetition_penalty", 0.0),
    ("repetition_detection", {"max_pattern_size": 2**40, "min_count": 2}),
    ("repetition_detection", {"max_pattern_size": 3, "min_count": 2**40}),
    ("repetition_detection", {"min_pattern_size": -1}),
    ("repetition_detection", (3, 1, 2)),
    ("frequency_penalty", float("nan")),
    ("top_k", msgspec.msgpack.Ext(1, b"")),
)
