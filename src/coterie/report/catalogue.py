"""Every picture of a run, by name: what ``coterie report``, the live page and notebooks draw."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from coterie.errors import ConfigError, unknown
from coterie.registry import COMPARED, PICTURES, absolute, function_at
from coterie.report.captions import compared as captions_compared
from coterie.report.captions import evidence as captions_evidence
from coterie.report.captions import groups as captions_groups
from coterie.report.captions import mixing as captions_mixing
from coterie.report.captions import runs as captions
from coterie.report.captions import systems as captions_systems
from coterie.report.captions.evidence import noted_last
from coterie.report.captions.groups import noting, setting, threshold
from coterie.report.collect import Run, as_list, readings_of
from coterie.report.figures import (
    by_layer,
    clients,
    compared_bars,
    cost,
    divergence,
    evidence,
    groups,
    matrices,
    methods,
    mixing,
    privacy,
    scores,
    streams,
    systems,
    trees,
    verdict,
)
from coterie.report.figures import compared as several
from coterie.report.figures.following import (
    followed,
    last_numbers,
    names_of_groups,
    steps_of_groups,
)
from coterie.report.figures.sketch import Sketch
from coterie.report.figures.style import styled, untitled
from coterie.report.needs import check_needs
from coterie.report.reading import Reading
from coterie.report.words import DAMAGE

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

# The sections of a report, in order, with their titles.
SECTIONS = {
    "accuracy": "How good",
    "clients": "For whom",
    "groups": "Who learned with whom",
    "method": "How the method worked",
    "cost": "What it cost",
    "privacy": "What the server saw",
}

# Pictures of the same thing on different scales, with the scales' names: a page may show one at a
# time.
TABS = {
    "accuracy": "rounds",
    "accuracy-bytes": "bytes",
    "accuracy-time": "seconds",
    "compare-accuracy": "rounds",
    "compare-bytes": "bytes",
    "compare-time": "seconds",
}


@dataclass(frozen=True)
class Picture:
    """One kind of picture.

    ``draw`` raises a ``ConfigError`` with the reason where there is nothing to draw; ``words``
    makes the caption, which also describes the picture to screen readers.
    """

    name: str
    section: str
    title: str
    draw: Callable[[Reading], Sketch]
    words: Callable[[Reading], str]


@dataclass(frozen=True)
class Drawn:
    """A picture of one or several runs; its figure has no title, since pages have their own.

    A ``flat`` one shows a single flat thing: pages have its words instead.
    """

    name: str
    section: str
    title: str
    words: str
    sketch: Sketch
    flat: bool = False

    @property
    def tree(self) -> dict[str, Any]:
        """Its data and layout ready for JSON."""
        return self.sketch.tree

    @cached_property
    def figure(self) -> Figure:
        """The picture as plotly's figure, made on demand."""
        return self.sketch.figure()


def _tree(reading: Reading) -> Sketch:
    event = captions_groups.with_tree(reading)
    levels = trees.split_levels(reading.events)
    numbers = last_numbers(reading.events)
    return trees.dendrogram(event["notes"], None, levels, reading.names, numbers)


def _by_client(reading: Reading) -> Sketch:
    if _nobody_moved(reading):
        raise ConfigError(
            f"{reading.name}: no client ever changed groups, which 'groups' shows as well"
        )
    return groups.groups_over_rounds(reading.events, reading.names)


def _mixing(reading: Reading) -> Sketch:
    groups, by = captions_groups.mixed_by(reading)
    try:
        event = noting(reading, "mixing")
    except ConfigError:
        return matrices.taken_matrix(reading.events, groups, reading.names)
    return matrices.mixing_matrix(event["notes"], groups, reading.names, by)


def _silhouette(reading: Reading) -> Sketch:
    notes = noting(reading, "silhouette")["notes"]
    return methods.silhouette(notes, streams=captions_groups.streams_of(reading, notes))


