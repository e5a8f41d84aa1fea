"""Bytes of a visit's messages over each wire, for the selector of the embedded world, as ``fedlight plan`` counts them.

Run: python benchmarks/upload_bytes.py [--json FILE]
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from shown_rows import show

from fedlight.lightning_cli.cli import ReadSettings, find_config
from fedlight.plan.plan import workload

TOP = {"class_path": "TopK", "init_args": {"share": 0.1}}
WIRES: dict[str, dict[str, object]] = {
    "fp32": {},
    "fp16": {"up": [{"class_path": "Quantize", "init_args": {"to": "fp16"}}]},
    "int8": {"up": [{"class_path": "Quantize", "init_args": {"to": "int8"}}]},
    "NF4": {"up": [{"class_path": "Quantize", "init_args": {"to": "nf4"}}]},
    "NF4, and int8 down": {
        "up": [{"class_path": "Quantize", "init_args": {"to": "nf4"}}],
        "down": [{"class_path": "Quantize", "init_args": {"to": "int8"}}],
    },
    "largest tenth, with error feedback": {
        "up": [{**TOP, "init_args": {"share": 0.1, "error_feedback": True}}]
    },
    "largest tenth, without": {"up": [{**TOP, "init_args": {"share": 0.1, "error_feedback": False}}]},
}


def measure(name: str, wire: dict[str, object]) -> dict[str, float | str]:
    """Bytes up and down, and the part of what fp32 takes."""
    channel = {"class_path": "Wire", "init_args": wire}
    arguments = ["fit", "--config", "selector.yaml", f"--federated.channel={json.dumps(channel)}"]
    _, work, _ = workload(ReadSettings([*map(find_config, arguments)]).config["fit"])
    return {"upload": name, "bytes": work.bytes_up, "bytes_down": work.bytes_down}


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a line for each wire."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="where the rows go as well")
    options = parser.parse_args(argv)
    rows = [measure(name, wire) for name, wire in WIRES.items()]
    for row in rows:
        row["times_less"] = rows[0]["bytes"] / row["bytes"]
    show(rows, options.json)


if __name__ == "__main__":
    main()
