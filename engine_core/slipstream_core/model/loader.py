"""Loads a folder or a hub id as a model that is ready to run, or raises an error that says why not.

- Problems are found here, not in the first step. Models that transformers would run but that would
  compute something else (attention that bypasses our function, weights missing from the checkpoint,
  rope frequencies that depend on the rest of the batch) are refused.
- Every failure is a ModelLoadError that names what was given and what would work instead.
- No code from the model's folder is run without `trust_remote_code`.
- Nothing is written to stdout. Transformers' logging is quiet while a model loads and restored
  afterwards; its progress bars are shown only if stderr is a terminal.
- There is one copy of the weights. The model is first built on the meta device, where it takes no
  memory, and the checkpoint is mapped, not read.
  - On a CPU, in the checkpoint's own dtype, the parameters are the mapping itself, so the file must
    not be rewritten in place while it is served (a new file under the old name does no harm).
  - In another dtype each tensor is converted out of the mapping, whose clean pages the kernel
    reclaims when it needs them. Matrices of 16 bits stay so where float32 is computed
    (`coded_model`).
  - On another device the parameters move one by one from the mapping, or, where `accelerate` is
    installed, as they are read (transformers loads directly to a device only with it).
  - Experts are merged a layer at a time.
  - Of several ranks each takes its slices from the mapping (`sharding`): those of rows are parts of
    it, those of columns copies.
  - The runner may later change the layout of some weights, one by one (`forward/projection.py`).
"""

from __future__ import annotations

import copy
import logging
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import transformers
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils import logging as transformers_logging
from transformers.utils.import_utils import is_accelerate_available

from slipstream_core.attention.cache_formats import CacheFormat
from slipstream_core.attention.chunked_layers import attend_in_chunks, scale_by_position
from slipstream_core.attention.geometry import (
    AllLogitsError,
    LayerGeometry,
    read_attending_layers,
    read_geometry,
)
from slipstream_core.attention.indexers import skip_indexers
from slipstream_core.attention.interface import (
    ATTENTION_NAME,
    NotPassedError,
    SharedLayersError,
    number_calls,
    number_layers,
    register,
)
from slipstream_core.attention.latent_attention import cache_latents
from slipstream_core.attention.own_attention import check_followed, follow_keys
from slipstream_core.forward.experts import compute_in_turn, has_odd_experts, without_values
from slipstream_core.kernels.codes.online import ONLINE
from slipstream_core.load_error import ModelLoadError, brief
from slipstream_core.model.attention_check import check_independence
from slipstream_core.model.coded_model import (
    has_more_than_matrices,
)
from slipstream_core.model.config_overrides import overridden
from slipstream_core.model.gguf.folder import weights_file
from slipstream_core.model.host_memory import read_host_memory, refuse_weights
from slipstream_core.model.hub import Source, incomplete, locate
from slipstream_core.model.quantization import MXFP4, check_quantization, quantization_of
from slipstream_core.model.random_weights import is_random, random_config
from slipstream_core.model.rope import BY_LENGTH, carried_len, freeze_frequencies
from slipstream_core.model.sight import (
    NO_PROCESSOR,
    NO_SIGHT,
    Sight,
    blind,
    media_process_of,
    open_sight,
    sees,
    why_kept_apart,
)
from slipstream_core.model.sliced_head import slice_head
from slipstream_core.model.text_tower import (
    TowerFinder,
    attention_of,
    auto_class,
    has_class,
    keep_asked,
    remove_towers,
    with_towers,
    writing_part,
)
from slipstream_core.model.unsupported import (
    chunked_layers,
    class_name,
    indexed_layers,
    needs_values,
    refusal,
    refuse_chunks,
    refuse_kind,
    refuse_larger,
    refuse_longrope,
    refuse_states,
    refuse_unseen_windows,
    ropes,
    take_counted_scale,
    unknown_kinds,
)
from slipstream_core.model.weight_sources import Wanted, downloaded, no_room, source_of
from slipstream_core.sharding.rank import Rank
from slipstream_core.sharding.sharding_plan import ShardingPlan, plan_for
from slipstream_core.states.continuation_check import check_continuation
from slipstream_core.states.mixers import Mixer, install_mixers, read_states
from slipstream_core.states.state_cache import MixerStates, concerns_states
from slipstream_ipc.messages import SamplingDefaults

DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]

logger = logging.getLogger(__name__)

# missing from transformers' annotations
_transformers_logging: Any = transformers_logging

_MUCH = 1.2  # times an even share
_HTTP_CLIENTS = ("httpx", "httpx2")  # logger names


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device, and its properties; of several ranks, this one's slice of it."""

    name: str
    module: PreTrainedModel
    geometry: tuple[LayerGeometry, ...]
    vocab_size: int
    max_model_len: int  # tokens, prompt and output together
    eos_token_ids: tuple[int, ...]
    default_sampling: SamplingDefaults
    dtype: torch.dtype
    device: torch.device
    kept_bytes: int = 0  # of weights on a CPU that are not the checkpoint's mapping
    rank: Rank | None = None  # among several
    head_is_sliced: bool = False  # its logits are this rank's slice of the vocabulary
    states: tuple[MixerStates, ...] = ()  # of a row, in each mixer
    cache_format: CacheFormat = "auto"  # of keys and values
    stepped: str = ""  # why some mixers compute chunks that continue a row token by token
    is_limited: bool = False  # some mixer limits the time steps of prompts, not of answers
    sight: Sight = NO_SIGHT  # of images
    draft: LoadedModel | None = None  # its draft model

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one row."""
        return sum(each.num_bytes for each in self.states)


def load_model(
    name: str,
    *,
    dtype: DType = "auto",
    device: Device = "auto",
    max_model_len: int | None = None,
    trust_remote_code: bool = False,
    hf_overrides: Mapping[str, Any] | None = None,
    generation_config: str = "auto",
    override_generation_config: Mapping[str, float] | None = None,
    quantization: str | None = None,
    rank: Rank | None = None,
    takes_images: bool = False,
    why_no_images: str = "",
) -> LoadedModel:
    """Load a local folder or a hub id, or make a model of random weights (`random:NAME`).

    `dtype` auto is the checkpoint's own; on a CPU it is float32, unless the checkpoint is bfloat16,
    without codes, and the CPU multiplies bfloat16 natively (AMX). `max_model_len` may lower the
    model's limit, or raise it as far as the model's rope scaling carries. `hf_overrides` replaces
    parts of its configuration. `generation_config` is a folder whose sampling defaults count, auto
    for the model's own, or vllm for none; `override_generation_config` replaces some of them.
    `quantization` is the checkpoint's own method, or a format of `kernels/codes/online.py`.
    `trust_remote_code` allows code from the model's folder to run, with the rights of this process.
    With a `rank`, its slice is loaded; all ranks have to call this, in a process group. With
    `takes_images` a model keeps its towers for them, if a trial shows that they are seen as by
    transformers; `why_no_images` is a reason of the caller's not to. Raises ModelLoadError.
    """
    started = time.monotonic()
    target = target_device(name, device, rank)
    register()
    with ExitStack() as if_failed, quiet():
        try:
            source = Source(name, True) if is_random(name) else locate(name)
            config = random_config(name) if is_random(name) else None
        except ValueError as error:
            raise ModelLoadError(name, str(error)) from error
        if config is None:
            config = _config(name, source, trust_remote_code, hf_overrides or {})
        gguf_file = None if is_random(name) else weights_file(Path(source.path))
        quantized = None
        if gguf_file is not None:
            _refuse_sliced(name, "GGUF files", rank)
        elif not is_random(name):
            quantized = quantization_of(name, config, source)
            if quantized is not None and quantized.method == MXFP4:
                _refuse_sliced(name, "weights in MXFP4", rank)
        text = config.get_text_config()
        refuse_kind(name, config)
        trial = _trial(name, config, text, trust_remote_code)
        layers, shell, towers, has_states, adaptations, attention = trial
        geometry = tuple(layers.values())
        has_codes = bool(quantized or gguf_file or quantization)
        torch_dtype = dtype_of(dtype, target, config, has_codes=has_codes)
        if has_states:
            refuse_states(name, config, target, rank)
        can_see = takes_images and not has_states and sees(config, towers, type(shell))
        if can_see and not why_no_images:
            is_plain = quantized is None and quantization is None and gguf_file is None
            why_no_images = why_kept_apart(target, is_plain=is_plain, is_ranked=rank is not None)
        process = None
        if can_see and not why_no_images:
            process = media_process_of(downloaded(name, source))
            if process is None:
                why_no_images = NO_PROCESSOR
            else:
                if_failed.callback(process.close)
        keeps_towers = process is not None
        if towers and not keeps_towers:
            _tell_towers(name, config, towers, rank, why_no_images)
        num_parameters = sum(parameter.numel() for parameter in shell.parameters())
        plan = None if rank is None else _sharding_plan(name, shell, geometry, rank)
        share = 1 if rank is None else rank.size
        limit = _max_model_len(name, text, max_model_len)
        refuse_longrope(name, config, text, limit)
        refuse_chunks(name, config, text, limit, target)
        counted_scale = take_counted_scale(name, config, text, limit, target)
        refuse_unseen_windows(name, config, text, layers, limit)
        is_wide = target.type == "cpu" and torch_dtype == torch.float32
        is_coded = is_wide
        if quantization is not None and gguf_file is not None:
            raise ModelLoadError(
                name, f"quantization is {quantization!r}, but a GGUF file has types of its own"
            )
        if quantization is not None:
            why = _not_online(target, torch_dtype, rank, shell, is_coded=is_coded)
            check_quantization(name, quantized, quantization, why=why)
        wanted = Wanted(
            name,
            source,
            config,
            shell,
            torch_dtype,
            target,
            quantized,
            gguf_file,
            is_coded=is_coded,
            trust_remote_code=trust_remote_code,
            towers=towers,
            keeps_towers=keeps_towers,
            attention=attention,
            plan=plan,
            rank=rank,
        )
        weights = source_of(wanted, quantization if quantization in ONLINE else None)
        logger.info("loading %s in %s%s", name, _said(torch_dtype), weights.form())
        if target.type == "cuda":
            refuse_larger(name, num_parameters * torch_dtype.itemsize // share, target)
        kept = 0
        if target.type == "cpu":
            kept, at_first = weights.num_bytes()
            refuse_weights(name, max(kept, at_first), read_host_memory())
        module = weights.load()
        try:
            module = module.to(target).eval()  # type: ignore[arg-type]
        except torch.OutOfMemoryError as error:
            raise no_room(name, error) from error
        if has_odd_experts(module):
            compute_in_turn(module)
        freeze_frequencies(module)
        cache_latents(module)
        skip_indexers(module, indexed_layers(text))
        mixers = install_mixers(module)
        for adapt in adaptations:
            adapt(module)
        if chunked := chunked_layers(text):
            attend_in_chunks(module, chunked, text.attention_chunk_size)
        if rank is not None:
            kept = sum(parameter.nbytes for parameter in module.parameters())
            share_of_weights = sum(each.numel() for each in module.parameters()) / num_parameters
            uncut = geometry
            geometry = read_geometry(module, len(uncut), text.vocab_size, module.device)
            _tell_shares(name, rank, share_of_weights, uncut, geometry)
        states: tuple[MixerStates, ...] = ()
        stepped, is_limited = "", False
        try:
            if counted_scale is not None:
                scale_by_position(module, counted_scale)
            if has_states:
                number_layers(module, tuple(layers))
                states = tuple(read_states(module, mixers, module.device))
                stepped = check_continuation(mixers)
                is_limited = any(mixer.is_limited for mixer in mixers)
            if follow_keys in adaptations:
                check_followed(module, vocab_size=text.vocab_size, max_model_len=limit)
            check_independence(module, vocab_size=text.vocab_size, max_model_len=limit)
        except Exception as error:
            raise refusal(name, config, f"cannot be served ({brief(error)})") from error
        sight = NO_SIGHT
        if process is not None:
            sight = open_sight(name, module, config, towers, process)
            kept += sight.num_bytes
        elif can_see:
            sight = blind(config, why_no_images)
        head_is_sliced = rank is not None and slice_head(module, text.vocab_size, rank)
        default_sampling = _default_sampling(
            name, module, generation_config, override_generation_config or {}
        )
        if_failed.pop_all()
    logger.info(
        "loaded %s: %.2f GiB in %.1f s",
        name,
        sum(p.nbytes for p in module.parameters()) / 2**30,
        time.monotonic() - started,
    )
    return LoadedModel(
        name=name,
        module=module,
        geometry=geometry,
        vocab_size=text.vocab_size,
        max_model_len=limit,
        eos_token_ids=_eos_token_ids(name, module, config, text),
        default_sampling=default_sampling,
        dtype=torch_dtype,
        device=target,
        kept_bytes=kept,
        rank=rank,
        head_is_sliced=head_is_sliced,
        states=states,
        stepped=stepped,
        is_limited=is_limited,
        sight=sight,
    )


def _refuse_sliced(name: str, what: str, rank: Rank | None) -> None:
    if rank is not None:
        raise ModelLoadError(
            name, f"{what} are not cut for several devices; set tensor_parallel_size to 1"
        )


def _sharding_plan(
    name: str, shell: PreTrainedModel, geometry: tuple[LayerGeometry, ...], rank: Rank
) -> ShardingPlan:
    if not is_accelerate_available():
        raise ModelLoadError(
            name,
            "transformers loads models in slices with accelerate alone, which is not installed; "
            "install slipstream[tp]",
        )
    if is_random(name):
        raise ModelLoadError(
            name, "random weights are not made in slices; set tensor_parallel_size to 1"
        )
    return plan_for(name, shell, geometry, rank)


def _tell_shares(
    name: str,
    rank: Rank,
    weights: float,
    whole: tuple[LayerGeometry, ...],
    own: tuple[LayerGeometry, ...],
) -> None:
    """Log what share of the whole model this rank holds: of its weights, and of its cache."""
    if not rank.leads:
        return
    of_cache, all_cache = (
        sum(layer.bytes_per_token(torch.float32) for layer in layers) for layers in (own, whole)
    )
    cache = of_cache / all_cache
    said = "each of %d ranks holds %.2f of the weights of %s and %.2f of its cache"
    logger.info(said, rank.size, weights, name, cache)
    # latents are whole on every rank, as each of its heads needs all of them
    is_even = all(layer.is_latent for layer in own) or cache <= _MUCH / rank.size
    if weights > _MUCH / rank.size or not is_even:
        logger.warning(
            "%s is divided in part only: transformers' plan for it leaves the rest to every rank, "
            "which costs memory and time",
            name,
        )


def _said(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _not_online(
    target: torch.device,
    dtype: torch.dtype,
    rank: Rank | None,
    shell: PreTrainedModel,
    *,
    is_coded: bool,
) -> str:
    """The reason why matrices cannot be quantised as they are loaded; empty if they can."""
    if target.type != "cpu" or dtype != torch.float32:
        return "matrices are quantised for a CPU that computes in float32 alone"
    if rank is not None:
        return "matrices that ranks share are not quantised; set tensor_parallel_size to 1"
    if not is_coded or has_more_than_matrices(shell):
        return "convolutions over channels and experts of an unknown form are not quantised"
    return ""


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' lines, which come to our log a second time."""
    verbosity = _transformers_logging.get_verbosity()
    had_bars = _transformers_logging.is_progress_bar_enabled()
    # The hub's logger has its own handlers and propagates to ours, so lines would appear twice; its
    # HTTP client logs every request.
    hub, clients = logging.getLogger("huggingface_hub"), list(map(logging.getLogger, _HTTP_CLIENTS))
    handlers, levels = hub.handlers[:], [client.level for client in clients]
    _transformers_logging.set_verbosity_error()
    _show_bars(sys.stderr.isatty())
    hub.handlers.clear()
    for client in clients:
        client.setLevel(logging.WARNING)
    try:
        yield
    finally:
        _transformers_logging.set_verbosity(verbosity)
        _show_bars(had_bars)
        hub.handlers[:] = handlers
        for client, level in zip(clients, levels, strict=True):
            client.setLevel(level)


