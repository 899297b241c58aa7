"""The reference engine: one client after another, in this process, on one thread."""

from __future__ import annotations

import time
from collections.abc import Sequence

from coterie.client.plan import Plan
from coterie.client.runtime import ClientRuntime
from coterie.core.engine import Answers, Request
from coterie.core.messages import ClientId
from coterie.engines.base import one_thread, units


class Loop:
    """Carries out every order in this process."""

    piggybacks = False

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._runtime = ClientRuntime(plan)
        self._train, self._held = plan.train_sizes, plan.held_sizes

    @property
    def clients(self) -> Sequence[ClientId]:
        """All clients of the population."""
        return range(len(self._plan.population.clients))

    def exchange(self, requests: Sequence[Request], until: float | None = None) -> Answers:
        """Carry these out one unit at a time."""
        for unit in units(requests, self._train, self._held, self._plan.training.batch_clients):
            if until is not None and time.monotonic() > until:
                yield from ((r.client, None) for r in unit)
                continue
            with one_thread():
                answers = self._runtime.answer([(r.client, r.message) for r in unit])
            yield from zip((r.client for r in unit), answers, strict=True)
        self._runtime.forget()

    def close(self) -> None:
        """Nothing was started."""
