"""Server optimisers and robust means: single steps and centres, and around whole methods."""

import math

import pytest
import torch
from torch import nn

import coterie
from coterie.compose.grouped import chosen, grouped
from coterie.compose.robust import (
    _Robust,
    coordinate_median,
    krum_row,
    trimmed,
    with_robust_aggregation,
)
from coterie.compose.server_optimizer import (
    KEY,
    adaptive_step,
    momentum_step,
    with_server_optimizer,
)
from coterie.core.messages import Reply, Upload
from coterie.core.method import Method, Round, State
from coterie.core.weights import Layout
from coterie.engines.loop import Loop
from coterie.errors import ConfigError
from coterie.methods.server_rules import fedadam, fedavgm, fedyogi, krum, median, trimmed_mean
from faulty import Faulty
from scripted import Scripted, linears, weights
from support import digits, drive, experiment, models, on_quadratics

LINE = linears((1, 1))  # two numbers: a weight and a bias


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


# --- steps by hand --------------------------------------------------------------------------------


def test_momentum_by_hand():
    # β = 0.5, η = 0.1: v = 4, moves 0.4; v = 2 − 1 = 1, moves 0.1; v = 0.5 + 0, moves 0.05.
    step, kept = momentum_step(0.1, 0.5), {}
    for change, moves, velocity in ((4.0, 0.4, 4.0), (-1.0, 0.1, 1.0), (0.0, 0.05, 0.5)):
        moved, kept = step(numbers(change), kept)
        assert moved.tolist() == pytest.approx([moves])
        assert kept["v"].tolist() == pytest.approx([velocity])


def test_no_momentum_remembers_nothing():
    moved, kept = momentum_step(1.0, 0.0)(numbers(3.0, -2.0), {})
    assert moved.tolist() == [3.0, -2.0]
    assert kept == {}


def test_adam_by_hand():
    # β₁ = 0.5, β₂ = 0.75, τ = 0.5, η = 2; m = 0 and v = τ² = 0.25 at first.
    # Δ = 2: m = 1, v = 0.1875 + 1 = 1.1875. Δ = −1: m = 0, v = 0.890625 + 0.25 = 1.140625.
    # Δ = −1 again: m = −0.5, v = 0.85546875 + 0.25 = 1.10546875.
    step, kept = adaptive_step(2.0, 0.5, 0.75, 0.5, yogi=False), {}
    for change, m, v in ((2.0, 1.0, 1.1875), (-1.0, 0.0, 1.140625), (-1.0, -0.5, 1.10546875)):
        moved, kept = step(numbers(change), kept)
        assert kept["m"].tolist() == pytest.approx([m])
        assert kept["v"].tolist() == pytest.approx([v])
        assert moved.tolist() == pytest.approx([2 * m / (math.sqrt(v) + 0.5)])


def test_yogi_by_hand():
    # As above, v moving by a quarter of Δ² towards it: 0.25 + 1 = 1.25 (Δ² = 4 is above);
    # 1.25 − 0.25 = 1 (Δ² = 1 is below); 1 − 0 = 1 (Δ² = 1 is just there); 1 − 0.0625 = 0.9375.
    step, kept = adaptive_step(2.0, 0.5, 0.75, 0.5, yogi=True), {}
    by_hand = ((2.0, 1.0, 1.25), (-1.0, 0.0, 1.0), (-1.0, -0.5, 1.0), (0.5, 0.0, 0.9375))
    for change, m, v in by_hand:
        moved, kept = step(numbers(change), kept)
        assert kept["m"].tolist() == pytest.approx([m])
        assert kept["v"].tolist() == pytest.approx([v])
        assert moved.tolist() == pytest.approx([2 * m / (math.sqrt(v) + 0.5)])


def test_steps_treat_coordinates_apart_and_leave_their_inputs_alone():
    for step in (
        momentum_step(0.1, 0.9),
        adaptive_step(0.1, 0.9, 0.99, 1e-3, yogi=False),
        adaptive_step(0.1, 0.9, 0.99, 1e-3, yogi=True),
    ):
        change = numbers(1.0, -3.0)
        _, kept = step(change, {})
        copies = {k: v.clone() for k, v in kept.items()}
        moved, _ = step(change, kept)
        assert change.tolist() == [1.0, -3.0]
        assert all(torch.equal(kept[k], v) for k, v in copies.items())
        for i in range(2):
            _, alone = step(change[i : i + 1], {})
            assert torch.equal(step(change[i : i + 1], alone)[0], moved[i : i + 1])


