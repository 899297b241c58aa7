"""Trackers: what they are told, and that they cost a run nothing but what they would have written.

Files of TensorBoard and stores of MLflow are read back with these libraries' own readers, and
compared with ``events.jsonl``.
"""

import json
import os
import shutil
import threading
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import coterie
import forked
from coterie import tracking as module
from coterie.engines.loop import Loop
from coterie.errors import ConfigError, Interrupted
from coterie.experiment.config import experiment_of, parse
from coterie.experiment.experiment import execute, with_settings
from coterie.results.rundir import RunDir, rounds_of
from coterie.tracking import tracking
from coterie.tracking.values import flat, numbers

pytest.importorskip("tensorboard")
pytest.importorskip("mlflow")

SMALL = {
    "data": {"clients": 5},
    "shift": {"name": "rotation"},
    "method": {"name": "ifca", "k": 2},
    "evaluation": {"adapt_every": 2},
    "run": {"rounds": 5, "engine": "loop", "holdout": 1, "checkpoint_every": 3},
}


class Recorder:
    def __init__(self):
        self.calls, self.threads = [], set()

    def begin(self, about):
        self.about = about
        self._call("begin")

    def event(self, event):
        self._call(event.get("event", event["round"]))

    def end(self, status, summary):
        self.summary = summary
        self._call(status)

    def _call(self, what):
        self.calls.append(what)
        self.threads.add(threading.current_thread().name)


def rounds_in(place):
    return rounds_of(RunDir(Path(place)).read_events())


def board(place):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    whole = dict.fromkeys(("scalars", "tensors", "histograms"), 0)
    return EventAccumulator(str(place / "tensorboard"), whole).Reload()


