"""A malicious server that wants what one member of a secure sum knows, by messages to it.

Members are as ``coterie join --secure`` starts them; the server says what it likes.
"""

import inspect
from dataclasses import fields, replace

import pytest
import torch

pytest.importorskip("flwr", reason="a real federation needs the extra 'flower'")

from coterie.channel.privacy import client_sums as client_half
from coterie.channel.privacy.secagg.ring import from_ring
from coterie.channel.privacy.secure_sums import Secure
from coterie.channel.tasks import SCORE
from coterie.cli.federation import join
from coterie.client.client import Client, StagedState
from coterie.core.messages import Order, chosen
from coterie.deploy.join import Joining
from coterie.deploy.member import FederationMember
from coterie.errors import CoterieError
from coterie.seeds import seed_for
from faked_grid import population_of
from malicious import Server, refused, trained_in

VICTIM = 2
REVEAL = "final-layer"


@pytest.fixture(autouse=True)
def in_memory(monkeypatch):
    """No power is cut here, and the same data is made once."""
    monkeypatch.setattr("os.fsync", lambda _: None)
    monkeypatch.setattr("coterie.deploy.data.population_of", population_of)


def values(total):
    assert total is not None, "the sum was refused"
    return total.values.tolist()


# --- C1: orders outside of sums -------------------------------------------------------------------


@pytest.mark.parametrize("offers", [(), ("",), ("0",), ("", "0"), ("0", "1")])
def test_a_plain_order_to_train_gets_no_loss_and_trains_nothing(offers, tmp_path, monkeypatch):
    server = Server(tmp_path)
    trained = trained_in(monkeypatch)
    answer = server.ask(VICTIM, "train", dict.fromkeys(offers, server.start))
    assert refused(answer)
    assert not trained


def test_a_refusal_does_not_say_whether_the_training_would_have_diverged(tmp_path):
    server = Server(tmp_path)
    tame, wild = (
        server.ask(VICTIM, "train", {"0": server.model(value)}, name="same")
        for value in (None, 3e38)
    )
    assert refused(tame)
    assert tame == wild
    assert server.sum({"0": server.start}) is not None


# --- C2: a choice among offers --------------------------------------------------------------------


def test_a_sum_of_a_method_whose_clients_do_not_choose_offers_one_model(tmp_path):
    # One model is a rock that nobody's gradient moves, and the other fits the victim alone.
    server = Server(tmp_path)
    rock = server.model(head_bias=2.0**26)
    assert server.sum({"0": server.start, "rock": rock}) is None
    assert not server.gave_keys
    assert server.sum({"0": server.start}, round=1) is not None


# --- C3: random streams ---------------------------------------------------------------------------

STREAMS = {
    "batches": {"model": {"name": "mlp", "hidden": [8]}, "train": {"batch_size": 4}},
    "dropout": {
        "model": {"name": "mlp", "hidden": [8], "dropout": 0.5},
        "train": {"batch_size": 512},
    },
}


@pytest.mark.parametrize("settings", STREAMS.values(), ids=STREAMS)
def test_uploads_follow_from_the_secret_key_and_are_the_same_when_asked_again(settings, tmp_path):
    one, other = (Server(tmp_path / name, 3, **settings) for name in ("one", "other"))
    same_keys = Server(tmp_path / "same", 3, keys=one, **settings)
    sums = [values(server.sum({"0": server.start})) for server in (one, one, same_keys, other)]
    assert sums[0] == sums[1] == sums[2]
    assert sums[0] != sums[3]


@pytest.mark.parametrize("settings", STREAMS.values(), ids=STREAMS)
def test_what_the_server_knows_is_not_enough_to_work_out_an_upload(settings, tmp_path):
    server = Server(tmp_path, 3, **settings)
    total = server.sum({"0": server.start})
    assert total is not None
    guessed = sum(guess(server, client) for client in range(server.count))
    found = torch.from_numpy(from_ring(total.values[: len(guessed)], total.bits))
    close = server.count * 2.0**-total.bits  # each was rounded to the grid
    assert float((found - guessed).abs().max()) > close


