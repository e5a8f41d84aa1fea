"""Logits of a causal language model at the needed positions and tokens only.

The output head over the whole vocabulary at every position is often the costliest product of a small model's forward
pass. A loss on the response needs the head at the response's positions; a choice between two tokens needs two rows of it
at one position.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fedlight.modules.functional import IGNORED, token_log_probs

HiddenStates = Callable[[Any, Tensor, Tensor], Tensor]
"""Function of a model, ``input_ids`` and ``attention_mask``, each ``(batch, tokens)``, that returns hidden states."""


def hidden_states(
    causal_lm: Any, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor | None = None
) -> Tensor:
    """Return the last layer's normalised output, ``(batch, tokens, hidden)``.

    Args:
        causal_lm: a ``transformers`` model.
        input_ids: ``(batch, tokens)``.
        attention_mask: ``(batch, tokens)``, or ``(batch, 1, tokens, tokens)`` with ``position_ids``.
        position_ids: ``(batch, tokens)``; None for those that the model counts itself.
    """
    positions = {} if position_ids is None else {"position_ids": position_ids}
    output = causal_lm.base_model(
        input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **positions
    )
    states: Tensor = output.last_hidden_state
    return states


def head_logits(causal_lm: Any, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
    """Return the logits of all tokens, or of some, from hidden states.

    Args:
        causal_lm: a ``transformers`` model with an output head.
        hidden: ``(..., hidden)``.
        rows: ``(choices,)`` token ids; None for the whole vocabulary.

    Returns:
        ``(..., vocabulary)`` or ``(..., choices)``, fp32.
    """
    head, config = causal_lm.get_output_embeddings(), causal_lm.config
    if rows is None:
        logits = head(hidden)
    else:
        bias = getattr(head, "bias", None)
        logits = functional.linear(hidden, head.weight[rows], None if bias is None else bias[rows])
    # Cohere, Granite and Gemma 2 scale or cap what comes out of the head.
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    logits = logits.float() * scale
    return logits if cap is None else cap * torch.tanh(logits / cap)


def choice_logits(
    causal_lm: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    rows: Tensor,
    compute: HiddenStates = hidden_states,
) -> Tensor:
    """Return the logits of the tokens ``rows`` after each text, ``(batch, choices)``.

    Args:
        causal_lm: a ``transformers`` model with an output head.
        input_ids: ``(batch, tokens)``, padded on the right.
        attention_mask: ``(batch, tokens)``.
        rows: ``(choices,)`` token ids.
        compute: function that returns the hidden states.
    """
    hidden = compute(causal_lm, input_ids, attention_mask)
    last = attention_mask.sum(dim=1) - 1
    return head_logits(causal_lm, hidden[torch.arange(len(last), device=last.device), last], rows)


def response_log_probs(
    causal_lm: Any, batch: dict[str, Tensor], compute: HiddenStates = hidden_states
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each labelled token given the tokens before it.

    Args:
        causal_lm: a ``transformers`` model with an output head.
        batch: ``input_ids``, ``attention_mask`` and ``labels``, each ``(batch, tokens)``; labels are -100 at
            positions without a label.
        compute: function that returns the hidden states.

    Returns:
        ``(batch, tokens - 1)`` log-probabilities, 0 where there is no label, and the bool mask of labelled tokens.
    """
    labels = batch["labels"][:, 1:]
    scored = labels != IGNORED
    hidden = compute(causal_lm, batch["input_ids"], batch["attention_mask"])[:, :-1]
    found = token_log_probs(head_logits(causal_lm, hidden[scored]), labels[scored])
    return torch.zeros(labels.shape, device=found.device).masked_scatter(scored, found), scored


def check_readout(causal_lm: Any, model: str) -> None:
    """Raise ValueError for an architecture whose logits differ from `head_logits` of its hidden states."""
    ids = torch.arange(3, device=causal_lm.device)[None] % causal_lm.config.vocab_size
    mask = torch.ones_like(ids)
    with torch.no_grad():
        expected = causal_lm(input_ids=ids, attention_mask=mask, use_cache=False).logits.float()
        found = head_logits(causal_lm, hidden_states(causal_lm, ids, mask))
    if not torch.allclose(found, expected, rtol=0.05, atol=0.05 * float(expected.abs().max())):
        kind = causal_lm.config.model_type
        raise ValueError(f"model={model!r}: {kind} computes its logits in an unknown way: use another model")
