"""Secure aggregation from the command line and from Python."""

import csv
import json

import pytest

import coterie
from coterie.errors import ConfigError
from coterie.experiment.experiment import execute
from coterie.methods import make
from guarded import secured, uneven
from support import experiment

SIX = (
    "--clients",
    6,
    "--set",
    "data.samples=300",
    "--engine",
    "loop",
    "--set",
    "model.hidden=[8]",
    "--rounds",
    2,
    "--secure",
    "--quiet",
)


def test_a_secure_run_says_what_was_exposed_and_keeps_it(cli, tmp_path):
    ended = cli("run", *SIX, "--method", "ditto", "--dir", "kept")
    assert ended.code == 0, ended.err
    assert "secure aggregation; simulated" in ended.out
    assert "The server saw only sums of 6 clients, in 2 rounds." in ended.out
    result = json.loads((tmp_path / "kept" / "result.json").read_text())
    assert result["privacy"] == {"secure": True, "randomness": "simulated"}
    assert result["exposure"]["single"] == {}
    assert result["exposure"]["sums"]["secure"]["count"] == 2
    with (tmp_path / "kept" / "exposure.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert not rows  # it has the vectors of single clients, and the server saw none
    plain = cli("run", *SIX[:-2], "--quiet", "--method", "ditto", "--dir", "plain")
    assert plain.code == 0
    told = json.loads((tmp_path / "plain" / "result.json").read_text())
    assert "privacy" not in told
    assert told["exposure"]["single"]
    assert "saw only sums" not in plain.out
    with (tmp_path / "plain" / "exposure.csv").open() as file:
        assert list(csv.DictReader(file))


def test_system_randomness_is_said_to_be_none_of_a_simulation(cli, tmp_path):
    ended = cli("run", *SIX, "--set", "privacy.randomness=system", "--dir", "kept", "--json")
    assert ended.code == 0, ended.err
    summary = json.loads(ended.out)
    assert summary["privacy"] == {"secure": True, "randomness": "system"}
    keys = list((tmp_path / "kept").rglob("*.key"))
    assert len(keys) == 6
    assert {k.stat().st_mode & 0o777 for k in keys} == {0o600}
    more = cli("run", "--resume", "kept", "--rounds", 3, "--quiet", "--json")
    assert more.code == 0, more.err
    assert json.loads(more.out)["rounds"] == 3


SET = "--set"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("--method", "cfl"), ("method cfl", "secure aggregation")),
        (("--method", "fedfomo"), ("method fedfomo", "secure aggregation")),
        (("--method", "median"), ("method median", "secure aggregation")),
        (("--method", "fedclust"), ("method fedclust", "privacy.reveal = 'final-layer'")),
        (("--codec", "qsgd"), ("wire.up = 'qsgd' is lossy",)),
        ((SET, "privacy.min_group=1"), ("privacy.min_group = 1",)),
        ((SET, "privacy.threshold=0.4"), ("privacy.threshold",)),
        ((SET, "privacy.bits=60"), ("privacy.bits",)),
        (("--reveal", "everything"), ("privacy.reveal 'everything'. Known: final-layer",)),
        (
            ("--method", "fedclust+ditto"),
            (
                "method fedclust+ditto does not work under secure aggregation",
                "the server sees each client's final layer",
                "or let that through with privacy.reveal = 'final-layer'",
            ),
        ),
        (
            ("--set", "wire.down=qsgd"),
            (
                "wire.down = 'qsgd'",
                "turns different models into different models",
                "privacy.same_orders = false",
            ),
        ),
        # These come to light in the first round, when the folder is there already.
        ((SET, "privacy.min_group=7"), ("slot 0", "privacy.min_group = 7")),
        (("--method", "cfl", "--reveal", "final-layer"), ("more than the final layer",)),
    ],
)
def test_refusals_are_one_sentence_and_leave_nothing_behind(cli, tmp_path, words, parts):
    ended = cli("run", *SIX, *words, "--dir", "kept")
    ended.says(2, *parts)
    assert not (tmp_path / "kept").exists()
    assert "Traceback" not in ended.out


