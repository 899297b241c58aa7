"""Make the pictures of docs/images: the report and the live page, light and dark, wide and narrow.

    .venv/bin/python docs/screenshots.py

The runs are real: methods of ``make demo`` on its clients, so nothing is downloaded. The report is
that of IFCA; the comparisons have one seed, and five; the live page is that of ``coterie watch``
while a run and a comparison go on. It takes about five minutes, and needs playwright, a Chromium or
Chrome of the system, and pdftoppm (on Debian ``apt-get install chromium poppler-utils``).
"""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from coterie.report.html import write_report
from coterie.report.reading import read_run

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "helpers"))
from browsing import DESKTOP, PHONE, browser, opened, why_not  # noqa: E402

OUT = HERE / "images"
COTERIE = [sys.executable, "-m", "coterie"]
DEMO = HERE.parent / "examples" / "demo.toml"
COMMON = "--alone --clock links --set evaluation.adapt_every=5 --quiet"
RUNS = {  # each is `coterie run` with the demo's file, COMMON and these
    "fedavg": "--method fedavg",
    "fedclust": "--method fedclust",
    "ifca": "--method ifca --set method.k=4",
}
GOING = "--method dc-pfl --epochs 30 --lr 0.03 --rounds 60 --engine loop"
METHODS = "local,fedavg,fedper,ifca:k=4,fedclust,user-centric:streams=auto,oracle"
COMPARED = {  # each is `coterie compare` with the demo's file, METHODS and these
    "compared": "--clock links",
    "compared-seeds": "--seeds 5 --rounds 10",
}
VIEWS = {
    "desktop-light": (False, DESKTOP),
    "desktop-dark": (True, DESKTOP),
    "phone-light": (False, PHONE),
    "phone-dark": (True, PHONE),
}
# What is shown of the report: from the top, with the pictures that fit.
TALL = {"desktop": 1300, "phone": 1500}


def compare(place: Path, own: str) -> list[str]:
    """The command of a comparison."""
    methods = ["--methods", METHODS, "--quiet", "--dir", str(place)]
    return [*COTERIE, "compare", str(DEMO), *methods, *own.split()]


def command(place: Path, own: str) -> list[str]:
    """The command of a run."""
    return [*COTERIE, "run", str(DEMO), *COMMON.split(), *own.split(), "--dir", str(place)]


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


def keep(shown: Any, path: Path) -> None:
    """A page or an element, in few colours: a quarter of the bytes, and nobody sees it."""
    picture = Image.open(io.BytesIO(shown.screenshot()))
    # The usual median cut gives rare colours, such as those of lines, to their neighbours.
    few = picture.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


def shoot_report(shown: Any, path: Path) -> None:
    """The report in all views."""
    for name, (dark, size) in VIEWS.items():
        tall = {**size, "height": TALL[name.partition("-")[0]]}
        with opened(shown, path.as_uri(), dark, tall) as seen:
            seen.page.evaluate("() => window.coterie.drawAll()")
            keep(seen.page, OUT / f"report-{name}.png")
            if name.startswith("desktop"):
                light = name.partition("-")[2]
                keep(seen.page.locator("#fig-groups"), OUT / f"groups-{light}.png")


def shoot_compared(shown: Any, path: Path, title: str) -> None:
    """The top of a comparison in all views, and its pages on paper."""
    for name, (dark, size) in VIEWS.items():
        tall = {**size, "height": TALL[name.partition("-")[0]]}
        with opened(shown, path.as_uri(), dark, tall) as seen:
            seen.page.evaluate("() => window.coterie.drawAll()")
            keep(seen.page, OUT / f"{title}-{name}.png")
            if name == "desktop-light":
                seen.page.pdf(path=str(path.with_suffix(".pdf")), prefer_css_page_size=True)
    pages = ["pdftoppm", "-r", "60", "-l", "4", "-png", str(path.with_suffix(".pdf"))]
    subprocess.run([*pages, str(path.with_suffix(""))], check=True)
    sheets = [Image.open(each) for each in sorted(path.parent.glob(f"{path.stem}-*.png"))]
    width, height = sheets[0].size
    paper = Image.new("RGB", (width * len(sheets), height), "white")
    for place, sheet in enumerate(sheets):
        paper.paste(sheet, (place * width, 0))
    paper.quantize(64).save(OUT / f"{title}-printed.png", optimize=True)


def shoot_live(shown: Any, runs: Path) -> None:
    """The live page in all views, while a run goes on."""
    going = runs / "dc-pfl"
    others = compare(runs / "rotations", "--rounds 300 --jobs 1")
    processes = [
        subprocess.Popen(each, stdout=subprocess.DEVNULL)
        for each in (command(going, GOING), others)
    ]
    try:
        while len(read_run(going).rounds if (going / "config.toml").exists() else ()) < 25:
            if processes[0].poll() is not None:
                raise SystemExit(f"the run in {going} ended too early")
            time.sleep(0.2)
        with watched(runs) as address:
            base, _, token = address.partition("/#")
            urllib.request.urlopen(base, timeout=300).close()  # the first look reads all runs
            for name, (dark, size) in VIEWS.items():
                with opened(shown, address, dark, size) as seen:
                    if seen.page.locator(".fold").count():
                        seen.page.locator(".fold").first.click()
                    keep(seen.page, OUT / f"watch-list-{name}.png")
                with opened(shown, f"{base}/run/{going.name}#{token}", dark, size) as seen:
                    seen.page.evaluate("() => window.coterie.drawAll()")
                    keep(seen.page, OUT / f"watch-{name}.png")
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    """Make the runs, then the pictures."""
    if reason := why_not():
        raise SystemExit(reason)
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, browser() as shown:
        runs = Path(scratch) / "runs"
        for name, own in RUNS.items():
            subprocess.run(command(runs / name, own), check=True, stdout=subprocess.DEVNULL)
        shoot_report(shown, write_report([runs / "ifca"], Path(scratch) / "report.html"))
        for name, own in COMPARED.items():
            subprocess.run(compare(runs / name, own), check=True, stdout=subprocess.DEVNULL)
            page = write_report([runs / name], Path(scratch) / f"{name}.html")
            shoot_compared(shown, page, name)
        shoot_live(shown, runs)


if __name__ == "__main__":
    main()
