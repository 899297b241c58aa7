"""Server optimizers: the server updates models by an optimizer's step instead of the mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from coterie.compose.wrapping import _nothing_shared
from coterie.core.federation import Federation
from coterie.core.method import Method, Round, State
from coterie.core.weights import Weights
from coterie.errors import ConfigError

KEY = "server"  # the key of the optimizer's state in the server's memory


# From the change towards the mean and the optimizer's state: the step and the new state.
Step = Callable[[Tensor, Mapping[str, Tensor]], tuple[Tensor, Mapping[str, Tensor]]]


def with_server_optimizer(inner: Method, step: Step) -> Method:
    """Wrap a method so that the server updates each model by ``step`` instead of the mean.

    Δ is the change of a model's parameters to their mean; buffers are set to the mean. The state of
    the optimizer belongs to a model, so that a new group starts with an empty state.
    """
    if reason := inner.no_step or _nothing_shared(inner):
        raise ConfigError(f"{inner.name} {reason}: no server optimizer can wrap it")

    def round(fed: Federation, state: State, info: Round) -> State:
        after = inner.round(fed, state, info)
        optimizer_state, models, memory = state.memory.get(KEY, {}), dict(after.models), {}
        for slot, model in after.models.items():
            if slot in optimizer_state:
                memory[slot] = optimizer_state[slot]
            before = state.models.get(slot)
            if before is None or before is model:  # a new model, or one without replies
                continue
            change = (model.parameters - before.parameters).double()
            update, memory[slot] = step(change, optimizer_state.get(slot, {}))
            vector = model.vector.clone()
            vector[: model.layout.trainable] = (before.parameters.double() + update).float()
            models[slot] = Weights(model.layout, vector)
        return replace(after, models=models, memory={**after.memory, KEY: memory})

    return replace(
        inner,
        round=round,
        pieces=None,
        needs_all_layers="has a server that moves every layer in each round",
    )


def momentum_step(lr: float, momentum: float) -> Step:
    """v ← βv + Δ, θ ← θ + η·v."""

    def step(change: Tensor, state: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
        velocity = change + momentum * state["v"] if "v" in state else change
        return lr * velocity, {"v": velocity} if momentum else {}

    return step


def adaptive_step(lr: float, beta1: float, beta2: float, tau: float, yogi: bool) -> Step:
    """m ← β₁m + (1−β₁)Δ; v by Adam's or Yogi's rule; θ ← θ + η·m/(√v + τ), v starting at τ²."""

    def step(change: Tensor, state: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
        m = state["m"] if "m" in state else torch.zeros_like(change)
        v = state["v"] if "v" in state else torch.full_like(change, tau**2)
        m, square = beta1 * m + (1 - beta1) * change, change.square()
        if yogi:
            v = v - (1 - beta2) * square * torch.sign(v - square)
        else:
            v = beta2 * v + (1 - beta2) * square
        return lr * m / (v.sqrt() + tau), {"m": m, "v": v}

    return step
