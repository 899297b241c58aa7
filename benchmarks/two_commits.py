"""Does a change leave every result as it was? The same runs at two commits, on one machine.

    python benchmarks/two_commits.py --base COMMIT
    python benchmarks/two_commits.py --base COMMIT --only fedavg --only noise --engines loop,pool

The base commit is checked out into a second worktree, and a fixed set of runs is done with each:
every method on the loop, a covering dozen on the other engines, codecs, privacy, lost and late
clients, runs that are interrupted and resumed, newcomers. The script compares the tensors of every
client's model by name, all scores, the groups, the cohorts, and the bytes of arrays by kind. Bytes
of headers may differ, and are listed. Nothing is kept: two commits on one machine must agree, and
no figures of one machine are a reference for another. The exit code is 1 if anything differs.

Runs are described by configurations only, so that they mean the same to both commits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Tree = dict[str, Any]
ROUNDS, CLIENTS = 4, 6
BASE: Tree = {
    "data": {"clients": CLIENTS, "samples": 360, "public": 60},
    "shift": {"name": "rotation", "groups": 2},
    "model": {"name": "mlp", "hidden": [12], "dropout": 0.2},
    "train": {"batch_size": 8, "lr": 0.1, "momentum": 0.5},
    "run": {"rounds": ROUNDS, "engine": "loop", "seed": 7},
}
# Every method once, at its defaults or, where these would do nothing in so few rounds, with others.
METHODS: Mapping[str, Tree] = {
    "local": {},
    "fedavg": {},
    "fedprox": {},
    "fednova": {},
    "scaffold": {},
    "moon": {},
    "feddyn": {},
    "fedper": {},
    "fedrep": {"head_epochs": 2},
    "lg-fedavg": {"g": 1},
    "ditto": {},
    "pfedme": {"inner_steps": 2},
    "per-fedavg": {"order": "hessian-free"},
    "apfl": {},
    "fedfomo": {"m": 2},
    "ifca": {"k": 2},
    "oracle": {},
    "cfl": {"eps1": 0.42, "eps2": 0.55, "relative": False},
    "fl-hc": {"rounds": 1, "clusters": 2},
    "pacfl": {"clusters": 2},
    "clusterfl": {"k": 2, "every": 2},
    "flis": {"threshold": 0.99},
    "adaptive": {"threshold": 0.3, "every": 2},
    "k-fed": {"k": 4},
    "fedclust": {},
    "dc-pfl": {"start": 1, "alpha": 2, "share": 0.9, "gamma": 0.9},
    "fedtsdp": {"hopkins": 0.4, "eps_outputs": 0.001, "shrink": 0.7, "public_batch": 20},
    "user-centric": {"streams": "auto"},
    "fedavgm": {},
    "fedadam": {},
    "fedyogi": {},
    "median": {},
    "trimmed-mean": {"share": 0.2},
    "krum": {},
    "group-evidence": {"seeds": 2, "steps": 5, "trial": "always"},
    "adaptive-tau": {"tau_max": 5, "sample": 8},
    "ifca+ditto": {"k": 2},
}
# Settings that a method needs beside its own parameters.
BESIDE: Mapping[str, Tree] = {
    "scaffold": {"train": {"momentum": 0.0}},
    "adaptive-tau": {"stop": {"bytes": 1e12}},
}
# A method for each way of talking to clients, and of letting them keep something.
COVERING = (
    *("fedavg", "fedper", "ifca", "group-evidence", "dc-pfl", "fedtsdp", "user-centric"),
    *("scaffold", "fedfomo", "ifca+ditto", "fl-hc", "fedclust"),
)
FEDERATED = ("fedavg", "ifca", "scaffold")  # between real processes: an exchange takes seconds
EXTRAS: Mapping[str, Tree] = {
    "partial cohorts": {"run": {"cohort": 0.5}},
    "layers at rest": {"method": {"name": "ditto", "layer_interval": 2, "layer_share": 0.95}},
    "qsgd up": {"wire": {"up": "qsgd"}},
    "topk up, qsgd down": {"wire": {"up": "topk", "down": "qsgd"}},
    "codecs of layers": {"wire": {"up": "qsgd", "layers": {"head": "raw"}}},
    "secure sums": {"privacy": {"secure": True}},
    "secure sums of groups": {"method": {"name": "ifca", "k": 2}, "privacy": {"secure": True}},
    "noise": {"privacy": {"noise": 1.0, "clip": 0.5}, "run": {"cohort": 0.5}},
    "noise in secure sums": {"privacy": {"secure": True, "noise": 1.0, "clip": 0.5}},
    "local noise": {"privacy": {"mechanism": "local", "noise": 2.0, "clip": 0.5}},
    "newcomers": {"method": {"name": "ifca", "k": 2}, "run": {"holdout": 2}},
    "late clients": {
        "clock": {"name": "links"},
        "run": {"over_selection": 1.5, "cohort": 0.5, "deadline": 1.0},
    },
    "clients that are away": {
        "availability": {"name": "diurnal"},
        "clock": {"name": "links"},
        "run": {"cohort": 0.5},
    },
    "clipped outliers": {"run": {"outliers": "clip"}},
    "trained alone as well": {"evaluation": {"alone": True, "adapt_every": 2}},
    "batch normalisation kept": {"model": {"name": "resnet9", "bn": "local"}},
    "a regression": {"data": {"set": "diabetes"}, "shift": {"name": "none"}},
}
RESUMED = ("fedavg", "scaffold", "dc-pfl", "user-centric")


# --- the runs -----------------------------------------------------------------------------------


def merged(tree: Mapping[str, Any], more: Mapping[str, Any]) -> Tree:
    """One configuration's tables over the other's; another name drops the old parameters."""
    result = {key: dict(table) for key, table in tree.items()}
    for key, table in more.items():
        old = {} if "name" in table else result.get(key, {})
        result[key] = {**old, **table}
    return result


def method_tree(name: str) -> Tree:
    return merged(merged(BASE, BESIDE.get(name, {})), {"method": {"name": name, **METHODS[name]}})


def cases(engines: Sequence[str], only: Sequence[str] = ()) -> list[Tree]:
    """Every run: its name, its kind and its configuration."""
    made: list[Tree] = []

    def add(name: str, tree: Tree, kind: str = "run") -> None:
        if not only or any(part in name for part in only):
            made.append({"name": name, "kind": kind, "config": tree})

    if "loop" in engines:
        for name in METHODS:
            add(f"{name}, loop", method_tree(name))
        for name, more in EXTRAS.items():
            add(f"{name}, loop", merged(BASE, more))
        for name in RESUMED:
            add(f"{name}, resumed, loop", method_tree(name), "resumed")
    for engine in ("pool", "ray"):
        if engine in engines:
            for name in COVERING:
                more: Tree = {"run": {"engine": engine, "workers": 2, "cohort": 0.5}}
                add(f"{name}, {engine}", merged(method_tree(name), more))
    if "flower" in engines:
        for name in FEDERATED:
            tree = method_tree(name)
            tree["data"] = {**tree["data"], "clients": 3, "samples": 180}
            tree["run"] = {**tree["run"], "rounds": 2}
            add(f"{name}, flower", tree, "federation")
    return made


def outcome(case: Mapping[str, Any], folder: Path) -> Tree:
    """What is compared of one run; an error is also an outcome."""
    if case["kind"] == "federation":
        return federated(case["config"], folder)
    import coterie

    directory = folder / "run"
    if case["kind"] == "resumed":
        broken_off(case["config"], directory)
        command = [sys.executable, "-m", "coterie", "run", "--resume", str(directory), "--quiet"]
        subprocess.run(command, check=True, capture_output=True)
        return {**of_directory(directory), "models": exported(directory, (0, CLIENTS - 1))}
    result = coterie.run(case["config"], directory)
    models = {c: digests(result.model(c).state_dict()) for c in sorted(result.groups)}
    return {**of_directory(directory), "models": models}


def broken_off(config: Tree, directory: Path) -> None:
    """A run that ends with an error after its second round."""
    import coterie

    class Off(Exception):
        pass

    def watch(event: Mapping[str, Any]) -> None:
        if event.get("round") == ROUNDS // 2:
            raise Off

    try:
        coterie.run(config, directory, watch=watch)
    except Off:
        return
    raise AssertionError("it was to be broken off")


def digests(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Each tensor by its name: shape, type and a digest of its bits."""
    found = {}
    for name, tensor in sorted(tensors.items()):
        bits = hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()[:16]
        found[name] = f"{tuple(tensor.shape)} {tensor.dtype} {bits}"
    return found


