"""Serve a federation: wait for clients, agree on the experiment, run it, send out models."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie import __version__
from coterie.channel.checks import printable
from coterie.channel.privacy.identity import KEYS
from coterie.channel.wire import Message
from coterie.client.plan import Plan
from coterie.core.messages import ClientId
from coterie.core.schema import Config
from coterie.core.tree import write_atomic
from coterie.data.metadata import names_file
from coterie.data.population import Population
from coterie.deploy.member import DESCRIBE, ENROL, REFUSED, STRANGER
from coterie.deploy.terms import (
    Described,
    agreement_digest,
    digest_of_start,
    in_common,
    seen_from_server,
    travelling,
    unlike,
)
from coterie.engines.flower.engine import Flower, Tell
from coterie.engines.flower.hub import Hub
from coterie.engines.flower.keys import ServerKeys, read_server
from coterie.engines.flower.messages import Packet
from coterie.errors import ConfigError, CoterieError, DataError, Interrupted
from coterie.experiment.config import (
    check_model,
    experiment_of,
    groups_inlined,
    method_of,
    parse,
    population_of,
)
from coterie.experiment.experiment import Experiment, Watch, execute
from coterie.experiment.privacy import left_public
from coterie.experiment.user_code import digests_of
from coterie.methods.known_groups import COLUMN, with_groups
from coterie.results.checksums import read_json, to_json
from coterie.results.evaluation import main_score
from coterie.results.result import Result
from coterie.results.rundir import ENGINE, RunDir

if TYPE_CHECKING:
    from coterie.tracking import Tracking

_POLL = 1.0  # seconds between two checks for clients
_RETRY = 30.0  # seconds before a client that could not take part is asked again
_RETURN = 90.0  # seconds for clients to return: after losing its SuperLink, one is refused for 60
_SHORT = 20.0  # seconds for clients that join during the run; slower ones are asked again
_LONG = 300.0  # seconds for clients to read their data and answer


Show = Callable[[str], AbstractContextManager[Watch]]


@dataclass(frozen=True)
class Serving:
    """The options of ``coterie serve``."""

    config: Mapping[str, Any]
    directory: Path
    keys: Path | None  # None: without keys, on loopback only
    host: str = "0.0.0.0"
    port: int = 8443
    expect: int | None = None  # clients to wait for; None: all that have keys
    superlink: str = ""
    secret: Path | None = None
    discard_damaged: bool = False  # whether to drop history that is damaged


class _Sizes(Mapping[ClientId, int]):
    """The number of training samples of each client, from its latest description."""

    def __init__(self, described: Mapping[ClientId, Described]) -> None:
        self._described = described

    def __getitem__(self, client: ClientId) -> int:
        return self._described[client].sizes[0]

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self._described)

    def __len__(self) -> int:
        return len(self._described)


class Served(Flower):
    """The engine of a real federation, which also admits clients before and during the run."""

    def __init__(
        self,
        hub: Hub,
        nodes: Mapping[ClientId, int],
        run: str,
        config: Mapping[str, Any],
        keys: Path | None,
        tell: Tell,
    ) -> None:
        super().__init__(hub, nodes, run, tell)
        self.hub, self.config, self._keys = hub, config, keys
        self.described: dict[ClientId, Described] = {}
        self.like: Described | None = None
        self.terms: dict[str, Any] = {}
        self.start: bytes = b""
        self.begun: dict[ClientId, Described] = {}  # the clients that the run began with
        self.count = 0
        self.directory: Path | None = None  # the run directory, in which a stop can be requested
        self._folder, self._settings = Path(), dict[str, Any]()
        self._enrolled: set[ClientId] = set()
        self._refused: dict[ClientId, float] = {}  # refused clients, and until when
        self._tries: dict[ClientId, int] = {}
        self._told: set[str] = set()
        self._keys_read = 0.0

    def remember(self, folder: Path, config: Config) -> None:
        """Write the clients to a file, for a server that is started again."""
        self._folder, self._settings = folder, config.model_dump()
        self._write()

    def _write(self) -> None:
        assert self.like is not None
        later = {c: d for c, d in self.described.items() if c not in self.begun}
        content = {
            "run": self.run,
            "config": self._settings,
            "clients": {c: d.to_json() for c, d in self.begun.items()},
            "later": {c: d.to_json() for c, d in later.items()},
            "like": self.like.to_json(),
            "count": self.count,
        }
        write_atomic(self._folder / "served.json", to_json(content).encode(), durable=True)

    def recall(self, content: Mapping[str, Any]) -> None:
        """Restore the clients from the content of the file that ``remember`` wrote."""
        self.like, self.count = Described.from_json(content["like"]), content["count"]
        self.begun = {int(c): Described.from_json(d) for c, d in content["clients"].items()}
        later = {int(c): Described.from_json(d) for c, d in content["later"].items()}
        self.described = {**self.begun, **later}

    @property
    def agreement(self) -> str:
        """A digest of the terms that all clients were told; members of a secure sum sign it."""
        return agreement_digest(self.run, self.terms)

    @property
    def population(self) -> Population:
        """The clients as the server knows them now."""
        assert self.like is not None
        count = max([*self.nodes, *self.described]) + 1
        return seen_from_server(self.like, self.described, count)

    def look(self) -> set[ClientId]:
        """The connected clients; without keys, new nodes are first asked for their client ids."""
        if self._keys is None:
            self._identify()
        elif time.monotonic() > self._keys_read + 5:
            # Clients whose keys were made during the run are admitted without a restart.
            self._keys_read = time.monotonic()
            try:
                keys = read_server(self._keys)
            except CoterieError as error:  # not a reason to end the run
                self._tell_once(f"new keys cannot be read: {error}")
            else:
                if len(keys.clients) > len(self.nodes):
                    self.nodes = dict(self._persistently(lambda grid: self.hub.admit(keys)))
        return self.present()

    def _identify(self) -> None:
        identified = set(self.nodes.values())
        for node in self._persistently(lambda grid: list(grid.get_node_ids())):
            if node in identified or -1 - node in self.refused:
                continue
            temporary = -1 - node  # an id until the node has said which client it is
            self.nodes[temporary] = node
            described = self.describe([temporary], _LONG if self.like is None else _SHORT)
            del self.nodes[temporary]
            for client, description in described.items():
                self.nodes[client], self.described[client] = node, description

    def describe(
        self, clients: Sequence[ClientId], seconds: float = _LONG
    ) -> dict[ClientId, Described]:
        """Ask clients about their data; return the valid descriptions."""
        question = json.dumps({"version": __version__, "config": self.config})
        described = {}
        for asked, answer in self._ask_json(clients, DESCRIBE, question, seconds).items():
            client, data = answer.get("client"), answer.get("data")
            if type(client) is not int or client < 0 or (asked >= 0 and asked != client):
                self._refuse(asked, f"it says that it is client {client}")
                continue
            try:
                described[client] = Described.from_json(data)
                self._tries.pop(client, None)
            except DataError as error:
                self._refuse(asked, str(error))
        return described

    def _answers(
        self, packets: Mapping[ClientId, Packet], seconds: float
    ) -> Iterator[tuple[ClientId, Packet]]:
        """Yield the answers that arrive in time; other clients are refused for a while."""
        for client, packet in self.ask(packets, time.monotonic() + seconds):
            if packet is None:
                self._refuse(client, "it does not answer")
            else:
                yield client, packet

    def enrol(self, clients: Sequence[ClientId], seconds: float = _LONG) -> set[ClientId]:
        """Send clients the terms of the experiment; return those that are ready for it."""
        ready, terms = set(), json.dumps(self.terms)
        packets = {c: Packet(ENROL, self.run, Message(b"{}", ()), {"json": terms}) for c in clients}
        without_start = []
        for client, packet in self._answers(packets, seconds):
            if packet.kind == "start":
                without_start.append(client)
            elif self.agreed(client, packet, ENROL):
                ready.add(client)
        # Clients whose own initial weights differ are sent the server's.
        message = Message(b"{}", (self.start,))
        packets = {c: Packet(ENROL, self.run, message, {"json": terms}) for c in without_start}
        for client, packet in self._answers(packets, _LONG) if packets else ():
            if self.agreed(client, packet, ENROL):
                ready.add(client)
        self._enrolled |= ready
        return ready

    def called(self, client: ClientId) -> str:
        """A client's name in the keys, or its number where there are no keys."""
        keys = () if self._keys is None else read_server(self._keys).clients
        return next((m.name for m in keys if m.id == client), f"client {client}")

    @property
    def samples(self) -> Mapping[ClientId, int]:
        """The number of training samples of each client, as it reports it."""
        return _Sizes(self.described)

    def arrivals(self, members: Sequence[ClientId], least: int, closed: str) -> list[ClientId]:
        """Wait until ``least`` members are connected; return newcomers that are ready to join."""
        present, announced = self.look(), False
        while len(present & set(members)) < least:
            if not announced:
                count = len(present & set(members))
                self._tell(f"{count} of at least {least} clients are connected")
                announced = True
            self.pause()
            present = self.look()
        again = sorted((present & set(members)) - self._enrolled - self.refused)
        if again:
            for client, description in self.describe(again, _SHORT).items():  # data may have grown
                if not self._misfit(description):
                    self.described[client] = description
            self.enrol(again, _SHORT)
        newcomers = sorted(present - set(members) - self.refused)
        for client in newcomers if closed else ():
            self._refuse(client, f"it came late, and {closed}")
        if not newcomers or closed:
            return []
        described = self.describe(newcomers, _SHORT)
        for client in newcomers:  # earlier descriptions may be out of date
            self.described.pop(client, None)
        for client, description in described.items():
            if why := self._misfit(description):
                self._refuse(client, why)
            else:
                self.described[client] = description
        self.terms["clients"] = len(self.population.clients)
        self._write()
        return sorted(self.enrol([c for c in newcomers if c in self.described], _SHORT))

    def pause(self) -> None:
        """Wait a moment for clients; Interrupted if a file in the run directory asks to stop."""
        if self.directory is not None and RunDir(self.directory).stop_asked():
            raise Interrupted(
                f"stopped while waiting for clients, as a file in {self.directory} asked"
            )
        time.sleep(_POLL)

    def _misfit(self, data: Described) -> str:
        """Why a client's data does not fit the federation; empty if it does."""
        assert self.like is not None
        if why := unlike(data, self.like):
            return why
        if set(data.classes or ()) - set(self.like.classes or ()):
            return "it has classes that the federation does not know"
        return ""

    def _ask_json(
        self, clients: Sequence[ClientId], kind: str, question: str, seconds: float
    ) -> dict[ClientId, Any]:
        message = Message(b"{}", ())
        packets = {c: Packet(kind, self.run, message, {"json": question}) for c in clients}
        answers = {}
        for client, packet in self._answers(packets, seconds):
            if self.agreed(client, packet, kind):
                try:
                    answers[client] = dict(json.loads(packet.told["json"]))
                except (KeyError, TypeError, ValueError, RecursionError) as error:
                    self._refuse(client, f"its answer is invalid ({type(error).__name__})")
        return answers

    def agreed(self, client: ClientId, packet: Packet, kind: str) -> bool:
        """Whether an answer is of this kind; also records clients that must be enrolled again."""
        if packet.kind == STRANGER:
            self._enrolled.discard(client)
        elif packet.kind == REFUSED:
            self._refuse(client, str(packet.told.get("text", "")))
        return packet.kind == kind

    def doubt(self, clients: Collection[ClientId]) -> None:
        """Have these clients described and enrolled again: their answers could not be used."""
        self._enrolled -= set(clients)

    def turn_away(self, clients: Collection[ClientId], why: str) -> None:
        """Refuse these clients as members."""
        for client in clients:
            self._refuse(client, why)

    @property
    def refused(self) -> set[ClientId]:
        """The clients that could not take part when last asked, and are not asked for now."""
        return {c for c, until in self._refused.items() if until > time.monotonic()}

    def _refuse(self, client: ClientId, why: str) -> None:
        self._tries[client] = min(self._tries.get(client, 0) + 1, 5)
        self._refused[client] = time.monotonic() + _RETRY * 2 ** (self._tries[client] - 1)
        who = f"client {client}" if client >= 0 else "a client"
        self._tell_once(f"{who} cannot take part: {printable(why)}")

    def _tell_once(self, text: str) -> None:
        """Tell the user this once; after a thousand different texts, no more."""
        if text not in self._told and len(self._told) < 1000:
            self._told.add(text)
            self._tell(text)


