"""New groups for clients that were absent when the groups changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import TypeVar

C = TypeVar("C", bound=Hashable)
G = TypeVar("G", bound=Hashable)


def with_most(before: Mapping[C, Hashable], after: Mapping[C, G]) -> dict[C, G]:
    """Add the clients missing from ``after`` to the group that most of their old group moved to.

    Ties go to the group whose first client comes first in ``before``. A client stays missing if
    no member of its old group is in ``after``.

    >>> with_most({0: "a", 1: "a", 2: "a", 3: "b"}, {0: "x", 1: "y"})
    {0: 'x', 1: 'y', 2: 'x'}
    """
    moves: dict[Hashable, Counter[G]] = {}
    for client, group in before.items():
        if client in after:
            moves.setdefault(group, Counter())[after[client]] += 1
    missing = {c: moves[g] for c, g in before.items() if c not in after and g in moves}
    return {**after, **{c: max(n, key=n.__getitem__) for c, n in missing.items()}}