def _show_bars(shown: bool) -> None:
    logs = _transformers_logging
    (logs.enable_progress_bar if shown else logs.disable_progress_bar)()


def target_device(name: str, device: Device, rank: Rank | None = None) -> torch.device:
    """The device that is set. Raises ModelLoadError where there is none such."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ModelLoadError(
            name, "device is 'cuda', but torch finds no CUDA device; set device to 'cpu'"
        )
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and rank is not None:
        return torch.device(device, rank.local_index)
    return torch.device(device)


def dtype_of(
    dtype: DType, device: torch.device, config: PreTrainedConfig, *, has_codes: bool = False
) -> torch.dtype:
    """The type that a model computes in; see `load_model` for auto.

    has_codes: its matrices stay coded where a CPU computes in float32, and nowhere else.
    """
    if dtype != "auto":
        return {
            "float32": torch.float32,
            "bfloat16": torch.bfloat16,
            "float16": torch.float16,
        }[dtype]
    own = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    is_faster = own == torch.bfloat16 and not has_codes and _multiplies_bfloat16()
    if device.type != "cpu" or is_faster:
        return own
    return torch.float32


def _multiplies_bfloat16() -> bool:
    """True if this CPU has tile units for bfloat16, which make it faster than float32."""
    # no public name in torch; if this one disappears, float32 is used, which is only slower
    supported = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return bool(supported())


def read_config(
    name: str, source: Source, trust_remote_code: bool, overrides: Mapping[str, Any]
) -> PreTrainedConfig:
    """A model's configuration, with what `overrides` replaces. Raises ModelLoadError."""
    files = {"local_files_only": source.local_only, "revision": source.revision}
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            source.path, trust_remote_code=trust_remote_code, **files
        )
        if overrides:
            given, _ = PreTrainedConfig.get_config_dict(source.path, **files)
            config = type(config).from_dict(overridden(given, overrides))
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ModelLoadError(
                name,
                "it comes with its own code, which is not run; set trust_remote_code if you have "
                "read that code and trust it",
            ) from error
        raise ModelLoadError(
            name,
            "its configuration could not be read; give a model's folder or a hub id, of an "
            f"architecture that transformers supports ({brief(error)}){incomplete(source)}",
        ) from error
    return config


