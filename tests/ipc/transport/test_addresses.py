"""Who may reach a socket: folders, addresses, keys, and CURVE over real sockets."""

from __future__ import annotations

import os
import socket as sockets
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq
from tests.helpers.patience import PATIENCE_S
from tests.helpers.ports import free_port
from zmq.utils import z85

from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import (
    PROTOCOL_VERSION,
    Abort,
    AttachRefused,
    Frame,
    Goodbye,
    Hello,
    ModelCard,
    Ping,
    Welcome,
)
from slipstream_ipc.transport.addresses import (
    check_listen_address,
    check_private,
    check_server_address,
    check_socket_folder,
)
from slipstream_ipc.transport.codec import client_codec, front_codec
from slipstream_ipc.transport.curve import (
    Access,
    ClientKeys,
    KeyPair,
    ServerKeys,
    admitted_as,
    keys_for,
    load_client_keys,
    load_server_keys,
    open_gate,
    secure_server,
)
from slipstream_ipc.transport.dealer import Dealer
from slipstream_ipc.transport.poller import Poller
from slipstream_ipc.transport.router import Router
from slipstream_ipc.transport.sockets import Listener, bind_router, new_dealer

POLL_MS = int(PATIENCE_S * 1e3)
NEVER_MS = 300  # long enough for a handshake on a busy machine to have let somebody in
CARD = ModelCard("m", "p", 100, 64, (2,))


