"""Images over HTTP, with openai's client, up to what the worker is sent."""

from __future__ import annotations

import asyncio
import base64
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from msgspec.structs import replace
from openai import BadRequestError, InternalServerError, OpenAI
from tests.helpers.fake_worker import MODEL, Entry, FakeWorker, deltas, end_of
from tests.helpers.http_front import Front
from tests.helpers.patience import PATIENCE_S

from slipstream.http.auth import ApiKeys
from slipstream.http.config import Limits
from slipstream.http.endpoints import model_endpoints
from slipstream.http.endpoints.model_endpoints import ModelEndpoints
from slipstream.http.response_encoding import Response
from slipstream_ipc.columns import pack_u32
from slipstream_ipc.messages import Fault, MediaCard, MediaSize, Submit, Tokenize, Tokenized

Image = pytest.importorskip("PIL.Image")


def picture(size: int) -> bytes:
    """A picture whose file is about as large as its pixels."""
    file = BytesIO()
    pixels = np.random.default_rng(size).integers(0, 255, (size, size, 3), np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


SMALL, LARGE = picture(9), picture(700)  # 1.5 MB: decoded away from the loop


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeWorker]:
    folder = tmp_path_factory.mktemp("images")
    found = FakeWorker(f"ipc://{folder}/w", model=replace(MODEL, media=MediaCard(7)))
    yield found
    found.stop()


@pytest.fixture(scope="module")
def front(worker: FakeWorker) -> Iterator[Front]:
    running = Front(worker.address)
    yield running
    running.stop()


def asked(front: Front, *files: bytes, **fields: Any) -> Any:
    parts: list[Any] = [{"type": "text", "text": "see"}]
    for data in files:
        url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        parts.append({"type": "image_url", "image_url": {"url": url}})
    with OpenAI(
        base_url=f"http://127.0.0.1:{front.port}/v1", api_key="x", max_retries=0, timeout=60
    ) as client:
        turns: Any = [{"role": "user", "content": parts}]
        return client.chat.completions.create(model="fake", messages=turns, **fields)


def posted(front: Front, path: str, body: Any) -> tuple[int, Any]:
    """Status and body of an answer."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{front.port}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.fixture
def aside() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.mark.parametrize("files", [(SMALL,), (SMALL, LARGE, SMALL)])
def test_files_arrive_as_they_were_and_their_tokens_count(
    files: tuple[bytes, ...], worker: FakeWorker, front: Front, aside: ThreadPoolExecutor
) -> None:
    asking = aside.submit(asked, front, *files)

    submit = worker.expect(Submit)
    handle = worker.accept(submit, [1, *[7] * 35, 2])
    worker.send(deltas(Entry(handle, "a cat", end=end_of("a cat"))))

    assert [item.data for item in submit.media] == list(files)
    assert submit.messages[0].parts == ("see", *range(len(files)))
    answer = asking.result()
    assert answer.choices[0].message.content == "a cat"
    assert answer.usage.prompt_tokens == 37


@pytest.mark.parametrize("data", [SMALL, LARGE])
def test_a_fault_of_an_image_names_its_place(
    data: bytes, worker: FakeWorker, front: Front, aside: ThreadPoolExecutor
) -> None:
    asking = aside.submit(asked, front, data)
    fault = Fault("bad_request", "media[0]: got a file that cannot be decoded", "media[0]")
    worker.reject(worker.expect(Submit), fault)

    with pytest.raises(BadRequestError, match=r"messages\[0\]\.content\[1\]: got a file") as caught:
        asking.result()
    assert caught.value.param == "messages[0].content[1]"


def test_a_worker_without_room_for_files_is_overloaded(
    worker: FakeWorker, front: Front, aside: ThreadPoolExecutor
) -> None:
    asking = aside.submit(asked, front, SMALL)
    fault = Fault("overloaded", "images of 5 bytes are held already")
    worker.reject(worker.expect(Submit), fault)

    with pytest.raises(InternalServerError) as caught:
        asking.result()
    assert caught.value.status_code == 503


@pytest.mark.parametrize("cut", [False, True])
def test_a_large_file_that_is_wrong_is_refused_in_the_same_words(cut: bool, front: Front) -> None:
    encoded = base64.b64encode(b"no picture" * 150_000).decode()
    url = f"data:;base64,{encoded[:-1] if cut else encoded}"
    part = {"type": "image_url", "image_url": {"url": url}}
    body = {"model": "fake", "messages": [{"role": "user", "content": [part]}]}

    status, answer = posted(front, "/v1/chat/completions", body)

    assert status == 400
    said = answer["error"]["message"]
    assert ("allowed: the base64" if cut else "got a file that begins with") in said


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", "image_url"),
        ("/v1/messages/count_tokens", "image"),
        ("/v1/responses/input_tokens", "input_image"),
    ],
)
def test_tokens_of_images_are_counted_by_their_sizes(
    path: str, body: str, worker: FakeWorker, front: Front, aside: ThreadPoolExecutor
) -> None:
    encoded = base64.b64encode(SMALL).decode()
    url = f"data:image/png;base64,{encoded}"
    source = {"type": "base64", "media_type": "image/png", "data": encoded}
    part = {
        "image_url": {"type": "image_url", "image_url": {"url": url}},
        "image": {"type": "image", "source": source},
        "input_image": {"type": "input_image", "image_url": url},
    }[body]
    turns = [{"role": "user", "content": [part]}]
    given = {"model": "fake", "input" if body == "input_image" else "messages": turns}
    asking = aside.submit(posted, front, path, given)

    query = worker.expect(Tokenize)
    worker.send(Tokenized(query.number, pack_u32([1, 7, 7])))

    assert query.media == (MediaSize("image", 9, 9),)
    assert query.messages[0].parts == (0,)
    _, answer = asking.result()
    assert 3 in (answer.get("count"), answer.get("input_tokens"))


def test_no_image_is_dropped_by_a_model_for_text(tmp_path: Path) -> None:
    worker = FakeWorker(f"ipc://{tmp_path}/w")
    running = Front(worker.address)
    try:
        for files in ((SMALL,), (LARGE,)):
            with pytest.raises(BadRequestError, match="served as text: fake takes no images"):
                asked(running, *files)
    finally:
        running.stop()
        worker.stop()


async def _answered(endpoints: ModelEndpoints, worker: Any) -> Response:
    worker.loop = asyncio.get_running_loop()
    body = b'{"image": "data:;base64,' + b"A" * 2**21 + b'"}'
    return await asyncio.wait_for(endpoints.answer("/v1/chat/completions", body), PATIENCE_S)


def test_a_request_whose_files_cannot_be_decoded_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class NoWorker:
        models = ()

    def fails(_body: bytes) -> dict[str, Any]:
        raise MemoryError

    monkeypatch.setattr(model_endpoints, "decoded_files", fails)
    worker: Any = NoWorker()
    endpoints = ModelEndpoints(worker, ApiKeys(()), cast(Any, None), Limits())
    assert asyncio.run(_answered(endpoints, worker)).status == 500
