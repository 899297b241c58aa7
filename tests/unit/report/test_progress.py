"""What is shown while a run goes on."""

import io
import re

import pytest
from rich.console import Console

from coterie.report.progress import Board, lasting, progress
from coterie.report.tables import round_line
from runs_by_hand import EVENT


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def board(clock, *rounds, seconds=2.0, **options):
    """A board that was told of these rounds, so many seconds apart."""
    made = Board("fedavg", 10, options.pop("judged_by", "accuracy"), now=clock, **options)
    for number in rounds:
        clock.now += seconds
        made.take({**EVENT, "round": number, "seconds": {"train": seconds, "score": 0.0}})
    return made


def line(made, width=200):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, no_color=True)
    console.print(made)
    rows = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue()).splitlines()
    assert len(rows) == 1
    return rows[0].rstrip()


def test_plain_lines_where_there_is_no_terminal():
    console = Console(file=io.StringIO(), width=40)
    with progress(console, "fedavg", 10, "accuracy") as watch:
        watch(EVENT)
        watch({**EVENT, "round": 3})
    lines = console.file.getvalue().splitlines()
    assert lines == [f"fedavg  {round_line({**EVENT, 'round': n}, 10, 'accuracy')}" for n in (2, 3)]


def test_a_plain_line_has_the_adapted_score_where_it_was_taken():
    shown = round_line({**EVENT, "adapted": {"accuracy": 0.75}}, 10, "accuracy")
    assert "received 50.0 %  worst 25.0 %  adapted 75.0 %" in shown


def test_quiet_is_quiet():
    console = Console(file=io.StringIO(), force_terminal=True)
    with progress(console, "fedavg", 10, "accuracy", quiet=True) as watch:
        watch(EVENT)
    assert console.file.getvalue() == ""


def test_a_terminal_has_it_all_and_says_at_the_end_how_long_it_took():
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with progress(console, "fedavg", 3, "accuracy") as watch:
        for number in (1, 2, 3):
            watch({**EVENT, "round": number})
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue()).splitlines()[-1]
    assert re.search(r"fedavg  ━+  3/3  received 50.0 %  2 groups  4.80 kB  in \d s", last)


def test_before_the_first_round_nothing_is_promised():
    clock = Clock()
    made = board(clock)
    clock.now += 7
    assert re.fullmatch(r"fedavg  [━ ]*  0/10  7 s passed", line(made)), line(made)


def test_the_time_left_is_that_of_the_last_rounds_and_runs_down_between_them():
    clock = Clock()
    made = board(clock, 1, 2, 3)  # 2 s each; 7 are to come
    assert line(made).endswith("6 s passed  14 s left")
    clock.now += 3
    assert line(made).endswith("9 s passed  11 s left")
    clock.now += 60  # a slow round: it is due, not overdue by less than nothing
    assert line(made).endswith("0 s left")


def test_what_came_before_the_first_round_is_not_taken_for_a_round():
    clock = Clock()
    made = board(clock)
    clock.now += 1000  # a long warm-up
    made.take({**EVENT, "round": 1, "seconds": {"train": 1.5, "score": 0.5}})
    assert made.left == pytest.approx(9 * 2)


def test_rounds_of_long_ago_count_no_more():
    clock = Clock()
    made = Board("fedavg", 100, "accuracy", now=clock)
    for number in range(1, 61):
        clock.now += 10 if number <= 30 else 1  # it became faster
        made.take({**EVENT, "round": number})
    assert made.left == pytest.approx(40)


def test_a_resumed_run_counts_on_and_takes_only_its_own_time():
    clock = Clock()
    made = board(clock, done=6)
    assert " 6/10 " in line(made)
    made = board(clock, 7, 8, done=6)
    assert " 8/10 " in line(made)
    assert made.left == pytest.approx(4)  # two rounds of two seconds
    assert "4 s passed  4 s left" in line(made)


def test_a_round_whose_scores_come_later_is_shown_and_counted_once():
    clock = Clock()
    made = board(clock, 6, 7, done=6)  # resumed: round 6 gets its scores with round 7's orders
    assert (made.done, made.left) == (7, pytest.approx(6))
    made.take({**EVENT, "round": 7, "lost": 3, "received": {"accuracy": 0.9}})  # again
    assert (made.done, made.left) == (7, pytest.approx(6))
    assert "received 90.0 %" in line(made)
    assert "lost" not in line(made)  # it was counted when it came first


def test_where_a_run_may_end_earlier_it_is_the_most_that_is_left():
    assert line(board(Clock(), 1, 2, may_end=True)).endswith("≤ 16 s left")


def test_scores_stay_until_there_are_new_ones():
    clock = Clock()
    made = board(clock, 1)
    made.take({**EVENT, "round": 2, "adapted": {"accuracy": 0.625}})
    made.take({k: v for k, v in EVENT.items() if k != "received"} | {"round": 3})
    assert "received 50.0 %  adapted 62.5 %  2 groups" in line(made)


def test_a_regression_has_no_percentages():
    made = Board("fedavg", 10, "r2", now=Clock())
    made.take({**EVENT, "received": {"r2": 0.4567, "worst": -1.0}})
    assert "received 0.457 R²" in line(made)


def test_rounds_for_nothing_and_lost_replies_are_said():
    made = board(Clock(), 1)
    made.take({**EVENT, "round": 2, "lost": 2, "late": 1, "abandoned": "nobody answered"})
    assert "4.80 kB  3 lost  1 abandoned" in line(made)


@pytest.mark.parametrize("width", range(1, 141))
def test_it_fits_and_loses_the_least_first(width):
    made = board(Clock(), 1, 2)
    made.take({**EVENT, "round": 3, "adapted": {"accuracy": 0.625}, "lost": 1})
    shown = line(made, width)
    assert len(shown) <= width
    order = [" 3/10", "received 50.0 %", "s left", "4.80 kB", "2 groups", "fedavg", "adapted"]
    there = [part in shown for part in order] + ["1 lost" in shown, "passed" in shown]
    assert there == sorted(there, reverse=True)
    if width >= 80:
        assert all(there[:7])
    if width >= 120:
        assert all(there)
        assert "━" in shown


def test_a_terminal_without_colour_has_none(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with progress(console, "fedavg", 3, "accuracy") as watch:
        watch({**EVENT, "lost": 2})
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", console.file.getvalue())


def test_seconds_for_people():
    assert [lasting(s) for s in (0, 59.4, 59.6, 3599.6, 86400)] == [
        *("0 s", "59 s", "1:00", "1:00:00", "1 d 0 h")
    ]
