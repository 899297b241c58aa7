"""Two small runs written down by hand, for tests of pictures and words."""

import json

from coterie.report.reading import Reading
from coterie.results.rundir import RunDir

NAMES = ["ann", "<b>bob</b>", "cy & co", "dee"]
GROUPS = [["x"] * 4, ["x", "x", "y", "y"], ["x", "x", "y", "z"]]
# A round as a progress display is told of it.
EVENT = {
    "round": 2,
    "groups": [0, 1, None, 1],
    "received": {"accuracy": 0.5, "worst": 0.25},
    "bytes": {"down": 1500, "up": 900},
    "total_bytes": {"down": 3000, "up": 1800},
    "seconds": {"train": 0.25, "score": 0.25},
    "lost": 0,
}
SCORES = [[0.1, 0.2, 0.3, 0.4], [0.5, 0.4, 0.5, 0.6], [0.9, 0.5, 0.7, 0.7]]


def table(own, loss):
    known = sorted(own)
    return {
        "accuracy": sum(own) / len(own),
        "worst": known[0],
        "worst_client": own.index(known[0]),
        "p10": known[0],
        "p50": known[1],
        "p90": known[-1],
        "loss": loss,
        "val": 0.5,
    }


def round_of(number, **more):
    own = SCORES[number - 1]
    return {
        "round": number,
        "cohort": [0, 1, 2, 3],
        "groups": GROUPS[number - 1],
        "bytes": {"down": 1000, "up": 600},
        "total_bytes": {"down": 400 + 1000 * number, "up": 40 + 600 * number},
        "wasted": {"down": 0, "up": 5},
        "total_wasted": {"down": 0, "up": 5 * number},
        "kinds": {"model/<i>": [900, 595], "header": [5, 5]},
        "client_bytes": {"0": [700, 0], "3": [300, 600]},
        "lost": int(number == 2),
        "late": 0,
        "received": table(own, 3.0 - number),
        "client_scores": {"received": own},
        "seconds": {"train": 2.0, "score": 0.5},
        "clock": {
            "computation": 1.0,
            "communication": 2.0,
            "waiting": 0.5,
            "total": 4.0 + 3.5 * number,
        },
        "privacy": {"epsilon": 1.5 * number, "delta": 1e-5},
        **more,
    }


INIT = {
    "round": 0,
    "event": "init",
    "groups": ["x"] * 4,
    "bytes": {"down": 400, "up": 40},
    "clock": {"computation": 4.0, "communication": 0.0, "waiting": 0.0},
    "notes": {
        "clients": [0, 1, 2, 3],
        "distances": [[0, 1, 5, 6], [1, 0, 5, 6], [5, 5, 0, 3], [6, 6, 3, 0]],
        "dendrogram": [[0, 1, 1.0, 2], [2, 3, 3.0, 2], [4, 5, 6.0, 4]],
        "threshold": 4.0,
        "why": "a <i>reason</i>",
        "silhouette": {"2": 0.7, "3": 0.2},
        "evidence": {
            "by": "final-layer",
            "steps": 50,
            "samples": 4000.0,
            "clients": [0, 1, 2, 3],
            "groups": 2,
            "labels": [0, 0, 1, 1],
            "errors": {"1": 0.8, "2": 0.2, "3": 0.3, "4": 0.5},
            "deviations": {"1": 0.1, "2": 0.0, "3": 0.05, "4": 0.1},
            "kappa": {"2": 1.0, "3": 0.5, "4": 0.25},
            "certainty": [0.9, 0.8, 0.7, -0.1],
            "explained": 0.75,
            "decisive": True,
            "enough": True,
            "why": "2 groups are <i>best</i>",
        },
        # The first layer is the same in all clients but the last, the second tells the pairs apart.
        "layer_distances": {
            "clients": [0, 1, 2, 3],
            "layers": {
                "body": [[], [0.0], [0.0, 0.0], [4.0, 4.0, 4.0]],
                "<u>head</u>": [[], [1.0], [5.0, 5.0], [6.0, 6.0, 3.0]],
            },
        },
        "mixing_terms": {
            "clients": [0, 1, 2, 3],
            "samples": [10, 10, 10, 10],
            "effective": [25.0, 25.0, 20.0, 18.0],
            "discrepancy": [1.4, 1.4, 1.2, 1.0],
            "together": [3.0, 3.0, 3.25, 3.75],
            "stream_effective": [26.0, 26.0, 20.0, 18.0],
            "stream_discrepancy": [1.5, 1.3, 1.2, 1.0],
        },
        "mixing": [[0.5, 0.3, 0.1, 0.1], [0.3, 0.5, 0.1, 0.1], [0, 0, 0.6, 0.4], [0, 0, 0.4, 0.6]],
    },
}
DC = {
    1: {"loss": 2.0, "radius": None, "phase": "watch", "gamma": 1.0, "alone": []},
    2: {"loss": 1.0, "radius": 30.0, "phase": "sync", "gamma": 1.0, "alone": []},
    3: {"trial": {"old": 0.9, "new": 0.7, "adopted": True}, "phase": "watch", "gamma": 0.5},
}
# A probe of four clients, of which the third sits between two groups, and a trial of its groups.
EVIDENCE = {
    "by": "final-layer",
    "steps": 50,
    "samples": 120.0,
    "clients": [0, 1, 2, 3],
    "groups": 2,
    "errors": {"1": 1.0, "2": 0.6, "3": 0.58},
    "deviations": {"1": 0.1, "2": 0.05, "3": 0.0},
    "kappa": {"2": 0.8, "3": 0.5},
    "certainty": [0.9, 0.8, -0.25, 0.5],
    "explained": 0.4,
    "decisive": False,
    "enough": True,
    "why": "2 groups predict the clients' other halves with 60% of one mean's error",
}
VERDICT = {
    "cuts": [1, 2, 3, 4],
    "losses": [2.0, 1.5, 1.4, 1.45],
    "errors": [0.2, 0.15, 0.0, 0.1],
    "chosen": 2,
    "clients": 4,
    "why": "2 groups have a validation loss of 1.500, one model has 2.000",
}
OTHER = {"hopkins": 0.7, "shared_layers": 2.0, "tau": 4}
TRIED = {1: {}, 2: {"verdict": VERDICT}, 3: {}}
LAYERS = {"all_due": True, "quiet": {}, "discrepancy": {"x": {"<u>head</u>": 1.0, "body": 3.0}}}


