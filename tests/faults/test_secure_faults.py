"""Secure aggregation when messages are lost, workers are killed, and servers lie."""

import os
import signal
from dataclasses import replace

import pytest
import torch

import coterie
from coterie.channel.privacy.client import GRAIN, SESSIONS
from coterie.channel.privacy.client_sums import ClientSums
from coterie.client.store import Store
from coterie.core.tree import same
from coterie.engines.base import one_thread
from coterie.engines.loop import Loop
from coterie.engines.pool import Pool
from coterie.experiment.experiment import ENGINES, execute
from coterie.methods import make
from faulty import Faulty
from guarded import EXCHANGES, SECURE, Driven, close, secured, witness
from support import same_bits

METHODS = {"ditto": coterie.ditto, "scaffold": coterie.scaffold, "fedavg": coterie.fedavg}
MASKED = 2  # the exchange in which the masked values arrive: who is lost later is in the sum


def losing(clients, order, kind="lose_reply"):
    """An engine that loses these clients' messages of one exchange."""

    def hit(client, name):
        return client in clients and name == order

    return lambda plan: Faulty(Loop(plan), **{kind: hit})


def state_of(driven, client):
    """What a client keeps, in the version that the server knows."""
    store = Store(driven.plan.folder, driven.plan.start.layout)
    return store.read(client, driven.channel.state.versions.get(client, ""))


# --- losses -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "exchange"), [*(("scaffold", e) for e in range(EXCHANGES)), ("ditto", MASKED)]
)
def test_the_mean_is_that_of_those_whose_masked_values_arrived(name, exchange, tmp_path):
    """The others keep their state; a damaged answer is a lost one, a lost order too."""
    lost, everybody, runs = {2, 5}, set(range(6)), {}
    summed = everybody - lost if exchange <= MASKED else everybody
    made = secured(METHODS[name](), settings={"rounds": 2})
    for kind in ("lose_reply", "lose_order", "damage"):
        engine = losing(lost, f"2.{exchange}", kind)
        with pytest.MonkeyPatch.context() as patch:
            driven = runs[kind] = Driven(made, tmp_path / kind, engine, around=witness(patch))
            driven.round(0)
            before = {c: state_of(driven, c) for c in everybody}
            driven.round(1)
        assert not driven.abandoned
        assert [set(m[0].clients) for m, _ in driven.fed.means] == [everybody, summed]
        for found, plain in driven.fed.means:
            close(found[0], plain[0], SECURE.bits)
        assert driven.channel.state.ledger.lost == len(lost)
        for client in everybody:
            assert driven.channel.state.versions[client] == ("2.0" if client in summed else "1.0")
            assert same(state_of(driven, client), before[client]) == (client not in summed)
    assert same_bits(runs["lose_reply"].models, runs["lose_order"].models)
    assert same_bits(runs["lose_reply"].models, runs["damage"].models)
    if name == "scaffold":  # its c is the mean of all clients' own, whoever was lost
        own = torch.stack([state_of(driven, c)["correction"] for c in everybody]).double().mean(0)
        assert float(own.abs().max()) > 1e-2
        assert torch.allclose(driven.state.memory["correction"].double(), own, atol=1e-6)


@pytest.mark.parametrize("randomness", ["simulated", "system"])
@pytest.mark.parametrize("name", METHODS)
def test_orders_that_arrive_twice_count_once(name, randomness, tmp_path):
    made = secured(METHODS[name](), replace(SECURE, randomness=randomness), settings={"rounds": 2})
    once = Driven(made, tmp_path / "a").all()
    twice = Driven(made, tmp_path / "b", lambda p: Faulty(Loop(p), repeat=lambda c, o: True)).all()
    assert same_bits(once.models, twice.models)
    assert once.channel.state.versions == twice.channel.state.versions
    assert not twice.withheld[0]
    assert not twice.withheld[1]
    assert twice.channel.state.ledger.lost == 0


class Echoing(Loop):
    """Asks every client twice and compares its two answers to the byte."""

    def exchange(self, requests, until=None):
        first = {c: m.to_bytes() for c, m in super().exchange(requests, until)}
        for client, message in super().exchange(requests, until):
            assert message.to_bytes() == first[client]
            yield client, message


@pytest.mark.parametrize("randomness", ["simulated", "system"])
@pytest.mark.parametrize("name", ["ditto", "fedavg"])
def test_a_repeated_order_is_answered_with_the_same_bytes(name, randomness, tmp_path):
    """Of a client that keeps nothing, too: keys drawn anew would make a sum impossible."""
    made = secured(METHODS[name](), replace(SECURE, randomness=randomness), settings={"rounds": 2})
    driven = Driven(made, tmp_path, Echoing).all()
    assert not driven.abandoned