def serve(serving: Serving, show: Show, tell: Tell, track: Tracking | None = None) -> Result:
    """Run a federation, or continue one that was stopped.

    ``show`` gets the name of the main score and returns an observer of the rounds; ``track``
    follows the run once it begins.
    """
    folder = serving.directory / ENGINE
    before = _remembered(folder)
    config = _with_groups(parse(serving.config), before)
    _check(config)
    if before is not None and before["config"] != json.loads(json.dumps(config.model_dump())):
        raise ConfigError(
            f"{serving.directory} serves another configuration: use the one it began with, or "
            "another folder (--dir)"
        )
    keys = None if serving.keys is None else read_server(serving.keys)
    with ExitStack() as stack:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        locked = RunDir(folder)  # a second server in this folder would use the same SuperLink
        locked.lock()
        RunDir(serving.directory).stop_asked()  # drop a request to stop an earlier session
        stack.callback(locked.unlock)
        address = (serving.host, serving.port)
        hub = Hub(folder, keys, address, tell, serving.superlink, serving.secret)
        stack.callback(hub.close)
        hub.open()
        nodes = {} if keys is None else hub.admit(keys)
        run = secrets.token_hex(8) if before is None else before["run"]
        engine = Served(hub, nodes, run, travelling(config.model_dump()), serving.keys, tell)
        engine.directory = serving.directory
        tell(f"serving at {hub.address}")
        expected = serving.expect or len(nodes) or (config.data.clients or 1)
        if before is None:
            _gather(engine, expected, tell)
            assert engine.like is not None
            engine.begun, engine.count = dict(engine.described), len(engine.population.clients)
        else:
            engine.recall(before)
            assert engine.like is not None
        names = {} if keys is None else {m.id: m.name for m in keys.clients}
        experiment = _experiment(config, engine.like, engine.begun, engine.count, names)
        if public := left_public(experiment.settings.privacy, experiment.method):
            tell(public)
        start = experiment.plan(Path()).start
        engine.terms = {
            "config": travelling(experiment.config),
            "clients": len(engine.population.clients),
            "like": engine.like.to_json(),
            "least": min(d.sizes[0] for d in engine.begun.values()),
            "start": digest_of_start(start),
        }
        if code := digests_of(engine.terms["config"]):
            engine.terms["code"] = code
        engine.start = start.vector.numpy().tobytes()
        engine.remember(folder, config)
        if before is not None:
            _gather_again(engine, tell)
        ready = engine.enrol(sorted(engine.present() & engine.described.keys()))
        tell(f"{len(ready)} clients are ready")
        resume = RunDir(serving.directory).config.is_file()

        def make_engine(plan: Plan) -> Served:
            if plan.privacy.on and keys is not None:
                _write_roster(plan.folder, keys)
            return engine

        watch = stack.enter_context(show(main_score(engine.like.classes is None)))
        lossy = serving.discard_damaged
        return execute(
            experiment, serving.directory, resume, watch, make_engine, track, tell, lossy
        )


