"""Methods whose server looks at clients' models now and then, and groups the clients anew."""

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
from coterie.methods.by_evidence import Evidenced, Try, by_evidence, once_after, while_one
from coterie.methods.tree_cuts import Linkage, cut_tree, no_more

Matrix = np.ndarray[Any, Any]
Sent = Mapping[ClientId, Weights]  # the models of a round's replies, as they came
# A label for each of these models, and what there is to show.
Label = Callable[[State, Round, Sent], tuple[Matrix, dict[str, Any]]]


@method
@exclusive("threshold", "clusters")
def fl_hc(
    rounds: Natural = 5,
    threshold: Bound | Literal["auto"] = "auto",
    clusters: Count | None = None,
    metric: Literal["l1", "l2", "cosine"] = "l2",
    linkage: Linkage = "average",
    trial: Try = "auto",
    trial_rounds: Count = 1,
) -> Method:
    """FedAvg for a few rounds, then groups by everybody's update, found once; FedAvg inside each.

    Family: clustered.
    Rule: after ``rounds`` rounds of FedAvg all clients, not only the cohort, train the model once;
    the server clusters their updates (agglomerative) and cuts the tree at ``threshold``. Each
    group's model is the mean, by n_i, of what its members have just trained; then FedAvg inside.
    With "auto", all clients train the model at that point on two halves of their data, as many
    steps as are needed; the groups of the updates' directions that best predict the clients' other
    halves are the evidence, and a trial on validation data decides whether they pay.
    Args:
        rounds: rounds of FedAvg before the clustering, 0 or more; a run that ends before it is
            FedAvg.
        threshold: the height of the cut, 0 or more, in units of ``metric`` (inf is one group), or
            "auto": evidence and trial.
        clusters: the number of groups instead of a threshold, 1 to the number of clients.
        metric: the distance of two updates: "l1", "l2" or "cosine", which is 1 − cos; with a given
            threshold or number of groups only.
        linkage: how the distance of two groups comes from those of their clients; likewise.
        trial: "auto", a trial where the evidence finds groups; "always"; or "off", the groups that
            the evidence finds.
        trial_rounds: rounds that a trial takes, 1 or more.
    Server sees: each client's model, once or twice; otherwise means.
    Travels: 1 model down, 1 up; in the round of the clustering, for all clients. With "auto" also a
    model down and two up for the evidence, and in a trial at most one more model up and those of
    all a client's groups down.
    Newcomers: get every group's model and join the one with the lowest loss on their training data.
    With "auto" they train the model of the clustering alike and join the group whose mean direction
    is nearest.
    Departs: "auto" is ours. The training that is clustered counts as a round; where everybody takes
    part in every round this is the paper's clustering and the first round after it in one. A client
    whose reply is lost in that round joins at its next turn as a newcomer does.
    Reference: Briggs et al., Federated Learning with Hierarchical Clustering of Local Updates to
    Improve Training on Non-IID Data, IJCNN 2020.
    """
    if threshold == "auto" and clusters is None:
        how = Evidenced(Probe("model"), trial, trial_rounds, first=rounds, later=rounds)
        return grouped("fl-hc", by_evidence(how, once_after(how, rounds)))
    height = threshold
    distance = {"l1": manhattan, "l2": euclidean, "cosine": cosine}[metric]

    def label(state: State, info: Round, sent: Sent) -> tuple[Matrix, dict[str, Any]]:
        return cut_tree(sent, distance(changes(state, sent)), linkage, height, clusters)

    check = no_more("fl-hc", "clusters", clusters)
    return grouped("fl-hc", regrouped(once_from(rounds), label, check))


