"""Bytes and loss of each codec of the wire, on the movement of a LoRA adapter.

The adapter has the shapes of LoRA on the attention of a decoder: for each layer A (rank x hidden) and B (hidden x rank) of
queries and values. Its movement is made up: normal numbers, whose size differs by a factor of up to 100 from tensor to
tensor. Every other layer's are heavy-tailed instead (Student's t with 3 degrees of freedom): steps spread evenly over a
block, as int8's are, lose more there.

* share: bytes of the payload over those of lossless fp32, both as safetensors files.
* error: norm of the loss over the norm of the movement, the median over tensors and the worst of them.
* cosine: between the movement and the received one, all tensors together.

Run: OMP_NUM_THREADS=1 python benchmarks/wire.py [--hidden 1024] [--layers 24] [--json FILE]
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from shown_rows import show

from fedlight.federation.channel import pack, unpack
from fedlight.federation.client import State, serialized_bytes
from fedlight.federation.codecs import Codec, Quantize, TopK
from fedlight.federation.privacy import ClipAndNoise

CHAINS: dict[str, list[Codec]] = {
    "fp16": [Quantize("fp16")],
    "bf16": [Quantize("bf16")],
    "int8": [Quantize("int8")],
    "nf4": [Quantize("nf4")],
    "top 10 %": [TopK(0.1)],
    "top 10 %, fp16": [TopK(0.1), Quantize("fp16")],
    "top 10 %, nf4": [TopK(0.1), Quantize("nf4")],
    "top 1 %, nf4": [TopK(0.01), Quantize("nf4")],
    "clip, int8": [ClipAndNoise(clip_norm=1e9, noise_multiplier=0.0), Quantize("int8")],
}


def movement(hidden: int, layers: int, rank: int) -> State:
    """A made-up movement, the same for the same sizes."""
    generator = torch.Generator().manual_seed(0)
    state = {}
    for layer in range(layers):
        for of in ("q_proj", "v_proj"):
            for ab, shape in (("A", (rank, hidden)), ("B", (hidden, rank))):
                values = torch.randn(shape, generator=generator)
                if layer % 2:
                    chi = torch.randn((3, *shape), generator=generator).square().mean(dim=0)
                    values = values / chi.sqrt()
                size = 100.0 ** (torch.rand((), generator=generator).item() - 1)
                state[f"layers.{layer}.{of}.lora_{ab}"] = 1e-3 * size * values
    return state


def lost(state: State, decoded: State) -> dict[str, float]:
    """Relative error by tensor, and the cosine of all."""
    errors = [((decoded[name] - value).norm() / value.norm()).item() for name, value in state.items()]
    one, other = (torch.cat([each[name].flatten() for name in state]).double() for each in (state, decoded))
    return {
        "error": statistics.median(errors),
        "worst": max(errors),
        "cosine": torch.nn.functional.cosine_similarity(one, other, dim=0).item(),
    }


def measure(state: State) -> list[dict[str, float | str]]:
    """One row for each chain."""
    shapes = {name: value.shape for name, value in state.items()}
    rows: list[dict[str, float | str]] = []
    for name, codecs in CHAINS.items():
        packed = pack(state, codecs)
        share = serialized_bytes(packed) / serialized_bytes(state)
        rows.append({"codec": name, "share": share} | lost(state, unpack(packed, shapes, codecs)))
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--json", type=Path, help="where the rows go as well")
    options = parser.parse_args(arguments)
    state = movement(options.hidden, options.layers, options.rank)
    rows = measure(state)
    print(f"{serialized_bytes(state) / 1e6:.2f} MB in {len(state)} tensors")
    show(rows, options.json, bytes=serialized_bytes(state))


if __name__ == "__main__":
    main()
