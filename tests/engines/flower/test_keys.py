"""Keys: who can read them, what they certify, and that none is ever lost or overwritten."""

import contextlib
import datetime
import ipaddress
import json
import os
import socket
import ssl
import threading
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="needs coterie[flower]")

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from typer.testing import CliRunner

from coterie.channel.privacy.secagg.crypto import public_identity, signed, verifies
from coterie.cli.federation import keys as command_line
from coterie.engines.flower import keys, request
from coterie.engines.flower.keys import (
    add_clients,
    make_federation,
    make_request,
    read_client,
    read_server,
    renew_server,
)
from coterie.engines.flower.request import EnrolmentRequest, read_request
from coterie.errors import ConfigError, CoterieError

CLIENTS = ("berlin", "paris-2", "rome_3")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys") / "federation"
    make_federation(folder, ["fl.example.org", "192.0.2.7"], CLIENTS)
    return folder


@pytest.fixture
def fresh(tmp_path):
    folder = tmp_path / "federation"
    make_federation(folder, ["fl.example.org"], ["a", "b"], days=30)
    return folder


def files(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def certificate(path):
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_each_party_gets_its_files_and_no_others(made):
    assert {n for n in files(made) if not n.startswith("clients/")} == {
        *("ca/ca.key", "ca/ca.pem", "ca/federation.json"),
        *("server/ca.pem", "server/server.pem", "server/server.key", "server/clients.json"),
    }
    for name in CLIENTS:
        assert set(files(made / "clients" / name)) == {
            *("ca.pem", "node.key", "node.pub", "identity.key", "federation.json"),
        }
    authority = (made / "ca/ca.key").read_bytes()
    for party in ("server", "clients"):
        assert authority not in files(made / party).values()


def test_private_files_are_private(made):
    for path in made.rglob("*.key"):
        assert path.stat().st_mode & 0o777 == 0o600, path
    for path in made.rglob("*"):
        if path.is_dir():
            assert path.stat().st_mode & 0o077 == 0, path


def test_secrets_are_private_from_their_first_byte(tmp_path, monkeypatch):
    """Whatever is opened for a secret is opened 0600, also under the widest umask."""
    opened, before = {}, os.open

    def noting(path, flags, mode=0o777, **kwargs):
        if flags & os.O_CREAT:
            opened[str(path)] = (mode, flags & os.O_EXCL)
        return before(path, flags, mode, **kwargs)

    monkeypatch.setattr(os, "open", noting)
    umask = os.umask(0)
    try:
        make_federation(tmp_path / "f", ["h"], ["a"])
    finally:
        os.umask(umask)
    assert len(opened) == 4  # authority, server, node, identity
    assert all(mode == 0o600 and exclusive for mode, exclusive in opened.values())
    assert all(p.stat().st_mode & 0o077 == 0 for p in tmp_path.rglob("*.key"))


def test_order_gives_ids_and_the_roster_has_every_public_half(made):
    server = read_server(made)
    assert [(m.id, m.name) for m in server.clients] == list(enumerate(CLIENTS))
    for member in server.clients:
        client = read_client(made / "clients" / member.name)
        assert (client.id, client.name) == (member.id, member.name)
        assert client.federation == server.federation
        assert client.server == "fl.example.org"
        assert client.roster == {m.id: m.identity for m in server.clients}
        assert public_identity(client.identity) == member.identity
        assert verifies(client.roster[client.id], signed(client.identity, b"x"), b"x")
        node = serialization.load_ssh_private_key(client.node_key.read_bytes(), None)
        assert isinstance(node.curve, ec.SECP384R1)
        public = serialization.load_ssh_public_key(member.node.encode())
        assert node.public_key() == public
    assert len({m.identity for m in server.clients} | {m.node for m in server.clients}) == 6


def test_no_private_key_is_ever_shown(made):
    client = read_client(made / "clients/berlin")
    assert repr(client.identity) not in repr(client)


def test_federations_differ(made, fresh):
    assert read_server(made).federation != read_server(fresh).federation
    assert len(read_server(made).federation) == 32


def test_flower_reads_the_keys(made):
    pytest.importorskip("flwr", reason="needs coterie[flower]")
    from importlib import import_module
    from types import SimpleNamespace

    register = import_module("flwr.cli.supernode.register")
    supernode = import_module("flwr.supernode.cli.flower_supernode")

    home = made / "clients/berlin"
    told = SimpleNamespace(
        auth_supernode_private_key=str(home / "node.key"), auth_supernode_public_key=None
    )
    _, public = supernode._try_setup_client_authentication(told)
    registered = register.try_load_public_key(home / "node.pub")
    assert serialization.load_pem_public_key(registered) == public


def test_the_certificates_say_what_they_are_for(made):
    ca, server = certificate(made / "ca/ca.pem"), certificate(made / "server/server.pem")

    def extension(of, kind):
        return of.extensions.get_extension_for_class(kind)

    assert extension(ca, x509.BasicConstraints).value == x509.BasicConstraints(True, 0)
    assert extension(server, x509.BasicConstraints).value == x509.BasicConstraints(False, None)
    for found in (ca, server):
        assert extension(found, x509.BasicConstraints).critical
        assert extension(found, x509.KeyUsage).critical
        assert isinstance(found.public_key().curve, ec.SECP384R1)
    assert extension(ca, x509.KeyUsage).value.key_cert_sign
    assert not extension(server, x509.KeyUsage).value.key_cert_sign
    names = extension(server, x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org", "localhost"]
    assert names.get_values_for_type(x509.IPAddress) == [
        ipaddress.ip_address(a) for a in ("192.0.2.7", "127.0.0.1", "::1")
    ]
    days = (server.not_valid_after_utc - datetime.datetime.now(datetime.UTC)).days
    assert days in (3649, 3650)
    assert ca.not_valid_after_utc > server.not_valid_after_utc + datetime.timedelta(days=3600)


def shake_hands(server, ca, name):
    """A real handshake over a socket pair; what the client thinks of it."""
    ours, theirs = socket.socketpair()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server.certificate, server.key)

    def serve():
        with ours, contextlib.suppress(OSError):
            context.wrap_socket(ours, server_side=True).close()

    thread = threading.Thread(target=serve)
    thread.start()
    checks = ssl.create_default_context(cafile=str(ca))
    checks.verify_flags |= ssl.VERIFY_X509_STRICT
    try:
        with theirs:
            checks.wrap_socket(theirs, server_hostname=name).close()
    finally:
        thread.join()


@pytest.mark.parametrize("name", ["fl.example.org", "192.0.2.7", "localhost", "127.0.0.1", "::1"])
def test_tls_accepts_the_server_by_each_of_its_names(made, name):
    shake_hands(read_server(made), read_client(made / "clients/berlin").ca, name)


def test_tls_refuses_another_name_and_another_federation(made, fresh):
    with pytest.raises(ssl.SSLCertVerificationError, match=r"not valid for 'evil.example.org'"):
        shake_hands(read_server(made), made / "ca/ca.pem", "evil.example.org")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(read_server(made), fresh / "ca/ca.pem", "localhost")


# Nothing is overwritten


def test_a_second_federation_in_the_same_folder_is_refused(fresh):
    before = files(fresh)
    with pytest.raises(ConfigError, match="never overwritten"):
        make_federation(fresh, ["fl.example.org"], ["a", "b"], days=30)
    assert files(fresh) == before


def test_late_clients_get_the_next_ids_and_all_else_stays(fresh):
    before = files(fresh)
    assert [(m.id, m.name) for m in add_clients(fresh, ["c", "d"])] == [(2, "c"), (3, "d")]
    after = files(fresh)
    changed = {n for n in before if after[n] != before[n]}
    told = {f"clients/{name}/federation.json" for name in "ab"}
    assert changed == {"server/clients.json", *told}
    everybody = {m.id: m.identity for m in read_server(fresh).clients}
    assert list(everybody) == [0, 1, 2, 3]
    for name in "abcd":
        assert read_client(fresh / "clients" / name).roster == everybody
    with pytest.raises(ConfigError, match="'a' is a client of this federation already"):
        add_clients(fresh, ["e", "a"])
    assert files(fresh) == after


def test_late_clients_when_the_others_folders_were_handed_over(fresh, tmp_path):
    (fresh / "clients/a").rename(tmp_path / "a")
    add_clients(fresh, ["c"])
    assert not (fresh / "clients/a").exists()
    assert list(read_client(tmp_path / "a").roster) == [0, 1]
    assert list(read_client(fresh / "clients/c").roster) == [0, 1, 2]
    with pytest.raises(ConfigError, match="already"):
        add_clients(fresh, ["a"])


def test_renewing_keeps_the_key_and_changes_the_names(fresh):
    before = files(fresh)
    old = certificate(fresh / "server/server.pem")
    ends = renew_server(fresh, ["new.example.org"])
    after = files(fresh)
    assert {n for n in before if after[n] != before[n]} == {
        *("server/server.pem", "ca/federation.json"),
        *(f"clients/{name}/federation.json" for name in "ab"),
    }
    new = certificate(fresh / "server/server.pem")
    assert new.public_key() == old.public_key()
    assert new.serial_number != old.serial_number
    assert read_server(fresh).expires == ends == new.not_valid_after_utc
    assert read_client(fresh / "clients/a").server == "new.example.org"
    shake_hands(read_server(fresh), fresh / "clients/a/ca.pem", "new.example.org")


@pytest.mark.parametrize("name", ["", "A", "a b", "../a", "a/b", ".", "ä", "a\n", "x" * 64])
def test_names_are_plain(tmp_path, name):
    with pytest.raises(ConfigError, match="cannot be a client's name"):
        make_federation(tmp_path / "f", ["h"], ["ok", name])
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize(
    "host",
    ["", "h:443", "https://h", "*.example.org", "a b", "-a.org", "0.0.0.0", "::", "1.2.3", "ü.org"],
)
def test_hosts_are_names_or_addresses(tmp_path, host):
    with pytest.raises(ConfigError, match=r"is not a valid host|every address"):
        make_federation(tmp_path / "f", [host], ["a"])
    assert not (tmp_path / "f").exists()


def test_other_mistakes(tmp_path):
    with pytest.raises(ConfigError, match="twice"):
        make_federation(tmp_path / "f", ["h"], ["a", "a"])
    with pytest.raises(ConfigError, match="at least one client"):
        make_federation(tmp_path / "f", ["h"], [])
    with pytest.raises(ConfigError, match="name the host"):
        make_federation(tmp_path / "f", [], ["a"])
    with pytest.raises(ConfigError, match="1 to 36500"):
        make_federation(tmp_path / "f", ["h"], ["a"], days=0)
    for late in (lambda f: add_clients(f, ["a"]), lambda f: renew_server(f, ["h"])):
        with pytest.raises(ConfigError, match="no complete federation"):
            late(tmp_path / "f")
    assert not (tmp_path / "f").exists()


# Interrupted


class Cut(BaseException):
    """A power cut."""


def cut_after(monkeypatch, steps):
    """Every file that reaches its place counts as a step; after so many, the end."""
    done = [0]

    def counting(before):
        def replaced(self, target):
            if done[0] == steps:
                raise Cut
            done[0] += 1
            return before(self, target)

        return replaced

    monkeypatch.setattr(Path, "replace", counting(Path.replace))
    monkeypatch.setattr(Path, "rename", counting(Path.rename))


def interrupted_everywhere(monkeypatch, make, folder_of):
    """Run it, cut at each step in turn and completed by a second run; yields the folders."""
    for steps in range(100):
        folder = folder_of(steps)
        with monkeypatch.context() as patch:
            cut_after(patch, steps)
            try:
                make(folder)
            except Cut:
                kept = {n: d for n, d in files(folder).items() if n.endswith(".key")}
            else:
                return
        make(folder)
        after = files(folder)
        assert {n: after[n] for n in kept} == kept  # a key that was there was kept
        assert not [n for n in after if n.endswith(".tmp") and ".key" in n]
        yield folder


def test_making_can_be_interrupted_anywhere(tmp_path, monkeypatch):
    count = 0
    for folder in interrupted_everywhere(
        monkeypatch,
        lambda folder: make_federation(folder, ["h"], ["a", "b"]),
        lambda steps: tmp_path / str(steps),
    ):
        everybody = {m.id: m.identity for m in read_server(folder).clients}
        assert [read_client(folder / "clients" / n).roster for n in "ab"] == [everybody] * 2
        count += 1
    assert count == 17  # each file once


def test_adding_can_be_interrupted_anywhere(tmp_path, monkeypatch):
    def folder_of(steps):
        make_federation(tmp_path / str(steps), ["h"], ["a"])
        return tmp_path / str(steps)

    count = 0
    for folder in interrupted_everywhere(monkeypatch, lambda f: add_clients(f, ["b"]), folder_of):
        everybody = {m.id: m.identity for m in read_server(folder).clients}
        assert [read_client(folder / "clients" / n).roster for n in "ab"] == [everybody] * 2
        count += 1
    assert count == 7


def test_what_an_interrupted_command_left_is_not_forgotten(tmp_path, monkeypatch):
    folder = tmp_path / "f"
    with monkeypatch.context() as patch:
        cut_after(patch, 8)
        with pytest.raises(Cut):
            make_federation(folder, ["h"], ["a", "b"])
    assert (folder / "clients/a").exists()
    with pytest.raises(ConfigError, match="no complete federation"):
        add_clients(folder, ["c"])
    with pytest.raises(ConfigError, match="holds keys of a, left by a command"):
        make_federation(folder, ["h"], ["c"])
    with pytest.raises(ConfigError, match="was not finished, with other hosts"):
        make_federation(folder, ["g"], ["a", "b"])
    make_federation(folder, ["h"], ["a", "b"])
    read_server(folder)


def test_a_full_disk_leaves_no_half_key(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CoterieError, match="No space left"):
            make_federation(tmp_path / "f", ["h"], ["a"])
    assert files(tmp_path) == {}
    make_federation(tmp_path / "f", ["h"], ["a"])


# Reading


@pytest.mark.parametrize("file", ["server.key"])
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_a_key_that_others_can_read_is_refused(fresh, file, mode):
    path = fresh / "server" / file
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"other users can read .*: run `chmod 600 {path}"):
        read_server(fresh)
    path.chmod(0o400)
    read_server(fresh)


