"""All tests in two processes at a time, with coverage; fails if either does.

One half has the contract and some of the laws, the other the rest of them and everything else. What
starts workers, kills processes or measures time comes last, alone.
"""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
LAWS = sorted(f"tests/laws/{path.name}" for path in (HERE / "laws").glob("test_*.py"))
MIDDLE = "tests/laws/test_q"  # laws from here on in the alphabet go with the other half
HALVES = [
    ["tests/contract", *(law for law in LAWS if law < MIDDLE)],
    ["tests/unit", "src", *(law for law in LAWS if law >= MIDDLE)],
]
ALONE = ["tests/engines", "tests/faults", "tests/e2e"]


def start(paths: list[str]) -> subprocess.Popen:
    command = [sys.executable, "-m", "coverage", "run", "-m", "pytest", "-p", "no:cacheprovider"]
    return subprocess.Popen([*command, *paths])


def forgotten() -> set[str]:
    folders = {f"tests/{p.name}" for p in HERE.iterdir() if any(p.glob("**/test_*.py"))}
    return folders - {path for part in [*HALVES, ALONE] for path in part} - {"tests/laws"}


if __name__ == "__main__":
    if forgotten():
        sys.exit(f"nobody runs {', '.join(sorted(forgotten()))}: add it to {__file__}")
    codes = [process.wait() for process in [start(half) for half in HALVES]]
    codes.append(start(ALONE).wait())
    sys.exit(max(codes, key=abs))
