"""The gain and the risk of mixing: effective samples against weighted discrepancy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coterie.errors import ConfigError
from coterie.report.figures.compared import kinds_of
from coterie.report.figures.following import followed
from coterie.report.figures.sketch import Sketch, Trace
from coterie.report.figures.style import (
    SHARE,
    THIN,
    dots,
    figure_of,
    note_of,
    plain,
    short,
    styled,
    symbol_of,
    thin,
)
from coterie.report.palette import BLUE, FAINT, INK, RED, colour_of, line_of
from coterie.report.reading import Reading

Point = tuple[float, float]  # effective samples, discrepancy
_STEPS = 24  # of the curve from alone to all alike


@dataclass(frozen=True)
class MixingPoints:
    """Points of effective samples and discrepancy: of each client, and of each stream.

    ``own`` are clients with their own weights; ``alone`` and ``together`` the same clients if each
    learned alone, and if all had FedAvg's weights. ``streams`` are means over the clients of a
    stream, with its weights, by the stream's number; empty where each client has its own stream.
    """

    clients: Sequence[int]
    labels: Sequence[int | None]
    own: Sequence[Point]
    alone: Sequence[Point]
    together: Sequence[Point]
    streams: Mapping[int, Point]

    @property
    def all_samples(self) -> float:
        """The samples of all clients."""
        return sum(x for x, _ in self.alone)

    @property
    def used(self) -> Point:
        """The mean client, with the weights of its model."""
        placed = [self.streams[k] for k in self.labels if k is not None and k in self.streams]
        return mean(placed or self.own)

    def share(self, point: Point) -> Point:
        """A point in units of all samples and of the discrepancy with FedAvg's weights."""
        far = mean(self.together)[1]
        return point[0] / self.all_samples, point[1] / far if far else 0.0


def mixing_terms_of(notes: Mapping[str, Any], groups: Sequence[Any] = ()) -> MixingPoints:
    """The terms in user-centric's notes; ``groups`` are clients' streams, in client order."""
    noted_terms = note_of(notes, "mixing_terms", "user-centric's")
    clients, samples = list(noted_terms["clients"]), [float(n) for n in noted_terms["samples"]]
    client_groups = [groups[c] if c < len(groups) else None for c in clients]
    labels = followed([client_groups])[0]
    streams = {}
    if "stream_effective" in noted_terms:
        stream_terms = list(
            zip(noted_terms["stream_effective"], noted_terms["stream_discrepancy"], strict=True)
        )
        for label in sorted({k for k in labels if k is not None}):
            streams[label] = mean(
                [p for p, k in zip(stream_terms, labels, strict=True) if k == label]
            )
    return MixingPoints(
        clients,
        labels,
        list(zip(noted_terms["effective"], noted_terms["discrepancy"], strict=True)),
        [(n, 0.0) for n in samples],
        [(sum(samples), float(d)) for d in noted_terms["together"]],
        streams,
    )


def mean(points: Sequence[Point]) -> Point:
    """The mean of these points.

    >>> mean([(1.0, 2.0), (3.0, 4.0)])
    (2.0, 3.0)
    """
    return sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)


def blend(terms: MixingPoints, share: float) -> Point:
    """The mean client with this share of FedAvg's weights, and the rest on itself.

    Of these weights Σ_j w_ij²/n_j is (1 − s)²/n_i + (1 − (1 − s)²)/Σ_j n_j.
    """
    rest, total = (1 - share) ** 2, terms.all_samples
    worth = [1 / (rest / n + (1 - rest) / total) for n, _ in terms.alone]
    return sum(worth) / len(worth), share * mean(terms.together)[1]


