"""Captions of the pictures of groups, and of how methods found them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from coterie.core.events import Event
from coterie.errors import ConfigError
from coterie.report.figures import matrices
from coterie.report.figures.divergence import compare
from coterie.report.figures.following import followed, names_of_groups, steps_of_groups
from coterie.report.figures.methods import (
    clusterings,
    mixed_rounds,
    radii_of,
    rapid_ends,
    trials_of,
    was_bent,
)
from coterie.report.figures.streams import streams
from coterie.report.figures.style import having, series
from coterie.report.figures.trees import cut_height, is_cut, later_cuts
from coterie.report.figures.verdict import tried, without_own
from coterie.report.reading import Reading
from coterie.report.words import count, noted_round
from coterie.results.findings import Noted, deciding, noted, spoken


def noting(reading: Reading, key: str) -> Event:
    """The first event whose notes have this key; a ``ConfigError`` if none has."""
    for event in reading.events:
        if (event.get("notes") or {}).get(key) is not None:
            return event
    raise ConfigError(f"{reading.name}: {reading.method} recorded no '{key}'")


def setting(reading: Reading, key: str, otherwise: float) -> float:
    """A parameter of the run's method, or its default."""
    table = reading.config.get("method")
    value = table.get(key) if isinstance(table, Mapping) else None
    return float(value) if isinstance(value, int | float) else otherwise


def threshold(reading: Reading) -> float:
    """FedTSDP's threshold: above this Hopkins statistic it clusters the clients again."""
    return setting(reading, "hopkins", 0.65)


# --- groups ---------------------------------------------------------------------------------------


def groups(reading: Reading) -> str:
    """The caption of the flow of clients between groups."""
    steps = steps_of_groups(reading.events)
    kept = followed(names_of_groups(steps))
    flow = streams([e["round"] for e in steps], kept)
    first, last = (_so_many(kept[i]) for i in (0, -1))
    begin, end = (
        "at the start" if steps[i]["round"] == 0 else f"after round {steps[i]['round']}"
        for i in (0, -1)
    )
    if not flow.changes:
        return f"{first.capitalize()} {begin}; no client ever changed groups."
    text = (
        f"{first.capitalize()} {begin}, {last} {end}; clients changed groups in "
        f"{count(flow.changes, 'round')}."
    )
    hidden = flow.changes - (len(flow.rounds) - 1)
    if hidden > 0:
        text += f" The {len(flow.rounds)} columns are the rounds in which most clients moved."
    return (
        f"{text} The labels beside the last column are the groups, with their numbers of clients."
    )


def _times(number: int) -> str:
    return "once" if number == 1 else "twice" if number == 2 else f"{number} times"


def _so_many(column: Sequence[int | None]) -> str:
    sizes = Counter(g for g in column if g is not None)
    if not sizes:
        return "no client in a group"
    lone = sum(n == 1 for n in sizes.values())
    if lone == len(sizes) and lone > 1:
        return f"{lone} clients, each in a group of its own,"
    singles = f" ({lone} of one client)" if lone and len(sizes) > 1 else ""
    return f"{count(len(sizes), 'group')}{singles}"


def groups_by_client(reading: Reading) -> str:
    """The caption of the map of groups, clients over rounds."""
    steps = steps_of_groups(reading.events)
    kept = followed(names_of_groups(steps))
    histories = list(zip(*kept, strict=True))
    kept_by = [{g for g in own if g is not None} for own in histories]
    there = [own for own in kept_by if own]  # a client that is held out has no group
    moved = sum(len(own) > 1 for own in there)
    return (
        "Each row is a client and each colour a group, followed through the rounds; a client "
        "alone "
        f"is grey. {moved} of {count(len(there), 'client')} changed groups at some time."
    )


