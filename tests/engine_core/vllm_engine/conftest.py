"""A core over a fake of vLLM's engine core, and fake workers, in one thread but vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.helpers import fake_vllm
from tests.helpers.core_box import CoreBox, boxes_of

from slipstream_core.config import CoreConfig
from slipstream_core.engine.build import assemble_core, engine_of
from slipstream_core.vllm_engine.runner import VllmRunner
from slipstream_core.vllm_engine.vllm_scheduler import VllmScheduler


class VllmBox(CoreBox):
    """A core that drives the fake. engine: the fake of the core that runs."""

    engine: fake_vllm.EngineCore

    def start(self, **settings: object) -> None:
        self._incarnation += 1
        given = {"engine": "vllm", "incarnation": self._incarnation}
        config = CoreConfig(**{**self._settings, **given, **settings})  # type: ignore[arg-type]
        runner = engine_of(config).load(config)
        assert isinstance(runner, VllmRunner)
        self.core = assemble_core(config, runner, self.context, self.poller)
        self.engine = fake_vllm.EngineCore.latest

    @property
    def scheduler(self) -> VllmScheduler:
        assert self.core is not None
        scheduler = self.core.scheduler
        assert isinstance(scheduler, VllmScheduler)
        return scheduler


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM is a fake."""
    fake_vllm.install(monkeypatch)


@pytest.fixture
def make_box() -> Iterator[Callable[..., VllmBox]]:
    """A factory of cores over the fake, which are closed after the test."""
    with boxes_of(VllmBox) as make:
        yield make
