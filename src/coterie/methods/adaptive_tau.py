"""FedAvg with the number of local steps that is best for a budget of seconds or bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from coterie.compose.adaptive_steps import adaptive_steps
from coterie.compose.grouped import Pieces, grouped
from coterie.core.method import Count, Method, Natural, Positive, method

Growth = Annotated[int, Field(ge=2)]


@method
def adaptive_tau(
    phi: Positive | Literal["auto"] = "auto",
    gamma: Growth = 10,
    tau_max: Count = 100,
    sample: Natural = 64,
) -> Method:
    """FedAvg that chooses the number of local steps τ in each round to suit the run's budget.

    Family: pieces.
    Rule: with w the model received and w_i the one it sent last, a client measures its loss F_i and
    gradient, ρ_i = |F_i(w_i) − F_i(w)|/‖w_i − w‖ and β_i = ‖∇F_i(w_i) − ∇F_i(w)‖/‖w_i − w‖. ρ, β
    and F are their means, weighted by n_i, and δ is how far the ∇F_i(w) lie from their mean. Let c
    be the cost of a step and b that of an aggregation, in units of a budget R (seconds, bytes or
    both), A = max (cτ+b)/(R'τ) with R' = R−b−c, and h = δ/β·((ηβ+1)^τ − 1) − ηδτ. The next τ
    minimises A/(2ηφ) + √(A²/(4η²φ²) + ρh/(ηφτ)) + ρh over 1 to γ times the last τ. The first τ is
    1. When the cost so far + c(τ+1) + 2b reaches R, τ is reduced to what the budget allows and the
    round is the last; the server asks for the loss of the last model, and the result is the models
    with the lowest F so far.
    Args:
        phi: φ, which weighs the gain of more steps against the drift that they cause, above 0; a
            larger φ makes fewer steps. "auto" is the authors' choice for the kind of model: 0.025
            if only one layer, the last, is trained (linear and logistic regression, a linear SVM),
            5e-5 for networks. The notes at the start of the run say which was chosen, and why.
        gamma: γ, the largest factor from one τ to the next, 2 or more.
        tau_max: the largest number of steps in a round, 1 or more; 1 is FedAvg with train.steps = 1
            to the bit.
        sample: the number of training samples on which a client measures, drawn once, 0 or more; 0
            is all.
    Server sees: means of models, losses and gradients.
    Travels: 1 model down, 1 up and with it its gradient, as large as a model without its buffers,
    and six numbers; at the end 1 model down, 1 number up.
    Newcomers: get the model.
    Departs: δ is the root mean square of ‖∇F_i − ∇F‖, which can be computed from means alone, not
    the mean (which is never larger). w_i is the model that a client sent last, even if it has
    missed rounds or changed its group since. Several groups have the same τ; their estimates are
    weighted by samples. b also includes what clients compute besides their steps, such as these
    measurements. Momentum and a method's own learning rates are not part of η, which is the run's
    decayed learning rate. If the run's rounds end before the budget, the result is the last model.
    If earlier models turn out best, what clients keep for themselves is not set back to that round,
    and neither is the server's mean of it. Whether another round fits is judged by the most
    expensive round so far, so the first round, or one with slower clients than any before, can
    exceed the budget.
    Reference: Wang et al., Adaptive Federated Learning in Resource Constrained Edge Computing
    Systems, IEEE JSAC 2019.
    """

    def around(inner: Method) -> Method:
        return adaptive_steps(inner, phi, gamma, tau_max, sample)

    return replace(around(grouped("adaptive-tau")), pieces=Pieces(around=around))
