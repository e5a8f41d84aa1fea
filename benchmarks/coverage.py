"""How much of a domain the clients of FedDCA hold after each way of augmentation: Table 3 of the paper, without an LLM.

Z. Wang et al. (FedDCA), 2024, https://arxiv.org/abs/2409.20135. Of a domain 1,000 texts are the clients', ten with 100;
the rest of it and all other domains are public. Each client is given ``number`` public texts, at random or near its
cluster centres. Coverage (eq. 5) is of all texts of the domain, by those of it that the clients then hold. Besides
the paper's ways there are some that explain their order, see `coverage_ways.ways`.

FedDCA* has the mean of the encoder's word embeddings at the clients (a static embedding: no layers at all) and a
projector, trained for each seed on texts that are private in no seed.

Run: OMP_NUM_THREADS=1 python benchmarks/coverage.py --encoder FOLDER --folder FOLDER
     --domain math gsm8k.jsonl.gz question --domain medicine medquad.jsonl.gz question ...
"""

import argparse
import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from coverage_ways import Server, fit_projector, send, ways

from fedlight.datamodules.rows.columns import text_at
from fedlight.datamodules.rows.fields import instruction_text
from fedlight.datamodules.rows.rows import load_rows
from fedlight.datamodules.vectors.clusters import Clusters, assign_clusters
from fedlight.datamodules.vectors.encoders import SentenceEncoder
from fedlight.datamodules.vectors.selection import select_centers
from fedlight.datamodules.vectors.vector_index import VectorIndex
from fedlight.evaluation.coverage import domain_coverage
from fedlight.modules.projector import ProjectorModule
from fedlight.report.figures.coverage_plots import draw_similarities
from fedlight.report.figures.style import save
from fedlight.support.files import write_json
from fedlight.support.results import summary
from fedlight.support.seeding import derive_seed

NUM_CLIENTS, PRIVATE, XI, ALPHA, PSEUDO_LABELS = 10, 100, 10, 0.7, 100
NEAR = 0.9  # cosine of texts that say nearly the same
BINS = np.linspace(-1, 1, 101)
ByClient = dict[str, np.ndarray]


class Texts(NamedTuple):
    """All distinct texts, encoded; the rows of each domain, and for each seed those of each domain's clients.

    Attributes:
        small: by word embeddings; NaN where a text is neither a client's nor one that projectors are trained on (``free``).
    """

    large: np.ndarray
    small: np.ndarray
    domains: dict[str, np.ndarray]
    clients: dict[int, dict[str, ByClient]]
    free: np.ndarray


def read(options: argparse.Namespace) -> Texts:
    """Reads, draws and encodes."""
    by_domain = {}
    for name, source, *columns in options.domain:
        rows = load_rows(source)
        texts = (instruction_text({column: text_at(row, column) for column in columns}) for row in rows)
        by_domain[name] = [text for text in dict.fromkeys(texts) if text]
    texts = list(dict.fromkeys(text for own in by_domain.values() for text in own))
    place = {text: row for row, text in enumerate(texts)}
    domains = {name: np.array([place[text] for text in own]) for name, own in by_domain.items()}
    large = SentenceEncoder(options.encoder, cache=options.cache).encode(texts)
    clients = {
        seed: {name: draw_clients(large, rows, seed, options.split) for name, rows in domains.items()}
        for seed in options.seeds
    }
    private = [own for of_seed in clients.values() for of in of_seed.values() for own in of.values()]
    free = np.setdiff1d(np.arange(len(texts)), np.concatenate(private))
    free = np.random.default_rng(0).permutation(free)[: options.projector_texts]
    needed = np.unique(np.concatenate([*private, free]))
    vectors = words(options.encoder).encode([texts[row] for row in needed], normalize_embeddings=True)
    small = np.full((len(texts), vectors.shape[1]), np.nan, dtype=np.float32)
    small[needed] = vectors
    return Texts(large, small, domains, clients, free)


def words(folder: str) -> Any:
    """The mean of the encoder's word embeddings."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    model = SentenceTransformer(folder, device="cpu", local_files_only=True)
    weights = model[0].auto_model.get_input_embeddings().weight.detach().clone()
    embedding = StaticEmbedding(model.tokenizer, embedding_weights=weights)
    return SentenceTransformer(modules=[embedding], device="cpu")


def draw_clients(vectors: np.ndarray, rows: np.ndarray, seed: int, split: str) -> ByClient:
    """Each client's rows of a domain: dealt out at random, or each from other clusters (appendix A.2).

    Example:
        >>> own = draw_clients(np.eye(1200, dtype=np.float32), np.arange(1200), 0, "iid")
        >>> len(own), len(np.unique(np.concatenate([*own.values()])))
        (10, 1000)
    """
    rng = np.random.default_rng(derive_seed(seed, "clients"))
    if split == "iid":
        drawn = rng.permutation(rows)[: NUM_CLIENTS * PRIVATE]
        return {f"c{client}": part for client, part in enumerate(np.array_split(drawn, NUM_CLIENTS))}
    labels = assign_clusters(vectors[rows], PSEUDO_LABELS, seed)
    clusters = np.array_split(rng.permutation(np.unique(labels)), NUM_CLIENTS)
    return {
        f"c{client}": rng.permutation(rows[np.isin(labels, own)])[:PRIVATE]
        for client, own in enumerate(clusters)
    }


def make_server(texts: Texts, clients: ByClient, projector: ProjectorModule, seed: int) -> Server:
    """Centres that the clients send by the large encoder, and by word embeddings with the projector."""
    rows = np.setdiff1d(np.arange(len(texts.large)), np.concatenate([*clients.values()]))
    index = VectorIndex.build(texts.large[rows], "exact")
    small = send(texts.small, clients, XI, seed)
    projected = {client: Clusters(projector.project(own.centers), own.sizes) for client, own in small.items()}
    return Server(rows, index, send(texts.large, clients, XI, seed), {"words": projected})


def score(
    texts: Texts, domain: np.ndarray, points: np.ndarray, clients: ByClient, given: ByClient
) -> dict[str, float]:
    """Coverage of the points, and shares of the given rows: distinct ones, in the domain, near rows that a client has."""
    private, rows = (np.concatenate([*of.values()]) for of in (clients, given))
    distinct = np.unique(rows)
    inside = np.intersect1d(distinct, domain)
    held = torch.from_numpy(texts.large[np.concatenate([private, inside])])
    near = (texts.large[inside] @ texts.large[private].T).max(axis=1, initial=-1) >= NEAR
    return {
        "coverage": domain_coverage(torch.from_numpy(texts.large[points]), held),
        "distinct": len(distinct) / max(len(rows), 1),
        "in_domain": len(inside) / max(len(distinct), 1),
        "rows_in_domain": float(len(inside)),
        "nearly_private": float(near.mean()) if len(near) else 0.0,
    }


def histograms(server: Server, chosen: Mapping[str, int]) -> dict[str, list[int]]:
    """How similar each client's chosen centre is to the public rows: their numbers in `BINS`."""
    vectors = server.public_index.vectors
    return {
        name: np.histogram(vectors @ own.centers[chosen[name]], BINS)[0].tolist()
        for name, own in server.sent.items()
    }


