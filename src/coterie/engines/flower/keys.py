"""The keys of a federation: its authority, the server's certificate, and a folder for each client.

``make_federation`` writes three folders, each for a different person::

    FOLDER/ca/              ca.key ca.pem federation.json      stays with the person making the keys
    FOLDER/server/          ca.pem server.pem server.key clients.json               for the server
    FOLDER/clients/NAME/    ca.pem node.key node.pub identity.key federation.json    for one client

A client's private keys are its identity. If they are made here, send each folder over a secure
channel, and remove it here once it has arrived: secure aggregation hides nothing from someone who
holds the identity keys of the clients.

It is better if clients make their own keys. ``make_request`` does that at the client, and only the
request, which is public, has to be sent. ``FOLDER/clients/NAME/`` then holds just ca.pem and
federation.json, to be sent back and put next to the client's keys::

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
from coterie.engines.flower.request import EnrolmentRequest, check_name, openssh, read_request
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
    _AVAILABLE = False
else:
    _AVAILABLE = True

T = TypeVar("T")

DAYS = 3650
_SECRET = ("node.key", "identity.key")
_HOST = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_EARLIER = datetime.timedelta(days=1)  # certificates begin a day early, since clocks differ


@dataclass(frozen=True)
class EnrolledClient:
    """A client's entry in the roster: its name, its id and the public halves of its keys."""

    name: str
    id: int
    node: str  # OpenSSH, as Flower registers it
    identity: bytes  # Ed25519, for secure aggregation

    @property
    def fingerprint(self) -> str:
        """The fingerprint of a request with the same name and keys, as the client's own was."""
        return EnrolmentRequest(self.name, self.node, self.identity).fingerprint


@dataclass(frozen=True)
class ServerKeys:
    """The content of the server's folder."""

    folder: Path
    federation: str
    clients: tuple[EnrolledClient, ...]
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
    """The content of a client's folder; ``members`` are all clients in its roster."""

    folder: Path
    federation: str
    name: str
    id: int
    server: str
    members: tuple[EnrolledClient, ...]
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
        """The private key with which this client authenticates itself to Flower."""
        return self.folder / "node.key"


def make_request(folder: Path, name: str) -> EnrolmentRequest:
    """Make a client's own keys, at the client, and the request to enrol their public halves.

    If it is called again, it completes an interrupted call or returns the same request. Existing
    keys are never replaced.
    """
    _require()
    check_name(name)
    path = folder / REQUEST
    earlier = _existing_request(folder)
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
            f"{path} exists, but {' and '.join(lost)} is lost: put it back, or make new keys in "
            "another folder and have them enrolled under another name"
        )
    _make_folder(folder)
    node, seed = _client_keys(folder)
    request = EnrolmentRequest(name, openssh(node.public_key()), _public_identity(seed))
    if earlier is None:
        _write_json(path, request.signed(node, seed))
    elif earlier != request:
        raise ConfigError(
            f"{path} is the request for other keys than those next to it: put the right keys back"
        )
    return request


def make_federation(
    folder: Path, hosts: Sequence[str], clients: Sequence[str | EnrolmentRequest], days: int = DAYS
) -> list[EnrolledClient]:
    """Make the keys of a new federation; the order of the clients determines their ids.

    A client is either a name, in which case its keys are made here, or its request, if it has made
    its own keys.

    ``hosts`` are the names and addresses at which clients reach the server, the usual one first. If
    a call was interrupted, calling it again with the same names completes it. The authority's
    certificate is valid twice as long as the server's, so that the latter can be renewed.
    """
    _require()
    _check_newcomers(clients, ())
    names = _checked_hosts(hosts)
    if not 1 <= days <= 36500:
        raise ConfigError(f"{days} days: a certificate can be valid for 1 to 36500 days")
    if (folder / "server" / "clients.json").exists():
        raise ConfigError(
            f"there is a federation in {folder} already, and its keys are never overwritten. "
            "Add clients with `coterie keys add`, or choose another folder"
        )
    about = _description(folder, names[0], days)
    if about["server"] != names[0] or about["days"] != days:
        raise ConfigError(
            f"{folder} holds a federation that was not finished, with other hosts or days "
            f"({about['server']}, {about['days']}): run the same command again, or remove {folder}"
        )
    _write_authority(folder, about["federation"], days)
    _server_key(folder)
    _certify(folder, names, days)
    return _enrol(folder, about, (), clients)