# --- centres by hand ------------------------------------------------------------------------------


def test_the_median_of_each_coordinate():
    rows = torch.tensor([[1.0, 9.0], [5.0, 2.0], [3.0, 4.0]])
    assert coordinate_median(rows).tolist() == [3.0, 4.0]
    more = torch.cat([rows, torch.tensor([[100.0, -100.0]])])
    assert coordinate_median(more).tolist() == [4.0, 3.0]  # (3 + 5)/2 and (2 + 4)/2
    assert coordinate_median(rows[:1]).tolist() == [1.0, 9.0]


def test_the_trimmed_mean_of_each_coordinate():
    rows = torch.tensor([[1.0, 50.0], [2.0, 4.0], [6.0, 5.0], [4.0, 6.0], [900.0, -70.0]])
    assert trimmed(0.2)(rows).tolist() == [4.0, 5.0]  # (2 + 6 + 4)/3 and (4 + 5 + 6)/3
    assert trimmed(0.4)(rows).tolist() == [4.0, 5.0]  # two off each end: the median
    assert trimmed(0.39)(rows).tolist() == [4.0, 5.0]  # rounded down to one
    assert trimmed(0.19)(rows).tolist() == pytest.approx([182.6, -1.0])  # to none: the mean


def test_rounding_down_differs_from_rounding():
    rows = torch.tensor([[0.0], [1.0], [2.0], [9.0]])
    assert trimmed(0.45)(rows).tolist() == [1.5]  # one of four, not two
    assert trimmed(0.2)(rows).tolist() == [3.0]  # none


def test_krum_by_hand():
    # n = 5, f = 1: two nearest others each. Rows at 0, 1, 3, 4, 50 on a line:
    # 0: 1 + 9 = 10; 1: 1 + 4 = 5; 3: 1 + 4 = 5, after 1; 4: 1 + 9 = 10; 50: 46² + 47².
    rows = torch.tensor([[0.0], [1.0], [3.0], [4.0], [50.0]])
    assert krum_row(0.2)(rows).tolist() == [1.0]
    # f = 0: three nearest. 0: 1 + 9 + 16 = 26; 1: 1 + 4 + 9 = 14; 3: 1 + 4 + 9 = 14.
    assert krum_row(0.0)(rows).tolist() == [1.0]
    # f = 2: the nearest one decides; 0, 1, 3, 4 all have one at 1: the first.
    assert krum_row(0.4)(rows).tolist() == [0.0]


def test_krum_counts_so_many_neighbours_as_the_paper():
    # Rows 0, 0.1, 5, 6, 7, 8: with n − f − 2 = 3 neighbours (f = 1) 6 wins (1 + 1 + 4),
    # with one neighbour (f = 3, just below half) the pair at 0.
    rows = torch.tensor([[0.0], [0.1], [5.0], [6.0], [7.0], [8.0]])
    assert krum_row(0.2)(rows).tolist() == [6.0]
    assert krum_row(0.499)(rows[:-1]).tolist() == [0.0]


def test_krum_sums_squares_of_distances():
    # Two nearest each: in the triangle 9 + 9; in the row 1 + 20.25 for the middle one, though its
    # plain distances (1 + 4.5) are less than the triangle's (3 + 3).
    triangle = [[0.0, 0.0], [3.0, 0.0], [1.5, 6.75**0.5]]
    row = [[100.0, 0.0], [101.0, 0.0], [105.5, 0.0]]
    assert krum_row(0.34)(torch.tensor(triangle + row))[0] < 50


def test_krum_among_one_or_two_is_one_of_them():
    rows = torch.tensor([[3.0], [8.0]])
    assert krum_row(0.3)(rows[:1]).tolist() == [3.0]
    assert krum_row(0.3)(rows).tolist() == [3.0]


