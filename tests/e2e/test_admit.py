"""Newcomers on the command line: held out by a run, or admitted to one that is over."""

import csv
import hashlib
import io
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import coterie
import forked
from coterie.data import load
from coterie.experiment.admit import admit_client, newcomer_data
from coterie.experiment.export import reopen
from coterie.methods import METHODS
from coterie.results.rundir import RunDir

KINDS = ("--clients", 12, "--shift", "rotation", "--set", "shift.groups=2", "--engine", "loop")
FEDCLUST = ("--method", "fedclust", "--set", "method.clusters=2", "-q")


def tree(folder):
    """Every file below: what is in it and when it was written."""
    return {
        str(p): (hashlib.sha256(p.read_bytes()).hexdigest(), p.stat().st_mtime_ns)
        for p in sorted(Path(folder).rglob("*"))
        if p.is_file()
    }


def settled(directory):
    """All that a run says at its end, but for the time it took."""
    directory = Path(directory)
    events, result = RunDir(directory).read_events(), RunDir(directory).read_result()
    for said in (*events, result):
        said.pop("seconds", None)
    result.pop("train_seconds")
    return events, result, (directory / "clients.csv").read_text()


def rows_of(directory):
    return list(csv.DictReader(io.StringIO(Path(directory, "clients.csv").read_text())))


def some_digits(quarters=0, count=120):
    """Digits, turned by so many quarters."""
    raw = load("digits")
    return np.ascontiguousarray(np.rot90(raw.x[-count:], quarters, axes=(2, 3))), raw.y[-count:]


@pytest.fixture
def run(cli, small):
    """A small run of FedPer, whose clients keep something."""
    assert cli("run", *small, "--method", "fedper", "--rounds", 2, "--dir", "r", "-q").code == 0
    return "r"


# --- held out by a run ---------------------------------------------------------------------------


def test_flags_and_what_a_run_says_of_newcomers(cli):
    words = ("run", *KINDS, *FEDCLUST, "--rounds", 2, "--holdout", 4, "--admit-epochs", 3)
    ended = cli(*words, "--dir", "r")
    assert ended.code == 0, ended.err
    config = Path("r/config.toml").read_text()
    assert "holdout = 4\n" in config
    assert "admit_epochs = 3\n" in config
    came = json.loads(Path("r/result.json").read_text())["newcomers"]
    lines = ended.out.splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith("newcomers  "))
    for title in ("received", "adapted"):
        assert f"{100 * came[title]['accuracy']:.1f} % {title}" in lines[place]
    assert "after 3 epochs" in lines[place]
    assert f"{came['bytes']['down'] / 1000:.2f} kB down" in lines[place]
    assert lines[place + 1].strip().startswith("4 joined: ")
    rows = rows_of("r")
    new = [row for row in rows if row["newcomer"] == "1"]
    assert [int(row["client"]) for row in new] == came["clients"]
    home = {(row["true_group"], row["group"]) for row in rows if row["newcomer"] == "0"}
    assert len(home) == 2
    assert {(row["true_group"], row["group"]) for row in new} <= home
    mean = np.mean([float(row["adapted_accuracy"]) for row in new])
    assert mean == pytest.approx(came["adapted"]["accuracy"])
    for client in came["clients"]:  # a checkpoint is from before they came
        cli("export", "r", "--client", client).says(2, f"client {client} was held out")
    member = next(row["client"] for row in rows if row["newcomer"] == "0")
    assert cli("export", "r", "--client", member).code == 0


def test_newcomers_in_a_comparison(cli, small):
    words = ("compare", *small, "--rounds", 1, "--holdout", 1, "--admit-epochs", 2, "-q")
    ended = cli(*words, "--methods", "local,fedavg", "--dir", "c")
    assert ended.code == 0, ended.err
    assert "comers" in ended.out
    held = [json.loads(Path(f"c/{m}/result.json").read_text()) for m in ("local", "fedavg")]
    assert held[0]["newcomers"]["clients"] == held[1]["newcomers"]["clients"]
    assert held[0]["newcomers"]["epochs"] == 2


