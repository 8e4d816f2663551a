"""Computes embeddings or classes of sequences of token ids, with one of transformers' models.

- The sequences of a call stand one behind another, sorted by length, without padding.
- What a model computes so is compared with what it computes of a sequence alone when it is loaded.
  The trial also finds from which number on it counts positions. A model that differs is refused:
  some run without an error and ignore the attention that they are given, such as MPNet.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import normalize
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from slipstream_core.config import CoreConfig
from slipstream_core.load_error import ModelLoadError, brief
from slipstream_core.model.hub import Source, find_file, locate, read_json
from slipstream_core.model.loader import dtype_of, quiet, read_config, target_device
from slipstream_core.pooling.classifier_head import (
    LAST,
    ROWS,
    ClassifierHead,
    head_of_classifier,
    head_of_tokens,
    logits_alone,
    tokens_of_classes,
)
from slipstream_core.pooling.flat_attention import FLAT_ATTENTION, FlatBatch, register
from slipstream_core.pooling.sentence_transformers_folder import (
    DenseLayer,
    Pooling,
    Recipe,
    read_recipe,
)
from slipstream_ipc.arrays import Float32s
from slipstream_ipc.messages import PoolingTask

logger = logging.getLogger(__name__)


_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "GELU": torch.nn.functional.gelu,
    "Identity": lambda rows: rows,
    "ReLU": torch.relu,
    "SiLU": torch.nn.functional.silu,
    "Sigmoid": torch.sigmoid,
    "Tanh": torch.tanh,
}
_TRIAL_LENS = 3, 5, 5, 19
_MAX_TRIED_WINDOW = 1024  # of a longer window no trial shows that it is honoured
# greatest difference of a trial over the greatest value: those that are wrong differ by 0.3 and
# more, those that are right by 1e-6
_MAX_DIFFERENCE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
_ANSWERING = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "ChatModel")
_BY_WORDS = (
    "to classify by the words that it would answer with, set --hf-overrides "
    """'{"classifier_from_token": ["no", "yes"]}'"""
)
_SUPPORTED = (
    "supported are models that transformers' AutoModel loads and whose tokens interact in its "
    "attention interface alone, such as BERT, RoBERTa, XLM-R, ModernBERT, Nomic-BERT, GTE or Qwen3"
)


@dataclass(frozen=True, slots=True)
class _Dense:
    weight: torch.Tensor  # [out, in], float32
    bias: torch.Tensor | None
    activation: Callable[[torch.Tensor], torch.Tensor]

    def apply(self, rows: torch.Tensor) -> torch.Tensor:
        return self.activation(torch.nn.functional.linear(rows, self.weight, self.bias))


@dataclass(frozen=True, slots=True)
class FlatModel:
    """A loaded model. head: None: it embeds. needs_template: as in PoolingCard. dimensions: of its
    vectors, or its labels. matryoshka: shorter lengths that vectors may be cut to; None: none,
    empty: any. max_model_len: tokens of a sequence.
    """

    name: str
    recipe: Recipe
    head: ClassifierHead | None
    needs_template: bool
    dimensions: int
    matryoshka: tuple[int, ...] | None
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    _module: PreTrainedModel
    _first_position: int
    _dense: tuple[_Dense, ...]
    _takes_types: bool

    @torch.inference_mode()
    def embed(
        self,
        sequences: Sequence[npt.NDArray[np.uint32]],
        first_lens: Sequence[int | None] | None = None,
    ) -> Float32s:
        """The rows of sequences, none of them empty: [sequences, dimensions], before they are
        `finished`. first_lens: tokens of type 0 at the beginning of each; None: all are.
        """
        order = sorted(range(len(sequences)), key=lambda index: len(sequences[index]))
        lens = [len(sequences[index]) for index in order]
        ids = np.concatenate([sequences[index] for index in order]).astype(np.int64)
        types = None
        if self._takes_types and first_lens is not None:
            types = _types(lens, [first_lens[index] for index in order])
        hidden = _forward(_body_of(self._module), ids, lens, self._first_position, types)
        rows = _pooled(hidden, lens, self.recipe.pooling)
        for dense in self._dense:
            rows = dense.apply(rows)
        if self.head is not None:
            rows = self.head.logits(rows)
        vectors = np.empty((len(order), self.dimensions), np.float32)
        vectors[order] = rows.cpu().numpy()
        return vectors

    def finished(self, rows: Float32s, dimensions: int, normalizes: bool | None) -> Float32s:
        """Rows as they are sent. dimensions: that vectors are cut to; 0: they are not. normalizes:
        as in Embed.
        """
        if self.head is None:
            does = self.recipe.normalizes if normalizes is None else normalizes
            return finished(rows, dimensions or self.dimensions, normalizes=does)
        does = self.recipe.normalizes if normalizes is None else normalizes
        if not does:
            return rows
        activated: Float32s = self.head.activation(torch.from_numpy(rows)).numpy()
        return activated


def load_flat_model(config: CoreConfig, task: PoolingTask = "embed") -> FlatModel:
    """Load `config.model` for a task. Raises ModelLoadError."""
    name, started = config.model, time.monotonic()
    device = target_device(name, config.device)
    register()
    with quiet():
        try:
            source = locate(name)
        except ValueError as error:
            raise ModelLoadError(name, str(error)) from error
        overrides = dict(config.hf_overrides)
        # it says what the model is served for: its class follows from its type
        classes = overrides.pop("architectures", None) if task == "classify" else None
        settings = read_config(name, source, config.trust_remote_code, overrides)
        if classes is not None:
            _check_class(name, classes, settings)
        dtype = dtype_of(config.dtype, device, settings)
        kind = _class_of(settings)
        try:
            tokens = tokens_of_classes(settings) if task == "classify" else ()
        except ValueError as error:
            raise ModelLoadError(name, str(error)) from error
        loader: Any = AutoModel
        if task == "classify":
            loader = AutoModelForCausalLM if tokens else AutoModelForSequenceClassification
            if not tokens and kind.endswith(_ANSWERING):
                raise ModelLoadError(name, f"{kind} has no head that classifies; {_BY_WORDS}")
        module = _load_module(name, source, settings, dtype, device, config, loader)
        head, recipe = None, Recipe(LAST)
        try:
            if task == "embed":
                recipe = read_recipe(source, is_causal=_is_causal(module))
            elif tokens:
                head = head_of_tokens(module, tokens, source)
            else:
                head = head_of_classifier(module, source)
        except (OSError, ValueError) as error:
            raise ModelLoadError(name, f"its pooling cannot be computed: {error}") from error
        limit = _max_len(module, settings, recipe, source)
        try:
            first = _tried_position(_body_of(module), limit)
            if head is not None:
                rows = (LAST,) if tokens else ROWS
                recipe = Recipe(_tried_row(module, head, limit, first, rows, source))
        except Exception as error:
            what = "for embeddings" if head is None else "for classes"
            why = f"{kind} cannot be served {what} ({brief(error)}); {_SUPPORTED}"
            raise ModelLoadError(name, why) from error
        limit = _without(first, limit, settings)
        try:
            dense = tuple([_load_dense(source, each, device) for each in recipe.dense])
        except (OSError, ValueError, KeyError) as error:
            raise ModelLoadError(name, f"its Dense module cannot be read ({error})") from error
    asked = config.max_model_len
    if asked is not None and asked > limit:
        raise ModelLoadError(name, f"max_model_len is {asked}, allowed: at most {limit}")
    text = settings.get_text_config()
    width = dense[-1].weight.shape[0] if dense else text.hidden_size
    seconds = time.monotonic() - started
    if head is None:
        logger.info("loaded %s for embeddings of %d dimensions in %.1f s", name, width, seconds)
    else:
        width = len(head.labels)
        logger.info("loaded %s for classes, %d labels, in %.1f s", name, width, seconds)
    return FlatModel(
        name,
        recipe,
        head,
        bool(tokens),
        width,
        _matryoshka(name, settings, width) if head is None else None,
        text.vocab_size,
        limit if asked is None else asked,
        _eos_ids(text),
        module,
        first,
        dense,
        _takes_types(module),
    )


def _load_module(
    name: str,
    source: Source,
    settings: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    config: CoreConfig,
    loader: Any,
) -> PreTrainedModel:
    try:
        module, found = loader.from_pretrained(
            source.path,
            config=settings,
            dtype=dtype,
            attn_implementation=FLAT_ATTENTION,
            output_loading_info=True,
            trust_remote_code=config.trust_remote_code,
            local_files_only=source.local_only,
            revision=source.revision,
        )
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        why = f"transformers cannot load {_class_of(settings)} ({brief(error)}); {_SUPPORTED}"
        raise ModelLoadError(name, why) from error
    # a pooler stands behind the hidden states, and is not used but by classifiers
    embeds = loader is AutoModel
    missing = sorted(each for each in found["missing_keys"] if not embeds or "pooler" not in each)
    if missing:
        raise ModelLoadError(name, f"its weights lack {len(missing)} tensors, such as {missing[0]}")
    if embeds and getattr(module, "pooler", None) is not None:
        module.pooler = None
    module = module.to(device).eval()
    assert isinstance(module, PreTrainedModel)
    return module


def _class_of(settings: PreTrainedConfig) -> str:
    names = getattr(settings, "architectures", None) or [type(settings).__name__]
    return str(names[0])


def _check_class(name: str, given: object, settings: PreTrainedConfig) -> None:
    """Check that `architectures` names the classifier of a model's type. Raises ModelLoadError."""
    own = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(settings.model_type)
    if given != [own]:
        why = f"hf_overrides has architectures {given!r}, allowed: {[own] if own else 'none'}"
        raise ModelLoadError(name, why)