@pytest.mark.parametrize("centre", [coordinate_median, trimmed(0.2), krum_row(0.2)])
def test_centres_do_not_depend_on_the_order_of_rows(centre):
    rows = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    turned = rows[torch.tensor([3, 0, 4, 2, 1])]
    assert torch.allclose(centre(rows), centre(turned), atol=1e-6)


# --- around a method, with replies by hand --------------------------------------------------------


def ask(method, script, state, rounds=1, clients=3, **more):
    """Rounds of a method with replies by script: the state, and what was asked."""
    fed = Scripted(script, range(clients), **more)
    for number in range(rounds):
        state = method.round(fed, state, Round(number, list(range(clients))))
    return state, fed


def replies(**by_client):
    """A script: each client (c0, c1, ...) answers with a model of these two numbers, or not."""

    def script(order):
        result = by_client.get(f"c{order.client}")
        return None if result is None else Upload({"model": weights(LINE, *result)}, {"loss": 0.0})

    return script


def begun(clients=3):
    """One group at (0, 0)."""
    return State({0: weights(LINE, 0, 0)}, dict.fromkeys(range(clients), 0))


def test_a_step_goes_from_the_old_model_by_the_change_of_the_mean():
    # Two rounds in which the mean is (3, −3), by samples 1, 1, 2. η = 0.5, β = 0.5:
    # Δ = (3, −3), v = Δ, θ = (1.5, −1.5); Δ = (1.5, −1.5), v = (3, −3), θ = (3, −3).
    script = replies(c0=(2, -2), c1=(4, -4), c2=(3, -3))
    method = with_server_optimizer(grouped("x"), momentum_step(0.5, 0.5))
    state, _ = ask(method, script, begun(), examples={2: 2})
    assert state.models[0].vector.tolist() == pytest.approx([1.5, -1.5])
    assert state.memory[KEY][0]["v"].tolist() == pytest.approx([3, -3])
    state, _ = ask(method, script, begun(), rounds=2, examples={2: 2})
    assert state.models[0].vector.tolist() == pytest.approx([3, -3])


def test_a_round_that_nobody_answers_keeps_model_and_memory():
    method = with_server_optimizer(grouped("x"), momentum_step(1.0, 0.5))
    first, _ = ask(method, replies(c0=(2, 2)), begun())
    idle, _ = ask(method, replies(), first)
    assert torch.equal(idle.models[0].vector, first.models[0].vector)
    assert idle.memory[KEY][0]["v"].tolist() == [2, 2]
    again, _ = ask(method, replies(c0=(2, 2)), idle)
    assert again.models[0].vector.tolist() == [3, 3]  # v = 0.5·2 + 0, as if never interrupted


def two_groups():
    return State({0: weights(LINE, 0, 0), 1: weights(LINE, 10, 10)}, {0: 0, 1: 0, 2: 1})


def test_every_slot_has_a_memory_of_its_own_and_keeps_it_when_unanswered():
    method = with_server_optimizer(grouped("x"), momentum_step(1.0, 0.5))
    both, _ = ask(method, replies(c0=(2, 2), c1=(4, 4), c2=(11, 11)), two_groups())
    assert both.memory[KEY][0]["v"].tolist() == [3, 3]
    assert both.memory[KEY][1]["v"].tolist() == [1, 1]
    one, _ = ask(method, replies(c0=(3, 3)), both)  # group 1 does not answer
    assert torch.equal(one.models[1].vector, both.models[1].vector)
    assert one.memory[KEY][1]["v"].tolist() == [1, 1]
    assert one.memory[KEY][0]["v"].tolist() == [1.5, 1.5]
    assert one.models[0].vector.tolist() == [4.5, 4.5]
    back, _ = ask(method, replies(c2=(11, 11)), one)
    assert back.memory[KEY][1]["v"].tolist() == [0.5, 0.5]


def test_a_new_model_begins_with_no_memory_and_one_that_is_gone_is_forgotten():
    def regroup(fed, state, info):
        return State({1: weights(LINE, 7, 7)}, {0: 1})

    inner = Method("x", None, regroup, None, {}, None)
    method = with_server_optimizer(inner, momentum_step(0.1, 0.5))
    kept = {KEY: {0: {"v": numbers(1.0, 1.0)}}, "other": 3}
    state = method.round(None, State({0: weights(LINE, 0, 0)}, {0: 0}, kept), Round(0, [0]))
    assert state.models[1].vector.tolist() == [7, 7]  # taken as it is
    assert state.memory[KEY] == {}


