"""Ctrl-C, SIGTERM, a second process, a terminal: what needs a real process."""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import forked
from coterie.experiment import config
from coterie.experiment.export import reopen

# The rounds take a while, so that a signal finds the workers at work.
LONG = ("--clients", 4, "--set", "data.samples=400", "--epochs", 40, "--method", "fedper")
LONG = (*LONG, "--set", "evaluation.adapt_epochs=0", "--batch-size", 8)


def finished_rounds(directory):
    return max(int(p.stem[-6:]) for p in Path(directory, "checkpoints").glob("*.json"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_by_the_user_and_continued(cli, start, number):
    flags = (*LONG, "--workers", 2, "--engine", "pool")
    process = start("run", *flags, "--rounds", 1000, "--dir", "r")
    for line in process.stderr:
        if "round 2/1000" in line:
            break
    cli("run", "--resume", "r").says(4, "another process is running in r")
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # a terminal tells the whole group
    else:
        process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in err
    lines = err.splitlines()
    assert [line for line in lines if not line.startswith("fedper  round ")] == lines[-1:]
    assert lines[-1].startswith("error: stopped. Finished rounds are saved; continue with: coterie")
    assert lines[-1].endswith("run --resume r")
    assert not _alive_in_group(process.pid)
    done = finished_rounds("r")
    assert 2 <= done < 1000
    resumed = cli("run", "--resume", "r", "--rounds", done + 1, "--engine", "loop")
    assert resumed.code == 0
    assert f"round {done + 1}/{done + 1}" in resumed.err
    whole = cli("run", *LONG, "--rounds", done + 1, "--engine", "loop", "--dir", "whole", "-q")
    assert whole.code == 0
    one, other = reopen(Path("r")), reopen(Path("whole"))
    for client in range(4):
        assert torch.equal(one.weights(client).vector, other.weights(client).vector)
    rounds = [json.loads(line)["round"] for line in Path("r/events.jsonl").read_text().splitlines()]
    assert rounds == list(range(1, done + 2))
    assert Path("r/clients.csv").read_text() == Path("whole/clients.csv").read_text()


def _alive_in_group(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_before_the_run_began(cli, small, monkeypatch, number):
    monkeypatch.setattr(config, "population_of", lambda _: os.kill(os.getpid(), number))
    cli("run", *small, "--dir", "r").says(130, "stopped")
    assert not Path("r").exists()


def test_these_tests_pass_as_a_background_job():
    """A shell starts such a job with SIGINT ignored, and what a job starts inherits that."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", f"{__file__}::test_stopped_before_the_run_began"],
        cwd=Path(__file__).parents[2],
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


def test_a_signal_that_gets_lost_is_heeded_after_the_round(cli, small, monkeypatch):
    """Python drops an exception that a signal raises inside a callback, such as a fork's."""
    from coterie.report import progress

    line = progress.round_line

    def lose(event, *rest):
        if event["round"] == 2:
            with contextlib.suppress(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(1)
        return line(event, *rest)

    monkeypatch.setattr(progress, "round_line", lose)
    ended = cli("run", *small, "--rounds", 50, "--dir", "r")
    ended.says(130, "--resume r")
    assert finished_rounds("r") == 2


def test_an_impatient_user_gets_the_same_sentence(start):
    process = start(
        "run", *LONG, "--rounds", 1000, "--engine", "pool", "--workers", 2, "--dir", "r"
    )
    for line in process.stderr:
        if "round 1/1000" in line:
            break
    for _ in range(30):  # through the cleaning up, the sentence and the interpreter's end
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.02)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("error: stopped")


def test_a_stopped_comparison_keeps_what_is_finished(cli, small, monkeypatch):
    from coterie.report import progress

    line = progress.round_line

    def stop(event, *rest):
        if len(list(Path("c").glob("*/config.toml"))) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return line(event, *rest)

    monkeypatch.setattr(progress, "round_line", stop)
    words = ("compare", *small, "--rounds", 2, "--methods", "local,fedavg,fedper", "--dir", "c")
    cli(*words, "--verbose").says(130, "Finished methods are kept in c")
    assert Path("c/local/result.json").exists()
    assert not Path("c/fedper").exists()
    assert cli("export", "c/local", "--client", 0).code == 0
    assert cli("run", "--resume", "c/fedavg", "-q").code == 0


def on_a_terminal(*words):
    """Run a command whose standard error is a terminal; what that shows."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "110"}
    process = subprocess.Popen(
        [sys.executable, "-m", "coterie", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=env,
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:
            break
        if not part:
            break
        shown += part
    os.close(ours)
    out = process.communicate(timeout=30)[0]
    assert process.returncode == 0
    return shown.decode(), out.decode()


def test_a_terminal_shows_scores_bytes_and_time_left(small):
    shown, out = on_a_terminal("run", *small, "--rounds", 5, "--epochs", 60, "--dir", "r")
    assert "\x1b[" in shown
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    frames = [f for f in re.split(r"[\r\n]+", plain) if "/5" in f]
    assert any(re.search(r"fedavg .*[1-4]/5 .*\d+ s passed  \d+ s left", f) for f in frames)
    last = frames[-1]
    assert re.search(r" 5/5  received \d+\.\d %  1 group  [\d.]+ kB  in \d+ s", last)
    assert all(len(f.rstrip()) <= 110 for f in frames)
    assert "round 1/5" not in plain  # no plain lines there
    assert out.splitlines()[-1].split() == ["kept", "r"]  # and no control codes elsewhere
    assert "\x1b" not in out


def test_no_terminal_no_control_codes(small):
    ended = forked.run("run", *small, "--rounds", 2)
    assert "\x1b" not in ended.stdout + ended.stderr
    assert "\r" not in ended.stderr
    lines = ended.stderr.splitlines()
    assert [line.split("  ")[:2] for line in lines] == [
        ["fedavg", "round 1/2"],
        ["fedavg", "round 2/2"],
    ]
    (made,) = Path("runs").iterdir()  # the default place
    assert re.fullmatch(r"\d{8}-\d{6}-fedavg", made.name)
    assert (made / "result.json").exists()
