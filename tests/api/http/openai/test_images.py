"""Images in the bodies of all APIs: what reaches the worker, and what is refused, and where."""

from __future__ import annotations

import base64
import json
from io import BytesIO
from typing import Any

import pytest
from msgspec.structs import replace

from slipstream.errors import BadRequestError
from slipstream.http.answers.answer_plan import AnswerPlan
from slipstream.http.anthropic.messages import plan_messages, read_messages
from slipstream.http.api_errors import ApiError, error_of
from slipstream.http.openai.chat_turns import chat_of_turns
from slipstream.http.planning.chat import plan_chat, prompt_query, read_chat
from slipstream.http.responses.response_plan import new_response
from slipstream.http.responses.responses_request import read_response_request
from slipstream.packed_prompts import messages_of
from slipstream.request.media import LOW_PIXELS
from slipstream_ipc.messages import ChatMessage, Fault, MediaCard, MediaSize, ModelCard
from slipstream_ipc.validation.media import media_item

Image = pytest.importorskip("PIL.Image")

TEXT_MODEL = ModelCard("m", "", 1000, 4096, (2,))
MODEL = replace(TEXT_MODEL, media=MediaCard(7))


def picture(width: int = 9, height: int = 7, kind: str = "PNG") -> bytes:
    file = BytesIO()
    Image.new("RGB", (width, height), (width, height, 0)).save(file, kind)
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


A, B = picture(9, 7), picture(4, 30, "JPEG")
URL = data_url(A)


def openai(*parts: Any, model: ModelCard = MODEL, **fields: Any) -> AnswerPlan:
    turn = {"role": "user", "content": list(parts)}
    body = {"messages": [turn], **fields}
    return plan_chat(read_chat(json.dumps(body).encode()), model)


def response(*items: Any, model: ModelCard = MODEL) -> AnswerPlan:
    return new_response(read_response_request(json.dumps({"input": items}).encode()), model)[0]


def anthropic(*turns: Any, model: ModelCard = MODEL) -> AnswerPlan:
    body = {"model": "m", "max_tokens": 5, "messages": turns}
    return plan_messages(read_messages(json.dumps(body).encode()), model)


def seen(plan: AnswerPlan) -> tuple[list[ChatMessage], list[tuple[bytes, int]]]:
    """The messages of a plan's first stream, and its files with their limits of pixels."""
    submit = plan.states[0].request
    return list(messages_of(submit)), [(each.data, each.max_pixels) for each in submit.media]


def text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def image(url: str = URL, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def block(data: bytes = A) -> dict[str, Any]:
    encoded = base64.b64encode(data).decode()
    source = {"type": "base64", "media_type": "image/png", "data": encoded}
    return {"type": "image", "source": source}


def test_parts_keep_their_order_and_files_their_bytes() -> None:
    plan = openai(text("a"), image(), text("b"), image(data_url(B, "image/jpeg")), image())

    messages, media = seen(plan)

    assert messages == [ChatMessage("user", "ab", parts=("a", 0, "b", 1, 2))]
    assert media == [(A, 0), (B, 0), (A, 0)]


@pytest.mark.parametrize(
    ("detail", "most"), [("low", LOW_PIXELS), ("high", 0), ("auto", 0), (None, 0)]
)
def test_detail_is_a_limit_of_pixels(detail: str | None, most: int) -> None:
    assert seen(openai(image(detail=detail)))[1] == [(A, most)]
    part = {"type": "input_image", "image_url": URL, "detail": detail}
    assert seen(response({"role": "user", "content": [part]}))[1] == [(A, most)]


def test_a_url_may_stand_alone_and_say_another_type() -> None:
    """What a file is its first bytes say."""
    parts = [{"type": "image_url", "image_url": data_url(B, "image/png")}, image(), text("x")]
    assert seen(openai(*parts))[1] == [(B, 0), (A, 0)]


def test_images_of_responses_stand_in_messages_and_outputs() -> None:
    part = {"type": "input_image", "image_url": URL}
    plan = response(
        {"role": "user", "content": [{"type": "input_text", "text": "see"}, part]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [part]},
    )

    messages, media = seen(plan)

    assert messages[0] == ChatMessage("user", "see", parts=("see", 0))
    assert messages[2] == ChatMessage("tool", "", tool_call_id="c", parts=(1,))
    assert media == [(A, 0), (A, 0)]


def test_images_of_anthropics_api_stand_in_turns_and_results() -> None:
    """Claude Code reads screenshots as results of its tools."""
    use = {"type": "tool_use", "id": "a", "name": "read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [text("shot"), block(B)]}
    plan = anthropic(
        {"role": "user", "content": [block(), text("what is it?")]},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{**result, "is_error": True}]},
    )

    messages, media = seen(plan)

    assert messages[0] == ChatMessage("user", "what is it?", parts=(0, "what is it?"))
    assert messages[2].parts == ("Error: ", "shot", 1)
    assert messages[2].content == "Error: shot"
    assert media == [(A, 0), (B, 0)]


def test_a_count_of_tokens_sends_sizes_alone() -> None:
    part = image(data_url(picture(600, 600)), detail="low")
    body = read_chat(json.dumps({"messages": [{"role": "user", "content": [part]}]}).encode())

    query, names = prompt_query(body, MODEL)

    assert query.media == (MediaSize("image", 512, 512),)
    assert query.messages == (ChatMessage("user", "", parts=(0,)),)
    assert names == {"media[0]": "messages[0].content[0]"}


AT = "messages[0].content[0]"