@method
def flis(
    threshold: Share | Literal["auto"] = "auto",
    graph: Literal["hierarchical", "threshold"] = "hierarchical",
    every: Natural = 0,
    trial: Try = "auto",
    trial_rounds: Count = 1,
) -> Method:
    """Groups by what clients' models answer to the server's public samples; FedAvg inside each.

    Family: clustered.
    Rule: in the first round all clients, not only the cohort, train; the server runs their models
    on its public samples. Two clients are as similar as the cosine of their answers: the
    probabilities of all classes for all samples, as one vector. Clients are clustered by that. Each
    group's model is the mean, by n_i, of what its members have just trained; then FedAvg inside.
    With "auto", clients train on two halves of their data, and the groups of answers that best
    predict the other halves' answers are the evidence; a trial on validation data decides whether
    they pay.
    Args:
        threshold: the similarity at which clients are grouped, 0 to 1 (0 is one group), or "auto":
            evidence and trial.
        graph: "hierarchical", groups merge while the mean similarity of their clients is at least
            the threshold; or "threshold", clients of at least that similarity are linked, and
            whoever is linked through others belongs to the same group.
        every: rounds from one clustering to the next, 0 or more; 0 clusters once. With "auto" the
            clients are asked again only while the evidence finds one group, and ever less often.
        trial: "auto", a trial where the evidence finds groups; "always"; or "off", the groups that
            the evidence finds.
        trial_rounds: rounds that a trial takes, 1 or more.
    Server sees: each client's model, once or in every clustering; otherwise means.
    Travels: 1 model down, 1 up; in a round with a clustering, for all clients. With "auto" also a
    model down and two up for the evidence, and in a trial at most one more model up and those of
    all a client's groups down.
    Newcomers: get every group's model and join the one with the lowest loss on their training data.
    With "auto" they train θ⁰ alike and join the group whose mean answers are nearest.
    Departs: "auto" is ours. The paper compares predicted labels, this probabilities. The training
    that is clustered counts as a round. Layers that do not travel are those of θ⁰ when the server
    runs a model. A client whose reply is lost in such a round joins at its next turn as a newcomer
    does.
    Reference: Morafah et al., FLIS: Clustered Federated Learning via Inference Similarity for
    Non-IID Data Distribution, IEEE OJCS 2023.
    """
    linkage: Linkage = "average" if graph == "hierarchical" else "single"

    def check(setup: Setup) -> None:
        answers(setup.public, setup.start)

    if threshold == "auto":
        how = Evidenced(
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
    trial: Try = "auto",
    trial_rounds: Count = 1,
) -> Method:
    """Groups by the direction of updates, found again and again; small clients train for less.

    Family: clustered.
    Rule: a client trains E_i = max(1, round(E·n_i/max n)) epochs (halves to the even number), E the
    run's epochs. In round 1 and every ``every`` rounds all clients, not only the cohort, train; the
    server clusters their updates by cosine similarity (agglomerative, average linkage) and cuts the
    tree at 1 − T. Each group's model is the mean, by n_i, of what its members have just trained;
    then FedAvg inside. With "auto" the clients train on two halves of their data instead, the same
    number of steps each; the groups of directions that best predict the other halves are the
    evidence, and a trial on validation data decides whether they pay.
    Args:
        threshold: T, the mean similarity down to which groups merge, -1 to 1; -1 is one group, and
            with clients of one size FedAvg to the bit. "auto" is evidence and trial.
        every: rounds from one clustering to the next, 1 or more. With "auto" clients are asked
            again only while the evidence finds one group: after ``every`` rounds, twice as many, …
        trial: "auto", a trial where the evidence finds groups; "always"; or "off", the groups that
            the evidence finds.
        trial_rounds: rounds that a trial takes, 1 or more.
    Server sees: each client's number of samples before the first round, its model in every
    clustering; otherwise means.
    Travels: 1 model down, 1 up; in a round with a clustering, for all clients. Before the first
    round a question and a number. With "auto" also a model down and two up for the evidence, and in
    a trial one more model up and those of all a client's groups down.
    Newcomers: get every group's model and join the one with the lowest loss on their training data;
    who has more samples than anybody had trains E epochs. With "auto" they train alike and join the
    group whose mean direction is nearest.
    Departs: "auto" is ours (a T that is right for one data set divides identical clients of
    another, 0.35 those of digits). With a given T, the point that updates are measured from once
    there are several groups is ours: the mean of the groups' models, as many times as each has
    clients. From their own models, clients of groups that have learnt differ by noise only. In one
    group it is the group's model; if all clients are alike, a late clustering has only noise to go
    by and divides them. The paper instead adds up votes of several rounds. The training that is
    clustered counts as a round. A client whose reply is lost in such a round joins at its next turn
    as a newcomer does. Combined with a method that says how a client trains, only the grouping is
    taken.
    Reference: Gong et al., Adaptive Client Clustering for Efficient Federated Learning over Non-IID
    and Imbalanced Data, IEEE Transactions on Big Data 2024.
    """

    def start(fed: Federation, setup: Setup) -> State:
        replies = fed.gather([Order(c, "count") for c in setup.clients])
        if not replies:
            raise TrainingError("adaptive: no client said how many samples it has")
        return everyone().start(fed, setup).joined({}, largest=max(r.examples for r in replies))

    if threshold == "auto":
        how = Evidenced(Probe("model"), trial, trial_rounds)
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
    """Train for as many of the run's epochs as one's samples are of the most that anybody has."""
    largest = int(client.told["largest"])
    epochs = client.schedule().epochs * min(len(client.train), largest) / largest
    return client.fit(start, epochs=max(1, round(epochs)))