def guess(server, client, round=0):
    """A client's upload from its data, the run's name, the seed, the round and its number."""
    site = server.fed.grid.members[client]._runtime
    data = site.plan.population.clients[client]
    salted = seed_for(server.seed, "salt", round, stream=server.run)
    context = replace(site.context, seed=salted)
    fitting = Client(client, data.train, data.val, StagedState({}), round, context)
    return fitting.fit(server.start).weights.vector.double()


# --- C4: terms that make one step count more than all others --------------------------------------


@pytest.mark.parametrize(
    ("key", "options"), [("momentum", {"momentum": 1e9}), ("dampening", {"dampening": -1e9})]
)
def test_terms_by_which_one_step_counts_a_million_times_another_are_refused(key, options, tmp_path):
    # A batch between the two largest clients: the largest alone makes a second step.
    server = Server(tmp_path)
    why = server.enrol("bb22", train={"lr": 1e-12, "options": options})
    assert set(why) == set(range(server.count))
    assert all(key in f"{text} {server.fed.heard}" for text in why.values())


def test_the_usual_options_of_an_optimiser_are_taken(tmp_path):
    server = Server(tmp_path)
    assert not server.enrol("bb22", train={"options": {"momentum": 0.9, "nesterov": True}})


# --- C5: what a run may reveal --------------------------------------------------------------------

WARM_UP = {"method": {"name": "fedclust", "clusters": 2, "warmup_steps": 1}}
REVEALING = {**WARM_UP, "privacy": {"reveal": REVEAL}}
TRIALS = {"method": {"name": "fedclust"}, "train": {"steps": 2}, "privacy": {"reveal": REVEAL}}


def test_a_run_that_reveals_takes_the_owners_own_word(tmp_path):
    server = Server(tmp_path)
    assert set(server.enrol("bb22", **REVEALING)) == set(range(server.count))
    for member in server.fed.grid.members.values():
        member.reveal = REVEAL  # as `coterie join --secure --reveal final-layer` has it
    assert not server.enrol("cc33", **REVEALING)


def test_the_owners_word_on_what_is_revealed_is_an_option_of_join():
    assert inspect.signature(FederationMember).parameters["reveal"].default == ""
    assert "reveal" in {field.name for field in fields(Joining)}
    assert "reveal" in inspect.signature(join).parameters


def test_who_has_revealed_something_enters_another_run_with_permission_only(tmp_path):
    server = Server(tmp_path, reveal=REVEAL)
    assert not server.enrol("bb22", **REVEALING)
    answer = server.ask(VICTIM, "warm-up", {"model": server.start})
    assert answer["arrays"]["final"].layout.layers == ("head",)
    assert list(server.enrol("cc33", **REVEALING)) == [VICTIM]
    server.permit()
    assert not server.enrol("dd44", **REVEALING)


def test_a_member_reveals_its_final_layer_once_in_a_run(tmp_path):
    # Of other models it would say more, in a later round as in this one.
    server = Server(tmp_path, reveal=REVEAL)
    assert not server.enrol("bb22", **REVEALING)
    first = server.ask(VICTIM, "warm-up", {"model": server.start}, name="first")
    again = server.ask(VICTIM, "warm-up", {"model": server.start}, name="first")
    for final in (answer["arrays"]["final"].vector for answer in (first, again)):
        assert torch.equal(final, first["arrays"]["final"].vector)
    for round in (0, 1):
        other = {"model": server.model(0.0)}
        assert refused(server.ask(VICTIM, "warm-up", other, round=round))


@pytest.mark.parametrize("by", ["model", "gradient", "labels", "data"])
def test_more_than_a_final_layer_is_not_revealed(by, tmp_path):
    # The task can do more than a method asks of it when sums are secure; the server says by what.
    server = Server(tmp_path, reveal=REVEAL, **TRIALS)
    told = {"by": by, "probe_steps": 1, "draw": 0, "round": 0, "vectors": 1}
    assert refused(server.ask(VICTIM, "halves", {"model": server.start}, config=told))
    told |= {"by": REVEAL}
    final = server.ask(VICTIM, "halves", {"model": server.start}, round=1, config=told)["arrays"]
    assert {array.layout.layers for array in final.values()} == {("head",)}