def closed():
    """A method that takes nobody in later."""
    return replace(coterie.fedavg(), name="closed", admit=None)


def test_what_cannot_be_held_out(cli, small, monkeypatch):
    monkeypatch.setitem(METHODS, "closed", closed)
    for command, which in (("run", "--method"), ("compare", "--methods")):
        words = (command, *small, "--rounds", 1, "--dir", "r", "-q")
        cli(*words, which, "closed", "--holdout", 1).says(2, "closed has no way to admit newcomers")
        for count in (4, 5):
            ended = cli(*words, which, "fedavg", "--holdout", count)
            ended.says(2, f"run.holdout = {count} leaves none of 4 clients to train")
        cli(*words, which, "fedavg", "--holdout", -1).says(2, "run.holdout = -1")
        cli(*words, which, "fedavg", "--admit-epochs", -1).says(2, "run.admit_epochs = -1")
        assert not Path("r").exists()


def test_resume_takes_no_other_newcomers(cli, small):
    assert cli("run", *small, "--rounds", 1, "--holdout", 1, "--dir", "a", "-q").code == 0
    for more in (("--holdout", 2), ("--holdout", 0), ("--admit-epochs", 0)):
        cli("run", "--resume", "a", *more).says(2, "--resume uses the configuration of the run")


def test_killed_and_resumed(cli, start):
    words = ("--clients", 8, "--set", "data.samples=480", "--method", "fedclust", "--epochs", 2)
    words += ("--rounds", 30, "--holdout", 3, "--cohort", "0.5", "--workers", 2, "-q")
    assert cli("run", *words, "--dir", "whole").code == 0
    process = start("run", *words, "--dir", "parts")
    events = Path("parts/events.jsonl")
    while process.poll() is None and not (events.exists() and events.read_bytes().count(b"\n") > 5):
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not Path("parts/result.json").exists()
    forked.run("run", "--resume", "parts", "-q")  # by then the workers have left, too
    assert settled("parts") == settled("whole")
    assert cli("run", "--resume", "parts", "-q").code == 0  # finished: newcomers join again
    assert settled("parts") == settled("whole")
    assert cli("run", "--resume", "parts", "--engine", "loop", "-q").code == 0
    assert settled("parts") == settled("whole")


# --- admitted to a run that is over --------------------------------------------------------------


def test_the_model_is_the_one_whose_score_is_shown(cli, run):
    x, y = some_digits()
    np.savez("clinic.npz", x=x, y=y)
    before = tree(run)
    ended = cli("admit", run, "--client", "clinic.npz")
    assert ended.code == 0, ended.err
    told = json.loads(cli("admit", run, "--client", "clinic.npz", "--json", "--to", "m").out)
    assert tree(run) == before  # neither written to nor touched
    one, other = load_file("m"), load_file("clinic.safetensors")
    assert all(torch.equal(one[k], other[k]) for k in {**one, **other})
    assert told["model"] == "m"
    assert (told["client"], told["group"], told["epochs"]) == (4, 0, 5)
    assert told["samples"] == {"train": 86, "val": 10, "test": 24}
    titles = [line.split()[0] for line in ended.out.splitlines()]
    assert titles == ["joined", "received", "adapted", "bytes", "model"]
    assert "group 0" in ended.out
    for title, words in (("received", "on its 24 test"), ("adapted", "after 5 epochs on its 86")):
        assert f"{100 * told[title]['accuracy']:.1f} % {words}" in ended.out
    result = reopen(Path(run))
    data = newcomer_data(Path("clinic.npz"), Path(run), result.plan.population)
    module = result.model(0)
    module.load_state_dict(load_file("m"))
    answers = module(data.test.x / 127.5 - 1)
    hits = (answers.argmax(-1) == data.test.y).double()
    assert float(hits.mean()) == told["adapted"]["accuracy"]
    loss = torch.nn.functional.cross_entropy(answers, data.test.y)
    assert loss.item() == pytest.approx(told["adapted"]["loss"], rel=1e-6)
    assert told["adapted"]["loss"] < told["received"]["loss"]
    # The three parts are the file's samples, each once.
    parts = torch.cat([data.train.x, data.val.x, data.test.x]).numpy()
    assert sorted(map(bytes, parts)) == sorted(map(bytes, x))


