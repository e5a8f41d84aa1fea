import pytest

from fedlight.datamodules.instructions.augmentation import Added, Augmentation, settings_of
from fedlight.datamodules.instructions.augmented import check_added, describe_added, describe_missing_public
from fedlight.datamodules.rows.exclusion import Holdout
from fedlight.datamodules.vectors.encoders import HashedEncoder


class Nearest(Augmentation):
    without_effect = ("folder",)

    def __init__(self, encoder, number, folder=None):
        super().__init__(number)
        self.encoder, self.folder = encoder, folder

    def augment(self, clients, public, seed):
        return {}


class Teller(Nearest):
    """Takes something that says itself what it is, and something that does not."""

    def __init__(self, teller, holdouts, number):
        self.teller, self.holdouts, self.number = teller, holdouts, number


class Told:
    secret = "key"

    def settings(self):
        return {"class": "Told", "model": "m"}


def test_settings_are_the_arguments_of_the_constructor():
    settings = Nearest(HashedEncoder(8, seed=1), 5, folder="somewhere").settings()
    assert settings == {"class": "Nearest", "encoder": HashedEncoder(8, seed=1).identity, "number": 5}
    assert Nearest(HashedEncoder(8, seed=2), 5).settings() != settings


def test_settings_of_objects_in_objects():
    settings = Teller(Told(), [Holdout("c", ["v"])], 2).settings()
    assert settings["teller"] == {"class": "Told", "model": "m"}
    assert settings["holdouts"] == [{"class": "Holdout", "column": "c", "values": ["v"]}]


def test_an_argument_that_is_not_kept_is_found():
    class Forgets:
        def __init__(self, kept, lost):
            self.kept = kept

    with pytest.raises(AttributeError, match="lost"):
        settings_of(Forgets(1, 2))


def test_a_number_of_rows_below_one_is_refused():
    with pytest.raises(ValueError, match=r"number=0 must be at least 1"):
        Nearest(HashedEncoder(8), 0)


def added(*rows, score=0.5):
    return [Added({"response": "r"}, row, score) for row in rows]


def test_the_report_counts():
    line = describe_added(Nearest(HashedEncoder(8), 3), {"u": added(0, 1, 2), "v": added(2, score=0.25)}, 10)
    assert line == (
        "Nearest: 1 to 3 rows for each client (mean 2.0); 3 different public rows in total; scores 0.250 to 0.500; "
        "fewer than number=3 for 1 of 2 clients: there were no more to choose from"
    )
    assert line.replace("there were no more to choose from", "only 2 rows are public") == describe_added(
        Nearest(HashedEncoder(8), 3), {"u": added(0, 1, 2), "v": added(2, score=0.25)}, 2
    )


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({}, "nothing for client u"),
        ({"u": added(0, 1, 2)}, "3 rows, more than number=2"),
        ({"u": added(1, 1)}, "a public row twice"),
        ({"u": added(1, 4)}, "row 4 of 4 public rows"),
        ({"u": added(-1, 3)}, "of 4 public rows"),
    ],
)
def test_an_augmentation_that_breaks_its_word_is_refused(given, complaint):
    with pytest.raises(ValueError, match=f"Nearest gave.*{complaint}"):
        check_added(Nearest(HashedEncoder(8), 2), given, ["u"], 4)


def test_what_is_right_is_not_refused():
    generated = [Added({"response": "r"}), Added({"response": "r"})]
    check_added(Nearest(HashedEncoder(8), 2), {"u": added(0, 3), "v": [], "w": generated}, ["u", "v", "w"], 4)
    assert "set public_source" in describe_missing_public(Nearest(HashedEncoder(8), 2))
