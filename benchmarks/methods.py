"""All methods on one set-up: a table with scores, bytes and seconds.

    python benchmarks/methods.py --folder DATA    # Fashion-MNIST, label skew 20 %: within an hour
    python benchmarks/methods.py --set digits     # digits in four rotations: some minutes

Each is one ``coterie compare --methods all``: 20 clients, all of them in each of 20 rounds of 2
epochs, SGD lr 0.05. There is no momentum, because SCAFFOLD does not allow for it; as it diverges at
that rate where clients have few labels, it has a second row with lr 0.01.

- fashion: FedClust's partition and model (LeNet-5), but 20,000 of the 60,000 images: with all of
  them FedAvg alone takes two minutes on two cores, and all methods two hours. 1,000 of the official
  test images, without labels, are the server's. Batches of 32.
- digits: four groups have their images rotated by different multiples of 90°, so the true groups
  are known; an MLP. 200 images, without labels, are the server's. Batches of 10.

The runs are kept in a folder; call the script again to continue after an interruption. The figures
go to ``benchmarks/results/methods_SET.json`` and ``.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import torch

from coterie.engines.workers import available_cores
from coterie.errors import CoterieError
from coterie.experiment.signals import stoppable
from coterie.report.tables import left_out, percent, size

RESULTS = Path(__file__).parent / "results"
COMMON = "--clients 20 --rounds 20 --epochs 2 --lr 0.05 --momentum 0"
SETS = {
    "fashion": "--data fashion-mnist --set data.samples=20000 --set data.public=1000 "
    "--partition label-skew --set partition.fraction=0.2 --model lenet5 --batch-size 32",
    "digits": "--data digits --set data.public=200 --shift rotation --set shift.groups=4 "
    "--model mlp --batch-size 10",
}
# Where clients have two labels each, SCAFFOLD diverges at the common rate: run it again with less.
METHODS = "all,scaffold:train.lr=0.01,per-fedavg:alpha=0.05"
TITLES = {"fashion": "Fashion-MNIST, label skew 20 %", "digits": "Digits in four rotations"}
COLUMNS = (
    *("received %", "adapted %", "worst client %", "over local", "better off", "groups"),
    *("agreement", "bytes", "seconds", "server sees"),
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", choices=SETS, default="fashion", dest="name")
    parser.add_argument(
        "--folder",
        default=os.environ.get("COTERIE_DATA"),
        help="the folder of Fashion-MNIST's files (default: COTERIE_DATA, else downloaded)",
    )
    parser.add_argument("--methods", default=METHODS, help="as for coterie compare")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, help="where to keep the runs (default: runs/bench-…)")
    parser.add_argument(
        "--resume", action="store_true", help="continue; never start from the beginning"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the figures go")
    asked = parser.parse_args()
    if asked.dir is None:
        asked.dir = Path("runs", "bench-methods" + "-digits" * (asked.name == "digits"))
    if asked.resume and not begun(asked.dir):
        parser.error(f"--resume: there is no comparison in {asked.dir}")
    return asked


def begun(place: Path) -> bool:
    return (place / "comparison.toml").exists()


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Start or resume the comparison; settings, commits and time are kept in a file beside it."""
    note = asked.dir.with_suffix(".json")
    settings = f"{SETS[asked.name]} {COMMON} --seed {asked.seed} --methods {asked.methods}"
    about = {"settings": settings, "seed": asked.seed, "commits": [], "wall_seconds": 0.0}
    words = [*settings.split(), "--dir", str(asked.dir)]
    if asked.name == "fashion" and asked.folder:
        words += ["--folder", asked.folder]
    if begun(asked.dir):
        about |= json.loads(note.read_text()) if note.exists() else {}
        words = ["--resume", str(asked.dir)]
    about["commits"] = list(dict.fromkeys([*about["commits"], commit()]))
    note.parent.mkdir(parents=True, exist_ok=True)
    before, began = about["wall_seconds"], time.perf_counter()
    note.write_text(json.dumps({**about, "wall_seconds": None}))  # what remains if this is killed
    try:
        subprocess.run([sys.executable, "-m", "coterie", "compare", *words], check=True)
    finally:
        if before is not None:
            about["wall_seconds"] = round(before + time.perf_counter() - began, 1)
        note.write_text(json.dumps(about))
    return about


def as_page(title: str, kept: dict, table: list[str], notes: list[str]) -> str:
    """Figures as a page: the command, the table, what there is to say, and the machine."""
    machine = f"- {kept['machine']}; {kept['seconds'] / 60:.1f} minutes of rounds"
    parts = [f"# {title}", f"```sh\n{kept['command']}\n```"]
    return "\n\n".join([*parts, "\n".join(table), "\n".join([*notes, machine])]) + "\n"


def ended(work: Callable[[], Any]) -> tuple[Any, int]:
    """The result of work that can be stopped and resumed; or None, and the exit code."""
    try:
        with stoppable():
            return work(), 0
    except KeyboardInterrupt:
        print("stopped: call it again to continue", file=sys.stderr)
        return None, 130
    except CoterieError as error:
        print(error, file=sys.stderr)
        return None, error.exit_code


def commit() -> str:
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=RESULTS.parent,
        capture_output=True,
        text=True,
    )
    return asked.stdout.strip() or "unknown"


def machine() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return f"{available_cores()} cores of {[*names, platform.machine()][0]}, {memory:.0f} GB"


def page(title: str, kept: Mapping[str, Any]) -> str:
    rows = [f"| method | {' | '.join(COLUMNS)} |", f"|---|{'---:|' * (len(COLUMNS) - 1)}---|"]
    for row in kept["rows"]:
        gain, better = row["gain"], row["better"]
        cells = [percent(row[key]) for key in ("received", "adapted", "worst")]
        cells += ["–" if gain is None else f"{100 * gain:+.1f}"]
        cells += ["–" if better is None else f"{better}/{row['compared']}", str(row["groups"])]
        cells += ["–" if row["agreement"] is None else f"{row['agreement']:.2f}"]
        cells += [size(row["bytes"], digits=1), f"{row['seconds']:.1f}", row["sees"]]
        rows.append(f"| {row['method']} | {' | '.join(cells)} |")
    rounds, wall = sum(row["seconds"] for row in kept["rows"]), kept["wall_seconds"]
    duration = f"{rounds / 60:.1f} minutes of rounds"
    duration += f", {wall / 60:.1f} minutes in all" if wall else "; it was killed in between"
    told = [
        f"- commit {', '.join(kept['commits'])}, seed {kept['seed']}, {kept['date']}, torch "
        f"{kept['torch']}",
        f"- {kept['machine']}; {duration}",
        *(f"- {line}" for line in left_out(kept["left_out"])),
    ]
    parts = [f"# {title}", f"```sh\n{kept['command']}\n```", "\n".join(rows), "\n".join(told)]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    asked = arguments()
    try:
        about = run(asked)
    except subprocess.CalledProcessError as ended:
        return ended.returncode  # the command has printed why
    except KeyboardInterrupt:
        return 130
    folder = " --folder DATA" * (asked.name == "fashion")
    kept = {
        "command": f"coterie compare {about.pop('settings')}{folder}",
        "made_by": f"python benchmarks/methods.py --set {asked.name}{folder}",
        **about,
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "machine": machine(),
        **json.loads((asked.dir / "comparison.json").read_text()),
    }
    asked.results.mkdir(parents=True, exist_ok=True)
    target = asked.results / f"methods_{asked.name}"
    target.with_suffix(".json").write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    target.with_suffix(".md").write_text(page(TITLES[asked.name], kept))
    print(f"figures in {target}.json and .md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
