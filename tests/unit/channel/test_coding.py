"""What is encoded against what: references, what is left over, and the server's mirror of it."""

import hashlib

import pytest
import torch
from torch import nn

import coterie
from coterie.channel.channel import Channel
from coterie.channel.compression.coding import Coding, decode, encode
from coterie.channel.wire import Wire
from coterie.client.store import Store
from coterie.core.messages import Order, Upload
from coterie.core.method import Method, Round, State
from coterie.core.tree import same
from coterie.core.weights import Layout, Weights
from coterie.engines.loop import Loop
from coterie.engines.pool import Pool
from coterie.errors import ConfigError
from coterie.experiment import experiment as running
from coterie.experiment import running as parts
from faulty import Faulty
from support import ROWS, Stop, drive, experiment, models, quadratics, same_bits

# --- encode and decode by themselves -------------------------------------------------------------


class Normed(nn.Module):
    """Two linear layers with a normalisation between them: parameters and buffers."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(1, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.norm(self.body(x)))


LAYOUT = Layout.of(Normed())
ZERO = Weights(LAYOUT, torch.zeros(LAYOUT.size))


def random(seed, layout=LAYOUT):
    generator = torch.Generator().manual_seed(seed)
    return Weights(layout, torch.randn(layout.size, generator=generator))


def over(coding, arrays, references, left=None, seed=1, layout=LAYOUT):
    """Arrays as they arrive: over a real message, and decoded."""
    coded = encode(coding.upwards, arrays, references, lambda s: seed, layout, left)
    wire = Wire(layout, coding.upwards.plain)
    arrived = wire.unpack(wire.pack({"arrays": coded.arrays}, coded.payloads, coded.choices))
    return decode(arrived["arrays"], references, layout)


def test_exact_codecs_send_the_array_itself_and_lossy_ones_its_change():
    model, reference = random(0), random(1)
    for text in ("raw", "raw+zstd"):
        coded = encode(Coding(text).upwards, {"m": model}, {"m": reference}, hash, LAYOUT)
        assert coded.arrays == {"m": model}
    for text in ("fp16", "qsgd", "topk:share=0.5"):
        coded = encode(Coding(text).upwards, {"m": model}, {"m": reference}, hash, LAYOUT)
        (change,) = coded.arrays["m"]["change"]
        assert same(change.vector, (model - reference).part(change.layout).vector)


def test_a_codec_that_happens_to_be_exact_acts_on_no_change():
    model = random(0)
    coded = encode(Coding("topk:share=1").upwards, {"m": model}, {"m": random(1)}, hash, LAYOUT)
    assert list(coded.arrays["m"]) == ["plain"]
    assert same(over(Coding("topk:share=1"), {"m": model}, {"m": random(1)})["m"], model)


def test_a_change_of_nothing_to_compare_with_travels_as_it_is():
    arrays = {"m": random(0), "t": torch.randn(9), "n": torch.arange(4)}
    assert same(over(Coding("qsgd:levels=1"), arrays, {}), arrays)


def test_an_array_that_is_a_change_by_itself_is_encoded_as_it_stands():
    step = random(0)
    found = over(Coding("topk:share=0.1"), {"m": step}, {"m": None})["m"]
    parameters = found.parameters
    assert int((parameters != 0).sum()) == 3  # ⌈0.1 · 26⌉ of them
    largest = step.parameters.abs().topk(3).indices
    assert torch.equal(parameters[largest], step.parameters[largest])


@pytest.mark.parametrize("text", ["qsgd:levels=1", "topk:share=0.05", "fp16", "qsgd:levels=1+zstd"])
def test_buffers_are_always_exact(text):
    model, reference = random(0), random(1)
    found = over(Coding(text), {"m": model}, {"m": reference})["m"]
    buffers = [e.name for e in LAYOUT.entries if e.kind == "buffer"]
    assert len(buffers) == 2
    assert same(found.only(buffers), model.only(buffers))
    assert not torch.equal(found.parameters, model.parameters)


def test_layers_have_codecs_of_their_own():
    model, reference = random(0), random(1)
    coding = Coding("topk:share=0.1", layers={"head": "raw"})
    found = over(coding, {"m": model}, {"m": reference})["m"]
    assert same(found.only(["head"]), model.only(["head"]))
    body = [e.name for e in LAYOUT.entries if e.layer == "body" and e.kind == "parameter"]
    moved = found.only(body).vector != reference.only(body).vector
    assert int(moved.sum()) == 2  # ⌈0.1 · 16⌉, the normalisation's counted with its layer's


def test_each_lossy_codec_acts_on_its_own_layers():
    model, reference = random(0), random(1)
    coding = Coding("topk:share=0.25", layers={"head": "topk:share=0.5"})
    found = over(coding, {"m": model}, {"m": reference})["m"]
    moved = {n: int((t != reference.tensors()[n]).sum()) for n, t in found.tensors().items()}
    assert moved["head.weight"] + moved["head.bias"] == 5
    assert sum(n for k, n in moved.items() if k[:4] in ("body", "norm") and "running" not in k) == 4


def test_layers_that_the_reference_lacks_travel_as_they_are():
    model = random(0)
    reference = random(1).only(["body"])
    found = over(Coding("topk:share=0.1"), {"m": model}, {"m": reference})["m"]
    assert same(found.only(["head"]), model.only(["head"]))
    assert not same(found.only(["body.weight"]), model.only(["body.weight"]))


def test_a_part_of_a_model_arrives_as_that_part():
    part = random(0).only(["head"])
    found = over(Coding("qsgd"), {"m": part}, {"m": random(1)})["m"]
    assert found.layout == part.layout
    assert float((found.vector - part.vector).abs().max()) < 1


def test_a_layer_that_is_not_there_is_refused():
    for coding in (Coding(layers={"tail": "raw"}), Coding(down_layers={"tail": "raw"})):
        with pytest.raises(ConfigError, match=r"unknown layer 'tail'.*body, head"):
            coding.check(LAYOUT)


# --- error feedback ------------------------------------------------------------------------------


def whole_numbers(seed, layout=LAYOUT):
    """Small whole numbers: sums of them are exact in float32."""
    generator = torch.Generator().manual_seed(seed)
    return Weights(layout, torch.randint(-9, 10, (layout.size,), generator=generator).float())


def left_of(state):
    """All that is left in a client's state, laid over nothing."""
    rest = ZERO
    for key, value in state.items():
        if key.startswith("$left"):
            rest = rest + value.onto(ZERO)
    return rest


