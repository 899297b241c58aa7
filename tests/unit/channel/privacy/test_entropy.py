"""Where randomness comes from."""

import os

import pytest

from coterie.channel.privacy.entropy import KINDS, Entropy
from coterie.errors import ConfigError


def test_a_simulation_follows_from_its_seed_and_the_names():
    names = ("keys", 3, 1, "a")
    one, other = (Entropy("simulated", 7).stream(*names) for _ in range(2))
    first, second = one(32), one(32)
    assert (other(32), other(32)) == (first, second)
    assert first != second
    seen = {first, second}
    for seed, changed in ((8, names), (7, ("keys", 3, 2, "a")), (7, ("shares", 3, 1, "a"))):
        seen.add(Entropy("simulated", seed).stream(*changed)(32))
    seen.add(Entropy("simulated", 7).stream("keys", 31, "a")(32))  # 3, 1 is not 31
    assert len(seen) == 6


@pytest.mark.parametrize("count", [0, 1, 16, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_as_many_bytes_as_asked_for(kind, count):
    assert len(Entropy(kind, 1).stream("x")(count)) == count


def test_the_system_is_the_operating_systems_generator_whatever_the_names(monkeypatch):
    stream = Entropy("system", 7).stream("keys", 3)
    assert len({stream(16) for _ in range(100)}) == 100
    monkeypatch.setattr(os, "urandom", lambda count: b"\x07" * count)
    assert Entropy("system", 7).stream("noise")(3) == b"\x07\x07\x07"
    assert Entropy("simulated", 7).stream("noise")(3) != b"\x07\x07\x07"


def test_no_other_source():
    with pytest.raises(ConfigError, match=r"privacy\.randomness"):
        Entropy("sytem")
