"""The parts of secure aggregation: sessions, circles, masks by hand, steps, and memory."""

import hashlib
import importlib.util
import sys
from dataclasses import replace

import numpy as np
import pytest

from aggregating import MESSAGES, ROSTER, SESSION, Play, identity, plain, stream, vectors
from coterie.channel.privacy.secagg import Member, Rejected, Session, Sum, TooFew, crypto, masks
from coterie.channel.privacy.secagg.frames import Reader, Step, listed
from coterie.channel.privacy.secagg.member_state import Secrets
from coterie.channel.privacy.secagg.messages import Advert, commitment
from coterie.channel.privacy.secagg.session import Circle
from coterie.errors import ConfigError

VALUES = vectors([3, 8, 20, 21])


# --- sessions and circles ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("threshold", "members", "needed"),
    [
        *[(2 / 3, 2, 2), (2 / 3, 3, 2), (2 / 3, 4, 3), (2 / 3, 99, 66), (2 / 3, 100, 67)],
        *[(0.5, 4, 3), (0.01, 9, 5), (0.07, 100, 51), (0.55, 100, 55), (0.9, 10, 9), (1, 7, 7)],
    ],
)
def test_the_threshold_is_more_than_half(threshold, members, needed):
    assert replace(SESSION, threshold=threshold).enough(members) == needed


@pytest.mark.parametrize(
    "wrong",
    [{"threshold": 0}, {"threshold": 1.1}, {"neighbours": 3}, {"neighbours": -2}, {"least": 1}],
)
def test_a_session_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ConfigError):
        replace(SESSION, **wrong)


def test_contexts_cannot_run_into_each_other():
    parts = [("ab", "c"), ("a", "bc"), ("abc",), (1, 2), (12,), ("1", "2"), (b"1", b"2"), ("12",)]
    parts += [("asb",), ("a", "b"), ("1i2",), ("1", 2)]  # the letters of kinds among them
    sessions = [SESSION, replace(SESSION, run="run0"), replace(SESSION, attempt="0", slot="first")]
    found = {session.context(*some) for session in sessions for some in parts}
    assert len(found) == len(sessions) * len(parts)


def adverts(clients):
    return {c: hashlib.sha512(f"{c}".encode()).digest() + bytes(32) for c in clients}


def test_the_circle_has_k_neighbours_each_way_alike():
    circle = Circle(replace(SESSION, neighbours=4), adverts(range(11)))
    for client, holders in circle.holders.items():
        assert len(holders) == len(set(holders)) == 5
        assert client in holders
        assert all(client in circle.holders[other] for other in holders)
    assert circle.parted(range(11)) is None  # it is one circle, not several


def test_the_circle_follows_from_all_keys():
    session = replace(SESSION, neighbours=2)
    given = adverts(range(9))
    changed = given | {4: bytes(96)}
    assert Circle(session, given).holders == Circle(session, dict(reversed(given.items()))).holders
    assert Circle(session, given).holders != Circle(session, changed).holders
    assert Circle(session, given).holders != Circle(replace(session, round=4), given).holders


def test_a_transcript_goes_on_from_the_one_before():
    circle = Circle(SESSION, adverts(range(3)))
    found = {
        circle.agreed(before, what, clients)
        for before in (b"some keys", b"other keys")
        for what in ("shared", "survivors")
        for clients in ((0, 1), (0, 1, 2))
    }
    assert len(found) == 8
    assert circle.agreed(b"", "shared", {2, 1}) == circle.agreed(b"", "shared", (1, 2))


@pytest.mark.parametrize("neighbours", [0, 4, 6, 100])
def test_enough_neighbours_are_everybody(neighbours):
    circle = Circle(replace(SESSION, neighbours=neighbours), adverts(range(5)))
    assert set(circle.holders.values()) == {(0, 1, 2, 3, 4)}


def test_survivors_whose_masks_fall_apart():
    """On a circle of single links, two lost ones who are not neighbours part the others."""
    circle = Circle(replace(SESSION, neighbours=2), adverts(range(8)))
    ring = [0]
    while len(ring) < 8:
        ring.append(next(c for c in circle.partners(ring[-1], range(8)) if c not in ring))
    assert circle.parted([c for c in ring if c != ring[3]]) is None
    assert circle.parted([c for c in ring if c not in ring[3:5]]) is None
    assert "fall apart" in circle.parted([c for c in ring if c not in (ring[3], ring[5])])


# --- masks ------------------------------------------------------------------------------------


