import pytest

from fedlight.augmentation.self_instruct.self_instruct import SelfInstruct
from fedlight.generators.toy_teacher import ToyTeacher, topic_of
from fedlight.toy import rows
from fedlight.toy.instructions import DOMAINS, answer

FIRST, SECOND = "which covers more ?\nanna bread", "covers more which ?\nben roses"


def test_most_questions_stay_in_the_areas_of_the_examples() -> None:
    for novelty, low, high in ((0.0, 1.0, 1.0), (0.3, 0.7, 0.9), (1.0, 0.2, 0.5)):
        teacher = ToyTeacher(novelty=novelty)
        found = [topic_of(teacher.instruction(FIRST, SECOND, draw)) for draw in range(300)]
        assert {domain for domain, _ in found} == {"kitchen"}
        near = sum(area in ("bread", "roses") for _, (area, _) in found) / 300
        assert low <= near <= high
    assert len({topic for _, topic in found}) > 40  # of 48, where anything goes


def test_answers_are_wrong_at_the_error_rate() -> None:
    for rate in (0.0, 0.25):
        teacher = ToyTeacher(seed=2, error_rate=rate)
        asked = [teacher.instruction(FIRST, SECOND, draw) for draw in range(400)]
        wrong = sum(teacher.response(text, draw=0) != answer(2, *topic_of(text)) for text in asked) / 400
        assert wrong == pytest.approx(rate, abs=0.07)


def test_what_is_no_question_has_no_answer() -> None:
    teacher = ToyTeacher()
    assert teacher.response("YOUR SUMMARY ? anna bakes bread .", draw=0) == ""
    assert teacher.response("", draw=0) == ""
    assert teacher.instruction("hello", "there", draw=0) == ""
    assert topic_of(teacher.instruction("hello", SECOND, draw=0))[0] == "kitchen"


def test_its_questions_are_no_test_rows() -> None:
    asked = {ToyTeacher().instruction(FIRST, SECOND, draw) for draw in range(300)}
    test = rows("instructions", split="test", topic_rows=50)
    assert not asked & {f"{row['instruction']} {row['input']}" for row in test}


@pytest.mark.parametrize("options", [{"novelty": 1.5}, {"error_rate": -0.1}])
def test_shares_lie_between_0_and_1(options: dict) -> None:
    with pytest.raises(ValueError, match=r"must be in \[0, 1\]"):
        ToyTeacher(**options)


def test_self_instruct_with_it() -> None:
    """Every client gets rows of the domain; all answers are right with an error rate of 0."""
    clients: dict[str, list[dict[str, str]]] = {}
    for row in rows("instructions", seed=5, num_clients=2, client_rows=30):
        fields = {"instruction": row["instruction"], "input": row["input"], "response": row["output"]}
        clients.setdefault(row["client"], []).append(fields)
    teacher = ToyTeacher(seed=5, error_rate=0)
    added = SelfInstruct(20, teacher, max_rouge_l=0.9).augment(clients, [], seed=0)
    assert set(added) == {"c0", "c1"}
    for own in added.values():
        assert len(own) == 20
        for row in own:
            domain, topic = topic_of(row.fields["instruction"])
            assert topic[0] in DOMAINS["kitchen"].areas
            assert row.fields["response"] == answer(5, domain, topic)
    assert teacher.usage()["answers"] >= 80
    assert teacher.complete(["What is this?"]) == [""]
