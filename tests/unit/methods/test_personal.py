"""Personal methods on one client: buffers, second derivatives, what is kept and adapted."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad

import coterie
from coterie.client import Client, FlatModel, Schedule
from coterie.client.client import TrainingContext
from coterie.compose.grouped import combined
from coterie.core.weights import Weights
from coterie.data import ClientData, Population, Split
from coterie.errors import ConfigError
from coterie.experiment.experiment import execute
from coterie.methods.meta import apfl, per_fedavg, pfedme
from coterie.methods.personal import ditto, fedrep, lg_fedavg
from scripted import Spy, opened
from support import Constant, digits, drive, experiment, on_quadratics

LOSS = nn.functional.mse_loss


def alone(module, train, val=None, state=None, round=0, loss=LOSS, **schedule):
    """A client with its data and no others, and the model that it starts from."""
    model = FlatModel(module)
    settings = Schedule(**{"batch_size": 1000, "lr": 0.1} | schedule)
    context = TrainingContext(model, model.weights(), loss, settings, seed=0)
    return Client(0, train, val or train, {} if state is None else state, round, context)


def fitted(method, client):
    return method.pieces.train.train(client, client.base)


def adapted(method, client, epochs=1):
    return method.adapt(client, client.base, epochs)


def numbers(*y):
    return Split(torch.zeros(len(y), 1), torch.tensor(y))


def rows(n=12, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return Split(torch.randn(n, 4, generator=generator), torch.randn(n, generator=generator))


# --- statistics of batch normalisation -----------------------------------------------------------


class Normalised(nn.Module):
    """Inputs of mean 10 are normalised first, so every pass shows in the running mean."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(1)
        self.last = nn.Linear(1, 1)

    def forward(self, x):
        return self.last(self.norm(x))[:, 0]


TENS = Split(torch.tensor([[8.0], [12.0], [10.0]]), torch.tensor([1.0, 2.0, 3.0]))


def running_mean(weights):
    return float(weights.tensors()["norm.running_mean"])


@pytest.mark.parametrize(
    "method",
    [per_fedavg(), per_fedavg("hessian-free"), pfedme(inner_steps=3), apfl(), ditto()],
    ids=["first", "hessian-free", "pfedme", "apfl", "ditto"],
)
def test_statistics_are_those_of_one_pass_at_the_shared_model(method):
    # Each pass in training moves the running mean a tenth of the way to 10: one pass, 1.0. What
    # passes away from w do to it is undone with the weights.
    client = alone(Normalised(), TENS)
    assert running_mean(fitted(method, client).weights) == pytest.approx(1.0)


def test_the_personal_model_has_the_statistics_of_its_own_passes():
    client = alone(Normalised(), TENS)
    fitted(pfedme(inner_steps=3), client)
    assert running_mean(client.kept("pfedme")) == pytest.approx(10 * (1 - 0.9**3))


def test_a_descent_leaves_the_parameters_where_they_were():
    # With an outer rate of next to nothing the model that comes out is the one that went in.
    for method in (per_fedavg("hessian-free", 0.1, 1e-30), per_fedavg("first", 0.1, 1e-30)):
        client = alone(nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), rows())
        assert torch.equal(fitted(method, client).weights.vector, client.base.vector)


# --- per-fedavg ----------------------------------------------------------------------------------


def smooth(dropout=0.0):
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 1), nn.Flatten(0)
    )


@pytest.mark.parametrize("order", ["first", "hessian-free"])
def test_the_step_is_the_gradient_after_an_inner_step(order):
    """Compared with automatic differentiation through the inner step, with a single batch."""
    data, alpha, beta = rows(), 0.3, 0.1
    client = alone(smooth(), data)
    module = smooth()
    start = {k: v.detach() for k, v in module.named_parameters()}

    def loss(tensors):
        return LOSS(functional_call(module, tensors, (data.x,)), data.y)

    def inner(tensors):
        slope = grad(loss)(tensors)
        return {k: tensors[k] - alpha * slope[k] for k in tensors}

    if order == "first":
        slope = grad(loss)(inner(start))
    else:
        slope = grad(lambda tensors: loss(inner(tensors)))(start)
    expected = Weights.from_tensors(client.base.layout, slope).vector
    found = fitted(per_fedavg(order, alpha, beta, delta=0.01), client).weights
    change = (client.base.vector - found.vector) / beta
    assert torch.allclose(change, expected, atol=2e-4 * float(expected.norm()))