def test_the_rest_of_the_memory_is_the_methods_own():
    def remember(fed, state, info):
        return State({0: weights(LINE, 1, 1)}, {0: 0}, {**state.memory, "mine": info.number})

    method = with_server_optimizer(
        Method("x", None, remember, None, {}, None), momentum_step(1.0, 0.9)
    )
    state = method.round(None, begun(1), Round(5, [0]))
    assert state.memory["mine"] == 5
    assert set(state.memory) == {"mine", KEY}


def test_buffers_become_the_mean_whatever_the_step():
    layout = Layout.of(nn.BatchNorm1d(1))  # weight, bias, running mean, running variance
    start = State({0: weights(layout, 0, 0, 0, 1)}, {0: 0})
    upload = Upload({"model": weights(layout, 2, 4, 6, 8)})
    method = with_server_optimizer(grouped("x"), momentum_step(0.5, 0.0))
    state = method.round(Scripted(lambda o: upload, range(1)), start, Round(0, [0]))
    assert state.models[0].vector.tolist() == [1, 2, 6, 8]


def test_states_that_were_given_are_not_changed():
    method = with_server_optimizer(grouped("x"), momentum_step(1.0, 0.5))
    first, _ = ask(method, replies(c0=(2, 2)), begun())
    before = first.models[0].vector.clone(), first.memory[KEY][0]["v"].clone()
    ask(method, replies(c0=(5, 5)), first)
    assert torch.equal(first.models[0].vector, before[0])
    assert torch.equal(first.memory[KEY][0]["v"], before[1])


# --- robust means, with replies by hand -----------------------------------------------------------

SANE = {"c0": (1.0, 1.0), "c1": (1.2, 0.8), "c2": (0.9, 1.1), "c3": (1.2, 1.2)}
NONSENSE = {**SANE, "c4": (1e30, -1e30)}


@pytest.mark.parametrize(
    "method", [median, lambda: trimmed_mean(share=0.2), lambda: krum(share=0.2)]
)
def test_one_client_that_sends_nonsense_moves_nothing_far(method):
    sane, _ = ask(coterie.fedavg(), replies(**SANE), begun(5), clients=5)
    state, _ = ask(method(), replies(**NONSENSE), begun(5), clients=5)
    assert (state.models[0].vector - sane.models[0].vector).abs().max() < 0.3
    lost, _ = ask(coterie.fedavg(), replies(**NONSENSE), begun(5), clients=5)
    assert lost.models[0].vector.abs().max() > 1e28


def test_robust_means_by_hand():
    expected = {
        median: (1.2, 1.0),  # 0.9 1.0 1.2 1.2 1e30; −1e30 0.8 1.0 1.1 1.2
        lambda: trimmed_mean(share=0.2): (3.4 / 3, 2.9 / 3),
        # Two nearest others: c0 0.02 + 0.08, c1 0.08 + 0.16, c2 0.02 + 0.10, c3 0.08 + 0.10.
        lambda: krum(share=0.2): (1.0, 1.0),
    }
    for method, found in expected.items():
        state, _ = ask(method(), replies(**NONSENSE), begun(5), clients=5)
        assert state.models[0].vector.tolist() == pytest.approx(list(found), abs=1e-6)


@pytest.mark.parametrize("method", [median, trimmed_mean, krum])
def test_every_client_counts_the_same_whatever_its_samples(method):
    few, _ = ask(method(), replies(**SANE), begun(4), clients=4)
    many, _ = ask(method(), replies(**SANE), begun(4), clients=4, examples={3: 1000})
    assert torch.equal(few.models[0].vector, many.models[0].vector)


@pytest.mark.parametrize("method", [median, trimmed_mean, krum])
def test_the_server_gathers_and_says_so(method):
    _, fed = ask(method(), replies(**SANE), begun(4), clients=4)
    assert [kind for kind, _, _ in fed.asked] == ["gather"]
    assert method().sees == "each"
    with pytest.raises(ConfigError, match="local shares nothing"):
        method().pieces.around(coterie.local())


