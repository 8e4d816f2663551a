"""Adapters made by hand, as peft saves them, and models into which they are merged."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL_LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Lora:
    """An adapter of the layers whose names end with one of `layers`; none: of all but the head."""

    layers: Sequence[str] = ALL_LINEAR
    rank: int = 8
    alpha: float = 16
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)  # of adapter_config.json
    ranks: Mapping[str, int] = field(default_factory=dict)  # rank_pattern
    alphas: Mapping[str, float] = field(default_factory=dict)  # alpha_pattern
    std: float = 0.1

    def factors(self, model: nn.Module) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """A and B of each layer, by its name."""
        generator = torch.Generator().manual_seed(self.seed)
        found = {}
        for name, module in model.named_modules():
            last = name.split(".")[-1]
            is_of_it = last in self.layers if self.layers else last != "lm_head"
            if isinstance(module, nn.Linear) and is_of_it:
                rank = _of_pattern(self.ranks, name, self.rank)
                n, k = module.weight.shape
                found[name] = (
                    torch.randn(rank, k, generator=generator) * self.std,
                    torch.randn(n, rank, generator=generator) * self.std,
                )
        return found

    def scale(self, name: str) -> float:
        """peft's, of a layer."""
        rank = _of_pattern(self.ranks, name, self.rank)
        alpha = _of_pattern(self.alphas, name, self.alpha)
        return alpha / (rank**0.5 if self.options.get("use_rslora") else rank)

    def config(self) -> dict[str, Any]:
        """adapter_config.json, with the fields that peft 0.21 writes."""
        return {
            "alora_invocation_tokens": None,
            "alpha_pattern": dict(self.alphas),
            "arrow_config": None,
            "auto_mapping": None,
            "base_model_name_or_path": "base",
            "bias": "none",
            "corda_config": None,
            "ensure_weight_tying": False,
            "eva_config": None,
            "exclude_modules": None,
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
            "layer_replication": None,
            "layers_pattern": None,
            "layers_to_transform": None,
            "loftq_config": {},
            "lora_alpha": self.alpha,
            "lora_bias": False,
            "lora_dropout": 0.0,
            "megatron_config": None,
            "megatron_core": "megatron.core",
            "modules_to_save": None,
            "peft_type": "LORA",
            "peft_version": "0.21.2",
            "qalora_group_size": 16,
            "r": self.rank,
            "rank_pattern": dict(self.ranks),
            "revision": None,
            "target_modules": list(self.layers),
            "target_parameters": None,
            "task_type": "CAUSAL_LM",
            "trainable_token_indices": None,
            "use_bdlora": None,
            "use_dora": False,
            "use_qalora": False,
            "use_rslora": False,
        } | dict(self.options)


def load(folder: Path) -> Any:
    """The model in `folder`, in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def save_lora(lora: Lora, base: Path, folder: Path) -> Path:
    """Save an adapter of the model in `base` to `folder`, which is returned."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, (a, b) in lora.factors(load(base)).items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(lora.config()))
    return folder


def save_merged(lora: Lora, base: Path, folder: Path) -> Path:
    """Save the model in `base` with W + scale B A in place of each layer's W to `folder`, with a
    head of its own if that is changed.
    """
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    model = load(base)
    if "lm_head" in lora.layers:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    with torch.no_grad():
        for name, (a, b) in lora.factors(model).items():
            layer = model.get_submodule(name)
            layer.weight += lora.scale(name) * (b.double() @ a.double()).float()
    model.save_pretrained(folder)
    return folder


def _of_pattern(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return default
