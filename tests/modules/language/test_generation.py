from types import SimpleNamespace

import pytest
import torch
from adapted import ready
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from fedlight.evaluation.tasks.sampling import Completions
from fedlight.modules.language import adapters, generation
from fedlight.modules.language.generation import encode_prompts, end_tokens, make_stopping, pad_left
from fedlight.modules.sft import SFTModule
from fedlight.stacking.fast_layers import FusedLora

PROMPTS = ["the cat", "a dog ran to the park: B day after", "c", "it was a nice"]


@pytest.fixture(scope="module")
def module(llama):
    return ready(SFTModule(llama, completions=Completions(number=2, max_new_tokens=5)))


def test_a_batch_equals_one_by_one(module):
    together = module.generate(PROMPTS, temperature=0, max_new_tokens=12)
    assert together == [module.generate([prompt], temperature=0, max_new_tokens=12)[0] for prompt in PROMPTS]
    assert len({texts[0] for texts in together}) == len(PROMPTS)


def test_greedy_equals_a_loop_without_cache(module):
    network, tokenizer = module.network.eval(), module.tokenizer
    ids = tokenizer(PROMPTS[1])["input_ids"]
    length = len(ids)
    for _ in range(12):
        ids.append(int(network(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    expected = tokenizer.decode(ids[length:], skip_special_tokens=True).strip()
    module.network.train()
    assert module.generate(PROMPTS[:2], temperature=0, max_new_tokens=12)[1] == [expected]


def test_reading_a_prompt_once_for_all_copies_changes_nothing(module):
    """The same draws as with ``num_return_sequences``, which reads each copy anew."""
    texts = pad_left(encode_prompts(module.tokenizer, PROMPTS), module.tokenizer.pad_token_id)
    width = texts["input_ids"].shape[1]
    config = GenerationConfig(
        max_new_tokens=8, num_return_sequences=3, do_sample=True, temperature=0.7, top_k=0, pad_token_id=0
    )
    module.network.eval()
    torch.manual_seed(11)
    tokens = module.causal_lm.generate(**texts, generation_config=config)[:, width:]
    module.network.train()
    expected = [text.strip() for text in module.tokenizer.batch_decode(tokens, skip_special_tokens=True)]
    found = module.generate(PROMPTS, n=3, max_new_tokens=8, seed=11)
    assert found == [expected[row : row + 3] for row in range(0, 12, 3)]


def test_greedy_copies_are_equal(module):
    [[one, two]] = module.generate(PROMPTS[:1], n=2, temperature=0, max_new_tokens=4)
    assert one == two != ""


def test_modes_are_given_back(module):
    module.network.train()
    module.network.get_submodule("base_model.model.model.norm").eval()
    before = [part.training for part in module.modules()]
    module.generate(PROMPTS[:1], max_new_tokens=2)
    assert [part.training for part in module.modules()] == before
    module.network.train()


def test_top_p_near_zero_is_greedy(module):
    greedy = module.generate(PROMPTS, temperature=0, max_new_tokens=6)
    assert module.generate(PROMPTS, top_p=1e-6, max_new_tokens=6) == greedy


def test_defaults_of_the_model_do_not_interfere(module, monkeypatch):
    expected = module.generate(PROMPTS, temperature=0, max_new_tokens=6)
    drawn = module.generate(PROMPTS, max_new_tokens=6)
    other = GenerationConfig(
        **{
            "do_sample": True,
            "temperature": 9.0,
            "top_k": 1,
            "repetition_penalty": 5.0,
            "eos_token_id": [1, 2],
        },
        **{"forced_eos_token_id": 9, "no_repeat_ngram_size": 1},
    )
    monkeypatch.setattr(module.causal_lm, "generation_config", other)
    assert module.generate(PROMPTS, temperature=0, max_new_tokens=6) == expected
    assert module.generate(PROMPTS, max_new_tokens=6) == drawn


def test_a_completion_ends_before_the_first_end_token(module, monkeypatch):
    """Also where the model names further end tokens, which the tokenizer does not know as special."""
    ids = torch.tensor([module.tokenizer(PROMPTS[0])["input_ids"]])
    greedy = GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=0)
    module.network.eval()
    tokens = module.causal_lm.generate(input_ids=ids, generation_config=greedy)[0, ids.shape[1] :].tolist()
    module.network.train()
    end = next(index for index, token in enumerate(tokens) if index > 0 and token not in tokens[:index])
    monkeypatch.setattr(module.causal_lm.generation_config, "eos_token_id", [tokens[end]])
    found = module.generate(PROMPTS[:2], temperature=0, max_new_tokens=6)
    assert found[0] == [module.tokenizer.decode(tokens[:end]).strip()]


def test_what_does_not_fit_is_refused(module):
    with pytest.raises(
        ValueError, match=r"prompt 1 has \d+ tokens; with max_new_tokens=60 .* the model's 64"
    ):
        module.generate(["c", "the cat sat on the mat, and then some other animal came"], max_new_tokens=60)
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        module.generate(["c", ""], max_new_tokens=5)
    for wrong in ({"temperature": -1}, {"top_p": 0}, {"n": 0}, {"max_new_tokens": 0}):
        with pytest.raises(ValueError, match="must be in"):
            module.generate(["c"], **wrong)
    assert module.generate([]) == []


def test_prediction_can_go_on_from_a_batch(module, make_trainer, loader):
    batches = [
        {"prompt": PROMPTS[:2], "index": torch.arange(2)},
        {"prompt": PROMPTS[2:], "index": torch.arange(2, 4)},
    ]
    first, second = make_trainer().predict(module, loader(batches))
    assert [len(texts) for texts in first + second] == [2, 2, 2, 2]
    with torch.no_grad():
        assert module.predict_step(batches[1], 0) == second  # counted anew after an interruption


def test_a_completion_ends_with_the_turn_of_a_chat(module, monkeypatch):
    """Whose token is no end token of the model or of the tokenizer."""
    [[plain]] = module.generate(PROMPTS[:1], temperature=0, max_new_tokens=6, strip=False)
    found = []
    for token in range(len(module.tokenizer)):
        monkeypatch.setattr(generation, "turn_tokens", lambda tokenizer, token=token: {token})
        found += module.generate(PROMPTS[:1], temperature=0, max_new_tokens=6, strip=False)[0]
        if len(found[-1]) < len(plain):
            break
    assert plain.startswith(found[-1])
    assert plain != found[-1]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_adapter_of_zeros_is_not_computed(llama, dtype, monkeypatch):
    module = ready(SFTModule(llama, dtype=dtype))
    layers = [part for part in module.network.modules() if isinstance(part, FusedLora)]
    calls = []
    for layer in layers:
        layer.lora_A["default"].register_forward_hook(lambda *_: calls.append(1))
    fresh = module.generate(PROMPTS, temperature=0.7, max_new_tokens=6, seed=2)
    assert not calls
    monkeypatch.setattr(adapters, "_zero_layers", lambda network: [])
    assert module.generate(PROMPTS, temperature=0.7, max_new_tokens=6, seed=2) == fresh
    assert calls


def test_an_adapter_that_is_zero_in_one_layer_is_computed_in_the_others(llama):
    module = ready(SFTModule(llama))
    layers = [part for part in module.network.modules() if isinstance(part, FusedLora)]
    with torch.no_grad():
        layers[1].lora_B["default"].weight += 0.1
    assert adapters._zero_layers(module.network) == [layers[0], *layers[2:]]
    calls = []
    for layer in layers:
        layer.lora_A["default"].register_forward_hook(lambda part, *_: calls.append(part))
    module.generate(PROMPTS, temperature=0, max_new_tokens=3)
    assert set(calls) == {layers[1].lora_A["default"]}
    assert not any(layer.disable_adapters for layer in layers)


@pytest.mark.parametrize("number", [1, 3])
def test_the_head_reads_no_view_with_gaps(module, monkeypatch, number):
    """torch would copy the frozen weights of the head once for each text."""
    strides = []
    head = module.causal_lm.get_output_embeddings()
    forward = head.forward
    monkeypatch.setattr(head, "forward", lambda states: strides.append(states.stride()) or forward(states))
    module.generate(PROMPTS[:number], temperature=0, max_new_tokens=2)
    width = module.causal_lm.config.hidden_size
    assert strides == [(width, width, 1)] * 2
    assert not head._forward_pre_hooks


def test_a_completion_ends_in_front_of_the_first_stop(module):
    plain = [own[0] for own in module.generate(PROMPTS[:3], temperature=0, max_new_tokens=12, strip=False)]
    stop = plain[0][5:8]
    stopped = module.generate(PROMPTS[:3], temperature=0, max_new_tokens=12, stop=[stop], strip=False)
    found = [own[0] for own in stopped]
    assert found == [text.split(stop)[0] for text in plain]
    assert found[0] == plain[0][: plain[0].index(stop)] != plain[0]


def test_nothing_is_written_behind_the_last_stop(module, monkeypatch):
    [[text]] = module.generate(PROMPTS[:1], temperature=0, max_new_tokens=30, strip=False)
    steps = []
    forward = module.causal_lm.forward
    monkeypatch.setattr(module.causal_lm, "forward", lambda *a, **k: steps.append(1) or forward(*a, **k))
    module.generate(PROMPTS[:1], temperature=0, max_new_tokens=30, stop=[text[3]])
    assert len(steps) < 15


def test_samples_stop_too_and_draw_the_same(module):
    drawn = module.generate(PROMPTS[:3], n=3, max_new_tokens=10, seed=4, strip=False)
    stop = drawn[1][2][4:6]
    found = module.generate(PROMPTS[:3], n=3, max_new_tokens=10, seed=4, strip=False, stop=[stop])
    assert found == [[text.split(stop)[0] for text in own] for own in drawn]


def test_a_stop_is_seen_where_it_crosses_tokens(module):
    ids = torch.tensor([module.tokenizer("the cat sat on")["input_ids"]])
    width = len(module.tokenizer("the")["input_ids"])
    assert make_stopping(module.tokenizer, ["t sat o"], width)(ids, None).tolist() == [True]
    # that is the prompt
    assert make_stopping(module.tokenizer, ["the c"], width)(ids, None).tolist() == [False]


def test_stops_that_cannot_be_are_refused(module):
    with pytest.raises(ValueError, match="an empty text would end every completion"):
        module.generate(PROMPTS[:3], max_new_tokens=2, stop=["x", ""])
    with pytest.raises(ValueError, match=r"stop='Question:' is one text.* give \['Question:'\]"):
        module.generate(PROMPTS[:3], stop="Question:")


def test_a_tokenizer_that_drops_the_first_blank(tiny_model):
    """Words of the embedded world are joined by blanks; what follows a prompt begins with one."""
    module = SFTModule(tiny_model)
    [[bare]] = module.generate(["anna paints"], temperature=0, max_new_tokens=4)
    [[whole]] = module.generate(["anna paints"], temperature=0, max_new_tokens=4, strip=False)
    ids = module.tokenizer("anna paints")["input_ids"]
    written = module.tokenizer(bare, add_special_tokens=False)["input_ids"]
    assert "anna paints" + whole == module.tokenizer.decode([*ids, *written], skip_special_tokens=True)


def test_what_fits_is_known_beforehand(module):
    prompts = ["the cat", "the cat sat on the mat, and then some other animal came"]
    lengths = [len(module.tokenizer(prompt)["input_ids"]) for prompt in prompts]
    assert module.fits(prompts, 64 - lengths[1]) == [True, True]
    assert module.fits(prompts, 64 - lengths[1] + 1) == [True, False]
    assert module.fits([], 1) == []
    assert len(module.generate(prompts, max_new_tokens=64 - lengths[1])) == 2
    with pytest.raises(ValueError, match="prompt 1 has"):
        module.generate(prompts, max_new_tokens=64 - lengths[1] + 1)


def test_predictions_end_before_the_stop_of_their_batch(llama):
    """Alpaca's next header comes so in the batches of a PromptDataModule."""
    module = SFTModule(llama, completions=Completions(max_new_tokens=10))
    plain = module.predict_step({"prompt": PROMPTS[:3]}, 0)
    stop = plain[0][0][3:6]
    cut = module.predict_step({"prompt": PROMPTS[:3], "stop": [stop]}, 0)
    assert cut == [[text.split(stop)[0].strip() for text in own] for own in plain]
    assert cut[0] != plain[0]


WORDS = ["</s>", "<unk>", "user", "assistant", "first", "second", "question", "answer", ":"]
TURNS = "{% for m in messages %}<start> {{ m.role }} {{ m.content }} <turn> {% endfor %}"


def tokenizer(template):
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>")
    found.add_tokens([AddedToken("<turn>", special=True), AddedToken("<start>"), AddedToken("<tool>")])
    found.chat_template = template
    return found


def model(ends):
    return SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=ends))


@pytest.mark.parametrize(
    ("template", "ends", "expected"),
    [
        (None, None, [0]),
        (None, 7, [0, 7]),
        (None, [7, 0, 8], [0, 7, 8]),
        (TURNS, 0, [0, 9, 10]),  # <turn>, <start>
        (TURNS.replace("<start> ", ""), None, [0, 9]),
        ("{% for m in messages %}{{ m.role }} : {{ m.content }} </s> {% endfor %}", None, [0]),
        ("{{ messages[-1].content }}", None, [0]),  # earlier turns are left out
    ],
)
def test_ends_of_the_model_of_the_tokenizer_and_of_a_turn(template, ends, expected):
    assert end_tokens(model(ends), tokenizer(template)) == expected


def test_a_line_break_that_is_an_added_token_ends_no_answer():
    """As Gemma's: its turns end with <end_of_turn> and a line break."""
    found = tokenizer(TURNS.replace("<turn> ", "<turn>\n"))
    found.add_tokens([AddedToken("\n", normalized=False)])
    assert 12 in found("answer\n")["input_ids"]
    assert end_tokens(model(None), found) == [0, 9, 10]
