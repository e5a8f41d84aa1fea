"""Local training without a federation: each client goes on with its own model, and nothing is sent back.

The baseline that says what a client gains by taking part.
"""

from torch import nn

from fedlight.federation.algorithm import Algorithm
from fedlight.federation.client import Client, Update, Visit, Work
from fedlight.federation.state import State

OWN = "own_state"


class LocalOnly(Algorithm):
    """A client receives the initial model once and keeps what it trains; the global model stays as it was.

    Parameters that join the optimizer later are received, in the same way, when they do.
    """

    buffers = ("refuse", "local")  # nothing comes back that could be averaged

    def __init__(self) -> None:
        super().__init__()

    def send(self, visit: Visit, client: Client, state: State) -> State:
        own: State = client.memory.get(OWN, {})
        return {name: value for name, value in state.items() if name not in own}

    def payloads(self, visit: Visit, client: Client, state: State) -> tuple[State, State]:
        return self.send(visit, client, state), {}

    def start_visit(self, visit: Visit, client: Client, received: State, module: nn.Module) -> State:
        own: State = client.memory.get(OWN, {})
        return received | own

    def reply(self, visit: Visit, client: Client, received: State, trained: State, work: Work) -> State:
        client.memory[OWN] = trained
        return {}

    def finish_visit(self, visit: Visit, client: Client, movement: State, work: Work) -> Update | None:
        return None

    def own_state(self, client: Client) -> State | None:
        own: State | None = client.memory.get(OWN)
        return own
