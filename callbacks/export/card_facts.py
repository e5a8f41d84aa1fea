"""Contents of a model card, from a run's logs: counts, means and settings, never a row, an id or a path."""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from fedlight.pretrained.hub import EMBEDDED, NAME, find_licence
from fedlight.pretrained.named import PRETRAINED, is_dequantized
from fedlight.support.words import ends_of, number

SCORE = re.compile(r"(val|test|score|group_mean|win_rate)(/|$)|win_rate_")
"""Metrics of the finished model; those of training batches say little of it."""
PAPER = re.compile(r"https://(?:arxiv\.org/abs|aclanthology\.org|openreview\.net|doi\.org)/[\w./?=-]*[\w]")
FILES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".gz", ".zip", ".txt", ".yaml")


class Score(NamedTuple):
    """Value of a metric, with the ends of its interval where the run has them."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None


class Privacy(NamedTuple):
    """Guarantee of differential privacy of clients."""

    towards: str
    epsilon: float
    delta: float


@dataclass(frozen=True)
class CardFacts:
    """Facts about a run in its card; unknown ones are empty, None or 0."""

    module: str  # name of the Lightning module's class
    base: str  # hub name, folder's name or ``toy`` of the base model
    algorithm: str = ""  # name of the federated algorithm's class; empty for pooled training
    # name of a class -> address of the paper that its file names
    papers: Mapping[str, str] = field(default_factory=dict)
    base_form: str = "plain"  # number form of the base in training: ``plain``, ``int8`` or ``nf4``
    licence: str = "unknown"  # identifier of the base's licence, or ``unknown``
    source: str = ""  # name of the data, without folders
    clients: int = 0  # number of clients
    # number of training examples of all clients; a vote that is shown in both orders is two
    examples: int = 0
    added: int = 0  # how many of them an augmentation added to the clients' own
    rounds: int = 0  # number of rounds that were trained; epochs where nothing is federated
    bytes_down: int = 0  # bytes sent to clients, in the visits of these rounds
    bytes_up: int = 0  # bytes sent by clients, in the visits of these rounds
    simulated_seconds: float | None = None  # time on the virtual clock of emulated devices; None without them
    privacy: Sequence[Privacy] = ()  # guarantees; none where the list is empty
    scores: Sequence[Score] = ()  # last values of the metrics of the global model
    # name -> value, of the settings that decide the training
    settings: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""  # command line without folders
    versions: Mapping[str, str] = field(default_factory=dict)  # package -> version


def public_name(text: Any) -> str:
    """Return the name of a model or data set without folders; a hub name and an embedded one stay as they are.

    Examples:
        >>> public_name("/home/me/votes.jsonl"), public_name("owner/name"), public_name("toy:votes?opposition=1")
        ('votes.jsonl', 'owner/name', 'toy:votes?opposition=1')
        >>> public_name("smollm2-135m-instruct")
        'HuggingFaceTB/SmolLM2-135M-Instruct'
        >>> public_name(["data/a.csv", "data/b.csv"]), public_name(None)
        ('a.csv, b.csv', '')
    """
    if isinstance(text, (list, tuple)):
        return ", ".join(public_name(each) for each in text)
    if not isinstance(text, (str, PurePath)):
        return ""
    text = str(text)
    if text in PRETRAINED:
        return PRETRAINED[text].hub
    if text.partition(":")[0] in EMBEDDED and "/" not in text:  # with options behind a colon
        return text
    # A path may look like a hub name, and a card shows no folders.
    if NAME.fullmatch(text) and not text.endswith(FILES) and not Path(text).exists():
        return text
    return text.replace("\\", "/").rstrip("/").rpartition("/")[2]  # a path of Windows


def base_form(model: Any, base: str) -> str:
    """Return the number form of the base in training: ``base``, or the source of a dequantized model."""
    return "dequantized GGUF" if base == "plain" and is_dequantized(str(model)) else base


def card_facts(
    kind: type,
    algorithm: type | None,
    settings: Sequence[Mapping[str, Any]],
    last: Mapping[str, float],
    visits: Iterable[Mapping[str, Any]],
    record: Mapping[str, Any],
    ask_hub: bool = False,
    /,
    **counts: Any,
) -> CardFacts:
    """Return the facts of a run of a class of module, and of algorithm (None for pooled training).

    ``settings`` are those of module, loop and datamodule, ``last`` has the last value of each metric, ``visits`` are the
    rows of ``visits.csv``, ``record`` is the entry of ``run.json``, and ``counts`` are further arguments of `CardFacts`.
    With ``ask_hub`` the hub is asked for the base's licence where its folder does not say it.
    """
    model = str(settings[0].get("model", ""))
    versions = record.get("versions")
    named = versions.items() if isinstance(versions, Mapping) else ()
    known: dict[str, Any] = {
        "module": kind.__name__,
        "algorithm": algorithm.__name__ if algorithm else "",
        "papers": papers_of(each for each in (kind, algorithm) if each is not None),
        "base": public_name(model) or kind.__name__,
        "base_form": base_form(model, str(settings[0].get("base", "plain"))),
        "licence": find_licence(model, ask_hub) if model else "unknown",
        "privacy": privacy_of(last),
        "scores": scores_of(last),
        "settings": settings_of(*settings),
        "command": command_line(record),
        "versions": {str(name): str(version) for name, version in named},
    }
    return CardFacts(**{**known, **traffic_of(visits), **counts})


def scores_of(last: Mapping[str, float]) -> list[Score]:
    """Return the scores among the last values of all metrics, with their intervals, sorted by name.

    Examples:
        >>> scores_of({"score/gsm8k": 0.7, "low/gsm8k": 0.6, "high/gsm8k": 0.8, "train/loss": 1.0})
        [Score(name='score/gsm8k', value=0.7, low=0.6, high=0.8)]
    """
    ends = {end for name in last for end in ends_of(name)}
    return [
        Score(name, float(last[name]), *(number(last.get(end)) for end in ends_of(name)))
        for name in sorted(last)
        if SCORE.match(name) and name not in ends and last[name] == last[name]  # NaN is no score
    ]


def privacy_of(last: Mapping[str, float]) -> list[Privacy]:
    """Return the guarantees among the last values of all metrics.

    Examples:
        >>> privacy_of({"fed/epsilon": 3.5, "fed/delta": 1e-5})
        [Privacy(towards='observers of the models', epsilon=3.5, delta=1e-05)]
    """
    # As the privacy account logs them.
    ends = {
        "": "observers of the models",
        "_local": "the server",
        "_sum": "the server, which sees sums alone",
        "_example": "everybody for one example",
    }
    return [
        Privacy(towards, float(last[f"fed/epsilon{end}"]), float(last[f"fed/delta{end}"]))
        for end, towards in ends.items()
        if f"fed/epsilon{end}" in last and f"fed/delta{end}" in last
    ]


def traffic_of(visits: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return bytes and simulated seconds of the rows of ``visits.csv``, as arguments of `CardFacts`.

    Examples:
        >>> traffic_of([{"bytes_down": "8", "bytes_up": "4", "round_end_seconds": ""}, {"bytes_down": "8"}])
        {'bytes_down': 16, 'bytes_up': 4, 'simulated_seconds': None}
    """
    rows = list(visits)
    traffic: dict[str, Any] = {
        name: sum(int(number(row.get(name)) or 0) for row in rows) for name in ("bytes_down", "bytes_up")
    }
    ends = [end for row in rows if (end := number(row.get("round_end_seconds"))) is not None]
    return traffic | {"simulated_seconds": max(ends, default=None)}


