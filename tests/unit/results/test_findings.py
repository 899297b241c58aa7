"""What a run says about its groups, from events written by hand."""

import json
from dataclasses import replace

import pytest

import coterie
from coterie.errors import ConfigError
from coterie.experiment.experiment import execute
from coterie.report.card import card
from coterie.report.catalogue import pictures
from coterie.report.figures.verdict import verdict
from coterie.report.page import run_blocks
from coterie.report.reading import Reading, read_run
from coterie.report.words import outcome
from coterie.results.findings import (
    deciding,
    grouping_lines,
    grouping_of,
    news_of,
    probing_cost,
    round_samples,
    warnings_of,
)
from runs_by_hand import EVIDENCE, VERDICT, evidenced, finished, old, round_of
from support import experiment, stop_after

ONE = {
    **EVIDENCE,
    "groups": 1,
    "explained": 0.0,
    "certainty": [1.0] * 4,
    "why": "no grouping predicts the clients' other halves better than one mean",
}
REJECTED = {
    **VERDICT,
    "chosen": 1,
    "why": "no grouping is better than one model on validation data (loss 2.000)",
}
NOBODY = {
    "why": "no client has validation data, so nothing can tell whether training in groups helps"
}


def at(number, **notes):
    """An event with these notes; 0 is before the first round."""
    return {"round": number, **({} if number else {"event": "init"}), "notes": notes}


def sentence(groups, *events, over=True):
    return grouping_of(list(events), groups, over)["sentence"]


# --- the table of result.json ---------------------------------------------------------------------


def test_the_table_by_hand():
    events = [at(0, evidence=EVIDENCE), at(1), at(2, verdict=VERDICT)]
    assert grouping_of(events, 2, round_samples=40.0) == {
        "evidence": {
            "groups": 2,
            "kappa": 0.8,
            "explained": 0.4,
            "decisive": False,
            "plausible": [2, 3],  # 0.6 ≤ 0.58 + 0.05
            "by": "final-layer",
            "steps": 50,
            "samples": 120.0,
            "why": EVIDENCE["why"],
            "between": [2],
            "round": 0,
        },
        "probes": {"asked": 1, "samples": 120.0, "rounds": 3.0},
        "verdict": {"chosen": 2, "why": VERDICT["why"], "round": 2},
        "sentence": "2 groups, by the trial in round 2: they have a validation loss of 1.500, one "
        "model has 2.000.",
    }


def test_clients_between_are_named_by_id_and_not_by_place():
    evidence = {**EVIDENCE, "clients": [3, 5, 8, 9], "certainty": [-0.1, 0.5, 0.0, -0.01]}
    found = grouping_of([at(0, evidence=evidence)], 2)
    assert found["evidence"]["between"] == [3, 9]


def test_all_probes_are_counted():
    events = [at(0, evidence=ONE), at(6, evidence={**ONE, "samples": 80.0})]
    assert grouping_of(events, 1, round_samples=100.0)["probes"] == {
        "asked": 2,
        "samples": 200.0,
        "rounds": 2.0,
    }
    assert "rounds" not in grouping_of(events, 1)["probes"]


def test_a_run_that_notes_nothing_of_groups_has_no_table():
    assert grouping_of([at(0), at(1, loss=1.0)], 1) == {}
    assert old().grouping == {}


def test_a_given_threshold_is_said_to_be_given():
    assert sentence(3, at(0, why="the threshold was given")) == "3 groups: the threshold was given."


def test_what_decided_is_the_last_for_several_groups_if_there_are_several():
    events = [at(2, evidence=EVIDENCE), at(5, evidence=ONE)]
    assert deciding(events, "evidence", 2)[0] == 2
    assert deciding(events, "evidence", 1)[0] == 5
    tried = [at(3, verdict=VERDICT), at(6, verdict=REJECTED)]
    assert deciding(tried, "verdict", 2)[0] == 3
    assert deciding(tried, "verdict", 1)[0] == 6
    assert deciding([at(1)], "verdict", 1) is None
    # A part of the groups was probed again, and its trial came to nothing.
    again = [at(2, evidence=EVIDENCE, verdict=VERDICT), at(6, evidence=EVIDENCE, verdict=REJECTED)]
    assert deciding(again, "evidence", 2)[0] == deciding(again, "verdict", 2)[0] == 2
    # Without a trial, every evidence for groups makes groups.
    assert deciding([at(2, evidence=EVIDENCE), at(4, evidence=EVIDENCE)], "evidence", 3)[0] == 4


