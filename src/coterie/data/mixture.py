"""Synthetic data: samples from a mixture of Gaussians."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from coterie.data.partition_steps import check_positive, check_whole
from coterie.data.raw import Array, RawData
from coterie.registry import SETS


def spread_means(
    random: np.random.Generator, components: int, dimensions: int, separation: float
) -> Array:
    """Random means, scaled such that the closest two are ``separation`` apart."""
    from scipy.spatial.distance import pdist

    means = random.standard_normal((components, dimensions))
    means *= separation / pdist(means).min()
    return means


@SETS.register("mixture")
def mixture(
    folder: Path | None = None,
    components: int = 16,
    dimensions: int = 100,
    separation: float = 10.0,
    samples: int = 12_000,
    seed: int = 0,
) -> RawData:
    """Samples from a mixture of Gaussians with standard deviation 1, one per class; no file needed.

    The closest two means are ``separation`` apart; components have about equal numbers of samples.

    >>> raw = mixture(components=3, dimensions=2, samples=7)
    >>> raw.x.shape, raw.y.tolist()
    ((7, 2), [0, 1, 2, 0, 1, 2, 0])
    """
    for name, value, least in (("components", components, 2), ("dimensions", dimensions, 1)):
        check_whole(name, value, least)
    check_whole("samples", samples, components)
    check_whole("seed", seed, 0)
    check_positive("separation", separation)
    random = np.random.default_rng(seed)
    means = spread_means(random, components, dimensions, separation)
    y = np.arange(samples, dtype=np.int64) % components
    x = means[y] + random.standard_normal((samples, dimensions))
    return RawData(x.astype(np.float32), y, "table", tuple(str(c) for c in range(components)))
