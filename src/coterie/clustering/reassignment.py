"""Where clients go when their groups change without them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import TypeVar

C = TypeVar("C", bound=Hashable)
G = TypeVar("G", bound=Hashable)


def with_most(before: Mapping[C, Hashable], after: Mapping[C, G]) -> dict[C, G]:
    """The new groups, with everybody who is missing from them where most of its old group went.

    Of equally many, those whose first client comes first. Who is the last of an old group of which
    nobody is left stays missing.

    >>> with_most({0: "a", 1: "a", 2: "a", 3: "b"}, {0: "x", 1: "y"})
    {0: 'x', 1: 'y', 2: 'x'}
    """
    went: dict[Hashable, Counter[G]] = {}
    for client, old in before.items():
        if client in after:
            went.setdefault(old, Counter())[after[client]] += 1
    missing = {c: went[old] for c, old in before.items() if c not in after and old in went}
    return {**after, **{c: max(n, key=n.__getitem__) for c, n in missing.items()}}
