"""Savings of the clients of FedDCA* by a smaller encoder: size and time of an encoder, and of two that are made of it.

Z. Wang et al. (FedDCA), 2024, https://arxiv.org/abs/2409.20135, Table 4, compares bge-large-en-v1.5 (335 M parameters) with
all-MiniLM-L6-v2 (22.7 M): 946 and 302 seconds for their public set. ``--shapes`` compares these two by their shapes, with
random weights and as many random tokens as a text has words and marks. ``--model`` compares a BERT-like encoder with

* ``cut``: its first layers alone, unchanged, with its pooling;
* ``words``: the mean of its word embeddings (a static embedding: no layers at all).

Nothing is trained. Encoders take turns on the same texts, in batches of texts of similar length, and the median over the
repetitions counts, so a noisy machine disturbs all alike. ``--make`` keeps the two as folders, which
``benchmarks/coverage.py --small`` takes.

Run: OMP_NUM_THREADS=1 python benchmarks/encoder_cost.py --shapes --source FILE --columns question
     OMP_NUM_THREADS=1 python benchmarks/encoder_cost.py --model FOLDER --source FILE --columns question [--make FOLDER]
"""

import argparse
import json
import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedlight.datamodules.rows.columns import text_at
from fedlight.datamodules.rows.fields import instruction_text
from fedlight.datamodules.rows.rows import load_rows

SHAPES = {"bge-large-en-v1.5": (1024, 24, 16), "all-MiniLM-L6-v2": (384, 6, 12)}  # width, layers, heads


class Shape(torch.nn.Module):
    """A BERT of a given shape with random weights, which takes the time and memory of the encoder of that shape."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        from transformers import BertConfig, BertModel

        super().__init__()
        shape = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
        self.network = BertModel(BertConfig(**shape, intermediate_size=4 * width)).eval()

    @torch.no_grad()
    def encode(self, texts: Sequence[str], batch_size: int = 32, **_: object) -> np.ndarray:
        """Mean vectors ``(texts, width)`` of random tokens, two more than a text has words and marks."""
        lengths = torch.tensor([2 + len(re.findall(r"\w+|[^\w\s]", text)) for text in texts])
        vectors = []
        for part in lengths.split(batch_size):
            mask = torch.arange(int(part.max())) < part[:, None]
            tokens = torch.randint(1000, 30000, mask.shape)
            states = self.network(tokens, attention_mask=mask.long()).last_hidden_state
            vectors.append((states * mask[..., None]).sum(dim=1) / part[:, None])
        return torch.cat(vectors).numpy()


def cut(folder: str, layers: int) -> Any:
    """The encoder with its first layers alone.

    Raises:
        ValueError: it has no more than ``layers``.
    """
    model = load(folder)
    network = model[0].auto_model
    has = len(network.encoder.layer)
    if not 0 < layers < has:
        raise ValueError(f"--layers {layers}: the encoder has {has}, give a number from 1 to {has - 1}")
    network.encoder.layer = network.encoder.layer[:layers]
    network.config.num_hidden_layers = layers
    return model


def words(folder: str) -> Any:
    """The mean of the encoder's word embeddings."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    model = load(folder)
    weights = model[0].auto_model.get_input_embeddings().weight.detach().clone()
    return SentenceTransformer(
        modules=[StaticEmbedding(model.tokenizer, embedding_weights=weights)], device="cpu"
    )


def load(folder: str) -> Any:
    """A model of sentence-transformers, on the CPU."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(folder, device="cpu", local_files_only=True)


def read_texts(source: str, columns: Sequence[str], number: int) -> list[str]:
    """So many distinct texts of a source, drawn once and for all, shortest first."""
    rows = load_rows(source)
    texts = sorted({instruction_text({name: text_at(row, name) for name in columns}) for row in rows} - {""})
    drawn = np.random.default_rng(0).permutation(len(texts))[:number]
    return sorted((texts[index] for index in drawn), key=len)


def measure(
    models: dict[str, Any], texts: Sequence[str], repetitions: int, batch_size: int
) -> list[dict[str, Any]]:
    """One row for each model; ratios are to the first."""
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for repetition in range(repetitions + 1):  # the first warms up
        for name, model in models.items():
            start = time.perf_counter()
            model.encode(
                texts[:: 10 if repetition == 0 else 1], batch_size=batch_size, show_progress_bar=False
            )
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    sizes = {name: sum(weight.numel() for weight in model.parameters()) for name, model in models.items()}
    first = next(iter(models))
    return [
        {
            "encoder": name,
            "dimension": len(model.encode(["x"], show_progress_bar=False)[0]),
            "parameters": sizes[name],
            "texts_per_second": len(texts) / medians[name],
            "parameters_ratio": sizes[first] / sizes[name],
            "speed_ratio": medians[first] / medians[name],
        }
        for name, model in models.items()
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = [
        "| encoder | dimensions | parameters | texts/s | times smaller | times faster |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['encoder']} | {row['dimension']} | {row['parameters'] / 1e6:.1f} M | {row['texts_per_second']:,.0f} | "
            f"{row['parameters_ratio']:.1f} | {row['speed_ratio']:.1f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    compared = parser.add_mutually_exclusive_group(required=True)
    compared.add_argument("--model", help="folder of a BERT-like encoder of sentence-transformers")
    compared.add_argument("--shapes", action="store_true", help="the paper's two, by their shapes")
    parser.add_argument("--layers", type=int, default=2, help="that the cut encoder keeps")
    parser.add_argument("--make", type=Path, help="where the smaller encoders are kept, as folders")
    parser.add_argument("--source", help="rows whose texts are encoded; without it nothing is measured")
    parser.add_argument("--columns", nargs="+", default=["question"])
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where the rows go as well")
    options = parser.parse_args(arguments)
    if options.shapes:
        models: dict[str, Any] = {name: Shape(*shape) for name, shape in SHAPES.items()}
    else:
        smaller = {
            f"cut to {options.layers} layers": cut(options.model, options.layers),
            "words": words(options.model),
        }
        if options.make:
            for name, model in zip(("cut", "words"), smaller.values(), strict=True):
                model.save(str(options.make / name))
        models = {Path(options.model).name: load(options.model), **smaller}
    if options.source:
        texts = read_texts(options.source, options.columns, options.texts)
        rows = measure(models, texts, options.repetitions, options.batch_size)
        mean = sum(map(len, texts)) / len(texts)
        print(f"{len(texts):,} texts of {mean:,.0f} characters on average, {torch.get_num_threads()} threads")
        print(table(rows))
        if options.json:
            options.json.write_text(json.dumps({"texts": len(texts), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
