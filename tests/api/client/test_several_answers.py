"""`n`: several answers to a prompt, each a stream of its own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.helpers.fake_worker import FakeWorker
from tests.helpers.played_answers import answer

from slipstream import LLM, AsyncClient, BadRequestError, Client, SamplingParams
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import Submit
from slipstream_worker.streams.registration import Submission

SEEDS = [5, 6, 7]


def say_seed(worker: FakeWorker, body: Any) -> None:
    """A script: answer with prompt and seed."""
    if isinstance(body, Submit):
        params = Submission(body).spec_of(body).params
        answer(worker, body, f"{body.text} {params.seed}")


@pytest.mark.parametrize("is_async", [False, True])
def test_their_texts_and_seeds(worker: FakeWorker, is_async: bool) -> None:
    worker.script = say_seed
    three, one = SamplingParams(n=3, seed=5), SamplingParams(seed=9)

    def check(found: Any, many: Any) -> None:
        assert [each.text for each in found.choices] == [f"a {seed}" for seed in SEEDS]
        assert found.text == "a 5"
        assert len({each.id for each in found.choices}) == 3
        first, second = many
        assert [each.text for each in first.choices] == [f"b {seed}" for seed in SEEDS]
        assert [each.text for each in second.choices] == ["c 9"]

    if not is_async:
        with Client(worker.address) as client:
            found = client.generate("a", n=3, seed=5)
            check(found, client.generate_many(["b", "c"], [three, one]))
            texts = ["", "", "", ""]
            for index, delta in client.stream_many(["b", "c"], [three, one]):
                texts[index] += delta.text
            assert texts == ["b 5", "b 6", "b 7", "c 9"]
        return

    async def main() -> None:
        async with AsyncClient(worker.address) as client:
            found = await client.generate("a", n=3, seed=5)
            check(found, await client.generate_many(["b", "c"], [three, one]))

    asyncio.run(main())


def test_a_stream_is_one_answer(worker: FakeWorker) -> None:
    with Client(worker.address) as client:
        with pytest.raises(BadRequestError, match="n: got 2, allowed: 1 for a stream"):
            client.stream("a", n=2)
        for field, value in (("label", "mine"), ("stream_id", "0a" * 16)):
            with pytest.raises(BadRequestError, match=f"{field}: got .* where n is more than 1"):
                client.generate("a", n=2, **{field: value})
    submit = Submit(0, bytes(16), b"\x81\xa1n\x02", "a")  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="n: got 2, allowed: 1"):
        Submission(submit)


@pytest.mark.process
def test_outputs_of_a_batch() -> None:
    with LLM("simulated:step_ms=1,mode=chain") as llm:
        params = SamplingParams(n=3, seed=5, max_tokens=8)
        first, second = llm.generate(["a list", "a dict"], params, use_tqdm=False)
        assert [output.index for output in first.outputs] == [0, 1, 2]
        assert len({output.text for output in first.outputs}) == 3
        assert len(second.outputs) == 3
