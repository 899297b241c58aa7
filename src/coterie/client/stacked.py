"""Training several clients as one stacked model: a row of a matrix for each client.

Small models spend most of a step in Python and in the overhead of each torch call. Stacking the
models of several clients pays that overhead once for all of them. The result is that of training
each client alone, up to the order in which floating-point numbers are added.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from coterie.client.fit import (
    SCORE_BATCH,
    Criterion,
    Fit,
    FitCall,
    FlatModel,
    decode,
    fit,
    optimiser,
    outside,
    precise,
    shuffles,
)
from coterie.client.objectives import Objective, Term, stack_penalties
from coterie.client.stacked_layers import StackedModel, why_no_layers
from coterie.core.messages import all_finite
from coterie.core.schema import Schedule
from coterie.core.weights import Weights
from coterie.data.population import Split
from coterie.errors import Diverged
from coterie.seeds import torch_generator

_MOST, _LEAST = 32, 4  # clients in a stack: more gain little, fewer are not worth it
_IN_A_STEP = 1_000_000  # parameters times samples of a step from which a model gains nothing
_IN_A_STACK = 2_000_000  # parameters of all models in a stack, which should fit into a cache
_DECODED = 2_000_000  # numbers of all clients' samples that are loaded at a time
_IGNORED = -100  # the class that cross-entropy leaves out: that of padding


def size_of_stacks(parameters: int, batch_size: int, cohort: int) -> int:
    """How many clients "auto" stacks: a quarter of a cohort, so that four cores have work.

    Of a small cohort it stacks half, so that two cores have work. 1 if there is nothing to gain:
    large models and batches keep a core busy anyway.

    >>> [size_of_stacks(n, 10, 100) for n in (7850, 50_890, 80_000, 200_000)]
    [25, 25, 25, 1]
    >>> [size_of_stacks(7850, 10, cohort) for cohort in (7, 10, 16, 40, 1000)]
    [1, 5, 5, 10, 32]
    """
    if parameters * batch_size > _IN_A_STEP:
        return 1
    wanted = max(cohort // 4, min(_LEAST + 1, cohort // 2))
    size = min(wanted, _MOST, _IN_A_STACK // max(1, parameters))
    return size if size >= _LEAST else 1


def why_not_stacked(
    model: FlatModel,
    start: Weights,
    clients: Sequence[Split],
    criterion: Criterion,
    schedule: Schedule,
) -> str:
    """Why models of this kind are not stacked; empty if they can be.

    Layers are looked at first. A module may still branch on its data, which ``vmap`` refuses; or
    mix samples, so one step of a few clients is compared with one of each alone.
    """
    if reason := why_no_layers(model.module):
        return reason
    one_step = replace(schedule, steps=1, epochs=1)
    trainings = [
        FitCall(start, data, Objective(), one_step, i, i) for i, data in enumerate(clients)
    ]
    if not trainings:
        return "no client has data to try it with"
    return _branching(model, clients) or _disagreement(model, trainings, criterion)


def _branching(model: FlatModel, clients: Sequence[Split]) -> str:
    """Why a module needs the values of a batch for what it computes; empty if it does not.

    Under ``vmap`` no single value can be looked at.
    """
    batches = [decode(data.x[:2]) for data in clients if len(data) > 1][:2]
    module = copy.deepcopy(model.module).eval()
    try:
        with torch.no_grad():
            torch.vmap(module)(torch.stack(batches).to(model.device))
    except Exception as error:  # whatever a module of one's own may raise
        first = (str(error).splitlines() or [""])[0]
        return f"what the model computes depends on its data ({type(error).__name__}: {first})"
    return ""


def _disagreement(model: FlatModel, trainings: Sequence[FitCall], criterion: Criterion) -> str:
    """Why a stack gives other results than each training alone; empty if the results agree."""
    try:
        same = [t for t in trainings if stackable(model, t)]
        stacked = fit_stack(StackedModel(model), same, criterion)
    except Exception as error:  # whatever a module of one's own may raise
        return f"it cannot be stacked ({type(error).__name__}: {str(error).splitlines()[0]})"
    for training, result in zip(same, stacked, strict=True):
        alone = fit(model, training, criterion)
        if isinstance(result, Diverged):
            return "its stacked training is not finite"
        moved = float(torch.linalg.vector_norm(alone.weights.vector - training.start.vector))
        gap = float(torch.linalg.vector_norm(alone.weights.vector - result.weights.vector))
        if gap > 1e-4 * max(moved, 1e-12):
            return "a stacked step gives another result than a step of each model alone"
    return ""


# --- training -----------------------------------------------------------------------------------


def stackable(model: FlatModel, training: FitCall) -> bool:
    """Whether a training may be stacked: it makes steps, by the gradient of its objective."""
    if training.objective.gradient_rule is not None or not training.steps:
        return False
    count, size = len(training.data), training.schedule.batch_size
    joins = count > size and count % size == 1  # a last batch of one joins the batch before it
    return not (model.has_batch_norm and joins)


def kind_of(model: FlatModel, training: FitCall) -> tuple[object, ...]:
    """What the trainings of one stack have in common."""
    return (*training.kind, len(training.data)) if model.has_batch_norm else training.kind


def fit_stack(
    stacked: StackedModel, trainings: Sequence[FitCall], criterion: Criterion
) -> list[Fit | Diverged]:
    """Run several trainings of the same kind at once; if one diverges, the others do not.

    The longest trainings get the first rows, so that those still running are contiguous.
    """
    rows = sorted(range(len(trainings)), key=lambda i: -trainings[i].steps)
    stack = _Training(stacked, [trainings[i] for i in rows], criterion)
    results = dict(zip(rows, stack.run(), strict=True))
    return [results[i] for i in range(len(trainings))]


class _Training:
    """The models of several clients during training: a row each, the longest training first."""

    def __init__(
        self, stacked: StackedModel, trainings: Sequence[FitCall], criterion: Criterion
    ) -> None:
        self.stacked, self.trainings, self.criterion = stacked, trainings, criterion
        self.layout, first = stacked.layout, trainings[0]
        self.schedule, self.part = first.schedule, first.part
        device = stacked.device
        self.vectors = torch.stack([t.start.vector for t in trainings]).to(device)
        self.theta = self.vectors[:, : self.layout.trainable]
        self.gradient = torch.zeros_like(self.vectors)[:, : self.layout.trainable]
        penalised = bool(first.objective.penalties)
        self.origin = self.theta.clone() if penalised or self.part else self.theta
        self.rest = None if self.part is None else outside(self.layout, self.part, device)
        self.generators = [torch_generator(t.dropout_seed) for t in trainings]
        self.steps = [t.steps for t in trainings]
        self.losses = self.theta.new_zeros(self.steps[0], len(trainings))
        data, rows = [t.data for t in trainings], [_shuffled(t) for t in trainings]
        self.batches = _Batches(data, rows, criterion, device)
        each = zip(*(t.objective.penalties for t in trainings), strict=True)
        self.penalties = [(stack_penalties(column, device), column) for column in each]

    def run(self) -> list[Fit | Diverged]:
        """Make all steps of all trainings."""
        plain = self.part is None and not self.penalties
        clear, step = optimiser(self.theta, self.gradient, self.schedule, plain)
        results: list[Fit | Diverged] = []  # of the last rows first
        running, bound = len(self.trainings), 0
        for number in range(self.steps[0]):
            still = sum(steps > number for steps in self.steps[:running])
            results[:0] = self._results(still, running)
            running = still
            if bound != running:
                self._bind(running)
                bound = running
            clear()
            self._backward(number, running)
            self._shape_gradient(running)
            step()
            if self.rest is not None:
                torch.where(self.rest, self.origin, self.theta, out=self.theta)
        return self._results(0, running) + results

    def _bind(self, running: int) -> None:
        """Let the model be those of the rows still running."""
        self.stacked.module.train()
        self.stacked.bind(self.vectors[:running], self.gradient[:running])
        self.twins: list[tuple[Term, list[StackedModel]]] = []
        number = 0
        for i, term in enumerate(self.trainings[0].objective.terms):
            others = []
            for j in range(len(term.models)):
                models = [t.objective.terms[i].models[j].vector for t in self.trainings[:running]]
                twin = self.stacked.twin(number)
                twin.bind(torch.stack(models).to(self.stacked.device))
                twin.module.eval()
                others.append(twin)
                number += 1
            self.twins.append((term, others))

    def _backward(self, number: int, running: int) -> None:
        """Add each model's gradient for its batch to the matrix, and record the losses."""
        batch = self.batches.take(number, running)
        self.stacked.draw_from(self.generators[:running], batch.sizes)
        with precise(self.schedule, self.stacked.device):
            if self.twins:
                out, hidden = self.stacked.represent(batch.x)
            else:
                out = self.stacked(batch.x)
            losses = _losses(self.criterion, out, batch)
            whole = losses
            for term, twins in self.twins:
                with torch.no_grad():
                    others = [twin.represent(batch.x)[1] for twin in twins]
                values = term.values(hidden, others) * batch.real
                whole = whole + term.strength * (values.sum(1) / batch.counts)
        whole.sum().backward()  # type: ignore[no-untyped-call]
        self.losses[number, :running] = losses.detach()

    def _shape_gradient(self, running: int) -> None:
        """Apply penalties, frozen layers and clipping, as for a single model."""
        for stacked, column in self.penalties:
            if stacked is not None:
                stacked.add_gradient(self.gradient, self.theta, self.origin)
                continue
            for row, penalty in enumerate(column[:running]):
                penalty.add_gradient(self.gradient[row], self.theta[row], self.origin[row])
        if self.rest is not None:
            self.gradient.masked_fill_(self.rest, 0.0)
        if self.schedule.clip is not None:
            norms = torch.linalg.vector_norm(self.gradient, dim=1, keepdim=True)
            self.gradient.mul_(torch.clamp(self.schedule.clip / (norms + 1e-12), max=1.0))

    def _results(self, first: int, end: int) -> list[Fit | Diverged]:
        """The results of the trainings in these rows, which have made their last step."""
        if first == end:
            return []
        steps = self.steps[first]
        vectors = self.vectors[first:end].to("cpu", copy=True)
        losses = self.losses[:steps, first:end].mean(0).tolist()
        sums = vectors.sum(1).tolist()
        results: list[Fit | Diverged] = []
        for row, vector, loss, total in zip(range(first, end), vectors, losses, sums, strict=True):
            # Finite numbers may have a sum that is not.
            if not (math.isfinite(loss) and (math.isfinite(total) or all_finite(vector))):
                results.append(Diverged("the training loss or the weights are no longer finite"))
                continue
            training, trained = self.trainings[row], Weights(self.layout, vector)
            weights = trained.part(self.part).onto(training.start) if self.part else trained
            results.append(Fit(weights, steps, loss, self.batches.samples(row)))
        return results