def clients():
    alone = [0.5, 0.6, 0.7, 0.2]
    return [
        {
            "client": str(c),
            "name": NAMES[c],
            "group": GROUPS[-1][c],
            "true_group": str(c // 2),
            "train": "10",
            "bytes_down": str([2500, 0, 0, 900][c]),
            "bytes_up": str([0, 40, 0, 1800][c]),
            "received_accuracy": str(SCORES[-1][c]),
            "adapted_accuracy": str([0.8, 0.8, 0.6, 0.9][c]),
            "alone_accuracy": str(alone[c]),
        }
        for c in range(4)
    ]


RESULT = {
    "method": "fedclust",
    "rounds": 3,
    "stopped": "",
    "judged_by": "accuracy",
    "headline": "received",
    "received": table(SCORES[-1], 0.0),
    "adapted": {"accuracy": 0.775},
    "best_on_validation": {"round": 2, "val": 0.6, "received": {}},
    "exposure": {
        "clients": 4,
        "layers": ["body", "<u>head</u>"],
        "single": {
            "none": {
                "clients": 4,
                "rounds": 1,
                "first": 0,
                "last": 0,
                "arrays": {
                    "final": {
                        "layers": ["<u>head</u>"],
                        "clients": 4,
                        "rounds": 1,
                        "first": 0,
                        "last": 0,
                    }
                },
            },
            "none, averaged on arrival": {
                "clients": 3,
                "rounds": 3,
                "first": 1,
                "last": 3,
                "arrays": {
                    "model": {
                        "layers": ["body", "<u>head</u>"],
                        "clients": 3,
                        "rounds": 3,
                        "first": 1,
                        "last": 3,
                    }
                },
            },
        },
        "sums": {},
        "near": {"least": 3, "count": 0, "by_difference": {}, "examples": []},
        "revealed": [],
        "abandoned": 0,
        "secure": False,
    },
    "privacy": {
        "secure": False,
        "randomness": "simulated",
        "epsilon": 4.0,
        "delta": 1e-5,
        "accountant": "pld",
        "budget": 5.0,
        "adjacency": "x",
    },
}
DATA = {
    "names": NAMES,
    "groups": [0, 0, 1, 1],
    "classes": ["cat", "<s>dog</s>"],
    "labels": [[8, 2], [10, 0], [1, 9], [5, 5]],
}
CONFIG = {
    "method": {"name": "fedclust"},
    "run": {"rounds": 3, "seed": 7},
    "evaluation": {"target": 0.6},
    "privacy": {"epsilon": 5.0},
}


def finished(name="one", **changes):
    """A run that has something for every picture; no method would note all of it."""
    events = [
        INIT,
        *(round_of(n, notes={**OTHER, **DC[n], **TRIED[n], "layers": LAYERS}) for n in (1, 2, 3)),
    ]
    told = {
        "config": CONFIG,
        "events": events,
        "clients": clients(),
        "result": RESULT,
        "data": DATA,
        **changes,
    }
    return Reading(
        name, changes.pop("status", "finished"), **{k: v for k, v in told.items() if k != "status"}
    )


def evidenced(groups=("x", "x", "y", "y"), init=EVIDENCE, verdict=VERDICT, **changes):
    """A run that found its groups by evidence, and tried them in its second round."""
    noted = {
        k: v for k, v in INIT["notes"].items() if k not in ("silhouette", "mixing", "mixing_terms")
    }
    noted |= {"evidence": init, "threshold": None, "why": init["why"]}
    later = list(groups) if len(set(groups)) > 1 else ["x"] * 4
    events = [
        {**INIT, "notes": noted},
        round_of(1, groups=["x"] * 4),
        round_of(2, groups=later, notes={"verdict": verdict} if verdict else {}),
        round_of(3, groups=later),
    ]
    return finished(events=events, **changes)


def going(status="running"):
    """After two of three rounds."""
    return finished(status=status, events=finished().events[:3], clients=(), result={})


def old():
    """Of a version that wrote little: no scores of clients, no kinds, no data."""
    kept = ("round", "groups", "received", "bytes", "total_bytes", "seconds")
    events = [{k: v for k, v in round_of(n).items() if k in kept} for n in (1, 2, 3)]
    return Reading("old", "finished", events=events, result={"method": "fedavg"})


def written(folder, reading, **files):
    """A run as its directory; ``files`` are other contents by field: "events", "result", "data"."""
    run = RunDir(folder)
    run.path.mkdir(parents=True, exist_ok=True)
    run.write_config(reading.config)
    for name in ("events", "sessions"):
        lines = files.get(name, getattr(reading, name))
        getattr(run, name).write_text("".join(json.dumps(e) + "\n" for e in lines))
    for name in ("result", "data"):
        tree = files.get(name, getattr(reading, name))
        if tree:
            getattr(run, name).write_text(json.dumps(tree))
        else:
            getattr(run, name).unlink(missing_ok=True)
    if reading.clients:
        run.write_table(reading.clients)
    return run.path
