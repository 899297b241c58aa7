"""Malicious clients, through the messages that they send: what becomes of a poisoned update."""

import json
import tomllib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import coterie
from coterie.channel.channel import Channel
from coterie.channel.outliers import BOUND
from coterie.channel.privacy.settings import Privacy
from coterie.channel.tasks import SCORE
from coterie.channel.wire import Wire
from coterie.core.messages import Order
from coterie.core.method import Round
from coterie.core.weights import Weights
from coterie.engines.loop import Loop
from coterie.errors import ConfigError, TrainingError
from coterie.experiment import experiment as running
from coterie.experiment.experiment import execute
from coterie.experiment.privacy import Guard
from faulty import Faulty
from guarded import SECURE, uneven
from support import ROWS, digits, drive, experiment, models, same_bits

NAN, INF = float("nan"), float("inf")
PEOPLE = digits(samples=180)
UNEVEN = uneven()  # whose updates differ in length by more than clipping would allow
BAD = 2  # the client that does not follow the rules


class Malicious(Loop):
    """Some clients send, in place of their model, what ``lie`` makes of it."""

    def __init__(self, plan, lie, who=(BAD,)):
        super().__init__(plan)
        self.lie, self.who, self.wire = lie, who, Wire(plan.start.layout)

    def exchange(self, requests, until=None):
        tasks = {r.client: json.loads(r.message.header)["body"]["task"] for r in requests}
        for client, message in super().exchange(requests, until):
            if client in self.who and message is not None and tasks[client][0] != "$":
                told = self.wire.unpack(message)
                for name, array in told.get("arrays", {}).items():
                    if isinstance(array, Weights):
                        told["arrays"][name] = Weights(array.layout, self.lie(array.vector))
                message = replace(self.wire.pack(told), work=message.work)
            yield client, message


def constant(value):
    return lambda vector: torch.full_like(vector, value)


def with_lie(lie, who=(BAD,)):
    return lambda plan: Malicious(plan, lie, who)


def lost(plan):
    """The same client's replies get lost, whenever a method asks it for anything."""
    tasks = []

    class Asked(Faulty):
        def exchange(self, requests, until=None):
            tasks.append(json.loads(requests[0].message.header)["body"]["task"])
            return super().exchange(requests, until)

    return Asked(Loop(plan), lose_reply=lambda c, order: c == BAD and tasks[-1] not in SILENT)


SILENT = (SCORE, "$fetch")


def outcome(made, folder, engine=None):
    """A run by hand: each client's model, the server's state, what the channel knows of them."""
    state, channel, _ = drive(made, folder, engine)
    kept, rejected = dict(channel.state.versions), dict(channel.phase.rejected)  # of the last round
    found = models(made, state, channel)
    return SimpleNamespace(models=found, state=state, channel=channel, kept=kept, rejected=rejected)


# --- "reject", the default -----------------------------------------------------------------------


@pytest.mark.parametrize("value", [1e30, -1e30, NAN, INF])
@pytest.mark.parametrize("name", ["fedavg", "ditto", "scaffold", "feddyn", "ifca", "fedper"])
def test_a_rejected_reply_is_a_lost_reply(name, value, tmp_path):
    """To the bit, in every client's model; and the state of the client is not committed."""
    made = experiment(ROWS[name](), PEOPLE)
    bad = outcome(made, tmp_path / "bad", with_lie(constant(value)))
    gone = outcome(made, tmp_path / "gone", lost)
    assert same_bits(bad.models, gone.models)
    assert bad.kept == gone.kept
    assert BAD not in bad.kept
    assert bad.channel.state.ledger.lost == gone.channel.state.ledger.lost == 3


@pytest.mark.parametrize("outliers", ["reject", "clip"])
@pytest.mark.parametrize("value", [1e30, -1e30, 1e5])
def test_a_number_by_which_a_model_is_multiplied_is_a_part_of_the_update(value, outliers, tmp_path):
    """FedNova's clients send a direction, and how far they went: either can be far too long."""

    def train(client, arrays, config):
        upload = honest.tasks["train"](client, arrays, config)
        told = {"length": torch.tensor([value])} if client.id == BAD else {}
        return replace(upload, arrays={**upload.arrays, **told})

    honest = coterie.fednova()
    settings = {"rounds": 1, "outliers": outliers}
    made, bad = (
        experiment(method, PEOPLE, settings=settings)
        for method in (honest, replace(honest, tasks={"train": train}))
    )
    plain, found = outcome(made, tmp_path / "plain"), outcome(bad, tmp_path / "bad")
    assert list(found.rejected) == ([BAD] if outliers == "reject" else [])
    start = made.plan(tmp_path / "start").start.vector
    moved = [(one.state.models[0].vector - start).norm() for one in (plain, found)]
    assert moved[1] < 2 * moved[0]


