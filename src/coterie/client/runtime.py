"""What happens at a client: an order is carried out, on the client's own data and state.

Every engine calls ``ClientRuntime`` and nothing else; it knows no engine. Around a task it applies
the client halves of the channel's stages: states, compression, privacy, piggybacked scores.
"""

from __future__ import annotations

import copy
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from coterie.channel.compression.coding import Coded
from coterie.channel.compression.stage import ClientCompression
from coterie.channel.messages import ReplyBody
from coterie.channel.privacy.client import ClientPrivacy, ClientTerms, out_of
from coterie.channel.privacy.client_noise import ClientNoise
from coterie.channel.privacy.client_sums import ClientSums
from coterie.channel.tasks import FETCH, KEEP, SCORE, SECURE
from coterie.channel.wire import Decoded, Message, Wire, Work, digest_of
from coterie.client.built_in import BuiltIn
from coterie.client.client import Client, StagedState, TrainingContext
from coterie.client.fit import FlatModel
from coterie.client.plan import Plan
from coterie.client.scoring import Scoring
from coterie.client.store import Store
from coterie.client.together import Together
from coterie.core.messages import Array, ClientId, Upload, check_finite, vector_of
from coterie.core.weights import Weights
from coterie.errors import ConfigError, CoterieError, RunDirError, TrainingError, WireError
from coterie.seeds import seed_for

# What a client does with the model that it is left with, and what it is told of it.
Keeper = Callable[[ClientId, Weights, Mapping[str, Any]], None]


@dataclass(frozen=True)
class ReadOrder:
    """An order as its client reads it; ``body`` also has the message, for the privacy stage."""

    id: ClientId
    message: Message
    body: dict[str, Any]

    @property
    def version(self) -> str:
        """The name of the state that the task makes, if it changes any."""
        name = str(self.body["order"])
        if not name:
            raise WireError("an order needs a name: only the initial state has none")
        return name


@dataclass
class Prepared:
    """A client that is ready for a task of the method, and what came with the order."""

    asked: ReadOrder
    client: Client
    arrays: dict[str, Array]
    scored: ReplyBody
    began: float