def exported(directory: Path, clients: Sequence[int]) -> Tree:
    """The models of some clients as `coterie export` writes them."""
    from safetensors.torch import load_file

    found = {}
    for client in clients:
        target = directory.parent / f"{client}.safetensors"
        words = ["export", str(directory), "--client", str(client), "--to", str(target)]
        command = [sys.executable, "-m", "coterie", *words]
        subprocess.run(command, check=True, capture_output=True)
        found[client] = digests(load_file(target))
    return found


TIMED = ("seconds", "train_seconds", "exchanges")


def of_directory(directory: Path) -> Tree:
    """Scores, groups, cohorts and bytes, from the files of a run."""
    result = json.loads((directory / "result.json").read_text())
    lines = (directory / "events.jsonl").read_text().splitlines()
    rounds = [e for e in map(json.loads, lines) if "round" in e and "cohort" in e]
    kinds = [dict(e.get("kinds", {})) for e in rounds]
    header = [kind.pop("header", [0, 0]) for kind in kinds]
    scores = ("received", "adapted", "best_on_validation", "groups", "lost", "late", "abandoned")
    shown = ("round", "cohort", "groups", "received", "client_scores", "lost", "late", "clock")
    return {
        "result": {key: untimed(result.get(key)) for key in scores},
        "rounds": [{key: untimed(e.get(key)) for key in shown} for e in rounds],
        "payload": [{k: v for k, v in kind.items() if k != "losses"} for kind in kinds],
        "header": header,
    }


