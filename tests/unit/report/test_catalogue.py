"""Every picture of a run: its traces are what the run has, whatever state the run is in."""

import json
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch

import coterie
from coterie.errors import ConfigError
from coterie.report import catalogue, numbers, page, palette
from coterie.report.figures import clients, cost, matrices, scores, streams
from coterie.report.figures.sketch import Sketch, panels
from coterie.report.figures.style import clear
from coterie.report.reading import Reading
from runs_by_hand import DATA, INIT, SCORES, finished, going, old, round_of

COLOUR = re.compile(r"#[0-9A-Fa-f]{6}")


def drawn(reading):
    problems = []
    found = {d.name: d for d in catalogue.pictures(reading, problems)}
    assert problems == []
    return found


@cache
def every():
    """All pictures of the run that has everything; nobody changes them."""
    return drawn(finished())


def points(figure, name):
    (found,) = [t for t in figure.data if t.name == name]
    return list(zip(found.x, found.y, strict=True))


def texts(tree):
    """All strings in a figure's JSON."""
    if isinstance(tree, dict):
        return [t for v in tree.values() for t in texts(v)]
    if isinstance(tree, list):
        return [t for v in tree for t in texts(v)]
    return [tree] if isinstance(tree, str) else []


def as_json(tree):
    """A tree as JSON has it: tuples are lists, and so are matrices."""
    return json.loads(json.dumps(tree))


# --- the whole ----------------------------------------------------------------------------------


def test_a_run_with_everything_has_every_picture():
    found = every()
    assert list(found) == list(catalogue.PICTURES)
    assert {d.section for d in found.values()} == set(catalogue.SECTIONS)
    for each in found.values():
        assert each.figure.data, each.name
        bars = [t.colorbar for t in each.figure.data if t.type == "heatmap" and t.showscale is None]
        assert (each.figure.layout.title.text is None) == (not bars), (
            each.name
        )  # a bar's, else none
        assert all(bar.title.text is None for bar in bars), each.name
        assert each.words.endswith("."), each.name
        assert len(each.words) < 500, each.name
        assert 0 < each.figure.layout.height <= 960, each.name
        assert each.figure.layout.width is None, each.name  # as wide as the page
        json.loads(each.figure.to_json())
    assert catalogue.draw("loss", finished()).layout.title.text == "Loss against rounds"


@pytest.mark.parametrize(
    ("reading", "missing"),
    [
        (going(), {"gain", "exposure"}),
        (going("stopped"), {"gain", "exposure"}),
        (Reading("new", "running"), set(catalogue.PICTURES)),
        (
            old(),
            set(catalogue.PICTURES)
            - {"accuracy", "accuracy-bytes", "loss", "groups", "groups-by-client", "bytes", "time"},
        ),
    ],
)
def test_what_is_not_there_is_not_drawn_and_no_problem(reading, missing):
    found = drawn(reading)
    assert set(catalogue.PICTURES) - set(found) == missing
    for name in missing:
        with pytest.raises(ConfigError):
            catalogue.draw(name, reading)


@pytest.mark.parametrize("junk", ["oops", [[1], "a"], {"a": {"b": "c"}}])
@pytest.mark.parametrize("field", ["notes", "inside", "received", "clock", "client_scores"])
def test_damaged_notes_cost_their_picture_alone(junk, field):
    run = finished()
    inside = {key: junk for e in run.events for key in e["notes"]}
    damage = {"notes": inside} if field == "inside" else {field: junk}
    problems = []
    hurt = replace(run, events=[{**e, **damage} for e in run.events])
    found = {d.name for d in catalogue.pictures(hurt, problems)}
    assert {"groups", "bytes", "labels", "exposure", "epsilon"} <= found
    for sentence in problems:
        assert re.match(r"the picture '[a-z-]+' is left out: .* damaged \(\w+: .+\)", sentence)
    assert len(found) + len(problems) <= len(catalogue.PICTURES)


def test_a_name_that_is_no_picture_is_a_sentence():
    with pytest.raises(ConfigError, match="did you mean 'dendrogram'"):
        catalogue.draw("dendogram", finished())


def test_names_are_never_markup_and_captions_are_plain_text():
    several = catalogue.compared([finished("<b>1"), finished("2")])
    for each in [*every().values(), *several]:
        told = [t for t in texts(json.loads(each.figure.to_json())) if not t.startswith("M")]
        strange = {
            tag
            for t in told
            for tag in re.findall(r"<[^>]*>", t)
            if tag not in ("<br>", "<extra>", "</extra>")
        }
        assert strange == set(), each.name
    assert "<b>bob</b>" in every()["clients"].words  # the page escapes it


def test_all_colours_are_the_palettes_so_a_dark_page_can_replace_them():
    known = {*palette.COLOURS, *palette.TINTS, *palette.LINES, *palette.SCALE, palette.RED}
    known |= {palette.ALONE, palette.INK, palette.FAINT, palette.GRID, palette.PAPER}
    for each in [*every().values(), *catalogue.compared([finished(), old()])]:
        tree = json.loads(each.figure.to_json())
        used = set(COLOUR.findall(" ".join(texts(tree))))
        assert used <= known, each.name
    assert not set(palette.DARK) & set(palette.DARK.values())
    assert {palette.INK, palette.PAPER, palette.GRID, *palette.SCALE} <= set(palette.DARK)


