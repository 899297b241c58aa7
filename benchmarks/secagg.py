"""Secure aggregation at full size: exact sums despite dropouts, and how long each side takes.

For every number of dropouts and every step before which they happen, all clients take part in one
complete run of the protocol, in turn, and the sum must equal the plain sum of the survivors'
vectors exactly. The time of a client, or of the server, is that of all its steps; messages are
passed in memory. In every run the same vectors are also summed plainly, as a reference for the
machine. Randomness is simulated: it follows from the seed.

    python benchmarks/secagg.py [--json FILE] [--clients 100] [--parameters 1000000]
        [--dropouts 0 10 33] [--neighbours 0] [--threshold 0.6667] [--seed 0]
        [--base COMMIT [--repeats 5]]

With ``--base`` the same is measured at another commit as well, each in its own process and in turn,
with the order swapped from one repeat to the next. The script prints the ratios of the medians:
this checkout's, divided by the base's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import cryptography
import numpy as np
from numpy.typing import NDArray

from coterie.channel.privacy.entropy import Entropy
from coterie.channel.privacy.secagg import Member, Session, Sum
from coterie.channel.privacy.secagg.crypto import public_identity
from methods import commit, machine
from two_commits import worktree

STEPS = {  # each step of a client, and the server's step that follows it
    "advertise": "keys",
    "share": "shares",
    "mask": "survivors",
    "confirm": "confirmations",
    "unmask": "total",
}
Vectors = Mapping[int, NDArray[np.int64]]


def timed(call: Callable[..., Any], *arguments: Any) -> tuple[Any, NDArray[np.float64]]:
    """A call's result and its seconds: of the clock, and of all cores together."""
    clock, core = time.perf_counter(), time.process_time()
    made = call(*arguments)
    return made, np.array([time.perf_counter() - clock, time.process_time() - core])


def plainly(vectors: Vectors, clients: tuple[int, ...]) -> NDArray[np.uint64]:
    """The reference: the vectors of these clients, added up."""
    total = np.zeros(len(vectors[clients[0]]), np.uint64)
    for client in clients:
        total += vectors[client].view(np.uint64)
    return total


def once(session: Session, vectors: Vectors, lost: set[int], before: str, seed: int) -> Any:
    """One run of the protocol; the seconds of each client and of the server, and the bytes."""
    entropy = Entropy("simulated", seed)
    identities = {c: entropy.stream("identity", c)(32) for c in vectors}
    roster = {c: public_identity(identities[c]) for c in vectors}
    members = {
        c: Member(session, c, identities[c], roster, entropy.stream(session.attempt, c))
        for c in vectors
    }
    server = Sum(session, roster, len(vectors[0]))
    spent, sizes = {c: np.zeros(2) for c in vectors}, {"up": 0, "down": 0}
    steps: dict[str, NDArray[np.float64]] = {}
    told: Any = dict.fromkeys(vectors, b"")
    for step, answer in STEPS.items():
        said = {}
        for client, blob in told.items():
            if step == before and client in lost:
                continue
            given = {"advertise": (), "mask": (blob, vectors[client])}.get(step, (blob,))
            said[client], seconds = timed(getattr(members[client], step), *given)
            spent[client] += seconds
        sizes["up"] += max(map(len, said.values()))
        told, steps[answer] = timed(getattr(server, answer), said)
        if answer != "total":
            sizes["down"] += max(map(len, told.values()))
    return told, server, spent, steps, sizes


def row(session: Session, vectors: Vectors, count: int, before: str, seed: int) -> dict[str, Any]:
    """The figures of one run, after checking that its sum is exact."""
    order = np.random.default_rng(seed).permutation(len(vectors))
    lost = {int(c) for c in order[:count]}
    total, server, spent, steps, sizes = once(session, vectors, lost, before, seed)
    reference, plain = timed(plainly, vectors, server.summed)
    assert not server.rejected, server.rejected
    assert np.array_equal(total, reference), "the secure sum is not the plain sum"
    stayed = np.array([seconds for client, seconds in spent.items() if client not in lost])
    whole = sum(steps.values())
    return {
        "dropouts": count,
        "before": before if count else "",
        "summed": len(server.summed),
        "exact": True,
        "client_slowest": figures(stayed.max(0)),
        "client_mean": figures(stayed.mean(0)),
        "server": figures(whole),
        "server_steps": {name: figures(seconds) for name, seconds in steps.items()},
        "plain_sum": figures(plain),
        "server_per_plain_sum": round(float(whole[1] / max(plain[1], 1e-6)), 1),
        "client_bytes": sizes,
    }


def figures(seconds: NDArray[np.float64]) -> dict[str, float]:
    return {"clock": round(float(seconds[0]), 4), "core": round(float(seconds[1]), 4)}


