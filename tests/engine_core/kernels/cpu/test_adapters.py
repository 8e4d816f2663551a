"""The kernel of adapters: each row's own low-rank change, whatever is beside it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream_core.adapters.adapter_file import Factors
from slipstream_core.adapters.adapter_table import AdapterTable
from slipstream_core.adapters.sites import Site
from slipstream_core.kernels.cpu.kernels import kernels

KERNELS = kernels()
assert KERNELS is not None
RANKS = (1, 3, 4, 5, 16, 33)


def table_of(k: int, n: int) -> tuple[AdapterTable, list[dict[str, Factors]]]:
    """A table of two sites, the first of which is not changed, with a place to a rank."""
    assert KERNELS is not None
    generator = torch.Generator().manual_seed(k * n)
    sites = {"other": Site(0, 5, 5), "site": Site(1, n, k)}
    table, held = AdapterTable(KERNELS, sites, len(RANKS)), []
    for place, rank in enumerate(RANKS):
        a, b = (torch.randn(rank, size, generator=generator) for size in (k, n))
        held.append({"site": Factors(a, b)})
        table.put(place, held[-1])
    return table, held


@pytest.mark.parametrize(("k", "n"), [(1, 1), (7, 5), (16, 33), (64, 64), (129, 250)])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_rows_are_changed_by_their_own_adapters(k: int, n: int, num_threads: int) -> None:
    assert KERNELS is not None
    KERNELS.set_threads(num_threads)
    table, held = table_of(k, n)
    runs = [place for place in range(len(RANKS)) for _ in range(5)]  # several rows side by side
    places = np.array([-1, 0, 3, 5, -1, 2, 4, 1, 5, 0, -1] * 6 + runs, np.int32)
    wide = torch.randn(len(places), n + 9)
    x = torch.randn(1, len(places), k)
    step = table.of_step(places, places[::3])
    assert step is not None
    expected = wide[:, 4 : 4 + n].double()
    for row, place in enumerate(places.tolist()):
        if place >= 0:
            a, b = held[place]["site"]
            expected[row] += (x[0, row].double() @ a.double().t()) @ b.double()
    changed = wide.clone()
    y = changed[None, :, 4 : 4 + n]
    found = step.adapt(y, x, 1, is_of_kept=False)
    assert found.data_ptr() == y.data_ptr()  # in place
    torch.testing.assert_close(changed[:, 4 : 4 + n].double(), expected, atol=2e-4, rtol=1e-4)
    unchanged = torch.ones(len(wide), n + 9, dtype=torch.bool)
    unchanged[:, 4 : 4 + n] = torch.tensor(places < 0)[:, None]
    assert torch.equal(changed[unchanged], wide[unchanged])
    # to the bit what each row is alone
    for row, place in enumerate(places.tolist()):
        alone = wide[row : row + 1, 4 : 4 + n].clone()[None]
        one = np.array([place], np.int32)
        if (single := table.of_step(one, one)) is not None:
            single.adapt(alone, x[:, row : row + 1].clone(), 1, is_of_kept=False)
        assert torch.equal(alone[0, 0], changed[row, 4 : 4 + n])
    # of the tokens whose logits are wanted
    kept = step.adapt(wide[None, ::3, :n].clone(), x[:, ::3], 1, is_of_kept=True)
    for row, place in enumerate(places[::3].tolist()):
        assert torch.equal(kept[0, row], wide[3 * row, :n]) == (place < 0)
    # another site, which none of them changes
    other = torch.randn(1, len(places), 5)
    assert torch.equal(
        step.adapt(other.clone(), torch.randn(other.shape), 0, is_of_kept=False), other
    )
    KERNELS.set_threads(1)


@pytest.mark.parametrize("b_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("a_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("k", "n"), [(7, 5), (129, 250)])
def test_factors_of_16_bits_give_the_bits_of_their_float32(
    k: int, n: int, a_dtype: torch.dtype, b_dtype: torch.dtype
) -> None:
    assert KERNELS is not None
    _, held = table_of(k, n)
    sites = {"other": Site(0, 5, 5), "site": Site(1, n, k)}
    halves, widened = (AdapterTable(KERNELS, sites, len(RANKS)) for _ in range(2))
    for place, its in enumerate(held):
        a, b = its["site"]
        a[0, 0] = 2**-20  # subnormal in float16
        a, b = a.to(a_dtype), b.to(b_dtype)
        halves.put(place, {"site": Factors(a, b)})
        widened.put(place, {"site": Factors(a.float(), b.float())})
    places = np.array([0, 1, 2, 3, 4, 5, -1, 4, 4, 4, 4, 1, 1, 1, 1, 1], np.int32)
    x, y = torch.randn(1, len(places), k), torch.randn(1, len(places), n)
    found, expected = y.clone(), y.clone()
    for table, into in ((halves, found), (widened, expected)):
        step = table.of_step(places, places)
        assert step is not None
        step.adapt(into, x, 1, is_of_kept=False)
    assert torch.equal(found, expected)
    assert not torch.equal(found, y)


def test_a_step_without_adapters_has_none() -> None:
    table, _ = table_of(4, 4)
    none = np.full(3, -1, np.int32)
    assert table.of_step(none, none) is None
