"""Damaged files in a run directory: the same bits or one sentence, never a traceback.

``COTERIE_CORRUPTIONS`` is how many random corruptions the long test tries (1,000 by default),
``COTERIE_CORRUPTIONS_SEED`` the seed that they are drawn from.
"""

import contextlib
import csv
import hashlib
import io
import json
import os
import random
import re
import shutil
import signal
import sys
import traceback
import zlib
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save

import coterie.cli.app
import coterie.cli.options
from coterie.core.tree import read_tree, write_tree
from coterie.core.weights import Layout
from coterie.errors import LostHistory, RunDirError
from coterie.experiment.api import run
from coterie.experiment.experiment import execute
from coterie.experiment.export import reopen
from coterie.report.live.folders import Following
from coterie.report.reading import Reading, read_run
from coterie.results.checksums import (
    EVENTS,
    JSON_LINES,
    LEDGER_ROWS,
    LineFile,
    read_json,
    read_lines,
    to_json,
)
from coterie.results.rundir import RunDir, rounds_of
from support import Stop, experiment, stop_after

ROUNDS, CLIENTS, FEW = 4, 4, 60
CONFIG = {
    "data": {"set": "digits", "clients": CLIENTS, "samples": 160},
    "shift": {"name": "rotation", "groups": 2},
    "model": {"name": "mlp", "hidden": [6]},
    "method": {"name": "ditto"},
    "train": {"epochs": 1, "batch_size": 16, "lr": 0.1},
    "run": {"rounds": ROUNDS, "engine": "loop", "cohort": 0.75},
}
SUBJECTS = ("finished", "stopped", "secure")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@dataclass
class Ended:
    """How a command ended and what it said."""

    code: int
    err: str


def command(*words: object, terminal: bool = False) -> Ended:
    """Run a command in this process; an exception that it lets through shows in what it says."""
    err, code = Terminal() if terminal else io.StringIO(), -1
    argv, sys.argv = sys.argv, ["coterie", *map(str, words)]
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
            coterie.cli.app.main()
    except SystemExit as end:
        code = int(end.code or 0)
    except Exception:
        err.write(traceback.format_exc())
    finally:
        sys.argv = argv
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return Ended(code, err.getvalue())


# --- runs, and what they should come to ----------------------------------------------------------


@dataclass
class Subject:
    """A run to damage, and what a resume and an export of it come to if nobody does."""

    place: Path
    outcome: dict
    reading: Reading
    model: dict | None


def timeless(tree):
    """The same without what is never the same twice."""
    if isinstance(tree, dict):
        kept = {k: v for k, v in tree.items() if not k.endswith("seconds") and k != "exchanges"}
        return {k: timeless(v) for k, v in kept.items()}
    return [timeless(v) for v in tree] if isinstance(tree, list) else tree


def outcome(place: Path) -> dict:
    """All that a finished run comes to: models, scores, history, bytes, exposure."""
    run = RunDir(place)
    with run.ledger.open(newline="") as file:
        ledger = [{k: v for k, v in row.items() if k != "crc"} for row in csv.DictReader(file)]
    result = reopen(place)
    return {
        "summary": timeless(run.read_result()),
        "history": timeless(run.read_events()),
        "ledger": ledger,
        "clients": run.table.read_text(),
        "exposure": run.exposure.read_text(),
        "models": [result.weights(c).vector.numpy().tobytes() for c in range(CLIENTS)],
    }


@pytest.fixture(scope="module")
def subjects(tmp_path_factory) -> dict[str, Subject]:
    """A finished run, one stopped a round after its last checkpoint, and one with secure sums."""
    root, found = tmp_path_factory.mktemp("sound"), {}
    every_two = {**CONFIG, "run": {**CONFIG["run"], "checkpoint_every": 2}}
    secure = {**CONFIG, "privacy": {"secure": True, "randomness": "system"}}
    for name, tree, last in (
        ("finished", CONFIG, None),
        ("stopped", every_two, 3),
        ("secure", secure, 3),
    ):
        place = root / name
        with contextlib.suppress(Stop):
            run(tree, place, watch=None if last is None else stop_after(last))
        assert RunDir(place).result.exists() == (name == "finished")
        whole = root / "whole" / name
        shutil.copytree(place, whole)
        assert command("run", "--resume", whole, "-q") == Ended(0, "")
        model = None
        if name == "finished":
            assert command("export", whole, "--client", 1, "--to", root / "model").code == 0
            model = load_file(root / "model")
        found[name] = Subject(place, outcome(whole), read_run(place), model)
    return found


