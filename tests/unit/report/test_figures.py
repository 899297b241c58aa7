"""Pictures of what a method did: the data are really in the traces, wrong input is a sentence."""

import json

import pytest

from coterie.errors import ConfigError
from coterie.report import figures, palette
from coterie.report.figures import matrices
from coterie.report.figures import methods as sketches
from coterie.report.figures.style import untitled

NESTED = [list("aaaa"), list("bbcc"), ["d", "e", "c2", "c2"]]


def event(number, groups=(0, 0), **notes):
    cohort = list(range(len(groups)))
    return {"round": number, "cohort": cohort, "groups": list(groups), "notes": notes}


def trace(figure, name):
    (found,) = [t for t in figure.data if t.name == name]
    return found


def points(figure, name):
    found = trace(figure, name)
    return list(zip(found.x, found.y, strict=True))


def check_dressed(figure, *axes):
    """A title, names on the axes, and nothing that cannot be written as JSON."""
    assert figure.layout.title.text
    shown = [a.title.text for a in (*figure.select_xaxes(), *figure.select_yaxes())]
    assert set(axes) <= set(shown)
    json.loads(figure.to_json())


# --- groups -------------------------------------------------------------------------------------


def test_a_group_keeps_its_number_while_most_of_it_stays():
    assert figures.followed(NESTED) == [[0, 0, 0, 0], [0, 0, 1, 1], [0, 2, 1, 1]]
    assert figures.followed([["a", "a", "b"], ["b", "b", "a"]]) == [[0, 0, 1], [0, 0, 1]]
    assert figures.followed([[None, 1], [4, 1]]) == [[None, 0], [1, 0]]


def test_groups_over_rounds_has_every_client_in_every_round():
    events = [event(i + 1, groups) for i, groups in enumerate(NESTED)]
    figure = figures.groups_over_rounds(events)
    heat = figure.data[0]
    assert list(heat.x) == [1, 2, 3]
    assert list(heat.y) == ["0", "1", "2", "3"]
    assert [list(row) for row in heat.z] == [[1, 1, 0], [1, 1, 0], [1, 2, 2], [1, 2, 2]]
    assert [list(row) for row in heat.customdata][1] == ["a", "b", "e"]
    assert {t.name for t in figure.data[1:]} == {
        "group c2: 2 clients",
        "alone in a group: 2 clients at the end",
    }
    check_dressed(figure, "round", "client, sorted by its last group")


def test_groups_are_sorted_by_the_last_round_and_divided_by_lines():
    figure = figures.groups_over_rounds([event(1, [0, 1, 0, 1]), event(2, [0, 1, 1, 0])])
    assert list(figure.data[0].y) == ["0", "3", "2", "1"]
    (borders,) = figure.layout.shapes
    across = "M0.5,0.5H1.5M0.5,1.5H2.5M0.5,2.5H1.5"  # 0 | 3 and 2 | 1 in round 1, 3 | 2 in both
    assert borders.path == across + "M1.5,0.5V1.5M1.5,1.5V2.5"  # 3 and 2 moved


def test_a_group_that_loses_a_round_keeps_its_cells_apart():
    figure = figures.groups_over_rounds([event(1, [0, 0]), event(5, [0, 1])])
    (borders,) = figure.layout.shapes
    assert borders.path == "M3,0.5H5.5M3,0.5V1.5"  # half-way between the rounds that are known


def test_who_comes_late_had_no_group_before():
    assert figures.followed([[0, 0], [0, 0, 1]]) == [[0, 0], [0, 0, 1]]
    figure = figures.groups_over_rounds([event(1, [0, 0]), event(2, [0, 0, 0])])
    first, *_ = figure.data[0].z
    assert [v == v for v in first] == [False, True]
    assert figure.data[0].y[0] == "2"


def test_groups_of_the_beginning_count_and_admissions_do_not():
    begun = {"round": 0, "event": "init", "groups": [0, 1, None]}
    admission = {"round": 1, "event": "admission", "groups": [1]}
    figure = figures.groups_over_rounds([begun, event(1, [0, 1, None]), admission])
    assert list(figure.data[0].x) == [0, 1]
    assert not any(v == v for v in figure.data[0].z[0])  # nobody's row comes first, and is empty


