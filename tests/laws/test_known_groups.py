"""Given groups, where they must coincide with something simpler."""

from dataclasses import replace

import pytest

import coterie
from coterie.channel.compression.coding import Coding
from coterie.channel.privacy.settings import Privacy
from coterie.engines.loop import Loop
from coterie.engines.pool import Pool
from coterie.errors import ConfigError
from coterie.experiment.experiment import execute
from coterie.methods import make
from guarded import SECURE, Driven, secured, uneven
from support import digits, drive, experiment, models, on_quadratics, quadratics, same_bits

PEOPLE = digits(clients=6, groups=3)
PARTIAL = {"rounds": 4, "cohort": 0.5}
cohorts = pytest.mark.parametrize("settings", [{"rounds": 3}, PARTIAL], ids=["all", "half"])


def trained(method, folder, population=PEOPLE, engine=None, **changes):
    made = experiment(method, population, **changes)
    state, channel, running = drive(made, folder, engine)
    try:
        return models(made, state, channel)
    finally:
        running.close()


@cohorts
def test_one_group_of_all_is_fedavg(settings, tmp_path):
    ours = trained(coterie.known_groups(groups=["all"] * 6), tmp_path / "a", settings=settings)
    assert same_bits(ours, trained(coterie.fedavg(), tmp_path / "b", settings=settings))


@cohorts
def test_each_alone_is_local(settings, tmp_path):
    ours = trained(coterie.known_groups(groups=list(range(6))), tmp_path / "a", settings=settings)
    assert same_bits(ours, trained(coterie.local(), tmp_path / "b", settings=settings))


@cohorts
def test_the_true_groups_are_those_of_the_oracle(settings, tmp_path):
    theirs = trained(coterie.oracle(), tmp_path / "a", settings=settings)
    for i, groups in enumerate(["group", list(PEOPLE.groups), dict(enumerate("abcabc"))]):
        ours = trained(coterie.known_groups(groups=groups), tmp_path / f"{i}", settings=settings)
        assert same_bits(ours, theirs)
    other = trained(coterie.known_groups(groups=list("aabbcc")), tmp_path / "b", settings=settings)
    assert not same_bits(other, theirs)


def test_a_group_moves_towards_the_mean_of_its_members_optima():
    """Each round goes a fifth of the way; by samples, the optima of a are at (2·2 + 8) / 3 = 4."""
    people = quadratics([[1.0, 3.0], [8.0], [20.0]])
    made = on_quadratics(
        coterie.known_groups(groups={"0": "a", "1": "a", "2": "b"}), [], population=people
    )
    result = execute(made)
    ends = {c: float(result.weights(c).vector[0]) for c in range(3)}
    way = 1 - 0.8**3
    assert ends == pytest.approx({0: way * 4, 1: way * 4, 2: way * 20})


def test_a_combination_groups_as_given(tmp_path):
    """Ditto's shared models, inside given groups, are those of the groups alone."""
    groups = list("aabbbb")
    plain, _, _ = drive(experiment(coterie.known_groups(groups=groups), PEOPLE), tmp_path / "plain")
    ways = {"groups": groups}, {"known-groups.groups": groups}, {"known-groups": {"groups": groups}}
    for i, given in enumerate(ways):
        made = experiment(make("known-groups+ditto", given), PEOPLE)
        state, _, _ = drive(made, tmp_path / str(i))
        assert state.groups == dict(enumerate(groups))
        shared = [[s.models[g].vector for g in "ab"] for s in (state, plain)]
        assert same_bits(*shared)


ODD = {0: "Zürich / Nord.1", 1: "Zürich / Nord.1", 2: "a\nb", 3: 'x"y', 4: "held", 5: "a\nb"}


def test_any_text_is_a_name_of_a_group(tmp_path):
    """On loop and pool, with codecs that remember models by their names, and in checkpoints."""
    odd, numbers = coterie.known_groups(groups=ODD), {0: 0, 1: 0, 2: 1, 3: 2, 4: 3, 5: 1}
    plain = trained(coterie.known_groups(groups=numbers), tmp_path / "a", settings=PARTIAL)
    assert same_bits(plain, trained(odd, tmp_path / "b", settings=PARTIAL))
    lossy = PARTIAL | {"wire": Coding("qsgd", "qsgd:levels=127")}
    looped = trained(odd, tmp_path / "c", settings=lossy)
    pooled = trained(odd, tmp_path / "d", settings=lossy, engine=lambda p: Pool(p, 2))
    assert same_bits(looped, pooled)
    made = experiment(odd, PEOPLE, settings={"rounds": 2})
    whole = execute(made, tmp_path / "run")
    again = execute(made, tmp_path / "run", resume=True)
    assert whole.groups == again.groups == ODD


# --- newcomers -----------------------------------------------------------------------------------


def test_newcomers_join_the_group_that_was_given():
    groups = list("aabbab")
    made = experiment(
        coterie.known_groups(groups=groups), PEOPLE, settings={"rounds": 1, "holdout": 3}
    )
    assert len(made.newcomers) == 3
    result = execute(made)
    assert result.groups == dict(enumerate(groups))


# --- secure sums ---------------------------------------------------------------------------------

LARGE, SMALL = ["a", "b"] * 3, ["a"] * 5 + ["b"]


def test_groups_work_under_secure_sums(tmp_path):
    """The same models as without, up to the grid that sums are rounded to."""
    people = uneven()

    def secure(names):
        """The models of a and b, if these names are given to them."""
        method = coterie.known_groups(groups=[names[g] for g in LARGE])
        driven = Driven(secured(method, population=people), tmp_path / names["a"][0], Loop).all()
        assert not driven.abandoned
        return [driven.state.models[name].vector for name in names.values()]

    made = experiment(coterie.known_groups(groups=LARGE), people)
    plain, _, _ = drive(made, tmp_path / "plain")
    found = secure({"a": "a", "b": "b"})
    pairs = zip(found, (plain.models[g].vector for g in "ab"), strict=True)
    assert all((a - b).abs().max() < 1e-5 for a, b in pairs)
    assert same_bits(secure({"a": 'x"y', "b": "Zürich / Nord.1"}), found)


def test_a_group_that_is_too_small_for_a_secure_sum_is_refused_before_anything_is_trained(tmp_path):
    made = secured(coterie.known_groups(groups=SMALL))
    with pytest.raises(ConfigError) as told:
        execute(made, tmp_path / "run")
    assert (
        "too few clients in group 'b' (1 client): a secure sum needs privacy.min_group = 3"
        in str(told.value)
    )
    assert not (tmp_path / "run").exists()
    two = secured(coterie.known_groups(groups=list("aabbbb")), settings={"cohort": 0.5})
    with pytest.raises(ConfigError, match=r"group 'a' \(2 clients\)"):
        two.plan(tmp_path)
    both = secured(coterie.known_groups(groups=list("aabccc")))
    with pytest.raises(ConfigError, match=r"groups 'a' \(2 clients\), 'b' \(1 client\)"):
        both.plan(tmp_path)
    lower = replace(SECURE, min_group=2)
    secured(coterie.known_groups(groups=list("aabbbb")), lower).plan(tmp_path)


def test_a_small_group_may_stay_as_it_is(tmp_path):
    skip = Privacy(secure=True, small_groups="skip")
    made = secured(coterie.known_groups(groups=SMALL), skip)
    driven = Driven(made, tmp_path).all()
    start = made.plan(tmp_path).start.vector
    assert (driven.state.models["b"].vector == start).all()
    assert not (driven.state.models["a"].vector == start).all()
