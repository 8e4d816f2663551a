"""Unfolds a GGUF file into a model's folder: configuration, tokenizer, template, and links to the
weights.

All else knows folders, so this happens once, before the processes of a stack start. The folder is
in the user's cache, named by what it was made of, and appears complete or not at all. When one is
made, those that were not used for 30 days are removed, and the longest unused ones beyond 1 GiB,
but none that a process computes from and none that was used in the last hour.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from slipstream_core.model.gguf.architectures import (
    architecture_of,
    num_drafting_blocks,
    read_config,
)
from slipstream_core.model.gguf.metadata import Metadata
from slipstream_core.model.gguf.names import UnknownTensorError, parameters_of
from slipstream_core.model.gguf.reader import GGUFError, GGUFModel, read_gguf
from slipstream_core.model.gguf.tokenizer import Vocabulary, read_vocabulary, tokenizer_json
from slipstream_ipc.cache_folder import user_cache

Json = dict[str, Any]

_WAY = 2  # of unfolding: counted up when the same file becomes another folder
_ELSEWHERE = "set XDG_CACHE_HOME to a folder that can be written"
_MAX_UNUSED_S = 30 * 24 * 3600
_MAX_BYTES = 1 << 30  # of all folders
_FRESH_S = 3600  # in which the processes of a stack start
_STEM = re.compile(r"[^A-Za-z0-9._-]+")
_LINK = "weights-{:05}.gguf"
_TEMPLATE = "tokenizer.chat_template"
_TEMPLATE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_TOKEN_IDS = {"bos": ("bos",), "pad": ("padding",), "eos": ("eos", "eot", "eom")}
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_COUNTS = ("top_k",)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True)
class Overrides:
    """Folders whose files stand in place of the file's metadata."""

    tokenizer: Path | None = None
    config: Path | None = None


def unfold(file: Path, overrides: Overrides | None = None, cache: Path | None = None) -> Path:
    """The folder of a file, made if it is not there. cache: where folders are kept.

    Raises GGUFError, which names the file, and OSError.
    """
    overrides = overrides or Overrides()
    file = file.absolute()  # not resolved: a hub's cache links to files without names
    model = read_gguf(file)
    parent = _cache() if cache is None else cache
    folder = parent / f"{_STEM.sub('-', file.stem)[:80]}-{_digest(model, overrides)}"
    if folder.is_dir():
        os.utime(folder)
        return folder
    files = _files(model, overrides)
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".part-", dir=parent))  # of mode 700
    except OSError as error:
        why = error.strerror or str(error)
        raise OSError(f"its folder cannot be made in {parent}: {why}; {_ELSEWHERE}") from error
    try:
        for name, content in files.items():
            path = made / name
            path.parent.mkdir(mode=0o700, exist_ok=True)
            path.write_bytes(content)
        if overrides.tokenizer is not None:
            for name in _TOKENIZER_FILES:
                if (given := overrides.tokenizer / name).is_file():
                    (made / name).symlink_to(given.absolute())
        for number, part in enumerate(model.files, start=1):
            (made / _LINK.format(number)).symlink_to(part)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # another process was quicker
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    remove_unused(parent, time.time())
    return folder


def hold(folder: Path) -> None:
    """Keep a folder from being removed while this process lives."""
    with suppress(OSError):  # who cannot touch it cannot remove it
        os.utime(folder)
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_SH)  # open until the process ends


def remove_unused(cache: Path, now: float) -> None:
    """Remove the folders that have no place in a cache any more. now: seconds since the epoch."""
    folders = [each for each in cache.iterdir() if each.is_dir() and not each.is_symlink()]
    total = 0
    for age, path in sorted((now - each.stat().st_mtime, each) for each in folders):
        num_bytes = _num_bytes(path)
        total += num_bytes
        if age <= _FRESH_S or (age <= _MAX_UNUSED_S and total <= _MAX_BYTES):
            continue
        if _remove(path, now):
            total -= num_bytes


def _num_bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*"))


def _remove(folder: Path, now: float) -> bool:
    """Remove a folder that no process holds, or has just found; True if it was removed."""
    try:
        opened = os.open(folder, os.O_RDONLY)
    except OSError:  # another process was quicker
        return False
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if now - os.fstat(opened).st_mtime <= _FRESH_S:
            return False
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # it is held
        return False
    finally:
        os.close(opened)
    return not folder.exists()


def weights_file(folder: Path) -> Path | None:
    """The first GGUF file that an unfolded folder links to; None for other folders."""
    link = folder / _LINK.format(1)
    return link.readlink() if link.is_symlink() else None


