import pytest
import torch
from tiny_world import make_model

from fedlight import SFTModule
from fedlight.devices import BatchShape, CostMeter
from fedlight.devices.memory import moment_bytes_per_weight, parts, resting_footprint
from fedlight.modules.language.adapters import trained_parameters

pytestmark = pytest.mark.gpu
EXAMPLES, TOKENS = 8, 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Large enough that what CUDA's libraries keep for themselves is small beside it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = make_model(tmp_path_factory.mktemp("model"))
    config = AutoConfig.from_pretrained(folder)
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "num_attention_heads": 8}
    for name, value in {**sizes, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 4000}.items():
        setattr(config, name, value)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("micro_batch", "checkpointing"), [(EXAMPLES, False), (EXAMPLES // 4, False), (EXAMPLES, True)]
)
def test_the_peak_of_a_visit_is_that_of_the_allocator(folder, micro_batch, checkpointing):
    shape = BatchShape(EXAMPLES, TOKENS, responses=EXAMPLES * 32)
    meter = CostMeter(SFTModule(folder))
    activations = max(meter.cost(part, checkpointing).activation_bytes for part in parts(shape, micro_batch))
    torch.cuda.empty_cache()
    start = torch.cuda.memory_allocated()
    with torch.device("cuda"):
        module = SFTModule(folder, dtype="bf16")
        module.configure_model()
    module.cuda()
    optimizer = torch.optim.AdamW(trained_parameters(module).values(), lr=1e-3)
    batch = {name: value.cuda() for name, value in module.sketch_batch(shape).items()}

    def step():
        for begin in range(0, EXAMPLES, micro_batch):
            part = {name: value[begin : begin + micro_batch] for name, value in batch.items()}
            (module.example_losses(part).sum() / EXAMPLES).backward()

    module.checkpoint_gradients(checkpointing)
    step()  # also makes cuBLAS take its workspace, which is no part of a step
    optimizer.step()
    expected = resting_footprint(meter.module, 16, moment_bytes_per_weight(optimizer))
    workspace = torch.cuda.memory_allocated() - start - expected.peak_bytes
    assert -1e6 < workspace < 80e6
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    measured = torch.cuda.max_memory_allocated() - before
    assert activations == pytest.approx(measured, rel=0.1)