@pytest.mark.parametrize("clients", [20, 100])
def test_many_clients_get_rows_that_can_be_told_apart(clients):
    events = [event(r, [c % (1 + r % 12) for c in range(clients)]) for r in range(1, 31)]
    figure = figures.groups_over_rounds(events)
    assert len(figure.data[0].z) == clients
    assert 420 <= figure.layout.height <= 960
    check_dressed(figure)


def test_what_never_moved_is_followed_without_a_search():
    column = ["a", None, "b", "a"]
    once = figures.followed([column, ["x", "y", "x", "x"]])
    assert figures.followed([column, list(column), ["x", "y", "x", "x"]]) == [once[0], *once]


# --- colour bars ---------------------------------------------------------------------------------


def barred():
    """Pictures with a colour bar: with a legend, with a line below the title too, with neither."""
    gaps = {"0": {"body": 1.0, "head": 3.0}}
    rest = [layered(1, True, {"0": ["body"]}, gaps), layered(2, False, {"0": ["body"]})]
    return [
        sketches.layer_intervals(rest),
        sketches.layer_intervals(rest[:1]),
        matrices.mixing_matrix({"mixing": [[1, 0], [0, 1]]}, [0, 1]),
    ]


@pytest.mark.parametrize("which", range(3))
def test_colour_bars_lie_between_title_and_picture_and_above_the_legend(which):
    figure = barred()[which]
    layout = figure.layout
    height = layout["height"]
    (bar,) = [t["colorbar"] for t in figure.data if t["type"] == "heatmap"]
    title = (1 - layout["title"]["y"]) * height + 1.3 * layout["title"]["font"]["size"]
    if layout["title"]["subtitle"]["text"]:
        title += 1.6 * layout["title"]["subtitle"]["font"]["size"]
    top = (1 - bar["y"]) * height
    below = top + bar["ypad"] + bar["thickness"] + 1.5 * bar["tickfont"]["size"]
    legend = (1 - layout["legend"]["y"]) * height  # its lower end; a line of it is 21 high
    rows = 21 * any(t.get("showlegend") is not False and "name" in t for t in figure.data)
    assert (bar["yref"], bar["yanchor"]) == ("container", "top")
    assert title <= top
    assert below <= legend - rows
    assert legend <= layout["margin"]["t"]
    untitled(figure)
    assert bar["y"] == 1


# --- trees --------------------------------------------------------------------------------------

TREE = {
    "clients": [0, 1, 2, 3],
    "dendrogram": [[0, 2, 1.0, 2], [1, 3, 2.0, 2], [4, 5, 8.0, 4]],
    "threshold": 3.0,
    "why": "the threshold was given",
}


def merges(trace):
    return "merged at" in (trace.hovertemplate or "")


def corners(figure):
    drawn = [t for t in figure.data if merges(t)]
    return {y for t in drawn for y in t.y if y is not None}


def cuts(figure):
    return {t.name: set(t.y) for t in figure.data if t.mode == "lines" and not merges(t)}


def test_dendrogram_draws_every_merge_and_the_cut():
    figure = figures.dendrogram(TREE)
    assert corners(figure) == {0.0, 1.0, 2.0, 8.0}
    assert list(figure.layout.xaxis.ticktext) == ["0", "2", "1", "3"]
    assert cuts(figure) == {"cut at 3": {3.0}}
    assert figure.layout.title.subtitle.text == TREE["why"]
    colours = [t.line.color for t in figure.data if merges(t)]
    assert len(set(colours)) == 3  # two groups below the cut, and what is above
    check_dressed(figure, "client", "distance at which groups merge")


def test_dendrogram_of_dc_pfl_has_its_levels():
    trial = {"old": 2.0, "new": 1.0, "adopted": True}
    events = [event(7, [0, 0, 1], trial=trial, gamma=0.8), event(9, trial={"adopted": False})]
    assert figures.split_levels(events) == {0.8: "γ̃ = 0.8, round 7: 2 groups"}
    notes = {"dendrogram": TREE["dendrogram"], "gamma": 1.0}
    figure = figures.dendrogram(notes, levels=figures.split_levels(events))
    assert cuts(figure) == {"γ̃ = 1, at first": {8.0}, "γ̃ = 0.8, round 7: 2 groups": {6.4}}


