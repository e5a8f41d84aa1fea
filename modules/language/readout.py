"""Hidden states and logits of a language model, computed only where they are needed.

The output head over the whole vocabulary at every position is often the costliest product of a small model's forward
pass. A loss on the response needs the head at the response's positions; a choice between two tokens needs two rows of it
at one position. Tokens that several texts begin with are computed once (`fedlight.stacking.shared_rows`).
"""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.nn import functional

from fedlight.devices.quantization import loaded_bits
from fedlight.modules.functional import IGNORED, token_log_probs
from fedlight.stacking.dropout import SeededDropout
from fedlight.stacking.shared_rows import LEAST_SHARED, Packed, find_neighbours, pack, pays, plan
from fedlight.support.checks import check_choice
from fedlight.support.words import first_line

MOST_LOGITS = 2**24
"""Logits that exist at once where the head is not trained: 64 MiB in fp32."""
HiddenStates = Callable[[Any, Tensor, Tensor], Tensor]
"""Function of a model, ``input_ids`` and ``attention_mask``, each ``(batch, tokens)``, that returns hidden states."""


def hidden_states(
    causal_lm: Any, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor | None = None
) -> Tensor:
    """Return the last layer's normalised output, ``(batch, tokens, hidden)``.

    ``attention_mask`` is ``(batch, tokens)``, or ``(batch, 1, tokens, tokens)`` with ``position_ids``, which the model
    counts itself where they are None.
    """
    positions = {} if position_ids is None else {"position_ids": position_ids}
    body = causal_lm.base_model
    if body is causal_lm:  # Llama 4
        body = causal_lm.model
    output = body(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **positions)
    return output.last_hidden_state