def test_a_final_layer_that_is_the_whole_model_is_not_revealed(tmp_path):
    server = Server(tmp_path, reveal=REVEAL, model={"name": "logistic"})
    server.enrol("bb22", **REVEALING)
    assert refused(server.ask(VICTIM, "warm-up", {"model": server.start}))


# --- C6: what is wrong with values ----------------------------------------------------------------

TOO_LARGE = 2.0**45  # of a bias of all outputs: no output changes, and no sum holds it


def wrong_shares(monkeypatch, wrong):
    """Let the server pass on wrong shares from now on."""
    honest = Secure._carry

    def carry(server, call, step, running, said):
        if step == "shares":
            said = {slot: {c: wrong(b) for c, b in m.items()} for slot, m in said.items()}
        return honest(server, call, step, running, said)

    monkeypatch.setattr(Secure, "_carry", carry)


def test_the_answer_is_the_same_whatever_is_wrong_with_shares_or_values(tmp_path, monkeypatch):
    found = {}
    for name, wrong, bias in (
        ("values", None, TOO_LARGE),
        ("garbage", lambda blob: b"garbage", 0.0),
        ("garbage and values", lambda blob: b"garbage", TOO_LARGE),
        ("a box", lambda blob: blob[:-1] + bytes([blob[-1] ^ 1]), 0.0),
        ("a box and values", lambda blob: blob[:-1] + bytes([blob[-1] ^ 1]), TOO_LARGE),
    ):
        server = Server(tmp_path / name, 3)
        with monkeypatch.context() as patched:
            if wrong is not None:
                wrong_shares(patched, wrong)
            assert server.sum({"0": server.model(head_bias=bias)}) is None
        found[name] = [body for client, body in server.answers if client == VICTIM][-1]
        assert refused(found[name])
    assert all(answer == found["values"] for answer in found.values()), found


def test_who_found_its_values_too_large_for_a_sum_is_in_no_other_of_the_round(tmp_path):
    # Else the server would look for the bound with other models, and learn the largest value.
    server = Server(tmp_path)
    assert server.sum({"0": server.model(head_bias=TOO_LARGE)}) is None
    assert any("secure" in body.get("arrays", {}) for _, body in server.answers)
    assert server.sum({"0": server.start}) is None
    assert server.sum({"0": server.start}, clients=(0, 1, VICTIM)) is None
    assert server.sum({"0": server.start}, round=1) is not None


def losing(monkeypatch, client, step):
    """Let the server say from now on that this client did not answer this step."""
    honest = Secure._carry

    def carry(server, call, at, running, said):
        answers = honest(server, call, at, running, said)
        return [a for a in answers if at != step or a.client != client]

    monkeypatch.setattr(Secure, "_carry", carry)


def test_who_has_signed_a_sum_signs_none_of_a_part_of_it(tmp_path, monkeypatch):
    # The sum of four, asked for again: one gave its values as before, and is said to be lost.
    server = Server(tmp_path)
    assert server.sum({"0": server.start}).clients == (0, 1, 2, 3)
    losing(monkeypatch, VICTIM, "shares")
    assert server.sum({"0": server.start}) is None
    assert server.sum({"0": server.start}, round=1).clients == (0, 1, 3)


# --- C7: which model fits better ------------------------------------------------------------------


def test_clients_that_are_placed_without_picking_do_not_pick(tmp_path):
    server = Server(tmp_path)
    assert refused(server.ask(VICTIM, "pick", {"a": server.start, "b": server.model(0.0)}))


def test_clients_pick_once_in_a_round(tmp_path):
    server = Server(tmp_path, method={"name": "ifca", "k": 2})
    offers = {"0": server.start, "1": server.model(0.0)}
    swapped = {"0": server.model(0.0), "1": server.start}
    first = server.ask(VICTIM, "pick", offers, round=1, name="first")
    assert set(first["metrics"]) == {"slot"}
    assert server.ask(VICTIM, "pick", offers, round=1, name="first") == first
    assert refused(server.ask(VICTIM, "pick", swapped, round=1, name="other"))
    assert refused(server.ask(VICTIM, "pick", swapped, round=1, name="first"))
    assert refused(server.ask(VICTIM, "pick", swapped, round=0, name="earlier"))
    assert server.ask(VICTIM, "pick", swapped, round=2, name="later")["metrics"]


