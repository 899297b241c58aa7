"""From a configuration to a run directory, and from there to models and predictions."""

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import coterie
from coterie.data import load
from coterie.experiment.export import reopen
from coterie.results.rundir import RunDir


def weights(directory, client=0):
    return reopen(Path(directory)).weights(client).vector


def settled(directory):
    """All that a run says at its end, but for the time it took."""
    directory = Path(directory)
    events, result = RunDir(directory).read_events(), RunDir(directory).read_result()
    for said in (*events, result):
        said.pop("seconds")
    result.pop("train_seconds")
    return events, result, (directory / "clients.csv").read_text()


def test_a_run_leaves_what_it_promises(cli, small):
    ended = cli("run", *small, "--rounds", 3, "--dir", "r", "--json")
    assert ended.code == 0
    said = json.loads(ended.out)
    kept = RunDir(Path("r")).read_result()
    assert said == {**kept, "directory": "r"}
    assert kept["rounds"] == 3
    assert 0 < kept["received"]["accuracy"] <= 1
    events = [json.loads(line) for line in Path("r/events.jsonl").read_text().splitlines()]
    assert [e["round"] for e in events] == [1, 2, 3]
    assert events[-1]["received"] == kept["received"]
    assert events[-1]["total_bytes"] == {k: kept["bytes"][k] for k in ("down", "up")}
    rows = list(csv.DictReader(io.StringIO(Path("r/clients.csv").read_text())))
    assert [row["client"] for row in rows] == ["0", "1", "2", "3"]
    mean = np.mean([float(row["received_accuracy"]) for row in rows])
    assert mean == pytest.approx(kept["received"]["accuracy"])
    assert sum(int(r["train"]) + int(r["val"]) + int(r["test"]) for r in rows) == 200
    assert sorted(p.name for p in Path("r/checkpoints").iterdir()) == [
        f"round-00000{n}.{ending}" for n in (2, 3) for ending in ("json", "safetensors")
    ]
    lines = ended.err.strip().splitlines()
    assert [line.split("  ")[:2] for line in lines] == [
        ["fedavg", f"round {n}/3"] for n in (1, 2, 3)
    ]


def test_the_summary_for_people(cli, small):
    ended = cli("run", *small, "--rounds", 1, "--alone", "--quiet", "--dir", "a [b] c")
    assert ended.code == 0
    assert ended.err == ""
    assert [line.split()[0] for line in ended.out.splitlines()] == [
        *["received", "adapted", "alone", "best", "bytes", "exposed", "kept"]
    ]
    assert ended.out.splitlines()[-1].endswith("a [b] c")  # a path is no markup
    assert "gain" in Path("a [b] c/clients.csv").read_text().splitlines()[0]


