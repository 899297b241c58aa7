"""The client's half of secure sums: it keeps its upload, and lets it go masked, step by step.

The secrets of a sum are stored apart from the client's state, which the server can reset to an
earlier version: a step of the protocol is never done twice, except to repeat exactly the same
answer.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from coterie.channel.privacy.client import (
    GRAIN,
    SESSIONS,
    ClientTerms,
    about,
    agreed_name,
    changes,
    negligible,
    out_of,
    place_name,
    run_name,
    unequal,
)
from coterie.channel.privacy.client_noise import noised
from coterie.channel.privacy.encoding import Count, Floats, Form, contribution
from coterie.channel.privacy.entropy import Entropy
from coterie.channel.privacy.noise import fine_on_grid
from coterie.channel.privacy.record import Part, Remembered
from coterie.channel.privacy.secagg import Rejected, Session
from coterie.channel.privacy.settings import Privacy
from coterie.channel.wire import content_of, digest_of
from coterie.core.messages import Array, ClientId, Upload, vector_of
from coterie.core.tree import read_tree, write_tree
from coterie.core.weights import Weights
from coterie.errors import ConfigError, CoterieError, RunDirError, TrainingError

if TYPE_CHECKING:
    from coterie.channel.privacy.secagg import Member

_LONG = 200  # letters of a slot's name
_STEPS = {
    "keys": "share",
    "shares": "mask",
    "survivors": "confirm",
    "confirmations": "unmask",
}


@dataclass(frozen=True)
class ClientSums:
    """Carries out a client's part of secure sums."""

    own: ClientTerms

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
        own, told = self.own, body["beside"]
        slot = self._slot(client, upload, received, told)
        if slot is None:  # its work goes into no mean
            return Upload(), {}
        self._refuse_other_sums(client, upload, received, told)
        weights = self._weights(client, told)
        weighs = (weights.get(client, GRAIN), bool(told["by_examples"]))
        try:
            own.record_of(client).check(body["round"], repr(slot), weighs)
        except Rejected as why:
            raise TrainingError(str(why)) from None
        name = place_name(slot, told["by_examples"], weights)
        run = agreed_name(str(told["run"]), own.agreement)
        session = self._session(run, body["round"], told["attempt"], name)
        path, order = self._path(client, session.attempt), digest_of(body["message"])
        if path.exists():
            return self._repeated(client, path, order)
        member = self._joined(client, session)
        advert = _bytes(member.advertise())
        sent = changes(upload, received, own.method.name) if own.privacy.noised else upload.arrays
        beside: dict[str, Any] = {"slot": slot, "form": Form.of(sent, own.layout).to_tree()}
        if own.privacy.noised:
            beside["since"] = dict(upload.delta_of)
        else:
            beside["metrics"] = sorted(upload.metrics)
        kept = {
            "order": order,
            "advert": advert,
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
            "content": content_of(body["message"]) if own.privacy.same_orders else "",
            "examples": examples,
            "metrics": {k: float(v) for k, v in upload.metrics.items()},
            "step": "",
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.parent.chmod(0o700)  # nobody else reads secrets
        for old in path.parent.glob("*.session"):  # one sum at a time: what came before is over
            old.unlink(missing_ok=True)
        write_tree(path, kept, own.layout, durable=own.real)
        return Upload({"secure": advert}), beside

    def _slot(
        self,
        client: ClientId,
        upload: Upload,
        received: Mapping[str, Array],
        told: Mapping[str, Any],
    ) -> int | str | None:
        """The slot that the upload goes into, as told or chosen; None if it goes into no mean."""
        chooses = self.own.method.chooses
        if self.own.record is not None and chooses in upload.metrics and "chosen" not in told:
            raise ConfigError(
                f"client {client} chooses its slot itself, but the server assigned one: models of "
                "different slots do not go into one sum"
            )
        if "chosen" in told:
            return self._chosen(client, upload, received, told["chosen"])
        if "slot" not in told:
            return None
        slot: int | str = told["slot"]
        if type(slot) not in (int, str) or len(str(slot)) > _LONG:
            raise TrainingError(f"client {client} received an invalid slot")
        return slot

    def _repeated(self, client: ClientId, path: Path, order: str) -> tuple[Upload, dict[str, Any]]:
        """The same answer as before to the same order; any other order is refused."""
        kept = read_tree(path, self.own.layout)
        if kept["order"] != order:
            raise TrainingError(f"client {client} was asked a second time for the same sum")
        if "refused" in kept:
            raise TrainingError(kept["refused"])
        return Upload({"secure": kept["advert"]}), kept["beside"]

    def _joined(self, client: ClientId, session: Session) -> Member:
        """The client as a new member of a session."""
        from coterie.channel.privacy.secagg import Member

        own = self.own
        random = own.entropy.stream("keys", session.round, client, session.attempt)
        return Member(session, client, own.roster.private(client), own.roster, random)

    def _refuse_other_sums(
        self,
        client: ClientId,
        upload: Upload,
        received: Mapping[str, Array],
        told: Mapping[str, Any],
    ) -> None:
        """Refuse a real client's part of another run's sum, or one that would hide nobody."""
        own = self.own
        if own.record is None:
            return
        if told["run"] != run_name(own.method.name, own.seed):
            raise TrainingError(f"client {client} was asked for a sum of another run")
        if not own.privacy.noised:
            self._refuse_nothing(client, upload, received)

    def _refuse_nothing(
        self, client: ClientId, upload: Upload, received: Mapping[str, Array]
    ) -> None:
        """Refuse to contribute an unchanged model, which would not hide the other clients.

        Only parameters count, and only arrays that are changes from something received.
        """
        arrays = {n: a for n, a in upload.arrays.items() if n in upload.delta_of}
        moved = [
            m.parameters if isinstance(m, Weights) else vector_of(m)
            for m in changes(
                replace(upload, arrays=arrays), received, self.own.method.name
            ).values()
        ]
        least = 2.0 ** -(self.own.privacy.bits + 1)
        if moved and not any((m.abs() >= least).any() for m in moved):
            self.own.tell(f"client {client} has nothing to add to a sum: its model did not move")
            raise TrainingError(out_of(client))

    def _weights(self, client: ClientId, told: Mapping[str, Any]) -> dict[ClientId, int]:
        """The weights of all clients as told to this client; empty if all count equally.

        They must be integers, since a fraction could remove this client's part from the sum, and
        none may be so small, or for real clients so different, that it singles a client out.
        """
        weights = told.get("weights", {})
        if type(told["by_examples"]) is not bool or not isinstance(weights, Mapping):
            raise TrainingError(f"client {client} did not receive valid weights of the clients")
        if weights and client not in weights:
            raise TrainingError(f"client {client} was told everybody's weight but its own")
        for other, weight in weights.items():
            if other not in self.own.roster or type(weight) is not int or abs(weight) >= 1 << 31:
                raise TrainingError(
                    f"client {client} received the weight {weight} for client {other}: weights "
                    "must be whole numbers, and of known clients"
                )
        singled = f"method {self.own.method.name} asks client {client} for its part of a mean "
        singled += "with weights that single clients out: client"
        if weights and (light := negligible(weights)):
            raise ConfigError(f"{singled} {light[0]} hardly counts")
        if self.own.record is not None and (others := unequal(weights)):
            raise ConfigError(f"{singled} {others[0]} has another weight than the others")
        return dict(weights)

    def _chosen(
        self, client: ClientId, upload: Upload, received: Mapping[str, Array], metric: object
    ) -> int:
        """The slot that this client has chosen, an index among the models that it received.

        Any other metric that a server names could carry a value out of the client, past the sum.
        """
        if not self.own.method.chooses or metric != self.own.method.chooses:
            raise ConfigError(
                f"client {client} was asked to name its slot by '{metric}', but clients "
                f"of method {self.own.method.name} do not choose it by this metric"
            )
        names = {name for name, array in received.items() if isinstance(array, Weights)}
        if names != {str(i) for i in range(len(names))}:
            raise ConfigError(
                f"client {client} received models that are not named by their numbers"
            )
        found = upload.metrics.get(self.own.method.chooses, math.nan)
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
            kept = read_tree(path, self.own.layout)
        except RunDirError:
            return Upload(), {"refused": f"client {client} knows nothing of this sum"}
        if "refused" in kept:
            return Upload(), {"refused": kept["refused"]}
        if kept["step"] == digest:
            return Upload({"secure": kept["reply"]}), {"slot": kept["slot"]}
        random = self.own.entropy.stream("shares", kept["round"], client, told["attempt"])
        member = Member.from_bytes(kept["member"].numpy().tobytes(), self.own.roster, random)
        try:
            if told["step"] == "shares":
                given = self._masked(client, kept, told, member)
                sent = member.mask(said, given, about(told, kept["content"]))
                # The upload is hidden in the sum now, and needed no more.
                kept |= {"arrays": {}, "metrics": {}}
            elif told["step"] not in _STEPS:
                raise Rejected(f"client {client} was asked for an unknown step")
            else:
                sent = getattr(member, _STEPS[told["step"]])(said)
            if told["step"] == "survivors":
                self.own.record_of(client).sign(kept["round"], member.survivors, told["attempt"])
            reply = Upload({"secure": _bytes(sent)}), {"slot": kept["slot"]}
            kept |= {"step": digest, "reply": _bytes(sent)}
        except Exception as why:
            # It ends here: nothing of it is answered any more, and its secrets are gone.
            text = str(why) if isinstance(why, Rejected | CoterieError) else "it makes no sense"
            hidden = told["step"] == "shares" and not isinstance(why, Remembered)
            if self.own.record is not None and hidden:
                # Why is for its owner: it may be the values themselves.
                self.own.tell(text)
                text = out_of(client)
            over = {"refused": text, "order": kept["order"]}
            write_tree(path, over, self.own.layout, durable=self.own.real)
            if isinstance(why, Rejected) or self.own.record is not None:
                return Upload(), {"refused": text}
            raise
        kept["member"] = _bytes(member.to_bytes())
        write_tree(path, kept, self.own.layout, durable=self.own.real)
        return reply

    def _masked(
        self, client: ClientId, kept: Mapping[str, Any], told: Mapping[str, Any], member: Member
    ) -> Callable[[], np.ndarray[Any, Any]]:
        """What makes the vector that goes into the sum, once it is recorded that it does."""
        numbers = {n for n, value in kept["metrics"].items() if math.isfinite(value)}
        missing = set(told.get("metrics", ())) - numbers
        if self.own.record is not None and missing and not self.own.privacy.noised:
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
            self.own.record_of(client).give(part, self.own.method.sums)
            return self._values(client, kept, told, member)

        return given

    def _what(self, kept: Mapping[str, Any], told: Mapping[str, Any]) -> str:
        """A digest of what this client contributes to a sum: its upload, and what it was asked.

        The upload may depend on the client's state, whose version the server chooses.
        """
        form = Form.of(kept["arrays"], self.own.layout)
        digest = hashlib.sha256(repr(kept["slot"]).encode() + about(told, kept["asked"]))
        digest.update(form.flat(kept["arrays"]).tobytes())
        digest.update(json.dumps(sorted(kept["metrics"].items())).encode())
        return digest.hexdigest()

    def _session(self, run: str, round: int, attempt: str, slot: str) -> Session:
        """A session with this client's own settings, whatever the server says."""
        own = self.own.privacy
        return Session(run, round, attempt, slot, own.threshold, own.neighbours, own.min_group)

    def _values(
        self,
        client: ClientId,
        kept: Mapping[str, Any],
        told: Mapping[str, Any],
        member: Member,
    ) -> np.ndarray[Any, Any]:
        """The vector that a client adds to its sum."""
        form = Form.of(kept["arrays"], self.own.layout)
        flat = form.flat(kept["arrays"])
        if not self.own.privacy.noised:
            return contribution(
                flat,
                kept["examples"],
                kept["metrics"],
                told["metrics"],
                Count(*kept["count"]),
                self.own.privacy.bits,
                member.members,
            )
        noise = told.get("noise", {})
        if not enough(noise, self.own.privacy):
            raise ConfigError(
                f"client {client} was told to add less noise than the run's settings ask for"
            )
        stay = max(self._session("", 0, "", "").enough(member.members), self.own.privacy.min_group)
        sigma = noise["multiplier"] * noise["clip"] * 2.0**self.own.privacy.bits
        if self.own.record is not None and not fine_on_grid(sigma, stay, len(flat)):
            raise ConfigError(
                f"client {client} was told to add its share of {sigma:.3g} grid steps of noise, "
                "which is too coarse to count as Gaussian"
            )
        share = 1 / np.sqrt(stay)  # enough if no more remain
        random = self._noise_of_sum(client, kept, told, flat, member)
        return noised(flat, noise, self.own.privacy.bits, share, random)

    def _noise_of_sum(
        self,
        client: ClientId,
        kept: Mapping[str, Any],
        told: Mapping[str, Any],
        flat: Floats,
        member: Member,
    ) -> Any:
        """The source of a sum's noise, which is the same if the same sum is requested again.

        Otherwise a server could average the noise away by repeated requests. In another run or with
        other members the noise differs, since equal noise would cancel in a difference of two sums.
        """
        if not self.own.real:
            return self.own.entropy.stream("noise", kept["round"], client)
        asked = hashlib.sha256(about(told, kept["asked"])).hexdigest()
        upload = hashlib.sha256(flat.tobytes()).hexdigest()
        secret = self.own.roster.private(client).hex()
        with_whom = f"{member.run} {member.members} {member.shared}"
        return Entropy("simulated").stream(secret, "noise", kept["round"], asked, upload, with_whom)

    def _path(self, client: ClientId, attempt: str) -> Path:
        if not attempt.isalnum():
            raise TrainingError(f"client {client}: '{attempt}' names no attempt")
        return self.own.folder / SESSIONS / str(client) / f"{attempt}.session"


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def enough(noise: Mapping[str, float], privacy: Privacy) -> bool:
    """Whether the noise on changes and bits together is at least that of the settings."""
    multiplier, bits = noise.get("multiplier", 0.0), noise.get("bits", 0.0)
    if multiplier <= 0 or (bits and privacy.follows is None):
        return False
    spent = multiplier**-2 + ((2 * bits) ** -2 if bits else 0.0)
    return bool(spent <= (privacy.noise or 0.0) ** -2 * (1 + 1e-9))
