"""The head of a model that classifies: from a row of hidden states to a number for each label.

- `…ForSequenceClassification` classes compute their heads themselves, here of one row for each
  sequence in place of all hidden states. Which row that is, a trial finds: the logits have to be
  those of the class's own forward.
- A decoder that answers with a word, such as Qwen3-Reranker, becomes a classifier by
  `classifier_from_token`, vLLM's word in `hf_overrides`: its head are rows of the output embedding.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from slipstream_core.model.hub import Source, find_file, read_json
from slipstream_core.pooling.sentence_transformers_folder import Pooling

Activation = Callable[[torch.Tensor], torch.Tensor]
LAST: Pooling = "lasttoken"
ROWS: tuple[Pooling, ...] = ("cls", LAST, "mean")

_TOKENS, _METHOD = "classifier_from_token", "method"
_TWO_WAY, _EACH = "from_2_way_softmax", "no_post_processing"
# by the name of the class in torch.nn
_ACTIVATIONS: Mapping[str, Activation] = {
    "Identity": lambda logits: logits,
    "Sigmoid": torch.sigmoid,
    "Softmax": lambda logits: logits.softmax(-1),
    "Tanh": torch.tanh,
}
_PROBLEMS = {
    "regression": "Identity",
    "single_label_classification": "",
    "multi_label_classification": "Sigmoid",
}


@dataclass(frozen=True, slots=True)
class ClassifierHead:
    """labels: in the order of the logits. logits: of rows [n, width], float32 [n, labels].
    activation: what makes numbers of them that are sent, unless a request wants logits.
    """

    labels: tuple[str, ...]
    logits: Callable[[torch.Tensor], torch.Tensor]
    activation: Activation


def tokens_of_classes(settings: PreTrainedConfig) -> tuple[str, ...]:
    """The tokens by which a decoder says a class; empty: it is a classifier of its own. Raises
    ValueError for overrides that are not understood.
    """
    tokens = getattr(settings, _TOKENS, None)
    if tokens is None:
        return ()
    if not isinstance(tokens, list | tuple) or not all(isinstance(each, str) for each in tokens):
        raise ValueError(f"{_TOKENS} is {tokens!r}, allowed: a list of tokens")
    method = getattr(settings, _METHOD, None) or _TWO_WAY
    if method not in (_TWO_WAY, _EACH):
        raise ValueError(f"{_METHOD} is {method!r}, allowed: {_TWO_WAY}, {_EACH}")
    if not tokens or (method == _TWO_WAY and len(tokens) != 2):
        raise ValueError(f"{_TOKENS} has {len(tokens)} tokens, allowed with {method}: 2")
    return tuple(tokens)


def head_of_classifier(module: PreTrainedModel, source: Source) -> ClassifierHead:
    """The head of a `…ForSequenceClassification`. Raises ValueError."""
    settings = module.config
    num = settings.num_labels or 0
    names = getattr(settings, "id2label", None) or {}
    labels = tuple([str(names.get(at, f"LABEL_{at}")) for at in range(num)])
    return ClassifierHead(labels, _OneRow(module), _activation(settings, source, num))


def head_of_tokens(
    module: PreTrainedModel, tokens: Sequence[str], source: Source
) -> ClassifierHead:
    """The head of a decoder that says a class by one of `tokens`. Raises ValueError."""
    ids = [_token_id(source, token) for token in tokens]
    output: Any = module.get_output_embeddings()  # type: ignore[no-untyped-call]
    weight = output.weight[ids].float()
    bias = None if getattr(output, "bias", None) is None else output.bias[ids].float()
    labels = tuple(tokens)
    if getattr(module.config, _METHOD, None) in (None, _TWO_WAY):
        # softmax over two is the sigmoid of their difference
        weight, labels = weight[1:] - weight[:1], labels[1:]
        bias = None if bias is None else bias[1:] - bias[:1]

    def logits(rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(rows.float(), weight, bias)

    return ClassifierHead(labels, logits, _activation(module.config, source, len(labels)))


def logits_alone(
    module: PreTrainedModel, ids: torch.Tensor, types: torch.Tensor | None, source: Source
) -> torch.Tensor:
    """The logits of one sequence, [labels], as transformers computes them. ids, types: [1, T]."""
    given = {} if types is None else {"token_type_ids": types}
    output: Any = module(input_ids=ids, attention_mask=torch.ones_like(ids), **given)
    tokens = tokens_of_classes(module.config)
    if not tokens:
        logits: torch.Tensor = output.logits[0]
        return logits.float()
    last = output.logits[0, -1].float()
    found = torch.stack([last[_token_id(source, token)] for token in tokens])
    is_two_way = getattr(module.config, _METHOD, None) in (None, _TWO_WAY)
    return found[1:] - found[:1] if is_two_way else found


def _token_id(source: Source, token: str) -> int:
    """Raises ValueError."""
    from tokenizers import Tokenizer

    path = find_file(source, "tokenizer.json")
    if path is None:
        raise ValueError(f"{_TOKENS} needs a tokenizer.json")
    found = Tokenizer.from_file(str(path)).token_to_id(token)
    if found is None:
        raise ValueError(f"{_TOKENS} has {token!r}, which is no token of the model's")
    return found


def _activation(settings: PreTrainedConfig, source: Source, num_labels: int) -> Activation:
    """The activation that the files name, sentence-transformers' before config.json's. Raises
    ValueError.
    """
    modules = read_json(source, "config_sentence_transformers.json") or {}
    own = getattr(settings, "sentence_transformers", None) or {}
    named = (
        modules.get("activation_fn")
        or (own.get("activation_fn") if isinstance(own, dict) else None)
        or getattr(settings, "sbert_ce_default_activation_function", None)
        or _PROBLEMS.get(getattr(settings, "problem_type", None) or "", "")
        or ("Sigmoid" if num_labels == 1 else "Softmax")
    )
    name = str(named).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        allowed = ", ".join(_ACTIVATIONS)
        raise ValueError(f"its activation is {json.dumps(str(named))}, allowed: {allowed}")
    return _ACTIVATIONS[name]


class _OneRow:
    """The head of a class: its own forward, in which the body says what it is told."""

    def __init__(self, module: PreTrainedModel) -> None:
        self._module = module
        self._body = module.base_model
        self._stand_in = _StandIn(self._body)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        self._stand_in.rows = rows[:, None].to(self._module.dtype)
        score = getattr(self._module, "score", None)
        if isinstance(score, torch.nn.Module):  # decoders look for the last token first
            found: torch.Tensor = score(self._stand_in.rows[:, 0])
            return found.float()
        with self._replaced():
            ones = torch.ones((len(rows), 1), dtype=torch.long, device=rows.device)
            output: Any = self._module(input_ids=ones, attention_mask=ones)
        logits: torch.Tensor = output.logits
        return logits.float()

    @contextmanager
    def _replaced(self) -> Iterator[None]:
        name = self._module.base_model_prefix
        setattr(self._module, name, self._stand_in)
        try:
            yield
        finally:
            setattr(self._module, name, self._body)


class _StandIn(torch.nn.Module):
    """In the place of a body. rows: what it has computed, [n, 1, width]."""

    rows: torch.Tensor

    def __init__(self, body: torch.nn.Module) -> None:
        super().__init__()
        self.config = body.config
        self._pooler = [getattr(body, "pooler", None)]  # in a list: it stays the body's
        self._after = getattr(body, "pooler_activation", None)

    def forward(self, *_: Any, **__: Any) -> BaseModelOutputWithPooling:
        """The rows, as hidden states."""
        [pooler] = self._pooler
        pooled = None
        if isinstance(pooler, torch.nn.Linear) and self._after is not None:  # ALBERT's
            pooled = self._after(pooler(self.rows[:, 0]))
        elif pooler is not None:
            pooled = pooler(self.rows)
        return BaseModelOutputWithPooling(last_hidden_state=self.rows, pooler_output=pooled)
