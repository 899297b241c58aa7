"""FedNova, SCAFFOLD, MOON, FedDyn: where they coincide with FedAvg, known optima, numbers by hand.

On quadratics a client's loss is the mean of (θ − y)², so that a step with lr 0.1 is
θ ← θ − 0.1·2(θ − m). Where a client's targets are all m, each of its batches is its whole loss:
with batches of two, one or two samples are one step, three are two steps.
"""

from dataclasses import replace
from importlib import import_module

import pytest
import torch
from torch import Tensor, nn

import coterie
from coterie.channel.compression.coding import Coding
from coterie.channel.privacy.settings import Privacy
from coterie.client import client as client_module
from coterie.client.fit import decode
from coterie.client.store import Store
from coterie.core.method import Round
from coterie.data import ClientData, Population, Split
from coterie.engines.loop import Loop
from coterie.errors import ConfigError
from coterie.experiment.experiment import execute
from coterie.experiment.stopping import Stop as Ending
from coterie.methods import METHODS, make
from coterie.methods.drift_correction import feddyn, scaffold
from coterie.methods.fednova import fednova, path_length
from coterie.methods.moon import moon
from coterie.methods.server_rules import fedavgm, krum
from coterie.report.method_help import required
from faulty import Faulty
from scripted import Spy, opened
from support import digits, drive, experiment, models, on_quadratics, same_bits

PLAIN = {"momentum": 0.0}


def cohorts(made, folder, turns, engine=None, after=None):
    """Rounds with these cohorts: the state, the channel, and what each client keeps.

    ``after(state, keeps)`` looks at every round.
    """
    channel, _, plan = opened(made, folder, engine or Spy)
    channel.begin(0, stage="init")
    state = made.method.init(channel, made.setup(plan.start))
    for number, cohort in enumerate(turns):
        channel.begin(number)
        state = made.method.round(channel, state, Round(number, cohort))
        if after is not None:
            after(state, kept(folder, channel))
    return state, channel, kept(folder, channel)


def kept(folder, channel):
    """What each client keeps, by client: the versions that the server has adopted."""
    store = Store(folder, channel.wire.layout)
    return {c: store.read(c, channel.state.versions.get(c, "")) for c in channel.clients}


def corrections(keeps, like):
    """Each client's own correction; zero for those that have none yet."""
    return [state.get("correction", torch.zeros_like(like)) for state in keeps.values()]


def value(state):
    return float(state.models[0].vector)


def uneven(sizes=(9, 12, 16, 10)):
    """Digits over clients of different sizes, with the groups' rotations."""
    people = digits(clients=len(sizes))
    clients = [
        replace(c, train=Split(c.train.x[:n], c.train.y[:n]))
        for c, n in zip(people.clients, sizes, strict=True)
    ]
    return replace(people, clients=tuple(clients))


def normed():
    """A small network with batch normalisation and dropout, for digits."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.2),
        nn.Linear(12, 10),
    )  # fmt: skip


def trained(method, folder, **changes):
    made = experiment(method, **changes)
    state, channel, _ = drive(made, folder)
    return models(made, state, channel)


class Curve(nn.Module):
    """θ times the input: a client whose inputs are √h has the loss h(θ − m)²."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor([3.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.theta * x[:, 0]


def curved(method, curves, **changes):
    """Clients with the losses h(θ − m)², a sample each; θ starts at 3."""
    people = []
    for h, m in curves:
        one = Split(torch.tensor([[h**0.5]]), torch.tensor([h**0.5 * m]))
        people.append(ClientData(one, one, one))
    made = on_quadratics(
        method, [], population=Population(tuple(people), "table", (1,), None, 1), **changes
    )
    object.__setattr__(made, "model", Curve)
    return made


# --- limits that are FedAvg ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [{}, {"settings": {"rounds": 3, "cohort": 0.5}}, {"model": normed}]
)
def test_moon_without_strength_is_fedavg_to_the_bit(changes, tmp_path):
    ours = trained(moon(mu=0), tmp_path / "a", **changes)
    assert same_bits(ours, trained(coterie.fedavg(), tmp_path / "b", **changes))


def test_moon_is_fedavg_until_clients_have_a_model_of_their_own(tmp_path):
    for rounds, alike in ((1, True), (2, False)):
        changes = {"settings": {"rounds": rounds}}
        ours = trained(moon(), tmp_path / f"a{rounds}", **changes)
        theirs = trained(coterie.fedavg(), tmp_path / f"b{rounds}", **changes)
        assert same_bits(ours, theirs) == alike