def _similarity(reading: Reading) -> Sketch:
    return matrices.similarity_matrix(reading.events, _groups_shown(reading), reading.names)


def _by_layer(reading: Reading) -> Sketch:
    notes = noted_last(reading, "layer_distances")
    return by_layer.distances_by_layer(notes, _groups_shown(reading), reading.names)


def _groups_shown(reading: Reading) -> Sequence[Any]:
    """The groups that the run ended with; where these say nothing, those of the evidence."""
    ended = [g for g in reading.groups if g is not None]
    if 1 < len(set(ended)) < len(ended):
        return reading.groups
    try:
        evidence_notes = noted_last(reading, "evidence")["evidence"]
    except ConfigError:
        return reading.groups
    label_of = dict(
        zip(evidence_notes["clients"], evidence_notes.get("labels") or (), strict=False)
    )
    return [label_of.get(c) for c in range(1 + max(label_of, default=-1))] or reading.groups


def _layers(reading: Reading) -> Sketch:
    key = "share" if reading.method.startswith("dc-pfl") else "layer_share"
    share = setting(reading, key, math.nan)
    return methods.layer_intervals(reading.events, None if math.isnan(share) else share)


def _hopkins(reading: Reading) -> Sketch:
    return methods.hopkins_and_layers(reading.events, threshold(reading))


def _accuracy(against: str) -> Callable[[Reading], Sketch]:
    return lambda reading: scores.accuracy(reading, against)


for _picture in (
    Picture("accuracy", "accuracy", "Score by round", _accuracy("rounds"), captions.accuracy),
    Picture(
        "accuracy-bytes",
        "accuracy",
        "Score by bytes",
        _accuracy("bytes"),
        lambda r: captions.against(r, "bytes"),
    ),
    Picture(
        "accuracy-time",
        "accuracy",
        "Score by simulated time",
        _accuracy("seconds"),
        lambda r: captions.against(r, "seconds"),
    ),
    Picture("loss", "accuracy", "Loss", scores.loss, captions.loss),
    Picture("clients", "clients", "Scores of clients", clients.spread, captions.spread),
    Picture(
        "clients-over-rounds",
        "clients",
        "Clients over rounds",
        clients.over_rounds,
        captions.over_rounds,
    ),
    Picture("gain", "clients", "Gain over training alone", clients.gain, captions.gain),
    Picture(
        "groups",
        "groups",
        "Groups over rounds",
        lambda r: streams.alluvial(r.events, r.names),
        captions_groups.groups,
    ),
    Picture(
        "groups-by-client",
        "groups",
        "Groups, client by client",
        _by_client,
        captions_groups.groups_by_client,
    ),
    Picture(
        "labels",
        "groups",
        "What clients hold",
        lambda r: matrices.label_shares(r.data, _groups_shown(r), r.names),
        captions_groups.labels,
    ),
    Picture(
        "evidence",
        "groups",
        "Evidence for groups",
        lambda r: evidence.evidence(noted_last(r, "evidence")),
        captions_evidence.evidence,
    ),
    Picture(
        "client-map",
        "groups",
        "Map of clients",
        lambda r: evidence.client_map(noted_last(r, "evidence"), r.names),
        captions_evidence.client_map,
    ),
    Picture("dendrogram", "groups", "Merge tree", _tree, captions_groups.dendrogram),
    Picture(
        "similarity", "groups", "How alike clients are", _similarity, captions_groups.similarity
    ),
    Picture(
        "distances-by-layer",
        "groups",
        "How far apart clients are in each layer",
        _by_layer,
        lambda r: captions_evidence.by_layer(r, _groups_shown(r)),
    ),
    Picture(
        "divergence",
        "groups",
        "Labels that differ, models that differ",
        lambda r: divergence.divergence(r.events, r.data, _groups_shown(r), r.names),
        lambda r: captions_groups.divergence(r, _groups_shown(r)),
    ),
    Picture("mixing", "groups", "Who takes how much of whom", _mixing, captions_groups.mixing),
    Picture(
        "mixing-terms",
        "groups",
        "What mixing gains and risks",
        lambda r: mixing.mixing_terms(noted_last(r, "mixing_terms"), r.groups, r.names),
        captions_mixing.mixing_terms,
    ),
    Picture(
        "silhouette",
        "groups",
        "How many groups",
        _silhouette,
        captions_groups.silhouette,
    ),
    Picture(
        "verdict",
        "groups",
        "What the trial said",
        lambda r: verdict.verdict(captions_groups.last_verdict(r)[1]),
        captions_groups.verdict,
    ),
    Picture(
        "trials",
        "method",
        "Loss, curvature and trials",
        lambda r: methods.loss_and_trials(r.events),
        captions_groups.trials,
    ),
    Picture("layers", "method", "Skipped layers", _layers, captions_groups.layers),
    Picture("hopkins", "method", "Tendency to cluster", _hopkins, captions_groups.hopkins),
    Picture(
        "steps",
        "method",
        "Local steps",
        lambda r: methods.steps_by_round(r.events),
        captions_groups.steps,
    ),
    Picture("bytes", "cost", "Bytes by kind", cost.bytes_by_round, captions.bytes_by_round),
    Picture(
        "bytes-by-client",
        "cost",
        "Bytes by client",
        cost.bytes_by_client,
        captions.bytes_by_client,
    ),
    Picture("time", "cost", "Time by round", cost.time_by_round, captions.time_by_round),
    Picture("lost", "cost", "Lost and late", cost.lost_by_round, captions.lost_by_round),
    Picture(
        "exposure",
        "privacy",
        "What reached the server of single clients",
        privacy.exposure,
        captions.exposure,
    ),
    Picture("epsilon", "privacy", "Privacy spent", privacy.epsilon, captions.epsilon),
):
    PICTURES.register(_picture.name, _picture.title, __name__)(_picture)