def add_clients(folder: Path, clients: Sequence[str | EnrolmentRequest]) -> list[EnrolledClient]:
    """Enrol further clients, by name or by request; they get the next ids.

    The ``federation.json`` of every client is updated in this folder. Clients that have joined
    already need the new one if they use secure aggregation, since it holds the newcomers' public
    identity keys.
    """
    _require()
    about, members = _complete_federation(folder)
    _check_newcomers(clients, members)
    return _enrol(folder, about, members, clients)[len(members) :]


def renew_server(folder: Path, hosts: Sequence[str]) -> datetime.datetime:
    """Give the server a new certificate, for the same key and these hosts; return its end."""
    _require()
    about, members = _complete_federation(folder)
    names = _checked_hosts(hosts)
    _server_key(folder)
    expires = _certify(folder, names, about["days"], replace=True)
    about["server"] = names[0]
    _write_json(folder / "ca" / "federation.json", about)
    _write_client_files(folder, about, members)
    return expires


def read_server(folder: Path) -> ServerKeys:
    """Read and check the server's keys; ConfigError says what is wrong with them."""
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
    """Read and check a client's keys; ConfigError says what is wrong with them."""
    _require()
    request = _existing_request(folder)
    if request is not None:
        _check_enrolled(folder)
    ca = _certificate(folder / "ca.pem")
    _check_dates(ca, folder / "ca.pem", "ask for the folder of a new federation")
    node = _private(folder / "node.key", _ssh)
    if openssh(node.public_key()) != _text(folder / "node.pub").strip():
        raise ConfigError(f"{folder / 'node.pub'} is not the public half of {folder / 'node.key'}")
    identity = _private(folder / "identity.key", _seed)
    path = folder / "federation.json"
    content = _read_json(path)
    try:
        keys = ClientKeys(
            folder,
            str(content["federation"]),
            str(content["name"]),
            int(content["id"]),
            str(content["server"]),
            _members(content["roster"]),
            identity,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is damaged ({error!r}): ask for a new copy") from None
    member = next((m for m in keys.members if (m.id, m.name) == (keys.id, keys.name)), None)
    if member is None:
        raise ConfigError(
            f"{path} is damaged: {keys.name} is not client {keys.id} of its roster. Ask for a new "
            "copy"
        )
    if request is not None and request.name != keys.name:
        raise ConfigError(
            f"{path} is that of {keys.name}, and these are the keys of {request.name}: ask for the "
            f"federation.json of {request.name}"
        )
    for file, public, enrolled in (
        ("node.key", openssh(node.public_key()), member.node),
        ("identity.key", _public_identity(identity), member.identity),
    ):
        if public != enrolled:
            raise ConfigError(
                f"the federation has another key for {keys.name}: {folder / file} is not the one "
                f"that {path} lists for client {keys.id}. Put back the key that was enrolled, or "
                "take both files from the same federation"
            )
    return keys


def _existing_request(folder: Path) -> EnrolmentRequest | None:
    """The request next to the keys; None also if it is damaged, since it can be made again."""
    try:
        return read_request(folder / REQUEST)
    except ConfigError:
        return None


def _check_enrolled(folder: Path) -> None:
    """Refuse a folder that has a request but not the files that come back once it is enrolled."""
    missing = [f for f in ("ca.pem", "federation.json") if not (folder / f).exists()]
    if missing:
        raise ConfigError(
            f"{folder / missing[0]} is missing: send {folder / REQUEST} to the person who makes "
            "the federation's keys, and put the ca.pem and federation.json that you get back into "
            f"{folder}"
        )


def _require() -> None:
    if not _AVAILABLE:
        raise ConfigError("keys need the extra: pip install 'coterie[flower]'")


# Making


def _check_newcomers(
    newcomers: Sequence[str | EnrolmentRequest], members: Sequence[EnrolledClient]
) -> None:
    """Refuse invalid names, and names and keys that another client has already."""
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
        if isinstance(newcomer, EnrolmentRequest):
            for key, kind in ((newcomer.node, "node"), (newcomer.identity, "identity")):
                if key in owners:
                    raise ConfigError(
                        f"the request of {name} has the {kind} key of {owners[key]}: each client "
                        "must make its own keys with `coterie keys request`"
                    )
                owners[key] = name


def _name(newcomer: str | EnrolmentRequest) -> str:
    return newcomer if isinstance(newcomer, str) else newcomer.name


def _checked_hosts(hosts: Sequence[str]) -> list[str]:
    """The names and addresses to put into the certificate, with loopback, each once."""
    if not hosts:
        raise ConfigError("name the host at which clients reach the server, as in fl.example.org")
    names = []
    for host in hosts:
        bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        try:
            address = ipaddress.ip_address(bare)
        except ValueError:
            last = bare.rpartition(".")[2]
            if not _HOST.fullmatch(bare) or len(bare) > 253 or last.isdigit():
                raise ConfigError(
                    f"{host!r} is not a valid host: give a name or an address that clients use, "
                    "without a port, as in fl.example.org or 192.0.2.7"
                ) from None
            names.append(bare.lower())
            continue
        if address.is_unspecified:
            raise ConfigError(
                f"{host} means every address of a machine: name the one that clients use"
            )
        names.append(str(address))
    return list(dict.fromkeys([*names, *_LOOPBACK]))


def _description(folder: Path, server: str, days: int) -> dict[str, Any]:
    """The federation's description; it is the first file written, and is kept if it exists."""
    path = folder / "ca" / "federation.json"
    if not path.exists():
        _make_folder(folder / "ca")
        about = {"federation": secrets.token_hex(16), "server": server, "days": days}
        _write_json(path, about)
    return _read_json(path)


def _write_authority(folder: Path, federation: str, days: int) -> None:
    path = folder / "ca" / "ca.pem"
    key = _read_or_make_key(folder / "ca" / "ca.key", _new_pem, _pem)
    if not path.exists():
        usage = _usage(key_cert_sign=True, crl_sign=True)
        name = _common_name(f"Coterie federation {federation[:8]}")
        builder = (
            _certificate_builder(name, name, key.public_key(), 2 * days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
        )
        _write(path, builder.sign(key, hashes.SHA384()).public_bytes(forms.Encoding.PEM))


def _server_key(folder: Path) -> ec.EllipticCurvePrivateKey:
    _make_folder(folder / "server")
    if not (folder / "server" / "ca.pem").exists():
        _write(folder / "server" / "ca.pem", (folder / "ca" / "ca.pem").read_bytes())
    return _read_or_make_key(folder / "server" / "server.key", _new_pem, _pem)


def _certify(
    folder: Path, hosts: Sequence[str], days: int, replace: bool = False
) -> datetime.datetime:
    """Write the server's certificate, unless one exists that is to be kept; return its end."""
    path = folder / "server" / "server.pem"
    if path.exists() and not replace:
        return _certificate(path).not_valid_after_utc
    authority = _certificate(folder / "ca" / "ca.pem")
    _check_dates(
        authority, folder / "ca" / "ca.pem", "make a new federation with `coterie keys make`"
    )
    signing = _private(folder / "ca" / "ca.key", _pem)
    key = _server_key(folder)
    ending = min(_now() + datetime.timedelta(days=days), authority.not_valid_after_utc)
    issuer = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    subject = _common_name(hosts[0][:64])
    builder = (
        _certificate_builder(subject, authority.subject, key.public_key(), ending)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_alternative(h) for h in hosts]), False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer), critical=False
        )
    )
    _write(path, builder.sign(signing, hashes.SHA384()).public_bytes(forms.Encoding.PEM))
    return _certificate(path).not_valid_after_utc


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _certificate_builder(
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


def _common_name(name: str) -> x509.Name:
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
    members: Sequence[EnrolledClient],
    newcomers: Sequence[str | EnrolmentRequest],
) -> list[EnrolledClient]:
    """Make the keys of clients given by name, write every client's files, and last the roster."""
    folders = {_name(n): folder / "clients" / _name(n) for n in newcomers}
    names = {m.name for m in members} | folders.keys()
    strays = sorted(p.name for p in (folder / "clients").glob("*") if p.name not in names)
    if strays:
        raise ConfigError(
            f"{folder / 'clients'} holds keys of {', '.join(strays)}, left by a command that was "
            "interrupted: name these clients again to complete them, or remove their folders"
        )
    for newcomer in newcomers:
        client = folders[_name(newcomer)]
        if isinstance(newcomer, EnrolmentRequest) and any(
            (client / file).exists() for file in _SECRET
        ):
            raise ConfigError(
                f"{client} holds keys that were made here by a command that was interrupted, and "
                f"{newcomer.name} has made its own: remove that folder"
            )
    enrolled = list(members)
    for newcomer in newcomers:
        client = folders[_name(newcomer)]
        _make_folder(client)
        if isinstance(newcomer, EnrolmentRequest):
            public, identity = newcomer.node, newcomer.identity
        else:
            node, seed = _client_keys(client)
            public, identity = openssh(node.public_key()), _public_identity(seed)
        _write(client / "ca.pem", (folder / "ca" / "ca.pem").read_bytes())
        enrolled.append(EnrolledClient(_name(newcomer), len(enrolled), public, identity))
    _write_client_files(folder, about, enrolled)
    path = folder / "server" / "clients.json"
    _write_json(path, {"federation": about["federation"], "clients": _roster_to_json(enrolled)})
    return enrolled


