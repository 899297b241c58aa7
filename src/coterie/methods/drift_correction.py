"""Methods that correct client drift by a vector that each client keeps: SCAFFOLD and FedDyn.

The clients' corrections start at zero, and the server's is the mean over all of them. Only
parameters that are shared are corrected; local parameters are not, and buffers are means weighted
by samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from coterie.client import Client, Objective, linear, proximal
from coterie.compose.grouped import grouped
from coterie.compose.sharing import Sharing
from coterie.core.federation import Federation
from coterie.core.messages import Array, ClientId, Mean, Order, Scalar, Upload
from coterie.core.method import Method, Positive, Round, Setup, State, method
from coterie.core.weights import Weights
from coterie.errors import ConfigError
from coterie.methods.fednova import sgd_only

SHARING = Sharing()
KEY = "correction"  # in a client's state and in the server's memory
TOTAL = "total"  # in the server's memory: the total weight of all clients
EVERY_LAYER = "corrects every layer in each round"
NO_ROBUST_MEAN = (
    "keeps its correction at the mean of its clients' own corrections, and a robust mean of their "
    "changes would break this"
)
NO_CLIPPING = (
    "keeps its correction at the mean of its clients' own corrections, which follow from their "
    "updates before clipping"
)
NEEDS_EXACT = (
    "computes the mean of its clients' duals from the models that they send, which must arrive as "
    "they were sent"
)


@method
def scaffold(server_lr: Positive = 1.0, weights: Literal["uniform", "n"] = "uniform") -> Method:
    """FedAvg that corrects client drift by control variates.

    Family: global.
    Rule: clients step θ ← θ − η(g − c_i + c); after K steps c_i⁺ = c_i − c + (θ_t − θ_i)/(Kη)
    (option II). The server: θ ← θ + η_s·mean_S(θ_i − θ_t), c ← c + (1/N)·Σ_S(c_i⁺ − c_i), where N
    is the number of all clients, so that c is always the mean of the c_i. All start at 0; c_i stays
    with its client.
    Args:
        server_lr: the server's learning rate η_s, above 0.
        weights: how clients are weighted, both in the mean of the models and in c: ``uniform``
            counts all equally, ``n`` by samples.
    Server sees: means.
    Travels: 2 models down, 2 up. With weights ``n``, a client also reports its number of samples
    once, before the first round.
    Newcomers: get the model; their c_i is 0, so c is multiplied by the share of the earlier
    clients.
    Departs: the local learning rate is that of the round, decayed. Buffers of batch normalisation
    are means by samples, or with secure sums weighted as the models are. Momentum and optimisers
    other than SGD are refused, and so are robust means (``median``, ``trimmed-mean``, ``krum``) and
    clipping (``run.outliers``): c would no longer be the mean of the c_i.
    Notes: if clients have two labels each, training diverges at learning rates above 0.01. This is
    a property of the method: an independent implementation diverges, too. Set ``train.lr = 0.01``,
    or clip gradients with ``train.clip = 1``.
    Reference: Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning,
    ICML 2020.
    """
    by_examples = weights == "n"
    base = grouped("scaffold")

    def train(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
        start, control = _received(client, arrays), arrays[KEY]
        correction = _kept(client, control)
        result = client.fit(start, _tilt(start, control - correction))
        length = result.steps * client.schedule().lr
        moved = _shared(start) - _shared(result.weights)
        change = moved / length - control if result.steps else torch.zeros_like(correction)
        client.state[KEY] = correction + change
        return _upload(client, result.weights, result.loss, by_examples, {KEY: change})

    def init(fed: Federation, setup: Setup) -> State:
        return _join(fed, _initial(setup), setup.clients, by_examples)

    def round(fed: Federation, state: State, info: Round) -> State:
        state = _join(fed, state, info.cohort, by_examples)
        control, before = state.memory[KEY], _shared(state.models[0])
        cohort = [c for c in info.cohort if c in state.groups]
        orders = [Order(c, "train", {**base.sends(state, c), KEY: control}) for c in cohort]
        means = fed.reduce(orders, {c: {0: 1.0} for c in cohort}, by_examples)
        if not means:
            return state
        mean = means[0]
        count = mean.examples if by_examples else len(mean.clients)
        control = control + mean.arrays[KEY] * (count / state.memory[TOTAL])
        return _moved(state, mean, torch.lerp(before, _parameters(mean), server_lr), control)

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
    """FedAvg with a dynamic regulariser that makes the clients' optima agree.

    Family: global.
    Rule: a client minimises L(θ) − ⟨g_i, θ⟩ + α/2·‖θ − θ_t‖²; then g_i ← g_i − α(θ_i − θ_t), which
    it keeps. The server: h ← h − (α/N)·Σ_S(θ_i − θ_t), where N is the number of all clients, so
    that h is always the mean of the g_i; θ ← mean_S(θ_i) − h/α. All clients count equally, and all
    g_i start at 0.
    Args:
        alpha: α, the strength of the proximal term and of its correction, above 0.
    Server sees: means.
    Travels: 1 model down, 1 up.
    Newcomers: get the model; their g_i is 0, so h is multiplied by the share of the earlier
    clients.
    Departs: the local optimum is approximated by the run's epochs, not exact. Buffers of batch
    normalisation are means by samples, or with secure sums of equal weights. Robust means
    (``median``, ``trimmed-mean``, ``krum``), clipping (``run.outliers``) and lossy codecs are
    refused: h would no longer be the mean of the g_i.
    Reference: Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021.
    """
    base = grouped("feddyn")

    def train(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
        start = _received(client, arrays)
        dual = _kept(client, _shared(start))
        result = client.fit(start, _tilt(start, -dual) + proximal(alpha))
        client.state[KEY] = dual - alpha * (_shared(result.weights) - _shared(start))
        return _upload(client, result.weights, result.loss)

    def init(fed: Federation, setup: Setup) -> State:
        return _join(fed, _initial(setup), setup.clients)

    def round(fed: Federation, state: State, info: Round) -> State:
        state = _join(fed, state, info.cohort)
        orders = [Order(c, "train", base.sends(state, c)) for c in info.cohort]
        means = fed.reduce(orders, {c: {0: 1.0} for c in info.cohort}, by_examples=False)
        if not means:
            return state
        mean, mean_parameters = means[0], _parameters(means[0])
        share = len(mean.clients) / state.memory[TOTAL]
        dual = state.memory[KEY] - alpha * share * (mean_parameters - _shared(state.models[0]))
        return _moved(state, mean, mean_parameters - dual / alpha, dual)

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
    """The received model, combined with the layers that the client keeps."""
    return SHARING.received(client, {k: v for k, v in arrays.items() if k != KEY})[1]


def _shared(weights: Weights) -> Tensor:
    """The shared parameters."""
    return weights.part(SHARING.travelling(weights.layout)).parameters


def _kept(client: Client, like: Tensor) -> Tensor:
    """The client's own correction; zero at first."""
    kept = client.state.get(KEY)
    return kept if isinstance(kept, Tensor) else torch.zeros_like(like)


