"""What is to be seen in each picture, in a sentence or two with the numbers that matter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from coterie.errors import ConfigError
from coterie.report.figures import clients, cost, matrices, privacy
from coterie.report.figures.following import followed, names_of_groups, steps_of_groups
from coterie.report.figures.methods import rapid_ends
from coterie.report.figures.scores import AXES, curve, finish
from coterie.report.figures.streams import streams
from coterie.report.figures.style import having, series
from coterie.report.figures.trees import cut_height, later_cuts
from coterie.report.reading import Reading
from coterie.report.tables import size
from coterie.report.words import change, count, noted_round, rose, seconds, value, word


def noting(reading: Reading, key: str) -> Mapping[str, Any]:
    """The first event whose notes have this key; a sentence if none has."""
    for event in reading.events:
        if (event.get("notes") or {}).get(key) is not None:
            return event
    raise ConfigError(f"{reading.name}: {reading.method} noted no '{key}'")


def setting(reading: Reading, key: str, otherwise: float) -> float:
    """A parameter of the method as it was set."""
    table = reading.config.get("method")
    found = table.get(key) if isinstance(table, Mapping) else None
    return float(found) if isinstance(found, int | float) else otherwise


def threshold(reading: Reading) -> float:
    """FedTSDP's: the Hopkins statistic above which clients are clustered anew."""
    return setting(reading, "hopkins", 0.65)


def _leading(reading: Reading) -> tuple[str, list[tuple[float, float]]]:
    """The headline score by round, or the other one where there is only that."""
    titles = dict.fromkeys((reading.headline, "received", "adapted"))
    for title in titles:
        points = curve(reading.rounds, title, reading.judged_by)
        if points:
            return title, points
    for title in titles:
        points = finish(reading, title)
        if points:
            return title, points
    raise ConfigError(f"{reading.name}: no round was scored")


def _at_the_end(reading: Reading) -> str:
    """Of scores that are known of the end alone."""
    by = reading.judged_by
    ends = {t: finish(reading, t) for t in ("received", "adapted")}
    told = [
        f" {t.capitalize()} {word(by)}, scored at the end only, is {value(points[0][1], by)}."
        for t, points in ends.items()
        if points and not curve(reading.rounds, t, by)
    ]
    return "".join(told)


def accuracy(reading: Reading) -> str:
    """Of the score by round."""
    title, points = _leading(reading)
    by = reading.judged_by
    if not curve(reading.rounds, title, by):
        return _at_the_end(reading).strip()
    text = rose(points, f"{title.capitalize()} {word(by)}", by)
    found = clients.worst(reading, title)
    if found is not None and len(reading.names) > 1:
        text += f"; the worst client, {found[0]}, ends at {value(found[1], by)}"
    best = reading.result.get("best_on_validation")
    told = f" On validation data round {best['round']} was best." if best else ""
    return f"{text}.{_at_the_end(reading)}{told}"


def against(reading: Reading, axis: str) -> str:
    """Of the score by bytes or seconds: what half of the way cost, and all of it."""
    title, _ = _leading(reading)
    by, place = reading.judged_by, AXES[axis][0]
    points = curve(reading.rounds, title, by, place) or finish(reading, title, place)
    if not points:
        raise ConfigError(f"{reading.name}: nothing to draw against {axis}")
    amount = size if axis == "bytes" else seconds
    top = max(y for _, y in points)
    near = next(x for x, y in points if y >= top - 0.1 * abs(top))
    text = f"The run ends at {value(points[-1][1], by)} {title} after {amount(points[-1][0])}"
    if near < points[-1][0]:
        text += f"; after {amount(near)} it was within a tenth of its best, {value(top, by)}"
    return f"{text}."


def loss(reading: Reading) -> str:
    """Of the loss."""
    points = curve(reading.rounds, "received", "loss") or curve(reading.rounds, "adapted", "loss")
    if not points:
        raise ConfigError(f"{reading.name}: no round was scored")
    (first, start), (last, end) = points[0], points[-1]
    if len(points) == 1:
        only = "the only one that was scored"
        return f"The mean loss on test data is {end:.3g} in round {last:.0f}, {only}."
    lowest = min(points, key=lambda p: p[1])
    text = f"The mean loss on test data went from {start:.3g} in round {first:.0f} to {end:.3g} in "
    text += f"round {last:.0f}"
    if lowest[1] < end * 0.99:
        return f"{text}; it was lowest in round {lowest[0]:.0f}, {lowest[1]:.3g}, and rose again."
    return f"{text}."


