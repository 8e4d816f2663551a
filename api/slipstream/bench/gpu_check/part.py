"""The process of one part, or of several one after another.

`python -m slipstream.bench.gpu_check.part PART... --rows FILE ...`; started by `__main__`.

Rules:
- Whatever a part raises becomes a row with `ok` False; the parts behind it run all the same.
- Arithmetic is as exact as the type says: no TF32, whatever the environment asks for.
"""

from __future__ import annotations

import argparse
import importlib
import time
import traceback
from pathlib import Path

import torch

from slipstream.bench.gpu_check.report import Report
from slipstream.bench.gpu_check.setting import PARTS, Setting


def main() -> int:
    """Run the parts; exit code 0, however they went: the rows tell."""
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--started-s", type=float, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="for each part")
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    if arguments.device == "cpu":
        torch.set_num_threads(1)  # threads that wait for one another crawl on a busy machine
    for part in arguments.parts:
        report = Report(part, arguments.rows, arguments.started_s)
        setting = Setting(
            arguments.device,
            arguments.quick,
            arguments.folder,
            time.monotonic() + arguments.seconds,
        )
        try:
            importlib.import_module(f"slipstream.bench.gpu_check.{part}").run(setting, report)
        except Exception as error:
            traceback.print_exc()
            report.add("failed", False, error=f"{type(error).__name__}: {error}"[:500])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
