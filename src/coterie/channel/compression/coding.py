"""Coding: which codec encodes which array, and relative to which reference.

Lossy codecs encode changes from a reference that both sides have. For uploads, the reference of an
array is one that the client received (``Upload.delta_of``); for a model without such a reference,
it is the model that the client sent last, as the server decoded it. For downloads, the reference of
a model is the model of the same name that the client has, as the client decoded it; if the name is
new, as after a split, it is the model that the client received last, at first θ⁰. So what a codec
lost is part of the next change. What `topk` left out of an uploaded change is kept by the client
and added to the next change. Arrays without a reference (gradients, bases, centres) are sent
unchanged, and so are the buffers of normalisation layers.
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

References = Mapping[str, Array | None]  # None: the array is itself a change
# Keys of a client's state: models as received, the model last sent as the server decoded it, and
# what was not sent yet.
HELD, SENT, LEFT = "$held", "$sent", "$left"
LAST = ""  # the name of the model received last, the reference for models with new names
# The errors from using invalid values as arrays, such as texts, lists or too large numbers.
_INVALID = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError)


@dataclass(frozen=True)
class Side:
    """The codecs of one direction: a default, and others for some layers."""

    default: Codec = field(default_factory=Raw)
    layers: Mapping[str, Codec] = field(default_factory=dict)

    @property
    def plainly(self) -> bool:
        """Whether one exact codec encodes the whole model, which then need not be divided."""
        return self.default.exact and not self.layers

    @property
    def exact(self) -> bool:
        """Whether all codecs are exact."""
        return self.default.exact and all(c.exact for c in self.layers.values())

    @cached_property
    def plain(self) -> Codec:
        """The exact codec for arrays that must not be changed; it may still compress them."""
        _, plus, packed = self.default.spec.partition("+")
        return codec(f"raw{plus}{packed}")

    def of(self, entry: Entry) -> Codec:
        """The codec for one tensor of a model."""
        chosen = self.layers.get(entry.layer, self.default)
        return self.plain if entry.kind == "buffer" else chosen


@section("wire")
class Coding(WireSection):
    """The codecs for uploads and downloads, as texts, with others for some layers."""

    @cached_property
    def upwards(self) -> Side:
        """The codecs for uploads, which clients apply."""
        return Side(codec(self.up), {k: codec(v) for k, v in self.layers.items()})

    @cached_property
    def downwards(self) -> Side:
        """The codecs for downloads, which the server applies."""
        return Side(codec(self.down), {k: codec(v) for k, v in self.down_layers.items()})

    @property
    def plainly(self) -> bool:
        """Whether one exact codec encodes whole models, both ways."""
        return self.upwards.plainly and self.downwards.plainly

    def check(self, layout: Layout) -> None:
        """Refuse unknown codecs, and layers that the model does not have."""
        for side in (self.upwards, self.downwards):
            for layer in side.layers:
                if layer not in layout.layers:
                    raise ConfigError(unknown("layer", layer, layout.layers))


def reference_of(held: Callable[[str], Weights | None], name: str, start: Weights) -> Weights:
    """The reference for downloading a model of this name to a client that holds these models."""
    return held(name) or held(LAST) or start


def now_held(
    received: Mapping[str, Array], references: Mapping[str, Weights]
) -> dict[str, Weights]:
    """The models that a client holds after receiving these arrays; the first is also the last."""
    models = {n: a for n, a in received.items() if isinstance(a, Weights)}
    held = {n: model.onto(references[n]) for n, model in models.items()}
    return held | ({LAST: next(iter(held.values()))} if held else {})


@dataclass
class Coded:
    """Arrays ready for the wire: what to send, and the codec of each of its tensors."""

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
    """Encode arrays, as changes from their references where there are any and a codec is lossy.

    ``left``, a client's state, holds what `topk` did not send of earlier changes; what it does not
    send of these is stored there too.
    """
    coded = Coded()
    for name, array in arrays.items():
        reference = references.get(name)
        parts: dict[str, list[Array]] = {"change": [], "plain": []}
        for number, part in enumerate(_parts(side, array, name in references, reference)):
            sent = part.array if part.exact else change_of(part.array, reference)
            if left is not None and not part.exact and part.codec.spec.startswith("topk"):
                key = f"{LEFT}.{name}.{part.codec.spec}"
                sent = _fed_back(sent, part.codec, coded.payloads, left, key, whole)
            coded.choices[id(vector_of(sent))] = part.codec, seed(f"{name}.{number}")
            parts["plain" if part.exact else "change"].append(sent)
        undivided = not parts["change"] and len(parts["plain"]) < 2
        coded.arrays[name] = array if undivided else {k: v for k, v in parts.items() if v}
    return coded


def decode(arrays: Mapping[str, Any], references: References, whole: Layout) -> dict[str, Array]:
    """Decode arrays, adding changes to their references."""
    if not isinstance(arrays, Mapping):
        raise CoterieError("the arrays of a message have no names")
    decoded: dict[str, Array] = {}
    for name, encoded in arrays.items():
        try:
            array = encoded
            if isinstance(encoded, Mapping):
                array = _decoded(encoded, references.get(name), whole)
        except _INVALID as error:
            why = f"{type(error).__name__}: {str(error)[:200]}"
            raise CoterieError(f"the array '{str(name)[:100]}' is invalid ({why})") from None
        if not isinstance(array, Weights | Tensor):
            raise CoterieError(f"'{str(name)[:100]}' is not an array")
        decoded[name] = array
    return decoded


def _decoded(encoded: Mapping[str, Any], reference: Array | None, whole: Layout) -> Any:
    """Decode one array that is sent in several parts."""
    parts = [laid_on(change, reference) for change in encoded.get("change", [])]
    parts += encoded.get("plain", [])
    return parts[0] if len(parts) == 1 else _joined(parts, whole)


@dataclass(frozen=True)
class _Part:
    """Some of an array's tensors, and the codec that encodes them."""

    codec: Codec
    array: Array

    @property
    def exact(self) -> bool:
        return self.codec.exact


