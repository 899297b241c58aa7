"""coterie groups: an answer about one's own clients before any run."""

import json
import re
import shlex
from pathlib import Path

import pytest

TURNED = ("--clients", 8, "--shift", "rotation", "--set", "shift.groups=4")
TURNED += ("--set", "data.samples=800", "--engine", "loop", "--lr", 0.1, "--batch-size", 16)


def lines(text):
    return [line for line in text.splitlines() if line.strip()]


def test_the_answer_is_said_in_words_and_can_be_used(cli):
    ended = cli("groups", *TURNED, "--to", "g.json", "--picture", "p.html")
    assert ended.code == 0, ended.err
    (verdict,) = [line for line in lines(ended.out) if line.startswith("There are 4 groups")]
    assert (
        "the same in 3 of 3 draws). Training them separately pays off: validation loss" in verdict
    )
    assert ended.out.index(verdict) < ended.out.index("clients: 8")  # the answer comes first
    for group, own in enumerate(("0, 4", "1, 5", "2, 6", "3, 7")):
        assert re.search(rf"│ +{group} │ +2 │ .*│ {own} +│", ended.out)
    assert re.search(r"│ 4 \(chosen\) │ +0\.\d+", ended.out)
    assert re.search(
        r"cost  .* MB down, .* up; [\d,]+ samples processed .* 3 rounds .* \d+ steps", ended.out
    )
    shown = "exposed  The server saw every client's models trained on two halves of its data"
    assert shown in ended.out
    html = Path("p.html").read_text()
    assert verdict.split(" (")[0] in html
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)\s*=", html)
    assert all(f'data-fig-{name}"' in html for name in ("evidence", "client-map", "verdict"))
    # The last line is a command that runs, and its groups are those found.
    words = shlex.split(lines(ended.out)[-1].split("next  ")[1])
    assert words[:2] == ["coterie", "run"]
    assert words[-4:] == ["--method", "known-groups", "--set", "method.groups=g.json"]
    run = cli(*words[1:], "--rounds", 1, "-q", "--json", "--dir", "r")
    assert run.code == 0, run.err
    events = [json.loads(line) for line in Path("r/events.jsonl").read_text().splitlines()]
    kept = json.loads(Path("g.json").read_text())["groups"]
    assert events[-1]["groups"] == [kept[str(c)] for c in range(8)]


def test_json_is_all_that_is_printed(cli):
    ended = cli("groups", *TURNED, "--json", "--no-trial", "--seeds", 2, "--by", "model")
    assert ended.code == 0, ended.err
    told = json.loads(ended.out)
    assert told["groups"] == {str(c): str(c % 4) for c in range(8)}
    assert told["stability"]["draws"] == 2
    assert told["evidence"]["by"] == "model"
    assert told["trial"] == {}
    assert told["cost"]["rounds"] == 0
    assert told["data"]["clients"] == 8
    assert "was not tried" in told["verdict"]


def test_all_representations_in_one_table(cli):
    ended = cli("groups", *TURNED, "--by", "all", "--seeds", 1, "--no-trial")
    assert ended.code == 0, ended.err
    assert "(covariate shift)" in ended.out
    for by in ("final-layer", "model", "gradient", "labels", "data"):
        assert re.search(rf"│ {by} +│ +\d+ │ +[\d.]+ │", ended.out), by


def test_a_file_with_another_method_and_rules_to_stop_is_no_hindrance(cli):
    Path("c.toml").write_text(
        '[data]\nclients = 6\nsamples = 300\n[method]\nname = "ifca"\nk = 3\n'
        '[run]\nengine = "loop"\nrounds = 50\nholdout = 2\n[stop]\npatience = 3\n'
        "[evaluation]\ntarget = 0.9\nalone = true\n"
    )
    ended = cli("groups", "c.toml", "--json", "--seeds", 1)
    assert ended.code == 0, ended.err
    assert len(json.loads(ended.out)["groups"]) == 6
    ended = cli("groups", "c.toml", "--seeds", 1)
    assert ended.code == 0, ended.err
    assert lines(ended.out)[-1].endswith("next  coterie run c.toml --method fedavg")


