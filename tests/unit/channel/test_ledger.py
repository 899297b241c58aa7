"""The ledger: every byte of every message, by client, round, kind and purpose."""

import csv
import json
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from torch import nn

import coterie
from coterie.channel.compression.coding import Coding
from coterie.channel.ledger import Bytes, Ledger, Tally
from coterie.core.method import State
from coterie.engines.loop import Loop
from coterie.engines.pool import Pool
from coterie.experiment.experiment import ENGINES, execute
from faulty import Faulty
from support import ROWS, drive, experiment, quadratics

# --- by itself -----------------------------------------------------------------------------------


def filled():
    ledger = Ledger()
    ledger.now = Tally()
    ledger.record(0, Bytes(10, 4), {"model/a": Bytes(7, 3), "header": Bytes(3, 1)})
    ledger.waste(1, Bytes(10, 0))
    ledger.now = Tally()
    ledger.record(0, Bytes(20, 8), {"model/a": Bytes(14, 6), "header": Bytes(6, 2)})
    ledger.record(2, Bytes(5, 5), {}, unmetered=True)
    ledger.waste(1, Bytes(20, 9), late=True)
    ledger.waste(2, Bytes(1, 1), unmetered=True)
    return ledger


def test_totals_and_the_present_round_by_hand():
    ledger = filled()
    assert dict(ledger.method) == {0: Bytes(30, 12)}
    assert dict(ledger.kinds) == {"model/a": Bytes(21, 9), "header": Bytes(9, 3)}
    assert dict(ledger.wasted) == {1: Bytes(30, 9)}
    assert ledger.unmetered == Bytes(6, 6)
    assert (ledger.total, ledger.total_wasted) == (Bytes(30, 12), Bytes(30, 9))
    assert (ledger.lost, ledger.late) == (2, 1)
    now = ledger.now
    assert (now.total, now.total_wasted, now.unmetered) == (Bytes(20, 8), Bytes(20, 9), Bytes(6, 6))
    assert dict(now.kinds) == {"model/a": Bytes(14, 6), "header": Bytes(6, 2)}
    assert (now.lost, now.late) == (1, 1)


def test_an_abandoned_round_is_wasted_and_nothing_is_lost_sight_of():
    ledger = filled()
    ledger.abandon()
    assert ledger.total == Bytes(10, 4)  # the first round stays
    assert ledger.kinds["model/a"] == Bytes(7, 3)
    assert ledger.kinds["header"] == Bytes(3, 1)
    assert dict(ledger.wasted) == {0: Bytes(20, 8), 1: Bytes(30, 9)}
    assert (ledger.now.total, ledger.now.total_wasted) == (Bytes(), Bytes(40, 17))
    assert not ledger.now.kinds
    assert ledger.unmetered == Bytes(6, 6)


def test_a_checkpoint_holds_all_but_the_present_round():
    ledger = filled()
    back = Ledger.from_tree(ledger.to_tree())
    assert replace(back, now=ledger.now) == ledger
    back.record(9, Bytes(1, 1), {"x": Bytes(1, 1)})  # new names still begin at nothing
    assert back.method[9] == back.kinds["x"] == Bytes(1, 1)


# --- against what the engine moved ---------------------------------------------------------------


class Counted:
    """Counts the bytes that really pass, both ways and by client."""

    def exchange(self, requests, until=None):
        if not hasattr(self, "down"):
            self.down, self.up = defaultdict(int), defaultdict(int)
        for request in requests:
            self.down[request.client] += len(request.message.to_bytes())
        for client, answer in super().exchange(requests, until):
            self.up[client] += 0 if answer is None else len(answer.to_bytes())
            yield client, answer


class CountedLoop(Counted, Loop):
    pass


class CountedPool(Counted, Pool):
    pass


MOVED = [
    ("fedavg", Coding()),
    ("ifca", Coding("qsgd", "qsgd:levels=127")),
    ("scaffold", Coding("topk:share=0.1+zstd", "bf16")),
    ("fedper", Coding("raw+zstd", "raw+zstd")),
    ("user-centric", Coding("fp16", "topk:share=0.3")),
    ("local", Coding("qsgd", "qsgd")),
    ("fedfomo", Coding("qsgd", "qsgd", {"head": "raw"}, {"head": "topk:share=0.5"})),
]


@pytest.mark.parametrize(("name", "coding"), MOVED)
def test_every_byte_of_every_message_is_in_the_ledger(name, coding, tmp_path):
    made = experiment(ROWS[name](), settings={"rounds": 2, "wire": coding})
    for engine in (CountedLoop, lambda plan: CountedPool(plan, 2)):
        _, channel, running = drive(made, tmp_path / str(engine is CountedLoop), engine)
        running.close()
        ledger = channel.state.ledger
        assert sum(running.down.values()) == ledger.total.down + ledger.unmetered.down
        assert sum(running.up.values()) == ledger.total.up + ledger.unmetered.up
        assert (ledger.total.total == 0) == (name == "local")
        if not ledger.unmetered.total:
            assert {c: Bytes(running.down[c], running.up[c]) for c in running.down} == ledger.method
        assert sum(ledger.kinds.values(), Bytes()) == ledger.total
        assert not ledger.total_wasted.total


