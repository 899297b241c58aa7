"""The table of a comparison: on a terminal, as Markdown, LaTeX and HTML."""

import io
import re

import pytest
from rich.console import Console

from coterie.errors import TrainingError
from coterie.report.compared_runs import compared_runs
from coterie.report.comparison_sections import each_run, standings
from coterie.report.comparison_tables import sheet_of
from coterie.report.table_formats import as_html, as_latex, as_markdown, as_rich, notes_of, tex
from coterie.results.comparison import Comparison
from coterie.results.rows import in_full
from runs_by_hand import finished, round_of

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
    # The differences are -3, 1, -3, 1, -3: mean -1.4, deviation √4.8, and Student's 2.776 of 4.
    gap = r"-1\.4 \[-4\.1, \+1\.3\]~"
    scores = r"52\.0±1\.6~ +" + gap + r" +52\.0±1\.6~ +26\.0±0\.8~ "
    assert len(re.findall(rf"^local +{scores}", shown, re.M)) == 2
    assert len(re.findall(r" 53\.4±2\.7\^ +– +53\.4±2\.7\^ +26\.7±1\.4\^ ", shown)) == 2
    assert [line for line in shown.splitlines() if line.startswith("part = ")] == [
        "part = a_b",
        "part = c",
    ]
    few = text_of(as_rich(sheet_of(swept(seeds=4))))
    assert not re.search("[=~?]", few.replace("part = ", ""))


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
    assert any("too few seeds to tell which differences are real" in note for note in notes)
    failed = {"local, part c, seed 9": TrainingError("diverged")}
    notes = sheet_of(swept(left_out={"x": "refused"}, failed=failed, stopped={"y": "asked"})).notes
    assert any("paired t-test" in note for note in notes_of(sheet_of(swept())))
    for line in ("left out: x (refused)", "stopped: y (asked)"):
        assert line in notes
    assert "failed: local, part c, seed 9 (diverged)" in notes
    uneven = Comparison(swept().rows[1:], "accuracy", swept=True, axes=["part"])
    assert "over 4 to 5 seeds (0, 1, 2, 3, 4)" in sheet_of(uneven).notes
    assert any("chosen on the seeds that all have," in note for note in sheet_of(uneven).notes)
    assert "seeds" in text_of(as_rich(sheet_of(uneven))).split("method")[1].split("\n")[0]


def test_who_lacks_seeds_is_flagged_and_not_tested():
    best = [row("best", s, 0.9) for s in range(5)]
    made = Comparison(
        [*best, *(row("short", s, 0.95 - s) for s in range(3))], "accuracy", swept=True
    )
    sheet = sheet_of(made)
    shown = text_of(as_rich(sheet))
    assert re.search(r"^best +5 +90\.0±0\.0\^ ", shown, re.M)
    assert re.search(r"^short +3/5 +-5\.0±100\.0\? ", shown, re.M)
    assert "? too few seeds to tell: fewer than five in common with it" in notes_of(sheet)[0]
    assert "-5.0 ± 100.0 ? |" in as_markdown(sheet)
    assert "italic: the highest of the usable methods; ? too few seeds" in as_markdown(sheet)
    assert "100.0?" in as_latex(sheet)
    apart = Comparison(
        [row("a", 0, 0.5), *(row("b", s, 0.4) for s in (1, 2))], "accuracy", swept=True
    )
    assert any("fewer than two are left: on all of each" in note for note in sheet_of(apart).notes)
    lone = Comparison(best, "accuracy", swept=True)  # there is nobody to be better than
    assert "*" not in text_of(as_rich(sheet_of(lone)))
    assert not any("same for all" in note for note in notes_of(sheet_of(lone)))