@pytest.mark.parametrize(
    "coding",
    [
        Coding("topk:share=0.1"),
        Coding("topk:share=0.3+zstd"),
        Coding("topk:share=0.1", layers={"head": "topk:share=0.5"}),
        Coding("topk:share=0.1", layers={"head": "raw"}),
    ],
)
def test_what_was_sent_and_what_is_left_is_all_there_was(coding):
    state, sent, all_changes = {}, ZERO, ZERO
    for round in range(12):
        change, reference = whole_numbers(round), whole_numbers(99 + round)
        found = over(coding, {"m": reference + change}, {"m": reference}, state)["m"]
        sent, all_changes = sent + (found - reference), all_changes + change
        assert torch.equal((sent + left_of(state)).vector, all_changes.vector)
    assert left_of(state).vector.any()


def test_layers_that_rest_keep_what_is_left_of_them():
    state, coding = {}, Coding("topk:share=0.1")
    change, reference = whole_numbers(0), ZERO
    first = over(coding, {"m": change}, {"m": reference}, state)["m"]
    later = whole_numbers(1).only(["head"])
    second = over(coding, {"m": later}, {"m": reference}, state)["m"]
    total = first + second.onto(ZERO) + left_of(state)
    assert torch.equal(total.vector, (change + later.onto(ZERO)).vector)


def test_what_is_left_goes_by_its_codec_whichever_layers_travel():
    # Everything, then the head alone with nothing new: what was left of the head must come.
    state, coding = {}, Coding("topk:share=0.1", layers={"head": "topk:share=0.5"})
    first = over(coding, {"m": whole_numbers(0)}, {"m": ZERO}, state)["m"]
    missing = (whole_numbers(0) - first).only(["head"])
    assert missing.vector.any()
    found = over(coding, {"m": ZERO.only(["head"])}, {"m": ZERO}, state)["m"]
    assert torch.equal(found.vector, missing.vector)
    assert not left_of(state).only(["head"]).vector.any()


def test_tensors_have_something_left_too():
    state, coding = {}, Coding("topk:share=0.5")
    sent = over(coding, {"t": torch.tensor([4.0, 1.0])}, {"t": None}, state)["t"]
    assert sent.tolist() == [4.0, 0.0]
    sent = over(coding, {"t": torch.tensor([1.5, 1.0])}, {"t": None}, state)["t"]
    assert sent.tolist() == [0.0, 2.0]
    sent = over(coding, {"t": torch.tensor([0.0, 0.0])}, {"t": None}, state)["t"]
    assert sent.tolist() == [1.5, 0.0]


