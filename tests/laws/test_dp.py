"""Client-level privacy, local noise and NbAFL in rounds: what is bounded, noised and accounted."""

import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import coterie
from coterie import Method, Order, State, Upload, Weights
from coterie.channel.channel import Channel
from coterie.channel.policy import Policy, select
from coterie.channel.privacy import central_noise as dp
from coterie.channel.privacy import client_noise as client_side
from coterie.channel.privacy import local_noise as local
from coterie.channel.privacy.accounting import Mechanism, Sampling, epsilon, gaussian_epsilon
from coterie.channel.privacy.noise import split_noise
from coterie.channel.privacy.settings import Privacy
from coterie.channel.wire import Wire
from coterie.core.method import Round
from coterie.engines.loop import Loop
from coterie.errors import ConfigError
from coterie.experiment import experiment as running
from coterie.experiment.config import experiment_of, parse
from coterie.experiment.experiment import cohort, execute, with_settings
from coterie.experiment.privacy import Guard
from faulty import Faulty
from scripted import Spy
from support import (
    ROWS,
    SCHEDULES,
    Stop,
    digits,
    drive,
    experiment,
    on_quadratics,
    same_bits,
    stop_after,
)

TINY = 1e-6  # noise that changes no result by more than some steps of the grid
GRID = 2.0**-24
PEOPLE = digits(samples=180)


# --- rounds by hand, through the channel as a run has it ------------------------------------------


def opened(made, folder, engine=Loop):
    """The federation that a method of this experiment would have, and what is behind it."""
    plan = made.plan(folder)
    plan.roster.prepare()
    terms = made.terms(plan.start)
    channel = Channel(
        engine(plan), Wire(plan.start.layout, terms.coding.downwards.plain), terms=terms
    )
    guard = Guard(plan, made.settings.policy, made.members, made.settings.rounds)
    return SimpleNamespace(
        fed=guard.around(channel), guard=guard, channel=channel, plan=plan, made=made
    )


def begin(on, state=None, number=0):
    """Begin a round; its cohort."""
    people = cohort(on.made.settings, number, on.made.members)
    on.channel.begin(number, "", people, len(people), 1)
    on.guard.begin({0: on.plan.start} if state is None else state.models)
    return people


def played(made, folder, rounds=1, engine=Loop):
    """The state after each of some rounds, the first before any; and what made them."""
    on = opened(made, folder, engine)
    on.channel.begin(0, stage="init")
    states = [made.method.init(on.fed, made.setup(on.plan.start))]
    for number in range(rounds):
        info = Round(number, begin(on, states[-1], number), made.public)
        states.append(made.method.round(on.fed, states[-1], info))
    return states, on


def central(**privacy):
    return {"privacy": Privacy(**{"noise": TINY, **privacy})}


def theta(state, slot=0):
    return float(state.models[slot].vector[0])


class Still(nn.Module):
    """Many parameters, of which one answers; with a tiny step nothing moves."""

    def __init__(self, size=4000, value=0.0):
        super().__init__()
        self.theta = nn.Parameter(torch.full((size,), value))

    def forward(self, x):
        return self.theta[:1].expand(len(x))


def still(method, clients, size=4000, value=0.0, **settings):
    made = on_quadratics(method, [[1.0]] * clients, schedule={"lr": 1e-30}, settings=settings)
    return replace(made, model=lambda: Still(size, value))


def spread(values, expected, tail=1e-7):
    """Whether so many Gaussian numbers have this standard deviation, by their sum of squares."""
    values = np.asarray(values, np.float64).ravel()
    low, high = stats.chi2.ppf([tail, 1 - tail], len(values))
    return low < float((values**2).sum()) / expected**2 < high


def moved(states, slot=0):
    """Each round's change of a model."""
    vectors = [s.models[slot].vector.double().numpy() for s in states]
    return [b - a for a, b in pairwise(vectors)]


def spoken(*arrays):
    """A method whose clients change what they receive by their own number, in each array."""

    def train(client, received, config):
        number = float(client.train.y.mean())
        sent = {"model": Weights(received["model"].layout, received["model"].vector + number)}
        sent |= {a: received[a] + 2 * number for a in arrays}
        return Upload(sent, {"loss": number, "slot": float(number > 0)}, {n: n for n in sent})

    def ask(state, cohort):
        sent = {"model": state.models[0], **{a: state.memory[a] for a in arrays}}
        return [Order(c, "train", sent) for c in cohort]

    def round(fed, state, info):
        mean = fed.reduce(ask(state, info.cohort), {c: {0: 1.0} for c in info.cohort})[0]
        memory = {a: mean.arrays[a] for a in arrays}
        return State({0: mean.arrays["model"]}, state.groups, memory)

    return Method(
        name="spoken",
        init=lambda fed, setup: State(
            {0: setup.start}, dict.fromkeys(setup.clients, 0), {a: torch.zeros(3) for a in arrays}
        ),
        round=round,
        sends=lambda state, client: {"model": state.models[0]},
        tasks={"train": train},
        assemble=lambda client, received: received["model"],
    )


# --- 1: without clipping and noise it is FedAvg; clipped, it is what the hand works out ----------


@pytest.mark.parametrize("secure", [False, True])
def test_with_no_clipping_and_hardly_any_noise_it_is_fedavg(tmp_path, secure):
    people = digits()
    assert len({len(c.train) for c in people.clients}) == 1
    made = experiment(
        coterie.fedavg(), people, settings=central(clip=1e3, noise=1e-9, secure=secure)
    )
    states, _ = played(made, tmp_path / "dp")
    plain, *_ = drive(experiment(coterie.fedavg(), people), tmp_path / "plain", rounds=1)
    apart = (states[1].models[0].vector - plain.models[0].vector).abs().max()
    assert 0 < apart < 40 * GRID  # 17 grid steps of noise on a sum of 6, and float32's own