class Fixed:
    """A keystream of one number, which is its key."""

    SPARE = 0

    def __init__(self, key, block=0):
        self.key = key

    def into(self, buffer, zeros):
        buffer[: len(zeros)] = np.full(len(zeros) // 8, self.key, "<u8").tobytes()


def test_three_clients_by_hand(monkeypatch):
    """Pairs share 10, 20 and 30, and everybody has a mask of its own."""
    monkeypatch.setattr(masks, "Keystream", Fixed)
    pairs, own = {(1, 2): 10, (1, 3): 20, (2, 3): 30}, {1: 100, 2: 200, 3: 300}
    vectors = {c: np.full(2, c, np.uint64) for c in own}
    for mine, vector in vectors.items():
        others = [
            (pairs[min(mine, o), max(mine, o)], masks.sign(mine, o)) for o in {1, 2, 3} - {mine}
        ]
        masks.apply(vector, [(own[mine], 1), *others])
    assert vectors[1].tolist() == [1 + 100 + 10 + 20] * 2
    assert vectors[2].tolist() == [2 + 200 - 10 + 30] * 2
    assert vectors[3].tolist() == [3 + 300 - 20 - 30] * 2
    total = vectors[1] + vectors[2] + vectors[3]
    masks.apply(total, [(mask, -1) for mask in own.values()])
    assert total.tolist() == [6, 6]
    # without client 2: what 1 and 3 shared with it must come off, too
    total = vectors[1] + vectors[3]
    masks.apply(total, [(100, -1), (300, -1), (10, -1), (30, 1)])
    assert total.tolist() == [4, 4]


def test_a_mask_is_the_stream_of_aes_ctr():
    """The first blocks of AES-256 (FIPS 197, appendix C.3) in counter mode: E(0), E(1), …"""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    key = bytes(range(32))
    block = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    assert block.update(bytes.fromhex("00112233445566778899aabbccddeeff")).hex() == (
        "8ea2b7ca516745bfeafc49904b496089"
    )
    drawn = b"".join(block.update(n.to_bytes(16, "big")) for n in range(3))
    vector = np.zeros(5, np.uint64)
    masks.apply(vector, [(key, 1)])
    assert vector.tolist() == np.frombuffer(drawn, "<u8")[:5].tolist()


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 29, 64])
@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_parts_and_threads_change_nothing(monkeypatch, length, threads):
    some = [(bytes([n]) * 32, way) for n, way in enumerate((1, -1, 1))]
    whole = np.arange(length, dtype=np.uint64)
    masks.apply(whole, some)
    monkeypatch.setattr(masks, "CHUNK", 8)
    parts = np.arange(length, dtype=np.uint64)
    masks.apply(parts, some, threads)
    assert (whole == parts).all()
    masks.apply(parts, [(key, -way) for key, way in some], threads)
    assert parts.tolist() == list(range(length))


def test_long_vectors_in_threads():
    """Vectors of several parts, in whole plays of the protocol."""
    values = vectors([1, 2, 3], masks.CHUNK * 2 + 3)
    play = Play(SESSION, values, lost={Step.MASK: {2}}).end()
    assert (play.total == values[1] + values[3]).all()


# --- frames -----------------------------------------------------------------------------------


def test_lists_have_one_form():
    assert listed([3, 1]) == bytes([0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 3])
    for wrong in ([0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 1], [0, 0, 0, 2, *[0, 0, 0, 1] * 2]):
        with pytest.raises(Rejected, match="rising"):
            Reader("x", bytes(wrong)).clients()
    with pytest.raises(Rejected, match="does not fit"):
        Reader("x", bytes([255, 255, 255, 255, 0])).clients()


def test_lengths_do_not_depend_on_chance():
    lengths = [
        {key: len(blob) for key, blob in Play(SESSION, VALUES, seed=s).end().said.items()}
        for s in range(3)
    ]
    assert lengths[0] == lengths[1] == lengths[2]
    assert {step for step, _ in lengths[0]} == set(MESSAGES) - {Step.ADVERTISE}


# --- steps ------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [s for s in MESSAGES if s % 2])
def test_a_member_takes_each_step_once_and_in_order(at):
    play = Play(SESSION, VALUES).to(at)  # the member has just answered at this step
    member, told = play.members[8], {step: blob for (step, c), blob in play.said.items() if c == 8}
    calls = {
        Step.ADVERTISE: lambda: member.advertise(),
        Step.SHARE: lambda: member.share(told.get(Step.KEYS, b"")),
        Step.MASK: lambda: member.mask(told.get(Step.SHARES, b""), VALUES[8]),
        Step.CONFIRM: lambda: member.confirm(told.get(Step.SURVIVORS, b"")),
        Step.UNMASK: lambda: member.unmask(told.get(Step.CONFIRMATIONS, b"")),
    }
    for step, call in calls.items():
        if step != at + 2:
            with pytest.raises(Rejected, match="once and in order"):
                call()
    assert (play.end().total == plain(VALUES, VALUES)).all()  # none of which did any harm


