"""Trained model of a run as files for other programs, with a card: a PEFT adapter, a whole model, GGUF, or programs."""

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from fedlight.callbacks.export.card_facts import CardFacts, public_name
from fedlight.callbacks.export.model_card import adapter_notes, adapter_use, write_card
from fedlight.datamodules.text.templates import MESSAGES, Template
from fedlight.export import formats
from fedlight.export.opened import Opened, facts_of
from fedlight.export.vote import SETTINGS
from fedlight.federation.algorithms.ditto import Ditto
from fedlight.federation.algorithms.fedrep import FedRep
from fedlight.federation.algorithms.local_only import LocalOnly
from fedlight.federation.algorithms.lora.fedsa_lora import FedSALoRA
from fedlight.modules.language.adapter_folders import copy_adapters
from fedlight.modules.language.module import LanguageModule
from fedlight.modules.selector import SelectorModule, read_asked
from fedlight.pretrained.hub import load_tokenizer
from fedlight.runs.facts import within
from fedlight.runs.run import read_recipe
from fedlight.support.files import whole_folder, write_json
from fedlight.support.results import chance_notes

FULL_PRECISION = (
    "The run trained on a {form} base. Here the adapter is added to the base in full precision, since rounding the sum "
    "again would change the answers; they differ from those of the run as far as its rounded base does from the plain one."
)

PROGRAMS_USE = """
import torch
from transformers import AutoTokenizer, DynamicCache
from transformers.exporters import ExportedModel

tokenizer, exported = AutoTokenizer.from_pretrained("FOLDER"), ExportedModel.from_pretrained("FOLDER")
ids = torch.tensor([tokenizer.encode("Once upon a time")])
mask, written = torch.ones_like(ids), []
found = exported.runners["prefill"](
    input_ids=ids,
    attention_mask=mask,
    position_ids=torch.arange(ids.shape[1])[None],
    cache=DynamicCache(config=exported.config),
)
while len(written) < 32:
    written.append(int(found.logits[0, -1].argmax()))
    if written[-1] == tokenizer.eos_token_id:
        break
    mask = torch.ones(1, mask.shape[1] + 1, dtype=torch.long)
    found = exported.runners["decode"](
        input_ids=torch.tensor([written[-1:]]),
        attention_mask=mask,
        position_ids=torch.tensor([[mask.shape[1] - 1]]),
        cache=found.cache,
    )
print(tokenizer.decode(written, skip_special_tokens=True))
"""


def export(
    opened: Opened, output: Path, form: str, dtype: str | None, converter: Path | None, outtype: str
) -> None:
    """Write a folder with the trained model and its card; a killed export leaves the whole folder or none.

    The options are those of the command, which `check` has passed.
    """
    facts = facts_of(opened)
    with whole_folder(output.resolve()) as new:  # of a link to a folder, that folder
        if form == "adapter":
            _write_adapter(opened, facts, new)
        elif form == "merged":
            _write_merged(opened, facts, new, dtype)
        elif form == "gguf":
            _write_gguf(opened, facts, new, formats.find_converter(converter), outtype)
        else:
            _write_programs(opened, facts, new, form)


