"""Shares by hand, in a field that is proven to be one; and wrong shares among right ones."""

from itertools import combinations, islice
from math import isqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregating import stream
from coterie.channel.privacy.secagg.shamir import PRIME, _choices, combine, rebuild, split, weights


def secret_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def coefficients(*numbers: int):
    """A source of 'random' bytes that draws these, the highest power first."""
    return lambda count: b"".join(n.to_bytes(48, "big") for n in numbers)


def by_division(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, isqrt(n) + 1))


# p: a known prime factor of p - 1 that is larger than its square root (Pocklington); the last
# one's factors are small enough to divide by everything.
CERTIFICATE = {
    PRIME: (474233203066845416735444346211990045207,),
    474233203066845416735444346211990045207: (2956539135407950972181,),
    2956539135407950972181: (3016876668783623441,),
    3016876668783623441: (325301, 2333, 1877, 1151, 23),
}


def test_the_field_is_a_field():
    """Pocklington: p is prime if primes q with product F > √p divide p - 1, and for each q some
    a has a^(p-1) = 1 mod p and a^((p-1)/q) - 1 coprime to p."""
    from math import gcd, prod

    for p, factors in CERTIFICATE.items():
        assert (p - 1) % prod(factors) == 0
        assert prod(factors) ** 2 > p
        for q in factors:
            assert q in CERTIFICATE or by_division(q)
            assert any(
                pow(a, p - 1, p) == 1 and gcd(pow(a, (p - 1) // q, p) - 1, p) == 1
                for a in range(2, 20)
            )


def test_it_is_the_smallest_prime_that_holds_32_bytes():
    assert PRIME > 2**256
    assert all(pow(3, n - 1, n) != 1 for n in range(2**256 + 1, PRIME, 2))


def test_two_of_three_by_hand():
    """The line 42 + 10x."""
    shares = split(secret_of(42), 2, [1, 2, 3], coefficients(10))
    assert shares == {1: 52, 2: 62, 3: 72}
    assert weights((1, 2)) == (2, PRIME - 1)  # 2·52 - 62 = 42
    assert weights((2, 3)) == (3, PRIME - 2)  # 3·62 - 2·72 = 42
    for two in combinations(shares, 2):
        assert combine({place: shares[place] for place in two}) == secret_of(42)


def test_three_of_six_by_hand():
    """The parabola 1234 + 166x + 94x², in which the order of the coefficients matters."""
    shares = split(secret_of(1234), 3, [1, 2, 3, 4, 5, 6], coefficients(94, 166))
    assert list(shares.values()) == [1494, 1942, 2578, 3402, 4414, 5614]
    for three in combinations(shares, 3):
        assert combine({place: shares[place] for place in three}) == secret_of(1234)


@given(st.binary(min_size=32, max_size=32), st.integers(1, 9), st.integers(0, 4), st.data())
def test_any_threshold_of_them_give_the_secret(secret, threshold, spare, data):
    places = data.draw(st.permutations(range(1, threshold + spare + 1)))
    shares = split(secret, threshold, places, stream("shamir"))
    chosen = data.draw(st.permutations(places))[:threshold]
    assert combine({place: shares[place] for place in chosen}) == secret


def test_the_largest_secret_survives():
    shares = split(b"\xff" * 32, 2, [1, 2], stream(0))
    assert combine(shares) == b"\xff" * 32


def test_one_too_few_fit_every_secret():
    """With threshold - 1 shares, each secret has a share of the next holder that leads to it."""
    shares = split(secret_of(7), 3, [1, 2, 3], stream("few"))
    known = {1: shares[1], 2: shares[2]}
    counts = weights((1, 2, 3))
    for other in (0, 8, 2**255):
        rest = other - counts[0] * known[1] - counts[1] * known[2]
        third = rest * pow(counts[2], -1, PRIME) % PRIME
        assert combine({**known, 3: third}) == secret_of(other)


def test_shares_of_equal_secrets_differ_when_drawn_anew():
    random = stream("anew")
    first, second = (split(secret_of(7), 2, [1, 2], random) for _ in range(2))
    assert all(first[place] != second[place] for place in first)


def test_a_value_beyond_the_secrets_is_none():
    assert combine({1: PRIME - 1}) is None
    assert combine({1: 2**256 - 1}) == b"\xff" * 32


@pytest.mark.parametrize("wrong", [[], [1], [9], [1, 9], [2, 6], [1, 4, 7]])
def test_wrong_shares_are_passed_over_while_enough_are_right(wrong):
    secret = secret_of(99)
    shares = split(secret, 6, range(1, 10), stream("wrong"))
    for place in wrong:
        shares[place] = (shares[place] + 12345**place) % PRIME  # errors that do not cancel
    found = rebuild(shares, 6, lambda made: made == secret)
    assert found is not None
    assert found[0] == secret
    assert len(found[1]) == 6
    assert not set(found[1]) & set(wrong)


def test_with_one_share_to_spare_each_is_left_out_once():
    places = tuple(range(1, 11))
    tried = list(islice(_choices(places, 9), 10))
    assert {*places} == {place for some in tried for place in set(places) - set(some)}
    assert list(_choices(places, 10)) == [places]  # nothing to spare: one way


def test_too_many_wrong_shares_give_nothing():
    shares = split(secret_of(99), 6, range(1, 10), stream("wrong"))
    for place in (1, 3, 5, 8):
        shares[place] += 12345**place
    assert rebuild(shares, 6, lambda made: made == secret_of(99)) is None
    assert rebuild({1: 1, 2: 2}, 3, lambda made: True) is None
