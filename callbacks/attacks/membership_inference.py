"""Membership inference: separation of the clients' training rows from other rows by the model's losses.

A text that the tuned model prefers more than the raw one does was probably trained on. The score is the loss ratio

    mean token loss under the tuned model / mean token loss under the raw model (the adapter off),

lower for members: the likelihood ratio of Mireshghallah et al., "Quantifying Privacy Risks of Masked Language Models Using
Membership Inference Attacks", EMNLP 2022, https://arxiv.org/abs/2203.03929, in the form of Carlini et al., "Extracting
Training Data from Large Language Models", USENIX Security 2021, https://arxiv.org/abs/2012.07805. Three more scores use the
same likelihoods:

* ``loss``: the mean token loss itself, without a reference. Yeom et al., "Privacy Risk in Machine Learning", CSF 2018,
  https://arxiv.org/abs/1709.01604.
* ``min_k``: the mean loss of the 20 % of tokens with the highest one (`min_k_losses`). Shi et al., "Detecting Pretraining
  Data from Large Language Models", ICLR 2024, https://arxiv.org/abs/2310.16789.
* ``lira``: the difference of logit-scaled likelihoods under both models (`lira_scores`). Carlini et al., "Membership
  Inference Attacks From First Principles", IEEE S&P 2022, https://arxiv.org/abs/2112.03570.

A server that keeps its models sees the loss ratio of a text over the rounds. From the second attacked round on, its mean and
its slope (`Trajectories`) are scores of the server's model as well: after https://arxiv.org/abs/2509.20680.

The share of members found at few false alarms matters more than the mean (Carlini et al.). The papers on FedDCA and
FewFedPIT have no membership inference.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fedlight.callbacks.attacks.attack import (
    SCORING,
    Attack,
    Found,
    HoldsClientRows,
    render_prompts,
    without_planted,
)
from fedlight.evaluation.extraction import round_robin
from fedlight.evaluation.instruction_scores import mean_losses
from fedlight.evaluation.tasks.model import Likelihood, ScoresRaw
from fedlight.support.seeding import derive_seed

FALSE_ALARMS = (0.01, 0.1)
"""False positive rates at which the true positive rate is reported."""

MIN_K = 20
"""Percentage of a text's tokens in Min-K%, as recommended by Shi et al."""

FEWER = "auc", f"tpr_at_{FALSE_ALARMS[0]:g}_fpr"
"""Metrics of the scores besides the loss ratio, which has all."""

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
    says. Metrics: ``auc`` of the loss ratio (chance: 0.5), ``tpr_at_0.01_fpr`` and ``tpr_at_0.1_fpr``; the first two of
    the other scores, as ``loss_auc``, ``lira_auc``, ``min_k_auc`` where the module gives likelihoods of tokens, and, for
    the server's model over the attacked rounds so far, ``rounds_mean_auc`` and ``rounds_slope_auc``; ``left_out``, the
    number of rows too long for the model.

    Args:
        examples: largest number of members, and of others.
        kwargs: further arguments of `Attack`: ``every_n_rounds``, ``targets``, ...

    Raises:
        ValueError: a setting is out of range; in ``setup``, the module or data lack a needed part, or there are no members
            or no others.
    """

    name: ClassVar[str] = "membership_inference"
    needs = SCORING

    def __init__(self, examples: int = 200, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.check_at_least_one(examples=examples)
        self.examples = examples
        self._trajectories = Trajectories()

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
        if self._rounds_done == 0:
            self._trajectories = Trajectories()

    def attack(self, module: Any, client: str | None) -> Found:
        texts = self._texts(client)
        prompts = [text.prompt + self._template.continuation(text.response) for text in texts]
        kept = self._keep_fitting(module, texts, prompts, 0, client)
        left_out = {"left_out": float(len(texts) - len(kept))}
        members = sum(text.member for text in kept)
        if not 0 < members < len(kept):  # an AUC needs some of both
            return Found(left_out, [])
        likelihoods = self._likelihoods(module, kept, raw=False)
        losses = mean_losses(likelihoods).tolist()
        # The raw model never changes. One list per target, since another batch rounds the same text differently.
        if client not in self._references:
            self._references[client] = mean_losses(self._likelihoods(module, kept, raw=True)).tolist()
        references = self._references[client]
        scores = {
            "ratio": loss_ratios(losses, references).tolist(),
            "loss": losses,
            "lira": lira_scores(losses, references).tolist(),
        }
        by_token = [likelihood.token_log_probs for likelihood in likelihoods]
        if all(by_token):
            scores["min_k"] = min_k_losses(by_token)
        records = [
            {**text._asdict(), "reference": reference, **dict(zip(scores, values, strict=True))}
            for text, reference, *values in zip(kept, references, *scores.values(), strict=True)
        ]
        if client is None:
            self._trajectories.add(self._rounds_done, scores["ratio"])
            scores |= self._trajectories.scores()
        rates = {name: membership_metrics(each[:members], each[members:]) for name, each in scores.items()}
        metrics = rates.pop("ratio")
        metrics |= {f"{name}_{rate}": each[rate] for name, each in rates.items() for rate in FEWER}
        return Found({**metrics, **left_out}, records)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the base class, and the sums over the attacked rounds."""
        return {**super().state_dict(), "trajectories": self._trajectories.sums}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._trajectories = Trajectories(state_dict.get("trajectories"))

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

    def _likelihoods(self, module: ScoresRaw, texts: Sequence[Candidate], raw: bool) -> list[Likelihood]:
        """Return the likelihood of each response."""
        responses = [[self._template.continuation(text.response)] for text in texts]
        scored = module.log_likelihoods([text.prompt for text in texts], responses, raw=raw)
        return [likelihood for [likelihood] in scored]


