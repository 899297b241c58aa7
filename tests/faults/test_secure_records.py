"""What clients remember of their sums, and secure rounds with stragglers and small groups."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import coterie
from coterie.channel.clocks import Seconds
from coterie.channel.compression.coding import Coding
from coterie.channel.exposure import sentences
from coterie.channel.privacy.client import SESSIONS
from coterie.channel.privacy.client_sums import ClientSums
from coterie.channel.privacy.secure_sums import Secure
from coterie.channel.privacy.settings import Privacy
from coterie.channel.privacy.sum_rules import Turn
from coterie.channel.timing import Timing
from coterie.core.messages import Order
from coterie.engines.loop import Loop
from coterie.errors import Abandoned, ConfigError, TrainingError
from coterie.experiment import experiment as running
from coterie.experiment.experiment import ENGINES, execute
from coterie.experiment.observers import Saving
from coterie.methods import make
from faulty import Faulty
from guarded import SECURE, Driven, secured, uneven

EIGHT = range(8)


class Heard(Loop):
    """Keeps what clients answer, step by step; ``lost`` get no order."""

    lost: tuple[int, ...] = ()

    def exchange(self, requests, until=None):
        self.refusals = getattr(self, "refusals", [])
        self.steps = [*getattr(self, "steps", []), [r.client for r in requests]]
        there = [r for r in requests if r.client not in self.lost]
        for client, message in super().exchange(there, until):
            body = self._runtime.wire.unpack(message)
            if "refused" in body.get("beside", {}):
                assert not body["arrays"]
                self.refusals.append((client, body["beside"]["refused"]))
            yield client, message
        yield from ((r.client, None) for r in requests if r not in there)


# --- the same upload in a second sum ----------------------------------------------------------


class Asking(Driven):
    """A server that asks eight clients by hand, in a round or outside of any."""

    def __init__(self, folder, privacy=SECURE, engine=Heard, sums=1):
        method = replace(coterie.fedavg(), sums=sums)
        super().__init__(secured(method, privacy, population=uneven(8)), folder, engine)
        self.fed.release.most = 99  # it does not look for its own lie: clients do
        self.channel.begin(0, "1", EIGHT, 8, 1)

    def total(self, people=EIGHT, weights=None, forgets=False, model=None, by_examples=False):
        """The sum of these clients' uploads to the very same order."""
        if forgets:  # what it asked before
            self.fed.release._turn = Turn()
            round = self.channel.phase.round
            self.channel.begin(round, str(round + 1), people, len(people), 1)
        sends = {"0": model or self.state.models[0]}
        orders = [Order(c, "train", sends) for c in people]
        into = {c: {0: (weights or {}).get(c, 1.0)} for c in people}
        return self.fed.release.sums(orders, into, by_examples)[0]


def everybody_refused(driven, people, apart):
    assert sorted(c for c, _ in driven.engine.refusals) == list(people)
    for client, why in driven.engine.refusals:
        said = f"client {client} has been in a sum of this round that differs by {apart} of its"
        assert why.startswith(said)


def nearly(model):
    """A model with one number changed by one unit in the last place."""
    vector = model.vector.clone()
    vector[0] = torch.nextafter(vector[0], torch.tensor(9.0))
    assert (vector != model.vector).sum() == 1
    return replace(model, vector=vector)


@pytest.mark.parametrize("changes", [False, True], ids=["the same model", "one ulp away"])
@pytest.mark.parametrize("gone", [(7,), (0,), (2, 5), (4, 5, 6, 7)])
def test_a_server_that_asks_again_for_all_but_a_few_learns_nothing(gone, changes, tmp_path):
    """Every client refuses for itself: the difference would be what those few sent."""
    driven = Asking(tmp_path, sums=2)
    assert driven.total().clients == tuple(EIGHT)
    rest = [c for c in EIGHT if c not in gone]
    model = nearly(driven.state.models[0]) if changes else None
    with pytest.raises(Abandoned, match=r"round 1, slot 0"):
        driven.total(rest, forgets=True, model=model)
    everybody_refused(driven, rest, len(gone))
    # Nor the other way round, when the few are there in the second sum only.
    turned = Asking(tmp_path / "turned", sums=2)
    turned.total(rest)
    with pytest.raises(Abandoned):
        turned.total(forgets=True, model=model)
    everybody_refused(turned, rest, len(gone))