@pytest.mark.parametrize(
    ("part", "field", "said"),
    [
        (image("https://x.org/a.png"), f"{AT}.image_url", "the server fetches no files"),
        (image("file:///etc/passwd"), f"{AT}.image_url", "allowed: a data: URL"),
        (image("/etc/passwd"), f"{AT}.image_url", "allowed: a data: URL"),
        (image("data:image/png,abc"), f"{AT}.image_url", "allowed: a data: URL"),
        (image("data:image/png;base64,@@@@"), f"{AT}.image_url", "allowed: the base64"),
        (image("data:image/png;base64,abc"), f"{AT}.image_url", "allowed: the base64"),
        (image("data:;base64,"), AT, "got an empty file"),
        (image(data_url(b"<svg/>")), AT, "got an SVG picture"),
        (image(data_url(b"\0\0\0\x20ftypheic")), AT, "allowed: a PNG, JPEG, WebP or GIF"),
        (image(data_url(A[:20])), AT, "a PNG file that is cut off"),
        (image(data_url(A[:16] + b"\0\1\0\0\0\1\0\0" + A[24:])), AT, "at most 33554432 pixels"),
        (image(detail="ultra"), f"{AT}.detail", "one of auto, low, high"),
        ({"type": "image_url"}, f"{AT}.image_url", "missing"),
        ({"type": "image_url", "image_url": {"uri": "x"}}, f"{AT}.image_url.uri", "unknown field"),
    ],
)
def test_what_is_no_image_is_refused_with_its_place(
    part: dict[str, Any], field: str, said: str
) -> None:
    with pytest.raises(ApiError) as caught:
        openai(part)
    assert caught.value.status == 400
    assert caught.value.body.error.param == field
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("media", "why"),
    [(None, "m takes no images"), (MediaCard(7, "its tower was not loaded"), "tower was not")],
)
def test_a_model_that_takes_no_images_says_so(media: MediaCard | None, why: str) -> None:
    """Whatever the image is: nothing is decoded for it."""
    model = replace(TEXT_MODEL, media=media)
    part = {"type": "input_image", "image_url": "x"}
    asked = [
        (lambda: openai(image("x"), model=model), f"{AT}.type: got 'image_url', "),
        (
            lambda: response({"role": "user", "content": [part]}, model=model),
            "input[0].content[0].type: got 'input_image', ",
        ),
        (
            lambda: anthropic({"role": "user", "content": [{"type": "image"}]}, model=model),
            f"{AT}: got 'image', ",
        ),
    ]
    for ask, begin in asked:
        with pytest.raises(ApiError) as caught:
            ask()
        said = str(caught.value)
        assert said.startswith(f"{begin}allowed: text; the model is served as text: ")
        assert why in said


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"type": "url", "url": "https://x"}, "the server fetches no files"),
        ({"type": "file", "file_id": "f"}, "the server fetches no files"),
        ({"type": "base64", "data": 7}, 'allowed: {"type": "base64"'),
        ({}, 'allowed: {"type": "base64"'),
    ],
)
def test_other_sources_of_anthropics_are_refused(source: dict[str, Any], said: str) -> None:
    with pytest.raises(ApiError, match=r"messages\[0\].content\[0\].source: ") as caught:
        anthropic({"role": "user", "content": [{"type": "image", "source": source}]})
    assert said in str(caught.value)


def test_images_of_responses_that_cannot_be_had_are_refused() -> None:
    for item, said in (
        ({"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}, "got file_id"),
        ({"role": "assistant", "content": [{"type": "input_image", "image_url": URL}]}, "only in"),
        ({"type": "reasoning", "content": [{"type": "input_image", "image_url": URL}]}, "only in"),
    ):
        with pytest.raises(ApiError, match=r"input\[0\]\.content") as caught:
            response(item)
        assert said in str(caught.value)


def test_too_many_images_are_refused() -> None:
    with pytest.raises(ApiError, match=r"content\[128\]: got one image more, allowed: 128"):
        openai(*[image()] * 129)


def test_settings_of_a_processor_are_refused_by_name() -> None:
    with pytest.raises(ApiError, match="mm_processor_kwargs"):
        openai(text("x"), mm_processor_kwargs={"max_pixels": 5})


@pytest.mark.parametrize(
    "plan",
    [
        lambda: openai(text("a"), image()),
        lambda: response(
            {"role": "user", "content": "x"},
            {"role": "user", "content": [{"type": "input_image", "image_url": URL}]},
        ),
        lambda: anthropic(
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "y"},
            {"role": "user", "content": [text("a"), text("b"), block()]},
        ),
    ],
)
def test_a_fault_of_the_worker_names_the_callers_place(plan: Any) -> None:
    """It knows the image by its number alone."""
    place = {"chatcmpl": f"{AT[:-2]}1]", "resp": "input[1].content[0]"}
    planned: AnswerPlan = plan()
    wanted = place.get(planned.id.kind, "messages[2].content[2]")
    fault = Fault("bad_request", "media[0]: got a file that cannot be decoded", "media[0]")

    error = error_of(BadRequestError(fault), planned.param_names)

    assert error.body.error.param == wanted
    assert str(error) == f"{wanted}: got a file that cannot be decoded"


def test_the_same_picture_is_one_item_each_time() -> None:
    """Items are told apart by content: a worker keeps the file once."""
    body = read_chat(
        json.dumps({"messages": [{"role": "user", "content": [image(), image()]}]}).encode()
    )

    chat, _ = chat_of_turns(body.messages, MODEL)

    assert chat.media == (media_item("image", A),) * 2
