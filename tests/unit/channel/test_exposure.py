"""The exposure ledger: made-up sequences, counted by hand."""

import json
import sys

import pytest

from coterie.channel import exposure
from coterie.channel.exposure import (
    AVERAGED,
    CENTRAL_NOISE,
    CONSENT,
    LOCAL_NOISE,
    OF_ONE,
    OF_ONE_ALONE,
    PLAIN,
    SECURE,
    SECURE_NOISED,
    Exposure,
    Near,
    sees,
    sentences,
    server_sees,
)
from coterie.core.tree import pack, unpack
from coterie.core.weights import Layout
from coterie.errors import CoterieError

LAYERS = ("a", "b", "c")
MODEL = {"model": LAYERS}


def add(ledger, round, *groups, task="train", arrays=MODEL, protection=SECURE):
    for slot, clients in enumerate(groups):
        ledger.sum(round, task, slot, clients, arrays, protection)


def sums(*rounds, least=3, **more):
    """A ledger of sums: for each round the clients of its groups."""
    ledger = Exposure(LAYERS, 9, least)
    for number, groups in enumerate(rounds, 1):
        add(ledger, number, *groups, **more)
    return ledger


def pairs(ledger, least=3):
    return [(n.rounds, n.slots, n.clients) for n in ledger.near(least)]


def kept(ledger):
    """The same ledger after a checkpoint, by way of its file's text."""
    packed = pack(ledger.to_tree(), Layout(()), tensors := [])
    assert not tensors
    return Exposure.from_tree(unpack(json.loads(json.dumps(packed)), [], Layout(())))


# --- single vectors -----------------------------------------------------------------------------


def mixed():
    """Client 0 in rounds 0, 1, 3; client 2 in round 1 only, with an array of no layers."""
    ledger = Exposure(LAYERS, 4)
    ledger.single(0, 0, {"head": ["c"]}, PLAIN)
    ledger.single(0, 1, MODEL, AVERAGED)
    ledger.single(2, 1, {**MODEL, "bases": ()}, AVERAGED)
    ledger.single(0, 3, {"model": ["a", "b"]}, AVERAGED)
    return ledger


def test_rows_by_client_array_and_protection():
    names = ("client", "array", "protection", "layers", "layer_rounds", "rounds", "first", "last")
    assert [tuple(row[n] for n in names) for row in mixed().rows()] == [
        (0, "head", PLAIN, "c", "1", 1, 0, 0),
        (0, "model", AVERAGED, "a b c", "2 2 1", 2, 1, 3),
        (2, "bases", AVERAGED, "", "", 1, 1, 1),
        (2, "model", AVERAGED, "a b c", "1 1 1", 1, 1, 1),
    ]
    assert all(tuple(row) == names for row in mixed().rows())


def test_twice_in_a_round_is_one_round_with_all_layers_of_both():
    ledger = Exposure()
    for layers in (["a"], ["b"], ["a"]):
        ledger.single(5, 1, {"model": layers}, PLAIN)
    ledger.single(5, 2, {"model": ["b"]}, PLAIN)
    (row,) = ledger.rows()
    assert (row["rounds"], row["layers"], row["layer_rounds"]) == (2, "a b", "1 2")
    assert ledger.summary()["single"][PLAIN]["rounds"] == 2


def test_protections_are_counted_apart():
    ledger = Exposure()
    for protection in OF_ONE:
        ledger.single(1, 1, MODEL, protection)
    assert sorted(row["protection"] for row in ledger.rows()) == sorted(OF_ONE)
    assert list(ledger.summary()["single"]) == list(OF_ONE)


def test_summary_of_single_vectors():
    assert mixed().summary() == {
        "clients": 4,
        "layers": ["a", "b", "c"],
        "single": {
            PLAIN: {
                "clients": 1,
                "rounds": 1,
                "first": 0,
                "last": 0,
                "arrays": {
                    "head": {"layers": ["c"], "clients": 1, "rounds": 1, "first": 0, "last": 0}
                },
            },
            AVERAGED: {
                "clients": 2,
                "rounds": 2,
                "first": 1,
                "last": 3,
                "arrays": {
                    "model": {
                        "layers": ["a", "b", "c"],
                        "clients": 2,
                        "rounds": 2,
                        "first": 1,
                        "last": 3,
                    },
                    "bases": {"layers": [], "clients": 1, "rounds": 1, "first": 1, "last": 1},
                },
            },
        },
        "sums": {},
        "near": {"least": 3, "count": 0, "by_difference": {}, "examples": []},
        "revealed": [],
        "abandoned": 0,
        "secure": False,
    }


