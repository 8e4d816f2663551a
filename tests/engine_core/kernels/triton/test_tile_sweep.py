"""The sweep of the attention kernels' tiles, dry: under Triton's interpreter, with tiny rows."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; scripts/triton-tests brings it")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("sweeps on a CPU with TRITON_INTERPRET=1", allow_module_level=True)

from tests.helpers.patience import PATIENCE_S

from slipstream_core.attention.triton_backend import Launch
from slipstream_core.kernels.card.tiles import Tile
from slipstream_verify.gpu_check.gpu_report import GpuReport, read_rows
from slipstream_verify.gpu_check.kernels import tile_sweep
from slipstream_verify.gpu_check.kernels.tile_sweep import TileScene, tile_cases, tile_name
from slipstream_verify.gpu_check.sections import tiles
from slipstream_verify.gpu_check.setting import GpuSetting


@pytest.fixture
def setting(tmp_path: Path) -> GpuSetting:
    report = GpuReport("tiles", tmp_path / "rows", 0.0)
    return GpuSetting("cpu", True, tmp_path, time.monotonic() + 5 * PATIENCE_S, report)


def test_every_tile_gives_the_tables_output(setting: GpuSetting) -> None:
    tiles.run(setting)
    rows = {row["case"]: row for row in read_rows(setting.report.path)}
    for case in tile_cases(is_quick=True):
        of_case = [row for name, row in rows.items() if str(name).startswith(f"{case.name}: ")]
        assert len(of_case) == 2
        assert all(row["ok"] is True for row in of_case)
        times: Any = {row["case"]: row["us"] for row in of_case}
        best = rows[case.name]
        assert best["ok"] is True
        assert f"{case.name}: {best['best_tile']}" == min(times, key=lambda name: times[name])
        assert best["table_us"] > 0


def test_a_tile_whose_output_differs_is_not_the_best(
    setting: GpuSetting, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = TileScene.attention

    def attention(self: TileScene, tile: Tile | None) -> tuple[torch.Tensor, list[Launch]]:
        output, launches = real(self, tile)
        return output, launches if tile is None else launches[:1]  # which only stores

    monkeypatch.setattr(TileScene, "attention", attention)
    tiles.run(setting)
    rows = read_rows(setting.report.path)
    assert sum(row["ok"] is False for row in rows) == 4
    assert all(row["best_tile"] is None for row in rows if "best_tile" in row)


def test_the_sweep_tries_a_tile_as_it_is() -> None:
    """And not cut down to a card, nor with the table's stages."""
    [case, _] = tile_cases(is_quick=True)
    scene = TileScene(case, torch.device("cpu"), torch.float32)
    for tile in (Tile(64, 128, 8, 3), Tile(16, 16, 4, 6)):
        _, launches = scene.attention(tile)
        [arguments] = [one.arguments for one in launches if "BLOCK_M" in one.arguments]
        found = [arguments[n] for n in ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")]
        assert Tile(*found) == tile


def test_a_sweeps_tiles_differ_by_name() -> None:
    for step in ("decode", "prefill"):
        names = [tile_name(tile) for tile in tile_sweep.candidates(step, is_quick=False)]
        assert len(set(names)) == len(names) > 20
