"""The minimum work of a step: bytes to read, and operations of its matrix products. Pure.

A decode step reads every weight that one of its rows needs, once, and the cache of every row.
Embeddings are read by row, so they count only if tied to the output's matrix. Of experts, those
count that some row selects; the selection is taken as uniform and independent, as with random
weights: of E, each row selecting k, that is E * (1 - (1 - k/E)**rows) on average.

A prefill has two operations per weight and token; for the output's matrix, per sampled row. Its
attention is counted separately: two products of 2 * head_dim per head, for each token and each one
before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from slipstream_core.runner.model.random_weights import random_config

# not annotated in transformers
_from_config: Any = AutoModelForCausalLM.from_config


@dataclass(frozen=True, slots=True)
class Work:
    """A model's costs; numbers are of weights, not of bytes."""

    dense: int  # used by every token: all but embeddings, the output's matrix and experts
    output: int  # of the output's matrix
    experts: int  # of all experts of all layers
    num_experts: int  # per layer; 1 without experts
    experts_per_token: int
    attention_dims: int  # query heads * head_dim, over all layers

    def weights_read(self, rows: int) -> float:
        """Weights read by a step that decodes `rows` rows."""
        chosen = 1 - (1 - self.experts_per_token / self.num_experts) ** rows
        return self.dense + self.output + self.experts * chosen

    def linear_flops(self, tokens: int, sampled: int) -> float:
        """Operations of the linear layers over `tokens`, of which `sampled` are sampled."""
        active = self.dense + self.experts * self.experts_per_token / self.num_experts
        return 2 * (active * tokens + self.output * sampled)

    def attention_flops(self, begin: int, end: int) -> float:
        """Attention operations of one row's tokens [begin, end), each attending to all up to
        itself.
        """
        seen = (begin + 1 + end) * (end - begin) / 2
        return 4 * self.attention_dims * seen


def work_of(model: str) -> Work:
    """The work of `random:NAME`, counted on a model without memory."""
    config: Any = random_config(model)
    with torch.device("meta"):
        module = _from_config(config, dtype=torch.bfloat16)
    embeddings = module.get_input_embeddings().weight
    output = module.get_output_embeddings().weight
    experts = [p for name, p in module.named_parameters() if ".experts." in name]
    outside = {id(p) for p in (embeddings, output, *experts)}
    dense = sum(p.numel() for p in module.parameters() if id(p) not in outside)
    return Work(
        dense=dense,
        output=output.numel(),
        experts=sum(p.numel() for p in experts),
        num_experts=getattr(config, "num_experts", 1) or 1,
        experts_per_token=getattr(config, "num_experts_per_tok", 1) or 1,
        attention_dims=config.num_hidden_layers * config.num_attention_heads * config.head_dim,
    )