def test_both_sides_of_a_difference_have_the_same_dropout():
    """Otherwise the difference of two masks, divided by 2δ, would hide the curvature."""
    alpha, beta = 0.3, 0.1
    ends = {}
    for delta in (0.1, 0.01):
        client = alone(smooth(0.5), rows(200))
        ends[delta] = fitted(per_fedavg("hessian-free", alpha, beta, delta), client).weights
    client = alone(smooth(0.5), rows(200))
    bend = fitted(per_fedavg("first", alpha, beta), client).weights - ends[0.1]
    assert bend.norm() > 1e-3
    assert (ends[0.1] - ends[0.01]).norm() < 0.05 * bend.norm()


@pytest.mark.parametrize(("order", "passes"), [("first", 2), ("hessian-free", 4)])
def test_each_batch_of_a_step_has_a_shuffle_of_its_own(order, passes):
    seen = []

    class Recording(Constant):
        def forward(self, x):
            seen.append(x[:, 0].tolist())
            return super().forward(x)

    data = Split(torch.arange(12.0)[:, None], torch.zeros(12))
    fitted(per_fedavg(order), alone(Recording(), data, batch_size=4))
    assert len(seen) == 3 * passes
    streams = [[x for batch in seen[i::passes] for x in batch] for i in range(passes)]
    assert [sorted(s) for s in streams] == [list(range(12))] * passes
    assert len({tuple(s) for s in streams}) == (2 if order == "first" else 3)
    if order == "hessian-free":
        assert streams[2] == streams[3]  # w + δd and w − δd on the same batch


@pytest.mark.parametrize("order", ["first", "hessian-free"])
@pytest.mark.parametrize("batch_size", [1, 2, 1000])
def test_every_client_trains_however_few_its_samples(order, batch_size):
    client = alone(Constant(), numbers(10.0), batch_size=batch_size)
    found = fitted(per_fedavg(order, 0.1, 0.1), client)
    assert found.steps == 1
    assert float(found.weights.vector) > 1.0


@pytest.mark.parametrize("epochs", [1, 7])
def test_adapting_is_one_inner_step_whatever_the_epochs_and_the_run(epochs):
    # From 0 towards 10 with α = 0.05: 0.05·20 = 1. Two batches of one sample, but one step.
    run = {"momentum": 0.9, "weight_decay": 5.0, "clip": 0.1, "epochs": 4, "optimizer": "adam"}
    client = alone(Constant(), numbers(10.0, 10.0), batch_size=1, round=3, lr_decay=0.5, **run)
    assert float(adapted(per_fedavg(alpha=0.05), client, epochs).vector) == pytest.approx(1.0)


def test_momentum_and_decay_act_on_the_outer_step_only():
    # α = β = 0.1, two epochs, momentum 0.5 and decay 1 from 0 towards 10. Step 1: θ' = 2, d = −16,
    # θ = 1.6. Step 2: θ' = 1.6 + 0.2·8.4 = 3.28, d = −13.44, with decay −11.84; v = −8 − 11.84:
    # θ = 1.6 + 1.984 = 3.584. Either of them in the inner step would give something else.
    client = alone(Constant(), numbers(10.0), epochs=2, momentum=0.5, weight_decay=1.0)
    found = fitted(per_fedavg("first", 0.1, 0.1), client)
    assert float(found.weights.vector) == pytest.approx(3.584, abs=1e-5)


def test_a_client_is_scored_after_one_step_on_training_data(tmp_path):
    # Training targets 10, validation and test 0: the model at 0, adapted with α = 0.05, is at 1,
    # so its loss on both is 1; received it is 0. A step on either would have left it at 0.
    train, held = numbers(10.0, 10.0), numbers(0.0)
    people = Population((ClientData(train, held, held),), "table", (1,), None, 1)
    made = on_quadratics(per_fedavg(alpha=0.05), [], population=people)
    channel, _, plan = opened(made, tmp_path)
    state = made.method.init(channel, made.setup(plan.start))
    sends = {0: made.method.sends(state, 0)}
    received, after = (channel.score(sends, c)[0] for c in ({}, {"adapt_epochs": 3}))
    assert (received["val_loss"], received["test_loss"]) == (0, 0)
    assert (after["val_loss"], after["test_loss"]) == pytest.approx((1, 1))


# --- pfedme --------------------------------------------------------------------------------------


def test_the_personal_model_is_not_the_live_one():
    client = alone(Constant(), numbers(4.0, 4.0), batch_size=1)
    method = pfedme(lam=5.0, inner_steps=2, personal_lr=0.1)
    fit = fitted(method, client)
    kept = client.kept("pfedme").vector
    assert float(kept) == pytest.approx(1.4248, abs=1e-6)  # by hand in the laws
    live = client._context.model.vector
    assert kept.untyped_storage().data_ptr() != live.untyped_storage().data_ptr()
    live.fill_(99.0)
    fit.weights.vector.fill_(99.0)
    assert float(kept) == pytest.approx(1.4248, abs=1e-6)


