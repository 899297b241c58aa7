"""A client that answers in another's name, before a real SuperLink."""

import pytest

pytest.importorskip("flwr", reason="a real federation needs the extra 'flower'")

import httpx
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Message
from flwr.app.message.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PushMessagesRequest
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from coterie.channel.wire import Message as Ours
from coterie.engines.flower.hub import Hub
from coterie.engines.flower.keys import make_federation, read_client, read_server
from coterie.engines.flower.messages import Digests, Packet, sealed


def packet(kind):
    return sealed(Packet(kind, "run", Ours(b"{}", ())), Digests())


@pytest.fixture
def hub(tmp_path):
    keys = read_server(tmp_path / "federation")
    made = Hub(tmp_path / "hub", keys, ("127.0.0.1", 0), print)
    try:
        made.open()
        yield made
    finally:
        made.close()


@pytest.fixture(autouse=True)
def federation(tmp_path):
    make_federation(tmp_path / "federation", ["127.0.0.1"], ["a", "b"])
    return tmp_path / "federation"


def connected(hub, folder):
    """A client's line to the server, as a SuperNode has it."""
    private = load_ssh_private_key(read_client(folder).node_key.read_bytes(), None)
    proves = NodeAuthHttpInterceptor(private, private.public_key())
    says = RuntimeVersionHttpInterceptor(component_name="SuperNode")
    line = FleetHttpClient.from_server_address(
        hub.address, False, hub.keys.ca.read_bytes(), interceptors=[says, proves]
    )
    public = public_key_to_bytes(private.public_key())
    node = line.ActivateNode(ActivateNodeRequest(public_key=public, heartbeat_interval=30)).node_id
    return line, Node(node_id=node)


def push(line, node, answer):
    """Push an answer over this line, as this node."""
    answer.metadata.__dict__["_message_id"] = answer.object_id
    asked = PushMessagesRequest(
        node=node,
        messages_list=[message_to_proto(remove_content_from_message(answer))],
        message_object_trees=[get_object_tree(answer)],
    )
    got = line.PushMessages(asked)
    for name, part in get_all_nested_objects(answer).items():
        if name in got.objects_to_push:
            line.PushObject(
                PushObjectRequest(
                    node=node,
                    run_id=answer.metadata.run_id,
                    object_id=name,
                    object_content=part.deflate(),
                    session_id=got.session_id,
                )
            )


@pytest.mark.e2e
def test_a_client_answers_for_itself_only(hub, federation):
    """It even knows the name of the message that the other one is to answer."""
    line_a, a = connected(hub, federation / "clients/a")
    line_b, b = connected(hub, federation / "clients/b")
    order = Message(packet("order"), b.node_id, "query")
    (name,) = hub.grid.push_messages([order])
    order.metadata.__dict__["_message_id"] = name
    forged, honest = (Message(packet(kind), reply_to=order) for kind in ("forged", "honest"))
    assert forged.metadata.src_node_id == b.node_id
    with pytest.raises(httpx.HTTPStatusError) as refused:
        push(line_a, a, forged)
    assert refused.value.response.status_code == 403
    assert list(hub.grid.pull_messages([name])) == []
    with pytest.raises(httpx.HTTPStatusError):  # nor as the other, whose key it has not
        push(line_a, b, forged)
    push(line_b, b, honest)
    (came,) = hub.grid.pull_messages([name])
    assert came.content["head"]["kind"] == "honest"
