"""Adaptive numbers of local steps, chosen for the lowest loss within a budget (Wang et al. 2019).

The control itself consists of a few pure functions. The wrapper applies it to any averaging method:
it adds the number of steps to training orders, and clients' measurements to their uploads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from coterie.client import Client, Task
from coterie.compose.sharing import Sharing, all_layers
from coterie.core.aggregate import mix
from coterie.core.federation import Federation
from coterie.core.messages import Array, ClientId, Mean, Mixing, Order, Reply, Scalar, Slot, Upload
from coterie.core.method import Budget, Method, Round, Setup, Source, Spent, State
from coterie.core.weights import Layout, Weights
from coterie.errors import ConfigError

Phi = float | Literal["auto"]
CONVEX, NETWORK = 0.025, 5e-5  # φ as chosen by the paper's authors for an SVM and for networks
KEY = "tau"  # the key in the server's memory, client state, orders and uploads
GRADIENT = f"{KEY}.gradient"
LOSS = f"{KEY}.loss"  # the task that only evaluates the loss
Row = np.ndarray[Any, np.dtype[np.float64]]

# --- the control --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resource:
    """A budget, how much of it is spent, and the costs of a local step and of an aggregation.

    The best number of steps follows from mean costs. Whether a round still fits is judged by the
    most expensive round so far (``worst``), as a round takes as long as its slowest client.
    """

    name: str
    budget: float
    spent: float
    step: float
    exchange: float
    worst_step: float = 0.0
    worst_exchange: float = 0.0

    def most_steps(self) -> float:
        """The most steps that the next round can afford, reserving one step and an aggregation."""
        step, exchange = self._highest_costs
        room = self.budget - self.spent - 2 * exchange
        if room < 0 or self.spent >= self.budget:
            return 0
        return max(0, math.floor(room / step) - 1) if step > 0 else math.inf

    def runs_short(self, steps: int) -> bool:
        """Whether a round of this many steps may leave too little for another round."""
        step, exchange = self._highest_costs
        return self.spent + step * (steps + 1) + 2 * exchange >= self.budget

    @property
    def _highest_costs(self) -> tuple[float, float]:
        return max(self.step, self.worst_step), max(self.exchange, self.worst_exchange)


@dataclass(frozen=True)
class Estimates:
    """Estimates of the loss's slope ρ, its smoothness β and the clients' gradient divergence δ."""

    rho: float
    beta: float
    delta: float


def drift(steps: Row, lr: float, estimates: Estimates) -> Row:
    """h(τ) = δ/β·((ηβ+1)^τ − 1) − ηδτ: how far τ local steps may deviate from τ common ones.

    >>> drift(np.array([1.0, 2.0]), 0.5, Estimates(1.0, 2.0, 3.0)).tolist()
    [0.0, 1.5]
    """
    if not (estimates.beta > 0 and estimates.delta > 0):
        return np.zeros_like(steps)
    with np.errstate(over="ignore"):
        growth = np.expm1(steps * math.log1p(lr * estimates.beta)) / estimates.beta
        gap = estimates.delta * np.maximum(growth - lr * steps, 0.0)
    return np.where(steps == 1, 0.0, gap)  # exactly zero, despite rounding errors


def bound(
    steps: Row, lr: float, phi: float, estimates: Estimates, resources: Sequence[Resource]
) -> Row:
    """G(τ), a bound on the excess of the loss over its minimum when the budget is used up."""
    cost = np.zeros_like(steps)
    for r in resources:
        available = r.budget - r.exchange - r.step
        cost_per_step = r.step + r.exchange / steps
        cost = np.maximum(cost, cost_per_step / available if available > 0 else math.inf)
    with np.errstate(over="ignore"):
        rise = (
            estimates.rho * drift(steps, lr, estimates)
            if estimates.rho > 0
            else np.zeros_like(steps)
        )
        halved = cost / (2 * lr * phi)
        bounds: Row = halved + np.sqrt(halved**2 + rise / (lr * phi * steps)) + rise
    return bounds


def best_steps(
    most: int, lr: float, phi: float, estimates: Estimates, resources: Sequence[Resource]
) -> int:
    """The τ from 1 to ``most`` with the lowest G (ties: the smallest)."""
    return 1 + int(bound(np.arange(1.0, most + 1), lr, phi, estimates, resources).argmin())


def weight_of(phi: Phi, layout: Layout) -> tuple[float, str]:
    """φ and the reason for it: as given, or with "auto" the authors' value for this kind of model.

    A model is convex if only the weight and the bias of its last layer are trained: linear and
    logistic regression, a linear SVM, or a classifier on top of frozen layers. Any other model
    counts as a network.

    >>> from torch import nn
    >>> weight_of("auto", Layout.of(nn.Linear(2, 1)))
    (0.025, 'the model is convex: its one trained layer is the last')
    >>> weight_of("auto", Layout.of(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))))
    (5e-05, 'the model is a network: it has 2 trained layers')
    """
    if phi != "auto":
        return phi, "it was given"
    trained = [e for e in layout.entries if e.kind == "parameter"]
    layers = {e.layer for e in trained}
    if len(layers) != 1:
        return NETWORK, f"the model is a network: it has {len(layers)} trained layers"
    if layers != {layout.layers[-1]}:
        return NETWORK, "the model is a network: frozen layers follow the one that is trained"
    if len(trained) > 2:  # a normalisation's scale, a recurrent layer's second matrix
        return NETWORK, "the model is a network: its trained layer is more than a weight and a bias"
    return CONVEX, "the model is convex: its one trained layer is the last"


@dataclass(frozen=True)
class Costs:
    """The total costs of the rounds so far, which yield the mean costs of a step and of a round."""

    rounds: int = 0
    steps: int = 0
    bytes: int = 0
    seconds: float = 0.0
    training: float = 0.0  # the seconds of training
    worst_step: float = 0.0
    worst_rest: float = 0.0
    worst_bytes: int = 0

    def plus(self, steps: int, share: float, spent: Spent) -> Costs:
        """Add a round of ``steps`` steps, which took ``share`` of the round's computing time."""
        training = share * spent.computation
        return Costs(
            self.rounds + 1,
            self.steps + steps,
            self.bytes + spent.bytes,
            self.seconds + spent.seconds,
            self.training + training,
            max(self.worst_step, training / max(1, steps)),
            max(self.worst_rest, spent.seconds - training),
            max(self.worst_bytes, spent.bytes),
        )

    def resources(self, spent: Spent, budget: Budget) -> list[Resource]:
        """The limited resources, with their costs so far; unknown costs count as zero."""
        rounds, step_seconds = max(1, self.rounds), self.training / max(1, self.steps)
        overhead, volume = (self.seconds - self.training) / rounds, self.bytes / rounds
        resources = [
            Resource(
                f"{budget.seconds:g} s",
                budget.seconds,
                spent.seconds,
                step_seconds,
                overhead,
                self.worst_step,
                self.worst_rest,
            ),
            Resource(
                f"{budget.bytes:g} bytes",
                budget.bytes,
                spent.bytes,
                0.0,
                volume,
                worst_exchange=self.worst_bytes,
            ),
        ]
        return [r for r in resources if math.isfinite(r.budget)]


