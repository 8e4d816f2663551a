"""Reads an adapter's folder, as peft saves it, and checks that this model can have it.

- Tensors are read from safetensors alone. Each file is read once: what is checked is what is hashed
  and used.
- No call holds the GIL for long: a core reads adapters beside its loop.
- A field of adapter_config.json that changes what an adapter computes, and is not known here, is
  refused by name; so is each tensor that is not a factor of a linear layer.
- The scale of a layer is peft's: alpha / rank, or alpha / sqrt(rank) with `use_rslora`, where rank
  is that of the layer's tensors.
- peft saves a head's own weight beside its factors. It is the base's, which the base has: it is let
  be, where its shape is right.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from slipstream_core.adapters.adapter_error import AdapterError
from slipstream_core.adapters.roots import Roots
from slipstream_core.adapters.sites import Site

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
MAX_RANK = 512

_PICKLES = "adapter_model.bin"
_ADDED = "added_tokens.json"
_OF_TOKENIZER = (
    _ADDED,
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "chat_template.jinja",
)
_DIGEST_BYTES = 16
_MAX_CONFIG_BYTES = 1 << 20
_HEADER_BYTES = 16 << 20  # of a file of tensors, more than any has
_BYTES_OF_NUMBER = 4
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FACTOR = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)\.weight")
_BASE = re.compile(r"base_model\.model\.(.+)\.base_layer\.weight")
_DEFAULT = 8  # peft's rank and alpha
# a name's parts, with what peft's own patterns have: one repetition at most, so that none is slow
_PATTERN = re.compile(r"\^?(?:[\w.|()]|\\\.|\\d)*(?:(?:\.|\\d)[*+](?:[\w.|()]|\\\.|\\d)*)?\$?")
_MOST_PATTERNS, _LONGEST_PATTERN = 1024, 256

# fields without effect on what a saved adapter computes
_FIELDS = """
    alpha_pattern auto_mapping base_model_name_or_path bias corda_config
    ensure_weight_tying eva_config exclude_modules fan_in_fan_out inference_mode
    init_lora_weights layers_pattern layers_to_transform loftq_config lora_alpha
    lora_dropout lora_ga_config megatron_config megatron_core peft_type peft_version
    qalora_group_size r rank_pattern revision runtime_config target_modules task_type
    use_rslora
