"""Messages that are damaged, rounds that come to nothing, clients that never end."""

import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import coterie
from coterie.channel.channel import Channel
from coterie.channel.compression.coding import Coding
from coterie.channel.policy import Policy
from coterie.channel.timing import Timing
from coterie.channel.wire import Message, Wire, received
from coterie.core.messages import Order
from coterie.core.method import Round
from coterie.core.tree import same
from coterie.core.weights import Layout, Weights
from coterie.engines.loop import Loop
from coterie.engines.pool import Pool
from coterie.errors import WireError
from coterie.experiment.admit import admit_client
from coterie.experiment.experiment import ENGINES, execute
from faulty import Faulty, damaged
from support import ROWS, digits, drive, experiment, models, on_quadratics, same_bits

# --- damaged messages ----------------------------------------------------------------------------

MESSAGE = (
    Wire(Weights.of(nn.Linear(3, 2)).layout)
    .pack({"order": "1.0", "arrays": {"a": torch.arange(5.0), "b": torch.arange(3)}})
    .to_bytes()
)


def test_a_whole_message_is_read():
    found = Message.from_bytes(MESSAGE)
    assert found.to_bytes() == MESSAGE
    assert found.size == len(MESSAGE)


def test_a_message_cut_short_anywhere_is_refused():
    for length in range(len(MESSAGE)):
        with pytest.raises(WireError, match=r"cut short|damaged"):
            Message.from_bytes(MESSAGE[:length])
        found = received(MESSAGE[:length])  # its length is known, and nothing else
        assert length < 8 or found.size == length
        if found is not None:
            with pytest.raises(WireError, match="damaged"):
                Wire(Layout(())).unpack(found)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 8 * len(MESSAGE) - 1))
