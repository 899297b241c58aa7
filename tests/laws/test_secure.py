"""Secure aggregation in runs: the means are the plain ones, and nobody's own numbers are seen."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

import coterie
from coterie.channel.privacy.secagg import member as member_module
from coterie.channel.privacy.settings import Privacy
from coterie.channel.tasks import SECURE as STEP
from coterie.core.messages import vector_of
from coterie.core.tree import same
from coterie.engines.loop import Loop
from coterie.engines.pool import Pool
from coterie.errors import Abandoned, ConfigError
from coterie.experiment.experiment import execute
from coterie.methods import make
from faulty import Faulty
from guarded import EXCHANGES, SECURE, Driven, close, secured, uneven, witness
from support import ROWS, Stop, same_bits, stop_after

METHODS = {
    "fedavg": coterie.fedavg,
    "fedprox": lambda: coterie.fedprox(mu=0.5),
    "ifca": lambda: coterie.ifca(k=2),
    "ditto": coterie.ditto,
    "fedper": lambda: coterie.fedper(k=1),
    "scaffold": coterie.scaffold,
    "scaffold n": lambda: coterie.scaffold(weights="n"),
    "fednova": coterie.fednova,
    "feddyn": coterie.feddyn,
    "moon": coterie.moon,
    "fedadam": coterie.fedadam,
    "oracle": coterie.oracle,
    "known-groups": lambda: coterie.known_groups(groups=["a", "b"] * 3),
    "adaptive-tau": lambda: coterie.adaptive_tau(tau_max=5, sample=8),
    "ifca+ditto": lambda: make("ifca+ditto", {"k": 2}),
    "ditto layer-wise": lambda: coterie.layer_wise(coterie.ditto(), 2, share=0.95, start=1),
}
SEVERAL = ("ifca", "ditto", "scaffold")
every_method = pytest.mark.parametrize("name", METHODS)
several = pytest.mark.parametrize("name", SEVERAL)


@every_method
def test_every_mean_of_every_round_is_the_plain_one_of_the_same_replies(
    name, tmp_path, monkeypatch
):
    driven = Driven(secured(METHODS[name]()), tmp_path, around=witness(monkeypatch)).all()
    sums = [pair for pair in driven.fed.means if pair[0]]
    assert len(sums) >= 3  # in every round at least one
    assert not driven.abandoned
    for found, plain in sums:
        assert found.keys() == plain.keys()
        for slot in plain:
            close(found[slot], plain[slot], SECURE.bits)
    assert len({r.examples for r in driven.fed.uploads.values()}) > 2  # so that weights matter
    if "ifca" in name or name in ("oracle", "known-groups"):
        assert max(len(found) for found, _ in sums) == 2


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "scaffold n"])
def test_with_equal_weights_a_mean_is_that_of_clients_and_not_of_samples(
    name, tmp_path, monkeypatch
):
    made = secured(METHODS[name](), replace(SECURE, weights="equal"), settings={"rounds": 1})
    driven = Driven(made, tmp_path, around=witness(monkeypatch)).all()
    found, _ = driven.fed.means[-1]
    uploads = driven.fed.uploads.values()
    assert len({len(c.train) for c in made.population.clients}) > 2
    for array, mean in found[0].arrays.items():
        each = torch.stack([vector_of(u.arrays[array]).double() for u in uploads])
        torch.testing.assert_close(vector_of(mean).double(), each.mean(0), atol=1e-6, rtol=1e-6)
    assert found[0].examples == len(uploads)
    assert not any((u.arrays["count"] > 1).any() for u in uploads if "count" in u.arrays)


@pytest.mark.parametrize("bits", [8, 12, 40])
def test_the_grid_is_as_fine_as_it_is_said_to_be(bits, tmp_path, monkeypatch):
    made = secured(coterie.fedavg(), replace(SECURE, bits=bits), settings={"rounds": 1})
    driven = Driven(made, tmp_path, around=witness(monkeypatch)).all()
    ((found, plain),) = driven.fed.means
    close(found[0], plain[0], bits)
    a, b = (m[0].arrays["model"].vector.double() for m in (found, plain))
    furthest = float((a - b).abs().max())
    if bits < 20:  # coarser than float32: half a step apart at most, and not much less
        assert 2.0**-bits / 8 < furthest <= 2.0**-bits / 2 + 1e-6
    else:
        assert furthest < 1e-7


class Listening(Loop):
    """Keeps every request and answer."""

    def exchange(self, requests, until=None):
        self.heard = getattr(self, "heard", [])
        asked = {r.client: r.message for r in requests}
        for client, answer in super().exchange(requests, until):
            self.heard.append((client, asked[client], answer))
            yield client, answer


@every_method
def test_nothing_of_a_single_client_reaches_the_server(name, tmp_path, monkeypatch):
    values = []
    mask = member_module.Member.mask

    def noted(self, shares, vector, *more):
        def given():
            row = vector()
            values.append(np.asarray(row).astype("<i8").tobytes())
            return row

        return mask(self, shares, given, *more)

    monkeypatch.setattr(member_module.Member, "mask", noted)
    made = secured(METHODS[name](), settings={"rounds": 2})
    driven = Driven(made, tmp_path, Listening).all()
    assert driven.fed.release.privacy.secure
    summed = 0
    for _, asked, answer in driven.engine.heard:
        order, reply = driven.channel.wire.unpack(asked), driven.channel.wire.unpack(answer)
        if "beside" not in order:
            assert not reply["arrays"]  # how many samples it has (scaffold n), and no vector
            assert order["task"] == "size"
            continue
        summed += order["task"] == STEP
        assert reply["examples"] == 0
        assert reply["metrics"] == {}
        assert set(reply["arrays"]) <= {"secure"}
        assert all(a.dtype == torch.uint8 for a in reply["arrays"].values())
        assert set(reply["beside"]) <= {"slot", "form", "metrics"}
        if order["task"] != STEP:  # keys alone: nothing that grows with the model
            assert answer.content < 500
        packed = answer.to_bytes()
        assert not any(v[:64] in packed for v in values)  # the first eight numbers, unmasked
    assert summed >= 2 * (EXCHANGES - 1) * 3
    assert driven.channel.exposed == {"means"}


def test_what_a_client_says_beside_its_keys_has_names_in_it_and_no_numbers(tmp_path):
    """All that the first answer tells in the clear, word by word."""
    made = secured(coterie.fedavg(), settings={"rounds": 1})
    driven = Driven(made, tmp_path, Listening).all()
    answers = [m for _, asked, m in driven.engine.heard if b'"train"' in asked.header]
    layout = driven.plan.start.layout
    shape, names = [layout.size], list(layout.names)
    for answer in answers:
        beside = driven.channel.wire.unpack(answer)["beside"]
        assert beside == {
            "slot": 0,
            "form": [["model", names, shape, "float32"]],
            "metrics": ["loss"],
        }
        assert len(json.loads(answer.header)["arrays"]) == 1


# --- the same bits ----------------------------------------------------------------------------


def outcome(name, folder, engine=Loop, privacy=None, **settings):
    made = secured(METHODS[name](), privacy or SECURE, settings=settings)
    driven = Driven(made, folder, engine)
    try:
        return driven.all().models, driven
    finally:
        driven.close()


@several
def test_same_bits_on_the_pool(name, tmp_path):
    loop, one = outcome(name, tmp_path / "a", rounds=2)
    pool, other = outcome(name, tmp_path / "b", lambda plan: Pool(plan, 2), rounds=2)
    assert same_bits(loop, pool)
    assert one.channel.state.versions == other.channel.state.versions
    assert one.channel.state.ledger.method.keys() == other.channel.state.ledger.method.keys()
    assert other.channel.state.ledger.lost == 0


class Names:
    """Names of attempts that can be known before."""

    def __init__(self, letter):
        self.letter, self.count = letter, 0

    def token_hex(self, length):
        self.count += 1
        return f"{self.letter}{self.count:0{2 * length - 1}d}"


@several
def test_the_kind_of_randomness_the_graph_and_the_attempts_name_change_no_bit(
    name, tmp_path, monkeypatch
):
    """Sums are exact, so whatever hides them leaves no trace."""
    plain, _ = outcome(name, tmp_path / "a", rounds=2)
    system = replace(SECURE, randomness="system")
    drawn, driven = outcome(name, tmp_path / "b", privacy=system, rounds=2)
    assert same_bits(plain, drawn)
    keys = sorted((driven.plan.folder / "identities").glob("*.key"))
    assert len(keys) == 6
    assert {k.stat().st_mode & 0o777 for k in keys} == {0o600}
    assert len({k.read_bytes() for k in keys}) == 6
    sparse, _ = outcome(name, tmp_path / "c", privacy=replace(SECURE, neighbours=4), rounds=2)
    assert same_bits(plain, sparse)
    monkeypatch.setattr("coterie.channel.privacy.secure_sums.secrets", Names("a"))
    named, _ = outcome(name, tmp_path / "d", rounds=1)
    monkeypatch.setattr("coterie.channel.privacy.secure_sums.secrets", Names("b"))
    renamed, _ = outcome(name, tmp_path / "e", rounds=1)
    assert same_bits(named, renamed)


@pytest.mark.parametrize("name", ["ifca", "scaffold"])
def test_two_systems_draw_different_masks(name, tmp_path):
    """And simulations the same: with a fixed name of the attempt, message by message."""
    heard = {}
    for kind in ("simulated", "system"):
        for life in (0, 1):
            privacy = replace(SECURE, randomness=kind)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("coterie.channel.privacy.secure_sums.secrets", Names("a"))
                _, driven = outcome(name, tmp_path / f"{kind}{life}", Listening, privacy, rounds=1)
            found = [m for _, asked, m in driven.engine.heard if STEP.encode() in asked.header]
            heard[kind, life] = [m.to_bytes() for m in found]
    assert heard["simulated", 0] == heard["simulated", 1]
    one, other = set(heard["system", 0]), set(heard["system", 1])
    assert not one & other


@pytest.mark.parametrize(
    ("name", "randomness"),
    [("ifca", "simulated"), ("scaffold", "system"), ("ditto", "simulated"), ("fedper", "system")],
)
def test_resumed_is_as_if_never_stopped(name, randomness, tmp_path):
    privacy = replace(SECURE, randomness=randomness)
    made = secured(METHODS[name](), privacy, settings={"rounds": 2})
    whole = execute(made, tmp_path / "whole")
    with pytest.raises(Stop):
        execute(made, tmp_path / "parts", watch=stop_after(1))
    resumed = execute(made, tmp_path / "parts", resume=True)
    for client in range(6):
        assert same(whole.weights(client), resumed.weights(client))

    def told(result):
        return [{k: v for k, v in e.items() if k != "seconds"} for e in result.history]

    assert told(whole) == told(resumed)
    assert whole.summary["exposure"] == resumed.summary["exposure"]
    assert whole.summary["privacy"] == resumed.summary["privacy"]
    assert whole.summary["privacy"] == {"secure": True, "randomness": randomness}


@several
def test_the_models_differ_from_the_plain_runs_by_rounding_alone(name, tmp_path):
    """After one round, in which both federations train from the very same start."""
    _, found = outcome(name, tmp_path / "a", rounds=1)
    _, plain = outcome(name, tmp_path / "b", privacy=Privacy(), rounds=1)
    one, other = found.state.models, plain.state.models
    assert found.state.groups == plain.state.groups
    for slot, model in other.items():
        assert torch.allclose(one[slot].vector, model.vector, rtol=1e-6, atol=1e-6)
    assert not same(one, other)


def test_groups_weights_and_buffers_of_batch_normalisation_travel_in_the_sum(tmp_path, monkeypatch):
    """Buffers are means by samples, whatever the method; statistics that stay are in no sum."""
    population = uneven()

    def network():
        return torch.nn.Sequential(
            torch.nn.Flatten(),
            torch.nn.Linear(64, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.Linear(8, 10),
        )

    for bn, extra in (("shared", 16), ("stats-local", 0), ("local", -16)):
        made = secured(coterie.fedavg(), population=population, model=network, bn=bn)
        with pytest.MonkeyPatch.context() as patch:
            driven = Driven(made, tmp_path / bn, around=witness(patch)).all()
        for found, plain in driven.fed.means:
            close(found[0], plain[0], SECURE.bits)
            assert found[0].arrays["model"].layout.size == 64 * 8 + 8 + 16 + 8 * 10 + 10 + extra


# --- weights ----------------------------------------------------------------------------------


def test_weights_on_the_grid_count_as_in_a_plain_mean(tmp_path, monkeypatch):
    made = secured(coterie.fedavg(), settings={"rounds": 1})
    driven = Driven(made, tmp_path, around=witness(monkeypatch))
    driven.channel.begin(0)
    order = driven.made.method.sends(driven.state, 0)
    orders = [coterie.Order(c, "train", order) for c in range(6)]
    weights = [1.0, 0.5, 2.0, 0.375, 3.0, 1.5]  # 0.1 of the largest is the least
    for slot, by_examples in (("a", True), ("b", False)):
        into = {c: {slot: w} for c, w in enumerate(weights)}
        driven.fed.reduce(orders, into, by_examples)
        driven.channel.begin(1)
    for slot, (found, plain) in zip("ab", driven.fed.means, strict=True):
        close(found[slot], plain[slot], SECURE.bits)
    one, other = (
        pair[0][slot].arrays["model"].vector
        for slot, pair in zip("ab", driven.fed.means, strict=True)
    )
    assert not torch.allclose(one, other, atol=1e-4)


def test_a_clients_weight_in_a_slot_is_the_same_for_the_whole_run(tmp_path):
    """With another in each round, and a model that stands still, its upload could be had."""
    driven, orders = asking(tmp_path)
    everybody = {c: {0: 1.0} for c in range(8)}
    assert driven.fed.reduce(orders, everybody)[0].clients == tuple(range(8))
    driven.channel.begin(1, cohort=range(8), enough=8, least=1)
    with pytest.raises(coterie.errors.TrainingError, match="client 7 counted otherwise in slot 0"):
        driven.fed.reduce(orders, {**everybody, 7: {0: 0.5}})
    # Where clients have the same weights again, those told as parts are those told as ones.
    driven.channel.begin(2, cohort=range(8), enough=8, least=1)
    assert driven.fed.reduce(orders, everybody)[0].clients == tuple(range(8))


def test_a_client_that_is_in_no_slot_does_its_work_and_is_in_no_sum(tmp_path):
    made = secured(coterie.ditto(), settings={"rounds": 1})
    driven = Driven(made, tmp_path)
    driven.channel.begin(0)
    sends = driven.made.method.sends(driven.state, 0)
    orders = [coterie.Order(c, "train", sends) for c in range(6)]
    means = driven.fed.reduce(orders, {c: {0: 1.0} for c in (0, 1, 2, 4)})
    assert means[0].clients == (0, 1, 2, 4)
    assert driven.channel.state.versions == dict.fromkeys(
        range(6), "1.0"
    )  # as through the plain channel


def test_a_value_too_large_for_the_ring_ends_the_run_with_a_remedy(tmp_path):
    made = secured(coterie.fedavg(), replace(SECURE, bits=40), settings={"rounds": 1})

    def huge(client, arrays, config):
        model = arrays["0"]
        return coterie.Upload({"model": model * 1e6}, {}, {"model": "0"})

    made = replace(made, method=replace(made.method, tasks={"train": huge}))
    with pytest.raises(
        coterie.errors.TrainingError, match=r"40 fractional bits. Lower privacy\.bits"
    ) as why:
        Driven(made, tmp_path).all()
    # The server reads this: how large the client's value is, is none of its business.
    assert set(re.findall(r"\d+", str(why.value))) <= {"6", "40", "0", "1"}  # it was round 1


# --- refusals ---------------------------------------------------------------------------------


def asking(folder, privacy=SECURE, clients=8, around=lambda fed: fed, sums=1):
    """A federation of eight that can be asked by hand, and its orders."""
    method = replace(coterie.fedavg(), sums=sums)  # as many a round, as a method may declare
    made = secured(method, privacy, population=uneven(clients))
    driven = Driven(made, folder, around=around)
    driven.channel.begin(0, cohort=range(clients), enough=clients, least=1)
    sends = driven.made.method.sends(driven.state, 0)
    return driven, [coterie.Order(c, "train", sends) for c in range(clients)]


def refused(driven, orders, into, *words):
    """Before anything was asked of anybody."""
    moved = driven.channel.state.ledger.total
    with pytest.raises(ConfigError) as why:
        driven.fed.reduce(orders, into)
    text = str(why.value)
    assert text.startswith("method fedavg asks for ")
    assert "secure aggregation refuses it" in text
    for word in words:
        assert word in text
    assert driven.channel.state.ledger.total == moved


def test_overlapping_slots_are_refused(tmp_path):
    driven, orders = asking(tmp_path)
    into = {c: {"a": 0.5, "b": 0.5} if c == 3 else {"ab"[c % 2]: 1.0} for c in range(8)}
    refused(driven, orders, into, "slots that overlap: client 3 is in 'a' and 'b'")
    into[3] = {"a": 1.0, "b": 0.0}  # no share is no overlap
    assert driven.fed.reduce(orders, into)["a"].clients == (0, 2, 3, 4, 6)


def test_small_slots_are_refused_or_skipped(tmp_path):
    into = {c: {"few" if c < 2 else "many": 1.0} for c in range(8)}
    driven, orders = asking(tmp_path / "a")
    refused(
        driven,
        orders,
        into,
        "the mean of slot 'few', of clients 0, 1 alone",
        "privacy.min_group = 3",
        "privacy.small_groups = skip",
    )
    skipping, orders = asking(tmp_path / "b", replace(SECURE, small_groups="skip"))
    means = skipping.fed.reduce(orders, into)
    assert {s: m.clients for s, m in means.items()} == {"many": (2, 3, 4, 5, 6, 7)}
    assert skipping.fed.release.skipped == {
        "few": "slot 'few' has 2 of the 3 clients that a sum needs"
    }
    skipping.channel.begin(1, cohort=range(8), enough=8, least=1)
    with pytest.raises(Abandoned, match="slot 'few' has 2 of the 3"):
        skipping.fed.reduce(orders[:2], {0: {"few": 1.0}, 1: {"few": 1.0}})


def test_a_slot_that_clients_chose_and_that_is_too_small_is_left_out(tmp_path):
    made = secured(coterie.ifca(k=2), population=uneven(seed=2))  # one client takes model 1
    driven = Driven(made, tmp_path)
    before = driven.state.models[1]
    driven.round(0)
    assert list(driven.withheld[0]) == ["1"]
    assert driven.state.models[1] is before
    assert len(driven.state.groups) == 5  # it is in no group yet, for it was in no mean


@pytest.mark.parametrize(
    "weights",
    [
        {0: 1.0, 1: 1e-6, 2: 1e-6, 3: 1e-6},
        {0: 1.0, 1: 1.0, 2: 1e-9, 3: 1e-9},
        {0: 1.0, 1: 1.0, 2: 1.0, 3: 1e-9},  # and two of the three may be lost
        {0: 1.0, 1: 0.001, 2: 0.001},  # the mean is the first one's, to three digits
        {0: 1.0, 1: 1.0, 2: 1.0, 3: 0.0999},
    ],
)
@pytest.mark.parametrize("few", ["refuse", "skip"])
def test_weights_that_leave_few_are_refused_always(weights, few, tmp_path):
    driven, orders = asking(tmp_path, replace(SECURE, small_groups=few))
    refused(driven, orders, {c: {0: w} for c, w in weights.items()}, "the others hardly count")


def test_more_sums_in_a_round_than_the_method_declares_are_refused(tmp_path):
    driven, orders = asking(tmp_path, sums=2)
    everybody = {c: {0: 1.0} for c in range(8)}
    driven.fed.reduce(orders, everybody)
    driven.fed.reduce(orders, everybody)
    refused(driven, orders, everybody, "more than 2 sums in one round", "Method.sums")
    driven.channel.begin(1, cohort=range(8), enough=8, least=1)
    driven.fed.reduce(orders, everybody)


def test_sums_of_one_round_in_which_clients_count_otherwise_are_refused(tmp_path):
    """Whatever was asked: the uploads may be nearly the same."""
    driven, orders = asking(tmp_path, sums=3)
    driven.fed.reduce(orders, {c: {0: 1.0} for c in range(8)})
    moved = [replace(o, arrays={"0": o.arrays["0"] * 1.5}) for o in orders]
    words = "sums of one round in which client 7 has different weights"
    refused(driven, moved, {c: {0: 1.0 - 2**-16 * (c == 7)} for c in range(8)}, words)
    with pytest.raises(ConfigError, match="with weights by samples and with equal weights"):
        driven.fed.reduce(moved, {c: {0: 1.0} for c in range(8)}, by_examples=False)


def test_the_sums_of_one_round_are_of_the_same_clients(tmp_path):
    driven, orders = asking(tmp_path, sums=4)
    assert driven.fed.reduce(orders[:5], {c: {0: 1.0} for c in range(5)})[0].clients == tuple(
        range(5)
    )
    moved = [replace(o, arrays={"0": o.arrays["0"] * 1.5}) for o in orders]
    means = driven.fed.reduce(moved, {c: {0 if c < 5 else 1: 1.0} for c in range(8)})
    assert [m.clients for m in means.values()] == [tuple(range(5)), (5, 6, 7)]
    for people in (range(4), range(7), range(1, 6)):
        with pytest.raises(Abandoned, match=r"(signed|been in) a sum of"):
            driven.fed.reduce([moved[c] for c in people], {c: {0: 1.0} for c in people})


@pytest.mark.parametrize("exchange", ["1.0", "1.1"])
def test_who_was_lost_in_the_first_sum_of_a_round_is_left_out_of_the_second(exchange, tmp_path):
    made = secured(replace(coterie.fedavg(), sums=2), population=uneven(8))
    lost = lambda client, order: client == 3 and order == exchange  # noqa: E731
    driven = Driven(made, tmp_path, lambda plan: Faulty(Loop(plan), lose_reply=lost))
    driven.channel.begin(0, cohort=range(8), enough=8, least=1)
    sends = made.method.sends(driven.state, 0)
    orders = [coterie.Order(c, "train", sends) for c in range(8)]
    for _ in range(2):
        mean = driven.fed.reduce(orders, {c: {0: 1.0} for c in range(8)})[0]
        assert mean.clients == (0, 1, 2, 4, 5, 6, 7)


def test_a_slot_that_is_skipped_was_signed_by_nobody(tmp_path):
    driven, orders = asking(tmp_path, replace(SECURE, small_groups="skip"), sums=2)
    driven.fed.reduce(orders, {c: {"few" if c < 2 else "many": 1.0} for c in range(8)})
    again = driven.fed.reduce(orders[2:], {c: {"many": 1.0} for c in range(2, 8)})
    assert again["many"].clients == tuple(range(2, 8))


def test_vectors_of_single_clients_are_refused_by_the_clients_themselves(tmp_path):
    driven, orders = asking(tmp_path)
    with pytest.raises(ConfigError, match="method fedavg asks each client by itself"):
        driven.fed.gather(orders)
    assert driven.channel.exposed == set()
    with pytest.raises(ConfigError, match="client 3 does not send its whole model"):
        driven.channel.fetch(3, orders[3].arrays)
    unmetered = [replace(o, unmetered=True) for o in orders]  # as if it were no message
    with pytest.raises(ConfigError, match="by itself"):
        driven.fed.reduce(unmetered, {c: {0: 1.0} for c in range(8)})


def test_the_final_layer_is_revealed_once_and_the_report_says_so(tmp_path):
    consent = replace(SECURE, reveal="final-layer", min_group=2)
    made = secured(coterie.fedclust(clusters=1, warmup_epochs=1), consent)
    result = execute(made)
    seen = result.summary["exposure"]
    assert "final-layer" in str(seen)
    assert "revealed by consent" in str(seen)
    assert result.summary["privacy"]["reveal"] == "final-layer"

    driven = Driven(made, tmp_path)
    setup = made.setup(driven.plan.start)
    driven.channel.begin(0, stage="init")
    made.method.init(driven.fed, setup)  # the very same question again, as after a restart
    driven.channel.begin(1, stage="more")
    with pytest.raises(ConfigError, match="a second time for what privacy"):
        made.method.init(driven.fed, setup)


@pytest.mark.parametrize("name", ["cfl", "fedfomo", "median", "dc-pfl", "krum"])
def test_more_than_the_final_layer_stays_with_the_clients(name):
    consent = replace(SECURE, reveal="final-layer", min_group=2)
    with pytest.raises(ConfigError, match=f"method {name} needs more than the final layer"):
        execute(secured(ROWS[name](), consent, settings={"rounds": 3}))