# --- kinds, counted by hand ----------------------------------------------------------------------


def two_layers(value=None):
    """Four numbers in layer 0 and three in layer 1."""
    network = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1), nn.Flatten(0))
    if value is not None:
        for parameter in network.parameters():
            nn.init.constant_(parameter, value)
    return network


def small(method, **settings):
    return experiment(
        method,
        quadratics([[1.0, 2.0], [4.0, 5.0]]),
        model=two_layers,
        criterion=nn.functional.mse_loss,
        schedule={"batch_size": 8, "momentum": 0.0},
        settings=settings,
    )


def kinds_of(method, folder, coding=None):
    """What one round of two clients moved, by kind; and every message."""
    seen = []

    class Noted(Loop):
        def exchange(self, requests, until=None):
            seen.extend(r.message for r in requests)
            for client, answer in super().exchange(requests, until):
                seen.append(answer)
                yield client, answer

    made = small(method, wire=coding or Coding())
    _, channel, _ = drive(made, folder, Noted, rounds=1)
    return channel.state.ledger.kinds, seen


def test_kinds_of_fedavg_by_hand(tmp_path):
    kinds, seen = kinds_of(coterie.fedavg(), tmp_path)
    assert set(kinds) == {"model/0", "model/1", "losses", "header"}
    assert kinds["model/0"] == Bytes(2 * 16, 2 * 16)
    assert kinds["model/1"] == Bytes(2 * 12, 2 * 12)
    told = [json.loads(m.header)["body"].get("metrics") for m in seen]
    losses = sum(len(json.dumps(m, separators=(",", ":"))) for m in told if m)
    assert kinds["losses"] == Bytes(0, losses)
    headers = sum(8 + len(m.header) for m in seen)
    assert kinds["header"].total == headers - losses


def test_kinds_of_ifca_are_k_models_down_and_one_up(tmp_path):
    kinds, _ = kinds_of(coterie.ifca(k=2), tmp_path)
    assert kinds["model/0"] == Bytes(2 * 2 * 16, 2 * 16)
    assert kinds["model/1"] == Bytes(2 * 2 * 12, 2 * 12)


def test_kinds_of_scaffold_name_its_control_variates(tmp_path):
    kinds, _ = kinds_of(coterie.scaffold(), tmp_path)
    assert set(kinds) == {"model/0", "model/1", "correction", "count", "losses", "header"}
    assert kinds["correction"] == Bytes(2 * 28, 2 * 28)
    assert kinds["count"] == Bytes(0, 2 * 4)
    assert kinds["model/0"] == Bytes(2 * 16, 2 * 16)


def test_kinds_of_codecs_by_hand(tmp_path):
    # qsgd of 7 levels on 7 numbers: a norm of 4 bytes and 7 · 4 bits, 8 bytes; 8 · 4 // 7 are
    # layer 0's. Down, layer 0 in half precision takes 8 bytes and layer 1 as it is 12.
    coding = Coding("qsgd", "fp16", down_layers={"1": "raw"})
    kinds, _ = kinds_of(coterie.fedavg(), tmp_path, coding)
    assert kinds["model/0"] == Bytes(2 * 8, 2 * 4)
    assert kinds["model/1"] == Bytes(2 * 12, 2 * 4)


# --- whole runs ----------------------------------------------------------------------------------


def adds_up(event):
    """A round's bytes are the sum of its clients', and of its kinds."""
    both = [event["bytes"]["down"], event["bytes"]["up"]]
    for parts in (event["client_bytes"], event["kinds"]):
        assert [sum(p[way] for p in parts.values()) for way in (0, 1)] == both


def test_events_add_up_and_follow_one_another():
    made = experiment(
        ROWS["user-centric"](), settings={"rounds": 3, "cohort": 0.5, "wire": Coding("qsgd")}
    )
    result = execute(made)
    before = result.begun["bytes"]
    for event in result.history:
        adds_up(event)
        assert sorted(map(int, event["client_bytes"])) == event["cohort"]
        for way in ("down", "up"):
            assert event["total_bytes"][way] == before[way] + event["bytes"][way]
        before = event["total_bytes"]
    told = result.summary["bytes"]
    for way in ("down", "up"):
        assert told[way] == before[way] == sum(k[way] for k in told["kinds"].values())


def run_with(monkeypatch, engine, **settings):
    monkeypatch.setitem(ENGINES, "loop", lambda plan, workers=None: engine(plan))
    return execute(small(coterie.fedavg(), **settings))


