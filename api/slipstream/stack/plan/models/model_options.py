"""A user's changes to a model: its configuration, sampling defaults and chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from slipstream.errors import wrong_option
from slipstream.stack.settings import StackSettings
from slipstream_ipc.messages import SamplingDefaults

_MAX_TEMPLATE_BYTES = 2**20
_NO_FOLDERS = ("auto", "vllm")
_WHOLE = ("top_k",)  # numbers that are whole


def core_model_options(settings: StackSettings) -> dict[str, Any]:
    """The model options of the core. Raises: BadRequestError."""
    return {
        "hf_overrides": json_object("hf_overrides", settings.hf_overrides),
        "generation_config": _generation_config(settings),
        "override_generation_config": _sampling_defaults(settings),
    }


def worker_model_options(settings: StackSettings) -> dict[str, Any]:
    """The model options of the output workers. Raises: BadRequestError."""
    name = "default_chat_template_kwargs"
    kwargs = json_object(name, settings.default_chat_template_kwargs)
    if kwargs:
        # with numpy, which a supervisor does without
        from slipstream_ipc.validation.chat_template import RESERVED

        if reserved := sorted(RESERVED.intersection(kwargs)):
            raise wrong_option(name, reserved[0], "variables that are not the renderer's own")
    return {"chat_template": _chat_template(settings.chat_template), name: kwargs}


def json_object(option: str, given: str | dict[str, Any] | None) -> dict[str, Any]:
    """An option's object, given as one or as JSON. Raises: BadRequestError."""
    if given is None or isinstance(given, dict):
        return given or {}
    try:
        return msgspec.json.decode(given, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise wrong_option(option, given, f"an object as JSON ({error})") from None


def _generation_config(settings: StackSettings) -> str:
    given = settings.generation_config
    if given in _NO_FOLDERS:
        return given
    folder = Path(given).expanduser().absolute()
    if not (folder / "generation_config.json").is_file():
        allowed = "auto, vllm, or a folder with a generation_config.json"
        raise wrong_option("generation_config", given, allowed)
    return str(folder)


def _sampling_defaults(settings: StackSettings) -> dict[str, float]:
    option = "override_generation_config"
    given = json_object(option, settings.override_generation_config)
    names = SamplingDefaults.__struct_fields__
    for name, value in given.items():
        is_number = isinstance(value, int if name in _WHOLE else int | float)
        if name not in names or not is_number or isinstance(value, bool):
            allowed = f"numbers for {', '.join(names)}"
            raise wrong_option(option, f"{name}: {value}", allowed)
    return given


def _chat_template(given: str | None) -> str | None:
    """The template in a file, or the one that is given itself."""
    if given is None or "{%" in given or "{{" in given:
        return given
    try:
        path = Path(given).expanduser()
        if path.stat().st_size <= _MAX_TEMPLATE_BYTES:
            return path.read_text("utf-8")
        why = f"it has more than {_MAX_TEMPLATE_BYTES} bytes"
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    raise wrong_option("chat_template", given, f"a file, or a template in Jinja ({why})")
