import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from refusals import refusal
from tiny_world import read_lines, write_rows

from fedlight import toy
from fedlight.cli.init import write
from fedlight.cli.main import main
from fedlight.devices.measure import number_type
from fedlight.first_config.columns import GuessError, describe
from fedlight.first_config.draft import METHODS, Wishes, make_draft
from fedlight.first_config.settings import find_choices
from fedlight.pretrained.hub import load_tokenizer

RENAMED = {"prompt": "ask", "response_a": "one", "response_b": "two", "choice": "pick", "client": "who"}


@pytest.fixture(scope="module")
def of_the_world():
    """The embedded world's votes and instructions under other names."""
    votes = [{RENAMED[name]: row[name] for name in RENAMED} for row in toy.rows("votes")[:600]]
    rows = toy.rows("instructions", split="private", client_rows=20)
    asked = [(f"{row['instruction']} {row['input']}", row["output"], row["client"]) for row in rows]
    return votes, [dict(zip(("ask", "reply", "clinic"), row, strict=True)) for row in asked]


@pytest.fixture
def votes(tmp_path, monkeypatch, of_the_world):
    """A file of the working folder."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "votes.jsonl", of_the_world[0])
    return "votes.jsonl"


@pytest.fixture
def instructions(tmp_path, monkeypatch, of_the_world):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "asked.jsonl", of_the_world[1])
    return "asked.jsonl"


def asked(number, **more):
    """So many rows of a question and a reply, and columns of numbers of the row."""
    return [
        {"ask": f"which {n}", "reply": f"that {n}", **{name: value(n) for name, value in more.items()}}
        for n in range(number)
    ]


def init(source, *options):
    return main(["init", source, "--model", "toy", *options])


@pytest.mark.parametrize("method", METHODS)
def test_the_config_of_each_method_passes_the_checks_before_a_run(method, votes, instructions, capsys):
    """And has no part of the embedded world but the model."""
    source = instructions if method in ("feddca", "fewfedpit", "sft") else votes
    with pytest.raises(SystemExit) as end:
        init(source, "--method", method, "--output", "own.yaml", "--dry-run")
    shown = capsys.readouterr().out
    assert end.value.code == 0, shown
    assert "nothing is wrong: the run can start" in shown
    text = Path("own.yaml").read_text()
    assert text.count("toy") == 1
    assert len(text.splitlines()) < 110
    config = yaml.safe_load(text)
    assert config["model"]["init_args"]["model"] == "toy"
    assert not any("Task" in entry["class_path"] for entry in config["trainer"]["callbacks"])


def test_clients_draw_the_rows_that_they_write_and_show_examples_in_their_own_template(instructions):
    config = yaml.safe_load(write(make_draft(Wishes(instructions, "fewfedpit", "toy")), "own.yaml"))
    synthesis = config["data"]["init_args"]["synthesis"]["init_args"]
    assert synthesis["temperature"] == 0.7
    assert "prompts" not in synthesis


def test_where_most_rows_are_too_long_half_of_those_that_fit_are_the_clients(instructions, tmp_path, capsys):
    rows = read_lines(tmp_path / instructions)
    for place, row in enumerate(rows):
        row["reply"] += f" {row['reply']}" * 300 * (place % 4 > 0)
    write_rows(tmp_path / instructions, rows)
    with pytest.raises(SystemExit) as end:
        init(instructions, "--method", "feddca", "--output", "own.yaml", "--dry-run")
    assert end.value.code == 0, capsys.readouterr().out
    private = yaml.safe_load((tmp_path / "own.yaml").read_text())["data"]["init_args"]["private_rows"]
    assert private == pytest.approx(len(rows) / 8, rel=0.1)


@pytest.mark.slow  # whole runs
def test_votes_train_and_make_a_report(votes, capsys, tmp_path):
    init(votes, "--output", "own.yaml")
    main(["fit", "--config", "own.yaml", "--trainer.max_epochs", "2", "--trainer.accelerator", "cpu"])
    main(["report", "runs/own"])
    assert (tmp_path / "runs/own/adapter").is_dir()
    assert (tmp_path / "runs/own/report.html").stat().st_size > 10_000


def test_table_and_header_say_what_is_not_sure_and_no_file_is_replaced_untold(votes, capsys, tmp_path):
    init(votes, "--output", "own.yaml")
    shown = capsys.readouterr().out
    assert all(name in shown for name in RENAMED.values())
    text = (tmp_path / "own.yaml").read_text()
    unsure = text.partition("without being sure")[2].partition("seed_everything")[0]
    assert "#   method: fedbis (the rows are votes on two answers;" in unsure
    assert "client" not in unsure
    with pytest.raises(SystemExit, match="2"):
        init(votes, "--output", "own.yaml")
    assert "own.yaml exists already: give another --output FILE, or --force" in capsys.readouterr().err
    init(votes, "--output", "own.yaml", "--force")


def test_choice_words_are_single_tokens_of_the_model():
    guess = find_choices(load_tokenizer("toy"), True, None, None)
    assert len(guess.value) == 2
    with refusal(r"none of extraordinarily and unbelievably are single tokens.*--choices WORD WORD"):
        find_choices(load_tokenizer("toy"), True, ("extraordinarily", "unbelievably"), None)


def test_votes_are_refused_for_a_method_on_instructions(votes, capsys):
    with pytest.raises(SystemExit, match="2"):
        init(votes, "--method", "feddca")
    said = capsys.readouterr().err
    assert re.search(r"--method feddca trains on instructions.*--question COLUMN --response COLUMN", said)


def test_instructions_are_refused_for_a_method_on_votes(instructions):
    with pytest.raises(GuessError, match=r"two answers.*--answers COLUMN COLUMN"):
        make_draft(Wishes(instructions, "fedbis", "toy"))


def test_csv_and_parquet_are_read_as_json_is(votes, tmp_path):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(read_lines(tmp_path / votes))
    pyarrow.parquet.write_table(table, tmp_path / "votes.parquet")
    drafts = [make_draft(Wishes(source, model="toy")) for source in (votes, "votes.parquet")]
    assert drafts[0].columns == drafts[1].columns
    assert drafts[0].sizes == drafts[1].sizes


def test_a_model_that_is_not_there_names_the_option(votes):
    with pytest.raises(OSError, match=r"no/such/model.*--model FOLDER_OR_HUB_NAME, .*`fedlight models`"):
        make_draft(Wishes(votes, model="./no/such/model"))


def talk(number, reply, role="role", content="content", speakers=("user", "assistant")):
    return [{role: speakers[0], content: f"ask number {number}"}, {role: speakers[1], content: reply}]


@pytest.mark.parametrize("form", [{}, {"role": "from", "content": "value", "speakers": ("human", "gpt")}])
def test_the_last_turn_of_a_conversation_is_the_response(made, form):
    draft = made([{"talk": talk(n, f"say {n}", **form), "site": "ab"[n % 2]} for n in range(8)])
    assert draft.columns == {"instruction": "talk.:-1", "response": "talk.-1", "client": "site"}


def test_conversations_that_end_with_the_user_are_named_and_left_out(made):
    rows = [{"talk": talk(n, f"say {n}"), "site": "ab"[n % 2]} for n in range(8)]
    rows[2]["talk"] += talk(2, "")[:1]
    rows[5]["talk"] += talk(5, "")[:1]
    draft = made(rows)
    assert draft.columns == {"instruction": "talk.:-1", "response": "talk.-1", "client": "site"}
    (line,) = [guess for guess in draft.guesses if guess.what == "left out"]
    assert (line.value, line.reason) == ("2 rows", "talk does not end with a reply in row 3, 6")
    (clients,) = [guess.reason for guess in draft.guesses if guess.what == "clients"]
    assert clients.startswith("3 to 3 rows each")


@pytest.mark.parametrize("last", ["user", "stranger"])
def test_conversations_of_which_none_is_known_to_end_with_a_reply_stay_whole(made, last):
    with pytest.raises(GuessError, match="response"):
        made([{"talk": talk(n, f"say {n}", speakers=("user", last))} for n in range(8)])


@pytest.mark.parametrize("has_prompt", [False, True])
def test_conversations_that_begin_alike_are_chosen_and_rejected(made, has_prompt):
    rows = [{"chosen": talk(n, f"say {n}"), "rejected": talk(n, f"not {n}")} for n in range(8)]
    if has_prompt:
        parts = [(row["chosen"][:1], row["chosen"][1:], row["rejected"][1:]) for row in rows]
        rows = [dict(zip(("prompt", "chosen", "rejected"), part, strict=True)) for part in parts]
    question = "prompt" if has_prompt else "chosen.:-1"
    assert made(rows).columns == {"prompt": question, "chosen": "chosen.-1", "rejected": "rejected.-1"}


PAIR = {
    name: f"{text} {{}}".format
    for name, text in {"ask": "which is it", "answer_a": "the one here", "answer_b": "the other"}.items()
}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"first_is_better": lambda n: n % 2 == 0}, "first_is_better: which of its values says that A won"),
        ({"score": lambda n: n / 7}, "no column says which answer won"),
    ],
)
def test_two_answers_without_a_choice_are_asked_for_the_choice(made, more, message):
    with pytest.raises(GuessError, match=message):
        made([{name: value(n) for name, value in {**PAIR, **more}.items()} for n in range(40)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--chosen", "one"], "--chosen and --rejected belong together"),
        (["--response", "one", "--method", "fedbis"], "--response is the answer to an instruction"),
        (["--choice", "who"], "column who: which of its values says that A won"),
        (["--choice", "pikc"], "--choice pikc: there is no such column; did you mean 'pick'"),
        (["--answers", "one", "twoo"], "--answers twoo: there is no such column; did you mean 'two'"),
        (["--question", "none"], "--question none: there is no such column"),
        (["--a", "x"], "--a, --b and --tie belong together"),
        (["--statements", "votes.jsonl"], "votes.jsonl: no column has the votes agree, disagree, pass"),
        (["--public", "nope.jsonl"], "nope.jsonl: no such file"),
        (["--a", "x", "--b", "y"], "column pick: which of its values says that A won? They are"),
        (["--public", "votes.jsonl"], "--public is of no use to --method fedbis"),
        (["--method", "sft", "--choices", "A", "B"], "--choices is of no use to --method sft"),
        (["--input", "who"], "--input is of no use to --method fedbis"),
        (["--statements", "votes.jsonl", "--question", "who"], "--question is of no use to --statements"),
        (["--statements", "votes.jsonl", "--method", "dpo"], "--method dpo cannot use --statements"),
    ],
)
def test_options_that_do_not_fit_are_named(votes, capsys, options, message):
    with pytest.raises(SystemExit):
        init(votes, *options)
    assert message in capsys.readouterr().err


def test_rows_for_tests_in_the_same_file_are_pointed_out(made):
    rows = asked(24, part=lambda n: ["train", "test"][n % 4 == 0], site=lambda n: "abc"[n % 3])
    guess = next(guess for guess in made(rows, columns={"client": "site"}).guesses if "test" in guess.what)
    assert (guess.what, guess.sure) == ("rows of test, train", False)


def test_texts_that_no_position_is_left_for_are_refused(made):
    rows = [{"ask": f"which {n} " * 4000, "reply": f"that {n}"} for n in range(8)]
    with pytest.raises(GuessError, match="no text fits into"):
        made(rows)


def test_one_row_is_nothing_to_guess_from(made):
    with pytest.raises(GuessError, match="has one row, with data, version"):
        made([{"data": [{"ask": "x y"}], "version": 1}])


def test_few_rows_are_dealt_out_to_few_clients(made):
    draft = made(asked(9))
    assert draft.sizes.clients == 2
    assert "num_clients: 2" in write(draft, "own.yaml")


@pytest.mark.parametrize(("clients", "rows"), [(500, 100_000), (2, 100_000), (3, 50_001)])
def test_clients_are_counted_over_all_rows_whatever_their_order(made, clients, rows):
    draft = made(asked(rows, device=lambda n: n % clients))
    assert draft.columns["client"] == "device"
    assert draft.sizes.clients == clients
    (client,) = [guess for guess in draft.guesses if guess.what == "client"]
    assert f"{clients:,} values with {rows // clients:,} rows each" in client.reason


def test_clients_of_unlike_sizes_are_counted_without_rows_that_miss_something(made):
    rows = asked(24, site=lambda n: "ab"[n > 5])
    rows[23]["site"], rows[22]["reply"] = None, ""
    guesses = {guess.what: guess.reason for guess in made(rows).guesses}
    assert "2 values with 6 to 17 rows each" in guesses["client"]
    assert guesses["clients"].startswith("6 to 16 rows each")


def test_tokens_are_counted_of_rows_that_no_period_picks(made):
    rows = asked(1200, reply=lambda n: "that " * (2 + 98 * (n % 2)), site=lambda n: n // 2 % 2)
    assert made(rows).max_tokens > 400  # every other row is short


def test_rows_of_a_saved_data_set_are_described_as_those_of_a_file(tmp_path):
    import datasets

    rows = [{"info": {"ask": f"which {n}"}, "talk": talk(n, f"say {n}"), "site": n % 2} for n in range(8)]
    described = [describe(rows), describe(datasets.Dataset.from_list(rows))]
    assert [column.name for column in described[0]] == ["info.ask", "talk.:-1", "talk.-1", "site"]
    for one, other in zip(*described, strict=True):
        assert (one.name, one.different) == (other.name, other.different)
        assert one.codes.tolist() == other.codes.tolist()


def german(numbers):
    """Rows of 8 words, which the embedded model does not know."""
    pairs = [(f"Was hilft gegen Husten{n}", f"Warmer Tee und Ruhe{n}") for n in numbers]
    return [{"frage": ask, "antwort": reply, "praxis": "ab"[n % 2]} for n, (ask, reply) in enumerate(pairs)]


def test_rows_that_the_model_cannot_read_are_refused_with_the_share_and_the_remedy(made):
    message = r"rows.jsonl: 100% of the text is unknown to the tokenizer .*--model FOLDER_OR_HUB_NAME"
    with pytest.raises(ValueError, match=message):
        made(german(range(9)), "toy")
    assert not any("unknown" in guess.reason for guess in made(german(range(9))).guesses)


def test_rows_of_which_the_model_cannot_read_a_part_are_told(made):
    words = [row["prompt"].split() for row in toy.rows("votes")[:60]]
    texts = [(" ".join(w[:4]), " ".join(w[4:8]), "ab"[len(w) % 2]) for w in words]
    known = [dict(zip(("frage", "antwort", "praxis"), text, strict=True)) for text in texts]
    line = next(guess for guess in made(known + german(range(40)), "toy").guesses if guess.what == "model")
    assert not line.sure
    assert "40% of the text is unknown" in line.reason
    assert "a model cannot tell these words apart: name another model with --model" in line.reason


CHATML = (
    "{% for m in messages %}<pad>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<pad>assistant\n{% endif %}"
)


@pytest.fixture
def instruct_model(byte_model, tmp_path):
    """The model that reads any text, with a chat template."""
    folder = shutil.copytree(byte_model, tmp_path / "instruct")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": CHATML}))
    return str(folder)


SUMS = [{"instruction": f"Add {n} and 1.", "output": f"It is {n + 1}."} for n in range(20)]


def test_an_instruct_model_is_asked_in_its_own_chat_template(made, instruct_model):
    draft = made(SUMS, instruct_model)
    assert draft.template == "chat"
    assert draft.looks == "<pad>user\n{instruction}</s>\n<pad>assistant\n{response}</s>\n"
    data = yaml.safe_load(write(draft, "own.yaml"))["data"]["init_args"]
    assert data["template"] == "chat"
    assert data["columns"] == {"input": "", "instruction": "instruction", "response": "output"}
    # <pad>user Add 19 and 1. assistant It is 20. with line breaks and ends: 48 bytes and tokens, and two more are counted.
    assert draft.max_tokens >= 50
    assert made(SUMS).template == "QUESTION: {instruction}\nANSWER:"
    assert made(SUMS, instruct_model, template="Q: {instruction}\nA:").looks == ""


def test_conversations_keep_their_turns_in_a_chat_template(made, instruct_model):
    rows = [{"messages": [{"role": "system", "content": "Be brief."}, *talk(n, "It is.")]} for n in range(20)]
    draft = made(rows, instruct_model)
    assert draft.columns == {"messages": "messages.:-1", "response": "messages.-1"}
    assert draft.looks == "<pad>system\n{system}</s>\n<pad>user\n{user}</s>\n<pad>assistant\n{response}</s>\n"
    assert made(rows).columns == {"instruction": "messages.:-1", "response": "messages.-1"}


def test_an_instruct_model_s_comparison_is_a_message(votes, instruct_model, capsys):
    main(["init", votes, "--model", instruct_model, "--output", "own.yaml"])
    shown = capsys.readouterr().out
    message = "Which answer is better?\nQUESTION: {prompt}\nANSWER A: {response_a}\nANSWER B: {response_b}"
    assert f"what the model reads:\n\n<pad>user\n{message}</s>\n<pad>assistant\nCHOICE: {{choice}}\n" in shown
    data = yaml.safe_load((Path.cwd() / "own.yaml").read_text())["data"]["init_args"]
    assert data["format"]["choice_template"] == f"chat:{message}\nCHOICE:"


def test_a_config_names_the_number_type_that_this_machine_computes_fastest_in(made, monkeypatch):
    draft = made(SUMS)
    assert yaml.safe_load(write(draft, "own.yaml"))["model"]["init_args"]["dtype"] == "fp32"
    monkeypatch.setattr(number_type, "NARROW", 1)
    monkeypatch.setattr(number_type, "bf16_speed", lambda width: 1.5)
    monkeypatch.setattr(number_type.hardware, "computes_bf16", lambda device: True)
    draft = made(SUMS)
    assert yaml.safe_load(write(draft, "own.yaml"))["model"]["init_args"]["dtype"] == "bf16"
    line = next(guess for guess in draft.guesses if guess.what == "dtype")
    if not number_type.torch.cuda.is_available():
        assert line.reason == "in which training steps are 1.5 times as fast as in fp32 on this processor"


def test_conversations_that_all_end_with_the_user_are_refused_with_the_remedy(made):
    rows = [{"messages": talk(n, "", speakers=("assistant", "user"))} for n in range(20)]
    with pytest.raises(GuessError, match="end conversations with an answer of the assistant"):
        made(rows)


def test_conversations_with_a_turn_without_text_are_no_stack_trace(made, instruct_model):
    rows = [{"messages": [{"role": "assistant", "content": None}, *talk(n, f"say {n}")]} for n in range(8)]
    with pytest.raises(GuessError, match="each conversation has a turn without text"):
        made(rows, model=instruct_model)
