"""Leaves out or shortens updates that are far too long, before a method sees them.

The key ``run.outliers`` chooses which.

An update is judged by the length of the change that it makes. It is compared with those of the
clients that were sent the same arrays or, if these are too few, of all that ran the same task. The
direction is not judged: an update of ordinary length is accepted, whatever it does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from coterie.channel.exchange import Exchange, Stage, Terms
from coterie.channel.tasks import kind_of
from coterie.core import schema
from coterie.core.messages import Array, ClientId, Order, all_finite, vector_of
from coterie.core.weights import Weights
from coterie.errors import Diverged

OUTLIERS: tuple[str, ...] = get_args(schema.Outliers)
MOVES = 5.0  # median changes by which one client of median size may move a mean
APART = 10_000.0  # times the median length, where clients were sent different arrays
LEAST = 50.0  # times the median length: shorter updates are never left out
BOUND = 2.0  # times the median length: "clip" shortens updates to this
FEWEST = 3  # replies needed for a median

Orders = Mapping[ClientId, Order]
Counts = Mapping[ClientId, int]  # each client's number of samples
Arrays = Mapping[ClientId, Mapping[str, Array]]  # the arrays that each client sent, or was sent
Place = tuple[str, str]  # an array's name, and the part of it


@dataclass
class Outliers(Stage):
    """Takes updates out that are not finite or far longer than the others', or shortens them."""

    terms: Terms

    def inward(self, exchange: Exchange) -> None:
        """Judge the updates by each other."""
        terms, bodies = self.terms, exchange.bodies
        if exchange.diverged:
            self._leave_out_diverged(exchange)
        if terms.outliers == "off" or terms.alone:
            return
        orders, received = exchange.orders, exchange.received
        sent = {c: b["arrays"] for c, b in bodies.items() if kind_of(orders[c].task).trains}
        if terms.outliers == "clip":
            for client, arrays in shortened(orders, received, sent).items():
                bodies[client] = {**bodies[client], "arrays": arrays}
            return
        counts = {c: int(b["examples"]) for c, b in bodies.items()}
        found = too_long(orders, received, sent, counts)
        exchange.phase.rejected |= found
        exchange.left_out = {client: bodies.pop(client) for client in found}

    def _leave_out_diverged(self, exchange: Exchange) -> None:
        """Reject updates that are not finite; in a simulation, end where no client is to blame."""
        phase, diverged, faults = exchange.phase, exchange.diverged, {}
        if not self.terms.alone:
            faults = at_fault(exchange.orders, exchange.received, diverged, exchange.bodies)
        if phase.samples is None and faults:
            moment, first = phase.moment, min(faults)
            when = f"round {moment}" if moment else "before round 1"
            left = f", as round {moment - 1} left it" if moment > 1 else ""
            raise Diverged(
                f"{when}: the updates of {len(diverged)} of {len(exchange.bodies) + len(diverged)} "
                f"clients cannot be used: {without_name(diverged[first])}. No client is to blame "
                f"({faults[first]}): it is the model that they were sent{left}, or the settings"
            )
        alone = self.terms.outliers == "off" or len(phase.cohort) == 1
        if phase.samples is None and alone:
            raise Diverged(diverged[min(diverged)])
        for client, why in diverged.items():
            phase.rejected[client] = why
            if client in faults:
                blamed = f"{faults[client]}, so it is the model or the settings"
                phase.rejected[client] = f"{why}. It is not to blame: {blamed}"


def too_long(
    orders: Orders, received: Arrays, sent: Arrays, examples: Counts | None = None
) -> dict[ClientId, str]:
    """Clients whose updates are far longer than those of the others, and why.

    Without ``examples``, all clients are taken to have the same number of samples.
    """
    reasons: dict[ClientId, str] = {}
    for judged in lengths(orders, received, sent, examples or {}):
        times = judged.length.norm / judged.usual
        most = limit(judged.others, judged.share, judged.alike)
        if times > most and judged.client not in reasons:
            reasons[judged.client] = (
                f"its {_in_words(judged.place)} is a change of length {judged.length.norm:.3g}, "
                f"{times:.3g} times the median of {judged.others} clients; run.outliers leaves "
                f"out changes longer than {most:.3g} times the median"
            )
    return reasons


