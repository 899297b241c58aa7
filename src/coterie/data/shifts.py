"""Shifts: hidden groups of clients whose inputs or labels are transformed differently.

A shift changes all of a client's data (train, validation and test), but never public data. A
client's group is its index modulo ``groups``, unless the partition has defined as many groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.data.partition_steps import check_positive, check_whole
from coterie.data.raw import Array
from coterie.errors import DataError
from coterie.registry import SHIFTS
from coterie.seeds import numpy_generator, seed_for


@dataclass(frozen=True)
class Scene:
    """What a shift depends on: the kind of data, the number of classes, the seed and the client."""

    kind: str
    classes: int | None
    seed: int
    client: int


@SHIFTS.register("rotation")
def rotation(x: Array, y: Array, group: int, scene: Scene, groups: int = 4) -> tuple[Array, Array]:
    """Rotate the images of group g anticlockwise by g * 360 / groups degrees.

    Multiples of 90 degrees are exact; others are interpolated, with black corners.

    >>> corner = np.array([[[[9, 0], [0, 0]]]], dtype=np.uint8)
    >>> rotation(corner, np.zeros(1), 1, Scene("image", 10, 0, 1))[0].tolist()
    [[[[0, 0], [9, 0]]]]
    """
    if scene.kind != "image":
        raise DataError(f"the shift 'rotation' is for images, but this is {scene.kind} data")
    if group == 0:
        return x, y
    quarters, remainder = divmod(4 * group, groups)
    if (remainder or quarters % 2) and x.shape[2] != x.shape[3]:
        raise DataError(
            f"the shift 'rotation' with groups = {groups} needs square images, but these "
            f"are {x.shape[2]}x{x.shape[3]}; use groups = 2 or resize them"
        )
    if remainder == 0:
        return np.rot90(x, quarters, axes=(2, 3)), y
    from scipy.ndimage import rotate

    return rotate(x, 360 * group / groups, axes=(3, 2), reshape=False, order=1), y


@SHIFTS.register("label-permutation")
def label_permutation(
    x: Array, y: Array, group: int, scene: Scene, groups: int = 4
) -> tuple[Array, Array]:
    """Permute the labels of each group differently; group 0 keeps the true labels."""
    if scene.classes is None:
        raise DataError(
            "the shift 'label-permutation' needs classes, but this is a regression data set"
        )
    return x, group_permutations(scene.classes, groups, scene.seed)[group][y]


def group_permutations(classes: int, groups: int, seed: int) -> list[Array]:
    """A different permutation of the labels for each group, the first one the identity.

    >>> [p.tolist() for p in group_permutations(2, 2, seed=0)]
    [[0, 1], [1, 0]]
    """
    # Twelve classes already have more permutations than there can be clients.
    if groups > math.factorial(min(classes, 12)):
        raise DataError(
            f"the shift 'label-permutation' with groups = {groups}: {classes} classes have only "
            f"{math.factorial(classes)} permutations; lower groups"
        )
    rng = numpy_generator(seed_for(seed, "shift", stream="label-permutation"))
    chosen = [np.arange(classes)]
    drawn = {tuple(range(classes))}
    while len(chosen) < groups:
        candidate = rng.permutation(classes)
        if tuple(candidate.tolist()) not in drawn:
            drawn.add(tuple(candidate.tolist()))
            chosen.append(candidate)
    return chosen


@SHIFTS.register("noise")
def noise(
    x: Array, y: Array, group: int, scene: Scene, groups: int = 4, level: float = 0.1
) -> tuple[Array, Array]:
    """Add Gaussian noise with standard deviation level * g to the features of group g.

    The unit is the range of pixels for uint8 images, which are clipped to it, and the unit of the
    data for floats: for a standardised table, one standard deviation of a feature.
    """
    if scene.kind == "text":
        raise DataError("the shift 'noise' is for images and tables, but this is text data")
    check_positive("level", level)
    if group == 0:
        return x, y
    rng = numpy_generator(seed_for(scene.seed, "shift", client=scene.client, stream="noise"))
    noise_values = rng.standard_normal(x.shape, dtype=np.float32) * np.float32(level * group)
    if x.dtype == np.uint8:
        return np.rint(x + 255 * noise_values).clip(0, 255).astype(np.uint8), y
    return x + noise_values, y


def shift_groups(
    name: str,
    params: Mapping[str, Any],
    clients: int,
    partition_groups: tuple[int, ...] | None,
) -> tuple[int, ...]:
    """Each client's group under a shift, given the groups of the partition, if any.

    >>> shift_groups("rotation", {"groups": 2}, 5, None)
    (0, 1, 0, 1, 0)
    """
    SHIFTS.checked(name, params)
    groups = params.get("groups", 4)
    check_whole("groups", groups, 1)
    if groups > clients:
        raise DataError(
            f"the shift '{name}' with groups = {groups} needs at least {groups} clients, but "
            f"there are {clients}: lower groups or raise clients"
        )
    if partition_groups is not None and len(set(partition_groups)) == groups:
        return partition_groups
    return tuple(client % groups for client in range(clients))