# ---- folders -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o777, 0o740])
def test_a_folder_that_others_may_enter(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(PermissionError, match=rf"mode is {mode:04o}.*chmod 700"):
        check_private(tmp_path)
    with pytest.raises(PermissionError, match="0700"):
        check_socket_folder(f"ipc://{tmp_path}/s")
    tmp_path.chmod(0o700)
    check_private(tmp_path)
    check_socket_folder(f"ipc://{tmp_path}/s")


def test_a_folder_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(PermissionError, match=f"belongs to user {uid}"):
        check_private(tmp_path)


def test_a_link_counts_as_what_it_points_to_only_where_it_is_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever owns a link can make it point somewhere else tomorrow."""
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    check_private(tmp_path / "link")
    (tmp_path / "real").chmod(0o755)
    with pytest.raises(PermissionError, match="0755"):
        check_private(tmp_path / "link")


def test_what_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch(0o600)
    with pytest.raises(PermissionError, match="not a folder"):
        check_private(tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        check_private(tmp_path / "nothing")
    check_socket_folder(f"ipc://{tmp_path}/nothing/s")  # nobody's yet: looked at again later
    check_socket_folder("tcp://127.0.0.1:1")


def test_nothing_is_bound_where_others_may_enter(tmp_path: Path) -> None:
    context: zmq.Context[Any] = zmq.Context()
    tmp_path.chmod(0o755)
    with pytest.raises(PermissionError):
        bind_router(context, f"ipc://{tmp_path}/s")
    assert list(tmp_path.iterdir()) == []
    context.term()


def test_nothing_attaches_where_others_may_enter(hop: Any) -> None:
    folder = Path(hop.address.removeprefix("ipc://")).parent
    folder.chmod(0o755)
    with pytest.raises(PermissionError):
        hop.attacher()
    folder.chmod(0o700)


def test_a_server_that_appears_in_an_open_folder_is_told_nothing_but_a_hello(hop: Any) -> None:
    """The folder was not there, or was private, when the attach began."""
    attacher = hop.attacher()
    folder = Path(hop.address.removeprefix("ipc://")).parent
    folder.chmod(0o755)
    hop.until(lambda: hop.answers[attacher])
    (refusal,) = hop.answers[attacher]
    assert isinstance(refusal, AttachRefused)
    assert "0755" in refusal.fault.message
    assert not attacher.send(Goodbye(), None)
    folder.chmod(0o700)
    hop.now += 1.0
    attacher.beat(hop.now)
    hop.until(lambda: attacher.is_attached)


# ---- addresses ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address", ["tcp://10.0.0.1:1", "tcp://0.0.0.0:65535", "tcp://[::1]:80", "tcp://127.0.0.1:1"]
)
def test_addresses_to_listen_at(address: str) -> None:
    assert check_listen_address(address, has_keys=True, insecure=False) == address


@pytest.mark.parametrize(
    "address",
    [
        "tcp://*:5555",
        "tcp://localhost:5555",  # a name may come to mean another address
        "tcp://eth0:5555",
        "tcp://:5555",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:*",
        "tcp://127.0.0.1:65536",
        "tcp://127.0.0.1:99999999999",
        "tcp://127.0.0.1:5555;tcp://*:1",
        "tcp://::1:5555",
        "tcp://[::1]",
        "ipc:///s",
        "udp://127.0.0.1:1",
        "127.0.0.1:5555",
        "",
    ],
)
def test_addresses_nobody_listens_at(address: str) -> None:
    with pytest.raises(BadRequest) as caught:
        check_listen_address(address, has_keys=True, insecure=False)
    assert caught.value.field == "listen"


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "tcp://127.8.8.8:1", "tcp://[::1]:1"])
def test_without_keys_there_is_only_this_machine_and_only_if_one_says_so(address: str) -> None:
    with pytest.raises(BadRequest, match="insecure") as caught:
        check_listen_address(address, has_keys=False, insecure=False)
    assert caught.value.field == "listen"
    assert check_listen_address(address, has_keys=False, insecure=True) == address
    assert check_server_address(address, has_keys=False, insecure=True) == address
    with pytest.raises(BadRequest, match="not both"):
        check_listen_address(address, has_keys=True, insecure=True)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "[::]", "[2001:db8::1]", "8.8.8.8"])
def test_insecure_is_never_the_network(host: str) -> None:
    for check in (check_listen_address, check_server_address):
        with pytest.raises(BadRequest, match="loopback") as caught:
            check(f"tcp://{host}:5555", has_keys=False, insecure=True)
        assert caught.value.field == "insecure"


def test_addresses_to_connect_to() -> None:
    for address in ("tcp://host.example:5", "tcp://my_service:5", "tcp://[fe80::1]:5"):
        assert check_server_address(address, has_keys=True, insecure=False) == address
        with pytest.raises(BadRequest, match="keys"):
            check_server_address(address, has_keys=False, insecure=False)
        with pytest.raises(BadRequest, match="loopback"):
            check_server_address(address, has_keys=False, insecure=True)
    local = "tcp://localhost:5"
    assert check_server_address(local, has_keys=False, insecure=True) == local
    assert check_server_address("ipc:///s", has_keys=False, insecure=False) == "ipc:///s"
    for options in ({"has_keys": True, "insecure": False}, {"has_keys": False, "insecure": True}):
        with pytest.raises(BadRequest, match="tcp://"):
            check_server_address("ipc:///s", **options)
    with pytest.raises(BadRequest, match="ipc:///PATH or tcp://HOST:PORT"):
        check_server_address("http://host:5", has_keys=False, insecure=False)


# ---- key files ---------------------------------------------------------------------------------


def write_key(path: Path, public: bytes, secret: bytes | None = None) -> None:
    lines = ["metadata", "curve", f'    public-key = "{public.decode()}"']
    if secret is not None:
        lines.append(f'    secret-key = "{secret.decode()}"')
    path.write_text("# a key\n" + "\n".join(lines) + "\n")
    path.chmod(0o600 if secret is not None else 0o644)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A server's folder with a client let in."""
    folder = tmp_path / "keys"
    folder.mkdir(mode=0o700)
    for name in ("server", "client"):
        public, secret = zmq.curve_keypair()
        write_key(folder / f"{name}.key", public)
        write_key(folder / f"{name}.key_secret", public, secret)
    return folder


def test_keys_are_read_as_other_programs_write_them(tmp_path: Path) -> None:
    import zmq.auth

    for name in ("server", "client"):
        _, secret = zmq.auth.create_certificates(tmp_path, name, metadata={"name": "me"})
        os.chmod(secret, 0o600)  # which it leaves to the umask
    server, client = load_server_keys(tmp_path), load_client_keys(tmp_path)
    assert client.server == server.pair.public != client.pair.public
    assert admitted_as(tmp_path, client.pair.public)
    assert not admitted_as(tmp_path, server.pair.public)


def test_a_server_may_have_a_key_of_its_own(folder: Path) -> None:
    public, _ = zmq.curve_keypair()
    (folder / "servers").mkdir(mode=0o700)
    write_key(folder / "servers" / "10.0.0.5:7001.key", public)
    shared = load_client_keys(folder)
    own = keys_for(shared, "tcp://10.0.0.5:7001")
    assert (own.server, own.pair) == (public, shared.pair)
    assert keys_for(own, "tcp://10.0.0.6:7001").server == shared.server != public
    (folder / "server.key").unlink()
    keys = load_client_keys(folder)
    assert keys_for(keys, "tcp://10.0.0.5:7001").server == public
    with pytest.raises(BadRequest, match=r"10\.0\.0\.6:7001\.key"):
        keys_for(keys, "tcp://10.0.0.6:7001")
    (folder / "servers").chmod(0o777)
    with pytest.raises(PermissionError):
        keys_for(keys, "tcp://10.0.0.5:7001")


def test_a_secret_is_in_no_repr(folder: Path) -> None:
    for keys in (load_server_keys(folder), load_client_keys(folder)):
        assert keys.pair.secret.decode() not in repr(keys)
        assert keys.pair.public.decode() in repr(keys)


def test_a_secret_that_others_can_read_is_refused(folder: Path) -> None:
    for name, load in (("server", load_server_keys), ("client", load_client_keys)):
        path = folder / f"{name}.key_secret"
        path.chmod(0o640)
        with pytest.raises(PermissionError, match=f"{name}.key_secret.*0600"):
            load(folder)
        path.chmod(0o600)


def test_a_folder_that_others_can_write_is_refused(folder: Path) -> None:
    folder.chmod(0o770)
    for load in (load_server_keys, load_client_keys):
        with pytest.raises(PermissionError, match="which clients are accepted"):
            load(folder)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "public-key"),
        ('public-key = "short"\n', "public-key"),
        ('public-key = "' + "é" * 40 + '"\n', "public-key"),
        ('public-key = "' + "a" * 40 + '"\n', "secret-key"),
        ('public-key = "' + "a" * 40 + '"\nsecret-key = "' + "b" * 40 + '"\n', "beside its own"),
    ],
)
def test_a_file_that_is_no_key(folder: Path, content: str, says: str) -> None:
    path = folder / "client.key_secret"
    path.write_text(content)
    with pytest.raises(BadRequest, match=says) as caught:
        load_client_keys(path)
    assert caught.value.field == "keys"
    assert "b" * 40 not in str(caught.value)


