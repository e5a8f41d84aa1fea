"""The YAML of a draft: one commented file for ``fedlight fit --config``, without settings of the embedded toy."""

import json
import re
from pathlib import Path
from typing import Any

from fedlight.datamodules.text.templates import CHAT, MESSAGES
from fedlight.first_config.draft import Draft
from fedlight.first_config.words import SHORT

TITLES = {
    "fedbis": "FedBis: a selector that says which of two answers is better, trained on the clients' votes where they are",
    "fedbiscuit": "FedBiscuit: several selectors, each trained by the clients that agree with it; they vote",
    "feddca": "FedDCA: clients train on their own instructions and on public ones that together cover the domain",
    "fewfedpit": "FewFedPIT: clients with few rows make more of them, train on both apart, and send a mix of two adapters",
    "sft": "Supervised fine-tuning in a federation: the model learns the clients' answers, which stay where they are",
    "dpo": "DPO in a federation: the model learns to prefer the answers that the clients preferred",
}
PAPERS = {
    "fedbis": "Wu et al., https://arxiv.org/abs/2407.03038",
    "fedbiscuit": "Wu et al., https://arxiv.org/abs/2407.03038",
    "feddca": "Wang et al., https://arxiv.org/abs/2409.20135",
    "fewfedpit": "Zhang et al., https://arxiv.org/abs/2403.06131",
    "sft": "FedAvg: McMahan et al., https://arxiv.org/abs/1602.05629",
    "dpo": "DPO: Rafailov et al., https://arxiv.org/abs/2305.18290",
}
CHANGES = {
    "fedbis": "--federated.clients_per_round 4    --federated null trains on the pooled votes",
    "fedbiscuit": "--model.num_adapters 5    --federated.algorithm.assignment OptimalGroups",
    "feddca": "--data.augmentation null trains on the clients' own rows alone    --data.augmentation.number 100",
    "fewfedpit": "--federated.algorithm.beta 0.25    --federated.algorithm FedMIT",
    "sft": "--federated.clients_per_round 4    --federated.algorithm FedProx    --federated null trains on the pooled rows",
    "dpo": "--model.beta 0.5    --federated.algorithm FedProx    --federated null trains on the pooled pairs",
}
LOGS = {
    "fedbiscuit": ("GroupLog", "ClientAccuracy"),
    "fedbis": ("ClientAccuracy",),
    "sft": ("SampleAnswers",),
}
MODELS = {"fedbis": "SelectorModule", "fedbiscuit": "SelectorModule", "dpo": "DPOModule"}
DATA = {"feddca": "AugmentedInstructionDataModule", "fewfedpit": "SyntheticInstructionDataModule"}
SELECTION = """
    head: choice                       # the logits of two choice tokens
    choices: ${data.init_args.format.choices}
    orders: both                       # the loss of the two orders' difference; the paper: one, of each order"""
OF_MODEL = {
    "fedbis": SELECTION,
    "fedbiscuit": """
    num_adapters: 3                    # selectors on one base; odd, as they vote"""
    + SELECTION,
    "dpo": """
    beta: 0.1                          # how far it may go from the model as it was""",
}
ALGORITHMS = {
    "fedbiscuit": """FedBiscuit
      init_args:
        warmup_rounds: 1               # of each selector in turn
        regroup_every: 3
        weighting: normalized""",
    "fewfedpit": """FewFedPIT
      init_args: {beta: 0.5}           # share of the private adapter in what is sent""",
}
AVERAGE = """FedAvg
      init_args: {weighting: normalized}"""


def write(draft: Draft, file: str) -> str:
    """Return the YAML of a draft, which will be called ``file``."""
    folder = f"runs/{Path(file).stem}"
    head = _header(draft, file, folder), _trainer(draft, folder)
    return "\n\n".join([*head, _model(draft), _data(draft), _federated(draft)]) + "\n"


