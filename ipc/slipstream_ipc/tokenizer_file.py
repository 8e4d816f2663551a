"""Has a tokenizer compute as its tokenizer.json says.

transformers 5 takes the vocabulary and the merges of the file for most classes and builds the rest
by class, so the same text gets other ids than those that the model was trained with: digits are
split or not, blanks come and go (transformers' issues 44462, 45920). The file decides here, as it
does in `tokenizers`. What tokenizer_config.json adds stays: tokens, and the template of beginnings
and ends.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw, Struct

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["follow_tokenizer_file"]

_FILE = "tokenizer.json"
_BY_CLASS = "transformers.models."  # the module of classes that build a tokenizer themselves
_STEPS = ("normalizer", "pre_tokenizer", "decoder")
_NOTHING = Raw(b"null")
_WITHOUT_EFFECT = ("trim_offsets",)  # on ids and text


class _Model(Struct):
    """The options of a tokenizer.json's model; its vocabulary is not read here."""

    type: str | None = None
    unk_token: str | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    fuse_unk: bool = False
    byte_fallback: bool = False
    ignore_merges: bool = False


class _File(Struct):
    """The parts of a tokenizer.json that a class may build otherwise."""

    model: _Model
    normalizer: Raw = _NOTHING
    pre_tokenizer: Raw = _NOTHING
    decoder: Raw = _NOTHING


def follow_tokenizer_file(
    tokenizer: Any, name: str, *, revision: str | None = None, cache_dir: str | None = None
) -> None:
    """Change what differs in a transformers tokenizer from its tokenizer.json.

    name, revision, cache_dir: where it was loaded from. A tokenizer without such a file, or that
    `tokenizers` does not run, stays as it is. Raises OSError, or ValueError for a broken file.
    """
    from transformers.utils.hub import cached_file

    if not tokenizer.is_fast or not type(tokenizer).__module__.startswith(_BY_CLASS):
        return
    path = cached_file(  # None where there is none
        name,
        _FILE,
        revision=revision,
        cache_dir=cache_dir,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if path is not None:
        _follow(tokenizer, Path(path))


def _follow(tokenizer: Any, path: Path) -> None:
    file = msgspec.json.decode(path.read_bytes(), type=_File)
    loaded: Tokenizer = tokenizer.backend_tokenizer
    bare = _without_vocabulary(file)
    is_changed = False
    for name in _STEPS:
        step = getattr(bare, name)
        if _effect(getattr(loaded, name)) != _effect(step):
            setattr(loaded, name, step)
            is_changed = True
    if file.model.type == "BPE" == type(loaded.model).__name__:
        for name in _Model.__struct_fields__[1:]:
            wanted = getattr(file.model, name)
            if getattr(loaded.model, name) != wanted:
                setattr(loaded.model, name, wanted)
    if is_changed:  # added tokens are found in normalised text: theirs is normalised anew
        loaded.add_tokens(list(loaded.get_added_tokens_decoder().values()))


def _without_vocabulary(file: _File) -> Tokenizer:
    """A tokenizer with the steps of `file`, and no tokens. Raises ValueError."""
    from tokenizers import Tokenizer

    steps = {name: getattr(file, name) for name in _STEPS}
    model = {"type": "BPE", "vocab": {}, "merges": []}
    whole = {"version": "1.0", "added_tokens": [], "model": model, **steps}
    try:
        return Tokenizer.from_buffer(msgspec.json.encode(whole))
    except Exception as error:  # the library raises no narrower class
        raise ValueError(f"tokenizer.json: {error}") from None


def _effect(step: Any) -> Any:
    """A normaliser, pre-tokeniser or decoder as JSON, without options that change nothing."""
    return None if step is None else _plain(msgspec.json.decode(step.__getstate__()), step)


def _plain(value: Any, step: Any) -> Any:
    if isinstance(value, list):
        return [_plain(each, step) for each in value]
    if not isinstance(value, dict):
        return value
    is_decoder = type(step).__module__.endswith("decoders")
    if is_decoder and value.get("type") == "ByteLevel":
        return {"type": "ByteLevel"}  # its options are a pre-tokeniser's
    return {key: _plain(each, step) for key, each in value.items() if key not in _WITHOUT_EFFECT}