def _cache() -> Path:
    try:
        return user_cache() / "gguf"
    except RuntimeError as error:  # the user has no home
        raise OSError(f"its folder has no place: {error} {_ELSEWHERE}") from error


def _digest(model: GGUFModel, overrides: Overrides) -> str:
    digest = blake2b(digest_size=10)
    digest.update(model.headers)
    for each in model.files:
        digest.update(os.fsencode(each))
        digest.update(each.stat().st_size.to_bytes(8, "little"))
    given = [*((overrides.tokenizer and _given(overrides.tokenizer, _TOKENIZER_FILES)) or ())]
    given += [*((overrides.config and _given(overrides.config, ("config.json",))) or ())]
    digest.update(msgspec.msgpack.encode((_WAY, given)))
    return digest.hexdigest()


def _given(folder: Path, names: tuple[str, ...]) -> list[tuple[str, bytes]]:
    return [
        (str(path.absolute()), blake2b(path.read_bytes()).digest())
        for name in names
        if (path := folder / name).is_file()
    ]


def _files(model: GGUFModel, overrides: Overrides) -> dict[str, bytes]:
    """The folder's files by name, but for links."""
    metadata = Metadata(model)
    architecture = architecture_of(metadata)
    if overrides.config is None:
        config = read_config(model)
    else:
        config = _read_json(model.files[0], overrides.config / "config.json")
    try:
        text = config.get("text_config", config)
        num_drafting = num_drafting_blocks(model)
        list(parameters_of(architecture, model.tensors, text["num_hidden_layers"], num_drafting))
    except UnknownTensorError as error:
        raise GGUFError(model.files[0], f"has {error}") from None
    except (KeyError, TypeError) as error:
        raise GGUFError(model.files[0], f"is given a config.json without {error}") from None
    files: dict[str, Json] = {}
    texts: dict[str, str] = {}
    ids = _token_ids(metadata)
    if overrides.config is None:
        config |= ids
    settings = _sampling(metadata) | ids
    if overrides.tokenizer is None:
        vocabulary = read_vocabulary(metadata, config["vocab_size"])
        files["tokenizer.json"] = tokenizer_json(metadata, vocabulary, architecture)
        files["tokenizer_config.json"] = _tokenizer_config(vocabulary, config)
        texts = _templates(metadata)
        metadata.refuse_others("tokenizer.")
    files["config.json"] = config
    files["generation_config.json"] = settings
    found = {name: msgspec.json.encode(content) for name, content in files.items()}
    return found | {name: content.encode() for name, content in texts.items()}


def _read_json(file: Path, path: Path) -> Json:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise GGUFError(file, f"is given {path}, which cannot be read ({error})") from None
    return found


def _tokenizer_config(vocabulary: Vocabulary, config: Json) -> Json:
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    tokens = {f"{ours}_token": vocabulary.token(theirs) for ours, theirs in named.items()}
    return {
        "backend": "tokenizers",
        "tokenizer_class": "TokenizersBackend",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.get("max_position_embeddings"),
        **{name: token for name, token in tokens.items() if token is not None},
    }


def _templates(metadata: Metadata) -> dict[str, str]:
    """Chat templates by the names of their files."""
    found: dict[str, str] = {}
    if metadata.has(_TEMPLATE):
        found["chat_template.jinja"] = metadata.text(_TEMPLATE)
    for name in metadata.texts(f"{_TEMPLATE}s") or ():
        if not _TEMPLATE_NAME.fullmatch(name):
            raise metadata.error(f"names a chat template {name[:80]!r}")
        text = metadata.text(f"{_TEMPLATE}.{name}")
        found[f"additional_chat_templates/{name}.jinja"] = text
    return found


def _token_ids(metadata: Metadata) -> Json:
    """The tokens that begin, fill and end a text; of several ends each."""
    found: dict[str, list[int]] = {}
    for name, ids in _TOKEN_IDS.items():
        keys = [f"tokenizer.ggml.{each}_token_id" for each in ids]
        found[name] = [metadata.integer(key) for key in keys if metadata.has(key)]
    return {
        f"{name}_token_id": list(dict.fromkeys(each)) if name == "eos" else each[0]
        for name, each in found.items()
        if each
    }


def _sampling(metadata: Metadata) -> Json:
    """The defaults of sampling that a file suggests, in the words of generation_config.json."""
    found: Json = {}
    for ours, theirs in _SAMPLING.items():
        key = f"general.sampling.{ours}"
        if metadata.has(key):
            is_count = ours in _COUNTS
            found[theirs] = metadata.integer(key) if is_count else metadata.number(key)
    if found:
        found["do_sample"] = True
    metadata.refuse_others("general.sampling.")
    return found
