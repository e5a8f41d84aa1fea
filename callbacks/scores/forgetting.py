"""Losses in general knowledge and language by tuning: the raw model beside the tuned one.

Texts and questions were written for this package, far from most training data. They are few: a model that has lost a quarter
of its knowledge shows it, one that has lost a hundredth does not.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import lightning as L
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng

from fedlight.callbacks.logs.trainer import log_now
from fedlight.evaluation.tasks.model import Likelihood, ScoresRaw
from fedlight.processes.work import once
from fedlight.support.checks import Checked

TEXTS = (
    "The bus was late again, so we walked along the river to the market. By the time we arrived, most of the bread "
    "was gone, but the woman at the corner stall had kept two loaves for us. She asked about my brother, and I told"
    " her that he had found work in a bakery on the coast.",
    "To plant a young tree, dig a hole that is twice as wide as its roots and no deeper. Loosen the soil at the "
    "sides, set the tree upright, and fill the hole again with the earth you took out. Water it slowly until the "
    "ground is soft, and keep the grass away from the stem for the first two years.",
    "The council met on Tuesday evening to discuss the new bridge. Several speakers said that the old one was safe "
    "for bicycles but too narrow for lorries. After two hours the members voted, nine to four, to ask an engineer "
    "for a report before any money is spent.",
    "Water boils at a lower temperature on a high mountain than at the sea, because the air presses less strongly "
    "on its surface. Rice therefore takes longer to cook there. People who live in the mountains often use pots "
    "with a tight lid, which keep the steam inside.",
    "My grandmother kept her letters in a tin box under the bed. When the roof leaked one winter, the box filled "
    "with water and the ink ran into blue clouds. She dried the pages on a line in the kitchen and said that she "
    "knew most of them by heart anyway.",
    "A good map leaves things out. It does not show every stone or every tree, only what helps a traveller to "
    "decide which way to go. Whoever draws one must therefore know who will use it: a sailor needs the depth of the"
    " water, a walker the steepness of the path.",
    "The two teams had played each other many times, and nobody expected a surprise. Then, ten minutes before the "
    "end, the youngest player on the field took the ball from the captain, ran past three defenders and scored. The"
    " crowd was silent for a moment before it began to sing.",
    "Prices rose a little in spring, mostly because fruit and vegetables became more expensive after the frost. "
    "Clothes and furniture cost about the same as a year before. Shops reported that customers bought less meat and"
    " more eggs, and that they came more often but spent less each time.",
)
"""Eight short texts of everyday language."""

TABLE = """The capital of France is|Paris|Madrid|Berlin|Vienna
The capital of Japan is|Tokyo|Seoul|Beijing|Bangkok
The capital of Italy is|Rome|Athens|Paris|Lisbon
The capital of Egypt is|Cairo|Tunis|Nairobi|Baghdad
The capital of Russia is|Moscow|Warsaw|Kiev|Prague
The capital of Canada is|Ottawa|Boston|Chicago|Lima
The river that flows through London is the|Thames|Danube|Nile|Amazon
The longest river in Egypt is the|Nile|Rhine|Ganges|Volga
The highest mountain in the world is Mount|Everest|Fuji|Etna|Olympus
The largest ocean on Earth is the|Pacific|Atlantic|Indian|Arctic
The planet closest to the sun is|Mercury|Saturn|Jupiter|Neptune
The planet known for its rings is|Saturn|Mars|Venus|Mercury
The planet that is called the red planet is|Mars|Uranus|Saturn|Earth
The number of days in a week is|seven|five|nine|twelve
The number of months in a year is|twelve|ten|seven|thirty
The number of legs that a spider has is|eight|two|four|ten
Two plus two equals|four|three|five|seven
The opposite of hot is|cold|warm|loud|fast
The opposite of up is|down|left|over|far
The opposite of day is|night|week|sun|hour
The color of the sky on a clear day is|blue|green|brown|purple
The color of fresh grass is|green|red|blue|black
The color of snow is|white|black|orange|purple
A baby cat is called a|kitten|puppy|calf|foal
A baby dog is called a|puppy|kitten|lamb|chick
The animal that gives us wool is the|sheep|fish|snake|eagle
Bees make|honey|milk|bread|wool
Water freezes into|ice|steam|sand|oil
The gas that people need to breathe is|oxygen|helium|neon|chlorine
The chemical formula of water is|H2O|CO2|NaCl|O2
The organ that pumps blood through the body is the|heart|liver|stomach|skin
People see with their|eyes|ears|hands|feet
The author of Romeo and Juliet is William|Shakespeare|Wordsworth|Faulkner|Blake
The first president of the United States was George|Washington|Lincoln|Churchill|Kennedy
The scientist who developed the theory of relativity is Albert|Einstein|Newton|Darwin|Galileo
The language spoken in Brazil is|Portuguese|German|Russian|Chinese
The language spoken in Mexico is|Spanish|Dutch|Japanese|Arabic
The currency of Japan is the|yen|euro|dollar|pound
The season after winter is|spring|autumn|summer|night
A person who teaches at a school is called a|teacher|doctor|farmer|sailor"""


class Question(NamedTuple):
    """Beginning of a sentence, and its possible last words, the right one first."""

    prompt: str
    choices: list[str]


QUESTIONS = tuple(
    Question(prompt, choices) for prompt, *choices in (line.split("|") for line in TABLE.splitlines())
)
"""Forty questions of common knowledge."""


def perplexity(likelihoods: Sequence[Likelihood]) -> float:
    """Return the perplexity of texts for each token, from 1.

    Examples:
        >>> round(perplexity([Likelihood(math.log(1 / 4), 1, False), Likelihood(math.log(1 / 4), 1, False)]), 9)
        4.0
    """
    tokens = sum(text.tokens for text in likelihoods)
    return math.exp(-math.fsum(text.log_prob for text in likelihoods) / tokens)


def known(likelihoods: Sequence[Sequence[Likelihood]]) -> list[bool]:
    """Return for each question whether its first choice, the right one, is likelier than every other.

    Examples:
        >>> known([[Likelihood(-1.0, 1, True), Likelihood(-2.0, 1, False)], [Likelihood(-1.0, 1, True)] * 2])
        [True, False]
    """
    return [all(choices[0].log_prob > other.log_prob for other in choices[1:]) for choices in likelihoods]


class Forgetting(Checked, L.Callback):
    """Lightning callback that measures, after ``fit`` and in ``test``, the general knowledge of the tuned and the raw model.

    It logs ``forgetting/perplexity`` on eight short texts of everyday language and ``forgetting/knowledge``, the share of
    forty questions of common knowledge whose right answer is the likeliest of four, each with ``_raw`` for the model without
    the adapter. All of it is in English.

    Raises:
        ValueError: in ``setup``, the module returns no likelihoods.
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse a module that cannot be measured before any work."""
        if not isinstance(pl_module, ScoresRaw):
            raise ValueError(
                f"Forgetting needs a module with log_likelihoods(prompts, continuations, raw), such as SFTModule, not "
                f"{type(pl_module).__name__}: take it out"
            )

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        log_now(trainer, once(lambda: measure(pl_module), forward=True))  # type: ignore[arg-type]

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.log_dict(once(lambda: measure(pl_module), forward=True))  # type: ignore[arg-type]


def measure(module: ScoresRaw) -> dict[str, float]:
    """Return perplexity and knowledge of a module's tuned and raw model, by their logged names."""
    values: dict[str, float] = {}
    right: dict[str, list[bool]] = {}
    with isolate_rng():  # the run goes on as if nothing had been measured
        for suffix, raw in (("", False), ("_raw", True)):
            texts = module.log_likelihoods([""] * len(TEXTS), [[text] for text in TEXTS], raw=raw)
            values[f"forgetting/perplexity{suffix}"] = perplexity([likelihood for [likelihood] in texts])
            endings = [[f" {choice}" for choice in question.choices] for question in QUESTIONS]
            answers = module.log_likelihoods([question.prompt for question in QUESTIONS], endings, raw=raw)
            right[suffix] = known(answers)
            values[f"forgetting/knowledge{suffix}"] = sum(right[suffix]) / len(QUESTIONS)
    lost = [
        f"{question.prompt} {question.choices[0]}"
        for question, after, before in zip(QUESTIONS, right[""], right["_raw"], strict=True)
        if before and not after
    ]
    rank_zero_info(
        f"forgetting: perplexity {values['forgetting/perplexity_raw']:.2f} raw, {values['forgetting/perplexity']:.2f} tuned"
        f"; {sum(right['_raw'])} of {len(QUESTIONS)} questions known raw, {sum(right[''])} tuned"
        + (f"; lost: {', '.join(lost)}" if lost else "")
    )
    return values