def _config(
    name: str, source: Source, trust_remote_code: bool, overrides: Mapping[str, Any]
) -> PreTrainedConfig:
    config = writing_part(read_config(name, source, trust_remote_code, overrides))
    if not has_class(config):
        config = with_towers(config)
    # With a padding id GPT-2 searches every batch for padding, which synchronises the device. A few
    # configurations take none but an integer.
    with suppress(StrictDataclassFieldValidationError):
        config.pad_token_id = None
    try:
        text = config.get_text_config()
    except ValueError as error:
        raise refusal(name, config, f"has no language model of its own ({brief(error)})") from error
    for each in (config, text):
        each.return_dict = True
    return config


def _max_model_len(name: str, text: PreTrainedConfig, asked: int | None) -> int:
    own = getattr(text, "max_position_embeddings", None)
    if not isinstance(own, int):
        if asked is None:
            raise ModelLoadError(name, "its configuration has no maximum length; set max_model_len")
        return asked
    most = max(own, carried_len(text, own))
    if asked is not None and asked > most:
        scaled = "" if most == own else f" ({own} times its rope scaling)"
        raise ModelLoadError(
            name, f"max_model_len is {asked}, allowed: at most the model's {most}{scaled}"
        )
    return own if asked is None else asked


# what helps where a trial forward fails with one of these
_ADAPTATIONS: dict[type[Exception], Callable[[PreTrainedModel], None]] = {
    AllLogitsError: keep_asked,
    NotPassedError: follow_keys,
    SharedLayersError: number_calls,
}