def test_centres_are_taken_in_each_slot():
    script = replies(c0=(1, 1), c1=(3, 3), c2=(100, 100))
    state, _ = ask(with_robust_aggregation(grouped("x"), coordinate_median), script, two_groups())
    assert state.models[0].vector.tolist() == [2, 2]
    assert state.models[1].vector.tolist() == [100, 100]
    state, _ = ask(
        with_robust_aggregation(grouped("x"), coordinate_median), replies(c0=(1, 1)), two_groups()
    )
    assert state.models[1].vector.tolist() == [10, 10]  # nobody answered: it stays


def _reply(client, number, more, slot=0.0):
    arrays = {"model": weights(LINE, number, number), "more": torch.tensor([more])}
    return Reply(client, 1, arrays, {"slot": slot, "loss": float(number)})


def test_all_arrays_have_a_centre_and_metrics_are_plain_means():
    answers = [_reply(0, 1, 30.0), _reply(1, 2, 10.0), _reply(2, 9, 20.0)]
    into = {c: {0: 1.0} for c in range(3)}
    mean = _Robust(None, coordinate_median, whole=False).average(answers, into)[0]
    assert mean.arrays["model"].vector.tolist() == [2, 2]
    assert mean.arrays["more"].tolist() == [20]
    assert (mean.clients, mean.examples) == ((0, 1, 2), 3)
    assert mean.metrics["loss"] == 4


def test_krum_takes_one_clients_arrays_together():
    answers = [_reply(0, 1, 30.0), _reply(1, 2, 10.0), _reply(2, 9, 20.0), _reply(3, 2.5, 70.0)]
    into = {c: {0: 1.0} for c in range(4)}
    mean = _Robust(None, krum_row(0.0), whole=True).average(answers, into)[0]
    # Two nearest: 1: 1 + 2.25; 2: 0.25 + 1 (per coordinate); 2.5: 0.25 + 2.25.
    assert mean.arrays["model"].vector.tolist() == [2, 2]
    assert mean.arrays["more"].tolist() == [10]


def test_slots_that_clients_choose_have_centres_too():
    answers = [_reply(c, n, 0.0, s) for c, n, s in ((0, 1, 0), (1, 3, 1), (2, 5, 1), (3, 90, 1))]
    means = _Robust(None, coordinate_median, whole=False).average(answers, chosen("slot"))
    assert means[0].arrays["model"].vector.tolist() == [1, 1]
    assert means[1].arrays["model"].vector.tolist() == [5, 5]


def test_mixing_in_shares_is_refused():
    fed = _Robust(Scripted(replies(**SANE), range(4)), coordinate_median, whole=False)
    shares = {0: {0: 0.5, 1: 0.5}}
    for mean in (lambda: fed.reduce([], shares), lambda: fed.average([], shares)):
        with pytest.raises(ConfigError, match="mixes models with weights"):
            mean()
    assert fed.fed.asked == []  # before anybody has been asked
    fed.reduce([], {0: {0: 1.0, 1: 0.0}})  # all or nothing is no share


@pytest.mark.parametrize("method", [median, trimmed_mean, krum])
def test_user_centric_with_a_robust_mean_is_refused(method):
    with pytest.raises(ConfigError, match="mixes models with weights"):
        method().pieces.around(coterie.user_centric())


def test_a_rule_that_looks_at_replies_still_sees_each():
    fed = _Robust(Scripted(replies(**SANE), range(4)), coordinate_median, whole=False)
    assert list(fed.clients) == [0, 1, 2, 3]
    assert fed.gather([]) == []


# --- whole runs -----------------------------------------------------------------------------------


def trained(method, folder, **changes):
    made = experiment(method, **changes)
    state, channel, _ = drive(made, folder)
    return torch.stack(models(made, state, channel))


def normed():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 10)
    )


@pytest.mark.parametrize("inner", [coterie.fedavg, lambda: coterie.ifca(k=2), coterie.fedper])
@pytest.mark.parametrize("network", [None, normed])
def test_rate_one_without_momentum_is_the_method_itself(inner, network, tmp_path):
    changes = {"model": network} if network else {}
    around = fedavgm(lr=1.0, momentum=0.0).pieces.around
    ours = trained(around(inner()), tmp_path / "a", **changes)
    assert torch.allclose(ours, trained(inner(), tmp_path / "b", **changes), atol=1e-6)


