"""Turns the settings of a machine that only computes ranks into the processes to start."""

from __future__ import annotations

from pathlib import Path

import msgspec

from slipstream.errors import wrong_option
from slipstream.stack.plan.child_spec import child_spec
from slipstream.stack.plan.log_level import check_log_level
from slipstream.stack.plan.models.gguf_folder import with_gguf_folder
from slipstream.stack.plan.models.model_source import (
    RANDOM,
    hub_environment,
    model_and_tokenizer,
    with_model_revision,
)
from slipstream.stack.plan.nodes import local_ranks, nodes_options
from slipstream.stack.plan.process_plan import core_config, forked, supervisor_config
from slipstream.stack.settings import StackSettings
from slipstream.stack.supervisor_events import SupervisorConfig
from slipstream_ipc.validation.simulated_model import SIMULATED


def plan_node(
    settings: StackSettings, runtime_dir: Path, parent_pid: int | None = None
) -> SupervisorConfig:
    """The config of a supervisor of ranks alone, whose core is on another machine. Its address is
    the core's.

    Raises: BadRequestError, as `plan_stack` does.
    """
    check_log_level()
    nodes = nodes_options(settings)
    assert nodes is not None
    model, _ = model_and_tokenizer(settings.model, settings.tokenizer)
    if model.startswith((SIMULATED, RANDOM)):
        given = settings.tensor_parallel_size
        raise wrong_option("tensor_parallel_size", given, f"1 with the model {model}")
    model, _ = with_model_revision(settings, model, model)
    environment = hub_environment(settings, model, model)
    model, _ = with_gguf_folder(settings, model, model, environment)
    core = {**core_config(settings, model), "address": nodes["address"], "nodes": nodes}
    children = [
        child_spec(
            f"rank-{index}",
            "slipstream_core.ranks.remote_follower",
            {"core": core, "index": index},
            has_spare=settings.spare_core,
        )
        for index in local_ranks(settings)
    ]
    children = forked(children, settings.device, model)
    without_fronts = msgspec.structs.replace(settings, http_port=None, uds=None)
    config = supervisor_config(without_fronts, children, nodes["address"], runtime_dir, parent_pid)
    return msgspec.structs.replace(config, environment=environment)