def test_it_is_named_in_the_events_and_at_the_end(tmp_path, monkeypatch):
    said = []
    made = experiment(coterie.fedavg(), PEOPLE, settings={"rounds": 2})
    monkeypatch.setitem(running.ENGINES, "loop", lambda plan, _: with_lie(constant(1e30))(plan))
    result = execute(made, tmp_path / "run", say=said.append)
    events = [json.loads(x) for x in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    told = [e["rejected"] for e in events if "rejected" in e]
    assert [list(each) for each in told] == [[str(BAD)]] * 2
    assert "its 'model' is a change of length" in told[0][str(BAD)]
    (warning,) = result.summary["warnings"]
    assert warning.startswith(f"client {BAD} was left out of round 1: its 'model' is a change")
    assert said == [f"warning: {warning}"]
    assert [e["lost"] for e in result.history] == [1, 1]


def test_one_that_cannot_be_scored_has_no_score_and_is_named():
    """Its data make training diverge: when the closing scores let it adapt, the run is not lost."""
    random = torch.Generator().manual_seed(2)
    people = [(torch.randn(40, 3, generator=random), torch.arange(40) % 2) for _ in range(4)]
    population = coterie.data.from_clients(people)
    population.clients[BAD].train.x.mul_(1e30)
    settings = {"engine": "loop", "cohort": 1, "seed": 1, "adapt_epochs": 3}
    result = coterie.simulate(population, "logistic", "fedavg", 2, **settings)
    assert BAD not in [c for e in result.history for c in e["cohort"]]
    assert [c for c, row in enumerate(result.clients) if row["adapted_accuracy"] == ""] == [BAD]
    (warning,) = result.summary["warnings"]
    assert warning.startswith(f"client {BAD} was left out of the closing scores")


def test_what_the_server_was_sent_is_noted_though_it_was_not_used(tmp_path):
    bad = outcome(
        experiment(coterie.fedavg(), PEOPLE), tmp_path, with_lie(constant(1e30))
    ).channel.state.exposure
    assert {row["client"] for row in bad.rows()} == set(range(6))


def test_without_the_check_it_is_averaged_in(tmp_path):
    made = experiment(coterie.fedavg(), PEOPLE, settings={"outliers": "off", "rounds": 1})
    bad = outcome(made, tmp_path, with_lie(constant(1e30)))
    assert bad.rejected == {}
    assert float(bad.state.models[0].vector.abs().max()) > 1e28


def test_an_update_of_ordinary_length_is_taken_whatever_its_direction(tmp_path):
    """No promise: a length says nothing about a direction."""
    made = experiment(coterie.fedavg(), PEOPLE, settings={"rounds": 1})
    start = made.plan(tmp_path / "start").start.vector
    bad = outcome(made, tmp_path / "bad", with_lie(lambda v: 2 * start - v))
    assert bad.rejected == {}
    assert bad.channel.state.ledger.lost == 0


@pytest.mark.parametrize("value", [1e30, NAN])
def test_in_a_real_federation_it_is_a_lost_reply_too(value, tmp_path):
    """A member's message is changed on its way out; to the bit as if it had been lost."""
    pytest.importorskip("flwr", reason="a real federation needs the extra 'flower'")
    from coterie.engines.flower.messages import Digests, opened, sealed
    from faked_grid import Federation, tree

    def put(post, content):
        if (post.client, post.order) != (BAD, "2.0"):
            return content
        packet = opened(content, {})[0]
        sizes = [len(payload) // 4 for payload in packet.message.payloads]
        poison = tuple(np.full(size, value, "<f4").tobytes() for size in sizes)
        message = replace(packet.message, payloads=poison)
        return sealed(replace(packet, message=message), Digests())

    asked = tree(5, data={"samples": 150}, method={"name": "ditto"})
    bad, gone = Federation(tmp_path / "bad", asked), Federation(tmp_path / "gone", asked)
    bad.grid.change = put
    gone.grid.faults[BAD, "2.0"] = "lose"
    results = [bad.serve(), gone.serve()]
    assert [list(e.get("rejected", {})) for e in results[0].history] == [[], [str(BAD)], []]
    assert [e["lost"] for e in results[0].history] == [0, 1, 0]
    assert results[0].versions == results[1].versions
    for client in range(5):
        mine, other = bad.model(client), gone.model(client)
        assert all(torch.equal(mine[name], other[name]) for name in other)


# --- honest clients ------------------------------------------------------------------------------

HONEST = ("fedavg", "ifca", "scaffold", "feddyn", "ditto", "fednova", "fedfomo", "user-centric all",
          "cfl", "fedclust", "fedper", "k-fed", "pacfl", "median", "fedavg layer-wise")  # fmt: skip


@pytest.mark.parametrize("name", HONEST)
def test_runs_without_outliers_keep_their_bits(name, tmp_path):
    found = {}
    for outliers in ("reject", "off"):
        settings = {"outliers": outliers, "cohort": 0.7}
        made = experiment(ROWS[name](), UNEVEN, settings=settings)
        found[outliers] = outcome(made, tmp_path / outliers)
    reject, off = found["reject"], found["off"]
    assert same_bits(reject.models, off.models)
    assert reject.kept == off.kept
    assert reject.channel.state.ledger.to_tree() == off.channel.state.ledger.to_tree()
    assert reject.rejected == {}


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "feddyn", "ifca", "fednova"])
def test_clients_of_25_and_of_5000_samples_go_together(name):
    """The large one makes 157 steps, the others one: its update is longer by two orders."""
    random = torch.Generator().manual_seed(3)
    people = []
    for count in (*[32] * 6, 6250):  # of which a fifth is test data
        x = torch.randn(count, 8, generator=random)
        people.append((x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()))
    momentum = 0.0 if name == "scaffold" else 0.9
    result = coterie.simulate(
        people, "logistic", ROWS[name](), 3, engine="loop", momentum=momentum, val_fraction=0.0
    )
    assert not [e for e in result.history if "rejected" in e]