def test_layers_are_told_in_the_models_order():
    ledger = Exposure(LAYERS)
    for round, layer in enumerate(("c", "z", "a")):
        ledger.single(0, round, {"model": [layer]}, PLAIN)
    assert ledger.summary()["single"][PLAIN]["arrays"]["model"]["layers"] == ["a", "c", "z"]


def test_numbers_alone_are_no_vectors():
    ledger = Exposure()
    ledger.single(0, 1, {}, PLAIN)
    ledger.sum(1, "train", 0, [0, 1], {}, SECURE)
    ledger.sum(1, "train", 0, [], MODEL, SECURE)
    assert ledger.rows() == []
    assert ledger.sentences() == ["Nothing left the clients."]


def test_unknown_protections_are_refused():
    with pytest.raises(CoterieError, match="did you mean 'local noise'"):
        Exposure().single(0, 1, MODEL, "local nois")
    with pytest.raises(CoterieError, match="protection of a sum 'revealed by consent'"):
        Exposure().sum(1, "train", 0, [0, 1], MODEL, CONSENT)


# --- sums ---------------------------------------------------------------------------------------


def test_sums_are_counted_with_their_sizes():
    ledger = sums([[1, 2, 3], [4, 5]], [[1, 2, 3, 4, 5, 6]])
    add(ledger, 2, [7, 8, 9], protection=SECURE_NOISED)
    assert ledger.summary()["sums"] == {
        SECURE: {"rounds": 2, "first": 1, "last": 2, "count": 3, "smallest": 2, "largest": 6},
        SECURE_NOISED: {
            "rounds": 1,
            "first": 2,
            "last": 2,
            "count": 1,
            "smallest": 3,
            "largest": 3,
        },
    }
    assert ledger.rows() == []


@pytest.mark.parametrize(
    ("protection", "bare"), [(SECURE, PLAIN), (PLAIN, PLAIN), (SECURE_NOISED, LOCAL_NOISE)]
)
def test_a_sum_of_one_client_is_its_vector(protection, bare):
    ledger = Exposure(LAYERS, 9)
    ledger.sum(4, "train", 0, [7], {"model": iter(LAYERS)}, protection)
    (row,) = ledger.rows()
    assert (row["client"], row["protection"], row["layers"], row["first"]) == (7, bare, "a b c", 4)
    assert ledger.summary()["sums"] == {}
    ledger.sum(5, "train", 0, [7, 8], MODEL, protection)  # less client 7's, it is client 8's
    assert pairs(ledger) == [((4, 5), (0, 0), (8,))]


# --- sums that can be subtracted from one another -----------------------------------------------


def test_a_dropped_client_is_left_by_the_difference():
    ledger = sums([[1, 2, 3, 4]], [[1, 2, 4]])
    assert ledger.near(2) == [Near("train", (1, 2), (0, 0), (3,))]


def test_a_client_that_moves_is_left_by_two_differences():
    ledger = sums([[1, 2, 3], [4, 5, 6]], [[1, 2], [3, 4, 5, 6]])
    assert pairs(ledger) == [((1, 2), (0, 0), (3,)), ((1, 2), (1, 1), (3,))]


def test_one_for_another_differ_by_two():
    ledger = sums([[1, 2, 3]], [[1, 2, 4]])
    assert pairs(ledger, 3) == [((1, 2), (0, 0), (3, 4))]
    assert pairs(ledger, 2) == []
    assert sums([[1, 2, 3]], [[1, 2, 4]], least=2).summary()["near"]["count"] == 0


def test_neither_the_same_clients_nor_others_altogether_are_near():
    assert pairs(sums([[1, 2, 3]], [[3, 2, 1]])) == []
    assert pairs(sums([[1, 2]], [[3, 4]], least=9), 9) == []
    assert pairs(sums([[1], [2]], least=9), 9) == []
    assert pairs(sums([[1, 2, 3], [1, 2, 3]])) == []  # two slots of one round
    twice = sums([[1, 2, 3, 4]], [[1, 2, 3], [1, 2, 3]])  # the second shows nothing more
    assert pairs(twice) == [((1, 2), (0, 0), (4,))]


def test_groups_that_change_their_names_are_found():
    assert pairs(sums([[1, 2, 3], [4, 5, 6]], [[4, 5], [1, 2, 3]])) == [((1, 2), (1, 0), (6,))]


def test_overlapping_sums_of_one_round_are_compared():
    assert pairs(sums([[1, 2, 3], [1, 2]])) == [((1, 1), (0, 1), (3,))]


