"""The row of a run in a comparison, from the files in its directory."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie.channel.exposure import alone_apart, server_sees
from coterie.clustering import adjusted_rand
from coterie.core.events import Event
from coterie.errors import RunDirError
from coterie.results.differences import SAME
from coterie.results.findings import rested
from coterie.results.rundir import RunDir, rounds_of

POINT = 0.01  # of accuracy, or of R²
KeptRun = tuple[dict[str, Any], list[dict[str, str]], list[Event]]


def read_kept(directory: Path) -> KeptRun:
    """Read the summary, the table of clients and the rounds of a finished run."""
    run = RunDir(directory)
    try:
        summary = run.read_result()
        with run.table.open(newline="") as file:
            clients = list(csv.DictReader(file))
        rounds = rounds_of(run.read_events())
        row_of("", summary, clients, rounds, clients)  # check that nothing is missing
        if not clients:
            raise ValueError(f"{run.table.name} has no clients")
        return summary, clients, rounds
    except (OSError, ValueError, LookupError, TypeError, AttributeError, csv.Error) as error:
        raise RunDirError(
            f"{directory} is damaged ({error}); write it again with: coterie run --resume "
            f"{directory}"
        ) from error


def row_of(
    title: str,
    summary: Mapping[str, Any],
    clients: Sequence[Mapping[str, str]],
    rounds: Sequence[Event],
    alone: Sequence[Mapping[str, str]] | None,
) -> dict[str, Any]:
    """The results of a run as numbers; gains are over clients that trained ``alone``, if given."""
    by, score = summary["judged_by"], summary.get("headline", "received")
    gains = [] if alone is None else _gains(clients, alone, by, score)
    return {
        "method": title,
        "received": summary["received"].get(by),
        "adapted": summary["adapted"].get(by),
        "newcomers": summary.get("newcomers", {}).get("adapted", {}).get(by),
        "newcomers_received": summary.get("newcomers", {}).get("received", {}).get(by),
        "worst": summary[score].get("worst"),
        **gained(gains),
        "groups": summary["groups"],
        "agreement": agreement(clients),
        "bytes": summary["bytes"]["down"] + summary["bytes"]["up"],
        "wasted": sum(summary["bytes"]["wasted"].values()),
        "rounds": summary["rounds"],
        "stopped": summary["stopped"],
        **_clocked(summary),
        **_to_target(summary),
        **_private(summary),
        **in_full(rounds, by),
        **near_the_end(rounds, score, by),
        "test_least": _least_tested(clients),
        "seconds": summary["seconds"],
        **saw(summary),
        "headline": score,
    }


def saw(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The most that the server saw, and what it saw but for clients alone in a group."""
    found: dict[str, Any] = {"sees": server_sees(summary)}
    if summary.get("exposure"):
        mostly, clients, rounds = alone_apart(summary["exposure"])
        found |= {"sees_mostly": mostly, "exposed": clients, "exposed_rounds": rounds}
    return found


def gained(gains: Sequence[float]) -> dict[str, Any]:
    """The mean gain over training alone, and who gains and loses; None where it is not known.

    >>> gained([0.25, 0.0, -0.5, -0.25])["largest_loss"]
    0.5
    """
    if not gains:
        keys = ("gain", "better", "as_good", "worse_off", "largest_loss", "compared")
        return dict.fromkeys(keys)
    better, worse = sum(g > SAME for g in gains), sum(g < -SAME for g in gains)
    return {
        "gain": sum(gains) / len(gains),
        "better": better,
        "as_good": len(gains) - better - worse,
        "worse_off": worse,
        "largest_loss": max(0.0, -min(gains)),
        "compared": len(gains),
    }


