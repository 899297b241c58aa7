"""The training loop, which works in place on one flat vector and one flat gradient."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from coterie.client.objectives import Batch, Objective, StepContext
from coterie.core.messages import all_finite
from coterie.core.schema import Schedule
from coterie.core.weights import Layout, Weights
from coterie.data.population import Split
from coterie.errors import ConfigError, Diverged, unknown
from coterie.registry import checked
from coterie.seeds import seed_for, seed_layers, torch_generator

Criterion = Callable[[Tensor, Tensor], Tensor]
_CHUNK = 512  # samples to decode at a time, to save calls and to limit memory
SCORE_BATCH = 250


@dataclass(frozen=True)
class Fit:
    """The result of training: the new weights, the number of steps, and the batches' mean loss.

    ``samples`` counts the samples of all batches for which gradients were computed.
    """

    weights: Weights
    steps: int
    loss: float
    samples: int = 0


class FlatModel:
    """A module whose tensors are views of one vector, and whose gradients are views of another."""

    def __init__(self, module: nn.Module, device: str = "cpu", bn: str = "shared") -> None:
        self.module = module.to(device)
        self.device = torch.device(device)
        self.layout = Layout.of(module, bn)
        self.vector = torch.empty(self.layout.size, device=self.device)
        self.gradient = torch.zeros(self.layout.trainable, device=self.device)
        self._twins: list[FlatModel] = []
        self.has_batch_norm = any(
            isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules()
        )
        owners = dict(module.named_modules())
        for entry in self.layout.entries:
            span = self.layout.spans[entry.name]
            view = self.vector[span].view(entry.shape)
            path, _, leaf = entry.name.rpartition(".")
            if entry.kind == "buffer":
                view.copy_(owners[path]._buffers[leaf])
                owners[path]._buffers[leaf] = view
                continue
            parameter = owners[path]._parameters[leaf]
            assert parameter is not None
            view.copy_(parameter.detach())
            parameter.data = view
            if entry.kind == "parameter":
                parameter.grad = self.gradient[span].view(entry.shape)

    def load(self, weights: Weights) -> None:
        """Load these weights into the model."""
        if weights.layout is not self.layout and weights.layout != self.layout:
            raise ConfigError("these weights belong to a model with other layers")
        self.vector.copy_(weights.vector)

    def weights(self) -> Weights:
        """A copy of the current weights, on the CPU."""
        return Weights(self.layout, self.vector.detach().cpu().clone())

    def represent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs, and the representations: the inputs of the last layer, a row a sample."""
        inputs: list[Tensor] = []
        head = self.module.get_submodule(self.layout.layers[-1])
        hook = head.register_forward_pre_hook(
            lambda _, args, named: inputs.extend(t.flatten(1) for t in (*args, *named.values())),
            with_kwargs=True,
        )
        try:
            out = self.module(x)
        finally:
            hook.remove()
        if len(inputs) != 1:
            raise ConfigError(
                f"the model's last layer ({self.layout.layers[-1]}) is not called exactly once "
                "with one input, so there is no representation to compare. Register the layers in "
                "the order in which they are used"
            )
        return out, inputs[0]

    def twin(self, number: int, weights: Weights) -> FlatModel:
        """Another model of the same architecture with these weights, in evaluation mode.

        Training one model leaves its twins, their buffers and the streams of dropout alone.
        """
        while len(self._twins) <= number:
            twin = FlatModel(copy.deepcopy(self.module), str(self.device))
            twin.layout = self.layout
            self._twins.append(twin)
        self._twins[number].load(weights)
        self._twins[number].module.eval()
        return self._twins[number]


def decode(x: Tensor) -> Tensor:
    """Convert samples to the model's input: bytes become floats in [−1, 1], the rest stays."""
    return x.to(torch.float32).mul_(1 / 127.5).sub_(1.0) if x.dtype == torch.uint8 else x


@dataclass(frozen=True)
class FitCall:
    """A training that a client requests; all its randomness comes from the two seeds.

    With ``part``, only its tensors change, whatever the optimiser does.
    """

    start: Weights
    data: Split
    objective: Objective
    schedule: Schedule
    order_seed: int
    dropout_seed: int
    part: Layout | None = None

    @property
    def steps(self) -> int:
        """The number of steps that it takes."""
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
        terms = [term.kind for term in self.objective.terms]
        schedule = vars(self.schedule) | {"options": repr(self.schedule.options)}
        return *schedule.values(), part, len(self.objective.penalties), *terms, *shapes


