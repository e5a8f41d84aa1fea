"""Model card: description of a trained model, its data, cost and privacy, and how to load it.

M. Mitchell et al., "Model Cards for Model Reporting", FAT* 2019, https://arxiv.org/abs/1810.03993. The head of the file is
the metadata of the Hugging Face hub.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from rich.filesize import decimal

from fedlight.callbacks.export.card_facts import CardFacts
from fedlight.pretrained.hub import EMBEDDED
from fedlight.support.files import write_whole
from fedlight.support.words import count_noun, in_largest_unit, three_digits

README = "README.md"
BOTH_ORDERS = "/accuracy_both_orders"
AT_CHANCE = (
    "The selector is not shown to beat chance: the interval of its accuracy in both orders reaches down to 0.5. Its "
    "votes are worthless, and so are labels, tuned models and win rates that rest on them."
)


def write_card(
    facts: CardFacts,
    folder: Path,
    *,
    what: str,
    use: str,
    library: str = "peft",
    task: str = "CAUSAL_LM",
    notes: Sequence[str] = (),
) -> None:
    """Write ``README.md``, which replaces any that lies there.

    ``what`` names the kind of the files, such as ``LoRA adapter``; ``use`` says in Markdown how they are loaded; ``library``
    and ``task`` are the names that the hub has for the library and PEFT for the kind of model.
    """
    from huggingface_hub import ModelCard, ModelCardData

    on_hub = "/" in facts.base  # owner/name
    data = ModelCardData(
        base_model=facts.base if on_hub else None,
        library_name=library,
        license=facts.licence,
        pipeline_tag="text-generation" if task == "CAUSAL_LM" else "text-classification",
        tags=["federated-learning", "fedlight", *(["lora"] if library == "peft" else [])],
    )
    content = f"---\n{data.to_yaml()}\n---\n\n{card_text(facts, what, use, notes)}"
    write_whole(folder / README, str(ModelCard(content, ignore_metadata_errors=True)))


def card_text(facts: CardFacts, what: str, use: str, notes: Sequence[str] = ()) -> str:
    """Return the card without its metadata.

    Examples:
        >>> print(card_text(CardFacts("SFTModule", "owner/name", "FedAvg", clients=3), "LoRA adapter", "Load it."))
        # name, tuned by FedAvg
        <BLANKLINE>
        LoRA adapter of owner/name, tuned by SFTModule with FedAvg on the data of 3 clients...
    """
    title = f"# {facts.base.rpartition('/')[2]}, tuned by {facts.algorithm or facts.module}"
    how = f"{facts.module} with {facts.algorithm}" if facts.algorithm else facts.module
    on_data = f" on the data of {count_noun(facts.clients, 'client')}" if facts.clients else ""
    head = f"{what} of {facts.base}, tuned by {how}{on_data}."
    parts = [title, head, "## Use", use, "## Training", _table(["", ""], _training(facts))]
    if facts.scores:
        scores = [
            [name, three_digits(value), _interval(low, high)] for name, value, low, high in facts.scores
        ]
        parts += ["## Scores", _table(["metric", "last value", "interval"], scores)]
    notes = [
        *(
            AT_CHANCE
            for name, _, low, _ in facts.scores
            if name.endswith(BOTH_ORDERS) and low is not None and low <= 0.5
        ),
        "A language model can repeat what it was trained on, also where clients send no rows.",
        *notes,
    ]
    parts += ["## Notes", "\n".join(f"* {note}" for note in notes)]
    return "\n\n".join(parts) + "\n"


def adapter_use(base: str, task: str, names: Sequence[str] = ("default",), labels: int = 1) -> str:
    """Return how an adapter, or several in folders ``names``, is loaded by PEFT, in Markdown.

    ``task`` is PEFT's name of the kind of model, ``labels`` the outputs of a classification head.

    Examples:
        >>> adapter_use("owner/name", "CAUSAL_LM").splitlines()[-2]
        'model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), "FOLDER")'
    """
    kind, options = "AutoModelForCausalLM", ""
    if task != "CAUSAL_LM":
        kind, options = "AutoModelForSequenceClassification", f", num_labels={labels}"
    first = "FOLDER" if len(names) == 1 else f"FOLDER/{names[0]}"
    named = "" if len(names) == 1 else f', adapter_name="{names[0]}"'
    lines = [
        "from peft import PeftModel",
        f"from transformers import {kind}, AutoTokenizer",
        "",
        f'base = "{base}"  # or a folder with this model',
        "tokenizer = AutoTokenizer.from_pretrained(base)",
        f'model = PeftModel.from_pretrained({kind}.from_pretrained(base{options}), "{first}"{named})',
    ]
    lines += [f'model.load_adapter("FOLDER/{name}", adapter_name="{name}")' for name in names[1:]]
    return "\n".join(["```python", *lines, "```"])


def adapter_notes(facts: CardFacts, is_on_merged_base: bool) -> list[str]:
    """Return notes for putting an adapter on its base, where that differs from the run's."""
    notes = []
    if is_on_merged_base:
        notes.append(
            "The base of the run had another adapter merged into it, which this one does not hold: on the plain base it is "
            "another model. `fedlight export RUN --format merged --checkpoint last` writes the whole one."
        )
    if facts.base_form != "plain":
        notes.append(
            f"The run trained on a {facts.base_form} base; on the plain one answers differ as far as the two bases do."
        )
    if "/" not in facts.base and facts.base not in EMBEDDED:
        notes.append("The base was a folder, not a name at the hub: `base` is where you have it.")
    return notes