def test_only_topk_leaves_anything():
    for text in ("qsgd", "fp16", "raw"):
        state = {}
        over(Coding(text), {"m": random(0)}, {"m": random(1)}, state)
        assert state == {}


# --- through the channel --------------------------------------------------------------------------


class Row(nn.Module):
    """A model of eight numbers, or more, all 0 at first."""

    def __init__(self, size=8):
        super().__init__()
        self.row = nn.Parameter(torch.zeros(size))

    def forward(self, x):
        return self.row[:1].expand(len(x))


def a_method(task):
    """A method whose clients do just this."""

    def nothing(*_):
        raise AssertionError

    return Method("mine", lambda fed, setup: State(), nothing, nothing, {"do": task}, nothing)


def opened(task, folder, coding, clients=2, engine=Loop, size=8):
    """A channel to clients that do just this, with these codecs."""
    made = experiment(
        a_method(task),
        quadratics([[1.0]] * clients),
        model=lambda: Row(size),
        criterion=nn.functional.mse_loss,
        settings={"wire": coding},
    )
    plan = made.plan(folder)
    return Channel(
        engine(plan),
        Wire(plan.start.layout, coding.downwards.plain),
        terms=made.terms(plan.start),
    )


def row(*numbers):
    return Weights(Layout.of(Row(len(numbers))), torch.tensor([float(n) for n in numbers]))


def state_of(channel, folder, client=0):
    return Store(folder, channel.wire.layout).read(client, channel.state.versions.get(client, ""))


def hand_down(channel, round, model, clients=(0,)):
    channel.begin(round)
    return channel.gather([Order(c, "do", {"model": model}) for c in clients])


def test_a_model_that_stays_the_same_arrives_piece_by_piece(tmp_path):
    # Of eight numbers the two largest changes go down each time: after four rounds all are there.
    seen = []

    def look(client, arrays, config):
        seen.append(arrays["model"].vector.tolist())
        return Upload()

    target = row(8, -7, 6, 5, -4, 3, 2, 1)
    channel = opened(look, tmp_path, Coding(down="topk:share=0.25"))
    for round in range(5):
        hand_down(channel, round, target)
    assert seen == [
        [8, -7, 0, 0, 0, 0, 0, 0],
        [8, -7, 6, 5, 0, 0, 0, 0],
        [8, -7, 6, 5, -4, 3, 0, 0],
        [8, -7, 6, 5, -4, 3, 2, 1],
        [8, -7, 6, 5, -4, 3, 2, 1],
    ]
    assert same(state_of(channel, tmp_path)["$held.model"], target)


def test_what_a_lost_reply_brought_down_is_brought_again(tmp_path):
    seen = []

    def look(client, arrays, config):
        seen.append(arrays["model"].vector[:4].tolist())
        return Upload()

    def lossy(plan):
        return Faulty(Loop(plan), lose_reply=lambda c, o: o == "1.0")

    channel = opened(look, tmp_path, Coding(down="topk:share=0.25"), engine=lossy)
    for round in range(3):
        hand_down(channel, round, row(8, 7, 6, 5, 0, 0, 0, 0))
    assert seen == [[8, 7, 0, 0], [8, 7, 0, 0], [8, 7, 6, 5]]


def test_models_of_different_names_are_held_apart(tmp_path):
    channel = opened(lambda *_: Upload(), tmp_path, Coding(down="topk:share=0.25"))
    one, other = row(1, 2, 0, 0, 0, 0, 0, 0), row(0, 0, 0, 0, 0, 0, 3, 4)
    channel.begin(0)
    channel.gather([Order(0, "do", {"a": one, "b": other})])
    held = state_of(channel, tmp_path)
    assert same(held["$held.a"], one)
    assert same(held["$held.b"], other)


CHANGES = [row(9, 8, 7, 6, 5, 4, 3, 2), row(0, 0, 0, 0, 0, 0, 9, 0), row(1, 1, 1, 1, 1, 1, 1, 1)]