@method
def clusterfl(k: Count, alpha: NonNegative = 0.1, every: Count = 5) -> Method:
    """A model for each client, pulled towards the mean of its group; groups by k-means of models.

    Family: clustered.
    Rule: client i keeps a model w_i of its own and uses it. It minimises its loss +
    α·‖w_i − w̄‖², w̄ the mean, by n_i, of its group's models as it last came to the server, starting
    where it left off, and sends w_i. In round 1 and every ``every`` rounds all clients, not only
    the cohort, train, and k-means of all w_i gives new groups.
    Args:
        k: groups, 1 to the number of clients. Fewer are found where models coincide or replies are
            lost.
        alpha: strength of the pull, 0 or more; 0 is ``local`` to the bit, if all take part.
        every: rounds from one clustering to the next, 1 or more.
    Server sees: each client's model in every clustering; otherwise means.
    Travels: 1 model down, 1 up; in a round with a clustering, for all clients.
    Newcomers: get every group's mean and join the one with the lowest loss on their training data;
    they use it until they have trained.
    Departs: the k-means form of the paper's multi-task objective; groups are found at intervals,
    not in every iteration, and the paper's dropping of stragglers and of clients that are little
    related is left out. A client whose reply is lost in a round with a clustering joins at its next
    turn as a newcomer does, with the model that it had.
    Reference: Ouyang et al., ClusterFL: A Similarity-Aware Federated Learning System for Human
    Activity Recognition, MobiSys 2021.
    """

    def train(client: Client, received: Weights) -> Fit:
        own = client.kept("clusterfl") or received
        fit = client.fit(own, proximal(2 * alpha, anchor=received))
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


# --- the rule that they share --------------------------------------------------------------------


Due = Callable[[State, Round], bool]


def every_so_often(rounds: int) -> Due:
    """In the first round and every so many."""
    return lambda _, info: info.number % rounds == 0


def once_from(number: int) -> Due:
    """In this round, or the first later one in which anybody answers."""
    return lambda state, info: info.number >= number and 0 in state.models


def regrouped(due: Due, label: Label, check: Check | None = None) -> Assign:
    """One group at first; in the rounds that are ``due`` everybody trains and is grouped anew.

    What was trained for that is the round's training: each new group's model is its mean. Groups
    have new names, so that whatever else is kept for a group's model begins anew. Whoever does not
    answer has no group until its next turn.
    """

    def sorts(
        state: State, info: Round, replies: list[Reply], more: More
    ) -> tuple[State, list[Reply]]:
        asked = set(info.cohort)
        rest = [c for c in state.groups if c not in asked]
        if rest:
            replies = sorted([*replies, *more(rest)], key=lambda r: r.client)
        sent = {r.client: r.arrays["model"] for r in replies if "model" in r.arrays}
        if not sent:
            return state, replies
        labels, notes = label(state, info, sent)  # type: ignore[arg-type]
        groups: dict[ClientId, Slot] = {
            c: f"{info.number + 1}/{g}" for c, g in zip(sent, labels, strict=True)
        }
        # What does not travel is the same in every model.
        models = dict.fromkeys(groups.values(), next(iter(state.models.values())))
        return State(models, groups, state.memory, notes), replies

    return Assign(everyone().start, sees="each", check=check, sorts=sorts, looks=due)


def changes(state: State, sent: Sent) -> Matrix:
    """What each client changed of the parameters, a row each, all from one point.

    That is the model that they trained; where there are several, the mean of these over clients.
    """
    layout = next(iter(sent.values())).layout
    middle = torch.zeros(layout.trainable, dtype=torch.float64)
    for slot, count in Counter(state.groups[c] for c in sent).items():
        model = state.models[slot].part(layout)
        middle.add_(model.parameters.double(), alpha=count / len(sent))
    return np.stack([(w.parameters - middle).float().numpy() for w in sent.values()])


def answers(public: Public | None, model: Weights) -> Matrix:
    """The probabilities that a model gives to each class of each public sample, in one row."""
    if public is None or not len(public.x):
        raise no_public("flis")
    found = public.outputs(model, public.x)
    if found.ndim != 2 or found.shape[1] < 2:
        raise ConfigError("method flis needs classes: it compares the probabilities of answers")
    return found.double().softmax(-1).reshape(-1).numpy()