class _Trial(NamedTuple):
    """The findings of a forward on the meta device."""

    layers: dict[int, LayerGeometry]  # that attend
    shell: PreTrainedModel  # the model, without its towers
    towers: tuple[str, ...]  # their names
    has_states: bool
    adaptations: list[Callable[[PreTrainedModel], None]]  # that its own forward needs
    attention: str | dict[str, str]  # the functions that its parts are built with


def _trial(
    name: str, config: PreTrainedConfig, text: PreTrainedConfig, trust_remote_code: bool
) -> _Trial:
    """Try a model without its weights. Raises ModelLoadError."""
    if not has_class(config):
        raise refusal(
            name, config, f"({config.model_type}) has no class in transformers that writes text"
        )
    # Frequencies do not matter here, and some types read positions, which have no values on meta.
    plain = copy.deepcopy(config)
    for rope in ropes(getattr(plain.get_text_config(), "rope_parameters", None)):
        if rope["rope_type"] in BY_LENGTH:
            rope["rope_type"] = "default"
    attention = attention_of(config)

    def build() -> PreTrainedModel:
        # bfloat16: on meta, experts take no other type
        with torch.device("meta"), no_init_weights():
            shell = auto_class(config).from_config(
                plain,
                dtype=torch.bfloat16,
                attn_implementation=attention,
                trust_remote_code=trust_remote_code,
            )
        shell.eval()
        assert isinstance(shell, PreTrainedModel)
        return shell

    try:
        try:
            shell = build()
        except KeyError as error:
            if error.args != (ATTENTION_NAME,):
                raise
            attention = "eager"  # such a model looks up attention in a table of its own
            shell = build()
    except Exception as error:
        if isinstance(error, ImportError):
            missing = "a part of it needs a package that is not installed"
            raise refusal(name, config, f"cannot be built: {missing} ({brief(error)})") from error
        raise ModelLoadError(
            name, f"transformers cannot build it as a causal language model ({brief(error)})"
        ) from error
    mixers: tuple[Mixer, ...] = ()
    adaptations: list[Callable[[PreTrainedModel], None]] = []
    try:
        mixers = install_mixers(shell)
        if not shell._supports_attention_backend and not mixers:
            follow_keys(shell)
            adaptations.append(follow_keys)
        cache_latents(shell)
        skip_indexers(shell, indexed_layers(text))
        layers = None
        with TowerFinder(shell) as finder, without_values(shell):
            while layers is None:
                try:
                    layers = _layers(shell, text, adaptations, has_states=bool(mixers))
                except (AllLogitsError, NotPassedError, SharedLayersError) as error:
                    adapt = _ADAPTATIONS[type(error)]
                    if adapt in adaptations:
                        raise
                    adapt(shell)
                    adaptations.append(adapt)
        if follow_keys in adaptations and getattr(text, "is_decoder", True) is False:
            raise TypeError("its attention is not causal")
        towers = () if text is config else finder.towers()
        if not (layers or mixers):
            raise ValueError("none of its layers attends")
    except ModelLoadError:
        raise
    except Exception as error:
        if needs_values(error):
            problem = "needs the values of its tensors, which its trial does not have"
        elif concerns_states(error):
            version = transformers.__version__
            problem = f"does not carry its states in a supported way, with transformers {version}"
        elif follow_keys in adaptations:
            problem = "does not allow its attention to be replaced, which serving needs"
        elif not mixers and (kinds := unknown_kinds(text)):
            problem = f"has layers of type {kinds}, which are not known"
        else:
            problem = "does not attend in a supported way"
        raise refusal(name, config, f"{problem} ({brief(error)})") from error
    attending: Iterable[int] = layers
    if number_calls in adaptations:  # those are no layers' numbers
        mixing = {each.layer for each in mixers}
        attending = set(range(text.num_hidden_layers)) - mixing
    if kinds := unknown_kinds(text, attending):
        raise refusal(name, config, f"has layers of type {kinds}, whose attention is not known")
    remove_towers(shell, towers)
    return _Trial(layers, shell, towers, bool(mixers), adaptations, attention)