def test_the_server_takes_each_step_once_and_in_order():
    fresh, over = Sum(SESSION, ROSTER, 5), Play(SESSION, VALUES).end().sum
    for server, allowed in ((fresh, "keys"), (over, "")):
        for step in {"keys", "shares", "survivors", "confirmations", "total"} - {allowed}:
            with pytest.raises(Rejected, match="once and in order"):
                getattr(server, step)({})


@pytest.mark.parametrize("step", [s for s in MESSAGES if s % 2 == 0])
def test_a_member_that_refused_a_message_is_out(step):
    play = Play(SESSION, VALUES).to(step)
    member, good = play.members[8], play.pending[8]
    act = getattr(member, Step(step + 1).name.lower())
    values = (VALUES[8],) if step == Step.SHARES else ()
    with pytest.raises(Rejected, match="too long"):
        act(good + b"x", *values)
    with pytest.raises(Rejected, match="once and in order"):
        act(good, *values)


def test_members_as_bytes_go_on_identically():
    kept, reopened = (Play(SESSION, VALUES, reopen=how).end() for how in (False, True))
    assert kept.said == reopened.said
    assert (reopened.total == plain(VALUES, VALUES)).all()


@pytest.mark.parametrize("at", [s for s in MESSAGES if s % 2])
def test_bytes_of_a_member_that_are_damaged_are_refused(at):
    play = Play(SESSION, VALUES).to(at)
    data = play.members[8].to_bytes()
    assert Member.from_bytes(data, ROSTER, stream(0)).to_bytes() == data
    for cut in [*range(0, len(data), 7), len(data) - 1]:
        with pytest.raises(Rejected):
            Member.from_bytes(data[:cut], ROSTER, stream(0))
    due = data.index(identity(8)) + 32
    for wrong in (data + b"x", b"\x07" + data[1:], data[:due] + b"\x63" + data[due + 1 :]):
        with pytest.raises(Rejected):
            Member.from_bytes(wrong, ROSTER, stream(0))


def test_secrets_are_wiped_after_their_last_use():
    play = Play(SESSION, VALUES).to(Step.SHARE)
    secrets = play.members[8]._kept.secrets
    hidden = [secrets.sealing, secrets.masking, secrets.seed]
    assert all(secret in play.members[8].to_bytes() for secret in hidden)
    held = [*play.to(Step.MASK).members[8]._kept.held.values()]
    assert not any(secret in play.members[8].to_bytes() for secret in hidden)
    assert all(shares in play.members[8].to_bytes() for shares in held)
    play.end()
    assert not any(shares in play.members[8].to_bytes() for shares in held)


def test_a_member_knows_how_many_take_part():
    play = Play(SESSION, VALUES, lost={Step.ADVERTISE: {3}}).to(Step.SHARE)
    assert play.members[8].members == 3


def test_only_rows_of_64_bit_integers_are_masked():
    play = Play(SESSION, VALUES).to(Step.SHARES)
    for wrong in (np.zeros(5), np.zeros(5, np.int32), np.zeros((5, 1), np.int64)):
        with pytest.raises(ValueError, match="int64"):
            play.members[8].mask(play.pending[8], wrong)
    assert (play.end().total == plain(VALUES, VALUES)).all()


def test_negative_and_strided_values():
    values = {c: np.arange(-4, 6)[::2] * c for c in (1, 2, 3)}
    assert Play(SESSION, values).end().total.view(np.int64).tolist() == [-24, -12, 0, 12, 24]


# --- who is refused ---------------------------------------------------------------------------


def test_an_identity_that_is_not_the_rosters():
    with pytest.raises(ConfigError, match="client 3"):
        Member(SESSION, 3, identity(4), ROSTER, stream(0))


def test_a_stranger_is_rejected():
    roster = {c: ROSTER[c] for c in (3, 8, 20)}
    play = Play(SESSION, VALUES)
    play.sum = Sum(SESSION, roster, 5)
    assert (play.end().total == plain(VALUES, roster)).all()
    assert "client 21" in play.sum.rejected[21]


LOW = [bytes(32), bytes([1, *[0] * 31])]  # points of order 1 and 2


@pytest.fixture(params=[(which, weak) for which in ("sealing", "masking") for weak in LOW])
def weak_play(request, monkeypatch):
    """Client 8 advertises, and signs, a key with which everybody agrees on zero."""
    advert, (which, weak) = Secrets.advert, request.param

    def advertised(self, session, client):
        made = advert(self, session, client)
        return replace(made, **{which: weak}) if client == 8 else made

    monkeypatch.setattr(Secrets, "advert", advertised)
    return Play(SESSION, VALUES)


