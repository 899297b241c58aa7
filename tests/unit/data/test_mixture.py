"""Made-up mixtures of Gaussians."""

import numpy as np
import pytest
from scipy.spatial.distance import pdist

from coterie.data import build_population, load
from coterie.errors import ConfigError


def test_a_mixture_has_the_separation_and_deviation_that_it_says():
    raw = load("mixture", components=5, dimensions=8, separation=6.0, samples=20_000)
    means = np.stack([raw.x[raw.y == c].mean(0) for c in range(5)])
    rest = raw.x - means[raw.y]
    assert pdist(means).min() == pytest.approx(6.0, abs=0.1)
    assert rest.std() == pytest.approx(1.0, abs=0.01)
    assert np.bincount(raw.y).tolist() == [4000] * 5
    assert raw.x.dtype == np.float32
    assert raw.classes == ("0", "1", "2", "3", "4")


def test_a_seed_draws_a_mixture_of_its_own():
    one, same, other = (load("mixture", samples=100, seed=s).x for s in (1, 1, 2))
    assert np.array_equal(one, same)
    assert not np.allclose(one, other)


def test_each_client_can_hold_a_few_components():
    raw = load("mixture", components=16, dimensions=4, samples=1600)
    skew = {"partition": "label-skew", "partition_params": {"fraction": 0.25}}
    people = build_population(raw, clients=20, **skew)
    assert {len(np.unique(c.train.y)) for c in people.clients} == {4}


@pytest.mark.parametrize(
    "wrong", [{"components": 1}, {"dimensions": 0}, {"samples": 3}, {"separation": 0}, {"seed": -1}]
)
def test_what_is_no_mixture_is_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        load("mixture", **wrong)
