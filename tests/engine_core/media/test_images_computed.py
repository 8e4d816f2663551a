"""Prompts with images against transformers' `generate`: the same tokens, however steps are cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from tests.helpers.vision_models import PLACEHOLDER, Reference, make_vision_model, picture

from slipstream_core.drafting.ngram_drafter import NgramDrafter
from slipstream_core.drafting.step_costs import StepCosts
from slipstream_core.forward.trace import DecodesInOneCall
from slipstream_core.media.places import places_of
from slipstream_core.model.loader import load_model
from slipstream_core.runner.torch_runner import KernelConfig, TorchRunner
from slipstream_core.step.plan import ImageEncoder, StepPlan
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import SamplingParams
from slipstream_ipc.validation.media import media_item
from slipstream_lab.common.bare_loop import LoopRequest, drive

pytestmark = pytest.mark.process

BLOCK, NUM_TOKENS = 4, 24
ONE, TWO, THREE = picture(1), picture(2, 64, 32), picture(3, 24, 24, "JPEG")
IMAGES: list[tuple[bytes, ...]] = [(ONE,), (), (TWO, THREE), (), ()]


@dataclass(frozen=True, slots=True)
class Seeing:
    """A model on our runner, and transformers' answers to requests with images."""

    runner: TorchRunner
    requests: list[LoopRequest]
    expected: list[list[int]]

    def tokens(
        self, requests: Sequence[LoopRequest], *, budget: int, **how: Any
    ) -> list[list[int]]:
        driven = drive(self.runner, requests, budget=budget, **how)
        return [each.token_ids for each in driven.outputs]


def request_of(
    encoder: ImageEncoder, prompt: Sequence[int], images: Sequence[bytes]
) -> LoopRequest:
    ids = np.array(prompt, np.uint32)
    if not images:
        return LoopRequest(ids, NUM_TOKENS)
    digests = [media_item("image", image).digest for image in images]
    features = [encoder.encode(image, 0) for image in images]
    places = encoder.with_rope(ids, places_of(ids, PLACEHOLDER, digests, features))
    return LoopRequest(ids, NUM_TOKENS, media=places)


@pytest.fixture(
    scope="module",
    params=[
        "qwen2_5_vl",
        pytest.param("qwen3_vl", marks=pytest.mark.long),
        pytest.param("llava", marks=pytest.mark.long),
        pytest.param("qwen2_5_vl in torch", marks=pytest.mark.long),
    ],
)
def seeing(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Seeing]:
    name, _, how = request.param.partition(" ")
    folder = make_vision_model(name, tmp_path_factory.mktemp(name))
    model = load_model(str(folder), device="cpu", takes_images=True)
    assert model.sight.card is not None
    assert not model.sight.card.why_not
    encoder = model.sight.encoder
    assert encoder is not None
    runner = TorchRunner(
        model,
        num_blocks=400,
        block_size=BLOCK,
        max_num_seqs=8,
        kernel_config=KernelConfig(native=not how, threads=1),
    )
    reference = Reference(folder)
    prompts = [reference.prompt(seed, images) for seed, images in enumerate(IMAGES)]
    other = reference.other_picture(prompts[0], ONE, NUM_TOKENS)
    prompts[3] = prompts[0]
    prompts[4] = [*prompts[1], PLACEHOLDER, 7]  # a placeholder that is none
    pairs = list(zip(prompts, [*IMAGES[:3], (other,), ()], strict=True))
    requests = [request_of(encoder, *pair) for pair in pairs]
    yield Seeing(runner, requests, [reference.answer(*pair, NUM_TOKENS) for pair in pairs])
    runner.close()
    encoder.close()


