"""The live page's descriptions of runs: rows of the list, a run's state, its federation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from coterie.report.live.folders import (
    ASKED,
    STARTING,
    STOPPING,
    UNREADABLE,
    WAITING,
    Glance,
)
from coterie.report.page import Block
from coterie.report.reading import FINISHED, RUNNING, STOPPED, Reading
from coterie.report.rendering import render
from coterie.report.tables import score, size
from coterie.report.words import count, duration
from coterie.report.words import value as with_unit
from coterie.results.titles import reference_of

WORDS = {
    FINISHED: "finished",
    RUNNING: "running",
    STOPPED: "stopped, or crashed",
    ASKED: "stopped from this page",
    WAITING: "waiting for clients",
    STOPPING: "stops after this round",
    STARTING: "starting",
    UNREADABLE: "cannot be read",
}
_ACTIONS = {RUNNING: "stop", WAITING: "stop", STOPPED: "resume", ASKED: "resume"}
_SHOWN = 20  # clients of a federation that are named at most


def address_of(name: str) -> str:
    """The address of a run's page.

    >>> address_of("sweep/a b?")
    '/run/sweep/a%20b%3F'
    """
    return f"/run/{quote(name)}"


def row_id(name: str, kind: str = "run") -> str:
    """The id of a run's row in the list, or of a comparison's."""
    return f"{kind}-{hashlib.blake2b(name.encode(), digest_size=6).hexdigest()}"


def summary(runs: Iterable[Glance], folder: str) -> str:
    """The number of runs, in words.

    >>> summary([], "runs")
    'There is no run in runs yet: new runs will appear here.'
    """
    listed = list(runs)
    if not listed:
        return f"There is no run in {folder} yet: new runs will appear here."
    running = sum(run.status in (RUNNING, STOPPING, WAITING, STARTING) for run in listed)
    return f"{len(listed)} run{'s' * (len(listed) != 1)}, {running or 'none'} running."


def newest_first(runs: Iterable[Glance]) -> list[Glance]:
    """Runs in an order that does not change while they are running."""
    return sorted(sorted(runs, key=lambda run: run.name), key=lambda run: run.begun, reverse=True)


def row(run: Glance) -> Markup:
    """A run's row of the list."""
    accuracy = run.judged_by == "accuracy"
    scored = run.score is not None
    return render(
        "live/row.html",
        id=row_id(run.name),
        address=address_of(run.name),
        parts=run.name.split("/"),
        problem=run.problem,
        method=run.method,
        status=run.status,
        status_words=WORDS[run.status],
        round=run.round,
        planned=run.planned,
        score=f"{score(run.score, run.judged_by)}{' %' * (scored and accuracy)}",
        score_name=(run.headline if accuracy else f"{run.headline} R²") if scored else "",
        groups=run.groups or "–",
        bytes="–" if run.bytes is None else size(run.bytes),
        changed=datetime.fromtimestamp(run.changed, UTC) if run.changed else None,
        name=run.name,
        group=row_id(run.comparison, "comparison") if run.comparison else "",
        data=run.data or "–",
        curve=sparkline(run.curve),
        left=f"{duration(run.left)} left" if run.left is not None else "",
        sort={
            "score": run.score,
            "bytes": run.bytes,
            "round": run.round,
            "changed": run.changed or None,
        },
    )


def comparisons(runs: Iterable[Glance]) -> dict[str, list[Glance]]:
    """The runs that belong to a comparison, by the name of its folder."""
    found: dict[str, list[Glance]] = {}
    for run in runs:
        if run.comparison:
            found.setdefault(run.comparison, []).append(run)
    return found


def in_order(runs: Iterable[Glance]) -> list[tuple[str, Markup]]:
    """The rows of the list by id: the newest first, runs of a comparison below its own row."""
    newest = newest_first(runs)
    groups = comparisons(newest)
    rows: list[tuple[str, Markup]] = []
    shown: set[str] = set()
    for run in newest:
        if not run.comparison:
            rows.append((row_id(run.name), row(run)))
        elif run.comparison not in shown:
            shown.add(run.comparison)
            members = groups[run.comparison]
            rows.append(
                (row_id(run.comparison, "comparison"), comparison_row(run.comparison, members))
            )
            rows += [(row_id(each.name), row(each)) for each in members]
    return rows


