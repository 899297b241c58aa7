"""How fast codecs encode and decode, compared with copying memory, and how short payloads are.

The script uses one thread. In every repeat each codec encodes and decodes the same float32 numbers
(normally distributed, roughly like the changes of a model), in turn with a plain copy of them, so
that a noisy machine affects all in the same way. MB are 10^6 bytes of float32 input. The first
figure is the median by the clock, `min` the slowest repeat, `core` the median by the time for which
the thread had a core.

    python benchmarks/codecs.py [--json FILE] [--megabytes 16] [--repeats 15] [--codecs raw qsgd …]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coterie.channel.compression.codecs import codec
from methods import commit

CODECS = [
    "raw",
    "fp16",
    "bf16",
    "qsgd:levels=1",
    "qsgd:levels=7",
    "qsgd:levels=7,bucket=all",
    "qsgd:levels=100,bucket=100",
    "qsgd:levels=127",
    "qsgd:levels=1000",
    "topk:share=0.01",
    "topk:share=0.1",
    "raw+zstd",
    "qsgd:levels=7+zstd",
]


class Stopwatch:
    """The seconds of each call: of the clock, and of the core."""

    def __init__(self) -> None:
        self.clock: list[float] = []
        self.core: list[float] = []

    def time(self, call: Callable[..., Any], *arguments: Any) -> Any:
        clock, core = time.perf_counter(), time.thread_time()
        made = call(*arguments)
        self.core.append(time.thread_time() - core)
        self.clock.append(time.perf_counter() - clock)
        return made

    def speeds(self, megabytes: int, skip: int) -> dict[str, float]:
        taken = {
            "median": statistics.median(self.clock[skip:]),
            "min": max(self.clock[skip:]),
            "core": statistics.median(self.core[skip:]),
        }
        return {what: round(megabytes / seconds, 1) for what, seconds in taken.items()}


def measured(texts: list[str], megabytes: int, repeats: int) -> dict[str, dict[str, Any]]:
    """MB/s of each codec and of the copy, and how many times shorter its payload is."""
    array = torch.randn(megabytes * 250_000, generator=torch.Generator().manual_seed(0))
    codecs = {made.spec: made for made in map(codec, texts)}
    copying = Stopwatch()
    watches = {name: (Stopwatch(), Stopwatch()) for name in codecs}
    lengths = {}
    for repeat in range(repeats + 1):
        for name, made in codecs.items():
            encoding, decoding = watches[name]
            copying.time(array.clone)
            payload = encoding.time(made.encode, array, repeat)
            decoding.time(made.decode, payload, "f4", array.shape)
            lengths[name] = len(payload)
    found: dict[str, dict[str, Any]] = {"copy": {"copy": copying.speeds(megabytes, len(codecs))}}
    for name, (encoding, decoding) in watches.items():  # the first repeat warms up
        found[name] = {
            "encode": encoding.speeds(megabytes, 1),
            "decode": decoding.speeds(megabytes, 1),
            "times_shorter": round(array.numel() * 4 / lengths[name], 3),
        }
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--codecs", nargs="+", default=CODECS, metavar="CODEC")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # as in a run
    code = commit()  # read it now: the checkout may change while this runs
    found = measured(arguments.codecs, arguments.megabytes, arguments.repeats)
    columns = [f"{way} {what}" for way in ("encode", "decode") for what in ("", "min", "core")]
    print(f"{'MB/s of float32':36}" + "".join(f"{c:>12}" for c in columns) + "   shorter")
    for name, row in found.items():
        ways = [row[way] for way in ("copy", "encode", "decode") if way in row]
        speeds = "".join(f"{way[what]:12.0f}" for way in ways for what in way)
        shorter = f"{row['times_shorter']:9.2f}×" if "times_shorter" in row else ""
        print(f"{name:36}{speeds}{shorter}")
    if arguments.json:
        about = {
            "command": " ".join(["python", *sys.argv]),
            "commit": code,
            "date": date.today().isoformat(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "machine": platform.machine(),
            "unit": "MB/s of float32 input, one thread",
            "repeats": arguments.repeats,
        }
        arguments.json.write_text(json.dumps({**about, "results": found}, indent=1) + "\n")