def figure(
    name: str, section: str, title: str, words: Callable[[Reading], str]
) -> Callable[[Callable[[Reading], Sketch]], Callable[[Reading], Sketch]]:
    """Register a picture of a run: a decorator of the function that draws it.

    The function gets a ``Reading`` and returns a ``Sketch``, or raises a ``ConfigError`` that says
    why there is nothing to draw. ``section`` is its section of the report, and ``words`` makes its
    caption.
    """
    if section not in SECTIONS:
        raise ConfigError(unknown("section of a report", section, SECTIONS))

    def decorate(draw: Callable[[Reading], Sketch]) -> Callable[[Reading], Sketch]:
        @functools.wraps(draw)
        def drawn(reading: Reading) -> Sketch:
            sketch = draw(reading)
            return sketch if "height" in sketch.layout else styled(sketch, title, 360)

        made = Picture(name, section, title, drawn, words)
        PICTURES.register(name, title, draw.__module__)(made)
        return draw

    return decorate


def load_figure(text: str, option: str) -> None:
    """Load a user's own picture, ``FILE.py:function``, which ``figure`` decorates."""
    function = function_at(absolute(text), option)
    if not any(inspect.unwrap(each.draw) is function for each in PICTURES.values()):
        raise ConfigError(
            f"{option} {text}: this function is not a picture: put "
            "@coterie.report.catalogue.figure(…) above it"
        )


def draw(name: str, reading: Reading) -> Figure:
    """One picture by its name."""
    picture = PICTURES.find(name)
    check_needs(name, reading)
    return picture.draw(reading).figure()


def pictures(reading: Reading, problems: list[str] | None = None) -> list[Drawn]:
    """All pictures that a run has something for, in the order of ``PICTURES``.

    A picture whose part of the run is damaged is left out, with a sentence in ``problems``.
    """
    drawn_pictures = []
    for p in PICTURES.everything:
        try:
            sketch = untitled(p.draw(reading))
            flat = p.name in _FLAT and _FLAT[p.name](reading)
            drawn_pictures.append(Drawn(p.name, p.section, p.title, p.words(reading), sketch, flat))
        except ConfigError:
            continue
        except DAMAGE as error:
            if problems is not None:
                problems.append(_damaged(p.name, error))
    return drawn_pictures