# --- the sentence ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "events", "said"),
    [
        (1, [at(0, evidence=ONE)], f"One group: {ONE['why']}."),
        (
            1,
            [at(0, evidence={**ONE, "enough": False, "why": "too little training to tell: a. B"})],
            "One group: too little training to tell: a. B.",
        ),
        (
            1,
            [at(0, evidence=EVIDENCE), at(3, verdict=REJECTED)],
            f"One group: {REJECTED['why']}, although the evidence finds 2 groups.",
        ),
        (1, [at(0, evidence=ONE), at(3, verdict=REJECTED)], f"One group: {REJECTED['why']}."),
        (1, [at(0, evidence=EVIDENCE), at(3, verdict=NOBODY)], f"One group: {NOBODY['why']}."),
        (
            1,
            [at(0, evidence=EVIDENCE)],
            "One group: the evidence finds 2 groups, but no trial has confirmed them.",
        ),
        # A later probe that finds nothing says more than the trial before it.
        (
            1,
            [at(0, evidence=EVIDENCE), at(3, verdict=REJECTED), at(6, evidence=ONE)],
            f"One group: {ONE['why']}.",
        ),
        (
            2,
            [at(0, evidence=EVIDENCE)],
            "2 groups, by the evidence before the first round: they predict the clients' other "
            "halves with 60% of one mean's error.",
        ),
        (
            2,
            [at(4, evidence=EVIDENCE, verdict=NOBODY)],
            "2 groups, by the evidence in round 4: they predict the clients' other halves with 60% "
            f"of one mean's error. No trial: {NOBODY['why']}.",
        ),
        (
            3,
            [at(0, evidence=EVIDENCE), at(2, verdict=VERDICT)],
            f"3 groups; the last split came from the trial in round 2: {VERDICT['why']}.",
        ),
        # Weights that are not by groups, as with user-centric's own model for everybody.
        (
            4,
            [at(0, evidence=ONE)],
            f"4 groups; the evidence before the first round says: {ONE['why']}.",
        ),
    ],
)
def test_the_sentence_says_how_the_run_ended_with_its_groups(groups, events, said):
    assert sentence(groups, *events) == said


def test_while_a_run_goes_on_a_trial_is_still_to_come():
    assert sentence(1, at(0, evidence=EVIDENCE), over=False) == (
        "One group so far: the evidence finds 2 groups; a trial will tell if they pay."
    )


def test_the_lines_under_a_run():
    found = grouping_of([at(0, evidence=EVIDENCE), at(2, verdict=VERDICT)], 2, round_samples=240)
    assert grouping_lines(found)[1:] == [
        "Evidence for 2 groups: reproducibility κ 0.80, 40 % of one mean's error explained; 3 "
        "groups predict about as well.",
        "Client 2 sits between two groups.",
        "The probe took as much local training as 0.5 rounds of all clients.",
    ]
    certain = {**EVIDENCE, "certainty": [0.1] * 4, "decisive": True}
    sure = grouping_lines(grouping_of([at(0, evidence=certain)], 2))
    assert sure[1].endswith("explained; fewer groups and more both predict clearly worse.")
    alone = {**certain, "decisive": False, "errors": {"1": 1.0, "2": 0.4}}  # there are no more
    alone["deviations"] = {"1": 0.1, "2": 0.0}
    text = grouping_lines(grouping_of([at(0, evidence=alone)], 2))[1]
    assert text.endswith("explained; fewer groups predict clearly worse.")
    assert sure[2] == "No client sits between two groups."
    assert sure[3] == "The probe processed 120 samples on the clients."
    # Of one group there is nothing to be sure of.
    assert len(grouping_lines(grouping_of([at(0, evidence=ONE)], 1))) == 2


def test_the_weight_of_ones_own_group_is_said_where_there_are_several():
    events = [at(0, evidence=EVIDENCE, own_group=1.0), at(2, verdict=VERDICT, own_group=0.914)]
    line = "On average 91 % of a client's model comes from its own group."
    assert line in grouping_lines(grouping_of(events, 2))
    assert "own_group" not in grouping_of(events, 1)
    assert "own_group" not in grouping_of([at(0, evidence=EVIDENCE)], 2)


def test_samples_of_a_round_by_hand():
    assert round_samples([10, 30], {"epochs": 3}) == 120
    assert round_samples([10, 30], {"epochs": 1, "steps": 4, "batch_size": 20}) == 4 * (10 + 20)
    assert round_samples([10, 30], {"epochs": 0, "steps": 4}) == 0


# --- while it runs --------------------------------------------------------------------------------


def test_news_of_evidence_and_of_a_trial():
    assert news_of(at(0, evidence=EVIDENCE)) == [
        f"evidence: {EVIDENCE['why']}; client 2 sits between two groups"
    ]
    assert news_of(at(0, evidence=ONE)) == [f"evidence: {ONE['why']}"]
    assert news_of(at(2, verdict=VERDICT)) == [f"trial: {VERDICT['why']}"]
    assert news_of(at(2, loss=1.0)) == news_of(at(2)) == news_of({"round": 2}) == []


# --- warnings -------------------------------------------------------------------------------------


