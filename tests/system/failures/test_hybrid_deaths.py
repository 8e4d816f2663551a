"""A core with a hybrid model dies in mid-stream: another one computes the states again."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream_lab.models import tiny_models

PROMPTS = [[5 + 7 * row + 3 * at for at in range(4 + 9 * row)] for row in range(4)]
NUM_OUTPUTS = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    [tiny] = (each for each in tiny_models.HYBRIDS if each.name == "LFM2")
    tiny_models.save(tiny, folder)
    return folder


def has_read(streams: list[Any], num_outputs: int) -> bool:
    return max(len(it.token_ids) for it in streams) >= num_outputs


def are_over(streams: list[Any]) -> bool:
    return all(it.is_over for it in streams)


def test_a_hybrids_streams_survive_their_core(make_stack: Any, folder: Path) -> None:
    torch.set_num_threads(1)
    outputs = []
    for deaths in ((), (6, 25)):
        stack = make_stack(
            model=str(folder),
            device="cpu",
            dtype="float32",
            max_model_len=tiny_models.MAX_MODEL_LEN,
            max_num_seqs=3,
            max_num_batched_tokens=16,
            block_size=4,
            num_blocks=100,
            threads=1,
        )
        client = stack.client()
        params = {"max_tokens": NUM_OUTPUTS, "ignore_eos": True, "detokenize": False}
        streams = [client.submit(prompt, **params) for prompt in PROMPTS]
        for num_outputs in deaths:
            stack.until(partial(has_read, streams, num_outputs))
            assert not are_over(streams)
            stack.kill_core()
            for _ in range(5):
                stack.step()
            stack.start_core()
        stack.until(partial(are_over, streams))
        outputs.append([it.token_ids for it in streams])
    assert outputs[0] == outputs[1]
    assert [len(each) for each in outputs[0]] == [NUM_OUTPUTS] * len(PROMPTS)
