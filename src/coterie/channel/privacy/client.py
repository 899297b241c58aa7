"""The client side of privacy: what may be asked of a client, and what it may show by itself.

A client follows the run's settings as it knows them itself, whatever the server says. What it does
in secure sums is in ``client_sums``, and the noise that it adds by itself in ``client_noise``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coterie.channel.compression.coding import change_of
from coterie.channel.privacy.entropy import Entropy
from coterie.channel.privacy.identity import Roster
from coterie.channel.privacy.record import Asked, Record
from coterie.channel.privacy.secagg import Rejected
from coterie.channel.privacy.settings import Privacy
from coterie.channel.wire import content_of
from coterie.core.messages import Array, ClientId, Upload
from coterie.core.method import Method
from coterie.core.tree import write_atomic
from coterie.core.weights import Layout, Weights
from coterie.errors import ConfigError, TrainingError

SESSIONS = "sessions"  # a folder beside the clients' states
NEGLIGIBLE = 0.1  # whoever counts less than this share of a slot's largest weight hides nobody
GRAIN = 1 << 16  # weights that are not 0 or 1 are whole numbers of this part
_NOISE = {"clip", "multiplier", "bits", "counts"}  # what a client can be told of noise


def changes(upload: Upload, received: Mapping[str, Array], method: str) -> dict[str, Array]:
    """The changes of an upload from what the client received, to which clipping applies.

    An array without such a reference is refused, because a bound on it would have no meaning.
    """
    found: dict[str, Array] = {}
    for name, array in upload.arrays.items():
        if name not in upload.delta_of:
            raise ConfigError(
                f"method {method} sends '{name}', which is not a change of anything it received: "
                "its size has no bound that noise could hide. Choose another method"
            )
        of = upload.delta_of[name]
        found[name] = change_of(array, received[of] if of else None)
    return found


def place_name(slot: object, by_examples: bool, weights: Mapping[ClientId, int]) -> str:
    """The name of a slot in the protocol, to which all keys are bound; it includes the weights.

    So a server that tells clients different weights, to single out one of them, gets no sum.
    """
    name = f"{slot!r}, {'by samples' if by_examples else 'each alike'}"
    told = ",".join(f"{c}:{w}" for c, w in sorted(weights.items()))
    digest = hashlib.sha256(told.encode()).hexdigest()
    return f"{name}, by weights {digest}" if weights else name


def negligible(weights: Mapping[ClientId, float]) -> list[ClientId]:
    """The clients whose weight is negligible compared with the largest one.

    None is allowed: a sum of many clients would then reveal the few that really count.

    >>> negligible({0: 5, 1: 4, 2: 0}), negligible({0: 1, 1: 1})
    ([2], [])
    """
    least = NEGLIGIBLE * max(weights.values())
    return sorted(c for c, w in weights.items() if w <= 0 or w < least)


def unequal(weights: Mapping[ClientId, float]) -> list[ClientId]:
    """The clients whose weight differs from the first one's; no real client may.

    Uploads are integers: if all clients but one count seven times, dividing the sum by seven leaves
    that client's upload as the remainder.

    >>> unequal({0: 7, 1: 7, 2: 6}), unequal({0: 2, 1: 2})
    ([2], [])
    """
    first = next(iter(weights.values()), None)
    return sorted(c for c, w in weights.items() if w != first)


def out_of(client: ClientId) -> str:
    """The message to a server when the reason may depend on the client's values."""
    return f"client {client} gives nothing to this sum; its log says more"


def run_name(method: str, seed: int) -> str:
    """The name of a run in the protocol, without what was agreed for it."""
    return f"{method} {seed}"


def agreed_name(run: str, agreement: str) -> str:
    """The name of a run with its agreement, so that clients with other terms are in no sum."""
    return f"{run}, as agreed in {agreement}" if agreement else run


def about(told: Mapping[str, Any], order: str) -> bytes:
    """What all clients in a sum must have been told identically, or they do not unmask it.

    Otherwise a server could send all clients but one a model of its own, or tell them to report
    other metrics or to add hardly any noise.
    """
    metrics, noise = told.get("metrics", []), told.get("noise", {})
    names = isinstance(metrics, list) and all(type(name) is str for name in metrics)
    known = isinstance(noise, Mapping) and set(noise) <= _NOISE
    if not (names and known and all(type(n) in (int, float) for n in noise.values())):
        raise Rejected("the metrics or the noise of a requested sum are invalid")
    same = {key: told[key] for key in ("metrics", "noise") if key in told} | {"order": order}
    return json.dumps(same, sort_keys=True).encode()


@dataclass(frozen=True)
class ClientTerms:
    """What all clients of one process know of the run themselves, whatever the server says.

    ``record`` is where a real client remembers what it has signed, ``agreement`` names what it was
    told of the run, and ``tell`` informs its owner alone.
    """

    privacy: Privacy
    seed: int
    folder: Path
    layout: Layout
    roster: Roster
    method: Method
    least_samples: int = 1
    record: Path | None = None
    agreement: str = ""
    tell: Callable[[str], None] = lambda _: None

    @property
    def entropy(self) -> Entropy:
        """The source of the clients' keys and noise."""
        return Entropy(self.privacy.randomness, self.seed)

    @property
    def real(self) -> bool:
        """Whether secrets are real, so that what a client gave must survive a power failure."""
        return self.entropy.kind == "system"

    def record_of(self, client: ClientId) -> Record:
        """The record of what a client has signed; in a simulation it belongs to the run."""
        if self.record is not None:
            return Record(self.record, client, lasting=True)
        return Record(self.folder / SESSIONS / str(client) / "signed.json", client)