def comparison_row(name: str, runs: Sequence[Glance]) -> Markup:
    """The row of a comparison, under which its runs are folded."""
    done, planned = sum(run.round for run in runs), sum(run.planned for run in runs)
    methods, states = len({run.method for run in runs}), dict[str, int]()
    for run in runs:
        states[WORDS[run.status]] = states.get(WORDS[run.status], 0) + 1
    scores: dict[str, list[float]] = {}
    for run in runs:
        if run.score is not None and not reference_of(run.method):
            scores.setdefault(run.method, []).append(run.score)
    means = {method: sum(own) / len(own) for method, own in scores.items()}
    best = max(means, key=lambda method: means[method], default="")
    left = [run.left for run in runs if run.left is not None]
    return render(
        "live/comparison.html",
        id=row_id(name, "comparison"),
        name=name,
        runs=f"{count(methods, 'method')}, {count(len(runs), 'run')}",
        states=", ".join(f"{number} {state}" for state, number in states.items()),
        data=" or ".join(dict.fromkeys(run.data for run in runs if run.data)) or "–",
        round=done,
        planned=planned,
        best=f"{best}: {with_unit(means[best], runs[0].judged_by)}" if best else "",
        left=f"{duration(max(left))} left at least" if left else "",
        bytes=size(sum(run.bytes or 0 for run in runs)),
        address=f"/compare?comparison={quote(name, safe='')}",
    )


_WIDE, _HIGH = 80, 20  # of the small curve, in pixels


def sparkline(values: Sequence[float]) -> str:
    """The points of a small curve as SVG's ``polyline`` has them; "" for fewer than two values.

    >>> sparkline([0.5, 1.0, 0.75])
    '1.0,19.0 40.0,1.0 79.0,10.0'
    """
    if len(values) < 2:
        return ""
    low, span = min(values), (max(values) - min(values)) or 1.0
    across, up = (_WIDE - 2) / (len(values) - 1), (_HIGH - 2) / span
    points = ((1 + i * across, _HIGH - 1 - (v - low) * up) for i, v in enumerate(values))
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


# --- one run --------------------------------------------------------------------------------------


def state(run: Glance, failure: str = "", drawn: int | None = None) -> dict[str, Any]:
    """The state at the top of a run's page; ``drawn`` is the last round in the pictures below."""
    words = WORDS[run.status]
    sentence = f"{words[:1].upper()}{words[1:]}"
    if run.planned:
        sentence += f", round {run.round} of {run.planned}"
    if run.score is not None:
        unit = " %" if run.judged_by == "accuracy" else ""
        sentence += f", {run.headline} {score(run.score, run.judged_by)}{unit}"
    if drawn is not None and drawn != run.round:  # drawing takes longer than the state
        sentence += (
            f". The page below shows {f'round {drawn}' if drawn else 'the time before round 1'}"
        )
    failed = f"{failure[:1].upper()}{failure[1:]}." if failure else ""
    return {
        "status": run.status,
        "words": f"{sentence}.",
        "trouble": " ".join(filter(None, [failed, run.problem])),
        "action": _ACTIONS.get(run.status, ""),
        "value": run.round,
        "max": max(run.planned, 1),
    }


def gone(name: str) -> dict[str, Any]:
    """The state of a run that does not exist any more, or ended before it began."""
    return {
        "status": "gone",
        "words": f"The run {name} does not exist any more: this page shows its last state.",
        "trouble": "",
        "action": "",
        "value": 0,
        "max": 1,
    }


def state_block(state: Mapping[str, Any]) -> Markup:
    """The state as HTML; pages update it in place later, so that focus and selection stay."""
    return render("live/state.html", **state)


def federation(reading: Reading) -> Markup | None:
    """The last rounds of a real federation: its cohort, lost and late replies, and arrivals."""
    rounds = reading.rounds
    if not any("spared" in event for event in rounds):
        return None
    last, names = rounds[-1], reading.names
    arrivals = [e for e in reading.events if e.get("event") == "arrival" and e.get("clients")]
    facts: list[tuple[str, str]] = [
        ("Cohort of the last round", _clients(last.get("cohort"), names)),
        ("Did not reply", str(last.get("lost") or 0)),
        ("Replied too late", str(last.get("late") or 0)),
    ]
    if arrivals:
        words = [f"{_clients(e['clients'], names)} (round {e['round']})" for e in arrivals[-5:]]
        facts.append(("Joined later", "; ".join(words)))
    refused = last.get("rejected")
    for client, why in list(refused.items())[:_SHOWN] if isinstance(refused, Mapping) else ():
        facts.append((f"Rejected, {_clients([client], names)}", str(why)))
    return render("live/federation.html", facts=facts)


def _clients(clients: Any, names: list[str]) -> str:
    if not isinstance(clients, list) or not clients:
        return "no client"
    numbers = [int(c) for c in clients if str(c).isdecimal()]
    shown = [names[c] if c < len(names) else f"client {c}" for c in numbers[:_SHOWN]]
    rest = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
    return f"{', '.join(shown)}{rest}"


def block_part(block: Block) -> str:
    """A block as the JSON that pages get."""
    figure = {} if block.figure is None else {"figure": block.figure}
    return json.dumps({"html": block.html, **figure})


def row_part(html: Markup) -> str:
    """A row of the list as the JSON that pages get."""
    return json.dumps({"html": html, "row": True})