# --- corruptions ---------------------------------------------------------------------------------


def _block(random: random.Random, data: bytes) -> tuple[int, int]:
    start = random.randrange(len(data))
    return start, min(len(data), start + random.choice((1, 2, 7, 16, 64, 512)))


def flip_bit(random, data):
    place = random.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << random.randrange(8)]) + data[place + 1 :]


def flip_byte(random, data):
    place = random.randrange(len(data))
    return data[:place] + bytes([data[place] ^ random.randrange(1, 256)]) + data[place + 1 :]


def cut_short(random, data):
    return data[: random.randrange(len(data))]


def delete_block(random, data):
    start, end = _block(random, data)
    return data[:start] + data[end:]


def zero_block(random, data):
    start, end = _block(random, data)
    return data[:start] + bytes(end - start) + data[end:]


def random_block(random, data):
    start, end = _block(random, data)
    return data[:start] + random.randbytes(end - start) + data[end:]


def duplicate_line(random, data):
    lines = data.splitlines(keepends=True)
    place = random.randrange(len(lines))
    return b"".join([*lines[: place + 1], *lines[place:]])


def delete_line(random, data):
    lines = data.splitlines(keepends=True)
    del lines[random.randrange(len(lines))]
    return b"".join(lines)


def swap_lines(random, data):
    lines = data.splitlines(keepends=True)
    one, other = random.randrange(len(lines)), random.randrange(len(lines))
    lines[one], lines[other] = lines[other], lines[one]
    return b"".join(lines)


def empty(random, data):
    return b""


def append_junk(random, data):
    return data + random.choice(
        (random.randbytes(random.randrange(1, 80)), b"\n", b"{}\n", b"0\n", data[-40:])
    )


CHANGES = (
    *(flip_bit, flip_byte, cut_short, delete_block, zero_block, random_block, duplicate_line),
    *(delete_line, swap_lines, empty, append_junk),
)


def kinds(place: Path) -> dict[str, list[Path]]:
    """The files of a run by kind, so that kinds of which there are many do not get them all."""
    found: dict[str, list[Path]] = {}
    for path in sorted(p for p in place.rglob("*") if p.is_file() and p.name != ".lock"):
        inside = path.relative_to(place)
        kind = path.name if len(inside.parts) == 1 else f"{inside.parts[0]}{path.suffix}"
        found.setdefault(kind, []).append(path)
    return found


def corrupt(random: random.Random, place: Path) -> tuple[Path, str]:
    """Damage a file; which, and how."""
    by_kind = kinds(place)
    path = random.choice(by_kind[random.choice(sorted(by_kind))])
    data = path.read_bytes()
    if random.random() < 1 / 12:
        path.unlink()
        return path, "delete"
    if not data:
        path.write_bytes(random.randbytes(20))
        return path, "junk"
    change = random.choice(CHANGES)
    path.write_bytes(change(random, data))
    return path, change.__name__


# --- what may come of it -------------------------------------------------------------------------


def said_well(ended: Ended, path: Path) -> str:
    """What is wrong with how a command refused, if anything."""
    last = (ended.err.strip().splitlines() or [""])[-1]
    if ended.code <= 0 or "Traceback" in ended.err or not last.startswith("error: "):
        return f"it ended with {ended.code} and {ended.err!r}"
    if path.name not in last and str(path.parent) not in last:
        return f"it did not name {path}: {last}"
    return ""


def contents(place: Path) -> dict[str, bytes]:
    files = (p for p in place.rglob("*") if p.is_file() and p.name != ".lock")
    return {str(p.relative_to(place)): p.read_bytes() for p in files}


