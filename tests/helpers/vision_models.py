"""Tiny vision models of random weights, each in a folder with an image processor of its own."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

PLACEHOLDER, BEGIN, END = 500, 502, 503
_VOCAB = 512
_TEXT: dict[str, Any] = {
    "vocab_size": _VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_IDS = {
    "image_token_id": PLACEHOLDER,
    "video_token_id": 501,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
}
_PATCHES = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
_QWEN_TOWER = _PATCHES | {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
}
_TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
_TOWER |= {"num_attention_heads": 2, "patch_size": 4}


def _qwen2_5_vl() -> Any:
    text = _TEXT | {"rope_parameters": _MROPE, "layer_types": ["full_attention"] * 3}
    vision = _QWEN_TOWER | {"depth": 2, "window_size": 16, "fullatt_block_indexes": [1]}
    return transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **_IDS)


def _qwen3_vl() -> Any:
    text = _TEXT | {"head_dim": 16, "rope_parameters": _MROPE}
    vision = _QWEN_TOWER | {"depth": 3, "deepstack_visual_indexes": [0, 1]}
    vision |= {"num_position_embeddings": 64}
    return transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **_IDS)


def _llava() -> Any:
    return transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**_TEXT),
        vision_config=transformers.CLIPVisionConfig(**_TOWER, image_size=24),
        image_token_index=PLACEHOLDER,
        vision_feature_layer=-1,
    )


def _gemma3() -> Any:
    text = _TEXT | {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16}
    text |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    return transformers.Gemma3Config(
        text_config=text,
        vision_config=_TOWER | {"image_size": 32},
        mm_tokens_per_image=16,
        image_token_id=PLACEHOLDER,
        boi_token_index=BEGIN,
        eoi_token_index=END,
        tie_word_embeddings=False,
    )


_QWEN_PIXELS = _PATCHES | {"size": {"shortest_edge": 64, "longest_edge": 4096}}
_QWEN_PIXELS["merge_size"] = _QWEN_PIXELS.pop("spatial_merge_size")
_MODELS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "qwen2_5_vl": (_qwen2_5_vl, {"image_processor_type": "Qwen2VLImageProcessor"} | _QWEN_PIXELS),
    "qwen3_vl": (_qwen3_vl, {"image_processor_type": "Qwen2VLImageProcessor"} | _QWEN_PIXELS),
    "llava": (
        _llava,
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 24},
            "crop_size": {"height": 24, "width": 24},
        },
    ),
    "gemma3": (
        _gemma3,
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 32, "width": 32}},
    ),
}


def make_vision_model(name: str, folder: Path) -> Path:
    """A folder with the model of this name, and its image processor."""
    config, pixels = _MODELS[name]
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForMultimodalLM
    module = auto.from_config(config(), dtype=torch.float32)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.dim() == 1 or weight.min() == weight.max():
                weight.add_(torch.randn_like(weight), alpha=0.2)
            elif "merger" in name or "projector" in name:  # pictures are to make a difference
                weight.mul_(5.0)
    module.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    return folder


def picture(seed: int, width: int = 40, height: int = 56, form: str = "PNG") -> bytes:
    """A file with coloured squares."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    squares = rng.integers(0, 255, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    image = Image.fromarray(squares).resize((width, height), Image.Resampling.BILINEAR)
    file = io.BytesIO()
    image.save(file, form)
    return file.getvalue()


class Reference:
    """A model in transformers' own hands: its processor, prompts and answers."""

    def __init__(self, folder: Path) -> None:
        auto: Any = transformers.AutoModelForMultimodalLM
        self.module = auto.from_pretrained(folder, attn_implementation="eager").eval()
        processor: Any = transformers.AutoImageProcessor
        self._processor = processor.from_pretrained(folder, backend="pil", local_files_only=True)
        self._inputs = cache(self._inputs_of)

    def prompt(self, seed: int, images: Sequence[bytes]) -> list[int]:
        """Token ids of random texts around the images."""
        rng = np.random.default_rng(seed)
        ids = [1]
        for image in images:
            ids += rng.integers(3, 490, rng.integers(1, 9)).tolist()
            ids += [BEGIN, *[PLACEHOLDER] * self.num_rows(image), END]
        return ids + rng.integers(3, 490, rng.integers(2, 12)).tolist()

    def other_picture(self, prompt: Sequence[int], image: bytes, num: int) -> bytes:
        """One of the size of `picture`'s, with another answer to this prompt."""
        expected = self.answer(prompt, [image], num)
        for seed in range(10, 30):
            if self.answer(prompt, [picture(seed)], num) != expected:
                return picture(seed)
        raise AssertionError("the model does not look at pictures")

    def num_rows(self, image: bytes) -> int:
        """How many placeholders an image has."""
        with torch.inference_mode():
            made = self.module.model.get_image_features(**self._inputs(image), return_dict=True)
        rows = made.pooler_output
        parts = rows if isinstance(rows, list | tuple) else [rows]
        return sum(each.numel() // each.shape[-1] for each in parts)

    def _inputs_of(self, image: bytes) -> dict[str, torch.Tensor]:
        from PIL import Image

        shown = Image.open(io.BytesIO(image)).convert("RGB")
        made = self._processor(shown, return_tensors="pt")
        taken = ("pixel_values", "image_grid_thw", "image_sizes")
        return {name: each for name, each in made.items() if name in taken}

    def answer(self, prompt: Sequence[int], images: Sequence[bytes], num: int) -> list[int]:
        """The tokens of `generate`, greedily."""
        ids = torch.tensor([list(prompt)])
        given: dict[str, torch.Tensor] = {}
        if images:
            inputs = [self._inputs(image) for image in images]
            given = {name: torch.cat([each[name] for each in inputs]) for name in inputs[0]}
            if "image_grid_thw" in given:
                given["mm_token_type_ids"] = (ids == PLACEHOLDER).long()
        made = self.module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num,
            min_new_tokens=num,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **given,
        )
        answer: list[int] = made[0, len(prompt) :].tolist()
        return answer
