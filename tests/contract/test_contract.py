"""What every method promises: one row each, the same checks for all."""

import copy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import coterie
from coterie.channel.compression.coding import Coding
from coterie.channel.ledger import Bytes
from coterie.core.method import State
from coterie.core.tree import read_tree, same, write_tree
from coterie.engines.loop import Loop
from coterie.engines.pool import Pool
from coterie.errors import TrainingError
from coterie.experiment.experiment import ENGINES, execute
from faulty import Faulty
from support import ROWS as GIVEN
from support import Stop, drive, experiment, models, same_bits, stop_after

# Evidence before the second round, and a trial in it.
TRIAL = "fl-hc by trial"
PROBED = (TRIAL, "dc-pfl")  # in the second round
ROWS = GIVEN | {TRIAL: lambda: coterie.fl_hc(rounds=1, trial="always")}
every_method = pytest.mark.parametrize("name", ROWS)
# What the transport promises (the same bits on every engine, lost replies, codecs) depends only on
# how a method talks to its clients and what they keep. One row for each way; the others are e2e.
COVERING = {
    "fedavg": "one model down, one up, averaged; clients keep nothing",
    "fedper": "layers that never leave their client",
    "ifca": "several models down to each client, which chooses among them",
    "group-evidence": "questions before the first round, and a trial in a later one",
    "dc-pfl": "questions in the second round; layers that rest are not sent; groups that divide",
    "fedtsdp": "public data at the server; whole models up, fewer and fewer layers down",
    "user-centric all": "gradients before the first round; a mean of its own for each client",
    "scaffold": "control variates: two slots each way, and state at the server and at clients",
    "fedfomo": "models of other clients down; the client remembers its last one",
    "cfl+fedrep+fedadam": "single replies of everybody, personal layers, a server optimiser",
    "ditto layer-wise": "a whole model that stays at its client; layers that rest",
    "adaptive-tau": "gradients and numbers beside the model, and a closing exchange",
    TRIAL: "questions and a trial in one round, of models of two kinds",
}
each_kind = pytest.mark.parametrize("name", COVERING)
each_kind_others_e2e = pytest.mark.parametrize(
    "name",
    [name if name in COVERING else pytest.param(name, marks=pytest.mark.e2e) for name in ROWS],
)
each_kind_with_codecs = pytest.mark.parametrize(
    "name", [name for name in COVERING if not ROWS[name]().needs_exact]
)
PARTIAL = {"rounds": 4, "cohort": 0.5}
# They group everybody, or divide their one group, in the first round.
ASK_ALL_FIRST = {"flis", "adaptive", "clusterfl", "cfl+fedrep+fedadam"}


def outcome(name, folder, engine=None, settings=None):
    made = experiment(ROWS[name](), settings=settings or {})
    state, channel, running = drive(made, folder, engine)
    try:
        return state, channel, models(made, state, channel)
    finally:
        running.close()


@cache
def undisturbed(name):
    """What nothing went wrong in, and what it is compared with: the same run for every test."""
    with TemporaryDirectory() as folder:
        return outcome(name, Path(folder))


@cache
def undisturbed_cohorts(name):
    """The same with half of the clients a round."""
    with TemporaryDirectory() as folder:
        return outcome(name, Path(folder), settings=PARTIAL)


class Reversed(Loop):
    """Answers in the opposite order."""

    def exchange(self, requests, until=None):
        yield from list(super().exchange(requests[::-1]))[::-1]


@every_method
def test_any_order_of_replies(name, tmp_path):
    state, _, plain = undisturbed(name)
    turned_state, _, turned = outcome(name, tmp_path, Reversed)
    assert same_bits(plain, turned)
    assert same(state.to_tree()["models"], turned_state.to_tree()["models"])


def on_the_pool(name, workers, folder):
    _, loop_door, loop = undisturbed_cohorts(name)
    _, pool_door, pool = outcome(name, folder, lambda p: Pool(p, workers), settings=PARTIAL)
    assert same_bits(loop, pool)
    assert loop_door.state.ledger.method == pool_door.state.ledger.method


@each_kind_others_e2e
def test_same_bits_on_the_pool(name, tmp_path):
    on_the_pool(name, 2, tmp_path)