def _nobody_moved(reading: Reading) -> bool:
    steps = names_of_groups(steps_of_groups(reading.events))
    return len({tuple(column) for column in followed(steps)}) == 1


def _all_equal(reading: Reading) -> bool:
    moved = [down + up for _, down, up in cost.of_clients(reading)]
    return max(moved) - min(moved) < _EQUAL * max(moved)


_EQUAL = 0.03  # bytes of clients that differ by a smaller share are about equal
# When a picture would show one flat thing.
_FLAT: dict[str, Callable[[Reading], bool]] = {
    "groups": _nobody_moved,
    "bytes-by-client": _all_equal,
}


def _damaged(name: str, error: Exception) -> str:
    why = (str(error).splitlines() or ["no reason"])[0][:120]
    return (
        f"the picture '{name}' is left out: the run's data for it are damaged "
        f"({type(error).__name__}: {why})"
    )


_Runs = Sequence[Reading]


@dataclass(frozen=True)
class PictureOfSeveral:
    """One kind of picture of several runs side by side; as ``Picture``."""

    name: str
    title: str
    draw: Callable[[_Runs], Sketch]
    words: Callable[[_Runs], str]


for _several in (
    PictureOfSeveral(
        "compare-gain", "Who gains, who loses?", several.gains, captions_compared.gains
    ),
    PictureOfSeveral("compare-accuracy", "Score by round", several.lines, captions_compared.lines),
    PictureOfSeveral(
        "compare-bytes",
        "Score by bytes",
        lambda runs: several.lines(runs, "bytes"),
        lambda runs: captions_compared.lines(runs, "bytes"),
    ),
    PictureOfSeveral(
        "compare-time",
        "Score by simulated time",
        lambda runs: several.lines(runs, "seconds"),
        lambda runs: captions_compared.lines(runs, "seconds"),
    ),
    PictureOfSeveral(
        "compare-clients", "Scores of clients", several.clients, captions_compared.clients
    ),
    PictureOfSeveral("compare-cost", "Score against cost", several.cost, captions_compared.cost),
    PictureOfSeveral(
        "compare-seconds",
        "Score and total seconds",
        compared_bars.seconds,
        captions_compared.total_seconds,
    ),
    PictureOfSeveral(
        "compare-systems",
        "Score by time in three systems",
        systems.by_system,
        captions_systems.by_system,
    ),
    PictureOfSeveral(
        "compare-mixing-terms",
        "What mixing gains and risks",
        mixing.compared,
        captions_mixing.compared,
    ),
    PictureOfSeveral(
        "compare-parameter",
        "Score and groups by a parameter",
        compared_bars.parameter,
        captions_compared.parameter,
    ),
):
    COMPARED.register(_several.name, _several.title, __name__)(_several)


def draw_compared(name: str, runs: Run | Sequence[Run]) -> Figure:
    """One picture of several runs by its name.

    ``runs`` are as for ``write_report``: run directories, folders of them, results, and what
    ``read_run`` returns.
    """
    picture = COMPARED.find(name)
    return picture.draw(readings_of(as_list(runs))).figure()


def compared(readings: Sequence[Reading], problems: list[str] | None = None) -> list[Drawn]:
    """The pictures of several runs side by side; ``problems`` as for ``pictures``."""
    drawn_pictures = []
    if len(readings) < 2:
        return []
    for p in COMPARED.everything:
        try:
            sketch = untitled(p.draw(readings))
            drawn_pictures.append(Drawn(p.name, "accuracy", p.title, p.words(readings), sketch))
        except ConfigError:
            continue
        except DAMAGE as error:
            if problems is not None:
                problems.append(_damaged(p.name, error))
    return drawn_pictures
