"""A few small runs to look at."""

import json
import shutil

import pytest

from coterie.experiment.api import run
from coterie.results.checksums import read_json
from coterie.results.rundir import RunDir

HOSTILE = "<img src=x onerror='window.hacked=1'></script><b>bold</b>"


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Three methods on the same clients: with groups, a clock, notes, and each client alone."""
    place = tmp_path_factory.mktemp("seen") / "runs"
    common = {
        "data": {"clients": 8, "samples": 800},
        "shift": {"name": "rotation"},
        "clock": {"name": "links"},
        "evaluation": {"alone": True, "adapt_every": 2},
    }
    for name, own in {"fedclust": {}, "user-centric": {"streams": "auto"}, "dc-pfl": {}}.items():
        tree = {
            **common,
            "method": {"name": name, **own},
            "run": {"rounds": 6, "engine": "loop"},
        }
        run(tree, place / name)
    return place


@pytest.fixture(scope="session")
def hostile(runs, tmp_path_factory):
    """The first of them with markup wherever a user's own words are."""
    place = tmp_path_factory.mktemp("hostile") / "run <b>x"
    shutil.copytree(runs / "fedclust", place)
    told = read_json(place / "data.json")
    told["names"] = [f"{HOSTILE} {c}" for c in range(len(told["names"]))]
    told["classes"] = [f"{HOSTILE} {c}" for c in range(len(told["classes"]))]
    (place / "data.json").write_text(json.dumps(told))
    _, _, config = (place / "config.toml").read_text().partition("\n")  # without its checksum
    quoted = json.dumps(HOSTILE)
    (place / "config.toml").write_text(config + f"\n[told]\nby = {quoted}\n")
    lines = RunDir(place).read_events()
    for event in lines:
        if event.get("groups"):
            event["groups"] = [f"{HOSTILE} {g}" for g in event["groups"]]
    lines.append({"round": 6, "event": HOSTILE})
    (place / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in lines))
    return place
