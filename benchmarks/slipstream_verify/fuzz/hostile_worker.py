"""The messages of a hostile worker to a core.

- It never uses another worker's name: any process with access to the core's socket could do that,
  and the permissions of the socket's folder prevent it.
- It holds a bounded number of streams and forgets older ones; otherwise the honest streams would
  queue behind them.
"""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Any

_PING, _ADMIT, _REPORT, _WITHDRAW, _FORGET, _POSITIONS = 4, 30, 31, 32, 33, 34
_KEEP, _DROP_KEPT, _KEPT_IDS = 35, 36, 37
_ADMITTED, _REGISTERED, _STEP = 40, 41, 43
_MAX_HELD = 8
_ENDS = (
    ("abort", 0),
    ("error", 3, None, ("engine", "made up", None)),
    ("stop", 2**32 - 1, "x"),
    ("length", 1, 5),
)


class HostileWorker:
    """The messages of one worker."""

    def __init__(self, random: Random, vocab_size: int) -> None:
        self._random = random
        self._vocab_size = vocab_size
        self._held: deque[bytes] = deque()
        self._rows: deque[int] = deque(maxlen=8)
        self._step = 0

    def body(self) -> tuple[Any, ...] | None:
        random = self._random
        if len(self._held) > _MAX_HELD:
            return (_FORGET, (self._held.popleft(), self._held.popleft()))
        roll = random.random()
        if roll < 0.25:
            return None
        if roll < 0.35:
            return (_PING,)
        if roll < 0.5:
            return self._admit()
        if roll < 0.75:
            return self._report()
        if roll < 0.85:
            return (_WITHDRAW, self._some_id(), random.choice(_ENDS))
        if roll < 0.87:
            return self._kept()
        if roll < 0.94:
            return (_FORGET, tuple(self._some_id() for _ in range(random.choice((0, 1, 3, 40)))))
        if roll < 0.99:
            return self._positions()
        return (0, random.choice((1, 1, 0, 2)), random.randbytes(16), True)

    def heard(self, tag: int, fields: list[Any]) -> None:
        if tag == _ADMITTED:
            self._rows.append(fields[2])
        elif tag == _REGISTERED:
            self._rows.append(fields[1])
        elif tag == _STEP:
            self._step = fields[1]

    def attached(self) -> list[tuple[Any, ...]]:
        """Claims no streams, so the core drops those of an earlier attach."""
        self._rows.clear()
        self._held.clear()
        return [(_POSITIONS, (), b"", b"", True)]

    def _some_id(self) -> bytes:
        random = self._random
        if self._held and random.random() < 0.6:
            return random.choice(self._held)
        return random.choice((random.randbytes(16), random.randbytes(16), b"", bytes(16)))

    def _admit(self) -> tuple[Any, ...]:
        random = self._random
        if self._held and random.random() < 0.2:
            stream_id = random.choice(self._held)
        else:
            stream_id = random.randbytes(16) if random.random() < 0.97 else b"short"
            self._held.append(stream_id)
        params: dict[str, Any] = {"temperature": random.choice((0.0, 1.0))}
        if random.random() < 0.2:
            params["logprobs"] = random.choice((0, 3, 20))
        if random.random() < 0.1:
            params["min_tokens"] = 2
        if random.random() < 0.03:
            params["logprobs"] = random.choice((2**40, -1))
        has_more = random.random() < 0.3
        spec = (params, "label", random.choice((0, 5, -(2**31)))) if has_more else (params,)
        num_outputs = random.choice((0, 0, 0, 1, 5))
        body: tuple[Any, ...] = (
            _ADMIT,
            stream_id,
            self._ids(random.choice((0, 1, 3, 20, 100))),
            spec,
            random.choice(((), (0,), (1, 2, 3), (self._vocab_size,), (2**32 - 1,))),
            random.choice((0, 1, -(2**63), 2**63 - 1)),
            random.choice((1, 2, 8, 30, 2**31)),
            self._ids(num_outputs),
        )
        if has_more:
            body += (random.randbytes(16), 7, bytes(16))
            width = 1 + (params.get("logprobs") or 0)
            num = num_outputs * min(width, 21)
            columns = (width % 2**32, bytes(4 * num), bytes(4 * num), bytes(4 * num_outputs))
            body += (random.choice((None, columns, (1, b"abc", b"", b""))),)
            body += (random.random() < 0.5, random.choice((0, 1, 2, 2**32 - 1)))
        return body

    def _ids(self, num: int) -> bytes:
        random = self._random
        most = self._vocab_size if random.random() < 0.97 else 2**32
        return b"".join(random.randrange(most).to_bytes(4, "little") for _ in range(num))

    def _report(self) -> tuple[Any, ...]:
        random = self._random
        step = random.choice((self._step, self._step, 0, self._step + 1, 2**63 - 1))
        if not self._rows or random.random() < 0.3:
            return (_REPORT, step)
        rows = random.choices(self._rows, k=random.choice((1, 2, 30)))
        if random.random() < 0.02:  # ends the session
            rows.append(random.choice((0, 1, 2**32 - 1)))
        column = b"".join(row.to_bytes(4, "little") for row in rows)
        lengths = column if random.random() < 0.99 else column[:-1] + b"xyz"
        return (_REPORT, step, column, lengths)

    def _kept(self) -> tuple[Any, ...]:
        random = self._random
        ids = tuple(self._some_id() for _ in range(random.choice((0, 1, 3))))
        roll = random.random()
        if roll < 0.6:
            size = random.choice((0, 10, 5000))
            return (_KEEP, tuple((stream_id, b"scope", bytes(size)) for stream_id in ids))
        if roll < 0.8:
            return (_DROP_KEPT, ids)
        return (_KEPT_IDS, ids, tuple(reversed(ids)), random.random() < 0.5)

    def _positions(self) -> tuple[Any, ...]:
        random = self._random
        num = random.choice((0, 1, 3, 20))
        ids = tuple(self._some_id() for _ in range(num))
        lengths = b"".join(random.choice((0, 1, 5, 2**32 - 1)).to_bytes(4, "little") for _ in ids)
        digests = random.randbytes(8 * num)
        if random.random() < 0.02:
            digests = digests[:-1]
        is_last = random.random() < 0.3
        if is_last:
            self._held = deque(stream_id for stream_id in self._held if stream_id in ids)
        return (_POSITIONS, ids, lengths, digests, is_last)
