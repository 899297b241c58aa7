"""FedFomo: each client downloads some other clients' models and mixes in those that help it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from coterie.client import Client
from coterie.compose.sharing import Sharing, no_layer
from coterie.core.federation import Federation
from coterie.core.messages import Array, ClientId, Order, Scalar, Upload
from coterie.core.method import Count, Method, NonNegative, Round, Setup, Share, State, method
from coterie.core.weights import Weights
from coterie.errors import ConfigError
from coterie.seeds import numpy_generator, seed_for

NO_MEAN = "lets clients mix models themselves: the server computes no mean"
_NOTHING_SHARED = Sharing(no_layer)  # a client keeps its whole model


@method
def fedfomo(m: Count = 5, epsilon: Share = 0.3, decay: NonNegative = 0.05) -> Method:
    """Each client mixes in a few other clients' models, as far as they do better on its data.

    Family: personalised.
    Rule: the server keeps each client's latest model and sends a client the models of M others. The
    client weighs each one on its validation data: (L(θ_i) − L(θ_n))/‖θ_n − θ_i‖, where θ_i is its
    own last model and the norm is L2 over parameters. Negative weights count as 0, the weights are
    divided by their sum, and θ_i ← θ_i + Σ w_n(θ_n − θ_i); if no weight is above 0, θ_i stays. The
    client trains this model and sends it, with the weights before clipping, which the server adds
    to its affinities P. Each of the M models is drawn at random with probability ε; otherwise it is
    the remaining one with the highest P.
    Args:
        m: M, how many other clients' models a client is sent, 1 or more and fewer than there are
            clients.
        epsilon: ε in the first round, 0 to 1.
        decay: how much ε decreases in each round until it is 0, 0 or more.
    Server sees: each client's model, and its weights.
    Travels: M models down, one up; in the first round none down. Before the first round, each
    client is asked whether it has validation data.
    Newcomers: begin with θ⁰ and receive M randomly chosen models.
    Departs: only the models of others are weighed, each against the client's own newest model, or
    θ⁰ if it has not trained yet. A model at distance 0 has weight 0. Ties between affinities are
    broken at random. Statistics of batch normalisation are mixed like parameters. A client is
    scored after mixing, with the M models that it would be sent if ε were 0. Clients without
    validation data are refused.
    Reference: Zhang et al., Personalized Federated Learning with First Order Model Optimization,
    ICLR 2021.
    """

    def init(fed: Federation, setup: Setup) -> State:
        fed.gather([Order(c, "ready") for c in setup.clients])
        memory = {"seed": setup.seed, "start": setup.start, "round": 0, "affinity": {}}
        return State({}, {c: c for c in setup.clients}, memory)

    def offer(state: State, client: ClientId, round: int, epsilon: float) -> dict[str, Array]:
        others = [c for c in sorted(state.groups) if c in state.models and c != client]
        seed = seed_for(state.memory["seed"], "fedfomo", round, client)
        row = state.memory["affinity"].get(client, {})
        chosen = picked(row, others, m, epsilon, numpy_generator(seed))
        models = {str(c): state.models[c] for c in sorted(chosen)}
        return {c: model.only(model.layout.shareable) for c, model in models.items()}

    def round(fed: Federation, state: State, info: Round) -> State:
        chance = max(0.0, epsilon - decay * info.number)
        offers = {c: offer(state, c, info.number, chance) for c in info.cohort}
        models, affinity = dict(state.models), dict(state.memory["affinity"])
        notes = {}
        for reply in fed.gather([Order(c, "train", o) for c, o in offers.items()]):
            me, model = reply.client, reply.arrays["model"]
            assert isinstance(model, Weights)
            models[me] = model.onto(state.memory["start"])
            gains = {int(n): reply.metrics[f"weight.{n}"] for n in offers[me]}
            row = affinity.get(me, {})
            affinity[me] = {**row, **{n: row.get(n, 0.0) + gain for n, gain in gains.items()}}
            notes[str(me)] = {str(n): gain for n, gain in gains.items()}
        memory = {**state.memory, "affinity": affinity, "round": info.number + 1}
        return State(models, state.groups, memory, {"weights": notes})

    def check(setup: Setup) -> None:
        if m >= len(setup.clients):
            raise ConfigError(
                f"method fedfomo: m = {m} others' models for {len(setup.clients)} clients: choose "
                "an m smaller than the number of clients"
            )

    return Method(
        name="fedfomo",
        init=init,
        round=round,
        sends=lambda state, client: offer(state, client, state.memory["round"], 0.0),
        tasks={"ready": ready, "train": train},
        assemble=lambda client, arrays: mixed(client, arrays)[0],
        admit=lambda fed, state, info: state.joined({c: c for c in info.cohort}),
        sees="each",
        check=check,
        needs_all_layers="sends clients the whole models of others",
        no_step=NO_MEAN,
        no_robust_mean=NO_MEAN,
    )


def picked(
    row: Mapping[ClientId, float],
    others: Sequence[ClientId],
    count: int,
    epsilon: float,
    generator: np.random.Generator,
) -> list[ClientId]:
    """Choose ``count`` others, each at random with probability ε, else by the highest affinity.

    >>> picked({4: 2.0, 7: 1.0}, [1, 4, 7], 2, 0.0, numpy_generator(0))
    [4, 7]
    """
    remaining = [others[i] for i in generator.permutation(len(others))]  # breaks ties at random
    chosen: list[ClientId] = []
    while remaining and len(chosen) < count:
        if generator.random() < epsilon:
            chosen.append(remaining[generator.integers(len(remaining))])
        else:
            chosen.append(max(remaining, key=lambda c: row.get(c, 0.0)))
        remaining.remove(chosen[-1])
    return chosen


def mixed(client: Client, arrays: Mapping[str, Array]) -> tuple[Weights, dict[str, float]]:
    """The client's own model with the better ones mixed in, and the weight of each model."""
    refuse_without_validation(client)
    last = _NOTHING_SHARED.received(client, {})[1]
    others = {n: w.onto(last) for n, w in arrays.items() if isinstance(w, Weights)}
    weights: dict[str, float] = {}
    before = client.loss(last, "val") if others else 0.0
    for n, model in others.items():
        gain, distance = before - client.loss(model, "val"), (model - last).norm()
        weights[n] = gain / distance if distance > 0 and math.isfinite(gain) else 0.0
    total = sum(max(w, 0.0) for w in weights.values())
    if total == 0:
        return last, weights
    vector = last.vector.double()
    for n, model in others.items():
        step = model.vector.double() - last.vector.double()
        vector = vector + step * (max(weights[n], 0.0) / total)
    return Weights(last.layout, vector.float()), weights


def train(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
    """Train the mixture, keep it and send it, with the weights of the other models."""
    start, weights = mixed(client, arrays)
    fitted = client.fit(start)
    _NOTHING_SHARED.keep(client, fitted.weights)
    metrics = {"loss": fitted.loss, **{f"weight.{n}": w for n, w in weights.items()}}
    return Upload({"model": fitted.weights.only(fitted.weights.layout.shareable)}, metrics)


def ready(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
    """Reply if there is validation data, and fail otherwise."""
    refuse_without_validation(client)
    return Upload()


def refuse_without_validation(client: Client) -> None:
    """Raise an error if the client has no validation data to weigh models on."""
    if not len(client.val):
        raise ConfigError(
            f"method fedfomo weighs others' models on validation data, and client {client.id} has "
            "none: set data.val_fraction above 0 (a client needs at least three samples), or leave "
            "the client out"
        )