def test_the_sum_of_the_clients_who_are_not_signed_for_is_out_of_reach(tmp_path):
    """Those who have signed nothing yet would sign; those who have do not even give values."""
    driven = Asking(tmp_path, sums=2)
    driven.total(range(5))
    with pytest.raises(Abandoned):
        driven.total([0, 1, 5, 6, 7], forgets=True)
    assert {c for c, _ in driven.engine.refusals} == {0, 1}
    # The five were told who has shared keys; two gave no values, and three are too few.
    assert driven.engine.steps[-1] == [0, 1, 5, 6, 7]


def test_no_more_sums_are_signed_than_the_method_declares(tmp_path):
    driven = Asking(tmp_path, sums=2)
    first, model = driven.state.models[0], nearly(driven.state.models[0])
    driven.total()
    driven.total(forgets=True, model=model)
    with pytest.raises(
        Abandoned, match="has been in all 2 of the sums that the method may ask for"
    ):
        driven.total(forgets=True, model=first * 1.5)
    assert len(driven.engine.refusals) == 8
    driven.total(forgets=True, model=model)  # one of those again is none more
    driven.channel.begin(1, "2", EIGHT, 8, 1)
    driven.total(forgets=True, model=first * 1.5)


@pytest.mark.parametrize("weight", [0.5, 1 - 2**-16], ids=["half", "nearly one"])
def test_other_weights_in_the_same_round_are_refused(weight, tmp_path):
    """With as many weightings as there are clients, each upload could be worked out."""
    driven = Asking(tmp_path, sums=2)
    driven.total()
    with pytest.raises(TrainingError, match="client 0 counted otherwise in slot 0 before"):
        driven.total(forgets=True, weights={0: weight})
    # Another slot is no way around it: who counts as before signs no other row.
    people = [Order(c, "train", {"0": driven.state.models[0]}) for c in EIGHT]
    driven.fed.release._turn = Turn()
    with pytest.raises(Abandoned):
        driven.fed.release.sums(people, {c: {1: weight if c == 0 else 1.0} for c in EIGHT}, False)
    assert len(driven.engine.refusals) == 8
    assert all("its members count otherwise" in why for _, why in driven.engine.refusals)


def test_samples_count_in_all_sums_of_a_round_or_in_none(tmp_path):
    """With most clients of one size, both together show the one of another size."""
    driven = Asking(tmp_path, sums=2)
    driven.total()
    with pytest.raises(TrainingError, match="counted otherwise"):
        driven.total(forgets=True, by_examples=True)


def test_one_client_in_place_of_another_is_refused(tmp_path):
    driven = Asking(tmp_path, sums=2)
    driven.total(range(7))
    with pytest.raises(Abandoned):
        driven.total([0, 1, 2, 3, 4, 5, 7], forgets=True)
    everybody_refused(driven, range(6), 2)


@pytest.mark.parametrize("randomness", ["simulated", "system"])
def test_the_same_members_again_give_the_same_bits(randomness, tmp_path):
    driven = Asking(tmp_path, replace(SECURE, randomness=randomness))
    first = driven.total()
    for forgets in (False, True):
        again = driven.total(forgets=forgets)
        assert again.clients == first.clients
        assert np.array_equal(again.values, first.values)
    assert not driven.engine.refusals


@pytest.mark.parametrize("randomness", ["simulated", "system"])
def test_the_same_sum_again_has_the_same_noise(randomness, tmp_path):
    """Else a server could ask until the noise has averaged out."""
    privacy = replace(SECURE, randomness=randomness, noise=1.0, delta=0.01)
    driven = Asking(tmp_path, privacy, sums=2)
    noise, secure = {"multiplier": 1.0, "clip": 1.0, "bits": 0.0}, driven.guard._secure
    secure.most = 99

    def total(model):
        secure._turn = Turn()
        orders = [Order(c, "train", {"0": model}) for c in EIGHT]
        return secure.sums(orders, {c: {0: 1.0} for c in EIGHT}, False, noise)[0].values

    model = driven.state.models[0]
    first, again, other = total(model), total(model), total(nearly(model))
    assert np.array_equal(first, again)
    if randomness == "system":
        assert (first != other).mean() > 0.9


