"""Images as Python's callers give them."""

from __future__ import annotations

import base64
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.client.connection.queries import new_tokenize
from slipstream.errors import BadRequestError
from slipstream.request import media as module
from slipstream.request.media import data_of_base64, data_of_url, message_of_parts
from slipstream.request.requests import new_submit
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import ChatMessage, MediaCard, MediaSize, ModelCard, SamplingParams

Image = pytest.importorskip("PIL.Image")

PICTURE = Image.new("RGB", (9, 7), (1, 2, 3))


def png() -> bytes:
    file = BytesIO()
    PICTURE.save(file, "PNG")
    return file.getvalue()


DATA = png()
URL = f"data:image/png;base64,{base64.b64encode(DATA).decode()}"
CARD = ModelCard("m", "", 1000, 4096, (2,), media=MediaCard(7))


def submitted(*parts: Any, model: ModelCard | None = CARD) -> Any:
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": list(parts)}]
    return new_submit(turns, SamplingParams(), model=model)


@pytest.mark.parametrize(
    "form", ["bytes", "bytearray", "path", "text path", "picture", "data url", "openai", "short"]
)
def test_an_image_may_be_given_in_many_forms(form: str, tmp_path: Path) -> None:
    path = tmp_path / "a picture.jpg"  # a name says nothing
    path.write_bytes(DATA)
    part: dict[str, Any] = {
        "bytes": {"type": "image", "image": DATA},
        "bytearray": {"type": "image", "image": bytearray(DATA)},
        "path": {"type": "image", "image": path},
        "text path": {"type": "image", "image": str(path)},
        "picture": {"type": "image", "image": PICTURE},
        "data url": {"type": "image", "image": URL},
        "openai": {"type": "image_url", "image_url": {"url": URL, "detail": "high"}},
        "short": {"type": "image_url", "image_url": URL},
    }[form]

    submit = submitted({"type": "text", "text": "a"}, part, {"type": "text", "text": "b"})

    assert submit.messages[1] == ChatMessage("user", "ab", parts=("a", 0, "b"))
    assert submit.messages[0].parts is None
    [item] = submit.media
    assert (item.data, item.max_pixels) == (DATA, 0)


def test_low_detail_is_a_limit_of_pixels_and_a_count_sends_sizes() -> None:
    part = {"type": "image", "image": Image.new("L", (1024, 256)), "detail": "low"}
    assert submitted(part).media[0].max_pixels == module.LOW_PIXELS
    query = new_tokenize([{"role": "user", "content": [part, {**part, "detail": "high"}]}])
    assert query.media == (MediaSize("image", 1024, 256),) * 2
    large = {"type": "image", "image": Image.new("L", (2048, 512)), "detail": "low"}
    assert new_tokenize([{"role": "user", "content": [large]}]).media == (
        MediaSize("image", 1024, 256),
    )


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "image"}, "content[0].image: missing"),
        ({"type": "image", "image": 7}, "content[0].image: got 'int', allowed: a file's bytes"),
        ({"type": "image", "image": "/nowhere/a.png"}, "a file that can be read"),
        ({"type": "image", "image": "/"}, "a file that can be read"),
        ({"type": "image", "image": "a\0b"}, "a file that can be read"),
        ({"type": "image", "image": "https://x/a.png"}, "the server fetches no files"),
        ({"type": "image", "image": b"no picture"}, "content[0]: got a file that begins with"),
        ({"type": "image", "image": DATA, "detail": "x"}, "content[0].detail: got 'x', allowed: "),
        ({"type": "image_url", "image_url": {"url": "x"}}, "content[0].image_url.url: got 'x'"),
        ({"type": "image_url"}, "content[0].image_url: missing"),
    ],
)
def test_what_is_no_image_is_named(part: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        submitted(part)
    assert said in str(caught.value)


def test_a_file_larger_than_a_message_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_MESSAGE_BYTES", 10)
    path = tmp_path / "large"
    path.write_bytes(bytes(11))
    with pytest.raises(BadRequestError, match="a file of more than 10 bytes"):
        submitted({"type": "image", "image": path})


def test_a_model_without_images_is_named_before_anything_is_sent() -> None:
    text = ModelCard("m", "", 1000, 4096, (2,))
    with pytest.raises(BadRequestError, match=r"content\[0\]: got an image, allowed: text: m "):
        submitted({"type": "image", "image": DATA}, model=text)
    card = ModelCard("m", "", 1000, 4096, (2,), media=MediaCard(7, "its trial failed"))
    with pytest.raises(BadRequestError, match="its trial failed"):
        submitted({"type": "image", "image": DATA}, model=card)
    assert submitted({"type": "image", "image": DATA}, model=None).media


@given(st.binary(max_size=300), st.sampled_from([4, 8, 2**20]))
def test_base64_by_pieces_is_base64(data: bytes, piece: int) -> None:
    encoded = base64.b64encode(data).decode()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "_PIECE_CHARS", piece)
        assert data_of_base64(encoded, "x") == data
        assert data_of_url(f"DATA:image/gif;charset=x;BASE64,{encoded}", "x") == data


@given(st.text(max_size=40))
def test_other_texts_are_refused(text: str) -> None:
    try:
        wanted = base64.b64decode(text, validate=True)
    except ValueError:
        with pytest.raises(BadRequest, match="allowed: the base64"):
            data_of_base64(text, "x")
    else:
        assert data_of_base64(text, "x") == wanted


@given(st.lists(st.one_of(st.text(max_size=5), st.integers(0, 9)), max_size=8))
def test_parts_say_what_the_content_does(parts: list[str | int]) -> None:
    content, kept = message_of_parts(parts)

    assert content == "".join(part for part in parts if isinstance(part, str))
    if kept is None:
        assert all(isinstance(part, str) for part in parts)
    else:
        assert "".join(part for part in kept if isinstance(part, str)) == content
        assert [part for part in kept if not isinstance(part, str)] == [
            part for part in parts if not isinstance(part, str)
        ]
