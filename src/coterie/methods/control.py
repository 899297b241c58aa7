"""Methods that correct each client's drift by what it keeps: control variates, and duals.

What clients keep starts at zero, and the server's own is the mean over all of them. Corrections are
of the parameters that travel; what is local gets none, and buffers are plain means by samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from coterie.client import Client, Objective, linear, proximal
from coterie.compose import Sharing, grouped
from coterie.errors import ConfigError
from coterie.federation import Array, ClientId, Federation, Mean, Order, Scalar, Upload
from coterie.method import Method, Positive, Round, Setup, State, method
from coterie.methods.fednova import sgd_only
from coterie.weights import Weights

SHARING = Sharing()
KEY = "correction"  # in a client's state and in the server's memory
TOTAL = "total"  # in the server's memory: what all clients count together
EVERY_LAYER = "corrects every layer in each round"
NO_ROBUST_MEAN = (
    "keeps its correction at the mean of its clients' own corrections, and a robust mean of their "
    "changes would lead it away from there"
)
NO_CLIPPING = (
    "keeps its correction at the mean of its clients' own corrections, which follow from their "
    "updates as they were"
)
NEEDS_EXACT = (
    "works out the mean of its clients' duals from the models that travel, which must arrive as "
    "they were sent"
)


@method
def scaffold(server_lr: Positive = 1.0, weights: Literal["uniform", "n"] = "uniform") -> Method:
    """FedAvg whose clients step against their own drift, by control variates.

    Family: global.
    Rule: locally θ ← θ − η(g − c_i + c); after K steps c_i⁺ = c_i − c + (θ_t − θ_i)/(Kη) (option
    II). θ ← θ + η_s·mean_S(θ_i − θ_t), c ← c + (1/N)·Σ_S(c_i⁺ − c_i) with N all clients, so that c
    is always the mean of the c_i. All start at 0; c_i stays with its client.
    Args:
        server_lr: the server's learning rate η_s, above 0.
        weights: ``uniform``, every client counting the same, or ``n``: by samples, in the mean of
            the models and in c alike.
    Server sees: means.
    Travels: 2 models down, 2 up. With weights ``n`` a client also says once how many samples it
    has, before the first round.
    Newcomers: get the model; their c_i is 0, so c shrinks by the share of those who were there.
    Departs: the local learning rate is that of the round, decayed. Buffers of batch normalisation
    are means by samples. Momentum and other optimisers than SGD are refused, and so are robust
    means (``median``, ``trimmed-mean``, ``krum``) and clipping (``run.outliers``): c would no
    longer be the mean of the c_i.
    Notes: where clients have two labels each, training diverges at learning rates above 0.01. That
    is the method's own doing: an independent implementation diverges, too. Set ``train.lr = 0.01``,
    or clip gradients with ``train.clip = 1``.
    Reference: Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning,
    ICML 2020.
    """
    by_examples = weights == "n"
    base = grouped("scaffold")

    def train(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
        start, control = _received(client, arrays), arrays[KEY]
        own = _kept(client, control)
        result = client.fit(start, _tilt(start, control - own))
        length = result.steps * client.schedule().lr
        moved = _shared(start) - _shared(result.weights)
        change = moved / length - control if result.steps else torch.zeros_like(own)
        client.state[KEY] = own + change
        return _upload(client, result.weights, result.loss, by_examples, {KEY: change})

    def init(fed: Federation, setup: Setup) -> State:
        return _join(fed, _begun(setup), setup.clients, by_examples)

    def round(fed: Federation, state: State, info: Round) -> State:
        state = _join(fed, state, info.cohort, by_examples)
        control, before = state.memory[KEY], _shared(state.models[0])
        asked = [c for c in info.cohort if c in state.groups]
        orders = [Order(c, "train", {**base.sends(state, c), KEY: control}) for c in asked]
        means = fed.reduce(orders, {c: {0: 1.0} for c in asked}, by_examples)
        if not means:
            return state
        mean = means[0]
        count = mean.examples if by_examples else len(mean.clients)
        control = control + mean.arrays[KEY] * (count / state.memory[TOTAL])
        return _landed(state, mean, torch.lerp(before, _parameters(mean), server_lr), control)

    def check(setup: Setup) -> None:
        sgd_only("scaffold", setup)
        if setup.schedule.momentum:
            raise ConfigError(
                "method scaffold corrects single gradients, and momentum would count each "
                "correction many times: set train.momentum = 0"
            )

    return replace(
        base,
        init=init,
        round=round,
        tasks={"train": train, "size": lambda client, arrays, config: Upload()},
        shows={"size": ()},
        same_steps="sends a client's change once more, divided by its number of steps",
        admit=lambda fed, state, info: _join(fed, state, info.cohort, by_examples),
        check=check,
        pieces=None,
        needs_all_layers=EVERY_LAYER,
        no_robust_mean=NO_ROBUST_MEAN,
        no_clipping=NO_CLIPPING,
        mirrors=(KEY, TOTAL),
    )


@method
def feddyn(alpha: Positive = 0.1) -> Method:
    """FedAvg whose clients' losses are bent so that their optima agree.

    Family: global.
    Rule: locally L(θ) − ⟨g_i, θ⟩ + α/2·‖θ − θ_t‖²; then g_i ← g_i − α(θ_i − θ_t), kept by the
    client. h ← h − (α/N)·Σ_S(θ_i − θ_t) with N all clients, so that h is always the mean of the
    g_i; θ ← mean_S(θ_i) − h/α, every client counting the same. All start at 0.
    Args:
        alpha: strength of the pull, and of its correction, above 0.
    Server sees: means.
    Travels: 1 model down, 1 up.
    Newcomers: get the model; their g_i is 0, so h shrinks by the share of those who were there.
    Departs: the local optimum is sought by the run's epochs, not exactly. Buffers of batch
    normalisation are means by samples. Robust means (``median``, ``trimmed-mean``, ``krum``),
    clipping (``run.outliers``) and lossy codecs are refused: h would no longer be the mean of the
    g_i.
    Reference: Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021.
    """
    base = grouped("feddyn")

    def train(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
        start = _received(client, arrays)
        own = _kept(client, _shared(start))
        result = client.fit(start, _tilt(start, -own) + proximal(alpha))
        client.state[KEY] = own - alpha * (_shared(result.weights) - _shared(start))
        return _upload(client, result.weights, result.loss)

    def init(fed: Federation, setup: Setup) -> State:
        return _join(fed, _begun(setup), setup.clients)

    def round(fed: Federation, state: State, info: Round) -> State:
        state = _join(fed, state, info.cohort)
        orders = [Order(c, "train", base.sends(state, c)) for c in info.cohort]
        means = fed.reduce(orders, {c: {0: 1.0} for c in info.cohort}, by_examples=False)
        if not means:
            return state
        mean, landed = means[0], _parameters(means[0])
        share = len(mean.clients) / state.memory[TOTAL]
        dual = state.memory[KEY] - alpha * share * (landed - _shared(state.models[0]))
        return _landed(state, mean, landed - dual / alpha, dual)

    return replace(
        base,
        init=init,
        round=round,
        tasks={"train": train},
        admit=lambda fed, state, info: _join(fed, state, info.cohort),
        check=None,
        pieces=None,
        needs_all_layers=EVERY_LAYER,
        no_robust_mean=NO_ROBUST_MEAN,
        no_clipping=NO_CLIPPING,
        needs_exact=NEEDS_EXACT,
        mirrors=(KEY, TOTAL),
    )


# --- the client's half --------------------------------------------------------------------------


def _received(client: Client, arrays: Mapping[str, Any]) -> Weights:
    """The model that came, laid over what the client keeps."""
    return SHARING.received(client, {k: v for k, v in arrays.items() if k != KEY})[1]


def _shared(weights: Weights) -> Tensor:
    """The parameters that travel."""
    return weights.part(SHARING.travelling(weights.layout)).parameters


def _kept(client: Client, like: Tensor) -> Tensor:
    """The client's own correction; zero at first."""
    own = client.state.get(KEY)
    return own if isinstance(own, Tensor) else torch.zeros_like(like)