class Trajectories:
    """Means and slopes of a score of each text over rounds, from running sums.

    Examples:
        >>> over_rounds = Trajectories()
        >>> over_rounds.add(1, [1.0, 1.0])
        >>> over_rounds.scores()
        {}
        >>> over_rounds.add(3, [0.5, 1.0])
        >>> over_rounds.scores()
        {'rounds_mean': [0.75, 1.0], 'rounds_slope': [-0.25, 0.0]}
    """

    def __init__(self, sums: Sequence[Sequence[float]] | None = None) -> None:
        self.sums = [list(part) for part in sums or ([0.0, 0.0, 0.0], [], [])]
        """Number of rounds, sums of rounds and of their squares; for each text sums of scores, and of round times score."""

    def add(self, round_idx: int, scores: Sequence[float]) -> None:
        """Add the scores of a round, ``(texts,)``; raise ValueError where earlier rounds have another number of texts."""
        moments, totals, products = self.sums
        if moments[0] and len(scores) != len(totals):
            raise ValueError(
                f"MembershipInference has {len(scores)} rows, and had {len(totals)} in the rounds before: go on with the "
                "examples and data of the checkpoint"
            )
        values = np.asarray(scores)
        before = np.array([totals, products]) if moments[0] else np.zeros((2, len(values)))
        self.sums = [
            [moments[0] + 1, moments[1] + round_idx, moments[2] + round_idx**2],
            (before[0] + values).tolist(),
            (before[1] + round_idx * values).tolist(),
        ]

    def scores(self) -> dict[str, list[float]]:
        """Return ``rounds_mean`` and ``rounds_slope``, the least-squares slope by round, each ``(texts,)``, low for members.

        Empty before the second round.
        """
        (number, rounds, squares), totals, products = self.sums
        spread = number * squares - rounds**2
        if spread == 0:
            return {}
        slopes = (number * np.array(products) - rounds * np.array(totals)) / spread
        return {"rounds_mean": (np.array(totals) / number).tolist(), "rounds_slope": slopes.tolist()}


def loss_ratios(losses: Sequence[float], references: Sequence[float]) -> np.ndarray:
    """Return each text's loss over its loss under the reference model, ``(texts,)``, above 0; low for members.

    Both are mean token losses of the same texts, in nats. Raises ValueError for a negative or undefined loss.

    Examples:
        >>> loss_ratios([0.5, 2.0, 0.0], [2.0, 2.0, 0.0]).tolist()
        [0.25, 1.0, 1.0]
    """
    attacked, reference = _at_least(losses, references)  # 0 / 0 is 1
    return np.asarray(attacked / reference)


def min_k_losses(token_log_probs: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean loss of the `MIN_K` % least likely tokens of each text, rounded up; low for members.

    Equation 1 of Shi et al. with the opposite sign, in nats; each text has a token.

    Examples:
        >>> min_k_losses([[-1.0, -4.0, -2.0], [-1.0, -4.0, -2.0, -0.5, -0.5, -3.0]])
        [4.0, 3.5]
    """
    means = []
    for log_probs in token_log_probs:
        number = -(-MIN_K * len(log_probs) // 100)  # rounded up, exactly
        means.append(-sum(sorted(log_probs)[:number]) / number)
    return means


def lira_scores(losses: Sequence[float], references: Sequence[float]) -> np.ndarray:
    """Return the logit of each text's likelihood under the reference model minus that under the attacked one, ``(texts,)``.

    The offline attack of Carlini et al. with one model without the text and one variance for all texts: its test orders
    texts by this difference, low for members. The likelihood is ``p = exp(-loss)``, its logit ``log(p / (1 - p))``. Losses
    are mean token losses of the same texts, in nats. Raises ValueError for a negative or undefined loss.

    Examples:
        >>> lira_scores([0.5, 2.0, 0.0], [2.0, 2.0, 0.0]).round(3).tolist()
        [-2.287, 0.0, 0.0]
    """
    pairs = _at_least(losses, references)
    attacked, reference = pairs + np.log(-np.expm1(-pairs))  # minus the logit
    return np.asarray(attacked - reference)


def _at_least(losses: Sequence[float], references: Sequence[float]) -> np.ndarray:
    """Return both losses, `LEAST_LOSS` where one is smaller, ``(2, texts)``."""
    pairs = np.array([losses, references], dtype=np.float64)
    if not (pairs >= 0).all():
        raise ValueError("a mean token loss is negative or not a number: the attacked model is broken")
    return np.asarray(np.maximum(pairs, LEAST_LOSS))


def membership_metrics(members: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """Return how well a score, low for members, separates them from others, at least one of each.

    Chance is 0.5 for ``auc``, the rate itself for the rest.

    Returns:
        ``auc``, the share of pairs (member, other) in the right order, ties counted half; ``tpr_at_0.01_fpr`` and
        ``tpr_at_0.1_fpr``, the share of members found by the best threshold that names at most such a share of the others.
        With fewer than 100 others the first of these allows none.

    Examples:
        >>> membership_metrics([0.1, 0.2, 0.9], [0.8, 1.0, 1.1, 1.2])
        {'auc': 0.916..., 'tpr_at_0.01_fpr': 0.666..., 'tpr_at_0.1_fpr': 0.666...}
    """
    from sklearn.metrics import roc_auc_score, roc_curve

    truth = np.repeat([1, 0], [len(members), len(others)])
    scores = -np.concatenate([members, others])  # scikit-learn expects high scores for members
    # A dropped threshold may be the best one below a rate.
    false, true, _ = roc_curve(truth, scores, drop_intermediate=False)
    rates = {f"tpr_at_{rate:g}_fpr": float(true[false <= rate].max()) for rate in FALSE_ALARMS}
    return {"auc": float(roc_auc_score(truth, scores)), **rates}