@pytest.mark.parametrize("network", [None, normed])
@pytest.mark.parametrize("bn", ["shared", "local"])
def test_scaffold_by_samples_is_fedavg_in_the_first_round(network, bn, tmp_path):
    changes = {"schedule": PLAIN, "settings": {"rounds": 1}, "population": uneven(), "bn": bn}
    changes |= {"model": network} if network else {}
    ours = trained(scaffold(weights="n"), tmp_path / "a", **changes)
    theirs = trained(coterie.fedavg(), tmp_path / "b", **changes)
    assert torch.allclose(torch.stack(ours), torch.stack(theirs), atol=1e-6)
    second = changes | {"settings": {"rounds": 2}}
    ours = trained(scaffold(weights="n"), tmp_path / "c", **second)
    theirs = trained(coterie.fedavg(), tmp_path / "d", **second)
    assert not torch.allclose(torch.stack(ours), torch.stack(theirs), atol=1e-4)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("network", [None, normed])
def test_fednova_with_equal_steps_is_fedavg(momentum, network, tmp_path):
    # Sizes differ, and with them the weights, but everybody stops after three steps.
    changes = {"population": uneven((5, 12, 30, 18)), "settings": {"rounds": 1}}
    changes |= {"model": network} if network else {}
    equal = changes | {"schedule": {"momentum": momentum, "epochs": 3, "steps": 3}}
    unequal = changes | {"schedule": {"momentum": momentum, "epochs": 3}}
    for name, schedule, alike in (("equal", equal, True), ("unequal", unequal, False)):
        ours = trained(fednova(), tmp_path / f"a {name}", **schedule)
        theirs = trained(coterie.fedavg(), tmp_path / f"b {name}", **schedule)
        assert torch.allclose(torch.stack(ours), torch.stack(theirs), atol=1e-6) == alike


@pytest.mark.parametrize("method", [scaffold, feddyn])
def test_buffers_are_means_by_samples_whatever_the_weights(method, tmp_path):
    # One step from the same start, before there are corrections, is FedAvg's own: so the buffers
    # must be FedAvg's, by samples, though the parameters are means of clients.
    changes = {"schedule": PLAIN | {"steps": 1}, "population": uneven(), "model": normed}
    changes |= {"settings": {"rounds": 1}}
    ours = trained(method(), tmp_path / "a", **changes)[0]
    theirs = trained(coterie.fedavg(), tmp_path / "b", **changes)[0]
    parameters = 64 * 12 + 12 + 24 + 12 * 10 + 10
    assert ours.numel() == parameters + 24
    assert torch.allclose(ours[parameters:], theirs[parameters:], atol=1e-6)
    assert not torch.allclose(ours[:parameters], theirs[:parameters], atol=1e-4)


@pytest.mark.parametrize("made", [scaffold, feddyn, fednova, moon])
def test_nothing_learnt_without_epochs(made, tmp_path):
    # No step: nothing to divide by, no direction, no correction.
    run = on_quadratics(fednova(), [[1.0], [5.0]], start=2.0, schedule={"epochs": 0})
    object.__setattr__(run, "method", replace(made(), check=None))
    state, _, keeps = cohorts(run, tmp_path, [[0, 1]] * 2)
    assert value(state) == 2.0
    assert all(float(c) == 0 for c in corrections(keeps, torch.zeros(1)))


# --- FedNova --------------------------------------------------------------------------------------


def test_path_length_counts_every_gradient_as_often_as_it_moves_the_model():
    for momentum in (0.0, 0.3, 0.9):
        for steps in (1, 2, 7, 40):
            # Gradients of 1 throughout: the velocity is what a step moves by.
            velocity = moved = 0.0
            for _ in range(steps):
                velocity = momentum * velocity + 1
                moved += velocity
            assert path_length(steps, momentum) == pytest.approx(moved, rel=1e-12)


def test_fednova_with_momentum_by_hand(tmp_path):
    # lr 0.1, momentum 0.5, from 0. Client 0, one sample at 1, one step: v = −2, θ = 0.2, a = 1.
    # Client 1, five samples at 5, three steps: v = −10, θ = 1; v = −5 − 8 = −13, θ = 2.3;
    # v = −6.5 − 5.4 = −11.9, θ = 3.49. a: g₁ counts 1 + 1/2 + 1/4, g₂ 1 + 1/2, g₃ once: 4.25.
    # p = 1/6 and 5/6: Σ p a = 1/6 + 21.25/6 = 22.25/6; Σ p d = −(0.2 + 17.45/4.25)/6.
    schedule = {"batch_size": 2, "momentum": 0.5}
    made = on_quadratics(fednova(), [[1.0], [5.0] * 5], schedule=schedule)
    state, _, _ = cohorts(made, tmp_path, [[0, 1]])
    assert value(state) == pytest.approx(22.25 / 6 * (0.2 + 17.45 / 4.25) / 6, abs=1e-6)


