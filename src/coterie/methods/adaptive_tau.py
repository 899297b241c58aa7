"""FedAvg with as many local steps as a budget of seconds or bytes makes best."""

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
    """FedAvg whose number of local steps τ is chosen anew each round, for the run's budget.

    Family: pieces.
    Rule: with w the model received and w_i the one it sent last, a client measures its loss F_i and
    gradient, ρ_i = |F_i(w_i) − F_i(w)|/‖w_i − w‖ and β_i = ‖∇F_i(w_i) − ∇F_i(w)‖/‖w_i − w‖; ρ, β
    and F are means by n_i, δ is how far the ∇F_i(w) lie from their mean. With a step's cost c and
    an aggregation's b of a budget R (seconds, bytes or both), A = max (cτ+b)/(R'τ) with R' = R−b−c
    and h = δ/β·((ηβ+1)^τ − 1) − ηδτ, the next τ is the least of
    A/(2ηφ) + √(A²/(4η²φ²) + ρh/(ηφτ)) + ρh over 1 to γ times the last τ. The first τ is 1. When
    what is spent + c(τ+1) + 2b reaches R, τ is cut to what fits and the round is the last; the loss
    of the last model is asked for, and the models with the lowest F seen are the result.
    Args:
        phi: φ, the weight of what steps gain against what clients drift apart, above 0; more makes
            fewer steps. "auto" is the authors' choice for the kind of model: 0.025 where one layer
            is trained, the last (linear and logistic regression, a linear SVM), 5e-5 for networks.
            The notes of the run's beginning say which was taken, and why.
        gamma: γ, how many times the last τ the next may be, 2 or more.
        tau_max: the most steps of a round, 1 or more; 1 is FedAvg with train.steps = 1 to the bit.
        sample: training rows on which a client measures, drawn once; 0 is all.
    Server sees: means; also of losses and gradients.
    Travels: 1 model down, 1 up and with it its gradient, as large as a model without its buffers,
    and six numbers; at the end 1 model down, 1 number up.
    Newcomers: get the model.
    Departs: δ is the root mean square of ‖∇F_i − ∇F‖, from means alone, not the mean (which is
    never more). w_i is the model that a client sent last, though it may have sat out since, or
    changed its group. Several groups have one τ, their estimates counting by samples. b also has
    what clients compute besides their steps, such as these measurements. Momentum and a
    method's own learning rates are unknown to η, which is the run's, decayed. If the run's rounds
    end before the budget, the result is the last model. What clients keep for themselves stays as
    it is when earlier models turn out best, and so does the server's mean of it. What fits is
    judged by the dearest round yet: the first round, or one of slower clients than any before, can
    exceed a budget.
    Reference: Wang et al., Adaptive Federated Learning in Resource Constrained Edge Computing
    Systems, IEEE JSAC 2019.
    """

    def around(inner: Method) -> Method:
        return adaptive_steps(inner, phi, gamma, tau_max, sample)

    return replace(around(grouped("adaptive-tau")), pieces=Pieces(around=around))
