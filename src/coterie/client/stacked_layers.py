"""A module whose layers hold the parameters of several models, one after another.

The samples of all models go through the module as a single batch, those of model 0 first. Layers
without parameters treat each sample alike, whichever model it is for. A layer with parameters
divides the batch again, and computes each part with the parameters of its model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coterie.client.fit import FlatModel
from coterie.core.weights import Layout

# Layers that treat each sample by itself, and draw no random numbers.
_PLAIN = (
    *(
        nn.Flatten,
        nn.Unflatten,
        nn.Identity,
        nn.ReLU,
        nn.ReLU6,
        nn.LeakyReLU,
        nn.Tanh,
        nn.Sigmoid,
        nn.GELU,
    ),
    *(nn.SiLU, nn.ELU, nn.SELU, nn.Softplus, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d),
    *(nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d),
)


class StackedModel:
    """Several models of one architecture, computed at once.

    ``bind`` says whose they are: a row of a matrix for each, and where their gradients are added.
    """

    def __init__(self, model: FlatModel) -> None:
        self.layout, self.device = model.layout, model.device
        self.module = copy.deepcopy(model.module)
        self.layers: list[_Layer] = []
        for name, layer in list(self.module.named_modules()):
            kind = _STACKED.get(type(layer))
            if kind is None:
                continue
            stacked = kind(layer, name)
            self.layers.append(stacked)
            if not name:
                self.module = stacked
                continue
            above, _, leaf = name.rpartition(".")
            self.module.get_submodule(above)._modules[leaf] = stacked
        self.rows = 0
        self._model = model
        self._twins: list[StackedModel] = []

    def twin(self, number: int) -> StackedModel:
        """Another stack of models of the same architecture."""
        while len(self._twins) <= number:
            self._twins.append(StackedModel(self._model))
        return self._twins[number]

    def bind(self, vectors: Tensor, gradients: Tensor | None = None) -> None:
        """Use these models, the rows of a matrix; add their gradients to these rows if given."""
        self.rows = len(vectors)
        for layer in self.layers:
            layer.bind(self.layout, vectors, gradients)

    def draw_from(self, generators: Sequence[torch.Generator], counts: Sequence[int]) -> None:
        """Let dropout draw masks from each model's stream, for so many samples of each."""
        for layer in self.layers:
            layer.generators, layer.counts = generators, counts

    def __call__(self, x: Tensor) -> Tensor:
        """The outputs for inputs with a row for each model."""
        return divided(self.module(x.flatten(0, 1)), self.rows)

    def represent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs, and the representations: the inputs of the last layer, a row a sample."""
        inputs: list[Tensor] = []
        head = self.module.get_submodule(self.layout.layers[-1])
        hook = head.register_forward_pre_hook(lambda _, args: inputs.append(args[0].flatten(1)))
        try:
            out = self(x)
        finally:
            hook.remove()
        return out, divided(inputs[-1], self.rows)


def divided(x: Tensor, rows: int) -> Tensor:
    """A batch of all models, divided into theirs."""
    return x.view(rows, x.shape[0] // rows, *x.shape[1:])


def why_no_layers(module: nn.Module) -> str:
    """Why the layers of a module cannot be those of several models; empty if they can."""
    for name, layer in module.named_modules():
        place = f"'{name}' " if name else ""
        kind = type(layer).__name__
        if type(layer) in _STACKED:
            if reason := _unsupported(layer):
                return f"the model's layer {place}({kind}) cannot be stacked: {reason}"
            continue
        plain = any(layer.children()) or isinstance(layer, _PLAIN)
        if not plain or any(True for _ in layer.parameters(recurse=False)):
            return f"the model's layer {place}({kind}) cannot be stacked, or does not gain from it"
    return ""


def _unsupported(layer: nn.Module) -> str:
    if isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.scale_grad_by_freq):
        return "max_norm and scale_grad_by_freq look at all samples"
    if isinstance(layer, nn.Conv2d) and (layer.padding_mode, type(layer.padding)) != (
        "zeros",
        tuple,
    ):
        return "its padding is not a number of zeros"
    if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.momentum is None:
        return "its statistics are averages over all batches (momentum=None)"
    return ""


class _Layer(nn.Module):
    """A layer of several models; ``parameters_of`` are its tensors, with a row for each."""

    def __init__(self, layer: nn.Module, name: str) -> None:
        super().__init__()
        self.template, self.name = layer, name
        self.rows = 0
        self.tensors: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}  # of the tensors that are trained
        self.generators: Sequence[torch.Generator] = ()
        self.counts: Sequence[int] = ()
        for parameter in layer.parameters():
            parameter.requires_grad_(False)

    def bind(self, layout: Layout, vectors: Tensor, gradients: Tensor | None) -> None:
        """Take the rows' tensors, as views."""
        self.rows = len(vectors)
        self.tensors, self.gradients = {}, {}
        for entry in layout.entries:
            above, _, leaf = entry.name.rpartition(".")
            if above != self.name:
                continue
            span = layout.spans[entry.name]
            # Not detach(): statistics of batches change between a forward pass and its backward.
            tensor = vectors[:, span].view(self.rows, *entry.shape).data
            if gradients is not None and entry.kind == "parameter":
                tensor.requires_grad_()
                self.gradients[leaf] = gradients[:, span].view(tensor.shape)
            self.tensors[leaf] = tensor

    def parameter(self, leaf: str) -> Tensor | None:
        """A tensor whose gradient is added to the rows'; None if the layer has none of the name."""
        tensor, gradient = self.tensors.get(leaf), self.gradients.get(leaf)
        if tensor is None or gradient is None:
            return tensor
        found: Tensor = _Added.apply(tensor, gradient)  # type: ignore[no-untyped-call]
        return found


