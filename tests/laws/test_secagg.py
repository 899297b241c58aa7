"""Secure aggregation: exact sums whoever is lost, nothing to see before, and no lie that works."""

import copy
import hashlib
from collections import Counter
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from aggregating import MESSAGES, ROSTER, SESSION, Play, identity, plain, stream, vectors
from coterie.channel.privacy.secagg import Member, Rejected, Sum, TooFew, crypto, masks
from coterie.channel.privacy.secagg.frames import Step, header, listed, statement, u32
from coterie.channel.privacy.secagg.messages import Advert, box_purpose

SENT = tuple(step for step in MESSAGES if step % 2)
GRAPHS = {
    "everybody": SESSION,
    "neighbours": replace(SESSION, neighbours=6, threshold=0.5),
}
CLIENTS = (3, 8, 20, 21, 30, 31, 40, 50, 63)
VALUES = vectors(CLIENTS)


# --- sums -------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("step", SENT)
@pytest.mark.parametrize("lost", [{3}, {20, 30, 63}])
def test_the_sum_is_exact_whoever_is_lost_before_a_step(graph, step, lost):
    play = Play(GRAPHS[graph], VALUES, lost={step: lost}).end()
    there = [c for c in CLIENTS if c not in lost or step > Step.MASK]
    assert play.sum.summed == tuple(there)
    assert (play.total == plain(VALUES, there)).all()
    assert not play.refused
    assert not play.sum.rejected


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize(
    "lost",
    [
        {},
        {Step.SHARE: {8}, Step.MASK: {31}, Step.CONFIRM: {50}},
        {Step.MASK: {21}, Step.CONFIRM: {3}, Step.UNMASK: {40}},
        {Step.ADVERTISE: {3, 40}, Step.SHARE: {63}, Step.UNMASK: {8}},
    ],
)
def test_the_sum_is_exact_when_some_are_lost_at_several_steps(graph, lost):
    play = Play(GRAPHS[graph], VALUES, lost=lost).end()
    gone = {c for step, some in lost.items() if step <= Step.MASK for c in some}
    assert set(play.sum.summed) == set(CLIENTS) - gone
    assert (play.total == plain(VALUES, play.sum.summed)).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 7), st.data())