def test_fedavgm_itself_is_fedavg_then(tmp_path):
    ours = trained(fedavgm(lr=1.0, momentum=0.0), tmp_path / "a")
    assert torch.allclose(ours, trained(coterie.fedavg(), tmp_path / "b"), atol=1e-6)
    assert not torch.allclose(trained(fedavgm(), tmp_path / "c"), ours, atol=1e-3)


def value(method, folder, rounds, targets=((10.0,),)):
    made = on_quadratics(method, [list(t) for t in targets])
    return float(drive(made, folder, rounds=rounds)[0].models[0].vector)


def test_fedavgm_two_rounds_by_hand(tmp_path):
    # A client's step is 0.2(10 − θ). β = 0.5, η = 0.5: Δ = 2, v = 2, θ = 1;
    # Δ = 1.8, v = 1 + 1.8 = 2.8, θ = 2.4.
    method = fedavgm(lr=0.5, momentum=0.5)
    assert value(method, tmp_path / "1", 1) == pytest.approx(1.0, abs=1e-6)
    assert value(method, tmp_path / "2", 2) == pytest.approx(2.4, abs=1e-6)


def test_fedadam_two_rounds_by_hand(tmp_path):
    # Optima 5 and 15, a sample each: Δ = 0.2(10 − θ). β₁ = 0.5, β₂ = 0.75, τ = 0.5, η = 0.5.
    # Δ = 2: m = 1, v = 0.75·0.25 + 0.25·4 = 1.1875, θ = 0.5/(√1.1875 + 0.5) = 0.31452.
    # Δ = 1.93710: m = 0.5 + 0.96855, v = 0.890625 + 0.25·3.75234 = 1.82871;
    # θ = 0.31452 + 0.5·1.46855/(1.35230 + 0.5) = 0.31452 + 0.39641.
    method = fedadam(lr=0.5, beta1=0.5, beta2=0.75, tau=0.5)
    optima = ((5.0,), (15.0,))
    assert value(method, tmp_path / "1", 1, optima) == pytest.approx(0.31452, abs=1e-5)
    assert value(method, tmp_path / "2", 2, optima) == pytest.approx(0.71093, abs=2e-5)


def test_fedyogi_two_rounds_by_hand(tmp_path):
    # As above with v = 0.25 + 0.25·4 = 1.25, θ = 0.5/(1.11803 + 0.5) = 0.30902;
    # Δ = 1.93820: m = 1.46910, v = 1.25 + 0.25·3.75661 = 2.18915;
    # θ = 0.30902 + 0.5·1.46910/(1.47958 + 0.5) = 0.30902 + 0.37106.
    method = fedyogi(lr=0.5, beta1=0.5, beta2=0.75, tau=0.5)
    optima = ((5.0,), (15.0,))
    assert value(method, tmp_path / "1", 1, optima) == pytest.approx(0.30902, abs=1e-5)
    assert value(method, tmp_path / "2", 2, optima) == pytest.approx(0.68008, abs=2e-5)


def test_median_of_runs_by_hand(tmp_path):
    # Optima 1, 2 and 100, the last with most samples: the median client decides, every round.
    targets = ((1.0,), (2.0,), (100.0,) * 9)
    assert value(median(), tmp_path, 60, targets) == pytest.approx(2.0, abs=1e-4)


def test_a_lost_reply_costs_an_optimiser_nothing(tmp_path):
    made = on_quadratics(fedavgm(lr=0.5, momentum=0.5), [[10.0]])

    def lossy(plan):  # the second of three rounds is lost
        return Faulty(Loop(plan), lose_reply=lambda c, o: o == "2.0")

    state, _, _ = drive(made, tmp_path, lossy, rounds=3)
    assert float(state.models[0].vector) == pytest.approx(2.4, abs=1e-6)


def test_groups_move_by_memories_of_their_own(tmp_path):
    made = experiment(fedavgm().pieces.around(coterie.oracle()), digits())
    state, _, _ = drive(made, tmp_path)
    first, second = (state.memory[KEY][slot]["v"] for slot in (0, 1))
    assert not torch.allclose(first, second, atol=1e-3)