"""
_WITHOUT_EFFECT = frozenset(_FIELDS.split())
_INITIALISED = (True, False, "gaussian", "eva", "orthogonal")
_INSTEAD = {
    "alora_invocation_tokens": "none: an adapter here is active from a prompt's first token on",
    "init_lora_weights": "true, false, gaussian, eva or orthogonal: others are saved for weights "
    "that differ from the base's (peft converts them: path_initial_model_for_weight_conversion)",
    "layer_replication": "none: the base keeps its layers",
    "lora_bias": "false",
    "modules_to_save": "none: whole layers are not replaced (train factors of them instead)",
    "target_parameters": "none: parameters of experts are not changed yet",
    "trainable_token_indices": "none: embeddings are not changed",
    "use_dora": "false: peft merges such an adapter into a model of its own (merge_and_unload)",
}


class Factors(NamedTuple):
    """The change of one layer: y += b^T (a x). Contiguous, float32, bfloat16 or float16 each."""

    a: torch.Tensor  # [rank, num_inputs]
    b: torch.Tensor  # [rank, num_outputs], with the scale


class Adapter(NamedTuple):
    """An adapter that has been read."""

    digest: bytes  # of its two files, 16 bytes
    factors: Mapping[str, Factors]  # by the layer's name
    warning: str = ""  # of what lies in its folder and is not used

    @property
    def num_bytes(self) -> int:
        """Memory of its factors."""
        return sum(each.nbytes for factors in self.factors.values() for each in factors)


def read_adapter(
    folder: Path,
    sites: Mapping[str, Site],
    max_rank: int,
    why_no_site: Callable[[str], str],
    *,
    vocab_size: int | None = None,
    roots: Roots | None = None,
) -> Adapter:
    """The adapter in `folder`. why_no_site: of a layer that is not in `sites`. vocab_size: of the
    model, where tokens that the folder adds are looked for. roots: where its files have to lie;
    None: anywhere.

    Raises AdapterError.
    """
    config_bytes = _read(folder, CONFIG, _MAX_CONFIG_BYTES, roots=roots)
    config = _checked_config(config_bytes)
    largest = sum(each.num_inputs + each.num_outputs for each in sites.values()) * max_rank
    largest += max((each.num_inputs * each.num_outputs for each in sites.values()), default=0)
    tensor_bytes = _read(
        folder, TENSORS, _HEADER_BYTES + largest * _BYTES_OF_NUMBER, f"rank {max_rank}", roots
    )
    try:
        tensors = _tensors(tensor_bytes)
    except (SafetensorError, OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        said = str(error).partition("\n")[0][:200]
        raise AdapterError(f"{TENSORS}: cannot be read: {said}") from None
    digest = _digest_of(config_bytes, tensor_bytes)
    weights = {found[1]: key for key in tensors if (found := _BASE.fullmatch(key))}
    of_base = {layer: tensors.pop(key) for layer, key in weights.items()}
    pairs = _pairs(tensors)
    factors = {}
    for name, (a, b) in pairs.items():
        site = sites.get(name)
        if site is None:
            raise AdapterError(f"{name}: {why_no_site(name)}")
        factors[name] = _factors(name, a, b, site, config, max_rank)
    for layer, weight in of_base.items():
        _check_weight(layer, weight, sites.get(layer) if layer in factors else None)
    warning = "" if vocab_size is None else _unused(folder, vocab_size, roots)
    return Adapter(digest, factors, warning)


def read_digest(folder: Path, most_bytes: int, roots: Roots | None = None) -> tuple[bytes, int]:
    """The digest of the files in `folder`, as an `Adapter` has it, and the size of that of tensors,
    which is at most `most_bytes`. Fields that are refused of any adapter are refused here too.

    Raises AdapterError.
    """
    config = _read(folder, CONFIG, _MAX_CONFIG_BYTES, roots=roots)
    _checked_config(config)
    tensors = _read(folder, TENSORS, most_bytes, roots=roots)
    return _digest_of(config, tensors), len(tensors)


def _digest_of(*files: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for each in files:
        digest.update(len(each).to_bytes(8, "little"))
        digest.update(each)  # apart, as a sum of both would be a copy that holds the GIL
    return digest.digest()


def _tensors(data: bytes) -> dict[str, torch.Tensor]:
    """The tensors of a file that has been read. Raises what safetensors raises.

    Each is mapped, of a copy in memory: the library's `load` makes copies of all of them in one
    call that holds the GIL, for 90 ms where they are 100 MB, and the engine's loop would wait.
    """
    with open(os.memfd_create(TENSORS, os.MFD_CLOEXEC), "wb", buffering=0) as memory:
        left = memoryview(data)
        while left:
            left = left[memory.write(left) :]
        with safe_open(f"/proc/self/fd/{memory.fileno()}", "pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no dict)


def _unused(folder: Path, vocab_size: int, roots: Roots | None) -> str:
    """A warning of a tokenizer's files; empty: there are none. Raises AdapterError for tokens that
    the model does not have.
    """
    found = [name for name in _OF_TOKENIZER if (folder / name).exists()]
    if _ADDED in found:
        data = _read(folder, _ADDED, _MAX_CONFIG_BYTES, roots=roots)
        try:
            added = msgspec.json.decode(data, type=dict[str, int])
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise AdapterError(f"{_ADDED}: not ids of tokens in JSON: {error}") from None
        for token, token_id in added.items():
            if not 0 <= token_id < vocab_size:
                raise AdapterError(
                    f"{_ADDED}: {_shown(token)} has the id {token_id}, allowed: ids of the base, "
                    f"below {vocab_size}"
                )
    return f"the base's tokenizer is used, not {', '.join(found)} of the adapter" if found else ""


def _read(folder: Path, name: str, most: int, why: str = "", roots: Roots | None = None) -> bytes:
    """A regular file of at most `most` bytes. Raises AdapterError."""
    path = folder / name
    try:
        # not of a pipe, which may never say anything
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if roots is not None:
                roots.check_open(descriptor, path)
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise AdapterError(f"{name}: not a file, in {folder}")
            if found.st_size > most:
                of_what = f" ({why} at every layer)" if why else ""
                raise AdapterError(f"{name}: {found.st_size} bytes, allowed: {most}{of_what}")
            return file.read(most + 1)[:most]
    except FileNotFoundError:
        if not folder.is_dir():
            raise AdapterError(f"there is no folder {folder}", "missing") from None
        if name == TENSORS and (folder / _PICKLES).exists():
            raise AdapterError(
                f"{_PICKLES} holds pickles, which are never read; save it again with peft, which "
                f"writes {TENSORS}"
            ) from None
        raise AdapterError(f"{name} is missing in {folder}", "missing") from None
    except AdapterError:
        raise
    except (OSError, ValueError) as error:
        raise AdapterError(f"{name}: cannot be read: {error}") from None


def _checked_config(data: bytes) -> dict[str, Any]:
    """adapter_config.json, whose fields say what a served adapter may have. Raises AdapterError."""
    try:
        config = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise AdapterError(f"{CONFIG}: not an object in JSON: {error}") from None
    if config.get("peft_type") != "LORA":
        raise _refused("peft_type", config.get("peft_type"), "LORA")
    if config.get("bias", "none") != "none":
        raise _refused("bias", config["bias"], "none")
    if not any(_is(config.get("init_lora_weights", True), each) for each in _INITIALISED):
        raise _refused("init_lora_weights", config["init_lora_weights"])
    for name, value in config.items():
        if name not in _WITHOUT_EFFECT and value not in (None, False, "", [], {}):
            raise _refused(name, value, "none: it is not known what it changes")
    if not isinstance(config.get("use_rslora") or False, bool):
        raise _refused("use_rslora", config["use_rslora"], "true or false")
    for name in ("r", "lora_alpha"):
        _number(name, config.get(name, _DEFAULT), at_least=1 if name == "r" else None)
    for name in ("rank_pattern", "alpha_pattern"):
        _check_patterns(name, config.get(name) or {})
    return config


def _check_patterns(field: str, patterns: Any) -> None:
    if not isinstance(patterns, dict):
        raise _refused(field, patterns, "an object: layers' names and numbers")
    if len(patterns) > _MOST_PATTERNS:
        raise _refused(field, f"{len(patterns)} patterns", f"at most {_MOST_PATTERNS}")
    for pattern, value in patterns.items():
        _number(f"{field}: {pattern[:80]}", value, at_least=1 if field == "rank_pattern" else None)
        try:
            if len(pattern) > _LONGEST_PATTERN or not _PATTERN.fullmatch(pattern):
                raise re.error("")
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError):
            allowed = "a layer's name, or its end, with one repetition at most"
            raise _refused(field, pattern, allowed) from None


def _number(field: str, value: Any, at_least: int | None = None) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or (at_least is not None and value < at_least):
        raise _refused(field, value, "a number" if at_least is None else f"at least {at_least}")


def _of_pattern(patterns: Mapping[str, float], name: str, default: float) -> float:
    """The number of a layer: of the first pattern that its end matches, as peft has it."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return default