@pytest.mark.parametrize("name", ["fedavg", "ifca", "scaffold"])
def test_same_bits_with_another_number_of_workers(name, tmp_path):
    on_the_pool(name, 3, tmp_path)


@every_method
def test_state_round_trips_exactly(name, tmp_path):
    state, channel, _ = undisturbed(name)
    write_tree(tmp_path / "state", state.to_tree(), channel.wire.layout, durable=False)
    back = State.from_tree(read_tree(tmp_path / "state", channel.wire.layout))
    assert same(back.to_tree(), state.to_tree())


@each_kind_others_e2e
@pytest.mark.parametrize("hits", [[(3, "2.0")], [(0, "1.0"), (5, "1.0")]], ids=["one", "two"])
def test_a_lost_reply_is_as_if_the_order_had_been_lost(name, hits, tmp_path):
    def hit(c, o):
        return (c, o) in hits

    _, done, worked = outcome(name, tmp_path / "a", lambda p: Faulty(Loop(p), lose_reply=hit))
    _, idle, never = outcome(name, tmp_path / "b", lambda p: Faulty(Loop(p), lose_order=hit))
    _, _, whole = undisturbed(name)
    assert same_bits(worked, never)
    assert done.state.versions == idle.state.versions
    assert done.state.ledger.lost == len(hits)
    # Krum takes one client's model: another's loss may not matter. Where clients are probed in the
    # second round they first say how many steps they need, of which the median counts.
    if name != "krum" and not (name in PROBED and hits[0][1] == "2.0"):
        assert not same_bits(worked, whole)


@each_kind_with_codecs
def test_lossy_codecs_give_the_same_bits_on_the_pool(name, tmp_path):
    settings = {"rounds": 3, "cohort": 0.5, "wire": Coding("qsgd", "qsgd:levels=127")}
    _, loop_door, loop = outcome(name, tmp_path / "a", settings=settings)
    _, pool_door, pool = outcome(name, tmp_path / "b", lambda p: Pool(p, 2), settings=settings)
    assert same_bits(loop, pool)
    assert loop_door.state.ledger == pool_door.state.ledger
    assert loop_door.state.versions == pool_door.state.versions
    assert sum(loop_door.state.ledger.kinds.values(), Bytes()) == loop_door.state.ledger.total


@each_kind_with_codecs
def test_a_lost_reply_leaves_no_trace_in_what_codecs_remember(name, tmp_path):
    settings = {"wire": Coding("topk:share=0.2", "topk:share=0.2")}

    def hit(c, o):
        return (c, o) == (3, "2.0")

    found = []
    for fault in ("lose_reply", "lose_order"):
        _, channel, trained = outcome(
            name, tmp_path / fault, lambda p, f=fault: Faulty(Loop(p), **{f: hit}), settings
        )
        found.append((trained, channel.state.versions, channel.state.held))
    (worked, versions, held), (never, as_if, untouched) = found
    assert same_bits(worked, never)
    assert versions == as_if
    assert same(held, untouched)


@each_kind
def test_an_order_that_arrives_twice_counts_once(name, tmp_path):
    _, _, once = undisturbed(name)
    _, _, twice = outcome(name, tmp_path, lambda p: Faulty(Loop(p), repeat=lambda c, o: c % 2 == 0))
    assert same_bits(once, twice)


@every_method
def test_nobody_answers(name, tmp_path):
    made = experiment(ROWS[name]())

    def mute(plan):  # all answer before the first round, nobody afterwards
        return Faulty(Loop(plan), lose_reply=lambda c, o: not o.startswith("init"))

    state, channel, _ = drive(made, tmp_path, mute)
    lost = channel.state.ledger.lost
    channel.begin(0, stage="init")
    begun = made.method.init(channel, made.setup(made.plan(tmp_path).start))
    assert lost == (5 if name in PROBED else 3) * 6  # it also asks, in the second round and third
    assert same(state.to_tree()["models"], begun.to_tree()["models"])
    assert same(state.to_tree()["groups"], begun.to_tree()["groups"])
    assert channel.state.versions == {}


ASK_FIRST = ["fedclust", "group-evidence", "user-centric", "user-centric all", "pacfl", "k-fed"]


