"""Options of vLLM, SGLang and llama.cpp under other names here, or without a counterpart."""

from __future__ import annotations

from collections.abc import Container

_OURS = {
    # vLLM
    "--url": "--address",
    "--base-url": "--address",
    "--api-server-count": "--http-workers",
    "--num-gpu-blocks-override": "--num-blocks",
    "--cudagraph-capture-sizes": "--cuda-graph-sizes",
    "--system-prompt": "--system",
    "--tool-call-parser": "--tool-format",
    "--reasoning-parser": "--reasoning-format",
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
    "a checkpoint says how its weights are quantised: FP8, MXFP4 and compressed-tensors are "
    "dequantised when it is loaded, others are not supported"
)
_QUANTISED_CACHE = "quantised caches are not supported yet"
_LORA = "LoRA is not supported yet"
_SPECULATIVE = "speculative decoding is not supported yet"
_MISSING = {
    "--pipeline-parallel-size": _SEVERAL_DEVICES,
    "--data-parallel-size": "--replicas runs whole servers side by side",
    "--distributed-executor-backend": _SEVERAL_DEVICES,
    "--enable-expert-parallel": _SEVERAL_DEVICES,
    "--tensor-split": _SEVERAL_DEVICES,
    "--headless": "a machine whose --node-rank is not 0 has no HTTP server",
    "--quantization": _QUANTISED,
    "--kv-cache-dtype": _QUANTISED_CACHE,
    "--load-in-4bit": _QUANTISED,
    "--load-in-8bit": _QUANTISED,
    "--enable-lora": _LORA,
    "--lora": _LORA,
    "--lora-modules": _LORA,
    "--lora-paths": _LORA,
    "--speculative-config": _SPECULATIVE,
    "--speculative-algorithm": _SPECULATIVE,
    "--draft-model": _SPECULATIVE,
    "--model-draft": _SPECULATIVE,
    "--cpu-offload-gb": "weights are not offloaded",
    "--swap-space": "a preempted request is computed again, not swapped",
    "--n-gpu-layers": "layers are not divided between a card and the CPU: see --device",
    "--enable-auto-tool-choice": "tool calls are read wherever the model's format is known",
    "--chat-template": "the chat template is the tokenizer's own",
    "--load-format": "weights are read from safetensors",
}


def hint_for(name: str, options: Container[str]) -> str:
    """What another engine's option is here, to follow `unknown option NAME`; empty if not known.

    options: those of the command.
    """
    if (ours := _OURS.get(name)) in options:
        return f"; here it is {ours}"
    return f": {_MISSING[name]}" if name in _MISSING else ""
