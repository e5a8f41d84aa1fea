"""Checks that the data fit a module: the entries of its batches, and texts within the model's tokens and positions.

A table of learned positions (GPT-2, OPT, BERT, RoBERTa) ends: a longer text raises an IndexError in the middle of training,
so a setting that allows one is refused. Computed positions (rotary, relative, ALiBi) have no end, but the model was not
trained on those beyond its length. The first such text causes a warning and no error, since fine-tuning on longer texts is
how a context is extended.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

COMPUTED_POSITIONS = ("rope", "rotary", "relative_attention", "alibi")
"""Parts of the names of config settings that only models with computed positions have."""
PADDED_TABLES = ("roberta", "camembert", "longformer", "data2vec-text")
"""Model types whose position table has rows for padding before the first position."""


def check_batch(batch: Any, form: Mapping[str, int], module: str, hint: str) -> None:
    """Raise ValueError for a batch that lacks an entry of ``form`` or has it with another number of dimensions than there.

    0 dimensions are not checked; ``hint`` names the data that the module reads, and the datamodule that provides them.

    Examples:
        >>> check_batch({"labels": 0}, {"chosen": 0}, "DPOModule", "pairs")
        Traceback (most recent call last):
        ...
        ValueError: model=DPOModule reads pairs; the batches of this data have no 'chosen', only 'labels'
    """
    if not form:
        return
    start = f"model={module} reads {hint}; the batches of this data"
    if not isinstance(batch, Mapping):
        raise ValueError(f"{start} are of type {type(batch).__name__}")
    for name, dimensions in form.items():
        if name not in batch:
            raise ValueError(f"{start} have no {name!r}, only {', '.join(map(repr, batch))}")
        if dimensions and batch[name].dim() != dimensions:
            shape = tuple(batch[name].shape)
            raise ValueError(f"{start} have {name!r} of shape {shape}, not of {dimensions} dimension(s)")


def count_positions(config: Any) -> int | None:
    """Return the most tokens of a text, or None where the config of ``transformers`` sets no limit.

    Examples:
        >>> from types import SimpleNamespace as Config
        >>> count_positions(Config(model_type="gpt2", max_position_embeddings=1024))
        1024
        >>> count_positions(Config(model_type="roberta", max_position_embeddings=514, pad_token_id=1))
        512
    """
    limit: int | None = getattr(config, "max_position_embeddings", None)
    if limit is None or not any(name in config.model_type for name in PADDED_TABLES):
        return limit
    return limit - (config.pad_token_id or 0) - 1  # positions begin after the padding's


def has_position_table(config: Any) -> bool:
    """Return whether a model's positions are learned one by one, not computed."""
    return not any(
        part in name and value for name, value in vars(config).items() for part in COMPUTED_POSITIONS
    )


def check_max_tokens(config: Any, model: str, data: object) -> None:
    """Raise ValueError for data whose ``max_tokens`` is above the rows of a model's position table."""
    limit = count_positions(config)
    asked = getattr(data, "max_tokens", None)
    if limit is None or not has_position_table(config) or not isinstance(asked, int):
        return
    if asked > limit:
        raise ValueError(
            f"data.max_tokens={asked} is above the {limit} learned positions of model={model!r}: "
            f"set --data.max_tokens {limit} or less, or take a model with more"
        )


def check_tokenizer(tokenizer: Any, data: object) -> None:
    """Raise ValueError for data whose tokenizer numbers most tokens in another way than that of the model."""
    other: Any = getattr(data, "tokenizer", None)
    same = tokenizer.name_or_path
    if not hasattr(other, "get_vocab") or getattr(other, "name_or_path", same) == same:
        return
    numbers = tokenizer.get_vocab()
    alike = [numbers[token] == number for token, number in other.get_vocab().items() if token in numbers]
    if sum(alike) <= len(alike) / 2:
        raise ValueError(
            f"data.tokenizer={other.name_or_path!r} gives tokens other numbers than the tokenizer of the model does: set it "
            f"to {tokenizer.name_or_path!r}"
        )


def check_texts(config: Any, batch: Mapping[str, Any], reads: bool = True) -> str | None:
    """Return a warning for a batch with a text longer than the model's positions, None for other batches.

    Raises ValueError for a token that the model's embedding does not have, if it ``reads`` the tokens.
    """
    texts = [*_texts(batch)]
    words = config.get_text_config().vocab_size
    if reads and (largest := max((int(ids.max()) for ids in texts), default=0)) >= words:
        raise ValueError(
            f"a text has token {largest}, and the model has {words}, counted from 0: set data.tokenizer to the tokenizer of "
            "the model, or leave what was added to it out of the texts"
        )
    limit, longest = count_positions(config), max((ids.shape[1] for ids in texts), default=0)
    if limit is None or longest <= limit:
        return None
    return (
        f"a text of {longest} tokens is longer than the {limit} positions that the model was trained with: its output "
        f"beyond them is untrained; set --data.max_tokens {limit}, unless you extend the context on purpose"
    )


def _texts(batch: Mapping[str, Any]) -> Iterator[Tensor]:
    for name, value in batch.items():
        if isinstance(value, Mapping):
            yield from _texts(value)  # the sides of a pair
        elif name == "input_ids" and isinstance(value, Tensor):
            yield value