@pytest.mark.parametrize("file", ["node.key", "identity.key"])
def test_a_clients_key_that_others_can_read_is_refused(fresh, file):
    path = fresh / "clients/a" / file
    path.chmod(0o644)
    with pytest.raises(ConfigError, match=f"chmod 600 {path}"):
        read_client(fresh / "clients/a")


@pytest.mark.parametrize("file", ["ca.pem", "server.pem", "server.key", "clients.json"])
def test_a_server_file_that_is_missing_or_damaged(fresh, file):
    path = fresh / "server" / file
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ConfigError, match=str(path)):
        read_server(fresh / "server")
    path.unlink()
    with pytest.raises(ConfigError, match=f"{path} is missing"):
        read_server(fresh / "server")


@pytest.mark.parametrize(
    "file", ["ca.pem", "node.key", "node.pub", "identity.key", "federation.json"]
)
def test_a_client_file_that_is_missing_or_damaged(fresh, file):
    path = fresh / "clients/a" / file
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ConfigError, match=str(path)):
        read_client(fresh / "clients/a")
    path.unlink()
    with pytest.raises(ConfigError, match=f"{path} is missing"):
        read_client(fresh / "clients/a")


@pytest.mark.parametrize("content", ["[]", "{}", '{"clients": 3}', "null", '{"federation": "x"}'])
def test_json_of_another_kind(fresh, content):
    (fresh / "server/clients.json").write_text(content)
    (fresh / "clients/a/federation.json").write_text(content)
    with pytest.raises(ConfigError, match="is damaged"):
        read_server(fresh)
    with pytest.raises(ConfigError, match="is damaged"):
        read_client(fresh / "clients/a")


