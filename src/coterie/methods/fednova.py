"""FedNova: clients that make more steps do not pull the model towards their own optimum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from coterie.client import Client
from coterie.compose.grouped import grouped
from coterie.compose.sharing import Sharing
from coterie.core.federation import Federation
from coterie.core.messages import Order, Scalar, Upload
from coterie.core.method import Method, Round, Setup, State, method
from coterie.core.weights import Weights
from coterie.errors import ConfigError


@method
def fednova() -> Method:
    """FedAvg of normalised updates: a client's weight does not grow with its number of steps.

    Family: global.
    Rule: d_i = (θ_t − θ_i)/a_i; θ ← θ_t − (Σ p_i a_i)·Σ p_i d_i over the clients that answered,
    with p_i = n_i/Σ_S n. For τ steps with momentum ρ, a_i = [τ − ρ(1−ρ^τ)/(1−ρ)]/(1−ρ), where τ is
    the number of steps really made; without momentum it is τ. Buffers of batch normalisation are
    plain means, weighted by n_i.
    Server sees: means.
    Travels: 1 model down, 1 up, and one number.
    Newcomers: get the model.
    Departs: the variants with a proximal term or server momentum are left out (see fedavgm).
    Optimisers other than SGD are refused, because their a_i is not known.
    Reference: Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated
    Optimization, NeurIPS 2020.
    """
    base, sharing = grouped("fednova"), Sharing()

    def train(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
        start = sharing.received(client, arrays)[1]
        result = client.fit(start)
        length = path_length(result.steps, client.schedule().momentum)
        sent = sharing.keep(client, result.weights)
        vector, end = sent.vector.clone(), sent.layout.trainable
        vector[:end] = (start.part(sent.layout).parameters - vector[:end]) / (length or 1.0)
        # The key is "model" because robust means compare what has this key.
        arrays = {"model": Weights(sent.layout, vector), "length": torch.tensor([length])}
        return Upload(arrays, {"loss": result.loss}, {"model": ""})

    def round(fed: Federation, state: State, info: Round) -> State:
        orders = [Order(c, "train", base.sends(state, c)) for c in info.cohort]
        means = fed.reduce(orders, {c: {0: 1.0} for c in info.cohort})
        if not means:
            return state
        mean, length = means[0].arrays["model"], means[0].arrays["length"]
        assert isinstance(mean, Weights)
        assert isinstance(length, Tensor)
        vector, end = mean.vector.clone(), mean.layout.trainable
        vector[:end] = state.models[0].part(mean.layout).parameters - vector[:end] * length
        model = Weights(mean.layout, vector).onto(state.models[0])
        return replace(state, models={0: model})

    return replace(
        base,
        round=round,
        tasks={"train": train},
        check=lambda setup: sgd_only("fednova", setup),
        pieces=None,
        needs_all_layers="averages directions, of which no layer can be skipped",
    )


def path_length(steps: int, momentum: float) -> float:
    """The total weight of a client's gradients in its update, a_i.

    With momentum, each gradient counts repeatedly: three steps with momentum 0.5 move along g₁,
    g₁/2 + g₂ and g₁/4 + g₂/2 + g₃: together 4.25 gradients.

    >>> path_length(3, 0.0), path_length(3, 0.5)
    (3.0, 4.25)
    """
    repeats = momentum * (1 - momentum**steps) / (1 - momentum)
    return (steps - repeats) / (1 - momentum)


def sgd_only(name: str, setup: Setup) -> None:
    """Refuse any optimiser but plain SGD, for which the method's formulas hold."""
    schedule = setup.schedule
    if schedule.optimizer.lower() == "sgd" and not schedule.options:
        return
    what = f"the options {dict(schedule.options)}" if schedule.options else schedule.optimizer
    raise ConfigError(
        f"method {name} is defined for plain SGD, not for {what}: set train.optimizer = 'sgd' and "
        "remove train.options"
    )
