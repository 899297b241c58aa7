"""Thresholds without an effect: each warns once, with the value that it would have had to meet."""

import io
import json
import math

import numpy as np
import pytest
from rich.console import Console

import coterie
from coterie.clustering import Dendrogram
from coterie.compose.layerwise import AT_REST, never_quiet
from coterie.experiment.experiment import execute
from coterie.methods.fedtsdp import ClusteringStages, Halves
from coterie.methods.tree_cuts import cut_tree, without_effect
from coterie.report.progress import progress, saying
from coterie.report.reading import read_run
from coterie.report.tables import print_summary
from coterie.results.findings import warnings_of
from runs_by_hand import EVENT
from support import experiment, on_quadratics, quadratics, stop_after

THREE = Dendrogram(3, np.array([[0, 1, 0.25, 2], [2, 3, 0.5, 3]]))
DISTANCES = np.array([[0.0, 1.0, 4.0], [1.0, 0.0, 4.0], [4.0, 4.0, 0.0]])


def warns(threshold, **options):
    return without_effect(THREE, threshold, **options)


# --- trees ----------------------------------------------------------------------------------------


def test_a_height_above_the_last_merge_or_below_the_first():
    assert "the last groups merge at 0.5" in warns(0.5)  # at the height itself they merge
    assert "the first clients merge at 0.25" in warns(0.2)
    assert "so every client is alone in its group; raise it" in warns(0.2)
    assert "so all clients are in one group; lower it" in warns(9.0)
    assert warns(0.25) == warns(0.4) == ""


def test_the_ends_of_the_scale_are_meant():
    assert warns(math.inf) == warns(0.0) == ""
    assert warns(0.0, least_similarity=0.0) == warns(1.0, least_similarity=0.0) == ""
    assert warns(-1.0, least_similarity=-1.0) == ""
    assert warns(0.0, least_similarity=-1.0) != ""


def test_similarities_are_said_as_similarities():
    assert "the last groups merge at 0.5" in warns(0.3, least_similarity=0.0)
    assert "so all clients are in one group; raise it" in warns(0.3, least_similarity=0.0)
    assert "the first clients merge at 0.75" in warns(0.9, least_similarity=0.0)
    assert "so every client is alone in its group; lower it" in warns(0.9, least_similarity=0.0)
    assert warns(0.6, least_similarity=0.0) == ""


def test_two_clients_are_together_or_apart_and_both_is_an_answer():
    two = Dendrogram(2, np.array([[0, 1, 0.5, 2]]))
    assert without_effect(two, 9.0) == without_effect(two, 0.1) == ""


def test_only_a_given_threshold_warns():
    assert "warning" in cut_tree([0, 1, 2], DISTANCES, "average", 9.0)[1]
    assert "warning" not in cut_tree([0, 1, 2], DISTANCES, "average", 2.0)[1]
    assert "warning" not in cut_tree([0, 1, 2], DISTANCES, "average", "auto")[1]
    assert "warning" not in cut_tree([0, 1, 2], DISTANCES, "average", "auto", clusters=1)[1]


def test_a_similarity_cuts_where_one_minus_it_is():
    near = DISTANCES / 10
    for similarity in (0.95, 0.75, 0.5):
        labels, notes = cut_tree([0, 1, 2], near, "average", similarity, least_similarity=-1)
        other, _ = cut_tree([0, 1, 2], near, "average", 1 - similarity)
        assert labels.tolist() == other.tolist()
        assert notes["threshold"] == 1 - similarity


# --- limits that are held against something in every round ----------------------------------------


def test_cfl_says_at_the_end_how_small_the_mean_update_was():
    # Two clients with optima 1 and 3 and one model: the mean update is 0.2(2 − θ), and θ comes
    # nearer to 2 by a fifth each round. So it is 0.8 of the largest after two rounds.
    made = on_quadratics(coterie.methods.cfl(eps1=0.1), [[1.0], [3.0]], settings={"rounds": 2})
    (told,) = execute(made).summary["warnings"]
    assert told == (
        "eps1 = 0.1 had no effect: the smallest mean update was 0.8 of the largest, so no group "
        "split"
    )
    absolute = coterie.methods.cfl(eps1=0.1, relative=False)
    made = on_quadratics(absolute, [[1.0], [3.0]], settings={"rounds": 2})
    (told,) = execute(made).summary["warnings"]
    assert "the smallest mean update was 0.32," in told


