"""Captions of the pictures of one run: a sentence or two with the numbers that matter."""

from __future__ import annotations

from collections.abc import Mapping

from coterie.errors import ConfigError
from coterie.report.figures import clients, cost, privacy
from coterie.report.figures.scores import AXES, curve, finish
from coterie.report.reading import Reading
from coterie.report.tables import size
from coterie.report.words import change, count, duration, rose, value, word
from coterie.results.findings import rested


def _leading(reading: Reading) -> tuple[str, list[tuple[float, float]]]:
    """The title and the points of the headline score by round, or else of the other score."""
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
    """A sentence for each score that was taken at the end only."""
    by = reading.judged_by
    ends = {t: finish(reading, t) for t in ("received", "adapted")}
    sentences = [
        f" {t.capitalize()} {word(by)}, scored at the end only, is {value(points[0][1], by)}."
        for t, points in ends.items()
        if points and not curve(reading.rounds, t, by)
    ]
    return "".join(sentences)


def accuracy(reading: Reading) -> str:
    """The caption of the score by round."""
    title, points = _leading(reading)
    by = reading.judged_by
    if not curve(reading.rounds, title, by):
        return _at_the_end(reading).strip()
    text = rose(points, f"{title.capitalize()} {word(by)}", by)
    lowest = clients.worst(reading, title)
    if lowest is not None and len(reading.names) > 1:
        text += f"; the worst client, {lowest[0]}, ends at {value(lowest[1], by)}"
    best = reading.result.get("best_on_validation")
    validated = f" Round {best['round']} was the best on validation data." if best else ""
    return f"{text}.{_with_all_layers(reading)}{_at_the_end(reading)}{validated}"


def _with_all_layers(reading: Reading) -> str:
    """The score of the last full round, where the last of all was not one."""
    if not (reading.rounds and rested(reading.rounds)[-1]):
        return ""
    title, by = _leading(reading)[0], reading.judged_by
    pairs = zip(reading.rounds, rested(reading.rounds), strict=True)
    full = curve([e for e, rests in pairs if not rests], title, by)
    if not full:
        return ""
    return (
        f" In the last round some layers rested, and clients were scored with their own; with all "
        f"layers they had {value(full[-1][1], by)} in round {full[-1][0]:.0f}."
    )


def against(reading: Reading, axis: str) -> str:
    """The caption of the score against bytes or seconds: the cost of the last and best score."""
    title, _ = _leading(reading)
    by, place = reading.judged_by, AXES[axis][0]
    points = curve(reading.rounds, title, by, place) or finish(reading, title, place)
    if not points:
        raise ConfigError(f"{reading.name}: no score can be drawn against {axis}")
    amount = size if axis == "bytes" else duration
    top = max(y for _, y in points)
    near = next(x for x, y in points if y >= top - 0.1 * abs(top))
    text = f"The run ends at {value(points[-1][1], by)} {title} after {amount(points[-1][0])}"
    if near < points[-1][0]:
        text += f"; after {amount(near)} it was within a tenth of its best, {value(top, by)}"
    return f"{text}."


def loss(reading: Reading) -> str:
    """The caption of the loss by round."""
    points = curve(reading.rounds, "received", "loss") or curve(reading.rounds, "adapted", "loss")
    if not points:
        raise ConfigError(f"{reading.name}: no round was scored")
    (first, start), (last, end) = points[0], points[-1]
    if len(points) == 1:
        only = "the only round that was scored"
        return f"The mean loss on test data is {end:.3g} in round {last:.0f}, {only}."
    lowest = min(points, key=lambda p: p[1])
    text = f"The mean loss on test data went from {start:.3g} in round {first:.0f} to {end:.3g} in "
    text += f"round {last:.0f}"
    if lowest[1] < end * 0.99:
        return f"{text}; it was lowest in round {lowest[0]:.0f}, {lowest[1]:.3g}, and rose again."
    return f"{text}."


# --- clients --------------------------------------------------------------------------------------


def spread(reading: Reading) -> str:
    """The caption of the strips, one dot for each client."""
    by, parts = reading.judged_by, []
    for kind in clients.KINDS:
        scores = [v for _, v in clients.scores_of(reading, kind)]
        low = clients.worst(reading, kind)
        if scores and low:
            _, middle, _ = clients.quarters(scores)
            parts.append(
                f"{kind}: from {value(low[1], by)} ({low[0]}) to {value(max(scores), by)}, median "
                f"{value(middle, by)}"
            )
    return f"Each dot is a client. {_sentence('; '.join(parts))}"


