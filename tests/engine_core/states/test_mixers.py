"""Modules that carry states are found by what they do; those not understood are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slipstream_core.attention.interface import TrialContext
from slipstream_core.load_error import ModelLoadError
from slipstream_core.model.loader import load_model
from slipstream_core.sharding.rank import Rank
from slipstream_core.states.continuation_check import check_continuation
from slipstream_core.states.mixers import Mixer, MixingContext, install_mixers, read_states
from slipstream_core.states.state_cache import (
    EachTokenAlone,
    MixerStates,
    RowStates,
    StateError,
    concerns_states,
)
from slipstream_lab.models import tiny_models

WIDTH = 6


def config_of(name: str) -> Any:
    [tiny] = (each for each in tiny_models.HYBRIDS if each.name == name)
    return tiny.config()


class Decay(nn.Module):
    """A mixer: each output is the mean of the inputs so far, the later ones weighing more."""

    def __init__(self, layer_idx: int = 0) -> None:
        super().__init__()
        self.layer_idx = layer_idx

    def forward(self, hidden_states: Any, cache_params: Any = None, **_: Any) -> Any:
        state = cache_params.get_recurrent_state(self.layer_idx)
        state = torch.zeros_like(hidden_states[:, 0]) if state is None else self.continued(state)
        outputs = []
        for token in hidden_states.unbind(1):
            state = 0.5 * state + token
            outputs.append(state)
        cache_params.update_recurrent_state(state, self.layer_idx)
        return torch.stack(outputs, dim=1)

    def continued(self, state: Any) -> Any:
        return state


class Forgets(Decay):
    """It continues a row in single steps alone."""

    def forward(self, hidden_states: Any, cache_params: Any = None, **others: Any) -> Any:
        self.is_step = hidden_states.shape[1] == 1
        return super().forward(hidden_states, cache_params, **others)

    def continued(self, state: Any) -> Any:
        return state if self.is_step else torch.zeros_like(state)


class Drifts(Decay):
    def continued(self, state: Any) -> Any:
        return 0.9 * state


class Nothing(Decay):
    """Its state has no effect that could be seen."""

    def continued(self, state: Any) -> Any:
        return 0 * state

    def forward(self, hidden_states: Any, cache_params: Any = None, **others: Any) -> Any:
        super().forward(hidden_states, cache_params, **others)
        return hidden_states


class Model(nn.Module):
    def __init__(self, mixer: nn.Module, num_calls: int = 1, **passed: Any) -> None:
        super().__init__()
        self.mixer = mixer
        self.num_calls, self.passed = num_calls, passed

    def forward(
        self, input_ids: Any, past_key_values: Any = None, paged: Any = None, **_: Any
    ) -> Any:
        hidden = input_ids[..., None].expand(-1, -1, WIDTH).float()
        for _ in range(self.num_calls):
            cache = None if "no_cache" in self.passed else past_key_values
            others = {name: each for name, each in self.passed.items() if name != "no_cache"}
            hidden = self.mixer(hidden, cache_params=cache, paged=paged, **others)
        return hidden


def states_of(model: Model) -> tuple[tuple[Mixer, ...], list[MixerStates]]:
    mixers = install_mixers(model)
    return mixers, read_states(model, mixers, torch.device("cpu"))


class NewName(Decay):
    def forward(self, hidden_states: Any, cache: Any = None, **others: Any) -> Any:
        return super().forward(hidden_states, cache, **others)


class ModelOfNewNames(Model):
    """As transformers 5.24 has it: a cache is a `cache`, and gets the forward's arguments."""

    def forward(self, input_ids: Any, cache: Any = None, **others: Any) -> Any:
        hidden = input_ids[..., None].expand(-1, -1, WIDTH).float()
        hidden, _ = cache.update(hidden, hidden, 0, kwargs=others)
        return self.mixer(hidden, cache=cache)


def test_a_cache_may_have_its_newer_name() -> None:
    mixers, [states] = states_of(ModelOfNewNames(NewName()))
    assert states.recurrent[0].shape == (WIDTH,)
    assert check_continuation(mixers) == ""


