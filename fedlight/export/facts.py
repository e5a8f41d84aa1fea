"""Facts of a run for its model card, read from its folder."""

from collections.abc import Mapping
from typing import Any

from fedlight.callbacks.export.card_facts import (
    CardFacts,
    base_form,
    command_line,
    papers_of,
    privacy_of,
    public_name,
    scores_of,
    settings_of,
    traffic_of,
)
from fedlight.datamodules.instructions.augmentation_record import AugmentationRecord
from fedlight.export.opened import Opened
from fedlight.pretrained.hub import find_licence
from fedlight.runs import facts
from fedlight.runs.client_data import data_of
from fedlight.runs.facts import within
from fedlight.runs.rows import number
from fedlight.runs.run import Run


def facts_of(opened: Opened, ask_hub: bool = False) -> CardFacts:
    """Return the known facts of a run; of a checkpoint, up to its round.

    Args:
        opened: the run.
        ask_hub: ask the hub for the base's licence where its folder does not say it.
    """
    run, rounds = opened.run, opened.rounds()
    config = run.config()
    federated = config.get("federated") or {}
    classes = [opened.kind, opened.algorithm]
    last = _last(run, rounds)
    counts = data_of(run).counts
    visits = [row for row in run.csv("visits.csv") if _is_before(row.get("round"), rounds)]
    model = str(opened.settings.get("model", ""))
    recorded = run.record().get("versions")
    versions = recorded.items() if isinstance(recorded, Mapping) else ()
    return CardFacts(
        module=opened.kind.__name__,
        base=public_name(model),
        algorithm=facts.algorithm(run) if federated else "",
        papers=papers_of(each for each in classes if isinstance(each, type)),
        base_form=base_form(model, str(opened.settings.get("base", "plain"))),
        licence=find_licence(model, ask_hub),
        source=public_name(within(config, "data", "source")),
        clients=len(counts),
        examples=sum(sum(by_label.values()) for by_label in counts.values()),
        added=_added(run),
        rounds=facts.rounds(run)[0] if rounds is None else rounds,
        **traffic_of(visits),
        privacy=privacy_of(last),
        scores=scores_of(last),
        settings=settings_of(
            opened.settings, *(within(config, part, "init_args") or {} for part in ("federated", "data"))
        ),
        command=command_line(run.record()),
        versions={str(name): str(version) for name, version in versions if name != "python"},
    )


def _last(run: Run, rounds: int | None) -> dict[str, float]:
    """Return the last value of each metric, up to a round."""
    values: dict[str, float] = {}
    for row in run.metrics():
        if _is_before(row.get("epoch"), rounds):
            values |= {name: value for name, text in row.items() if (value := number(text)) is not None}
    metrics = run.done().get("metrics") if rounds is None else None
    if isinstance(metrics, Mapping):
        values |= {name: value for name, each in metrics.items() if (value := number(each)) is not None}
    return values


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
