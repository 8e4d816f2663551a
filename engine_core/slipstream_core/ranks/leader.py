"""The first rank: a runner that has the others compute each plan as well."""

from __future__ import annotations

import logging
import socket
from collections import deque

import torch
from msgspec.structs import replace

from slipstream_core.config import CoreConfig
from slipstream_core.load_error import ModelLoadError
from slipstream_core.ranks.bus import slot_bytes
from slipstream_core.ranks.group import JOIN_S, device_type, join_group, leave_group
from slipstream_core.ranks.meeting import LocalMeeting, NetworkMeeting
from slipstream_core.ranks.processes import Ranks
from slipstream_core.ranks.remote_ranks import RemoteRanks
from slipstream_core.runner.torch_factory import load_runner
from slipstream_core.runner.torch_runner import TorchRunner
from slipstream_core.runner.warm_up import warm_up
from slipstream_core.sharding.collectives import ExchangeFailed
from slipstream_core.sharding.rank import Rank
from slipstream_core.step.buffer import PlanBounds, PlanBoundsError, PlanBytesError
from slipstream_core.step.limits import MAX_POSITIONS
from slipstream_core.step.plan import StepFailed, StepPlan, StepResult
from slipstream_ipc.arrays import Int32s

logger = logging.getLogger(__name__)

_END_S = 5.0  # within which a rank whose connections are closed has ended


class LeadRunner:
    """Implements Runner.

    A plan that the ranks could not compute fails here, before any of them has heard of it.
    """

    def __init__(self, own: TorchRunner, ranks: Ranks, config: CoreConfig) -> None:
        """own: computes this rank's share."""
        self.info = own.info
        self.num_blocks = own.num_blocks
        self._own = own
        self._ranks = ranks
        self._timeout_s = config.step_timeout_s
        self._launched: deque[StepFailed | None] = deque()  # None: by the ranks

    def launch(self, plan: StepPlan) -> None:
        """Have all ranks enqueue a step."""
        if self._own.may_slice and len(plan.temperatures) and not plan.needs_whole_rows:
            plan = replace(plan, sliced=True)
        try:
            self._ranks.put(plan, timeout_s=self._timeout_s)
        except (PlanBoundsError, PlanBytesError) as error:
            failed = StepFailed(plan.step, error)
            failed.__cause__ = error
            self._launched.append(failed)
            return
        self._own.launch(plan)
        self._launched.append(None)

    def sample(self, plan: StepPlan, masks: Int32s) -> None:
        """Provide the masks that a launched plan awaits: to this rank, which samples."""
        self._own.sample(plan, masks)

    def collect(self) -> StepResult:
        """Wait for the oldest launched step and return its result. Raises StepFailed."""
        failed = self._launched.popleft()
        if failed is not None:
            raise failed
        try:
            return self._own.collect()
        except ExchangeFailed:
            self._ranks.wait_for_end(_END_S)  # the other rank's last words say why
            raise

    def done(self) -> bool:
        """True if collect() would return without waiting."""
        return bool(self._launched) and (self._launched[0] is not None or self._own.done())

    def fileno(self) -> int:
        """Return a descriptor that is readable while a finished step is not yet collected."""
        return self._own.fileno()

    def done_at(self) -> None:
        """Return None: the end of a step is not known in advance."""
        return

    def close(self) -> None:
        """Finish the step that runs, then end the ranks. Idempotent."""
        self._own.close()  # while the others can still take part in what runs
        self._ranks.close()
        leave_group()


def load_lead(config: CoreConfig, ranks: Ranks) -> LeadRunner:
    """Have all ranks load their slices of the model. Raises ModelLoadError."""
    kind = device_type(config)
    if kind == "cuda":
        logger.warning(
            "tensor parallelism has not been tried on cards: %d of them compute this model",
            config.tensor_parallel_size,
        )
        if torch.cuda.device_count() < config.num_local_ranks:
            raise ModelLoadError(
                config.model,
                f"tensor_parallel_size is {config.tensor_parallel_size} on {config.num_nodes} "
                f"machines, and there are {torch.cuda.device_count()} cards",
            )
    rank = Rank(0, config.tensor_parallel_size, config.num_nodes)
    if ranks.remote is None:
        ranks.bus.wake()
        exchange_fd = ranks.exchange_fd if config.native else None
        meeting = LocalMeeting(ranks.meeting_fd, exchange_fd)
        join_group(rank, kind, meeting, JOIN_S, symm_mem=config.enable_torch_symm_mem)
    else:
        _meet_remote(config, rank, ranks, ranks.remote)
    own = load_runner(config, rank)
    info = own.info
    bounds = PlanBounds(
        num_blocks=own.num_blocks,
        block_size=info.block_size,
        max_num_seqs=config.max_num_seqs,
        max_blocks=-(-info.max_model_len // info.block_size),
        vocab_size=info.vocab_size,
    )
    room = slot_bytes(
        max_num_seqs=bounds.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_blocks=bounds.max_blocks,
        max_scored=MAX_POSITIONS,
    )
    ranks.bus.allocate(room, bounds)
    ranks.are_ready = True
    runner = LeadRunner(own, ranks, config)
    if kind == "cpu":
        warm_up(runner, own, config)
    return runner


def _meet_remote(config: CoreConfig, rank: Rank, ranks: Ranks, remote: RemoteRanks) -> None:
    """Wait for the ranks of other machines, and join a group with all. Raises RanksMissingError."""
    host = remote.listen()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listening:
        meeting = NetworkMeeting(host, listening.getsockname()[1])
        remote.gather(config, (meeting.host, meeting.port))
        meeting.tell(ranks.meeting_fd)
        ranks.bus.wake()
        symm_mem = config.enable_torch_symm_mem
        join_group(rank, device_type(config), meeting, JOIN_S, listening, symm_mem=symm_mem)
