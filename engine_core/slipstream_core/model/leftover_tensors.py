"""Refuses checkpoints with tensors that the model has no place for.

Transformers leaves such tensors out without a word. Where they are scales of quantised weights, or
layers of another model, what would be served is noise; so what may be left out is listed here, and
everything else is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from transformers import PreTrainedConfig

from slipstream_core.load_error import ModelLoadError

# parts for images and sound, and heads that predict further tokens
_BESIDE_TEXT = (
    r"(?:visual|vision_\w+|image_\w+|video_\w+|audio_\w+|multi_modal_\w+|multimodal_\w+|mm_\w+"
    r"|embed_vision|embed_audio|speech_\w+|talker|token2wav|code2wav|sound_\w+|connector|resampler"
    r"|vit|vpm|apm|aligner|merger|projector|patch_embed\w*|mtp\w*|nextn\w*|eagle\w*|medusa\w*)\..*"
)
_MAY_BE_LEFT = re.compile(
    r"(^|\.)(?:"
    # computed from the configuration
    r"inv_freq|original_inv_freq|position_ids|attn\.(?:masked_)?bias|attention\.(?:masked_)?bias"
    rf"|{_BESIDE_TEXT}"
    # of a quantised cache, which ours is not
    r"|(?:self_attn|attn|attention|mixer|k_proj|v_proj|q_proj|qkv_proj|kv_cache|k_cache|v_cache"
    r"|[kv]_cache_quantizer)\."
    r"(?:[kvq]_scale|kv_scale|qk_scale|prob_scale|prob_output_scale|[kvq]_zero_point|scale)"
    r"|[kvq]_proj\.output_scale"
    r")$"
)
_OF_ACTIVATIONS = re.compile(
    r"\.(?:(?:input|output)_(?:scale|global_scale|activation_scale|zero_point)|activation_scale"
    r"|input_scale_ub)$"
)
_OF_A_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_OF_QUANTISED = re.compile(
    r"(?:scale|scale_inv|scales|scale_2|qweight|qzeros|g_idx|absmax|quant_map|quant_state\..*|SCB"
    r"|weight_packed|weight_shape|zero_point|global_scale|blocks|qscale\w*)$"
)


_IS_BESIDE_TEXT = re.compile(rf"(^|\.){_BESIDE_TEXT}$")


def is_beside_text(tensor: str) -> bool:
    """True if a tensor belongs, by its name, to a part that text does not need."""
    return _IS_BESIDE_TEXT.search(tensor) is not None


def refuse_leftovers(
    name: str, tensors: Iterable[str], config: PreTrainedConfig, *, is_quantised: bool
) -> None:
    """Raise ModelLoadError if one of these tensors, which found no place, may not be left out.

    is_quantised: weights have been dequantised, so that scales of activations have no effect.
    """
    text = config.get_text_config()
    left = sorted(each for each in tensors if not _may_be_left(each, text, is_quantised))
    if not left:
        return
    scale = next(filter(_OF_QUANTISED.search, left), None)
    why = "the checkpoint is another model's"
    if scale is not None:
        why = "they are of quantised weights, "
        why += "for which its method has no use" if is_quantised else "and no method is named"
    raise ModelLoadError(
        name,
        f"its checkpoint has {len(left)} tensors that {type(config).__name__} has no place for, "
        f"{scale or left[0]} among them: {why}",
    )


def _may_be_left(tensor: str, text: PreTrainedConfig, is_quantised: bool) -> bool:
    if _MAY_BE_LEFT.search(tensor) is not None:
        return True
    if is_quantised and _OF_ACTIVATIONS.search(tensor) is not None:
        return True
    if tensor.endswith("lm_head.weight") and text.tie_word_embeddings:
        return True
    # layers behind the last are heads that predict further tokens, where there are such
    num_more = max(
        getattr(text, each, None) or 0
        for each in ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules")
    )
    layer = _OF_A_LAYER.search(tensor)
    if layer is None or not num_more:
        return False
    first: int = text.num_hidden_layers
    return first <= int(layer[1]) < first + num_more