# --- clients --------------------------------------------------------------------------------------


def spread(reading: Reading) -> str:
    """Of the strips."""
    by, found = reading.judged_by, []
    for kind in clients.KINDS:
        own = [v for _, v in clients.scores_of(reading, kind)]
        low = clients.worst(reading, kind)
        if own and low:
            _, middle, _ = clients.quarters(own)
            found.append(
                f"{kind}: from {value(low[1], by)} ({low[0]}) to {value(max(own), by)}, median "
                f"{value(middle, by)}"
            )
    return f"Each dot is a client. {_sentence('; '.join(found))}"


def over_rounds(reading: Reading) -> str:
    """Of the map of scores."""
    kind, steps = clients.scored_rounds(reading)
    first, last = ([v for v in steps[i]["client_scores"][kind] if v is not None] for i in (0, -1))
    text = f"Each row is a client's {kind} {word(reading.judged_by)}, by group and best first."
    if len(steps) > 1 and len(first) == len(last):
        pairs = zip(steps[0]["client_scores"][kind], steps[-1]["client_scores"][kind], strict=False)
        better = sum(b > a for a, b in pairs if a is not None and b is not None)
        text += (
            f" {better} of {len(last)} are better in round {steps[-1]['round']} than in round "
            f"{steps[0]['round']}."
        )
    return text


def gain(reading: Reading) -> str:
    """Of the bars over training alone."""
    found, by = clients.gains(reading), reading.judged_by
    worse = [c for c, g in found if g < 0]
    least, most = found[0], found[-1]
    text = (
        f"From {change(least[1], by)} ({_name(reading, least[0])}) to {change(most[1], by)} "
        f"({_name(reading, most[0])}) over training alone; "
    )
    lost = f"{count(len(worse), 'client loses', 'clients lose')}" if worse else "nobody loses"
    return f"{text}{lost} by taking part."


def _name(reading: Reading, client: int) -> str:
    names = reading.names
    return names[client] if client < len(names) else f"client {client}"


# --- groups ---------------------------------------------------------------------------------------


def groups(reading: Reading) -> str:
    """Of the streams."""
    steps = steps_of_groups(reading.events)
    kept = followed(names_of_groups(steps))
    found = streams([e["round"] for e in steps], kept)
    first, last = (_so_many(kept[i]) for i in (0, -1))
    begin, end = (
        "at the start" if steps[i]["round"] == 0 else f"after round {steps[i]['round']}"
        for i in (0, -1)
    )
    if not found.changes:
        return f"{first.capitalize()} {begin}; nobody ever moved."
    text = (
        f"{first.capitalize()} {begin}, {last} {end}; memberships changed {_times(found.changes)}."
    )
    hidden = found.changes - (len(found.rounds) - 1)
    if hidden > 0:
        text += f" The {len(found.rounds)} columns are those where most clients moved."
    return f"{text} Beside the last column: each group, and how many clients it has."


def _times(number: int) -> str:
    return "once" if number == 1 else "twice" if number == 2 else f"{number} times"


def _so_many(column: Sequence[int | None]) -> str:
    sizes = Counter(g for g in column if g is not None)
    if not sizes:
        return "nobody in a group"
    lone = sum(n == 1 for n in sizes.values())
    if lone == len(sizes) and lone > 1:
        return f"{lone} clients, each alone,"
    own = f" ({lone} of one client)" if lone and len(sizes) > 1 else ""
    return f"{count(len(sizes), 'group')}{own}"


def groups_by_client(reading: Reading) -> str:
    """Of the map of groups."""
    steps = steps_of_groups(reading.events)
    kept = followed(names_of_groups(steps))
    histories = list(zip(*kept, strict=True))
    kept_by = [{g for g in own if g is not None} for own in histories]
    there = [own for own in kept_by if own]  # who is held out has no group
    moved = sum(len(own) > 1 for own in there)
    return (
        f"Each row is a client, each colour a group that was followed through the rounds. {moved} "
        f"of {count(len(there), 'client')} changed groups; grey is alone."
    )