def test_a_roster_whose_ids_have_a_gap(fresh):
    path = fresh / "server/clients.json"
    content = json.loads(path.read_text())
    content["clients"].pop(0)
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="ids are not 0, 1, 2"):
        read_server(fresh)


def test_files_of_two_federations_do_not_mix(made, fresh):
    ours, theirs = fresh / "server", made / "server"
    for file, match in (("server.key", "is not the certificate of"), ("ca.pem", "was not issued")):
        kept = (ours / file).read_bytes()
        (ours / file).write_bytes((theirs / file).read_bytes())
        with pytest.raises(ConfigError, match=match):
            read_server(fresh)
        (ours / file).write_bytes(kept)
    home = fresh / "clients/a"
    for file, match in (
        ("node.pub", "not the public half"),
        ("identity.key", "has another key for a: .*identity.key is not the one"),
        ("federation.json", "has another key for berlin: .*node.key is not the one"),
    ):
        kept = (home / file).read_bytes()
        (home / file).write_bytes((made / "clients/berlin" / file).read_bytes())
        with pytest.raises(ConfigError, match=match):
            read_client(home)
        (home / file).write_bytes(kept)
    read_client(home)


def later(monkeypatch, days):
    now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    monkeypatch.setattr(keys, "_now", lambda: now)


