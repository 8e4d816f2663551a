"""The options of `vllm serve` and what each of them means here.

`vllm_flags.tsv` holds facts: the options of vLLM 0.33.0 as its own parser has them, with their
other spellings, kinds and defaults. This module says of each what becomes of it: another name for
an option here, taken without effect, or refused but for the values that change nothing. An option
that stands in none of the tables is called the same here. `docs/from-vllm.md` is made of both.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from slipstream.errors import wrong_option

PAGE = "see docs/from-vllm.md"
Kind = Literal["flag", "value", "values", "optional", "object"]


class Flag(NamedTuple):
    """An option of vLLM's.

    name: with underscores. others: its other spellings, such as `-tp`. kind: how many words its
    value has; the keys of an `object` may be given one by one (`--compilation-config.mode 3`).
    """

    name: str
    others: tuple[str, ...]
    kind: Kind
    default: Any


class Spelling(NamedTuple):
    """An option as it was written. key: the part behind a dot. value: what the spelling itself
    says, as `--no-x` says False and `-O3` says 3.
    """

    flag: Flag
    key: str | None = None
    value: Any = None


class Meaning(NamedTuple):
    """The meaning of a vLLM option here. name: the option here, None where it has no effect.
    note: a line for the log, empty where there is nothing to tell.
    """

    name: str | None
    value: Any = None
    note: str = ""


class Renamed(NamedTuple):
    """Another name for the same. values: by which other value a value is replaced; None for none.
    note: what is to be known of it. Without the option here, a command or an interface takes what
    changes nothing.
    """

    name: str
    values: Mapping[Any, Any] = {}
    note: str = ""


class Without(NamedTuple):
    """Taken whatever it says, without effect."""

    why: str


class Only(NamedTuple):
    """Refused, but for the default and these values, which change nothing.

    keys: those of an object, which may say what they like.
    """

    why: str
    values: tuple[Any, ...] = ()
    keys: tuple[str, ...] = ()


Treatment = Renamed | Without | Only

RENAMED: dict[str, Renamed] = {
    "api_server_count": Renamed("http_workers"),
    "cudagraph_capture_sizes": Renamed("cuda_graph_sizes"),
    "data_parallel_size": Renamed(
        "replicas", {1: None}, "whole servers side by side behind one address"
    ),
    "disable_log_stats": Renamed("log_stats_interval_s", {False: None, True: 0}),
    "headless": Renamed("no_http", {False: None}),
    "max_num_queued_reqs": Renamed("max_waiting", note="waiting requests alone, of each tenant"),
    "max_num_queued_tokens": Renamed("max_waiting_tokens", note="of each tenant"),
    "num_gpu_blocks_override": Renamed("num_blocks"),
    "reasoning_parser": Renamed("reasoning_format", {"": None}),
    "shutdown_timeout": Renamed("drain_s"),
    "tool_call_parser": Renamed("tool_format"),
}

_KERNELS = "kernels and graphs are chosen by the device"
_LOADING = "weights are mapped from safetensors files"
_SCHEDULE = "the scheduler decides it"
_TEXT = "only text is read"
_LORAS = "each adapter is kept in memory, in float32, as it is"
_MAMBA = "recurrent states are kept as transformers computes them"
_MIXED = "it says how experts or replicas are dealt out, and they are not"
_LOGS = "--access-log and $SLIPSTREAM_LOG_LEVEL say what is logged"
_SERVER = "the HTTP server has limits of its own"
_WITHOUT: dict[str, str] = {
    _KERNELS: """
        all2all_backend async_scheduling attention_config compilation_config disable_cascade_attn
        disable_custom_all_reduce disable_nccl_for_dp_synchronization enable_batch_sharded_sampling
        enable_cumem_allocator enable_flashinfer_autotune enable_nccl_comm_suspend
        enable_shm_tensor_arena gdn_prefill_backend ir_op_priority jit_monitor_mode
        jit_monitor_verbose kda_decode_backend kda_prefill_backend kernel_config linear_backend
        max_cudagraph_capture_size moe_backend monokernel numa_bind numa_bind_cpus numa_bind_nodes
        optimization_level performance_mode sparse_indexer_topk_backend use_fp64_gumbel""",
    _LOADING: """
        ignore_patterns max_parallel_loading_workers pt_load_map_location safetensors_load_strategy
        safetensors_prefetch_block_size safetensors_prefetch_num_threads use_tqdm_on_load""",
    _SCHEDULE: """
        disable_hybrid_kv_cache_manager kv_sharing_fast_prefill long_prefill_token_threshold
        long_prefill_token_threshold_adaptive max_num_active_seqs max_num_scheduled_tokens
        prefill_schedule_interval prefix_cache_retention_interval prefix_caching_hash_algo
        prefix_match_unit scheduler_reserve_full_isl swa_bounded_replay watermark""",
    "certificates are read again as they change": "enable_ssl_refresh",
    "long prompts always go in chunks": "enable_chunked_prefill",
    "priorities of requests count": "scheduling_policy",
    "requests without a seed of their own are not repeatable, but those of LLM(seed=N) are": "seed",
    _TEXT: """
        allowed_local_media_path allowed_media_domains disable_chunked_mm_input ec_manager_config
        enable_mm_processor_stats interleave_mm_strings limit_mm_per_prompt
        media_io_kwargs mm_device_do_normalize mm_encoder_attn_backend mm_encoder_attn_dtype
        mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path
        mm_encoder_tp_mode mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_cache_gb
        mm_processor_cache_type mm_processor_device mm_processor_kwargs
        mm_shm_cache_max_object_size_mb mm_tensor_ipc skip_mm_profiling video_pruning_method
        video_pruning_rate""",
    _LORAS: """
        default_mm_loras enable_mixed_moe_lora_format enable_moe_shared_loras
        enable_tower_connector_lora fully_sharded_loras lora_dtype lora_target_modules
        max_cpu_loras max_lora_cls_labels specialize_active_lora""",
    _MAMBA: """
        enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint mamba_backend
        mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_cache_philox_rounds
        mamba_ssm_cache_dtype mamba_ssu_algorithm replayssm_buffer_len use_replayssm""",
    _MIXED: """
        cp_kv_cache_interleave_size data_parallel_backend dbo_decode_token_threshold
        dbo_prefill_token_threshold dcp_comm_backend dcp_kv_cache_interleave_size dcp_q_replicate
        dp_supervisor_probe_failure_threshold dp_supervisor_probe_interval_s
        dp_supervisor_probe_timeout_s dp_sync_interval data_parallel_rpc_port
        data_parallel_supervisor_port elastic_ep_max_dp_size enable_ep_weight_filter eplb_config
        expert_placement_strategy ubatch_size""",
    _LOGS: """
        aggregate_engine_logging disable_access_log_for_endpoints disable_uvicorn_access_log
        enable_log_deltas enable_log_outputs enable_log_requests enable_logging_iteration_details
        fail_on_environ_validation log_config_file log_error_stack log_level logging_config
        max_log_len uvicorn_log_level""",
    "/metrics has what is counted": """
        collect_detailed_traces cudagraph_metrics custom_histogram_buckets
        enable_layerwise_nvtx_tracing enable_mfu_metrics kv_cache_metrics kv_cache_metrics_sample
        per_request_spec_decode_metrics ray_workers_use_nsight show_hidden_metrics_for_version""",
    _SERVER: "h11_max_header_count h11_max_incomplete_event_size renderer_num_workers",
    "there are no such pages; /openapi.json stays": "disable_fastapi_docs enable_offline_docs",
    "answers always have it": """
        enable_prompt_tokens_details enable_request_id_headers enable_tokenizer_info_endpoint""",
    "tool calls are read wherever the model's format is known": "enable_auto_tool_choice",
    "with the choice `none` a model sees no tools": "exclude_tools_when_tool_choice_none",
    "a stack restarts what fails": """
        distributed_timeout_seconds cpu_distributed_timeout_seconds watchdog_config
        enable_fault_tolerance fault_tolerance_config""",
    "it concerns endpoints that are not here": """
        anthropic_disabled_thinking_effort cohere_format cohere_is_reasoning_model
        enable_flash_late_interaction response_role""",
    "it says how weights are offloaded, and they are not": """
        cpu_offload_params kv_offloading_backend offload_backend offload_group_size
        offload_num_in_group offload_params offload_prefetch_step""",
    "models are those of transformers": "config_format model_impl",
    "a checkpoint says how its weights are quantised": "allow_deprecated_quantization",
    "models do not sleep": """
        sleep_mode_backend sleep_mode_offload_cudagraph sleep_preserve_parameter_names""",
    "answers have no such field": "fingerprint_mode fingerprint_value",
}
_FORMERLY_WITHOUT: dict[str, str] = {
    _KERNELS: "max_seq_len_to_capture disable_async_output_proc use_v2_block_manager",
    _SCHEDULE: """
        max_long_partial_prefills max_num_partial_prefills multi_step_stream_outputs
        num_scheduler_steps preemption_mode scheduler_delay_factor""",
    _LORAS: "enable_lora_bias long_lora_scaling_factors lora_extra_vocab_size",
    _TEXT: "disable_mm_preprocessor_cache",
    _SERVER: "disable_frontend_multiprocessing tokenizer_pool_size tokenizer_pool_type",
    "reasoning is read wherever the model's format is known": "enable_reasoning",
    "a preempted request is computed again": "swap_space",
    "one back end makes all grammars": "guided_decoding_backend",
}
"""Options that vLLM had before 0.33."""

_DEVICES = "of several devices only --tensor-parallel-size is supported yet"
_REPLICAS = "--replicas runs whole servers side by side"
_QUANTISED = (
    "a checkpoint says how its weights are quantised: FP8, compressed-tensors, AWQ, GPTQ, "
    "AutoRound, bitsandbytes, ModelOpt, Quark, MLX, BitNet, NVFP4 and MXFP4 are served, "
    "others refused"
)
_SPECULATIVE = "--speculative-config says how tokens are drafted: ngram, suffix or draft_model"
_POOLING = "the model's own files say how it is pooled"
_CODE = "no code of users runs in the server"
_ROPE = "--hf-overrides says how positions are scaled"
_PLANNED = "not supported yet"
_TRANSFER = "caches and weights are not handed to other servers"
ONLY: dict[str, Only] = {
    "additional_config": Only(_PLANNED),
    "allow_credentials": Only("browsers send keys in headers, not cookies"),
    "allowed_headers": Only("headers are those that the endpoints read"),
    "allowed_methods": Only("methods are those that the endpoints have"),
    "aux_output_config": Only(_PLANNED),
    "chat_template_content_format": Only("content is text", ("string",)),
    "code_revision": Only("code is of the model's revision", ("main",)),
    "cpu_offload_gb": Only("weights are not offloaded"),
    "data_parallel_address": Only(_REPLICAS),
    "data_parallel_external_lb": Only(_REPLICAS),
    "data_parallel_hybrid_lb": Only(_REPLICAS),
    "data_parallel_multi_port_external_lb": Only(_REPLICAS),
    "data_parallel_rank": Only(_REPLICAS),
    "data_parallel_size_local": Only(_REPLICAS, (1,)),
    "data_parallel_start_rank": Only(_REPLICAS, (0,)),
    "decode_context_parallel_size": Only(_DEVICES),
    "device_ids": Only("$CUDA_VISIBLE_DEVICES names the cards"),
    "diffusion_config": Only("only text is generated"),
    "disable_sliding_window": Only("a model attends as it was trained"),
    "distributed_executor_backend": Only(_DEVICES, ("mp", "uni")),
    "ec_transfer_config": Only(_TRANSFER),
    "enable_dbo": Only(_DEVICES),
    "enable_elastic_ep": Only(_DEVICES),
    "enable_eplb": Only(_DEVICES),
    "enable_expert_parallel": Only(_DEVICES),
    "enable_force_include_usage": Only("streams ask for it with stream_options"),
    "enable_hc_sp": Only(_DEVICES),
    "enable_mm_embeds": Only(_TEXT),
    "enable_per_request_metrics": Only("/metrics has them, over all requests"),
    "enable_prompt_embeds": Only(_TEXT),
    "enable_return_routed_experts": Only(_PLANNED),
    "enable_scale_out": Only(_TRANSFER),
    "enable_server_load_tracking": Only("/metrics has the load"),
    "enable_sleep_mode": Only("models do not sleep"),
    "enable_trace_replay": Only(_PLANNED),
    "engram_config": Only(_PLANNED),
    "grpc": Only("there is no gRPC; Python clients have a protocol of their own"),
    "grpc_port": Only("there is no gRPC; Python clients have a protocol of their own"),
    "hf_token": Only("$HF_TOKEN is read"),
    "io_processor_plugin": Only(_CODE),
    "kv_cache_dtype_skip_layers": Only("all layers' caches have one type"),
    "kv_cache_memory_bytes": Only("--kv-cache-gib on a CPU, --num-blocks on a card"),
    "kv_events_config": Only(_TRANSFER),
    "kv_offloading_size": Only("caches are not offloaded", (0,)),
    "kv_transfer_config": Only(_TRANSFER),
    "logits_processors": Only(_CODE, ([],)),
    "logprobs_mode": Only("log-probabilities are the model's own"),
    "middleware": Only(_CODE),
    "mm_encoder_only": Only(_TEXT),
    "model_class_overrides": Only(_CODE),
    "model_loader_extra_config": Only(_PLANNED),
    "pipeline_parallel_size": Only(_DEVICES),
    "pooler_config": Only(_POOLING),
    "prefill_context_parallel_size": Only(_DEVICES),
    "profiler_config": Only("--trace records a timeline"),
    "quantization_config": Only(_QUANTISED),
    "reasoning_config": Only("requests have thinking_token_budget"),
    "reasoning_effort_map": Only(_PLANNED, ({},)),
    "reasoning_parser_plugin": Only(_CODE),
    "return_sampling_mask": Only(_PLANNED),
    "return_tokens_as_token_ids": Only("requests have return_token_ids"),
    "root_path": Only("a proxy takes its prefix off", ("", "/")),
    "scheduler_cls": Only(_CODE),
    "skip_tokenizer_init": Only("prompts and answers are text"),
    "spec_method": Only(_SPECULATIVE),
    "spec_model": Only(_SPECULATIVE),
    "spec_tokens": Only(_SPECULATIVE, (0,)),
    "sse_keep_alive_interval": Only(_PLANNED),
    "ssl_ca_certs": Only("clients show keys, not certificates"),
    "ssl_cert_reqs": Only("clients show keys, not certificates"),
    "ssl_ciphers": Only("ciphers are those of Python's ssl module"),
    "structured_outputs_config": Only(
        "requests say how they are answered", keys=("backend", "disable_fallback")
    ),
    "tokenizer_mode": Only("tokenizers are those of transformers", ("hf",)),
    "tokenizer_revision": Only("--revision is the model's and its tokenizer's", ("main",)),
    "tokens_only": Only("prompts and answers are text"),
    "tool_parser_plugin": Only(_CODE),
    "tool_server": Only("clients run tools"),
    "tool_strict_level": Only("tools say `strict` themselves", ("auto",)),
    "trust_request_chat_template": Only("requests cannot bring templates"),
    "trust_request_mm_kwargs": Only(_TEXT),
    "watermark_config": Only(_PLANNED),
    "weight_transfer_config": Only(_TRANSFER),
    "worker_cls": Only(_CODE),
    "worker_extension_cls": Only(_CODE),
}
_FORMERLY_RENAMED = {
    "task": Renamed(
        "runner",
        {
            "auto": None,
            "classify": "pooling",
            "embed": "pooling",
            "embedding": "pooling",
            "score": "pooling",
        },
    )
}
_FORMERLY_ONLY: dict[str, Only] = {
    "num_speculative_tokens": Only(_SPECULATIVE),
    "rope_scaling": Only(_ROPE),
    "rope_theta": Only(_ROPE),
    "speculative_model": Only(_SPECULATIVE),
}

_FORMER_FLAGS = frozenset(
    {"disable_async_output_proc", "disable_frontend_multiprocessing", "enable_lora_bias"}
    | {"disable_mm_preprocessor_cache", "enable_reasoning", "multi_step_stream_outputs"}
    | {"use_v2_block_manager"}
)

_FORMATS = ("tool_format", "reasoning_format")
_FORMATS_OF_VLLM = {
    "llama4_json": "llama3_json",
    "openai": "harmony",
    "openai_gptoss": "harmony",
    "qwen3_json": "hermes",
    "qwen3_xml": "qwen3_coder",
}
_AUTO = "auto"
_BACKENDS = {
    "FLASHINFER": _AUTO,
    "TRITON_ATTN": "triton",
    "TORCH_SDPA": "torch",
    "CPU_ATTN": _AUTO,
    "FLASH_ATTN": _AUTO,
    "FLEX_ATTENTION": _AUTO,
}
VALUES: dict[str, Mapping[Any, Any]] = {
    "attention_backend": {
        spelling: ours for name, ours in _BACKENDS.items() for spelling in (name, name.lower())
    },
    "dtype": {"half": "float16", "float": "float32"},
    "max_model_len": {_AUTO: None, -1: None, "-1": None},
    "quantization": {"None": None},
}
"""Values of options of the same name that are written otherwise here; None is the default."""
GONE: dict[tuple[str, Any], str] = {
    (
        "attention_backend",
        "flashinfer",
    ): "auto, triton or torch: FlashInfer's back end is gone, as no card has shown it faster than "
    "Triton's kernels",
}
"""Values that the release before took: which are allowed instead, and why."""


@cache
def flags() -> dict[str, Flag]:
    """The options of vLLM 0.33.0 by name."""
    found = {}
    for line in Path(__file__).with_name("vllm_flags.tsv").read_text().splitlines():
        name, others, kind, default = line.split("\t")
        flag = Flag(
            name.replace("-", "_"),
            tuple(others.split()),
            msgspec.convert(kind, Kind),
            msgspec.json.decode(default),
        )
        found[flag.name] = flag
    return found


@cache
def treatments() -> dict[str, Treatment]:
    """The treatment of options that have another name or no equivalent here, former ones
    included.
    """
    found: dict[str, Treatment] = {
        **RENAMED,
        **ONLY,
        **_FORMERLY_RENAMED,
        **_FORMERLY_ONLY,
    }
    for table in (_WITHOUT, _FORMERLY_WITHOUT):
        for why, names in table.items():
            found |= dict.fromkeys(names.split(), Without(why))
    return found


def flag_named(name: str) -> Flag | None:
    """The option of vLLM's with this name, written with underscores."""
    if (flag := flags().get(name)) is not None:
        return flag
    if name not in treatments():
        return None
    return Flag(name, (), "flag" if name in _FORMER_FLAGS else "value", None)