class Projects(Decay):
    """It is called by position, and returns queries in heads, keys, and nothing."""

    def forward(self, hidden_states: Any, cache_params: Any = None, mask: Any = None) -> Any:  # type: ignore[override]
        assert mask is None
        mixed = super().forward(hidden_states, cache_params)
        return mixed.unflatten(-1, (2, WIDTH // 2)), -mixed, None


class ModelThatAttends(Model):
    def forward(self, input_ids: Any, past_key_values: Any = None, **_: Any) -> Any:
        hidden = input_ids[..., None].expand(-1, -1, WIDTH).float()
        query, key, nothing = self.mixer(hidden, past_key_values, *self.passed.values())
        assert nothing is None
        assert torch.equal(query.flatten(2), -key)
        return query


def test_a_mixer_may_return_several_tensors_of_its_tokens() -> None:
    mixers, _ = states_of(ModelThatAttends(Projects()))
    assert check_continuation(mixers) == ""
    ids = torch.tensor([[5, 7, 9]])
    model = ModelThatAttends(Projects())
    install_mixers(model)
    query = model(input_ids=ids, paged=TrialContext())
    assert torch.equal(query, ids[..., None, None].expand(-1, -1, 2, WIDTH // 2).float())


def test_unnamed_arguments_have_the_names_of_the_forward() -> None:
    with pytest.raises(StateError, match="passed 'mask', whose meaning is not known"):
        states_of(ModelThatAttends(Projects(), mask=torch.ones(1)))


def test_what_a_mixer_returns_is_of_its_tokens() -> None:
    class Sums(Decay):
        def forward(self, hidden_states: Any, cache_params: Any = None, **others: Any) -> Any:
            mixed = super().forward(hidden_states, cache_params)
            return mixed, mixed.sum()[None, None]

    with pytest.raises(StateError, match="Sums returns more than what is of its tokens"):
        states_of(Model(Sums()))


def test_a_mixer_is_known_by_what_it_asks_for() -> None:
    mixers, [states] = states_of(Model(Decay()))
    assert [each.kind for each in mixers] == ["Decay"]
    assert states.recurrent[0].shape == (WIDTH,)
    assert states.num_bytes == 4 * WIDTH
    assert install_mixers(nn.Sequential(nn.Linear(2, 2), nn.Conv1d(1, 1, 1))) == ()


def test_each_token_of_a_trial_is_a_row_of_its_own() -> None:
    model = Model(Decay())
    install_mixers(model)
    ids = torch.tensor([[5, 7, 9]])
    assert torch.equal(model(input_ids=ids, paged=TrialContext())[0, :, 0], ids[0].float())
    again = MixingContext(None, EachTokenAlone())  # type: ignore[arg-type]
    assert torch.equal(model(input_ids=ids, paged=again)[0, :, 0], ids[0].float())


@pytest.mark.parametrize("paged", [None, object()])
def test_a_forward_without_rows_for_mixers_raises(paged: object) -> None:
    """Each token would begin a row, and nothing would say so."""
    model = Model(Decay())
    install_mixers(model)
    with pytest.raises(StateError, match=f"forward with {type(paged).__name__} has no rows"):
        model(input_ids=torch.tensor([[5, 7]]), paged=paged)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Model(Decay(), num_calls=2), "runs for several layers"),
        (Model(Decay(), no_cache=True), "is given no cache"),
        (Model(Decay(), decay_mask=torch.ones(1)), "'decay_mask', whose meaning is not known"),
    ],
)
def test_a_mixer_that_is_called_otherwise_is_refused(model: Model, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        states_of(model)


def test_a_mixer_that_reads_positions_is_refused() -> None:
    class Asks(Decay):
        def forward(self, hidden_states: Any, cache_params: Any, position_ids: Any) -> Any:  # type: ignore[override]
            cache_params.update_recurrent_state(hidden_states, 0)

    with pytest.raises(TypeError, match="reads positions"):
        install_mixers(nn.Sequential(Asks()))


def test_a_mixer_that_needs_another_cache_is_refused() -> None:
    class Crops(Decay):
        def forward(self, hidden_states: Any, cache_params: Any = None, **others: Any) -> Any:
            cache_params.crop(-1)
            return super().forward(hidden_states, cache_params, **others)

    with pytest.raises(AttributeError, match="'RowStates' object has no attribute 'crop'") as error:
        states_of(Model(Crops()))
    assert concerns_states(error.value)
    assert not concerns_states(AttributeError("crop", obj=error))


def test_a_mixer_that_keeps_nothing_is_refused() -> None:
    class Idle(Decay):
        def forward(self, hidden_states: Any, cache_params: Any = None, **others: Any) -> Any:
            return hidden_states

    with pytest.raises(TypeError, match="Idle of layer 0 keeps no state"):
        states_of(Model(Idle()))


@pytest.mark.parametrize(
    ("mixer", "said"),
    [
        (Decay(), ""),
        (Forgets(), "Forgets forgets its state where a chunk continues a row"),
        (Nothing(), "Nothing shows no effect of its state in a trial"),
    ],
    ids=["Decay", "Forgets", "Nothing"],
)
def test_chunks_of_a_mixer_that_forgets_are_stepped(mixer: Decay, said: str) -> None:
    mixers, _ = states_of(Model(mixer))
    assert check_continuation(mixers) == said
    assert [each.is_stepped for each in mixers] == [bool(said)]


def test_mixers_of_one_class_may_have_inputs_of_several_widths() -> None:
    class Two(Model):
        def forward(self, input_ids: Any, past_key_values: Any = None, **_: Any) -> Any:
            wide = input_ids[..., None].expand(-1, -1, 2 * WIDTH).float()
            narrow = self.mixer(wide, cache_params=past_key_values)[..., :WIDTH]
            return self.second(narrow, cache_params=past_key_values)

    model = Two(Forgets())
    model.second = Decay(layer_idx=1)
    mixers, _ = states_of(model)
    check_continuation(mixers)
    assert [(each.width, each.is_stepped) for each in mixers] == [(12, True), (6, False)]


def test_the_trial_leaves_weights_as_they_are() -> None:
    class Weighs(Decay):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))

    mixer = Weighs()
    mixers, _ = states_of(Model(mixer))
    check_continuation(mixers)
    assert mixer.weight.dtype == torch.bfloat16
    twin = mixers[0].in_float32()
    assert twin.module.weight.dtype == torch.float32
    assert twin.module.forward.__self__ is twin
    assert mixers[0].module is mixer


