import json

import pytest
from tiny_world import fedlight, refused, write_rows

from fedlight.evaluation.sandbox import missing_protection

MATH = [
    {"question": f"anna keeps {n} hens .", "answer": f"one and {n} is {n + 1} .\n#### {n + 1}"}
    for n in range(4)
]
SUBJECTS = ["anatomy", "astronomy", "college_medicine"]
MEDICINE = [
    {
        "question": f"anna paints {n} walls",  # a question is not shown as its own example
        "subject": subject,
        "choices": ["walls", "hens", "maps", "pies"],
        "answer": n % 4,
    }
    for n, subject in enumerate(SUBJECTS * 3)
]
PHRASES = [{"sentence": f"ben reads {n} maps", "label": n % 3} for n in range(8)]
OPINIONS = [
    {"sentence": "ben reads maps", "sentiment_score": n / 4 - 1, "format": "post", "aspects": "x"}
    for n in range(8)
]
TWEETS = [{"text": f"ben reads {n} maps", "label": n % 3} for n in range(3)]
ABSTRACTS = [
    {
        "question": "anna paints walls ?",
        "context": {"contexts": ["ben reads maps .", "anna keeps hens ."], "labels": ["x", "y"]},
        "final_decision": answer,
    }
    for answer in ("yes", "no", "maybe")
]
CODE = [
    {
        "task_id": "HumanEval/0",
        "prompt": 'def one():\n    """1"""\n',
        "entry_point": "one",
        "canonical_solution": "    return 1\n",
        "test": "def check(candidate):\n    assert candidate() == 1\n",
    }
]
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
    [scores] = [
        json.loads(line) for line in (tmp_path / "run/tasks/test/scores.json").read_text().splitlines()
    ]
    for task, (_, number) in FILES[name].items():
        assert 0 <= scores[f"score/{task}"] <= 1
        lines = (tmp_path / f"run/tasks/test/{task}.jsonl").read_text().splitlines()
        assert len(lines) == number
        assert all("### Response:" in json.loads(line)["prompt"] for line in lines)
    assert "test/loss" not in outcome.out
    assert "score/" in outcome.out


def test_few_shot_from_the_command_line(tiny_model, tmp_path):
    more = ["--data.tasks.mmlu_medical.init_args.num_shots=1", "--data.tasks.mmlu_medical.init_args.limit=2"]
    outcome = fedlight("test", *arguments(tiny_model, tmp_path, "mmlu_medical"), *more)
    assert outcome.code == 0, outcome.err
    lines = (tmp_path / "run/tasks/test/mmlu_medical.jsonl").read_text().splitlines()
    assert [json.loads(line)["prompt"].count("### Response:") for line in lines] == [2, 2]


def test_as_it_is(tmp_path):
    outcome = fedlight(
        "test", "--config=tasks.yaml", "--trainer.accelerator=cpu", f"--trainer.default_root_dir={tmp_path}"
    )
    assert outcome.code == 0, outcome.err
    assert len((tmp_path / "tasks/test/posts.jsonl").read_text().splitlines()) == 16


def test_an_unreachable_benchmark_is_one_line(tiny_model, tmp_path):
    outcome = fedlight("test", *arguments(tiny_model, tmp_path, "gsm8k")[:5])
    assert "openai/gsm8k:main" in refused(outcome)
