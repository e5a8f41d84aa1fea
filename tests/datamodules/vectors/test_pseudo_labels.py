import numpy as np
import pytest

from fedlight import HashedEncoder, InstructionDataModule, Partition
from fedlight.datamodules.vectors.clusters import PseudoLabels

KINDS = ("w1 w2 w3 w4", "w11 w12 w13 w14", "w21 w22 w23 w24")
# 21 distinct instructions
ROWS = [{"prompt": f"{KINDS[i % 3]} w{30 + i % 7}", "output": "x", "kind": "k"} for i in range(60)]


@pytest.fixture
def build(made):
    rows = [{**row, "output": f"w{i}"} for i, row in enumerate(ROWS)]

    def build(columns=(), **options):
        columns = {"prompt": "prompt", "response": "output", **dict(columns)}
        return made(InstructionDataModule, rows, template="{prompt} ANSWER:", columns=columns, **options)

    return build


def test_rows_of_a_kind_get_one_label():
    labels = PseudoLabels(HashedEncoder(256), 3).label(ROWS, seed=0)
    assert len(labels) == 60
    assert [len({labels[row] for row in range(kind, 60, 3)}) for kind in range(3)] == [1, 1, 1]
    assert set(labels) == {"k0", "k1", "k2"}
    assert labels == PseudoLabels(HashedEncoder(256), 3).label(ROWS, seed=0)


@pytest.mark.parametrize("alpha", [0.01, 100.0])
def test_clients_are_made_of_labels(build, alpha):
    partition, labels = Partition("dirichlet", 3, alpha=alpha), PseudoLabels(HashedEncoder(256), 3)
    module = build(partition=partition, pseudo_labels=labels, val_share=0.0)
    first = [int(module.train_set[i]["ids"][1]) for i in range(60)]
    kinds = {client: np.unique([first[i] for i in own]) for client, own in module.client_indices.items()}
    assert sum(map(len, kinds.values())) == (3 if alpha < 1 else 9)
    assert module.report.split.single_category_clients == (3 if alpha < 1 else 0)


def test_labels_and_a_column_are_refused(build):
    with pytest.raises(ValueError, match=r"columns.category=kind and pseudo_labels both define"):
        build(columns={"category": "kind"}, pseudo_labels=PseudoLabels(HashedEncoder(8), 3))
    with pytest.raises(ValueError, match=r"pseudo_labels.number=1"):
        PseudoLabels(HashedEncoder(8), 1)
    with pytest.raises(ValueError, match=r"or pseudo_labels to make categories"):
        build(partition=Partition("dirichlet", num_clients=3))
