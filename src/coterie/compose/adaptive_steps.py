"""How many local steps a round should have, so that a budget buys the lowest loss (Wang 2019).

The control is a few pure functions; the wrapper brings it to any averaging method: it adds the
number of steps to the orders that train, and what clients measure to their uploads.
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
CONVEX, NETWORK = 0.025, 5e-5  # φ, as the paper's authors chose it for an SVM and for networks
KEY = "tau"  # its place in memory, in a client's state, in an order's config and among arrays
GRADIENT = f"{KEY}.gradient"
LOSS = f"{KEY}.loss"  # the task that only asks for a loss
Row = np.ndarray[Any, np.dtype[np.float64]]

# --- the control --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Resource:
    """A budget, what of it is spent, and what a step and an aggregation cost of it.

    Means over rounds say what is best; the dearest round yet (``worst``) says what still fits, as a
    round takes as long as its slowest client.
    """

    name: str
    budget: float
    spent: float
    step: float
    exchange: float
    worst_step: float = 0.0
    worst_exchange: float = 0.0

    def most(self) -> float:
        """The steps that the next round can have, one more and another aggregation kept back."""
        step, exchange = self._dear
        room = self.budget - self.spent - 2 * exchange
        if room < 0 or self.spent >= self.budget:
            return 0
        return max(0, math.floor(room / step) - 1) if step > 0 else math.inf

    def short(self, steps: int) -> bool:
        """Whether after a round of so many steps there may be no room for another."""
        step, exchange = self._dear
        return self.spent + step * (steps + 1) + 2 * exchange >= self.budget

    @property
    def _dear(self) -> tuple[float, float]:
        return max(self.step, self.worst_step), max(self.exchange, self.worst_exchange)


@dataclass(frozen=True)
class Estimates:
    """Of the loss: its slope ρ, how fast its gradient changes β, how far clients' differ δ."""

    rho: float
    beta: float
    delta: float


def drift(steps: Row, lr: float, seen: Estimates) -> Row:
    """h(τ) = δ/β·((ηβ+1)^τ − 1) − ηδτ: how far τ local steps may lead from τ common ones.

    >>> drift(np.array([1.0, 2.0]), 0.5, Estimates(1.0, 2.0, 3.0)).tolist()
    [0.0, 1.5]
    """
    if not (seen.beta > 0 and seen.delta > 0):
        return np.zeros_like(steps)
    with np.errstate(over="ignore"):
        grown = np.expm1(steps * math.log1p(lr * seen.beta)) / seen.beta
        found = seen.delta * np.maximum(grown - lr * steps, 0.0)
    return np.where(steps == 1, 0.0, found)  # exactly, whatever rounding says


def bound(steps: Row, lr: float, phi: float, seen: Estimates, resources: Sequence[Resource]) -> Row:
    """G(τ), which bounds how far the loss stays above its least when the budget is used up."""
    cost = np.zeros_like(steps)
    for r in resources:
        left = r.budget - r.exchange - r.step
        each = r.step + r.exchange / steps
        cost = np.maximum(cost, each / left if left > 0 else math.inf)
    with np.errstate(over="ignore"):
        rise = seen.rho * drift(steps, lr, seen) if seen.rho > 0 else np.zeros_like(steps)
        half = cost / (2 * lr * phi)
        found: Row = half + np.sqrt(half**2 + rise / (lr * phi * steps)) + rise
    return found


def best_steps(
    most: int, lr: float, phi: float, seen: Estimates, resources: Sequence[Resource]
) -> int:
    """The τ of 1 to ``most`` with the least G; of equal ones the smallest."""
    return 1 + int(bound(np.arange(1.0, most + 1), lr, phi, seen, resources).argmin())


