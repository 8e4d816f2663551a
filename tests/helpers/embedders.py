"""Tiny embedders of random weights, as folders that sentence-transformers could have saved, and
what transformers computes of them, one sequence at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch.nn.functional import normalize
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

WORDS = [
    "a",
    "b",
    "c",
    "d",
    "e",
    "f",
    "the",
    "cat",
    "sat",
    "on",
    "mat",
    "dog",
    "ran",
    "far",
    "away",
    "##s",
    "##ed",
    "##ing",
    ",",
    ".",
    "!",
    "?",
]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
VOCAB_SIZE = 64
WIDTH = 32
_MASK = "attention_mask"
_HEADS = ("classifier.weight", "score.weight", "out_proj.weight")

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
# positions begin behind the padding id
_OFFSET = {"pad_token_id": 1, "type_vocab_size": 1}
_DECODER = {"num_key_value_heads": 2, "head_dim": 8}
_SPECIAL = {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}

CONFIGS: Mapping[str, Callable[[], transformers.PreTrainedConfig]] = {
    "BERT": lambda: transformers.BertConfig(**_SIZES),
    "RoBERTa": lambda: transformers.RobertaConfig(**_SIZES | _OFFSET),
    "XLM-R": lambda: transformers.XLMRobertaConfig(**_SIZES | _OFFSET),
    "ModernBERT": lambda: transformers.ModernBertConfig(
        **_SIZES, **_SPECIAL, local_attention=16, global_attn_every_n_layers=3
    ),
    "DistilBERT": lambda: transformers.DistilBertConfig(
        vocab_size=VOCAB_SIZE, dim=WIDTH, hidden_dim=64, n_layers=3, n_heads=4
    ),
    "ALBERT": lambda: transformers.AlbertConfig(**_SIZES, embedding_size=16),
    "Nomic-BERT": lambda: transformers.NomicBertConfig(**_SIZES),
    "GTE": lambda: transformers.GteConfig(**_SIZES),
    "EuroBERT": lambda: transformers.EuroBertConfig(**_SIZES, num_key_value_heads=2),
    "Qwen3": lambda: transformers.Qwen3Config(**_SIZES | _DECODER),
    "Llama": lambda: transformers.LlamaConfig(**_SIZES | _DECODER),
    "Mistral": lambda: transformers.MistralConfig(**_SIZES | _DECODER, sliding_window=7),
    "Gemma 3, both ways": lambda: transformers.Gemma3TextConfig(
        **_SIZES,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=16,
        query_pre_attn_scalar=8,
        use_bidirectional_attention=True,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
}
# they run, and ignore the attention that they are given
WRONG: Mapping[str, Callable[[], transformers.PreTrainedConfig]] = {
    "MPNet": lambda: transformers.MPNetConfig(**_SIZES | {"pad_token_id": 1}),
    "DeBERTa": lambda: transformers.DebertaV2Config(**_SIZES),
}


def save_embedder(
    name: str,
    folder: Path,
    *,
    pooling: str | None = "mean",
    modules: Sequence[str] = ("Normalize",),
    prompts: Mapping[str, str] | None = None,
    **changes: Any,
) -> Path:
    """Save a tiny model with its tokenizer. pooling: of sentence-transformers; None: there is no
    modules.json. modules: behind it; Dense halves the width. changes: of its configuration.
    """
    _save_model(AutoModel, name, folder, changes)
    if pooling is None:
        return folder
    kinds = ["Transformer", "Pooling", *modules]
    paths = ["", *[f"{at}_{kind}" for at, kind in enumerate(kinds) if at]]
    _save(
        folder / "modules.json",
        [
            {
                "idx": at,
                "name": str(at),
                "path": path,
                "type": f"sentence_transformers.models.{kind}",
            }
            for at, (kind, path) in enumerate(zip(kinds, paths, strict=True))
        ],
    )
    modes = {
        "cls": "cls_token",
        "mean": "mean_tokens",
        "lasttoken": "lasttoken",
        "max": "max_tokens",
    }
    given = {f"pooling_mode_{mode}": key == pooling for key, mode in modes.items()}
    _save(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": WIDTH, **given})
    for kind, path in zip(kinds, paths, strict=True):
        if kind == "Dense":
            save_dense(folder / path)
    if prompts is not None:
        _save(folder / "config_sentence_transformers.json", {"prompts": prompts})
    return folder


def save_classifier(
    name: str, folder: Path, *, labels: Sequence[str] = ("relevant",), **changes: Any
) -> Path:
    """Save a tiny model that has a number for each label, with its tokenizer."""
    names = {"id2label": dict(enumerate(labels)), "label2id": dict.fromkeys(labels, 0)}
    return _save_model(AutoModelForSequenceClassification, name, folder, {**names, **changes})


def save_decoder(name: str, folder: Path) -> Path:
    """Save a tiny model that generates, with the tokenizer."""
    return _save_model(AutoModelForCausalLM, name, folder, {})


def _save_model(loader: Any, name: str, folder: Path, changes: Mapping[str, Any]) -> Path:
    torch.set_num_threads(1)  # teams wait for each other where a machine is busy
    config = (CONFIGS | WRONG)[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    model = loader.from_config(config, dtype=torch.float32)
    with (
        torch.no_grad()
    ):  # weights that matter: the usual ones are so small that all texts are alike
        for name_of, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn_like(weight), alpha=0.1)
            else:
                weight.mul_(30 if name_of.endswith(_HEADS) else 3)
    model.eval().save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_dense(folder: Path) -> None:
    """Save a layer that halves the width."""
    from safetensors.torch import save_file

    activation = "torch.nn.modules.activation.Tanh"
    _save(folder / "config.json", {"activation_function": activation})
    weights = {
        "linear.weight": torch.randn(WIDTH // 2, WIDTH),
        "linear.bias": torch.randn(WIDTH // 2),
    }
    save_file(weights, folder / "model.safetensors")


def _save(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def new_tokenizer(*, has_types: bool = True) -> PreTrainedTokenizerFast:
    """A WordPiece tokenizer that puts [CLS] and [SEP] around a text, and behind both of a pair."""
    vocabulary = {word: at for at, word in enumerate(VOCABULARY)}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))  # type: ignore[call-arg]
    backend.normalizer = normalizers.BertNormalizer()  # type: ignore[assignment]
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # type: ignore[assignment]
    backend.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", *(["token_type_ids"] if has_types else []), _MASK],
    )


def save_tokenizer(folder: Path) -> None:
    """Save the tokenizer into a model's folder."""
    new_tokenizer().save_pretrained(folder)