def resume(subject: Subject, place: Path, path: Path) -> tuple[str, str]:
    """Resume a damaged run: what came of it, and what is wrong with that."""
    before = contents(place)
    ended = command("run", "--resume", place, "-q")
    if ended.code == 0:
        return "same bits", "" if outcome(place) == subject.outcome else "it has other bits"
    if wrong := said_well(ended, path):
        return "sentence", wrong
    if contents(place) != before and path.parent.parent.name != "sessions":  # read in the rounds
        return "sentence", f"it changed files, and refused: {ended.err}"
    if "--discard-damaged" not in ended.err:
        return "sentence", ""
    ended = command("run", "--resume", place, "-q", "--discard-damaged")
    if ended.code:
        return "asked", f"it refused what it offered: {ended.err}"
    if outcome(place)["models"] != subject.outcome["models"]:
        return "asked", "it has other models"
    kept = place / f"{path.name}.damaged"
    damaged = before.get(path.name)
    if damaged is not None and (not kept.exists() or kept.read_bytes() != damaged):
        return "asked", "it did not keep the damaged file"
    again = command("run", "--resume", place, "-q")
    return "asked", "" if again.code == 0 else f"it asks again: {again.err}"


def export(subject: Subject, place: Path, path: Path) -> tuple[str, str]:
    target = place.parent / "model"
    ended = command("export", place, "--client", 1, "--to", target)
    if ended.code:
        return "sentence", said_well(ended, path)
    found, wanted = load_file(target), subject.model
    assert wanted is not None
    same = found.keys() == wanted.keys() and all(found[k].equal(wanted[k]) for k in wanted)
    return "same bits", "" if same else "the model has other bits"


def report(subject: Subject, place: Path, path: Path) -> tuple[str, str]:
    """Look at a damaged run: all is as it was, or what is not is said."""
    ended = command("report", place, "--to", place.parent / "report.html")
    if ended.code:
        return "sentence", said_well(ended, path)
    read = read_run(place, subject.reading.name)
    if any(path.name in problem for problem in read.problems):
        return "told", ""
    there = [f.name for f in fields(read) if f.name not in ("path", "name", "problems")]
    if not path.exists() or not path.read_bytes().strip():  # what is gone is not there to be read
        gone = {"result.json": ("result", "status"), "config.toml": ("config",)}
        gone |= {"data.json": ("data",), "sessions.jsonl": ("sessions",)}
        there = [name for name in there if name not in gone.get(path.name, ())]
    # A last line without its end is as a crash leaves it, and counts as never written.
    cut = path.suffix == ".jsonl" and path.exists() and not path.read_bytes().endswith(b"\n")
    before = list(getattr(subject.reading, path.stem, ()))[:-1] if cut else None
    there = [name for name in there if name != path.stem or getattr(read, name) != before]
    other = [name for name in there if getattr(read, name) != getattr(subject.reading, name)]
    return "same", "" if not other else f"other {other} without a word"


def attempt(subjects, seed: object, place: Path) -> tuple[str, str, str]:
    """One corruption: what it was, what came of it, and what is wrong with that."""
    draw = random.Random(f"corruption {seed}")
    name = draw.choice(SUBJECTS)
    actions = [resume, resume, report, *([export] if name == "finished" else [])]
    action = draw.choice(actions)
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(subjects[name].place, place / name)
    path, how = corrupt(draw, place / name)
    came, wrong = action(subjects[name], place / name, path)
    about = f"{seed}: {how} of {path.relative_to(place)}, then {action.__name__}"
    return about, f"{action.__name__}: {came}", wrong


def attempts(subjects, count: int, place: Path) -> Counter:
    seed = os.environ.get("COTERIE_CORRUPTIONS_SEED", "7")
    found, wrong = Counter(), []
    for number in range(count):
        about, came, problem = attempt(subjects, f"{seed}-{number}", place / "case")
        found[came] += 1
        if problem:
            wrong.append(f"{about}: {problem}")
    print(f"{count} corruptions: {dict(sorted(found.items()))}")
    assert not wrong, "\n".join([f"{len(wrong)} of {count}", *wrong])
    return found


