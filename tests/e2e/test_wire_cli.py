"""The wire, clocks and round policy from the command line: exit codes, sentences, files."""

import json
from pathlib import Path

import pytest

from coterie.experiment.export import reopen


def sets(*texts):
    return [word for text in texts for word in ("--set", text)]


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        (["wire.up=qsdg"], "unknown codec 'qsdg'; did you mean 'qsgd'?"),
        (["wire.down=zip"], "unknown codec 'zip'"),
        (["wire.up=qsgd:levels=0"], "codec 'qsgd': levels = 0: must be at least 1"),
        (["wire.up=qsgd:level=3"], "did you mean 'levels'?"),
        (["wire.down=topk:share=2"], "codec 'topk': share = 2: must be at most 1"),
        (["wire.up=zstd"], "zstd must come once, after another codec"),
        (["wire.layers.tail=raw"], "unknown layer 'tail'"),
        (["wire.down_layers.haed=raw"], "did you mean 'head'?"),
        (["wire.layers.head=rwa"], "unknown codec 'rwa'"),
        (["wire.codec=raw"], "unknown key 'wire.codec'"),
        (["clock.name=link"], "unknown clock 'link'; did you mean 'links'?"),
        (["clock.name=links", "clock.rate=3"], "unknown parameter of clock 'links' 'rate'"),
        (["clock.name=links", "clock.rate_up=0"], "rate_up = 0: must be above 0"),
        (["run.over_selection=1.5", "run.cohort=2"], "run.over_selection uses simulated time"),
        (["run.over_selection=0.5"], "run.over_selection = 0.5"),
        (["run.over_selection=3", "clock.name=links"], "selects 12 of 4 clients"),
        (["run.deadline=3"], "run.deadline uses simulated time"),
        (["run.deadline=0", "clock.name=links"], "run.deadline = 0"),
        (["run.min_reports=5"], "run.min_reports = 5 with a cohort of 4"),
        (["availability.name=diurnal"], "availability uses simulated time"),
        (["availability.name=always", "run.weighted=true"], "run.weighted selects clients by"),
        (["availability.name=dirunal", "clock.name=links"], "did you mean 'diurnal'?"),
        (["stop.seconds=3"], "stop.seconds needs a clock"),
        (["stop.target=0.5", "data.val_fraction=0"], "set data.val_fraction above 0"),
        (["stop.patience=0"], "stop.patience = 0"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence_and_leaves_no_folder(cli, small, texts, told):
    cli("run", *small, "--rounds", 1, *sets(*texts), "--dir", "r").says(2, told)
    assert not Path("r").exists()


def test_a_trace_that_cannot_be_read(cli, small):
    texts = ("clock.name=links", "availability.name=trace", "availability.file=nowhere.csv")
    cli("run", *small, *sets(*texts), "--dir", "r").says(3, "nowhere.csv cannot be read")
    assert not Path("r").exists()


def test_a_deadline_nobody_meets_ends_with_a_sentence_and_the_run_can_be_looked_at(cli, small):
    texts = ("clock.name=links", "run.deadline=0.000001", "run.abandoned=2")
    ended = cli("run", *small, "--rounds", 5, *sets(*texts), "--dir", "r", "-q")
    sentences = ("2 rounds in a row were abandoned", "new folder with more time (run.deadline")
    ended.says(5, *sentences)
    events = [json.loads(line) for line in Path("r/events.jsonl").read_text().splitlines()]
    assert [e["round"] for e in events] == [1, 2]
    assert all("abandoned" in e for e in events)
    assert sum(events[-1]["total_wasted"].values()) > 0
    assert not Path("r/result.json").exists()
    cli("run", "--resume", "r", "-q").says(5, "2 rounds in a row were abandoned")


def test_a_run_with_all_of_it_is_written_down_and_can_be_reopened(cli, small):
    texts = (
        "wire.up=qsgd",
        "wire.down=topk:share=0.5",
        "wire.layers.head=raw",
        "clock.name=links",
        "clock.rate_up=[0.5, 2.0]",
        "run.cohort=2",
        "run.over_selection=1.5",
        "evaluation.target=0.0",
    )
    words = ("run", *small, "--method", "fedper", *sets(*texts), "--dir", "r", "-q")
    assert cli(*words, "--rounds", 2).code == 0
    result = json.loads(Path("r/result.json").read_text())
    assert result["late"] == 2
    assert result["clock"]["total"] > 0
    assert result["to_target"]["round"] == 1
    assert result["bytes"]["wasted"]["up"] > 0
    events = [json.loads(line) for line in Path("r/events.jsonl").read_text().splitlines()]
    assert all(len(e["cohort"]) == 3 and len(e["client_bytes"]) == 2 for e in events)
    before = [reopen(Path("r")).weights(c).vector for c in range(4)]
    assert cli("run", "--resume", "r", "-q").code == 0
    after = [reopen(Path("r")).weights(c).vector for c in range(4)]
    assert all(a.equal(b) for a, b in zip(before, after, strict=True))
    assert cli("export", "r", "--client", 1, "--to", "m.safetensors").code == 0
    assert Path("m.safetensors").exists()