def test_a_long_run_of_many_clients_is_small():
    groups = [[(c + r // 9 * (c % 7 == 0)) % 20 for c in range(100)] for r in range(200)]
    own = [[(c * 37 + r * 11) % 97 / 97 for c in range(100)] for r in range(200)]
    people = {str(c): [10, 10] for c in range(100)}
    events = [
        {
            **round_of(1),
            "round": r + 1,
            "groups": groups[r],
            "client_scores": {"received": own[r]},
            "client_bytes": people,
        }
        for r in range(200)
    ]
    rows = [[(i * j) % 13 / 7 for j in range(100)] for i in range(100)]
    init = {**INIT, "groups": groups[0], "notes": {"distances": rows, "mixing": rows}}
    data = {"names": [f"c{c}" for c in range(100)], "labels": [[1, 2, 3]] * 100}
    found = drawn(Reading("long", "running", events=[init, *events], data=data))
    assert {"groups", "groups-by-client", "clients-over-rounds", "similarity"} <= set(found)
    assert sum(len(d.figure.to_json()) for d in found.values()) < 900_000


# --- scores -------------------------------------------------------------------------------------


def test_accuracy_has_the_mean_the_worst_the_band_the_best_round_and_the_target():
    figure = every()["accuracy"].figure
    assert points(figure, "received, mean of clients") == [(1, 0.25), (2, 0.5), (3, 0.7)]
    assert points(figure, "worst client") == [(1, 0.1), (2, 0.4), (3, 0.5)]
    shade = points(figure, "10th to 90th percentile of clients")
    assert shade == [(1, 0.1), (2, 0.4), (3, 0.5), (3, 0.9), (2, 0.6), (1, 0.4)]
    assert points(figure, "best on validation data: round 2") == [(2, 0.5)]
    assert points(figure, "target 60.0%") == [(1, 0.6), (3, 0.6)]
    words = every()["accuracy"].words
    assert words.startswith(
        "Received accuracy rose from 25.0 % in round 1 to 70.0 % in round 3; the worst client, "
        "<b>bob</b>, ends at 50.0 %."
    )


def test_accuracy_against_bytes_and_seconds():
    found = every()
    by_bytes = points(found["accuracy-bytes"].figure, "received, mean of clients")
    assert by_bytes == [(2040, 0.25), (3640, 0.5), (5240, 0.7)]
    by_clock = points(found["accuracy-time"].figure, "received, mean of clients")
    assert by_clock == [(7.5, 0.25), (11.0, 0.5), (14.5, 0.7)]
    assert "after 5.24 kB" in found["accuracy-bytes"].words
    with pytest.raises(ConfigError, match="--clock"):
        scores.accuracy(old(), "seconds")


def test_a_method_judged_after_adapting_has_that_in_front():
    rounds = [round_of(n, adapted={"accuracy": 0.9, "worst": 0.8}) for n in (1, 2)]
    run = finished(events=rounds, result={"headline": "adapted", "judged_by": "accuracy"})
    figure = catalogue.draw("accuracy", run)
    assert points(figure, "worst client") == [(1, 0.8), (2, 0.8)]
    assert points(figure, "adapted, mean of clients") == [(1, 0.9), (2, 0.9)]


# --- clients ------------------------------------------------------------------------------------


def test_each_client_is_in_a_strip_once_and_the_worst_are_named():
    figure = every()["clients"].figure
    strips = {t.name: t for t in figure.data if t.mode == "markers"}
    assert list(strips) == ["received", "adapted", "alone"]
    assert list(strips["received"].y) == SCORES[-1]
    assert list(strips["adapted"].y) == [0.8, 0.8, 0.6, 0.9]
    for place, strip in enumerate(strips.values()):
        assert all(abs(x - place) < 0.25 for x in strip.x)
        assert len(set(strip.x)) == 4
        assert len(strip.hovertext) == 4
    assert strips["received"].hovertext[1].startswith("&lt;b&gt;bob&lt;/b&gt;<br>group x<br>10 ")
    named = [(a.text, a.y) for a in figure.layout.annotations if a.x < 0.5]
    assert named[0] == ("&lt;b&gt;bob&lt;/b&gt;", 0.5)
    (box,) = [t for t in figure.data if t.name == "received: median and quarters"]
    assert list(box.y)[:2] == [0.7, 0.7]


def test_who_came_at_the_end_is_not_among_the_others():
    rows = [{**row, "newcomer": int(c == 1)} for c, row in enumerate(finished().clients)]
    run = finished(clients=rows)
    assert [c for c, _ in clients.scores_of(run, "received")] == [0, 2, 3]
    assert clients.worst(run, "received") == ("cy & co", 0.7)


def test_places_beside_each_other_fill_a_width():
    for count in (2, 10, 100):
        places = sorted(clients.jitter(count))
        gaps = [b - a for a, b in pairwise(places)]
        assert places[0] >= -0.22
        assert places[-1] <= 0.22
        assert min(gaps) > 0.44 / count / 3
    assert clients.jitter(5) == clients.jitter(9)[:5]


def test_clients_over_rounds_are_ordered_by_group_then_score():
    heat = every()["clients-over-rounds"].figure.data[0]
    assert list(heat.x) == [1, 2, 3]
    assert list(heat.y) == ["ann", "&lt;b&gt;bob&lt;/b&gt;", "cy &amp; co", "dee"]
    assert list(heat.z[0]) == pytest.approx([0.1, 0.5, 0.9])
    same = [round_of(3, groups=["x"] * 4)]
    heat = catalogue.draw("clients-over-rounds", finished(events=same)).data[0]
    assert list(heat.y) == ["ann", "cy &amp; co", "dee", "&lt;b&gt;bob&lt;/b&gt;"]


def test_gain_is_the_difference_from_training_alone_sorted():
    figure = every()["gain"].figure
    worse, better = figure.data
    order = ["&lt;b&gt;bob&lt;/b&gt;", "cy &amp; co", "ann", "dee"]
    assert list(worse.x) == list(better.x) == order
    assert list(worse.y) == [-0.1, None, None, None]
    assert list(better.y) == [None, 0, 0.4, 0.5]
    assert "1 client loses by taking part" in every()["gain"].words


# --- groups -------------------------------------------------------------------------------------


def test_streams_are_as_wide_as_the_clients_in_them():
    rounds = [1, 2, 3, 4]
    kept = [[0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [0, 2, 1, 1, None, 1]]
    found = streams.streams(rounds, kept)
    assert found.rounds == [1, 2, 4]  # nobody moved in round 3
    assert found.changes == 2
    for column in range(3):
        blocks = [b for b in found.blocks if b.column == column]
        assert sorted(c for b in blocks for c in b.members) == [0, 1, 2, 3, 4, 5]
        assert all(b.high - b.low == pytest.approx(len(b.members)) for b in blocks)
        ends = [(b.low, b.high) for b in blocks]
        assert all(a[1] < b[0] for a, b in pairwise(ends))  # one below another
    for column in (0, 1):
        ways = [r for r in found.ribbons if r.column == column]
        assert sum(len(r.members) for r in ways) == 6
    flows = {(r.column, r.start, r.end): r.members for r in found.ribbons}
    assert flows[0, 0, 1] == (2, 3)
    alone, none = -1, -2
    assert flows[1, 0, alone] == (0, 1)  # both are alone then, in groups of their own
    assert flows[1, 1, none] == (4,)


def test_streams_fill_their_blocks_and_do_not_cross_without_need():
    kept = [[0, 0, 1, 1, 2, 2], [2, 2, 1, 1, 0, 0]]  # all three swap names, nobody leaves anybody
    found = streams.streams([1, 2], kept)
    spans = {(b.column, b.group): (b.low, b.high) for b in found.blocks}
    for ribbon in found.ribbons:
        start, end = spans[0, ribbon.start], spans[1, ribbon.end]
        assert (ribbon.low, ribbon.low + 2) == pytest.approx(start)
        assert (ribbon.to, ribbon.to + 2) == pytest.approx(end)
        assert ribbon.low == pytest.approx(ribbon.to)  # so it runs straight


def test_streams_lie_side_by_side_in_their_blocks():
    kept = [[0, 0, 0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 2, 2, 2, 1], [0, 1, 1, 1, 2, 2, 0, 1]]
    found = streams.streams([1, 2, 3], kept)
    for block in found.blocks:
        for edge, others in (
            (
                "low",
                [r for r in found.ribbons if (r.column, r.start) == (block.column, block.group)],
            ),
            (
                "to",
                [r for r in found.ribbons if (r.column + 1, r.end) == (block.column, block.group)],
            ),
        ):
            spans = sorted((getattr(r, edge), getattr(r, edge) + len(r.members)) for r in others)
            ends = [block.low, *(x for span in spans for x in span), block.high]
            assert not spans or ends[::2] == pytest.approx(ends[1::2])  # no gap, no overlap


def test_of_many_changes_those_that_moved_most_are_shown():
    kept = [[0, 0, 0, 1, 1, 1, 1]]
    for i in range(30):  # one client goes to and fro, in round 20 three do
        column = list(kept[0]) if i % 2 else [1, *kept[0][1:]]
        kept.append([1, 1, 0, 1, 1, 1, 0] if i == 18 else column)
    found = streams.streams(list(range(1, 32)), kept)
    assert len(found.rounds) == streams.MOST_COLUMNS
    assert {1, 20, 31} <= set(found.rounds)
    assert found.changes == 30


def test_the_picture_of_streams_has_a_shape_for_each_colour_and_tells_who():
    figure = every()["groups"].figure
    paths = [s.path for s in figure.layout.shapes]
    bands, blocks = ([p for p in paths if ("C" in p) == curved] for curved in (True, False))
    assert sum(p.count("M") for p in bands) == 2 + 2  # x→x, x→y; x→x, y→alone
    assert sum(p.count("M") for p in blocks) == 1 + 2 + 2
    assert list(figure.layout.xaxis.ticktext) == ["start", "2", "3"]
    ribbons, nodes = figure.data
    assert "x → y: 2 clients<br>cy &amp; co, dee" in ribbons.hovertext
    assert "round 3, alone: 2 clients<br>cy &amp; co, dee" in nodes.hovertext
    assert list(figure.layout.yaxis.ticktext) == ["x: 2", "alone: 2"]


def test_both_pictures_of_groups_give_a_group_the_same_colour():
    events = [round_of(1, groups=list("abccdd")), round_of(2, groups=list("aabbcc"))]
    run = Reading("r", "running", events=events)
    found = drawn(run)
    streams_of, cells = found["groups"].figure, found["groups-by-client"].figure
    swatches = {t.name: t.marker.color for t in cells.data[1:] if t.name.startswith("group")}
    axis = streams_of.layout.yaxis
    assert {f"group {t} clients" for t in axis.ticktext} == set(swatches)
    for text, middle in zip(axis.ticktext, axis.tickvals, strict=True):
        corner = f"M0.93,{clear([middle - 1], 6)[0]}H"  # of a block of two in the last column
        (fill,) = [s.fillcolor for s in streams_of.layout.shapes if corner in s.path]
        assert fill == swatches[f"group {text} clients"]
    assert not any("e" in s.path for s in streams_of.layout.shapes)  # plotly reads no 1e-16


def test_few_rounds_have_whole_numbers():
    assert every()["loss"].figure.layout.xaxis.dtick == 1


def test_groups_of_one_kind_of_everything():
    def words(*columns):
        events = [round_of(1, round=i + 1, groups=g) for i, g in enumerate(columns)]
        figure = catalogue.draw("groups", Reading("r", "running", events=events))
        json.loads(figure.to_json())
        return catalogue.PICTURES["groups"].words(Reading("r", "running", events=events))

    assert words([0, 0, 0]) == "1 group after round 1; no client ever changed groups."
    assert (
        words([0, 1, 2])
        == "3 clients, each in a group of its own, after round 1; no client ever changed groups."
    )
    assert words([0, 0], [0, 0, 0]).startswith("1 group after round 1, 1 group after round 2; ")
    assert "clients changed groups in 1 round." in words([None, 0], [0, 0])
    assert "changed groups in 1 round." in words(list(range(100)), [c % 20 for c in range(100)])


def test_labels_are_shares_by_group_with_lines_between_groups():
    figure = every()["labels"].figure
    heat = figure.data[0]
    assert [list(row) for row in heat.z] == [
        pytest.approx(row) for row in ([0.8, 0.2], [1, 0], [0.1, 0.9], [0.5, 0.5])
    ]
    assert list(heat.x) == ["cat", "&lt;s&gt;dog&lt;/s&gt;"]
    assert [list(row) for row in heat.customdata] == [[0, 0], [0, 0], [1, 1], [1, 1]]
    assert {s.y0 for s in figure.layout.shapes} == {1.5, 2.5}
    assert every()["labels"].words == (
        "Clients have samples of between 1 and 2 of 2 classes; a client's most frequent class "
        "makes up 50 to 100 % of its samples."
    )


def test_targets_of_a_regression_are_boxes():
    five = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], None, [1, 1, 1, 1, 1]]
    figure = catalogue.draw("labels", finished(data={"names": DATA["names"], "quartiles": five}))
    (box,) = figure.data
    assert list(box.median) == [2, 7, 1]
    assert list(box.lowerfence) == [0, 5, 1]
    assert list(box.q3) == [3, 8, 1]


def test_distances_have_no_diagonal_and_are_ordered_by_group():
    groups = [["x", "y", "x", "y"]]
    figure = matrices.similarity_matrix([INIT], groups[0], DATA["names"]).figure()
    heat = figure.data[0]
    assert list(heat.y) == ["ann", "cy &amp; co", "&lt;b&gt;bob&lt;/b&gt;", "dee"]
    first = list(heat.z[0])
    assert first[0] != first[0]
    assert first[1:] == [5, 1, 6]
    words = every()["similarity"].words  # x: 0 and 1; others alone
    assert words.startswith("The distance of each pair of 4 clients, before round 1: 1 on average")
    assert "5 between" in words  # (5 + 5 + 6 + 6 + 3) / 5


def test_the_largest_similarity_that_cfl_noted_is_drawn():
    small = {"clients": [1, 2], "similarity": [[1, 0], [0, 1]]}
    large = {"clients": [0, 1, 2], "similarity": [[1, 0.5, 0], [0.5, 1, 0], [0, 0, 1]]}
    events = [round_of(1, notes={"splits": [large]}), round_of(2, notes={"splits": [small]})]
    pairs = matrices.pairs_of(events)
    assert (pairs.what, list(pairs.clients), pairs.round) == ("similarity", [0, 1, 2], 1)
    assert matrices.similarity_matrix(events, [0, 0, 1]).figure().data[0].z[0][0] == 1


def test_what_helped_in_fedfomo_adds_up_over_rounds():
    told = [{"0": {"1": 1.0, "2": -4.0}}, {"0": {"1": 2.0, "2": 1.0}, "2": {"0": -1.0}}]
    events = [round_of(i + 1, notes={"weights": w}) for i, w in enumerate(told)]
    figure = matrices.taken_matrix(events, [0, 1, 2]).figure()
    assert [list(row) for row in figure.data[0].z] == [[0, 0.75, 0.25], [0, 0, 0], [0, 0, 0]]


# --- cost and privacy ---------------------------------------------------------------------------


def test_bytes_by_kind_add_up_to_all_bytes():
    run = finished()
    found = cost.by_kind(run)
    assert "down, header" not in found  # under a hundredth of what went down
    for step, event in enumerate(run.rounds):
        for way in ("down", "up"):
            parts = [p[step][1] for key, p in found.items() if key.split(",")[0] == way]
            assert sum(parts) == event["total_bytes"][way]
    assert found["wasted"] == [(1, 5.0), (2, 10.0), (3, 15.0)]
    figure = drawn(run)["bytes"].figure
    stacked = [t for t in figure.data if t.stackgroup]
    assert sum(t.y[-1] for t in stacked) == 3400 + 1840
    assert [t.name for t in figure.data if not t.stackgroup] == ["wasted"]
    words = drawn(run)["bytes"].words
    assert words.startswith("The server sent 3.40 kB to clients and received 1.84 kB")
    assert "Another 15 B were wasted" in words


def test_what_a_trial_moves_is_one_kind_in_the_picture_and_in_the_table():
    sent = {"model/head": [900, 900], "0.0": [300, 0], "3.11/head": [500, 0], "scores": [0, 700]}
    bytes = {"bytes": {"down": 1700, "up": 1600}, "kinds": sent}
    events = [INIT, round_of(1, **bytes), round_of(2, **bytes)]
    moved = [{"down": d, "up": u} for d, u in sent.values()]
    result = {"bytes": {"kinds": dict(zip(sent, moved, strict=True))}}
    found = cost.by_kind(going_through(events))
    assert {k: points[-1][1] for k, points in found.items() if "trial" in k} == {
        "down, trial": 1600,
        "up, trial": 1400,
    }
    assert not [key for key in found if "." in key or "scores" in key]
    assert numbers.kinds(going_through(events))["trial"] == (1600, 1400)
    assert numbers.kinds(going_through(events, result)) == {
        "model/head": (900, 900),
        "trial": (800, 700),
    }


def going_through(events, result=None):
    return Reading("r", "running", events=events, result=result or {})


def test_bytes_by_client_come_from_the_table_or_while_running_from_the_rounds():
    assert cost.of_clients(finished()) == [(3, 900, 1800), (0, 2500, 0), (1, 0, 40), (2, 0, 0)]
    assert cost.of_clients(going()) == [(3, 600, 1200), (0, 1400, 0)]


def test_time_is_the_clocks_or_else_real():
    kind, found = cost.time_parts(finished())
    assert kind == "simulated"
    assert list(found) == ["computation", "communication", "waiting"]
    assert found["waiting"] == [(1, 0.5), (2, 0.5), (3, 0.5)]
    assert every()["time"].words == (
        "The rounds took 10.5 s of simulated time: computation 3.0 s, communication 6.0 s, waiting "
        "1.5 s; the work before round 1 took another 4.0 s."
    )
    kind, found = cost.time_parts(old())
    assert kind == "real"
    assert found["train"] == [(1, 2.0), (2, 2.0), (3, 2.0)]


def test_losses_are_counted_by_round():
    run = finished(events=[round_of(1), round_of(2), round_of(3, late=2, abandoned="nobody came")])
    figure = catalogue.draw("lost", run)
    assert {t.name: list(t.y) for t in figure.data} == {
        "replies lost": [0, 1, 0],
        "replies late": [0, 0, 2],
        "round abandoned": [0, 0, 1],
    }
    words = catalogue.PICTURES["lost"].words(run)
    assert words == "1 reply was lost, 2 replies were late, 1 round was abandoned."


def test_exposure_counts_clients_by_layer_and_protection():
    figure = every()["exposure"].figure
    head = "&lt;u&gt;head&lt;/u&gt;"
    assert {t.name: dict(zip(t.y, t.x, strict=True)) for t in figure.data} == {
        "looked at one by one": {f"final/{head}": 4},
        "averaged on arrival": {"model/body": 3, f"model/{head}": 3},
    }
    assert figure.layout.showlegend  # even of one protection it has to be said


def test_epsilon_has_the_budget_and_what_the_accountant_found():
    figure = every()["epsilon"].figure
    assert points(figure, "ε by Rényi divergences, an upper bound") == [(1, 1.5), (2, 3), (3, 4.5)]
    assert points(figure, "at the end, by pld: 4") == [(3, 4)]
    assert points(figure, "budget 5") == [(1, 5), (3, 5)]
    assert points(drawn(going())["epsilon"].figure, "budget 5") == [(1, 5), (2, 5)]


# --- several runs -------------------------------------------------------------------------------


def seeded(name, seed, shift, method="ifca"):
    rounds = [
        round_of(n, received={"accuracy": 0.2 * n + shift}, total_bytes={"down": n, "up": seed})
        for n in (1, 2)
    ]
    config = {"method": {"name": method}, "run": {"seed": seed, "rounds": 2}}
    result = {"judged_by": "accuracy", "received": {"accuracy": 0.4 + shift}}
    return finished(name, events=rounds, config=config, result=result)


def test_seeds_of_a_set_up_are_one_line_with_a_band():
    runs = [seeded("ifca/seed=0", 0, 0.0), seeded("fedavg", 0, 0.3, "fedavg")]
    runs.append(seeded("ifca/seed=1", 1, 0.1))
    found = {d.name: d for d in catalogue.compared(runs)}
    figure = found["compare-accuracy"].figure
    ours = "ifca, mean of 2"
    shade, mean = [t for t in figure.data if t.name == ours]
    assert list(mean.y) == pytest.approx([0.25, 0.45])
    assert list(shade.y) == pytest.approx([0.2, 0.4, 0.5, 0.3])  # there below, back above
    assert points(figure, "fedavg") == [(1, 0.5), (2, 0.7)]
    lines = [t for t in found["compare-bytes"].figure.data if t.name == ours]
    assert list(lines[1].x) == [1.5, 2.5]
    styles = Counter(
        (t.line.color, t.line.dash, t.marker.symbol) for t in figure.data if not t.fill
    )
    assert max(styles.values()) == 1
    assert "compare-time" in found


def test_forty_runs_can_be_told_apart():
    assert len({palette.line_of(i) for i in range(40)}) == 40


def test_clients_are_dots_in_rows_by_score():
    found = catalogue.compared([finished("a"), seeded("b", 7, 0.6)])
    (figure,) = [d.figure for d in found if d.name == "compare-clients"]
    first, box, second, _ = figure.data  # no lines join the dots of different rows
    assert (first.mode, second.mode, box.mode) == ("markers", "markers", "lines")
    assert list(second.x) == SCORES[-1]
    assert list(figure.layout.yaxis.ticktext) == ["b", "a"]
    # Two clients of the same score stand one above the other.
    assert len(set(zip(second.x, second.y, strict=True))) == 4


def test_gains_are_over_the_run_of_local_with_the_same_clients():
    """By hand: clients' scores are 0.9, 0.5, 0.7, 0.7 in all runs, and 0.1 less in local's."""
    lone = seeded("local", 0, -0.1, "local")
    lower = [str(v - 0.1) for v in SCORES[-1]]
    rows = [{**row, "received_accuracy": v} for row, v in zip(lone.clients, lower, strict=True)]
    runs = [seeded("ifca", 0, 0.0), replace(lone, clients=rows)]
    found = {d.name: d for d in catalogue.compared(runs)}
    gain = found["compare-gain"]
    assert gain.figure.data[0].x == pytest.approx((0.1,) * 4)
    assert list(gain.figure.layout.yaxis.ticktext) == ["ifca"]
    assert "ifca: better 4, same 0, worse 0" in gain.words
    other = [runs[0], replace(runs[1], config={**lone.config, "data": {"set": "x"}})]
    unlike = {d.name: d for d in catalogue.compared(other)}["compare-gain"]
    assert unlike.figure.data[0].x != gain.figure.data[0].x  # other clients: its own, alone


def test_a_method_has_one_colour_everywhere():
    runs = [seeded(m, 0, i / 10, m) for i, m in enumerate(("local", "ifca", "oracle", "fedavg"))]
    found = {d.name: d.figure for d in catalogue.compared(runs)}

    def colours(name, key):
        return {
            t.name: getattr(t, key).color
            for t in found[name].data
            if t.name and "median" not in t.name
        }

    by_round = colours("compare-accuracy", "line")
    assert colours("compare-cost", "marker") == colours("compare-clients", "marker") == by_round
    assert len(set(by_round.values())) == 4
    assert (by_round["oracle (ceiling)"], by_round["local (alone)"]) == (palette.INK, palette.FAINT)
    assert palette.BLUE not in (palette.INK, palette.FAINT)


def test_cost_has_a_point_for_each_run_and_names_it():
    runs = [seeded("a<b>", 0, 0.0), seeded("b", 0, 0.3, "fedavg")]
    (each,) = [d for d in catalogue.compared(runs) if d.name == "compare-cost"]
    assert points(each.figure, "a&lt;b&gt;") == [(2, 0.4)]
    assert points(each.figure, "b") == [(2, 0.7)]
    assert {a.text for a in each.figure.layout.annotations} == {"a&lt;b&gt;", "b"}
    assert each.words.endswith("better and cheaper than b (70.0 % for 2 B).")


def test_runs_of_another_score_and_one_run_are_not_compared():
    other = seeded("r", 0, 0.0)
    other = replace(other, result={**other.result, "judged_by": "r2"})
    found = catalogue.compared([seeded("a", 0, 0.0), other])
    assert all(t.name != "r" for d in found for t in d.figure.data)
    assert catalogue.compared([finished()]) == []
    assert set(catalogue.TABS) <= {*catalogue.PICTURES, *catalogue.COMPARED}


def test_numbers_are_as_long_as_can_be_seen():
    assert clear([0.123456789, 2.0, None, float("inf")]) == [0.12346, 2, None, None]


# --- sketches -----------------------------------------------------------------------------------


def test_a_page_gets_what_plotly_would_have_made_of_it():
    """Pages take sketches unchecked: so each is checked here, and nothing is lost on the way."""
    several = catalogue.compared([seeded("a", 0, 0.0), seeded("b", 7, 0.1)])
    for each in [*every().values(), *several]:
        checked = each.figure.to_plotly_json()
        assert as_json(each.tree["data"]) == as_json(list(checked["data"])), each.name
        layout = {k: v for k, v in checked["layout"].items() if k != "template"}
        ours = {k: v for k, v in each.tree["layout"].items() if k != "template"}
        assert as_json({k: v for k, v in ours.items() if v != []}) == as_json(layout), each.name
        template = checked["layout"]["template"]
        template = template if isinstance(template, dict) else template.to_plotly_json()
        assert as_json(each.tree["layout"]["template"]["layout"]) == as_json(template["layout"])


def test_a_page_makes_no_figure(monkeypatch):
    def never(self):
        raise AssertionError("plotly checks every value, which is slow")

    monkeypatch.setattr(Sketch, "figure", never)
    assert [b for b in page.run_blocks(finished()) if b.figure]


@pytest.mark.parametrize(("heights", "second"), [([2, 1, 1], 2), ([1, 3], 0)])
def test_panels_lie_where_plotly_would_lay_them(heights, second):
    from plotly.subplots import make_subplots

    specs = [[{"secondary_y": row + 1 == second}] for row in range(len(heights))]
    asked = {"rows": len(heights), "cols": 1, "shared_xaxes": True, "row_heights": heights}
    theirs = make_subplots(**asked, vertical_spacing=0.06, specs=specs).layout.to_plotly_json()
    ours = panels(heights, second).layout
    assert {k for k in ours if "axis" in k} == {k for k in theirs if "axis" in k}
    for key in (k for k in ours if "axis" in k):
        assert ours[key].pop("domain", None) == pytest.approx(theirs[key].pop("domain", None))
        assert ours[key] == theirs[key]


# --- what reviewers found -----------------------------------------------------------------------


def test_fedtsdps_threshold_is_the_one_that_was_set():
    notes = [{"hopkins": h, "shared_layers": 2.0} for h in (0.5, 0.6, 0.7)]
    events = [{"round": r, "groups": [0, 0], "notes": n} for r, n in enumerate(notes, 1)]
    run = Reading("r", "running", events=events, config={"method": {"name": "fedtsdp"}})
    changed = replace(run, config={"method": {"name": "fedtsdp", "hopkins": 0.55}})
    for reading, least, above in ((run, 0.65, 1), (changed, 0.55, 2)):
        each = drawn(reading)["hopkins"]
        assert points(each.figure, f"threshold {least}") == [(1, least), (3, least)]
        assert len(points(each.figure, "clustered anew")) == above
        assert f"above {least} in {above} of 3 rounds; clients were " in each.words
        assert f"clustered in {above} round" in each.words


def unadapted(name="r", headline="received"):
    """No round was scored after adapting, the end was: as it is with adapt_every = 0."""
    whole = finished(name)
    events = [{k: v for k, v in e.items() if k != "adapted"} for e in whole.events]
    result = {**whole.result, "headline": headline, "adapted": {"accuracy": 0.875}}
    return replace(whole, events=events, result=result)


def test_a_score_of_the_end_alone_is_a_point_there():
    found = drawn(unadapted())
    last = unadapted().rounds[-1]
    for name, place in (
        ("accuracy", scores.at_round),
        ("accuracy-bytes", scores.at_bytes),
        ("accuracy-time", scores.at_seconds),
    ):
        assert points(found[name].figure, "adapted at the end") == [(place(last), 0.875)], name
        assert "received, mean of clients" in {t.name for t in found[name].figure.data}
    assert "Adapted accuracy, scored at the end only, is 87.5 %." in found["accuracy"].words
    assert "at the end" not in {t.name for t in every()["accuracy"].figure.data}


def test_a_run_judged_by_a_score_of_the_end_alone_is_compared():
    mine = unadapted("mine", "adapted")
    mine = replace(mine, config={**mine.config, "method": {"name": "per-fedavg"}})
    assert mine.headline == "adapted"
    found = {d.name: d for d in catalogue.compared([seeded("a", 0, 0.0), mine])}
    last = mine.rounds[-1]
    for name, place in (
        ("compare-accuracy", scores.at_round),
        ("compare-bytes", scores.at_bytes),
        ("compare-time", scores.at_seconds),
    ):
        assert points(found[name].figure, "mine") == [(place(last), 0.875)], name
        (trace,) = [t for t in found[name].figure.data if t.name == "mine"]
        assert "markers" in trace.mode


def test_without_test_data_there_is_no_map_of_scores():
    nothing = {"received": [None, None, None, None]}
    events = [{**e, "client_scores": nothing} if "event" not in e else e for e in finished().events]
    run = finished(events=events)
    assert "clients-over-rounds" not in drawn(run)
    with pytest.raises(ConfigError, match="no round has scores of single clients"):
        catalogue.draw("clients-over-rounds", run)


def test_who_sent_nothing_is_not_drawn_against_bytes():
    none = {"down": 0, "up": 0}
    events = [{**e, "total_bytes": none} if "event" not in e else e for e in finished().events]
    run = finished(events=events)
    assert "accuracy" in drawn(run)
    with pytest.raises(ConfigError, match="nothing was sent"):
        catalogue.draw("accuracy-bytes", run)
    several = {d.name for d in catalogue.compared([run, finished("2", events=events)])}
    assert "compare-accuracy" in several
    assert not several & {"compare-bytes", "compare-cost"}
    mixed = {d.name for d in catalogue.compared([run, finished("2")])}
    assert {"compare-bytes", "compare-cost"} <= mixed


def test_the_words_of_a_tree_tell_of_later_cuts():
    tree = [[0, 2, 1.0, 2], [1, 3, 2.0, 2], [4, 5, 8.0, 4]]
    first = {"round": 2, "groups": [0] * 4, "notes": {"dendrogram": tree, "gamma": 1.0}}
    trial = {"old": 2.0, "new": 1.0, "adopted": True}
    refused = {**trial, "adopted": False}
    events = [
        first,
        {"round": 5, "groups": [0, 1, 0, 1], "notes": {"trial": trial, "gamma": 0.5}},
        {"round": 7, "groups": [0, 1, 0, 1], "notes": {"trial": refused, "gamma": 0.25}},
        {"round": 9, "groups": [0, 1, 0, 2], "notes": {"trial": trial, "gamma": 0.2}},
    ]
    words = catalogue.PICTURES["dendrogram"].words
    told = words(Reading("r", "running", events=events))
    assert "the cut at 8 leaves 1 group at first." in told
    assert "in round 5 at 4 with 2 groups, in round 9 at 1.6 with 3 groups." in told
    assert "round 7" not in told
    assert "at first" not in words(Reading("r", "running", events=events[:1]))


def test_groups_that_are_no_cut_of_the_tree_are_on_its_leaves_and_no_line_is_drawn():
    tree = [[0, 2, 1.0, 2], [1, 3, 2.0, 2], [4, 5, 8.0, 4]]
    first = {"round": 2, "groups": [0] * 4, "notes": {"dendrogram": tree, "gamma": 1.0}}
    chosen = {"verdict": {"chosen": 2, "why": "better"}, "gamma": 1.0}
    events = [first, {"round": 5, "groups": [0, 0, 1, 1], "notes": chosen}]
    picture = catalogue.PICTURES["dendrogram"]
    run = Reading("r", "running", events=events)
    told = picture.words(run)
    assert told.endswith(
        "leaves 1 group at first. Colours show the clients' present groups: no cut of this "
        "tree gives these 2 groups, so look at its leaves."
    )
    assert "in round 5" not in told
    drawn = picture.draw(run).data
    assert [t["name"] for t in drawn if "γ̃" in str(t.get("name"))] == ["γ̃ = 1, at first"]
    leaves = [sorted(t["hovertext"]) for t in drawn if t["mode"] == "markers"]
    assert leaves == [["client 0", "client 1"], ["client 2", "client 3"]]
    # The same groups where they are a cut: a line, and no such words.
    nested = Reading("r", "running", events=[first, {**events[1], "groups": [0, 1, 0, 1]}])
    assert "no cut" not in picture.words(nested)
    assert "in round 5 at 8 with 2 groups" in picture.words(nested)
    assert len([t for t in picture.draw(nested).data if "γ̃" in str(t.get("name"))]) == 2


@pytest.mark.parametrize("error", [OverflowError, RecursionError, ZeroDivisionError])
def test_what_cannot_be_reckoned_is_damage(monkeypatch, error):
    def broken(reading):
        raise error("too much")

    hurt = replace(catalogue.PICTURES["loss"], draw=broken)
    monkeypatch.setitem(catalogue.PICTURES, "loss", hurt)
    problems = []
    assert "loss" not in {d.name for d in catalogue.pictures(finished(), problems)}
    assert len(problems) == 1
    assert error.__name__ in problems[0]


def test_agreement_is_that_of_others():
    from random import Random

    from sklearn.metrics import adjusted_rand_score

    from coterie.results.rows import adjusted_rand

    random = Random(0)
    for size in range(1, 30):
        one, other = ([str(random.randrange(n)) for _ in range(size)] for n in (3, 1 + size % 5))
        assert adjusted_rand(one, other) == pytest.approx(adjusted_rand_score(one, other))


# --- layers ---------------------------------------------------------------------------------------


def test_each_layer_has_its_matrix_by_group_and_the_final_one_is_last():
    groups = ["x", "y", "x", "z"]  # so that clients are in the order 0, 2, 1, 3
    events = [*finished().events, {**round_of(3), "round": 4, "groups": groups}]
    each = drawn(finished(events=events))["distances-by-layer"]
    body, head = each.figure.data
    assert list(head.x) == ["ann", "cy &amp; co", "&lt;b&gt;bob&lt;/b&gt;", "dee"]
    grid = [[None if v != v else v for v in row] for row in head.z.tolist()]
    assert grid == [[None, 5, 1, 6], [5, None, 5, 3], [1, 5, None, 6], [6, 3, 6, None]]
    assert (body.zmin, body.zmax, head.zmin, head.zmax) == (0, 4, 1, 6)
    assert body.showscale is None
    assert head.showscale is False
    assert (body.xaxis, head.xaxis) == ("x", "x2")
    # Inside is 0 and 2 alone: 0 and 5; between are the other five, with a mean of 12/5 and 21/5.
    titles = [a.text for a in each.figure.layout.annotations]
    assert titles == ["body", "&lt;u&gt;head&lt;/u&gt;: 0.84"]
    assert "1 where a layer does not separate them: <u>head</u> 0.84. " in each.words


def test_layers_that_are_left_out_are_counted():
    layers = {f"layer {i}": [[], [1.0], [2.0, 2.0]] for i in range(12)}
    told = {"layer_distances": {"clients": [0, 1, 2], "layers": layers}}
    first = {**INIT, "notes": told}
    events = [first, *(round_of(n, groups=["x", "x", "y", "y"]) for n in (1, 2))]
    each = drawn(finished(events=events))["distances-by-layer"]
    assert len(each.figure.data) == 9
    assert each.figure.layout.annotations[-1].text == "layer 11: 2.00"
    assert "9 of 12 of them" in each.words
    assert len(each.words) < 500


# --- labels and models ----------------------------------------------------------------------------

APART = {"distances": [[0, 1, 2], [1, 0, 4], [2, 4, 0]], "clients": [0, 1, 2]}


def labelled(notes, labels=((3, 1), (3, 1), (1, 3)), groups=("x", "x", "y", "y"), **data):
    events = [{**INIT, "notes": {}}, round_of(1, groups=list(groups), notes=notes)]
    data = {"labels": [list(row) for row in labels], **data}
    return finished(events=events, data=data, clients=(), result={})


def test_divergence_of_labels_is_held_against_what_was_noted_with_its_correlation():
    each = drawn(labelled(APART))["divergence"]
    ours, theirs, *clouds = each.figure.data
    # Clients 0 and 1 are alike, 2 is (p − q)·ln(p/q) = ½·ln 3 from both, but for the smoothing.
    assert ours.z[2].tolist()[:2] == pytest.approx([0.549, 0.549], abs=2e-3)
    assert ours.z[0][1] == 0
    assert theirs.z[2].tolist()[:2] == [2, 4]
    near = [(t.name, list(t.y), t.marker.symbol) for t in clouds]
    assert near == [
        ("pairs of clients", [2, 4], "circle"),
        ("pairs in the same group", [1], "diamond"),
    ]
    # Of (0, d, d) and (1, 2, 4): deviations (−2, 1, 1)/3 and (−4, −1, 5)/3 give 12/√(6·42).
    assert f"over 3 pairs: {12 / (6 * 42) ** 0.5:.3f} (distance)." in each.words
    assert "0.895" not in each.words
    assert each.figure.layout.annotations[-1].text == "Distance, r = 0.756"


def test_dc_pfl_shows_its_discrepancy_with_and_without_the_scaling():
    plain = [[0, 0, 5], [0, 0, 5], [5, 5, 0]]
    run = labelled({**APART, "unscaled_distances": plain}, groups="xxxx")
    each = drawn(run)["divergence"]
    assert [a.text for a in each.figure.layout.annotations] == [
        "Labels (KL)",
        "Scaled models",
        "Scaled, r = 0.756",
        "As they are, r = 1.000",
    ]
    assert "0.895" in each.words
    assert "Diamonds" not in each.words  # all are in one group
    assert {t.name for t in each.figure.data if t.type == "scatter"} == {"pairs of clients"}


def test_clients_that_are_all_alike_have_no_correlation():
    each = drawn(labelled(APART, labels=[(3, 1)] * 3))["divergence"]
    assert "not defined (distance)" in each.words


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (labelled(APART, labels=()), "needs classes"),
        (labelled(APART, labels=[(0, 0), (3, 1), (0, 0)]), "fewer than two clients"),
        (labelled({"mixing": [[1]]}), "needs a run of a method that notes distances of clients"),
    ],
)
def test_where_there_is_no_divergence_a_sentence_says_why(run, why):
    with pytest.raises(ConfigError, match=why):
        catalogue.draw("divergence", run)


