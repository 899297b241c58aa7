"""The report: one file, whatever a run looks like, with nothing of a user taken for markup."""

import copy
import json
import os
import random
import re
import signal
import threading
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from jinja2 import UndefinedError
from typer.testing import CliRunner

import forked
from coterie.cli.app import app
from coterie.errors import ConfigError, RunDirError
from coterie.experiment.api import simulate
from coterie.report import html, run_sections
from coterie.report import page as page_module
from coterie.report.html import readings_of, report, write_report
from coterie.report.page import compared_blocks, contents, document, run_blocks
from coterie.report.reading import Reading, read_run
from coterie.report.rendering import HtmlCell, render, safe_json
from coterie.results.rundir import RunDir
from runs_by_hand import clients, finished, written

EVIL = "<script>alert(1)</script>"
CLOSING = "</script><img src=x onerror=alert(2)>"
QUOTED = '"><svg onload=alert(3)> \u2028 <!--'
NAMES = [EVIL, CLOSING, QUOTED, "plain"]
VOID = {"meta", "br", "hr", "input", "col", "link", "img"}
MARKUP_OF_USERS = ("alert(1)<", "<img", "<svg onload", "onerror=alert(2)>")


class Page(HTMLParser):
    """A page taken apart: elements, ids, text, headings, scripts, what would be loaded."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.ids, self.loads = [], [], [], []
        self.text, self.scripts, self.tiles = [], [], {}
        self.feed(text)
        self.close()
        assert self.open == [], f"never closed: {self.open}"
        self.words = " ".join(" ".join(self.text).split())

    def handle_starttag(self, name, attrs):
        attrs = dict(attrs)
        self.tags.append((name, attrs))
        self.ids += [attrs["id"]] if "id" in attrs else []
        for key in ("src", "href", "action", "data", "poster", "srcset"):
            if attrs.get(key, "#").strip()[:1] != "#":
                self.loads.append((name, key, attrs[key]))
        assert not [key for key in attrs if key.startswith("on")], attrs
        if name == "script":
            self.scripts.append((attrs, []))
        if name not in VOID:
            self.open.append((name, attrs))

    def handle_endtag(self, name):
        assert self.open, f"</{name}> closes nothing"
        assert self.open[-1][0] == name, f"</{name}> closes {self.open[-1]}"
        self.open.pop()

    def handle_data(self, data):
        inside = [name for name, _ in self.open]
        if "script" in inside:
            self.scripts[-1][1].append(data)
        elif "style" not in inside:
            self.text.append(data)
            if inside and inside[-1] in ("dt", "dd"):
                self._tile(inside[-1], data)

    def _tile(self, name, data):
        if name == "dt":
            self.title = data
        elif "value" in self.open[-1][1].get("class", "").split():
            self.tiles[self.title] = data

    @property
    def figures(self):
        kept = {a["id"]: "".join(s) for a, s in self.scripts if a.get("type") == "application/json"}
        return {id: json.loads(text) for id, text in kept.items() if id.startswith("data-")}

    @property
    def levels(self):
        return [int(name[1]) for name, _ in self.tags if re.fullmatch(r"h[1-6]", name)]


def a_round(number, clients=4, **more):
    own = [0.25 * (c + 1) for c in range(clients)]
    return {
        "round": number,
        "cohort": list(range(clients)),
        "groups": [c % 2 if number > 1 else 0 for c in range(clients)],
        "bytes": {"down": 1000, "up": 500},
        "total_bytes": {"down": 1000 * number, "up": 500 * number},
        "kinds": {"model/" + EVIL: [900, 400], "header": [100, 100]},
        "client_bytes": {str(c): [250, 125] for c in range(clients)},
        "lost": 0,
        "late": 0,
        "received": {"accuracy": 0.625, "worst": 0.25, "worst_client": 0, "p10": 0.3, "p90": 0.9}
        | {"p50": 0.6, "std": 0.2, "loss": 1.0},
        "client_scores": {"received": own},
        "seconds": {"train": 0.5, "score": 0.25},
        **more,
    }


def a_run(folder, events, result=None, name="run", torn=""):
    """A run directory by hand whose every name is markup."""
    run = RunDir(folder / name)
    run.path.mkdir(parents=True)
    run.write_config(
        {
            "data": {"set": EVIL, "note": CLOSING},
            "method": {"name": "fedavg", "label": QUOTED},
            "run": {"rounds": 3, "seed": 11},
        }
    )
    run.events.write_text("".join(json.dumps(e) + "\n" for e in events) + torn)
    labels = {"labels": [[3, 1], [1, 3], [2, 2], [4, 0]], "classes": [EVIL, CLOSING]}
    run.data.write_text(json.dumps({"names": NAMES, "groups": [0, 1, 0, 1], **labels}))
    argv = ["run", "--set", f"method.label={QUOTED}", "it's"]
    session = {"at": "2026-01-02T03:04:05+00:00", "argv": argv, "rounds": 3, "engine": EVIL}
    session |= {"versions": {"torch": CLOSING}, "system": EVIL}
    run.sessions.write_text(json.dumps(session) + "\n")
    if result is not None:
        run.result.write_text(json.dumps(result))
    return run.path


RESULT = {
    "method": "fedavg",
    "rounds": 3,
    "stopped": "",
    "judged_by": "accuracy",
    "headline": "adapted",
    "received": {"accuracy": 0.4375, "worst": 0.125, "worst_client": 1, "p10": 0.2, "loss": 1.0},
    "adapted": {"accuracy": 0.5625, "worst": 0.3125, "worst_client": 2, "p10": 0.4, "loss": 0.9},
    "bytes": {"down": 3_000_000, "up": 1_500_000, "kinds": {"model/x": {"down": 3, "up": 1}}},
    "groups": 2,
    "sees": "means",
    "clock": {"computation": 30.0, "communication": 12.5, "waiting": 0.0, "total": 42.5},
    "privacy": {"secure": False, "randomness": "simulated", "epsilon": 7.25, "delta": 1e-5}
    | {"accountant": "pld", "adjacency": EVIL},
}
SESSIONS = [
    {"at": "2026-01-02T03:04:05+00:00", "argv": ["run"], "folder": "/", "rounds": 3, "done": 0}
    | {"engine": "pool", "workers": 2, "versions": {"torch": "2"}, "system": "x"}
]


@pytest.fixture(scope="module")
def strange(tmp_path_factory):
    """A finished run with markup everywhere, a torn line, and an event from the future."""
    future = {"round": 2, "event": EVIL, "groups": "?"}
    events = [a_round(1), a_round(2), future, a_round(3)]
    return a_run(tmp_path_factory.mktemp("strange"), events, RESULT, torn='{"round": 4, "gro')


@pytest.fixture(scope="module")
def page(strange):
    return Page(report([read_run(strange)]))


def sound(text):
    """What every page must be."""
    page = Page(text)
    assert [id for id, n in Counter(page.ids).items() if n > 1] == []
    assert page.loads == []
    assert "http://" not in "".join(re.findall(r"url\([^)]*\)|@import[^;]*", _own(text)))
    assert page.levels.count(1) == 1
    assert page.levels[0] == 1
    assert all(b - a <= 1 for a, b in zip(page.levels, page.levels[1:], strict=False))
    plots = [a for _, a in page.tags if "data-plot" in a]
    assert sorted(a["data-plot"] for a in plots) == sorted(page.figures)
    assert all(a["role"] == "img" and a["aria-label"] for a in plots)
    assert all({"data", "layout"} <= set(f) for f in page.figures.values())
    library = [s for _, s in page.scripts if "plotly.js v" in "".join(s)[:300]]
    assert len(library) == 1
    for broken in MARKUP_OF_USERS:
        assert broken not in _own(text)
    return page


def _own(text):
    """The page without plotly.js."""
    from plotly.offline import get_plotlyjs

    assert text.count(get_plotlyjs()) == 1
    return text.replace(get_plotlyjs(), "")


def test_names_are_text_wherever_they_stand(strange, page):
    sound(report([read_run(strange)]))
    for name in NAMES:
        assert " ".join(name.split()) in page.words, name
    tags = {name for name, _ in page.tags}
    assert not tags & {"img", "svg"}
    kinds = [attrs.get("type") for attrs, _ in page.scripts]
    assert kinds.count(None) == 3  # the theme, plotly.js, the page's own


def test_the_policy_lets_nothing_out(page):
    policies = [
        a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"
    ]
    assert len(policies) == 1
    rules = dict(rule.strip().split(" ", 1) for rule in policies[0].split(";"))
    assert rules["default-src"] == "'none'"
    allowed = {source for sources in rules.values() for source in sources.split()}
    assert allowed <= {"'none'", "'unsafe-inline'", "data:", "blob:"}


def test_tiles_are_the_numbers_of_the_summary(page):
    assert page.tiles == {
        "Received": "43.8 %",  # 0.4375, as the terminal rounds it
        "Adapted": "56.2 %",
        "Worst client": "31.2 %",  # of the adapted ones: it is judged by these
        "Groups": "2",
        "Bytes": "4.50 MB",
        "Simulated time": "42.5 s",
        "Rounds": "3",
        "Privacy loss": "ε ≤ 7.25",
        "The server saw": "means",
    }


def test_what_was_left_out_is_said(page):
    assert "1 event of kind '<script>alert(1)</script>': left out" in page.words
    assert "Stopped" not in page.words


def test_commands_can_be_typed_again(strange, page):
    import shlex

    line = next(t for t in page.text if t.startswith("coterie run --set"))
    assert shlex.split(line) == ["coterie", "run", "--set", f"method.label={QUOTED}", "it's"]
    assert f"coterie run {strange}/config.toml" in page.words
    import tomllib

    config = tomllib.loads(next(t for t in page.text if t.startswith("[data]")))
    assert config == tomllib.loads((strange / "config.toml").read_text())


def test_the_worst_clients_are_named_first(tmp_path):
    own = [0.5, 0.125, 0.75, 0.25]
    scores = {"client_scores": {"received": own}}
    found = Page(report([read_run(a_run(tmp_path, [a_round(1, **scores)]))]))
    rows = [a.get("data-sort") for n, a in found.tags if a.get("scope") == "row"]
    named = [name for name in rows if name in NAMES]
    assert named == [NAMES[1], NAMES[3], NAMES[0], NAMES[2], *NAMES]


def test_a_run_that_crashed_says_how_to_go_on(tmp_path):
    place = a_run(tmp_path, [a_round(1), a_round(2)], name="a run")
    found = sound(report([read_run(place)]))
    assert "Stopped, or crashed. This page shows the run after 2 of 3 rounds." in found.words
    assert f"coterie run --resume '{place}'" in found.words
    assert found.tiles["Received"] == "62.5 %"
    assert found.tiles["Worst client"] == "25.0 %"
    assert found.tiles["Bytes"] == "3.00 kB"


def test_a_run_that_goes_on_says_so(tmp_path):
    place = a_run(tmp_path, [a_round(1)])
    held = RunDir(place)
    held.lock()
    try:
        found = sound(report([read_run(place)]))
    finally:
        held.unlock()
    assert "Running. This page shows the run after 1 of 3 rounds." in found.words


@pytest.mark.parametrize("lines", ["", "\n", "{", '{"round": 1}\n', '{"round":1,"groups":null}\n'])
def test_next_to_nothing_is_enough(lines, tmp_path):
    place = a_run(tmp_path, [])
    (place / "events.jsonl").write_text(lines)
    sound(report([read_run(place)]))


def test_a_run_without_its_configuration(tmp_path):
    place = a_run(tmp_path, [a_round(1)])
    (place / "config.toml").unlink()
    sound(Path(write_report(place, tmp_path / "r.html")).read_text())


def test_old_events_have_little(tmp_path):
    """No kinds, bytes or scores by client, seconds; a summary without headline or exposure."""
    bare = {"round": 1, "groups": [0, 0, 1, 1], "received": {"accuracy": 0.5}}
    bare |= {"bytes": {"down": 10, "up": 5}, "total_bytes": {"down": 10, "up": 5}}
    result = {"method": "fedavg", "rounds": 1, "received": {"accuracy": 0.5}, "groups": 2}
    found = sound(report([read_run(a_run(tmp_path, [bare], result))]))
    assert found.tiles == {"Received": "50.0 %", "Groups": "2", "Bytes": "15 B", "Rounds": "1"}


def test_a_result_in_memory(tmp_path):
    import torch

    people = [(torch.randn(20, 3), torch.randint(0, 2, (20,))) for _ in range(3)]
    result = simulate(people, method="fedavg", rounds=1)
    place = write_report(result, tmp_path / "new" / "mine.html", "Mine & <yours>")
    found = sound(place.read_text())
    assert "Mine & <yours>" in found.words
    assert "started from Python" in found.words


# --- several ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two methods on two seeds: 0.5 and 0.7 of the one, 0.6 and 0.7 of the other."""
    top = tmp_path_factory.mktemp("several")
    for name, seed, accuracy in (("a", 1, 0.5), ("a", 2, 0.7), ("b", 1, 0.6), ("b", 2, 0.7)):
        result = {**RESULT, "method": name, "received": {"accuracy": accuracy, "worst": 0.1}}
        place = a_run(top, [a_round(1)], result, name=f"{name}{seed}")
        config = {"method": {"name": name}, "run": {"rounds": 1, "seed": seed}}
        RunDir(place).write_config({**config, "train": {"lr": 0.05, "note": EVIL}})
    (top / "notes").mkdir()
    (top / "comparison.json").write_text("not JSON at all")
    return top


