"""Serving a federation: wait for its clients, agree with them, run, and leave each its model."""

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
    agreement_of,
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
from coterie.results.evaluation import headline
from coterie.results.result import Result
from coterie.results.rundir import ENGINE, RunDir

if TYPE_CHECKING:
    from coterie.tracking import Tracking

_LOOK = 1.0  # seconds between two looks for clients
_AGAIN = 30.0  # seconds before a client that could not take part is asked again
_BACK = 90.0  # seconds: a client that lost its SuperLink is refused for about sixty
_SOON = 20.0  # for one that comes while others are at work: what takes longer is asked again
_AGREE = 300.0  # seconds for clients to read their data and answer


Show = Callable[[str], AbstractContextManager[Watch]]


@dataclass(frozen=True)
class Serving:
    """What ``coterie serve`` was told."""

    config: Mapping[str, Any]
    directory: Path
    keys: Path | None  # None: without any, on loopback only
    host: str = "0.0.0.0"
    port: int = 8443
    expect: int | None = None  # clients to wait for; None: all that have keys
    superlink: str = ""
    secret: Path | None = None
    discard_damaged: bool = False  # whether history may be lost that cannot be read any more


class _Sizes(Mapping[ClientId, int]):
    """Training samples by client, as last described."""

    def __init__(self, described: Mapping[ClientId, Described]) -> None:
        self._described = described

    def __getitem__(self, client: ClientId) -> int:
        return self._described[client].sizes[0]

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self._described)

    def __len__(self) -> int:
        return len(self._described)


