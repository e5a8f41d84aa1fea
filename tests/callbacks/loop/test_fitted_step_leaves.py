import lightning as L
import pytest
import torch
from torch import nn

from fedlight.callbacks.loop.fitted_step import FittedStep


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.checkpointing = nn.Linear(3, 1), False

    def checkpoint_gradients(self, enabled):
        self.checkpointing = enabled

    def training_step(self, batch):
        loss = self.layer(batch).mean()
        self.log("train/loss", loss)
        return loss


def test_what_was_put_on_the_object_comes_back():
    module, sizes, logged = Net(), [], []
    original = module.training_step

    def step(batch):
        sizes.append(len(batch))
        return original(batch)

    def log(name, value, **options):
        logged.append((name, float(value.detach()), options.get("batch_size")))

    module.training_step, module.log = step, log
    fitted = FittedStep(module)
    for _ in range(2):  # the second time without leaving before
        fitted.enter(2, checkpointing=True)
    assert module.checkpointing
    loss = module.training_step(torch.ones(5, 3))
    assert sizes == [2, 2, 1]
    assert logged == [("train/loss", pytest.approx(loss.item()), 5)]
    assert module.log is log
    for _ in range(2):
        fitted.leave()
        assert module.training_step is step
        assert not module.checkpointing
    module.training_step(torch.ones(5, 3)).backward()
    assert sizes == [2, 2, 1, 5]
    assert len(logged) == 2


def test_a_log_of_its_own_comes_back_after_an_error():
    module = Net()
    module.log = log = lambda *args, **options: None
    FittedStep(module).enter(1, checkpointing=False)
    with pytest.raises(RuntimeError, match="shapes"):
        module.training_step(torch.ones(2, 4))
    assert module.log is log