def _training(facts: CardFacts) -> list[list[str]]:
    papers = facts.papers
    names = facts.module, facts.algorithm
    cited = {name: f"{name} ({papers[name]})" if name in papers else name for name in names}
    trained_on = "" if facts.base_form == "plain" else f", trained on its {facts.base_form} form"
    embedded = " (the model embedded in fedlight)" if facts.base in EMBEDDED else ""
    counts = [
        words
        for number, words in (
            (facts.clients, count_noun(facts.clients, "client")),
            (facts.examples, count_noun(facts.examples, "training example")),
            (facts.added, f"{facts.added:,} of them added to the clients' own"),
        )
        if number
    ]
    lines = {
        "method": cited[facts.module],
        "federated algorithm": cited[facts.algorithm] if facts.algorithm else "none: trained on pooled data",
        "base model": f"{facts.base}{embedded}{trained_on}",
        "licence of the base": facts.licence,
        "data": "; ".join(filter(None, [facts.source, ", ".join(counts)])),
        "rounds" if facts.algorithm else "epochs": f"{facts.rounds:,}",
        "sent to clients in visits": decimal(facts.bytes_down) if facts.bytes_down else "",
        "sent by clients in visits": decimal(facts.bytes_up) if facts.bytes_up else "",
        "simulated time on devices": in_largest_unit(facts.simulated_seconds)
        if facts.simulated_seconds
        else "",
        "differential privacy": "; ".join(
            f"epsilon {_rounded_up(epsilon)} at delta {delta:g} towards {towards}"
            for towards, epsilon, delta in facts.privacy
        )
        or "none",
        **{name: str(value) for name, value in facts.settings.items() if value is not None},
        "command": f"`{facts.command}`" if facts.command else "",
        "versions": ", ".join(f"{name} {number}" for name, number in facts.versions.items()),
    }
    return [[name, value] for name, value in lines.items() if value]


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    # Before Python 3.12 an f-string holds no backslash.
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)


def _interval(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{three_digits(low)} to {three_digits(high)}"


def _rounded_up(epsilon: float) -> str:
    """Return epsilon with three digits, rounded up so that it promises no more than it holds.

    Examples:
        >>> _rounded_up(12.341), _rounded_up(0.50001), _rounded_up(3.0)
        ('12.4', '0.501', '3')
    """
    if not 0 < epsilon < math.inf:
        return three_digits(epsilon)
    step = 10.0 ** (math.floor(math.log10(epsilon)) - 2)  # three digits
    # An error of the division must not add a step.
    return f"{math.ceil(round(epsilon / step, 6)) * step:.3g}"