def weight_of(phi: Phi, layout: Layout) -> tuple[float, str]:
    """φ and why: as given, or with "auto" the authors' value for a model of this kind.

    A model is convex if all that is trained of it is one weight, and its bias, of the last layer:
    linear and logistic regression, a linear SVM, a classifier on top of frozen layers. Anything
    else counts as a network.

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
    """What rounds have cost so far: sums, from which come the costs of a step and a round."""

    rounds: int = 0
    steps: int = 0
    bytes: int = 0
    seconds: float = 0.0
    training: float = 0.0  # seconds of these
    worst_step: float = 0.0
    worst_rest: float = 0.0
    worst_bytes: int = 0

    def plus(self, steps: int, share: float, spent: Spent) -> Costs:
        """With one more round of so many steps, which took this share of its computing."""
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
        """What is bounded; a cost not known yet counts as nothing."""
        rounds, step = max(1, self.rounds), self.training / max(1, self.steps)
        rest, sent = (self.seconds - self.training) / rounds, self.bytes / rounds
        found = [
            Resource(
                f"{budget.seconds:g} s",
                budget.seconds,
                spent.seconds,
                step,
                rest,
                self.worst_step,
                self.worst_rest,
            ),
            Resource(
                f"{budget.bytes:g} bytes",
                budget.bytes,
                spent.bytes,
                0.0,
                sent,
                worst_exchange=self.worst_bytes,
            ),
        ]
        return [r for r in found if math.isfinite(r.budget)]


# --- around a method ----------------------------------------------------------------------------


def adaptive_steps(
    inner: Method, phi: Phi = "auto", gamma: int = 10, tau_max: int = 100, sample: int = 64
) -> Method:
    """The same method, the number of local steps of each round chosen for the run's budget.

    Clients measure their loss and gradient at the model they receive and at the one they sent
    last, on ``sample`` of their training rows (0: all), the same in every round. From the means of
    these come ρ, β and δ, from what rounds cost the costs; the next round's steps are the least of
    G over 1 to ``gamma`` times the last, at most ``tau_max``. ``phi`` is G's φ; "auto" takes it by
    the kind of model, and the notes of the beginning say which (``weight_of``). Before the budget
    is exceeded the method ends, with the best models that it has seen.
    """
    if reason := _unfit(inner):
        raise ConfigError(f"{inner.name} {reason}: adaptive-tau cannot go around it")

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
        short = [r for r in resources if r.short(steps)]
        steps = int(min([steps, *[r.most() for r in short]]))
        if not steps:
            afford = all(r.spent + r.exchange + r.step <= r.budget for r in resources)
            asked = fed if afford and control.costs.rounds else None
            return _ended(asked, inner, state, info, control, short[0])
        asking = _Asking(fed, steps)
        after = inner.round(asking, state, info)
        measured = Measured.of(asking.means)
        # What a round of evidence or of a trial costs says nothing of the rounds to come.
        known = None if asking.unhurried else info.spent
        control = control.moved(steps, known, measured, state)
        after = replace(_remembering(after, control), notes={**after.notes, **control.notes})
        if short and fed.min_group == 1:
            return _ended(fed, inner, after, info, control, short[0])
        return after  # of secure sums there is one a round: the next round ends it

    def check(setup: Setup) -> None:
        if inner.check is not None:
            inner.check(setup)
        if math.isinf(setup.budget.bytes) and math.isinf(setup.budget.seconds):
            raise ConfigError(f"method {inner.name} needs a budget: set stop.seconds or stop.bytes")
        shared = inner.pieces and inner.pieces.shared
        if not Sharing(shared or all_layers).travelling(setup.start.layout).size:
            raise ConfigError(f"{inner.name} shares no layer: adaptive-tau cannot go around it")

    def loss(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
        taken = Sharing().best if inner.chooses else Sharing().received
        model, rows = taken(client, arrays)[1], _rows(client, sample)
        found = client.loss(model, rows=rows) if len(client.train) else 0.0
        return Upload({KEY: torch.tensor([found], dtype=torch.float64)})

    tasks = {**inner.tasks, "train": _measuring(inner.tasks["train"], sample), LOSS: loss}
    known = {"phi": phi, "gamma": gamma, "tau_max": tau_max, "sample": sample}
    return replace(
        inner,
        init=init,
        round=round,
        tasks=tasks,
        check=check,
        source=inner.source and Source(__name__, "again", {"inner": asdict(inner.source), **known}),
        pieces=None,
        needs_all_layers="measures the gradient of every layer in each round",
        no_step="ends with the best models seen, which a step would move",
        no_robust_mean="needs plain means of gradients",
        no_clipping="needs plain means of gradients",
        keeps_budget=True,
    )


def again(inner: Mapping[str, Any], **known: Any) -> Method:
    """Such a method again, from where the one inside comes from: so it travels by name."""
    return adaptive_steps(Source(**inner).make(), **known)


def _unfit(inner: Method) -> str:
    """Why this cannot go around a method, if so."""
    if inner.sees == "nothing":
        return "shares nothing"
    if inner.no_step:
        return inner.no_step
    if inner.name == "fednova":
        return "sends directions, not the model that it trained"
    if "train" not in inner.tasks or (inner.pieces is None and set(inner.tasks) - _PLAIN):
        return "trains in a conversation of its own"
    if inner.pieces is not None and inner.pieces.assign and inner.pieces.assign.mixes:
        return "mixes models in shares"
    return ""


_PLAIN = {"train", "pick", "size"}  # training, and questions that need no training


@dataclass(frozen=True)
class Measured:
    """What a round's clients measured of the models that they received.

    ``known`` is the share of clients, by samples, that had a model of their own to compare with;
    ``rho`` and ``beta`` are means over these. ``work`` is the share of training in what they
    computed; the rest was measuring and choosing.
    """

    known: float
    rho: float
    beta: float
    delta: float
    loss: float
    work: float

    @staticmethod
    def of(means: Sequence[Mean]) -> Measured | None:
        """The means of several models together, each counting by its samples."""
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
        each = known or 1.0
        return Measured(known, rho / each, beta / each, math.sqrt(square), loss, work)


def _spread(square: float, mean: Tensor) -> float:
    """Σp‖g_i − ḡ‖² = Σp‖g_i‖² − ‖ḡ‖²; less than ḡ's own rounding can make is nothing."""
    gap = square - float(mean.double().square().sum())
    return gap if gap > 2 * torch.finfo(torch.float32).eps * square else 0.0


