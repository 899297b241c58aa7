"""Scores that travel with the next round's orders: the same run in fewer exchanges."""

import json
from dataclasses import replace

import pytest

import coterie
from coterie.channel.compression.coding import Coding
from coterie.channel.privacy.settings import Privacy
from coterie.client.store import Store
from coterie.core.tree import same
from coterie.engines.loop import Loop
from coterie.errors import LostHistory
from coterie.experiment.experiment import ENGINES, execute
from coterie.experiment.stopping import Stop as Ending
from coterie.results.rundir import RunDir, rounds_of
from faulty import Faulty
from support import ROWS, Stop, digits, experiment, stop_after

PEOPLE = digits(samples=180)
METHODS = {
    **{n: ROWS[n] for n in ("fedavg", "ifca", "fedclust", "user-centric", "ditto", "scaffold")},
    "fedper": ROWS["fedper"],
    "dc-pfl": lambda: coterie.dc_pfl(
        bend="absolute",
        start=1,
        alpha=2,
        share=0.9,
        gamma=0.9,
        observe=1,
        smooth=1,
        levels=0.2,
        trial="two-models",
        trial_on="training",
    ),  # it holds a trial in round 7
}
ROUNDS = {"dc-pfl": 8}
LOSSY = Coding(up="topk:share=0.3", down="qsgd:levels=7")
NOT_THE_SAME = ("seconds", "exchanges")


class Piggybacking(Loop):
    """The reference engine, as if its exchanges were dear."""

    piggybacks = True


@pytest.fixture(autouse=True)
def piggybacked(monkeypatch):
    monkeypatch.setitem(ENGINES, "piggybacked", lambda plan, _=None: Piggybacking(plan))


def small(name="fedavg", rounds=4, engine="loop", **settings):
    settings = {"rounds": rounds, "engine": engine, "adapt_epochs": 0, **settings}
    return experiment(METHODS[name](), PEOPLE, schedule={"batch_size": 16}, settings=settings)


def by(engine, made):
    return replace(made, settings=replace(made.settings, engine=engine))


def bare(event, *more):
    return {k: v for k, v in event.items() if k not in (*NOT_THE_SAME, *more)}


def alike(scores):
    """Scores to compare with.

    Clients that have an order are scored by themselves and not in a batch of many, which the last
    bits of a product of matrices may depend on; so losses are equal but for these.
    """
    if isinstance(scores, dict):
        return {k: alike(v) for k, v in scores.items()}
    return pytest.approx(scores, rel=1e-6) if isinstance(scores, float) else scores


def assert_same_run(plain, piggybacked, *but):
    for client in range(len(PEOPLE.clients)):
        assert same(plain.weights(client), piggybacked.weights(client))
    assert plain.versions == piggybacked.versions
    assert len(plain.history) == len(piggybacked.history)
    for mine, other in zip(plain.history, piggybacked.history, strict=True):
        assert bare(other) == alike(bare(mine))
    assert piggybacked.clients == plain.clients
    left_out = ("seconds", "train_seconds", "bytes", *but)
    mine, other = (
        {k: v for k, v in r.summary.items() if k not in left_out} for r in (plain, piggybacked)
    )
    assert other == alike(mine)
    mine, other = (
        {k: v for k, v in r.summary["bytes"].items() if k != "unmetered"}
        for r in (plain, piggybacked)
    )
    assert other == mine


def unmetered(result):
    return result.summary["bytes"]["unmetered"]


# --- the same run in fewer exchanges -------------------------------------------------------------


@pytest.mark.parametrize(("cohort", "coding"), [(1.0, Coding()), (0.5, LOSSY)], ids=["all", "half"])
@pytest.mark.parametrize("name", METHODS)
def test_piggybacking_changes_nothing_but_the_number_of_exchanges(name, cohort, coding):
    made = small(name, ROUNDS.get(name, 3), cohort=cohort, wire=coding)
    plain, piggybacked = execute(made), execute(by("piggybacked", made))
    assert_same_run(plain, piggybacked)
    # All but the last round are one exchange less: that one's scores have no order to go with.
    for mine, other in zip(plain.history[:-1], piggybacked.history[:-1], strict=True):
        assert other["exchanges"] == mine["exchanges"] - 1
    assert piggybacked.history[-1]["exchanges"] == plain.history[-1]["exchanges"]