def labels(reading: Reading) -> str:
    """The caption of the labels or targets that clients have."""
    data = reading.data
    held = data.get("labels")
    if held is None:
        spread = [five for five in data.get("quartiles") or () if five]
        low, high = min(five[2] for five in spread), max(five[2] for five in spread)
        return f"The clients' median targets lie between {low:.4g} and {high:.4g}."
    filled = [row for row in held if sum(row)]
    class_counts = [sum(n > 0 for n in row) for row in filled]
    tops = [max(row) / sum(row) for row in filled]
    few, many = min(class_counts), max(class_counts)
    between = f"{few}" if few == many else f"between {few} and {many}"
    return (
        f"Clients have samples of {between} of {len(held[0])} classes; a client's most frequent "
        "class "
        f"makes up {100 * min(tops):.0f} to {100 * max(tops):.0f} % of its samples."
    )


def dendrogram(reading: Reading) -> str:
    """The caption of the merge tree."""
    event = with_tree(reading)
    notes = event["notes"]
    merges = notes["dendrogram"]
    top = merges[-1][2]
    text = (
        f"The tree of {len(merges) + 1} clients, built {noted_round(event)}, has height {top:.3g}"
    )
    cut = cut_height(notes, top)
    if cut is not None:
        undone = sum(m[2] > cut for m in merges)
        later = later_cuts(reading.events)
        at_first = " at first" if later else ""
        text += f"; the cut at {cut:.3g} leaves {count(undone + 1, 'group')}{at_first}"
        cuts = [
            f"in round {c.round} at {c.gamma * top:.3g} with {count(c.groups, 'group')}"
            for c in later
            if c.of_tree
        ]
        text += f". Later cuts that were adopted: {', '.join(cuts)}" if cuts else ""
    why = str(notes.get("why") or "").rstrip(".")
    uncut = _no_cut(reading, notes)
    if notes.get("evidence") or uncut:
        text += f". Colours show the clients' present groups{uncut}"
    if notes.get("evidence"):
        return f"{text}. The evidence: {why}."
    where = "Reason for this cut" if cut is not None else "Reason for these groups"
    return f"{text}. {where}: {why}." if why else f"{text}."


def _no_cut(reading: Reading, notes: Mapping[str, Any]) -> str:
    """A remark where no cut of the tree gives the present groups."""
    if not reading.groups or is_cut(notes, reading.groups):
        return ""
    return (
        f": no cut of this tree gives these {_group_count(reading)} groups, so look at its leaves"
    )


def with_tree(reading: Reading) -> Event:
    """The event whose tree is drawn: that of the deciding evidence, or else the first tree."""
    decided = deciding(reading.events, "evidence", _group_count(reading))
    for event in reading.events:
        notes = event.get("notes") or {}
        if decided is not None and notes.get("evidence") is decided[1] and notes.get("dendrogram"):
            return event
    return noting(reading, "dendrogram")


def _group_count(reading: Reading) -> int:
    return len({g for g in reading.groups if g is not None})


def last_verdict(reading: Reading) -> Noted:
    """The trial that decided on the groups, with its round; a ``ConfigError`` if there was none."""
    trial = deciding(reading.events, "verdict", _group_count(reading))
    if trial is None:
        raise ConfigError(f"{reading.name}: {reading.method} ran no trial of its groups")
    return trial


def verdict(reading: Reading) -> str:
    """The caption of the trial of groups."""
    number, notes = last_verdict(reading)
    points = tried(notes)
    best = min(points, key=lambda p: p[1])
    choice = "one model" if best[0] == 1 else f"{best[0]} groups"
    reason = str(notes.get("why", "")).rstrip(".")
    before = len(noted(reading.events, "verdict")) - 1
    other_trials = f" The table below has {count(before, 'other trial')}." if before else ""
    has_dashes = without_own(notes)
    others = (
        " Dashed: the loss of a client's group without the client's own update."
        if has_dashes
        else ""
    )
    return (
        f"In round {number}, {count(int(notes['clients']), 'client')} scored {len(points)} numbers "
        f"of groups on their validation data; {choice} had the lowest mean loss, {best[1]:.3f}. "
        "Bars "
        f"are standard errors of the difference from it.{others} The verdict: "
        f"{reason}.{other_trials}"
    )