def _tilt(start: Weights, slope: Tensor) -> Objective:
    """⟨slope, θ⟩ over the parameters that travel."""
    travels = SHARING.travelling(start.layout)
    vector = torch.zeros(travels.size)
    vector[: travels.trainable] = slope
    flat = Weights(start.layout, torch.zeros_like(start.vector))
    return linear(Weights(travels, vector).onto(flat))


def _upload(
    client: Client,
    trained: Weights,
    loss: float,
    by_examples: bool = False,
    more: Mapping[str, Array] | None = None,
) -> Upload:
    """What the client sends.

    Where everybody counts the same, buffers carry their number of samples with them: the mean of
    such buffers over the mean of such numbers is the mean by samples.
    """
    travels, count = SHARING.keep(client, trained), 1.0 if by_examples else float(client.weight)
    vector = travels.vector.clone()
    vector[travels.layout.trainable :] *= count
    model = Weights(travels.layout, vector)
    sent = {"model": model, "count": torch.tensor([count]), **(more or {})}
    return Upload(sent, {"loss": loss}, {"model": "0"})


# --- the server's half --------------------------------------------------------------------------


def _begun(setup: Setup) -> State:
    """Nobody yet, and no correction."""
    return State({0: setup.start}, memory={KEY: torch.zeros_like(_shared(setup.start)), TOTAL: 0})


def _join(
    fed: Federation, state: State, clients: Sequence[ClientId], by_examples: bool = False
) -> State:
    """With these clients too, whose corrections are zero: the mean over all shrinks by as much.

    ``TOTAL`` is what all count together: their number, or that of their samples. Who does not say
    how many it has stays outside, and is asked again when its turn comes.
    """
    new = [c for c in clients if c not in state.groups]
    if new and by_examples:
        counts = {r.client: r.examples for r in fed.gather([Order(c, "size") for c in new])}
    else:
        counts = dict.fromkeys(new, 1)
    if not counts:
        return state
    before = state.memory[TOTAL]
    total = before + sum(counts.values())
    shrunk = state.memory[KEY] * (before / total)
    return state.joined(dict.fromkeys(counts, 0), **{TOTAL: total, KEY: shrunk})


def _parameters(mean: Mean) -> Tensor:
    model = mean.arrays["model"]
    assert isinstance(model, Weights)
    return model.parameters


def _landed(state: State, mean: Mean, parameters: Tensor, correction: Tensor) -> State:
    """The model with these parameters and the mean's buffers, and the new correction."""
    model, count = mean.arrays["model"], mean.arrays["count"]
    assert isinstance(model, Weights)
    assert isinstance(count, Tensor)
    vector = model.vector / count
    vector[: model.layout.trainable] = parameters
    whole = Weights(model.layout, vector).onto(state.models[0])
    return replace(state, models={0: whole}, memory={**state.memory, KEY: correction})
