"""Bridge to EleutherAI's lm-evaluation-harness: a module of fedlight with its adapter does the harness's tasks.

L. Gao et al., "The Language Model Evaluation Harness", https://github.com/EleutherAI/lm-evaluation-harness. The harness is
an extra: ``pip install fedlight[harness]``. From Python `run_harness` gives its results; from a shell::

    python -m fedlight.recipes.harness --model HUB_NAME --adapter FOLDER --tasks gsm8k arc_easy --limit 100

Deviations from the harness's own models: a token that spans the border of context and continuation counts as continuation,
the blank before a written text is kept with every tokenizer, and a request that is longer than the model is refused instead
of cut.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.seed import isolate_rng

from fedlight.modules.language.module import LanguageModule
from fedlight.modules.language.scoring import Scored, encode_pairs, score
from fedlight.support.console import one_line_errors
from fedlight.support.seeding import derive_seed

MISSING = "the lm-evaluation-harness is not installed: pip install 'fedlight[harness]'"
KNOWN = {"until", "max_gen_toks", "max_new_tokens", "do_sample", "temperature", "top_p"}


class HarnessModel:
    """Model interface of the harness, ``lm_eval.api.model.LM``, for a module of fedlight; ``seed``: of drawn texts."""

    def __init__(self, module: LanguageModule, batch_size: int = 16, seed: int = 0) -> None:
        super().__init__()
        module.configure_model()
        self.module, self.batch_size, self.seed = module, batch_size, seed

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return for each context and continuation the log-probability, and whether greedy decoding writes it."""
        texts = encode_pairs(self.module.tokenizer, [request.args for request in requests])
        return [(likelihood.log_prob, likelihood.greedy) for likelihood in self._score(texts)]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return the log-probability of each text, read in windows that do not overlap if it is too long."""
        windows = [
            windows_of(self.module.tokenizer, request.args[0], self.max_length) for request in requests
        ]
        each = iter(self._score([window for parts in windows for window in parts]))
        return [sum(next(each).log_prob for _ in parts) for parts in windows]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return for each context and its settings the generated text before the first stop."""
        alike: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            alike.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(index)
        texts: dict[int, str] = {}
        for settings, indices in alike.items():
            options = options_of(json.loads(settings))
            indices = sorted(indices, key=lambda index: -len(requests[index].args[0]))  # little padding
            for start in range(0, len(indices), self.batch_size):
                batch = indices[start : start + self.batch_size]
                prompts = [requests[index].args[0] for index in batch]
                seed = derive_seed(self.seed, "harness", *prompts)  # independent of other batches
                answers = self.module.generate(prompts, seed=seed, strip=False, **options)
                texts |= {index: answer for index, [answer] in zip(batch, answers, strict=True)}
        return [texts[index] for index in range(len(requests))]

    @property
    def max_length(self) -> int:
        """Number of tokens that the model can read."""
        return getattr(self.module.causal_lm.config, "max_position_embeddings", None) or 2048

    def _score(self, texts: Sequence[Scored]) -> list[Any]:
        return score(self.module.causal_lm, texts, self.batch_size, self.module.shared_prefix)


def windows_of(tokenizer: Any, text: str, max_length: int) -> list[Scored]:
    """Return a text in as few windows as possible, of at most ``max_length`` tokens.

    Each token is scored once, and the last window is filled with context. The text must not be empty.
    """
    from lm_eval.utils import get_rolling_token_windows

    [whole] = encode_pairs(tokenizer, [("", text)])
    [prefix, *ids] = whole.ids  # an opening or end token comes first
    windows = get_rolling_token_windows(ids, prefix_token=prefix, max_seq_len=max_length, context_len=1)
    return [Scored([*read, wanted[-1]], len(read) + 1 - len(wanted)) for read, wanted in windows]


