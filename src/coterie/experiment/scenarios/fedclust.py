"""FedClust's experiments: accuracies, what it took to reach a target, and newcomers.

What is doubtful in print is said in a note.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from coterie.experiment.scenarios.printed_tables import (
    DATA,
    SPLITS,
    TITLES,
    figures_of,
    read,
    read_costs,
)
from coterie.experiment.scenarios.scenario import Scenario

_PAPER = "Islam et al., FedClust, ICPP 2024"
_TABLES = {
    "skew20": """
               cifar10     cifar100    fmnist      svhn
    local      79.68±1.32  33.18±0.41  95.68±0.84  80.29±1.61
    fedavg     50.27±2.63  53.67±0.63  77.10±3.29  81.36±0.64
    fedprox    51.60±1.40  54.28±0.76  74.53±2.16  79.64±0.80
    fednova    47.38±2.08  53.90±0.38  71.33±4.50  75.56±3.07
    lg-fedavg  85.49±0.87  54.15±0.29  95.49±0.75  91.59±0.42
    per-fedavg 85.80±0.58  61.29±0.42  95.78±1.28  92.87±1.92
    cfl        51.86±1.31  41.28±1.75  78.44±2.38  73.59±1.86
    ifca       87.19±0.19  70.35±0.28  96.83±0.24  94.76±0.19
    pacfl      88.40±0.48  71.06±0.39  97.46±0.13  95.48±0.27
    fedclust   95.82±0.17  73.38±0.24  97.92±0.18  95.86±0.11
    """,
    "skew30": """
               cifar10     cifar100    fmnist      svhn
    local      66.51±0.92  23.76±0.84  92.51±0.24  68.84±2.86
    fedavg     57.79±1.08  54.79±0.56  79.90±1.81  82.58±0.75
    fedprox    56.92±1.26  53.65±0.60  81.53±1.48  82.91±1.30
    fednova    54.15±1.31  54.11±0.95  78.02±2.08  80.26±1.49
    lg-fedavg  75.42±0.41  36.78±0.68  94.54±0.48  88.07±0.65
    per-fedavg 78.67±0.32  57.02±0.49  92.35±1.70  92.10±1.27
    cfl        52.03±2.84  35.73±2.14  78.38±0.42  74.02±3.90
    ifca       80.21±0.16  66.21±0.21  95.29±0.19  92.87±0.14
    pacfl      82.35±0.27  65.91±0.17  95.43±0.07  93.05±0.18
    fedclust   83.21±0.25  68.33±0.19  95.70±0.09  93.17±0.04
    """,
    "dir0.1": """
               cifar10     cifar100    fmnist      svhn
    local      41.80±2.09  17.56±0.61  70.40±0.86  59.06±1.43
    fedavg     38.25±2.98  45.26±0.47  81.93±0.64  61.26±0.95
    fedprox    42.69±1.47  46.17±0.83  83.32±1.07  62.31±1.72
    fednova    39.52±1.35  46.55±1.54  83.68±1.61  60.53±2.18
    lg-fedavg  48.63±0.42  24.27±0.33  74.39±1.26  73.12±0.76
    per-fedavg 52.83±1.47  34.20±0.29  81.18±1.80  75.07±1.85
    cfl        41.50±0.35  31.62±1.76  74.01±1.19  61.96±1.58
    ifca       50.51±0.61  46.28±0.23  84.57±0.41  74.57±0.40
    pacfl      51.02±0.24  47.58±0.20  85.30±0.28  76.35±0.46
    fedclust   60.25±0.58  49.65±0.17  95.51±0.17  78.23±0.30
    """,
    "newcomers": """
               cifar10     cifar100    fmnist      svhn
    local      83.39±1.35  27.91±1.09  94.45±0.51  90.62±0.81
    fedavg     31.72±2.16  32.26±0.48  78.70±2.12  71.18±3.09
    fedprox    27.74±2.38  32.74±1.77  74.19±4.17  73.44±4.23
    fednova    31.12±1.08  33.53±0.82  73.76±1.85  72.43±2.91
    lg-fedavg  81.58±0.51  11.08±0.25  95.66±0.33  89.59±0.90
    per-fedavg 74.65±1.09  31.40±0.36  92.33±0.86  64.16±1.64
    ifca       85.64±0.54  94.45±0.5   96.63±0.83  94.20±0.15
    pacfl      85.80±0.66  94.45±0.5   97.04±0.54  94.75±0.11
    fedclust   86.78±0.67  97.63±0.29  97.63±0.29  95.19±0.25
    """,
}
_ROUNDS = """
           cifar10 cifar100 fmnist svhn
target     80      50       75     75
fedavg     -       135      200    150
fedprox    -       120      200    200
fednova    -       125      -      150
lg-fedavg  27      -        14     17
per-fedavg 54      110      15     37
cfl        -       -        47     -
ifca       28      43       13     19
pacfl      25      40       13     15
fedclust   13      32       7      9
"""
_MEGABITS = """
           cifar10 cifar100 fmnist svhn
