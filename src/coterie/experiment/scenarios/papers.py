"""The experiments of three papers, made from their tables: DC-PFL, FedTSDP, user-centric."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from coterie.experiment.scenarios.printed_tables import DATA, SPLITS, TITLES, figures_of, read
from coterie.experiment.scenarios.scenario import Scenario

# --- DC-PFL ----------------------------------------------------------------------------------

_DC_PFL = "Liu et al., Dynamic Clustering for Personalized Federated Learning (DC-PFL)"
_DC_PFL_TABLES = {
    "cifar10": """
               low   mid   high
    local      75.0  74.3  74.1
    fedavg     80.2  78.4  73.9
    per-fedavg 81.4  79.1  76.1
    clusterfl  81.7  80.0  77.4
    dc-pfl     84.3  82.7  81.7
    dc-pfl:dynamic=false:gamma=0.8 - 79.6 -
    """,
    "fmnist": """
               low   mid   high
    local      81.0  80.8  80.2
    fedavg     87.6  85.2  80.1
    per-fedavg 89.0  87.3  84.5
    clusterfl  90.1  87.9  85.2
    dc-pfl     92.5  91.3  89.6
    dc-pfl:dynamic=false:gamma=0.8 - 85.1 -
    """,
}
_DC_PFL_METHOD = {
    "name": "dc-pfl",
    "alpha": 3,
    "dynamic": True,
    "gamma": 1.0,
    "sleep": 6,
    "start": 5,
}
_DC_PFL_CLOCK = {
    "name": "links",
    "rate_up": 2.0,
    "rate_down": 2.0,
    "compute": "samples",
    "samples_per_second": 1000.0,
}
_DC_PFL_RUN = {
    "cifar10": ("table I", 400, "189 to 389"),
    "fmnist": ("table II", 100, "57 to 91"),
}
_DC_PFL_ABLATIONS = (
    "Figures 7, 9 and 10 have no level; their accuracies of DC-PFL are the table's for mid. The "
    "fixed structure (NoDC) is in the text only: {points} points below; without layer-wise "
    "aggregation (NoLA, alpha=1) the accuracy is said to be similar."
)


def dc_pfl() -> Iterator[Scenario]:
    """DC-PFL: two data sets, three levels of heterogeneity."""
    for short, (where, rounds, converged) in _DC_PFL_RUN.items():
        points = {"cifar10": "3.1", "fmnist": "6.2"}[short]
        for level, cells in read(_DC_PFL_TABLES[short]).items():
            ablations = [_DC_PFL_ABLATIONS.format(points=points)] if level == "mid" else []
            yield Scenario(
                name=f"dc-pfl/{short}-{level}",
                description=f"{TITLES[short]}, a main and a second class, {level} heterogeneity",
                paper=_DC_PFL,
                table=where,
                config={
                    "data": {"set": DATA[short], "clients": 50, **SPLITS},
                    "partition": {"name": "primary-secondary", "level": level},
                    "model": {"name": "cnn5"},
                    "method": _DC_PFL_METHOD,
                    "train": {"epochs": 5, "batch_size": 32, "lr": 0.01, "momentum": 0.0},
                    "run": {"rounds": rounds, "cohort": 1.0},
                    "clock": _DC_PFL_CLOCK,
                    "stop": {"patience": 20, "gain": 0.001},
                },
                **figures_of(cells),
                per_method={"clusterfl": {"method": {"k": 5}}},
                notes=(
                    "The paper's figures are means of three runs.",
                    "The paper does not tell ClusterFL's number of groups; here 5.",
                    "The paper does not tell learning rate and momentum; here 0.01 and 0.",
                    f"The paper stops when training converges, after {converged} rounds; here "
                    "when the validation score has not risen by more than 0.1 point in 20 rounds, "
                    f"after {rounds} at the latest.",
                    "Links have 2 Mbit/s, as in the paper. How fast clients compute is not told; "
                    "here 1,000 samples a second, at which about half of FedAvg's round is "
                    "computation, as in the paper.",
                    "DC-PFL finds groups and lets layers rest by the defaults: by the paper's "
                    "text (bend=absolute, trial=two-models, trial_on=training, levels=0.2, "
                    "share=0.1) groups split whatever the data, and no layer ever rests.",
                    "Equal sizes are the largest that the drawn classes allow.",
                    "The paper's interval τ of 5 epochs is taken for the epochs of a round.",
                    *ablations,
                ),
            )


# --- FedTSDP ---------------------------------------------------------------------------------

_FEDTSDP = "Zhu et al., Federated Two Stage Decoupling (FedTSDP), 2023"
_FEDTSDP_TABLES = {
    ("iid", "cnn"): """
            cifar10 cifar100 svhn
    fedavg  71.79   38.05    91.21
    fedprox 72.37   38.72    91.20
    ditto   72.01   37.75    91.15
    fedper  66.14   19.56    89.85
    cfl     69.95   34.82    90.14
    fedtsdp 72.98   39.19    91.45
    """,
    ("iid", "resnet18"): """
            cifar10 cifar100 svhn
    fedavg  75.33   38.45    93.68
    fedprox 75.66   38.89    93.82
    ditto   74.93   38.18    93.80
    fedper  56.97   18.16    88.76
    cfl     69.95   34.82    90.14
    fedtsdp 76.03   39.74    93.72
    """,
    ("dir0.5", "cnn"): """
            cifar10 cifar100 svhn
    fedavg  69.66   37.97    90.09
    fedprox 69.66   37.70    89.94
    ditto   70.75   37.97    90.22
    fedper  78.47   37.03    92.78
    cfl     66.06   34.17    88.42
    fedtsdp 79.29   39.19    93.49
    """,
    ("dir0.5", "resnet18"): """
            cifar10 cifar100 svhn
    fedavg  71.64   38.94    92.92
    fedprox 69.98   38.75    93.05
    ditto   69.32   38.51    93.44
    fedper  72.70   34.16    92.99
    cfl     65.70   38.18    92.71
    fedtsdp 74.76   43.17    95.31
    """,
    ("dir0.2", "cnn"): """
            cifar10 cifar100 svhn
    fedavg  67.35   37.97    88.51
    fedprox 67.87   36.83    87.13
    ditto   66.96   38.17    88.36
    fedper  82.59   48.98    94.36
    cfl     73.84   38.07    90.44
    fedtsdp 84.75   54.96    94.87
    """,
    ("dir0.2", "resnet18"): """
            cifar10 cifar100 svhn
    fedavg  63.12   38.62    92.51
    fedprox 62.63   39.22    91.85
    ditto   62.78   37.75    91.46
    fedper  81.83   45.99    95.08
    cfl     75.62   39.25    92.19
    fedtsdp 83.70   46.69    95.57
    """,
    ("two-class", "cnn"): """
            cifar10
    fedavg  62.88
    fedprox 63.63
    fedper  90.22
    ditto   63.59
    cfl     75.63
    fedtsdp 90.49
    """,
    ("two-class", "resnet18"): """
            cifar10
    fedavg  54.31
    fedprox 50.84
    fedper  90.17
    ditto   55.57
    cfl     78.80
    fedtsdp 90.20
    """,
}
_FEDTSDP_SETTINGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "iid": ("table 3", "IID", {"name": "iid"}),
    "dir0.5": ("table 4", "Dirichlet 0.5", {"name": "dirichlet", "alpha": 0.5}),
    "dir0.2": ("table 4", "Dirichlet 0.2", {"name": "dirichlet", "alpha": 0.2}),
    "two-class": ("table 5", "two classes a client", {"name": "shards", "per_client": 2}),
}
_FEDTSDP_METHOD = {
    "name": "fedtsdp",
    "stages": "both",
    "hopkins": 0.65,
    "eps_outputs": 0.15,
    "eps_weights": 3.5,
    "min_points": 2,
    "shrink": 0.98,
    "shrink_at": "clustering",
    "public_batch": 50,
}
_FEDTSDP_TRAIN = {
    "epochs": 2,
    "batch_size": 50,
    "lr": 0.05,
    "momentum": 0.5,
    "lr_decay": 0.95,
}
_FEDTSDP_NOTES = (
    "The paper weights accuracies by clients' test counts: compare with weighted_accuracy of "
    "result.json.",
    "Public data are the official test images, without labels; the size of a public batch (50) "
    "is not told.",
    "A tenth of each client's training data is kept for validation, which the paper does not do.",
    "Parameters of the baselines are not told; here the defaults.",
)
_FEDTSDP_MORE = {
    "two-class": "Two shards a client, as in FedAvg's paper; a client can draw two of one class.",
    "iid": "CFL's figures are printed alike for both models.",
}


def fedtsdp() -> Iterator[Scenario]:
    """FedTSDP: three data sets, four divisions, two models."""
    for (setting, model), table in _FEDTSDP_TABLES.items():
        where, words, partition = _FEDTSDP_SETTINGS[setting]
        for short, cells in read(table).items():
            suffix, title = ("", "CNN") if model == "cnn" else ("-resnet18", "ResNet-18")
            public = 26_032 if short == "svhn" else 10_000
            yield Scenario(
                name=f"fedtsdp/{short}-{setting}{suffix}",
                description=f"{TITLES[short]}, {words}, {title}",
                paper=_FEDTSDP,
                table=where,
                config={
                    "data": {"set": DATA[short], "clients": 20, **SPLITS, "public": public},
                    "partition": partition,
                    "model": {"name": model},
                    "method": _FEDTSDP_METHOD,
                    "train": _FEDTSDP_TRAIN,
                    "run": {"rounds": 200, "cohort": 1.0},
                },
                **figures_of(cells),
                score="received",
                notes=(
                    *_FEDTSDP_NOTES,
                    *([_FEDTSDP_MORE[setting]] if setting in _FEDTSDP_MORE else []),
                ),
            )


# --- user-centric ----------------------------------------------------------------------------

_USER = "Mestoukirdi et al., User-Centric Federated Learning, 2023"
_USER_TABLE = """
                       label     covariate concept
