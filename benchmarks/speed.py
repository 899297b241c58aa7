"""How fast are rounds, beside bare PyTorch loops and other frameworks, and how far do they scale?

    python benchmarks/speed.py --folder DATA                      # whole rounds and training alone
    python benchmarks/speed.py --folder DATA --work logistic,mlp  # some of the work
    python benchmarks/speed.py --folder DATA --scoring            # what scoring every client adds
    python benchmarks/speed.py --scale 1000,10000,100000          # rounds, start and memory
    python benchmarks/speed.py --groups fedclust,user-centric     # 2,000 clients, 20 rounds
    python benchmarks/speed.py --folder DATA --peers              # Flower's simulation

The reference is one process per core, each a bare single-threaded loop (nn.Module, torch.optim.SGD,
tensors in memory, no DataLoader) over its share of the same clients; it trains, and neither sends,
averages nor saves anything. Coterie's rounds are whole ones, in a run directory with events, ledger
and checkpoints, clients one by one and stacked (``run.batch_clients``). All take turns round by
round, so that a noisy machine disturbs them alike; ratios are medians over rounds, repeated
``--repeats`` times.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import multiprocessing as mp
import os
import shlex
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from greenlet import getcurrent, greenlet
from torch import nn

import coterie
from coterie.data import Population, build_population, load
from coterie.data.population import cut_into_clients
from coterie.engines.workers import available_cores
from coterie.models import make_model
from methods import RESULTS, commit, machine
from throughput import PlainLeNet5, proportional_memory

ROUNDS, WARM_UP = 15, 3


@dataclass(frozen=True)
class Work:
    """Clients, their model and how they train in a round."""

    title: str
    model: str
    clients: int
    samples: int
    cohort: int
    lr: float = 0.01
    momentum: float = 0.5
    method: str = "fedavg"
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def population(self, folder: str | None) -> Population:
        """IID clients of Fashion-MNIST."""
        return build_population(
            load("fashion-mnist", folder),
            clients=self.clients,
            samples=self.clients * self.samples,
            partition="iid",
            seed=0,
        )


LARGE = {"clients": 100, "samples": 600, "cohort": 10}
SMALL = {"clients": 1000, "samples": 60, "cohort": 100}
WORK = {
    "lenet5": Work("LeNet-5, 100 clients × 600, 10 a round", "lenet5", **LARGE),
    "cnn": Work("small CNN, 100 clients × 600, 10 a round", "cnn", **LARGE),
    "logistic": Work("logistic regression, 1,000 × 60, 100 a round", "logistic", **SMALL),
    "mlp": Work("MLP 784-64-10, 1,000 × 60, 100 a round", "mlp", **SMALL),
    "ifca": Work(
        "IFCA k=4, MLP, 1,000 × 60, 100 a round", "mlp", **SMALL, method="ifca", parameters={"k": 4}
    ),
    "ditto": Work("Ditto, MLP, 1,000 × 60, 100 a round", "mlp", **SMALL, method="ditto"),
}
BATCH = 10


# --- the reference ------------------------------------------------------------------------------


def bare_loop(x: torch.Tensor, y: torch.Tensor, model: nn.Module, work: Work) -> None:
    """One epoch on one client's data."""
    optimizer = torch.optim.SGD(model.parameters(), lr=work.lr, momentum=work.momentum)
    criterion = nn.CrossEntropyLoss()
    order = torch.randperm(len(y))
    for i in range(0, len(y), BATCH):
        rows = order[i : i + BATCH]
        optimizer.zero_grad()
        criterion(model(x[rows]), y[rows]).backward()
        optimizer.step()


def bare_worker(pipe: Any, population: Population, work: Work) -> None:
    """Train clients whose numbers arrive, one after another."""
    torch.set_num_threads(1)
    model = (
        PlainLeNet5()
        if work.model == "lenet5"
        else make_model(work.model, population.shape, population.targets)
    )
    start = {k: v.clone() for k, v in model.state_dict().items()}
    data = [(c.train.x.float() / 127.5 - 1, c.train.y) for c in population.clients]
    pipe.send("ready")
    while (clients := pipe.recv()) is not None:
        for client in clients:
            model.load_state_dict(start)
            bare_loop(*data[client], model, work)
        pipe.send("done")