def test_fednova_without_momentum_by_hand_over_those_who_answered(tmp_path):
    # Steps 1 and 3 towards 1 and 5: θ = 0.2 and 5(1 − 0.8³) = 2.44. The third client does not
    # take part, the fourth does not answer: p = 1/6 and 5/6 all the same.
    targets = [[1.0], [5.0] * 5, [9.0] * 3, [9.0] * 3]
    made = on_quadratics(fednova(), targets, schedule={"batch_size": 2})

    def lossy(plan):
        return Faulty(Loop(plan), lose_reply=lambda c, o: c == 3)

    state, _, _ = cohorts(made, tmp_path, [[0, 1, 3]], lossy)
    assert value(state) == pytest.approx((1 + 15) / 6 * (0.2 + 5 * 2.44 / 3) / 6, abs=1e-6)


def test_fednova_counts_directions_where_fedavg_counts_steps(tmp_path):
    # In the limit Σ p_i w_i (θ − m_i) = 0, where a client's steps take it w_i = 1 − 0.8^K of the
    # way (FedAvg); FedNova divides that by K.
    targets, schedule = [[1.0], [5.0] * 5], {"batch_size": 2}
    for name, method, weights in (
        ("fedavg", coterie.fedavg(), (0.2, 0.488)),
        ("fednova", fednova(), (0.2, 0.488 / 3)),
    ):
        made = on_quadratics(method, targets, schedule=schedule)
        state, _, _ = cohorts(made, tmp_path / name, [[0, 1]] * 80)
        p = [n * w for n, w in zip((1, 5), weights, strict=True)]
        assert value(state) == pytest.approx((p[0] * 1 + p[1] * 5) / sum(p), abs=1e-5)


# --- SCAFFOLD -------------------------------------------------------------------------------------

TWO = [[1.0, 1.0], [5.0, 5.0, 5.0]]  # one step, and two


def test_scaffold_two_rounds_by_hand(tmp_path):
    # Round 1 from 0, no corrections. Client 0: θ = 0.2, c_0 = (0 − 0.2)/(1·0.1) = −2.
    # Client 1: 1, then 5 − 4·0.8 = 1.8; c_1 = (0 − 1.8)/(2·0.1) = −9. θ = 1, c = −5.5.
    # Round 2 from 1. Client 0: g − c_0 + c = 0 + 2 − 5.5 = −3.5, θ = 1.35,
    # c_0 = −2 + 5.5 + (1 − 1.35)/0.1 = 0, its gradient at 1.
    # Client 1: −8 + 9 − 5.5 = −4.5, θ = 1.45; −7.1 + 3.5 = −3.6, θ = 1.81;
    # c_1 = −9 + 5.5 + (1 − 1.81)/0.2 = −7.55, the mean of −8 and −7.1.
    # θ = (1.35 + 1.81)/2 = 1.58, c = −7.55/2.
    made = on_quadratics(scaffold(), TWO, schedule={"batch_size": 2})
    state, _, keeps = cohorts(made, tmp_path / "1", [[0, 1]])
    assert value(state) == pytest.approx(1.0, abs=1e-6)
    assert float(state.memory["correction"]) == pytest.approx(-5.5, abs=1e-5)
    assert corrections(keeps, torch.zeros(1)) == pytest.approx([-2, -9], abs=1e-5)
    state, _, keeps = cohorts(made, tmp_path / "2", [[0, 1]] * 2)
    assert value(state) == pytest.approx(1.58, abs=1e-6)
    assert float(state.memory["correction"]) == pytest.approx(-3.775, abs=1e-5)
    assert corrections(keeps, torch.zeros(1)) == pytest.approx([0, -7.55], abs=1e-5)


def test_scaffold_divides_by_the_steps_really_made(tmp_path):
    # A limit of one step: client 1 goes to 1 in one step of its two, c_1 = (0 − 1)/(1·0.1) = −10.
    made = on_quadratics(scaffold(), TWO, schedule={"batch_size": 2, "steps": 1})
    _, _, keeps = cohorts(made, tmp_path, [[0, 1]])
    assert corrections(keeps, torch.zeros(1)) == pytest.approx([-2, -10], abs=1e-5)


def test_scaffold_by_samples_and_with_a_server_rate_by_hand(tmp_path):
    # As above, by 2 and 3 of 5 samples: θ = η_s(0.4·0.2 + 0.6·1.8) = 1.16·η_s,
    # c = −(0.4·2 + 0.6·9) = −6.2. Uniform with η_s = 0.5: θ = 0.5.
    made = on_quadratics(scaffold(server_lr=0.5, weights="n"), TWO, schedule={"batch_size": 2})
    state, _, _ = cohorts(made, tmp_path / "n", [[0, 1]])
    assert value(state) == pytest.approx(0.58, abs=1e-6)
    assert float(state.memory["correction"]) == pytest.approx(-6.2, abs=1e-5)
    made = on_quadratics(scaffold(server_lr=0.5), TWO, schedule={"batch_size": 2})
    state, _, _ = cohorts(made, tmp_path / "u", [[0, 1]])
    assert value(state) == pytest.approx(0.5, abs=1e-6)