def test_keys_that_are_missing(folder: Path) -> None:
    (folder / "server.key").unlink()
    with pytest.raises(BadRequest, match=r"server\.key"):
        load_client_keys(folder)
    (folder / "server.key_secret").unlink()
    with pytest.raises(BadRequest, match=r"slipstream keys"):
        load_server_keys(folder)


def test_one_bad_file_shuts_out_nobody_else(folder: Path) -> None:
    (folder / "broken.key").write_text("public-key = nothing\n")
    (folder / "away.key").symlink_to(folder / "nowhere")
    assert admitted_as(folder, load_client_keys(folder).pair.public)


# ---- CURVE, over real sockets ------------------------------------------------------------------


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.setsockopt(zmq.SNDTIMEO, POLL_MS)  # a socket that was refused has nowhere to send to
    yield context
    context.destroy(linger=0)


def free_tcp(host: str = "127.0.0.1") -> str:
    port = free_port(host)
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def pair() -> KeyPair:
    return KeyPair(*zmq.curve_keypair())


def gets_in(
    context: zmq.Context[Any], router: zmq.Socket[bytes], address: str, access: Access | None
) -> bool:
    """Whether a message arrives, and its answer too."""
    dealer = new_dealer(context, address, os.urandom(16), access)
    dealer.setsockopt(zmq.SNDTIMEO, POLL_MS if access is WELCOME else NEVER_MS)
    try:
        dealer.send(b"x")
        if not router.poll(POLL_MS if access is WELCOME else NEVER_MS):
            return False
        route, data = router.recv_multipart()
        assert data == b"x"
        router.send_multipart([route, b"y"])
        return dealer.poll(POLL_MS) != 0 and dealer.recv() == b"y"
    except zmq.Again:  # it was refused before it could send
        return False
    finally:
        dealer.close(linger=0)