@dataclass(frozen=True)
class ClientPrivacy:
    """Refuses orders and replies that would reveal more of a single client than it agreed to."""

    own: ClientTerms

    # --- before anything is done ----------------------------------------------------------------

    def begin(self, client: ClientId, body: Mapping[str, Any]) -> None:
        """Refuse an order, before it is carried out, if its answer would reveal a single client.

        Orders outside of sums must be for a task that the installed method declares. A real client
        records the order first: it carries out one order for each task in a round, so that a server
        can learn only once even whether it fails.
        """
        if not self.own.privacy.secure:
            return
        task, told = body["task"], body.get("beside")
        if told is None and task not in self.own.method.shows:
            raise ConfigError(
                f"method {self.own.method.name} asks each client by itself (task '{task}'); secure "
                "aggregation shows sums only. Choose a method that asks for means, or have it "
                "declare what single clients may answer (Method.shows)"
            )
        if self.own.record is None:
            return
        if told is not None and not {"slot", "chosen"} & told.keys():
            raise TrainingError(f"client {client} refuses an order whose result would be in no sum")
        if (
            told is not None and task in self.own.method.shows
        ):  # what it is asked alone may have prepared it
            raise TrainingError(
                f"client {client} answers task '{task}' only by itself, and not for a sum"
            )
        asked = Asked(body["round"], task, content_of(body["message"]), told is not None)
        state, name = str(body.get("expects", "")), str(body["order"])
        try:
            self.own.record_of(client).work(replace(asked, state=state, name=name))
        except Rejected as why:
            raise TrainingError(str(why)) from None

    def begin_score(self, client: ClientId, body: Mapping[str, Any], offers: int) -> None:
        """Refuse scores that would reveal more about a real client's training data.

        These are scores after local training, and scores of a model chosen by its training loss.
        """
        if self.own.record is None:
            return
        if offers > 1 and not self.own.method.chooses:
            raise TrainingError(
                f"client {client} was asked for the score of {offers} models at once"
            )
        record, config = self.own.record_of(client), body["config"]
        trains = {k: v for k, v in config.items() if k in ("alone", "adapt_epochs") and v}
        try:
            record.score()
            if not trains and offers <= 1:
                return
            if "message" not in body:
                raise Rejected(
                    f"client {client} does not train for a score that travels with another order"
                )
            name, state = f"score {' '.join(sorted(trains))}", str(body.get("expects", ""))
            record.work(Asked(body["round"], name, content_of(body["message"]), state=state))
        except Rejected as why:
            raise TrainingError(str(why)) from None

    # --- replies that are not summed ----------------------------------------------------------

    def may_fetch(self, client: ClientId) -> None:
        """Refuse to send the whole model of a client whose uploads are hidden."""
        if (
            self.own.privacy.secure
            or self.own.privacy.does("local")
            or self.own.privacy.does("nbafl")
        ):
            raise ConfigError(
                f"client {client} does not send its whole model, as even its uploads are hidden"
            )

    def may_show(self, client: ClientId, upload: Upload, task: str, order: str) -> None:
        """Refuse to reveal a single client's values under secure aggregation, with two exceptions.

        These are the final layer, if it may be revealed, and the metrics that the method declares.
        """
        privacy, method = self.own.privacy, self.own.method
        if not privacy.secure:
            return
        more = sorted(upload.metrics.keys() - set(method.shows.get(task, ())))
        if more:
            raise ConfigError(
                f"method {method.name} asks each client for '{more[0]}' by itself (task '{task}'), "
                "which it does not declare as shown; secure aggregation shows sums only"
            )
        if not upload.arrays:
            return
        asks = ", ".join(f"'{n}'" for n in upload.arrays)
        if privacy.reveal == "final-layer":
            for name, array in upload.arrays.items():
                if not isinstance(array, Weights) or array.layout.layers != (self._final_layer(),):
                    raise ConfigError(
                        f"method {method.name} asks each client for {asks} (task '{task}'), which "
                        f"is more than the final layer ({self._final_layer()}) that "
                        f"privacy.reveal lets through: '{name}' stays with the client"
                    )
            self._once(client, order)
            return
        raise ConfigError(
            f"method {method.name} asks each client for {asks} by itself (task '{task}'); secure "
            "aggregation shows sums only. Choose a method that asks for means"
        )

    def _final_layer(self) -> str:
        free = [e for e in self.own.layout.entries if e.kind == "parameter" and not e.local]
        return max(free, key=lambda e: e.place).layer

    def _once(self, client: ClientId, order: str) -> None:
        """Record that a client reveals values, which it does for one order only."""
        if self.own.record is not None:
            try:
                self.own.record_of(client).reveal(order)
            except Rejected as why:
                raise ConfigError(str(why)) from None
            return
        path = self.own.folder / SESSIONS / str(client) / "revealed"
        if path.exists() and path.read_text() != order:
            raise ConfigError(
                f"method {self.own.method.name} asks client {client} a second time for what "
                "privacy.reveal lets through once"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, order.encode(), durable=self.own.real)
