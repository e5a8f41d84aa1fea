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


def predicted(algorithm, memory=None, splits=("train",)):
    client = Client("a", 4, 1.0, memory or {})
    found = predict_payloads(algorithm, [Visit("a", 2, split) for split in splits], client, STATE)
    return [(shapes(one.down), shapes(one.up), shapes(one.start)) for one in found]


@pytest.mark.parametrize(
    ("algorithm", "memory", "down", "up"),
    [
        (Algorithm(), {}, PARAMETERS, PARAMETERS),
        (FedProx(), {}, PARAMETERS, PARAMETERS),
        (FedBiscuit(), {}, PARAMETERS, PARAMETERS),  # without a run: the state is that of one selector
        (FewFedPIT(), {}, PARAMETERS, PARAMETERS),
        (Scaffold(), {}, BOTH, BOTH),
        (Scaffold(), {"control": {"v": torch.ones(3)}}, BOTH, BOTH),
        (LocalOnly(), {}, PARAMETERS, {}),
        (LocalOnly(), {"own_state": {"w": torch.ones(2, 2)}}, {"v": (3,)}, {}),
        (GlobalThenLocal(), {"own_state": {"w": torch.ones(2, 2)}}, PARAMETERS, PARAMETERS),
        (FedRep(["v"], together=True), {}, PARAMETERS, {"w": (2, 2)}),
        (FedRep(["v"], together=True), {"own_state": {"v": torch.ones(3)}}, {"w": (2, 2)}, {"w": (2, 2)}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Algorithm) else None,
)
def test_what_goes_down_and_up_by_the_hooks_of_the_algorithm(algorithm, memory, down, up):
    kept = {key: dict(value) for key, value in memory.items()}
    assert predicted(algorithm, memory) == [(down, up, PARAMETERS)]
    assert memory == kept


def test_a_server_that_has_controls_by_now_mixes_no_devices():
    algorithm = Scaffold()
    algorithm.load_state_dict({"control": {"v": torch.ones(3, dtype=torch.float64)}})
    assert predicted(algorithm) == [(BOTH, BOTH, PARAMETERS)]


def test_the_second_visit_of_a_client_knows_the_first_and_nothing_is_done_beside_the_reply():
    """FewFedPIT with candidates: down in the private visit, up in the public one, and no candidate is chosen."""
    algorithm = FewFedPIT(beta=0.5)
    algorithm._candidates.left = {"a": 3}
    algorithm._candidates.choose = None  # calling it would fail
    algorithm.plan(0, [Client("a", 4, 1.0)], lambda client_id, split="train": 2)
    private, public = predicted(algorithm, splits=("train", "synthetic"))
    assert (private, public) == ((PARAMETERS, {}, PARAMETERS), ({}, PARAMETERS, PARAMETERS))


@pytest.mark.parametrize(
    ("algorithm", "memory", "expected"),
    [
        (Ditto(), {}, [(PARAMETERS, PARAMETERS, PARAMETERS), ({}, {}, PARAMETERS)]),
        (FedRep(["v"]), {}, [(PARAMETERS, {}, PARAMETERS), ({}, {"w": (2, 2)}, PARAMETERS)]),
        (
            FedRep(["v"]),
            {"own_state": {"v": torch.ones(3)}},
            [({"w": (2, 2)}, {}, PARAMETERS), ({}, {"w": (2, 2)}, PARAMETERS)],
        ),
    ],
    ids=["Ditto", "FedRep at first", "FedRep again"],
)
def test_two_visits_on_the_same_data_send_what_each_part_does(algorithm, memory, expected):
    kept, client = {key: dict(value) for key, value in memory.items()}, Client("a", 4, 1.0, memory)
    visits = algorithm.plan(0, [client], lambda client_id, split="train": 2)
    assert len({*visits}) == 2  # as costs by visit are told apart by them
    found = predict_payloads(algorithm, visits, client, STATE)
    assert [(shapes(one.down), shapes(one.up), shapes(one.start)) for one in found] == expected
    assert memory == kept


A, B = {"q.lora_A.default.weight": (2, 5)}, {"q.lora_B.default.weight": (3, 2), "q.lora_B.default.bias": (3,)}
HEAD = {"head.weight": (1, 3)}
LORA = {name: torch.ones(shape) for name, shape in (A | B | HEAD).items()}


@pytest.mark.parametrize(
    ("algorithm", "memory", "down", "up", "start"),
    [
        (FFALoRA(), {}, B | HEAD, B | HEAD, B | HEAD),
        (FedSALoRA(), {}, A | B | HEAD, A | HEAD, A | B | HEAD),
        (FedSALoRA(), {n: torch.ones(s) for n, s in B.items()}, A | HEAD, A | HEAD, A | B | HEAD),
        (ProductAverage(), {}, A | B | HEAD, A | B | HEAD, A | B | HEAD),
    ],
    ids=["FFALoRA", "FedSALoRA at first", "FedSALoRA again", "ProductAverage"],
)
def test_what_of_an_adapter_goes_down_and_up(algorithm, memory, down, up, start):
    client = Client("a", 4, 1.0, {"own_state": memory} if memory else {})
    [found] = predict_payloads(algorithm, [Visit("a", 2)], client, LORA)
    assert [shapes(one) for one in (found.down, found.up, found.start)] == [down, up, start]


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
