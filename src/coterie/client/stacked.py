"""Training several clients as one stacked model: a row of a matrix for each client.

Small models spend most of a step in Python and in the overhead of each torch call. Stacking the
models of several clients pays that overhead once for all of them. The result is that of training
each client alone, up to the order in which floating-point numbers are added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from coterie.client.fit import Criterion, Fit, FlatModel, decode, fit, optimiser, outside
from coterie.client.objectives import Objective
from coterie.core.schema import Schedule
from coterie.core.weights import Layout, Weights
from coterie.data.population import Split
from coterie.errors import Diverged
from coterie.seeds import torch_generator

LARGEST = 32  # clients in one stack under "auto": more gain little, and leave workers idle
_SAMPLES = 16_384  # of all clients together that are decoded at a time: bounds the memory
# Layers that are the same computation for a stack of models as for each of them alone: no random
# numbers, no statistics of a batch, no lookups whose gradients torch computes in another way.
_STACKABLE = (
    *(nn.Linear, nn.Flatten, nn.Identity, nn.ReLU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.GELU),
    *(nn.SiLU, nn.ELU, nn.Softplus, nn.LayerNorm),
)


@dataclass(frozen=True)
class FitCall:
    """One training that a client asked for: the arguments of ``fit``, without the shared ones."""

    start: Weights
    data: Split
    objective: Objective
    schedule: Schedule
    order_seed: int
    dropout_seed: int
    part: Layout | None

    @property
    def stackable(self) -> bool:
        """Whether it may share a stack: its objective has penalties at most, and it has steps."""
        objective = self.objective
        return not objective.terms and objective.gradient_rule is None and self.steps > 0

    @property
    def steps(self) -> int:
        """How many steps it takes."""
        schedule = self.schedule
        if not (schedule.epochs and len(self.data)):
            return 0
        batches = -(-len(self.data) // schedule.batch_size)
        return batches * schedule.epochs if schedule.steps is None else schedule.steps

    @property
    def kind(self) -> tuple[object, ...]:
        """What all trainings of one stack have in common."""
        x, y = self.data.x, self.data.y
        shapes = x.shape[1:], x.dtype, y.shape[1:], y.dtype
        part = None if self.part is None else self.part.names
        return repr(self.schedule), part, bool(self.objective.penalties), *shapes


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
    trainings = [FitCall(start, data, Objective(), one_step, 0, 0, None) for data in clients]
    return _disagreement(model, trainings, criterion)


def _disagreement(model: FlatModel, trainings: Sequence[FitCall], criterion: Criterion) -> str:
    """Why a stack gives other results than each training alone; empty if the results agree."""
    try:
        stacked = fit_stack(model, trainings, criterion)
    except Exception as error:  # whatever a module of one's own may raise under vmap
        return f"torch cannot stack it ({type(error).__name__}: {str(error).splitlines()[0]})"
    for training, result in zip(trainings, stacked, strict=True):
        alone = fit_alone(model, training, criterion)
        if isinstance(result, Diverged):
            return "its stacked training is not finite"
        moved = float(torch.linalg.vector_norm(alone.weights.vector - training.start.vector))
        gap = float(torch.linalg.vector_norm(alone.weights.vector - result.weights.vector))
        if gap > 1e-4 * max(moved, 1e-12):
            return "a stacked step gives another result than a step of each model alone"
    return ""


def fit_alone(model: FlatModel, training: FitCall, criterion: Criterion) -> Fit:
    """The same training by itself."""
    return fit(
        model,
        training.start,
        training.data,
        criterion,
        training.objective,
        training.schedule,
        training.order_seed,
        training.dropout_seed,
        training.part,
    )


def fit_stack(
    model: FlatModel, trainings: Sequence[FitCall], criterion: Criterion
) -> list[Fit | Diverged]:
    """Train all of these at once; they must be of one ``kind``. One that diverges harms no other.

    The longest trainings have the first rows, so that those still at work are always a block.
    """
    rows = sorted(range(len(trainings)), key=lambda i: -trainings[i].steps)
    stack = _Stack(model, [trainings[i] for i in rows], criterion)
    results = dict(zip(rows, stack.train(), strict=True))
    return [results[i] for i in range(len(trainings))]


class _Stack:
    """The models of several clients while they train: a row each, the longest training first."""

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
        """All steps of all trainings."""
        plain = self.part is None and not self.trainings[0].objective.penalties
        clear, step = optimiser(self.theta, self.gradient, self.schedule, plain)
        self.model.module.train()
        results: dict[int, Fit | Diverged] = {}
        at_work, batches = len(self.trainings), _Batches(self.trainings, self.model.device)
        tensors = self._tensors(at_work)
        for number in range(self.trainings[0].steps):
            while self.trainings[at_work - 1].steps <= number:
                at_work -= 1
                results[at_work] = self._result(at_work, batches)
                tensors = {}
            tensors = tensors or self._tensors(at_work)
            clear()
            self._backward(tensors, *batches.take(number, at_work))
            self._shape_gradient(at_work)
            step()
            if self.rest is not None:
                torch.where(self.rest, self.origin, self.theta, out=self.theta)
        for row in range(at_work):
            results[row] = self._result(row, batches)
        return [results[row] for row in range(len(self.trainings))]

    def _tensors(self, at_work: int) -> dict[str, Tensor]:
        """The tensors of the first models, stacked: views of the matrix."""
        tensors = {}
        for entry in self.layout.entries:
            span = self.layout.spans[entry.name]
            tensor = self.vectors[:at_work, span].view(at_work, *entry.shape).detach()
            tensors[entry.name] = tensor.requires_grad_(entry.kind == "parameter")
        return tensors

    def _backward(self, tensors: dict[str, Tensor], x: Tensor, y: Tensor, counts: Tensor) -> None:
        """Add the gradients of one batch of each model to the matrix, and note the losses."""

        def forward(own: dict[str, Tensor], inputs: Tensor) -> Tensor:
            return functional_call(self.model.module, own, (inputs,))  # type: ignore[no-any-return]

        out = torch.vmap(forward)(tensors, x)
        losses = _losses(self.criterion, out, y, counts)
        trained = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
        gradients = torch.autograd.grad(losses.sum(), list(trained.values()))
        for name, gradient in zip(trained, gradients, strict=True):
            rows = self.gradient[: len(losses), self.layout.spans[name]]
            rows.add_(gradient.reshape(rows.shape))
        for row, loss in enumerate(losses.detach()):
            self.losses[row].append(loss)

    def _shape_gradient(self, at_work: int) -> None:
        """Penalties, resting layers and clipping, as for one model."""
        for row in range(at_work):
            for penalty in self.trainings[row].objective.penalties:
                penalty.add_gradient(self.gradient[row], self.theta[row], self.origin[row])
        if self.rest is not None:
            self.gradient.masked_fill_(self.rest, 0.0)
        if self.schedule.clip is not None:
            norms = torch.linalg.vector_norm(self.gradient, dim=1, keepdim=True)
            self.gradient.mul_(torch.clamp(self.schedule.clip / (norms + 1e-12), max=1.0))

    def _result(self, row: int, batches: _Batches) -> Fit | Diverged:
        """What the training of this row came to, as its last step left it."""
        training, losses = self.trainings[row], self.losses[row]
        mean_loss = float(torch.stack(losses).mean())
        vector = self.vectors[row].cpu().clone()
        if not (math.isfinite(mean_loss) and bool(torch.isfinite(vector).all())):
            return Diverged("the training loss or the weights are no longer finite")
        trained = Weights(self.layout, vector)
        whole = trained.part(self.part).onto(training.start) if self.part else trained
        return Fit(whole, len(losses), mean_loss, batches.samples(row))


def _losses(criterion: Criterion, out: Tensor, y: Tensor, counts: Tensor) -> Tensor:
    """Each model's mean loss over the samples of its batch; short batches are padded at the end."""
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
    """The batches of all trainings, in the order that each has by itself, some steps at a time."""

    def __init__(self, trainings: Sequence[FitCall], device: torch.device) -> None:
        self._trainings, self._device = trainings, device
        self._width = trainings[0].schedule.batch_size
        self._rows = [_rows_of(t, self._width) for t in trainings]  # (steps, width), −1: padding
        self._counts = [(rows >= 0).sum(1) for rows in self._rows]
        self._first = self._beyond = 0
        self._x = self._y = torch.empty(0)

    def samples(self, row: int) -> int:
        """How many samples a training went through."""
        return int(self._counts[row].sum())

    def take(self, step: int, at_work: int) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs and targets of one step for the first models, and how many are real."""
        if step >= self._beyond:
            self._load(step, at_work)
        at = step - self._first
        counts = torch.stack([self._counts[row][step] for row in range(at_work)])
        return self._x[:at_work, at], self._y[:at_work, at], counts.to(self._device)

    def _load(self, step: int, at_work: int) -> None:
        steps = max(1, _SAMPLES // (at_work * self._width))
        self._first, self._beyond = step, min(step + steps, len(self._rows[0]))
        xs, ys = [], []
        for row in range(at_work):
            rows = self._rows[row][self._first : self._beyond]
            if len(rows) < self._beyond - self._first:  # it ends before the others do
                padding = rows.new_full((self._beyond - self._first - len(rows), self._width), -1)
                rows = torch.cat([rows, padding])
            data, places = self._trainings[row].data, rows.clamp(min=0).flatten()
            inputs = decode(data.x[places])
            xs.append(inputs.view(*rows.shape, *inputs.shape[1:]))
            ys.append(data.y[places].view(*rows.shape, *data.y.shape[1:]))
        self._x, self._y = torch.stack(xs).to(self._device), torch.stack(ys).to(self._device)


def _rows_of(training: FitCall, width: int) -> Tensor:
    """The rows of each of its batches, as ``fit`` draws them."""
    generator, count = torch_generator(training.order_seed), len(training.data)
    batches = -(-count // width)
    padding, epochs = batches * width - count, []
    for _ in range(-(-training.steps // batches)):
        order = torch.randperm(count, generator=generator)
        epochs.append(nn.functional.pad(order, (0, padding), value=-1).view(batches, width))
    return torch.cat(epochs)[: training.steps]