def fit(model: FlatModel, training: FitCall, criterion: Criterion) -> Fit:
    """Carry out a training."""
    start, data, part = training.start, training.data, training.part
    objective, schedule = training.objective, training.schedule
    model.load(start)
    model.module.train()
    theta, gradient = model.vector[: model.layout.trainable], model.gradient
    origin = theta.clone() if objective.penalties or part else theta
    rest = None if part is None else outside(model.layout, part, model.device)
    plain = objective == Objective() and part is None
    clear, step = optimiser(theta, gradient, schedule, plain)
    twins: list[list[FlatModel]] = []
    for term in objective.terms:
        first = sum(map(len, twins))
        twins.append([model.twin(first + i, w) for i, w in enumerate(term.models)])
    precision = precise(schedule, model.device)
    losses: list[Tensor] = []
    samples = 0

    def backward(batch: Batch) -> Tensor:
        nonlocal samples
        x, y = batch
        samples += len(y)
        with precision:
            if twins:
                out, hidden = model.represent(x)
            else:
                out = model.module(x)
            loss = whole = criterion(out, y)
            for term, others in zip(objective.terms, twins, strict=True):
                with torch.no_grad():
                    represented = [other.represent(x)[1] for other in others]
                whole = whole + term.strength * term.values(hidden, represented).mean()
        whole.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def replace_gradient(batch: Batch) -> Tensor:
        gradient.zero_()
        return backward(batch)

    gradient_rule = objective.gradient_rule
    context = StepContext(model.vector, theta, gradient, replace_gradient)
    seeds = [training.order_seed] + [
        seed_for(training.order_seed, "batches", stream=str(i))
        for i in range(1, gradient_rule.batches if gradient_rule else 1)
    ]
    streams = [_batches(model, data, schedule, s) for s in seeds]
    with torch.random.fork_rng(devices=[]):
        seed_layers(training.dropout_seed, model.device)
        for batches in zip(*streams, strict=True):
            clear()
            loss = gradient_rule.look(context, batches) if gradient_rule else backward(batches[0])
            for penalty in objective.penalties:
                penalty.add_gradient(gradient, theta, origin)
            if rest is not None:
                gradient.masked_fill_(rest, 0.0)  # so that it does not count in the norm below
            if schedule.clip is not None:
                norm = torch.linalg.vector_norm(gradient)
                gradient.mul_(torch.clamp(schedule.clip / (norm + 1e-12), max=1.0))
            step()
            if rest is not None:
                torch.where(rest, origin, theta, out=theta)
            losses.append(loss)
    mean_loss = float(torch.stack(losses).mean()) if losses else 0.0
    if not (math.isfinite(mean_loss) and all_finite(model.vector)):
        raise Diverged("the training loss or the weights are no longer finite")
    trained = model.weights()
    weights = trained.part(part).onto(start) if part else trained
    return Fit(weights, len(losses), mean_loss, samples)


def outside(layout: Layout, part: Layout, device: torch.device) -> Tensor:
    """A mask of the parameters that do not belong to this part."""
    rest = torch.ones(layout.size, dtype=torch.bool, device=device)
    for span, _ in layout.runs(part):
        rest[span] = False
    return rest[: layout.trainable]


def precise(schedule: Schedule, device: torch.device) -> AbstractContextManager[object]:
    """The precision of training, as a context: autocast to bfloat16, or nothing."""
    if schedule.precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)


