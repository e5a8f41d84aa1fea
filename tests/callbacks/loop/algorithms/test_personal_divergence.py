import pytest
from plain_lightning import assert_equal
from stacked import Lora, Points, fit, furthest

from fedlight.federation.algorithms import Ditto, FedAvg, FedRep

NAN = float("nan")
ALGORITHMS = {
    "Ditto": lambda: Ditto(0.5, weighting="uniform"),
    "FedRep": lambda: FedRep(["lora_B"], weighting="uniform"),
    "FedPer": lambda: FedRep(["lora_B"], together=True, weighting="uniform"),
}


def without(algorithm, client):
    plan = algorithm.plan
    algorithm.plan = lambda *args: [visit for visit in plan(*args) if visit.client_id != client]
    return algorithm


@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_client_that_diverges_keeps_no_own_model_and_moves_nothing(name, at_once):
    """Others end as if it had never been asked."""
    broken = Points(broken={"a": NAN})
    found, rows, _, loop = fit(Lora(), broken, at_once, algorithm=ALGORITHMS[name]())
    assert {row["client"] for row in rows if row["reason"] == "diverged"} == {"a"}
    assert loop.own_state("a") is None
    expected, *_, other = fit(Lora(), broken, at_once, algorithm=without(ALGORITHMS[name](), "a"))
    assert furthest(found, expected) < 1e-6
    for client in "bcd":
        assert furthest(loop.own_state(client), other.own_state(client)) < 1e-6


def test_a_client_whose_personal_visit_alone_diverges_is_left_out_of_the_global_model_too():
    class Explodes(Ditto):
        def adjust_gradients(self, visiting, parameters, gradients):
            super().adjust_gradients(visiting, parameters, gradients)
            if visiting.visit.part and visiting.client.id == "b":
                for gradient in gradients.values():
                    gradient.mul_(NAN)

    found, rows, _, loop = fit(Lora(), Points(), rounds=1, algorithm=Explodes(0.5, weighting="uniform"))
    assert [row["split"] for row in rows if row["reason"]] == ["train", "personal"]
    assert {row["client"] for row in rows if row["reason"]} == {"b"}
    assert loop.own_state("b") is None
    expected, *_ = fit(Lora(), Points(), rounds=1, algorithm=without(FedAvg("uniform"), "b"))
    assert_equal(found, expected)