def scalar(value: Any) -> str:
    """Return a value as YAML on one line, quoted where a bare text would mean something else.

    Examples:
        >>> print(scalar("data/votes.jsonl"), scalar("a: b"), scalar("1"), scalar("no"), scalar(["a", "2"]), scalar(3))
        data/votes.jsonl "a: b" "1" "no" [a, "2"] 3
    """
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(scalar, value))}]"
    if not isinstance(value, str):
        return json.dumps(value)  # JSON is YAML
    plain = re.fullmatch(r"[A-Za-z/~][\w./-]*", value)
    # YAML 1.1 reads these as truth values, null or numbers.
    words = ("yes", "no", "on", "off", "y", "n", "true", "false", "null", "~", "nan", "inf")
    return value if plain and value.lower() not in words else json.dumps(value, ensure_ascii=False)


def _block(text: str, indent: int) -> str:
    r"""Return a text for a YAML value: on one line, or as a block.

    Examples:
        >>> print("t: " + _block("a {b}\nc:", 2))
        t: |-
          a {b}
          c:
    """
    # A block takes blanks before its first line for indentation, and editors remove those behind a line.
    if "\n" not in text or any(line != line.rstrip() or line[:1] == " " for line in text.split("\n")):
        return scalar(text)
    return "|-\n" + "\n".join(" " * indent * bool(line) + line for line in text.split("\n"))


def _header(draft: Draft, file: str, folder: str) -> str:
    unsure = [guess for guess in draft.guesses if not guess.sure]
    lines = [
        f"{TITLES[draft.method]}.",
        "",
        f"Data:     {draft.wishes.source}, {draft.rows:,} rows",
        f"Paper:    {PAPERS[draft.method]}",
        f"Run:      fedlight fit --config {file}",
        f"Look:     fedlight report {folder}",
        f"Change:   {CHANGES[draft.method]}",
        *(["", "Guessed without being sure, so look at it:"] if unsure else []),
        *(f"  {each.what}: {' '.join(str(each.value or 'none').split())} ({each.reason})" for each in unsure),
    ]
    return "\n".join(f"# {line}".rstrip() for line in lines) + "\n\nseed_everything: 0"


def _trainer(draft: Draft, folder: str) -> str:
    rounds = draft.sizes.rounds
    clipped = "\n  gradient_clip_val: 1.0" if draft.method == "fewfedpit" else ""
    logs = "".join(f"\n    - class_path: {name}" for name in LOGS.get(draft.method, ()))
    return f"""trainer:
  max_epochs: {rounds:<24} # rounds
  accelerator: auto
  default_root_dir: {scalar(folder)}
  num_sanity_val_steps: 0
  check_val_every_n_epoch: {max(rounds // 5, 1):<11} # rounds between two validations
  enable_model_summary: false
  log_every_n_steps: 1{clipped}
  logger:
    class_path: lightning.pytorch.loggers.CSVLogger
    init_args: {{save_dir: "${{trainer.default_root_dir}}", name: metrics}}
  callbacks:
    - class_path: RoundProgress
    - class_path: VisitLog
    - class_path: ClientData{logs}
    - class_path: AdapterExport # the result: an adapter that peft loads
      init_args: {{folder: "${{trainer.default_root_dir}}/adapter"}}
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint # a stopped run goes on from here
      init_args:
        dirpath: ${{trainer.default_root_dir}}/checkpoints
        filename: "{{epoch}}"
        save_top_k: 2
        monitor: step
        mode: max
        save_on_train_epoch_end: true"""


def _model(draft: Draft) -> str:
    return f"""model:
  class_path: {MODELS.get(draft.method, "SFTModule")}
  init_args:
    model: {scalar(draft.wishes.model)}{OF_MODEL.get(draft.method, "")}
    base: plain                        # int8 and nf4 quantize the frozen base
    dtype: {draft.dtype}                        # of the base; with auto, results would depend on the machine
    lora: {{rank: 8, alpha: 16, dropout: 0.05}}
    lr: {draft.lr}
    optimizer: {{name: AdamW, schedule: cosine}}    # over the rounds
    seed: ${{seed_everything}}"""


