"""Flower's ClientApp: a node of a deployment."""

import json
import logging
import time
from functools import lru_cache

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedlight.flower.messages import FORMAT, Parcel, Refused
from fedlight.flower.node import Node
from fedlight.flower.records import from_record, to_record
from fedlight.flower.settings import config_arguments, is_secure, node_settings

app = ClientApp()
logger = logging.getLogger("fedlight")


@lru_cache(maxsize=4)
def _node(run_config: str, node_config: str, node_id: int) -> Node:
    """Return the node of these settings, made once in a process that serves several messages."""
    run = json.loads(run_config)
    settings, folder, clients, part = node_settings(json.loads(node_config), node_id)
    return Node(config_arguments(run), settings, folder, clients, part, is_secure(run))


@app.query()
@app.train()
def answer(message: Message, context: Context) -> Message:
    """Answer a message of the server; what cannot be done is answered with the reason."""
    try:
        # A node that was busy comes to a message late, and would train in vain.
        if (late := time.time() - message.metadata.created_at - message.metadata.ttl) > 0:
            raise Refused(
                f"the round of the message was over {late:.0f} s ago by this node's clock: compare it with the server's, "
                "or raise deadline-seconds in the app's settings"
            )
        asked = from_record(message.content)
        configs = (context.run_config, context.node_config)
        # As texts: a cache needs hashable keys.
        texts = [json.dumps(dict(config), sort_keys=True) for config in configs]
        reply = to_record(_node(*texts, context.node_id).answer(asked))
    except (Refused, ValueError, OSError, ModuleNotFoundError) as error:
        logger.warning("not done: %s", error)
        reply = to_record(Parcel({"format": FORMAT, "refused": str(error)[:2000]}))
    return Message(reply, reply_to=message)
