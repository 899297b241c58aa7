"""(ε, δ): against other accountants, exact formulas, and all neighbours of tiny cases."""

import itertools
import math
import sys
from decimal import Decimal, localcontext

import numpy as np
import pytest

from coterie.channel.privacy.accounting import (
    Mechanism,
    Sampling,
    calibrate,
    epsilon,
    gaussian_epsilon,
    reported,
    rounds_within,
    sensible_delta,
)
from coterie.errors import ConfigError


def poisson(multiplier, cohort=100, clients=1000):
    return Mechanism(Sampling("poisson", clients, cohort), multiplier)


def fixed(multiplier, cohort=100, clients=1000):
    return Mechanism(Sampling("fixed", clients, cohort), multiplier)


def everybody(multiplier, clients=1000):
    return Mechanism(Sampling("all", clients, clients), multiplier)


CASES = [  # cohort of 1000, multiplier, rounds, delta
    (100, 1.1, 200, 1e-5),
    (20, 0.8, 50, 1e-6),
    (500, 3.0, 20, 1e-4),
    (900, 8.0, 30, 1e-5),
]


@pytest.mark.parametrize(("cohort", "multiplier", "rounds", "delta"), CASES)
def test_agrees_with_opacus(cohort, multiplier, rounds, delta):
    from opacus.accountants import PRVAccountant, RDPAccountant  # takes seconds

    mechanism = poisson(multiplier, cohort)
    for mine, theirs in (("pld", PRVAccountant()), ("rdp", RDPAccountant())):
        theirs.history = [(multiplier, mechanism.sampling.rate, rounds)]
        assert reported(mechanism, mine) == mine
        figure = epsilon(mechanism, rounds, delta, mine)
        assert figure == pytest.approx(theirs.get_epsilon(delta), rel=0.02)


def by_integration(multiplier, delta):
    """The ε of one Gaussian answer from its two densities alone."""
    x, step = np.linspace(-40 * multiplier, 40 * multiplier + 1, 400_001, retstep=True)
    density = [np.exp(-0.5 * ((x - c) / multiplier) ** 2) for c in (1.0, 0.0)]
    one, other = (d / (multiplier * math.sqrt(2 * math.pi)) for d in density)
    low, high = 0.0, 1e3
    for _ in range(60):
        middle = (low + high) / 2
        more = np.maximum(one - math.exp(middle) * other, 0).sum() * step > delta
        low, high = (middle, high) if more else (low, middle)
    return high