def test_scaffold_divides_by_all_clients_not_by_the_cohort(tmp_path):
    # Client 0 alone of four, then client 1 alone: c = −2/4, then the model is at 0.2.
    # Client 1: −9.6 − 0 − 0.5 = −10.1, θ = 1.21; −7.58 − 0.5 = −8.08, θ = 2.018;
    # c_1 = 0.5 + (0.2 − 2.018)/0.2 = −8.59, the mean of −9.6 and −7.58. c = (−2 − 8.59)/4.
    made = on_quadratics(scaffold(), [*TWO, [7.0], [8.0]], schedule={"batch_size": 2})
    state, _, _ = cohorts(made, tmp_path / "1", [[0]])
    assert float(state.memory["correction"]) == pytest.approx(-0.5, abs=1e-6)
    state, _, keeps = cohorts(made, tmp_path / "2", [[0], [1]])
    assert value(state) == pytest.approx(2.018, abs=1e-6)
    assert corrections(keeps, torch.zeros(1)) == pytest.approx([-2, -8.59, 0, 0], abs=1e-5)
    assert float(state.memory["correction"]) == pytest.approx(-10.59 / 4, abs=1e-5)


def test_a_variate_is_the_mean_gradient_along_the_way_though_the_rate_decays(tmp_path):
    # One step a round: c_i is the gradient 2(θ_t − m) at the model received, in every round.
    made = on_quadratics(scaffold(), [[1.0], [5.0]], schedule={"lr_decay": 0.5})
    for rounds in (1, 2, 3):
        state, _, _ = cohorts(made, tmp_path / f"a{rounds}", [[0, 1]] * rounds)
        _, _, keeps = cohorts(made, tmp_path / f"b{rounds}", [[0, 1]] * (rounds + 1))
        expected = [2 * (value(state) - 1), 2 * (value(state) - 5)]
        assert corrections(keeps, torch.zeros(1)) == pytest.approx(expected, abs=1e-4)


# --- FedDyn ---------------------------------------------------------------------------------------


def test_feddyn_two_rounds_by_hand(tmp_path):
    # α = 2, round 1 from 0. Client 0: 0.2, g_0 = −0.4. Client 1: 1, then −8 + 2·1 = −6, θ = 1.6,
    # g_1 = −3.2. h = −(2/2)(0.2 + 1.6) = −1.8. θ = 0.9 + 0.9 = 1.8.
    # Round 2 from 1.8. Client 0: 1.6 + 0.4 = 2, θ = 1.6, g_0 = −0.4 + 2·0.2 = 0.
    # Client 1: −6.4 + 3.2 = −3.2, θ = 2.12; −5.76 + 3.2 + 2·0.32 = −1.92, θ = 2.312;
    # g_1 = −3.2 − 2·0.512 = −4.224. h = −1.8 − (−0.2 + 0.512) = −2.112.
    # θ = (1.6 + 2.312)/2 + 2.112/2 = 3.012.
    made = on_quadratics(feddyn(alpha=2.0), TWO, schedule={"batch_size": 2})
    state, _, keeps = cohorts(made, tmp_path / "1", [[0, 1]])
    assert value(state) == pytest.approx(1.8, abs=1e-6)
    assert float(state.memory["correction"]) == pytest.approx(-1.8, abs=1e-6)
    assert corrections(keeps, torch.zeros(1)) == pytest.approx([-0.4, -3.2], abs=1e-6)
    state, _, keeps = cohorts(made, tmp_path / "2", [[0, 1]] * 2)
    assert value(state) == pytest.approx(3.012, abs=1e-6)
    assert float(state.memory["correction"]) == pytest.approx(-2.112, abs=1e-6)
    assert corrections(keeps, torch.zeros(1)) == pytest.approx([0, -4.224], abs=1e-6)


def test_feddyn_divides_by_all_clients_and_averages_those_who_answered(tmp_path):
    # Client 0 of four, alone: h = −(2/4)·0.2 = −0.1, θ = 0.2 + 0.05.
    made = on_quadratics(feddyn(alpha=2.0), [*TWO, [7.0], [8.0]], schedule={"batch_size": 2})
    state, _, _ = cohorts(made, tmp_path, [[0]])
    assert float(state.memory["correction"]) == pytest.approx(-0.1, abs=1e-6)
    assert value(state) == pytest.approx(0.25, abs=1e-6)


# --- known optima ---------------------------------------------------------------------------------

# Losses 0.5(θ − 1)², (θ − 4)² and 2(θ + 2)²: their mean is least where 0.5·1 + 4 − 2·2 = 3.5·θ.
CURVES = [(0.5, 1.0), (1.0, 4.0), (2.0, -2.0)]
OPTIMUM = 0.5 / 3.5
STEPS = {"epochs": 5}


