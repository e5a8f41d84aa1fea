"""Cost of self-generation: texts made and scored in batches against one by one, and the part of a round beside the model.

In FewFedPIT (Z. Zhang et al., https://arxiv.org/abs/2403.06131) each client of a round has the model write candidates
and score them before it trains on the best. Measured here on a few rounds of a real federation:

* share: the seconds of the rounds by their use. ``writing`` (generate), ``scoring`` (log-likelihoods) and
  ``training`` (forward, backward, optimizer step) are the model's; ``filters`` is what else it takes to make and choose
  candidates (prompts, parsing, ROUGE-L, files), and ``rest`` all other: the loop, the wire, loading of batches, Lightning.
* speed: the calls that the rounds made, once more, unchanged and as a loop of calls with one prompt each. Both
  take turns in one run, so that a noisy machine disturbs them alike; seconds are medians. Tokens are those written, or,
  of scoring, those read. ``same`` is the share of texts that are equal either way (a padded batch rounds
  differently, so a token can turn over), ``error`` the largest difference of a text's mean log-probability per token.

Run: OMP_NUM_THREADS=1 python benchmarks/self_generation.py [--model FOLDER] [--rounds 3] [--json FILE]
"""

import argparse
import json
import logging
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch

from fedlight.callbacks.loop.federated_loop import FederatedLoop
from fedlight.datamodules.clients.partition import Partition
from fedlight.datamodules.rows.split import Split
from fedlight.datamodules.synthesis.datamodule import SyntheticInstructionDataModule
from fedlight.datamodules.synthesis.prompts import InstructionPrompt, ResponsePrompt, SelfGenerationPrompts
from fedlight.datamodules.synthesis.self_generation import NewInstructions, NewResponses, SelfGeneration
from fedlight.federation.algorithms.self_made.fewfedpit import FewFedPIT
from fedlight.modules.language.adapters import Lora
from fedlight.modules.language.scoring import encode_continuations
from fedlight.modules.sft import SFTModule
from fedlight.toy.instructions import TEMPLATE

TRAINER: dict[str, Any] = {"accelerator": "cpu", "logger": False, "limit_val_batches": 0}
TRAINER |= dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
MODEL_PARTS = ("writing", "scoring", "training")

Ask = Callable[..., list[Any]]
Call = tuple[list[str], tuple[Any, ...], dict[str, Any]]  # prompts, further arguments, named arguments


class Clock:
    """Seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What happens inside counts."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start


class TimedModule(SFTModule):
    """Keeps the time that the model takes, and the calls for text and for likelihoods."""

    def watch(self, clock: Clock) -> None:
        """From now on."""
        self.clock, self.written, self.scored = clock, list[Call](), list[Call]()

    def generate(self, prompts: Sequence[str], *more: Any, **named: Any) -> Any:
        """As before."""
        self.written.append((list(prompts), more, named))
        with self.clock.part("writing"):
            return super().generate(prompts, *more, **named)

    def log_likelihoods(self, prompts: Sequence[str], *more: Any, **named: Any) -> Any:
        """As before."""
        self.scored.append((list(prompts), more, named))
        with self.clock.part("scoring"):
            return super().log_likelihoods(prompts, *more, **named)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """As before."""
        with self.clock.part("training"):
            return super().training_step(batch, batch_idx)

    def backward(self, loss: Any, *more: Any, **named: Any) -> None:
        """As before."""
        with self.clock.part("training"):
            super().backward(loss, *more, **named)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        """As before; the closure's work counts by itself."""

        def counted() -> Any:
            with self.clock.part("closure"):
                return closure()

        with self.clock.part("step"):
            super().optimizer_step(epoch, batch_idx, optimizer, counted)


PROMPTS = SelfGenerationPrompts(
    InstructionPrompt(
        begin="",
        example="POST : {instruction} {input}\n",
        end="POST :",
        stop=("\nPOST",),
        pattern="(?P<instruction>.*)",
    ),
    ResponsePrompt(
        begin="",
        example_with_input="POST : {instruction} {input}\nCHOICE : {response}\n",
        example_without_input="POST : {instruction}\nCHOICE : {response}\n",
        end="POST : {instruction}\nCHOICE :",
        stop=("\nPOST",),
        pattern="(?P<response>.*)",
    ),
)
"""In the words of the embedded world."""