@pytest.mark.parametrize("lost", [None, 0, 1, 2])
def test_feedback_through_a_site_and_a_reply_that_was_lost_has_changed_nothing(lost, tmp_path):
    def change(client, arrays, config):
        return Upload(
            {"model": arrays["model"] + CHANGES[client.round]}, delta_of={"model": "model"}
        )

    def lossy(plan):
        return Faulty(Loop(plan), lose_reply=lambda c, o: o == f"{(lost or 0) + 1}.0")

    engine = Loop if lost is None else lossy
    channel = opened(change, tmp_path, Coding("topk:share=0.25"), engine=engine)
    sent, model = row(*[0] * 8), row(*range(8))
    for round in range(3):
        for reply in hand_down(channel, round, model):
            sent = sent + (reply.arrays["model"] - model)
    counted = [c.vector for r, c in enumerate(CHANGES) if r != lost]
    left = state_of(channel, tmp_path)["$left.model.topk:share=0.25"]
    assert torch.equal((sent + left).vector, sum(counted))


@pytest.mark.parametrize("delta_of", ["model", ""])
def test_the_server_reads_what_the_client_meant_and_not_a_change_of_its_own_model(
    delta_of, tmp_path
):
    # Down, two numbers of eight arrive at a time; up, whole numbers are exact in half precision.
    meant = []

    def change(client, arrays, config):
        trained = arrays["model"] + CHANGES[client.round]
        meant.append(trained if delta_of else CHANGES[client.round])
        return Upload({"model": meant[-1]}, delta_of={"model": delta_of})

    channel = opened(change, tmp_path, Coding("fp16", "topk:share=0.25"))
    for round in range(3):
        (reply,) = hand_down(channel, round, row(8, -7, 6, 5, -4, 3, 2, 1))
        assert same(reply.arrays["model"], meant[-1])
    # Really in half precision: 16 bytes up each time, and the header.
    assert channel.state.ledger.kinds["model/model"].up == 3 * 16


def test_a_model_that_was_not_received_is_a_change_of_the_one_last_sent(tmp_path):
    # The same model twice: at first its two largest numbers of eight arrive, then the next two.
    own = row(4, 3, 2, 1, 0, 0, 0, 0)
    channel = opened(lambda *_: Upload({"model": own}), tmp_path, Coding("topk:share=0.25"))
    came = []
    for round in range(3):
        channel.begin(round)
        (reply,) = channel.gather([Order(0, "do")])
        came.append(reply.arrays["model"].vector[:4].tolist())
    assert came == [[4, 3, 0, 0], [4, 3, 2, 1], [4, 3, 2, 1]]
    assert same(state_of(channel, tmp_path)["$sent.model"], own)
    assert same(channel.state.held[0]["$sent.model"], own)


# --- the mirror ----------------------------------------------------------------------------------


def mirrored(channel, folder):
    """What the server believes that clients hold is what they hold, bit for bit."""
    found = 0
    for client in channel.clients:
        state = state_of(channel, folder, client)
        theirs = {k: v for k, v in state.items() if k.startswith(("$held", "$sent"))}
        held = channel.state.held.get(client, {})
        ours = {n if n.startswith("$sent") else f"$held.{n}": w for n, w in held.items()}
        assert set(theirs) == set(ours)
        assert all(same(theirs[k], ours[k]) for k in ours)
        found += len(ours)
    return found


def chance(client, order, purpose, share):
    """A fault that strikes this share of the orders, the same in every run."""
    digest = hashlib.blake2b(f"{client} {order} {purpose}".encode(), digest_size=2).digest()
    return int.from_bytes(digest, "little") < share * 2**16


def unlucky(plan):
    def fault(purpose, share):
        return lambda c, o: chance(c, o, purpose, share)

    return Faulty(
        Loop(plan),
        lose_order=fault("order", 0.15),
        lose_reply=fault("reply", 0.15),
        repeat=fault("repeat", 0.3),
        damage=fault("damage", 0.15),
    )


BOTH = {
    "topk": Coding("topk:share=0.2", "topk:share=0.2"),
    "qsgd": Coding("qsgd", "qsgd:levels=127"),
    "by layer": Coding("bf16", "qsgd", {"head": "topk:share=0.5"}, {"head": "raw"}),
}


@pytest.mark.parametrize("coding", BOTH.values(), ids=BOTH.keys())
@pytest.mark.parametrize("name", ["fedavg", "ifca", "fedper", "fedfomo", "dc-pfl", "fedtsdp"])
def test_the_server_knows_what_clients_hold_whatever_is_lost(name, coding, tmp_path):
    settings = {"rounds": 4, "cohort": 0.7, "wire": coding}
    made = experiment(ROWS[name](), settings=settings)
    _, channel, _ = drive(made, tmp_path, unlucky)
    assert channel.state.ledger.lost > 3
    assert mirrored(channel, tmp_path) >= 4


