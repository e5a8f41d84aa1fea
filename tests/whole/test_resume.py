import signal

import pytest
import torch
from killed import CODES, KILLED, Child, at
from recipe_runs import ran
from safetensors.torch import load_file
from tiny_world import VOTES, fedlight, refused, table, tiny_selector, weights

from fedlight.callbacks.loop.federated_loop import FederatedLoop
from fedlight.federation.client_state import ClientMemories

CASES = {
    "federated": [],
    "central": ["--federated=null", "--data.batch_size=16"],
    "nf4": ["--model.base=nf4", "--trainer.limit_val_batches=0"],
    "classifier": ["--model.head=classifier", "--data.format.form=pair", "--model.optimizer.schedule=cosine"],
}


def metrics(folder):
    """What was logged, by step: one row of each kind per epoch, so the last of a step holds them all."""
    logged = {}
    for row in [row for file in folder.glob("metrics/*/metrics.csv") for row in table(file)]:
        known = {key: value for key, value in row.items() if value and not key.startswith("train/")}
        logged.setdefault(row["step"], {}).update(known)
    return logged


def dpo(model, folder, *more):
    return [
        *("--config=dpo.yaml", "--trainer.accelerator=cpu", f"--trainer.default_root_dir={folder}"),
        *(f"--model.model={model}", f"--data.source={VOTES}", "--data.batch_size=16", "--model.lr=0.01"),
        "--data.format.choice_values={a: a, b: b, tie: tie}",
        *more,
    ]


@pytest.mark.slow  # whole runs
@pytest.mark.filterwarnings("ignore:The dirpath has changed")  # each resumed run has a folder of its own
@pytest.mark.parametrize("case", [*CASES, "dpo"])
def test_resumed_from_every_checkpoint(case, tiny_model, tmp_path):
    def fit(folder, *more):
        arguments = (dpo if case == "dpo" else tiny_selector)(tiny_model, folder, *CASES.get(case, []))
        keep_all = ("--trainer.callbacks.init_args.save_top_k=-1", "--trainer.max_epochs=3")
        ran("fit", *arguments, *keep_all, *more)
        return weights(folder), metrics(folder)

    whole, logged = fit(tmp_path / "whole")
    checkpoints = sorted((tmp_path / "whole/checkpoints").iterdir())
    assert [file.name for file in checkpoints] == ["epoch=0.ckpt", "epoch=1.ckpt", "epoch=2.ckpt"]
    for epoch, checkpoint in enumerate(checkpoints[:-1]):
        resumed, logged_again = fit(tmp_path / f"from{epoch}", f"--ckpt_path={checkpoint}")
        assert resumed == whole
        assert logged_again == {step: row for step, row in logged.items() if step in logged_again}
        assert len(logged_again) == len(logged) * (2 - epoch) / 3
    if case in ("federated", "dpo"):
        assert fit(tmp_path / "ended", f"--ckpt_path={checkpoints[-1]}")[0] == whole


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        ([], ["--federated=null"], "is of a federated run, and this one has no federation: give the setting"),
        (
            ["--federated=null"],
            [],
            "is of a run without a federation, and this one has the setting federated:",
        ),
    ],
)
def test_a_run_goes_on_as_what_it_was(tiny_model, tmp_path, first, then, message):
    one_round = tiny_selector(tiny_model, tmp_path, "--trainer.max_epochs=1")
    ran("fit", *one_round, *first)
    given = ["fit", *one_round, "--trainer.max_epochs=2", *then]
    line = refused(fedlight(*given, f"--ckpt_path={tmp_path / 'checkpoints/epoch=0.ckpt'}"))
    assert message in line


