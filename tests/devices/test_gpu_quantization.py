import lightning as L
import pytest
import torch
from torch import nn

from fedlight import Lora, SelectorModule
from fedlight.callbacks.loop.fitted_step import FittedStep
from fedlight.devices.quantization import QuantizedBase, quantizable_layers

pytestmark = pytest.mark.gpu


def load(model, base):
    with torch.device("cuda"):
        module = SelectorModule(model, base=base, dtype="bf16", lora=Lora(dropout=0.0))
        module.configure_model()
    return module


@pytest.mark.parametrize(("bits", "base"), [(8, "int8"), (4, "nf4")])
def test_it_is_the_base_that_is_loaded_on_the_gpu(tiny_model, bits, base):
    plain, loaded = load(tiny_model, "plain"), load(tiny_model, base)
    layers = quantizable_layers(plain)
    inputs = {name: torch.randn(16, x.in_features, device="cuda").bfloat16() for name, x in layers.items()}
    exact = {name: layer(inputs[name]) for name, layer in layers.items()}
    switched = QuantizedBase(plain)
    switched.use(bits)
    for name, layer in layers.items():
        assert torch.equal(layer(inputs[name]), loaded.get_submodule(name)(inputs[name]))
        assert not torch.equal(layer(inputs[name]), exact[name])
    switched.use(16)
    assert all(torch.equal(layer(inputs[name]), exact[name]) for name, layer in layers.items())


def test_a_base_that_moves_to_the_gpu_is_quantized_there():
    layer = nn.Linear(128, 64).requires_grad_(False)
    base = QuantizedBase(layer)
    base.use(4)
    base.use(16)
    layer.cuda()
    base.use(4)
    assert layer(torch.randn(2, 128, device="cuda")).device.type == "cuda"


class Deep(L.LightningModule):
    """Sixteen layers of activations as large as the batch."""

    def __init__(self):
        super().__init__()
        self.scales = nn.Parameter(torch.ones(16))

    def training_step(self, batch, batch_idx):
        for scale in self.scales:
            batch = torch.sin(torch.sin(batch * scale))
        return batch.square().mean()


def test_micro_batches_take_their_share_of_memory():
    module, batch = Deep().cuda(), torch.randn(8, 1_000_000, device="cuda")
    peaks = []
    for micro_batch in (None, 2, 1):
        fitted = FittedStep(module)
        fitted.enter(micro_batch, checkpointing=False)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        module.training_step(batch, 0).backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        fitted.leave()
    assert peaks[0] > 40 * batch.nbytes
    assert peaks[1] < 1.1 * peaks[0] / 4
    assert peaks[2] < 1.1 * peaks[0] / 8
