"""The asyncio client against a worker that the test plays."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop
from tests.helpers.fake_worker import Entry, FakeWorker, deltas, end_of
from tests.helpers.patience import PATIENCE_S
from tests.helpers.played_answers import away, echo

from slipstream import (
    AsyncClient,
    AsyncStream,
    BadRequestError,
    ClosedError,
    ConnectionLostError,
    EngineError,
    OverloadedError,
    RequestError,
    SamplingParams,
    SupersededError,
    UnknownStreamError,
)
from slipstream.client.streams.stream_table import ClientStreamTable
from slipstream_ipc.messages import (
    Abort,
    Fault,
    Goodbye,
    Resume,
    Submit,
    Superseded,
    UnknownStreams,
)


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Runs a coroutine on either event loop."""

    def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
        with asyncio.Runner(loop_factory=request.param) as runner:
            return runner.run(asyncio.wait_for(coroutine, 2 * PATIENCE_S))

    return run


async def read(stream: AsyncStream) -> str:
    return "".join([delta.text async for delta in stream])


def test_stream_generate_and_model(worker: FakeWorker, run: Any) -> None:
    async def main() -> None:
        async with AsyncClient(worker.address) as client:
            assert client.model == worker.model
            stream = client.stream("hello", max_tokens=9)
            assert [delta.text async for delta in stream] == list("hello")
            assert (stream.text, stream.finish_reason) == ("hello", "stop")
            assert stream.prompt_token_ids == [1, 2]
            completion = await client.generate("whole", label="mine")
            assert (completion.text, completion.label) == ("whole", "mine")
            cumulative = client.stream("abc", output_kind="cumulative")
            assert [delta.text async for delta in cumulative] == ["a", "ab", "abc"]

    worker.script = echo
    run(main())
    worker.expect(Goodbye)


def test_many_tasks_at_once(worker: FakeWorker, run: Any) -> None:
    async def main() -> None:
        prompts = [f"prompt number {index}" for index in range(100)]
        done: list[str] = []
        async with AsyncClient(worker.address) as client:
            texts = await asyncio.gather(*(read(client.stream(prompt)) for prompt in prompts))
            assert texts == prompts
            found = await client.generate_many(
                prompts,
                SamplingParams(temperature=0),
                on_done=lambda completion: done.append(completion.text),
            )
        assert [completion.text for completion in found] == prompts
        assert sorted(done) == sorted(prompts)

    worker.script = echo
    run(main())


def test_no_thread_and_no_hand_over(worker: FakeWorker, run: Any) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with AsyncClient(worker.address) as client:
            streams = [client.stream("x") for _ in range(8)]
            handles = [await away(worker.expect_and_accept) for _ in streams]
            tasks = [asyncio.create_task(anext(stream)) for stream in streams]
            await asyncio.sleep(0)  # lets the tasks begin to wait
            calls: list[Any] = []
            loop.call_soon_threadsafe = lambda *each, **_: calls.append(each)  # type: ignore[method-assign,assignment]
            worker.send(deltas(*(Entry(handle, "a") for handle in handles)))
            assert [delta.text for delta in await asyncio.gather(*tasks)] == ["a"] * 8
            del loop.call_soon_threadsafe  # type: ignore[attr-defined]
            assert not calls
            names = {thread.name for thread in threading.enumerate()}
            assert not {name for name in names if name.startswith("slipstream")}

    run(main())


def test_cancelled_task_aborts(worker: FakeWorker, run: Any) -> None:
    async def main() -> None:
        async with AsyncClient(worker.address) as client:
            for coroutine in (read(client.stream("x")), client.generate("y")):
                task = asyncio.create_task(coroutine)  # type: ignore[arg-type]
                submit = await away(worker.expect, Submit)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                abort = await away(worker.expect, Abort)
                assert abort.stream_id == submit.stream_id

    run(main())


def test_first_failure_of_generate_many_aborts_the_rest(worker: FakeWorker, run: Any) -> None:
    async def main() -> None:
        async with AsyncClient(worker.address) as client:
            running = asyncio.create_task(client.generate_many(["a", "b"]))
            first, second = await away(worker.expect, Submit), await away(worker.expect, Submit)
            worker.reject(first, Fault("overloaded", "full"))
            with pytest.raises(OverloadedError):
                await running
            assert (await away(worker.expect, Abort)).stream_id == second.stream_id

    run(main())