def names_of_vllm() -> frozenset[str]:
    """The options of vLLM's that are called otherwise here, or are no options here."""
    return frozenset(treatments())


@cache
def _short_spellings() -> dict[str, Flag]:
    return {other: flag for flag in flags().values() for other in flag.others}


def spelled(option: str) -> Spelling | None:
    """The option of vLLM's that is spelled so, such as `-tp`, `--no-x` or `--x.key`; or None."""
    if (flag := _short_spellings().get(option)) is not None:
        return Spelling(flag, value=True if flag.kind == "flag" else None)
    if option.startswith("-O") and option[2:].isdecimal():
        return Spelling(flags()["optimization_level"], value=option[2:])
    option, dot, key = option.partition(".")
    if not option.startswith("--") or (dot and not key):
        short = _short_spellings().get(option)
        return (
            Spelling(short, key) if dot and short is not None and short.kind == "object" else None
        )
    name = option[2:].replace("-", "_")
    if (flag := flag_named(name)) is not None:
        if dot:
            return Spelling(flag, key.rstrip("+")) if flag.kind == "object" else None
        return Spelling(flag, value=True if flag.kind == "flag" else None)
    for prefix, negated in (("no_", ""), ("disable_", "enable_"), ("enable_", "disable_")):
        if not dot and name.startswith(prefix):
            flag = flag_named(negated + name.removeprefix(prefix))
            if flag is not None and flag.kind == "flag":
                return Spelling(flag, value=False)
    return None