def _client_keys(folder: Path) -> tuple[ec.EllipticCurvePrivateKey, bytes]:
    """A client's private keys, made if missing: the node key and the seed of the identity key."""
    node = _read_or_make_key(folder / "node.key", _new_ssh, _ssh)
    seed = _read_or_make_key(folder / "identity.key", lambda: secrets.token_bytes(32), _seed)
    _write(folder / "node.pub", f"{openssh(node.public_key())}\n".encode())
    return node, seed


def _roster_to_json(members: Sequence[EnrolledClient]) -> list[dict[str, Any]]:
    return [
        {"name": m.name, "id": m.id, "node": m.node, "identity": m.identity.hex()} for m in members
    ]


def _write_client_files(
    folder: Path, about: Mapping[str, Any], members: Sequence[EnrolledClient]
) -> None:
    """Write the ``federation.json`` of each client whose folder is still here."""
    for member in members:
        client = folder / "clients" / member.name
        if client.is_dir():
            content = {
                "federation": about["federation"],
                "name": member.name,
                "id": member.id,
                "server": about["server"],
                "roster": _roster_to_json(members),
            }
            _write_json(client / "federation.json", content)


def _complete_federation(folder: Path) -> tuple[dict[str, Any], tuple[EnrolledClient, ...]]:
    if not (folder / "server" / "clients.json").exists():
        raise ConfigError(
            f"there is no complete federation in {folder}: make one with `coterie keys make`"
        )
    return _read_json(folder / "ca" / "federation.json"), _read_roster(
        folder / "server" / "clients.json"
    )[1]


