"""Table that compares augmentations by tuned models' scores and coverage of the domain; reads folders of earlier stages."""

from pathlib import Path
from typing import Any

import torch

from fedlight.augmentation.overlap import retrieval_overlap
from fedlight.datamodules.instructions.augmentation_record import AugmentationRecord
from fedlight.datamodules.rows.columns import check_columns, text_at
from fedlight.datamodules.rows.fields import instruction_text
from fedlight.datamodules.rows.rows import load_rows
from fedlight.datamodules.vectors.encoders import Encoder, HashedEncoder, SentenceEncoder
from fedlight.evaluation.coverage import domain_coverage
from fedlight.support.files import result_of


def domain_table(
    methods: dict[str, dict[str, Any]],
    source: str,
    columns: dict[str, str],
    zero_shot: str | None = None,
    metric: str = "score/domain",
    encoder: str = "hashed",
    reference: str | None = None,
) -> dict[str, Any]:
    """Return one row for each augmentation.

    Args:
        methods: augmentation -> ``augmentation``, its ``augmentation_folder``, and ``runs``: name of a column -> folder of
            the run whose score is in this column.
        source: all texts of the domain; see `fedlight.datamodules.rows.rows`.
        columns: slots of its rows, in their order; ``response`` is ignored.
        zero_shot: folder of the stage that tested the untuned model, which gets a row.
        metric: name of the metric that the runs have logged.
        encoder: folder or hub name of a sentence encoder, or ``hashed``; for the coverage.
        reference: ``augmentation_folder`` of the run whose rows the others should find; see `retrieval_overlap`.

    Returns:
        ``rows`` with ``method``, a score for each run, ``coverage`` of the domain by the clients' own and added rows,
        and, if rows were added, ``in_domain``, the share of them in the domain; generated rows count as inside. With a
        reference, ``overlap``: the share of its rows for a client that are added here as well, mean over clients.

    Raises:
        ValueError: a folder has no record, or a run has not logged the metric.
    """
    rows = load_rows(source)
    check_columns(rows, columns, source)
    texts = {instruction_text({name: text_at(row, path) for name, path in columns.items()}) for row in rows}
    domain = sorted(texts)
    of: Encoder = HashedEncoder() if encoder == "hashed" else SentenceEncoder(encoder)
    points = torch.from_numpy(of.encode(domain))
    place = {text: number for number, text in enumerate(domain)}
    found = []
    for method, folders in methods.items():
        scores = {name: _metric(Path(folder), metric) for name, folder in folders["runs"].items()}
        held, shares = _held(Path(folders["augmentation"]), texts)
        new = [text for text in held if text not in place]
        vectors = torch.cat([points[[place[text] for text in held if text in place]], _encoded(of, new)])
        row = {"method": method, **scores, "coverage": domain_coverage(points, vectors), **shares}
        if reference is not None and shares:
            row["overlap"] = retrieval_overlap(folders["augmentation"], reference)
        found.append(row)
    if zero_shot is not None:
        score = _metric(Path(zero_shot), metric)
        names = dict.fromkeys(name for folders in methods.values() for name in folders["runs"])
        found.insert(0, {"method": "zero-shot", **dict.fromkeys(names, score)})
    return {"rows": found}


def _held(folder: Path, domain: set[str]) -> tuple[list[str], dict[str, float]]:
    """Return the clients' texts of the domain, each once, and the share of the added rows in the domain."""
    record = AugmentationRecord(folder)
    if not record.added.is_file():
        raise ValueError(f"{record.added}: there is no such file: give the augmentation_folder of a run")
    record.refuse_damaged()
    own = [instruction_text(row["fields"]) for row in load_rows(str(record.private))]
    added = [(instruction_text(row.fields), row.row is None) for of in record.read().values() for row in of]
    inside = [text for text, generated in added if generated or text in domain]
    shares = {"in_domain": len(inside) / len(added)} if added else {}
    return list(dict.fromkeys([*own, *inside])), shares


def _encoded(encoder: Encoder, texts: list[str]) -> torch.Tensor:
    return torch.from_numpy(encoder.encode(texts)) if texts else torch.empty(0, encoder.dimension)


def _metric(folder: Path, name: str) -> float:
    metrics = result_of(folder)["metrics"]
    if name not in metrics:
        raise ValueError(f"{folder} has no metric {name!r}; it has {', '.join(metrics)}")
    value: float = metrics[name]
    return value
