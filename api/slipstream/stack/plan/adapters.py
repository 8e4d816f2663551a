"""The adapters that a user asks for, in vLLM's words, as the core takes them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from typing import Any

import msgspec

from slipstream.errors import wrong_option
from slipstream.stack.plan.engine_options import VLLM
from slipstream.stack.settings import StackSettings
from slipstream_ipc.messages import MAX_LORA_NAME_CHARS, MAX_LORAS
from slipstream_ipc.validation.simulated_model import SIMULATED

_MODULES = "lora_modules"


class _Module(msgspec.Struct, forbid_unknown_fields=True):
    """An adapter as vLLM's JSON has it."""

    name: str
    path: str
    base_model_name: str | None = None


def lora_options(
    settings: StackSettings, model: str, served_names: Collection[str]
) -> dict[str, Any] | None:
    """The core's `lora`; None without `enable_lora`. served_names: those of the model.

    Raises: BadRequestError.
    """
    given = settings.lora_modules
    given = (given,) if isinstance(given, str) else given
    if not settings.enable_lora:
        if given:
            raise wrong_option(_MODULES, given[0], "none without enable_lora")
        return None
    _check_place(settings, model)
    modules: dict[str, str] = {}
    for name, path in _modules(given, served_names):
        if (
            not 1 <= len(name) <= MAX_LORA_NAME_CHARS
            or name.endswith("*")
            or not name.isprintable()
        ):
            allowed = f"a name of 1 to {MAX_LORA_NAME_CHARS} characters, without * at its end"
            raise wrong_option(_MODULES, name, allowed)
        if name in served_names or name in modules:
            raise wrong_option(_MODULES, name, "names that nothing else has here")
        modules[name] = os.path.abspath(os.path.expanduser(path))
    if len(modules) > MAX_LORAS:
        raise wrong_option(_MODULES, len(modules), f"at most {MAX_LORAS} adapters")
    most = max(1, len(modules)) if settings.max_loras is None else settings.max_loras
    if most < len(modules):
        allowed = f"at least {len(modules)}, the adapters of lora_modules"
        raise wrong_option("max_loras", most, allowed)
    return {
        "modules": list(modules.items()),
        "max_rank": settings.max_lora_rank,
        "max_loras": most,
    }


def _check_place(settings: StackSettings, model: str) -> None:
    """Refuse adapters where they are not computed. Raises: BadRequestError."""
    for is_so, where in (
        (settings.engine == VLLM, "engine=vllm"),
        (settings.tensor_parallel_size > 1, "tensor_parallel_size > 1"),
        (settings.device == "cuda", "device=cuda"),
        (not settings.native, "native=false"),
        (model.startswith(SIMULATED), f"the model {model}"),
    ):
        if is_so:
            allowed = f"false with {where}: adapters are computed on a CPU, in one process, by "
            raise wrong_option("enable_lora", True, f"{allowed}Slipstream's own kernels alone yet")


def _modules(given: tuple[str, ...], served_names: Collection[str]) -> Iterator[tuple[str, str]]:
    for each in given:
        name, equals, path = each.partition("=")
        if each.lstrip().startswith("{"):
            try:
                module = msgspec.json.decode(each, type=_Module)
            except msgspec.MsgspecError as error:
                allowed = f'an object as {{"name": …, "path": …}} ({error})'
                raise wrong_option(_MODULES, each, allowed) from None
            base = module.base_model_name
            if base is not None and base not in served_names:
                allowed = f"{' or '.join(map(repr, served_names))} as base_model_name"
                raise wrong_option(_MODULES, base, allowed)
            name, path = module.name, module.path
        elif not equals:
            raise wrong_option(_MODULES, each, "NAME=PATH, or an object as JSON")
        if not path:
            raise wrong_option(_MODULES, each, "a path behind the name")
        try:
            path.encode()
        except UnicodeEncodeError:  # it is on the model's card
            raise wrong_option(_MODULES, each, "a path that is UTF-8") from None
        yield name, path