TARGETS = [[1.0], [2.0], [-3.0, -3.0], [10.0]]  # changes of 0.2, 0.4, -0.6 and 2 from θ = 0
CLIPPED = [0.2, 0.4, -0.5, 0.5]


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("lost", [set(), {3}])
def test_a_round_is_the_clipped_sum_by_the_expected_number(tmp_path, secure, lost):
    settings = central(clip=0.5, secure=secure)
    made = on_quadratics(coterie.fedavg(), TARGETS, settings=settings)
    states, on = played(
        made, tmp_path, engine=lambda p: Faulty(Loop(p), lose_reply=lambda c, o: c in lost)
    )
    wanted = sum(c for i, c in enumerate(CLIPPED) if i not in lost) / 4
    assert theta(states[1]) == pytest.approx(wanted, abs=3e-6)
    assert on.guard.spending.bound == 0.5


def test_with_poisson_cohorts_the_denominator_stays_the_expected_number(tmp_path):
    sizes = set()
    for seed in range(6):
        settings = {"cohort": 0.5, "sampling": "poisson", "seed": seed, **central(clip=0.5)}
        made = on_quadratics(coterie.fedavg(), TARGETS, settings=settings)
        people = cohort(made.settings, 0, range(4))
        sizes.add(len(people))
        states, _ = played(made, tmp_path / str(seed))
        assert theta(states[1]) == pytest.approx(sum(CLIPPED[c] for c in people) / 2, abs=4e-6)
    assert len(sizes) > 2  # of 4 clients, 2 are expected


# --- 2: the noise that is really there, and what it hides ---------------------------------------


Z, S = 1.3, 0.25


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, 4), ({"cohort": 2, "sampling": "fixed"}, 2), ({"cohort": 0.5, "sampling": "poisson"}, 2)],
)
def test_the_noise_on_the_sum_has_z_times_the_bound(tmp_path, settings, expected):
    made = still(coterie.fedavg(), 4, **settings, **central(noise=Z, clip=S))
    states, _ = played(made, tmp_path, rounds=4)
    rounds = [m * expected for m in moved(states)]
    assert spread(rounds, Z * S)
    assert all(spread(r, Z * S) for r in rounds)
    assert abs(np.corrcoef(rounds)[0, 1]) < 0.1  # every round has its own


@pytest.mark.parametrize("lost", [set(), {0}, {0, 1}])
def test_secure_noise_is_enough_whoever_drops_out_down_to_the_threshold(tmp_path, lost):
    """Shares of z²S²/t: with n left the variance is n/t of what is asked, never below."""
    made = still(coterie.fedavg(), 6, **central(noise=Z, clip=S, secure=True))
    states, _ = played(
        made,
        tmp_path,
        rounds=3,
        # The third exchange carries the masked inputs.
        engine=lambda p: Faulty(Loop(p), lose_reply=lambda c, o: c in lost and o.endswith(".2")),
    )
    there, threshold = 6 - len(lost), 4
    assert spread([m * 6 for m in moved(states)], Z * S * math.sqrt(there / threshold))


def test_every_group_has_noise_of_its_own_also_one_that_nobody_picks(tmp_path, monkeypatch):
    monkeypatch.setattr(dp.Private, "_denominator", lambda *_: 1.0)  # sums, not means
    made = still(coterie.ifca(k=3), 4, **central(noise=Z, clip=S))
    made = replace(made, model=lambda: _drawn(4000))
    states, _ = played(made, tmp_path, rounds=2)
    assert len(set(states[1].groups.values())) < 3
    changes_z = split_noise(Z, 4 * Z / 2)
    assert changes_z**-2 + (4 * Z) ** -2 == pytest.approx(Z**-2)
    sums = [moved(states, slot)[0] for slot in range(3)]
    assert all(spread(s, changes_z * S) for s in sums)
    assert np.abs(np.corrcoef(sums) - np.eye(3)).max() < 0.1


def _drawn(size):
    """A still model that can be drawn anew."""
    made = Still(size)
    nn.init.normal_(made.theta)
    return made


def test_the_members_of_a_group_are_counted_with_noise(tmp_path, monkeypatch):
    """The same noise twice, once as a sum and once as a mean: their ratio is the denominator."""
    z, rounds = 0.25, 50
    made = still(coterie.ifca(k=2), 6, **central(noise=z, clip=S))
    made = replace(made, model=lambda: _drawn(3))
    means, _ = played(made, tmp_path / "means", rounds)
    monkeypatch.setattr(dp.Private, "_denominator", lambda *_: 1.0)
    sums, _ = played(made, tmp_path / "sums", rounds)
    full = next(s for s in (0, 1) if s in sums[1].groups.values())
    assert all(set(state.groups.values()) == {full} for state in sums[1:])
    counts = []
    for total, mean in zip(moved(sums, full), moved(means, full), strict=True):
        at = np.argmax(np.abs(total))
        counts.append(float(total[at] / mean[at]) - 6)
    assert spread(counts, 4 * z, tail=1e-5)
    assert all(abs(c - round(c)) < 1e-2 for c in counts)
    assert len({round(c) for c in counts}) > 3


def test_where_nobody_takes_part_the_model_moves_all_the_same(tmp_path):
    made = still(coterie.fedavg(), 4, cohort=1, sampling="poisson", **central(noise=Z, clip=S))
    empty = [n for n in range(20) if not cohort(made.settings, n, range(4))]
    assert 0 not in empty
    states, _ = played(made, tmp_path / "some", rounds=empty[0] + 1)
    assert spread(moved(states)[empty[0]], Z * S)
    others = [with_settings(made, seed=seed) for seed in range(50)]
    nobody = next(o for o in others if not cohort(o.settings, 0, range(4)))
    states, _ = played(nobody, tmp_path / "first")
    assert spread(moved(states)[0], Z * S)  # though nobody has shown yet what an upload looks like