WELCOME = Access()  # stands for whoever ought to get in


def test_one_router_serves_ipc_without_keys_and_tcp_with_them(
    context: zmq.Context[zmq.Socket[bytes]], address: str, folder: Path
) -> None:
    server, client = load_server_keys(folder), load_client_keys(folder)
    tcp = free_tcp()
    router = bind_router(context, address, Listener(tcp, server))
    for _ in range(2):  # the second time after CURVE was set: what was bound first stays plain
        assert gets_in(context, router, address, WELCOME)
    dealer = new_dealer(context, tcp, os.urandom(16), Access(client))
    dealer.send(b"hello")
    assert router.poll(POLL_MS)
    assert router.recv_multipart()[1] == b"hello"


@pytest.mark.parametrize("is_held", [False, True], ids=["", "held"])
def test_a_session_has_the_key_that_its_client_came_with(
    context: zmq.Context[zmq.Socket[bytes]], address: str, folder: Path, is_held: bool
) -> None:
    server, client = load_server_keys(folder), load_client_keys(folder)
    tcp = free_tcp()
    socket = bind_router(context, address, Listener(tcp, server))
    router: Router[Any, Any, Any] = Router(socket, front_codec(), window=4)
    for where, access, expected in (
        (tcp, Access(client), client.pair.public),
        (address, None, b""),
    ):
        dealer = new_dealer(context, where, os.urandom(16), access)
        hello = Hello(PROTOCOL_VERSION, os.urandom(16))
        dealer.send(client_codec().encode(Frame(1, 0, 0, hello)))
        assert socket.poll(POLL_MS)
        if is_held:
            router.queue_hellos()
        ((session, body),) = router.receive(0.0)
        assert (body, session.public_key) == (hello, expected)


@pytest.mark.parametrize("is_held", [False, True], ids=["", "held"])
def test_an_identity_that_another_key_knows_is_not_its_own(
    context: zmq.Context[zmq.Socket[bytes]], address: str, folder: Path, is_held: bool
) -> None:
    server, client, bob = load_server_keys(folder), load_client_keys(folder), pair()
    write_key(folder / "bob.key", bob.public)
    tcp = free_tcp()
    socket = bind_router(context, address, Listener(tcp, server))
    router: Router[Any, Any, Any] = Router(socket, front_codec(), window=4)
    hello = Hello(PROTOCOL_VERSION, os.urandom(16))
    sessions = []
    for epoch, keys in enumerate((client, ClientKeys(client.server, bob)), 1):
        dealer = new_dealer(context, tcp, os.urandom(16), Access(keys))
        dealer.send(client_codec().encode(Frame(epoch, 0, 0, hello)))
        assert socket.poll(POLL_MS)
        if is_held:
            router.queue_hellos()
        else:
            sessions += [session for session, _ in router.receive(0.0)]
    sessions += [session for session, _ in router.receive(0.0)]
    assert [it.public_key for it in sessions] == [client.pair.public, bob.public]
    assert [it.is_open for it in sessions] == [True, True]
    assert sessions[0].identity != sessions[1].identity