def options_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the harness's ``gen_kwargs`` as arguments of ``generate``; ValueError where it has no such argument.

    Examples:
        >>> options_of({"until": ["Q:"], "max_gen_toks": 32, "temperature": 0.7})
        {'stop': ['Q:'], 'max_new_tokens': 32, 'temperature': 0.0, 'top_p': 1.0}
    """
    if unknown := sorted(set(settings) - KNOWN):
        raise ValueError(f"gen_kwargs has {unknown[0]!r}: fedlight knows {', '.join(sorted(KNOWN))}")
    until = settings.get("until") or []
    return {
        "stop": [until] if isinstance(until, str) else list(until),
        "max_new_tokens": settings.get("max_new_tokens", settings.get("max_gen_toks", 256)),
        # As in transformers, temperature and top_p count with do_sample alone.
        "temperature": float(settings.get("temperature", 1.0)) if settings.get("do_sample") else 0.0,
        "top_p": float(settings.get("top_p", 1.0)) if settings.get("do_sample") else 1.0,
    }


def run_harness(
    module: LanguageModule,
    tasks: Sequence[str],
    num_fewshot: int | None = None,
    limit: int | None = None,
    include: str | Path | None = None,
    batch_size: int = 16,
    seed: int = 0,
) -> dict[str, Any]:
    """Run tasks of the harness with a module.

    Args:
        module: the module with its adapter.
        tasks: names of the tasks in the harness.
        num_fewshot: examples before each question; None: the task's default.
        limit: number of first rows of each task; None: all.
        include: folder with YAML files of further tasks.
        batch_size: requests per batch.
        seed: seed of examples and drawn texts.

    Returns:
        The dict of ``lm_eval.simple_evaluate``: ``results`` by task, ``samples`` and more.

    Raises:
        ModuleNotFoundError: the harness is not installed.
        ValueError: there is no such task, or a request does not fit into the model.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.api.model import LM
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise ModuleNotFoundError(MISSING) from None
    # Reading the files of the harness's 14,000 tasks takes seconds; those of a folder alone take none.
    manager = TaskManager(include_path=None if include is None else str(include), include_defaults=False)
    if any(not manager.match_tasks([task]) for task in tasks):
        manager = TaskManager(include_path=None if include is None else str(include))
    if unknown := [task for task in tasks if not manager.match_tasks([task])]:
        raise ValueError(
            f"the harness has no task {unknown[0]!r}: `lm_eval ls tasks` lists them, include adds a folder"
        )
    bridge = type("Bridge", (HarnessModel, LM), {})  # made here: the package of LM may be missing
    with isolate_rng():  # simple_evaluate seeds the global streams
        results: dict[str, Any] = simple_evaluate(
            model=bridge(module, batch_size, seed),
            tasks=list(tasks),
            num_fewshot=num_fewshot,
            limit=limit,
            task_manager=manager,
            bootstrap_iters=0,
            **{f"{name}_seed": seed for name in ("random", "numpy_random", "torch_random", "fewshot_random")},
        )
    return results


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``python -m fedlight.recipes.harness``."""
    parser = argparse.ArgumentParser("fedlight.recipes.harness", description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="hub name, folder, or toy")
    parser.add_argument("--adapter", help="a folder of AdapterExport; without it the raw model is measured")
    parser.add_argument("--base", default="plain", help="plain, int8 or nf4")
    parser.add_argument("--tasks", nargs="+", required=True, help="names of the harness's tasks")
    parser.add_argument("--include", help="folder with tasks of your own")
    parser.add_argument("--num_fewshot", type=int, help="examples in front of each question")
    parser.add_argument("--limit", type=int, help="at most so many rows of each task")
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    given = parser.parse_args(argv)
    with one_line_errors():
        from fedlight.modules.sft import SFTModule

        module = SFTModule(given.model, base=given.base, adapter=given.adapter)
        measured = run_harness(
            module, given.tasks, given.num_fewshot, given.limit, given.include, given.batch_size
        )
        text = json.dumps(measured["results"], indent=2, default=str)
        print(text)
        if given.output is not None:
            given.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