def test_there_is_a_sum_if_and_only_if_the_threshold_stays(count, data):
    """Worked out without the protocol: of those who advertised, more than two thirds to the end."""
    clients = set(range(count))
    lost, left, sizes = {}, set(clients), []
    for step in SENT:
        lost[step] = data.draw(st.sets(st.sampled_from(sorted(clients)), max_size=2))
        left -= lost[step]
        sizes.append(len(left))
    needed = max(2, -(-2 * sizes[0] // 3))
    values = vectors(clients, 2)
    play = Play(SESSION, values, lost=lost)
    if min(sizes[1:]) >= needed:
        play.end()
        gone = lost[Step.ADVERTISE] | lost[Step.SHARE] | lost[Step.MASK]
        assert set(play.sum.summed) == clients - gone
        assert (play.total == plain(values, clients - gone)).all()
    else:
        with pytest.raises(TooFew):
            play.end()
        assert play.total is None


@pytest.mark.parametrize("step", SENT[1:])
def test_exactly_the_threshold_is_enough_and_one_less_tells_nothing(step):
    values = vectors(range(6))  # threshold 4
    assert Play(SESSION, values, lost={step: {0, 5}}).end().total is not None
    play = Play(SESSION, values, lost={step: {0, 2, 5}})
    with pytest.raises(TooFew, match="3 of 6 clients are left, 4 needed"):
        play.end()
    revealed = [c for s, c in play.said if s == Step.UNMASK]
    assert len(revealed) == (3 if step == Step.UNMASK else 0)  # shares: too few of any secret
    with pytest.raises(Rejected):
        play.sum.total({})


def test_with_neighbours_the_threshold_is_taken_of_each_neighbourhood():
    """One neighbourhood that is lost ends the attempt, though most members are there."""
    session = replace(SESSION, neighbours=2, threshold=0.5)  # 2 of 3
    values = vectors(range(12), 2)
    circle = Play(session, values).to(Step.KEYS).sum._circle
    lost = set(circle.partners(4, range(12)))
    for step in (Step.MASK, Step.CONFIRM, Step.UNMASK):
        with pytest.raises(TooFew, match=r"neighbours of client|fall apart"):
            Play(session, values, lost={step: lost}).end()
    next_to_each_other = {4, circle.partners(4, range(12))[0]}
    play = Play(session, values, lost={Step.MASK: {4}}).end()
    assert (play.total == plain(values, set(range(12)) - {4})).all()
    with pytest.raises(TooFew, match="neighbours of client"):  # each has one other holder left
        Play(session, values, lost={Step.MASK: next_to_each_other}).end()


def test_a_sum_that_would_show_a_part_of_the_survivors_is_refused_by_both_halves():
    """Every neighbourhood has enough left, but the circle of survivors is in two pieces."""
    session = replace(SESSION, neighbours=2, threshold=0.5)
    values = vectors(range(12), 2)
    play = Play(session, values).to(Step.MASK)
    circle = play.sum._circle
    ring = [0]
    while len(ring) < 12:
        ring.append(next(c for c in circle.partners(ring[-1], range(12)) if c not in ring))
    lost = {ring[0], ring[6]}
    honest = copy.deepcopy(play)
    for client in lost:
        del honest.pending[client]
    with pytest.raises(TooFew, match="fall apart"):
        honest.end()
    lie = header(session, Step.SURVIVORS, ring[3]) + listed(set(range(12)) - lost)
    with pytest.raises(Rejected, match="fall apart"):
        play.members[ring[3]].confirm(lie)


def test_slots_side_by_side():
    """Disjoint slots in one exchange, one of which loses too many."""
    plays = {}
    for slot, clients in {"a": range(4), "b": range(4, 9), "c": range(9, 12)}.items():
        lost = {Step.MASK: {5}} if slot == "b" else {Step.CONFIRM: {9, 10}} if slot == "c" else {}
        plays[slot] = Play(replace(SESSION, slot=slot), vectors(clients, seed=9), lost=lost)
    over = set()
    for _ in MESSAGES:
        for slot, play in plays.items():
            if slot in over:
                continue
            try:
                play.advance()
            except TooFew:
                over.add(slot)
    assert over == {"c"}
    for slot, there in {"a": [0, 1, 2, 3], "b": [4, 6, 7, 8]}.items():
        assert (plays[slot].total == plain(plays[slot].values, there)).all()


# --- what the server sees ---------------------------------------------------------------------


def uniform(vector: np.ndarray) -> bool:
    """Whether all bytes, and the top bytes alone, are as even as chance makes them."""
    data = np.ascontiguousarray(vector, dtype="<u8").view(np.uint8).reshape(-1, 8)
    chances = [
        chisquare(np.bincount(some.ravel(), minlength=256)).pvalue for some in (data, data[:, 7])
    ]
    return all(1e-4 < chance < 1 - 1e-4 for chance in chances)


def masked(play: Play, client: int) -> np.ndarray:
    return np.frombuffer(play.said[Step.MASK, client][38:-64], "<u8").copy()


INPUTS = {
    "zeros": np.zeros(8192, np.int64),
    "ones": np.ones(8192, np.int64),
    "small": np.arange(8192) % 7 - 3,
    "large": np.full(8192, -(2**62)),
}


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("graph", GRAPHS)
def test_masked_values_look_like_chance_under_any_part_of_their_masks(kind, graph):
    values = dict.fromkeys(range(4), INPUTS[kind])
    session = replace(GRAPHS[graph], neighbours=2) if graph == "neighbours" else SESSION
    assert not uniform(INPUTS[kind])
    play = Play(session, values).to(Step.SHARES)
    secrets = {c: m._kept.secrets for c, m in play.members.items()}
    circle = play.sum._circle
    public = {c: Advert.of(body).masking for c, body in play.sum._adverts.items()}
    play.to(Step.MASK)
    for client, own in secrets.items():
        seen = masked(play, client)
        assert uniform(seen)
        assert uniform(seen - INPUTS[kind].view(np.uint64))
        alone = seen.copy()  # without the mask of its own: what a revealed seed takes off
        masks.apply(alone, [(masks.self_mask(session, client, own.seed), -1)])
        assert uniform(alone)
        pairs = [
            (masks.pair_mask(session, client, own.masking, o, public[o]), o)
            for o in circle.partners(client, values)
        ]
        assert len(pairs) == (2 if graph == "neighbours" else 3)
        for left_out in range(len(pairs)):  # without all masks with others but one, and its own
            some = alone.copy()
            known = [pair for at, pair in enumerate(pairs) if at != left_out]
            masks.apply(some, [(key, -masks.sign(client, o)) for key, o in known])
            assert uniform(some)
        paired = seen.copy()  # without all masks with others: what a revealed mask key takes off
        masks.apply(paired, [(key, -masks.sign(client, o)) for key, o in pairs])
        assert uniform(paired)
        masks.apply(paired, [(masks.self_mask(session, client, own.seed), -1)])
        assert (paired == INPUTS[kind].view(np.uint64)).all()  # these were all of them


def test_equal_values_look_different_every_time():
    zeros = dict.fromkeys(range(3), np.zeros(8192, np.int64))
    first, second = (Play(SESSION, zeros, seed=seed).to(Step.MASK) for seed in (0, 1))
    for client in zeros:
        assert uniform(masked(first, client) - masked(second, client))
    assert uniform(masked(first, 0) - masked(first, 1))


def test_the_sum_of_masked_values_is_still_masked():
    values = dict.fromkeys(range(3), np.ones(8192, np.int64))
    play = Play(SESSION, values).to(Step.SURVIVORS)
    assert uniform(play.sum._total)
    assert (play.end().total == 3).all()


@pytest.mark.parametrize("change", [{"run": "x"}, {"round": 4}, {"attempt": "x"}, {"slot": "x"}])
def test_every_key_is_bound_to_the_session(change):
    """The same secrets in another session give other masks and other boxes."""
    one, other = SESSION, replace(SESSION, **change)
    secret, public = b"s" * 32, crypto.public_key(b"t" * 32)
    assert masks.self_mask(one, 1, secret) != masks.self_mask(other, 1, secret)
    assert masks.pair_mask(one, 1, secret, 2, public) != masks.pair_mask(
        other, 1, secret, 2, public
    )
    assert box_purpose(one, 1, 2, b"") != box_purpose(other, 1, 2, b"")
    zeros = dict.fromkeys(range(3), np.zeros(8192, np.int64))
    plays = [Play(session, zeros).to(Step.MASK) for session in (one, other)]
    assert plays[0].said[Step.SHARE, 0][38:] != plays[1].said[Step.SHARE, 0][38:]
    for client in zeros:
        assert uniform(masked(plays[0], client) - masked(plays[1], client))


def test_keys_are_bound_to_the_pair_and_the_purpose():
    secret, public = b"s" * 32, crypto.public_key(b"t" * 32)
    found = {
        masks.self_mask(SESSION, 1, secret),
        masks.self_mask(SESSION, 2, secret),
        *(masks.pair_mask(SESSION, a, secret, b, public) for a, b in ((1, 2), (1, 3), (2, 3))),
        *(crypto.agreed(secret, public, box_purpose(SESSION, *p, b"")) for p in ((1, 2), (2, 1))),
        crypto.agreed(secret, public, box_purpose(SESSION, 1, 2, b"another circle")),
    }
    assert len(found) == 8


# --- a server that lies -----------------------------------------------------------------------

SEVEN = vectors(range(7), 2)  # threshold 5


@pytest.fixture(scope="module")
def asked() -> Play:
    """Seven members, six of whom shared their keys, before they are told who survived."""
    return Play(SESSION, SEVEN, lost={Step.SHARE: {6}}).to(Step.MASK)


def survivors(client: int, who) -> bytes:
    return header(SESSION, Step.SURVIVORS, client) + listed(who)


def confirmations(client: int, signed: dict[int, bytes]) -> bytes:
    entries = b"".join(u32(c) + by for c, by in sorted(signed.items()))
    return header(SESSION, Step.CONFIRMATIONS, client) + u32(len(signed)) + entries


@pytest.mark.parametrize(
    ("who", "why"),
    [
        ({0, 1, 2, 3, 4, 5, 6}, "never shared"),
        ({0, 1, 2, 3, 4, 9}, "never shared"),
        ({0, 1, 2, 3}, "4 of 7 clients are left, 5 needed"),
        ({1, 2, 3, 4, 5}, "not among the survivors"),
        (set(), "not among the survivors"),
    ],
)
def test_survivors_that_cannot_be_are_refused(asked, who, why):
    with pytest.raises(Rejected, match=why):
        copy.deepcopy(asked).members[0].confirm(survivors(0, who))


def test_those_who_cannot_have_shared_are_refused():
    """One who never advertised: it would count among the survivors later. Too few. All but this."""
    play = Play(SESSION, SEVEN).to(Step.SHARES)
    _, found, boxes = entries(Step.SHARES, play.pending[0])
    told = header(SESSION, Step.SHARES, 0) + listed([*range(7), 9]) + boxes
    assert len(found) == 7
    with pytest.raises(Rejected, match="never advertised"):
        copy.deepcopy(play).members[0].mask(told, SEVEN[0])
    told = header(SESSION, Step.SHARES, 0) + listed(range(4)) + boxes[: 3 * 94]
    with pytest.raises(Rejected, match="4 of 7 clients are left, 5 needed"):
        copy.deepcopy(play).members[0].mask(told, SEVEN[0])
    told = header(SESSION, Step.SHARES, 0) + listed(range(1, 7)) + boxes
    with pytest.raises(Rejected, match="not among those who did"):
        play.members[0].mask(told, SEVEN[0])


def test_members_hold_to_the_least_though_the_server_does_not():
    session = replace(SESSION, least=4)
    play = Play(session, vectors(range(3)))
    keys = u32(3) + b"".join(u32(c) + blob[38:] for c, blob in sorted(play.pending.items()))
    with pytest.raises(Rejected, match="it has only 3 members"):
        play.members[0].share(header(session, Step.KEYS, 0) + keys)


def test_a_second_set_of_survivors_is_not_confirmed(asked):
    member = copy.deepcopy(asked).members[0]
    member.confirm(survivors(0, range(6)))
    with pytest.raises(Rejected, match="once"):
        member.confirm(survivors(0, range(5)))


def test_different_sets_to_different_members_unmask_nothing(asked):
    """Half is told that client 5 survived, the other half that it did not."""
    members = copy.deepcopy(asked).members
    told = {c: range(6) if c < 3 or c == 5 else range(5) for c in range(6)}
    signed = {c: members[c].confirm(survivors(c, told[c]))[-64:] for c in range(6)}
    for client in range(6):
        with pytest.raises(Rejected, match="did not confirm the same survivors"):
            copy.deepcopy(members[client]).unmask(confirmations(client, signed))
        same = {c: by for c, by in signed.items() if told[c] == told[client]}
        with pytest.raises(Rejected, match="5 needed"):
            members[client].unmask(confirmations(client, same))


def test_confirmations_by_others_than_survivors_do_not_count(asked):
    """Client 5 signs that it did not survive; one that never shared signs, too."""
    members = copy.deepcopy(asked).members
    signed = {c: members[c].confirm(survivors(c, range(5)))[-64:] for c in range(4)}
    final = members[0]._final(members[0]._circle())
    for stranger in (5, 6):
        said = statement(SESSION, Step.CONFIRM, stranger, final, b"")
        forged = signed | {stranger: crypto.signed(identity(stranger), said)}
        with pytest.raises(Rejected, match=f"client {stranger} did not confirm"):
            copy.deepcopy(members[0]).unmask(confirmations(0, forged))


def test_different_keys_to_different_members_give_no_sum():
    """A server that hides one member from some of the others: their shares cannot be opened."""
    play = Play(SESSION, SEVEN).to(Step.KEYS)
    full = play.pending[0][38 + 4 :]
    size = len(full) // 7
    fewer = u32(6) + full[: 6 * size]
    for client in range(3):
        play.pending[client] = header(SESSION, Step.KEYS, client) + fewer
    with pytest.raises(TooFew):
        play.end()
    assert set(play.sum.rejected) == {0, 1, 2}  # they signed what they had been shown
    play = Play(SESSION, SEVEN).to(Step.KEYS)
    for client in range(3):
        play.pending[client] = header(SESSION, Step.KEYS, client) + fewer
    boxes = play.to(Step.SHARE).pending
    dealt = b"".join(boxes[c][38 + 94 * 0 : 38 + 94] for c in range(1, 7))  # each one's for 0
    told = header(SESSION, Step.SHARES, 0) + listed(range(6)) + dealt[: 5 * 94]
    with pytest.raises(Rejected, match="shares of client 3 were changed"):
        play.members[0].mask(told, SEVEN[0])


def test_keys_that_a_member_signed_at_another_time_are_not_its_own():
    """A client that began twice: the server shows it, and everybody, the keys of the other time."""
    play = Play(SESSION, SEVEN)
    again = Member(SESSION, 0, identity(0), ROSTER, stream("again"))
    play.pending[0] = again.advertise()
    assert (play.end().total == plain(SEVEN, range(1, 7))).all()
    assert "own keys" in play.refused[0]


CORRUPT = (5, 6)
SETS = [frozenset(s) for s in (range(7), range(6), range(5), {1, 2, 3, 4, 5}, {0, 2, 3, 4, 5, 6})]


@pytest.fixture(scope="module")
def shared() -> Play:
    return Play(SESSION, SEVEN).to(Step.MASK)


@pytest.fixture(scope="module")
def corrupt(shared) -> dict[frozenset, dict[int, bytes]]:
    """The signatures of those who sign every set of survivors."""
    signed: dict[frozenset, dict[int, bytes]] = {who: {} for who in SETS}
    for who, client in product(SETS, CORRUPT):
        member = copy.deepcopy(shared.members[client])
        member._kept.survivors = tuple(sorted(who))
        final = member._final(member._circle())
        said = statement(SESSION, Step.CONFIRM, client, final, b"")
        signed[who][client] = crypto.signed(identity(client), said)
    return signed


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_both_secrets_of_a_client_are_never_revealed_nor_shares_for_two_sets(shared, corrupt, data):
    """Two of seven members and the server collude: they sign every set and tell all they hold.

    The server asks the others in any order, with any sets and any signatures, again and again.
    """
    members = copy.deepcopy({c: shared.members[c] for c in range(5)})
    held = {c: dict(m._kept.held) for c, m in shared.members.items()}
    signed = copy.deepcopy(corrupt)
    told: dict[int, frozenset] = {}
    found = {(kind, dealer): set(CORRUPT) for kind in ("key", "seed") for dealer in range(7)}
    revealed = set()

    def confirm(client: int, who: frozenset) -> None:
        signed[who][client] = members[client].confirm(survivors(client, who))[-64:]
        told[client] = who

    def unmask(client: int, pools: list[frozenset]) -> None:
        some = {c: by for who in reversed(pools) for c, by in signed[who].items()}
        fitting = {c: by for c, by in some.items() if c in pools[0]}  # others are refused at once
        body = members[client].unmask(confirmations(client, fitting))[38:-64]
        revealed.add(told[client])
        for at, dealer in enumerate(sorted(held[client])):
            share, both = body[33 * at : 33 * (at + 1)], held[client][dealer]
            assert share in (both[:33], both[33:])
            found["key" if share == both[:33] else "seed", dealer].add(client)

    usual, some_set = data.draw(st.sampled_from(SETS)), st.sampled_from(SETS)
    anybody, order = st.integers(0, 4), st.permutations(range(5))
    script = [
        (confirm, c, data.draw(st.one_of(st.just(usual), some_set))) for c in data.draw(order)
    ]
    again = st.tuples(st.sampled_from([confirm, unmask]), anybody, some_set)
    script += data.draw(st.lists(again, max_size=4))
    script += [(unmask, c, None) for c in data.draw(order)]
    script += data.draw(st.lists(again, max_size=4))
    for act, client, who in script:
        pools = [who] if who else [told.get(client, usual), *data.draw(st.sets(some_set))]
        try:
            act(client, who if act is confirm else pools)
        except Rejected:
            continue
    assert len(revealed) <= 1
    for dealer in range(7):
        keys, seeds = found["key", dealer], found["seed", dealer]
        assert not keys & seeds - set(CORRUPT)
        assert min(len(keys), len(seeds)) < 5
    EVENTS[len(revealed)] += 1


EVENTS: Counter[int] = Counter()


def test_the_colluding_server_did_get_answers():
    """The law before this one says something only if honest members answered at times."""
    if EVENTS:  # it ran in this process
        assert EVENTS[1] > 10
        assert EVENTS[0] > 10


# --- messages that were changed on their way --------------------------------------------------

FOUR = vectors((3, 8, 20, 21), 3)
PER_STEP = {step: 8 if step < Step.SHARE else 16 for step in MESSAGES}
CHANGES = ("cut", "longer", "flipped", "run", "round", "attempt", "slot", "sender", "step", "swap")
SMALL = replace(SESSION, threshold=0.5)  # three of four: one may be lost


@pytest.fixture(scope="module")
def stages() -> dict[Step, Play]:
    """An honest play as it stands when the messages of each step are on their way."""
    play = Play(SMALL, FOUR)
    found = {}
    for step in MESSAGES:
        found[step] = copy.deepcopy(play.to(step))
    return found


@pytest.fixture(scope="module")
def elsewhere() -> dict[str, dict]:
    """What was said in sessions that differ in one thing, by the same clients."""
    others = {"run": "other", "round": 4, "attempt": "second", "slot": "1"}
    found = {}
    for what, value in others.items():
        play = Play(replace(SMALL, **{what: value}), FOUR)
        first = {(Step.ADVERTISE, c): blob for c, blob in play.pending.items()}
        found[what] = first | play.end().said
    return found


def changed(play: Play, change: str, client: int, draw, elsewhere) -> dict[int, bytes]:
    """The messages on their way, with this client's changed."""
    blob, others = play.pending[client], [c for c in play.pending if c != client]
    other = others[draw(len(others))]
    if change == "cut":
        return {client: blob[: draw(len(blob))]}
    if change == "longer":
        return {client: blob + bytes(1 + draw(9))}
    if change == "flipped":
        bit = draw(8 * len(blob))
        return {
            client: blob[: bit // 8] + bytes([blob[bit // 8] ^ 1 << bit % 8]) + blob[bit // 8 + 1 :]
        }
    if change == "sender":
        return {client: play.pending[other]}
    if change == "swap":
        return {client: play.pending[other], other: blob}
    if change == "step":
        said = [b for (step, c), b in elsewhere["same"].items() if c == client and step != play.at]
        return {client: said[draw(len(said))]}
    return {client: elsewhere[change][play.at, client]}


def test_a_message_that_was_changed_is_refused_and_never_spoils_the_sum(stages, elsewhere):
    """Every step, both directions, ten kinds of change: an exact sum of the others, or none."""
    same = {(Step.ADVERTISE, c): blob for c, blob in stages[Step.ADVERTISE].pending.items()}
    elsewhere = elsewhere | {"same": same | stages[Step.UNMASK].said}
    done, ends = Counter(), Counter()
    random = stream("changes")

    def draw(below: int) -> int:
        return int.from_bytes(random(8), "big") % below

    for step, change in product(MESSAGES, CHANGES):
        for _ in range(PER_STEP[step]):
            play = copy.deepcopy(stages[step])
            clients = sorted(play.pending)
            met = changed(play, change, clients[draw(len(clients))], draw, elsewhere)
            assert all(play.pending[c] != blob for c, blob in met.items())
            play.pending |= met
            done[step, change] += 1
            try:
                play.end()
            except TooFew:
                ends["too few"] += 1
            else:
                ends["sum"] += 1
                assert (play.total == plain(FOUR, play.sum.summed)).all()
            out = set(play.refused) | set(play.sum.rejected)
            assert set(met) <= out, (step, change)
    assert set(done) == set(product(MESSAGES, CHANGES))
    assert sum(done.values()) >= 1000
    assert ends["sum"] > 700  # the others go on
    assert ends["too few"] > 50


def entries(step: Step, blob: bytes) -> tuple[bytes, list[bytes], bytes]:
    """A list inside a message of the server: what is before it, its entries, and what follows."""
    size = {Step.KEYS: 164, Step.SHARES: 4, Step.SURVIVORS: 4, Step.CONFIRMATIONS: 68}[step]
    count = int.from_bytes(blob[38:42], "big")
    cut = [blob[42 + size * at : 42 + size * (at + 1)] for at in range(count)]
    return blob[:38], cut, blob[42 + size * count :]


@pytest.mark.parametrize("step", [s for s in MESSAGES if s % 2 == 0])
@pytest.mark.parametrize("graph", GRAPHS)
def test_well_formed_lists_that_were_changed_never_spoil_the_sum(graph, step):
    """Entries left out, repeated or turned round, with the right count before them."""
    start = Play(GRAPHS[graph], VALUES, lost={Step.MASK: {40}}).to(step)
    client = 3 if graph == "everybody" else 63
    before, found, after = entries(step, start.pending[client])
    lists = [found[:at] + found[at + 1 :] for at in range(len(found))]
    lists += [found[::-1], found + found[-1:], []]
    boxes = [after[94:], after[94 : 2 * 94] + after[:94] + after[2 * 94 :]]
    made = [before + u32(len(some)) + b"".join(some) + after for some in lists]
    if step == Step.SHARES:
        made += [before + u32(len(found)) + b"".join(found) + some for some in boxes]
        made += [before + u32(len(some)) + b"".join(some) + boxes[0] for some in lists]
    for blob in made:
        play = copy.deepcopy(start)
        play.pending[client] = blob
        play.end()
        assert (play.total == plain(VALUES, play.sum.summed)).all()
        noticed = client in play.refused or client in play.sum.rejected
        assert noticed or step == Step.CONFIRMATIONS  # where fewer signatures can be enough


def test_members_and_server_of_other_sessions_do_not_understand_each_other():
    names = ("run", "round", "attempt", "slot", "threshold", "neighbours", "least")
    values = ("x", 9, "x", "x", 0.9, 4, 3)
    for name, value in zip(names, values, strict=True):
        play = Play(SESSION, FOUR)
        play.sum = Sum(replace(SESSION, **{name: value}), ROSTER, 3)
        with pytest.raises(TooFew, match="another session"):
            play.advance()


def test_a_member_cannot_speak_for_another():
    """Signed with its own identity, but as somebody else."""
    roster = ROSTER | {8: ROSTER[9]}  # what client 9 would like to be true
    play = Play(SESSION, FOUR)
    play.members[8] = Member(SESSION, 8, identity(9), roster, stream("evil"))
    play.pending[8] = play.members[8].advertise()
    assert (play.end().total == plain(FOUR, [3, 20, 21])).all()
    assert "signature" in play.sum.rejected[8]


def test_chance_is_drawn_only_from_what_is_given():
    """Two plays with the same draws are the same to the byte, and with others differ everywhere."""
    digests = [
        hashlib.sha256(repr(sorted(Play(SESSION, FOUR, seed=seed).end().said.items())).encode())
        for seed in (0, 0, 1)
    ]
    assert [a.digest() == b.digest() for a, b in pairwise(digests)] == [True, False]
