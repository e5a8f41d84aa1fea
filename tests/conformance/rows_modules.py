"""Rows: what a module may be made of."""

from functools import partial

import torch
from matrix import Equals, Refused, Row, kind
from project import Net, Project, loader
from reference import clipped_by_norm, local_training
from torch import nn

module = kind("Modules")


class Dropout(Net):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))


class Normalized(Net):
    def __init__(self):
        super().__init__()
        parts = [nn.Linear(3, 4), nn.GroupNorm(2, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 1)]
        self.net = nn.Sequential(*parts)


class Momentary(Net):
    def __init__(self):
        super().__init__()
        norm = nn.BatchNorm1d(4, track_running_stats=False)
        self.net = nn.Sequential(nn.Linear(3, 4), norm, nn.Linear(4, 1))


class Tied(Net):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
        self.net[2].weight = self.net[0].weight


class Frozen(Net):
    def __init__(self):
        super().__init__()
        self.net[0].requires_grad_(False)

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.05)


class FrozenInOptimizer(Frozen):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class HalfBase(Net):
    """A frozen base in 16 bits under what is trained."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(3, 3).bfloat16().requires_grad_(False)

    def loss(self, batch):
        return super().loss((self.base(batch[0].bfloat16()).float(), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.parameters(), lr=0.05)


class Unused(Net):
    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(3, 1)


class Constant(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 0.5]))

    def loss(self, batch):
        return super().loss((batch[0] * self.scale, batch[1]))


class Compiled(Net):
    def __init__(self):
        super().__init__()
        self.net.compile(backend="eager")


class LossInDict(Net):
    def training_step(self, batch, batch_idx):
        return {"loss": self.loss(batch), "size": len(batch[0])}


class ThreeDice(Net):
    """Everything of torch that is drawn: dropout, noise, choice."""

    def loss(self, batch):
        x, y = batch
        return super().loss((x + 0.1 * torch.randn_like(x), y)) * (1 + torch.rand(()))


class Clipping(Net):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


class LateLayers(Net):
    def __init__(self):
        super().__init__()
        self.net = None

    def configure_model(self):
        if self.net is None:
            torch.manual_seed(3)
            self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


class Lazy(Net):
    """Its first layer learns its width from the first batch, which setup gives it."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.Linear(4, 1))
        torch.manual_seed(5)
        self.net(torch.zeros(2, 3))


class Complex(Net):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(3, 4, dtype=torch.complex64), nn.Linear(4, 1, dtype=torch.complex64)
        )

    def loss(self, batch):
        x, y = batch
        return (self.net(x.to(torch.complex64)) - y).abs().square().mean()


class Half(Net):
    def __init__(self):
        super().__init__()
        self.net.bfloat16()


class OwnLoaders(Net):
    def train_dataloader(self):
        return loader()


class Checkpointed(Net):
    def loss(self, batch):
        x, y = batch
        hidden = torch.utils.checkpoint.checkpoint(self.net[:2], x, use_reentrant=False)
        return nn.functional.mse_loss(self.net[2](hidden), y)


class WeightNormed(Net):
    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.net[0])


class PartlyHeld(Net):
    """The optimizer holds a tensor that is no parameter of the module."""

    def configure_optimizers(self):
        return torch.optim.SGD([*self.parameters(), torch.zeros(3, requires_grad=True)], lr=0.1)


class NoOptimizer(Net):
    def configure_optimizers(self):
        return None


def trained(made, **settings):
    return Equals(Project(made), **settings)


ROWS: list[Row] = [
    module("dropout", trained(Dropout)),
    module("random numbers in the training step", trained(ThreeDice)),
    module("group norm and layer norm", trained(Normalized)),
    module("batch norm with track_running_stats=False", trained(Momentary)),
    module("tied weights", trained(Tied), "a tied matrix is sent once"),
    module("frozen parts", trained(Frozen), "what is frozen stays as it is and is not sent"),
    module("frozen parts that the optimizer holds", trained(FrozenInOptimizer)),
    module("a frozen base in bfloat16", trained(HalfBase)),
    module("parameters that no loss reaches", trained(Unused)),
    module("buffers that training only reads", trained(Constant)),
    module("a network compiled with torch.compile", trained(Compiled)),
    module("a training_step that gives a dict", trained(LossInDict)),
    module("layers made in configure_model", trained(LateLayers)),
    module("lazy layers whose size is known before fit", trained(Lazy)),
    module("activation checkpointing", trained(Checkpointed)),
    module(
        "parametrizations, such as weight_norm",
        trained(WeightNormed),
        "length and direction are averaged each",
    ),
    module(
        "configure_gradient_clipping of one's own",
        trained(Clipping, train=partial(local_training, clip=clipped_by_norm)),
    ),
    module(
        "an optimizer over tensors that are no parameters of the module",
        Refused(
            Project(PartlyHeld),
            "1 of the optimizer's 5 parameters are not parameters of the LightningModule",
            "make what is trained a submodule of it",
        ),
    ),
    module(
        "complex parameters",
        Refused(Project(Complex), "is trained in complex64", "read it with torch.view_as_complex"),
    ),
    module(
        "parameters in bfloat16",
        Refused(Project(Half), "is trained in bfloat16", "keep what is trained in float32"),
    ),
    module("train_dataloader of the module", Equals(Project(OwnLoaders, data=lambda: None))),
    module(
        "configure_optimizers that gives None",
        Refused(
            Project(NoOptimizer, warns=("`LightningModule.configure_optimizers` returned `None`",)),
            "configure_optimizers gives no optimizer that holds a parameter",
            "have it return one over what is to be trained",
        ),
    ),
]
