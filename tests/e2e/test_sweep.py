"""Sweeps: several at a time to the same bits, stopped, killed and continued, printed."""

import csv
import functools
import io
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

import coterie
from coterie.core.method import Method, State, method
from coterie.errors import EngineError, TrainingError
from coterie.experiment.compare.jobs import Job, Look, Ready, _work, side_by_side
from coterie.methods import METHODS
from coterie.report import progress
from coterie.report.reading import find_runs
from coterie.results.rundir import RunDir
from processes import PATIENCE

QUICK = {"data": {"clients": 4, "samples": 200}, "model": {"hidden": [8]}, "run": {"rounds": 2}}
ASKED = {
    "methods": ["local", "fedavg"],
    "seeds": 2,
    "partitions": ["iid", "dirichlet:alpha=5"],
}


def rows_of(folder, *without):
    kept = json.loads(Path(folder, "comparison.json").read_text())
    return [{k: v for k, v in row.items() if k not in without} for row in kept["rows"]]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep that was done three runs at a time."""
    place = tmp_path_factory.mktemp("swept") / "c"
    return coterie.compare(QUICK, **ASKED, directory=place, jobs=3)


def test_the_same_bits_at_a_time_and_one_after_another(swept, tmp_path):
    few = {**ASKED, "seeds": [1], "partitions": ["dirichlet:alpha=5"]}
    one = coterie.compare(QUICK, **few, directory=tmp_path / "one", jobs=1)
    runs = find_runs(one.directory)
    assert list(runs) == [f"{m}/dirichlet-alpha=5/seed-1" for m in ("fedavg", "local")]
    for name, path in runs.items():
        both = path, swept.directory / name
        ours, theirs = (json.loads((p / "result.json").read_text()) for p in both)
        assert ours["received"] == theirs["received"]
        ends = [load_file(p / "checkpoints/round-000002.safetensors") for p in both]
        assert bool(ends[0]) == name.startswith("fedavg")  # the server has no model of local's
        assert all(tensor.equal(ends[1][key]) for key, tensor in ends[0].items())
        engines = [
            json.loads((p / "sessions.jsonl").read_text())["engine"] for p in both
        ]  # one process each
        assert engines == ["pool", "loop"]
        # What was asked for is what is written down: a run can be continued by itself.
        assert tomllib.loads((both[1] / "config.toml").read_text())["run"]["engine"] == "pool"
    timeless = [{k: v for k, v in row.items() if k != "seconds"} for row in swept.rows]
    assert timeless[-2:] == rows_of(one.directory, "seconds")


def test_methods_are_paired_on_the_same_clients(swept):
    names = json.loads((swept.directory / "fedavg/iid/seed-1/data.json").read_text())
    assert names == json.loads((swept.directory / "local/iid/seed-1/data.json").read_text())
    assert names != json.loads((swept.directory / "local/iid/seed-0/data.json").read_text())
    for row in swept.rows:
        alone = next(
            r
            for r in swept.rows
            if (r["method"], r["seed"], r["partition"]) == ("local", row["seed"], row["partition"])
        )
        if row is not alone:
            assert row["gain"] == pytest.approx(row["received"] - alone["received"])


def test_what_a_sweep_leaves_behind(swept):
    kept = json.loads((swept.directory / "comparison.json").read_text())
    assert kept["axes"] == ["partition"]
    assert [(r["method"], r["partition"], r["seeds"]) for r in kept["means"]] == [
        *[("local", "iid", 2), ("fedavg", "iid", 2)],
        *[("local", "dirichlet alpha=5", 2), ("fedavg", "dirichlet alpha=5", 2)],
    ]
    for mean in kept["means"]:
        own = [
            r["received"]
            for r in kept["rows"]
            if (r["method"], r["partition"]) == (mean["method"], mean["partition"])
        ]
        assert mean["received"] == pytest.approx(sum(own) / 2)
        assert mean["received_std"] == pytest.approx(abs(own[0] - own[1]) / 2**0.5)
    long = list(csv.DictReader((swept.directory / "comparison.csv").read_text().splitlines()))
    assert [float(r["received"]) for r in long] == [r["received"] for r in kept["rows"]]
    assert list(long[0])[:4] == ["method", "seed", "partition", "received"]
    means = (swept.directory / "comparison-means.csv").read_text().splitlines()
    assert [row["method"] for row in csv.DictReader(means)] == ["local", "fedavg"] * 2


def test_in_python(swept):
    frame = swept.to_dataframe()
    assert frame.groupby(["method", "partition"]).size().tolist() == [2] * 4
    assert "<table>" in swept._repr_html_()
    assert swept.markdown() == (swept.directory / "comparison.md").read_text()
    assert swept.latex() == (swept.directory / "comparison.tex").read_text()
    nowhere = coterie.compare({**QUICK, "sweep": {"methods": ["local"], "seeds": 1}}, jobs=1)
    assert nowhere.directory is None
    assert [row["seed"] for row in nowhere.rows] == [0]


def test_a_finished_sweep_is_printed_and_not_run_again(cli, swept):
    place = swept.directory
    files = [p for p in place.glob("*/*/*/*") if p.is_file()]
    before = {p: (p.stat().st_ino, p.stat().st_mtime_ns) for p in files}
    shown = cli("compare", "--resume", place)
    assert shown.code == 0, shown.err
    assert shown.err == ""
    assert "too few seeds to tell" in shown.out
    told = json.loads(cli("compare", "--resume", place, "--json").out)
    assert told["rows"] == json.loads(json.dumps(swept.rows))
    long = cli("compare", "--resume", place, "--format", "csv").out
    assert long == (place / "comparison-means.csv").read_text()
    assert len(list(csv.DictReader(io.StringIO(long)))) == 4
    assert cli("compare", "--resume", place, "--format", "markdown").out == swept.markdown()
    assert cli("compare", "--resume", place, "--format", "latex").out == swept.latex()
    cli("compare", "--resume", place, "--json", "--format", "csv").says(2, "not both")
    after = {p: (p.stat().st_ino, p.stat().st_mtime_ns) for p in before}
    assert after == before


def test_further_seeds(cli):
    words = ("--methods", "fedavg", "--jobs", 2, "-q", "--clients", 4, "--rounds", 1)
    words = ("compare", *words, "--set", "data.samples=200", "--set", "model.hidden=[8]")
    assert cli(*words, "--seeds", 1, "--dir", "c").code == 0
    before = Path("c/fedavg/seed-0/result.json").stat().st_mtime_ns
    more = cli("compare", "--resume", "c", "--seeds", 2)
    assert more.code == 0, more.err
    assert "over 2 seeds (0, 1)" in more.out
    assert Path("c/fedavg/seed-0/result.json").stat().st_mtime_ns == before
    assert cli(*words, "--seeds", 2, "--dir", "w").code == 0
    assert rows_of("c", "seconds") == rows_of("w", "seconds")
    assert cli(*words, "--dir", "plain").code == 0
    cli("compare", "--resume", "plain", "--seeds", 3).says(2, "start a new one with --seeds")


# --- files and flags -----------------------------------------------------------------------------

FILE = """
[data]
clients = 4
samples = 200
[model]
hidden = [8]
[run]
rounds = 1
engine = "loop"
[sweep]
methods = ["local", "fedprox"]
seeds = 2
[sweep.vary]
train.lr = [0.05, 0.1]
"method.mu" = [0.1, 1]
"""


def test_a_file_and_flags_that_win_over_it(cli):
    Path("s.toml").write_text(FILE)
    ended = cli("compare", "s.toml", "-q", "--dir", "c")
    assert ended.code == 0, ended.err
    assert len(rows_of("c")) == 3 * 2 * 2
    assert Path("c/fedprox-mu=0.1/train.lr=0.05/seed-1/result.json").exists()
    cli("compare", "s.toml", "--dir", "c").says(4, "holds a comparison", "compare --resume c")
    fixed = ("compare", "s.toml", "-q", "--lr", 0.2, "--seed", 7, "--methods", "local,fedprox")
    assert cli(*fixed, "--dir", "d").code == 0
    assert [row["method"] for row in rows_of("d")] == ["local", "fedprox mu=0.1", "fedprox mu=1"]
    assert tomllib.loads(Path("d/local/config.toml").read_text())["train"]["lr"] == 0.2


def test_mistakes_in_a_sweep_are_said_before_anything_runs(cli):
    Path("s.toml").write_text(FILE)
    cli("run", "s.toml").says(2, "has a table [sweep]; run it with: coterie compare s.toml")
    words = ("compare", "s.toml", "--dir", "c")
    cli(*words, "--seed", 1, "--seeds", 2).says(2, "run.seed has a single value and is swept over")
    cli(*words, "--vary", "train.rl=1,2").says(2, "did you mean 'train.lr'")
    cli(*words, "--vary", "train.lr=1,-2").says(2, "train.lr = -2")
    cli(*words, "--partitions", "iid,dirichelt").says(2, "dirichelt", "did you mean 'dirichlet'")
    cli(*words, "--seeds", "many").says(2, "give their number")
    cli(*words, "--jobs", 0).says(2, "jobs = 0")
    hint = "write it with its method, as in --methods fedprox:mu=7, or"
    cli(*words, "--set", "method.mu=7").says(2, hint, "with --vary method.mu=7")
    cli(*words, "--set", "method.name=ifca").says(2, "write --methods ifca")
    cli(*words, "--methods", "local,,fedavg").says(2, "a name is empty")
    cli(*words, "--track", "tensorbord").says(2, "did you mean 'tensorboard'")
    Path("s.toml").write_text(FILE.replace("seeds = 2", "sedes = 2"))
    cli(*words).says(2, "unknown key 'sweep.sedes'; did you mean 'sweep.seeds'?")
    with pytest.raises(coterie.CoterieError, match="coterie compare"):
        coterie.run({"sweep": {"seeds": 2}})
    assert not Path("c").exists()


# --- killed, stopped, failed ---------------------------------------------------------------------

LONG = ("--clients", 4, "--set", "data.samples=400", "--batch-size", 8, "--epochs", 8)
LONG = (*LONG, "--rounds", 4, "--methods", "local,fedavg", "--seeds", 2, "--jobs", 2, "--verbose")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The same, never stopped."""
    tree = {"data": {"clients": 4, "samples": 400}, "train": {"batch_size": 8, "epochs": 8}}
    place = tmp_path_factory.mktemp("whole") / "w"
    tree["run"] = {"rounds": 4}
    return coterie.compare(tree, ["local", "fedavg"], seeds=2, directory=place, jobs=2).directory


