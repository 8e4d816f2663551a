"""Locates a model's files: in a folder, at the hub, or in an earlier download.

Whether the hub is reachable is checked once, quickly, before anything else: transformers alone
would retry each file for half a minute.

- An unreachable hub is no error if an earlier download exists.
- Every error says what was tried and what to do instead.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import (
    constants,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # not annotated

from slipstream_ipc.damaged_file import refuse_placeholder
from slipstream_ipc.hub_id import split_revision

logger = logging.getLogger(__name__)

_CONFIG = "config.json"
_INSTEAD = (
    "to serve it without the hub, give the folder of a model, or fetch it first where the hub can "
    "be reached (`hf download {0}`) and bring the cache along"
)


@dataclass(frozen=True, slots=True)
class Source:
    """The location from which transformers loads a model."""

    path: str  # a folder, or a hub id
    local_only: bool  # do not contact the hub
    revision: str | None = None  # of a hub id


def locate(name: str) -> Source:
    """Find the files of a folder or a hub id. Raises ValueError."""
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / _CONFIG).is_file():
            raise ValueError(f"the folder holds no {_CONFIG}, so it is not a model")
        refuse_placeholder(path / _CONFIG)
        return Source(str(path), True)
    if name.startswith((".", "/", "~")):
        raise ValueError("there is no such folder")
    name, revision = split_revision(name)
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ValueError("it is neither a folder nor a hub id such as 'Qwen/Qwen3-0.6B'") from error
    why = _why_unreachable(name, revision)
    if why is None:
        return Source(name, False, revision)
    if not isinstance(try_to_load_from_cache(name, _CONFIG, revision=revision), str):
        raise ValueError(
            f"there is no such folder, the hub was not reached ({why}), and "
            f"{constants.HF_HUB_CACHE} has no earlier download; {_INSTEAD.format(name)}"
        )
    logger.info("the hub was not reached (%s); %s comes from an earlier download", why, name)
    return Source(name, True, revision)


def local_folder(source: Source) -> Path | None:
    """The folder that a source's files are read from; None where they are not there yet."""
    path = Path(source.path)
    if path.is_dir():
        return path
    found = try_to_load_from_cache(source.path, _CONFIG, revision=source.revision)
    return Path(found).parent if isinstance(found, str) else None


def find_file(source: Source, name: str) -> Path | None:
    """A file of a model; None where it has none of this name."""
    folder = local_folder(source)
    if folder is not None and source.local_only:
        path = folder / name
        return path if path.is_file() else None
    try:
        return Path(hf_hub_download(source.path, name, revision=source.revision))
    except EntryNotFoundError:
        return None


def read_json(source: Source, name: str) -> dict[str, Any] | None:
    """A JSON file of a model; None where it has none, or it is no object."""
    path = find_file(source, name)
    try:
        found = None if path is None else json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def incomplete(source: Source) -> str:
    """A hint for errors about files that may be missing because the hub was not asked, or ''."""
    if not source.local_only or Path(source.path).is_dir():
        return ""
    return (
        f"; the hub was not reached, and the earlier download in {constants.HF_HUB_CACHE} may be "
        f"incomplete: {_INSTEAD.format(source.path)}"
    )


def _why_unreachable(name: str, revision: str | None) -> str | None:
    """The reason why the hub was not reached; None if it has the model.

    Raises ValueError if the hub answers that it does not have the model or does not allow access.
    """
    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    url = hf_hub_url(name, _CONFIG, revision=revision)
    try:
        # one request without retries, limited by HF_HUB_ETAG_TIMEOUT
        get_hf_file_metadata(url)
    except GatedRepoError as error:
        raise ValueError(
            f"access is restricted: accept the terms at {constants.ENDPOINT}/{name}, then log in "
            "with `hf auth login` or set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"there is no such folder, and {constants.ENDPOINT} has no such model; for a private "
            "one log in with `hf auth login` or set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise ValueError(f"{constants.ENDPOINT}/{name} has no revision {revision}") from error
    except EntryNotFoundError as error:
        raise ValueError(
            f"{constants.ENDPOINT}/{name} holds no {_CONFIG}, so it is not a model"
        ) from error
    except Exception as error:
        # any network failure: no connection, a timeout, a proxy's refusal
        lines = str(error).strip().splitlines()
        return f"{url}: {lines[0] if lines else type(error).__name__}"
    return None
