"""A server that moves each model by an optimizer's step instead of to the mean."""

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

KEY = "server"  # the optimiser's place in the server's memory


# From the change that the mean would make and what is remembered: the step, and what to remember.
Step = Callable[[Tensor, Mapping[str, Tensor]], tuple[Tensor, Mapping[str, Tensor]]]


def with_server_optimizer(inner: Method, step: Step) -> Method:
    """The same method, its server moving each model by a step instead of to the mean.

    Δ is what the mean would change of a model's parameters; buffers become the mean. What the step
    remembers belongs to the model: a new group begins with nothing.
    """
    if reason := inner.no_step or _nothing_shared(inner):
        raise ConfigError(f"{inner.name} {reason}: no server's optimiser can go around it")

    def round(fed: Federation, state: State, info: Round) -> State:
        after = inner.round(fed, state, info)
        kept, models, memory = state.memory.get(KEY, {}), dict(after.models), {}
        for slot, model in after.models.items():
            if slot in kept:
                memory[slot] = kept[slot]
            before = state.models.get(slot)
            if before is None or before is model:  # a new model, or one that nobody answered for
                continue
            change = (model.parameters - before.parameters).double()
            moved, memory[slot] = step(change, kept.get(slot, {}))
            vector = model.vector.clone()
            vector[: model.layout.trainable] = (before.parameters.double() + moved).float()
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

    def step(change: Tensor, kept: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
        velocity = change + momentum * kept["v"] if "v" in kept else change
        return lr * velocity, {"v": velocity} if momentum else {}

    return step


def adaptive_step(lr: float, beta1: float, beta2: float, tau: float, yogi: bool) -> Step:
    """m ← β₁m + (1−β₁)Δ; v by Adam's or Yogi's rule; θ ← θ + η·m/(√v + τ), v starting at τ²."""

    def step(change: Tensor, kept: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
        m = kept["m"] if "m" in kept else torch.zeros_like(change)
        v = kept["v"] if "v" in kept else torch.full_like(change, tau**2)
        m, square = beta1 * m + (1 - beta1) * change, change.square()
        if yogi:
            v = v - (1 - beta2) * square * torch.sign(v - square)
        else:
            v = beta2 * v + (1 - beta2) * square
        return lr * m / (v.sqrt() + tau), {"m": m, "v": v}

    return step
