"""Codecs, clocks and round policy through whole runs: known optima, hand-worked seconds."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import coterie
from coterie.channel import channel, timing
from coterie.channel.compression.coding import Coding, encode
from coterie.core.messages import Order
from coterie.core.tree import same
from coterie.data import ClientData, Population, Split
from coterie.engines import loop as loops
from coterie.engines.loop import Loop
from coterie.errors import ConfigError, TrainingError
from coterie.experiment import running
from coterie.experiment.experiment import ENGINES, execute
from coterie.experiment.stopping import Stop as Ending
from faulty import Faulty
from support import (
    ROWS,
    Constant,
    Stop,
    drive,
    experiment,
    models,
    on_quadratics,
    same_bits,
    stop_after,
)

# --- codecs --------------------------------------------------------------------------------------


class Rows(nn.Module):
    """A model whose answer to everything is its own vector."""

    def __init__(self, size):
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(size))

    def forward(self, x):
        return self.theta.expand(len(x), -1)


def squares(out, y):
    return ((out - y) ** 2).sum(1).mean()


def on_vectors(targets, **changes):
    """Each client has one target vector: a step with lr 0.1 goes 0.2 of the way there."""
    people = []
    for target in targets:
        split = Split(torch.zeros(1, 1), target[None])
        people.append(ClientData(split, split, split))
    size = len(targets[0])
    return experiment(
        coterie.fedavg(),
        Population(tuple(people), "table", (1,), None, size),
        model=lambda: Rows(size),
        criterion=squares,
        schedule={"batch_size": 10, "momentum": 0.0, **changes.pop("schedule", {})},
        settings=changes,
    )


def reached(made, folder, rounds):
    state, _, _ = drive(made, folder, rounds=rounds)
    return state.models[0].vector


@pytest.mark.parametrize("name", ["fedavg", "ifca", "fedper", "scaffold", "fedfomo"])
def test_compression_without_loss_changes_no_bit(name, tmp_path):
    found = []
    for text in ("raw", "raw+zstd", "topk:share=1"):
        made = experiment(ROWS[name](), settings={"wire": Coding(text, text)})
        state, channel, _ = drive(made, tmp_path / text)
        found.append((models(made, state, channel), channel.state.ledger.total))
    (plain, raw), (packed, zstd), (whole, _) = found
    assert same_bits(plain, packed)
    assert same_bits(plain, whole)
    assert raw != zstd


@pytest.mark.parametrize(
    ("text", "off"), [("fp16", 1e-3), ("bf16", 1e-2), ("qsgd:levels=32767", 2e-3)]
)
def test_fine_codecs_are_close_to_none(text, off, tmp_path):
    targets = [torch.linspace(-3, 3, 50), torch.linspace(1, 4, 50)]
    plain = reached(on_vectors(targets), tmp_path / "raw", 8)
    coded = reached(on_vectors(targets, wire=Coding(text, text)), tmp_path / "coded", 8)
    assert 0 < float((plain - coded).abs().max()) < off


def test_quantised_fedavg_is_right_in_the_mean(tmp_path):
    # 4000 equal coordinates are 4000 draws. Targets 1 and 5, so θ is 3·(1 − 0.8³) after 3 rounds.
    targets = [torch.full((4000,), 1.0), torch.full((4000,), 5.0)]
    coding = Coding("qsgd", "qsgd:levels=127")
    theta = reached(on_vectors(targets, wire=coding), tmp_path / "3", 3)
    error = float(theta.std()) / 4000**0.5
    assert float(theta.std()) > 0.1
    assert abs(float(theta.mean()) - 3 * (1 - 0.8**3)) < 5 * error
    theta = reached(on_vectors(targets, wire=coding), tmp_path / "40", 40)
    assert abs(float(theta.mean()) - 3 * (1 - 0.8**40)) < 5 * float(theta.std()) / 4000**0.5


def test_quantised_fedavg_reaches_the_optimum_on_which_clients_agree(tmp_path):
    target = torch.linspace(-2, 2, 60)
    made = on_vectors([target, target], wire=Coding("qsgd:bucket=4", "qsgd:bucket=4"))
    assert float((reached(made, tmp_path, 60) - target).abs().max()) < 1e-2


def test_topk_with_feedback_reaches_the_optimum_on_which_clients_agree(tmp_path):
    target = torch.linspace(-2, 2, 20)
    coding = Coding("topk:share=0.25", "topk:share=0.5")
    made = on_vectors([target, target], wire=coding, schedule={"lr": 0.05})
    assert float((reached(made, tmp_path, 90) - target).abs().max()) < 1e-2


def without_feedback(side, arrays, references, seed, whole, left=None):
    return encode(side, arrays, references, seed, whole)


def test_without_feedback_topk_would_not_get_there(tmp_path, monkeypatch):
    # Clients want (10, 1) and (−10, 1). What they do not agree on is larger and cancels out; only
    # what was left over lets the second number be sent at all.
    targets = [torch.tensor([10.0, 1.0]), torch.tensor([-10.0, 1.0])]
    made = on_vectors(targets, wire=Coding("topk:share=0.5"), schedule={"lr": 0.01})
    theta = reached(made, tmp_path / "with", 160)
    assert float(theta[0]) == 0.0
    assert abs(float(theta[1]) - 1) < 0.3
    monkeypatch.setattr("coterie.channel.compression.stage.encode", without_feedback)
    assert reached(made, tmp_path / "without", 30).tolist() == [0.0, 0.0]


# --- seconds by hand -----------------------------------------------------------------------------

# One full-batch epoch goes once through a client's samples: client c has c + 1 of them.
STEPS = [[1.0] * n for n in (1, 2, 3, 4)]
SLOW = {"name": "links", "rate_up": 100.0, "rate_down": 100.0, "samples_per_second": 1.0}


def timed(method, targets=None, **settings):
    return on_quadratics(method, targets or STEPS, settings={"rounds": 1, "clock": SLOW} | settings)


def lasted(event):
    return sum(event["clock"][k] for k in ("computation", "communication", "waiting"))


def test_a_round_over_links_by_hand():
    clock = {"name": "links", "rate_up": 1.0, "rate_down": 2.0, "latency": 0.5, "speed": 4.0}
    made = timed(coterie.fedavg(), rounds=2, clock=clock | {"samples_per_second": 10.0})
    history = execute(made).history
    total = 0.0
    for event in history:
        down, up = event["client_bytes"]["3"]  # the slowest: four samples, at ten a second, times 4
        told = event["clock"]
        assert told["computation"] == pytest.approx(0.1)
        assert told["communication"] == pytest.approx(1.0 + 8 * down / 2e6 + 8 * up / 1e6)
        assert told["waiting"] == 0
        total += lasted(event)
        assert told["total"] == pytest.approx(total)
    clock = history[-1]["clock"]
    assert clock["total_computation"] == pytest.approx(0.2)


def drawn_anew(made):
    """With a model that can be drawn again."""
    object.__setattr__(made, "model", lambda: Constant(float(torch.rand(1))))
    return made


@pytest.mark.parametrize(
    ("method", "streams"),
    [
        (coterie.fedavg(), 1),
        (coterie.ifca(k=3), 3),
        (coterie.user_centric(streams=2), 2),
        (coterie.user_centric(), 4),
    ],
)
def test_a_round_on_the_air_by_hand(method, streams):
    # T_dl·(m + ρN) on the channel, T_dl·(T_min + H_N/μ) at work; N = 4, H_4 = 25/12.
    clock = {"name": "wireless", "rho": 3.0, "t_dl": 2.0, "t_min": 0.5, "inverse_mu": 1.2}
    targets = [[1.0, 1.1], [2.0, 2.1], [30.0, 30.1], [40.0, 40.1]]
    result = execute(drawn_anew(timed(method, targets, clock=clock, rounds=2)))
    told = result.history[1]["clock"]  # in the first round all may still have the same model
    assert told["communication"] == pytest.approx(2 * (streams + 3 * 4))
    assert told["computation"] == pytest.approx(2 * (0.5 + 1.2 * 25 / 12))
    if method.name == "user-centric":  # it asked everybody for a gradient first
        assert result.begun["clock"]["communication"] == pytest.approx(2 * (1 + 3 * 4))


def test_who_learns_alone_takes_no_channel():
    clock = {"name": "wireless", "rho": 3.0, "t_min": 0.5, "inverse_mu": 0.0}
    told = execute(timed(coterie.local(), clock=clock)).history[0]["clock"]
    assert told["communication"] == 0
    assert told["computation"] == pytest.approx(0.5)


def test_who_learns_alone_sends_nothing_over_a_link_either():
    told = execute(timed(coterie.local(), clock=SLOW | {"latency": 0.5})).history[0]["clock"]
    assert told["communication"] == 0
    assert told["computation"] == pytest.approx(4.0)


# --- who is in time ------------------------------------------------------------------------------


def with_faults(monkeypatch, **faults):
    monkeypatch.setitem(ENGINES, "loop", lambda plan, _=None: Faulty(Loop(plan), **faults))


LOSSY = Coding("topk:share=0.5", "qsgd")


@pytest.mark.parametrize("name", ["ditto", "fedavg", "fedfomo"])
def test_the_first_reports_count_and_late_ones_are_as_if_lost(name, monkeypatch):
    method = {"fedfomo": lambda: coterie.fedfomo(m=1)}.get(name, ROWS[name])
    late = execute(
        timed(method(), cohort=2, over_selection=2.0, rounds=3, wire=LOSSY, evaluate_every=0)
    )
    for event in late.history:
        assert sorted(event["client_bytes"]) == ["0", "1"]
        assert event["cohort"] == [0, 1, 2, 3]
        assert (event["late"], event["lost"]) == (2, 0)
        passes = {"fedavg": 1, "ditto": 2}.get(name)  # the slower of the two has two samples
        assert passes is None or event["clock"]["computation"] == pytest.approx(2.0 * passes)
        assert event["wasted"]["up"] > 0
    with_faults(monkeypatch, lose_reply=lambda c, o: c > 1 and not o.startswith(("init", "final")))
    lost = execute(timed(method(), rounds=3, wire=LOSSY, clock={"name": "none"}))
    assert late.versions == lost.versions
    for client in range(4):
        assert same(late.weights(client), lost.weights(client))
    assert same(late.state.to_tree(), lost.state.to_tree())


def test_a_deadline_ends_the_round():
    told = execute(timed(coterie.fedavg(), deadline=2.5)).history[0]
    assert sorted(told["client_bytes"]) == ["0", "1"]
    assert told["late"] == 2
    assert lasted(told) == pytest.approx(2.5)
    assert told["clock"]["computation"] == pytest.approx(2.0)


def test_the_exchanges_of_a_round_share_its_deadline():
    # Clients of one and two samples, asked twice: the first time takes two seconds of 3.5.
    inner = coterie.fedavg()

    def twice(fed, state, info):
        return inner.round(fed, inner.round(fed, state, info), info)

    told = execute(timed(replace(inner, round=twice), STEPS[:2], deadline=3.5)).history[0]
    assert told["late"] == 1
    assert lasted(told) == pytest.approx(3.5)
    assert told["client_bytes"]["0"][1] > 1.5 * told["client_bytes"]["1"][1]


def unhurried_first(inner):
    """A round that begins with work for which no deadline runs."""

    def round(fed, state, info):
        fed.gather([replace(o, unhurried=True) for o in orders(state, info)])
        return inner.round(fed, state, info)

    def orders(state, info):
        return [Order(c, "train", inner.sends(state, c)) for c in info.cohort]

    return replace(inner, round=round)


def test_unhurried_work_is_waited_for_and_leaves_the_deadline_to_the_round():
    # It takes the slowest client four seconds; two of four are done in the 2.5 that follow.
    told = execute(timed(unhurried_first(coterie.fedavg()), deadline=2.5)).history[0]
    assert (told["late"], told["lost"]) == (2, 0)
    assert lasted(told) == pytest.approx(6.5, abs=1e-3)
    assert told["client_bytes"]["0"][1] > 1.5 * told["client_bytes"]["3"][1] > 0


def test_of_unhurried_work_not_only_the_first_reports_count():
    made = timed(unhurried_first(coterie.fedavg()), cohort=2, over_selection=2.0)
    told = execute(made).history[0]
    assert told["late"] == 2  # of the training only
    assert lasted(told) == pytest.approx(6.0, abs=1e-3)


@pytest.mark.parametrize("waits", [True, False])
def test_unhurried_work_is_no_part_of_a_real_deadline(waits, monkeypatch):
    now = [0.0]
    for module in (channel, timing, loops):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    inner = coterie.fedavg()
    first = unhurried_first(inner)

    def slow(client, arrays, config):
        now[0] += 4.0
        return inner.tasks["train"](client, arrays, config)

    def hurried(fed, state, info):
        return first.round(Hurrying(fed), state, info)

    made = replace(first, tasks={**inner.tasks, "train": slow})
    made = made if waits else replace(made, round=hurried)
    told = execute(timed(made, STEPS[:2], real_deadline=9.0)).history[0]
    assert ("abandoned" in told) == (not waits)


class Hurrying:
    """A federation in which every order is an ordinary one."""

    def __init__(self, fed):
        self.fed = fed

    def __getattr__(self, name):
        return getattr(self.fed, name)

    def gather(self, orders):
        return self.fed.gather([replace(o, unhurried=False) for o in orders])


def test_what_was_waited_for_before_is_no_part_of_the_deadline(tmp_path):
    on = trace(tmp_path, (0, 200, 900), (1, 100, 900))
    more = {"min_reports": 2, "selection": 50.0, "availability": on, "deadline": 1.5}
    told = execute(timed(coterie.fedavg(), [[1.0], [2.0]], **more)).history[0]
    assert told["late"] == 0
    assert lasted(told) == pytest.approx(251.0, abs=1e-3)
    assert told["clock"]["waiting"] == pytest.approx(250.0)


class Remembered(running.Channel):
    """A channel that can be looked at while the run goes on."""

    last = None

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        Remembered.last = self


def watched(made, monkeypatch, directory=None):
    """A run, and what the server knew of its clients after each round."""
    monkeypatch.setattr(running, "Channel", Remembered)
    known = []

    def watch(event):
        channel = Remembered.last
        known.append(
            (dict(channel.state.versions), {c: dict(h) for c, h in channel.state.held.items()})
        )

    return execute(made, directory, watch=watch), known


def test_an_abandoned_round_leaves_no_trace_and_the_run_goes_on(monkeypatch, tmp_path):
    # One client a round, which trains twice; clients 2 and 3 take longer than the deadline.
    made = timed(coterie.ditto(), rounds=8, cohort=1, deadline=4.5, wire=LOSSY)
    result, known = watched(made, monkeypatch)
    before = ({}, {})
    for event, now in zip(result.history, known, strict=True):
        (asked,) = event["cohort"]
        assert ("abandoned" in event) == (asked > 1)
        if asked > 1:
            assert now == before
            assert event["abandoned"] == "0 of 1 clients reported, 1 were late, but at least 1 must"
            assert event["bytes"] == {"down": 0, "up": 0}
            assert event["wasted"]["up"] > 0
            assert lasted(event) == pytest.approx(4.5)
        else:
            assert now != before
            assert event["received"]
        before = now
    slow = sum(e["cohort"][0] > 1 for e in result.history)
    assert result.summary["abandoned"] == slow
    assert 0 < slow < 8
    # The same rounds without those that came to nothing: models went the same way.
    with_faults(monkeypatch, lose_order=lambda c, o: c > 1)
    untimed = replace(made.settings, clock={"name": "none"}, deadline=None)
    plain = execute(replace(made, settings=untimed))
    for client in range(4):
        assert same(plain.weights(client), result.weights(client))


def test_too_few_reports_abandon_a_round_that_some_reported_in(monkeypatch):
    with pytest.raises(TrainingError, match="2 of 4 clients reported, 2 were late, but at least"):
        execute(timed(coterie.fedavg(), deadline=2.5, min_reports=3, abandoned=1))


def test_a_deadline_that_nobody_meets_is_said_and_what_was_saved_stays(tmp_path):
    made = timed(coterie.ditto(), rounds=9, deadline=0.5, abandoned=3)
    for done in (3, 4):  # resumed, it tries once more
        with pytest.raises(TrainingError, match=r"3 rounds in a row.*run\.deadline.*min_reports"):
            execute(made, tmp_path / "run", resume=done > 3)
        saved = sorted(p.name for p in (tmp_path / "run" / "checkpoints").glob("*.json"))
        assert saved[-1] == f"round-{done:06d}.json"
        lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
        assert len(lines) == done


# --- who is there --------------------------------------------------------------------------------


def trace(folder, *stretches):
    path = folder / "on.csv"
    lines = ["client,start,end", *(",".join(map(str, s)) for s in stretches)]
    path.write_text("\n".join(lines) + "\n")
    return {"name": "trace", "file": str(path)}


def test_who_goes_is_late_and_who_is_off_gets_nothing(tmp_path):
    # Client 1 needs two seconds and leaves after one and a half; client 2 comes when all is over.
    on = trace(tmp_path, (0, 0, 900), (1, 0, 1.5), (1, 800, 900), (2, 500, 900))
    targets = STEPS[:3]
    made = timed(coterie.fedavg(), targets, rounds=3, availability=on, wire=LOSSY)
    result = execute(made, tmp_path / "whole")
    first, second, third = result.history
    assert [e["cohort"] for e in result.history] == [[0, 1], [0, 1], [0]]  # chosen a round before
    assert [sorted(e["client_bytes"]) for e in result.history] == [["0"]] * 3
    assert (first["late"], first["lost"]) == (1, 0)
    assert first["wasted"]["up"] > 0
    assert lasted(first) == pytest.approx(1.5)
    assert (second["late"], second["lost"]) == (0, 1)
    assert second["wasted"] == {"down": 0, "up": 0}
    assert lasted(second) == pytest.approx(1.0, abs=1e-3)
    assert third["lost"] == 0
    assert set(result.versions) == {0}
    # Who was chosen during the first round is asked in the second, though the server was gone.
    with pytest.raises(Stop):
        execute(made, tmp_path / "run", watch=stop_after(1))
    resumed = execute(made, tmp_path / "run", resume=True)
    assert [e["cohort"] for e in resumed.history] == [[0, 1], [0, 1], [0]]
    assert [e["clock"] for e in resumed.history] == [e["clock"] for e in result.history]


def test_a_round_waits_until_enough_are_on(tmp_path):
    on = trace(tmp_path, (0, 100, 900), (1, 200, 900), (2, 300, 900))
    made = timed(coterie.fedavg(), STEPS[:3], availability=on, cohort=2, min_reports=2)
    told = execute(made).history[0]
    assert told["cohort"] == [0, 1]
    assert told["clock"]["waiting"] == pytest.approx(200.0)
    assert told["clock"]["computation"] == pytest.approx(2.0)


def test_selecting_passes_behind_the_round_before():
    history = execute(timed(coterie.fedavg(), rounds=3, selection=7.0)).history
    # The first is not hidden at all, then four seconds are, and what was waited for is, too.
    waits = [e["clock"]["waiting"] for e in history]
    assert waits[0] == pytest.approx(7.0)
    assert waits[1] == 0.0
    assert waits[2] == pytest.approx(3.0, abs=1e-3)


# --- all of it together --------------------------------------------------------------------------

ALL = {
    "rounds": 7,
    "cohort": 2,
    "over_selection": 1.5,
    "min_reports": 2,
    "wire": Coding("topk:share=0.3", "qsgd", {"head": "qsgd"}, {"head": "topk:share=0.5"}),
    "clock": {"name": "links", "rate_up": [0.001, 0.02], "speed": [0.1, 1.0]},
    "availability": {"name": "diurnal", "day": 200.0, "slot": 10.0, "low": 0.5, "high": 0.95},
    "checkpoint_every": 2,
}


def without_seconds(history):
    return [{k: v for k, v in event.items() if k != "seconds"} for event in history]


@pytest.mark.parametrize("name", ["fedper", "fedtsdp"])
def test_stopped_and_resumed_and_on_the_pool_all_is_the_same(name, tmp_path):
    made = experiment(ROWS[name](), settings=ALL)
    whole = execute(made, tmp_path / "whole")
    told = whole.summary
    assert told["late"] > 0
    assert told["clock"]["total"] > 0
    with pytest.raises(Stop):
        execute(made, tmp_path / "parts", watch=stop_after(3))
    pooled = replace(made, settings=replace(made.settings, engine="pool", workers=2))
    resumed = execute(made, tmp_path / "parts", resume=True)
    for other in (resumed, execute(pooled, tmp_path / "pool")):
        assert without_seconds(other.history) == without_seconds(whole.history)
        assert other.clients == whole.clients
        assert other.versions == whole.versions
        assert other.summary["clock"] == told["clock"]
        assert other.summary["bytes"]["kinds"] == told["bytes"]["kinds"]
        for client in range(6):
            assert same(other.weights(client), whole.weights(client))


# --- what a reader found --------------------------------------------------------------------------


def test_a_target_is_reached_by_the_score_that_counts():
    tree = {
        "data": {"clients": 4, "samples": 300},
        "method": {"name": "per-fedavg", "beta": 0.1},
        "run": {"rounds": 2, "engine": "loop"},
        "evaluation": {"target": 0.05},
    }
    result = coterie.run(tree)
    first = next(e["round"] for e in result.history if e["adapted"]["accuracy"] >= 0.05)
    assert result.summary["to_target"]["round"] == first


def test_a_budget_that_set_up_has_used_up_leaves_no_round(tmp_path):
    made = experiment(coterie.fedclust(clusters=2, warmup_epochs=1), settings={"rounds": 3})
    cost = execute(made).begun["bytes"]
    whole = sum(cost.values())
    for budget, rounds in ((whole - 1, 0), (whole, 0), (whole + 1, 1)):
        stop = Ending(bytes=float(budget))
        kept = replace(made, settings=replace(made.settings, stop=stop))
        assert execute(kept).summary["rounds"] == rounds


def test_uneven_clients_do_not_make_adaptive_tau_exceed_its_budget():
    tree = {
        "data": {"clients": 8, "samples": 800},
        "model": {"name": "logistic"},
        "method": {"name": "adaptive-tau", "sample": 8},
        "clock": {"name": "links", "rate_up": 20.0, "rate_down": 20.0, "speed": [0.05, 1.0],
                  "samples_per_second": 300.0},
        "run": {"rounds": 200, "engine": "loop", "cohort": 2},
        "evaluation": {"every": 0, "adapt_epochs": 0},
        "stop": {"seconds": 60.0},
    }  # fmt: skip
    for seed in range(3):
        result = coterie.run({**tree, "run": {**tree["run"], "seed": seed}})
        assert 20.0 < result.summary["clock"]["total"] <= 60.0
        assert "60 s" in result.summary["stopped"]


def test_what_is_scored_after_the_last_round_is_what_the_summary_says():
    made = experiment(
        coterie.fedavg(), settings={"wire": Coding(down="qsgd:levels=1"), "cohort": 3}
    )
    result = execute(made)
    assert result.history[-1]["received"] == result.summary["received"]


@pytest.mark.parametrize(("up", "layers"), [("raw", "raw+zstd"), ("qsgd", "raw+zstd")])
def test_an_exact_codec_of_one_layer_is_used_for_that_layer(up, layers):
    def sent(coding):
        flat = experiment(coterie.fedavg(), model=lambda: Flat(), settings={"wire": coding})
        found = execute(flat)
        return found.summary["bytes"]["kinds"]["model/big"]["up"], found.weights(0).vector

    plain, expected = sent(Coding(up=up, layers={"big": "raw"}))
    packed, same = sent(Coding(up=up, layers={"big": layers}))
    assert packed < plain / 2  # it holds zeros that nothing trains
    assert torch.equal(expected, same)


class Flat(torch.nn.Module):
    """A small layer that learns and a large one of zeros."""

    def __init__(self):
        super().__init__()
        self.small = torch.nn.Linear(64, 10)
        self.big = torch.nn.Linear(500, 10)
        torch.nn.init.zeros_(self.big.weight)

    def forward(self, x):
        return self.small(x.flatten(1)) + 0 * self.big.bias


def test_damaged_replies_waste_the_bytes_that_came():
    made = experiment(coterie.fedavg(), settings={"rounds": 1})
    ENGINES["damaging"] = lambda plan, workers: Faulty(Loop(plan), damage=lambda c, o: c == 0)
    try:
        whole = execute(made)
        broken = execute(replace(made, settings=replace(made.settings, engine="damaging")))
    finally:
        del ENGINES["damaging"]
    moved = whole.history[0]["client_bytes"]["0"]
    assert broken.history[0]["lost"] == 1
    assert broken.history[0]["wasted"] == {"down": moved[0], "up": moved[1]}


def test_gradients_of_adaptive_tau_are_exact_under_lossy_codecs(tmp_path):
    made = experiment(
        coterie.adaptive_tau(sample=8), settings={"wire": Coding(up="topk:share=0.01")}
    )
    _, channel, _ = drive(made, tmp_path, rounds=2)
    weights = channel.wire.layout.trainable
    assert channel.state.ledger.kinds["tau.gradient"].up == 2 * 6 * 4 * weights


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"min_reports": 2.5}, "whole number"),
        ({"cohort": 2.5}, "whole number"),
        ({"target": 80.0}, "0.8 for 80"),
        ({"stop": {"target": 90.0}}, "0.8 for 80"),
        ({"stop": {"target": 0.9}, "evaluate_every": 0}, "evaluation.every"),
        ({"clock": "links"}, "must be a dict"),
    ],
)
def test_what_cannot_be_meant_is_refused(settings, words):
    people = [(torch.randn(20, 3), torch.randint(0, 2, (20,))) for _ in range(4)]
    with pytest.raises(ConfigError, match=words):
        coterie.simulate(people, "logistic", rounds=1, engine="loop", **settings)


def test_a_preset_works_from_python():
    people = [(torch.randn(30, 3), torch.randint(0, 2, (30,))) for _ in range(4)]
    result = coterie.simulate(people, "logistic", "fedpaq", rounds=1, engine="loop")
    assert len(result.history[0]["cohort"]) == 2
    assert result.plan.coding.up == "qsgd"
