"""Tiny versions of the public file formats, written by the tests themselves."""

from __future__ import annotations

import gzip
import io
import os
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """No test may read or fill the user's cache, or reach the network by way of it."""
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path / "cache"))


def idx_bytes(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


@pytest.fixture
def as_idx() -> Callable[[np.ndarray], bytes]:
    return idx_bytes


@pytest.fixture
def mnist_files() -> dict[str, tuple[str, np.ndarray]]:
    """The four arrays of a tiny MNIST by the names of their files (without .gz)."""
    rng = np.random.default_rng(0)
    return {
        "train-images-idx3-ubyte": rng.integers(0, 256, (12, 5, 4)).astype(np.uint8),
        "train-labels-idx1-ubyte": (np.arange(12) % 10).astype(np.uint8),
        "t10k-images-idx3-ubyte": rng.integers(0, 256, (3, 5, 4)).astype(np.uint8),
        "t10k-labels-idx1-ubyte": np.array([9, 0, 5], np.uint8),
    }


@pytest.fixture
def write_mnist(mnist_files) -> Callable[..., None]:
    def write(folder: Path, zipped: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, array in mnist_files.items():
            if zipped:
                (folder / f"{name}.gz").write_bytes(gzip.compress(idx_bytes(array)))
            else:
                (folder / name).write_bytes(idx_bytes(array))

    return write


@pytest.fixture
def tar_of() -> Callable[..., None]:
    def pack(path: Path, files: dict[str, bytes], mode: str = "w:gz") -> None:
        with tarfile.open(path, mode) as archive:
            for name, content in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))

    return pack


@pytest.fixture
def real_data() -> Path:
    folder = os.environ.get("COTERIE_DATA")
    if not folder:
        pytest.skip("set COTERIE_DATA to a folder with the real data sets to run this")
    return Path(folder)
