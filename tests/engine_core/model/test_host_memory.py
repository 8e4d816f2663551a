"""What does not fit into memory is refused beforehand, with numbers; what would run is not."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.helpers.torch_driver import save_model

from slipstream_core.config import CoreConfig
from slipstream_core.load_error import ModelLoadError
from slipstream_core.model import loader, weight_sources
from slipstream_core.model.host_memory import (
    HostMemory,
    default_cache,
    read_host_memory,
    refuse_cache,
    refuse_weights,
    unmapped_bytes,
)
from slipstream_core.model.loader import load_model
from slipstream_core.runner import torch_factory
from slipstream_core.runner.torch_factory import load_runner

GIB = 2**30
KIB = GIB >> 10  # of a GiB


def machine(root: Path, cgroup: str = "", **meminfo: int) -> Path:
    """A machine with /proc/meminfo in KiB; the groups' files are added by `group`."""
    (root / "proc/self").mkdir(parents=True)
    given = {"MemTotal": 16 * KIB, "MemAvailable": 8 * KIB, "SwapTotal": 0, "SwapFree": 0} | meminfo
    lines = [f"{name}: {num} kB" for name, num in given.items()]
    (root / "proc/meminfo").write_text("\n".join([*lines, "HugePages_Total: 0", ""]))
    (root / "proc/self/cgroup").write_text(cgroup)
    return root


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".", 1)).write_text(f"{content}\n")


