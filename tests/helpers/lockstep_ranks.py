"""Ranks that serve tiny models in lockstep: each schedules for itself, so no plan travels.

Run as a program it is one rank: it reads folders of models, a line each, and answers each with a
line of JSON: the outputs by variant, and what it holds, or the error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Self

from tests.helpers.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]


class LockstepRanks:
    """Processes that hold a slice each of one model after another."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self._processes = processes

    def serve(self, folder: Path) -> list[dict[str, Any]]:
        """What each rank says of this model, and how many of its forwards were one call."""
        return self._ask("serve", folder)

    def serve_recorded(self, folder: Path) -> list[dict[str, Any]]:
        """As `serve`, by recorded steps, of which the second rank cannot record one. Its plans have
        only what travels to a rank.
        """
        return self._ask("serve_recorded", folder)

    def launches(self, folder: Path) -> list[dict[str, Any]]:
        """The launches of each rank's largest layer, fused for a card."""
        return self._ask("launches", folder)

    def decode_lists(self, folder: Path) -> list[dict[str, Any]]:
        """Of each rank's decode steps as one call: the numbers of sums and of attentions, the rows
        for which its logits or cache differ from the recording's, and whether gloo has a list, too.
        """
        return self._ask("decode_lists", folder)

    def load(self, folder: Path) -> list[dict[str, Any]]:
        """What each rank holds of this model, and how much it took at most while it loaded."""
        return self._ask("load", folder)

    def _ask(self, task: str, folder: Path) -> list[dict[str, Any]]:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{task} {folder}\n")
            process.stdin.flush()
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, f"a rank has ended: {process.wait(PATIENCE_S)}"
            answers.append(json.loads(line))
        return answers


@contextmanager
def lockstep_ranks(size: int) -> Iterator[LockstepRanks]:
    """`size` ranks, which end with the block."""
    meeting, exchange = os.memfd_create("meeting"), os.memfd_create("exchange")
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(index), str(size), str(meeting), str(exchange)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=(meeting, exchange),
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        for index in range(size)
    ]
    os.close(meeting)
    os.close(exchange)
    try:
        yield LockstepRanks(processes)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


class AnonymousPeak:
    """The most memory, besides mapped files, by which this process grows within the block.

    It looks every few milliseconds, so what is held only for a moment may be missed.
    """

    def __enter__(self) -> Self:
        self._before = self._most = _anonymous_bytes()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._end.wait(0.002):
            self._most = max(self._most, _anonymous_bytes())

    @property
    def grown(self) -> int:
        return self._most - self._before


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the kernel does not say")