def test_reveal_without_secure_is_refused(cli, tmp_path):
    ended = cli("run", "--reveal", "final-layer", "--method", "fedclust", "--dir", "kept")
    ended.says(2, "add --secure")
    assert not (tmp_path / "kept").exists()


def test_fedclust_with_consent(cli):
    ended = cli(
        "run",
        *SIX,
        "--method",
        "fedclust",
        "--reveal",
        "final-layer",
        "--set",
        "method.clusters=1",
        "--json",
    )
    assert ended.code == 0, ended.err
    summary = json.loads(ended.out)
    assert summary["privacy"]["reveal"] == "final-layer"
    assert "revealed by consent" in json.dumps(summary["exposure"])


def test_with_a_deadline_the_straggler_alone_is_left_out(cli, tmp_path):
    """As in the plain run: the time that it takes is not taken from the others."""
    ten = ("--clients", 10, "--engine", "loop", "--rounds", 2, "--quiet", "--json")
    slow = ("--clock", "links", SET, "clock.speed=[0.2,4]", SET, "run.deadline=0.4")
    found = {}
    for extra in ((), ("--secure",)):
        ended = cli("run", *ten, *slow, *extra, "--dir", f"kept{len(extra)}")
        assert ended.code == 0, ended.err
        found[extra] = json.loads(ended.out)
    for summary in found.values():
        assert (summary["late"], summary["lost"], summary["abandoned"]) == (2, 0, 0)
    sums = found["--secure",]["exposure"]["sums"]["secure"]
    assert (sums["count"], sums["smallest"], sums["largest"]) == (2, 9, 9)


def test_compare(cli, tmp_path):
    """A method that was asked for by name is not left out silently."""
    few = (*SIX, "--set", "privacy.min_group=2")
    ended = cli("compare", *few, "--methods", "fedavg,ifca:k=2,cfl", "--dir", "kept")
    ended.says(2, "method cfl does not work under secure aggregation", "each update")
    assert not (tmp_path / "kept").exists()
    ended = cli("compare", *few, "--methods", "fedavg,ifca:k=2", "--dir", "kept")
    assert ended.code == 0, ended.err
    results = sorted((tmp_path / "kept").glob("*/result.json"))
    assert len(results) == 2
    for path in results:
        summary = json.loads(path.read_text())
        assert summary["privacy"]["secure"] is True
        assert summary["exposure"]["single"] == {}


def people(seed=0, clients=6):
    population = uneven(clients, seed=seed)
    return [(c.train.x, c.train.y) for c in population.clients]


def test_simulate():
    result = coterie.simulate(people(), rounds=2, privacy={"secure": True}, engine="loop")
    assert result.summary["privacy"] == {"secure": True, "randomness": "simulated"}
    with pytest.raises(ConfigError, match="method cfl does not work under secure aggregation"):
        coterie.simulate(people(), method="cfl", rounds=2, privacy={"secure": True})
    with pytest.raises(ConfigError, match="privacy"):
        coterie.simulate(people(), rounds=2, privacy={"sekure": True})


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("fedavg", {}),
        ("ifca", {"k": 2}),
        ("fedprox", {"mu": 0.1}),
        ("ditto", {}),
        ("fedper", {}),
    ],
)
@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.e2e) for s in (1, 2))])
def test_accuracy_is_that_of_the_plain_run(name, parameters, seed):
    """Within a point, seed by seed; rounding at 2⁻²⁴ moves next to nobody.

    With clients enough for every group to be large: a small one would stay as it was.
    """
    population, method = uneven(8, samples=900, seed=seed), make(name, parameters)
    settings = {"rounds": 2, "evaluate_every": 0, "adapt_epochs": 0, "seed": seed}
    changes = {"settings": settings, "schedule": {"epochs": 5}}
    plain = execute(experiment(method, population, **changes))
    sealed = execute(secured(method, population=population, **changes))
    assert not any("withheld" in event for event in sealed.history)
    assert sealed.summary["exposure"]["sums"]["secure"]["count"] >= 2
    assert abs(plain.accuracy - sealed.accuracy) <= 0.01
    assert plain.accuracy > 0.5  # of ten digits
