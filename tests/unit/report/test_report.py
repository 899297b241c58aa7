"""Tables and pictures."""

import io
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from coterie.channel.exposure import SECURE, Exposure
from coterie.errors import RunDirError
from coterie.report.comparison_tables import comparison
from coterie.report.data_figures import label_heatmap, target_boxes
from coterie.report.listings import listing, parameters_of, row_of
from coterie.report.tables import (
    exposure_lines,
    label_picture,
    percent,
    print_summary,
    round_line,
    score,
    size,
    target_picture,
)
from runs_by_hand import EVENT

ROW = {
    "method": "fedavg",
    "received": 0.5,
    "adapted": 0.625,
    "worst": 0.25,
    "gain": -0.125,
    "better": 1,
    "as_good": 1,
    "worse_off": 2,
    "compared": 4,
    "groups": 2,
    "agreement": 0.75,
    "bytes": 2_500_000,
    "seconds": 1.25,
    "sees": "means",
}


def text_of(what, width=120, **options):
    console = Console(file=io.StringIO(), width=width, **options)
    console.print(what)
    return console.file.getvalue()


def test_numbers_for_people():
    assert [size(n) for n in (0, 999, 1000, 2_500_000, 3e9, 4e12)] == [
        "0 B",
        "999 B",
        "1.00 kB",
        "2.50 MB",
        "3.00 GB",
        "4000.00 GB",
    ]
    assert (percent(0.1234), percent(None)) == ("12.3", "–")
    assert (score(0.5, "accuracy"), score(0.5, "r2"), score(None, "r2")) == ("50.0", "0.500", "–")


def test_a_round_on_a_line():
    line = round_line(EVENT, 10, "accuracy")
    assert line == (
        "round 2/10  received 50.0 %  worst 25.0 %  2 groups  1.50 kB down, 900 B up  0.5 s"
    )
    unscored = {**EVENT, "received": {}, "lost": 3, "groups": [0, 0]}
    assert round_line(unscored, 10, "accuracy") == (
        "round 2/10  1.50 kB down, 900 B up  0.5 s  3 lost"
    )


def test_methods_side_by_side():
    other = {**ROW, "method": "x [bold]k[/]", "received": 0.75, "gain": None, "better": None}
    other |= {"as_good": None, "worse_off": None}
    other["agreement"] = None
    shown = text_of(comparison([ROW, other], "accuracy"))
    first, second = (next(s for s in shown.splitlines() if s.startswith(n)) for n in ("fed", "x "))
    assert first.split() == [  # ^ is the highest of several
        *["fedavg", "50.0", "62.5^", "25.0^", "-12.5", "1/1/2", "2", "0.75", "2.5", "MB", "1.2"],
        "means",
    ]
    assert "[bold]k[/]" in second  # what a user typed is no markup
    assert second.count("–") == 3
    assert "R²" in text_of(comparison([ROW], "r2"))


SUMMARY = {
    "judged_by": "accuracy",
    "best_on_validation": {},
    "bytes": {"down": 1500, "up": 900, "wasted": {"down": 0, "up": 0}},
    "groups": 1,
    "seconds": 1.0,
    "lost": 0,
    "late": 0,
    "abandoned": 0,
    "stopped": "",
}


def test_a_run_ends_with_what_the_server_saw():
    ledger = Exposure(["in", "out"], 4)
    for number, people in ((1, [0, 1, 2, 3]), (2, [0, 1, 2])):
        ledger.sum(number, "train", 0, people, {"model": ["in", "out"]}, SECURE)
    summary = {**SUMMARY, "exposure": ledger.summary()}
    assert exposure_lines(summary) == ledger.sentences()
    console = Console(file=io.StringIO(), width=60)
    print_summary(console, summary, Path("runs/1"))
    assert console.file.getvalue().splitlines()[1:] == [
        "  exposed  The server saw only sums of 3 to 4 clients, in 2 rounds.",
        "           1 pair of sums differs by a single client (rounds 1 and 2: client 3): the "
        "difference narrows down what that client sent.",
        "     kept  runs/1",
    ]


