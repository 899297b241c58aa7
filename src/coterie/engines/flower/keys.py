"""The keys of a federation: its authority, the server's certificate, a folder for each client.

``make_federation`` writes three parts, each for somebody else::

    FOLDER/ca/              ca.key ca.pem federation.json         stays with whoever makes the keys
    FOLDER/server/          ca.pem server.pem server.key clients.json               for the server
    FOLDER/clients/NAME/    ca.pem node.key node.pub identity.key federation.json    for one client

Whoever holds a client's private keys is that client. If they are drawn here, hand each folder over
by a way that nobody else reads, and remove it here when it has arrived: with the identity keys of
the others, even secure aggregation hides nothing from their holder.

So a client better draws its own. ``make_request`` does that at the client, and only the request,
which is public, travels; ``FOLDER/clients/NAME/`` then has ca.pem and federation.json alone, to be
sent back and put beside the client's keys::

    keys/                   node.key node.pub identity.key request.json       made at the client
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from coterie.core.tree import sync, write_atomic
from coterie.engines.flower.request import FILE as REQUEST
from coterie.engines.flower.request import Request, check_name, openssh, read_request
from coterie.errors import ConfigError, RunDirError

try:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives import serialization as forms
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError:
    _THERE = False
else:
    _THERE = True

T = TypeVar("T")

DAYS = 3650
_SECRET = ("node.key", "identity.key")
_HOST = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_EARLIER = datetime.timedelta(days=1)  # clocks differ: a new certificate is valid since yesterday


@dataclass(frozen=True)
class Member:
    """A client as the roster has it: its public halves only."""

    name: str
    id: int
    node: str  # OpenSSH, as Flower registers it
    identity: bytes  # Ed25519, for secure aggregation

    @property
    def fingerprint(self) -> str:
        """That of the client's request, or what it would be: name and keys are the same."""
        return Request(self.name, self.node, self.identity).fingerprint


@dataclass(frozen=True)
class ServerKeys:
    """What the server's folder holds."""

    folder: Path
    federation: str
    clients: tuple[Member, ...]
    expires: datetime.datetime

    @property
    def ca(self) -> Path:
        """The authority's certificate."""
        return self.folder / "ca.pem"

    @property
    def certificate(self) -> Path:
        """The server's certificate."""
        return self.folder / "server.pem"

    @property
    def key(self) -> Path:
        """The server's private key."""
        return self.folder / "server.key"


@dataclass(frozen=True)
class ClientKeys:
    """What a client's folder holds; ``members`` are all clients that it knows of."""

    folder: Path
    federation: str
    name: str
    id: int
    server: str
    members: tuple[Member, ...]
    identity: bytes = field(repr=False)

    @property
    def roster(self) -> Mapping[int, bytes]:
        """Every client's public identity."""
        return {m.id: m.identity for m in self.members}

    @property
    def ca(self) -> Path:
        """The authority's certificate."""
        return self.folder / "ca.pem"

    @property
    def node_key(self) -> Path:
        """The private key that Flower knows this client by."""
        return self.folder / "node.key"


def make_request(folder: Path, name: str) -> Request:
    """Make a client's own keys, at the client, and the request to enrol their public halves.

    Run again, it completes what was interrupted or tells the same request; keys that are there are
    never replaced.
    """
    _require()
    check_name(name)
    path = folder / REQUEST
    earlier = _asked(folder)
    if earlier is not None and earlier.name != name:
        raise ConfigError(
            f"{folder} holds the keys of {earlier.name} already, and keys are never overwritten: "
            "choose another folder with --dir"
        )
    if earlier is None and (folder / "federation.json").exists():
        raise ConfigError(
            f"{folder} holds the keys of a federation's client already, and keys are never "
            "overwritten: choose another folder with --dir"
        )
    lost = [file for file in _SECRET if earlier is not None and not (folder / file).exists()]
    if lost:
        raise ConfigError(
            f"{path} is there, but {' and '.join(lost)} is lost: put it back, or make new keys in "
            "another folder and have them enrolled under another name"
        )
    _make_folder(folder)
    node, seed = _own_keys(folder)
    request = Request(name, openssh(node.public_key()), _public_identity(seed))
    if earlier is None:
        _write_json(path, request.signed(node, seed))
    elif earlier != request:
        raise ConfigError(
            f"{path} asks for other keys than those beside it: put the right ones back"
        )
    return request


