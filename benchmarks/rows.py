"""Runs that each append a row of results to a file, and can be continued after an interruption."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read(place: Path) -> list[Row]:
    """The rows of a file; one that was cut off is left out."""
    rows = []
    for line in place.read_text().splitlines() if place.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def commits(rows: Sequence[Mapping[str, Any]]) -> str:
    """The commits that the rows were measured at, as the beginning of a sentence.

    >>> commits([{"commit": "b"}, {"commit": "a"}, {"commit": "b"}]), commits([{"commit": "a"}])
    ('Commits b, a', 'Commit a')
    """
    names = list(dict.fromkeys(row["commit"] for row in rows))
    return f"Commit{'s' * (len(names) > 1)} {', '.join(names)}"


def carried_out(
    cells: Sequence[Mapping[str, Any]],
    run: Callable[[Mapping[str, Any]], Row],
    place: Path,
    jobs: int,
) -> list[Row]:
    """The row of every cell (the settings that it begins with), after running missing ones.

    ``run`` must be importable by other processes, as a ``partial`` of a function is.
    """

    def key_of(row: Mapping[str, Any]) -> str:
        return json.dumps([row[k] for k in cells[0]])

    done = {key_of(row): row for row in read(place) if set(cells[0]) <= set(row)}
    missing = [c for c in cells if key_of(c) not in done]
    print(f"{len(missing)} runs to do, {len(cells) - len(missing)} done", flush=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    failed: BaseException | None = None
    with ProcessPoolExecutor(jobs) as pool, place.open("a") as file:
        for future in as_completed([pool.submit(run, c) for c in missing]):
            if (failure := future.exception()) is not None:
                failed = failed or failure  # the other runs are kept all the same
                continue
            row = future.result()
            done[key_of(row)] = row
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(json.dumps(row), flush=True)
    if failed is not None:
        raise failed
    return [done[key_of(c)] for c in cells]
