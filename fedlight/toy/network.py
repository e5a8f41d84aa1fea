"""The tiny language model before its pretraining: a word-level tokenizer and a small Llama with a head start.

Learning to compare two texts word by word takes a transformer from nothing many thousand steps, most of them spent on a
plateau until its first attention heads look at useful places. Four heads therefore start there, in the spirit of
Trockman and Kolter, "Mimetic Initialization of Self-Attention Layers", ICML 2023, https://arxiv.org/abs/2305.09828: one
looks at the previous word, one at the last marker (``POST``, ``A``, ``B``, ...), and two at earlier uses of the same
word. All of them are trained like the rest. In short trials of equally many steps that was the difference between
confusing the words of the two summaries (width 64, plain start) and not (width 96, these heads); the two same-word heads
alone made no difference within 250 steps.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from fedlight.toy import world
from fedlight.toy.exercises import JUDGEMENTS, MARKERS, SPOKEN

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.models.llama.modeling_llama import LlamaAttention

SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
WIDTH, LAYERS, HEADS, HEAD_WIDTH = 96, 4, 4, 32
ROPE_BASE = 10_000.0


def make_tokenizer() -> "PreTrainedTokenizerFast":
    """One token per word or punctuation mark of the world, joined by blanks when decoded."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL.values(), *MARKERS, ":", ".", "?", *SPOKEN, *JUDGEMENTS]
    words += [*world.NAMES, *world.VERBS, *world.OBJECTS, *world.POLITE, *world.RUDE, *world.FILLERS]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, model_max_length=256, **SPECIAL
    )


def make_model(tokenizer: "PreTrainedTokenizerFast", seed: int) -> "LlamaForCausalLM":
    """The untrained model: four layers of width 96, tied embeddings, biases in attention, four heads with a start."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        head_dim=HEAD_WIDTH,
        max_position_embeddings=256,
        initializer_range=0.05,
        tie_word_embeddings=True,
        attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE},
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    attention: list[LlamaAttention] = [layer.self_attn for layer in model.model.layers]
    markers = model.model.embed_tokens.weight[tokenizer.convert_tokens_to_ids(list(MARKERS))]
    with torch.no_grad():
        look_at_previous_word(attention[0], head=0)
        look_at_last_marker(attention[0], markers, head=1)
        look_at_same_word(attention[1], head=0)
        look_at_same_word(attention[2], head=0)
    return model


def look_at_previous_word(
    attention: "LlamaAttention", head: int, sharpness: float = 8.0, frequencies: int = 4
) -> None:
    """Constant queries and keys whose rotated product peaks at distance one: sum over f of cos(f * (distance - 1))."""
    amplitude = (sharpness * HEAD_WIDTH**0.5) ** 0.5
    angle = ROPE_BASE ** (-torch.arange(0, HEAD_WIDTH, 2) / HEAD_WIDTH)
    used = (torch.arange(HEAD_WIDTH // 2) < frequencies) * amplitude
    rows = _cleared_rows(attention, head)
    attention.k_proj.bias[rows] = torch.cat([used, torch.zeros_like(used)])
    attention.q_proj.bias[rows] = torch.cat([used * angle.cos(), -used * angle.sin()])


def look_at_last_marker(
    attention: "LlamaAttention", markers: Tensor, head: int, sharpness: float = 12.0
) -> None:
    """Constant queries, and keys that are large for the embeddings of markers ``(markers, width)`` and fade slowly."""
    slow = (5, 6)  # periods of 112 and 199 words: over a text of the world nearer is always stronger
    amplitude = (sharpness / len(slow) * HEAD_WIDTH**0.5) ** 0.5
    rows = _cleared_rows(attention, head)
    for index in slow:
        attention.q_proj.bias[rows.start + index] = amplitude
        attention.k_proj.weight[rows.start + index] = (
            functional.normalize(markers).sum(0) * amplitude / WIDTH**0.5
        )


def look_at_same_word(attention: "LlamaAttention", head: int, sharpness: float = 5.0) -> None:
    """Equal random projections for queries and keys, in the slow frequencies only, so that distance hardly matters."""
    slow = [index for index in range(HEAD_WIDTH) if index % (HEAD_WIDTH // 2) >= 5]
    rows = _cleared_rows(attention, head)
    projection = torch.zeros(HEAD_WIDTH, WIDTH)
    projection[slow] = torch.linalg.qr(torch.randn(WIDTH, len(slow)))[0].T
    projection *= (sharpness * HEAD_WIDTH**0.5 / len(slow)) ** 0.5
    attention.q_proj.weight[rows] = projection
    attention.k_proj.weight[rows] = projection


def _cleared_rows(attention: "LlamaAttention", head: int) -> slice:
    rows = slice(head * HEAD_WIDTH, (head + 1) * HEAD_WIDTH)
    attention.q_proj.weight[rows] = 0
    attention.k_proj.weight[rows] = 0
    return rows