@pytest.mark.parametrize("name", ["fedavg", "ifca", "ditto"])
def test_a_round_is_one_exchange(name):
    history = execute(small(name, engine="piggybacked")).history
    assert [e["exchanges"] for e in history] == [1, 1, 1, 2]


def test_a_round_of_dc_pfl_is_one_exchange_and_a_trial_two():
    history = execute(small("dc-pfl", 8, "piggybacked")).history
    trials = ["trial" in e["notes"] for e in history]
    assert any(trials[:-1])
    assert [e["exchanges"] for e in history[:-1]] == [2 if t else 1 for t in trials[:-1]]


@pytest.mark.parametrize("name", ["ifca", "fedper", "scaffold", "dc-pfl"])
def test_a_model_that_an_order_has_already_is_not_sent_again(name):
    made = small(name, ROUNDS.get(name, 4), "piggybacked")
    # Only the last round is scored in the other one: what piggybacking costs is the difference.
    piggybacked, without = (
        execute(made),
        execute(small(name, ROUNDS.get(name, 4), evaluate_every=0)),
    )
    model = 4 * piggybacked.plan.start.layout.size
    piggybacks = (len(piggybacked.history) - 1) * len(PEOPLE.clients)
    for way, most in (("down", 150), ("up", 500)):
        cost = (unmetered(piggybacked)[way] - unmetered(without)[way]) / piggybacks
        assert 0 < cost < most < model / 6


def test_a_score_costs_what_is_on_top_of_its_order_to_the_byte(monkeypatch):
    # The rounds of a run that scores nothing on its way have the very messages without.
    sizes = {}

    class Weighing(Piggybacking):
        def exchange(self, requests, until=None):
            sent = {r.client: r.message.size for r in requests}
            for client, answer in super().exchange(requests, until):
                down, up = sizes.get(every, (0, 0))
                sizes[every] = down + sent[client], up + answer.size
                yield client, answer

    monkeypatch.setitem(ENGINES, "piggybacked", lambda plan, _=None: Weighing(plan))
    found = {}
    for every in (0, 1):
        found[every] = execute(small(engine="piggybacked", evaluate_every=every, cohort=0.5))
    for way, at in (("down", 0), ("up", 1)):
        total = {e: unmetered(r)[way] + r.summary["bytes"][way] for e, r in found.items()}
        assert total == {e: sizes[e][at] for e in found}
        assert found[0].summary["bytes"][way] == found[1].summary["bytes"][way]


def test_rounds_are_told_in_order_and_when_they_are_complete(tmp_path):
    told = []
    execute(
        small(engine="piggybacked", evaluate_every=2, rounds=5), tmp_path / "r", watch=told.append
    )
    assert [(e["round"], "received" in e) for e in told] == [
        (1, False), (2, True), (3, False), (4, True), (5, True),
    ]  # fmt: skip
    lines = RunDir(tmp_path / "r").read_events()
    assert [(e["round"], e.get("event"), "received" in e) for e in lines] == [
        (1, None, False),
        (2, None, False),
        (2, "scores", True),
        (3, None, False),
        (4, None, False),
        (4, "scores", True),
        (5, None, True),
    ]
    assert [bare(e) for e in rounds_of(lines)] == [bare(e) for e in told]


def test_scores_that_came_twice_count_once():
    lines = [
        {"round": 1, "lost": 0},
        {"round": 1, "event": "scores", "received": {"loss": 1.0}},
        {"round": 2, "lost": 1},
        {"round": 1, "event": "scores", "received": {"loss": 2.0}},
        {"round": 7, "event": "scores", "received": {"loss": 3.0}},
    ]
    wanted = [{"round": 1, "lost": 0, "received": {"loss": 2.0}}, {"round": 2, "lost": 1}]
    assert rounds_of(lines) == wanted
    assert "received" not in lines[0]


# --- what needs its scores now -------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"stop": Ending(target=0.999)},
        {"stop": Ending(patience=50)},
        {"adapt_every": 1, "adapt_epochs": 1},
        {"clock": {"name": "links"}},
        {"privacy": Privacy(secure=True, randomness="simulated")},
        {"privacy": Privacy(mechanism="local", noise=1.0, clip=1.0, randomness="simulated")},
    ],
    ids=["target", "patience", "adapted", "clock", "secure", "noise"],
)
def test_what_cannot_wait_is_scored_at_once(settings):
    made = small(rounds=2, **settings)
    plain, piggybacked = execute(made), execute(by("piggybacked", made))
    assert_same_run(plain, piggybacked)
    assert [e["exchanges"] for e in piggybacked.history] == [e["exchanges"] for e in plain.history]
    assert unmetered(piggybacked) == unmetered(plain)


