"""The client as a task sees it: its own data, its own state, and training."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from coterie.client.fit import Criterion, Fit, FitCall, FlatModel, data_gradient, fit, outputs
from coterie.client.objectives import Objective, erm
from coterie.client.together import OutputsCall, Together, outputs_of
from coterie.core.messages import Array, ClientId, Scalar, Upload
from coterie.core.schema import Schedule
from coterie.core.weights import Weights
from coterie.data.population import Split
from coterie.errors import ConfigError, TrainingError
from coterie.seeds import seed_for, torch_generator

StateValue = Array | Scalar
FORWARD = 1 / 3  # of a gradient's work, since a backward pass takes about twice a forward pass


class StagedState(MutableMapping[str, StateValue]):
    """A client's state during one task; changes count only once the server acknowledges them."""

    def __init__(self, values: Mapping[str, StateValue]) -> None:
        self._values = dict(values)
        self.changed = False

    def __getitem__(self, key: str) -> StateValue:
        return self._values[key]

    def __setitem__(self, key: str, value: StateValue) -> None:
        self._values[key] = value
        self.changed = True

    def __delitem__(self, key: str) -> None:
        del self._values[key]
        self.changed = True

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@dataclass(frozen=True)
class TrainingContext:
    """What all clients on a machine share for training: the model and the run's settings.

    With ``equal`` clients count equally, however many samples they have. ``together`` is where
    several clients work side by side, if they may.
    """

    model: FlatModel
    start: Weights
    criterion: Criterion
    schedule: Schedule
    seed: int
    equal: bool = False  # whether clients count equally, however many samples they have
    hidden: bool = False  # whether uploads go into secure sums
    together: Together | None = None

    def fit(self, training: FitCall) -> Fit:
        """Carry out a training."""
        if self.together is not None:
            return self.together.fit(training)
        return fit(self.model, training, self.criterion)

    def outputs(self, model: Weights, x: Tensor) -> Tensor:
        """A model's outputs on ``x`` in evaluation mode, on the CPU."""
        if self.together is not None:
            return self.together.outputs(model, x)
        return outputs(self.model, model, x)

    def outputs_of(self, calls: Sequence[OutputsCall]) -> list[Tensor]:
        """The outputs of several models, or of one model for several clients' inputs."""
        return outputs_of(self.model, calls, None if self.together is None else self.together.stack)

    def gradient(self, model: Weights, data: Split) -> tuple[Weights, float]:
        """The gradient of the mean loss over all of ``data``, and that loss."""
        if self.together is not None:
            return self.together.gradient(model, data)
        return data_gradient(self.model, model, data, self.criterion)