def _with_groups(config: Config, before: Mapping[str, Any] | None) -> Config:
    """Put a file's groups into the configuration; a resumed federation keeps its first groups."""
    if before is None:
        return groups_inlined(config)
    section, first = config.method, []  # type: tuple[Any, list[Any]]
    with_groups(section.name, before["config"].get("method", {}), first.append)

    def first_groups(groups: Any) -> Any:
        return first[0] if first and isinstance(groups, str) and names_file(groups) else groups

    parameters = with_groups(section.name, section.parameters, first_groups)
    return config.model_copy(update={"method": section.model_copy(update=parameters)})


def _check(config: Config) -> None:
    """Refuse unknown names and settings for simulations only, before clients are asked."""
    method_of(config)
    with_groups(config.method.name, config.method.parameters, _refuse_column)
    check_model(config)
    for table, name, simulated in (
        ("clock", config.clock.name, "none"),
        ("availability", config.availability.name, "always"),
    ):
        if name != simulated:
            raise ConfigError(
                f"{table}.name = {name} simulates what is real in this federation: leave it out"
            )
    if config.run.holdout:
        raise ConfigError(
            "run.holdout is for simulations: a real federation admits late clients by itself"
        )
    private = config.privacy
    hides = private.secure or private.epsilon is not None or private.noise is not None
    if hides and private.randomness != "system":
        raise ConfigError(
            "secure sums and noise among real clients need real randomness: set "
            "privacy.randomness = system"
        )


