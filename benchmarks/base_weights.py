"""Memory of the frozen weights of public architectures at 16, 8 and 4 bits, counted without weights like ``fedlight plan``.

Without the layer that is unpacked during a product.

Run: python benchmarks/base_weights.py [--shapes llama2_7b gemma_2b qwen2_0.5b] [--json FILE]
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from fedlight.conf import path as conf_path
from fedlight.lightning_cli.cli import ReadSettings, find_config
from fedlight.plan.plan import workload

BITS = (16, 8, 4)


def measure(shape: str) -> dict[str, float | str]:
    """GiB by the number of bits."""
    model = {"model": conf_path(f"shapes/{shape}"), "adapter": "null", "merge_adapter": "false"}
    arguments = [
        "fit",
        "--config",
        "selector.yaml",
        *(f"--model.{key}={value}" for key, value in model.items()),
    ]
    _, work, _ = workload(ReadSettings([*map(find_config, arguments)]).config["fit"])
    return {"shape": shape} | {f"bits_{bits}": work.resting(bits).base_bytes / 2**30 for bits in BITS}


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a line for each architecture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=["llama2_7b", "gemma_2b", "qwen2_0.5b"])
    parser.add_argument("--json", type=Path, help="where the rows go as well")
    options = parser.parse_args(argv)
    rows = [measure(shape) for shape in options.shapes]
    for row in rows:
        print(f"{row['shape']:12}", *(f"{bits} bits: {row[f'bits_{bits}']:.2f} GiB " for bits in BITS))
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
