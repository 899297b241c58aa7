"""Comparisons of several methods, and the listings, on the command line."""

import csv
import functools
import json
import os
import re
import signal
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

import coterie
from coterie.core.method import Method, State, method
from coterie.errors import ConfigError, TrainingError
from coterie.experiment.compare import compare
from coterie.experiment.compare.compare import agreement, folder_of
from coterie.methods import METHODS
from coterie.report import progress
from coterie.report.listings import FAMILIES
from coterie.report.method_help import explain
from coterie.results.rundir import RunDir
from processes import PATIENCE


def test_all_methods_in_one_table(cli, small):
    names = "local,fedavg,fedprox:mu=0.5,fedper,ifca:k=2,oracle"
    words = ("compare", *small, "--rounds", 2, "--methods", names, "--dir", "c")
    ended = cli(*words, "--shift", "rotation", "--set", "shift.groups=2")
    assert ended.code == 0, ended.err
    titles = ["local", "fedavg", "fedprox mu=0.5", "fedper", "ifca k=2", "oracle"]
    rows = {t: next(s for s in ended.out.splitlines() if s.startswith(t + " ")) for t in titles}
    assert ended.out.splitlines()[-2:] == ["kept in c", "all figures: coterie report c"]
    alone = json.loads(Path("c/local/result.json").read_text())["received"]
    for title, row in rows.items():
        kept = json.loads(Path("c", title.replace(" ", "-"), "result.json").read_text())
        cells = row.removeprefix(title).replace("^", " ").split()  # the highest has a sign
        assert cells[0] == f"{100 * kept['received']['accuracy']:.1f}"
        assert cells[1] == f"{100 * kept['adapted']['accuracy']:.1f}"
        assert cells[2] == f"{100 * kept['received']['worst']:.1f}"
        gain = 100 * (kept["received"]["accuracy"] - alone["accuracy"])
        assert cells[3] == ("–" if title == "local" else f"{gain:+.1f}")
        assert cells[-1] == kept["sees"]
    assert rows["oracle"].split()[6:8] == ["2", "1.00"]
    assert rows["local"].split()[-1] == "nothing"
    lines = ended.err.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        f"{number}/6  {title}" for number, title in enumerate(titles, 1)
    ]
    score = 100 * alone["accuracy"]
    assert re.fullmatch(rf"1/6  local: received {score:.1f} %, 4 groups, 0 B, \d+ s", lines[0])


def test_the_same_clients_and_start_for_every_method(cli, small):
    words = ("compare", *small, "--rounds", 1, "--methods", "ifca:k=1,fedavg", "--dir", "c", "-q")
    assert cli(*words).code == 0  # ifca with one model is fedavg to the bit
    one, other = (
        json.loads(Path("c", d, "result.json").read_text()) for d in ("ifca-k=1", "fedavg")
    )
    assert one["received"] == other["received"]
    assert cli("run", *small, "--rounds", 1, "--dir", "r", "-q").code == 0
    assert json.loads(Path("r/result.json").read_text())["received"] == other["received"]


@pytest.mark.parametrize(
    ("methods", "told"),
    [
        ("local,ifca:q=4", "unknown parameter of method ifca 'q'"),
        ("local,ifca:k=many", "k = 'many'"),
        ("local,fedagv", "did you mean 'fedavg'"),
        ("local,ifca:4", "name:parameter=value"),
        ("local,oracle", "known groups"),
        ("local,local", "twice"),
        ("local,", "a name is empty"),
    ],
)
def test_a_wrong_method_is_refused_before_anything_runs(cli, small, methods, told):
    ended = cli("compare", *small, "--rounds", 1, "--methods", methods, "--dir", "c")
    ended.says(2, told)
    assert len(ended.err.splitlines()) == 1
    assert not Path("c").exists()


def test_wrong_methods_are_refused_before_data_is_read(cli):
    words = ("compare", "--data", "mnist", "--folder", "/nowhere", "--dir", "c")
    cli(*words, "--methods", "ifca:q=4").says(2, "'q'")
    cli(*words, "--methods", "local").says(3, "/nowhere")


