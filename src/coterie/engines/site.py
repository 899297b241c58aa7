"""A site carries out orders for the clients whose data it holds. Every engine uses this one."""

from __future__ import annotations

import copy
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from coterie.client import Task
from coterie.client.client import Bench, Client, Staged
from coterie.client.fit import Criterion, FlatModel, Schedule, outputs
from coterie.client.metrics import scores
from coterie.data.population import Population
from coterie.door.coding import (
    HELD,
    SENT,
    Coded,
    Coding,
    decode,
    encode,
    now_held,
    reference_of,
)
from coterie.door.door import FETCH, KEEP, SCORE, SECURE
from coterie.door.privacy.client import Sealing, out_of
from coterie.door.privacy.entropy import Entropy
from coterie.door.privacy.identity import Roster
from coterie.door.privacy.settings import Privacy
from coterie.door.wire import Decoded, Message, Wire, Work, digest_of
from coterie.engines.store import Store
from coterie.errors import (
    ConfigError,
    CoterieError,
    RunDirError,
    TrainingError,
    WireError,
)
from coterie.federation import Array, ClientId, Upload, check_finite, vector_of
from coterie.method import Method
from coterie.seeds import seed_for
from coterie.weights import Weights

Metric = Callable[[Tensor, Tensor], float]
Done = TypeVar("Done")
# What a client does with the model that it is left with, and what it is told of it.
Keeper = Callable[[ClientId, Weights, Mapping[str, Any]], None]


@dataclass(frozen=True)
class Plan:
    """All that a site needs to know of a run."""

    population: Population
    module: nn.Module
    start: Weights
    method: Method
    criterion: Criterion
    schedule: Schedule
    seed: int
    folder: Path
    bn: str = "shared"
    device: str = "cpu"
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    coding: Coding = field(default_factory=Coding)
    privacy: Privacy = field(default_factory=Privacy)
    salts: Mapping[ClientId, str] = field(default_factory=dict)  # secrets of clients' streams
    record: Path | None = None  # where a real client remembers what it has signed
    agreement: str = ""  # a name for what it was told of the run

    @property
    def roster(self) -> Roster:
        """The clients' public signature keys."""
        entropy = Entropy(self.privacy.randomness, self.seed)
        return Roster(entropy, self.folder, range(len(self.population.clients)))

    @property
    def train_sizes(self) -> dict[ClientId, int]:
        """Training samples of each client."""
        return {i: len(c.train) for i, c in enumerate(self.population.clients)}

    @property
    def held_sizes(self) -> dict[ClientId, int]:
        """Validation and test samples of each client."""
        return {i: len(c.val) + len(c.test) for i, c in enumerate(self.population.clients)}


