"""Core and worker die under streams that have adapters: the text stays that of the merged models,
or, where an adapter's files have changed meanwhile, its streams end as diverged.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.loras import ALL_LINEAR, Lora, save_lora, save_merged

from slipstream_core.config import LoraConfig
from slipstream_lab.models import tiny_models

LORAS = (Lora(ALL_LINEAR, 8, 16, seed=1), Lora(("q_proj", "v_proj"), 16, 32, seed=2))
NAMES = ("", "a0", "a1")
PROMPTS = [[5 + 7 * row + 3 * at for at in range(4 + 9 * row)] for row in range(2)]
NUM_OUTPUTS = 30


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, two adapters, and the models that these are merged into."""
    folder = tmp_path_factory.mktemp("loras")
    (tiny,) = [each for each in tiny_models.ARCHITECTURES if each.name == "Llama"]
    tiny_models.save(tiny, folder / "base")
    for at, each in enumerate(LORAS):
        save_lora(each, folder / "base", folder / f"a{at}")
        save_merged(each, folder / "base", folder / f"merged{at}")
    return folder


def open_stack(make_stack: Any, model: Path, loras: Path | None = None) -> Any:
    torch.set_num_threads(1)
    lora = None
    if loras is not None:
        modules = tuple((name, str(loras / name)) for name in NAMES if name)
        lora = LoraConfig(modules=modules, max_rank=16, max_loras=2)
    return make_stack(
        model=str(model),
        device="cpu",
        dtype="float32",
        max_model_len=tiny_models.MAX_MODEL_LEN,
        max_num_seqs=6,
        max_num_batched_tokens=16,
        block_size=4,
        num_blocks=200,
        threads=1,
        lora=lora,
    )


def submit(stack: Any, names: Sequence[str] = NAMES) -> list[Any]:
    client = stack.client()
    params = {"max_tokens": NUM_OUTPUTS, "ignore_eos": True, "detokenize": False}
    return [client.submit(prompt, adapter=name, **params) for name in names for prompt in PROMPTS]


def has_read(streams: list[Any], num_outputs: int) -> bool:
    return max(len(it.token_ids) for it in streams) >= num_outputs


def are_over(streams: list[Any]) -> bool:
    return all(it.is_over for it in streams)


def expected_of(make_stack: Any, saved: Path) -> list[list[int]]:
    """Of each name, what the merged model says."""
    outputs = []
    for model in ("base", "merged0", "merged1"):
        stack = open_stack(make_stack, saved / model)
        streams = submit(stack, [""])
        stack.until(partial(are_over, streams))
        outputs += [it.token_ids for it in streams]
    return outputs


def restart(stack: Any, which: str) -> None:
    getattr(stack, f"kill_{which}")()
    for _ in range(5):
        stack.step()
    getattr(stack, f"start_{which}")()


def test_streams_with_adapters_survive_core_and_worker(make_stack: Any, saved: Path) -> None:
    expected = expected_of(make_stack, saved)
    stack = open_stack(make_stack, saved / "base", saved)
    streams = submit(stack)
    for killed, num_outputs in (("core", 5), ("worker", 13), ("core", 21)):
        stack.until(partial(has_read, streams, num_outputs))
        assert not are_over(streams)
        restart(stack, killed)
    stack.until(partial(are_over, streams))
    assert [it.token_ids for it in streams] == expected
    # over blocks that the first ones left in the prefix cache
    again = submit(stack)
    stack.until(partial(are_over, again))
    assert [it.token_ids for it in again] == expected


def test_an_adapter_that_changed_ends_its_streams(
    make_stack: Any, saved: Path, tmp_path: Path
) -> None:
    expected = expected_of(make_stack, saved)
    loras = tmp_path / "loras"
    for name in NAMES[1:]:
        shutil.copytree(saved / name, loras / name)
    stack = open_stack(make_stack, saved / "base", loras)
    streams = submit(stack)
    stack.until(partial(has_read, streams, 9))
    shutil.copytree(saved / "a0", loras / "a1", dirs_exist_ok=True)
    restart(stack, "core")
    stack.until(partial(are_over, streams))
    assert [it.token_ids for it in streams[:4]] == expected[:4]
    for it, whole in zip(streams[4:], expected[4:], strict=True):
        assert it.end.fault.code == "diverged"
        assert it.end.fault.message == "the files of the adapter 'a1' have changed"
        assert it.token_ids == whole[: len(it.token_ids)]
    # new ones get what lies there now
    again = submit(stack, ["a1"])
    stack.until(partial(are_over, again))
    assert [it.token_ids for it in again] == expected[2:4]


def test_an_adapter_that_is_gone_ends_its_streams_alone(
    make_stack: Any, saved: Path, tmp_path: Path
) -> None:
    expected = expected_of(make_stack, saved)
    loras = tmp_path / "loras"
    for name in NAMES[1:]:
        shutil.copytree(saved / name, loras / name)
    stack = open_stack(make_stack, saved / "base", loras)
    streams = submit(stack)
    stack.until(partial(has_read, streams, 9))
    shutil.rmtree(loras / "a0")
    restart(stack, "core")
    stack.until(partial(are_over, streams))
    assert [it.token_ids for it in streams[:2]] == expected[:2]
    assert [it.token_ids for it in streams[4:]] == expected[4:]
    for it in streams[2:4]:
        assert it.end.fault.message == "the adapter 'a0' is not served any more"
    (unknown, _) = submit(stack, ["a0"])
    stack.until(lambda: unknown.is_over)
    assert unknown.fault.field == "model"
    assert "got 'a0', allowed: one of 'a1'" in unknown.fault.message