def cells(text, id):
    """The rows of the first table inside an element."""
    body = text.split(f'id="{id}"')[1].split("<tbody>")[1].split("</tbody>")[0]
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in body.split("<tr>")[1:]]
    return [[re.sub(r"<[^>]*>", "", cell) for cell in row] for row in rows]


def test_runs_side_by_side(folder, tmp_path):
    text = write_report(folder, tmp_path / "r.html").read_text()
    found = sound(text)
    rows = cells(text, "compared-table")
    assert [row[:3] for row in rows] == [
        ["a1", "1", "50.0"],
        ["a2", "2", "70.0 (best)"],
        ["b1", "1", "60.0"],
        ["b2", "2", "70.0 (best)"],
    ]
    # Means 0.6 and 0.65; deviations 0.1·√2 and 0.05·√2.
    over = cells(text, "over-seeds")
    assert [row[:3] for row in over] == [
        ["a", "2", "60.0 ± 14.1"],
        ["b", "2", "65.0 ± 7.1 (best)"],
    ]
    assert sorted(row[0] for row in cells(text, "settings")) == ["method.name", "run.seed"]
    assert "train.note" in found.words
    # Each in full, folded since there are many, reached from the contents.
    links = [a["href"] for n, a in found.tags if n == "a"]
    folds = [a["id"] for n, a in found.tags if n == "details" and a.get("class") == "run"]
    assert folds == [f"run-{n}" for n in range(1, 5)]
    assert {f"#{id}" for id in folds} <= set(links)
    assert all(link[1:] in found.ids for link in links)