def test_each_parameter_warns_once_with_what_came_first():
    events = [
        at(1, warning={"threshold": "first"}),
        at(6, warning={"threshold": "again", "p": "other"}),
    ]
    assert warnings_of(events) == ["first", "other"]


def test_a_warning_for_the_end_is_the_last_one_and_can_be_taken_back():
    events = [at(1, warning_at_end={"eps1": "0.9"}), at(2, warning_at_end={"eps1": "0.5"})]
    assert warnings_of(events) == ["0.5"]
    assert warnings_of(events, over=False) == []
    assert warnings_of([*events, at(3, warning_at_end={"eps1": ""})]) == []
    both = [at(1, warning={"eps1": "now"}), *events]
    assert warnings_of(both) == ["now"]


@pytest.mark.parametrize("junk", ["oops", 3, [1], None, {"a": [1]}])
def test_damaged_notes_are_no_news(junk):
    event = {"round": 1, "notes": junk}
    assert news_of(event) == []
    assert grouping_of([event], 1) == {}
    assert warnings_of([event]) == []


# --- pages ----------------------------------------------------------------------------------------


def html(reading):
    return {block.id: str(block.html) for block in run_blocks(reading)}


def test_the_report_says_it_in_words_and_tables():
    page = html(evidenced())
    top = page["headline"]
    assert "2 groups, by the trial in round 2: they have a validation loss of 1.500" in top
    assert "reproducibility κ 0.80" in top
    assert "cy &amp; co sits between two groups." in top.replace("<bdi>", "").replace("</bdi>", "")
    # 4 clients of 10 samples, one epoch: 120 samples are three rounds.
    assert "The probe took as much local training as 3 rounds of all clients." in top
    assert "The probe took as much local training as 3 rounds" in page["table-bytes"]
    between = page["table-between"]
    assert "cy &amp; co" in between
    assert "-0.25" in between
    assert "ann" not in between
    trial = page["table-trials"]
    assert "Trial in round 2" in trial
    assert trial.count("<tr>") == 1 + 4
    row = trial.split("1.5000")[1].split("</tr>")[0]
    assert "0.1500" in row
    assert "chosen" in row
    assert "chosen" not in trial.split("1.4500")[1]
    assert "fig-verdict" in page


def test_one_group_is_said_once_with_its_reason():
    run = evidenced(groups=("x",) * 4, init=ONE, verdict=None)
    page = html(run)
    assert page["headline"].count("ne group") == 1
    assert "One group: no grouping predicts the clients&#39; other halves" in page["headline"]
    assert not {"table-between", "table-trials", "fig-verdict", "fig-silhouette"} & set(page)


def test_a_tree_that_was_not_cut_says_nothing_of_a_cut():
    (tree,) = [d for d in pictures(evidenced()) if d.name == "dendrogram"]
    assert tree.words == (
        "The tree of 4 clients, built before round 1, has height 6. Colours show the clients' "
        f"present groups. The evidence: {EVIDENCE['why']}."
    )
    assert not [t for t in tree.sketch.data if "cut" in str(t.get("name"))]
    colours = {t["line"]["color"] for t in tree.sketch.data if t["mode"] == "lines"}
    assert len(colours) == 3  # two groups, and what is above them
    given = evidenced()
    notes = {**given.events[0]["notes"], "why": "the number of groups was given"}
    notes.pop("evidence")
    counted = replace(given, events=[{**given.events[0], "notes": notes}, *given.events[1:]])
    (tree,) = [d for d in pictures(counted) if d.name == "dendrogram"]
    assert tree.words.endswith(
        "has height 6. Reason for these groups: the number of groups was given."
    )


def test_the_picture_of_a_trial_has_its_losses_errors_and_choice():
    (drawn,) = [d for d in pictures(evidenced()) if d.name == "verdict"]
    losses, lowest, chosen = drawn.sketch.data
    assert list(zip(losses["x"], losses["y"], losses["error_y"]["array"], strict=True)) == [
        (1, 2, 0.2),
        (2, 1.5, 0.15),
        (3, 1.4, 0),
        (4, 1.45, 0.1),
    ]
    assert lowest["y"] == [1.4, 1.4]
    assert (chosen["x"], chosen["y"], chosen["name"]) == ([2], [1.5], "chosen: 2 groups")
    one = verdict({**VERDICT, "chosen": 1}).data[-1]
    assert (one["x"], one["y"], one["name"]) == ([1], [2], "chosen: one model")
    finest = verdict({**VERDICT, "chosen": 4}).data[-1]
    assert (finest["x"], finest["y"], finest["name"]) == ([4], [1.45], "chosen: 4 groups")
    with pytest.raises(ConfigError, match="no losses"):
        verdict(NOBODY)
    others = verdict({**VERDICT, "others": [2.1, 1.6, 1.6, 1.7]}).data[2]
    assert (others["x"], others["y"]) == ([1, 2, 3, 4], [2.1, 1.6, 1.6, 1.7])
    assert len(verdict({**VERDICT, "others": VERDICT["losses"]}).data) == 3  # they say no more
    assert len(verdict({**VERDICT, "others": [2.1]}).data) == 3
    assert drawn.words == (
        "In round 2, 4 clients scored 4 numbers of groups on their validation data; 3 groups had "
        "the lowest mean loss, 1.400. Bars are standard errors of the difference from it. The "
        f"verdict: {VERDICT['why']}."
    )


