"""The process of one section, or of several one after another.

`python -m slipstream_verify.gpu_check.section_process PART SECTION... --rows FILE ...`; started by
`__main__`.

- An exception raised by a section becomes a row with `ok` False; later sections still run.
- Arithmetic is as exact as the dtype allows: no TF32, regardless of the environment.
- It ends itself when far out of time, printing where it hangs, from a watchdog thread that a call
  into the card's driver cannot block.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import time
import traceback
from pathlib import Path

import torch

from slipstream_verify.gpu_check.gpu_report import GpuReport
from slipstream_verify.gpu_check.setting import GRACE_S, PARTS, GpuSetting


def main() -> int:
    """Run the sections; exit code 0 regardless of their results, which are in the rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("sections", nargs="+")
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--started-s", type=float, required=True)
    parser.add_argument("--deadline-s", type=float, required=True, help="time.monotonic()")
    parser.add_argument("--tensor-parallel-size", type=int, required=True)
    arguments = parser.parse_args()
    left_s = arguments.deadline_s - time.monotonic()
    faulthandler.dump_traceback_later(max(left_s, 0.0) + GRACE_S - 3, exit=True)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    if arguments.device == "cpu":
        torch.set_num_threads(1)  # synchronising threads are slow on a busy machine
    for section in PARTS[arguments.part]:
        if section.name not in arguments.sections:
            continue
        report = GpuReport(section.name, arguments.rows, arguments.started_s)
        setting = GpuSetting(
            arguments.device,
            arguments.quick,
            arguments.folder,
            arguments.deadline_s,
            report,
            arguments.tensor_parallel_size,
        )
        try:
            module = importlib.import_module(
                f"slipstream_verify.gpu_check.sections.{section.module}"
            )
            shapes = () if section.shape is None else (section.shape,)
            getattr(module, section.function)(setting, *shapes)
        except Exception as error:
            traceback.print_exc()
            report.add("failed", False, error=f"{type(error).__name__}: {error}"[:500])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