class Runner(Protocol):
    """Something whose rounds can be timed."""

    def round(self, clients: Sequence[int]) -> float:
        """Do a round and return its seconds; the reference trains ``clients``."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class Bare:
    """As many bare loops as cores, with the clients divided evenly."""

    def __init__(self, population: Population, work: Work, workers: int) -> None:
        self.pipes, self.processes = [], []
        context = mp.get_context("fork")
        for _ in range(workers):
            ours, theirs = context.Pipe()
            arguments = (theirs, population, work)
            process = context.Process(target=bare_worker, args=arguments, daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        for pipe in self.pipes:
            pipe.recv()

    def round(self, clients: Sequence[int]) -> float:
        began = time.perf_counter()
        for i, pipe in enumerate(self.pipes):
            pipe.send(list(clients[i :: len(self.pipes)]))
        for pipe in self.pipes:
            pipe.recv()
        return time.perf_counter() - began

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(None)
            process.join()


# --- Coterie ------------------------------------------------------------------------------------


class Stepped:
    """A whole run of ``coterie.simulate`` that waits after each of its rounds."""

    def __init__(self, population: Population, work: Work, folder: Path, **settings: Any) -> None:
        self.events: list[Mapping[str, Any]] = []
        self._main = getcurrent()
        self._run = greenlet(partial(self._all, population, work, folder, settings))
        self._closing = False

    def _all(self, population: Population, work: Work, folder: Path, settings: Any) -> None:
        method = coterie.methods.make(work.method, dict(work.parameters))
        arguments = {
            "rounds": 100_000,
            "cohort": work.cohort,
            "batch_size": BATCH,
            "lr": work.lr,
            "momentum": work.momentum,
            "evaluate_every": 0,
            "directory": folder,
            "watch": self._pause,
            **settings,
        }
        with contextlib.suppress(coterie.errors.Interrupted, KeyboardInterrupt):
            coterie.simulate(population, work.model, method, **arguments)

    def _pause(self, event: Mapping[str, Any]) -> None:
        self.events.append(event)
        self._main.switch()
        if self._closing:
            raise KeyboardInterrupt

    def round(self, clients: Sequence[int] = ()) -> float:
        """The run's next round, whichever clients it selects."""
        began = time.perf_counter()
        self._run.switch()
        return time.perf_counter() - began

    @property
    def cohort(self) -> list[int]:
        """The clients of the last round."""
        return list(self.events[-1]["cohort"])

    @property
    def trained(self) -> float:
        """The seconds that the last round took without scores, events and checkpoints."""
        return float(self.events[-1]["seconds"]["train"])

    def close(self) -> None:
        self._closing = True
        while not self._run.dead:
            self._run.switch()


@contextlib.contextmanager
def runs_of(
    population: Population, work: Work, workers: int, variants: Mapping[str, Mapping[str, Any]]
) -> Iterator[dict[str, Stepped]]:
    """A run for each variant of the settings, side by side."""
    with tempfile.TemporaryDirectory() as scratch:
        runs = {
            name: Stepped(population, work, Path(scratch, name), workers=workers, **settings)
            for name, settings in variants.items()
        }
        try:
            yield runs
        finally:
            for run in runs.values():
                run.close()


def compared(name: str, folder: str | None, rounds: int, workers: int, ray: bool) -> dict[str, Any]:
    """Rounds of one kind of work against the bare loops."""
    work = WORK[name]
    population = work.population(folder)
    bare = Bare(population, work, workers)
    variants: dict[str, dict[str, Any]] = {
        "one by one": {"batch_clients": 1},
        "stacked": {"batch_clients": "auto"},
    }
    if ray:
        variants["ray"] = {"batch_clients": "auto", "engine": "ray"}
    times: dict[str, list[float]] = {}
    with runs_of(population, work, workers, variants) as runs:
        for number in range(WARM_UP + rounds):
            seconds: dict[str, float] = {}
            order = list(runs) if number % 2 else list(runs)[::-1]
            for variant in order:
                run = runs[variant]
                seconds[variant] = run.round()
                seconds[f"{variant}, training"] = run.trained
            seconds["bare"] = bare.round(runs["stacked"].cohort)
            if number >= WARM_UP:
                for key, value in seconds.items():
                    times.setdefault(key, []).append(value)
    bare.close()
    ratios = {
        key: statistics.median(b / s for b, s in zip(times["bare"], taken, strict=True))
        for key, taken in times.items()
        if key != "bare"
    }
    medians = {key: 1000 * statistics.median(taken) for key, taken in times.items()}
    return {"work": name, "ratios": ratios, "milliseconds": medians}


