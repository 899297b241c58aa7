"""Groups that the user gives, from the command line: files, columns, newcomers, privacy."""

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest

GROUPED = ("--shift", "rotation", "--set", "shift.groups=2", "--rounds", 2, "-q")
KNOWN = ("--method", "known-groups", "--set")


def result(folder):
    return json.loads(Path(folder, "result.json").read_text())


def groups_in(folder):
    """Each client's last group, as the run's events say it."""
    lines = Path(folder, "events.jsonl").read_text().splitlines()
    return [json.loads(line)["groups"] for line in lines if "cohort" in json.loads(line)][-1]


def test_a_file_is_read_once_and_needed_no_more(cli, small):
    groups = {"0": "a", "1": "b", "2": "a", "3": "b"}
    Path("g.json").write_text(json.dumps({"groups": groups, "silhouette": 0.4}))
    words = ("run", *small, *GROUPED, *KNOWN, "method.groups=g.json")
    assert cli(*words, "--dir", "r").code == 0
    assert groups_in("r") == ["a", "b", "a", "b"]
    assert tomllib.loads(Path("r/config.toml").read_text())["method"]["groups"] == groups
    Path("g.json").write_text(json.dumps(dict.fromkeys(groups, "all")))
    assert cli("run", "--resume", "r", "--rounds", 3, "-q").code == 0
    Path("g.json").unlink()
    assert cli("run", "--resume", "r", "--rounds", 4, "-q").code == 0
    assert groups_in("r") == ["a", "b", "a", "b"]
    assert cli("export", "r", "--client", 0, "--to", "m.safetensors").code == 0
    # The same four rounds without a stop end at the same scores.
    Path("g.csv").write_text("client,group\n3,b\n2,a\n1,b\n0,a\n")
    whole = ("run", *small, *GROUPED, "--rounds", 4, *KNOWN, "method.groups=g.csv", "--dir", "w")
    assert cli(*whole).code == 0
    assert result("w")["received"] == result("r")["received"]


def test_the_true_groups_are_a_column(cli, small):
    assert cli("run", *small, *GROUPED, *KNOWN, "method.groups=group", "--dir", "k").code == 0
    assert cli("run", *small, *GROUPED, "--method", "oracle", "--dir", "o").code == 0
    for key in ("received", "adapted", "bytes"):
        assert result("k")[key] == result("o")[key]


def test_a_combination_reads_the_file_too(cli, small):
    Path("g.json").write_text(json.dumps({str(c): "ab"[c % 2] for c in range(4)}))
    words = ("run", *small, "--rounds", 1, "-q", "--method", "known-groups+ditto")
    assert cli(*words, "--set", "method.groups=g.json", "--dir", "r").code == 0
    Path("g.json").unlink()
    assert cli("run", "--resume", "r", "--rounds", 2, "-q").code == 0
    assert groups_in("r") == ["a", "b", "a", "b"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"0": "a", "1": "b", "2": "a"}', ["method.groups: client 3 is missing"]),
        ('{"0": "a", "0": "b"}', ["g.json: '0' is named more than once"]),
        (
            '{"0": "a", "1": "b", "2": "a", "x": "b"}',
            ["client 3 is missing; 'x' is not a known client"],
        ),
    ],
)
def test_what_does_not_fit_the_clients_is_said_before_anything_is_written(
    content, told, cli, small
):
    Path("g.json").write_text(content)
    ended = cli("run", *small, *GROUPED, *KNOWN, "method.groups=g.json", "--dir", "r")
    ended.says(2, *told)
    assert not Path("r").exists()


def test_files_and_columns_that_are_not_there(cli, small):
    words = ("run", *small, "--rounds", 1, *KNOWN)
    cli(*words, "method.groups=g.json").says(2, "there is no file g.json")
    cli(*words, "method.groups=site").says(
        2, "there is no metadata column 'site' (known: none)", "method.groups=groups.json"
    )
    cli(*words, "method.groups=3").says(2, "method known-groups: groups = 3: must be")


# --- metadata ------------------------------------------------------------------------------------


@pytest.fixture
def hospitals(tmp_path):
    """A table of six hospitals in two countries."""
    rng, lines = np.random.default_rng(0), ["age,dose,hospital,country,ill"]
    for i in range(120):
        hospital = i % 6
        a, b = rng.normal(size=2)
        lines.append(f"{a:.4f},{b:.4f},h{hospital},{'xxyyyx'[hospital]},{int(a > b)}")
    (tmp_path / "p.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "p.toml").write_text(
        """
[data]
set = "csv"
folder = "p.csv"
metadata = ["country"]
[data.options]
label = "ill"
columns = ["hospital"]
[partition]
name = "column"
by = "hospital"
[method]
name = "known-groups"
groups = "country"
[model]
name = "logistic"
[run]
rounds = 1
engine = "loop"
"""
    )
    return tmp_path / "p.toml"


def test_a_column_of_the_table(cli, hospitals):
    assert cli("run", hospitals, "--dir", "r", "-q").code == 0
    assert groups_in("r") == list("xxyyyx")
    # A metadata column is no model input: two features remain.
    names = {"h0": "x", "h1": "x", "h2": "y", "h3": "y", "h4": "y", "5": "x"}
    Path("g.json").write_text(json.dumps(names))
    assert cli("run", hospitals, "--set", "method.groups=g.json", "--dir", "f", "-q").code == 0
    assert result("f")["received"] == result("r")["received"]
    cli("run", hospitals, "--set", "method.groups=contry").says(2, "no metadata column 'contry'")
    cli("run", hospitals, "--set", "data.metadata=['contry']").says(3, "unknown column 'contry'")
    varies = cli("run", hospitals, "--set", "data.metadata=['country','age']")
    varies.says(3, "column 'age' varies within client 0 (h0)")