@dataclass(frozen=True)
class Control:
    """What the server remembers: what rounds cost, what was measured, the best models.

    ``fresh`` says whether the last round brought estimates; ``spent`` is what the run had cost
    before it, none before the first and after a round with more in it than training; ``work`` the
    share of training in what it computed; ``best`` is a state and its ``loss``.
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
        """From the server's memory."""
        kept = state.memory[KEY]
        return Control(
            kept["lr"],
            kept["decay"],
            kept["steps"],
            Spent(**kept["spent"]) if kept["spent"] else None,
            kept["work"],
            Costs(**kept["costs"]),
            Estimates(**kept["seen"]) if kept["seen"] else None,
            kept["fresh"],
            kept["best"],
        )

    def to_tree(self) -> dict[str, Any]:
        """For the server's memory."""
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
        """With the cost of the last round, now that it is known."""
        if self.spent is None:
            return self
        now, then = asdict(spent), asdict(self.spent)
        cost = Spent(**{k: now[k] - then[k] for k in now})
        return replace(self, costs=self.costs.plus(self.steps, self.work, cost), spent=None)

    def moved(
        self, steps: int, spent: Spent | None, found: Measured | None, state: State
    ) -> Control:
        """After a round of so many steps, in which this was measured of this state."""
        moved = replace(self, steps=steps, spent=spent, fresh=False, notes={"tau": steps})
        if found is None:
            return moved
        seen = self.seen
        if found.known:
            seen = Estimates(found.rho, found.beta, found.delta)
        elif seen is not None or not found.delta:  # with δ = 0 the others do not matter
            seen = replace(seen or Estimates(0.0, 0.0, 0.0), delta=found.delta)
        notes = {"tau": steps, **(asdict(seen) if seen else {}), "loss": found.loss}
        moved = replace(moved, seen=seen, fresh=seen is not None, work=found.work, notes=notes)
        return moved.kept(found.loss, state)

    def kept(self, loss: float, state: State) -> Control:
        """With this state as the best one, if its loss is the lowest so far."""
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
    """The best state seen, and why it is the last; the present one is judged too, if ``fed``."""
    if fed is not None:
        orders = [Order(c, LOSS, inner.sends(state, c)) for c in info.cohort]
        means = fed.reduce(orders, {c: {KEY: 1.0} for c in info.cohort})
        for mean in means.values():
            control = control.kept(float(mean.arrays[KEY]), state)  # type: ignore[arg-type]
    over, best = f"the budget of {short.name} has no room for another round", control.best
    if best:
        # Whoever joined a group of the best models since then stays in it.
        joined = {c: s for c, s in state.groups.items() if s in best["models"]}
        # What clients keep stays as it is, and so does the server's mean of it.
        memory = best["memory"] | {name: state.memory[name] for name in inner.mirrors}
        groups = joined | best["groups"]
        state = replace(state, models=best["models"], groups=groups, memory=memory)
    ended = replace(control, best={}, fresh=False)  # it is the state itself now
    notes = {**state.notes, "best_loss": best["loss"]} if best else state.notes
    return replace(_remembering(state, ended), over=over, notes=notes)


