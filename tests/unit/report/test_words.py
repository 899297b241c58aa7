"""Headlines: what they say is true, and what is not known is not said."""

from dataclasses import replace

import pytest

from coterie.report.captions import compared as captions_compared
from coterie.report.captions import groups as captions_groups
from coterie.report.captions import runs as captions
from coterie.report.compared_runs import compared_runs
from coterie.report.figures.compared import kinds_of, ranked
from coterie.report.reading import Reading
from coterie.report.what_was_run import what_was_run
from coterie.report.words import outcome
from coterie.report.words_compared import headline_compared
from runs_by_hand import clients, finished, going, old, round_of


def test_the_headline_of_a_finished_run():
    assert outcome(finished())[:6] == [
        "fedclust with 4 clients reached accuracy 70.0 % received and 77.5 % adapted after 3 "
        "rounds on average over the clients' own test data.",
        "The lowest score is 50.0 %, of <b>bob</b>.",
        "Compared with training alone, clients gain +20.0 points on average: 2 of 4 are better "
        "off and 1 worse off.",
        "It found 3 groups (2 with only one client), the largest with 2 clients. Their "
        "agreement with the true groups is 0.57 (1 is perfect, 0 is chance).",
        "3 groups; the last split came from the trial in round 2: 2 groups have a validation loss "
        "of 1.500, one model has 2.000. Evidence for 2 groups: reproducibility κ 1.00, 75 % of one "
        "mean's error explained; fewer groups and more both predict clearly worse. dee sits "
        "between two groups.",
        "It cost 5.24 kB (downloads and uploads together) and 14.5 s of simulated time; another "
        "15 B were wasted. The probe took as much local training as 100 rounds of all clients.",
    ]
    assert outcome(finished())[-1] == "Privacy: ε = 4 at δ = 1e-05."
    assert "The server saw every client's 'final'" in outcome(finished())[-2]


def test_a_run_that_goes_on_or_broke_off_says_so_and_names_what_it_has():
    first, second, *rest = outcome(going())
    assert "reached accuracy 50.0 % received after 2 rounds" in first
    assert second == "It is running: 2 of 3 rounds are completed, so nothing here is final."
    assert rest[-1] == "Privacy so far: ε ≤ 3."
    assert "It did not finish" in outcome(going("stopped"))[1]
    early = replace(finished(), result={**finished().result, "stopped": "the target was reached"})
    assert outcome(early)[1] == "It ended early, after 3 rounds: the target was reached."


def test_little_is_said_of_a_run_that_has_little():
    assert outcome(Reading("x", "running"))[0] == (
        "unknown method: 0 rounds completed, none of them scored."
    )
    assert any("70.0 %" in text for text in outcome(old()))


@pytest.mark.parametrize("junk", ["a", 3, [1], {"b": "c"}])
@pytest.mark.parametrize("key", ["received", "groups", "total_bytes", "privacy", "client_scores"])
def test_damage_costs_sentences_and_nothing_else(junk, key):
    rounds = [round_of(1), {**round_of(2), key: junk}]
    run = Reading("x", "running", events=rounds, result={key: junk, "exposure": junk})
    assert isinstance(outcome(run), list)


def test_groups_that_are_the_true_ones_or_one_or_all_alone():
    def said(groups, true=(0, 0, 1, 1)):
        events = [round_of(1, groups=groups)]
        data = {**finished().data, "groups": list(true)}
        return " ".join(outcome(finished(events=events, data=data)))

    assert "They are exactly the true groups." in said([5, 5, 2, 2])
    assert "All clients ended in one group." in said([1, 1, 1, 1])
    assert "Each of the 4 clients is in a group of its own." in said([1, 2, 3, 4])


@pytest.mark.parametrize("method", ["oracle", "known-groups", "known-groups+ditto"])
def test_groups_that_were_given_were_not_found(method):
    run = finished()
    told = " ".join(outcome(replace(run, result={**run.result, "method": method})))
    assert "It was given 3 groups" in told
    assert "found" not in told


