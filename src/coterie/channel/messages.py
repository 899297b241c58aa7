"""What orders and replies say: the bodies of the messages between the channel and its clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict


class ScoreBody(TypedDict):
    """Scoring that goes with another order; arrays that the order has already are named."""

    round: int
    arrays: Mapping[str, Any]
    config: Mapping[str, Any]


class OrderBody(TypedDict, total=False):
    """An order: its name, what to do, with what.

    ``expects`` names the version of the client's state, ``keep`` others that it keeps besides;
    ``beside`` is what a stage tells its client half, ``score`` the scoring that goes with it.
    """

    order: str
    round: int
    task: str
    arrays: Mapping[str, Any]
    config: Mapping[str, Any]
    beside: Mapping[str, Any]
    expects: str
    keep: list[str]
    score: ScoreBody


class ReplyBody(TypedDict, total=False):
    """A reply, or the ``error`` that there is in place of one, with its ``text``.

    ``since`` says which arrays are changes, and of what; ``version`` names the client's new state,
    ``beside`` and ``of`` are for a stage's server half, ``scored`` are scores that were asked for
    with another order.
    """

    examples: int
    arrays: Mapping[str, Any]
    metrics: Mapping[str, float]
    since: Mapping[str, str]
    version: str
    beside: Mapping[str, Any]
    of: Mapping[str, str]
    scored: Mapping[str, Any]
    error: str
    text: str
