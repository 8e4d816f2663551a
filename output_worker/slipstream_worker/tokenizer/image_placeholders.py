"""The text that stands for a picture in the prompts of a vision model, by the picture's size alone.

A chat template writes one placeholder for a picture. The model's processor (transformers') puts as
many in its place as the model makes rows of it, and often words around them. Here it does so from a
header's numbers: no pixel is decoded, and neither torch nor torchvision is needed, which most of
these processors want for videos.

- Two ways of asking a processor for the text are tried on blank pictures of several sizes when it
  is loaded, against what it writes once it has processed them. Where both differ the model takes no
  pictures, and the reason is told.
- Some processors treat several pictures in one batch otherwise: here each stands alone, as it is
  computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from inspect import signature
from typing import Any

import msgspec

from slipstream_ipc.errors import BadRequest, Summary, TooManyTokens, brief
from slipstream_ipc.hub_id import split_revision
from slipstream_ipc.messages import ChatMessage, MediaSize
from slipstream_ipc.validation.image_header import MAX_IMAGE_PIXELS

_PICTURES = "preprocessor_config.json"
_CONFIG = "config.json"
_FILES = ("processor_config.json", _PICTURES, "tokenizer_config.json")
# height and width of the blank pictures: small, wide, high, one of each that is cut into tiles
_TRIALS = ((32, 32), (56, 40), (40, 300), (300, 40), (333, 500), (720, 1280))

WriteText = Callable[[int, int], str]  # of height and width


class NoPicturesError(Exception):
    """The model's pictures cannot be counted; the text says why."""


class ImagePlaceholders:
    """Puts the text that a processor writes for pictures into prompts."""

    def __init__(self, processor: Any, count: Callable[[int, int], int], write: WriteText) -> None:
        """processor: of transformers. count: the tokens of a picture of a height and a width,
        about. write: the text that stands for it.
        """
        self.processor = processor
        self.token: str = processor.image_token  # that a chat template writes
        self._count = count
        self._write = write

    def check_texts(self, messages: Sequence[ChatMessage]) -> None:
        """Raises BadRequest for a placeholder in a text of a chat with pictures: it would stand for
        one of them.
        """
        for index, message in enumerate(messages):
            if any(self.token in text for text in _texts(message)):
                given = Summary(f"the text {self.token}")
                allowed = "other texts beside images: the model reads it as one of them"
                raise BadRequest(f"messages[{index}].content", given, allowed)

    def expanded(self, text: str, sizes: Sequence[MediaSize], max_tokens: int) -> str:
        """A prompt with the whole text of each picture in place of its placeholder. max_tokens: see
        `Render`.

        Raises BadRequest where there are not as many, or where they do not fit the model.
        """
        pieces = text.split(self.token)
        if len(pieces) != len(sizes) + 1:
            given = Summary(f"{len(sizes)} images and {len(pieces) - 1} places for them")
            raise BadRequest("media", given, "as many as the chat template shows")
        written: list[str] = []
        num_tokens = 0
        for index, size in enumerate(sizes):
            field = f"media[{index}]"
            if not 0 < size.width * size.height <= MAX_IMAGE_PIXELS:
                given = Summary(f"{size.width} x {size.height} pixels")
                raise BadRequest(field, given, f"1 to {MAX_IMAGE_PIXELS} of them")
            try:
                num = self._count(size.height, size.width)
            except Exception as error:  # a processor refuses some proportions
                given = Summary(f"{size.width} x {size.height} pixels")
                raise BadRequest(field, given, f"what its processor takes ({error})") from None
            num_tokens += num
            if 0 < max_tokens <= num:
                given = Summary(f"an image of {num} tokens")
                allowed = f"at most {max_tokens - 1}, as the model takes {max_tokens}"
                raise TooManyTokens(field, given, allowed, num, max_tokens)
            if 0 < max_tokens <= num_tokens:
                given = Summary(f"images of more than {num_tokens} tokens")
                allowed = f"a prompt of at most {max_tokens - 1}"
                raise TooManyTokens("media", given, allowed, num_tokens, max_tokens)
            written.append(self._write(size.height, size.width))
        pairs = zip(pieces, [*written, ""], strict=True)
        return "".join([piece for pair in pairs for piece in pair])


def load_placeholders(tokenizer: Any, name: str) -> ImagePlaceholders:
    """The placeholders of a model. tokenizer: a transformers tokenizer, loaded by its `name`, a
    folder or a hub id. Raises NoPicturesError.
    """
    try:
        processor = _load_processor(tokenizer, name)
    except NoPicturesError:
        raise
    except Exception as error:  # transformers raises whatever it likes
        said = brief(" ".join(str(error).split()))
        why = f"its processor cannot be loaded ({type(error).__name__}: {said})"
        raise NoPicturesError(why) from error
    return found_placeholders(processor)


