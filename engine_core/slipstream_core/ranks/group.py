"""Joins the ranks of a core into torch's process group."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from slipstream_core.config import CoreConfig
from slipstream_core.ranks.meeting import LocalMeeting, Meeting
from slipstream_core.sharding.collectives import (
    all_ranks_say,
    exchange_by,
    least_over_ranks,
)
from slipstream_core.sharding.exchange import SharedExchange
from slipstream_core.sharding.rank import Rank
from slipstream_core.sharding.symmetric_memory import join_symmetric

logger = logging.getLogger(__name__)

JOIN_S = 1800.0  # for a collective while ranks load, which may read files at different speeds
_Distributed: Any = distributed  # in part without annotations


def device_type(config: CoreConfig) -> str:
    """cuda or cpu: what the ranks compute on."""
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return config.device


def join_group(
    rank: Rank,
    device_type: str,
    meeting: Meeting,
    timeout_s: float,
    listening: socket.socket | None = None,
    *,
    symm_mem: bool = False,
) -> None:
    """Wait until all ranks have joined. A collective that takes longer than `timeout_s` raises.

    device_type: cuda or cpu. listening: at the address of a NetworkMeeting, for the first rank,
    which takes it. symm_mem: cards make small sums through memory that they share, where they can.
    Raises RuntimeError.
    """
    interface = meeting.interface
    os.environ.update(
        GLOO_SOCKET_IFNAME=interface,
        NCCL_SOCKET_IFNAME=interface,
        # whether a step hangs, the core alone decides
        TORCH_NCCL_ASYNC_ERROR_HANDLING="0",
        TORCH_NCCL_ENABLE_MONITORING="0",
        # transformers places a rank by it
        LOCAL_RANK=str(rank.local_index),
    )
    on_card = device_type == "cuda"
    if on_card:
        torch.cuda.set_device(rank.local_index)
    else:  # transformers loads slices onto cards where torch finds any
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if isinstance(meeting, LocalMeeting):
        store = meeting.store(rank.size)
    else:
        store = meeting.store(timeout_s, listening)
    _Distributed.init_process_group(
        "nccl" if on_card else "gloo",
        store=store,
        rank=rank.index,
        world_size=rank.size,
        timeout=timedelta(seconds=timeout_s),
        device_id=torch.device("cuda", rank.local_index) if on_card else None,
    )
    if on_card and symm_mem:
        _share_cards_memory(rank)
    elif not on_card and meeting.exchange_fd is not None:
        _share_memory(meeting.exchange_fd, rank, timeout_s)


def _share_memory(exchange_fd: int, rank: Rank, timeout_s: float) -> None:
    exchange = None
    with contextlib.suppress(OSError):  # without a compiler
        exchange = SharedExchange(exchange_fd, rank, timeout_s)
    if least_over_ranks(int(exchange is not None), torch.device("cpu")):
        exchange_by(exchange)


def _share_cards_memory(rank: Rank) -> None:
    device = torch.device("cuda", rank.local_index)
    try:
        if rank.num_nodes > 1:
            raise RuntimeError("ranks are on several machines")
        group = _Distributed.group.WORLD
        exchange_by(symmetric=join_symmetric(device, group, lambda it: all_ranks_say(it, device)))
    except RuntimeError as error:
        if rank.leads:
            logger.warning("NCCL makes all sums, there is no symmetric memory: %s", error)


def leave_group() -> None:
    """Undo `join_group`; without effect where there is no group."""
    exchange_by()
    if _Distributed.is_initialized():
        _Distributed.destroy_process_group()