@pytest.mark.parametrize("name", ASK_FIRST)
def test_nobody_answers_the_first_question(name, tmp_path):
    def mute(plan):
        return Faulty(Loop(plan), lose_reply=lambda c, o: True)

    with pytest.raises(TrainingError, match="no client"):
        drive(experiment(ROWS[name]()), tmp_path, mute)


@pytest.mark.parametrize("name", ASK_FIRST)
def test_a_client_whose_first_answer_was_lost_is_admitted_at_its_turn(name, tmp_path):
    def hit(c, o):
        return c == 3 and o == "init.0"

    state, _, _ = outcome(name, tmp_path, lambda p: Faulty(Loop(p), lose_reply=hit))
    assert sorted(state.groups) == [0, 1, 2, 3, 4, 5]


@every_method
def test_partial_participation_trains_only_the_cohort(name, tmp_path):
    made = experiment(ROWS[name](), settings={"rounds": 1, "cohort": 2})
    busy = set()

    def note(client, order):
        if not order.startswith("init"):
            busy.add(client)
        return False

    _, channel, _ = drive(made, tmp_path, lambda p: Faulty(Loop(p), lose_order=note))
    assert len(busy | set(channel.state.versions)) == (6 if name in ASK_ALL_FIRST else 2)


@every_method
def test_sees_is_true(name):
    _, channel, _ = undisturbed(name)
    method = ROWS[name]()
    # Looking at models for this test is a fetch, which is not part of the method.
    seen = {"nothing": set(), "means": {"means"}, "each": {"means", "each"}}[method.sees]
    assert channel.exposed <= seen
    assert (method.sees == "nothing") == (not channel.exposed)


@every_method
def test_inputs_are_never_changed(name, tmp_path):
    made = experiment(ROWS[name]())
    states = []
    original = made.method.round

    def watched(fed, state, info):
        states.append((state, copy.deepcopy(state.to_tree())))
        return original(fed, state, info)

    object.__setattr__(made, "method", _with_round(made.method, watched))
    drive(made, tmp_path)
    assert len(states) == 3
    for state, copied in states:
        assert same(state.to_tree(), copied)


def test_a_task_that_changes_what_it_received_is_refused(tmp_path):
    from dataclasses import replace

    def greedy(client, arrays, config):
        arrays["0"].vector.add_(1)

    method = replace(ROWS["fedavg"](), tasks={"train": greedy})
    with pytest.raises(TrainingError, match="changed the array '0' that it received"):
        drive(experiment(method), tmp_path)


def _with_round(method, round):
    from dataclasses import replace

    return replace(method, round=round)


@each_kind_others_e2e  # every method's state comes back exactly: test_state_round_trips_exactly
def test_resumed_is_as_if_never_stopped(name, tmp_path):
    made = experiment(ROWS[name](), settings=PARTIAL)
    whole = execute(made, tmp_path / "whole")

    with pytest.raises(Stop):
        execute(made, tmp_path / "parts", watch=stop_after(2))
    resumed = execute(made, tmp_path / "parts", resume=True)
    for client in range(6):
        assert same(whole.weights(client), resumed.weights(client))
    assert without_seconds(whole.history) == without_seconds(resumed.history)
    assert whole.clients == resumed.clients


@each_kind
def test_a_second_life_with_another_fate_is_not_answered_from_the_first(name, tmp_path):
    """Stopped before its checkpoint and resumed, a run loses an order that it had not lost before.

    What the first life left behind under the same names must not answer the second one's orders.
    """
    made = experiment(ROWS[name](), settings={"rounds": 3, "checkpoint_every": 10})

    def lossy(plan, workers=None):
        return Faulty(Loop(plan), lose_order=lambda c, o: (c, o) == (0, "1.0"))

    with pytest.raises(Stop):
        execute(made, tmp_path / "lives", watch=stop_after(2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENGINES, "loop", lossy)
        second = execute(made, tmp_path / "lives", resume=True)
        straight = execute(made, tmp_path / "straight")
    for client in range(6):
        assert same(second.weights(client), straight.weights(client))


def without_seconds(history):
    return [{k: v for k, v in event.items() if k != "seconds"} for event in history]