# --- DC-PFL's trials ---


def watched(radii, **notes):
    """A run of DC-PFL without trials, with these radii."""
    told = {"phase": "watch", "gamma": 1.0, "alone": [], **notes}
    events = [
        {**round_of(1), "round": n, "notes": {"loss": 3.0 - 0.1 * n, "radius": r, **told}}
        for n, r in enumerate(radii, 1)
    ]
    return finished(events=[INIT, *events])


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (watched([None] * 6), "there were too few rounds for a radius of curvature"),
        (watched([None] * 7), "the loss has no finite radius of curvature"),  # of 5 + 2 losses
        (watched([None, float("inf")]), "the loss has no finite radius of curvature"),
        (watched([None, 9.0, 7.0]), "the radius of curvature was smallest in round 3, 7"),
    ],
)
def test_the_words_of_a_run_without_trials_say_no_more_than_there_is(run, why):
    words = drawn(run)["trials"].words
    assert words.endswith(f"; no rapid decrease ended; {why}.")


# --- pictures of single methods ---


@pytest.mark.parametrize(
    ("name", "methods"),
    [
        ("mixing", "user-centric with up to 200 clients, or of fedfomo"),
        ("trials", "dc-pfl"),
        ("hopkins", "fedtsdp"),
        ("divergence", "a method that notes distances of clients"),
        ("distances-by-layer", "a method whose clients sent whole models"),
    ],
)
def test_a_picture_of_other_methods_says_of_which(name, methods):
    events = [{**INIT, "notes": None}, round_of(1, notes={"other": 1, "mixing": None})]
    run = finished("mine", events=events, result={"method": "fedavg"})
    with pytest.raises(ConfigError, match=f"^mine: picture '{name}' needs a run of {methods}"):
        catalogue.draw(name, run)
    catalogue.draw(name, finished())  # has all of them


