"""Methods side by side, and a look at how clients differ."""

import json
import re
import tomllib
from pathlib import Path
from typing import ClassVar

import pytest

from coterie.run.compare import agreement


def test_all_methods_in_one_table(cli, small):
    names = "local,fedavg,fedprox:mu=0.5,fedper,ifca:k=2,oracle"
    words = ("compare", *small, "--rounds", 2, "--methods", names, "--dir", "c")
    ended = cli(*words, "--shift", "rotation", "--set", "shift.groups=2")
    assert ended.code == 0, ended.err
    titles = ["local", "fedavg", "fedprox mu=0.5", "fedper", "ifca k=2", "oracle"]
    rows = {t: next(s for s in ended.out.splitlines() if s.startswith(t + " ")) for t in titles}
    assert ended.out.splitlines()[-1] == "kept in c"
    alone = json.loads(Path("c/local/result.json").read_text())["received"]
    for title, row in rows.items():
        kept = json.loads(Path("c", title.replace(" ", "-"), "result.json").read_text())
        cells = row.removeprefix(title).split()
        assert cells[0] == f"{100 * kept['received']['accuracy']:.1f}"
        assert cells[1] == f"{100 * kept['adapted']['accuracy']:.1f}"
        assert cells[2] == f"{100 * kept['received']['worst']:.1f}"
        gain = 100 * (kept["received"]["accuracy"] - alone["accuracy"])
        assert cells[3] == ("–" if title == "local" else f"{gain:+.1f}")
        assert cells[-1] == kept["sees"]
    assert rows["oracle"].split()[6:8] == ["2", "1.00"]
    assert rows["local"].split()[-1] == "nothing"
    lines = ended.err.splitlines()
    assert len(lines) == 12
    assert lines[0].startswith("local         round 1/2")


def test_the_same_clients_and_start_for_every_method(cli, small):
    words = ("compare", *small, "--rounds", 1, "--methods", "ifca:k=1,fedavg", "--dir", "c", "-q")
    assert cli(*words).code == 0  # ifca with one model is fedavg to the bit
    one, other = (
        json.loads(Path("c", d, "result.json").read_text()) for d in ("ifca-k=1", "fedavg")
    )
    assert one["received"] == other["received"]
    assert cli("run", *small, "--rounds", 1, "--dir", "r", "-q").code == 0
    assert json.loads(Path("r/result.json").read_text())["received"] == other["received"]


@pytest.mark.parametrize(
    ("methods", "told"),
    [
        ("local,ifca:q=4", "unknown parameter of ifca 'q'"),
        ("local,ifca:k=many", "k = 'many'"),
        ("local,fedagv", "did you mean 'fedavg'"),
        ("local,ifca:4", "name:parameter=value"),
        ("local,oracle", "known groups"),
        ("local,local", "twice"),
        ("local,", "unknown method ''"),
    ],
)
def test_a_wrong_method_is_refused_before_anything_runs(cli, small, methods, told):
    ended = cli("compare", *small, "--rounds", 1, "--methods", methods, "--dir", "c")
    ended.says(2, told)
    assert len(ended.err.splitlines()) == 1
    assert not Path("c").exists()


def test_wrong_methods_are_refused_before_data_is_read(cli):
    words = ("compare", "--data", "mnist", "--folder", "/nowhere", "--dir", "c")
    cli(*words, "--methods", "ifca:q=4").says(2, "'q'")
    cli(*words, "--methods", "local").says(3, "/nowhere")


def test_the_usual_methods_come_without_oracle_where_there_are_no_groups(cli, small):
    small = (*small, "--rounds", 1, "-q")
    plain = cli("compare", *small, "--dir", "c")
    assert plain.code == 0, plain.err
    assert "ifca k=4" in plain.out
    assert "oracle" not in plain.out
    grouped = cli("compare", *small, "--dir", "d", "--shift", "rotation")
    assert "oracle" in grouped.out


def test_agreement_is_none_without_groups():
    class Found:
        groups: ClassVar = {0: 0, 1: 1}

        class plan:
            class population:
                groups = None

    assert agreement(Found) is None


def test_probe_describes_labels(cli, small):
    words = ("probe", *small[:4], "--partition", "dirichlet", "--set", "partition.alpha=0.2")
    ended = cli(*words, "--shift", "rotation", "--set", "shift.groups=2", "--picture", "p.html")
    assert ended.code == 0, ended.err
    said = dict(line.split(": ", 1) for line in ended.out.splitlines() if ": " in line)
    assert said["clients"] == "4"
    assert said["groups"] == "0 2, 1 2"
    assert re.fullmatch(r"min \d+, median [\d.]+, max \d+", said["samples"])
    even = cli("probe", *small[:4])
    fair = dict(line.split(": ", 1) for line in even.out.splitlines() if ": " in line)
    assert float(said["kl"]) > 3 * float(fair["kl"]) > 0
    assert float(said["mean emd"]) > 3 * float(fair["mean emd"])
    bars = [line for line in ended.out.splitlines() if re.search("[▁▂▃▄▅▆▇█]", line)]
    assert len(bars) == 4
    html = Path("p.html").read_text()
    assert "plotly.js v" in html
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)\s*=", html)
    assert "client 3 (group" in html


def test_probe_describes_numbers(cli, table):
    words = ("probe", "--data", "csv", "--folder", table, "--partition", "column", "--clients", 3)
    words += ("--set", "partition.by=site", "--set", "data.options.target=regression")
    words += ("--set", "data.options.label=target", "--set", 'data.options.columns=["site","kind"]')
    ended = cli(*words, "--picture", "p.html")
    assert ended.code == 0, ended.err
    assert "clients: 3" in ended.out
    assert "None" not in ended.out
    rows = [line for line in ended.out.splitlines() if "█" in line]
    assert len(rows) == 3
    html = Path("p.html").read_text()
    assert "plotly.js v" in html
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)\s*=", html)


def test_layer_intervals_hold_for_every_method_compared(cli):
    words = [
        "compare",
        "--methods",
        "fedavg,fedprox:layer_interval=3",
        "--rounds",
        1,
        "--clients",
        3,
    ]
    words += ["--set", "method.layer_interval=2", "--clients", 3, "--engine", "loop", "--dir", "c"]
    assert cli(*words).code == 0
    found = [tomllib.loads(p.read_text()) for p in sorted(Path("c").glob("*/config.toml"))]
    assert [f["method"]["layer_interval"] for f in found] == [2, 3]
