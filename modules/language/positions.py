"""How many tokens a model has positions for, and what happens beyond them.

A table of learned positions (GPT-2, OPT, BERT, RoBERTa) ends: a longer text is an IndexError in the middle of training, so a
setting that allows one is refused. Computed positions (rotary, relative, ALiBi) do not end, but those beyond what the model
was trained with mean nothing to it: that is said once, at the first text that is so long. It is not refused, since
fine-tuning on longer texts is how a context is extended.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

COMPUTED = ("rope", "rotary", "relative_attention", "alibi")
"""In the names of settings of models whose positions are no table."""
OFFSET = ("roberta", "camembert", "longformer", "data2vec-text")
"""Model types whose table has rows for the padding before the first position."""


@runtime_checkable
class LimitsTokens(Protocol):
    """What a module needs of the datamodule: the most tokens of a text."""

    max_tokens: int


def positions(config: Any) -> int | None:
    """The most tokens of a text, None where the config of ``transformers`` does not say.

    Example:
        >>> from types import SimpleNamespace as Config
        >>> positions(Config(model_type="gpt2", max_position_embeddings=1024))
        1024
        >>> positions(Config(model_type="roberta", max_position_embeddings=514, pad_token_id=1))
        512
    """
    limit: int | None = getattr(config, "max_position_embeddings", None)
    if limit is None or not any(name in config.model_type for name in OFFSET):
        return limit
    return limit - (config.pad_token_id or 0) - 1


def is_table(config: Any) -> bool:
    """Are the positions learned, one by one?"""
    return not any(part in name and value for name, value in vars(config).items() for part in COMPUTED)


def refuse_beyond(config: Any, model: str, data: object) -> None:
    """Refuses data whose texts may be longer than a table of positions.

    Args:
        config: of ``transformers``.
        model: name of the model.
        data: the trainer's datamodule; one without ``max_tokens`` passes.

    Raises:
        ValueError: ``max_tokens`` is above the model's positions.
    """
    limit = positions(config)
    if limit is None or not is_table(config) or not isinstance(data, LimitsTokens):
        return
    if isinstance(data.max_tokens, int) and data.max_tokens > limit:
        raise ValueError(
            f"data.max_tokens={data.max_tokens} is above the {limit} learned positions of model={model!r}: "
            f"set --data.max_tokens {limit} or less, or take a model with more"
        )


def beyond(config: Any, batch: Mapping[str, Any]) -> str | None:
    """What to say of a batch with a text longer than the positions that a model was trained with; None if there is none."""
    limit, longest = positions(config), max(_widths(batch), default=0)
    if limit is None or longest <= limit:
        return None
    return (
        f"a text of {longest} tokens is longer than the {limit} positions that the model was trained with: what it makes of "
        f"the rest is untrained; set --data.max_tokens {limit}, unless that is what you are training"
    )


def _widths(batch: Mapping[str, Any]) -> Iterator[int]:
    for name, value in batch.items():
        if isinstance(value, Mapping):
            yield from _widths(value)
        elif name == "input_ids" and isinstance(value, Tensor):
            yield value.shape[1]
