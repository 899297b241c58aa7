"""What clients remember of their sums, and secure rounds with stragglers and small groups."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import coterie
from coterie.door.clock import Seconds
from coterie.door.coding import Coding
from coterie.door.exposure import sentences
from coterie.door.privacy.client import SESSIONS, Sealing
from coterie.door.privacy.secure import Secure
from coterie.door.privacy.settings import Privacy
from coterie.engines.faulty import Faulty
from coterie.engines.loop import Loop
from coterie.errors import Abandoned, ConfigError
from coterie.federation import Order
from coterie.methods import make
from coterie.run import experiment as running
from coterie.run.experiment import ENGINES, execute
from guarded import SECURE, Driven, secured, uneven

EIGHT = range(8)


class Heard(Loop):
    """Keeps what clients answer, step by step; ``lost`` get no order."""

    lost: tuple[int, ...] = ()

    def exchange(self, requests, until=None):
        self.refusals = getattr(self, "refusals", [])
        there = [r for r in requests if r.client not in self.lost]
        for client, message in super().exchange(there, until):
            body = self._site.wire.unpack(message)
            if "refused" in body.get("beside", {}):
                assert not body["arrays"]
                self.refusals.append((client, body["beside"]["refused"]))
            yield client, message
        yield from ((r.client, None) for r in requests if r not in there)


# --- the same upload in a second sum ----------------------------------------------------------


class Asking(Driven):
    """A server that asks eight clients by hand, in a round or outside of any."""

    def __init__(self, folder, privacy=SECURE, engine=Heard):
        super().__init__(secured(coterie.fedavg(), privacy, population=uneven(8)), folder, engine)
        self.door.begin(0, "1", EIGHT, 8, 1)

    def total(self, people=EIGHT, forgets=False):
        """The sum of these clients' uploads to the very same order."""
        if forgets:  # what it asked before: it does not look for its own lie
            self.fed._asked = ("", [])
            self.door.begin(0, "1", people, len(people), 1)
        sends = self.made.method.sends(self.state, 0)
        orders = [Order(c, "train", sends) for c in people]
        return self.fed.sums(orders, {c: {0: 1.0} for c in people}, False)[0]


def everybody_refused(driven, people, apart):
    assert sorted(c for c, _ in driven.engine.refusals) == list(people)
    for client, why in driven.engine.refusals:
        said = f"client {client} has given the same upload to a sum that differs by {apart} of its"
        assert why.startswith(said)


@pytest.mark.parametrize("gone", [(7,), (0,), (2, 5)])
def test_a_server_that_repeats_an_order_for_all_but_a_few_learns_nothing(gone, tmp_path):
    """Every client refuses for itself: the difference would be what those few sent."""
    driven = Asking(tmp_path)
    assert driven.total().clients == tuple(EIGHT)
    rest = [c for c in EIGHT if c not in gone]
    with pytest.raises(Abandoned, match=r"round 1, slot 0"):
        driven.total(rest, forgets=True)
    everybody_refused(driven, rest, len(gone))
    # Nor the other way round, when the few are there in the second sum only.
    turned = Asking(tmp_path / "turned")
    turned.total(rest)
    with pytest.raises(Abandoned):
        turned.total(forgets=True)
    everybody_refused(turned, rest, len(gone))


def test_other_weights_for_the_same_upload_are_refused(tmp_path):
    """With as many weightings as there are clients, each upload could be worked out."""
    driven = Asking(tmp_path)
    driven.total()
    driven.fed._asked = ("", [])
    driven.door.begin(0, "1", EIGHT, 8, 1)
    sends = driven.made.method.sends(driven.state, 0)
    orders = [Order(c, "train", sends) for c in EIGHT]
    with pytest.raises(Abandoned):
        driven.fed.sums(orders, {c: {0: 1.0 if c else 0.5} for c in EIGHT}, False)
    said = {why.partition(" has ")[2] for _, why in driven.engine.refusals}
    assert said == {"given the same upload with other weights"}


def test_one_client_in_place_of_another_are_two_apart(tmp_path):
    driven = Asking(tmp_path)
    driven.total(range(7))
    with pytest.raises(Abandoned):
        driven.total([0, 1, 2, 3, 4, 5, 7], forgets=True)
    everybody_refused(driven, range(6), 2)


def test_every_sum_is_remembered_not_the_last_alone(tmp_path):
    driven = Asking(tmp_path)
    driven.total()
    assert driven.total(range(5), forgets=True).clients == tuple(range(5))  # three apart
    with pytest.raises(Abandoned):  # four apart from that, and one from the first
        driven.total(range(1, 8), forgets=True)
    everybody_refused(driven, range(1, 8), 1)


@pytest.mark.parametrize("randomness", ["simulated", "system"])
def test_the_same_members_again_give_the_same_bits(randomness, tmp_path):
    driven = Asking(tmp_path, replace(SECURE, randomness=randomness))
    first = driven.total()
    for forgets in (False, True):
        again = driven.total(forgets=forgets)
        assert again.clients == first.clients
        assert np.array_equal(again.values, first.values)
    assert not driven.engine.refusals


