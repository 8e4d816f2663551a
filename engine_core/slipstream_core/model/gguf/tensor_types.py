"""The types of tensors in GGUF files: their numbers, and the blocks that they are stored in.

Numbers and sizes are those of ggml's `ggml.h` and `ggml-common.h`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorType:
    """A type that is served. A block holds `block_len` neighbouring values of a row."""

    name: str
    block_len: int
    block_bytes: int


SERVED: dict[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    30: TensorType("BF16", 1, 2),
    39: TensorType("MXFP4", 32, 17),
}
"""By their numbers in files."""

_OTHERS = {
    9: "Q8_1",
    15: "Q8_K",
    19: "IQ1_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}


def type_name(number: int) -> str:
    """The name of any type for an error message."""
    if (served := SERVED.get(number)) is not None:
        return served.name
    return _OTHERS.get(number, f"number {number}")