def test_newcomers_of_a_column(cli, hospitals):
    assert cli("run", hospitals, "--dir", "r", "-q").code == 0
    rows = Path("p.csv").read_text().splitlines()
    new = [rows[0], *(row.replace(",h2,", ",new,") for row in rows[1:] if ",h2," in row)]
    Path("new.csv").write_text("\n".join(new) + "\n")
    told = json.loads(cli("admit", "r", "--client", "new.csv", "--json").out)
    assert told["group"] == "y"
    given = ("--metadata", "country=x")
    assert (
        json.loads(cli("admit", "r", "--client", "new.csv", *given, "--json").out)["group"] == "x"
    )
    unknown = cli("admit", "r", "--client", "new.csv", "--metadata", "country=z")
    unknown.says(2, "cannot admit client 6", "its group 'z' (known: x, y)")
    cli("admit", "r", "--client", "new.csv", "--metadata", "country").says(2, "write column=value")
    plain = [",".join(row.split(",")[:2] + row.split(",")[4:]) for row in new]
    Path("plain.csv").write_text("\n".join(plain) + "\n")
    cli("admit", "r", "--client", "plain.csv").says(
        2,
        "method known-groups cannot admit client 6: its group is not known",
        "--metadata country=",
    )


def test_newcomers_of_a_file(cli, small):
    Path("g.json").write_text('{"0": "a", "1": "b", "2": "a", "3": "b"}')
    words = ("run", *small, *GROUPED, *KNOWN, "method.groups=g.json")
    assert cli(*words, "--holdout", 2, "--dir", "r").code == 0
    known = {row["client"]: row for row in map(dict, _rows("r"))}
    assert {c: row["group"] for c, row in known.items()} == {"0": "a", "1": "b", "2": "a", "3": "b"}
    assert sum(row["newcomer"] == "1" for row in known.values()) == 2
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    pixels = np.rint(x[:20] * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    np.savez("new.npz", x=pixels, y=y[:20])
    cli("admit", "r", "--client", "new.npz").says(2, "cannot admit client 4", "--metadata group=")
    told = cli("admit", "r", "--client", "new.npz", "--metadata", "group=b", "--json")
    assert json.loads(told.out)["group"] == "b"


def _rows(folder):
    import csv

    with Path(folder, "clients.csv").open() as stream:
        yield from csv.DictReader(stream)


def test_a_file_with_a_row_for_each_client(cli, small, tmp_path, monkeypatch):
    Path("clients.csv").write_text("client,site,device\n0,n,ct\n1,s,mri\n2,s,ct\n3,n,mri\n")
    words = ("run", *small, "--rounds", 1, "-q", "--set", "data.metadata=clients.csv")
    assert cli(*words, *KNOWN, "method.groups=site", "--dir", "r").code == 0
    assert groups_in("r") == ["n", "s", "s", "n"]
    cli(*words, *KNOWN, "method.groups=sit").says(2, "(known: device, site)")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # the run knows where its files are
    assert cli("run", "--resume", "../r", "--rounds", 2, "-q").code == 0


# --- privacy -------------------------------------------------------------------------------------


def test_secure_sums(cli, small):
    Path("g.json").write_text(json.dumps({str(c): "a" if c < 3 else "b" for c in range(4)}))
    words = ("run", *small, "--rounds", 1, "-q", "--secure", *KNOWN, "method.groups=g.json")
    cli(*words, "--dir", "r").says(2, "group 'b' (1 client)", "privacy.min_group = 3")
    assert not Path("r").exists()
    Path("g.json").write_text(json.dumps(dict.fromkeys("0123", "a")))
    assert cli(*words, "--dir", "r").code == 0


NOISE = ("--epsilon", 8, "--rounds", 1, "-q")


def test_epsilon_does_not_cover_what_was_given(cli, small):
    Path("g.json").write_text(json.dumps(dict.fromkeys("0123", "a")))
    told = cli("run", *small, *NOISE, *KNOWN, "method.groups=g.json", "--dir", "r")
    assert told.code == 0, told.err
    assert told.err.count("ε does not cover the groups given to method known-groups") == 1
    column = ("--shift", "rotation", *KNOWN, "method.groups=group")
    told = cli("run", *small, *NOISE, *column, "--dir", "c")
    assert told.err.count("ε does not cover the metadata column 'group'") == 1
    assert "if it was derived from the data" in told.err
    quiet = cli("run", *small, *NOISE, "--dir", "f")
    assert "does not cover" not in quiet.err
    plain = cli("run", *small, "--rounds", 1, "-q", *KNOWN, "method.groups=g.json", "--dir", "p")
    assert "does not cover" not in plain.err
    names = ("--methods", "fedavg,known-groups:groups=g.json")
    told = cli("compare", *small, *NOISE, *names, "--seeds", "0,1", "--dir", "t")
    assert told.code == 0, told.err
    assert told.err.count("ε does not cover") == 1


def test_a_comparison(cli, small):
    Path("g.json").write_text(json.dumps({str(c): "ab"[c % 2] for c in range(4)}))
    names = ("--methods", "oracle,known-groups:groups=g.json")
    assert cli("compare", *small, *GROUPED, *names, "--dir", "t").code == 0
    assert "left out" not in cli("methods", "known-groups+ditto").err
    assert cli("methods", "known-groups").code == 0