def test_a_target_that_not_all_seeds_reached():
    rows = [
        row("a", s, 0.5, target_round=r, target_bytes=r and 1000)
        for s, r in enumerate([2, None, None])
    ]
    rows += [row("b", s, 0.6, target_round=7, target_bytes=1000) for s in range(3)]
    rows += [row("c", s, 0.6, target_round=None, target_bytes=None) for s in range(3)]
    made = Comparison(rows, "accuracy", swept=True)
    shown = {line.split()[0]: line for line in text_of(as_rich(sheet_of(made)), 140).splitlines()}
    assert re.search(r" 2 \(1/3\) +1\.0 kB \(1/3\) ", shown["a"])
    assert re.search(r" 7 +1\.0 kB ", shown["b"])
    assert "(" not in shown["b"] + shown["c"]
    assert not re.search(r"7\*|\)\*", "".join(shown.values()))
    assert any("reached it" in note for note in sheet_of(made).notes)


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("several", [False, True])
def test_a_narrow_terminal_lacks_whole_columns_and_says_which(width, several):
    more = {"newcomers": 0.25, "clock_communication": 12.5, "clock_total": 1234.5, "wasted": 9}
    more |= {"target_round": 3, "target_bytes": 2_500_000, "target_seconds": 99.5, "agreement": 1.0}
    titles = ("local", "fedavg", "fedprox mu=0.25")
    rows = [row(m, s, 0.5 + s / 40, **more) for m in titles for s in range(5 if several else 1)]
    made = Comparison(rows, "accuracy", swept=several)
    shown = text_of(as_rich(sheet_of(made)), width)
    lines = shown.splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in shown
    whole = text_of(as_rich(sheet_of(made)), 300)
    full = {line.split()[0]: line.split() for line in whole.splitlines() if line.startswith(titles)}
    for line in [line for line in lines if line.startswith(titles)]:
        cells = line.split()
        rest = iter(full[cells[0]])
        assert all(cell in rest for cell in cells), line  # each as it is, in the same order
        assert "MB" in cells
        assert len(cells) >= 6
    head = shown.split("\nlocal")[0]
    for title in ("received", "adapted", "client", "bytes"):
        assert title in head
    told = " ".join(" ".join(lines).split())
    assert re.search(r"no room for: .*time s.* \(they are in comparison\.csv\)", told)
    assert "no room" not in whole


def test_a_gain_of_nothing_has_one_sign():
    rows = [
        row("a", 0, 0.5, gain=-1e-17),
        row("b", 0, 0.5, gain=1e-17),
        row("c", 0, 0.4, gain=-0.1),
    ]
    for swept in (False, True):
        shown = Comparison(rows, "accuracy", swept=swept).markdown()
        assert shown.count("*+0.0*") == 2
        assert "-0.0" not in shown


def test_who_is_alone_in_a_column_is_not_its_best():
    rows = [row("better", s, 0.5, gain=None) for s in range(2)]
    rows += [row("worse", s, 0.4) for s in range(2)]
    for made in (Comparison(rows[::2], "accuracy"), Comparison(rows, "accuracy", swept=True)):
        shown = text_of(as_rich(sheet_of(made)))
        assert " -10.0 " in shown
        assert re.search(r"50\.0(±0\.0)?\^", shown)


def test_the_title_is_one_line():
    few = Comparison([row("a", 0, 0.5, sees="x")], "accuracy")
    assert text_of(as_rich(sheet_of(few))).splitlines()[0].endswith("mean over clients")


def test_markdown_is_a_table_of_even_rows():
    lines = swept().markdown().splitlines()
    rows = [line for line in lines if line.startswith("|")]
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in rows]
    assert len({len(own) for own in cells}) == 1
    assert [set(c) <= set("-:") for c in cells[1]] == [True] * len(cells[1])
    assert rows[0].startswith(
        r"| method | received | to the best \[95 %\] | adapted | worst client |"
    )
    assert "*53.4 ± 2.7*" in rows[3]  # of 53, 50, 55, 52, 57
    assert r"x\_a & 50 %" in rows[3]
    assert r"\|" in rows[3]
    assert " ~ |" in rows[2]
    assert "**part = a\\_b**" in lines


def rows_of(body):
    return [line for line in body if line.endswith(r"\\") and "multicolumn" not in line]