def test_few_runs_are_not_folded(folder, tmp_path):
    text = write_report([folder / "a1", folder / "b1", folder / "a1"], tmp_path / "r.html")
    found = sound(text.read_text())
    assert [a for n, a in found.tags if n == "details" and a.get("class") == "run"] == []
    assert {"run-1", "run-2"} <= set(found.ids)  # the one named twice is there once
    assert "run-3" not in found.ids
    assert "over-seeds" not in found.ids


@pytest.mark.skipif(threading.active_count() > 1, reason="children are for a single thread")
def test_the_page_is_the_same_on_any_number_of_cores(folder, monkeypatch):
    readings = readings_of([folder])
    pages = []
    for cores in (1, 3):
        monkeypatch.setattr(html, "available_cores", lambda cores=cores: cores)
        pages.append(report(readings))
    assert pages[0] == pages[1]


# --- the command --------------------------------------------------------------------------------


def invoked(*words):
    return CliRunner().invoke(app, ["report", *map(str, words)])


def test_the_command_writes_into_the_run_and_again(strange):
    done = forked.run("report", strange)
    place = strange / "report.html"
    assert str(place) in done.stdout.replace("\n", "")
    assert f"{place.stat().st_size / 1e6:.1f} MB" in done.stdout
    assert invoked(strange).exit_code == 0  # one of ours may be written anew