def _layers(
    shell: PreTrainedModel,
    text: PreTrainedConfig,
    adaptations: Collection[Callable[[PreTrainedModel], None]],
    *,
    has_states: bool,
) -> dict[int, LayerGeometry]:
    """The geometry of the layers that attend: of all, if none has states."""
    if has_states or number_calls in adaptations:
        return read_attending_layers(shell, text.vocab_size)
    return dict(enumerate(read_geometry(shell, text.num_hidden_layers, text.vocab_size)))


def _tell_towers(
    name: str, config: PreTrainedConfig, towers: tuple[str, ...], rank: Rank | None, why: str
) -> None:
    """Log that a multimodal model is served as text. Raises ModelLoadError for a rank's slice."""
    if rank is not None:
        raise ModelLoadError(
            name,
            f"{class_name(config)} is served as text, and such models are not cut for several "
            "devices; set tensor_parallel_size to 1",
        )
    because = f": {why}" if why else ""
    logger.info("%s is served as text, without %s%s", name, ", ".join(towers), because)


def _eos_token_ids(
    name: str, module: PreTrainedModel, config: PreTrainedConfig, text: PreTrainedConfig
) -> tuple[int, ...]:
    """The end-of-text ids of the generation settings and of the configuration.

    The tokenizer's are the worker's to add. Ids outside the vocabulary are left out: they are never
    sampled and cannot be masked.
    """
    named: dict[int, None] = {}
    for each in (module.generation_config, config, text):
        ids = getattr(each, "eos_token_id", None)
        some = ids if isinstance(ids, list | tuple) else (ids,)
        named |= dict.fromkeys(token_id for token_id in some if token_id is not None)
    given = tuple(named)
    kept = tuple(token_id for token_id in given if 0 <= token_id < text.vocab_size)
    if kept != given:
        logger.warning(
            "%s has the end-of-sequence ids %s, of which its vocabulary of %d tokens has %s; "
            "the others are ignored",
            name,
            list(given),
            text.vocab_size,
            list(kept) or "none",
        )
    return kept


def _default_sampling(
    name: str, module: PreTrainedModel, where: str, overrides: Mapping[str, float]
) -> SamplingDefaults:
    """Sampling defaults from the generation settings; fields that are not set there are None."""
    settings: Any = module.generation_config
    if where == "vllm":
        settings = None
    elif where != "auto":
        try:
            settings = GenerationConfig.from_pretrained(where, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ModelLoadError(
                name, f"generation_config: {where} has no settings ({brief(error)})"
            ) from error
    given: dict[str, Any] = {
        field: getattr(settings, field, None) for field in SamplingDefaults.__struct_fields__
    }
    return SamplingDefaults(**{**given, **overrides})