def test_a_target_of_an_adapted_score_is_looked_for_at_once():
    made = experiment(ROWS["per-fedavg"](), PEOPLE, settings={"rounds": 2, "target": 0.99})
    plain, piggybacked = execute(made), execute(by("piggybacked", made))
    assert_same_run(plain, piggybacked)
    assert [e["exchanges"] for e in piggybacked.history] == [3, 3]


def test_a_round_that_turns_out_to_be_the_last_is_scored_at_once():
    budget = 3.5 * sum(execute(small(rounds=1)).history[0]["bytes"].values())
    made = small(rounds=5, stop=Ending(bytes=budget))
    plain, piggybacked = execute(made), execute(by("piggybacked", made))
    assert_same_run(plain, piggybacked)
    assert len(piggybacked.history) == 3
    assert [e["exchanges"] for e in piggybacked.history] == [1, 1, 2]
    assert "budget" in piggybacked.summary["stopped"]


# --- losses --------------------------------------------------------------------------------------


def faulty(monkeypatch, made, lost, lost_orders=(), repeated=(), engine=Piggybacking):
    monkeypatch.setitem(
        ENGINES,
        "faulty",
        lambda plan, _=None: Faulty(
            engine(plan),
            lose_reply=lambda c, o: (c, o) in lost,
            lose_order=lambda c, o: (c, o) in lost_orders,
            repeat=lambda c, o: (c, o) in repeated,
        ),
    )
    return execute(by("faulty", made))


@pytest.mark.parametrize("name", ["fedavg", "ditto"])
def test_with_a_lost_message_goes_the_score_in_it(name, monkeypatch):
    # The other run loses the same messages, and by hand the scores that would have been with them.
    made = small(name, wire=LOSSY)
    piggybacked = faulty(monkeypatch, made, [(1, "2.0")], [(2, "3.0")], [(3, "2.0"), (4, "4.0")])
    lost = [(1, "2.0"), (1, "1.1"), (2, "2.1")]
    plain = faulty(monkeypatch, made, lost, [(2, "3.0")], engine=Loop)
    assert_same_run(plain, piggybacked, "lost")
    assert (plain.summary["lost"], piggybacked.summary["lost"]) == (4, 2)
    assert [e["lost"] for e in piggybacked.history] == [0, 1, 1, 0]


def test_a_damaged_answer_is_a_lost_one(monkeypatch):
    made = small(cohort=0.5)
    second = execute(made).history[1]["cohort"]
    some = [second[0], next(c for c in range(6) if c not in second)]
    monkeypatch.setitem(
        ENGINES,
        "damaging",
        lambda plan, _=None: Faulty(
            Piggybacking(plan), damage=lambda c, o: c in some and o == "2.0"
        ),
    )
    piggybacked = execute(by("damaging", made))
    lost = [(second[0], "2.0"), *((c, "1.1") for c in some)]
    plain = faulty(monkeypatch, made, lost, engine=Loop)
    assert piggybacked.history[0]["received"] == alike(plain.history[0]["received"])
    for client in range(6):
        assert same(plain.weights(client), piggybacked.weights(client))
    assert [e["lost"] for e in piggybacked.history] == [0, 1, 0, 0]
    assert piggybacked.summary["lost"] == 2


def test_one_without_an_order_that_does_not_answer_is_nothing_to_the_round(monkeypatch):
    made = small(cohort=0.5, min_reports=1.0)
    second = execute(made).history[1]["cohort"]
    silent = [c for c in range(6) if c not in second]
    waited_for = []

    class Noting(Piggybacking):
        def exchange(self, requests, until=None):
            waited_for.append([r.client for r in requests if not r.spare])
            yield from super().exchange(requests, until)

    piggybacked = faulty(monkeypatch, made, [(c, "2.0") for c in silent], engine=Noting)
    plain = faulty(monkeypatch, made, [(c, "1.1") for c in silent], engine=Loop)
    assert_same_run(plain, piggybacked)
    assert waited_for[:4] == [e["cohort"] for e in piggybacked.history]
    assert piggybacked.history[0]["received"] != execute(made).history[0]["received"]
    assert piggybacked.history[1]["lost"] == 0
    assert piggybacked.summary["lost"] == 3