class _Added(torch.autograd.Function):
    """A tensor as it is, whose gradient is added to a given one in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        ctx.gradient.add_(gradient)
        return None, None


class _Linear(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        """The outputs of the rows' linear layers."""
        weight, bias = self.tensors["weight"], self.tensors.get("bias")
        flat = x.reshape(self.rows, -1, x.shape[-1])
        if torch.is_autocast_enabled(x.device.type):
            out = torch.bmm(flat, self.parameter("weight").transpose(1, 2))  # type: ignore[union-attr]
            if bias is not None:
                out = out + self.parameter("bias").unsqueeze(1).to(out.dtype)  # type: ignore[union-attr]
        else:
            into = self.gradients.get("weight"), self.gradients.get("bias")
            out = _Products.apply(flat, weight, bias, *into)  # type: ignore[no-untyped-call]
        return out.reshape(*x.shape[:-1], weight.shape[1])


class _Products(torch.autograd.Function):
    """A linear layer for each row; gradients of parameters are added in place, without a copy."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        of_weight: Tensor | None,
        of_bias: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.gradients = of_weight, of_bias
        if bias is None:
            return torch.bmm(x, weight.transpose(1, 2))
        return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_weight, of_bias = ctx.gradients
        if of_weight is not None:
            of_weight.baddbmm_(gradient.transpose(1, 2), x)
        if of_bias is not None:
            of_bias.add_(gradient.sum(1))
        of_x = torch.bmm(gradient, weight) if ctx.needs_input_grad[0] else None
        return of_x, None, None, None, None


class _Embedding(_Layer):
    def forward(self, ids: Tensor) -> Tensor:
        """The vectors of each row's tokens in its own table."""
        table, into = self.tensors["weight"], self.gradients.get("weight")
        rows: Tensor = _Lookups.apply(
            divided(ids, self.rows), table, into, self.template.padding_idx
        )  # type: ignore[no-untyped-call]
        return rows.flatten(0, 1)