def labels(reading: Reading) -> str:
    """Of what clients hold."""
    data = reading.data
    held = data.get("labels")
    if held is None:
        spread = [five for five in data.get("quartiles") or () if five]
        low, high = min(five[2] for five in spread), max(five[2] for five in spread)
        return f"The medians of clients' targets lie between {low:.4g} and {high:.4g}."
    filled = [row for row in held if sum(row)]
    kinds = [sum(n > 0 for n in row) for row in filled]
    tops = [max(row) / sum(row) for row in filled]
    few, many = min(kinds), max(kinds)
    between = f"{few}" if few == many else f"between {few} and {many}"
    return (
        f"Clients hold {between} of {len(held[0])} classes; the most frequent one makes up "
        f"{100 * min(tops):.0f} to {100 * max(tops):.0f} % of a client's samples."
    )


def dendrogram(reading: Reading) -> str:
    """Of the merge tree."""
    event = noting(reading, "dendrogram")
    notes = event["notes"]
    merges = notes["dendrogram"]
    top = merges[-1][2]
    text = f"The tree of {len(merges) + 1} clients, made {noted_round(event)}, is {top:.3g} high"
    cut = cut_height(notes, top)
    if cut is not None:
        undone = sum(m[2] > cut for m in merges)
        later = later_cuts(reading.events)
        at_first = " at first" if later else ""
        text += f"; the cut at {cut:.3g} leaves {count(undone + 1, 'group')}{at_first}"
        told = [
            f"in round {c.round} at {c.gamma * top:.3g} with {count(c.groups, 'group')}"
            for c in later
        ]
        text += f". Later cuts that were adopted: {', '.join(told)}" if told else ""
    why = f" Why there: {notes['why']}." if notes.get("why") else ""
    return f"{text}.{why}"


def similarity(reading: Reading) -> str:
    """Of the distances, inside groups and between them."""
    pairs = matrices.pairs_of(reading.events)
    groups = reading.groups
    inside: list[float] = []
    between: list[float] = []
    for i, a in enumerate(pairs.clients):
        for j, b in enumerate(pairs.clients[:i]):
            found = pairs.rows[i][j]
            if found is None or max(a, b) >= len(groups):
                continue
            (inside if groups[a] == groups[b] else between).append(found)
    when = "before round 1" if not pairs.round else f"in round {pairs.round}"
    text = f"The {pairs.what} of every two of {len(pairs.clients)} clients, {when}"
    if inside and between:
        text += (
            f": {_mean(inside):.3g} on average inside the groups that they ended in, "
            f"{_mean(between):.3g} between them"
        )
    return f"{text}."


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def mixing(reading: Reading) -> str:
    """Of the weights."""
    try:
        notes = noting(reading, "mixing")["notes"]
    except ConfigError:
        return "How much of what helped a client came from whom, over all rounds; rows sum to 1."
    rows = notes["mixing"]
    clients_ = notes.get("clients") or list(range(len(rows)))
    groups = reading.groups
    own = _mean([row[i] for i, row in enumerate(rows)])
    mates = _mean(
        [
            sum(w for w, d in zip(row, clients_, strict=True) if groups[d] == groups[c])
            for c, row in zip(clients_, rows, strict=True)
        ]
    )
    return (
        f"On average a client's mixture is {100 * own:.0f} % its own model and "
        f"{100 * mates:.0f} % of its group, itself included."
    )


# --- methods --------------------------------------------------------------------------------------


def trials(reading: Reading) -> str:
    """Of DC-PFL's trials."""
    found = [e["notes"]["trial"] for e in having(reading.rounds, "trial")]
    adopted = sum(bool(t["adopted"]) for t in found)
    ends = len(rapid_ends(reading.rounds))
    losses = series(reading.rounds, "loss", "DC-PFL")
    text = (
        f"The training loss went from {losses[0][1]:.3g} to {losses[-1][1]:.3g}; the end of a "
        f"rapid decrease was found {_times(ends) if ends else 'never'}"
    )
    return f"{text}, {count(len(found), 'trial')} followed, {adopted} adopted (✓)."


def layers(reading: Reading) -> str:
    """Of layer-wise aggregation."""
    quiet = Counter(
        layer
        for e in having(reading.rounds, "layers")
        for rested in (e["notes"]["layers"].get("quiet") or {}).values()
        for layer in rested
    )
    if not quiet:
        return "No layer was found to differ so little that it could rest."
    layer, _ = quiet.most_common(1)[0]
    return f"Layers in which clients hardly differ rest for some rounds; most often {layer} did."