def _refuse_column(groups: Any) -> None:
    """Refuse groups from a metadata column, except the true groups that simulated clients send."""
    if isinstance(groups, str) and groups != COLUMN:
        raise ConfigError(
            f"method.groups = '{groups}': the server of a real federation does not know its "
            "clients' metadata. Name a file that maps each client's name to its group, as in "
            "method.groups = groups.json"
        )


def _gather(engine: Served, expected: int, tell: Tell) -> None:
    """Wait until the expected clients are connected, and find the common form of their data."""
    ready_before: set[ClientId] | None = None
    while True:
        present = engine.look() - engine.refused
        unknown = sorted(present - engine.described.keys())
        if unknown:
            engine.described |= engine.describe(unknown)
        ready = engine.described.keys() & present
        if len(ready) >= expected:
            engine.like, odd = in_common({c: engine.described[c] for c in sorted(ready)})
            for client, why in odd.items():
                del engine.described[client]
                engine.turn_away([client], why)
            if not odd:
                break
            continue
        if ready != ready_before:
            ready_before = set(ready)
            missing = sorted(engine.nodes.keys() - ready)
            who = f" (waiting for {', '.join(map(engine.called, missing))})" if missing else ""
            tell(f"{len(ready)} of {expected} clients are connected{who}")
        engine.pause()
    engine.described = {c: engine.described[c] for c in sorted(ready)}