def test_dendrogram_can_be_coloured_by_other_groups():
    figure = figures.dendrogram({**TREE, "threshold": None}, groups=[0, 0, 1, 1])
    assert not cuts(figure)
    leaves = [t for t in figure.data if t.mode == "markers"]
    assert [list(t.x) for t in leaves] == [[0, 2], [1, 3]]  # clients 0 and 1, then 2 and 3


def test_a_cut_far_above_the_tree_does_not_flatten_it():
    assert not cuts(figures.dendrogram({**TREE, "threshold": 1e9}))


def test_leaves_have_the_names_of_clients_and_the_colours_of_other_pictures():
    figure = figures.dendrogram(TREE, names=["a", "b", "c", "<d>"], numbers=[4, None, 4, 2])
    assert list(figure.layout.xaxis.ticktext) == ["a", "c", "b", "&lt;d&gt;"]
    leaves = {tuple(t.hovertext): t.marker.color for t in figure.data if t.mode == "markers"}
    assert leaves == {
        ("a", "c"): palette.colour_of(4),
        ("b",): palette.FAINT,
        ("&lt;d&gt;",): palette.colour_of(2),
    }


def test_branches_above_groups_are_told_from_clients_alone():
    figure = figures.dendrogram(TREE, numbers=[4, None, 4, 2])
    legend = {t.name: t for t in figure.data if t.showlegend is not False}
    assert set(legend) == {"holds several groups", "alone", "cut at 3"}
    assert legend["holds several groups"].line.color != legend["alone"].marker.color
    assert list(legend["alone"].hovertext) == ["client 1"]
    assert 8.0 in legend["holds several groups"].y
    assert 1.0 not in legend["holds several groups"].y[1:3]  # 0 and 2 are of one group


def test_titles_of_axes_keep_away_from_long_names():
    names = [f"a clinic of the north {c}" for c in range(4)]
    tree = figures.dendrogram(TREE, names=names)
    matrix = figures.mixing_matrix({"mixing": [[1, 0], [0, 1]]}, [0, 1], names)
    for axis in (tree.layout.xaxis, matrix.layout.xaxis, matrix.layout.yaxis):
        assert axis.automargin
        assert axis.title.standoff > 0
    assert tree.layout.yaxis.title.standoff is None  # of numbers


# --- weights and silhouettes --------------------------------------------------------------------


def test_mixing_matrix_is_ordered_by_group():
    rows = [[0.6, 0.1, 0.3], [0.0, 1.0, 0.0], [0.4, 0.2, 0.4]]
    figure = figures.mixing_matrix({"mixing": rows, "clients": [0, 1, 2]}, [5, 7, 5])
    heat = figure.data[0]
    want = [[0.6, 0.3, 0.1], [0.4, 0.4, 0.2], [0.0, 0.0, 1.0]]
    assert [list(row) for row in heat.z] == [pytest.approx(row) for row in want]
    assert list(heat.x) == list(heat.y) == ["0", "2", "1"]
    assert {s.x0 for s in figure.layout.shapes} == {1.5, -0.5}
    check_dressed(figure, "client j, whose model is mixed in")


@pytest.mark.parametrize("whole", [int, str])
def test_silhouette_shows_each_number_of_groups_and_the_highest(whole):
    scores = {whole(10): 0.05, whole(2): 0.2, whole(3): 0.5}
    notes = {"silhouette": scores, "contrast": 1.2, "streams": 1}
    figure = figures.silhouette(notes)
    assert points(figure, "silhouette") == [(2, 0.2), (3, 0.5), (10, 0.05)]
    assert points(figure, "highest: 3 groups, 0.500") == [(3, 0.5)]
    assert set(trace(figure, "least that counts: 0.1").y) == {0.1}
    assert figure.layout.title.subtitle.text == "contrast of the gradients 1.20: 1 stream chosen"
    check_dressed(figure, "number of groups")


# --- DC-PFL -------------------------------------------------------------------------------------

DC = [
    event(1, loss=2.0, radius=None, phase="watch", gamma=1.0, alone=[]),
    event(2, loss=1.5, radius=30.0, phase="sync", gamma=1.0, alone=[]),
    event(3, loss=1.2, radius=float("inf"), phase="trial", gamma=1.0, alone=[]),
    event(
        4,
        [0, 1],
        trial={"old": 0.9, "new": 0.7, "adopted": True},
        phase="watch",
        gamma=0.8,
        alone=[0, 1],
    ),
    event(5, [0, 1], loss=0.6, radius=90.0, phase="watch", gamma=0.8, alone=[0, 1]),
]


