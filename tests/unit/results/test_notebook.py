"""Runs in a notebook: the card, data frames and pictures, of results and of run directories."""

import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch

import coterie
from coterie.data import from_clients
from coterie.errors import ConfigError, RunDirError
from coterie.report.catalogue import PICTURES, pictures
from coterie.results.rundir import RunDir, without_nan

pandas = pytest.importorskip("pandas")

EVIL = "<script>alert('x')</script> & \"co\""


def people(count=4, targets=2):
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        x = torch.randn(40, 3, generator=generator)
        y = (x[:, 0] > 0).long() if targets == 2 else x[:, :1] * 2
        found.append((x, y))
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("notebook") / "run"


@pytest.fixture(scope="module")
def result(place):
    """Newcomers, adapted scores in some rounds, a clock: as many columns as there are."""
    config = {
        "data": {"clients": 6},
        "shift": {"name": "rotation"},
        "method": {"name": "ifca", "k": 2},
        "clock": {"name": "links"},
        "evaluation": {"adapt_every": 2},
        "run": {"rounds": 4, "engine": "loop", "holdout": 2},
    }
    return coterie.run(config, place)


@pytest.fixture(params=["result", "read from disk"])
def seen(request, result, place):
    return result if request.param == "result" else coterie.read_run(str(place))


class Page(HTMLParser):
    """Checks that elements are closed in order; keeps what is written, and which there are."""

    def __init__(self, html):
        super().__init__()
        self.open, self.names, self.text = [], [], []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        assert not [name for name, _ in attrs if name.startswith("on")]
        assert not [v for _, v in attrs if "://" in (v or "") or "url(" in (v or "")]
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_card_says_what_the_run_came_to(seen, result):
    page = Page(seen._repr_html_())
    said = " ".join(page.text)
    for title in ("received", "adapted"):
        assert f"{100 * result.summary[title]['accuracy']:.1f} %" in said
    assert "ifca" in said
    assert f"newcomers {100 * result.summary['newcomers']['adapted']['accuracy']:.1f} %" in said
    assert result.newcomers
    assert not any(f"client {c}" in page.text for c in result.newcomers)
    assert f"{result.summary['clock']['total']:.1f} s" in said
    assert page.names.count("svg") == 1
    assert "script" not in page.names
    assert "style" not in page.names


def test_the_curve_of_the_card_is_that_of_the_scores(seen, result):
    points = re.search(r'points="([^"]+)"', seen._repr_html_())[1].split()
    across, down = zip(*(map(float, p.split(",")) for p in points), strict=True)
    scores = [e["received"]["accuracy"] for e in result.history]
    assert len(points) == len(scores) == 4
    assert np.allclose(np.diff(across), (across[-1] - across[0]) / 3, atol=0.1)
    # Linear, and upwards: the best is highest, that is, nearest to 0.
    assert np.corrcoef(scores, down)[0, 1] == pytest.approx(-1, abs=1e-3)


def test_every_client_of_the_card_has_the_score_of_the_table(seen, result):
    html = seen._repr_html_()
    for row in [r for r in result.clients if not r["newcomer"]]:
        shown = re.search(rf">client {row['client']}</th>(.*?)</tr>", html)[1]
        cells = re.findall(r"<td[^>]*>(.*?)</td>", shown)
        assert cells == [str(row["group"]), f"{100 * row['received_accuracy']:.1f} %"]


def test_names_are_text_and_never_markup():
    drawn = from_clients(people())
    named = [replace(client, name=EVIL) for client in drawn.clients]
    population = replace(drawn, clients=named)
    made = coterie.simulate(population, model="logistic", rounds=2, engine="loop")
    page = Page(made._repr_html_())
    assert "script" not in page.names
    assert EVIL in "".join(page.text)
    assert list(made.to_dataframe("clients")["name"]) == [EVIL] * 4


def test_a_row_a_round(seen, result):
    frame = seen.to_dataframe()
    assert list(frame["round"]) == [1, 2, 3, 4]
    for name in ("round", "groups", "bytes_down", "bytes_up", "bytes_total", "clients_lost"):
        assert frame[name].dtype == "int64", name
    assert frame["abandoned"].dtype == "bool"
    rest = frame.drop(columns="abandoned")
    assert all(kind in ("int64", "float64") for kind in rest.dtypes.astype(str))
    events = result.history
    assert list(frame["received_accuracy"]) == [e["received"]["accuracy"] for e in events]
    assert list(frame["bytes_up"]) == [e["bytes"]["up"] for e in events]
    assert list(frame["clock_total"]) == [e["clock"]["total"] for e in events]
    adapted = frame["adapted_accuracy"]
    assert list(adapted.isna()) == [True, False, True, False]
    assert adapted[3] == events[3]["adapted"]["accuracy"]
    assert frame["bytes_total"].iloc[-1] == sum(events[-1]["total_bytes"].values())


def test_a_row_a_client(seen, result):
    frame = seen.to_dataframe("clients")
    assert list(frame["client"]) == list(range(6))
    for name in ("client", "train", "val", "test", "bytes_down", "newcomer", "group"):
        assert frame[name].dtype == "int64", name
    assert list(frame["group"]) == [result.groups[c] for c in range(6)]
    assert sorted(frame.index[frame["newcomer"] == 1]) == list(result.newcomers)
    told = [row["received_accuracy"] for row in result.clients]
    assert np.allclose(frame["received_accuracy"], told, rtol=0, atol=1e-12)


def test_a_row_for_each_client_and_round(seen, result):
    frame = seen.to_dataframe("scores")
    assert len(frame) == 4 * 4  # members and rounds; newcomers have none
    last = frame[frame["round"] == 4].set_index("client")["received"]
    own = result.history[-1]["client_scores"]["received"]
    assert {int(c): s for c, s in last.items()} == {
        c: s for c, s in enumerate(own) if s is not None
    }
    assert frame[frame["round"] == 1]["adapted"].isna().all()


