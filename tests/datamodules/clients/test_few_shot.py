import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from refusals import refusal
from tiny_world import write_rows

from fedlight import AugmentedInstructionDataModule, HashedEncoder, InstructionDataModule, Partition
from fedlight.datamodules.clients.few_shot import FewShot
from fedlight.datamodules.instructions.datamodule import TaughtRows
from fedlight.datamodules.rows import Holdout, RowsError
from fedlight.datamodules.rows.fields import make_question_key
from fedlight.datamodules.rows.split import Split
from fedlight.datamodules.vectors.clusters import PseudoLabels

KINDS = ("w1 w2 w3 w4", "w11 w12 w13 w14", "w21 w22 w23 w24")
# Three kinds of instructions: 20 of the first, 20 of the second, 3 of the third.
ROWS = [
    {"prompt": f"{KINDS[kind]} w{30 + i % 8} w{i}", "output": "x y", "kind": "k"}
    for kind, number in enumerate((20, 20, 3))
    for i in range(number)
]
FIELDS = [{"prompt": row["prompt"], "response": row["output"]} for row in ROWS]


def few_shot(**options):
    return FewShot(HashedEncoder(256), **{"clusters": 3, "per_cluster": 5, **options})


@pytest.fixture
def build(made):
    def build(rows=ROWS, kind=InstructionDataModule, stages=("fit",), **options):
        columns = {"prompt": "prompt", "response": "output"} | options.pop("columns", {})
        settings = {"template": "{prompt} ANSWER:", "columns": columns, "val_share": 0.0}
        return made(kind, rows, stages, **settings | options)

    return build


def kind_of(row):
    return next(kind for kind, words in enumerate(KINDS) if row["prompt"].startswith(words))


def test_so_many_rows_of_each_cluster_and_all_of_a_small_one():
    few = few_shot().choose(FIELDS, seed=0)
    assert Counter(kind_of(FIELDS[row]) for row in few.chosen) == {0: 5, 1: 5, 2: 3}
    assert few.chosen.tolist() == sorted(set(few.chosen.tolist()))
    by_label = {(label, kind_of(FIELDS[row])) for row, label in zip(few.chosen, few.labels, strict=True)}
    assert len(by_label) == 3  # a cluster is a kind
    assert str(few).startswith("13 of 43 rows chosen from 3 clusters, of which 1 are smaller than")


def test_the_draw_is_a_function_of_the_seed_and_reaches_every_row():
    drawn = [few_shot().choose(FIELDS, seed).chosen.tolist() for seed in range(30)]
    assert drawn[4] == few_shot().choose(FIELDS, seed=4).chosen.tolist()
    assert drawn[0] != drawn[1]
    assert set(np.concatenate(drawn)) == set(range(43))  # near the centre and far from it


def test_what_is_tested_on_asks_nothing_that_is_trained_on():
    twice = FIELDS + [{**row, "response": "z"} for row in FIELDS]  # each question with a second answer
    for seed in range(5):
        few = few_shot(rest_as_test=20).choose(twice, seed)
        asked = [{make_question_key(twice[row]) for row in rows} for rows in (few.chosen, few.test)]
        assert len(few.test) == len(set(few.test.tolist())) == 20
        assert not asked[0] & asked[1]
    with pytest.raises(RowsError, match=r"rest_as_test=31, but of 43 rows 30 are left.*Lower rest_as_test"):
        few_shot(rest_as_test=31).choose(FIELDS, seed=0)


def test_clients_are_made_of_clusters_and_tested_on_the_rest(build, caplog):
    partition = Partition("dirichlet", num_clients=3, alpha=0.01)
    module = build(few_shot=few_shot(rest_as_test=30), partition=partition)
    assert sum(module.client_sizes().values()) == 13
    kinds = [{kind_of(row) for row in rows} for rows in module.client_rows.values()]
    assert [len(own) for own in kinds] == [1, 1, 1]
    assert "13 of 43 rows chosen from 3 clusters, of which 1 are smaller" in caplog.text
    module.setup("test")
    assert len(module.test_set) == 30
    trained, tested = ({tuple(e["ids"]) for e in dataset} for dataset in (module.train_set, module.test_set))
    assert not trained & tested
    assert len(trained | tested) == 43
    # A later command that only tests finds the same rows.
    alone = build(stages=("test",), few_shot=few_shot(rest_as_test=30))
    assert {tuple(e["ids"]) for e in alone.test_set} == tested