@pytest.mark.parametrize("is_own", [False, True], ids=["", "of its own"])
def test_a_servers_key_that_changes_in_the_folder_is_taken_up(
    context: zmq.Context[zmq.Socket[bytes]], address: str, folder: Path, is_own: bool
) -> None:
    """By each attach, without the client being started again."""
    tcp = free_tcp()
    file = folder / "server.key"
    if is_own:
        file = folder / "servers" / f"{tcp.removeprefix('tcp://')}.key"
        file.parent.mkdir(mode=0o700)
        write_key(file, pair().public)
    client = keys_for(load_client_keys(folder), tcp)
    new = pair()
    write_key(folder / "server.key_secret", new.public, new.secret)
    router = bind_router(context, address, Listener(tcp, load_server_keys(folder)))
    write_key(file, new.public)
    dealer = new_dealer(context, tcp, os.urandom(16), Access(client))
    dealer.send(b"hello")
    assert router.poll(POLL_MS)
    file.write_text("half written")
    again = new_dealer(context, tcp, os.urandom(16), Access(replace(client, server=new.public)))
    again.send(b"hello")
    assert router.poll(POLL_MS)


def strangers(server: ServerKeys, client: ClientKeys) -> dict[str, Access]:
    return {
        "a key that is not let in": Access(ClientKeys(server.pair.public, pair())),
        "the server's public key for one's own": Access(
            ClientKeys(server.pair.public, KeyPair(server.pair.public, pair().secret))
        ),
        "another server's key": Access(ClientKeys(pair().public, client.pair)),
        "no keys": Access(insecure=True),
        "a client's public key without its secret": Access(
            ClientKeys(server.pair.public, KeyPair(client.pair.public, pair().secret))
        ),
    }


def test_strangers_do_not_get_in(
    context: zmq.Context[zmq.Socket[bytes]], address: str, folder: Path
) -> None:
    server, client = load_server_keys(folder), load_client_keys(folder)
    tcp = free_tcp()
    router = bind_router(context, address, Listener(tcp, server))
    for who, access in strangers(server, client).items():
        assert not gets_in(context, router, tcp, access), who
    raw = sockets.create_connection(("127.0.0.1", int(tcp.rpartition(":")[2])))
    raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(256))
    assert not router.poll(NEVER_MS)
    raw.close()
    dealer = new_dealer(context, tcp, os.urandom(16), Access(client))
    dealer.send(b"still served")
    assert router.poll(POLL_MS)


def test_a_server_whose_gate_fails_lets_in_nobody(
    context: zmq.Context[zmq.Socket[bytes]], folder: Path
) -> None:
    """CURVE without a gate would let in everybody who knows the server's public key."""
    router = context.socket(zmq.ROUTER)
    secure_server(router, load_server_keys(folder))
    tcp = free_tcp()
    router.bind(tcp)
    assert not gets_in(context, router, tcp, Access(load_client_keys(folder)))


def test_a_client_is_let_in_and_shut_out_while_the_server_runs(
    context: zmq.Context[zmq.Socket[bytes]], address: str, folder: Path
) -> None:
    server = load_server_keys(folder)
    tcp = free_tcp()
    router = bind_router(context, address, Listener(tcp, server))
    late = pair()
    access = Access(ClientKeys(server.pair.public, late))
    assert not gets_in(context, router, tcp, access)
    write_key(folder / "late.key", late.public)
    dealer = new_dealer(context, tcp, os.urandom(16), access)
    dealer.send(b"x")
    assert router.poll(POLL_MS)
    router.recv_multipart()
    (folder / "late.key").unlink()
    assert not gets_in(context, router, tcp, access)
    folder.chmod(0o777)  # anybody may have put a key there
    assert not gets_in(context, router, tcp, Access(load_client_keys_unchecked(folder)))
    folder.chmod(0o700)


def test_a_gate_outlives_a_folder_that_it_cannot_trust(
    context: zmq.Context[zmq.Socket[bytes]], address: str, folder: Path
) -> None:
    server, client = load_server_keys(folder), load_client_keys(folder)
    tcp = free_tcp()
    router = bind_router(context, address, Listener(tcp, server))
    folder.chmod(0o777)  # before the first handshake
    assert not gets_in(context, router, tcp, Access(client))
    folder.chmod(0o700)
    dealer = new_dealer(context, tcp, os.urandom(16), Access(client))
    dealer.send(b"x")
    assert router.poll(POLL_MS)


