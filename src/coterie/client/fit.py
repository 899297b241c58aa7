"""The one training loop: in place, on one flat vector and one flat gradient."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from coterie.client.objectives import Batch, Objective, StepContext
from coterie.core.schema import Schedule
from coterie.core.weights import Layout, Weights
from coterie.data.population import Split
from coterie.errors import ConfigError, Diverged, unknown
from coterie.registry import checked
from coterie.seeds import seed_for, seed_layers, torch_generator

Criterion = Callable[[Tensor, Tensor], Tensor]
_CHUNK = 512  # samples decoded at a time: amortises the cost, bounds the memory
_SCORE_BATCH = 250


@dataclass(frozen=True)
class Fit:
    """What training gave: the new weights, how many steps it took, the mean loss of its batches.

    ``samples`` are those that it computed gradients of, each time.
    """

    weights: Weights
    steps: int
    loss: float
    samples: int = 0


class FlatModel:
    """A module whose tensors are views of one vector and whose gradients are views of another."""

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
        """Take these weights."""
        if weights.layout is not self.layout and weights.layout != self.layout:
            raise ConfigError("these weights are of another model")
        self.vector.copy_(weights.vector)

    def weights(self) -> Weights:
        """A copy of the present weights, on the CPU."""
        return Weights(self.layout, self.vector.detach().cpu().clone())

    def represent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs, and the representation: what the last layer gets, a row for each sample."""
        seen: list[Tensor] = []
        head = self.module.get_submodule(self.layout.layers[-1])
        hook = head.register_forward_pre_hook(
            lambda _, given, named: seen.extend(t.flatten(1) for t in (*given, *named.values())),
            with_kwargs=True,
        )
        try:
            out = self.module(x)
        finally:
            hook.remove()
        if len(seen) != 1:
            raise ConfigError(
                f"the model's last layer ({self.layout.layers[-1]}) is not called once, with one "
                "input: there is no representation to compare. Register the layers in the order "
                "in which they are used"
            )
        return out, seen[0]

    def twin(self, number: int, weights: Weights) -> FlatModel:
        """A second model of the same kind with these weights, in evaluation mode."""
        while len(self._twins) <= number:
            twin = FlatModel(copy.deepcopy(self.module), str(self.device))
            twin.layout = self.layout
            self._twins.append(twin)
        self._twins[number].load(weights)
        self._twins[number].module.eval()
        return self._twins[number]


def decode(x: Tensor) -> Tensor:
    """What the model sees: bytes become floats in [−1, 1], everything else stays as it is."""
    return x.to(torch.float32).mul_(1 / 127.5).sub_(1.0) if x.dtype == torch.uint8 else x