def scoring(name: str, folder: str | None, rounds: int, workers: int) -> dict[str, Any]:
    """What it adds to a round that every client is scored in it."""
    work = WORK[name]
    variants = {
        "unscored": {"batch_clients": "auto"},
        "scored": {"batch_clients": "auto", "evaluate_every": 1},
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    with runs_of(work.population(folder), work, workers, variants) as runs:
        for number in range(WARM_UP + rounds):
            for variant in list(runs) if number % 2 else list(runs)[::-1]:
                seconds = runs[variant].round()
                if number >= WARM_UP:
                    times[variant].append(seconds)
    pairs = list(zip(times["scored"], times["unscored"], strict=True))
    return {
        "work": name,
        "adds_milliseconds": 1000 * statistics.median(s - u for s, u in pairs),
        "adds_percent": 100 * statistics.median(s / u - 1 for s, u in pairs),
    }


# --- scale --------------------------------------------------------------------------------------


def family() -> list[int]:
    """This process and its descendants."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = (entry / "stat").read_text()
                parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    members = [os.getpid()]
    for pid in members:
        members += [child for child, parent in parents.items() if parent == pid]
    return members


class Peak(threading.Thread):
    """Watches how much memory a process and its descendants use together."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes, self._over = 0, threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.5):
            self.bytes = max(self.bytes, proportional_memory(family()))

    def stop(self) -> int:
        self._over.set()
        self.join()
        return self.bytes


def table_of(clients: int, samples: int) -> Population:
    """Clients of a table of 64 features and ten classes."""
    generator = torch.Generator().manual_seed(0)
    count = clients * samples
    x = torch.randn(count, 64, generator=generator)
    y = (x[:, :10] + 0.5 * torch.randn(count, 10, generator=generator)).argmax(1)
    held = max(1, samples // 5)
    sizes = [(samples - held - 1, 1, held)] * clients
    return Population(
        cut_into_clients(x, y, sizes, [f"{i}" for i in range(clients)]),
        kind="table",
        shape=(64,),
        classes=tuple("0123456789"),
        targets=10,
    )


def scaled(clients: int, samples: int, workers: int, evaluated: Any, rounds: int) -> dict[str, Any]:
    """A run of ten rounds of 100 clients among so many."""
    peak, began = Peak(), time.perf_counter()
    peak.start()
    population = table_of(clients, samples)
    built = time.perf_counter() - began
    moments: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        started = time.perf_counter()
        coterie.simulate(
            population,
            model_parameters={"hidden": [64]},
            rounds=rounds,
            cohort=100,
            batch_size=BATCH,
            lr=0.05,
            workers=workers,
            evaluate_clients=evaluated,
            adapt_epochs=0,
            directory=Path(scratch, "run"),
            watch=lambda event: moments.append(time.perf_counter()),
        )
        ended = time.perf_counter()
        events = Path(scratch, "run", "events.jsonl").stat().st_size
    between = [b - a for a, b in itertools.pairwise(moments)]
    return {
        "clients": clients,
        "samples": samples,
        "scored": evaluated,
        "start_seconds": built + moments[0] - started,
        "round_seconds": statistics.median(between),
        "run_seconds": ended - started,
        "peak_mb": peak.stop() / 1e6,
        "events_mb": events / 1e6,
    }


def grouped(method: str, clients: int, samples: int, workers: int, rounds: int) -> dict[str, Any]:
    """A whole run of a method that compares its clients with each other."""
    peak, began = Peak(), time.perf_counter()
    peak.start()
    with tempfile.TemporaryDirectory() as scratch:
        coterie.simulate(
            table_of(clients, samples),
            method=method,
            model_parameters={"hidden": [64]},
            rounds=rounds,
            cohort=100,
            batch_size=BATCH,
            lr=0.05,
            workers=workers,
            adapt_epochs=0,
            directory=Path(scratch, "run"),
        )
    seconds = time.perf_counter() - began
    return {
        "method": method,
        "clients": clients,
        "rounds": rounds,
        "run_seconds": seconds,
        "peak_mb": peak.stop() / 1e6,
    }


def in_process_of_its_own(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of a call in a new process, whose memory nothing else has used."""
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    process = context.Process(target=_put, args=(results, call))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"a measurement failed (exit code {process.exitcode})")
    return results.get()  # type: ignore[no-any-return]


def _put(results: Any, call: Callable[[], dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    results.put(call())


# --- other frameworks ---------------------------------------------------------------------------


def flower_rounds(work: Work, folder: str | None, rounds: int, workers: int) -> list[float]:
    """The seconds of FedAvg's rounds in Flower's simulation, on the same clients."""
    from flwr.client import ClientApp, NumPyClient
    from flwr.common import Context, ndarrays_to_parameters
    from flwr.server import ServerApp, ServerAppComponents, ServerConfig
    from flwr.server.strategy import FedAvg
    from flwr.simulation import run_simulation

    population = work.population(folder)
    model = (
        PlainLeNet5()
        if work.model == "lenet5"
        else make_model(work.model, population.shape, population.targets)
    )
    start = [v.numpy().copy() for v in model.state_dict().values()]
    moments: list[float] = []

    class Client(NumPyClient):  # type: ignore[misc]
        """One client, trained by the bare loop."""

        def __init__(self, number: int) -> None:
            self.data = population.clients[number].train

        def fit(self, parameters: Any, config: Any) -> Any:
            torch.set_num_threads(1)
            names = model.state_dict()
            model.load_state_dict(
                {k: torch.tensor(p) for k, p in zip(names, parameters, strict=True)}
            )
            bare_loop(self.data.x.float() / 127.5 - 1, self.data.y, model, work)
            weights = [v.numpy() for v in model.state_dict().values()]
            return weights, len(self.data), {}

    class Timed(FedAvg):  # type: ignore[misc]
        """FedAvg that notes when each round ends."""

        def aggregate_fit(self, *arguments: Any, **named: Any) -> Any:
            mean = super().aggregate_fit(*arguments, **named)
            moments.append(time.perf_counter())
            return mean

    def client_of(context: Context) -> Any:
        return Client(int(context.node_config["partition-id"])).to_client()

    def server_of(context: Context) -> Any:
        strategy = Timed(
            fraction_fit=work.cohort / work.clients,
            fraction_evaluate=0.0,
            min_fit_clients=work.cohort,
            min_available_clients=work.clients,
            initial_parameters=ndarrays_to_parameters(start),
        )
        return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=rounds + 1))

    run_simulation(
        ServerApp(server_fn=server_of),
        ClientApp(client_fn=client_of),
        num_supernodes=work.clients,
        backend_config={
            "init_args": {"num_cpus": workers, "include_dashboard": False},
            "client_resources": {"num_cpus": 1, "num_gpus": 0},
        },
    )
    return [b - a for a, b in itertools.pairwise(moments)]


def peers(name: str, folder: str | None, rounds: int, workers: int) -> dict[str, Any]:
    """Rounds of FedAvg in Flower's simulation, and Coterie's beside them."""
    if not (importlib.util.find_spec("flwr") and importlib.util.find_spec("ray")):
        return {"work": name, "flower": "not installed (flwr and ray)"}
    work = WORK[name]
    theirs = statistics.median(flower_rounds(work, folder, rounds, workers))
    with runs_of(work.population(folder), work, workers, {"ours": {"batch_clients": "auto"}}) as r:
        ours = statistics.median([r["ours"].round() for _ in range(WARM_UP + rounds)][WARM_UP:])
    return {
        "work": name,
        "flower_milliseconds": 1000 * theirs,
        "coterie_milliseconds": 1000 * ours,
        "flower_over_coterie": theirs / ours,
    }


# --- what is measured ---------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder",
        default=os.environ.get("COTERIE_DATA"),
        help="the folder of Fashion-MNIST's files (default: COTERIE_DATA, else downloaded)",
    )
    parser.add_argument("--work", default="lenet5,cnn,logistic,mlp,ifca,ditto")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=available_cores())
    parser.add_argument("--ray", action="store_true", help="measure the engine ray, too")
    parser.add_argument("--scoring", action="store_true", help="what scoring every client adds")
    parser.add_argument("--scale", default="", help="numbers of clients, such as 1000,10000")
    parser.add_argument("--groups", default="", help="methods that group, such as fedclust")
    parser.add_argument("--peers", action="store_true", help="measure Flower's simulation, too")
    parser.add_argument("--json", type=Path, help=f"keep the figures, as in {RESULTS}/speed.json")
    return parser.parse_args()


def measured(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every figure that was asked for, as it is measured."""
    if asked.groups:
        for method in asked.groups.split(","):
            call = partial(grouped, method, 2000, 60, asked.workers, 20)
            yield in_process_of_its_own(call)
        return
    if asked.scale:
        for clients in map(int, asked.scale.split(",")):
            samples, evaluated = (20, 1000) if clients >= 100_000 else (60, 1.0)
            call = partial(scaled, clients, samples, asked.workers, evaluated, 10)
            yield in_process_of_its_own(call)
        return
    for name in asked.work.split(","):
        if asked.peers:
            yield peers(name, asked.folder, asked.rounds, asked.workers)
            continue
        for _ in range(asked.repeats):
            if asked.scoring:
                yield scoring(name, asked.folder, asked.rounds, asked.workers)
            else:
                yield compared(name, asked.folder, asked.rounds, asked.workers, asked.ray)


def command(asked: argparse.Namespace) -> str:
    """The command that measures the same again, with any folder of the data."""
    words = ["python", "benchmarks/speed.py", "--folder", "DATA"]
    for name, value in vars(asked).items():
        if name not in ("folder", "json") and value not in (None, False):
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return shlex.join(words)


def main() -> None:
    asked = arguments()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # as in a run
    figures = []
    for figure in measured(asked):
        figures.append(figure)
        print(json.dumps(figure), flush=True)
    if asked.json:
        about = {"command": command(asked), "commit": commit(), "machine": machine()}
        about |= {"date": str(date.today()), "torch": torch.__version__, "seed": 0}
        asked.json.write_text(json.dumps({**about, "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
