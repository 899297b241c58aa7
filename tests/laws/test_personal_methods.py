"""Personal models: where they must coincide with something simpler, and optima known by hand."""

import pytest
import torch
from torch import nn

import coterie
from coterie.compose.grouped import combined
from coterie.data import ClientData, Population, Split
from coterie.experiment.experiment import cohort
from coterie.methods.fedfomo import fedfomo
from coterie.methods.meta import apfl, per_fedavg, pfedme
from coterie.methods.personal import ditto, fedrep, lg_fedavg
from scripted import Spy
from support import drive, experiment, models, on_quadratics, same_bits

cohorts = pytest.mark.parametrize(
    "settings", [{"rounds": 3}, {"rounds": 4, "cohort": 0.5}], ids=["all", "half"]
)


def trained(method, folder, **changes):
    made = experiment(method, **changes)
    state, channel, _ = drive(made, folder)
    return state, models(made, state, channel)


def values(made, folder, rounds=None):
    state, channel, _ = drive(made, folder, rounds=rounds)
    return state, [float(m) for m in models(made, state, channel)]


def global_model(state):
    return float(state.models[0].vector)


def took_part(settings):
    made = experiment(coterie.fedavg(), settings=settings)
    rounds = range(settings["rounds"])
    return {c for r in rounds for c in cohort(made.settings, r, made.members)}


class Line(nn.Module):
    """Answers θ·x, so that a client's x decides how curved its loss is: f'' = 2x²."""

    def __init__(self):
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.theta * x[:, 0]


def on_lines(method, samples, **changes):
    """A client a pair (x, m): its loss is x²(θ − m)². Full-batch steps, one a round."""
    people = []
    for x, m in samples:
        split = Split(torch.tensor([[x]]), torch.tensor([x * m]))
        people.append(ClientData(split, split, split))
    population = Population(tuple(people), "table", (1,), None, 1)
    made = on_quadratics(method, [], population=population, **changes)
    object.__setattr__(made, "model", Line)
    return made


# --- where they coincide with FedAvg or training alone, to the bit -------------------------------


@cohorts
@pytest.mark.parametrize(
    "method",
    [lambda: ditto(), lambda: ditto(lam=3.0), lambda: apfl(), lambda: apfl(alpha=1.0, learn=False)],
    ids=["ditto", "ditto 3", "apfl", "apfl alone"],
)
def test_the_global_model_is_that_of_fedavg(method, settings, tmp_path):
    ours, used = trained(method(), tmp_path / "a", settings=settings)
    theirs, plain = trained(coterie.fedavg(), tmp_path / "b", settings=settings)
    assert torch.equal(ours.models[0].vector, theirs.models[0].vector)
    assert not same_bits(used, plain)


@cohorts
@pytest.mark.parametrize(
    "method",
    [lambda: lg_fedavg(g=2), lambda: apfl(alpha=0.0, learn=False)],
    ids=["lg-fedavg, all layers", "apfl, nothing of one's own"],
)
def test_the_limit_is_fedavg(method, settings, tmp_path):
    ours = trained(method(), tmp_path / "a", settings=settings)[1]
    theirs = trained(coterie.fedavg(), tmp_path / "b", settings=settings)[1]
    assert same_bits(ours, theirs)


def test_apfl_with_all_its_own_is_training_alone(tmp_path):
    ours = trained(apfl(alpha=1.0, learn=False), tmp_path / "a")[1]
    theirs = trained(coterie.local(), tmp_path / "b")[1]
    assert same_bits(ours, theirs)


@cohorts
def test_fedrep_with_every_layer_personal_is_training_alone(settings, tmp_path):
    method = fedrep(k=2, head_epochs=2)
    ours = trained(method, tmp_path / "a", settings=settings)[1]
    theirs = trained(coterie.local(), tmp_path / "b", settings=settings, schedule={"epochs": 2})[1]
    assert same_bits(ours, theirs)


