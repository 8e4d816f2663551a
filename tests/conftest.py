"""Settings for every test.

- Tests are deterministic: each begins with the same seeds, and Hypothesis tries the same examples
  each time. HYPOTHESIS_PROFILE=search makes it look for new ones.
- Tests do not depend on the machine's speed: Hypothesis has no deadlines (see also
  `tests.helpers.patience`).
"""

import gc
import os
import random
import signal
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

# the duration of an example says more about a busy machine than about the code
_CLOCKLESS = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", derandomize=True, **_CLOCKLESS)
settings.register_profile("search", print_blob=True, **_CLOCKLESS)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

# nohup and some CI systems ignore these signals, and the processes of a test would inherit that
for _number, _usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)


# which tests run, in which order, and what they take
pytest_plugins = ["tests.ledger.plugin"]


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
def no_variable_is_left():
    """Assert that a test leaves no SLIPSTREAM_ variable changed in the environment."""
    before = _ours()
    yield
    assert _ours() == before


def _ours() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("SLIPSTREAM_")}
