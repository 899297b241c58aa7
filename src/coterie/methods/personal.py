"""Methods that leave each client a model, or layers, of its own."""

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
    Rule: a client lays the shared layers over its own last k, trains all together, sends the
    shared ones; these are averaged by n_i.
    Args:
        k: personal layers counted from the end, 0 or more and no more than the model has; 0 is
            FedAvg, all of them is ``local``, to the bit.
    Server sees: means of the shared layers.
    Travels: the shared layers down, the same up.
    Newcomers: get the shared layers; their own last k are those of θ⁰.
    Departs: nowhere.
    Reference: Arivazhagan et al., Federated Learning with Personalization Layers, 2019.
    """
    return grouped("fedper", shared=all_but_last(k))


@method
def fedrep(k: Count = 1, head_epochs: Count = 10, body_epochs: Count = 1) -> Method:
    """As FedPer, a client training its own last k layers first and the shared ones afterwards.

    Family: personalised.
    Rule: a client lays the shared layers over its own last k. It trains these for ``head_epochs``,
    the shared ones at rest, then the shared ones for ``body_epochs``, its own at rest, and sends
    the shared ones; these are averaged by n_i.
    Args:
        k: personal layers counted from the end, 1 or more and no more than the model has.
        head_epochs: epochs of the personal layers in a round, 1 or more.
        body_epochs: epochs of the shared layers in a round, 1 or more.
    Server sees: means of the shared layers.
    Travels: the shared layers down, the same up.
    Newcomers: get the shared layers; their own last k are those of θ⁰.
    Departs: the two numbers of epochs stand in for the run's; a run's number of steps holds for
    each of the two trainings. As with every method, a model is adapted as a whole, its body too.
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
    Rule: a client lays the shared layers over its own first ones, trains all together, sends the
    last g; these are averaged by n_i.
    Args:
        g: shared layers counted from the end, 1 or more and no more than the model has; all of
            them is FedAvg to the bit. 2 when not given, or 1 of a model that has only 2.
    Server sees: means of the shared layers.
    Travels: the last g layers down, the same up.
    Newcomers: get the shared layers; their own first ones are those of θ⁰.
    Departs: the paper first trains all layers by FedAvg and then goes on like this; here the first
    layers are the client's own from the start.
    Reference: Liang et al., Think Locally, Act Globally: Federated Learning with Local and Global
    Representations, 2020.
    """

    def shared(layout: Layout) -> Collection[str]:
        # By default something stays with the client: sharing all of it would be FedAvg in disguise.
        return only_last(max(1, min(2, len(layout.layers) - 1)) if g is None else g)(layout)

    return grouped("lg-fedavg", shared=shared)


@method
def ditto(lam: NonNegative = 0.1) -> Method:
    """FedAvg, and beside it each client trains a model of its own, held near the global one.

    Family: personalised.
    Rule: the global model exactly as FedAvg. A client of the cohort also trains its own v on its
    loss + λ/2·‖v − θ_t‖², θ_t the model received at the round's start. v starts at the first model
    received, stays with the client when it sits out, and is the model that it uses.
    Args:
        lam: λ, how strongly v is pulled to the global model, 0 or more; 0 is training alone.
    Server sees: means of the global model; never v.
    Travels: one model down, one up.
    Newcomers: get the global model, and use it until they have trained a v.
    Departs: v and the global model are trained one after the other, each on batches of its own
    (the paper's code takes turns on the same ones), for as many epochs; λ is not tuned for each
    client.
    Reference: Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML
    2021.
    """

    def train(client: Client, start: Weights) -> Fit:
        own = client.kept("ditto") or start
        client.state["ditto"] = client.fit(own, proximal(lam, start), stream="ditto").weights
        return client.fit(start)

    return grouped("ditto", train=keeping("ditto", train))