def test_several_trials_are_folded_and_the_one_that_decided_is_open():
    run = evidenced()
    events = [*run.events[:2], round_of(1, notes={"verdict": REJECTED}), *run.events[2:]]
    events[2] = {**events[2], "round": 1}
    page = html(replace(run, events=events))["table-trials"]
    assert "2 trials" in page
    first, second = page.split("<details")[1:]
    assert "Trial in round 1" in first
    assert " open" not in first.split(">")[0]
    assert "Trial in round 2" in second
    assert " open" in second.split(">")[0]


def test_the_card_has_the_sentence_once():
    shown = card(evidenced())
    assert shown.count("2 groups, by the trial in round 2") == 1
    assert "One group: " in card(evidenced(groups=("x",) * 4, init=ONE, verdict=None))


def test_warnings_stand_at_the_top():
    told = {
        **finished().events[0]["notes"],
        "warning": {"threshold": "threshold = 9 has no effect"},
    }
    run = finished()
    run = replace(run, events=[{**run.events[0], "notes": told}, *run.events[1:]])
    assert outcome(run)[1] == "Warning: threshold = 9 has no effect."
    assert "Warning: threshold = 9" in html(run)["headline"]


def test_a_run_that_goes_on_says_so_far_and_warns_of_no_end():
    run = evidenced(verdict=None, groups=("x",) * 4, status="running", result={})
    events = [
        {**e, "notes": {**e.get("notes", {}), "warning_at_end": {"a": "b"}}} for e in run.events
    ]
    run = replace(run, events=events)
    text = " ".join(outcome(run))
    assert "One group so far: the evidence finds 2 groups" in text
    assert "Warning" not in text
    assert json.dumps(run.grouping)


def test_an_empty_run_says_nothing():
    assert Reading("new", "running").grouping == {}
    assert Reading("new", "running").warnings == []


# --- a real run -----------------------------------------------------------------------------------


def test_what_a_trial_takes_is_said_beside_what_the_probe_took():
    tried = at(2, verdict={**VERDICT, "steps": 50})
    grouping = grouping_of([at(0, evidence=EVIDENCE), tried], 2, round_samples=240)
    assert grouping["verdict"]["steps"] == 50
    assert "every client trained a copy for at least 50 steps" in probing_cost(grouping)


def test_a_real_run_says_the_same_everywhere_and_after_it_was_stopped(tmp_path):
    made = experiment(coterie.methods.fedclust(trial="always"), settings={"rounds": 7})
    said, again = [], []
    result = execute(made, tmp_path / "whole", say=said.append)
    found = result.summary["grouping"]
    evidence = result.begun["notes"]["evidence"]
    assert found["evidence"]["why"] == evidence["why"]
    assert found["evidence"]["groups"] == evidence["groups"]
    tried = [e for e in result.history if "verdict" in e.get("notes", {})]
    assert found["verdict"]["round"] == tried[-1]["round"]
    people = result.plan.population.clients
    rounds = evidence["samples"] / sum(len(c.train) for c in people)  # of one epoch
    assert found["probes"]["rounds"] == pytest.approx(rounds, abs=0.01)
    assert [text.partition(":")[0] for text in said] == ["evidence"] + ["trial"] * len(tried)
    assert Reading.of(result).grouping == found
    assert read_run(tmp_path / "whole").grouping == found
    assert json.loads((tmp_path / "whole" / "result.json").read_text())["grouping"] == found
    with pytest.raises(BaseException):  # noqa: B017 - whatever the watcher raises
        execute(made, tmp_path / "parts", watch=stop_after(1), say=again.append)
    resumed = execute(made, tmp_path / "parts", resume=True, say=again.append)
    assert resumed.summary["grouping"] == found
    assert again == said


def test_a_group_that_was_never_summed_is_a_warning():
    why = "slot 'a' has 1 of the 3 clients that a sum needs"
    rounds = [
        {"round": n, "withheld": {"a": why, **({"b": why} if n == 1 else {})}} for n in (1, 2)
    ]
    (told,) = warnings_of(rounds)
    assert told.startswith("group a had no sum in any round")
    assert why in told
    assert not warnings_of(rounds, over=False)
    assert not warnings_of([*rounds, {"round": 3}])