def test_the_same_order_from_another_state_is_another_sum(tmp_path):
    """The server names the state that a client goes on from."""
    driven = Asking(tmp_path)
    sealing, model = driven.engine._runtime.sums, driven.state.models[0]
    kept = {"slot": 0, "asked": "a", "arrays": {"model": model}, "metrics": {"loss": 1.0}}
    told = {"metrics": ["loss"]}
    names = {
        sealing._what(kept, told),
        sealing._what({**kept, "arrays": {"model": nearly(model)}}, told),
        sealing._what({**kept, "metrics": {"loss": 2.0}}, told),
        sealing._what({**kept, "slot": 1}, told),
        sealing._what({**kept, "asked": "b"}, told),
    }
    assert len(names) == 5
    assert sealing._what(dict(kept), told) in names


def test_noise_of_another_size_is_other_noise(tmp_path):
    """The same one in two sizes would give itself away, and with it the upload."""
    privacy = replace(SECURE, randomness="system", noise=1.0, delta=0.01)
    driven = Asking(tmp_path, privacy)
    sealing = driven.engine._runtime.sums
    kept, told = {"round": 0, "asked": "a"}, {"metrics": [], "noise": {}}

    def drawn(members):
        member = SimpleNamespace(run="a", members=members, shared=(0, 1, 2))
        return sealing._noise_of_sum(0, kept, told, np.zeros(3), member)(32)

    assert drawn(8) == drawn(8)
    assert drawn(8) != drawn(7)


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_client_lost_in_the_second_of_two_means_of_one_order(lost, tmp_path):
    """The server asked for the same both times."""
    driven = Asking(tmp_path)
    driven.total()
    driven.engine.lost = tuple(EIGHT)[-lost:]
    with pytest.raises(Abandoned):
        driven.total()
    everybody_refused(driven, tuple(EIGHT)[:-lost], lost)


def test_another_round_is_another_upload(tmp_path):
    driven = Asking(tmp_path)
    driven.total()
    driven.channel.begin(1, "2", EIGHT, 8, 1)
    assert driven.total(range(7)).clients == tuple(range(7))
    assert not driven.engine.refusals


@pytest.mark.parametrize("again", [(), (7,), (5, 6, 7)], ids=["nobody", "one", "three"])
def test_a_round_that_was_summed_before_a_crash_is_not_summed_again_without_one(
    again, tmp_path, monkeypatch
):
    """The checkpoint is older than the sum, and other clients are lost the second time."""
    totals, sums, save = [], Secure.sums, Saving.save

    def noted(self, *words, **more):
        found = sums(self, *words, **more)
        totals.append((self.channel.phase.round, found[0]))
        return found

    def crash(saving):
        if saving.session.run.done == 1:
            raise KeyboardInterrupt
        save(saving)

    monkeypatch.setattr(Secure, "sums", noted)
    made = secured(coterie.fedavg(), population=uneven(8), settings={"rounds": 2})
    with monkeypatch.context() as patch:
        patch.setattr(Saving, "save", crash)
        with pytest.raises(KeyboardInterrupt):
            execute(made, tmp_path / "run")
    lossy = lambda c, order: c in again and order.startswith("1.")  # noqa: E731
    engine = lambda plan, workers=None: Faulty(Loop(plan), lose_order=lossy)  # noqa: E731
    monkeypatch.setitem(ENGINES, "loop", engine)
    result = execute(made, tmp_path / "run", resume=True)
    told = [event.get("abandoned", "") for event in result.history]
    assert told[1] == ""
    if again:
        rest = 8 - len(again)
        assert f"differs by {len(again)} of its {rest} members" in told[0]
        assert [number for number, _ in totals] == [0, 1]
        assert result.summary["abandoned"] == 1
        assert result.summary["exposure"]["near"]["count"] == 0
        return
    assert told[0] == ""
    assert [number for number, _ in totals] == [0, 0, 1]
    assert np.array_equal(totals[0][1].values, totals[1][1].values)