def scored(name, accuracy, moved, seed=0, method=None, status="finished"):
    event = round_of(1, received={"accuracy": accuracy}, total_bytes={"down": moved, "up": 0})
    config = {"method": {"name": method or name}, "run": {"seed": seed, "rounds": 1}}
    result = {} if status == "running" else {"received": {"accuracy": accuracy}}
    event["client_scores"] = {"received": [accuracy - 0.1, accuracy]}
    event.pop("clock")
    return Reading(name, status, config=config, events=[event], result=result)


def test_the_highest_the_cheapest_and_that_it_was_one_seed():
    runs = [scored("a", 0.5, 1000), scored("b", 0.7, 3000), scored("c", 0.3, 0)]
    assert headline_compared(runs) == [
        "b has the highest accuracy of the usable methods: 70.0 %. One seed: too few seeds to tell "
        "which differences are real, five are needed.",
        "b has the best worst client, 60.0 %, followed by a with 40.0 %.",
        "c transfers nothing; a transfers the least of the others, 1.00 kB for 50.0 %, and b the "
        "most, 3.00 kB.",
    ]


def test_reference_lines_are_named_and_never_the_best():
    runs = [
        scored("fedavg", 0.5, 2000),
        scored("ifca-k=4", 0.7, 3000, method="ifca"),
        scored("oracle", 0.75, 1000),
        scored("local", 0.6, 0),
    ]
    said = headline_compared(runs)
    assert said[0].startswith(
        "ifca k=4 has the highest accuracy of the usable methods: 70.0 %, 10.0 points above "
        "training alone, 5.0 points below the ceiling. One seed: too few"
    )
    assert said[1] == (
        "By the mean, federating was worth it with ifca k=4, above training alone, but not with "
        "fedavg (10.0 points below it)."
    )
    # By hand: both clients of ifca have 0.1 more than alone.
    assert (
        said[2]
        == "With ifca k=4, 2 clients compared with training alone: better 2, same 0, worse 0."
    )
    assert [k.called for k in ranked(runs)] == [
        *("oracle (ceiling)", "ifca k=4", "local (alone)", "fedavg"),
    ]
    only = headline_compared([runs[0], runs[3]])
    assert only[0] == "fedavg is the only usable method: 50.0 %, 10.0 points below training alone."
    assert only[1].startswith("By the mean, federating was not worth it with fedavg (10.0 points")


def over_seeds(**scores):
    return [
        scored(f"{name}/seed-{s}", value, 100, s, name)
        for name, own in scores.items()
        for s, value in enumerate(own)
    ]


def test_with_five_seeds_the_test_speaks():
    best = [0.90, 0.80, 0.85, 0.70, 0.95]
    near = [0.91, 0.78, 0.86, 0.68, 0.95]
    worse = [v - 0.2 - i / 1000 for i, v in enumerate(best)]
    lone = [v - 0.1 + i / 1000 for i, v in enumerate(best)]
    said = headline_compared(over_seeds(best=best, near=near, fedavg=worse, local=lone))
    assert said[0].startswith("best has the highest accuracy of the usable methods: 84.0 %, 9.8 ")
    assert "; not distinguished from near (about " in said[0]
    assert said[1] == (
        "Federating was worth it with best and near, above training alone, but not with fedavg "
        "(10.4 points below it)."
    )
    proven = headline_compared(over_seeds(best=best, fedavg=worse))
    assert proven[0] == (
        "best is the best of the usable methods: 84.0 %; every other usable method is worse."
    )
    wavering = [v + (0.03, -0.03, 0.02, -0.02, 0.001)[i] for i, v in enumerate(best)]
    told = headline_compared(over_seeds(fedavg=wavering, local=best))
    assert told[1] == (
        "It is not shown that federating was worth it: fedavg is not distinguished from training "
        "alone (as high as it)."
    )