# --- too few ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "exchange"), [*(("ditto", e) for e in range(EXCHANGES)), ("scaffold", MASKED)]
)
def test_below_the_threshold_the_round_is_abandoned_and_nothing_has_happened(
    name, exchange, tmp_path
):
    lost = {0, 2, 3, 5} if exchange == 0 else {0, 2, 5}  # of six members it takes four
    made = secured(METHODS[name]())
    driven = Driven(made, tmp_path / "a", losing(lost, f"2.{exchange}"))
    driven.round(0)
    state, versions = driven.state, dict(driven.channel.state.versions)
    tree, kept = state.to_tree(), {c: state_of(driven, c) for c in range(6)}
    driven.round(1)
    assert list(driven.abandoned) == [1]
    needed = "2 of the 3 clients" if exchange == 0 else "3 of 6 clients are left, 4 needed"
    assert needed in driven.abandoned[1]
    assert driven.state is state
    assert same(driven.state.to_tree(), tree)
    assert driven.channel.state.versions == versions
    assert all(same(state_of(driven, c), kept[c]) for c in range(6))
    driven.round(2)
    assert list(driven.abandoned) == [1]

    silent = Driven(made, tmp_path / "b", losing(set(range(6)), "2.0", "lose_order")).all()
    assert list(silent.abandoned) == [1]
    assert same_bits(driven.models, silent.models)


@pytest.mark.parametrize("exchange", [1, 4])
def test_a_run_goes_on_after_an_abandoned_round_and_says_why(exchange, tmp_path):
    made = secured(coterie.scaffold())
    with pytest.MonkeyPatch.context() as patch:
        lossy = losing({0, 2, 5}, f"2.{exchange}")
        patch.setitem(ENGINES, "loop", lambda plan, workers=None: lossy(plan))
        result = execute(made, tmp_path)
    told = [e.get("abandoned", "") for e in result.history]
    assert "3 of 6 clients are left, 4 needed" in told[1]
    assert told[0] == told[2] == ""
    assert "received" not in result.history[1]
    assert result.summary["abandoned"] == 1
    assert result.summary["exposure"]["sums"]["secure"]["count"] == 2
    assert result.summary["exposure"]["single"] == {}


@pytest.mark.parametrize("exchange", range(1, EXCHANGES))
def test_one_slot_falls_below_and_the_others_go_on(exchange, tmp_path):
    made = secured(make("oracle+ditto", {}), settings={"rounds": 2})
    driven = Driven(made, tmp_path, losing({3}, f"2.{exchange}"))
    driven.round(0)
    members = {g: [c for c in range(6) if driven.state.groups[c] == g] for g in (0, 1)}
    assert [len(m) for m in members.values()] == [3, 3]
    gone = driven.state.groups[3]
    before, versions = dict(driven.state.models), dict(driven.channel.state.versions)
    driven.round(1)
    assert not driven.abandoned
    assert list(driven.withheld[1]) == [str(gone)]
    assert "needed" in driven.withheld[1][str(gone)]
    for group, people in members.items():
        assert same(driven.state.models[group], before[group]) == (group == gone)
        for client in people:
            assert (driven.channel.state.versions[client] == versions[client]) == (group == gone)


# --- workers that are really killed -----------------------------------------------------------


STEPS = ("advertise", "keys", "shares", "survivors", "confirmations")


@pytest.mark.parametrize(("name", "randomness"), [("ditto", "simulated"), ("fedavg", "system")])
def test_workers_killed_in_the_middle_of_a_sum_change_no_bit(
    name, randomness, tmp_path, monkeypatch
):
    """SIGKILL after the step was done and noted, before its answer got out: it is asked again.

    In the second round a worker dies at each of the five steps, with another client.
    """
    made = secured(METHODS[name](), replace(SECURE, randomness=randomness), settings={"rounds": 2})
    expected = Driven(made, tmp_path / "loop").all()
    marks = tmp_path / "marks"
    marks.mkdir()

    def fatal(client, round, step):
        mark = marks / step
        if client == STEPS.index(step) and round == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    advertise, go_on = ClientSums.advertise, ClientSums.step

    def advertised(self, client, examples, upload, received, body):
        reply = advertise(self, client, examples, upload, received, body)
        fatal(client, body["round"], "advertise")
        return reply

    def stepped(self, client, body):
        reply = go_on(self, client, body)
        fatal(client, body["round"], body["beside"]["step"])
        return reply

    monkeypatch.setattr(ClientSums, "advertise", advertised)
    monkeypatch.setattr(ClientSums, "step", stepped)
    driven = Driven(made, tmp_path / "pool", lambda plan: Pool(plan, 2))
    try:
        found = driven.all().models
    finally:
        driven.close()
    assert {m.name for m in marks.iterdir()} == set(STEPS)
    assert not driven.abandoned
    assert not driven.withheld[1]
    assert driven.channel.state.ledger.lost == 0
    assert same_bits(found, expected.models)
    assert driven.channel.state.versions == expected.channel.state.versions


