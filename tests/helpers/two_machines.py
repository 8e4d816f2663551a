"""A program: one model over two machines, whose link is taken down and up again.

It runs in a network namespace of its own, which it may change: `unshare -n python -m …`. Prints the
texts of one rank, of two, and of two whose link was down meanwhile, how the core ended then, and
the addresses at which either machine listens, as one object of JSON.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from tests.helpers.namespaces import NEAR, linked_machine, run
from tests.helpers.other_machine import command_of, nodes_of, other_machine
from tests.helpers.patience import Patience
from tests.helpers.rank_streams import core_ends, once_under_way, texts
from tests.helpers.stacks import spareless_stack

from slipstream import Stack
from slipstream.cli.keys import add_rank, make_folder
from slipstream.demo_model import MODEL_PATH

HERE, THERE, PORT = "10.78.0.1", "10.78.0.2", 29501


def listening(inside: str = "") -> list[str]:
    """The addresses at which a machine listens. inside: how a command runs on it."""
    lines = run(f"{inside} ss -Hltn").splitlines()
    return sorted({line.split()[3].rpartition(":")[0] for line in lines})


def lose_link(stack: Stack, ends: list[str]) -> None:
    """Take the link down until the core has ended."""
    run(f"ip link set {NEAR} down")
    patience = Patience()
    while not ends:
        patience.wait("the core lives on without its rank")
        ends += core_ends(stack)
    run(f"ip link set {NEAR} up")


def main() -> int:
    told: dict[str, object] = {}
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="two-")))
        make_folder(folder / "keys")
        add_rank(folder / "keys", "machine-1")
        inside = opened.enter_context(linked_machine(HERE, THERE))
        settings = nodes_of(HERE, PORT, folder / "keys")
        with spareless_stack(device="cpu") as stack, stack.client() as client:
            told["alone"] = texts(client, lambda _: None)
        command = command_of({**settings, "spare_core": "false"}, folder, MODEL_PATH)
        opened.enter_context(other_machine([*shlex.split(inside), *command]))
        stack = opened.enter_context(spareless_stack(**settings))
        client = opened.enter_context(stack.client())
        told["together"] = texts(client, lambda _: None)
        told["listening"] = [listening(), listening(inside)]
        ends: list[str] = []
        told["meanwhile"] = texts(client, once_under_way(lambda: lose_link(stack, ends)))
        told["ends"] = ends
    sys.stdout.write(json.dumps(told) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
