"""Papers' set-ups on the command line: listed, shown, run, compared."""

import json
import tomllib
from pathlib import Path

import pytest

from coterie.experiment.config import parse
from coterie.experiment.scenarios import SCENARIOS, scenario
from coterie.methods import METHODS

QUICK = ("--rounds", 1, "--epochs", 1, "--engine", "loop", "-q")
FEW = ("--clients", 8, "--cohort", 0.5, "--set", "data.samples=200", "--stand-in")


def config(place: str) -> dict:
    return tomllib.loads(Path(place, "config.toml").read_text())


def rows_of(table: str) -> dict[str, list[str]]:
    """The cells of a printed comparison by the rows' first words, without the mark of the highest.

    The sentences below the table may begin with a method's name too, so the first line counts.
    """
    rows: dict[str, list[str]] = {}
    for line in table.splitlines():
        if line:
            rows.setdefault(line.split()[0], line.replace("^", "").split())
    return rows


def test_they_are_listed_with_figures_and_data(cli):
    ended = cli("scenarios")
    assert ended.code == 0, ended.err
    for name in SCENARIOS:
        assert name in ended.out
    row = next(line for line in ended.out.splitlines() if "fedclust/svhn-skew20" in line)
    assert "95.9 fedclust (tables 1 and 4)" in row
    assert "svhn is missing; with --stand-in digits" in row


def test_the_list_knows_what_is_available(cli, tmp_path):
    (tmp_path / "d").mkdir()
    for part in ("train", "test"):
        (tmp_path / "d" / f"{part}_32x32.mat").touch()
    ended = cli("scenarios", "--folder", tmp_path / "d")
    row = next(line for line in ended.out.splitlines() if "fedclust/svhn-skew20" in line)
    assert "svhn" in row.split("│")[4]
    assert "missing" not in row


def test_one_is_shown_in_full_and_is_a_configuration(cli):
    ended = cli("scenarios", "fedclust/fmnist-skew20")
    assert ended.code == 0, ended.err
    text = ended.out[ended.out.index("[data]") : ended.out.index("for fedavg:")]
    assert parse(tomllib.loads(text)) == parse(scenario("fedclust/fmnist-skew20").tree())
    assert "train.momentum = 0.9" in ended.out
    for part in ("Islam et al.", "tables 1 and 4", "97.92", "71.33", "4.50", "fednova", "received"):
        assert part in ended.out
    assert "needs the data set fashion-mnist" in ended.out
    assert "digits in its place with --stand-in" in ended.out
    rows = {words[0]: words for line in ended.out.splitlines() if (words := line.split())}
    assert "rounds to 75.0 %" in ended.out
    assert [rows[m][-1] for m in ("local", "fednova", "cfl", "fedclust")] == [
        "–",
        "never",
        "47",
        "7",
    ]


@pytest.mark.parametrize("words", [("scenarios",), ("run", "--scenario"), ("probe", "--scenario")])
def test_an_unknown_name_is_a_sentence(cli, words):
    cli(*words, "fedclust/fmnist-skew2").says(
        2, "unknown scenario 'fedclust/fmnist-skew2'; did you mean 'fedclust/fmnist-skew20'?"
    )


def test_an_unknown_name_in_a_comparison(cli):
    cli("compare", "--scenario", "nothing/here").says(2, "unknown scenario")
    cli("compare", "--scenario", "nothing/here", "--methods", "local").says(2, "unknown scenario")
    assert not Path("runs").exists()


def test_a_run_says_what_it_is_on_and_what_the_paper_has(cli):
    name = "fedclust/svhn-skew20"
    ended = cli("run", "--scenario", name, "--stand-in", "--method", "fedavg", *QUICK, "--dir", "r")
    assert ended.code == 0, ended.err
    notes = [line for line in ended.err.splitlines() if line.startswith("note:")]
    assert len(notes) == 1
    assert "svhn is not available, so digits is used instead" in notes[0]
    assert "81.4‡ ± 0.6 % for fedavg" in ended.out
    assert "does not say" in ended.out
    assert "‡ ours on digits instead of svhn" in ended.out
    assert "train.epochs 1 instead of 10; run.rounds 1 instead of 200" in ended.out
    kept = config("r")
    assert kept["data"]["set"] == "digits"
    assert kept["data"]["clients"] == 100
    assert kept["train"]["momentum"] == 0.9  # FedAvg's own in that paper
    assert kept["train"]["batch_size"] == 10
    about = json.loads(Path("r/result.json").read_text())["scenario"]
    assert about["instead"] == "on digits instead of svhn"
    assert (about["name"], about["figure"], about["score"]) == (name, 0.8136, "unknown")