# --- an honest client is not blamed for a poisoned model -----------------------------------------


def test_a_model_that_was_poisoned_is_at_fault_and_not_those_who_train_it(tmp_path, monkeypatch):
    monkeypatch.setitem(
        running.ENGINES, "loop", lambda plan, _: with_lie(lambda v: 1e30 * v.sign())(plan)
    )
    made = experiment(coterie.fedavg(), PEOPLE, settings={"outliers": "off", "evaluate_every": 0})
    with pytest.raises(TrainingError) as told:
        execute(made, tmp_path / "run")
    assert str(told.value).startswith("round 2: the updates of 6 of 6 clients cannot be used")
    assert "No client is to blame" in str(told.value)
    assert "the model that they were sent, as round 1 left it" in str(told.value)


def test_nor_is_one_whose_group_was_sent_a_model_that_is_not_finite(tmp_path):
    """In a real federation the others go on, and the words are not about the client."""
    made = experiment(coterie.fedavg(), PEOPLE)
    plan = made.plan(tmp_path)
    samples = {c: len(d.train) for c, d in enumerate(PEOPLE.clients)}
    channel = Channel(
        Loop(plan), Wire(plan.start.layout), terms=made.terms(plan.start), samples=samples
    )
    channel.begin(4)
    sent = {c: plan.start * (NAN if c == 5 else 1.0) for c in range(6)}
    replies = channel.gather([Order(c, "train", {"0": model}) for c, model in sent.items()])
    assert [r.client for r in replies] == [0, 1, 2, 3, 4]
    assert (
        "It is not to blame: the '0' that was sent to client 5 is not finite"
        in channel.phase.rejected[5]
    )


def test_one_that_diverges_alone_is_named_and_the_round_goes_on(tmp_path):
    made = experiment(coterie.fedavg(), PEOPLE)
    bad = outcome(made, tmp_path, with_lie(constant(NAN)))
    assert list(bad.rejected) == [BAD]
    assert "is no longer finite" in bad.rejected[BAD]
    assert "to blame" not in bad.rejected[BAD]


