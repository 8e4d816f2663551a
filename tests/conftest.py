"""Settings for every test.

- Each test begins with the same seeds. Hypothesis draws one for each run, which is printed:
  --hypothesis-seed repeats its examples. Those that failed are kept in .hypothesis, and tried
  first.
- Tests do not depend on the machine's speed: Hypothesis has no deadlines (see also
  `tests.helpers.patience`).
"""

import gc
import os
import random
import secrets
import signal
import sys
from pathlib import Path
from typing import Any

import hypothesis.core
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from tests.helpers.inheritance import inheritance

_KEPT = os.environ.get("HYPOTHESIS_STORAGE_DIRECTORY") or Path(__file__).parents[1] / ".hypothesis"
# all of it, as Hypothesis takes other defaults where it finds a CI system's variables
settings.register_profile(
    "drawn",
    derandomize=False,
    database=DirectoryBasedExampleDatabase(Path(_KEPT) / "examples"),
    print_blob=True,
    # the duration of an example says more about a busy machine than about the code
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("drawn")
_SEED = pytest.StashKey[int | str]()
# hundreds of processes start, which need not all compile what they import
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# nohup and some CI systems ignore these signals, and the processes of a test would inherit that
for _number, _usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)


# which tests run, in which order, and what they take
pytest_plugins = ["tests.ledger.plugin"]


class _DrawnSeed:
    """What Hypothesis takes each property's seed from. `--hypothesis-seed` would have it neither
    keep what failed nor try it again.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def getrandbits(self, _: int) -> int:
        return self._seed


def pytest_configure(config: pytest.Config) -> None:
    """Draw Hypothesis' seed where none is given, one for all processes of pytest-xdist."""
    seed = config.option.hypothesis_seed
    if seed is None:
        seed = getattr(config, "workerinput", {}).get("hypothesis_seed") or secrets.randbits(32)
        hypothesis.core.threadlocal._hypothesis_global_random = _DrawnSeed(seed)
    config.stash[_SEED] = seed


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hand the seed to a process of pytest-xdist."""
    node.workerinput["hypothesis_seed"] = node.config.stash[_SEED]


def pytest_report_header(config: pytest.Config) -> str:
    return _how_to_repeat(config)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if terminalreporter.stats.get("failed"):
        terminalreporter.write_line(_how_to_repeat(config))


def _how_to_repeat(config: pytest.Config) -> str:
    return f"properties: --hypothesis-seed={config.stash[_SEED]} tries the same examples"


def pytest_collection_finish() -> None:
    """Keep imported objects out of later garbage collections, which many tests trigger."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_chance():
    """Reseed the global random generators."""
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def no_inheritance_is_left():
    """Assert that a test leaves what processes take over from this one as it was: the next test's
    would be others, and those of a stack would not be forked.
    """
    before = inheritance()
    yield
    after = inheritance()
    changed = {each for each in before.keys() | after.keys() if before.get(each) != after.get(each)}
    assert not changed
