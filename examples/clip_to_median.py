"""A part of the loop in one file: each client's gradients are clipped to the running median of their norms in the visit.

The threshold follows the client, so unlike scales of losses need no tuning, and the order of clients changes nothing.
"""

from statistics import median_low

import torch

from fedlight import Part


class ClipToMedian(Part):
    """Clipping of gradients to ``times`` the median norm of the visit's steps so far; logs ``fed/clipped``, their share."""

    def __init__(self, times: float = 1.0) -> None:
        self.times, self.counts = times, (0, 0)

    def enter(self, run, group, batch):
        if group.beside is not None:
            raise ValueError("ClipToMedian clips one client's gradients: set clients_at_once=1")
        self.norms = []

    def before_step(self, run, group, optimizer):
        held = [p for settings in optimizer.param_groups for p in settings["params"] if p.grad is not None]
        if not held:  # training_step gave None
            return
        self.norms.append(norm := torch.nn.utils.get_total_norm([p.grad for p in held]).item())
        most = self.times * median_low(self.norms)
        torch.nn.utils.clip_grads_with_norm_(held, most, torch.tensor(norm))
        self.counts = self.counts[0] + 1, self.counts[1] + (norm > most)

    def finish_round(self, run, round, movement):
        steps, clipped = self.partial()
        return {"clipped": clipped / steps} if steps else {}

    def partial(self):
        counts, self.counts = self.counts, (0, 0)
        return counts

    def merge(self, partials):
        self.counts = tuple(map(sum, zip(*partials, strict=True)))
