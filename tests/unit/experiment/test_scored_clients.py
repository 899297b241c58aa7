"""``evaluation.clients``: a sample of the clients is scored after a round, all at the end."""

import pytest

import coterie
from coterie.errors import ConfigError
from support import digits

SIX = {"data": {"clients": 6, "samples": 240}, "run": {"rounds": 5, "engine": "loop"}}


def scored(result):
    """Who was scored after each round."""
    return [
        {c for c, score in enumerate(event["client_scores"]["received"]) if score is not None}
        for event in result.history
    ]


@pytest.mark.parametrize(("asked", "count"), [(2, 2), (0.5, 3), (0.01, 1), (1.0, 6), (99, 6)])
def test_so_many_are_scored_after_each_round_and_all_at_the_end(asked, count):
    result = coterie.run({**SIX, "evaluation": {"clients": asked}})
    assert [len(clients) for clients in scored(result)] == [count] * 5
    assert len(result.clients) == 6
    assert all(row["received_accuracy"] is not None for row in result.clients)


def test_every_round_has_a_sample_of_its_own_and_the_models_are_the_same():
    few, everybody = (
        coterie.run({**SIX, "evaluation": {"clients": asked, "adapt_every": 1}}) for asked in (2, 6)
    )
    assert len({frozenset(clients) for clients in scored(few)}) > 1
    assert few.clients == everybody.clients
    for event, whole in zip(few.history, everybody.history, strict=True):
        for kind in ("received", "adapted"):
            pairs = zip(event["client_scores"][kind], whole["client_scores"][kind], strict=True)
            assert all(score in (None, other) for score, other in pairs)


def test_a_resumed_run_scores_the_same_clients(tmp_path):
    people = digits(clients=6)
    settings = {"evaluate_clients": 2, "engine": "loop"}
    whole = coterie.simulate(people, rounds=5, **settings)
    coterie.simulate(people, rounds=2, directory=tmp_path / "r", **settings)
    resumed = coterie.simulate(people, rounds=5, directory=tmp_path / "r", resume=True, **settings)
    assert scored(resumed) == scored(whole)


@pytest.mark.parametrize("asked", [0, -1, "many"])
def test_a_number_that_makes_no_sense_is_refused(asked):
    with pytest.raises(ConfigError, match=r"evaluation\.clients"):
        coterie.run({**SIX, "evaluation": {"clients": asked}})
