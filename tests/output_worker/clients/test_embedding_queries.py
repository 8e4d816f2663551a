"""Queries for embeddings on their way through tokenizer process and core, which tests play."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream_ipc.columns import pack_u32, pack_u64
from slipstream_ipc.messages import (
    DropPool,
    Embed,
    Embedded,
    Fault,
    ModelCard,
    Pool,
    Pooled,
    PoolingCard,
    Rendered,
)
from slipstream_ipc.telemetry.statistics import WorkerGauges
from slipstream_worker.clients import embedding_queries as module
from slipstream_worker.clients.embedding_queries import EmbeddingQueries
from slipstream_worker.clients.latency import RequestCounters

MODEL = ModelCard(
    "m", "/nowhere", vocab_size=100, max_model_len=9, eos_token_ids=(), pooling=PoolingCard(4, (2,))
)
ME, OTHER = b"me", b"other"
FAULT = Fault("engine", "no", "input")


class Port:
    def __init__(self) -> None:
        self.said: list[Embedded] = []

    def enqueue(self, body: Embedded, *, num_bytes: int = 0) -> None:
        self.said.append(body)


class Readers:
    """Clients by their ports."""

    def __init__(self) -> None:
        self.ports = {ME: Port(), OTHER: Port()}

    def is_here(self, client: bytes) -> bool:
        return client in self.ports

    def port(self, client: bytes) -> Port:
        return self.ports[client]


class Core:
    """The link to the core."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def enqueue(self, body: Any) -> None:
        self.asked.append(body)

    def take(self) -> list[Any]:
        taken, self.asked = self.asked, []
        return taken


@pytest.fixture
def readers() -> Readers:
    return Readers()


@pytest.fixture
def core() -> Core:
    return Core()


@pytest.fixture
def queries(core: Any, readers: Any) -> EmbeddingQueries:
    return EmbeddingQueries(core, readers, RequestCounters())


def of_ids(number: int, *inputs: list[int], **options: Any) -> Embed:
    ids = [token_id for each in inputs for token_id in each]
    return Embed(
        number, token_ids=pack_u32(ids), counts=pack_u32([len(each) for each in inputs]), **options
    )


def test_ids_are_asked_of_the_core(queries: Any, core: Core, readers: Readers) -> None:
    embed = of_ids(7, [1, 2], [3], dimensions=2, normalizes=False, call=b"c")
    assert queries.begin(ME, embed, b"tenant", MODEL) is None
    [pool] = core.take()
    assert (pool.token_ids, pool.counts) == (pack_u32([1, 2, 3]), pack_u32([2, 1]))
    assert (pool.dimensions, pool.normalizes, pool.call) == (2, False, b"c")
    assert (pool.tenant, pool.strikes, len(pool.query_id)) == (b"tenant", 0, 16)
    assert queries.num_running == 1
    queries.answered(Pooled(pool.number, b"vectors!"))
    queries.answered(Pooled(pool.number, b"again"))
    assert readers.ports[ME].said == [Embedded(7, b"vectors!", pack_u32([2, 1]))]
    assert queries.num_running == 0


def test_texts_are_tokenised_first(queries: Any, core: Core, readers: Readers) -> None:
    embed = Embed(7, ("a", "b"), truncate_to=5, truncates_left=True, add_special_tokens=False)
    render = queries.begin(ME, embed, ME, MODEL)
    assert (render.texts, render.max_tokens, render.is_query) == (("a", "b"), 9, True)
    assert (render.truncate_to, render.truncates_left, render.add_special_tokens) == (
        5,
        True,
        False,
    )
    assert not core.asked
    assert queries.num_running == 1
    queries.rendered(ME, 7, Rendered(1, pack_u32([4, 5]), counts=pack_u32([1, 1])))
    [pool] = core.take()
    assert (pool.token_ids, pool.counts, pool.dimensions) == (pack_u32([4, 5]), pack_u32([1, 1]), 0)


def test_faults_name_the_input(queries: Any, core: Core, readers: Readers) -> None:
    queries.begin(ME, Embed(1, ("a", "b")), ME, MODEL)
    queries.rendered(ME, 1, Rendered(1, fault=FAULT, index=1))
    queries.begin(ME, of_ids(2, [1], [2]), ME, MODEL)
    [pool] = core.take()
    queries.answered(Pooled(pool.number, fault=FAULT, index=0))
    assert readers.ports[ME].said == [
        Embedded(1, fault=FAULT, index=1),
        Embedded(2, fault=FAULT, index=0),
    ]
    assert queries.num_running == 0


