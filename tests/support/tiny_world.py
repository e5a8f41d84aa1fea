"""A language model of two narrow layers with the words of the embedded world, and a command line in this process."""

import contextlib
import csv
import io
import json
import signal
from dataclasses import dataclass
from pathlib import Path

import torch

VOTES = "toy:votes?num_clients=6&votes_per_client=10"
HELDOUT = "toy:heldout?num_clients=6&size=24"
PROMPTS = "toy:prompts?size=12"
EVAL_PROMPTS = "toy:eval_prompts?size=12"


def make_model(folder: Path, seed: int = 0, **changes) -> str:
    """Untrained: nothing that is tested with it is a matter of skill."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from fedlight.toy import MODEL

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    specials = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    config = LlamaConfig(
        **{"vocab_size": len(tokenizer), "initializer_range": 0.3, "max_position_embeddings": 256},
        **{**sizes, **specials, **changes},
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def make_encoder(folder: Path) -> str:
    """An untrained BERT of six narrow layers."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    specials = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3}
    words = "one other claim a b 0 1 2 3 4 5 6 7 8 9".split()  # noqa: SIM905
    tokenizer = Tokenizer(
        models.WordLevel({**specials, **{w: 4 + i for i, w in enumerate(words)}}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"},
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 6, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=len(specials) + len(words), **sizes)).save_pretrained(folder)
    return str(folder)


def write_rows(file: Path, rows: list[dict]) -> str:
    """Writes JSON lines and gives the file's name."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def write_lines(file: Path, *lines: str) -> str:
    """Write lines of a file in a folder that is made, and give the file's name."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines).rstrip("\n") + "\n")
    return str(file)


def read_lines(file: Path) -> list[dict]:
    """Rows of a file of JSON lines."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def table(file: Path) -> list[dict[str, str]]:
    """Rows of a CSV file."""
    return list(csv.DictReader(file.read_text().splitlines()))


def weights(folder: Path) -> dict[str, list]:
    """The adapter that a run has left in its folder."""
    from safetensors.torch import load_file

    file = folder / "adapter/adapter_model.safetensors"
    return {name: weight.tolist() for name, weight in load_file(file).items()}


@dataclass
class Outcome:
    """What a command left: its exit code (0 if it went well) and its two outputs."""

    code: int
    out: str
    err: str


def fedlight(*args: str) -> Outcome:
    """Runs ``fedlight ARGS`` in this process: importing torch anew takes longer than most of these commands."""
    from fedlight.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    code = 0
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(list(args))
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
            if isinstance(stop.code, str):
                print(stop.code, file=err)
        finally:
            for signum, handler in handlers.items():  # Lightning leaves Ctrl-C ignored after one
                signal.signal(signum, handler)
    return Outcome(code, out.getvalue(), err.getvalue())


def refused(outcome: Outcome) -> str:
    """The one line that a refused command ends with; everything before it was said in passing."""
    assert outcome.code != 0
    assert "Traceback" not in outcome.err
    (line,) = [line for line in outcome.err.splitlines() if line.startswith("fedlight: ")]
    return line


def tiny_selector(model: str, folder: Path | str, *more: str) -> list[str]:
    """Arguments of ``selector.yaml`` for two rounds of two clients."""
    return [
        *("--config=selector.yaml", "--trainer.accelerator=cpu", f"--trainer.default_root_dir={folder}"),
        *(f"--model.model={model}", f"--data.source={VOTES}", f"--data.split.test_source={HELDOUT}"),
        *("--trainer.max_epochs=2", "--federated.clients_per_round=2", "--federated.local_steps=2"),
        *("--data.batch_size=4", *more),
    ]


def tiny_recipe(model: str, *more: str) -> list[str]:
    """Overrides that make the recipe ``demo`` a matter of seconds."""
    return [
        f"model={model}",
        *(f"train_source={VOTES}", f"test_source={HELDOUT}", f"prompt_source={PROMPTS}"),
        *(f"eval_source={EVAL_PROMPTS}", "accelerator=cpu", "rounds=2", "clients_per_round=2"),
        *("local_steps=2", "batch_size=4", "num_prompts=6", "num_eval_prompts=6", "completions=2"),
        *("max_new_tokens=6", "dpo_lr=0.05", "dpo_epochs=2"),
        *more,
    ]
