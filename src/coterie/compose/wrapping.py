"""A check shared by the wrappers of methods."""

from __future__ import annotations

from coterie.core.method import Method


def _nothing_shared(inner: Method) -> str:
    return "shares nothing" if inner.sees == "nothing" else ""
