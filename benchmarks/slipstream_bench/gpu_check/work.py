"""What a step must do at the least: bytes to read, and operations of its matrix products.

Pure: numbers of a configuration in, numbers out. Does not know: how fast anything is.

A decode step reads every weight that one of its rows needs, once, and the cache of every row.
Embeddings are read by row, so they count only where they are the output's matrix as well. Of
experts those count that some row chooses; which ones is taken as uniform and independent, as with
random weights: of E, each row choosing k, that is E * (1 - (1 - k/E)**rows) in the mean.

A prefill's operations are two to a weight and token; of the output's matrix, to a sampled row. Its
attention's are told apart: two products of 2 * head_dim to a head, a token and one before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from slipstream_core.runner.model.random_weights import random_config

# transformers' own annotations leave this out
_from_config: Any = AutoModelForCausalLM.from_config


@dataclass(frozen=True, slots=True)
class Work:
    """A model, by what its weights cost; numbers are of weights, not of bytes."""

    dense: int  # that every token passes: all but embeddings, the output's matrix and experts
    output: int  # of the output's matrix
    experts: int  # of all experts of all layers
    num_experts: int  # of a layer; 1 where there are none
    experts_per_token: int
    attention_dims: int  # query heads * head_dim, over all layers

    def weights_read(self, rows: int) -> float:
        """By a step that decodes so many rows."""
        chosen = 1 - (1 - self.experts_per_token / self.num_experts) ** rows
        return self.dense + self.output + self.experts * chosen

    def linear_flops(self, tokens: int, sampled: int) -> float:
        """Of a step over `tokens`, of which so many are sampled."""
        active = self.dense + self.experts * self.experts_per_token / self.num_experts
        return 2 * (active * tokens + self.output * sampled)

    def attention_flops(self, begin: int, end: int) -> float:
        """Of one row's tokens [begin, end), each of which sees all up to itself."""
        seen = (begin + 1 + end) * (end - begin) / 2
        return 4 * self.attention_dims * seen


def work_of(model: str) -> Work:
    """Of `random:NAME`, counted on a model without memory."""
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
