"""Membership inference: separation of the clients' training rows from other rows by the model's losses.

A text that the tuned model prefers more than the raw one does was probably trained on. The score is the loss ratio

    mean token loss under the tuned model / mean token loss under the raw model (the adapter off),

lower for members: the likelihood ratio of Mireshghallah et al., "Quantifying Privacy Risks of Masked Language Models Using
Membership Inference Attacks", EMNLP 2022, https://arxiv.org/abs/2203.03929, in the form of Carlini et al., "Extracting
Training Data from Large Language Models", USENIX Security 2021, https://arxiv.org/abs/2012.07805. Without a reference
the score is the loss itself: Yeom et al., "Privacy Risk in Machine Learning", CSF 2018, https://arxiv.org/abs/1709.01604.
The share of members found at few false alarms matters more than the mean: Carlini et al., "Membership Inference Attacks
From First Principles", IEEE S&P 2022, https://arxiv.org/abs/2112.03570. The papers on FedDCA and FewFedPIT do not have it.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fedlight.callbacks.attacks.attack import (
    Attack,
    Found,
    HoldsClientRows,
    ScoresTexts,
    render_prompts,
    without_planted,
)
from fedlight.evaluation.extraction import round_robin
from fedlight.support.seeding import derive_seed

FALSE_ALARMS = (0.01, 0.1)
"""False positive rates at which the true positive rate is reported."""

LEAST_LOSS = 1e-6
"""Mean token losses below it are rounding only; a text that is certain under both models has ratio 1."""


class Candidate(NamedTuple):
    """Response after its prompt, of a row that ``client`` trained on (``member``), or no client (client "")."""

    member: bool
    client: str
    prompt: str
    response: str


class MembershipInference(Attack):
    """Attack that guesses from the model's losses which rows it was trained on.

    Members are training rows of different clients in turn, or of an upload's client, without planted canaries. The others
    are validation rows, or test rows where there is no validation: the more they resemble the members, the more the result
    says. Metrics: ``auc`` of the loss ratio (chance: 0.5), ``tpr_at_0.01_fpr`` and ``tpr_at_0.1_fpr``, ``loss_auc``, the
    AUC of the loss alone, and ``left_out``, the number of rows too long for the model.

    Args:
        examples: largest number of members, and of others.
        kwargs: further arguments of `Attack`: ``every_n_rounds``, ``targets``, ...

    Raises:
        ValueError: a setting is out of range; in ``setup``, the module or data lack a needed part, or there are no members
            or no others.
    """

    name: ClassVar[str] = "membership_inference"

    def __init__(self, examples: int = 200, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.check_at_least_one(examples=examples)
        self.examples = examples

    def prepare(self, data: HoldsClientRows, module: Any) -> None:
        self._template, self._rows = data.template, without_planted(data)
        unseen = list(data.unseen_rows())
        if not unseen or not any(self._rows.values()):
            raise ValueError(
                "MembershipInference compares training rows with rows that nobody trained on, and there are none: set "
                "data.split.val_share above 0, or give data.split.test_source"
                if not unseen
                else "MembershipInference: no client has a row besides canaries, so there are no members"
            )
        self._unseen = self._draw_unseen(unseen, self.examples)
        self._references: dict[str | None, list[float]] = {}

    def attack(self, module: Any, client: str | None) -> Found:
        texts = self._texts(client)
        prompts = [text.prompt + self._template.continuation(text.response) for text in texts]
        kept = self._keep_fitting(module, texts, prompts, 0, client)
        left_out = {"left_out": float(len(texts) - len(kept))}
        members = sum(text.member for text in kept)
        if not 0 < members < len(kept):  # an AUC needs some of both
            return Found(left_out, [])
        losses = self._losses(module, kept, raw=False)
        # The raw model never changes. One list per target, since another batch rounds the same text differently.
        if client not in self._references:
            self._references[client] = self._losses(module, kept, raw=True)
        references = self._references[client]
        ratios = loss_ratios(losses, references).tolist()
        metrics = membership_metrics(ratios[:members], ratios[members:])
        metrics["loss_auc"] = membership_metrics(losses[:members], losses[members:])["auc"]
        records = [
            {**text._asdict(), "loss": loss, "reference": reference, "ratio": ratio}
            for text, loss, reference, ratio in zip(kept, losses, references, ratios, strict=True)
        ]
        return Found({**metrics, **left_out}, records)

    def _texts(self, client: str | None) -> list[Candidate]:
        """Return the members, and the others after them."""
        by_client = self._rows if client is None else {client: self._rows[client]}
        members = round_robin(by_client, self.examples, derive_seed(self.seed, self.name))
        rows = [*members, *(("", row) for row in self._unseen)]
        prompts = render_prompts(self._template, [row for _, row in rows])
        return [
            Candidate(at < len(members), owner, prompt, row["response"])
            for at, ((owner, row), prompt) in enumerate(zip(rows, prompts, strict=True))
        ]

    def _losses(self, module: ScoresTexts, texts: Sequence[Candidate], raw: bool) -> list[float]:
        """Return the mean token loss of each response, in nats."""
        responses = [[self._template.continuation(text.response)] for text in texts]
        likelihoods = module.log_likelihoods([text.prompt for text in texts], responses, raw=raw)
        return [-likelihood.log_prob / likelihood.tokens for [likelihood] in likelihoods]


def loss_ratios(losses: Sequence[float], references: Sequence[float]) -> np.ndarray:
    """Return each text's loss over its loss under the reference model, ``(texts,)``, above 0; low for members.

    Both are mean token losses of the same texts, in nats. Raises ValueError for a negative or undefined loss.

    Examples:
        >>> loss_ratios([0.5, 2.0, 0.0], [2.0, 2.0, 0.0]).tolist()
        [0.25, 1.0, 1.0]
    """
    pairs = np.array([losses, references], dtype=np.float64)
    if not (pairs >= 0).all():
        raise ValueError("a mean token loss is negative or not a number: the attacked model is broken")
    attacked, reference = np.maximum(pairs, LEAST_LOSS)  # 0 / 0 is 1
    return np.asarray(attacked / reference)


def membership_metrics(members: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """Return how well a score separates members from others; chance is 0.5 for ``auc``, the rate itself for the rest.

    Args:
        members: scores of texts that were trained on, at least one; a low score marks a member.
        others: scores of texts that were not trained on, at least one.

    Returns:
        ``auc``, the share of pairs (member, other) in the right order, ties counted half; ``tpr_at_0.01_fpr`` and
        ``tpr_at_0.1_fpr``, the share of members found by the best threshold that names at most such a share of the others.
        With fewer than 100 others the first of these allows none.

    Examples:
        >>> membership_metrics([0.1, 0.2, 0.9], [0.8, 1.0, 1.1, 1.2])
        {'auc': 0.916..., 'tpr_at_0.01_fpr': 0.666..., 'tpr_at_0.1_fpr': 0.666...}
    """
    if not len(members) or not len(others):
        raise ValueError(f"{len(members)} members and {len(others)} others: membership needs some of both")
    from sklearn.metrics import roc_auc_score, roc_curve

    truth = np.repeat([1, 0], [len(members), len(others)])
    scores = -np.concatenate([members, others])  # scikit-learn expects high scores for members
    # A dropped threshold may be the best one below a rate.
    false, true, _ = roc_curve(truth, scores, drop_intermediate=False)
    rates = {f"tpr_at_{rate:g}_fpr": float(true[false <= rate].max()) for rate in FALSE_ALARMS}
    return {"auc": float(roc_auc_score(truth, scores)), **rates}
