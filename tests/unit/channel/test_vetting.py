"""What a server checks of answers from machines of others: honest ones pass, others do not."""

import json
from pathlib import Path

import pytest
import torch

import coterie
from coterie.channel.channel import Channel
from coterie.channel.checks import misfits, printable, shape_of, vet, vet_message
from coterie.channel.compression.coding import Coding
from coterie.channel.piggyback import Piggyback, scoring
from coterie.channel.wire import Message, Wire
from coterie.core.messages import Order
from coterie.core.tree import same
from coterie.core.weights import Layout, Weights
from coterie.engines.loop import Loop
from coterie.errors import TrainingError
from support import ROWS, digits, drive, experiment, models, same_bits

NAN, INF = float("nan"), float("inf")
PEOPLE = digits(samples=120)


def body(**changes):
    whole = {"examples": 5, "arrays": {}, "metrics": {"loss": 0.5}, "version": "1.0"}
    return {k: v for k, v in {**whole, **changes}.items() if v is not ...}


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"examples": 0},
        {"examples": 10},
        {"metrics": {}},
        {"metrics": {"a": 3, "b": -1e300}},
        {"version": ...},
        {"scored": {}},
        {"scored": {"metrics": {"val_loss": NAN}}},  # of a client without validation data
        {"scored": {"error": "TrainingError", "text": "why"}},
    ],
    ids=str,
)
def test_what_can_be_is_taken(changes):
    vet(body(**changes), 10, scoring=False)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"examples": 11}, "it counts 11 samples, and has 10"),
        ({"examples": -1}, "it counts -1 samples"),
        ({"examples": 2**70}, "samples, and has 10"),
        ({"examples": 5.0}, "it counts 5.0 samples"),
        ({"examples": NAN}, "it counts nan samples"),
        ({"examples": True}, "it counts True samples"),
        ({"examples": "5"}, "it counts 5 samples"),
        ({"examples": None}, "it counts None samples"),
        ({"examples": ...}, "it counts None samples"),
        ({"metrics": {"loss": NAN}}, "is not finite"),
        ({"metrics": {"loss": INF}}, "is not finite"),
        ({"metrics": {"loss": "0"}}, "its 'loss' is not a number"),
        ({"metrics": {"loss": None}}, "its 'loss' is not a number"),
        ({"metrics": {"loss": [1.0]}}, "its 'loss' is not a number"),
        ({"metrics": {"loss": True}}, "its 'loss' is not a number"),
        ({"metrics": {"\x1b[2J": 1.0}}, "its '?[2J' is not a number"),
        ({"metrics": {"x" * 101: 1.0}}, "is not a number"),
        ({"metrics": {5: 1.0}}, "its '5' is not a number"),
        ({"metrics": {str(n): 1.0 for n in range(10_001)}}, "not have the form of metrics"),
        ({"metrics": [0.5]}, "not have the form of an answer"),
        ({"metrics": ...}, "not have the form of an answer"),
        ({"arrays": ...}, "not have the form of an answer"),
        ({"arrays": [1]}, "not have the form of an answer"),
        ({"arrays": {"../x\n": torch.zeros(1)}}, "name of one of its arrays is not valid"),
        ({"scored": 3}, "scores do not have the form of scores"),
        ({"scored": {"metrics": 3}}, "not have the form of metrics"),
        ({"scored": {"metrics": {"val_a": "b"}}}, "its 'val_a' is not a number"),
        ({"scored": {"metrics": {"loss": 1.0}}}, "'loss' is not a valid name of a score"),
        (
            {"scored": {"metrics": {"test_worst": 1.0}}},
            "'test_worst' is not a valid name of a score",
        ),
        ({"scored": {"metrics": {"val_p10": 1.0}}}, "is not a valid name of a score"),
        ({"scored": {"metrics": {"test_weighted_x": 1.0}}}, "is not a valid name of a score"),
        ({"scored": {"metrics": {"test_accuracy": 1e9}}}, "scores are at most 1"),
        ({"version": "a\nb"}, "not a valid name"),
        ({"version": 5}, "not a valid name"),
        ({"version": None}, "not a valid name"),
    ],
    ids=lambda given: str(given)[:40],
)
def test_what_cannot_be_is_refused(changes, told):
    with pytest.raises(TrainingError) as refused:
        vet(body(**changes), 10, scoring=False)
    assert told in str(refused.value)


