"""A federation in one process: a grid in memory whose nodes are real members, with faults.

What crosses the grid goes through Flower's own bytes. Time is counted, not waited for.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import httpx
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.supercore.task_identity import TaskIdentity
from safetensors.torch import load_file

from coterie.channel import channel, timing
from coterie.channel.privacy.identity import training_salt
from coterie.client.plan import ClientSecrets, Plan
from coterie.data.population import Population
from coterie.deploy import serve as serving
from coterie.deploy.data import MemberData
from coterie.deploy.member import FederationMember, Identity
from coterie.engines.flower import engine
from coterie.engines.flower.keys import make_federation, read_client
from coterie.engines.flower.messages import HEAD
from coterie.engines.flower.runtime import client_app
from coterie.experiment import config, membership
from coterie.experiment.config import experiment_of, parse
from coterie.experiment.experiment import Experiment, execute
from coterie.results.result import Result

NODE = 1000  # the node of client 0; the others follow
GARBAGE = RecordDict({HEAD: ConfigRecord({"format": 1}), "arrays": ArrayRecord()})
Told = tuple[str, str]  # what a message is: its kind, and an order's name


class Clock:
    """Time that goes on when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < 10**6, "somebody waits for ever"

    def perf_counter(self) -> float:  # what work costs is measured, and no matter here
        return time.perf_counter()


def read(content: RecordDict) -> dict[str, Any]:
    """What the head of a message says, the order's body under "body"."""
    head = dict(content[HEAD])
    header = head.get("header", b"")
    told = json.loads(header) if isinstance(header, bytes) and header else {}
    return {**head, "body": told.get("body", {})}


@dataclass
class Post:
    """A message that was pushed, and what became of it."""

    client: int
    kind: str
    order: str
    message: Message
    size: int
    answer: RecordDict | None = None


@dataclass
class Grid:
    """What a grid does, with members in this process behind it.

    ``faults`` maps (client, kind or order) to a fault, each used once: "lose", "drop", "error",
    "twice", "restart", "forget", "wrong node", "garbage", "refuse", "gone at push", "gone at pull",
    "gone after". ``change`` may put another content in the place of an answer's.
    """

    members: dict[int, FederationMember]
    clock: Clock
    renew: Callable[[int], FederationMember]
    faults: dict[tuple[int, str], str] = field(default_factory=dict)
    change: Callable[[Post, RecordDict], RecordDict] | None = None
    away: set[int] = field(default_factory=set)
    posts: list[Post] = field(default_factory=list)
    mended: int = 0
    _open: dict[str, Post] = field(default_factory=dict)
    _count: int = 0

    def get_node_ids(self) -> Iterable[int]:
        return [NODE + c for c in sorted(self.members) if c not in self.away]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        (message,) = messages
        client = message.metadata.dst_node_id - NODE
        head = read(message.content)
        post = Post(client, head["kind"], head["body"].get("order", ""), message, _size(message))
        if self._fault(post, "gone at push"):
            raise httpx.ConnectError("nobody listens")
        if self._fault(post, "refuse"):
            return []
        self._count += 1
        name = f"m{self._count}"
        message.metadata.__dict__["_message_id"] = name
        post.message = message_from_proto(message_to_proto(message))
        self.posts.append(post)
        self._open[name] = post
        return [name]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        names = list(message_ids)
        for name in names:
            if name in self._open and self._fault(self._open[name], "gone at pull"):
                raise httpx.ReadError("cut")
        found: list[Message] = []
        for name in names:
            found += self._reply(name)
        gone = [n for n in names if n in self._open and self._fault(self._open[n], "gone after")]
        if gone:
            raise httpx.RemoteProtocolError("cut")
        for reply in found:
            self._open.pop(reply.metadata.reply_to_message_id, None)
        return found

    def mend(self) -> None:
        """A SuperLink again, which knows nothing of what was under way."""
        self.mended += 1
        self._open.clear()

    def _fault(self, post: Post, fault: str) -> bool:
        for key in ((post.client, post.order), (post.client, post.kind)):
            if self.faults.get(key) == fault:
                del self.faults[key]
                return True
        return False

    def _reply(self, name: str) -> list[Message]:
        post = self._open.get(name)
        if post is None:  # as a SuperLink answers for a message that it does not know
            return [_error(name, "Message Unavailable")]
        message, client = post.message, post.client
        if self._fault(post, "drop"):
            post.message.metadata.ttl = 0.0
        if message.metadata.ttl == 0.0:
            return []
        if self._fault(post, "error"):
            return [_error(name, "the node is gone")]
        if self._fault(post, "restart"):
            self.members[client] = self.renew(client)
        if self._fault(post, "garbage"):
            return [_through(Message(GARBAGE, reply_to=message))]
        answer = self._answer(client, message)
        if self.change is not None:
            answer = Message(self.change(post, answer.content), reply_to=message)
        post.answer = answer.content
        if self._fault(post, "lose"):
            post.message.metadata.ttl = 0.0
            return []
        if self._fault(post, "wrong node"):
            answer.metadata.__dict__["_src_node_id"] = NODE + client + 1
        twice = self._fault(post, "twice")
        return [_through(answer)] * (2 if twice else 1)

    def _answer(self, client: int, message: Message) -> Message:
        app = client_app(self.members[client].answer)
        context = Context(1, NODE + client, {}, RecordDict(), {})
        return app(message=message, context=context)

    def orders(self, kind: str = "order") -> list[tuple[int, str]]:
        """Who was sent which orders."""
        return [(p.client, p.order) for p in self.posts if p.kind == kind]