@dataclass
class _Asking:
    """A federation that tells those who train how many steps to make, and what to measure."""

    fed: Federation
    steps: int
    means: list[Mean] = field(default_factory=list)
    unhurried: bool = False  # whether anybody was asked for what takes longer than a round

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
        sent = [r for r in replies if KEY in r.arrays]
        into = {r.client: {_slot(r, offered[r.client]): 1.0} for r in sent}
        self.means += mix(sent, into).values()
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
    """The model that a client trained: the one that it was offered, or its choice among many."""
    return offered[0] if len(offered) == 1 else int(reply.metrics["slot"])


def _without(arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {k: a for k, a in arrays.items() if k not in (KEY, GRADIENT)}


# --- on the client ------------------------------------------------------------------------------


def _measuring(task: Task, sample: int) -> Task:
    """The task, its upload with what the client measured of the model it received."""

    def run(client: Client, arrays: Mapping[str, Any], config: Mapping[str, Scalar]) -> Upload:
        own = client.kept("own")  # training replaces it
        upload = task(client, arrays, {k: v for k, v in config.items() if k != KEY})
        model = upload.arrays.get("model")
        if KEY not in config or not isinstance(model, Weights):
            return upload
        received = arrays.get(upload.delta_of.get("model", ""))
        if not isinstance(received, Weights):
            raise ConfigError(
                "adaptive-tau compares the model that a client sends with the one it received, "
                "and this method's upload does not say which that is: take another method"
            )
        whole = received.onto(client.base if own is None else own.onto(client.base))
        last = client.state.get(KEY)
        client.state[KEY] = model.parameters.clone()
        before = last if isinstance(last, Tensor) else None
        numbers, gradient = measured(client, whole, received, before, _rows(client, sample))
        numbers[5] = client.trained / max(client.samples, 1.0)
        return replace(
            upload,
            arrays={**upload.arrays, KEY: numbers, GRADIENT: gradient},
        )

    return run


def _rows(client: Client, sample: int) -> Tensor | None:
    """The rows that the client measures on; none for all.

    They are the same in every round: other rows would change the loss more than a round does, and
    the best model would be the luckiest.
    """
    if not 0 < sample < len(client.train):
        return None
    now, client.round = client.round, 0
    rows = client.shuffled(KEY)[:sample]
    client.round = now
    return rows


def measured(
    client: Client, whole: Weights, shared: Weights, last: Tensor | None, rows: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Six numbers and the gradient of the parameters that travel, at the model received.

    The numbers: 1 if the client has sent parameters before, which differ (else the next two are
    0), ρ_i, β_i, the loss, ‖gradient‖², and a place for the share of training in its work. Both
    models have the buffers, and the layers that do not travel, of ``whole``; ``shared`` is what of
    it does.
    """
    numbers = torch.zeros(6, dtype=torch.float64)
    if not len(client.train):
        return numbers, torch.zeros_like(shared.parameters)
    found, loss = client.slope(whole, rows)
    here = found.part(shared.layout).parameters
    numbers[3], numbers[4] = loss, here.double().square().sum()
    gap = 0.0 if last is None else _distance(last, shared.parameters)
    if last is not None and gap > 0:
        vector = shared.vector.clone()
        vector[: shared.layout.trainable] = last
        there = Weights(shared.layout, vector).onto(whole)
        other, height = client.slope(there, rows)
        bend = _distance(other.part(shared.layout).parameters, here)
        numbers[0], numbers[1], numbers[2] = 1.0, abs(height - loss) / gap, bend / gap
    return numbers, here.clone()


def _distance(a: Tensor, b: Tensor) -> float:
    return float(torch.linalg.vector_norm(a.double() - b.double()))
