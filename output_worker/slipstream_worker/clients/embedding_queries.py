"""Clients' queries for embeddings, classes and scores, on their way to the core and back.

- Texts become tokens among the other queries (`queries`); then the core is asked, all at once: it
  lets tenants and their calls take turns.
- A query is asked of each core that the worker attaches to until it is answered. A client that
  attaches anew asks again, as for every query.
- A query that a core was computing when it died of its own doing is computed apart from others by
  the next one; one that was alone in such a step is refused.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from slipstream_ipc.columns import pack_u32, pack_u64, u32
from slipstream_ipc.errors import BadRequest, ProtocolError, Summary
from slipstream_ipc.messages import (
    DropPool,
    Embed,
    Embedded,
    Fault,
    ModelCard,
    Pool,
    Pooled,
    PoolingCard,
    Render,
    Rendered,
)
from slipstream_ipc.validation.pooling import card_for, check_dimensions
from slipstream_worker.clients.latency import RequestCounters
from slipstream_worker.clients.readers import StreamReaders
from slipstream_worker.core_link import CoreLink

MAX_WAITING = 4096  # queries that the core has not answered
MAX_WAITING_TOKENS = 2**24  # their tokens


@dataclass(eq=False, slots=True)
class _Asked:
    """A query of a client's. pool: None while its texts are tokenised."""

    client: bytes
    embed: Embed  # without its inputs
    tenant: bytes
    arrived_at: float
    width: int = 0  # dimensions of the model
    pool: Pool | None = None

    @property
    def num_tokens(self) -> int:
        return 0 if self.pool is None else len(self.pool.token_ids) // 4


