"""Are the groups found at the defaults right, and do they pay off? On seeds not used for tuning.

    python benchmarks/grouping_matrix.py                          # digits
    python benchmarks/grouping_matrix.py --set fashion-mnist --folder DATA

A cell is a method on one set of 20 clients: a kind of difference between clients (four label
permutations, four rotations, four label sets, a pair of labels swapped in each of four groups,
Dirichlet label skew, none, or even the same data), equal or unequal numbers of samples, a schedule
and a seed. Methods run at their defaults. Beside them run oracle, FedAvg, local training, and fixed
numbers of groups (2, 4, 8: k-means of the same directions of updates that fedclust compares, from
the start).

A cell is right if the adjusted Rand index is at least 0.9 (permutations, rotations, label sets) or
if there is one group (IID, identical data). With label sets, a single model is right, too, if it
lost less than a point. Exchanged pairs and Dirichlet sets have no right number of groups; for them,
only the points lost are reported:
the received accuracy of the best of {FedAvg, local, 2, 4, 8 groups} minus the method's.
``flis`` gets a tenth of all images as public samples, of those that no client has.

Results are appended to a file as they come; call the script again to continue after an
interruption. Seeds 0 to 5 served to choose the defaults; the seeds reported are others.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.metrics import adjusted_rand_score

import coterie
from coterie import data as coterie_data
from coterie.client import client as client_module
from coterie.client.fit import Criterion, Fit, FitCall, FlatModel
from coterie.client.objectives import Objective
from coterie.compose import probing
from coterie.compose.assign import Assign
from coterie.compose.grouped import grouped
from coterie.compose.probing import Probe
from coterie.core.method import Method, State
from coterie.core.weights import Weights
from coterie.data import Population, from_clients
from layers_at_rest import is_full
from methods import commit
from rows import read

RESULTS = Path(__file__).parent / "results"
CLIENTS, GROUPS = 20, 4
LABEL_SETS = ((0, 1, 2), (3, 4, 5), (6, 7), (8, 9))
KINDS = (
    *("permutation", "rotation", "label-sets", "pair"),
    *("dirichlet-0.1", "dirichlet-0.3", "dirichlet-1.0", "iid", "identical"),
)
ALIKE = ("iid", "identical")
PLANTED = ("permutation", "rotation", "label-sets")
SIZES = ("equal", "unequal")
SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "busy": {"epochs": 3, "batch_size": 10, "lr": 0.1},
}
METHODS: Mapping[str, Mapping[str, Any]] = {
    "fedclust": {},
    "user-centric": {"streams": "auto"},
    "fl-hc": {},
    "adaptive": {},
    "cfl": {},
    "pacfl": {},
    "dc-pfl": {},
    "flis": {},
    "fedclust trial=always": {"trial": "always"},
    "fedclust trial_rounds=4": {"trial_rounds": 4},
}
DEFAULT_METHODS = ",".join([*METHODS][:6])
DEFAULT_KINDS = ",".join(KINDS[:-1])
FIXED = (2, 4, 8)
REFERENCES = ("fedavg", "local", *(f"fixed-{k}" for k in FIXED))
ROUNDS = 40
SKIPPED = (
    "`dc-pfl` is scored after round {}, in which most layers were skipped, so that clients use "
    "layers of their own: its points are not comparable with those of the other methods, its "
    "groups are."
)
SEEDS = "10,11,12,13,14"


# --- the sets -----------------------------------------------------------------------------------


@cache
def samples(name: str, folder: str | None) -> tuple[np.ndarray, np.ndarray]:
    raw = coterie_data.load(name, folder)
    assert isinstance(raw.x, np.ndarray)
    return raw.x, raw.y


def sizes_and_groups(
    kind: str, low: int, high: int, rng: np.random.Generator
) -> tuple[list[int], list[int]]:
    """How many samples each client has, and its group; every group has large and small clients.

    "equal", "unequal" (spread evenly on a logarithmic scale), or written out, as in "300" (for 20
    clients) or "40x8+500x4" (8 clients with 40 and 4 with 500). Clients come in random order.
    """
    if kind == "equal":
        sizes = [round((low * high) ** 0.5)] * CLIENTS
    elif kind == "unequal":
        sizes = [round(n) for n in np.geomspace(low, high, CLIENTS)]
    else:
        parts = [part.split("x") for part in kind.split("+")]
        counts = [(int(n), int(many[0]) if many else CLIENTS) for n, *many in parts]
        sizes = [n for n, many in counts for _ in range(many)]
    blocks = [rng.permutation(GROUPS) for _ in range(-(-len(sizes) // GROUPS))]
    groups = np.concatenate(blocks)[: len(sizes)]
    order = rng.permutation(len(sizes))
    return [sizes[i] for i in order], [int(groups[i]) for i in order]


def dealt(y: np.ndarray, shares: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """``count`` different samples whose labels follow these shares, as far as the data suffice."""
    wanted = rng.multinomial(count, shares)
    rows = [rng.permutation(np.flatnonzero(y == c))[:n] for c, n in enumerate(wanted)]
    chosen = np.concatenate(rows)
    if len(chosen) < count:
        rest = np.setdiff1d(np.flatnonzero(shares[y] > 0), chosen)
        chosen = np.concatenate([chosen, rng.permutation(rest)[: count - len(chosen)]])
    return chosen


def planted(
    kind: str, size: str, seed: int, name: str = "digits", folder: str | None = None
) -> tuple[Population, list[int]]:
    """The clients of one set, and their true groups."""
    which = SIZES.index(size) if size in SIZES else sum(map(ord, size))
    rng = np.random.default_rng([seed, KINDS.index(kind), which])
    x, y = samples(name, folder)
    low, high = (25, 130) if name == "digits" else (60, 300)
    sizes, truth = sizes_and_groups(size, low, high, rng)
    flat = np.full(10, 0.1)
    orders = [np.arange(10), *(rng.permutation(10) for _ in range(GROUPS - 1))]
    clients = []
    pool = rng.permutation(len(y))
    for group, count in zip(truth, sizes, strict=True):
        shares = flat
        if kind == "label-sets":
            shares = np.isin(np.arange(10), LABEL_SETS[group]) / len(LABEL_SETS[group])
        elif kind.startswith("dirichlet"):
            shares = rng.dirichlet(np.full(10, float(kind.split("-")[1])))
        if kind != "identical" or not clients:
            rows = pool[dealt(y[pool], shares, count, rng)]
            pool = np.setdiff1d(pool, rows)
            pool = rng.permutation(pool)
        images, labels = x[rows], y[rows]
        if kind == "permutation":
            labels = orders[group][labels]
        elif kind == "rotation":
            images = np.ascontiguousarray(np.rot90(images, group, axes=(2, 3)))
        elif kind == "pair" and group:
            swap = np.arange(10)
            a, b = 2 * group - 2, 2 * group - 1
            swap[[a, b]] = b, a
            labels = swap[labels]
        clients.append((images, labels))
    groups = truth if kind in (*PLANTED, "pair") else [0] * len(truth)
    # A tenth of all images, of those that no client has, for methods that need public samples.
    population = from_clients(clients, seed=seed, classes=10, public=x[pool[: len(y) // 10]])
    return population, groups


# --- the methods --------------------------------------------------------------------------------


def fixed(k: int, known: dict[str, Any]) -> Method:
    """A fixed number of groups of the directions that fedclust compares, from the start.

    All runs on the same set of clients share their replies, ``known``.
    """

    def start(fed: Any, setup: Any) -> State:
        if "answer" not in known:
            probe = Probe(fallback=False)
            known["answer"] = probing.ask(fed, probe, setup.start, setup.clients)
        answer = known["answer"]
        rows = torch.nn.functional.normalize(answer.places).numpy()
        labels = coterie.clustering.kmeans(rows, k, answer.examples)[0].tolist()
        groups = dict(zip(answer.clients, labels, strict=True))
        return State(dict.fromkeys(range(k), setup.start), groups)

    return grouped(f"fixed-{k}", Assign(start, tasks=probing.TASKS, sees="each"))


def method_of(name: str, known: dict[str, Any]) -> Method:
    if name.startswith("fixed-"):
        return fixed(int(name.removeprefix("fixed-")), known)
    return coterie.methods.make(name.split()[0], dict(METHODS.get(name, {})))


def run(
    cell: Mapping[str, Any], folder: str | None = None, known: dict[str, Any] | None = None
) -> dict[str, Any]:
    """One run, as a row of results."""
    torch.set_num_threads(1)
    population, truth = planted(cell["kind"], cell["sizes"], cell["seed"], cell["set"], folder)
    if cell["method"] == "oracle":
        population = replace(population, groups=tuple(truth))
    method = method_of(cell["method"], {} if known is None else known)
    if not method.needs_public:
        population = replace(population, public=None)
    began = time.perf_counter()
    result = coterie.simulate(
        population,
        model=cell.get("model", "mlp" if cell["set"] == "digits" else "lenet5"),
        method=method,
        rounds=cell["rounds"],
        seed=cell["seed"],
        engine="loop",
        evaluate_every=0,
        **SCHEDULES[cell["schedule"]],
    )
    labels = [str(result.groups[i]) for i in range(len(truth))]
    notes = [e["notes"] for e in (result.begun, *result.history) if e.get("notes")]
    own_group = result.summary.get("grouping", {}).get("own_group")
    return {
        **cell,
        "commit": commit(),
        **({} if own_group is None else {"own_group": own_group}),
        "rand": float(adjusted_rand_score(truth, labels)),
        "groups": len(set(labels)),
        "received": result.summary["received"]["accuracy"],
        "bytes": result.summary["bytes"]["down"] + result.summary["bytes"]["up"],
        "evidence": [brief(n["evidence"]) for n in notes if "evidence" in n],
        "verdicts": [n["verdict"] for n in notes if "verdict" in n],
        "seconds": round(time.perf_counter() - began, 2),
    }


def brief(evidence: Mapping[str, Any]) -> dict[str, Any]:
    return {k: evidence.get(k) for k in ("groups", "by", "steps", "explained", "enough", "why")}


# --- the matrix ---------------------------------------------------------------------------------


def cells(asked: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """Every run, those on the same set of clients together."""
    schedules = asked.schedules.split(",")
    axes = product(asked.seeds, asked.kinds.split(","), asked.sizes.split(","), schedules)
    for seed, kind, size, schedule in axes:
        beside = () if asked.alone else (*REFERENCES, "oracle")
        yield [
            {
                "set": asked.name,
                "kind": kind,
                "sizes": size,
                "schedule": schedule,
                "seed": seed,
                "method": method,
                "rounds": asked.rounds,
                **({"model": asked.model} if asked.model else {}),
            }
            for method in (*beside, *asked.methods.split(","))
            if method != "oracle" or kind in (*PLANTED, "pair")
        ]


def key_of(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    names = ("set", "kind", "sizes", "schedule", "seed", "method", "rounds", "model")
    return tuple(cell.get(name) for name in names)


def attempt(some: Sequence[Mapping[str, Any]], folder: str | None) -> list[dict[str, Any]]:
    """The runs of one set of clients."""
    known: dict[str, Any] = {}
    rows = []
    with training_once():
        for cell in some:
            try:
                rows.append(run(cell, folder, known))
            except coterie.CoterieError as error:
                rows.append({**cell, "error": str(error)})
    return rows


@contextmanager
def training_once() -> Iterator[None]:
    """Within this block, a training that would repeat an earlier one reuses its result.

    Training is a pure function of its arguments, and the methods of one set share much of it: the
    probe's, and all rounds before groups differ.
    """
    known: dict[Any, Fit] = {}
    train = client_module.fit

    def remembered(model: FlatModel, training: FitCall, criterion: Criterion) -> Fit:
        if training.objective != Objective() or training.part is not None:
            return train(model, training, criterion)
        arrays = (training.start.vector, training.data.x, training.data.y)
        digests = [hashlib.blake2b(a.contiguous().numpy()).digest() for a in arrays]
        seeds = training.order_seed, training.dropout_seed
        key = (*digests, repr(training.schedule), *seeds)
        if key not in known:
            known[key] = train(model, training, criterion)
        found = known[key]
        return replace(found, weights=Weights(found.weights.layout, found.weights.vector.clone()))

    client_module.fit = remembered
    try:
        yield
    finally:
        client_module.fit = train


def carry_out(asked: argparse.Namespace) -> None:
    """Run what is missing, appending rows as they come."""
    done = {key_of(row) for row in read(asked.runs)}
    missing = [[c for c in some if key_of(c) not in done] for some in cells(asked)]
    missing = [some for some in missing if some]
    print(f"{sum(map(len, missing))} runs to do, {len(done)} done", flush=True)
    asked.runs.parent.mkdir(parents=True, exist_ok=True)
    work = partial(attempt, folder=asked.folder)
    ends = time.monotonic() + 3600 * asked.hours
    with ProcessPoolExecutor(asked.jobs) as pool, asked.runs.open("a") as file:
        queue = iter(missing)
        waiting = {pool.submit(work, some) for _, some in zip(range(asked.jobs), queue)}  # noqa: B905
        while waiting:
            finished, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in finished:
                file.writelines(json.dumps(row) + "\n" for row in future.result())
                file.flush()
                some = next(queue, None) if time.monotonic() < ends else None
                if some is not None:
                    waiting.add(pool.submit(work, some))


# --- the results ----------------------------------------------------------------------------------


def by_set(
    rows: Iterable[Mapping[str, Any]],
) -> dict[tuple[Any, ...], dict[str, Mapping[str, Any]]]:
    """Rows by the set of clients they are of, then by method; only sets with all references."""
    sets: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        if "error" not in row:
            place = tuple(row[n] for n in ("kind", "sizes", "schedule", "seed"))
            sets.setdefault(place, {})[row["method"]] = row
    return {p: of for p, of in sets.items() if all(m in of for m in REFERENCES)}


def lost(of: Mapping[str, Mapping[str, Any]], method: str) -> float:
    """Points of received accuracy below the best fixed choice."""
    best = max(of[m]["received"] for m in REFERENCES)
    return 100 * (best - of[method]["received"])


def is_right(kind: str, row: Mapping[str, Any], points: float) -> bool | None:
    """Whether the groups are right; None where there is no right number."""
    if kind in ALIKE:
        return bool(row["groups"] == 1)
    if kind == "label-sets" and row["groups"] == 1:
        return points < 1
    return bool(row["rand"] >= 0.9) if kind in PLANTED else None


def percent(values: Sequence[bool]) -> str:
    return f"{sum(values)} of {len(values)}" if values else "–"


def mean(values: Sequence[float]) -> str:
    return f"{np.mean(values):+.1f}" if values else "–"


def tables(rows: Iterable[Mapping[str, Any]], methods: Sequence[str]) -> list[str]:
    """The tables, in Markdown."""
    sets = by_set(rows)
    kinds = [k for k in KINDS if any(place[0] == k for place in sets)]
    lines = [
        "| method | right, planted | right, IID | points lost, all cells | "
        + " | ".join(f"lost, {k}" for k in kinds)
        + " |",
        "|---|" + "---:|" * (3 + len(kinds)),
    ]
    for method in methods:
        right: dict[str, list[bool]] = {"planted": [], "iid": []}
        points: dict[str, list[float]] = {k: [] for k in kinds}
        for place, of in sets.items():
            if method not in of:
                continue
            gap = lost(of, method)
            points[place[0]].append(gap)
            verdict = is_right(place[0], of[method], gap)
            if verdict is not None:
                right["iid" if place[0] in ALIKE else "planted"].append(verdict)
        every = [p for values in points.values() for p in values]
        cells = [percent(right["planted"]), percent(right["iid"]), mean(every)]
        cells += [mean(points[k]) for k in kinds]
        lines.append(f"| `{method}` | " + " | ".join(cells) + " |")
    for reference in ("fedavg", "local"):
        values = {k: [lost(of, reference) for p, of in sets.items() if p[0] == k] for k in kinds}
        cells = ["–", "–", mean([v for k in kinds for v in values[k]])]
        cells += [mean(values[k]) for k in kinds]
        lines.append(f"| {reference} | " + " | ".join(cells) + " |")
    lines += ["", *by_schedule(sets, methods), "", *oracle_gaps(sets, methods), ""]
    lines += [*received(sets, methods, kinds), "", *by_kind(sets, methods, kinds), ""]
    counted = [
        verdict
        for method in methods
        for place, of in sets.items()
        if method in of
        and (verdict := is_right(place[0], of[method], lost(of, method))) is not None
    ]
    gaps = [lost(of, m) for m in methods for of in sets.values() if m in of]
    lines.append(f"right in {sum(counted)} of {len(counted)} cells")
    lines.append(f"points lost to the best fixed choice, mean over {len(gaps)} cells: {mean(gaps)}")
    return lines


def by_schedule(sets: Mapping[Any, Any], methods: Sequence[str]) -> list[str]:
    """Points lost with each schedule: a trial's training is longer than a round of the first."""
    lines = ["| points lost | " + " | ".join(SCHEDULES) + " |", "|---|" + "---:|" * len(SCHEDULES)]
    for method in methods:
        cells = [
            mean([lost(of, method) for p, of in sets.items() if p[2] == schedule and method in of])
            for schedule in SCHEDULES
        ]
        lines.append(f"| `{method}` | " + " | ".join(cells) + " |")
    return lines