def test_a_personal_model_is_scored_as_it_stands():
    for method, key in ((pfedme(), "pfedme"), (ditto(), "ditto"), (apfl(), "apfl")):
        client = alone(Constant(), numbers(4.0))
        assert float(adapted(method, client).vector) > 0  # nothing of its own yet: it adapts
        fitted(method, client)
        assert client.kept(key) is not None
        assert torch.equal(adapted(method, client).vector, client.base.vector)


def test_the_personal_steps_begin_at_w_for_every_batch():
    # K = 1 at w = 0 and personal_lr 0.1, η next to nothing: every batch gives θ = 0.8 again.
    client = alone(Constant(), numbers(4.0, 4.0, 4.0), batch_size=1, lr=1e-30)
    fitted(pfedme(lam=5.0, inner_steps=1, personal_lr=0.1), client)
    assert float(client.kept("pfedme").vector) == pytest.approx(0.8)


@pytest.mark.parametrize(("personal_lr", "lam"), [(0.2, 10.0), (1.0, 2.0), (0.002, 1000.0)])
def test_personal_steps_that_would_diverge_are_refused(personal_lr, lam):
    with pytest.raises(ConfigError, match=r"personal_lr·lam = .*Set personal_lr below"):
        pfedme(personal_lr=personal_lr, lam=lam)
    pfedme(personal_lr=personal_lr * 0.99, lam=lam)


# --- apfl ----------------------------------------------------------------------------------------


def test_w_and_v_see_the_same_batches():
    seen = []

    class Recording(Constant):
        def forward(self, x):
            if self.training:
                seen.append(x[:, 0].tolist())
            return super().forward(x)

    data = Split(torch.arange(12.0)[:, None], torch.zeros(12))
    fitted(apfl(), alone(Recording(), data, batch_size=4))
    assert len(seen) == 6
    assert seen[:3] == seen[3:]


def test_the_learned_share_waits_with_the_client():
    client = alone(Constant(), numbers(10.0), lr=0.01)
    method = apfl()
    fitted(method, client)
    assert client.state["apfl.alpha"] == 0.5
    client.state["apfl"] = Weights(client.base.layout, torch.tensor([1.0]))
    fitted(method, client)
    # v = 1, w = 0: the mixture 0.5 has gradient −19: α = 0.5 + 0.01·19 = 0.69.
    assert client.state["apfl.alpha"] == pytest.approx(0.69)
    fixed = alone(Constant(), numbers(10.0), lr=0.01)
    fitted(apfl(learn=False), fixed)
    assert "apfl.alpha" not in fixed.state


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.9])
def test_frozen_layers_are_the_same_in_any_mixture(alpha, tmp_path):
    made = experiment(apfl(alpha, learn=False), freeze=("hidden1",), settings={"rounds": 2})
    state, channel, _ = drive(made, tmp_path)
    start = made.plan(tmp_path).start
    frozen = [e.name for e in start.layout.entries if e.kind == "frozen"]
    for client in channel.clients:
        used = channel.fetch(client, made.method.sends(state, client))
        assert torch.equal(used.only(frozen).vector, start.only(frozen).vector)
        assert not torch.equal(used.parameters, start.parameters)


# --- fedrep and lg-fedavg ------------------------------------------------------------------------


def test_fedrep_trains_each_part_for_its_own_epochs_on_batches_of_its_own():
    seen = []

    class Recording(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(1, 1), nn.Linear(1, 1)

        def forward(self, x):
            seen.append((x[:, 0].tolist(), self.body.weight.item(), self.head.weight.item()))
            return self.head(self.body(x))[:, 0]

    torch.manual_seed(0)
    data = Split(torch.arange(8.0)[:, None] / 8, torch.ones(8))
    client = alone(Recording(), data, batch_size=8, epochs=5)
    fitted(fedrep(head_epochs=3, body_epochs=2), client)
    orders, bodies, heads = zip(*seen, strict=True)
    assert len(seen) == 5
    assert len(set(bodies[:4])) == len(set(heads[3:])) == 1
    assert len(set(heads[:4])) == 4
    assert len(set(bodies[3:])) == 2
    assert len({tuple(o) for o in orders}) == 5


def test_fedrep_brings_how_a_client_trains_and_what_is_shared():
    made = combined("ifca+fedrep", {"ifca": coterie.ifca(k=2), "fedrep": fedrep()})
    assert made.pieces.train is not None
    assert made.pieces.shared is not None
    for other, words in ((ditto(), "how a client trains"), (lg_fedavg(), "which layers")):
        with pytest.raises(ConfigError, match=f"both say {words}"):
            combined("both", {"fedrep": fedrep(), "other": other})


def test_buffers_of_no_layer_are_shared_and_trained_with_the_body():
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.BatchNorm1d(4, affine=False), nn.Linear(4, 3), nn.Linear(3, 1), nn.Flatten(0)
    )
    client = alone(module, Split(rows().x + 5, rows().y))
    found = fitted(fedrep(), client).weights
    moved = {k for k, v in found.tensors().items() if not torch.equal(v, client.base.tensors()[k])}
    assert moved == set(found.layout.names)