def limit(clients: int, share: float = 1.0, alike: bool = True) -> float:
    """The length, in multiples of the median, that a change of one of ``clients`` may have.

    A change N times as long as the median moves the mean of N clients by one median change; when
    training has converged, a client that differs from all others comes near that. A client with
    more samples than most (``share`` times the median) makes more steps, so its change may be
    longer by that factor. Changes of clients that were not sent the same arrays (not ``alike``)
    may differ widely, as with personal models; of these only absurd ones are left out.

    >>> limit(10), limit(100), limit(10, share=200)
    (50.0, 500.0, 10000.0)
    """
    return max(LEAST if alike else APART, MOVES * clients) * max(1.0, share)


def shortened(orders: Orders, received: Arrays, sent: Arrays) -> dict[ClientId, dict[str, Array]]:
    """The arrays of clients whose updates exceed the bound, scaled down to it."""
    scaled: dict[ClientId, dict[str, Array]] = {}
    for judged in lengths(orders, received, sent, {}):
        bound, name = BOUND * judged.usual, judged.place[0]
        if judged.length.norm > bound:
            arrays = scaled.setdefault(judged.client, dict(sent[judged.client]))
            arrays[name] = judged.length.scaled(arrays[name], bound / judged.length.norm)
    return scaled


def at_fault(
    orders: Orders, received: Arrays, diverged: Collection[ClientId], answered: Collection[ClientId]
) -> dict[ClientId, str]:
    """Clients that diverged because of the model or the settings, and the reasons.

    That is assumed if the model was not finite when it was sent, or if most clients with the same
    order diverged.
    """
    reasons: dict[ClientId, str] = {}
    for cohort, judged in _cohorts(orders, {*diverged, *answered}, 2):
        failed = [c for c in cohort if c in diverged]
        for client in judged:
            if client not in diverged:
                continue
            infinite = [n for n, array in received[client].items() if not finite(array)]
            if infinite:
                name = infinite[0]
                reasons[client] = f"the '{name}' that was sent to client {client} is not finite"
            elif 2 * len(failed) > len(cohort) > 1:
                reasons[client] = (
                    f"{len(failed)} of {len(cohort)} clients with the same order diverged"
                )
    return reasons


def without_name(why: str) -> str:
    """Remove the client and the round with which a reason begins.

    >>> without_name("client 3, round 12: 'model' is no longer finite")
    "'model' is no longer finite"
    """
    return re.sub(r"^client \d+, round \d+: ", "", why)


def finite(array: Array) -> bool:
    """Whether an array holds neither NaN nor infinite values."""
    return all_finite(vector_of(array))


# --- lengths ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Length:
    """The length of the change that a slice of an array makes, and the base it is a change of."""

    norm: float
    stretch: slice
    base: Tensor | None

    def scaled(self, array: Array, factor: float) -> Array:
        """The array, with the change of this slice scaled by a factor."""
        vector = vector_of(array).clone()
        part = vector[self.stretch].double()
        origin = torch.zeros_like(part) if self.base is None else self.base.double()
        vector[self.stretch] = (origin + (part - origin) * factor).to(vector.dtype)
        return Weights(array.layout, vector) if isinstance(array, Weights) else vector


@dataclass(frozen=True)
class Judged:
    """The length of a client's change of one array, compared with its cohort.

    ``usual`` is the median length of ``others`` clients' changes, ``share`` is the client's number
    of samples over their median, and ``alike`` says whether all were sent the same arrays.
    """

    client: ClientId
    place: Place
    length: _Length
    usual: float
    others: int
    share: float
    alike: bool = True