def meaning(
    spelling: Spelling, value: Any, known: Container[str], *, named: Callable[[str], str] = str
) -> Meaning:
    """Return the meaning of a vLLM option for a command or an interface with these options.

    value: as it was given: text, or any value in Python. named: how options are written there.

    Raises: BadRequestError where it would change something that is not supported.
    """
    flag, key, _ = spelling
    if flag.default is None and value in ("", "None"):  # as they are written on a command line
        value = None
    treatment = treatments().get(flag.name)
    shown = named(flag.name)
    if treatment is None:  # the same here, or no option of this command
        return Meaning(flag.name, value)
    if isinstance(treatment, Renamed):
        ours = None if value is None else _replaced(treatment.values, value)
        if ours is None:
            return Meaning(None)
        if treatment.name in _FORMATS:
            ours = _format(ours)
            if ours is None:
                return Meaning(None, note=f"{shown} {value}: the chat template says it here")
        if treatment.name in known:
            about = f" ({treatment.note})" if treatment.note else ""
            as_given = "" if _same(ours, value) else f"={ours}"
            return Meaning(
                treatment.name, ours, f"{shown} is {named(treatment.name)}{as_given} here{about}"
            )
        neutral = tuple(given for given, ours in treatment.values.items() if ours is None)
        treatment = Only(f"`slipstream serve` has {_option(treatment.name)} for it", neutral)
    if isinstance(treatment, Without):
        is_neutral = value is None or (key is None and _same(value, flag.default))
        note = "" if is_neutral else f"{shown} has no effect here: {treatment.why}"
        return Meaning(None, note=note)
    neutral = tuple(dict.fromkeys(map(_text, (*_default(flag), *treatment.values))))
    if value is None or any(_same(value, one) for one in (*_default(flag), *treatment.values)):
        return Meaning(None)
    keys = (key,) if key is not None else _keys(value)
    if treatment.keys and keys is not None and all(each in treatment.keys for each in keys):
        return Meaning(None, note=f"{shown} has no effect here: {treatment.why}")
    what = " or ".join(neutral) or "nothing"
    if treatment.keys:
        what = f"the keys {', '.join(treatment.keys)}"
    given = "(not shown)" if flag.name == "hf_token" else value
    raise wrong_option(shown, given, f"{what}: {treatment.why}; {PAGE}")


