"""Weights: a model as one flat float32 vector, with a layout of names, shapes and layers.

Computations on the server are then linear algebra on rows, a layer is a slice, and a part of a
model is an object of the same type with a smaller layout.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from coterie.errors import ConfigError, unknown

TensorKind = Literal["parameter", "frozen", "buffer"]
_ORDER: dict[TensorKind, int] = {"parameter": 0, "frozen": 1, "buffer": 2}
BN_CHOICES = ("shared", "stats-local", "local")
_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


@dataclass(frozen=True)
class Entry:
    """One tensor of a model: its name, shape, the layer it belongs to, and its kind.

    A ``local`` tensor stays on its client with every method (FedBN, SiloBN). ``place`` is the
    tensor's position in the module.
    """

    name: str
    shape: tuple[int, ...]
    layer: str
    kind: TensorKind = "parameter"
    local: bool = False
    place: int = 0

    @cached_property
    def size(self) -> int:
        """The number of values."""
        size = 1
        for n in self.shape:
            size *= n
        return size


@dataclass(frozen=True)
class Layout:
    """The tensors of a model in order: trained parameters first, then frozen ones, then buffers.

    Weight decay, proximal terms, clipping, control variates and distances apply to the first
    ``trainable`` values only.

    >>> layout = Layout.of(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))
    >>> layout.layers, layout.size, layout.only(["2"]).size
    (('0', '2'), 13, 4)
    """

    entries: tuple[Entry, ...]

    @staticmethod
    def of(module: nn.Module, bn: str = "shared") -> Layout:
        """The layout of a module.

        A layer is a module that owns tensors; a normalisation belongs to the layer registered
        before it. Integer buffers (``num_batches_tracked``) are left out. ``bn`` is the part of
        batch normalisation that is shared: everything (``shared``), everything but the statistics
        (``stats-local``, SiloBN) or nothing (``local``, FedBN).
        """
        if bn not in BN_CHOICES:
            raise ConfigError(unknown("choice of bn", bn, BN_CHOICES))
        entries = [replace(e, place=i) for i, e in enumerate(_entries(module, bn))]
        return Layout(tuple(sorted(entries, key=lambda e: _ORDER[e.kind])))

    @cached_property
    def size(self) -> int:
        """The length of the vector."""
        return sum(e.size for e in self.entries)

    @cached_property
    def trainable(self) -> int:
        """The number of trained parameters, which come first in the vector."""
        return sum(e.size for e in self.entries if e.kind == "parameter")

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """The layers with parameters, in the order of the model."""
        ordered = sorted(self.entries, key=lambda e: e.place)
        return tuple(dict.fromkeys(e.layer for e in ordered if e.kind != "buffer"))

    @cached_property
    def spans(self) -> dict[str, slice]:
        """The position of each tensor in the vector."""
        spans, start = {}, 0
        for e in self.entries:
            spans[e.name] = slice(start, start + e.size)
            start += e.size
        return spans

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The tensors' names, in order."""
        return tuple(e.name for e in self.entries)

    @cached_property
    def shareable(self) -> tuple[str, ...]:
        """The tensors that may be shared: neither frozen nor local."""
        return tuple(e.name for e in self.entries if e.kind != "frozen" and not e.local)

    @cached_property
    def shared(self) -> Layout:
        """The part that may be shared."""
        return self.only(self.shareable)

    @cached_property
    def _parts(self) -> dict[frozenset[str], Layout]:
        return {}

    def only(self, names: Collection[str]) -> Layout:
        """The part with the given layers or tensors."""
        chosen = frozenset(names)
        if chosen not in self._parts:
            known = {e.layer for e in self.entries} | set(self.names)
            for name in chosen - known:
                raise ConfigError(unknown("layer", name, self.layers))
            entries = tuple(e for e in self.entries if e.layer in chosen or e.name in chosen)
            self._parts[chosen] = self if entries == self.entries else Layout(entries)
        return self._parts[chosen]

    def runs(self, part: Layout) -> list[tuple[slice, slice]]:
        """The contiguous slices, here and in ``part``, that hold the tensors of ``part``."""
        key = part.names
        if key not in self._runs:
            self._runs[key] = _merge((self._span(e), part.spans[e.name]) for e in part.entries)
        return self._runs[key]

    @cached_property
    def _runs(self) -> dict[tuple[str, ...], list[tuple[slice, slice]]]:
        return {}

    def _span(self, entry: Entry) -> slice:
        span = self.spans.get(entry.name)
        if span is None or span.stop - span.start != entry.size:
            raise ConfigError(f"tensor '{entry.name}' is not part of this model")
        return span


