"""One model over several machines: checks what is asked for, and says where its ranks meet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream.errors import bad_request, missing_option, wrong_option
from slipstream.stack.settings import StackSettings
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.transport.addresses import TCP, check_listen_address, check_server_address
from slipstream_ipc.transport.curve import keys_for, load_rank_keys, load_server_keys

_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104  (refused)


def nodes_options(settings: StackSettings) -> dict[str, Any] | None:
    """The machines of a core's ranks, as its config has them; None for one machine.

    Raises: BadRequestError.
    """
    num, size = settings.nnodes, settings.tensor_parallel_size
    if num == 1:
        for name in ("node_rank", "master_addr"):
            if given := getattr(settings, name):
                raise wrong_option(name, given, "only beside nnodes, of at least 2")
        return None
    if size % num:
        allowed = f"a divisor of tensor_parallel_size={size}: each machine has equally many ranks"
        raise wrong_option("nnodes", num, allowed)
    if settings.node_rank >= num:
        raise wrong_option("node_rank", settings.node_rank, f"an integer < {num} (nnodes)")
    if settings.master_addr is None:
        raise missing_option("master_addr", "beside nnodes, the address of machine 0")
    if settings.master_addr in _EVERYWHERE:
        raise wrong_option("master_addr", settings.master_addr, "one address of machine 0")
    address = _address(settings.master_addr, settings.master_port)
    keys = None if settings.keys is None else Path(settings.keys).expanduser().absolute()
    _check_access(settings, address, keys)
    return {
        "num": num,
        "address": address,
        "keys": None if keys is None else str(keys),
        "insecure": settings.insecure,
        "join_timeout_s": settings.join_timeout_s,
        "silent_s": settings.hang_timeout_s,
    }


def local_ranks(settings: StackSettings) -> range:
    """The ranks of this machine."""
    num = settings.tensor_parallel_size // settings.nnodes
    return range(settings.node_rank * num, (settings.node_rank + 1) * num)


def one_machine(settings: StackSettings, kind: str) -> None:
    """Refuse settings of several machines. kind: of what is started. Raises: BadRequestError."""
    if settings.nnodes > 1:
        raise wrong_option("nnodes", settings.nnodes, f"1 for {kind}")


def _check_access(settings: StackSettings, address: str, keys: Path | None) -> None:
    """Check address and keys as this machine uses them. Raises: BadRequestError."""
    leads, options = settings.node_rank == 0, (keys is not None, settings.insecure)
    check = check_listen_address if leads else check_server_address
    try:
        check(address, has_keys=options[0], insecure=options[1])
        if keys is not None and leads:
            load_server_keys(keys, for_ranks=True)
        elif keys is not None:
            keys_for(load_rank_keys(keys), address)
    except BadRequest as error:
        if error.field not in ("listen", "address"):
            raise bad_request(error) from None
        what = "an IP address" if leads else "the address or the host's name"
        allowed = (
            f"{what} of machine 0, with keys (`slipstream keys DIR` makes them); a loopback "
            "address may do with insecure instead"
        )
        raise wrong_option("master_addr", settings.master_addr, allowed) from None
    except OSError as error:
        raise bad_request(BadRequest("keys", settings.keys, str(error))) from None


def _address(host: str, port: int) -> str:
    return f"{TCP}[{host}]:{port}" if ":" in host else f"{TCP}{host}:{port}"
