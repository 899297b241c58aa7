"""Trees round-trip exactly, on disk and on the wire."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from coterie.channel.wire import Message, Wire
from coterie.core.tree import pack, read_tree, same, unpack, write_tree
from coterie.core.weights import Layout, Weights
from coterie.errors import CoterieError, RunDirError, WireError

LAYOUT = Layout.of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
WHOLE = Weights(LAYOUT, torch.arange(LAYOUT.size, dtype=torch.float32))

leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=True)
    | st.text()
    | st.sampled_from(
        [
            torch.tensor([1, 2]),
            torch.zeros(2, 3),
            torch.zeros(0),
            torch.tensor(2.5),
            torch.tensor([True]),
            torch.ones(2, dtype=torch.float64),
            WHOLE,
            WHOLE.only(["1"]),
        ]
    )
)
trees = st.recursive(
    leaves,
    lambda t: (
        st.lists(t, max_size=3)
        | st.dictionaries(st.text() | st.integers(), t, max_size=3)
        | st.tuples(t, t)
    ),
    max_leaves=8,
)


@given(trees)
def test_pack_and_unpack(tree):
    assert same(unpack(pack(tree, LAYOUT, tensors := []), tensors, LAYOUT), tree)


names = st.text().filter(lambda text: not text.startswith("$"))  # as those of a body are


@given(st.dictionaries(names, trees, max_size=3))
@settings(max_examples=60)
def test_messages(body):
    message = Wire(LAYOUT).pack(body)
    data = message.to_bytes()
    assert len(data) == message.size
    assert same(Wire(LAYOUT).unpack(Message.from_bytes(data)), body)


def test_files(tmp_path):
    tree = {1: WHOLE, "two": (3.5, [WHOLE.only(["1"])]), "$odd": None}
    write_tree(tmp_path / "t", tree, LAYOUT, durable=True)
    assert same(read_tree(tmp_path / "t", LAYOUT), tree)
    assert [p.name for p in tmp_path.iterdir()] == ["t"]


def test_same_tells_apart():
    assert not same(1, 1.0)
    assert not same([1], (1,))
    assert not same(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same({1: 2}, {1: 3})
    assert same(float("nan"), float("nan"))


def test_what_cannot_be_kept_is_refused():
    with pytest.raises(CoterieError, match="a set cannot be stored"):
        pack({"x": {1, 2}}, LAYOUT, [])


@pytest.mark.parametrize("content", [b"", b"not a file of ours", b"\x08\0\0\0\0\0\0\0{}      "])
def test_damaged_files_are_named(tmp_path, content):
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(RunDirError, match="damaged"):
        read_tree(tmp_path / "t", LAYOUT)
    with pytest.raises(RunDirError, match="missing"):
        read_tree(tmp_path / "nothing", LAYOUT)


def test_a_truncated_message_is_noticed():
    data = Wire(LAYOUT).pack({"a": WHOLE}).to_bytes()
    for end in range(len(data)):
        with pytest.raises(WireError, match=r"cut short|damaged"):
            Message.from_bytes(data[:end])


def test_a_message_with_any_bit_wrong_is_noticed():
    data = Wire(LAYOUT).pack({"a": WHOLE}).to_bytes()
    for place in range(len(data)):
        for bit in range(8):
            wrong = bytearray(data)
            wrong[place] ^= 1 << bit
            with pytest.raises(WireError, match=r"cut short|damaged"):
                Message.from_bytes(bytes(wrong))
    assert Message.from_bytes(data).to_bytes() == data


def test_very_short_arrays_are_told_apart():
    body = {"a": torch.tensor([True]), "b": torch.tensor(1, dtype=torch.uint8),
            "c": torch.zeros(0), "d": torch.zeros(0, 3)}  # fmt: skip
    wire = Wire(LAYOUT)
    assert same(wire.unpack(wire.pack(body, {}), {}), body)


@pytest.mark.parametrize(
    "packed", [{"$dict": [], "a": 1}, {"a": {"$tuple": [], "$dict": []}}, {"$tensor": 0, "b": 2}]
)
def test_a_mark_that_does_not_stand_alone_is_refused(packed):
    """Which of both would count? What is signed must be what is read."""
    with pytest.raises(CoterieError, match="has other keys as well"):
        unpack(packed, [torch.zeros(1)], None)
