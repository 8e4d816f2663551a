"""Placeholders of images, against transformers' processors run on pictures of the same sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.helpers.vision_folders import LLAVA_TEMPLATE, VISION, vision_folder

from slipstream_ipc.columns import u32
from slipstream_ipc.messages import ChatMessage, MediaSize, Render, Rendered
from slipstream_worker.tokenizer.image_placeholders import (
    ImagePlaceholders,
    NoPicturesError,
    found_placeholders,
    load_placeholders,
)
from slipstream_worker.tokenizer.prompt_rendering import ChatTraits, render
from slipstream_worker.tokenizer.template_dialect import find_dialect, find_refused_shapes

Image = pytest.importorskip("PIL.Image")


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[tuple[str, ...], Path] = {}

    def of(*what: str) -> Path:
        if what not in made:
            made[what] = vision_folder(tmp_path_factory.mktemp("vision"), *what)
        return made[what]

    return of


def tokenizer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def traits_of(tokenizer: Any, folder: Path) -> ChatTraits:
    dialect = find_dialect(tokenizer)
    return ChatTraits(
        dialect,
        refused=find_refused_shapes(tokenizer, dialect),
        placeholders=load_placeholders(tokenizer, str(folder)),
    )


SIDES = st.integers(8, 400)


@pytest.mark.parametrize("architecture", VISION)
def test_the_text_for_an_image_is_the_processors_own(
    architecture: str, folder_of: Callable[..., Path]
) -> None:
    """Whatever the size, and with two images as with each alone."""
    folder = folder_of(architecture)
    tokenizer = tokenizer_of(folder)
    found = load_placeholders(tokenizer, str(folder))
    processor = found.processor
    kwargs = processor._merge_kwargs(tokenizer_init_kwargs={})["images_kwargs"]

    @given(st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=2))
    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    def check(sizes: list[tuple[int, int]]) -> None:
        wanted = []
        for width, height in sizes:
            images, *_ = processor.prepare_inputs_layout(images=[Image.new("RGB", (width, height))])
            wanted += processor._process_images(images, **kwargs)[1]
        text = "a".join(["", *[found.token] * len(sizes), ""])

        expanded = found.expanded(text, [MediaSize("image", *size) for size in sizes], 0)

        assert expanded == "a".join(["", *wanted, ""])

    check()


def rendered(
    tokenizer: Any, traits: ChatTraits, messages: list[ChatMessage], *sizes: MediaSize, **more: Any
) -> Rendered:
    request = Render(1, messages=tuple(messages), media=sizes, **more)
    return render(tokenizer, request, traits)


def user(*parts: str | int, role: str = "user") -> ChatMessage:
    content = "".join([part for part in parts if isinstance(part, str)])
    return ChatMessage(role, content, parts=parts)


SMALL = MediaSize("image", 56, 40)  # 35 placeholders of the tiny Qwen2.5-VL
TEXT = ChatMessage("user", "hello")


def test_images_stand_where_their_parts_do(folder_of: Callable[..., Path]) -> None:
    folder = folder_of("qwen2_5_vl")
    tokenizer = tokenizer_of(folder)
    traits = traits_of(tokenizer, folder)
    place = "<|vision_start|>" + "<|image_pad|>" * 35 + "<|vision_end|>"

    found = rendered(
        tokenizer, traits, [ChatMessage("system", "s"), user("one", 0, "two", 1)], SMALL, SMALL
    )

    wanted = (
        f"<|im_start|>system\ns<|im_end|>\n<|im_start|>user\none{place}two{place}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert found.fault is None
    assert tokenizer.decode(u32(found.token_ids)) == wanted


def test_a_template_that_reads_parts_alone_is_given_them(folder_of: Callable[..., Path]) -> None:
    """LLaVA's: without parts it loses all that is said, in chats without images too."""
    folder = folder_of("llava", LLAVA_TEMPLATE)
    tokenizer = tokenizer_of(folder)
    traits = traits_of(tokenizer, folder)

    plain = rendered(tokenizer, traits, [ChatMessage("system", "s"), TEXT])
    seen = rendered(tokenizer, traits, [user("what is ", 0)], MediaSize("image", 30, 70))

    assert tokenizer.decode(u32(plain.token_ids)) == "system: s user: hello assistant:"
    wanted = "user: " + "<image>" * 36 + "\nwhat is  assistant:"
    assert tokenizer.decode(u32(seen.token_ids)) == wanted


IN_USER_ALONE = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string or m.role != 'user' %}"
    "{{ m.content }}{% else %}{% for c in m.content %}"
    "{{ '<|image_pad|>' if c.type == 'image' else c.text }}{% endfor %}{% endif %}\n{% endfor %}"
)
TOOL = ChatMessage("tool", "shot", tool_call_id="abcdefghi", parts=("shot", 0))
SECOND = replace(TOOL, parts=("shot", 1))