def papers_of(classes: Iterable[type]) -> dict[str, str]:
    """Return class name -> the first paper that the head of its file names; classes without one are left out.

    Examples:
        >>> from fedlight.federation.algorithms.fedavg import FedAvg
        >>> papers_of([FedAvg, int])
        {'FedAvg': 'https://arxiv.org/abs/1602.05629'}
    """
    heads = {each.__name__: getattr(sys.modules.get(each.__module__), "__doc__", None) for each in classes}
    matches = {name: PAPER.search(head or "") for name, head in heads.items()}
    return {name: match[0] for name, match in matches.items() if match}


def settings_of(
    model: Mapping[str, Any], federated: Mapping[str, Any], data: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings that decide the training, in a card's words, from those of module, loop and datamodule.

    Examples:
        >>> settings_of({"lr": 0.1, "lora": {"rank": 8, "alpha": 16}}, {"local_steps": 5}, {})
        {'local steps': 5, 'learning rate': 0.1, 'LoRA': 'rank 8, alpha 16'}
    """
    lora, optimizer = model.get("lora"), model.get("optimizer")
    settings = {
        "clients a round": federated.get("clients_per_round"),
        "local steps": federated.get("local_steps"),
        "batch size": data.get("batch_size"),
        "learning rate": model.get("lr"),
        "optimizer": optimizer["name"] if isinstance(optimizer, Mapping) else optimizer,
        "LoRA": f"rank {lora['rank']}, alpha {lora['alpha']:g}" if lora else None,
        "seed": model.get("seed"),
    }
    return {name: value for name, value in settings.items() if value is not None}


def command_line(entry: Mapping[str, Any]) -> str:
    """Return the command of an entry of ``run.json``, whose configs have no folders; dots stand for other arguments.

    Examples:
        >>> command_line({"command": "fit", "configs": ["fedbis.yaml"], "other_arguments": 2})
        'fedlight fit --config fedbis.yaml ...'
    """
    if not entry.get("command"):
        return ""
    named = "".join(f" --config {public_name(name)}" for name in entry.get("configs") or [])
    return f"fedlight {entry['command']}{named}{' ...' if entry.get('other_arguments') else ''}"
