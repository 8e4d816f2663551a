"""The forms in which a cache holds keys and values: in the model's type, or as codes of 8 bits.

- `fp8_e4m3`: each number by itself, to the nearest; what exceeds 448 becomes that.
- `int8_per_token_head`: a token's key or value of one head has a float32 scale, the largest of its
  numbers over 127, behind its codes.

The names are vLLM's. What is stored is read back wherever it is used, also by the step that has
computed it, so a result does not depend on how a prompt was cut into steps.

torch is imported where it is used: a core's fingerprint names the form before that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

CacheFormat = Literal["auto", "fp8_e4m3", "int8_per_token_head"]
CACHE_FORMATS: dict[str, CacheFormat] = {
    "auto": "auto",
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "int8_per_token_head": "int8_per_token_head",
}
"""Formats by the names that users give."""
NUMBERS: dict[CacheFormat, int] = {"auto": 0, "fp8_e4m3": 1, "int8_per_token_head": 2}
"""The numbers of the formats in kernels.h (`Decode`)."""
_SCALE_BYTES = 4


def elements_of(form: CacheFormat, dim: int) -> int:
    """Elements of the cache's tensor that `dim` numbers of one head take: bytes, of codes."""
    return dim + _SCALE_BYTES if form == "int8_per_token_head" else dim


def dtype_of(form: CacheFormat, dtype: torch.dtype) -> torch.dtype:
    """The type of the cache's tensor, for a model that computes in `dtype`."""
    import torch

    return dtype if form == "auto" else torch.uint8
