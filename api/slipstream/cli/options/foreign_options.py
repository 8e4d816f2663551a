"""Options of SGLang, llama.cpp and vLLM's clients under other names here, or without a counterpart.

Those of vLLM's server are in `slipstream.vllm_flags`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

_OURS = {
    # vLLM's clients
    "--url": "--address",
    "--base-url": "--address",
    "--system-prompt": "--system",
    # SGLang
    "--tp": "--tensor-parallel-size",
    "--tp-size": "--tensor-parallel-size",
    "--dist-init-addr": "--master-addr",
    "--model-path": "--model",
    "--tokenizer-path": "--tokenizer",
    "--context-length": "--max-model-len",
    "--max-running-requests": "--max-num-seqs",
    "--max-prefill-tokens": "--max-num-batched-tokens",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--page-size": "--block-size",
    "--disable-cuda-graph": "--enforce-eager",
    # llama.cpp
    "--ctx-size": "--max-model-len",
    "--n-predict": "--max-tokens",
    "--predict": "--max-tokens",
    "--temp": "--temperature",
    "--parallel": "--max-num-seqs",
    "--batch-size": "--max-num-batched-tokens",
    "--ssl-key-file": "--ssl-keyfile",
    "--ssl-cert-file": "--ssl-certfile",
}
_SEVERAL_DEVICES = "of several devices only --tensor-parallel-size is supported yet"
_QUANTISED = (
    "a checkpoint says how its weights are quantised; --quantization has others' kept as codes"
)
_LORA = "--enable-lora --lora-modules NAME=PATH serves adapters (docs/lora.md)"
_SPECULATIVE = "--speculative-config says how tokens are drafted: ngram, suffix or draft_model"
_MISSING = {
    "--tensor-split": _SEVERAL_DEVICES,
    "--load-in-4bit": _QUANTISED,
    "--load-in-8bit": _QUANTISED,
    "--lora": _LORA,
    "--lora-paths": _LORA,
    "--speculative-algorithm": _SPECULATIVE,
    "--draft-model": _SPECULATIVE,
    "--model-draft": _SPECULATIVE,
    "--n-gpu-layers": "layers are not divided between a card and the CPU: see --device",
}


def here(name: str) -> str | None:
    """The option here that is another engine's of this name; None if not known."""
    return _OURS.get(name)


def renamed(words: Iterable[str], options: Container[str]) -> tuple[list[str], list[str]]:
    """The words of a command line with options of other engines as those here, and lines for the
    log that say so. options: those of the command.
    """
    found, notes = [], []
    for word in words:
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        ours = None if name in options else here(name)
        if ours is not None and ours in options:
            notes.append(f"{name} is {ours} here")
            word = f"{ours}{equals}{value}"
        found.append(word)
    return found, notes


def hint_for(name: str) -> str:
    """The reason why there is no such option, to follow `unknown option NAME`; empty if not
    known.
    """
    return f": {_MISSING[name]}" if name in _MISSING else ""
