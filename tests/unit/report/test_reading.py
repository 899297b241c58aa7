"""Runs are read as they are found: torn, growing, crashed, of long ago, strange, going on."""

import fcntl
import json
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from coterie.cli.app import app
from coterie.errors import Interrupted, RunDirError
from coterie.experiment.api import run, simulate
from coterie.experiment.config import experiment_of, parse
from coterie.experiment.experiment import execute
from coterie.report.reading import FINISHED, RUNNING, STOPPED, Reading, find_runs, read_run
from coterie.results.provenance import session
from coterie.results.rundir import RunDir

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
    said = ["events.jsonl has 2 damaged lines: left out", "events.jsonl lacks round 2"]
    assert found.problems == said


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
    assert read_run(place).problems == ["clients.csv cannot be read: it is not a regular file"]


def test_a_result_from_before_a_run_was_continued_is_left_out(tmp_path):
    told = {"method": "fedavg", "rounds": 2, "received": {"accuracy": 0.9}}
    place = bare(tmp_path / "x", a_round(1), a_round(2, 0.9), a_round(3, 0.25), result=told)
    (place / "clients.csv").write_text("client,received_accuracy\n0,0.9\n")
    (place / "exposure.csv").write_text("client\n0\n")
    found = read_run(place)
    assert (found.status, found.result, found.clients, found.exposed) == (STOPPED, {}, [], [])
    assert found.problems == [
        "result.json is of round 2, before the run was continued: left out",
    ]
    assert found.accuracy == 0.25
    run_dir = RunDir(place)
    run_dir.lock()
    assert read_run(place).status == RUNNING
    run_dir.unlock()
    (place / "result.json").write_text(json.dumps({**told, "rounds": 3}))
    again = read_run(place)  # it has come to its end
    assert (again.status, again.accuracy, again.problems) == (FINISHED, 0.9, [])
    assert len(again.clients) == 1


def test_what_a_run_is_judged_by_is_known_before_its_end(real, tmp_path):
    place = bare(tmp_path / "x", a_round(1))
    assert read_run(place).headline == "received"
    (place / "sessions.jsonl").write_text('{"headline": "adapted"}\n{"rounds": 3}\n')
    assert read_run(place).headline == "adapted"
    assert read_run(real[0]).sessions[0]["headline"] == "received"
    judged = experiment_of(parse({"method": {"name": "per-fedavg"}}))
    plan = judged.plan(tmp_path / "plan")
    told = session(judged, 0, plan)
    assert (told["headline"], told["model_bytes"]) == ("adapted", 4 * plan.start.layout.size)


JUNK = {
    "groups": (3, "x", [{}], [[1]]),
    "received": (3, [1], {"accuracy": "x"}),
    "client_scores": ([1], {"received": 3}, {"received": ["a"]}),
    "clock": (3, {"total": []}),
    "privacy": (3, {"epsilon": "8"}),
    "bytes": (3, {"down": None, "up": 1}),
    "total_bytes": ("x", {"down": 10**400}),
    "kinds": ([1], {"model": [1]}, {"model": ["a", 1]}),
    "client_bytes": ({"x": [1, 2]}, {"0": "ab"}),
    "notes": ([], "abc"),
    "lost": ("x", True),
}


@pytest.mark.parametrize("key", JUNK)
def test_what_is_of_another_type_is_dropped_and_said_once_for_each_field(key, tmp_path):
    for junk in JUNK[key]:
        lines = [json.dumps({"round": n, "late": 0, key: junk}) + "\n" for n in (1, 2)]
        found = read_run(bare(tmp_path / "x", *lines))
        assert [p.startswith(f"events.jsonl: '{key}'") for p in found.problems] == [True], junk
        assert [e["late"] for e in found.rounds] == [0, 0]
        assert junk not in [e.get(key) for e in found.rounds]


def test_only_the_part_that_is_wrong_is_dropped(tmp_path):
    event = {"round": 1, "client_scores": {"received": [0.5, "a", None], "adapted": 3}}
    event |= {"received": {"accuracy": 0.5, "loss": "low"}}
    found = read_run(bare(tmp_path / "x", json.dumps(event) + "\n"))
    assert found.rounds[0]["client_scores"] == {"received": [0.5, None, None]}
    assert found.rounds[0]["received"] == {"accuracy": 0.5}


def test_other_files_are_checked_too(tmp_path):
    told = {"bytes": {"down": "1", "up": 2}, "headline": "best", "groups": [1], "rounds": 1}
    place = bare(tmp_path / "x", a_round(1), result=told)
    (place / "data.json").write_text('{"names": 3, "groups": [0, 1]}')
    (place / "sessions.jsonl").write_text('{"argv": 3, "rounds": -4, "engine": "pool"}\n')
    (place / "config.toml").write_text('run = 3\n[method]\nname = "fedavg"\n')
    found = read_run(place)
    assert found.result == {"bytes": {"up": 2}, "rounds": 1}
    assert (found.data, found.sessions) == ({"groups": [0, 1]}, [{"engine": "pool"}])
    assert (found.headline, found.names, found.seed) == ("received", [], None)
    assert [p.split(" has")[0] for p in found.problems] == [
        *(f"result.json: '{key}'" for key in ("bytes", "headline", "groups")),
        "config.toml: 'run'",
        "data.json: 'names'",
        *(f"sessions.jsonl: '{key}'" for key in ("argv", "rounds")),
    ]


def test_lines_that_are_too_deep_are_damage(tmp_path):
    place = bare(tmp_path / "x", "[" * 100_000 + "\n", a_round(1))
    (place / "result.json").write_text("[" * 100_000)
    found = read_run(place)
    assert [e["round"] for e in found.rounds] == [1]
    assert found.problems[0] == "events.jsonl has 1 damaged line: left out"
    assert found.problems[1].startswith("result.json cannot be read")


def test_a_table_with_torn_rows(tmp_path):
    place = bare(tmp_path / "x", a_round(1))
    (place / "clients.csv").write_text("client,train\n0,5,6,7\n1\n")
    assert read_run(place).clients == [{"client": "0", "train": "5"}, {"client": "1", "train": ""}]


def test_a_run_made_in_python_says_its_settings(tmp_path):
    torch.manual_seed(0)
    people = [(torch.randn(20, 3), torch.randint(0, 2, (20,))) for _ in range(3)]
    place = tmp_path / "x"
    told = {"method": "fedavg", "engine": "loop", "lr": 0.25, "seed": 9, "directory": place}
    simulate(people, rounds=1, **told)
    result = simulate(people, rounds=2, resume=True, **told)
    found, memory = read_run(place), Reading.of(result)
    assert (found.seed, found.planned, len(found.rounds)) == (9, 2, 2)
    assert found.settings("train")["lr"] == memory.settings("train")["lr"] == 0.25
    assert found.settings("clock") == {"name": "none"}
    assert "run" not in found.config  # nobody can take it for a configuration to run again
    assert memory.sessions[0]["versions"] == found.sessions[-1]["versions"]
    refused = CliRunner().invoke(app, ["run", "--resume", str(place)])
    assert "coterie.simulate" in str(refused.exception)