def optimiser(
    theta: Tensor, gradient: Tensor, schedule: Schedule, plain: bool
) -> tuple[Callable[[], object], Callable[[], object]]:
    """The functions to call before and after each backward pass, which make one step together."""
    if schedule.optimizer.lower() == "sgd" and not schedule.options:
        lr, momentum, decay = schedule.lr, schedule.momentum, schedule.weight_decay
        if plain and momentum and not decay and schedule.clip is None:
            # Backward passes add to the gradient, so it can serve as the velocity: v ← ρv + g.
            gradient.zero_()
            return lambda: gradient.mul_(momentum), lambda: theta.add_(gradient, alpha=-lr)
        velocity = torch.zeros_like(theta) if momentum else gradient

        def sgd() -> None:
            if decay:
                gradient.add_(theta, alpha=decay)
            if momentum:
                velocity.mul_(momentum).add_(gradient)
            theta.add_(velocity, alpha=-lr)

        return gradient.zero_, sgd
    kind = optimiser_class(schedule.optimizer)
    parameter = nn.Parameter(theta, requires_grad=False)
    parameter.grad = gradient
    return gradient.zero_, kind([parameter], **_arguments(kind, schedule)).step


def optimiser_class(name: str) -> Any:
    """The optimiser of ``torch.optim`` with this name, in upper or lower case."""
    classes = {
        n.lower(): c
        for n, c in vars(torch.optim).items()
        if isinstance(c, type) and issubclass(c, torch.optim.Optimizer) and n != "Optimizer"
    }
    # These need closures, sparse gradients or matrices.
    for unsupported in ("lbfgs", "sparseadam", "muon"):
        classes.pop(unsupported, None)
    if name.lower() not in classes:
        raise ConfigError(unknown("optimizer", name, classes))
    return classes[name.lower()]


def _arguments(kind: Any, schedule: Schedule) -> dict[str, Any]:
    arguments: dict[str, Any] = {"lr": schedule.lr, **schedule.options}
    for name in ("momentum", "weight_decay"):
        if getattr(schedule, name):
            arguments[name] = getattr(schedule, name)
    return checked(f"optimizer '{schedule.optimizer}'", kind, arguments, ("params",), values=False)


def shuffles(count: int, seed: int) -> Iterator[Tensor]:
    """The row numbers of a client's data in a random order, for one epoch after another."""
    generator = torch_generator(seed)
    while True:
        yield torch.randperm(count, generator=generator)


def _batches(
    model: FlatModel, data: Split, schedule: Schedule, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled batches, epoch after epoch; the last batch of an epoch may be smaller."""
    left = schedule.steps if schedule.steps is not None else -1
    if not (schedule.epochs and len(data)):
        return
    at_once = max(1, _CHUNK // schedule.batch_size)
    epochs = schedule.epochs if schedule.steps is None else None  # or as many as it takes
    for order in itertools.islice(shuffles(len(data), seed), epochs):
        batches = list(torch.split(order, schedule.batch_size))
        if model.has_batch_norm and len(batches) > 1 and len(batches[-1]) == 1:
            # Batch normalisation needs two samples: the last joins the batch before it.
            batches[-2:] = [torch.cat(batches[-2:])]
        for first in range(0, len(batches), at_once):
            rows = batches[first : first + at_once]
            xs = decode(data.x[torch.cat(rows)]).to(model.device)
            ys = data.y[torch.cat(rows)].to(model.device)
            sizes = [len(r) for r in rows]
            for x, y in zip(torch.split(xs, sizes), torch.split(ys, sizes), strict=True):
                if left == 0:
                    return
                yield x, y
                left -= 1


def outputs(model: FlatModel, weights: Weights, x: Tensor) -> Tensor:
    """The model's outputs on ``x`` in evaluation mode, on the CPU."""
    model.load(weights)
    model.module.eval()
    with torch.no_grad():
        parts = [
            model.module(decode(part).to(model.device)).cpu()
            for part in torch.split(x, SCORE_BATCH)
        ]
    return torch.cat(parts).detach()


def data_gradient(
    model: FlatModel, weights: Weights, data: Split, criterion: Criterion
) -> tuple[Weights, float]:
    """The gradient of the mean loss over all of ``data``, in evaluation mode, and that loss."""
    model.load(weights)
    model.module.eval()
    model.gradient.zero_()
    total = 0.0
    parts = torch.split(data.x, SCORE_BATCH), torch.split(data.y, SCORE_BATCH)
    for x, y in zip(*parts, strict=True):
        share = len(y) / len(data)
        loss = criterion(model.module(decode(x).to(model.device)), y.to(model.device)) * share
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    vector = torch.zeros(model.layout.size)
    vector[: model.layout.trainable] = model.gradient.cpu()
    return Weights(model.layout, vector), total