# --- seconds and parameters -----------------------------------------------------------------------


def several(name, readings):
    """One picture of several runs, and its words; a ConfigError where there is none."""
    words = catalogue.COMPARED[name].words
    return catalogue.draw_compared(name, readings), words(readings)


def clocked(name, seed=0, times=((1.0, 2.0), (3.0, 2.0)), due=(True, True), scores=(0.5, 0.6)):
    """A run with a clock, of which layers may rest in some rounds; 4 s before the first round."""
    events = [INIT] + [
        round_of(
            n + 1,
            clock={"computation": c, "communication": s, "waiting": 0.0, "total": 0.0},
            received={"accuracy": scores[n]},
            notes={"layers": {"all_due": due[n]}},
        )
        for n, (c, s) in enumerate(times)
    ]
    config = {"method": {"name": name}, "run": {"seed": seed, "rounds": 2}}
    result = {"judged_by": "accuracy", "received": {"accuracy": scores[-1]}}
    return finished(name, events=events, config=config, result=result)


def test_seconds_are_of_the_whole_run_by_what_they_went_into():
    runs = [clocked("a"), clocked("b", times=((1.0, 0.0), (0.0, 0.0)))]
    figure, words = several("compare-seconds", runs)
    # With the 4 s of computation before the first round; nobody waited.
    bars = {t.name: t for t in figure.data if t.type == "bar"}
    assert {k: list(t.x) for k, t in bars.items()} == {
        "computation": [8, 5],
        "communication": [4, 0],
    }
    assert {k: list(t.customdata) for k, t in bars.items()} == {
        "computation": [2, 0.5],  # of a round
        "communication": [2, 0],
    }
    assert list(figure.layout.yaxis.ticktext) == ["a", "b"]
    assert figure.layout.xaxis2.title.text == "seconds in total"
    (dots,) = [t for t in figure.data if t.name == "score at the end"]
    assert (list(dots.x), list(dots.y)) == ([0.6, 0.6], [0, 1])
    assert words == (
        "By the simulated clock, the fastest first: b 60.0 %, 5.0 s in total (5.0 s computation; "
        "0.5 s a round); a 60.0 %, 12.0 s in total (8.0 s computation, 4.0 s communication; "
        "4.0 s a round)."
    )