def run_seed(texts: Texts, options: argparse.Namespace, seed: int) -> dict[str, list[dict[str, Any]]]:
    """All domains, numbers and ways with one seed."""
    clients = texts.clients[seed]
    small, large = texts.small[texts.free], texts.large[texts.free]
    projector = fit_projector(small, large, seed=seed, epochs=options.epochs)
    result: dict[str, list[dict[str, Any]]] = {"coverage": [], "centers": []}
    for domain, rows in texts.domains.items():
        server = make_server(texts, clients[domain], projector, seed)
        counts = histograms(server, select_centers(server.sent, seed))
        points = np.random.default_rng(seed).permutation(rows)[: options.points]
        result["centers"].append({"domain": domain, "seed": seed, "histograms": counts})
        for number in options.numbers:
            start = time.perf_counter()
            about = {"domain": domain, "number": number, "seed": seed}
            inside = np.intersect1d(rows, server.rows)
            result["coverage"] += [
                {"method": name, **about, **score(texts, rows, points, clients[domain], way())}
                for name, way in ways(server, inside, number, ALPHA, seed).items()
            ]
            print(f"seed {seed}, {domain}, {number}: {time.perf_counter() - start:.0f} s", flush=True)
    return result


def table(rows: Sequence[dict[str, Any]], column: str) -> str:
    """One value by method and domain, mean and spread over the seeds, as Markdown."""
    domains = list(dict.fromkeys(row["domain"] for row in rows))
    cells = {
        domain: summary(
            [{"method": row["method"], column: row[column]} for row in rows if row["domain"] == domain]
        )
        for domain in domains
    }
    lines = [f"| {column} | {' | '.join(domains)} |", "|---" * (1 + len(domains)) + "|"]
    for method in cells[domains[0]]:
        lines.append(f"| {method} | {' | '.join(cells[domain][method][column] for domain in domains)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table for each number of rows; all values go into the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--domain", nargs="+", action="append", required=True, metavar=("NAME", "FILE COLUMN")
    )
    parser.add_argument("--encoder", required=True, help="of the server, and of FedDCA's clients")
    parser.add_argument("--numbers", nargs="+", type=int, default=[100, 1000, 5000])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--split", choices=("iid", "kmeans"), default="iid")
    parser.add_argument("--epochs", type=int, default=5, help="of the projector")
    parser.add_argument("--projector-texts", type=int, default=20_000, help="that it is trained on")
    parser.add_argument(
        "--points", type=int, help="of a domain that coverage is taken of, drawn; all without"
    )
    parser.add_argument("--similarities", help="figure of the centres' similarities to public texts")
    parser.add_argument("--cache", default="~/.cache/fedlight/embeddings")
    parser.add_argument(
        "--folder", type=Path, required=True, help="for a file of each seed; what is there is not run again"
    )
    options = parser.parse_args(arguments)
    texts = read(options)
    print({name: len(rows) for name, rows in texts.domains.items()}, flush=True)
    settings = json.loads(json.dumps(vars(options), default=str))
    without = {
        name: value for name, value in settings.items() if name not in ("cache", "folder", "similarities")
    }
    results = []
    for seed in options.seeds:
        file = options.folder / f"seed{seed}.json"
        if not file.is_file():
            write_json(file, {"settings": without, **run_seed(texts, options, seed)})
        results.append(json.loads(file.read_text()))
        if results[-1].pop("settings") != without:
            raise ValueError(
                f"--folder {options.folder}: {file.name} was made with other options: give another folder"
            )
    joined = {name: [row for result in results for row in result[name]] for name in results[0]}
    if options.similarities:
        drawn = [row for row in joined["centers"] if row["seed"] == options.seeds[0]]
        table_of = {row["domain"]: {"edges": BINS.tolist(), "counts": row["histograms"]} for row in drawn}
        save(draw_similarities(table_of, ALPHA), options.similarities)
    for number in options.numbers:
        rows = [row for row in joined["coverage"] if row["number"] == number]
        for column in ("coverage", "rows_in_domain"):
            print(f"\n{number} rows for each client\n{table(rows, column)}", flush=True)


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    main()