def _parts(side: Side, array: Array, changes: bool, reference: Array | None) -> list[_Part]:
    """Divide an array by codec; ``changes`` says whether it may be encoded as a change."""
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
    return [_Part(chosen, array.only(of_codec)) for chosen, of_codec in names.values()]


def change_of(array: Array, reference: Array | None) -> Array:
    """The change of an array from its reference; without one, the array is itself a change."""
    if isinstance(array, Weights):
        assert reference is None or isinstance(reference, Weights)
        return array if reference is None else array - reference.part(array.layout)
    return array if reference is None else array - vector_of(reference)


def laid_on(change: Array, reference: Array | None) -> Any:
    """Add a change to its reference."""
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
    """Add to a change what was not sent of earlier ones, and store what is not sent this time."""
    rest = left.get(key)
    change = _with_rest(change, rest)
    tensor = vector_of(change)
    payload = chosen.encode(tensor, 0)
    payloads[id(tensor), chosen.spec] = tensor, payload
    unsent = _like(change, tensor - chosen.decode(payload, "f4", list(tensor.shape)))
    if isinstance(unsent, Weights) and isinstance(rest, Weights):
        others = [n for n in rest.layout.names if n not in unsent.layout.spans]
        if others:  # layers that are not sent in this round keep what was stored of them
            unsent = _joined([unsent, rest.only(others)], whole)
    left[key] = unsent
    return change


def _with_rest(change: Array, rest: Any) -> Array:
    """Add to a change what was not sent of earlier ones, for the tensors that both have."""
    if isinstance(change, Weights) and isinstance(rest, Weights):
        both = set(change.layout.names) & set(rest.layout.names)
        zero = Weights(change.layout, torch.zeros_like(change.vector))
        return change + rest.only(both).onto(zero) if both else change
    if isinstance(change, Tensor) and isinstance(rest, Tensor) and rest.shape == change.shape:
        return change + rest
    return change


def _joined(parts: Sequence[Weights], whole: Layout) -> Weights:
    """Join several parts of a model."""
    layout = whole.only([n for part in parts for n in part.layout.names])
    vector = torch.empty(layout.size)
    for part in parts:
        for span, span_of_part in layout.runs(part.layout):
            vector[span] = part.vector[span_of_part]
    return Weights(layout, vector)


def _like(array: Array, tensor: Tensor) -> Array:
    return Weights(array.layout, tensor) if isinstance(array, Weights) else tensor
