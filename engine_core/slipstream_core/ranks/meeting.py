"""The rendezvous at which the ranks of a core form torch's process group, and the addresses at
which it may listen.

On one machine they meet in a file of memory that all of them have inherited: nothing listens for
that, nothing is left behind, and what gloo and NCCL open is bound to loopback. Over machines they
meet at a store of torch's, at the core's address alone, and the rest is bound to the network
interface that leads there.
"""

from __future__ import annotations

import json
import os
import socket
from datetime import timedelta
from ipaddress import ip_address
from typing import Any, NamedTuple

import psutil
from torch import distributed

_LOOPBACK = "lo"
_MAX_TOLD_BYTES = 1024
_Distributed: Any = distributed  # in part without annotations


class LocalMeeting(NamedTuple):
    """Files in memory that all ranks have, empty at first: fd, where they meet, and exchange_fd,
    through which CPUs exchange; None: by gloo alone.
    """

    fd: int
    exchange_fd: int | None

    @property
    def interface(self) -> str:
        """The network interface of the group."""
        return _LOOPBACK

    def store(self, num_ranks: int) -> Any:
        """The store at which this rank meets the others."""
        # stays open: torch opens the file once more when it lets the store go, which may be at the
        # interpreter's end, and ends the process where it cannot
        fd = os.dup(self.fd)
        # nothing listens (decision 035)
        return _Distributed.FileStore(f"/proc/self/fd/{fd}", num_ranks)


class NetworkMeeting(NamedTuple):
    """A store at an address of the first rank's machine. exchange_fd: ranks of several machines
    share no memory.
    """

    host: str
    port: int
    exchange_fd: None = None

    @classmethod
    def told(cls, fd: int) -> NetworkMeeting:
        """The meeting that another rank of this machine was told (`tell`)."""
        host, port = json.loads(os.pread(fd, _MAX_TOLD_BYTES, 0))
        return cls(host, port)

    def tell(self, fd: int) -> None:
        """Write it to a file in memory, for the other ranks of this machine."""
        os.pwrite(fd, json.dumps((self.host, self.port)).encode(), 0)

    @property
    def interface(self) -> str:
        """The network interface of this machine that leads there. Raises RuntimeError."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # which sends nothing
            probe.connect((self.host, self.port))
            own: str = probe.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if own in [each.address for each in addresses]:
                return str(name)
        if ip_address(own).is_loopback:
            return _LOOPBACK
        raise RuntimeError(f"no network interface has the address {own}")

    def store(self, timeout_s: float, listening: socket.socket | None = None) -> Any:
        """The store at which this rank meets the others. listening: the first rank's socket, which
        it takes; by itself torch listens at every address.
        """
        return _Distributed.TCPStore(
            self.host,
            self.port,
            is_master=listening is not None,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=None if listening is None else listening.detach(),
        )


Meeting = LocalMeeting | NetworkMeeting