def reference_vectors(
    folder: Path, sequences: Sequence[Sequence[int]], pooling: str = "mean", *, dense: bool = False
) -> npt.NDArray[np.float32]:
    """What transformers computes of each sequence alone, pooled and normalised."""
    model = AutoModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    weights: dict[str, torch.Tensor] = {}
    if dense:
        from safetensors.torch import load_file

        weights = load_file(folder / "2_Dense" / "model.safetensors")
    vectors = []
    with torch.inference_mode():
        for each in sequences:
            ids = torch.tensor([list(each)])
            hidden = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
            row = {"cls": hidden[0], "mean": hidden.mean(0), "lasttoken": hidden[-1]}[pooling]
            if dense:
                row = torch.tanh(weights["linear.weight"] @ row + weights["linear.bias"])
            vectors.append(normalize(row, dim=0))
    return torch.stack(vectors).numpy()


def reference_logits(
    folder: Path, sequences: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None
) -> npt.NDArray[np.float32]:
    """What transformers' own class computes of each sequence alone: [sequences, labels]."""
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    has_types = getattr(model.config, "type_vocab_size", 1) > 1
    found = []
    with torch.inference_mode():
        for at, each in enumerate(sequences):
            ids = torch.tensor([list(each)])
            given = {"token_type_ids": torch.tensor([list(types[at])])} if types else {}
            if not has_types:
                given = {}
            found.append(model(input_ids=ids, attention_mask=torch.ones_like(ids), **given).logits)
    return torch.cat(found).numpy()