def test_only_the_last_round_before_is_compared():
    everybody, fewer, half = [[1, 2, 3, 4]], [[1, 2, 3]], [[1, 2]]
    assert pairs(sums(everybody, half, fewer, least=2), 2) == [((2, 3), (0, 0), (3,))]
    ledger = sums(everybody, [], [], fewer)  # others had their turn
    assert pairs(ledger) == [((1, 4), (0, 0), (4,))]


def test_other_tasks_and_other_arrays_are_other_sums():
    ledger = sums([[1, 2, 3]])
    add(ledger, 2, [1, 2], task="probe")
    add(ledger, 3, [1, 2], arrays={"control": LAYERS})
    assert pairs(ledger) == []


def test_each_layer_is_compared_with_its_own_last_round():
    ledger = sums([[1, 2, 3]])
    add(ledger, 2, [1, 2, 3, 4], arrays={"model": ["a"]})  # 1 less of round 1, in layer a
    add(ledger, 3, [1, 2], arrays={"model": ["b"]})  # 1 less of round 1, in layer b
    assert pairs(ledger, 2) == [((1, 2), (0, 0), (4,)), ((1, 3), (0, 0), (3,))]
    add(ledger, 4, [1, 2, 3], arrays={"model": ["a"]})  # its last round is 2, no longer 1
    assert pairs(ledger, 2)[2:] == [((2, 4), (0, 0), (4,))]
    add(ledger, 5, [1, 2, 3], arrays={"model": ["a", "b"]})  # layer b was last in round 3
    assert pairs(ledger, 2)[3:] == [((3, 5), (0, 0), (3,))]


def test_two_sets_of_layers_in_one_round_are_both_looked_at():
    ledger = sums([[1, 2]])
    add(ledger, 1, [1, 2, 9], arrays={"model": ["a"]})
    add(ledger, 2, [1, 2], arrays={"model": ["a"]})
    assert pairs(ledger) == [((1, 1), (0, 0), (9,)), ((1, 2), (0, 0), (9,))]


def test_a_plain_tensor_has_no_layers_and_is_compared():
    ledger = sums([[1, 2, 3]], [[1, 2]], arrays={"count": ()})
    assert pairs(ledger) == [((1, 2), (0, 0), (3,))]


def test_nobody_asks_for_more_than_was_noted():
    with pytest.raises(CoterieError, match="fewer than 3"):
        sums([[1, 2]]).near(4)


def test_the_worst_pairs_are_the_examples_and_all_are_counted():
    ledger = sums(*([[1, 2, 3, 4 + n % 2]] for n in range(8)))  # seven times one for another
    ledger.sum(8, "train", 1, [1, 2, 3], MODEL, SECURE)  # round 7's less 4, its own less 5
    near = ledger.summary()["near"]
    assert (near["count"], near["by_difference"]) == (9, {"1": 2, "2": 7})
    assert len(near["examples"]) == 5
    worst = {"task": "train", "rounds": [8, 8], "slots": [0, 1], "clients": [5]}
    assert near["examples"][0] == worst
    assert near["examples"][1]["clients"] == [4]


# --- abandoned rounds, checkpoints, size --------------------------------------------------------


def test_what_an_abandoned_round_showed_was_seen():
    ledger = Exposure()
    for number in (1, 2, 3):
        ledger.round = number
        if number < 3:
            ledger.single(0, number, MODEL, AVERAGED)
        if number > 1:
            ledger.abandon()  # in round 3 nothing had arrived yet
    assert ledger.rows()[0]["rounds"] == 2
    assert ledger.summary()["abandoned"] == 1
    assert ledger.sentences()[-1].startswith("One round was abandoned: the server saw")


def test_a_checkpoint_keeps_everything_at_every_moment():
    """A ledger that is saved and restored after each step ends like one that never was."""
    steps = [
        lambda x: setattr(x, "round", 1),
        lambda x: x.single(3, 1, {"model": ["a"], "bases": ()}, CONSENT),
        lambda x: x.single(3, 1, {"model": ["b"]}, CONSENT),
        lambda x: add(x, 1, [1, 2, 3], [4, 5]),
        lambda x: x.abandon(),
        lambda x: setattr(x, "round", 2),
        lambda x: x.single(3, 2, {"model": ["a"]}, CONSENT),
        lambda x: add(x, 2, [1, 2], [3, 4, 5], protection=SECURE_NOISED),
        lambda x: x.sum(2, "train", "late", [4, 5, 8], MODEL, SECURE),
        lambda x: x.sum(2, "train", "own", [1, 2, 9], {"model": ["a"]}, SECURE),
        lambda x: x.sum(3, "train", "own", [1, 2], {"model": ["a"]}, SECURE),
    ]
    whole, saved = (Exposure(LAYERS, 9, 2, "final-layer") for _ in range(2))
    for step in steps:
        step(whole)
        tree = saved.to_tree()
        saved = kept(saved)
        assert saved.to_tree() == tree
        step(saved)
    assert saved.rows() == whole.rows()
    assert saved.near(2) == whole.near(2)
    assert len(whole.near(2)) == 5
    assert saved.summary() == whole.summary()
    assert json.loads(json.dumps(whole.summary())) == whole.summary()


