"""Finds the GGUF file that a user names: a file, a folder with one, or a hub id and a type."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct

_SUFFIX = ".gguf"
_PROJECTOR = "mmproj"  # of images, beside the model: mmproj-F16.gguf, NAME.mmproj-F16.gguf
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_TYPE = re.compile(r"(?:^|[-._/])((?:[A-Z]{2}-)?(?:I?Q\d|F16|F32|BF16|MXFP4|TQ\d)\w*)$", re.I)


class Request(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file to unfold. model: a file, a folder, or `OWNER/REPO:TYPE`. tokenizer, config:
    folders or hub ids in place of the file's metadata. revision: of the model at the hub.
    """

    model: str
    tokenizer: str | None = None
    config: str | None = None
    revision: str | None = None


def find_file(request: Request) -> Path:
    """The file, downloaded if need be; of split files the first. Raises ValueError, OSError."""
    path = Path(request.model)
    if path.is_dir():
        return path / _only(request.model, [each.name for each in path.iterdir()])
    if path.is_absolute():
        return path
    name, _, kind = request.model.partition(":")
    return _from_hub(name, kind, request.revision)


def find_folder(value: str | None, name: str, request: Request) -> Path | None:
    """The folder, or the download of a hub id, that holds the file `name`. Raises ValueError."""
    if value is None:
        return None
    path = Path(value)
    if path.is_absolute():
        if not (path / name).is_file():
            raise ValueError(f"{path} has no {name}, which {request.model} needs")
        return path
    from huggingface_hub import hf_hub_download, snapshot_download

    patterns = ["*.json", "*.jinja"]
    try:
        return (
            Path(hf_hub_download(value, name)).parent
            if name == "config.json"
            else Path(snapshot_download(value, allow_patterns=patterns))
        )
    except Exception as error:  # whatever the network has
        raise ValueError(f"{name} of {value} cannot be had: {_brief(error)}") from None


def _only(where: str, names: Iterable[str]) -> str:
    """The one model among the names of files; of its parts the first. Raises ValueError."""
    models = _models(names)
    if len(models) != 1:
        said = ", ".join(sorted(models)[:5]) or "none"
        raise ValueError(f"{where} has {len(models)} GGUF files ({said}); give one of them")
    return next(iter(models.values()))[0]


def _models(names: Iterable[str]) -> dict[str, list[str]]:
    """GGUF files by their names without suffix and number of part."""
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        stem = name[: -len(_SUFFIX)]
        if name.lower().endswith(_SUFFIX) and _PROJECTOR not in Path(name).name.lower():
            found.setdefault(_PART.sub("", stem), []).append(name)
    return found


def _from_hub(name: str, kind: str, revision: str | None) -> Path:
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        names = HfApi().list_repo_files(name, revision=revision)
        files = _of_type(name, kind, names)
        paths = [Path(hf_hub_download(name, each, revision=revision)) for each in files]
        return paths[0]
    except HfHubHTTPError as error:  # an answer
        raise ValueError(f"{name} cannot be had: {_brief(error)}") from None
    except ValueError:
        raise
    except Exception as error:  # whatever the network has
        try:
            folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
        except LocalEntryNotFoundError:
            raise ValueError(
                f"{name} cannot be had ({_brief(error)}), and there is no earlier download"
            ) from None
        found = [str(path.relative_to(folder)) for path in folder.rglob(f"*{_SUFFIX}")]
        return folder / _of_type(name, kind, found)[0]


def _of_type(name: str, kind: str, names: Iterable[str]) -> list[str]:
    """The files of the model of a type, such as Q4_K_M. Raises ValueError."""
    models = _models(names)
    if not models:
        raise ValueError(f"{name} has no GGUF files; without :{kind} its checkpoint is served")
    end = re.compile(rf"(?:^|[-._/]){re.escape(kind)}$", re.I)
    found = sorted((stem for stem in models if end.search(stem)), key=len)
    # with the publisher's own variants (UD-Q4_K_M) the plain one is meant
    if not found or (len(found) > 1 and len(found[0]) == len(found[1])):
        kinds = sorted({each[1] for stem in models if (each := _TYPE.search(stem))})
        said = ", ".join(kinds or sorted(models))
        raise ValueError(f"{name} has {len(found)} GGUF models of type {kind!r}; it has {said}")
    return models[found[0]]


def _brief(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