def load_client_keys_unchecked(folder: Path) -> ClientKeys:
    mode = folder.stat().st_mode
    folder.chmod(0o700)
    try:
        return load_client_keys(folder)
    finally:
        folder.chmod(mode)


def test_the_gate_answers_nothing_but_curve(
    context: zmq.Context[zmq.Socket[bytes]], folder: Path
) -> None:
    open_gate(context, load_server_keys(folder))
    asker = context.socket(zmq.REQ)
    asker.connect("inproc://zeromq.zap.01")
    public = z85.decode(load_client_keys(folder).pair.public)
    for domain, mechanism, credentials, is_let_in in (
        (b"slipstream", b"CURVE", [public], True),
        (b"slipstream", b"NULL", [], False),
        (b"slipstream", b"PLAIN", [b"me", b"secret"], False),
        (b"slipstream", b"CURVE", [public[:-1]], False),
        (b"slipstream", b"CURVE", [], False),
        (b"other", b"CURVE", [public], False),
    ):
        asker.send_multipart([b"1.0", b"7", domain, b"127.0.0.1", b"", mechanism, *credentials])
        assert asker.poll(POLL_MS)
        version, request, status, *_ = asker.recv_multipart()
        assert (version, request) == (b"1.0", b"7")
        assert (status == b"200") == is_let_in


def test_the_gate_ends_with_its_context(address: str, folder: Path) -> None:
    for end in ("term", "destroy"):
        context: zmq.Context[Any] = zmq.Context()
        gate = open_gate(context, load_server_keys(folder))
        getattr(context, end)()
        gate.join(PATIENCE_S)
        assert not gate.is_alive()
    assert not any(t.name == "slipstream-gate" for t in threading.enumerate())


def test_ipv6(context: zmq.Context[zmq.Socket[bytes]], address: str, folder: Path) -> None:
    try:
        tcp = free_tcp("::1")
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    router = bind_router(context, address, Listener(tcp, load_server_keys(folder)))
    dealer = new_dealer(context, tcp, os.urandom(16), Access(load_client_keys(folder)))
    dealer.send(b"x")
    assert router.poll(POLL_MS)


def test_a_port_that_is_taken_leaves_nothing_behind(address: str, folder: Path) -> None:
    context: zmq.Context[Any] = zmq.Context()
    with sockets.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        tcp = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(zmq.ZMQError, match="in use"):
            bind_router(context, address, Listener(tcp, load_server_keys(folder)))
    context.term()


# ---- the hop over tcp --------------------------------------------------------------------------


