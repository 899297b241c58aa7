"""Which updates are outliers: by lengths worked out by hand."""

import math

import pytest
import torch
from torch import nn

from coterie.channel.outliers import BOUND, LEAST, at_fault, shortened, too_long
from coterie.core.messages import Order
from coterie.core.weights import Layout, Weights

LAYOUT = Layout.of(nn.Sequential(nn.Linear(2, 1, bias=False), nn.BatchNorm1d(1, affine=False)))
START = Weights(LAYOUT, torch.tensor([30.0, 40.0, 0.0, 1.0]))  # two parameters, two buffers
FAR = Weights(LAYOUT, torch.tensor([-30.0, 40.0, 0.0, 1.0]))
NAN = float("nan")


def moved(length, start=START, buffers=0.0):
    """A model whose parameters are so far from those of ``start``."""
    step = torch.tensor([0.6 * length, 0.8 * length, buffers, 0.0])
    return Weights(LAYOUT, start.vector + step)


def given(sent, arrays=None, task="train"):
    """Orders and what was received, of clients that sent these arrays."""
    own = arrays or {}
    received = {c: own.get(c, {"0": START}) for c in sent}
    return {c: Order(c, task, received[c]) for c in sent}, received, sent


def models(*lengths):
    return {c: {"model": moved(length)} for c, length in enumerate(lengths)}


def norm(weights, start=START):
    return float((weights.parameters - start.parameters).double().norm())


# --- beyond a wide multiple of the median ---------------------------------------------------------


def test_the_limit_is_a_multiple_of_the_median_change_not_of_the_models_own_length():
    assert START.norm() == 50
    assert too_long(*given(models(1, 1, 1, 49.9))) == {}
    found = too_long(*given(models(1, 1, 1, 50.1)))
    assert list(found) == [3]
    assert "its 'model' is a change of length 50.1, 50.1 times the median of 4" in found[3]
    assert "run.outliers leaves out changes longer than 50 times" in found[3]


def test_of_many_clients_one_may_move_the_mean_by_five_ordinary_changes():
    """A hundred clients at rest but for one: it pulls as hard as the others together."""
    sent = models(*[1] * 99, 499)
    assert too_long(*given(sent)) == {}
    assert list(too_long(*given(models(*[1] * 99, 501)))) == [99]


def test_a_client_with_more_samples_makes_more_steps():
    sent = models(1, 1, 1, 1, 9000)
    many = {0: 25, 1: 25, 2: 25, 3: 25, 4: 5000}
    assert too_long(*given(sent), many) == {}
    assert list(too_long(*given(sent), dict.fromkeys(range(5), 25))) == [4]
    assert list(too_long(*given(sent), {**many, 4: 2500})) == [4]
    few = {**many, 4: 1}  # nor does it count against one that it has few
    assert too_long(*given(models(1, 1, 1, 1, 49)), few) == {}


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_of_three_is_found_wherever_it_stands(place):
    lengths = [1.0, 2.0, 3.0]
    lengths[place] = 1e30
    assert list(too_long(*given(models(*lengths)))) == [place]


def test_several_are_found_while_they_are_fewer_than_half():
    assert list(too_long(*given(models(1, 1, 1, 1e9, 1e30)))) == [3, 4]
    assert too_long(*given(models(1, 1, 1e30, 1e30, 1e30))) == {}


@pytest.mark.parametrize("lengths", [(1e30,), (1, 1e30), (0, 0, 0, 1e30)])
def test_where_a_median_says_nothing_nobody_is_judged(lengths):
    assert too_long(*given(models(*lengths))) == {}
    assert shortened(*given(models(*lengths))) == {}


def test_numbers_whose_squares_are_too_large_for_their_type_have_a_length():
    whole = {c: {"model": moved(1)} for c in range(3)} | {3: {"model": START * 1e36}}
    assert list(too_long(*given(whole))) == [3]
    opposite = {"model": Weights(LAYOUT, torch.full((4,), -3.4e38))}
    assert list(too_long(*given({c: {"model": moved(1)} for c in range(3)} | {3: opposite}))) == [3]


# --- what an array is a change of ----------------------------------------------------------------


def test_of_several_models_that_were_sent_the_nearest_is_what_it_is_a_change_of():
    offer = {"0": START, "1": FAR}
    sent = {c: {"model": moved(1e-3, (START, FAR)[c % 2])} for c in range(6)}
    assert too_long(*given(sent, dict.fromkeys(sent, offer))) == {}  # the models are 60 apart
    sent[5] = {"model": moved(20, FAR)}
    assert list(too_long(*given(sent, dict.fromkeys(sent, offer)))) == [5]


def test_what_is_a_change_by_itself_is_measured_by_itself():
    """As FedNova sends it; from the model that was sent, all would be about 50 long."""
    sent = {c: {"model": moved(1, START * 0)} for c in range(3)}
    sent[3] = {"model": moved(2 * LEAST, START * 0)}
    (why,) = too_long(*given(sent)).values()
    assert "100 times the median of 4 clients" in why