def fit(
    model: FlatModel,
    start: Weights,
    data: Split,
    criterion: Criterion,
    objective: Objective,
    schedule: Schedule,
    order_seed: int,
    dropout_seed: int,
    part: Layout | None = None,
) -> Fit:
    """Train ``start`` on ``data``; every random choice comes from the two seeds.

    With ``part`` only its tensors change, whatever the optimiser; the rest is as it was.
    """
    model.load(start)
    model.module.train()
    theta, gradient = model.vector[: model.layout.trainable], model.gradient
    origin = theta.clone() if objective.penalties or part else theta
    rest = None if part is None else outside(model, part)
    plain = objective == Objective() and part is None
    clear, step = optimiser(theta, gradient, schedule, plain)
    terms = [term(model) for term in objective.terms]
    losses: list[Tensor] = []
    samples = 0

    def backward(batch: Batch) -> Tensor:
        nonlocal samples
        x, y = batch
        samples += len(y)
        if terms:
            out, hidden = model.represent(x)
            loss = criterion(out, y)
            sum((term(x, hidden) for term in terms), loss).backward()  # type: ignore[no-untyped-call]
        else:
            loss = criterion(model.module(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def anew(batch: Batch) -> Tensor:
        gradient.zero_()
        return backward(batch)

    gradient_rule, slope = objective.gradient_rule, StepContext(model.vector, theta, gradient, anew)
    seeds = [order_seed] + [
        seed_for(order_seed, "batches", stream=str(i))
        for i in range(1, gradient_rule.batches if gradient_rule else 1)
    ]
    streams = [_batches(model, data, schedule, torch_generator(s)) for s in seeds]
    with torch.random.fork_rng(devices=[]):
        seed_layers(dropout_seed, model.device)
        for batches in zip(*streams, strict=True):
            clear()
            loss = gradient_rule.look(slope, batches) if gradient_rule else backward(batches[0])
            for penalty in objective.penalties:
                penalty.add_gradient(gradient, theta, origin)
            if rest is not None:
                gradient.masked_fill_(rest, 0.0)  # what rests counts in no norm
            if schedule.clip is not None:
                norm = torch.linalg.vector_norm(gradient)
                gradient.mul_(torch.clamp(schedule.clip / (norm + 1e-12), max=1.0))
            step()
            if rest is not None:
                torch.where(rest, origin, theta, out=theta)
            losses.append(loss)
    mean_loss = float(torch.stack(losses).mean()) if losses else 0.0
    if not (math.isfinite(mean_loss) and bool(torch.isfinite(model.vector).all())):
        raise Diverged("the training loss or the weights are no longer finite")
    trained = model.weights()
    whole = trained.part(part).onto(start) if part else trained
    return Fit(whole, len(losses), mean_loss, samples)


def outside(model: FlatModel, part: Layout) -> Tensor:
    """Which parameters are not of this part."""
    rest = torch.ones(model.layout.size, dtype=torch.bool, device=model.device)
    for here, _ in model.layout.runs(part):
        rest[here] = False
    return rest[: model.layout.trainable]


def optimiser(
    theta: Tensor, gradient: Tensor, schedule: Schedule, plain: bool
) -> tuple[Callable[[], object], Callable[[], object]]:
    """What to do before a backward pass and after it, to make one step over the flat vector."""
    if schedule.optimizer.lower() == "sgd" and not schedule.options:
        lr, momentum, decay = schedule.lr, schedule.momentum, schedule.weight_decay
        if plain and momentum and not decay and schedule.clip is None:
            # Backward passes add to the gradient, so it can be the velocity itself: v ← ρv + g.
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
    """The optimiser of ``torch.optim`` with this name, in any case."""
    kinds = {
        n.lower(): c
        for n, c in vars(torch.optim).items()
        if isinstance(c, type) and issubclass(c, torch.optim.Optimizer) and n != "Optimizer"
    }
    for impossible in ("lbfgs", "sparseadam", "muon"):  # closures; sparse gradients; matrices
        kinds.pop(impossible, None)
    if name.lower() not in kinds:
        raise ConfigError(unknown("optimizer", name, kinds))
    return kinds[name.lower()]


def _arguments(kind: Any, schedule: Schedule) -> dict[str, Any]:
    arguments: dict[str, Any] = {"lr": schedule.lr, **schedule.options}
    for name in ("momentum", "weight_decay"):
        if getattr(schedule, name):
            arguments[name] = getattr(schedule, name)
    return checked(f"optimizer '{schedule.optimizer}'", kind, arguments, ("params",), values=False)


def _batches(
    model: FlatModel, data: Split, schedule: Schedule, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled batches, epoch after epoch; the last one of an epoch may be smaller."""
    left = schedule.steps if schedule.steps is not None else -1
    if not (schedule.epochs and len(data)):
        return
    for _ in range(schedule.epochs) if schedule.steps is None else itertools.count():
        order = torch.randperm(len(data), generator=generator)
        for rows in _chunks(order, schedule.batch_size, model.has_batch_norm):
            xs = decode(data.x[torch.cat(rows)]).to(model.device)
            ys = data.y[torch.cat(rows)].to(model.device)
            sizes = [len(r) for r in rows]
            for x, y in zip(torch.split(xs, sizes), torch.split(ys, sizes), strict=True):
                if left == 0:
                    return
                yield x, y
                left -= 1


def _chunks(order: Tensor, batch_size: int, pairs: bool) -> Iterator[list[Tensor]]:
    """The order cut into batches, several at a time.

    Batch normalisation needs two samples: a last batch of one joins the batch before it.
    """
    batches = list(torch.split(order, batch_size))
    if pairs and len(batches) > 1 and len(batches[-1]) == 1:
        batches[-2:] = [torch.cat(batches[-2:])]
    together = max(1, _CHUNK // batch_size)
    for i in range(0, len(batches), together):
        yield batches[i : i + together]


def outputs(model: FlatModel, weights: Weights, x: Tensor) -> Tensor:
    """The model's outputs on ``x`` in evaluation mode, on the CPU."""
    model.load(weights)
    model.module.eval()
    with torch.no_grad():
        parts = [
            model.module(decode(part).to(model.device)).cpu()
            for part in torch.split(x, _SCORE_BATCH)
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
    parts = torch.split(data.x, _SCORE_BATCH), torch.split(data.y, _SCORE_BATCH)
    for x, y in zip(*parts, strict=True):
        share = len(y) / len(data)
        loss = criterion(model.module(decode(x).to(model.device)), y.to(model.device)) * share
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    vector = torch.zeros(model.layout.size)
    vector[: model.layout.trainable] = model.gradient.cpu()
    return Weights(model.layout, vector), total
