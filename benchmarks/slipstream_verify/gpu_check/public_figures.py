"""Figures of vLLM from public runs, to read ours beside. They were not measured here, and cards,
versions and loads differ from ours: what they were is said with each.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream_verify.gpu_check.gpu_report import GpuReport
from slipstream_verify.gpu_check.setting import SHAPES


@dataclass(frozen=True, slots=True)
class PublicFigure:
    """One published result. share_of_bound: of the bandwidth, as its source states it."""

    shape: str
    engine: str
    card: str
    load: str
    output_tokens_per_s: float
    share_of_bound: float | None
    source: str


FIGURES = (
    PublicFigure(
        SHAPES[1],
        "vLLM, August 2024",
        "H100",
        "benchmark_throughput, Meta-Llama-3-8B, prompts and outputs of 256 tokens; half of the "
        "12,592 tokens/s that are stated for both",
        6296.0,
        None,
        "https://github.com/vllm-project/vllm/pull/7117",
    ),
    PublicFigure(
        SHAPES[1],
        "vLLM 0.23.0",
        "A100 40GB",
        "Llama-3.1-8B-Instruct in bfloat16, one request at a time, 1,024 tokens in and 128 out",
        75.0,
        0.77,
        "https://johnmusgrave.com/p/vllm-throughput-latency-sweep-on",
    ),
)


def report_public(report: GpuReport, shape: str) -> None:
    """A row for each figure of this shape."""
    for figure in FIGURES:
        if figure.shape == shape:
            report.add(
                f"published: {figure.engine} on {figure.card}",
                load=figure.load,
                output_tokens_per_s=figure.output_tokens_per_s,
                published_share_of_bound=figure.share_of_bound,
                source=figure.source,
            )
