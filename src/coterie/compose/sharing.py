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


def _last(layout: Layout, k: int, word: str) -> set[str]:
    """The last ``k`` layers; refused if there are not so many, or if all of them are frozen."""
    if k > len(layout.layers):
        raise ConfigError(
            f"{k} {word} layers asked for, but the model has {len(layout.layers)}: "
            f"{', '.join(layout.layers)}"
        )
    layers = set(layout.layers[len(layout.layers) - k :])
    if k and all(e.kind == "frozen" for e in layout.entries if e.layer in layers):
        raise ConfigError(
            f"the {word} layers ({', '.join(sorted(layers))}) are frozen: nothing would be "
            f"{word}. Freeze others, or let more layers be {word}"
        )
    return layers


def only_last(k: int) -> Shared:
    """Share the last ``k`` layers only."""

    def shared(layout: Layout) -> Collection[str]:
        wanted = _last(layout, k, "shared")
        return [e.name for e in layout.entries if e.layer in wanted]

    return shared


def all_but_last(k: int) -> Shared:
    """Share all layers except the last ``k``."""

    def shared(layout: Layout) -> Collection[str]:
        kept = _last(layout, k, "personal")
        return [e.name for e in layout.entries if e.layer not in kept]

    return shared


@dataclass(frozen=True)
class Sharing:
    """What travels, and what stays with a client, in its state under ``own``.

    What is frozen is everybody's from the start; it neither travels nor is kept.
    """

    shared: Shared = all_layers

    def travelling(self, layout: Layout) -> Layout:
        """The part of a model that goes to and fro."""
        wanted = set(self.shared(layout))
        return layout.only([n for n in layout.shareable if n in wanted])

    def staying(self, layout: Layout) -> Layout:
        """The part that each client keeps for itself."""
        gone = set(self.travelling(layout).names)
        return layout.only(
            [e.name for e in layout.entries if e.name not in gone and e.kind != "frozen"]
        )

    def offer(self, models: Mapping[Slot, Weights], slots: Collection[Slot]) -> dict[str, Array]:
        """What of these models is sent, by the name of its slot."""
        parts = {
            str(s): models[s].part(self.travelling(models[s].layout)) for s in slots if s in models
        }
        return {s: p for s, p in parts.items() if p.layout.size}

    def received(self, client: Client, arrays: Mapping[str, Array]) -> tuple[str, Weights]:
        """The model that was sent, by the name of its slot, laid over what the client keeps.

        Clients of methods that do not have them choose take one model: with several, which one they
        train would say something about their data.
        """
        offers = self._offers(client, arrays)
        if len(offers) > 1:
            raise TrainingError(
                f"client {client.id} was sent {len(offers)} models, and takes one: this method "
                "does not have clients choose"
            )
        return next(iter(offers.items()))

    def best(
        self, client: Client, arrays: Mapping[str, Array], most: int = 0
    ) -> tuple[str, Weights]:
        """The offer that fits the client's training data best, laid over what it keeps.

        Of more than ``most``, if that is not 0, a client chooses none: its choice would say more.
        """
        offers = self._offers(client, arrays)
        if 0 < most < len(offers):
            raise TrainingError(
                f"client {client.id} was offered {len(offers)} models, and chooses among {most} at "
                "most"
            )
        if len(offers) == 1:
            return next(iter(offers.items()))
        losses = {s: client.loss(w) for s, w in offers.items()}
        best = min(losses, key=lambda s: losses[s])
        return best, offers[best]

    def _offers(self, client: Client, arrays: Mapping[str, Array]) -> dict[str, Weights]:
        """The models that were sent, each whole; what the client has itself if there is none."""
        own = client.kept("own")
        base = client.base if own is None else own.onto(client.base)
        offers = {s: w.onto(base) for s, w in arrays.items() if isinstance(w, Weights)}
        return offers or {"": base}

    def keep(self, client: Client, weights: Weights) -> Weights:
        """Keep what stays; give back what travels."""
        own = self.staying(weights.layout)
        if own.size:
            client.state["own"] = weights.part(own)
        return weights.part(self.travelling(weights.layout))
