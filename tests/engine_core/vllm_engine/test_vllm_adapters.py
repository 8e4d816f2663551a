"""Adapters that vLLM computes: by number, by content, loaded and dropped while it runs."""

from __future__ import annotations

import gc
import json
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from tests.engine_core.vllm_engine.conftest import VllmBox
from tests.helpers import fake_vllm
from tests.helpers.core_box import Held, StateWorker
from torch import zeros

from slipstream_core.config import CoreConfig, LoraConfig
from slipstream_core.load_error import ModelLoadError
from slipstream_core.vllm_engine.runner import load
from slipstream_core.vllm_engine.settings import engine_args
from slipstream_ipc.columns import u32
from slipstream_ipc.messages import AdapterChange, AdapterOutcome

MakeBox = Callable[..., VllmBox]


def save(folder: Path, alpha: int) -> Path:
    """An adapter, of which the fake knows its alpha."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": alpha}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({"a": zeros(2)}, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save(tmp_path / "one", 1)
    save(tmp_path / "two", 2)
    return tmp_path


def lora_of(root: Path, *names: str, **more: Any) -> LoraConfig:
    modules = tuple((name, str(root / name)) for name in names)
    given = {"max_loras": 4, "is_updatable": True, "roots": (str(root),), **more}
    return LoraConfig(max_rank=20, modules=modules, **given)


def digest_of(box: VllmBox, name: str) -> bytes:
    assert box.core is not None
    return next(it.digest for it in box.core.changes.adapters.served if it.name == name)


def begin(box: VllmBox, worker: StateWorker, name: str, max_tokens: int = 20) -> Held:
    digest = digest_of(box, name) if name else b""
    prompt = [11, 12, 13 + len(worker.streams)]
    return worker.admit(prompt, max_tokens, adapter=name, adapter_digest=digest)


def expected(held: Held, alpha: int) -> list[int]:
    prompt = u32(held.admit.prompt_ids).tolist()
    request = fake_vllm.Request("", prompt, fake_vllm.SamplingParams(seed=None), None, 0)
    request.params.frequency_penalty = 0.0
    request.lora = alpha
    for _ in range(held.admit.derived.max_tokens):
        request.outputs.append(request.next_id(997))
    return request.outputs


def check(box: VllmBox, *helds: tuple[Held, int]) -> None:
    box.until(lambda: all(held.is_over for held, _ in helds))
    for held, alpha in helds:
        assert held.fault is None
        assert held.token_ids == expected(held, alpha)


def change(
    box: VllmBox, worker: StateWorker, name: str, path: Path | str = "", *, inplace: bool = False
) -> AdapterOutcome:
    number = len(worker.heard(AdapterOutcome))
    operation = secrets.token_bytes(16)
    worker.send(AdapterChange(number, operation, name, str(path), inplace))
    box.until(lambda: len(worker.heard(AdapterOutcome)) > number)
    outcome = worker.heard(AdapterOutcome)[-1]
    assert isinstance(outcome, AdapterOutcome)
    return outcome


def test_what_a_start_says_vllm_has(root: Path) -> None:
    config = CoreConfig(model="m", address="", engine="vllm", lora=lora_of(root, "one"))
    args = engine_args(config, is_cpu=True)
    names = ("enable_lora", "max_lora_rank", "max_loras", "max_cpu_loras")
    assert [args[name] for name in names] == [True, 32, 4, 12]
    args = engine_args(
        CoreConfig(model="m", address="", engine="vllm", engine_args={"max_loras": 2}), is_cpu=True
    )
    assert args["max_loras"] == 2
    assert "enable_lora" not in args


def test_rows_have_their_adapters(make_box: MakeBox, root: Path) -> None:
    box = make_box(lora=lora_of(root, "one", "two"))
    worker = box.worker()
    helds = [(begin(box, worker, name), alpha) for name, alpha in (("one", 1), ("two", 2), ("", 0))]
    box.until(lambda: any(box.scheduler.adapters_in_use()))
    check(box, *helds)
    assert box.scheduler.adapters_in_use() == ({}, {})


def test_versions_are_loaded_and_dropped_while_streams_run(make_box: MakeBox, root: Path) -> None:
    box = make_box(lora=lora_of(root))
    worker = box.worker()
    box.until(lambda: worker.is_synced)
    assert change(box, worker, "x", root / "one").fault is None
    old = begin(box, worker, "x", 60)
    box.until(lambda: len(old.token_ids) > 3)
    save(root / "one", 3)  # under the path of before
    assert change(box, worker, "x", root / "one", inplace=True).num_streams == 1
    new = begin(box, worker, "x")
    check(box, (old, 1), (new, 3))
    assert len(box.engine.loras) == 2
    worker.forget(old)
    box.until(lambda: box.core is not None and box.core.handler.num_streams == 1)
    assert box.core is not None
    assert list(box.core.changes.adapters.drop_unused(float("inf")))
    gc.collect()
    box.until(lambda: len(box.engine.loras) == 1)


def test_what_vllm_refuses_is_said(make_box: MakeBox, root: Path) -> None:
    save(root / "large", 101)
    (root / "empty").mkdir()
    box = make_box(lora=lora_of(root))
    worker = box.worker()
    box.until(lambda: worker.is_synced)
    for path, why, says in (
        (root / "large", "", "vLLM: ValueError: LoRA rank 101 is greater than max_lora_rank 16."),
        (root / "empty", "missing", "adapter_config.json is missing"),
        ("/nowhere", "forbidden", "allowed: folders below"),
    ):
        outcome = change(box, worker, "x", path)
        assert outcome.fault is not None
        assert (outcome.why, says in outcome.fault.message) == (why, True), outcome
        assert "\n" not in outcome.fault.message
    gc.collect()
    box.until(lambda: not box.engine.loras)


def test_one_that_is_named_at_the_start_and_refused_ends_it(root: Path) -> None:
    save(root / "large", 101)
    with pytest.raises(
        ModelLoadError, match="the adapter 'large': vLLM: ValueError: LoRA rank 101"
    ):
        load(CoreConfig(model="m", address="", engine="vllm", lora=lora_of(root, "large")))


def test_streams_go_on_with_their_version_in_the_next_core(make_box: MakeBox, root: Path) -> None:
    box = make_box(lora=lora_of(root, "two"))
    worker = box.worker()
    box.until(lambda: worker.is_synced)
    assert change(box, worker, "x", root / "one").fault is None
    kept, unloaded = begin(box, worker, "two", 60), begin(box, worker, "x", 60)
    box.until(lambda: min(len(kept.token_ids), len(unloaded.token_ids)) > 3)
    assert change(box, worker, "x").num_streams == 1
    box.kill()
    box.start(predecessor_ended_s=1.0)
    check(box, (kept, 2), (unloaded, 1))


def test_files_that_change_while_vllm_reads_them_are_refused(
    make_box: MakeBox, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = make_box(lora=lora_of(root))
    worker = box.worker()
    box.until(lambda: worker.is_synced)
    added = box.engine.add_lora

    def slow(request: Any) -> bool:
        shutil.copytree(root / "two", root / "one", dirs_exist_ok=True)
        return added(request)

    monkeypatch.setattr(box.engine, "add_lora", slow)
    outcome = change(box, worker, "x", root / "one")
    assert outcome.fault is not None
    assert "were changed while they were read" in outcome.fault.message