def test_certificates_end_and_can_be_renewed(fresh, monkeypatch):
    later(monkeypatch, 29)
    read_server(fresh)
    ended = certificate(fresh / "server/server.pem").not_valid_after_utc.date()
    later(monkeypatch, 31)
    with pytest.raises(ConfigError, match=f"server.pem expired on {ended}: .*coterie keys renew"):
        read_server(fresh)
    read_client(fresh / "clients/a")
    renew_server(fresh, ["fl.example.org"])
    later(monkeypatch, 59)  # the authority ends on day 60, and the renewed one no later
    read_server(fresh)
    ca = certificate(fresh / "ca/ca.pem")
    assert certificate(fresh / "server/server.pem").not_valid_after_utc == ca.not_valid_after_utc
    later(monkeypatch, 61)
    with pytest.raises(ConfigError, match=r"ca.pem expired on .*new federation"):
        renew_server(fresh, ["fl.example.org"])
    with pytest.raises(ConfigError, match=r"ca.pem expired on .*ask for the folder"):
        read_client(fresh / "clients/a")


def test_a_clock_that_is_slow(fresh, monkeypatch):
    later(monkeypatch, -0.9)
    read_server(fresh)
    later(monkeypatch, -2)
    with pytest.raises(ConfigError, match=r"is not valid before .*clock"):
        read_server(fresh)


