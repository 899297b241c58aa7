"""A client's record of what it has contributed to sums and signed, kept as long as its key.

A server that gets the sum of five uploads and the sum of four of them knows the fifth. So all sums
of a round that a client is in are treated as sums of one vector: they must be over the same
clients, with the same weights, and no more than the method declares. The record outlives a run: a
server can name runs as it likes, so a client enters another run only if its owner has permitted it.
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
    """An order or a sum is refused because of the client's record."""


@dataclass(frozen=True)
class Asked:
    """An order that a client is about to carry out: its round, its task, and a digest of it.

    ``state`` is the version of the client's state that the order starts from, ``name`` that of the
    state it leaves. ``summed`` says whether the result is for a sum.
    """

    round: int
    task: str
    order: str
    summed: bool = False
    state: str = ""
    name: str = ""

    @property
    def whole(self) -> str:
        """The order and the state together, which determine the answer."""
        return f"{self.order} {self.state}" if self.state else self.order


@dataclass(frozen=True)
class Part:
    """A contribution that a client is about to make to a sum.

    ``what`` is a digest of the upload, of the order and of what was asked of its result. ``weighs``
    is this client's weight, and whether it is multiplied by its samples. ``counts`` are the weights
    of all clients that may be in the sum. ``leaves`` is the version of the client's state after it.
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
    """The record of the sums that one client has taken part in, stored in a file.

    It is written before values leave the client, and again before its signature does, because a sum
    can be unmasked without the signatures of all members. A real client (``lasting``) takes part in
    no round before the last recorded one, and in a new run only if its owner has permitted it. A
    simulation is its own owner: it may go back to its last checkpoint and repeat the same sums.
    """

    path: Path
    client: ClientId
    lasting: bool = False

    @staticmethod
    def name_for(public: bytes) -> str:
        """The file name of the record of the client with this public key."""
        return f"signed-{hashlib.sha256(public).hexdigest()[:16]}.json"

    # --- runs -----------------------------------------------------------------------------------

    def permit(self) -> None:
        """Permit one more run, on behalf of the client's owner."""
        with self._changing() as kept:
            kept["permitted"] = True

    def enter(self, run: str, terms: str = "") -> None:
        """Enter this run; ``Rejected`` if the owner would have to permit it and has not.

        A run to which this client has contributed nothing may be replaced by another, since it has
        learned nothing. ``terms`` is a digest of the terms of the run, which must not change: under
        other terms the same order would give another upload of the same data.
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
        """Record an order before it is carried out; ``Rejected`` if that is not allowed.

        In a round there is one order for each task, from one state: the result of a second order,
        or even whether it fails, would reveal more about the same data. The same order may be
        repeated. With several orders that are ``summed``, each must have been contributed before
        the next, which starts from the state that it left. Otherwise a client that was told to
        train for a sum that never came, or that was reset, would not be in the same state as the
        others. For the same reason no other order may leave a state of the same name.
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
                    f"client {self.client} refuses task '{task}': an earlier sum of round "
                    f"{round + 1} has not been made yet"
                )
            if summed:
                orders = {**orders, _SUMMED: "\n".join([*earlier, task])}
            apart = summed and given and task not in orders
            if apart and asked.state != before.get("leaves", asked.state):
                raise Remembered(
                    f"client {self.client} continues only from the state after the last sum of "
                    f"round {round + 1}, and not from version '{asked.state}'"
                )
            if asked.name and names.get(asked.name, task) != task:
                raise Remembered(
                    f"client {self.client} already received an order with the name '{asked.name}' "
                    f"for another task in round {round + 1}"
                )
            if orders.get(task, asked.whole) != asked.whole:
                raise Remembered(
                    f"client {self.client} already received another order for task '{task}' in "
                    f"round {round + 1}: it executes only one in each round"
                )
            kept["orders"] = {str(round): {**orders, task: asked.whole}}
            named = {asked.name: task} if asked.name else {}
            kept["names"] = {str(round): {**names, **named}}

    def score(self) -> None:
        """Record that scores were sent, since these reveal something about a client as well."""
        if not self._read()["scored"]:
            with self._changing() as kept:
                self._check_there(kept)
                kept["scored"] = True

    def reveal(self, order: str) -> None:
        """Record the order for which this client reveals values, which it does once in a run."""
        with self._changing() as kept:
            self._check_there(kept)
            if kept["revealed"] not in ("", order):
                raise Remembered(
                    f"client {self.client} has already revealed what it reveals only once in a run"
                )
            kept["revealed"] = order

    # --- sums -----------------------------------------------------------------------------------

    def check(self, round: int, slot: str, weighs: tuple[int, bool]) -> None:
        """Refuse a sum of a past round, or one in which this client has a different weight.

        ``weighs`` is its weight, and whether it is multiplied by its samples.
        """
        self._check(self._read(), round, slot, weighs)

    def give(self, part: Part, most: int) -> None:
        """Record a contribution before it is made; ``Rejected`` if that is not allowed.

        ``most`` is the number of different sums that the method may ask for in a round.
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
        """Record the clients of a sum before it is signed; ``Rejected`` if that is not allowed."""
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
        """Refuse to start a new record during a run, which would conceal that one was lost."""
        if self.lasting and not kept["run"]:
            raise Remembered(
                f"client {self.client} no longer has its record of what it has signed: no secure "
                "sum is safe without it"
            )

    def _check_round(self, kept: Mapping[str, Any], round: int) -> None:
        self._check_there(kept)
        if type(round) is not int or round < 0:
            raise Remembered(
                f"client {self.client} received an order of the invalid round {round!r}"
            )
        last = max(map(int, [*kept["rounds"], *kept["orders"]]), default=-1)
        if self.lasting and round < last:
            raise Remembered(
                f"client {self.client} has been in a sum of round {last + 1}, or has had an order "
                "of it, and takes none of a round before it"
            )

    def _compare(self, part: Part, before: Mapping[str, Any]) -> None:
        """Refuse a sum that could be subtracted from another one of the same round.

        After signing, a client contributes only to sums over the same clients; after contributing
        without signing, only to sums over a subset of the clients that could have been in the sum.
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
        """Yield the record's content for changes; it is written unless an error is raised.

        The file is locked, so that a second client with the same keys cannot change it.
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
