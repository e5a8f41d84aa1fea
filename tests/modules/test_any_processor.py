import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedlight.devices import hardware

pytestmark = pytest.mark.slow  # runs in processes that leave instructions unused

ROOT = Path(__file__).parents[2]
OLDER = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
TRAINING = """
import json, sys, torch
from fedlight.devices import hardware
from fedlight.modules.selector import SelectorModule

torch.set_num_threads(1)
found = {"level": torch.backends.cpu.get_cpu_capability()}
found["bf16"] = hardware.computes_bf16(torch.device("cpu"))
for base in ("plain", "int8", "nf4"):
    trained = {"optimizer": {"name": "SGD"}, "lr": 0.1, "lora": {"dropout": 0.2}}
    module = SelectorModule(sys.argv[1], base=base, choices=["A", "B"], **trained)
    module.configure_model()
    [ids, optimizer] = torch.arange(5, 41).view(4, 9), torch.optim.SGD(module.train().parameters(), lr=0.1)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor([0, 1, 1, 0])}
    losses = []
    for step in range(4):
        torch.manual_seed(step)
        loss = module.example_losses(batch).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found[base] = losses
"""


@pytest.fixture(scope="module")
def older(llama):
    """What a process finds that was told so before it loaded torch."""
    command = [sys.executable, "-c", f"{TRAINING}\nprint(json.dumps(found))", llama]
    environment = os.environ | OLDER | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def newer(llama):
    """What this process finds, by whatever this processor has."""
    found: dict = {}
    before, sys.argv = sys.argv, ["", llama]
    try:
        with torch.random.fork_rng():
            exec(TRAINING, found)
    finally:
        sys.argv = before
    return found["found"]


def test_it_is_told_so(older, newer):
    """Where the processor has nothing to leave out, both are the same."""
    if newer["level"] == "AVX512":
        assert older["level"] == "AVX2"
    assert newer["bf16"] is hardware.computes_bf16(torch.device("cpu"))
    assert not older["bf16"] or older["level"] not in ("AVX2", "DEFAULT", "NO AVX")


@pytest.mark.parametrize("base", ["plain", "int8", "nf4"])
def test_a_training_with_dropout_has_the_same_losses(older, newer, base):
    """Sums are taken in another order, and int8 products by another kernel."""
    assert older[base] == pytest.approx(newer[base], rel=1e-4)
    assert len(set(newer[base])) == 4