def test_loss_and_trials():
    figure = figures.loss_and_trials(DC)
    assert points(figure, "loss of the model received") == [(1, 2.0), (2, 1.5), (3, 1.2), (5, 0.6)]
    assert points(figure, "trial: old groups, after training") == [(4, 0.9)]
    assert points(figure, "trial: new groups, after training") == [(4, 0.7)]
    assert points(figure, "γ̃") == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 0.8), (5, 0.8)]
    assert points(figure, "number of groups")[2:4] == [(3, 1), (4, 2)]
    # Where it is infinite, the line has a gap.
    assert points(figure, "radius of curvature") == [(2, 30.0), (3, None), (5, 90.0)]
    assert points(figure, "rapid decrease has ended") == [(2, 1.5)]
    assert points(figure, "radius where it has ended") == [(2, 30.0)]
    shades = [s for s in figure.layout.shapes if s.type == "rect"]
    assert [(s.x0, s.x1, s.yref) for s in shades] == [(1, 2, "y domain"), (1, 2, "y4 domain")]
    assert [a.text for a in figure.layout.annotations] == ["✓"]
    told = trace(figure, "trial: new groups, after training").hovertext
    assert list(told) == ["adopted, 0.9 → 0.7"]
    check_dressed(figure, "loss", "radius", "round")


def test_a_trial_of_every_cut_and_losses_of_mixed_models():
    def verdict(chosen):
        return {"cuts": [1, 2, 2, 4], "losses": [0.9, 0.7, 0.6, 0.5], "chosen": chosen}

    more = {"phase": "watch", "gamma": 1.0, "radius": 9.0}
    events = [
        event(1, [0, 0], loss=2.0, mixed=False, **more),
        event(2, [0, 0], loss=1.0, mixed=True, **more),
        event(3, [0, 0], loss=1.5, mixed=False, ended=True, **{**more, "phase": "ask"}),
        event(4, [0, 1], verdict=verdict(2), **more),
        event(5, [0, 1], loss=1.2, mixed=False, **more),
        event(6, [0, 1], verdict=verdict(1), **more),
    ]
    figure = figures.loss_and_trials(events)
    assert points(figure, "loss of the model received") == [(1, 2.0), (3, 1.5), (5, 1.2)]
    assert points(figure, "with skipped layers, clients using their own") == [(2, 1.0)]
    assert points(figure, "rapid decrease has ended") == [(3, 1.5)]
    assert points(figure, "trial: old groups, after training") == [(4, 0.9), (6, 0.9)]
    # Of the two cuts into two groups the better one; where none was taken, the best of all.
    assert points(figure, "trial: new groups, after training") == [(4, 0.6), (6, 0.5)]
    assert [a.text for a in figure.layout.annotations] == ["✓", "✗"]
    # The radius of round 2 is only that of round 1 again, for its loss does not count.
    assert [r for r, _ in points(figure, "radius of curvature")] == [1, 3, 4, 5, 6]


@pytest.mark.parametrize("radius", [None, float("inf")])
def test_a_loss_that_never_bends_upwards_has_no_panel_for_its_radius(radius):
    told = {"phase": "watch", "gamma": 1.0, "radius": radius}
    figure = figures.loss_and_trials([event(r, loss=3.0 - r, **told) for r in (1, 2)])
    assert points(figure, "loss of the model received") == [(1, 2.0), (2, 1.0)]
    assert "radius of curvature" not in {t.name for t in figure.data}
    check_dressed(figure, "loss", "round")


def test_a_rapid_decrease_begins_after_the_last_trial():
    told = {"phase": "watch", "gamma": 1.0, "radius": None}
    tried = {"old": 1.0, "new": 2.0, "adopted": False}
    events = [
        event(1, loss=3.0, **told),
        event(2, loss=2.0, ended=True, **told),
        event(4, trial=tried, phase="rest", gamma=1.0),
        event(7, loss=1.0, ended=True, **told),
    ]
    shades = [s for s in figures.loss_and_trials(events).layout.shapes if s.type == "rect"]
    assert [(s.x0, s.x1) for s in shades] == [(1, 2), (4, 7)]