def test_file_flags_and_sets_are_one_configuration(cli):
    tree = {
        "data": {"clients": 4, "samples": 200, "set": "digits"},
        "partition": {"name": "dirichlet", "alpha": 1.0},
        "shift": {"name": "rotation", "groups": 2},
        "model": {"name": "mlp", "hidden": [8]},
        "method": {"name": "fedprox", "mu": 0.01},
        "train": {"epochs": 2, "batch_size": 16, "lr": 0.1, "momentum": 0.5},
        "run": {"rounds": 1, "cohort": 0.5, "seed": 7, "engine": "loop", "workers": 1},
    }
    lines = []
    for name, section in tree.items():
        lines += [f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in section.items())]
    Path("c.toml").write_text("\n".join(lines))
    assert cli("run", "c.toml", "--dir", "file", "-q").code == 0
    flags = "--data digits --clients 4 --partition dirichlet --shift rotation --model mlp "
    flags += "--method fedprox --epochs 2 --batch-size 16 --lr 0.1 --momentum 0.5 --rounds 1 "
    flags += "--cohort 0.5 --seed 7 --engine loop --workers 1"
    rest = "data.samples=200 partition.alpha=1 shift.groups=2 model.hidden=[8] method.mu=0.01"
    sets = [word for item in rest.split() for word in ("--set", item)]
    sets[sets.index("partition.alpha=1")] = "partition.alpha=1.0"
    assert cli("run", *flags.split(), *sets, "--dir", "flags", "-q").code == 0
    every = [
        f"{name}.{k}={json.dumps(v)}" for name, section in tree.items() for k, v in section.items()
    ]
    words = [word for item in reversed(every) for word in ("--set", item)]
    assert cli("run", *words, "--dir", "sets", "-q").code == 0
    other = [item.replace("mu=0.01", "mu=0.5").replace("lr=0.1", "lr=9") for item in every]
    words = [word for item in other for word in ("--set", item)]
    Path("other.toml").write_text("[method]\nname = 'ifca'\nk = 3\n[train]\nlr = 3.0\n")
    words += ["--method", "fedprox", "--lr", "0.1", "--set", "method.mu=0.01"]
    words += ["--set", "train.lr=0.1"]
    assert cli("run", "other.toml", *words, "--dir", "override", "-q").code == 0
    made = {Path(d, "config.toml").read_bytes() for d in ("file", "flags", "sets", "override")}
    assert len(made) == 1
    assert b"mu = 0.01" in made.pop()
    python = coterie.run(tree, directory="python")
    assert Path("python/config.toml").read_bytes() == Path("file/config.toml").read_bytes()
    assert torch.equal(weights("flags"), python.weights(0).vector)
    assert settled("file") == settled("flags") == settled("python")


def test_the_config_of_a_run_makes_the_same_run(cli, small):
    flags = (*small, "--method", "ifca", "--set", "method.k=2", "--rounds", 2, "-q")
    assert cli("run", *flags, "--dir", "one").code == 0
    assert cli("run", "one/config.toml", "--dir", "two", "-q").code == 0
    assert settled("one") == settled("two")
    assert Path("one/config.toml").read_bytes() == Path("two/config.toml").read_bytes()


def test_the_environment_names_a_folder_unless_something_else_does(cli, table, monkeypatch):
    words = ("run", "--data", "csv", "--set", "data.options.label=kind", "--clients", 2, "-q")
    words += ("--set", 'data.options.columns=["site","target"]', "--engine", "loop", "--rounds", 1)
    monkeypatch.setenv("COTERIE_DATA", "/nowhere")
    assert cli(*words, "--dir", "a").code == 3
    assert cli(*words, "--dir", "a", "--folder", table).code == 0
    Path("c.toml").write_text(f"[data]\nfolder = {json.dumps(str(table))}\n")
    assert cli("run", "c.toml", *words[1:], "--dir", "b").code == 0  # only a default
    monkeypatch.setenv("COTERIE_DATA", str(table))
    assert cli(*words, "--dir", "c").code == 0
    assert cli("run", "--resume", "c", "-q").code == 0
    Path("c.toml").write_text('[data]\nfolder = "/nowhere"\n')
    assert cli("run", "c.toml", *words[1:], "--dir", "d", f"--folder={table}").code == 0


@pytest.mark.parametrize("method", [("fedavg",), ("fedper",), ("ifca", "--set", "method.k=2")])
def test_more_rounds_later_are_the_same_as_at_once(cli, small, method):
    flags = ("run", *small, "--method", *method, "--cohort", "0.5", "-q")
    assert cli(*flags, "--rounds", 2, "--dir", "parts").code == 0
    assert cli("run", "--resume", "parts", "--rounds", 4, "-q").code == 0
    assert cli(*flags, "--rounds", 4, "--dir", "whole").code == 0
    assert settled("parts") == settled("whole")
    for client in range(4):
        assert torch.equal(weights("parts", client), weights("whole", client))
    before = settled("parts")
    assert cli("run", "--resume", "parts", "-q").code == 0  # nothing left to do, nothing lost
    assert settled("parts") == before
    cli("run", "--resume", "parts", "--rounds", 3).says(2, "already has 4 rounds")