@pytest.mark.parametrize("multiplier", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("delta", [1e-6, 1e-3])
def test_one_round_of_everybody_is_the_gaussian_mechanism(multiplier, delta):
    exactly = by_integration(multiplier, delta)
    assert gaussian_epsilon(multiplier, delta) == pytest.approx(exactly, abs=1e-6)
    assert epsilon(everybody(multiplier), 1, delta) == gaussian_epsilon(multiplier, delta)
    everyone_by_coin = epsilon(poisson(multiplier, 1000), 1, delta)
    assert everyone_by_coin == pytest.approx(exactly, rel=1e-3)
    assert everyone_by_coin >= exactly - 1e-6


def test_rounds_of_everybody_are_one_gaussian():
    for rounds in (2, 30):
        exactly = gaussian_epsilon(6.0 / math.sqrt(rounds), 1e-5)
        assert epsilon(everybody(6.0), rounds, 1e-5) == exactly
        assert epsilon(poisson(6.0, 1000), rounds, 1e-5) == pytest.approx(exactly, rel=1e-3)


def test_extremes_of_one_gaussian():
    assert gaussian_epsilon(0.0, 1e-5) == math.inf
    assert gaussian_epsilon(1e3, 0.01) == 0.0  # (0, δ) already
    assert gaussian_epsilon(0.01, 1e-5) == pytest.approx(0.5e4 + 100 * 4.26, rel=1e-3)


def worst_delta(multiplier, clients, cohort, epsilon):
    """The δ at this ε of one fixed-size round, by trying all neighbours with changes -1, 0, 1."""
    x, step = np.linspace(-12 * multiplier - cohort, 12 * multiplier + cohort, 20_001, retstep=True)

    def density(changes):
        sums = [sum(chosen) for chosen in itertools.combinations(changes, cohort)]
        values, often = np.unique(sums, return_counts=True)
        spread = np.exp(-0.5 * ((x[:, None] - values) / multiplier) ** 2) @ (often / len(sums))
        return spread / (multiplier * math.sqrt(2 * math.pi))

    worst = 0.0
    for others in itertools.combinations_with_replacement((-1, 0, 1), clients - 1):
        mine = [density((change, *others)) for change in (-1, 0, 1)]
        for one, other in itertools.permutations(mine, 2):
            worst = max(worst, np.maximum(one - math.exp(epsilon) * other, 0).sum() * step)
    return worst


@pytest.mark.parametrize(("clients", "cohort"), [(4, 1), (4, 2), (5, 4), (3, 3)])
@pytest.mark.parametrize("multiplier", [1.0, 3.0])
def test_fixed_size_covers_all_neighbours_and_the_poisson_figure_does_not(
    clients, cohort, multiplier
):
    delta = 1e-5
    right = epsilon(fixed(multiplier, cohort, clients), 1, delta)
    wrong = epsilon(poisson(multiplier, cohort, clients), 1, delta)
    assert worst_delta(multiplier, clients, cohort, right) <= delta
    assert worst_delta(multiplier, clients, cohort, wrong) > 10 * delta
    assert right > 1.3 * wrong


@pytest.mark.parametrize(("cohort", "multiplier", "rounds", "delta"), CASES[:3])
def test_fixed_size_is_not_accounted_as_poisson(cohort, multiplier, rounds, delta):
    right = epsilon(fixed(multiplier, cohort), rounds, delta)
    for accountant in ("pld", "rdp"):
        assert right > 1.3 * epsilon(poisson(multiplier, cohort), rounds, delta, accountant)


def without_replacement(rate, multiplier, most):
    """(order - 1)·RDP of one round, by order from 1: theorem 27 of Wang, Balle, Kasiviswanathan.

    In long decimals, straight from the statement: the sum moves by 2 when one is replaced.
    """
    noise, rate = Decimal(multiplier) / 2, Decimal(rate)
    orders = range(most + 2)
    moment = [(j * (j - 1) / (2 * noise * noise)).exp() for j in orders]  # exp((j-1)·ε(j))
    difference = [
        sum((-1) ** i * math.comb(j, i) * moment[i] for i in range(j + 1)) for j in orders
    ]
    term = [rate**2 * min(4 * (moment[2] - 1), 2 * moment[2])]
    for j in orders[3:-1]:
        ternary = 4 * (difference[j // 2 * 2] * difference[(j + 1) // 2 * 2]).sqrt()
        term.append(rate**j * min(ternary, 2 * moment[j]))
    sums = [sum(math.comb(a, j) * term[j - 2] for j in range(2, a + 1)) for a in orders[1:-1]]
    return [float(Decimal(1 + s).ln()) for s in sums]


@pytest.mark.parametrize(
    ("cohort", "multiplier", "rounds"), [(100, 1.1, 200), (100, 4.0, 200), (50, 6.0, 500)]
)
def test_fixed_size_from_its_theorem(cohort, multiplier, rounds):
    delta = 1e-5
    with localcontext() as context:
        context.prec = 120
        logs = without_replacement(cohort / 1000, multiplier, 40)
    figures = []
    for order in np.arange(1.1, 40, 0.1):
        # (order - 1)·RDP is convex in the order, so a chord is a bound.
        spent = rounds * np.interp(order, range(1, 41), logs) / (order - 1)
        figures.append(spent + math.log1p(-1 / order) - math.log(delta * order) / (order - 1))
    assert epsilon(fixed(multiplier, cohort), rounds, delta) == pytest.approx(min(figures), 1e-3)


def test_fixed_size_of_everybody_moves_by_two_bounds():
    whole = epsilon(fixed(4.0, 1000), 20, 1e-5)
    assert whole == pytest.approx(epsilon(poisson(2.0, 1000), 20, 1e-5, "rdp"))
    assert whole >= gaussian_epsilon(2.0 / math.sqrt(20), 1e-5)


@pytest.mark.parametrize("make", [poisson, fixed])
def test_more_rounds_more_clients_and_less_noise_cost_more(make):
    def rising(figures):
        return all(a < b for a, b in itertools.pairwise(figures))

    assert rising([epsilon(make(2.0), rounds, 1e-5) for rounds in (1, 2, 20)])
    assert rising([epsilon(make(2.0, cohort), 20, 1e-5) for cohort in (50, 300, 1000)])
    assert rising([epsilon(make(z), 20, 1e-5) for z in (4.0, 2.0, 1.0)])
    assert rising([epsilon(make(2.0), 20, delta) for delta in (1e-4, 1e-5)])


def test_nothing_done_and_no_noise():
    for make in (poisson, fixed):
        assert epsilon(make(1.0), 0, 1e-5) == 0.0
        assert epsilon(make(0.0), 1, 1e-5) == math.inf
    assert epsilon(everybody(0.0), 1, 1e-5) == math.inf


@pytest.mark.parametrize(
    ("kind", "target", "rounds"),
    [("poisson", 8.0, 50), ("poisson", 0.5, 1000), ("fixed", 8.0, 2), ("all", 2.0, 50)],
)
def test_calibrated_noise_is_the_least_that_will_do(kind, target, rounds):
    sampling = Sampling(kind, 1000, 1000 if kind == "all" else 100)
    multiplier = calibrate(sampling, target, 1e-5, rounds)
    assert epsilon(Mechanism(sampling, multiplier), rounds, 1e-5) <= target
    assert epsilon(Mechanism(sampling, multiplier * 0.999), rounds, 1e-5) > target


@pytest.mark.parametrize(
    ("mechanism", "budget"), [(poisson(1.5), 1.5), (fixed(6.0), 0.7), (everybody(9.0), 4.0)]
)
def test_as_many_rounds_as_the_budget_allows(mechanism, budget):
    rounds = rounds_within(mechanism, budget, 1e-5, most=1000)
    assert 1 < rounds < 1000
    assert epsilon(mechanism, rounds, 1e-5) <= budget < epsilon(mechanism, rounds + 1, 1e-5)
    assert rounds_within(mechanism, budget, 1e-5, most=rounds - 1) == rounds - 1
    assert rounds_within(mechanism, budget, 1e-5, most=rounds) == rounds


def test_no_round_fits_a_small_budget():
    assert rounds_within(poisson(1.0), 0.01, 1e-5, most=100) == 0
    assert rounds_within(poisson(1.0), 10.0, 1e-5, most=0) == 0


def test_what_is_reported():
    kinds = (poisson(1.0), fixed(1.0), everybody(1.0))
    assert [reported(m) for m in kinds] == ["pld", "rdp", "exact"]
    assert [reported(m, "rdp") for m in kinds[:2]] == ["rdp", "rdp"]
    assert [m.sampling.adjacency for m in kinds] == [
        "add or remove one client",
        "replace one client by another",
        "add or remove one client",
    ]
    assert poisson(1.0, 50).sampling.rate == 0.05


def test_the_library_is_silent(capfd, caplog):
    epsilon(poisson(1.0625), 7, 1e-5, "rdp")  # of it, orders from 1.1 are left out with a warning
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")


def test_a_delta_below_one_in_the_clients():
    for clients in (10, 1000):
        assert sensible_delta(clients) < 1 / clients


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: epsilon(poisson(1.0), 1, 0.0), "delta must be between 0 and 1"),
        (lambda: epsilon(poisson(1.0), 1, 1.0), "delta must be between 0 and 1"),
        (lambda: epsilon(poisson(1.0), -1, 1e-5), "not -1"),
        (lambda: epsilon(poisson(1.0), 1, 1e-5, "pdl"), "did you mean 'pld'"),
        (lambda: gaussian_epsilon(1.0, 2.0), "delta must be between 0 and 1"),
        (lambda: calibrate(poisson(1.0).sampling, 0.0, 1e-5, 9), "epsilon must be above 0"),
        (lambda: calibrate(poisson(1.0).sampling, 1.0, 1e-5, 0), "at least 1 round"),
        (lambda: calibrate(everybody(1.0).sampling, 1e9, 1e-5, 1), "protects nothing"),
        (lambda: calibrate(everybody(1.0).sampling, 1e-9, 1e-12, 10**6), "no amount of noise"),
        (lambda: rounds_within(poisson(1.0), -1.0, 1e-5, 9), "epsilon must be above 0"),
        (lambda: poisson(-1.0), "must not be negative"),
        (lambda: poisson(math.nan), "must not be negative"),
        (lambda: poisson(1.0, 1001), "a cohort of 1001 cannot be drawn from 1000"),
        (lambda: Sampling("all", 10, 9), "not all of them"),
        (lambda: Sampling("poison", 10, 9), "did you mean 'poisson'"),
    ],
)
def test_refused(ask, words):
    with pytest.raises(ConfigError, match=words):
        ask()


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_without_the_library(monkeypatch, accountant):
    monkeypatch.setitem(sys.modules, f"dp_accounting.{accountant}", None)
    with pytest.raises(ConfigError, match=r"coterie\[privacy\]"):
        epsilon(poisson(1.03125), 3, 1e-5, accountant)
    assert epsilon(everybody(1.03125), 3, 1e-5) > 0  # needs none
