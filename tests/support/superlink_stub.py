"""Flower's own client of a SuperLink, joined to a SuperLink in this process that keeps messages and answers them."""

from dataclasses import dataclass, field
from types import SimpleNamespace

from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto import message_pb2, node_pb2, runtime_pb2
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import http_grid

from fedlight.flower.records import to_record

MIB = 2**20
httpx = http_grid.httpx  # Flower's own dependency


class Body(httpx.SyncByteStream):
    """Body of a response; counts the bytes that are read."""

    def __init__(self, data, link):
        self.data, self.link = data, link

    def __iter__(self):
        for start in range(0, len(self.data), MIB):
            part = self.data[start : start + MIB]
            self.link.read += len(part)
            yield part


@dataclass
class SuperLink:
    """SuperLink in memory; ``answer``: function from a node to its parcel, None for no answer.

    ``more`` are further objects of a node's reply, by node.
    """

    nodes: list[int]
    answer: object
    messages: list = field(default_factory=list)
    objects: dict = field(default_factory=dict)
    replies: dict = field(default_factory=dict)
    read: int = 0

    def grid(self):
        """Return Flower's client."""
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1
        grid = http_grid.HttpGrid("127.0.0.1:1", insecure=True, token="t")
        grid._run = SimpleNamespace(run_id=1)
        grid._runtime_client._client._transport = httpx.MockTransport(self.serve)
        return grid

    def serve(self, request):
        path = request.url.path.rsplit("/", 1)[-1].replace("-", "_")
        data = getattr(self, path)(request.content).SerializeToString()
        return httpx.Response(200, headers={"content-length": str(len(data))}, stream=Body(data, self))

    def get_nodes(self, content):
        return runtime_pb2.GetNodesResponse(nodes=[node_pb2.NodeInfo(node_id=one) for one in self.nodes])

    def push_messages(self, content):
        asked = runtime_pb2.PushAppMessagesRequest.FromString(content)
        for one in asked.messages_list:
            self.messages.append(one)
            self.reply(one)
        return runtime_pb2.PushAppMessagesResponse(
            message_ids=[one.metadata.message_id for one in asked.messages_list]
        )

    def reply(self, asked):
        node = asked.metadata.dst_node_id
        parcel = self.answer(node)
        if parcel is None:
            return
        request = Message(to_record(parcel), 1, "train")
        request.metadata.__dict__.update(vars(message_from_proto(asked).metadata))
        reply = Message(to_record(parcel), reply_to=request)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        self.objects |= {name: one.deflate() for name, one in get_all_nested_objects(reply).items()}
        proto = message_to_proto(remove_content_from_message(reply))
        self.replies[asked.metadata.message_id] = proto, get_object_tree(reply)

    def pull_messages(self, content):
        asked = runtime_pb2.PullAppMessagesRequest.FromString(content)
        there = [self.replies.pop(one) for one in asked.message_ids if one in self.replies]
        return runtime_pb2.PullAppMessagesResponse(
            messages_list=[one for one, _ in there], message_object_trees=[tree for _, tree in there]
        )

    def pull_object(self, content):
        asked = message_pb2.PullObjectRequest.FromString(content)
        return message_pb2.PullObjectResponse(
            object_found=True, object_available=True, object_content=self.objects[asked.object_id]
        )

    def confirm_message_received(self, content):
        return message_pb2.ConfirmMessageReceivedResponse()