def until(process, pattern):
    for line in process.stderr:
        if re.search(pattern, line):
            return
    raise AssertionError(f"it never said {pattern}")


def alone_soon(group):
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def children(pid):
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_killed_and_stopped_and_continued_as_if_never_stopped(cli, start, whole):
    process = start("compare", *LONG, "--dir", "c")
    until(process, "seed 0 +round 2/4")
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=PATIENCE)
    assert alone_soon(process.pid)  # nobody is left at work
    assert not Path("c/comparison.json").exists()
    process = start("compare", "--resume", "c", "--jobs", 2, "--verbose")
    until(process, "seed 1 +round 1/4")
    finished = {p: p.stat().st_mtime_ns for p in Path("c").glob("*/*/result.json")}
    os.killpg(process.pid, signal.SIGINT)  # a terminal tells the whole group
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert "continue with: coterie compare --resume c" in err.splitlines()[-1]
    assert alone_soon(process.pid)
    assert finished
    resumed = cli("compare", "--resume", "c")
    assert resumed.code == 0, resumed.err
    assert {p: p.stat().st_mtime_ns for p in finished} == finished
    later = [
        json.loads(line)["done"]
        for path in Path("c").glob("*/*/sessions.jsonl")
        for line in path.read_text().splitlines()[1:]
    ]
    assert max(later) > 0  # from a checkpoint, not from the beginning
    assert rows_of("c", "seconds") == rows_of(whole, "seconds")
    for one in Path("c").glob("*/*/clients.csv"):
        assert one.read_text() == Path(whole, *one.parts[1:]).read_text()


