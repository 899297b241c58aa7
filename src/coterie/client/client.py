"""All that a task may touch: one client's own data, its own state, and training."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from coterie.client.fit import Criterion, Fit, FlatModel, data_gradient, outputs
from coterie.client.objectives import Objective, erm
from coterie.client.stacked import FitCall
from coterie.client.together import Together
from coterie.core.messages import Array, ClientId, Scalar, Upload
from coterie.core.schema import Schedule
from coterie.core.weights import Weights
from coterie.data.population import Split
from coterie.errors import ConfigError, TrainingError
from coterie.seeds import seed_for, torch_generator

StateValue = Array | Scalar
FORWARD = 1 / 3  # of the work of a gradient: the backward pass takes about twice the forward's


class StagedState(MutableMapping[str, StateValue]):
    """A client's state as one task sees it: what it writes counts only once acknowledged."""

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
    """What every client on a machine trains with: the resident model and the run's settings."""

    model: FlatModel
    start: Weights
    criterion: Criterion
    schedule: Schedule
    seed: int
    equal: bool = False  # whether clients count equally, whatever their samples
    together: Together = field(init=False)  # where clients train, alone or several at once

    def __post_init__(self) -> None:
        object.__setattr__(self, "together", Together(self.model, self.criterion))


class Client:
    """One client while it carries out one order.

    ``base`` is the model that everybody starts from; ``state`` is what this client keeps between
    rounds and leaves it only if a task sends it; ``told`` is the order's config; ``samples`` counts
    those that it has gone through, a mere forward pass as a third, ``trained`` those of them that
    training took. Test data is out of reach of any task.
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
        """The model that everybody starts from, θ⁰."""
        return self._context.start

    @property
    def weight(self) -> int:
        """What this client counts in means by samples: as many, or 1 where all count equally."""
        return 1 if self._context.equal else len(self.train)

    def kept(self, name: str) -> Weights | None:
        """Weights that this client keeps under ``name``, if any."""
        value = self.state.get(name)
        return value if isinstance(value, Weights) else None

    def schedule(self, **changes: Any) -> Schedule:
        """This round's schedule: the run's, with the learning rate decayed, and ``changes``.

        An order may say in its config how many ``steps`` to make, in place of the run's.
        """
        base = self._context.schedule
        own: dict[str, Any] = {"lr": base.lr * base.lr_decay**self.round}
        if "steps" in self.told:
            own["steps"] = int(self.told["steps"])
            if own["steps"] < 0:
                raise TrainingError(f"client {self.id} was told to make {own['steps']} steps")
        return replace(base, **(own | changes))

    def steps(self) -> int:
        """How many steps this order's training takes."""
        now = self.schedule()
        batches = -(-len(self.train) // now.batch_size) * now.epochs
        return batches if now.steps is None else now.steps

    def aside(self, steps: int) -> Client:
        """This client for a training of so many steps that leaves nothing in its state."""
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

        With ``rows`` it is trained on these rows of the data only.
        ``changes`` replace settings of the schedule; a second training in the same round names a
        ``stream`` of its own, so that it does not repeat the first one's batches.
        """
        order, dropout = (
            seed_for(self._context.seed, purpose, self.round, self.id, stream)
            for purpose in ("order", "dropout")
        )
        try:
            trained = self._context.together.fit(
                FitCall(
                    start,
                    self.train if rows is None else Split(self.train.x[rows], self.train.y[rows]),
                    objective or erm(),
                    self.schedule(**changes),
                    order,
                    dropout,
                    None if part is None else start.layout.only(part),
                )
            )
            self.samples += trained.samples
            self.trained += trained.samples
            return trained
        except TrainingError as error:
            raise type(error)(
                f"client {self.id}, round {self.round + 1}: {error}. Lower the learning rate "
                "(train.lr) or clip gradients (train.clip)"
            ) from error

    def adapt(self, model: Weights, epochs: int) -> Weights:
        """A model after so many epochs on this client's training data, kept by nobody."""
        return self.fit(model, stream="adapt", epochs=epochs, steps=None).weights

    def loss(self, model: Weights, split: str = "train", rows: Tensor | None = None) -> float:
        """The mean loss of a model on this client's training or validation data, or rows of it."""
        data = self._split(split)
        if rows is not None:
            data = Split(data.x[rows], data.y[rows])
        self.samples += FORWARD * len(data)
        out = outputs(self._context.model, model, data.x)
        with torch.no_grad():
            return float(self._context.criterion(out, data.y))

    def losses(self, model: Weights, split: str = "val", most: int = 200) -> Tensor:
        """The losses of a model on single samples, or on at most ``most`` blocks of about one size.

        They come in float64; the mean of blocks of one size is the loss.
        """
        data = self._split(split)
        self.samples += FORWARD * len(data)
        blocks = min(most, len(data))
        if not blocks:
            return torch.empty(0, dtype=torch.float64)
        out = outputs(self._context.model, model, data.x)
        pairs = zip(out.tensor_split(blocks), data.y.tensor_split(blocks), strict=True)
        with torch.no_grad():
            return torch.stack([self._context.criterion(o, y).double() for o, y in pairs])

    def gradient(self, model: Weights, rows: Tensor | None = None) -> Weights:
        """The gradient of the mean training loss over this client's data, or these rows of it."""
        return self.slope(model, rows)[0]

    def slope(self, model: Weights, rows: Tensor | None = None) -> tuple[Weights, float]:
        """The gradient and the loss itself, in one pass."""
        data = self.train if rows is None else Split(self.train.x[rows], self.train.y[rows])
        self.samples += len(data)
        return data_gradient(self._context.model, model, data, self._context.criterion)

    def shuffled(self, stream: str) -> Tensor:
        """The rows of this client's training data in a random order of its own."""
        seed = seed_for(self._context.seed, "order", self.round, self.id, stream)
        return torch.randperm(len(self.train), generator=torch_generator(seed))

    def outputs(self, model: Weights, x: Tensor) -> Tensor:
        """What a model answers to ``x``."""
        self.samples += FORWARD * len(x)
        return outputs(self._context.model, model, x)

    def _split(self, name: str) -> Split:
        if name not in ("train", "val"):
            raise ConfigError(f"a task may use 'train' or 'val', not '{name}'")
        return self.train if name == "train" else self.val


Task = Callable[[Client, Mapping[str, Any], Mapping[str, Scalar]], Upload]
