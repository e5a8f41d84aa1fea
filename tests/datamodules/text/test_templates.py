import pytest
from refusals import refusal

from fedlight.datamodules.text.templates import TEXTS, Template, check_choice

# Figure 4 of the FedBiscuit paper, typed from its page line by line.
FIGURE_4 = {
    "tldr_generation": """Below is an instruction that describes a task, paired with an input that provides further
context. Write a response that appropriately completes the request.
### Instruction:
Summarize the following Reddit post in a paragraph of 50 words or less.
### Input:
SUBREDDIT: r/{subreddit}
TITLE: {title}
POST: {post}
### Response:""",
    "tldr_choice": """Below is a forum post followed by two summaries. Pick a more precise and concise one that
summarizes the most important points in the given forum post, without including unimportant or irrelevant details.
State your choice with a single capital letter, i.e., "A" if SUMMARY A is better, "B" if SUMMARY B is better.
### SUBREDDIT: r/{subreddit}
### TITLE: {title}
### POST: {post}
### SUMMARY A: {output_A}
### SUMMARY B: {output_B}
### YOUR CHOICE:""",
    "alpaca": """Below is an instruction that describes a task, paired with an input that provides further context.
Write a response that appropriately completes the request.
### Instruction:
{instruction}
### Input:
{input}
### Response:""",
    "alpaca_no_input": """Below is an instruction that describes a task. Write a response that appropriately
completes the request.
### Instruction:
{instruction}
### Response:""",
    "shp_choice": """Below is a query followed by two responses. Pick a helpful response that is precise, concise, and
casual. State your choice with a single capital letter, i.e., "A" if RESPONSE A is better, "B" if RESPONSE B is better.
### QUERY: {instruction}
### RESPONSE A: {output_A}
### RESPONSE B: {output_B}
### YOUR CHOICE:""",
}


@pytest.mark.parametrize("name", FIGURE_4)
def test_the_paper_s_templates_word_for_word(name):
    printed = FIGURE_4[name].replace("output_A", "response_a").replace("output_B", "response_b")
    assert TEXTS[name].split() == printed.split()
    # Every heading of the figure opens a line of its own.
    headings = [line for line in printed.splitlines() if line.startswith("###")]
    assert [line for line in TEXTS[name].splitlines() if line.startswith("###")] == headings


def test_the_slot_that_may_lose_text():
    assert {name: Template.named(name, asks="choice").trim for name in FIGURE_4} == {
        **{"tldr_generation": "post", "tldr_choice": "post", "alpaca": "input"},
        **{"alpaca_no_input": "instruction", "shp_choice": "instruction"},
    }
    assert Template.named("tldr_choice", asks="choice").trimming("title").trim == "title"
    assert Template.named("tldr_choice", asks="choice").trimming(None).required == ()
    with refusal(r"trim='text' is no slot of the template; it has subreddit, title, post"):
        Template.named("tldr_choice", asks="choice").trimming("text")


def test_alpaca_joined_appends_the_input_to_the_instruction():
    """OpenFedLLM's format, which FedDCA trains with: one form for all rows, the instruction's."""
    template = Template.named("alpaca_joined")
    begin, _, _ = Template.named("alpaca_no_input").text.partition("{instruction}")
    joined = template.render({"instruction": "Add the numbers.", "input": "1 and 2"}, ending=" 3")
    assert joined.text == f"{begin}Add the numbers. 1 and 2\n\n### Response: 3"
    assert (joined.trimmable, joined.after) == ("1 and 2", "\n\n### Response: 3")
    for empty in ("", "  "):  # no blank behind the instruction
        alone = template.render({"instruction": "Say hello.", "input": empty}, ending=" 3")
        assert alone.text == f"{begin}Say hello.\n\n### Response: 3"
        assert alone == Template.named("alpaca").render({"instruction": "Say hello.", "input": empty}, " 3")
    assert template.slots == ("instruction", "input")
    assert template.required == Template.named("alpaca").required == ("instruction",)


def test_braces_in_the_data_are_text():
    parts = Template.named("POST: {post} {{fixed}}").render({"post": "{response_a} {"})
    assert parts.text == "POST: {response_a} { {fixed}"


def test_a_text_of_your_own_and_unknown_names():
    assert Template.named("{a} or {b}?").render({"a": "1", "b": "2"}).text == "1 or 2?"
    with refusal(r"has \{\}, a slot without a name: name it, as in \{prompt\}"):
        Template.named("Q: {}")
    with refusal(r"template='tdlr_choice' is not one of alpaca"):
        Template.named("tdlr_choice")
    for name in ("Q: {prompt} {response_a}", "tldr_choice", "chat:{response_b}"):
        with refusal(r"has the slot \{response_[ab]\}, which choice_template alone fills: leave it out"):
            Template.named(name)


def test_a_choice_template_shows_both_answers_and_ends_with_a_colon():
    with refusal(r"has no slot {response_b}"):
        check_choice(Template("{prompt} {response_a}:"))
    with refusal(r"End it with a colon"):
        check_choice(Template("{response_a} {response_b} better?"))


BELOW = "\nBelow is an instruction that describes "
HEADERS = ("\n### Instruction:", "\n### Input:", "\n### Response:")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{prompt}", ()),
        ("", ()),
        ("Tell of {prompt} now", ()),  # no header: a sentence around the slot
        ("Claim: {prompt}", ("\nClaim:",)),
        ("Question: {prompt}\nAnswer:", ("\nQuestion:",)),  # a solution may have a line "Answer: 4"
        ("# Task\n{prompt}\n# Answer", ("\n# Task", "\n# Answer")),
        ("# {instruction}\n\n{input}\n##", ()),  # or a solution would end before "#### 42"
        ("Read this with great care.\n{prompt}", ("\nRead this with great care.",)),
        ("toy_generation", ("\nPOST :",)),
        ("alpaca", (BELOW, *HEADERS)),  # as of its form without input
        ("tldr_generation", (BELOW, "\nSUBREDDIT: r/", "\nTITLE:", "\nPOST:", *HEADERS)),
    ],
)
def test_an_answer_ends_before_the_next_header(text, expected):
    template = Template.named(text) if text and "{" not in text else Template(text)
    assert template.stops == expected