def test_bytes_by_kind_sum_up_to_the_total(seen, result):
    frame = seen.to_dataframe("bytes")
    assert int(frame["down"].sum()) == result.summary["bytes"]["down"]
    assert int(frame["up"].sum()) == result.summary["bytes"]["up"]
    assert list(frame.columns) == ["round", "kind", "down", "up"]


def test_what_was_sent_before_the_first_round_is_among_the_bytes():
    made = coterie.simulate(people(6), method="fedclust", rounds=2, engine="loop")
    frame = made.to_dataframe("bytes")
    assert frame["round"].min() == 0
    assert int(frame["up"].sum()) == made.summary["bytes"]["up"]


def test_every_picture_that_applies_can_be_asked_for(seen):
    drawn = pictures(seen._read())
    assert "groups" in [d.name for d in drawn]
    for each in drawn:
        figure = seen.figure(each.name)
        # A page has titles of its own, and so another place for that of a colour bar.
        ours, theirs = (
            [{k: v for k, v in t.items() if k != "colorbar"} for t in f.to_dict()["data"]]
            for f in (figure, each.figure)
        )
        assert ours == theirs
    for name in PICTURES.keys() - {d.name for d in drawn}:
        with pytest.raises(ConfigError):
            seen.figure(name)


def test_wrong_names_get_the_right_ones(seen):
    with pytest.raises(ConfigError, match="did you mean 'groups'"):
        seen.figure("group")
    with pytest.raises(ConfigError, match="did you mean 'clients'"):
        seen.to_dataframe("client")


def test_accuracy_and_groups_are_the_same_from_disk(result, place):
    read = coterie.read_run(place)
    assert read.accuracy == result.accuracy
    known = {c: g for c, g in enumerate(read.groups) if g is not None}
    assert known == {c: g for c, g in result.groups.items() if c not in result.newcomers}


def test_no_pandas_is_a_sentence(seen, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match=r"pip install 'coterie\[notebook\]'"):
        seen.to_dataframe()


def test_pandas_and_plotly_are_not_imported_for_nothing():
    import subprocess

    said = "import sys, coterie; print([m for m in ('pandas', 'plotly') if m in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True)
    assert ended.stdout == "[]\n", ended.stderr


def test_a_regression_is_told_as_r2():
    made = coterie.simulate(
        people(4, targets=1), model="logistic", rounds=2, lr=0.1, loss="mse", engine="loop"
    )
    said = " ".join(Page(made._repr_html_()).text)
    assert f"received {made.summary['received']['r2']:.3f}" in said
    assert "R²" in said
    frame = made.to_dataframe()
    assert list(frame["received_r2"]) == [e["received"]["r2"] for e in made.history]
    assert "received_accuracy" not in frame


def test_no_test_data_is_no_obstacle():
    made = coterie.simulate(people(), model="logistic", rounds=2, test_fraction=0, engine="loop")
    said = " ".join(Page(made._repr_html_()).text)
    assert "2 rounds" in said
    assert len(made.to_dataframe()) == 2
    assert len(made.to_dataframe("clients")) == 4
    assert list(made.to_dataframe("scores").columns) == ["round", "client", "received"]
    with pytest.raises(ConfigError, match="no client has test data"):
        _ = made.accuracy


def test_a_run_that_is_not_finished_can_be_looked_at(place, tmp_path):
    lines = RunDir(place).events.read_text().splitlines(keepends=True)
    torn = tmp_path / "torn"
    torn.mkdir()
    (torn / "config.toml").write_text((place / "config.toml").read_text())
    kept = [line for line in lines if json.loads(line)["round"] <= 2]
    (torn / "events.jsonl").write_text("".join(kept) + '{"round": 3, "coh')
    read = coterie.read_run(torn)
    said = " ".join(Page(read._repr_html_()).text)
    assert "stopped" in said
    assert "2 of 4 rounds" in said
    assert list(read.to_dataframe()["round"]) == [1, 2]
    frame = read.to_dataframe("clients")
    assert len(frame) == 6
    assert frame["group"].isna().sum() == 2  # of those held out nobody knows
    assert read.accuracy == json.loads(kept[-1])["received"]["accuracy"]


def test_a_run_that_has_hardly_begun_can_be_looked_at(place, tmp_path):
    (tmp_path / "config.toml").write_text((place / "config.toml").read_text())
    read = coterie.read_run(tmp_path)
    Page(read._repr_html_())
    for table in ("rounds", "clients", "scores", "bytes"):
        assert len(read.to_dataframe(table)) == 0
    with pytest.raises(ConfigError, match="no client has been scored"):
        _ = read.accuracy


def test_what_is_no_run_is_a_sentence(tmp_path):
    with pytest.raises(RunDirError, match="not a run directory"):
        coterie.read_run(str(tmp_path / "nothing"))


def test_a_diverged_run_has_gaps_and_no_wrong_numbers(result):
    """NaN in an event in memory is null in the file: both are NaN in the frame."""
    history = [dict(e) for e in result.history]
    history[1] = {**history[1], "received": {**history[1]["received"], "loss": float("nan")}}
    for events in (history, without_nan(history)):
        frame = replace(result, history=events).to_dataframe()
        assert list(frame["received_loss"].isna()) == [False, True, False, False]


def test_the_report_is_written_where_the_run_is(seen, place, tmp_path):
    written = seen.report(tmp_path / "mine.html")
    assert written == tmp_path / "mine.html"
    assert "<html" in written.read_text()[:2000]
    assert Path(place / "report.html") == seen.report()
    (place / "report.html").unlink()