def _through(message: Message) -> Message:
    return message_from_proto(message_to_proto(message))


def _size(message: Message) -> int:
    return sum(len(array.data) for array in message.content["arrays"].values())


def _error(name: str, reason: str) -> Message:
    asked = Message(RecordDict(), 0, "query")
    asked.metadata.__dict__["_message_id"] = name
    return Message(Error(3, reason), reply_to=asked)


class Hub:
    """The hub of a federation that is all in one process."""

    address = "nowhere:0"

    def __init__(self, grid: Grid, folder: Path) -> None:
        self.grid, self.folder = grid, folder

    def open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    def close(self) -> None:
        pass

    def reconnect(self) -> None:
        self.grid.mend()

    def admit(self, keys: Any) -> dict[int, int]:
        return {member.id: NODE + member.id for member in keys.clients}


def _hub(grid: Grid, folder: Path, *given: Any) -> Hub:
    return Hub(grid, folder)


TREE: dict[str, Any] = {
    "data": {"set": "digits", "clients": 3, "samples": 75},
    "partition": {"name": "dirichlet", "alpha": 1.0},
    "model": {"name": "mlp", "hidden": [8]},
    "train": {"batch_size": 16, "lr": 0.1},
    "evaluation": {"adapt_epochs": 0},
    "run": {"rounds": 3, "seed": 3, "engine": "loop"},
}


_POPULATIONS: dict[str, Population] = {}


def population_of(asked: config.Config) -> Population:
    """As every client reads it; of equal settings it is made once."""
    key = json.dumps([asked.model_dump(include={"data", "partition"}), asked.run.seed])
    if key not in _POPULATIONS:
        _POPULATIONS[key] = config.population_of(asked)
    return _POPULATIONS[key]


def tree(count: int = 3, **tables: Mapping[str, Any]) -> dict[str, Any]:
    """A small experiment's configuration, with these tables changed."""
    made = {name: dict(keys) for name, keys in TREE.items()}
    made["data"]["clients"] = count
    for name, keys in tables.items():
        made.setdefault(name, {}).update(keys)
    return made