def test_the_usual_methods_come_without_oracle_where_there_are_no_groups(cli, small):
    small = (*small, "--rounds", 1, "-q")
    plain = cli("compare", *small, "--dir", "c")
    assert plain.code == 0, plain.err
    assert "ifca k=4" in plain.out
    assert "oracle" not in plain.out
    grouped = cli("compare", *small, "--dir", "d", "--shift", "rotation")
    assert "oracle" in grouped.out


def test_agreement_is_that_of_the_groups_found_with_the_true_ones():
    def clients(*pairs):
        return [{"true_group": t, "group": g} for t, g in pairs]

    assert agreement(clients(("", "0"), ("", "1"))) is None  # nobody knows the truth
    assert agreement(clients(("0", "0"), ("1", "0"))) is None  # one group
    assert agreement(clients(("0", "b"), ("1", "a"), ("0", "b"), ("1", "a"))) == 1
    split = clients(("0", "a"), ("0", "b"), ("1", "a"), ("1", "b"))
    assert agreement(split) == pytest.approx(-0.5)  # worse than chance: every pair is wrong
    late = clients(("0", "a"), ("1", "b"), ("1", ""))
    assert agreement(late) == 1  # who has no group does not count


# --- every method -------------------------------------------------------------------------------


def rows_of(folder, *without):
    kept = json.loads(Path(folder, "comparison.json").read_text())
    rows = [{k: v for k, v in row.items() if k not in without} for row in kept["rows"]]
    return rows, kept["left_out"]


def test_all_methods_there_are(cli, small):
    known = ("--shift", "rotation", "--set", "shift.groups=2", "--set", "data.public=20")
    words = ("compare", *small, "--clients", 8, *known, "--rounds", 1, "--dir", "c", "-q")
    ended = cli(*words, "--methods", "all", "--set", "stop.bytes=1e9")
    assert ended.code == 0, ended.err
    rows, left_out = rows_of("c")
    assert left_out == {}
    trained = [name for name in METHODS if name != "group-evidence"]  # which only asks
    assert [row["method"].split()[0] for row in rows] == trained
    assert "ifca k=2" in [row["method"] for row in rows]  # as many as there are groups
    for row in rows:
        assert 0 <= row["worst"] <= row["received"] <= 1, row
        assert 0 <= row["adapted"] <= 1
        assert row["bytes"] > 0 or row["method"] == "local"
        assert row["seconds"] > 0
        assert row["groups"] >= 1
        assert row["sees"] in ("nothing", "means", "each")
    shown = ended.out.splitlines()
    assert [line.split()[0] for line in shown[3 : 3 + len(rows)]] == trained
    assert max(map(len, shown[: 3 + len(rows)])) <= 120
    table = list(csv.DictReader(Path("c/comparison.csv").read_text().splitlines()))
    assert [row["method"] for row in table] == [row["method"] for row in rows]
    for row, cells in zip(rows, table, strict=True):
        assert float(cells["received"]) == row["received"]
        assert int(cells["bytes"]) == row["bytes"]
        kept = json.loads(Path("c", folder_of(row["method"]), "result.json").read_text())
        assert kept["received"]["accuracy"] == row["received"]
        assert kept["bytes"]["down"] + kept["bytes"]["up"] == row["bytes"]


@method
def picky(start: int = 0) -> Method:
    """Refuses, when it is made or when it begins."""
    if start == 1:
        raise ConfigError("it does not like this")

    def init(fed, setup):
        if start == 2:
            raise ConfigError("it does not like that")
        return State({0: setup.start}, dict.fromkeys(setup.clients, 0))

    def round(fed, state, info):
        raise TrainingError("it gave up")

    return replace(coterie.fedavg(), init=init, round=round)


@pytest.fixture
def few():
    """A registry in which some refuse and one fails; afterwards the old one, in its order."""
    whole = dict(METHODS)
    kept = {name: whole[name] for name in ("local", "fedavg", "ifca", "oracle")}
    for number, name in enumerate(("fails", "never", "late")):
        kept[name] = functools.partial(picky, start=number)
    METHODS.clear()
    METHODS.update(kept)
    yield
    METHODS.clear()
    METHODS.update(whole)


