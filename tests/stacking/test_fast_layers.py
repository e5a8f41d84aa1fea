import copy

import pytest
import torch
import transformers
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fedlight.modules.language.readout import hidden_states
from fedlight.stacking.dropout import DropoutMasks
from fedlight.stacking.fast_layers import LONGEST, use_fast_layers


@pytest.fixture
def seen(monkeypatch):
    """Number types that torch's attention is computed in."""
    types, attend = [], functional.scaled_dot_product_attention

    def compute(query, key, value, attn_mask=None, **options):
        types.append((query.dtype, attn_mask.dtype if attn_mask is not None else None))
        return attend(query, key, value, attn_mask=attn_mask, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", compute)
    return types


@pytest.fixture(scope="module")
def plain():
    """A Llama of two layers in bf16."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(
        **sizes, num_hidden_layers=2, vocab_size=40, max_position_embeddings=512
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()


def quicken(network, dtype=torch.bfloat16):
    """Return a copy with fast layers."""
    network = copy.deepcopy(network).to(dtype)
    use_fast_layers(network, DropoutMasks())
    return network


def make_texts(tokens, padding=0):
    ids = torch.randint(5, 40, (2, tokens), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, tokens - padding :] = 0
    return ids, mask


@pytest.mark.parametrize("padding", [0, 3])
def test_short_texts_are_closer_to_fp32(plain, seen, padding):
    network, texts = quicken(plain), make_texts(20, padding)
    exact = copy.deepcopy(plain).float()
    used, states = texts[1].bool(), {}
    for name, model in {"exact": exact, "plain": plain, "ours": network}.items():
        seen.clear()
        states[name] = hidden_states(model, *texts)[used]
        kind = torch.bfloat16 if name == "plain" else torch.float32
        assert {query for query, _ in seen} == {kind}
    assert states["ours"].dtype == torch.bfloat16
    errors = [(states[name].float() - states["exact"]).norm() for name in ("plain", "ours")]
    assert 0 < errors[1] < 1.1 * errors[0]


def test_masks_that_are_added_are_cast(plain, seen):
    network, (ids, mask) = quicken(plain), make_texts(20)
    added = torch.zeros(2, 1, 20, 20).masked_fill(torch.ones(20, 20).triu(1).bool(), -1e9)
    positions = torch.arange(20).expand(2, -1)
    found = hidden_states(network, ids, added.bfloat16(), positions)
    assert set(seen) == {(torch.float32, torch.float32)}
    torch.testing.assert_close(found, hidden_states(network, ids, mask), rtol=0.05, atol=0.05)


def test_other_lengths_types_and_networks_are_those_of_transformers(plain, seen):
    network, texts = quicken(plain), make_texts(LONGEST + 1)
    assert torch.equal(hidden_states(network, *texts), hidden_states(plain, *texts))
    assert {query for query, _ in seen} == {torch.bfloat16}
    seen.clear()
    one = make_texts(1)
    hidden_states(network, *one)
    hidden_states(plain, *make_texts(20))  # of someone else in this process
    assert {query for query, _ in seen} == {torch.bfloat16}
    single, theirs = quicken(plain, torch.float32), copy.deepcopy(plain).float()
    texts = make_texts(20)
    assert torch.equal(hidden_states(single, *texts), hidden_states(theirs, *texts))


def test_a_few_words_behind_a_long_cache_are_those_of_transformers(plain, seen):
    """Casting all keys would take longer than the words."""
    network, (ids, _) = quicken(plain), make_texts(LONGEST + 4)
    for words in (4, 100):
        seen.clear()
        cache = network.model(input_ids=ids[:, : words - 4 + 1], use_cache=True).cache
        seen.clear()
        network.model(input_ids=ids[:, :4], cache=cache)
        assert {query for query, _ in seen} == {torch.float32}
    cache = network.model(input_ids=ids, use_cache=True).cache
    seen.clear()
    network.model(input_ids=ids[:, :4], cache=cache)
    assert {query for query, _ in seen} == {torch.bfloat16}


def test_a_bias_of_positions_is_left_to_transformers(seen):
    """Its type is that of the model, and torch takes none that differs from the queries'."""
    torch.manual_seed(0)
    config = transformers.UMT5Config(
        vocab_size=40, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, num_labels=2
    )
    config.eos_token_id = 1
    network = transformers.UMT5ForSequenceClassification(config).to(torch.bfloat16).eval()
    ids = torch.tensor([[5, 6, 7, 1]])
    expected = network(input_ids=ids).logits
    use_fast_layers(network, DropoutMasks())
    assert torch.equal(network(input_ids=ids).logits, expected)
    assert {query for query, _ in seen} == {torch.bfloat16}


def test_a_function_that_somebody_has_registered_is_called(plain, monkeypatch):
    """With all arguments by their names in transformers, as some architectures give them."""
    calls, before = [], ALL_ATTENTION_FUNCTIONS["sdpa"]

    def own(module, query, key, value, attention_mask, **options):
        calls.append(query.dtype)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)

    transformers.AttentionInterface.register("sdpa", own)
    try:
        network, texts = quicken(plain), make_texts(20)
        hidden_states(network, *texts)
        hidden_states(plain, *texts)
        assert calls == [torch.float32] * 2 + [torch.bfloat16] * 2
        x = torch.zeros(1, 2, 3, 4)
        layer = network.model.layers[0].self_attn
        attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
        attend(layer, query=x, key=x, value=x, attention_mask=None, scaling=1.0)
        quicken(plain)
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is attend  # once in a process
    finally:
        transformers.AttentionInterface.register("sdpa", before)