def test_where_layers_rest_the_last_full_round_is_named_beside():
    runs = [clocked("rests", due=(True, False), scores=(0.5, 0.8)), clocked("never")]
    figure, words = several("compare-seconds", runs)
    (full,) = [t for t in figure.data if t.name == "last round with all layers"]
    assert (list(full.x), list(full.y)) == ([0.5], [0.25])
    assert "rests 80.0 %, 50.0 % with all layers" in words
    assert "never 60.0 %, 12.0 s" in words
    assert words.endswith("clients use their own; at the end this scores higher with rests.")


def test_what_resting_layers_do_to_the_score_is_said_from_the_numbers():
    up, down, same = (
        clocked(name, due=(True, False), scores=(0.5, end))
        for name, end in (("up", 0.8), ("down", 0.4), ("same", 0.5))
    )
    words = several("compare-seconds", [up, down, same])[1]
    assert words.endswith("this scores higher with up, lower with down.")
    assert "with skipped layers" not in several("compare-seconds", [same, clocked("never")])[1]


def test_lines_join_full_rounds_and_the_others_are_open_circles():
    times = ((1.0, 1.0),) * 3
    rests = clocked("rests", due=(True, False, False), times=times, scores=(0.5, 0.9, 0.8))
    never = clocked("never", due=(True,) * 3, times=times, scores=(0.1, 0.2, 0.3))
    figure, _ = several("compare-accuracy", [rests, never])
    lines = {t.name: (list(t.x), list(t.y)) for t in figure.data}
    assert lines["rests"] == ([1], [0.5])
    assert lines["layers at rest"] == ([2, 3], [0.9, 0.8])
    assert lines["never"] == ([1, 2, 3], [0.1, 0.2, 0.3])
    said = "clients were scored with their own; in the last round with all layers: rests 50.0 %."
    for name in ("compare-accuracy", "compare-bytes", "compare-cost"):
        assert several(name, [rests, never])[1].endswith(said)
    assert "layers" not in several("compare-accuracy", [never, clocked("a")])[1]
    alone = {t.name: list(t.x) for t in catalogue.draw("accuracy", rests).data}
    assert alone["layers at rest"] == [2, 3]
    assert "scored with their own; with all layers they had 50.0 % in round 1." in (
        catalogue.PICTURES["accuracy"].words(rests)
    )
    assert "layers" not in catalogue.PICTURES["accuracy"].words(never)
    assert "layers at rest" not in [t.name for t in catalogue.draw("accuracy", never).data]