def similarity(reading: Reading) -> str:
    """The caption of the matrix of distances: their means inside groups and between them."""
    pairs = matrices.pairs_of(reading.events)
    groups = reading.groups
    inside: list[float] = []
    between: list[float] = []
    for i, a in enumerate(pairs.clients):
        for j, b in enumerate(pairs.clients[:i]):
            distance = pairs.rows[i][j]
            if distance is None or max(a, b) >= len(groups):
                continue
            (inside if groups[a] == groups[b] else between).append(distance)
    when = "before round 1" if not pairs.round else f"in round {pairs.round}"
    text = f"The {pairs.what} of each pair of {len(pairs.clients)} clients, {when}"
    if inside and between:
        text += (
            f": {_mean(inside):.3g} on average inside the final groups, "
            f"{_mean(between):.3g} between them"
        )
    ends = ("alike", "unlike") if pairs.alike else ("near", "far apart")
    return f"{text}. Strong colours are {ends[0]}, faint ones {ends[1]}."


def divergence(reading: Reading, groups: Sequence[Any]) -> str:
    """The caption of label divergence against model distance."""
    compared = compare(reading.events, reading.data)
    size = len(compared.clients)
    pairs = size * (size - 1) // 2
    values = [(what, compared.correlation(what)) for what in compared.models]
    correlations = [
        f"{r:.3f} ({what})" if r == r else f"not defined ({what})" for what, r in values
    ]
    text = (
        f"Each point is a pair of {size} clients: the symmetric Kullback-Leibler divergence of "
        "their "
        f"labels, and their distance as the method measures it. Strong colours in the matrices are "
        f"near, faint ones far apart. Pearson's correlation over "
        f"{count(pairs, 'pair')}: {', '.join(correlations)}."
    )
    if compared.pairs(compared.together(groups)).any():
        text += " Diamonds are pairs in the same group."
    if len(compared.models) > 1:
        text += " DC-PFL's paper reports 0.895 for scaled models of 30 clients."
    return text


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def mixed_by(reading: Reading) -> tuple[Sequence[Any], str]:
    """The groups that order clients in a picture of their mixtures, and what they are called.

    They are the true groups where all clients share one model, or each has its own.
    """
    groups, true = reading.groups, reading.data.get("groups") or ()
    ended = [g for g in groups if g is not None]
    if not 1 < len(set(ended)) < len(ended) and len(set(true)) > 1 and len(true) >= len(groups):
        return true, "true group"
    return groups, "group"


def mixing(reading: Reading) -> str:
    """The caption of the mixing weights."""
    try:
        notes = noting(reading, "mixing")["notes"]
    except ConfigError:
        return (
            "Each row is a client: whose models helped it, over all rounds, as shares that sum to "
            "1."
        )
    rows = notes["mixing"]
    clients_ = notes.get("clients") or list(range(len(rows)))
    groups, by = mixed_by(reading)
    own_share = _mean([row[i] for i, row in enumerate(rows)])
    group_share = _mean(
        [
            sum(w for w, d in zip(row, clients_, strict=True) if groups[d] == groups[c])
            for c, row in zip(clients_, rows, strict=True)
        ]
    )
    return (
        f"On average, {100 * own_share:.0f} % of a client's mixture is its own model, and "
        f"{100 * group_share:.0f} % comes from its {by}, its own model included."
    )


# --- methods --------------------------------------------------------------------------------------


def trials(reading: Reading) -> str:
    """The caption of DC-PFL's trials."""
    found = [trial for _, trial in trials_of(reading.rounds)]
    adopted = sum(bool(t["adopted"]) for t in found)
    ends = rapid_ends(reading.rounds)
    mixed = mixed_rounds(reading.rounds)
    losses = [p for p in series(reading.rounds, "loss", "DC-PFL") if p[0] not in mixed]
    text = f"The training loss went from {losses[0][1]:.3g} to {losses[-1][1]:.3g}; "
    if ends:
        numbers = spoken([str(r) for r in sorted(ends)])
        rounds = f"round{'s' * (len(ends) > 1)} {numbers}"
        text += f"a rapid decrease (shaded) ended {_times(len(ends))} (in {rounds})"
    else:
        text += "no rapid decrease ended"
    text += f"; {_radius(reading)}"
    tried = f"; of {count(len(found), 'trial')}, {adopted} adopted new groups (✓)" if found else ""
    return f"{text}{tried}."


