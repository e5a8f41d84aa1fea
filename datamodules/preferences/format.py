"""How two answers to a prompt are shown to a model: settings that YAML nests below ``format``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fedlight.datamodules.rows.poison import PoisonedVotes
from fedlight.datamodules.text.encoding import (
    Comparison,
    Encoded,
    encode_choice,
    encode_pair,
    encode_responses,
)
from fedlight.support.checks import Settings


@dataclass(frozen=True)
class Format(Settings):
    """Form, templates and choices of pairs; in YAML ``format: {form: pair, pair_template: ""}``.

    Args:
        form: form of the selector's input: ``"choice"`` for a causal model, ``"pair"`` for an encoder, ``"features"`` for
            frozen vectors of the two answers, without prompt, template and tokens (`FeatureSelectorModule`). Completions
            have ``"responses"`` instead of features, for a `RewardModule`: the pair's first completion as ``chosen``, its
            second as ``rejected``.
        choices: the two words of the form choice, each one token after ": "; give the module the same.
        choice_template: template of the view selector in form choice; a name or a text, see
            `fedlight.datamodules.text.templates`.
        pair_template: text before both answers in form pair; may be empty.
        generation_template: template of the views dpo and sft, and of the form responses.
        trim: slot to truncate in a prompt that is too long; ``"auto"``: the first of post, input, prompt and instruction;
            None: no slot, what does not fit is left out and counted.
        truncate_answers: in form pair, truncate answers if truncating the prompt is not enough; if False, drop the vote.
        encoder: encoder of the form features: folder or hub name of a sentence encoder, whose vectors are cached on disk, or
            ``hashed``, see `fedlight.datamodules.vectors.encoders`.
        choice_values: raw values that mean ``a``, ``b`` and ``tie``.
        twins_together: in view selector, put both orders of a comparison into the same batch. Gradient parts that do not
            distinguish A from B then cancel, and an encoder exceeds chance in a fraction of the steps.
        poison: clients that lie in their votes; completions have no votes. None: nobody.
    """

    form: Literal["choice", "pair", "features", "responses"] = "choice"
    choices: tuple[str, str] = ("A", "B")
    choice_template: str = "toy_choice"
    pair_template: str = "{prompt}"
    generation_template: str = "toy_generation"
    trim: str | None = "auto"
    truncate_answers: bool = False
    encoder: str = "hashed"
    choice_values: dict[str, Any] | None = None
    twins_together: bool = False
    poison: PoisonedVotes | None = None


def encode_comparisons(data: Any, form: str, comparisons: Sequence[Comparison]) -> Encoded:
    """Return two sequences of each comparison, by the tokenizer, the template and the limits of a datamodule."""
    tokenizer, template, most = data.tokenizer, data.template, data.max_tokens
    if form == "choice":
        return encode_choice(tokenizer, template, comparisons, most, data.choices)
    if form == "pair":
        return encode_pair(tokenizer, template, comparisons, most, data.truncate_answers)
    fields = [each.fields for each in comparisons for _ in range(2)]
    answers = [answer for each in comparisons for answer in (each.first, each.second)]
    return encode_responses(tokenizer, template, fields, answers, most, pairs=True)