def test_the_file_is_described_as_an_export_is(cli, run):
    np.savez("clinic.npz", **dict(zip("xy", some_digits(), strict=True)))
    assert cli("admit", run, "--client", "clinic.npz", "--epochs", 2).code == 0
    assert cli("export", run, "--client", 0).code == 0
    with safe_open("clinic.safetensors", "pt") as file:
        about, names = file.metadata(), set(file.keys())
    with safe_open("client-0.safetensors", "pt") as file:
        assert set(file.keys()) == names
        exported = file.metadata()
    assert {**exported, "client": "4"} == {k: about[k] for k in exported}
    more = {k: v for k, v in about.items() if k not in exported}
    assert more == {"group": "0", "epochs": "2", "admitted": "true"}
    # It is a start for another run, as an export is.
    words = ("--set", "model.start=clinic.safetensors", "--set", "model.hidden=[8]", "--rounds", 1)
    words += ("--set", "data.samples=200", "--clients", 4, "--engine", "loop", "--epochs", 0, "-q")
    assert cli("run", *words, "--dir", "s").code == 0


def test_newcomers_join_the_cluster_of_their_kind(cli):
    assert cli("run", *KINDS, *FEDCLUST, "--rounds", 2, "--dir", "r").code == 0
    home = {int(row["true_group"]): int(row["group"]) for row in rows_of("r")}
    assert len(set(home.values())) == 2
    for kind in (0, 1):
        x, y = some_digits(2 * kind, 150)
        np.savez("new.npz", x=x, y=y)
        told = json.loads(cli("admit", "r", "--client", "new.npz", "--json").out)
        assert told["group"] == home[kind]
        assert told["bytes"]["down"] > 0 < told["bytes"]["up"]


def test_without_test_data_there_is_no_score_but_a_model(cli, small):
    words = ("--rounds", 1, "--set", "data.test_fraction=0.0", "--dir", "r", "-q")
    assert cli("run", *small, *words).code == 0
    np.savez("new.npz", **dict(zip("xy", some_digits(), strict=True)))
    ended = cli("admit", "r", "--client", "new.npz")
    assert ended.code == 0, ended.err
    assert "it has no test samples, so there is no score" in ended.out
    assert Path("new.safetensors").exists()
    told = json.loads(cli("admit", "r", "--client", "new.npz", "--json").out)
    assert told["received"] == told["adapted"] == {}
    one = some_digits(count=1)
    np.savez("one.npz", x=one[0], y=one[1])
    assert cli("run", *small, "--rounds", 1, "--dir", "with", "-q").code == 0
    assert "no test samples" in cli("admit", "with", "--client", "one.npz").out


def test_a_run_that_was_stopped(cli, small, monkeypatch):
    words = ("run", *small, "--method", "ifca", "--set", "method.k=2", "-q")
    assert cli(*words, "--rounds", 2, "--dir", "whole").code == 0
    assert cli(*words, "--rounds", 2, "--dir", "stopped").code == 0
    for name in ("result.json", "clients.csv"):
        Path("stopped", name).unlink()
    np.savez("new.npz", **dict(zip("xy", some_digits(), strict=True)))
    said = [cli("admit", d, "--client", "new.npz", "--json").out for d in ("whole", "stopped")]
    assert said[0] == said[1]
    for path in Path("stopped/checkpoints").iterdir():
        path.unlink()
    cli("admit", "stopped", "--client", "new.npz").says(4, "there is no checkpoint")


