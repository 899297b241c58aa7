"""Make the pictures of docs/images: the report and the live page, light and dark, wide and narrow.

    .venv/bin/python docs/screenshots.py --folder DATA

DATA holds Fashion-MNIST's four files, or a folder ``fashion-mnist`` with them; without ``--folder``
they are downloaded. The runs are real: DC-PFL, FedClust and FedAvg on 20 clients; with ``--runs
DIR`` they are kept, and those that are there are not done again. The live page is that of
``coterie watch`` while one of them goes on. It needs playwright and a Chromium or Chrome of the
system (on Debian ``apt-get install chromium``).
"""

from __future__ import annotations

import argparse
import io
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from coterie.report.html import write_report
from coterie.report.reading import read_run

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))
from browsing import DESKTOP, PHONE, browser, opened, why_not  # noqa: E402

OUT = HERE / "images"
COTERIE = [sys.executable, "-m", "coterie"]
COMMON = "--data fashion-mnist --clients 20 --seed 0 --set data.samples=6000 --clock links --alone"
SPLIT = "--partition primary-secondary --model cnn5 --lr 0.05 --momentum 0.5 --epochs 5 --rounds 60"
RUNS = {  # each is `coterie run` with COMMON and these
    "dc-pfl": f"{SPLIT} --method dc-pfl --set evaluation.adapt_every=5",
    "fedavg": f"{SPLIT} --method fedavg",
    "fedclust": f"{SPLIT} --method fedclust --set method.warmup_epochs=5",
}
VIEWS = {
    "desktop-light": (False, DESKTOP),
    "desktop-dark": (True, DESKTOP),
    "phone-light": (False, PHONE),
    "phone-dark": (True, PHONE),
}
# What is shown of the report: from the top, with the pictures that fit.
TALL = {"desktop": 1900, "phone": 1500}


def command(name: str, runs: Path, folder: Path | None) -> list[str]:
    """The command of a run."""
    data = ["--folder", str(folder)] if folder else []
    own = [*COMMON.split(), *RUNS[name].split(), *data]
    return [*COTERIE, "run", *own, "--quiet", "--dir", str(runs / name)]


def make_runs(runs: Path, folder: Path | None) -> None:
    """Those that are not there yet, one after the other."""
    for name in RUNS:
        if not (runs / name / "result.json").exists():
            subprocess.run(command(name, runs, folder), check=True, stdout=subprocess.DEVNULL)


@contextmanager
def watched(folder: Path) -> Iterator[str]:
    """The address of a live page of this folder."""
    with subprocess.Popen(
        [*COTERIE, "watch", str(folder), "--port", "0"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split(" at ")[-1].strip()
        finally:
            process.send_signal(signal.SIGINT)


def keep(page: Any, path: Path) -> None:
    """What is in the window, in few colours: a quarter of the bytes, and nobody sees it."""
    picture = Image.open(io.BytesIO(page.screenshot()))
    picture.convert("RGB").quantize(192, dither=Image.Dither.NONE).save(path, optimize=True)


def shoot_report(shown: Any, path: Path) -> None:
    """The report in all views."""
    for name, (dark, size) in VIEWS.items():
        tall = {**size, "height": TALL[name.partition("-")[0]]}
        with opened(shown, path.as_uri(), dark, tall) as seen:
            seen.page.evaluate("() => window.coterie.drawAll()")
            keep(seen.page, OUT / f"report-{name}.png")


def shoot_live(shown: Any, runs: Path, folder: Path | None) -> None:
    """The live page in all views, while a run goes on."""
    going = runs / "going"
    own = [*command("dc-pfl", runs, folder)[:-1], str(going), "--engine", "loop"]
    process = subprocess.Popen(own, stdout=subprocess.DEVNULL)
    try:
        while len(read_run(going).rounds if (going / "config.toml").exists() else ()) < 25:
            if process.poll() is not None:
                raise SystemExit(f"the run in {going} ended too early")
            time.sleep(0.2)
        with watched(runs) as address:
            base, _, token = address.partition("/#")
            for name, (dark, size) in VIEWS.items():
                with opened(shown, address, dark, size) as seen:
                    keep(seen.page, OUT / f"watch-list-{name}.png")
                with opened(shown, f"{base}/run/going#{token}", dark, size) as seen:
                    seen.page.evaluate("() => window.coterie.drawAll()")
                    keep(seen.page, OUT / f"watch-{name}.png")
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Make the runs, then the pictures."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--folder", type=Path, help="where the data set's files are")
    options.add_argument("--runs", type=Path, help="where to keep the runs")
    given = options.parse_args()
    if reason := why_not():
        raise SystemExit(reason)
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, browser() as shown:
        runs = given.runs or Path(scratch)
        make_runs(runs, given.folder)
        shoot_report(shown, write_report([runs / "dc-pfl"], Path(scratch) / "report.html"))
        shoot_live(shown, runs, given.folder)


if __name__ == "__main__":
    main()
