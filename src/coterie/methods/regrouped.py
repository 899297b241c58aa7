"""Methods whose server compares clients' models in some rounds and regroups the clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field

from coterie.client import Client, Fit, proximal
from coterie.clustering import cosine, euclidean, kmeans_up_to, manhattan
from coterie.compose.assign import Assign, More, everyone
from coterie.compose.grouped import grouped
from coterie.compose.local import Check, Local, keeping
from coterie.compose.probing import Probe
from coterie.core.federation import Federation
from coterie.core.messages import ClientId, Order, Reply, Slot, Upload
from coterie.core.method import (
    Bound,
    Count,
    Method,
    Natural,
    NonNegative,
    Public,
    Round,
    Setup,
    Share,
    State,
    exclusive,
    matrix,
    method,
    no_public,
)
from coterie.core.weights import Weights
from coterie.errors import ConfigError, TrainingError
from coterie.methods.by_evidence import EvidenceRule, TrialMode, by_evidence, once_after, while_one
from coterie.methods.tree_cuts import Linkage, cut_tree, no_more

Matrix = np.ndarray[Any, Any]
Sent = Mapping[ClientId, Weights]  # the models of a round's replies, as received
# A function that returns a label for each of these models, and the notes to record.
Label = Callable[[State, Round, Sent], tuple[Matrix, dict[str, Any]]]


@method
@exclusive("threshold", "clusters")
def fl_hc(
    rounds: Natural = 5,
    threshold: Bound | Literal["auto"] = "auto",
    clusters: Count | None = None,
    metric: Literal["l1", "l2", "cosine"] = "l2",
    linkage: Linkage = "average",
    trial: TrialMode = "auto",
    trial_rounds: Count = 1,
) -> Method:
    """FedAvg for some rounds, then groups by the clients' updates, found once; FedAvg inside each.

    Family: clustered.
    Rule: after ``rounds`` rounds of FedAvg, all clients, not only the cohort, train the model once.
    The server clusters their updates (agglomerative clustering) and cuts the tree at ``threshold``.
    Each group's model is the mean, weighted by n_i, of the models that its members have just
    trained; then FedAvg inside each group. With "auto", all clients train the model at that point
    on two halves of their data, for as many steps as needed. The evidence is the grouping whose
    mean directions on one half best predict the directions on the other, and a trial on validation
    data decides whether the groups are used.
    Args:
        rounds: rounds of FedAvg before the clustering, 0 or more; a run that ends before it is
            FedAvg.
        threshold: the height at which the tree is cut, 0 or more, in units of ``metric`` (inf is
            one group), or "auto", which uses evidence and a trial instead.
        clusters: the number of groups instead of a threshold, 1 to the number of clients.
        metric: the distance between two updates: "l1", "l2" or "cosine", which is 1 − cos; only
            with a given threshold or number of groups.
        linkage: how the distance between two groups is computed from the distances between their
            clients; only with a given threshold or number of groups.
        trial: "auto" makes a trial if the evidence finds groups, "always" makes one in any case,
            "off" uses the groups of the evidence.
        trial_rounds: rounds that a trial takes, 1 or more.
    Server sees: each client's model, once or twice; otherwise means.
    Travels: 1 model down, 1 up; in the round of the clustering, for all clients. With "auto", also
    a model down and two up for the evidence, and in a trial at most one more model up and the
    models of all a client's candidate groups down.
    Newcomers: get every group's model and join the group with the lowest loss on their training
    data. With "auto", they train the same model as the others did for the clustering and join the
    group whose mean direction is nearest.
    Departs: "auto" is not from the paper. The training for the clustering counts as a round; if all
    clients take part in every round, it combines the paper's clustering with the first round after
    it. A client whose reply is lost in that round joins like a newcomer the next time it is
    selected.
    Reference: Briggs et al., Federated Learning with Hierarchical Clustering of Local Updates to
    Improve Training on Non-IID Data, IJCNN 2020.
    """
    if threshold == "auto" and clusters is None:
        how = EvidenceRule(Probe("model"), trial, trial_rounds, first=rounds, later=rounds)
        rule = by_evidence(how, once_after(how, rounds), why=not_yet(rounds))
        return grouped("fl-hc", rule)
    height = threshold
    distance = {"l1": manhattan, "l2": euclidean, "cosine": cosine}[metric]

    def label(state: State, info: Round, sent: Sent) -> tuple[Matrix, dict[str, Any]]:
        return cut_tree(sent, distance(changes(state, sent)), linkage, height, clusters)

    check = no_more("fl-hc", "clusters", clusters)
    return grouped("fl-hc", regrouped(once_from(rounds), label, check, why=not_yet(rounds)))


@method
def flis(
    threshold: Share | Literal["auto"] = "auto",
    graph: Literal["hierarchical", "threshold"] = "hierarchical",
    every: Natural = 0,
    trial: TrialMode = "auto",
    trial_rounds: Count = 1,
) -> Method:
    """Groups by the outputs of clients' models on the server's public samples; FedAvg inside each.

    Family: clustered.
    Rule: in the first round all clients, not only the cohort, train, and the server runs their
    models on its public samples. The similarity of two clients is the cosine of their outputs: the
    probabilities of all classes for all samples, as one vector. The server clusters the clients by
    this similarity. Each group's model is the mean, weighted by n_i, of the models that its members
    have just trained; then FedAvg inside each group. With "auto", clients train on two halves of
    their data. The evidence is the grouping whose mean outputs on one half best predict the outputs
    on the other, and a trial on validation data decides whether the groups are used.
    Args:
        threshold: the similarity at which clients are grouped, 0 to 1 (0 is one group), or "auto",
            which uses evidence and a trial instead.
        graph: "hierarchical" merges groups as long as the mean similarity between their clients is
            at least the threshold; "threshold" links clients of at least this similarity and groups
            clients that are linked, directly or through others.
        every: rounds from one clustering to the next, 0 or more; 0 clusters once. With "auto",
            evidence is gathered again only as long as it finds one group, and less and less often.
        trial: "auto" makes a trial if the evidence finds groups, "always" makes one in any case,
            "off" uses the groups of the evidence.
        trial_rounds: rounds that a trial takes, 1 or more.
    Server sees: each client's model, once or in every clustering; otherwise means.
    Travels: 1 model down, 1 up; in a round with a clustering, for all clients. With "auto", also a
    model down and two up for the evidence, and in a trial at most one more model up and the models
    of all a client's candidate groups down.
    Newcomers: get every group's model and join the group with the lowest loss on their training
    data. With "auto", they train θ⁰ as the others did and join the group whose mean outputs are
    nearest.
    Departs: "auto" is not from the paper. The paper compares predicted labels, this implementation
    probabilities. The training for the clustering counts as a round. When the server runs a model,
    layers that clients do not send are those of θ⁰. A client whose reply is lost in such a round
    joins like a newcomer the next time it is selected.
    Reference: Morafah et al., FLIS: Clustered Federated Learning via Inference Similarity for
    Non-IID Data Distribution, IEEE OJCS 2023.
    """
    linkage: Linkage = "average" if graph == "hierarchical" else "single"

    def check(setup: Setup) -> None:
        answers(setup.public, setup.start)

    if threshold == "auto":
        how = EvidenceRule(
            Probe("model"), trial, trial_rounds, views=lambda public: partial(answers, public)
        )
        rule = by_evidence(how, while_one(how, every), check)
        return grouped("flis", replace(rule, needs_public=True))
    similarity = threshold

    def label(state: State, info: Round, sent: Sent) -> tuple[Matrix, dict[str, Any]]:
        models = [w.onto(state.models[state.groups[c]]) for c, w in sent.items()]
        rows = np.stack([answers(info.public, m) for m in models])
        return cut_tree(sent, cosine(rows), linkage, similarity, least_similarity=0)

    due = every_so_often(every) if every else once_from(0)
    return grouped("flis", replace(regrouped(due, label, check), needs_public=True))


@method
def adaptive(
    threshold: Annotated[float, Field(ge=-1, le=1)] | Literal["auto"] = "auto",
    every: Count = 5,
    trial: TrialMode = "auto",
    trial_rounds: Count = 1,
) -> Method:
    """Groups by the direction of updates, found repeatedly; smaller clients train for fewer epochs.

    Family: clustered.
    Rule: a client trains for E_i = max(1, round(E·n_i/max n)) epochs (halves are rounded to the
    even number), where E is the run's number of epochs. In round 1 and every ``every`` rounds all
    clients, not only the cohort, train. The server clusters their updates by cosine similarity
    (agglomerative clustering, average linkage) and cuts the tree at 1 − T. Each group's model is
    the mean, weighted by n_i, of the models that its members have just trained; then FedAvg inside
    each group. With "auto", the clients instead train on two halves of their data, all for the same
    number of steps. The evidence is the grouping whose mean directions on one half best predict the
    directions on the other, and a trial on validation data decides whether the groups are used.
    Args:
        threshold: T, the mean similarity down to which groups merge, -1 to 1; -1 is one group, and
            FedAvg to the bit if all clients have equally many samples. "auto" uses evidence and a
            trial instead.
        every: rounds from one clustering to the next, 1 or more. With "auto", evidence is gathered
            again only as long as it finds one group: after ``every`` rounds, then after twice as
            many, and so on.
        trial: "auto" makes a trial if the evidence finds groups, "always" makes one in any case,
            "off" uses the groups of the evidence.
        trial_rounds: rounds that a trial takes, 1 or more.
    Server sees: each client's number of samples before the first round, its model in every
    clustering; otherwise means.
    Travels: 1 model down, 1 up; in a round with a clustering, for all clients. Before the first
    round a short message down and a number up. With "auto", also a model down and two up for the
    evidence, and in a trial one more model up and the models of all a client's candidate groups
    down.
    Newcomers: get every group's model and join the group with the lowest loss on their training
    data; one with more samples than any client at the start trains for E epochs. With "auto", they
    train as the others did and join the group whose mean direction is nearest.
    Departs: "auto" is not from the paper, because a T that is right for one data set can divide
    identical clients of another (as 0.35 does on digits). With a given T and several groups,
    updates are measured from a point of our choice: the mean of the groups' models, weighted by
    their numbers of clients. Measured from their own group's model, the updates of clients whose
    group is well trained differ only by noise. With one group the point is its model; if all
    clients are alike, updates of a late clustering contain only noise, which then divides the
    clients. The paper instead adds up votes over several rounds. The training for the clustering
    counts as a round. A client whose reply is lost in such a round joins like a newcomer the next
    time it is selected. In a combination with a method that says how clients train, only the
    grouping is used.
    Reference: Gong et al., Adaptive Client Clustering for Efficient Federated Learning over Non-IID
    and Imbalanced Data, IEEE Transactions on Big Data 2024.
    """

    def start(fed: Federation, setup: Setup) -> State:
        replies = fed.gather([Order(c, "count") for c in setup.clients])
        if not replies:
            raise TrainingError("adaptive: no client reported its number of samples")
        return everyone().start(fed, setup).joined({}, largest=max(r.examples for r in replies))

    if threshold == "auto":
        how = EvidenceRule(Probe("model"), trial, trial_rounds)
        rule = by_evidence(how, while_one(how, every))
    else:
        similarity = threshold

        def label(state: State, info: Round, sent: Sent) -> tuple[Matrix, dict[str, Any]]:
            rows = changes(state, sent)
            return cut_tree(sent, cosine(rows), "average", similarity, least_similarity=-1)

        rule = regrouped(every_so_often(every), label)
    rule = replace(
        rule,
        start=start,
        tasks={**rule.tasks, "count": lambda client, arrays, config: Upload()},
        tells=lambda state: {"largest": state.memory["largest"]},
    )
    return grouped("adaptive", rule, Local(by_size, gives_way=True))


def by_size(client: Client, start: Weights) -> Fit:
    """Train for a share of the run's epochs: the client's samples over the largest client's."""
    largest = int(client.told["largest"])
    epochs = client.schedule().epochs * min(len(client.train), largest) / largest
    return client.fit(start, epochs=max(1, round(epochs)))


