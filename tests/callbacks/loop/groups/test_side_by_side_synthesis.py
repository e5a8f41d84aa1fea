import copy

import pytest
from nested import nested
from stacked import assert_same_rows, fit, furthest
from synthetic_data import Words

from fedlight import FewFedPIT, Lora, Optimization, Partition, SFTModule, SyntheticInstructionDataModule
from fedlight.federation.algorithms.self_made import FedMIT, FewFedWeight, LocalSelfGeneration

COLUMNS = {"instruction": "instruction", "input": "input", "response": "output", "client": "client"}
SETTINGS = {"columns": COLUMNS, "template": "POST : {instruction} {input}\nCHOICE :", "max_tokens": 64}
ALGORITHMS = {
    "FewFedPIT": lambda: FewFedPIT(0.5),
    "FewFedPIT by the global model": lambda: FewFedPIT(0.25, scorer="global"),
    "FedMIT": FedMIT,
    "FewFedWeight": FewFedWeight,
    "LocalSelfGeneration": LocalSelfGeneration,
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_visits_side_by_side_are_on_what_each_client_has_chosen(name, tiny_model, tmp_path):
    made = {"synthesis": Words(sizes=(6, 5, 4)), "keep": 2, "tokenizer": tiny_model, "batch_size": 2}
    made = nested(
        SyntheticInstructionDataModule, **SETTINGS, **made, partition=Partition("client"), val_share=0.0
    )
    source = "toy:instructions?num_clients=3&client_rows=6"

    def run(at_once):
        data = SyntheticInstructionDataModule(source, **copy.deepcopy(made))
        lora, sgd = Lora(dropout=0.1, rank=2), Optimization(name="SGD")
        module = SFTModule(tiny_model, lr=0.02, dtype="fp32", lora=lora, optimizer=sgd)
        loop = {"clients_per_round": 3, "local_steps": 2, "algorithm": ALGORITHMS[name]()}
        return fit(module, data, at_once, settings={"default_root_dir": tmp_path / str(at_once)}, **loop)

    (alone, rows, _, own), (beside, others, groups, other) = run(1), run(3)
    clients = sorted({row["client"] for row in rows})
    visits = 2 if name.startswith("FewFedPIT") else 1
    assert groups == [[clients] * visits] * 2
    assert furthest(beside, alone) < 1e-5
    assert_same_rows(others, rows, 1e-4)
    assert {row["split"] for row in rows} == ({"train", "synthetic"} if visits == 2 else {"mixed"})
    for client in clients if name == "LocalSelfGeneration" else ():
        assert furthest(own.own_state(client), other.own_state(client)) < 1e-5
