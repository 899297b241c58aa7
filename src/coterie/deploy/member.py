"""A client of a real federation, which uses its own data, disk and installed code."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from coterie import __version__
from coterie.channel.compression.codecs import Payload
from coterie.channel.privacy.identity import KEYS, training_salt
from coterie.channel.privacy.record import Record
from coterie.channel.privacy.secagg import Rejected
from coterie.channel.wire import Message
from coterie.client.plan import ClientSecrets
from coterie.client.runtime import ClientRuntime
from coterie.core.messages import ClientId
from coterie.core.schema import Schedule
from coterie.core.tree import to_safetensors, write_atomic
from coterie.core.weights import Weights
from coterie.deploy.allowed_names import check_code, checked_config
from coterie.deploy.data import MemberData
from coterie.deploy.terms import (
    Described,
    agreement_digest,
    digest_of_start,
    seen_from_client,
    terms_digest,
    travelling,
)
from coterie.engines.base import one_thread
from coterie.engines.flower.engine import MISSING, ORDER
from coterie.engines.flower.keys import ClientKeys, write_secret
from coterie.engines.flower.messages import Digests, Packet, opened, sealed
from coterie.errors import ConfigError, CoterieError, DataError, RunDirError, WireError
from coterie.experiment.config import experiment_of
from coterie.results.checksums import read_json, to_json

DESCRIBE, ENROL = "describe", "enrol"
REFUSED, STRANGER = "refused", "stranger"
HELD_MOST = 1 << 30  # bytes of arrays that are kept for later orders
_AGREE_AGAIN = "remove it to agree with the server anew, and compare its settings with yours"
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Identity:
    """Who a client is: its id, its secret for secure sums, and the public keys of all clients."""

    id: ClientId
    name: str = ""
    secret: bytes = field(default=b"", repr=False)
    roster: Mapping[int, bytes] = field(default_factory=dict)
    folder: Path | None = None  # of its keys

    @staticmethod
    def of(keys: ClientKeys) -> Identity:
        """The identity of the client with these keys."""
        return Identity(keys.id, keys.name, keys.identity, keys.roster, keys.folder)

    @property
    def record(self) -> Record:
        """The record of what it has signed, next to its key, whatever folder it works in."""
        if self.folder is None:
            raise ConfigError(f"client {self.id} has no keys: it cannot take part in secure sums")
        place = self.folder / Record.name_for(self.roster[self.id])
        return Record(place, self.id, lasting=True)


def check_amplified(schedule: Schedule) -> None:
    """Refuse training settings with which one step can count far more than another.

    Clients with more samples make more steps, and with a momentum of 1e9, say, only their updates
    would matter in a sum.
    """
    for name, value in schedule.options.items():
        parts = value if isinstance(value, list | tuple) else [value]
        bounded = all(isinstance(p, bool | int | float) and 0 <= p <= 1 for p in parts)
        if not bounded or name in ("lr", "weight_decay"):  # these have bounds of their own
            raise WireError(
                f"train.options.{name} = {value!r}: clients of secure sums accept only numbers "
                "from 0 to 1 here, and lr and weight_decay only in [train], so that no step counts "
                "far more than the others"
            )
    if schedule.lr_decay > 1:
        raise WireError(
            f"train.lr_decay = {schedule.lr_decay:g} lets the learning rate grow without bound: "
            "clients of secure sums accept at most 1"
        )
    if schedule.lr * schedule.weight_decay > 1:
        raise WireError(
            f"train.weight_decay = {schedule.weight_decay:g} times train.lr = {schedule.lr:g} is "
            "more than 1, which clients of secure sums do not accept"
        )


class FederationMember:
    """Answers the server's messages, and stores everything it must remember on its own disk.

    ``folder`` holds a folder for each run, with the agreed terms, the client's states and, at the
    end, its model. A client that is restarted continues from there.
    """

    def __init__(
        self,
        folder: Path,
        source: MemberData,
        who: Identity,
        device: str,
        tell: Tell,
        secure: bool = False,
        reveal: str = "",
    ) -> None:
        self.folder, self.source, self.who, self.device = folder, source, who, device
        self.secure = secure  # whether it takes part only in runs with secure sums
        self.reveal = reveal  # what its owner allows it to reveal in spite of secure sums
        self.kept: Path | None = None  # the file of its model, once a run is over
        self._tell = tell
        self._run, self._runtime = "", None  # type: tuple[str, ClientRuntime | None]
        self._model: dict[str, Any] = {}  # its name and parameters
        self._data_read: tuple[str, Any] = ("", None)  # the data as read, and for which settings
        self._held = dict[str, Payload]()
        self._stage: object = None

    def answer(self, content: Any) -> Any:
        """Answer the content of a message; errors become answers as well."""
        try:
            packet, received = opened(content, self._held)
        except KeyError:
            return self._sealed(MISSING)
        except WireError as error:
            return self._sealed(REFUSED, text=str(error))
        work = {DESCRIBE: self._describe, ENROL: self._enrol, ORDER: self._order}
        try:
            if packet.kind not in work:
                raise WireError(f"an order of an unknown kind: '{packet.kind}'")
            with one_thread():
                return work[packet.kind](packet, received)
        except Exception as error:  # a server may send anything
            expected = isinstance(error, CoterieError)
            self._tell(f"refused: {error if expected else repr(error)}")
            # Details of errors in a client's data are written only to its own log.
            text = f"{type(error).__name__}; its log says more"
            if isinstance(error, DataError):
                text = "its data cannot be read, or does not fit; its log says more"
            elif isinstance(error, WireError):
                text = str(error)
            return self._sealed(REFUSED, packet.run, text=text)

    def _sealed(self, kind: str, run: str = "", message: Message | None = None, **told: str) -> Any:
        return sealed(Packet(kind, run, message or Message(b"{}", ()), told), Digests())

    # --- before the training --------------------------------------------------------------------

    def _describe(self, packet: Packet, received: Mapping[str, Payload]) -> Any:
        question = json.loads(packet.told["json"])
        if question["version"] != __version__:
            raise WireError(
                f"the server runs Coterie {question['version']}, client {self.who.id} "
                f"{__version__}: install the same version"
            )
        population, index = self._data(travelling(question["config"]))
        described = replace(Described.of(population, index), name=self.who.name)
        about = {"client": self.who.id, "data": described.to_json()}
        return self._sealed(DESCRIBE, packet.run, json=json.dumps(about))

    def _data(self, tree: Mapping[str, Any]) -> Any:
        key = json.dumps(
            [tree.get(k) for k in ("data", "partition", "shift", "run")], sort_keys=True
        )
        if self._data_read[0] != key:
            self._data_read = (
                key,
                self.source.read(checked_config(tree, self.source.simulated), self.who.id),
            )
        return self._data_read[1]

    def _enrol(self, packet: Packet, received: Mapping[str, Payload]) -> Any:
        folder, terms = self._folder_of(packet.run), json.loads(packet.told["json"])
        agreed = folder / "agreed.json"
        if agreed.exists():  # the terms may not change during a run, for example to plain sums
            before = read_json(agreed, _AGREE_AGAIN)
            if any(before.get(key) != terms.get(key) for key in ("config", "start", "code")):
                raise WireError("these are not the terms that this run began with")
        start_file = folder / "start.safetensors"
        if received:
            (vector,) = received.values()
            values = torch.frombuffer(bytearray(vector), dtype=torch.float32)
            write_atomic(start_file, to_safetensors({"start": values}, {}), durable=True)
        runtime = self._runtime_of(packet.run, terms)
        if runtime is None:
            return self._sealed("start", packet.run)
        write_atomic(agreed, to_json(terms).encode(), durable=True)
        self._tell(f"enrolled as client {self.who.id} for run {packet.run[:8]}")
        return self._sealed(ENROL, packet.run)

    def _runtime_of(self, run: str, terms: Mapping[str, Any]) -> ClientRuntime | None:
        """The client runtime for a run; None if its initial weights differ from the terms'."""
        tree = travelling(terms["config"])  # without the server's paths, which mean nothing here
        folder, config = self._folder_of(run), checked_config(tree, self.source.simulated)
        check_code(tree, terms.get("code", {}))
        own, index = self._data(tree)
        like = Described.from_json(terms["like"])
        population = seen_from_client(
            like, own, index, self.who.id, int(terms["clients"]), int(terms["least"])
        )
        experiment = experiment_of(config, population, whole=False)
        plan = replace(experiment.client_plan(folder / "states"), device=self.device)
        start_file = folder / "start.safetensors"
        if digest_of_start(plan.start) != terms["start"] and start_file.exists():
            from safetensors.torch import load_file

            plan = replace(plan, start=Weights(plan.start.layout, load_file(start_file)["start"]))
        if digest_of_start(plan.start) != terms["start"]:
            return None
        if self.secure and not plan.privacy.secure:
            raise WireError("this client takes part only in runs with secure sums")
        if self.secure and not plan.privacy.same_orders:
            raise WireError(
                "this client takes part in a secure sum only if all its members are sent the same "
                "order: set privacy.same_orders = true"
            )
        if self.secure and plan.privacy.reveal not in ("", self.reveal):
            raise WireError(
                f"this client reveals nothing of its own, but privacy.reveal = "
                f"{plan.privacy.reveal} asks it to: its owner can allow that with `coterie join "
                f"--reveal {plan.privacy.reveal}`"
            )
        layers = {e.layer for e in plan.start.layout.entries if e.kind == "parameter"}
        if self.secure and plan.privacy.reveal and len(layers) == 1:
            raise WireError(
                "the model has one layer: privacy.reveal would show all of this client's update"
            )
        if plan.privacy.secure:
            check_amplified(plan.training.schedule)
            if len(population.clients) > len(self.who.roster):
                raise WireError(
                    f"these terms are for {len(population.clients)} clients, but this client knows "
                    f"only {len(self.who.roster)}"
                )
        if plan.privacy.on:
            try:
                experiment.check_privacy(plan.start.layout)
            except ConfigError as why:
                raise WireError(
                    str(why)
                ) from None  # the message is about the server's own settings
        if plan.privacy != experiment.settings.privacy:  # the number of clients would change it
            raise WireError(
                "these terms do not state the noise (privacy.noise, privacy.delta), only settings "
                "from which it is computed, and its value may change during the run"
            )
        if plan.privacy.on and plan.privacy.randomness != "system":
            raise WireError(
                "secure sums and noise among real clients need real randomness, but with these "
                "terms keys and noise come from the server's seed: set privacy.randomness = system"
            )
        if plan.privacy.on:
            self._write_identities(plan.folder)
        if plan.privacy.secure:
            try:
                self.who.record.enter(run, terms_digest(terms))
            except Rejected as why:
                raise WireError(str(why)) from None
            salts = {self.who.id: training_salt(self.who.secret, run)}
            agreement = agreement_digest(run, terms)
            plan = replace(plan, secrets=ClientSecrets(salts, self.who.record.path, agreement))
        self._runtime, self._run = ClientRuntime(plan, self._keep, self._tell), run
        self._model = {"name": config.model.name, **config.model.parameters}
        self._held.clear()
        return self._runtime

    def _write_identities(self, folder: Path) -> None:
        """Write the public keys of this client's roster, and its own secret."""
        place = folder / KEYS
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        for client, public in self.who.roster.items():
            write_atomic(place / f"{client}.pub", public, durable=True)
        write_secret(place / f"{self.who.id}.key", self.who.secret)

    def _folder_of(self, run: str) -> Path:
        if not run or not run.isalnum():
            raise WireError(f"'{run}' is not a valid name of a run")
        folder = self.folder / "runs" / run
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return folder

    # --- during the run -------------------------------------------------------------------------

    def _order(self, packet: Packet, received: dict[str, Payload]) -> Any:
        runtime = self._runtime if self._run == packet.run else self._recall(packet.run)
        if runtime is None:
            return self._sealed(STRANGER, packet.run)
        if self._stage != (packet.run, packet.told.get("stage")):
            self._stage = packet.run, packet.told.get("stage")
            self._held.clear()
        if sum(map(len, self._held.values())) > HELD_MOST:
            self._held.clear()  # missing arrays are then sent again
        self._held |= received
        try:
            (answer,) = runtime.answer([(self.who.id, packet.message)])
        finally:
            runtime.forget()
        version = json.loads(answer.header)["body"].get("version", "")
        runtime.store.flush({self.who.id: version})  # before the server builds on it
        return self._sealed(ORDER, packet.run, answer)

    def _recall(self, run: str) -> ClientRuntime | None:
        """The runtime for a run that was agreed before this client was restarted."""
        path = self._folder_of(run) / "agreed.json"
        if not path.exists():
            return None
        self._tell(f"continuing run {run[:8]} where it stopped")
        return self._runtime_of(run, read_json(path, _AGREE_AGAIN))

    def _keep(self, id: ClientId, model: Weights, about: Mapping[str, Any]) -> None:
        """Write the client's final model when the run is over."""
        runtime = self._runtime
        assert runtime is not None
        population = runtime.plan.population
        own, _ = self._data_read[1]
        described = {
            **about,
            "run": self._run,
            "client": id,
            "name": self.who.name,
            "method": runtime.plan.method.name,
            "model": self._model,
            "classes": population.classes,
            "shape": population.shape,
            "features": own.features,
            "standardised": None
            if own.mean is None
            else {"mean": own.mean.tolist(), "std": own.std.tolist()},
            "written": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        metadata = {k: v if isinstance(v, str) else json.dumps(v) for k, v in described.items()}
        weights = to_safetensors(model.tensors(), metadata)
        text = json.dumps(described, indent=2).encode()
        try:
            for folder in (self._folder_of(self._run), self.folder):
                write_atomic(folder / "model.safetensors", weights, durable=True)
                write_atomic(folder / "model.json", text, durable=True)
        except OSError as error:
            raise RunDirError(f"client {id} cannot write its model: {error}") from error
        self.kept = self.folder / "model.safetensors"
        self._tell(f"the run is over: the model is in {self.kept}")