def test_fedavg_misses_the_optimum_when_clients_make_several_steps(tmp_path):
    # A step leaves 1 − 0.2h of the distance, five leave its fifth power: the fixed point is the
    # mean of the optima, weighted by how far clients come.
    w = [1 - (1 - 0.2 * h) ** 5 for h, _ in CURVES]
    fixed = sum(a * m for a, (_, m) in zip(w, CURVES, strict=True)) / sum(w)
    state, _, _ = cohorts(
        curved(coterie.fedavg(), CURVES, schedule=STEPS), tmp_path, [[0, 1, 2]] * 60
    )
    assert value(state) == pytest.approx(fixed, abs=1e-5)
    assert abs(fixed - OPTIMUM) > 0.4


ALL, SOME = [[0, 1, 2]] * 25, [[0, 1], [1, 2], [0, 2], [2], [0], [1]] * 12


@pytest.mark.parametrize("turns", [ALL, SOME], ids=["all", "some"])
@pytest.mark.parametrize(
    "method",
    [scaffold, lambda: scaffold(weights="n"), lambda: scaffold(server_lr=0.7), lambda: feddyn(2.0)],
    ids=["scaffold", "scaffold n", "scaffold lr", "feddyn"],
)
def test_corrected_drift_reaches_the_optimum_of_the_mean_loss(method, turns, tmp_path):
    made = curved(method(), CURVES, schedule=STEPS)
    state, _, keeps = cohorts(made, tmp_path, turns)
    assert value(state) == pytest.approx(OPTIMUM, abs=1e-4)
    # What a client keeps there is the gradient of its own loss.
    gradients = [2 * h * (OPTIMUM - m) for h, m in CURVES]
    assert corrections(keeps, torch.zeros(1)) == pytest.approx(gradients, abs=1e-3)
    assert float(state.memory["correction"]) == pytest.approx(0, abs=1e-3)


def test_uniform_and_weighted_scaffold_reach_different_optima(tmp_path):
    # Optima 1 (one sample) and 5 (three): the mean of clients is 3, that of samples 4.
    for weights, optimum in (("uniform", 3.0), ("n", 4.0)):
        made = on_quadratics(scaffold(weights=weights), [[1.0], [5.0] * 3], schedule=STEPS)
        state, _, _ = cohorts(made, tmp_path / weights, [[0, 1], [0], [1]] * 20)
        assert value(state) == pytest.approx(optimum, abs=1e-4)


# --- whatever is lost or repeated, the server's correction is the mean of the clients' ------------

WEIGHED = {
    "scaffold": (scaffold, [1, 1, 1, 1]),
    "scaffold n": (lambda: scaffold(weights="n"), [9, 12, 16, 10]),
    "feddyn": (lambda: feddyn(alpha=0.5), [1, 1, 1, 1]),
}
TURNS = [[0, 1, 2], [1, 2, 3], [0, 3], [0, 1, 2, 3], [2]]
FAULTS = {
    "none": {},
    "lost replies": {"lose_reply": lambda c, o: (c, o) in {(1, "1.0"), (0, "4.0"), (2, "5.0")}},
    "lost orders": {"lose_order": lambda c, o: (c, o) in {(1, "1.0"), (3, "2.0"), (2, "4.0")}},
    "twice": {"repeat": lambda c, o: True},
    "twice and lost": {
        "repeat": lambda c, o: True,
        "lose_reply": lambda c, o: (c, o) in {(1, "1.0"), (1, "2.0"), (3, "3.0")},
    },
    "sizes lost": {"lose_reply": lambda c, o: (c, o) in {(1, "init.0"), (3, "init.0"), (3, "2.0")}},
    "nobody": {"lose_reply": lambda c, o: o.startswith("3.")},
}


def check_mean(state, keeps, weights, members=None):
    correction = state.memory["correction"]
    own = torch.stack(corrections(keeps, correction)).double()
    shares = torch.tensor([float(w) for w in weights], dtype=torch.float64)
    if members is not None:
        shares[[c for c in keeps if c not in members]] = 0
    mean = (own * shares[:, None]).sum(0) / shares.sum()
    assert float(own.abs().max()) > 5e-3  # so that the tolerance is far below
    assert torch.allclose(correction.double(), mean, atol=1e-6)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", WEIGHED)
def test_whatever_is_lost_the_servers_correction_is_the_mean_of_the_clients(name, fault, tmp_path):
    factory, weights = WEIGHED[name]
    made = experiment(factory(), uneven(), schedule=PLAIN)

    def faulty(plan):
        return Faulty(Loop(plan), **FAULTS[fault])

    def look(state, keeps):
        check_mean(state, keeps, weights, state.groups)

    cohorts(made, tmp_path, TURNS, faulty, look)


@pytest.mark.parametrize("name", WEIGHED)
@pytest.mark.parametrize("settings", [{"cohort": 0.5}, {"privacy": Privacy(secure=True)}])
def test_a_whole_run_keeps_the_mean(settings, name, tmp_path):
    factory, weights = WEIGHED[name]
    schedule = {**PLAIN, "steps": 4} if "privacy" in settings else PLAIN
    made = experiment(factory(), uneven(), schedule=schedule, settings={"rounds": 3, **settings})
    result = execute(made, tmp_path)
    store = Store(result.plan.folder, result.plan.start.layout)
    keeps = {c: store.read(c, result.versions.get(c, "")) for c in range(4)}
    check_mean(result.state, keeps, weights)