def test_a_resumed_run_keeps_its_optimizers_settings(tiny_model, tmp_path):
    arguments = ["fit", *tiny_selector(tiny_model, tmp_path)]
    ran(*arguments)
    going_on = f"--ckpt_path={tmp_path / 'checkpoints/epoch=0.ckpt'}"
    outcome = fedlight(*arguments, "--model.lr=0.5", going_on)
    assert outcome.code == 2
    told = "trained with lr=0.003 and goes on with it, not with model.init_args.lr=0.5: give the same, or"
    assert told in outcome.err
    # What does not belong to the optimizer is as the config says, not as the checkpoint has it.
    printed = fedlight(*arguments, "--model.lora.dropout=0.2", going_on, "--print_config").out
    assert "dropout: 0.2" in printed
    ran("test", *arguments[1:], "--model.lr=0.5", going_on)


SERVER_SIDE = {  # rounds, in which of them it is killed, and what is set
    "fedbiscuit": (
        6,
        (4,),
        [
            *("--federated.algorithm=FedBiscuit", "--federated.algorithm.warmup_rounds=1"),
            *("--data.split.val_share=0.3", "--federated.algorithm.regroup_every=2"),
            *("--model.num_adapters=3", "--model.lr=0.05"),
            "--trainer.callbacks+=GroupLog",
            "--trainer.callbacks+=ClientAccuracy",
        ],
    ),
    "scaffold": (
        4,
        (1, 3),
        [
            *("--federated.algorithm=Scaffold", "--model.lr=0.5", "--federated.clients_per_round=4"),
            *("--model.optimizer.name=SGD", "--model.optimizer.args={}"),
        ],
    ),
    "fedadam": (3, (2,), ["--federated.server=FedAdam", "--federated.server.lr=0.01"]),
}


@pytest.mark.slow  # whole runs
@pytest.mark.parametrize("case", SERVER_SIDE)
def test_killed_and_resumed_with_what_server_and_clients_remember(case, tiny_model, tmp_path, on_disk):
    rounds, kills, settings = SERVER_SIDE[case]

    def arguments(folder):
        saved = sorted((folder / "checkpoints").glob("*.ckpt"))
        going_on = [f"--ckpt_path={saved[-1]}"] if saved else []
        more = (*settings, f"--trainer.max_epochs={rounds}", *going_on)
        return ["fit", *tiny_selector(tiny_model, folder, *more)]

    def in_round(round_idx):
        def now(loop, trainer, module, batch, batch_idx):
            return (trainer.current_epoch, batch_idx) == (round_idx, 3)  # one visit is finished

        return at(FederatedLoop, "on_train_batch_start", now, signal.SIGKILL)

    whole, again, log = tmp_path / "whole", tmp_path / "again", tmp_path / "log"
    for round_idx in kills:
        assert Child(arguments(again), log, in_round(round_idx)).wait() == CODES[KILLED]
        assert (again / f"checkpoints/epoch={round_idx - 1}.ckpt").exists()
    for folder in (again, whole):
        ran(*arguments(folder))
    assert left_by(again) == left_by(whole)
    assert remembered(again, rounds) == remembered(whole, rounds)
    assert metrics(again) == metrics(whole)


def left_by(folder):
    """Adapters and tables, without seconds."""
    files = folder.glob("adapter/**/*.safetensors")
    adapters = {str(file.relative_to(folder)): plain(load_file(file)) for file in files}
    tables = {file.name: table(file) for file in folder.glob("*.csv")}
    for row in tables["visits.csv"]:
        del row["seconds"]
    assert adapters
    return adapters, tables


def remembered(folder, rounds):
    """By algorithm, server and clients, in the last checkpoint; something is."""
    checkpoint = torch.load(folder / f"checkpoints/epoch={rounds - 1}.ckpt", weights_only=True)
    state = checkpoint["callbacks"]["FederatedLoop"]
    memories = ClientMemories()
    memories.load_state_dict(state["memory"])
    clients = {f"c00{i}": memories.load(f"c00{i}") for i in range(6)}
    found = plain([state["algorithm"], state["server"], clients])
    assert any([state["algorithm"], state["server"], *clients.values()])
    return found


def plain(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value