def test_over_seeds_a_round_is_full_if_no_layer_rested_in_any_of_them():
    due, times = (True, False, True), ((1.0, 1.0),) * 3
    runs = [
        clocked("a", seed=0, due=due, times=times, scores=(0.5, 0.9, 0.6)),
        clocked("a", seed=1, due=(True, True, True), times=times, scores=(0.7, 0.5, 0.8)),
        clocked("b"),
    ]
    figure, _ = several("compare-accuracy", runs)
    lines = {t.name: (list(t.x), list(t.y)) for t in figure.data if t.mode != "lines"}
    assert lines["a, mean of 2"] == ([1, 3], [0.6, 0.7])
    assert lines["layers at rest"] == ([2], [0.7])


def test_runs_that_were_scored_only_while_layers_rested_keep_their_line():
    unscored = clocked("a", due=(True, False))
    del unscored.events[1]["received"]
    figure, words = several("compare-accuracy", [unscored, clocked("b")])
    lines = {t.name: list(t.x) for t in figure.data}
    assert lines == {"a": [2], "b": [1, 2]}
    assert "all layers" not in words


def test_ticks_of_scores_that_are_close_are_told_apart():
    figure, _ = several("compare-seconds", [clocked("a"), clocked("b", scores=(0.5, 0.605))])
    # d3's format: up to two decimals, without zeros at the end.
    assert figure.layout.xaxis.tickformat == ".2~%"


