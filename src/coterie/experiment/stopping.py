"""When a run ends early: a target is reached, there is no more progress, or a budget is spent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coterie.core.method import Budget, Spent
from coterie.core.schema import StopSection, section

History = Sequence[Mapping[str, Any]]


@section("stop")
class Stop(StopSection):
    """The rules that end a run; None switches a rule off.

    With a budget the run ends before a round that would exceed it at the cost of the last one.
    """

    @property
    def budget(self) -> Budget:
        """The budgets in bytes and seconds."""
        limits = {"bytes": self.bytes, "seconds": self.seconds}
        return Budget(**{k: float(v) for k, v in limits.items() if v is not None})

    @property
    def validates(self) -> bool:
        """Whether a rule needs scores on validation data."""
        return self.target is not None or self.patience is not None


def reason(
    stop: Stop, history: History, headline: str, spent: Spent, before: Spent, kept: bool = False
) -> str:
    """Why a run ends after the rounds of ``history``; "" if it continues.

    ``before`` is what had been spent before the last round. A method that keeps to the budget
    itself (``kept``) is stopped only once the budget is used up.

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
        cost = 0 if kept else now - getattr(before, name)
        if now + cost > limit or now >= limit:
            return f"the budget of {limit:g} {unit} is used up, except for {max(0, limit - now):g}"
    return ""


def _scores(history: History, headline: str) -> list[tuple[int, float]]:
    """Validation scores by round."""
    scores = ((e["round"], e.get(headline, {}).get("val")) for e in history)
    return [(round, score) for round, score in scores if score is not None]


def _stands_still(scores: Sequence[tuple[int, float]], patience: int, gain: float) -> bool:
    if not scores:
        return False
    best_round, best = scores[0]
    for round, score in scores:
        if score > best + gain:
            best_round, best = round, score
    return scores[-1][0] - best_round >= patience


def to_target(
    history: History, headline: str, judged_by: str, target: float, clients: int
) -> dict[str, Any]:
    """The cost of reaching a target, as the run's summary has it.

    ``to_target`` concerns the score that the method is judged by, ``to_target_adapted`` adapted
    scores, if there are others; each is None if the target was never reached.
    """
    scores = {"to_target": headline}
    if headline != "adapted" and any("adapted" in event for event in history):
        scores["to_target_adapted"] = "adapted"
    reached = {key: reaching(history, score, judged_by, target) for key, score in scores.items()}
    return {key: cost and {**cost, "clients": clients} for key, cost in reached.items()}


def reaching(
    history: History, headline: str, judged_by: str, target: float
) -> dict[str, Any] | None:
    """The first round whose test score reaches the target, with the bytes and seconds until then.

    >>> rounds = [{"round": 1, "received": {"accuracy": 0.8}, "total_bytes": {"down": 5, "up": 3}}]
    >>> reaching(rounds, "received", "accuracy", 0.8)["round"], reaching(rounds, "", "accuracy", 1)
    (1, None)
    """
    for event in history:
        if event.get(headline, {}).get(judged_by, -1.0) >= target:
            cost = {"target": target, "round": event["round"], "bytes": event["total_bytes"]}
            clock = event.get("clock")
            return {**cost, **({"seconds": clock["total"]} if clock else {})}
    return None