def _pairs(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The two factors of each layer. Raises AdapterError."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        match = _FACTOR.fullmatch(key)
        if match is None:
            raise AdapterError(
                f"the tensor {_shown(key)} is no factor of a linear layer, allowed: "
                "base_model.model.LAYER.lora_A.weight and lora_B.weight"
            )
        found.setdefault(match[1], {})[match[2]] = tensor
    if not found:
        raise AdapterError(f"{TENSORS}: it has no tensors")
    for name, of_it in found.items():
        if len(of_it) < 2:
            (given,) = of_it
            raise AdapterError(
                f"{_shown(name)}: it has lora_{given} without lora_{'AB'[given == 'A']}"
            )
    return {name: (of_it["A"], of_it["B"]) for name, of_it in found.items()}


def _check_weight(layer: str, weight: torch.Tensor, site: Site | None) -> None:
    """Raises AdapterError for a weight that is not that of a layer which the adapter changes."""
    if site is None:
        raise AdapterError(
            f"{_shown(layer)}: its own weight is saved, allowed: of linear layers that the adapter "
            "changes"
        )
    if tuple(weight.shape) != (site.num_outputs, site.num_inputs):
        raise AdapterError(
            f"{layer}.base_layer: {list(weight.shape)}, allowed: "
            f"{[site.num_outputs, site.num_inputs]}; it was made for another base"
        )


def _factors(
    name: str,
    a: torch.Tensor,
    b: torch.Tensor,
    site: Site,
    config: Mapping[str, Any],
    max_rank: int,
) -> Factors:
    """The change of a layer: of 16 bits where its file has them and the scale keeps them exact, as
    powers of two do; else in float32. Raises AdapterError.
    """
    for kind, tensor in (("lora_A", a), ("lora_B", b)):
        if tensor.dtype not in _DTYPES:
            raise AdapterError(
                f"{name}.{kind}: {str(tensor.dtype).removeprefix('torch.')}, allowed: float32, "
                "bfloat16, float16"
            )
    rank = len(a) if a.dim() == 2 else 0
    shapes = (rank, site.num_inputs), (site.num_outputs, rank)
    if not rank or (tuple(a.shape), tuple(b.shape)) != shapes:
        raise AdapterError(
            f"{name}: lora_A {list(a.shape)} and lora_B {list(b.shape)}, allowed: "
            f"[rank, {site.num_inputs}] and [{site.num_outputs}, rank]; it was made for another "
            "base"
        )
    if rank > max_rank:
        raise AdapterError(f"rank {rank} at {name}, allowed: {max_rank} (--max-lora-rank)")
    said = _of_pattern(config.get("rank_pattern") or {}, name, config.get("r", _DEFAULT))
    if said != rank:
        raise AdapterError(f"{name}: rank {rank}, allowed: {said}, as {CONFIG} says")
    alpha = _of_pattern(config.get("alpha_pattern") or {}, name, config.get("lora_alpha", _DEFAULT))
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    scaled = b.float() * scale
    if torch.equal((halves := scaled.to(b.dtype)).float(), scaled):
        scaled = halves
    # copies: the tensors are views of the whole file
    factors = Factors(a.clone(memory_format=torch.contiguous_format), scaled.t().contiguous())
    for kind, tensor in zip(("lora_A", "lora_B"), factors, strict=True):
        if not tensor.isfinite().all():
            raise AdapterError(f"{name}.{kind}: it has numbers that are not finite")
    return factors


def _is(value: Any, allowed: object) -> bool:
    """Equal, without taking 1 for true."""
    return type(value) is type(allowed) and value == allowed


def _refused(field: str, given: Any, allowed: str = "") -> AdapterError:
    allowed = _INSTEAD.get(field, allowed)
    return AdapterError(f"{CONFIG}: {field}: {_shown(given)}, allowed: {allowed}")


def _shown(given: Any) -> str:
    text = repr(given)
    return text if len(text) <= 80 else f"{text[:77]}..."