def _gather_again(engine: Served, tell: Tell) -> None:
    """Give the members of a resumed federation time to return; all of them stay members."""
    members = sorted(engine.described)
    tell(f"continuing; waiting for {', '.join(map(engine.called, members))}")
    until = time.monotonic() + _RETURN
    while time.monotonic() < until and not set(members) <= engine.look():
        engine.pause()


def _experiment(
    config: Config,
    like: Described,
    described: Mapping[ClientId, Described],
    count: int,
    names: Mapping[ClientId, str],
) -> Experiment:
    """The experiment with the clients that the run began with."""
    population = seen_from_server(like, described, count, names)
    if config.data.public is not None:  # the server's own samples
        population = replace(population, public=population_of(config).public)
    absent = [c for c in range(count) if c not in described]
    local = replace(config.run, engine="loop")  # run.engine does not apply to a real federation
    return experiment_of(config.model_copy(update={"run": local}), population, absent=absent)


def _remembered(folder: Path) -> dict[str, Any] | None:
    path = folder / "served.json"
    if not path.exists():
        return None
    return read_json(path, "put back a copy of it, or begin in a new folder")


def _write_roster(folder: Path, keys: ServerKeys) -> None:
    directory = folder / KEYS
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    for member in keys.clients:
        write_atomic(directory / f"{member.id}.pub", member.identity, durable=True)