# --- what goes around a method leaves the mean alone, or is refused -------------------------------

AROUND = {
    name: factory().pieces.around
    for name, factory in METHODS.items()
    if not required(factory) and getattr(factory().pieces, "around", None)
}
ROBUST = {"median", "trimmed-mean", "krum"}
BUDGET = {"stop": Ending(bytes=1e12)}  # adaptive-tau must have one


def test_pieces_that_go_around_others_are_known():
    assert {"fedavgm", "fedadam", "fedyogi", "adaptive-tau"} | ROBUST <= set(AROUND)


@pytest.mark.parametrize("around", sorted(AROUND))
@pytest.mark.parametrize("name", WEIGHED)
def test_whatever_goes_around_keeps_the_mean_or_is_refused(name, around, tmp_path):
    factory, weights = WEIGHED[name]
    if around in ROBUST:
        with pytest.raises(ConfigError, match=r"mean of its clients' own.*no robust mean can wrap"):
            AROUND[around](factory())
        return
    made = experiment(AROUND[around](factory()), uneven(), schedule=PLAIN, settings=BUDGET)
    cohorts(made, tmp_path, TURNS, None, lambda s, keeps: check_mean(s, keeps, weights))


def test_a_robust_mean_is_refused_by_name_too():
    with pytest.raises(ConfigError, match=r"^scaffold\+median keeps its correction at the mean"):
        make("scaffold+median", {})
    with pytest.raises(ConfigError, match=r"^feddyn\+krum keeps its correction at the mean"):
        make("feddyn+krum", {})


@pytest.mark.parametrize("side", ["up", "down"])
@pytest.mark.parametrize("codec", ["raw+zstd", "bf16", "qsgd", "topk:share=0.1"])
@pytest.mark.parametrize("name", WEIGHED)
def test_codecs_keep_the_mean_or_are_refused(name, codec, side, tmp_path):
    factory, weights = WEIGHED[name]
    settings = {"wire": Coding(**{side: codec})}
    made = experiment(factory(), uneven(), schedule=PLAIN, settings=settings)
    if name == "feddyn" and codec != "raw+zstd":
        words = rf"method feddyn .*'{codec}.* of wire\.{side} is lossy"
        with pytest.raises(ConfigError, match=words):
            drive(made, tmp_path)
        return
    state, channel, _ = drive(made, tmp_path)
    check_mean(state, kept(tmp_path, channel), weights)


@pytest.mark.parametrize("mechanism", ["local", "nbafl"])
@pytest.mark.parametrize("method", [scaffold, feddyn])
def test_noise_on_what_clients_send_is_refused(method, mechanism, tmp_path):
    settings = {"privacy": Privacy(mechanism=mechanism, epsilon=0.5, delta=1e-3)}
    with pytest.raises(ConfigError, match=f"mean of its clients' own.* = {mechanism} clips"):
        experiment(method(), schedule=PLAIN, settings=settings).plan(tmp_path)


def test_a_lossy_codec_of_one_layer_is_refused_too(tmp_path):
    settings = {"wire": Coding(layers={"head": "fp16"})}
    with pytest.raises(ConfigError, match=r"'fp16' of wire\.up is lossy\. Use raw"):
        experiment(feddyn(), settings=settings).plan(tmp_path)
    experiment(coterie.fedavg(), settings=settings).plan(tmp_path)


@pytest.mark.parametrize("name", WEIGHED)
def test_a_newcomer_shrinks_the_servers_correction_exactly(name, tmp_path):
    factory, weights = WEIGHED[name]
    made = experiment(factory(), uneven(), schedule=PLAIN, settings={"holdout": 1})
    state, channel, _ = drive(made, tmp_path)
    (new,) = made.newcomers
    assert sorted(state.groups) == made.members
    channel.begin(3, stage="admit")
    after = made.method.admit(channel, state, Round(3, [new]))
    total, more = sum(weights[c] for c in made.members), weights[new]
    assert torch.equal(
        after.memory["correction"], state.memory["correction"] * (total / (total + more))
    )
    assert after.groups == {**state.groups, new: 0}
    assert torch.equal(after.models[0].vector, state.models[0].vector)
    check_mean(after, kept(tmp_path, channel), weights)
    again = made.method.admit(channel, after, Round(3, [new]))
    assert torch.equal(again.memory["correction"], after.memory["correction"])
    channel.begin(4)
    later = made.method.round(channel, after, Round(4, [0, new]))
    check_mean(later, kept(tmp_path, channel), weights)