def translated(
    options: Mapping[str, Any], known: Container[str]
) -> tuple[dict[str, Any], list[str]]:
    """Keyword options with those of vLLM's in terms of `known`, and lines for the log.

    Raises: BadRequestError as `meaning` does, and where an option is given under two names.
    """
    found: dict[str, Any] = {}
    notes = []
    for name, value in options.items():
        flag = None if name in known else flag_named(name)
        meant = Meaning(name, value) if flag is None else meaning(Spelling(flag), value, known)
        if meant.note:
            notes.append(meant.note)
        if meant.name is None:
            continue
        if meant.name in found or (meant.name != name and options.get(meant.name) is not None):
            raise wrong_option(name, value, f"one value; {meant.name} is given too")
        found[meant.name] = meant.value
    return found, notes


def as_written_here(name: str, value: Any) -> Any:
    """A value of an option of the same name as it is written here; None for the default.

    Raises: BadRequestError for a value that is not taken any more.
    """
    values = VALUES.get(name)
    if name == "allowed_origins" and not isinstance(value, str) and isinstance(value, Sequence):
        return tuple(one for each in value for one in _listed(each))
    if name == "dtype" and type(value).__module__ == "torch":
        value = str(value).removeprefix("torch.")
    if values is None or not isinstance(value, str | int) or isinstance(value, bool):
        return value
    if (allowed := GONE.get((name, value))) is not None:
        raise wrong_option(name, value, allowed)
    return values.get(value, value)


