"""The settings of a stack: names, defaults, ranges and descriptions.

The Python API and the command line both take them from here.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal, TypedDict

import msgspec
from msgspec import Meta, Struct, inspect

from slipstream.errors import unknown_option, wrong_option
from slipstream.stack.children.listeners import MAX_FRONTS
from slipstream.vllm_flags import as_written_here, translated
from slipstream_ipc.messages import MAX_OUTPUT_WORKERS, SamplingDefaults
from slipstream_ipc.telemetry.logs import LogFormat
from slipstream_ipc.validation.field_types import of_text, values_of

MODEL = "model"
HTTP = "HTTP server"
SCHEDULING = "scheduling"
MEMORY = "memory"
COMPUTATION = "computation"
STREAMS = "streams and restarts"
NETWORK = "Python clients on other machines"
NODES = "one model over several machines"
DIAGNOSIS = "diagnosis"
GROUPS = (MODEL, HTTP, SCHEDULING, MEMORY, COMPUTATION, STREAMS, NETWORK, NODES, DIAGNOSIS)
"""The groups of settings, in the order of help texts."""


_Process = Literal["core", "worker", "http", "supervisor"]
LoadFormat = Literal["auto", "gguf", "hf", "safetensors"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Runner = Literal["auto", "generate", "pooling"]
Convert = Literal["auto", "none", "embed", "classify"]
CacheDtype = Literal["auto", "fp8", "fp8_e4m3", "int8_per_token_head"]
Quantization = Literal[
    "fp8_per_block",
    "fp8_per_channel",
    "int8_per_channel_weight_only",
    "q4_0",
    "q8_0",
    "auto-round",
    "awq",
    "bitnet",
    "bitsandbytes",
    "compressed-tensors",
    "fbgemm_fp8",
    "fp8",
    "gemma",
    "gptq",
    "metal",
    "mlx",
    "modelopt",
    "modelopt_fp4",
    "modelopt_mixed",
    "modelopt_mxfp8",
    "mxfp4",
    "mxfp8",
    "quark",
]


def _about(
    group: str,
    text: str,
    metavar: str | None = None,
    *,
    to: _Process | tuple[_Process, ...] = (),
) -> Meta:
    """A setting's group, its description, and the placeholder of its value in help texts.

    to: the processes whose configs have it by its name, as it is given.
    """
    given_to = (to,) if isinstance(to, str) else to
    return Meta(description=text, extra={"group": group, "metavar": metavar, "to": given_to})


class StackSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a stack. Make one with `settings_from`, whose errors name the invalid option."""

    model: Annotated[
        str | None,
        _about(
            MODEL,
            "folder, hub id, GGUF file (of a hub: ORGANISATION/NAME:TYPE), "
            "simulated:OPTION=VALUE,... or random:NAME "
            "(default: the bundled demo model)",
            "MODEL",
        ),
    ] = None
    runner: Annotated[
        Runner,
        _about(
            MODEL,
            "what the model is served for: text (generate), or embeddings, classes and scores "
            "(pooling); auto takes an encoder, a classifier, and what sentence-transformers has "
            "saved, for pooling",
            to="core",
        ),
    ] = "auto"
    convert: Annotated[
        Convert,
        _about(
            MODEL,
            "serve a model for something else: embed, for embeddings; classify, for classes and "
            "scores",
            to="core",
        ),
    ] = "auto"
    served_model_name: Annotated[
        str | tuple[str, ...] | None,
        _about(
            MODEL,
            "name of the model in the API (default: MODEL as given); answers and metrics have the "
            "first one, requests may have any; one with * at its end stands for all that begin so",
            "NAME",
        ),
    ] = ()
    tokenizer: Annotated[
        str | None,
        _about(MODEL, "folder or hub id of the tokenizer (default: the model's own)", "MODEL"),
    ] = None
    hf_config_path: Annotated[
        str | None,
        _about(
            MODEL,
            "folder or hub id whose config.json says what a GGUF file's model is (default: the "
            "file's metadata)",
            "MODEL",
        ),
    ] = None
    load_format: Annotated[
        LoadFormat,
        _about(
            MODEL,
            "the files that weights are read from, as in vLLM; auto takes those that a model has, "
            "and any other is refused where it has others",
        ),
    ] = "auto"
    dtype: Annotated[
        Dtype,
        _about(
            MODEL,
            "data type of weights and activations; auto is float32 on a CPU (bfloat16 for bfloat16 "
            "checkpoints on one with AMX), elsewhere the checkpoint's own",
            to="core",
        ),
    ] = "auto"
    quantization: Annotated[
        Quantization | None,
        _about(
            MODEL,
            "how weights are coded on a CPU: one scale for each output, or groups of 32 as GGUF's; "
            "of a quantised checkpoint, its own method",
            to="core",
        ),
    ] = None
    kv_cache_dtype: Annotated[
        CacheDtype,
        _about(
            MODEL,
            "what the cache holds keys and values in; auto is --dtype; 8 bits on a CPU alone, in "
            "float8 (fp8 is fp8_e4m3), or in integers with a scale for each token's head",
            to="core",
        ),
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        _about(MODEL, "where the model runs; auto is a GPU if there is one", to="core"),
    ] = "auto"
    engine: Annotated[
        Literal["slipstream", "vllm"],
        _about(
            MODEL,
            "what schedules and computes: Slipstream's own engine, or vLLM's engine core; the rest "
            "of the server is the same",
            to="core",
        ),
    ] = "slipstream"
    engine_args: Annotated[
        str | dict[str, Any] | None,
        _about(
            MODEL,
            "with --engine vllm: fields of vLLM's EngineArgs that no option here names, as JSON",
            "JSON",
        ),
    ] = None
    engine_python: Annotated[
        str | None,
        _about(
            MODEL,
            "with --engine vllm: the Python of the environment that has vLLM (default: this one)",
            "PYTHON",
        ),
    ] = None
    enable_lora: Annotated[
        bool,
        _about(MODEL, "serve adapters (LoRA) beside the model, each under a name of its own"),
    ] = False
    lora_modules: Annotated[
        str | tuple[str, ...],
        _about(
            MODEL,
            "an adapter's name and folder, as NAME=PATH or as JSON: name, path; requests name it "
            "as their model",
            "NAME=PATH",
        ),
    ] = ()
    max_lora_rank: Annotated[
        int, Meta(ge=1, le=512), _about(MODEL, "the largest rank of an adapter at any layer")
    ] = 16
    max_loras: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None,
        _about(
            MODEL,
            "how many adapters there is room for, all of which a step may have (default: as many "
            "as --lora-modules names, 64 more with --allow-runtime-lora-updating)",
        ),
    ] = None
    allow_runtime_lora_updating: Annotated[
        bool,
        _about(MODEL, "let adapters be loaded and unloaded while the server runs"),
    ] = False
    lora_root: Annotated[
        str | tuple[str, ...],
        _about(
            MODEL,
            "folder below which such adapters have to lie (default: the folders of --lora-modules)",
            "DIR",
        ),
    ] = ()
    lora_gib: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        _about(
            MODEL, "memory of all adapters together, in GiB (default: what the machine has free)"
        ),
    ] = None
    max_model_len: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        _about(
            MODEL,
            "longest request in tokens, prompt and output together (default: the model's limit)",
            to="core",
        ),
    ] = None
    tool_format: Annotated[
        str | None,
        _about(
            MODEL,
            "how the model writes tool calls: a name that `slipstream formats` lists, or none "
            "(default: by its chat template)",
            "NAME",
            to="worker",
        ),
    ] = None
    reasoning_format: Annotated[
        str | None,
        _about(
            MODEL,
            "how the model writes its reasoning: a name that `slipstream formats` lists, or none "
            "(default: by its chat template)",
            "NAME",
            to="worker",
        ),
    ] = None
    hf_overrides: Annotated[
        str | dict[str, Any] | None,
        _about(MODEL, "parts of the model's config.json that are replaced, as JSON", "JSON"),
    ] = None
    generation_config: Annotated[
        str,
        _about(
            MODEL,
            "where sampling defaults are from: auto is the model's generation_config.json, vllm is "
            "none, and else it is a folder with such a file",
            "{auto,vllm,FOLDER}",
        ),
    ] = "auto"
    override_generation_config: Annotated[
        str | dict[str, Any] | None,
        _about(
            MODEL,
            "sampling defaults that are replaced, as JSON: "
            + ", ".join(SamplingDefaults.__struct_fields__),
            "JSON",
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        _about(
            MODEL,
            "file with a chat template, or the template itself, in place of the tokenizer's",
            "FILE",
        ),
    ] = None
    default_chat_template_kwargs: Annotated[
        str | dict[str, Any] | None,
        _about(MODEL, "variables of the chat template where a request sets none, as JSON", "JSON"),
    ] = None
    revision: Annotated[
        str | None,
        _about(MODEL, "branch, tag or commit of a model from a hub", "REVISION"),
    ] = None
    download_dir: Annotated[
        str | None,
        _about(
            MODEL,
            "folder that models from a hub are kept in (default: $HF_HUB_CACHE or its default)",
            "FOLDER",
        ),
    ] = None
    trust_remote_code: Annotated[
        bool,
        _about(
            MODEL,
            "run Python code from the model's folder, with all of your permissions",
            to=("core", "worker"),
        ),
    ] = False
    http_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        _about(
            HTTP,
            "port of the OpenAI-compatible HTTP server; 0 takes a free one (default: 8000 for "
            "`slipstream serve` and `route`, no HTTP server elsewhere)",
            "PORT",
        ),
    ] = None
    host: Annotated[
        str,
        _about(
            HTTP,
            "address that the HTTP server listens on; all but loopback addresses can be reached "
            "from the network",
            "HOST",
        ),
    ] = "127.0.0.1"
    uds: Annotated[
        str | None,
        _about(HTTP, "Unix socket that the HTTP server listens on, in place of a port", "PATH"),
    ] = None
    http_workers: Annotated[
        int,
        Meta(ge=1, le=MAX_FRONTS),
        _about(HTTP, "number of HTTP server processes, which share one port"),
    ] = 1
    api_key: Annotated[
        str | tuple[str, ...],
        _about(
            HTTP,
            "key that HTTP requests must carry, seen by all users of the machine; "
            "$SLIPSTREAM_API_KEY is another (default: none, all requests are served)",
            "KEY",
        ),
    ] = ()
    api_key_file: Annotated[
        str | None,
        _about(
            HTTP, "file with more such keys, one on each line, read again as it changes", "FILE"
        ),
    ] = None
    priority_key_file: Annotated[
        str | None,
        _about(
            HTTP,
            "file with those of the keys whose `priority` counts among the requests of all keys, "
            "one on each line (default: of none, it counts among a key's own requests)",
            "FILE",
        ),
    ] = None
    lora_key_file: Annotated[
        str | None,
        _about(
            HTTP,
            "file with those of the keys that may load and unload adapters, one on each line "
            "(default: none of them may)",
            "FILE",
        ),
    ] = None
    allowed_origins: Annotated[
        str | tuple[str, ...],
        _about(
            HTTP, "origin (http://HOST:PORT) of web pages that may read answers; * is any", "ORIGIN"
        ),
    ] = ()
    allowed_hosts: Annotated[
        str | tuple[str, ...],
        _about(
            HTTP,
            "host name (HOST, *.DOMAIN or *) that requests may use, besides loopback's (default: "
            "any with an API key or a network address, else loopback's alone)",
            "HOST",
        ),
    ] = ()
    forwarded_allow_ips: Annotated[
        str | tuple[str, ...],
        _about(
            HTTP,
            "proxy (address, network, unix or *) whose X-Forwarded-For and X-Forwarded-Proto the "
            "access log uses",
            "IP",
        ),
    ] = ("127.0.0.1", "::1")
    ssl_certfile: Annotated[
        str | None,
        _about(
            HTTP, "certificate with its chain (PEM); the HTTP server then speaks TLS alone", "FILE"
        ),
    ] = None
    ssl_keyfile: Annotated[
        str | None,
        _about(HTTP, "private key (PEM), if it is not in --ssl-certfile", "FILE"),
    ] = None
    access_log: Annotated[
        Literal["off", "text", "json"],
        _about(HTTP, "log each HTTP request to standard error, in this form", to="http"),
    ] = "off"
    metrics_prefix: Annotated[
        str,
        Meta(pattern="^[a-zA-Z_][a-zA-Z0-9_]{0,63}$"),
        _about(
            HTTP,
            "what the names of metrics begin with, before a colon; with vllm, dashboards made for "
            "vLLM show them",
            "NAME",
            to="http",
        ),
    ] = "slipstream"
    strict_fields: Annotated[
        bool,
        _about(
            HTTP,
            "refuse requests to OpenAI's and Anthropic's endpoints that have unknown fields, which "
            "are otherwise ignored and named in the answer's headers",
            to="http",
        ),
    ] = False
    openai_strict_finish: Annotated[
        bool,
        _about(
            HTTP,
            "finish the call of a function that tool_choice names with `stop`, as OpenAI does, "
            "instead of `tool_calls`",
        ),
    ] = False
    max_num_seqs: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        _about(
            SCHEDULING,
            "maximum number of requests that run at the same time (default: 256; 1024 on a large "
            "GPU)",
            to="core",
        ),
    ] = None
    max_num_batched_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        _about(
            SCHEDULING,
            "maximum number of tokens in one step, over all requests (default: 2048; 8192 on a "
            "large GPU)",
            to="core",
        ),
    ] = None
    max_waiting: Annotated[
        int,
        Meta(ge=1),
        _about(
            SCHEDULING,
            "maximum number of waiting requests of a tenant (all together: twice that); more are "
            "refused (HTTP 503)",
            to="core",
        ),
    ] = 16384
    max_waiting_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        _about(
            SCHEDULING,
            "maximum number of tokens in waiting requests of a tenant (default: as many as 1/16 of "
            "memory holds)",
            to="core",
        ),
    ] = None
    stream_interval: Annotated[
        Annotated[int, Meta(ge=1)] | Literal["auto"],
        _about(
            SCHEDULING,
            "minimum number of tokens between two deltas of a stream; auto sends a delta when the "
            "reader has room",
            "N",
            to="worker",
        ),
    ] = "auto"
    kv_cache_gib: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        _about(
            MEMORY,
            "size of the key-value cache on a CPU, in GiB (default: 1, or half of what a small "
            "machine or container has, which takes memory as it is used; a size that is given is "
            "taken before the first request)",
            "GIB",
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float,
        Meta(gt=0, lt=1),
        _about(
            MEMORY,
            "fraction of the GPU's memory to use, 0 to 1; the key-value cache gets what the model "
            "and its largest step leave",
            "FRACTION",
            to="core",
        ),
    ] = 0.9
    block_size: Annotated[
        int,
        Meta(ge=1, le=256),
        _about(MEMORY, "tokens in a block of the key-value cache", to="core"),
    ] = 16
    num_blocks: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        _about(
            MEMORY, "number of cache blocks, in place of a size (default: what fits)", to="core"
        ),
    ] = None
    enable_prefix_caching: Annotated[
        bool, _about(MEMORY, "reuse the cache of equal beginnings of prompts", to="core")
    ] = True
    state_cache_gib: Annotated[
        Annotated[float, Meta(ge=0, le=1 << 20)] | None,
        _about(
            MEMORY,
            "part of kv_cache_gib, or beside num_blocks, for recurrent states that the prefix "
            "cache keeps of hybrid models (default: a tenth, or up to a quarter for 16 states; 0 "
            "turns prefix caching off for them)",
            "GIB",
            to="core",
        ),
    ] = None
    share_prefix_cache: Annotated[
        bool,
        _about(
            MEMORY,
            "reuse it among all keys: usage tells each how far its prompts begin as another's "
            "(default: a key reuses what it has sent itself)",
            to="worker",
        ),
    ] = False
    max_logprobs: Annotated[
        int,
        Meta(ge=-1, le=2**31 - 1),
        _about(
            MEMORY,
            "maximum number of log-probabilities per token that a request may ask for; -1 allows "
            "the whole vocabulary",
            to="core",
        ),
    ] = 20
    logprobs_gib: Annotated[
        float,
        Meta(gt=0),
        _about(
            MEMORY,
            "memory for the log-probabilities of all requests, in each process, in GiB; requests "
            "beyond it wait",
            "GIB",
            to="core",
        ),
    ] = 2.0
    response_store_mib: Annotated[
        float,
        Meta(ge=0),
        _about(
            MEMORY,
            "memory for answers that are kept for later requests, in the core and as much in the "
            "output workers, in MiB; 0 keeps none",
            "MIB",
            to="core",
        ),
    ] = 64.0
    threads: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        _about(
            COMPUTATION,
            "threads that compute on a CPU, of each rank if there are several (default: one for "
            "each core that may be used, shared out among ranks)",
            to="core",
        ),
    ] = None
    tensor_parallel_size: Annotated[
        int,
        Meta(ge=1, le=64),
        _about(
            COMPUTATION,
            "number of devices, or of processes on a CPU, that compute the model together, each "
            "with a slice of it; needs slipstream[tp]; not tried on cards yet",
            to="core",
        ),
    ] = 1
    native: Annotated[
        bool,
        _about(
            COMPUTATION,
            "use Slipstream's own kernels: Triton on a GPU, C for float32 on a CPU; else torch's",
            to="core",
        ),
    ] = True
    attention_backend: Annotated[
        Literal["auto", "triton", "torch"],
        _about(
            COMPUTATION,
            "what attends: Triton's kernels, which need a GPU, or torch's operators; auto takes "
            "Triton's where they can serve",
            to="core",
        ),
    ] = "auto"
    speculative_config: Annotated[
        str | dict[str, Any] | None,
        _about(
            COMPUTATION,
            "have steps compute tokens that may follow, and keep those that do, as JSON: method "
            "(ngram: from a request's own text; suffix: also from answers before; draft_model: "
            "from a smaller model), model, num_speculative_tokens (8, suffix 16), "
            "prompt_lookup_min (2), prompt_lookup_max (4) and suffix_cache_mib (64); texts stay "
            "what they are",
            "JSON",
        ),
    ] = None
    enforce_eager: Annotated[
        bool,
        _about(COMPUTATION, "use no CUDA graphs; small steps are slower without them", to="core"),
    ] = False
    language_model_only: Annotated[
        bool,
        _about(
            MODEL,
            "serve a vision model as text, without its towers; else it keeps them, and takes "
            "images where a trial shows that it sees them as transformers does",
            to="core",
        ),
    ] = False
    cuda_graph_sizes: Annotated[
        tuple[Annotated[int, Meta(ge=1)], ...],
        Meta(max_length=1024),
        _about(
            COMPUTATION,
            "batch size to record a CUDA graph for (default: 1, 2, 4, 8, 16, 24, ...)",
            "N",
            to="core",
        ),
    ] = ()
    cuda_graphs_over_ranks: Annotated[
        bool,
        _about(
            COMPUTATION,
            "with --tensor-parallel-size, use CUDA graphs too, sums over the cards included; "
            "untried on cards",
            to="core",
        ),
    ] = False
    enable_torch_symm_mem: Annotated[
        bool,
        _about(
            COMPUTATION,
            "with --tensor-parallel-size, make small sums over the cards of a machine in memory "
            "that they share, in place of NCCL; untried on cards",
            to="core",
        ),
    ] = False
    grace_s: Annotated[
        float,
        Meta(ge=0),
        _about(
            STREAMS,
            "how long a stream is kept for a client that has disconnected",
            "SECONDS",
            to="worker",
        ),
    ] = 60.0
    client_timeout_s: Annotated[
        float,
        Meta(gt=0),
        _about(STREAMS, "silence after which a client is probed", "SECONDS", to="worker"),
    ] = 5.0
    hang_timeout_s: Annotated[
        float,
        Meta(ge=1),
        _about(
            STREAMS,
            "silence after which a process counts as hung and is replaced",
            "SECONDS",
            to=("core", "worker", "http", "supervisor"),
        ),
    ] = 10.0
    step_timeout_s: Annotated[
        float,
        Meta(gt=0),
        _about(
            STREAMS, "duration after which a step's device counts as stuck", "SECONDS", to="core"
        ),
    ] = 600.0
    output_workers: Annotated[
        int,
        Meta(ge=1, le=MAX_OUTPUT_WORKERS),
        _about(
            STREAMS, "number of output worker processes, which share the streams by their ids", "N"
        ),
    ] = 1
    max_restarts: Annotated[
        int,
        Meta(ge=0),
        _about(
            STREAMS,
            "maximum number of restarts of a process within --restart-window-s; one more ends the "
            "server",
            to="supervisor",
        ),
    ] = 10
    restart_window_s: Annotated[
        float,
        Meta(gt=0),
        _about(STREAMS, "period in which --max-restarts counts", "SECONDS", to="supervisor"),
    ] = 300.0
    spare_worker: Annotated[
        bool,
        _about(
            STREAMS,
            "keep another output worker ready for each one, which takes over at once",
        ),
    ] = True
    spare_core: Annotated[
        bool,
        _about(STREAMS, "keep a second engine core ready, which then only has to load the model"),
    ] = True
    drain_s: Annotated[
        float,
        Meta(ge=0),
        _about(
            STREAMS,
            "how long running requests may go on after SIGINT or SIGTERM",
            "SECONDS",
            to="supervisor",
        ),
    ] = 10.0
    listen: Annotated[
        str | None,
        _about(
            NETWORK,
            "listen for Python clients over TCP too; needs --keys, or --insecure",
            "tcp://ADDRESS:PORT",
        ),
    ] = None
    keys: Annotated[
        str | None,
        _about(NETWORK, "folder with the keys for tcp://, made by `slipstream keys`", "DIR"),
    ] = None
    members: Annotated[
        str | None,
        _about(
            NETWORK,
            "addresses of all replicas, this one included, for clients that know one of them",
            "ADDRESS,...",
        ),
    ] = None
    insecure: Annotated[
        bool,
        _about(
            NETWORK, "use tcp:// without keys: loopback only, open to all users of this machine"
        ),
    ] = False
    nnodes: Annotated[
        int,
        Meta(ge=1, le=64),
        _about(
            NODES,
            "number of machines that the ranks are spread over; `slipstream serve` runs on each of "
            "them, with the same options but for --node-rank",
        ),
    ] = 1
    node_rank: Annotated[
        int,
        Meta(ge=0, le=63),
        _about(
            NODES,
            "number of this machine among them; 0 serves, the others compute with its settings, "
            "but for the model's place, threads and the trust in code, which are their own",
        ),
    ] = 0
    master_addr: Annotated[
        str | None,
        _about(
            NODES,
            "IP address of machine 0, at which it listens for the others; these may name its host; "
            "needs a folder of keys: the server's on machine 0, a client's on the others",
            "ADDRESS",
        ),
    ] = None
    master_port: Annotated[
        int, Meta(ge=1, le=65535), _about(NODES, "port of machine 0 for the others", "PORT")
    ] = 29501
    join_timeout_s: Annotated[
        float,
        Meta(gt=0),
        _about(NODES, "how long machine 0 waits for the others before it fails", "SECONDS"),
    ] = 600.0
    otlp_traces_endpoint: Annotated[
        str | None,
        _about(
            DIAGNOSIS,
            "send a trace of each request to the OpenTelemetry collector here (OTLP over HTTP); "
            "needs slipstream[otel]",
            "URL",
        ),
    ] = None
    log_format: Annotated[
        LogFormat, _about(DIAGNOSIS, "form of the log's lines; with json, of the access log's too")
    ] = "text"
    log_stats_interval_s: Annotated[
        float,
        Meta(ge=0),
        _about(
            DIAGNOSIS,
            "log a line on throughput and load this often while there is work; 0 logs none",
            "SECONDS",
            to="supervisor",
        ),
    ] = 5.0
    trace: Annotated[
        str | None,
        _about(
            DIAGNOSIS,
            "write a timeline of all processes here at the end (JSON for ui.perfetto.dev and "
            "`slipstream trace`)",
            "FILE",
        ),
    ] = None