# --- what stays in a session ------------------------------------------------------------------


def test_no_upload_is_left_in_a_session_once_it_is_masked(tmp_path, monkeypatch):
    """Whoever takes a client's files after that finds nothing that the sum should hide."""
    uploads, found = {}, {}
    advertise = ClientSums.advertise

    def seen(self, client, examples, upload, received, body):
        uploads[client] = upload.arrays["model"].vector.numpy().tobytes()
        return advertise(self, client, examples, upload, received, body)

    class Reading(Loop):
        def exchange(self, requests, until=None):
            yield from super().exchange(requests, until)
            order = self._runtime.wire.unpack(requests[0].message)["order"]
            for client, upload in uploads.items():
                files = (self._plan.folder / SESSIONS / str(client)).iterdir()
                kept = b"".join(p.read_bytes() for p in files)
                found[order, client] = upload[:32] in kept

    monkeypatch.setattr(ClientSums, "advertise", seen)
    made = secured(coterie.fedavg(), settings={"rounds": 1})
    Driven(made, tmp_path, Reading).all()
    for client in range(6):
        there = [found[f"1.{exchange}", client] for exchange in range(5)]
        assert there == [True, True, False, False, False]


# --- stragglers -------------------------------------------------------------------------------


STRAGGLER = 3


class Links:
    """A clock: a client works for a second, one for ten; a message takes a tenth."""

    reproducible = True

    def finishes(self, legs, moment):
        works = {leg.client: leg.samples > 0 for leg in legs}
        return {
            c: Seconds((10.0 if c == STRAGGLER else 1.0) if work else 0.0, 0.1)
            for c, work in works.items()
        }


class Last:
    """A federation that knows who was in the last mean."""

    def __init__(self, fed):
        self.fed, self.clients, self.last = fed, fed.clients, ()

    def gather(self, orders):
        return self.fed.gather(orders)

    def reduce(self, orders, into, by_examples=True):
        means = self.fed.reduce(orders, into, by_examples)
        self.last = means[0].clients
        return means


REST = (0, 1, 2, 4, 5)


@pytest.mark.parametrize("name", ["fedavg", "ditto"])
@pytest.mark.parametrize("privacy", [Privacy(), SECURE], ids=["plain", "secure"])
def test_a_straggler_is_left_out_and_the_others_are_summed(name, privacy, tmp_path):
    """It takes all the time of its round; the steps of the protocol have time of their own."""
    settings = {"rounds": 2, "deadline": 2.0, "clock": {"name": "links"}}
    made = secured(make(name, {}), privacy, settings=settings)
    driven = Driven(made, tmp_path, around=Last)
    driven.channel.stage(Timing).terms = replace(driven.channel.terms, clock=Links())
    for number in (0, 1):
        driven.round(number)
        assert not driven.abandoned
        assert driven.fed.last == REST
    keeps = name == "ditto"  # a state, and the straggler's stays as it was
    assert driven.channel.state.versions == dict.fromkeys(REST if keeps else (), "2.0")
    assert driven.channel.state.ledger.late == 2


def test_who_is_late_by_a_real_clock_leaves_the_others_time_to_unmask_in(tmp_path, monkeypatch):
    now = [0.0]

    class Slow(Loop):
        """The straggler's work arrives last, long after the deadline."""

        def exchange(self, requests, until=None):
            answers = dict(super().exchange(requests))
            slow = answers.pop(STRAGGLER, None)
            yield from answers.items()
            if slow is not None:
                now[0] += 100.0
                yield STRAGGLER, slow

    for module in ("arrivals", "timing"):
        clock = SimpleNamespace(monotonic=lambda: now[0])
        monkeypatch.setattr(f"coterie.channel.{module}.time", clock)
    made = secured(coterie.fedavg(), settings={"rounds": 2, "real_deadline": 5.0})
    driven = Driven(made, tmp_path, Slow, around=Last)
    for number in (0, 1):
        driven.round(number)
        assert not driven.abandoned
        assert driven.fed.last == REST
    assert now[0] == 200.0