@pytest.mark.timeout(600)
def test_random_corruptions(subjects, tmp_path):
    found = attempts(subjects, FEW, tmp_path)
    assert {c.partition(": ")[0] for c in found} == {"resume", "export", "report"}


@pytest.mark.e2e
@pytest.mark.timeout(7200)
def test_a_thousand_random_corruptions(subjects, tmp_path):
    attempts(subjects, int(os.environ.get("COTERIE_CORRUPTIONS", "1000")), tmp_path)


# --- lines ---------------------------------------------------------------------------------------


def chained(texts):
    """The checksum of each of these, each of all texts up to it."""
    return [zlib.crc32("".join(texts[: n + 1]).encode()) for n in range(len(texts))]


def assert_checked(place: Path) -> None:
    """Every line of events, ledger and sessions has the checksum that the documentation says."""
    for name in ("events.jsonl", "sessions.jsonl"):
        lines = (place / name).read_text().splitlines()
        assert lines
        found = [json.loads(line) for line in lines]
        assert [list(tree)[-1] for tree in found] == ["crc"] * len(lines)
        covered = [line.rpartition(', "crc": ')[0] for line in lines]
        assert [tree["crc"] for tree in found] == chained(covered)
    title, *rows = (place / "ledger.csv").read_text().splitlines()
    assert title == "round,client,kind,down,up,crc"
    pairs = [row.rpartition(",")[::2] for row in rows]
    assert [int(crc) for _, crc in pairs] == chained([row for row, _ in pairs])
    with (place / "ledger.csv").open(newline="") as file:
        assert all(int(row["crc"]) >= 0 for row in csv.DictReader(file))


def copied(subject: Subject, tmp_path: Path) -> Path:
    return shutil.copytree(subject.place, tmp_path / "r")


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True)