def make_federation(
    folder: Path, hosts: Sequence[str], clients: Sequence[str | Request], days: int = DAYS
) -> list[Member]:
    """Make a new federation; the order of the clients gives their ids.

    A client is a name, and its keys are drawn here, or the request of one that drew its own.

    ``hosts`` are the names and addresses that clients reach the server by, the usual one first. If
    it was interrupted, running it again with the same names completes it. The authority's
    certificate lasts twice as long as the server's, which can so be renewed.
    """
    _require()
    _check_newcomers(clients, ())
    names = _checked_hosts(hosts)
    if not 1 <= days <= 36500:
        raise ConfigError(f"{days} days: a certificate can last 1 to 36500 days")
    if (folder / "server" / "clients.json").exists():
        raise ConfigError(
            f"there is a federation in {folder} already, and its keys are never overwritten. "
            "Add clients with `coterie keys add`, or choose another folder"
        )
    about = _about(folder, names[0], days)
    if about["server"] != names[0] or about["days"] != days:
        raise ConfigError(
            f"{folder} holds a federation that was not finished, with other hosts or days "
            f"({about['server']}, {about['days']}): run the same command again, or remove {folder}"
        )
    _ca(folder, about["federation"], days)
    _server_key(folder)
    _certify(folder, names, days)
    return _enrol(folder, about, (), clients)


def add_clients(folder: Path, clients: Sequence[str | Request]) -> list[Member]:
    """Enrol further clients, by name or by request; they get the next ids.

    Everybody's ``federation.json`` is renewed in this folder: those who have joined need the new
    one if they use secure aggregation, since it names the newcomers' identities.
    """
    _require()
    about, members = _finished(folder)
    _check_newcomers(clients, members)
    return _enrol(folder, about, members, clients)[len(members) :]


def renew_server(folder: Path, hosts: Sequence[str]) -> datetime.datetime:
    """Give the server a new certificate, for the same key and these hosts; returns its last day."""
    _require()
    about, members = _finished(folder)
    names = _checked_hosts(hosts)
    _server_key(folder)
    expires = _certify(folder, names, about["days"], anew=True)
    about["server"] = names[0]
    _write_json(folder / "ca" / "federation.json", about)
    _tell(folder, about, members)
    return expires


def read_server(folder: Path) -> ServerKeys:
    """The server's keys, or a sentence that says what is wrong with them."""
    _require()
    inside = folder / "server"
    folder = inside if inside.is_dir() else folder
    ca, certificate = _certificate(folder / "ca.pem"), _certificate(folder / "server.pem")
    key = _private(folder / "server.key", _pem)
    if key.public_key() != certificate.public_key():
        raise ConfigError(
            f"{folder / 'server.pem'} is not the certificate of {folder / 'server.key'}: "
            "take both from the same federation"
        )
    _check_issued(certificate, ca, folder)
    renew = "make a new one with `coterie keys renew`, and copy it here"
    _check_dates(certificate, folder / "server.pem", renew)
    _check_dates(ca, folder / "ca.pem", "make a new federation with `coterie keys make`")
    federation, members = _read_roster(folder / "clients.json")
    return ServerKeys(folder, federation, members, certificate.not_valid_after_utc)