# --- C8: the noise of a sum -----------------------------------------------------------------------

NOISE = {"clip": 1.0, "multiplier": 1.0, "bits": 0.0}
# Steps that leave a model full of ones as it is: the uploads are the same to the bit.
NOISY = {"privacy": {"noise": 1.0, "clip": 1.0, "delta": 1e-3}, "train": {"lr": 1e-12}}


@pytest.mark.parametrize(
    ("run", "clients"),
    [("aa11", (0, 1, 2, 4)), ("bb22", (0, 1, 2, 3))],
    ids=["members", "run"],
)
def test_a_sum_has_noise_of_its_own_in_each_run_and_with_each_set_of_members(
    run, clients, tmp_path, monkeypatch
):
    drawn, honest = [], client_half.noised

    def noised(flat, *given):
        assert not flat.any()
        drawn.append(given[-1](16))
        return honest(flat, *given)

    monkeypatch.setattr(client_half, "noised", noised)

    def noise_of_first(server, clients):
        drawn.clear()
        assert server.sum({"0": server.model(1.0)}, clients=clients, noise=NOISE) is not None
        return drawn[0]

    one = Server(tmp_path / "one", 5, **NOISY)
    other = Server(tmp_path / "other", 5, keys=one, run=run, **NOISY)
    first = noise_of_first(one, (0, 1, 2, 3))
    assert noise_of_first(one, (0, 1, 2, 3)) == first
    assert noise_of_first(other, clients) != first


# --- C9: state outside of sums --------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [{}, {"beside": {"attempt": "x"}}, {"beside": {"attempt": "x", "by_examples": False}}],
    ids=["plain", "no slot", "no slot, but how to count"],
)
def test_an_order_that_goes_into_no_sum_leaves_a_clients_state_alone(more, tmp_path, monkeypatch):
    # A control variate of 2^58 would drown all gradients of this client in rounding.
    server = Server(tmp_path, method={"name": "scaffold"}, train={"steps": 1})
    trained = trained_in(monkeypatch)
    zero = torch.zeros(server.start.layout.size)
    asked = {"0": server.start, "correction": zero + 2.0**58}
    assert refused(server.ask(VICTIM, "train", asked, **more))
    assert not trained
    assert not [*tmp_path.glob(f"site{VICTIM}/**/*.state")]
    assert server.sum({"0": server.start, "correction": zero}) is not None
    assert [*tmp_path.glob(f"site{VICTIM}/**/*.state")]


# --- M1, L1, L3 -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "offers", "config", "other"),
    [
        # The same losses once more, and others beside them.
        ("score-cuts", "01", {"cuts": "0 1", "on": "train"}, {"cuts": "1 0"}),
        ("train", "0", {"steps": 1}, {"steps": 2}),
    ],
)
def test_a_method_with_two_sums_a_round_gets_one_of_each_task(
    task, offers, config, other, tmp_path
):
    server = Server(tmp_path, reveal=REVEAL, **TRIALS)
    models = {name: server.model(head_bias=float(name)) for name in offers}
    first = server.sum(models, task, **config)
    assert values(server.sum(models, task, **config)) == values(first)
    assert server.sum(models, task, **{**config, **other}) is None


@pytest.mark.parametrize("sums", [0, 1])
def test_a_record_that_goes_away_under_a_member_stops_it_at_the_next_sum(sums, tmp_path):
    server = Server(tmp_path)
    for round in range(sums):
        assert server.sum({"0": server.start}, round=round) is not None
    for client in range(server.count):
        server.fed.who(client).record.path.unlink()
    assert server.sum({"0": server.start}, round=sums) is None
    assert not server.gave_keys


def test_a_sum_of_another_run_than_the_members_own_is_refused(tmp_path):
    server = Server(tmp_path)
    assert server.sum({"0": server.start}, run="bb22") is None
    assert not server.gave_keys
    assert server.sum({"0": server.start}) is not None


# --- what a fourth review found -------------------------------------------------------------------