def test_pfedme_with_one_step_of_one_over_lambda_is_fedavg(tmp_path):
    # θ = w − ∇f(w)/λ, so λ(w − θ) is the gradient itself: the same batches, the same dropout.
    method = pfedme(lam=2.0, inner_steps=1, personal_lr=0.5)
    ours = trained(method, tmp_path / "a", settings={"rounds": 1})[0].models[0]
    theirs = trained(coterie.fedavg(), tmp_path / "b", settings={"rounds": 1})[0].models[0]
    assert torch.allclose(ours.vector, theirs.vector, atol=1e-6)


def test_per_fedavg_without_an_inner_step_is_fedavg_at_its_outer_rate(tmp_path):
    people = [[1.0], [4.0, 5.0, 6.0]]
    ours = on_quadratics(per_fedavg(alpha=0.0, beta=0.1), people, schedule={"lr": 7.0})
    theirs = on_quadratics(coterie.fedavg(), people)
    plain = values(theirs, tmp_path / "b")[1]
    assert values(ours, tmp_path / "a")[1] == pytest.approx(plain, abs=1e-6)


def test_strengths_away_from_the_limit_differ_from_both_ends(tmp_path):
    ends = [trained(m(), tmp_path / m.__name__)[1] for m in (coterie.fedavg, coterie.local)]
    made = [per_fedavg(), pfedme(), ditto(), fedrep(), lg_fedavg(g=1), apfl(), fedfomo(m=2)]
    for i, method in enumerate(made):
        used = trained(method, tmp_path / str(i))[1]
        assert not any(same_bits(used, end) for end in ends), method.name


# --- ditto ---------------------------------------------------------------------------------------


def test_ditto_by_hand(tmp_path):
    # y = 1 and 5, one step a round, lr 0.1, λ = 2: v ← v − 0.2(v − y) − 0.2(v − w).
    # Round 1: all begin at 0: v = 0.2 and 1.0, w = (0.2 + 1.0)/2 = 0.6.
    # Round 2, pulled to w = 0.6 as received: 0.2 + 0.16 + 0.08 = 0.44; 1.0 + 0.8 − 0.08 = 1.72.
    # A pull to v's own start, or none, would give 0.36 and 1.8.
    made = on_quadratics(ditto(lam=2.0), [[1.0], [5.0]])
    assert values(made, tmp_path / "1", 1)[1] == pytest.approx([0.2, 1.0], abs=1e-6)
    state, used = values(made, tmp_path / "2", 2)
    assert used == pytest.approx([0.44, 1.72], abs=1e-6)
    assert global_model(state) == pytest.approx(1.08, abs=1e-6)


def test_ditto_settles_between_its_own_optimum_and_the_global_one(tmp_path):
    # w goes to 4 (the mean of 1 and 7), v to argmin (v − y)² + λ/2·(v − 4)² = (2y + 4λ)/(2 + λ):
    # λ = 4 gives (2 + 16)/6 = 3 and (14 + 16)/6 = 5.
    made = on_quadratics(ditto(lam=4.0), [[1.0], [7.0]])
    state, used = values(made, tmp_path, 60)  # w keeps 0.8 of its distance a round
    assert global_model(state) == pytest.approx(4.0, abs=1e-4)
    assert used == pytest.approx([3.0, 5.0], abs=1e-4)


def test_ditto_without_a_pull_reaches_each_clients_own_optimum(tmp_path):
    made = on_quadratics(ditto(lam=0.0), [[1.0], [7.0]])
    assert values(made, tmp_path, 80)[1] == pytest.approx([1.0, 7.0], abs=1e-5)


# --- per-fedavg ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("order", "step"), [("first", 1.6), ("hessian-free", 1.28)])
def test_per_fedavg_one_step_by_hand(order, step, tmp_path):
    # f = (θ − 10)², θ = 0, α = 0.1, β = 0.1: θ' = 2, d = 2(2 − 10) = −16. First order: 0.1·16.
    # The second derivative is 2 whatever δ: d − α·2d = 0.8·(−16) = −12.8.
    made = on_quadratics(per_fedavg(order, 0.1, 0.1, delta=0.25), [[10.0]])
    assert values(made, tmp_path, 1)[1] == pytest.approx([step], abs=1e-5)


