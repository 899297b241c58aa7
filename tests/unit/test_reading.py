"""Runs are read as they are found: torn, growing, crashed, of long ago, strange, going on."""

import fcntl
import json
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from coterie.errors import Interrupted, RunDirError
from coterie.report.reading import FINISHED, RUNNING, STOPPED, Reading, find_runs, read_run
from coterie.run.api import run
from coterie.run.config import experiment_of, parse
from coterie.run.experiment import execute
from coterie.run.rundir import RunDir

OLD = Path(__file__).parent.parent / "old_runs"
SMALL = {
    "data": {"clients": 5},
    "shift": {"name": "rotation"},
    "method": {"name": "ifca", "k": 2},
    "run": {"rounds": 3, "engine": "loop", "seed": 7},
}


def bare(folder: Path, *lines: str, result: dict | None = None) -> Path:
    """A run directory written by hand."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text('[method]\nname = "fedavg"\n[run]\nrounds = 9\nseed = 3\n')
    (folder / "events.jsonl").write_text("".join(lines))
    if result is not None:
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def a_round(number: int, accuracy: float = 0.5) -> str:
    return json.dumps({"round": number, "received": {"accuracy": accuracy}}) + "\n"


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    place = tmp_path_factory.mktemp("reading") / "real"
    return place, run(SMALL, place)


def test_a_finished_run_is_read_as_it_was_in_memory(real):
    place, result = real
    found, memory = read_run(place), Reading.of(result)
    assert (found.status, found.method, found.planned, found.seed) == (FINISHED, "ifca", 3, 7)
    assert found.problems == []
    assert [e["round"] for e in found.rounds] == [1, 2, 3]
    assert found.groups == [result.groups[c] for c in range(5)] == memory.groups
    own = [row["received_accuracy"] for row in result.clients]
    assert found.scores("received") == pytest.approx(own) == memory.scores("received")
    assert sum(own) / 5 == pytest.approx(found.result["received"]["accuracy"])
    assert found.data == memory.data
    assert found.data["groups"] == [0, 1, 2, 3, 0]
    trained = [int(row["train"]) for row in found.clients]
    assert [sum(labels) for labels in found.data["labels"]] == trained
    assert found.names == [f"client {c}" for c in range(5)]
    assert found.sessions[0]["versions"]["coterie"]
    assert found.sessions[0]["done"] == 0


def test_each_scored_round_says_each_client_s_score(real):
    for event in read_run(real[0]).rounds:
        own = event["client_scores"]["received"]
        assert sum(own) / 5 == pytest.approx(event["received"]["accuracy"], abs=1e-4)
        assert min(own) == pytest.approx(event["received"]["worst"], abs=1e-4)


def test_scores_fall_back_to_those_of_the_last_round_that_has_any(real, tmp_path):
    place, _ = real
    whole = read_run(place)
    part = Reading("part", STOPPED, events=whole.events)
    assert part.scores("received") == whole.rounds[-1]["client_scores"]["received"]
    assert part.scores("alone") == []


def test_a_torn_last_line_is_not_there_yet_and_not_damage(tmp_path):
    place = bare(tmp_path / "torn", a_round(1), a_round(2)[:-9])
    found = read_run(place)
    assert [e["round"] for e in found.rounds] == [1]
    assert (found.status, found.planned, found.problems) == (STOPPED, 9, [])
    with (place / "events.jsonl").open("a") as file:  # it grows to its end
        file.write(a_round(2)[-9:])
    assert [e["round"] for e in read_run(place).rounds] == [1, 2]


def test_damage_in_the_middle_is_left_out_and_said(tmp_path):
    place = bare(tmp_path / "x", a_round(1), '{"round": 2, "rec\n', "7\n", a_round(3))
    found = read_run(place)
    assert [e["round"] for e in found.rounds] == [1, 3]
    assert found.problems == ["events.jsonl has 2 damaged lines: left out"]


def test_unknown_kinds_are_left_out_and_said(tmp_path):
    strange = json.dumps({"round": 1, "event": "eclipse", "groups": [9]}) + "\n"
    found = read_run(bare(tmp_path / "x", a_round(1), strange, '{"event": "init"}\n'))
    assert len(found.events) == 1
    assert found.groups == []
    assert found.problems == [
        "events.jsonl has 1 event of kind 'eclipse': left out",
        "events.jsonl has 1 event without a round: left out",
    ]


def test_bytes_that_are_no_text_do_not_hide_the_rest(tmp_path):
    place = bare(tmp_path / "x", a_round(1))
    with (place / "events.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\x00\n" + a_round(2).encode())
    assert [e["round"] for e in read_run(place).rounds] == [1, 2]


def test_a_result_that_cannot_be_read_leaves_a_stopped_run(tmp_path):
    place = bare(tmp_path / "x", a_round(1))
    (place / "result.json").write_text('{"received": ')
    found = read_run(place)
    assert found.status == STOPPED
    assert found.problems[0].startswith("result.json cannot be read")


@pytest.mark.parametrize("name", ["first", "second"])
def test_runs_of_earlier_versions(name):
    found = read_run(OLD / name)
    assert (found.status, found.method, found.headline) == (FINISHED, "ifca", "received")
    assert found.problems == []
    assert len(found.rounds) == found.planned == 3
    assert len(found.groups) == 6
    assert len(found.scores("received")) == 6
    assert found.names[5] == "client 5"


def test_a_round_done_twice_counts_once_and_later_scores_are_laid_in(tmp_path):
    late = json.dumps({"round": 2, "event": "scores", "received": {"accuracy": 0.75}}) + "\n"
    found = read_run(bare(tmp_path / "x", a_round(1), a_round(1, 0.6), '{"round": 2}\n', late))
    assert [e["received"]["accuracy"] for e in found.rounds] == [0.6, 0.75]


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(RunDirError, match="it has no config"):
        read_run(tmp_path)
    with pytest.raises(RunDirError, match="there is no folder"):
        read_run(tmp_path / "nowhere")


def test_runs_are_found_below_a_folder_and_not_inside_a_run(tmp_path):
    bare(tmp_path / "b" / "seed-1")
    bare(tmp_path / "a")
    bare(tmp_path / "a" / "clients" / "inner")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert list(find_runs(tmp_path)) == ["a", "b/seed-1"]
    assert find_runs(tmp_path / "a") == {"a": tmp_path / "a"}


def test_a_run_at_work_is_running_and_can_be_looked_at_while_it_begins(tmp_path):
    place = bare(tmp_path / "x", a_round(1))
    run_dir = RunDir(place)
    run_dir.lock()
    assert read_run(place).status == RUNNING
    run_dir.unlock()
    assert read_run(place).status == STOPPED


def test_who_only_looks_does_not_keep_a_run_from_beginning(tmp_path):
    place = bare(tmp_path / "x")
    with (place / ".lock").open("w") as eyes:
        fcntl.flock(eyes, fcntl.LOCK_SH)
        blinks = threading.Timer(0.03, fcntl.flock, (eyes, fcntl.LOCK_UN))
        blinks.start()
        RunDir(place).lock()
        blinks.join()
        fcntl.flock(eyes, fcntl.LOCK_UN)


def test_a_file_stops_a_run_after_its_round_and_it_goes_on_to_the_same_bits(real, tmp_path):
    whole = real[0]
    place = tmp_path / "stopped"

    def ask(event):
        if event["round"] == 1:
            RunDir(place).ask_to_stop()

    sparing = {**SMALL, "run": {**SMALL["run"], "checkpoint_every": 5}}
    with pytest.raises(Interrupted, match="after round 1"):
        run(sparing, place, watch=ask)
    assert not (place / ".stop").exists()
    assert read_run(place).status == STOPPED
    assert len(read_run(place).rounds) == 1
    (place / ".stop").touch()  # what was asked before it began does not count
    execute(experiment_of(parse(sparing)), place, resume=True)
    last = "checkpoints/round-000003.safetensors"
    ours, theirs = load_file(place / last), load_file(whole / last)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert [s["done"] for s in read_run(place).sessions] == [0, 1]


def test_a_request_in_the_last_round_changes_nothing(tmp_path):
    place = tmp_path / "x"
    few = {**SMALL, "run": {**SMALL["run"], "rounds": 1}}
    run(few, place, watch=lambda event: RunDir(place).ask_to_stop())
    assert read_run(place).status == FINISHED


def test_a_folder_that_cannot_be_read_is_said(tmp_path):
    place = bare(tmp_path / "x", a_round(1))
    (place / "clients.csv").mkdir()
    assert read_run(place).problems == ["clients.csv cannot be read: Is a directory"]