def test_leaving_early_aborts(worker: FakeWorker, run: Any) -> None:
    async def main() -> None:
        async with AsyncClient(worker.address) as client:
            async with client.stream("x") as stream:
                handle = await away(worker.expect_and_accept)
                worker.send(deltas(Entry(handle, "a")))
                async for _ in stream:
                    break
            assert (await away(worker.expect, Abort)).stream_id.hex() == stream.id
            with pytest.raises(ClosedError, match="within its `with` block"):
                await read(stream)
            other = client.stream("y")
            await away(worker.expect, Submit)
            del other
            gc.collect()
            await away(worker.expect, Abort)

    run(main())


def test_errors_and_own_abort(worker: FakeWorker, run: Any) -> None:
    async def main() -> None:
        async with AsyncClient(worker.address) as client:
            with pytest.raises(BadRequestError, match="max_token"):
                await client.generate("x", max_token=3)
            stream = client.stream("x")
            handle = await away(worker.expect_and_accept)
            end = end_of("ab", "error", fault=Fault("engine", "boom"))
            worker.send(deltas(Entry(handle, "ab", end=end)))
            assert (await anext(stream)).text == "ab"
            with pytest.raises(EngineError, match="boom") as caught:
                await anext(stream)
            assert caught.value.text == "ab"
            stream = client.stream("x")
            handle = await away(worker.expect_and_accept)
            stream.abort()
            await away(worker.expect, Abort)
            worker.send(deltas(Entry(handle, "", ids=(), end=end_of("", "abort"))))
            assert await read(stream) == ""
            assert stream.finish_reason == "abort"

    run(main())


def test_reattach_goes_unnoticed(worker: FakeWorker, run: Any) -> None:
    async def main() -> None:
        async with AsyncClient(worker.address) as client:
            stream = client.stream("x")
            handle = await away(worker.expect_and_accept)
            worker.send(deltas(Entry(handle, "ab")))
            assert (await anext(stream)).text == "ab"
            worker.tell_to_attach()
            resume = await away(worker.expect, Resume)
            assert (resume.num_chars, resume.num_tokens) == (2, 2)
            worker.send(deltas(Entry(handle, "bc", 1, end=end_of("abc"))))
            assert await read(stream) == "c"

    run(main())


def test_a_new_client_gets_the_rest(worker: FakeWorker, run: Any) -> None:
    async def main() -> None:
        async with AsyncClient(worker.address) as first:
            stream = first.stream("x", stream_id="0a" * 16)
            handle = await away(worker.expect_and_accept)
            worker.send(deltas(Entry(handle, "ab")))
            assert (await anext(stream)).text == "ab"
            num_chars, num_tokens = stream.position
            await resume(stream.id, num_chars, num_tokens)

    async def resume(stream_id: str, num_chars: int, num_tokens: int) -> None:
        async with AsyncClient(worker.address) as second:
            rest = second.resume(stream_id, num_chars=num_chars, num_tokens=num_tokens)
            resume = await away(worker.expect, Resume)
            assert (resume.stream_id, resume.num_chars, resume.num_tokens) == (b"\n" * 16, 2, 2)
            worker.send(deltas(Entry(resume.handle, "c", 2, end=end_of("abc"))))
            assert await read(rest) == "c"
            assert rest.position == (3, 3)
            lost = second.resume("0b" * 16)
            worker.send(Superseded((await away(worker.expect, Resume)).handle))
            with pytest.raises(SupersededError):
                await anext(lost)
            unknown = second.resume("0c" * 16)
            worker.send(UnknownStreams(((await away(worker.expect, Resume)).handle,)))
            with pytest.raises(UnknownStreamError):
                await anext(unknown)

    run(main())


def test_a_loop_that_is_held_up_finds_everything(worker: FakeWorker, run: Any) -> None:
    async def main() -> None:
        async with AsyncClient(worker.address) as client:
            stream = client.stream("x")
            handle = await away(worker.expect_and_accept)
            waiting = asyncio.create_task(anext(stream))
            await asyncio.sleep(0)  # lets the task begin to wait
            for position in range(50):  # in the loop's own thread: nothing else runs there
                worker.send(deltas(Entry(handle, "x", position)))
            assert not waiting.done()
            assert (await waiting).text == "x"
            worker.send(deltas(Entry(handle, "y", 50, end=end_of("x" * 50 + "y"))))
            assert await read(stream) == "x" * 49 + "y"

    run(main())


def test_a_client_belongs_to_one_loop(worker: FakeWorker, run: Any) -> None:
    client = AsyncClient(worker.address)
    with pytest.raises(RequestError, match="inside an event loop"):
        client.stream("x")

    assert run(client.connect()) == worker.model
    with pytest.raises(RequestError, match="another event loop"):
        run(client.connect())
    assert client.model == worker.model  # to look at needs no loop
    del client
    gc.collect()
    worker.expect(Goodbye)