def test_cfl_remembers_the_smallest_of_all_rounds():
    # Two of four clients take part, so that the mean update goes up and down.
    settings = {"rounds": 6, "cohort": 2}
    targets = [[1.0], [-1.0], [4.0], [9.0]]
    made = on_quadratics(coterie.methods.cfl(eps1=0.001), targets, settings=settings)
    result = execute(made)
    means = [e["notes"]["norms"]["0"][0] for e in result.history]
    shares = [mean / max(means[: i + 1]) for i, mean in enumerate(means)]
    assert min(shares) < shares[-1]
    (told,) = result.summary["warnings"]
    assert f"the smallest mean update was {min(shares):.3g} of the largest" in told


def test_cfl_says_nothing_once_the_limit_was_met_or_was_meant_not_to_be():
    # θ: 0.8³ = 0.512 of the largest in the fourth round, below 0.6; 0.64 in the third.
    for rounds, warned in ((3, 1), (4, 0)):
        made = on_quadratics(
            coterie.methods.cfl(eps1=0.6, eps2=1.0), [[1.0], [3.0]], settings={"rounds": rounds}
        )
        assert len(execute(made).summary["warnings"]) == warned
    made = on_quadratics(coterie.methods.cfl(eps1=0), [[1.0], [3.0]], settings={"rounds": 2})
    assert execute(made).summary["warnings"] == []


def test_a_radius_that_all_distances_are_within_or_beyond():
    def told(outputs, weights, **memory):
        stages = ClusteringStages({"eps_outputs": outputs, "eps_weights": weights}, 2)
        gaps = {"eps_outputs": DISTANCES, "eps_weights": 10 * DISTANCES}
        return stages.clustered(gaps, Halves(), memory)

    labels, known, notes = told(2.0, 3.5)
    assert known["spans"] == {
        "eps_outputs": (1.0, 4.0),
        "eps_weights": (10.0, 10.0),
    }  # inside a cluster only
    assert labels.tolist() == [0, 1, 2]
    assert notes["stages"] == {"eps_outputs": 2, "eps_weights": 3}
    assert notes["warning_at_end"]["eps_outputs"] == ""
    said = notes["warning_at_end"]["eps_weights"]
    assert "the smallest distance was 10, so every client was alone in its cluster" in said
    said = told(4.0, 10.0)[2]["warning_at_end"]["eps_outputs"]
    assert "eps_outputs = 4 had no effect: the largest distance was 4" in said
    # What an earlier clustering saw stays.
    later = told(2.0, 3.5, spans={"eps_outputs": (0.5, 3.0)})[1]["spans"]
    assert later["eps_outputs"] == (0.5, 4.0)


def test_a_stage_that_told_nobody_apart_says_so():
    stages = ClusteringStages({"eps_outputs": "auto", "eps_weights": "auto"}, 2)
    apart = np.array([[0.0, 0.0]] * 4 + [[1.0, 1.0]] * 4)
    noise = 0.01 * np.random.default_rng(0).normal(size=(4, 8, 2))
    sides = {
        "eps_outputs": (apart + noise[0], apart + noise[1]),
        "eps_weights": (1.0 + noise[2], 1.0 + noise[3]),  # all alike
    }
    gaps = dict.fromkeys(sides, np.zeros((8, 8)))
    labels, known, notes = stages.clustered(gaps, Halves([5] * 8, sides), {})
    assert labels.tolist() == [0] * 4 + [1] * 4
    assert notes["stages"] == {"eps_outputs": 2, "eps_weights": 2}
    assert notes["warning_at_end"]["eps_outputs"] == ""
    assert notes["warning_at_end"]["eps_weights"].startswith("the second stage changed nothing")
    # Once it has told clients apart, that is not taken back.
    _, later, _ = stages.clustered(
        gaps, Halves([5] * 8, dict.fromkeys(sides, sides["eps_outputs"])), {}
    )
    assert later["divided"] == known["divided"] == ["eps_outputs"]
    swapped = {"eps_outputs": sides["eps_weights"], "eps_weights": sides["eps_outputs"]}
    _, both, notes = stages.clustered(gaps, Halves([5] * 8, swapped), known)
    assert both["divided"] == ["eps_outputs", "eps_weights"]
    assert set(notes["warning_at_end"].values()) == {""}


def test_a_share_below_which_no_layer_ever_was():
    assert "share = 0.1 had no effect" in never_quiet("share", 0.1, 0.34)
    assert "had 0.34 of the mean discrepancy" in never_quiet("share", 0.1, 0.34)
    assert never_quiet("share", 0.1, 0.05) == never_quiet("share", 0.0, 0.3) == ""
    assert never_quiet("share", 0.1, math.inf) == ""  # nothing was measured


