"""FedAvg with another aggregation: server optimisers, and robust means.

Each can also be part of a combination: ``ifca+fedadam``, ``fedclust+median``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

from pydantic import Field

from coterie.compose.grouped import Pieces, grouped
from coterie.compose.robust import (
    coordinate_median,
    krum_row,
    trimmed,
    with_robust_aggregation,
)
from coterie.compose.server_optimizer import adaptive_step, momentum_step, with_server_optimizer
from coterie.core.method import Method, Positive, method

Decay = Annotated[float, Field(ge=0, lt=1)]
Minority = Annotated[float, Field(ge=0, lt=0.5)]


def _around(name: str, wrap: Callable[[Method], Method]) -> Method:
    """FedAvg with this wrapper, which can also wrap other methods in a combination."""
    return replace(wrap(grouped(name)), pieces=Pieces(around=wrap))


@method
def fedavgm(lr: Positive = 1.0, momentum: Decay = 0.9) -> Method:
    """FedAvg with server momentum.

    Family: pieces.
    Rule: Δ is the change that the mean would make; v ← βv + Δ; θ ← θ + η·v.
    Args:
        lr: the server's learning rate η, above 0.
        momentum: β, 0 or more and below 1; 0 with lr 1 is FedAvg.
    Server sees: means.
    Travels: 1 model down, 1 up.
    Newcomers: get the model.
    Departs: nowhere; buffers of batch normalisation become the plain mean.
    Reference: Hsu et al., Measuring the Effects of Non-Identical Data Distribution for Federated
    Visual Classification, 2019.
    """
    return _around(
        "fedavgm", lambda inner: with_server_optimizer(inner, momentum_step(lr, momentum))
    )


@method
def fedadam(
    lr: Positive = 0.01, beta1: Decay = 0.9, beta2: Decay = 0.99, tau: Positive = 1e-3
) -> Method:
    """FedAvg with the Adam optimiser on the server.

    Family: pieces.
    Rule: Δ is the change that the mean would make; m ← β₁m + (1−β₁)Δ; v ← β₂v + (1−β₂)Δ²; θ ← θ +
    η·m/(√v + τ); m starts at 0, v at τ².
    Args:
        lr: the server's learning rate η, above 0.
        beta1: decay β₁ of the mean of changes, 0 or more and below 1.
        beta2: decay β₂ of the mean of squared changes, 0 or more and below 1.
        tau: τ, which limits how far the step adapts to small changes, above 0.
    Server sees: means.
    Travels: 1 model down, 1 up.
    Newcomers: get the model.
    Departs: nowhere: as in the paper, there is no bias correction for the start at zero. Buffers of
    batch normalisation become the plain mean.
    Reference: Reddi et al., Adaptive Federated Optimization, ICLR 2021.
    """
    step = adaptive_step(lr, beta1, beta2, tau, yogi=False)
    return _around("fedadam", lambda inner: with_server_optimizer(inner, step))


@method
def fedyogi(
    lr: Positive = 0.01, beta1: Decay = 0.9, beta2: Decay = 0.99, tau: Positive = 1e-3
) -> Method:
    """FedAvg with the Yogi optimiser on the server: like FedAdam, but steps grow more slowly.

    Family: pieces.
    Rule: as fedadam, but v ← v − (1−β₂)Δ²·sign(v − Δ²).
    Args:
        lr: the server's learning rate η, above 0.
        beta1: decay β₁ of the mean of changes, 0 or more and below 1.
        beta2: decay β₂ of the mean of squared changes, 0 or more and below 1.
        tau: τ, which limits how far the step adapts to small changes, above 0.
    Server sees: means.
    Travels: 1 model down, 1 up.
    Newcomers: get the model.
    Departs: nowhere; buffers of batch normalisation become the plain mean.
    Reference: Reddi et al., Adaptive Federated Optimization, ICLR 2021.
    """
    step = adaptive_step(lr, beta1, beta2, tau, yogi=True)
    return _around("fedyogi", lambda inner: with_server_optimizer(inner, step))


@method
def median() -> Method:
    """FedAvg with the median of each coordinate instead of the mean.

    Family: pieces.
    Rule: each number of the model becomes the median of the cohort's; all clients count equally.
    Server sees: each client's model.
    Travels: 1 model down, 1 up.
    Newcomers: get the model.
    Departs: nowhere.
    Reference: Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates,
    ICML 2018.
    """
    return _around("median", lambda inner: with_robust_aggregation(inner, coordinate_median))


@method
def trimmed_mean(share: Minority = 0.1) -> Method:
    """FedAvg with a mean of each coordinate that leaves out the highest and lowest values.

    Family: pieces.
    Rule: for each number of the model, the ``share`` lowest and as many highest values of the
    cohort are left out and the others are averaged; all clients count equally.
    Args:
        share: the share of clients left out at each end, 0 or more and below 0.5; rounded down to
            whole clients.
    Server sees: each client's model.
    Travels: 1 model down, 1 up.
    Newcomers: get the model.
    Departs: nowhere.
    Reference: Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates,
    ICML 2018.
    """
    return _around("trimmed-mean", lambda inner: with_robust_aggregation(inner, trimmed(share)))


@method
def krum(share: Minority = 0.1) -> Method:
    """FedAvg that replaces the mean by the single model nearest to most others.

    Family: pieces.
    Rule: of n models, of which f = ``share``·n may be malicious, the one with the smallest sum of
    squared distances to its n − f − 2 nearest others becomes the new model.
    Args:
        share: the share of clients that may be malicious, 0 or more and below 0.5; rounded down to
            whole clients.
    Server sees: each client's model.
    Travels: 1 model down, 1 up.
    Newcomers: get the model.
    Departs: with fewer than f + 3 clients, the nearest other model decides. The paper's guarantee
    needs n > 2f + 2.
    Reference: Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient
    Descent, NeurIPS 2017.
    """
    return _around(
        "krum", lambda inner: with_robust_aggregation(inner, krum_row(share), whole=True)
    )
