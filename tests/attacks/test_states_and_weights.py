"""A malicious server that tells members of one sum apart: by weights, by states, by other terms.

Members are as ``coterie join --secure`` starts them; the server says what it likes.
"""

import contextlib
import json
from dataclasses import replace

import pytest
import torch

import coterie

pytest.importorskip("flwr", reason="a real federation needs the extra 'flower'")

from coterie.channel.privacy import secure_sums as secure
from coterie.channel.privacy.client import ClientPrivacy, ClientTerms
from coterie.channel.privacy.record import Part
from coterie.channel.privacy.secagg import Rejected
from coterie.channel.privacy.settings import Privacy
from coterie.channel.tasks import SCORE
from coterie.core.messages import Order, Upload, chosen
from coterie.deploy import member as module
from coterie.errors import ConfigError, CoterieError
from faked_grid import population_of
from malicious import Server, in_a_run, refused, trained_in

VICTIM = 2
REVEAL = "final-layer"
FEDCLUST = {
    "method": {"name": "fedclust"},
    "privacy": {"reveal": REVEAL},
    "train": {"steps": 2},
}


@pytest.fixture(autouse=True)
def in_memory(monkeypatch):
    """No power is cut here, and the same data is made once."""
    monkeypatch.setattr("os.fsync", lambda _: None)
    monkeypatch.setattr("coterie.deploy.data.population_of", population_of)


# --- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("most", "own"), [(2**28, 2**28 + 1), (2**16, 2**16 + 1), (8, 7)])
def test_weights_by_which_a_sum_can_be_divided_are_refused(most, own, tmp_path, monkeypatch):
    # Uploads are whole numbers of steps: divided by the others' weight, the victim's is the rest.
    server = Server(tmp_path)
    weights = {c: own if c == VICTIM else most for c in range(server.count)}
    monkeypatch.setattr(secure._Call, "weights", lambda call, slot: dict(weights))
    assert server.sum({"0": server.start}) is None
    assert not server.gave_keys


def chooses(server, offers):
    """Whether the members choose among these models for a sum."""
    server.channel.begin(0, "s")
    server.answers.clear()
    orders = [Order(c, "train", offers, {}) for c in range(server.count)]
    with contextlib.suppress(CoterieError):
        server._secure.sums(orders, chosen("slot"))
    return server.gave_keys


# --- states ---------------------------------------------------------------------------------------


def version(server, client, name):
    """Let the server expect this version of a client's state in its next order."""
    server.channel.state.versions[client] = name


def test_a_second_sum_of_a_round_goes_on_from_the_state_after_the_first(tmp_path):
    # Sent back to the state before, the others have kept no model, and give zeros.
    server = Server(tmp_path, reveal=REVEAL, **FEDCLUST)
    offers = {"0": server.start}
    assert server.sum(offers, trial_steps=1) is not None
    for client in set(range(server.count)) - {VICTIM}:
        version(server, client, "")
    assert server.sum(offers, "score-cuts", cuts="0 own", on="train") is None


def test_no_other_order_takes_the_place_of_a_state(tmp_path):
    server = Server(tmp_path, reveal=REVEAL, **FEDCLUST)
    offers = {"0": server.start}
    assert server.sum(offers, trial_steps=1) is not None
    for client in set(range(server.count)) - {VICTIM}:
        name, told = server.channel.state.versions[client], {"keep": True, "round": 0, "draw": 0}
        assert refused(server.ask(client, "steps", {"model": server.start}, name=name, config=told))
    assert server.sum(offers, "score-cuts", cuts="0 own", on="train") is not None


def test_nor_does_one_whose_name_only_looks_another(tmp_path):
    # On disk "s1-0" was the file of "s1.0"; where letters' cases are one, so is "S1.0".
    server = Server(tmp_path, reveal=REVEAL, **FEDCLUST)
    assert server.sum({"0": server.start}, trial_steps=1) is not None
    told = {"keep": True, "round": 0, "draw": 0}
    for name in ("s1-0", "S1.0", "s1.0 ", "ſ1.0"):
        more = {"name": name, "config": told, "keep": ["s1.0"]}
        assert refused(server.ask(VICTIM, "steps", {"model": server.start}, **more))


def renamed(server, field, value):
    """Let the server say this to all but the victim, in its orders for a sum from now on."""

    def order(client, message):
        header = json.loads(message.header)
        if client != VICTIM and field in header["body"] and "slot" in header["body"]["beside"]:
            header["body"][field] = value
            message = replace(message, header=json.dumps(header).encode())
        return Server.order(server, client, message)

    server.order = order


def test_no_state_is_called_as_the_one_that_everybody_begins_with(tmp_path):
    # The others' models would be in no version, and they would give zeros.
    server = Server(tmp_path, reveal=REVEAL, **FEDCLUST)
    renamed(server, "order", "")
    assert server.sum({"0": server.start}, trial_steps=1) is None
    assert [c for c, body in server.answers if body.get("arrays")] == [VICTIM]


