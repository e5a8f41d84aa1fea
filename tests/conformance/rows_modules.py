"""Rows: what a module may be made of."""

from functools import partial

import torch
from matrix import Equals, Row, kind
from project import Net, Project, changed, loader
from reference import clipped_by_norm, local_training
from torch import nn

module = kind("Modules")


class Tied(Net):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
        self.net[2].weight = self.net[0].weight


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


class OwnLoaders(Net):
    def train_dataloader(self):
        return loader()


class Checkpointed(Net):
    def loss(self, batch):
        x, y = batch
        hidden = torch.utils.checkpoint.checkpoint(self.net[:2], x, use_reentrant=False)
        return nn.functional.mse_loss(self.net[2](hidden), y)


def trained(made, **settings):
    return Equals(Project(made), **settings)


def freeze(net):
    net[0].requires_grad_(False)


ROWS: list[Row] = [
    module("dropout", trained(changed(lambda net: net.insert(1, nn.Dropout(0.5))))),
    module("random numbers in the training step", trained(ThreeDice)),
    module(
        "group norm and layer norm",
        trained(changed(lambda net: net.insert(1, nn.GroupNorm(2, 4)).insert(3, nn.LayerNorm(4)))),
    ),
    module(
        "batch norm with track_running_stats=False",
        trained(changed(lambda net: net.insert(1, nn.BatchNorm1d(4, track_running_stats=False)))),
    ),
    module("tied weights", trained(Tied), "a tied matrix is sent once"),
    module(
        "frozen parts",
        trained(
            changed(
                freeze,
                optimizer=lambda given: torch.optim.AdamW([p for p in given if p.requires_grad], lr=0.05),
            )
        ),
        "what is frozen stays as it is and is not sent",
    ),
    module(
        "frozen parts that the optimizer holds",
        trained(changed(freeze, optimizer=partial(torch.optim.AdamW, lr=0.05))),
    ),
    module("a frozen base in bfloat16", trained(HalfBase)),
    module("parameters that no loss reaches", trained(Unused)),
    module("buffers that training only reads", trained(Constant)),
    module(
        "a network compiled with torch.compile", trained(changed(lambda net: net.compile(backend="eager")))
    ),
    module("a training_step that gives a dict", trained(LossInDict)),
    module("layers made in configure_model", trained(LateLayers)),
    module("lazy layers whose size is known before fit", trained(Lazy)),
    module("activation checkpointing", trained(Checkpointed)),
    module(
        "parametrizations, such as weight_norm",
        trained(changed(lambda net: nn.utils.parametrizations.weight_norm(net[0]))),
        "length and direction are averaged each",
    ),
    module(
        "configure_gradient_clipping of one's own",
        trained(Clipping, train=partial(local_training, clip=clipped_by_norm)),
    ),
    module.refused(
        "an optimizer over tensors that are no parameters of the module",
        Project(
            partial(Net, lambda given: torch.optim.SGD([*given, torch.zeros(3, requires_grad=True)], lr=0.1))
        ),
        "1 of the optimizer's 5 parameters are not parameters of the LightningModule",
        "make what is trained a submodule of it",
    ),
    module.refused(
        "complex parameters",
        Project(Complex),
        "is trained in complex64",
        "read it with torch.view_as_complex",
    ),
    module.refused(
        "parameters in bfloat16",
        Project(changed(lambda net: net.bfloat16())),
        "is trained in bfloat16",
        "keep what is trained in float32",
    ),
    module.equals("train_dataloader of the module", Project(OwnLoaders, data=lambda: None)),
    module.refused(
        "configure_optimizers that gives None",
        Project(
            partial(Net, lambda given: None),
            warns=("`LightningModule.configure_optimizers` returned `None`",),
        ),
        "configure_optimizers gives no optimizer that holds a parameter",
        "have it return one over what is to be trained",
    ),
]