def measured(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rng = np.random.default_rng(arguments.seed)
    vectors = {
        c: rng.integers(-(2**40), 2**40, arguments.parameters) for c in range(arguments.clients)
    }
    found: list[dict[str, Any]] = []
    shown = ("client_mean", "client_slowest", "server", "plain_sum")
    print(f"{'seconds of the clock (of cores)':16}" + "".join(f"{name:>18}" for name in shown))
    for count in arguments.dropouts:
        for step in STEPS if count else ["advertise"]:
            session = Session(
                "benchmark",
                1,
                f"{count} before {step}",
                "0",
                arguments.threshold,
                arguments.neighbours,
            )
            found.append(made := row(session, vectors, count, step, arguments.seed))
            cells = "".join(f"{m['clock']:10.3f} ({m['core']:5.3f})" for m in map(made.get, shown))
            print(f"{f'{count} before {step}' if count else 'nobody lost':31}{cells}", flush=True)
    return found


TIMES = ("client_mean", "client_slowest", "server", "plain_sum")
Row = tuple[int, str]  # how many clients drop out, and before which step


def in_process(top: Path, arguments: argparse.Namespace, count: int) -> dict[Row, dict[str, float]]:
    """The seconds by row that a checkout's own version of this benchmark measures there."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        asked = {
            "--json": file,
            "--clients": arguments.clients,
            "--parameters": arguments.parameters,
            "--dropouts": count,
            "--neighbours": arguments.neighbours,
            "--threshold": arguments.threshold,
            "--seed": arguments.seed,
        }
        words = [str(word) for pair in asked.items() for word in pair]
        command = [sys.executable, str(top / "benchmarks" / "secagg.py"), *words]
        env = {**os.environ, "PYTHONPATH": str(top / "src")}
        subprocess.run(command, cwd=top, env=env, check=True, stdout=subprocess.DEVNULL)
        rows = json.loads(file.read_text())["results"]
    return {(r["dropouts"], r["before"]): {t: r[t]["clock"] for t in TIMES} for r in rows}


def compared(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """For each row, the medians at both commits and their ratios."""
    here = Path(__file__).resolve().parents[1]
    seconds: dict[Row, dict[str, dict[str, list[float]]]] = {}
    with worktree(arguments.base) as base:
        for repeat in range(arguments.repeats):
            for count in arguments.dropouts:
                order = [("base", base), ("this", here)]
                for side, top in order if repeat % 2 else order[::-1]:
                    for row, times in in_process(top, arguments, count).items():
                        for name, value in times.items():
                            sides = seconds.setdefault(row, {}).setdefault(name, {})
                            sides.setdefault(side, []).append(value)
            print(
                f"repeat {repeat + 1} of {arguments.repeats} is done", file=sys.stderr, flush=True
            )
    print(f"{'this ÷ base, medians':31}" + "".join(f"{name:>18}" for name in TIMES))
    found = []
    for (count, before), times in seconds.items():
        medians = {n: {s: statistics.median(v) for s, v in t.items()} for n, t in times.items()}
        ratios = {n: round(m["this"] / max(m["base"], 1e-9), 4) for n, m in medians.items()}
        name = f"{count} before {before}" if count else "nobody lost"
        print(f"{name:31}" + "".join(f"{ratios[n]:18.3f}" for n in TIMES), flush=True)
        found.append({"dropouts": count, "before": before, "medians": medians, "ratios": ratios})
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--dropouts", type=int, nargs="+", default=[0, 10, 33])
    parser.add_argument("--neighbours", type=int, default=0)
    parser.add_argument("--threshold", type=float, default=2 / 3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument("--base", metavar="COMMIT", help="compare with this commit, in turn")
    parser.add_argument("--repeats", type=int, default=5, help="of each, with --base")
    arguments = parser.parse_args()
    code = commit()  # read it now: the checkout may change while this runs
    worst: dict[str, Any]
    if arguments.base:
        found = compared(arguments)
        largest = {n: max(row["ratios"][n] for row in found) for n in TIMES}
        worst = {"base": arguments.base, "repeats": arguments.repeats, "largest_ratios": largest}
    else:
        found = measured(arguments)
        slowest = max(made["client_slowest"]["clock"] for made in found)
        server = max(made["server"]["clock"] for made in found)
        print(f"all {len(found)} sums exact; slowest client {slowest} s, slowest server {server} s")
        worst = {"worst": {"client": slowest, "server": server}}
    if arguments.json:
        about = {
            "command": " ".join(["python", *sys.argv]),
            "commit": code,
            "date": date.today().isoformat(),
            "machine": machine(),
            "numpy": np.__version__,
            "cryptography": cryptography.__version__,
            "seed": f"{arguments.seed} (simulated randomness)",
            "clients": arguments.clients,
            "parameters": arguments.parameters,
            "neighbours": arguments.neighbours,
            "threshold": arguments.threshold,
            "unit": "seconds by the clock, and of all cores; clients in turn, each on one thread",
            **worst,
        }
        arguments.json.write_text(json.dumps({**about, "results": found}, indent=1) + "\n")