# --- "clip" --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1e30, -1e30])
def test_clipped_no_update_moves_the_mean_further_than_a_multiple_of_the_median(value, tmp_path):
    made = experiment(coterie.fedavg(), PEOPLE, settings={"outliers": "clip", "rounds": 1})
    plan = made.plan(tmp_path)
    start = plan.start
    channel = Channel(Malicious(plan, constant(value)), Wire(start.layout), terms=made.terms(start))
    channel.begin(0)
    replies = channel.gather([Order(c, "train", {"0": start}) for c in range(6)])
    lengths = {r.client: (r.arrays["model"] - start).norm() for r in replies}
    middle = float(np.median([n for c, n in lengths.items() if c != BAD]))
    assert 0 < lengths[BAD] <= 1.5 * BOUND * middle
    assert lengths[BAD] == max(lengths.values())
    assert channel.phase.rejected == {}


def test_clipped_what_is_not_finite_is_left_out(tmp_path):
    made = experiment(coterie.fedavg(), PEOPLE, settings={"outliers": "clip"})
    bad = outcome(made, tmp_path, with_lie(constant(INF)))
    assert bad.channel.state.ledger.lost == 3
    assert all(torch.isfinite(m).all() for m in bad.models)


@pytest.mark.parametrize(
    ("name", "privacy", "told"),
    [
        ("scaffold", {}, "method scaffold keeps its correction at the mean of its clients'"),
        ("scaffold n", {}, "method scaffold keeps"),
        ("feddyn", {}, "method feddyn keeps its correction"),
        ("adaptive-tau", {}, "needs plain means of gradients"),
        ("fedavg", {"noise": 1.0}, "each client decides about the others'"),
        ("fedavg", {"epsilon": 8.0}, "each client decides about the others'"),
        ("fedavg", {"noise": 1.0, "mechanism": "local"}, "each client decides"),
        ("fedavg", {"epsilon": 0.5, "mechanism": "nbafl"}, "each client decides"),
        ("fedavg", {"secure": True}, "under --secure the server sees none"),
    ],
)
def test_clipping_is_refused_where_it_would_be_wrong(name, privacy, told, tmp_path):
    for outliers in ("reject", "off", "clip"):
        settings = {"outliers": outliers, "privacy": Privacy(**privacy)}
        made = experiment(ROWS[name](), PEOPLE, settings=settings)
        if outliers != "clip":
            made.plan(tmp_path)
            continue
        with pytest.raises(ConfigError, match=r"run\.outliers = 'clip' shortens") as refused:
            made.plan(tmp_path)
        assert told in str(refused.value)
        assert "Take run.outliers = reject" in str(refused.value)


# --- noise ---------------------------------------------------------------------------------------


def noised(made, folder, engine=Loop):
    """The model after two rounds with noise, and the channel."""
    plan = made.plan(folder)
    plan.roster.prepare()
    channel = Channel(engine(plan), Wire(plan.start.layout), terms=made.terms(plan.start))
    guard = Guard(plan, made.settings.policy, made.members, made.settings.rounds)
    fed = guard.around(channel)
    state = made.method.init(fed, made.setup(plan.start))
    for number in range(2):
        channel.begin(number, "", made.members, 6, made.settings.min_reports)
        guard.begin(state.models)
        state = made.method.round(fed, state, Round(number, made.members))
    return state.models[0].vector, channel


def central(**settings):
    privacy = Privacy(noise=1.0, clip=0.5, **settings.pop("privacy", {}))
    settings = {"privacy": privacy, "sampling": "fixed", "rounds": 2, **settings}
    return experiment(coterie.fedavg(), PEOPLE, settings=settings)


@pytest.mark.parametrize("secure", [False, True])
def test_under_noise_what_is_not_finite_counts_as_no_change(secure, tmp_path):
    """With the denominator as it is: to the bit as if that client had sent what it was sent."""
    made = central(privacy={"secure": secure})

    def sick(client, arrays, config, task=made.method.tasks["train"]):
        upload = task(client, arrays, config)
        if client.id != BAD:
            return upload
        model = (
            upload.arrays["model"] * NAN
            if spoil
            else arrays["0"].part(upload.arrays["model"].layout)
        )
        return replace(upload, arrays={"model": model})

    method = replace(made.method, tasks={**made.method.tasks, "train": sick})
    made, found = replace(made, method=method), []
    for spoil in (True, False):
        vector, channel = noised(made, tmp_path / str(spoil))
        found.append(vector)
        assert list(channel.phase.rejected) == [BAD] * spoil
    if not secure:  # there, shares of the noise of five are not those of six
        assert torch.equal(*found)
    assert torch.isfinite(found[0]).all()