def test_layers_that_a_model_does_not_have_are_refused(tmp_path):
    for method in (lg_fedavg(g=3), fedrep(k=3)):
        with pytest.raises(ConfigError, match=r"3 .* layers asked for, but the model has 2: "):
            experiment(method).plan(tmp_path)


# --- together ------------------------------------------------------------------------------------


def test_pfedme_brings_its_server_along():
    parts = {"ifca": coterie.ifca(k=2), "pfedme": pfedme(beta=0.5)}
    assert parts["pfedme"].pieces.around is not None
    assert pfedme().pieces.around is None
    with pytest.raises(ConfigError, match="how the server averages"):
        combined("both", {**parts, "fedavgm": coterie.fedavgm()})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ditto(lam=-1.0), "lam = -1.0: must be at least 0"),
        (lambda: fedrep(head_epochs=0), "head_epochs = 0: must be at least 1"),
        (lambda: fedrep(k=0), "k = 0: must be at least 1"),
        (lambda: lg_fedavg(g=0), "g = 0: must be at least 1"),
        (lambda: per_fedavg(beta=0.0), "beta = 0.0: must be greater than 0"),
        (lambda: per_fedavg(order="second"), "order = 'second': must be"),
        (lambda: per_fedavg(delta=0.0), "delta = 0.0: must be greater than 0"),
        (lambda: pfedme(inner_steps=0), "inner_steps = 0: must be at least 1"),
        (lambda: pfedme(beta=0.0), "beta = 0.0: must be greater than 0"),
        (lambda: apfl(alpha=1.5), "alpha = 1.5: must be at most 1"),
    ],
)
def test_bad_values_are_refused_when_a_method_is_made(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


METHODS = {
    "per-fedavg": per_fedavg(beta=0.05),
    "pfedme": pfedme(),
    "ditto": ditto(),
    "fedrep": fedrep(head_epochs=2),
    "lg-fedavg": lg_fedavg(g=1),
    "apfl": apfl(),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_personal_model_never_travels(name, tmp_path):
    made = experiment(METHODS[name], settings={"rounds": 2})
    _, _, engine = drive(made, tmp_path, Spy)
    names = made.plan(tmp_path).start.layout.names
    shared = {"fedrep": names[:2], "lg-fedavg": names[2:]}.get(name, names)
    assert {tuple(s.up.items()) for s in engine.seen} == {(("model", shared),)}
    assert {tuple(s.down.items()) for s in engine.seen} == {(("0", shared),)}
    assert {tuple(s.metrics) for s in engine.seen} == {("loss",)}


@pytest.mark.parametrize("name", METHODS)
def test_nothing_depends_on_data_held_out(name, tmp_path):
    """With other validation and test samples, clients have the same models, also when adapted."""
    people = digits()
    other = tuple(
        replace(c, val=d.test, test=d.val)
        for c, d in zip(people.clients, people.clients[::-1], strict=True)
    )
    found = []
    for i, population in enumerate((people, replace(people, clients=other))):
        method = METHODS[name]
        adapt = method.adapt or Client.adapt

        def look(client, arrays, adapt=adapt, method=method):
            return adapt(client, method.assemble(client, arrays), 1)

        made = experiment(replace(method, assemble=look), population, settings={"rounds": 2})
        state, channel, _ = drive(made, tmp_path / str(i))
        found.append([channel.fetch(c, method.sends(state, c)).vector for c in range(6)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_per_fedavg_is_judged_after_its_one_step_whatever_the_epochs(tmp_path):
    made = experiment(per_fedavg(alpha=0.5, beta=0.1), settings={"adapt_epochs": 0})
    summary = execute(made, tmp_path / "a").summary
    assert summary["headline"] == "adapted"
    assert summary["adapted"]["loss"] != summary["received"]["loss"]
    plain = experiment(coterie.fedavg(), settings={"adapt_epochs": 0})
    summary = execute(plain, tmp_path / "b").summary
    assert (summary["headline"], summary["adapted"]) == ("received", summary["received"])
