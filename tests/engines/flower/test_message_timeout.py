"""A message whose remaining parts never arrive is given up, and the next one is taken."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("flwr", reason="a real federation needs the extra 'flower'")

from flwr.app import Message
from flwr.common.constant import SubStatus
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import ObjectTree, PullObjectResponse
from flwr.proto.runtime_pb2 import (
    AcquireTaskResponse,
    PullAppMessagesResponse,
    PullTaskInputResponse,
)

from coterie.engines.flower import runtime
from coterie.engines.flower.runtime import NodeWorker, client_app


class SuperNode:
    """One that offered a message, and was told by the server that its run is over."""

    def __init__(self) -> None:
        self.asked, self.told = 0, list[str]()

    def AcquireTask(self, request: Any) -> Any:
        return AcquireTaskResponse(token="t")

    def PullTaskInput(self, request: Any) -> Any:
        return PullTaskInputResponse()

    def PullMessages(self, request: Any) -> Any:
        trees = [ObjectTree(object_id="lost")]
        return PullAppMessagesResponse(messages_list=[ProtoMessage()], message_object_trees=trees)

    def PullObject(self, request: Any) -> Any:
        self.asked += 1
        return PullObjectResponse(object_found=True, object_available=False)

    def ConfirmMessageReceived(self, request: Any) -> None:
        raise AssertionError("it was not received")

    def PushTaskOutput(self, request: Any) -> None:
        self.told.append(request.sub_status)

    def close(self) -> None:
        pass


def never(content: Any) -> Message:
    raise AssertionError("there is no message to answer")


@pytest.mark.timeout(30)
def test_a_message_that_was_given_up_is_put_down(monkeypatch):
    node = SuperNode()
    monkeypatch.setattr(runtime, "_client", lambda *_: node)
    names = []

    def given_up(name: str) -> bool:
        names.append(name)
        return len(names) == 2  # at first it may still come

    assert NodeWorker("127.0.0.1:1", b"s", client_app(never), given_up).serve()
    assert names == ["lost", "lost"]
    assert node.asked == 2
    assert node.told == [SubStatus.FAILED]