def test_a_run_can_go_on_with_another_engine(cli, small):
    assert cli("run", *small, "--rounds", 1, "--method", "fedper", "--dir", "a", "-q").code == 0
    words = ("--rounds", 2, "--engine", "pool", "--workers", 1, "-q")
    assert cli("run", "--resume", "a", *words).code == 0
    assert cli("run", *small, "--rounds", 2, "--method", "fedper", "--dir", "b", "-q").code == 0
    assert settled("a") == settled("b")


def test_resume_takes_nothing_that_would_change_the_run(cli, small):
    assert cli("run", *small, "--rounds", 1, "--dir", "a", "-q").code == 0
    for more in (("--lr", 1), ("--set", "train.lr=1"), ("a/config.toml",), ("--dir", "b")):
        cli("run", "--resume", "a", *more).says(2, "--resume uses the configuration of the run")


def test_export_is_the_model_of_the_run(cli, small):
    flags = (*small, "--method", "fedper", "--rounds", 2, "-q")
    assert cli("run", *flags, "--dir", "r").code == 0
    assert cli("export", "r", "--client", 2).code == 0
    assert cli("export", "r", "--client", 3, "--to", "other.safetensors").code == 0
    config = coterie.run("r/config.toml")
    for client, file in ((2, "client-2.safetensors"), (3, "other.safetensors")):
        found, wanted = load_file(file), config.weights(client).tensors()
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[k], wanted[k]) for k in wanted)
        module = config.model(client)
        module.load_state_dict(found)
    assert not torch.equal(load_file("client-2.safetensors")["head.bias"], found["head.bias"])
    with safe_open("other.safetensors", "pt") as file:
        about = file.metadata()
    assert about["method"] == "fedper"
    assert about["client"] == "3"
    assert about["rounds"] == "2"
    assert json.loads(about["classes"]) == [str(i) for i in range(10)]
    assert json.loads(about["shape"]) == [1, 8, 8]
    # An export is a start for another run.
    words = (*small, "--set", "model.start=other.safetensors", "--set", "train.epochs=0")
    assert cli("run", *words, "--rounds", 1, "--dir", "s", "-q").code == 0
    assert torch.equal(weights("s"), config.weights(3).vector)


def predicted(ended):
    assert ended.code == 0, ended.err
    return list(csv.DictReader(io.StringIO(ended.out)))


def test_predictions_on_images(cli, small):
    assert cli("run", *small, "--rounds", 2, "--method", "local", "--dir", "r", "-q").code == 0
    x = load("digits").x[:30]
    result = coterie.run("r/config.toml")
    shares, wanted = result.predict(1, torch.from_numpy(x)).softmax(-1).max(-1)
    np.save("first.npy", x)
    np.save("last.npy", np.moveaxis(x, 1, 3))
    np.save("grey.npy", x[:, 0])
    np.save("wide.npy", x.astype(np.int64))
    np.savez("named.npz", x=x, other=np.zeros(3))
    for file in ("first.npy", "last.npy", "grey.npy", "wide.npy", "named.npz"):
        rows = predicted(cli("predict", "r", file, "--client", 1))
        assert [int(row["class"]) for row in rows] == wanted.tolist()
        assert [int(row["sample"]) for row in rows] == list(range(30))
        for row, share in zip(rows, shares.tolist(), strict=True):
            assert float(row["probability"]) == pytest.approx(share, abs=1e-6)
    other = predicted(cli("predict", "r", "first.npy", "--client", 0))
    assert [row["probability"] for row in other] != [row["probability"] for row in rows]
    assert cli("predict", "r", "first.npy", "--client", 1, "--to", "p.csv").out == ""
    assert list(csv.DictReader(io.StringIO(Path("p.csv").read_text()))) == rows


