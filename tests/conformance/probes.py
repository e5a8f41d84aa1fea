"""What several rows look with: callbacks and a logger that note what they see."""

import lightning as L
from lightning.pytorch.loggers import Logger
from project import weights


class Lines(Logger):
    """A logger of one's own that keeps what it is given."""

    name, version, experiment, save_dir = "lines", 0, None, None

    def __init__(self):
        self.lines, self.hparams = [], None

    def log_metrics(self, metrics, step=None):
        self.lines.append((step, metrics))

    def log_hyperparams(self, params, *args, **kwargs):
        self.hparams = params

    def finalize(self, status):
        pass

    def log_graph(self, model, input_array=None):
        pass

    def save(self):
        pass

    def of(self, name):
        """All values of a metric with their steps."""
        return [(step, metrics[name]) for step, metrics in self.lines if name in metrics]


class Watch(L.Callback):
    """Weights of the module at each call of one hook; or what ``look`` gives there."""

    def __init__(self, hook, look=lambda trainer, module: weights(module)):
        self.seen = []
        setattr(self, hook, lambda trainer, module, *rest: self.seen.append(look(trainer, module)))


def same(a, b):
    return a.keys() == b.keys() and all(a[name].cpu().equal(b[name].cpu()) for name in a)
