"""What a command prints is its own: notices of the libraries beneath on which nobody could act are left out.

Each is named here by the start of its text and by who says it, so that whatever a new release has to say is heard. What
fedlight itself says, and every warning that asks for something, passes.
"""

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

NOTICES = {
    # Lightning, about itself and about what the config says already
    "lightning.pytorch.utilities.rank_zero": (
        r"💡 Tip: For seamless cloud (logging|uploads)",
        r"GPU available: False, used: False",
        r"GPU available: True \(\w+\), used: True",
        r"TPU available: False, using: 0 TPU cores",
        r"`Trainer\.fit` stopped: `max_epochs=\d+` reached",  # the table that ends a run says how far it came
        # `trainer.limit_*_batches` and `trainer.val_check_interval`, said again
        r"`Trainer\(limit_(train|val|test|predict)_batches=1\)` was configured so 1 batch (per epoch )?will be used\.",
        r"`Trainer\(limit_(train|val|test|predict)_batches=1\.0\)` was configured so 100% of the batches "
        r"(per epoch )?will be used\.",
        r"`Trainer\(val_check_interval=1(\.0)?\)` was configured so validation will run "
        r"(after every batch|at the end of the training epoch)\.",
        r"You are using a CUDA device \(.*\) that has Tensor Cores",  # precision is `trainer.precision`
    ),
    "lightning.fabric.utilities.seed": (r"(\[rank: \d+\] )?Seed set to",),
    "lightning.pytorch.accelerators.cuda": (r"LOCAL_RANK: \d+ - CUDA_VISIBLE_DEVICES",),
    # bitsandbytes, wherever it is imported on a processor with AVX512-BF16: a faster product for weights that it packs for
    # evaluation alone, as bases here are not (see base_model). With `kernels` installed, what goes wrong is heard.
    "bitsandbytes.backends.cpu.ops": (
        r"Failed to load CPU gemm_4bit_forward from kernels-community: No module named 'kernels'\.",
    ),
}
WARNINGS = (
    # Lightning's own call of a function that torch is about to rename
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    # PEFT, about transformers
    r"`is_gradient_checkpointing` is deprecated",
    # Lightning, of data that lies in memory ready to be batched: processes would only copy it
    r"The '\w+_dataloader' does not have many workers",
)


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Leaves such notices out while its body runs; loggers and warnings are as before when it ends."""
    filters = {logging.getLogger(name): _Unless(starts) for name, starts in NOTICES.items()}
    for logger, unless in filters.items():
        logger.addFilter(unless)
    try:
        with warnings.catch_warnings():
            for start in WARNINGS:
                warnings.filterwarnings("ignore", message=start)
            yield
    finally:
        for logger, unless in filters.items():
            logger.removeFilter(unless)


class _Unless(logging.Filter):
    """Passes a message unless it starts with one of the patterns."""

    def __init__(self, starts: tuple[str, ...]) -> None:
        super().__init__()
        self.pattern = re.compile("|".join(starts))

    def filter(self, record: logging.LogRecord) -> bool:
        return not self.pattern.match(record.getMessage())