@pytest.mark.usefixtures("few")
def test_who_refuses_is_left_out_of_all_with_the_reason(cli, small):
    words = ("compare", *small, "--rounds", 1, "--dir", "c", "-q", "--methods")
    ended = cli(*words, "all")
    assert ended.code == 0, ended.err
    rows, left_out = rows_of("c")
    assert [row["method"] for row in rows] == ["local", "fedavg", "ifca k=4"]
    assert list(left_out) == ["oracle", "never", "fails", "late"]
    for title, reason in (("fails", "it gave up"), ("never", "does not like this")):
        assert reason in left_out[title]
        assert f"note: {title} is left out: " in ended.err
        line = next(s for s in ended.out.splitlines() if s.startswith(f"left out: {title} ("))
        assert reason in line
    assert not Path("c/late").exists()
    resumed = cli("compare", "--resume", "c", "-q")
    assert resumed.out == ended.out


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("methods", "code", "told"),
    [("local,never", 2, "this"), ("local,late", 2, "that"), ("local,fails", 5, "gave up")],
)
def test_who_was_named_must_not_refuse(cli, small, methods, code, told):
    words = ("compare", *small, "--rounds", 1, "--dir", "c", "-q")
    cli(*words, "--methods", methods).says(code, told)


def test_all_with_others(cli, small, few):
    words = ("compare", *small, "--rounds", 1, "-q", "--clients", 3)
    ended = cli(*words, "--methods", "ifca:k=3,all,ifca:k=2,fedavg", "--dir", "c")
    assert ended.code == 0, ended.err
    rows, left_out = rows_of("c")
    assert [row["method"] for row in rows] == [
        "ifca k=3",
        "local",
        "ifca k=2",
        "fedavg",
    ]  # no twins
    assert "ifca k=4" not in left_out  # k is no more than the clients
    cli(*words, "--methods", "all:k=3", "--dir", "d").says(2, "takes no parameters")
    cli(*words, "--methods", "all", "--model", "mpl", "--dir", "d").says(2, "did you mean 'mlp'")
    assert not Path("d").exists()  # what everybody refuses is a mistake


# --- stopped and continued ----------------------------------------------------------------------

LONG = ("--clients", 4, "--set", "data.samples=400", "--batch-size", 8, "--epochs", 12, "-v")
LONG = (*LONG, "--rounds", 4, "--engine", "loop", "--shift", "rotation", "--set", "shift.groups=2")
FOUR = "local,fedavg,fedper,ifca:k=2"


@pytest.mark.parametrize(
    ("name", "number"),
    [("fedavg", 2), pytest.param("ifca k=2", 1, marks=pytest.mark.e2e)],  # the last of them
)
def test_killed_and_continued_as_if_never_stopped(cli, start, name, number):
    process = start("compare", *LONG, "--methods", FOUR, "--dir", "c")
    for line in process.stderr:
        if re.match(f"{name} +round {number}/4", line):
            os.kill(process.pid, signal.SIGKILL)
            break
    process.wait(timeout=PATIENCE)
    assert process.returncode == -signal.SIGKILL
    assert not Path("c/comparison.json").exists()
    finished = {p: p.stat().st_mtime_ns for p in Path("c").glob("*/result.json")}
    begun = {p.name for p in Path("c").iterdir() if p.is_dir()}
    assert finished
    assert len(begun) == len(finished) + 1
    resumed = cli("compare", "--resume", "c", "--verbose")
    assert resumed.code == 0, resumed.err
    for path, when in finished.items():
        assert path.stat().st_mtime_ns == when  # read, not done again
    lines = resumed.err.splitlines()
    going_on = re.match(f"{name} +round (\\d)/4", lines[0])  # not the finished ones, not round 1
    assert int(going_on[1]) > number
    whole = cli("compare", *LONG, "--methods", FOUR, "--dir", "w", "-q")
    assert whole.code == 0, whole.err
    assert rows_of("c", "seconds") == rows_of("w", "seconds")
    for title in ("local", "fedavg", "fedper", "ifca-k=2"):
        one, other = (Path(d, title, "clients.csv").read_text() for d in "cw")
        assert one == other
    again = cli("compare", "--resume", "c")  # nothing is left to do
    assert again.out == resumed.out
    assert again.err == ""


