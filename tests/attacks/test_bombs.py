"""Few bytes that say that they hold many numbers: refused before there is memory for them.

Each is refused with a sentence, and what was allocated meanwhile is measured.
"""

import json
import tracemalloc

import pytest
import torch
import zstandard

from coterie.channel.compression.codecs import codec
from coterie.channel.wire import SMALL, Message, Wire
from coterie.core.weights import Layout
from coterie.errors import CoterieError

LAYOUT = Layout.of(torch.nn.Linear(20, 5))
MANY = 1 << 27  # numbers: half a gigabyte
MOST = 32 << 20  # bytes that may be allocated while something is refused


def frame(content: int, stated: int | None) -> bytes:
    """A Zstandard frame of so many zeros, in blocks of 4 bytes, that says how many these are."""
    whole, rest = divmod(content, 1 << 17)
    sizes = [1 << 17] * whole + ([rest] if rest else [])
    blocks = [
        ((size << 3) | 0b010 | (place == len(sizes) - 1)).to_bytes(3, "little") + b"\0"
        for place, size in enumerate(sizes)
    ]
    magic, window = (0xFD2FB528).to_bytes(4, "little"), bytes([7 << 3])  # of 128 KiB
    said = b"" if stated is None else stated.to_bytes(8, "little")
    flags = bytes([0 if stated is None else 3 << 6])
    return magic + flags + window + said + b"".join(blocks)


def test_the_frames_are_what_they_seem():
    good = frame(300_000, 300_000)
    assert zstandard.ZstdDecompressor().decompress(good) == bytes(300_000)
    unsaid = zstandard.ZstdDecompressor().decompressobj().decompress(frame(300_000, None))
    assert unsaid == bytes(300_000)
    numbers = codec("raw+zstd").decode(frame(400, 400), "f4", [100])
    assert torch.equal(numbers, torch.zeros(100))


def refused(work) -> str:
    """Why it was refused, with hardly any memory used."""
    tracemalloc.start()
    try:
        with pytest.raises(CoterieError) as why:
            work()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MOST
    return str(why.value)


@pytest.mark.parametrize(
    ("content", "stated"),
    [
        (4 * MANY, 4 * MANY),  # honest about its size
        (4 * MANY, 400),  # what is expected, and a lie
        (4 * MANY, None),
        (4 * MANY, 2**64 - 2),
        (400, 2**63),
        (4, 400),  # less than it says
    ],
)
def test_a_frame_unfolds_into_what_its_array_takes_or_not_at_all(content, stated):
    bomb = frame(content, stated)
    assert len(bomb) < 1 << 15
    for spec in ("raw+zstd", "raw+zstd:level=19"):
        assert "payload" in refused(lambda spec=spec: codec(spec).decode(bomb, "f4", [100]))


TWO = bytes(8) + b"\0\1" + bytes(5)  # zeros at the places 0 and 1, of 27 bits each
BOMBS = {
    "zstd": ("raw+zstd", frame(4 * MANY, 4 * MANY)),
    "zstd, of halves": ("fp16+zstd", frame(2 * MANY, 2 * MANY)),
    "topk": ("topk:share=1e-8", TWO),
    "topk+zstd": ("topk:share=1e-8+zstd", zstandard.ZstdCompressor().compress(TWO)),
}


def message(spec, payload, shape=(MANY,), body=None):
    header = {"body": body or {"x": {"$tensor": 0}}, "arrays": [["f4", shape, len(payload), spec]]}
    return Message(json.dumps(header).encode(), (payload,))


@pytest.mark.parametrize("name", BOMBS)
def test_a_message_holds_no_more_numbers_than_its_receiver_can_expect(name):
    spec, payload = BOMBS[name]
    assert str(MANY) in refused(lambda: Wire(LAYOUT).unpack(message(spec, payload)))
    odd = message(spec, payload, (1 << 20, 1 << 20, 1 << 20))
    refused(lambda: Wire(LAYOUT).unpack(odd))


