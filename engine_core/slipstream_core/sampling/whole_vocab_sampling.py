"""Samples whole rows of logits on a card with a few Triton kernels.

Without Triton, `sampler` uses torch's operators instead and has to ask the device which rows reach
beyond the candidates.

- Nothing here depends on values on the device, so all of it can be recorded.
- A row's results depend only on its own logits, edits, limits and key, not on the other rows of a
  launch.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch

from slipstream_core.kernels.card.triton_support import is_wanted, unready
from slipstream_core.load_error import compiling
from slipstream_core.sampling.top_k_top_p import TruncationLimits
from slipstream_core.sampling.top_tokens import most_likely

_INTERPRETED_BLOCK = 256  # so that small vocabularies span several blocks
_ID_BITS = 0x7FFFFFFF
_FEWEST_TOP = 16  # tokens kept of a slice; a power of two
_FEWEST_GROUPED = 16  # logits to a group
_GROUPS_FOR_EACH = 4  # groups to each of the largest, so that their bound lets few more through


def whole_vocab_sampler(
    vocab_size: int, device: torch.device, *, model: str
) -> WholeVocabSampler | None:
    """A compiled sampler for rows of `vocab_size` logits; None if Triton is not available.

    Raises ModelLoadError if the kernel cannot be compiled.
    """
    if not is_wanted(device) or unready() is not None:
        return None
    with compiling(model, "sampling"):
        draws = WholeVocabSampler()
        draws.compile(vocab_size, device)
    return draws


class RowEdits(NamedTuple):
    """The changes that requests make to the rows that they are sampled from; -1 in a column means
    no change.
    """

    edited: torch.Tensor  # [E, vocab] float32, rows in place of logits
    edit_rows: torch.Tensor  # [S] int32
    masks: torch.Tensor  # [M, ceil(vocab / 32)] int32, a bit for each allowed id
    mask_rows: torch.Tensor  # [S] int32


class Draws(NamedTuple):
    """The parameters of draws, [S] each."""

    divisors: torch.Tensor  # float32
    drawn: torch.Tensor  # int32; where it is 0, the most likely token is taken
    keys: torch.Tensor  # int32 [2, S]


class Chosen(NamedTuple):
    """Tokens, and what their log-probabilities are made of; [S] each."""

    token_ids: torch.Tensor  # int64
    own: torch.Tensor | None  # float32, their logits, without edits
    totals: torch.Tensor | None  # float32, the logarithm of the sum of exp(logit)


class _Launch(NamedTuple):
    """One kernel, ready to run."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]

    def run(self) -> None:
        self.kernel[self.grid](**self.arguments)

    def compile(self) -> Any:
        return self.kernel.warmup(grid=self.grid, **self.arguments)