@method
def clusterfl(k: Count, alpha: NonNegative = 0.1, every: Count = 5) -> Method:
    """A model for each client, pulled towards its group's mean; k-means of models finds the groups.

    Family: clustered.
    Rule: client i keeps and uses its own model w_i. It minimises its loss + α·‖w_i − w̄‖², starting
    from its last w_i, and sends the new w_i; w̄ is the last mean, weighted by n_i, of its group's
    models. In round 1 and every ``every`` rounds all clients, not only the cohort, train, and
    k-means of all w_i gives new groups.
    Args:
        k: the number of groups, 1 to the number of clients. There are fewer if models coincide or
            replies are lost.
        alpha: strength α of the pull, 0 or more; 0 is ``local`` to the bit, if all clients take
            part.
        every: rounds from one clustering to the next, 1 or more.
    Server sees: each client's model in every clustering; otherwise means.
    Travels: 1 model down, 1 up; in a round with a clustering, for all clients.
    Newcomers: get every group's mean and join the group with the lowest loss on their training
    data; they use this mean until they have trained.
    Departs: this is the k-means form of the paper's multi-task objective; groups are found at
    intervals, not in every iteration, and, unlike in the paper, no stragglers or weakly related
    clients are dropped. A client whose reply is lost in a round with a clustering joins like a
    newcomer the next time it is selected, with the model that it had.
    Reference: Ouyang et al., ClusterFL: A Similarity-Aware Federated Learning System for Human
    Activity Recognition, MobiSys 2021.
    """

    def train(client: Client, received: Weights) -> Fit:
        last = client.kept("clusterfl") or received
        fit = client.fit(last, proximal(2 * alpha, anchor=received))
        client.state["clusterfl"] = fit.weights
        return fit

    def label(state: State, info: Round, sent: Sent) -> tuple[Matrix, dict[str, Any]]:
        rows = np.stack([w.parameters.numpy() for w in sent.values()])
        return kmeans_up_to(rows, k)[0], {
            "clients": list(sent),
            "distances": matrix(euclidean(rows)),
        }

    check = no_more("clusterfl", "k", k)
    rule = regrouped(every_so_often(every), label, check)
    return grouped("clusterfl", rule, keeping("clusterfl", train))


