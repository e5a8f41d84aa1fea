"""Ways of training a round for ``benchmarks/peers.py``, each in a separate process, which waits for its turn.

The workload knows torch, transformers and peft alone, so that other frameworks can run it in their own environments. A
process reads "go" from its standard input, trains a round and prints its seconds: of the first round of a size, which makes
model and optimizer, then of each further one. So of several such processes one works at a time.

Run: python benchmarks/peers_ways.py WAY SETTINGS   (``make`` writes the model; SETTINGS is the JSON of `Settings`)
"""

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

LR = 1e-3
VOCABULARY = 512
CLOCK = time.process_time if os.environ.get("PEERS_CLOCK") == "cpu" else time.perf_counter


@dataclass(frozen=True)
class Settings:
    """What all ways train.

    Args:
        folder: of the model.
        sizes: of a batch, (examples, tokens); one is trained after the other.
        rounds: measured rounds of each size; one more comes first.
        clients: in a round, all of them.
        steps: of a client.
        hidden, layers: size of the model.
        at_once: clients that are stacked.
        dtype: number type of the base, fp32 or bf16; an adapter is fp32.
    """

    folder: str
    sizes: list[list[int]]
    rounds: int = 5
    clients: int = 10
    steps: int = 4
    hidden: int = 128
    layers: int = 4
    at_once: int = 10
    dtype: str = "fp32"


class Turns:
    """Order of the rounds of several processes: one waits for "go", another reports its seconds."""

    def __init__(self) -> None:
        self._start = 0.0
        self._seconds: float | None = None
        self._rounds = 0

    def begin(self) -> None:
        """Wait before a size: what comes until its first round is part of its first turn."""
        self._wait()
        self._rounds = 0

    def next_round(self) -> None:
        """Report the round before, if there is one, and wait for the next."""
        if self._rounds:
            self._report()
            self._wait()
        self._rounds += 1

    def stop(self) -> None:
        """Take the time: what comes until the next round is no part of this one."""
        self._seconds = CLOCK() - self._start

    def end(self) -> None:
        """Report the last round of a size."""
        self._report()

    def _wait(self) -> None:
        if not sys.stdin.readline():
            raise SystemExit("peers: the measurement has ended")
        self._start, self._seconds = CLOCK(), None

    def _report(self) -> None:
        if self._seconds is None:
            self.stop()
        print("@", self._seconds, flush=True)


