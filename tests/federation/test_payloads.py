import pytest
import torch
from refusals import refusal

from fedlight import Client, Ditto, FedBiscuit, FedProx, FewFedPIT, LocalOnly, Scaffold, Visit, Work
from fedlight.federation.algorithm import Algorithm, message_to
from fedlight.federation.algorithms import FedRep, GlobalThenLocal
from fedlight.federation.algorithms.lora import FedSALoRA, FFALoRA, ProductAverage, RoLoRA
from fedlight.federation.forward import FedKSeed
from fedlight.federation.payloads import predict_payloads
from fedlight.support.settings_record import described

STATE = {"v": torch.ones(3), "w": torch.ones(2, 2)}
PARAMETERS, BOTH = {"v": (3,), "w": (2, 2)}, {"v": (3,), "w": (2, 2), "control.v": (3,), "control.w": (2, 2)}


def shapes(state):
    assert all(value.is_meta for value in state.values())
    return {name: tuple(value.shape) for name, value in state.items()}


def predicted(algorithm, visits, client, state=STATE):
    found = predict_payloads(algorithm, visits, client, state)
    return [(shapes(one.down), shapes(one.up), shapes(one.start)) for one in found]


A, B = {"q.lora_A.default.weight": (2, 5)}, {"q.lora_B.default.weight": (3, 2), "q.lora_B.default.bias": (3,)}
HEAD = {"head.weight": (1, 3)}
LORA = {name: torch.ones(shape) for name, shape in (A | B | HEAD).items()}
V, W = {"v": (3,)}, {"w": (2, 2)}
OWN_V, OWN_W = {"own_state": {"v": torch.ones(3)}}, {"own_state": {"w": torch.ones(2, 2)}}
OWN_B = {"own_state": {name: torch.ones(shape) for name, shape in B.items()}}
LATER = Scaffold()  # its server has controls by now
LATER.load_state_dict({"control": {"v": torch.ones(3, dtype=torch.float64)}})


