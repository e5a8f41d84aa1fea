import threading

import pytest

from fedlight import SFTModule
from fedlight.stacking.client_models import side_by_side, work_with_models


def test_a_clients_model_writes_with_the_settings_of_the_module_where_none_are_given():
    module, prompts = SFTModule("toy"), ["POST : anna bakes bread .", "SUMMARY :"]
    works = [lambda model: model.generate(prompts, 2), lambda model: model.generate(prompts)]
    module.configure_model()
    expected = [work(module) for work in works]
    assert work_with_models(module, [{}, {}], works, holding=None) == expected


def test_questions_are_answered_together_until_the_last_work_ends():
    rounds = []

    def answer(asked):
        rounds.append([number for number, _ in asked])
        return [question**2 for _, question in asked]

    def work(first, times):
        return lambda ask: [ask(first + i) for i in range(times)]

    found = side_by_side([work(1, 3), work(5, 1), work(7, 0), work(9, 2)], answer)
    assert found == [[1, 4, 9], [25], [], [81, 100]]
    assert rounds == [[0, 1, 3], [0, 3], [0]]


def test_one_work_runs_at_a_time():
    running, most = [], []

    def work(ask):
        for _ in range(20):
            running.append(1)
            most.append(len(running))
            sum(range(2000))
            running.pop()
            ask(None)

    side_by_side([work] * 5, lambda asked: [None] * len(asked))
    assert set(most) == {1}


@pytest.mark.parametrize("where", ["work", "answer"])
def test_an_error_ends_all_of_them(where):
    before, ended = threading.active_count(), []

    def fails(ask):
        ask(1)
        if where == "work":
            raise OSError("disk full")

    def waits(ask):
        try:
            ask(2)
            ask(3)
        finally:
            ended.append(True)

    def answer(asked):
        if where == "answer":
            raise OSError("disk full")
        return [None] * len(asked)

    with pytest.raises(OSError, match="disk full"):
        side_by_side([waits, fails, waits], answer)
    assert ended == [True, True]
    assert threading.active_count() == before
