"""DC-PFL's own trial: each client trains its old and its new group's model and compares them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from coterie.client import Client
from coterie.compose.sharing import Sharing, no_layer
from coterie.core.messages import Array, ClientId, Mean, Order, Scalar, Slot, Upload
from coterie.core.method import State
from coterie.core.weights import Weights

SHARING = Sharing()
ALONE = Sharing(no_layer)


def tries(state: State, new: Mapping[ClientId, Slot], client: ClientId, on: str) -> Order:
    """The order to train the old and the new group's model; one model if they are the same."""
    old, arrays = state.groups[client], dict[str, Array]()
    members = [{c for c in g if g[c] == g[client]} for g in (state.groups, new)]
    if client not in state.memory["alone"]:
        arrays["old"] = SHARING.offer(state.models, [old])[str(old)]
        if members[0] != members[1] and new[client] in state.models:
            arrays["new"] = SHARING.offer(state.models, [new[client]])[str(new[client])]
    return Order(client, "try", arrays, {"on": on})


def is_better(tried: Mean, on: str) -> bool:
    """Whether the new groups' loss is lower: on validation data, by more than one standard error.

    The standard error is that of the mean difference over clients. It combines the variance between
    clients with the variance due to each client's few validation samples.
    """
    means = tried.metrics
    if on == "train":
        return means["new"] < means["old"]
    clients = means["counted"] * len(tried.clients)
    if not clients:
        return False
    gain = (means["old"] - means["new"]) / means["counted"]
    between = max(means["square"] / means["counted"] - gain**2, 0.0) * clients / max(clients - 1, 1)
    return gain > math.sqrt((between + means["within"] / means["counted"]) / clients)


def train_both(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
    """Train the old and the new group's model on the same batches; report both losses."""
    losses, on = dict[str, torch.Tensor](), str(config["on"])
    forget(client)  # if the last verdict was lost, that trial's models are still here
    for name, offer in (arrays or {"old": None}).items():
        _, begin = SHARING.received(client, {} if offer is None else {name: offer})
        weights = client.fit(begin).weights
        client.state[f"trial.{name}"] = weights
        mean_only = on == "train"
        loss = torch.tensor([client.loss(weights)]) if mean_only else client.losses(weights, on)
        losses[name] = loss
    if not arrays:
        ALONE.keep(client, weights)
    old, new = losses["old"], losses.get("new", losses["old"])
    if not len(old):
        return Upload(metrics=dict.fromkeys(("old", "new", "square", "within", "counted"), 0.0))
    metrics = {"old": float(old.mean()), "new": float(new.mean())}
    if on != "train":
        gaps = old - new
        within = float(gaps.var(unbiased=len(gaps) > 1)) / len(gaps)
        metrics |= {"square": float(gaps.mean()) ** 2, "within": within, "counted": 1.0}
    return Upload(metrics=metrics)


def settle(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
    """Send the model that the trial decided for."""
    weights = client.kept(f"trial.{config['take']}") or client.kept("trial.old")
    assert weights is not None
    forget(client)
    return sent(client, {"model": weights}, bool(config.get("alone")), {})


def forget(client: Client) -> None:
    """Delete the models of a trial."""
    for name in [n for n in client.state if n.startswith("trial.")]:
        del client.state[name]


def sent(
    client: Client,
    models: Mapping[str, Weights],
    alone: bool,
    metrics: Mapping[str, float],
    slot: str = "",
) -> Upload:
    """What a member of a group sends; a client that is alone keeps its model instead."""
    if alone:
        ALONE.keep(client, models["model"])
        return Upload(metrics=metrics)
    arrays = {name: w.part(SHARING.travelling(w.layout)) for name, w in models.items()}
    SHARING.keep(client, models["model"])
    return Upload(arrays, metrics, dict.fromkeys(arrays, slot) if slot else {})
