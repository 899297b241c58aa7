"""What one client adds to a sum, and the mean back from it."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from coterie.channel.privacy.encoding import Count, Form, Total, contribution, length
from coterie.core.messages import Reply, vector_of
from coterie.core.tree import same
from coterie.core.weights import Layout, Weights
from coterie.errors import TrainingError
from guarded import as_in_sums

LAYOUT = Layout.of(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
PART = LAYOUT.only(["1"])


def arrays(seed=0):
    draw = torch.Generator().manual_seed(seed)
    return {
        "model": Weights(PART, torch.randn(PART.size, generator=draw)),
        "a table": torch.randn(2, 2, generator=draw).double(),
        "count": torch.tensor([float(seed)]),
    }


def test_arrays_there_and_back():
    sent = arrays(3)
    form = Form.of(sent, LAYOUT)
    assert form.size == PART.size + 4 + 1
    assert [p[0] for p in form.parts] == ["a table", "count", "model"]  # whatever their order
    assert Form.of(dict(reversed(sent.items())), LAYOUT) == form
    back = form.arrays(form.flat(sent))
    assert same(back, dict(sorted(sent.items())))
    assert {n: vector_of(a).dtype for n, a in back.items()} == {
        "model": torch.float32,
        "a table": torch.float64,
        "count": torch.float32,
    }
    assert back["a table"].shape == (2, 2)
    told = Form.from_tree(form.to_tree(), LAYOUT)
    assert told == form
    assert form.layers == {"model": ("1",), "a table": (), "count": ()}


def test_nothing_has_a_form_too():
    form = Form.of({}, LAYOUT)
    assert form.size == 0
    assert form.flat({}).tolist() == []
    assert form.arrays(np.zeros(0)) == {}


def test_by_hand():
    """0.75 and −0.5 of 10 samples with weight 2, in quarters; a loss of 1.25; one unknown."""
    added = contribution(
        np.array([0.75, -0.5]), 10, {"loss": 1.25}, ["loss", "other"], Count(2), 2, 5
    )
    #            3·20 −2·20 5·20 quarters, none; weight, samples, a report of loss, none of other
    assert added.tolist() == [60, -40, 100, 0, 20, 10, 20, 0]
    assert length(Form((("x", None, (2,), "float32"),), LAYOUT), ["loss", "other"]) == 8
    plainly = contribution(np.array([0.75]), 10, {}, [], Count(2, by_examples=False), 2, 5)
    assert plainly.tolist() == [6, 2, 10]


def test_a_metric_that_is_no_number_is_not_reported():
    added = contribution(np.zeros(0), 4, {"loss": float("nan")}, ["loss"], Count(), 8, 3)
    assert added.tolist() == [0, 4, 4, 0]
    total = Total(Form.of({}, LAYOUT), (0,), ("loss",), added.view(np.uint64), 8)
    assert total.means == {}


def test_what_would_leave_the_ring_is_refused_with_a_remedy():
    with pytest.raises(
        TrainingError, match=r"40 fractional bits.*Lower privacy\.bits, or the learning"
    ) as why:
        contribution(np.array([2.0**20]), 77, {}, [], Count(), 40, 100)
    # What the server hears has the run's numbers in it, and none of the client's.
    assert re.findall(r"\d+", str(why.value)) == ["100", "40"]
    assert why.value.__cause__ is None
    with pytest.raises(TrainingError, match="not finite"):
        contribution(np.array([np.inf]), 1, {}, [], Count(), 8, 3)
    with pytest.raises(TrainingError, match="too large"):
        contribution(np.zeros(1), 1, {"loss": 1e30}, ["loss"], Count(), 40, 3)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=6),
    st.booleans(),
    st.integers(8, 30),
    st.data(),
)
def test_the_mean_of_the_sum_is_the_mean_of_replies(samples, by_examples, bits, data):
    """Metrics too, over those who report them."""
    weights = data.draw(st.lists(st.integers(1, 9), min_size=len(samples), max_size=len(samples)))
    reports = data.draw(st.lists(st.booleans(), min_size=len(samples), max_size=len(samples)))
    replies, total = [], 0
    form = Form.of(arrays(), LAYOUT)
    for client, (n, weight, tells) in enumerate(zip(samples, weights, reports, strict=True)):
        metrics = {"loss": 0.3 * client, **({"more": -1.0 * client} if tells else {})}
        replies.append(Reply(client, n, arrays(client), metrics))
        total = total + contribution(
            form.flat(arrays(client)),
            n,
            metrics,
            ["loss", "more"],
            Count(weight, by_examples),
            bits,
            len(samples),
        )
    into = {c: {0: float(w)} for c, w in enumerate(weights)}
    plain = as_in_sums(replies, into, by_examples)[0]
    found = Total(form, tuple(range(len(samples))), ("loss", "more"), total.view(np.uint64), bits)
    assert found.examples == plain.examples == sum(samples)
    assert found.count == sum(
        w * (n if by_examples else 1) for w, n in zip(weights, samples, strict=True)
    )
    assert found.means.keys() == plain.metrics.keys()
    for name, value in plain.metrics.items():
        assert abs(found.means[name] - value) <= 2.0 ** -(bits + 1) + 1e-12
    for name, array in plain.arrays.items():
        a, b = (vector_of(x).double() for x in (found.arrays[name], array))
        assert bool(((a - b).abs() <= 2.0 ** -(bits + 1) + b.abs() * 2.0**-23).all())