def harm(path: Path, line: int) -> None:
    """Change a digit in the middle of a line, which stays as well-formed as it was."""
    lines = lines_of(path)
    text = lines[line - 1]
    place = next(i for i in range(len(text) // 2, len(text)) if text[i] in "12345678")
    lines[line - 1] = text[:place] + str(int(text[place]) + 1) + text[place + 1 :]
    path.write_text("".join(lines))


def test_every_line_has_a_checksum(subjects, tmp_path):
    for name in SUBJECTS:
        assert_checked(subjects[name].place)
    place = copied(subjects["stopped"], tmp_path)
    with (place / "events.jsonl").open("a") as file:  # as if it had been killed while it wrote
        file.write('{"round": 4, "coh')
    with (place / "ledger.csv").open("a") as file:
        file.write("4,1,hea")
    with (place / "sessions.jsonl").open("a") as file:
        file.write('{"at": "2026')
    assert command("run", "--resume", place, "-q") == Ended(0, "")
    assert outcome(place) == subjects["stopped"].outcome
    assert read_run(place).problems == ["sessions.jsonl has 1 damaged line: left out"]
    assert [session["done"] for session in read_run(place).sessions] == [0, 2]
    sessions = lines_of(place / "sessions.jsonl")
    (place / "sessions.jsonl").write_text("".join(sessions[:1] + sessions[2:]))
    assert_checked(place)


@pytest.mark.parametrize(
    ("texts", "whole", "later", "damaged"),
    [
        ("abcd", "abcd", "", []),
        ("acd", "a", "d", [2]),  # what follows a gap may be good, but nobody can tell
        ("abbcd", "abcd", "", [3]),
        ("ababcd", "abcd", "", [3, 4]),
        ("acbd", "ab", "", [2, 4]),
        ("bcd", "", "cd", [1]),
        ("aXcd", "a", "cd", [2]),
        ("abXcd", "abcd", "", [3]),
        ("", "", "", []),
    ],
)
@pytest.mark.parametrize("form", [EVENTS, LEDGER_ROWS])
def test_lines_that_are_missing_moved_or_there_twice(form, texts, whole, later, damaged, tmp_path):
    bodies = {c: json.dumps({"round": ord(c)}) for c in "abcd"}
    if form is LEDGER_ROWS:
        bodies = {c: f"{ord(c)},0,model,1,2" for c in "abcd"}
    file = LineFile(tmp_path / "file", form)
    file.write(bodies.values())
    title = [line for line in lines_of(file.path) if form.title and line.startswith("round,")]
    written = dict(zip("abcd", lines_of(file.path)[len(title) :], strict=True))
    written["X"] = written["b"].replace("98", "88")  # it was the number of b
    if texts.startswith("abX"):
        written["X"] = "junk\n"
    file.path.write_text("".join([*title, *(written[c] for c in texts)]))
    found = file.read()
    letters = ["".join(chr(e.value["round"]) for e in part) for part in (found.whole, found.later)]
    assert letters == [whole, later]
    assert [n - len(title) for n in found.damaged] == damaged
    last = found.whole[-1].crc if whole else 0
    assert found.reach((len(whole), last))
    assert not found.reach((len(whole) + 1, last))
    assert not whole or not found.reach((len(whole), last + 1))


@pytest.mark.parametrize("form", [JSON_LINES, LEDGER_ROWS])
def test_a_line_that_lacks_only_its_end_counts(form, tmp_path):
    file = LineFile(tmp_path / "file", form)
    file.write(['{"round": 1}', '{"round": 2}'] if form is JSON_LINES else ["1,0,m,1,2"] * 2)
    data = file.path.read_bytes()
    counts = [len(read_lines(data[:end], form).whole) for end in range(len(data) + 1)]
    assert counts[-2:] == [2, 2]
    assert counts[-3] == 1
    assert not any(read_lines(data[:end], form).damaged for end in range(50, len(data) + 1))


# --- history that would be lost ------------------------------------------------------------------


def test_history_that_would_be_lost_is_asked_for(subjects, tmp_path):
    """Before there were checksums, all rounds before the last checkpoint were gone, silently."""
    place = copied(subjects["secure"], tmp_path)
    harm(place / "events.jsonl", 1)
    damaged, before = (place / "events.jsonl").read_bytes(), contents(place)
    ended = command("run", "--resume", place, "-q")
    assert ended.code == 4
    assert said_well(ended, place / "events.jsonl") == ""
    for part in ("events.jsonl is damaged at line 1", "history of round 1", "--discard-damaged"):
        assert part in ended.err
    assert contents(place) == before

    ended = command("run", "--resume", place, "-q", "--discard-damaged")
    assert ended.code == 0
    assert "discarded, as requested" in ended.err
    found, wanted = outcome(place), subjects["secure"].outcome
    assert found["models"] == wanted["models"]
    assert found["history"] == wanted["history"][1:]
    assert found["ledger"] == wanted["ledger"]
    assert (place / "events.jsonl.damaged").read_bytes() == damaged
    assert_checked(place)
    assert "events.jsonl lacks round 1" in read_run(place).problems
    assert command("run", "--resume", place, "-q") == Ended(0, "")  # it does not ask twice
    assert not (place / "events.jsonl.damaged-1").exists()


def test_discarding_is_for_runs_that_are_continued(tmp_path):
    ended = command("run", "--discard-damaged", "--dir", tmp_path / "r")
    assert ended.code == 2
    assert "--resume" in ended.err


@pytest.mark.parametrize("answer", [True, False])
def test_on_a_terminal_it_asks(answer, subjects, tmp_path, monkeypatch):
    place = copied(subjects["secure"], tmp_path)
    (place / "events.jsonl").unlink()
    asked = []

    def confirm(text, **_):
        asked.append(text)
        return answer

    monkeypatch.setattr(coterie.cli.options.typer, "confirm", confirm)
    monkeypatch.setattr("sys.stdin", Terminal())
    ended = command("run", "--resume", place, "-q", terminal=True)
    assert len(asked) == 1
    assert "events.jsonl is missing" in ended.err
    assert ended.code == (0 if answer else 4)
    assert RunDir(place).result.exists() == answer


@pytest.mark.parametrize("harmed", ["not a number", '{"round": "x"}', "[]", "7", '{"lost": 0}'])
@pytest.mark.parametrize("name", ["events.jsonl", "ledger.csv"])
def test_what_is_no_line_is_no_traceback(name, harmed, subjects, tmp_path):
    """Before there were checksums, it was one, and the events before it were gone."""
    place = copied(subjects["secure"], tmp_path)
    lines = lines_of(place / name)
    (place / name).write_text("".join([*lines[:1], f"{harmed}\n", *lines[2:]]))
    ended = command("run", "--resume", place, "-q")
    assert ended.code == 4
    assert said_well(ended, place / name) == ""
    assert "at line 2" in ended.err


def test_damage_since_the_last_checkpoint_is_done_again(subjects, tmp_path):
    for name in ("events.jsonl", "ledger.csv"):
        place = copied(subjects["stopped"], tmp_path / name)  # saved after round 2, stopped after 3
        harm(place / name, len(lines_of(place / name)))
        assert command("run", "--resume", place, "-q") == Ended(0, "")
        assert outcome(place) == subjects["stopped"].outcome
        assert not list(place.glob("*.damaged"))


def test_the_checkpoint_before_the_damage_is_gone_back_to(subjects, tmp_path):
    place = copied(subjects["finished"], tmp_path)  # saved after rounds 3 and 4
    harm(place / "events.jsonl", 4)
    ended = command("run", "--resume", place, "-q")
    assert ended.code == 0
    assert "returns from round 4 to round 3" in ended.err
    assert "events.jsonl is damaged at line 4" in ended.err
    assert outcome(place) == subjects["finished"].outcome
    aside = sorted(path.name for path in (place / "checkpoints").glob("damaged-*"))
    assert aside == ["damaged-000004.json", "damaged-000004.safetensors"]


def test_from_python(tmp_path):
    made = experiment(coterie.ditto(), settings={"rounds": 3})
    whole = execute(made)
    with pytest.raises(Stop):
        execute(made, tmp_path / "r", watch=stop_after(2))
    harm(tmp_path / "r/events.jsonl", 1)
    harm(tmp_path / "r/ledger.csv", 3)
    with pytest.raises(LostHistory, match="discard_damaged=True"):
        execute(made, tmp_path / "r", resume=True)
    result = execute(made, tmp_path / "r", resume=True, discard_damaged=True)
    assert [e["round"] for e in result.history] == [2, 3]
    assert torch.equal(result.weights(0).vector, whole.weights(0).vector)
    assert {p.name for p in tmp_path.glob("r/*.damaged")} == {
        "events.jsonl.damaged",
        "ledger.csv.damaged",
    }


def test_simulate_takes_it_too(tmp_path):
    people = [(torch.randn(20, 3), torch.arange(20) % 2) for _ in range(2)]
    asked = {"model": "logistic", "rounds": 2, "engine": "loop", "directory": tmp_path / "r"}
    coterie.simulate(people, **asked)
    (tmp_path / "r/events.jsonl").unlink()
    with pytest.raises(LostHistory):
        coterie.simulate(people, **asked, resume=True)
    result = coterie.simulate(people, **asked, resume=True, discard_damaged=True)
    assert len(result.history) == 0


def test_a_real_federation_goes_back_only_if_that_is_accepted(tmp_path):
    pytest.importorskip("flwr")
    from faked_grid import Federation, tree

    fed = Federation(tmp_path, tree(method={"name": "ditto"}, run={"rounds": 3}))

    def cut(event):
        if event["round"] == 2:
            raise Stop

    with pytest.raises(Stop):
        fed.serve(watch=cut)
    newest = max((tmp_path / "served/checkpoints").glob("*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-1])
    fed.grid.mend()
    with pytest.raises(LostHistory, match=r"returns from .*the work of clients"):
        fed.serve()
    assert newest.exists()
    fed.grid.mend()
    result = fed.serve(discard_damaged=True)
    assert [e["round"] for e in result.history] == [1, 2, 3]
    assert newest.with_name(newest.name.replace("round", "damaged")).exists()


# --- other files ---------------------------------------------------------------------------------


def test_a_model_of_an_older_round_is_not_exported_for_the_last(subjects, tmp_path):
    for end in ("json", "safetensors"):
        place = copied(subjects["finished"], tmp_path / end)
        newest = max((place / "checkpoints").glob(f"*.{end}"))
        newest.unlink()
        ended = command("export", place, "--client", 0, "--to", tmp_path / "model")
        assert ended.code == 4
        assert "the checkpoint of round 4" in ended.err
        assert not (tmp_path / "model").exists()


def test_a_model_of_an_older_round_is_not_exported_for_a_damaged_one(subjects, tmp_path):
    place = copied(subjects["stopped"], tmp_path)
    newest = max((place / "checkpoints").glob("*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-1])
    ended = command("export", place, "--client", 0, "--to", tmp_path / "model")
    assert ended.code == 4
    assert "the checkpoint of round 2" in ended.err
    assert f"coterie run --resume {place}" in ended.err
    assert not (tmp_path / "model").exists()


def test_a_configuration_that_was_changed_is_not_resumed(subjects, tmp_path):
    place = copied(subjects["stopped"], tmp_path)
    config = place / "config.toml"
    config.write_text(config.read_text().replace("rounds = 4", "rounds = 5"))
    ended = command("run", "--resume", place, "-q")
    assert ended.code == 4
    assert said_well(ended, config) == ""
    note, _, rest = config.read_text().partition("\n")
    assert note.startswith("# crc ")
    config.write_text(rest)
    assert command("run", "--resume", place, "-q") == Ended(0, "")
    assert len(rounds_of(RunDir(place).read_events())) == 5


def test_a_comparison_writes_damaged_results_again(tmp_path):
    asked = {**CONFIG, "run": {**CONFIG["run"], "rounds": 1}}
    made = coterie.compare(asked, methods=["fedavg"], directory=tmp_path / "c")
    for name, word in (("result.json", '"down": '), ("clients.csv", "^0,")):
        path = tmp_path / "c/fedavg" / name
        whole = path.read_text()
        harm(path, next(n for n, line in enumerate(lines_of(path), 1) if re.search(word, line)))
        assert path.read_text() != whole
        with pytest.raises(RunDirError, match=re.escape(name)):
            RunDir(path.parent).read_result()
        assert command("compare", "--resume", tmp_path / "c", "-q") == Ended(0, "")
        again = json.loads((tmp_path / "c/comparison.json").read_text())["rows"]
        assert timeless(again) == timeless(list(made.rows))
        RunDir(path.parent).read_result()


def test_a_damaged_scenario_is_said(subjects, tmp_path):
    place = copied(subjects["stopped"], tmp_path)
    for text in ("{", '{"name": "no/such"}', "[]", '{"name": "x", "crc": 1}'):
        (place / "scenario.json").write_text(text)
        ended = command("run", "--resume", place, "-q")
        assert ended.code == 4
        assert said_well(ended, place / "scenario.json") == ""


def test_what_serves_a_federation_says_what_is_damaged(tmp_path):
    pytest.importorskip("flwr")
    from coterie.deploy.serve import _remembered

    assert _remembered(tmp_path) is None
    for text in ("", "{", "[]", '{"run": "a", "crc": 1}'):
        (tmp_path / "served.json").write_text(text)
        with pytest.raises(RunDirError, match=r"served\.json is damaged"):
            _remembered(tmp_path)


def test_a_client_says_which_of_its_files_is_damaged(tmp_path):
    pytest.importorskip("flwr")
    from faked_grid import Federation, tree

    fed = Federation(tmp_path, tree(method={"name": "fedavg"}, run={"rounds": 1}))
    fed.serve()
    (agreed,) = tmp_path.glob("site0/runs/*/agreed.json")
    assert fed.member(0)._recall(agreed.parent.name) is not None
    agreed.write_text(agreed.read_text().replace("fedavg", "fedavx", 1))
    with pytest.raises(RunDirError, match=r"agreed\.json is damaged"):
        fed.member(0)._recall(agreed.parent.name)


def test_the_live_page_shows_what_can_be_read(subjects, tmp_path):
    place = copied(subjects["stopped"], tmp_path)
    harm(place / "events.jsonl", 2)
    (place / "data.json").write_text("{")
    (glance,) = Following(place).look().values()
    assert glance.round == 3
    assert "events.jsonl has 1 damaged line" in glance.problem
    assert "data.json cannot be read" in glance.problem


def test_json_files_of_all_sorts(tmp_path):
    path = tmp_path / "a.json"
    for tree, indent in (({"a": [1, {"b": "ü"}]}, None), ({"a": {}}, 1), ({"b": 1, "c": 2}, 2)):
        path.write_text(to_json(tree, indent))
        assert read_json(path) == tree
        data = path.read_bytes()
        for place in range(len(data)):
            path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
            with contextlib.suppress(RunDirError):
                found = read_json(path)  # what is around the checksum may change, but nothing else
                assert {k: found.get(k) for k in tree} == tree


def test_a_tensor_of_another_type_or_shape_is_damage(tmp_path):
    layout = Layout(())
    path = tmp_path / "a.state"
    tree = {"a": torch.arange(6, dtype=torch.float32).reshape(2, 3)}
    write_tree(path, tree, layout, durable=False)
    data = path.read_bytes()
    assert torch.equal(read_tree(path, layout)["a"], tree["a"])
    for old, new in ((b'"F32"', b'"I32"'), (b"[2,3]", b"[3,2]"), (b'"sum"', b'"sun"')):
        assert old in data
        path.write_bytes(data.replace(old, new))
        with pytest.raises(RunDirError, match="damaged"):
            read_tree(path, layout)


# --- runs of earlier versions --------------------------------------------------------------------


def made_older(place: Path) -> None:
    """Take from a run all that the versions before checksums did not write."""
    for name in ("events.jsonl", "sessions.jsonl"):
        lines = [line.rpartition(', "crc": ')[0] + "}\n" for line in lines_of(place / name)]
        (place / name).write_text("".join(lines))
    rows = [row.rpartition(",")[0] + "\n" for row in lines_of(place / "ledger.csv")]
    (place / "ledger.csv").write_text("".join(rows))
    (place / "config.toml").write_text("".join(lines_of(place / "config.toml")[1:]))
    for name in ("result.json", "data.json"):
        if (place / name).exists():
            found = read_json(place / name)
            found.pop("checksums", None)
            (place / name).write_text(json.dumps(found))
    for path in (*place.rglob("*.state"), *place.rglob("round-*.safetensors")):
        with safe_open(path, framework="pt") as file:
            text = file.metadata()["tree"]
            tensors = {str(i): file.get_tensor(str(i)) for i in range(len(list(file.keys())))}
        packed = json.loads(text)
        text = json.dumps(packed)
        digest = hashlib.blake2b(text.encode(), digest_size=16)
        for tensor in tensors.values():
            digest.update(tensor.numpy().tobytes())
        path.write_bytes(save(tensors, metadata={"tree": text, "digest": digest.hexdigest()}))
    for note in place.rglob("round-*.json"):
        found = read_json(note)
        del found["lines"]
        data = note.with_suffix(".safetensors").read_bytes()
        note.write_text(
            json.dumps(found | {"sha256": hashlib.sha256(data).hexdigest(), "format": 3})
        )


@pytest.mark.parametrize("name", ["finished", "stopped"])
def test_a_run_of_an_earlier_version_is_refused_with_a_sentence(name, subjects, tmp_path):
    place = copied(subjects[name], tmp_path)
    made_older(place)
    ended = command("run", "--resume", place, "-q")
    assert ended.code == 4
    assert ended.err.count("\n") == 1
    assert "Start the run again in a new folder" in ended.err


def test_lines_without_checksums_are_read_and_not_written_on(subjects, tmp_path):
    place = copied(subjects["finished"], tmp_path)
    made_older(place)
    assert read_run(place).events == subjects["finished"].reading.events
    with pytest.raises(RunDirError, match="written by another version of Coterie"):
        RunDir(place).append({"round": 9, "event": "scores"})