TABLE = ("--data", "csv", "--engine", "loop", "--partition", "column", "--set", "partition.by=site")


@pytest.mark.parametrize("target", ["kind", "target"])
def test_predictions_on_tables(cli, table, target):
    """Raw features go in: what a run standardised by, it applies again."""
    other = "target" if target == "kind" else "kind"
    words = ["run", *TABLE, "--folder", table, "--clients", 3, "--rounds", 2, "--dir", "r", "-q"]
    words += ["--set", f"data.options.label={target}", "--lr", "0.01"]
    words += ["--set", f'data.options.columns=["site", "{other}"]']
    if target == "target":
        words += ["--set", "data.options.target=regression"]
    assert cli(*words).code == 0
    result = coterie.run("r/config.toml")
    population = result.plan.population
    _, *lines = table.read_text().splitlines()
    raw = np.array([[float(v) for v in line.split(",")[:2]] for line in lines], np.float32)
    x = (raw - population.mean.numpy()) / population.std.numpy()
    assert abs(x.mean()) < 0.2 < raw.mean()
    wanted = result.predict(0, torch.from_numpy(x))
    np.save("raw.npy", raw)
    np.savez("raw.npz", x=raw)
    swapped = [",".join([*line.split(",")[1::-1], "?"]) for line in lines]
    Path("swapped.csv").write_text("\n".join(["weight,height,note", *swapped]))
    for file in ("raw.npy", "raw.npz", table, "swapped.csv"):
        rows = predicted(cli("predict", "r", file, "--client", 0))
        if target == "kind":
            names = ["small", "tall"]
            assert [r["class"] for r in rows] == [names[i] for i in wanted.argmax(-1).tolist()]
        else:
            assert [float(r["prediction"]) for r in rows] == pytest.approx(
                wanted.reshape(-1).tolist(), rel=1e-5
            )


def test_predictions_on_texts(cli):
    rng = np.random.default_rng(0)
    words = [["good", "fine", "great", "nice"], ["bad", "poor", "awful", "sad"]]
    lines = ["text,label"]
    lines += [f'"{" ".join(rng.choice(words[i % 2], 4))}, it is!",{i % 2}' for i in range(80)]
    Path("reviews.csv").write_text("\n".join(lines))
    flags = ["run", "--data", "text", "--folder", "reviews.csv", "--clients", 2, "--model", "text"]
    flags += ["--set", "data.options.length=8", "--rounds", 5, "--lr", "1.0", "--engine", "loop"]
    assert cli(*flags, "--set", "train.epochs=5", "--dir", "r", "-q").code == 0
    Path("new.csv").write_text("id,text\n1,Great FINE unheard\n2,awful bad bad\n")
    rows = predicted(cli("predict", "r", "new.csv", "--client", 0))
    assert [row["class"] for row in rows] == ["0", "1"]
    np.save("tokens.npy", np.array([[2, 3, 0, 0, 0, 0, 0, 0]]))
    assert len(predicted(cli("predict", "r", "tokens.npy", "--client", 0))) == 1
    np.save("beyond.npy", np.array([[999, 3, 0, 0, 0, 0, 0, 0]]))
    cli("predict", "r", "beyond.npy", "--client", 0).says(3, "token number 999 is outside")


def test_lists(cli):
    for words, names in (
        (["methods"], ["fedavg", "ifca", "clustered"]),
        (["data"], ["digits", "fashion-mnist", "label"]),
        (["partitions"], ["dirichlet", "alpha", "rotation"]),
        (["models"], ["resnet18", "hidden=(64,)"]),
        (["methods", "ifca"], ["Rule\n", "NeurIPS 2020", "k"]),
        (["--version"], [coterie.__version__]),
        (["--help"], ["compare", "predict", "Exit codes"]),
    ):
        ended = cli(*words)
        assert ended.code == 0
        for name in names:
            assert name in ended.out
    cli("methods", "fedagv").says(2, "did you mean 'fedavg'")
