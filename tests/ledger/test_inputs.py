"""What a file of tests reads, and its digest."""

from __future__ import annotations

import pytest
from tests.ledger.durations import ROOT
from tests.ledger.inputs import Inputs
from tests.ledger.tools import SMOKE, TOOLS, tool_of


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    return Inputs()


STACK = "tests/api/stack/test_stack.py"
SCHEDULER = "tests/engine_core/scheduler/test_scheduler.py"


def test_imports_and_what_stands_beside_them_are_read(inputs: Inputs) -> None:
    read = inputs.of(SCHEDULER)
    assert read[SCHEDULER] == 0
    assert read["tests/helpers/scheduler_harness.py"] == 1
    assert read["engine_core/slipstream_core/scheduler/scheduler.py"] == 2  # by the harness
    assert "tests/conftest.py" in read
    assert "ipc/slipstream_ipc/history/token_pages.c" in read  # C, beside a module
    assert "packaging/extensions.py" in read  # what compiles it
    assert {"constraints.txt", "pyproject.toml"} <= read.keys()
    others = ("api/slipstream/client/", "output_worker/", "benchmarks/")
    assert not [path for path in read if path.startswith(others) and path.endswith(".py")]


def test_processes_started_by_a_modules_name_are_read(inputs: Inputs) -> None:
    read = inputs.of(STACK)
    for path in (
        "engine_core/slipstream_core/main.py",
        "engine_core/slipstream_core/ranks/follower.py",
        "output_worker/slipstream_worker/main.py",
        "output_worker/slipstream_worker/tokenizer/process.py",
        "ipc/slipstream_ipc/fork_server.py",
    ):
        assert path in read
    assert "engine_core/slipstream_core/runner/torch_factory.py" in read  # by an f-string


def test_packages_above_a_module_are_read_but_not_all_that_they_name(inputs: Inputs) -> None:
    read = inputs.of("tests/api/stack/test_restarts.py")
    assert "api/slipstream/__init__.py" in read
    assert "api/slipstream/llm.py" not in read


def test_commands_and_paths_that_tests_name_are_read(inputs: Inputs) -> None:
    assert "scripts/set-up" in inputs.of("tests/scripts/test_set_up.py")
    assert "docs/serving.md" in inputs.of("tests/docs/test_pages.py")
    assert "benchmarks/slipstream_verify/chaos/chaos.py" in inputs.of(
        "tests/benchmarks/test_commands.py"
    )
    assert "scripts/ray-tests" in inputs.of("tests/system/ray_fleet/test_ray_fleet.py")


def test_what_measures_tests_is_read_by_its_own_tests_alone(inputs: Inputs) -> None:
    assert "tests/ledger/plugin.py" not in inputs.of(SCHEDULER)
    assert "tests/ledger/inputs.py" in inputs.of("tests/ledger/test_inputs.py")


def test_a_digest_is_of_what_is_read(inputs: Inputs) -> None:
    before = inputs.digest(SCHEDULER)
    assert before == Inputs().digest(SCHEDULER)
    assert before != inputs.digest(STACK)
    hashes = inputs._hashes
    read = inputs.of(SCHEDULER)
    for path in ("README.md", "api/slipstream/llm.py", "tests/durations.json"):
        assert path not in read
    for path in (SCHEDULER, "ipc/slipstream_ipc/history/token_pages.c", "constraints.txt"):
        old, hashes[path] = hashes[path], "other"
        assert inputs.digest(SCHEDULER) != before
        hashes[path] = old
    assert inputs.digest(SCHEDULER) == before


def test_every_file_of_tests_reads_itself(inputs: Inputs) -> None:
    assert len(inputs.test_files()) > 400
    assert all(inputs.of(file)[file] == 0 for file in inputs.test_files()[::40])


def test_tools_are_there(inputs: Inputs) -> None:
    files = inputs.test_files()
    for name, tool in TOOLS.items():
        assert any(tool_of(file) == name for file in files), name
        assert all((ROOT / path).exists() for path in tool.paths)
        assert not tool.script or (ROOT / tool.script).is_file()
    assert all(file in files and tool_of(file) is None for file in SMOKE)
    assert tool_of("tests/benchmarks_of_others/test_it.py") is None
