"""vLLM's OpenAI server with an executor that computes nothing (`peers/vllm_mock_executor`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from slipstream_bench.common.process_census import commands, descendants
from slipstream_lab.peers.peer_process import FOLDER
from slipstream_lab.peers.server_process import free_port, server_process

_ENGINE = "EngineCore"  # in the title of its core's process


@contextmanager
def vllm_server(
    python: str,
    model: Path,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    num_servers: int,
    options: Sequence[str] = (),
) -> Iterator[tuple[tuple[str, int], dict[str, list[int]]]]:
    """Its address, and the pids of its processes: "front" (API servers) and "core".

    Raises: EngineError if it does not start.
    """
    port = free_port()
    command = [
        *(python, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--host", "127.0.0.1", "--port", str(port)),
        *("--distributed-executor-backend", "vllm_mock_executor.MockExecutor"),
        *("--max-num-seqs", str(max_num_seqs)),
        *("--max-num-batched-tokens", str(max_num_batched_tokens)),
        *("--max-model-len", str(max_model_len), "--no-enable-prefix-caching"),
        *("--disable-uvicorn-access-log", "--api-server-count", str(num_servers), *options),
    ]
    environment = {
        "PYTHONPATH": str(FOLDER),
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with server_process("vLLM's server", command, port, environment) as pid:
        yield ("127.0.0.1", port), _parts(pid)


def _parts(root: int) -> dict[str, list[int]]:
    parts: dict[str, list[int]] = {"front": [], "core": []}
    for pid, command in commands(descendants(root)).items():
        parts["core" if _ENGINE in command else "front"].append(pid)
    return parts
