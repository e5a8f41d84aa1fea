"""The shortest program: lists of texts and a folder with a model become an adapter, in ten lines."""

import ast
import runpy
import shutil
from pathlib import Path

from safetensors.torch import load_file

import fedlight.toy

FILE = Path(__file__).parents[2] / "examples" / "own_texts.py"


def test_ten_lines_make_an_adapter_of_both_clients_of_lists_of_texts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(Path(fedlight.toy.__file__).parent / "model", "my_model")
    names = runpy.run_path(str(FILE))
    loop, data = names["parts"][0], names["data"]
    assert {client: each.num_examples for client, each in loop.clients.items()} == {"ann": 1, "ben": 1}
    assert data.client_rows["ann"][0].keys() == {"instruction", "input", "response"}
    assert loop.rounds_done == 3
    weights = load_file("my_adapter/adapter_model.safetensors")
    moved = [value for name, value in weights.items() if "lora_B" in name]
    assert moved
    assert all(value.any() for value in moved)  # LoRA's B starts at 0
    statements = ast.parse(FILE.read_text()).body[1:]  # without the docstring
    assert sum(each.end_lineno - each.lineno + 1 for each in statements) <= 10
