"""Parsers of everything that arrives from others, with inputs that nobody honest would send.

What comes out is of the right kind and size, or there is one of our own errors: never another
exception, more memory than is stated, or more time. By default each parser gets a fixed choice of
inputs; ``COTERIE_FUZZ_SECONDS=600 pytest tests/attacks/test_parsers.py`` goes on for ten minutes.
"""

import base64
import copy
import io
import json
import math
import socket
import zlib
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

pytest.importorskip("flwr", reason="a real federation needs the extra 'flower'")

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from aggregating import MESSAGES, SESSION, Play, vectors
from coterie.channel.channel import Channel, answers
from coterie.channel.checks import vet, vet_message
from coterie.channel.compression.codecs import codec
from coterie.channel.compression.coding import decode
from coterie.channel.privacy.encoding import Form
from coterie.channel.privacy.secagg import TooFew
from coterie.channel.privacy.secagg.frames import Reader
from coterie.channel.wire import Message, Wire, content_of, digest_of
from coterie.client.runtime import ClientRuntime
from coterie.core.messages import Order
from coterie.core.weights import Layout, Weights
from coterie.deploy.allowed_names import checked_config
from coterie.deploy.terms import Described, in_common, seen_from_server, shell, unlike
from coterie.engines.flower.gate import Gate, Limits, signed_by
from coterie.engines.flower.keys import make_federation, make_request, read_server
from coterie.engines.flower.messages import Digests, Packet, opened, sealed
from coterie.engines.flower.request import read_request
from coterie.engines.loop import Loop
from coterie.errors import CoterieError, DataError
from faked_grid import Federation, tree
from mutating import changed_bytes, changed_text, changed_tree, fuzz, odd_values
from support import Stop, experiment, stop_after

LAYOUT = Layout.of(torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 2)))
WIRE = Wire(LAYOUT)
PARSERS = 28  # parts of a long run, some of which get more than one
SHARE = 1 / PARSERS
WIDE = 400 << 20  # bytes: what the bound of a message allows, with its copies
SPECS = [
    "raw",
    "fp16",
    "bf16",
    "qsgd",
    "qsgd:levels=300,bucket=all",
    "topk:share=0.1",
    "topk:share=0.6",
    "raw+zstd",
    "qsgd+zstd:level=9",
    "topk+zstd",
]


def weights():
    return Weights(LAYOUT, torch.linspace(-1, 1, LAYOUT.size))


def messages():
    """Orders and answers as they travel, encoded in different ways."""
    model, other = weights(), torch.arange(12, dtype=torch.int64).reshape(3, 4)
    part = model.only([LAYOUT.layers[0]])
    found = []
    for spec in SPECS:
        body = {
            "order": "1.0",
            "round": 1,
            "task": "train",
            "config": {"epochs": 2, "pair": (1, 2.5), "by": {1: "a", 2: None}},
            "arrays": {"0": model, "part": {"change": [part]}, "labels": other},
            "metrics": {"loss": 0.25},
        }
        choices = {id(t): (codec(spec), 1) for t in (model.vector, part.vector)}
        found.append(WIRE.pack(body, choices=choices))
    return found


VALID = messages()
HEADERS = [json.loads(message.header) for message in VALID]


# --- messages, codecs and changes -----------------------------------------------------------------


def read(message):
    """All that both sides do with a message before they know what it says."""
    body = WIRE.unpack(message)
    assert isinstance(body, dict)
    assert all(isinstance(key, str) for key in body)
    kinds = WIRE.kinds(message)
    assert all(isinstance(n, int) for n in kinds.values())
    assert sum(kinds.values()) == message.size
    assert len(digest_of(message)) == len(content_of(message)) == 64
    return body


def test_messages_in_one_piece():
    def parse(data):
        message = Message.from_bytes(data)
        assert message.size == len(data)
        read(message)

    inputs = changed_bytes([message.to_bytes() for message in VALID])
    fuzz(parse, inputs, memory=WIDE, share=SHARE)


