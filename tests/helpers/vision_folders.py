"""Folders of vision models as a tokenizer process sees them: a tokenizer of bytes, a chat template,
and the settings of a processor of pictures. There are no weights.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

QWEN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# of those that read lists of parts alone, and write a turn's images first
LLAVA_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: "
    "{% for c in m.content | selectattr('type', 'equalto', 'image') %}<image>\n{% endfor %}"
    "{% for c in m.content | selectattr('type', 'equalto', 'text') %}{{ c.text }} {% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
_TILES = [[24, 48], [48, 24], [48, 48]]
_QWEN = {
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 4096},
}
_TILED = {
    "size": {"shortest_edge": 24},
    "crop_size": {"height": 24, "width": 24},
    "image_grid_pinpoints": _TILES,
}
_VIDEO = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_NAMED = {
    "gemma3": {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    },
    "gemma4": {
        "image_token": "<|image|>",
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "audio_token": "<|audio|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
    },
    "internvl": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
}
# of each architecture: the class of its processor of images, its settings, tokens, the processor's
VISION: dict[str, tuple[str, dict[str, Any], tuple[str, ...], dict[str, Any]]] = {
    "qwen2_5_vl": ("qwen2_vl.Qwen2VL", _QWEN, _VIDEO, {}),
    "qwen3_vl": ("qwen2_vl.Qwen2VL", _QWEN, _VIDEO, {}),
    "glm4v": (
        "glm4v.Glm4v",
        _QWEN,
        ("<|image|>", "<|video|>", "<|begin_of_video|>", "<|end_of_video|>"),
        {},
    ),
    "llava": (
        "clip.CLIP",
        {"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}},
        ("<image>",),
        {
            "patch_size": 4,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    ),
    "llava_next": (
        "llava_next.LlavaNext",
        _TILED,
        ("<image>",),
        {
            "patch_size": 4,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    ),
    "llava_onevision": (
        "llava_onevision.LlavaOnevision",
        {"size": {"height": 24, "width": 24}, "image_grid_pinpoints": _TILES},
        ("<image>", "<video>"),
        {"num_image_tokens": 36, "vision_feature_select_strategy": "full"},
    ),
    "internvl": (
        "got_ocr2.GotOcr2",
        {
            "size": {"height": 32, "width": 32},
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 4,
        },
        (),
        {"image_seq_length": 16},
    ),
    "idefics3": (
        "idefics3.Idefics3",
        {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}},
        ("<image>", "<fake_token_around_image>", "<global-img>"),
        {"image_seq_len": 4},
    ),
    "gemma3": (
        "gemma3.Gemma3",
        {"size": {"height": 32, "width": 32}},
        (),
        {"image_seq_length": 16},
    ),
    "gemma4": (
        "gemma4.Gemma4",
        {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70},
        (),
        {"image_seq_length": 16},
    ),
}


def vision_folder(folder: Path, architecture: str, template: str = QWEN_TEMPLATE) -> Path:
    """A folder of this architecture, without weights."""
    kind, settings, tokens, own = VISION[architecture]
    module, name = kind.split(".")
    backend = import_module(f"transformers.models.{module}.image_processing_pil_{module}")
    getattr(backend, f"{name}ImageProcessorPil")(**settings).save_pretrained(folder)
    tokenizer = byte_tokenizer(tokens, _NAMED.get(architecture, {}))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    auto = import_module("transformers.models.auto.processing_auto")
    processor = {"processor_class": auto.PROCESSOR_MAPPING_NAMES[architecture], **own}
    (folder / "processor_config.json").write_bytes(msgspec.json.encode(processor))
    config = {"model_type": architecture, "vision_config": {}}
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    return folder


def byte_tokenizer(tokens: tuple[str, ...], named: dict[str, str]) -> Any:
    """A tokenizer of bytes, with these special tokens. named: those that have a name."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE(vocab={each: at for at, each in enumerate(letters)}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(
        tokenizer_object=bytewise,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=named,
    )
    found.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *tokens]})
    return found


def chatting_model(folder: Path) -> Path:
    """A tiny Qwen2.5-VL of random weights, with tokenizer, template and processor."""
    import torch
    import transformers

    vision_folder(folder, "qwen2_5_vl")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    id_of = tokenizer.convert_tokens_to_ids
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.15,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": id_of("<|im_end|>"),
        "pad_token_id": id_of("<|endoftext|>"),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 3, 3],
        },
        "layer_types": ["full_attention"] * 3,
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    }
    config = transformers.Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=id_of("<|image_pad|>"),
        video_token_id=id_of("<|video_pad|>"),
        vision_start_token_id=id_of("<|vision_start|>"),
        vision_end_token_id=id_of("<|vision_end|>"),
    )
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForMultimodalLM
    module = auto.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.dim() == 1 or weight.min() == weight.max():
                weight.add_(torch.randn_like(weight), alpha=0.2)
            elif "merger" in name:  # pictures are to make a difference
                weight.mul_(5.0)
    module.save_pretrained(folder)
    return folder
