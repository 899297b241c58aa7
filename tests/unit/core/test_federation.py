"""The exact weighted mean."""

import pytest
import torch

from coterie.core.aggregate import mix
from coterie.core.messages import Reply, chosen
from coterie.errors import TrainingError


def reply(client, examples, value, **metrics):
    return Reply(client, examples, {"model": torch.tensor(value)}, metrics)


ALL = {c: {"all": 1.0} for c in range(9)}


def test_weights_are_examples_times_the_row():
    replies = [reply(0, 10, [1.0]), reply(1, 30, [5.0])]
    assert mix(replies, ALL)["all"].arrays["model"].tolist() == [4.0]
    assert mix(replies, ALL, by_examples=False)["all"].arrays["model"].tolist() == [3.0]
    rows = {0: {"a": 3.0, "b": 1.0}, 1: {"a": 1.0}}
    result = mix(replies, rows)
    assert result["a"].arrays["model"].tolist() == [3.0]  # (30·1 + 30·5)/60
    assert result["b"].arrays["model"].tolist() == [1.0]
    assert (result["a"].examples, result["a"].clients) == (40, (0, 1))


def test_sums_are_in_float64():
    # In float32 the ones vanish beside 2**25; in float64 nothing does.
    replies = [reply(0, 1, [2.0**25]), *(reply(c, 1, [1.0]) for c in (1, 2, 3))]
    mean = mix(replies, ALL)["all"].arrays["model"]
    assert mean.item() == torch.tensor((2.0**25 + 3) / 4).item()
    assert mean.dtype == torch.float32


def test_order_of_arrival_changes_no_bit():
    torch.manual_seed(0)
    replies = [
        Reply(c, 7 * c + 1, {"model": torch.randn(50) * 10.0**c}, {"loss": 10.0**c / 3})
        for c in range(9)
    ]
    first = mix(replies, ALL)["all"]
    for order in (replies[::-1], replies[4:] + replies[:4]):
        other = mix(order, ALL)["all"]
        assert torch.equal(first.arrays["model"], other.arrays["model"])
        assert first.metrics == other.metrics
        assert first.clients == other.clients


def test_the_client_names_its_slot_and_empty_slots_are_absent():
    replies = [
        reply(0, 1, [1.0], slot=2.0),
        reply(1, 3, [5.0], slot=2.0),
        reply(2, 1, [7.0], slot=0.0),
    ]
    result = mix(replies, chosen("slot"))
    assert set(result) == {0, 2}
    assert result[2].arrays["model"].tolist() == [4.0]
    assert result[0].clients == (2,)


def test_metrics_are_plain_means_over_those_who_report_them():
    replies = [reply(0, 1, [0.0], loss=1.0, extra=5.0), reply(1, 3, [0.0], loss=3.0)]
    assert mix(replies, ALL)["all"].metrics == {"loss": 2.0, "extra": 5.0}


def test_a_slot_needs_equal_arrays():
    odd = [Reply(0, 1, {"a": torch.zeros(1)}, {}), Reply(1, 1, {"b": torch.zeros(1)}, {})]
    with pytest.raises(TrainingError, match="clients 0 and 1"):
        mix(odd, ALL)