def test_what_is_too_large_for_a_number_is_refused():
    with pytest.raises(OverflowError):  # the channel rejects whatever is raised
        vet(body(metrics={"loss": 10**400}), 10, scoring=False)
    with pytest.raises(OverflowError):
        vet(body(scored={"metrics": {"val_loss": 10**400}}), 10, scoring=False)


def test_numbers_of_an_answer_that_scores_are_scores():
    honest = {"test_accuracy": 1.0, "val_loss": NAN, "test_mae": 7.5, "test_r2": -3.0}
    vet(body(metrics=honest), 10, scoring=True)
    for name, value in [("loss", 0.5), ("test_worst", 1.0), ("test_accuracy", 1.01)]:
        with pytest.raises(TrainingError):
            vet(body(metrics={name: value}), 10, scoring=True)


def test_a_model_is_of_the_models_type():
    for kind in (torch.int64, torch.bool, torch.float64):
        odd = Weights(LAYOUT, torch.zeros(LAYOUT.size, dtype=kind))
        with pytest.raises(TrainingError, match="not float32"):
            vet(body(arrays={"model": odd}), 10, scoring=False)
    vet(body(arrays={"counts": torch.zeros(3, dtype=torch.int64)}), 10, scoring=False)


# --- before anything is unpacked -----------------------------------------------------------------


def message(body, arrays=()):
    return Message(json.dumps({"body": body, "arrays": list(arrays)}).encode(), ())


@pytest.mark.parametrize(
    ("body", "arrays"),
    [
        ([], []),
        ({"unknown": 1}, []),
        ({"arrays": {"$dict": [["model", 1]]}}, []),
        ({"metrics": {"$dict": [[1, 2.0]]}}, []),
        ({"arrays": {"model": {"change": [{"$tuple": []}]}}}, []),
        ({"scored": {"metrics": {"$dict": []}}}, []),
        ({}, [["raw", [5 * 10**9], 9, "float32"]]),
        ({}, [["raw", [-4, -4], 9, "float32"]]),
        ({}, [["raw", [1], 4, "float32"]] * 10_001),
        ({}, [["raw", [600], 4, "float32"]] * 2),  # together they are too much
        ({}, [["raw", [1] * 9, 4, "float32"]]),
    ],
    ids=lambda given: str(given)[:40],
)
def test_a_message_that_could_hurt_is_not_unpacked(body, arrays):
    with pytest.raises(TrainingError):
        vet_message(message(body, arrays), 1000)


def test_a_message_as_they_are_is_unpacked():
    said = {"examples": 3, "arrays": {}, "metrics": {"loss": 1.0}, "beside": {"$dict": [[1, 2]]}}
    vet_message(message(said, [["raw", [9, 111], 4000, "float32"], ["raw", [], 4, "x"]]), 1000)
    # What came plainly may be as long as it is: secure sums have many bytes to a number.
    long = json.dumps({"body": said, "arrays": [["u1", [9000], 9000], ["f4", [900], 9]]}).encode()
    vet_message(Message(long, (bytes(9000), bytes(9))), 1000)
    with pytest.raises(TrainingError, match="larger than allowed"):
        vet_message(Message(long, (bytes(8000), bytes(9))), 1000)
    with pytest.raises(TrainingError, match="header has"):
        vet_message(Message(bytes(1 + (1 << 26)), ()), 1000)


def test_what_others_wrote_is_one_short_line():
    assert printable("a\x1b[31mb\nc\u202ed") == "a?[31mb?c?d"
    assert len(printable("x" * 10**6)) == 300
    assert printable(None) == "None"


# --- arrays --------------------------------------------------------------------------------------

LAYOUT = Layout.of(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)))
WHOLE = Weights(LAYOUT, torch.zeros(LAYOUT.size))
PART = WHOLE.only(["0"])


def judged(answers, sent=None, config=None, task="train"):
    """Who does not fit, of clients that answer these arrays."""
    orders = {
        c: Order(c, task, sent if sent is not None else {"model": WHOLE}, (config or {}).get(c, {}))
        for c in answers
    }
    return sorted(misfits(orders, {c: {"arrays": a} for c, a in answers.items()}))


def test_all_alike_all_fit():
    assert judged({}) == []
    assert judged({0: {"model": WHOLE}}) == []
    assert judged({0: {}, 1: {}}) == []
    assert judged({c: {"model": WHOLE} for c in range(5)}) == []


@pytest.mark.parametrize("other", [{}, {"model": PART}, {"weights": WHOLE},
                                   {"model": WHOLE, "extra": WHOLE}, {"model": torch.zeros(13)}],
                         ids=["none", "part", "name", "extra", "tensor"])  # fmt: skip