def test_where_nobody_takes_part_only_what_travels_is_noised(tmp_path):
    settings = {"cohort": 1, "sampling": "poisson", "seed": 1, **central(noise=Z, clip=S)}
    made = experiment(coterie.fedper(k=1), PEOPLE, settings=settings)
    sizes = [len(cohort(made.settings, n, range(6))) for n in range(20)]
    empty = next(n for n in range(1, 20) if not sizes[n] and sum(sizes[:n]))
    states, _ = played(made, tmp_path, rounds=empty + 1)
    before, after = (s.models[0].tensors() for s in states[-2:])
    moves = {name for name in before if not torch.equal(before[name], after[name])}
    *body, _ = states[0].models[0].layout.layers
    assert {e.layer for e in states[0].models[0].layout.entries if e.name in moves} == set(body)


def test_changes_bits_and_counts_share_the_noise(tmp_path):
    clients, z = 40, 1.0
    privacy = {"noise": z, "clip": S, "clipping": "median"}
    noises = {}
    for k in (1, 2):
        made = still(coterie.ifca(k=k), clients, 2, **central(**privacy))
        made = replace(made, model=lambda: _drawn(2))
        on = opened(made, tmp_path / str(k))
        on.guard.begin(made.method.init(on.fed, made.setup(on.plan.start)).models)
        noises[k] = on.fed.release._noise()
    assert noises[1]["counts"] == 0
    assert noises[2]["counts"] == 4 * z
    for k, noise in noises.items():
        found = noise["multiplier"] ** -2 + (2 * noise["bits"]) ** -2
        found += noise["counts"] ** -2 if k == 2 else 0
        assert found == pytest.approx(z**-2, rel=1e-9)
        assert noise["bits"] == clients / 20


def kept_sums(monkeypatch):
    """All sums that are made from now on, as whole numbers with no noise."""
    found = []
    monkeypatch.setattr(dp, "discrete_gaussian", lambda s, n, r: np.zeros(n, np.int64))
    total = dp.Private._total

    def noting(self, slot, form, people, values, *rest):
        found.append((slot, np.asarray(values)))
        return total(self, slot, form, people, values, *rest)

    monkeypatch.setattr(dp.Private, "_total", noting)
    return found


def sums_of(method, targets, folder, found, lost=(), **privacy):
    made = on_quadratics(method, targets, settings=central(clip=S, **privacy))
    before = len(found)
    played(made, folder, engine=lambda p: Faulty(Loop(p), lose_reply=lambda c, o: c in lost))
    return dict(found[before:])


def distance(one, other):
    """How far two releases are apart, over all slots together, in units of the bound."""
    changes = [one[s][:-1] - other[s][:-1] for s in one]
    return float(np.linalg.norm(np.concatenate(changes))) * GRID / S


def test_one_client_moves_the_sum_by_no_more_than_its_bound(tmp_path, monkeypatch):
    """Jointly over a method's two arrays: gone by S, replaced by 2S."""
    found = kept_sums(monkeypatch)
    sums = {
        name: sums_of(spoken("extra"), [[1.0], [2.0], [last]], tmp_path / name, found, lost)
        for name, last, lost in (("all", 9.0, ()), ("gone", 9.0, (2,)), ("other", -9.0, ()))
    }
    assert len(sums["all"][0]) == 1 + 3 + 1  # a model of one number, an array of three, a bit
    assert 0.999 < distance(sums["all"], sums["gone"]) <= 1
    assert 1.999 < distance(sums["all"], sums["other"]) <= 2


def test_one_client_of_ifca_moves_all_sums_together_by_no_more_than_its_bound(
    tmp_path, monkeypatch
):
    found = kept_sums(monkeypatch)
    sums = {
        name: sums_of(_two_models(), [[-90.0], [90.0], [last]], tmp_path / name, found, lost)
        for name, last, lost in (("all", 80.0, ()), ("gone", 80.0, (2,)), ("other", -80.0, ()))
    }
    assert set(sums["all"]) == {0, 1}
    assert 0.999 < distance(sums["all"], sums["gone"]) <= 1
    changed = [s for s in (0, 1) if (sums["all"][s] != sums["other"][s]).any()]
    assert len(changed) == 2  # it picked the other model: a part of S in each sum
    assert 1.4 < distance(sums["all"], sums["other"]) <= math.sqrt(2)


def _two_models():
    """IFCA from two models that are known: one below all of its clients' numbers, one above."""
    method = coterie.ifca(k=2)

    def init(fed, setup):
        layout = setup.start.layout
        return State({s: Weights(layout, torch.tensor([y])) for s, y in ((0, -1.0), (1, 1.0))})

    return replace(method, init=init)


# --- 3: everybody counts the same, and no number leaves beside the sums -------------------------


@pytest.mark.parametrize("secure", [False, True])
def test_the_number_of_samples_never_matters(tmp_path, secure):
    found = []
    for name, sizes in {"a": (1, 32, 1), "b": (8, 1, 2)}.items():
        targets = [[y] * n for y, n in zip((1.0, 2.0, 4.0), sizes, strict=True)]
        settings = central(clip=9.0, noise=0.5, secure=secure)
        made = on_quadratics(coterie.fedavg(), targets, settings=settings)
        states, _ = played(made, tmp_path / name, rounds=2)
        found.append(states[2].models[0].vector)
    assert torch.equal(*found)


@pytest.mark.parametrize("secure", [False, True])
def test_a_mean_tells_how_many_and_nothing_else(tmp_path, secure):
    made = on_quadratics(spoken(), [[1.0] * 9, [2.0], [3.0]], settings=central(secure=secure))
    on = opened(made, tmp_path)
    people = begin(on)
    orders = [Order(c, "train", {"model": on.plan.start}) for c in people]
    mean = on.fed.reduce(orders, {c: {0: 1.0} for c in people})[0]
    assert mean.examples == 3
    assert mean.clients == (0, 1, 2)
    assert dict(mean.metrics) == {}
    with pytest.raises(ConfigError, match="method spoken needs the metric 'loss'"):
        mean.metrics["loss"]