@pytest.mark.parametrize("method", [scaffold, feddyn])
def test_without_a_reply_nothing_moves(method, tmp_path):
    made = on_quadratics(method(), TWO, start=2.0)

    def mute(plan):
        return Faulty(Loop(plan), lose_reply=lambda c, o: True)

    state, _, keeps = cohorts(made, tmp_path, [[0, 1]] * 2, mute)
    assert value(state) == 2.0
    assert float(state.memory["correction"]) == 0
    assert all(not k for k in keeps.values())


# --- what is local is not corrected, what is frozen does not travel -------------------------------


def tilts(folder, method, **changes):
    """The gradient that the objective of each client of the second round adds at its start."""
    seen, original, sizes = {}, client_module.fit, (9, 12, 16, 10)

    def spy(model, training, criterion):
        start = training.start
        gradient = torch.zeros(start.layout.trainable)
        for penalty in training.objective.penalties:
            penalty.add_gradient(gradient, start.parameters, start.parameters)
        seen[sizes.index(len(training.data))] = gradient, start.layout
        return original(model, training, criterion)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_module, "fit", spy)
        made = experiment(method, uneven(), schedule=PLAIN, model=normed, **changes)
        state, channel, _ = drive(made, folder, Spy, rounds=2)
    return seen, state, channel, made


@pytest.mark.parametrize("method", [scaffold, feddyn])
def test_local_parameters_are_not_corrected_and_corrections_cover_the_others(method, tmp_path):
    seen, state, channel, made = tilts(tmp_path, method(), bn="local")
    keeps = kept(tmp_path, channel)
    local = {"2.weight", "2.bias"}
    for gradient, layout in seen.values():
        for entry in layout.entries[: len(layout.entries) - 2]:
            part = gradient[layout.spans[entry.name]]
            assert bool((part == 0).all()) == (entry.name in local)
    shared = 64 * 12 + 12 + 12 * 10 + 10
    assert state.memory["correction"].numel() == shared
    assert all(k["correction"].numel() == shared for k in keeps.values())
    assert len({m[64 * 12 + 12] for m in models(made, state, channel)}) == 4  # each its own scale


def test_the_tilt_is_the_servers_variate_minus_the_clients(tmp_path):
    seen, _, _, _ = tilts(tmp_path, scaffold())
    made = experiment(scaffold(), uneven(), schedule=PLAIN, model=normed)
    state, _, keeps = cohorts(made, tmp_path / "first", [[0, 1, 2, 3]])
    control = state.memory["correction"]
    assert len(seen) == 4
    for client, own in enumerate(corrections(keeps, control)):
        assert torch.allclose(seen[client][0], control - own, atol=1e-7)


@pytest.mark.parametrize("method", [scaffold, feddyn, fednova, moon])
def test_frozen_layers_stay_and_do_not_travel(method, tmp_path):
    made = experiment(method(), schedule=PLAIN, freeze=("hidden1",))
    state, channel, engine = drive(made, tmp_path, Spy, rounds=2)
    start = made.plan(tmp_path / "plan").start
    for vector in models(made, state, channel):
        assert torch.equal(vector[130:], start.vector[130:])
        assert not torch.equal(vector[:130], start.vector[:130])
    for seen in engine.seen:
        assert max(seen.payload) <= 4 * (2 * 130 + 1)
    for state in kept(tmp_path, channel).values():
        for array in state.values():
            assert getattr(array, "vector", array).numel() == 130


# --- what travels ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "down", "up"),
    [
        (scaffold, 2, 2),
        (lambda: scaffold(weights="n"), 2, 2),
        (feddyn, 1, 1),
        (fednova, 1, 1),
        (moon, 1, 1),
    ],
    ids=["scaffold", "scaffold n", "feddyn", "fednova", "moon"],
)
def test_models_that_travel(method, down, up, tmp_path):
    made = experiment(method(), schedule=PLAIN)
    _, channel, engine = drive(made, tmp_path, Spy, rounds=2)
    size = 4 * (64 * 12 + 12 + 12 * 10 + 10)
    rounds = [s for s in engine.seen if not s.order.startswith("init")]
    assert len(rounds) == 12
    for seen in rounds:
        assert seen.payload[0] == down * size
        assert seen.payload[1] - up * size in (0, 4)  # at most one number more
    assert channel.exposed == {"means"}


# --- MOON -----------------------------------------------------------------------------------------


def test_moon_pushes_away_from_the_clients_own_last_model_and_to_the_one_received(tmp_path):
    module = import_module("coterie.methods.moon")  # the package has the method by that name
    seen, original = [], module.contrastive
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            module, "contrastive", lambda *given: (seen.append(given), original(*given))[1]
        )
        made = experiment(moon(mu=2.0, temperature=0.3), digits(clients=2))
        first, _, keeps = cohorts(made, tmp_path / "1", [[0, 1]])
        own = [k["previous"] for k in keeps.values()]
        assert not seen  # a client's first round has nothing to leave
        cohorts(made, tmp_path / "2", [[0, 1], [1]])
    ((mu, temperature, towards, away),) = seen
    assert (mu, temperature) == (2.0, 0.3)
    assert torch.equal(towards.vector, first.models[0].vector)
    assert torch.equal(away.vector, own[1].vector)
    assert not torch.equal(own[0].vector, own[1].vector)