@pytest.mark.parametrize("liar", [0, 1, 2])
def test_two_against_one(other, liar):
    answers = {c: {"model": WHOLE} for c in range(3)} | {liar: other}
    assert judged(answers) == [liar]


@pytest.mark.parametrize("liar", [0, 1])
@pytest.mark.parametrize("other", [{}, {"model": PART}, {"x": torch.zeros(1)}], ids=str)
def test_of_two_the_one_that_sends_the_like_of_what_it_got_is_right(other, liar):
    assert judged({1 - liar: {"model": WHOLE}, liar: other}) == [liar]


def test_a_majority_wins_over_the_like_of_what_was_sent():
    """Methods may ask for other things than they send: those who do so together are right."""
    part = {"direction": PART}
    assert judged({0: part, 1: part, 2: {"model": WHOLE}}) == [2]


def test_between_two_of_which_neither_is_like_the_order_it_is_always_the_same_one():
    first = judged({0: {"a": PART}, 1: {"b": PART}})
    assert len(first) == 1
    assert judged({0: {"b": PART}, 1: {"a": PART}}) == [1 - first[0]]


def test_only_those_who_were_asked_the_same_are_compared():
    answers = {0: {"model": WHOLE}, 1: {"model": PART}, 2: {"model": PART}, 3: {"model": WHOLE}}
    config = {1: {"layers": ["0"]}, 2: {"layers": ["0"]}}
    assert judged(answers, config=config) == []
    assert judged(answers, config={}) != []
    assert judged({0: {"model": WHOLE}, 1: {}}, config={1: {"x": 1}}) == []


def test_those_who_are_sent_nothing_are_judged_by_each_other():
    """Some learn alone, and send nothing; where all are to send something, that is too little."""
    orders = {c: Order(c, "train", {} if c < 2 else {"model": WHOLE}) for c in range(5)}
    sent = [{}, {}, {"model": WHOLE}, {"model": WHOLE}, {"model": PART}]
    assert list(misfits(orders, {c: {"arrays": a} for c, a in enumerate(sent)})) == [4]
    basis = {"basis": torch.zeros(2, 3)}
    assert judged({0: basis, 1: {}, 2: basis}, sent={}) == [1]


def test_the_size_of_a_tensor_is_a_clients_own_and_its_type_is_not():
    three = [torch.zeros(3), torch.zeros(4), torch.zeros(2, 3)]
    assert judged({c: {"a": a} for c, a in enumerate(three)}) == []
    three[2] = three[2].to(torch.int64)
    assert judged({c: {"a": a} for c, a in enumerate(three)}) == [2]
    assert shape_of({"b": PART, "a": torch.zeros(2, 3)}) == (
        ("a", "torch.float32"),
        ("b", PART.layout.names),
    )


def test_the_reason_says_how_the_others_are_made():
    orders = {c: Order(c, "train", {"model": WHOLE}) for c in range(3)}
    bodies = {c: {"arrays": {"model": WHOLE if c else PART}} for c in range(3)}
    (why,) = misfits(orders, bodies).values()
    assert why == "its arrays differ in form from those of the others (model of 4 tensors)"


# --- honest methods through a channel that checks -------------------------------------------------


class Vetting(Channel):
    """A channel as in a real federation."""

    def __init__(self, *given, **more):
        super().__init__(*given, **more)
        self.samples = {c: len(d.train) for c, d in enumerate(PEOPLE.clients)}
        self.ever = {}

    def begin(self, *given, **more):
        self.ever |= self.phase.rejected
        super().begin(*given, **more)


COMPARED = ("fedavg", "ifca", "dc-pfl", "fedtsdp", "ditto layer-wise", "fedfomo")
SETTINGS = {"rounds": 3, "cohort": 0.7, "wire": Coding("topk:share=0.5", "raw")}


@pytest.mark.parametrize("name", ROWS)
def test_no_honest_answer_of_any_method_is_rejected(name, tmp_path, monkeypatch):
    import support

    method = ROWS[name]()
    settings = SETTINGS | ({"wire": Coding()} if method.needs_exact else {})
    made = experiment(method, PEOPLE, schedule={"batch_size": 32}, settings=settings)
    monkeypatch.setattr(support, "Channel", Vetting)
    state, channel, _ = drive(made, tmp_path / "vetted")
    seen = models(made, state, channel)
    assert isinstance(channel, Vetting)
    assert not {**channel.ever, **channel.phase.rejected}
    assert channel.state.ledger.lost == 0
    if name in COMPARED:  # where nobody is rejected, a channel that checks does nothing else
        monkeypatch.undo()
        bare, plain, _ = drive(made, tmp_path / "plain")
        assert same_bits(models(made, bare, plain), seen)
        assert same(bare.to_tree()["models"], state.to_tree()["models"])