def test_too_few_seeds_are_said_in_every_form():
    few = swept(seeds=4)
    (key,) = [line for line in few.latex().splitlines() if line.startswith(r"\par")]
    assert "4 seeds: too few seeds to tell" in key
    said = "4 seeds: too few seeds to tell"
    assert said in few.markdown()
    assert said in few._repr_html_()
    assert any(said in note for note in notes_of(sheet_of(few)))
    one = Comparison(few.rows[:1] + few.rows[4:5], "accuracy")
    for text in (one.latex(), one.markdown(), one._repr_html_()):
        assert "One seed: too few seeds to tell" in text


def test_latex_is_whole_and_says_what_was_typed():
    text = swept().latex()
    body = [line for line in text.splitlines() if not line.startswith("%")]
    assert body[0].startswith(r"\begin{tabular}{lr")
    assert body[-3:-1] == [r"\bottomrule", r"\end{tabular}"]
    # What the marks mean stands in the paper, and not in a comment.
    assert body[-1].startswith(r"\par\smallskip{\footnotesize italic: the highest of the usable")
    assert r"$\sim$" in "\n".join(rows_of(body))
    columns = len(re.match(r"\\begin\{tabular\}\{(l?r*)\}", body[0])[1])
    rows = rows_of(body)
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
    assert r"\emph{53.4" in text
    proven = [row("a", s, 0.5) for s in range(5)] + [row("b", s, 0.9) for s in range(5)]
    proven += [row("c", s, 0.9 - 0.001 * (s % 2)) for s in range(5)]
    text = Comparison(proven, "accuracy", swept=True).latex()
    assert r"\emph{90.0" in text  # c may be as good,
    assert r"\underline{" in text  # and is equal
    text = Comparison(proven[:10], "accuracy", swept=True).latex()
    assert r"\textbf{90.0" in text
    assert "all others are worse" in text
    assert "±" not in "\n".join(body)
    assert tex("-1 ± 2") == r"-1 $\pm$ 2"


def test_names_are_no_markup_anywhere():
    made = swept()
    assert r"<i>\o" not in made._repr_html_()
    assert "&lt;i&gt;" in as_html(sheet_of(made))
    assert "[bold]$" in text_of(as_rich(sheet_of(made)))


def test_the_best_stands_out_and_a_single_seed_has_no_spread():
    one = Comparison([row("local", 0, 0.5), row("fedavg", 0, 0.75)], "accuracy", swept=True)
    shown = text_of(as_rich(sheet_of(one)), force_terminal=True)
    assert re.search(r"\x1b\[1m *75\.0\x1b\[0m\^", shown)
    assert "[1;32m" not in shown  # nothing is green for a difference that no test supports
    assert "±" not in shown
    told = " ".join(notes_of(sheet_of(one)))
    assert "seed 0: " in told
    assert "ties" not in told
    assert "same for all" not in told
    plain = Comparison([row("local", 0, 0.5), row("fedavg", 0, 0.75)], "accuracy")
    assert "server sees" in plain.markdown()
    assert "*75.0*" in plain.markdown()
    rows = [row(m, s, v) for m, v in (("fedavg", 0.75), ("ifca", 0.5)) for s in range(5)]
    proven = text_of(
        as_rich(sheet_of(Comparison(rows, "accuracy", swept=True))), force_terminal=True
    )
    assert re.search(r"\x1b\[1;32m *75\.0±0\.0\x1b\[0m\*", proven)


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


# --- layers at rest -------------------------------------------------------------------------------

RESTED = {"rested": True, "full_round": 9, "full_received": 0.6125, "full_adapted": 0.655}
BELOW = (
    "† scored in a round in which layers were skipped, so with clients' own layers; the last full "
    "round had: "
)