# --- around a method ----------------------------------------------------------------------------


def adaptive_steps(
    inner: Method, phi: Phi = "auto", gamma: int = 10, tau_max: int = 100, sample: int = 64
) -> Method:
    """Wrap a method so that each round's number of local steps is chosen for the run's budget.

    Clients measure their loss and gradient at the model they receive and at the one they last sent,
    on the same ``sample`` training rows in every round (0: all rows). The server estimates ρ, β and
    δ from the means, and the costs from past rounds. The next number of steps minimises G from 1 to
    ``gamma`` times the last number, but at most ``tau_max``. ``phi`` is φ in G; "auto" chooses it
    by the kind of model and records the choice in the first round's notes (``weight_of``). The
    method ends before the budget is exceeded, with the best models so far.
    """
    if reason := _unfit(inner):
        raise ConfigError(f"{inner.name} {reason}: adaptive-tau cannot wrap it")

    def init(fed: Federation, setup: Setup) -> State:
        state, schedule = inner.init(fed, setup), setup.schedule
        weight, why = weight_of(phi, setup.start.layout)
        state = replace(state, notes={**state.notes, "phi": weight, "phi_why": why})
        return _remembering(state, Control(lr=schedule.lr, decay=schedule.lr_decay))

    def round(fed: Federation, state: State, info: Round) -> State:
        control = Control.remembered(state).after(info.spent)
        resources = control.costs.resources(info.spent, info.budget)
        steps = control.steps
        if control.fresh and control.seen is not None:
            lr, most = control.lr * control.decay**info.number, min(gamma * steps, tau_max)
            weight, _ = weight_of(phi, next(iter(state.models.values())).layout)
            steps = best_steps(most, lr, weight, control.seen, resources)
        short = [r for r in resources if r.runs_short(steps)]
        steps = int(min([steps, *[r.most_steps() for r in short]]))
        if not steps:
            affordable = all(r.spent + r.exchange + r.step <= r.budget for r in resources)
            evaluating = fed if affordable and control.costs.rounds else None
            return _ended(evaluating, inner, state, info, control, short[0])
        measuring = _MeasuringFederation(fed, steps)
        after = inner.round(measuring, state, info)
        measured = Measured.of(measuring.means)
        # The costs of a round with evidence or a trial are not typical of the rounds to come.
        cost_so_far = None if measuring.unhurried else info.spent
        control = control.moved(steps, cost_so_far, measured, state)
        after = replace(_remembering(after, control), notes={**after.notes, **control.notes})
        if short and fed.min_group == 1:
            return _ended(fed, inner, after, info, control, short[0])
        return after  # secure sums allow one sum per round, so the next round ends the run

    def check(setup: Setup) -> None:
        if inner.check is not None:
            inner.check(setup)
        if math.isinf(setup.budget.bytes) and math.isinf(setup.budget.seconds):
            raise ConfigError(f"method {inner.name} needs a budget: set stop.seconds or stop.bytes")
        shared = inner.pieces and inner.pieces.shared
        if not Sharing(shared or all_layers).travelling(setup.start.layout).size:
            raise ConfigError(f"{inner.name} shares no layer: adaptive-tau cannot wrap it")

    def loss(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
        most = 0 if inner.chooses else 1
        model, rows = Sharing().received(client, arrays, most)[1], _rows(client, sample)
        loss_value = client.loss(model, rows=rows) if len(client.train) else 0.0
        return Upload({KEY: torch.tensor([loss_value], dtype=torch.float64)})

    tasks = {**inner.tasks, "train": _measuring(inner.tasks["train"], sample), LOSS: loss}
    settings = {"phi": phi, "gamma": gamma, "tau_max": tau_max, "sample": sample}
    return replace(
        inner,
        init=init,
        round=round,
        tasks=tasks,
        check=check,
        source=inner.source
        and Source(__name__, "rebuild", {"inner": asdict(inner.source), **settings}),
        pieces=None,
        needs_all_layers="measures the gradient of every layer in each round",
        no_step="ends with the best models seen, which a step would move",
        no_robust_mean="needs plain means of gradients",
        no_clipping="needs plain means of gradients",
        keeps_budget=True,
    )


def rebuild(inner: Mapping[str, Any], **settings: Any) -> Method:
    """Rebuild the method from the source of the inner one, so that it can be sent by name."""
    return adaptive_steps(Source(**inner).make(), **settings)


def _unfit(inner: Method) -> str:
    """Why a method cannot be wrapped, or an empty string."""
    if inner.sees == "nothing":
        return "shares nothing"
    if inner.no_step:
        return inner.no_step
    if inner.name == "fednova":
        return "sends directions instead of the trained model"
    if "train" not in inner.tasks or (inner.pieces is None and set(inner.tasks) - _PLAIN):
        return "trains in an exchange of its own"
    if inner.pieces is not None and inner.pieces.assign and inner.pieces.assign.mixes:
        return "mixes models with weights"
    return ""


_PLAIN = {"train", "pick", "size"}  # training, and tasks without training


@dataclass(frozen=True)
class Measured:
    """Means of the measurements that a round's clients made at the models that they received.

    ``known`` is the share of clients, by samples, that had an earlier model to compare with;
    ``rho`` and ``beta`` are means over these. ``work`` is the share of training in clients'
    computations; the remainder is measuring and choosing models.
    """

    known: float
    rho: float
    beta: float
    delta: float
    loss: float
    work: float

    @staticmethod
    def of(means: Sequence[Mean]) -> Measured | None:
        """Combine the means of several models, weighted by their samples."""
        total = sum(m.examples for m in means)
        if not total:
            return None
        sums, square = np.zeros(6), 0.0
        for mean in means:
            numbers, gradient = mean.arrays[KEY], mean.arrays[GRADIENT]
            assert isinstance(numbers, Tensor)
            assert isinstance(gradient, Tensor)
            share, values = mean.examples / total, numbers.numpy()
            sums += share * values
            square += share * _spread(float(values[4]), gradient)
        known, rho, beta, loss, _, work = (float(v) for v in sums)
        divisor = known or 1.0
        return Measured(known, rho / divisor, beta / divisor, math.sqrt(square), loss, work)


def _spread(square: float, mean: Tensor) -> float:
    """Σp‖g_i − ḡ‖² = Σp‖g_i‖² − ‖ḡ‖²; 0 if it is within the rounding error of ḡ."""
    spread = square - float(mean.double().square().sum())
    return spread if spread > 2 * torch.finfo(torch.float32).eps * square else 0.0


@dataclass(frozen=True)
class Control:
    """The server's memory between rounds: costs, estimates and the best models.

    ``fresh`` says whether the last round provided estimates. ``spent`` is what the run had cost
    before that round; None before the first round, and after a round that did more than training.
    ``work`` is the share of training in the round's computations; ``best`` is the state with the
    lowest ``loss``, and that loss.
    """

    lr: float = 0.0
    decay: float = 1.0
    steps: int = 1
    spent: Spent | None = None
    work: float = 1.0
    costs: Costs = field(default_factory=Costs)
    seen: Estimates | None = None
    fresh: bool = False
    best: Mapping[str, Any] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def remembered(state: State) -> Control:
        """Restore the control from the server's memory."""
        memory = state.memory[KEY]
        return Control(
            memory["lr"],
            memory["decay"],
            memory["steps"],
            Spent(**memory["spent"]) if memory["spent"] else None,
            memory["work"],
            Costs(**memory["costs"]),
            Estimates(**memory["seen"]) if memory["seen"] else None,
            memory["fresh"],
            memory["best"],
        )

    def to_tree(self) -> dict[str, Any]:
        """The control as a tree for the server's memory."""
        return {
            "lr": self.lr,
            "decay": self.decay,
            "steps": self.steps,
            "spent": asdict(self.spent) if self.spent else None,
            "work": self.work,
            "costs": asdict(self.costs),
            "seen": asdict(self.seen) if self.seen else None,
            "fresh": self.fresh,
            "best": self.best,
        }

    def after(self, spent: Spent) -> Control:
        """Add the cost of the last round, once it is known."""
        if self.spent is None:
            return self
        after, before = asdict(spent), asdict(self.spent)
        cost = Spent(**{k: after[k] - before[k] for k in after})
        return replace(self, costs=self.costs.plus(self.steps, self.work, cost), spent=None)

    def moved(
        self, steps: int, spent: Spent | None, measured: Measured | None, state: State
    ) -> Control:
        """The control after a round of ``steps`` steps with the given measurements of ``state``."""
        moved = replace(self, steps=steps, spent=spent, fresh=False, notes={"tau": steps})
        if measured is None:
            return moved
        estimates = self.seen
        if measured.known:
            estimates = Estimates(measured.rho, measured.beta, measured.delta)
        elif estimates is not None or not measured.delta:  # with δ = 0, ρ and β do not matter
            estimates = replace(estimates or Estimates(0.0, 0.0, 0.0), delta=measured.delta)
        notes = {"tau": steps, **(asdict(estimates) if estimates else {}), "loss": measured.loss}
        moved = replace(
            moved, seen=estimates, fresh=estimates is not None, work=measured.work, notes=notes
        )
        return moved.kept(measured.loss, state)

    def kept(self, loss: float, state: State) -> Control:
        """Keep the state as the best one if its loss is the lowest so far."""
        if self.best and not loss < self.best["loss"]:
            return self
        memory = {k: v for k, v in state.memory.items() if k != KEY}
        models, groups = dict(state.models), dict(state.groups)
        best = {"loss": loss, "models": models, "groups": groups, "memory": memory}
        return replace(self, best=best)


def _remembering(state: State, control: Control) -> State:
    return replace(state, memory={**state.memory, KEY: control.to_tree()})


def _ended(
    fed: Federation | None,
    inner: Method,
    state: State,
    info: Round,
    control: Control,
    short: Resource,
) -> State:
    """End with the best state, and say why; with ``fed``, evaluate the current state first."""
    if fed is not None:
        orders = [Order(c, LOSS, inner.sends(state, c)) for c in info.cohort]
        means = fed.reduce(orders, {c: {KEY: 1.0} for c in info.cohort})
        for mean in means.values():
            control = control.kept(float(mean.arrays[KEY]), state)  # type: ignore[arg-type]
    reason, best = f"the budget of {short.name} has no room for another round", control.best
    if best:
        # Clients that have joined one of the best models' groups since then stay in it.
        joined = {c: s for c, s in state.groups.items() if s in best["models"]}
        # Clients' own state is not rolled back, so neither is the server's mean of it.
        memory = best["memory"] | {name: state.memory[name] for name in inner.mirrors}
        groups = joined | best["groups"]
        state = replace(state, models=best["models"], groups=groups, memory=memory)
    ended = replace(control, best={}, fresh=False)  # the state itself is now the best one
    notes = {**state.notes, "best_loss": best["loss"]} if best else state.notes
    return replace(_remembering(state, ended), over=reason, notes=notes)


@dataclass
class _MeasuringFederation:
    """A federation that adds a number of steps to training orders, and requests measurements."""

    fed: Federation
    steps: int
    means: list[Mean] = field(default_factory=list)
    unhurried: bool = False  # whether any order may exceed a round's deadline

    @property
    def clients(self) -> Sequence[ClientId]:
        return self.fed.clients

    @property
    def min_group(self) -> int:
        return self.fed.min_group

    @property
    def plain_means(self) -> bool:
        return self.fed.plain_means

    def gather(self, orders: Sequence[Order]) -> list[Reply]:
        replies = self.fed.gather([self._order(o) for o in orders])
        offered = {o.client: _models(o) for o in orders}
        measured = [r for r in replies if KEY in r.arrays]
        into = {r.client: {_slot(r, offered[r.client]): 1.0} for r in measured}
        self.means += mix(measured, into).values()
        return [replace(r, arrays=_without(r.arrays)) for r in replies]

    def reduce(
        self, orders: Sequence[Order], into: Mixing, by_examples: bool = True
    ) -> dict[Slot, Mean]:
        means = self.fed.reduce([self._order(o) for o in orders], into, by_examples)
        self.means += [m for m in means.values() if KEY in m.arrays]
        return {s: replace(m, arrays=_without(m.arrays)) for s, m in means.items()}

    def average(
        self, replies: Sequence[Reply], into: Mixing, by_examples: bool = True
    ) -> dict[Slot, Mean]:
        return self.fed.average(replies, into, by_examples)

    def _order(self, order: Order) -> Order:
        self.unhurried |= order.unhurried
        if order.task != "train":
            return order
        return replace(order, config={**order.config, "steps": self.steps, KEY: True})


def _models(order: Order) -> list[str]:
    return [name for name, array in order.arrays.items() if isinstance(array, Weights)]


def _slot(reply: Reply, offered: Sequence[str]) -> Slot:
    """The model that a client trained: the only one offered, or the client's choice."""
    return offered[0] if len(offered) == 1 else int(reply.metrics["slot"])


def _without(arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {k: a for k, a in arrays.items() if k not in (KEY, GRADIENT)}


# --- on the client ------------------------------------------------------------------------------


def _measuring(task: Task, sample: int) -> Task:
    """Wrap a task so that its upload includes measurements at the received model."""

    def run(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
        personal = client.kept("own")  # before training replaces it
        upload = task(client, arrays, {k: v for k, v in config.items() if k != KEY})
        model = upload.arrays.get("model")
        if KEY not in config or not isinstance(model, Weights):
            return upload
        received = arrays.get(upload.delta_of.get("model", ""))
        if not isinstance(received, Weights):
            raise ConfigError(
                "adaptive-tau compares the model that a client sends with the one it received, but "
                "this method's upload does not say which one that is; choose another method"
            )
        full = received.onto(client.base if personal is None else personal.onto(client.base))
        last = client.state.get(KEY)
        client.state[KEY] = model.parameters.clone()
        last_sent = last if isinstance(last, Tensor) else None
        numbers, gradient = measured(client, full, received, last_sent, _rows(client, sample))
        numbers[5] = client.trained / max(client.samples, 1.0)
        return replace(
            upload,
            arrays={**upload.arrays, KEY: numbers, GRADIENT: gradient},
        )

    return run


def _rows(client: Client, sample: int) -> Tensor | None:
    """The training rows that the client measures on, the same in every round; None for all rows.

    Different rows would change the loss more than a round of training does, so which model has the
    lowest loss would depend on chance.
    """
    if not 0 < sample < len(client.train):
        return None
    current_round, client.round = client.round, 0
    rows = client.shuffled(KEY)[:sample]
    client.round = current_round
    return rows


def measured(
    client: Client, full: Weights, shared: Weights, last: Tensor | None, rows: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Measure six numbers, and the gradient of the shared parameters, at the received model.

    The numbers are: 1 if the client sent different parameters before (otherwise, this number and
    the next two are 0), ρ_i, β_i, the loss, ‖gradient‖², and a placeholder for the share of
    training in the client's computations. Both models have the buffers and the unshared layers of
    ``full``; ``shared`` is its shared part.
    """
    numbers = torch.zeros(6, dtype=torch.float64)
    if not len(client.train):
        return numbers, torch.zeros_like(shared.parameters)
    gradient, loss = client.slope(full, rows)
    shared_gradient = gradient.part(shared.layout).parameters
    numbers[3], numbers[4] = loss, shared_gradient.double().square().sum()
    gap = 0.0 if last is None else _distance(last, shared.parameters)
    if last is not None and gap > 0:
        vector = shared.vector.clone()
        vector[: shared.layout.trainable] = last
        model_sent = Weights(shared.layout, vector).onto(full)
        other_gradient, other_loss = client.slope(model_sent, rows)
        change = _distance(other_gradient.part(shared.layout).parameters, shared_gradient)
        numbers[0], numbers[1], numbers[2] = 1.0, abs(other_loss - loss) / gap, change / gap
    return numbers, shared_gradient.clone()


def _distance(a: Tensor, b: Tensor) -> float:
    return float(torch.linalg.vector_norm(a.double() - b.double()))
