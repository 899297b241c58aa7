"""NbAFL's formulas: numbers worked by hand, and that its noise is as private as it says."""

import math

import numpy as np
import pytest

from coterie.channel.privacy.accounting import gaussian_epsilon
from coterie.channel.privacy.nbafl import clip_weights, downlink_sigma, uplink_sigma
from coterie.errors import ConfigError

DELTA = 1.25 * math.exp(-2)  # so that c = 2
# C = 3 and m = 12 make Δs = 1/2.
SENT = {"clip": 3.0, "least_samples": 12, "epsilon": 0.5, "delta": DELTA, "exposures": 4}


def test_uplink_by_hand():
    assert uplink_sigma(**SENT) == pytest.approx(2 * 4 * 0.5 / 0.5)


def test_downlink_by_hand():
    # 2cC·√(100 - 16·4)/(mNε) = 12·6/24
    assert downlink_sigma(**SENT, rounds=10, clients=4) == pytest.approx(3.0)


@pytest.mark.parametrize("rounds", [1, 7, 8])
def test_the_server_adds_nothing_while_the_clients_noise_suffices(rounds):
    assert downlink_sigma(**SENT, rounds=rounds, clients=4) == 0.0  # L√N = 8


@pytest.mark.parametrize(("rounds", "clients"), [(9, 4), (50, 10), (200, 100)])
def test_both_noises_together_are_what_t_means_need(rounds, clients):
    down = downlink_sigma(**SENT, rounds=rounds, clients=clients)
    of_the_mean = 2 * rounds * (0.5 / clients) / 0.5
    assert down**2 + uplink_sigma(**SENT) ** 2 / clients == pytest.approx(of_the_mean**2)


@pytest.mark.parametrize("epsilon", [0.01, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("delta", [1e-8, 1e-5, 1e-2])
@pytest.mark.parametrize("exposures", [1, 5])
def test_what_is_accounted_is_true(epsilon, delta, exposures):
    sigma = uplink_sigma(3.0, 12, epsilon, delta, exposures)
    together = sigma / 0.5 / math.sqrt(exposures)  # of Δs
    assert gaussian_epsilon(together, delta) <= epsilon


def test_weights_are_clipped_not_stretched():
    np.testing.assert_allclose(clip_weights(np.array([3.0, -4.0]), 2.0), [1.2, -1.6])
    np.testing.assert_array_equal(clip_weights(np.array([3.0, -4.0]), 5.0), [3.0, -4.0])
    np.testing.assert_array_equal(clip_weights(np.zeros(2), 5.0), [0.0, 0.0])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"epsilon": 1.0}, "epsilon between 0 and 1"),
        ({"epsilon": 0.0}, "epsilon between 0 and 1"),
        ({"epsilon": math.nan}, "epsilon between 0 and 1"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"clip": 0.0}, "clip"),
        ({"least_samples": 0}, "least_samples"),
        ({"exposures": 0}, "exposures"),
    ],
)
def test_refused(wrong, words):
    with pytest.raises(ConfigError, match=words):
        uplink_sigma(**SENT | wrong)
    with pytest.raises(ConfigError, match=words):
        # Also where no noise would be added.
        downlink_sigma(**SENT | wrong, rounds=1, clients=4)