def _is_causal(module: PreTrainedModel) -> bool:
    """True if some layer's tokens see only those before them."""
    return any(getattr(each, "is_causal", False) for each in module.modules())


def _max_len(
    module: PreTrainedModel, settings: PreTrainedConfig, recipe: Recipe, source: Source
) -> int:
    """The longest sequence, as far as the files say."""
    text = settings.get_text_config()
    tokenizer = read_json(source, "tokenizer_config.json") or {}
    given = (
        getattr(text, "max_position_embeddings", None),
        recipe.max_len,
        tokenizer.get("model_max_length"),
    )
    return min((each for each in given if isinstance(each, int) and each > 0), default=512)


def _without(first: int, limit: int, settings: PreTrainedConfig) -> int:
    """The longest sequence of a model that has no positions below `first`."""
    own = getattr(settings.get_text_config(), "max_position_embeddings", None)
    return limit if not first or not isinstance(own, int) else min(limit, own - first)


def _eos_ids(text: PreTrainedConfig) -> tuple[int, ...]:
    given = getattr(text, "eos_token_id", None)
    if isinstance(given, int):
        return (given,)
    return tuple(given) if isinstance(given, list | tuple) else ()


def _matryoshka(name: str, settings: PreTrainedConfig, width: int) -> tuple[int, ...] | None:
    """The shorter lengths of vectors, by vLLM's words in config.json or `hf_overrides`."""
    lengths = getattr(settings, "matryoshka_dimensions", None)
    if lengths is None:
        return () if getattr(settings, "is_matryoshka", False) else None
    if not isinstance(lengths, list | tuple) or not all(
        isinstance(each, int) and 0 < each <= width for each in lengths
    ):
        raise ModelLoadError(
            name, f"matryoshka_dimensions is {lengths!r}, allowed: integers from 1 to {width}"
        )
    return tuple(sorted(lengths))