def test_a_message_with_any_bit_wrong_is_refused(bit):
    wrong = bytearray(MESSAGE)
    wrong[bit // 8] ^= 1 << bit % 8
    with pytest.raises(WireError):
        Message.from_bytes(bytes(wrong))


def test_a_message_with_something_after_it_is_refused():
    with pytest.raises(WireError):
        Message.from_bytes(MESSAGE + b"\0")


@pytest.mark.parametrize("name", ["fedper", "fedfomo", "ifca"])
def test_a_damaged_reply_is_a_lost_one(name, tmp_path):
    assert damaged(MESSAGE) != MESSAGE
    made = experiment(ROWS[name](), settings={"wire": Coding("topk:share=0.2", "qsgd")})

    def hit(client, order):
        return (client, order) in {(2, "1.0"), (2, "2.0"), (4, "2.0")}

    found = []
    for fault in ("damage", "lose_reply"):
        state, channel, _ = drive(
            made, tmp_path / fault, lambda p, f=fault: Faulty(Loop(p), **{f: hit})
        )
        assert channel.state.ledger.lost == 3
        assert (channel.state.ledger.total_wasted.up > 0) == (
            fault == "damage"
        )  # these bytes did come
        down = {client: moved.down for client, moved in channel.state.ledger.wasted.items()}
        found.append((models(made, state, channel), channel.state.versions, down))
    assert same_bits(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]


# --- rounds of several exchanges -----------------------------------------------------------------


def twice(method):
    """The method with two exchanges a round, one after the other."""

    def round(fed, state, info):
        return method.round(fed, method.round(fed, state, info), info)

    return replace(method, round=round)


@pytest.mark.parametrize("every", [1, 5, None])
def test_a_round_abandoned_in_its_second_exchange_goes_back_to_its_beginning(
    every, tmp_path, monkeypatch
):
    # What the first exchange left with clients must not have pushed out what the round began with,
    # whether that was saved in a checkpoint or not.
    def lossy(plan, workers=None):
        return Faulty(Loop(plan), lose_reply=lambda c, o: o == "3.1")

    def skipping(plan, workers=None):
        return Faulty(Loop(plan), lose_order=lambda c, o: o.startswith("3."))

    found = []
    for number, engine in enumerate((lossy, skipping)):
        monkeypatch.setitem(ENGINES, "loop", engine)
        made = on_quadratics(
            twice(coterie.ditto()),
            [[1.0], [2.0, 4.0]],
            settings={"rounds": 4, "checkpoint_every": every or 1, "wire": Coding(down="qsgd")},
        )
        found.append(execute(made, None if every is None else tmp_path / str(number)))
    first, other = found
    assert [e["round"] for e in first.history if "abandoned" in e] == [3]
    assert [e["round"] for e in other.history if "abandoned" in e] == [3]
    assert first.history[2]["wasted"]["up"] > 0
    assert first.versions == other.versions == {0: "4.1", 1: "4.1"}
    for client in range(2):
        assert same(first.weights(client), other.weights(client))


def test_an_exchange_with_nobody_is_no_reason_to_give_a_round_up():
    inner = coterie.fedavg()

    def round(fed, state, info):
        assert fed.gather([]) == []
        assert fed.reduce([], {}) == {}
        return inner.round(fed, state, info)

    made = on_quadratics(replace(inner, round=round), [[1.0], [3.0]], settings={"rounds": 2})
    result = execute(made)
    assert result.summary["abandoned"] == 0
    assert result.state.models[0].vector.item() == pytest.approx(2 * (1 - 0.8**2), abs=1e-6)


# --- a newcomer after the run --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedtsdp", "ifca"])
def test_a_newcomer_to_a_run_with_lossy_codecs_is_read_and_told_by_them(name):
    # One is asked for a model that is a change of the one last sent, the other holds two models.
    everybody = digits(7)
    groups = everybody.groups[:6]
    people = replace(everybody, clients=everybody.clients[:6], groups=groups)
    found = {}
    for text in ("raw", "qsgd:levels=127"):
        made = experiment(ROWS[name](), people, settings={"wire": Coding(text, text)})
        found[text] = admit_client(execute(made), everybody.clients[6], epochs=1)
    raw, coded = found.values()
    assert coded.bytes.down < 0.5 * raw.bytes.down
    assert coded.weights.layout == raw.weights.layout
    assert float((coded.weights - raw.weights).vector.abs().max()) < 0.5


# --- a deadline of the wall clock ----------------------------------------------------------------


def slow_at_first(method, client):
    """The method with one client that does not come to an end in the first round."""
    inner = method.tasks["train"]

    def train(at, arrays, config):
        if (at.id, at.round) == (client, 0):
            time.sleep(60)
        return inner(at, arrays, config)

    return replace(method, tasks={**method.tasks, "train": train})


def test_who_sleeps_past_the_real_deadline_is_not_waited_for(tmp_path):
    made = experiment(slow_at_first(ROWS["fedper"](), 3), settings={"real_deadline": 1.5})
    plan = made.plan(tmp_path / "a")
    pool = Pool(plan, 2)
    try:
        terms = made.terms(plan.start)
        channel = Channel(pool, Wire(plan.start.layout), terms=terms)
        channel.begin(0, stage="init")
        state = made.method.init(channel, made.setup(plan.start))
        began, everybody = time.monotonic(), list(range(6))
        channel.begin(0, "", everybody, 6, 1)
        state = made.method.round(channel, state, Round(0, everybody))
        assert time.monotonic() - began < 10
        assert set(channel.state.versions) == {0, 1, 2, 4, 5}
        assert (
            channel.state.ledger.late,
            channel.state.ledger.lost,
            channel.state.ledger.total_wasted.up,
        ) == (1, 0, 0)
        # The deadline was the round's: scores are not its business, nor is the next round.
        scores = channel.score({c: made.method.sends(state, c) for c in everybody}, {})
        assert sorted(scores) == everybody
        channel.stage(Timing).terms = replace(terms, policy=Policy())
        channel.begin(1, "", everybody, 6, 6)
        state = made.method.round(channel, state, Round(1, everybody))
        assert set(channel.state.versions.values()) == {"2.0"}
        assert len(set(pool.pids)) == 2
        found = models(made, state, channel)
    finally:
        pool.close()

    plain = experiment(ROWS["fedper"]())
    state, channel, _ = drive(
        plain,
        tmp_path / "b",
        lambda p: Faulty(Loop(p), lose_reply=lambda c, o: (c, o) == (3, "1.0")),
        rounds=2,
    )
    assert same_bits(found, models(plain, state, channel))


def test_the_loop_does_not_begin_what_would_be_too_late(tmp_path, monkeypatch):
    # Time that passes at each order, so that nobody has to wait: the third begins too late.
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    inner = coterie.fedavg()

    def train(client, arrays, config):
        now[0] += 1.0
        return inner.tasks["train"](client, arrays, config)

    made = experiment(
        replace(inner, tasks={**inner.tasks, "train": train}), settings={"real_deadline": 2.5}
    )
    plan = made.plan(tmp_path)
    channel = Channel(Loop(plan), Wire(plan.start.layout), terms=made.terms(plan.start))
    channel.begin(0, "", range(6), 6, 1)
    replies = channel.gather([Order(c, "train", {"0": plan.start}) for c in range(6)])
    assert len(replies) == 2
    assert now[0] == 3.0