def head_logits(causal_lm: Any, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
    """Return the logits of all tokens, or of the token ids ``rows``, fp32, from hidden states ``(..., hidden)``."""
    head, config = causal_lm.get_output_embeddings(), causal_lm.config.get_text_config()
    hidden = hidden.to(head.weight.dtype)  # those of Mamba are in fp32
    if rows is None:
        logits = head(hidden)
    else:
        bias = getattr(head, "bias", None)
        logits = functional.linear(hidden, head.weight[rows], None if bias is None else bias[rows])
    # Cohere, Falcon-H1, Granite and Gemma 2 scale or cap what comes out of the head.
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    scale *= getattr(config, "lm_head_multiplier", None) or 1.0
    cap = getattr(config, "final_logit_softcapping", None)
    logits = logits.float()
    logits = logits if scale == 1 else logits * scale  # a product with 1 would take 3 % of a step
    return logits if cap is None else cap * torch.tanh(logits / cap)


def choice_logits(
    causal_lm: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    rows: Tensor,
    compute: HiddenStates = hidden_states,
) -> Tensor:
    """Return the logits of the tokens ``rows`` after each text, ``(batch, choices)``; texts are padded on the right.

    ``compute`` returns the hidden states.
    """
    hidden = compute(causal_lm, input_ids, attention_mask)
    last = attention_mask.sum(dim=1) - 1  # [batch], padded on the right
    return head_logits(causal_lm, hidden[torch.arange(len(last), device=last.device), last], rows)


def response_log_probs(
    causal_lm: Any, batch: dict[str, Tensor], compute: HiddenStates = hidden_states
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each labelled token given the tokens before it, and the mask of labelled tokens.

    The batch has ``input_ids``, ``attention_mask`` and ``labels`` (-100 for none), each ``(batch, tokens)``. The results are
    ``(batch, tokens - 1)``; without a label the log-probability is 0. ``compute`` returns the hidden states.
    """
    labels = batch["labels"][:, 1:]  # the state before a token scores it
    scored = labels != IGNORED
    hidden = compute(causal_lm, batch["input_ids"], batch["attention_mask"])[:, :-1]
    log_probs = label_log_probs(causal_lm, hidden[scored], labels[scored])
    return log_probs.new_zeros(labels.shape).masked_scatter(scored, log_probs), scored


def label_log_probs(causal_lm: Any, hidden: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probability of a label (token id) at each position, ``(positions,)``, in fp32.

    Logits of many positions over a large vocabulary are the largest tensors of a step. Where the head is not trained, at
    most `MOST_LOGITS` of them exist at once, and the gradient of ``hidden`` is computed with them; in fp16 all exist.
    """
    head = causal_lm.get_output_embeddings()
    positions = max(1, MOST_LOGITS // len(head.weight))
    is_trained = any(weight.requires_grad for weight in head.parameters())
    # A loss scale is applied after the parts' gradients, which would underflow in fp16.
    if len(labels) <= positions or is_trained or _in_fp16(hidden):
        return token_log_probs(head_logits(causal_lm, hidden), labels)
    trains = hidden.requires_grad and torch.is_grad_enabled()
    values: list[Tensor] = []
    slopes: list[Tensor] = []
    number = -(-len(labels) // positions)
    # Equal parts: bits of a product with one position would depend on where the weights lie in memory.
    for part, wanted in zip(hidden.detach().tensor_split(number), labels.tensor_split(number), strict=True):
        part.requires_grad_(trains)
        log_probs = token_log_probs(head_logits(causal_lm, part), wanted)
        values.append(log_probs.detach())
        if trains:
            slopes += torch.autograd.grad(log_probs.sum(), part)
    if not trains:
        return torch.cat(values)
    # 0 in value. Its gradient is that of the log-probabilities, whose graph is freed with the logits.
    return torch.cat(values) + ((hidden - hidden.detach()) * torch.cat(slopes)).sum(dim=-1)


def _in_fp16(hidden: Tensor) -> bool:
    kind = hidden.device.type
    casts = kind != "meta" and torch.is_autocast_enabled(kind)  # torch refuses the question for meta
    return hidden.dtype == torch.float16 or (casts and torch.get_autocast_dtype(kind) == torch.float16)


def check_readout(causal_lm: Any, model: str) -> None:
    """Raise ValueError for an architecture whose logits differ from `head_logits` of its hidden states.

    Also for hidden states that depend on later tokens, or on padding on the left.
    """
    # Rows 0 and 1 end unlike, rows 2 and 3 have unlike tokens of padding.
    rows = [[1, 2, 3, 4, 4], [1, 2, 3, 5, 5], [4, 4, 1, 2, 3], [5, 5, 1, 2, 3]]
    ids = torch.tensor(rows, device=causal_lm.device) % causal_lm.config.get_text_config().vocab_size
    mask = torch.ones_like(ids)
    mask[2:, :2] = 0
    kind = causal_lm.config.model_type
    with torch.no_grad():
        try:
            expected = causal_lm(input_ids=ids, attention_mask=mask, use_cache=False).logits[:2].float()
            if loaded_bits(causal_lm) < 16:
                # In training Gemma 3n writes to weights, which fails for rounded ones.
                causal_lm.train()(input_ids=ids, attention_mask=mask, use_cache=False)
                causal_lm.eval()
            hidden = hidden_states(causal_lm, ids, mask)
            logits = head_logits(causal_lm, hidden)[:2]
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # code that reads quantized weights, or kernels of bitsandbytes
            raise ValueError(
                f"model={model!r}: {kind} does not compute ({first_line(error)}): set base to 'plain', or use another model"
            ) from error
    slack = max(1e-3, 2 * torch.finfo(hidden.dtype).eps)  # of rounding to 16 bits
    if not torch.allclose(logits, expected, rtol=slack, atol=slack * float(expected.abs().max())):
        fault = "computes its logits in an unknown way"
    elif _differ(*hidden[:2, :3]):
        fault = "reads tokens before it has to predict them"
    elif _differ(*hidden[2:, 2:]):
        fault = "reads padding as text"
    else:
        return
    raise ValueError(f"model={model!r}: {kind} {fault}: use another model")


def check_classifier(network: Any, model: str) -> None:
    """Raise ValueError for an encoder whose results of texts with padding are far from those without."""
    texts = torch.arange(5, 45, device=network.device).view(8, 5) % network.config.vocab_size
    padded = functional.pad(texts, (0, 3), value=network.config.pad_token_id or 0)
    mask = functional.pad(torch.ones_like(texts), (0, 3))
    with torch.no_grad():
        expected = network(input_ids=texts, attention_mask=torch.ones_like(texts)).logits
        logits = network(input_ids=padded, attention_mask=mask).logits
    if _differ(expected, logits, 0.1):  # above rounding to 16 bits
        raise ValueError(
            f"model={model!r}: {network.config.model_type} reads padding as text: use another model"
        )


def _differ(states: Tensor, others: Tensor, share: float = 0.01) -> bool:
    return float((states - others).float().norm()) > share * float(states.float().norm())


class SharedPrefix:
    """Hidden states of a batch, from shared rows where they save time and from a row per text elsewhere.

    The first time that a row would be shared both forms are computed. Where they differ, because the architecture takes no
    such mask or no positions, the module keeps to a row per text, as with the setting ``off`` in place of ``auto``.

    Raises:
        ValueError: the setting is unknown.
    """

    def __init__(self, setting: str) -> None:
        check_choice("prefix", setting, ("auto", "off"))
        self.setting = setting
        self._takes_mask: bool | None = None
        self._said: set[str] = set()

    def keep(self) -> None:
        """Compute no further comparison: texts have a row each unless rows have been shared already."""
        self._takes_mask = bool(self._takes_mask)

    def pairs(self, causal_lm: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return `hidden_states` of 2 n texts, where texts i and n + i are a pair."""
        return self._compute(causal_lm, input_ids, attention_mask, in_pairs=True)

    def neighbours(self, causal_lm: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return `hidden_states` of texts that may begin like the texts before them."""
        return self._compute(causal_lm, input_ids, attention_mask, in_pairs=False)

    def _compute(self, causal_lm: Any, input_ids: Tensor, attention_mask: Tensor, in_pairs: bool) -> Tensor:
        packed = None
        # Costs are counted on shapes: whether texts are alike must not change them.
        if self.setting == "auto" and self._takes_mask is not False and causal_lm.device.type != "meta":
            packed = self._pack(causal_lm, input_ids, attention_mask, in_pairs)
        if packed is None:
            return hidden_states(causal_lm, input_ids, attention_mask)
        return _compute_packed(causal_lm, packed)

    def _pack(
        self, causal_lm: Any, input_ids: Tensor, attention_mask: Tensor, in_pairs: bool
    ) -> Packed | None:
        """Return the shared rows; None where they do not pay, or cannot be computed."""
        texts, tokens = input_ids.shape
        least = LEAST_SHARED if in_pairs else 2 * LEAST_SHARED  # finding neighbours takes time as well
        if texts < 2 or tokens <= least:
            return None
        if bool((attention_mask[:, 1:] > attention_mask[:, :-1]).any() | (attention_mask[:, 0] == 0).any()):
            return None  # padded on the left
        rows = [*range(texts // 2)] * 2 if in_pairs else find_neighbours(input_ids, attention_mask)
        layout, config = plan(input_ids, attention_mask, rows), causal_lm.config.get_text_config()
        if layout.mean_shared < least or not pays(texts, tokens, layout, config.hidden_size):
            return None
        if not in_pairs and _is_stacked(causal_lm):
            reason = "texts of clients side by side have a row each, by which their adapters tell them apart"
        else:
            reason = _explain_limit(config, tokens, layout.width) or _explain_dropout(causal_lm)
        if reason:
            self._say(reason)
            return None
        packed = pack(input_ids, layout)
        if self._takes_mask is None:
            difference = _compare(causal_lm, input_ids, attention_mask, packed)
            self._takes_mask = not difference
            shares = f"{layout.count} x {layout.width} tokens in place of {texts} x {tokens}"
            self._say(
                f"{config.model_type} {difference}, so each text has a row"
                if difference
                else f"texts that begin alike share a row, in the first batch {shares}"
            )
        return packed if self._takes_mask else None

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            rank_zero_info(f"prefix=auto: {line}")


def _explain_limit(config: Any, tokens: int, width: int) -> str:
    """Return why texts or rows are too long, empty where they are not.

    Within one window or chunk of attention, texts need no mask but the block mask. Some architectures cut their masks by
    column, and have one column per position.
    """
    lengths = {"sliding_window": tokens, "attention_chunk_size": tokens}
    for name, length in (lengths | {"window_size": width, "max_position_embeddings": width}).items():
        limit = getattr(config, name, None)
        if isinstance(limit, int) and length > limit:
            return f"texts or shared rows longer than the model's {name}={limit} have a row each"
    return ""


def _explain_dropout(causal_lm: nn.Module) -> str:
    """Return that dropout is on, which draws for each row; empty where it is off."""
    layers = [layer for layer in causal_lm.modules() if layer.training]
    rates = [layer.rate for layer in layers if isinstance(layer, SeededDropout)]
    rates += [layer.p for layer in layers if isinstance(layer, nn.modules.dropout._DropoutNd)]  # torch's own
    if not (rate := max(rates, default=0.0)):
        return ""
    return f"dropout of {rate:g} draws for each text: in training each has a row, and shares it with lora.dropout=0"


def _is_stacked(causal_lm: nn.Module) -> bool:
    """Return whether `fedlight.stacking.StackedAdapters` computes the adapters now."""
    return any("forward" in vars(layer) and hasattr(layer, "lora_A") for layer in causal_lm.modules())


def _compute_packed(causal_lm: Any, packed: Packed) -> Tensor:
    mask = packed.allowed  # [rows, 1, tokens, tokens] bool
    if causal_lm.config._attn_implementation != "sdpa":  # these add the mask to the scores
        mask = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, torch.finfo(torch.float32).min)
    return packed.unpack(hidden_states(causal_lm, packed.input_ids, mask, packed.position_ids))


@torch.no_grad()
def _compare(causal_lm: Any, input_ids: Tensor, attention_mask: Tensor, packed: Packed) -> str:
    """Return how both forms differ, empty where they agree up to rounding."""
    used = attention_mask.bool()
    expected = hidden_states(causal_lm, input_ids, attention_mask)[used]
    try:
        computed = _compute_packed(causal_lm, packed)[used]
    except torch.OutOfMemoryError:
        raise
    # So an architecture may refuse the mask or the positions; memory is no such reason.
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError, AssertionError) as error:
        return f"does not compute shared rows ({type(error).__name__})"
    apart = (computed - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)
    largest = float(apart.max())
    # Rounding to 16 bits adds up over the layers.
    if largest <= (0.1 if expected.dtype.itemsize == 2 else 1e-3):
        return ""
    return f"computes other hidden states in shared rows (apart by {largest:.2g})"