def test_scores_of_a_round_in_which_layers_rested_have_a_dagger_and_the_full_round_below():
    rows = [row("slow", 0, 0.7, **RESTED), row("fast", 0, 0.5)]
    sheet = sheet_of(Comparison(rows, "accuracy"))
    assert list(sheet.notes[1:]) == [f"{BELOW}slow 61.3 received and 65.5 adapted in round 9"]
    shown = text_of(as_rich(sheet))
    assert re.search(r"^slow +70\.0†\^ +70\.0†\^ +35\.0†\^ +\+20\.0†\^ ", shown, re.M)
    assert re.search(r"^fast +50\.0   +50\.0   +25\.0   +\+0\.0  ", shown, re.M)
    assert "| slow | *70.0*† | *70.0*† |" in as_markdown(sheet)
    assert r"slow & \emph{70.0}$^\dagger$ & \emph{70.0}$^\dagger$ &" in as_latex(sheet)
    assert "<i>70.0</i>†</td>" in as_html(sheet)
    for text in (as_markdown(sheet), as_latex(sheet)):
        assert f"{BELOW}slow 61.3 received" in text
    assert "clients&#39; own layers; the last full round had: slow 61.3" in as_html(sheet)


def test_who_ended_in_a_full_round_has_no_dagger():
    rows = [row("slow", 0, 0.7, **{**RESTED, "rested": False}), row("fast", 0, 0.5)]
    assert "†" not in as_markdown(sheet_of(Comparison(rows, "accuracy")))


def test_over_seeds_the_full_rounds_are_averaged_too():
    ends = [(True, 0.6), (False, 0.7)]  # one seed stopped in a full round
    rows = [
        row("slow", s, 0.7, **{**RESTED, "rested": rested, "full_received": full})
        for s, (rested, full) in enumerate(ends)
    ]
    sheet = sheet_of(
        Comparison([*rows, row("fast", 0, 0.5), row("fast", 1, 0.5)], "accuracy", swept=True)
    )
    assert f"{BELOW}slow 65.0 received and 65.5 adapted in round 9" in sheet.notes
    assert re.search(r"^slow +70\.0±0\.0†\^ ", text_of(as_rich(sheet)), re.M)
    never = [row("slow", 0, 0.7, rested=True, full_received=None), row("fast", 0, 0.5)]
    assert f"{BELOW}none of slow was scored" in sheet_of(Comparison(never, "accuracy")).notes


def scored(number, score, due=None, quiet=("body",)):
    notes = {} if due is None else {"layers": {"all_due": due, "quiet": {"0": list(quiet)}}}
    return {"round": number, "received": {"accuracy": score}, "notes": notes}


def test_the_last_full_round_is_the_last_that_was_scored_with_all_layers():
    rounds = [scored(1, 0.5, due=False), scored(2, 0.6, due=True), scored(3, 0.8, due=False)]
    found = {"rested": True, "full_round": 2, "full_received": 0.6, "full_adapted": None}
    assert in_full(rounds, "accuracy") == found
    unscored = {k: v for k, v in scored(3, 0.0, due=True).items() if k != "received"}
    assert in_full([*rounds[:2], unscored, rounds[2]], "accuracy") == found
    assert in_full(rounds[:2], "accuracy") == {}
    nothing = [scored(n, 0.5, due=False, quiet=()) for n in (1, 2)]
    assert in_full(nothing, "accuracy") == {}
    # The first round that finds layers quiet is one in which all still travel.
    assert in_full([scored(1, 0.5, due=False)], "accuracy") == {}


def test_the_page_of_several_runs_has_the_dagger_too():
    layers = [{"all_due": due, "quiet": {"0": ["body"]}} for due in (True, False)]
    events = [
        round_of(n + 1, received={"accuracy": v}, notes={"layers": layers[n]})
        for n, v in enumerate((0.5, 0.8))
    ]
    runs = []
    for name, seed in (("slow", 0), ("slow", 1), ("fast", 0)):
        told = events if name == "slow" else [{**e, "notes": {}} for e in events]
        config = {"method": {"name": name}, "run": {"seed": seed, "rounds": 2}}
        result = {"judged_by": "accuracy", "received": {"accuracy": 0.8, "worst": 0.7}}
        runs.append(finished(f"{name}-{seed}", events=told, config=config, result=result))
    both = each_run(runs, "a", 2, str)
    assert (both.count("80.0 %†"), both.count("70.0 %†")) == (2, 2)
    over = standings(compared_runs(runs), "b", 2, str)
    assert "80.0 ± 0.0†" in over
    assert "the last full round had: slow 50.0 received in round 1" in over
