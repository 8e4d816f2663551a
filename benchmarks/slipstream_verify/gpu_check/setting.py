"""The settings of a section, and the sections of each part.

A part is one run, within five minutes. Each of its sections has its own process. A section may
start work until the summed seconds of all sections up to it are over, so unused time goes to the
next one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from slipstream_verify.gpu_check.gpu_report import GpuReport


class Section(NamedTuple):
    """A section of a part: a function of a module. shape: of the model that it measures, if any."""

    name: str
    module: str
    seconds: int
    shape: str | None = None
    function: str = "run"


SHAPES = ("qwen3-0.6b", "llama-3.1-8b", "qwen3-30b-a3b")
_SMALL, _MIDDLE, _LARGE = SHAPES

_ENVIRONMENT = Section("environment", "environment", 25)
_COMPILING = Section("compiling", "compiling", 30, function="run_models")

# In order of importance: the last ones are left out if the card is slower than expected.
FIRST = "first"  # a little of each, for a card's first minutes
RANKS = "ranks"  # on several cards
NAMED_ONLY = (FIRST, RANKS)  # not among "all parts"
PARTS: dict[str, tuple[Section, ...]] = {
    FIRST: (
        _ENVIRONMENT,
        Section("attention", "attention", 40, function="run_first"),
        Section("sampling", "sampling", 25, function="run_flat"),
        Section("tokens", "exactness", 70, function="run_first"),
        Section(f"decode {_SMALL}", "decode", 90, _SMALL, "run_first"),
    ),
    "exactness": (
        _ENVIRONMENT,
        Section("compiling", "compiling", 55, function="run_exactness"),
        Section("attention", "attention", 45),
        Section("operators", "operators", 25),
        Section("sampling", "sampling", 15),
        Section("tokens", "exactness", 115),
    ),
    "tests": (_ENVIRONMENT, Section("tests", "suite", 240)),
    "decode": (
        _ENVIRONMENT,
        _COMPILING,
        Section(f"decode {_SMALL}", "decode", 65, _SMALL),
        Section(f"decode {_MIDDLE}", "decode", 60, _MIDDLE),
        Section(f"decode {_LARGE}", "decode", 60, _LARGE),
        Section("overlap", "device_overlap", 40, _SMALL),
    ),
    "census": (
        _ENVIRONMENT,
        _COMPILING,
        Section(f"census {_SMALL}", "census", 60, _SMALL),
        Section(f"census {_MIDDLE}", "census", 75, _MIDDLE),
        Section(f"census {_LARGE}", "census", 80, _LARGE),
    ),
    "tiles": (_ENVIRONMENT, Section("tiles", "tiles", 240)),
    "steady": (
        _ENVIRONMENT,
        _COMPILING,
        Section(f"steady {_SMALL}", "steady", 80, _SMALL),
        Section(f"steady {_MIDDLE}", "steady", 100, _MIDDLE),
    ),
    "sanitizer": (_ENVIRONMENT, Section("sanitizer", "sanitizer", 240)),
    RANKS: (_ENVIRONMENT, Section(f"ranks {_MIDDLE}", "ranks", 240, _MIDDLE)),
    "prefill": (
        _ENVIRONMENT,
        Section(f"prefill {_MIDDLE}", "prefill", 35, _MIDDLE),
        Section(f"prefill {_SMALL}", "prefill", 20, _SMALL),
        Section(f"prefill {_LARGE}", "prefill", 45, _LARGE),
        Section("peer", "peer", 45, _SMALL),
        Section("bench overlap", "benchmarks", 30, _SMALL, "run_overlap"),
        Section("bench interval", "benchmarks", 30, _SMALL, "run_interval"),
        Section("bench protocol", "benchmarks", 30, _SMALL, "run_protocol"),
        Section("bench gc", "benchmarks", 20, _SMALL, "run_gc"),
    ),
}
GRACE_S = 15  # to finish work in progress; then a section's process is killed
_CLOSE_S = 5  # of these, to close the runner and stack


@dataclass(frozen=True, slots=True)
class GpuSetting:
    """One run of one section."""

    device: Literal["cuda", "cpu"]
    is_quick: bool
    folder: Path  # shared by the sections of a run: models, tokenizers
    deadline_s: float  # time.monotonic(); a section starts no work after it
    report: GpuReport
    tensor_parallel_size: int = 2  # of the part about ranks

    def most_s(self) -> float:
        """Seconds that work started now may take, most of the grace included."""
        return max(0.0, self.deadline_s - time.monotonic()) + GRACE_S - _CLOSE_S

    def name_of(self, shape: str) -> str:
        """The shape's name in rows."""
        return f"{shape} shape" + (", tiny" if self.is_quick else "")

    def has_time(self, case: str, needs_s: float = 0.0) -> bool:
        """Whether `case`, which takes `needs_s`, may still start; if not, a row reports it as
        skipped.
        """
        if time.monotonic() + needs_s < self.deadline_s:
            return True
        self.report.add(case, skipped="out of time")
        return False
