import os
from pathlib import Path

import pytest
import torch
from adapted import ready
from tokenizers import Tokenizer, models, normalizers
from transformers import PreTrainedTokenizerFast
from tuned import tuned

from fedlight.modules.language.adapters import Lora
from fedlight.modules.language.scoring import encode_continuations, encode_pairs
from fedlight.modules.sft import SFTModule

PROMPTS = ["the cat sat on", "a dog ran to the park: B day", "c", "it was a nice mat:"]
CONTINUATIONS = [[" the mat.", " a dog"], [" A", " B", " C"], [" warm and soft one."], [" A", " the cat"]]


@pytest.fixture(scope="module")
def module(llama):
    return tuned(SFTModule(llama, lora=Lora(dropout=0.5)), parts=("lora_",))


def one_by_one(module, prompt, continuation):
    """By the chain rule, from logits of the whole text."""
    ids = module.tokenizer(prompt + continuation)["input_ids"]
    start = len(module.tokenizer(prompt)["input_ids"])
    module.network.eval()
    with torch.no_grad():
        logits = module.network(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
    module.network.train()
    own = [float(logits[place - 1, ids[place]]) for place in range(start, len(ids))]
    greedy = [int(logits[place - 1].argmax()) for place in range(start, len(ids))] == ids[start:]
    return own, greedy


def test_a_batch_equals_a_loop(module):
    found = module.log_likelihoods(PROMPTS, CONTINUATIONS)
    assert [len(own) for own in found] == [2, 3, 1, 2]
    for prompt, texts, likelihoods in zip(PROMPTS, CONTINUATIONS, found, strict=True):
        for text, likelihood in zip(texts, likelihoods, strict=True):
            log_probs, greedy = one_by_one(module, prompt, text)
            assert likelihood.log_prob == pytest.approx(sum(log_probs), rel=1e-4)
            assert likelihood.token_log_probs == pytest.approx(log_probs, rel=1e-4)
            assert (likelihood.tokens, likelihood.greedy) == (len(log_probs), greedy)


def test_raw_is_the_model_without_its_adapter(module, llama):
    base = ready(SFTModule(llama))  # a new adapter changes nothing
    raw = module.log_likelihoods(PROMPTS, CONTINUATIONS, raw=True)
    assert raw == base.log_likelihoods(PROMPTS, CONTINUATIONS)
    with_adapter = module.log_likelihoods(PROMPTS, CONTINUATIONS)
    assert all(a.log_prob != b.log_prob for a, b in zip(sum(raw, []), sum(with_adapter, []), strict=True))
    assert all(w.requires_grad for name, w in module.network.named_parameters() if "lora" in name)
    assert with_adapter == module.log_likelihoods(PROMPTS, CONTINUATIONS)


def test_letters_behind_one_prompt_are_read_once(module, monkeypatch):
    read = []
    forward = module.causal_lm.base_model.forward
    monkeypatch.setattr(
        module.causal_lm.base_model,
        "forward",
        lambda *args, **named: read.append(tuple(named["input_ids"].shape)) or forward(*args, **named),
    )
    module.log_likelihoods(PROMPTS[:2], [["A", "B", "C"], ["A", "B"]])
    assert sum(rows for rows, _ in read) == 2


def test_one_token_continuations_have_the_models_own_probabilities(module):
    words = ["mat", "the cat", "B", "park", "sat", "day after", "a", "soft", "one", "x", "Q"]
    prompts = [f"{one} {other}:" for one in words for other in words]
    ids = range(2, 320)
    texts = [module.tokenizer.decode([token]) for token in ids]
    kept = [
        (token, text) for token, text in zip(ids, texts, strict=True) if text.isalpha() and text.isascii()
    ]
    found = module.log_likelihoods(prompts, [[text for _, text in kept]] * len(prompts))
    greedy = 0
    module.network.eval()
    for prompt, likelihoods in zip(prompts, found, strict=True):
        with torch.no_grad():
            logits = module.network(**module.tokenizer(prompt, return_tensors="pt")).logits[0, -1]
        own = torch.tensor([likelihood.log_prob for likelihood in likelihoods])
        expected = logits.log_softmax(-1)[[token for token, _ in kept]]
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)
        said = [token for (token, _), likelihood in zip(kept, likelihoods, strict=True) if likelihood.greedy]
        assert said == [token for token, _ in kept if token == int(logits.argmax())]
        greedy += len(said)
    module.network.train()
    assert greedy > 0