def test_scores_that_came_in_an_abandoned_round_count(monkeypatch):
    made = small("ditto", min_reports=4)
    piggybacked = faulty(monkeypatch, made, [(c, "2.0") for c in (0, 1, 2)])
    lost = [(c, o) for c in (0, 1, 2) for o in ("2.0", "1.1")]
    plain = faulty(monkeypatch, made, lost, engine=Loop)
    assert ["abandoned" in e for e in piggybacked.history] == [False, True, False, False]
    assert ["received" in e for e in piggybacked.history] == [True, False, True, True]
    assert_same_run(plain, piggybacked, "lost")


def test_a_round_of_which_nobody_tells_has_no_scores(monkeypatch, tmp_path):
    told = []
    lost = [(c, "2.0") for c in range(6)]
    monkeypatch.setitem(
        ENGINES, "faulty",
        lambda plan, _=None: Faulty(Piggybacking(plan), lose_reply=lambda c, o: (c, o) in lost),
    )  # fmt: skip
    result = execute(small(engine="faulty"), tmp_path / "r", watch=told.append)
    assert ["received" in e for e in result.history] == [False, False, True, True]
    assert [e["round"] for e in told] == [1, 2, 3, 4]
    assert '"round": 1, "event": "scores"' not in (tmp_path / "r/events.jsonl").read_text()


@pytest.mark.parametrize("call", [0, 11])
def test_a_score_that_fails_costs_no_reply_and_is_told(call, tmp_path):
    calls = []

    def touchy(out, y):
        calls.append(len(y))
        if len(calls) == call + 1:
            raise ValueError("no such luck")
        return 1.0

    made = replace(small(engine="piggybacked", cohort=0.5), metrics={"touchy": touchy})
    result = execute(made, tmp_path / "r")
    first, second, *_ = result.history
    (client,) = map(int, first["failed_scores"])
    assert (client in second["cohort"]) == (call == 0)  # those with an order come first
    assert "ValueError: no such luck" in first["failed_scores"][str(client)]
    assert first["received"]["touchy"] == 1.0
    assert [e["lost"] for e in result.history] == [0, 0, 0, 0]
    plain = execute(replace(small(cohort=0.5), metrics={"touchy": lambda out, y: 1.0}))
    assert plain.summary["received"] == result.summary["received"]
    lines = [json.loads(x) for x in (tmp_path / "r/events.jsonl").read_text().splitlines()]
    assert rounds_of(lines)[0]["failed_scores"] == first["failed_scores"]


def test_scores_that_find_no_exchange_have_one_for_themselves():
    inner = coterie.fedavg()

    def round(fed, state, info):
        return inner.round(fed, state, info) if info.number % 2 == 0 else state

    made = experiment(replace(inner, round=round), PEOPLE, settings={"rounds": 4})
    plain, piggybacked = execute(made), execute(by("piggybacked", made))
    assert_same_run(plain, piggybacked)
    assert [e["exchanges"] for e in plain.history] == [2, 1, 2, 1]
    assert [e["exchanges"] for e in piggybacked.history] == [1, 1, 1, 2]


# --- killed and resumed --------------------------------------------------------------------------


def dying(monkeypatch, at, after):
    """An engine whose server dies in this exchange, before or after the clients have worked."""

    class Dying(Piggybacking):
        count = 0

        def exchange(self, requests, until=None):
            Dying.count += 1
            if Dying.count != at:
                yield from super().exchange(requests, until)
                return
            if after:
                list(super().exchange(requests, until))
            raise Stop

    monkeypatch.setitem(ENGINES, "dying", lambda plan, _=None: Dying(plan))


