"""What a server checks of answers that come from machines of others.

In a simulation a client that does something wrong is a mistake in the experiment, and ends it. In a
real federation it is one client's own trouble: its answer is rejected, by name, and the rest goes
on. A rejected answer is as good as lost; nothing of it is used.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from coterie.errors import TrainingError
from coterie.federation import Array, ClientId, Order
from coterie.weights import Weights

Shape = tuple[tuple[str, Any], ...]


def vet(client: ClientId, body: Mapping[str, Any], samples: int) -> None:
    """Refuse an answer whose numbers cannot be, of a client that says it has so many samples."""
    examples = body.get("examples")
    if not isinstance(examples, int) or isinstance(examples, bool) or not 0 <= examples <= samples:
        raise TrainingError(f"it counts {examples!r} samples, and has {samples}")
    metrics = body.get("metrics")
    if not isinstance(metrics, Mapping) or not isinstance(body.get("arrays"), Mapping):
        raise TrainingError("it is not made like an answer")
    for name, value in metrics.items():
        if not isinstance(value, float | int) or not math.isfinite(value):
            raise TrainingError(f"its '{name}' is {value!r}, not a number to work with")
    scored = body.get("scored", {})
    numbers = scored.get("metrics", {}) if isinstance(scored, Mapping) else None
    if not isinstance(numbers, Mapping) or not all(
        isinstance(v, float | int) for v in numbers.values()
    ):
        raise TrainingError("its scores are not numbers")
    if not isinstance(body.get("version", ""), str):
        raise TrainingError("it names its state by something that is no name")


def misfits(
    orders: Mapping[ClientId, Order], bodies: Mapping[ClientId, Mapping[str, Any]]
) -> dict[ClientId, str]:
    """Those whose arrays are made unlike those of the others who were asked the same, and why.

    Where two are of two minds, the one that sends what it was sent the like of is right.
    """
    asked: dict[str, list[ClientId]] = {}
    for client in sorted(bodies):
        order = orders[client]
        asked.setdefault(json.dumps([order.task, order.config], default=str), []).append(client)
    found = {}
    for clients in asked.values():
        shapes = {c: shape_of(bodies[c]["arrays"]) for c in clients}
        told = {c: shape_of(orders[c].arrays) for c in clients}
        likely = Counter(shapes.values())
        for client in clients:  # one that looks like its order counts a little more
            if _like(shapes[client], told[client]):
                likely[shapes[client]] += 0.5  # type: ignore[assignment]
        right = max(likely, key=lambda shape: (likely[shape], str(shape)))
        for client in clients:
            if shapes[client] != right:
                found[client] = f"its arrays are made unlike those of the others ({_told(right)})"
    return found


def shape_of(arrays: Mapping[str, Array]) -> Shape:
    """What arrays are made of: names, layers and sizes."""
    return tuple(
        sorted(
            (name, array.layout.names if isinstance(array, Weights) else tuple(array.shape))
            for name, array in arrays.items()
        )
    )


def _like(answered: Shape, asked: Shape) -> bool:
    known = dict(asked)
    return any(known.get(name) == made for name, made in answered)


def _told(shape: Shape) -> str:
    return ", ".join(f"{name} of {len(made)} parts" for name, made in shape) or "none"