@pytest.mark.parametrize(
    ("total", "weights", "cache"),
    [
        (16 * GIB, GIB, GIB),
        (3 * GIB, GIB, GIB),
        (GIB, 0, GIB // 2),
        (GIB, GIB // 2, GIB // 4),
        (GIB, 2 * GIB, 0),
    ],
)
def test_a_default_cache_takes_half_of_what_a_small_machine_has(
    total: int, weights: int, cache: int
) -> None:
    assert default_cache(GIB, weights, HostMemory(total, total, "this machine")) == cache
    assert default_cache(GIB, weights, None) == GIB


def test_a_machine_without_groups_has_what_the_kernel_says(tmp_path: Path) -> None:
    root = machine(tmp_path, SwapTotal=2 * KIB, SwapFree=KIB)
    assert read_host_memory(root) == HostMemory(18 * GIB, 9 * GIB, "this machine")


@pytest.mark.parametrize("path", ["/slice/box", "/not/mounted/here"])
def test_the_limit_of_a_group_of_version_2_counts_and_of_those_above_it(
    tmp_path: Path, path: str
) -> None:
    root = machine(tmp_path, f"0::{path}\n")
    base = root / "sys/fs/cgroup"
    stat = f"anon 1\nfile {GIB}\nshmem {GIB // 4}"
    group(base / "slice/box", memory__max="max", memory__current=GIB, memory__stat=stat)
    above = base / "slice" if path == "/slice/box" else base
    group(above, memory__max=4 * GIB, memory__current=3 * GIB, memory__stat=stat)
    # of the pages of files what is no shared memory can be taken back
    expected = HostMemory(4 * GIB, GIB + 3 * GIB // 4, "this control group")
    assert read_host_memory(root) == expected


def test_the_limit_of_a_group_of_version_1_counts(tmp_path: Path) -> None:
    root = machine(tmp_path, "9:name=systemd:/\n4:memory,cpu:/box\n0::/\n")
    group(
        root / "sys/fs/cgroup/memory/box",
        memory__limit_in_bytes=2 * GIB,
        memory__usage_in_bytes=GIB,
        memory__stat=f"cache 5\ntotal_cache {GIB // 2}\ntotal_shmem 0",
    )
    unlimited = {"memory__limit_in_bytes": 2**63 - 4096, "memory__usage_in_bytes": 5 * GIB}
    group(root / "sys/fs/cgroup/memory", **unlimited, memory__stat="total_cache 0")
    assert read_host_memory(root) == HostMemory(2 * GIB, GIB + GIB // 2, "this control group")


def test_where_nothing_is_known_nothing_is_refused(tmp_path: Path) -> None:
    assert read_host_memory(tmp_path) is None
    refuse_weights("m", 2**60, None)
    refuse_cache("m", 2**60, 2**60, None)


def test_this_machine_is_read() -> None:
    memory = read_host_memory()
    assert memory is not None
    assert 0 < memory.available <= memory.total


def test_only_tensors_in_another_type_are_memory(tmp_path: Path) -> None:
    half, full = torch.zeros(30, 2, dtype=torch.bfloat16), torch.zeros(7)
    save_file({"a": half, "b": full}, tmp_path / "model-1.safetensors", {"format": "pt"})
    save_file({"c": half}, tmp_path / "model-2.safetensors")
    assert unmapped_bytes(tmp_path, torch.bfloat16) == 2 * 7
    assert unmapped_bytes(tmp_path, torch.float32) == 4 * 120
    (tmp_path / "model-3.safetensors").write_bytes(b"\xff" * 20)
    assert unmapped_bytes(tmp_path, torch.float32) is None
    assert unmapped_bytes(tmp_path / "none", torch.float32) is None


def test_words_say_what_is_needed_what_there_is_and_what_to_do() -> None:
    memory = HostMemory(16 * GIB, 8 * GIB, "this control group")
    refuse_weights("m", 8 * GIB, memory)
    with pytest.raises(ModelLoadError) as caught:
        refuse_weights("m", 9 * GIB, memory)
    for words in ("9.00 GiB", "8.00 GiB of this control group's 16.00 GiB", "dtype"):
        assert words in str(caught.value)
    refuse_cache("m", 4 * GIB, 12 * GIB, memory)
    with pytest.raises(ModelLoadError, match=r"500\.00 GiB.*less than 12\.00 GiB.*kv_cache_gib"):
        refuse_cache("m", 4 * GIB, 500 * GIB, memory)
    with pytest.raises(ModelLoadError, match=r"adapters of 1\.00 GiB \(lora_gib\).*less than 11"):
        refuse_cache("m", 4 * GIB, 12 * GIB, memory, adapters=GIB)


def test_a_model_larger_than_memory_is_refused_before_it_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loader, "read_host_memory", lambda: HostMemory(24 * GIB, 20 * GIB, "it"))
    made = []
    monkeypatch.setattr(weight_sources, "random_module", lambda *args, **_: made.append(args))
    with pytest.raises(ModelLoadError, match=r"29\.\d+ GiB of memory, but 20\.00 GiB of it's 24"):
        load_model("random:llama-3.1-8b", dtype="float32", device="cpu")
    assert made == []


def test_a_checkpoint_in_its_own_type_is_not_refused_and_stays_a_mapping(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = str(save_model(tmp_path))
    scarce = HostMemory(2 * GIB, 1000, "this machine")
    for module in (loader, torch_factory):
        monkeypatch.setattr(module, "read_host_memory", lambda: scarce)
    assert load_model(folder, device="cpu").kept_bytes == 0
    with pytest.raises(ModelLoadError, match="its weights take"):
        load_model(folder, device="cpu", dtype="bfloat16")
    config = CoreConfig(model=folder, address="unused", device="cpu", num_blocks=20)
    with caplog.at_level(logging.WARNING):
        runner = load_runner(config)
    runner.close()
    assert "they stay memory-mapped" in caplog.text
    assert "the KV cache may grow" in caplog.text


@pytest.mark.parametrize(
    "cache", [{"kv_cache_gib": 500_000.0, "touches_cache": True}, {"num_blocks": 2**50}]
)
def test_a_cache_larger_than_the_machine_is_refused(
    tmp_path: Path, cache: dict[str, object]
) -> None:
    folder = str(save_model(tmp_path))
    with pytest.raises(ModelLoadError, match=r"do not fit into this .*; give less than"):
        load_runner(CoreConfig(model=folder, address="unused", device="cpu", **cache))  # type: ignore[arg-type]


def test_a_cache_that_the_system_does_not_give_is_refused_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where limits of the process are lower than the machine's memory."""
    monkeypatch.setattr(torch_factory, "read_host_memory", lambda: None)
    folder = str(save_model(tmp_path))
    with pytest.raises(
        ModelLoadError, match=r"do not fit into this process's memory; lower kv_cache"
    ):
        load_runner(
            CoreConfig(
                model=folder,
                address="unused",
                device="cpu",
                kv_cache_gib=500_000.0,
                touches_cache=True,
            )
        )
