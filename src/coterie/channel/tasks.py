"""The tasks that every client knows, beside those of the method, and what sets them apart."""

from __future__ import annotations

from dataclasses import dataclass

SCORE = "$score"  # score the model that the client would use now
FETCH = "$fetch"  # hand over the whole of that model, for export
KEEP = "$keep"  # the run is over: keep that model
SECURE = "$secure"  # a step of the secure-aggregation protocol


@dataclass(frozen=True)
class Kind:
    """What the channel must know of a task.

    One that ``trains`` is work of a round: it takes simulated time, has deadlines and counts as a
    report. One that is ``together`` may be answered as one batch for several clients. A failure of
    a ``vital`` one is an error. A step of a ``protocol`` knows nothing of the client's state.
    """

    trains: bool = True
    together: bool = False
    vital: bool = False
    protocol: bool = False


_OWN = Kind()
_KINDS = {
    SCORE: Kind(trains=False, together=True),
    FETCH: Kind(trains=False, vital=True),
    KEEP: Kind(trains=False, vital=True),
    SECURE: Kind(protocol=True),
}


def kind_of(task: str) -> Kind:
    """The kind of a task; all of a method's own are alike."""
    return _KINDS.get(task, _OWN)
