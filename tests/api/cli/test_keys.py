"""`slipstream keys`, and clients that come over tcp:// with what it made."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.helpers.ports import free_port
from tests.helpers.stacks import spareless_stack

from slipstream import (
    AsyncClient,
    BadRequestError,
    Client,
    ConnectionLostError,
    SlipstreamError,
)
from slipstream.cli.keys import add_client, add_rank, make_folder
from slipstream.cli.main import main
from slipstream.client.endpoints import server_endpoint
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.transport.curve import (
    admitted_as,
    load_client_keys,
    load_rank_keys,
    load_server_keys,
)

SECRETS = ("server.key_secret", "client.key_secret")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def secret_in(path: Path) -> str:
    return path.read_text().split('secret-key = "')[1].split('"')[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_folder(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_what_is_made(tmp_path: Path, umask: int, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "keys"
    before = os.umask(umask)
    try:
        assert main(["keys", str(folder)]) == 0
    finally:
        os.umask(before)
    assert {path.name: mode(path) for path in folder.iterdir()} == {
        "server.key": 0o644,
        "server.key_secret": 0o600,
        "client.key": 0o644,
        "client.key_secret": 0o600,
    }
    assert mode(folder) == 0o700
    said = capsys.readouterr()
    for name in SECRETS:
        assert len(secret_in(folder / name)) == 40
        assert secret_in(folder / name) not in said.out + said.err
        assert "secret-key" not in (folder / name.removesuffix("_secret")).read_text()
    server, client = load_server_keys(folder), load_client_keys(folder)
    assert client.server == server.pair.public
    assert admitted_as(folder, client.pair.public)


@pytest.mark.parametrize("name", ["server.key", "client.key_secret"])
def test_nothing_is_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    assert main(["keys", str(tmp_path)]) == 2
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "client.key_secret").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadRequestError, match="never overwritten"):
        make_folder(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_one_more_client(folder: Path) -> None:
    before = secret_in(folder / "server.key_secret")
    public, secret = add_client(folder, "second-one")
    assert (mode(public), mode(secret)) == (0o644, 0o600)
    assert secret_in(folder / "server.key_secret") == before
    keys = load_client_keys(secret)
    assert keys.pair != load_client_keys(folder).pair
    assert admitted_as(folder, keys.pair.public)
    with pytest.raises(BadRequestError, match="never overwritten"):
        add_client(folder, "second-one")


@pytest.mark.parametrize("name", ["server", "", "../x", "a/b", ".", "a b", "x" * 65])
def test_names_that_no_client_has(folder: Path, name: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        add_client(folder, name)
    assert caught.value.field == "client"


def test_a_front_is_let_in_without_a_key_of_its_own(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", str(folder), "--front", "route"]) == 0
    assert "slipstream route tcp://HOST:PORT --keys DIR/route.front.key_secret" in (
        capsys.readouterr().out
    )
    public = load_client_keys(folder / "route.front.key_secret").pair.public
    found = admitted_as(folder, public)
    assert found not in (b"", public)
    (folder / "other.key").write_bytes((folder / "route.front.key").read_bytes())
    assert admitted_as(folder, public) == public, "a client's key is no front's as well"
    for options in (["--client", "a.front"], ["--client", "a", "--front", "b"], ["--front", "a b"]):
        assert main(["keys", str(folder), *options]) == 2
        assert options[-2] in capsys.readouterr().err


def test_a_client_without_a_server(tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match="server's keys"):
        add_client(tmp_path, "me")
    assert list(tmp_path.iterdir()) == []


# ---- which keys go with an address -----------------------------------------------------------


def test_endpoints(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = load_client_keys(folder)
    tcp = "tcp://host:5"
    for given in (folder, str(folder), folder / "client.key_secret"):
        endpoint = server_endpoint(tcp, given)
        assert endpoint.address == tcp
        assert endpoint.access is not None
        assert endpoint.access.keys == keys
    with pytest.raises(BadRequestError, match="slipstream keys") as caught:
        server_endpoint(tcp)
    assert caught.value.field == "address"
    monkeypatch.setenv("SLIPSTREAM_KEYS", str(folder))
    assert server_endpoint(tcp) == endpoint
    assert server_endpoint("ipc:///nowhere/s").access is None  # which needs none
    with pytest.raises(BadRequestError) as caught:
        server_endpoint("ipc:///nowhere/s", folder)
    assert caught.value.field == "keys"
    local = server_endpoint("tcp://127.0.0.1:5", insecure=True)
    assert local.access is not None
    assert local.access.insecure
    with pytest.raises(BadRequestError) as caught:
        server_endpoint(tcp, insecure=True)
    assert caught.value.field == "insecure"
    monkeypatch.setenv("SLIPSTREAM_ADDRESS", tcp)
    assert server_endpoint() == endpoint


def test_a_socket_that_others_could_have_put_there(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "s").touch()
    with pytest.raises(BadRequestError, match="0700") as caught:
        Client(f"ipc://{tmp_path}/s")
    assert caught.value.field == "address"


def test_a_folder_without_a_socket_is_no_servers(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for client in (Client, AsyncClient):
        with pytest.raises(
            ConnectionLostError, match=r"no Slipstream server .* no such socket"
        ) as e:
            client(f"ipc://{tmp_path}/s")
        assert "0700" not in str(e.value)


def test_keys_that_others_can_read(folder: Path) -> None:
    (folder / "client.key_secret").chmod(0o644)
    with pytest.raises(BadRequestError, match="0600") as caught:
        Client("tcp://127.0.0.1:1", keys=folder)
    assert caught.value.field == "keys"


@pytest.fixture
def mounted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Secret as Kubernetes mounts it for a group: root's, behind links, read-only."""
    data = folder / "..data"
    data.mkdir(0o755)
    for path in list(folder.glob("*.key*")):
        (data / path.name).write_bytes(path.read_bytes())
        (data / path.name).chmod(0o440)
        path.unlink()
        path.symlink_to(Path("..data") / path.name)
    folder.chmod(0o3777)
    real_stat = Path.stat

    def stat_of_root(self: Path, **options: bool) -> os.stat_result:
        found = real_stat(self, **options)
        return os.stat_result((*found[:4], 0, *found[5:]))

    monkeypatch.setattr(Path, "stat", stat_of_root)
    monkeypatch.setattr(os, "getuid", lambda: 10001)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
    return folder


