"""From a folder or a hub id to a model that is ready to run, or to an error that says why not.

Owns every question asked of a model before it is served. Knows no requests and no cache.

Rules:
- Whatever is wrong with a model is found here, not in its first step: a model that transformers
  would run and compute something else (attention that ignores our function, weights missing from
  the checkpoint, frequencies that depend on who shares the batch) is refused.
- Every failure is a ModelLoadError that names what was given and what would do instead.
- No code from the model's folder is run.
- Nothing is printed. Transformers' logging is quiet while a model loads, then as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from slipstream_core.runner.attention.interface import ATTENTION_NAME, register
from slipstream_core.runner.geometry import LayerGeometry, read_geometry

DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]

# transformers' own annotations leave these out
_AutoModel: Any = AutoModelForCausalLM
_logging: Any = logging

_NOT_REPLACEABLE = "{} does not let its attention be replaced, which serving needs"
_KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}


class ModelLoadError(ValueError):
    """A model cannot be served as asked: what was given, what is wrong, what would do."""

    def __init__(self, model: str, problem: str) -> None:
        super().__init__(f"cannot load the model {model!r}: {problem}")
        self.model = model


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device, and what was learned of it."""

    name: str
    module: PreTrainedModel
    geometry: tuple[LayerGeometry, ...]
    vocab_size: int
    max_model_len: int  # tokens, prompt and output together
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def load_model(
    name: str,
    *,
    dtype: DType = "auto",
    device: Device = "auto",
    max_model_len: int | None = None,
) -> LoadedModel:
    """Load a local folder or a hub id.

    `dtype` auto is float32 on a CPU, where the narrow types are slower for most models, and the
    checkpoint's own elsewhere. `max_model_len` may lower what the model allows. Raises
    ModelLoadError.
    """
    target = _device(name, device)
    register()
    with _quiet():
        config = _config(name)
        torch_dtype = _dtype(dtype, target, config)
        text = config.get_text_config()
        _refuse_kind(name, config, text)
        geometry = _geometry(name, config, text)
        limit = _max_model_len(name, text, max_model_len)
        _refuse_longrope(name, text, limit)
        module = _weights(name, config, torch_dtype).to(target).eval()  # type: ignore[arg-type]
    return LoadedModel(
        name=name,
        module=module,
        geometry=geometry,
        vocab_size=text.vocab_size,
        max_model_len=limit,
        eos_token_ids=_eos_token_ids(module, text),
        dtype=torch_dtype,
        device=target,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    verbosity = _logging.get_verbosity()
    had_bars = _logging.is_progress_bar_enabled()
    _logging.set_verbosity_error()
    _logging.disable_progress_bar()
    try:
        yield
    finally:
        _logging.set_verbosity(verbosity)
        if had_bars:
            _logging.enable_progress_bar()


def _device(name: str, device: Device) -> torch.device:
    if device == "cuda" and not torch.cuda.is_available():
        raise ModelLoadError(
            name, "device is 'cuda', but torch sees no CUDA device; 'cpu' would do"
        )
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def _dtype(dtype: DType, device: torch.device, config: PreTrainedConfig) -> torch.dtype:
    if dtype != "auto":
        return {
            "float32": torch.float32,
            "bfloat16": torch.bfloat16,
            "float16": torch.float16,
        }[dtype]
    own = config.dtype
    return own if device.type != "cpu" and isinstance(own, torch.dtype) else torch.float32


def _config(name: str) -> PreTrainedConfig:
    path = Path(name).expanduser()
    if name.startswith((".", "/", "~")) or path.is_dir():
        if not path.is_dir():
            raise ModelLoadError(name, "there is no such folder")
        if not (path / "config.json").is_file():
            raise ModelLoadError(name, "the folder holds no config.json, so it is no model's")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            _source(name), trust_remote_code=False
        )
    except Exception as error:
        raise ModelLoadError(
            name,
            "its configuration could not be read; give a model's folder or a reachable hub id, "
            f"of an architecture that transformers itself has ({_brief(error)})",
        ) from error
    # With a padding id GPT-2 looks for padding in every batch, which makes the device wait.
    config.pad_token_id = None
    return config


def _source(name: str) -> str:
    return str(Path(name).expanduser()) if name.startswith("~") else name


