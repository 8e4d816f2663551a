"""The source of a model or a tokenizer, as the user names it: a folder, a hub id, a simulation.

What cannot be had is found before a process is started: a core would need seconds for its imports,
and transformers would try the hub for more than a minute.
"""

from __future__ import annotations

import logging
import re
import socket
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from slipstream.demo_model import MODEL_NAME, MODEL_PATH
from slipstream.errors import BadRequestError, missing_option, wrong_option
from slipstream.spelling import did_you_mean
from slipstream.stack.settings import StackSettings
from slipstream_ipc.hub_id import split_revision, with_revision
from slipstream_ipc.messages import Fault
from slipstream_ipc.validation.simulated_model import SIMULATED, parse_simulated

RANDOM = "random:"
_TOKENIZER = "tokenizer="
_ANSWERS = "answers="
_CONFIG = "config.json"
_ADAPTER = "adapter_config.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_GGUF = ".gguf"
_UNFOLDED = "weights-00001.gguf"  # what the core's program links to the file
_HUB_GGUF = re.compile(rf"(?P<name>{_HUB_ID.pattern}):(?P<type>[A-Za-z0-9][\w.-]*)")
_CONNECT_S = 5.0
_CACHE_VARIABLE, _OFFLINE_VARIABLE = "HF_HUB_CACHE", "HF_HUB_OFFLINE"
_MAIN = "main"
_REVISION = re.compile(r"[A-Za-z0-9][\w./-]*")
_logger = logging.getLogger(__name__)


class UnreachableHubError(BadRequestError):
    """No hub answers, and there is no earlier download. The same may succeed later."""


def model_and_tokenizer(model: str | None, tokenizer: str | None) -> tuple[str, str]:
    """The model that the core loads, and the tokenizer that the worker loads.

    A folder becomes its absolute path, and a simulated model gets the tokenizer that it plays back.
    A model of random weights (`random:NAME`) requires `tokenizer`.

    Raises: BadRequestError.
    """
    if model is None or model == MODEL_NAME:
        found = str(MODEL_PATH)
    elif f"{model}:".startswith(SIMULATED):
        return _simulated(f"{model}:" if ":" not in model else model, tokenizer)
    elif model.startswith(RANDOM):
        if tokenizer is None:
            why = "a model of random weights has none; give a folder or a hub id"
            raise missing_option("tokenizer", why)
        found = model
    else:
        found = folder_or_hub_id("model", model, f"{SIMULATED}OPTION=VALUE,... or {RANDOM}NAME")
    if tokenizer is None:
        return found, found
    return found, folder_or_hub_id("tokenizer", tokenizer)


def _simulated(model: str, tokenizer: str | None) -> tuple[str, str]:
    options = [option for option in model.removeprefix(SIMULATED).split(",") if option]
    own = [option for option in options if option.startswith(_TOKENIZER)]
    if own and tokenizer is not None:
        allowed = f"None, as {model!r} names a tokenizer"
        raise wrong_option("tokenizer", tokenizer, allowed)
    given = own[0].removeprefix(_TOKENIZER) if own else tokenizer
    path = Path(MODEL_PATH if given is None else given).expanduser().absolute()
    if not path.exists() or "," in str(path):
        allowed = "an existing tokenizer.json, or a folder with one, without a comma in its path"
        raise wrong_option("tokenizer", given, allowed)
    others = []
    for option in options:
        if option.startswith(_ANSWERS):
            answers = Path(option.removeprefix(_ANSWERS)).expanduser().absolute()
            if not answers.is_file() or "," in str(answers):
                allowed = "an existing file of JSON lines, without a comma in its path"
                raise wrong_option("answers", option.removeprefix(_ANSWERS), allowed)
            others.append(f"{_ANSWERS}{answers}")
        elif not option.startswith(_TOKENIZER):
            others.append(option)
    played = SIMULATED + ",".join([*others, f"{_TOKENIZER}{path}"])
    try:
        parse_simulated(played)
    except ValueError as error:
        message = str(error).replace(played, model)
        raise BadRequestError(Fault("bad_request", f"model: {message}", "model")) from None
    return played, str(path.parent if path.is_file() else path)