class Remembered(parts.Channel):
    """A channel that can be looked at after the run."""

    last = None

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        Remembered.last = self


@pytest.mark.parametrize("name", ["ifca", "fedfomo"])
def test_the_server_knows_what_clients_hold_after_late_abandoned_and_resumed_rounds(
    name, tmp_path, monkeypatch
):
    # Of three that are asked the first two count and the third is late; in rounds 2 and 4 only one
    # answer comes, which is too few.
    settings = {
        "rounds": 7,
        "cohort": 2,
        "over_selection": 1.5,
        "min_reports": 2,
        "checkpoint_every": 2,
        "clock": {"name": "links", "speed": [0.1, 1.0]},
        "wire": BOTH["by layer"],
    }
    heard = {}

    def lossy(plan, workers=None):
        def lost(client, order):
            return order in ("2.0", "4.0") and heard.setdefault(order, client) != client

        return Faulty(Loop(plan), lose_reply=lost)

    monkeypatch.setattr(parts, "Channel", Remembered)
    monkeypatch.setitem(running.ENGINES, "loop", lossy)
    made, folder = experiment(ROWS[name](), settings=settings), tmp_path / "run"

    def look(event):
        mirrored(Remembered.last, folder / "clients")
        if event["round"] == 5:
            raise Stop

    with pytest.raises(Stop):
        running.execute(made, folder, watch=look)
    result = running.execute(made, folder, resume=True)
    assert mirrored(Remembered.last, folder / "clients") >= 3
    assert result.summary["late"] > 0
    assert [e["round"] for e in result.history if "abandoned" in e] == [2, 4]


def test_one_lossy_layer_is_enough(tmp_path):
    moved = {}
    for text in ("raw", "qsgd"):
        coding = Coding(layers={"head": text}, down_layers={"head": text})
        assert coding.upwards.exact == coding.downwards.exact == (text == "raw")
        made = experiment(coterie.fedavg(), settings={"rounds": 2, "wire": coding})
        _, channel, _ = drive(made, tmp_path / text)
        # Each of the six has its model by its name, and as the one received last.
        assert mirrored(channel, tmp_path / text) == (0 if text == "raw" else 12)
        moved[text] = channel.state.ledger.kinds
    assert moved["qsgd"]["model/hidden1"] == moved["raw"]["model/hidden1"]
    for way in ("down", "up"):
        few, many = (getattr(moved[t]["model/head"], way) for t in ("qsgd", "raw"))
        assert few < many / 7


def test_clients_that_hold_the_same_share_one_message(tmp_path):
    channel = opened(lambda *_: Upload(), tmp_path, Coding(down="qsgd"), clients=3)
    for round in range(3):
        hand_down(channel, round, row(*range(round, round + 8)), clients=range(3))
    held = [channel.state.held[c]["model"] for c in range(3)]
    assert held[0] is held[1] is held[2]


def test_scoring_and_fetching_change_nothing(tmp_path):
    made = experiment(ROWS["ifca"](), settings={"rounds": 3, "wire": BOTH["topk"]})
    plain, channel, _ = drive(made, tmp_path / "a")
    expected = models(made, plain, channel)

    method, original = made.method, made.method.round

    def scored(fed, state, info):
        after = original(fed, state, info)
        known = dict(fed.state.versions), dict(fed.state.held)
        files = sorted((tmp_path / "b").rglob("*.state"))
        fed.score({c: method.sends(after, c) for c in fed.clients}, {"adapt_epochs": 1})
        fed.fetch(0, method.sends(after, 0))
        assert known == (fed.state.versions, fed.state.held)
        assert files == sorted((tmp_path / "b").rglob("*.state"))
        return after

    object.__setattr__(made, "method", ROWS["ifca"]())
    object.__setattr__(made.method, "round", scored)
    state, channel, _ = drive(made, tmp_path / "b")
    assert same_bits(expected, models(made, state, channel))


