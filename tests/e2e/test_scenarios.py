"""Papers' set-ups on the command line: listed, shown, run, compared."""

import json
import tomllib
from pathlib import Path

import pytest

from coterie.methods import METHODS
from coterie.run.config import parse
from coterie.run.scenarios import SCENARIOS, scenario

QUICK = ("--rounds", 1, "--epochs", 1, "--engine", "loop", "-q")
FEW = ("--clients", 8, "--cohort", 0.5, "--set", "data.samples=200")


def config(place: str) -> dict:
    return tomllib.loads(Path(place, "config.toml").read_text())


def test_they_are_listed_with_figures_and_data(cli):
    ended = cli("scenarios")
    assert ended.code == 0, ended.err
    for name in SCENARIOS:
        assert name in ended.out
    row = next(line for line in ended.out.splitlines() if "fedclust/svhn-skew20" in line)
    assert "95.9 fedclust (table 1)" in row
    assert "digits instead of svhn" in row


def test_the_list_knows_what_is_at_hand(cli, tmp_path):
    (tmp_path / "d").mkdir()
    for part in ("train", "test"):
        (tmp_path / "d" / f"{part}_32x32.mat").touch()
    ended = cli("scenarios", "--folder", tmp_path / "d")
    row = next(line for line in ended.out.splitlines() if "fedclust/svhn-skew20" in line)
    assert "svhn" in row.split("│")[4]
    assert "instead" not in row


def test_one_is_shown_in_full_and_is_a_configuration(cli):
    ended = cli("scenarios", "fedclust/fmnist-skew20")
    assert ended.code == 0, ended.err
    text = ended.out[ended.out.index("[data]") : ended.out.index("for fedavg:")]
    assert parse(tomllib.loads(text)) == parse(scenario("fedclust/fmnist-skew20").tree())
    assert "train.momentum = 0.9" in ended.out
    for part in ("Islam et al.", "table 1", "97.92", "71.33", "4.50", "fednova", "received"):
        assert part in ended.out
    assert "digits would be used instead" in ended.out


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
    ended = cli("run", "--scenario", name, "--method", "fedavg", *QUICK, "--dir", "r")
    assert ended.code == 0, ended.err
    notes = [line for line in ended.err.splitlines() if line.startswith("note:")]
    assert len(notes) == 1
    assert "svhn is not at hand, so digits is used instead" in notes[0]
    assert "81.4† ± 0.6 % for fedavg" in ended.out
    assert "does not say" in ended.out
    assert "† ours on digits instead of svhn" in ended.out
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
    assert "† ours on digits instead of svhn" in ended.out
    kept = config("r")
    assert (kept["train"]["lr"], kept["train"]["momentum"]) == (0.4, 0.1)
    assert (kept["train"]["epochs"], kept["train"]["batch_size"]) == (1, 10)
    assert kept["partition"] == {"name": "iid"}


def test_the_paper_is_beside_our_scores(cli):
    words = ("compare", "--scenario", "fedclust/svhn-skew20", "--methods", "fedavg,ifca,fedper")
    ended = cli(*words, *QUICK, *FEW, "--dir", "c")
    assert ended.code == 0, ended.err
    assert sum("is not at hand" in line for line in ended.err.splitlines()) == 1
    heads = next(line for line in ended.out.splitlines() if line.startswith("method ")).split()
    column = heads.index("paper")
    rows = {line.split()[0]: line.split() for line in ended.out.splitlines() if line}
    assert rows["fedavg"][column] == "81.4†"
    assert rows["ifca"][column] == "94.8†"
    assert rows["fedper"][column] == "–"
    assert "† ours on digits instead of svhn" in ended.out
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
    assert "Stack Overflow" in ended.err
    assert "fedper" in ended.out
    head = next(line for line in ended.out.splitlines() if line.startswith("method "))
    assert "paper" not in head
    assert "†" not in ended.out


def test_no_paper_without_a_scenario(cli, small):
    ended = cli("compare", *small, "--rounds", 1, "-q", "--methods", "local", "--dir", "c")
    assert "paper" not in ended.out
    assert not Path("c/local/scenario.json").exists()


def test_newcomers_are_compared_with_newcomers(cli):
    words = ("compare", "--scenario", "fedclust/fmnist-newcomers", "--methods", "fedavg,local")
    few = ("--clients", 10, "--set", "run.holdout=2", "--set", "data.samples=300")
    ended = cli(*words, *QUICK, *few, "--cohort", 0.5, "--dir", "c")
    assert ended.code == 0, ended.err
    heads = next(line for line in ended.out.splitlines() if line.startswith("method ")).split()
    row = next(line for line in ended.out.splitlines() if line.startswith("fedavg")).split()
    kept = json.loads(Path("c/fedavg/result.json").read_text())
    came = kept["newcomers"]["adapted"]["accuracy"]
    assert row[heads.index("comers")].rstrip("*") == f"{100 * came:.1f}"
    assert "comparable with our adapted score of newcomers" in ended.out
    assert row[heads.index("groups") - 1].endswith("/8")  # the members only


def test_a_look_at_a_scenario(cli):
    ended = cli("probe", "--scenario", "user-centric/covariate", *FEW[:2])
    assert ended.code == 0, ended.err
    assert "emnist is not at hand" in ended.err
    assert "groups: 0 2, 1 2, 2 2, 3 2" in ended.out


def test_a_folder_that_is_not_there(cli):
    words = ("run", "--scenario", "fedclust/svhn-skew20", "--folder", "/nowhere")
    cli(*words).says(3, "/nowhere")
    cli("scenarios", "--folder", "/nowhere").says(3, "/nowhere")