def test_a_token_over_the_border_belongs_to_the_continuation(module):
    """The tokenizer merges "th" + "e": the border of the texts lies inside a token."""
    [whole] = encode_pairs(module.tokenizer, [("a th", "e cat")])
    ids = module.tokenizer("a the cat")["input_ids"]
    assert whole.ids == ids
    offsets = module.tokenizer(["a the cat"]).encodings[0].offsets
    assert offsets[whole.start][0] < len("a th") < offsets[whole.start][1]


def test_losses_of_a_batch_of_responses_are_their_mean_likelihoods(module):
    texts = [" mat", " sat on the mat"]
    batch = module.response_batch(PROMPTS[:2], texts)
    module.eval()
    losses = module.example_losses(batch).tolist()
    scored = module.log_likelihoods(PROMPTS[:2], [[text] for text in texts])
    assert losses == pytest.approx([-text.log_prob / text.tokens for [text] in scored], abs=1e-5)
    assert batch["labels"].shape == batch["input_ids"].shape == batch["attention_mask"].shape
    assert ((batch["labels"] != -100).sum(dim=1)).tolist() == [text.tokens for [text] in scored]
    module.train()


def test_without_a_prompt_the_end_token_comes_first(module):
    [[found]] = module.log_likelihoods([""], [["the cat"]])
    [bare] = encode_pairs(module.tokenizer, [("", "the cat")])
    assert bare.ids == [module.tokenizer.eos_token_id, *module.tokenizer("the cat")["input_ids"]]
    assert (bare.start, found.tokens) == (1, len(bare.ids) - 1)


def test_what_begins_with_a_blank_has_the_same_tokens_without_a_prompt():
    """Also where the tokenizer puts a blank in front of every text, as Llama's does."""
    ids = {token: number for number, token in enumerate(("<s>", "</s>", "\u2581", ":", "Y", "e", "s"))}
    letters = Tokenizer(models.BPE(vocab=ids, merges=[]))
    letters.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, bos_token="<s>", eos_token="</s>")
    behind, alone, bare = encode_continuations(tokenizer, [("es:", " Yes"), ("", " Yes"), ("", "Yes")])
    own = [ids[letter] for letter in ("\u2581", "Y", "e", "s")]
    assert behind.ids[behind.start :] == alone.ids[alone.start :] == bare.ids[bare.start :] == own
    assert alone == bare == ([ids["<s>"], *own], 1)
    with pytest.raises(ValueError, match="neither bos_token nor eos_token"):
        encode_continuations(PreTrainedTokenizerFast(tokenizer_object=letters), [("", "Yes")])


@pytest.mark.skipif(
    not (Path(os.environ.get("FEDLIGHT_SHARED", "/nowhere")) / "models/stories260k").is_dir(),
    reason="FEDLIGHT_SHARED names no folder with models/stories260k",
)
def test_a_real_model_knows_how_a_story_goes_on():
    """Its tokenizer opens a text with a token and writes blanks into words."""
    real = SFTModule(os.environ["FEDLIGHT_SHARED"] + "/models/stories260k")
    prompt, texts = (
        "Once upon a time, there was a little",
        [" girl named Lily.", " girl named zebra.", " quark"],
    )
    [found] = real.log_likelihoods([prompt], [texts])
    for text, likelihood in zip(texts, found, strict=True):
        log_probs, greedy = one_by_one(real, prompt, text)
        assert likelihood.log_prob == pytest.approx(sum(log_probs), rel=1e-4)
        assert (likelihood.tokens, likelihood.greedy) == (len(log_probs), greedy)
    assert found[0].greedy
    assert found[0].log_prob > -2 > -10 > max(found[1].log_prob, found[2].log_prob)


def test_modes_and_streams_are_left_alone(module):
    before = torch.get_rng_state()
    module.network.train()
    module.log_likelihoods(PROMPTS, CONTINUATIONS)
    assert module.network.training
    assert torch.equal(before, torch.get_rng_state())


def test_what_cannot_be_scored_is_refused(module):
    assert module.log_likelihoods([], []) == []
    assert module.log_likelihoods(["a"], [[]]) == [[]]
    with pytest.raises(ValueError, match="the continuation '' of 'the cat sat on' has no tokens"):
        module.log_likelihoods(PROMPTS[:1], [[""]])
    with pytest.raises(ValueError, match=r"have \d+ tokens, more than the model's 64: shorten the prompt"):
        module.log_likelihoods(["the cat " * 70], [[" A"]])