@pytest.mark.parametrize(("order", "optimum"), [("first", 5.0), ("hessian-free", 2.0)])
def test_per_fedavg_reaches_the_optimum_of_what_it_minimises(order, optimum, tmp_path):
    # Losses (θ − 0)² and 4(θ − 10)², α = 0.1: after the inner step what is left of θ − m is 0.8
    # and 0.2 of it. The MAML objective is 0.64(θ − 0)² + 4·0.04(θ − 10)²: (0.64·0 + 0.16·10)/0.8
    # = 2. First order weighs gradients by 0.8 and 4·0.2 = 0.8: 5. FedAvg: (0 + 4·10)/5 = 8.
    made = on_lines(per_fedavg(order, alpha=0.1, beta=0.2, delta=0.5), [(1.0, 0.0), (2.0, 10.0)])
    # A round leaves 0.68 of the distance (first order) or 0.84, of FedAvg's a half.
    assert values(made, tmp_path / "a", 70)[1] == pytest.approx([optimum] * 2, abs=1e-3)
    plain = on_lines(coterie.fedavg(), [(1.0, 0.0), (2.0, 10.0)])
    assert values(plain, tmp_path / "b", 20)[1] == pytest.approx([8.0] * 2, abs=1e-3)


def test_per_fedavg_decays_its_outer_rate_as_the_run_does(tmp_path):
    # Round 1: 0 → 1.6 as above. Round 2 at half of β: 0.05·2·0.8·8.4 = 0.672.
    made = on_quadratics(per_fedavg("first", 0.1, 0.1), [[10.0]], schedule={"lr_decay": 0.5})
    assert values(made, tmp_path, 2)[1] == pytest.approx([2.272], abs=1e-5)


def test_per_fedavgs_outer_rate_is_the_runs_unless_given(tmp_path):
    # As above, with the run's rate of 0.1, and half of it in the second round.
    made = on_quadratics(per_fedavg("first", 0.1), [[10.0]], schedule={"lr_decay": 0.5})
    assert values(made, tmp_path / "a", 2)[1] == pytest.approx([2.272], abs=1e-5)
    twice = on_quadratics(per_fedavg("first", 0.1), [[10.0]], schedule={"lr": 0.2})
    assert values(twice, tmp_path / "b", 1)[1] == pytest.approx([3.2], abs=1e-5)


def test_per_fedavg_as_it_comes_learns_in_twenty_rounds(tmp_path):
    # One step of 0.1 a round on (θ − 10)² after an inner step of 0.01, which leaves 0.98 of the
    # distance: a round leaves 1 − 0.2·0.98 = 0.804. With β = 1e-3 it would be 0.998 a round.
    made = on_quadratics(per_fedavg(), [[10.0]])
    assert values(made, tmp_path, 20)[1] == pytest.approx([10 - 10 * 0.804**20], abs=1e-4)


# --- pfedme --------------------------------------------------------------------------------------

TWICE = [[4.0, 4.0]]  # two samples alike, in batches of one: the order does not matter
HAND = {"lam": 5.0, "inner_steps": 2, "personal_lr": 0.1}


def test_pfedme_moves_w_after_each_batch(tmp_path):
    # f = (θ − 4)², λ = 5, two steps of 0.1, η = 0.1. First batch: θ = 0.8, then
    # 0.8 − 0.1(2·(−3.2) + 5·0.8) = 1.04; w = 0 + 0.5·1.04 = 0.52.
    # Second batch from 0.52: θ = 1.216, then 1.216 − 0.1(2·(−2.784) + 5·0.696) = 1.4248;
    # w = 0.52 + 0.5·(1.4248 − 0.52) = 0.9724. The client uses θ.
    made = on_quadratics(pfedme(**HAND), TWICE, schedule={"batch_size": 1})
    state, used = values(made, tmp_path, 1)
    assert global_model(state) == pytest.approx(0.9724, abs=1e-6)
    assert used == pytest.approx([1.4248], abs=1e-6)
    assert "server" not in state.memory