def test_a_restored_ledger_leaves_its_tree_alone():
    ledger = mixed()
    tree = ledger.to_tree()
    before = json.dumps(pack(tree, Layout(()), []))
    for other in (ledger, Exposure.from_tree(tree)):
        other.single(0, 9, MODEL, AVERAGED)
    assert json.dumps(pack(tree, Layout(()), [])) == before


def steps_for_each(rounds, groups, members):
    """Interpreter's steps for each client that is summed, where one is missing in every round."""
    steps = 0

    def trace(frame, event, _):
        nonlocal steps
        if frame.f_code.co_filename != exposure.__file__:
            return None
        frame.f_trace_opcodes = True
        steps += event == "opcode"
        return trace

    ledger, clients = Exposure(LAYERS), range(groups * members)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for number in range(rounds):
            for slot in range(groups):
                people = set(clients[slot * members : (slot + 1) * members]) - {number}
                ledger.sum(number, "train", slot, people, MODEL, SECURE)
    finally:
        sys.settrace(before)
    return steps / (rounds * len(clients))


def test_the_work_grows_with_the_clients_that_were_summed_and_no_faster():
    few = steps_for_each(5, 5, 10)
    assert few > 1
    assert steps_for_each(25, 5, 10) < 1.3 * few  # rounds
    assert steps_for_each(5, 25, 10) < 1.3 * few  # groups
    assert steps_for_each(5, 5, 50) < 1.3 * few  # clients of a group


def test_what_is_kept_does_not_grow_with_the_rounds():
    def size(rounds):
        ledger = Exposure(LAYERS, 100)
        for number in range(rounds):
            for client in range(100):
                ledger.single(client, number, {"model": LAYERS[: 1 + number % 3]}, AVERAGED)
            add(ledger, number, range(50), range(50, 100))
        assert len(ledger.rows()) == 100
        return len(json.dumps(pack(ledger.to_tree(), Layout(()), [])))

    assert size(100) < 1.1 * size(10)  # more digits, no more entries


def test_pairs_are_kept_up_to_a_bound_and_counted_beyond():
    ledger = sums(*([[1, 2, 3, 4][: 3 + n % 2]] for n in range(1103)))
    assert len(ledger.near(3)) == 1000
    assert ledger.summary()["near"]["count"] == 1102


# --- in words -----------------------------------------------------------------------------------


def plain(rounds=20, clients=20, **more):
    ledger = Exposure(LAYERS, 20, **more)
    for number in range(1, rounds + 1):
        for client in range(clients):
            ledger.single(client, number, MODEL, AVERAGED)
    return ledger


def test_plain_averaging_in_words():
    ledger = plain()
    ledger.sum(1, "train", 0, range(20), MODEL, PLAIN)  # the mean of what was seen anyway
    assert ledger.sentences() == [
        "The server received every client's model (all 3 layers) in 20 rounds, unprotected; the "
        "method used only their means. With --secure it would see only sums."
    ]
    assert sees(ledger.summary()) == "means"


def test_some_clients_and_some_layers_in_words():
    ledger = Exposure(LAYERS, 20)
    for client in range(12):
        ledger.single(
            client, 3, {"model": ["a", "b"], "control": ["a", "b"], "n": (), "m": ()}, AVERAGED
        )
    assert ledger.sentences()[0].startswith(
        "The server received the model and 'control' (2 of 3 layers: a, b), 'n' and 'm' of 12 of "
        "20 clients once, in round 3, unprotected;"
    )
    unknown = Exposure()
    unknown.single(4, 3, {"model": list("vwxyz")}, AVERAGED)
    assert "received the model (5 layers) of 1 client once" in unknown.sentences()[0]


