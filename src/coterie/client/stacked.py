"""Training several clients as one stacked model: a row of a matrix for each client.

Small models spend most of a step in Python and in the overhead of each torch call. Stacking the
models of several clients pays that overhead once for all of them. The result is that of training
each client alone, up to the order in which floating-point numbers are added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from coterie.client.fit import Criterion, Fit, FitCall, FlatModel, decode, fit, optimiser, outside
from coterie.client.objectives import Objective
from coterie.core.messages import all_finite
from coterie.core.schema import Schedule
from coterie.core.weights import Weights
from coterie.data.population import Split
from coterie.errors import Diverged
from coterie.seeds import torch_generator

LARGEST = 32  # clients in one stack under "auto"; more gain little and leave workers idle
_SAMPLES = 16_384  # of all clients that are decoded at a time, to limit memory
# Layers that compute the same for a stack of models as for each model alone: they use no random
# numbers, no batch statistics and no lookups, whose gradients torch computes differently.
_STACKABLE = (
    *(nn.Linear, nn.Flatten, nn.Identity, nn.ReLU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.GELU),
    *(nn.SiLU, nn.ELU, nn.Softplus, nn.LayerNorm),
)


def why_not_stacked(
    model: FlatModel,
    start: Weights,
    clients: Sequence[Split],
    criterion: Criterion,
    schedule: Schedule,
) -> str:
    """Why models of this kind are not stacked; empty if they can be.

    Layers are looked at first. A module may still branch on its data or do what ``vmap`` cannot, so
    one step of a few clients is compared with one step of each alone.
    """
    for name, layer in model.module.named_modules():
        if not any(layer.children()) and not isinstance(layer, _STACKABLE):
            kind, place = type(layer).__name__, f"'{name}' " if name else ""
            return f"the model's layer {place}({kind}) cannot be stacked, or does not gain from it"
    one_step = replace(schedule, steps=1, epochs=1)
    trainings = [FitCall(start, data, Objective(), one_step, 0, 0) for data in clients]
    return _disagreement(model, trainings, criterion)


def _disagreement(model: FlatModel, trainings: Sequence[FitCall], criterion: Criterion) -> str:
    """Why a stack gives other results than each training alone; empty if the results agree."""
    try:
        stacked = fit_stack(model, trainings, criterion)
    except Exception as error:  # whatever a module of one's own may raise under vmap
        return f"torch cannot stack it ({type(error).__name__}: {str(error).splitlines()[0]})"
    for training, result in zip(trainings, stacked, strict=True):
        alone = fit(model, training, criterion)
        if isinstance(result, Diverged):
            return "its stacked training is not finite"
        moved = float(torch.linalg.vector_norm(alone.weights.vector - training.start.vector))
        gap = float(torch.linalg.vector_norm(alone.weights.vector - result.weights.vector))
        if gap > 1e-4 * max(moved, 1e-12):
            return "a stacked step gives another result than a step of each model alone"
    return ""


def fit_stack(
    model: FlatModel, trainings: Sequence[FitCall], criterion: Criterion
) -> list[Fit | Diverged]:
    """Run several trainings of the same ``kind`` at once; if one diverges, the others do not.

    The longest trainings get the first rows, so that those still running are contiguous.
    """
    rows = sorted(range(len(trainings)), key=lambda i: -trainings[i].steps)
    stack = _Stack(model, [trainings[i] for i in rows], criterion)
    results = dict(zip(rows, stack.train(), strict=True))
    return [results[i] for i in range(len(trainings))]


class _Stack:
    """The models of several clients during training: a row each, the longest training first."""

    def __init__(
        self, model: FlatModel, trainings: Sequence[FitCall], criterion: Criterion
    ) -> None:
        self.model, self.trainings, self.criterion = model, trainings, criterion
        self.layout, first = model.layout, trainings[0]
        self.schedule, self.part = first.schedule, first.part
        vectors = torch.stack([t.start.vector for t in trainings]).to(model.device)
        self.vectors, self.theta = vectors, vectors[:, : self.layout.trainable]
        self.gradient = torch.zeros_like(self.theta)
        penalised = bool(first.objective.penalties)
        self.origin = self.theta.clone() if penalised or self.part else self.theta
        self.rest = None if self.part is None else outside(model, self.part)
        self.losses: list[list[Tensor]] = [[] for _ in trainings]

    def train(self) -> list[Fit | Diverged]:
        """Make all steps of all trainings."""
        plain = self.part is None and not self.trainings[0].objective.penalties
        clear, step = optimiser(self.theta, self.gradient, self.schedule, plain)
        self.model.module.train()
        results: dict[int, Fit | Diverged] = {}
        running, batches = len(self.trainings), _Batches(self.trainings, self.model.device)
        tensors = self._tensors(running)
        for number in range(self.trainings[0].steps):
            while self.trainings[running - 1].steps <= number:
                running -= 1
                results[running] = self._result(running, batches)
                tensors = {}
            tensors = tensors or self._tensors(running)
            clear()
            self._backward(tensors, *batches.take(number, running))
            self._shape_gradient(running)
            step()
            if self.rest is not None:
                torch.where(self.rest, self.origin, self.theta, out=self.theta)
        for row in range(running):
            results[row] = self._result(row, batches)
        return [results[row] for row in range(len(self.trainings))]

    def _tensors(self, running: int) -> dict[str, Tensor]:
        """The tensors of the models still running, stacked, as views of the matrix."""
        tensors = {}
        for entry in self.layout.entries:
            span = self.layout.spans[entry.name]
            tensor = self.vectors[:running, span].view(running, *entry.shape).detach()
            tensors[entry.name] = tensor.requires_grad_(entry.kind == "parameter")
        return tensors

    def _backward(self, tensors: dict[str, Tensor], x: Tensor, y: Tensor, counts: Tensor) -> None:
        """Add each model's gradient for its batch to the matrix, and record the losses."""

        def forward(weights: dict[str, Tensor], inputs: Tensor) -> Tensor:
            return functional_call(  # type: ignore[no-any-return]
                self.model.module, weights, (inputs,)
            )

        out = torch.vmap(forward)(tensors, x)
        losses = _losses(self.criterion, out, y, counts)
        trained = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
        gradients = torch.autograd.grad(losses.sum(), list(trained.values()))
        for name, gradient in zip(trained, gradients, strict=True):
            rows = self.gradient[: len(losses), self.layout.spans[name]]
            rows.add_(gradient.reshape(rows.shape))
        for row, loss in enumerate(losses.detach()):
            self.losses[row].append(loss)

    def _shape_gradient(self, running: int) -> None:
        """Apply penalties, frozen layers and clipping, as for a single model."""
        for row in range(running):
            for penalty in self.trainings[row].objective.penalties:
                penalty.add_gradient(self.gradient[row], self.theta[row], self.origin[row])
        if self.rest is not None:
            self.gradient.masked_fill_(self.rest, 0.0)
        if self.schedule.clip is not None:
            norms = torch.linalg.vector_norm(self.gradient, dim=1, keepdim=True)
            self.gradient.mul_(torch.clamp(self.schedule.clip / (norms + 1e-12), max=1.0))

    def _result(self, row: int, batches: _Batches) -> Fit | Diverged:
        """The result of the training in this row, once its last step is done."""
        training, losses = self.trainings[row], self.losses[row]
        mean_loss = float(torch.stack(losses).mean())
        vector = self.vectors[row].cpu().clone()
        if not (math.isfinite(mean_loss) and all_finite(vector)):
            return Diverged("the training loss or the weights are no longer finite")
        trained = Weights(self.layout, vector)
        weights = trained.part(self.part).onto(training.start) if self.part else trained
        return Fit(weights, len(losses), mean_loss, batches.samples(row))