@pytest.mark.parametrize("beta", [0.25, 0.5, 2.0])
def test_pfedme_goes_a_share_of_the_way_to_the_mean(beta, tmp_path):
    made = on_quadratics(pfedme(**HAND, beta=beta), TWICE, schedule={"batch_size": 1})
    state, used = values(made, tmp_path, 1)
    assert global_model(state) == pytest.approx(beta * 0.9724, abs=1e-6)
    assert used == pytest.approx([1.4248], abs=1e-6)


def test_pfedme_reaches_the_moreau_optimum(tmp_path):
    # Losses (θ − 0)² and 4(θ − 9)², curvature a = 2 and 8, λ = 4. A Moreau envelope has curvature
    # aλ/(a + λ) = 4/3 and 8/3: w = (4/3·0 + 8/3·9)/4 = 6, where FedAvg has (0 + 4·9)/5 = 7.2.
    # θ = (a·m + λw)/(a + λ) = 24/6 = 4 and (72 + 24)/12 = 8.
    method = pfedme(lam=4.0, inner_steps=30, personal_lr=0.1)
    state, used = values(on_lines(method, [(1.0, 0.0), (2.0, 9.0)]), tmp_path, 80)
    assert global_model(state) == pytest.approx(6.0, abs=1e-4)
    assert used == pytest.approx([4.0, 8.0], abs=1e-4)


def test_pfedme_stays_within_one_over_lambda(tmp_path):
    # At θ = w = 0 with y = 4 the steps go to where λθ = 2(4 − θ): the gap is 8/(λ + 2).
    for lam in (10.0, 100.0, 1000.0):
        method = pfedme(lam=lam, personal_lr=1 / lam)
        made = on_quadratics(method, [[4.0]])
        gap = values(made, tmp_path / str(lam), 1)[1][0]
        assert gap == pytest.approx(8 / (lam + 2), rel=1e-3)


# --- apfl ----------------------------------------------------------------------------------------


def test_apfl_by_hand(tmp_path):
    # y = 10, lr 0.01, α = 0.5. Round 1, all at 0: no difference, α stays. w = 0.2; the mixture of
    # v = 0 with that w is 0.1, its gradient −19.8: v = 0.01·0.5·19.8 = 0.099.
    # Round 2: the mixture 0.1495 has gradient −19.701, times v − w = −0.101 is 1.989801:
    # α = 0.48010199. w = 0.396; v with it: 0.099α + 0.396(1 − α) = 0.25340971, gradient
    # −19.49318058, times α −9.35871479: v = 0.19258715. Used: αv + (1 − α)·0.396 = 0.29834109.
    made = on_quadratics(apfl(), [[10.0]], schedule={"lr": 0.01})
    assert values(made, tmp_path / "1", 1)[1] == pytest.approx([0.1495], abs=1e-6)
    assert values(made, tmp_path / "2", 2)[1] == pytest.approx([0.29834109], abs=1e-6)


def test_apfl_with_a_rate_that_decays_by_hand(tmp_path):
    # Round 1 as above. Round 2 with lr 0.005: α = 0.5 − 0.005·1.989801 = 0.490050995;
    # w = 0.2 + 0.005·19.6 = 0.298; the mixture 0.298 − 0.199α = 0.200479852 has gradient
    # −19.599040296, times α −9.604529198: v = 0.147022646. Used: 0.298 − α·0.150977354.
    made = on_quadratics(apfl(), [[10.0]], schedule={"lr": 0.01, "lr_decay": 0.5})
    assert values(made, tmp_path, 2)[1] == pytest.approx([0.224013398], abs=1e-6)