def test_a_method_that_looks_at_each_is_not_offered_secure_sums():
    ledger = plain()
    ledger.single(0, 21, {"head": ["c"]}, PLAIN)
    assert ledger.sentences() == [
        "The server saw the 'head' (layer c) of 1 of 20 clients once, in round 21, "
        "unprotected: the method uses each of them.",
        "The server received every client's model (all 3 layers) in 20 rounds, unprotected; the "
        "method used only their means.",
    ]
    assert sees(ledger.summary()) == "each"


def test_secure_sums_in_words():
    ledger = Exposure(LAYERS, 20, least=2)
    for number in range(1, 21):
        people = [c for c in range(10 if number > 10 else 20) if (c, number) != (7, 5)]
        ledger.sum(number, "train", 0, people, MODEL, SECURE)
    assert ledger.sentences() == [
        "The server saw only sums of 10 to 20 clients, in 20 rounds.",
        "2 pairs of sums differ by a single client (rounds 4 and 5: client 7): the difference "
        "narrows down what that client sent.",
    ]
    assert sees(ledger.summary()) == "sums"


def test_the_difference_of_one_round_is_the_vector_unless_it_is_noised():
    assert sums([[1, 2, 3], [1, 2]]).sentences()[-1] == (
        "1 pair of sums differs by a single client (both in round 1: client 3): the difference is "
        "what that client sent."
    )
    noised = sums([[1, 2, 3], [1, 2]], protection=SECURE_NOISED).sentences()
    assert noised[0] == "The server saw only noised sums of 2 to 3 clients, once, in round 1."
    assert noised[1].endswith("the difference narrows down what that client sent.")
    assert sums([[1, 2, 3]], [[1, 2, 4]]).sentences()[-1] == (
        "1 pair of sums differs by fewer than 3 clients (rounds 1 and 2: clients 3 and 4): the "
        "difference narrows down what those clients sent."
    )


def test_consent_in_words():
    ledger = Exposure(LAYERS, 20, reveals="final-layer")
    for client in range(20):
        ledger.single(client, 0, {"head": ["c"]}, CONSENT)
    add(ledger, 1, range(10), range(10, 20))
    assert ledger.sentences() == [
        "With consent (--reveal final-layer), the server saw every client's 'head' (layer c) "
        "before round 1.",
        "Otherwise the server saw only sums of 10 clients, once, in round 1.",
    ]
    assert sees(ledger.summary()) == "revealed"
    assert ledger.summary()["revealed"] == [
        {
            "by": "final-layer",
            "array": "head",
            "layers": ["c"],
            "clients": 20,
            "rounds": 1,
            "first": 0,
            "last": 0,
        }
    ]


@pytest.mark.parametrize(
    ("protection", "words", "word"),
    [
        (
            LOCAL_NOISE,
            "saw the model (all 3 layers) of 1 of 9 clients once, in round 1, with n",
            "noised",
        ),
        (
            CENTRAL_NOISE,
            "received the model (all 3 layers) of 1 of 9 clients once, in round 1; o",
            "means",
        ),
    ],
)
def test_noise_in_words(protection, words, word):
    ledger = Exposure(LAYERS, 9)
    ledger.single(0, 1, MODEL, protection)
    (said,) = ledger.sentences()
    assert words in said
    assert "noise" in said
    assert sees(ledger.summary()) == word


def test_nothing_in_words():
    assert sentences(Exposure().summary()) == ["Nothing left the clients."]
    assert sees(Exposure().summary()) == "nothing"


def test_a_secure_run_without_a_sum_sent_masked_values_and_says_so():
    ledger = Exposure(LAYERS, secure=True)
    assert ledger.sentences() == ["The server learned no sum: everything it received was masked."]
    assert Exposure.from_tree(ledger.to_tree()).sentences() == ledger.sentences()
    add(ledger, 1, [1, 2, 3])
    assert ledger.sentences()[0].startswith("The server saw only sums of 3 clients")


def test_a_mean_of_one_client_has_words_of_its_own():
    ledger = Exposure(LAYERS, members=4)
    ledger.single(2, 1, MODEL, OF_ONE_ALONE)
    (said,) = ledger.sentences()
    assert said.endswith(", unprotected: a mean of one client is its update.")
    assert "the method uses each of them" not in said
    assert sees(ledger.summary()) == "each"


def test_what_is_told_of_an_older_run_is_what_its_method_looks_at():
    assert server_sees({"sees": "each"}) == "each"
    assert server_sees({"sees": "means", "exposure": sums([[1, 2]]).summary()}) == "sums"


def test_sentences_come_from_the_summary_as_it_is_kept():
    for ledger in (mixed(), plain(), sums([[1, 2, 3], [1, 2]])):
        assert sentences(json.loads(json.dumps(ledger.summary()))) == ledger.sentences()