def _losses(criterion: Criterion, out: Tensor, y: Tensor, counts: Tensor) -> Tensor:
    """Each model's mean loss over its batch, without the padding at the end of short batches."""
    width = y.shape[1]
    if criterion is nn.functional.cross_entropy and y.dim() == 2 and out.dim() == 3:
        chosen = out.log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)
        real = torch.arange(width, device=y.device) < counts.unsqueeze(1)
        return -(chosen * real).sum(1) / counts
    if bool((counts == width).all()):
        return torch.stack([criterion(o, t) for o, t in zip(out, y, strict=True)])
    sizes = counts.tolist()
    return torch.stack([criterion(o[:n], t[:n]) for o, t, n in zip(out, y, sizes, strict=True)])


class _Batches:
    """The batches of all trainings, each in its own order, loaded some steps at a time."""

    def __init__(self, trainings: Sequence[FitCall], device: torch.device) -> None:
        self._trainings, self._device = trainings, device
        self._width = trainings[0].schedule.batch_size
        self._rows = [_rows_of(t, self._width) for t in trainings]  # (steps, width), −1: padding
        self._counts = [(rows >= 0).sum(1) for rows in self._rows]
        self._first = self._beyond = 0
        self._x = self._y = torch.empty(0)

    def samples(self, row: int) -> int:
        """The number of samples that a training processed."""
        return int(self._counts[row].sum())

    def take(self, step: int, running: int) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs, targets and numbers of samples of one step, for the running models."""
        if step >= self._beyond:
            self._load(step, running)
        at = step - self._first
        counts = torch.stack([self._counts[row][step] for row in range(running)])
        return self._x[:running, at], self._y[:running, at], counts.to(self._device)

    def _load(self, step: int, running: int) -> None:
        steps = max(1, _SAMPLES // (running * self._width))
        self._first, self._beyond = step, min(step + steps, len(self._rows[0]))
        xs, ys = [], []
        for row in range(running):
            rows = self._rows[row][self._first : self._beyond]
            if len(rows) < self._beyond - self._first:  # this training ends before the others
                padding = rows.new_full((self._beyond - self._first - len(rows), self._width), -1)
                rows = torch.cat([rows, padding])
            data, indices = self._trainings[row].data, rows.clamp(min=0).flatten()
            inputs = decode(data.x[indices])
            xs.append(inputs.view(*rows.shape, *inputs.shape[1:]))
            ys.append(data.y[indices].view(*rows.shape, *data.y.shape[1:]))
        self._x, self._y = torch.stack(xs).to(self._device), torch.stack(ys).to(self._device)


def _rows_of(training: FitCall, width: int) -> Tensor:
    """The row numbers of each batch of a training, in the order in which ``fit`` draws them."""
    generator, count = torch_generator(training.order_seed), len(training.data)
    batches = -(-count // width)
    padding, epochs = batches * width - count, []
    for _ in range(-(-training.steps // batches)):
        order = torch.randperm(count, generator=generator)
        epochs.append(nn.functional.pad(order, (0, padding), value=-1).view(batches, width))
    return torch.cat(epochs)[: training.steps]