def hopkins(reading: Reading) -> str:
    """Of FedTSDP's rounds."""
    found = series(reading.rounds, "hopkins", "FedTSDP")
    shared = series(reading.rounds, "shared_layers", "FedTSDP")
    least = threshold(reading)
    above = sum(v > least for _, v in found)
    return (
        f"The Hopkins statistic was above {least:g}, so that clients were clustered anew, in "
        f"{above} of {len(found)} rounds; shared layers went "
        f"from {shared[0][1]:.2g} to {shared[-1][1]:.2g}."
    )


def silhouette(reading: Reading) -> str:
    """Of the silhouettes."""
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
        text += f" What was chosen: {notes['why']}."
    return text


def steps(reading: Reading) -> str:
    """Of the local steps."""
    found = series(reading.rounds, "tau", "method with adaptive local steps")
    low, high = min(v for _, v in found), max(v for _, v in found)
    return f"Rounds had between {low:.0f} and {high:.0f} local steps, {found[-1][1]:.0f} at last."


# --- cost and privacy -----------------------------------------------------------------------------


def bytes_by_round(reading: Reading) -> str:
    """Of bytes by kind."""
    found = {key: points[-1][1] for key, points in cost.by_kind(reading).items()}
    wasted = found.pop("wasted", 0.0)
    ways = {way: sum(v for k, v in found.items() if k.startswith(way)) for way in cost.WAYS}
    total = sum(ways.values())
    text = f"{size(ways['down'])} went down to clients and {size(ways['up'])} up to the server"
    if found and total:
        most = max(found, key=lambda k: found[k])
        if "," in most:
            text += f"; the largest part is {most}, {100 * found[most] / total:.0f} %"
    more = f" {size(wasted)} more were wasted, for reports that did not count." if wasted else ""
    return f"{text}.{more}"


def bytes_by_client(reading: Reading) -> str:
    """Of bytes by client."""
    everybody, came = cost.of_clients(reading), reading.newcomers
    found = [each for each in everybody if each[0] not in came] or everybody
    most, least = (sum(found[i][1:]) for i in (0, -1))
    if len(found) == 1:
        return f"{_name(reading, found[0][0])} moved {size(most)} down and up."
    if most - least < 0.01 * most:
        return f"Every client moved about as much, {size(most)} down and up."
    return (
        f"Most went to and from {_name(reading, found[0][0])}, {size(most)}, least to and from "
        f"{_name(reading, found[-1][0])}, {size(least)}."
    )


def time_by_round(reading: Reading) -> str:
    """Of seconds by round."""
    kind, found = cost.time_parts(reading)
    sums = {key: sum(v for _, v in points) for key, points in found.items()}
    total = sum(sums.values())
    begun = reading.begun.get("clock") if kind == "simulated" else None
    parts = ", ".join(f"{key} {seconds(v)}" for key, v in sums.items())
    text = f"The rounds took {seconds(total)} of {kind} time: {parts}"
    if isinstance(begun, Mapping):
        first = sum(float(begun.get(k) or 0) for k in ("computation", "communication", "waiting"))
        text += f"; what came before round 1 took {seconds(first)} more"
    return f"{text}."


def lost_by_round(reading: Reading) -> str:
    """Of what went wrong."""
    sums = {k: int(sum(v for _, v in points)) for k, points in cost.mishaps(reading).items()}
    words = {
        "lost": ("reply was lost", "replies were lost"),
        "late": ("reply was late", "replies were late"),
        "abandoned": ("round was abandoned", "rounds were abandoned"),
    }
    told = [count(n, *words[key]) for key, n in sums.items()]
    return f"{_sentence(', '.join(told))}"


def exposure(reading: Reading) -> str:
    """Of what the server saw."""
    from coterie.door.exposure import sentences

    privacy.exposed(reading)
    return " ".join(sentences(reading.result["exposure"]))


def epsilon(reading: Reading) -> str:
    """Of the privacy budget."""
    points = privacy.spent(reading)
    most = privacy.budget(reading)
    text = f"After round {points[-1][0]:.0f} ε is at most {points[-1][1]:.3g} by Rényi divergences"
    told = reading.result.get("privacy")
    if isinstance(told, Mapping) and told.get("epsilon") is not None:
        text += f", and {told['epsilon']:.3g} by the finer count at the end"
    return f"{text}; the budget is {most:g}." if most is not None else f"{text}."


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}." if text else ""