def test_without_the_extra(fresh, monkeypatch):
    monkeypatch.setattr(keys, "_AVAILABLE", False)
    monkeypatch.setattr(request, "_AVAILABLE", False)
    for call in (
        lambda: make_request(fresh / "x", "a"),
        lambda: read_request(fresh / "x"),
        lambda: make_federation(fresh / "x", ["h"], ["a"]),
        lambda: add_clients(fresh, ["z"]),
        lambda: renew_server(fresh, ["h"]),
        lambda: read_server(fresh),
        lambda: read_client(fresh / "clients/a"),
    ):
        with pytest.raises(ConfigError, match=r"pip install 'coterie\[flower\]'"):
            call()


# Requests: clients that draw their own keys


@pytest.fixture
def homes(tmp_path):
    """Two clients that have drawn their keys and asked."""
    for name in ("north", "south"):
        make_request(tmp_path / name, name)
    return {name: tmp_path / name for name in ("north", "south")}


def requests_of(homes):
    return [read_request(home / "request.json") for home in homes.values()]


def private_of(home):
    return keys._ssh((home / "node.key").read_bytes()), (home / "identity.key").read_bytes()


def answered(folder, home):
    """The client puts into its folder what came back."""
    for file, content in files(folder / "clients" / home.name).items():
        (home / file).write_bytes(content)


