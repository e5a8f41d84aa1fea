"""Flower's ServerApp: the server of a deployment."""

from collections.abc import Mapping
from typing import Any

from flwr.app import Context, Message, MessageType
from flwr.serverapp import Grid, ServerApp

from fedlight.flower.messages import Parcel, Refused
from fedlight.flower.nodes import Failure
from fedlight.flower.records import from_record, to_record
from fedlight.flower.server import serve
from fedlight.flower.settings import config_arguments, is_secure

app = ServerApp()


class OverGrid:
    """Transport over Flower's grid."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def nodes(self) -> list[int]:
        """Return the nodes that are connected."""
        return sorted(self._grid.get_node_ids())

    def ask(self, parcels: Mapping[int, Parcel], timeout: float | None) -> dict[int, Parcel | Failure]:
        """Send each node its parcel, and return what has come back in time."""
        messages = [
            Message(to_record(parcel), dst_node_id=node, message_type=MessageType.TRAIN)
            for node, parcel in parcels.items()
        ]
        found: dict[int, Parcel | Failure] = {}
        for reply in self._grid.send_and_receive(messages, timeout=timeout):
            node = reply.metadata.src_node_id
            if node in parcels and node not in found:
                found[node] = _parcel(reply)
        return found


def _parcel(reply: Message) -> Parcel | Failure:
    """Return the parcel of a reply, or why there is none."""
    if reply.has_error():
        return Failure(f"the node has failed: {reply.error.reason or reply.error.code}")
    try:
        parcel = from_record(reply.content)
    except Refused as error:
        return Failure(f"refused: {error}")
    refused = parcel.header.get("refused")
    return parcel if refused is None else Failure(f"the node refuses: {str(refused)[:2000]}")


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds, or go on from the newest checkpoint."""
    run: dict[str, Any] = dict(context.run_config)
    serve(
        config_arguments(run),
        OverGrid(grid),
        min_clients=int(run.get("min-clients", 0)),
        deadline_seconds=float(run.get("deadline-seconds", 0)) or None,
        wait_seconds=float(run.get("wait-seconds", 600)),
        secure=is_secure(run),
    )
