"""The workload: prompts, outputs and logprobs from pieces of Python's own source code, encoded by a
tokenizer. It is the same for Slipstream and every peer.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from slipstream_bench.common.variants import NUM_LOGPROBS, Variant, params_of
from slipstream_ipc.arrays import Float32s, UInt32s
from slipstream_worker.detokenizer.compiler import UnsupportedDecoder, compile_table
from slipstream_worker.detokenizer.factory import (
    DetokenizerFactory,
    TableDetokenizerFactory,
    WindowDetokenizerFactory,
)

_NUM_FILES = 60  # files of the standard library
_SEED = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """B requests; a smaller batch uses the first ones."""

    prompts: UInt32s  # [B, prompt length]
    outputs: UInt32s  # [B, steps]
    logprobs: Float32s  # [B, 1 + NUM_LOGPROBS] descending, the same at every step
    candidates: UInt32s  # [B, 1 + NUM_LOGPROBS] column 0 is replaced by the sampled token

    def save(self, file: Path, variants: Sequence[Variant]) -> None:
        """Write an .npz file for the peers' scripts, including the meaning of the variants."""
        np.savez(
            file,
            prompts=self.prompts,
            outputs=self.outputs,
            logprobs=self.logprobs,
            candidates=self.candidates,
            variants=np.array(json.dumps([_meaning(variant) for variant in variants])),
        )


def _meaning(variant: Variant) -> dict[str, object]:
    params = params_of(variant, 1)
    return {
        "name": variant,
        "stop": list(params.stop),
        "logprobs": params.logprobs,
        "interval": params.stream_interval,
    }


def make_workload(
    tokenizer: Tokenizer, num_requests: int, *, prompt_len: int, steps: int
) -> Workload:
    """Requests cut from random places of the standard library's source."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:_NUM_FILES]
    text = "\n".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)
    ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.uint32)
    random = np.random.default_rng(_SEED)
    width = prompt_len + steps
    starts = random.integers(0, len(ids) - width, num_requests)
    pieces = ids[starts[:, None] + np.arange(width)]
    vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
    shape = (num_requests, 1 + NUM_LOGPROBS)
    return Workload(
        pieces[:, :prompt_len],
        pieces[:, prompt_len:],
        -np.sort(8 * random.random(shape, np.float32), axis=1),
        random.integers(0, vocab_size, shape).astype(np.uint32),
    )


def detokenizers_of(tokenizer: Tokenizer) -> DetokenizerFactory:
    """The detokenizer factory that a worker would use for this tokenizer."""
    try:
        return TableDetokenizerFactory(compile_table(tokenizer))
    except UnsupportedDecoder:
        return WindowDetokenizerFactory(tokenizer.to_str().encode())