class Client:
    """A client while it runs a task: its data, its state, and methods for training.

    ``base`` is the initial model, the same for all clients. ``state`` is what this client keeps
    between rounds; it leaves the client only if a task sends it. ``told`` is the order's config.
    ``samples`` counts the samples processed, a forward pass alone as a third of one; ``trained``
    counts those processed in training. Tasks have no access to the test data.
    """

    def __init__(
        self,
        id: ClientId,
        train: Split,
        val: Split,
        state: MutableMapping[str, StateValue],
        round: int,
        context: TrainingContext,
        told: Mapping[str, Scalar] | None = None,
    ) -> None:
        self.id = id
        self.train = train
        self.val = val
        self.state = state
        self.round = round
        self.told = told or {}
        self.samples = 0.0
        self.trained = 0.0
        self._context = context

    @property
    def base(self) -> Weights:
        """The initial model, θ⁰, the same for all clients."""
        return self._context.start

    @property
    def weight(self) -> int:
        """This client's weight in means by samples; 1 where all clients count equally."""
        return 1 if self._context.equal else len(self.train)

    @property
    def hidden(self) -> bool:
        """Whether what this client sends goes into secure sums, which must not single it out."""
        return self._context.hidden

    def kept(self, name: str) -> Weights | None:
        """The weights in this client's state under ``name``; None if there are none."""
        value = self.state.get(name)
        return value if isinstance(value, Weights) else None

    def schedule(self, **changes: Any) -> Schedule:
        """The training schedule of this round: the run's with the decayed learning rate.

        ``changes`` replace its settings. An order may set the number of ``steps`` in its config.
        """
        base = self._context.schedule
        settings: dict[str, Any] = {"lr": base.lr * base.lr_decay**self.round}
        if "steps" in self.told:
            settings["steps"] = int(self.told["steps"])
            if settings["steps"] < 0:
                steps = settings["steps"]
                raise TrainingError(f"client {self.id} was ordered to make {steps} steps")
        settings |= changes
        same = all(getattr(base, name, None) == value for name, value in settings.items())
        return base if same else replace(base, **settings)

    def steps(self) -> int:
        """The number of steps that this order's training takes."""
        schedule = self.schedule()
        batches = -(-len(self.train) // schedule.batch_size) * schedule.epochs
        return batches if schedule.steps is None else schedule.steps

    def aside(self, steps: int) -> Client:
        """A copy of this client that trains for ``steps`` steps and does not change its state."""
        told = {**self.told, "steps": steps}
        state = StagedState(self.state)
        return Client(self.id, self.train, self.val, state, self.round, self._context, told)

    def fit(
        self,
        start: Weights,
        objective: Objective | None = None,
        stream: str = "",
        part: Collection[str] | None = None,
        rows: Tensor | None = None,
        **changes: Any,
    ) -> Fit:
        """Train ``start``, or only this ``part`` of its layers, on this client's training data.

        With ``rows``, only these rows of the data are used. ``changes`` replace settings of the
        schedule. A second training in the same round needs its own ``stream``, so that it does not
        repeat the batches of the first.
        """
        schedule = self.schedule(**changes)
        if self.hidden:
            self._refuse_overshooting(objective, schedule.lr)
        order, dropout = (
            seed_for(self._context.seed, purpose, self.round, self.id, stream)
            for purpose in ("order", "dropout")
        )
        try:
            training = FitCall(
                start,
                self.train if rows is None else Split(self.train.x[rows], self.train.y[rows]),
                objective or erm(),
                schedule,
                order,
                dropout,
                None if part is None else start.layout.only(part),
            )
            trained = self._context.fit(training)
            self.samples += trained.samples
            self.trained += trained.samples
            return trained
        except TrainingError as error:
            raise type(error)(
                f"client {self.id}, round {self.round + 1}: {error}. Lower the learning rate "
                "(train.lr) or clip gradients (train.clip)"
            ) from error

    def _refuse_overshooting(self, objective: Objective | None, lr: float) -> None:
        """Refuse a pull by which each step counts more than the one before.

        In a secure sum, a client that makes more steps than the others would then be most of it.
        """
        strength = sum(penalty.strength for penalty in objective.penalties) if objective else 0.0
        if lr * strength > 1:
            raise TrainingError(
                f"client {self.id}: a pull of strength {strength:g} times train.lr = {lr:g} is "
                "more than 1, which clients of secure sums do not take"
            )

    def adapt(self, model: Weights, epochs: int) -> Weights:
        """Fine-tune a model for some epochs on this client's training data."""
        return self.fit(model, stream="adapt", epochs=epochs, steps=None).weights

    def loss(self, model: Weights, split: str = "train", rows: Tensor | None = None) -> float:
        """The mean loss of a model on this client's training or validation data, or rows of it."""
        data = self._split(split)
        if rows is not None:
            data = Split(data.x[rows], data.y[rows])
        self.samples += FORWARD * len(data)
        out = self._context.outputs(model, data.x)
        with torch.no_grad():
            return float(self._context.criterion(out, data.y))

    def losses(self, model: Weights, split: str = "val", most: int = 200) -> Tensor:
        """The losses of a model on single samples or, with many samples, on ``most`` blocks.

        Blocks have about the same size; if it is exactly the same, the mean of their losses is the
        loss. The losses are in float64.
        """
        data = self._split(split)
        self.samples += FORWARD * len(data)
        blocks = min(most, len(data))
        if not blocks:
            return torch.empty(0, dtype=torch.float64)
        out = self._context.outputs(model, data.x)
        pairs = zip(out.tensor_split(blocks), data.y.tensor_split(blocks), strict=True)
        with torch.no_grad():
            return torch.stack([self._context.criterion(o, y).double() for o, y in pairs])

    def gradient(self, model: Weights, rows: Tensor | None = None) -> Weights:
        """The gradient of the mean loss on this client's training data, or on these rows of it."""
        return self.slope(model, rows)[0]

    def slope(self, model: Weights, rows: Tensor | None = None) -> tuple[Weights, float]:
        """The same gradient and the mean loss, computed in one pass."""
        data = self.train if rows is None else Split(self.train.x[rows], self.train.y[rows])
        self.samples += len(data)
        return self._context.gradient(model, data)

    def shuffled(self, stream: str) -> Tensor:
        """The row numbers of this client's training data in a random order."""
        seed = seed_for(self._context.seed, "order", self.round, self.id, stream)
        return torch.randperm(len(self.train), generator=torch_generator(seed))

    def outputs(self, model: Weights, x: Tensor) -> Tensor:
        """The outputs of a model for the inputs ``x``."""
        self.samples += FORWARD * len(x)
        return self._context.outputs(model, x)

    def _split(self, name: str) -> Split:
        if name not in ("train", "val"):
            raise ConfigError(f"a task can use the splits 'train' and 'val', not '{name}'")
        return self.train if name == "train" else self.val


Task = Callable[[Client, Mapping[str, Any], Mapping[str, Scalar]], Upload]