def check(opened: Opened, output: Path, form: str, converter: Path | None) -> None:
    """Raise, before any work, where a run cannot be exported in a format, or not into this folder.

    Raises:
        FileNotFoundError: there is no converter.
        ModuleNotFoundError: an exporter is not installed.
        ValueError: the format is none for this module, or the folder is not empty.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"--output {output}: it is not empty: give another folder, or remove it")
    if output.resolve() == Path.cwd():  # it would be replaced, and the shell be left in a folder that is gone
        raise ValueError(f"--output {output}: this is the folder you are in: give one that is not there yet")
    # The global model of FedSALoRA keeps its first B, which is zero in a new adapter; a head is trained all the same.
    trains = opened.settings.get("adapter") or _task(opened) != "CAUSAL_LM"
    unchanged = (LocalOnly,) if trains else (LocalOnly, FedSALoRA)
    if opened.algorithm is not None and issubclass(opened.algorithm, unchanged):
        raise ValueError(
            f"{opened.run.label} trained with {opened.algorithm.__name__}, which leaves the global model as it was: there "
            "is none to export"
        )
    names, task = opened.names, _task(opened)
    if form == "adapter" and opened.is_on_merged_base:
        raise ValueError(
            f"{opened.run.label} trained on a base with another adapter merged into it, which an adapter alone does not "
            "hold: give --format merged --checkpoint last"
        )
    if form != "adapter" and len(names) > 1:
        raise ValueError(
            f"{opened.run.label} has {len(names)} adapters on one base, of which --format {form} could hold one alone: "
            "give --format adapter, which holds all and their vote"
        )
    if form not in ("adapter", "merged") and task != "CAUSAL_LM":
        raise ValueError(
            f"--format {form} is for models that write text: give --format merged for a classifier"
        )
    if form in formats.PACKAGES:
        formats.check_installed(form)
    if form == "gguf":
        formats.find_converter(converter)


def _write_adapter(opened: Opened, facts: CardFacts, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as saved:  # on the same disk, which has room for it
        if opened.adapter is None:
            opened.load().save_adapter(saved)
        names = copy_adapters(opened.adapter or saved, folder, facts.base)
    what = "LoRA adapter" if len(names) == 1 else f"{len(names)} LoRA adapters on one base"
    labels = 2 if opened.settings.get("head") == "classifier" else opened.kind.num_labels or 1
    use = adapter_use(facts.base, _task(opened), names, labels) + _prompts(opened, folder, names)
    notes = [*adapter_notes(facts, False), *_of_run(opened)]
    write_card(facts, folder, what=what, use=use, task=_task(opened), notes=notes)


def _write_merged(opened: Opened, facts: CardFacts, folder: Path, dtype: str | None) -> None:
    # Into the plain base alone can be merged.
    _save_whole(opened.load(base="plain", **({} if dtype is None else {"dtype": dtype})), facts, folder)
    kind = "AutoModelForCausalLM" if _task(opened) == "CAUSAL_LM" else "AutoModelForSequenceClassification"
    code = [
        f"from transformers import {kind}, AutoTokenizer",
        "",
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
        f'model = {kind}.from_pretrained("FOLDER")',
    ]
    use = _python(code) + _prompts(opened, folder, [])
    _write_card(opened, facts, folder, [], what="Merged model", use=use, library="transformers")


def _write_gguf(opened: Opened, facts: CardFacts, folder: Path, converter: Path, outtype: str) -> None:
    name = facts.base.rpartition("/")[2]
    file = folder / f"{name}-{outtype}.gguf"
    with tempfile.TemporaryDirectory(dir=folder) as merged:
        _save_whole(opened.load(base="plain", dtype="fp32"), facts, Path(merged))
        formats.write_gguf(converter, Path(merged), file, outtype, name)
    code = ["from llama_cpp import Llama", "", f'model = Llama("FOLDER/{file.name}")']
    use = _python(code) + _prompts(opened, None, [])
    weights = f"Weights are {outtype}; answers may differ where two tokens are almost equally likely."
    _write_card(opened, facts, folder, [weights], what="GGUF file", use=use, library="gguf")


def _write_programs(opened: Opened, facts: CardFacts, folder: Path, form: str) -> None:
    module = opened.load(base="plain", dtype="fp32")
    with tempfile.TemporaryDirectory(dir=folder) as merged:
        _save_whole(module, facts, Path(merged))
        formats.write_programs(form, Path(merged), folder)
    module.tokenizer.save_pretrained(folder)
    _without_folders(facts, folder)
    use = _python(PROGRAMS_USE.strip().splitlines()) + _prompts(opened, None, [])
    what = {"onnx": "ONNX programs", "executorch": "ExecuTorch programs"}[form]
    notes = ["Weights are fp32; one text at a time."]
    _write_card(opened, facts, folder, notes, what=what, use=use, library=form)


def _write_card(opened: Opened, facts: CardFacts, folder: Path, notes: list[str], **words: str) -> None:
    """Write the card of a whole model."""
    if facts.base_form != "plain":
        notes = [*notes, FULL_PRECISION.format(form=facts.base_form)]
    write_card(facts, folder, task=_task(opened), notes=[*notes, *_of_run(opened)], **words)


def _python(lines: Sequence[str]) -> str:
    return "\n".join(["```python", *lines, "```"])


def _save_whole(module: LanguageModule, facts: CardFacts, folder: Path) -> None:
    module.save_merged(folder)
    _without_folders(facts, folder)


def _without_folders(facts: CardFacts, folder: Path) -> None:
    for file in folder.glob("*.json"):  # the folder of the base is private
        content = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(content, dict) and {"_name_or_path", "name_or_path"} & content.keys():
            names = {name: facts.base for name in ("_name_or_path", "name_or_path") if name in content}
            write_json(file, {**content, **names})


def _of_run(opened: Opened) -> list[str]:
    """Return the warnings of the recipe's table, and of a model that lacks the parts which each client trains for itself."""
    # Labels of a selector at chance make tuned models worthless.
    notes = chance_notes(read_recipe(opened.run.home).results())
    if opened.algorithm is None or not issubclass(opened.algorithm, (Ditto, FedRep, FedSALoRA)):
        return notes
    lacks = ""
    if issubclass(opened.algorithm, FedRep):
        lacks = ", whose head is as it was before training"
    elif issubclass(opened.algorithm, FedSALoRA):
        lacks = ", whose factors B are as they were before training"
    note = (
        f"{opened.algorithm.__name__} trains a model for each client; this is the one that all share{lacks}. Scores of "
        "clients' own models are not its scores."
    )
    return [note, *notes]


