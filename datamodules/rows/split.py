"""Which rows a datamodule trains, validates and tests on: settings that YAML nests below ``split``."""

from dataclasses import dataclass

from fedlight.datamodules.rows.exclusion import Holdout
from fedlight.datamodules.rows.given import GivenRows, Source, name_source
from fedlight.support.checks import Settings


@dataclass(frozen=True)
class Split(Settings):
    """Rows for training, validation and test; in YAML ``split: {test_source: test.jsonl, val_share: 0.1}``.

    Args:
        train_split: split of ``source``, if that is a hub dataset.
        val_source: rows for validation; None: a share of each client's own.
        val_split: split of ``val_source``.
        test_source: rows for testing; None with a ``holdout``: the held-out rows of ``source``.
        test_split: split of ``test_source``.
        holdout: rows kept out of training; see `fedlight.datamodules.rows.exclusion`.
        val_share: share of each client's own for validation, in [0, 1); 0: no validation.
        val_max: most of a client's own in validation.
    """

    train_split: str = "train"
    val_source: Source | None = None
    val_split: str = "validation"
    test_source: Source | None = None
    test_split: str = "test"
    holdout: Holdout | None = None
    val_share: float = 0.05
    val_max: int = 200

    def __post_init__(self) -> None:
        super().__post_init__()
        check_validation(self.val_share, self.val_max)

    def rows(self, source: Source) -> tuple["Rows", "Rows | None", "Rows | None"]:
        """Return the source and the split of the rows to train, to validate and to test on; None: there are no such rows."""
        train = name_source(source), self.train_split
        held_out = train if self.holdout else None
        val = None if self.val_source is None else (name_source(self.val_source), self.val_split)
        return (
            train,
            val,
            held_out if self.test_source is None else (name_source(self.test_source), self.test_split),
        )


Rows = tuple[str | GivenRows, str]


@dataclass(frozen=True)
class TextSplit(Settings):
    """Texts for training and validation.

    Args:
        train_split: split of ``source``, if that is a hub dataset.
        val_share: share of the texts to hold out for validation, in [0, 1); 0: no validation.
        val_max: most texts to hold out; validation ranks each text among all of them.
    """

    train_split: str = "train"
    val_share: float = 0.05
    val_max: int = 2000

    def __post_init__(self) -> None:
        super().__post_init__()
        check_validation(self.val_share, self.val_max, least=2)


def check_validation(val_share: float, val_max: int, least: int = 1) -> None:
    """Raise ValueError unless the share of the validation is in [0, 1) and its most keys at least ``least``."""
    if not 0 <= val_share < 1 or val_max < least:
        raise ValueError(
            f"val_share={val_share} must lie in [0, 1) and val_max={val_max} must be at least {least}"
        )