def test_who_cannot_be_admitted(cli, small, monkeypatch):
    np.savez("new.npz", **dict(zip("xy", some_digits(), strict=True)))
    words = ("--shift", "rotation", "--set", "shift.groups=2", "--rounds", 1, "-q")
    assert cli("run", *small, *words, "--method", "oracle", "--dir", "o").code == 0
    ended = cli("admit", "o", "--client", "new.npz")
    ended.says(2, "method oracle cannot admit client 4: its true group is unknown")
    monkeypatch.setitem(METHODS, "closed", closed)
    assert cli("run", *small, *words, "--method", "closed", "--dir", "c").code == 0
    cli("admit", "c", "--client", "new.npz").says(2, "closed has no way to admit newcomers")
    assert cli("run", *small, *words, "--dir", "f").code == 0
    cli("admit", "f", "--client", "new.npz", "--epochs", -1).says(2, "epochs = -1")
    cli("admit", "f", "--client", "new.npz", "--to", "no/m").says(4, "there is no folder no")
    # Said before any work is done, and so before anything that is wrong with the data.
    cli("admit", "f", "--client", "nowhere.npz", "--to", "no/m").says(4, "there is no folder no")
    cli("admit", "nowhere", "--client", "new.npz").says(4, "nowhere is not a run directory")
    assert not list(Path().glob("*.safetensors"))


# --- what its data may look like -----------------------------------------------------------------


def test_images_in_every_form(cli, run):
    x, y = some_digits()
    Path("folder").mkdir()
    np.save("folder/x.npy", x)
    np.save("folder/y.npy", y)
    forms = {
        "plain": (x, y),
        "grey": (x[:, 0], y.astype(np.uint8)),
        "last": (np.moveaxis(x, 1, 3), y.astype(float)),
        "names": (x, y.astype(str)),
    }
    said = {cli("admit", run, "--client", "folder", "--json", "--to", "m").out}
    for name, (samples, labels) in forms.items():
        np.savez(f"{name}.npz", x=samples, y=labels)
        said.add(cli("admit", run, "--client", f"{name}.npz", "--json", "--to", "m").out)
    assert len(said) == 1
    assert said.pop()