def test_what_no_other_method_beats_is_a_choice_with_its_reason():
    runs = [scored("a", 0.7, 3000), scored("b", 0.6, 1000), scored("c", 0.5, 2000)]
    runs = [replace(r, result={**r.result, "sees": sees}) for r, sees in
            zip(runs, ("each", "means", "means"), strict=True)]  # fmt: skip
    (answer,) = compared_runs([*runs, scored("oracle", 0.9, 10), scored("local", 0.55, 0)]).answers
    assert answer.choices == [
        ("a", "the highest accuracy, 70.0 %; 3.0 kB; the server saw single clients"),
        (
            "b",
            "60.0 %, 10.0 points below the highest; the fewest bytes, 1.0 kB; the server saw means "
            "at most",
        ),
    ]


def test_a_method_below_training_alone_is_no_choice():
    runs = [scored("a", 0.7, 3000), scored("b", 0.6, 1000), scored("local", 0.65, 0)]
    runs[2] = replace(runs[2], result={**runs[2].result, "sees": "nothing"})
    (answer,) = compared_runs(runs).answers
    assert [name for name, _ in answer.choices] == ["a"]


def test_ties_are_ties():
    runs = [scored("a", 0.7, 1000), scored("b", 0.7, 1010), scored("c", 0.5, 1000)]
    said = headline_compared(runs)
    assert said[0].startswith("a and b have the highest accuracy of the usable methods: 70.0 %.")
    assert said[2] == "They transfer about the same, 1.01 kB each."
    assert headline_compared(runs[:2])[0] == (
        "All 2 usable methods have the same accuracy: 70.0 %."
    )


def test_seeds_are_averaged_and_what_is_unfinished_is_said():
    runs = [scored(f"a/seed={s}", 0.5 + s / 5, 100, s, "a") for s in (0, 1)]
    runs += [scored(f"b/seed={s}", 0.4, 100, s, "b") for s in (0, 1)]
    said = headline_compared(runs)
    assert said[0].startswith(
        "a has the highest accuracy of the usable methods: 60.0 %. 2 seeds: too few seeds to tell "
        "which differences are real; by their spread, about "
    )
    going_on = headline_compared([*runs, scored("c", 0.1, 1, status="running")])
    assert "Still running: c." in going_on
    assert headline_compared([]) == []


def test_what_was_run_is_one_line():
    told = {
        "data": {"set": "digits"},
        "partition": {"name": "dirichlet", "alpha": 0.3},
        "shift": {"name": "none"},
        "model": {"name": "mlp", "init": "torch", "hidden": [64, 32]},
    }
    sessions = [{"at": "2026-01-02T00:00:00+00:00"}]
    runs = [scored(f"a/seed={s}", 0.5, 100, s, "a") for s in range(3)]
    runs = [replace(r, config={**r.config, **told}, sessions=sessions) for r in runs]
    assert what_was_run(runs) == (
        "digits · 4 clients · dirichlet alpha=0.3 · mlp hidden=64,32 · 1 round · 3 runs · "
        "seeds 0 to 2 · 2 January 2026"
    )
    assert what_was_run([Reading("r", "running")]) == "0 rounds"


def test_a_method_judged_after_adapting_is_said_to_be_also_while_it_runs():
    sessions = [{"headline": "adapted"}]
    run = replace(going(), sessions=sessions)
    assert outcome(run)[1] == "fedclust is judged after adapting, and so is its worst client."
    assert "judged after" not in " ".join(outcome(going()))
    adapted = [e | {"adapted": {"accuracy": 0.9}} for e in scored("a", 0.2, 10).events]
    ours = replace(scored("a", 0.2, 10), result={}, events=adapted, sessions=sessions)
    said = headline_compared([ours, scored("b", 0.7, 20)])
    assert said[0].startswith("a has the highest accuracy of the usable methods: 90.0 %.")
    assert "Judged after adapting, including its worst client: a." in said
    assert not [t for t in headline_compared([ours, replace(ours, name="c")]) if "adapting" in t]


def test_clients_are_in_a_group_until_they_ended_there():
    events = [round_of(1, groups=[1, 1, 1, 1])]
    assert "All clients are in one group." in outcome(replace(going(), events=events))
    assert "All clients ended in one group." in outcome(finished(events=events))


