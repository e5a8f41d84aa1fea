"""Rows: projects that others have written for other purposes, rebuilt from their documented form, tiny."""

import copy
from collections import OrderedDict
from functools import partial

import lightning as L
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.demos.lstm import LightningLSTM, SequenceSampler, SimpleLSTM
from lightning.pytorch.demos.transformer import LightningTransformer, Transformer
from matrix import Row, Works, kind
from probes import Lines, same
from project import Project, Run, loader, rows_of_clients
from reference import in_one_call, local_training, stepped
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MeanSquaredError, MinMetric

from fedlight import ByClient
from fedlight.callbacks.loop.parts.buffers import AveragedBuffers

project = kind("Projects")


class LitAutoEncoder(L.LightningModule):
    """Lightning's first example: "Lightning in 15 minutes"."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        self.decoder = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3))

    def training_step(self, batch, batch_idx):
        x, _ = batch
        x = x.view(x.size(0), -1)
        x_hat = self.decoder(self.encoder(x))
        loss = nn.functional.mse_loss(x_hat, x)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Boring(BoringModel):
    """The demo that Lightning's own bug reports start from; its optimizers are two lists."""


def boring_data():
    torch.manual_seed(1)
    return DataLoader(RandomDataset(32, 24), batch_size=2)


def boring(model, batches, round_idx):
    """SGD at a rate that StepLR divides by ten each round."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * 0.1**round_idx)
    stepped(optimizer, (model.step(batch.content) for batch in batches))


class Generator(nn.Module):
    """Noise to an example."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2), nn.Linear(8, 3))

    def forward(self, z):
        return self.model(z)


class Discriminator(nn.Module):
    """An example to the probability that it is a real one."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1), nn.Sigmoid())

    def forward(self, x):
        return self.model(x)


class GAN(L.LightningModule):
    """Lightning's GAN: manual optimization, two optimizers in turn."""

    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator, self.discriminator = Generator(), Discriminator()

    def forward(self, z):
        return self.generator(z)

    def adversarial_loss(self, y_hat, y):
        return nn.functional.binary_cross_entropy(y_hat, y)

    def training_step(self, batch):
        imgs, _ = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(imgs.shape[0], 2).type_as(imgs)

        self.toggle_optimizer(optimizer_g)
        valid = torch.ones(imgs.size(0), 1).type_as(imgs)
        g_loss = self.adversarial_loss(self.discriminator(self(z)), valid)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        real_loss = self.adversarial_loss(self.discriminator(imgs), valid)
        fake = torch.zeros(imgs.size(0), 1).type_as(imgs)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), fake)
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def configure_optimizers(self):
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=0.01, betas=(0.5, 0.999))
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=0.01, betas=(0.5, 0.999))
        return [opt_g, opt_d], []


def adversaries(model, batches, round_idx):
    """The two in turn, written out."""
    opt_g, opt_d = map(in_one_call, model.configure_optimizers()[0])
    entropy = nn.functional.binary_cross_entropy
    for batch in batches:
        torch.set_rng_state(batch.random)
        x = batch.content[0]
        z, one, zero = torch.randn(len(x), 2), torch.ones(len(x), 1), torch.zeros(len(x), 1)
        entropy(model.discriminator(model.generator(z)), one).backward()
        opt_g.step()
        opt_g.zero_grad()
        opt_d.zero_grad()
        real, fake = model.discriminator(x), model.discriminator(model.generator(z).detach())
        ((entropy(real, one) + entropy(fake, zero)) / 2).backward()
        opt_d.step()
        opt_d.zero_grad()


class SimpleDenseNet(nn.Module):
    """The default network of the lightning-hydra-template: batch norm after each layer."""

    def __init__(self, input_size=3, lin1_size=4, output_size=1):
        super().__init__()
        layers = [
            nn.Linear(input_size, lin1_size),
            nn.BatchNorm1d(lin1_size),
            nn.ReLU(),
            nn.Linear(lin1_size, output_size),
        ]
        self.model = nn.Sequential(*layers)

    def forward(self, x):
        return self.model(x)


class LitModule(L.LightningModule):
    """As the lightning-hydra-template's: parts are given as partials, metrics are objects, torch.compile in setup."""

    def __init__(self, net, optimizer, scheduler, compile=True):
        super().__init__()
        self.save_hyperparameters(logger=False, ignore=["net"])
        self.net = net
        self.train_error, self.val_error = MeanSquaredError(), MeanSquaredError()
        self.train_loss, self.val_loss = MeanMetric(), MeanMetric()
        self.val_best = MinMetric()

    def forward(self, x):
        return self.net(x)

    def on_train_start(self):
        self.val_loss.reset()
        self.val_error.reset()
        self.val_best.reset()

    def model_step(self, batch):
        x, y = batch
        y_hat = self.forward(x)
        return nn.functional.mse_loss(y_hat, y), y_hat, y

    def training_step(self, batch, batch_idx):
        loss, preds, targets = self.model_step(batch)
        self.train_loss(loss)
        self.train_error(preds, targets)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train/error", self.train_error, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        loss, preds, targets = self.model_step(batch)
        self.val_loss(loss)
        self.val_error(preds, targets)
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self):
        self.val_best(self.val_error.compute())
        self.log("val/best", self.val_best.compute(), sync_dist=True, prog_bar=True)

    def setup(self, stage):
        if self.hparams.compile and stage == "fit":
            self.net = torch.compile(self.net, backend="eager")

    def configure_optimizers(self):
        optimizer = self.hparams.optimizer(params=self.trainer.model.parameters())
        scheduler = self.hparams.scheduler(optimizer=optimizer)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": scheduler,
                "monitor": "val/loss",
                "interval": "epoch",
                "frequency": 1,
            },
        }


