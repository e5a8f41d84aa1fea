"""Algorithm, model, data and rounds of a run, from its config, and training rows of its clients by label."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedlight.datamodules.instructions.augmentation_record import AugmentationRecord
from fedlight.runs.rows import objects
from fedlight.runs.run import Run
from fedlight.support.words import number

OF_CANDIDATES = ("synthetic", "mixed")
"""Splits of visits on examples that a client has made for itself."""

Counts = dict[str, dict[str, int]]


def class_name(spec: Any) -> str:
    """Return the last word of a ``class_path``; empty where there is none.

    Examples:
        >>> class_name({"class_path": "fedlight.federation.algorithms.fedavg.FedAvg"}), class_name(None)
        ('FedAvg', '')
    """
    path = spec.get("class_path") if isinstance(spec, Mapping) else spec
    return str(path or "").rpartition(".")[2]


def within(config: Any, *keys: str) -> Any:
    """Return a value deep in a config, None where a key is missing; ``init_args`` may be left out of the keys.

    Examples:
        >>> within({"model": {"class_path": "x", "init_args": {"lr": 0.1}}}, "model", "lr")
        0.1
    """
    for name in keys:
        if not isinstance(config, Mapping):
            return None
        inner = config.get("init_args")
        if name not in config and isinstance(inner, Mapping):
            config = inner
        config = config.get(name)
    return config


def algorithm(run: Run) -> str:
    """Return the name of the federated algorithm; ``centralised`` without one, empty without a config."""
    config = run.config()
    if not config:
        return ""
    if not config.get("federated"):
        return "centralised"
    return class_name(within(config, "federated", "algorithm")) or "FedAvg"


def model(run: Run) -> str:
    """Return the module's class and its language model; of a folder, the name without its parents."""
    config = run.config()
    base = within(config, "model", "model")
    named = Path(base).name if isinstance(base, str) and base.startswith(("/", ".", "~")) else base
    words = class_name(config.get("model")), named if isinstance(named, str) else ""
    return ", ".join(word for word in words if word)


def data(run: Run) -> str:
    """Return the source of the rows; of a file, the name without its folders."""
    source = within(run.config(), "data", "source")
    named = source[0] if isinstance(source, list) and source else source
    if not isinstance(named, str):
        return ""
    return named if ":" in named else Path(named).name


def augmentation_folder(run: Run) -> Path | None:
    """Find the record of added rows: beside the run, where its config says, or where a moved recipe has it."""
    configured = within(run.config(), "data", "init_args", "augmentation_folder")
    places = [run.folder / "augmentation"]
    if isinstance(configured, str):
        written = Path(configured).expanduser()
        # The second: where the recipe has been moved to.
        places += [written, run.folder.parent / written.parent.name / written.name]
    return next((place for place in places if AugmentationRecord(place).added.is_file()), None)


def callbacks(run: Run) -> list[dict[str, Any]]:
    """Return the specs of the trainer's callbacks."""
    return objects(within(run.config(), "trainer", "callbacks"))


def task_class(run: Run, task: str) -> str:
    """Return the class that scores a task in a run with the callback ``TaskScores``; empty where it is not known."""
    specs = [within(callback, "tasks", task) for callback in callbacks(run)]
    return next((class_name(spec) for spec in specs if spec), "")


def rounds(run: Run) -> tuple[int, int | None]:
    """Return the rounds or epochs done (of a finished run without logs: all) and the number wanted, None if unknown."""
    # Of the visits the last row alone, as rounds are in order.
    last = [row.get("round") for row in run.csv("visits.csv")[-1:]]
    done = [place + 1 for place in map(number, last) if place is not None]
    done += [epoch + 1 for epoch in _ended_epochs(run)]
    wanted = number(within(run.config(), "trainer", "max_epochs"))
    most = None if wanted is None or wanted < 0 else int(wanted)  # -1 is Lightning's word for no end
    logged_nothing = 0 if most is None or not run.is_done else most
    return int(max(done, default=logged_nothing)), most


def _ended_epochs(run: Run) -> list[float]:
    """Return the epochs in the log; of a stopped run without one that is under way, of which steps alone are logged."""
    values = Counter(
        (epoch, name)
        for row in run.metrics()
        for name, text in row.items()
        if text and name not in ("epoch", "step") and (epoch := number(row.get("epoch"))) is not None
    )
    # A round that was cut is validated as well, and has no entry of the federation.
    if of_rounds := sorted({epoch for epoch, name in values if name.startswith("fed/")}):
        return of_rounds
    epochs = sorted({epoch for epoch, _ in values})
    if run.is_done or not run.record():
        return epochs
    of_steps = {name for (_, name), times in values.items() if times > 1}
    is_over = any(epoch == epochs[-1] and name not in of_steps for epoch, name in values)
    return epochs if is_over else epochs[:-1]


def flat(config: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every single value of a config with its dotted key, ``init_args`` left out of the keys.

    Examples:
        >>> list(flat({"model": {"class_path": "M", "init_args": {"lr": 0.1}}, "x": [1, {"y": 2}]}))
        [('model', 'M'), ('model.lr', 0.1), ('x.0', 1), ('x.1.y', 2)]
    """
    if isinstance(config, Mapping):
        if not config and key:
            yield key, {}
        for name, value in config.items():
            # The key of a class has its name as the value.
            below = key if name in ("init_args", "class_path") else f"{key}.{name}".lstrip(".")
            yield from flat(value, below)
    elif isinstance(config, list) and any(isinstance(value, Mapping) for value in config):
        for place, value in enumerate(config):
            yield from flat(value, f"{key}.{place}")
    else:
        yield key, config


def under(folder: Path, value: Any) -> Any:
    """Return a value with the run's own folder, which differs from run to run, replaced by ``RUN``.

    Examples:
        >>> under(Path("/home/me/runs/a"), "/home/me/runs/a/metrics")
        'RUN/metrics'
    """
    if not isinstance(value, str) or len(str(folder)) < 2:  # "/" and "." would be found in most texts
        return value
    return value.replace(str(folder), "RUN")


class Distribution(NamedTuple):
    """Data that one run or several have."""

    counts: Counts  # client -> label -> rows
    source: str  # the file that says so
    by_group: bool  # whether labels are the known groups of clients: the rows have none
    runs: list[Run]  # that have exactly these


def data_of(run: Run) -> Distribution:
    """Read ``data.csv``, else ``visits.csv``; where rows have no label but clients a known group, that is the label."""
    counts: Counts = {}
    source = "data.csv"
    for row in run.csv(source):
        if row.get("split") == "train" and (rows := number(row.get("rows"))):
            by_label = counts.setdefault(row.get("client", ""), {})
            label = row.get("label", "")
            by_label[label] = by_label.get(label, 0) + int(rows)
    if not counts:
        source = "visits.csv"
        for row in run.csv(source):
            # A part of an algorithm, such as Ditto's personal visit, trains on the client's own rows, too.
            if row.get("split", "synthetic") not in OF_CANDIDATES and (rows := number(row.get("examples"))):
                counts[row.get("client", "")] = {"": int(rows)}
    groups = {row.get("client", ""): row.get("known_group", "") for row in run.csv("groups.csv")}
    by_group = bool(counts) and all(groups.get(name) and set(rows) == {""} for name, rows in counts.items())
    if by_group:
        counts = {client: {groups[client]: by_label[""]} for client, by_label in counts.items()}
    return Distribution(counts, source, by_group, [run])
