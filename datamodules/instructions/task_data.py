"""Rows of tasks as a test set, for scores in ``fedlight test`` and, where wanted, for the loss on right answers.

The callback ``TaskScores`` computes the scores of its tasks, else of the datamodule's. The loss takes a pass over all rows;
it still differs between models whose answers are all wrong or all right.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import TensorDataset

from fedlight.datamodules.federated.datamodule import FederatedDataModule
from fedlight.datamodules.rows.given import refuse_too_long
from fedlight.datamodules.text.encoding import Encoded
from fedlight.datamodules.text.examples import ResponseExamples, collate_responses
from fedlight.datamodules.text.tokens import Parts, TokenTable, end_id, end_ids, fit_texts, pad_id
from fedlight.evaluation.tasks.task import Task
from fedlight.pretrained.hub import load_tokenizer
from fedlight.pretrained.openings import openings


class TaskDataModule(FederatedDataModule):
    """Prompts of tasks with right answers, for ``trainer.test``.

    Args:
        tasks: name -> task; the names label the logged scores.
        tokenizer: hub name or folder, or ``"toy"``.
        max_tokens: most tokens of prompt and answer together; longer examples have a score but are left out of the loss,
            and counted.
        loss: also compute the loss on right answers; without it the test set is one empty batch.
        eval_batch_size, seed, num_workers: see `FederatedDataModule`.

    Raises:
        ValueError: there is no task.
    """

    def __init__(
        self,
        tasks: dict[str, Task],
        tokenizer: str = "toy",
        max_tokens: int = 2048,
        loss: bool = False,
        eval_batch_size: int = 16,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(eval_batch_size=eval_batch_size, seed=seed, num_workers=num_workers)
        if not tasks:
            raise ValueError("tasks={}: name one or more")
        self.tasks, self.tokenizer_name, self.max_tokens = tasks, tokenizer, max_tokens
        self.loss = loss

    def setup(self, stage: str) -> None:
        """Read and tokenize the rows, once; raise ValueError for a stage other than ``test``."""
        if stage != "test":
            raise ValueError(
                "TaskDataModule has test rows only: use `fedlight test`, or give the tasks to the callback TaskScores "
                "beside other data"
            )
        if self.test_set is not None:
            return
        if not self.loss:
            # One batch, which `collate` makes empty: Lightning calls no callback for a test set of nothing.
            self.test_set = TensorDataset(torch.empty(1))
            return
        self.tokenizer = load_tokenizer(self.tokenizer_name)
        pairs = [
            (prompt, prompt + task.data.continuation(example.shown, closed=True))
            for task in self.tasks.values()
            for _, example, prompt in zip(*task.read(self), strict=True)
        ]
        encoded = encode_answers(self.tokenizer, pairs, self.max_tokens)
        fits = np.flatnonzero(encoded.kept)
        names = ", ".join(self.tasks)
        rank_zero_info(f"{names}: {len(fits):,} examples; {len(pairs) - len(fits):,} too long for the loss")
        refuse_too_long(len(fits), "example", names, self.max_tokens)
        self.test_set = ResponseExamples(encoded, fits).by_length()

    def collate(self, examples: list[Any]) -> dict[str, Any]:
        """Return an sft batch, or an empty one without the loss."""
        return {} if not self.loss else collate_responses(examples, pad_id(self.tokenizer))


def encode_answers(tokenizer: Any, pairs: Sequence[tuple[str, str]], max_tokens: int) -> Encoded:
    """Return pairs of a prompt and the prompt with its answer as `encode_responses` encodes rows.

    ``max_tokens`` includes the end token, which follows a text without one; a chat template's text has one.
    """
    texts = [text for _, text in pairs]
    sequences, marks = [], []
    fitted = fit_texts(tokenizer, [Parts(text, "", "") for text in texts], max_tokens)
    ends = end_ids(tokenizer)
    for (prompt, _), leading, text in zip(pairs, openings(tokenizer, texts), fitted, strict=True):
        closed = text is not None and text.ids[-1] in ends  # a chat template's text is
        ids = [] if text is None else [*leading, *text.ids, *([] if closed else [end_id(tokenizer)])]
        fits = len(ids) <= max_tokens
        sequences.append(np.array(ids if fits else [], dtype=np.int32))
        marks.append(len(leading) + text.first_token_from(len(prompt)) if text is not None and fits else 0)
    table = TokenTable(sequences)
    return Encoded(table, np.array(marks, dtype=np.int64), table.lengths > 0, trimmed=0)
