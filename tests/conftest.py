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
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings

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


# Tests over 15 s are marked slow. The first of a file has the start of its stack besides, which
# takes minutes where thirty others want the same two CPUs.
_QUICK_TIMEOUT_S = 400.0


def pytest_addoption(parser: pytest.Parser) -> None:
    about = "of a test with more cases, run this many, from all over their list, and a quarter "
    about += "of a property's examples"
    parser.addoption("--cases", type=int, metavar="N", help=about)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run files with the most slow tests first, so that no long file is left alone at the end.

    Quick tests have less time than pyproject.toml gives to all.
    """
    if config.option.cases:
        _leave_out(config, items)
        _try_fewer_examples(items)
    num_slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -num_slow[item.path])
    for item in items:
        if not item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(_QUICK_TIMEOUT_S))


def _leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect cases of tests that have more than `--cases`."""
    cases = defaultdict(list)
    for item in items:
        if not item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
    most, left_out = config.option.cases, set()
    for every in cases.values():
        if len(every) > most:
            kept = {every[number * len(every) // most] for number in range(most)}
            left_out.update(item for item in every if item not in kept)
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def _try_fewer_examples(items: list[pytest.Item]) -> None:
    """Let Hypothesis try a quarter of what each test asks for."""
    # settings of a property, which nothing public changes afterwards, and of a state machine
    of_property, of_machine = "_hypothesis_internal_use_settings", "settings"
    functions = {getattr(item.obj, "__func__", item.obj) for item in items if hasattr(item, "obj")}
    given = filter(is_hypothesis_test, functions)
    machines = {item.cls for item in items if hasattr(item, "cls")}
    for name, tests in ((of_property, given), (of_machine, machines)):
        for test in tests:
            asked = getattr(test, name, None)
            if asked is not None:
                setattr(test, name, settings(asked, max_examples=max(1, asked.max_examples // 4)))


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