# --- 4: the account -----------------------------------------------------------------------------


def account(rounds=4, clients=10, sampling="poisson", cohort=0.5, **privacy):
    """An experiment whose only interest is what it costs."""
    settings = {
        "rounds": rounds,
        "cohort": cohort,
        "sampling": sampling,
        "evaluate_every": 0,
        "privacy": Privacy(**privacy),
    }
    return on_quadratics(coterie.fedavg(), [[float(c)] for c in range(clients)], settings=settings)


@pytest.mark.parametrize(
    ("sampling", "cohort", "kind", "accountant", "adjacency"),
    [
        ("poisson", 0.5, "poisson", "pld", "add or remove one client"),
        ("fixed", 0.5, "fixed", "rdp", "replace one client by another"),
        ("fixed", 1.0, "all", "exact", "add or remove one client"),
    ],
)
def test_epsilon_is_that_of_the_sampling_used(sampling, cohort, kind, accountant, adjacency):
    result = execute(account(3, sampling=sampling, cohort=cohort, noise=1.1, delta=1e-3))
    spent = [event["privacy"]["epsilon"] for event in result.history]
    assert [event["privacy"]["releases"] for event in result.history] == [1, 2, 3]
    assert 0 < spent[0] < spent[1] < spent[2]
    told = result.summary["privacy"]
    count = int(10 * cohort)
    assert told["epsilon"] == epsilon(Mechanism(Sampling(kind, 10, count), 1.1), 3, 1e-3)
    assert told["epsilon"] <= spent[2] * (1 + 1e-9)
    assert (told["sampling"], told["accountant"]) == (kind, accountant)
    assert told["adjacency"] == adjacency
    assert (told["releases"], told["noise"], told["delta"]) == (3, 1.1, 1e-3)
    assert told["randomness"] == "simulated"


def test_the_three_samplings_cost_differently_and_one_round_is_the_analytic_figure():
    kinds = {"poisson": ("poisson", 0.5), "fixed": ("fixed", 0.5), "all": ("fixed", 1.0)}
    found = {
        name: execute(account(1, sampling=s, cohort=c, noise=1.1, delta=1e-3)).summary["privacy"]
        for name, (s, c) in kinds.items()
    }
    assert found["poisson"]["epsilon"] < found["all"]["epsilon"] < found["fixed"]["epsilon"]
    assert found["all"]["epsilon"] == gaussian_epsilon(1.1, 1e-3)


def test_a_budget_calibrates_the_noise_and_is_nearly_used_up():
    told = execute(account(5, epsilon=4.0)).summary
    assert told["rounds"] == 5
    assert not told["stopped"]
    assert 0.98 * 4.0 <= told["privacy"]["epsilon"] <= 4.0
    assert told["privacy"]["budget"] == 4.0
    assert told["privacy"]["delta"] == pytest.approx(10**-1.1)


@pytest.mark.parametrize(("sampling", "budget"), [("poisson", 2.0), ("fixed", 6.5)])
def test_training_stops_before_the_budget_is_exceeded(sampling, budget):
    told = execute(account(12, sampling=sampling, noise=2.0, epsilon=budget, delta=1e-3)).summary
    assert 1 < told["rounds"] < 12
    assert told["stopped"] == f"the privacy budget of ε = {budget:g} has no room for another round"
    mechanism = Mechanism(Sampling(sampling, 10, 5), 2.0)
    assert told["privacy"]["releases"] == told["rounds"]
    assert epsilon(mechanism, told["rounds"], 1e-3) <= budget
    assert epsilon(mechanism, told["rounds"] + 1, 1e-3) > budget


def test_a_resumed_run_remembers_what_was_spent_and_stops_by_the_budget(tmp_path):
    made = account(4, sampling="fixed", cohort=1.0, noise=2.0, epsilon=6.0, delta=1e-3)
    whole = execute(with_settings(made, rounds=50))
    assert whole.rounds > 6
    with pytest.raises(Stop):
        execute(made, tmp_path / "r", watch=stop_after(2))
    first = execute(made, tmp_path / "r", resume=True)
    assert first.summary["privacy"]["releases"] == 4
    more = execute(with_settings(made, rounds=50), tmp_path / "r", resume=True)
    assert more.rounds == whole.rounds
    assert more.summary["stopped"] == whole.summary["stopped"]
    assert torch.equal(more.state.models[0].vector, whole.state.models[0].vector)


def test_more_rounds_of_a_written_run_keep_the_noise_of_the_first(tmp_path):
    tree = {
        "data": {"clients": 4, "samples": 120},
        "model": {"hidden": [4]},
        "run": {"rounds": 2, "engine": "loop"},
        "privacy": {"epsilon": 5.0},
    }
    made = experiment_of(parse(tree))
    noise = made.config["privacy"]["noise"]
    assert noise == pytest.approx(made.privacy.noise)
    first = execute(made, tmp_path / "r")
    assert first.summary["privacy"]["noise"] == noise
    again = experiment_of(parse({**made.config, "run": {**made.config["run"], "rounds": 9}}))
    more = execute(again, tmp_path / "r", resume=True)
    assert more.rounds == 2
    assert "no room for another round" in more.summary["stopped"]
    assert more.summary["privacy"]["noise"] == noise
    assert more.summary["privacy"]["epsilon"] == first.summary["privacy"]["epsilon"] <= 5.0