def test_dc_pfl_says_how_much_the_quietest_layer_differed(tmp_path):
    made = experiment(coterie.methods.dc_pfl(start=1, alpha=2, share=0.001), settings={"rounds": 4})
    result = execute(made, tmp_path / "r")
    (told,) = result.summary["warnings"]
    shares = []
    for event in result.history:
        for gaps in event["notes"]["layers"].get("discrepancy", {}).values():
            shares.append(min(gaps.values()) / (sum(gaps.values()) / len(gaps)))
    assert (
        "share = 0.001 had no effect: the layer in which clients differed least had "
        f"{min(shares):.3g} of the mean" in told
    )
    for rounds in (4, 5):
        method = coterie.methods.dc_pfl(start=1, alpha=2, share=1.0)
        result = execute(experiment(method, settings={"rounds": rounds}))
        told = [] if result.history[-1]["notes"]["layers"]["all_due"] else [AT_REST]
        assert result.summary["warnings"] == told == [AT_REST] * (rounds == 4)


# --- the run --------------------------------------------------------------------------------------


def far(rounds, **settings):
    """A run of a method that clusters in every round and is never reaches its threshold."""
    method = coterie.methods.adaptive(threshold=-0.5, every=1)
    people = quadratics([[1.0], [1.1], [1.3], [1.2]])
    return on_quadratics(method, [], population=people, settings={"rounds": rounds, **settings})


def test_a_run_says_a_warning_once_and_keeps_it(tmp_path):
    said = []
    result = execute(far(3), tmp_path / "r", say=said.append)
    assert [e["notes"]["warning"]["threshold"][:16] for e in result.history] == [
        "threshold = -0.5"
    ] * 3
    assert said == [f"warning: {result.summary['warnings'][0]}"]
    kept = json.loads((tmp_path / "r" / "result.json").read_text())
    assert kept["warnings"] == result.summary["warnings"] == read_run(tmp_path / "r").warnings


def test_a_warning_before_the_first_round_is_said_then():
    said = []
    made = on_quadratics(
        coterie.methods.fedclust(threshold=100.0), [[1.0], [2.0], [4.0]], settings={"rounds": 1}
    )
    result = execute(made, say=said.append)
    assert said == [f"warning: {text}" for text in result.summary["warnings"]]
    assert len(said) == 1


def test_a_resumed_run_does_not_say_it_again(tmp_path):
    said = []
    with pytest.raises(BaseException):  # noqa: B017 - whatever the watcher raises
        execute(far(3), tmp_path / "r", watch=stop_after(1), say=said.append)
    assert len(said) == 1
    result = execute(far(3), tmp_path / "r", resume=True, say=said.append)
    assert len(said) == 1
    assert result.summary["warnings"] == warnings_of(result.history)


def test_warnings_and_groups_at_the_end_of_a_run(tmp_path):
    out = Console(file=io.StringIO(), width=300)
    result = execute(far(2), tmp_path / "r")
    print_summary(out, result.summary, tmp_path / "r")
    lines = out.file.getvalue().splitlines()
    assert " grouping  One group: the threshold was given." in lines
    (line,) = [text for text in lines if text.startswith("  warning  ")]
    assert line.removeprefix("  warning  ") == result.summary["warnings"][0]


def test_what_is_said_while_it_runs_has_a_line_of_its_own():
    plain = Console(file=io.StringIO(), width=40)
    say = saying(plain, "fedclust")
    say("evidence: [b]2 groups[/b] predict the clients' other halves")
    assert plain.file.getvalue() == (
        "fedclust  evidence: [b]2 groups[/b] predict the clients' other halves\n"
    )
    rich = Console(file=io.StringIO(), force_terminal=True, width=200, no_color=True)
    with progress(rich, "fedclust", 10, "accuracy") as watch:
        saying(rich, "fedclust")("trial: [b]no[/b]")
        watch(EVENT)
    text = rich.file.getvalue()
    assert "trial:" in text
    assert " [b]no[/b]" in text
    assert "2/10" in text.split("[b]no[/b]")[1]  # the bar goes on below it


def test_quiet_runs_still_warn():
    plain = Console(file=io.StringIO(), width=40)
    say = saying(plain, "fedclust", quiet=True)
    say("evidence: a")
    say("warning: b")
    assert plain.file.getvalue() == "fedclust  warning: b\n"
