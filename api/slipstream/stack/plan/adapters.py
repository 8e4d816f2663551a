"""The adapters that a user asks for, in vLLM's words, as the core takes them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import msgspec

from slipstream.errors import wrong_option
from slipstream.stack.plan.engine_options import VLLM
from slipstream.stack.settings import StackSettings
from slipstream_ipc.messages import MAX_LORAS
from slipstream_ipc.validation.lora_name import why_no_lora_name
from slipstream_ipc.validation.simulated_model import SIMULATED

_MODULES = "lora_modules"
_MORE = 64  # places by default, for adapters that are loaded later


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
        _check_not_given(settings, "enable_lora")
        return None
    _check_place(settings, model)
    modules: dict[str, str] = {}
    for name, path in _modules(given, served_names):
        if allowed := why_no_lora_name(name):
            raise wrong_option(_MODULES, name, allowed)
        if name in served_names or name in modules:
            raise wrong_option(_MODULES, name, "names that nothing else has here")
        modules[name] = os.path.abspath(os.path.expanduser(path))
    if len(modules) > MAX_LORAS:
        raise wrong_option(_MODULES, len(modules), f"at most {MAX_LORAS} adapters")
    is_updatable = settings.allow_runtime_lora_updating
    most = settings.max_loras
    if most is None:
        most = min(MAX_LORAS, max(1, len(modules)) + is_updatable * _MORE)
    if most < len(modules):
        allowed = f"at least {len(modules)}, the adapters of lora_modules"
        raise wrong_option("max_loras", most, allowed)
    options = {
        "modules": list(modules.items()),
        "max_rank": settings.max_lora_rank,
        "max_loras": most,
    }
    if settings.lora_gib is not None:
        options["gib"] = settings.lora_gib
    if not is_updatable:
        _check_not_given(settings, "allow_runtime_lora_updating")
        return options
    return {**options, "is_updatable": True, "roots": _roots(settings, modules.values())}


def _check_not_given(settings: StackSettings, without: str) -> None:
    """Refuse options that have no effect without another. Raises: BadRequestError."""
    names = ["allow_runtime_lora_updating", "lora_root", "lora_gib"]
    if without in names:
        names = ["lora_root"]
    for name in names:
        if value := getattr(settings, name):
            raise wrong_option(name, value, f"none without {without}")


def _roots(settings: StackSettings, modules: Iterable[str]) -> list[str]:
    """The folders below which adapters may be loaded, as given. Raises: BadRequestError."""
    given = settings.lora_root
    named = (given,) if isinstance(given, str) else given
    found = [os.path.abspath(os.path.expanduser(each)) for each in named] or list(modules)
    if not found:
        allowed = "a folder, as there are no lora_modules whose folders it could be"
        raise wrong_option("lora_root", given, allowed)
    for each in found:
        if named and not os.path.isdir(each):
            raise wrong_option("lora_root", each, "a folder")
    return found


def _check_place(settings: StackSettings, model: str) -> None:
    """Refuse adapters where they are not computed. Raises: BadRequestError."""
    if settings.engine == VLLM:  # which says itself what it computes
        return
    for is_so, where in (
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
