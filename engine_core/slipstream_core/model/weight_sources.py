"""The places that weights come from: a checkpoint, quantised or not, a GGUF file, or chance.

Each of them gives a model whose parameters are tensors of the type that it computes in, or coded
matrices where the model can compute with these: on a CPU that computes in float32, in models
without recurrent states.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub import snapshot_download
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils.import_utils import is_accelerate_available

from slipstream_core.attention.interface import ATTENTION_NAME
from slipstream_core.kernels.codes.online import ONLINE
from slipstream_core.load_error import ModelLoadError, NoRoomError, brief
from slipstream_core.model.checkpoint_files import read_headers
from slipstream_core.model.coded_model import (
    dtype_of_matrices,
    has_more_than_matrices,
    has_turned,
    keep_codes,
    left_in,
    merged_bytes,
    names_of_matrices,
    quantised_bytes,
)
from slipstream_core.model.gguf.folder import hold
from slipstream_core.model.gguf.weights import coded_bytes, load_weights
from slipstream_core.model.host_memory import unmapped_bytes
from slipstream_core.model.hub import Source, incomplete, local_folder
from slipstream_core.model.leftover_tensors import refuse_leftovers
from slipstream_core.model.local_modules import UnknownStyleError, as_local_modules
from slipstream_core.model.quantised.checkpoint import (
    QuantisedTensors,
    names_of_parameters,
    names_without_place,
    parts_of_experts,
)
from slipstream_core.model.quantised.tensors import QuantisedWeightError
from slipstream_core.model.quantization import MXFP4, Quantization, refuse_narrow, widen
from slipstream_core.model.random_weights import is_random, random_module
from slipstream_core.model.tensor_prefixes import renames
from slipstream_core.model.text_tower import auto_class, is_within, remove_towers
from slipstream_core.model.unsupported import class_name
from slipstream_core.sharding.corrections import FUSED_HEADS, LEAD_ALONE
from slipstream_core.sharding.rank import Rank
from slipstream_core.sharding.sharding_plan import ShardingPlan, part_of
from slipstream_ipc.damaged_file import DamagedFileError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The model that weights are for, and where and in which type it computes.

    shell: the model without values. gguf_file: its file, if it is unfolded from one. towers: names
    of parts that it does not need to answer a text. keeps_towers: they stay, to see images.
    attention: the functions that its parts are built with. is_coded: it may compute with coded
    matrices.
    """

    name: str
    source: Source
    config: PreTrainedConfig
    shell: PreTrainedModel
    dtype: torch.dtype
    device: torch.device
    quantization: Quantization | None
    gguf_file: Path | None
    is_coded: bool
    trust_remote_code: bool = False
    towers: tuple[str, ...] = ()
    keeps_towers: bool = False
    attention: str | dict[str, str] = ATTENTION_NAME
    plan: ShardingPlan | None = None
    rank: Rank | None = None

    def is_sliceable(self, name: str) -> bool:
        """True if a rank's slice of a parameter is one of rows or columns, as it is loaded."""
        if self.plan is None:
            return True
        module = name.removesuffix(".weight")
        style = self.plan.styles.get(part_of(module))
        return style not in (FUSED_HEADS, LEAD_ALONE) and not self.plan.keeps_one_head(module)

    @property
    def num_parameters(self) -> int:
        """The number of the whole model's parameters."""
        return sum(parameter.numel() for parameter in self.shell.parameters())


class WeightSource(Protocol):
    """A place that weights come from."""

    def form(self) -> str:
        """The types of matrices where it is not the one that is computed in, for a log."""

    def num_bytes(self) -> tuple[int, int]:
        """Bytes of memory that weights take on a CPU beside mapped files, and while they load."""

    def load(self) -> PreTrainedModel:
        """The model, on a CPU or on its device. Raises ModelLoadError."""


def source_of(wanted: Wanted, online: str | None) -> WeightSource:
    """The source of a model's weights. online: the format that its matrices get as they load.

    Raises ModelLoadError.
    """
    if is_random(wanted.name):
        return _Random(wanted, online)
    if wanted.gguf_file is not None:
        return _GGUF(wanted, wanted.gguf_file)
    quantization = wanted.quantization
    if quantization is not None and (quantization.method != MXFP4 or may_be_coded(wanted)):
        return _Quantised(wanted, quantization)
    return _Checkpoint(wanted, online)


def may_be_coded(wanted: Wanted) -> bool:
    """True if the matrices of a quantised checkpoint may stay coded; of ranks not those of experts,
    which are no slices.
    """
    if not wanted.is_coded or has_more_than_matrices(wanted.shell):
        return False
    return wanted.rank is None or all(each.dim() < 3 for each in wanted.shell.parameters())