@pytest.mark.parametrize("nothing", [0, 0.0])
def test_a_version_that_is_no_name_is_not_the_first_state(nothing, tmp_path):
    # The member would remember a version called "0", and go on from no state at all.
    server = Server(tmp_path, reveal=REVEAL, **FEDCLUST)
    renamed(server, "order", str(nothing))
    assert server.sum({"0": server.start}, trial_steps=1) is not None
    renamed(server, "expects", nothing)
    assert server.sum({"0": server.start}, "score-cuts", cuts="0 own", on="train") is None


def test_an_order_is_not_carried_out_again_from_another_state(tmp_path):
    # The difference of both sums would be what the victim's state makes of its upload.
    told = {**FEDCLUST, "method": {"name": "fedclust+moon"}}
    server = Server(tmp_path, reveal=REVEAL, **told)
    assert server.sum({"0": server.start}) is not None
    after = dict(server.channel.state.versions)
    for client in range(server.count):
        version(server, client, after[client] if client == VICTIM else "")
    assert server.sum({"0": server.start}) is None


def test_a_choice_is_not_made_again_from_another_state(tmp_path):
    server = Server(tmp_path, method={"name": "ifca+fedper", "ifca.k": 2})
    shared = [name for name in server.start.layout.names if not name.startswith("head")]
    half = replace(server.start, vector=server.start.vector / 2)
    offers = {"0": server.start.only(shared), "1": half.only(shared)}
    assert chooses(server, offers)
    (kept,) = {path.stem for path in tmp_path.glob(f"site{VICTIM}/**/*.state")}
    told = {"name": "a", "expects": kept.replace("-", ".")}
    assert server.ask(VICTIM, "pick", offers, round=1, **told)["metrics"]
    assert refused(server.ask(VICTIM, "pick", offers, round=1, name="b"))


def test_what_a_client_was_asked_alone_prepares_no_sum(tmp_path):
    # The server planted a model of its own at each client, and the order of the sum names none.
    server = Server(tmp_path, reveal=REVEAL, **FEDCLUST)
    for client in range(server.count):
        model = server.model() if client == VICTIM else server.model(head_bias=2.0**26)
        answer = server.ask(
            client,
            "steps",
            {"model": model},
            name="planted",
            config={"keep": True, "round": 0, "draw": 0},
        )
        assert answer["metrics"]
        version(server, client, "planted")
    told = {"by": "model", "probe_steps": 1, "draw": 0, "round": 0}
    assert server.sum({}, "halves", settings=told) is None
    assert not server.gave_keys


# --- terms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["like", "least", "start", "config"])
def test_the_terms_of_a_run_stay_what_they_were(key, tmp_path):
    # With classes in another order, one order makes another upload of the same data.
    server = Server(tmp_path)
    terms = {k: dict(v) if isinstance(v, dict) else v for k, v in server.terms.items()}
    if key == "like":
        terms["like"]["classes"] = terms["like"]["classes"][::-1]
    elif key == "least":
        terms["least"] += 1
    elif key == "start":
        terms["start"] = "0" * 64
    else:
        terms["config"]["train"] = {**terms["config"]["train"], "lr": 0.5}
    server.terms = terms
    assert set(server.enrol(server.run)) == set(range(server.count))


def test_the_terms_of_a_run_go_with_the_key_and_not_with_the_folder(tmp_path):
    server = Server(tmp_path)
    for member in server.fed.grid.members.values():
        member.folder = tmp_path / f"elsewhere{member.who.id}"
        member._site = None
    server.terms = {**server.terms, "least": server.terms["least"] + 1}
    assert set(server.enrol(server.run)) == set(range(server.count))


# --- one upload, two sums -------------------------------------------------------------------------


def one_makes_more_steps(server):
    """The batch size with which one client makes two steps, and all others one."""
    sizes = [len(m._runtime.plan.population.clients[c].train) for c, m in members(server)]
    return sorted(sizes)[-2]


def members(server):
    return server.fed.grid.members.items()


@pytest.mark.parametrize("method", ["scaffold", "fedclust", "fedclust+ditto", "group-evidence"])
@pytest.mark.parametrize("weights", ["samples", "equal"])
def test_an_upload_goes_into_two_sums_only_where_all_make_as_many_steps(method, weights, tmp_path):
    # SCAFFOLD: the sum of changes, and that of changes by steps. A trial: of models, and of copies
    # that are the models of all who made enough steps. In both cases one client is what remains.
    server = Server(tmp_path, reveal=REVEAL)
    told = {"method": {"name": method}, "privacy": {"weights": weights}}
    told["privacy"]["reveal"] = "" if method == "scaffold" else REVEAL
    train = {"batch_size": one_makes_more_steps(server)}
    refusals = server.enrol("bb22", train=train, **told)
    assert len(refusals) == server.count
    assert all("Set train.steps" in why for why in refusals.values())
    assert not server.enrol("cc33", train={**train, "steps": 2}, **told)