# --- a server that does not keep to the protocol ----------------------------------------------


class Captured(Loop):
    """Keeps the requests of every exchange by order and client."""

    def exchange(self, requests, until=None):
        self.requests = getattr(self, "requests", {})
        for request in requests:
            body = self._runtime.wire.unpack(request.message)
            self.requests[body["order"], request.client] = body
        yield from super().exchange(requests, until)


def body_of(driven, order, client):
    """An order as it was sent, to be sent again with changes."""
    body = dict(driven.engine.requests[order, client])
    body.pop("message", None)
    return body


def asked(driven, client, body):
    """What a client answers to a message of the server's own making."""
    site = driven.engine._runtime
    with one_thread():  # as engines and members have it: two give other last digits
        (message,) = site.answer([(client, site.wire.pack(body))])
    site.forget()
    return site.wire.unpack(message)


@pytest.fixture
def driven(tmp_path):
    """One round of FedAvg, listened to; clients can then be asked by hand."""
    made = secured(coterie.fedavg(), settings={"rounds": 1})
    return Driven(made, tmp_path, Captured).all()


def test_a_client_refuses_a_plain_order_for_its_vector(driven):
    body = body_of(driven, "1.0", 3)
    del body["beside"]
    answer = asked(driven, 3, {**body, "order": "1.9"})
    assert answer["error"] == "ConfigError"
    assert "method fedavg asks each client by itself (task 'train')" in answer["text"]
    assert "arrays" not in answer


def started(driven, **changes):
    """A new attempt, by hand: what everybody advertised."""
    answers = {}
    for client in range(6):
        body = body_of(driven, "1.0", client)
        beside = {**body["beside"], "attempt": "b" * 32, **changes.get(str(client), {})}
        answers[client] = asked(driven, client, {**body, "order": "1.9", "beside": beside})
    return answers


def step_body(attempt, step, blob, **more):
    secure = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
    return {
        "order": "1.10",
        "round": 0,
        "task": "$secure",
        "arrays": {"secure": secure},
        "config": {},
        "beside": {"attempt": attempt, "step": step, **more},
    }


def summed(driven, **rules):
    """The server's half of an attempt by hand, by these rules, its keys received."""
    from coterie.channel.privacy.client import place_name
    from coterie.channel.privacy.secagg import Session, Sum

    answers = started(driven)
    own = {"threshold": SECURE.threshold, "neighbours": 0, "least": SECURE.min_group} | rules
    session = Session(driven.fed.release.run, 0, "b" * 32, place_name(0, True, {}), **own)
    total = Sum(session, driven.plan.roster, driven.plan.start.layout.size + 4)
    return total, {c: bytes(a["arrays"]["secure"].numpy()) for c, a in answers.items()}


@pytest.mark.parametrize("rules", [{"threshold": 0.51}, {"least": 2}, {"neighbours": 2}])
def test_a_server_with_other_rules_than_the_clients_gets_no_keys(driven, rules):
    total, adverts = summed(driven, **rules)
    with pytest.raises(coterie.channel.privacy.secagg.TooFew):
        total.keys(adverts)


def test_a_server_that_asks_too_few_is_refused_by_each_client(driven):
    """It shows two clients each other's keys only, whose sum would be one of two."""
    total, adverts = summed(driven)
    total._least = 2
    total._carry_on = lambda due, there, owners: setattr(total, "_there", (0, 1))
    said = total.keys({c: adverts[c] for c in (0, 1)})
    answer = asked(driven, 0, step_body("b" * 32, "keys", said[0]))
    assert "only 2 members" in answer["beside"]["refused"]
    assert not answer["arrays"]


def test_a_step_is_repeated_word_by_word_and_never_done_again_with_others(driven):
    total, adverts = summed(driven)
    said = total.keys(adverts)
    shares = {c: asked(driven, c, step_body("b" * 32, "keys", said[c])) for c in range(6)}
    again = asked(driven, 2, step_body("b" * 32, "keys", said[2]))
    assert same(again["arrays"], shares[2]["arrays"])
    told = total.shares({c: bytes(s["arrays"]["secure"].numpy()) for c, s in shares.items()})
    names = {"metrics": ["loss"]}
    masked = asked(driven, 2, step_body("b" * 32, "shares", told[2], **names))
    assert masked["arrays"]["secure"].numel() > 8 * driven.plan.start.layout.size
    again = asked(driven, 2, step_body("b" * 32, "shares", told[2], **names))
    assert same(again["arrays"], masked["arrays"])
    # The same values behind the same masks, with the loss left out: the difference would tell it.
    other = asked(driven, 2, step_body("b" * 32, "shares", told[2], metrics=[]))
    assert "each step comes once" in other["beside"]["refused"]
    assert not other["arrays"]
    # Nor is there a way back to the beginning of this attempt, with other orders or with the same.
    body = body_of(driven, "1.0", 2)
    beside = {**body["beside"], "attempt": "b" * 32}
    back = asked(driven, 2, {**body, "order": "1.9", "config": {"steps": 1}, "beside": beside})
    assert back["error"] == "TrainingError"
    assert "a second time" in back["text"]
    asked(driven, 2, {**body, "order": "1.9", "beside": beside})
    other = asked(driven, 2, step_body("b" * 32, "keys", said[2]))
    assert "each step comes once" in other["beside"]["refused"]