def test_what_is_no_report_is_not_written_over(strange, tmp_path):
    precious = tmp_path / "thesis.html"
    precious.write_text("<p>mine")
    refused = invoked(strange, "--to", precious)
    assert isinstance(refused.exception, ConfigError)
    assert "--force" in str(refused.exception)
    assert precious.read_text() == "<p>mine"
    assert invoked(strange, "--to", precious, "--force").exit_code == 0
    assert "coterie report" in precious.read_text()[:2000]


def test_a_child_that_is_killed_costs_time_and_no_report(folder, tmp_path, monkeypatch):
    parent, whole, here = os.getpid(), html._of_run, []

    def deadly(reading, place):
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        here.append(place)
        return whole(reading, place)

    monkeypatch.setattr(html, "_OPEN", 1)
    monkeypatch.setattr(html, "_of_run", deadly)
    monkeypatch.setattr(html, "available_cores", lambda: 2)
    path = html.write_report([folder], tmp_path / "report.html")
    assert here == list(range(len(here)))
    assert len(here) > 1
    assert "coterie report" in path.read_text()[:2000]


def test_where_it_goes(folder, strange, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert invoked(folder).exit_code == 0
    assert (folder / "report.html").is_file()
    assert invoked(folder, strange).exit_code == 0
    assert (tmp_path / "report.html").is_file()
    (tmp_path / "out").mkdir()
    assert invoked(strange, "--to", "out").exit_code == 0
    assert (tmp_path / "out" / "report.html").is_file()


@pytest.mark.parametrize("made", [True, False])
def test_what_is_no_run_is_said(made, tmp_path):
    place = tmp_path / "empty"
    if made:
        place.mkdir()
    assert RunDirError.exit_code == 4
    said = forked.run("report", place, code=4).stderr.replace("\n", " ")
    assert ("config.toml" if made else "there is no folder") in said
    assert "Traceback" not in said


def test_what_cannot_be_written_is_said(strange, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirError, match=r"cannot write .*--to"):
        write_report(strange, tmp_path / "file" / "report.html")


# --- the pieces ---------------------------------------------------------------------------------


def test_json_in_a_script_is_the_same_tree_and_no_markup():
    tree = {"a": NAMES, "b": "&amp; \u2028 \u2029 é"}
    text = safe_json(json.dumps(tree, ensure_ascii=False))
    assert json.loads(text) == tree
    assert not set("<>&\u2028\u2029") & set(text)
    assert safe_json('"<"') == '"\\u003c"'


def test_attributes_and_cells_are_escaped():
    told = {"id": QUOTED, "title": CLOSING, "level": 2, "caption": EVIL, "columns": [CLOSING]}
    rows = [[QUOTED], [HtmlCell(EVIL, sort=QUOTED, best=True, link=QUOTED)]]
    text = render("table.html", **told, rows=rows, sortable=True, numbers=0)
    assert "<script" not in text
    assert "<svg" not in text
    assert Page(text).ids == [QUOTED]


def test_a_value_that_a_template_lacks_is_an_error():
    with pytest.raises(UndefinedError, match="level"):
        render("heading.html", id="x", title="y")


def test_ids_stay_the_same_as_a_run_grows(tmp_path):
    """A live page replaces blocks by id: what was there stays there."""
    place = a_run(tmp_path, [a_round(1)])
    before = [b.id for b in run_blocks(read_run(place))]
    with (place / "events.jsonl").open("a") as file:
        file.write(json.dumps(a_round(2)) + "\n")
    after = [b.id for b in run_blocks(read_run(place))]
    assert set(before) <= set(after)
    assert [id for id in after if id in before] == before


def test_each_block_is_one_element_with_its_id(strange):
    for block in run_blocks(read_run(strange), "x-", level=3):
        found = Page(block.html)
        assert found.tags[0][1]["id"] == block.id
        assert block.id.startswith("x-")
        assert all(id.startswith(("x-", "plot-x-", "tab-x-")) for id in found.ids)
        assert (block.figure is not None) == any("data-plot" in a for _, a in found.tags)


def test_a_page_with_a_library_elsewhere():
    blocks = run_blocks(Reading("nothing", "stopped"))
    text = document("Live", blocks, plotly="/plotly.js", scripts=["start()"], policy=None)
    found = Page(text)
    assert found.loads == [("script", "src", "/plotly.js")]
    assert len(text) < 100_000
    assert "".join(found.scripts[-1][1]) == "start()"
    assert [link.target for link in contents(blocks)] == ["section-repeat"]


# --- what was found wrong before ----------------------------------------------------------------


def test_runs_of_one_name_are_told_apart(tmp_path):
    """Under three folders, two of which have the same name, and in memory."""
    places = []
    for above, accuracy in (("one/x", 0.25), ("two/x", 0.5), ("two/y", 0.75)):
        result = {**RESULT, "received": {"accuracy": accuracy}}
        places.append(a_run(tmp_path / above, [a_round(1)], result))
    assert [r.name for r in readings_of(places)] == ["one/x/run", "two/x/run", "two/y/run"]
    assert [r.name for r in readings_of([places[0], places[2]])] == ["x/run", "y/run"]
    text = report(readings_of(places))
    sound(text)
    assert [row[:2] for row in cells(text, "compared-table")] == [
        ["one/x/run", "25.0"],
        ["two/x/run", "50.0"],
        ["two/y/run", "75.0 (best)"],
    ]
    assert 'id="over-seeds"' not in text  # they have the same seed
    legend = [t["name"] for t in Page(text).figures["data-compared-fig-compare-cost"]["data"]]
    assert legend == ["one/x/run", "two/x/run", "two/y/run"]


def test_results_in_memory_are_told_apart_and_no_seeds_are_made_up():
    import torch

    people = [(torch.randn(20, 3), torch.randint(0, 2, (20,))) for _ in range(3)]
    ways = ((3, 0.01), (3, 0.5), (4, 0.5))
    made = [simulate(people, rounds=1, engine="loop", seed=seed, lr=lr) for seed, lr in ways]
    text = report(readings_of(made))
    found = sound(text)
    assert [row[0] for row in cells(text, "compared-table")] == [
        *("fedavg", "fedavg (2)", "fedavg (3)"),
    ]
    assert cells(text, "settings") == [
        ["train.lr", "0.01", "0.5", "0.5"],
        ["run.seed", "3", "3", "4"],
    ]
    assert "over-seeds" not in found.ids  # nobody knows whether they had the same clients
    assert "coterie " in found.words.split("versions")[1][:20]
    assert "epochs 1, batch_size 32, lr 0.01" in found.words


def test_the_same_seed_twice_is_not_two_seeds(tmp_path):
    for name, seed, accuracy in (("a", 1, 0.5), ("b", 2, 0.7), ("c", 1, 0.9)):
        place = a_run(tmp_path, [a_round(1)], {**RESULT, "received": {"accuracy": accuracy}}, name)
        config = {"method": {"name": "m"}, "run": {"rounds": 1, "seed": seed}}
        RunDir(place).write_config(config)
    over = cells(report(readings_of([tmp_path])), "over-seeds")
    assert [row[:3] for row in over] == [
        ["fedavg", "2", "60.0 ± 14.1"],
        ["fedavg (2)", "1", "90.0 (best)"],
    ]


def test_scores_of_two_kinds_are_not_compared(tmp_path):
    for name, by, value in (("a", "accuracy", 0.5), ("b", "r2", 0.75), ("c", "accuracy", 0.25)):
        told = {**RESULT, "judged_by": by, "received": {by: value}, "adapted": {by: value}}
        a_run(tmp_path, [a_round(1)], told, name)
    text = report(readings_of([tmp_path]))
    rows = cells(text, "compared-table")
    assert [row[:2] for row in rows] == [["a", "50.0 % (best)"], ["b", "0.750"], ["c", "25.0 %"]]
    assert "judged after adapting, including the worst client: a, b, c" in Page(text).words


def test_newcomers_are_not_left_behind_and_have_a_column(tmp_path):
    rows = [{**row, "newcomer": str(int(c == 1))} for c, row in enumerate(clients())]
    came = {"clients": [1], "unanswered": [], "groups": ["x"], "epochs": 2}
    came |= {"received": {"accuracy": 0.5}, "adapted": {"accuracy": 0.75}}
    came |= {"bytes": {"down": 10, "up": 5}}
    run = finished(clients=rows)
    place = written(tmp_path / "run", run, result={**run.result, "newcomers": came})
    text = report([read_run(place)])
    found = sound(text)
    worst = cells(text, "table-clients")  # by hand: scores 0.9, 0.5 of the newcomer, 0.7, 0.7
    assert [row[0] for row in worst] == ["cy &amp; co", "dee", "ann"]
    everybody = text.split('id="table-clients"')[1].split('data-keep="all"')[1].split("</table>")[0]
    assert re.findall(r'class="sort">(.*?)<', everybody)[:4] == [
        *("client", "group", "true group", "newcomer"),
    ]
    assert [("yes" in row) for row in everybody.split("<tr>")[2:]] == [False, True, False, False]
    assert (
        "50.0 % received, 75.0 % adapted after 2 epochs; 10 B down, 5 B up to join" in found.words
    )


def test_one_client_is_not_clients(tmp_path):
    lone = a_round(1, 1)
    place = a_run(tmp_path, [lone])
    (place / "data.json").unlink()
    words = sound(report([read_run(place)])).words
    assert "The only client" in words
    assert "1 clients" not in words


def test_a_federation_is_continued_by_serving_it_again(tmp_path):
    place = a_run(tmp_path, [a_round(1)], name="fed")

    def said(argv, folder=tmp_path):
        told = {"argv": argv, "folder": str(folder), "rounds": 3}
        (place / "sessions.jsonl").write_text(json.dumps(told) + "\n")
        return sound(report([read_run(place)])).words

    again = said(["serve", "--dir", "fed", "--port", "9"])
    assert again.count(f"cd {tmp_path} && coterie serve --dir fed --port 9") == 2
    assert "repeat it with its coterie serve command and another --dir" in again
    assert "coterie run" not in again
    lost = said(["serve", "--dir", "fed"], tmp_path / "gone")
    assert "give its coterie serve command again" in lost
    assert "coterie run" not in lost
    (place / "flower").mkdir()
    assert "coterie run" not in said(None)


def test_names_written_from_the_right_stay_by_themselves(tmp_path):
    names = ["\u202egpj.exe", "\u05d0\u05d1", "plain", "c"]
    place = written(tmp_path / "run", finished(clients=()), data={"names": names})
    text = report([read_run(place)])
    sound(text)
    caption = text.split('id="fig-clients"')[1].split("<figcaption>")[1].split("</figcaption>")[0]
    assert "<bdi>\u05d0\u05d1</bdi>" in caption  # 0.5, the least in the last round
    assert "<bdi>plain" not in text
    first = text.split('id="headline"')[1].split("</div>")[0]
    assert "of <bdi>\u05d0\u05d1</bdi>." in first


# --- damage -------------------------------------------------------------------------------------

_JUNK = ("x", 3, [], {}, True, -1, 1e308, 10**400, [None], {"a": 1}, [[1]], [{}], "0.5", None)


def _places(tree, at=(), depth=0):
    """Where something else can stand: keys, and the first two of a list."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree[:2])
    for key, value in items:
        yield (*at, key)
        if depth < 3 and isinstance(value, dict | list):
            yield from _places(value, (*at, key), depth + 1)


def test_a_good_run_has_no_problems(tmp_path):
    run = read_run(written(tmp_path / "run", finished(sessions=SESSIONS)))
    assert run.problems == []
    blocks = run_blocks(run)
    assert 'id="notice" hidden' in blocks[0].html
    assert {"tiles", "table-clients", "table-bytes", "repeat"} <= {b.id for b in blocks}
    assert not [b.id for b in compared_blocks([run, run]) if b.id == "compared-notice"]


def test_one_wrong_value_never_ends_the_report(tmp_path):
    """150 runs, each with something else in one place, half of them without a result."""
    run = finished(sessions=SESSIONS)
    trees = {name: getattr(run, name) for name in ("events", "result", "data", "sessions")}
    places = [(name, at) for name, tree in trees.items() for at in _places(copy.deepcopy(tree))]
    draw = random.Random(8)
    for place in range(150):
        name, at = draw.choice(places)
        junk = draw.choice(_JUNK)
        changed = copy.deepcopy(trees)
        if place % 2 and name != "result":
            changed["result"] = {}
        where = changed[name]
        for key in at[:-1]:
            where = where[key]
        where[at[-1]] = junk
        kept = run if changed["result"] else replace(run, clients=())
        folder = tmp_path / str(place)
        try:
            found = read_run(written(folder, kept, **changed))
            blocks = run_blocks(found)
            compared_blocks([found, run])
        except Exception as error:
            raise AssertionError(f"{name} {at} = {junk!r}") from error
        assert {b.id for b in blocks} >= {"notice", "headline", "section-repeat"}


@pytest.mark.parametrize("part", ["tiles", "clients", "repeat"])
def test_a_part_that_fails_is_a_sentence(part, monkeypatch):
    def broken(*_):
        raise KeyError("odd")

    if part == "clients":
        monkeypatch.setitem(run_sections.TABLES["clients"], "table-clients", broken)
    else:
        monkeypatch.setattr(run_sections if part == "tiles" else page_module, part, broken)
    notice, *rest = run_blocks(finished())
    assert "is left out: the run&#39;s data for it are damaged (KeyError: &#39;odd&#39;)" in (
        notice.html
    )
    assert len(rest) > 10