@pytest.mark.parametrize("mechanism", ["central", "local"])
def test_abandoned_rounds_are_paid_for(monkeypatch, mechanism):
    lose = lambda c, order: order.startswith("2.")  # noqa: E731
    faulty = lambda plan, settings: Faulty(Loop(plan), lose_reply=lose)  # noqa: E731
    monkeypatch.setitem(running.ENGINES, "loop", faulty)
    made = account(3, cohort=1.0, sampling="fixed", noise=1.0, mechanism=mechanism)
    result = execute(made)
    assert "abandoned" in result.history[1]
    assert result.summary["abandoned"] == 1
    assert [event["privacy"]["releases"] for event in result.history] == [1, 2, 3]


def test_a_budget_with_no_room_for_a_round_is_refused():
    with pytest.raises(ConfigError, match=r"epsilon = 0.1 does not suffice for a single round"):
        execute(account(3, noise=0.5, epsilon=0.1))


# --- 5: what is refused -------------------------------------------------------------------------


EACH = "groups or mixes clients by what each of them sent"
HALVES = "the noise is not calibrated for these uploads"
NOTHING = "is not a change of anything it received"
RESTING = "skips layers according to numbers that clients report"
REFUSED = {
    "fedclust": EACH,
    "dc-pfl": HALVES,
    "fedtsdp": HALVES,
    "user-centric": EACH,
    "user-centric all": EACH,
    "fedfomo": EACH,
    "cfl": EACH,
    "cfl+fedrep+fedadam": EACH,
    "fl-hc": EACH,
    "pacfl": EACH,
    "clusterfl": EACH,
    "flis": EACH,
    "adaptive": EACH,
    "k-fed": EACH,
    "group-evidence": HALVES,
    "median": EACH,
    "trimmed-mean": EACH,
    "krum": EACH,
    "fednova": NOTHING,
    "scaffold": NOTHING,
    "scaffold n": "uses single clients' replies",
    "feddyn": NOTHING,
    "adaptive-tau": NOTHING,
    "ifca+adaptive-tau": NOTHING,
    "fedavg layer-wise": RESTING,
    "ditto layer-wise": RESTING,
    "ifca layer-wise": RESTING,
}


@pytest.mark.parametrize("name", ROWS)
def test_a_method_has_one_noised_release_a_round_or_is_refused(name):
    schedule = SCHEDULES.get(name, {})
    settings = {"rounds": 2, "evaluate_every": 0, **central(noise=0.5)}
    method = ROWS[name]()
    made = experiment(method, PEOPLE, schedule=schedule, settings=settings)
    if name in REFUSED:
        with pytest.raises(ConfigError, match=f"method {method.name.replace('+', '.')} ") as why:
            execute(made)
        assert REFUSED[name] in str(why.value)
        return
    result = execute(made)
    assert result.summary["privacy"]["releases"] == (0 if name == "local" else 2)
    assert result.summary["exposure"] is not None


def twice(fed, on, people):
    orders = [Order(c, "train", {"model": on.plan.start}) for c in people]
    into = {c: {0: 1.0} for c in people}
    fed.reduce(orders, into)
    fed.reduce(orders, into)


def test_two_means_in_a_round_and_means_before_the_first_are_refused(tmp_path):
    on = opened(on_quadratics(spoken(), TARGETS, settings=central()), tmp_path)
    with pytest.raises(
        ConfigError, match="method spoken asks for means of all clients before the first round"
    ):
        twice(on.fed, on, range(4))
    people = begin(on)
    with pytest.raises(ConfigError, match="method spoken asks for means 2 times in one round"):
        twice(on.fed, on, people)
    assert on.guard.spending.releases == 1
    with pytest.raises(ConfigError, match="method spoken uses single clients' replies"):
        on.fed.gather([Order(0, "train", {"model": on.plan.start})])
    begin(on, number=1)
    orders = [Order(c, "train", {"model": on.plan.start}) for c in range(4)]
    with pytest.raises(ConfigError, match="adds client 0 to 2 sums at once"):
        on.fed.reduce(orders, {c: {0: 0.5, 1: 0.5} for c in range(4)})


def test_a_group_whose_members_get_different_models_is_refused(tmp_path):
    on = opened(on_quadratics(spoken(), TARGETS, settings=central()), tmp_path)
    start = on.plan.start
    begin(on)
    models = [Weights(start.layout, start.vector + c) for c in range(4)]
    orders = [Order(c, "train", {"model": models[c]}) for c in range(4)]
    with pytest.raises(ConfigError, match="sends clients of one group different models"):
        on.fed.reduce(orders, {c: {0: 1.0} for c in range(4)})


LINKS = {"sampling": "fixed", "clock": {"name": "links"}}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"over_selection": 1.5, "cohort": 2, **LINKS}, "run.over_selection selects clients"),
        ({"weighted": True, "availability": {"name": "diurnal"}, **LINKS}, "run.weighted selects"),
        ({"availability": {"name": "diurnal"}, **LINKS}, "availability selects clients"),
    ],
)
def test_draws_of_clients_that_no_accountant_knows_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        execute(experiment(coterie.fedavg(), PEOPLE, settings={**central(), **settings}))


@pytest.mark.parametrize("mechanism", ["central", "local"])
def test_shared_statistics_of_batch_normalisation_are_refused(mechanism):
    def network():
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, 10))

    settings = {"rounds": 1, **central(mechanism=mechanism, noise=0.5)}
    made = experiment(coterie.fedavg(), PEOPLE, model=network, settings=settings)
    with pytest.raises(ConfigError, match=r"statistics of batch normalisation.*model.bn"):
        execute(made)
    for bn in ("stats-local", "local"):
        execute(replace(made, bn=bn))


