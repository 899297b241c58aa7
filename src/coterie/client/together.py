"""Several clients at once: tasks pause where they train, and paused trainings share a stack.

Tasks are written for one client and stay so. Each runs in a greenlet of its own, which hands
control back when its client trains; once all tasks wait, trainings of one kind are stacked and
each task goes on with its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from greenlet import getcurrent, greenlet

from coterie.client.fit import Criterion, Fit, FlatModel
from coterie.client.stacked import FitCall, fit_alone, fit_stack

Result = TypeVar("Result")


@dataclass
class Together:
    """Runs tasks side by side on one resident model."""

    model: FlatModel
    criterion: Criterion
    _runner: greenlet | None = field(default=None, init=False)

    def run(self, tasks: Sequence[Callable[[], Result]]) -> list[Result]:
        """The results of all tasks. An exception that leaves a task ends them all."""
        self._runner = getcurrent()
        workers = [greenlet(task) for task in tasks]
        results: dict[int, Result] = {}
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
        """Train now, or, in a task that runs beside others, together with theirs."""
        if self._runner is None or getcurrent() is self._runner or not training.stackable:
            return fit_alone(self.model, training, self.criterion)
        # What a task may have set for its own torch calls must not reach other tasks.
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
        """A task has ended, or waits for a training."""
        torch.set_grad_enabled(True)
        if worker.dead:
            results[number] = answer
        else:
            waiting[number] = answer

    def _train(self, waiting: dict[int, FitCall]) -> dict[int, Fit | Exception]:
        """Train all that wait, those of one kind as one stack."""
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
            return [fit_alone(self.model, trainings[0], self.criterion)]
        except Exception as error:  # it belongs to the task that asked for the training
            return [error]