def test_pfedmes_personal_rate_does_not_decay(tmp_path):
    # y = 10, λ = 2, K = 1, personal_lr 0.1. Round 1, lr 0.1: θ = 0.1·20 = 2, w = 0.1·2·2 = 0.4.
    # Round 2, lr 0.05: θ = 0.4 + 0.1·19.2 = 2.32, w = 0.4 + 0.05·2·1.92 = 0.592.
    method = pfedme(lam=2.0, inner_steps=1, personal_lr=0.1)
    made = on_quadratics(method, [[10.0]], schedule={"lr_decay": 0.5})
    state, channel, _ = drive(made, tmp_path, rounds=2)
    assert float(models(made, state, channel)[0]) == pytest.approx(2.32, abs=1e-5)
    assert float(state.models[0].vector) == pytest.approx(0.592, abs=1e-6)


def test_apfl_leaves_a_fixed_share_alone(tmp_path):
    # As above with α = 0.5 in round 2 too: the mixture (0.099 + 0.396)/2 = 0.2475 has gradient
    # −19.505: v = 0.099 + 0.01·0.5·19.505 = 0.196525; used: (0.196525 + 0.396)/2 = 0.2962625.
    made = on_quadratics(apfl(learn=False), [[10.0]], schedule={"lr": 0.01})
    assert values(made, tmp_path, 2)[1] == pytest.approx([0.2962625], abs=1e-6)


def test_apfl_keeps_its_share_between_none_and_all(tmp_path):
    # lr 0.1. Alone with y = 10: after round 1 w = 2, v = 0.9; then the mixture 1.45 has gradient
    # −17.1 and α = 0.5 − 0.1·(−1.1)(−17.1) < 0: nothing of its own, w = 2 + 0.2·8 = 3.6 is used.
    made = on_quadratics(apfl(), [[10.0]])
    assert values(made, tmp_path / "a", 2)[1] == pytest.approx([3.6], abs=1e-5)
    # Beside y = −10 w stays at 0 and v = 0.9 leads: 0.45 has gradient −19.1, α = 0.5 + 1.719 > 1:
    # all its own, v = 0.9 + 0.2·9.1 = 2.72.
    made = on_quadratics(apfl(), [[10.0], [-10.0]])
    assert values(made, tmp_path / "b", 2)[1] == pytest.approx([2.72, -2.72], abs=1e-5)


def test_apfl_with_a_fixed_share_settles_where_its_mixture_fits(tmp_path):
    # w goes to 4; a client trains it to w_i = 4 − 0.2(4 − y), 3.4 and 4.6, and v until the mixture
    # with that w_i is its own optimum y. With w itself it is (4 − w_i)/2 off: 1.3 and 6.7.
    made = on_quadratics(apfl(learn=False), [[1.0], [7.0]])
    state, used = values(made, tmp_path, 240)  # v keeps 0.95 of its distance a round
    assert global_model(state) == pytest.approx(4.0, abs=1e-4)
    assert used == pytest.approx([1.3, 6.7], abs=1e-4)


# --- fedrep and lg-fedavg ------------------------------------------------------------------------


