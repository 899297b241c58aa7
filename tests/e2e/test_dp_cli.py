"""Differential privacy from the command line: what is printed, written, refused and resumed."""

import json
import re
from pathlib import Path

import pytest

DRAWN = ("--set", "run.sampling=poisson", "--cohort", "0.5")


def result(folder):
    return json.loads(Path(folder, "result.json").read_text())


def events(folder):
    lines = Path(folder, "events.jsonl").read_text().splitlines()
    return [e for e in map(json.loads, lines) if "cohort" in e]


def test_a_budget_is_shown_every_round_and_at_the_end(cli, small):
    ended = cli("run", *small, "--rounds", 3, "--epsilon", 8, *DRAWN, "--dir", "r")
    assert ended.code == 0, ended.err
    said = ended.out + ended.err
    each = [float(e) for e in re.findall(r"round +\d/3.*ε (?:≤ )?([\d.]+)", said)]
    assert len(each) == 3
    assert each == sorted(each)
    told = result("r")["privacy"]
    closing = next(line for line in said.splitlines() if line.strip().startswith("privacy"))
    assert f"ε = {told['epsilon']:.3g} of 8 at δ = {told['delta']:.2g}" in closing
    assert "pld; add or remove one client" in closing
    assert "simulated: keys and noise come from the seed" in closing
    assert 0.98 * 8 <= told["epsilon"] <= 8
    assert (told["releases"], told["sampling"], told["budget"]) == (3, "poisson", 8)
    written = [event["privacy"]["epsilon"] for event in events("r")]
    assert written == pytest.approx(each, rel=5e-3)


def test_more_rounds_keep_the_noise_and_the_budget(cli, small):
    assert cli("run", *small, "--rounds", 2, "--epsilon", 6, "--dir", "r", "-q").code == 0
    before = result("r")["privacy"]
    ended = cli("run", "--resume", "r", "--rounds", 5)
    assert ended.code == 0, ended.err
    assert result("r")["privacy"] == before
    assert result("r")["rounds"] == 2
    assert "has no room for another round" in result("r")["stopped"]
    assert "has no room for another round" in ended.out + ended.err


def test_nbafl_stops_after_its_uploads_also_with_more_rounds(cli, small):
    words = ("--epsilon", 0.5, "--set", "privacy.mechanism=nbafl", "--rounds", 2)
    assert cli("run", *small, *words, "--dir", "r", "-q").code == 0
    before = result("r")
    assert (before["rounds"], before["privacy"]["exposures"]) == (2, 2)
    ended = cli("run", "--resume", "r", "--rounds", 5)
    assert ended.code == 0, ended.err
    assert result("r")["rounds"] == 2
    assert result("r")["stopped"] == "NbAFL's noise is for 2 rounds"
    for key in ("epsilon", "delta", "exposures", "aggregations", "downlink"):
        assert result("r")["privacy"][key] == before["privacy"][key]


def test_without_a_budget_the_noise_is_told_as_it_is(cli, small):
    noise = ("--set", "privacy.noise=2", "--set", "privacy.clip=0.5")
    assert cli("run", *small, "--rounds", 2, *noise, "--dir", "r", "-q").code == 0
    told = result("r")["privacy"]
    assert (told["noise"], told["clip"], told["budget"]) == (2, 0.5, None)
    assert told["accountant"] == "exact"  # everybody takes part
    assert told["sampling"] == "all"


def test_a_run_without_privacy_says_nothing_of_it(cli, small):
    ended = cli("run", *small, "--rounds", 1, "--dir", "r")
    assert "privacy" not in result("r")
    assert "ε" not in ended.out + ended.err


def sets(*texts):
    return [word for text in texts for word in ("--set", text)]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--epsilon", 0.1, *sets("privacy.noise=0.5")], "does not suffice for a single round"),
        (["--epsilon", 0], "privacy.epsilon"),
        (["--epsilon", 4, "--method", "cfl"], "method cfl finds groups by comparing two halves"),
        (
            ["--epsilon", 4, "--method", "fedfomo", *sets("method.m=2")],
            "method fedfomo groups or mixes clients",
        ),
        (["--epsilon", 4, "--method", "scaffold"], "method scaffold sends 'c"),
        (["--epsilon", 4, *sets("privacy.mechanism=nbafl")], "between 0 and 1"),
        (["--epsilon", 4, *sets("privacy.delta=2")], "privacy.delta"),
        (["--epsilon", 4, "--secure", "--reveal", "final-layer"], "shows what the noise"),
        (["--epsilon", 4, *sets("privacy.mechanism=middle")], "unknown privacy.mechanism"),
        (["--epsilon", 4, *sets("run.sampling=poison")], "did you mean 'poisson'?"),
        (["--epsilon", "inf"], "privacy.epsilon"),
        (["--epsilon", 4, *sets("method.layer_interval=2")], "leave out method.layer_interval"),
        (
            ["--epsilon", 4, *sets("clock.name=wireless", "clock.system=2", "run.deadline=1e6")],
            "run.deadline with clock.name = wireless",
        ),
        (sets("privacy.mechanism=local"), "privacy.mechanism = 'local' is about noise"),
        (sets("privacy.clip=2"), "privacy.clip = 2.0 is about noise, and there is none"),
        (sets("privacy.delta=1e-5"), "give --epsilon or privacy.noise"),
        (["--epsilon", 4, *sets("privacy.exposures=3")], "has no effect with this mechanism"),
        (
            ["--epsilon", 0.5, *sets("privacy.mechanism=nbafl", "privacy.noise=1")],
            "privacy.noise = 1.0 has no effect with this mechanism",
        ),
        (
            ["--epsilon", 0.5, "--cohort", 1, *sets("privacy.mechanism=nbafl")],
            "proved for full participation",
        ),
        (
            ["--epsilon", 4, "--secure", *DRAWN, *sets("privacy.min_group=2")],
            "one client decides over privacy.min_group = 2",
        ),
        (["--epsilon", 4, "--clients", 1], "noise hides one client among others"),
    ],
)
def test_what_cannot_be_private_is_said_in_a_sentence(cli, small, words, told):
    cli("run", *small, "--rounds", 2, *words, "--dir", "r", "-q").says(2, told)
    assert not Path("r").exists()
