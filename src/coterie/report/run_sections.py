"""The parts of a page about one run beside its pictures: key numbers, tables and sentences.

Every part takes a reading and the id of its element; a part that has nothing to say is None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from coterie.report.compared_runs import saw_by
from coterie.report.figures.verdict import tried
from coterie.report.numbers import (
    bytes_so_far,
    client_name,
    client_rows,
    clock,
    group_count,
    kinds,
    privacy_loss,
    score_with_unit,
    scored,
)
from coterie.report.reading import FINISHED, RUNNING, Reading, number
from coterie.report.rendering import HtmlCell, render
from coterie.report.repeating import from_python, go_on, why_not
from coterie.report.scenario_tables import paper_notes, target_lines
from coterie.report.tables import (
    exposure_lines,
    newcomer_lines,
    percent,
    privacy_line,
    score,
    size,
)
from coterie.report.words import DAMAGE, MEANINGS, count, duration, saw_of
from coterie.results.findings import deciding, noted, probing_cost

_WORST = 5  # clients in the table of the worst


# --- numbers ------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """A key number: its title, its value, and the client and the words below it."""

    title: str
    value: str
    more: str = ""
    client: str = ""
    is_text: bool = False


def tiles(reading: Reading, id: str) -> Markup:
    """The key numbers of a run."""
    by, numbers = reading.judged_by, list[Tile]()
    for title in ("received", "adapted"):
        if scores := scored(reading, title):
            numbers.append(
                Tile(title.capitalize(), score_with_unit(scores.get(by), by), "mean over clients")
            )
    judged = scored(reading, reading.headline) or scored(reading, "received")
    if judged.get("worst") is not None:
        client = client_name(reading, judged.get("worst_client"))
        how = "after adapting" if judged is scored(reading, "adapted") else ""
        numbers.append(Tile("Worst client", score_with_unit(judged["worst"], by), how, client))
    if groups := group_count(reading):
        members = len([g for g in reading.groups if g is not None])
        of = f"of {count(members, 'client')}" if members else ""
        numbers.append(Tile("Groups", str(groups), of))
    if total := bytes_so_far(reading):
        down, up = total.get("down", 0), total.get("up", 0)
        numbers.append(Tile("Bytes", size(down + up), f"{size(down)} down, {size(up)} up"))
    if spent := clock(reading):
        numbers.append(Tile("Simulated time", duration(spent["total"]), "on the run's clock"))
    numbers.append(Tile("Rounds", str(len(reading.rounds)), _of_planned(reading)))
    if noise := privacy_loss(reading):
        delta = f"at δ = {noise['delta']:.2g}" if noise.get("delta") is not None else ""
        numbers.append(Tile("Privacy loss", f"ε ≤ {noise['epsilon']:.3g}", delta))
    if reading.result.get("exposure") or reading.result.get("sees"):
        numbers.append(Tile("The server saw", saw_of(saw_by(reading)), is_text=True))
    known = {
        tile.title: MEANINGS.get(_WORDS_OF.get(tile.title, tile.title.lower())) for tile in numbers
    }
    meanings = [(title, text) for title, text in known.items() if text]
    return render("run/tiles.html", id=id, tiles=numbers, meanings=meanings)


_WORDS_OF = {"The server saw": "server saw", "Privacy loss": "ε"}


def _of_planned(reading: Reading) -> str:
    if reading.status == FINISHED:
        return str(reading.result.get("stopped") or "")
    return f"of {reading.planned} planned" if reading.planned else ""


def notice(reading: Reading, id: str, problems: Sequence[str] = ()) -> Markup:
    """A box about a run that is not finished, and about what could not be read."""
    done, planned = len(reading.rounds), reading.planned
    so_far = f"{done} of {count(planned, 'round')}" if planned else count(done, "round")
    state = {FINISHED: "", RUNNING: "running"}.get(reading.status, "stopped")
    stopped = state == "stopped"
    has_command = not from_python(reading) and reading.path is not None
    return render(
        "run/notice.html",
        id=id,
        state=state,
        so_far=so_far,
        command=go_on(reading) if stopped else "",
        why_not=why_not(reading) if stopped and has_command else "",
        problems=problems,
    )


def unread(id: str, problems: Sequence[str]) -> Markup:
    """A box about what could not be read."""
    return render("run/notice.html", id=id, state="", problems=problems)


# --- clients ------------------------------------------------------------------------------------


_CLIENT_COLUMNS = {
    "client": "client",
    "group": "group",
    "true_group": "true group",
    "newcomer": "newcomer",
    "received": "received",
    "adapted": "adapted",
    "alone": "alone",
    "gain": "over alone",
    "train": "training samples",
    "test": "test samples",
    "bytes": "bytes",
}


def clients(reading: Reading, id: str, level: int, captions: str) -> Markup | None:
    """The worst clients, and all clients in a folded table."""
    by, rows = reading.judged_by, client_rows(reading)
    judged = reading.headline if any(r[reading.headline] is not None for r in rows) else "received"
    scored_rows = [r for r in rows if r[judged] is not None and not r["newcomer"]]
    if not scored_rows:
        return None
    keys = [k for k in _CLIENT_COLUMNS if any(r[k] not in (None, "") for r in rows)]
    worst = sorted(scored_rows, key=lambda r: r[judged])[:_WORST]
    unit = ", in %" if by == "accuracy" else ""

    def cells(row: Mapping[str, Any], keys: Sequence[str]) -> list[HtmlCell]:
        return [HtmlCell(_client_cell(key, row[key], by), row[key]) for key in keys]

    members = [k for k in keys if k != "newcomer"]  # the worst are chosen among the others
    return render(
        "run/clients.html",
        id=id,
        level=level,
        judged=judged,
        unit=unit,
        everyone="The only client" if len(rows) == 1 else f"All {len(rows)} clients",
        columns=[_CLIENT_COLUMNS[k] for k in keys],
        rows=[cells(row, keys) for row in rows],
        worst_columns=[_CLIENT_COLUMNS[k] for k in members],
        worst=[cells(row, members) for row in worst],
    )


def _client_cell(key: str, value: Any, judged_by: str) -> str | None:
    if value is None or value == "":
        return None
    if key in ("received", "adapted", "alone"):
        return score(value, judged_by)
    if key == "gain":
        return f"{100 * value:+.1f}" if judged_by == "accuracy" else f"{value:+.3f}"
    if key == "bytes":
        return size(value)
    return f"{value:.0f}" if key in ("train", "test") else str(value)


def newcomers(reading: Reading, id: str, level: int, captions: str) -> Markup | None:
    """The clients that joined at the end."""
    joined = reading.result.get("newcomers")
    if not isinstance(joined, Mapping):
        return None
    from rich.text import Text

    lines = [Text.from_markup(line).plain.strip() for line in _newcomers(reading, joined)]
    bare = [line.removeprefix("newcomers").strip() for line in lines]
    text = [line.replace("   ", "; ") for line in bare]  # the terminal has columns
    return render("run/newcomers.html", id=id, level=level, lines=text)


def _newcomers(reading: Reading, joined: Mapping[str, Any]) -> list[str]:
    try:
        return newcomer_lines(joined, reading.judged_by)
    except DAMAGE:  # a run of another version
        return []


# --- groups -------------------------------------------------------------------------------------


def between(reading: Reading, id: str, level: int, captions: str) -> Markup | None:
    """The clients that are closer to another group than to their own."""
    decided = deciding(reading.events, "evidence", group_count(reading))
    if decided is None or not (reading.grouping.get("evidence") or {}).get("between"):
        return None
    notes, groups = decided[1], reading.groups
    pairs = zip(notes["clients"], notes["certainty"], strict=True)
    rows = [
        (client_name(reading, c), _at(groups, c), HtmlCell(f"{sure:+.2f}", sure))
        for sure, c in sorted((sure, c) for c, sure in pairs if sure < 0)
    ]
    return render("run/between.html", id=id, level=level, rows=rows)


def _at(values: Sequence[Any], place: int) -> str | None:
    value = values[place] if place < len(values) else None
    return None if value is None else str(value)


def trials(reading: Reading, id: str, level: int, captions: str) -> Markup | None:
    """The result of each trial of groups; the one that decided is unfolded."""
    last = deciding(reading.events, "verdict", group_count(reading))
    verdicts = [each for each in noted(reading.events, "verdict") if each[1].get("losses")]
    if not verdicts:
        return None
    trials = [
        {
            "round": round,
            "why": str(notes.get("why", "")).rstrip("."),
            "rows": _tried(notes),
            "decided": last is not None and last[0] == round,
        }
        for round, notes in verdicts
    ]
    return render("run/trials.html", id=id, level=level, trials=trials)


def _tried(notes: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    return [
        (
            HtmlCell("one model" if groups == 1 else str(groups), groups),
            HtmlCell(f"{loss:.4f}", loss),
            HtmlCell(f"{error:.4f}" if error else "lowest", error),
            "chosen" if groups == notes.get("chosen") else "",
        )
        for groups, loss, error in tried(notes)
    ]


# --- cost ---------------------------------------------------------------------------------------


def bytes_by_kind(reading: Reading, id: str, level: int, captions: str) -> Markup | None:
    """The bytes by kind."""
    largest_first = sorted(kinds(reading).items(), key=lambda item: -sum(item[1]))
    if not largest_first:
        return None
    total = sum(down + up for _, (down, up) in largest_first) or 1
    rows = [
        (
            kind,
            HtmlCell(size(down), down),
            HtmlCell(size(up), up),
            HtmlCell(f"{percent((down + up) / total)} %", down + up),
        )
        for kind, (down, up) in largest_first
    ]
    sums = dict[str, Any](reading.result.get("bytes") or {})
    computing = _defensively(lambda: probing_cost(reading.grouping), "")
    unmetered = [
        ("scoring, and work that a real client does on its own", "unmetered"),
        ("replies that did not count", "wasted"),
    ]
    unmetered_bytes = []
    for title, key in unmetered:
        pair = sums.get(key) or {}
        if pair.get("down") or pair.get("up"):
            unmetered_bytes.append(f"{title}: {size(pair['down'])} down, {size(pair['up'])} up")
    return render(
        "run/bytes.html",
        id=id,
        level=level,
        rows=rows,
        unmetered=unmetered_bytes,
        computing=computing,
    )


def time_by_part(reading: Reading, id: str, level: int, captions: str) -> Markup | None:
    """The seconds by part, simulated and of this computer."""
    rows: list[tuple[Any, ...]] = []
    spent = clock(reading)
    words = {"computation": "computing", "communication": "communicating", "waiting": "waiting"}
    for key, title in words.items():
        if spent.get(key):
            rows.append((f"simulated, {title}", HtmlCell(duration(spent[key]), spent[key])))
    real = [e["seconds"] for e in reading.rounds if isinstance(e.get("seconds"), Mapping)]
    for key, title in (("train", "training"), ("score", "scoring")):
        value = sum(number(s.get(key)) or 0 for s in real)
        if value:
            rows.append((f"this run itself, {title}", HtmlCell(duration(value), value)))
    if not rows:
        return None
    return render("run/time.html", id=id, level=level, rows=rows)


# --- privacy ------------------------------------------------------------------------------------


def exposure(reading: Reading, id: str, level: int, captions: str) -> Markup | None:
    """What the server saw, unless a caption says it already, and the promised privacy."""
    lines = _defensively(lambda: exposure_lines(reading.result), [])
    promised = reading.result.get("privacy")
    line = _defensively(lambda: privacy_line(promised) if promised else "", "")
    text = [each for each in lines if each not in captions]
    if not text and not line:
        return None
    return render("run/exposure.html", id=id, sentences=text, promised=line)


def paper(reading: Reading, id: str, level: int, captions: str) -> Markup | None:
    """The published figure of the run's scenario, if it has one."""
    about = reading.scenario or reading.result.get("scenario") or {}
    if not about:
        return None
    figure, spread = number(about.get("figure")), number(about.get("spread"))
    published = f"no figure for {about.get('method')} with these parameters"
    if figure is not None:
        plus = f" ± {percent(spread)}" if spread is not None else ""
        published = f"{percent(figure)}{plus} % for {about.get('method')}"
    notes = _defensively(lambda: target_lines(about, reading.result), [])
    notes += _defensively(lambda: paper_notes({about["method"]: about}), [])
    return render(
        "run/paper.html",
        id=id,
        level=level,
        name=about.get("name", "scenario"),
        figure=published,
        notes=[note.removeprefix("paper: ") for note in notes],
    )


def _defensively(make: Callable[[], Any], otherwise: Any) -> Any:
    """What ``make`` returns, or else ``otherwise`` where the run is of a version that lacks it."""
    try:
        return make()
    except DAMAGE:
        return otherwise


# It takes the level of its heading, and the captions of its section.
TableMaker = Callable[[Reading, str, int, str], Markup | None]
# The parts of each section that follow its pictures, by the name in their ids.
TABLES: dict[str, dict[str, TableMaker]] = {
    "accuracy": {"paper": paper},
    "clients": {"table-clients": clients, "newcomers": newcomers},
    "groups": {"table-between": between, "table-trials": trials},
    "cost": {"table-bytes": bytes_by_kind, "table-time": time_by_part},
    "privacy": {"exposure": exposure},
}
