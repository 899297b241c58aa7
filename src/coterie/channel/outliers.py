"""Updates that are left out, or shortened, before a method sees them: ``run.outliers``.

An update is judged by the change that it makes. Clients that were sent the very same arrays are
compared with each other; where these are too few, all who carried out the same task are. A length
says nothing about a direction: an update of ordinary length is taken, whatever it does.
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

from coterie.core.messages import Array, ClientId, Order, vector_of
from coterie.core.schema import Outliers
from coterie.core.weights import Weights

OUTLIERS: tuple[str, ...] = get_args(Outliers)
MOVES = 5.0  # ordinary changes by which one client of ordinary size may move a mean
APART = 10_000.0  # times the median length of clients that were sent other arrays
LEAST = 50.0  # times the median length: nothing below is left out, however few clients there are
BOUND = 2.0  # times the median length: "clip" shortens to this
FEWEST = 3  # replies that a median says anything of

Orders = Mapping[ClientId, Order]
Counts = Mapping[ClientId, int]  # how many samples each client has
Arrays = Mapping[ClientId, Mapping[str, Array]]  # of each client: what it sent, or was sent
Place = tuple[str, str]  # an array's name, and which part of it


def too_long(
    orders: Orders, received: Arrays, sent: Arrays, examples: Counts | None = None
) -> dict[ClientId, str]:
    """Those whose updates are far longer than the others', and why.

    Without ``examples`` all clients have as many.
    """
    found: dict[ClientId, str] = {}
    for judged in lengths(orders, received, sent, examples or {}):
        times = judged.length.norm / judged.usual
        most = limit(judged.others, judged.share, judged.alike)
        if times > most and judged.client not in found:
            found[judged.client] = (
                f"its {_called(judged.place)} is a change of length {judged.length.norm:.3g}, "
                f"{times:.3g} times the median of {judged.others} clients; run.outliers leaves "
                f"out what is longer than {most:.3g} times"
            )
    return found


def limit(clients: int, share: float = 1.0, alike: bool = True) -> float:
    """How many times the median length of so many clients' changes one of them may have.

    A change of N times the median moves the mean of N clients by one ordinary change; where
    training stands still, a client that differs from all others comes near that. A client with
    more samples than most (``share``, over the median) makes more steps, and its change may be
    longer by as much. Clients that were not sent the same arrays (not ``alike``) may be anywhere,
    as where each keeps a model of its own: of these only what is absurd is left out.

    >>> limit(10), limit(100), limit(10, share=200)
    (50.0, 500.0, 10000.0)
    """
    return max(LEAST if alike else APART, MOVES * clients) * max(1.0, share)


def shortened(orders: Orders, received: Arrays, sent: Arrays) -> dict[ClientId, dict[str, Array]]:
    """The arrays of those whose updates are longer than a bound, scaled down to it."""
    found: dict[ClientId, dict[str, Array]] = {}
    for judged in lengths(orders, received, sent, {}):
        bound, name = BOUND * judged.usual, judged.place[0]
        if judged.length.norm > bound:
            arrays = found.setdefault(judged.client, dict(sent[judged.client]))
            arrays[name] = judged.length.scaled(arrays[name], bound / judged.length.norm)
    return found


def at_fault(
    orders: Orders, received: Arrays, diverged: Collection[ClientId], answered: Collection[ClientId]
) -> dict[ClientId, str]:
    """Of those whose updates are not finite, the ones that the model or the settings led there.

    That is so if the model was not finite when it was sent, or if most of those who were sent it
    ended like that.
    """
    found: dict[ClientId, str] = {}
    for cohort, judged in _cohorts(orders, {*diverged, *answered}, 2):
        ended = [c for c in cohort if c in diverged]
        for client in judged:
            if client not in diverged:
                continue
            spoiled = [n for n, array in received[client].items() if not finite(array)]
            if spoiled:
                found[client] = f"the '{spoiled[0]}' that was sent to client {client} is not finite"
            elif 2 * len(ended) > len(cohort) > 1:
                found[client] = f"{len(ended)} of {len(cohort)} clients with one order ended so"
    return found


def without_name(why: str) -> str:
    """A reason without the client and round that it begins with.

    >>> without_name("client 3, round 12: 'model' is no longer finite")
    "'model' is no longer finite"
    """
    return re.sub(r"^client \d+, round \d+: ", "", why)


def finite(array: Array) -> bool:
    """Whether an array holds neither NaN nor infinity."""
    vector = vector_of(array)
    return not vector.is_floating_point() or bool(torch.isfinite(vector).all())


# --- lengths ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Length:
    """How long the change is that a stretch of an array makes, and what it is a change of."""

    norm: float
    stretch: slice
    base: Tensor | None

    def scaled(self, array: Array, factor: float) -> Array:
        """The array with this stretch of it changed by so much less."""
        vector = vector_of(array).clone()
        part = vector[self.stretch].double()
        origin = torch.zeros_like(part) if self.base is None else self.base.double()
        vector[self.stretch] = (origin + (part - origin) * factor).to(vector.dtype)
        return Weights(array.layout, vector) if isinstance(array, Weights) else vector


@dataclass(frozen=True)
class Judged:
    """A client's change of one array, beside those of its cohort.

    ``usual`` is the median length of ``others`` clients' changes, ``share`` how many samples the
    client has over their median, ``alike`` whether all were sent the same arrays.
    """

    client: ClientId
    place: Place
    length: _Length
    usual: float
    others: int
    share: float
    alike: bool = True


def lengths(orders: Orders, received: Arrays, sent: Arrays, examples: Counts) -> Iterator[Judged]:
    """Every client's lengths, each with the median of its cohort's and how many these are.

    Whether an array is a model or a change by itself is for its method to know. It is taken for
    what makes the cohort's median smaller, so no client can choose it for its own.
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
                    here = [examples.get(c, 1) for c in cohort if place in chosen[c]]
                    share = examples.get(client, 1) / max(1.0, median(here))
                    yield Judged(client, place, chosen[client][place], usual, count, share, alike)


