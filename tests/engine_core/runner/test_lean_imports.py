"""What a core imports: no torch that it does not use, and the real thing once it is asked."""

from __future__ import annotations

import subprocess
import sys

import pytest

UNUSED = ("torch._dynamo.guards", "torch._inductor", "torch.distributed.tensor")
SIMULATED = """
import sys
import slipstream_core.main
from slipstream_core.config import CoreConfig
from slipstream_core.runner.factory import import_runner
before = "torch" in sys.modules  # whose OpenMP reads its settings when it is imported
import_runner(CoreConfig(model="simulated:", address=""))
print(before, "torch" in sys.modules, "transformers" in sys.modules)
"""
LOAD = f"""
import sys
from slipstream_core.config import CoreConfig
from slipstream_core.runner.factory import import_runner, load_runner
from slipstream.demo_model import MODEL_PATH
config = CoreConfig(model=str(MODEL_PATH), address="", dtype="float32", threads=1, num_blocks=8)
import_runner(config)
load_runner(config)
print([name for name in {UNUSED} if name in sys.modules])
"""
ASK = """
import torch, types
from slipstream_core.runner.lean_imports import leave_out_unused
leave_out_unused()
import torch._dynamo
stood_in = torch._dynamo
@torch.compiler.disable
def double(x): return 2 * x
print(double(3), torch.compiler.disable(double) is double)
print(stood_in.config is torch._dynamo.config, stood_in.reset is torch._dynamo.reset)
print(torch._dynamo is not stood_in, torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)))
"""


def run(program: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_torch_is_imported_for_a_real_model_alone_and_behind_its_settings() -> None:
    assert run(SIMULATED) == ["False False False"]


def test_a_core_imports_none_of_what_it_does_not_use() -> None:
    assert run(LOAD) == ["[]"]


@pytest.mark.slow
def test_what_is_asked_of_a_stand_in_is_the_real_modules() -> None:
    assert run(ASK) == ["6 True", "True True", "True tensor([2.])"]
