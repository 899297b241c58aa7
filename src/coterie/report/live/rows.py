"""What the live page says of runs: the rows of the list, the state of one, its federation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from coterie.report.live.folders import (
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

WORDS = {
    FINISHED: "finished",
    RUNNING: "running",
    STOPPED: "stopped",
    WAITING: "waiting for clients",
    STOPPING: "stops after this round",
    STARTING: "starting",
    UNREADABLE: "cannot be read",
}
_ACTIONS = {RUNNING: "stop", WAITING: "stop", STOPPED: "resume"}
_SHOWN = 20  # clients of a federation that are named


def address_of(name: str) -> str:
    """Where a run's page is.

    >>> address_of("sweep/a b?")
    '/run/sweep/a%20b%3F'
    """
    return f"/run/{quote(name)}"


def row_id(name: str) -> str:
    """The id of a run's row in the list."""
    return f"run-{hashlib.blake2b(name.encode(), digest_size=6).hexdigest()}"


def summary(runs: Iterable[Glance], folder: str) -> str:
    """How many runs there are, in words.

    >>> summary([], "runs")
    'There is no run in runs yet: as soon as one begins, it is shown here.'
    """
    found = list(runs)
    if not found:
        return f"There is no run in {folder} yet: as soon as one begins, it is shown here."
    going = sum(run.status in (RUNNING, STOPPING, WAITING, STARTING) for run in found)
    return f"{len(found)} run{'s' * (len(found) != 1)}, {going or 'none'} going on."


def newest_first(runs: Iterable[Glance]) -> list[Glance]:
    """In an order that does not change while they go on."""
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
        bytes=size(run.bytes) if run.bytes else "–",
        changed=datetime.fromtimestamp(run.changed, UTC) if run.changed else None,
    )


# --- one run --------------------------------------------------------------------------------------


def state(run: Glance, failure: str = "", drawn: int | None = None) -> dict[str, Any]:
    """What the top of a run's page says and offers; ``drawn`` is the round of what is below it."""
    words = WORDS[run.status]
    told = f"{words[:1].upper()}{words[1:]}"
    if run.planned:
        told += f", round {run.round} of {run.planned}"
    if run.score is not None:
        unit = " %" if run.judged_by == "accuracy" else ""
        told += f", {run.headline} {score(run.score, run.judged_by)}{unit}"
    if drawn is not None and drawn != run.round:  # to draw takes longer than to say
        told += f". What follows is of {f'round {drawn}' if drawn else 'before round 1'}"
    failed = f"{failure[:1].upper()}{failure[1:]}." if failure else ""
    return {
        "status": run.status,
        "words": f"{told}.",
        "trouble": " ".join(filter(None, [failed, run.problem])),
        "action": _ACTIONS.get(run.status, ""),
        "value": run.round,
        "max": max(run.planned, 1),
    }


def gone(name: str) -> dict[str, Any]:
    """The same for a run that is not there any more, or ended before it had begun."""
    return {
        "status": "gone",
        "words": f"The run {name} is not there any more: this is what it was like.",
        "trouble": "",
        "action": "",
        "value": 0,
        "max": 1,
    }


def state_block(found: Mapping[str, Any]) -> Markup:
    """The state as HTML; the page fills in later ones itself, so that nothing loses its place."""
    return render("live/state.html", **found)


def federation(reading: Reading) -> Markup | None:
    """Who took part in a real federation of late, who came, whose answers could not be used."""
    rounds = reading.rounds
    if not any("spared" in event for event in rounds):
        return None
    last, names = rounds[-1], reading.names
    came = [e for e in reading.events if e.get("event") == "arrival" and e.get("clients")]
    told: list[tuple[str, str]] = [
        ("Asked in the last round", _clients(last.get("cohort"), names)),
        ("Did not answer", str(last.get("lost") or 0)),
        ("Answered too late", str(last.get("late") or 0)),
    ]
    if came:
        words = [f"{_clients(e['clients'], names)} (round {e['round']})" for e in came[-5:]]
        told.append(("Came later", "; ".join(words)))
    refused = last.get("rejected")
    for client, why in list(refused.items())[:_SHOWN] if isinstance(refused, Mapping) else ():
        told.append((f"Not used, {_clients([client], names)}", str(why)))
    return render("live/federation.html", facts=told)


def _clients(found: Any, names: list[str]) -> str:
    if not isinstance(found, list) or not found:
        return "nobody"
    numbers = [int(c) for c in found if str(c).isdecimal()]
    shown = [names[c] if c < len(names) else f"client {c}" for c in numbers[:_SHOWN]]
    more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
    return f"{', '.join(shown)}{more}"


def block_part(block: Block) -> str:
    """A block as it is sent to pages."""
    figure = {} if block.figure is None else {"figure": block.figure}
    return json.dumps({"html": block.html, **figure})


def row_part(run: Glance) -> str:
    """A row of the list as it is sent to pages."""
    return json.dumps({"html": row(run), "row": True})