class Served(Flower):
    """The engine of a federation that is served: it also lets clients in, early and late."""

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
        self.begun: dict[ClientId, Described] = {}  # whom it began with
        self.count = 0
        self.directory: Path | None = None  # where somebody may ask it to stop
        self._place, self._settings = Path(), dict[str, Any]()
        self._enrolled: set[ClientId] = set()
        self._refused: dict[ClientId, float] = {}  # and until when: it may come back mended
        self._tries: dict[ClientId, int] = {}
        self._said: set[str] = set()
        self._looked = 0.0

    def remember(self, place: Path, config: Config) -> None:
        """Write down who the clients are, for a server that is started again."""
        self._place, self._settings = place, config.model_dump()
        self._write()

    def _write(self) -> None:
        assert self.like is not None
        later = {c: d for c, d in self.described.items() if c not in self.begun}
        kept = {
            "run": self.run,
            "config": self._settings,
            "clients": {c: d.to_json() for c, d in self.begun.items()},
            "later": {c: d.to_json() for c, d in later.items()},
            "like": self.like.to_json(),
            "count": self.count,
        }
        write_atomic(self._place / "served.json", to_json(kept).encode(), durable=True)

    def recall(self, kept: Mapping[str, Any]) -> None:
        """The same, read again."""
        self.like, self.count = Described.from_json(kept["like"]), kept["count"]
        self.begun = {int(c): Described.from_json(d) for c, d in kept["clients"].items()}
        later = {int(c): Described.from_json(d) for c, d in kept["later"].items()}
        self.described = {**self.begun, **later}

    @property
    def agreement(self) -> str:
        """A name for what all clients were told: members of a secure sum sign it."""
        return agreement_of(self.run, self.terms)

    @property
    def population(self) -> Population:
        """The clients as they are known now."""
        assert self.like is not None
        count = max([*self.nodes, *self.described]) + 1
        return seen_from_server(self.like, self.described, count)

    def look(self) -> set[ClientId]:
        """Who is connected; nodes without keys, on loopback, are asked who they are."""
        if self._keys is None:
            self._greet()
        elif time.monotonic() > self._looked + 5:
            # Keys that were made meanwhile are let in without a new start.
            self._looked = time.monotonic()
            try:
                keys = read_server(self._keys)
            except CoterieError as error:  # a run that goes on does not end for this
                self._say(f"new keys cannot be read: {error}")
            else:
                if len(keys.clients) > len(self.nodes):
                    self.nodes = dict(self._calmly(lambda grid: self.hub.admit(keys)))
        return self.present()

    def _greet(self) -> None:
        known = set(self.nodes.values())
        for node in self._calmly(lambda grid: list(grid.get_node_ids())):
            if node in known or -1 - node in self.refused:
                continue
            place = -1 - node  # a place of its own until it has said who it is
            self.nodes[place] = node
            found = self.describe([place], _AGREE if self.like is None else _SOON)
            del self.nodes[place]
            for client, own in found.items():
                self.nodes[client], self.described[client] = node, own

    def describe(
        self, clients: Sequence[ClientId], seconds: float = _AGREE
    ) -> dict[ClientId, Described]:
        """Ask clients about their data."""
        about = json.dumps({"version": __version__, "config": self.config})
        found = {}
        for place, told in self._told(clients, DESCRIBE, about, seconds).items():
            client, own = told.get("client"), told.get("data")
            if type(client) is not int or client < 0 or (place >= 0 and place != client):
                self._refuse(place, f"it says that it is client {client}")
                continue
            try:
                found[client] = Described.from_json(own)
                self._tries.pop(client, None)
            except DataError as error:
                self._refuse(place, str(error))
        return found

    def _asked(
        self, packets: Mapping[ClientId, Packet], seconds: float
    ) -> Iterator[tuple[ClientId, Packet]]:
        """The answers that come within that time; who is there and silent is left alone a while."""
        for client, packet in self.ask(packets, time.monotonic() + seconds):
            if packet is None:
                self._refuse(client, "it does not answer")
            else:
                yield client, packet

    def enrol(self, clients: Sequence[ClientId], seconds: float = _AGREE) -> set[ClientId]:
        """Tell clients the experiment; gives those that are ready for it."""
        ready, terms = set(), json.dumps(self.terms)
        asked = {c: Packet(ENROL, self.run, Message(b"{}", ()), {"json": terms}) for c in clients}
        wants = []
        for client, packet in self._asked(asked, seconds):
            if packet.kind == "start":
                wants.append(client)
            elif self.agreed(client, packet, ENROL):
                ready.add(client)
        # Whose own first weights are others gets them.
        message = Message(b"{}", (self.start,))
        asked = {c: Packet(ENROL, self.run, message, {"json": terms}) for c in wants}
        for client, packet in self._asked(asked, _AGREE) if asked else ():
            if self.agreed(client, packet, ENROL):
                ready.add(client)
        self._enrolled |= ready
        return ready

    def called(self, client: ClientId) -> str:
        """A client's name as the keys have it, or its number where there are none."""
        keys = () if self._keys is None else read_server(self._keys).clients
        return next((m.name for m in keys if m.id == client), f"client {client}")

    @property
    def samples(self) -> Mapping[ClientId, int]:
        """How many training samples each client says it has."""
        return _Sizes(self.described)

    def arrivals(self, members: Sequence[ClientId], least: int, closed: str) -> list[ClientId]:
        """Wait for so many members; gives others that are there, and ready, and none yet."""
        there, told = self.look(), False
        while len(there & set(members)) < least:
            if not told:
                self._tell(f"{len(there & set(members))} of at least {least} clients are there")
                told = True
            self.pause()
            there = self.look()
        again = sorted((there & set(members)) - self._enrolled - self.refused)
        if again:
            for client, own in self.describe(again, _SOON).items():  # its data may have grown
                if not self._misfit(own):
                    self.described[client] = own
            self.enrol(again, _SOON)
        fresh = sorted(there - set(members) - self.refused)
        for client in fresh if closed else ():
            self._refuse(client, f"it came late, and {closed}")
        if not fresh or closed:
            return []
        came = self.describe(fresh, _SOON)
        for client in fresh:  # what it said when it came does not count
            self.described.pop(client, None)
        for client, own in came.items():
            if why := self._misfit(own):
                self._refuse(client, why)
            else:
                self.described[client] = own
        self.terms["clients"] = len(self.population.clients)
        self._write()
        return sorted(self.enrol([c for c in fresh if c in self.described], _SOON))

    def pause(self) -> None:
        """Wait a moment for clients; end if a file in the run's folder asks for that."""
        if self.directory is not None and RunDir(self.directory).stop_asked():
            raise Interrupted(f"stopped while it waited for clients, as asked in {self.directory}")
        time.sleep(_LOOK)

    def _misfit(self, own: Described) -> str:
        """Why data does not fit those of the federation, if so."""
        assert self.like is not None
        if why := unlike(own, self.like):
            return why
        if set(own.classes or ()) - set(self.like.classes or ()):
            return "it has classes that the federation does not know"
        return ""

    def _told(
        self, clients: Sequence[ClientId], kind: str, about: str, seconds: float
    ) -> dict[ClientId, Any]:
        packets = {c: Packet(kind, self.run, Message(b"{}", ()), {"json": about}) for c in clients}
        found = {}
        for client, packet in self._asked(packets, seconds):
            if self.agreed(client, packet, kind):
                try:
                    found[client] = dict(json.loads(packet.told["json"]))
                except (KeyError, TypeError, ValueError, RecursionError) as error:
                    self._refuse(client, f"its answer makes no sense ({type(error).__name__})")
        return found

    def agreed(self, client: ClientId, packet: Packet, kind: str) -> bool:
        """Whether it is; who does not know the run is told of it before the next round."""
        if packet.kind == STRANGER:
            self._enrolled.discard(client)
        elif packet.kind == REFUSED:
            self._refuse(client, str(packet.told.get("text", "")))
        return packet.kind == kind

    def doubt(self, clients: Collection[ClientId]) -> None:
        """What these answered could not be used: before the next round they are asked anew."""
        self._enrolled -= set(clients)

    def turn_away(self, clients: Collection[ClientId], why: str) -> None:
        """These cannot be members."""
        for client in clients:
            self._refuse(client, why)

    @property
    def refused(self) -> set[ClientId]:
        """Who could not take part when last asked, a little while ago."""
        return {c for c, until in self._refused.items() if until > time.monotonic()}

    def _refuse(self, client: ClientId, why: str) -> None:
        self._tries[client] = min(self._tries.get(client, 0) + 1, 5)
        self._refused[client] = time.monotonic() + _AGAIN * 2 ** (self._tries[client] - 1)
        who = f"client {client}" if client >= 0 else "a client"
        text = f"{who} cannot take part: {printable(why)}"
        self._say(text)

    def _say(self, text: str) -> None:
        """Tell something once; of a thousand different things, the first."""
        if text not in self._said and len(self._said) < 1000:
            self._said.add(text)
            self._tell(text)