@pytest.mark.parametrize("by", ["labels", "data", "gradient"])
def test_one_group_in_the_data_alone_leads_to_a_comparison_of_models(by, cli):
    words = ("groups", "--clients", 6, "--set", "data.samples=300", "--engine", "loop")
    ended = cli(*words, "--by", by, "--seeds", 1)
    assert ended.code == 0, ended.err
    advice = [line for line in lines(ended.out) if "by labels or data" in line or "by all" in line]
    assert advice, ended.out
    last = shlex.split(lines(ended.out)[-1].split("next  ")[1])
    assert last == ["coterie", *map(str, words), "--by", "all"]


def test_the_file_has_the_groups_of_the_evidence_where_the_trial_favours_others(cli):
    words = ("--partition", "shards", "--clients", 10, "--lr", 0.1, "--engine", "loop")
    ended = cli("groups", *words, "--seeds", 1, "--to", "g.json")
    assert ended.code == 0, ended.err
    kept = json.loads(Path("g.json").read_text())
    number, chosen = kept["evidence"]["groups"], kept["trial"]["chosen"]
    assert chosen != number  # two labels each: fewer groups do as well
    assert len(set(kept["groups"].values())) == number
    assert (
        f"g.json (the {number} of the evidence; the trial favoured {chosen} groups)"
    ) in ended.out
    last = shlex.split(lines(ended.out)[-1].split("next  ")[1])
    assert last[-4:] == ["--method", "known-groups", "--set", "method.groups=g.json"]


@pytest.mark.parametrize(
    ("words", "code", "parts"),
    [
        (("--clients", 1), 2, ["one"]),
        (("--clients", 4, "--by", "label"), 2, ["did you mean 'labels'?"]),
        (("--clients", 800), 3, ["clients have at least two training samples"]),
        (("--clients", 4, "--set", "data.val_fraktion=0"), 2, ["val_fraktion"]),
        (("--data", "nothing"), 2, ["nothing"]),
    ],
)
def test_mistakes_are_one_sentence(cli, words, code, parts):
    cli("groups", "--engine", "loop", *words).says(code, *parts)


def test_no_validation_data_is_said(cli):
    ended = cli("groups", *TURNED, "--set", "data.val_fraction=0", "--seeds", 1)
    assert ended.code == 0, ended.err
    said = "is not known: no client has validation data, so nothing can tell whether training in"
    assert said in ended.out
    assert "set data.val_fraction" in ended.out


def test_what_cannot_be_written_is_a_sentence(cli):
    Path("file").write_text("")
    Path("folder").mkdir()
    words = ("groups", "--clients", 4, "--engine", "loop", "--no-trial", "--seeds", 1)
    cli(*words, "--picture", "file/p.html").says(4, "cannot write file/p.html")
    cli(*words, "--to", "nowhere/g.json").says(4, "there is no folder nowhere; create it")
    cli(*words, "--to", "folder").says(4, "cannot write folder")


def test_under_secure_sums_the_final_layer_is_shown_by_consent_and_once(cli):
    pytest.importorskip("cryptography", reason="secure sums need the extra 'privacy'")
    words = ("groups", *TURNED[:2], "--shift", "rotation", "--set", "shift.groups=2")
    words += (*TURNED[6:], "--set", "privacy.secure=true")
    cli(*words).says(2, "does not work under secure aggregation", "privacy.reveal =")
    cli(*words, "--set", "privacy.reveal=final-layer").says(2, "Set train.steps")
    words += ("--set", "train.steps=5")
    ended = cli(*words, "--set", "privacy.reveal=final-layer")
    assert ended.code == 0, ended.err
    assert "There are 2 groups (reproducibility 1.00, one draw)" in ended.out
    assert "exposed  With consent (--reveal final-layer), the server saw" in ended.out
    assert "Otherwise the server saw only sums" in ended.out
    # Groups too small for a secure sum are no groups to train.
    small = cli(*words, "--set", "privacy.reveal=final-layer", "--set", "privacy.min_group=5")
    assert small.code == 0, small.err
    assert "no grouping to try has 5 or more clients in every group" in small.out
    assert lines(small.out)[-1].endswith("--method fedavg")