@pytest.mark.parametrize("method", ["scaffold", "fedclust"])
def test_simulations_do_not_show_it_either(method):
    data = [(torch.randn(20, 3), torch.arange(20) % 2) for _ in range(3)]
    privacy = {"secure": True, "reveal": "" if method == "scaffold" else REVEAL}
    with pytest.raises(ConfigError, match=r"Set train\.steps"):
        coterie.simulate(data, "mlp", method, privacy=privacy)


# --- one answer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [2, 1.0, True, "1"])
def test_how_a_score_is_trained_for_makes_no_second_one_of_a_round(other, tmp_path, monkeypatch):
    server = Server(tmp_path)
    first = {"config": {"adapt_epochs": 1}}
    assert server.ask(VICTIM, SCORE, {"0": server.start}, **first)["metrics"]
    trained = trained_in(monkeypatch)
    second = {"config": {"adapt_epochs": other}}
    assert refused(server.ask(VICTIM, SCORE, {"0": server.model(0.0)}, **second))
    assert not trained
    assert server.ask(VICTIM, SCORE, {"0": server.start}, **first)["metrics"]


def test_a_choice_is_among_as_many_models_as_the_method_has(tmp_path):
    server = Server(tmp_path, method={"name": "ifca", "k": 2})
    three = {str(n): server.model(float(n)) for n in range(3)}
    assert refused(server.ask(VICTIM, "pick", three))
    assert refused(server.ask(VICTIM, SCORE, three))
    assert not chooses(server, three)


def test_clients_that_do_not_choose_do_not_choose_for_a_sum(tmp_path):
    # How many of them a model fits better, of whom the server knows all but one.
    server = Server(tmp_path)
    assert server.sum({"0": server.start, "1": server.model(0.0)}, "pick") is None
    assert not server.gave_keys


# --- sums in which nothing is hidden --------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "fednova", "scaffold", "feddyn", "adaptive-tau"])
def test_who_did_not_move_is_in_no_sum(method, tmp_path):
    told = {"method": {"name": method}, "train": {"lr": 1e-30, "steps": 2}}
    if method == "adaptive-tau":
        told["stop"] = {"bytes": 10**9}
    server = Server(tmp_path, **told)
    arrays = {"0": server.start}
    if method == "scaffold":
        arrays["correction"] = torch.zeros(server.start.layout.trainable)
    assert server.sum(arrays) is None
    assert not server.gave_keys


def test_a_metric_that_is_no_number_is_in_no_sum(tmp_path, monkeypatch):
    # Else one client's own would be all there is in the sum of a metric.
    from coterie.client import client as trains

    honest = trains.fit

    def fit(*given):
        return replace(honest(*given), loss=float("nan"))

    server = Server(tmp_path)
    monkeypatch.setattr(trains, "fit", fit)
    assert server.sum({"0": server.start}) is None


# --- what is refused before anything is done ------------------------------------------------------


def alone(folder, privacy, shows):
    """A client of a method that declares what single clients may answer."""
    return ClientPrivacy(
        ClientTerms(
            privacy, 0, folder, None, None, replace(coterie.fedavg(), name="mine", shows=shows)
        )
    )


def test_a_task_that_is_not_declared_is_refused_before_it_is_begun(tmp_path):
    """Else whether it fails would tell something, as often as it is asked."""
    sealing = alone(tmp_path, Privacy(secure=True), {"size": ()})
    sealing.begin(0, {"task": "size"})
    sealing.begin(0, {"task": "train", "beside": {"slot": 0}})
    with pytest.raises(ConfigError, match="asks each client by itself"):
        sealing.begin(0, {"task": "train"})
    alone(tmp_path, Privacy(), {}).begin(0, {"task": "train"})


def test_a_number_that_is_not_declared_is_not_shown_whatever_the_task_makes(tmp_path):
    sealing = alone(tmp_path, Privacy(secure=True), {"size": ("n",)})
    sealing.may_show(0, Upload(metrics={"n": 1.0}), "size", "an order")
    for task, metrics in (("size", {"n": 1.0, "loss": 0.5}), ("other", {"n": 1.0})):
        with pytest.raises(ConfigError, match="which it does not declare as shown"):
            sealing.may_show(0, Upload(metrics=metrics), task, "an order")


def test_what_is_revealed_is_revealed_once_in_a_run(tmp_path):
    record = in_a_run(tmp_path)
    record.reveal("one order")
    record.reveal("one order")
    with pytest.raises(Rejected, match="once in a run"):
        record.reveal("another")
    record.permit()
    record.enter("second")
    record.reveal("another")