def test_clients_that_draw_their_own_keys_tell_nobody_a_secret(homes, tmp_path):
    folder = tmp_path / "federation"
    made = make_federation(folder, ["h"], ["east", *requests_of(homes)])
    assert [(m.id, m.name) for m in made] == [(0, "east"), (1, "north"), (2, "south")]
    assert tuple(made) == read_server(folder).clients
    everything = b"".join(files(folder).values())
    for name, home in homes.items():
        assert set(files(home)) == {"node.key", "node.pub", "identity.key", "request.json"}
        assert set(files(folder / "clients" / name)) == {"ca.pem", "federation.json"}
        _, seed = private_of(home)
        for outside in (everything, (home / "request.json").read_bytes()):
            for secret in (seed, seed.hex().encode(), (home / "node.key").read_bytes()):
                assert secret not in outside
        for file in ("node.key", "identity.key"):
            assert (home / file).stat().st_mode & 0o777 == 0o600
        assert home.stat().st_mode & 0o777 == 0o700
        answered(folder, home)
        client = read_client(home)
        member = made[client.id]
        assert (client.name, client.members) == (name, tuple(made))
        assert public_identity(client.identity) == member.identity == client.roster[client.id]
        assert (home / "node.pub").read_text() == member.node + "\n"
    assert read_client(folder / "clients/east").members == tuple(made)


def test_the_fingerprint_stands_for_the_name_and_both_keys(homes, tmp_path):
    north, south = requests_of(homes)
    assert [len(group) for group in north.fingerprint.split(" ")] == [4] * 8
    assert set(north.fingerprint) <= set("0123456789abcdef ")
    others = [
        EnrolmentRequest("north2", north.node, north.identity),
        EnrolmentRequest("north", south.node, north.identity),
        EnrolmentRequest("north", north.node, south.identity),
    ]
    assert len({r.fingerprint for r in (north, south, *others)}) == 5
    made = make_federation(tmp_path / "f", ["h"], [north, south])
    assert [m.fingerprint for m in made] == [north.fingerprint, south.fingerprint]


def edited(home, **fields):
    content = json.loads((home / "request.json").read_text())
    signatures = {**content["signatures"], **fields.pop("signatures", {})}
    (home / "request.json").write_text(json.dumps({**content, **fields, "signatures": signatures}))
    return home / "request.json"


@pytest.mark.parametrize("half", ["node", "identity"])
@pytest.mark.parametrize("with_signature", [False, True])
def test_a_request_with_a_key_of_another_is_refused(homes, half, with_signature):
    theirs = json.loads((homes["south"] / "request.json").read_text())
    changes = {half: theirs[half]}
    if with_signature:
        changes["signatures"] = {half: theirs["signatures"][half]}
    with pytest.raises(ConfigError, match=r"not as its keys signed it: .* from two"):
        read_request(edited(homes["north"], **changes))


@pytest.mark.parametrize("half", ["node", "identity"])
def test_each_signature_is_checked(homes, half):
    theirs = json.loads((homes["south"] / "request.json").read_text())
    with pytest.raises(ConfigError, match="not as its keys signed it"):
        read_request(edited(homes["north"], signatures={half: theirs["signatures"][half]}))


def test_a_request_with_another_name_is_refused(homes):
    with pytest.raises(ConfigError, match="not as its keys signed it"):
        read_request(edited(homes["north"], name="west"))


def test_nobody_asks_with_a_key_they_do_not_have(homes):
    """A thief signs everything it can, with what it has."""
    (node, seed), (north, south) = private_of(homes["south"]), requests_of(homes)
    path = homes["south"] / "request.json"
    for stolen in (
        EnrolmentRequest("south", north.node, south.identity),
        EnrolmentRequest("south", south.node, north.identity),
    ):
        path.write_text(json.dumps(stolen.signed(node, seed)))
        with pytest.raises(ConfigError, match="not as its keys signed it"):
            read_request(path)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "null", "3", "{}", '"x"', '{"name": "a"}', "[" * 9000, "\xff", " " * 20000],
)
def test_what_is_no_request(tmp_path, content):
    path = tmp_path / "r.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=f"{path} is not a valid request"):
        read_request(path)