target     70      50       80     80
fedavg     -       4237.37  79.36  71.43
fedprox    -       4237.37  71.43  71.43
fednova    -       3601.98  -      79.36
lg-fedavg  2.11    -        1.26   1.76
per-fedavg 23.81   6356.06  7.54   18.65
cfl        -       -        -      -
ifca       16.66   3495.19  11.30  10.71
pacfl      10.31   1991.60  7.53   8.73
fedclust   8.66    1889.17  4.60   7.11
"""
_SETTINGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "skew20": (
        "tables 1 and 4",
        "20 % of the labels a client",
        {"name": "label-skew", "fraction": 0.2},
    ),
    "skew30": (
        "tables 2 and 5",
        "30 % of the labels a client",
        {"name": "label-skew", "fraction": 0.3},
    ),
    "dir0.1": ("table 3", "Dirichlet 0.1", {"name": "dirichlet", "alpha": 0.1}),
    "newcomers": (
        "table 6 (newcomers)",
        "20 % of the labels a client; 20 of 100 join after 50 rounds",
        {"name": "label-skew", "fraction": 0.2},
    ),
}
_GLOBAL = {"train": {"lr": 0.01, "momentum": 0.9}}
_PER_METHOD: dict[str, dict[str, Any]] = {
    "fedavg": _GLOBAL,
    "fedprox": _GLOBAL,
    "fednova": _GLOBAL,
    "ifca": {"method": {"k": 2}},
    "cfl": {"method": {"eps1": 0.4, "eps2": 0.6, "relative": False}},
}
_NOTES = (
    "The paper's figures are means of three runs.",
    "FedAvg, FedProx, FedNova and CFL: the paper's learning rate is one of 0.1, 0.01 and 0.001, "
    "without saying which; here 0.01.",
    "CFL as in the paper: ε1 = 0.4 and ε2 = 0.6, absolute. IFCA: as many models as in its own "
    "paper; here 2.",
    "The numbers of clusters are those that the paper found best for 20 % of the labels.",
    "How much of a client's data is for testing is not said; here a fifth.",
)
_SCORE = (
    "On Fashion-MNIST with two labels a client FedAvg's figure is near our received score, "
    "FedClust's near our adapted score."
)
_JOIN = (
    "Newcomers are the 20 clients that join after the last round and then train the model that "
    "they were given for 5 epochs.",
    "FedAvg, FedProx and FedNova train one global model, and the paper says of cluster models only "
    "that newcomers personalise them. Their figures, close to each other and 16 to 56 points below "
    "Local's but on CIFAR-100, are what a global model gives without training.",
)
_NEWCOMER_SCORES = dict.fromkeys(("fedavg", "fedprox", "fednova"), "received")
_TARGET = (
    "The paper does not say by which accuracy a target is reached. Ours is the score that a method "
    "is judged by, received for all but Per-FedAvg, after every round; with --set "
    "evaluation.adapt_every=1 also the adapted score, which takes much longer.",
)
_A_ROUND = "of 32 bits, down and up, for 10 clients a round, divided by all 100 clients"
_LENET = (
    f"FedAvg's are whole multiples of 0.3968: the 62,006 numbers of LeNet-5 on colour images, "
    f"{_A_ROUND}; IFCA's fit two models down and one up."
)
_COUNTED = {
    "cifar10": _LENET,
    "cifar100": "FedAvg's, FedProx's, FedNova's and Per-FedAvg's are 100, 100, 85 and 150 times "
    f"42.37: about 6.62 million numbers, as many as ResNet-9 has, {_A_ROUND}.",
    "fmnist": f"{_LENET} On Fashion-MNIST's grey images ours has 61,706 numbers, so a round of "
    "ours is 0.3949.",
    "svhn": _LENET,
}
"""What the paper's megabits fit, by data set."""
_DOUBTS = {
    "fmnist-dir0.1": "FedClust's 95.51 is ten points above every other method of its column: "
    "perhaps a misprint.",
    "cifar100-newcomers": "The figures of IFCA, PACFL and FedClust seem to be those of "
    "Fashion-MNIST's column: far above what table 1 has for CIFAR-100.",
}


def _costs(setting: str, short: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What the paper's methods took to reach a target, as fields of a scenario, and notes."""
    if setting == "skew20":
        target, rounds = read_costs(_ROUNDS)[short]
        return {"target": target, "rounds_to_target": rounds}, _TARGET
    if setting == "skew30":
        target, megabits = read_costs(_MEGABITS)[short]
        counted = (
            f"The paper does not say what its megabits count. {_COUNTED[short]} So ours are "
            "counted: down and up, exchanges before the first round included, a mean over all "
            "clients."
        )
        notes = (*_TARGET, counted)
        return {"target": target, "megabits_to_target": megabits}, notes
    return {}, ()


def fedclust() -> Iterator[Scenario]:
    """FedClust: four data sets, three divisions, and newcomers."""
    for setting, (where, words, partition) in _SETTINGS.items():
        for short, cells in read(_TABLES[setting]).items():
            joins = setting == "newcomers"
            doubt = _DOUBTS.get(f"{short}-{setting}")
            method = {"name": "fedclust", "clusters": 4 if short == "fmnist" else 2}
            costs, how_counted = _costs(setting, short)
            yield Scenario(
                name=f"fedclust/{short}-{setting}",
                description=f"{TITLES[short]}, {words}",
                paper=_PAPER,
                table=where,
                config={
                    "data": {"set": DATA[short], "clients": 100, **SPLITS},
                    "partition": partition,
                    "model": {"name": "resnet9" if short == "cifar100" else "lenet5"},
                    "method": {**method, "linkage": "average"},
                    "train": {"epochs": 10, "batch_size": 10, "lr": 0.01, "momentum": 0.5},
                    "run": {
                        "rounds": 50 if joins else 200,
                        "cohort": 0.1,
                        **({"holdout": 20, "admit_epochs": 5} if joins else {}),
                    },
                    "evaluation": {"target": costs["target"]} if costs else {"every": 5},
                },
                **figures_of(cells),
                **costs,
                score="adapted" if joins else "unknown",
                scores=_NEWCOMER_SCORES if joins else {},
                per_method=_PER_METHOD,
                notes=(
                    *_NOTES,
                    *(_JOIN if joins else [_SCORE]),
                    *how_counted,
                    *([doubt] if doubt else []),
                ),
            )
