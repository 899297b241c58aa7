"""Generate made-up patients for four hospitals that differ: a file each, in the folder NAME.

north and east keep a CSV table, south NumPy arrays, west JSON lines in a format of its own.
"""

import csv
import json
from pathlib import Path

import numpy as np

COLUMNS = ("age", "temperature", "pulse", "saturation", "breaths", "diagnosis")
DIAGNOSES = ("asthma", "flu", "healthy", "pneumonia")
CENTRES = np.array(
    [
        [35, 36.8, 90, 94, 21],
        [45, 38.6, 95, 96, 18],
        [50, 36.6, 72, 98, 15],
        [62, 38.9, 105, 91, 24],
    ]
)
SPREAD = np.array([15, 0.5, 10, 2, 3])
MIXES = {  # number of patients, share of each diagnosis; south never sees pneumonia, west no asthma
    "north": (400, (0.1, 0.2, 0.5, 0.2)),
    "south": (150, (0.5, 0.2, 0.3, 0.0)),
    "west": (90, (0.0, 0.5, 0.2, 0.3)),
    "east": (120, (0.3, 0.3, 0.2, 0.2)),
}

for number, (name, (patients, mix)) in enumerate(MIXES.items()):
    rng = np.random.default_rng(number)
    diagnoses = rng.choice(len(DIAGNOSES), patients, p=mix)
    x = (CENTRES[diagnoses] + SPREAD * rng.normal(size=(patients, 5))).round(1)
    y = np.array(DIAGNOSES)[diagnoses]
    rows = [[*values, label] for values, label in zip(x.tolist(), y.tolist(), strict=True)]
    folder = Path(name)
    folder.mkdir(exist_ok=True)
    if name == "south":
        np.savez(folder / "south.npz", x=x, y=y)
    elif name == "west":
        lines = (json.dumps(dict(zip(COLUMNS, row, strict=True))) + "\n" for row in rows)
        (folder / "west.jsonl").write_text("".join(lines))
    else:
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *rows])