# --- a channel that checks, and one that does not -------------------------------------------------


LYING = experiment(coterie.fedavg(), PEOPLE).plan(Path()).start.layout


class Lying(Loop):
    """Client 2 answers what it likes."""

    lie = staticmethod(lambda body: None)

    def exchange(self, requests, until=None):
        for client, message in super().exchange(requests, until):
            if client == 2 and message is not None:
                wire = Wire(LYING)
                told = wire.unpack(message)
                self.lie(told)
                message = wire.pack(told)
            yield client, message


def channelled(samples, lie, tmp_path, **settings):
    made = experiment(coterie.fedavg(), PEOPLE, settings=settings)
    plan = made.plan(tmp_path)
    engine = Lying(plan)
    engine.lie = lie
    known = {c: len(d.train) for c, d in enumerate(PEOPLE.clients)} if samples else None
    channel = Channel(engine, Wire(plan.start.layout), terms=made.terms(plan.start), samples=known)
    channel.begin(0)
    return channel.gather([Order(c, "train", {"model": plan.start}) for c in range(6)]), channel


def spoil(body):
    body["arrays"]["model"].vector[3] = NAN


def cut(body):
    body["arrays"]["model"] = body["arrays"]["model"].only(["head"])


@pytest.mark.parametrize(
    ("lie", "told"),
    [
        (spoil, "no longer finite"),
        (cut, "differ in form from those of the others"),
        (lambda b: b.update(examples=10**6), "it counts 1000000 samples"),
        (lambda b: b["metrics"].update(loss=NAN), "is not finite"),
        (lambda b: b.pop("arrays"), "arrays"),
        (lambda b: b["arrays"].update(model=5), ""),
        (lambda b: b.update(since={"model": "x"}), ""),
    ],
    ids=["nan", "part", "samples", "metric", "no arrays", "a number", "since"],
)
def test_a_client_that_lies_is_rejected_by_name_and_the_others_count(lie, told, tmp_path):
    replies, channel = channelled(True, lie, tmp_path)
    assert [r.client for r in replies] == [0, 1, 3, 4, 5]
    assert list(channel.phase.rejected) == [2]
    assert told.lower() in channel.phase.rejected[2].lower()
    assert channel.state.ledger.lost == 1
    assert 2 not in channel.state.versions
    channel.begin(1)
    assert channel.phase.rejected == {}


def test_a_door_of_a_simulation_looks_for_outliers_only(tmp_path):
    with pytest.raises(TrainingError, match="client 2"):
        channelled(False, spoil, tmp_path / "a", outliers="off")
    replies, channel = channelled(False, spoil, tmp_path / "d")
    assert [r.client for r in replies] == [0, 1, 3, 4, 5]
    assert "no longer finite" in channel.phase.rejected[2]
    # It looks at nothing else: what a simulation does is its own.
    replies, channel = channelled(False, lambda b: b.update(examples=10**6), tmp_path / "b")
    assert [r.client for r in replies] == [0, 1, 2, 3, 4, 5]
    assert channel.phase.rejected == {}
    replies, _ = channelled(False, cut, tmp_path / "c")
    assert len(replies) == 6


def test_nothing_of_a_rejected_answer_is_used(tmp_path):
    """Not even the scores that rode on it."""
    made = experiment(coterie.fedavg(), PEOPLE)
    plan = made.plan(tmp_path)
    engine = Lying(plan)
    engine.lie = lambda b: cut(b) if b["arrays"] else None
    engine.piggybacks = True
    samples = {c: len(d.train) for c, d in enumerate(PEOPLE.clients)}
    channel = Channel(
        engine, Wire(plan.start.layout), terms=made.terms(plan.start), samples=samples
    )
    channel.begin(1)
    channel.stage(Piggyback).attach(scoring({c: {"model": plan.start} for c in range(6)}, {}), 0)
    channel.gather([Order(c, "train", {"model": plan.start}) for c in range(6)])
    scores, _ = channel.stage(Piggyback).collect()
    assert list(channel.phase.rejected) == [2]
    assert sorted(scores) == [0, 1, 3, 4, 5]
