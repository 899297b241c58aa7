"""Known optima and numbers worked by hand.

A client's loss is the mean of (θ − y)², so a full-batch step with lr 0.1 is θ ← θ − 0.2(θ − ȳ):
the distance to the client's mean shrinks to 0.8 of itself.
"""

import pytest

import coterie
from support import drive, models, on_quadratics


def value(experiment, folder, rounds=None):
    state, channel, _ = drive(experiment, folder, rounds=rounds)
    return [float(m) for m in models(experiment, state, channel)]


def test_fedavg_two_rounds_by_hand(tmp_path):
    # Means 1 (one sample) and 5 (three samples), weights 1/4 and 3/4, two steps a round: ×0.64.
    # Round 1 from 0: 1 − 0.64 = 0.36 and 5 − 3.2 = 1.8, mean 0.09 + 1.35 = 1.44.
    # Round 2: 1 + 0.44·0.64 = 1.2816 and 5 − 3.56·0.64 = 2.7216, mean 0.3204 + 2.0412 = 2.3616.
    made = on_quadratics(coterie.fedavg(), [[1.0], [4.0, 5.0, 6.0]], schedule={"epochs": 2})
    assert value(made, tmp_path / "1", rounds=1)[0] == pytest.approx(1.44, abs=1e-6)
    assert value(made, tmp_path / "2", rounds=2)[0] == pytest.approx(2.3616, abs=1e-6)


def test_fedavg_of_single_steps_reaches_the_global_optimum(tmp_path):
    # One full-batch step a round is gradient descent on all samples: the optimum is their mean.
    made = on_quadratics(coterie.fedavg(), [[1.0], [4.0, 5.0, 6.0]])
    assert value(made, tmp_path, rounds=80) == pytest.approx([4.0, 4.0], abs=1e-5)


def test_local_reaches_each_clients_own_optimum(tmp_path):
    made = on_quadratics(coterie.local(), [[1.0], [4.0, 5.0, 6.0]])
    assert value(made, tmp_path, rounds=80) == pytest.approx([1.0, 5.0], abs=1e-5)


def test_momentum_starts_at_zero_in_each_round(tmp_path):
    # Momentum 0.5, two steps from 0 towards 10 with lr 0.1: gradients −20 then −16 (θ = 2).
    # v1 = −20, θ = 2; v2 = −10 − 16 = −26, θ = 4.6. Next round: −10.8, θ = 5.68; v = −5.4 − 8.64,
    # θ = 7.084. A buffer kept over the rounds would give 6.98 after the first step of round 2.
    made = on_quadratics(coterie.local(), [[10.0]], schedule={"epochs": 2, "momentum": 0.5})
    assert value(made, tmp_path / "1", rounds=1)[0] == pytest.approx(4.6, abs=1e-5)
    assert value(made, tmp_path / "2", rounds=2)[0] == pytest.approx(7.084, abs=1e-5)


def test_learning_rate_decays_by_round(tmp_path):
    # lr 0.1 then 0.05: 0 → 2, then 2 − 0.05·2·(2 − 10) = 2.8.
    made = on_quadratics(coterie.local(), [[10.0]], schedule={"lr_decay": 0.5})
    assert value(made, tmp_path, rounds=2)[0] == pytest.approx(2.8, abs=1e-6)


def test_clipping_bounds_the_step(tmp_path):
    # The gradient at 0 is −20, clipped to norm 1: θ = 0.1.
    made = on_quadratics(coterie.local(), [[10.0]], schedule={"clip": 1.0})
    assert value(made, tmp_path, rounds=1)[0] == pytest.approx(0.1, abs=1e-6)


def test_weight_decay_pulls_to_zero(tmp_path):
    # At the optimum of (θ − 10)² + w/2·θ² with w = 2: 2(θ − 10) + 2θ = 0, θ = 5.
    made = on_quadratics(coterie.local(), [[10.0]], schedule={"weight_decay": 2.0, "epochs": 60})
    assert value(made, tmp_path, rounds=1)[0] == pytest.approx(5.0, abs=1e-5)


@pytest.mark.parametrize("epochs", [9, 1])
def test_steps_are_exactly_so_many_whatever_the_epochs(tmp_path, epochs):
    made = on_quadratics(coterie.local(), [[10.0]], schedule={"epochs": epochs, "steps": 2})
    assert value(made, tmp_path, rounds=1)[0] == pytest.approx(3.6, abs=1e-6)


def test_fedprox_stops_between_its_optimum_and_what_it_received(tmp_path):
    # Many steps reach argmin (θ − 10)² + μ/2·(θ − 4)² = (2·10 + 4μ)/(2 + μ): μ = 2 gives 7.
    made = on_quadratics(coterie.fedprox(mu=2.0), [[10.0]], start=4.0, schedule={"epochs": 100})
    assert value(made, tmp_path, rounds=1)[0] == pytest.approx(7.0, abs=1e-5)


def test_ifca_finds_the_groups_and_an_unchosen_model_stays(tmp_path):
    # θ⁰ = 0 and one further model drawn at 8: clients around 1 and around 9 part at once.
    made = on_quadratics(coterie.ifca(k=2), [[1.0], [9.0], [1.2], [9.2]])
    made_fresh = [0.0, 8.0]
    object.__setattr__(made, "model", lambda: _constant(made_fresh))
    state, channel, _ = drive(made, tmp_path, rounds=60)
    assert state.groups == {0: 0, 1: 1, 2: 0, 3: 1}
    assert [float(m) for m in models(made, state, channel)] == pytest.approx(
        [1.1, 9.1, 1.1, 9.1], abs=1e-4
    )


def test_ifca_model_that_nobody_chooses_keeps_its_weights(tmp_path):
    made = on_quadratics(coterie.ifca(k=2), [[1.0], [1.2]])
    object.__setattr__(made, "model", lambda: _constant([0.0, 100.0]))
    state, _, _ = drive(made, tmp_path, rounds=3)
    assert float(state.models[1].vector) == 100.0
    assert set(state.groups.values()) == {0}


def _constant(values):
    """Modules that start at these values, told apart by the seed that draws them."""
    import torch

    from coterie.seeds import seed_for
    from support import Constant

    seeds = {seed_for(0, "init", stream=str(i)): v for i, v in enumerate(values)}
    return Constant(seeds[torch.initial_seed()])


def test_oracle_trains_each_true_group_by_itself(tmp_path):
    from support import quadratics, with_groups

    people = with_groups(quadratics([[1.0], [9.0], [3.0]]), [0, 1, 0])
    made = on_quadratics(coterie.oracle(), [], population=people)
    assert value(made, tmp_path, rounds=80) == pytest.approx([2.0, 9.0, 2.0], abs=1e-5)


def test_any_torch_optimiser_by_name(tmp_path):
    # Adam's first step is lr·sign of the gradient, here 0.1 towards 10.
    made = on_quadratics(coterie.local(), [[10.0]], schedule={"optimizer": "Adam"})
    assert value(made, tmp_path, rounds=1)[0] == pytest.approx(0.1, abs=1e-5)
