"""Numbers that follow groups through the rounds, whatever a method calls them in each round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from coterie.errors import ConfigError
from coterie.report.figures.style import Event

GroupCodes = Sequence[int | None]


def steps_of_groups(events: Sequence[Event]) -> list[Event]:
    """The events that have the clients' groups, in order; the last one of a round that has two.

    Admissions are not among them: they only have the groups of newcomers.
    """
    steps = [e for e in events if e.get("event") not in ("admission", "arrival", "scores")]
    steps = [e for e in steps if any(g is not None for g in e.get("groups") or ())]
    if not steps:
        raise ConfigError(
            "no event has the clients' groups: give the lines of a run's events.jsonl"
        )
    by_round = {e["round"]: e for e in steps}
    return [by_round[number] for number in sorted(by_round)]


def names_of_groups(steps: Sequence[Event]) -> list[list[Any]]:
    """Each step's groups in client order, all equally long; None before a client came."""
    members = max(len(e["groups"]) for e in steps)
    return [[*e["groups"], *[None] * (members - len(e["groups"]))] for e in steps]


def followed(names: Sequence[Sequence[Any]]) -> list[list[int | None]]:
    """Each round's groups by lasting numbers: a number stays with most of its group's members.

    Lists may grow from round to round; clients that come later have no group before.

    >>> followed([["a", "a", "a", "b"], ["x", "x", "y", "z"]])
    [[0, 0, 0, 1], [0, 0, 2, 1]]
    """
    columns: list[list[int | None]] = []
    fresh = 0
    for place, column in enumerate(names):
        if place and column == names[place - 1]:
            columns.append(list(columns[-1]))  # in most rounds no client moves
            continue
        groups = [g for g in dict.fromkeys(column) if g is not None]
        before = columns[-1] if columns else []
        shared = Counter(
            (g, old)
            for g, old in zip(column, before, strict=False)
            if g is not None and old is not None
        )
        number: dict[Any, int] = {}
        taken: set[int] = set()
        for (g, old), _ in sorted(shared.items(), key=lambda item: (-item[1], item[0][1])):
            if g not in number and old not in taken:
                number[g] = old
                taken.add(old)
        for g in groups:
            if g not in number:
                number[g], fresh = fresh, fresh + 1
        columns.append([None if g is None else number[g] for g in column])
    return columns


def in_order(kept: Sequence[GroupCodes]) -> list[int]:
    """An order of clients by last group, and by all earlier groups where groups only split."""
    past = [[-1 if g is None else g for g in history] for history in zip(*kept, strict=True)]
    nested = all(
        len(set(zip(a, b, strict=True))) == len(set(b)) for a, b in pairwise(map(tuple, kept))
    )
    return sorted(range(len(past)), key=lambda c: (past[c] if nested else past[c][::-1], c))


def codes_of(kept: Sequence[GroupCodes]) -> tuple[list[list[int | None]], list[int]]:
    """Each cell's colour, 0 for a client alone, and the groups that ever had two members."""
    sizes = [Counter(column) for column in kept]
    several = [
        g
        for column, n in zip(kept, sizes, strict=True)
        for g in column
        if g is not None and n[g] > 1
    ]
    lasting = list(dict.fromkeys(several))
    code = {g: i + 1 for i, g in enumerate(lasting)}
    codes = [
        [None if g is None else code[g] if n[g] > 1 else 0 for g in column]
        for column, n in zip(kept, sizes, strict=True)
    ]
    return codes, lasting


def last_numbers(events: Sequence[Event]) -> list[int | None]:
    """The lasting number of each client's last group, which decides its colour in pictures.

    It is None for a client that is alone or has no group.

    >>> last_numbers([{"round": 1, "groups": ["a", "b", "b"]}, {"round": 2, "groups": list("xyy")}])
    [None, 0, 0]
    """
    codes, _ = codes_of(followed(names_of_groups(steps_of_groups(events))))
    return [code - 1 if code else None for code in codes[-1]]


def sizes(groups: Sequence[Any]) -> list[int]:
    """The number of members of each group."""
    return list(Counter(g for g in groups if g is not None).values())
