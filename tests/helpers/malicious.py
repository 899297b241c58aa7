"""A malicious server: it enrols real members honestly, and then says to them what it likes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from coterie.channel.channel import Channel
from coterie.channel.privacy.encoding import Total
from coterie.channel.privacy.record import Record
from coterie.channel.privacy.secure_sums import Secure
from coterie.channel.wire import Message
from coterie.core.engine import Answers, Request
from coterie.core.messages import Order
from coterie.core.weights import Weights
from coterie.deploy.terms import agreement_digest
from coterie.engines.flower.messages import Digests, Packet, opened, sealed
from coterie.errors import CoterieError
from coterie.experiment.running import Running
from faked_grid import Federation, tree

PRIVACY = {"secure": True, "randomness": "system"}
Body = dict[str, Any]


def refused(answer: Body) -> bool:
    """Whether an answer is a refusal, and nothing else."""
    told = ("arrays", "metrics", "scored", "version")
    says_no = "error" in answer or "refused" in answer.get("beside", {})
    return says_no and not any(answer.get(key) for key in told)


def in_a_run(folder: Path) -> Record:
    """The record of a client that takes part in a run."""
    record = Record(folder / "signed.json", 0, lasting=True)
    record.permit()
    record.enter("first")
    return record


class Server:
    """Members as ``coterie join --secure`` starts them, enrolled in a run, and its server.

    ``told`` are the tables of the run's settings. With ``keys`` the members have those of another
    server's, and with ``reveal`` their owners allow that.
    """

    def __init__(
        self,
        root: Path,
        count: int = 4,
        run: str = "aa11",
        keys: Server | None = None,
        reveal: str = "",
        **told: Mapping[str, Any],
    ) -> None:
        tables = {"data": {"samples": 25 * count}, **told}
        tables["privacy"] = {**PRIVACY, **told.get("privacy", {})}
        made = tree(count, **tables)
        made |= {name: dict(told.get(name, made[name])) for name in ("model", "partition")}
        self.fed = Federation(root, made, secure=True, keys=keys and keys.fed.keys)
        for member in self.fed.grid.members.values():
            member.secure, member.reveal = True, reveal
        self.count, self.answers, self._number = count, list[tuple[int, Body]](), 0
        self.fed.run_name = lambda name: run
        begun = self._enrolled().session
        assert self.fed.served is not None
        self.run, self.terms = run, self.fed.served.terms
        self.start, self.seed = begun.plan.start, begun.plan.seed
        self.channel: Channel = begun.channel
        self.channel.engine = _Direct(self)
        self._secure = begun.guard._secure
        assert self._secure is not None

    def _enrolled(self) -> Running:
        """The run of an honest server that stops before it asks anybody for anything."""
        found: list[Running] = []

        def stop(running: Running) -> None:
            found.append(running)
            raise KeyboardInterrupt

        with patch.object(Running, "all", stop):
            try:
                self.fed.serve()
            except KeyboardInterrupt:
                return found[0]
        raise AssertionError("the run was over before it began")

    def permit(self) -> None:
        """All owners let their clients take part in one more run."""
        for client in range(len(self.fed.sources)):
            self.fed.who(client).record.permit()

    def model(self, value: float | None = None, **layers: float) -> Weights:
        """The first model, or one full of a number, with other numbers in some of its tensors."""
        vector = self.start.vector.clone()
        if value is not None:
            vector.fill_(value)
        for name, number in layers.items():
            vector[self.start.layout.spans[name.replace("_", ".")]] = number
        return replace(self.start, vector=vector)

    # --- messages -------------------------------------------------------------------------------

    def tell(self, client: int, kind: str, message: Message, run: str = "", **told: str) -> Packet:
        """One message to a member, and its answer."""
        content = sealed(Packet(kind, run or self.run, message, told), Digests())
        packet, _ = opened(self.fed.grid.members[client].answer(content), {})
        return packet

    def order(self, client: int, message: Message) -> Message | Body:
        """The answer to an order: a message, or a refusal of the whole."""
        packet = self.tell(client, "order", message)
        body: Body = {"error": packet.kind, **packet.told}
        if packet.kind == "order":
            body = self.channel.wire.unpack(packet.message)
        self.answers.append((client, body))
        return packet.message if packet.kind == "order" else body

    def ask(
        self,
        client: int,
        task: str,
        arrays: Mapping[str, Any],
        round: int = 0,
        name: str = "",
        **more: Any,
    ) -> Body:
        """What a member answers to an order of this name that is a part of no sum."""
        self._number += 1
        body = {"order": name or f"o{self._number}", "round": round, "task": task}
        body |= {"arrays": dict(arrays), "config": {}, **more}
        self.order(client, self.channel.wire.pack(body))
        answer = self.answers[-1][1]
        assert answer.get("error") != "missing", "the member did not read the order"
        return answer

    def enrol(self, run: str, clients: Sequence[int] = (), **tables: Mapping[str, Any]) -> Body:
        """Other terms, under another name: the refusals of each client that gives one."""
        config = {name: dict(keys) for name, keys in self.terms["config"].items()}
        for name, keys in tables.items():
            config[name] = {**config.get(name, {}), **keys}
        terms, nothing = {**self.terms, "config": config}, Message(b"{}", ())
        found: Body = {}
        for client in clients or range(self.count):
            answer = self.tell(client, "enrol", nothing, run, json=json.dumps(terms))
            if answer.kind != "enrol":
                found[client] = answer.told.get("text", answer.kind)
        if self._secure.run == self.run:
            self._secure.run = run
        self.run, self._secure.agreement = run, agreement_digest(run, terms)
        return found

    # --- sums -----------------------------------------------------------------------------------

    def sum(
        self,
        arrays: Mapping[str, Any],
        task: str = "train",
        round: int = 0,
        clients: Sequence[int] = (),
        noise: Mapping[str, float] | None = None,
        run: str = "",
        settings: Mapping[str, Any] | None = None,
        by_examples: bool = False,
        **config: Any,
    ) -> Total | None:
        """The sum of what these clients make of one order; None if they refuse it.

        ``settings`` are more of the order's. The server remembers nothing of the sums before.
        """
        self._number += 1
        self.answers.clear()
        self.channel.begin(round, f"s{self._number}")
        own = self._secure
        other = Secure(self.channel, own.privacy, own.roster, run or own.run, own.method, most=9)
        other.agreement = own.agreement
        config |= settings or {}
        orders = [Order(c, task, arrays, config) for c in clients or range(self.count)]
        into = {o.client: {0: 1.0} for o in orders}
        try:
            (total,) = other.sums(orders, into, by_examples, noise).values()
        except CoterieError:
            return None
        return total

    @property
    def gave_keys(self) -> bool:
        """Whether anybody took part in the last sum, if only with keys."""
        return any(body.get("arrays") for _, body in self.answers)


class _Direct:
    """An engine that hands messages to members."""

    piggybacks = False

    def __init__(self, server: Server) -> None:
        self.server = server
        self.clients = range(server.count)

    def exchange(self, requests: Sequence[Request], until: float | None = None) -> Answers:
        for request in requests:
            answer = self.server.order(request.client, request.message)
            yield request.client, answer if isinstance(answer, Message) else None

    def close(self) -> None:
        pass


def trained_in(monkeypatch: Any) -> list[torch.Tensor]:
    """A list that gets the first weights of each training from now on."""
    from coterie.client import client as module

    found, honest = [], module.fit

    def fit(model: Any, training: Any, criterion: Any) -> Any:
        found.append(training.start.vector)
        return honest(model, training, criterion)

    monkeypatch.setattr(module, "fit", fit)
    return found
