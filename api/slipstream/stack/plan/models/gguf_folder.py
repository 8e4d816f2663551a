"""Has a GGUF file unfolded into a model's folder before a stack starts.

The core's program does it (`slipstream_core.model.gguf`), once: the processes of the stack are told
of the folder, and know nothing of the file. A file of a hub is downloaded first.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from slipstream.errors import wrong_option
from slipstream.stack.plan.models.model_source import folder_or_hub_id, is_gguf
from slipstream.stack.settings import StackSettings

_PROGRAM = "slipstream_core.model.gguf"


def with_gguf_folder(
    settings: StackSettings, model: str, tokenizer: str, environment: Mapping[str, str]
) -> tuple[str, str]:
    """Model and tokenizer with the folder in place of a GGUF file, or as they are.

    model, tokenizer: as `model_and_tokenizer` returns them. environment: as `hub_environment`
    returns it. Raises: BadRequestError for a file that cannot be served, and for a load_format that
    contradicts the model.
    """
    config = settings.hf_config_path
    _check_load_format(settings.load_format, model)
    if not is_gguf(model):
        if config is not None:
            allowed = f"None with {model}, which is no GGUF file and has a config.json"
            raise wrong_option("hf_config_path", config, allowed)
        return model, tokenizer
    request = {
        "model": model,
        "tokenizer": None if tokenizer == model else tokenizer,
        "config": None if config is None else folder_or_hub_id("hf_config_path", config),
        "revision": settings.revision,
    }
    answer = _unfold(request, environment)
    if "error" in answer:
        allowed = f"a GGUF file that can be served ({answer['error']})"
        raise wrong_option("model", settings.model, allowed)
    folder = str(answer["folder"])
    return folder, folder if tokenizer == model else tokenizer


def _check_load_format(given: str, model: str) -> None:
    """Raise BadRequestError for a format that a model's weights are not in."""
    if given == "auto" or (given == "gguf") == is_gguf(model):
        return
    allowed = "auto or gguf" if is_gguf(model) else "auto, hf or safetensors"
    what = "has its weights in a GGUF file" if is_gguf(model) else "has no GGUF file"
    raise wrong_option("load_format", given, f"{allowed}, as {model} {what}")


def _unfold(request: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    # from the root folder: what lies in the user's is not imported
    done = subprocess.run(  # this interpreter, and a module by name
        [sys.executable, "-m", _PROGRAM],
        input=msgspec.json.encode(request),
        stdout=subprocess.PIPE,  # progress bars go to stderr
        env={**os.environ, **environment},
        cwd=Path("/"),
        check=False,
    )
    try:
        return msgspec.json.decode(done.stdout, type=dict[str, Any])
    except msgspec.DecodeError:
        return {"error": f"{_PROGRAM} ended with {done.returncode}"}