class _Random:
    """Random weights, in place of a checkpoint's."""

    def __init__(self, wanted: Wanted, online: str | None) -> None:
        self._wanted, self._online = wanted, online

    def form(self) -> str:
        return _said_online(self._online)

    def num_bytes(self) -> tuple[int, int]:
        everything = self._wanted.num_parameters * self._wanted.dtype.itemsize
        return _once_coded(self._wanted, everything, None, self._online), everything

    def load(self) -> PreTrainedModel:
        wanted = self._wanted
        module = random_module(
            wanted.config, wanted.dtype, wanted.device, attn_implementation=wanted.attention
        )
        if self._online is not None:
            _keep_codes(wanted, module, self._online)
        return module


class _GGUF:
    """A GGUF file, whose types are its own."""

    def __init__(self, wanted: Wanted, file: Path) -> None:
        self._wanted, self._file = wanted, file
        self._coded: list[str] = []
        if wanted.is_coded and not has_more_than_matrices(wanted.shell):
            self._coded = names_of_matrices(wanted.shell)

    def form(self) -> str:
        return ""

    def num_bytes(self) -> tuple[int, int]:
        wanted = self._wanted
        total = wanted.num_parameters * wanted.dtype.itemsize
        if self._coded:
            total += coded_bytes(wanted.name, self._file)
            total -= wanted.dtype.itemsize * _num_in(wanted.shell, self._coded)
        return total, total

    def load(self) -> PreTrainedModel:
        wanted = self._wanted
        try:
            with no_init_weights():
                module = auto_class(wanted.config).from_config(
                    wanted.config,
                    dtype=wanted.dtype,
                    attn_implementation=wanted.attention,
                )
            assert isinstance(module, PreTrainedModel)
            module.generation_config = GenerationConfig.from_pretrained(wanted.source.path)
            hold(Path(wanted.source.path))
        except (OSError, ValueError) as error:
            raise ModelLoadError(
                wanted.name, f"transformers cannot build it ({brief(error)})"
            ) from error
        text = wanted.config.get_text_config()
        load_weights(
            wanted.name, self._file, module, text, wanted.dtype, wanted.device, self._coded
        )
        return module


class _Checkpoint:
    """A checkpoint as transformers reads it, whose matrices of 16 bits may stay so."""

    def __init__(self, wanted: Wanted, online: str | None) -> None:
        self._wanted, self._online = wanted, online
        self._sixteen: torch.dtype | None = None
        if wanted.is_coded and wanted.quantization is None and wanted.rank is None:
            self._sixteen = sixteen_bits(wanted.source, wanted.shell)

    def form(self) -> str:
        if self._online is not None or self._sixteen is None:
            return _said_online(self._online)
        return f", its matrices in {str(self._sixteen).removeprefix('torch.')} as they are"

    def num_bytes(self) -> tuple[int, int]:
        wanted = self._wanted
        everything = wanted.num_parameters * wanted.dtype.itemsize
        unmapped = everything
        # a rank's slice may be a copy, and each rank finds its memory free
        if wanted.quantization is None and wanted.rank is None:
            unmapped = _unmapped_bytes(wanted)
        if self._sixteen is None and self._online is None:
            return unmapped, unmapped
        kept = _once_coded(wanted, everything, self._sixteen, self._online)
        if self._sixteen is None:  # what is widened is there before it is coded
            return kept, max(kept, unmapped)
        folder = local_folder(wanted.source)
        named = (folder and read_headers(folder)) or ()
        merged = merged_bytes(wanted.shell, named, self._sixteen)
        return (kept + merged if self._online is None else kept), kept + merged

    def load(self) -> PreTrainedModel:
        wanted = self._wanted
        names = names_of_matrices(wanted.shell)
        with nullcontext() if self._sixteen is None else left_in(self._sixteen, names):
            module = _loaded(wanted)
        if not wanted.keeps_towers:
            remove_towers(module, wanted.towers)
        if wanted.quantization is not None:
            widen(module, wanted.dtype)
        if self._sixteen is not None or self._online is not None:
            _keep_codes(wanted, module, self._online)
        return module


