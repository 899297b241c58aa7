"""Whether weighted sums, put together, would single out a few clients.

Sums over clients {1, 2, 3} and {1, 2, 3, 4} of the same vectors give away client 4: their
difference is its vector alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

MOST = 20_000  # combinations looked at; beyond that the answer is "maybe", which counts as yes


def isolated(rows: Sequence[Mapping[Any, float]], below: int) -> set[Any] | None:
    """Fewer than ``below`` whom some combination of these weight rows leaves alone; None if none.

    Columns in proportion vanish together, so they are looked at as one. A set of columns can be
    left alone if the rows have a lower rank without them.

    >>> isolated([{1: 1, 2: 1, 3: 1}, {1: 1, 2: 1, 3: 1, 4: 1}], below=2)
    {4}
    >>> isolated([{1: 1, 2: 1, 3: 1}, {4: 1, 5: 1, 6: 1}], below=3) is None
    True
    """
    people = sorted({c for row in rows for c, w in row.items() if w}, key=str)
    if not people:
        return None
    matrix = np.array([[float(row.get(c, 0.0)) for c in people] for row in rows])
    classes: dict[tuple[float, ...], list[int]] = {}
    for place in range(len(people)):
        column = matrix[:, place]
        leading = column[np.flatnonzero(column)[0]]
        classes.setdefault(tuple(np.round(column / leading, 9)), []).append(place)
    whole = np.array(list(classes))  # one column of each class, as rows
    members = list(classes.values())
    rank = np.linalg.matrix_rank(whole)
    small = [i for i, places in enumerate(members) if len(places) < below]
    looked = 0
    for count in range(1, below):
        for chosen in combinations(small, count):
            places = [p for i in chosen for p in members[i]]
            if len(places) >= below:
                continue
            looked += 1
            rest = np.delete(whole, chosen, axis=0)
            if not len(rest) or np.linalg.matrix_rank(rest) < rank or looked > MOST:
                return {people[p] for p in places}
    return None