def test_what_was_said_in_another_attempt_is_refused(driven):
    total, adverts = summed(driven)
    said = total.keys(adverts)
    unknown = asked(driven, 1, step_body("c" * 32, "keys", said[1]))
    assert unknown["beside"] == {"refused": "client 1 knows nothing of this sum"}
    assert not unknown["arrays"]
    body = body_of(driven, "1.0", 1)
    beside = {**body["beside"], "attempt": "c" * 32}
    asked(driven, 1, {**body, "order": "1.9", "beside": beside})
    old = asked(driven, 1, step_body("c" * 32, "keys", said[1]))
    assert "refused" in old["beside"]
    assert not old["arrays"]
    gone = asked(driven, 1, step_body("b" * 32, "keys", said[1]))
    assert gone["beside"] == {"refused": "client 1 knows nothing of this sum"}


@pytest.mark.parametrize("attempt", ["../../x", "a/b", ""])
def test_an_attempt_cannot_name_another_file(driven, attempt):
    body = body_of(driven, "1.0", 1)
    answer = asked(
        driven, 1, {**body, "order": "1.9", "beside": {**body["beside"], "attempt": attempt}}
    )
    assert answer["error"] == "TrainingError"
    assert "names no attempt" in answer["text"]


@pytest.mark.parametrize(
    "weights",
    [
        {0: 1, 1: 0, 2: 0, 3: 0, 4: 0, 5: 0},
        {0: 10**6, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1},
        {0: 1000, 1: 1000, 2: 1000, 3: 0, 4: 0, 5: 0},  # two of whom the server may call lost
        {0: 5, 1: 5, 2: -10, 3: 5, 4: 5, 5: 5},
        {0: 1000, 1: 1000, 2: 1000, 3: 1000, 4: 1000, 5: 99},
    ],
)
def test_a_client_refuses_weights_that_single_anybody_out(driven, weights):
    """Though all are told the same ones."""
    body = body_of(driven, "1.0", 0)
    beside = {**body["beside"], "attempt": "b" * 32, "weights": weights}
    answer = asked(driven, 0, {**body, "order": "1.9", "beside": beside})
    assert answer["error"] == "ConfigError"
    assert "weights" in answer["text"]


def test_clients_that_are_told_different_weights_make_no_sum(driven):
    others = dict.fromkeys(range(6), GRAIN)
    mine = {**dict.fromkeys(range(6), 7 * GRAIN), 0: GRAIN}  # its own is as ever
    told = {str(c): {"weights": mine if c == 0 else others} for c in range(6)}
    answers = started(driven, **told)
    from coterie.channel.privacy.client import place_name
    from coterie.channel.privacy.secagg import Session, Sum

    session = Session(
        driven.fed.release.run, 0, "b" * 32, place_name(0, True, others), SECURE.threshold, 0, 3
    )
    total = Sum(session, driven.plan.roster, 4)
    total.keys({c: bytes(a["arrays"]["secure"].numpy()) for c, a in answers.items()})
    assert list(total.rejected) == [0]


def test_an_order_sends_whole_models_where_nothing_is_lost(driven):
    """A change would make another model of what each client holds, under the same signature."""
    body = body_of(driven, "1.0", 0)
    change = {name: {"change": [array]} for name, array in body["arrays"].items()}
    answer = asked(driven, 0, {**body, "order": "1.9", "arrays": change})
    assert "where whole models are sent" in answer["text"]


def test_a_client_whose_own_weight_is_missing_refuses(driven):
    body = body_of(driven, "1.0", 0)
    beside = {**body["beside"], "attempt": "b" * 32, "weights": dict.fromkeys(range(1, 6), 1)}
    answer = asked(driven, 0, {**body, "order": "1.9", "beside": beside})
    assert "everybody's weight but its own" in answer["text"]


def test_secrets_of_a_finished_sum_are_gone_and_kept_from_others(driven):
    """One session a client, its last, in which no step is left; and whose sums it signed."""
    for client in range(6):
        folder = driven.plan.folder / SESSIONS / str(client)
        (session,) = folder.glob("*.session")
        assert {p.name for p in folder.iterdir()} == {session.name, "signed.json"}
        assert folder.stat().st_mode & 0o777 == 0o700