def mixing_terms(
    notes: Mapping[str, Any], groups: Sequence[Any] = (), names: Sequence[str] = ()
) -> Sketch:
    """The worth of clients' mixtures in samples, against the discrepancy to the clients mixed in.

    ``notes`` are user-centric's; ``groups`` are clients' streams and ``names`` their names, in
    client order. Points to the right have more to learn from, points further down are closer to a
    client's own data. The dotted line needs no comparison of clients: it moves from training alone
    to the weights of FedAvg.
    """
    terms = mixing_terms_of(notes, groups)
    labels = [plain(names[c] if c < len(names) else f"client {c}") for c in terms.clients]
    curve = [blend(terms, k / _STEPS) for k in range(_STEPS + 1)]
    traces = [
        thin(curve, "between the two, clients not compared", FAINT, "dot"),
        dots([mean(terms.alone)], "each alone", INK, "x", **_hover(["each alone, on average"])),
        _marked(terms.together, labels, "all alike (FedAvg's weights)", FAINT, "square-open"),
        _marked(terms.own, labels, "a client by its own weights", _colours(terms), "circle"),
    ]
    if terms.streams:
        stream_labels = [
            f"stream {k}, mean of {terms.labels.count(k)} clients" for k in terms.streams
        ]
        colours = [colour_of(k) for k in terms.streams]
        traces.append(
            _marked(list(terms.streams.values()), stream_labels, "a stream by its weights", colours,
                    "diamond-open", 15)
        )  # fmt: skip
    figure = figure_of(traces)
    figure.x(title="effective number of samples", rangemode="tozero", nticks=7)
    figure.y(title="weighted discrepancy", rangemode="tozero")
    return styled(figure, "What mixing gains and risks", 440)


def compared(readings: Sequence[Reading]) -> Sketch:
    """Several runs' mean clients, between learning alone and FedAvg's weights.

    The units are all samples and the discrepancy with FedAvg's weights, so that runs that measure
    discrepancies differently are comparable. Runs that recorded no terms are left out.
    """
    terms = terms_by_kind(readings)
    if not terms:
        raise ConfigError("no run recorded the terms of its mixing weights")
    first = next(iter(terms.values()))[0]
    curve = [first.share(blend(first, k / _STEPS)) for k in range(_STEPS + 1)]
    traces = [
        thin(curve, "between the two, clients not compared", FAINT, "dot"),
        dots(curve[:1], "each alone", INK, "x"),
        dots(curve[-1:], "all alike (FedAvg's weights)", INK, "square-open"),
    ]
    for i, (title, runs) in enumerate(terms.items()):
        marked = dots(
            [t.share(t.used) for t in runs], short(title, 32), line_of(i)[0], symbol_of(i)
        )
        traces.append(marked | {"marker": {**marked["marker"], "size": 11}})
    figure = figure_of(traces)
    percent = {"tickformat": SHARE, "hoverformat": ".1%", "rangemode": "tozero"}
    figure.x(percent, title="effective number of samples, of all samples")
    figure.y(percent, title="discrepancy, of FedAvg's")
    return styled(figure, "What mixing gains and risks", 440)


def terms_by_kind(readings: Sequence[Reading]) -> dict[str, list[MixingPoints]]:
    """The last terms of each run that noted any, runs of one set-up together."""
    terms: dict[str, list[MixingPoints]] = {}
    for kind in kinds_of(readings):
        for run in kind.runs:
            noting = [e for e in run.events if (e.get("notes") or {}).get("mixing_terms")]
            if noting:
                terms.setdefault(kind.title, []).append(
                    mixing_terms_of(noting[-1]["notes"], run.groups)
                )
    return terms


def _colours(terms: MixingPoints) -> str | list[str]:
    """The points of streams where clients share them, else of clients."""
    if not terms.streams:
        return BLUE
    return [RED if k is None else colour_of(k) for k in terms.labels]


def _marked(
    points: Sequence[Point],
    hovers: Sequence[str],
    name: str,
    colour: str | list[str],
    symbol: str,
    size: int = 8,
) -> Trace:
    line = {"width": 2} if symbol.endswith("-open") else THIN
    marker = {"color": colour, "symbol": symbol, "size": size, "opacity": 0.85, "line": line}
    return dots(points, name, INK, symbol, **_hover(hovers)) | {"marker": marker}


def _hover(hovers: Sequence[str]) -> dict[str, Any]:
    template = "%{hovertext}<br>%{x:.5~g} samples<br>discrepancy %{y:.3~g}<extra></extra>"
    return {"hovertext": list(hovers), "hovertemplate": template}