user-centric           79.4±4.2  77.9±2.7  47.7±2.2
user-centric:streams=4 77.8±3.9  79.7±2.5  49.1±1.4
scaffold               77.2±4.0  72.5±2.2  17.5±1.8
ditto                  78.3±3.9  74.1±2.3  44.1±1.4
pfedme                 77.6±4.1  75.2±4.4  46.6±1.5
fedprox                79.6±4.8  72.4±2.4  22.3±2.2
local                  68.2±5.3  62.8±3.3  38.3±1.2
fedavg                 76.7±4.0  70.5±2.2  24.2±2.6
oracle                 -         80.7±1.8  49.5±1.2
"""
_USER_WORST = """
                       label covariate concept
ditto                  72.2  70.7      43.2
fedavg                 68.9  67.5      19.6
oracle                 -     77.4      49.1
cfl                    70.3  76.1      48.6
fedfomo                70.0  73.6      45.5
pfedme                 71.5  70.9      45.3
user-centric           73.2  -         -
user-centric:streams=4 -     76.4      48.8
"""
_USER_TABLES: dict[str, tuple[str, dict[str, Any]]] = {
    "label": (
        "EMNIST, label shift (Dirichlet 0.4)",
        {
            "data": {"set": "emnist", "clients": 20, "samples": 10_000},
            "partition": {"name": "dirichlet", "alpha": 0.4},
            "method": {"variance_batch": 100},
        },
    ),
    "covariate": (
        "EMNIST, label and covariate shift (Dirichlet 8, four rotations)",
        {
            "data": {"set": "emnist", "clients": 100, "samples": 100_000},
            "partition": {"name": "dirichlet", "alpha": 8.0},
            "shift": {"name": "rotation", "groups": 4},
        },
    ),
    "concept": (
        "CIFAR-10, concept shift (four permutations of the labels)",
        {
            "data": {"set": "cifar-10", "clients": 20},
            "partition": {"name": "iid"},
            "shift": {"name": "label-permutation", "groups": 4},
        },
    ),
    "text": (
        "Stack Overflow questions by tag, label shift (Dirichlet 0.4)",
        {
            "data": {"set": "text", "clients": 35, "samples": 16_000},
            "partition": {"name": "dirichlet", "alpha": 0.4},
            "model": {"name": "text"},
            "method": {"streams": 16},
            "train": {"batch_size": 32},
        },
    ),
}
_USER_NOTES = (
    "The paper's figures are means of five runs.",
    "The paper does not tell the number of rounds; here 100.",
    "Weights are first drawn as by the authors: He's rule for convolutions, Glorot's for dense "
    "layers, biases zero.",
    "FedProx and Ditto: the paper reports the best of 0.1, 0.5 and 1 for μ and λ; here 0.1.",
    "pFedMe: 20 epochs and batches of 20; SCAFFOLD: 5 epochs, and here no momentum, which its "
    "correction does not allow for.",
)
_USER_MORE = {
    "text": (
        "The paper has curves only (figure 3), no table.",
        "The batch size for the variance is not told; here a third of a client's data.",
    ),
    "concept": ("Variances are taken over batches of a third of a client's data.",),
    "covariate": (
        "Variances are taken over batches of a third of a client's data.",
        "The paper does not tell EMNIST's split; here balanced, with 47 classes.",
    ),
    "label": (
        "Variances are taken over batches of 100.",
        "The paper does not tell EMNIST's split; here balanced, with 47 classes.",
    ),
}
_NO_QUESTIONS = (
    "the Stack Overflow questions, which are not distributed with Coterie: give a CSV file of "
    "columns text and label with --data text --folder FILE"
)


def user_centric() -> Iterator[Scenario]:
    """User-centric learning: three shifts in images, and tags of texts."""
    figures, worst = read(_USER_TABLE), read(_USER_WORST)
    for name, (words, tables) in _USER_TABLES.items():
        data = {**tables["data"], **SPLITS}
        if data["set"] == "emnist":
            data["options"] = {"split": "balanced"}
        train = {"epochs": 1, "batch_size": 64, "lr": 0.01, "momentum": 0.9}
        method = {"name": "user-centric", "streams": "all", "parallel": False}
        yield Scenario(
            name=f"user-centric/{name}",
            description=words,
            paper=_USER,
            table="figure 3" if name == "text" else "tables I and II",
            config={
                **tables,
                "data": data,
                "model": {"name": "lenet5", "init": "authors", **tables.get("model", {})},
                "method": {**method, **tables.get("method", {})},
                "train": {**train, **tables.get("train", {})},
                "run": {"rounds": 100, "cohort": 1.0},
            },
            **figures_of(figures.get(name, {})),
            worst={m: value for m, (value, _) in worst.get(name, {}).items()},
            per_method={
                "pfedme": {"train": {"epochs": 20, "batch_size": 20}},
                "scaffold": {"train": {"epochs": 5, "momentum": 0.0}},
            },
            missing=_NO_QUESTIONS if name == "text" else None,
            notes=(*_USER_NOTES, *_USER_MORE[name]),
        )
