"""Computes the embeddings of sequences of token ids, with one of transformers' models.

- The sequences of a call stand one behind another, sorted by length, without padding.
- What a model computes so is compared with what it computes of a sequence alone when it is loaded.
  The trial also finds from which number on it counts positions. A model that differs is refused:
  some run without an error and ignore the attention that they are given, such as MPNet.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import normalize
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from slipstream_core.config import CoreConfig
from slipstream_core.load_error import ModelLoadError, brief
from slipstream_core.model.hub import Source, find_file, locate, read_json
from slipstream_core.model.loader import dtype_of, quiet, read_config, target_device
from slipstream_core.pooling.flat_attention import FLAT_ATTENTION, FlatBatch, register
from slipstream_core.pooling.sentence_transformers_folder import DenseLayer, Recipe, read_recipe
from slipstream_ipc.arrays import Float32s

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
    """A loaded model. dimensions: of its vectors. matryoshka: shorter lengths that they may be cut
    to; None: none, empty: any. max_model_len: tokens of a sequence.
    """

    name: str
    recipe: Recipe
    dimensions: int
    matryoshka: tuple[int, ...] | None
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    _module: PreTrainedModel
    _first_position: int
    _dense: tuple[_Dense, ...]

    @torch.inference_mode()
    def embed(self, sequences: Sequence[npt.NDArray[np.uint32]]) -> Float32s:
        """The vectors of sequences, none of them empty: [sequences, dimensions], before they are
        cut and normalised.
        """
        order = sorted(range(len(sequences)), key=lambda index: len(sequences[index]))
        lens = [len(sequences[index]) for index in order]
        ids = np.concatenate([sequences[index] for index in order]).astype(np.int64)
        hidden = _forward(self._module, ids, lens, self._first_position)
        rows = _pooled(hidden, lens, self.recipe.pooling)
        for dense in self._dense:
            rows = dense.apply(rows)
        vectors = np.empty((len(order), self.dimensions), np.float32)
        vectors[order] = rows.cpu().numpy()
        return vectors


def load_flat_model(config: CoreConfig) -> FlatModel:
    """Load `config.model`. Raises ModelLoadError."""
    name, started = config.model, time.monotonic()
    device = target_device(name, config.device)
    register()
    with quiet():
        try:
            source = locate(name)
        except ValueError as error:
            raise ModelLoadError(name, str(error)) from error
        settings = read_config(name, source, config.trust_remote_code, config.hf_overrides)
        dtype = dtype_of(config.dtype, device, settings)
        kind = _class_of(settings)
        module = _load_module(name, source, settings, dtype, device, config.trust_remote_code)
        try:
            recipe = read_recipe(source, is_causal=_is_causal(module))
        except (OSError, ValueError) as error:
            raise ModelLoadError(name, f"its pooling cannot be computed: {error}") from error
        limit = _max_len(module, settings, recipe, source)
        try:
            first = _tried_position(module, limit)
        except Exception as error:
            why = f"{kind} cannot be served for embeddings ({brief(error)}); {_SUPPORTED}"
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
    logger.info("loaded %s for embeddings of %d dimensions in %.1f s", name, width, seconds)
    return FlatModel(
        name,
        recipe,
        width,
        _matryoshka(name, settings, width),
        text.vocab_size,
        limit if asked is None else asked,
        _eos_ids(text),
        module,
        first,
        dense,
    )


def _load_module(
    name: str,
    source: Source,
    settings: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool,
) -> PreTrainedModel:
    try:
        module, found = AutoModel.from_pretrained(
            source.path,
            config=settings,
            dtype=dtype,
            attn_implementation=FLAT_ATTENTION,
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
            local_files_only=source.local_only,
            revision=source.revision,
        )
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        why = f"transformers cannot load {_class_of(settings)} ({brief(error)}); {_SUPPORTED}"
        raise ModelLoadError(name, why) from error
    # a pooler stands behind the hidden states, and is not used
    missing = sorted(each for each in found["missing_keys"] if "pooler" not in each)
    if missing:
        raise ModelLoadError(name, f"its weights lack {len(missing)} tensors, such as {missing[0]}")
    if getattr(module, "pooler", None) is not None:
        module.pooler = None
    module = module.to(device).eval()
    assert isinstance(module, PreTrainedModel)
    return module


def _class_of(settings: PreTrainedConfig) -> str:
    names = getattr(settings, "architectures", None) or [type(settings).__name__]
    return str(names[0])


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
    text = module.config.get_text_config()
    pad = getattr(text, "pad_token_id", None)
    lens = [min(length, limit) for length in _lens_of_trial(text)]
    random = np.random.default_rng(0)
    choices = np.setdiff1d(np.arange(text.vocab_size), [-1 if pad is None else pad])
    sequences = [random.choice(choices, length) for length in sorted(lens)]
    with torch.inference_mode():
        with _eager(module):
            alone = torch.cat([_alone(module, each) for each in sequences]).float()
        most = _MAX_DIFFERENCE[module.dtype] * float(alone.abs().max())
        differences = []
        for first in dict.fromkeys((0, 0 if pad is None else pad + 1)):
            try:
                hidden = _forward(module, np.concatenate(sequences), sorted(lens), first)
            except IndexError:  # it has no such positions
                continue
            differences.append(float((hidden.float() - alone).abs().max()))
            if differences[-1] <= most:
                return first
    raise ValueError(
        "sequences beside others are not computed as they are alone: differences of "
        f"{min(differences, default=float('nan')):.2g}, allowed: {most:.2g}"
    )


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


def _alone(module: PreTrainedModel, ids: npt.NDArray[np.int64]) -> torch.Tensor:
    """The hidden states of one sequence, as transformers computes them: [tokens, width]."""
    given = torch.from_numpy(ids)[None].to(module.device)
    output: Any = module(input_ids=given, attention_mask=torch.ones_like(given))
    hidden: torch.Tensor = output.last_hidden_state[0]
    return hidden


# ---- computing ----------------------------------------------------------------------------------


def _forward(
    module: PreTrainedModel, ids: npt.NDArray[np.int64], lens: Sequence[int], first_position: int
) -> torch.Tensor:
    """The hidden states of sequences that stand one behind another: [T, width]. lens: ascending."""
    positions = np.concatenate([np.arange(length) for length in lens]) + first_position
    output: Any = module(
        input_ids=torch.from_numpy(ids)[None].to(module.device),
        position_ids=torch.from_numpy(positions)[None].to(module.device),
        flat=FlatBatch(lens),
        use_cache=False,
    )
    hidden: torch.Tensor = output.last_hidden_state[0]
    return hidden


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
