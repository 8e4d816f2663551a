"""Decides whether a vision model sees images here, or is served as text, and why.

It keeps its towers, and image prompts, only if all that is needed is there and a trial shows that
an image is seen as by transformers (`media/vision_trial`); whatever is missing is said on the
model's card, where requests with images are refused with it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from slipstream_core.media.encoder import ModelEncoder
from slipstream_core.media.media_client import ImageError, MediaProcess
from slipstream_core.media.vision_model import VisionModel, placeholder_of
from slipstream_core.media.vision_trial import trial_image, why_no_images
from slipstream_core.model.text_tower import remove_towers
from slipstream_ipc.messages import MediaCard

logger = logging.getLogger(__name__)

MAX_IMAGE_PIXELS = 2**20  # of an image as a model on a CPU sees it
MAX_IMAGE_TOKENS = 2**15  # of a request, and of all that run before more are encoded
NO_PROCESSOR = "its folder has no preprocessor_config.json"
_SETTINGS = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True, slots=True)
class Sight:
    """The part of a loaded model that takes images. card: None for a model that never does.

    num_bytes: of its towers. vision, encoder: None where images are refused.
    """

    card: MediaCard | None = None
    vision: VisionModel | None = None
    encoder: ModelEncoder | None = None
    num_bytes: int = 0


NO_SIGHT = Sight()


def sees(config: PreTrainedConfig, towers: Iterable[str], kind: type[PreTrainedModel]) -> bool:
    """True for a model that is made for images: it has towers, and a placeholder for them."""
    features = getattr(kind, "get_image_features", None)
    return bool(tuple(towers)) and features is not None and placeholder_of(config) is not None


def why_kept_apart(device: torch.device, *, is_plain: bool, is_ranked: bool) -> str:
    """The reason why a vision model is served as text, as far as it is known before it is loaded;
    empty: there is none. is_plain: its weights are not quantised.
    """
    if find_spec("PIL") is None:
        return "Pillow is not installed, which decodes images: pip install pillow"
    if is_ranked:
        return "images are computed by one rank alone"
    if device.type != "cpu":
        return "images are computed on a CPU alone so far"
    return "" if is_plain else "images need weights that are not quantised"


def media_process_of(folder: Path) -> MediaProcess | None:
    """The process for the images of a model in this folder, which gets ready while the weights are
    loaded; None if the folder has no settings of an image processor.
    """
    if not any((folder / each).is_file() for each in _SETTINGS):
        return None
    process = MediaProcess(str(folder))
    process.start()
    return process


def blind(config: PreTrainedConfig, why: str) -> Sight:
    """A vision model that is served as text."""
    return Sight(MediaCard(placeholder_of(config) or 0, why))


def open_sight(
    name: str,
    module: PreTrainedModel,
    config: PreTrainedConfig,
    towers: tuple[str, ...],
    process: MediaProcess,
) -> Sight:
    """The sight of a loaded model that has its towers; they are removed where it sees nothing.

    process: for its images; it is closed where there will be none.
    """
    vision, why = _tried(module, towers, process)
    if why or vision is None:
        process.close()
        remove_towers(module, towers)
        logger.warning("%s is served as text, without %s: %s", name, ", ".join(towers), why)
        return blind(config, why)
    num_bytes = sum(
        weight.nbytes for each in towers for weight in module.get_submodule(each).parameters()
    )
    card = MediaCard(
        vision.placeholder_id, max_tokens=MAX_IMAGE_TOKENS, max_pixels=MAX_IMAGE_PIXELS
    )
    embeddings: Any = module.get_input_embeddings()
    width: int = embeddings.weight.shape[1]
    towers_config = getattr(config, "vision_config", None)
    further = getattr(towers_config, "deepstack_visual_indexes", None) or ()  # layers' own features
    row_bytes = (1 + len(further)) * width * module.dtype.itemsize
    logger.info(
        "%s takes images: %s take %.2f GiB, features of images up to %.2f GiB beside the cache",
        name,
        ", ".join(towers),
        num_bytes / 2**30,
        4 * MAX_IMAGE_TOKENS * row_bytes / 2**30,  # see `media/preparer`
    )
    return Sight(card, vision, ModelEncoder(vision, process), num_bytes)


def _tried(
    module: Any, towers: tuple[str, ...], process: MediaProcess
) -> tuple[VisionModel | None, str]:
    if any(_part(module, each) is None for each in towers):
        return None, "its checkpoint lacks weights of them"
    attend_fast(module, towers)
    try:
        vision = VisionModel(module)
        return vision, why_no_images(vision, process.prepare(trial_image()))
    except (ImageError, OSError, ValueError) as error:
        return None, " ".join(str(error).split())


def _part(module: Any, name: str) -> Any:
    for each in name.split("."):
        module = getattr(module, each, None)
    return module


def attend_fast(module: Any, towers: Iterable[str]) -> None:
    """Let towers attend without a matrix of all scores, where transformers has such a function."""
    for name in towers:
        for part in module.get_submodule(name).modules():
            if isinstance(part, PreTrainedModel) and part._supports_sdpa:
                part.config._attn_implementation = "sdpa"