class _Quantised:
    """A quantised checkpoint, which is read parameter by parameter."""

    def __init__(self, wanted: Wanted, quantization: Quantization) -> None:
        self._wanted = wanted
        folder = downloaded(wanted.name, wanted.source)
        try:
            self._tensors = QuantisedTensors(folder, quantization.method, quantization.settings)
        except (QuantisedWeightError, DamagedFileError, OSError) as error:
            raise ModelLoadError(
                wanted.name, f"its weights cannot be read: {error}{incomplete(wanted.source)}"
            ) from error
        self._key_mapping = _renames(wanted, self._tensors.names)
        biases = [name for name in self._tensors.names if name.endswith(".bias")]
        self._tensors.leave_out_zero_biases(
            names_without_place(biases, wanted.shell, self._key_mapping)
        )
        if may_be_coded(wanted):
            self._keep_codes()

    def _keep_codes(self) -> None:
        shell, tensors = self._wanted.shell, self._tensors
        named = names_of_parameters(tensors.names, shell, self._key_mapping)
        matrices = set(filter(self._wanted.is_sliceable, names_of_matrices(shell)))
        tensors.keep_codes(
            lambda name: named.get(name) in matrices,
            lambda name: has_turned(shell, named[name]),
        )
        parts = parts_of_experts(tensors.names, shell, self._key_mapping)
        own = {name: each for name, each in parts.items() if name in matrices}
        experts = {name: len(shell.get_parameter(name)) for name in own}
        tensors.keep_experts(own, experts)

    def form(self) -> str:
        names = self._tensors.formats()
        return f", its matrices in {', '.join(names)} as they are" if names else ", dequantised"

    def num_bytes(self) -> tuple[int, int]:
        names, shell = self._tensors.names, self._wanted.shell
        left_out = names_without_place(names, shell, self._key_mapping)
        total = self._tensors.num_bytes(self._wanted.dtype, left_out)
        return total, total

    def load(self) -> PreTrainedModel:
        wanted = self._wanted
        # which is left for transformers where it dequantises, as of MXFP4
        wanted.config.__dict__.pop("quantization_config", None)
        state, placeholders = self._tensors.state_dict(for_slices=wanted.rank is not None)
        try:
            module = _loaded(wanted, state, self._key_mapping)
            remove_towers(module, wanted.towers)
            placeholders.replace(module)
        finally:
            self._tensors.tensors.close()
        return module


def _said_online(online: str | None) -> str:
    return "" if online is None else f", its matrices quantised to {online}"


def _num_in(shell: PreTrainedModel, names: list[str]) -> int:
    return sum(shell.get_parameter(each).numel() for each in names)


def _once_coded(
    wanted: Wanted, everything: int, sixteen: torch.dtype | None, online: str | None
) -> int:
    """Bytes of the weights when matrices are coded; those of 16 bits stay a file's mapping."""
    if sixteen is None and online is None:
        return everything
    in_matrices = _num_in(wanted.shell, names_of_matrices(wanted.shell))
    own = 0 if online is None else quantised_bytes(wanted.shell, ONLINE[online])
    return everything + own - wanted.dtype.itemsize * in_matrices


def _keep_codes(wanted: Wanted, module: PreTrainedModel, online: str | None) -> None:
    try:
        keep_codes(module, names_of_matrices(wanted.shell), online)
    except ValueError as error:
        raise ModelLoadError(wanted.name, f"cannot be quantised: {error}") from error


def _unmapped_bytes(wanted: Wanted) -> int:
    """Bytes of a checkpoint's weights that will be this process's memory and not a file mapping."""
    converted = unmapped_bytes(Path(wanted.source.path), wanted.dtype)
    if converted is None and wanted.config.dtype == wanted.dtype:
        return 0
    # a checkpoint may hold tied weights twice
    everything = wanted.num_parameters * wanted.dtype.itemsize
    return everything if converted is None else min(converted, everything)


def sixteen_bits(source: Source, shell: PreTrainedModel) -> torch.dtype | None:
    """The type in which the checkpoint's matrices may stay; None if it is not here yet."""
    folder = local_folder(source)
    try:
        headers = None if folder is None else read_headers(folder)
    except (DamagedFileError, OSError):
        return None  # which `_check_files` says
    return None if headers is None else dtype_of_matrices(headers, shell)


def downloaded(name: str, source: Source) -> Path:
    """The folder of a checkpoint, downloaded if need be. Raises ModelLoadError."""
    if source.local_only:
        folder = local_folder(source)
        assert folder is not None
        return folder
    patterns = ["*.safetensors", "*.safetensors.index.json", "*.json"]
    try:
        return Path(
            snapshot_download(source.path, revision=source.revision, allow_patterns=patterns)
        )
    except Exception as error:  # whatever the network has
        raise ModelLoadError(name, f"its weights could not be loaded ({brief(error)})") from error


