"""When a run ends before its last round: a target, no more progress, or a budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coterie.core.method import Budget, Spent
from coterie.core.schema import StopSection, section

History = Sequence[Mapping[str, Any]]


@section("stop")
class Stop(StopSection):
    """What ends a run; None is never.

    With a budget the run ends before a round that would exceed it if it cost as much as the last.
    """

    @property
    def budget(self) -> Budget:
        """The two budgets."""
        given = {"bytes": self.bytes, "seconds": self.seconds}
        return Budget(**{k: float(v) for k, v in given.items() if v is not None})

    @property
    def validates(self) -> bool:
        """Whether it looks at validation data."""
        return self.target is not None or self.patience is not None


def reason(
    stop: Stop, history: History, headline: str, spent: Spent, before: Spent, kept: bool = False
) -> str:
    """Why a run ends after the rounds of ``history``; "" if it goes on.

    ``before`` is what had been spent before the last round. A method that keeps to a budget by
    itself (``kept``) is stopped only once it is used up.

    >>> rounds = [{"round": n, "received": {"val": v}} for n, v in enumerate([0.5, 0.7, 0.7], 1)]
    >>> reason(Stop(patience=1), rounds, "received", Spent(), Spent())
    'no gain on validation data in 1 round'
    """
    scores = _scores(history, headline)
    if stop.target is not None and scores and scores[-1][1] >= stop.target:
        return f"reached {stop.target:g} on validation data"
    if stop.patience is not None and _stands_still(scores, stop.patience, stop.gain):
        rounds = "round" if stop.patience == 1 else "rounds"
        return f"no gain on validation data in {stop.patience} {rounds}"
    for name, unit in (("bytes", "bytes"), ("seconds", "seconds")):
        limit, now = getattr(stop.budget, name), getattr(spent, name)
        more = 0 if kept else now - getattr(before, name)
        if now + more > limit or now >= limit:
            return f"the budget of {limit:g} {unit} is used up, but for {max(0, limit - now):g}"
    return ""


def _scores(history: History, headline: str) -> list[tuple[int, float]]:
    """Validation scores by round."""
    found = ((e["round"], e.get(headline, {}).get("val")) for e in history)
    return [(round, score) for round, score in found if score is not None]


def _stands_still(scores: Sequence[tuple[int, float]], patience: int, gain: float) -> bool:
    if not scores:
        return False
    since, best = scores[0]
    for round, score in scores:
        if score > best + gain:
            since, best = round, score
    return scores[-1][0] - since >= patience


def to_target(
    history: History, headline: str, judged_by: str, target: float, clients: int
) -> dict[str, Any]:
    """What it took to reach a target, as a run's summary has it.

    ``to_target`` is about the score that the method is judged by, ``to_target_adapted`` about
    adapted scores, if there are any besides; each is None if the target was never reached.
    """
    told = {"to_target": headline}
    if headline != "adapted" and any("adapted" in event for event in history):
        told["to_target_adapted"] = "adapted"
    reached = {key: reaching(history, score, judged_by, target) for key, score in told.items()}
    return {key: each and {**each, "clients": clients} for key, each in reached.items()}


def reaching(
    history: History, headline: str, judged_by: str, target: float
) -> dict[str, Any] | None:
    """The first round whose test score is at least this, and what it took to get there.

    >>> rounds = [{"round": 1, "received": {"accuracy": 0.8}, "total_bytes": {"down": 5, "up": 3}}]
    >>> reaching(rounds, "received", "accuracy", 0.8)["round"], reaching(rounds, "", "accuracy", 1)
    (1, None)
    """
    for event in history:
        if event.get(headline, {}).get(judged_by, -1.0) >= target:
            found = {"target": target, "round": event["round"], "bytes": event["total_bytes"]}
            clock = event.get("clock")
            return {**found, **({"seconds": clock["total"]} if clock else {})}
    return None