class ClientRuntime:
    """One resident model, and the clients that take turns at it.

    ``keeper`` is what a real client does with the model that it is left with, ``tell`` what its
    owner is told.
    """

    def __init__(
        self, plan: Plan, keeper: Keeper | None = None, tell: Callable[[str], None] = print
    ) -> None:
        self.plan, self.keeper, self.tell = plan, keeper, tell
        model = FlatModel(copy.deepcopy(plan.module), plan.device, plan.bn)
        start = Weights(model.layout, plan.start.vector)
        training = plan.training
        hidden = plan.privacy.secure
        equal = hidden and plan.privacy.weights == "equal"
        together = Together(model, training.criterion) if training.batch_clients > 1 else None
        self.context = TrainingContext(
            model, start, training.criterion, training.schedule, plan.seed, equal, hidden, together
        )
        self.wire = Wire(model.layout, plan.coding.upwards.plain)
        self.store = Store(plan.folder, model.layout)
        self.compression = ClientCompression(plan.coding, self.wire, plan.seed)
        own = ClientTerms(
            plan.privacy,
            plan.seed,
            plan.folder,
            model.layout,
            plan.roster,
            plan.method,
            max(1, min(plan.train_sizes.values(), default=1)),
            plan.secrets.record,
            plan.secrets.agreement,
            tell,
        )
        self.privacy, self.sums = ClientPrivacy(own), ClientSums(own)
        self.scoring, self.built_in = Scoring(self), BuiltIn(self)
        self._decoded: Decoded = {}

    def forget(self) -> None:
        """The exchange is over: its arrays are no longer needed."""
        self._decoded.clear()

    def answer(self, requests: Sequence[tuple[ClientId, Message]]) -> list[Message]:
        """Carry out a unit of work; what a client does wrong is an answer too.

        A unit is one order of one client, orders of several clients that train together, or
        scoring of several clients with one model.
        """
        orders = []
        for id, message in requests:
            try:
                body = self.wire.unpack(message, self._decoded)
            except CoterieError as error:  # the fault of whoever sent it
                raise WireError(str(error)) from None
            orders.append(ReadOrder(id, message, {**body, "message": message}))
        if orders[0].body["task"] == SCORE:
            return self.scoring.answer([(o.id, o.body) for o in orders])
        together, began = self.context.together, time.perf_counter()
        again = len(orders) > 1 and self._partly_answered(orders)
        tasks = [partial(self._carry_out, order, again) for order in orders]
        if len(tasks) == 1 or together is None:
            return [task() for task in tasks]
        replies = together.run(tasks)
        return in_shares(replies, time.perf_counter() - began)

    # --- one order ------------------------------------------------------------------------------

    def _partly_answered(self, orders: Sequence[ReadOrder]) -> bool:
        """Whether some but not all orders of a unit were carried out before.

        That is so where a process ended between two of them. All are carried out again then, since
        the bits of a stack depend on who is in it.
        """
        own = [o for o in orders if o.body["task"] in self.plan.method.tasks]
        held = [
            bool(o.body["order"]) and self.store.stamp(o.id, o.version) is not None for o in own
        ]
        return any(held) and not all(held)

    def _carry_out(self, asked: ReadOrder, again: bool = False) -> Message:
        """The answer to an order: of a built-in task or the method's own, or why it failed.

        An order that was carried out before is not carried out ``again``, unless it has to be.
        """
        began, id, body = time.perf_counter(), asked.id, asked.body
        try:
            if body["task"] == SECURE:
                return self.built_in.step(asked, began)
            stored = None if again else self.store.answered(id, asked.version, asked.message)
            if stored is not None:  # it was carried out before
                return stored
            scored = self.scoring.beside(id, body) if "score" in body else {}
            began = time.perf_counter()  # no clock counts scoring
            client = self.client(id, body)
            arrays = self.compression.received(client, body["arrays"])
            if body["task"] == FETCH:
                return self.built_in.fetch(client, arrays)
            if body["task"] == KEEP:
                return self.built_in.keep(client, arrays, body["config"])
            prepared = Prepared(asked, client, arrays, scored, began)
            return self._finish(prepared, self._run(prepared))
        except Exception as error:
            return self.failure(id, body["task"], error)

    def _run(self, prepared: Prepared) -> Upload:
        """Run the method's task."""
        body, arrays, client = prepared.asked.body, prepared.arrays, prepared.client
        method, name = self.plan.method, body["task"]
        task = method.tasks.get(name)
        if task is None:
            raise CoterieError(f"method '{method.name}' has no task '{name}'")
        if self.plan.privacy.secure:
            self.privacy.begin(client.id, body)
        before = {name: vector_of(array)._version for name, array in arrays.items()}
        try:
            upload = task(client, arrays, body["config"])
            for key, array in arrays.items():
                if vector_of(array)._version != before[key]:
                    raise TrainingError(
                        f"task '{name}' of method '{method.name}' changed the array '{key}' that "
                        "it received. Others receive the same one: copy it first"
                    )
            check_finite(client.id, client.round, name, upload.arrays)  # a reply is final
        except Exception as error:
            if self.plan.secrets.record is None or "beside" not in body:
                raise
            # Why nothing came of it is between a real client of sums and its owner.
            self.tell(str(error) if isinstance(error, CoterieError) else repr(error))
            raise TrainingError(out_of(client.id)) from None
        return upload

    def _finish(self, prepared: Prepared, upload: Upload) -> Message:
        """Let the stages have the upload, keep the client's state, and pack the reply."""
        asked, client, arrays = prepared.asked, prepared.client, prepared.arrays
        examples, beside, coded = client.weight, ReplyBody(), None
        if self.plan.privacy.on or "beside" in asked.body:
            examples, upload, beside = self._private(client, upload, arrays, asked.body)
        if not self.plan.coding.plainly:
            try:
                coded = self.compression.code(client, upload, arrays, asked.version)
            except CoterieError as error:  # a number that the codec cannot take
                why = f"client {client.id}, round {client.round + 1}: {error}"
                raise TrainingError(why) from None
            self.compression.hold(client, arrays)
        assert isinstance(client.state, StagedState)
        changed = client.state.changed
        more: ReplyBody = {**beside, **prepared.scored}
        reply = self.reply(examples, upload, asked.version if changed else "", coded, more)
        work = Work(time.perf_counter() - prepared.began, client.samples)
        reply = replace(reply, work=work)
        if changed:
            body = asked.body
            self.store.write(client.id, asked.version, client.state, asked.message, reply)
            kept = [asked.version, body.get("expects", ""), *body.get("keep", [])]
            self.store.keep(client.id, kept)
        return reply

    def _private(
        self,
        client: Client,
        upload: Upload,
        received: Mapping[str, Array],
        body: Mapping[str, Any],
    ) -> tuple[int, Upload, ReplyBody]:
        """What may leave of an upload: the samples it counts by, the rest of it, what it is of."""
        privacy, examples = self.plan.privacy, client.weight
        if "beside" in body:
            assert isinstance(client.state, StagedState)
            leaves = body["order"] if client.state.changed else body.get("expects", "")
            told = {**body, "leaves": leaves}
            sent, beside = self.sums.advertise(client.id, examples, upload, received, told)
            return 0, sent, {"beside": beside}
        self.privacy.may_show(client.id, upload, body["task"], digest_of(body["message"]))
        if privacy.does("local") or privacy.does("nbafl"):
            counts = 1 if privacy.mechanism == "local" else examples
            noise = ClientNoise(self.privacy.own)
            return counts, noise.disturbed(client.id, upload, received, body), {}
        return examples, upload, {"of": dict(upload.delta_of)} if privacy.noised else {}

    # --- what tasks and stages share ------------------------------------------------------------

    def client(self, id: ClientId, body: Mapping[str, Any]) -> Client:
        """A client, with the state that the order expects."""
        data, round = self.plan.population.clients[id], int(body["round"])
        state = StagedState(self.store.read(id, body.get("expects", "")))
        context, salts = self.context, self.plan.secrets.salts
        if id in salts:
            # With a salt, streams that nobody else knows: so a server that names a new run does
            # not get the same upload again, and cannot work out what dropout or the order of
            # batches will leave of anybody's data.
            context = replace(
                context, seed=seed_for(self.plan.seed, "salt", round, stream=salts[id])
            )
        return Client(id, data.train, data.val, state, round, context, body.get("config"))

    def reply(
        self,
        examples: int,
        upload: Upload,
        version: str = "",
        coded: Coded | None = None,
        more: ReplyBody | None = None,
    ) -> Message:
        """An upload as a message; arrays that are changes say of what."""
        coded = coded or Coded(dict(upload.arrays))
        changes = [n for n, a in coded.arrays.items() if isinstance(a, Mapping) and "change" in a]
        delta_of = {n: coded.delta_of[n] for n in changes}
        body: dict[str, Any] = {
            "examples": examples,
            "arrays": coded.arrays,
            "metrics": {k: float(v) for k, v in upload.metrics.items()},
            **({"since": delta_of} if delta_of else {}),
            **({"version": version} if version else {}),
            **(more or {}),
        }
        return self.wire.pack(body, coded.payloads, coded.choices)

    def failure(self, id: ClientId, task: str, error: Exception) -> Message:
        """A message that says why a task failed."""
        if isinstance(error, CoterieError):
            return self.wire.pack({"error": type(error).__name__, "text": self._telling(error)})
        why = f"task '{task}' failed with {type(error).__name__}"
        text = f"client {id}: {why}: {error} (at {_place(error)})"
        if self.keeper is not None:
            text = self._telling(why, error)
        return self.wire.pack({"error": "TrainingError", "text": text})

    def _telling(self, why: CoterieError | str, more: Exception | None = None) -> str:
        """The text of an error for the server; a remote client conceals its data and paths.

        A remote client sends only errors about numbers or about the server's own order.
        """
        if self.keeper is None:
            return str(why)
        self.tell(str(why) if more is None else repr(more))
        if isinstance(why, TrainingError | WireError | ConfigError):
            return str(why)
        lost = "it no longer has its state" if isinstance(why, RunDirError) else str(why)
        return f"{lost if isinstance(why, RunDirError | str) else 'it failed'}; its log says more"


def in_shares(replies: Sequence[Message], seconds: float) -> list[Message]:
    """Replies of clients that worked at the same time: each took its share, by its samples."""
    samples = sum(reply.work.samples for reply in replies)
    shares = [reply.work.samples / samples if samples else 0.0 for reply in replies]
    return [
        replace(reply, work=replace(reply.work, seconds=seconds * share))
        for reply, share in zip(replies, shares, strict=True)
    ]


def _place(error: Exception) -> str:
    """Where an error comes from."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}"
