"""Signature keys: from seeds in a simulation, else drawn once and kept for their owner alone."""

import pytest

from coterie.channel.privacy.entropy import Entropy
from coterie.channel.privacy.identity import KEYS, Roster
from coterie.channel.privacy.secagg.crypto import public_identity
from coterie.errors import RunDirError


def drawn(folder, clients=range(4)):
    roster = Roster(Entropy("system"), folder, clients)
    roster.prepare()
    return roster


def test_a_simulation_writes_nothing_and_repeats_itself(tmp_path):
    one, other = (Roster(Entropy("simulated", 5), tmp_path / n, range(4)) for n in "ab")
    one.prepare()
    assert not list(tmp_path.iterdir())
    assert dict(one) == dict(other)
    assert len(set(one.values())) == 4
    assert dict(one) != dict(Roster(Entropy("simulated", 6), tmp_path, range(4)))


@pytest.mark.parametrize("kind", ["simulated", "system"])
def test_the_roster_holds_the_public_halves(kind, tmp_path):
    roster = Roster(Entropy(kind), tmp_path, range(3))
    roster.prepare()
    assert len(roster) == 3
    assert list(roster) == [0, 1, 2]
    for client in roster:
        assert roster[client] == public_identity(roster.private(client))
        assert roster[client] != roster.private(client)
    assert 3 not in roster
    assert roster.get(3) is None
    with pytest.raises(KeyError):
        roster[3]


def test_drawn_keys_are_readable_by_their_owner_only_and_differ_from_run_to_run(tmp_path):
    one, other = drawn(tmp_path / "a"), drawn(tmp_path / "b")
    assert not set(one.values()) & set(other.values())
    folder = tmp_path / "a" / KEYS
    assert folder.stat().st_mode & 0o777 == 0o700
    keys = sorted(folder.glob("*.key"))
    assert [k.name for k in keys] == ["0.key", "1.key", "2.key", "3.key"]
    assert {k.stat().st_mode & 0o777 for k in keys} == {0o600}
    assert {k.stat().st_size for k in keys} == {32}


def test_preparing_again_keeps_the_keys_and_draws_those_of_newcomers(tmp_path):
    before = dict(drawn(tmp_path))
    after = drawn(tmp_path, range(6))
    assert {c: after[c] for c in range(4)} == before
    assert len(set(after.values())) == 6


@pytest.mark.parametrize("content", [b"", b"half a key", bytes(32)])
def test_killed_between_the_two_halves_it_begins_that_key_again(content, tmp_path):
    """The public half is written last: until then nobody knows the private one."""
    roster = drawn(tmp_path)
    others = {c: roster[c] for c in (0, 1, 3)}
    (tmp_path / KEYS / "2.pub").unlink()
    (tmp_path / KEYS / "2.key").write_bytes(content)
    again = drawn(tmp_path)
    assert again[2] == public_identity(again.private(2))
    assert again.private(2) != content
    assert (tmp_path / KEYS / "2.key").stat().st_mode & 0o777 == 0o600
    assert {c: again[c] for c in (0, 1, 3)} == others


@pytest.mark.parametrize(("half", "ask"), [("pub", "public"), ("key", "private")])
def test_a_key_that_is_gone_is_named(half, ask, tmp_path):
    drawn(tmp_path)
    (tmp_path / KEYS / f"1.{half}").unlink()
    roster = Roster(Entropy("system"), tmp_path, range(4))
    with pytest.raises(RunDirError, match=rf"signature key .*1\.{half} cannot be read"):
        roster[1] if ask == "public" else roster.private(1)