def has_ends(model: str) -> bool:
    """True if a model's answers end by themselves: not if its tokens mean nothing, as those of
    random weights and of a simulation that plays no answers. model: as returned by
    `model_and_tokenizer`.
    """
    if model.startswith(SIMULATED):
        return parse_simulated(model).answers is not None
    return not model.startswith(RANDOM)


def folder_or_hub_id(option: str, value: str, more: str = "") -> str:
    """The absolute path of a folder, or a hub id.

    option: `tokenizer`, or one for a model. more: what else is allowed. Raises: BadRequestError.
    """
    path = Path(value).expanduser()
    is_model = option != "tokenizer"
    if path.is_dir() and (not is_model or (path / _CONFIG).is_file()):
        return str(path.absolute())
    if is_model and (_has_gguf(path) or (not path.exists() and _HUB_GGUF.fullmatch(value))):
        return str(path.absolute()) if path.exists() else value
    if is_model and value.lower().endswith(_GGUF.replace(".", "-")) and not path.exists():
        allowed = f"the type of one of its GGUF files behind its name, such as {value}:Q4_K_M"
        raise wrong_option(option, value, allowed)
    if is_model and value.lower().endswith(_GGUF) and not path.exists():
        if path.is_symlink():
            why = f"{path} is a link to {path.readlink()}, which does not exist"
        else:
            why = f"there is no file {path}{_nearest(path)}"
        raise wrong_option(option, value, f"a file of the suffix {_GGUF}; {why}")
    if path.exists() or not _HUB_ID.fullmatch(value):
        folder = f"a folder with a {'tokenizer' if option == 'tokenizer' else _CONFIG}"
        file = f"a file of the suffix {_GGUF}" if is_model else ""
        hub_id = "a hub id (NAME or ORGANISATION/NAME)"
        allowed = ", ".join(filter(None, (folder, file, hub_id, more)))
        lacks = f"; {path.absolute()} has no {_CONFIG}" if value and path.is_dir() else ""
        if lacks and is_model and (path / _ADAPTER).is_file():
            lacks += (
                ", but an adapter: give its base model, and it in lora_modules with enable_lora"
            )
        raise wrong_option(option, value, f"{allowed}{lacks or _nearest(path)}")
    return value


def with_model_revision(settings: StackSettings, model: str, tokenizer: str) -> tuple[str, str]:
    """Model and tokenizer with the model's revision, if they are from a hub. Raises:
    BadRequestError for a revision of anything else.
    """
    revision = settings.revision
    if revision is None or _HUB_GGUF.fullmatch(model):
        return model, tokenizer
    if not is_hub_id(model):
        if revision == _MAIN:
            return model, tokenizer
        raise wrong_option("revision", revision, f"None with {model}, which is no hub id")
    if not _REVISION.fullmatch(revision):
        raise wrong_option("revision", revision, "a branch, a tag or a commit")
    named = with_revision(model, revision)
    return named, named if tokenizer == model else tokenizer


def was_downloaded(value: str) -> bool:
    """True if the hub's cache has a model of this id."""
    from huggingface_hub import constants  # takes a moment, and most models are folders

    folder = Path(constants.HF_HUB_CACHE) / f"models--{value.replace('/', '--')}" / "snapshots"
    return any(folder.glob("*/*"))


def is_hub_id(value: str) -> bool:
    """True if a model or tokenizer is from a hub. value: as `model_and_tokenizer` returns it."""
    return not value.startswith((SIMULATED, RANDOM, "/"))


def is_gguf(model: str) -> bool:
    """True for a GGUF file, a folder with one, and a hub id with the type of one. model: as
    returned by `model_and_tokenizer`.
    """
    if not is_hub_id(model):
        path = Path(model)
        return path.is_absolute() and not _is_checkpoint(path) and _has_gguf(path)
    return _HUB_GGUF.fullmatch(model) is not None