@pytest.fixture
def begun(cli, small, monkeypatch):
    """A comparison that was stopped in its second method, after one round."""

    def stop(event, *rest):
        if Path("c/fedavg/config.toml").exists():
            os.kill(os.getpid(), signal.SIGTERM)
        return ""

    words = ("compare", *small, "--rounds", 2, "--methods", "local,fedavg,fedper", "--dir", "c")
    with monkeypatch.context() as patch:
        patch.setattr(progress, "round_line", stop)
        cli(*words, "-v").says(130, "kept in c", "continue with: coterie compare --resume c")


@pytest.mark.usefixtures("begun")
def test_a_method_that_was_hardly_begun_begins_anew(cli):
    Path("c/fedper").mkdir()
    Path("c/fedper/.lock").touch()  # killed before its configuration was written
    assert cli("compare", "--resume", "c", "--engine", "pool", "--workers", 1).code == 0
    assert [row["method"] for row in rows_of("c")[0]] == ["local", "fedavg", "fedper"]
    assert tomllib.loads(Path("c/fedper/config.toml").read_text())["run"]["engine"] == "pool"


@pytest.mark.usefixtures("begun")
def test_only_what_leaves_results_as_they_are_goes_with_resume(cli, small):
    for words in (
        ("--rounds", 3),
        ("--methods", "all"),
        ("--set", "train.lr=1"),
        ("--dir", "d"),
        ("--scenario", "fedclust/fmnist-skew20"),
    ):
        told = "--resume uses the configuration of the comparison; only --engine, "
        cli("compare", "--resume", "c", *words).says(2, told)


@pytest.mark.usefixtures("begun")
def test_a_comparison_that_another_process_is_at_is_left_alone(cli):
    other = RunDir(Path("c"))
    other.lock()
    cli("compare", "--resume", "c").says(4, "another process is running in c")
    other.unlock()


