"""Trained samples per second of the pool and Ray engines against bare PyTorch loops.

Fashion-MNIST, LeNet-5, 100 clients, 10 a round, 2 epochs, batch 10, momentum 0.9. The reference is
one process per core, each a bare single-threaded loop (nn.Module, torch.optim.SGD, tensors in RAM,
no DataLoader) over its share of the same clients. All are measured in the same run, in turn round
by round, so that a noisy machine disturbs them alike. The last line is the ratio.

    python benchmarks/throughput.py --folder DATA          # the ratio, and the cost of scoring
    python benchmarks/throughput.py --folder DATA --ray    # and Ray's samples against the pool's
    python benchmarks/throughput.py --folder DATA --memory # peak memory with 1,000 clients
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing as mp
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from coterie.channel.channel import Channel
from coterie.channel.wire import Wire
from coterie.core.method import Round
from coterie.data import Population
from coterie.engines.pool import Pool
from coterie.engines.ray import RayEngine
from coterie.engines.workers import available_cores
from coterie.experiment.config import experiment_of, parse, population_of
from coterie.experiment.experiment import Experiment, cohort

EPOCHS, BATCH, LR, MOMENTUM = 2, 10, 0.01, 0.9


def configuration(folder: str | None, clients: int, cohort_count: int, workers: int) -> dict:
    return {
        "data": {"set": "fashion-mnist", "folder": folder, "clients": clients},
        "partition": {"name": "iid"},
        "model": {"name": "lenet5"},
        "method": {"name": "fedavg"},
        "train": {"epochs": EPOCHS, "batch_size": BATCH, "lr": LR, "momentum": MOMENTUM},
        "run": {"cohort": cohort_count, "workers": workers, "rounds": 1},
    }


class PlainLeNet5(nn.Module):
    """LeNet-5 in plain PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.classifier = nn.Sequential(
            nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x))


def bare_loop(x: torch.Tensor, y: torch.Tensor, model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    criterion = nn.CrossEntropyLoss()
    for _ in range(EPOCHS):
        order = torch.randperm(len(y))
        for i in range(0, len(y), BATCH):
            rows = order[i : i + BATCH]
            optimizer.zero_grad()
            criterion(model(x[rows]), y[rows]).backward()
            optimizer.step()


def bare_worker(pipe, population: Population) -> None:
    torch.set_num_threads(1)
    model = PlainLeNet5()
    start = {k: v.clone() for k, v in model.state_dict().items()}
    data = [(c.train.x.float() / 127.5 - 1, c.train.y) for c in population.clients]
    pipe.send("ready")
    while (clients := pipe.recv()) is not None:
        for c in clients:
            model.load_state_dict(start)
            bare_loop(*data[c], model)
        pipe.send("done")


class Bare:
    """The reference: as many bare loops as cores, with the clients divided evenly."""

    def __init__(self, population: Population, workers: int) -> None:
        self.pipes, self.processes = [], []
        context = mp.get_context("fork")
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=bare_worker, args=(theirs, population), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        for pipe in self.pipes:
            pipe.recv()

    def round(self, clients: list[int]) -> float:
        began = time.perf_counter()
        for i, pipe in enumerate(self.pipes):
            pipe.send(clients[i :: len(self.pipes)])
        for pipe in self.pipes:
            pipe.recv()
        return time.perf_counter() - began

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(None)
            process.join()


class Running:
    """An engine with FedAvg: training, messages and aggregation."""

    def __init__(
        self, experiment: Experiment, workers: int, folder: Path, engine: type = Pool
    ) -> None:
        self.method = experiment.method
        plan = experiment.plan(folder)
        self.engine = engine(plan, workers)
        self.channel = Channel(self.engine, Wire(plan.start.layout))
        self.state = self.method.init(self.channel, experiment.setup(plan.start))
        self.number = 0

    def round(self, clients: list[int]) -> float:
        began = time.perf_counter()
        self.channel.begin(self.number)
        self.state = self.method.round(self.channel, self.state, Round(self.number, clients))
        self.number += 1
        return time.perf_counter() - began

    def score(self) -> float:
        began = time.perf_counter()
        self.channel.score({c: self.method.sends(self.state, c) for c in self.engine.clients}, {})
        return time.perf_counter() - began


def throughput(folder: str | None, rounds: int, workers: int, with_ray: bool) -> None:
    config = parse(configuration(folder, 100, 10, workers))
    population = population_of(config)
    experiment = experiment_of(config, population)
    bare = Bare(population, workers)
    with tempfile.TemporaryDirectory() as scratch:
        pooled = Running(experiment, workers, Path(scratch, "pool"))
        runners: dict[str, Bare | Running] = {"bare": bare, "pool": pooled}
        if with_ray:
            runners["ray"] = Running(experiment, workers, Path(scratch, "ray"), RayEngine)
        times: dict[str, list[float]] = {name: [] for name in (*runners, "score")}
        rates: dict[str, list[float]] = {name: [] for name in runners}
        for number in range(rounds + 1):
            people = cohort(experiment.settings, number, range(100))
            samples = EPOCHS * sum(len(population.clients[c].train) for c in people)
            first = list(runners) if number % 2 else list(runners)[::-1]  # take turns
            taken = {name: runners[name].round(people) for name in first}
            taken["score"] = pooled.score()
            if number == 0:  # warm up
                continue
            for name, seconds in taken.items():
                times[name].append(seconds)
            for name in rates:
                rates[name].append(samples / taken[name])
        for runner in runners.values():
            if isinstance(runner, Running):
                runner.engine.close()
    bare.close()
    for name in runners:
        title = f"{workers} bare loops" if name == "bare" else f"{name}, {workers} workers"
        print(f"{title:22} {statistics.median(rates[name]):8.0f} samples/s (median of {rounds})")
    held = sum(len(c.test) + len(c.val) for c in population.clients)
    extra = statistics.median(s / p for s, p in zip(times["score"], times["pool"], strict=True))
    print(f"scoring all 100 clients ({held} samples) adds {100 * extra:.0f} % to a round")
    if with_ray:
        print(f"ray against pool: ratio {median_ratio(rates['ray'], rates['pool']):.2f}")
    print(f"ratio {median_ratio(rates['pool'], rates['bare']):.2f}")


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    """The median over rounds of one rate by another."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def proportional_memory(pids: list[int]) -> int:
    """The summed PSS of some processes, in bytes."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


def memory(folder: str | None, workers: int) -> None:
    config = parse(configuration(folder, 1000, 100, workers))
    population = population_of(config)
    experiment = experiment_of(config, population)
    peak = 0
    with tempfile.TemporaryDirectory() as scratch:
        pooled = Running(experiment, workers, Path(scratch))
        for number in range(3):
            pooled.round(cohort(experiment.settings, number, range(1000)))
            pooled.score()
            peak = max(peak, proportional_memory([os.getpid(), *pooled.engine.pids]))
        pooled.engine.close()
    print(
        f"1,000 clients, 100 a round: {peak / 1e6:.0f} MB (summed PSS of {workers + 1} processes)"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder",
        default=os.environ.get("COTERIE_DATA"),
        help="the folder of Fashion-MNIST's files (default: COTERIE_DATA, else downloaded)",
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--workers", type=int, default=available_cores())
    parser.add_argument("--ray", action="store_true", help="measure Ray too")
    parser.add_argument("--memory", action="store_true", help="measure memory instead")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # as in a run
    if arguments.memory:
        memory(arguments.folder, arguments.workers)
    else:
        throughput(arguments.folder, arguments.rounds, arguments.workers, arguments.ray)
