"""The states of running requests, and the way in which a step's rows reach theirs.

- A slot of the pool is a request's slot in the batch, so it comes and goes with that. It is never
  cleared: a row whose first token is in the step begins without a state, whatever its slot holds.
- Steps run in order on one thread, so what a request's slot holds is what its last launched step
  left there. A step in flight may still write a slot that has been given away; the next owner's
  first step comes later.
- A state cannot be taken back by a token. Where the scheduler drops a token of a step that was
  launched, it has the row begin again (`Scheduler`).
- Snapshots are behind the slots. They are copied into slots before a forward; within it, a mixer
  computes a row's tokens up to where its state is saved, and then those behind it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from slipstream_core.attention.kv_cache import zeros
from slipstream_core.states.mixers import Mixer
from slipstream_core.states.state_cache import MixerStates, RowStates, StateShape

# by mixer, kind (conv or recurrent) and transformers' number
StateNumbers = dict[tuple[int, str, int], int]


def number_states(states: Sequence[MixerStates]) -> StateNumbers:
    """The numbers of all states of a model's mixers among `StatePool.states`."""
    keys = [
        (number, kind, at)
        for number, each in enumerate(states)
        for kind, own in (("conv", each.conv), ("recurrent", each.recurrent))
        for at in own
    ]
    return {key: number for number, key in enumerate(keys)}


class StatePool:
    """The states of all slots and snapshots, by the numbers of mixers."""

    def __init__(
        self,
        states: Mapping[int, MixerStates],
        num_slots: int,
        device: torch.device,
        *,
        num_snapshots: int = 0,
    ) -> None:
        num = num_slots + num_snapshots
        self.num_slots = num_slots

        def allocate(shapes: dict[int, StateShape]) -> dict[int, torch.Tensor]:
            return {
                at: zeros(num * torch.Size(shape).numel(), dtype, device).view(num, *shape)
                for at, (shape, dtype) in shapes.items()
            }

        # by mixer and state: [num_slots + num_snapshots, ...]
        self._conv = {number: allocate(each.conv) for number, each in states.items()}
        self._recurrent = {number: allocate(each.recurrent) for number, each in states.items()}
        # in the order of `number_states`: [num_slots + num_snapshots, numbers of a state]
        self.states = [
            each.flatten(1)
            for number in states
            for pool in (self._conv, self._recurrent)
            for each in pool[number].values()
        ]
        self._pointers = (ctypes.c_void_p * len(self.states))(
            *(each.data_ptr() for each in self.states)
        )
        self._sizes = (ctypes.c_int64 * len(self.states))(*(each.shape[1] for each in self.states))

    @property
    def addresses(self) -> tuple[int, int]:
        """The addresses of arrays with each state's memory and its size in numbers."""
        return ctypes.addressof(self._pointers), ctypes.addressof(self._sizes)

    def load(self, slots: torch.Tensor, snapshots: torch.Tensor) -> None:
        """Copy snapshots int64 [L] into slots int64 [L], all different."""
        for each in self.states:
            each.index_copy_(0, slots, each.index_select(0, self.num_slots + snapshots))

    def save(self, slots: torch.Tensor, snapshots: torch.Tensor) -> None:
        """Copy slots int64 [F] into snapshots int64 [F], all different."""
        for each in self.states:
            each.index_copy_(0, self.num_slots + snapshots, each.index_select(0, slots))

    def read(self, mixer: Mixer, slots: torch.Tensor) -> RowStates:
        """A copy of the states of slots int64 [B]."""
        conv, recurrent = (
            {at: states.index_select(0, slots) for at, states in pool[mixer.number].items()}
            for pool in (self._conv, self._recurrent)
        )
        return RowStates(mixer.layer, conv, recurrent)

    def write(self, mixer: Mixer, slots: torch.Tensor, rows: RowStates) -> None:
        """Keep the states of slots int64 [B], all different."""
        for pool, own in ((self._conv, rows.conv), (self._recurrent, rows.recurrent)):
            for at, states in pool[mixer.number].items():
                states.index_copy_(0, slots, own[at].to(states.dtype))


class _Group(NamedTuple):
    """Rows that a mixer computes in one call, with equally many tokens each."""

    first: int  # token
    num_rows: int
    length: int  # tokens of each row
    slots: torch.Tensor  # int64 [num_rows]
    reads: torch.Tensor  # int64 [num_rows]: where their states are before
    begins: bool  # all of them
    num_prompt: int = 1  # of the tokens of the only row, if they are several: those of its prompt
    saved: torch.Tensor | None = None  # int64 [num_rows] of the pool, where states are kept, too