def received(sets: Mapping[Any, Any], methods: Sequence[str], kinds: Sequence[str]) -> list[str]:
    """The accuracy received, mean over seeds, and how far the groups agree with the true ones."""
    others = ("oracle", "fedavg", "local", "best fixed")
    head = [*others, *(f"{m} (agreement)" for m in methods)]
    lines = ["| received % | " + " | ".join(head) + " |", "|---|" + "---:|" * len(head)]
    for kind, size, schedule in product(kinds, SIZES, SCHEDULES):
        some = [of for p, of in sets.items() if p[:3] == (kind, size, schedule)]
        if not some:
            continue
        best = [max(of[f"fixed-{k}"]["received"] for k in FIXED) for of in some]
        cells = [accuracy([of[m]["received"] for of in some if m in of]) for m in others[:3]]
        cells.append(accuracy(best))
        for method in methods:
            rows = [of[method] for of in some if method in of]
            agreement = np.mean([r["rand"] for r in rows]) if rows else 0.0
            known = f" ({agreement:.2f})" if kind in (*PLANTED, "pair") and rows else ""
            cells.append(accuracy([r["received"] for r in rows]) + known)
        lines.append(f"| {kind}, {size}, {schedule} | " + " | ".join(cells) + " |")
    return lines


def accuracy(values: Sequence[float]) -> str:
    return f"{100 * np.mean(values):.1f}" if values else "–"