def test_a_mounted_secret_has_keys(mounted: Path) -> None:
    keys = load_server_keys(mounted)
    client = load_client_keys(mounted)
    assert client.server == keys.pair.public
    assert admitted_as(mounted, client.pair.public)


def test_a_mounted_secret_that_others_can_read(mounted: Path) -> None:
    (mounted / "server.key_secret").chmod(0o444)
    with pytest.raises(PermissionError, match="root's, mode 0640"):
        load_server_keys(mounted)


def test_a_folder_of_keys_that_others_may_write_to(
    mounted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=0))
    with pytest.raises(PermissionError, match="writable by no other user"):
        load_server_keys(mounted)


# ---- a stack -----------------------------------------------------------------------------------


@pytest.mark.process
def test_a_stack_with_keys(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tcp = f"tcp://127.0.0.1:{free_port()}"
    make_folder(tmp_path / "others")
    with spareless_stack("simulated:step_ms=1", listen=tcp, keys=str(folder)) as stack:
        with stack.client() as client, Client(tcp, keys=folder) as remote:
            texts = {
                one.generate("In Python,", max_tokens=20, temperature=0).text
                for one in (client, remote)
            }
            assert len(texts) == 1
        _, theirs = add_client(tmp_path / "others", "them")
        (theirs.parent / "server.key").write_bytes((folder / "server.key").read_bytes())
        with pytest.raises(SlipstreamError, match="does not accept this client's key"):
            Client(tcp, keys=theirs)
        with pytest.raises(SlipstreamError, match="CURVE keys here"):
            Client(tcp, insecure=True, timeout_s=2.0)
        line = ["generate", "--address", tcp, "--prompt", "In Python,", "--temperature", "0"]
        assert main([*line, "--max-tokens", "20", "--keys", str(folder)]) == 0
        assert capsys.readouterr().out.rstrip("\n") == texts.pop().rstrip("\n")
        assert main(line) == 2
        assert "keys" in capsys.readouterr().err


def test_a_stack_without_keys_on_this_machine() -> None:
    tcp = f"tcp://127.0.0.1:{free_port()}"
    with (
        spareless_stack("simulated:step_ms=1", listen=tcp, insecure=True) as stack,
        Client(tcp, insecure=True) as client,
    ):
        assert stack.address.startswith("ipc://")
        assert client.generate("In Python,", max_tokens=5).num_tokens == 5


def test_a_ranks_key_opens_its_own_door(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["keys", str(folder), "--rank", "machine-1"]) == 0
    said = capsys.readouterr().out
    assert "--node-rank N --keys DIR/machine-1.rank.key_secret" in said
    rank, client = load_rank_keys(folder), load_client_keys(folder)
    assert load_rank_keys(folder / "machine-1.rank.key_secret") == rank
    assert admitted_as(folder, rank.pair.public) == b""
    assert admitted_as(folder, rank.pair.public, for_ranks=True) == rank.pair.public
    assert admitted_as(folder, client.pair.public, for_ranks=True) == b""
    add_rank(folder, "machine-2")
    with pytest.raises(BadRequest, match="or a folder with one"):
        load_rank_keys(folder)
    for words in (["--client", "x.rank"], ["--rank", "x", "--front", "y"], ["--rank", "../x"]):
        assert main(["keys", str(folder), *words]) == 2
