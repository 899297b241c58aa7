"""Which layers are shared, and which stay with each client."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from coterie.client import Client
from coterie.core.messages import Array, Slot
from coterie.core.weights import Layout, Weights
from coterie.errors import ConfigError, TrainingError

Shared = Callable[[Layout], Collection[str]]


def all_layers(layout: Layout) -> Collection[str]:
    """Share the whole model."""
    return layout.names


def no_layer(_: Layout) -> Collection[str]:
    """Share nothing."""
    return ()


def _last(layout: Layout, k: int, role: str) -> set[str]:
    """The last ``k`` layers; an error if there are fewer, or if all of them are frozen."""
    if k > len(layout.layers):
        raise ConfigError(
            f"{k} {role} layers asked for, but the model has {len(layout.layers)}: "
            f"{', '.join(layout.layers)}"
        )
    layers = set(layout.layers[len(layout.layers) - k :])
    if k and all(e.kind == "frozen" for e in layout.entries if e.layer in layers):
        raise ConfigError(
            f"the {role} layers ({', '.join(sorted(layers))}) are frozen, so nothing would be "
            f"{role}; freeze other layers, or make more layers {role}"
        )
    return layers


def only_last(k: int) -> Shared:
    """Share the last ``k`` layers only."""

    def shared(layout: Layout) -> Collection[str]:
        layers = _last(layout, k, "shared")
        return [e.name for e in layout.entries if e.layer in layers]

    return shared


def all_but_last(k: int) -> Shared:
    """Share all layers except the last ``k``."""

    def shared(layout: Layout) -> Collection[str]:
        layers = _last(layout, k, "personal")
        return [e.name for e in layout.entries if e.layer not in layers]

    return shared


@dataclass(frozen=True)
class Sharing:
    """Which layers are exchanged, and which are personal and stay in a client's state as ``own``.

    Frozen layers are the same for all clients; they are neither exchanged nor kept.
    """

    shared: Shared = all_layers

    def travelling(self, layout: Layout) -> Layout:
        """The part of a model that is exchanged."""
        if self.shared is all_layers:
            return layout.shared
        names = set(self.shared(layout))
        return layout.only([n for n in layout.shareable if n in names])

    def staying(self, layout: Layout) -> Layout:
        """The personal part of a model, which each client keeps."""
        shared = set(self.travelling(layout).names)
        return layout.only(
            [e.name for e in layout.entries if e.name not in shared and e.kind != "frozen"]
        )

    def offer(self, models: Mapping[Slot, Weights], slots: Collection[Slot]) -> dict[str, Array]:
        """The shared parts of the models of these slots, by slot."""
        parts = {
            str(s): models[s].part(self.travelling(models[s].layout)) for s in slots if s in models
        }
        return {s: p for s, p in parts.items() if p.layout.size}

    def received(
        self, client: Client, arrays: Mapping[str, Array], most: int = 1
    ) -> tuple[str, Weights]:
        """The slot of a received model, and the model combined with the client's personal part.

        Among several, it is the one that fits the client's training data best; if none was sent,
        the client's own model. Clients refuse to choose among more than ``most`` (0: no limit),
        because their choice reveals something about their data: a method must let them.
        """
        personal = client.kept("own")
        base = client.base if personal is None else personal.onto(client.base)
        offers = {s: w.onto(base) for s, w in arrays.items() if isinstance(w, Weights)}
        if len(offers) > most > 0:
            raise TrainingError(
                f"client {client.id} was offered {len(offers)} models, but chooses among at most "
                f"{most}"
                if most > 1
                else f"client {client.id} received {len(offers)} models, but this method does not "
                "let clients choose among several"
            )
        if len(offers) <= 1:
            return next(iter(offers.items()), ("", base))
        losses = {s: client.loss(w) for s, w in offers.items()}
        best = min(losses, key=lambda s: losses[s])
        return best, offers[best]

    def keep(self, client: Client, weights: Weights) -> Weights:
        """Keep the personal part in the client's state, and return the shared part."""
        shared = self.travelling(weights.layout)
        if shared is weights.layout:
            return weights
        personal = self.staying(weights.layout)
        if personal.size:
            client.state["own"] = weights.part(personal)
        return weights.part(shared)