class Site:
    """One resident model, and the clients that take turns at it."""

    def __init__(
        self, plan: Plan, keeper: Keeper | None = None, tell: Callable[[str], None] = print
    ) -> None:
        self.plan, self.keeper, self.tell = plan, keeper, tell
        model = FlatModel(copy.deepcopy(plan.module), plan.device, plan.bn)
        start = Weights(model.layout, plan.start.vector)
        self.bench = Bench(model, start, plan.criterion, plan.schedule, plan.seed)
        self.wire = Wire(model.layout, plan.coding.upwards.plain)
        self.store = Store(plan.folder, model.layout)
        self.sealing = Sealing(
            plan.privacy,
            plan.seed,
            plan.folder,
            model.layout,
            plan.roster,
            plan.method.name,
            max(1, min(plan.train_sizes.values(), default=1)),
            plan.method.chooses,
            plan.method.sums,
            plan.record,
            plan.agreement,
            plan.method.shows,
            tell,
        )
        self._decoded: Decoded = {}

    def forget(self) -> None:
        """The exchange is over: its arrays are no longer needed."""
        self._decoded.clear()

    def answer(self, requests: Sequence[tuple[ClientId, Message]]) -> list[Message]:
        """Carry out a unit of work; what a client does wrong is an answer too."""
        bodies = [(c, self._opened(m) | {"message": m}) for c, m in requests]
        if bodies[0][1]["task"] == SCORE:
            return self._score_all(bodies)
        return [self._guarded(client, body, self._carry_out) for client, body in bodies]

    def _opened(self, message: Message) -> dict[str, Any]:
        """What an order says; one that makes no sense is the fault of whoever sent it."""
        try:
            return self.wire.unpack(message, self._decoded)
        except CoterieError as error:
            raise WireError(str(error)) from None

    def _guarded(
        self,
        client: ClientId,
        body: Mapping[str, Any],
        work: Callable[[ClientId, Mapping[str, Any]], Done],
    ) -> Done | Message:
        """What the work gives, or a message that says why it failed."""
        try:
            return work(client, body)
        except CoterieError as error:
            return self.wire.pack({"error": type(error).__name__, "text": self._telling(error)})
        except Exception as error:
            if self.keeper is not None:
                why = f"task '{body['task']}' failed with {type(error).__name__}"
                return self.wire.pack({"error": "TrainingError", "text": self._telling(why, error)})
            frame = traceback.extract_tb(error.__traceback__)[-1]
            text = (
                f"client {client}: task '{body['task']}' failed with {type(error).__name__}: "
                f"{error} (at {frame.filename}:{frame.lineno})"
            )
            return self.wire.pack({"error": "TrainingError", "text": text})

    def _telling(self, why: CoterieError | str, more: Exception | None = None) -> str:
        """What the server is told of an error; a client elsewhere keeps its data and paths apart.

        Of errors there, only those go that speak of numbers or of the server's own order.
        """
        if self.keeper is None:
            return str(why)
        self.tell(str(why) if more is None else repr(more))
        if isinstance(why, TrainingError | WireError | ConfigError):
            return str(why)
        lost = "it no longer has its state" if isinstance(why, RunDirError) else str(why)
        return f"{lost if isinstance(why, RunDirError | str) else 'it failed'}; its log says more"

    def _client(self, id: ClientId, body: Mapping[str, Any]) -> Client:
        data = self.plan.population.clients[id]
        state = Staged(self.store.read(id, body.get("expects", "")))
        bench = self._salted(id, body["round"])
        return Client(id, data.train, data.val, state, body["round"], bench, body.get("config"))

    def _salted(self, id: ClientId, round: int) -> Bench:
        """What a client trains with in a round: with a salt, streams that nobody else knows.

        So a server that names a new run does not get the same upload again, and cannot work out
        what dropout or the order of batches will leave of anybody's data.
        """
        if id not in self.plan.salts:
            return self.bench
        salt = self.plan.salts[id]
        return replace(self.bench, seed=seed_for(self.plan.seed, "salt", round, stream=salt))

    def _received(self, client: Client, body: Mapping[str, Any]) -> dict[str, Array]:
        """The arrays of an order; a change is one of the model that the client holds, or of θ⁰."""
        arrays = body["arrays"]
        if self.plan.coding.downwards.exact and any("change" in _parts(a) for a in arrays.values()):
            raise WireError("an order with a change of a model, where whole models are sent")
        return decode(arrays, self._held(client, arrays), self.wire.layout)

    def _held(self, client: Client, names: Iterable[str]) -> dict[str, Weights]:
        """What models of these names are changes of."""
        return {
            n: reference_of(lambda m: client.kept(f"{HELD}.{m}"), n, client.base) for n in names
        }

    def _hold(self, client: Client, arrays: Mapping[str, Array]) -> None:
        """Keep models as received, if the next ones are to be changes of these."""
        if self.plan.coding.downwards.exact:
            return
        for name, model in now_held(arrays, self._held(client, arrays)).items():
            client.state[f"{HELD}.{name}"] = model

    def _carry_out(self, id: ClientId, body: Mapping[str, Any]) -> Message:
        began, version, expects = time.perf_counter(), body["order"], body.get("expects", "")
        if body["task"] == SECURE:
            sent, beside = self.sealing.step(id, body)
            if self.keeper is not None and "refused" in beside:
                self.tell(f"refused to go on with a sum: {beside['refused']}")
            reply = self._reply(0, sent, more={"beside": beside})
            return replace(reply, work=Work(time.perf_counter() - began))
        if self.store.holds(id, version):
            stored = self.store.answered(id, version, digest_of(body["message"]))
            if stored is not None:
                return stored
        ridden = self._ridden(id, body)
        began = time.perf_counter()  # no clock counts scoring
        client = self._client(id, body)
        arrays = self._received(client, body)
        if body["task"] == FETCH:
            if self.keeper is not None:
                raise WireError("a client's own model stays with it")
            self.sealing.may_fetch(id)
            model = self.plan.method.assemble(client, arrays)
            return self._reply(len(client.train), Upload({"model": model}))
        if body["task"] == KEEP:
            if self.keeper is None:
                raise CoterieError(f"client {id} has no place to keep a model in")
            self.keeper(id, self.plan.method.assemble(client, arrays), body["config"])
            return self._reply(0, Upload())
        task = self.plan.method.tasks.get(body["task"])
        if task is None:
            raise CoterieError(f"method '{self.plan.method.name}' has no task '{body['task']}'")
        self.sealing.begin(id, body)
        upload = self._carried_out(task, client, arrays, body)
        assert isinstance(client.state, Staged)
        examples, upload, beside = self._private(client, upload, arrays, body)
        try:
            coded = self._coded(client, upload, arrays, version)
        except CoterieError as error:  # a number that the codec cannot take
            raise TrainingError(f"client {id}, round {client.round + 1}: {error}") from None
        self._hold(client, arrays)
        changed = client.state.changed
        more = {**beside, **ridden}
        reply = self._reply(examples, upload, version if changed else "", coded, more)
        reply = replace(reply, work=Work(time.perf_counter() - began, client.samples))
        if not changed:
            return reply
        self.store.write(id, version, client.state, digest_of(body["message"]), reply)
        self.store.keep(id, [version, expects, *body.get("keep", [])])
        return reply

    def _carried_out(
        self, task: Task, client: Client, arrays: dict[str, Array], body: Mapping[str, Any]
    ) -> Upload:
        """What comes of a task; why nothing did is between a real client of sums and its owner."""
        before = {name: vector_of(array)._version for name, array in arrays.items()}
        try:
            upload = task(client, arrays, body["config"])
            for name, array in arrays.items():
                if vector_of(array)._version != before[name]:
                    raise TrainingError(
                        f"task '{body['task']}' of method '{self.plan.method.name}' changed the "
                        f"array '{name}' that it received. Others receive the same one: copy it "
                        "first"
                    )
            check_finite(client.id, client.round, body["task"], upload.arrays)  # a reply is final
        except Exception as error:
            if self.plan.record is None or "beside" not in body:
                raise
            self.tell(str(error) if isinstance(error, CoterieError) else repr(error))
            raise TrainingError(out_of(client.id)) from None
        return upload

    def _ridden(self, id: ClientId, body: Mapping[str, Any]) -> dict[str, Any]:
        """Scores that an order asks for beside its task, of the client as it is before it.

        A failure there is told, and does not keep the client from its task.
        """
        if "score" not in body:
            return {}
        asked = dict(body["score"])
        asked["arrays"] = {
            n: body["arrays"][a["as"]] if isinstance(a, Mapping) and "as" in a else a
            for n, a in asked["arrays"].items()
        }
        request = {"task": SCORE, "expects": body.get("expects", ""), **asked}
        found = self.wire.unpack(self._score_all([(id, request)])[0])
        return {"scored": {k: found[k] for k in ("metrics", "error", "text") if k in found}}

    def _private(
        self,
        client: Client,
        upload: Upload,
        received: Mapping[str, Array],
        body: Mapping[str, Any],
    ) -> tuple[int, Upload, dict[str, Any]]:
        """What may leave of an upload: the samples it counts by, the rest of it, what it is of."""
        privacy, examples = self.plan.privacy, len(client.train)
        if "beside" in body:
            sent, beside = self.sealing.advertise(client.id, examples, upload, received, body)
            return 0, sent, {"beside": beside}
        self.sealing.may_show(client.id, upload, body["task"], digest_of(body["message"]))
        if privacy.does("local") or privacy.does("nbafl"):
            counts = 1 if privacy.mechanism == "local" else examples
            return counts, self.sealing.disturbed(client.id, upload, received, body), {}
        return examples, upload, {"of": dict(upload.since)} if privacy.noised else {}

    def _coded(
        self, client: Client, upload: Upload, received: Mapping[str, Array], order: str
    ) -> Coded:
        """What travels of an upload: changes of what was received, where a codec is lossy."""
        side, whole = self.plan.coding.upwards, self.wire.layout
        if side.plainly:
            return Coded(dict(upload.arrays))
        root = seed_for(self.plan.seed, "codec", client.round, client.id, order)

        def seed(stream: str) -> int:
            return seed_for(root, stream)

        references = {
            name: received[of] if of else None
            for name, of in upload.since.items()
            if not of or of in received
        }
        since = {name: upload.since[name] for name in references}
        model = upload.arrays.get("model")
        if "model" in references or side.exact or not isinstance(model, Weights):
            coded = encode(side, upload.arrays, references, seed, whole, client.state)
            return replace(coded, since=since)
        # A model that is no change of one received is one of the model last sent, as it arrived.
        last = client.kept(f"{SENT}.model") or client.base
        coded = encode(side, upload.arrays, {**references, "model": last}, seed, whole)
        packed = self.wire.pack({"arrays": coded.arrays}, coded.payloads, coded.choices)
        arrived = decode(self.wire.unpack(packed)["arrays"], {"model": last}, whole)["model"]
        assert isinstance(arrived, Weights)
        client.state[f"{SENT}.model"] = arrived.onto(last)
        return replace(coded, since={**since, "model": SENT})

    def _reply(
        self,
        examples: int,
        upload: Upload,
        version: str = "",
        coded: Coded | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> Message:
        coded = coded or Coded(dict(upload.arrays))
        changes = [n for n, a in coded.arrays.items() if isinstance(a, Mapping) and "change" in a]
        since = {n: coded.since[n] for n in changes}
        body: dict[str, Any] = {
            "examples": examples,
            "arrays": coded.arrays,
            "metrics": {k: float(v) for k, v in upload.metrics.items()},
            **({"since": since} if since else {}),
            **({"version": version} if version else {}),
            **(more or {}),
        }
        return self.wire.pack(body, coded.payloads, coded.choices)

    def _score_all(self, bodies: Sequence[tuple[ClientId, Mapping[str, Any]]]) -> list[Message]:
        """Score clients; those that use the very same model share one pass over their data."""
        answers: dict[int, Message] = {}
        sharing: dict[int, list[tuple[int, Client, Weights]]] = {}
        for place, (id, body) in enumerate(bodies):
            prepared = self._guarded(id, body, self._to_score)
            if isinstance(prepared, Message):
                answers[place] = prepared
            else:
                same_vector = prepared[1].vector.data_ptr()
                sharing.setdefault(same_vector, []).append((place, *prepared))
        for sharers in sharing.values():
            answers |= self._score(sharers)
        return [answers[place] for place in range(len(bodies))]

    def _to_score(self, id: ClientId, body: Mapping[str, Any]) -> tuple[Client, Weights]:
        """A client and the model it is scored with: as received, adapted, or trained alone."""
        client, config = self._client(id, body), body["config"]
        alone = int(config.get("alone", 0))
        arrays = self._received(client, body)
        offers = sum(isinstance(array, Weights) for array in arrays.values())
        self.sealing.begin_score(id, body, offers)
        model = client.base if alone else self.plan.method.assemble(client, arrays)
        for round in range(alone):  # as method `local` would
            client.round = round
            model = client.fit(model).weights
        epochs = int(config.get("adapt_epochs", 0))
        if epochs:
            own = None if alone else self.plan.method.adapt
            model = (own or Client.adapt)(client, model, epochs)
        return client, model

    def _score(self, sharers: Sequence[tuple[int, Client, Weights]]) -> dict[int, Message]:
        data = [self.plan.population.clients[client.id] for _, client, _ in sharers]
        parts = [s for d in data for s in (d.val, d.test)]

        def forward(id: ClientId, body: Mapping[str, Any]) -> Tensor:
            return outputs(self.bench.model, sharers[0][2], torch.cat([s.x for s in parts]))

        out = self._guarded(sharers[0][1].id, {"task": SCORE}, forward)
        if isinstance(out, Message):
            return {place: out for place, _, _ in sharers}
        pieces = iter(torch.split(out, [len(s) for s in parts]))
        answers = {}
        for place, client, _ in sharers:
            held = {"val": next(pieces), "test": next(pieces)}
            body = {"task": SCORE, "held": held}
            answers[place] = self._guarded(client.id, body, partial(self._scored, client))
        return answers

    def _scored(self, client: Client, id: ClientId, body: Mapping[str, Any]) -> Message:
        data, metrics = self.plan.population.clients[id], dict[str, float]()
        for name, out in body["held"].items():
            found = self._scores(out, getattr(data, name).y)
            metrics |= {f"{name}_{k}": v for k, v in found.items()}
        return self._reply(len(client.train), Upload(metrics=metrics))

    def _scores(self, out: Tensor, y: Tensor) -> dict[str, float]:
        population = self.plan.population
        classes = None if population.classes is None else len(population.classes)
        found = scores(out, y, self.plan.criterion, classes)
        if len(y):
            found |= {name: float(f(out, y)) for name, f in self.plan.metrics.items()}
        return found


def _parts(array: Any) -> Mapping[str, Any]:
    """What an array of an order is put together from, if it is."""
    return array if isinstance(array, Mapping) else {}
