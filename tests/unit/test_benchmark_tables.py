"""The scripts that reproduce papers' tables: their figures, rows and times, without training."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

import coterie
from clocked import EXCHANGES, H20, MODEL, legs, measured
from coterie.channel import outliers
from coterie.channel.clocks import SYSTEMS
from coterie.errors import ConfigError
from coterie.experiment.config import parse
from coterie.experiment.scenarios import scenario
from coterie.models import INITIALISATIONS
from coterie.results.toml import to_toml
from support import digits

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import dc_pfl_table as table
    import fedtsdp_classes
    import grouping_matrix as matrix
    import initialisation
    import layers_at_rest
    import split_rounds
    import user_centric_figure as picture
    from rows import commits

# --- figures that are kept ------------------------------------------------------------------------


def test_the_figures_of_poisoned_updates_are_of_the_present_limit():
    kept = json.loads((Path(table.__file__).parent / "results" / "poison.json").read_text())
    assert kept["limit"] == {"moves": outliers.MOVES, "least": outliers.LEAST}
    longest = max(row["ratio"] for row in kept["honest"])
    assert 0.01 < longest < 0.5  # no honest client comes near it


# --- groups at the defaults -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--methods", "flis"],
        ["--methods", ",".join(matrix.METHODS)],
        ["--kinds", ",".join(matrix.KINDS)],
        ["--methods", "fedclust trial=always", "--seeds", "10,11"],
        ["--set", "fashion-mnist", "--kinds", "iid", "--schedules", "busy", "--model", "mlp"],
    ],
)
def test_the_command_of_the_matrix_makes_the_same_cells(words):
    asked = matrix.arguments(words)
    again = matrix.arguments(shlex.split(matrix.command(asked))[2:])
    assert list(matrix.cells(again)) == list(matrix.cells(asked))


@pytest.mark.parametrize("name", ["fedclust trial=alway", "flos"])
def test_a_method_that_the_matrix_does_not_know_is_refused(name):
    with pytest.raises((SystemExit, ConfigError)):
        matrix.arguments(["--methods", name])


def test_flis_has_a_row_in_the_matrix(tmp_path, monkeypatch):
    """It needs public samples, of those that no client has; other methods get none."""
    few = slice(None, 400)  # images, of which half are dealt to the clients
    x, y = matrix.samples("digits", None)
    monkeypatch.setattr(matrix, "samples", lambda *_: (x[few], y[few]))
    words = ["--methods", "flis", "--kinds", "label-sets", "--sizes", "10", "--seeds", "10"]
    words += ["--schedules", "default", "--rounds", "1", "--runs", str(tmp_path / "rows.jsonl")]
    asked = matrix.arguments(words)
    (cells,) = matrix.cells(asked)
    rows = matrix.attempt(cells, None)
    assert [row.get("error") for row in rows] == [None] * len(rows)
    row = next(line for line in matrix.tables(rows, ["flis"]) if line.startswith("| `flis` |"))
    assert "of 1" in row
    population, _ = matrix.planted("label-sets", "10", 10)
    assert len(population.public) == len(y[few]) // 10


# --- DC-PFL's table II ---------------------------------------------------------------------------

# The ratios as the paper prints them beside the seconds.
PRINTED = {
    "low": {"local": 0.43, "fedavg": 1.91, "per-fedavg": 1.63, "clusterfl": 1.48, "dc-pfl": 1.0},
    "mid": {"local": 0.41, "fedavg": 1.77, "per-fedavg": 1.53, "clusterfl": 1.41, "dc-pfl": 1.0},
    "high": {"local": 0.38, "fedavg": 1.88, "per-fedavg": 1.62, "clusterfl": 1.45, "dc-pfl": 1.0},
}


def test_the_papers_seconds_have_the_papers_ratios():
    paper = table.published()
    assert len(paper) == 15
    for level, ratios in PRINTED.items():
        ours = paper[level, "dc-pfl"]["total"]
        for name, printed in ratios.items():
            assert paper[level, name]["total"] / ours == pytest.approx(printed, abs=0.00501)


def test_the_papers_accuracies_are_the_scenarios():
    for (level, name), row in table.published().items():
        assert row["accuracy"] == scenario(f"dc-pfl/fmnist-{level}").figures[name]


def test_who_trains_alone_has_no_communication_in_the_paper():
    for (_, name), row in table.published().items():
        missing = {key for key, value in row.items() if value is None}
        assert missing == ({"rounds", "communication"} if name == "local" else set())


def asked(*words):
    return table.arguments(["--folder", "data", *words])


def test_settings_are_the_scenarios_but_for_what_the_script_says():
    for level in table.LEVELS:
        for _, name, parameters in table.method_list(table.METHODS):
            tree = table.settings(level, name, parameters, asked(), seed=3)
            config = parse(tree)
            assert config.partition.parameters == {"level": level, "size": 300}
            assert (config.data.clients, config.run.rounds, config.run.seed) == (50, 60, 3)
            assert (config.train.epochs, config.train.batch_size) == (5, 32)
            assert (config.stop.patience, config.stop.gain) == (20, 0.001)
            assert config.clock.parameters["rate_up"] == config.clock.parameters["rate_down"] == 2
            assert config.method.name == name
    assert config.method.parameters["sleep"] == 6  # the last is DC-PFL, with the paper's own


def test_clusterfl_keeps_the_scenarios_groups_and_takes_what_is_given():
    usual = table.settings("low", "clusterfl", {}, asked(), 0)
    other = table.settings("low", "clusterfl", {"k": 7}, asked(), 0)
    assert (usual["method"]["k"], other["method"]["k"]) == (5, 7)


def test_a_level_that_there_is_not_is_refused(capsys):
    with pytest.raises(SystemExit):
        asked("--levels", "low,middle")
    assert "there is no level middle" in capsys.readouterr().err


def event(number, up, clock=(1.0, 2.0), accuracy=0.5, **more):
    kinds = {"header": [50, 40], "losses": [0, 20]} | {"model/fc": [3 * up + 8, up]}
    seconds = {"computation": clock[0], "communication": clock[1], "waiting": 0.0}
    return {
        "round": number,
        "kinds": kinds,
        "received": {"accuracy": accuracy},
        "clock": seconds,
        **more,
    }


def kept(ups=(400, 400), accuracy=0.5, seconds=(30.0, 70.0), stopped="no gain", **more):
    summary = {
        "headline": "received",
        "judged_by": "accuracy",
        "received": {"accuracy": accuracy},
        "adapted": {"accuracy": 0.9},
        "clock": {"computation": seconds[0], "communication": seconds[1], "total": sum(seconds)},
        "rounds": len(ups),
        "stopped": stopped,
        "groups": 1,
        "bytes": {"down": 10, "up": 20},
        "seconds": 4.0,
        **more,
    }
    history = [event(n, up) for n, up in enumerate(ups, 1)]
    return {"summary": summary, "history": history, "divergence": 2.0, "commit": "abc"}


def test_rounds_of_communication_are_those_in_which_weights_go_up():
    found = table.figures(kept(ups=(400, 0, 12, 0)))
    assert (found["rounds"], found["all_rounds"]) == (2, 4)
    assert (found["communication"], found["total"]) == (70.0, 100.0)


def test_losses_alone_are_no_communication():
    found = table.figures(kept(ups=(0, 0)))
    assert found["rounds"] is None
    assert found["communication"] is None
    assert found["total"] == 100.0


def test_a_method_is_judged_by_its_own_score():
    assert table.figures(kept(accuracy=0.5))["accuracy"] == 0.5
    assert table.figures(kept(accuracy=0.5, headline="adapted"))["accuracy"] == 0.9


def some_rows():
    return table.rows(
        [
            ("low", "local", "local", kept(ups=(0, 0), accuracy=0.6, seconds=(40.0, 0.0))),
            ("low", "fedavg", "fedavg", kept(accuracy=0.70, seconds=(90.0, 110.0))),
            ("low", "dc-pfl", "dc-pfl", kept(accuracy=0.80, seconds=(60.0, 20.0))),
            ("low", "fedavg", "fedavg", kept(accuracy=0.74, seconds=(50.0, 150.0), stopped="")),
            ("low", "dc-pfl", "dc-pfl", kept(accuracy=0.82, seconds=(60.0, 60.0))),
            ("mid", "fedavg", "fedavg", kept(accuracy=0.5)),
        ]
    )


def test_rows_are_means_over_seeds_and_ratios_those_of_their_level():
    local, fedavg, ours, mid = some_rows()
    assert [r["method"] for r in (local, fedavg, ours, mid)] == [
        *("local", "fedavg", "dc-pfl", "fedavg")
    ]
    assert fedavg["accuracy"] == pytest.approx(0.72)
    assert fedavg["spread"] == pytest.approx(0.02 * 2**0.5)
    assert (fedavg["communication"], fedavg["total"]) == (130.0, 200.0)
    assert (fedavg["seeds"], fedavg["converged"]) == (2, 1)
    assert (local["ratio"], fedavg["ratio"], ours["ratio"]) == (0.4, 2.0, 1.0)
    assert fedavg["paper"]["ratio"] == pytest.approx(506 / 265)
    assert mid["ratio"] is None  # DC-PFL was not run at that level
    assert mid["paper"]["total"] == 512


def test_the_page_has_our_figures_and_the_papers_in_brackets():
    about = {
        "command": "python it",
        "settings": {"rounds": 60, "lr": 0.05},
        "seeds": [0, 1],
        "commits": ["abc"],
        "date": "2026-01-01",
        "torch": "2",
        "machine": "m",
        "seconds": 600.0,
    }
    text = table.page({**about, "rows": some_rows()})
    lines = [line for line in text.splitlines() if line.startswith("| low")]
    assert lines == [
        "| low (2.00) | Standalone | 0.600 (0.810) | – | – | 40 (114) | ×0.40 (×0.43) |",
        "| low (2.00) | FedAvg† | 0.720 (0.876) | 2 (79) | 130 (268) | 200 (506) | ×2.00 (×1.91) |",
        "| low (2.00) | DC-PFL | 0.810 (0.925) | 2 (57) | 40 (73) | 100 (265) | ×1.00 (×1.00) |",
    ]
    assert "10.0 minutes" in text


# --- finished, stopped and new runs --------------------------------------------------------------


class Runs:
    """Stands for training: notes how it was asked, and leaves what a run leaves."""

    def __init__(self, monkeypatch, stop=False):
        self.asked, self.stop = [], stop
        monkeypatch.setattr(table, "experiment_of", lambda config, people: config)
        monkeypatch.setattr(table, "describe", lambda population: {"kl": 1.5})
        monkeypatch.setattr(table, "commit", lambda: "abc")
        monkeypatch.setattr(table, "execute", self.execute)

    def execute(self, config, path, resume):
        self.asked.append((path.name, resume))
        if not resume:
            assert not path.exists()
            path.mkdir(parents=True)
            (path / "config.toml").write_text(to_toml(config.model_dump()))
        if self.stop:
            raise KeyboardInterrupt
        whole = SimpleNamespace(size=7)
        layout = SimpleNamespace(shareable=["fc"], only=lambda names: whole)
        history = [event(1, 400, cohort=[0], notes={"distances": "long"}, client_bytes={"0": 1})]
        return SimpleNamespace(
            plan=SimpleNamespace(population=None, start=SimpleNamespace(layout=layout)),
            begun={"round": 0, "notes": {"distances": "long"}},
            summary=kept()["summary"],
            history=history,
        )


def tree(**changes):
    found = table.settings("low", "fedavg", {}, asked(), 0)
    for key, value in changes.items():
        name, _, leaf = key.partition("__")
        found[name][leaf] = value
    return found


def test_a_finished_run_is_read_and_not_done_again(tmp_path, monkeypatch):
    runs = Runs(monkeypatch)
    first = table.carry_out(tmp_path, "low fedavg seed=0", tree(), lambda: None)

    def nobody():
        raise AssertionError("there is nothing left to do")

    again = table.carry_out(tmp_path, "low fedavg seed=0", tree(), nobody)
    assert runs.asked == [("low-fedavg-seed=0", False)]
    assert again == json.loads(json.dumps(first))
    assert (again["model_bytes"], again["divergence"]) == (28, 1.5)
    assert "long" not in json.dumps(again)


def test_a_killed_run_goes_on(tmp_path, monkeypatch):
    runs = Runs(monkeypatch, stop=True)
    with pytest.raises(KeyboardInterrupt):
        table.carry_out(tmp_path, "a", tree(), lambda: None)
    assert not (tmp_path / "a.json").exists()
    runs.stop = False
    table.carry_out(tmp_path, "a", tree(), lambda: None)
    assert runs.asked == [("a", False), ("a", True)]
    assert (tmp_path / "a.json").exists()


def test_a_folder_from_before_anything_was_saved_is_begun_anew(tmp_path, monkeypatch):
    runs = Runs(monkeypatch)
    (tmp_path / "a" / "clients").mkdir(parents=True)
    table.carry_out(tmp_path, "a", tree(), lambda: None)  # it asserts that the folder is gone
    assert runs.asked == [("a", False)]


@pytest.mark.parametrize("stopped", [False, True])
def test_runs_with_other_settings_are_not_mixed(tmp_path, monkeypatch, stopped):
    runs = Runs(monkeypatch, stop=stopped)
    try:
        table.carry_out(tmp_path, "a", tree(), lambda: None)
    except KeyboardInterrupt:
        assert stopped
    with pytest.raises(ConfigError, match=r"train.lr = 0.05, not 0.1.*--dir"):
        table.carry_out(tmp_path, "a", tree(train__lr=0.1), lambda: None)
    with pytest.raises(ConfigError, match=r"clock.rate_up"):
        table.carry_out(tmp_path, "a", tree(clock__rate_up=1.0), lambda: None)
    assert len(runs.asked) == 1


def test_where_the_data_are_and_who_does_the_work_does_not_matter(tmp_path, monkeypatch):
    runs = Runs(monkeypatch)
    table.carry_out(tmp_path, "a", tree(), lambda: None)
    moved = tree(data__folder="elsewhere", run__engine="loop", run__workers=1)
    table.carry_out(tmp_path, "a", moved, lambda: None)
    assert len(runs.asked) == 1


def test_one_population_for_all_methods_of_a_level_and_seed(monkeypatch, tmp_path):
    made, seen = [], []
    monkeypatch.setattr(table, "population_of", lambda config: made.append(config) or len(made))

    def carry_out(place, title, tree, people):
        seen.append((title, people()))
        return {**kept(), "title": title}

    monkeypatch.setattr(table, "carry_out", carry_out)
    table.all_runs(asked("--levels", "low,high", "--seeds", "0,1", "--methods", "local,fedavg"))
    assert [people for _, people in seen] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert len({title for title, _ in seen}) == 8
    assert {(c.partition.parameters["level"], c.run.seed) for c in made} == {
        *(("low", 0), ("low", 1), ("high", 0), ("high", 1))
    }


@pytest.mark.parametrize(("raised", "code"), [(KeyboardInterrupt, 130), (ConfigError("no"), 2)])
def test_a_stopped_or_refused_script_leaves_no_table(tmp_path, monkeypatch, raised, code):
    def fails(asked):
        raise raised

    monkeypatch.setattr(table, "all_runs", fails)
    assert table.main(["--results", str(tmp_path)]) == code
    assert not list(tmp_path.iterdir())


def test_the_table_is_written_with_how_it_was_made(tmp_path, monkeypatch):
    runs = [("low", "fedavg", "fedavg", kept()), ("low", "dc-pfl", "dc-pfl", kept())]
    monkeypatch.setattr(table, "all_runs", lambda asked: runs)
    assert table.main(["--results", str(tmp_path), "--rounds", "9", "--seeds", "1,2"]) == 0
    found = json.loads((tmp_path / "dc_pfl_table.json").read_text())
    assert found["command"].endswith("--folder DATA --seeds 1,2 --rounds 9")
    assert (found["commits"], found["seconds"], len(found["rows"])) == (["abc"], 8.0, 2)
    assert found["command"] in (tmp_path / "dc_pfl_table.md").read_text()


# --- the user-centric paper's figure 6 -----------------------------------------------------------


def run_of(name, accuracies, before=False):
    history = [measured(EXCHANGES[name][0], n, a) for n, a in enumerate(accuracies, 1)]
    begun = measured(legs([7] * 20), 0) if before else {"round": 0}
    begun.pop("kinds", None)
    return {**kept(), "history": history, "begun": begun, "model_bytes": MODEL}


def test_times_begin_after_what_comes_before_round_1():
    plain = picture.times(run_of("all", [0.1, 0.2]), SYSTEMS[3])
    asked_first = picture.times(run_of("all", [0.1, 0.2], before=True), SYSTEMS[3])
    assert plain == pytest.approx([41, 82])
    assert asked_first == pytest.approx([22 + 41, 22 + 82])


def test_accuracy_by_a_time_is_that_of_the_last_round_over():
    ends, found = [10.0, 20.0, 30.0], [0.1, 0.2, 0.3]
    at = [picture.reached(ends, found, t) for t in (9.9, 10.0, 19.9, 20.0 - 1e-10, 99.0)]
    assert at == [None, 0.1, 0.1, 0.2, 0.3]


def some_runs():
    return {
        "user-centric": run_of("all", [0.3, 0.5, 0.7, 0.8], before=True),
        "fedavg": run_of("fedavg", [0.2, 0.3, 0.4, 0.45]),
    }


def test_rows_compare_at_the_times_of_fedavg():
    ours, fedavg = picture.rows(some_runs())
    third = {key: ours["systems"]["3"][key] for key in ("round", "half", "end")}
    # FedAvg's rounds end at 22, 44, 66, 88; ours at 63, 104, …
    assert third == {"round": 41.0, "half": None, "end": 0.3}
    assert [fedavg["systems"][n]["half"] for n in ("1", "2", "3")] == [0.3] * 3
    assert [fedavg["systems"][n]["end"] for n in ("1", "2", "3")] == [0.45] * 3
    # In the first system: 85.6 a round and 342.4 for all; ours at 85.6 + 104.6·n.
    assert (ours["systems"]["1"]["half"], ours["systems"]["1"]["end"]) == (None, 0.5)
    assert (ours["paper"], fedavg["paper"]) == (0.779, 0.705)


def test_the_picture_has_a_panel_for_each_system_over_its_own_time():
    drawn = picture.figure(some_runs(), "title")
    assert len(drawn.data) == 6
    fedavg = [list(t.x) for t in drawn.data if t.name == "fedavg"]
    assert fedavg[2] == [22, 44, 66, 88]
    assert fedavg[1] == [42, 84, 126, 168]
    assert fedavg[0][0] == pytest.approx(82 + H20, abs=1e-3)
    assert list(drawn.data[-1].y) == [0.2, 0.3, 0.4, 0.45]
    assert [t.showlegend for t in drawn.data] == [None, None, *[False] * 4]
    assert list(drawn.layout.xaxis3.range) == [0, 88]


def test_who_is_done_early_keeps_its_accuracy_to_the_end_of_the_picture():
    runs = {**some_runs(), "local": run_of("local", [0.1, 0.2])}
    drawn = picture.figure(runs, "title")
    local = drawn.data[-1]
    assert (list(local.x), list(local.y)) == ([1, 2, 88], [0.1, 0.2, 0.2])


def test_the_result_says_how_four_streams_stand_against_fedavg():
    rows = [
        {"method": picture.OURS, "systems": {"1": {"end": 0.76}, "2": {"end": 0.7512}}},
        {"method": "fedavg", "systems": {"1": {"end": 0.704}, "2": {"end": 0.754}}},
    ]
    rows[0]["systems"]["3"], rows[1]["systems"]["3"] = {"end": 0.5}, {"end": 0.5}
    assert [line.split(": ", 1)[1] for line in picture.standing(rows)] == [
        "user-centric streams=4 is 5.6 points above fedavg (76.0 and 70.4 %)",
        "user-centric streams=4 is 0.3 points below fedavg (75.1 and 75.4 %)",
        "user-centric streams=4 is the same as fedavg (50.0 and 50.0 %)",
    ]
    rows[0]["systems"]["1"]["end"] = None
    assert picture.standing(rows)[0].endswith("user-centric streams=4 has not done a round")
    assert picture.standing(rows[1:]) == []


def test_settings_of_the_figure_are_the_scenarios_but_for_what_the_script_says():
    asked = picture.arguments(["--folder", "data"])
    for _, name, parameters in table.method_list(picture.METHODS):
        config = parse(picture.settings(name, parameters, asked))
        assert (config.data.set, config.data.clients, config.data.samples) == (
            *("fashion-mnist", 20, 20_000),
        )
        assert config.shift.parameters == {"groups": 4}
        assert (config.train.batch_size, config.train.momentum, config.train.epochs) == (64, 0.9, 1)
        assert config.clock.parameters == {"system": 1}
        assert config.stop.patience is None
        assert config.model.init == "authors"


def test_files_of_the_figure_are_written_also_without_a_browser(tmp_path, monkeypatch, capsys):
    import plotly.graph_objects as go

    def missing(*given, **more):
        raise ValueError("there is no browser\nat all")

    monkeypatch.setattr(go.Figure, "write_image", missing)
    monkeypatch.setattr(picture, "all_runs", lambda asked: some_runs())
    assert picture.main(["--results", str(tmp_path), "--rounds", "4"]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {
        f"user_centric_figure.{ending}" for ending in ("json", "md", "html")
    }
    assert "no SVG: there is no browser\n" in capsys.readouterr().err
    assert (tmp_path / "user_centric_figure.html").stat().st_size < 100_000
    found = json.loads((tmp_path / "user_centric_figure.json").read_text())
    assert found["command"].endswith("--folder DATA --rounds 4")
    text = (tmp_path / "user_centric_figure.md").read_text()
    assert (
        "| fedavg | 45.0 | 70.5 | 85.6 | 30.0 | 45.0 | 42.0 | 30.0 | 45.0 | 22.0 | 30.0 |" in text
    )


# --- first weights -------------------------------------------------------------------------------


def test_the_weight_of_the_own_group_by_hand():
    # Clients 0 and 2 are of one group: 0.5 + 0.2 of the first row, 0.8, and 0.3 + 0.6 of the last.
    mixing = [[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.3, 0.1, 0.6]]
    assert initialisation.own_group(mixing, [4, 7, 4]) == pytest.approx((0.7 + 0.8 + 0.9) / 3)
    assert initialisation.own_group([[0.25] * 4] * 4, [0, 1, 2, 3]) == pytest.approx(0.25)


@pytest.mark.parametrize("name", initialisation.SETS)
@pytest.mark.parametrize("method", initialisation.MEASURED)
def test_cells_differ_in_nothing_but_the_first_weights(name, method):
    made = {
        init: parse(initialisation.settings(name, method, init, 3, "data")).model_dump()
        for init in INITIALISATIONS
    }
    assert all(tree["model"].pop("init") == init for init, tree in made.items())
    assert all(tree == made["torch"] for tree in made.values())
    assert made["torch"]["shift"]["name"] == ("none" if method == "fedavg" else "label-permutation")
    assert made["torch"]["method"] == parse({"method": {"name": method}}).method.model_dump()


def test_the_table_of_first_weights_is_measured_and_says_how(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(initialisation, "is_available", lambda name, folder: name == "digits")
    monkeypatch.setattr(initialisation, "CLIENTS", 4)
    monkeypatch.setattr(initialisation, "INITIALISATIONS", ("torch", "he"))
    assert initialisation.main(["--results", str(tmp_path), "--seeds", "1", "2"]) == 0
    assert "fashion-mnist is not available and is left out" in capsys.readouterr().err
    found = json.loads((tmp_path / "initialisation.json").read_text())
    assert found["command"] == "python benchmarks/initialisation.py --seeds 1 2"
    assert [(row["set"], row["init"]) for row in found["rows"]] == [
        ("digits", "torch"),
        ("digits", "he"),
    ]
    for row in found["rows"]:
        assert len(row["fedavg"]) == len(row["user-centric"]) == 2
        assert all(0 < value <= 1 for value in (*row["fedavg"], *row["user-centric"]))
    assert found["rows"][0]["user-centric"] != found["rows"][1]["user-centric"]
    text = (tmp_path / "initialisation.md").read_text()
    assert all(part in text for part in (found["commit"], found["date"], "seeds 1, 2", "`he`"))
    assert initialisation.spread([0.2, 0.4], 100, 1) == "30.0 ± 14.1"  # 20·√½ of two values


# --- rows that are measured one by one ------------------------------------------------------------


def at_rest(seed, full, sent, commit="abc", **method):
    """A row of the script about layers at rest."""
    return {
        "model": "cnn5",
        "seed": seed,
        "method": method,
        "rounds": 41,
        "samples": 6000,
        "commit": commit,
        "bytes": sent,
        "full": full,
        "resting": None,
        "groups": 4,
    }


def test_pages_name_the_commits_of_their_rows_and_no_other():
    assert commits([{"commit": "b"}, {"commit": "a"}, {"commit": "b"}]) == "Commits b, a"
    kept = {"command": "c", "date": "2026-01-01", "machine": "two cores"}
    rows = [at_rest(0, 0.8, 0.6), at_rest(0, 0.8, 1.0, "def", alpha=1)]
    assert "Commits abc, def, 2026-01-01, two cores." in layers_at_rest.page({**kept, "rows": rows})
    classes = {"data": "digits", "kind": "iid", "seed": 0, "method": "fedavg", "commit": "abc"}
    classes |= {"received": 0.5, "groups": 1, "stages": [], "megabytes": 1.0}
    assert "Commit abc, 2026-01-01" in fedtsdp_classes.page({**kept, "rows": [classes]})
    split = {"lr": 0.1, "seed": 0, "commit": "abc", "groups": 1}
    split |= {key: [] for key in ("losses", "ended", "tried", "split", "paper")}
    assert "Commit abc, 2026-01-01" in split_rounds.page({**kept, "rows": [split]})


def test_full_rounds_are_those_of_the_defaults_for_every_run():
    full = [n for n in range(1, 42) if layers_at_rest.is_full(n)]
    assert full[:7] == [1, 2, 3, 4, 5, 8, 11]
    assert full[-3:] == [35, 38, 41]
    inner = coterie.layer_wise(coterie.fedavg(), layers_at_rest.ALPHA, start=layers_at_rest.START)
    history = coterie.simulate(
        digits(clients=3), method=inner, model="logistic", rounds=12, engine="loop"
    ).history
    due = [e["round"] for e in history if e["notes"]["layers"]["all_due"]]
    assert due == [n for n in full if n <= 12]


def test_the_best_point_is_the_most_accurate_within_both_limits():
    whole = [at_rest(s, 0.80 + s / 10, 1.0, alpha=1) for s in (0, 1)]
    low = [at_rest(s, 0.796 + s / 10, 0.5, share=1.0) for s in (0, 1)]
    high = [at_rest(s, 0.798 + s / 10, 0.54, share=0.8) for s in (0, 1)]
    said = "cnn5: share 0.8 is within both limits (at most 0.55 of FedAvg's bytes and 0.5 points "
    assert layers_at_rest.best([*whole, *low, *high]) == [f"{said}below `alpha=1`): 0.54, -0.2."]
    dear = [at_rest(s, 0.80 + s / 10, 0.6, share=0.5) for s in (0, 1)]
    poor = [at_rest(s, 0.79 + s / 10, 0.5) for s in (0, 1)]
    (line,) = layers_at_rest.best([*whole, *dear, *poor])
    assert "no setting is within both limits" in line
    assert line.endswith(
        "; of those within the bytes, defaults is the most accurate: 0.50, -1.0; of those within "
        "the points, share 0.5 sends the least: 0.60, +0.0."
    )
    rows = [*whole, *low, *high]
    assert [n for *_, n in layers_at_rest.curves(rows)["cnn5"]] == [
        "share 1",
        "share 0.8",
        "alpha 1",
    ]
    line, others = layers_at_rest.drawn(rows).data
    assert (list(line.x), list(others.x)) == ([0.5, 0.54], [1.0])
    assert layers_at_rest.curves([*whole, *low]) == {}