def test_a_run_goes_on_as_that_scenario(cli):
    words = ("run", "--scenario", "fedtsdp/cifar10-iid", "--method", "local")
    assert cli(*words, *QUICK, *FEW, "--set", "data.public=10", "--dir", "r").code == 0
    cli("run", "--resume", "r", "--scenario", "fedtsdp/cifar10-iid").says(2, "--resume")
    ended = cli("run", "--resume", "r", "--rounds", 2, "-q")
    assert ended.code == 0, ended.err
    assert "no figure for local" in ended.out
    assert "run.rounds 2 instead of 200" in ended.out
    assert json.loads(Path("r/result.json").read_text())["scenario"]["figure"] is None
    assert cli("export", "r", "--client", 0).code == 0


def test_json_has_it_too(cli):
    words = ("run", "--scenario", "user-centric/concept", "--method", "oracle", "--json")
    ended = cli(*words, *QUICK, *FEW, "--dir", "r")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["scenario"]["figure"] == 0.495


def test_scenario_then_file_then_flags_then_set(cli):
    Path("mine.toml").write_text(
        "[train]\nlr = 0.2\nmomentum = 0.3\nepochs = 3\n[partition]\nname = 'iid'\n"
        "[data]\nset = 'digits'\n"
    )
    words = ("run", "mine.toml", "--scenario", "fedclust/svhn-skew20", "--method", "fedavg", "--lr")
    ended = cli(*words, 0.4, "--set", "train.momentum=0.1", *QUICK, *FEW, "--dir", "r")
    assert ended.code == 0, ended.err
    assert "note:" not in ended.err  # the file named the data set
    assert "‡ ours on digits instead of svhn" in ended.out
    kept = config("r")
    assert (kept["train"]["lr"], kept["train"]["momentum"]) == (0.4, 0.1)
    assert (kept["train"]["epochs"], kept["train"]["batch_size"]) == (1, 10)
    assert kept["partition"] == {"name": "iid"}


def test_the_paper_is_beside_our_scores(cli):
    words = ("compare", "--scenario", "fedclust/svhn-skew20", "--methods", "fedavg,ifca,fedper")
    ended = cli(*words, *QUICK, *FEW, "--dir", "c")
    assert ended.code == 0, ended.err
    assert sum("is not available" in line for line in ended.err.splitlines()) == 1
    rows = rows_of(ended.out)
    column = rows["method"].index("paper")
    assert rows["fedavg"][column] == "81.4‡"
    assert rows["ifca"][column] == "94.8‡"
    assert rows["fedper"][column] == "–"
    assert "‡ ours on digits instead of svhn" in ended.out
    assert (config("c/fedavg")["train"]["momentum"], config("c/ifca")["method"]["k"]) == (0.9, 2)
    assert config("c/ifca")["train"]["momentum"] == 0.5
    about = json.loads(Path("c/fedavg/result.json").read_text())["scenario"]
    assert (about["figure"], about["instead"]) == (0.8136, "on digits instead of svhn")


def test_the_methods_compared_are_those_of_the_table(cli):
    ended = cli("compare", "--scenario", "user-centric/covariate", *QUICK, *FEW, "--dir", "c")
    assert ended.code == 0, ended.err
    there = [m for m in scenario("user-centric/covariate").figures if m.split()[0] in METHODS]
    assert {"local", "fedavg", "fedprox", "oracle"} <= set(there)
    for title in there:
        assert Path("c", title.replace(" ", "-"), "result.json").exists()
    assert len(list(Path("c").glob("*/result.json"))) == len(there)


def test_without_figures_the_usual_methods_and_no_column(cli):
    ended = cli("compare", "--scenario", "user-centric/text", *QUICK, *FEW, "--dir", "c")
    assert ended.code == 0, ended.err
    assert "text is not available, so digits is used instead" in ended.err
    assert "fedper" in ended.out
    head = next(line for line in ended.out.splitlines() if line.startswith("method "))
    assert "paper" not in head
    assert "‡" not in ended.out


def test_no_paper_without_a_scenario(cli, small):
    ended = cli("compare", *small, "--rounds", 1, "-q", "--methods", "local", "--dir", "c")
    assert "paper" not in ended.out
    assert not Path("c/local/scenario.json").exists()


def test_newcomers_are_compared_with_newcomers(cli):
    words = ("compare", "--scenario", "fedclust/fmnist-newcomers", "--methods", "fedavg,local")
    few = ("--clients", 10, "--set", "run.holdout=2", "--set", "data.samples=300", "--stand-in")
    ended = cli(*words, *QUICK, *few, "--cohort", 0.5, "--dir", "c")
    assert ended.code == 0, ended.err
    rows = rows_of(ended.out)
    heads, row = rows["method"], rows["fedavg"]
    kept = json.loads(Path("c/fedavg/result.json").read_text())
    came = kept["newcomers"]["adapted"]["accuracy"]
    assert row[heads.index("comers")] == f"{100 * came:.1f}"
    received = kept["newcomers"]["received"]["accuracy"]
    assert row[heads.index("received", heads.index("comers"))] == f"{100 * received:.1f}"
    assert (
        "comparable with our received score of newcomers (fedavg) and our adapted score of "
        "newcomers (local)" in ended.out
    )
    counts = row[heads.index("same/worse")].split("/")
    assert sum(map(int, counts)) == 8  # better, same, worse: the members only