def serve(serving: Serving, show: Show, tell: Tell, track: Tracking | None = None) -> Result:
    """Run a federation, or go on with it where it stopped.

    ``show`` is told what scores are judged by, and gives something to watch rounds with; ``track``
    follows the run once it begins.
    """
    place = serving.directory / ENGINE
    before = _remembered(place)
    config = _with_groups(parse(serving.config), before)
    _check(config)
    if before is not None and before["config"] != json.loads(json.dumps(config.model_dump())):
        raise ConfigError(
            f"{serving.directory} serves another configuration: give the one it began with, or "
            "another folder (--dir)"
        )
    keys = None if serving.keys is None else read_server(serving.keys)
    with ExitStack() as stack:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        mine = RunDir(place)  # its lock: a second server here would take the first one's SuperLink
        mine.lock()
        RunDir(serving.directory).stop_asked()  # of a session before this one
        stack.callback(mine.unlock)
        address = (serving.host, serving.port)
        hub = Hub(place, keys, address, tell, serving.superlink, serving.secret)
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
        engine.remember(place, config)
        if before is not None:
            _gather_again(engine, tell)
        ready = engine.enrol(sorted(engine.present() & engine.described.keys()))
        tell(f"{len(ready)} clients are ready")
        resume = RunDir(serving.directory).config.is_file()

        def made(plan: Plan) -> Served:
            if plan.privacy.on and keys is not None:
                _write_roster(plan.folder, keys)
            return engine

        watch = stack.enter_context(show(headline(engine.like.classes is None)))
        lossy = serving.discard_damaged
        return execute(experiment, serving.directory, resume, watch, made, track, tell, lossy)


