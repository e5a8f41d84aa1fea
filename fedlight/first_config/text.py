"""The YAML of a draft: one commented file for ``fedlight fit --config``, with nothing of the embedded toy in it."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedlight.first_config.draft import Draft

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
    "fedbiscuit": "--model.num_adapters 5    --federated.algorithm.assignment optimal",
    "feddca": "--data.augmentation null trains on the clients' own rows alone    --data.augmentation.number 100",
    "fewfedpit": "--federated.algorithm.beta 0.25    --federated.algorithm FedMIT",
    "sft": "--federated.clients_per_round 4    --federated.algorithm FedProx    --federated null trains on the pooled rows",
    "dpo": "--model.beta 0.5    --federated.algorithm FedProx    --federated null trains on the pooled pairs",
}
SELECTORS = 3


def write(draft: Draft, file: str) -> str:
    """Return the YAML of a draft, which will be called ``file``."""
    folder = f"runs/{Path(file).stem}"
    parts = [
        _header(draft, file, folder),
        _trainer(draft, folder),
        _model(draft),
        _data(draft),
        _federated(draft),
    ]
    return "\n\n".join(parts) + "\n"


def scalar(value: Any) -> str:
    """Return a value as YAML on one line, quoted where a bare text would mean something else.

    Examples:
        >>> print(scalar("data/votes.jsonl"), scalar("a: b"), scalar("1"), scalar("no"), scalar(["a", "2"]), scalar(3))
        data/votes.jsonl "a: b" "1" "no" [a, "2"] 3
    """
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(scalar, value))}]"
    if not isinstance(value, str):
        return json.dumps(value)
    plain = re.fullmatch(r"[A-Za-z/~][\w./-]*", value)
    words = ("yes", "no", "on", "off", "y", "n", "true", "false", "null", "~", "nan", "inf")
    return value if plain and value.lower() not in words else json.dumps(value, ensure_ascii=False)


def _noted(setting: str, comment: str) -> str:
    """Return a line whose comment stands in the same column as the others."""
    return f"{setting:<38} # {comment}"


def _mapping(values: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{name}: {scalar(value)}" for name, value in values.items()) + "}"


def _block(text: str, indent: int) -> str:
    r"""Return a text for a YAML value: on one line, or as a block.

    Examples:
        >>> print("t: " + _block("a {b}\nc:", 2))
        t: |-
          a {b}
          c:
    """
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
        *(f"  {guess.what}: {_short(guess.value)} ({guess.why})" for guess in unsure),
    ]
    return "\n".join(f"# {line}".rstrip() for line in lines) + "\n\nseed_everything: 0"


def _short(value: Any) -> str:
    return " ".join(str(value if value is not None else "none").split())


def _trainer(draft: Draft, folder: str) -> str:
    watching = {
        "fedbiscuit": ["GroupLog", "ClientAccuracy"],
        "fedbis": ["ClientAccuracy"],
        "sft": ["SampleAnswers"],
    }
    logs = watching.get(draft.method, [])
    rounds = draft.sizes.rounds
    return "\n".join(
        [
            "trainer:",
            _noted(f"  max_epochs: {rounds}", "rounds"),
            "  accelerator: auto",
            f"  default_root_dir: {scalar(folder)}",
            "  num_sanity_val_steps: 0",
            _noted(f"  check_val_every_n_epoch: {max(rounds // 5, 1)}", "rounds between two validations"),
            "  enable_model_summary: false",
            "  log_every_n_steps: 1",
            *(["  gradient_clip_val: 1.0"] if draft.method == "fewfedpit" else []),
            "  logger:",
            "    class_path: lightning.pytorch.loggers.CSVLogger",
            '    init_args: {save_dir: "${trainer.default_root_dir}", name: metrics}',
            "  callbacks:",
            *(
                f"    - class_path: fedlight.{name}"
                for name in ("RoundProgress", "VisitLog", "ClientData", *logs)
            ),
            _noted("    - class_path: fedlight.AdapterExport", "the result: an adapter that peft loads"),
            '      init_args: {folder: "${trainer.default_root_dir}/adapter"}',
            _noted(
                "    - class_path: lightning.pytorch.callbacks.ModelCheckpoint",
                "a stopped run goes on from here",
            ),
            "      init_args:",
            "        dirpath: ${trainer.default_root_dir}/checkpoints",
            '        filename: "{epoch}"',
            "        save_top_k: 2",
            "        monitor: step",
            "        mode: max",
            "        save_on_train_epoch_end: true",
        ]
    )


def _model(draft: Draft) -> str:
    kind = {"fedbis": "SelectorModule", "fedbiscuit": "SelectorModule", "dpo": "DPOModule"}.get(
        draft.method, "SFTModule"
    )
    selector = kind == "SelectorModule"
    own = [
        *(
            [_noted(f"    num_adapters: {SELECTORS}", "selectors on one base; odd, as they vote")]
            * (draft.method == "fedbiscuit")
        ),
        *([_noted("    head: choice", "the logits of two choice tokens")] * selector),
        *(["    choices: ${data.init_args.choices}"] * selector),
        *([_noted("    beta: 0.1", "how far it may go from the model as it was")] * (kind == "DPOModule")),
    ]
    return "\n".join(
        [
            "model:",
            f"  class_path: fedlight.{kind}",
            "  init_args:",
            f"    model: {scalar(draft.wishes.model)}",
            *own,
            _noted("    base: plain", "int8 and nf4 quantize the frozen base"),
            "    lora_rank: 8",
            "    lora_alpha: 16",
            "    lora_dropout: 0.05",
            f"    lr: {draft.lr}",
            _noted("    lr_schedule: cosine", "over the rounds"),
            "    optimizer: AdamW",
            "    seed: ${seed_everything}",
        ]
    )


def _data(draft: Draft) -> str:
    classes = {"feddca": "AugmentedInstructionDataModule", "fewfedpit": "SyntheticInstructionDataModule"}
    kind = "PreferenceDataModule" if draft.is_votes else classes.get(draft.method, "InstructionDataModule")
    owners = "    partition: {by: client}"
    if "client" not in draft.columns:
        owners = _noted(
            f"    partition: {{by: iid, num_clients: {draft.sizes.clients}}}",
            "no column says whose row it is",
        )
    wide = "input" not in draft.columns and "{input}" not in draft.template and draft.template != "alpaca"
    columns: dict[str, str] = draft.columns if wide or draft.is_votes else {"input": "", **draft.columns}
    return "\n".join(
        [
            "data:",
            f"  class_path: fedlight.{kind}",
            "  init_args:",
            f"    source: {scalar(draft.wishes.source)}",
            _noted("    columns:", "ours: yours"),
            *(f"      {name}: {scalar(path)}" for name, path in columns.items()),
            *_choice_values(draft),
            *_template(draft),
            "    tokenizer: ${model.init_args.model}",
            _noted(f"    max_tokens: {draft.max_tokens}", "what does not fit is left out and counted"),
            owners,
            *_validation(draft),
            f"    batch_size: {draft.sizes.batch_size}",
            "    seed: ${seed_everything}",
            *_public(draft),
            *_synthesis(draft),
        ]
    )


def _choice_values(draft: Draft) -> list[str]:
    if not draft.choice_values:
        return []
    ties = "    # ties are left out and counted" if "tie" in draft.choice_values else ""
    return [f"    choice_values: {_mapping(draft.choice_values)}{ties}"]


def _template(draft: Draft) -> list[str]:
    text = _block(draft.template, 6)
    if not draft.is_votes:
        return [f"    template: {text}"]
    if draft.choices is None:
        view = "dpo" if draft.method == "dpo" else "sft"
        what = "chosen and rejected" if view == "dpo" else "the chosen answer alone"
        return [_noted(f"    view: {view}", what), f"    generation_template: {text}"]
    return [
        _noted("    view: selector", "both orders of each pair, with the choice as label"),
        _noted(f"    choices: {scalar(draft.choices)}", "single tokens of this model"),
        f"    choice_template: {text}",
        _noted("    twins_together: true", "both orders in one batch: a taste for a position cancels"),
    ]


def _validation(draft: Draft) -> list[str]:
    if draft.method == "fewfedpit":
        return [_noted("    val_share: 0", "the clients train on all they have")]
    share = 0.2 if draft.method == "fedbiscuit" else 0.1
    why = "what clients are grouped by" if draft.method == "fedbiscuit" else "of each client's rows"
    return [_noted(f"    val_share: {share}", why), f"    val_max: {draft.sizes.val_max}"]


def _public(draft: Draft) -> list[str]:
    if draft.method != "feddca":
        return []
    own = draft.wishes.public is None
    private = int(draft.rows * draft.fitting / 2)  # what is too long is left out before the rows are parted
    where = (
        _noted(f"    private_rows: {max(private, 1)}", "rows of the clients; the rest is the server's")
        if own
        else _noted(f"    public_source: {scalar(draft.wishes.public)}", "the server's rows")
    )
    return [
        where,
        "    augmentation:",
        "      class_path: fedlight.FedDCA",
        "      init_args:",
        _noted(
            "        encoder: {class_path: fedlight.HashedEncoder}",
            "no download; SentenceEncoder takes a model",
        ),
        _noted(
            f"        number: {max(min(50, draft.rows // (4 * draft.sizes.clients)), 1)}",
            "rows for each client",
        ),
        _noted("        clusters: 10", "topics of each client's rows"),
        _noted("        alpha: 0.7", "rows this similar to the client's centre, or more, are left out"),
    ]


def _synthesis(draft: Draft) -> list[str]:
    if draft.method != "fewfedpit":
        return []
    narrow = draft.positions is not None and draft.positions <= 1024
    return [
        _noted("    keep: 8", "of the candidates, those with the lowest score"),
        _noted("    score: ifs", "loss of the response given the instruction over its loss alone"),
        "    synthesis:",
        "      class_path: fedlight.SelfGeneration",
        "      init_args:",
        _noted("        number: 16", "candidates of each client and round"),
        _noted(f"        instruction_demonstrations: {2 if narrow else 8}", "of the client's own rows"),
        f"        response_demonstrations: {1 if narrow else 4}",
        f"        max_instruction_tokens: {min(64, draft.max_tokens // 4)}",
        f"        max_response_tokens: {min(256, draft.max_tokens // 4)}",
    ]


def _federated(draft: Draft) -> str:
    algorithm = {
        "fedbiscuit": [
            "      class_path: fedlight.FedBiscuit",
            "      init_args:",
            _noted("        warmup_rounds: 1", "of each selector in turn"),
            "        regroup_every: 3",
            "        weighting: normalized",
        ],
        "fewfedpit": [
            "      class_path: fedlight.FewFedPIT",
            _noted("      init_args: {beta: 0.5}", "share of the private adapter in what is sent"),
        ],
    }.get(draft.method, ["      class_path: fedlight.FedAvg", "      init_args: {weighting: normalized}"])
    return "\n".join(
        [
            "federated:",
            "  class_path: fedlight.FederatedLoop",
            "  init_args:",
            "    algorithm:",
            *algorithm,
            f"    clients_per_round: {draft.sizes.clients_per_round}",
            _noted(f"    local_steps: {draft.sizes.local_steps}", "of batch_size examples; null: one pass"),
            "    seed: ${seed_everything}",
        ]
    )