def test_a_client_that_was_led_to_a_state_of_its_own_is_in_no_sum_of_scores(tmp_path):
    # Those who have kept no copy in this round would give zeros, and leave the victim's losses.
    server = Server(tmp_path, reveal=REVEAL, **TRIALS)
    offers = {"0": server.start}
    told = {"run": server._secure.run, "attempt": "a" * 32, "by_examples": False, "slot": 0}
    led = server.ask(VICTIM, "train", offers, config={"trial_steps": 1}, beside=told)
    assert "secure" in led["arrays"]  # keys, for a sum that never comes
    total = server.sum(offers, "score-cuts", cuts="0 own", on="train")
    assert total is None or VICTIM not in total.clients
    assert server.sum(offers, round=1, trial_steps=1) is not None
    assert server.sum(offers, "score-cuts", round=1, cuts="0", on="train") is not None


def test_methods_without_trials_score_no_cuts(tmp_path):
    server = Server(tmp_path)
    assert server.sum({"0": server.start}, "score-cuts", cuts="0", on="train") is None
    assert not server.gave_keys


def test_who_chooses_a_slot_is_told_none(tmp_path):
    # Else those who chose a rock and the one who chose a bait would be in one sum.
    server = Server(tmp_path, method={"name": "ifca", "k": 2})
    assert server.sum({"0": server.start, "1": server.model(0.0)}) is None
    assert not server.gave_keys


@pytest.mark.parametrize("names", [("0", "0.0"), ("0", "00"), ("0", "a"), ("1", "2")])
def test_two_offers_are_two_slots(names, tmp_path):
    server = Server(tmp_path, method={"name": "ifca", "k": 2})
    own = server._secure
    offers = dict(zip(names, (server.start, server.model(0.0)), strict=True))
    server.answers.clear()
    server.channel.begin(0, "s")
    orders = [Order(c, "train", offers, {}) for c in range(server.count)]
    with pytest.raises(CoterieError):
        own.sums(orders, chosen("slot"))
    assert not server.gave_keys


def test_a_score_is_of_one_model_and_trains_once_in_a_round(tmp_path, monkeypatch):
    server = Server(tmp_path)
    two = {"0": server.start, "1": server.model(0.0)}
    assert refused(server.ask(VICTIM, SCORE, two))
    assert server.ask(VICTIM, SCORE, {"0": server.start})["metrics"]
    adapted = {"config": {"adapt_epochs": 1}}
    assert server.ask(VICTIM, SCORE, {"0": server.start}, **adapted)["metrics"]
    trained = trained_in(monkeypatch)
    assert refused(server.ask(VICTIM, SCORE, {"0": server.model(0.0)}, **adapted))
    assert not trained
    ridden = {"arrays": {"0": server.start}, "config": {"adapt_epochs": 1}, "round": 0}
    server.ask(VICTIM, "train", {"0": server.start}, score=ridden)
    assert not trained


def test_who_has_been_scored_enters_another_run_with_permission_only(tmp_path):
    server = Server(tmp_path)
    assert server.ask(VICTIM, SCORE, {"0": server.start})["metrics"]
    assert list(server.enrol("bb22")) == [VICTIM]


@pytest.mark.parametrize("name", ["weight_decay", "lr"])
def test_what_has_a_bound_of_its_own_is_no_option(name, tmp_path):
    server = Server(tmp_path)
    assert len(server.enrol("bb22", train={"lr": 1e4, "options": {name: 1.0}})) == server.count


def test_a_metric_that_one_client_reports_is_in_no_sum(tmp_path, monkeypatch):
    server = Server(tmp_path)
    honest = Secure._metrics
    monkeypatch.setattr(
        Secure, "_metrics", lambda own, *given: (*honest(own, *given), "of one alone")
    )
    assert server.sum({"0": server.start}) is None


def test_why_a_client_is_in_no_sum_stays_with_it(tmp_path):
    found = []
    for place, value in (("diverges", 3e38), ("stays", 1e-30)):
        server = Server(tmp_path / place, train={"lr": 1e-30 if place == "stays" else 0.1})
        assert server.sum({"0": server.model(value)}) is None
        found.append([b["text"] for c, b in server.answers if c == VICTIM and "text" in b])
    assert found[0] == found[1] != []
