"""Tables as papers print them, read from text; figures are in per cent, as printed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Numbers = dict[str, dict[str, tuple[float, float | None]]]
Costs = dict[str, tuple[float, dict[str, float | None]]]
DATA = {
    "cifar10": "cifar-10",
    "cifar100": "cifar-100",
    "fmnist": "fashion-mnist",
    "svhn": "svhn",
}
TITLES = {
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "fmnist": "Fashion-MNIST",
    "svhn": "SVHN",
}
SPLITS = {"test_fraction": 0.2, "val_fraction": 0.1}


def read(table: str) -> Numbers:
    """A table as text, the columns' names first: (figure, spread) by column and method.

    A method's parameters follow it after colons; a dash is an empty cell.

    >>> read('''
    ...          cifar10     svhn
    ... ifca:k=2 87.19±0.19  -
    ... ''')
    {'cifar10': {'ifca k=2': (0.8719, 0.0019)}, 'svhn': {}}
    """
    head, *rows = [line.split() for line in table.strip().splitlines()]
    found: Numbers = {column: {} for column in head}
    for method, *cells in rows:
        for column, cell in zip(head, cells, strict=True):
            if cell != "-":
                value, _, spread = cell.partition("±")
                pair = (_share(value), _share(spread) if spread else None)
                found[column][method.replace(":", " ")] = pair
    return found


def _share(text: str) -> float:
    return round(float(text) / 100, 6)


def read_costs(table: str) -> Costs:
    """A table of what it took to reach a target, by column and method; a dash is None: never.

    The first row has the targets in per cent, under "target".

    >>> read_costs('''
    ...        cifar10 svhn
    ... target 80      75
    ... cfl    -       47
    ... ''')["cifar10"]
    (0.8, {'cfl': None})
    """
    head, targets, *rows = [line.split() for line in table.strip().splitlines()]
    found: Costs = {}
    for place, column in enumerate(head, 1):
        cells = {row[0]: None if row[place] == "-" else float(row[place]) for row in rows}
        found[column] = _share(targets[place]), cells
    return found


def figures_of(cells: Mapping[str, tuple[float, float | None]]) -> dict[str, Any]:
    """A column as the two fields of a scenario."""
    return {
        "figures": {method: value for method, (value, _) in cells.items()},
        "spread": {m: spread for m, (_, spread) in cells.items() if spread is not None},
    }
