from types import SimpleNamespace

import pytest
from habits import CHATML, HABITS, LLAMA_3, Habit, make_tokenizer
from refusals import refusal
from tiny_world import write_rows
from transformers import AutoTokenizer

from fedlight.datamodules.rows.task_rows import TaskRows
from fedlight.datamodules.text.chat import Chat, write_turns
from fedlight.datamodules.text.encoding import Comparison, choice_ids, encode_choice, encode_responses
from fedlight.datamodules.text.templates import Template, check_choice
from fedlight.evaluation.tasks.multiple_choice import MultipleChoice
from fedlight.modules.language.generation import encode_prompts
from fedlight.modules.language.scoring import encode_pairs
from fedlight.pretrained.named import find_pretrained

ROW = {"instruction": "Are there two", "input": "or one?"}
ANSWER = "Yes, two."


def turn(role, content):
    return {"role": role, "content": content}


TURNS = [turn("user", "One?"), turn("assistant", "No."), turn("user", "Two?")]


def by_transformers(tokenizer, turns, ask=False):
    return tokenizer.apply_chat_template(turns, add_generation_prompt=ask, return_dict=True)["input_ids"]


def encode(tokenizer, fields, answer=ANSWER, columns=(), max_tokens=999, **options):
    template = Template.named("chat", columns).for_tokenizer(tokenizer)
    return encode_responses(tokenizer, template, [fields], [answer], max_tokens, **options)


def spell_taught(tokenizer, encoded):
    return spell(tokenizer, encoded.table[0][encoded.taught[0] == 1])


def spell(tokenizer, ids):
    """Return the tokens as a text, with blanks and line breaks for the marks of tokenizers."""
    tokens = "".join(tokenizer.convert_ids_to_tokens(list(map(int, ids))))
    return tokens.replace("Ġ", " ").replace("▁", " ").replace("Ċ", "\n")


@pytest.mark.parametrize("name", HABITS)
def test_tokens_are_those_of_transformers(name):
    habit, tokenizer = HABITS[name], make_tokenizer(HABITS[name])
    question = turn("user", "Are there two\n\nor one?")
    encoded = encode(tokenizer, ROW)
    assert encoded.table[0].tolist() == by_transformers(tokenizer, [question, turn("assistant", ANSWER)])
    taught = encoded.table[0][encoded.taught[0] == 1].tolist()
    assert spell(tokenizer, taught) == habit.taught
    assert encoded.marks[0] == encoded.taught[0].argmax()

    template = Template.named("chat").for_tokenizer(tokenizer)
    prompt = template.render(ROW).text
    asked = by_transformers(tokenizer, [question], ask=True)
    assert encode_prompts(tokenizer, [prompt]) == [asked]
    assert encoded.table[0].tolist()[: encoded.marks[0]] == asked  # training continues what generation reads
    [scored] = encode_pairs(tokenizer, [(prompt, template.continuation(ANSWER, closed=True))])
    assert scored.ids == encoded.table[0].tolist()[: len(scored.ids)]
    assert scored.ids[scored.start :] == taught


@pytest.mark.parametrize("name", HABITS)
def test_all_answers_of_a_conversation_are_taught(name):
    habit, tokenizer = HABITS[name], make_tokenizer(HABITS[name])
    fields = {"messages": write_turns(TURNS)}
    encoded = encode(tokenizer, fields, columns=["messages"], taught_turns="all")
    assert encoded.table[0].tolist() == by_transformers(tokenizer, [*TURNS, turn("assistant", ANSWER)])
    earlier = habit.taught.replace(ANSWER, "No.").removeprefix("<think>\n\n</think>\n\n")
    assert spell_taught(tokenizer, encoded) == earlier + habit.taught
    last = encode(tokenizer, fields, columns=["messages"], taught_turns="last")
    assert last.table[0].tolist() == encoded.table[0].tolist()
    assert spell_taught(tokenizer, last) == habit.taught


def test_a_template_that_takes_no_system_message_is_named():
    gemma = make_tokenizer(HABITS["no system message, another name"])
    turns = [turn("system", "Be brief."), *TURNS]
    with refusal(r"refuses a conversation of system, user, assistant, user \(System role"):
        encode(gemma, {"messages": write_turns(turns)}, columns=["messages"])


def test_a_long_prompt_loses_the_end_of_its_input_alone():
    tokenizer = make_tokenizer(Habit(LLAMA_3, "", "<s> $A"))
    whole = encode(tokenizer, ROW)
    length = len(whole.table[0])
    cut = encode(tokenizer, ROW, max_tokens=length - 2)
    question = turn("user", "Are there two\n\nor on")
    assert cut.table[0].tolist() == by_transformers(tokenizer, [question, turn("assistant", ANSWER)])
    assert (cut.trimmed, len(cut.table[0])) == (1, length - 2)
    assert not encode(tokenizer, ROW, max_tokens=30).kept.any()


