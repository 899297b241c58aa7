"""Pictures of user-centric mixing: effective samples, discrepancies and silhouettes."""

from dataclasses import replace

import numpy as np
import pytest

from coterie.clustering import mixing_diagnostics
from coterie.errors import ConfigError
from coterie.report import catalogue, figures
from coterie.report.captions import groups as captions_groups
from coterie.report.captions import mixing as captions_mixing
from coterie.report.figures import mixing
from runs_by_hand import INIT, NAMES, finished, round_of

NOTES = INIT["notes"]


def points(figure, name):
    (found,) = [t for t in figure.data if t.name == name]
    return list(zip(found.x, found.y, strict=True))


def test_clients_and_streams_lie_between_the_two_extremes():
    figure = figures.mixing_terms(NOTES, ["x", "x", "y", "z"], NAMES)
    own = [(25, 1.4), (25, 1.4), (20, 1.2), (18, 1)]
    assert points(figure, "a client by its own weights") == own
    assert points(figure, "each alone") == [(10, 0)]
    alike = [(40, 3), (40, 3), (40, 3.25), (40, 3.75)]
    assert points(figure, "all alike (FedAvg's weights)") == alike
    # Of the first stream (1.5 + 1.3)/2.
    assert points(figure, "a stream by its weights") == [(26, 1.4), (20, 1.2), (18, 1)]
    (clients,) = [t for t in figure.data if t.name == "a client by its own weights"]
    assert clients.hovertext[1] == "&lt;b&gt;bob&lt;/b&gt;"
    colours = clients.marker.color
    assert colours[0] == colours[1]
    assert len(set(colours)) == 3
    curve = points(figure, "between the two, clients not compared")
    assert curve[0] == (10, 0)
    assert curve[-1] == (40, 3.25)
    assert curve[12] == (pytest.approx(1 / (0.25 / 10 + 0.75 / 40)), 1.625)


def test_without_shared_streams_there_are_clients_alone():
    terms = {k: v for k, v in NOTES["mixing_terms"].items() if not k.startswith("stream")}
    figure = figures.mixing_terms({"mixing_terms": terms}, [0, 1, 2, 3])
    assert len(figure.data) == 4
    with pytest.raises(ConfigError, match="no 'mixing_terms'"):
        figures.mixing_terms({})


def test_the_curve_has_the_terms_of_blended_weights():
    rng = np.random.default_rng(3)
    counts, gaps = rng.integers(5, 50, 6).astype(float), rng.random((6, 6))
    np.fill_diagonal(gaps, 0)
    alike = np.tile(counts / counts.sum(), (6, 1))
    together = [(counts.sum(), d) for d in (alike * gaps).sum(1)]
    alone = [(n, 0.0) for n in counts]
    terms = mixing.MixingPoints(list(range(6)), [0] * 6, alone, alone, together, {})
    for share in (0.0, 0.3, 1.0):
        blended = mixing_diagnostics((1 - share) * np.eye(6) + share * alike, counts, gaps)
        worth, gap = mixing.blend(terms, share)
        assert worth == pytest.approx(blended.effective.mean())
        assert gap == pytest.approx(blended.discrepancy.mean())


def test_the_caption_has_the_means():
    told = captions_mixing.mixing_terms(finished())
    assert (
        "worth 22 samples on average; the client alone has 10, all clients together have 40" in told
    )
    assert "mixed in is 1.25, 38% of the discrepancy with FedAvg's weights (3.25)" in told
    # Over clients: (26 + 26 + 20 + 18)/4 and (1.4 + 1.4 + 1.2 + 1)/4.
    assert "the weights of 3 streams a mixture is worth 22 samples, at 1.25." in told


def test_the_terms_after_a_trial_are_the_ones_that_are_drawn():
    later = {"clients": [0], "samples": [7], "effective": [7], "discrepancy": [0], "together": [0]}
    run = finished()
    events = [*run.events[:-1], {**run.events[-1], "notes": {"mixing_terms": later}}]
    changed = replace(run, events=events)
    figure = catalogue.draw("mixing-terms", changed)
    assert points(figure, "a client by its own weights") == [(7, 0)]
    assert "FedAvg" not in captions_mixing.mixing_terms(changed)  # nobody differs
    assert points(mixing.compared([changed]).figure(), "one") == [(1, 0)]


def test_a_silhouette_says_how_many_streams_the_run_has():
    notes = {**NOTES, "streams": 3, "why": None}
    run = finished(events=[{**INIT, "notes": notes}, *finished().events[1:]])
    told = captions_groups.silhouette(run)
    assert told == "2 groups have the highest silhouette, 0.700. The run has 3 streams."
    assert points(catalogue.draw("silhouette", run), "this run: 3 streams, 0.200") == [(3, 0.2)]
    best = figures.silhouette(notes, streams=2)
    assert not [t for t in best.data if t.name.startswith("this run")]


def test_runs_are_compared_in_units_of_all_samples_and_fedavgs_discrepancy():
    # Streams' rows count where there are any: 22.5 of 40 samples, 1.25 of 3.25.
    own = {k: v for k, v in NOTES["mixing_terms"].items() if not k.startswith("stream")}
    alone = finished("b", events=[{**INIT, "notes": {"mixing_terms": own}}])
    figure = mixing.compared([finished("a"), alone, finished("c", events=[])]).figure()
    assert points(figure, "a") == [(0.5625, pytest.approx(1.25 / 3.25, abs=1e-5))]
    assert points(figure, "b") == [(0.55, pytest.approx(1.25 / 3.25, abs=1e-5))]
    assert points(figure, "each alone") == [(0.25, 0)]
    assert points(figure, "all alike (FedAvg's weights)") == [(1, 1)]
    assert {t.name for t in figure.data} >= {"a", "b"}
    assert "c" not in {t.name for t in figure.data}
    told = captions_mixing.compared([finished("a"), alone])
    assert "a 56% at 38%; b 55% at 38%." in told
    with pytest.raises(ConfigError, match="no run recorded"):
        mixing.compared([finished("c", events=[])])


@pytest.mark.parametrize(
    ("groups", "order", "by"),
    [
        (["a", "b", "c", "d"], ["0", "2", "1", "3"], "true group"),  # each client its own stream
        (["a"] * 4, ["0", "2", "1", "3"], "true group"),
        (["a", "b", "b", "a"], ["0", "3", "1", "2"], "group"),
    ],
)
def test_where_groups_of_the_run_say_nothing_mixtures_are_shown_by_true_group(groups, order, by):
    rows = [[0.4, 0.1, 0.4, 0.1], [0.1, 0.4, 0.1, 0.4]] * 2
    last = {**round_of(1), "groups": groups}
    notes = {"mixing": rows, "clients": [0, 1, 2, 3]}
    events = [{**INIT, "groups": groups, "notes": notes}, last]
    data = {"names": list("0123"), "groups": [0, 1, 0, 1]}
    run = finished(events=events, data=data)
    figure = catalogue.draw("mixing", run)
    assert list(figure.data[0].x) == order
    assert figure.layout.title.text.startswith(f"Weights of the mixture, by {by}")
    share = 80 if by == "true group" else 50
    words = catalogue.PICTURES["mixing"].words(run)
    assert words.endswith(f"and {share} % comes from its {by}, its own model included.")
    unknown = finished(events=events, data={**data, "groups": None})
    assert "by group" in catalogue.draw("mixing", unknown).layout.title.text