def templated(compile=False):
    torch.manual_seed(0)
    return LitModule(
        SimpleDenseNet(),
        partial(torch.optim.Adam, lr=0.01, weight_decay=0.0),
        partial(torch.optim.lr_scheduler.ReduceLROnPlateau, mode="min", factor=0.1, patience=10),
        compile,
    )


class TemplateData(L.LightningDataModule):
    """The template's datamodule: loaders with batch sizes by device, data made in setup."""

    def __init__(self, batch_size=2):
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.data_train = self.data_val = None
        self.batch_size_per_device = batch_size

    def setup(self, stage=None):
        if self.trainer is not None:
            self.batch_size_per_device = self.hparams.batch_size // self.trainer.world_size
        if self.data_train is None:
            self.data_train = self.data_val = loader().dataset

    def train_dataloader(self):
        return DataLoader(
            self.data_train, batch_size=self.batch_size_per_device, shuffle=True, drop_last=True
        )

    def val_dataloader(self):
        return DataLoader(self.data_val, batch_size=8, shuffle=False)


def of_template(model, batches, round_idx):
    """Adam on the same losses, with the batch norm in training mode."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    stepped(optimizer, (model.model_step(batch.content)[0] for batch in batches))


def metrics_are_of_the_round(folder):
    """What torchmetrics objects collect in training is of all visits of a round; in validation of the global model."""
    made = Project(
        templated, TemplateData, loop={"parts": [AveragedBuffers()]}, trainer={"logger": (lines := Lines())}
    )
    run = Run(made, folder).fit()
    by_visit = [record["loss"] for record in run.loop.visit_records]
    assert abs(lines.of("train/loss")[-1][1] - sum(by_visit) / 2) < 1e-6
    run.module.eval()
    x, y = loader().dataset.tensors
    error = nn.functional.mse_loss(run.module.net(x), y).item()
    assert abs(lines.of("val/loss")[-1][1] - error) < 1e-6


def compiled_template(folder):
    """torch.compile in setup changes the names of parameters, and nothing else."""
    plain = Run(Project(templated, TemplateData, loop={"parts": [AveragedBuffers()]}), folder).fit().weights()
    compiled = Run(
        Project(partial(templated, compile=True), TemplateData, loop={"parts": [AveragedBuffers()]}), folder
    ).fit()
    assert same({name.replace("._orig_mod", ""): value for name, value in compiled.weights().items()}, plain)


WORDS = 11


def texts():
    """24 rows of five words, and the next word of each."""
    words = torch.randint(WORDS, (24, 6), generator=torch.Generator().manual_seed(2))
    return TensorDataset(words[:, :-1], words[:, 1:])


def text_loader():
    return DataLoader(texts(), batch_size=2, shuffle=True)


class SmallTransformer(LightningTransformer):
    """The demo of Lightning's documentation, small, with its dropout."""

    def __init__(self):
        super().__init__(vocab_size=WORDS)
        self.model = Transformer(WORDS, ninp=8, nhead=2, nhid=8, nlayers=1)

    def prepare_data(self):
        """Without the download."""


class SmallLSTM(LightningLSTM):
    """The demo of Lightning's documentation, told of visits: its hidden state lives in an attribute, from batch to batch."""

    def __init__(self):
        super().__init__(vocab_size=WORDS)
        self.model = SimpleLSTM(WORDS, ninp=4, nhid=4, nlayers=1, dropout=0.0)

    def on_visit_start(self, client_id):
        self.hidden = None

    def prepare_data(self):
        """Without the download."""


def sequences(loop):
    """Each client's rows in order, as the demo's own batch sampler has them."""
    return [
        ByClient(lambda dataset: rows_of_clients(), batch_sampler=partial(SequenceSampler, batch_size=2)),
        loop,
    ]


def lstm_data():
    return DataLoader(texts(), batch_sampler=SequenceSampler(texts(), 2))


def of_demo(model, batches, round_idx):
    """As the demo, from an empty hidden state."""
    model.hidden = None
    local_training(model, batches, round_idx)