BAD = {
    "no y": ({"x": "x"}, "there is no array 'y' in it, only ['x']"),
    "length": ({"x": "x[:7]", "y": "y"}, "7 samples but 120 labels"),
    "empty": ({"x": "x[:0]", "y": "y[:0]"}, "there are no samples in it"),
    "size": ({"x": "x[:, :, :7]", "y": "y"}, "the run's samples have the shape (N, 1, 8, 8)"),
    "float": ({"x": "x / 255", "y": "y"}, "multiply them by 255"),
    "label": ({"x": "x", "y": "y + 1"}, "unknown label '10'"),
    "name": ({"x": "x", "y": "np.where(y, 'one', '0')"}, "unknown label 'one'"),
    "half": ({"x": "x", "y": "y + .5"}, "unknown label"),
    "nan": ({"x": "x", "y": "np.where(y, y, np.nan)"}, "nan at row"),
    "wide": ({"x": "x", "y": "np.eye(10)[y]"}, "labels must be one per sample"),
    "none": ({"x": "x", "y": "np.array(3)"}, "a single number is not a list"),
    "complex": ({"x": "x", "y": "y * 1j"}, "labels must be numbers or texts"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arrays_are_a_sentence(cli, run, name):
    x, y = some_digits()
    arrays, sentence = BAD[name]
    np.savez("bad.npz", **{k: eval(v, {"x": x, "y": y, "np": np}) for k, v in arrays.items()})
    cli("admit", run, "--client", "bad.npz").says(3, "bad.npz", sentence)
    assert not Path("bad.safetensors").exists()


def test_bad_files_are_a_sentence(cli, run):
    cli("admit", run, "--client", "nowhere.npz").says(3, "no file or folder nowhere.npz")
    Path("half").mkdir()
    np.save("half/x.npy", some_digits()[0])
    cli("admit", run, "--client", "half").says(3, "there is no y.npy in it")
    Path("notes.txt").write_text("x")
    cli("admit", run, "--client", "notes.txt").says(3, "labelled samples must be in")
    Path("broken.npz").write_text("x")
    cli("admit", run, "--client", "broken.npz").says(3, "broken.npz: damaged")
    Path("t.csv").write_text("a,label\n1,2\n")
    cli("admit", run, "--client", "t.csv").says(3, "images must be in an .npy")


@pytest.mark.parametrize("target", ["kind", "target"])
def test_tables(cli, table, target):
    """Raw features and class names go in, in any order of columns: as the run read its own."""
    other = "target" if target == "kind" else "kind"
    words = ["run", "--data", "csv", "--engine", "loop", "--folder", table, "--clients", 3]
    words += ["--set", f"data.options.label={target}", "--lr", "0.01", "--rounds", 2, "-q"]
    words += ["--set", f'data.options.columns=["site", "{other}"]', "--dir", "r"]
    if target == "target":
        words += ["--set", "data.options.target=regression"]
    assert cli(*words).code == 0
    head, *lines = table.read_text().splitlines()
    cells = [line.split(",") for line in lines[:30]]
    Path("new.csv").write_text("\n".join([head, *lines[:30]]))
    Path("turned.csv").write_text(
        "\n".join([f"{target},note,weight,height"]
                  + [f"{c[3 if target == 'kind' else 4]},?,{c[1]},{c[0]}" for c in cells])
    )  # fmt: skip
    x = np.array([[float(v) for v in c[:2]] for c in cells])
    y = np.array([c[3] for c in cells] if target == "kind" else [float(c[4]) for c in cells])
    np.savez("new.npz", x=x, y=y)
    files = ["new.csv", "turned.csv", "new.npz"]
    if target == "kind":
        np.savez("numbers.npz", x=x, y=(y == "tall").astype(int))  # small is 0, tall is 1
        files.append("numbers.npz")
    said = {cli("admit", "r", "--client", f, "--json", "--to", "m").out for f in files}
    assert len(said) == 1
    told = json.loads(said.pop())
    assert told["samples"] == {"train": 22, "val": 2, "test": 6}
    population = reopen(Path("r")).plan.population
    data = newcomer_data(Path("new.csv"), Path("r"), population)
    raw = data.train.x * population.std + population.mean
    assert float(raw[:, 1].mean()) == pytest.approx(x[:, 1].mean(), rel=0.2)
    assert abs(float(data.train.x.mean())) < 1
    bad = {
        "line 2": "height,weight,kind,target\n1.7,nan,tall,1\n",
        "'giant'": "height,weight,kind,target\n1.7,70,giant,oops\n",
        "unknown column 'weight'": "height,kind,target\n1.7,tall,1\n",
        f"unknown column '{target}'": "height,weight,note\n1.7,70,tall\n",
        "no rows": "height,weight,kind,target\n",
    }
    if target == "target":
        bad["'oops' is not a number"] = bad.pop("'giant'")
    for sentence, text in bad.items():
        Path("bad.csv").write_text(text)
        cli("admit", "r", "--client", "bad.csv").says(3, "bad.csv", sentence)
    if target == "target":
        np.savez("bad.npz", x=x, y=np.stack([y, y], 1))
        cli("admit", "r", "--client", "bad.npz").says(3, "the run's targets are numbers of shape")
        np.savez("bad.npz", x=x, y=np.where(y > y.mean(), np.inf, y))
        cli("admit", "r", "--client", "bad.npz").says(3, "bad.npz: inf at row")


def test_numbers_that_are_names_of_classes(cli):
    """Classes called 1 and 3 are not the places 1 and 3."""
    rng = np.random.default_rng(0)
    rows = [f"{rng.normal(5 * (i % 2)):.3f},{1 + 2 * (i % 2)}" for i in range(60)]
    Path("own.csv").write_text("\n".join(["a,y", *rows]))
    words = ("run", "--data", "csv", "--folder", "own.csv", "--set", "data.options.label=y")
    more = ("--clients", 2, "--rounds", 1, "--engine", "loop", "--dir", "r", "-q")
    assert cli(*words, *more).code == 0
    cells = np.array([[float(v) for v in row.split(",")] for row in rows[:20]])
    np.savez("new.npz", x=cells[:, :1], y=cells[:, 1].astype(int))
    data = newcomer_data(Path("new.npz"), Path("r"), reopen(Path("r")).plan.population)
    raw = data.train.x[:, 0] > 0  # standardised: the upper half is the class called 3
    assert torch.equal(data.train.y, raw.long())
    np.savez("bad.npz", x=cells[:, :1], y=np.zeros(20, int))
    cli("admit", "r", "--client", "bad.npz").says(3, "unknown label '0'", "Known: 1, 3")


def test_a_sheet_for_a_run_whose_columns_have_no_names(cli):
    """The column label is the label; the others are the features, in their order."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 3)), np.arange(60) % 2
    np.savez("own.npz", x=x, y=y)
    words = ("run", "--data", "npz", "--folder", "own.npz", "--clients", 2, "--rounds", 1)
    assert cli(*words, "--engine", "loop", "--dir", "r", "-q").code == 0
    rows = [f"{a},{k},{b},{c}" for (a, b, c), k in zip(x[:20].tolist(), y, strict=False)]
    Path("new.csv").write_text("\n".join(["a,label,b,c", *rows]))
    np.savez("new.npz", x=x[:20], y=y[:20])
    said = {cli("admit", "r", "--client", f"new.{e}", "--json").out for e in ("csv", "npz")}
    assert len(said) == 1
    Path("few.csv").write_text("a,label,b\n1,0,1\n")
    cli("admit", "r", "--client", "few.csv").says(3, "2 columns (a, b)", "have 3 features")


def test_texts_with_the_words_of_the_run(cli):
    rng = np.random.default_rng(0)
    words = [["good", "fine", "great", "nice"], ["bad", "poor", "awful", "sad"]]
    lines = ["review;mark"]
    lines += [f"{' '.join(rng.choice(words[i % 2], 4))};{('up', 'down')[i % 2]}" for i in range(80)]
    Path("reviews.csv").write_text("\n".join(lines))
    flags = ["run", "--data", "text", "--folder", "reviews.csv", "--clients", 2, "--model", "text"]
    for option in ("length=8", "text=review", "label=mark", 'delimiter=";"'):
        flags += ["--set", f"data.options.{option}"]
    flags += ["--rounds", 3, "--lr", "1.0", "--engine", "loop", "--epochs", 3, "--dir", "r", "-q"]
    assert cli(*flags).code == 0
    Path("new.csv").write_text(
        "\n".join(["mark;review", *["up;GREAT unheard", "down;bad sad"] * 20])
    )
    told = json.loads(cli("admit", "r", "--client", "new.csv", "--json").out)
    assert told["adapted"]["accuracy"] == 1.0
    data = newcomer_data(Path("new.csv"), Path("r"), reopen(Path("r")).plan.population)
    vocabulary = reopen(Path("r")).plan.population.vocabulary
    seen = {tuple(vocabulary[i] for i in row[:2]) for row in data.train.x.tolist()}
    assert seen == {("great", "<unknown>"), ("bad", "sad")}


def test_from_python(cli, run):
    np.savez("new.npz", **dict(zip("xy", some_digits(), strict=True)))
    told = json.loads(cli("admit", run, "--client", "new.npz", "--epochs", 2, "--json").out)
    data = newcomer_data(Path("new.npz"), Path(run), reopen(Path(run)).plan.population)
    found = admit_client(Path(run), data, epochs=2)
    assert {**json.loads(json.dumps(found.to_dict())), "model": "new.safetensors"} == told
    saved = load_file("new.safetensors")
    assert all(torch.equal(saved[k], v) for k, v in found.weights.tensors().items())
