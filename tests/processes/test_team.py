import itertools
import math

import pytest
import torch
from refusals import refusal
from thread_team import on_team

from fedlight.processes import ALONE, Team, current_team, joining, share
from fedlight.processes.team import begin, end


@pytest.fixture
def run_team(monkeypatch):
    """Function from a size and work of a team to the results of its members."""
    return lambda size, work: on_team(monkeypatch, size, lambda rank: work(current_team()))


def test_each_gets_the_values_of_all_in_the_order_of_the_ranks_and_that_of_the_first(run_team):
    def work(team):
        gathered = team.gather({"rank": team.rank, "list": [None, "a", (1, 2.5)], "set": {3}})
        return gathered, team.broadcast(f"of {team.rank}")

    expected = [{"rank": r, "list": [None, "a", (1, 2.5)], "set": {3}} for r in range(3)]
    assert run_team(3, work) == [(expected, "of 0")] * 3


def test_floats_and_tensors_arrive_bit_by_bit_as_copies(run_team):
    numbers = [0.1, -0.0, math.inf, 5e-324]
    values = torch.tensor([*numbers, math.nan], dtype=torch.float64)
    sent = values.clone()
    for (found, copied), _ in run_team(2, lambda team: team.gather((numbers, sent))):
        assert [number.hex() for number in found] == [number.hex() for number in numbers]
        assert torch.equal(copied.view(torch.int64), values.view(torch.int64))
        copied.zero_()
    assert torch.equal(sent.view(torch.int64), values.view(torch.int64))


def test_a_view_is_sent_without_the_storage_behind_it():
    sizes = []
    large = torch.zeros(1_000_000)

    def exchange(data):
        sizes.append(len(data))
        return [data, data]

    assert Team(0, 2, exchange).gather({"row": large[7:9]})[1]["row"].tolist() == [0.0, 0.0]
    assert sizes[0] < 10_000


def test_processes_at_different_places_notice_it(run_team):
    def work(team):
        with refusal(r"at '(round|checkpoint)' and process . at '(round|checkpoint)'"):
            team.gather(1, "round" if team.rank else "checkpoint")
        return True

    assert run_team(2, work) == [True, True]


def test_alone_there_is_nothing_to_exchange():
    value = object()
    assert ALONE.gather(value)[0] is value
    assert ALONE.broadcast(value) is value
    assert (ALONE.rank, ALONE.size) == (0, 1)
    assert [value for message in ALONE.gather_each(iter([1, "a"])) for value in message[0]] == [1, "a"]


def test_the_current_team_is_that_of_the_run():
    team = Team(1, 2, lambda data: [data, data])
    assert current_team() is ALONE
    begin(team)
    assert current_team() is team
    end(team)
    end(team)
    assert current_team() is ALONE


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 1), (0, 0)])
def test_a_rank_outside_of_the_team_is_refused(rank, size):
    with refusal(rf"rank={rank} must be in \[0, {size}\)"):
        Team(rank, size, lambda data: [data])
    with refusal("2 processes needs a way"):
        Team(0, 2)


def test_work_is_shared_out_longest_first():
    costs = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]
    ranks = share(costs, 3)
    loads = [sum(cost for cost, rank in zip(costs, ranks, strict=True) if rank == r) for r in range(3)]
    assert sorted(loads) == [10.0, 10.0, 11.0]  # 31 in all: no split is more even
    assert share([1.0] * 5, 2) == [0, 1, 0, 1, 0]
    assert share([2.0], 4) == [0]
    assert share([], 2) == []


def test_a_share_is_at_most_four_thirds_of_the_best():
    """Graham's bound of longest first, 4/3 - 1/(3 size), against every split."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        costs = torch.randint(1, 20, (7,), generator=generator).tolist()

        def most(ranks, costs=costs):
            return max(sum(c for c, r in zip(costs, ranks, strict=True) if r == one) for one in (0, 1, 2))

        best = min(map(most, itertools.product(range(3), repeat=len(costs))))
        assert most(share(costs, 3)) <= best * (4 / 3 - 1 / 9)


def test_values_are_gathered_in_messages_of_bounded_size(run_team, monkeypatch):
    monkeypatch.setattr("fedlight.processes.team.MESSAGE_BYTES", 2 * 400)  # 400 of each of two processes
    sizes = {0: [60, 60, 10, 10, 10, 10, 10, 500], 1: [10, 90]}

    def work(team):
        values = (torch.full((size,), float(size)) for size in sizes[team.rank])
        return [[[len(value) for value in own] for own in message] for message in team.gather_each(values)]

    first, second = run_team(2, work)
    assert first == second == [[[60], [10, 90]], [[60, 10, 10, 10, 10], []], [[10], []], [[500], []]]
    assert run_team(2, lambda team: [*team.gather_each([])]) == [[[[], []]]] * 2


@pytest.mark.parametrize("seconds", [math.inf, 1e300, 1e11])
def test_a_wait_longer_than_gloo_can_count_is_the_longest(seconds):
    assert joining._longest(seconds) == joining.FOR_EVER