def _max_model_len(name: str, text: PreTrainedConfig, asked: int | None) -> int:
    own = getattr(text, "max_position_embeddings", None)
    if not isinstance(own, int):
        if asked is None:
            raise ModelLoadError(name, "its configuration names no length; give max_model_len")
        return asked
    if asked is not None and asked > own:
        raise ModelLoadError(name, f"max_model_len is {asked}, but the model reaches {own} tokens")
    return own if asked is None else asked


def _refuse_kind(name: str, config: PreTrainedConfig, text: PreTrainedConfig) -> None:
    if config.is_encoder_decoder:
        raise ModelLoadError(name, "it has an encoder; only decoder-only models are served")
    if unknown := set(getattr(text, "layer_types", None) or ()) - _KNOWN_LAYER_TYPES:
        raise ModelLoadError(
            name,
            f"it has layers of type {', '.join(sorted(unknown))}; "
            f"served are {', '.join(sorted(_KNOWN_LAYER_TYPES))}",
        )
    if any(r["rope_type"] == "dynamic" for r in _ropes(getattr(text, "rope_parameters", None))):
        raise ModelLoadError(
            name,
            "its rope type is 'dynamic', whose results depend on who shares a batch; "
            "a fixed one ('default', 'linear', 'llama3', 'yarn') is served",
        )


def _refuse_longrope(name: str, text: PreTrainedConfig, max_model_len: int) -> None:
    """It has two sets of frequencies, and its longest row chooses one for the whole batch."""
    for rope in _ropes(getattr(text, "rope_parameters", None)):
        if rope["rope_type"] != "longrope":
            continue
        short = rope.get("original_max_position_embeddings")
        if short is None or max_model_len > short:
            raise ModelLoadError(
                name,
                "its rope type is 'longrope', whose results depend on who shares a batch beyond "
                f"{short} tokens; give a max_model_len of at most that",
            )


def _ropes(parameters: Any) -> Iterator[Mapping[str, Any]]:
    """The rope settings: one for the model, or one per layer type."""
    if not isinstance(parameters, Mapping):
        return
    if "rope_type" in parameters:
        yield parameters
    else:
        for nested in parameters.values():
            yield from _ropes(nested)


def _geometry(
    name: str, config: PreTrainedConfig, text: PreTrainedConfig
) -> tuple[LayerGeometry, ...]:
    try:
        with torch.device("meta"):  # in bfloat16: there, experts take no other type
            shell = _AutoModel.from_config(
                config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME
            ).eval()
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (ATTENTION_NAME,):
            # these look their attention up in a table of their own
            raise ModelLoadError(name, _NOT_REPLACEABLE.format(config.model_type)) from error
        raise ModelLoadError(
            name, f"transformers cannot build it as a causal language model ({_brief(error)})"
        ) from error
    architecture = type(shell).__name__
    if not shell._supports_attention_backend:
        raise ModelLoadError(name, _NOT_REPLACEABLE.format(architecture))
    try:
        return read_geometry(shell, text.num_hidden_layers, text.vocab_size)
    except Exception as error:
        raise ModelLoadError(
            name, f"{architecture} does not attend in a way that can be served ({_brief(error)})"
        ) from error


def _weights(name: str, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    try:
        module, report = _AutoModel.from_pretrained(
            _source(name),
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:
        raise ModelLoadError(name, f"its weights could not be loaded ({_brief(error)})") from error
    # Left alone these would hold random numbers.
    if absent := sorted(report["missing_keys"]) + sorted(map(str, report["mismatched_keys"])):
        raise ModelLoadError(
            name,
            f"its checkpoint lacks {len(absent)} of the weights, or has them in another shape, "
            f"{absent[0]} among them",
        )
    assert isinstance(module, PreTrainedModel)
    return module


def _eos_token_ids(module: PreTrainedModel, text: PreTrainedConfig) -> tuple[int, ...]:
    """Of the generation settings, else of the configuration; a model may have several."""
    ids = getattr(module.generation_config, "eos_token_id", None)
    if ids is None:
        ids = text.eos_token_id
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list | tuple) else (ids,)


def _brief(error: Exception) -> str:
    """An error's first line: transformers' messages run to paragraphs."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