class StateStep:
    """The rows of one forward: those that decode, a token each, then chunks of prompts."""

    def __init__(
        self,
        pool: StatePool,
        *,
        slots: npt.NDArray[np.int64],
        query_lens: npt.NDArray[np.int32],
        starts: npt.NDArray[np.int32],
        prompt_lens: npt.NDArray[np.int32],
        num_decodes: int,
        saves: Mapping[int, Sequence[tuple[int, int]]] = MappingProxyType({}),
        reads: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """`slots`, `query_lens`, `starts`, each row's number of tokens before the step, and
        `prompt_lens`, [R].

        reads: where rows' states are before the step, [R]; None: where it leaves them, in `slots`.
        saves: by row that is a chunk, (tokens, snapshot): the row's state behind so many of its
        tokens in this step, ascending, is saved.
        """
        self._pool = pool
        every = torch.from_numpy(slots.astype(np.int64))
        read = every if reads is None else torch.from_numpy(reads.astype(np.int64))
        groups = []
        self._begun: torch.Tensor | None = None  # of the rows that decode, those that begin
        if num_decodes:
            own, old = every[:num_decodes], read[:num_decodes]
            groups.append(_Group(0, num_decodes, 1, own, old, begins=False))
            begun = np.flatnonzero(starts[:num_decodes] == 0)
            self._begun = torch.from_numpy(begun) if len(begun) else None
        first = num_decodes
        for row in range(num_decodes, len(query_lens)):
            own, old = every[row : row + 1], read[row : row + 1]
            begins, done = int(starts[row]) == 0, 0
            num_prompt = int(prompt_lens[row] - starts[row])
            cuts = [(length, pool.num_slots + at) for length, at in saves.get(row, ())]
            length = int(query_lens[row])
            for end, slot in [*cuts, (length, None)]:
                if end > done:
                    saved = None if slot is None else torch.tensor([slot])
                    left = max(num_prompt - done, 0)
                    groups.append(
                        _Group(first + done, 1, end - done, own, old, begins, left, saved)
                    )
                begins, done, old = False, end, own
            first += length
        self._groups = groups

    @cached_property
    def _stepped(self) -> list[_Group]:
        return [
            part
            for group in self._groups
            for part in _steps_from(group, group.length if group.begins else 0)
        ]

    @cached_property
    def _limited(self) -> list[_Group]:
        return [part for group in self._groups for part in _steps_from(group, group.num_prompt)]

    def mix(self, mixer: Mixer, hidden: torch.Tensor) -> torch.Tensor:
        """Implements `MixingStep.mix`."""
        outputs = [self._mix_group(mixer, group, hidden) for group in self._groups_for(mixer)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _groups_for(self, mixer: Mixer) -> list[_Group]:
        if mixer.is_stepped:
            return self._stepped
        return self._limited if mixer.is_limited else self._groups

    def _mix_group(self, mixer: Mixer, group: _Group, hidden: torch.Tensor) -> torch.Tensor:
        num_tokens = group.num_rows * group.length
        inputs = hidden[0, group.first : group.first + num_tokens]
        rows = RowStates(mixer.layer, {}, {})
        if not group.begins:
            rows = self._pool.read(mixer, group.reads)
            if group.first == 0 and self._begun is not None:
                for states in (*rows.conv.values(), *rows.recurrent.values()):
                    states.index_fill_(0, self._begun, 0)
        mixed = mixer.run(inputs.view(group.num_rows, group.length, -1), rows)
        self._pool.write(mixer, group.slots, rows)
        if group.saved is not None:
            self._pool.write(mixer, group.saved, rows)
        return mixed.reshape(1, num_tokens, -1)


def _steps_from(group: _Group, num: int) -> list[_Group]:
    """The group with its tokens from `num` on one by one."""
    if num >= group.length or group.length == 1:
        return [group]
    parts = [group._replace(length=num, saved=None)] if num else []
    for at in range(num, group.length):
        reads = group.slots if at else group.reads
        begins = group.begins and not at
        parts.append(
            group._replace(first=group.first + at, length=1, reads=reads, begins=begins, saved=None)
        )
    parts[-1] = parts[-1]._replace(saved=group.saved)
    return parts