class Federation:
    """A server and its clients, each client with a folder of its own."""

    def __init__(
        self,
        root: Path,
        settings: Mapping[str, Any] | None = None,
        sources: Sequence[MemberData] | None = None,
        secure: bool = False,
        keys: Path | None = None,
        names: Sequence[str] = (),
    ) -> None:
        """``keys`` are those of another federation, whose clients have these ``names``.

        What they train with follows from their keys; what they have signed is not taken over.
        """
        self.root, self.config = root, dict(settings or tree())
        count = len(sources) if sources else int(self.config["data"]["clients"])
        self.sources = list(sources or [MemberData(simulated=True)] * count)
        self.keys: Path | None = None
        self.names = list(names) or [f"site{i}" for i in range(count)]
        if secure:
            self.keys = root / "federation"
            if keys is None:
                make_federation(self.keys, ["127.0.0.1"], self.names)
            else:
                shutil.copytree(keys, self.keys, ignore=shutil.ignore_patterns("signed-*"))
        self.clock, self.said, self.heard = Clock(), list[str](), list[str]()
        for client in range(count) if secure else ():
            self.who(client).record.permit()  # as the owner does with `coterie join`
        self.grid = Grid({c: self.member(c) for c in range(count)}, self.clock, self.member)
        self.served: serving.Served | None = None
        # Runs are named after their folders: what clients train depends on it under secure sums.
        self.run_name: Callable[[str], str] = lambda name: name.encode().hex()

    def who(self, client: int) -> Identity:
        """Who a client is, by its keys if it has any."""
        if self.keys is None:
            return Identity(client)
        return Identity.of(read_client(self.keys / "clients" / self.names[client]))

    def member(self, client: int) -> FederationMember:
        """A client, started (again): all that it remembers is on its disk."""
        place = self.root / f"site{client}"
        return FederationMember(
            place, self.sources[client], self.who(client), "cpu", self.heard.append
        )

    def restart(self, *clients: int) -> None:
        for client in clients or tuple(self.grid.members):
            self.grid.members[client] = self.member(client)

    def serve(self, name: str = "served", watch: Any = None, **told_too: Any) -> Result:
        """Serve it, as ``coterie serve`` would, or go on."""
        named = SimpleNamespace(token_hex=lambda _: self.run_name(name))
        with self.in_memory(), patch.object(serving, "secrets", named):
            told = serving.Serving(self.config, self.root / name, self.keys, **told_too)
            seen = watch or (lambda event: None)
            return serving.serve(told, lambda _: nullcontext(seen), self.said.append)

    @contextmanager
    def in_memory(self) -> Iterator[None]:
        """Our grid where a SuperLink would be, and our time."""
        federation = self

        class Noted(serving.Served):
            def __init__(self, *given: Any) -> None:
                super().__init__(*given)
                federation.served = self

        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
        with ExitStack() as stack:
            for module in (serving, engine, channel, timing, membership):
                stack.enter_context(patch.object(module, "time", self.clock))
            stack.enter_context(patch("os.fsync"))  # no power is cut here
            stack.enter_context(patch("coterie.deploy.data.population_of", population_of))
            hub = partial(_hub, self.grid)
            stack.enter_context(patch.object(serving, "Hub", hub))
            stack.enter_context(patch.object(serving, "Served", Noted))
            yield

    def model(self, client: int) -> dict[str, torch.Tensor]:
        """What the client was left with."""
        return load_file(self.root / f"site{client}" / "model.safetensors")

    def traffic(self) -> Counter[str]:
        """Bytes of arrays sent, by the order's name."""
        found: Counter[str] = Counter()
        for post in self.grid.posts:
            found[post.order] += post.size
        return found

    def loop(self) -> Result:
        """The same experiment by the reference engine."""
        return loop(self.config)

    @property
    def salts(self) -> dict[int, str]:
        """What each client of secure sums puts into its training, by its own secret."""
        return {c: training_salt(self.who(c).secret, self.run) for c in range(len(self.sources))}

    @property
    def run(self) -> str:
        """The name of the run that was served."""
        assert self.served is not None
        return self.served.run


def loop(settings: Mapping[str, Any], salts: Mapping[int, str] | None = None) -> Result:
    """A configuration's experiment by the reference engine.

    ``salts`` are what clients of secure sums put into their training, each its own secret.
    """
    asked = parse(settings)
    plain = Experiment.client_plan

    def salted(experiment: Experiment, folder: Path) -> Plan:
        return replace(plain(experiment, folder), secrets=ClientSecrets(salts or {}))

    with patch.object(Experiment, "client_plan", salted):
        return execute(experiment_of(asked, population_of(asked)))


def assert_models(federation: Federation, wanted: Result, clients: Iterable[int] = ()) -> None:
    """Each client holds the model that it has in the other run, to the bit."""
    for client in clients or range(len(federation.sources)):
        mine, other = federation.model(client), wanted.weights(client).tensors()
        assert mine.keys() == other.keys()
        different = [name for name in mine if not torch.equal(mine[name], other[name])]
        assert not different, f"client {client}: {different}"
