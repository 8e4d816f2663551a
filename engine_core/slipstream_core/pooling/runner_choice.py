"""Chooses what a model is served for, by vLLM's words: `--runner` and `--convert`."""

from __future__ import annotations

from slipstream_core.config import CoreConfig
from slipstream_core.load_error import ModelLoadError
from slipstream_ipc.messages import PoolingTask
from slipstream_ipc.validation.simulated_model import SIMULATED

_RANDOM = "random:"
# ends of classes' names whose models generate, in the order in which they are looked for
_GENERATING = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "ChatModel")
_EMBEDDING = ("ForTextEncoding", "EmbeddingModel", "ForMaskedLM", "ForPreTraining", "Model")
_CLASSIFYING = "ForSequenceClassification"


def pooling_task(config: CoreConfig) -> PoolingTask | None:
    """The task of `config.model`; None: it generates. Raises ModelLoadError where it
    cannot be served as it is asked for.
    """
    convert: PoolingTask | None = None
    if config.convert == "embed" or config.convert == "classify":
        convert = config.convert
    asks = config.runner == "pooling" or convert is not None
    if config.runner == "generate":
        if convert is not None:
            raise ModelLoadError(config.model, f"convert is {convert!r}, but runner is 'generate'")
        return None
    if config.model.startswith((SIMULATED, _RANDOM)) or config.engine != "slipstream":
        if asks:
            what = "for classes" if convert == "classify" else "for embeddings"
            raise ModelLoadError(config.model, f"it cannot be served {what}")
        return None
    found = convert or _task_of_files(config) or ("embed" if asks else None)
    if found is not None and config.tensor_parallel_size > 1:
        what = "embeddings" if found == "embed" else "classes"
        why = f"{what} are computed by one process; set tensor_parallel_size to 1"
        raise ModelLoadError(config.model, why)
    return found


def _task_of_files(config: CoreConfig) -> PoolingTask | None:
    """The task that a model's files tell; None: none for pooling."""
    # these need transformers, which a simulated model does not
    from slipstream_core.model.hub import locate, read_json
    from slipstream_core.pooling.sentence_transformers_folder import is_sentence_transformer

    try:
        source = locate(config.model)
    except ValueError:
        return None  # the loader says what is wrong
    given = {**(read_json(source, "config.json") or {}), **config.hf_overrides}
    name = str((given.get("architectures") or [""])[0])
    if name.endswith(_CLASSIFYING):
        return "classify"
    if is_sentence_transformer(source):
        return "embed"
    embeds = not name.endswith(_GENERATING) and name.endswith(_EMBEDDING)
    return "embed" if embeds else None
