"""Runs the tasks of several clients side by side, so that their trainings can be stacked.

Tasks are written for one client. Each runs in its own greenlet, which is paused when its client
trains; once all tasks are paused, the trainings of the same kind are run as one stack, and each
task continues with its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from greenlet import getcurrent, greenlet

from coterie.client.fit import Criterion, Fit, FitCall, FlatModel, fit
from coterie.client.stacked import fit_stack

TaskResult = TypeVar("TaskResult")


@dataclass
class Together:
    """Runs several clients' tasks side by side, using one model for all trainings."""

    model: FlatModel
    criterion: Criterion
    _runner: greenlet | None = field(default=None, init=False)

    def run(self, tasks: Sequence[Callable[[], TaskResult]]) -> list[TaskResult]:
        """Run all tasks and return their results; an exception in a task ends them all."""
        self._runner = getcurrent()
        workers = [greenlet(task) for task in tasks]
        results: dict[int, TaskResult] = {}
        waiting: dict[int, FitCall] = {}
        try:
            for number, worker in enumerate(workers):
                self._note(number, worker, worker.switch(), results, waiting)
            while waiting:
                trained = self._train(waiting)
                waiting = {}
                for number, result in trained.items():
                    answer = workers[number].switch(result)
                    self._note(number, workers[number], answer, results, waiting)
        finally:
            self._runner = None
        return [results[number] for number in range(len(tasks))]

    def fit(self, training: FitCall) -> Fit:
        """Train now or, in a task that runs next to others, when they are all paused to train."""
        if self._runner is None or getcurrent() is self._runner or not training.stackable:
            return fit(self.model, training, self.criterion)
        # Torch's settings are global: restore what this task may have changed for itself.
        grad, random = torch.is_grad_enabled(), torch.get_rng_state()
        result: Fit | Exception = self._runner.switch(training)
        torch.set_grad_enabled(grad)
        torch.set_rng_state(random)
        if isinstance(result, Exception):
            raise result
        return result

    @staticmethod
    def _note(
        number: int,
        worker: greenlet,
        answer: Any,
        results: dict[int, Any],
        waiting: dict[int, FitCall],
    ) -> None:
        """Record that a task has ended with a result, or waits for a training."""
        torch.set_grad_enabled(True)
        if worker.dead:
            results[number] = answer
        else:
            waiting[number] = answer

    def _train(self, waiting: dict[int, FitCall]) -> dict[int, Fit | Exception]:
        """Run all trainings that tasks wait for, those of the same kind as one stack."""
        kinds: dict[tuple[object, ...], list[int]] = {}
        for number, training in waiting.items():
            kinds.setdefault(training.kind, []).append(number)
        results: dict[int, Fit | Exception] = {}
        for numbers in kinds.values():
            trainings = [waiting[number] for number in numbers]
            results |= dict(zip(numbers, self._stacked(trainings), strict=True))
        return {number: results[number] for number in waiting}

    def _stacked(self, trainings: Sequence[FitCall]) -> Sequence[Fit | Exception]:
        if len(trainings) > 1:
            return fit_stack(self.model, trainings, self.criterion)
        try:
            return [fit(self.model, trainings[0], self.criterion)]
        except Exception as error:  # to be raised in the task that requested the training
            return [error]