def _tilt(start: Weights, slope: Tensor) -> Objective:
    """The objective term ⟨slope, θ⟩ over the shared parameters."""
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
    others: Mapping[str, Array] | None = None,
) -> Upload:
    """What the client sends.

    If all clients count equally, buffers are multiplied by the client's number of samples: the mean
    of these products divided by the mean of the numbers is the mean by samples. In secure sums they
    are not multiplied, because there all values of a client have the same weight.
    """
    equal = by_examples or client.hidden
    travels, count = SHARING.keep(client, trained), 1.0 if equal else float(client.weight)
    vector = travels.vector.clone()
    vector[travels.layout.trainable :] *= count
    model = Weights(travels.layout, vector)
    sent = {"model": model, "count": torch.tensor([count]), **(others or {})}
    return Upload(sent, {"loss": loss}, {"model": "0"})


# --- the server's half --------------------------------------------------------------------------


def _initial(setup: Setup) -> State:
    """The initial state: no clients yet, and a correction of zero."""
    return State({0: setup.start}, memory={KEY: torch.zeros_like(_shared(setup.start)), TOTAL: 0})


def _join(
    fed: Federation, state: State, clients: Sequence[ClientId], by_examples: bool = False
) -> State:
    """The state with these clients added; their corrections are zero, so the mean shrinks.

    ``TOTAL`` is the total weight of all clients: their number, or that of their samples. A client
    that does not report its number of samples is left out and asked again when it is next selected.
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


def _moved(state: State, mean: Mean, parameters: Tensor, correction: Tensor) -> State:
    """The state with these parameters, the buffers of the mean, and the new correction."""
    model, count = mean.arrays["model"], mean.arrays["count"]
    assert isinstance(model, Weights)
    assert isinstance(count, Tensor)
    vector = model.vector / count
    vector[: model.layout.trainable] = parameters
    updated = Weights(model.layout, vector).onto(state.models[0])
    return replace(state, models={0: updated}, memory={**state.memory, KEY: correction})