def _format(name: Any) -> Any:
    """A format by its name here; None where vLLM has a parser for it that has none here."""
    from slipstream_ipc.formats.table import CALLS, REASONING, WHOLE

    ours = _FORMATS_OF_VLLM.get(name, name)
    return ours if ours in (*CALLS, *REASONING, *WHOLE, "none") else None


def _listed(value: Any) -> Sequence[Any]:
    """The elements of a list in JSON, as vLLM takes it; another value alone."""
    if isinstance(value, str) and value.startswith("["):
        try:
            return msgspec.json.decode(value, type=list[str])
        except (msgspec.DecodeError, msgspec.ValidationError):
            return (value,)
    return (value,)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _default(flag: Flag) -> Iterable[Any]:
    return () if flag.default is None else (flag.default,)


def _replaced(values: Mapping[Any, Any], value: Any) -> Any:
    for given, ours in values.items():
        if _same(value, given):
            return ours
    return value


def _same(value: Any, other: Any) -> bool:
    """Equal as they would be written on a command line."""
    if isinstance(other, int | float) and not isinstance(other, bool) and value is not True:
        try:
            return float(value) == other
        except (TypeError, ValueError):
            return False
    return _text(value) == _text(other)


def _text(value: Any) -> str:
    if isinstance(value, str):
        if not value.startswith(("[", "{")):
            return value or "None"
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError:
            return str(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict | list | tuple):
        return msgspec.json.encode(value).decode() if _is_json(value) else repr(value)
    return str(value)


def _is_json(value: Any) -> bool:
    try:
        msgspec.json.encode(value)
    except (TypeError, msgspec.ValidationError, OverflowError):
        return False
    return True


def _keys(value: Any) -> tuple[str, ...] | None:
    """The keys of an object, given as such or as JSON; None for anything else."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError:
            return None
    return tuple(map(str, value)) if isinstance(value, dict) else None