class TransferLearning(L.LightningModule):
    """Lightning's fine-tuning example: a frozen backbone with batch norm and a head of one's own."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU())
        self.classifier = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self.classifier(self.backbone(x)), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.classifier.parameters(), lr=1e-2)


def transferred(model, batches, round_idx):
    """The head; from the second round on the backbone as well, at a tenth of its rate."""
    optimizer = torch.optim.Adam(model.classifier.parameters(), lr=1e-2, fused=True)
    model.backbone.requires_grad_(round_idx >= 1)
    if round_idx >= 1:
        optimizer.add_param_group({"params": list(model.backbone.parameters()), "lr": 1e-3})
    stepped(optimizer, (model.training_step(batch.content, 0) for batch in batches))


class EMA(L.Callback):
    """A moving average of the weights as many write it: kept in the callback, swapped in for validation."""

    def __init__(self, decay=0.5):
        self.decay, self.shadow, self.kept = decay, {}, None

    def on_train_start(self, trainer, pl_module):
        self.shadow = copy.deepcopy(OrderedDict(pl_module.state_dict()))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for name, value in pl_module.state_dict().items():
            self.shadow[name].mul_(self.decay).add_(value, alpha=1 - self.decay)

    def on_validation_start(self, trainer, pl_module):
        self.kept = copy.deepcopy(pl_module.state_dict())
        pl_module.load_state_dict(self.shadow)

    def on_validation_end(self, trainer, pl_module):
        pl_module.load_state_dict(self.kept)


class EMAOfRounds(EMA):
    """The same over rounds: only the global model counts."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pass

    def on_validation_start(self, trainer, pl_module):
        super().on_train_batch_end(trainer, pl_module, None, None, 0)
        super().on_validation_start(trainer, pl_module)


def an_average_of_all_clients_steps(folder):
    """It goes through the weights of each client after each step, and for a round's last batch the global ones."""
    ema, passed = EMA(), []

    class Steps(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            passed.append(copy.deepcopy(pl_module.state_dict()))

    run = Run(Project(LitAutoEncoder), folder, [ema, Steps()]).fit()
    expected = run.project.make_module().state_dict()
    for now in passed:
        expected = {name: value * 0.5 + 0.5 * now[name] for name, value in expected.items()}
    torch.testing.assert_close(dict(ema.shadow), dict(expected))
    assert same(run.weights(), Run(Project(LitAutoEncoder), folder).fit().weights())  # it only looks


def an_average_of_global_models(folder):
    """averages the global models: update it where validation starts"""
    ema, states = EMAOfRounds(), []

    class Validated(LitAutoEncoder):
        def validation_step(self, batch, batch_idx):
            pass

    class Rounds(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            states.append(copy.deepcopy(pl_module.state_dict()))

    run = Run(Project(Validated, trainer={"num_sanity_val_steps": 0}), folder, [ema, Rounds()])
    run.fit(val_dataloaders=loader(shuffle=False))
    expected = run.project.make_module().state_dict()
    for now in states:
        expected = {name: value * 0.5 + 0.5 * now[name] for name, value in expected.items()}
    torch.testing.assert_close(dict(ema.shadow), dict(expected))


ROWS: list[Row] = [
    project.equals("the autoencoder of Lightning's introduction", Project(LitAutoEncoder)),
    project.equals("BoringModel, the start of bug reports", Project(Boring, boring_data), boring),
    project.equals("the GAN of Lightning's examples, manual optimization", Project(GAN), adversaries),
    project.equals("the transformer of Lightning's examples", Project(SmallTransformer, text_loader)),
    project.equals(
        "the LSTM of Lightning's examples",
        Project(SmallLSTM, lstm_data, federation=sequences),
        of_demo,
        means="its batch sampler is made for each client, its hidden state is reset in on_visit_start",
    ),
    project.refused(
        "the lightning-hydra-template, whose network has batch norm",
        Project(templated, TemplateData),
        "training changes net.model.1.running_mean",
        "Add AveragedBuffers",
        in_training=True,
    ),
    project.equals(
        "the lightning-hydra-template, `AveragedBuffers`",
        Project(templated, TemplateData, loop={"parts": [AveragedBuffers()]}),
        of_template,
        means="with one setting",
        buffers="average",
    ),
    project(
        "the lightning-hydra-template, its torchmetrics",
        Works(metrics_are_of_the_round),
        "metrics of training are of all visits of a round, those of validation of the global model",
    ),
    project(
        "the lightning-hydra-template, compile=True",
        Works(compiled_template),
        "the same bit for bit; parameters are sent under the names that torch.compile gives them",
    ),
    project.equals(
        "fine-tuning of a pretrained backbone, BackboneFinetuning, `AveragedBuffers`",
        Project(
            TransferLearning,
            partial(loader, drop_last=True),
            callbacks=lambda folder: [BackboneFinetuning(1, backbone_initial_lr=1e-3)],
            loop={"parts": [AveragedBuffers()]},
        ),
        transferred,
        means="its batch norm needs a setting",
        buffers="average",
    ),
    project(
        "an EMA callback of one's own, by batch",
        Works(an_average_of_all_clients_steps),
        "runs through the steps of all clients one after the other; the federation does not notice it",
    ),
    project("an EMA callback of one's own, by round", Works(an_average_of_global_models)),
]
