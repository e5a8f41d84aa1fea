import pytest
from tiny_world import fedlight, read_lines, refused, write_rows

from fedlight.evaluation.sandbox import missing_protection

MATH = [{"question": f"anna keeps {n} hens .", "answer": f"it is {n + 1} .\n#### {n + 1}"} for n in range(4)]
SUBJECTS = ["anatomy", "astronomy", "college_medicine"]
CHOICES = ["walls", "hens", "maps", "pies"]
MEDICINE = [  # a question is not shown as its own example
    {"question": f"anna paints {n} walls", "subject": subject, "choices": CHOICES, "answer": n % 4}
    for n, subject in enumerate(SUBJECTS * 3)
]
PHRASES = [{"sentence": f"ben reads {n} maps", "label": n % 3} for n in range(8)]
OPINION = {"sentence": "ben reads maps", "format": "post", "aspects": "x"}
OPINIONS = [{**OPINION, "sentiment_score": n / 4 - 1} for n in range(8)]
TWEETS = [{"text": f"ben reads {n} maps", "label": n % 3} for n in range(3)]
CONTEXT = {"contexts": ["ben reads maps .", "anna keeps hens ."], "labels": ["x", "y"]}
ABSTRACTS = [
    {"question": "anna paints walls ?", "context": CONTEXT, "final_decision": answer}
    for answer in ("yes", "no", "maybe")
]
SOLUTION = {"entry_point": "f", "prompt": 'def f():\n    """1"""\n', "canonical_solution": "    return 1\n"}
TEST = "def check(candidate):\n    assert candidate() == 1\n"
CODE = [{"task_id": "HumanEval/0", **SOLUTION, "test": TEST}]
FILES = {  # file -> task -> its rows, and those of its data and shots that are asked
    "gsm8k": {"gsm8k": (MATH, 4)},
    "mmlu_medical": {"mmlu_medical": (MEDICINE, 6)},
    "pubmedqa": {"pubmedqa": (ABSTRACTS, 3)},
    "sentiment": {"fpb": (PHRASES, 2), "fiqa": (OPINIONS, 2), "tfns": (TWEETS, 3)},
    "human_eval": {"human_eval": (CODE, 1)},
}
HAS_SHOTS = ("gsm8k", "mmlu_medical")


def arguments(tiny_model, tmp_path, name):
    given = [
        *("--config=tasks.yaml", "--trainer.accelerator=cpu"),
        *(f"--trainer.default_root_dir={tmp_path / 'run'}", f"--model.model={tiny_model}"),
        f"--data=tasks/{name}.yaml",
    ]
    for task, (rows, _) in FILES[name].items():
        file = write_rows(tmp_path / f"{task}.jsonl", rows)
        given.append(f"--data.tasks.{task}.init_args.data.init_args.source={file}")
        if task in HAS_SHOTS:
            given.append(f"--data.tasks.{task}.init_args.shots.init_args.source={file}")
        if task != "mmlu_medical":
            given.append(f"--data.tasks.{task}.init_args.max_new_tokens=4")
    return given


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_tasks(name, tiny_model, tmp_path):
    if name == "human_eval" and (missing := missing_protection()):
        pytest.skip(missing)
    outcome = fedlight("test", *arguments(tiny_model, tmp_path, name))
    assert outcome.code == 0, outcome.err
    [scores] = read_lines(tmp_path / "run/tasks/test/scores.json")
    for task, (_, number) in FILES[name].items():
        assert 0 <= scores[f"score/{task}"] <= 1
        lines = read_lines(tmp_path / f"run/tasks/test/{task}.jsonl")
        assert len(lines) == number
        assert all("### Response:" in line["prompt"] for line in lines)
    assert "test/loss" not in outcome.out
    assert "score/" in outcome.out


def test_few_shot_from_the_command_line(tiny_model, tmp_path):
    more = ["--data.tasks.mmlu_medical.init_args.num_shots=1", "--data.tasks.mmlu_medical.init_args.limit=2"]
    outcome = fedlight("test", *arguments(tiny_model, tmp_path, "mmlu_medical"), *more)
    assert outcome.code == 0, outcome.err
    lines = read_lines(tmp_path / "run/tasks/test/mmlu_medical.jsonl")
    assert [line["prompt"].count("### Response:") for line in lines] == [2, 2]


def test_as_it_is(tmp_path):
    arguments = ("--config=tasks.yaml", "--trainer.accelerator=cpu", f"--trainer.default_root_dir={tmp_path}")
    outcome = fedlight("test", *arguments)
    assert outcome.code == 0, outcome.err
    assert len(read_lines(tmp_path / "tasks/test/posts.jsonl")) == 16


def test_an_unreachable_benchmark_is_one_line(tiny_model, tmp_path):
    outcome = fedlight("test", *arguments(tiny_model, tmp_path, "gsm8k")[:5])
    assert "openai/gsm8k:main" in refused(outcome)
