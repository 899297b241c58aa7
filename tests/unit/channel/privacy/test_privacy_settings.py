"""What a run may ask of privacy, and what does not go together."""

from dataclasses import replace

import pytest
from torch import nn

import coterie
from coterie.channel.compression.coding import Coding
from coterie.channel.policy import Policy
from coterie.channel.privacy.settings import Privacy
from coterie.core.weights import Layout
from coterie.errors import ConfigError
from coterie.experiment.privacy import check_privacy, seen_by
from coterie.methods import make
from support import ROWS

LAYOUT = Layout.of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
NORMED = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def test_nothing_is_asked_unless_asked():
    assert not Privacy().on
    assert not Privacy().noised
    assert Privacy(secure=True).on
    assert not Privacy(secure=True).noised
    for noised in (Privacy(epsilon=8.0), Privacy(noise=1.0)):
        assert noised.on
        assert noised.does("central")
        assert not noised.does("local")
    assert not Privacy(mechanism="local").does("local")
    assert Privacy().follows is None
    assert Privacy(clipping="median", quantile=0.9).follows == 0.5
    assert Privacy(clipping="quantile", quantile=0.9).follows == 0.9
    Privacy().check()
    Privacy(secure=True, epsilon=8.0).check()
    Privacy(secure=True, reveal="final-layer", threshold=1.0, neighbours=4).check()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"min_group": 1}, "privacy.min_group = 1: must be at least 2"),
        ({"threshold": 0.5}, "privacy.threshold = 0.5: must be greater than 0.5"),
        ({"threshold": 1.01}, "privacy.threshold"),
        ({"neighbours": -2}, "privacy.neighbours"),
        ({"neighbours": 3}, "privacy.neighbours = 3: must be a multiple of 2"),
        ({"bits": 7}, "privacy.bits = 7: must be at least 8"),
        ({"bits": 41}, "privacy.bits = 41"),
        ({"epsilon": 0.0}, "privacy.epsilon"),
        ({"delta": 1.0}, "privacy.delta"),
        ({"noise": 0.0}, "privacy.noise"),
        ({"clip": 0.0}, "privacy.clip"),
        ({"quantile": 1.0}, "privacy.quantile"),
        ({"clip_rate": 0.0}, "privacy.clip_rate"),
        ({"mechanism": "centrl"}, "privacy.mechanism"),
        ({"clipping": "mean"}, "privacy.clipping"),
        ({"small_groups": "ignore"}, "privacy.small_groups"),
        ({"randomness": "sytem"}, "privacy.randomness"),
        ({"reveal": "finallayer", "secure": True}, "privacy.reveal"),
        ({"reveal": "final-layer"}, "which is off: add --secure"),
        ({"secure": True, "noise": 1.0, "mechanism": "local"}, "cannot be used with --secure"),
        (
            {"secure": True, "reveal": "final-layer", "epsilon": 8.0},
            "shows what the noise should hide",
        ),
    ],
)
def test_what_means_nothing_is_refused(changes, words):
    with pytest.raises(ConfigError) as refused:
        Privacy(**changes).check()
    assert words in str(refused.value)


def test_with_noise_the_statistics_of_normalisation_must_stay():
    noised = Privacy(noise=1.0)
    with pytest.raises(ConfigError, match=r"model\.bn = stats-local"):
        noised.check_layout(Layout.of(NORMED))
    noised.check_layout(Layout.of(NORMED, "stats-local"))
    Privacy(secure=True).check_layout(Layout.of(NORMED))


def check(privacy, method, coding=None, policy=None):
    check_privacy(privacy, method, coding or Coding(), policy or Policy(), True, LAYOUT, 8)


def test_no_digits_may_be_lost_on_the_way_to_a_secure_sum():
    secure = Privacy(secure=True)
    with pytest.raises(ConfigError, match=r"wire\.up = 'qsgd' is lossy.*--secure"):
        check(secure, coterie.fedavg(), Coding(up="qsgd"))
    check(Privacy(), coterie.fedavg(), Coding(up="qsgd"))


PARTS = (Policy(), Policy(cohort=0.5), Policy(cohort=7), Policy(sampling="poisson"))


@pytest.mark.parametrize("policy", PARTS, ids=["all", "half", "all but one", "coins"])
def test_digits_lost_on_the_way_down_are_other_models_for_others(policy):
    """A change of the model that a client holds is another one for whoever holds another."""
    secure, lossy = Privacy(secure=True), Coding(down="qsgd")
    with pytest.raises(ConfigError, match=r"wire\.down = 'qsgd'.*privacy\.same_orders = false"):
        check(secure, coterie.fedavg(), lossy, policy)
    check(secure, coterie.fedavg(), None, policy)
    check(Privacy(secure=True, same_orders=False), coterie.fedavg(), lossy, policy)
    check(Privacy(), coterie.fedavg(), lossy, policy)


def test_what_may_be_revealed_is_named():
    with pytest.raises(ConfigError) as refused:
        Privacy(secure=True, reveal="all").check()
    text = str(refused.value)
    assert "final-layer" in text
    assert "''" not in text
    assert ": ," not in text


EACH = [name for name, made in ROWS.items() if made().sees == "each"]
MEANS = [name for name in ROWS if name not in EACH]


@pytest.mark.parametrize("name", EACH)
def test_methods_that_see_single_vectors_are_refused_by_name_and_with_what_they_see(name):
    made = ROWS[name]()
    with pytest.raises(ConfigError) as refused:
        check(Privacy(secure=True), made)
    text = str(refused.value)
    assert text.startswith(f"method {made.name} does not work under secure aggregation")
    assert seen_by(made) in text
    assert ("privacy.reveal = 'final-layer'" in text) == ("final layer" in seen_by(made))
    check(Privacy(), made)


@pytest.mark.parametrize("name", MEANS)
def test_methods_that_ask_for_means_are_not_refused(name):
    check(Privacy(secure=True), ROWS[name]())


def test_what_is_seen_is_in_the_methods_own_words():
    assert "final layer" in seen_by(coterie.fedclust())
    assert len({seen_by(ROWS[n]()) for n in ("cfl", "fedfomo", "pacfl", "krum")}) > 1
    around = coterie.layer_wise(coterie.fedclust(), 2)
    assert seen_by(around) == seen_by(coterie.fedclust())
    silent = replace(coterie.fedavg(), name="silent", sees="each")
    assert seen_by(silent) == "the server sees the replies of each client"


def test_what_a_combination_sees_is_what_its_parts_see():
    made = make("fedclust+ditto", {})
    assert seen_by(made) == seen_by(coterie.fedclust())
    with pytest.raises(ConfigError) as refused:
        check(Privacy(secure=True), made)
    text = str(refused.value)
    assert text.startswith("method fedclust+ditto does not work under secure aggregation")
    assert seen_by(coterie.fedclust()) in text
    assert "privacy.reveal = 'final-layer'" in text
