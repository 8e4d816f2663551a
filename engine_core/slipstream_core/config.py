"""The core's configuration object, validated on construction."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from slipstream_ipc.messages import AdapterRef

Positive = Annotated[int, Meta(ge=1)]


class NodesConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The machines over which the ranks of one core are spread, with equally many on each.

    `num` counts them. `address` is where the core listens for the ranks of the others, tcp:// and
    the address of a network interface of its machine, to which everything is bound that the ranks
    open. `keys` is the folder of CURVE keys: the server's on the core's machine, a client's on the
    others; None with `insecure`, which is for loopback alone.
    `join_timeout_s` is how long the core waits for ranks to come; after `silent_s` without a sign
    of life a rank, or the core, counts as lost.
    """

    num: Annotated[int, Meta(ge=2, le=64)]
    address: str
    keys: str | None = None
    insecure: bool = False
    join_timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    silent_s: Annotated[float, Meta(gt=0)] = 10.0


class SpeculativeConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The drafter, and its bounds: `ngram` drafts from a request's own text, `suffix` also from
    answers that were given before under the same prefix root, up to `suffix_cache_mib` of them;
    `draft_model` has a smaller `model` of the same tokenizer foresee them.

    `num_speculative_tokens` is the most drafts of a row in a step. What followed when a row's last
    `prompt_lookup_max` tokens occurred before is drafted, or those of fewer, down to
    `prompt_lookup_min`.
    """

    method: Literal["ngram", "suffix", "draft_model"]
    model: str | None = None
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=16)]
    prompt_lookup_min: Annotated[int, Meta(ge=1, le=32)] = 2
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=32)] = 4
    suffix_cache_mib: Annotated[int, Meta(ge=1, le=65536)] = 64

    def __post_init__(self) -> None:
        """Raises ValueError, which msgspec's decoders turn into a ValidationError."""
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError("prompt_lookup_min is more than prompt_lookup_max")
        if (self.model is None) == (self.method == "draft_model"):
            raise ValueError("draft_model needs a model, and no other method has one")


class LoraConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The adapters that a core serves: names and folders. max_rank: the largest rank of any.
    max_loras: how many there is room for, replaced ones that streams still have among them. gib:
    of memory; None: as the machine has it free. is_updatable: clients may load and unload some,
    from folders below `roots`. retired: those that streams of the core before may have.
    """

    modules: tuple[tuple[str, str], ...] = ()
    retired: tuple[AdapterRef, ...] = ()
    is_updatable: bool = False
    roots: tuple[str, ...] = ()
    gib: Annotated[float, Meta(gt=0)] | None = None
    max_rank: Annotated[int, Meta(ge=1, le=512)]
    max_loras: Annotated[int, Meta(ge=1, le=1024)]


class CoreConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one engine core; unknown names and values out of range are refused.

    `runner` is what the model is served for; auto takes an encoder, and a model that comes with
    sentence-transformers' modules, for pooling. `convert` makes an embedder of any model, or asks
    for its classes.
    `served_model_name` is the name that clients see; by default `model`. `aliases` are other names
    that they may use.
    `tokenizer` is the folder or hub id of the tokenizer that prompts and texts are made with (None:
    the model's own).
    `kv_cache_gib` bounds the cache on the CPU, `gpu_memory_utilization` is the fraction of a card's
    memory that this core may use in all; `num_blocks` overrides both.
    `state_cache_gib` is the part of the CPU's cache for the recurrent states that the prefix cache
    keeps (None: a share); with `num_blocks` it comes on top.
    `touches_cache` takes the memory of a CPU's cache, and of prompts, before the first request.
    `card_defaults` names those of `max_num_seqs` and `max_num_batched_tokens` that are not set: a
    large card replaces them (runner/card_defaults).
    `attention_backend` is what attends: Triton's kernels, which need a card, or torch's operators;
    auto takes the first where they can serve.
    `enforce_eager` disables CUDA graphs; `cuda_graph_sizes` are the batch sizes to capture (empty:
    see `batch_sizes` in runner/capture_sizes). Steps of several ranks are captured only with
    `cuda_graphs_over_ranks`; with `enable_torch_symm_mem` their small sums are made in memory that
    cards share.
    `enable_prefix_caching` lets requests with equal prefixes share blocks.
    `native` lets a CPU run float32 models with this project's kernels, where there is a C compiler,
    and with a trace of the model's forward pass, where it can be traced; without it a card uses
    neither Triton kernels nor CUDA graphs.
    `runtime_dir` is the stack's directory: the core notes there which streams its steps compute,
    and reads its predecessor's note where that one `died_within` (an exception, or a fatal signal
    that was not sent to it). None: no note is written.
    `predecessor_ended_s` is when that core ended (CLOCK_MONOTONIC); 0.0: there was none.
    `trace` is the path of the timeline; this process writes its part beside it.
    `step_timeout_s` is how long a step may take before the device counts as stuck, `hang_timeout_s`
    how long a rank of this machine may be stopped by a signal, once the core serves.
    `max_waiting` and `max_waiting_tokens` bound the waiting requests of a tenant, and their tokens,
    while it is the only one. All tenants together have twice that; each may have no more than is
    still free of it. By default the tokens are what fits into a sixteenth of the machine's memory.
    `max_logprobs` is the most log-probabilities per token that a request may ask for; -1 is no
    limit.
    `logprobs_gib` bounds the log-probabilities of all requests together; requests that find no room
    wait.
    `response_store_mib` bounds the kept answers that are held for workers that die.
    `kv_cache_dtype` is how the cache holds keys and values (`attention/cache_formats.py`).
    `quantization` is weights' codes (`kernels/codes/online.py`), or the checkpoint's own method.
    `hf_overrides` replaces parts of the model's config.json. `generation_config` is the folder that
    has the sampling defaults in its generation_config.json, auto for the model's, or vllm for none;
    `override_generation_config` replaces some of them.
    `language_model_only` serves a vision model as text, without its towers.
    `speculative_config` has tokens drafted, where the model's rows can be verified; None: none are.
    `lora` are adapters that requests may name; None: there are none.
    `trust_remote_code` lets code beside the weights run in this process.
    `tensor_parallel_size` is the number of ranks that compute the model together: this process and
    others that it starts; `threads` and `kv_cache_gib` are then of each rank and of all together.
    `nodes` are the machines that they are on, each with an equal number; None: all are on this one.
    `engine` is what schedules and computes: this project's scheduler and runner, or vLLM's engine
    core, which gets `engine_args` beside what these settings say.
    """

    model: str
    runner: Literal["auto", "generate", "pooling"] = "auto"
    convert: Literal["auto", "none", "embed", "classify"] = "auto"
    served_model_name: str | None = None
    aliases: tuple[str, ...] = ()
    tokenizer: str | None = None
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
    touches_cache: bool = False
    threads: Positive | None = None
    language_model_only: bool = False
    native: bool = True
    max_waiting: Positive = 16384
    max_waiting_tokens: Positive | None = None
    max_logprobs: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = 20
    logprobs_gib: Annotated[float, Meta(gt=0)] = 2.0
    response_store_mib: Annotated[float, Meta(ge=0)] = 64.0
    step_timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    hang_timeout_s: Annotated[float, Meta(gt=0)] = 10.0
    trust_remote_code: bool = False
    hf_overrides: dict[str, Any] = {}
    quantization: str | None = None
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "int8_per_token_head"] = "auto"
    generation_config: str = "auto"
    override_generation_config: dict[str, float] = {}
    speculative_config: SpeculativeConfig | None = None
    lora: LoraConfig | None = None
    trace: str | None = None
    runtime_dir: str | None = None
    died_within: bool = False
    predecessor_ended_s: Annotated[float, Meta(ge=0)] = 0.0
    gpu_memory_utilization: Annotated[float, Meta(gt=0, lt=1)] = 0.9
    enable_prefix_caching: bool = True
    state_cache_gib: Annotated[float, Meta(ge=0, le=1 << 20)] | None = None
    card_defaults: tuple[Literal["max_num_seqs", "max_num_batched_tokens"], ...] = ()
    attention_backend: Literal["auto", "triton", "torch"] = "auto"
    enforce_eager: bool = False
    cuda_graph_sizes: Annotated[tuple[Positive, ...], Meta(max_length=1024)] = ()
    cuda_graphs_over_ranks: bool = False
    enable_torch_symm_mem: bool = False
    tensor_parallel_size: Annotated[int, Meta(ge=1, le=64)] = 1
    nodes: NodesConfig | None = None
    engine: Literal["slipstream", "vllm"] = "slipstream"
    engine_args: dict[str, Any] = {}

    @property
    def num_nodes(self) -> int:
        """The machines that ranks are on."""
        return 1 if self.nodes is None else self.nodes.num

    @property
    def num_local_ranks(self) -> int:
        """The ranks of each machine."""
        return self.tensor_parallel_size // self.num_nodes


class RemoteRankConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a rank on another machine than the core.

    index: among all ranks, from 1. core: this machine's own settings, whose `nodes` say where the
    core is; those that all ranks share are the core's, which it sends.
    """

    core: CoreConfig
    index: Positive


class RankConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a rank on the core's machine that is not the core itself.

    index: among all ranks, from 1. The descriptors are inherited: where the group meets, the memory
    of exchanges and of plans, this rank's doorbell, and what it rings when it releases a plan.
    """

    core: CoreConfig
    index: Positive
    meeting_fd: int
    exchange_fd: int
    memory_fd: int
    doorbell: int
    room_fd: int