def test_messages_whose_checksum_is_right_all_the_same():
    def parse(data):
        check = zlib.crc32(data[8:], zlib.crc32(data[:4]))
        message = Message.from_bytes(data[:4] + check.to_bytes(4, "little") + data[8:])
        read(message)

    inputs = changed_bytes([message.to_bytes() for message in VALID])
    fuzz(parse, inputs, 200, memory=WIDE, share=2 * SHARE)


def test_headers_of_messages():
    def parse(given):
        text, number = given
        read(Message(text, VALID[number].payloads))

    inputs = st.integers(0, len(VALID) - 1).flatmap(
        lambda n: st.tuples(changed_text([HEADERS[n]]), st.just(n))
    )
    fuzz(parse, inputs, 200, memory=WIDE, share=2 * SHARE)


@pytest.mark.parametrize("spec", SPECS)
def test_codecs(spec):
    made = codec(spec)
    array = torch.linspace(-3, 3, 60).reshape(5, 12)
    payload = bytes(made.encode(array, 1))

    def parse(given):
        data, shape, dtype = given
        found = made.decode(data, dtype, shape)
        assert list(found.shape) == shape
        assert found.dtype == {"f4": torch.float32, "f8": torch.float64, "u1": torch.uint8}[dtype]

    shapes = st.sampled_from([[5, 12], [60], [], [1], [61], [0, 5], [2**20], [4, 15], [-1, -60]])
    inputs = st.tuples(changed_bytes([payload]), shapes, st.sampled_from(["f4", "f8", "u1"]))
    fuzz(parse, inputs, 60, memory=WIDE, share=SHARE / 5)
    assert torch.equal(made.decode(payload, "f4", [5, 12]), made.decode(payload, "f4", [5, 12]))


def test_texts_of_codecs():
    def parse(data):
        text = data.decode("utf-8", "replace")
        made = codec(text)
        assert codec(made.spec).spec == made.spec
        with suppress(CoterieError):
            made.decode(b"", "f4", [7])

    fuzz(parse, changed_bytes([spec.encode() for spec in SPECS]), share=SHARE)


def test_changes_laid_upon_what_they_are_changes_of():
    model = weights()

    def parse(tree):
        body = unpacked(tree)
        found = decode(body.get("arrays"), {"0": model, "part": model, "labels": None}, LAYOUT)
        assert all(isinstance(array, Weights | torch.Tensor) for array in found.values())

    tensors = VALID[0].payloads

    def unpacked(tree):
        header = {**HEADERS[0], "body": tree}
        return WIRE.unpack(Message(json.dumps(header).encode(), tensors))

    fuzz(parse, changed_tree([HEADERS[0]["body"]]), 120, memory=WIDE, share=SHARE)


# --- secure sums ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stages():
    """An honest play as it stands when the messages of each step are on their way."""
    play = Play(SESSION, vectors((3, 8, 20, 21), 3))
    found = {}
    for step in MESSAGES:
        found[step] = copy.deepcopy(play.to(step))
    return found


@pytest.mark.parametrize("step", MESSAGES, ids=lambda step: step.name.lower())
def test_messages_of_secure_sums(step, stages):
    """One message of four is another one: its receiver refuses it, and nothing else happens."""

    def parse(blob):
        play = copy.deepcopy(stages[step])
        honest = play.pending[8]
        play.pending[8] = blob
        try:
            play.advance()
        except TooFew:
            return
        if blob != honest:
            assert 8 in play.refused or 8 in play.sum.rejected

    fuzz(parse, changed_bytes([stages[step].pending[8]]), 25, share=SHARE / 5)


