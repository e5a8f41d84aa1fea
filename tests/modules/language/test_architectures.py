"""Architectures against plain ``transformers`` on one text at a time, without PEFT, padding and cache."""

import pytest
import torch
from architectures import CONFIGS, GATED, REFUSED
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DbrxConfig,
    FalconConfig,
    Gemma3nTextConfig,
    MixtralConfig,
)
from tuned import tuned

from fedlight.augmentation.less.example_gradients import example_gradients
from fedlight.devices.cost import CostMeter
from fedlight.devices.shape import BatchShape
from fedlight.modules import SFTModule
from fedlight.modules.functional import IGNORED
from fedlight.modules.language.adapters import Lora, trained_parameters
from fedlight.stacking import StackedAdapters

KINDS = (
    "gpt2",
    "gemma2",
    "opt",
    "mamba",
    "falcon_h1",
    "qwen3_next",
    "qwen2_moe",
    "deepseek_v3",
    "deepseek_v4",
    "llama4",
)
FUSED = ("qwen3_next", "deepseek_v3")  # adapters of experts, which are not stacked
PROMPTS = ["the cat sat on the mat. it was a nice mat", "a dog", "day after day"]
PLAIN = Lora(rank=4, dropout=0.0)


def save(config, tokenizer, folder, loader=AutoModelForCausalLM):
    torch.manual_seed(0)
    model = loader.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.2)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return str(folder)


def make_rows():
    stream = torch.Generator().manual_seed(1)
    return [torch.randint(5, 320, (length,), generator=stream) for length in (21, 9, 14, 17)]


def make_batch(rows):
    """Return texts that are padded on the right; their first four tokens have no labels."""
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    labels = ids.masked_fill(mask == 0, IGNORED)
    labels[:, :4] = IGNORED
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def losses_of(model, rows):
    losses = []
    for row in rows:
        log_probs = model(input_ids=row[None], use_cache=False).logits[0].float().log_softmax(dim=1)
        losses.append(-log_probs[3:-1].gather(1, row[4:, None]).mean())
    return torch.stack(losses)


def write(model, tokenizer, prompt, number):
    ids = tokenizer(prompt)["input_ids"]
    start = len(ids)
    for _ in range(number):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        ids.append(int(logits.argmax()))
        if ids[-1] == tokenizer.eos_token_id:
            break
    return tokenizer.decode(ids[start:], skip_special_tokens=True)


@pytest.mark.parametrize("kind", KINDS)
def test_an_architecture_computes_what_transformers_does(kind, llama, tmp_path):
    folder, rows = save(CONFIGS[kind](), llama, tmp_path / "base"), make_rows()
    module = tuned(SFTModule(folder, dtype="fp32", lora=PLAIN))
    module.save_merged(tmp_path / "merged")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        found, expected = module.train().example_losses(make_batch(rows)), losses_of(plain, rows)
        texts = [write(plain, module.tokenizer, prompt, 8) for prompt in PROMPTS]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    asked = {"max_new_tokens": 8, "strip": False}
    assert module.generate(PROMPTS, temperature=0, **asked) == [[text] for text in texts]
    assert module.generate(PROMPTS, n=2, temperature=1e-6, **asked) == [[text] * 2 for text in texts]

    shapes = [
        {name: weight.shape for name, weight in one.named_parameters()} for one in (module, module.skeleton())
    ]
    assert shapes[0] == shapes[1]
    fresh = SFTModule(folder, dtype="fp32", lora=PLAIN)
    assert {name: weight.shape for name, weight in fresh.skeleton().named_parameters()} == shapes[0]
    assert CostMeter(fresh).cost(BatchShape(examples=2, tokens=12, responses=9)).flops > 0


@pytest.mark.parametrize("kind", KINDS)
def test_clients_side_by_side_compute_what_each_does_alone(kind, llama, tmp_path):
    folder, rows = save(CONFIGS[kind](), llama, tmp_path), make_rows()
    lora = PLAIN if kind in FUSED else Lora(rank=4, dropout=0.2)
    module = tuned(SFTModule(folder, dtype="fp32", lora=lora)).train()
    trained = trained_parameters(module)
    if kind in FUSED:
        with pytest.raises(ValueError, match="adapter on a layer of type"):
            StackedAdapters(module, trained)
        return
    starts = [{}, {name: weight * 0.5 for name, weight in trained.items()}]
    stacked = StackedAdapters(module, trained)
    stacked.enter(starts, [None, None])
    stacked.set_rows([2, 2], [3, 4])
    together = module.example_losses(make_batch(rows)).detach()
    stacked.leave()
    for own, seed, start, found in zip((rows[:2], rows[2:]), (3, 4), starts, together.split(2), strict=True):
        module.load_state_dict(module.state_dict() | start)
        with module.dropout_masks.seeded(seed):
            torch.testing.assert_close(found, module.example_losses(make_batch(own)), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", REFUSED)
def test_an_architecture_is_refused_when_it_is_loaded(kind, llama, tmp_path):
    config, message = REFUSED[kind]
    loader = AutoModelForSeq2SeqLM if kind == "t5" else AutoModelForCausalLM
    with pytest.raises(ValueError, match=message):
        SFTModule(save(config(), llama, tmp_path, loader), dtype="fp32").configure_model()


def test_what_cannot_be_computed_for_an_architecture_is_refused(llama, tmp_path):
    falcon = FalconConfig(vocab_size=320, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    folder = save(falcon, llama, tmp_path / "falcon")
    with pytest.raises(ValueError, match="falcon has none: set base to 'plain'"):
        SFTModule(folder, base="nf4", dtype="fp32").configure_model()
    folder = save(CONFIGS["mamba"](), llama, tmp_path / "mamba")
    with pytest.raises(ValueError, match=r"mamba does not compute \(.*\): set base to 'plain'"):
        SFTModule(folder, base="nf4", dtype="fp32").configure_model()
    sizes = {"head_dim": 8, "laurel_rank": 4, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0}
    config = Gemma3nTextConfig(
        **GATED, **sizes, vocab_size_per_layer_input=320, activation_sparsity_pattern=[0.0] * 2
    )
    folder = save(config, llama, tmp_path / "gemma3n")
    with pytest.raises(ValueError, match=r"gemma3n_text does not compute \(.*\): set base to 'plain'"):
        SFTModule(folder, base="nf4", dtype="fp32").configure_model()
    experts = {"ffn_hidden_size": 16, "moe_num_experts": 2, "moe_top_k": 1}
    dbrx = DbrxConfig(
        **{"vocab_size": 320, "d_model": 32, "n_layers": 1, "n_heads": 4, "max_seq_len": 256},
        **{"attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0}, "ffn_config": experts},
    )
    folder = save(dbrx, llama, tmp_path / "dbrx")
    with pytest.raises(ValueError, match=r"cannot be counted on shapes alone.* run without devices"):
        CostMeter(SFTModule(folder, dtype="fp32")).cost(BatchShape(examples=2, tokens=12, responses=9))
    mixtral = MixtralConfig(**{**GATED, "num_hidden_layers": 1}, num_local_experts=2)
    module = SFTModule(save(mixtral, llama, tmp_path / "mixtral"), dtype="fp32", lora=PLAIN)
    module.configure_model()
    for way, match in (("layers", "sees no input of .*: take it out"), ("func", "does not go through")):
        with pytest.raises(ValueError, match=match):
            example_gradients(module, make_batch(make_rows()), way)
    with pytest.raises(ValueError, match=r"lora_dropout != 0.; set lora.dropout to 0"):
        SFTModule(module.options.model, dtype="fp32").configure_model()
