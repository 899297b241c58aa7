"""The client side of privacy: what is done to an upload before any of it leaves the client.

A client follows the run's settings as it knows them itself, whatever the server says. The secrets
of a secure sum are stored apart from the client's state, which the server can reset to an earlier
version: a step of the protocol is never done twice, except to repeat exactly the same answer.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie.channel.compression.coding import change_of, laid_on
from coterie.channel.privacy.encoding import Count, Floats, Form, Integers, contribution
from coterie.channel.privacy.entropy import Entropy
from coterie.channel.privacy.identity import Roster
from coterie.channel.privacy.nbafl import clip_weights, uplink_sigma
from coterie.channel.privacy.noise import centred, clipped, discrete_gaussian, fine_on_grid
from coterie.channel.privacy.record import Asked, Part, Record, Remembered
from coterie.channel.privacy.secagg import Rejected, Session
from coterie.channel.privacy.settings import Privacy
from coterie.channel.wire import content_of, digest_of
from coterie.core.messages import Array, ClientId, Upload, vector_of
from coterie.core.tree import read_tree, write_atomic, write_tree
from coterie.core.weights import Layout, Weights
from coterie.errors import ConfigError, CoterieError, RunDirError, TrainingError

SESSIONS = "sessions"  # a folder beside the clients' states
NEGLIGIBLE = 0.1  # whoever counts less than this share of a slot's largest weight hides nobody
GRAIN = 1 << 16  # weights that are not 0 or 1 are whole numbers of this part
_LONG = 200  # letters of a slot's name
_NOISE = {"clip", "multiplier", "bits", "counts"}  # what a client can be told of noise
BIT = 1 << 8  # grid steps of a bit's half, so that its noise is fine enough
_STEPS = {
    "keys": "share",
    "shares": "mask",
    "survivors": "confirm",
    "confirmations": "unmask",
}


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
class ClientPrivacy:
    """The client side of privacy, for all clients of one process."""

    privacy: Privacy
    seed: int
    folder: Path
    layout: Layout
    roster: Roster
    method: str = ""
    least_samples: int = 1
    chooses: str = ""  # the metric in which clients of this method name their slot
    sums: int = 1  # different sums that this method may ask for in a round
    record: Path | None = None  # where a real client remembers what it has signed
    agreement: str = ""  # a name for what a real client was told of the run
    shows: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # as in ``Method``
    tell: Callable[[str], None] = lambda _: None  # what only this client's owner is to know

    @property
    def entropy(self) -> Entropy:
        """The source of the clients' keys and noise."""
        return Entropy(self.privacy.randomness, self.seed)

    # --- before anything is done ----------------------------------------------------------------

    def begin(self, client: ClientId, body: Mapping[str, Any]) -> None:
        """Refuse an order, before it is carried out, if its answer would reveal a single client.

        Orders outside of sums must be for a task that the installed method declares. A real client
        records the order first: it carries out one order for each task in a round, so that a server
        can learn only once even whether it fails.
        """
        if not self.privacy.secure:
            return
        task, told = body["task"], body.get("beside")
        if told is None and task not in self.shows:
            raise ConfigError(
                f"method {self.method} asks each client by itself (task '{task}'); secure "
                "aggregation shows sums only. Choose a method that asks for means, or have it "
                "declare what single clients may answer (Method.shows)"
            )
        if self.record is None:
            return
        if told is not None and not {"slot", "chosen"} & told.keys():
            raise TrainingError(f"client {client} refuses an order whose result would be in no sum")
        if told is not None and task in self.shows:  # what it is asked alone may have prepared it
            raise TrainingError(
                f"client {client} answers task '{task}' only by itself, and not for a sum"
            )
        asked = Asked(body["round"], task, content_of(body["message"]), told is not None)
        state, name = str(body.get("expects", "")), str(body["order"])
        try:
            self._record(client).work(replace(asked, state=state, name=name))
        except Rejected as why:
            raise TrainingError(str(why)) from None

    def begin_score(self, client: ClientId, body: Mapping[str, Any], offers: int) -> None:
        """Refuse scores that would reveal more about a real client's training data.

        These are scores after local training, and scores of a model chosen by its training loss.
        """
        if self.record is None:
            return
        if offers > 1 and not self.chooses:
            raise TrainingError(
                f"client {client} was asked for the score of {offers} models at once"
            )
        record, config = self._record(client), body["config"]
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
        if self.privacy.secure or self.privacy.does("local") or self.privacy.does("nbafl"):
            raise ConfigError(
                f"client {client} does not send its whole model, as even its uploads are hidden"
            )

    def may_show(self, client: ClientId, upload: Upload, task: str, order: str) -> None:
        """Refuse to reveal a single client's values under secure aggregation, with two exceptions.

        These are the final layer, if it may be revealed, and the metrics that the method declares.
        """
        if not self.privacy.secure:
            return
        more = sorted(upload.metrics.keys() - set(self.shows.get(task, ())))
        if more:
            raise ConfigError(
                f"method {self.method} asks each client for '{more[0]}' by itself (task '{task}'), "
                "which it does not declare as shown; secure aggregation shows sums only"
            )
        if not upload.arrays:
            return
        asks = ", ".join(f"'{n}'" for n in upload.arrays)
        if self.privacy.reveal == "final-layer":
            for name, array in upload.arrays.items():
                if not isinstance(array, Weights) or array.layout.layers != (self._final_layer(),):
                    raise ConfigError(
                        f"method {self.method} asks each client for {asks} (task '{task}'), which "
                        f"is more than the final layer ({self._final_layer()}) that "
                        f"privacy.reveal lets through: '{name}' stays with the client"
                    )
            self._once(client, order)
            return
        raise ConfigError(
            f"method {self.method} asks each client for {asks} by itself (task '{task}'); secure "
            "aggregation shows sums only. Choose a method that asks for means"
        )

    def _final_layer(self) -> str:
        free = [e for e in self.layout.entries if e.kind == "parameter" and not e.local]
        return max(free, key=lambda e: e.place).layer

    @property
    def _real(self) -> bool:
        """Whether secrets are real, so that what a client gave must survive a power failure."""
        return self.entropy.kind == "system"

    def _once(self, client: ClientId, order: str) -> None:
        """Record that a client reveals values, which it does for one order only."""
        if self.record is not None:
            try:
                self._record(client).reveal(order)
            except Rejected as why:
                raise ConfigError(str(why)) from None
            return
        path = self.folder / SESSIONS / str(client) / "revealed"
        if path.exists() and path.read_text() != order:
            raise ConfigError(
                f"method {self.method} asks client {client} a second time for what privacy.reveal "
                "lets through once"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, order.encode(), durable=self._real)

    # --- sums ---------------------------------------------------------------------------------

    def advertise(
        self,
        client: ClientId,
        examples: int,
        upload: Upload,
        received: Mapping[str, Array],
        body: Mapping[str, Any],
    ) -> tuple[Upload, dict[str, Any]]:
        """Store the upload for a sum, and send only keys and the form of the upload for now.

        ``body["leaves"]`` is the version of the client's state that the order leaves behind.
        """
        told = body["beside"]
        if self.record is not None and self.chooses in upload.metrics and "chosen" not in told:
            raise ConfigError(
                f"client {client} chooses its slot itself, but the server assigned one: models of "
                "different slots do not go into one sum"
            )
        if "chosen" in told:
            slot: Any = self._chosen(client, upload, received, told["chosen"])
        elif "slot" in told:
            slot = told["slot"]
        else:  # its work goes into no mean
            return Upload(), {}
        if type(slot) not in (int, str) or len(str(slot)) > _LONG:
            raise TrainingError(f"client {client} received an invalid slot")
        from coterie.channel.privacy.secagg import Member

        if self.record is not None and told["run"] != run_name(self.method, self.seed):
            raise TrainingError(f"client {client} was asked for a sum of another run")
        if self.record is not None and not self.privacy.noised:
            self._refuse_nothing(client, upload, received)
        weights = self._weights(client, told)
        if weights and (light := negligible(weights)):
            raise ConfigError(
                f"method {self.method} asks client {client} for its part of a mean with weights "
                f"that single clients out: client {light[0]} hardly counts"
            )
        if self.record is not None and (others := unequal(weights)):
            raise ConfigError(
                f"method {self.method} asks client {client} for its part of a mean with weights "
                f"that single clients out: client {others[0]} has another weight than the others"
            )
        weighs = (weights.get(client, GRAIN), bool(told["by_examples"]))
        try:
            self._record(client).check(body["round"], repr(slot), weighs)
        except Rejected as why:
            raise TrainingError(str(why)) from None
        name = place_name(slot, told["by_examples"], weights)
        run = agreed_name(str(told["run"]), self.agreement)
        session = self._session(run, body["round"], told["attempt"], name)
        path, order = self._path(client, session.attempt), digest_of(body["message"])
        if path.exists():
            kept = read_tree(path, self.layout)
            if kept["order"] != order:
                raise TrainingError(f"client {client} was asked a second time for the same sum")
            if "refused" in kept:
                raise TrainingError(kept["refused"])
            return Upload({"secure": kept["advert"]}), kept["beside"]
        random = self.entropy.stream("keys", session.round, client, session.attempt)
        member = Member(session, client, self.roster.private(client), self.roster, random)
        advert = member.advertise()
        sent = changes(upload, received, self.method) if self.privacy.noised else upload.arrays
        form = Form.of(sent, self.layout)
        beside: dict[str, Any] = {"slot": slot, "form": form.to_tree()}
        if self.privacy.noised:
            beside["since"] = dict(upload.delta_of)
        else:
            beside["metrics"] = sorted(upload.metrics)
        kept = {
            "order": order,
            "advert": _bytes(advert),
            "beside": beside,
            "member": _bytes(member.to_bytes()),
            "round": session.round,
            "slot": slot,
            "count": (weights.get(client, 1), told["by_examples"]),
            "weighs": weighs,
            "weights": weights,
            "leaves": str(body.get("leaves", "")),
            "arrays": dict(sent),
            "asked": content_of(body["message"]),
            "content": content_of(body["message"]) if self.privacy.same_orders else "",
            "examples": examples,
            "metrics": {k: float(v) for k, v in upload.metrics.items()},
            "step": "",
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.parent.chmod(0o700)  # nobody else reads secrets
        for old in path.parent.glob("*.session"):  # one sum at a time: what came before is over
            old.unlink(missing_ok=True)
        write_tree(path, kept, self.layout, durable=self._real)
        return Upload({"secure": _bytes(advert)}), beside

    def _refuse_nothing(
        self, client: ClientId, upload: Upload, received: Mapping[str, Array]
    ) -> None:
        """Refuse to contribute an unchanged model, which would not hide the other clients.

        Only parameters count, and only arrays that are changes from something received.
        """
        arrays = {n: a for n, a in upload.arrays.items() if n in upload.delta_of}
        moved = [
            m.parameters if isinstance(m, Weights) else vector_of(m)
            for m in changes(replace(upload, arrays=arrays), received, self.method).values()
        ]
        least = 2.0 ** -(self.privacy.bits + 1)
        if moved and not any((m.abs() >= least).any() for m in moved):
            self.tell(f"client {client} has nothing to add to a sum: its model did not move")
            raise TrainingError(out_of(client))

    def _weights(self, client: ClientId, told: Mapping[str, Any]) -> dict[ClientId, int]:
        """The weights of all clients as told to this client; empty if all count equally.

        They must be integers, since a fraction could remove this client's part from the sum.
        """
        weights = told.get("weights", {})
        if type(told["by_examples"]) is not bool or not isinstance(weights, Mapping):
            raise TrainingError(f"client {client} did not receive valid weights of the clients")
        if weights and client not in weights:
            raise TrainingError(f"client {client} was told everybody's weight but its own")
        for other, weight in weights.items():
            if other not in self.roster or type(weight) is not int or abs(weight) >= 1 << 31:
                raise TrainingError(
                    f"client {client} received the weight {weight} for client {other}: weights "
                    "must be whole numbers, and of known clients"
                )
        return dict(weights)

    def _chosen(
        self, client: ClientId, upload: Upload, received: Mapping[str, Array], metric: object
    ) -> int:
        """The slot that this client has chosen, an index among the models that it received.

        Any other metric that a server names could carry a value out of the client, past the sum.
        """
        if not self.chooses or metric != self.chooses:
            raise ConfigError(
                f"client {client} was asked to name its slot by '{metric}', but clients "
                f"of method {self.method} do not choose it by this metric"
            )
        names = {name for name, array in received.items() if isinstance(array, Weights)}
        if names != {str(i) for i in range(len(names))}:
            raise ConfigError(
                f"client {client} received models that are not named by their numbers"
            )
        found = upload.metrics.get(self.chooses, math.nan)
        if found not in range(max(1, len(received))):
            raise TrainingError(f"client {client} has chosen slot {found} of {len(received)}")
        return int(found)

    def step(self, client: ClientId, body: Mapping[str, Any]) -> tuple[Upload, dict[str, Any]]:
        """Carry out one step of the protocol; a client that refuses says why and leaves the sum."""
        from coterie.channel.privacy.secagg import Member

        told, said = body["beside"], bytes(body["arrays"]["secure"].numpy())
        path = self._path(client, told["attempt"])
        digest = hashlib.sha256(said + repr(sorted(told.items())).encode()).hexdigest()
        try:
            kept = read_tree(path, self.layout)
        except RunDirError:
            return Upload(), {"refused": f"client {client} knows nothing of this sum"}
        if "refused" in kept:
            return Upload(), {"refused": kept["refused"]}
        if kept["step"] == digest:
            return Upload({"secure": kept["reply"]}), {"slot": kept["slot"]}
        random = self.entropy.stream("shares", kept["round"], client, told["attempt"])
        member = Member.from_bytes(kept["member"].numpy().tobytes(), self.roster, random)
        try:
            if told["step"] == "shares":
                numbers = {n for n, value in kept["metrics"].items() if math.isfinite(value)}
                missing = set(told.get("metrics", ())) - numbers
                if self.record is not None and missing and not self.privacy.noised:
                    raise Rejected(
                        f"client {client} was asked for a sum of '{min(missing)}', which it does "
                        "not report: the sum would be over fewer clients"
                    )

                def given() -> np.ndarray[Any, Any]:
                    # Others can unmask a sum without this client's signature, so what goes into it
                    # is remembered now, before anything depends on the values.
                    counts = {c: kept["weights"].get(c, GRAIN) for c in member.shared}
                    what, slot = self._what(kept, told), repr(kept["slot"])
                    part = Part(kept["round"], what, slot, kept["weighs"], counts, told["attempt"])
                    part = replace(part, leaves=kept["leaves"])
                    self._record(client).give(part, self.sums)
                    return self._values(client, kept, told, member)

                sent = member.mask(said, given, about(told, kept["content"]))
                # The upload is hidden in the sum now, and needed no more.
                kept |= {"arrays": {}, "metrics": {}}
            elif told["step"] not in _STEPS:
                raise Rejected(f"client {client} was asked for an unknown step")
            else:
                sent = getattr(member, _STEPS[told["step"]])(said)
            if told["step"] == "survivors":
                self._record(client).sign(kept["round"], member.survivors, told["attempt"])
            reply = Upload({"secure": _bytes(sent)}), {"slot": kept["slot"]}
            kept |= {"step": digest, "reply": _bytes(sent)}
        except Exception as why:
            # It ends here: nothing of it is answered any more, and its secrets are gone.
            text = str(why) if isinstance(why, Rejected | CoterieError) else "it makes no sense"
            hidden = told["step"] == "shares" and not isinstance(why, Remembered)
            if self.record is not None and hidden:
                # Why is for its owner: it may be the values themselves.
                self.tell(text)
                text = out_of(client)
            over = {"refused": text, "order": kept["order"]}
            write_tree(path, over, self.layout, durable=self._real)
            if isinstance(why, Rejected) or self.record is not None:
                return Upload(), {"refused": text}
            raise
        kept["member"] = _bytes(member.to_bytes())
        write_tree(path, kept, self.layout, durable=self._real)
        return reply

    def _record(self, client: ClientId) -> Record:
        """The record of what this client has signed; in a simulation it belongs to the run."""
        if self.record is not None:
            return Record(self.record, client, lasting=True)
        return Record(self.folder / SESSIONS / str(client) / "signed.json", client)

    def _what(self, kept: Mapping[str, Any], told: Mapping[str, Any]) -> str:
        """A digest of what this client contributes to a sum: its upload, and what it was asked.

        The upload may depend on the client's state, whose version the server chooses.
        """
        form = Form.of(kept["arrays"], self.layout)
        digest = hashlib.sha256(repr(kept["slot"]).encode() + about(told, kept["asked"]))
        digest.update(form.flat(kept["arrays"]).tobytes())
        digest.update(json.dumps(sorted(kept["metrics"].items())).encode())
        return digest.hexdigest()

    def _session(self, run: str, round: int, attempt: str, slot: str) -> Session:
        """A session with this client's own settings, whatever the server says."""
        own = self.privacy
        return Session(run, round, attempt, slot, own.threshold, own.neighbours, own.min_group)

    def _values(
        self,
        client: ClientId,
        kept: Mapping[str, Any],
        told: Mapping[str, Any],
        member: Any,
    ) -> np.ndarray[Any, Any]:
        """The vector that a client adds to its sum."""
        form = Form.of(kept["arrays"], self.layout)
        flat = form.flat(kept["arrays"])
        if not self.privacy.noised:
            return contribution(
                flat,
                kept["examples"],
                kept["metrics"],
                told["metrics"],
                Count(*kept["count"]),
                self.privacy.bits,
                member.members,
            )
        noise = told.get("noise", {})
        if not self._enough(noise):
            raise ConfigError(
                f"client {client} was told to add less noise than the run's settings ask for"
            )
        stay = max(self._session("", 0, "", "").enough(member.members), self.privacy.min_group)
        sigma = noise["multiplier"] * noise["clip"] * 2.0**self.privacy.bits
        if self.record is not None and not fine_on_grid(sigma, stay, len(flat)):
            raise ConfigError(
                f"client {client} was told to add its share of {sigma:.3g} grid steps of noise, "
                "which is too coarse to count as Gaussian"
            )
        share = 1 / np.sqrt(stay)  # enough if no more remain
        random = self._noise_of_sum(client, kept, told, flat, member)
        return noised(flat, noise, self.privacy.bits, share, random)

    def _noise_of_sum(
        self,
        client: ClientId,
        kept: Mapping[str, Any],
        told: Mapping[str, Any],
        flat: Floats,
        member: Any,
    ) -> Any:
        """The source of a sum's noise, which is the same if the same sum is requested again.

        Otherwise a server could average the noise away by repeated requests. In another run or with
        other members the noise differs, since equal noise would cancel in a difference of two sums.
        """
        if not self._real:
            return self.entropy.stream("noise", kept["round"], client)
        asked = hashlib.sha256(about(told, kept["asked"])).hexdigest()
        upload = hashlib.sha256(flat.tobytes()).hexdigest()
        secret = self.roster.private(client).hex()
        with_whom = f"{member.run} {member.members} {member.shared}"
        return Entropy("simulated").stream(secret, "noise", kept["round"], asked, upload, with_whom)

    def _enough(self, noise: Mapping[str, float]) -> bool:
        """Whether the noise on changes and bits together is at least that of the settings."""
        multiplier, bits = noise.get("multiplier", 0.0), noise.get("bits", 0.0)
        if multiplier <= 0 or (bits and self.privacy.follows is None):
            return False
        spent = multiplier**-2 + ((2 * bits) ** -2 if bits else 0.0)
        return bool(spent <= (self.privacy.noise or 0.0) ** -2 * (1 + 1e-9))

    def _path(self, client: ClientId, attempt: str) -> Path:
        if not attempt.isalnum():
            raise TrainingError(f"client {client}: '{attempt}' names no attempt")
        return self.folder / SESSIONS / str(client) / f"{attempt}.session"

    # --- local noise --------------------------------------------------------------------------

    def disturbed(
        self,
        client: ClientId,
        upload: Upload,
        received: Mapping[str, Array],
        body: Mapping[str, Any],
    ) -> Upload:
        """Clip an upload and add local noise to it.

        Its change is clipped or, by NbAFL's rules, the model itself. No metrics are sent with it.
        """
        if not upload.arrays:
            return replace(upload, metrics={})
        form = Form.of(upload.arrays, self.layout)
        bits = self.privacy.bits
        if self.privacy.mechanism == "nbafl":
            whole, sigma = self._nbafl(form.flat(upload.arrays))
            noise = self._local_noise(client, body, whole, sigma)
            return Upload(form.arrays(np.ldexp((whole + noise).astype(np.float64), -bits)))
        base = {n: received[of] for n, of in upload.delta_of.items() if of}
        own = {n: change_of(a, base.get(n)) for n, a in upload.arrays.items()}
        whole, _ = clipped(form.flat(own), self.privacy.clip, bits)
        sigma = (self.privacy.noise or 0.0) * self.privacy.clip * 2.0**bits
        whole = whole + self._local_noise(client, body, whole, sigma)
        back = form.arrays(np.ldexp(whole.astype(np.float64), -bits))
        sent = {n: laid_on(a, base.get(n)) for n, a in back.items()}
        return Upload(sent, {}, upload.delta_of)

    def _local_noise(
        self, client: ClientId, body: Mapping[str, Any], whole: Integers, sigma: float
    ) -> Integers:
        """Draw noise that is the same for the same order and upload, and different for all others.

        So repeated requests do not average the noise away, and other uploads, such as from an
        earlier state, do not share it, since their difference would then have no noise.
        """
        name = f"{digest_of(body['message'])} {hashlib.sha256(whole.tobytes()).hexdigest()}"
        if self.privacy.randomness == "simulated":
            random = self.entropy.stream("local noise", client, name)
        else:
            random = Entropy("simulated").stream(self.roster.private(client).hex(), name)
        return discrete_gaussian(sigma, len(whole), random)

    def _nbafl(self, flat: Floats) -> tuple[Integers, float]:
        """A clipped model on the grid, and the standard deviation of its noise."""
        own, bits = self.privacy, self.privacy.bits
        assert own.epsilon is not None
        assert own.delta is not None
        assert own.exposures is not None
        kept = np.rint(np.ldexp(clip_weights(flat, own.clip), bits)).astype(np.int64)
        sigma = uplink_sigma(own.clip, self.least_samples, own.epsilon, own.delta, own.exposures)
        return kept, sigma * 2.0**bits


def noised(
    flat: np.ndarray[Any, Any],
    noise: Mapping[str, float],
    bits: int,
    share: float,
    random: Any,
) -> np.ndarray[Any, Any]:
    """Clip a change, round it to the grid, and append its bit; add a share of the noise to each."""
    bound = noise["clip"]
    whole, norm = clipped(flat, bound, bits)
    sigma = share * noise["multiplier"] * bound * 2.0**bits
    bit = round(centred(norm, bound) * 2 * BIT) if noise["bits"] else 0  # else nobody asks for it
    bit += int(discrete_gaussian(share * noise["bits"] * 2 * BIT, 1, random)[0])
    return np.append(whole + discrete_gaussian(sigma, len(whole), random), bit)


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