# ---- the trial ----------------------------------------------------------------------------------


def _tried_position(module: PreTrainedModel, limit: int) -> int:
    """The number of a sequence's first position, with which its rows among others are those that it
    has alone. Raises ValueError if there is none, and whatever the model raises.
    """
    pad = getattr(module.config.get_text_config(), "pad_token_id", None)
    sequences = _tried_sequences(module, limit)
    lens = [len(each) for each in sequences]
    types = _tried_types(module, lens)
    with torch.inference_mode():
        with _eager(module):
            each_type = [None] * len(lens) if types is None else _split(types, lens)
            alone = torch.cat(list(map(partial(_alone, module), sequences, each_type))).float()
        most = _MAX_DIFFERENCE[module.dtype] * float(alone.abs().max())
        differences = []
        for first in dict.fromkeys((0, 0 if pad is None else pad + 1)):
            try:
                hidden = _forward(module, np.concatenate(sequences), lens, first, types)
            except IndexError:  # it has no such positions
                continue
            differences.append(float((hidden.float() - alone).abs().max()))
            if differences[-1] <= most:
                return first
    raise ValueError(
        "sequences beside others are not computed as they are alone: differences of "
        f"{min(differences, default=float('nan')):.2g}, allowed: {most:.2g}"
    )


def _tried_row(
    module: PreTrainedModel,
    head: ClassifierHead,
    limit: int,
    first_position: int,
    rows: Sequence[Pooling],
    source: Source,
) -> Pooling:
    """The row of a sequence that a classifier looks at. Raises ValueError if it is none of these,
    and whatever the model raises.
    """
    sequences = _tried_sequences(module, limit)
    lens = [len(each) for each in sequences]
    types = _tried_types(module, lens)
    with torch.inference_mode():
        with _eager(module):
            each_type = [None] * len(lens) if types is None else _split(types, lens)
            alone = torch.stack(
                [
                    logits_alone(module, *_given(module, ids, each), source)
                    for ids, each in zip(sequences, each_type, strict=True)
                ]
            )
        ids = np.concatenate(sequences)
        hidden = _forward(_body_of(module), ids, lens, first_position, types)
        differences = {
            row: float((head.logits(_pooled(hidden, lens, row)) - alone).abs().max())
            for row in rows
        }
    row = min(differences, key=lambda each: differences[each])
    most = _MAX_DIFFERENCE[module.dtype] * max(1e-3, float(alone.abs().max()))
    if not differences[row] <= most:
        raise ValueError(
            "classes of sequences beside others are not computed as they are alone: differences "
            f"of {differences[row]:.2g}, allowed: {most:.2g}"
        )
    return row