def untimed(value: Any) -> Any:
    """A result without measured wall-clock times."""
    if isinstance(value, Mapping):
        return {k: untimed(v) for k, v in value.items() if k not in TIMED}
    return [untimed(v) for v in value] if isinstance(value, list) else value


# --- a real federation --------------------------------------------------------------------------


def federated(config: Tree, folder: Path) -> Tree:
    """The same with a server and clients in their own processes."""
    from safetensors.torch import load_file

    tree = {key: table for key, table in config.items() if key != "run"}
    tree["run"] = {k: v for k, v in config["run"].items() if k not in ("engine", "workers")}
    path = folder / "config.toml"
    path.write_text(toml(tree))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    names = [f"c{i}" for i in range(config["data"]["clients"])]
    keys = folder / "keys"
    given = [word for name in names for word in ("--client", name)]
    coterie = [sys.executable, "-m", "coterie"]
    make = ["keys", "make", "--host", "127.0.0.1", *given, "--dir", str(keys)]
    subprocess.run([*coterie, *make], check=True, capture_output=True)
    with processes(folder / "log.txt") as start:
        where = ["--keys", str(keys), "--host", "127.0.0.1", "--port", str(port)]
        server = start("serve", str(path), "--dir", str(folder / "run"), *where, "--quiet")
        for name in names:
            place = ["--dir", str(folder / name), "--keys", str(keys / "clients" / name)]
            start("join", "--server", f"127.0.0.1:{port}", *place, "--simulated", "--once")
        if server.wait(600):
            raise AssertionError((folder / "log.txt").read_text()[-2000:])
        models = {}
        for name in names:
            model = folder / name / "model.safetensors"
            ends = time.monotonic() + 60
            while not model.exists() and time.monotonic() < ends:
                time.sleep(0.2)
            models[name] = digests(load_file(model))
    return {**of_directory(folder / "run"), "models": models}