def test_a_run_whose_process_is_killed_goes_on(start, whole):
    process = start("compare", *LONG, "--dir", "c")
    until(process, "round 1/4")
    os.kill(children(process.pid)[0], signal.SIGKILL)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    note = "seed 0: its process was killed (signal 9); it continues in another process"
    assert err.count(note) == 1
    assert len(rows_of("c")) == 4
    assert rows_of("c", "seconds") == rows_of(whole, "seconds")


BUSY = """
import os, time
from coterie.experiment.compare.jobs import Job, Look, Ready, side_by_side
from coterie.experiment.signals import stoppable
def work(watch):
    os.write(1, b"at work\\n")
    time.sleep(100)  # says nothing for long
jobs = [Job(name, lambda: Ready(1, "accuracy", work)) for name in "ab"]
with stoppable():
    side_by_side(jobs, 2, Look())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_nobody_works_on_for_a_process_that_is_gone(number):
    words = [sys.executable, "-c", BUSY]
    process = subprocess.Popen(words, stdout=-1, stderr=-1, text=True, start_new_session=True)
    assert [process.stdout.readline() for _ in "ab"] == ["at work\n"] * 2
    process.send_signal(number)
    process.wait(timeout=PATIENCE)
    assert alone_soon(process.pid)
    process.communicate()


RACE = """
import multiprocessing.context, os, signal, time
from coterie.experiment.compare.jobs import Job, Look, Ready, side_by_side
from coterie.experiment.signals import stoppable
start = multiprocessing.context.ForkProcess.start
def interrupted(self):
    start(self)
    os.kill(os.getpid(), signal.SIGINT)  # it waits until the process is made