def test_no_client_chooses_what_its_update_is_a_change_of():
    """A model of zeros is short by itself, and a change of all that there was."""
    sent = models(1e-3, 1e-3, 1e-3) | {3: {"model": START * 0}}
    assert list(too_long(*given(sent))) == [3]  # 50 is 50,000 times 0.001
    cut = shortened(*given(sent))
    assert list(cut) == [3]
    assert norm(cut[3]["model"]) == pytest.approx(BOUND * 1e-3, rel=0.02)


def test_buffers_are_judged_apart_from_parameters():
    sent = models(1, 1, 1)
    sent[1] = {"model": moved(1, buffers=1e30)}
    sent[0] = {"model": moved(1, buffers=0.1)}
    sent[2] = {"model": moved(1, buffers=0.1)}
    found = too_long(*given(sent))
    assert list(found) == [1]
    assert "'model' (buffers)" in found[1]
    assert torch.equal(shortened(*given(sent))[1]["model"].parameters, moved(1).parameters)


def test_an_array_that_was_sent_under_its_name_is_judged_and_a_count_is_not():
    own = torch.zeros(3)
    received = {key: {"0": START, "correction": own} for key in range(4)}
    sent = {c: {"correction": own + 1, "count": torch.tensor([25.0])} for c in range(4)}
    sent[2]["count"] = torch.tensor([1e9])
    assert too_long(*given(sent, received)) == {}
    sent[3]["correction"] = own + 1e30
    assert list(too_long(*given(sent, received))) == [3]


# --- who is compared with whom -------------------------------------------------------------------


def test_clients_that_were_sent_the_same_are_compared_with_each_other():
    """A group far from its goal is not measured by one that is there."""
    received = {c: {"0": START if c < 3 else FAR} for c in range(6)}
    sent = {c: {"model": moved(1e-3 if c < 3 else 100, received[c]["0"])} for c in range(6)}
    sent[2] = {"model": moved(100, START)}
    assert list(too_long(*given(sent, received))) == [2]


def test_of_a_group_too_small_for_a_median_everybody_with_its_task_is_asked():
    received = {c: {"0": START if c < 4 else FAR} for c in range(6)}
    sent = {c: {"model": moved(1, received[c]["0"])} for c in range(6)}
    sent[5] = {"model": moved(1e30, FAR)}
    assert list(too_long(*given(sent, received))) == [5]
    # They were not sent the same, so they may be anywhere, as where each keeps its own model.
    sent[5] = {"model": moved(9_000, FAR)}
    assert too_long(*given(sent, received)) == {}
    orders, received, sent = given(sent, received)
    orders[4] = Order(4, "other", received[4])
    orders[5] = Order(5, "other", received[5])
    assert too_long(orders, received, sent) == {}  # another task: two say nothing


# --- shortened -----------------------------------------------------------------------------------


def test_a_long_change_is_scaled_to_the_bound_and_the_others_stay_as_they_are():
    sent = models(1, 1, 1, 100)
    cut = shortened(*given(sent))
    assert list(cut) == [3]
    assert norm(cut[3]["model"]) == pytest.approx(BOUND, rel=1e-6)
    expected = START.vector[:2] + BOUND * torch.tensor([0.6, 0.8])
    assert torch.allclose(cut[3]["model"].parameters, expected)
    assert torch.equal(sent[3]["model"].vector, moved(100).vector)  # not changed in place
    assert math.isfinite(norm(shortened(*given(models(1, 1, 1, 1e30)))[3]["model"]))


# --- whose fault it is ---------------------------------------------------------------------------


def faults(diverged, answered, received):
    orders = {c: Order(c, "train", received[c]) for c in (*diverged, *answered)}
    return at_fault(orders, received, diverged, answered)


def test_one_that_diverges_alone_has_done_so_itself():
    received = {key: {"0": START} for key in range(4)}
    assert faults([1], [0, 2, 3], received) == {}
    assert faults([1, 2], [0, 3], received) == {}  # half is not most
    assert faults([0], [], received) == {}  # nobody to compare with


def test_most_of_those_with_one_model_have_not():
    received = {key: {"0": START} for key in range(4)}
    assert faults([0, 1, 2], [3], received) == dict.fromkeys(
        range(3), "3 of 4 clients with the same order diverged"
    )
    grouped = {c: {"0": START if c < 2 else FAR} for c in range(8)}
    assert list(faults([0, 1, 7], [2, 3, 4, 5, 6], grouped)) == [0, 1]


def test_a_model_that_was_spoiled_when_it_was_sent_is_at_fault():
    spoiled = Weights(LAYOUT, torch.tensor([NAN, 0.0, 0.0, 0.0]))
    received = {c: {"0": spoiled if c == 1 else START} for c in range(4)}
    assert faults([1, 2], [0, 3], received) == {
        1: "the '0' that was sent to client 1 is not finite"
    }