def _radius(reading: Reading) -> str:
    """Where the radius of curvature was smallest, or why there is none."""
    known = [(v, r) for r, v in radii_of(reading.rounds) if v is not None]
    if known:
        value, number = min(known)
        return f"the radius of curvature was smallest in round {number}, {value:.3g}"
    bend = reading.settings("method").get("bend", "slope")
    smooth = 1 if bend == "absolute" else int(setting(reading, "smooth", 5))
    if was_bent(reading.rounds, smooth + 2, with_mixed=bend != "slope"):
        return "the loss has no finite radius of curvature"
    return "there were too few rounds for a radius of curvature"


def layers(reading: Reading) -> str:
    """The caption of layer-wise aggregation."""
    quiet = Counter(
        layer
        for e in having(reading.rounds, "layers")
        for rested in (e["notes"]["layers"].get("quiet") or {}).values()
        for layer in rested
    )
    if not quiet:
        return "No layer differed so little between clients that it was skipped."
    layer, _ = quiet.most_common(1)[0]
    return f"Layers in which clients hardly differ are skipped in some rounds, {layer} most often."


def hopkins(reading: Reading) -> str:
    """The caption of FedTSDP's rounds."""
    statistics = series(reading.rounds, "hopkins", "FedTSDP")
    shared = series(reading.rounds, "shared_layers", "FedTSDP")
    least = threshold(reading)
    exceeding = sum(v > least for _, v in statistics)
    clustered = clusterings(reading.rounds, least)
    times = f"clustered in {count(len(clustered), 'round')}" if clustered else "never clustered"
    text = (
        f"The Hopkins statistic was above {least:g} in {exceeding} of {len(statistics)} rounds; "
        "clients "
        f"were {times}"
    )
    last = clustered[max(clustered)] if clustered else {}
    if len(last) > 1:
        first, second = (last[word] for word in ("eps_outputs", "eps_weights"))
        text += f", most recently into {first} clusters by outputs, then {second} by weights"
    return f"{text}. Shared layers went from {shared[0][1]:.2g} to {shared[-1][1]:.2g}."


def silhouette(reading: Reading) -> str:
    """The caption of the silhouettes."""
    notes = noting(reading, "silhouette")["notes"]
    scores = {int(k): float(v) for k, v in notes["silhouette"].items()}
    best = max(scores, key=lambda k: scores[k])
    text = f"{best} groups have the highest silhouette, {scores[best]:.3f}."
    if notes.get("contrast") is not None:
        streams = notes.get("streams")
        text += f" The contrast of the gradients is {notes['contrast']:.2f}"
        text += (
            f", and {count(streams, 'stream')} was chosen."
            if streams == 1
            else (f", and {streams} streams were chosen.")
        )
    elif notes.get("why"):
        text += f" The choice: {notes['why']}."
    present = streams_of(reading, notes)
    if notes.get("contrast") is None and present is not None:
        text += f" The run has {count(present, 'stream')}."
    return text


def streams_of(reading: Reading, notes: Mapping[str, Any]) -> int | None:
    """The present number of streams; None where the method's notes have no streams."""
    return len({g for g in reading.groups if g is not None}) if "streams" in notes else None


def steps(reading: Reading) -> str:
    """The caption of the local steps by round."""
    points = series(reading.rounds, "tau", "method with adaptive local steps")
    low, high = min(v for _, v in points), max(v for _, v in points)
    text = (
        f"Rounds had between {low:.0f} and {high:.0f} local steps, the last one "
        f"{points[-1][1]:.0f}."
    )
    try:
        notes = noting(reading, "phi_why")["notes"]
    except ConfigError:  # a run of an older version
        return text
    return f"{text} φ was {notes['phi']:g}: {notes['phi_why']}."
