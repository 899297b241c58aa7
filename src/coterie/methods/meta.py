"""Methods whose clients compute a special gradient: after an inner step, or of a mixture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from coterie.client import Batch, Client, Fit, GradientRule, Objective, StepContext
from coterie.compose.grouped import Pieces, grouped
from coterie.compose.local import Local, keeping
from coterie.compose.server_optimizer import momentum_step, with_server_optimizer
from coterie.core.method import Count, Method, NonNegative, Positive, Share, method
from coterie.core.weights import Weights
from coterie.errors import ConfigError
from coterie.seeds import seed_layers


@method
def per_fedavg(
    order: Literal["first", "hessian-free"] = "first",
    alpha: NonNegative = 1e-2,
    beta: Positive | None = None,
    delta: Positive = 1e-3,
) -> Method:
    """One model for all clients that is good after one step on a client's own data (MAML).

    Family: personalised.
    Rule: on one batch w' = w − α∇f(w), on another d = ∇f(w'). "first": w ← w − βd. "hessian-free":
    with a third batch, w ← w − β[d − α(∇f(w+δd) − ∇f(w−δd))/2δ]. The rest is as in FedAvg. A client
    adapts the model that it receives by one step of size α on one batch of its training data.
    Args:
        order: "first" leaves out second derivatives; "hessian-free" approximates them by
            differences.
        alpha: the inner learning rate α, 0 or more; it does not decay.
        beta: the outer learning rate β, above 0; the run's learning rate when not given. Either way
            it decays as the run's does.
        delta: δ of the differences, above 0.
    Server sees: means.
    Travels: one model down, one up.
    Newcomers: get the model, and adapt it by one step.
    Departs: the paper's β is 1e-3, for thousands of steps; in 20 rounds it hardly learns anything,
    so the default is the run's learning rate. The batches of each gradient come from a separate
    shuffle of all the client's samples, so that clients with few samples train, too. Statistics of
    batch normalisation are those of the passes at w; the effects of other passes on them are
    undone. Dropout is the same on both sides of a difference. The run's momentum and weight decay
    act on the outer step only.
    Reference: Fallah et al., Personalized Federated Learning with Theoretical Guarantees: A
    Model-Agnostic Meta-Learning Approach, NeurIPS 2020.
    """

    def evaluate(context: StepContext, batches: tuple[Batch, ...]) -> Tensor:
        context.at(batches[0])
        before = context.vector.clone()
        context.theta.add_(context.gradient, alpha=-alpha)
        loss = context.at(batches[1])
        context.vector.copy_(before)
        if order == "hessian-free":
            d = context.gradient.clone()
            bend = curved(context, d, batches[2], delta)
            context.gradient.copy_(d).sub_(bend, alpha=alpha)
        return loss

    objective = Objective(gradient_rule=GradientRule(2 if order == "first" else 3, evaluate))

    def train(client: Client, start: Weights) -> Fit:
        if beta is None:  # the schedule's learning rate has already decayed
            return client.fit(start, objective)
        return client.fit(start, objective, lr=beta * client.schedule().lr_decay ** client.round)

    def adapt(client: Client, model: Weights, epochs: int) -> Weights:
        step: dict[str, Any] = {"epochs": 1, "steps": 1, "lr": alpha, "momentum": 0.0, "clip": None}
        step |= {"weight_decay": 0.0, "optimizer": "sgd", "options": {}}
        return client.fit(model, stream="adapt", **step).weights

    return grouped("per-fedavg", train=Local(train, adapt=adapt, headline="adapted"))


def curved(context: StepContext, d: Tensor, batch: Batch, delta: float) -> Tensor:
    """∇²f(w)·d by differences: (∇f(w+δd) − ∇f(w−δd))/2δ; the model is left unchanged."""
    before, ends = context.vector.clone(), []
    seed = int(torch.randint(2**31, ()))  # a difference in dropout would be divided by 2δ too
    for side in (delta, -delta):
        seed_layers(seed, context.theta.device)
        context.theta.add_(d, alpha=side)
        context.at(batch)
        ends.append(context.gradient.clone())
        context.vector.copy_(before)
    return (ends[0] - ends[1]) / (2 * delta)


@method
def pfedme(
    lam: Positive = 15.0,
    inner_steps: Count = 5,
    personal_lr: Positive = 0.01,
    beta: Positive = 1.0,
) -> Method:
    """Each client keeps a personal model near the global one, which learns from the personal ones.

    Family: personalised.
    Rule: for each batch, the personal model θ takes K steps from w_i on the batch's loss + λ/2·‖θ −
    w_i‖²; then w_i ← w_i − ηλ(w_i − θ), with the run's learning rate η. On the server w ← (1−β)w +
    β·mean of the w_i. A client uses the θ of its last batch.
    Args:
        lam: λ, how strongly θ is pulled towards w_i, above 0.
        inner_steps: K, the steps of θ for each batch, 1 or more.
        personal_lr: the learning rate of θ, above 0 and below 2/λ; it does not decay.
        beta: β, how far the server moves towards the mean, above 0; 1 is all the way.
    Server sees: means of the w_i; never θ.
    Travels: one model down, one up.
    Newcomers: get the global model, and use it until they have trained a θ.
    Departs: a round is the run's epochs over all batches; the mean is over the cohort, weighted by
    n_i. Statistics of batch normalisation of w_i are those of the passes at w_i. The run's
    momentum, optimiser, weight decay and clipping act on the step of w_i; the K steps of θ are
    plain.
    Reference: Dinh et al., Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020.
    """
    if personal_lr * lam >= 2:
        raise ConfigError(
            f"method pfedme: personal_lr·lam = {personal_lr * lam:g}, and from 2 on the personal "
            f"steps diverge. Set personal_lr below {2 / lam:g}"
        )

    def train(client: Client, start: Weights) -> Fit:
        last = start.vector

        def evaluate(context: StepContext, batches: tuple[Batch, ...]) -> Tensor:
            nonlocal last
            loss = context.at(batches[0])
            before, w = context.vector.clone(), context.theta.clone()
            for step in range(inner_steps):
                if step:
                    context.at(batches[0])
                context.gradient.add_(context.theta - w, alpha=lam)
                context.theta.add_(context.gradient, alpha=-personal_lr)
            last = context.vector.detach().cpu().clone()  # the model is set back to w_i below
            torch.sub(w, context.theta, out=context.gradient).mul_(lam)
            context.vector.copy_(before)
            return loss

        fitted = client.fit(start, Objective(gradient_rule=GradientRule(1, evaluate)))
        client.state["pfedme"] = Weights(start.layout, last)
        return fitted

    local = keeping("pfedme", train)
    plain = grouped("pfedme", train=local)
    if beta == 1:
        return plain

    def around(inner: Method) -> Method:
        return with_server_optimizer(inner, momentum_step(beta, 0.0))

    return replace(around(plain), pieces=Pieces(train=local, around=around))


@method
def apfl(alpha: Share = 0.5, learn: bool = True) -> Method:
    """FedAvg, and each client uses a mixture of the global model and its own.

    Family: personalised.
    Rule: the global model w is exactly FedAvg's. A client uses αv + (1−α)w, where v is its own
    model. When it takes part, it first moves α by one step, α ← clip(α − η⟨v−w, ∇f(αv + (1−α)w)⟩,
    0, 1), where w is the model received and f the loss on all its training data. Then it trains w
    to w_i, and v on the same batches along α∇f(αv + (1−α)w_i). v starts at the first model
    received; v and α stay with the client when it does not take part.
    Args:
        alpha: the initial share α of the client's own model, 0 to 1.
        learn: whether α is learnt; if not, 0 is FedAvg to the bit, and 1 is training alone to the
            bit, if all clients take part.
    Server sees: means of w; never v or α.
    Travels: one model down, one up.
    Newcomers: get the global model, and use it until they have trained a v.
    Departs: w_i is trained before v and stays fixed meanwhile (the paper alternates). α moves once
    a round. Statistics of batch normalisation are mixed too.
    Reference: Deng et al., Adaptive Personalized Federated Learning, 2020.
    """

    def share(client: Client) -> float:
        return float(client.state.get("apfl.alpha", alpha))  # type: ignore[arg-type]

    def mixture(client: Client, received: Weights) -> Weights:
        personal = client.kept("apfl") or received
        return Weights(personal.layout, torch.lerp(received.vector, personal.vector, share(client)))

    def train(client: Client, start: Weights) -> Fit:
        personal = client.kept("apfl") or start
        if learn:
            gradient = client.gradient(mixture(client, start)).parameters.double()
            gap = (personal.parameters - start.parameters).double()
            moved = share(client) - client.schedule().lr * float(gap @ gradient)
            client.state["apfl.alpha"] = min(max(moved, 0.0), 1.0)
        fitted = client.fit(start)
        along = Objective(gradient_rule=GradientRule(1, mixed_with(fitted.weights, share(client))))
        client.state["apfl"] = client.fit(personal, along).weights
        return fitted

    return grouped("apfl", train=replace(keeping("apfl", train), uses=mixture))


def mixed_with(other: Weights, alpha: float) -> Callable[[StepContext, tuple[Batch, ...]], Tensor]:
    """The gradient of f(αv + (1−α)w) with respect to v, for a fixed model w."""

    def evaluate(context: StepContext, batches: tuple[Batch, ...]) -> Tensor:
        v = context.theta.clone()
        context.theta.lerp_(other.parameters.to(v.device), 1 - alpha)
        loss = context.at(batches[0])
        context.gradient.mul_(alpha)
        context.theta.copy_(v)
        return loss

    return evaluate