@pytest.mark.parametrize(
    ("algorithm", "memory", "ways"),
    [
        (Algorithm(), {}, [(PARAMETERS, PARAMETERS)]),
        (FedProx(), {}, [(PARAMETERS, PARAMETERS)]),
        (FedBiscuit(), {}, [(PARAMETERS, PARAMETERS)]),  # without a run: the state is that of one selector
        (FewFedPIT(), {}, [(PARAMETERS, PARAMETERS)]),  # before anybody was asked for candidates
        (Scaffold(), {}, [(BOTH, BOTH)]),
        (Scaffold(), {"control": {"v": torch.ones(3)}}, [(BOTH, BOTH)]),
        (LATER, {}, [(BOTH, BOTH)]),
        (LocalOnly(), {}, [(PARAMETERS, {})]),
        (LocalOnly(), OWN_W, [(V, {})]),
        (GlobalThenLocal(), OWN_W, [(PARAMETERS, PARAMETERS)]),
        (FedRep(["v"], together=True), {}, [(PARAMETERS, W)]),
        (FedRep(["v"], together=True), OWN_V, [(W, W)]),
        (Ditto(), {}, [(PARAMETERS, PARAMETERS), ({}, {})]),
        (FedRep(["v"]), {}, [(PARAMETERS, {}), ({}, W)]),
        (FedRep(["v"]), OWN_V, [(W, {}), ({}, W)]),
        (FFALoRA(), {}, [(B | HEAD, B | HEAD)]),
        (FedSALoRA(), {}, [(A | B | HEAD, A | HEAD)]),
        (FedSALoRA(), OWN_B, [(A | HEAD, A | HEAD)]),
        (ProductAverage(), {}, [(A | B | HEAD, A | B | HEAD)]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Algorithm) else None,
)
def test_what_goes_down_and_up_by_the_hooks_of_the_algorithm(algorithm, memory, ways):
    """And what a visit starts from: all parameters, but for a factor that is frozen."""
    kept, client = {key: dict(value) for key, value in memory.items()}, Client("a", 4, 1.0, memory)
    visits = algorithm.plan(0, [client], lambda client_id, split="train": 2)
    assert len({*visits}) == len(visits)  # as costs by visit are told apart by them
    of_lora = "lora" in type(algorithm).__module__
    start = PARAMETERS if not of_lora else B | HEAD if isinstance(algorithm, FFALoRA) else A | B | HEAD
    found = predicted(algorithm, visits, client, LORA if of_lora else STATE)
    assert found == [(down, up, start) for down, up in ways]
    assert memory == kept


def test_the_second_visit_of_a_client_knows_the_first_and_nothing_is_done_beside_the_reply():
    """FewFedPIT with candidates: down in the private visit, up in the public one, and no candidate is chosen."""
    algorithm = FewFedPIT(beta=0.5)
    algorithm._candidates.left = {"a": 3}
    algorithm._candidates.choose = None  # calling it would fail
    algorithm.plan(0, [Client("a", 4, 1.0)], lambda client_id, split="train": 2)
    visits = [Visit("a", 2, split) for split in ("train", "synthetic")]
    private, public = predicted(algorithm, visits, Client("a", 4, 1.0))
    assert (private, public) == ((PARAMETERS, {}, PARAMETERS), ({}, PARAMETERS, PARAMETERS))


@pytest.mark.parametrize(("round_idx", "up"), [(0, B | HEAD), (1, A | HEAD), (2, B | HEAD)])
def test_the_factor_that_ro_lora_sends_back_follows_from_the_plan(round_idx, up):
    algorithm, client = RoLoRA(), Client("a", 4, 1.0)
    visits = algorithm.plan(round_idx, [client], lambda client_id, split="train": 2)
    [found] = predict_payloads(algorithm, visits, client, LORA)
    assert (shapes(found.down), shapes(found.up)) == (A | B | HEAD, up)


@pytest.mark.parametrize("hook", ["send", "start_visit", "reply"])
def test_a_hook_that_looks_at_values_is_named(hook):
    def looks(self, *args):
        return {"w": torch.zeros(2)} if bool(args[-1 if hook != "reply" else 1]["w"].sum() > 0) else {}

    odd = type("Odd", (Algorithm,), {hook: looks})()
    with refusal("how many bytes Odd sends cannot be known before a round, as its send"):
        predict_payloads(odd, [Visit("a", 1)], Client("a", 1, 1.0), STATE)


@pytest.mark.parametrize(
    "algorithm",
    [
        *(Algorithm(), FedProx(0.5), Scaffold(), FewFedPIT(), LocalOnly(), FedBiscuit(local=FedProx(0.5))),
        *(Ditto(), FedRep(["v"], together=True), GlobalThenLocal(), FedKSeed(8)),
        *(FFALoRA(), RoLoRA(), FedSALoRA(), ProductAverage(0.9)),
    ],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_nothing_of_a_visit_is_kept_in_the_algorithm(algorithm):
    """Hooks of the client leave every attribute as it was, so any number of visits may be under way at once."""
    before = described(vars(algorithm))
    visits = []
    for visit in (Visit("a", 1), Visit("b", 1)):
        client = Client(visit.client_id, 1, 0.5, {"control": {"w": torch.full((2, 2), 3.0)}})
        visits.append(algorithm.start_visit(visit, client, message_to(algorithm, visit, client, STATE)))
    for visiting in visits:
        weights = {name: value + 1 for name, value in visiting.start.items()}
        gradients = {name: torch.ones_like(w) for name, w in weights.items()}
        algorithm.adjust_gradients(visiting, weights, gradients)
        algorithm.reply(visiting, weights, Work(1, 0.1, 1.0, 0.0, dict.fromkeys(weights, 0.1)))
    assert described(vars(algorithm)) == before