def hub_environment(
    settings: StackSettings, model: str, tokenizer: str, draft_model: str | None = None
) -> dict[str, str]:
    """The variables by which the processes of a stack use a hub: where its files are kept, and not
    to ask it again where it does not answer. Raises: BadRequestError, of it UnreachableHubError.
    """
    found: dict[str, str] = {}
    cache = settings.download_dir
    if cache is not None:
        found[_CACHE_VARIABLE] = cache = str(Path(cache).expanduser().absolute())
    names = {"model": model, "tokenizer": tokenizer}
    if tokenizer == model:
        del names["tokenizer"]
    if draft_model is not None:
        names["speculative_config.model"] = draft_model
    # all are checked, and one answer is enough
    answers = [check_hub(each, name, cache) for each, name in names.items() if is_hub_id(name)]
    if answers and not all(answers):
        found[_OFFLINE_VARIABLE] = "1"
    return found


def check_hub(option: str, value: str, cache: str | None = None) -> bool:
    """Check that a hub id can be had: from an earlier download, or from a hub that answers. Returns
    whether a hub is to be asked.

    value: as returned by `folder_or_hub_id`, perhaps with a revision. cache: where downloads are.
    Whether the hub has the model is not checked, and behind a proxy nothing is without an earlier
    download. There is one attempt. Raises: BadRequestError, of it UnreachableHubError.
    """
    from huggingface_hub import constants  # takes a moment, and most models are folders

    value, revision = split_revision(value)
    if found := _HUB_GGUF.fullmatch(value):
        value = found["name"]
    cache = constants.HF_HUB_CACHE if cache is None else cache
    folder = Path(cache) / f"models--{value.replace('/', '--')}" / "snapshots"
    if any(folder.glob("*/*")):
        return not constants.HF_HUB_OFFLINE and _answers(value, revision)
    if constants.HF_HUB_OFFLINE:
        raise _unreachable(option, value, "HF_HUB_OFFLINE is set", cache)
    parts = urlsplit(constants.ENDPOINT)
    if parts.hostname is None or parts.scheme in urllib.request.getproxies():
        return True
    port = parts.port or (80 if parts.scheme == "http" else 443)
    try:
        socket.create_connection((parts.hostname, port), _CONNECT_S).close()
    except OSError as error:
        why = f"{constants.ENDPOINT} cannot be reached ({error.strerror or error})"
        unreachable = _unreachable(option, value, why, cache)
        raise UnreachableHubError(unreachable.fault) from None
    return True


def _answers(value: str, revision: str | None) -> bool:
    """True if the hub answers, with whatever status; logs if it does not."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    try:
        get_hf_file_metadata(hf_hub_url(value, _CONFIG, revision=revision), timeout=_CONNECT_S)
    except HfHubHTTPError:
        return True
    except Exception as error:  # whatever the network has
        lines = str(error).splitlines()
        why = lines[0] if lines else type(error).__name__
        _logger.info("the hub was not reached (%s); %s is an earlier download", why, value)
        return False
    return True


def _unreachable(option: str, value: str, why: str, cache: str) -> BadRequestError:
    allowed = (
        f"a folder, or a hub id that can be had. {why}, and {cache} has no earlier download: give "
        f"a folder, or run `hf download {value}` where the hub can be reached, and bring the cache "
        f"along{_nearest(Path(value))}"
    )
    return wrong_option(option, value, allowed)


def _is_checkpoint(folder: Path) -> bool:
    """True for a folder with a configuration, unless GGUF files are the only weights beside it, as
    in many repositories of the hub. The links of an unfolded file are a checkpoint's weights.
    """
    if not (folder / _CONFIG).is_file():
        return False
    names = [each.name.lower() for each in folder.iterdir()]
    own = (name for name in names if name.endswith((".safetensors", ".bin", _UNFOLDED)))
    return any(own) or not any(name.endswith(_GGUF) for name in names)


def _has_gguf(path: Path) -> bool:
    """True for a GGUF file, and for a folder with some."""
    if path.is_dir():
        return any(each.name.lower().endswith(_GGUF) for each in path.iterdir())
    return path.is_file() and path.name.lower().endswith(_GGUF)


def _nearest(path: Path) -> str:
    """A suggestion for a path that does not exist."""
    try:
        names = [each.name for each in path.parent.iterdir()]
    except OSError:
        return f"; there is no folder {path.parent}" if path.is_absolute() else ""
    hint = "" if path.exists() else did_you_mean(path.name, names)
    return hint.replace("mean ", f"mean {path.parent}/") if path.parent != Path() else hint
