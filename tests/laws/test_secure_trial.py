"""Groups found and tried under secure sums: the same groups, from sums of groups only."""

import pytest
import torch

import coterie
from coterie.errors import ConfigError

SETTINGS = {"rounds": 5, "engine": "loop", "lr": 0.1, "batch_size": 8, "steps": 14}


def people(groups=2, each=4):
    """Clients of opposite rules."""
    random = torch.Generator().manual_seed(3)
    rows = [torch.randn(80, 6, generator=random) for _ in range(groups * each)]
    rules = torch.eye(6)[:groups]
    clients = [(x, (x @ rules[i % groups] > 0).long()) for i, x in enumerate(rows)]
    return coterie.data.from_clients(clients, val_fraction=0.2)


def run(method, **privacy):
    settings = SETTINGS | ({"privacy": privacy} if privacy else {})
    return coterie.simulate(people(), "logistic", method, **settings)


def verdict(result):
    return next(e["notes"]["verdict"] for e in result.history if "verdict" in e.get("notes", {}))


def test_the_same_groups_and_models_as_in_the_open():
    method = coterie.fedclust(fallback=False)
    plain, secure = run(method), run(method, secure=True, reveal="final-layer", min_group=3)
    assert len(set(plain.groups.values())) == 2
    assert secure.groups == plain.groups
    for client in range(8):
        ours, theirs = secure.weights(client).vector, plain.weights(client).vector
        assert torch.allclose(ours, theirs, atol=1e-4)
    # Every cut is tried in the open; hidden, only those whose groups have three members.
    assert max(verdict(plain)["cuts"]) == 8
    assert verdict(secure)["cuts"] == [1, 2]
    losses = dict(zip(verdict(plain)["cuts"], verdict(plain)["losses"], strict=True))
    assert verdict(secure)["losses"] == pytest.approx([losses[1], losses[2]], abs=1e-3)


def test_without_a_grouping_of_large_enough_groups_there_is_no_trial():
    hidden = {"secure": True, "reveal": "final-layer", "min_group": 5}
    result = run(coterie.fedclust(), **hidden)
    assert len(set(result.groups.values())) == 1
    why = result.begun["notes"]["verdict"]["why"]
    assert why.startswith("the evidence finds 2 groups, but no grouping to try has 5 or more")
    assert result.summary["grouping"]["sentence"] == f"One group: {why}."
    assert not any("verdict" in event.get("notes", {}) for event in result.history)


def test_groups_too_small_for_a_sum_are_found_but_not_tried():
    privacy = {"secure": True, "reveal": "final-layer", "min_group": 5}
    settings = SETTINGS | {"privacy": privacy, "seeds": 1}
    del settings["rounds"]
    found = coterie.find_groups(people(), "logistic", **settings)
    assert list(found.groups.values()) == [0, 1] * 4
    assert "is not known: the evidence finds 2 groups, but no grouping to try" in found.verdict
    assert found.advice == []
    assert found.cost["rounds"] == 0
    assert set(found.result.groups.values()) == set(found.result.state.models)


def test_scores_are_those_of_clients_where_all_count_equally():
    """These clients have equally many samples, so nothing but the scale of sums is different."""
    method = coterie.fedclust(fallback=False)
    hidden = {"secure": True, "reveal": "final-layer", "min_group": 3}
    by_samples, equal = run(method, **hidden), run(method, weights="equal", **hidden)
    assert equal.groups == by_samples.groups
    assert verdict(equal)["losses"] == pytest.approx(verdict(by_samples)["losses"], rel=1e-4)


def test_no_more_than_the_final_layer_of_anybody_is_ever_seen():
    """Not even where it tells nothing: the whole change stays with the clients."""
    random = torch.Generator().manual_seed(5)
    alike = [(x, (x[:, 0] > 0).long()) for x in torch.randn(8, 60, 6, generator=random).unbind()]
    settings = SETTINGS | {"privacy": {"secure": True, "reveal": "final-layer"}}
    result = coterie.simulate(alike, "mlp", coterie.fedclust(), **settings)
    exposure = result.summary["exposure"]
    layers = {layer for each in exposure["revealed"] for layer in each["layers"]}
    assert layers == {"head"}
    assert {each["array"] for each in exposure["revealed"]} == {"first", "second"}
    assert result.begun["notes"]["evidence"]["by"] == "final-layer"


@pytest.mark.parametrize("method", [coterie.fl_hc(), coterie.user_centric(streams="auto")])
def test_methods_that_look_at_whole_models_are_refused(method):
    with pytest.raises(ConfigError, match="secure aggregation"):
        run(method, secure=True)


@pytest.mark.parametrize(
    "privacy", [{"noise": 1.0}, {"noise": 1.0, "mechanism": "local"}], ids=["central", "local"]
)
def test_noise_and_evidence_exclude_each_other(privacy):
    with pytest.raises(ConfigError, match=r"not calibrated for these uploads|has no noise"):
        run(coterie.fedclust(), **privacy)


@pytest.mark.parametrize("method", [coterie.fedclust(), coterie.dc_pfl()])
def test_in_the_open_a_trial_shows_no_scores_of_single_clients(method):
    result = run(method)
    assert len(verdict(result)["cuts"]) == 8  # from one group to everybody alone
    single = result.summary["exposure"]["single"]
    assert "scores" in single["none, averaged on arrival"]["arrays"]
    assert all("scores" not in single[way]["arrays"] for way in ("none", "none, a mean of one"))
