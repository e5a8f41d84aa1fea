"""Tables that compare augmentations by tuned models' scores, coverage and topics; they read folders of earlier stages."""

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from fedlight.augmentation.overlap import retrieval_overlap
from fedlight.datamodules.instructions.augmentation_record import AugmentationRecord
from fedlight.datamodules.rows.columns import check_columns, field_at
from fedlight.datamodules.rows.fields import instruction_text
from fedlight.datamodules.rows.rows import load_rows
from fedlight.datamodules.vectors.encoders import Encoder, HashedEncoder, SentenceEncoder
from fedlight.evaluation.bootstrap import seeds_needed, student_interval
from fedlight.evaluation.coverage import domain_coverage
from fedlight.generators.toy_teacher import topic_of
from fedlight.recipes.method_table import metric_of
from fedlight.support.checks import check_choice
from fedlight.support.files import result_of
from fedlight.support.results import rich_text

TOPICS: Mapping[str, Callable[[str], object]] = {"toy": topic_of}
"""Rule -> function that returns the topic of a text, or None."""


def domain_table(
    methods: dict[str, dict[str, Any]],
    source: str,
    columns: dict[str, str],
    zero_shot: str | None = None,
    metric: str | dict[str, str] = "score/domain",
    encoder: str = "hashed",
    reference: str | None = None,
    topics: str | None = None,
    one_of_several: bool = False,
) -> dict[str, Any]:
    """Return one row for each augmentation.

    Args:
        methods: augmentation -> ``augmentation``, its ``augmentation_folder``, and ``runs``: name of a column -> folder of
            the run whose score is in this column.
        source: all texts of the domain; see `fedlight.datamodules.rows.rows`.
        columns: slots of its rows, in their order; ``response`` is ignored.
        zero_shot: folder of the stage that tested the untuned model, which gets a row.
        metric: name of the metric that the runs have logged; several as column -> name, then ``runs`` is the one folder with
            all of them.
        encoder: folder or hub name of a sentence encoder, or ``hashed``; for the coverage.
        reference: ``augmentation_folder`` of the run whose rows the others should find; see `retrieval_overlap`.
        topics: ``toy``: count topics of the embedded domains; None: texts have no topics.
        one_of_several: clients have rows of other domains as well, which cover nothing.

    Returns:
        ``rows`` with ``method``, a score for each run, ``coverage`` of the domain by the clients' own and added rows,
        and, if rows were added, ``in_domain``, the share of them in the domain; generated rows count as inside. With
        topics, ``new_topics``: number of the domain's topics that added rows have and no client's own row has. With a
        reference, ``overlap``: the share of its rows for a client that are added here as well, mean over clients.

    Raises:
        ValueError: a folder has no record, a run has not logged the metric, or ``topics`` is unknown.
    """
    if topics is not None:
        check_choice("topics", topics, tuple(TOPICS))
    rows = load_rows(source)
    check_columns(rows, columns, source)
    texts = {
        instruction_text({name: field_at(row, path, name) for name, path in columns.items()}) for row in rows
    }
    domain = sorted(texts)  # a set has another order in each process
    model: Encoder = HashedEncoder() if encoder == "hashed" else SentenceEncoder(encoder)
    points = torch.from_numpy(model.encode(domain))  # [texts, dimension]
    place = {text: number for number, text in enumerate(domain)}
    table = []
    for method, folders in methods.items():
        scores = _scores(folders["runs"], metric)
        own_texts, added, shares = _held(Path(folders["augmentation"]), texts)
        if one_of_several:
            own_texts = [text for text in own_texts if text in place]
        held = dict.fromkeys([*own_texts, *added])  # each text once
        new = [text for text in held if text not in place]  # the others' vectors are in points
        vectors = torch.cat([points[[place[text] for text in held if text in place]], _encoded(model, new)])
        row = {"method": method, **scores, "coverage": domain_coverage(points, vectors), **shares}
        if topics is not None:
            topics_of = ({TOPICS[topics](text) for text in some} for some in (domain, own_texts, added))
            of_domain, known, reached = topics_of
            row["new_topics"] = len((reached & of_domain) - known - {None})  # None: a text without one
        if reference is not None and shares:
            row["overlap"] = retrieval_overlap(folders["augmentation"], reference)
        table.append(row)
    if zero_shot is not None:
        names = dict.fromkeys(name for folders in methods.values() for name in folders["runs"])
        raw = zero_shot if isinstance(metric, dict) else dict.fromkeys(names, zero_shot)
        table.insert(0, {"method": "zero-shot", **_scores(raw, metric)})
    return {"rows": table}


