import json

import pytest
import torch
from refusals import refusal
from tiny_world import make_model

from fedlight import Lora, Sampling, SFTModule
from fedlight.generators import LocalGenerator, TextGenerator

PROMPTS = ["anna paints walls .", "ben bakes bread . finn reads", "gina", "anna paints walls ."]
GREEDY, DRAWN = Sampling(0.0, max_new_tokens=6), Sampling(1.0, max_new_tokens=6)


def generator(model, **options):
    settings = {"device": "cpu", "sampling": Sampling(max_new_tokens=6), "keep_cut": True}
    return LocalGenerator(model, **settings | options)


def test_greedy_answers_are_those_of_the_model_in_the_order_of_the_prompts(tiny_model):
    module = SFTModule(tiny_model)
    expected = [module.generate([one], temperature=0, max_new_tokens=6)[0][0] for one in PROMPTS]
    assert len(set(expected)) == 3
    for batch_size in (1, 3, 16):
        assert generator(tiny_model, sampling=GREEDY, batch_size=batch_size).complete(PROMPTS) == expected


def test_draws_are_a_function_of_the_seed_and_the_prompts_and_leave_the_global_stream_alone(tiny_model):
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    drawn = generator(tiny_model, sampling=DRAWN).complete(PROMPTS)
    assert torch.equal(before, torch.random.get_rng_state())
    assert generator(tiny_model, sampling=DRAWN).complete(PROMPTS) == drawn
    assert generator(tiny_model, sampling=DRAWN, seed=1).complete(PROMPTS) != drawn
    assert generator(tiny_model, sampling=DRAWN).complete(PROMPTS, draw=1) != drawn
    assert drawn[0] != drawn[3]  # the same prompt twice is drawn twice


@pytest.mark.gpu
@pytest.mark.parametrize("base", ["plain", "int8", "nf4"])
def test_on_a_gpu_in_every_form_of_the_base(tiny_model, base):
    drawing = generator(tiny_model, base=base, sampling=GREEDY, device="auto")
    first = drawing.complete(PROMPTS)
    assert all(weight.device.type == "cuda" for weight in drawing._module.parameters())
    assert drawing.complete(PROMPTS) == first
    assert first[0] == first[3] != first[1]


@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_a_quantized_base_answers_too(tiny_model, base):
    assert all(generator(tiny_model, base=base, sampling=GREEDY).complete(PROMPTS))


def test_an_answer_of_all_tokens_counts_as_cut_and_one_that_comes_to_a_stop_does_not(tiny_model):
    drawing = generator(tiny_model, sampling=GREEDY, keep_cut=False)
    assert drawing.complete(PROMPTS) == [""] * 4  # an untrained model does not end
    assert drawing.usage() == {"answers": 4, "cut": 4, "too_long": 0}
    (whole,) = generator(tiny_model, sampling=GREEDY).complete(PROMPTS[:1])
    words = whole.split()
    assert words[2] not in " ".join(words[:2])
    stopping = generator(tiny_model, sampling=GREEDY, keep_cut=False, stop=[words[2]])
    assert stopping.complete(PROMPTS[:1]) == [" ".join(words[:2])]
    assert stopping.usage() == {"answers": 1, "cut": 0, "too_long": 0}


def test_a_prompt_that_does_not_fit_has_no_answer(tiny_model):  # of 256 tokens
    drawing = generator(tiny_model, sampling=GREEDY)
    long = "anna " * 251
    assert [bool(text) for text in drawing.complete([long, PROMPTS[0]])] == [False, True]
    assert drawing.usage() == {"answers": 1, "cut": 1, "too_long": 1}


def test_templates(tiny_model, tmp_path):
    def shown(**options):
        drawing, seen = generator(tiny_model, **options), []
        module = drawing._loaded()
        module.generate = lambda texts, **_: seen.extend(texts) or [[""]] * len(texts)
        drawing.complete(["ben {0}"])
        return seen[0]

    assert shown() == "ben {0}"
    assert shown(template="POST : {post} CHOICE :") == "POST : ben {0} CHOICE :"
    assert shown(template="alpaca_no_input").endswith("### Instruction:\nben {0}\n\n### Response:")
    with refusal(r"^tokenizer .* has no chat template.*set the template to alpaca"):
        shown(template="chat")
    tiny_model = make_model(tmp_path / "chatty")
    file = tmp_path / "chatty/tokenizer_config.json"
    template = "{{ bos_token }}{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}<a>"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    assert shown(template="chat") == "<s><user> ben {0} <a>"  # the tokenizer itself adds none


def test_an_adapter_answers_otherwise(tiny_model, tmp_path):
    module = SFTModule(tiny_model, lora=Lora(dropout=0.0))
    module.configure_model()
    for name, weight in module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(0))
    module.save_adapter(tmp_path / "adapter")
    tuned = generator(tiny_model, adapter=str(tmp_path / "adapter"), sampling=GREEDY)
    expected = module.generate(PROMPTS, temperature=0, max_new_tokens=6)
    assert tuned.complete(PROMPTS) == [text for (text,) in expected]
    assert tuned.complete(PROMPTS) != generator(tiny_model, sampling=GREEDY).complete(PROMPTS)


def test_the_model_is_loaded_when_it_is_needed_and_given_back(tiny_model):
    drawing = generator(tiny_model, sampling=GREEDY)
    assert drawing._module.network is None
    first = drawing.complete(PROMPTS)
    drawing.release()
    assert drawing._module.network is None
    assert drawing.complete(PROMPTS) == first


def test_settings_know_the_content_of_folders_and_not_their_place(tiny_model, tmp_path):
    one, other = (make_model(tmp_path / name) for name in ("one", "other"))
    different = make_model(tmp_path / "different", seed=1)
    settings = [LocalGenerator(model).settings() for model in (one, other, different)]
    assert settings[0] == settings[1] != settings[2]
    json.dumps(settings[0])
    assert LocalGenerator("toy").settings()["model"] == "toy"
    assert LocalGenerator("toy", device="cpu").settings() == LocalGenerator("toy").settings()
    assert isinstance(LocalGenerator("toy"), TextGenerator)
    assert LocalGenerator("toy").sends_to is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"base": "fp4"}, "base='fp4'"),
        ({"template": "alpaca"}, "has the slots instruction, input, but a prompt fills one"),
        ({"template": "alpacca"}, "'alpacca' is not one of"),
        ({"stop": [""]}, "stop=.* empty"),
    ],
)
def test_bad_settings_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        LocalGenerator("toy", **options)


def test_an_adapter_that_is_not_there_is_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no adapter_config"):
        LocalGenerator("toy", adapter=str(tmp_path))


def test_the_headers_of_the_template_end_an_answer(tiny_model):
    given = ["x"]
    headed = generator(tiny_model, template="Question: {prompt}\nAnswer:", stop=given)
    assert headed.stop == ["x", "\nQuestion:"]
    assert given == ["x"]
    assert generator(tiny_model, stop=given).stop == ["x"]
