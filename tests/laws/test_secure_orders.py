"""A server that tells members of one sum different things learns nothing.

The server's own half is honest about verifying signatures, so a lie shows there as too few members;
to see that the clients protect themselves, the lying server here also believes every signature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import coterie
from coterie.channel.privacy.secagg import messages
from coterie.channel.privacy.settings import Privacy
from coterie.channel.privacy.sum_rules import SumRules
from coterie.core.messages import Order
from coterie.errors import ConfigError
from guarded import Driven, secured

VICTIM = 2
NOISY = Privacy(secure=True, noise=1.0, delta=1e-5)


def lying(channel: Any, lie: Callable[[dict[int, Any], list[Order]], list[Order]]) -> None:
    """Let a channel change what it tells clients, and whom it sends what."""
    honest = channel.exchange

    def exchange(orders, beside=None, adopt=True):
        told = {c: dict(t) for c, t in (beside or {}).items()}
        return honest(lie(told, list(orders)), told or None, adopt)

    channel.exchange = exchange


def metrics(told: dict[int, Any], orders: list[Order]) -> list[Order]:
    """Everybody but one reports a metric that there is not."""
    for client, words in told.items():
        if "metrics" in words and client != VICTIM:
            words["metrics"] = ["zzz"]
    return orders


def noise(told: dict[int, Any], orders: list[Order]) -> list[Order]:
    """Everybody but one clips to almost nothing, and so adds almost no noise."""
    for client, words in told.items():
        if "noise" in words and client != VICTIM:
            words["noise"] = {**words["noise"], "clip": 1e-3}
    return orders


def models(told: dict[int, Any], orders: list[Order]) -> list[Order]:
    """Everybody but one gets a model of the server's own."""

    def other(order: Order) -> Order:
        if order.task != "train" or order.client == VICTIM:
            return order
        return replace(order, arrays={n: a * 0.0 for n, a in order.arrays.items()})

    return [other(o) for o in orders]


def settings(told: dict[int, Any], orders: list[Order]) -> list[Order]:
    """Everybody but one makes a single step."""
    return [
        replace(o, config={**o.config, "steps": 1})
        if o.task == "train" and o.client != VICTIM
        else o
        for o in orders
    ]


@pytest.mark.parametrize(
    ("lie", "privacy"),
    [
        (metrics, Privacy(secure=True)),
        (noise, NOISY),
        (models, Privacy(secure=True)),
        (settings, Privacy(secure=True)),
    ],
)
@pytest.mark.parametrize("believes", [False, True], ids=["checks", "believes all"])
def test_nobody_unmasks_what_members_were_told_differently(
    lie, privacy, believes, tmp_path, monkeypatch
):
    made = Driven(secured(coterie.fedavg(), privacy), tmp_path)
    before = made.state
    lying(made.channel, lie)
    if lie in (models, settings):  # such a server does not look for its own lie
        monkeypatch.setattr(SumRules, "content", lambda self, slot, answers: "")
    if believes:
        monkeypatch.setattr(messages, "genuine", lambda *_: True)  # members have it by another name
    made.round(0)
    assert "clients are left" in made.abandoned[0] or "ended without a sum" in made.abandoned[0]
    assert made.state is before


def test_honest_servers_tell_everybody_the_same(tmp_path):
    made = Driven(secured(coterie.fedavg()), tmp_path)
    made.round(0)
    assert not made.abandoned


def test_a_method_that_sends_members_of_a_group_different_layers_is_refused_unless_allowed(
    tmp_path,
):
    made = coterie.layer_wise(coterie.fedavg(), 2, share=1.0, start=1)
    settings = {"rounds": 6, "cohort": 4}
    with pytest.raises(ConfigError, match="same_orders"):
        Driven(secured(made, settings=settings), tmp_path / "a").all()
    lenient = Privacy(secure=True, same_orders=False)
    run = Driven(secured(made, lenient, settings=settings), tmp_path / "b").all()
    assert not run.abandoned


def test_a_small_cohort_drawn_by_coins_ends_its_round_not_the_run(tmp_path):
    settings = {"rounds": 8, "cohort": 2, "sampling": "poisson"}
    run = Driven(secured(coterie.fedavg(), settings=settings), tmp_path).all()
    assert run.abandoned
    assert all("of the 3 clients that a sum needs" in why for why in run.abandoned.values())