# --- arrays that are no change -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "array"),
    [("user-centric", "gradient"), ("pacfl", "basis"), ("k-fed", "centres"), ("fedclust", "final")],
)
def test_what_is_a_change_of_nothing_is_exact_under_lossy_codecs(name, array, tmp_path):
    found = {}
    for text in ("raw", "qsgd:levels=1"):
        made = experiment(ROWS[name](), settings={"wire": Coding(text, text)})
        plan = made.plan(tmp_path / text[:3])
        channel = Channel(Loop(plan), Wire(plan.start.layout), terms=made.terms(plan.start))
        replies, gather = [], channel.gather
        channel.gather = lambda orders, g=gather, r=replies: r.extend(g(orders)) or r
        channel.begin(0, stage="init")
        made.method.init(channel, made.setup(plan.start))
        found[text] = [r.arrays[array] for r in replies]
    assert len(found["raw"]) == 6
    assert same(found["raw"], found["qsgd:levels=1"])


# --- seeds ---------------------------------------------------------------------------------------


def test_every_message_up_has_dice_of_its_own_and_engines_have_none(tmp_path):
    # The same change from everybody in every exchange: only the dice can make them differ.
    step, zero = row(*range(64)), row(*[0] * 64)

    def change(client, arrays, config):
        return Upload({"model": arrays["model"] + step}, delta_of={"model": "model"})

    def outcome(folder, engine):
        channel, found = opened(change, folder, Coding("qsgd:levels=15"), 4, engine, 64), []
        for round in range(3):
            channel.begin(round)
            for _ in range(2):
                orders = [Order(c, "do", {"model": zero}) for c in range(4)]
                found += [tuple(r.arrays["model"].vector.tolist()) for r in channel.gather(orders)]
        channel.engine.close()
        return found

    found = outcome(tmp_path / "a", Loop)
    assert len(set(found)) == len(found) == 24
    assert outcome(tmp_path / "b", lambda plan: Pool(plan, 2)) == found


def test_a_round_down_has_dice_of_its_own(tmp_path):
    # Nothing is adopted where every reply is lost, so each time the same change goes down.
    seen = []

    def look(client, arrays, config):
        seen.append(tuple(arrays["model"].vector.tolist()))
        return Upload()

    def mute(plan):
        return Faulty(Loop(plan), lose_reply=lambda c, o: True)

    channel = opened(look, tmp_path, Coding(down="qsgd:levels=15"), engine=mute, size=64)
    for round in range(6):
        hand_down(channel, round, row(*range(64)))
    assert len(set(seen)) == len(seen) == 6


def test_nobody_holds_what_was_not_sent(tmp_path):
    made = experiment(coterie.fedavg(), settings={"wire": BOTH["qsgd"]})
    plan = made.plan(tmp_path)
    channel = Channel(Loop(plan), Wire(plan.start.layout), terms=made.terms(plan.start))
    channel.begin(0, stage="init")
    state = made.method.init(channel, made.setup(plan.start))
    channel.begin(0)
    made.method.round(channel, state, Round(0, [1, 4]))
    assert set(channel.state.held) == set(channel.state.versions) == {1, 4}


def test_a_model_of_a_new_name_is_a_change_of_the_one_received_last(tmp_path):
    # Half of a change goes down at a time: whatever it is called, the second order has the rest.
    made = experiment(coterie.fedavg(), settings={"wire": Coding(down="topk:share=0.5")})
    _, channel, _ = drive(made, tmp_path, rounds=1)
    start, goal = (
        channel.terms.start,
        Weights(channel.wire.layout, torch.randn(channel.wire.layout.size)),
    )
    for name in ("old", "new"):
        channel.begin(5, stage=name)
        assert channel.gather([Order(0, "train", {name: goal})])
    assert not torch.equal(channel.state.held[0]["old"].vector, goal.vector)
    assert torch.allclose(channel.state.held[0]["new"].vector, goal.vector, atol=1e-6)
    assert not torch.allclose(channel.state.held[0]["new"].vector, start.vector, atol=1e-2)
    assert mirrored(channel, tmp_path)


def test_what_is_exported_is_what_was_scored(tmp_path):
    made = experiment(coterie.fedavg(), settings={"wire": Coding(down="topk:share=0.05")})
    result = running.execute(made, tmp_path / "run")
    for row in result.clients:
        data = result.plan.population.clients[row["client"]].test
        right = (result.predict(row["client"], data.x).argmax(-1) == data.y).float().mean()
        assert float(right) == pytest.approx(row["received_accuracy"])
    exact = result.state.models[0].vector
    assert not torch.equal(result.weights(0).vector, exact)