def test_fields_of_secure_messages():
    def parse(data):
        reader = Reader("test", data)
        kind = reader.number(1) % 4
        if kind == 0:
            clients = reader.clients()
            assert list(clients) == sorted(set(clients))
        elif kind == 1:
            table = reader.table(5)
            assert all(len(row) == 5 for row in table.values())
        elif kind == 2:
            assert len(reader.take(reader.number())) <= len(data)
        else:
            assert reader.count(8) * 8 <= len(data)
        reader.done()

    rows = (3).to_bytes(4, "big") + b"".join(n.to_bytes(4, "big") + bytes(5) for n in (1, 2, 9))
    clients = (2).to_bytes(4, "big") + (4).to_bytes(4, "big") + (7).to_bytes(4, "big")
    examples = [b"\0" + clients, b"\1" + rows, b"\2" + (3).to_bytes(4, "big") + b"abc", b"\3"]
    fuzz(parse, changed_bytes(examples), share=SHARE)


def test_forms_that_clients_tell():
    """What a client says that its part of a sum is made of, as the server reads it."""
    form = Form.of({"model": weights(), "x": torch.zeros(2, 3)}, LAYOUT)

    def parse(tree):
        found = Form.from_tree(tree, LAYOUT)
        assert found.size >= 0
        assert found.to_tree() == tree
        assert set(found.layers) == {name for name, *_ in found.parts}
        hash(found.parts)
        if found.size < 10**6:
            assert set(found.arrays(np.zeros(found.size))) == set(found.layers)

    assert Form.from_tree(form.to_tree(), LAYOUT).parts == form.parts
    fuzz(parse, changed_tree([form.to_tree()]), 120, memory=WIDE, share=SHARE)


# --- a real federation ----------------------------------------------------------------------------

DESCRIBED = {
    "kind": "table",
    "shape": [4],
    "samples": "float32",
    "labels": "int64",
    "width": [],
    "classes": ["a", "b"],
    "targets": 2,
    "vocabulary": 0,
    "sizes": [10, 2, 3],
    "groups": 1,
    "name": "north",
}


def test_descriptions_of_data():
    def parse(text):
        try:
            told = json.loads(text)
        except (ValueError, RecursionError):
            return  # as whoever reads it does
        found = Described.from_json(told)
        assert type(found.kind) is type(found.name) is str
        assert all(type(n) is int for n in (*found.shape, *found.sizes, *found.width))
        assert len(shell(found, found.sizes).train) == found.sizes[0]
        honest = Described.from_json(DESCRIBED)
        like, odd = in_common({0: honest, 1: found, 2: honest})
        assert odd.keys() <= {1}
        assert isinstance(unlike(found, like), str)
        seen_from_server(like, {0: honest, 1: found}, 3)

    lone = {**DESCRIBED, "classes": None, "targets": 3, "width": [3], "labels": "float32"}
    fuzz(parse, changed_text([DESCRIBED, lone]), 200, share=SHARE)


def test_configurations_that_a_server_sends():
    from coterie.deploy.terms import travelling
    from coterie.experiment.config import Config

    config = tree(3, method={"name": "known-groups", "groups": "groups.json"})
    config |= {"privacy": {"secure": True}, "wire": {"up": "qsgd"}, "stop": {"patience": 3}}

    def parse(told):
        if not isinstance(told, dict):
            return  # the member looks into it
        made = checked_config(travelling(told), simulated=True)
        assert isinstance(made, Config)
        assert made.data.folder is None
        assert made.model.start is None

    fuzz(parse, changed_tree([config, Config().model_dump(mode="json")]), 150, share=SHARE)


# What a head of ours may be in Flower's records.
PLAIN = st.sampled_from(
    [-1, 0, 2**63 - 1, 0.5, math.nan, math.inf, "", "x", b"", b"{}", True, [1], ["a"], [b""], [0.5]]
)


