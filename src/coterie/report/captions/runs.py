"""What is to be seen in each picture, in a sentence or two with the numbers that matter."""

from __future__ import annotations

from collections.abc import Mapping

from coterie.errors import ConfigError
from coterie.report.figures import clients, cost, privacy
from coterie.report.figures.scores import AXES, curve, finish
from coterie.report.reading import Reading
from coterie.report.tables import size
from coterie.report.words import change, count, rose, seconds, value, word


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
    from coterie.channel.exposure import sentences

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