# --- the shared rule -----------------------------------------------------------------------------


Due = Callable[[State, Round], bool]


def every_so_often(rounds: int) -> Due:
    """In the first round, and then every ``rounds`` rounds."""
    return lambda _, info: info.number % rounds == 0


def once_from(number: int) -> Due:
    """In this round, or in the first later one in which a client answers."""
    return lambda state, info: info.number >= number and 0 in state.models


def not_yet(rounds: int) -> str:
    """Why there is one group, if clients are compared only after this many rounds.

    >>> not_yet(5), not_yet(0)
    ('clients are compared in round 6, after 5 rounds with one model', '')
    """
    with_one_model = f"{rounds} round{'s' * (rounds > 1)} with one model"
    return f"clients are compared in round {rounds + 1}, after {with_one_model}" if rounds else ""


def regrouped(due: Due, label: Label, check: Check | None = None, why: str = "") -> Assign:
    """One group at first; in each round that is ``due``, all clients train and are regrouped.

    Until the first such round, ``why`` says why there is one group.
    This is the training of that round: each new group's model is the mean of its members'
    uploads. Groups get new names, so that other state kept for a group's model starts anew.
    A client that does not answer has no group until the next time it is selected.
    """

    def sorts(
        state: State, info: Round, replies: list[Reply], more: More
    ) -> tuple[State, list[Reply]]:
        cohort = set(info.cohort)
        others = [c for c in state.groups if c not in cohort]
        if others:
            replies = sorted([*replies, *more(others)], key=lambda r: r.client)
        sent = {r.client: r.arrays["model"] for r in replies if "model" in r.arrays}
        if not sent:
            return state, replies
        labels, notes = label(state, info, sent)  # type: ignore[arg-type]
        groups: dict[ClientId, Slot] = {
            c: f"{info.number + 1}/{g}" for c, g in zip(sent, labels, strict=True)
        }
        # Layers that clients do not send are the same in every model.
        models = dict.fromkeys(groups.values(), next(iter(state.models.values())))
        return State(models, groups, state.memory, notes), replies

    def start(fed: Federation, setup: Setup) -> State:
        state = everyone().start(fed, setup)
        return replace(state, notes={"why": why}) if why else state

    return Assign(start, sees="each", check=check, sorts=sorts, looks=due)


def changes(state: State, sent: Sent) -> Matrix:
    """How each client changed the parameters, one row per client, all from the same point.

    This is the model that they trained; if there are several, their mean over clients.
    """
    layout = next(iter(sent.values())).layout
    point = torch.zeros(layout.trainable, dtype=torch.float64)
    for slot, count in Counter(state.groups[c] for c in sent).items():
        model = state.models[slot].part(layout)
        point.add_(model.parameters.double(), alpha=count / len(sent))
    return np.stack([(w.parameters - point).float().numpy() for w in sent.values()])


def answers(public: Public | None, model: Weights) -> Matrix:
    """The class probabilities of a model for all public samples, in one row."""
    if public is None or not len(public.x):
        raise no_public("flis")
    outputs = public.outputs(model, public.x)
    if outputs.ndim != 2 or outputs.shape[1] < 2:
        raise ConfigError("method flis needs classes: it compares the probabilities of classes")
    return outputs.double().softmax(-1).reshape(-1).numpy()