def test_a_client_that_nothing_holds_says_goodbye(worker: FakeWorker, run: Any) -> None:
    async def main() -> None:
        client = AsyncClient(worker.address)
        await client.connect()
        del client
        gc.collect()
        await away(worker.expect, Goodbye)

    run(main())


def test_a_stream_that_another_thread_collects_is_aborted(worker: FakeWorker, run: Any) -> None:
    async def main() -> None:
        async with AsyncClient(worker.address) as client:
            held = [client.stream("x")]
            submit = await away(worker.expect, Submit)
            await away(held.clear)
            assert (await away(worker.expect, Abort)).stream_id == submit.stream_id

    run(main())


def test_a_closed_client_takes_nothing(worker: FakeWorker, run: Any) -> None:
    async def main() -> None:
        client = AsyncClient(worker.address)
        await client.close()  # before it was used
        with pytest.raises(ClosedError):
            await client.connect()
        with pytest.raises(ClosedError):
            await read(client.stream("x"))
        with pytest.raises(ClosedError):
            await client.tokenize("x")

    run(main())


def test_a_fault_of_the_connection_ends_what_waits(
    worker: FakeWorker, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: ClientStreamTable, message: Any, now: float) -> None:
        raise ZeroDivisionError("ours")

    async def main() -> None:
        faults: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, told: faults.append(told))
        async with AsyncClient(worker.address) as client:
            stream = client.stream("x")
            handle = await away(worker.expect_and_accept)
            monkeypatch.setattr(ClientStreamTable, "deliver", fail)
            worker.send(deltas(Entry(handle, "a")))
            with pytest.raises(EngineError, match="ZeroDivisionError: ours"):
                await anext(stream)
            monkeypatch.undo()
            assert isinstance(faults[0]["exception"], ZeroDivisionError)

    run(main())


def test_close_ends_waiting_tasks(worker: FakeWorker, run: Any) -> None:
    async def main() -> None:
        client = AsyncClient(worker.address)
        await client.connect()
        tasks = [asyncio.create_task(read(client.stream("x"))) for _ in range(3)]
        for _ in tasks:
            await away(worker.expect, Submit)
        await client.close()
        for task in tasks:
            with pytest.raises(ClosedError):
                await task
        await client.close()
        with pytest.raises(ClosedError):
            await client.connect()

    run(main())


def test_accepted_is_awaited_before_the_first_delta(worker: FakeWorker, run: Any) -> None:
    async def main() -> None:
        async with AsyncClient(worker.address) as client:
            stream = client.stream("x")
            waiting = asyncio.ensure_future(stream.accepted())
            submit = await away(worker.expect, Submit)
            assert not waiting.done()
            await away(worker.accept, submit)
            await waiting
            await stream.accepted()
            worker.send(deltas(Entry(submit.handle, "y", end=end_of("y"))))
            assert await read(stream) == "y"
            refused = client.stream("z")
            worker.reject(await away(worker.expect, Submit), Fault("overloaded", "full"))
            with pytest.raises(OverloadedError, match="full"):
                await refused.accepted()
            left = client.stream("z")
            waiting = asyncio.ensure_future(left.accepted())
            submit = await away(worker.expect, Submit)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert (await away(worker.expect, Abort)).stream_id == submit.stream_id

    run(main())


def test_a_missing_socket_is_named_at_once(address: str, run: Any) -> None:
    async def main() -> None:
        client = AsyncClient(address)
        with pytest.raises(ConnectionLostError, match="no such socket"):
            await client.generate("asked before the client is connected")
        with pytest.raises(ConnectionLostError, match="no such socket"):
            await client.connect()
        worker = await away(FakeWorker, address)
        worker.script = echo
        assert (await client.generate("hello")).text == "hello"
        await client.close()
        worker.stop()

    run(main())


def test_missing_server(address: str, run: Any) -> None:
    async def main() -> None:
        client = AsyncClient(address)
        with pytest.raises(ConnectionLostError, match="not connected"):
            _ = client.model
        await client.close()
        with pytest.raises(ConnectionLostError, match="slipstream serve"):
            async with AsyncClient(address, timeout_s=0.1):
                pass

    run(main())


def test_impatient_connect_does_no_harm(address: str, run: Any) -> None:
    async def main() -> None:
        client = AsyncClient(address)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.connect(), 0.01)
        worker = await away(FakeWorker, address)
        assert await client.connect() == worker.model
        await client.close()
        worker.stop()

    run(main())