@st.composite
def packets(draw, examples):
    """Parcels whose head, arrays or records are others."""
    content = draw(st.sampled_from(examples))
    head, arrays = dict(content["head"]), dict(content["arrays"])
    for _ in range(draw(st.integers(1, 3))):
        change = draw(st.sampled_from(("put", "put", "drop", "header", "json", "array", "record")))
        keys = sorted(head)
        if change == "put" and keys:
            head[draw(st.sampled_from([*keys, "more"]))] = draw(PLAIN)
        elif change == "drop" and keys:
            del head[draw(st.sampled_from(keys))]
        elif change == "header" and isinstance(head.get("header"), bytes) and head["header"]:
            with suppress(ValueError):
                odd = odd_values(2**70)
                changed = changed_tree([json.loads(head["header"])], odd)
                head["header"] = json.dumps(draw(changed)).encode()
        elif change == "json" and isinstance(head.get("json"), str):
            with suppress(ValueError):
                told = json.loads(head["json"])
                head["json"] = json.dumps(draw(changed_tree([told], odd_values(2**70))))
        elif change == "array" and arrays:
            name = draw(st.sampled_from(sorted(arrays)))
            data = draw(changed_bytes([arrays[name].data]))
            arrays[name] = Array("uint8", (len(data),), "coterie", data)
        elif change == "record" and draw(st.integers(0, 4)) == 0:
            return draw(
                st.sampled_from(
                    [
                        RecordDict(),
                        RecordDict({"head": ArrayRecord(), "arrays": ConfigRecord()}),
                        RecordDict({"head": ConfigRecord(head)}),
                        RecordDict({"arrays": ArrayRecord(arrays)}),
                    ]
                )
            )
    return RecordDict({"head": ConfigRecord(head), "arrays": ArrayRecord(arrays)})


def test_parcels():
    examples = [sealed(Packet("order", "run", m, {"stage": "1"}), Digests()) for m in VALID]

    def parse(content):
        try:
            packet, came = opened(content, {})
        except KeyError:  # the digest of an array that the receiver asks for
            return
        assert isinstance(packet.kind, str)
        assert isinstance(packet.run, str)
        assert all(isinstance(data, bytes) for data in came.values())
        assert isinstance(packet.message.header, bytes)

    fuzz(parse, packets(examples), 150, share=SHARE)


@pytest.fixture(scope="module")
def enrolled(tmp_path_factory):
    """Members that wait for orders, and all messages that they got so far."""
    fed = Federation(tmp_path_factory.mktemp("fuzzed"), tree(2, data={"samples": 50}))
    with pytest.raises(Stop):
        fed.serve(watch=stop_after(1))
    return fed


KINDS = {"describe", "enrol", "start", "order", "refused", "stranger", "missing"}


def test_a_member_answers_whatever_a_server_sends(enrolled):
    got = [post.message.content for post in enrolled.grid.posts if post.client == 0]
    examples = [content for content in got if "alone" not in str(content["head"].get("header"))]
    assert {dict(content["head"])["kind"] for content in examples} == {"describe", "enrol", "order"}
    member = enrolled.grid.members[0]
    own = {p for p in enrolled.root.rglob("*") if "site0" not in p.parts}

    def parse(content):
        answer, _ = opened(member.answer(content), {})
        assert answer.kind in KINDS
        if answer.kind == "refused":
            assert 0 < len(answer.told["text"]) < 10_000

    with enrolled.in_memory():
        fuzz(parse, packets(examples), 80, memory=WIDE, seconds=60, share=3 * SHARE)
    assert {p for p in enrolled.root.rglob("*") if "site0" not in p.parts} == own


