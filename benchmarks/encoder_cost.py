"""Savings of the clients of FedDCA* by a smaller encoder: size and time of encoders of both shapes, with random weights.

Z. Wang et al. (FedDCA), 2024, https://arxiv.org/abs/2409.20135, Table 4, compares bge-large-en-v1.5 (335 M parameters) with
all-MiniLM-L6-v2 (22.7 M): 946 and 302 seconds for their public set. Here both have as many random tokens as a text has
words and marks. They take turns on the same texts, in batches of texts of similar length, and the median over the
repetitions counts, so a noisy machine disturbs both alike.

Run: OMP_NUM_THREADS=1 python benchmarks/encoder_cost.py --source FILE --columns question [--json FILE]
"""

import argparse
import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shown_rows import show

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
    def encode(self, texts: Sequence[str], batch_size: int = 32) -> np.ndarray:
        """Mean vectors ``(texts, width)`` of random tokens, two more than a text has words and marks."""
        lengths = torch.tensor([2 + len(re.findall(r"\w+|[^\w\s]", text)) for text in texts])
        vectors = []
        for part in lengths.split(batch_size):
            mask = torch.arange(int(part.max())) < part[:, None]
            tokens = torch.randint(1000, 30000, mask.shape)
            states = self.network(tokens, attention_mask=mask.long()).last_hidden_state
            vectors.append((states * mask[..., None]).sum(dim=1) / part[:, None])
        return torch.cat(vectors).numpy()


def read_texts(source: str, columns: Sequence[str], number: int) -> list[str]:
    """So many distinct texts of a source, drawn once and for all, shortest first."""
    rows = load_rows(source)
    texts = sorted({instruction_text({name: text_at(row, name) for name in columns}) for row in rows} - {""})
    drawn = np.random.default_rng(0).permutation(len(texts))[:number]
    return sorted((texts[index] for index in drawn), key=len)


def measure(
    models: dict[str, Shape], texts: Sequence[str], repetitions: int, batch_size: int
) -> list[dict[str, Any]]:
    """One row for each model; ratios are to the first."""
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for repetition in range(repetitions + 1):  # the first warms up
        for name, model in models.items():
            start = time.perf_counter()
            model.encode(texts[:: 10 if repetition == 0 else 1], batch_size=batch_size)
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    sizes = {name: sum(weight.numel() for weight in model.parameters()) for name, model in models.items()}
    first = next(iter(models))
    return [
        {
            "encoder": name,
            "dimension": len(model.encode(["x"])[0]),
            "parameters": sizes[name],
            "texts_per_second": len(texts) / medians[name],
            "parameters_ratio": sizes[first] / sizes[name],
            "speed_ratio": medians[first] / medians[name],
        }
        for name, model in models.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--source", required=True, help="rows whose texts are encoded")
    parser.add_argument("--columns", nargs="+", default=["question"])
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where the rows go as well")
    options = parser.parse_args(arguments)
    models = {name: Shape(*shape) for name, shape in SHAPES.items()}
    texts = read_texts(options.source, options.columns, options.texts)
    rows = measure(models, texts, options.repetitions, options.batch_size)
    mean = sum(map(len, texts)) / len(texts)
    print(f"{len(texts):,} texts of {mean:,.0f} characters on average, {torch.get_num_threads()} threads")
    show(rows, options.json, texts=len(texts))


if __name__ == "__main__":
    main()
