"""West's own loader: ``coterie join --data-loader records:load --data west.jsonl``."""

import json
from pathlib import Path

import numpy as np

FEATURES = ("age", "temperature", "pulse", "saturation", "breaths")


def load(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Samples and labels. Coterie does not standardise what a loader returns, so do it here."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    x = np.array([[row[name] for name in FEATURES] for row in rows], dtype=np.float32)
    y = np.array([row["diagnosis"] for row in rows])
    return (x - x.mean(axis=0)) / x.std(axis=0), y