def test_a_request_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_request(tmp_path / "r.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_request(tmp_path)


def test_a_request_is_written_in_one_way_only(homes):
    """Else the same key, written twice, could be enrolled twice."""
    home = homes["north"]
    (node, seed), (north, _) = private_of(home), requests_of(homes)
    path = home / "request.json"
    good = json.loads(path.read_text())
    commented = EnrolmentRequest("north", f"{north.node} me@home", north.identity).signed(
        node, seed
    )
    weak = ec.generate_private_key(ec.SECP256R1())
    curve = EnrolmentRequest("north", request.openssh(weak.public_key()), north.identity)
    for content in (
        {**good, "identity": north.identity.hex().upper()},
        {**good, "more": 1},
        {**good, "signatures": {**good["signatures"], "more": "x" * 20000}},
        {**good, "name": 3},
        {**good, "node": 3},
        {**good, "node": "ssh-ed25519 AAAA"},
        {**good, "identity": "00"},
        {**good, "signatures": None},
        {**good, "signatures": {**good["signatures"], "node": "x"}},
        commented,
        curve.signed(weak, seed),
        EnrolmentRequest("../up", north.node, north.identity).signed(node, seed),
    ):
        path.write_text(json.dumps(content))
        with pytest.raises(ConfigError, match=f"{path} is not a valid request"):
            read_request(path)
    path.write_text(json.dumps(good))
    read_request(path)


def test_asking_again_tells_the_same_and_replaces_nothing(homes, tmp_path):
    home = homes["north"]
    before = files(home)
    (told, _) = requests_of(homes)
    assert make_request(home, "north") == told
    with pytest.raises(ConfigError, match="holds the keys of north already"):
        make_request(home, "west")
    with pytest.raises(ConfigError, match="cannot be a client's name"):
        make_request(tmp_path / "x", "../x")
    assert files(home) == before
    assert not (tmp_path / "x").exists()
    for file in ("node.key", "identity.key"):
        kept = (home / file).read_bytes()
        (home / file).unlink()
        with pytest.raises(ConfigError, match=f"{file} is lost"):
            make_request(home, "north")
        assert not (home / file).exists()
        (home / file).write_bytes((homes["south"] / file).read_bytes())
        (home / file).chmod(0o600)
        with pytest.raises(ConfigError, match="is the request for other keys than those"):
            make_request(home, "north")
        (home / file).write_bytes(kept)
    assert make_request(home, "north") == told
    (home / "request.json").write_text("damaged")
    assert make_request(home, "north") == told == read_request(home / "request.json")


def test_keys_that_were_handed_over_are_not_asked_with(fresh):
    before = files(fresh)
    with pytest.raises(ConfigError, match="keys of a federation's client already"):
        make_request(fresh / "clients/a", "a")
    assert files(fresh) == before


def test_asking_can_be_interrupted_anywhere(tmp_path, monkeypatch):
    count = 0
    for folder in interrupted_everywhere(
        monkeypatch, lambda folder: make_request(folder, "a"), lambda steps: tmp_path / str(steps)
    ):
        assert read_request(folder / "request.json") == make_request(folder, "a")
        count += 1
    assert count == 4


def test_enrolling_by_request_can_be_interrupted_anywhere(homes, tmp_path, monkeypatch):
    def folder_of(steps):
        make_federation(tmp_path / str(steps), ["h"], ["a"])
        return tmp_path / str(steps)

    north, _ = requests_of(homes)
    count = 0
    for folder in interrupted_everywhere(monkeypatch, lambda f: add_clients(f, [north]), folder_of):
        assert read_server(folder).clients[1].identity == north.identity
        assert set(files(folder / "clients/north")) == {"ca.pem", "federation.json"}
        count += 1
    assert count == 4


def test_no_name_and_no_key_is_enrolled_twice(homes, tmp_path):
    folder = tmp_path / "f"
    north, south = requests_of(homes)
    with pytest.raises(ConfigError, match="'north' is given twice"):
        make_federation(folder, ["h"], ["north", north])
    again = EnrolmentRequest("west", north.node, south.identity)
    with pytest.raises(ConfigError, match="request of west has the node key of north"):
        make_federation(folder, ["h"], [north, again])
    assert not folder.exists()
    make_federation(folder, ["h"], [north])
    before = files(folder)
    for late, match in (
        (north, "'north' is a client of this federation already"),
        (again, "request of west has the node key of north"),
        (EnrolmentRequest("west", south.node, north.identity), "has the identity key of north"),
    ):
        with pytest.raises(ConfigError, match=match):
            add_clients(folder, [late])
    assert files(folder) == before
    assert [m.id for m in add_clients(folder, [south])] == [1]


def test_keys_left_by_an_interrupted_command_are_no_requests_client(homes, tmp_path, monkeypatch):
    folder = tmp_path / "f"
    with monkeypatch.context() as patch:
        cut_after(patch, 8)
        with pytest.raises(Cut):
            make_federation(folder, ["h"], ["north"])
    before = files(folder)
    assert "clients/north/node.key" in before
    north, _ = requests_of(homes)
    with pytest.raises(ConfigError, match="made here by a command that was interrupted"):
        make_federation(folder, ["h"], [north])
    assert files(folder) == before


def test_a_client_notices_that_the_federation_knows_another_key(homes, tmp_path):
    folder, home = tmp_path / "f", homes["north"]
    with pytest.raises(ConfigError, match=r"ca.pem is missing: send .*/north/request.json to"):
        read_client(home)
    (home / "ca.pem").touch()
    with pytest.raises(ConfigError, match=r"federation.json is missing: send .*/north/request"):
        read_client(home)
    make_federation(folder, ["h"], requests_of(homes))
    answered(folder, home)
    read_client(home)
    path = home / "federation.json"
    told = json.loads(path.read_text())
    for half, file in (("node", "node.key"), ("identity", "identity.key")):
        roster = [dict(entry) for entry in told["roster"]]
        roster[0][half] = roster[1][half]
        path.write_text(json.dumps({**told, "roster": roster}))
        match = f"the federation has another key for north: {home / file} is not the one"
        with pytest.raises(ConfigError, match=match):
            read_client(home)
    for change in ({"id": 1}, {"id": 7}, {"name": "west"}):
        path.write_text(json.dumps({**told, **change}))
        with pytest.raises(ConfigError, match=r"is damaged: .* is not client . of its roster"):
            read_client(home)
    path.write_bytes((folder / "clients/south/federation.json").read_bytes())
    with pytest.raises(ConfigError, match="is that of south, and these are the keys of north"):
        read_client(home)
    answered(folder, home)
    (home / "request.json").unlink()  # it has served its purpose
    read_client(home)


def test_the_commands(homes, tmp_path, monkeypatch):
    def said(*arguments):
        done = CliRunner().invoke(command_line, list(map(str, arguments)))
        if done.exception is not None:
            raise done.exception
        return done.output

    monkeypatch.chdir(tmp_path)
    text = said("request", "west")
    west = read_request(tmp_path / "keys/request.json")
    assert west.fingerprint in text
    assert "send keys/request.json" in text
    north, south = requests_of(homes)
    given = [("--request", homes[n] / "request.json") for n in ("south", "north")]
    text = said("make", "--host", "h", *given[0], "--client", "east", *given[1])
    found = [(m.id, m.name) for m in read_server(tmp_path / "federation").clients]
    assert found == [(0, "east"), (1, "south"), (2, "north")]  # the names first, then requests
    assert "send federation/clients/east to east" in text
    assert f"client 1: the request of south has {south.fingerprint}" in text
    assert f"client 2: the request of north has {north.fingerprint}" in text
    assert "the keys of east were created here: the person who runs this command knows" in text
    text = said("add", "--request", "keys/request.json")
    assert f"client 3: the request of west has {west.fingerprint}" in text
    assert "created here" not in text
    assert "except for secure sums with the new clients" in text
    answered(tmp_path / "federation", (tmp_path / "keys").rename(tmp_path / "west"))
    text = said("check", "--dir", "west")
    assert f"client 1: {south.fingerprint}  south\n" in text
    assert f"client 3: {west.fingerprint}  west (this client)" in text
    for command in (["add"], ["make", "--host", "h", "--dir", "new"]):
        with pytest.raises(ConfigError, match="at least one client, or give its request"):
            said(*command)
