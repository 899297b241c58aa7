"""The wheel: all its files are in it, and its command runs where nothing else of Coterie is."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="hatchling is not installed: pip install 'coterie[dev]'")

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "coterie"


def run(*command: object, **options: object) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    [path] = folder.glob("*.whl")
    return path


def test_all_files_of_the_package_are_in_it(wheel):
    inside = set(zipfile.ZipFile(wheel).namelist())
    sources = {
        f"coterie/{path.relative_to(SOURCES).as_posix()}"
        for path in SOURCES.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    packaged = {name for name in inside if name.startswith("coterie/")}
    assert packaged == sources
    # What is no module, and yet is read when Coterie runs or by type checkers.
    assert {"coterie/index.json", "coterie/py.typed", "coterie/__init__.pyi"} <= packaged
    assert all(name.startswith("coterie") for name in inside)  # no tests, no documentation
    assert any(name.endswith("licenses/LICENSE") for name in inside)


def test_its_command_runs_in_an_environment_of_its_own(wheel, tmp_path):
    """The dependencies are those of these tests; Coterie itself comes from the wheel alone."""
    place = tmp_path / "venv"
    venv.create(place)
    python, command = place / "bin" / "python", place / "bin" / "coterie"
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel)
    inside = Path(
        run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    )
    paths = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    (inside / "dependencies.pth").write_text("\n".join(paths) + "\n")

    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def coterie(*words: object) -> str:
        return run(command, *words, cwd=tmp_path, env=environment)

    where = run(python, "-c", "import coterie; print(coterie.__file__)", env=environment)
    assert Path(where.strip()).is_relative_to(inside)
    assert "compare" in coterie("--help")
    assert "fedavg" in coterie("methods")
    coterie("run", "--clients", 4, "--rounds", 1, "--engine", "loop", "--dir", "run")
    assert (tmp_path / "run" / "result.json").exists()
    coterie("report", "run", "--to", "report.html")
    assert "fedavg" in (tmp_path / "report.html").read_text()
