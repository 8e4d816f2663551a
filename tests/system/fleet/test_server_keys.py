"""Replicas with key pairs of their own."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.helpers.patience import Patience
from tests.helpers.ports import free_port
from tests.helpers.stacks import spareless_stack

from slipstream import BadRequestError, Client
from slipstream.cli.keys import make_folder


@pytest.mark.slow
def test_each_replica_has_a_key_pair_of_its_own(tmp_path: Path) -> None:
    client_keys = tmp_path / "client"
    make_folder(client_keys)
    (client_keys / "server.key").unlink()
    (client_keys / "servers").mkdir(mode=0o700)
    addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    with ExitStack() as opened:
        for index, address in enumerate(addresses):
            server_keys = tmp_path / f"server-{index}"
            make_folder(server_keys)
            shutil.copy(client_keys / "client.key", server_keys / "client.key")
            known = client_keys / "servers" / f"{address.removeprefix('tcp://')}.key"
            shutil.copy(server_keys / "server.key", known)
            opened.enter_context(
                spareless_stack("simulated:step_ms=1", listen=address, keys=str(server_keys))
            )
        with Client(",".join(addresses), keys=str(client_keys)) as client:
            patience = Patience()
            while len(client._io._session._members.attached) < 2:
                patience.wait()
        with Client(addresses[1], keys=str(client_keys)) as client:
            assert len(client.generate([1, 2, 3], max_tokens=5, ignore_eos=True).token_ids) == 5
        with pytest.raises(BadRequestError, match=r"127\.0\.0\.1:1\.key"):
            Client("tcp://127.0.0.1:1", keys=str(client_keys))