@pytest.mark.parametrize(
    ("messages", "sizes", "field", "said"),
    [
        ([TEXT, TOOL], [SMALL], "media[0]", "shows no images there"),
        ([user("a", 0), SECOND], [SMALL, SMALL], "media[1]", "in a turn of 'tool'"),
        ([user("see <|image_pad|>", 0)], [SMALL], "messages[0].content", "<|image_pad|>"),
        ([user("x", 0), ChatMessage("assistant", "<|image_pad|>")], [SMALL], None, "other texts"),
        ([user(0)], [MediaSize("image", 0, 5)], "media[0]", "0 x 5 pixels"),
        ([user(0)], [MediaSize("image", 2**20, 2**20)], "media[0]", "allowed: 1 to 33554432"),
        ([user(0)], [MediaSize("image", 3000, 2)], "media[0]", "aspect ratio"),
    ],
)
def test_an_image_that_has_no_place_is_refused(
    messages: list[ChatMessage],
    sizes: list[MediaSize],
    field: str | None,
    said: str,
    folder_of: Callable[..., Path],
) -> None:
    folder = folder_of("qwen2_5_vl", IN_USER_ALONE)
    tokenizer = tokenizer_of(folder)

    found = rendered(tokenizer, traits_of(tokenizer, folder), messages, *sizes)

    assert found.fault is not None
    assert not found.token_ids
    assert said in found.fault.message
    assert field in (None, found.fault.field)


def test_a_placeholder_in_a_text_alone_is_a_token_as_ever(folder_of: Callable[..., Path]) -> None:
    folder = folder_of("qwen2_5_vl")
    tokenizer = tokenizer_of(folder)

    found = rendered(tokenizer, traits_of(tokenizer, folder), [user("see <|image_pad|>")])

    assert found.fault is None
    assert "see <|image_pad|>" in tokenizer.decode(u32(found.token_ids))


def test_images_that_do_not_fit_are_refused_with_both_numbers(
    folder_of: Callable[..., Path],
) -> None:
    folder = folder_of("qwen2_5_vl")
    tokenizer = tokenizer_of(folder)
    traits = traits_of(tokenizer, folder)
    chat = [user("a", 0, 1)]

    one = rendered(tokenizer, traits, chat, SMALL, SMALL, max_tokens=35)
    both = rendered(tokenizer, traits, chat, SMALL, SMALL, max_tokens=60)
    fits = rendered(tokenizer, traits, chat, SMALL, SMALL, max_tokens=200)

    assert one.fault is not None
    assert one.fault.field == "media[0]"
    assert "an image of 35 tokens, allowed: at most 34" in one.fault.message
    assert both.fault is not None
    assert both.fault.field == "media"
    assert "images of more than 70 tokens, allowed: a prompt of at most 59" in both.fault.message
    assert (one.fault.num_prompt_tokens, one.fault.max_num_tokens) == (35, 35)
    assert fits.fault is None


def test_a_system_turn_that_moves_takes_its_image_along_or_is_refused(
    folder_of: Callable[..., Path],
) -> None:
    """Images keep their order: the one after which a turn's would come is not exchanged for it."""
    no_system = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('first') }}{% endif %}{{ m.role }}: {% if m.content is string %}"
        "{{ m.content }}{% else %}{% for c in m.content %}"
        "{{ '<|image_pad|>' if c.type == 'image' else c.text }}{% endfor %}{% endif %}\n"
        "{% endfor %}"
    )
    folder = folder_of("qwen2_5_vl", no_system)
    tokenizer = tokenizer_of(folder)
    traits = traits_of(tokenizer, folder)

    moved = rendered(tokenizer, traits, [TEXT, user("look", 0, role="system")], SMALL)
    passed = rendered(
        tokenizer, traits, [user("a", 0), user("look", 1, role="system"), TEXT], SMALL, SMALL
    )

    pads = "<|image_pad|>" * 35
    assert tokenizer.decode(u32(moved.token_ids)) == f"system: look{pads}user: hello"
    assert moved.changed_turns == ("system-first",)
    assert passed.fault is not None
    assert "in another order" in passed.fault.message


def test_why_a_model_takes_no_pictures_is_told(
    folder_of: Callable[..., Path], tmp_path: Path
) -> None:
    folder = folder_of("qwen2_5_vl")
    tokenizer = tokenizer_of(folder)
    with pytest.raises(NoPicturesError, match=r"config\.json has no vision_config"):
        load_placeholders(tokenizer, str(tmp_path))
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(NoPicturesError, match=r"has no preprocessor_config\.json"):
        load_placeholders(tokenizer, str(tmp_path))
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "processor_config.json").write_text('{"processor_class": "NoSuchProcessor"}')
    with pytest.raises(NoPicturesError, match="NoSuchProcessor"):
        load_placeholders(tokenizer, str(tmp_path))


def test_a_processor_that_writes_what_its_sizes_do_not_tell_is_not_used(
    folder_of: Callable[..., Path],
) -> None:
    folder = folder_of("qwen2_5_vl")
    found: ImagePlaceholders = load_placeholders(tokenizer_of(folder), str(folder))

    class Moody(type(found.processor)):  # type: ignore[misc]
        def replace_image_token(self, inputs: Any, image_idx: int, **kwargs: Any) -> str:
            text: str = super().replace_image_token(inputs, image_idx, **kwargs)
            return text + "!"

    found.processor.__class__ = Moody
    with pytest.raises(NoPicturesError, match="other texts for images"):
        found_placeholders(found.processor)