ANY_TEXT: dict[str, Any] = {"max_rouge_l": 1.0, "temperature": 3.0, "keep_cut": True}
"""What a text says costs nothing; hot, since the tiny model says the same again and again."""


def timed_data(clock: Clock, options: argparse.Namespace) -> SyntheticInstructionDataModule:
    """Clients of the embedded world; making and choosing candidates counts as ``candidates``, the model's part included."""

    class TimedData(SyntheticInstructionDataModule):
        def synthesize(self, *more: Any, **named: Any) -> None:
            with clock.part("candidates"):
                super().synthesize(*more, **named)

        def choose(self, *more: Any, **named: Any) -> None:
            with clock.part("candidates"):
                super().choose(*more, **named)

    return TimedData(
        source=f"toy:instructions?client_rows={options.client_rows}",
        columns={"instruction": "instruction", "input": "input", "response": "output", "client": "client"},
        template=TEMPLATE,
        tokenizer=options.model,
        max_tokens=128,
        partition=Partition(by="client"),
        split=Split(val_share=0),
        batch_size=8,
        keep=options.number // 2,
        synthesis=SelfGeneration(
            number=options.number,
            instructions=NewInstructions(max_new_tokens=options.new_tokens, min_words=1),
            responses=NewResponses(max_new_tokens=options.new_tokens),
            batch_size=options.batch_size,
            prompts=PROMPTS,
            **ANY_TEXT,
        ),
    )


class Rounds(L.Callback):
    """Counts the seconds of the rounds, with the planning and loading between them."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The model and the data are there; next the loop prepares the first round."""
        self.start = time.perf_counter()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The last round is over."""
        self.clock.seconds["all"] += time.perf_counter() - self.start


def run_rounds(options: argparse.Namespace) -> tuple[TimedModule, dict[str, Any]]:
    """A federation by FewFedPIT: its module, and the seconds and shares of the parts of its rounds."""
    clock = Clock()
    module = TimedModule(options.model, lora=Lora(rank=16, dropout=0), lr=0.001, dtype="fp32")
    module.watch(clock)
    module.configure_model()  # no measured time includes reading the model
    data = timed_data(clock, options)
    loop = FederatedLoop(algorithm=FewFedPIT(), clients_per_round=options.clients)
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            max_epochs=options.rounds,
            default_root_dir=folder,
            callbacks=[Rounds(clock), loop],
            **TRAINER,
        )
        trainer.fit(module, datamodule=data)
    counts = {name: int(value) for name, value in data.synthesis_metrics().items()}
    return module, {**parts_of(clock), "counts": counts}


def parts_of(clock: Clock) -> dict[str, Any]:
    """Seconds by part, their share of all of them, and the share of all parts but the model's."""
    seconds = {name: clock.seconds[name] for name in MODEL_PARTS}
    seconds["training"] += clock.seconds["step"] - clock.seconds["closure"]
    seconds["filters"] = clock.seconds["candidates"] - seconds["writing"] - seconds["scoring"]
    seconds["rest"] = clock.seconds["all"] - sum(seconds.values())
    shares = {name: value / clock.seconds["all"] for name, value in seconds.items()}
    return {"seconds": seconds, "shares": shares, "not_model": shares["filters"] + shares["rest"]}


def together(ask: Ask, call: Call) -> list[Any]:
    """As it was asked."""
    prompts, more, named = call
    return ask(prompts, *more, **named)


def one_by_one(ask: Ask, call: Call) -> list[Any]:
    """As a loop of calls with one prompt each; what ``more`` there is, is a list with an entry for each prompt."""
    prompts, more, named = call
    return [
        answer
        for one in zip(prompts, *more, strict=True)
        for answer in ask(*([part] for part in one), **named)
    ]


