"""Runs the tasks of several clients side by side, so that their trainings can be stacked.

Tasks are written for one client. Each runs in its own greenlet, which is paused when its client
trains or evaluates a model; once all tasks are paused, the calls of the same kind are carried out
as one stack, and each task continues with its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor

from coterie.client.fit import Criterion, Fit, FitCall, FlatModel, data_gradient, fit, outputs
from coterie.client.stacked import fit_stack, gradients_stack, kind_of, outputs_stack, stackable
from coterie.client.stacked_layers import StackedModel
from coterie.core.weights import Weights
from coterie.data.population import Split

TaskResult = TypeVar("TaskResult")


@dataclass(frozen=True)
class OutputsCall:
    """A client asks for the outputs of a model."""

    model: Weights
    x: Tensor


@dataclass(frozen=True)
class GradientCall:
    """A client asks for the gradient of a model on its data."""

    model: Weights
    data: Split


Call = FitCall | OutputsCall | GradientCall


@dataclass
class Together:
    """Runs several clients' tasks side by side, using one model for all of them."""

    model: FlatModel
    criterion: Criterion
    _runner: greenlet | None = field(default=None, init=False)

    @cached_property
    def stack(self) -> StackedModel:
        """The same model, stacked."""
        return StackedModel(self.model)

    def run(self, tasks: Sequence[Callable[[], TaskResult]]) -> list[TaskResult]:
        """Run all tasks and return their results; an exception in a task ends them all."""
        if len(tasks) == 1 or self._runner is not None:
            return [task() for task in tasks]
        self._runner = getcurrent()
        workers = [greenlet(task) for task in tasks]
        results: dict[int, TaskResult] = {}
        waiting: dict[int, Call] = {}
        try:
            for number, worker in enumerate(workers):
                self._note(number, worker, worker.switch(), results, waiting)
            while waiting:
                answers = self._carry_out(waiting)
                waiting = {}
                for number, answer in answers.items():
                    answer = workers[number].switch(answer)
                    self._note(number, workers[number], answer, results, waiting)
        finally:
            self._runner = None
        return [results[number] for number in range(len(tasks))]

    def fit(self, training: FitCall) -> Fit:
        """Train now or, in a task that runs beside others, once they all wait."""
        if self._alone() or not stackable(self.model, training):
            return fit(self.model, training, self.criterion)
        trained: Fit = self._pause(training)
        return trained

    def outputs(self, model: Weights, x: Tensor) -> Tensor:
        """A model's outputs on ``x`` in evaluation mode, on the CPU."""
        if self._alone() or not len(x):
            return outputs(self.model, model, x)
        out: Tensor = self._pause(OutputsCall(model, x))
        return out

    def gradient(self, model: Weights, data: Split) -> tuple[Weights, float]:
        """The gradient of the mean loss over all of ``data``, and that loss."""
        if self._alone() or not len(data):
            return data_gradient(self.model, model, data, self.criterion)
        slope: tuple[Weights, float] = self._pause(GradientCall(model, data))
        return slope

    def _alone(self) -> bool:
        """Whether the caller is no task that runs beside others."""
        return self._runner is None or getcurrent() is self._runner

    def _pause(self, call: Call) -> Any:
        """Wait until all tasks wait, and return what the call asks for."""
        assert self._runner is not None
        # Torch's settings are global: restore what this task may have changed for itself.
        grad, random = torch.is_grad_enabled(), torch.get_rng_state()
        answer = self._runner.switch(call)
        torch.set_grad_enabled(grad)
        torch.set_rng_state(random)
        if isinstance(answer, Exception):
            raise answer
        return answer

    @staticmethod
    def _note(
        number: int,
        worker: greenlet,
        answer: Any,
        results: dict[int, Any],
        waiting: dict[int, Call],
    ) -> None:
        """Record that a task has ended with a result, or waits for an answer."""
        torch.set_grad_enabled(True)
        if worker.dead:
            results[number] = answer
        else:
            waiting[number] = answer

    def _carry_out(self, waiting: dict[int, Call]) -> dict[int, Any]:
        """Carry out all calls that tasks wait for, those of the same kind together."""
        kinds: dict[tuple[object, ...], list[int]] = {}
        for number, call in waiting.items():
            kinds.setdefault(self._kind(call), []).append(number)
        answers: dict[int, Any] = {}
        for numbers in kinds.values():
            calls = [waiting[number] for number in numbers]
            answers |= dict(zip(numbers, self._answers(calls), strict=True))
        return {number: answers[number] for number in waiting}

    def _kind(self, call: Call) -> tuple[object, ...]:
        """What calls have in common that are carried out together."""
        if isinstance(call, FitCall):
            return (FitCall, *kind_of(self.model, call))
        x = call.x if isinstance(call, OutputsCall) else call.data.x
        return type(call), x.shape[1:], x.dtype

    def _answers(self, calls: Sequence[Any]) -> Sequence[Any]:
        """The answers to calls of one kind; an exception is to be raised in the task that asked."""
        first = calls[0]
        try:
            if isinstance(first, OutputsCall):
                return outputs_of(self.model, calls, self.stack)
            if len(calls) > 1 and isinstance(first, FitCall):
                return fit_stack(self.stack, calls, self.criterion)
            if len(calls) > 1:
                models, data = [c.model for c in calls], [c.data for c in calls]
                return gradients_stack(self.stack, models, data, self.criterion)
            if isinstance(first, FitCall):
                return [fit(self.model, first, self.criterion)]
            return [data_gradient(self.model, first.model, first.data, self.criterion)]
        except Exception as error:
            return [error] * len(calls)


def outputs_of(
    model: FlatModel, calls: Sequence[OutputsCall], stack: StackedModel | None
) -> list[Tensor]:
    """The outputs of several models; one that several clients use takes one pass over their data.

    Different models are computed as one ``stack``, if there is one.
    """
    by_model: dict[int, list[int]] = {}
    for number, call in enumerate(calls):
        by_model.setdefault(call.model.vector.data_ptr(), []).append(number)
    rows = list(by_model.values())
    models = [calls[numbers[0]].model for numbers in rows]
    inputs = [torch.cat([calls[n].x for n in numbers]) for numbers in rows]
    if len(rows) == 1 or stack is None:
        outs = [outputs(model, m, x) for m, x in zip(models, inputs, strict=True)]
    else:
        outs = outputs_stack(stack, models, inputs)
    results: dict[int, Tensor] = {}
    for numbers, out in zip(rows, outs, strict=True):
        pieces = torch.split(out, [len(calls[n].x) for n in numbers])
        results |= dict(zip(numbers, pieces, strict=True))
    return [results[number] for number in range(len(calls))]
