"""Methods in which each client has its own model, or its own layers."""

from __future__ import annotations

from collections.abc import Collection

from coterie.client import Client, Fit, proximal
from coterie.compose.grouped import grouped
from coterie.compose.local import Local, keeping
from coterie.compose.sharing import all_but_last, only_last
from coterie.core.method import Count, Method, Natural, NonNegative, method
from coterie.core.weights import Layout, Weights


@method
def fedper(k: Natural = 1) -> Method:
    """The last k layers stay with the client, the others are averaged.

    Family: personalised.
    Rule: a client combines the shared layers with its own last k, trains all of them and sends the
    shared ones; the server averages these, weighted by n_i.
    Args:
        k: the number of personal layers, counted from the end, 0 or more and at most those of the
            model; 0 is FedAvg, and all of them is ``local``, to the bit.
    Server sees: means of the shared layers.
    Travels: the shared layers down, the same up.
    Newcomers: get the shared layers; their own last k are those of θ⁰.
    Departs: nowhere.
    Reference: Arivazhagan et al., Federated Learning with Personalization Layers, 2019.
    """
    return grouped("fedper", shared=all_but_last(k))


@method
def fedrep(k: Count = 1, head_epochs: Count = 10, body_epochs: Count = 1) -> Method:
    """Like FedPer, but a client trains its own last k layers first and then the shared ones.

    Family: personalised.
    Rule: a client combines the shared layers with its own last k. It trains its own for
    ``head_epochs`` with the shared ones fixed, then the shared ones for ``body_epochs`` with its
    own fixed, and sends the shared ones; the server averages these, weighted by n_i.
    Args:
        k: the number of personal layers, counted from the end, 1 or more and at most those of the
            model.
        head_epochs: epochs of the personal layers in a round, 1 or more.
        body_epochs: epochs of the shared layers in a round, 1 or more.
    Server sees: means of the shared layers.
    Travels: the shared layers down, the same up.
    Newcomers: get the shared layers; their own last k are those of θ⁰.
    Departs: the two numbers of epochs replace the run's; a number of steps given for the run
    applies to each of the two trainings. As with every method, adaptation trains the whole model,
    including the shared layers.
    Reference: Collins et al., Exploiting Shared Representations for Personalized Federated
    Learning, ICML 2021.
    """

    shared = all_but_last(k)

    def train(client: Client, start: Weights) -> Fit:
        body = shared(start.layout)
        head = [name for name in start.layout.names if name not in body]
        fitted = client.fit(start, part=head, epochs=head_epochs)
        if not body:
            return fitted
        return client.fit(fitted.weights, stream="body", part=body, epochs=body_epochs)

    return grouped("fedrep", train=Local(train), shared=shared)


@method
def lg_fedavg(g: Count | None = None) -> Method:
    """The first layers stay with the client, the last g are averaged.

    Family: personalised.
    Rule: a client combines the shared layers with its own first ones, trains all of them and sends
    the last g; the server averages these, weighted by n_i.
    Args:
        g: the number of shared layers, counted from the end, 1 or more and at most those of the
            model; all of them is FedAvg to the bit. When not given: 2, or 1 for a model of 2
            layers.
    Server sees: means of the shared layers.
    Travels: the last g layers down, the same up.
    Newcomers: get the shared layers; their own first ones are those of θ⁰.
    Departs: the paper first trains all layers by FedAvg and then continues like this; here the
    first layers belong to the client from the start.
    Reference: Liang et al., Think Locally, Act Globally: Federated Learning with Local and Global
    Representations, 2020.
    """

    def shared(layout: Layout) -> Collection[str]:
        # By default, at least one layer stays with the client; sharing all would be FedAvg.
        return only_last(max(1, min(2, len(layout.layers) - 1)) if g is None else g)(layout)

    return grouped("lg-fedavg", shared=shared)


@method
def ditto(lam: NonNegative = 0.1) -> Method:
    """FedAvg, and each client also trains a model of its own, held near the global one.

    Family: personalised.
    Rule: the global model is exactly FedAvg's. A client of the cohort also trains its own model v
    on its loss + λ/2·‖v − θ_t‖², where θ_t is the model received at the start of the round. v
    starts at the first model received, stays with the client when it does not take part, and is the
    model that the client uses.
    Args:
        lam: λ, how strongly v is pulled towards the global model, 0 or more; 0 is training alone.
    Server sees: means of the global model; never v.
    Travels: one model down, one up.
    Newcomers: get the global model, and use it until they have trained a v.
    Departs: v and the global model are trained one after the other, each on its own batches (the
    paper's code alternates on the same ones), for the same number of epochs; λ is not tuned for
    each client.
    Reference: Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML
    2021.
    """

    def train(client: Client, start: Weights) -> Fit:
        personal = client.kept("ditto") or start
        client.state["ditto"] = client.fit(personal, proximal(lam, start), stream="ditto").weights
        return client.fit(start)

    return grouped("ditto", train=keeping("ditto", train))