def test_a_dc_pfl_run_without_trials_has_a_picture_too():
    figure = figures.loss_and_trials([{"round": 0, "event": "init", "groups": [0]}, *DC[:3]])
    assert points(figure, "trial: new groups, after training") == []


# --- FedTSDP ------------------------------------------------------------------------------------


def test_hopkins_and_layers():
    events = [
        event(1, [0, 0, 1], hopkins=0.7, shared_layers=2.0),
        event(2, [0, 0, 1], hopkins=0.6, shared_layers=1.7),
    ]
    figure = figures.hopkins_and_layers(events)
    assert points(figure, "Hopkins statistic") == [(1, 0.7), (2, 0.6)]
    assert points(figure, "clustered anew") == [(1, 0.7)]
    assert set(trace(figure, "threshold 0.65").y) == {0.65}
    assert points(figure, "shared layers L") == [(1, 2.0), (2, 1.7)]
    assert points(figure, "as sent: half layers") == [(1, 2.0), (2, 1.5)]
    assert points(figure, "clusters") == [(1, 2), (2, 2)]
    assert points(figure, "clusters of one client") == [(1, 1), (2, 1)]
    check_dressed(figure, "Hopkins H", "layers", "clusters", "round")
    scored = figures.hopkins_and_layers([{**e, "received": {"accuracy": 0.5}} for e in events])
    assert points(scored, "accuracy received") == [(1, 0.5), (2, 0.5)]
    check_dressed(scored, "accuracy")
    # In round 2 a half layer less is shared: a line through all four panels.
    assert [(s.x0, s.yref) for s in scored.layout.shapes] == [
        (2, f"y{n} domain") for n in ("", "2", "3", "4")
    ]


def test_clusterings_of_fedtsdp_are_those_that_were_made_with_both_stages():
    told = {"shared_layers": 2.0}
    events = [
        event(1, [0, 0, 1], hopkins=0.7, stages={"eps_outputs": 2, "eps_weights": 3}, **told),
        event(2, [0, 0, 1], hopkins=0.9, **told),  # above the threshold, but nobody was asked
        event(3, [0, 0, 1], hopkins=0.8, stages={"eps_outputs": 1, "eps_weights": 2}, **told),
    ]
    figure = figures.hopkins_and_layers(events)
    assert points(figure, "clustered anew") == [(1, 0.7), (3, 0.8)]
    assert points(figure, "after the first stage, by outputs") == [(1, 2), (3, 1)]
    assert points(figure, "after the second stage, by weights") == [(1, 3), (3, 2)]


# --- layers -------------------------------------------------------------------------------------


def layered(number, all_due, quiet, discrepancy=None, **notes):
    layers = {"all_due": all_due, "quiet": quiet}
    if discrepancy:
        layers["discrepancy"] = discrepancy
    return event(number, ["0/0", "0/0", "0/1"], layers=layers, **notes)


def test_layer_intervals_tell_who_did_not_send_what():
    gaps = {"0/0": {"conv": 0.1, "head": 0.9}, "0/1": {"conv": 0.3, "head": 0.3}, "9/9": {"x": 1.0}}
    events = [
        layered(1, False, {"0/0": ["conv"], "0/1": []}, gaps),
        layered(2, False, {"0/0": ["conv"], "0/1": []}),  # two of three clients leave conv out
        layered(3, True, {"0/0": ["conv"], "0/1": ["conv"]}),  # all due
        layered(4, False, {"0/0": ["conv"]}, phase="sync"),  # all of them leave it out
        layered(5, False, {"0/0": ["conv"]}, phase="watch", alone=[0]),  # all due: DC-PFL's sync
        layered(6, False, {"0/0": ["conv"]}),  # of those not alone, one of two
    ]
    figure = figures.layer_intervals(events, share=0.1)
    assert not [
        t for t in figures.layer_intervals(events).data if "skipped below" in (t.name or "")
    ]
    heat = figure.data[0]
    assert list(heat.y) == ["conv", "head"]
    assert [list(row) for row in heat.z] == [pytest.approx([0, 2 / 3, 0, 1, 0, 0.5]), [0] * 6]
    assert points(figure, "conv") == [(1, pytest.approx((0.2 + 1.0) / 2))]
    assert set(trace(figure, "skipped below 0.1").y) == {0.1}
    check_dressed(figure, "skipped layer", "discrepancy / mean", "round")


