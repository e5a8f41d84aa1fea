"""Local training without a federation: each client goes on with its own model, and nothing is sent back.

The baseline for a client's gain by taking part.
"""

from fedlight.federation.algorithm import Algorithm
from fedlight.federation.client import OWN_STATE, Client, State, Update, Visit, Visiting, Work


class LocalOnly(Algorithm):
    """A client receives the initial model once and keeps the model that it trains; the global model stays as it was.

    Parameters that join the optimizer later are received, in the same way, when they do.
    """

    buffers = ("refuse", "local")  # nothing comes back that could be averaged

    def __init__(self) -> None:
        super().__init__()

    def send(self, visit: Visit, client: Client, state: State) -> State:
        kept: State = client.memory.get(OWN_STATE, {})
        return {name: value for name, value in state.items() if name not in kept}

    def start_visit(self, visit: Visit, client: Client, received: State) -> Visiting:
        kept: State = client.memory.get(OWN_STATE, {})
        return Visiting(visit, client, received, start=received | kept)

    def reply(self, visiting: Visiting, trained: State, work: Work) -> State:
        visiting.client.memory[OWN_STATE] = trained
        return {}

    def finish_visit(self, visiting: Visiting, movement: State, work: Work) -> Update | None:
        return None
