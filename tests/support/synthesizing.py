"""Numbers whose clients make more of them by the model as it stands, and a diary of who did what when."""

import random
from functools import partial

import lightning as L
import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from plain_lightning import Numbers, module, ten_clients, trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

from fedlight.callbacks.loop.federated_loop import FederatedLoop
from fedlight.datamodules.federated.datamodule import FederatedDataModule
from fedlight.datamodules.federated.rounds import VisitSampler, draw_batches
from fedlight.devices.shape import BatchShape
from fedlight.support.seeding import derive_seed
from fedlight.support.torch_parts import eval_mode


class Synthesizing(FederatedDataModule):
    """Candidates are drawn by round and client and labelled by the model; those with the lowest loss under it are chosen.

    ``diary`` has ("synthesize", round, clients, weights), ("choose", client, weights) and ("read", client, split).
    """

    def __init__(self, clients=ten_clients, number=12, keep=8, without=(), draws=False, numbers=Numbers):
        super().__init__(batch_size=4)
        self.numbers, self.clients = numbers(), clients
        self.number, self.keep, self.without, self.draws = number, keep, without, draws
        self.diary, self.made, self.chosen, self.drawn = [], {}, {}, []

    def setup(self, stage):
        self.numbers.setup(stage)
        self.train_set = self.numbers.data
        self.client_indices = self.clients(self.train_set)

    def collate(self, examples):
        return default_collate(examples)

    def val_dataloader(self):
        return self.numbers.val_dataloader()

    def synthesize(self, round_idx, client_ids, module):
        if self.draws:
            self.drawn.append((torch.rand(7).tolist(), np.random.rand(7).tolist(), random.random()))
        if self.made and self.round_idx != round_idx:
            self.reset_synthesis()
        self.round_idx = round_idx
        self.diary.append(("synthesize", round_idx, [*client_ids], state(module)))
        for client in client_ids:
            generator = torch.Generator().manual_seed(derive_seed("made", round_idx, client))
            x = torch.randn(0 if client in self.without else self.number, 4, generator=generator)
            with torch.no_grad(), eval_mode(module):
                self.made[client] = x, x.sum(1, keepdim=True) + 0.5 * module.net(x.to(module.device)).cpu()
            self.chosen[client] = torch.arange(self.num_synthetic(client))

    def choose(self, client_id, module):
        self.diary.append(("choose", client_id, state(module)))
        x, y = self.made[client_id]
        if len(x) > self.keep:
            with torch.no_grad(), eval_mode(module):
                errors = module.net(x.to(module.device)).cpu() - y
                self.chosen[client_id] = errors.square().flatten().argsort()[: self.keep]

    def num_synthetic(self, client_id):
        return min(self.keep, len(self.made[client_id][0])) if client_id in self.made else 0

    def synthesis_metrics(self):
        return {"survived": float(sum(len(x) for x, _ in self.made.values()))}

    def reset_synthesis(self):
        self.made, self.chosen = {}, {}

    def num_batches(self, client_id, split="train"):
        return max(1, self._size(client_id, split) // self.batch_size)

    def _size(self, client_id, split):
        own = 0 if split == "synthetic" else len(self.client_indices[client_id])
        return own + (0 if split == "train" else self.num_synthetic(client_id))

    def batch_shapes(self, visit, round_idx):
        size = min(self.batch_size, self._size(visit.client_id, visit.split))
        return [BatchShape(size, 0, 0)] * visit.num_batches

    def train_dataloader(self):
        sampler = VisitSampler(self.plan.groups, partial(self.read, round_idx=self.plan.round_idx))
        self.plan.counts = sampler.counts
        return DataLoader(Examples(self), batch_sampler=sampler)

    def read(self, visit, round_idx):
        """Batches of a visit, resolved when its first one is asked for."""
        for keys in self.batches(visit, round_idx):
            self.diary.append(("read", visit.client_id, visit.split))
            yield keys

    def batches(self, visit, round_idx):
        """Keys of the visit's examples: an index of the client's own, or a pair."""
        made = (
            []
            if visit.split == "train"
            else [(visit.client_id, int(i)) for i in self.chosen[visit.client_id]]
        )
        own = [] if visit.split == "synthetic" else self.client_indices[visit.client_id].tolist()
        keys, seed = own + made, derive_seed("order", round_idx, visit.client_id)
        order = draw_batches(np.arange(len(keys)), visit.num_batches, self.batch_size, seed)
        return [[keys[i] for i in batch] for batch in order]


class Examples(Dataset):
    """Of all clients: own ones by index, made ones by (client, number)."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data.train_set)

    def __getitem__(self, key):
        if isinstance(key, tuple):
            x, y = self.data.made[key[0]]
            return x[key[1]], y[key[1]]
        return self.data.train_set[key]


def state(of):
    return {name: p.detach().cpu().clone() for name, p in of.named_parameters() if p.requires_grad}


class Batches(L.Callback):
    """What was trained on: (round, client, split) -> batches."""

    def __init__(self, loop):
        self.loop, self.seen = loop, {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        visit = self.loop.visit
        batches = self.seen.setdefault((self.loop.rounds_done, visit.client_id, visit.split), [])
        batches.append(move_data_to_device(batch, "cpu"))


def run(algorithm, rounds=2, data=None, model=None, callbacks=(), ckpt_path=None, settings=None, **loop):
    """The model, the loop and the data of a run; with more callbacks, which get the loop if they are classes."""
    federation = FederatedLoop(algorithm, **{"clients_per_round": 3, "local_steps": 2, **loop})
    model, data = model or module(), data or Synthesizing()
    others = [each(federation) if isinstance(each, type) else each for each in callbacks]
    fit = trainer(rounds, [federation, *others], **(settings or {}))
    fit.fit(model, data, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    return model, federation, data


def trained_on(start, batches, lr=0.05):
    """What fresh AdamW makes of ``start`` on these batches, without dropout."""
    local = module(dropout=0.0)
    local.load_state_dict(start)
    optimizer = torch.optim.AdamW(local.parameters(), lr=lr)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(local.net(x), y).backward()
        optimizer.step()
    return state(local)