def _loaded(
    wanted: Wanted,
    state: Mapping[str, Any] | None = None,
    key_mapping: Mapping[str, str] | None = None,
) -> PreTrainedModel:
    """The model as transformers loads it, from its files or from `state`."""
    name, source, config = wanted.name, wanted.source, wanted.config
    if source.local_only and state is None:
        _check_files(wanted)
    # transformers loads directly to a card only with accelerate
    placed: dict[str, Any] = {}
    if wanted.plan is not None and wanted.rank is not None:
        # a card of their own for each of the ranks, by their numbers
        placed["distributed_config"] = _distributed_config(wanted.plan, wanted.rank)
    elif wanted.device.type == "cuda" and is_accelerate_available():
        placed["device_map"] = {"": wanted.device}
    if key_mapping is None:
        folder = local_folder(source)
        headers = None if folder is None else read_headers(folder)
        key_mapping = _renames(wanted, list(headers or ()))
    if key_mapping:
        placed["key_mapping"] = dict(key_mapping)
    if state is None:
        placed |= {
            "local_files_only": source.local_only,
            "revision": source.revision,
            "trust_remote_code": wanted.trust_remote_code,
        }
    # without a name it is the class of the model itself that loads
    loads: Any = auto_class(config) if state is None else type(wanted.shell)
    try:
        module, report = loads.from_pretrained(
            source.path if state is None else None,
            config=config,
            dtype=wanted.dtype,
            attn_implementation=wanted.attention,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # but for towers they are refused below
            **placed,
            **({} if state is None else {"state_dict": state}),
        )
        if state is not None:
            module.generation_config = _generation_config(source)
    except torch.OutOfMemoryError as error:
        raise no_room(name, error) from error
    except Exception as error:
        if state is None:
            _check_files(wanted)
        raise ModelLoadError(
            name, f"its weights could not be loaded ({brief(error)}){incomplete(source)}"
        ) from error
    if not source.local_only and state is None:  # they have only now been fetched
        _check_files(wanted)
    # Missing weights would be left with random values.
    lacking = (*report["missing_keys"], *(each for each, *_ in report["mismatched_keys"]))
    if absent := sorted(each for each in lacking if not is_within(each, wanted.towers)):
        raise ModelLoadError(
            name,
            f"its checkpoint lacks {len(absent)} of the weights, or has them in another shape, "
            f"{absent[0]} among them",
        )
    if wanted.keeps_towers and any(is_within(each, wanted.towers) for each in lacking):
        remove_towers(module, wanted.towers)  # as if they were not to be kept
    is_quantised = wanted.quantization is not None
    refuse_leftovers(name, report["unexpected_keys"], config, is_quantised=is_quantised)
    assert isinstance(module, PreTrainedModel)
    if wanted.plan is not None and wanted.rank is not None:
        try:
            as_local_modules(module, wanted.plan, wanted.rank)
        except UnknownStyleError as error:
            raise ModelLoadError(
                name,
                f"{class_name(config)} is cut in a way that is not known here ({error}); "
                "set tensor_parallel_size to 1",
            ) from error
    return module


def _generation_config(source: Source) -> GenerationConfig:
    """The generation settings of a checkpoint; of its configuration where it has none."""
    of: dict[str, Any] = {"local_files_only": source.local_only, "revision": source.revision}
    try:
        return GenerationConfig.from_pretrained(source.path, **of)
    except OSError:
        return GenerationConfig.from_pretrained(
            source.path, config_file_name="config.json", _from_model_config=True, **of
        )


def _check_files(wanted: Wanted) -> None:
    """Raise ModelLoadError for a damaged file, and for weights that would be misread."""
    folder = local_folder(wanted.source)
    if folder is None:
        return
    try:
        headers = read_headers(folder)
    except (DamagedFileError, OSError) as error:
        raise ModelLoadError(wanted.name, f"{error}{incomplete(wanted.source)}") from error
    if headers is not None and wanted.quantization is None:
        refuse_narrow(wanted.name, headers)


def _renames(wanted: Wanted, names: list[str]) -> dict[str, str]:
    found = renames(names, wanted.shell)
    if found:
        logger.info("%s: the names of its tensors are of another class of this model", wanted.name)
    return found


def _distributed_config(plan: ShardingPlan, rank: Rank) -> Any:
    # imports much, for this alone
    from transformers.distributed.configuration_utils import DistributedConfig

    return DistributedConfig(tp_size=rank.size, tp_plan=plan.for_transformers())


def no_room(name: str, error: torch.OutOfMemoryError) -> NoRoomError:
    """The error of weights that a card has no memory for."""
    return NoRoomError(name, f"its weights do not fit into the card's memory ({brief(error)})")