@pytest.mark.parametrize(
    ("least", "lost", "refused"), [(3, 1, True), (3, 2, True), (3, 3, False), (2, 2, False)]
)
def test_a_client_lost_in_the_second_of_two_means_of_one_order(least, lost, refused, tmp_path):
    """The server asked for the same both times; enough lost ones hide each other."""
    driven = Asking(tmp_path, replace(SECURE, min_group=least))
    driven.total()
    driven.engine.lost = tuple(EIGHT)[-lost:]
    rest = tuple(EIGHT)[:-lost]
    if not refused:
        assert driven.total().clients == rest
        return
    with pytest.raises(Abandoned):
        driven.total()
    everybody_refused(driven, rest, lost)


def test_another_round_and_another_order_are_other_uploads(tmp_path):
    driven = Asking(tmp_path)
    driven.total()
    driven.door.begin(1, "2", EIGHT, 8, 1)
    assert driven.total(range(7)).clients == tuple(range(7))
    driven.state = replace(driven.state, models={0: driven.state.models[0] * 1.5})
    assert driven.total().clients == tuple(EIGHT)
    assert not driven.engine.refusals


@pytest.mark.parametrize("again", [(), (7,), (5, 6, 7)], ids=["nobody", "one", "enough"])
def test_a_round_that_was_summed_before_a_crash_is_not_summed_again_without_one(
    again, tmp_path, monkeypatch
):
    """The checkpoint is older than the sum, and other clients are lost the second time."""
    totals, sums, save = [], Secure.sums, running.Live._save

    def noted(self, *words, **more):
        found = sums(self, *words, **more)
        totals.append((self.door.round, found[0]))
        return found

    def crash(self, rounds):
        if rounds == 1:
            raise KeyboardInterrupt
        save(self, rounds)

    monkeypatch.setattr(Secure, "sums", noted)
    made = secured(coterie.fedavg(), population=uneven(8), settings={"rounds": 2})
    with monkeypatch.context() as patch:
        patch.setattr(running.Live, "_save", crash)
        with pytest.raises(KeyboardInterrupt):
            execute(made, tmp_path / "run")
    lossy = lambda c, order: c in again and order.startswith("1.")  # noqa: E731
    engine = lambda plan, workers=None: Faulty(Loop(plan), lose_order=lossy)  # noqa: E731
    monkeypatch.setitem(ENGINES, "loop", engine)
    result = execute(made, tmp_path / "run", resume=True)
    told = [event.get("abandoned", "") for event in result.history]
    assert told[1] == ""
    if again == (7,):
        assert "differs by 1 of its 7 members" in told[0]
        assert [number for number, _ in totals] == [0, 1]
        assert result.summary["abandoned"] == 1
        assert result.summary["exposure"]["near"]["count"] == 0
        return
    assert told[0] == ""
    assert [number for number, _ in totals] == [0, 0, 1]
    assert set(totals[0][1].clients) - set(totals[1][1].clients) == set(again)
    assert np.array_equal(totals[0][1].values, totals[1][1].values) == (not again)


# --- what stays in a session ------------------------------------------------------------------


def test_no_upload_is_left_in_a_session_once_it_is_masked(tmp_path, monkeypatch):
    """Whoever takes a client's files after that finds nothing that the sum should hide."""
    uploads, found = {}, {}
    advertise = Sealing.advertise

    def seen(self, client, examples, upload, received, body):
        uploads[client] = upload.arrays["model"].vector.numpy().tobytes()
        return advertise(self, client, examples, upload, received, body)

    class Reading(Loop):
        def exchange(self, requests, until=None):
            yield from super().exchange(requests, until)
            order = self._site.wire.unpack(requests[0].message)["order"]
            for client, upload in uploads.items():
                files = (self._plan.folder / SESSIONS / str(client)).iterdir()
                kept = b"".join(p.read_bytes() for p in files)
                found[order, client] = upload[:32] in kept

    monkeypatch.setattr(Sealing, "advertise", seen)
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
    driven.door.terms = replace(driven.door.terms, clock=Links())
    for number in (0, 1):
        driven.round(number)
        assert not driven.abandoned
        assert driven.fed.last == REST
    keeps = name == "ditto"  # a state, and the straggler's stays as it was
    assert driven.door.versions == dict.fromkeys(REST if keeps else (), "2.0")
    assert driven.door.ledger.late == 2


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

    monkeypatch.setattr("coterie.door.door.time", SimpleNamespace(monotonic=lambda: now[0]))
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
    assert sentences(seen) == ["The server learned no sum: what it received was masked."]
    assert "2 of the 3 clients" in result.history[0]["abandoned"]


def test_a_mean_of_one_is_told_apart_from_what_a_method_looks_at():
    result = execute(secured(coterie.fedavg(), Privacy(), settings={"rounds": 1, "cohort": 1}))
    said = sentences(result.summary["exposure"])[0]
    assert said.startswith("A mean of one client is what it sent: so the method saw ")


def test_a_refusal_counts_rounds_as_people_do(tmp_path):
    lost = lambda client, order: client > 2 and order == "2.1"  # noqa: E731
    made = secured(coterie.fedavg(), settings={"rounds": 2})
    driven = Driven(made, tmp_path, lambda plan: Faulty(Loop(plan), lose_reply=lost)).all()
    assert list(driven.abandoned) == [1]
    assert "secure aggregation (round 2, slot 0" in driven.abandoned[1]
