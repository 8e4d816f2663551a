"""Chooses what a model is served for, by vLLM's words: `--runner` and `--convert`."""

from __future__ import annotations

from slipstream_core.config import CoreConfig
from slipstream_core.load_error import ModelLoadError
from slipstream_ipc.validation.simulated_model import SIMULATED

_RANDOM = "random:"
# ends of classes' names whose models generate, in the order in which they are looked for
_GENERATING = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "ChatModel")
_EMBEDDING = ("ForTextEncoding", "EmbeddingModel", "ForMaskedLM", "ForPreTraining", "Model")
_CLASSIFYING = "ForSequenceClassification"


def serves_pooling(config: CoreConfig) -> bool:
    """True if `config.model` is to be served for embeddings. Raises ModelLoadError where it cannot
    be served as it is asked for.
    """
    asks = config.runner == "pooling" or config.convert == "embed"
    if config.runner == "generate":
        if config.convert == "embed":
            raise ModelLoadError(config.model, "convert is 'embed', but runner is 'generate'")
        return False
    if config.model.startswith((SIMULATED, _RANDOM)) or config.engine != "slipstream":
        if asks:
            raise ModelLoadError(config.model, "it cannot be served for embeddings")
        return False
    if not asks and not _embeds(config.model):
        return False
    if config.tensor_parallel_size > 1:
        why = "embeddings are computed by one process; set tensor_parallel_size to 1"
        raise ModelLoadError(config.model, why)
    return True


def _embeds(model: str) -> bool:
    """True if a model's files say that it is an embedder. Raises ModelLoadError."""
    # these need transformers, which a simulated model does not
    from slipstream_core.model.hub import locate, read_json
    from slipstream_core.pooling.sentence_transformers_folder import is_sentence_transformer

    try:
        source = locate(model)
    except ValueError:
        return False  # the loader says what is wrong
    if is_sentence_transformer(source):
        return True
    names = (read_json(source, "config.json") or {}).get("architectures") or [""]
    name = str(names[0])
    if name.endswith(_CLASSIFYING):
        why = (
            f"{name} classifies, which is not supported yet; --convert embed serves its embeddings"
        )
        raise ModelLoadError(model, why)
    return not name.endswith(_GENERATING) and name.endswith(_EMBEDDING)
