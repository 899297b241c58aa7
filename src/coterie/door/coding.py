"""What is encoded, and against what: lossy codecs act on changes since something both sides have.

Up, an array is a change of one that the client received (``Upload.since``); a model that is not is
one of the model that the client sent last, as it arrived. Down, a model is a change of the model of
that name that the client holds already, as it decoded it; if its name is new, as after a split, of
the model that the client received last. At first, that is θ⁰. So what a codec lost is part of the
next such change. What `topk` left out of a change of something received is kept by the client and
added to the next. What is a change of nothing (gradients, bases, centres) travels as it is, and so
do buffers of normalisations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from coterie.door.codec import Codec, Raw, codec
from coterie.door.wire import Choice, Encoded
from coterie.errors import ConfigError, unknown
from coterie.federation import Array
from coterie.weights import Entry, Layout, Weights

References = Mapping[str, Array | None]  # None: the array is a change by itself
# In a client's state: models as received, the model last sent as it arrived, what was not sent yet.
HELD, SENT, LEFT = "$held", "$sent", "$left"
LAST = ""  # the name of the model received last, the reference of one whose name is new


@dataclass(frozen=True)
class Side:
    """One direction: a codec for all layers, and others for some of them."""

    default: Codec = field(default_factory=Raw)
    layers: Mapping[str, Codec] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """Whether everything arrives as it was sent."""
        return self.default.exact and all(c.exact for c in self.layers.values())

    @cached_property
    def plain(self) -> Codec:
        """The codec of what no lossy one may touch: it may still be compressed."""
        _, plus, packed = self.default.spec.partition("+")
        return codec(f"raw{plus}{packed}")

    def of(self, entry: Entry) -> Codec:
        """The codec of one tensor of a model."""
        chosen = self.layers.get(entry.layer, self.default)
        return self.plain if entry.kind == "buffer" else chosen


@dataclass(frozen=True)
class Coding:
    """How arrays are encoded up and down, each as the text of a codec, for some layers another."""

    up: str = "raw"
    down: str = "raw"
    layers: Mapping[str, str] = field(default_factory=dict)
    down_layers: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def upwards(self) -> Side:
        """What clients do."""
        return Side(codec(self.up), {k: codec(v) for k, v in self.layers.items()})

    @cached_property
    def downwards(self) -> Side:
        """What the server does."""
        return Side(codec(self.down), {k: codec(v) for k, v in self.down_layers.items()})

    def check(self, layout: Layout) -> None:
        """Refuse unknown codecs, and layers that the model does not have."""
        for side in (self.upwards, self.downwards):
            for layer in side.layers:
                if layer not in layout.layers:
                    raise ConfigError(unknown("layer", layer, layout.layers))


@dataclass
class Coded:
    """Arrays ready for the wire: what travels, and how each tensor of it is encoded."""

    arrays: dict[str, Any] = field(default_factory=dict)
    choices: dict[int, Choice] = field(default_factory=dict)
    payloads: Encoded = field(default_factory=dict)
    since: dict[str, str] = field(default_factory=dict)


def encode(
    side: Side,
    arrays: Mapping[str, Array],
    references: References,
    seed: Callable[[str], int],
    whole: Layout,
    left: MutableMapping[str, Any] | None = None,
) -> Coded:
    """Arrays as changes of their references, where there are any and a codec is lossy.

    ``left``, a client's state, holds what `topk` did not send of earlier changes and takes what it
    does not send of these.
    """
    coded = Coded()
    for name, array in arrays.items():
        reference = references.get(name)
        parts = {} if name not in references else _parts(side, array, reference)
        if not parts:
            coded.arrays[name] = array
            continue
        changes = []
        for number, (chosen, part) in enumerate(parts.items()):
            change = _change(array, reference, part)
            if left is not None and chosen.spec.startswith("topk"):
                key = f"{LEFT}.{name}.{chosen.spec}"
                change = _fed_back(change, chosen, coded.payloads, left, key, whole)
            coded.choices[id(_vector(change))] = chosen, seed(f"{name}.{number}")
            changes.append(change)
        told: dict[str, Any] = {"change": changes}
        taken = {n for c in changes if isinstance(c, Weights) for n in c.layout.names}
        if isinstance(array, Weights) and len(taken) < len(array.layout.names):
            told["plain"] = array.only([n for n in array.layout.names if n not in taken])
        coded.arrays[name] = told
    return coded


def decode(arrays: Mapping[str, Any], references: References, whole: Layout) -> dict[str, Array]:
    """The arrays that were meant: changes laid upon their references."""
    found: dict[str, Array] = {}
    for name, told in arrays.items():
        if not isinstance(told, Mapping):
            found[name] = told
            continue
        reference = references.get(name)
        parts = [_laid(change, reference) for change in told["change"]]
        if "plain" in told:
            parts.append(told["plain"])
        found[name] = parts[0] if len(parts) == 1 else _joined(parts, whole)
    return found


def _parts(side: Side, array: Array, reference: Array | None) -> dict[Codec, Layout | None]:
    """The parts of an array that lossy codecs act on, by codec."""
    if isinstance(array, Tensor):
        fits = array.dtype == torch.float32 and (
            reference is None or _vector(reference).shape == array.shape
        )
        return {side.default: None} if fits and not side.default.exact else {}
    known = None if reference is None else reference.layout.spans  # type: ignore[union-attr]
    names: dict[str, tuple[Codec, list[str]]] = {}
    for entry in array.layout.entries:
        chosen = side.of(entry)
        if not chosen.exact and (known is None or entry.name in known):
            names.setdefault(chosen.spec, (chosen, []))[1].append(entry.name)
    return {chosen: array.layout.only(found) for chosen, found in names.values()}


def _change(array: Array, reference: Array | None, part: Layout | None) -> Array:
    if isinstance(array, Weights) and part is not None:
        own = array.part(part)
        return own if reference is None else own - reference.part(part)  # type: ignore[union-attr]
    assert isinstance(array, Tensor)
    return array if reference is None else array - _vector(reference)


def _laid(change: Array, reference: Array | None) -> Any:
    if reference is None:
        return change
    if isinstance(change, Weights):
        return reference.part(change.layout) + change  # type: ignore[union-attr]
    return _vector(reference) + change


def _fed_back(
    change: Array,
    chosen: Codec,
    payloads: Encoded,
    left: MutableMapping[str, Any],
    key: str,
    whole: Layout,
) -> Array:
    """A change with what was left of earlier ones; what is not sent of it is left for the next."""
    rest = left.get(key)
    change = _with_rest(change, rest)
    tensor = _vector(change)
    payload = chosen.encode(tensor, 0)
    payloads[id(tensor), chosen.spec] = tensor, payload
    unsent = _like(change, tensor - chosen.decode(payload, "f4", list(tensor.shape)))
    if isinstance(unsent, Weights) and isinstance(rest, Weights):
        others = [n for n in rest.layout.names if n not in unsent.layout.spans]
        if others:  # layers that do not travel in this round keep what is left of them
            unsent = _joined([unsent, rest.only(others)], whole)
    left[key] = unsent
    return change


def _with_rest(change: Array, rest: Any) -> Array:
    """A change and what was left of earlier ones; a rest of other layers is of no use."""
    if isinstance(change, Weights) and isinstance(rest, Weights):
        both = set(change.layout.names) & set(rest.layout.names)
        zero = Weights(change.layout, torch.zeros_like(change.vector))
        return change + rest.only(both).onto(zero) if both else change
    if isinstance(change, Tensor) and isinstance(rest, Tensor) and rest.shape == change.shape:
        return change + rest
    return change


def _joined(parts: Sequence[Weights], whole: Layout) -> Weights:
    """One model of several parts."""
    layout = whole.only([n for part in parts for n in part.layout.names])
    vector = torch.empty(layout.size)
    for part in parts:
        for here, there in layout.runs(part.layout):
            vector[here] = part.vector[there]
    return Weights(layout, vector)


def _vector(array: Array) -> Tensor:
    return array.vector if isinstance(array, Weights) else array


def _like(array: Array, tensor: Tensor) -> Array:
    return Weights(array.layout, tensor) if isinstance(array, Weights) else tensor
