"""What a core imports: no torch that it does not use, and the real thing once it is asked."""

from __future__ import annotations

import subprocess
import sys

import pytest

UNUSED = ("torch._dynamo.guards", "torch._inductor", "torch.distributed.tensor", "sympy.core")
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
from slipstream_core.model.lean_imports import leave_out_unused
leave_out_unused()
import torch._dynamo
stood_in = torch._dynamo
@torch.compiler.disable
def double(x): return 2 * x
print(double(3), torch.compiler.disable(double) is double)
print(stood_in.config is torch._dynamo.config, stood_in.reset is torch._dynamo.reset)
print(torch._dynamo is not stood_in, torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)))
"""

SHAPES = """
import itertools, sys, torch
from slipstream_core.model.lean_imports import OF_NUMBERS, leave_out_unused
leave_out_unused()
import torch.fx.experimental.symbolic_shapes as stood_in
plain = [True, False, 0, 1, 7, (), (1, 2), [1, 2], torch.Size((4, 5)), (1,)]
flags = {"expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious",
         "statically_known_true", "sym_and", "sym_or"}
pairs = [one for one in itertools.product(plain, repeat=2)
         if isinstance(one[0], int) == isinstance(one[1], int)]
def cases(name):
    of_one = plain[:2] if name in flags else plain[:5]
    if name == "sym_eq": return [*pairs, ((1, 2, 3), (1, 2, 4))]
    if name in ("sym_and", "sym_or"):
        return [each for n in (1, 2, 3) for each in itertools.product(of_one, repeat=n)]
    return [(one,) for one in of_one]
said = {name: [getattr(stood_in, name)(*each) for each in cases(name)] for name in OF_NUMBERS}
print("sympy.core" in sys.modules)
real = stood_in.ShapeEnv.__module__ and sys.modules["torch.fx.experimental.symbolic_shapes"]
print(real is not stood_in, "sympy.core" in sys.modules)
for name, found in said.items():
    expected = [getattr(real, name)(*each) for each in cases(name)]
    assert [(type(one), one) for one in found] == [(type(one), one) for one in expected], name
try: stood_in.sym_eq(1, "no number")
except AssertionError as error: print("unexpected sym_eq" in str(error))
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


@pytest.mark.process
def test_what_is_asked_of_a_stand_in_is_the_real_modules() -> None:
    assert run(ASK) == ["6 True", "True True", "True tensor([2.])"]


def test_questions_about_shapes_of_numbers_are_answered_as_by_the_real_module() -> None:
    assert run(SHAPES) == ["False", "True True", "True"]