def _read_or_make_key(path: Path, make: Callable[[], bytes], parse: Callable[[bytes], T]) -> T:
    """Read the private key in this file, or make one; an existing key is never replaced."""
    if not path.exists():
        write_secret(path, make())
    return _private(path, parse)


def write_secret(path: Path, data: bytes) -> None:
    """Write a new file atomically; other users cannot read it at any time."""
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):  # from an interrupted run, never used
        leftover.unlink()
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
            missing.mkdir(mode=0o700, exist_ok=True)  # parents=True would not apply the mode to all
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
            "you were sent"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def _text(path: Path) -> str:
    return _bytes(path).decode(errors="replace")


def _private(path: Path, parse: Callable[[bytes], T]) -> T:
    """Read a private key; refuse one that other users can read."""
    data = _bytes(path)
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise ConfigError(f"other users can read {path}: run `chmod 600 {path}`")
    try:
        return parse(data)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} does not hold a key of the expected kind ({error})") from None


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
            f"{folder / 'server.pem'} was not issued by {folder / 'ca.pem'}: take both files from "
            "the same federation"
        ) from None


def _check_dates(certificate: x509.Certificate, path: Path, remedy: str) -> None:
    now = _now()
    if now > certificate.not_valid_after_utc:
        last = certificate.not_valid_after_utc.date()
        raise ConfigError(f"the certificate {path} expired on {last}: {remedy}")
    if now < certificate.not_valid_before_utc:
        first = certificate.not_valid_before_utc.date()
        raise ConfigError(
            f"the certificate {path} is not valid before {first}: check this machine's clock"
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_bytes(path))
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error})") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is damaged: it does not hold a JSON object")
    return content


def _read_roster(path: Path) -> tuple[str, tuple[EnrolledClient, ...]]:
    content = _read_json(path)
    try:
        return str(content["federation"]), _members(content["clients"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is damaged ({error!r}): take a new copy") from None


def _members(listed: Any) -> tuple[EnrolledClient, ...]:
    members = tuple(
        EnrolledClient(str(c["name"]), int(c["id"]), str(c["node"]), bytes.fromhex(c["identity"]))
        for c in listed
    )
    if [m.id for m in members] != list(range(len(members))):
        raise ValueError("its ids are not 0, 1, 2, …")
    return members


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
