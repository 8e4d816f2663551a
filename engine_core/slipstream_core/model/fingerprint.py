"""A hash that identifies a loaded model: replicas with equal hashes compute the same streams.

It covers the small files of the model's folder, the headers of its weights and some bytes of large
files, which takes a few milliseconds. A simulated model's speed is not part of it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from importlib.metadata import version
from os import SEEK_END
from pathlib import Path
from typing import BinaryIO

import msgspec

from slipstream_core.attention.cache_formats import CACHE_FORMATS
from slipstream_core.config import CoreConfig
from slipstream_core.model.tokenizer_file import find_folder
from slipstream_core.step.plan import ModelInfo
from slipstream_ipc.validation.simulated_model import SIMULATED, parse_simulated

_SIZE = 16
_WHOLE_BYTES = 2**20  # of a text file; of a larger one, which is a vocabulary, this and samples
_TEXTS = ("*.json", "*.jinja", "*.model", "*.txt")
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
_NUM_SAMPLES = 16  # of a large file
_SAMPLE_BYTES = 1024
_MAX_HEADER_BYTES = 2**20
_OF_PIXELS = ("pillow", "transformers")

_logger = logging.getLogger(__name__)


def fingerprint_of(config: CoreConfig, info: ModelInfo) -> bytes:
    """The hash of weights, dtype, tokenizer, template and context length, 16 bytes.

    Empty where the model's files cannot be read: no other replica is its equal then.
    """
    digest = hashlib.blake2b(digest_size=_SIZE)
    settings = (config.dtype, info.vocab_size, info.max_model_len, info.eos_token_ids)
    digest.update(msgspec.msgpack.encode((settings, info.default_sampling)))
    if info.engine:
        digest.update(info.engine.encode())
        digest.update(msgspec.json.encode(config.engine_args, order="deterministic"))
    if config.hf_overrides:
        digest.update(msgspec.json.encode(config.hf_overrides, order="deterministic"))
    if config.tokenizer is not None:
        digest.update(fingerprint_of_files(config.tokenizer))
    if config.quantization is not None:
        digest.update(config.quantization.encode())
    if config.kv_cache_dtype != "auto":
        digest.update(CACHE_FORMATS[config.kv_cache_dtype].encode())
    if info.encoder is not None:  # pixels depend on who makes them
        digest.update(repr([version(name) for name in _OF_PIXELS]).encode())
    return _with_files(digest, config.model)


def fingerprint_of_files(model: str) -> bytes:
    """The hash of a model's files alone, which needs no loaded model; 16 bytes.

    Empty where they cannot be read, or are not there yet.
    """
    return _with_files(hashlib.blake2b(digest_size=_SIZE), model)


def _with_files(digest: hashlib.blake2b, model: str) -> bytes:
    """The hash with the model's files behind what is in it; empty where they cannot be read."""
    try:
        for part in _parts(model):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    except (OSError, ValueError) as error:
        _logger.debug("the model has no fingerprint: %s", error)
        return b""
    return digest.digest()


def _parts(model: str) -> Iterator[bytes]:
    if model.startswith(SIMULATED):
        options = parse_simulated(model)
        yield options.mode.encode()
        for given in (options.tokenizer, options.answers):
            yield b"" if given is None else b"given"
            yield from () if given is None else _text(Path(given))
        return
    folder = find_folder(model)
    if folder is None:  # random weights: the name says all
        yield model.encode()
        return
    for pattern in _TEXTS:
        for path in sorted(folder.glob(pattern)):
            yield path.name.encode()
            yield from _text(path)
    for pattern in _WEIGHTS:
        for path in sorted(folder.glob(pattern)):
            yield path.name.encode()
            yield from _weights(path)


def _text(path: Path) -> Iterator[bytes]:
    """The part of a text file, or of a folder's tokenizer, that the fingerprint covers."""
    path = path / "tokenizer.json" if path.is_dir() else path
    with path.open("rb") as file:
        yield file.read(_WHOLE_BYTES)
        if path.stat().st_size > _WHOLE_BYTES:
            yield from _samples(file)


def _weights(path: Path) -> Iterator[bytes]:
    """The part of a file of weights that the fingerprint covers: its header, and samples of the
    rest.
    """
    with path.open("rb") as file:
        header = file.read(8)
        yield header
        yield file.read(min(int.from_bytes(header, "little"), _MAX_HEADER_BYTES))
        yield from _samples(file)


def _samples(file: BinaryIO) -> Iterator[bytes]:
    """The size of a file, and bytes from all over it, its end included."""
    size = file.seek(0, SEEK_END)
    yield size.to_bytes(8, "little")
    for sample in range(_NUM_SAMPLES):
        file.seek(max(0, size - _SAMPLE_BYTES) * sample // (_NUM_SAMPLES - 1))
        yield file.read(_SAMPLE_BYTES)