def near_the_end(rounds: Sequence[Event], headline: str, judged_by: str) -> dict[str, Any]:
    """The first round from which on the score was within a point of its last, and its bytes.

    Empty where no round was scored.
    """
    scored = [(e, score) for e in rounds if (score := _score(e, headline, judged_by)) is not None]
    if not scored:
        return {}
    enough = scored[-1][1] - POINT
    below = [place for place, (_, score) in enumerate(scored) if score < enough - SAME]
    first = scored[below[-1] + 1 if below else 0][0]
    total = first.get("total_bytes")
    moved = total["down"] + total["up"] if total else None
    return {"near_round": first["round"], "near_bytes": moved}


def _score(event: Event, headline: str, judged_by: str) -> float | None:
    scores = (
        event["adapted" if headline == "adapted" else "received"] if headline in event else None
    )
    found = scores.get(judged_by) if isinstance(scores, Mapping) else None
    return float(found) if isinstance(found, int | float) else None


def _clocked(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The simulated seconds, if there was a clock."""
    clock = summary.get("clock")
    return {} if clock is None else {f"clock_{k}": v for k, v in clock.items()}


def _private(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The privacy budget spent, if there was noise."""
    privacy = summary.get("privacy", {})
    return {key: privacy[key] for key in ("epsilon", "delta") if key in privacy}


def _to_target(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The cost of reaching the target, if one was set; None if it was never reached."""
    if "to_target" not in summary:
        return {}
    reached = summary["to_target"] or {}
    bytes = sum(reached["bytes"].values()) if reached else None
    times = {"target_seconds": reached.get("seconds")} if "clock" in summary else {}
    adapted = {}
    if "to_target_adapted" in summary:
        reached_adapted = summary["to_target_adapted"]
        adapted["target_round_adapted"] = reached_adapted and reached_adapted["round"]
        adapted["target_megabits_adapted"] = megabits(reached_adapted)
    return {
        "target_round": reached.get("round"),
        "target_bytes": bytes,
        "target_megabits": megabits(reached),
        **adapted,
        **times,
    }


def in_full(rounds: Sequence[Event], judged_by: str) -> dict[str, Any]:
    """If layers were skipped: whether at the end, and the last scores with all layers."""
    resting = rested(rounds)
    if not any(resting):
        return {}
    full = [e for e, rests in zip(rounds, resting, strict=True) if "received" in e and not rests]
    last = full[-1] if full else {}
    return {
        "rested": resting[-1],
        "full_round": last.get("round"),
        "full_received": last.get("received", {}).get(judged_by),
        "full_adapted": last.get("adapted", {}).get(judged_by),
    }


def megabits(reached: Mapping[str, Any] | None) -> float | None:
    """Megabits downloaded and uploaded until a target was reached, as a mean over clients.

    >>> megabits({"bytes": {"down": 600_000, "up": 400_000}, "clients": 4})
    2.0
    """
    if not reached:
        return None
    return float(sum(reached["bytes"].values()) * 8 / 1e6 / reached["clients"])


def _gains(
    clients: Sequence[Mapping[str, str]],
    alone: Sequence[Mapping[str, str]],
    judged_by: str,
    score: str,
) -> list[float]:
    """The gain of each client over training alone, without newcomers."""
    pairs = [
        (row.get(f"{score}_{judged_by}", ""), row_alone.get(f"received_{judged_by}", ""))
        for row, row_alone in zip(clients, alone, strict=True)
        if row.get("newcomer", "0") == "0"
    ]
    return [float(row) - float(row_alone) for row, row_alone in pairs if row and row_alone]


def _least_tested(clients: Sequence[Mapping[str, str]]) -> int | None:
    """The fewest test samples of a client that has any."""
    counts = [int(float(c["test"])) for c in clients if c.get("test") not in (None, "")]
    return min((n for n in counts if n > 0), default=None)


def agreement(clients: Sequence[Mapping[str, str]]) -> float | None:
    """The adjusted Rand index between the run's groups and the true groups, if both exist."""
    pairs = [(c["true_group"], c["group"]) for c in clients if c["group"] != ""]
    true_groups, groups = [t for t, _ in pairs], [g for _, g in pairs]
    if "" in true_groups or len(set(groups)) < 2:
        return None
    return adjusted_rand(true_groups, groups)
