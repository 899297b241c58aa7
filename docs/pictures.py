"""Make the pictures of docs/methods from real runs on Fashion-MNIST.

    OMP_NUM_THREADS=1 .venv/bin/python docs/pictures.py --folder DATA

DATA holds Fashion-MNIST's four files, or a folder ``fashion-mnist`` with them; without ``--folder``
they are downloaded. Each run is the command that its page shows. With ``--runs DIR`` the runs are
kept, and a run that is already there is not done again; ``--only`` makes some of the pictures. All
of it takes about ten minutes on one core.

Writing PNG files needs two things that Coterie itself does not: kaleido (``.venv/bin/pip install
kaleido``) and a Chrome or Chromium that it can find (on Debian ``apt-get install chromium``).
"""

from __future__ import annotations

import argparse
import io
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from coterie.report import figures
from coterie.report.figures import verdict as verdicts
from coterie.results.rundir import RunDir

Events = list[dict[str, Any]]
OUT = Path(__file__).parent / "methods" / "pictures"
COMMON = "--data fashion-mnist --clients 20 --seed 0 --engine loop"
PERMUTED = "--shift label-permutation --set data.samples=6000 --lr 0.05 --momentum 0.5"
PRIMARY = (
    "--partition primary-secondary --set data.samples=6000 --model cnn5 --lr 0.05 --momentum 0.5"
)
TSDP = (
    "--method fedtsdp --set data.samples=12000 --epochs 2 --batch-size 50 "
    "--lr 0.05 --momentum 0.5 --set train.lr_decay=0.95 --rounds 60"
)
TSDP_PAPER = (
    f"{TSDP} --set data.public=10000 --set method.eps_outputs=0.15 --set method.eps_weights=3.5 "
    "--set method.shrink_at=clustering"
)
RUNS = {  # each is `coterie run` with COMMON and these
    "fedclust": f"{PERMUTED} --method fedclust --epochs 5 --rounds 20",
    "user-centric": f"{PERMUTED} --method user-centric --set method.streams=auto --epochs 2 "
    "--rounds 20",
    "user-centric-gradient": f"{PERMUTED} --method user-centric --set method.streams=4 --epochs 2 "
    "--rounds 20",
    "dc-pfl-defaults": f"{PRIMARY} --method dc-pfl --epochs 5 --rounds 60",
    "dc-pfl": f"{PRIMARY} --method dc-pfl --set method.bend=absolute --set method.trial=two-models "
    "--set method.trial_on=training --set method.levels=0.2 --set method.share=0.1 --epochs 5 "
    "--rounds 60",
    "layers": f"{PRIMARY} --method dc-pfl --set method.dynamic=false --epochs 2 --rounds 30",
    "fedtsdp-defaults": f"--partition dirichlet --set partition.alpha=0.2 {TSDP}",
    "fedtsdp": f"--partition dirichlet --set partition.alpha=0.2 {TSDP_PAPER}",
    "fedtsdp-permuted": f"--shift label-permutation {TSDP_PAPER}",
    "fedtsdp-two-classes": f"--partition shards {TSDP_PAPER}",
}


def tree(events: Events) -> Any:
    """The merge tree: FedClust's by the groups of the last round, DC-PFL's with its later cuts."""
    event = noting(events, "dendrogram")
    groups = events[-1]["groups"] if event.get("event") == "init" else None
    return figures.dendrogram(event["notes"], groups, figures.split_levels(events))


def mixing(events: Events) -> Any:
    """The weights, by the groups of the last round."""
    return figures.mixing_matrix(noting(events, "mixing")["notes"], events[-1]["groups"])


def evidence(events: Events) -> Any:
    """Held-out error and reproducibility by number of groups."""
    return figures.evidence_by_number(noting(events, "evidence")["notes"])


def verdict(events: Events) -> Any:
    """The validation losses of the first trial."""
    return verdicts.verdict(noting(events, "verdict")["notes"]["verdict"]).figure()


def noting(events: Events, key: str) -> dict[str, Any]:
    """The first event with this note."""
    return next(e for e in events if key in e.get("notes", {}))


PICTURES: dict[str, tuple[str, Callable[[Events], Any], int]] = {  # run, figure, width
    "fedclust-tree": ("fedclust", tree, 860),
    "fedclust-evidence": ("fedclust", evidence, 860),
    "fedclust-trial": ("fedclust", verdict, 860),
    "user-centric-mixing": ("user-centric", mixing, 680),
    "user-centric-gradient": ("user-centric-gradient", mixing, 680),
    "dc-pfl-defaults-loss": ("dc-pfl-defaults", figures.loss_and_trials, 860),
    "dc-pfl-defaults-trial": ("dc-pfl-defaults", verdict, 860),
    "dc-pfl-loss": ("dc-pfl", figures.loss_and_trials, 860),
    "dc-pfl-tree": ("dc-pfl", tree, 860),
    "dc-pfl-groups": ("dc-pfl", figures.groups_over_rounds, 860),
    "layers": ("layers", figures.layer_intervals, 860),
    "fedtsdp-defaults": ("fedtsdp-defaults", figures.hopkins_and_layers, 860),
    "fedtsdp-hopkins": ("fedtsdp", figures.hopkins_and_layers, 860),
    "fedtsdp-permuted": ("fedtsdp-permuted", figures.hopkins_and_layers, 860),
    "fedtsdp-groups": ("fedtsdp-two-classes", figures.groups_over_rounds, 860),
}


def events_of(name: str, runs: Path, folder: Path | None) -> Events:
    """The events of a run, which is done now if it is not there."""
    run = RunDir(runs / name)
    if not run.result.exists():
        arguments = [*shlex.split(f"{COMMON} {RUNS[name]}"), "--quiet", "--dir", str(run.path)]
        print("coterie run", *arguments, flush=True)
        source = [] if folder is None else ["--folder", str(folder)]
        command = Path(sys.executable).with_name("coterie")
        subprocess.run([str(command), "run", *arguments, *source], check=True)
    return run.read_events()


def write(figure: Any, path: Path, width: int) -> None:
    """A PNG of few colours, which is enough for such pictures and small."""
    image = Image.open(io.BytesIO(figure.to_image("png", width=width, scale=1.5)))
    image.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path} {path.stat().st_size / 1000:.0f} kB", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is needed and draw it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, help="where Fashion-MNIST is")
    parser.add_argument("--runs", type=Path, help="keep runs here (default: a temporary folder)")
    parser.add_argument("--out", type=Path, default=OUT, help="where the pictures go")
    parser.add_argument("--only", nargs="*", choices=list(PICTURES), default=list(PICTURES))
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pictures-") as scratch:
        for name in given.only:
            run, draw, width = PICTURES[name]
            events = events_of(run, given.runs or Path(scratch), given.folder)
            write(draw(events), given.out / f"{name}.png", width)


if __name__ == "__main__":
    main()