@pytest.mark.usefixtures("begun")
def test_a_damaged_comparison_is_refused(cli):
    plan = Path("c/comparison.toml")
    text = plan.read_text()
    for damage in (text[: len(text) // 2], "", "format = 2\n", text.replace("lr = ", "rl = ")):
        plan.write_text(damage)
        cli("compare", "--resume", "c").says(4, "comparison.toml is damaged")
    plan.write_text(text.replace("format = 2", "format = 3"))
    cli("compare", "--resume", "c").says(4, "another version")
    plan.write_text(text)
    Path("c/local/result.json").write_text("{")
    assert cli("compare", "--resume", "c", "-q").code == 0  # a run can be written again
    assert json.loads(Path("c/local/result.json").read_text())["rounds"]


def test_a_folder_that_is_no_comparison_is_refused(cli, small):
    cli("compare", "--resume", "nowhere").says(4, "nowhere is not a comparison")
    assert cli("run", *small, "--rounds", 1, "--dir", "r", "-q").code == 0
    cli("compare", "--resume", "r").says(4, "it is a run: coterie run --resume r")
    assert not Path("nowhere").exists()
    assert not list(Path("r").glob("comparison*"))


def test_figures_of_a_scenario_outlast_a_stop(cli, monkeypatch):
    words = ("--set", "data.samples=600", "--clients", 4, "--cohort", "1.0", "--epochs", 1)
    words = (*words, "--data", "digits", "--model", "mlp", "--engine", "loop", "--rounds", 1)
    words = ("compare", "--scenario", "fedclust/fmnist-skew20", *words, "-q", "--methods")
    whole = cli(*words, "fedavg,fedclust:clusters=2", "--dir", "w")
    assert whole.code == 0, whole.err
    assert "77.1" in next(s for s in whole.out.splitlines() if s.startswith("fedavg "))

    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(compare, "execute", stop)
        cli(*words, "fedavg,fedclust:clusters=2", "--dir", "c").says(130, "--resume c")
    resumed = cli("compare", "--resume", "c", "-q")
    seconds = re.compile(r"\d+\.\d( +\w+)$", re.MULTILINE)
    ours, theirs = (seconds.sub(r"\1", ended.out) for ended in (resumed, whole))
    assert ours.endswith("kept in c\nall figures: coterie report c\n")
    assert ours.replace("in c\n", "in w\n").replace("report c\n", "report w\n") == theirs
    assert json.loads(Path("c/fedavg/scenario.json").read_text())["figure"] is not None


# --- what a method is ---------------------------------------------------------------------------


def test_a_method_in_words(cli):
    ended = cli("methods", "ifca")
    assert ended.code == 0
    lines = [line.rstrip() for line in ended.out.splitlines()]
    assert lines[0] == "ifca (clustered)"
    assert (
        "  k     integer  required  1 or more  the number of models; 1 is FedAvg to the bit."
        in lines
    )
    assert "  k models down, 1 up." in lines
    assert "NeurIPS 2020." in ended.out
    assert max(map(len, lines)) <= 100
    cli("methods", "fedagv").says(2, "did you mean 'fedavg'")


def test_a_combination_in_words(cli):
    ended = cli("methods", "ifca+fedper")
    assert ended.code == 0, ended.err
    assert "It brings who learns together." in ended.out
    assert "Secure aggregation\n  Yes: it asks for sums only." in ended.out
    assert "ifca.k" in ended.out
    assert "fedper.k" in ended.out
    cli("methods", "ifca+fedagv").says(2, "did you mean 'fedavg'")
    cli("methods", "ifca+oracle").says(2, "both say who learns together")
    cli("methods", "ifca+ifca").says(2, "each part once")
    cli("methods", "ifca+").says(2, "unknown method ''")


def test_methods_are_listed_by_family(cli):
    ended = cli("methods")
    assert ended.code == 0
    methods, presets = ended.out.split("Presets")
    family, families, sees = "", {}, {}
    for line in methods.splitlines():
        if line.strip() in FAMILIES:
            family = line.strip()
        elif row := re.fullmatch(r"  (\S+) +(nothing|means|each) {2,}\S.*", line):
            assert row[1] not in sees
            families[row[1]], sees[row[1]] = family, row[2]
    known = {name: explain(name, METHODS[name]) for name in METHODS}
    assert families == {name: each.family for name, each in known.items()}
    assert sees == {name: each.sees for name, each in known.items()}
    # Who sees each one's reply does not work with secure sums, and all others do.
    works = {name: seen != "each" for name, seen in sees.items()}
    assert works == {name: each.secure[0] for name, each in known.items()}
    assert (works["fedavg"], works["ifca"], works["krum"]) == (True, True, False)
    assert (sees["local"], sees["fedavg"], sees["krum"]) == ("nothing", "means", "each")
    assert "single replies (each; not with --secure) or means" in methods
    assert len(methods.splitlines()) <= 2 * len(METHODS)
    assert "│ fedpaq" in presets


# --- a look at the clients ----------------------------------------------------------------------


def test_probe_describes_labels(cli, small):
    words = ("probe", *small[:4], "--partition", "dirichlet", "--set", "partition.alpha=0.2")
    ended = cli(*words, "--shift", "rotation", "--set", "shift.groups=2", "--picture", "p.html")
    assert ended.code == 0, ended.err
    said = dict(line.split(": ", 1) for line in ended.out.splitlines() if ": " in line)
    assert said["clients"] == "4"
    assert said["true groups"] == "0 2, 1 2"
    assert "coterie probe is deprecated" in " ".join(ended.err.split())
    assert re.fullmatch(r"min \d+, median [\d.]+, max \d+", said["samples"])
    even = cli("probe", *small[:4])
    fair = dict(line.split(": ", 1) for line in even.out.splitlines() if ": " in line)
    assert float(said["kl"]) > 3 * float(fair["kl"]) > 0
    assert float(said["mean emd"]) > 3 * float(fair["mean emd"])
    bars = [line for line in ended.out.splitlines() if re.search("[▁▂▃▄▅▆▇█]", line)]
    assert len(bars) == 4
    html = Path("p.html").read_text()
    assert "plotly.js v" in html
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)\s*=", html)
    assert "client 3 (group" in html


def test_probe_describes_numbers(cli, table):
    words = ("probe", "--data", "csv", "--folder", table, "--partition", "column", "--clients", 3)
    words += ("--set", "partition.by=site", "--set", "data.options.target=regression")
    words += ("--set", "data.options.label=target", "--set", 'data.options.columns=["site","kind"]')
    ended = cli(*words, "--picture", "p.html")
    assert ended.code == 0, ended.err
    assert "clients: 3" in ended.out
    assert "None" not in ended.out
    rows = [line for line in ended.out.splitlines() if "█" in line]
    assert len(rows) == 3
    html = Path("p.html").read_text()
    assert "plotly.js v" in html
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)\s*=", html)