def test_the_choice_follows_the_last_line_as_the_answer():
    tokenizer = make_tokenizer(Habit(CHATML, "", "<s> $A"))
    template = Template.named("chat", asks="choice").for_tokenizer(tokenizer)
    check_choice(template)
    encoded = encode_choice(tokenizer, template, [Comparison({"prompt": "Two?"}, "no", "yes")], 999)
    message = "Which answer is better?\nQUESTION: Two?\nANSWER A: no\nANSWER B: yes"
    asked = by_transformers(tokenizer, [turn("user", message)], ask=True)
    ids = encoded.table[0].tolist()
    assert ids[: len(asked)] == asked
    # This tokenizer makes a separate token of the blank before the letter.
    assert spell(tokenizer, ids[len(asked) :]) == "CHOICE: "
    assert tokenizer.convert_ids_to_tokens(list(choice_ids(tokenizer, template))) == ["A", "B"]
    with refusal("has a slot in its last line"):
        check_choice(Template.named("chat:{response_a} or {response_b}:", asks="choice"))


def test_examples_of_a_task_are_turns():
    tokenizer = make_tokenizer(Habit(CHATML, ""))
    template = Template.named("chat").for_tokenizer(tokenizer)
    shots = [({"instruction": "One?", "input": ""}, "No.")]
    shown = template.show({"instruction": "Two?", "input": ""}, shots)
    assert encode_prompts(tokenizer, [shown]) == [by_transformers(tokenizer, TURNS, ask=True)]


def test_a_text_may_be_the_message():
    tokenizer = make_tokenizer(Habit(CHATML, ""))
    template = Template.named("chat: POST {post}\nSum it up.")
    assert (template.slots, template.trim) == (("post",), "post")
    with refusal("known with the model's tokenizer alone"):
        template.render({"post": "x"})
    rendered = template.for_tokenizer(tokenizer).render({"post": "{x}"})
    assert rendered.text == "<|im_start|>user\nPOST {x}\nSum it up.<|im_end|>\n<|im_start|>assistant\n"
    assert template.for_tokenizer(tokenizer).text.format(post="{x}") == rendered.text


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "token that ends an answer"),
        (CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif"), "followed by its answer"),
        (CHATML.replace("{{ m.content }}", "{{ m.content | upper }}"), "does not show a question"),
        (CHATML + "{% generation %}{% endgeneration %}", "marks 0 parts of one answer"),
    ],
)
def test_templates_that_teach_no_answer_are_refused(template, fault):
    tokenizer = make_tokenizer(Habit(template, ""))
    with refusal(fault):
        encode(tokenizer, ROW)


def test_a_template_that_rewrites_earlier_answers_is_refused():
    template = CHATML.replace("{{ m.content }}", "{{ m.content if loop.last or m.role == 'user' else 'No' }}")
    tokenizer = make_tokenizer(Habit(template, ""))
    fields = {"messages": write_turns(TURNS)}
    with refusal(r"does not show the answer 'No\.' unchanged.*taught_turns to last"):
        encode(tokenizer, fields, columns=["messages"], taught_turns="all")
    assert encode(tokenizer, fields, columns=["messages"], taught_turns="last").taught[0].sum() == 8


def test_no_chat_template_is_refused_with_a_remedy():
    tokenizer = make_tokenizer(Habit(CHATML, ""))
    tokenizer.chat_template = None
    with refusal(r"^tokenizer .* has no chat template.*set the template to alpaca"):
        Template.named("chat").for_tokenizer(tokenizer)
    assert Template.named("alpaca").for_tokenizer(tokenizer) == Template.named("alpaca")


def test_texts_do_not_depend_on_the_day():
    tokenizer = make_tokenizer(Habit("{{ date_string }}" + CHATML, ""))
    assert Chat.of(tokenizer).before == "26 Jul 2024<|im_start|>user\n"


def test_an_answer_that_the_template_changes_is_refused():
    template = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
    tokenizer = make_tokenizer(Habit(template, ""))
    assert encode(tokenizer, ROW, "Yes.").kept.all()
    with refusal(r"does not show the answer 'Hm</think>Yes\.' unchanged"):
        encode(tokenizer, ROW, "Hm</think>Yes.")


def test_a_task_asks_each_model_in_its_own_chat_template(tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", [{"question": "two?", "choices": ["no", "yes"], "answer": 1}])
    task = MultipleChoice(TaskRows(file, template="chat"), subject=False)
    for name in ("adds none, turns open with bos", "adds bos, bos in the template"):
        tokenizer = make_tokenizer(HABITS[name])
        _, [example], [prompt] = task.read(SimpleNamespace(tokenizer=tokenizer))
        assert prompt == Template.named("chat").for_tokenizer(tokenizer).render(example.fields).text
        assert task.read()[2] == [prompt]


def test_smollm2_reads_the_tokens_of_transformers_and_learns_its_answers():
    try:
        tokenizer = AutoTokenizer.from_pretrained(find_pretrained("smollm2-135m-instruct", "model"))
    except OSError as error:
        pytest.skip(str(error))
    said = ("user", "2+2?"), ("assistant", "4"), ("user", "Now 3+3?"), ("assistant", "It is 6.")
    whole = [turn(role, content) for role, content in said]
    fields = {"messages": write_turns(whole[:-1])}
    encoded = encode(tokenizer, fields, "It is 6.", columns=["messages"], taught_turns="all")
    assert encoded.table[0].tolist() == by_transformers(tokenizer, whole)
    taught = encoded.table[0][encoded.taught[0] == 1].tolist()
    assert tokenizer.decode(taught) == "4<|im_end|>It is 6.<|im_end|>"
