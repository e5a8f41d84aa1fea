"""Facts of a run for its model card, read from its folder."""

from collections.abc import Mapping
from typing import Any

from fedlight.callbacks.export.card_facts import CardFacts, card_facts, public_name
from fedlight.datamodules.instructions.augmentation_record import AugmentationRecord
from fedlight.export.opened import Opened
from fedlight.runs import facts
from fedlight.runs.client_data import data_of
from fedlight.runs.facts import within
from fedlight.runs.run import Run
from fedlight.support.words import number


def facts_of(opened: Opened) -> CardFacts:
    """Return the known facts of a run, of a checkpoint up to its round; the hub is asked for the base's licence."""
    run, rounds = opened.run, opened.rounds()
    config = run.config()
    loop, data = (within(config, part, "init_args") or {} for part in ("federated", "data"))
    counts = data_of(run).counts
    return card_facts(
        opened.kind,
        opened.algorithm,
        [opened.settings, loop, data],
        _last(run, rounds),
        [row for row in run.csv("visits.csv") if _is_before(row.get("round"), rounds)],
        run.record(),
        True,  # the hub is asked
        # Also of one that cannot be imported.
        algorithm=facts.algorithm(run) if config.get("federated") else "",
        source=public_name(within(config, "data", "source")),
        clients=len(counts),
        examples=sum(sum(by_label.values()) for by_label in counts.values()),
        added=_added(run),
        rounds=facts.rounds(run)[0] if rounds is None else rounds,
    )


def _last(run: Run, rounds: int | None) -> dict[str, float]:
    """Return the last value of each metric, up to a round."""
    rows: list[Any] = [row for row in run.metrics() if _is_before(row.get("epoch"), rounds)]
    at_end = run.done().get("metrics") if rounds is None else None
    rows += [at_end] if isinstance(at_end, Mapping) else []
    return {name: value for row in rows for name, text in row.items() if (value := number(text)) is not None}


def _added(run: Run) -> int:
    """Return the number of rows that an augmentation added to the clients' own; 0 where no record tells."""
    folder = facts.augmentation_folder(run)
    try:
        return 0 if folder is None else sum(map(len, AugmentationRecord(folder).read().values()))
    except (OSError, ValueError, KeyError, TypeError):  # a damaged record
        return 0


def _is_before(place: Any, rounds: int | None) -> bool:
    at = number(place)
    return rounds is None or at is None or at < rounds  # a value without a round is of the whole run