def _data(draft: Draft) -> str:
    kind = "PreferenceDataModule" if draft.is_votes else DATA.get(draft.method, "InstructionDataModule")
    owners = "{by: client}"
    if "client" not in draft.columns:
        owners = f"{f'{{by: iid, num_clients: {draft.sizes.clients}}}':<23} # no column says whose row it is"
    has_input = "{input}" in draft.template or draft.template in ("alpaca", CHAT)
    wide = "input" not in draft.columns and (not has_input or MESSAGES in draft.columns)
    columns: dict[str, str] = draft.columns if wide or draft.is_votes else {"input": "", **draft.columns}
    named = "".join(f"\n      {name}: {scalar(path)}" for name, path in columns.items())
    more = {"feddca": _public, "fewfedpit": _synthesis}.get(draft.method, lambda draft: "")
    return f"""data:
  class_path: {kind}
  init_args:
    source: {scalar(draft.wishes.source)}
    columns:                           # ours: yours{named}
{_template(draft)}
    tokenizer: ${{model.init_args.model}}
    max_tokens: {draft.max_tokens:<22} # what does not fit is left out and counted
    partition: {owners}
{_validation(draft)}
    batch_size: {draft.sizes.batch_size}
    seed: ${{seed_everything}}{more(draft)}"""


def _template(draft: Draft) -> str:
    text = _block(draft.template, 8 if draft.is_votes else 6)
    if not draft.is_votes:
        return f"    template: {text}"
    values = ", ".join(f"{name}: {scalar(value)}" for name, value in draft.choice_values.items())
    ties = "    # ties are left out and counted" if "tie" in draft.choice_values else ""
    form = f"    format:\n      choice_values: {{{values}}}{ties}" if values else "    format:"
    if draft.choices is None:
        is_dpo = draft.method == "dpo"
        view, meaning = ("dpo", "chosen and rejected") if is_dpo else ("sft", "the chosen answer alone")
        return f"    view: {view:<28} # {meaning}\n{form}\n      generation_template: {text}"
    return f"""\
    view: selector                     # both orders of each pair, with the choice as label
{form}
      choices: {scalar(draft.choices):<23} # single tokens of this model
      choice_template: {text}
      twins_together: true             # both orders in one batch: a taste for a position cancels"""


def _validation(draft: Draft) -> str:
    if draft.method == "fewfedpit":
        return "    split: {val_share: 0}              # the clients train on all they have"
    share = "0.1                   # of each client's rows"
    if draft.method == "fedbiscuit":
        share = "0.2                   # what clients are grouped by"
    return f"    split:\n      val_share: {share}\n      val_max: {draft.sizes.val_max}"


def _public(draft: Draft) -> str:
    number = max(min(50, draft.rows // (4 * draft.sizes.clients)), 1)
    # Rows that are too long are left out before they are parted.
    private = max(int(draft.rows * draft.fitting / 2), 1)
    where = f"private_rows: {private:<20} # rows of the clients; the rest is the server's"
    if draft.wishes.public is not None:
        where = f"public_source: {scalar(draft.wishes.public):<19} # the server's rows"
    return f"""
    {where}
    augmentation:
      class_path: FedDCA
      init_args:
        encoder: {{class_path: HashedEncoder}} # no download; SentenceEncoder takes a model
        number: {number:<22} # rows for each client
        clusters: 10                   # topics of each client's rows
        alpha: 0.7                     # rows this similar to the client's centre, or more, are left out"""


def _synthesis(draft: Draft) -> str:
    is_short = draft.positions is not None and draft.positions <= SHORT  # else demonstrations would fill it
    return f"""
    keep: 8                            # of the candidates, those with the lowest score
    score: ifs                         # loss of the response given the instruction over its loss alone
    synthesis:
      class_path: SelfGeneration
      init_args:
        number: 16                     # candidates of each client and round
        instructions: {{demonstrations: {2 if is_short else 8}, max_new_tokens: {min(64, draft.max_tokens // 4)}}}
        responses: {{demonstrations: {1 if is_short else 4}, max_new_tokens: {min(256, draft.max_tokens // 4)}}}
        temperature: 0.7               # the paper: 0, greedy, with which a small model repeats itself"""


def _federated(draft: Draft) -> str:
    return f"""federated:
  class_path: FederatedLoop
  init_args:
    algorithm:
      class_path: {ALGORITHMS.get(draft.method, AVERAGE)}
    clients_per_round: {draft.sizes.clients_per_round}
    local_steps: {draft.sizes.local_steps:<21} # of batch_size examples; null: one pass
    seed: ${{seed_everything}}"""