def test_seeds_are_one_row_with_their_range():
    runs = [clocked("a", seed=0), clocked("a", seed=1, scores=(0.5, 0.8)), clocked("b")]
    figure, _ = several("compare-seconds", runs)
    (dots,) = [t for t in figure.data if t.name == "score at the end"]
    assert list(dots.x) == pytest.approx([0.7, 0.6])
    assert list(dots.error_x.array) == pytest.approx([0.1, 0])
    assert list(dots.error_x.arrayminus) == pytest.approx([0.1, 0])


def test_without_a_clock_for_all_seconds_are_real():
    events = [{k: v for k, v in e.items() if k != "clock"} for e in clocked("b").events]
    figure, words = several("compare-seconds", [clocked("a"), replace(clocked("b"), events=events)])
    assert {t.name: list(t.x) for t in figure.data if t.type == "bar"} == {
        "train": [4, 4],
        "score": [1, 1],
    }
    assert words.startswith(
        "In seconds of this machine, the fastest first: a 60.0 %, 5.0 s in total"
    )


def with_value(value, seed=0, score=0.5, groups="xxyy", method="fedclust", key="threshold", **run):
    table = {"name": method} | ({} if value is None else {key: value})
    config = {"method": table, "run": {"seed": seed, "rounds": 2, **run}}
    result = {"judged_by": "accuracy", "received": {"accuracy": score}}
    events = [round_of(1, groups=list(groups))]
    return finished(f"{value}/{seed}", events=events, config=config, result=result)


