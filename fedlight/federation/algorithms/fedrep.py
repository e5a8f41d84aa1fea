"""FedRep and FedPer: clients share a body, and each keeps its own head.

FedRep: Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021,
https://arxiv.org/abs/2102.07078, Algorithm 1. In round t a sampled client i receives the body phi^t and

    1. trains its head with the body fixed:  h_i <- h_i - lr * grad_h f_i(h_i, phi^t), for some steps, from its last head
    2. trains the body with the head fixed:  phi_i <- phi_i - lr * grad_phi f_i(h_i, phi_i)

and sends phi_i alone; the server averages the bodies. FedPer: Arivazhagan et al., "Federated Learning with Personalization
Layers", 2019, https://arxiv.org/abs/1912.00818, trains body and head in the same steps and sends the body (``together``).

In FedRep all steps on the body are ours to choose, where the paper makes one epoch: they are the steps of a visit, and those
on the head ``head_epochs`` times as many. A client starts from the head of the global model, which never moves and is sent
once. So metrics of the global model are those of the shared body under an untrained head: look at
``ClientAccuracy(own_models=True)``.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import Tensor

from fedlight.federation.algorithm import Algorithm, Weighting
from fedlight.federation.client import OWN_STATE, Client, State, Update, Visit, Visiting, Work
from fedlight.federation.protocols import Federation, NumBatches, optimized_parameters
from fedlight.support.checks import refuse_below

HEAD = "head"


class FedRep(Algorithm):
    """Averaging of the clients' bodies; heads stay with the clients.

    A client has two visits in a round; in ``visits.csv`` the first has the split ``head``. With ``together`` it has one.

    Args:
        private: patterns of the parameters of the head. A pattern is one part of a dotted name or several, such as
            ``lora_B`` or ``layers.11``, with ``*`` and ``?`` as in names of files.
        head_epochs: length of the visit that trains the head, in lengths of the other one, at least 1.
        together: whether head and body are trained in the same steps (FedPer); ``head_epochs`` plays no part then.
        weighting: of the clients, as for `Algorithm`.

    Raises:
        ValueError: a setting is out of range; in ``check``, where the patterns name no trained parameter, or all of them.

    Examples:
        >>> FedRep(private=["lora_B"]).is_private("model.layers.0.q_proj.lora_B.default.weight")
        True
        >>> FedRep(private=["head"]).is_private("heads.adapter0.body.weight")
        False
    """

    buffers = ("refuse", "local")

    def __init__(
        self,
        private: Sequence[str] = ("head", "classifier", "score"),
        head_epochs: int = 1,
        together: bool = False,
        weighting: Weighting = "unbiased",
    ) -> None:
        super().__init__(weighting)
        if not private:
            raise ValueError(f"private={private!r} must be a list of patterns, such as [head]")
        refuse_below(1, head_epochs=head_epochs)
        self.private, self.head_epochs, self.together = [*private], head_epochs, together

    def is_private(self, name: str) -> bool:
        """Return whether a parameter belongs to the head."""
        path = f".{name}.".replace("._orig_mod.", ".")  # which torch.compile puts into names
        return any(fnmatchcase(path, f"*.{pattern}.*") for pattern in self.private)  # whole parts

    # The server: it averages bodies

    def check(self, federation: Federation) -> None:
        super().check(federation)
        names = [*optimized_parameters(federation)]
        heads = [name for name in names if self.is_private(name)]
        if not heads:
            raise ValueError(
                f"private={self.private} names none of the {len(names)} trained parameters, such as "
                f"{names[0]}: give a part of the names of those that stay with the clients, or take FedAvg"
            )
        if len(heads) == len(names):
            raise ValueError(
                f"private={self.private} names all {len(names)} trained parameters, such as {names[0]}, "
                "so nothing would be shared: give a part of the names of the head alone, or take LocalOnly"
            )

    def plan(self, round_idx: int, cohort: Sequence[Client], num_batches: NumBatches) -> list[Visit]:
        bodies = super().plan(round_idx, cohort, num_batches)
        if self.together:
            return bodies
        return [
            visit
            for body in bodies
            for visit in (Visit(body.client_id, self.head_epochs * body.num_batches, part=HEAD), body)
        ]

    def send(self, visit: Visit, client: Client, state: State) -> State | None:
        if not self.together and visit.part != HEAD:
            return None  # the visit for the head has received the body
        kept: State = client.memory.get(OWN_STATE, {})
        return {name: value for name, value in state.items() if name not in kept}

    def finish_visit(self, visiting: Visiting, movement: State, work: Work) -> Update | None:
        return None if visiting.visit.part == HEAD else super().finish_visit(visiting, movement, work)

    # The client: a visit for its head, then one for the body

    def start_visit(self, visit: Visit, client: Client, received: State) -> Visiting:
        start = received | client.memory.get(OWN_STATE, {})
        trains_head = visit.part == HEAD
        fixed = [] if self.together else [name for name in start if self.is_private(name) != trains_head]
        return Visiting(visit, client, received, start, notes={"fixed": fixed})

    def adjust_gradients(
        self, visiting: Visiting, parameters: Mapping[str, Tensor], gradients: dict[str, Tensor]
    ) -> None:
        for name in visiting.notes["fixed"]:
            gradients.pop(name, None)  # then neither momentum nor weight decay moves it

    def reply(self, visiting: Visiting, trained: State, work: Work) -> State:
        head = {name: value for name, value in trained.items() if self.is_private(name)}
        visiting.client.memory[OWN_STATE] = head
        if visiting.visit.part == HEAD:
            return {}
        return {name: value for name, value in trained.items() if name not in head}