class Attach:
    """An attaching end and its accepting one over tcp."""

    def __init__(
        self, context: zmq.Context[Any], router: zmq.Socket[bytes], tcp: str, access: Access
    ) -> None:
        self.now = 1000.0
        self.poller = zmq.Poller()
        self.acceptor: Router[Any, Any, Any] = Router(router, front_codec(), window=4)
        self.attacher: Dealer[Any, Any, Any] = Dealer(
            context, tcp, client_codec(), self.poller, identity=b"me", now=1000.0, access=access
        )
        self.poller.register(router, zmq.POLLIN)
        self.answers: list[Any] = []
        self.bodies: list[Any] = []

    def until(self, is_done: Callable[[], Any], within_ms: int = POLL_MS) -> bool:
        for _ in range(within_ms // 10):
            for session, body in self.acceptor.receive(self.now):
                self.bodies.append(body)
                if isinstance(body, Hello):
                    self.acceptor.welcome(session, CARD)
            self.answers += self.attacher.receive(self.now)
            if is_done():
                return True
            self.poller.poll(10)
        return False


@pytest.fixture
def tcp_router(
    context: zmq.Context[zmq.Socket[bytes]], address: str, folder: Path
) -> tuple[zmq.Socket[bytes], str]:
    tcp = free_tcp()
    return bind_router(context, address, Listener(tcp, load_server_keys(folder))), tcp


def test_a_client_attaches_over_tcp(
    context: zmq.Context[zmq.Socket[bytes]], tcp_router: Any, folder: Path
) -> None:
    hop = Attach(context, *tcp_router, Access(load_client_keys(folder)))
    assert hop.until(lambda: hop.attacher.is_attached)
    assert isinstance(hop.answers[0], Welcome)
    assert hop.attacher.send(Abort(b"x"), None)
    assert hop.until(lambda: Abort(b"x") in hop.bodies)
    assert hop.attacher.trouble == ""


@pytest.mark.parametrize(
    ("who", "says"),
    [
        ("a key that is not let in", "does not accept this client's key"),
        ("no keys", "one side uses CURVE keys here, the other does not"),
    ],
)
def test_who_is_not_let_in_is_told_at_once_and_does_not_hammer(
    context: zmq.Context[zmq.Socket[bytes]], tcp_router: Any, folder: Path, who: str, says: str
) -> None:
    """Time stands still: each attach after the first would be one in a loop without end."""
    access = strangers(load_server_keys(folder), load_client_keys(folder))[who]
    hop = Attach(context, *tcp_router, access)
    assert hop.until(lambda: hop.answers)
    assert says in hop.answers[0].fault.message
    assert (hop.answers[0].fault.code, hop.answers[0].fault.field) == ("bad_request", "keys")
    hop.until(lambda: False, NEVER_MS)
    assert hop.attacher.epoch == 1
    assert len(hop.answers) == 1
    assert hop.bodies == []
    hop.attacher.beat(1001.0)
    assert hop.attacher.epoch == 2  # when its turn comes


def test_another_servers_key_is_trouble_that_can_be_told(
    context: zmq.Context[zmq.Socket[bytes]], tcp_router: Any, folder: Path
) -> None:
    access = strangers(load_server_keys(folder), load_client_keys(folder))["another server's key"]
    hop = Attach(context, *tcp_router, access)
    assert hop.until(lambda: hop.attacher.trouble)
    assert "server.key" in hop.attacher.trouble
    assert hop.answers == []
    assert hop.attacher.epoch == 1


# ---- what one peer can cost --------------------------------------------------------------------


def test_answers_that_a_peer_leaves_unread_do_not_pile_up(hop: Any) -> None:
    peer = new_dealer(hop.context, hop.address, b"never-reads")
    peer.close()
    peer = hop.context.socket(zmq.DEALER)
    peer.setsockopt(zmq.RCVHWM, 1)
    peer.setsockopt(zmq.LINGER, 0)
    peer.connect(hop.address)
    refused, real_send = [], hop.acceptor._send

    def send(route: bytes, frame: Any) -> bool:
        refused.append(real_send(route, frame))
        return bool(refused[-1])

    hop.acceptor._send = send
    poller = Poller()
    hop.acceptor.register(poller)
    for _ in range(200):
        for _ in range(200):
            if not peer.poll(0, zmq.POLLOUT):
                break
            peer.send(b"garbage")
        while poller.poll(0 if peer.poll(0, zmq.POLLOUT) else POLL_MS):
            hop.serve()
        if not all(refused):
            break
    assert not all(refused), "the answers to one peer are held without bound"
    other = hop.attached(b"somebody else")
    other._send_control(Ping())
    assert other.send(Abort(b"x"), None)
    hop.until(lambda: Abort(b"x") in hop.received)
    peer.close()


def test_a_peer_that_floods_waits_in_its_own_memory(hop: Any) -> None:
    """What nobody has read yet is bounded here; the rest stays where it comes from."""
    peer = hop.context.socket(zmq.DEALER)
    peer.setsockopt(zmq.SNDHWM, 1)
    peer.setsockopt(zmq.LINGER, 0)
    peer.connect(hop.address)
    num_sent = 0
    while peer.poll(NEVER_MS, zmq.POLLOUT):
        peer.send(bytes(10_000))
        num_sent += 1
        assert num_sent < 10_000, "the worker takes in whatever is sent"
    peer.close()