# --- evaluation ---------------------------------------------------------------------------------


def outputs_stack(
    stacked: StackedModel, models: Sequence[Weights], inputs: Sequence[Tensor]
) -> list[Tensor]:
    """Each model's outputs for its own inputs in evaluation mode, on the CPU."""
    parts: list[list[Tensor]] = [[] for _ in models]
    data = [Split(x, x.new_empty(len(x), 0)) for x in inputs]
    order = _longest_first(data)
    vectors = torch.stack([models[i].vector for i in order]).to(stacked.device)
    with torch.no_grad():
        for batch in _passes(stacked, vectors, None, [data[i] for i in order]):
            out = stacked(batch.x).cpu()
            for i, rows, size in zip(order, out, batch.sizes, strict=False):
                parts[i].append(rows[:size])
    return [torch.cat(p) for p in parts]


def gradients_stack(
    stacked: StackedModel, models: Sequence[Weights], data: Sequence[Split], criterion: Criterion
) -> list[tuple[Weights, float]]:
    """Each model's gradient of the mean loss over its data, in evaluation mode, and that loss."""
    layout, order = stacked.layout, _longest_first(data)
    totals = dict.fromkeys(order, 0.0)
    vectors = torch.stack([models[i].vector for i in order]).to(stacked.device)
    gradients = torch.zeros_like(vectors)
    within = gradients[:, : layout.trainable]
    for batch in _passes(stacked, vectors, within, [data[i] for i in order], criterion):
        whole = torch.tensor([len(data[i]) for i in order[: len(batch.sizes)]])
        losses = _losses(criterion, stacked(batch.x), batch)
        losses = losses * (batch.counts / whole.to(stacked.device))
        losses.sum().backward()  # type: ignore[no-untyped-call]
        for i, loss in zip(order, losses.tolist(), strict=False):
            totals[i] += loss
    slopes = dict(zip(order, gradients.cpu(), strict=True))
    return [(Weights(layout, slopes[i]), totals[i]) for i in range(len(models))]