# --- groups that are small as drawn -----------------------------------------------------------


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_groups_that_are_small_among_those_drawn_are_passed_over_for_the_round(sampling, tmp_path):
    people = uneven(12, samples=480)
    settings = {"rounds": 6, "cohort": 0.5, "sampling": sampling}
    made = secured(coterie.oracle(), population=people, settings=settings)
    driven, passed, moved = Driven(made, tmp_path), 0, 0
    for number in range(6):
        before = dict(driven.state.models)
        driven.round(number)
        drawn = running.cohort(made.settings, number, made.members)
        groups = [driven.state.groups.get(c) for c in drawn]
        small = {g for g in set(groups) if 0 < groups.count(g) < SECURE.min_group}
        assert set(driven.withheld[number]) == {str(g) for g in small}
        for group, model in driven.state.models.items():
            same = model is before[group]
            assert same == (group in small or group not in groups)
            moved += not same
        passed += len(small)
    assert passed > 0
    assert moved > 0


def test_groups_that_are_small_among_all_are_refused(tmp_path):
    for cohort in (1.0, 6):
        made = secured(
            coterie.oracle(), population=uneven(6, groups=3), settings={"cohort": cohort}
        )
        with pytest.raises(ConfigError, match=r"slot .* alone; secure aggregation refuses it"):
            Driven(made, tmp_path / str(cohort)).all()
    part = secured(coterie.oracle(), population=uneven(6, groups=3), settings={"cohort": 5})
    driven = Driven(part, tmp_path / "part").all()  # none is large enough, in any round
    assert len(driven.abandoned) == 3


# --- digits lost on the way down --------------------------------------------------------------


@pytest.mark.parametrize("cohort", [1.0, 4])
def test_a_lossy_codec_on_the_way_down_needs_other_orders(cohort, tmp_path):
    """The same change of different models makes different ones, which nobody would notice."""
    settings = {"rounds": 3, "wire": Coding(down="qsgd"), "cohort": cohort}
    with pytest.raises(ConfigError, match=r"wire\.down = 'qsgd'.*privacy\.same_orders = false"):
        execute(secured(coterie.fedavg(), settings=settings), tmp_path / "kept")
    assert not (tmp_path / "kept").exists()
    given_up = secured(coterie.fedavg(), replace(SECURE, same_orders=False), settings=settings)
    assert not Driven(given_up, tmp_path).all().abandoned


# --- words ------------------------------------------------------------------------------------


def test_a_run_of_which_every_round_was_abandoned_says_that_nothing_was_learned(monkeypatch):
    lossy = lambda c, order: c > 1 and not order.startswith("final")  # noqa: E731
    engine = lambda plan, workers=None: Faulty(Loop(plan), lose_order=lossy)  # noqa: E731
    monkeypatch.setitem(ENGINES, "loop", engine)
    result = execute(secured(coterie.fedavg(), settings={"rounds": 2, "adapt_epochs": 0}))
    assert result.summary["abandoned"] == 2
    seen = result.summary["exposure"]
    assert sentences(seen) == ["The server learned no sum: everything it received was masked."]
    assert "2 of the 3 clients" in result.history[0]["abandoned"]


def test_a_mean_of_one_is_told_apart_from_what_a_method_looks_at():
    result = execute(secured(coterie.fedavg(), Privacy(), settings={"rounds": 1, "cohort": 1}))
    said = sentences(result.summary["exposure"])[0]
    assert said.endswith(", unprotected: a mean of one client is its update.")


def test_a_refusal_counts_rounds_as_people_do(tmp_path):
    lost = lambda client, order: client > 2 and order == "2.1"  # noqa: E731
    made = secured(coterie.fedavg(), settings={"rounds": 2})
    driven = Driven(made, tmp_path, lambda plan: Faulty(Loop(plan), lose_reply=lost)).all()
    assert list(driven.abandoned) == [1]
    assert "secure aggregation (round 2, slot 0" in driven.abandoned[1]
