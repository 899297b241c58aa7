"""All tests but the marked long ones, in two processes at a time; fails if any of them does.

Each job is a pytest of its own. Two run at once, the next begins when one has ended, the longest
come first. Lines are counted in all but the contract and the laws: those walk over the same lines
again for every method, and counting would make them half as long again. In the job of the engines
they are counted in the processes that its tests start, too: half of a federation is there.
"""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent


def files(folder: str) -> list[str]:
    return sorted(f"tests/{folder}/{path.name}" for path in (HERE / folder).glob("test_*.py"))


FEDERATIONS = [path for path in files("e2e") if "federation" in path]
MIDDLE = "tests/laws/test_q"  # laws from here on in the alphabet are a job of their own
ENGINES = ["tests/engines", "tests/faults", "tests/attacks", *FEDERATIONS]
COUNTED = [
    ["tests/unit", "src"],
    [path for path in files("e2e") if path not in FEDERATIONS],
    ENGINES,
]
UNCOUNTED = [
    ["tests/contract"],
    ["tests/docs"],
    ["tests/browser"],
    [law for law in files("laws") if law >= MIDDLE],
    [law for law in files("laws") if law < MIDDLE],
]


def run(paths: list[str], counted: bool) -> int:
    counting = ["-m", "coverage", "run"] if counted else []
    children = {
        "COVERAGE_PROCESS_START": str(HERE.parent / "pyproject.toml"),
        "COVERAGE_FILE": str(HERE.parent / ".coverage"),  # they work in folders of their own
    }
    command = [sys.executable, *counting, "-m", "pytest", "-m", "not e2e", "-p", "no:cacheprovider"]
    command += ["--durations=5", "--durations-min=3"]
    began = time.monotonic()
    done = subprocess.run(
        [*command, *paths],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **(children if paths == ENGINES else {})},
    )
    # What two processes say at a time would be mixed, so each is heard when it has ended.
    print(f"== {' '.join(paths)}: {time.monotonic() - began:.0f} s\n{done.stdout}", flush=True)
    return done.returncode


def forgotten() -> set[str]:
    folders = {f"tests/{p.name}" for p in HERE.iterdir() if any(p.glob("**/test_*.py"))}
    return (
        folders
        - {path for job in COUNTED + UNCOUNTED for path in job}
        - {"tests/laws", "tests/e2e"}
    )


if __name__ == "__main__":
    if forgotten():
        sys.exit(f"nobody runs {', '.join(sorted(forgotten()))}: add it to {__file__}")
    with ThreadPoolExecutor(2) as two:
        counted = [two.submit(run, job, True) for job in COUNTED]
        uncounted = [two.submit(run, job, False) for job in UNCOUNTED]
        codes = [job.result() for job in counted + uncounted]
    sys.exit(max(codes, key=abs))