def test_many_small_arrays_are_no_way_around_it():
    """Ten thousand arrays of one payload, each of another shape: none is decoded."""
    payload = frame(4 << 20, 4 << 20)
    shapes = [[1 << 20 >> k, 1 << k, *[1] * ones] for ones in range(7) for k in range(20)]
    arrays = [["f4", shape, len(payload), "raw+zstd"] for shape in shapes]
    header = {"body": {"x": [{"$tensor": n} for n in range(len(arrays))]}, "arrays": arrays}
    many = Message(json.dumps(header).encode(), (payload,) * len(arrays))
    assert sum(1 << 20 for _ in shapes) > SMALL
    refused(lambda: Wire(LAYOUT).unpack(many))


def test_honest_messages_are_far_from_the_bound():
    """A model that many have is decoded once; coarse codecs and sparse ones go through."""
    large = Layout.of(torch.nn.Linear(1000, 100))
    wire, model = Wire(large), torch.randn(large.size)
    for spec in ("raw", "raw+zstd", "qsgd:levels=1", "topk:share=0.001", "topk:share=0.001+zstd"):
        models = [model.clone() for _ in range(50)]
        packed = wire.pack({"models": models}, choices={id(m): (codec(spec), 0) for m in models})
        assert len(wire.unpack(packed)["models"]) == 50
    zeros = torch.zeros(SMALL // 2)
    packed = wire.pack({"x": zeros}, choices={id(zeros): (codec("raw+zstd"), 0)})
    assert packed.size < 1 << 13
    assert torch.equal(wire.unpack(packed)["x"], zeros)


@pytest.mark.parametrize("name", BOMBS)
def test_a_malicious_server_does_not_fill_a_members_memory(name, tmp_path):
    pytest.importorskip("flwr", reason="a real federation needs the extra 'flower'")
    from coterie.engines.flower.engine import ORDER
    from coterie.engines.flower.messages import Digests, Packet, opened, sealed
    from faked_grid import Federation, tree
    from support import Stop, stop_after

    fed = Federation(tmp_path, tree(run={"rounds": 2}))
    with pytest.raises(Stop):
        fed.serve(watch=stop_after(1))
    spec, payload = BOMBS[name]
    asked = {"order": "9.0", "round": 8, "task": "train", "config": {}}
    body = {**asked, "arrays": {"0": {"$tensor": 0}}}
    packet = Packet(ORDER, fed.served.run, message(spec, payload, body=body), {"stage": "9"})
    content = sealed(packet, Digests())
    tracemalloc.start()
    answer, _ = opened(fed.grid.members[0].answer(content), {})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert answer.kind == "refused"
    assert peak < MOST
    for said in (answer.told["text"], *fed.heard[-1:]):  # on both sides
        assert f"claims {MANY} numbers" in said


@pytest.mark.parametrize(
    ("key", "number"),
    [("clients", 2**63), ("clients", 10**9), ("clients", 0), ("least", 2**62), ("least", -1)],
)
def test_a_member_makes_no_room_for_more_clients_than_there_can_be(key, number, tmp_path):
    pytest.importorskip("flwr", reason="a real federation needs the extra 'flower'")
    from coterie.engines.flower.messages import Digests, Packet, opened, sealed
    from faked_grid import Federation, tree

    fed = Federation(tmp_path, tree(2, run={"rounds": 1}))
    fed.serve()
    (agreed,) = (tmp_path / "site0/runs").glob("*/agreed.json")
    terms = {**json.loads(agreed.read_text()), key: number}
    packet = Packet("enrol", "f" * 16, Message(b"{}", ()), {"json": json.dumps(terms)})
    tracemalloc.start()
    with fed.in_memory():
        answer, _ = opened(fed.grid.members[0].answer(sealed(packet, Digests())), {})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert answer.kind == "refused"
    assert "the server's terms are for" in answer.told["text"]
    assert peak < MOST
