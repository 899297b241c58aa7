"""Tables for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from coterie.channel.exposure import sentences
from coterie.results.findings import grouping_lines

_BLOCKS = " ▁▂▃▄▅▆▇█"


def size(bytes: float, digits: int = 2) -> str:
    """A number of bytes with its unit.

    >>> size(532), size(1_500_000)
    ('532 B', '1.50 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if bytes < 1000 or unit == "GB":
            return f"{bytes:.0f} B" if unit == "B" else f"{bytes:.{digits}f} {unit}"
        bytes /= 1000
    raise AssertionError


def percent(value: float | None, digits: int = 1) -> str:
    """A share as a percentage, or a dash.

    >>> percent(0.7153), percent(None)
    ('71.5', '–')
    """
    return "–" if value is None else f"{100 * value:.{digits}f}"


def score(value: float | None, judged_by: str) -> str:
    """A headline score: accuracies as percentages, other scores with three decimals."""
    if value is None:
        return "–"
    return percent(value) if judged_by == "accuracy" else f"{value:.3f}"


def round_line(event: Mapping[str, Any], rounds: int, judged_by: str) -> str:
    """One round on one line."""
    received = event.get("received", {})
    unit = " %" if judged_by == "accuracy" else ""
    groups = len({g for g in event["groups"] if g is not None})
    moved = event["bytes"]
    parts = [f"round {event['round']}/{rounds}"]
    if received:
        parts.append(f"received {score(received[judged_by], judged_by)}{unit}")
        parts.append(f"worst {score(received['worst'], judged_by)}{unit}")
    if adapted := event.get("adapted"):
        parts.append(f"adapted {score(adapted[judged_by], judged_by)}{unit}")
    if groups > 1:
        parts.append(f"{groups} groups")
    parts.append(f"{size(moved['down'])} down, {size(moved['up'])} up")
    parts.append(f"{sum(event['seconds'].values()):.1f} s")
    if "clock" in event:
        parts.append(f"clock {event['clock']['total']:.1f} s")
    parts += [f"{event[key]} {key}" for key in ("lost", "late") if event.get(key)]
    if rejected := event.get("rejected"):
        parts.append(f"left out: client{'s' * (len(rejected) > 1)} {', '.join(rejected)}")
    if "privacy" in event:
        parts.append(f"ε ≤ {event['privacy']['epsilon']:.3g}")
    if "abandoned" not in event:
        parts += [f"withheld: {why}" for why in event.get("withheld", {}).values()]
    if "abandoned" in event:
        parts.append(f"abandoned: {event['abandoned']}")
    return "  ".join(parts)


def exposure_lines(summary: Mapping[str, Any]) -> list[str]:
    """Sentences about what the server saw of clients; none for an older run."""
    exposed = summary.get("exposure")
    return [] if exposed is None else sentences(exposed)


def left_out(reasons: Mapping[str, str]) -> list[str]:
    """The lines below a comparison about methods that are left out."""
    return [f"left out: {title} ({reason})" for title, reason in reasons.items()]


def target_picture(
    targets: Sequence[np.ndarray], groups: Sequence[int] | None, most: int = 40
) -> Table:
    """The clients' targets: a row for each client, a bar for each tenth of the range."""
    table = Table(title="Training targets of each client, from the lowest to the highest of all")
    table.add_column("client", justify="right")
    if groups is not None:
        table.add_column("true group", justify="right")
    for name in ("where they lie", "lowest", "mean", "highest", "samples"):
        table.add_column(name, justify="right", no_wrap=True)
    low, high = min(float(t.min()) for t in targets), max(float(t.max()) for t in targets)
    for i, values in enumerate(targets[:most]):
        counts, _ = np.histogram(values, bins=10, range=(low, high))
        bar = "".join(_block(n / counts.max()) for n in counts).replace(" ", "·")
        group = [] if groups is None else [str(groups[i])]
        numbers = [f"{n:.4g}" for n in (values.min(), values.mean(), values.max())]
        table.add_row(str(i), *group, bar, *numbers, str(len(values)))
    if len(targets) > most:
        table.caption = f"the first {most} of {len(targets)} clients"
    return table


def _block(share: float) -> str:
    return _BLOCKS[int(np.ceil(share * (len(_BLOCKS) - 1)))]


def label_picture(
    counts: np.ndarray, classes: Sequence[str], groups: Sequence[int] | None, most: int = 40
) -> Table:
    """The clients' labels: a row for each client, a bar for each class."""
    table = Table(
        title="Training samples of each client, by class", show_lines=False, pad_edge=False
    )
    table.add_column("client", justify="right")
    if groups is not None:
        table.add_column("true group", justify="right")
    narrow = len(classes) > 12  # one column for all classes, one character each
    for name in [f"classes {classes[0]} to {classes[-1]}"] if narrow else classes:
        shown = escape(name if narrow else name[:8])
        table.add_column(shown, justify="center", overflow="fold", no_wrap=not narrow)
    table.add_column("samples", justify="right")
    top = max(1, int(counts.max()))
    for i, row in enumerate(counts[:most]):
        blocks = [_block(n / top) for n in row]
        cells = ["".join(blocks).replace(" ", "·")] if narrow else [2 * b for b in blocks]
        group = [] if groups is None else [str(groups[i])]
        table.add_row(str(i), *group, *cells, str(int(row.sum())))
    if len(counts) > most:
        table.caption = f"the first {most} of {len(counts)} clients"
    return table


def print_summary(out: Console, summary: Mapping[str, Any], path: Path) -> None:
    """Print the result of a run in a few lines."""
    by = summary["judged_by"]
    unit = " %" if by == "accuracy" else ""
    for title in ("received", "adapted", "alone"):
        s = summary.get(title)
        if s:
            out.print(
                f"[bold]{title:>9}[/]  {score(s[by], by)}{unit} mean   "
                f"{score(s['worst'], by)}{unit} worst (client {s['worst_client']})   "
                f"{score(s['p10'], by)}{unit} 10th percentile   loss {s['loss']:.3f}",
                soft_wrap=True,
            )
    for line in newcomer_lines(summary.get("newcomers"), by):
        out.print(line, soft_wrap=True)
    best = summary["best_on_validation"]
    if best:
        out.print(
            f"     [bold]best[/]  {score(best['received'][by], by)}{unit} received in round "
            f"{best['round']}, the best on validation data",
            soft_wrap=True,
        )
    moved, wasted = summary["bytes"], sum(summary["bytes"]["wasted"].values())
    out.print(
        f"    [bold]bytes[/]  {size(moved['down'])} down, {size(moved['up'])} up"
        f"{f', {size(wasted)} more wasted' if wasted else ''}   "
        f"[bold]groups[/] {summary['groups']}   [bold]seconds[/] {summary['seconds']:.1f}",
        soft_wrap=True,
    )
    _print_titled(out, "grouping", grouping_lines(summary.get("grouping") or {}))
    for line in _wire_lines(summary, by):
        out.print(line, soft_wrap=True)
    if promised := summary.get("privacy"):
        out.print(f"  [bold]privacy[/]  {escape(privacy_line(promised))}", soft_wrap=True)
    _print_titled(out, "exposed", exposure_lines(summary))
    _print_titled(out, "warning", summary.get("warnings") or [], "yellow")
    out.print(f"     [bold]kept[/]  {escape(str(path))}", soft_wrap=True)


def _print_titled(out: Console, title: str, lines: Sequence[str], style: str = "bold") -> None:
    """Print sentences one below the other, the first after a title."""
    for number, line in enumerate(lines):
        shown = "" if number else title
        out.print(f"[{style}]{shown:>9}[/]  {escape(line)}", highlight=False, soft_wrap=True)


LARGE = 0.01  # a δ above this means hardly anything


def privacy_line(privacy: Mapping[str, Any]) -> str:
    """The promised privacy and the privacy loss, in one line.

    >>> privacy_line({"secure": True, "randomness": "simulated"})
    'secure aggregation; simulated: keys and noise come from the seed'
    """
    words = ["secure aggregation"] if privacy["secure"] else []
    if "epsilon" in privacy:
        budget = f" of {privacy['budget']:g}" if privacy.get("budget") else ""
        words.append(
            f"ε = {privacy['epsilon']:.3g}{budget} at δ = {privacy['delta']:.2g} "
            f"({privacy['accountant']}; {privacy['adjacency']})"
        )
        if privacy["delta"] > LARGE:
            words.append("such a large δ promises little: client-level privacy needs many clients")
    if "noise" in privacy:
        words.append(
            f"noise {privacy['noise']:.3g} × clip {privacy['clip']:.3g} ({privacy['clipping']}), "
            f"{privacy['mechanism']}"
        )
    if privacy["randomness"] == "simulated":
        words.append("simulated: keys and noise come from the seed")
    else:
        words.append("keys and noise from the operating system")
    return "; ".join(words)


def _wire_lines(summary: Mapping[str, Any], judged_by: str) -> list[str]:
    """The clock, the cost to the target, lost replies, and why the run ended early."""
    lines = []
    if clock := summary.get("clock"):
        waited = f", {clock['waiting']:.1f} waiting" if clock["waiting"] else ""
        lines.append(
            f"    [bold]clock[/]  {clock['total']:.1f} s: {clock['computation']:.1f} computing, "
            f"{clock['communication']:.1f} communicating{waited}"
        )
    if "to_target" in summary:
        reached = summary["to_target"]
        text = "the target was never reached"
        if reached:
            at = f"{score(reached['target'], judged_by)}{' %' * (judged_by == 'accuracy')}"
            spent = f" and {reached['seconds']:.1f} s" if "seconds" in reached else ""
            text = (
                f"{at} first in round {reached['round']}, after "
                f"{size(sum(reached['bytes'].values()))}"
                f"{spent}"
            )
        lines.append(f"   [bold]target[/]  {text}")
    wrong = {"lost": "lost", "late": "late", "abandoned": "rounds abandoned"}
    counts = [f"{summary[k]} {words}" for k, words in wrong.items() if summary[k]]
    if counts:
        lines.append(f"  [bold]reports[/]  {', '.join(counts)}")
    if summary["stopped"]:
        lines.append(
            f"    [bold]ended[/]  after {summary['rounds']} rounds: {escape(summary['stopped'])}"
        )
    return lines


def newcomer_lines(newcomers: Mapping[str, Any] | None, judged_by: str) -> list[str]:
    """The newcomers' scores, groups and cost, and the clients that did not answer."""
    if newcomers is None:
        return []
    unit = " %" if judged_by == "accuracy" else ""
    members, moved = Counter(newcomers["groups"]), newcomers["bytes"]
    means = "not scored"
    if newcomers["received"]:
        received, adapted = (
            score(newcomers[k][judged_by], judged_by) for k in ("received", "adapted")
        )
        means = f"{received}{unit} received, {adapted}{unit} adapted"
    lines = [
        f"[bold]newcomers[/]  {means} after {_epochs(newcomers)}   "
        f"{size(moved['down'])} down, {size(moved['up'])} up to join"
    ]
    if members:
        # Where each client is its own group, as without sharing, the list would be useless.
        alone = len(members) > 1 and max(members.values()) == 1
        shares = [f"{n} in group {group}" for group, n in sorted(members.items(), key=_by_size)]
        where = "each in a group of its own" if alone else ", ".join(shares)
        lines.append(f"           {len(newcomers['clients'])} joined: {escape(where)}")
    if newcomers["unanswered"]:
        names = ", ".join(str(c) for c in newcomers["unanswered"])
        lines.append(f"           {len(newcomers['unanswered'])} did not answer: {names}")
    return lines


def _epochs(table: Mapping[str, Any]) -> str:
    return f"{table['epochs']} epoch{'s' * (table['epochs'] != 1)}"


def _by_size(item: tuple[Any, int]) -> tuple[int, str]:
    return -item[1], str(item[0])


def print_admitted(out: Console, admitted: Mapping[str, Any], judged_by: str, model: Path) -> None:
    """Print an admitted newcomer's group, scores and cost in a few lines."""
    unit = " %" if judged_by == "accuracy" else ""
    samples = admitted["samples"]
    means = f"after {_epochs(admitted)} on its {samples['train']} training samples"
    lines = [f"   [bold]joined[/]  group {escape(str(admitted['group']))}"]
    if samples["test"]:
        for title, how in (
            ("received", f"on its {samples['test']} test samples"),
            ("adapted", means),
        ):
            value = score(admitted[title][judged_by], judged_by)
            lines.append(f"[bold]{title:>9}[/]  {value}{unit} {how}")
    else:
        lines.append(f"  [bold]adapted[/]  {means}; it has no test samples, so there is no score")
    moved = admitted["bytes"]
    lines.append(f"    [bold]bytes[/]  {size(moved['down'])} down, {size(moved['up'])} up to join")
    lines.append(f"    [bold]model[/]  {escape(str(model))}")
    for line in lines:
        out.print(line, highlight=False, soft_wrap=True)