def _entries(module: nn.Module, bn: str) -> Iterable[Entry]:
    layer = ""
    for path, owner in module.named_modules():
        parameters = dict(owner.named_parameters(recurse=False))
        buffers = dict(owner.named_buffers(recurse=False))
        if not parameters and not buffers:
            continue
        if not (isinstance(owner, _NORMS) and layer):
            layer = path or "model"
        prefix = f"{path}." if path else ""
        batch_norm = isinstance(owner, nn.modules.batchnorm._BatchNorm)
        for name, p in parameters.items():
            kind: TensorKind = "parameter" if p.requires_grad else "frozen"
            yield Entry(prefix + name, tuple(p.shape), layer, kind, batch_norm and bn == "local")
        for name, b in buffers.items():
            if b.is_floating_point() and name not in owner._non_persistent_buffers_set:
                yield Entry(
                    prefix + name, tuple(b.shape), layer, "buffer", batch_norm and bn != "shared"
                )


def _merge(pairs: Iterable[tuple[slice, slice]]) -> list[tuple[slice, slice]]:
    merged: list[tuple[slice, slice]] = []
    for ours, theirs in pairs:
        if merged and merged[-1][0].stop == ours.start and merged[-1][1].stop == theirs.start:
            last_ours, last_theirs = merged.pop()
            ours = slice(last_ours.start, ours.stop)
            theirs = slice(last_theirs.start, theirs.stop)
        merged.append((ours, theirs))
    return merged


@dataclass(frozen=True, eq=False, repr=False)
class Weights:
    """A model, or some of its layers, as an immutable value.

    >>> layout = Layout.of(nn.Linear(2, 1))
    >>> w = Weights(layout, torch.tensor([1.0, 2.0, 3.0]))
    >>> (w + w * 2).vector
    tensor([3., 6., 9.])
    >>> w.only(["bias"]).vector
    tensor([3.])
    """

    layout: Layout
    vector: Tensor

    def __post_init__(self) -> None:
        if self.vector.dim() != 1 or self.vector.numel() != self.layout.size:
            raise ConfigError(
                f"weights of shape {tuple(self.vector.shape)} do not fit a layout of size "
                f"{self.layout.size}"
            )

    def __repr__(self) -> str:
        layers = len(self.layout.layers)
        return f"<Weights: {self.vector.numel():,} numbers in {layers} layer{'s' * (layers != 1)}>"

    def check_layout(self, other: Weights) -> None:
        """Refuse to combine weights of another layout with these."""
        if self.layout is not other.layout and self.layout != other.layout:
            raise ConfigError("weights of different layouts cannot be combined")

    def __add__(self, other: Weights) -> Weights:
        self.check_layout(other)
        return Weights(self.layout, self.vector + other.vector)

    def __sub__(self, other: Weights) -> Weights:
        self.check_layout(other)
        return Weights(self.layout, self.vector - other.vector)

    def __mul__(self, factor: float) -> Weights:
        return Weights(self.layout, self.vector * factor)

    __rmul__ = __mul__

    @property
    def parameters(self) -> Tensor:
        """The trained parameters, as a view."""
        return self.vector[: self.layout.trainable]

    def norm(self) -> float:
        """The L2 norm of the trained parameters."""
        return float(torch.linalg.vector_norm(self.parameters.double()))

    def only(self, names: Collection[str]) -> Weights:
        """The given layers or tensors alone."""
        return self.part(self.layout.only(names))

    def part(self, layout: Layout) -> Weights:
        """The tensors of a smaller layout."""
        if layout is self.layout:
            return self
        if layout.names not in self._made:
            pieces = [self.vector[span] for span, _ in self.layout.runs(layout)]
            vector = pieces[0] if len(pieces) == 1 else torch.cat([self.vector[:0], *pieces])
            self._made[layout.names] = Weights(layout, vector)
        return self._made[layout.names]

    @cached_property
    def _made(self) -> dict[tuple[str, ...], Weights]:
        """The parts taken so far: one object each, so that it is encoded once for many clients."""
        return {}

    def onto(self, base: Weights) -> Weights:
        """A complete model: ``base`` with these layers replaced."""
        if self.layout is base.layout:
            return self
        vector = base.vector.clone()
        for target, source in base.layout.runs(self.layout):
            vector[target] = self.vector[source]
        return Weights(base.layout, vector)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, with their shapes, as views of the vector."""
        spans = self.layout.spans
        return {e.name: self.vector[spans[e.name]].view(e.shape) for e in self.layout.entries}

    @staticmethod
    def of(module: nn.Module) -> Weights:
        """A copy of a module's tensors."""
        return Weights.from_tensors(Layout.of(module), module.state_dict())

    @staticmethod
    def from_tensors(layout: Layout, tensors: Mapping[str, Tensor]) -> Weights:
        """Weights from named tensors, such as those of a file; names and shapes must match."""
        for e in layout.entries:
            shape = tuple(tensors[e.name].shape) if e.name in tensors else None
            if shape != e.shape:
                problem = "is missing" if shape is None else f"has shape {shape}, not {e.shape}"
                raise ConfigError(
                    f"tensor '{e.name}' {problem}: these are the weights of a different model"
                )
        flat = [tensors[e.name].detach().reshape(-1).to(torch.float32) for e in layout.entries]
        return Weights(layout, torch.cat(flat) if flat else torch.empty(0))