class Product(nn.Module):
    """Two layers of one number each: the answer is head·body."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(1, 1, bias=False)
        self.head = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.body.weight)
        nn.init.zeros_(self.head.weight)

    def forward(self, x):
        return self.head(self.body(torch.ones_like(x)))[:, 0]


def test_fedrep_trains_the_head_first_and_then_the_body(tmp_path):
    # Body a = 1, head b = 0, y = 1, lr 0.1. Two epochs of the head: b = 0.2, then 0.36. One of the
    # body at that head: a = 1 − 0.2·0.36·(0.36 − 1) = 1.04608.
    made = on_quadratics(fedrep(head_epochs=2), [[1.0]])
    object.__setattr__(made, "model", Product)
    state, channel, engine = drive(made, tmp_path, Spy, rounds=1)
    (used,) = models(made, state, channel)
    assert used.tolist() == pytest.approx([1.04608, 0.36], abs=1e-6)
    ((seen),) = engine.of("1.0").values()
    assert seen.down == {"0": ("body.weight",)}
    assert seen.up == {"model": ("body.weight",)}


def test_lg_fedavg_by_hand(tmp_path):
    # Body a (own) and head b (shared) trained together, y = 1 and 3, lr 0.1: from a = 1, b = 0 the
    # gradient of a is 0, b becomes 0.2 and 0.6: shared 0.4. Round 2: a = 1 − 0.2·0.4(0.4 − y):
    # 1.048 and 1.208; b = 0.4 − 0.2(0.4 − y): 0.52 and 0.92: shared 0.72.
    made = on_quadratics(lg_fedavg(g=1), [[1.0], [3.0]])
    object.__setattr__(made, "model", Product)
    state, channel, engine = drive(made, tmp_path, Spy, rounds=2)
    first, second = models(made, state, channel)
    assert first.tolist() == pytest.approx([1.048, 0.72], abs=1e-6)
    assert second.tolist() == pytest.approx([1.208, 0.72], abs=1e-6)
    assert {s.up["model"] for s in engine.seen} == {("head.weight",)}


# --- any grouping rule with any of them ----------------------------------------------------------

PIECES = {
    "per-fedavg": lambda: per_fedavg(beta=0.05),
    "pfedme": lambda: pfedme(beta=0.5),
    "ditto": ditto,
    "fedrep": lambda: fedrep(head_epochs=2),
    "lg-fedavg": lambda: lg_fedavg(g=1),
    "apfl": apfl,
}


@pytest.mark.parametrize("name", PIECES)
def test_with_ifca_of_one_model_it_is_itself(name, tmp_path):
    parts = {"ifca": coterie.ifca(k=1), name: PIECES[name]()}
    both = trained(combined(f"ifca+{name}", parts), tmp_path / "a")[1]
    assert same_bits(both, trained(PIECES[name](), tmp_path / "b")[1])
    parts["ifca"] = coterie.ifca(k=2)
    two = trained(combined(f"ifca+{name}", parts), tmp_path / "c")
    assert len(two[0].models) == 2
    assert not same_bits(both, two[1])


def test_clients_that_sat_out_keep_their_own_model(tmp_path):
    """What a client has of its own waits for it while the global model moves on."""
    settings = {"rounds": 6, "cohort": 2}
    for name, method in (("ditto", ditto()), ("pfedme", pfedme()), ("apfl", apfl(1.0, False))):
        made = experiment(method, settings=settings)
        seen = []
        for rounds in (5, 6):
            state, channel, _ = drive(made, tmp_path / f"{name}{rounds}", rounds=rounds)
            seen.append((state, models(made, state, channel)))
        (before, early), (after, late) = seen
        assert not torch.equal(before.models[0].vector, after.models[0].vector)
        had = took_part(settings | {"rounds": 5})
        last = set(cohort(made.settings, 5, made.members))
        assert had - last
        assert last & had
        for client in range(6):
            if client in had:
                assert torch.equal(early[client], late[client]) == (client not in last)
            elif client not in last:  # it has nothing of its own: it uses what it would receive
                assert torch.equal(late[client], after.models[0].vector)


def test_newcomers_get_the_global_model(tmp_path):
    from coterie.experiment.experiment import execute

    for i, (name, make) in enumerate(PIECES.items()):
        settings = {"rounds": 2, "holdout": 1, "admit_epochs": 1}
        done = execute(experiment(make(), settings=settings), tmp_path / str(i))
        (came,) = done.newcomers
        model, start = done.weights(came), done.plan.start
        shared = {"fedrep": ["hidden1"], "lg-fedavg": ["head"]}.get(name, start.layout.layers)
        wanted = done.state.models[0].only(shared).onto(start)
        assert torch.equal(model.vector, wanted.vector), name