def texts(place, name):
    """As TensorBoard's own page reads them."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    found = EventAccumulator(str(place / "tensorboard"), {"tensors": 0}).Reload()
    return [(t.step, t.tensor_proto.string_val[0].decode()) for t in found.Tensors(name)]


def store(place):
    from mlflow import MlflowClient

    kept = json.loads((place / "mlflow.json").read_text())
    client = MlflowClient(kept["tracking_uri"])
    return client, client.get_run(kept["run_id"])


@pytest.fixture(scope="module", autouse=True)
def _no_server():
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """A run with all trackers: it failed after round 4, and went on from its checkpoint of 3."""
    place = tmp_path_factory.mktemp("tracked") / "run"
    first, second = Recorder(), Recorder()

    def fail(event):
        if event["round"] == 4:
            raise RuntimeError("a crash")

    both = ["tensorboard", "mlflow"]
    with pytest.raises(RuntimeError):
        coterie.run(SMALL, place, watch=fail, track=[*both, first])
    failed = store(place)[1].info.status
    resumed = tracking([*both, second], place)
    result = execute(experiment_of(parse(SMALL)), place, resume=True, track=resumed)
    return place, result, first, second, failed


@pytest.fixture(scope="module")
def untracked():
    return coterie.run(SMALL)


def test_a_tracker_is_told_everything_in_order_and_in_one_thread(tracked):
    _, result, first, second, _ = tracked
    assert first.calls == ["begin", 1, 2, 3, 4, "failed"]
    assert second.calls == ["begin", 4, 5, "admission", "finished"]
    assert [len(first.threads), len(second.threads)] == [1, 1]
    assert threading.main_thread().name not in first.threads
    assert first.summary == {}
    assert second.summary == result.summary


def test_what_it_is_told_of_the_run(tracked):
    place, _, first, second, _ = tracked
    assert first.about["history"] == []
    assert [e["round"] for e in second.about["history"]] == [1, 2, 3]
    told = {k: second.about[k] for k in ("method", "rounds", "seed", "judged_by", "directory")}
    assert told == {
        "method": "ifca",
        "rounds": 5,
        "seed": 0,
        "judged_by": "accuracy",
        "directory": place,
    }
    assert second.about["config"]["method"]["k"] == 2
    assert second.about["versions"]["coterie"] == coterie.__version__


def test_tensorboard_has_every_round_once_with_the_values_of_the_events(tracked):
    place = tracked[0]
    found = board(place)
    expected: dict[str, list] = {}
    for event in rounds_in(place):
        for name, value in numbers(event).items():
            expected.setdefault(name, []).append((event["round"], np.float32(value)))
    assert set(expected) <= set(found.Tags()["scalars"])
    for name, points in expected.items():
        assert [(s.step, np.float32(s.value)) for s in found.Scalars(name)] == points, name
    # By hand, so that what is compared is not only what one function makes of both.
    events = rounds_in(place)
    assert [s.step for s in found.Scalars("received/accuracy")] == [1, 2, 3, 4, 5]
    assert [s.step for s in found.Scalars("adapted/accuracy")] == [2, 4]
    assert found.Scalars("bytes/total")[-1].value == np.float32(
        events[-1]["total_bytes"]["down"] + events[-1]["total_bytes"]["up"]
    )
    assert found.Scalars("received/worst")[2].value == np.float32(events[2]["received"]["worst"])
    assert found.Scalars("groups")[0].value == len({*events[0]["groups"]} - {None})


def test_tensorboard_has_clients_scores_and_texts(tracked):
    place, result, *_ = tracked
    found = board(place)
    histograms = found.Histograms("clients/received")
    assert [h.step for h in histograms] == [1, 2, 3, 4, 5]
    own = [s for s in rounds_in(place)[-1]["client_scores"]["received"] if s is not None]
    last = histograms[-1].histogram_value
    assert (last.num, last.min, last.max) == (4, min(own), max(own))
    assert last.sum == pytest.approx(sum(own))
    [(step, told)] = texts(place, "configuration/text_summary")
    assert step == 0
    assert 'name = "ifca"' in told
    [(step, told)] = texts(place, "result/text_summary")
    assert step == 6
    shown = json.loads(told.strip("`").removeprefix("json"))
    assert shown["received"] == result.summary["received"]


def test_mlflow_has_one_run_with_every_round_once(tracked):
    place, *_, failed = tracked
    assert failed == "FAILED"
    client, run = store(place)
    assert run.info.status == "FINISHED"
    assert len(client.search_runs([run.info.experiment_id])) == 1
    for name in ("received/accuracy", "received/worst", "bytes/total", "seconds/train", "groups"):
        told = client.get_metric_history(run.info.run_id, name)
        assert [m.step for m in told] == [1, 2, 3, 4, 5], name
        if name != "seconds/train":  # of the round that was done twice it is the first one's
            assert [m.value for m in told] == [numbers(e)[name] for e in rounds_in(place)], name
    adapted = client.get_metric_history(run.info.run_id, "adapted/accuracy")
    assert [m.step for m in adapted] == [2, 4]


def test_mlflow_has_parameters_tags_and_tables(tracked):
    place, result, *_ = tracked
    client, run = store(place)
    assert run.data.params["method.k"] == "2"
    assert run.data.params["run.holdout"] == "1"
    assert run.data.tags["method"] == "ifca"
    assert run.data.tags["seed"] == "0"
    assert run.data.tags["status"] == "finished"
    assert run.data.tags["version.coterie"] == coterie.__version__
    came = result.summary["newcomers"]
    newcomers = client.get_metric_history(run.info.run_id, "newcomers/received/accuracy")
    assert [m.value for m in newcomers] == [came["received"]["accuracy"]]
    where = Path(run.info.artifact_uri.removeprefix("file://")) / "run"
    assert (where / "clients.csv").read_text() == (place / "clients.csv").read_text()
    assert json.loads((where / "result.json").read_text()) == RunDir(place).read_result()
    assert tomllib.loads((where / "config.toml").read_text()) == RunDir(place).read_config()


def test_a_finished_run_that_is_resumed_repeats_nothing(tracked, tmp_path):
    place = tracked[0]
    again = tmp_path / "run"
    shutil.copytree(place, again)
    made = with_settings(experiment_of(parse(SMALL)), rounds=6)
    execute(made, again, resume=True, track=tracking(["tensorboard"], again))
    found = board(again)
    for name in ("received/accuracy", "bytes/up"):
        assert [s.step for s in found.Scalars(name)] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in texts(again, "result/text_summary")] == [7]
    assert [step for step, _ in texts(again, "configuration/text_summary")] == [0]


def test_rounds_from_before_tracking_are_made_up_for(tmp_path):
    """Asked for only when a run is resumed, trackers still have it from its first round."""
    config = {**SMALL, "run": {"rounds": 4, "engine": "loop"}}

    def stop(event):
        if event["round"] == 2:
            RunDir(tmp_path / "run").ask_to_stop()

    with pytest.raises(Interrupted):
        coterie.run(config, tmp_path / "run", watch=stop)
    followed = tracking(["tensorboard", "mlflow"], tmp_path / "run")
    execute(experiment_of(parse(config)), tmp_path / "run", resume=True, track=followed)
    steps = [s.step for s in board(tmp_path / "run").Scalars("received/loss")]
    client, run = store(tmp_path / "run")
    told = client.get_metric_history(run.info.run_id, "received/loss")
    assert steps == [m.step for m in told] == [1, 2, 3, 4]


def test_scores_that_come_with_the_next_round_are_there_once(tmp_path, monkeypatch):
    """As in a real federation: a round is told of when its scores are there, after a crash too."""
    monkeypatch.setattr(Loop, "piggybacks", True)
    config = {"data": {"clients": 4}, "run": {"rounds": 5, "engine": "loop"}}
    place, first, second = tmp_path / "run", Recorder(), Recorder()

    def fail(event):
        if event["round"] == 2:  # told of while round 3's orders are already answered
            raise RuntimeError("a crash")

    with pytest.raises(RuntimeError):
        coterie.run(config, place, watch=fail, track=["tensorboard", "mlflow", first])
    RunDir(place).checkpoints.joinpath("round-000003.json").unlink()  # it died before this one
    followed = tracking(["tensorboard", "mlflow", second], place)
    execute(experiment_of(parse(config)), place, resume=True, track=followed)
    assert first.calls == ["begin", 1, 2, "failed"]
    assert second.calls == ["begin", 2, 3, 4, 5, "finished"]
    assert [e["round"] for e in second.about["history"]] == [1]
    assert [s.step for s in board(place).Scalars("received/loss")] == [1, 2, 3, 4, 5]
    client, run = store(place)
    told = client.get_metric_history(run.info.run_id, "received/loss")
    assert [(m.step, m.value) for m in told] == [
        (e["round"], e["received"]["loss"]) for e in rounds_in(place)
    ]


def test_a_run_that_was_stopped_is_killed_there(tmp_path):
    def stop(event):
        raise KeyboardInterrupt

    recorder = Recorder()
    with pytest.raises(KeyboardInterrupt):
        coterie.run(SMALL, tmp_path / "run", watch=stop, track=["mlflow", recorder])
    assert recorder.calls == ["begin", 1, "stopped"]
    assert store(tmp_path / "run")[1].info.status == "KILLED"


def without_seconds(history):
    return [{k: v for k, v in event.items() if k != "seconds"} for event in history]


def test_tracking_changes_no_bit(tracked, untracked):
    result = tracked[1]
    assert without_seconds(result.history) == without_seconds(untracked.history)
    assert result.clients == untracked.clients
    for client in range(5):
        ours, theirs = result.weights(client).vector, untracked.weights(client).vector
        assert ours.numpy().tobytes() == theirs.numpy().tobytes()


# --- trackers that fail --------------------------------------------------------------------------


class Failing:
    def __init__(self, *fails, error=ValueError):
        self.fails, self.error, self.ended, self.asked = fails, error, None, 0

    def begin(self, about):
        if "begin" in self.fails:
            raise self.error("no\nway")

    def event(self, event):
        self.asked += 1
        if "event" in self.fails or event["round"] in self.fails:
            raise self.error("no way")

    def end(self, status, summary):
        self.ended = status
        if "end" in self.fails:
            raise self.error("no way")


@pytest.mark.parametrize(
    ("fails", "missed"),
    [
        (("begin",), "5 of 5 rounds were not tracked"),
        (("event",), "5 of 5 rounds were not tracked"),
        ((2, 4), "2 of 5 rounds were not tracked"),
        (("end",), "the end of the run was not tracked"),
    ],
)
@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_a_tracker_that_fails_ends_nothing_and_is_said(untracked, capsys, fails, missed, error):
    failing, whole = Failing(*fails, error=error), Recorder()
    result = coterie.run(SMALL, track=[failing, whole])
    assert result.clients == untracked.clients
    assert whole.calls == ["begin", 1, 2, 3, 4, 5, "admission", "finished"]
    first, second = capsys.readouterr().err.splitlines()
    why = f"Failing could not track the run ({error.__name__}: no way); the run continues"
    assert first == f"note: {why}"
    assert second == f"note: Failing: {missed}"
    assert failing.ended == (None if "begin" in fails else "finished")
    # Who never began is left alone, and so is who failed three times in a row, but for the end.
    assert failing.asked == {"begin": 0, "event": 3}.get(fails[0], 6)


def test_a_tracker_that_hangs_holds_up_nothing_for_long(monkeypatch, capsys):
    monkeypatch.setitem(module._PATIENCE, "finished", 0.2)
    free = threading.Event()

    class Hanging(Recorder):
        def event(self, event):
            if event["round"] == 2:
                free.wait(60)

    began = time.monotonic()
    coterie.run(SMALL, track=Hanging())
    took = time.monotonic() - began
    free.set()
    assert took < 20
    assert capsys.readouterr().err == "note: Hanging: 4 of 5 rounds were not tracked\n"


def test_a_server_that_is_away_is_one_sentence(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    result = coterie.run(SMALL, tmp_path / "run", track=["mlflow"])
    assert result.rounds == 5
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("note: mlflow could not track the run (MlflowException: API")
    assert second == "note: mlflow: 5 of 5 rounds were not tracked"


def test_the_runs_of_a_sweep_share_a_store_and_have_names_of_their_own(tmp_path):
    from mlflow import MlflowClient

    sweep = {"sweep": {"seeds": 2, "methods": ["fedavg"]}, **SMALL}
    coterie.compare(sweep, directory=tmp_path / "sweep", track=["mlflow"], jobs=2)
    client = MlflowClient((tmp_path / "sweep" / "mlruns").as_uri())
    found = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert sorted(run.info.run_name for run in found) == ["fedavg/seed-0", "fedavg/seed-1"]
    assert {run.info.status for run in found} == {"FINISHED"}


def test_what_is_not_a_tracker_is_refused_before_anything_runs(tmp_path, monkeypatch):
    place = tmp_path / "run"
    with pytest.raises(ConfigError, match="unknown tracker 'mlfow'; did you mean 'mlflow'"):
        coterie.run(SMALL, place, track=["mlfow"])
    for wrong in (42, Recorder):  # a class is no tracker yet
        with pytest.raises(ConfigError, match="an object with begin, event and end"):
            coterie.run(SMALL, place, track=[wrong])
        with pytest.raises(ConfigError, match="an object with begin, event and end"):
            coterie.run(SMALL, place, track=wrong)
    with pytest.raises(ConfigError, match="give one, as in directory="):
        coterie.run(SMALL, track="tensorboard")
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    wanted = r"--track mlflow needs the extra: pip install 'coterie\[tracking\]'"
    with pytest.raises(ConfigError, match=wanted):
        coterie.run(SMALL, place, track=["mlflow"])
    assert not place.exists()


def test_a_run_that_is_refused_leaves_nothing_behind(tmp_path):
    def refuse(fed, setup):
        raise ConfigError("not with these clients")

    people = [(torch.randn(20, 3), torch.randint(0, 2, (20,))) for _ in range(3)]
    method, recorder = replace(coterie.fedavg(), init=refuse), Recorder()
    options = {"method": method, "engine": "loop", "directory": tmp_path / "run"}
    with pytest.raises(ConfigError, match="not with these clients"):
        coterie.simulate(people, track=["tensorboard", "mlflow", recorder], **options)
    assert list(tmp_path.iterdir()) == []
    assert recorder.calls == []


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path, capsys):
    place = tmp_path / "run"
    config = {"data": {"clients": 4}, "run": {"rounds": 2, "engine": "loop"}}

    coterie.run(config, place)
    (place / "tensorboard").write_text("in the way")
    longer = with_settings(experiment_of(parse(config)), rounds=4)
    execute(longer, place, resume=True, track=tracking("tensorboard", place))
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("note: tensorboard could not track the run (")
    assert second == "note: tensorboard: 2 of 2 rounds were not tracked"


def test_a_run_made_in_python_has_its_settings_there(tmp_path):
    torch.manual_seed(0)
    people = [(torch.randn(20, 3), torch.randint(0, 2, (20,))) for _ in range(3)]
    options = {"rounds": 2, "lr": 0.25, "engine": "pool", "workers": 1}
    coterie.simulate(people, directory=tmp_path / "run", track="mlflow", **options)
    _, run = store(tmp_path / "run")
    assert (run.data.params["train.lr"], run.data.params["run.rounds"]) == ("0.25", "2")
    assert run.data.tags["method"] == "fedavg"


def test_numbers_that_are_none_are_left_out():
    event = {
        "round": 1,
        "groups": [0, 0],
        "cohort": [0, 1],
        "lost": 1,
        "late": 0,
        "received": {"accuracy": 0.5, "worst_client": 3, "loss": float("nan"), "f1": None},
        "privacy": {"epsilon": 1.5, "delta": float("inf")},
        "total_bytes": {"down": 4, "up": 3},
        "clock": {"total": 2.5},
    }
    assert numbers(event) == {
        "received/accuracy": 0.5,
        "privacy/epsilon": 1.5,
        "clock/total": 2.5,
        "groups": 1.0,
        "bytes/total": 7.0,
        "clients/asked": 2.0,
        "clients/lost": 1.0,
        "clients/late": 0.0,
    }
    assert flat({"a": {"b": {"c": True}}, "d": None}) == {"a.b.c": True}


def test_long_values_and_many_parameters_are_taken(tmp_path):
    from coterie.tracking.mlflow import MLflow

    about = {
        "method": "m",
        "rounds": 1,
        "seed": 0,
        "judged_by": "accuracy",
        "versions": {},
        "history": [],
        "config": {"x": {f"k{n}": "v" * (9000 if not n else 1) for n in range(250)}},
    }
    tracker = MLflow(tmp_path)
    tracker.begin(about)
    tracker.end("finished", {})
    params = store(tmp_path)[1].data.params
    assert len(params) == 250
    assert params["x.k0"] == "v" * 500


def test_newcomers_that_are_admitted_again_are_there_once(tmp_path):
    from coterie.tracking.mlflow import MLflow

    tables = {"method": "m", "seed": 0, "rounds": 1, "versions": {}, "history": [], "config": {}}
    came = {"round": 1, "event": "admission", "received": {"r2": 0.5}, "adapted": {"r2": 0.75}}
    tracker = MLflow(tmp_path)
    tracker.begin(tables)
    for _ in range(2):
        tracker.event(came)
    client, run = store(tmp_path)
    told = client.get_metric_history(run.info.run_id, "newcomers/adapted/r2")
    assert [m.value for m in told] == [0.75]


def test_on_the_command_line_standard_output_is_the_result_alone(tmp_path):
    words = ["run", "--clients", "4", "--rounds", "2", "--engine", "loop", "--dir", "r", "--json"]
    words += ["--track", "tensorboard", "--track", "mlflow"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("MLFLOW")}
    ended = forked.run(*words, cwd=tmp_path, env=env)
    assert json.loads(ended.stdout)["directory"] == "r"
    assert [line[:17] for line in ended.stderr.splitlines()] == [
        *("fedavg  round 1/2", "fedavg  round 2/2")
    ]
    assert len(board(tmp_path / "r").Scalars("received/accuracy")) == 2
    assert store(tmp_path / "r")[1].info.status == "FINISHED"