def test_layers_that_never_rest_are_said_so():
    figure = figures.layer_intervals([layered(1, True, {}, {"0/0": {"head": 1.0}})])
    assert figure.layout.title.subtitle.text == "no layer was skipped in any round"


# --- evidence -----------------------------------------------------------------------------------

EVIDENCE = {
    "groups": 2,
    "labels": [0, 0, 1],
    "errors": {"1": 0.8, "2": 0.2, "3": 0.4},
    "deviations": {"1": 0.08, "2": 0.0, "3": 0.04},
    "kappa": {"2": 0.9, "3": 0.3},
    "certainty": [1.0, 0.5, -0.2],
    "why": "2 are <i>best</i>",
}


def test_errors_are_shares_of_one_means_error_and_the_choice_is_marked():
    figure = figures.evidence_by_number({"evidence": EVIDENCE})
    assert points(figure, "held-out error") == [(1, 1), (2, 0.25), (3, 0.5)]
    assert list(trace(figure, "held-out error").error_y.array) == [0.1, 0, 0.05]
    assert points(figure, "reproducibility κ") == [(2, 0.9), (3, 0.3)]
    assert points(figure, "chosen: 2 groups") == [(2, 0.25)]
    assert set(trace(figure, "one mean for all").y) == {1}
    assert "&lt;i&gt;best" in figure.layout.title.subtitle.text
    check_dressed(figure, "number of groups", "error / one mean's", "κ")


def test_a_map_keeps_the_distances_of_clients():
    # Unit vectors at 0°, 60° and 180°: 1 − cos of their angles.
    far = [[0, 0.5, 2], [0.5, 0, 1.5], [2, 1.5, 0]]
    notes = {"evidence": EVIDENCE, "distances": far, "clients": [4, 5, 6]}
    figure = figures.client_map(notes, ["a", "b", "c", "d", "<e>"])
    (one, two), (three,) = (
        points(figure, "group 0 (2 clients)"),
        points(figure, "group 1 (1 client)"),
    )
    for left, right, distance in ((one, two, 0.5), (one, three, 2), (two, three, 1.5)):
        squared = (left[0] - right[0]) ** 2 + (left[1] - right[1]) ** 2
        assert squared == pytest.approx(2 * distance, abs=1e-3)
    shown = trace(figure, "group 0 (2 clients)")
    assert shown.marker.size[0] > shown.marker.size[1]
    assert shown.marker.opacity[0] > shown.marker.opacity[1]
    assert shown.hovertext[0] == "&lt;e&gt;<br>group 0<br>certainty 1.00"
    assert points(figure, "between two groups") == [three]
    assert figure.layout.title.subtitle.text == "the plane shows 100% of the clients' differences"


# --- wrong input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (lambda: figures.groups_over_rounds([]), "no event has the clients' groups"),
        (
            lambda: figures.groups_over_rounds([event(1, [None])]),
            "no event has the clients' groups",
        ),
        (lambda: figures.dendrogram({}), "no 'dendrogram': give FedClust's"),
        (lambda: figures.dendrogram({"dendrogram": []}), "one client"),
        (lambda: figures.mixing_matrix({"mixing": None}, [0]), "up to 200 clients"),
        (lambda: figures.mixing_matrix({"mixing": [[1, 0], [0, 1]]}, [0]), "1 groups were given"),
        (lambda: figures.silhouette({"why": "x"}), "no 'silhouette'"),
        (lambda: figures.silhouette({"silhouette": {}}), "no number of groups has a silhouette"),
        (lambda: figures.loss_and_trials([event(1, hopkins=0.5)]), "events of a DC-PFL run"),
        (lambda: figures.hopkins_and_layers(DC), "events of a FedTSDP run"),
        (lambda: figures.layer_intervals(DC), "layer-wise aggregation"),
        (lambda: figures.evidence_by_number({}), "no 'evidence'"),
        (
            lambda: figures.evidence_by_number({"evidence": {**EVIDENCE, "errors": {}}}),
            "too little to compare",
        ),
        (lambda: figures.client_map({"evidence": EVIDENCE}), "no 'distances'"),
    ],
)
def test_what_cannot_be_drawn_is_a_sentence(draw, words):
    with pytest.raises(ConfigError, match=words):
        draw()