@contextmanager
def processes(log: Path) -> Iterator[Any]:
    """Commands of Coterie that are terminated at the end of the block."""
    running: list[subprocess.Popen[bytes]] = []
    with log.open("ab") as file:

        def start(*words: str) -> subprocess.Popen[bytes]:
            command = [sys.executable, "-m", "coterie", *words]
            process = subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL)
            running.append(process)
            return process

        try:
            yield start
        finally:
            for process in running:
                process.terminate()
            for process in running:
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()


def toml(tree: Mapping[str, Any]) -> str:
    """Tables of plain values as TOML; for such values JSON is valid TOML."""
    lines = []
    for table, values in tree.items():
        lines.append(f"[{table}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    return "\n".join([*lines, ""])


# --- the comparison -----------------------------------------------------------------------------


def made_with(tree: Path, case: Tree) -> Tree:
    """The outcome of a run with the package in the given tree."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="two-commits-") as folder:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).resolve()), "--case", json.dumps(case)],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"error": " ".join(done.stderr.strip().splitlines()[-1:])}
    outcome: Tree = json.loads(lines[-1])
    return outcome


def differences(before: Any, after: Any, place: str = "") -> Iterator[str]:
    """Where two outcomes differ, by path."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted({*before, *after}):
            yield from differences(before.get(key), after.get(key), f"{place}.{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, pair in enumerate(zip(before, after, strict=True)):
            yield from differences(*pair, f"{place}[{number}]")
    elif before != after:
        yield f"{place.lstrip('.')}: {before} before, {after} now"


def told(name: str, before: Tree, after: Tree) -> tuple[bool, list[str]]:
    """Whether a run is the same with both, and the lines that say so."""
    if "error" in before or "error" in after:
        lines = [
            f"{when}: {row['error']}"
            for when, row in (("before", before), ("now", after))
            if "error" in row
        ]
        return False, [f"FAILED  {name}", *(f"        {line}" for line in lines)]
    header = [sum(map(sum, row.pop("header"))) for row in (before, after)]
    found = list(differences(before, after))
    lines = [f"{'differs' if found else 'same   '} {name}"]
    lines += [f"        {line}" for line in found[:5]]
    if len(found) > 5:
        lines.append(f"        and {len(found) - 5} more")
    if header[0] != header[1]:
        lines.append(f"        bytes of headers: {header[0]} before, {header[1]} now")
    return not found, lines


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """The tree of a commit, in its own folder."""
    top = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory(prefix="two-commits-") as folder:
        place = Path(folder) / "tree"
        git = ["git", "-C", str(top), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(place), commit], check=True)
        try:
            yield place
        finally:
            subprocess.run([*git, "remove", "--force", str(place)], check=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", help="the commit to compare with")
    parser.add_argument("--engines", default="loop,pool,ray,flower")
    parser.add_argument(
        "--only", action="append", default=[], help="runs whose names have this in them; repeatable"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--list", action="store_true", help="name the runs, and run nothing")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if not (asked.base or asked.list or asked.case):
        parser.error("--base: which commit to compare with?")
    return asked


def main() -> int:
    asked = arguments()
    if asked.case:
        with tempfile.TemporaryDirectory(prefix="two-commits-") as folder:
            print(json.dumps(outcome(json.loads(asked.case), Path(folder)), default=str))
        return 0
    some = cases(asked.engines.split(","), asked.only)
    if asked.list:
        print("\n".join(case["name"] for case in some))
        return 0
    here = Path(__file__).resolve().parents[1]
    wrong = 0
    with worktree(asked.base) as base, ThreadPoolExecutor(asked.jobs) as pool:

        def both(case: Tree) -> tuple[bool, list[str]]:
            return told(case["name"], made_with(base, case), made_with(here, case))

        for same, lines in pool.map(both, some):
            wrong += not same
            print("\n".join(lines), flush=True)
    print(f"{len(some) - wrong} of {len(some)} runs are the same with both commits")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
