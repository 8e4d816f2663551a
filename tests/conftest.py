"""What holds for every test."""

import os

import pytest


@pytest.fixture(autouse=True)
def no_variable_is_left():
    """What a test sets in the environment for the processes it starts ends with it."""
    before = _ours()
    yield
    assert _ours() == before


def _ours() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("SLIPSTREAM_")}