def found_placeholders(processor: Any) -> ImagePlaceholders:
    """The placeholders of a processor of transformers, by trial. Raises NoPicturesError."""
    token = getattr(processor, "image_token", None)
    if not isinstance(token, str) or not token:
        raise NoPicturesError("its processor has no placeholder for images")
    kwargs = processor._merge_kwargs(tokenizer_init_kwargs={})["images_kwargs"]

    def count(height: int, width: int) -> int:
        data = processor._get_num_multimodal_tokens(image_sizes=[(height, width)])
        [num] = data["num_image_tokens"]
        return int(num)

    def repeated(height: int, width: int) -> str:
        return token * count(height, width)

    def asked(height: int, width: int) -> str:
        fields = _HeaderFields(processor, height, width, kwargs, count)
        text: str = processor.replace_image_token(fields, 0, **kwargs)
        return text

    try:
        wanted = [_processed(processor, height, width, kwargs) for height, width in _TRIALS]
        for write in (repeated, asked):
            if _tried(write) == wanted:
                return ImagePlaceholders(processor, count, write)
    except Exception as error:  # transformers raises whatever it likes
        said = brief(" ".join(str(error).split()))
        why = f"its processor fails ({type(error).__name__}: {said})"
        raise NoPicturesError(why) from error
    raise NoPicturesError("its processor writes other texts for images than their sizes tell")


class _HeaderFields:
    """The fields that `replace_image_token` reads, for a picture that is not processed."""

    def __init__(
        self,
        processor: Any,
        height: int,
        width: int,
        kwargs: dict[str, Any],
        count: Callable[[int, int], int],
    ) -> None:
        self._processor = processor
        self._size = height, width
        self._kwargs = kwargs
        self._count = count

    def __getitem__(self, name: str) -> Any:
        match name:
            case "num_patches":
                return [self._patches()]
            case "rows":
                return [[self._patches()[1]]]
            case "cols":
                return [[self._patches()[2]]]
            case "num_crops":
                return [0]
            case "num_soft_tokens_per_image":
                return [self._count(*self._size)]
            case _:
                raise KeyError(name)

    def _patches(self) -> Any:
        images = self._processor.image_processor
        return images.get_number_of_image_patches(*self._size, self._kwargs)


def _tried(write: WriteText) -> list[str] | None:
    """The texts of the trial's pictures; None where this way is not the processor's."""
    try:
        return [write(height, width) for height, width in _TRIALS]
    except Exception:  # it lacks what it reads
        return None


def _processed(processor: Any, height: int, width: int, kwargs: dict[str, Any]) -> str:
    """The text that a processor writes for a blank picture that it has processed."""
    image = import_module("PIL.Image").new("RGB", (width, height))
    images, *_ = processor.prepare_inputs_layout(images=[image])
    _, [text] = processor._process_images(images, **kwargs)
    assert isinstance(text, str)
    return text


def _load_processor(tokenizer: Any, name: str) -> Any:
    """Raises NoPicturesError, and whatever transformers raises."""
    folder, revision = split_revision(name)
    config = _read(folder, _CONFIG, revision)
    if "vision_config" not in config:  # nothing else is looked for, or imported
        raise NoPicturesError(f"its {_CONFIG} has no vision_config")
    files = {file: _read(folder, file, revision) for file in _FILES}
    if not files[_PICTURES] and "image_processor" not in files[_FILES[0]]:
        raise NoPicturesError(f"{folder} has no {_PICTURES}")
    named = [found for file in _FILES if (found := files[file].get("processor_class"))]
    auto = import_module("transformers.models.auto.processing_auto")
    image_auto = import_module("transformers.models.auto.image_processing_auto")
    model_type = config.get("model_type")
    class_name = named[0] if named else auto.PROCESSOR_MAPPING_NAMES.get(model_type)
    base = None if class_name is None else auto.processor_class_from_name(class_name)
    if base is None:
        raise NoPicturesError(f"transformers knows no processor of {class_name or model_type!r}")
    # without the check of its parts' classes, as no processor of videos is there
    served = type(base.__name__, (base,), {"check_argument_for_proper_class": _unchecked})
    image_processor = image_auto.AutoImageProcessor.from_pretrained(
        folder, revision=revision, backend="pil"
    )
    parts = {"image_processor": image_processor, "tokenizer": tokenizer}
    attributes: Sequence[str] = served.get_attributes()  # type: ignore[attr-defined]
    taken = signature(base.__init__).parameters
    own = {name: value for name, value in files[_FILES[0]].items() if name in taken}
    return served(**{**own, **{name: parts.get(name, _NoVideos()) for name in attributes}})


class _NoVideos:
    """Stands where a processor of videos would be."""

    model_input_names: Sequence[str] = ()
    merge_size = 1


def _unchecked(_processor: Any, _name: str, _part: Any) -> None:
    """In place of `ProcessorMixin.check_argument_for_proper_class`."""


def _read(folder: str, file: str, revision: str | None) -> dict[str, Any]:
    """A file of JSON; empty where there is none. Raises OSError, msgspec.DecodeError."""
    hub = import_module("transformers.utils.hub")
    path = hub.cached_file(
        folder,
        file,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if path is None:
        return {}
    with open(path, "rb") as opened:
        found: dict[str, Any] = msgspec.json.decode(opened.read(), type=dict)
    return found


def _texts(message: ChatMessage) -> Iterator[str]:
    yield message.content
    yield message.reasoning_content or ""
    for call in message.tool_calls or ():
        yield call.function.name
        yield call.function.arguments
