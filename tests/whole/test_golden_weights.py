import json
from copy import deepcopy

import pytest
import torch
from golden_weights import FILE, RUNS, differences, prepared, run

pytestmark = [
    pytest.mark.slow,  # half a minute together
    pytest.mark.filterwarnings("ignore"),  # of runs that other tests look at
    pytest.mark.skipif(
        torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
        reason="torch draws other last digits of normal numbers here than with AVX2",
    ),
]
GOLDEN = json.loads(FILE.read_text())


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("golden"))


def test_every_run_is_on_file():
    assert [*GOLDEN] == [*RUNS]
    # backwards, logging
    assert len({json.dumps(found["states"]) for found in GOLDEN.values()}) == len(RUNS) - 2


@pytest.mark.parametrize("name", RUNS)
def test_weights_and_visits_are_those_on_file(name, root):
    assert differences(name, run(name, root), GOLDEN[name]) == []


def test_a_difference_is_named_with_its_size():
    other = deepcopy(GOLDEN["fedavg"])
    norm = other["states"]["3"]["norm"]
    other["states"]["3"]["products"] = [number + 0.01 * norm for number in other["states"]["3"]["products"]]
    other["visits"] = ""
    of_weights, of_rows = differences("fedavg", other, GOLDEN["fedavg"])
    assert of_weights == "fedavg, round 3: weights are 1.0e-02 of their norm away"
    assert of_rows == "fedavg: other rows of visits.csv"
    other["states"]["3"]["numbers"] += 1
    [line, _] = differences("fedavg", other, GOLDEN["fedavg"])
    assert line == "fedavg, round 3: 50 numbers, on file 49"
