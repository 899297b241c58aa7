"""Experiments that a survey of federated learning quotes, as far as it tells them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from coterie.experiment.scenarios.printed_tables import DATA, SPLITS, TITLES, figures_of, read
from coterie.experiment.scenarios.scenario import Scenario

_SURVEY = "Ahmad, A Survey on Federated Learning Improvement Techniques"


def survey() -> Iterator[Scenario]:
    """Adaptive clustering, k-FED and FedFomo."""
    yield _adaptive()
    yield from _k_fed()
    yield from _fedfomo()


_ROUNDS = 200  # at most: a clustering every so many rounds is one that is never repeated
_STATIC = f"adaptive every={_ROUNDS}"


def _adaptive() -> Scenario:
    return Scenario(
        name="survey/adaptive-cifar10",
        description="CIFAR-10, adaptive clustering against one model and fixed groups",
        paper=f"Gong et al., Adaptive Client Clustering, 2024, as quoted by {_SURVEY}",
        table="table I",
        config={
            "data": {"set": "cifar-10", "clients": 100, **SPLITS},
            "partition": {"name": "dirichlet", "alpha": 0.1},
            "model": {"name": "cnn"},
            "method": {"name": "adaptive", "threshold": 0.3, "every": 5},
            "train": {"epochs": 5, "batch_size": 32, "lr": 0.01, "momentum": 0.5},
            "run": {"rounds": _ROUNDS, "cohort": 0.1},
            "stop": {"patience": 20, "gain": 0.001},
        },
        figures={"fedavg": 0.5720, _STATIC: 0.6400, "adaptive": 0.6650},
        rounds_to_target={"fedavg": 120, _STATIC: 95, "adaptive": 80},
        notes=(
            "The survey tells the data set, and that the division is not IID, but neither the "
            "clients nor the division, the model, the training or the threshold. Here 100 clients, "
            "10 a round, Dirichlet 0.1, which makes them unequal in size too, the model cnn, and "
            "T = 0.3.",
            f"Static Clustering is taken for the same method with every={_ROUNDS}: clients are "
            "clustered in the first round and never again.",
            "What the survey's rounds are counted to is not said. Here a run ends when the "
            "validation score has not risen by more than 0.1 point in 20 rounds, after "
            f"{_ROUNDS} at the latest: compare with the rounds of the run.",
        ),
    )


_MIXTURES = {(100, 16): (1.0, 0.0), (300, 64): (0.9882, 0.0070), (300, 100): (0.9840, 0.0080)}


def _k_fed() -> Iterator[Scenario]:
    """Mixtures in d dimensions of k components; each client holds √k of them."""
    for (d, k), (figure, spread) in _MIXTURES.items():
        own = round(k**0.5)
        options = {"components": k, "dimensions": d, "samples": 3000 * own, "standardize": False}
        yield Scenario(
            name=f"survey/k-fed-d{d}-k{k}",
            description=f"a mixture of {k} Gaussians in {d} dimensions, {own} on a client",
            paper=f"Dennis et al., Heterogeneity for the Win, ICML 2021, as quoted by {_SURVEY}",
            table="table II",
            config={
                "data": {"set": "mixture", "clients": 100, "options": options, **SPLITS},
                "partition": {"name": "label-skew", "fraction": own / k},
                "model": {"name": "logistic"},
                "method": {"name": "k-fed", "k": k},
                "train": {"epochs": 1, "batch_size": 32, "lr": 0.01, "momentum": 0.0},
                "run": {"rounds": 5, "cohort": 1.0},
            },
            figures={"k-fed": figure},
            spread={"k-fed": spread},
            score="clustering",
            notes=(
                "The right cluster is that of a sample's component; benchmarks/kfed_table.py has "
                "k-FED's shares on mixtures of the same kind. A run groups clients and trains "
                "models for them: it scores how well components are told apart by a linear model.",
                "Neither the separation of the components nor the clients are told; here the "
                "closest two means are 10 standard deviations apart, and 100 clients hold about "
                f"30 samples of each of their {own} components.",
                "Another --seed divides the same samples anew; --set data.options.seed=1 draws "
                "others.",
            ),
        )


_FEDFOMO = """
           cifar10 cifar100
fedavg     53.08   23.11
fedprox    52.92   39.79
per-fedavg 72.40   39.80
fedfomo    92.10   64.06
"""
_FEDFOMO_NOTES: dict[str, tuple[str, ...]] = {
    "cifar10": (),
    "cifar100": (
        "The table's second column is headed Accuracy, without a word on the data. It is taken for "
        "CIFAR-100, which the text names beside CIFAR-10; the caption names CIFAR-10 only, and it "
        "could also be the accuracy outside of the clients' own distributions.",
    ),
}


def _fedfomo() -> Iterator[Scenario]:
    for short, cells in read(_FEDFOMO).items():
        partition: dict[str, Any] = {"name": "label-skew", "fraction": 0.2, "groups": 5}
        yield Scenario(
            name=f"survey/fedfomo-{short}",
            description=f"{TITLES[short]}, five groups of clients with 20 % of the labels each",
            paper=f"Zhang et al., FedFomo, ICLR 2021, as quoted by {_SURVEY}",
            table="table IV",
            config={
                "data": {"set": DATA[short], "clients": 15, **SPLITS},
                "partition": partition,
                "model": {"name": "cnn"},
                "method": {"name": "fedfomo", "m": 5},
                "train": {"epochs": 5, "batch_size": 32, "lr": 0.01, "momentum": 0.5},
                "run": {"rounds": 100, "cohort": 1.0},
            },
            **figures_of(cells),
            notes=(
                "The survey tells the data and that clients differ very much, but neither how many "
                "there are nor the division, the model or the training. Here 15 clients in five "
                "groups of different labels, all in every round, the model cnn, and 5 models for "
                "each client.",
                "FedFomo's received score is that of the mixture, Per-FedAvg's adapted score that "
                "after its own steps.",
                *_FEDFOMO_NOTES[short],
            ),
        )
