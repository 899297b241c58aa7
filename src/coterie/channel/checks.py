"""The server's checks of answers from real clients.

In a simulation, an invalid answer is a bug in the experiment and ends the run. In a real federation
it concerns one client only: the answer is rejected with a message that names the client, and the
run continues. A rejected answer counts as lost; nothing of it is used.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from coterie.channel.wire import Message
from coterie.core.messages import Array, ClientId, Order
from coterie.core.weights import Weights
from coterie.errors import TrainingError

_FIELDS = {
    *("examples", "arrays", "metrics", "since", "version", "beside", "of", "scored"),
    *("error", "text"),
}
_HEADER = 1 << 26  # bytes; valid headers have hundreds, or thousands with shares of secrets
_AXES = 8
_MANY = 10_000  # arrays, or metrics
_NAME = re.compile(r"[\w .:/$-]{1,100}")
_SCORE = re.compile(r"(val|test)_(?!(worst|worst_client|std|val|p\d+|weighted_.*)$)[\w .-]{1,80}")
Shape = tuple[tuple[str, Any], ...]


def printable(text: object) -> str:
    """Make a text from another machine safe to show: one short line without control characters."""
    return "".join(c if c.isprintable() else "?" for c in str(text)[:300])


def vet_message(message: Message, most: int) -> None:
    """Refuse a message that it could be dangerous to unpack.

    All its arrays together may hold one number for each byte received, as uncompressed arrays do,
    plus ``most`` numbers, which a codec may produce from few bytes.
    """
    if len(message.header) > _HEADER:
        raise TrainingError(f"its header has {len(message.header)} bytes")
    header = json.loads(message.header)
    body, arrays = header["body"], header["arrays"]
    if not isinstance(body, dict) or not set(body) <= _FIELDS or len(arrays) > _MANY:
        raise TrainingError("it does not have the form of an answer")
    if any(_tagged(value) for key, value in body.items() if key != "beside"):
        raise TrainingError("it does not have the form of an answer")
    left = most + sum(len(payload) for payload in message.payloads)
    for _, shape, _, *_ in arrays:
        if len(shape) > _AXES or min(shape, default=0) < 0 or math.prod(shape) > left:
            raise TrainingError(f"an array of shape {shape[:_AXES]} is larger than allowed")
        left -= math.prod(shape)


def _tagged(value: Any) -> bool:
    """Whether it holds mappings with reserved names, which valid answers do not."""
    if isinstance(value, dict):
        return "$dict" in value or "$tuple" in value or any(_tagged(v) for v in value.values())
    return isinstance(value, list) and any(_tagged(v) for v in value)


def vet(body: Mapping[str, Any], samples: int, scoring: bool) -> None:
    """Refuse an answer with impossible numbers; the client has reported ``samples`` samples."""
    examples = body.get("examples")
    if not isinstance(examples, int) or isinstance(examples, bool) or not 0 <= examples <= samples:
        raise TrainingError(f"it counts {printable(examples)} samples, and has {samples}")
    metrics, arrays = body.get("metrics"), body.get("arrays")
    if not isinstance(metrics, Mapping) or not isinstance(arrays, Mapping):
        raise TrainingError("it does not have the form of an answer")
    if scoring:
        _vet_scores(metrics)
    else:
        _vet_numbers(metrics)
        if not all(math.isfinite(value) for value in metrics.values()):
            raise TrainingError("one of its metrics is not finite")
    scored = body.get("scored", {})
    if not isinstance(scored, Mapping):
        raise TrainingError("its scores do not have the form of scores")
    _vet_scores(scored.get("metrics", {}))
    version = body.get("version", "")
    if not isinstance(version, str) or not _NAME.fullmatch(version or "-"):
        raise TrainingError("the version of its state is not a valid name")
    for name, array in arrays.items():
        if not _NAME.fullmatch(name):
            raise TrainingError("the name of one of its arrays is not valid")
        if isinstance(array, Weights) and array.vector.dtype != torch.float32:
            raise TrainingError(f"its '{name}' is of {array.vector.dtype}, not float32")


def _vet_numbers(numbers: Any) -> None:
    if not isinstance(numbers, Mapping) or len(numbers) > _MANY:
        raise TrainingError("its metrics do not have the form of metrics")
    for name, value in numbers.items():
        known = isinstance(name, str) and _NAME.fullmatch(name)
        if not known or isinstance(value, bool) or not isinstance(value, float | int):
            raise TrainingError(f"its '{printable(name)}' is not a number")
        float(value)  # raises an error for an integer that is too large


def _vet_scores(numbers: Any) -> None:
    """Refuse scores with invalid names, and accuracies and R² above 1."""
    _vet_numbers(numbers)
    for name, value in numbers.items():
        if not _SCORE.fullmatch(name):
            raise TrainingError(f"'{printable(name)}' is not a valid name of a score")
        if name.endswith(("_accuracy", "_r2")) and value > 1:
            raise TrainingError(f"its {printable(name)} is {value}, and scores are at most 1")


def misfits(
    orders: Mapping[ClientId, Order], bodies: Mapping[ClientId, Mapping[str, Any]]
) -> dict[ClientId, str]:
    """Clients whose arrays differ in form from those of others with the same order, and why.

    The order determines which arrays there are and which layers a model has; the sizes of other
    arrays may vary. The majority is right. If two clients disagree, the one that sends arrays like
    those it was sent is right. Clients that were sent no arrays are compared with each other.
    """
    same_order: dict[str, list[ClientId]] = {}
    for client in sorted(bodies):
        order = orders[client]
        key = json.dumps([order.task, order.config, bool(order.arrays)], default=str)
        same_order.setdefault(key, []).append(client)
    reasons = {}
    for clients in same_order.values():
        shapes = {c: shape_of(bodies[c]["arrays"]) for c in clients}
        votes: Counter[Shape] = Counter()
        for client in clients:  # an answer that resembles its order counts a little more
            like = _like(shapes[client], shape_of(orders[client].arrays))
            votes[shapes[client]] += 3 if like else 2
        right = max(votes, key=lambda shape: (votes[shape], str(shape)))
        for client in clients:
            if shapes[client] != right:
                reasons[client] = (
                    f"its arrays differ in form from those of the others ({_in_words(right)})"
                )
    return reasons


def shape_of(arrays: Mapping[str, Array]) -> Shape:
    """The form of arrays: their names, and the layers or the type of each."""
    return tuple(
        sorted(
            (name, array.layout.names if isinstance(array, Weights) else str(array.dtype))
            for name, array in arrays.items()
        )
    )


def _like(answered: Shape, asked: Shape) -> bool:
    known = dict(asked)
    return any(known.get(name) == form for name, form in answered)


def _in_words(shape: Shape) -> str:
    return ", ".join(
        f"{name} of {len(form)} tensors" if isinstance(form, tuple) else name
        for name, form in shape
    )