multiprocessing.context.ForkProcess.start = interrupted
with stoppable():
    try:
        ready = Ready(1, "accuracy", lambda watch: time.sleep(100))
        side_by_side([Job("a", lambda: ready)], 2, Look())
    except KeyboardInterrupt:
        print([p for p in open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read().split()])
        os._exit(0)
"""


def test_a_run_that_was_just_being_started_is_ended_too():
    words = [sys.executable, "-c", RACE]
    ended = subprocess.run(
        words, capture_output=True, text=True, timeout=60, start_new_session=True
    )
    assert (ended.stdout, ended.stderr) == ("[]\n", "")


def test_a_run_that_nobody_listens_to_ends_without_a_word(capfd):
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")

    def work(watch):
        watch({"round": 1})

    process = context.Process(target=_work, args=(theirs, work, [ours], os.getpid()))
    ours.close()
    process.start()
    process.join(20)
    assert process.exitcode == 1
    assert capfd.readouterr().err == ""


def test_who_dies_twice_has_failed_and_others_have_not(tmp_path):
    lives = tmp_path / "lives"  # coverage may leave files of its own beside it
    lives.mkdir()

    def job(name, deaths):
        def work(watch):
            with (lives / name).open("a") as file:
                file.write(f"{os.getpid()}\n")
            if len((lives / name).read_text().split()) <= deaths:
                os.kill(os.getpid(), signal.SIGKILL)

        return Job(name, lambda: Ready(1, "accuracy", work))

    failed = side_by_side([job("twice", 9), job("once", 1), job("never", 0)], 2, Look())
    assert list(failed) == ["twice"]
    assert isinstance(failed["twice"], EngineError)
    assert "was killed (signal 9), 2 times" in str(failed["twice"])
    tries = {p.name: len(set(p.read_text().split())) for p in lives.iterdir()}
    assert tries == {"twice": 2, "once": 2, "never": 1}


def test_a_mistake_of_ours_fails_one_run_and_is_shown(capfd):
    def wrong(watch):
        raise ZeroDivisionError("of ours")

    jobs = [
        Job("wrong", lambda: Ready(1, "accuracy", wrong)),
        Job("right", lambda: Ready(1, "accuracy", lambda watch: None)),
    ]
    failed = side_by_side(jobs, 2, Look())
    assert str(failed["wrong"]) == "it crashed with ZeroDivisionError: of ours"
    assert "Traceback" in capfd.readouterr().err


@method
def doomed() -> Method:
    """Gives up in its first round."""

    def round(fed, state: State, info) -> State:
        raise TrainingError("it gave up")

    return replace(coterie.fedavg(), round=round)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_run_that_fails_does_not_destroy_the_others(cli, small, monkeypatch, jobs):
    monkeypatch.setitem(METHODS, "doomed", functools.partial(doomed))
    words = ("compare", *small, "--rounds", 1, "--seeds", 2, "--methods", "doomed,local")
    ended = cli(*words, "--dir", "c", "--jobs", jobs, "-q")
    ended.says(5, "it gave up", "doomed, seed 0 failed (and 1 more)", "compare --resume c")
    assert "failed: doomed, seed 1 (" in ended.out
    assert next(line for line in ended.out.splitlines() if line.startswith("local "))
    kept = json.loads(Path("c/comparison.json").read_text())
    assert list(kept["failed"]) == ["doomed, seed 0", "doomed, seed 1"]
    assert [row["method"] for row in kept["rows"]] == ["local", "local"]


def test_a_run_that_is_asked_to_stop_does_not_stop_the_others(cli, small, monkeypatch):
    line = progress.round_line

    def ask(event, *rest):
        place = Path("c/local/seed-0")
        if not Path("c/local/seed-1").exists():
            RunDir(place).ask_to_stop()
        return line(event, *rest)

    words = ("compare", *small, "--rounds", 2, "--seeds", 2, "--methods", "local", "--dir", "c")
    with monkeypatch.context() as patch:
        patch.setattr(progress, "round_line", ask)
        ended = cli(*words, "--verbose")
    ended.says(130, "stopped on request: local, seed 0", "compare --resume c")
    assert Path("c/local/seed-1/result.json").exists()
    assert not Path("c/local/seed-0/result.json").exists()
    assert cli("compare", "--resume", "c", "-q").code == 0
    assert [row["seed"] for row in rows_of("c")] == [0, 1]


# --- damaged, tracked, without a pace ------------------------------------------------------------


def test_a_damaged_run_is_done_again(cli, small):
    words = ("compare", *small, "--rounds", 1, "-q", "--methods", "local,fedavg", "--seeds", 2)
    assert cli(*words, "--dir", "c").code == 0
    before = rows_of("c", "seconds")
    whole = Path("c/fedavg/seed-1/result.json").stat().st_mtime_ns
    Path("c/local/seed-0/result.json").write_text("")
    Path("c/local/seed-1/clients.csv").unlink()
    Path("c/fedavg/seed-0/result.json").write_text("{}")
    ended = cli("compare", "--resume", "c", "-q")
    assert ended.code == 0, ended.err
    assert rows_of("c", "seconds") == before
    assert Path("c/fedavg/seed-1/result.json").stat().st_mtime_ns == whole


def test_gains_are_those_over_local_whatever_its_title(cli, small):
    words = ("compare", *small, "--rounds", 1, "-q", "--methods", "local:layer_interval=2,fedavg")
    assert cli(*words, "--vary", "method.layer_interval=1,3", "--dir", "c").code == 0
    rows = {row["method"]: row for row in rows_of("c")}
    titles = ["fedavg layer_interval=1", "fedavg layer_interval=3"]
    assert list(rows) == ["local layer_interval=2", *titles]
    assert rows["local layer_interval=2"]["gain"] is None
    for title in titles:
        gain = rows[title]["received"] - rows["local layer_interval=2"]["received"]
        assert rows[title]["gain"] == pytest.approx(gain)


def steps(place):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(place / "tensorboard"), {"scalars": 0}).Reload()
    return [s.step for s in found.Scalars("received/loss")]


def test_every_run_of_a_sweep_is_tracked_once(cli, small):
    pytest.importorskip("tensorboard")
    words = (
        "compare",
        *small,
        "--rounds",
        2,
        "-q",
        "--methods",
        "fedavg",
        "--track",
        "tensorboard",
    )
    words = (*words, "--jobs", 2, "--dir", "c")
    ended = cli(*words, "--seeds", 2)
    assert (ended.code, ended.err) == (0, "")
    assert [steps(Path("c/fedavg", f"seed-{s}")) for s in (0, 1)] == [[1, 2]] * 2
    more = cli("compare", "--resume", "c", "--seeds", 3, "--track", "tensorboard", "-q")
    assert more.code == 0, more.err
    assert [steps(Path("c/fedavg", f"seed-{s}")) for s in range(3)] == [[1, 2]] * 3
    with pytest.raises(coterie.CoterieError, match="a comparison takes names"):
        coterie.compare(QUICK, "local", directory="d", track=[object()])
    coterie.compare(QUICK, "fedavg", directory="d", track="tensorboard", jobs=1)
    assert steps(Path("d/fedavg")) == [1, 2]
