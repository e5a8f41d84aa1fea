"""Which settings of a :class:`~fedlight.modules.language.language_model.LanguageModule` cannot be meant."""

from typing import Any

from fedlight.modules.language.adapter_folders import check_merge
from fedlight.modules.language.base_model import BASES, DTYPES
from fedlight.modules.language.optimizers import SCHEDULES, check_optimizer
from fedlight.support.checks import check_choice, check_range


def check_options(options: Any) -> None:
    """Refuses settings before a model is loaded with them.

    Args:
        options: the constructor's arguments, as attributes.

    Raises:
        ValueError: one is misspelt or out of range, or two do not go together.
    """
    check_choice("base", options.base, BASES)
    check_choice("dtype", options.dtype, ("auto", *DTYPES))
    check_choice("lr_schedule", options.lr_schedule, SCHEDULES)
    check_optimizer(options.optimizer, options.optimizer_args or {})
    check_range("num_adapters", options.num_adapters, 1, float("inf"))
    check_range("lora_rank", options.lora_rank, 1, float("inf"))
    check_range("lora_alpha", options.lora_alpha, 0, float("inf"), above_low=True)  # at 0 nothing is trained
    check_range("lora_dropout", options.lora_dropout, 0, 1)
    check_range("lr", options.lr, 0, float("inf"), above_low=True)
    check_merge(options.merge_adapter, options.adapter, options.base)