def test_images_that_do_not_stand_apart_are_refused_where_positions_need_it(
    seeing: Seeing,
) -> None:
    """A client may send token ids."""
    encoder, media = seeing.runner.info.encoder, seeing.requests[0].media
    assert encoder is not None
    assert media is not None
    num = len(media.features[0])
    divided = [1, *[PLACEHOLDER] * (num - 1), 2, PLACEHOLDER, 3]
    for prompt, items in (([1, *[PLACEHOLDER] * 2 * num, 3], 2), (divided, 1)):
        ids = np.array(prompt, np.uint32)
        places = places_of(ids, PLACEHOLDER, [b""] * items, [media.features[0]] * items)
        if media.rope is None:
            assert encoder.with_rope(ids, places) is places
        else:
            with pytest.raises(BadRequest, match=r"^media: got placeholders of images that adjoin"):
                encoder.with_rope(ids, places)


def test_alone_and_together(seeing: Seeing) -> None:
    assert len({token for each in seeing.expected for token in each}) > 20  # no loops
    assert seeing.expected[0] != seeing.expected[3]
    for request, expected in zip(seeing.requests, seeing.expected, strict=True):
        assert seeing.tokens([request], budget=512) == [expected]
    assert seeing.tokens(seeing.requests, budget=512) == seeing.expected


@pytest.mark.parametrize("budget", [7, 16])
def test_cut_within_images(seeing: Seeing, budget: int) -> None:
    assert seeing.tokens(seeing.requests, budget=budget) == seeing.expected


def test_found_in_the_prefix_cache(seeing: Seeing) -> None:
    """Another picture behind the same text is another prefix, also where the tokens are equal."""
    again = [*seeing.requests, *seeing.requests]
    driven = drive(seeing.runner, again, budget=64, is_cached=True)
    assert [each.token_ids for each in driven.outputs] == 2 * seeing.expected
    assert driven.num_cached >= len(seeing.requests[0].prompt) // BLOCK * BLOCK // 2


def test_preempted(seeing: Seeing) -> None:
    longest = max(len(each.prompt) for each in seeing.requests) + NUM_TOKENS
    info = seeing.runner.info
    seeing.runner.info = replace(info, max_model_len=longest)
    try:
        runs = [
            drive(seeing.runner, seeing.requests, budget=20, num_blocks=-(-longest // BLOCK) + more)
            for more in range(1, 9)
        ]
    finally:
        seeing.runner.info = info
    assert max(driven.num_preemptions for driven in runs) > 0
    for driven in runs:
        assert [each.token_ids for each in driven.outputs] == seeing.expected


def test_beside_drafts(seeing: Seeing) -> None:
    if not seeing.runner.info.takes_drafts:
        pytest.skip("torch's operators verify no drafts")
    drafter = NgramDrafter(
        num_speculative_tokens=3,
        prompt_lookup_min=1,
        prompt_lookup_max=2,
        costs=StepCosts(seeing.runner.info.decode_s),
    )
    given = seeing.tokens(seeing.requests, budget=40, drafter=drafter)
    assert given == seeing.expected


def test_a_sampled_placeholder_is_a_token(seeing: Seeing) -> None:
    """It shifts no image of the requests beside it, and none of its own."""
    sampled = replace(seeing.requests[2], more=SamplingParams(logit_bias={PLACEHOLDER: 100.0}))
    given = seeing.tokens([sampled, *seeing.requests], budget=16)
    assert given[0] == [PLACEHOLDER] * NUM_TOKENS
    assert given[1:] == seeing.expected


def test_steps_behind_images_are_those_of_text(
    seeing: Seeing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once its images are computed, a row decodes as any other: in one call, where there is one."""
    plans: list[StepPlan] = []
    launch = seeing.runner.launch
    monkeypatch.setattr(seeing.runner, "launch", lambda plan: (plans.append(plan), launch(plan)))
    seeing.tokens(seeing.requests, budget=512)
    seen, *later = plans
    assert seen.media is not None
    assert [plan.media for plan in later] == [None] * (NUM_TOKENS - 1)
    assert isinstance(seeing.runner._model, DecodesInOneCall) == seeing.runner.info.takes_drafts