def _tried_sequences(module: PreTrainedModel, limit: int) -> list[npt.NDArray[np.int64]]:
    """Random sequences without padding, ascending in length."""
    text = module.config.get_text_config()
    pad = getattr(text, "pad_token_id", None)
    lens = [min(length, limit) for length in _lens_of_trial(text)]
    random = np.random.default_rng(0)
    choices = np.setdiff1d(np.arange(text.vocab_size), [-1 if pad is None else pad])
    return [random.choice(choices, length) for length in sorted(lens)]


def _tried_types(module: PreTrainedModel, lens: Sequence[int]) -> npt.NDArray[np.int64] | None:
    return _types(lens, [length // 2 for length in lens]) if _takes_types(module) else None


def _split(column: npt.NDArray[np.int64], lens: Sequence[int]) -> list[npt.NDArray[np.int64]]:
    return np.split(column, np.cumsum(lens)[:-1])


def _body_of(module: PreTrainedModel) -> PreTrainedModel:
    """The model that computes hidden states; a model without a head is its own."""
    body = module.base_model
    assert isinstance(body, PreTrainedModel)
    return body


def _takes_types(module: PreTrainedModel) -> bool:
    """True if a model tells tokens of a second text from those of the first."""
    has = "token_type_ids" in inspect.signature(module.base_model.forward).parameters
    return has and (getattr(module.config, "type_vocab_size", 0) or 0) > 1


def _lens_of_trial(text: PreTrainedConfig) -> Iterator[int]:
    yield from _TRIAL_LENS
    for name in ("sliding_window", "local_attention"):
        window = getattr(text, name, None)
        if isinstance(window, int) and window <= _MAX_TRIED_WINDOW:
            yield window + 2


@contextmanager
def _eager(module: PreTrainedModel) -> Iterator[None]:
    """With attention as transformers computes it."""
    module.set_attn_implementation("eager")
    try:
        yield
    finally:
        module.set_attn_implementation(FLAT_ATTENTION)


def _alone(
    module: PreTrainedModel, ids: npt.NDArray[np.int64], types: npt.NDArray[np.int64] | None
) -> torch.Tensor:
    """The hidden states of one sequence, as transformers computes them: [tokens, width]."""
    given, of_types = _given(module, ids, types)
    more = {} if of_types is None else {"token_type_ids": of_types}
    output: Any = module(input_ids=given, attention_mask=torch.ones_like(given), **more)
    hidden: torch.Tensor = output.last_hidden_state[0]
    return hidden


def _given(
    module: PreTrainedModel, ids: npt.NDArray[np.int64], types: npt.NDArray[np.int64] | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Ids and types on the model's device: [1, T]."""
    columns = [None if each is None else torch.from_numpy(each)[None] for each in (ids, types)]
    first, second = [None if each is None else each.to(module.device) for each in columns]
    assert first is not None
    return first, second


# ---- computing ----------------------------------------------------------------------------------


def _forward(
    module: PreTrainedModel,
    ids: npt.NDArray[np.int64],
    lens: Sequence[int],
    first_position: int,
    types: npt.NDArray[np.int64] | None = None,
) -> torch.Tensor:
    """The hidden states of sequences that stand one behind another: [T, width]. lens: ascending."""
    positions = np.concatenate([np.arange(length) for length in lens]) + first_position
    given, of_types = _given(module, ids, types)
    more = {} if of_types is None else {"token_type_ids": of_types}
    output: Any = module(
        input_ids=given,
        position_ids=torch.from_numpy(positions)[None].to(module.device),
        flat=FlatBatch(lens),
        use_cache=False,
        **more,
    )
    hidden: torch.Tensor = output.last_hidden_state[0]
    return hidden


def _types(lens: Sequence[int], first_lens: Sequence[int | None]) -> npt.NDArray[np.int64]:
    """The types of all tokens: [T]."""
    parts = [
        np.arange(length) >= (length if first is None else first)
        for length, first in zip(lens, first_lens, strict=True)
    ]
    return np.concatenate(parts).astype(np.int64)


def _pooled(hidden: torch.Tensor, lens: Sequence[int], pooling: str) -> torch.Tensor:
    """A row for each sequence, float32. hidden: [T, width]."""
    counts = torch.tensor(lens, device=hidden.device)
    ends = counts.cumsum(0)
    if pooling == "cls":
        return hidden[ends - counts].float()
    if pooling == "lasttoken":
        return hidden[ends - 1].float()
    rows = torch.segment_reduce(hidden.float(), "sum", lengths=counts, axis=0)
    return rows / counts[:, None]


def finished(vectors: Float32s, dimensions: int, *, normalizes: bool) -> Float32s:
    """Vectors as they are sent: cut to `dimensions`, and normalised behind that."""
    cut = vectors[:, :dimensions]
    if not normalizes:
        return np.ascontiguousarray(cut)
    scaled: Float32s = normalize(torch.from_numpy(cut), dim=-1).numpy()
    return scaled


def _load_dense(source: Source, layer: DenseLayer, device: torch.device) -> _Dense:
    activation = _ACTIVATIONS.get(layer.activation)
    if activation is None:
        raise ValueError(f"activation {layer.activation}, allowed: {', '.join(_ACTIVATIONS)}")
    weights = {name: each.float().to(device) for name, each in _tensors(source, layer.path).items()}
    return _Dense(weights["linear.weight"], weights.get("linear.bias"), activation)


def _tensors(source: Source, folder: str) -> dict[str, torch.Tensor]:
    path = find_file(source, f"{folder}/model.safetensors")
    if path is not None:
        from safetensors.torch import load_file

        return load_file(path)
    path = find_file(source, f"{folder}/pytorch_model.bin")
    if path is None:
        raise ValueError(f"the folder {folder} has no weights")
    loaded: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return loaded