class WholeVocabSampler:
    """Samples whole rows of logits, for `sampler.sample` and recorded sampling."""

    def __init__(self) -> None:
        from slipstream_core.kernels.card import vocab_scan_kernels, whole_vocab_kernels

        self._redraw: Any = whole_vocab_kernels.redraw
        self._scans: Any = vocab_scan_kernels
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        # hundreds of largest ones take the interpreter a second
        self._has_largest = not interpreted
        self._redraw_block = _INTERPRETED_BLOCK if interpreted else whole_vocab_kernels.BLOCK
        self._redraw_warps = whole_vocab_kernels.NUM_WARPS
        self._block = 64 if interpreted else vocab_scan_kernels.BLOCK
        self._top_block = 64 if interpreted else vocab_scan_kernels.TOP_BLOCK
        self._top_group = 16 if interpreted else vocab_scan_kernels.TOP_GROUP

    def choose(
        self,
        logits: torch.Tensor,
        *,
        draws: Draws | None = None,
        edits: RowEdits | None = None,
        totals: bool = False,
        undefined: torch.Tensor | None = None,
    ) -> Chosen:
        """One token per row of `logits` [S, vocab], of any float type; the most likely without
        `draws`. `totals` asks for what log-probabilities need. Into `undefined`, int32 [S], goes 1
        where what a row is sampled from has NaN or infinity: its token is one of these.
        """
        chosen, launches = self._choosing(logits, draws, edits, totals, undefined)
        for launch in launches:
            launch.run()
        return chosen

    def scaled(
        self, logits: torch.Tensor, divisors: torch.Tensor, edits: RowEdits | None = None
    ) -> torch.Tensor:
        """The rows that are sampled from, over `divisors` [S]; float32 [S, vocab]."""
        output, launch = self._scaling(logits, divisors, edits)
        launch.run()
        return output

    def _choosing(
        self,
        logits: torch.Tensor,
        draws: Draws | None,
        edits: RowEdits | None,
        totals: bool,
        undefined: torch.Tensor | None = None,
    ) -> tuple[Chosen, list[_Launch]]:
        num, vocab_size = logits.shape
        parts = -(-vocab_size // (self._scans.NUM_BLOCKS * self._block))
        best, tops, sums = (logits.new_empty((num, parts), dtype=torch.float32) for _ in range(3))
        token_ids = logits.new_empty(num, dtype=torch.int64)
        if undefined is None:
            undefined = logits.new_empty(num, dtype=torch.int32)
        own, total = (logits.new_empty(num, dtype=torch.float32) for _ in range(2))
        partial = {
            "part_best": best,
            "part_ids": logits.new_empty((num, parts), dtype=torch.int32),
            "part_tops": tops if totals else None,
            "part_sums": sums if totals else None,
            "logits": logits,
            "row_stride": logits.stride(0),
            "TOTALS": totals,
        }
        chosen = Chosen(token_ids, own if totals else None, total if totals else None)
        scan = {
            **partial,
            **_edit_arguments(edits),
            "divisors": None if draws is None else draws.divisors,
            "drawn": None if draws is None else draws.drawn,
            "keys_0": None if draws is None else draws.keys[0],
            "keys_1": None if draws is None else draws.keys[1],
            "vocab_size": vocab_size,
            "DRAWN": draws is not None,
            "BLOCK": self._block,
            "NUM_BLOCKS": self._scans.NUM_BLOCKS,
            "num_warps": self._scans.NUM_WARPS,
        }
        join = {
            **partial,
            "token_ids": token_ids,
            "undefined": undefined,
            "own": chosen.own,
            "totals": chosen.totals,
            "num_slices": parts,
            "MAX_SLICES": _power_of_two(parts),
            "num_warps": 1,
        }
        return chosen, [
            _Launch(self._scans.scan_slices, (num, parts), scan),
            _Launch(self._scans.join_slices, (num,), join),
        ]

    def _scaling(
        self, logits: torch.Tensor, divisors: torch.Tensor, edits: RowEdits | None
    ) -> tuple[torch.Tensor, _Launch]:
        num, vocab_size = logits.shape
        output = logits.new_empty((num, vocab_size), dtype=torch.float32)
        arguments = {
            "logits": logits,
            **_edit_arguments(edits),
            "divisors": divisors,
            "scaled": output,
            "vocab_size": vocab_size,
            "row_stride": logits.stride(0),
            "BLOCK": self._block,
            "num_warps": self._scans.NUM_WARPS,
        }
        grid = (num, -(-vocab_size // self._block))
        return output, _Launch(self._scans.scale_rows, grid, arguments)

    def most_likely(self, logits: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The `num` largest logits and their ids, ordered as in `top_tokens.most_likely`: by value,
        then by id. Values are float32.
        """
        if not self._has_largest:
            return most_likely(logits.float(), num)
        return self.largest(logits, num)

    def largest(self, logits: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute `most_likely` with the kernels."""
        keys, _, launches = self._topping(logits, num, None)
        for launch in launches:
            launch.run()
        best = keys.topk(num, dim=-1).values
        ordered = (best >> 32).int()
        values = (ordered ^ ((ordered >> 31) & _ID_BITS)).view(torch.float32)
        return values, _ID_BITS - (best & _ID_BITS)

    def logprob_columns(
        self, logits: torch.Tensor, chosen: Chosen, num: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute `sampler.logprob_columns` for tokens that `choose` took with `totals`."""
        columns, launches = self._telling(logits, chosen, num)
        for launch in launches:
            launch.run()
        return columns

    def _topping(
        self, logits: torch.Tensor, num: int, own: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, list[_Launch]]:
        """Keys of the `num` largest and of some more, and counts of logits above `own`."""
        num_rows, vocab_size = logits.shape
        kept = max(_FEWEST_TOP, _power_of_two(num))
        parts = -(-vocab_size // self._top_block)
        group = self._top_group
        while group > _FEWEST_GROUPED and vocab_size // group < _GROUPS_FOR_EACH * num:
            group //= 2
        num_groups = parts * (self._top_block // group)
        keys = logits.new_empty((num_rows, parts * kept), dtype=torch.int64)
        counts = logits.new_empty((num_rows, parts), dtype=torch.int32)
        tops = logits.new_empty((num_rows, num_groups), dtype=torch.int32)
        bounds = logits.new_empty(num_rows, dtype=torch.int32)
        reading = {
            "logits": logits,
            "tops": tops,
            "vocab_size": vocab_size,
            "row_stride": logits.stride(0),
            "BLOCK": self._top_block,
            "GROUP": group,
            "num_warps": self._scans.TOP_WARPS,
        }
        bounding = {
            "tops": tops,
            "bounds": bounds,
            "num_groups": num_groups,
            "num": num,
            "MAX_GROUPS": _power_of_two(num_groups),
            "num_warps": self._scans.BOUND_WARPS,
        }
        selecting = {
            **reading,
            "bounds": bounds,
            "keys": keys,
            "own": own,
            "counts": None if own is None else counts,
            "num": num,
            "RANKS": own is not None,
            "NUM": kept,
        }
        return (
            keys,
            counts,
            [
                _Launch(self._scans.tops_of_groups, (num_rows, parts), reading),
                _Launch(self._scans.bound_top, (num_rows,), bounding),
                _Launch(self._scans.top_of_slices, (num_rows, parts), selecting),
            ],
        )

    def _telling(
        self, logits: torch.Tensor, chosen: Chosen, num: int
    ) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], list[_Launch]]:
        assert chosen.own is not None
        assert chosen.totals is not None
        num_rows = len(logits)
        keys, counts, launches = self._topping(logits, num, chosen.own)
        columns = (
            logits.new_empty((num_rows, 1 + num), dtype=torch.float32),
            logits.new_empty((num_rows, 1 + num), dtype=torch.int64),
            logits.new_empty(num_rows, dtype=torch.int64),
        )
        join = {
            "keys": keys,
            "counts": counts,
            "token_ids": chosen.token_ids,
            "own": chosen.own,
            "totals": chosen.totals,
            **dict(zip(("values", "ids", "ranks"), columns, strict=True)),
            "num_keys": keys.shape[1],
            "num_slices": counts.shape[1],
            "num": num,
            "MAX_KEYS": _power_of_two(keys.shape[1]),
            "MAX_SLICES": _power_of_two(counts.shape[1]),
            "num_warps": self._scans.TOP_WARPS,
        }
        return columns, [*launches, _Launch(self._scans.join_top, (num_rows,), join)]

    def further(
        self,
        limits: TruncationLimits,
        keys: torch.Tensor,
        wanted: torch.Tensor,
        token_ids: torch.Tensor,
        mass_limits: torch.Tensor,
    ) -> None:
        """Draw the wanted rows' tokens from their whole kept sets, into `token_ids` [S].

        wanted: bool [S]. mass_limits: float32 [S, 1]; a token is kept if likelier ones have less.
        """
        self._redraw[(len(token_ids),)](
            **self._redraw_arguments(
                limits.scaled,
                token_ids,
                wanted.to(torch.int32),
                keys,
                log_totals=limits.log_total.reshape(-1),
                mass_limits=mass_limits.reshape(-1),
                top_ks=limits.top_ks.to(torch.int32).reshape(-1),
                leasts=limits.least()[:, 0],
            )
        )

    def compile(
        self, vocab_size: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> list[Any]:
        """Compile what steps that are not recorded need, or as `every_launch`; returns what Triton
        made of it.
        """
        made = [launch.compile() for launch in self.every_launch(vocab_size, device, dtype)]
        if device.type == "cuda":  # `run` is a property that compiles the launcher on first access
            for each in made:
                each.run  # noqa: B018
        return made

    def every_launch(
        self,
        vocab_size: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        *,
        recorded: bool = False,
    ) -> list[_Launch]:
        """The launches of steps that are not recorded, on inputs of minimal size.

        With `recorded`, or another `dtype` of logits: the launches of recorded steps, which compile
        them as they begin.
        """
        logits = torch.empty((1, vocab_size), dtype=dtype, device=device)
        floats, ints = (
            torch.empty(1, dtype=it, device=device) for it in (torch.float32, torch.int32)
        )
        scaled, ids = logits.float(), ints.long()
        limits = dict.fromkeys(("log_totals", "mass_limits", "leasts"), floats)
        redraw = self._redraw_arguments(scaled, ids, ints, ints[None], top_ks=ints, **limits)
        launches = [_Launch(self._redraw, (1,), redraw)]
        draws = Draws(floats, ints, torch.stack([ints, ints]))
        edits = None
        if recorded or dtype != torch.float32:
            words = torch.empty((1, -(-vocab_size // 32)), dtype=torch.int32, device=device)
            edits = RowEdits(scaled, ints, words, ints)
            launches.append(self._scaling(logits, floats, edits)[1])
            chosen = Chosen(ids, floats, floats)
            launches += self._telling(logits, chosen, min(20, vocab_size))[1]
        for each in (None, draws):
            for totals in (False, True) if edits is not None else (False,):
                launches += self._choosing(logits, each, edits, totals)[1]
        launches += self._topping(scaled, min(256, vocab_size), None)[2]
        return launches

    def _redraw_arguments(
        self,
        scaled: torch.Tensor,
        token_ids: torch.Tensor,
        wanted: torch.Tensor,
        keys: torch.Tensor,
        **limits: torch.Tensor,
    ) -> dict[str, Any]:
        return {
            "scaled": scaled,
            "token_ids": token_ids,
            "wanted": wanted,
            "keys": keys[0],
            **limits,
            "vocab_size": scaled.shape[1],
            "row_stride": scaled.stride(0),
            "BLOCK": self._redraw_block,
            "num_warps": self._redraw_warps,
        }


def _edit_arguments(edits: RowEdits | None) -> dict[str, Any]:
    if edits is None:
        names = ("edited", "edit_rows", "masks", "mask_rows")
        return {**dict.fromkeys(names), "mask_stride": 0, "EDITS": False}
    return {**edits._asdict(), "mask_stride": edits.masks.stride(0), "EDITS": True}


def _power_of_two(num: int) -> int:
    """The least power of two that is at least `num`."""
    return 1 << (num - 1).bit_length()