def _longest_first(data: Sequence[Split]) -> list[int]:
    return sorted(range(len(data)), key=lambda i: -len(data[i]))


def _passes(
    stacked: StackedModel,
    vectors: Tensor,
    gradients: Tensor | None,
    data: Sequence[Split],
    criterion: Criterion | None = None,
) -> Iterator[_Batch]:
    """The models' data in batches, with the models that still have some; the longest come first."""
    stacked.module.eval()
    fits = _DECODED // max(1, len(data) * data[0].x[:1].numel())
    width = min(SCORE_BATCH, max(1, fits), max(1, len(data[0])))
    rows = [_divided(torch.arange(len(d)), width) for d in data]
    batches = _Batches(data, rows, criterion, stacked.device)
    for number in range(len(rows[0])):
        running = sum(len(r) > number for r in rows)
        stacked.bind(vectors[:running], None if gradients is None else gradients[:running])
        yield batches.take(number, running)


# --- batches ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Batch:
    """A batch for each model, the shorter ones padded; ``counts`` are their samples.

    In ``y`` padding has the class that cross-entropy leaves out, if ``classes`` is true.
    """

    x: Tensor
    y: Tensor
    sizes: list[int]
    counts: Tensor
    classes: bool

    @property
    def real(self) -> Tensor:
        """1 for samples, 0 for padding."""
        places = torch.arange(self.x.shape[1], device=self.x.device)
        return (places < self.counts.unsqueeze(1)).to(self.counts.dtype)


