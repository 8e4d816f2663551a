"""What Triton needs is looked for before a step does, and its absence is said plainly.

The machine is one with a card, as far as these functions ask; nothing of Triton is imported.
"""

from __future__ import annotations

import importlib.util
import logging
import shutil
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream_core.attention import backend_choice
from slipstream_core.attention.backend_choice import BackendName, triton_attention
from slipstream_core.attention.geometry import LayerGeometry
from slipstream_core.kernels.card.tiles import H100_SHARED_LIMIT
from slipstream_core.kernels.card.triton_support import is_wanted, unready
from slipstream_core.load_error import ModelLoadError
from slipstream_core.sampling.whole_vocab_sampling import whole_vocab_sampler

CARD = torch.device("cuda")
GEOMETRY = [LayerGeometry(4, 2, 16, 16, None, None, False)]


class Machine:
    """Where everything is there that Triton needs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.has_triton = True
        self.programs = {"gcc", "clang"}
        self.headers = folder / "Python.h"
        self.headers.touch()
        find_spec = importlib.util.find_spec

        def found(name: str) -> Any:
            return object() if self.has_triton else None

        monkeypatch.delenv("CC", raising=False)
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name: (found if name == "triton" else find_spec)(name),
        )
        monkeypatch.setattr(shutil, "which", lambda name: name if name in self.programs else None)
        monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(folder)})


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


def test_all_is_there(machine: Machine) -> None:
    assert unready() is None
    machine.programs = {"clang"}
    assert unready() is None


def test_no_triton(machine: Machine) -> None:
    machine.has_triton = False
    assert "pip install triton" in str(unready())


def test_no_compiler(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.programs = set()
    assert "apt-get install gcc" in str(unready())
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert unready() is None  # it compiles nothing


def test_the_compiler_that_is_named(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "zig-cc")
    assert "no 'zig-cc', which CC names" in str(unready())
    machine.programs = {"zig-cc"}
    assert unready() is None


def test_no_headers(machine: Machine) -> None:
    machine.headers.unlink()
    assert "Python.h" in str(unready())
    assert "python3-dev" in str(unready())


def test_for_whom_kernels_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert is_wanted(CARD)
    assert not is_wanted(torch.device("cpu"))
    assert whole_vocab_sampler(1000, torch.device("cpu"), model="it") is None
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert is_wanted(torch.device("cpu"))


def choose(wanted: BackendName = "auto", device: torch.device = CARD) -> Any:
    return triton_attention(
        GEOMETRY, [], block_size=16, dtype=torch.bfloat16, device=device, model="it", wanted=wanted
    )


def test_what_is_asked_for_and_cannot_serve_is_refused(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    allowed = "allowed here are 'auto' and 'torch'"
    with pytest.raises(ModelLoadError, match=f"the device is the CPU; {allowed}"):
        choose("triton", torch.device("cpu"))
    machine.programs = set()
    with pytest.raises(ModelLoadError, match=rf"\(apt-get install gcc\).*; {allowed}"):
        choose("triton")
    machine.programs = {"gcc"}
    monkeypatch.setattr(backend_choice, "shared_limit", lambda _device: 1000)
    with pytest.raises(ModelLoadError, match=f"1000 bytes of shared memory.; {allowed}"):
        choose("triton")


def test_torch_is_taken_where_it_is_asked_for(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert choose("torch") is None
    assert caplog.text == ""


def test_without_a_compiler_it_serves_slowly_and_says_so(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.programs = set()
    with caplog.at_level(logging.WARNING):
        assert choose() is None
    assert "install one (apt-get install gcc)" in caplog.text
    assert "several times slower" in caplog.text
    assert whole_vocab_sampler(1000, CARD, model="it") is None


def test_kernels_that_do_not_compile_are_a_models_error(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def compile(self, *_: Any) -> None:
            raise RuntimeError("PassManager::run failed\nand a thousand lines of it")

    name = "slipstream_core.attention.triton_backend"
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(TritonAttention=Broken))
    monkeypatch.setattr(backend_choice, "shared_limit", lambda _device: H100_SHARED_LIMIT)
    with pytest.raises(ModelLoadError, match="its sampling kernels cannot be compiled"):
        whole_vocab_sampler(1000, CARD, model="it")  # there is no card, and no Triton either
    with pytest.raises(ModelLoadError, match=r"'it'.*PassManager::run failed\); set native to f"):
        choose()