@pytest.mark.parametrize(
    ("privacy", "words"),
    [
        ({"secure": True, "reveal": "final-layer"}, "shows what the noise should hide"),
        ({"secure": True, "mechanism": "local"}, "cannot be used with --secure"),
        ({"mechanism": "nbafl", "noise": None, "epsilon": 1.0}, "between 0 and 1, not 1"),
        ({"mechanism": "nbafl", "epsilon": 0.5}, "privacy.noise = 1e-06 has no effect with this"),
        ({"mechanism": "nbafl", "noise": None}, "there is none: give --epsilon"),
        ({"mechanism": "middle"}, "unknown privacy.mechanism"),
        ({"clipping": "mean"}, "unknown privacy.clipping"),
        ({"clip": 0.0}, "privacy.clip = 0.0"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(privacy, words):
    with pytest.raises(ConfigError, match=words):
        execute(experiment(coterie.fedavg(), PEOPLE, settings=central(**privacy)))


def test_nbafl_is_for_everybody_and_for_one_mean():
    privacy = {"noise": None, "mechanism": "nbafl", "epsilon": 0.5}
    settings = {"cohort": 3, **central(**privacy)}
    with pytest.raises(ConfigError, match="proved for full participation"):
        execute(experiment(coterie.fedavg(), PEOPLE, settings=settings))
    with pytest.raises(ConfigError, match=r"method fl-hc makes more than one mean.*downlink"):
        execute(experiment(ROWS["fl-hc"](), PEOPLE, settings=central(**privacy)))


@pytest.mark.parametrize("mechanism", ["local", "nbafl"])
def test_noise_of_each_client_does_not_hide_its_choice_of_group(mechanism):
    noise = {"noise": 0.5} if mechanism == "local" else {"noise": None, "epsilon": 0.5}
    made = experiment(coterie.ifca(k=2), PEOPLE, settings=central(mechanism=mechanism, **noise))
    with pytest.raises(ConfigError, match="method ifca has each client report its group"):
        execute(made)


# --- 6: local noise, and NbAFL ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedavg", "cfl", "fl-hc", "fedclust"])
def test_methods_that_look_at_single_replies_run_under_local_noise(name):
    settings = {"rounds": 2, **central(mechanism="local", noise=0.5)}
    told = execute(experiment(ROWS[name](), PEOPLE, settings=settings)).summary["privacy"]
    uploads = 3 if name == "fedclust" else 2  # one before the first round
    assert told["releases"] == uploads
    assert told["epsilon"] == gaussian_epsilon(0.5 / 2 / math.sqrt(uploads), told["delta"])
    assert told["mechanism"] == "local"


def test_a_method_that_needs_a_clients_numbers_is_refused_under_local_noise():
    rows = {**ROWS, "dc-pfl": lambda: coterie.dc_pfl(trial="two-models")}  # it asks for no halves
    for name, number in {"fedfomo": "weight", "user-centric": "variance", "dc-pfl": "loss"}.items():
        made = experiment(rows[name](), PEOPLE, settings=central(mechanism="local", noise=0.5))
        with pytest.raises(ConfigError, match=f"method {name} needs the metric '{number}"):
            execute(made)


def test_each_upload_is_clipped_and_noised_by_its_client(tmp_path):
    settings = central(mechanism="local", clip=0.5, noise=TINY)
    on = opened(on_quadratics(coterie.fedavg(), TARGETS, settings=settings), tmp_path / "clip")
    begin(on)
    orders = [Order(c, "train", {"0": on.plan.start}) for c in range(4)]
    replies = on.fed.gather(orders)
    sent = [float(r.arrays["model"].vector[0]) for r in replies]
    assert sent == pytest.approx(CLIPPED, abs=1e-5)
    assert [r.examples for r in replies] == [1] * 4
    for reply in replies:
        assert not dict(reply.metrics)

    made = still(coterie.fedavg(), 3, value=0.5, **central(mechanism="local", noise=Z, clip=S))
    spy = []
    on = opened(made, tmp_path / "noise", lambda plan: spy.append(Spy(plan)) or spy[0])
    begin(on)
    orders = [Order(c, "train", {"0": on.plan.start}) for c in range(3)]
    on.fed.reduce(orders, {c: {0: 1.0} for c in range(3)})
    uploads = [s.sent["model"].vector.double().numpy() - 0.5 for s in spy[0].seen]
    assert len(uploads) == 3
    assert all(not s.metrics for s in spy[0].seen)  # as it passed, before any server's hand
    assert all(spread(u, Z * S) for u in uploads)
    assert np.abs(np.corrcoef(uploads) - np.eye(3)).max() < 0.1


def test_local_noise_counts_the_uploads_of_the_busiest_client():
    settings = {"rounds": 6, "cohort": 2, **central(mechanism="local", noise=9.0, delta=1e-3)}
    made = on_quadratics(coterie.fedavg(), TARGETS, settings=settings)
    result = execute(made)
    turns = [sum(c in e["cohort"] for e in result.history) for c in range(4)]
    assert max(turns) < 6
    told = result.summary["privacy"]
    assert told["releases"] == max(turns)
    assert told["epsilon"] == gaussian_epsilon(9.0 / 2 / math.sqrt(max(turns)), 1e-3)
    budget = with_settings(made, rounds=40, privacy=replace(made.settings.privacy, epsilon=1.5))
    stopped = execute(budget).summary
    assert stopped["rounds"] < 40
    assert stopped["privacy"]["epsilon"] <= 1.5


C, M, L, T, N, EPS, DELTA = 2.0, 5, 1, 8, 4, 0.5, 1e-2


def test_nbafl_has_its_two_noises_and_clips_the_model_itself(tmp_path):
    """σ_U = cL·2C/(mε) on each upload; σ_D = 2cC·√(T²-L²N)/(mNε) on the mean."""
    privacy = {"mechanism": "nbafl", "epsilon": EPS, "delta": DELTA, "exposures": L, "clip": C}
    size = 4000
    made = on_quadratics(
        coterie.fedavg(),
        [[1.0] * M, [1.0] * 9, [1.0] * 6, [1.0] * 20],
        schedule={"lr": 1e-30},
        settings={"rounds": T, "privacy": Privacy(**privacy)},
    )
    made = replace(made, model=lambda: Still(size, 0.5))
    spy = []
    states, _ = played(made, tmp_path, engine=lambda plan: spy.append(Spy(plan)) or spy[0])
    clipped = 0.5 * C / (0.5 * math.sqrt(size))
    constant = math.sqrt(2 * math.log(1.25 / DELTA))
    up = constant * L * 2 * C / M / EPS
    down = 2 * constant * C * math.sqrt(T**2 - L**2 * N) / (M * N * EPS)
    uploads = {s.client: s.sent["model"].vector.double().numpy() for s in spy[0].seen}
    assert len(uploads) == 4
    for sent in uploads.values():
        assert spread(sent - clipped, up)
    weights = np.array([M, 9, 6, 20]) / (M + 9 + 6 + 20)
    mean = sum(w * uploads[c] for c, w in enumerate(weights))
    added = states[1].models[0].vector.double().numpy() - mean
    assert spread(added, down)


def test_nbafl_without_its_noise_is_the_mean_of_clipped_models_by_samples(tmp_path, monkeypatch):
    for module in (client_side, local):
        monkeypatch.setattr(module, "discrete_gaussian", lambda s, n, r: np.zeros(n, np.int64))
    privacy = {"noise": None, "mechanism": "nbafl", "epsilon": EPS, "clip": 0.5}
    made = on_quadratics(coterie.fedavg(), TARGETS, start=1.0, settings=central(**privacy))
    states, _ = played(made, tmp_path)
    # From θ = 1 the models are 1, 1.2, 0.2 and 2.8, with 1, 1, 2 and 1 samples.
    assert theta(states[1]) == pytest.approx((0.5 + 0.5 + 2 * 0.2 + 0.5) / 5, abs=1e-6)


def test_nbafl_without_a_need_for_more_adds_nothing_on_the_way_down(tmp_path):
    """T ≤ L√N: the uploads' own noise is enough."""
    privacy = {"mechanism": "nbafl", "epsilon": EPS, "delta": DELTA, "clip": C}
    made = still(coterie.fedavg(), 4, 50, rounds=2, privacy=Privacy(**privacy))
    spy = []
    states, _ = played(made, tmp_path, engine=lambda plan: spy.append(Spy(plan)) or spy[0])
    mean = sum(s.sent["model"].vector.double() for s in spy[0].seen) / 4
    assert torch.allclose(states[1].models[0].vector.double(), mean, atol=1e-5)
    told = execute(made).summary["privacy"]
    assert (told["downlink"], told["accountant"], told["exposures"]) == (0.0, "nbafl", 2)


# --- 7: a bound that follows a quantile ---------------------------------------------------------


NORMS = [[float(n)] for n in range(1, 41)]  # each client's change is its number, in every round


@pytest.mark.parametrize(
    ("privacy", "low", "high"),
    [
        ({"clipping": "median"}, 16, 24),
        ({"clipping": "quantile", "quantile": 0.9}, 33, 39),
        ({"clipping": "quantile", "quantile": 0.2}, 5, 11),
    ],
)
def test_the_bound_goes_to_the_quantile_of_the_norms(tmp_path, privacy, low, high):
    settings = central(noise=0.5, clip=2.0, clip_rate=0.3, **privacy)
    made = on_quadratics(spoken(), NORMS, settings=settings)
    on = opened(made, tmp_path)
    state, bounds = made.method.init(on.fed, made.setup(on.plan.start)), []
    for number in range(40):
        state = made.method.round(on.fed, state, Round(number, begin(on, state, number)))
        bounds.append(on.guard.spending.bound)
    assert bounds[0] > 2.0
    assert low < np.exp(np.mean(np.log(bounds[-12:]))) < high


def test_the_bound_moves_by_noised_bits(tmp_path):
    """Half of the norms are below; what is beyond that is noise of a twentieth of the cohort."""
    rate, rounds = 1e-9, 60
    settings = central(noise=0.1, clip=20.5, clip_rate=rate, clipping="median")
    made = on_quadratics(spoken(), NORMS, settings=settings)
    on = opened(made, tmp_path)
    state, shares = made.method.init(on.fed, made.setup(on.plan.start)), []
    for number in range(rounds):
        before = on.guard.spending.bound
        state = made.method.round(on.fed, state, Round(number, begin(on, state, number)))
        shares.append(-math.log(on.guard.spending.bound / before) / rate)
    assert spread([s * 40 for s in shares], 40 / 20, tail=1e-5)


def test_a_fixed_bound_never_moves_and_no_bit_leaves(tmp_path, monkeypatch):
    found = kept_sums(monkeypatch)
    for clipping, bit in (("fixed", 0), ("median", None)):
        privacy = {"clipping": clipping, "noise": 0.5, "clip": 2.5}
        made = on_quadratics(spoken(), NORMS, settings=central(**privacy))
        _, on = played(made, tmp_path / clipping, rounds=2)
        last = [int(values[-1]) for _, values in found[-2:]]
        if bit == 0:
            assert last == [0, 0]
            assert on.guard.spending.bound == 2.5
        else:  # of 40 norms, 2 are below
            assert last[0] == (2 - 38) * client_side.BIT
            assert on.guard.spending.bound > 2.5
    told = {"clip": 2.5, "multiplier": 0.5, "bits": 0.0}
    sent = client_side.noised(np.array([1.0]), told, 24, 1.0, dp.Entropy().stream("x"))
    assert sent[-1] == 0  # under secure aggregation it is the client who keeps it back


def test_under_secure_aggregation_a_client_adds_its_share_of_both_noises(tmp_path):
    told = {"clip": S, "multiplier": Z, "bits": 2.0}
    streams = [dp.Entropy(seed=seed) for seed in range(300)]
    sent = [client_side.noised(np.zeros(50), told, 24, 0.5, s.stream("noise")) for s in streams]
    rows = np.stack(sent).astype(float)
    assert spread(rows[:, :-1] * GRID, 0.5 * Z * S)
    assert spread(rows[:, -1] / (2 * client_side.BIT) - 0.5, 0.5 * 2.0, tail=1e-5)
    settings = central(noise=0.2, clip=1.0, clipping="median", secure=True)
    made = on_quadratics(spoken(), [[float(n)] for n in range(10, 16)], settings=settings)
    _, on = played(made, tmp_path, rounds=3)
    assert 1.1 < on.guard.spending.bound < math.exp(3 * 0.2 * 0.5) + 1e-9  # nobody is below


# --- 8: repeatable where it is simulated --------------------------------------------------------


def _broken_off(made, folder):
    """A run that was stopped after its first round and resumed."""
    with pytest.raises(Stop):
        execute(made, folder, watch=stop_after(1))
    return execute(made, folder, resume=True)


@pytest.mark.parametrize("privacy", [{}, {"secure": True}, {"mechanism": "local"}])
def test_loop_and_pool_and_a_resumed_run_have_the_same_bits(tmp_path, privacy):
    settings = {"rounds": 3, "evaluate_every": 0, **central(noise=0.5, **privacy)}
    made = experiment(coterie.fedavg(), PEOPLE, settings=settings)
    whole = execute(made)
    again = _broken_off(made, tmp_path / "r")
    if privacy == {"mechanism": "local"}:  # what clients keep changes what their orders say
        kept = replace(made, method=coterie.ditto())
        wholes = [execute(kept), _broken_off(kept, tmp_path / "kept")]
        assert same_bits(*[[r.state.models[0].vector] for r in wholes])
    pool = execute(with_settings(made, engine="pool", workers=2))
    vectors = [r.state.models[0].vector for r in (whole, again, pool)]
    assert same_bits([vectors[0]] * 2, vectors[1:])
    assert whole.summary["privacy"] == again.summary["privacy"] == pool.summary["privacy"]
    assert whole.summary["privacy"]["randomness"] == "simulated"


def test_a_bound_that_moves_is_remembered(tmp_path):
    settings = {"rounds": 4, "cohort": 20, "sampling": "poisson", "evaluate_every": 0}
    privacy = central(noise=0.5, clip=2.0, clipping="median")
    made = on_quadratics(spoken(), NORMS, settings={**settings, **privacy})
    whole = execute(made)
    with pytest.raises(Stop):
        execute(made, tmp_path / "r", watch=stop_after(2))
    again = execute(made, tmp_path / "r", resume=True)
    assert torch.equal(whole.state.models[0].vector, again.state.models[0].vector)
    assert whole.summary["privacy"]["clip"] == again.summary["privacy"]["clip"] != 2.0


def test_an_empty_round_after_resuming_is_noised_alike(tmp_path):
    made = account(1, clients=6, cohort=1, noise=1.0)
    empty = next(n for n in range(1, 40) if not cohort(made.settings, n, range(6)))
    made = with_settings(made, rounds=empty + 1)
    whole = execute(made)
    with pytest.raises(Stop):
        execute(made, tmp_path / "r", watch=stop_after(empty))
    again = execute(made, tmp_path / "r", resume=True)
    assert not whole.history[empty]["cohort"]
    assert torch.equal(whole.state.models[0].vector, again.state.models[0].vector)


@pytest.mark.parametrize("privacy", [{}, {"secure": True}, {"mechanism": "local"}])
def test_noise_of_the_system_is_another_each_time(tmp_path, privacy):
    settings = central(noise=Z, clip=S, randomness="system", **privacy)
    made = still(coterie.fedavg(), 3, 200, **settings)
    ones = [moved(played(made, tmp_path / n)[0])[0] for n in "ab"]
    assert abs(np.corrcoef(ones)[0, 1]) < 0.4
    if not privacy:
        assert execute(with_settings(made, rounds=1)).summary["privacy"]["randomness"] == "system"


def test_another_seed_has_other_noise(tmp_path):
    made = still(coterie.fedavg(), 3, 200, **central(noise=Z, clip=S))
    ones = [moved(played(with_settings(made, seed=s), tmp_path / str(s))[0])[0] for s in (0, 1)]
    assert abs(np.corrcoef(ones)[0, 1]) < 0.4


# --- 9: Poisson sampling ------------------------------------------------------------------------


def test_poisson_draws_each_client_by_its_own_coin():
    policy, rounds = Policy(cohort=0.3, sampling="poisson"), 2000
    there = np.zeros((rounds, 10), int)
    for number in range(rounds):
        there[number, select(policy, 5, number, range(10))] = 1
    for client in range(10):
        assert stats.binomtest(int(there[:, client].sum()), rounds, 0.3).pvalue > 1e-4
    sizes = np.bincount(np.minimum(there.sum(1), 7), minlength=8)
    wanted = rounds * stats.binom.pmf(np.arange(7), 10, 0.3)
    assert stats.chisquare(sizes, [*wanted, rounds - wanted.sum()]).pvalue > 1e-4
    assert np.abs(np.corrcoef(there.T) - np.eye(10)).max() < 0.1


@pytest.mark.parametrize("privacy", [{}, {"noise": 1.0}])
def test_a_round_of_nobody_does_not_end_a_run(privacy):
    result = execute(account(8, clients=6, cohort=1, **privacy))
    sizes = [len(event["cohort"]) for event in result.history]
    assert 0 in sizes
    assert max(sizes) > 1
    assert result.rounds == 8
    assert all("abandoned" not in event for event in result.history)


def test_with_a_clock_nobody_of_a_large_cohort_is_cut_off():
    made = account(8, clients=8, cohort=3, noise=1.0)
    result = execute(with_settings(made, clock={"name": "links"}))
    assert max(len(event["cohort"]) for event in result.history) > 3
    for event in result.history:
        assert event["late"] == 0
        assert len(event["client_bytes"]) == len(event["cohort"])
