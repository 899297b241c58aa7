"""The numbers of a run: those of its end, or of its last round so far."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from coterie.report.reading import Reading, number
from coterie.report.words import value as with_unit


def score_with_unit(value: Any, judged_by: str) -> str:
    """A score with its unit; a dash if there is none.

    >>> [score_with_unit(*s) for s in ((0.715, "accuracy"), ("0.5", "r2"), (None, "accuracy"))]
    ['71.5 %', '0.500', '–']
    """
    return with_unit(number(value), judged_by)


def scored(reading: Reading, title: str) -> Mapping[str, Any]:
    """The scores ("received", "adapted") at the end, or of the last round that has them."""
    candidates = [reading.result.get(title), *(e.get(title) for e in reversed(reading.rounds))]
    return next((scores for scores in candidates if scores and isinstance(scores, Mapping)), {})


def bytes_so_far(reading: Reading) -> Mapping[str, Any]:
    """All bytes of the method so far, ``down`` and ``up``."""
    last: Mapping[str, Any] = reading.rounds[-1] if reading.rounds else {}
    return reading.result.get("bytes") or last.get("total_bytes") or {}


def group_count(reading: Reading) -> int:
    """The number of groups."""
    count = reading.result.get("groups")
    return count if isinstance(count, int) else len({g for g in reading.groups if g is not None})


def clock(reading: Reading) -> Mapping[str, Any]:
    """Simulated seconds so far: ``total`` and its parts; empty without a clock."""
    if spent := reading.result.get("clock"):
        return dict(spent)
    last = dict(next((e["clock"] for e in reversed(reading.rounds) if e.get("clock")), {}))
    named = {key: last.get(f"total_{key}") for key in ("computation", "communication", "waiting")}
    return {"total": last["total"], **named} if "total" in last else {}


def privacy_loss(reading: Reading) -> Mapping[str, Any]:
    """The privacy loss so far: ``epsilon`` and ``delta``; empty without noise."""
    rounds = [e["privacy"] for e in reversed(reading.rounds) if e.get("privacy")]
    candidates = [reading.result.get("privacy") or {}, *rounds]
    return next(
        (dict(noise) for noise in candidates if number(noise.get("epsilon")) is not None), {}
    )


def client_name(reading: Reading, client: Any) -> str:
    """A client's name; "" if it is unknown."""
    names = reading.names
    known = isinstance(client, int) and 0 <= client < len(names)
    return names[client] if known else "" if client is None else f"client {client}"


def client_rows(reading: Reading) -> list[dict[str, Any]]:
    """Each client's name, group, samples, scores and bytes, as far as they are known."""
    groups, names = reading.groups, reading.names
    scores = {title: reading.scores(title) for title in ("received", "adapted", "alone")}
    members = max(len(names), len(reading.clients), *(len(s) for s in scores.values()))
    newcomers = reading.newcomers
    truth = reading.data.get("groups") or []
    rows = []
    for client in range(members):
        row_in_table = reading.clients[client] if client < len(reading.clients) else {}
        row: dict[str, Any] = {
            "client": names[client] if client < len(names) else f"client {client}",
            "group": row_in_table.get("group") or _at(groups, client),
            "true_group": row_in_table.get("true_group") or _at(truth, client),
            "newcomer": "yes" if client in newcomers else None,
            **{key: number(row_in_table.get(key)) for key in ("train", "test", "gain")},
            **{title: _at(client_scores, client) for title, client_scores in scores.items()},
        }
        down, up = number(row_in_table.get("bytes_down")), number(row_in_table.get("bytes_up"))
        row["bytes"] = None if down is None or up is None else down + up
        rows.append(row)
    return rows


def _at(values: Any, place: int) -> Any:
    return values[place] if place < len(values) else None


def kinds(reading: Reading) -> dict[str, tuple[float, float]]:
    """Bytes down and up by kind: at the end, or summed over the rounds so far."""
    totals = dict[str, Any](reading.result.get("bytes") or {}).get("kinds")
    if totals:
        return by_purpose({k: (v.get("down", 0), v.get("up", 0)) for k, v in totals.items()})
    sums: dict[str, tuple[float, float]] = {}
    for event in reading.rounds:
        sums = _added(sums, by_purpose(event.get("kinds") or {}))
    return sums


_OF_A_TRIAL = re.compile(
    r"(\d+\.\d+|scores)(/|$)"
)  # models of the groups of a cut, and their scores


def by_purpose(kinds: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float]]:
    """Bytes down and up by kind, with those of a trial's many groups summed.

    >>> by_purpose({"model": (8, 8), "0.0": (4, 0), "3.12": (4, 0), "scores": (0, 2)})
    {'model': (8, 8), 'trial': (8, 2)}
    """
    sums: dict[str, tuple[float, float]] = {}
    for kind, moved in kinds.items():
        purpose = "trial" if _OF_A_TRIAL.match(kind) else kind
        down, up = moved
        sums = _added(sums, {purpose: (down, up)})
    return sums


def _added(
    sums: Mapping[str, tuple[float, float]], others: Mapping[str, tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    added = dict(sums)
    for kind, (down, up) in others.items():
        before = added.get(kind, (0, 0))
        added[kind] = (before[0] + down, before[1] + up)
    return added