def test_a_look_at_a_scenario(cli):
    ended = cli("probe", "--scenario", "user-centric/covariate", "--stand-in", *FEW[:2])
    assert ended.code == 0, ended.err
    assert "emnist is not available" in ended.err
    assert "groups: 0 2, 1 2, 2 2, 3 2" in ended.out


def test_a_folder_that_is_not_there(cli):
    words = ("run", "--scenario", "fedclust/svhn-skew20", "--folder", "/nowhere")
    cli(*words).says(3, "/nowhere")
    cli("scenarios", "--folder", "/nowhere").says(3, "/nowhere")


@pytest.mark.parametrize("command", ["run", "compare", "groups", "probe"])
def test_missing_data_are_asked_for(cli, tmp_path, command):
    (tmp_path / "d").mkdir()
    words = (command, "--scenario", "fedclust/svhn-skew20", "--folder", tmp_path / "d")
    cli(*words).says(
        2,
        "needs the data set svhn, which is not available",
        f"looked for in {tmp_path / 'd'} and {tmp_path / 'cache' / 'svhn'}",
        "--folder DIR",
        "--data svhn",
        "digits in its place with --stand-in",
    )
    assert not Path("runs").exists()
    cli(command, "--scenario", "user-centric/text").says(2, "Stack Overflow", "--data text")
    cli(command, "--stand-in").says(2, "--scenario")


def test_a_stand_in_is_for_a_new_run(cli):
    cli("run", "--resume", "r", "--stand-in").says(2, "--resume uses the configuration")
    cli("compare", "--resume", "c", "--stand-in").says(2, "--resume uses the configuration")


def test_a_threshold_in_place_of_the_scenarios_clusters(cli):
    words = ("--scenario", "fedclust/fmnist-skew20", *QUICK, *FEW)
    ended = cli("run", *words, "--set", "method.threshold=0.05", "--dir", "r")
    assert ended.code == 0, ended.err
    kept = config("r")["method"]
    assert (kept["threshold"], kept.get("clusters")) == (0.05, None)
    assert "no figure for fedclust with these parameters" in ended.out
    assert "method.clusters unset instead of 4" in ended.out
    methods = ("--methods", "fedclust:threshold=0.05,fedclust,fedavg", "--dir", "c")
    ended = cli("compare", *words, *methods)
    assert ended.code == 0, ended.err
    assert config("c/fedclust")["method"]["clusters"] == 4
    kept = config("c/fedclust-threshold=0.05")["method"]
    assert (kept["threshold"], kept.get("clusters")) == (0.05, None)
    told = json.loads(Path("c/scenarios.json").read_text())
    assert told["fedclust threshold=0.05"]["figure"] is None
    assert told["fedclust threshold=0.05"]["to_target"] == {"target": 0.75}
    assert told["fedclust"]["figure"] == 0.9792


def test_what_a_target_takes_is_beside_the_papers(cli):
    quick = ("--clients", 4, "--cohort", "1.0", "--rounds", 4, "--engine", "loop", "-q")
    easy = ("--stand-in", "--partition", "iid", "--model", "mlp", "--lr", 0.1, "--epochs", 2)
    name = "fedclust/cifar100-skew30"
    words = ("run", "--scenario", name, *quick, *easy, "--method", "fedavg")
    ended = cli(*words, "--set", "evaluation.adapt_every=1", "--dir", "r")
    assert ended.code == 0, ended.err
    events = [json.loads(line) for line in Path("r/events.jsonl").read_text().splitlines()]
    rounds = [e for e in events if e.get("event", "round") == "round" and "received" in e]
    sent = {}
    for score in ("received", "adapted"):
        first = next(e for e in rounds if e[score]["accuracy"] >= 0.5)
        # All bytes of the four clients so far, as megabits of one.
        sent[score] = sum(first["total_bytes"].values()) * 8 / 1e6 / 4
    assert (
        "50.0 %: in the paper after 4237.37 Mbit a client, here after "
        f"{sent['received']:.6g} Mbit a client (adapted score: after {sent['adapted']:.6g} Mbit a "
        "client)" in ended.out
    )
    words = ("compare", "--scenario", name, *quick, *easy, "--methods", "fedavg,cfl,local")
    ended = cli(*words, "--dir", "c")
    assert ended.code == 0, ended.err
    rows = rows_of(ended.out)
    heads = rows["method"]
    last = heads.index("Mbit") - len(heads)  # from the right: a cell can be two words
    assert [rows[m][last] for m in ("fedavg", "cfl", "local")] == ["4237.37", "never", "–"]
    row = json.loads(Path("c/comparison.json").read_text())["rows"][0]
    assert row["target_megabits"] == pytest.approx(sent["received"])
