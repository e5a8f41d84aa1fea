import numpy as np
import pytest
import torch

from fedlight.datamodules.federated.client_positions import read_positions


@pytest.mark.parametrize(
    "positions",
    [
        *([1, 3], (1, 3), range(1, 5, 2), [np.int64(1), torch.tensor(3)], [False, True, False, True, False]),
        *(np.array([1, 3], np.uint8), torch.tensor([1, 3], dtype=torch.int32)),
        torch.tensor([0, 1, 0, 1, 0], dtype=torch.bool),
    ],
)
def test_sequences_of_whole_numbers_and_masks(positions):
    found = read_positions({"a": positions, "b": [0]}, 5)
    assert found["a"].dtype == np.int64
    assert {name: own.tolist() for name, own in found.items()} == {"a": [1, 3], "b": [0]}


def test_ids_are_texts_or_whole_numbers():
    assert list(read_positions({3: [0], np.int64(4): [1], np.str_("x"): [2]}, 3)) == ["3", "4", "x"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"u7": [0, 5]}, r"client 'u7' has the position 5, but the training set has 5 examples, 0 to 4"),
        ({"u7": [0, -1]}, r"client 'u7' has the position -1, but"),
        ({"u7": [2**70]}, r"client 'u7' has the position 1180591620717411303424, "),
        ({"u7": [0, None]}, r"client 'u7' has the position None, which is no whole number"),
        ({"u7": [0.0, 1.5]}, r"client 'u7' has the position 0.0, which is no whole number"),
        ({"u7": ["0"]}, r"client 'u7' has the position '0', which is no whole number"),
        ({"u7": [None]}, r"client 'u7' has the position None, which is no whole number"),
        ({"u7": [[0, 1]]}, r"client 'u7': positions must be one row of whole numbers"),
        ({"u7": [[0], [1, 2]]}, r"client 'u7': positions must be one row of whole numbers"),
        ({"u7": 3}, r"client 'u7' has a int as positions: give a list, range, array"),
        ({"u7": {1, 2}}, r"client 'u7' has a set as positions"),
        ({"u7": "12"}, r"client 'u7' has a str as positions"),
        ({"u7": (i for i in range(2))}, r"client 'u7' has a generator as positions"),
        ({"u7": [True, False]}, r"client 'u7' has a mask of 2 truth values, but the training set has 5"),
        ({"u7": [1, 2, 1]}, r"client 'u7' has the position 1 twice"),
        ({"u7": [1, 2], "u8": [3, 2]}, r"position 2 is at client 'u7' and at client 'u8'"),
        ({1: [0], "1": [1]}, r"the client '1' twice, as a text and as a number"),
        ({("a", 1): [0]}, r"client id \('a', 1\) is a tuple: give a text or a whole number"),
        ({None: [0]}, r"client id None is a NoneType"),
        ({True: [0]}, r"client id True is a bool"),
        ({1.5: [0]}, r"client id 1.5 is a float"),
        ([[0, 1], [2]], r"clients gave a list: give a dict"),
        (None, r"clients gave a NoneType: give a dict"),
    ],
)
def test_what_is_no_position_is_named_with_its_client(given, message):
    with pytest.raises(ValueError, match=message):
        read_positions(given, 5)


def test_a_client_without_examples_is_left_to_the_loop_to_name():
    assert read_positions({"u7": []}, 5)["u7"].tolist() == []
