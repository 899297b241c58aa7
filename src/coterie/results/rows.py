"""A row of a comparison: what one run came to, from the files that it left."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie.channel.exposure import server_sees
from coterie.clustering import adjusted_rand
from coterie.core.events import Event
from coterie.errors import RunDirError
from coterie.results.findings import rested
from coterie.results.rundir import RunDir, rounds_of

Kept = tuple[dict[str, Any], list[dict[str, str]], list[Event]]


def read_kept(place: Path) -> Kept:
    """The summary, the clients' table and the rounds of a finished run."""
    run = RunDir(place)
    try:
        summary = run.read_result()
        with run.table.open(newline="") as file:
            clients = list(csv.DictReader(file))
        rounds = rounds_of(run.read_events())
        row_of("", summary, clients, rounds, clients)  # all that a row needs is there
        if not clients:
            raise ValueError(f"{run.table.name} has no clients")
        return summary, clients, rounds
    except (OSError, ValueError, LookupError, TypeError, AttributeError, csv.Error) as error:
        raise RunDirError(
            f"{place} is damaged ({error}); write it again with: coterie run --resume {place}"
        ) from error


def row_of(
    title: str,
    summary: Mapping[str, Any],
    clients: Sequence[Mapping[str, str]],
    rounds: Sequence[Event],
    alone: Sequence[Mapping[str, str]] | None,
) -> dict[str, Any]:
    """What a run came to, as numbers; gains are those over the clients ``alone``, if given."""
    by, score = summary["judged_by"], summary.get("headline", "received")
    gains = [] if alone is None else _gains(clients, alone, by, score)
    return {
        "method": title,
        "received": summary["received"].get(by),
        "adapted": summary["adapted"].get(by),
        "newcomers": summary.get("newcomers", {}).get("adapted", {}).get(by),
        "newcomers_received": summary.get("newcomers", {}).get("received", {}).get(by),
        "worst": summary[score].get("worst"),
        "gain": sum(gains) / len(gains) if gains else None,
        "better": sum(g > 0 for g in gains) if gains else None,
        "compared": len(gains) if gains else None,
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
        "seconds": summary["seconds"],
        "sees": server_sees(summary),
        "headline": score,
    }


def _clocked(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The seconds of the clock, if there was one."""
    clock = summary.get("clock")
    return {} if clock is None else {f"clock_{k}": v for k, v in clock.items()}


def _private(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What noise cost, if there was any."""
    found = summary.get("privacy", {})
    return {key: found[key] for key in ("epsilon", "delta") if key in found}


def _to_target(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What it took to reach the target, if one was set; None if it never was reached."""
    if "to_target" not in summary:
        return {}
    found = summary["to_target"] or {}
    bytes = sum(found["bytes"].values()) if found else None
    times = {"target_seconds": found.get("seconds")} if "clock" in summary else {}
    adapted = {}
    if "to_target_adapted" in summary:
        later = summary["to_target_adapted"]
        adapted["target_round_adapted"] = later and later["round"]
        adapted["target_megabits_adapted"] = megabits(later)
    return {
        "target_round": found.get("round"),
        "target_bytes": bytes,
        "target_megabits": megabits(found),
        **adapted,
        **times,
    }


def in_full(rounds: Sequence[Event], judged_by: str) -> dict[str, Any]:
    """Where layers ever rested: whether they did at the end, and the last scores when none did."""
    resting = rested(rounds)
    if not any(resting):
        return {}
    full = [e for e, own in zip(rounds, resting, strict=True) if "received" in e and not own]
    last = full[-1] if full else {}
    return {
        "rested": resting[-1],
        "full_round": last.get("round"),
        "full_received": last.get("received", {}).get(judged_by),
        "full_adapted": last.get("adapted", {}).get(judged_by),
    }


def megabits(reached: Mapping[str, Any] | None) -> float | None:
    """What had been sent when a target was reached, down and up, as a mean over clients.

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
    """By how much each client scores higher than alone; newcomers are not meant by scores."""
    pairs = [
        (ours.get(f"{score}_{judged_by}", ""), theirs.get(f"received_{judged_by}", ""))
        for ours, theirs in zip(clients, alone, strict=True)
        if ours.get("newcomer", "0") == "0"
    ]
    return [float(ours) - float(theirs) for ours, theirs in pairs if ours and theirs]


def agreement(clients: Sequence[Mapping[str, str]]) -> float | None:
    """The adjusted Rand index between the groups found and the true ones, if there are any."""
    known = [(c["true_group"], c["group"]) for c in clients if c["group"] != ""]
    truth, found = [t for t, _ in known], [g for _, g in known]
    if "" in truth or len(set(found)) < 2:
        return None
    return adjusted_rand(truth, found)