def _with_groups(config: Config, before: Mapping[str, Any] | None) -> Config:
    """With the groups of a file; a federation that goes on keeps those that it began with."""
    if before is None:
        return groups_inlined(config)
    section, first = config.method, []  # type: tuple[Any, list[Any]]
    with_groups(section.name, before["config"].get("method", {}), first.append)

    def kept(groups: Any) -> Any:
        return first[0] if first and isinstance(groups, str) and names_file(groups) else groups

    parameters = with_groups(section.name, section.parameters, kept)
    return config.model_copy(update={"method": section.model_copy(update=parameters)})


def _check(config: Config) -> None:
    """Refuse names that there are not, and what only a simulation has, before anybody is asked."""
    method_of(config)
    with_groups(config.method.name, config.method.parameters, _refuse_column)
    check_model(config)
    for table, name, simulated in (
        ("clock", config.clock.name, "none"),
        ("availability", config.availability.name, "always"),
    ):
        if name != simulated:
            raise ConfigError(
                f"{table}.name = {name} simulates what a real federation has: leave it out"
            )
    if config.run.holdout:
        raise ConfigError("run.holdout is for simulations: who comes late is admitted by itself")
    private = config.privacy
    hides = private.secure or private.epsilon is not None or private.noise is not None
    if hides and private.randomness != "system":
        raise ConfigError(
            "secure sums and noise among real clients need real randomness: set "
            "privacy.randomness = system"
        )


def _refuse_column(groups: Any) -> None:
    """Refuse groups by a column of metadata; a simulated client does say its true group."""
    if isinstance(groups, str) and groups != COLUMN:
        raise ConfigError(
            f"method.groups = '{groups}': the server of a real federation does not know its "
            "clients' metadata. Give a file with the group of each client by name, as in "
            "method.groups = groups.json"
        )


def _gather(engine: Served, expected: int, tell: Tell) -> None:
    """Wait until the clients that are expected are there, and find what they have in common."""
    told: set[ClientId] | None = None
    while True:
        there = engine.look() - engine.refused
        fresh = sorted(there - engine.described.keys())
        if fresh:
            engine.described |= engine.describe(fresh)
        ready = engine.described.keys() & there
        if len(ready) >= expected:
            engine.like, odd = in_common({c: engine.described[c] for c in sorted(ready)})
            for client, why in odd.items():
                del engine.described[client]
                engine.turn_away([client], why)
            if not odd:
                break
            continue
        if ready != told:
            told = set(ready)
            missing = sorted(engine.nodes.keys() - ready)
            who = f" (waiting for {', '.join(map(engine.called, missing))})" if missing else ""
            tell(f"{len(ready)} of {expected} clients are here{who}")
        engine.pause()
    engine.described = {c: engine.described[c] for c in sorted(ready)}


def _gather_again(engine: Served, tell: Tell) -> None:
    """Going on: give all the time to come back; who does not is a member still."""
    members = sorted(engine.described)
    tell(f"going on; waiting for {', '.join(map(engine.called, members))}")
    ends = time.monotonic() + _BACK
    while time.monotonic() < ends and not set(members) <= engine.look():
        engine.pause()


def _experiment(
    config: Config,
    like: Described,
    described: Mapping[ClientId, Described],
    count: int,
    names: Mapping[ClientId, str],
) -> Experiment:
    """The experiment of the clients that it began with."""
    population = seen_from_server(like, described, count, names)
    if config.data.public is not None:  # the server's own samples
        population = replace(population, public=population_of(config).public)
    absent = [c for c in range(count) if c not in described]
    local = replace(config.run, engine="loop")  # there is no choice of engine here
    return experiment_of(config.model_copy(update={"run": local}), population, absent=absent)


def _remembered(place: Path) -> dict[str, Any] | None:
    path = place / "served.json"
    if not path.exists():
        return None
    return read_json(path, "put back a copy of it, or begin in a new folder")


def _write_roster(folder: Path, keys: ServerKeys) -> None:
    place = folder / KEYS
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    for member in keys.clients:
        write_atomic(place / f"{member.id}.pub", member.identity, durable=True)