def test_weak_keys_are_rejected(weak_play):
    assert (weak_play.end().total == plain(VALUES, [3, 20, 21])).all()
    assert "weak" in weak_play.sum.rejected[8]


def test_weak_keys_that_the_server_lets_pass_are_refused_by_the_members(weak_play, monkeypatch):
    monkeypatch.setattr(Advert, "strong", lambda self: True)
    with pytest.raises(TooFew):
        weak_play.end()
    assert all("keys of client 8 are weak" in weak_play.refused[c] for c in (3, 20, 21))


def test_vectors_of_another_length_are_rejected():
    values = VALUES | {8: np.zeros(6, np.uint64)}
    play = Play(SESSION, values)
    assert (play.end().total == plain(VALUES, [3, 20, 21])).all()
    assert "8 bytes too long" in play.sum.rejected[8]


def spoilt(play: Play, holder: int) -> None:
    """A holder that signs and sends wrong shares of everything."""
    held = play.members[holder]._kept.held
    play.members[holder]._kept.held = {c: shares[::-1] for c, shares in held.items()}


def test_wrong_shares_are_passed_over_or_nothing_is_summed():
    values = vectors(range(7))  # threshold 5
    play = Play(SESSION, values, lost={Step.MASK: {6}}).to(Step.CONFIRM)
    spoilt(play, 0)
    assert (play.end().total == plain(values, range(6))).all()
    play = Play(SESSION, values, lost={Step.MASK: {6}}).to(Step.CONFIRM)
    for holder in (0, 3):
        spoilt(play, holder)
    with pytest.raises(TooFew, match="the secret of client 0 cannot be rebuilt"):
        play.end()


@pytest.mark.parametrize("client", [0, 6])
def test_a_dealer_of_wrong_shares_is_named(client, monkeypatch):
    """Of the seed of one who stays, and of the mask key of one who is lost."""
    values = vectors(range(7))
    play = Play(SESSION, values, lost={Step.MASK: {6}}).to(Step.KEYS)
    deal = Member._dealt

    def wrong(self, circle):
        dealt = deal(self, circle)
        turned = {c: shares[33:] + shares[:33] for c, shares in dealt.items()}
        return turned if self._kept.client == client else dealt

    monkeypatch.setattr(Member, "_dealt", wrong)
    with pytest.raises(TooFew, match=f"the secret of client {client} cannot be rebuilt"):
        play.end()


def test_fewer_than_the_least_are_never_summed():
    values = vectors(range(3))
    for how in ({"least": 4}, {"session": replace(SESSION, least=4)}):
        with pytest.raises(TooFew, match="3 clients are there, 4 needed"):
            Play(**{"session": SESSION, "values": values, **how}).end()
    four = vectors(range(4))
    for step in (s for s in MESSAGES[2:] if s % 2):
        with pytest.raises(TooFew, match=r"3 (of 4 )?clients are left, 4 needed"):
            Play(SESSION, four, least=4, lost={step: {0}}).end()


def test_a_sum_of_nothing_is_refused():
    with pytest.raises(ConfigError):
        Sum(SESSION, ROSTER, 0)


def test_rejections_are_told_when_too_few_are_left():
    play = Play(SESSION, VALUES, lost={Step.SHARE: {3}})
    play.to(Step.SHARE)
    play.pending[8] = b"nonsense"
    with pytest.raises(TooFew, match=r"2 of 4 clients are left, 3 needed.*client 8, share"):
        play.end()


def test_commitments_are_bound_to_their_client():
    assert commitment(SESSION, 1, bytes(32)) != commitment(SESSION, 2, bytes(32))


def test_without_the_extra_both_halves_say_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.setitem(sys.modules, name, None)
    spec = importlib.util.spec_from_file_location("crypto_without", crypto.__file__)
    without = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(without)
    monkeypatch.setattr(crypto, "require", without.require)
    words = "needs the extra: pip install 'coterie.privacy.'"
    with pytest.raises(ConfigError, match=words):
        Sum(SESSION, ROSTER, 5)
    with pytest.raises(ConfigError, match=words):
        Member(SESSION, 3, identity(3), ROSTER, stream(0))


def test_signatures_by_no_key_are_none():
    assert not crypto.verifies(b"short", bytes(64), b"")
    assert not crypto.verifies(ROSTER[1], b"short", b"")


def test_sessions_are_values():
    assert Session("run", 3, "first", "0") == SESSION
    assert replace(SESSION, slot="1").digest != SESSION.digest
