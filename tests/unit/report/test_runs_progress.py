"""What is shown while several runs are at work."""

import io
import re

from rich.console import Console

from coterie.errors import Interrupted, TrainingError
from coterie.report.runs_progress import Screen, runs_progress, shortened
from runs_by_hand import EVENT

NAMES = ("fedavg, dirichlet alpha=0.1, seed 3", "fedavg, dirichlet alpha=0.1, seed 4")


def told(look):
    look.expect(4, 2, swept=True)
    for name in NAMES:
        look.begin(name, 10, "accuracy")
        look.round(name, EVENT)
    look.again(NAMES[0], "was killed (signal 9)")
    look.end(NAMES[0], None)
    look.end(NAMES[1], TrainingError("it diverged"))
    look.tick()


def test_lines_for_files():
    console = Console(file=io.StringIO(), width=60)
    with runs_progress(console) as look:
        told(look)
    lines = console.file.getvalue().splitlines()
    assert (
        lines[0]
        == f"{NAMES[0]}: its process was killed (signal 9); it continues in another process"
    )
    assert lines[1].startswith(f"1/4  {NAMES[0]}: received 50.0 %, ")
    assert lines[2:] == [f"2/4  {NAMES[1]}: failed: it diverged"]
    with runs_progress(console, quiet=True) as look:
        told(look)
    assert console.file.getvalue().splitlines() == lines


def test_who_is_asked_to_stop_has_not_failed():
    for terminal in (False, True):
        console = Console(file=io.StringIO(), width=100, force_terminal=terminal)
        with runs_progress(console) as look:
            look.expect(3, 2, swept=True)
            look.begin("a", 10, "accuracy")
            look.end("a", Interrupted("it was asked to"))
            look.tick()
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
        assert re.search(r"a:? stopped: it was asked to", shown)
        assert "failed" not in shown


def test_a_terminal_shows_all_that_are_at_work_by_name():
    for width in (80, 140):
        console = Console(file=io.StringIO(), width=width, force_terminal=True)
        with runs_progress(console) as look:
            look.expect(4, 2, swept=True)
            for name in NAMES:
                look.begin(name, 10, "accuracy")
                look.round(name, EVENT)
            look.tick()
            plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
            first, second, bar = plain.replace("\r", "\n").splitlines()[-3:]
            for line, seed in ((first, 3), (second, 4)):
                assert f"seed {seed} " in line
                groups = r" +2 groups" if width > 80 else ""
                assert re.search(rf"  +2/10 +received 50\.0 %{groups} +4\.80 kB", line), line
                assert len(line) <= width
            assert re.match(r"0/4 runs +━+.* passed", bar)
            told(look)
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
        assert "it diverged" in plain
        assert "continues in another process" in plain
        assert "1 failed" in plain


def test_time_left_is_that_of_the_share_done():
    times = iter([100.0, 100.0, 160.0])
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    screen = Screen(console, None, now=lambda: next(times))
    screen._runs = 4
    screen.begin("a", 10, "accuracy")
    screen.round("a", {**EVENT, "round": 5})
    screen.end("b", None)
    assert screen.share == 1.5 / 4
    next(times)
    console.print(screen)  # 60 s for 1.5 of 4 runs: 100 s more
    assert "1:00 passed" in console.file.getvalue()
    assert "1:40 left" in console.file.getvalue()


def test_names_keep_both_ends():
    assert shortened("fedavg", 6) == "fedavg"
    for most in range(5, 20):
        short = shortened(NAMES[0], most)
        assert len(short) == most
        assert short[0] == "f"
        assert short[-1] == "3"