def _losses(criterion: Criterion, out: Tensor, batch: _Batch) -> Tensor:
    """Each model's mean loss over its batch, without the padding at the end of short batches."""
    if batch.classes and out.dim() == 3:
        each = criterion(out.flatten(0, 1), batch.y.flatten(), reduction="none")  # type: ignore[call-arg]
        return each.view(out.shape[:2]).sum(1) / batch.counts
    rows = zip(out, batch.y, batch.sizes, strict=True)
    return torch.stack([criterion(o[:n], y[:n]) for o, y, n in rows])


class _Batches:
    """The batches of all models, each by its own row numbers, loaded some steps at a time."""

    def __init__(
        self,
        data: Sequence[Split],
        rows: Sequence[Tensor],
        criterion: Criterion | None,
        device: torch.device,
    ) -> None:
        steps, width = len(rows[0]), max(r.shape[1] for r in rows)
        self._device = device
        self._index = torch.full((steps, len(rows), width), -1)  # in the data of all
        first = 0
        for model, (split, numbers) in enumerate(zip(data, rows, strict=True)):
            own = self._index[: len(numbers), model, : numbers.shape[1]]
            torch.where(numbers >= 0, numbers + first, numbers, out=own)
            first += len(split)
        self._x, self._y = (torch.cat([getattr(d, name) for d in data]) for name in "xy")
        counts = (self._index >= 0).sum(2)
        self._sizes, self._samples = counts.tolist(), counts.sum(0).tolist()
        self._counts = counts.to(torch.get_default_dtype()).to(device)
        self._classes = (
            criterion is nn.functional.cross_entropy
            and self._y.dim() == 1
            and not self._y.is_floating_point()
            and bool((self._y >= 0).all())
        )
        self._at_once = max(1, _DECODED // max(1, len(rows) * width * self._x[:1].numel()))
        self._first = self._beyond = 0
        self._loaded = self._labels = torch.empty(0)

    def samples(self, model: int) -> int:
        """The number of samples in all batches of a model."""
        return int(self._samples[model])

    def take(self, step: int, running: int) -> _Batch:
        """The batches of one step, for the models still running."""
        if step >= self._beyond:
            self._load(step)
        at, sizes = step - self._first, self._sizes[step][:running]
        width = max(sizes)
        return _Batch(
            self._loaded[at, :running, :width],
            self._labels[at, :running, :width],
            sizes,
            self._counts[step, :running],
            self._classes,
        )

    def _load(self, step: int) -> None:
        self._first, self._beyond = step, step + self._at_once
        index = self._index[self._first : self._beyond]
        rows = index.clamp(min=0).flatten()
        x, y = decode(self._x[rows]), self._y[rows]
        if self._classes:
            y.masked_fill_(index.flatten() < 0, _IGNORED)
        self._loaded = x.view(*index.shape, *x.shape[1:]).to(self._device)
        self._labels = y.view(*index.shape, *y.shape[1:]).to(self._device)


def _shuffled(training: FitCall) -> Tensor:
    """The row numbers of each batch of a training, in the order in which ``fit`` draws them."""
    count = len(training.data)
    width = min(training.schedule.batch_size, count)
    epochs = -(-training.steps // -(-count // width))
    orders = itertools.islice(shuffles(count, training.order_seed), epochs)
    return torch.cat([_divided(order, width) for order in orders])[: training.steps]


def _divided(numbers: Tensor, width: int) -> Tensor:
    """Row numbers in batches; the last one is filled up with −1."""
    batches = -(-len(numbers) // width)
    padding = batches * width - len(numbers)
    return nn.functional.pad(numbers, (0, padding), value=-1).view(batches, width)
