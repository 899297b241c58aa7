"""``coterie watch`` and runs as processes of their own: stopped, resumed, killed, left alone."""

import http.client
import json
import os
import re
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")

from safetensors import safe_open

from federated import until
from processes import PATIENCE, starting
from watched import Page, make_run

# Rounds of about half a second, so that there is time to be asked in.
RUN = ("run", "--clients", "4", "--set", "data.samples=400", "--epochs", "30", "--batch-size", "8")
RUN = (*RUN, "--method", "fedper", "--set", "evaluation.adapt_epochs=0", "--engine", "loop")
ROUNDS = 10


@pytest.fixture
def begin(tmp_path):
    """Start a command in a folder of its own; what it says is on one stream."""
    alone = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    with starting() as call:
        yield partial(call, stderr=subprocess.STDOUT, cwd=tmp_path, env=alone)


class Watched(Page):
    """The page of a process, with the token that it printed."""

    def __init__(self, process):
        line = next(line for line in process.stdout if line.startswith("watching "))
        port, self.token = re.search(r"http://127\.0\.0\.1:(\d+)/#token=(\S+)", line).groups()
        super().__init__(int(port), None)
        until(self._answers, "the page")

    def _answers(self):
        try:
            return self.get("/").status == 200
        except (OSError, http.client.HTTPException):
            return False

    def tell(self, name, action):
        return self.post(f"/api/runs/{name}/{action}", token=self.token)

    def status(self, name):
        found = re.search(r'data-status="(\w+)"', self.get(f"/run/{name}").text)
        return found and found[1]

    def is_so(self, name, *statuses):
        until(lambda: self.status(name) in statuses, f"{name} is {statuses}")


def rounds_of(run):
    events = run / "events.jsonl"
    return len(events.read_text().splitlines()) if events.exists() else 0


def resuming(run):
    """The process that goes on with a run, if there is one."""
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = place.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if "--resume" in words and str(run) in words:
            return int(place.parent.name)
    return None


def last_checkpoint(run):
    """Its name, and all that is in it."""
    newest = max((run / "checkpoints").glob("round-*.json"))
    with safe_open(newest.with_suffix(".safetensors"), "numpy") as file:
        arrays = {key: file.get_tensor(key).tobytes() for key in file.keys()}  # noqa: SIM118
        return newest.name, json.loads(file.metadata()["tree"]), arrays


def test_what_cannot_be_resumed_says_why_and_ctrl_c_ends_it_with_pages_open(tmp_path, begin):
    run = make_run(tmp_path / "runs" / "a", 2)  # rounds, but no checkpoint: its process refuses
    process = begin("watch", "--port", 0)
    page = Watched(process)
    assert page.tell("a", "resume").status == 204
    with page.stream("/api/events") as one, page.stream("/api/runs/a/events") as other:
        assert one.next()
        other.until(lambda found: "no checkpoint any more" in json.dumps(found["parts"]))
        assert "no checkpoint any more" in (run / "resumed.log").read_text()
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
        assert rest.strip() == "stopped watching; the runs continue"
        until(lambda: one.ended and other.ended, "the end of streams")


def test_stopped_resumed_killed_and_resumed_as_if_never_touched(tmp_path, begin):
    run, whole = tmp_path / "runs" / "r", tmp_path / "whole"
    watch = begin("watch", "runs", "--port", 0)
    going = begin(*RUN, "--rounds", ROUNDS, "--dir", run)
    untouched = begin(*RUN, "--rounds", ROUNDS, "--dir", whole, "-q")
    page = Watched(watch)
    until(lambda: rounds_of(run) >= 1, "a round")
    page.is_so("r", "running")

    assert page.tell("r", "stop").status == 204
    again = page.tell("r", "stop")
    assert again.status == 409
    assert page.tell("r", "resume").status == 409
    said, _ = going.communicate(timeout=PATIENCE)
    assert going.returncode == 130
    assert "Finished rounds are saved" in said
    page.is_so("r", "asked")  # stopped from the page
    done = rounds_of(run)
    assert 1 <= done < ROUNDS
    assert last_checkpoint(run)[0] == f"round-{done:06d}.json"

    assert page.tell("r", "resume").status == 204
    assert page.tell("r", "resume").status == 409
    pid = until(lambda: resuming(run), "its process")
    assert os.getsid(pid) == pid  # a session of its own
    until(lambda: rounds_of(run) > done, "another round")
    page.is_so("r", "running")
    os.kill(pid, signal.SIGKILL)
    page.is_so("r", "stopped")
    until(lambda: not Path(f"/proc/{pid}").exists(), "no zombie")
    until(lambda: "was ended by signal 9" in page.get("/run/r").text, "the reason")

    done = rounds_of(run)
    assert page.tell("r", "resume").status == 204
    until(lambda: rounds_of(run) > done, "another round")
    with page.stream("/api/runs/r/events") as stream:
        assert stream.next()
        watch.send_signal(signal.SIGINT)
        watch.communicate(timeout=PATIENCE)
    assert watch.returncode == 0
    until(lambda: (run / "result.json").exists(), "its end, though nobody watches")
    assert untouched.wait(timeout=PATIENCE) == 0
    until(lambda: resuming(run) is None, "its process is gone")
    assert last_checkpoint(run) == last_checkpoint(whole)
    one, other = (json.loads((d / "result.json").read_text()) for d in (run, whole))
    assert one["received"] == other["received"]
    assert (run / "clients.csv").read_text() == (whole / "clients.csv").read_text()
    assert not (run / ".stop").exists()