def test_rows_that_do_not_fit_are_not_chosen(build):
    long = [{**row, "output": "x " * 40} for row in ROWS[:15]]
    module = build([*long, *ROWS[15:]], few_shot=few_shot(), max_tokens=20)
    assert sum(module.client_sizes().values()) == 13
    assert all(row["response"] == "x y" for rows in module.client_rows.values() for row in rows)


def test_rows_to_test_on_do_not_come_back_as_public_ones(build, tmp_path):
    public = write_rows(tmp_path / "public.jsonl", [{**row, "output": "z"} for row in ROWS])
    few = few_shot(rest_as_test=28)
    module = build(kind=AugmentedInstructionDataModule, few_shot=few, public_source=public)
    assert module.public.asked == 28
    assert len(module.public.rows) == 15


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": {"category": "kind"}}, r"columns.category=kind and few_shot both define"),
        ({"pseudo_labels": PseudoLabels(HashedEncoder(8), 3)}, r"pseudo_labels and few_shot both define"),
        ({"test_source": "rows.jsonl"}, r"few_shot.rest_as_test=2 and test_source both define the test rows"),
        ({"holdout": Holdout("kind", ["k"])}, r"few_shot.rest_as_test=2 and holdout both define"),
        ({"kind": AugmentedInstructionDataModule, "private_rows": 5}, r"private_rows=5 and few_shot both"),
    ],
)
def test_two_settings_that_say_the_same_are_refused(build, options, message):
    with pytest.raises(ValueError, match=message):
        build(few_shot=few_shot(rest_as_test=2), **options)


@pytest.mark.parametrize(("name", "value"), [("clusters", 1), ("per_cluster", 0), ("rest_as_test", -1)])
def test_numbers_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"few_shot.{name}={value} must be at least"):
        few_shot(**{name: value})


EVEN = [{"prompt": f"{KINDS[i % 3]} w{30 + i % 7}", "output": f"w{i}", "kind": "k"} for i in range(60)]
LABELS = PseudoLabels(HashedEncoder(256), 3)


@pytest.mark.parametrize("alpha", [0.01, 100.0])
def test_clients_are_made_of_labels(build, alpha):
    module = build(EVEN, partition=Partition("dirichlet", num_clients=3, alpha=alpha), pseudo_labels=LABELS)
    kinds = [{kind_of(row) for row in rows} for rows in module.client_rows.values()]
    assert sum(map(len, kinds)) == (3 if alpha < 1 else 9)
    assert module.report.split.single_category_clients == (3 if alpha < 1 else 0)


def test_labels_and_a_column_are_refused(build):
    with refusal(r"columns.category=kind and pseudo_labels both define"):
        build(columns={"category": "kind"}, pseudo_labels=LABELS)
    with refusal(r"pseudo_labels.number=1"):
        PseudoLabels(HashedEncoder(8), 1)
    with refusal(r"or pseudo_labels to make categories"):
        build(partition=Partition("dirichlet", num_clients=3))


MEDQUAD = Path(os.environ.get("FEDLIGHT_SHARED", "/nowhere")) / "data/medquad/medquad.jsonl.gz"


@pytest.mark.slow
@pytest.mark.skipif(not MEDQUAD.is_file(), reason="FEDLIGHT_SHARED names no folder with data/medquad")
def test_real_questions_in_the_setting_of_the_paper(causal, any_text):
    """MedAlpaca's: 1,000 rows of 100 clusters, 50 clients, 400 rows to test on."""
    columns = {"prompt": "question", "response": "answer"}
    settings = {"template": "{prompt} ANSWER:", "tokenizer": causal, "columns": columns}
    settings |= {"rows": TaughtRows(few_shot=FewShot(HashedEncoder(128), rest_as_test=400))}
    settings |= {
        "partition": Partition("dirichlet", num_clients=50, alpha=1.0),
        "split": Split(val_share=0.0),
    }
    module = InstructionDataModule(str(MEDQUAD), **settings)
    module.setup("fit")
    module.setup("test")
    assert len(module.test_set) == 400
    assert len(module.client_sizes()) == 50
    assert 950 <= sum(module.client_sizes().values()) <= 1000
    asked = {row["prompt"] for rows in module.client_rows.values() for row in rows}
    assert not asked & {row["prompt"] for row in module.unseen_rows()}
    assert len(module.unseen_rows()) == 400