class EmbeddingQueries:
    """The queries that are not answered yet."""

    def __init__(self, core: CoreLink, readers: StreamReaders, counters: RequestCounters) -> None:
        self._core = core
        self._readers = readers
        self._counters = counters
        self._rendering: dict[tuple[bytes, int], _Asked] = {}  # by client and its number
        self._asked: dict[int, _Asked] = {}  # of the core, by our number
        self._num_asked = 0
        self._nums: Counter[bytes] = Counter()  # by tenant, of those asked
        self._tokens: Counter[bytes] = Counter()
        self.now = 0.0

    @property
    def num_running(self) -> int:
        """Queries that are not answered."""
        return len(self._rendering) + len(self._asked)

    def begin(self, client: bytes, embed: Embed, tenant: bytes, card: ModelCard) -> Render | None:
        """Take in a query: what is to be tokenised first; None: nothing is. Answers it at once if
        it is invalid.
        """
        bare = replace(embed, texts=(), token_ids=b"", pairs=())
        asked = _Asked(client, bare, tenant, self.now)
        try:
            pooling = card_for(embed.task, card)
            asked.width = pooling.dimensions
            _check(embed, card, pooling)
        except BadRequest as error:
            self._refuse(asked, error.fault)
            return None
        if embed.texts:
            self._rendering[client, embed.number] = asked
            return Render(
                0,
                texts=embed.texts,
                add_special_tokens=embed.add_special_tokens,
                is_query=True,
                max_tokens=card.max_model_len,
                truncate_to=embed.truncate_to,
                truncates_left=embed.truncates_left,
                pairs=embed.pairs,
                max_first=embed.max_first,
                max_second=embed.max_second,
                template_kwargs=embed.template_kwargs,
                needs_template=pooling.needs_template,
            )
        try:
            token_ids, counts = _cut(embed, card)
        except _WrongInput as error:
            self._refuse(asked, error.fault, error.index)
            return None
        self._ask(asked, token_ids, counts)
        return None

    def rendered(self, client: bytes, number: int, answer: Rendered) -> None:
        """The texts of a query are tokenised."""
        asked = self._rendering.pop((client, number), None)
        if asked is None:
            return
        if answer.fault is not None:
            self._refuse(asked, answer.fault, answer.index)
        else:
            self._ask(asked, answer.token_ids, answer.counts, answer.first_lens)

    def answered(self, pooled: Pooled) -> None:
        """The core has answered a query."""
        asked = self._pop(pooled.number)
        if asked is None:
            return
        if pooled.fault is not None:
            self._refuse(asked, pooled.fault, pooled.index)
            return
        assert asked.pool is not None
        counts = asked.pool.counts
        self._counters.embedded(u32(counts).tolist(), self.now - asked.arrived_at)
        self._send(asked, Embedded(asked.embed.number, pooled.vectors, counts))

    def attached(self) -> None:
        """Another attach to the core begins: ask again."""
        for asked in self._asked.values():
            assert asked.pool is not None
            self._core.enqueue(asked.pool)

    def core_ended(self, suspects: Sequence[bytes] | None) -> None:
        """The core has died of its own doing, while it computed these; None: unknown."""
        for number, asked in list(self._asked.items()):
            pool = asked.pool
            assert pool is not None
            if suspects is not None and pool.query_id not in suspects:
                continue
            if suspects is not None and len(suspects) == 1:
                self._pop(number)
                self._refuse(asked, Fault("engine", "this request crashed the engine"))
            else:
                asked.pool = replace(pool, strikes=pool.strikes + 1)

    def withdraw(self, client: bytes) -> None:
        """Drop the queries of a client whose session has ended."""
        for key in [each for each in self._rendering if each[0] == client]:
            del self._rendering[key]
        gone = [number for number, each in self._asked.items() if each.client == client]
        for number in gone:
            self._pop(number)
        if gone:
            self._core.enqueue(DropPool(pack_u64(gone)))

    def beat(self) -> None:
        """Withdraw the queries of clients that are not attached."""
        clients = {each.client for each in (*self._asked.values(), *self._rendering.values())}
        for client in clients:
            if not self._readers.is_here(client):
                self.withdraw(client)

    def _ask(self, asked: _Asked, token_ids: bytes, counts: bytes, first_lens: bytes = b"") -> None:
        why = self._why_full(asked.tenant, len(token_ids) // 4)
        if why:
            self._refuse(asked, Fault("overloaded", why))
            return
        embed = asked.embed
        self._num_asked += 1
        asked.pool = Pool(
            self._num_asked,
            secrets.token_bytes(16),
            token_ids,
            counts,
            0 if embed.dimensions == asked.width else embed.dimensions,
            embed.normalizes,
            embed.call,
            asked.tenant,
            first_lens=first_lens,
        )
        self._asked[self._num_asked] = asked
        self._nums[asked.tenant] += 1
        self._tokens[asked.tenant] += asked.num_tokens
        self._core.enqueue(asked.pool)

    def _why_full(self, tenant: bytes, num_tokens: int) -> str:
        """The reason to refuse a query of so many tokens; empty if the core may be asked. A tenant
        may have as much waiting as is left for all others.
        """
        num, tokens = self._nums.total(), self._tokens.total()
        if self._nums[tenant] >= MAX_WAITING - num:
            return f"{num} queries are waiting already"
        if self._tokens[tenant] + num_tokens > MAX_WAITING_TOKENS - tokens:
            return f"queries of {tokens} tokens are waiting already"
        return ""

    def _pop(self, number: int) -> _Asked | None:
        asked = self._asked.pop(number, None)
        if asked is not None:
            tenant = asked.tenant
            self._nums[tenant] -= 1
            self._tokens[tenant] -= asked.num_tokens
            if not self._nums[tenant]:
                del self._nums[tenant], self._tokens[tenant]
        return asked

    def _refuse(self, asked: _Asked, fault: Fault, index: int | None = None) -> None:
        self._counters.rejected(fault.code)
        self._send(asked, Embedded(asked.embed.number, fault=fault, index=index))

    def _send(self, asked: _Asked, answer: Embedded) -> None:
        if self._readers.is_here(asked.client):
            num_bytes = len(answer.vectors)
            self._readers.port(asked.client).enqueue(answer, num_bytes=num_bytes)


class _WrongInput(Exception):  # noqa: N818  (the fault of one input)
    def __init__(self, fault: Fault, index: int) -> None:
        super().__init__(fault.message)
        self.fault = fault
        self.index = index


def _check(embed: Embed, card: ModelCard, pooling: PoolingCard) -> None:
    """Raises: BadRequest."""
    if bool(embed.texts) == bool(embed.counts):
        raise BadRequest("input", Summary("both or none"), "one of texts and token ids")
    if embed.pairs and len(embed.pairs) != len(embed.texts):
        raise BadRequest("input", Summary("texts and pairs of other numbers"), "as many of both")
    check_dimensions(embed.dimensions, pooling)
    if embed.truncate_to > card.max_model_len:
        allowed = f"at most {card.max_model_len}"
        raise BadRequest("truncate_prompt_tokens", embed.truncate_to, allowed)


def _cut(embed: Embed, card: ModelCard) -> tuple[bytes, bytes]:
    """The token ids of a query, and how many each input has. Raises: _WrongInput."""
    try:
        ids, counts = u32(embed.token_ids), u32(embed.counts).tolist()
    except ProtocolError as error:
        raise _WrongInput(Fault("bad_request", str(error), "input"), 0) from None
    if sum(counts) != len(ids):
        raise _WrongInput(Fault("bad_request", "input: counts do not match ids", "input"), 0)
    parts, begin = [], 0
    for index, num in enumerate(counts):
        part = ids[begin : begin + num]
        begin += num
        if embed.truncate_to and num > embed.truncate_to:
            most = embed.truncate_to
            part = part[-most:] if embed.truncates_left else part[:most]
        if not 0 < len(part) <= card.max_model_len:
            given = Summary(f"{len(part)} tokens")
            allowed = f"1 to {card.max_model_len}"
            raise _WrongInput(BadRequest("input", given, allowed).fault, index)
        if int(part.max()) >= card.vocab_size:
            allowed = f"token ids in [0, {card.vocab_size})"
            raise _WrongInput(BadRequest("input", int(part.max()), allowed).fault, index)
        parts.append(part.tobytes())
    return b"".join(parts), pack_u32([len(part) // 4 for part in parts])