def compare(ask: Ask, calls: Sequence[Call], repeats: int) -> tuple[dict[str, float], dict[str, list[Any]]]:
    """Median seconds of all calls, asked in both ways by turns, and the answers."""
    ways = {"batched": together, "loop": one_by_one}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    answers: dict[str, list[Any]] = {}
    for _ in range(repeats):
        for way, asked in ways.items():
            start = time.perf_counter()
            answers[way] = [answer for call in calls for answer in asked(ask, call)]
            seconds[way].append(time.perf_counter() - start)
    return {way: statistics.median(times) for way, times in seconds.items()}, answers


def compare_writing(module: TimedModule, options: argparse.Namespace) -> dict[str, Any]:
    """Greedy, as drawn texts depend on what else is in a batch."""
    calls = [(prompts, more, {**named, "temperature": 0.0}) for prompts, more, named in module.written]
    seconds, answers = compare(super(TimedModule, module).generate, calls, options.repeats)
    texts = {way: [text for (text,) in found] for way, found in answers.items()}
    ids = {way: module.tokenizer(of, add_special_tokens=False)["input_ids"] for way, of in texts.items()}
    written = {way: sum(map(len, of)) for way, of in ids.items()}
    equal = [one == other for one, other in zip(*texts.values(), strict=True)]
    return _row("writing", len(equal), seconds, written, {"same": sum(equal) / len(equal)})


def compare_scoring(module: TimedModule, options: argparse.Namespace) -> dict[str, Any]:
    """Texts that the calls read to choose the best: each after its prompt, and each by itself."""
    seconds, answers = compare(super(TimedModule, module).log_likelihoods, module.scored, options.repeats)
    pairs = [
        (prompt, text)
        for prompts, (continuations, *_), _ in module.scored
        for prompt, own in zip(prompts, continuations, strict=True)
        for text in own
    ]
    read = sum(len(text.ids) for text in encode_continuations(module.tokenizer, pairs))
    means = {way: [one.log_prob / one.tokens for found in of for one in found] for way, of in answers.items()}
    error = max(abs(one - other) for one, other in zip(*means.values(), strict=True))
    return _row("scoring", len(pairs), seconds, dict.fromkeys(seconds, read), {"error": error})


def _row(
    name: str, number: int, seconds: dict[str, float], tokens: dict[str, int], more: dict[str, float]
) -> dict[str, Any]:
    speeds = {f"{way}_tokens_per_second": tokens[way] / seconds[way] for way in seconds}
    faster = speeds["batched_tokens_per_second"] / speeds["loop_tokens_per_second"]
    return {"what": name, "texts": number, "tokens": tokens["batched"], **speeds, "faster": faster, **more}


def print_tables(rounds: dict[str, Any], rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    """The rounds by their parts, then both ways of asking."""
    print(f"{options.rounds} rounds of {options.clients} clients: not the model's {rounds['not_model']:.1%}")
    for name, share in rounds["shares"].items():
        print(f"  {name:10}{rounds['seconds'][name]:9.2f} s{share:8.1%}")
    print(f"  {'':10}{'texts':>8}{'tokens':>10}{'batched, tokens/s':>20}{'one by one':>14}{'faster':>9}")
    for row in rows:
        speeds = f"{row['batched_tokens_per_second']:20,.0f}{row['loop_tokens_per_second']:14,.0f}"
        same = f"same {row['same']:.1%}" if "same" in row else f"error {row['error']:.0e}"
        print(f"  {row['what']:10}{row['texts']:8,}{row['tokens']:10,}{speeds}{row['faster']:7.1f} x  {same}")


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the shares of a round and the speeds of both ways of asking."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="toy", help="toy, or a folder")
    sizes = {"rounds": 3, "clients": 2, "number": 32, "client_rows": 20, "new_tokens": 24, "batch_size": 16}
    for name, value in (sizes | {"repeats": 3}).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--json", type=Path, help="writes the figures to this file")
    options = parser.parse_args(argv)
    print(f"{options.model}, {options.number} candidates for each client, {torch.get_num_threads()} threads")
    module, rounds = run_rounds(options)
    rows = [compare_writing(module, options), compare_scoring(module, options)]
    print_tables(rounds, rows, options)
    if options.json:
        found = {"model": options.model, "rounds": rounds, "rows": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    main()