class StackOptions(TypedDict, total=False):
    """The settings of a stack as keyword options, without the model. Lists may stand for tuples."""

    runner: Runner
    convert: Convert
    served_model_name: str | Sequence[str] | None
    tokenizer: str | None
    hf_config_path: str | None
    load_format: LoadFormat
    dtype: Dtype
    quantization: Quantization | None
    kv_cache_dtype: CacheDtype
    device: Literal["auto", "cpu", "cuda"]
    engine: Literal["slipstream", "vllm"]
    engine_args: str | dict[str, Any] | None
    engine_python: str | None
    enable_lora: bool
    lora_modules: str | Sequence[str]
    max_lora_rank: int
    max_loras: int | None
    allow_runtime_lora_updating: bool
    lora_root: str | Sequence[str]
    lora_gib: float | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_model_len: int | None
    max_waiting: int
    max_waiting_tokens: int | None
    max_logprobs: int
    logprobs_gib: float
    response_store_mib: float
    kv_cache_gib: float | None
    gpu_memory_utilization: float
    attention_backend: Literal["auto", "triton", "torch"]
    enforce_eager: bool
    language_model_only: bool
    cuda_graph_sizes: Sequence[int]
    cuda_graphs_over_ranks: bool
    enable_torch_symm_mem: bool
    enable_prefix_caching: bool
    state_cache_gib: float | None
    speculative_config: str | dict[str, Any] | None
    share_prefix_cache: bool
    num_blocks: int | None
    block_size: int
    threads: int | None
    tensor_parallel_size: int
    native: bool
    tool_format: str | None
    reasoning_format: str | None
    hf_overrides: str | dict[str, Any] | None
    generation_config: str
    override_generation_config: str | dict[str, Any] | None
    chat_template: str | None
    default_chat_template_kwargs: str | dict[str, Any] | None
    revision: str | None
    download_dir: str | None
    trust_remote_code: bool
    stream_interval: int | Literal["auto"]
    client_timeout_s: float
    grace_s: float
    hang_timeout_s: float
    step_timeout_s: float
    output_workers: int
    max_restarts: int
    restart_window_s: float
    spare_worker: bool
    spare_core: bool
    drain_s: float
    listen: str | None
    keys: str | None
    members: str | None
    insecure: bool
    nnodes: int
    node_rank: int
    master_addr: str | None
    master_port: int
    join_timeout_s: float
    http_port: int | None
    http_workers: int
    host: str
    api_key: str | Sequence[str]
    api_key_file: str | None
    priority_key_file: str | None
    lora_key_file: str | None
    allowed_origins: str | Sequence[str]
    allowed_hosts: str | Sequence[str]
    uds: str | None
    ssl_certfile: str | None
    ssl_keyfile: str | None
    access_log: Literal["off", "text", "json"]
    forwarded_allow_ips: str | Sequence[str]
    metrics_prefix: str
    strict_fields: bool
    openai_strict_finish: bool
    log_format: LogFormat
    otlp_traces_endpoint: str | None
    log_stats_interval_s: float
    trace: str | None


