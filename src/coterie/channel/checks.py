"""What a server checks of answers that come from machines of others.

In a simulation a client that does something wrong is a mistake in the experiment, and ends it. In a
real federation it is one client's own trouble: its answer is rejected, by name, and the rest goes
on. A rejected answer is as good as lost; nothing of it is used.
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

_SAID = {
    *("examples", "arrays", "metrics", "since", "version", "beside", "of", "scored"),
    *("error", "text"),
}
_HEADER = 1 << 26  # bytes; an honest one is a few hundred, with shares of secrets some thousands
_AXES = 8
_MANY = 10_000  # arrays, or numbers beside them
_NAME = re.compile(r"[\w .:/$-]{1,100}")
_SCORE = re.compile(r"(val|test)_(?!(worst|worst_client|std|val|p\d+|weighted_.*)$)[\w .-]{1,80}")
Shape = tuple[tuple[str, Any], ...]


def printable(text: object) -> str:
    """What may be shown of a text that somebody else wrote: one short line, nothing but signs."""
    return "".join(c if c.isprintable() else "?" for c in str(text)[:300])


def vet_message(message: Message, most: int) -> None:
    """Refuse a message before it is unpacked, if that could hurt.

    All its arrays together may hold a number for each byte that came, as plain ones do, and
    ``most`` numbers beyond that, which a codec may make of few bytes.
    """
    if len(message.header) > _HEADER:
        raise TrainingError(f"its header has {len(message.header)} bytes")
    header = json.loads(message.header)
    body, arrays = header["body"], header["arrays"]
    if not isinstance(body, dict) or not set(body) <= _SAID or len(arrays) > _MANY:
        raise TrainingError("it is not made like an answer")
    if any(_tagged(said) for key, said in body.items() if key != "beside"):
        raise TrainingError("it is not made like an answer")
    left = most + sum(len(payload) for payload in message.payloads)
    for _, shape, _, *_ in arrays:
        if len(shape) > _AXES or min(shape, default=0) < 0 or math.prod(shape) > left:
            raise TrainingError(f"an array of shape {shape[:_AXES]} is more than there can be")
        left -= math.prod(shape)


def _tagged(said: Any) -> bool:
    """Whether it has mappings with names that are none, as no honest answer has."""
    if isinstance(said, dict):
        return "$dict" in said or "$tuple" in said or any(_tagged(v) for v in said.values())
    return isinstance(said, list) and any(_tagged(v) for v in said)


def vet(body: Mapping[str, Any], samples: int, scoring: bool) -> None:
    """Refuse an answer whose numbers cannot be, of a client that says it has so many samples."""
    examples = body.get("examples")
    if not isinstance(examples, int) or isinstance(examples, bool) or not 0 <= examples <= samples:
        raise TrainingError(f"it counts {printable(examples)} samples, and has {samples}")
    metrics, arrays = body.get("metrics"), body.get("arrays")
    if not isinstance(metrics, Mapping) or not isinstance(arrays, Mapping):
        raise TrainingError("it is not made like an answer")
    if scoring:
        _vet_scores(metrics)
    else:
        _vet_numbers(metrics)
        if not all(math.isfinite(value) for value in metrics.values()):
            raise TrainingError("a number beside its arrays is not finite")
    scored = body.get("scored", {})
    if not isinstance(scored, Mapping):
        raise TrainingError("its scores are not made like scores")
    _vet_scores(scored.get("metrics", {}))
    version = body.get("version", "")
    if not isinstance(version, str) or not _NAME.fullmatch(version or "-"):
        raise TrainingError("it names its state by something that is no name")
    for name, array in arrays.items():
        if not _NAME.fullmatch(name):
            raise TrainingError("it has an array whose name is none")
        if isinstance(array, Weights) and array.vector.dtype != torch.float32:
            raise TrainingError(f"its '{name}' is of {array.vector.dtype}, not float32")


def _vet_numbers(numbers: Any) -> None:
    if not isinstance(numbers, Mapping) or len(numbers) > _MANY:
        raise TrainingError("the numbers beside its arrays are not made like numbers")
    for name, value in numbers.items():
        known = isinstance(name, str) and _NAME.fullmatch(name)
        if not known or isinstance(value, bool) or not isinstance(value, float | int):
            raise TrainingError(f"its '{printable(name)}' is no number")
        float(value)  # one that is too large for it is an error, too


def _vet_scores(numbers: Any) -> None:
    """Scores have names of their own, and the one that runs are judged by is at most 1."""
    _vet_numbers(numbers)
    for name, value in numbers.items():
        if not _SCORE.fullmatch(name):
            raise TrainingError(f"'{printable(name)}' is no name of a score")
        if name.endswith(("_accuracy", "_r2")) and value > 1:
            raise TrainingError(f"its {printable(name)} is {value}, and scores go up to 1")


def misfits(
    orders: Mapping[ClientId, Order], bodies: Mapping[ClientId, Mapping[str, Any]]
) -> dict[ClientId, str]:
    """Those whose arrays are made unlike those of the others who were asked the same, and why.

    Which arrays there are, and which layers a model has, is what the order says; sizes of other
    arrays are a client's own. Where two are of two minds, the one that sends the like of what it
    was sent is right. Those who are sent nothing, as they learn alone, are judged by each other.
    """
    asked: dict[str, list[ClientId]] = {}
    for client in sorted(bodies):
        order = orders[client]
        same = json.dumps([order.task, order.config, bool(order.arrays)], default=str)
        asked.setdefault(same, []).append(client)
    found = {}
    for clients in asked.values():
        shapes = {c: shape_of(bodies[c]["arrays"]) for c in clients}
        votes: Counter[Shape] = Counter()
        for client in clients:  # one that looks like its order counts a little more
            like = _like(shapes[client], shape_of(orders[client].arrays))
            votes[shapes[client]] += 3 if like else 2
        right = max(votes, key=lambda shape: (votes[shape], str(shape)))
        for client in clients:
            if shapes[client] != right:
                found[client] = f"its arrays are made unlike those of the others ({_told(right)})"
    return found


def shape_of(arrays: Mapping[str, Array]) -> Shape:
    """What arrays are made of: names, layers, types."""
    return tuple(
        sorted(
            (name, array.layout.names if isinstance(array, Weights) else str(array.dtype))
            for name, array in arrays.items()
        )
    )


def _like(answered: Shape, asked: Shape) -> bool:
    known = dict(asked)
    return any(known.get(name) == made for name, made in answered)


def _told(shape: Shape) -> str:
    return ", ".join(
        f"{name} of {len(made)} tensors" if isinstance(made, tuple) else name
        for name, made in shape
    )