def read_client(folder: Path) -> ClientKeys:
    """A client's keys, or a sentence that says what is wrong with them."""
    _require()
    asked = _asked(folder)
    if asked is not None:
        _check_answered(folder)
    ca = _certificate(folder / "ca.pem")
    _check_dates(ca, folder / "ca.pem", "ask for the folder of a new federation")
    node = _private(folder / "node.key", _ssh)
    if openssh(node.public_key()) != _text(folder / "node.pub").strip():
        raise ConfigError(f"{folder / 'node.pub'} is not the public half of {folder / 'node.key'}")
    identity = _private(folder / "identity.key", _seed)
    path = folder / "federation.json"
    told = _read_json(path)
    try:
        keys = ClientKeys(
            folder,
            str(told["federation"]),
            str(told["name"]),
            int(told["id"]),
            str(told["server"]),
            _members(told["roster"]),
            identity,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is damaged ({error!r}): ask for a new copy") from None
    known = next((m for m in keys.members if (m.id, m.name) == (keys.id, keys.name)), None)
    if known is None:
        raise ConfigError(
            f"{path} is damaged: {keys.name} is not client {keys.id} of its roster. Ask for a new "
            "copy"
        )
    if asked is not None and asked.name != keys.name:
        raise ConfigError(
            f"{path} is that of {keys.name}, and these are the keys of {asked.name}: ask for the "
            f"federation.json of {asked.name}"
        )
    for file, own, enrolled in (
        ("node.key", openssh(node.public_key()), known.node),
        ("identity.key", _public_identity(identity), known.identity),
    ):
        if own != enrolled:
            raise ConfigError(
                f"the federation knows another key for {keys.name}: {folder / file} is not the one "
                f"that {path} names for client {keys.id}. Put back the key that was enrolled, or "
                "take both from the same federation"
            )
    return keys


def _asked(folder: Path) -> Request | None:
    """The request that was made with these keys; if it is damaged it can be made again."""
    try:
        return read_request(folder / REQUEST)
    except ConfigError:
        return None


def _check_answered(folder: Path) -> None:
    """A request alone does not make a member: say what has to come back."""
    missing = [f for f in ("ca.pem", "federation.json") if not (folder / f).exists()]
    if missing:
        raise ConfigError(
            f"{folder / missing[0]} is missing: send {folder / REQUEST} to whoever makes the "
            "federation's keys, and put the ca.pem and federation.json that come back into "
            f"{folder}"
        )


def _require() -> None:
    if not _THERE:
        raise ConfigError("keys need the extra: pip install 'coterie[flower]'")


# Making


def _check_newcomers(newcomers: Sequence[str | Request], members: Sequence[Member]) -> None:
    """Refuse names and keys that cannot be, or that somebody has already."""
    if not newcomers:
        raise ConfigError("name at least one client, or give its request")
    names: set[str] = set()
    owners = {key: m.name for m in members for key in (m.node, m.identity)}
    for newcomer in newcomers:
        name = _name(newcomer)
        check_name(name)
        if name in names:
            raise ConfigError(f"the name {name!r} is given twice")
        if any(m.name == name for m in members):
            raise ConfigError(
                f"{name!r} is a client of this federation already, and its keys are never "
                "overwritten: choose another name"
            )
        names.add(name)
        if isinstance(newcomer, Request):
            for key, kind in ((newcomer.node, "node"), (newcomer.identity, "identity")):
                if key in owners:
                    raise ConfigError(
                        f"the request of {name} has the {kind} key of {owners[key]}: each client "
                        "makes keys of its own with `coterie keys request`"
                    )
                owners[key] = name


def _name(newcomer: str | Request) -> str:
    return newcomer if isinstance(newcomer, str) else newcomer.name


def _checked_hosts(hosts: Sequence[str]) -> list[str]:
    """Host names and addresses as clients use them, loopback added, each once."""
    if not hosts:
        raise ConfigError("name the host that clients reach the server by, as in fl.example.org")
    found = []
    for host in hosts:
        bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        try:
            address = ipaddress.ip_address(bare)
        except ValueError:
            last = bare.rpartition(".")[2]
            if not _HOST.fullmatch(bare) or len(bare) > 253 or last.isdigit():
                raise ConfigError(
                    f"{host!r} is no host: give a name or an address that clients use, without "
                    "a port, as in fl.example.org or 192.0.2.7"
                ) from None
            found.append(bare.lower())
            continue
        if address.is_unspecified:
            raise ConfigError(
                f"{host} means every address of a machine: name the one that clients use"
            )
        found.append(str(address))
    return list(dict.fromkeys([*found, *_LOOPBACK]))


def _about(folder: Path, server: str, days: int) -> dict[str, Any]:
    """The federation's own description: the first thing written, kept if it is there."""
    path = folder / "ca" / "federation.json"
    if not path.exists():
        _make_folder(folder / "ca")
        about = {"federation": secrets.token_hex(16), "server": server, "days": days}
        _write_json(path, about)
    return _read_json(path)


def _ca(folder: Path, federation: str, days: int) -> None:
    path = folder / "ca" / "ca.pem"
    key = _kept_key(folder / "ca" / "ca.key", _new_pem, _pem)
    if not path.exists():
        usage = _usage(key_cert_sign=True, crl_sign=True)
        name = _called(f"Coterie federation {federation[:8]}")
        made = (
            _built(name, name, key.public_key(), 2 * days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
        )
        _write(path, made.sign(key, hashes.SHA384()).public_bytes(forms.Encoding.PEM))


def _server_key(folder: Path) -> ec.EllipticCurvePrivateKey:
    _make_folder(folder / "server")
    if not (folder / "server" / "ca.pem").exists():
        _write(folder / "server" / "ca.pem", (folder / "ca" / "ca.pem").read_bytes())
    return _kept_key(folder / "server" / "server.key", _new_pem, _pem)


def _certify(
    folder: Path, hosts: Sequence[str], days: int, anew: bool = False
) -> datetime.datetime:
    """Write the server's certificate, unless there is one; returns when it ends."""
    path = folder / "server" / "server.pem"
    if path.exists() and not anew:
        return _certificate(path).not_valid_after_utc
    authority = _certificate(folder / "ca" / "ca.pem")
    _check_dates(
        authority, folder / "ca" / "ca.pem", "make a new federation with `coterie keys make`"
    )
    signing = _private(folder / "ca" / "ca.key", _pem)
    key = _server_key(folder)
    ending = min(_now() + datetime.timedelta(days=days), authority.not_valid_after_utc)
    issuer = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    made = (
        _built(_called(hosts[0][:64]), authority.subject, key.public_key(), ending)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_alternative(h) for h in hosts]), False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer), critical=False
        )
    )
    _write(path, made.sign(signing, hashes.SHA384()).public_bytes(forms.Encoding.PEM))
    return _certificate(path).not_valid_after_utc


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _built(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    ending: datetime.datetime | int,
) -> x509.CertificateBuilder:
    now = _now()
    last = now + datetime.timedelta(days=ending) if isinstance(ending, int) else ending
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(last)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _called(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _usage(**uses: bool) -> x509.KeyUsage:
    every = (
        "digital_signature content_commitment key_encipherment data_encipherment key_agreement "
        "key_cert_sign crl_sign encipher_only decipher_only"
    )
    return x509.KeyUsage(**{name: uses.get(name, False) for name in every.split()})


def _enrol(
    folder: Path,
    about: Mapping[str, Any],
    members: Sequence[Member],
    newcomers: Sequence[str | Request],
) -> list[Member]:
    """Make the keys of those who are only named, tell everybody, and last write the roster."""
    places = {_name(n): folder / "clients" / _name(n) for n in newcomers}
    known = {m.name for m in members} | places.keys()
    strays = sorted(p.name for p in (folder / "clients").glob("*") if p.name not in known)
    if strays:
        raise ConfigError(
            f"{folder / 'clients'} holds keys of {', '.join(strays)}, left by a command that was "
            "interrupted: name them again to complete them, or remove these folders"
        )
    for newcomer in newcomers:
        home = places[_name(newcomer)]
        if isinstance(newcomer, Request) and any((home / file).exists() for file in _SECRET):
            raise ConfigError(
                f"{home} holds keys that were drawn here by a command that was interrupted, and "
                f"{newcomer.name} has made its own: remove that folder"
            )
    everyone = list(members)
    for newcomer in newcomers:
        home = places[_name(newcomer)]
        _make_folder(home)
        if isinstance(newcomer, Request):
            public, identity = newcomer.node, newcomer.identity
        else:
            node, seed = _own_keys(home)
            public, identity = openssh(node.public_key()), _public_identity(seed)
        _write(home / "ca.pem", (folder / "ca" / "ca.pem").read_bytes())
        everyone.append(Member(_name(newcomer), len(everyone), public, identity))
    _tell(folder, about, everyone)
    path = folder / "server" / "clients.json"
    _write_json(path, {"federation": about["federation"], "clients": _listed(everyone)})
    return everyone


def _own_keys(home: Path) -> tuple[ec.EllipticCurvePrivateKey, bytes]:
    """A client's private keys, made if they are not there: the node's and the identity's seed."""
    node = _kept_key(home / "node.key", _new_ssh, _ssh)
    seed = _kept_key(home / "identity.key", lambda: secrets.token_bytes(32), _seed)
    _write(home / "node.pub", f"{openssh(node.public_key())}\n".encode())
    return node, seed


def _listed(members: Sequence[Member]) -> list[dict[str, Any]]:
    return [
        {"name": m.name, "id": m.id, "node": m.node, "identity": m.identity.hex()} for m in members
    ]


def _tell(folder: Path, about: Mapping[str, Any], members: Sequence[Member]) -> None:
    """Write what each client is told; folders that were handed over and removed are passed by."""
    for member in members:
        home = folder / "clients" / member.name
        if home.is_dir():
            told = {
                "federation": about["federation"],
                "name": member.name,
                "id": member.id,
                "server": about["server"],
                "roster": _listed(members),
            }
            _write_json(home / "federation.json", told)


def _finished(folder: Path) -> tuple[dict[str, Any], tuple[Member, ...]]:
    if not (folder / "server" / "clients.json").exists():
        raise ConfigError(
            f"there is no complete federation in {folder}: make one with `coterie keys make`"
        )
    return _read_json(folder / "ca" / "federation.json"), _read_roster(
        folder / "server" / "clients.json"
    )[1]


def _kept_key(path: Path, make: Callable[[], bytes], parse: Callable[[bytes], T]) -> T:
    """The private key in this file, made if there is none; an existing one is never replaced."""
    if not path.exists():
        write_secret(path, make())
    return _private(path, parse)


def write_secret(path: Path, data: bytes) -> None:
    """A new file that was never readable by others and is whole or not there."""
    for left in path.parent.glob(f".{path.name}.*.tmp"):  # of an interrupted run: nobody's key
        left.unlink()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        sync(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise RunDirError(f"cannot write {path}: {error.strerror}") from error


def _make_folder(folder: Path) -> None:
    try:
        for missing in reversed([f for f in (folder, *folder.parents) if not f.exists()]):
            missing.mkdir(mode=0o700, exist_ok=True)  # with parents=True, theirs would be wider
    except OSError as error:
        raise RunDirError(f"cannot make the folder {folder}: {error.strerror}") from error


def _write(path: Path, data: bytes) -> None:
    write_atomic(path, data, durable=True)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    _write(path, (json.dumps(content, indent=1) + "\n").encode())


def _new_pem() -> bytes:
    return _new(forms.PrivateFormat.PKCS8)


def _new_ssh() -> bytes:
    return _new(forms.PrivateFormat.OpenSSH)


def _new(form: forms.PrivateFormat) -> bytes:
    key = ec.generate_private_key(ec.SECP384R1())
    return key.private_bytes(forms.Encoding.PEM, form, forms.NoEncryption())


# Reading


def _pem(data: bytes) -> ec.EllipticCurvePrivateKey:
    return _elliptic(forms.load_pem_private_key(data, None))


def _ssh(data: bytes) -> ec.EllipticCurvePrivateKey:
    return _elliptic(forms.load_ssh_private_key(data, None))


def _elliptic(key: object) -> ec.EllipticCurvePrivateKey:
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("not an elliptic-curve key")
    return key


def _seed(data: bytes) -> bytes:
    if len(data) != 32:
        raise ValueError(f"{len(data)} bytes, not 32")
    return data


def _public_identity(seed: bytes) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(
            f"{path} is missing: make the keys with `coterie keys make`, or give the folder that "
            "was handed over"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def _text(path: Path) -> str:
    return _bytes(path).decode(errors="replace")


def _private(path: Path, parse: Callable[[bytes], T]) -> T:
    """A private key, read only if nobody else can read it."""
    data = _bytes(path)
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise ConfigError(f"others can read {path}: chmod 600 {path}")
    try:
        return parse(data)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} holds no key of the kind it should ({error})") from None


def _certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(_bytes(path))
    except ValueError as error:
        raise ConfigError(f"{path} is not a certificate ({error})") from None


def _check_issued(certificate: x509.Certificate, ca: x509.Certificate, folder: Path) -> None:
    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        raise ConfigError(
            f"{folder / 'server.pem'} was not issued by {folder / 'ca.pem'}: take both from the "
            "same federation"
        ) from None


def _check_dates(certificate: x509.Certificate, path: Path, remedy: str) -> None:
    now = _now()
    if now > certificate.not_valid_after_utc:
        last = certificate.not_valid_after_utc.date()
        raise ConfigError(f"the certificate {path} ended on {last}: {remedy}")
    if now < certificate.not_valid_before_utc:
        first = certificate.not_valid_before_utc.date()
        raise ConfigError(
            f"the certificate {path} begins on {first}: is this machine's clock right?"
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_bytes(path))
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error})") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is damaged: it holds no object")
    return content


def _read_roster(path: Path) -> tuple[str, tuple[Member, ...]]:
    content = _read_json(path)
    try:
        return str(content["federation"]), _members(content["clients"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is damaged ({error!r}): take a new copy") from None


def _members(listed: Any) -> tuple[Member, ...]:
    members = tuple(
        Member(str(c["name"]), int(c["id"]), str(c["node"]), bytes.fromhex(c["identity"]))
        for c in listed
    )
    if [m.id for m in members] != list(range(len(members))):
        raise ValueError("its ids are not 0, 1, 2, …")
    return members


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