def events(folder):
    return [bare(event) for event in RunDir(folder).read_events()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Runs that nobody killed, by how often they were saved: naming what to keep is bytes too."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENGINES, "piggybacked", lambda plan, _=None: Piggybacking(plan))
        for every in (1, 3):
            folder = tmp_path_factory.mktemp("whole") / "r"
            found[every] = execute(resumable("piggybacked", every), folder), folder
    return found


def resumable(engine, every=1):
    return small("ditto", 4, engine, wire=LOSSY, cohort=0.5, checkpoint_every=every)


@pytest.mark.parametrize(("after", "every"), [(False, 1), (True, 1), (True, 3)])
@pytest.mark.parametrize("at", [1, 2, 3, 5])
def test_killed_in_any_exchange_and_resumed(at, after, every, whole, tmp_path, monkeypatch):
    made = resumable("dying", every)
    dying(monkeypatch, at, after)
    with pytest.raises(Stop):
        execute(made, tmp_path / "r")
    found, once = [], Store.answered

    def answered(self, client, version, order):
        stored, reply = self._path(client, version).exists(), once(self, client, version, order)
        if stored:  # the order is one that was carried out before the kill
            found.append(reply)
        return reply

    monkeypatch.setattr(Store, "answered", answered)
    resumed = execute(by("piggybacked", made), tmp_path / "r", resume=True)
    # A resumed server asks the same, scores included, so nobody works twice.
    assert all(reply is not None for reply in found)
    assert len(found) >= 3 * (after and at < 5)
    assert_same_run(whole[every][0], resumed)
    assert unmetered(resumed) == unmetered(whole[every][0])
    assert events(tmp_path / "r") == events(whole[every][1])


@pytest.mark.parametrize("round", [1, 3])
def test_stopped_after_any_round_and_resumed(round, whole, tmp_path):
    made = resumable("piggybacked")
    with pytest.raises(Stop):
        execute(made, tmp_path / "r", watch=stop_after(round))
    told = []
    resumed = execute(made, tmp_path / "r", resume=True, watch=told.append)
    assert_same_run(whole[1][0], resumed)
    assert events(tmp_path / "r") == events(whole[1][1])
    # Round r is told of when r+1 is done and saved, and r+1 then by the resumed run, if it is not
    # the last, which was complete.
    assert [e["round"] for e in told] == {1: [2, 3, 4], 3: []}[round]


def killed_in_round_three(made, folder, monkeypatch):
    dying(monkeypatch, 3, True)
    with pytest.raises(Stop):
        execute(by("dying", made), folder)


@pytest.mark.parametrize("engine", ["loop", "piggybacked"])
def test_resumed_to_no_further_round_it_is_scored_by_itself(engine, tmp_path, monkeypatch):
    made = small("ditto")
    killed_in_round_three(made, tmp_path / "r", monkeypatch)
    asked = replace(made, settings=replace(made.settings, rounds=2))
    told, short = [], execute(asked, tmp_path / "short")
    for _ in range(2):  # a finished run, resumed, is the same
        result = execute(by(engine, asked), tmp_path / "r", resume=True, watch=told.append)
        assert_same_run(short, result)
    assert [e["round"] for e in told] == [2, 2]
    # With more rounds it goes on as if nothing had been.
    result = execute(by("piggybacked", made), tmp_path / "r", resume=True)
    assert_same_run(execute(made, tmp_path / "long"), result)


def test_resumed_with_a_target_it_looks_at_the_round_that_had_no_scores(tmp_path, monkeypatch):
    made = small(evaluate_every=2)
    killed_in_round_three(made, tmp_path / "r", monkeypatch)
    asked = replace(made, settings=replace(made.settings, stop=Ending(target=0.01)))
    result = execute(by("piggybacked", asked), tmp_path / "r", resume=True)
    assert len(result.history) == 2
    assert result.summary["stopped"] == "reached 0.01 on validation data"
    assert result.history[1]["received"] == alike(execute(made).history[1]["received"])


def test_without_its_events_a_run_goes_on_if_that_is_accepted(tmp_path, monkeypatch):
    made = small()
    killed_in_round_three(made, tmp_path / "r", monkeypatch)
    (tmp_path / "r/events.jsonl").unlink()
    with pytest.raises(LostHistory, match=r"events\.jsonl is missing"):
        execute(by("piggybacked", made), tmp_path / "r", resume=True)
    told, accepted = [], {"resume": True, "discard_damaged": True}
    result = execute(by("piggybacked", made), tmp_path / "r", watch=told.append, **accepted)
    assert [e["round"] for e in told] == [3, 4]
    assert same(result.weights(0), execute(made).weights(0))