def test_a_run_of_an_older_version_says_nothing_of_it():
    assert exposure_lines(SUMMARY) == []
    console = Console(file=io.StringIO(), width=60)
    print_summary(console, SUMMARY, Path("runs/1"))
    assert "exposed" not in console.file.getvalue()


def test_the_best_of_a_column_stands_out():
    worse = {**ROW, "method": "worse", "received": 0.25}
    shown = text_of(comparison([worse, ROW], "accuracy"), force_terminal=True)
    assert re.search(r"\x1b\[1m *50\.0", shown)
    assert not re.search(r"\x1b\[1m *25\.0\x1b[^\n]*62", shown.split("worse")[1].split("\n")[0])


def test_the_comparison_fits_a_common_terminal():
    shown = text_of(comparison([ROW, {**ROW, "method": "ifca k=4"}], "accuracy"), width=80)
    assert "…" not in shown
    assert max(len(line) for line in shown.splitlines()) <= 80


def test_listings_come_from_signatures_and_docstrings():
    def thing(shape, k: int, rate=0.1, **rest):
        """What [it] is.

        More of it.
        """

    assert parameters_of(thing, skip=["shape"]) == "k, rate=0.1"
    shown = text_of(listing("Things", {"a-thing": row_of(thing, skip=["shape"])}))
    assert "a-thing" in shown
    assert "What [it] is." in shown
    assert "More" not in shown


def test_labels_as_bars():
    counts = np.array([[8, 0, 4], [1, 8, 0]])
    shown = text_of(label_picture(counts, ["a", "b", "c"], [1, 0]))
    rows = [re.split(r"\s*│\s*", line)[1:-1] for line in shown.splitlines() if "│" in line]
    assert rows == [["0", "1", "██", "", "▄▄", "12"], ["1", "0", "▁▁", "██", "", "9"]]
    assert "true group" not in text_of(label_picture(counts, ["a", "b", "c"], None))


def test_many_classes_and_clients_stay_readable():
    counts = np.eye(100, dtype=int)[:60] * 8
    shown = text_of(label_picture(counts, [str(i) for i in range(100)], None), width=140)
    assert "the first 40 of 60 clients" in shown
    assert "classes 0 to 99" in shown
    rows = [line.split("│")[2] for line in shown.splitlines() if "█" in line]
    assert len(rows) == 40
    assert [row.index("█") - rows[0].index("█") for row in rows] == list(range(40))


def test_targets_as_bars():
    shown = text_of(target_picture([np.array([0.0, 0.0, 10.0]), np.array([5.0])], [0, 1]))
    rows = [line.split("│") for line in shown.splitlines() if "│" in line]
    assert [r[3].strip() for r in rows] == ["█········▄", "·····█····"]
    assert [c.strip() for c in rows[0][4:8]] == ["0", "3.333", "10", "3"]


def check_picture(path):
    """A file that needs nothing else: no script, style or picture from elsewhere."""
    html = path.read_text()
    assert "plotly.js v" in html
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)\s*=", html)
    return html


def test_pictures_are_self_contained(tmp_path):
    label_heatmap(np.array([[3, 1], [0, 4]]), ["cat", "dog"], [1, 0], tmp_path / "a.html")
    html = check_picture(tmp_path / "a.html")
    assert html.index("client 1 (group 0)") < html.index("client 0 (group 1)")  # by true group
    assert "dog" in html
    target_boxes([np.array([1.0, 2.0]), np.array([3.0])], None, tmp_path / "b.html")
    assert "client 1" in check_picture(tmp_path / "b.html")


def test_a_picture_that_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunDirError, match="cannot write"):
        label_heatmap(np.ones((2, 2)), ["a", "b"], None, tmp_path / "file" / "x.html")