def lengths(orders: Orders, received: Arrays, sent: Arrays, examples: Counts) -> Iterator[Judged]:
    """The lengths of all clients' changes, each with the median of its cohort.

    Only the method knows whether an array is a model or already a change. It is treated as the one
    that makes the median of the cohort smaller, so that no single client can decide it.
    """
    kinds = [{c: _measured(sent[c], received[c], b) for c in sent} for b in (True, False)]
    for cohort, judged in _cohorts(orders, sent, FEWEST):
        alike = cohort is judged
        for place in dict.fromkeys(p for c in judged for p in kinds[1][c]):
            usual, chosen, count = math.inf, kinds[1], 0
            for kind in kinds:
                known = [kind[c][place].norm for c in cohort if place in kind[c]]
                if len(known) >= FEWEST and median(known) < usual:
                    usual, chosen, count = median(known), kind, len(known)
            for client in judged if 0 < usual < math.inf else ():
                if place in chosen[client]:
                    samples = [examples.get(c, 1) for c in cohort if place in chosen[c]]
                    share = examples.get(client, 1) / max(1.0, median(samples))
                    yield Judged(client, place, chosen[client][place], usual, count, share, alike)


def _measured(
    arrays: Mapping[str, Array], received: Mapping[str, Array], bases: bool
) -> dict[Place, _Length]:
    """The lengths of a client's arrays, or with ``bases`` of their differences to what it was sent.

    Covers models and parts of them, other arrays that have the name and shape of one that was sent,
    and a single number beside a model, by which the method may multiply or divide it; other numbers
    have no usual size. Differences are to the nearest array sent.
    """
    factors = any(isinstance(array, Weights) for array in arrays.values())
    measured: dict[Place, _Length] = {}
    for name, array in arrays.items():
        if isinstance(array, Weights):
            known = array.layout.spans.keys()
            models = [w for w in received.values() if isinstance(w, Weights)]
            near = [w.part(array.layout).vector for w in models if known <= w.layout.spans.keys()]
            cut = array.layout.trainable
            stretches = {"": slice(0, cut), "buffers": slice(cut, array.layout.size)}
        else:
            like = received.get(name)
            near = [like] if isinstance(like, Tensor) and like.shape == array.shape else []
            sized = bool(near) or (factors and array.numel() == 1)
            stretches = {"": slice(None)} if sized and array.is_floating_point() else {}
        for part, stretch in stretches.items():
            vector = vector_of(array)[stretch]
            if not vector.numel() or (bases and not near):
                continue
            options = [base[stretch] for base in near] if bases else [None]
            norms = [_norm(vector, base) for base in options]
            best = min(range(len(norms)), key=norms.__getitem__)
            measured[name, part] = _Length(norms[best], stretch, options[best])
    return measured


def _norm(vector: Tensor, base: Tensor | None) -> float:
    """The L2 norm, computed so that its bits do not depend on the number of threads."""
    values = vector.numpy().astype(np.float64)
    if base is not None:
        values -= base.numpy()
    return math.sqrt(float(np.square(values, out=values).sum()))


def _in_words(place: Place) -> str:
    name, part = place
    return f"'{name}' ({part})" if part else f"'{name}'"


def _cohorts(
    orders: Orders, clients: Collection[ClientId], least: int
) -> list[tuple[list[ClientId], list[ClientId]]]:
    """The cohorts to compare, each with those of its clients that the comparison judges.

    A cohort is all clients that were sent the same arrays for the same task. Clients of which there
    are fewer than ``least`` are compared with all that had the task.
    """
    same: dict[tuple[Any, ...], list[ClientId]] = {}
    task: dict[str, list[ClientId]] = {}
    for client in sorted(clients):
        order = orders[client]
        arrays = tuple((name, id(array)) for name, array in sorted(order.arrays.items()))
        same.setdefault((order.task, arrays), []).append(client)
        task.setdefault(order.task, []).append(client)
    cohorts = [(alike, alike) for alike in same.values() if len(alike) >= least]
    for name, clients_of_task in task.items():
        few = [c for key, a in same.items() if key[0] == name and len(a) < least for c in a]
        cohorts += [(clients_of_task, few)] if few else []
    return cohorts