def groups_found(rows: Iterable[Mapping[str, Any]], methods: Sequence[str]) -> list[str]:
    """Numbers of groups and agreement, a line for each method and set."""
    lines = []
    done = [r for r in rows if "error" not in r]
    places = dict.fromkeys((r["kind"], r["sizes"], r["schedule"]) for r in done)
    for method, place in product(methods, places):
        some = [
            r
            for r in done
            if r["method"] == method and (r["kind"], r["sizes"], r["schedule"]) == place
        ]
        if not some:
            continue
        right = [bool(is_right(place[0], r, 100.0)) for r in some]
        numbers = ", ".join(f"{r['groups']} ({r['rand']:.2f})" for r in some)
        weights = [r["own_group"] for r in some if "own_group" in r]
        own = f", weight of the own group {np.mean(weights):.2f}" if weights else ""
        moved = np.mean([r["bytes"] for r in some]) / 1e6
        lines.append(
            f"{method}, {', '.join(place)}: right in {percent(right)}; groups (agreement) "
            f"{numbers}; received {accuracy([r['received'] for r in some])} %, {moved:.1f} MB{own}"
        )
    return lines


def by_kind(sets: Mapping[Any, Any], methods: Sequence[str], kinds: Sequence[str]) -> list[str]:
    """Right cells and numbers of groups, by kind, sizes and schedule."""
    lines = ["| set | " + " | ".join(methods) + " |", "|---|" + "---|" * len(methods)]
    for kind, size, schedule in product(kinds, SIZES, SCHEDULES):
        some = [of for p, of in sets.items() if p[:3] == (kind, size, schedule)]
        if not some:
            continue
        cells = []
        for method in methods:
            of_method = [of for of in some if method in of]
            verdicts = [is_right(kind, of[method], lost(of, method)) for of in of_method]
            numbers = ", ".join(str(of[method]["groups"]) for of in of_method)
            right = "" if None in verdicts else f"{percent([bool(v) for v in verdicts])}; "
            cells.append(f"{right}groups {numbers}")
        lines.append(f"| {kind}, {size}, {schedule} | " + " | ".join(cells) + " |")
    return lines