def by_domain_table(
    methods: dict[str, dict[str, Any]],
    domains: dict[str, dict[str, Any]],
    columns: dict[str, str],
    encoder: str = "hashed",
    topics: str | None = None,
) -> dict[str, Any]:
    """Return one row for each setting with clients of several domains, and domain: its score and its coverage.

    Args:
        methods: setting -> ``augmentation`` and ``runs``, as of `domain_table`.
        domains: domain -> ``source``, all of its texts, and ``metric``, the name of its score.
        columns: see `domain_table`.
        encoder: see `domain_table`.
        topics: see `domain_table`.

    Returns:
        ``rows``: first one for each setting with the means over domains, ``method`` is its name; then those of
        `domain_table` for each domain, ``method`` is ``SETTING, DOMAIN``. Clients' rows of other domains cover nothing.
    """
    tables = {
        domain: domain_table(
            methods,
            data["source"],
            columns,
            metric=data["metric"],
            encoder=encoder,
            topics=topics,
            one_of_several=True,
        )["rows"]
        for domain, data in domains.items()
    }
    means = []
    for of_setting in zip(*tables.values(), strict=True):
        names = [name for name in of_setting[0] if name != "method"]
        means.append(
            {"method": of_setting[0]["method"]}
            | {name: mean(float(row[name]) for row in of_setting) for name in names}
        )
    named = [
        {**row, "method": f"{row['method']}, {domain}"} for domain, rows in tables.items() for row in rows
    ]
    return {"rows": [*means, *named]}


def differences(
    tables: list[str], against: str, columns: list[str], difference: float = 0.03
) -> dict[str, Any]:
    """Return each method's difference to one of them: mean over the seeds of paired differences, and its interval.

    All methods do well or badly together in a seed's world; so they are compared within each seed.

    Args:
        tables: folders of the stages with the tables, one for each seed.
        against: method that the others are compared with, or column that the other columns of each method are.
        columns: columns to compare.
        difference: least difference that seeds should tell from zero, see `seeds_needed`.

    Returns:
        ``rows`` with ``method`` and, for each column, its mean difference under the column's name, ``COLUMN low`` and
        ``COLUMN high``, the 95 % interval by Student's t (both from two seeds on), and ``COLUMN seeds``, the number of
        seeds that could tell ``difference`` from zero with probability 0.8; a ``report`` of them.

    Raises:
        ValueError: a table has no such method or column.
    """
    by_seed = [{row["method"]: row for row in result_of(table)["rows"]} for table in tables]

    def reference(rows: dict[str, Any], method: str, column: str) -> Any:
        return rows[against].get(column) if against in rows else rows[method].get(against)

    for table, rows in zip(tables, by_seed, strict=True):
        if not any(against in names for names in (rows, *rows.values())):
            raise ValueError(f"{table} has no method {against!r}: give one of {', '.join(by_seed[0])}")
    compared = []
    for method in by_seed[0]:
        row: dict[str, Any] = {"method": method}
        for column in columns:
            gaps = [
                rows[method][column] - reference(rows, method, column)
                for rows in by_seed
                if rows[method].get(column) is not None and reference(rows, method, column) is not None
            ]
            if method == against or len(gaps) < len(by_seed):  # or a seed lacks the column
                continue
            row[column] = mean(gaps)
            if len(gaps) > 1:  # Student's t needs two
                low, high = student_interval(gaps)
                needed = seeds_needed(stdev(gaps), difference)
                row |= {f"{column} low": low, f"{column} high": high, f"{column} seeds": needed}
        if len(row) > 1:
            compared.append(row)
    title = f"minus {against}, mean of {len(tables)} seeds [95 % interval] (seeds for {difference:g})"
    lines = [[row["method"], *(_difference(row, column) for column in columns)] for row in compared]
    return {"rows": compared, "report": rich_text(title, ["method", *columns], lines)}


def _difference(row: Mapping[str, Any], column: str) -> str:
    if column not in row:
        return "-"
    if f"{column} low" not in row:
        return f"{row[column]:+.3f}"
    low, high = row[f"{column} low"], row[f"{column} high"]
    return f"{row[column]:+.3f} [{low:+.3f}, {high:+.3f}] ({row[f'{column} seeds']})"


def _held(folder: Path, domain: set[str]) -> tuple[list[str], list[str], dict[str, float]]:
    """Return the clients' own texts and the added ones of the domain, and the share of the added rows in the domain."""
    record = AugmentationRecord(folder)
    record.refuse_damaged()
    added = [
        (instruction_text(row.fields), row.row is None) for rows in record.read().values() for row in rows
    ]
    own_texts = [instruction_text(fields) for _, fields in record.read_own()]
    inside = [text for text, generated in added if generated or text in domain]
    shares = {"in_domain": len(inside) / len(added)} if added else {}
    return own_texts, inside, shares


def _encoded(encoder: Encoder, texts: list[str]) -> torch.Tensor:
    return torch.from_numpy(encoder.encode(texts)) if texts else torch.empty(0, encoder.dimension)


def _scores(runs: str | Mapping[str, str], metric: str | Mapping[str, str]) -> dict[str, float]:
    """Return column -> value, of one metric of several runs, or of several metrics of one run."""
    if isinstance(runs, str):
        if isinstance(metric, str):
            raise ValueError(f"runs={runs}: give a folder for each column, or metric as column -> name")
        return {name: metric_of(runs, [logged]) for name, logged in metric.items()}
    if not isinstance(metric, str):
        raise ValueError("metric has several columns: give runs as one folder")
    return {name: metric_of(folder, [metric]) for name, folder in runs.items()}