# for the stack of one command or batch: a spare would be ready no sooner than the answer, and
# preparing it takes CPU time from the model; standard error belongs to the command
SHORT_LIVED: StackOptions = {
    "spare_worker": False,
    "spare_core": False,
    "log_stats_interval_s": 0.0,
}

_logger = logging.getLogger(__name__)
_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SUFFIXES |= {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_FIELDS = {field.name: field for field in msgspec.structs.fields(StackSettings)}


def settings_from(options: Mapping[str, Any], *, from_text: bool = False) -> StackSettings:
    """Settings from keyword options, or from the strings of a command line (`from_text`).

    Settings of vLLM's that have another name here, or none, are taken where they mean the same or
    change nothing; the log says what became of them.

    Raises: BadRequestError (a ValueError) with the option, its value and what is allowed.
    """
    settings, notes = translated(options, _FIELDS)
    for name, value in settings.items():
        if name not in _FIELDS:
            raise unknown_option(name, _FIELDS)
        settings[name] = _converted(name, value, from_text)
    for note in notes:
        _logger.warning("%s", note)
    return msgspec.convert(settings, StackSettings)


def _converted(name: str, value: Any, from_text: bool) -> Any:
    """The value of a setting. Raises: BadRequestError."""
    meant = as_written_here(name, value)
    if meant is None and value is not None:
        return _FIELDS[name].default
    if from_text and isinstance(meant, str):
        meant = _whole_number(meant) if _takes_integers(name) else meant
    try:
        if from_text:
            return of_text(meant, _FIELDS[name].type)
        return msgspec.convert(meant, _FIELDS[name].type)
    except msgspec.ValidationError:
        allowed = allowed_values(name, in_python=not from_text)
        raise wrong_option(name, value, allowed) from None


@cache
def _takes_integers(name: str) -> bool:
    return any(isinstance(each, inspect.IntType) for each in _members(_type_info(name)))


def _members(info: inspect.Type) -> Iterator[inspect.Type]:
    """The types that a union is made of, without what is said about them."""
    while isinstance(info, inspect.Metadata):
        info = info.type
    if isinstance(info, inspect.UnionType):
        for each in info.types:
            yield from _members(each)
    else:
        yield info


def _whole_number(text: str) -> int | str:
    """A number with a suffix, as vLLM reads it: 32k is 32,000, 32K is 32,768 and 25.6k is 25,600.
    Other text as it is.
    """
    match = re.fullmatch(r"\s*(\d+)(\.\d+)?([kmgtKMGT])\s*", text)
    if match is None or (match[2] and match[3].isupper()):
        return text
    number = float(match[1] + match[2]) if match[2] else int(match[1])
    return int(number * _SUFFIXES[match[3]])


@cache  # the command line reads each option once for each command
def _type_info(name: str) -> inspect.Type:
    return inspect.type_info(_FIELDS[name].type)


def passed_to(process: _Process, settings: StackSettings) -> dict[str, Any]:
    """The settings that a process's config has by their names, as they are given."""
    return {
        name: getattr(settings, name)
        for name in _FIELDS
        if process in (_metadata(name).extra or {})["to"]
    }


def description(name: str) -> str:
    """An option's description, for help texts."""
    info = _metadata(name)
    assert info.extra_json_schema is not None
    return str(info.extra_json_schema["description"])


def group_of(name: str) -> str:
    """An option's group in help texts, one of GROUPS."""
    return str((_metadata(name).extra or {})["group"])


def metavar_of(name: str) -> str:
    """The placeholder of an option's value in help texts."""
    metavar = (_metadata(name).extra or {})["metavar"]
    if metavar is not None:
        return str(metavar)
    info = _metadata(name).type
    while isinstance(info, inspect.Metadata):
        info = info.type
    if isinstance(info, inspect.LiteralType):
        return "{" + ",".join(map(str, info.values)) + "}"
    return "{true,false}" if isinstance(info, inspect.BoolType) else "N"


def _metadata(name: str) -> inspect.Metadata:
    info = _type_info(name)
    assert isinstance(info, inspect.Metadata), f"{name} lacks a description"
    return info


def allowed_values(name: str, *, in_python: bool = True) -> str:
    """An option's allowed values, for help texts and errors; on a command line None is none."""
    return values_of(_type_info(name), in_python=in_python)