def test_moons_further_passes_leave_buffers_alone(tmp_path):
    # With a learning rate of 0 only the passes over the data move anything: the buffers.
    changes = {"model": normed, "schedule": {"lr": 1e-300}}
    ours = trained(moon(mu=5.0), tmp_path / "a", **changes)
    assert same_bits(ours, trained(coterie.fedavg(), tmp_path / "b", **changes))


def test_moon_turns_representations_to_the_global_model_from_the_last_local_one(tmp_path):
    def contrast(mu):
        """How much nearer to the model received than to its last one a client's model ends."""
        made = experiment(moon(mu=mu), digits(clients=2), schedule={"epochs": 5})
        first, _, before = cohorts(made, tmp_path / f"{mu} 1", [[0, 1]])
        _, _, after = cohorts(made, tmp_path / f"{mu} 2", [[0, 1]] * 2)
        body = made.fresh(0).eval()
        x, hidden = decode(made.population.clients[0].train.x), []
        for weights in (after[0]["previous"], first.models[0], before[0]["previous"]):
            body.load_state_dict(weights.tensors())
            hidden.append(nn.Sequential(*list(body.children())[:-1])(x).detach())
        mine, received, last = hidden
        gap = torch.cosine_similarity(mine, received) - torch.cosine_similarity(mine, last)
        return float(gap.mean())

    weak, strong = contrast(1e-6), contrast(5.0)
    assert strong > weak + 0.05


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "schedule", "words"),
    [
        (scaffold, {"momentum": 0.5}, r"momentum.*train\.momentum = 0"),
        (scaffold, {"momentum": 0.0, "optimizer": "Adam"}, "plain SGD, not for Adam"),
        (scaffold, {"momentum": 0.0, "options": {"dampening": 0.1}}, "dampening"),
        (fednova, {"optimizer": "AdamW"}, "plain SGD, not for AdamW"),
        (fednova, {"options": {"nesterov": True}}, "nesterov"),
    ],
)
def test_schedules_that_do_not_fit_are_refused_before_anything_is_trained(
    method, schedule, words, tmp_path
):
    with pytest.raises(ConfigError, match=words):
        experiment(method(), schedule=schedule).plan(tmp_path)
    assert not list(tmp_path.iterdir())


def test_schedules_that_fit_are_taken(tmp_path):
    experiment(fednova(), schedule={"optimizer": "SGD", "momentum": 0.9}).plan(tmp_path)
    experiment(scaffold(), schedule={"momentum": 0.0, "weight_decay": 0.1}).plan(tmp_path)
    experiment(feddyn(), schedule={"optimizer": "Adam", "momentum": 0.0}).plan(tmp_path)


def test_moon_needs_a_layer_before_the_last(tmp_path):
    flat = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10))  # noqa: E731
    with pytest.raises(ConfigError, match="only one layer"):
        experiment(moon(), model=flat).plan(tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: scaffold(server_lr=0.0),
        lambda: scaffold(weights="samples"),
        lambda: feddyn(alpha=0.0),
        lambda: moon(mu=-1.0),
        lambda: moon(temperature=0.0),
    ],
)
def test_parameters_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError):
        wrong()


# --- with another server --------------------------------------------------------------------------


@pytest.mark.parametrize("method", [scaffold, feddyn, fednova, moon])
def test_a_server_with_rate_one_and_no_momentum_changes_nothing(method, tmp_path):
    plain = trained(method(), tmp_path / "a", schedule=PLAIN)
    around = fedavgm(lr=1.0, momentum=0.0).pieces.around
    wrapped = trained(around(method()), tmp_path / "b", schedule=PLAIN)
    assert torch.allclose(torch.stack(plain), torch.stack(wrapped), atol=1e-6)


def test_krum_takes_all_of_one_clients_upload_together(tmp_path):
    method = krum().pieces.around(fednova())
    made = experiment(method, uneven((9, 12, 30, 20)), schedule=PLAIN, model=normed)
    state, _, engine = drive(made, tmp_path, Spy, rounds=1)
    found, end = state.models[0].vector, state.models[0].layout.trainable
    start = made.plan(tmp_path / "plan").start.parameters
    sent = {s.client: s.sent for s in engine.seen}
    landed = {c: start - s["model"].parameters * s["length"] for c, s in sent.items()}
    (best,) = [c for c, p in landed.items() if torch.allclose(p, found[:end], atol=1e-6)]
    assert torch.allclose(sent[best]["model"].vector[end:], found[end:], atol=1e-6)


@pytest.mark.parametrize("method", [scaffold, feddyn, fednova])
def test_no_layer_can_rest(method):
    with pytest.raises(ConfigError, match="layer_interval"):
        coterie.layer_wise(method(), 2)
    coterie.layer_wise(moon(), 2)