class _Lookups(torch.autograd.Function):
    """A lookup for each row, which adds gradients to the vectors that were looked up only."""

    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, table: Tensor, gradients: Tensor | None, padding: int | None
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.gradients, ctx.padding = gradients, padding
        return torch.stack([F.embedding(i, t) for i, t in zip(ids, table, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        (ids,) = ctx.saved_tensors
        if ctx.gradients is not None:
            if ctx.padding is not None:  # as in torch, padding is never trained
                gradient = gradient * (ids != ctx.padding).unsqueeze(-1)
            for table, i, g in zip(ctx.gradients, ids, gradient, strict=True):
                table.index_add_(0, i.flatten(), g.flatten(0, -2))
        return None, None, None, None


class _Convolution(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        """Each row's convolution, one after another: only what is between them gains."""
        layer, into = self.template, (self.gradients.get("weight"), self.gradients.get("bias"))
        tensors = self.tensors["weight"], self.tensors.get("bias")
        if torch.is_autocast_enabled(x.device.type):
            weights, bias = self.parameter("weight"), self.parameter("bias")
            assert weights is not None
            biases = (None,) * self.rows if bias is None else bias
            rows = zip(divided(x, self.rows), weights, biases, strict=True)
            return torch.cat([layer._conv_forward(*row) for row in rows])  # type: ignore[operator]
        out: Tensor = _Filters.apply(divided(x, self.rows), *tensors, *into, layer)  # type: ignore[no-untyped-call]
        return out.flatten(0, 1)


class _Filters(torch.autograd.Function):
    """A convolution for each row, whose gradients are added in place."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        of_weight: Tensor | None,
        of_bias: Tensor | None,
        layer: nn.Conv2d,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.gradients, ctx.layer = (of_weight, of_bias), layer
        biases = (None,) * len(x) if bias is None else bias
        settings = layer.stride, layer.padding, layer.dilation, layer.groups
        rows = zip(x, weight, biases, strict=True)
        return torch.stack([torch.conv2d(r, w, b, *settings) for r, w, b in rows])  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        layer, into = ctx.layer, ctx.gradients
        asked = [ctx.needs_input_grad[0], *(g is not None for g in into)]
        settings = layer.stride, layer.padding, layer.dilation, False, [0, 0], layer.groups
        of_x = torch.zeros_like(x) if asked[0] else None
        for row, (g, r, w) in enumerate(zip(gradient, x, weight, strict=True)):
            found = torch.ops.aten.convolution_backward(g, r, w, [len(w)], *settings, asked)
            for target, value in zip((of_x, *into), found, strict=True):
                if target is not None:
                    target[row] += value
        return of_x, None, None, None, None, None


class _Norm(_Layer):
    """Layer and group normalisation: each sample by itself, then the row's scale and shift."""

    def forward(self, x: Tensor) -> Tensor:
        """The normalised samples, scaled and shifted."""
        layer, weight, bias = self.template, self.parameter("weight"), self.parameter("bias")
        if isinstance(layer, nn.GroupNorm):
            out = F.group_norm(x, layer.num_groups, eps=layer.eps)
            fit = (self.rows, 1, -1, *(1,) * (x.dim() - 2))
        else:
            out = F.layer_norm(x, layer.normalized_shape, eps=layer.eps)  # type: ignore[arg-type]
            kept = x.dim() - 1 - len(layer.normalized_shape)  # type: ignore[arg-type]
            fit = (self.rows, *(1,) * (1 + kept), *layer.normalized_shape)  # type: ignore[misc]
        if weight is None:
            return out
        out = divided(out, self.rows) * weight.reshape(fit)
        if bias is not None:
            out = out + bias.reshape(fit)
        return out.flatten(0, 1)


class _BatchNorm(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        """Each row's samples, normalised by their own statistics: rows become channels."""
        layer: Any = self.template
        rows = divided(x, self.rows)
        count, channels, rest = rows.shape[1], rows.shape[2], rows.shape[3:]
        columns = rows.transpose(0, 1).reshape(count, self.rows * channels, *rest)
        weight, bias, mean, var = (
            None if tensor is None else tensor.reshape(-1)
            for tensor in map(self.parameter, ("weight", "bias", "running_mean", "running_var"))
        )
        out = F.batch_norm(
            columns,
            mean,
            var,
            weight,
            bias,
            self.training or mean is None,
            layer.momentum,
            layer.eps,
        )
        if self.training and mean is not None and var is not None:
            for name, moved in (("running_mean", mean), ("running_var", var)):
                self.tensors[name].copy_(moved.view_as(self.tensors[name]))
        out = out.view(count, self.rows, channels, *rest).transpose(0, 1)
        return out.reshape(x.shape)


class _Dropout(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        """Mask each row by its own stream, which gives the masks that it would have alone."""
        p = float(self.template.p)  # type: ignore[arg-type]
        if not self.training or p == 0:
            return x
        rows = divided(x, self.rows)
        masks = torch.zeros_like(rows)
        for mask, count, generator in zip(masks, self.counts, self.generators, strict=True):
            mask[:count].bernoulli_(1 - p, generator=generator)
        return (rows * masks.div_(1 - p)).flatten(0, 1)


_STACKED: Mapping[type[nn.Module], Callable[[nn.Module, str], _Layer]] = {
    nn.Linear: _Linear,
    nn.Conv2d: _Convolution,
    nn.Embedding: _Embedding,
    nn.LayerNorm: _Norm,
    nn.GroupNorm: _Norm,
    nn.BatchNorm1d: _BatchNorm,
    nn.BatchNorm2d: _BatchNorm,
    nn.Dropout: _Dropout,
}