def test_under_noise_the_length_of_others_decides_about_nobody(tmp_path):
    """What is finite is clipped to a bound that does not depend on the cohort."""
    _, channel = noised(central(), tmp_path, with_lie(constant(1e30)))
    assert channel.phase.rejected == {}
    assert channel.state.ledger.lost == 0


@pytest.mark.parametrize("least", [1, 6])
def test_under_noise_even_most_of_the_cohort_decides_about_nothing(least, tmp_path):
    """Neither that the run ends nor that the round is abandoned."""
    vector, channel = noised(
        central(min_reports=least), tmp_path, with_lie(constant(NAN), range(5))
    )
    assert sorted(channel.phase.rejected) == [0, 1, 2, 3, 4]
    assert not any("to blame" in why for why in channel.phase.rejected.values())
    assert torch.isfinite(vector).all()


def test_under_local_noise_an_answer_that_is_not_finite_is_lost(tmp_path):
    made = central(privacy={"mechanism": "local"})
    vector, channel = noised(made, tmp_path, with_lie(constant(NAN)))
    assert list(channel.phase.rejected) == [BAD]
    assert torch.isfinite(vector).all()


# --- secure sums ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "step"), [(NAN, "1.0"), (INF, "1.0"), (1e30, "1.2")])
def test_under_secure_sums_a_client_itself_sends_nothing_that_is_not_finite(value, step, tmp_path):
    """It is a lost reply: in no sum, and its state is not committed."""
    made = experiment(coterie.ditto(), PEOPLE, settings={"privacy": SECURE, "rounds": 1})

    def sick(client, arrays, config, task=made.method.tasks["train"]):
        upload = task(client, arrays, config)
        model = upload.arrays["model"]
        wrong = Weights(model.layout, torch.full_like(model.vector, value))
        return replace(upload, arrays={"model": wrong}) if client.id == BAD else upload

    method = replace(made.method, tasks={**made.method.tasks, "train": sick})
    result = execute(replace(made, method=method), tmp_path / "bad")
    assert list(result.history[0]["rejected"]) == [str(BAD)]
    assert result.history[0]["lost"] == 1
    assert BAD not in result.versions

    class Losing(Faulty):
        def __init__(self, plan):
            super().__init__(Loop(plan), lose_reply=lambda c, order: (c, order) == (BAD, step))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(running.ENGINES, "loop", lambda plan, _: Losing(plan))
        gone = execute(made, tmp_path / "gone")
    assert torch.equal(result.state.models[0].vector, gone.state.models[0].vector)
    assert result.versions == gone.versions


# --- the key -------------------------------------------------------------------------------------


def test_the_key_is_recorded_and_has_one_default(tmp_path):
    from coterie.experiment.config import experiment_of, parse

    tree = {"data": {"clients": 4, "samples": 100}, "run": {"rounds": 1, "engine": "loop"}}
    for folder, more, wanted in (("a", {}, "reject"), ("b", {"outliers": "off"}, "off")):
        made = {**tree, "run": {**tree["run"], **more}}
        assert experiment_of(parse(made)).settings.outliers == wanted
        coterie.run(made, tmp_path / folder)
        assert (
            tomllib.loads((tmp_path / folder / "config.toml").read_text())["run"]["outliers"]
            == wanted
        )
    with pytest.raises(ConfigError, match=r"unknown run\.outliers 'rejekt'; did you mean 'reject'"):
        coterie.run({"run": {"outliers": "rejekt"}})


def test_a_run_does_not_change_it_under_way():
    names = set()
    for outliers in ("reject", "clip", "off"):
        made = experiment(coterie.fedavg(), PEOPLE, settings={"outliers": outliers})
        names.add(made.fingerprint(made.plan(None).start))
    assert len(names) == 3