def test_layer_intervals_hold_for_every_method_compared(cli):
    words = [
        "compare",
        "--methods",
        "fedavg,fedprox:layer_interval=3",
        "--rounds",
        1,
        "--clients",
        3,
    ]
    words += ["--set", "method.layer_interval=2", "--clients", 3, "--engine", "loop", "--dir", "c"]
    assert cli(*words).code == 0
    found = [tomllib.loads(p.read_text()) for p in sorted(Path("c").glob("*/config.toml"))]
    assert [f["method"]["layer_interval"] for f in found] == [2, 3]


def test_combinations_are_compared_and_continued(cli, small):
    words = ("compare", *small, "--rounds", 1, "-q", "--dir", "c", "--methods")
    ended = cli(*words, "fedavg,ifca+fedper:ifca.k=2:fedper.k=1")
    assert ended.code == 0, ended.err
    title = "ifca+fedper ifca.k=2 fedper.k=1"
    assert [row["method"] for row in rows_of("c")[0]] == ["fedavg", title]
    Path("c", folder_of(title), "result.json").unlink()
    again = cli("compare", "--resume", "c", "-q")
    seconds = re.compile(r" kB +\d+\.\d ")  # they are those of this machine, this time
    assert seconds.sub(" kB ", again.out) == seconds.sub(" kB ", ended.out)


def test_gains_are_those_of_members(cli, small):
    words = ("compare", *small, "--rounds", 1, "--holdout", 1, "--admit-epochs", 1, "-q")
    assert cli(*words, "--methods", "local,fedavg", "--dir", "c").code == 0
    alone, shared = rows_of("c")[0]
    assert (alone["compared"], shared["compared"]) == (None, 3)
    kept = {d: list(csv.DictReader(Path(f"c/{d}/clients.csv").read_text().splitlines()))
            for d in ("local", "fedavg")}  # fmt: skip
    gains = [
        float(b["received_accuracy"]) - float(a["received_accuracy"])
        for a, b in zip(kept["local"], kept["fedavg"], strict=True)
        if a["newcomer"] == "0"
    ]
    assert shared["gain"] == pytest.approx(sum(gains) / 3)
    assert shared["better"] == sum(g > 0 for g in gains)
    assert shared["newcomers"] is not None


def test_all_methods_fit_those_who_train_when_some_are_held_out():
    from coterie.experiment.compare.compare import every_method
    from support import digits

    asked = {name: own for _, name, own in every_method(digits(clients=4, groups=4), 1)}
    assert asked["ifca"] == asked["clusterfl"] == {"k": 3}
    assert {n: o for _, n, o in every_method(digits(clients=6, groups=2))}["ifca"] == {"k": 2}


def test_a_method_that_is_judged_after_adapting_says_so(cli, small):
    words = ("compare", *small, "--methods", "local,per-fedavg:beta=0.1:alpha=0.2", "--rounds", 2)
    ended = cli(*words, "-q", "--dir", "c")
    assert ended.code == 0, ended.err
    assert "judged after adapting" in ended.out
    rows = {r["method"]: r for r in json.loads(Path("c/comparison.json").read_text())["rows"]}
    told = next(r for name, r in rows.items() if name.startswith("per-fedavg"))
    assert told["headline"] == "adapted"
    assert rows["local"]["headline"] == "received"
