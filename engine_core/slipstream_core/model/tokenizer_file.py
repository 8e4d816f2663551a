"""Finds a model's folder, and its tokenizer.json.

The core needs the tokenizer for grammars only, so it is not looked up before the first one.
"""

from __future__ import annotations

from pathlib import Path

from slipstream_ipc.hub_id import split_revision
from slipstream_ipc.validation.simulated_model import SIMULATED, parse_simulated

_NAME = "tokenizer.json"
_CONFIG = "config.json"
_RANDOM = "random:"


def find_tokenizer(model: str) -> Path:
    """The tokenizer.json of a folder, a downloaded hub id, or a simulated model.

    Raises ValueError if there is none.
    """
    if model.startswith(SIMULATED):
        given = parse_simulated(model).tokenizer
        if given is None:
            raise ValueError(
                "the simulated model has no tokenizer; its option `tokenizer` sets one"
            )
        path = Path(given)
    elif model.startswith(_RANDOM):
        raise ValueError("a model of random weights has no tokenizer")
    else:
        path = Path(model).expanduser()
        if not path.is_dir():
            return _from_hub(model)
    path = path / _NAME if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"the model's folder holds no {_NAME}")
    return path


def find_folder(model: str) -> Path | None:
    """The folder of a real model's files, or of the snapshot of a hub id; None for random weights.

    Raises ValueError if there is none.
    """
    if model.startswith(_RANDOM):
        return None
    path = Path(model).expanduser()
    return path if path.is_dir() else _from_hub(model, _CONFIG).parent


def _from_hub(model: str, name: str = _NAME) -> Path:
    from huggingface_hub import try_to_load_from_cache

    hub_id, revision = split_revision(model)
    found = try_to_load_from_cache(hub_id, name, revision=revision)
    if not isinstance(found, str):
        raise ValueError(f"no {name} of the model has been downloaded")
    return Path(found)