def _measured(
    arrays: Mapping[str, Array], received: Mapping[str, Array], bases: bool
) -> dict[Place, _Length]:
    """The lengths of what a client sent: by themselves, or from the nearest array it was sent.

    Judged are models and parts of them, what else came under the same name and in the same shape,
    and a single number beside a model, by which its method may multiply or divide it; other numbers
    have no usual size.
    """
    factors = any(isinstance(array, Weights) for array in arrays.values())
    found: dict[Place, _Length] = {}
    for name, array in arrays.items():
        if isinstance(array, Weights):
            known = array.layout.spans.keys()
            wholes = [w for w in received.values() if isinstance(w, Weights)]
            near = [w.part(array.layout).vector for w in wholes if known <= w.layout.spans.keys()]
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
            found[name, part] = _Length(norms[best], stretch, options[best])
    return found


def _norm(vector: Tensor, base: Tensor | None) -> float:
    """The L2 norm, the same to the bit however many threads there are."""
    values = vector.numpy().astype(np.float64)
    if base is not None:
        values -= base.numpy()
    return math.sqrt(float(np.square(values, out=values).sum()))


def _called(place: Place) -> str:
    name, part = place
    return f"'{name}' ({part})" if part else f"'{name}'"


def _cohorts(
    orders: Orders, clients: Collection[ClientId], least: int
) -> list[tuple[list[ClientId], list[ClientId]]]:
    """Whom to compare with each other, and which of these that decides about.

    These are all who were sent the very same arrays for the same task; of fewer than ``least``,
    all who had the task.
    """
    same: dict[tuple[Any, ...], list[ClientId]] = {}
    task: dict[str, list[ClientId]] = {}
    for client in sorted(clients):
        order = orders[client]
        arrays = tuple((name, id(array)) for name, array in sorted(order.arrays.items()))
        same.setdefault((order.task, arrays), []).append(client)
        task.setdefault(order.task, []).append(client)
    found = [(alike, alike) for alike in same.values() if len(alike) >= least]
    for name, everybody in task.items():
        few = [c for key, a in same.items() if key[0] == name and len(a) < least for c in a]
        found += [(everybody, few)] if few else []
    return found
