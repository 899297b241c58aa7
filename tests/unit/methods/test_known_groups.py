"""Given groups in Python: their sources, how the method travels, and which clients it admits."""

import json
import warnings
from dataclasses import replace

import numpy as np
import pytest

import coterie
from coterie.core.method import Round
from coterie.data import ClientData
from coterie.errors import ConfigError
from coterie.experiment.admit import admit_client
from coterie.experiment.experiment import execute
from coterie.methods import make
from support import digits, experiment

PEOPLE = digits(clients=4)
GROUPS = {"0": "a", "1": "b", "2": "a", "3": "b"}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "g.json"
    path.write_text(json.dumps({"groups": GROUPS}))
    return path


def test_a_method_of_a_file_travels_with_its_content(file):
    for made in (
        coterie.known_groups(groups=str(file)),
        coterie.known_groups(str(file)),
        make("known-groups", {"groups": str(file)}),
    ):
        assert made.source.parameters == {"groups": GROUPS}
    joined = make("known-groups+ditto", {"groups": str(file)})
    assert joined.source.parameters["parameters"] == {"groups": GROUPS}
    file.unlink()
    for made in (coterie.known_groups(groups=GROUPS), joined):
        again = made.source.make()
        state = again.init(None, experiment(again, PEOPLE).setup(_start()))
        assert state.groups == {0: "a", 1: "b", 2: "a", 3: "b"}


def _start():
    return experiment(coterie.fedavg(), PEOPLE).client_plan(None).start


def test_other_methods_say_their_own_parameters():
    assert coterie.fedprox(mu=0.5).source.parameters == {"mu": 0.5}
    assert make("ifca+ditto", {"k": 2}).source.parameters == {
        "name": "ifca+ditto",
        "parameters": {"k": 2},
    }


def test_values_that_no_file_could_hold():
    with pytest.raises(ConfigError, match="use plain numbers and texts"):
        coterie.known_groups(groups=[np.int64(1), np.int64(0)])
    with pytest.raises(ConfigError, match=r"known-groups: groups = 1\.5"):
        coterie.known_groups(groups=1.5)


def test_metadata_of_simulate():
    rng = np.random.default_rng(0)
    people = [(rng.normal(size=(20, 3)), np.arange(20) % 2) for _ in range(4)]
    given = {"model": "logistic", "rounds": 1, "engine": "loop"}
    sites = {"site": {0: "n", 1: "s", 2: "s", 3: "n"}}
    result = coterie.simulate(
        people, method=coterie.known_groups(groups="site"), metadata=sites, **given
    )
    assert result.groups == sites["site"]
    with pytest.raises(ConfigError, match=r"no metadata column 'city' \(known: site\)"):
        coterie.simulate(people, method=coterie.known_groups("city"), metadata=sites, **given)
    with pytest.raises(ConfigError, match="metadata column 'site': client 3 is missing"):
        coterie.simulate(people, metadata={"site": {0: "n", 1: "n", 2: "n"}}, **given)
    result = coterie.simulate(
        replace(PEOPLE, metadata={"site": dict(enumerate("ssnn"))}),
        method=coterie.known_groups(groups="device"),
        metadata={"device": list("xyxy")},
        **given,
    )
    assert result.groups == dict(enumerate("xyxy"))


def test_a_column_of_ones_own_goes_before_the_true_groups():
    people = replace(PEOPLE, metadata={"group": dict(enumerate("ppqq"))})
    result = execute(experiment(coterie.known_groups(), people, settings={"rounds": 1}))
    assert result.groups == dict(enumerate("ppqq"))


# --- newcomers -----------------------------------------------------------------------------------


def test_newcomers_that_nobody_named(tmp_path):
    data = digits(clients=5).clients[4]
    result = execute(experiment(coterie.known_groups(GROUPS), PEOPLE, settings={"rounds": 1}))
    assert isinstance(data, ClientData)
    with pytest.raises(ConfigError, match=r"cannot admit client 4: its group is not known"):
        admit_client(result, data)
    assert admit_client(result, data, metadata={"group": "b"}).group == "b"
    with pytest.raises(ConfigError, match=r"its group 'c' \(known: a, b\)"):
        admit_client(result, data, metadata={"group": "c"})


def test_whoever_is_not_named_does_not_keep_others_out():
    method = coterie.known_groups(GROUPS)
    setup = replace(experiment(method, PEOPLE).setup(_start()), clients=[0, 1])
    state = method.init(None, setup)
    assert set(state.groups) == {0, 1}
    state = method.admit(None, state, Round(1, [9, 3]))
    assert state.groups == {0: "a", 1: "b", 3: "b"}
    with pytest.raises(ConfigError, match="cannot admit client 9"):
        method.admit(None, state, Round(2, [9]))


# --- noise ---------------------------------------------------------------------------------------


def test_a_run_with_noise_warns_once_of_what_it_does_not_cover():
    given = {"rounds": 1, "engine": "loop", "model": "logistic", "privacy": {"epsilon": 8.0}}
    with pytest.warns(UserWarning, match="ε does not cover the groups given to") as told:
        coterie.simulate(PEOPLE, method=coterie.known_groups(GROUPS), **given)
    assert len([w for w in told if "does not cover" in str(w.message)]) == 1
    with pytest.warns(UserWarning, match="column 'group', .* if it was derived from the data"):
        coterie.simulate(PEOPLE, method=make("known-groups+fedprox"), **given)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        coterie.simulate(PEOPLE, method="fedavg", **given)
        coterie.simulate(PEOPLE, method=coterie.known_groups(GROUPS), rounds=1, engine="loop")
