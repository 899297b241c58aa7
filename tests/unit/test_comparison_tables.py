"""The table of a comparison: on a terminal, as Markdown, LaTeX and HTML."""

import io
import re

import pytest
from rich.console import Console

from coterie.errors import TrainingError
from coterie.report.comparison_tables import sheet_of
from coterie.report.sheets import as_html, as_rich, tex
from coterie.run.comparison import Comparison

NASTY = r"x_a & 50 % #1 {b} <i>\o</i> | *k* [bold]$"


def row(method, seed, received, **more):
    return {
        "method": method,
        "seed": seed,
        "received": received,
        "adapted": received,
        "newcomers": None,
        "worst": received / 2,
        "gain": None if method == "local" else received - 0.5,
        "better": None,
        "compared": None,
        "groups": 1,
        "agreement": None,
        "bytes": 2_500_000,
        "wasted": 0,
        "rounds": 2,
        "stopped": "",
        "seconds": 1.25,
        "sees": "means",
        "headline": "received",
        **more,
    }


def swept(seeds=5, **more):
    rows = [row("local", s, 0.50 + s / 100, part=p) for p in ("a_b", "c") for s in range(seeds)]
    rows += [
        row(NASTY, s, 0.51 + s / 100 + (-1) ** s / 50, part=p)
        for p in ("a_b", "c")
        for s in range(seeds)
    ]
    return Comparison(rows, "accuracy", swept=True, axes=["part"], **more)


def text_of(what, width=120, **options):
    console = Console(file=io.StringIO(), width=width, **options)
    console.print(what)
    return console.file.getvalue()


def test_means_and_spread_by_hand():
    # local: 0.50 … 0.54, so 52.0 and sqrt((4 + 1 + 0 + 1 + 4) / 4) / 100 = 1.6 %
    shown = text_of(as_rich(sheet_of(swept())))
    assert len(re.findall(r"^local +52\.0±1\.6= +52\.0±1\.6= +26\.0±0\.8= ", shown, re.M)) == 2
    assert [line for line in shown.splitlines() if line.startswith("part = ")] == [
        "part = a_b",
        "part = c",
    ]
    few = text_of(as_rich(sheet_of(swept(seeds=4))))
    assert "=" not in few.replace("part = ", "")


def test_a_sweep_fits_a_common_terminal():
    rows = [row(m, s, 0.5 + s / 40) for m in ("local", "fedavg", "ifca k=4") for s in range(5)]
    for each in rows:
        each |= {"agreement": 1.0, "gain": 0.1, "bytes": 100_500_000, "seconds": 100.0}
    made = Comparison(rows, "accuracy", swept=True)
    shown = text_of(as_rich(sheet_of(made)), width=80)
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_what_is_said_below():
    notes = sheet_of(swept(seeds=4)).notes
    assert any("fewer than five seeds nothing is said about ties" in note for note in notes)
    failed = {"local, part c, seed 9": TrainingError("diverged")}
    notes = sheet_of(swept(left_out={"x": "refused"}, failed=failed, stopped={"y": "asked"})).notes
    assert any("paired t-test" in note for note in notes)
    for line in ("left out: x (refused)", "stopped: y (asked)"):
        assert line in notes
    assert "failed: local, part c, seed 9 (diverged)" in notes
    uneven = Comparison(swept().rows[1:], "accuracy", swept=True, axes=["part"])
    assert "over 4 to 5 seeds (0, 1, 2, 3, 4), the same for all methods" in sheet_of(uneven).notes
    assert any("seeds that both have" in note for note in sheet_of(uneven).notes)
    assert "seeds" in text_of(as_rich(sheet_of(uneven))).split("method")[1].split("\n")[0]


def test_markdown_is_a_table_of_even_rows():
    lines = swept().markdown().splitlines()
    rows = [line for line in lines if line.startswith("|")]
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in rows]
    assert len({len(own) for own in cells}) == 1
    assert [set(c) <= set("-:") for c in cells[1]] == [True] * len(cells[1])
    assert rows[0].startswith("| method | received | adapted | worst client |")
    assert "**53.4 ± 2.7**" in rows[3]  # of 53, 50, 55, 52, 57
    assert r"x\_a & 50 %" in rows[3]
    assert r"\|" in rows[3]
    assert " = |" in rows[2]
    assert "**part = a\\_b**" in lines


def test_latex_is_whole_and_says_what_was_typed():
    text = swept().latex()
    body = [line for line in text.splitlines() if not line.startswith("%")]
    assert body[0].startswith(r"\begin{tabular}{lr")
    assert body[-2:] == [r"\bottomrule", r"\end{tabular}"]
    columns = len(re.match(r"\\begin\{tabular\}\{(l?r*)\}", body[0])[1])
    rows = [line for line in body if line.endswith(r"\\") and "multicolumn" not in line]
    assert len(rows) == 1 + 2 * 2
    for line in rows:
        assert len(re.findall(r"(?<!\\)&", line)) == columns - 1
    plain = re.sub(r"\\[{}]", "", "\n".join(body))
    depth = 0
    for sign in plain:
        depth += (sign == "{") - (sign == "}")
        assert depth >= 0
    assert depth == 0
    assert len(re.findall(r"(?<!\\)\$", plain)) % 2 == 0
    assert not re.search(r"(?<!\\)[_#%]", plain)
    assert r"x\_a \& 50 \% \#1 \{b\}" in plain + "\n".join(body)
    assert r"\textbf{" in text
    assert r"\underline{" in text
    assert "±" not in "\n".join(body)
    assert tex("-1 ± 2") == r"-1 $\pm$ 2"


def test_names_are_no_markup_anywhere():
    made = swept()
    assert "<i>" not in made._repr_html_()
    assert "&lt;i&gt;" in as_html(sheet_of(made))
    assert "[bold]$" in text_of(as_rich(sheet_of(made)))


def test_the_best_stands_out_and_a_single_seed_has_no_spread():
    one = Comparison([row("local", 0, 0.5), row("fedavg", 0, 0.75)], "accuracy", swept=True)
    shown = text_of(as_rich(sheet_of(one)), force_terminal=True)
    assert re.search(r"\x1b\[1;32m *75\.0\x1b", shown)
    assert "±" not in shown
    plain = Comparison([row("local", 0, 0.5), row("fedavg", 0, 0.75)], "accuracy")
    assert "server sees" in plain.markdown()
    assert "**75.0**" in plain.markdown()


def test_a_regression_is_not_in_per_cent():
    rows = [row("local", s, 0.5 + s / 10) for s in range(2)]
    shown = text_of(as_rich(sheet_of(Comparison(rows, "r2", swept=True))))
    assert "R²" in shown
    assert "0.550±0.071" in shown  # 0.05 · sqrt(2)


def test_without_pandas_it_is_said_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(Exception, match="pip install"):
        swept().to_dataframe()