def oracle_gaps(sets: Mapping[Any, Any], methods: Sequence[str]) -> list[str]:
    """Where the groups are right: points below the oracle, by kind."""
    lines = ["| points below oracle, where right | " + " | ".join(PLANTED) + " |"]
    lines.append("|---|" + "---:|" * len(PLANTED))
    for method in methods:
        cells = []
        for kind in PLANTED:
            gaps = [
                100 * (of["oracle"]["received"] - of[method]["received"])
                for place, of in sets.items()
                if place[0] == kind
                and method in of
                and "oracle" in of
                and of[method]["rand"] >= 0.9
            ]
            cells.append(mean(gaps))
        lines.append(f"| `{method}` | " + " | ".join(cells) + " |")
    return lines


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", choices=("digits", "fashion-mnist"), default="digits", dest="name")
    parser.add_argument("--folder", default=os.environ.get("COTERIE_DATA"))
    parser.add_argument("--seeds", default=SEEDS)
    parser.add_argument("--kinds", default=DEFAULT_KINDS)
    parser.add_argument("--sizes", default=",".join(SIZES))
    parser.add_argument("--schedules")
    known = ", ".join(METHODS)
    parser.add_argument(
        "--methods", default=DEFAULT_METHODS, help=f"any of: {known}; or others at their defaults"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--hours", type=float, default=6.0, help="begin no run after so long")
    parser.add_argument("--runs", type=Path, help="the file of rows (default: runs/grouping-…)")
    parser.add_argument("--alone", action="store_true", help="no references: groups only")
    parser.add_argument("--model", help="another model (default: mlp for digits, else lenet5)")
    parser.add_argument("--table-only", action="store_true", help="run nothing")
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args(words)
    for name in {*asked.methods.split(",")} - {*METHODS, *REFERENCES}:
        if " " in name:  # parameters other than those above would not be passed on
            parser.error(f"unknown method {name!r}; any of: {known}")
        coterie.methods.find(name)
    asked.seeds = [int(s) for s in asked.seeds.split(",")]
    asked.schedules = asked.schedules or usual_schedules(asked.name)
    asked.runs = asked.runs or Path("runs", f"grouping-{asked.name}.jsonl")
    return asked


def usual_schedules(name: str) -> str:
    return "default,busy" if name == "digits" else "default"


def command(asked: argparse.Namespace) -> str:
    """The command that makes these figures, wherever the files are."""
    words = ["python", "benchmarks/grouping_matrix.py"]
    if asked.name != "digits":
        words += ["--set", asked.name, "--folder", "DATA"]
    for option, given, usual in (
        ("--seeds", ",".join(map(str, asked.seeds)), SEEDS),
        ("--kinds", asked.kinds, DEFAULT_KINDS),
        ("--sizes", asked.sizes, ",".join(SIZES)),
        ("--methods", asked.methods, DEFAULT_METHODS),
        ("--schedules", asked.schedules, usual_schedules(asked.name)),
        ("--rounds", asked.rounds, ROUNDS),
        ("--model", asked.model, None),
    ):
        words += [option, str(given)] if given != usual else []
    return shlex.join(words)


def main() -> None:
    asked = arguments()
    if not asked.table_only:
        carry_out(asked)
    wanted = {key_of(cell) for some in cells(asked) for cell in some}
    rows = [r for r in read(asked.runs) if key_of(r) in wanted]
    methods = asked.methods.split(",")
    lines = groups_found(rows, methods) if asked.alone else tables(rows, methods)
    print("\n".join(lines))
    if asked.alone:
        return
    title = f"# Groups at the defaults: {asked.name}"
    seeds = ", ".join(map(str, asked.seeds))
    commits = ", ".join(sorted({r.get("commit", "unknown") for r in rows}))
    head = [
        title,
        "",
        f"`{command(asked)}`, commit {commits}, seeds {seeds}, {date.today()}. "
        "Points lost: received accuracy below the best of FedAvg, local, and 2, 4 or 8 groups.",
        "",
    ]
    if "dc-pfl" in methods and not is_full(asked.rounds):
        head += [SKIPPED.format(asked.rounds), ""]
    place = asked.results / f"grouping_{asked.name}.md"
    place.write_text("\n".join([*head, *lines, ""]))


if __name__ == "__main__":
    main()
