import pytest
import torch
from thread_team import on_team

from fedlight.processes.work import for_each, is_first, once


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_each_item_is_computed_once_and_all_get_all_results_in_order(monkeypatch, size):
    computed = []

    def square(number):
        computed.append(number)
        return torch.tensor(number) ** 2

    found = on_team(monkeypatch, size, lambda rank: for_each(square, iter(range(4))))
    assert [[int(one) for one in own] for own in found] == [[0, 1, 4, 9]] * size
    assert sorted(computed) == [0, 1, 2, 3]
    assert on_team(monkeypatch, size, lambda rank: for_each(square, [])) == [[]] * size


def test_one_process_alone_computes_what_all_get(monkeypatch):
    asked = []

    def body(rank):
        return once(lambda: asked.append(rank) or {"rank": rank}), is_first()

    assert on_team(monkeypatch, 3, body) == [({"rank": 0}, rank == 0) for rank in range(3)]
    assert asked == [0]


def test_an_error_of_one_is_no_result_of_the_others(monkeypatch):
    def fail(number):
        if number == 1:
            raise ValueError("one")
        return number

    with pytest.raises(ValueError, match="one"):
        on_team(monkeypatch, 2, lambda rank: for_each(fail, range(3)))