def test_a_server_reads_whatever_a_client_answers(tmp_path):
    """Scores, metrics and models as they reach a method: vetted, or rejected by name."""
    import coterie

    made = experiment(coterie.fedavg())
    plan = made.plan(tmp_path)
    samples, terms = plan.train_sizes, made.terms(plan.start)
    channel = Channel(Loop(plan), Wire(plan.start.layout), terms=terms, samples=samples)
    channel.begin(0)
    runtime, orders = ClientRuntime(plan), {}
    for number, task in enumerate(("train", "score")):
        order = Order(number, task, {"0": plan.start}, {"adapt_epochs": 0})
        exchange, (request,) = channel.prepare([order], {})
        (answer,) = runtime.answer([(number, request.message)])
        orders[number] = exchange, exchange.outgoing[number], answer

    def parse(given):
        number, text = given
        exchange, out, answer = orders[number]
        channel.phase.rejected.clear()
        exchange.bodies.clear()
        exchange.diverged.clear()
        channel.arrivals.take(exchange, out, Message(text, answer.payloads))
        if body := exchange.bodies.get(number):
            assert 0 <= body["examples"] <= channel.samples[number]
            assert all(type(v) in (int, float) for v in body["metrics"].values())
            for array in body["arrays"].values():
                found = array.vector if isinstance(array, Weights) else array
                assert torch.isfinite(found.double()).all()
            assert [a.client for a in answers(exchange)] == [number]
            return
        assert all(
            isinstance(why, str) and len(why) <= 300 for why in channel.phase.rejected.values()
        )

    inputs = st.sampled_from(sorted(orders)).flatmap(
        lambda n: st.tuples(st.just(n), changed_text([json.loads(orders[n][2].header)]))
    )
    fuzz(parse, inputs, 150, memory=WIDE, share=2 * SHARE)


def test_numbers_that_clients_report():
    """Vetted alone: what is let through are numbers by name, scores at most 1."""
    answer = {
        "examples": 5,
        "arrays": {},
        "metrics": {"val_accuracy": 0.5, "test_loss": 1.0, "test_count": 3},
        "scored": {"metrics": {"val_accuracy": 1.0}},
        "version": "1.0",
    }

    def parse(body):
        if not isinstance(body, dict):
            return  # what is unpacked from a message is one
        message = Message(json.dumps({"body": body, "arrays": []}).encode(), ())
        try:
            vet_message(message, 1000)
            vet(WIRE.unpack(message), 5, scoring=True)
        except (OverflowError, TypeError, ValueError, RecursionError, KeyError, AttributeError):
            return  # whoever reads answers of others turns any error into a rejection
        for scores in (body["metrics"], body.get("scored", {}).get("metrics", {})):
            for name, value in scores.items():
                assert type(value) in (int, float)
                assert not (name.endswith("_accuracy") and value > 1)

    fuzz(parse, changed_tree([answer]), 150, memory=WIDE, share=SHARE)


# --- requests, keys and files ---------------------------------------------------------------------


def test_requests_to_be_enrolled(tmp_path):
    make_request(tmp_path, "north")
    path, told = tmp_path / "other.json", json.loads((tmp_path / "request.json").read_text())

    def parse(text):
        path.write_bytes(text)
        found = read_request(path)
        assert {k: told[k] for k in ("name", "node")} == {"name": found.name, "node": found.node}

    fuzz(parse, changed_text([told]), 100, share=SHARE)


def test_headers_of_requests_at_the_gate(tmp_path):
    make_federation(tmp_path / "f", ["127.0.0.1"], ["a"])
    keys = read_server(tmp_path / "f")
    admits = signed_by(keys.clients, {0: 77})
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    private = load_ssh_private_key((tmp_path / "f/clients/a/node.key").read_bytes(), None)

    class Context:
        request = type("Request", (), {"headers": {}})

    NodeAuthHttpInterceptor(private, private.public_key()).intercept(Context, lambda _: None)
    honest = dict(Context.request.headers)
    assert admits(honest) == 77
    names = sorted(honest)

    def parse(given):
        name, value = given
        text = value.decode("latin-1")
        found = admits({**honest, name: text})
        same = text == honest[name]
        with suppress(ValueError):
            # Base64 has several texts for the same bytes.
            same = same or base64.b64decode(text, validate=True) == base64.b64decode(honest[name])
        assert found == (77 if same else None)

    inputs = st.sampled_from(names).flatmap(
        lambda n: st.tuples(st.just(n), changed_bytes([honest[n].encode("latin-1")]))
    )
    fuzz(parse, inputs, 100, share=SHARE)