def over_rounds(reading: Reading) -> str:
    """The caption of the map of scores, clients over rounds."""
    kind, steps = clients.scored_rounds(reading)
    first, last = ([v for v in steps[i]["client_scores"][kind] if v is not None] for i in (0, -1))
    text = (
        f"Each row is a client's {kind} {word(reading.judged_by)}, sorted by group and then by "
        "score."
    )
    if len(steps) > 1 and len(first) == len(last):
        pairs = zip(steps[0]["client_scores"][kind], steps[-1]["client_scores"][kind], strict=False)
        better = sum(b > a for a, b in pairs if a is not None and b is not None)
        text += (
            f" {better} of {len(last)} are better in round {steps[-1]['round']} than in round "
            f"{steps[0]['round']}."
        )
    return text


def gain(reading: Reading) -> str:
    """The caption of the bars of gains over training alone."""
    gained, by = clients.gains(reading), reading.judged_by
    worse = [c for c, g in gained if g < 0]
    least, most = gained[0], gained[-1]
    text = (
        f"Gains over training alone range from {change(least[1], by)} ({_name(reading, least[0])}) "
        f"to {change(most[1], by)} ({_name(reading, most[0])}); "
    )
    losers = f"{count(len(worse), 'client loses', 'clients lose')}" if worse else "no client loses"
    return f"{text}{losers} by taking part."


def _name(reading: Reading, client: int) -> str:
    names = reading.names
    return names[client] if client < len(names) else f"client {client}"


# --- cost and privacy -----------------------------------------------------------------------------


def bytes_by_round(reading: Reading) -> str:
    """The caption of bytes by round and kind."""
    sent = {key: points[-1][1] for key, points in cost.by_kind(reading).items()}
    wasted = sent.pop("wasted", 0.0)
    ways = {way: sum(v for k, v in sent.items() if k.startswith(way)) for way in cost.WAYS}
    total = sum(ways.values())
    text = f"The server sent {size(ways['down'])} to clients and received {size(ways['up'])}"
    if sent and total:
        most = max(sent, key=lambda k: sent[k])
        if "," in most:
            text += f"; the largest part is {most}, with {100 * sent[most] / total:.0f} %"
    rest = f" Another {size(wasted)} were wasted on replies that did not count." if wasted else ""
    return f"{text}.{rest}"


def bytes_by_client(reading: Reading) -> str:
    """The caption of bytes by client."""
    all_clients, newcomers = cost.of_clients(reading), reading.newcomers
    ranked = [each for each in all_clients if each[0] not in newcomers] or all_clients
    most, least = (sum(ranked[i][1:]) for i in (0, -1))
    if len(ranked) == 1:
        return (
            f"{_name(reading, ranked[0][0])} transferred {size(most)}, downloads and uploads "
            "together."
        )
    if most - least < 0.03 * most:
        return (
            f"Every client transferred about the same, {size(most)}, downloads and uploads "
            "together."
        )
    return (
        f"{_name(reading, ranked[0][0])} transferred the most, {size(most)}, and "
        f"{_name(reading, ranked[-1][0])} the least, {size(least)}."
    )


def time_by_round(reading: Reading) -> str:
    """The caption of seconds by round."""
    kind, series_by_part = cost.time_parts(reading)
    sums = {key: sum(v for _, v in points) for key, points in series_by_part.items()}
    total = sum(sums.values())
    before = reading.begun.get("clock") if kind == "simulated" else None
    parts = ", ".join(f"{key} {duration(v)}" for key, v in sums.items())
    text = f"The rounds took {duration(total)} of {kind} time: {parts}"
    if isinstance(before, Mapping):
        first = sum(float(before.get(k) or 0) for k in ("computation", "communication", "waiting"))
        text += f"; the work before round 1 took another {duration(first)}"
    return f"{text}."


def lost_by_round(reading: Reading) -> str:
    """The caption of lost and late replies, and of abandoned rounds."""
    sums = {k: int(sum(v for _, v in points)) for k, points in cost.mishaps(reading).items()}
    words = {
        "lost": ("reply was lost", "replies were lost"),
        "late": ("reply was late", "replies were late"),
        "abandoned": ("round was abandoned", "rounds were abandoned"),
    }
    counts = [count(n, *words[key]) for key, n in sums.items()]
    return f"{_sentence(', '.join(counts))}"


def exposure(reading: Reading) -> str:
    """The caption of what the server saw."""
    from coterie.channel.exposure import sentences

    privacy.exposed(reading)
    return " ".join(sentences(reading.result["exposure"]))


def epsilon(reading: Reading) -> str:
    """The caption of the privacy loss by round."""
    points = privacy.epsilon_by_round(reading)
    most = privacy.budget(reading)
    text = f"After round {points[-1][0]:.0f}, ε is at most {points[-1][1]:.3g} by Rényi divergences"
    promised = reading.result.get("privacy")
    if isinstance(promised, Mapping) and promised.get("epsilon") is not None:
        text += f", and {promised['epsilon']:.3g} by the tighter accountant at the end"
    return f"{text}; the budget is {most:g}." if most is not None else f"{text}."


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}." if text else ""