def _task(opened: Opened) -> str:
    return "SEQ_CLS" if opened.settings.get("head") == "classifier" else opened.kind.task


def template_name(opened: Opened) -> tuple[str, Template] | None:
    """Return the setting of the run's template, and the template; None where its data have none."""
    config, chooses = opened.run.config(), issubclass(opened.kind, SelectorModule)
    asks: Literal["choice", "prompt"] = "choice" if chooses else "prompt"
    name = within(config, "data", "format", "choice_template" if chooses else "generation_template")
    columns = within(config, "data", "columns") or {}
    if isinstance(name, str) and name:
        return name, Template.named(name, columns, asks)
    name = within(config, "data", "template")
    return (name, Template.named(name, columns)) if isinstance(name, str) and name else None


def template_of(opened: Opened) -> Template | None:
    """Return the template of the run's prompts, a chat with the tokenizer of its base; None where its data have none."""
    named = template_name(opened)
    if named is None or not named[1].is_chat:
        return named and named[1]
    return named[1].for_tokenizer(load_tokenizer(opened.settings["model"], "model"))


def _prompts(opened: Opened, folder: Path | None, adapters: Sequence[str]) -> str:
    """Return how prompts look, in Markdown; of selectors also write the script that lets them vote."""
    if _task(opened) != "CAUSAL_LM" or (template := template_of(opened)) is None:
        return ""
    shown = template.text.replace(f"{{{MESSAGES}}}", "{question}")
    text = f"\n\nPrompts have this form, with a text for each name in braces:\n\n```text\n{shown}\n```"
    if template.is_chat:
        text += "\n\nIt is the tokenizer's chat template (`tokenizer.apply_chat_template`)."
    if template.without is not None:
        text += f"\n\nand this one where `{template.trim}` is empty:\n\n```text\n{template.without.text}\n```"
    if not issubclass(opened.kind, SelectorModule):
        follows = "The answer follows" if template.is_chat else "A blank and the answer follow"
        plain = "`do_sample=False` and `repetition_penalty=1.0`, which a base may set otherwise,"
        return f"{text}\n\n{follows}; `model.generate` with {plain} gives the likeliest one."
    if folder is None:
        return text
    asked = (opened.adapter and read_asked(opened.adapter)) or opened.kind(**opened.settings).asked
    settings: dict[str, Any] = {
        "adapters": list(adapters),
        "template": template.text,
        "is_chat": template.is_chat,
        **{name: asked[name] for name in ("choices", "prior", "temperature")},
        "max_tokens": within(opened.run.config(), "data", "max_tokens") or 512,
    }
    write_json(folder / SETTINGS, settings)
    shutil.copyfile(Path(__file__).with_name("vote.py"), folder / "vote.py")
    fields = json.dumps(dict.fromkeys(template.slots, "..."))
    base = f"{public_name(str(opened.settings.get('model', '')))} " if adapters else ""
    voters = "the majority of the selectors decides" if len(adapters) > 1 else "the selector decides"
    return (
        f"{text}\n\nThe next token is one of {' and '.join(settings['choices'])}. Both answers are read in both orders, "
        f'and {voters}:\n\n```bash\npython vote.py {base}\'{fields}\' "first answer" "second answer"\n```'
    )
