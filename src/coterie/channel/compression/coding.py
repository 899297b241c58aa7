"""What is encoded, and against what: lossy codecs act on changes since something both sides have.

Up, an array is a change of one that the client received (``Upload.delta_of``); a model that is not
is
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

from coterie.channel.compression.codecs import Codec, Raw, codec
from coterie.channel.wire import Choice, Encoded
from coterie.core.messages import Array, vector_of
from coterie.core.schema import WireSection, section
from coterie.core.weights import Entry, Layout, Weights
from coterie.errors import ConfigError, CoterieError, unknown

References = Mapping[str, Array | None]  # None: the array is a change by itself
# In a client's state: models as received, the model last sent as it arrived, what was not sent yet.
HELD, SENT, LEFT = "$held", "$sent", "$left"
LAST = ""  # the name of the model received last, the reference of one whose name is new
# What trying to use an array raises that is none: a text, a list, a number too large for a tensor.
_NONSENSE = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError)


@dataclass(frozen=True)
class Side:
    """One direction: a codec for all layers, and others for some of them."""

    default: Codec = field(default_factory=Raw)
    layers: Mapping[str, Codec] = field(default_factory=dict)

    @property
    def plainly(self) -> bool:
        """Whether all of a model is sent by one exact codec: then there is nothing to divide."""
        return self.default.exact and not self.layers

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


@section("wire")
class Coding(WireSection):
    """How arrays are encoded up and down, each as the text of a codec, for some layers another."""

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


def reference_of(held: Callable[[str], Weights | None], name: str, start: Weights) -> Weights:
    """What a model down of this name is a change of, from what its client holds."""
    return held(name) or held(LAST) or start


def now_held(
    received: Mapping[str, Array], references: Mapping[str, Weights]
) -> dict[str, Weights]:
    """What a client holds of these arrays from now on, the first of them also as the last."""
    models = {n: a for n, a in received.items() if isinstance(a, Weights)}
    now = {n: model.onto(references[n]) for n, model in models.items()}
    return now | ({LAST: next(iter(now.values()))} if now else {})


@dataclass
class Coded:
    """Arrays ready for the wire: what travels, and how each tensor of it is encoded."""

    arrays: dict[str, Any] = field(default_factory=dict)
    choices: dict[int, Choice] = field(default_factory=dict)
    payloads: Encoded = field(default_factory=dict)
    delta_of: dict[str, str] = field(default_factory=dict)


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
        told: dict[str, list[Array]] = {"change": [], "plain": []}
        for number, part in enumerate(_parts(side, array, name in references, reference)):
            sent = part.array if part.exact else change_of(part.array, reference)
            if left is not None and not part.exact and part.codec.spec.startswith("topk"):
                key = f"{LEFT}.{name}.{part.codec.spec}"
                sent = _fed_back(sent, part.codec, coded.payloads, left, key, whole)
            coded.choices[id(vector_of(sent))] = part.codec, seed(f"{name}.{number}")
            told["plain" if part.exact else "change"].append(sent)
        alone = not told["change"] and len(told["plain"]) < 2
        coded.arrays[name] = array if alone else {k: v for k, v in told.items() if v}
    return coded


def decode(arrays: Mapping[str, Any], references: References, whole: Layout) -> dict[str, Array]:
    """The arrays that were meant: changes laid upon their references."""
    if not isinstance(arrays, Mapping):
        raise CoterieError("a message whose arrays have no names")
    found: dict[str, Array] = {}
    for name, told in arrays.items():
        try:
            array = _meant(told, references.get(name), whole)
        except _NONSENSE as error:
            why = f"{type(error).__name__}: {str(error)[:200]}"
            raise CoterieError(f"the array '{str(name)[:100]}' makes no sense ({why})") from None
        if not isinstance(array, Weights | Tensor):
            raise CoterieError(f"the array '{str(name)[:100]}' is none")
        found[name] = array
    return found


def _meant(told: Any, reference: Array | None, whole: Layout) -> Any:
    """An array as it came, or the parts of one put together."""
    if not isinstance(told, Mapping):
        return told
    parts = [laid_on(change, reference) for change in told.get("change", [])]
    parts += told.get("plain", [])
    return parts[0] if len(parts) == 1 else _joined(parts, whole)


@dataclass(frozen=True)
class _Part:
    """Some of an array's tensors, and their codec; an exact one takes them as they are."""

    codec: Codec
    array: Array

    @property
    def exact(self) -> bool:
        return self.codec.exact


def _parts(side: Side, array: Array, changes: bool, reference: Array | None) -> list[_Part]:
    """An array by codec; ``changes`` says whether there is anything that it is a change of."""
    if isinstance(array, Tensor):
        fits = array.dtype == torch.float32 and (
            reference is None or vector_of(reference).shape == array.shape
        )
        lossy = changes and fits and not side.default.exact
        return [_Part(side.default if lossy else side.plain, array)]
    known = reference.layout.spans if isinstance(reference, Weights) else None
    names: dict[str, tuple[Codec, list[str]]] = {}
    for entry in array.layout.entries:
        chosen = side.of(entry)
        if not chosen.exact and not (changes and (known is None or entry.name in known)):
            chosen = side.plain
        names.setdefault(chosen.spec, (chosen, []))[1].append(entry.name)
    return [_Part(chosen, array.only(found)) for chosen, found in names.values()]


def change_of(array: Array, reference: Array | None) -> Array:
    """An array less what it is a change of; None: it is a change by itself."""
    if isinstance(array, Weights):
        assert reference is None or isinstance(reference, Weights)
        return array if reference is None else array - reference.part(array.layout)
    return array if reference is None else array - vector_of(reference)


def laid_on(change: Array, reference: Array | None) -> Any:
    """The array that a change of this reference means."""
    if reference is None:
        return change
    if isinstance(change, Weights):
        return reference.part(change.layout) + change  # type: ignore[union-attr]
    return vector_of(reference) + change


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
    tensor = vector_of(change)
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


def _like(array: Array, tensor: Tensor) -> Array:
    return Weights(array.layout, tensor) if isinstance(array, Weights) else tensor