def save_model(settings: Settings) -> int:
    """A random Llama with the embedded world's tokenizer where there is no model; returns its number of parameters."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from fedlight.toy import MODEL

    if os.path.exists(os.path.join(settings.folder, "config.json")):
        return int(
            AutoModelForCausalLM.from_pretrained(settings.folder, dtype=torch.float32).num_parameters()
        )
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    names = ("pad_token_id", "bos_token_id", "eos_token_id")
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=settings.hidden,
        intermediate_size=3 * settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=4,
        **{name: getattr(tokenizer, name) for name in names},
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.save_pretrained(settings.folder)
    tokenizer.save_pretrained(settings.folder)
    return sum(weight.numel() for weight in model.parameters())


def load_model(settings: Settings, full: bool = False) -> Any:
    """The model under LoRA of rank 8 on all linear layers, or with all its weights trained."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    kind = torch.bfloat16 if settings.dtype == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(settings.folder, dtype=kind)
    if full:
        return model.train()
    lora = LoraConfig(
        r=8, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return get_peft_model(model, lora).train()


def draw_texts(settings: Settings, size: list[int]) -> Tensor:
    """Random texts, ``(clients, examples, tokens)``: each client's are as many as its steps read."""
    batch, tokens = size
    stream = torch.Generator().manual_seed(0)
    return torch.randint(5, VOCABULARY, (settings.clients, settings.steps * batch, tokens), generator=stream)


def example_losses(model: nn.Module, ids: Tensor) -> Tensor:
    """Mean cross-entropy of each text's tokens, ``(batch,)``."""
    logits = model(input_ids=ids).logits[:, :-1]
    losses = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    return losses.view(len(ids), -1).mean(dim=1)


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The optimizer's parameters."""
    return [weight for weight in model.parameters() if weight.requires_grad]


def by_hand(settings: Settings, size: list[int], turns: Turns, full: bool = False) -> None:
    """FedAvg as one would write it: copy, train, subtract, add."""
    model, texts = load_model(settings, full), draw_texts(settings, size)
    for _ in range(settings.rounds + 1):
        turns.next_round()
        start = [weight.detach().clone() for weight in trained(model)]
        total = [torch.zeros_like(weight) for weight in start]
        for own in texts:
            with torch.no_grad():
                for weight, value in zip(trained(model), start, strict=True):
                    weight.copy_(value)
            optimizer = torch.optim.AdamW(trained(model), lr=LR)
            for ids in own.split(size[0]):
                optimizer.zero_grad()
                example_losses(model, ids).mean().backward()
                optimizer.step()
            for movement, weight, value in zip(total, trained(model), start, strict=True):
                movement += (weight.detach() - value) / len(texts)
        with torch.no_grad():
            for weight, value, movement in zip(trained(model), start, total, strict=True):
                weight.copy_(value + movement)


def with_lightning(
    settings: Settings, size: list[int], turns: Turns, module: str = "own", **options: Any
) -> None:
    """A run of a trainer: of all texts together, or with ``loop`` (arguments of the federated loop) by client."""
    import lightning as L
    from torch.utils.data import DataLoader

    loop, strategy, full = options.get("loop"), options.get("strategy", "auto"), options.get("full", False)

    class OwnModule(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = load_model(settings, full)

        def example_losses(self, batch: dict[str, Tensor]) -> Tensor:
            return example_losses(self.model, batch["input_ids"])

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return self.example_losses(batch).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(trained(self.model), lr=LR)

    class Texts(L.LightningDataModule):
        def train_dataloader(self) -> DataLoader[Any]:
            ids = draw_texts(settings, size).flatten(0, 1)
            mask = torch.ones_like(ids[0])
            rows = [{"input_ids": row, "attention_mask": mask, "labels": row} for row in ids]
            return DataLoader(rows, batch_size=size[0])  # type: ignore[arg-type]

    class Round(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            turns.next_round()

        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            turns.stop()  # the trainer's own end is no part of the last round

    data: Any = Texts()
    callbacks: list[L.Callback] = [Round()]
    if loop is not None:
        from fedlight import FederatedLoop, FederatedWrapper

        own = settings.steps * size[0]
        shares = {str(n): list(range(n * own, (n + 1) * own)) for n in range(settings.clients)}
        data = FederatedWrapper(data, lambda rows: shares)
        callbacks.append(
            FederatedLoop(clients_per_round=settings.clients, local_steps=settings.steps, **loop)
        )
    if strategy != "auto":
        import fedlight.processes.strategy  # noqa: F401
    trainer = L.Trainer(
        max_epochs=settings.rounds + 1,
        accelerator="cpu",
        strategy=strategy,
        devices=int(os.environ.get("PEERS_PROCESSES", "1")),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    if module == "own":
        trained_module: L.LightningModule = OwnModule()
    else:
        from fedlight import SFTModule
        from fedlight.modules.language.adapters import Lora

        trained_module = SFTModule(
            settings.folder, lora=Lora(rank=8, dropout=0.0), dtype=settings.dtype, lr=LR
        )
    trainer.fit(trained_module, datamodule=data)


def with_pfl(settings: Settings, size: list[int], turns: Turns) -> None:
    """Federated averaging of pfl-research, https://github.com/apple/pfl-research."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = load_model(settings)

        def loss(self, ids: Tensor) -> Tensor:
            return example_losses(self.model, ids).mean()

        def metrics(self, ids: Tensor) -> dict[str, Any]:
            return {}

    class Averaging(FederatedAveraging):
        def get_next_central_contexts(self, model: Any, iteration: int, *args: Any, **kwargs: Any) -> Any:
            if iteration <= settings.rounds:
                turns.next_round()
            return super().get_next_central_contexts(model, iteration, *args, **kwargs)

    def users() -> Iterator[int]:
        while True:
            yield from range(settings.clients)

    texts, order, network = draw_texts(settings, size), users(), Loss()
    model = PyTorchModel(
        network,
        local_optimizer_create=lambda _, lr: torch.optim.AdamW(trained(network), lr=lr),
        central_optimizer=torch.optim.SGD(trained(network), lr=1.0),
    )
    federated = FederatedDataset(
        lambda user: Dataset(raw_data=[texts[user]], user_id=str(user)), lambda: next(order)
    )
    Averaging().run(
        backend=SimulatedBackend(training_data=federated, val_data=federated),
        model=model,
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=settings.rounds + 1,
            evaluation_frequency=10**6,  # the first round, which is not measured, is evaluated
            train_cohort_size=settings.clients,
            val_cohort_size=0,
        ),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=LR, local_batch_size=size[0]
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=size[0]),
    )


def with_flower(settings: Settings, size: list[int], turns: Turns) -> None:
    """Federated averaging of Flower's simulation, https://flower.ai; the one client process keeps its model."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    server, client = ServerApp(), ClientApp()

    class Averaging(FedAvg):
        def configure_train(self, *args: Any, **kwargs: Any) -> Any:
            turns.next_round()
            return super().configure_train(*args, **kwargs)

        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            answers = list(replies)
            if failed := [answer.error.reason for answer in answers if answer.has_error()]:
                raise RuntimeError(f"{len(failed)} clients failed: {failed[0]}")
            if len(answers) != settings.clients:
                raise RuntimeError(f"{len(answers)} of {settings.clients} clients answered")
            found = super().aggregate_train(server_round, answers)
            turns.stop()  # the end of the simulation takes seconds
            return found

    def state(model: nn.Module) -> dict[str, Tensor]:
        return {name: weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}

    @client.train()
    def train(message: Message, context: Context) -> Message:
        kept = vars(torch).setdefault("_peers", {})  # this function is pickled anew for each message
        if "model" not in kept:
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
            kept["model"], kept["texts"] = load_model(settings), draw_texts(settings, size)
        model = kept["model"]
        model.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=False)
        optimizer = torch.optim.AdamW(trained(model), lr=LR)
        own = kept["texts"][int(context.node_config["partition-id"])]
        for ids in own.split(size[0]):
            optimizer.zero_grad()
            example_losses(model, ids).mean().backward()
            optimizer.step()
        found = {"arrays": ArrayRecord(state(model)), "metrics": MetricRecord({"num-examples": len(own)})}
        return Message(content=RecordDict(found), reply_to=message)

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = Averaging(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=settings.clients)
        start = ArrayRecord(state(load_model(settings)))
        strategy.start(grid=grid, initial_arrays=start, num_rounds=settings.rounds + 1)

    resources = {"num_cpus": os.cpu_count() or 1, "num_gpus": 0.0}
    run_simulation(
        server, client, num_supernodes=settings.clients, backend_config={"client_resources": resources}
    )


def ways(settings: Settings) -> dict[str, Callable[[list[int], Turns], None]]:
    """Name -> function that trains the rounds of a size."""
    half = -(-settings.at_once // 2)
    lightning: dict[str, dict[str, Any]] = {
        "lightning": {},
        "own": {"loop": {}},
        "own, full": {"loop": {}, "full": True},
        "sft": {"loop": {}, "module": "sft"},
        "own, stacked": {"loop": {"clients_at_once": settings.at_once}},
        "sft, stacked": {"loop": {"clients_at_once": settings.at_once}, "module": "sft"},
        "own, one thread": {"loop": {}},
        "own, two processes": {"loop": {}, "strategy": "client_parallel"},
        "own, two processes, stacked": {"loop": {"clients_at_once": half}, "strategy": "client_parallel"},
        "sft, two processes, stacked": {
            "loop": {"clients_at_once": half},
            "strategy": "client_parallel",
            "module": "sft",
        },
    }
    others: dict[str, Callable[[list[int], Turns], None]] = {
        "by hand": lambda size, turns: by_hand(settings, size, turns),
        "by hand, full": lambda size, turns: by_hand(settings, size, turns, full=True),
        "pfl": lambda size, turns: with_pfl(settings, size, turns),
        "flower": lambda size, turns: with_flower(settings, size, turns),
    }
    return others | {
        name: (lambda size, turns, options=options: with_lightning(settings, size, turns, **options))
        for name, options in lightning.items()
    }


def main() -> None:
    """Trains all sizes in turns."""
    name, settings = sys.argv[1], Settings(**json.loads(sys.argv[2]))
    warnings.filterwarnings("ignore")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if name == "make":
        print("@", save_model(settings))
        return
    import peft  # noqa: F401
    from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401

    way, turns = ways(settings)[name], Turns()
    print("@ 0", flush=True)
    for size in settings.sizes:
        turns.begin()
        way(size, turns)
        turns.end()


if __name__ == "__main__":
    main()
