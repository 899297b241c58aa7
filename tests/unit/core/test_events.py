"""What is written to a run directory is checked against its types, and read by the same ones."""

import json

import pytest

from coterie.core.events import (
    ADMISSION,
    KINDS,
    ROUND,
    SUMMARY_MAY,
    Event,
    Summary,
    check_event,
    check_summary,
    fields_of,
    meaning,
    mended,
)
from coterie.errors import RunDirError
from coterie.experiment.experiment import execute
from coterie.results.rundir import RunDir, without_nan
from support import ROWS, experiment

WAY = {"down": 1, "up": 2}
PLAIN = {
    "round": 1,
    "cohort": [0, 1],
    "groups": [0, None],
    "bytes": WAY,
    "total_bytes": WAY,
    "wasted": WAY,
    "total_wasted": WAY,
    "kinds": {"model": [1, 2]},
    "client_bytes": {"0": [1, 2]},
    "lost": 0,
    "late": 0,
    "exchanges": 1,
    "seconds": {"train": 0.5, "score": 0},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run with newcomers, a clock and noise: every part of a round that a simulation has."""
    from coterie.channel.privacy.settings import Privacy

    folder = tmp_path_factory.mktemp("events") / "run"
    settings = {"rounds": 2, "holdout": 2, "target": 0.1, "alone": True, "adapt_every": 1}
    made = experiment(ROWS["fedavg"](), settings={**settings, "clock": {"name": "links"}})
    execute(made, folder)
    noisy = folder.with_name("noisy")
    execute(experiment(ROWS["fedavg"](), settings={"privacy": Privacy(noise=0.1)}), noisy)
    return folder


def test_what_a_run_writes_is_read_again_as_it_was(place):
    events = RunDir(place).read_events()
    assert {e.get("event", ROUND) for e in events} == {ROUND, ADMISSION}
    for event in events:
        bad = []
        assert mended(event, fields_of(Event), bad) == event
        assert not bad
        check_event(json.dumps(event))
    result = RunDir(place).read_result()
    check_summary(json.dumps(result))
    bad = []
    assert (mended(result, fields_of(Summary), bad), bad) == (result, [])


@pytest.mark.parametrize("drop", list(PLAIN))
def test_a_round_lacks_nothing(drop, tmp_path):
    RunDir(tmp_path).append(PLAIN)
    with pytest.raises(RunDirError, match=f"'round' lacks {drop}"):
        RunDir(tmp_path).append({k: v for k, v in PLAIN.items() if k != drop})
    assert RunDir(tmp_path).read_events() == [PLAIN]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"lost": -1}, r"lost = -1: must be greater than or equal to 0"),
        ({"lost": True}, r"lost = True: must be a valid integer"),
        ({"bytes": {"down": 1}}, r"bytes\.up = .*field required"),
        ({"bytes": {**WAY, "aside": 3}}, r"bytes\.aside = 3: extra inputs"),
        ({"recieved": {"loss": 1.0}}, r"recieved = .*: extra inputs"),
        ({"received": {"loss": "low"}}, r"received\.loss = 'low'"),
        ({"client_bytes": {"ann": [1, 2]}}, r"client_bytes\.ann.* = 'ann'"),
        ({"kinds": {"model": [1]}}, r"kinds\.model = \[1\]"),
        ({"clients": [1]}, r"'round' has clients"),
        ({"event": "eclipse"}, r"unknown kind 'eclipse'"),
        ({"event": "scores"}, r"'scores' has "),
    ],
)
def test_what_is_no_event_is_refused_in_one_sentence(more, words, tmp_path):
    with pytest.raises(RunDirError, match=rf"^an event cannot be written: {words}") as caught:
        RunDir(tmp_path).append({**PLAIN, **more})
    assert "\n" not in str(caught.value)
    assert not RunDir(tmp_path).events.exists()


def test_a_summary_lacks_nothing_and_has_nothing_else(place, tmp_path):
    result = RunDir(place).read_result()
    for key in result:
        rest = {k: v for k, v in result.items() if k != key}
        if key in SUMMARY_MAY:
            RunDir(tmp_path).write_result(rest)
            continue
        with pytest.raises(RunDirError, match=f"a result cannot be written: it lacks {key}"):
            RunDir(tmp_path).write_result(rest)
    with pytest.raises(RunDirError, match="extra inputs"):
        RunDir(tmp_path).write_result({**result, "more": 1})


def test_numbers_that_are_not_finite_are_null(tmp_path):
    event = {**PLAIN, "received": {"loss": float("nan"), "accuracy": 0.5}}
    RunDir(tmp_path).append(event)
    assert RunDir(tmp_path).read_events() == [without_nan(event)]


def test_every_field_belongs_to_a_kind_and_says_what_it_means():
    known = {field for kind in KINDS.values() for field in (*kind.must, *kind.may)}
    assert known | {"round", "event"} == set(fields_of(Event))
    for fields in (fields_of(Event), fields_of(Summary)):
        assert all(map(meaning, fields.values()))
