"""What holds for every test.

- Nothing is left to chance: each test begins with the same seeds, and Hypothesis tries the same
  examples each time. HYPOTHESIS_PROFILE=search has it look for new ones.
- Nothing depends on how fast the machine is: Hypothesis has no deadlines (see also `patience`).
"""

import gc
import os
import random
import signal
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

# how long an example takes says more about a busy machine than about the code
_CLOCKLESS = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", derandomize=True, **_CLOCKLESS)
settings.register_profile("search", print_blob=True, **_CLOCKLESS)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

# nohup, and some CI, start programs with these ignored, which the processes of a test would inherit
for _number, _usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with the most slow tests first, so that no file is run alone at the end."""
    num_slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -num_slow[item.path])


def pytest_collection_finish() -> None:
    """What was imported stays: the collector, which many tests call, need not look at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_chance():
    """The generators that everybody shares begin anew."""
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def no_variable_is_left():
    """What a test sets in the environment for the processes it starts ends with it."""
    before = _ours()
    yield
    assert _ours() == before


def _ours() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("SLIPSTREAM_")}
