"""The core's one configuration object, validated where it is made."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

Positive = Annotated[int, Meta(ge=1)]


class CoreConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one engine core; unknown names and values out of range are refused.

    `served_model_name` is what clients are told; by default `model`.
    `kv_cache_gib` bounds the cache on the CPU, `gpu_memory_utilization` is the share of a card
    that this core may use in all; `num_blocks` overrides both (tests).
    `enforce_eager` records no decode steps as CUDA graphs; `cuda_graph_sizes` are the numbers of
    requests of those that are recorded (none given: see `graphs.batch_sizes`).
    `enable_prefix_caching` lets requests share the blocks of equal beginnings.
    `native` lets a CPU compute float32 models with kernels of our own, where there is a C compiler,
    and with a recording of the model's forward, where one can be made; without it a card does
    without Triton's, and records nothing.
    `runtime_dir` is the stack's own folder: the core notes there which streams its steps compute,
    and where its predecessor `died_within` (an exception, a fatal signal that nobody sent), it
    reads what that one noted. None: nothing is noted.
    `trace` is the file that a timeline is to become; this process leaves its part beside it.
    `step_timeout_s` is how long a step may take before the device counts as stuck.
    `max_waiting` and `max_waiting_tokens` are how many requests, and tokens of theirs, a tenant may
    have waiting while it is the only one. Of several each may have as much as is left to the
    others; all together have at most twice that. By default the tokens are what fits into a
    sixteenth of the machine's memory.
    `max_logprobs` is how many log-probabilities to a token a request may have; -1 is no limit.
    `logprobs_gib` is what the log-probabilities of all requests may take together; those that find
    no room wait.
    `trust_remote_code` lets code that lies beside the weights run in this process.
    """

    model: str
    served_model_name: str | None = None
    address: str  # ipc:// endpoint the worker connects to
    incarnation: Annotated[int, Meta(ge=0)] = 0
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_num_seqs: Positive = 256
    max_num_batched_tokens: Positive = 2048
    max_model_len: Positive | None = None
    block_size: Annotated[int, Meta(ge=1, le=256)] = 16
    kv_cache_gib: Annotated[float, Meta(gt=0)] = 1.0
    num_blocks: Positive | None = None
    threads: Positive | None = None
    native: bool = True
    max_waiting: Positive = 16384
    max_waiting_tokens: Positive | None = None
    max_logprobs: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = 20
    logprobs_gib: Annotated[float, Meta(gt=0)] = 2.0
    step_timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    trust_remote_code: bool = False
    trace: str | None = None
    runtime_dir: str | None = None
    died_within: bool = False
    gpu_memory_utilization: Annotated[float, Meta(gt=0, lt=1)] = 0.9
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    cuda_graph_sizes: Annotated[tuple[Positive, ...], Meta(max_length=1024)] = ()
