"""What a client has given to sums and signed, round by round, kept for as long as its key.

Whoever gets the sum of five uploads and the sum of four of them has the fifth. So all sums that a
client is in within one round count as sums of one vector: they must be of the same clients, each
counted alike, and no more than the method declares. The record outlives a run: a server names runs
as it likes, so a client enters another one only after its owner has asked for that.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.channel.privacy.secagg import Rejected
from coterie.core.messages import ClientId
from coterie.core.tree import write_atomic
from coterie.errors import RunDirError

_SUMMED = "\n"  # among a round's orders: which of its tasks are for sums
_KEPT = 200  # rounds that a simulation can go back by


class Remembered(Rejected):
    """An order or a sum that is ruled out by what a client remembers."""


@dataclass(frozen=True)
class Asked:
    """What a client is about to be asked: in which round, for which task, by which order.

    ``order`` is a digest of it, and ``state`` the version of the client's state that it goes on
    from. ``name`` is what the state that it leaves will be called. ``summed`` says whether the
    result is for a sum.
    """

    round: int
    task: str
    order: str
    summed: bool = False
    state: str = ""
    name: str = ""

    @property
    def whole(self) -> str:
        """The order and the state together: what another answer would follow from."""
        return f"{self.order} {self.state}" if self.state else self.order


@dataclass(frozen=True)
class Part:
    """What a client is about to give to a sum: in which round, with whom, and how each counts.

    ``what`` is a digest of the upload, of the order and of what was asked of its result; ``weighs``
    is this client's weight, and whether samples count on top of that; ``counts`` is the weight of
    everybody who may be in the sum. ``leaves`` is the version of the client's state after it.
    """

    round: int
    what: str
    slot: str
    weighs: tuple[int, bool]
    counts: Mapping[ClientId, int]
    attempt: str = ""  # the protocol's name for this sum
    leaves: str = ""


@dataclass
class Record:
    """The sums that one client has taken part in, in a file of its own.

    It is written before values leave the client, and again before its signature does: a sum may be
    unmasked without the signature of each of its members. A real client (``lasting``) takes part in
    no round before the last one, and in a new run only once its owner has permitted one. In a
    simulation the server is the owner: a run may go back to its last checkpoint, where the same
    sums can be made again.
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
        with self._changing() as kept:
            kept["permitted"] = True

    def enter(self, run: str, terms: str = "") -> None:
        """Take part in this run; ``Rejected`` if that takes the owner's word, and there is none.

        A run to which this client gave nothing gives way to another: it has learned nothing.
        ``terms`` name what it was told of the run, which stays as it is: under other terms one
        order would make another upload of the same data.
        """
        with self._changing() as kept:
            before = kept["run"]
            if run == before and kept["terms"] not in ("", terms):
                raise Remembered("these are not the terms that this run began with")
            if run in kept["left"]:
                raise Remembered(
                    f"client {self.client} has left run {run[:8]} for another: it does not go back"
                )
            gave = kept["rounds"] or kept["orders"] or kept["revealed"] or kept["scored"]
            if run != before and not kept["permitted"] and (gave or not before):
                had = f"has taken part in run {before[:8]}" if before else "is in no run yet"
                raise Remembered(
                    f"client {self.client} {had}, and takes part in another run only when its "
                    "owner starts `coterie join` again"
                )
            kept |= {"permitted": False, "terms": terms}
            if run != before:
                left = [*kept["left"], before] if gave else kept["left"]
                kept |= {"left": left, "run": run, "rounds": {}, "weights": {}}
                kept |= {"orders": {}, "names": {}, "revealed": "", "scored": False}

    # --- orders ---------------------------------------------------------------------------------

    def work(self, asked: Asked) -> None:
        """Remember an order before it is carried out; ``Rejected`` if it must not be.

        In one round there is one order for each task, from one state: what comes of a second one,
        or only whether it fails, would say more about the same data. The same order may be
        repeated. Of several that are ``summed``, each must have been given before the next, which
        goes on from the state that it left: a client that was told to train for a sum that never
        came, or was sent back to before, would not be in the same state as the others. So no other
        order may leave a state of the same name, either.
        """
        round, task, summed = asked.round, asked.task, asked.summed
        with self._changing() as kept:
            self._check_round(kept, round)
            orders = kept["orders"].get(str(round), {})
            names = kept["names"].get(str(round), {})
            earlier = [t for t in orders.get(_SUMMED, "").split("\n") if t not in ("", task)]
            before = kept["rounds"].get(str(round), {})
            given = before.get("sums", [])
            if summed and len(earlier) > len(given):
                raise Remembered(
                    f"client {self.client} has worked for a sum of round {round + 1} that was not "
                    f"made, and does not work for another (task '{task}')"
                )
            if summed:
                orders = {**orders, _SUMMED: "\n".join([*earlier, task])}
            apart = summed and given and task not in orders
            if apart and asked.state != before.get("leaves", asked.state):
                raise Remembered(
                    f"client {self.client} goes on from the state that the last sum of round "
                    f"{round + 1} left, and not from version '{asked.state}'"
                )
            if asked.name and names.get(asked.name, task) != task:
                raise Remembered(
                    f"client {self.client} has had an order for another task by the name "
                    f"'{asked.name}' in round {round + 1}"
                )
            if orders.get(task, asked.whole) != asked.whole:
                raise Remembered(
                    f"client {self.client} has had another order for task '{task}' in round "
                    f"{round + 1}: it carries out one in a round"
                )
            kept["orders"] = {str(round): {**orders, task: asked.whole}}
            named = {asked.name: task} if asked.name else {}
            kept["names"] = {str(round): {**names, **named}}

    def score(self) -> None:
        """Remember that scores were given: they say something about a client, too."""
        if not self._read()["scored"]:
            with self._changing() as kept:
                self._check_there(kept)
                kept["scored"] = True

    def reveal(self, order: str) -> None:
        """Remember that this order was answered with what may be revealed, once in a run."""
        with self._changing() as kept:
            self._check_there(kept)
            if kept["revealed"] not in ("", order):
                raise Remembered(f"client {self.client} has revealed what it reveals once in a run")
            kept["revealed"] = order

    # --- sums -----------------------------------------------------------------------------------

    def check(self, round: int, slot: str, weighs: tuple[int, bool]) -> None:
        """Refuse to work for a sum of a round that is over, or in which this client counts anew.

        ``weighs`` is its weight, and whether its samples count on top of that.
        """
        self._check(self._read(), round, slot, weighs)

    def give(self, part: Part, most: int) -> None:
        """Remember a part before it is given to a sum; ``Rejected`` if it must not be.

        ``most`` is how many different sums the method may ask for in a round.
        """
        with self._changing() as kept:
            self._check(kept, part.round, part.slot, part.weighs)
            before = kept["rounds"].get(str(part.round))
            members = sorted(part.counts)
            if before is None:
                before = {"members": members, "signed": False, "sums": [], "counts": {}}
                before["by_examples"] = part.weighs[1]
            self._compare(part, before)
            sums = before["sums"]
            if part.what not in sums:
                if len(sums) >= most:
                    raise Remembered(
                        f"client {self.client} has been in all {most} of the sums that the method "
                        f"may ask for in round {part.round + 1}"
                    )
                sums = [*sums, part.what]
            # A real client never goes back, so what it gave in earlier rounds is of no use.
            old = {} if self.lasting else kept["rounds"]
            rounds = dict(sorted(old.items(), key=_number)[-_KEPT:])
            counts = {**before["counts"], **{str(c): w for c, w in part.counts.items()}}
            entry = {**before, "members": members, "sums": sums, "counts": counts}
            entry |= {"attempt": part.attempt, "leaves": part.leaves}
            rounds[str(part.round)] = entry
            weights = {**kept["weights"], part.slot: [*part.weighs]}
            kept |= {"rounds": rounds, "weights": weights}

    def sign(self, round: int, survivors: Sequence[ClientId], attempt: str = "") -> None:
        """Remember whose sum is signed, before it is; ``Rejected`` if it must not be."""
        with self._changing() as kept:
            before = kept["rounds"].get(str(round))
            if before is None or before["attempt"] != attempt:
                raise Remembered(
                    f"client {self.client} gave nothing to this sum in round {round + 1}"
                )
            if before["signed"] and before["members"] != sorted(survivors):
                raise self._apart(set(before["members"]) ^ set(survivors), survivors)
            signed = {**before, "signed": True, "members": sorted(survivors)}
            kept["rounds"] = {**kept["rounds"], str(round): signed}

    def _check(
        self, kept: Mapping[str, Any], round: int, slot: str, weighs: tuple[int, bool]
    ) -> None:
        self._check_round(kept, round)
        if kept["weights"].get(slot, [*weighs]) != [*weighs]:
            raise Remembered(
                f"client {self.client} counted otherwise in slot {slot} before: its weight in a "
                "slot is the same for the whole run"
            )

    def _check_there(self, kept: Mapping[str, Any]) -> None:
        """Refuse to begin a record anew while a run goes on: it would hide that one is gone."""
        if self.lasting and not kept["run"]:
            raise Remembered(
                f"client {self.client} no longer has its record of what it has signed: no secure "
                "sum is safe without it"
            )

    def _check_round(self, kept: Mapping[str, Any], round: int) -> None:
        self._check_there(kept)
        if type(round) is not int or round < 0:
            raise Remembered(f"client {self.client} was given an order of round {round!r}")
        last = max(map(int, [*kept["rounds"], *kept["orders"]]), default=-1)
        if self.lasting and round < last:
            raise Remembered(
                f"client {self.client} has been in a sum of round {last + 1}, or has had an order "
                "of it, and takes none of a round before it"
            )

    def _compare(self, part: Part, before: Mapping[str, Any]) -> None:
        """Refuse a sum that could be taken from another of the same round.

        Who has signed gives values only to a sum of the same clients; who has given values, but
        not signed, only to one of a part of those who may be in the sum.
        """
        members, now = set(before["members"]), set(part.counts)
        if now - members or (before["signed"] and now != members):
            raise self._apart(members ^ now, part.counts)
        told = {str(c): w for c, w in part.counts.items()}
        known = before["counts"]
        other = before["by_examples"] != part.weighs[1]
        if other or any(known.get(c, w) != w for c, w in told.items()):
            raise Remembered(
                f"client {self.client} has been in a sum of this round in which its members count "
                "otherwise: one could be taken from the other"
            )

    def _apart(self, apart: Collection[ClientId], members: Collection[ClientId]) -> Remembered:
        return Remembered(
            f"client {self.client} has been in a sum of this round that differs by {len(apart)} of "
            f"its {len(members)} members: one could be taken from the other"
        )

    # --- the file -------------------------------------------------------------------------------

    @contextmanager
    def _changing(self) -> Iterator[dict[str, Any]]:
        """What is kept, to be changed; it is written unless an error was raised.

        Nobody else changes it meanwhile, such as a second client with the same keys.
        """
        with self._locked():
            kept = self._read()
            before = json.dumps(kept)
            yield kept
            if json.dumps(kept) != before:
                whole = json.dumps({"record": kept, "digest": _digest(kept)})
                write_atomic(self.path, whole.encode(), durable=self.lasting)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if not self.lasting:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            yield
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = self.path.with_suffix(".lock").open("w")
        except OSError as error:
            raise RunDirError(
                f"{self.path.parent} cannot be written ({error.strerror}): what a client of secure "
                "sums has signed is remembered there, beside its keys"
            ) from None
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _read(self) -> dict[str, Any]:
        empty = {"run": "", "permitted": False, "left": [], "rounds": {}, "weights": {}}
        empty |= {"orders": {}, "names": {}, "revealed": "", "scored": False, "terms": ""}
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
        if not self.lasting:
            return RunDirError(
                f"{self.path} is damaged ({why}): put back a copy of it, or start the run again in "
                "a new folder"
            )
        return RunDirError(
            f"{self.path} is damaged ({why}): it says what client {self.client} has signed, and "
            "without it no secure sum is safe. Ask for new keys; an older copy of the file would "
            "forget what was signed since"
        )


def _digest(kept: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _number(entry: tuple[str, Any]) -> int:
    return int(entry[0])
