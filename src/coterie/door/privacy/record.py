"""What a client has signed: the sums of each round, kept for as long as its key.

Whoever gets the sum of five uploads and the sum of four of them has the fifth. So all sums that a
client signs in one round count as sums of one vector: they must be of the same clients, each
counted alike, and no more than the method declares. The record outlives a run: a server names runs
as it likes, so a client enters another one only after its owner has asked for that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.door.privacy.secagg import Rejected
from coterie.errors import RunDirError
from coterie.federation import ClientId
from coterie.tree import write_atomic

_KEPT = 200  # rounds that a simulation can go back by


@dataclass(frozen=True)
class Signature:
    """What a client is about to sign: in which round, whose sum, of what, and how each counts.

    ``what`` is a digest of the order and of what was asked of its result; ``weighs`` is this
    client's weight, and whether samples count on top of that; ``counts`` is each survivor's weight.
    """

    round: int
    what: str
    slot: str
    weighs: tuple[int, bool]
    counts: Mapping[ClientId, int]

    @property
    def survivors(self) -> list[ClientId]:
        """Whose uploads are in the sum."""
        return sorted(self.counts)

    @property
    def row(self) -> str:
        """A digest of how everybody counts."""
        told = [self.weighs[1], sorted(self.counts.items())]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()


@dataclass
class Record:
    """The sums that one client has signed, in a file of its own.

    A real client (``lasting``) never signs in a round before the last one it signed in, and takes
    part in a new run only once its owner has ``permitted`` one. In a simulation the server is the
    owner: a run may go back to its last checkpoint, where the same sums can be made again.
    """

    path: Path
    client: ClientId
    lasting: bool = False

    @staticmethod
    def name_for(public: bytes) -> str:
        """The name of the record of the client with this public key."""
        return f"signed-{hashlib.sha256(public).hexdigest()[:16]}.json"

    # --- runs -----------------------------------------------------------------------------------

    def permit(self) -> None:
        """The owner of this client lets it take part in one more run."""
        self._write({**self._read(), "permitted": True})

    def enter(self, run: str) -> None:
        """Take part in this run; ``Rejected`` if that takes the owner's word, and there is none.

        A run in which nothing was signed gives way to another: it has learned nothing.
        """
        kept = self._read()
        if run == kept["run"]:
            return
        if run in kept["left"]:
            raise Rejected(
                f"client {self.client} has left run {run[:8]} for another: it does not go back"
            )
        if kept["permitted"]:
            kept["permitted"] = False
        elif kept["rounds"] or not kept["run"]:
            before = f"sums of run {kept['run'][:8]}" if kept["run"] else "nothing yet"
            raise Rejected(
                f"client {self.client} has signed {before}, and takes part in a new run only when "
                "its owner starts `coterie join` again"
            )
        left = [*kept["left"], kept["run"]] if kept["rounds"] else kept["left"]
        self._write({**kept, "left": left, "run": run, "rounds": {}, "weights": {}})

    # --- sums -----------------------------------------------------------------------------------

    def check(self, round: int, slot: str, weighs: tuple[int, bool]) -> None:
        """Refuse to work for a sum of a round that is over, or in which this client counts anew.

        ``weighs`` is its weight, and whether its samples count on top of that.
        """
        kept = self._read()
        last = max(map(int, kept["rounds"]), default=-1)
        if self.lasting and round < last:
            raise Rejected(
                f"client {self.client} has signed in round {last + 1}, and signs in none before it"
            )
        if kept["weights"].get(slot, [*weighs]) != [*weighs]:
            raise Rejected(
                f"client {self.client} counted otherwise in slot {slot} before: its weight in a "
                "slot is the same for the whole run"
            )

    def check_sum(self, round: int, what: str, most: int, members: Collection[ClientId]) -> None:
        """Refuse to give values to a sum that would not be signed, whoever of these survives.

        ``most`` is how many different sums the method may ask for in a round.
        """
        before = self._read()["rounds"].get(str(round))
        if before is None:
            return
        if what not in before["sums"] and len(before["sums"]) >= most:
            raise Rejected(
                f"client {self.client} has signed all {most} of the sums that the method may ask "
                f"for in round {round + 1}"
            )
        missing = set(before["survivors"]) - set(members)
        if missing:
            raise self._apart(missing, members)

    def sign(self, signature: Signature, most: int) -> None:
        """Remember a signature before it is given; ``Rejected`` if it must not be."""
        round, slot = signature.round, signature.slot
        self.check(round, slot, signature.weighs)
        self.check_sum(round, signature.what, most, signature.counts)
        kept = self._read()
        before = kept["rounds"].get(str(round))
        if before is None:
            before = {"survivors": signature.survivors, "row": signature.row, "sums": []}
        else:
            self._compare(signature, before)
            if signature.what in before["sums"]:
                return  # the very same sum again
        rounds = {} if self.lasting else dict(sorted(kept["rounds"].items(), key=_number)[-_KEPT:])
        rounds[str(round)] = {**before, "sums": [*before["sums"], signature.what]}
        weights = {**kept["weights"], slot: [*signature.weighs]}
        self._write({**kept, "rounds": rounds, "weights": weights})

    def _compare(self, signature: Signature, before: Mapping[str, Any]) -> None:
        """Refuse a sum that could be taken from another of the same round."""
        apart = set(before["survivors"]) ^ set(signature.survivors)
        if apart:
            raise self._apart(apart, signature.counts)
        if before["row"] != signature.row:
            raise Rejected(
                f"client {self.client} has signed a sum of this round in which its members count "
                "otherwise: one could be taken from the other"
            )

    def _apart(self, apart: Collection[ClientId], members: Collection[ClientId]) -> Rejected:
        return Rejected(
            f"client {self.client} has signed a sum of this round that differs by {len(apart)} of "
            f"its {len(members)} members: one could be taken from the other"
        )

    # --- the file -------------------------------------------------------------------------------

    def _read(self) -> dict[str, Any]:
        empty = {"run": "", "permitted": False, "left": [], "rounds": {}, "weights": {}}
        try:
            text = self.path.read_text()
        except FileNotFoundError:
            return empty
        except (OSError, ValueError) as error:
            raise self._damaged(error) from None
        try:
            whole = json.loads(text)
            kept: dict[str, Any] = whole["record"]
            if whole["digest"] != _digest(kept):
                raise ValueError("its digest is wrong")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise self._damaged(error) from None
        return {**empty, **kept}

    def _damaged(self, why: Exception) -> RunDirError:
        return RunDirError(
            f"{self.path} is damaged ({why}): it says what client {self.client} has signed, and "
            "without it no secure sum is safe. Put back a copy of it, or ask for new keys"
        )

    def _write(self, kept: Mapping[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = json.dumps({"record": kept, "digest": _digest(kept)})
        write_atomic(self.path, whole.encode(), durable=self.lasting)


def _digest(kept: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _number(entry: tuple[str, Any]) -> int:
    return int(entry[0])