def main() -> None:
    import torch
    from tests.helpers.host_device import HostCopies
    from tests.helpers.meta_card import META
    from tests.helpers.op_recorder import OpRecorder

    from slipstream_core.forward import trace
    from slipstream_core.forward.forward_ops import ForwardOps
    from slipstream_core.forward.fuse_card import launches_by_layer
    from slipstream_core.forward.operations import SUM, OperationList
    from slipstream_core.forward.program import (
        DecodeGraph,
        decode_graph,
        trial_context,
    )
    from slipstream_core.forward.trace_card import fused_graph
    from slipstream_core.kernels.cpu.kernels import kernels
    from slipstream_core.model.loader import load_model
    from slipstream_core.ranks.group import join_group
    from slipstream_core.ranks.meeting import LocalMeeting
    from slipstream_core.runner.graph_capture import CaptureConfig
    from slipstream_core.runner.torch_runner import KernelConfig, TorchRunner
    from slipstream_core.sharding.collectives import (
        all_ranks_say,
        exchange_by,
        shared_exchange,
    )
    from slipstream_core.sharding.rank import Rank
    from slipstream_core.step.buffer import PlanBuffer, packed_bytes
    from slipstream_core.step.plan import StepPlan
    from slipstream_lab.models import tiny_models

    class Recorder(OpRecorder):
        """Runs all pieces; of the second rank, it fails to record the second."""

        num = 0

        def record(self, work: Any) -> Any:
            replay = super().record(work)
            self.num += 1
            if self.num == 2 and index == 1:
                raise RuntimeError("not this one")
            return replay

    class OneCalls:
        """Counts runs of lists."""

        num = 0

        def __init__(self) -> None:
            run = OperationList.__call__

            def counted(*arguments: Any) -> torch.Tensor:
                self.num += 1
                return run(*arguments)

            OperationList.__call__ = counted  # type: ignore[method-assign]

    class Follower(TorchRunner):
        """Computes plans as they travel."""

        def launch(self, plan: StepPlan) -> None:
            buffer = PlanBuffer(memoryview(bytearray(packed_bytes(plan))))
            buffer.pack(plan)
            super().launch(buffer.view())

    def list_of(model: Any) -> tuple[trace.Forward, list[DecodeGraph]]:
        """The recorded forward with its list where there is one, and that list."""
        lists = []

        def noted(*arguments: Any) -> DecodeGraph | None:
            lowered = decode_graph(*arguments)
            lists.extend([] if lowered is None else [lowered])
            return lowered

        trace.decode_graph = noted
        agree = partial(all_ranks_say, device=torch.device("cpu"))
        ours = kernels()
        assert ours is not None
        forward = trace.trace(model.module, ours, model.vocab_size, agree)
        assert forward is not None
        return forward, lists

    def compare_list(model: Any) -> dict[str, Any]:
        forward, lists = list_of(model)
        [found] = lists
        ours = kernels()
        assert ours is not None
        recorded = forward._traced
        different = []
        for rows in (1, 2, 3, 9, 70):
            outcomes = []
            for compute in (recorded, forward):
                torch.manual_seed(rows)
                context = trial_context(found, ours, rows)
                ids = torch.randint(0, model.vocab_size, (1, rows))
                positions = torch.randint(0, 99, (1, rows))
                with torch.inference_mode():
                    logits = compute(ids, positions, torch.arange(0, rows, 2), context)
                outcomes.append([logits, *(each.keys for each in context.layers)])
            if not all(map(torch.equal, *outcomes)):
                different.append(rows)
        return {
            "sums": sum(each.kind == SUM for each in found.operations),
            "attends": len(found.attends),
            "different": different,
        }

    index, size, meeting_fd, exchange_fd = map(int, sys.argv[1:])
    rank = Rank(index, size)
    torch.set_num_threads(1)
    join_group(rank, "cpu", LocalMeeting(meeting_fd, exchange_fd), PATIENCE_S)
    one_calls = OneCalls()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        said: dict[str, Any] = {}
        try:
            task, folder = line.split()
            with AnonymousPeak() if task == "load" else nullcontext() as peak:
                model = load_model(folder, device="cpu", dtype="float32", rank=rank)
            if peak is not None:
                said["peak"] = peak.grown
            said["weights"] = sum(each.nbytes for each in model.module.parameters())
            said["cache"] = sum(each.bytes_per_token(model.dtype) for each in model.geometry)
            if task == "decode_lists":
                said |= compare_list(model)
                exchange = shared_exchange()
                exchange_by()
                model = load_model(folder, device="cpu", dtype="float32", rank=rank)
                said["by_gloo"] = bool(list_of(model)[1])
                exchange_by(exchange)
            if task == "launches":
                module = model.module.to(torch.bfloat16).to(META)
                graph = fused_graph(module, ForwardOps(), META).graph
                said["launches"] = max(launches_by_layer(graph))
            variants = tiny_models.VARIANTS if task.startswith("serve") else ()
            if variants:
                options: dict[str, Any] = {}
                if task == "serve_recorded":
                    recorder = Recorder()
                    options = {
                        "kernel_config": KernelConfig(
                            native=False,
                            threads=1,
                            capture=CaptureConfig((2, 8), (16, 32), recorder),
                            copies=HostCopies(),
                        ),
                        "make": Follower if index else TorchRunner,
                    }
                one_calls.num = 0
                all_served = tiny_models.serve(model, *variants, **options)
                said["one_calls"] = one_calls.num
                if options:
                    said["recorded"] = recorder.num
                    said["replays"] = recorder.num_replays
                for variant, served in zip(variants, all_served, strict=True):
                    said[variant.name] = served.outputs
            del model
        except ValueError as error:
            said["error"] = str(error)
        answers.write(json.dumps(said) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
