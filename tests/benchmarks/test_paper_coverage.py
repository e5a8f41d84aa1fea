"""The page on the coverage of the papers is complete, and every place that it names exists."""

import os
import re
from pathlib import Path

import pytest
import yaml
from published import papers
from published.measurements import ROOT

from fedlight.conf import path as config_file

RECORD = papers.load()
KINDS = ("system", "table", "figure", "algorithm")

# Read from the papers: the methods, baselines, attacks and judges that their texts and tables name.
SYSTEMS = {
    "fedbiscuit": """
        Raw model; FedAvg; FedDPO; FedBis; FedBiscuit (U = 3); FedBiscuit (U = 5); Reward model; Selector of
        Qwen-2-0.5B; Selector of Gemma-2B; Selector of LLaMA-2-7B; Auto-J; AlpacaEval 2.0
    """,
    "feddca": """
        Zero-shot; FedAvg; FedProx; SCAFFOLD; FedAvgM; Random sampling; Direct retrieval; LESS;
        Self-Instruct; FedDCA; FedDCA*; FedDCA+FedProx; FedDCA+SCAFFOLD; FedDCA+FedAvgM; FedDCA without
        alpha; Memory extraction; Homomorphic encryption
    """,
    "fewfedpit": """
        Pre-train; Centralized; FedAvg; FedProx; SCAFFOLD; FedOPT; FewFedWeight; FewFedPIT; FedMIT; LocIT;
        LocIT+SG; +OOD; +SIMD; +IDEAL; IFS; PPL; IFD; Rand; Global scorer; Discoverable memorization; GPT-4
        as a judge; TinyLlama-1.1B
    """,
}
# Each word names at least one setting of the paper (appendices B.1, A.5 and A.6, A, and the experiments).
SETTING_WORDS = {
    "fedbiscuit": """
        LoRA rank; LoRA alpha; LoRA dropout; temperature; new tokens; clients, summaries; clients, answers;
        preference pairs, summaries; preference pairs, answers;
        clients a round; K; batch of a selector; rounds R; optimizer of a selector; betas; learning rate of
        a selector; selectors U; warm-up; tau, summaries; tau, answers; eq. 8; eq. 6; global learning rate;
        validation; longest input; Dirichlet; completions; prompts of the server; epochs of DPO; checkpoint;
        batch of DPO; optimizer of DPO; learning rate of DPO; beta of DPO; data before DPO; test posts; test
        instructions
    """,
    "feddca": """
        clients N; rounds R; clients a round; local steps; optimizer; batch; learning rate; schedule; base
        model; longest input; template; LoRA rank; LoRA alpha; LoRA layers; clusters xi; figure 10; bound
        alpha; N_p; own rows; encoder; small encoder; tau; projector; Dirichlet; rounds of the attack;
        repetitions; Self-Instruct; FedProx; FedAvgM; LESS; figure 12
    """,
    "fewfedpit": """
        base model; base weights; numbers; LoRA rank; learning rate; schedule; optimizer; batch; template;
        local epochs; centralized; clients a round; clients, Alpaca; clients, MedInstruct; rounds, Alpaca;
        rounds, MedInstruct; clusters; rows of a cluster; encoder; Dirichlet; test rows, Alpaca; test rows,
        MedInstruct; test rows, MedAlpaca; candidates of; kept; score; instruction; response; tries;
        ROUGE-L; decoding; beta; scorer; judge; attack
    """,
}
# Of tables, figures and algorithms.
NUMBERS = {"fedbiscuit": (5, 8, 1), "feddca": (11, 12, 2), "fewfedpit": (4, 7, 1)}


def listed(text):
    return [" ".join(piece.split()) for piece in text.split(";")]


def test_the_page_is_as_the_record_has_it():
    assert papers.PAGE.read_text(encoding="utf-8") == papers.page(), "python benchmarks/reproduce.py render"


@pytest.mark.parametrize("paper", RECORD)
def test_no_system_table_figure_or_setting_is_missing(paper):
    told = RECORD[paper]
    assert [row[0] for row in told["system"]] == listed(SYSTEMS[paper])
    assert (told["tables"], told["figures"], told["algorithms"]) == NUMBERS[paper]
    for kind in KINDS[1:]:
        assert [row[0] for row in told[kind]] == list(range(1, told[f"{kind}s"] + 1)), kind
    names = [row[0] for row in told["setting"]]
    assert len(set(names)) == len(names)
    assert [word for word in listed(SETTING_WORDS[paper]) if not any(word in name for name in names)] == []


@pytest.mark.parametrize("paper", RECORD)
def test_the_papers_have_no_further_table_or_figure(paper):
    folder = Path(os.environ.get("FEDLIGHT_SHARED", "/nowhere")) / "papers"
    if not folder.is_dir():
        pytest.skip("FEDLIGHT_SHARED has no papers")
    text = (folder / f"{paper}.txt").read_text(encoding="utf-8")
    for kind, words in (("tables", "Table"), ("figures", r"Fig(?:ure|\.)")):
        assert max(int(number) for number in re.findall(rf"{words} (\d+)", text)) == RECORD[paper][kind]


def test_what_is_named_is_there():
    for row in (row for told in RECORD.values() for kind in KINDS for row in told[kind]):
        _, _, where, state, deviation = row
        assert state in papers.STATES, row
        assert deviation or state != "left out", row
        assert where != "-" or state == "left out", row
        for place in where.split(", "):
            command, _, recipe = place.partition(" run ")
            found = config_file(f"recipes/{recipe}.yaml") if command == "fedlight" else ROOT / place
            assert place == "-" or found.exists(), place


def test_a_value_that_is_not_the_papers_is_explained():
    """On the page for the runs of the paper's size, and at its line in the config of the method alone."""
    for _, paper, large, small, deviation in (row for told in RECORD.values() for row in told["setting"]):
        found = papers.value(large)
        values = (paper, *(paper if isinstance(paper, list) else []))
        assert deviation or found in values or str(found).startswith(f"{paper},"), large
        if (key := papers.KEY.fullmatch(small)) and papers.value(small) != paper:
            assert re.search(r"#.*paper", line_of(key["file"], key["key"])), small


def line_of(file, key):
    """Return the line of a config with a key."""
    text = (ROOT / file).read_text(encoding="utf-8")
    node = yaml.compose(text)
    for piece in key.split("."):
        mark, node = next((k.start_mark, v) for k, v in node.value if k.value == piece)
    return text.splitlines()[mark.line]
