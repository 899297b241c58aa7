"""Headlines: what they say is true, and what is not known is not said."""

from dataclasses import replace

import pytest

from coterie.report.reading import Reading
from coterie.report.words import headline, headline_compared
from runs_by_hand import finished, going, old, round_of


def test_the_headline_of_a_finished_run():
    assert headline(finished())[:5] == [
        "fedclust with 4 clients reached accuracy 70.0 % received and 77.5 % adapted after 3 "
        "rounds on average over clients' own test data.",
        "Worst off is <b>bob</b> with 50.0 %.",
        "Against training alone clients gain +20.0 points on average: 2 of 4 are better off, 1 "
        "worse.",
        "It found 3 groups, 2 of them of one client, the largest of 2 clients. Their agreement "
        "with the true ones is 0.57 (1 is perfect, 0 is chance).",
        "It cost 5.24 kB (down and up together) and 14.5 s of simulated time; 15 B more were "
        "wasted.",
    ]
    assert headline(finished())[-1] == "Privacy: ε = 4 at δ = 1e-05."
    assert "The server looked at every client's 'final'" in headline(finished())[-2]


def test_a_run_that_goes_on_or_broke_off_says_so_and_names_what_it_has():
    first, second, *rest = headline(going())
    assert "reached accuracy 50.0 % received after 2 rounds" in first
    assert second == "It is running: 2 of 3 rounds are done, so nothing here is final."
    assert rest[-1] == "Privacy so far: ε ≤ 3."
    assert "It did not finish" in headline(going("stopped"))[1]
    early = replace(finished(), result={**finished().result, "stopped": "the target was reached"})
    assert headline(early)[1] == "It ended early, after 3 rounds: the target was reached."


def test_little_is_said_of_a_run_that_has_little():
    assert headline(Reading("x", "running"))[0] == (
        "unknown method: 0 rounds done, none of them scored."
    )
    assert any("70.0 %" in text for text in headline(old()))


@pytest.mark.parametrize("junk", ["a", 3, [1], {"b": "c"}])
@pytest.mark.parametrize("key", ["received", "groups", "total_bytes", "privacy", "client_scores"])
def test_damage_costs_sentences_and_nothing_else(junk, key):
    rounds = [round_of(1), {**round_of(2), key: junk}]
    run = Reading("x", "running", events=rounds, result={key: junk, "exposure": junk})
    assert isinstance(headline(run), list)


def test_groups_that_are_the_true_ones_or_one_or_all_alone():
    def said(groups, true=(0, 0, 1, 1)):
        events = [round_of(1, groups=groups)]
        data = {**finished().data, "groups": list(true)}
        return " ".join(headline(finished(events=events, data=data)))

    assert "They are exactly the true ones." in said([5, 5, 2, 2])
    assert "All clients ended in one group." in said([1, 1, 1, 1])
    assert "Each of the 4 clients is in a group of its own." in said([1, 2, 3, 4])


def scored(name, accuracy, moved, seed=0, method=None, status="finished"):
    event = round_of(1, received={"accuracy": accuracy}, total_bytes={"down": moved, "up": 0})
    config = {"method": {"name": method or name}, "run": {"seed": seed, "rounds": 1}}
    result = {} if status == "running" else {"received": {"accuracy": accuracy}}
    event["client_scores"] = {"received": [accuracy - 0.1, accuracy]}
    event.pop("clock")
    return Reading(name, status, config=config, events=[event], result=result)


def test_the_best_the_cheapest_and_that_it_was_one_seed():
    runs = [scored("a", 0.5, 1000), scored("b", 0.7, 3000), scored("c", 0.3, 0)]
    assert headline_compared(runs) == [
        "b reaches the highest accuracy, 70.0 %; then a with 50.0 %.",
        "b has the best worst client with 60.0 %; then a with 40.0 %.",
        "c sends nothing; a sends the least of the others, 1.00 kB for 50.0 %, b most, 3.00 kB.",
        "All of this is on one seed: small differences may be chance.",
    ]


def test_ties_are_ties():
    runs = [scored("a", 0.7, 1000), scored("b", 0.7004, 1010), scored("c", 0.5, 1000)]
    said = headline_compared(runs)
    assert said[0] == "a and b reach the highest accuracy, 70.0 %; then c with 50.0 %."
    assert said[2] == "They cost about the same, 1.01 kB each."
    assert headline_compared(runs[:2])[0].startswith("There is no difference between the 2")


def test_seeds_are_averaged_and_what_is_unfinished_is_said():
    runs = [scored(f"a/seed={s}", 0.5 + s / 5, 100, s, "a") for s in (0, 1)]
    runs += [scored(f"b/seed={s}", 0.4, 100, s, "b") for s in (0, 1)]
    said = headline_compared(runs)
    assert said[0] == "a reaches the highest accuracy, 60.0 %; then b with 40.0 %."
    assert "Scores are means over 2 seeds." in said
    going_on = headline_compared([*runs, scored("c", 0.1, 1, status="running")])
    assert "Still running: c." in going_on
    assert headline_compared([]) == []