def test_a_sum_is_signed_by_who_gave_to_that_very_one(tmp_path):
    """Else the server would have two sums of nested sets signed by the same clients."""
    record = in_a_run(tmp_path)
    part = Part(0, "a", "0", (1, False), dict.fromkeys(range(5), 1), "first")
    record.give(part, 1)
    record.give(replace(part, counts=dict.fromkeys(range(4), 1), attempt="second"), 1)
    for round, attempt in ((0, "first"), (0, ""), (1, "second")):
        with pytest.raises(Rejected, match="gave nothing to this sum"):
            record.sign(round, range(4), attempt)
    record.sign(0, range(4), "second")


def test_a_record_that_is_gone_is_not_begun_anew_by_a_score(tmp_path):
    """Else the next `coterie join` would find one, and miss nothing."""
    server = Server(tmp_path)
    record = server.fed.who(VICTIM).record
    record.path.unlink()
    assert refused(server.ask(VICTIM, SCORE, {"0": server.start}))
    with pytest.raises(Rejected, match="no longer has its record"):
        record.reveal("one order")
    assert not record.path.exists()


@pytest.mark.parametrize(
    ("lr", "decay", "taken"), [(0.1, 10.0, True), (0.1, 11.0, False), (1e-9, 2e9, False)]
)
def test_weights_that_grow_with_every_step_are_refused(lr, decay, taken, tmp_path):
    server = Server(tmp_path)
    refusals = server.enrol("bb22", train={"lr": lr, "weight_decay": decay})
    assert len(refusals) == (0 if taken else server.count)


def test_a_learning_rate_that_grows_with_the_rounds_is_refused(tmp_path):
    # 1e-8 x 1e8 is no more than 1, and a round later a million: whoever made two steps is the sum.
    server = Server(tmp_path)
    growing = {"lr": 1e-8, "weight_decay": 1e8, "lr_decay": 1e6}
    refusals = server.enrol("bb22", train=growing)
    assert len(refusals) == server.count
    assert all("train.lr_decay" in why for why in refusals.values())
    assert not server.enrol("cc33", train={**growing, "lr_decay": 0.99})


@pytest.mark.parametrize("optimizer", ["Adam", "RMSprop", "Adagrad"])
def test_steps_of_one_length_count_by_no_samples(optimizer, tmp_path):
    # Each number of an upload is one of two then, and the server knows who counts how much: a sum
    # says who has sent which.
    train = {"optimizer": optimizer, "steps": 1}
    server = Server(tmp_path)
    refusals = server.enrol("bb22", train=train)
    assert len(refusals) == server.count
    assert all("privacy.weights = equal" in why for why in refusals.values())
    assert not server.enrol("cc33", train=train, privacy={"weights": "equal"})
    data = [(torch.randn(20, 3), torch.arange(20) % 2) for _ in range(3)]
    with pytest.raises(ConfigError, match="steps of nearly the same length"):  # a simulation's, too
        coterie.simulate(data, "logistic", optimizer=optimizer, privacy={"secure": True})


@pytest.mark.parametrize(("more", "taken"), [(0, True), (1, False)])
def test_terms_for_more_clients_than_a_member_has_keys_of_are_refused(more, taken, tmp_path):
    server = Server(tmp_path)
    server.terms = {**server.terms, "clients": server.count + more}
    refusals = server.enrol("bb22")
    assert len(refusals) == (0 if taken else server.count)
    assert all("this client knows" in why for why in refusals.values())


# --- what a message can do to a client ------------------------------------------------------------


@pytest.mark.timeout(60)
def test_a_number_of_steps_below_zero_does_not_go_on_for_ever(tmp_path):
    server = Server(tmp_path)
    assert server.sum({"0": server.start}, steps=-1) is None


@pytest.mark.timeout(60)
def test_a_hundred_thousand_cuts_are_not_scored(tmp_path):
    server = Server(tmp_path, reveal=REVEAL, **FEDCLUST)
    many = " ".join(["0"] * 3_000)
    assert server.sum({"0": server.start}, "score-cuts", cuts=many, on="train") is None


def test_what_a_client_holds_for_later_has_a_bound(tmp_path, monkeypatch):
    """Arrays of one stage are kept, so that they need not be sent again."""
    monkeypatch.setattr(module, "HELD_MOST", 20_000)
    server = Server(tmp_path)
    member = server.fed.grid.members[VICTIM]
    for value in range(30):
        server.ask(VICTIM, SCORE, {"0": server.model(float(value))})
        assert sum(map(len, member._held.values())) <= 20_000 + 4 * server.start.layout.size
    assert server.sum({"0": server.start}) is not None
