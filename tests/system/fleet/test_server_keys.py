"""Replicas with key pairs of their own."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.helpers.http_front import Raw
from tests.helpers.patience import Patience
from tests.helpers.ports import free_port
from tests.helpers.routing import routing
from tests.helpers.stacks import spareless_stack

from slipstream import BadRequestError, Client
from slipstream.cli.keys import add_client, add_front, make_folder
from slipstream.client.connection.link_session import ClientSession
from slipstream.demo_model import MODEL_PATH


@pytest.mark.process
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
            while len(client._io._cluster._members.attached) < 2:
                patience.wait()
        with Client(addresses[1], keys=str(client_keys)) as client:
            assert len(client.generate([1, 2, 3], max_tokens=5, ignore_eos=True).token_ids) == 5
        with pytest.raises(BadRequestError, match=r"127\.0\.0\.1:1\.key"):
            Client("tcp://127.0.0.1:1", keys=str(client_keys))


API_KEYS = ("--api-key", "AAAA", "--api-key", "BBBB")


def response(port: int, api_key: str, path: str = "", **body: object) -> tuple[int, dict]:
    with Raw(port) as raw:
        header = f"Authorization: Bearer {api_key}"
        if body:
            raw.post("/v1/responses", body, header)
            answer = raw.read()
        else:
            answer = raw.get(f"/v1/responses/{path}", header)
    return answer.status, answer.json


@pytest.mark.process
def test_api_keys_of_fronts_are_tenants_and_those_of_clients_are_not(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A key's responses are its own, at whichever front it asks; a client is one tenant."""
    keys, tcp = tmp_path / "keys", f"tcp://127.0.0.1:{free_port()}"
    make_folder(keys)
    fronts = [add_front(keys, name)[-1] for name in ("one", "two")]
    client = add_client(keys, "plain")[-1]
    with ExitStack() as opened:
        model = f"simulated:step_ms=1,tokenizer={MODEL_PATH}"
        opened.enter_context(spareless_stack(model, listen=tcp, keys=str(keys)))

        def port_of(secret: Path) -> int:
            folder = tmp_path / secret.name
            folder.mkdir()
            options: Sequence[str] = ("--keys", str(secret), *API_KEYS)
            return opened.enter_context(routing(folder, tcp, *options))[1]

        one, two = map(port_of, fronts)
        made, body = response(one, "AAAA", input="Chapter 1", max_output_tokens=5)
        assert made == 200
        assert response(one, "AAAA", body["id"])[0] == 200
        assert response(two, "AAAA", body["id"])[0] == 200
        assert response(one, "BBBB", body["id"])[0] == 404
        plain = port_of(client)
        assert response(plain, "AAAA", body["id"])[0] == 404
        assert "a front's key" not in capfd.readouterr().err
        _, body = response(plain, "AAAA", input="Chapter 1", max_output_tokens=5)
        assert response(plain, "BBBB", body["id"])[0] == 200
        assert capfd.readouterr().err.count("give it a front's key") == 1


@pytest.mark.process
def test_a_replica_of_another_key_is_named_once_and_the_others_serve(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often it is tried, which side is at fault is for the one who reads the log to say."""
    monkeypatch.setattr("slipstream.client.connection.members._SHUT_S", 0.0)
    own, others = tmp_path / "own", tmp_path / "others"
    make_folder(own)
    make_folder(others)
    addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(3)]
    given: list[dict[str, object]] = [
        {"keys": str(own)},
        {"keys": str(others)},
        {"insecure": True},
    ]
    with ExitStack() as opened:
        for address, options in zip(addresses, given, strict=True):
            stack = spareless_stack("simulated:step_ms=1", listen=address, **options)
            opened.enter_context(stack)
        client = opened.enter_context(Client(",".join(addresses), keys=str(own)))
        members = client._io._cluster._members
        right, wrong, plain = addresses
        tried: list[ClientSession] = []  # kept, as the address of one that is gone is used again
        whys: set[str] = set()
        patience = Patience()
        while len(tried) < 20 or not any("the other does not" in why for why in whys):
            found = {each.address: each for each in members.statuses()}
            [links] = [each.links for each in members.listed if each.address == plain]
            tried += [link for link in links if all(link is not each for each in tried)]
            whys.add(found[plain].why)
            assert len(client.generate([1, 2, 3], max_tokens=5, ignore_eos=True).token_ids) == 5
            patience.check(whys)
    assert found[right].condition == "serving"
    assert (found[wrong].condition, "server.key" in found[wrong].why) == ("away", True)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == len(set(said))
    for address, nums in ((right, (0,)), (wrong, (1,)), (plain, (1, 2))):
        assert sum(address in line for line in said) in nums