@pytest.mark.parametrize(
    ("embed", "field", "index"),
    [
        (Embed(1), "input", None),
        (Embed(1, ("a",), counts=pack_u32([1])), "input", None),
        (of_ids(1, [1], [100]), "input", 1),
        (of_ids(1, [1], [1] * 10), "input", 1),
        (of_ids(1, []), "input", 0),
        (Embed(1, token_ids=b"abc", counts=pack_u32([1])), "input", 0),
        (Embed(1, token_ids=pack_u32([1]), counts=pack_u32([2])), "input", 0),
        (of_ids(1, [1], dimensions=3), "dimensions", None),
        (of_ids(1, [1], truncate_to=10), "truncate_prompt_tokens", None),
    ],
)
def test_invalid_queries(
    queries: Any, core: Core, readers: Readers, embed: Embed, field: str, index: int | None
) -> None:
    assert queries.begin(ME, embed, ME, MODEL) is None
    [answer] = readers.ports[ME].said
    assert answer.fault is not None
    assert (answer.fault.code, answer.fault.field, answer.index) == ("bad_request", field, index)
    assert not core.asked


def test_ids_are_cut(queries: Any, core: Core) -> None:
    for left, kept in ((False, [1, 2]), (True, [2, 3])):
        queries.begin(ME, of_ids(1, [1, 2, 3], [4], truncate_to=2, truncates_left=left), ME, MODEL)
        assert core.take()[0].token_ids == pack_u32([*kept, 4])


def test_a_model_that_generates(queries: Any, readers: Readers) -> None:
    queries.begin(ME, Embed(1, ("a",)), ME, ModelCard("m", "/nowhere", 100, 9, ()))
    assert "generates text" in readers.ports[ME].said[0].fault.message  # type: ignore[union-attr]


def test_every_core_is_asked_until_one_answers(queries: Any, core: Core, readers: Readers) -> None:
    queries.begin(ME, of_ids(1, [1]), ME, MODEL)
    queries.begin(ME, of_ids(2, [2]), ME, MODEL)
    first, second = core.take()
    queries.answered(Pooled(first.number, b"one."))
    queries.attached()
    assert core.take() == [second]
    queries.core_ended(None)  # it died, perhaps of the query
    queries.attached()
    [again] = core.take()
    assert (again.number, again.query_id, again.strikes) == (second.number, second.query_id, 1)


def test_a_query_that_was_alone_when_a_core_died_is_refused(
    queries: Any, core: Core, readers: Readers
) -> None:
    for number in (1, 2, 3):
        queries.begin(ME, of_ids(number, [number]), ME, MODEL)
    first, second, third = core.take()
    queries.core_ended([first.query_id, second.query_id])
    queries.attached()
    assert [each.strikes for each in core.take()] == [1, 1, 0]
    queries.core_ended([first.query_id])
    queries.attached()
    assert [(each.number, each.strikes) for each in core.take()] == [(2, 1), (3, 0)]
    [answer] = readers.ports[ME].said
    assert answer.number == 1
    assert answer.fault == Fault("engine", "this request crashed the engine")
    queries.core_ended([])  # it computed nothing of ours
    queries.attached()
    assert [each.strikes for each in core.take()] == [1, 0]
    assert third.strikes == 0


def test_who_has_gone_is_not_asked_for(queries: Any, core: Core, readers: Readers) -> None:
    queries.begin(ME, of_ids(1, [1]), ME, MODEL)
    queries.begin(OTHER, of_ids(1, [2]), OTHER, MODEL)
    queries.begin(ME, Embed(2, ("a",)), ME, MODEL)
    first, second = core.take()
    del readers.ports[ME]
    queries.beat()
    assert core.take() == [DropPool(pack_u64([first.number]))]
    queries.rendered(ME, 2, Rendered(1, pack_u32([4]), counts=pack_u32([1])))
    assert not core.asked
    queries.attached()
    assert core.take() == [second]


def test_a_tenant_has_no_more_than_is_left_for_others(
    queries: Any, core: Core, readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_TOKENS", 8)
    for number in range(3):
        queries.begin(ME, of_ids(number, [1, 2]), b"mine", MODEL)
    [refused] = readers.ports[ME].said
    assert refused.fault is not None
    assert (refused.number, refused.fault.code) == (2, "overloaded")
    queries.begin(OTHER, of_ids(1, [1, 2]), b"theirs", MODEL)
    assert not readers.ports[OTHER].said
    pools: list[Pool] = core.take()
    for pool in pools:
        queries.answered(Pooled(pool.number, b"...."))
    queries.begin(ME, of_ids(9, [1, 2]), b"mine", MODEL)
    assert len(core.take()) == 1


def test_requests_are_counted(core: Any, readers: Any) -> None:
    counters = RequestCounters()
    queries = EmbeddingQueries(core, readers, counters)
    queries.now = 10.0
    queries.begin(ME, of_ids(1, [1, 2], [3]), ME, MODEL)
    queries.begin(ME, of_ids(2, [100]), ME, MODEL)
    queries.now = 12.5
    queries.answered(Pooled(core.take()[0].number, b"...."))
    numbers = counters.numbers(WorkerGauges()).counters
    assert (numbers.num_accepted, numbers.num_prompt_tokens) == (2, 3)
    assert (numbers.finished, numbers.rejected) == ({"stop": 2}, {"bad_request": 1})
    assert numbers.e2e_s.sum == pytest.approx(5.0)
