"""The tests of tools: what stands beside the product, each with the script that runs its tests.

They run where something that they read differs from their last green run.
"""

from __future__ import annotations

from typing import NamedTuple


class Tool(NamedTuple):
    """Tests of one tool.

    paths: their files, or folders of them. script: makes an environment for them, nothing where
    .venv is all that they need. runs: whether the script runs them, too; else the tests in .venv
    find what it made.
    """

    paths: tuple[str, ...]
    script: str = ""
    runs: bool = False


TOOLS = {
    "benchmarks": Tool(("tests/benchmarks",)),
    "container": Tool(("tests/scripts/deploy/test_container.py",)),
    "systemd": Tool(("tests/scripts/deploy/test_service.py",)),
    "set-up": Tool(
        (
            "tests/scripts/test_build.py",
            "tests/scripts/test_release.py",
            "tests/scripts/test_set_up.py",
        )
    ),
    "triton": Tool(("tests/engine_core/kernels/triton",), "scripts/triton-tests", runs=True),
    "ray": Tool(("tests/system/ray_fleet",), "scripts/ray-tests", runs=True),
    "foreign-clients": Tool(("tests/system/foreign_clients",), "scripts/foreign-clients"),
}
# a quick look at each command, whatever has changed
SMOKE = ("tests/benchmarks/test_commands.py",)


def tool_of(path: str) -> str | None:
    """The name of the tool that a file of tests belongs to."""
    if path in SMOKE:
        return None
    for name, tool in TOOLS.items():
        if any(path == each or path.startswith(f"{each}/") for each in tool.paths):
            return name
    return None
