"""Inputs for parsers: valid ones that were changed, and what never was valid; by Hypothesis."""

from __future__ import annotations

import copy
import json
import math
import os
import time
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from coterie.errors import CoterieError

SECONDS = float(os.environ.get("COTERIE_FUZZ_SECONDS", "0"))
"""How long to go on, over all parsers together; 0: a fixed choice of examples each."""

Parse = Callable[[Any], object]
_CHANGES = ("flip", "set", "cut", "number", "insert", "repeat", "splice")
_EDGES = (0, 1, 2, 127, 128, 255, 256, 2**15, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1)


@st.composite
def changed_bytes(draw: st.DrawFn, examples: Sequence[bytes]) -> bytes:
    """Valid bytes with some bits, lengths or stretches changed; or any bytes."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=200))
    data = bytearray(draw(st.sampled_from(examples)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        change = draw(
            st.sampled_from(("flip", "set", "cut", "number", "insert", "repeat", "splice"))
        )
        if not data or change == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=9))
        elif change == "flip":
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif change == "set":
            data[at] = draw(st.sampled_from((0, 1, 0x22, 0x2C, 0x5B, 0x7B, 0x7F, 0x80, 0xFF)))
        elif change == "cut":
            del data[at:]
        elif change == "number":  # what may be a length, in either order of bytes
            size, order = draw(st.sampled_from((2, 4, 8))), draw(st.sampled_from(("little", "big")))
            number = draw(st.sampled_from(_EDGES)) % (1 << 8 * size)
            data[at : at + size] = number.to_bytes(size, order)
        elif change == "repeat":
            until = draw(st.integers(at, min(len(data), at + 64)))
            data[at:at] = data[at:until] * draw(st.integers(1, 3))
        else:
            other = draw(st.sampled_from(examples))
            data[at:] = other[draw(st.integers(0, len(other))) :]
    return bytes(data)


def deep(levels: int) -> list[Any]:
    """Lists within lists."""
    made: list[Any] = []
    for _ in range(levels):
        made = [made]
    return made


def odd_values(largest: int = 10**400) -> st.SearchStrategy[Any]:
    """Values of the wrong kind or size, from which each draw is a fresh one."""
    numbers = [-1, 0, 1, 3, -(2**63), 2**63, 2**64, largest, 0.5, -0.0, 1e-320, 1e308]
    numbers += [math.nan, math.inf, -math.inf]
    texts = ["", "x", "0", "\0", "\ud800", "../../x", "a" * 1000, "nan", "raw+zstd", "$tensor"]
    trees: list[Any] = [[], {}, [0], [[0]], {"": 0}, {"x": {}}, deep(400)]
    tags: list[Any] = [{"$tensor": 0}, {"$tensor": 10**6}, {"$tensor": None}, {"$weights": 0}]
    tags += [{"$weights": 0, "of": [[]]}, {"$weights": 0, "of": "x"}, {"$tuple": 3}]
    tags += [{"$dict": [[[], 1]]}, {"$dict": [[1, 2]]}, {"$dict": 7}, {"change": 3}, {"plain": [0]}]
    fixed: list[Any] = [None, True, False, *numbers, *texts, *trees, *tags]
    return st.sampled_from(fixed).map(copy.deepcopy)


@st.composite
def changed_tree(draw: st.DrawFn, examples: Sequence[Any], odd: Any = None) -> Any:
    """A valid tree of JSON with some of its parts of another kind, gone, or doubled."""
    odd = odd_values() if odd is None else odd
    tree = copy.deepcopy(draw(st.sampled_from(examples)))
    for _ in range(draw(st.integers(1, 3))):
        if not isinstance(tree, dict | list) or draw(st.integers(0, 40)) == 0:
            return draw(odd)
        place: Any = tree
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            inner = place[key]
            if isinstance(inner, dict | list) and inner and draw(st.integers(0, 3)):
                place = inner
                continue
            change = draw(st.sampled_from(("put", "put", "drop", "rename", "double", "wrap")))
            if change == "put":
                place[key] = draw(odd)
            elif change == "drop":
                del place[key]
            elif change == "wrap":
                place[key] = [inner]
            elif isinstance(place, list):
                place.insert(key, copy.deepcopy(inner))
            elif change == "rename":
                place[draw(st.sampled_from(("", "x", "$dict", "$tensor", "of")))] = place.pop(key)
            else:
                place[draw(st.sampled_from(keys))] = copy.deepcopy(inner)
            break
    return tree


@st.composite
def changed_text(draw: st.DrawFn, examples: Sequence[Any]) -> bytes:
    """JSON as it arrives: a changed tree, or changed bytes, keys twice, nested without end."""
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return draw(st.sampled_from((b"[" * 100_000, b'{"a":' * 50_000, b"9" * 5000, b"\xff{}")))
    if kind < 6:
        return json.dumps(draw(changed_tree(examples))).encode("utf-8", "surrogatepass")
    texts = [json.dumps(example).encode() for example in examples]
    if kind == 6:
        text = draw(st.sampled_from(texts))
        twice = json.dumps(draw(odd_values(2**70)), default=str)
        key = draw(st.sampled_from(list(json.loads(text)) if text[:1] == b"{" else ["x"]))
        return text[:1] + json.dumps(key).encode() + b":" + twice.encode() + b"," + text[1:]
    return draw(changed_bytes(texts))


def fuzz(
    parse: Parse,
    inputs: st.SearchStrategy[Any],
    examples: int = 200,
    memory: int = 32 << 20,
    seconds: float = 5.0,
    share: float = 1.0,
) -> None:
    """Give a parser such inputs; it gives what it should, or one of our own errors.

    ``parse`` asserts itself that what comes out is of the right kind. Each input may take so much
    memory and processor time, and no more. In a long run this one has its ``share`` of it.
    """

    def once(given_: Any) -> None:
        tracemalloc.start()
        began = time.process_time()
        try:
            with suppress(CoterieError):
                parse(given_)
            took, peak = time.process_time() - began, tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < memory, f"{peak} bytes were allocated"
        assert took < seconds, f"it took {took:.1f} s"

    checks = list(HealthCheck)
    phases = (Phase.explicit, Phase.generate, Phase.shrink)

    def run(number: int | None, count: int) -> None:
        own = settings(
            max_examples=count,
            deadline=None,
            database=None,
            derandomize=number is None,
            suppress_health_check=checks,
            phases=phases,
        )
        made = own(given(inputs)(once))
        (made if number is None else seed(number)(made))()

    run(None, examples)
    ends, number = time.monotonic() + SECONDS * share, 0
    while time.monotonic() < ends:
        run(number, 200)
        number += 1
