"""All tests in two processes at a time, with coverage; fails if either does.

One half has the contract and the laws, the other everything else. What starts workers, kills
processes or measures time comes last, alone.
"""

import subprocess
import sys
from pathlib import Path

HALVES = [["tests/contract", "tests/laws"], ["tests/unit", "src"]]
ALONE = ["tests/engines", "tests/faults", "tests/e2e"]


def start(paths: list[str]) -> subprocess.Popen:
    command = [sys.executable, "-m", "coverage", "run", "-m", "pytest", "-p", "no:cacheprovider"]
    return subprocess.Popen([*command, *paths])


def forgotten() -> set[str]:
    here = Path(__file__).parent
    folders = {f"tests/{p.name}" for p in here.iterdir() if any(p.glob("**/test_*.py"))}
    return folders - {path for part in [*HALVES, ALONE] for path in part}


if __name__ == "__main__":
    if forgotten():
        sys.exit(f"nobody runs {', '.join(sorted(forgotten()))}: add it to {__file__}")
    codes = [process.wait() for process in [start(half) for half in HALVES]]
    codes.append(start(ALONE).wait())
    sys.exit(max(codes, key=abs))
