import pytest
from ranks import run_ranks
from stacked import Lora, Points, assert_same_rows, fit

from fedlight.federation.algorithms.scaffold import Scaffold

CLIENTS = dict.fromkeys("abcdefg", 8) | {"h": 3}


def train(rank, size, number):
    settings = {"strategy": "client_parallel", "devices": size}
    loop = {"rounds": 3, "clients_per_round": 7, "algorithm": Scaffold(), "settings": settings}
    trained, rows, groups, _ = fit(Lora(), Points(CLIENTS), number, **loop)
    return {name: p.tolist() for name, p in trained.items()}, rows, groups


@pytest.mark.parametrize("number", [3, 4])
def test_groups_are_shared_by_processes_with_the_same_bits(number, tmp_path):
    (alone,) = run_ranks(1, lambda rank: train(rank, 1, number), tmp_path / "one")
    both = run_ranks(2, lambda rank: train(rank, 2, number), tmp_path / "two")
    assert both[0][0] == both[1][0] == alone[0]
    assert_same_rows(both[0][1], alone[1], 1e-12)
    assert [row["client"] for row in both[0][1]] == [row["client"] for row in alone[1]]
    own = [list(each) for _, _, groups in both for each in groups]
    assert sorted(group for each in own for group in each) == sorted(g for each in alone[2] for g in each)
    assert max(map(len, own[0])) > 1