REQUEST = (
    b"POST /v1/fleet/pull-messages HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
    b"Content-Type: application/octet-stream\r\n\r\nhello"
)
CHUNKED = (
    b"POST /v1/fleet/push-messages HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n0\r\n\r\n"
)


def test_requests_at_the_gate():
    """Nothing but a fleet request reaches what is behind it, and it stays open."""
    reached, behind = [], socket.create_server(("127.0.0.1", 0))
    behind.settimeout(0.0)
    quick = Limits(linger=0.01, headers=0.5, patience=0.3, upstream=0.05)
    gate = Gate("127.0.0.1", 0, behind.getsockname()[1], insecure=True, limits=quick)
    gate.start()

    def ask(data):
        with socket.create_connection(gate.address, timeout=20) as line:
            said = b""
            with suppress(ConnectionError):
                line.sendall(data)
                line.shutdown(socket.SHUT_WR)
                while piece := line.recv(65536):
                    said += piece
        with suppress(BlockingIOError):
            while True:
                came, _ = behind.accept()
                with came:
                    came.settimeout(0.2)
                    with suppress(OSError):
                        reached.append(came.recv(200))
        return said

    def parse(data):
        said = ask(data)
        assert not said or said.startswith(b"HTTP/1.1 ")
        assert all(not r or r.startswith(b"POST /v1/fleet/") for r in reached)
        reached.clear()

    try:
        fuzz(parse, changed_bytes([REQUEST, CHUNKED]), 40, share=SHARE)
        assert ask(REQUEST).startswith(b"HTTP/1.1 50")  # nobody answers behind it
    finally:
        gate.close()
        behind.close()


def archives():
    made = io.BytesIO()
    x, y = np.arange(12, dtype=np.float32).reshape(4, 3), np.array([0, 1, 0, 1])
    np.savez(made, x=x, y=y)
    packed = io.BytesIO()
    np.savez_compressed(packed, x=x, y=y)
    return [made.getvalue(), packed.getvalue()]


def test_files_of_newcomers(tmp_path):
    """What `coterie admit --client` reads; also what a member's own data is read from."""
    from coterie.data import load

    def parse(given):
        ending, data = given
        path = tmp_path / f"late.{ending}"
        path.write_bytes(data)
        options = {"label": "y"} if ending == "csv" else {}
        found = load(ending, path, **options)
        assert len(found.x) == len(found.y)

    table = b"a,b,y\n1,2,k\n3,4.5,l\n-1,1e3,k\n"
    inputs = st.one_of(
        st.tuples(st.just("npz"), changed_bytes(archives())),
        st.tuples(st.just("csv"), changed_bytes([table])),
    )
    fuzz(parse, inputs, 150, memory=WIDE, share=2 * SHARE)


@pytest.mark.parametrize("flag", [0x01, 0x20, 0x40], ids=["encrypted", "patched", "hidden"])
def test_an_archive_that_says_that_it_is_encrypted(flag, tmp_path):
    from coterie.data import load

    data = bytearray(archives()[0])
    at = data.find(b"PK\x01\x02")
    while at >= 0:  # what the archive's table says of each of its files
        data[at + 8] |= flag
        at = data.find(b"PK\x01\x02", at + 1)
    path = tmp_path / "late.npz"
    path.write_bytes(data)
    with pytest.raises(DataError, match="damaged or not the expected file"):
        load("npz", path)


def test_the_property_is_one_that_can_fail():
    """A parser with another exception, too much memory or too much time is found."""

    def fails(data):
        data[10]

    with pytest.raises(IndexError):
        fuzz(fails, changed_bytes([b"0123456789a"]), 200, share=0)
    with pytest.raises(AssertionError, match="bytes were allocated"):
        fuzz(lambda data: bytes(1 << 20), changed_bytes([b"x"]), 3, memory=1 << 19, share=0)
    fuzz(lambda data: (_ for _ in ()).throw(DataError("no")), changed_bytes([b"x"]), 3, share=0)
