"""Locates a model's files: in a folder, at the hub, or in an earlier download.

Whether the hub is reachable is checked once, quickly, before anything else: transformers alone
would retry each file for half a minute.

- An unreachable hub is no error if an earlier download exists.
- Every error says what was tried and what to do instead.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # not annotated

logger = logging.getLogger(__name__)

_CONFIG = "config.json"
_INSTEAD = (
    "to serve it without the hub, give the folder of a model, or fetch it first where the hub can "
    "be reached (`hf download {0}`) and bring the cache along"
)


@dataclass(frozen=True, slots=True)
class Source:
    """Where transformers is to load a model from."""

    path: str  # a folder, or a hub id
    local_only: bool  # do not contact the hub


def locate(name: str) -> Source:
    """Find the files of a folder or a hub id. Raises ValueError."""
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / _CONFIG).is_file():
            raise ValueError(f"the folder holds no {_CONFIG}, so it is not a model")
        return Source(str(path), True)
    if name.startswith((".", "/", "~")):
        raise ValueError("there is no such folder")
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ValueError("it is neither a folder nor a hub id such as 'Qwen/Qwen3-0.6B'") from error
    why = _why_unreachable(name)
    if why is None:
        return Source(name, False)
    if not isinstance(try_to_load_from_cache(name, _CONFIG), str):
        raise ValueError(
            f"there is no such folder, the hub was not reached ({why}), and "
            f"{constants.HF_HUB_CACHE} has no earlier download; {_INSTEAD.format(name)}"
        )
    logger.info("the hub was not reached (%s); %s comes from an earlier download", why, name)
    return Source(name, True)


def incomplete(source: Source) -> str:
    """A hint for errors about files that may be missing because the hub was not asked, or ''."""
    if not source.local_only or Path(source.path).is_dir():
        return ""
    return (
        f"; the hub was not reached, and the earlier download in {constants.HF_HUB_CACHE} may be "
        f"incomplete: {_INSTEAD.format(source.path)}"
    )


def _why_unreachable(name: str) -> str | None:
    """Why the hub was not reached; None if it has the model.

    Raises ValueError if the hub answers that it does not have the model or does not allow access.
    """
    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    url = hf_hub_url(name, _CONFIG)
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
    except EntryNotFoundError as error:
        raise ValueError(
            f"{constants.ENDPOINT}/{name} holds no {_CONFIG}, so it is not a model"
        ) from error
    except Exception as error:
        # any network failure: no connection, a timeout, a proxy's refusal
        lines = str(error).strip().splitlines()
        return f"{url}: {lines[0] if lines else type(error).__name__}"
    return None