def test_one_is_not_many():
    lone = [round_of(1, groups=["x"], client_scores={"received": [0.5]})]
    run = Reading("r", "stopped", config={"run": {"rounds": 1}}, events=lone)
    said = " ".join([*outcome(run), captions_groups.groups_by_client(run), captions.loss(run)])
    assert "after 1 of 1 round, and" in said
    assert "0 of 1 client changed groups" in said
    assert "The mean loss on test data is 2 in round 1, the only round that was scored." in said
    assert "1 clients" not in said


def test_short_times_are_not_nothing():
    brief = [round_of(1, seconds={"train": 0.0357, "score": 0.0042}, clock=None)]
    assert captions.time_by_round(Reading("r", "running", events=brief)) == (
        "The rounds took 40 ms of real time: train 36 ms, score 4.2 ms."
    )


def test_local_steps_come_with_the_phi_that_was_taken_and_why():
    rounds = [round_of(n, notes={"tau": tau}) for n, tau in ((1, 1), (2, 9), (3, 4))]
    steps = "Rounds had between 1 and 9 local steps, the last one 4."
    assert captions_groups.steps(Reading("r", "running", events=rounds)) == steps
    begun = {"round": 0, "event": "init", "notes": {"phi": 5e-5, "phi_why": "a network"}}
    told = captions_groups.steps(Reading("r", "running", events=[begun, *rounds]))
    assert told == f"{steps} φ was 5e-05: a network."


def test_newcomers_are_not_among_those_who_moved_most_or_least():
    rows = [{**row, "newcomer": str(int(c in (1, 2)))} for c, row in enumerate(clients())]
    run = finished(clients=rows)  # by hand: ann has 2500, dee 2700; the others next to nothing
    assert run.newcomers == {1, 2}
    assert captions.bytes_by_client(run) == (
        "dee transferred the most, 2.70 kB, and ann the least, 2.50 kB."
    )
    held = [round_of(n, groups=["x", None, None, "xy"[n > 1]]) for n in (1, 2)]
    told = captions_groups.groups_by_client(replace(run, events=held))
    assert "1 of 2 clients changed groups" in told


def test_those_who_send_nothing_are_not_forgotten_where_costs_are_the_same():
    runs = [scored("a", 0.5, 1000), scored("b", 0.7, 1010), scored("c", 0.3, 0)]
    assert headline_compared(runs)[2] == (
        "c transfers nothing; the others transfer about the same, 1.01 kB each."
    )


def test_the_best_worst_client_is_by_means_over_seeds_everywhere():
    """Worsts of a: 0.0 and 0.6, mean 0.3; of b: 0.2 and 0.2. By the minimum b would be first."""

    def of(name, seed, low):
        run = scored(name, 0.7, 100, seed, name)
        run.events[0]["client_scores"] = {"received": [low, 0.8]}
        return replace(run, name=f"{name}/seed={seed}")

    runs = [of("a", 0, 0.0), of("a", 1, 0.6), of("b", 0, 0.2), of("b", 1, 0.2)]
    assert headline_compared(runs)[1] == (
        "a has the best worst client, 30.0 %, followed by b with 20.0 %."
    )
    assert captions_compared.clients(runs).endswith(
        "By the lowest dot: b 20.0 % to 80.0 %, median 50.0 %; a 0.0 % to 80.0 %, median 70.0 %."
    )


def test_the_same_seed_twice_is_no_other_seed_and_no_name_hides_another():
    runs = [scored("a", score, 100, 1) for score in (0.2, 0.4, 0.6)]
    said = headline_compared(runs)
    assert said[0].startswith("a (3) has the highest accuracy of the usable methods: 60.0 %. One")
    assert [len(kind.runs) for kind in kinds_of(runs)] == [1, 1, 1]
    unsaid = [replace(r, config={"method": {"name": "a"}}) for r in runs[:2]]
    assert "One seed: too few seeds to tell" in " ".join(headline_compared(unsaid))
