"""Times a step's attention with one tile after another, replayed from graphs, and reports them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slipstream_core.attention.triton_backend import Launch
from slipstream_core.kernels.card.tiles import Tile
from slipstream_core.runner.graph_capture import CudaRecorder
from slipstream_verify.gpu_check.bounds import Ceilings, ceilings, median_s
from slipstream_verify.gpu_check.kernels.tile_sweep import (
    TileCase,
    TileScene,
    candidates,
    tile_cases,
    tile_name,
)
from slipstream_verify.gpu_check.reference_cases import LIMITS, relative_error
from slipstream_verify.gpu_check.setting import GpuSetting

_REPEATS = 10
_IN_A_GRAPH = 10  # times that a graph holds what is timed
_MUCH_S = 1.0  # to load a kernel and time it, at most


def sweep_all(setting: GpuSetting) -> None:
    """A row per case and tile, and one per case with the best of them."""
    limits = ceilings(setting)
    for case in tile_cases(is_quick=setting.is_quick):
        if setting.has_time(case.name):
            _sweep(setting, case, limits)


def _sweep(setting: GpuSetting, case: TileCase, limits: Ceilings) -> None:
    device, report = torch.device(setting.device), setting.report
    # the interpreter has no bfloat16 of its own, and is slow enough
    dtype = torch.float32 if setting.device == "cpu" else torch.bfloat16
    scene = TileScene(case, device, dtype)
    bound_s = max(case.num_bytes / limits.bytes_per_s, case.flops / limits.bf16_flops_per_s)
    expected, launches = scene.attention(None)
    for launch in launches:
        launch.run()
    own_s = _time(setting, launches)
    best: tuple[float, Tile] | None = None
    for tile in candidates(case.step, is_quick=setting.is_quick):
        name = f"{case.name}: {tile_name(tile)}"
        if not setting.has_time(name, _MUCH_S):
            break
        try:
            output, launches = scene.attention(tile)
            output.fill_(torch.nan)
            for launch in launches:
                launch.run()
            error = relative_error(output, expected.double().cpu())
            tile_s = _time(setting, launches)
        except torch.AcceleratorError:
            raise
        except Exception as problem:  # does not fit the card, mostly
            report.add(name, skipped=f"{type(problem).__name__}: {problem}"[:200])
            continue
        is_right = error < 2 * LIMITS[dtype]
        report.add(
            name,
            is_right,
            us=round(tile_s * 1e6, 2),
            share_of_bound_here=round(bound_s / tile_s, 4),
            relative_error=error,
        )
        if is_right and (best is None or tile_s < best[0]):
            best = tile_s, tile
    report.add(
        case.name,
        None if best is None else True,
        table_us=round(own_s * 1e6, 2),
        best_us=None if best is None else round(best[0] * 1e6, 2),
        best_tile=None if best is None else tile_name(best[1]),
        bound_us=round(bound_s * 1e6, 2),
        share_of_bound=round(bound_s / own_s, 4),
    )


def _time(setting: GpuSetting, launches: Sequence[Launch]) -> float:
    """Seconds of what attends; the first launch stores, whatever the tile."""

    def work() -> None:
        for launch in launches[1:]:
            launch.run()

    repeats = 2 if setting.is_quick else _REPEATS
    if setting.device == "cpu":
        return median_s(setting.device, work, repeats=repeats)

    def often() -> None:
        for _ in range(_IN_A_GRAPH):
            work()

    # launched one by one, small kernels take what the host takes
    replay = CudaRecorder(torch.device(setting.device)).record(often)
    return median_s(setting.device, replay, repeats=repeats) / _IN_A_GRAPH