def test_lost_late_and_abandoned_bytes_are_wasted(monkeypatch):
    whole = run_with(monkeypatch, Loop, rounds=1).history[0]["client_bytes"]
    lossy = run_with(
        monkeypatch, lambda p: Faulty(Loop(p), lose_reply=lambda c, o: c == 1), rounds=1
    )
    (event,) = lossy.history
    adds_up(event)
    assert event["client_bytes"] == {"0": whole["0"]}
    assert (event["wasted"], event["lost"], event["late"]) == (
        {"down": whole["1"][0], "up": 0},
        1,
        0,
    )
    assert lossy.summary["bytes"]["wasted"] == event["total_wasted"] == event["wasted"]

    gone = run_with(
        monkeypatch,
        lambda p: Faulty(Loop(p), lose_reply=lambda c, o: (c, o) == (1, "1.0")),
        rounds=2,
        min_reports=2,
    )
    first, second = gone.history
    assert "abandoned" in first
    assert first["bytes"] == first["total_bytes"] == {"down": 0, "up": 0}
    assert first["kinds"] == first["client_bytes"] == {}
    down = whole["0"][0] + whole["1"][0]
    assert first["wasted"] == {"down": down, "up": whole["0"][1]}
    assert second["total_wasted"] == first["wasted"]
    assert second["total_bytes"] == second["bytes"]
    adds_up(second)
    kinds = gone.summary["bytes"]["kinds"]
    assert sum(k["down"] for k in kinds.values()) == second["bytes"]["down"]


def test_a_late_report_wastes_both_ways():
    whole = execute(small(coterie.fedavg(), rounds=1)).history[0]["client_bytes"]
    # Computing takes no time to speak of: what is sent decides, and links are drawn apart.
    late = execute(
        small(
            coterie.fedavg(),
            rounds=1,
            cohort=1,
            over_selection=2.0,
            clock={"name": "links", "rate_up": [1.0, 9.0], "samples_per_second": 1e9},
        )
    ).history[0]
    adds_up(late)
    assert len(late["client_bytes"]) == late["late"] == 1
    (other,) = {"0", "1"} - set(late["client_bytes"])
    assert late["wasted"] == dict(zip(("down", "up"), whole[other], strict=True))
    assert late["lost"] == 0


def test_scores_are_counted_apart_and_orders_to_oneself_too():
    silent = execute(small(coterie.fedavg(), rounds=2, evaluate_every=0, adapt_epochs=0))
    scored = execute(small(coterie.fedavg(), rounds=2, adapt_every=1))
    told = [r.summary["bytes"] for r in (silent, scored)]
    assert told[0]["down"] == told[1]["down"]
    assert told[0]["up"] == told[1]["up"]
    assert told[0]["kinds"] == told[1]["kinds"]
    assert told[0]["unmetered"]["down"] < told[1]["unmetered"]["down"]


def test_a_resumed_run_has_counted_the_same(tmp_path):
    made = small(coterie.fedavg(), rounds=3, wire=Coding("topk:share=0.5", "qsgd"))
    whole = execute(made, tmp_path / "a")
    part = replace(made, settings=replace(made.settings, rounds=1))
    execute(part, tmp_path / "b")
    resumed = execute(made, tmp_path / "b", resume=True)
    told = [{**r.summary["bytes"], "unmetered": 0} for r in (whole, resumed)]  # scored once more
    assert told[0] == told[1]
    assert isinstance(whole.state, State)
    assert torch.equal(whole.weights(0).vector, resumed.weights(0).vector)


def test_the_ledgers_file_adds_up_to_the_summary_also_after_a_crash(tmp_path):
    def lossy(plan):
        return Faulty(Loop(plan), lose_reply=lambda c, o: (c, o) in ((2, "2.0"), (0, "3.0")))

    def sums(place):
        with (place / "ledger.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        of = {"bytes": [0, 0], "wasted": [0, 0]}
        for row in rows:
            entry = of["wasted" if row["kind"] == "wasted" else "bytes"]
            entry[0] += int(row["down"])
            entry[1] += int(row["up"])
        return rows, of

    # Saved after rounds 2 and 4: the rows of round 3 are there at the crash, and written again.
    made = experiment(ROWS["fedclust"](), settings={"rounds": 4, "checkpoint_every": 2})
    ENGINES["lossy"] = lambda plan, workers: lossy(plan)
    try:
        whole = replace(made, settings=replace(made.settings, engine="lossy"))
        summary = execute(whole, tmp_path / "whole").summary["bytes"]

        def crash(event):
            if event["round"] == 3:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            execute(whole, tmp_path / "again", watch=crash)
        with (tmp_path / "again" / "ledger.csv").open("a") as file:
            file.write("4,1,hea")  # a line that the crash cut short
        execute(whole, tmp_path / "again", resume=True)
    finally:
        del ENGINES["lossy"]
    rows, of = sums(tmp_path / "whole")
    assert of["bytes"] == [summary["down"], summary["up"]]
    assert of["wasted"] == [summary["wasted"]["down"], summary["wasted"]["up"]]
    assert of["wasted"][0] > 0
    assert {row["round"] for row in rows} == {"0", "1", "2", "3", "4"}
    assert any(row["kind"].startswith("model/") for row in rows)
    assert sums(tmp_path / "again")[0] == rows