def test_a_mixer_that_cannot_be_continued_is_refused() -> None:
    mixers, _ = states_of(Model(Drifts()))
    with pytest.raises(ValueError, match="Drifts gives other results in single steps"):
        check_continuation(mixers)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["Jamba", "Qwen3.5", "LFM2", "Bamba", "Falcon-H1", "Nemotron-H"])
def test_jambas_chunks_alone_are_stepped(tmp_path: Path, name: str, dtype: Any) -> None:
    """Transformers' Mamba-1 forgets its state where a chunk continues, in any dtype."""
    torch.set_num_threads(1)
    [tiny] = (each for each in tiny_models.HYBRIDS if each.name == name)
    tiny_models.save(tiny, tmp_path)
    stepped = load_model(str(tmp_path), device="cpu", dtype=dtype).stepped
    assert stepped.startswith("JambaMambaMixer forgets its state") == (name == "Jamba")
    assert bool(stepped) == (name == "Jamba")


def test_ranks_and_cards_are_refused_in_our_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_of("LFM2").save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=r"recurrent states.*tensor_parallel_size to 1"):
        load_model(str(tmp_path), device="cpu", rank=Rank(0, 2))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ModelLoadError, match=r"recurrent states.*set device to cpu"):
        load_model(str(tmp_path), device="cuda")


def test_a_state_is_kept_in_its_first_dtype() -> None:
    rows = RowStates(0, {}, {0: torch.zeros(1, 2)})
    assert rows.update_recurrent_state(torch.ones(1, 2).double(), 0).dtype == torch.float32
