"""Our own kernels against torch's operators, and how they come to be."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch.nn.functional import rms_norm, silu, softplus

from slipstream_core.kernels.cpu import c_library
from slipstream_core.kernels.cpu import kernels as kernels_module
from slipstream_core.kernels.cpu.kernels import Kernels, kernels
from slipstream_ipc.native import compiler

torch.set_num_threads(1)  # threads that wait for one another crawl on a busy machine

needs_compiler = pytest.mark.skipif(
    all(shutil.which(each) is None for each in compiler._COMPILERS),
    reason="there is no C compiler",
)


@pytest.fixture
def ours() -> Kernels:
    found = kernels()
    assert found is not None, "there is a compiler"
    return found


@needs_compiler
@pytest.mark.parametrize("shape", [(1, 1, 256), (1, 7, 3, 20), (1, 300, 256), (2, 5)])
def test_rms_norm(ours: Kernels, shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape) * 3, torch.randn(shape[-1])
    expected = rms_norm(x, shape[-1:], weight, 1e-6)
    torch.testing.assert_close(ours.rms_norm(x, weight, 1e-6), expected)
    turned = x.transpose(0, -2).contiguous().transpose(0, -2)
    torch.testing.assert_close(ours.rms_norm(turned, weight, 1e-6), expected)


@needs_compiler
@pytest.mark.parametrize("rows", [1, 5, 200])
def test_silu_mul(ours: Kernels, rows: int) -> None:
    both = torch.cat([torch.randn(1, rows, 100) * 20, torch.randn(1, rows, 100)], -1)
    gate, up = both.split(100, -1)  # rows that are not dense
    torch.testing.assert_close(ours.silu_mul(gate, up), silu(gate) * up)
    extremes = torch.tensor([[[-1e30, -100.0, -88.5, 0.0, 88.5, 100.0, 1e30]]])
    ones = torch.ones_like(extremes)
    torch.testing.assert_close(ours.silu_mul(extremes, ones), silu(extremes))


@needs_compiler
@pytest.mark.parametrize("shape", [(1, 1, 7), (1, 5, 100), (1, 300, 129), (2, 3, 1), (0, 4)])
def test_sigmoid_and_softplus(ours: Kernels, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape) * 20
    turned = x.transpose(0, -1).contiguous().transpose(0, -1)
    for own, expected in ((ours.sigmoid, x.sigmoid()), (ours.softplus, softplus(x))):
        torch.testing.assert_close(own(x), expected)
        assert torch.equal(own(turned), own(x))
    extremes = torch.tensor([-1e30, -100.0, -88.5, 0.0, 19.9, 20.1, 88.5, 1e30, float("inf")])
    torch.testing.assert_close(ours.sigmoid(extremes), extremes.sigmoid())
    torch.testing.assert_close(ours.softplus(extremes), softplus(extremes))


@needs_compiler
@pytest.mark.parametrize("spread", [1.0, 30.0, 1e30])
def test_a_number_has_the_same_bits_in_a_vector_and_behind_it(ours: Kernels, spread: float) -> None:
    torch.manual_seed(1)
    ordinary = torch.randn(1, 1, 999) * spread
    special = torch.tensor([[[0.0, -0.0, float("inf"), -float("inf"), float("nan"), 87.0, -88.0]]])
    gate, up = torch.cat([ordinary, special], -1), torch.randn(1, 1, 1006)
    together = ours.silu_mul(gate, up)
    alone = [ours.silu_mul(*each) for each in zip(gate.split(1, -1), up.split(1, -1), strict=True)]
    assert together.isnan().tolist() == torch.cat(alone, -1).isnan().tolist()
    assert torch.equal(together.nan_to_num(), torch.cat(alone, -1).nan_to_num())
    gates, parts = ours.sigmoid(gate), torch.cat(list(map(ours.sigmoid, gate.split(1, -1))), -1)
    assert torch.equal(gates.nan_to_num(9.0), parts.nan_to_num(9.0))


@needs_compiler
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 4, 64), (5, 3, 10), (300, 4, 64)])
def test_rotate(ours: Kernels, tokens: int, heads: int, dim: int) -> None:
    x = torch.randn(heads, tokens, dim).transpose(0, 1)
    cosines, sines = torch.randn(1, tokens, dim), torch.randn(1, tokens, dim)
    halves = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1)
    expected = x * cosines[0, :, None] + halves * sines[0, :, None]
    torch.testing.assert_close(ours.rotate(x, cosines, sines), expected)


@needs_compiler
def test_threads_change_nothing(ours: Kernels) -> None:
    x, weight = torch.randn(1, 3000, 256), torch.randn(256)
    alone = ours.rms_norm(x, weight, 1e-6)
    ours.set_threads(2)
    try:
        assert torch.equal(ours.rms_norm(x, weight, 1e-6), alone)
    finally:
        ours.set_threads(1)


def test_without_a_compiler_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_COMPILERS", ("no-such-compiler",))
    assert c_library.library.__wrapped__() is None


@needs_compiler
def test_a_source_that_does_not_compile_gives_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "kernels.c"
    broken.write_text("this is no C")
    monkeypatch.setattr(c_library, "_SOURCES", (broken,))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert c_library.library.__wrapped__() is None
    assert "error" in caplog.text
    assert list((tmp_path / "cache" / "slipstream" / "native").iterdir()) == []


@pytest.fixture
def short_source(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """In place of all kernels, which take seconds to compile."""
    source = tmp_path_factory.mktemp("source") / "kernels.c"
    source.write_text("int here(void) { return 1; }")
    monkeypatch.setattr(c_library, "_SOURCES", (source,))


@needs_compiler
@pytest.mark.usefixtures("short_source")
def test_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = c_library.library.__wrapped__()
    assert first is not None
    made = first.stat().st_mtime_ns
    assert c_library.library.__wrapped__() == first
    assert first.stat().st_mtime_ns == made
    assert [first] == list((tmp_path / "slipstream" / "native").iterdir())


@needs_compiler
@pytest.mark.usefixtures("short_source")
def test_nothing_is_loaded_that_others_may_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    theirs = tmp_path / "slipstream" / "native"
    theirs.mkdir(parents=True)
    theirs.chmod(0o777)
    made = c_library.library.__wrapped__()
    assert made is not None
    assert made.parent != theirs
    assert made.parent.stat().st_mode & 0o077 == 0
    shutil.rmtree(made.parent)
    theirs.chmod(0o700)
    kept = c_library.library.__wrapped__()
    assert kept is not None
    kept.unlink()  # another file: this process has mapped the one that was there
    kept.write_bytes(b"foreign")
    kept.chmod(0o722)
    again = c_library.library.__wrapped__()
    assert again == kept
    assert again.read_bytes() != b"foreign"


@needs_compiler
@pytest.mark.parametrize("damage", ["empty", "cut", "half of it zeros", "no library"])
def test_a_damaged_library_is_made_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: str
) -> None:
    """As a machine that loses its power, or a disk that is full, leaves it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # nothing is computed with it, and it is compiled twice
    monkeypatch.setattr(c_library, "_FLAGS", (*c_library._FLAGS, "-O0"))
    made = c_library.library.__wrapped__()
    assert made is not None
    whole = made.read_bytes()
    half = len(whole) // 2
    made.unlink()  # another file: this process has mapped the one that was there
    made.write_bytes(
        {
            "empty": b"",
            "cut": whole[:half],
            "half of it zeros": whole[:half] + bytes(len(whole) - half),
            "no library": b"foreign" * 1000,
        }[damage]
    )
    made.chmod(0o700)
    monkeypatch.setattr(kernels_module, "library", c_library.library.__wrapped__)
    assert kernels.__wrapped__() is not None
    assert made.read_bytes() == whole


@needs_compiler
def test_a_library_that_cannot_be_loaded_is_done_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "kernels.c"
    source.write_text("extern int nowhere(void); int here(void) { return nowhere(); }")
    monkeypatch.setattr(c_library, "_SOURCES", (source,))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kernels_module, "library", c_library.library.__wrapped__)
    assert kernels.__wrapped__() is None
    assert "nowhere" in caplog.text
    source.write_text("int here(void) { return 1; }")  # loaded well, and not what it should be
    assert kernels.__wrapped__() is None