def test_score_and_groups_over_a_parameter_with_means_over_seeds():
    runs = [
        with_value(4.0, score=0.3, groups="xxxx"),
        with_value(2, score=0.5),
        with_value(2, seed=1, score=0.7, groups="xyzz"),
        with_value(None, score=0.9, groups="xyzz"),  # the default: "auto"
    ]
    figure, words = several("compare-parameter", runs)
    (mean,) = [t for t in figure.data if t.name == "score at the end" and not t.fill]
    (count,) = [t for t in figure.data if t.name == "groups" and not t.fill]
    assert list(zip(mean.x, mean.y, strict=True)) == [(2, 0.6), (4, 0.3)]
    assert list(zip(count.x, count.y, strict=True)) == [(2, 2.5), (4, 1)]
    shade = next(t for t in figure.data if t.fill)
    assert list(zip(shade.x, shade.y, strict=True)) == [(2, 0.5), (4, 0.3), (4, 0.3), (2, 0.7)]
    auto = [list(t.y) for t in figure.data if t.name == "threshold = auto"]
    assert auto == [[0.9, 0.9], [3, 3]]
    assert "2: 60.0 %, 2.5 groups; 4: 30.0 %, 1 group; auto: 90.0 %, 3 groups." in words
    assert "score is highest at auto" in words
    assert figure.layout.xaxis2.title.text == "threshold of fedclust"


def test_a_name_that_is_no_picture_of_several_runs_is_a_sentence():
    with pytest.raises(ConfigError, match="did you mean 'compare-seconds'"):
        catalogue.draw_compared("compare-second", [clocked("a"), clocked("b")])


def test_results_directories_and_readings_are_drawn_together(tmp_path):
    people = [(torch.randn(20, 3), torch.randint(0, 2, (20,))) for _ in range(3)]
    kept, result = (
        coterie.simulate(people, method=m, rounds=2, seed=0, directory=place)
        for m, place in (("fedavg", tmp_path / "kept"), ("local", None))
    )
    given = [result, tmp_path / "kept", replace(finished("third"), path=None)]
    figure = catalogue.draw_compared("compare-accuracy", given)
    assert {t.name for t in figure.data} == {"kept", "local (alone)", "third"}
    _, last = points(figure, "kept")[-1]
    assert last == pytest.approx(kept.accuracy, abs=1e-3)


@pytest.mark.parametrize("given", [[7], [clocked("a"), None], [{"method": "fedavg"}]])
def test_what_is_no_run_is_refused_with_a_sentence(given):
    with pytest.raises(ConfigError, match="is not a run: pass run directories"):
        catalogue.draw_compared("compare-cost", given)


def test_values_far_apart_are_on_a_logarithmic_axis():
    for most, kind in ((10, None), (500, "log")):
        figure, _ = several("compare-parameter", [with_value(v) for v in (1, most)])
        assert figure.layout.xaxis2.type == kind


@pytest.mark.parametrize(
    ("runs", "why"),
    [
        ([with_value(1), with_value(2, batch=3)], "differ in method.threshold, run.batch"),
        ([with_value(1), with_value(1, seed=1)], "differ in nothing"),
        ([with_value(1), with_value(1, batch=3)], "differ in run.batch"),
        ([with_value(1), with_value(1, method="pacfl")], "differ in method.name"),
        ([with_value(1), with_value("auto")], "two or more numbers for method.threshold.*is one"),
        ([with_value(1), finished("x", config={})], "whose configuration says what was run"),
    ],
)
def test_runs_that_differ_otherwise_are_not_drawn_over_a_parameter(runs, why):
    with pytest.raises(ConfigError, match=why):
        several("compare-parameter", runs)
    assert "compare-parameter" not in {d.name for d in catalogue.compared(runs)}
