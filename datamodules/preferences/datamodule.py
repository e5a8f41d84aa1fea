"""Preference pairs and votes by client, for a selector, for DPO or for supervised fine-tuning.

F. Wu et al., "Towards Federated RLHF with Aggregated Client Preference for LLMs", ICLR 2025, https://arxiv.org/abs/2407.03038:
each pair is doubled into (x, yw, yl) with label A and (x, yl, yw) with label B (section 4), so a selector cannot win by
position. Deviation: the paper splits the doubled examples into training and validation (section 5.1); here pairs are split
first, so the two never share a pair, nor votes of one client on the same two answers.
"""

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, Literal

import numpy as np
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from fedlight.datamodules.clients.partition import Clients, Partition, by_key
from fedlight.datamodules.clients.splits import ClientSplit, label_examples, pool, reindex, share_out
from fedlight.datamodules.federated.datamodule import FederatedDataModule
from fedlight.datamodules.instructions.reports import SetupReport, padding_shares
from fedlight.datamodules.preferences.baselines import describe
from fedlight.datamodules.preferences.format import Format, encode_comparisons
from fedlight.datamodules.rows.columns import REPLIES, check_names, complete_columns, value_at
from fedlight.datamodules.rows.given import GivenRows, Source, refuse_too_long
from fedlight.datamodules.rows.poison import PoisonedVotes
from fedlight.datamodules.rows.rows import load_rows
from fedlight.datamodules.rows.split import Split
from fedlight.datamodules.rows.votes import VOTE_NAMES, Votes, map_groups, read_votes
from fedlight.datamodules.text.examples import (
    ChoiceExamples,
    Examples,
    FeatureExamples,
    PreferredExamples,
    ResponseExamples,
    collate_choices,
    collate_features,
    collate_preferred,
    collate_responses,
)
from fedlight.datamodules.text.templates import Template, check_choice, check_prompt
from fedlight.datamodules.text.tokens import check_known, draw_rows, pad_id, warn_of_control
from fedlight.datamodules.vectors.encoders import Encoder, HashedEncoder, SentenceEncoder
from fedlight.pretrained.hub import load_tokenizer
from fedlight.support.needs import Model, Need
from fedlight.support.settings_record import digest, made_of
from fedlight.support.types import Rows

ANSWERS = ("response_a", "response_b", "choice")
RANKED = ("chosen", "rejected")
TOY_VALUES = {"a": "a", "b": "b", "tie": "tie"}
SOURCE_STRIDE = 1 << 32  # above any number of votes, so that pairs of different sources never share an index


class PreferenceDataModule(FederatedDataModule):
    """Votes on two answers to a prompt, by client.

    Args:
        source: name of the rows' file, folder or data set, see `fedlight.datamodules.rows.rows`; in a program also the
            rows: a list of mappings from column to value, a DataFrame of pandas or a Dataset of ``datasets``.
        columns: column mapping; see `fedlight.datamodules.rows.columns`. The template's slots, the answers and the client
            that it leaves out are read from the columns of the same names. An empty name: the column is not to be read.
        view: ``"selector"``: both orders of every comparison, with the choice as label; ``"dpo"``: chosen and rejected;
            ``"sft"``: the chosen answer alone.
        tokenizer: hub name or folder, or ``"toy"``.
        max_tokens: most tokens of an input; at most the number of learned positions of the model.
        partition: assignment of votes to clients; None: by the column mapped to ``client``, or a single client without such
            a column.
        split: rows for validation and test, a share of each client's comparisons among them.
        format: how votes are read, shown and cut.
        batch_size, eval_batch_size, seed, num_workers: see `FederatedDataModule`.

    Attributes:
        test_votes: votes of the test set, without those that do not fit; None before ``setup("test")``.
    """

    def __init__(
        self,
        source: Source = "toy:votes",
        columns: dict[str, str] | None = None,
        view: Literal["selector", "dpo", "sft"] = "selector",
        tokenizer: str = "toy",
        max_tokens: int = 512,
        partition: Partition | None = None,
        split: Split = Split(),
        format: Format = Format(),
        batch_size: int = 32,
        eval_batch_size: int = 64,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, seed, num_workers)
        _check_form(format, view)
        twins_together = format.twins_together and view == "selector"
        if twins_together and batch_size % 2:
            raise ValueError(f"batch_size={batch_size} must be even with twins_together")
        self.examples_together = 2 if twins_together else 1
        self.train_rows, self.val_rows, self.test_rows = split.rows(source)
        self.columns = columns or {}
        self.choice_values = format.choice_values or TOY_VALUES
        self.view, self.form, self.truncate_answers = view, format.form, format.truncate_answers
        self.encoder = make_encoder(format.encoder) if format.form == "features" else None
        # A selector on features does not see an order, others are shown both.
        self.examples_each = 2 if view == "selector" and format.form != "features" else 1
        self.choices = format.choices
        self.template = self._choose_template(format)
        check_names(self.columns, (*VOTE_NAMES, *self.template.slots))
        self.tokenizer_name, self.max_tokens = tokenizer, max_tokens
        self.partition, self.holdout = partition, split.holdout
        self._is_by_client = partition is None or partition.by == "client"
        self.val_share, self.val_max = split.val_share, split.val_max
        self.poison = format.poison
        self.report: SetupReport | None = None
        self.test_votes: Votes | None = None

    @classmethod
    def requires(cls, settings: Mapping[str, Any]) -> Iterable[Need]:
        """Yield the encoder of the form features; the preflight check adds the rows and the tokenizer."""
        shown = settings.get("format") or {}  # poison is a map inside of a map, and needs no model
        format = made_of(Format, {**shown, "poison": None} if isinstance(shown, Mapping) else shown)
        if format.form == "features" and format.encoder != "hashed":
            yield Model(format.encoder, is_encoder=True)

    def setup(self, stage: str) -> None:
        if self.encoder is None:
            self.tokenizer = load_tokenizer(self.tokenizer_name)
            self.template = self.template.for_tokenizer(self.tokenizer)
        if stage in ("fit", "validate") and self.report is None:
            self._setup_training()
        if stage in ("test", "predict") and self.test_set is None:
            if self.test_rows is None:
                raise ValueError(
                    "there are no rows to test on: set test_source, or holdout for held-out rows"
                )
            test_set, self.test_client_indices, self.test_votes = self._evaluation_set(
                self.test_rows, held_out=True, stride=2
            )
            self.test_set = self.predict_set = test_set
            rank_zero_info(describe(self.test_votes))

    def collate(self, examples: list[Any]) -> dict[str, Any]:
        """Return a batch of the view."""
        if self.encoder is not None:
            return collate_features(examples)
        padding = pad_id(self.tokenizer)
        if self.view == "dpo":
            return collate_preferred(examples, padding)
        if self.view == "sft":
            return collate_responses(examples, padding)
        has_types = self.form == "pair" and "token_type_ids" in self.tokenizer.model_input_names
        return collate_choices(examples, padding, has_types)

    def draw_by_lot(self) -> None:
        """Draw batches by lot alone; raise ValueError where the two orders of a vote are in different batches."""
        if self.examples_each > self.examples_together:
            raise ValueError(
                "DPSGD protects one example, and each vote is two, one for each order: set data.format.twins_together=true"
            )
        super().draw_by_lot()

    def examples_digest(self) -> str:
        """Return a digest of the examples of each client; in form features of their answers, votes and encoder, too."""
        if not isinstance(self.train_set, FeatureExamples):
            return super().examples_digest()
        assert self.encoder is not None
        votes = self.train_set.pairs, self.train_set.labels
        return digest(super().examples_digest(), self.encoder.identity, *votes)

    def _setup_training(self) -> None:
        votes = self._read_votes(self.train_rows, held_out=False, needs_clients=True)
        if self.encoder is None:
            texts = [[*pair.fields.values(), pair.first, pair.second] for pair in votes.comparisons]
            some = [text for index in draw_rows(len(texts)) for text in texts[index]]
            if warning := check_known(self.tokenizer, self.tokenizer_name, some, str(self.train_rows[0])):
                rank_zero_warn(warning)
            warn_of_control(self.tokenizer, chain.from_iterable(texts), str(self.train_rows[0]))
        examples, fits, trimmed = self._make_examples(votes)
        categories = [votes.categories[vote] for vote in fits] if votes.categories else []
        split = share_out(
            self.partition,
            owners=[votes.clients[vote] for vote in fits] if votes.clients else [],
            categories=categories,
            prompts=votes.number_prompts()[fits],
            keys=np.array(votes.comparison)[fits],
            share=0.0 if self.val_rows else self.val_share,
            at_most=self.val_max,
            seed=self.seed,
        )
        if self.poison is not None:
            examples = self._make_poisoned(self.poison, votes, fits, split)
        each = self.examples_each
        order, self.client_indices = pool(self._to_examples(split.train))
        self.train_labels = label_examples(categories, order, each)
        self.train_set = examples.take(order)
        padding = 0.0, 0.0  # features have no tokens
        if self.encoder is None:
            self.train_lengths, self.train_labelled = self.train_set.lengths, self.train_set.labelled
            padding = padding_shares(self.client_indices, self.train_lengths, self.batch_size, self.seed)
        if split.val is not None:
            order, self.val_client_indices = pool(self._to_examples(split.val), self._sort_lengths(examples))
            self.val_labels = label_examples(categories, order, each)
            self.val_set = examples.take(order)
        elif self.val_rows:
            self.val_set, _, _ = self._evaluation_set(self.val_rows, held_out=False, stride=1)
        self.report = SetupReport("pairs", split, len(votes.winner) - len(fits), trimmed, *padding)
        rank_zero_info(f"{votes.counts}\n{self.report}")

    def _make_poisoned(
        self, poison: PoisonedVotes, votes: Votes, fits: np.ndarray, split: ClientSplit
    ) -> Examples:
        """Return the examples with the votes of liars turned, for training and for validation."""
        rank_zero_info(poison.liars.named(split.train, f"votes {poison.votes}"))
        val = split.val or {}
        by_client = {
            client: fits[np.concatenate([indices, val.get(client, indices[:0])])]
            for client, indices in split.train.items()
        }
        examples, _, _ = self._make_examples(poison.turned(votes, by_client))
        return examples

    def _evaluation_set(
        self, rows: tuple[str | GivenRows, str], held_out: bool, stride: int
    ) -> tuple[Examples, Clients | None, Votes]:
        """Return evaluation examples, sorted by length, each client's positions, and their votes.

        The positions are None without a client column.
        """
        votes = self._read_votes(rows, held_out, needs_clients=False)
        examples, fits, trimmed = self._make_examples(votes, stride * SOURCE_STRIDE)
        rank_zero_info(f"{votes.counts}; {len(votes.winner) - len(fits):,} too long, {trimmed:,} inputs cut")
        order = np.argsort(self._sort_lengths(examples), kind="stable")
        if not votes.clients or not self._is_by_client:
            return examples.take(order), None, votes.take(fits)
        by_client = self._to_examples(by_key([votes.clients[vote] for vote in fits]))
        return examples.take(order), reindex(by_client, order), votes.take(fits)

    def _read_votes(self, given: tuple[str | GivenRows, str], held_out: bool, needs_clients: bool) -> Votes:
        rows, source = load_rows(*given), str(given[0])
        if self.holdout is not None:
            rows = self.holdout.side(rows, source, held_out)
        columns = self._map_columns(rows, source)
        columns = columns if needs_clients else _drop_missing_owners(rows, columns)
        votes = read_votes(rows, columns, self.choice_values, self.template.required, source)
        if votes.groups and self._is_by_client:
            known = [*(self.client_groups or {}).items(), *votes.groups.items()]
            self.client_groups = map_groups(known, source)
        return votes

    def _map_columns(self, rows: Rows, source: str) -> dict[str, str]:
        """Return the column map with the columns that it leaves out."""
        given = {*self.columns} & {*RANKED, *ANSWERS} or {*rows[0]} & {*RANKED, *ANSWERS}
        ranked = bool(given) and given <= {*RANKED}
        slots = self.template.slots or ([] if self.columns else ["prompt"])
        owners = ["client"][: self._is_by_client]
        if not self.columns and source.startswith("toy:"):
            owners.append("group")
        names = [*slots, *(RANKED if ranked else ANSWERS), *owners]
        columns = complete_columns(self.columns, rows, {name: [name] for name in names}, owners)
        return {name: path for name, path in columns.items() if path}

    def _make_examples(self, votes: Votes, first_index: int = 0) -> tuple[Examples, np.ndarray, int]:
        """Return the examples, their votes, ``(votes,)``, and the number of texts that were cut."""
        if self.encoder is not None:
            comparison, winner = np.array(votes.comparison), np.array(votes.winner)
            made = FeatureExamples.from_votes(self.encoder.encode, votes.comparisons, comparison, winner)
            self.encoder.release()  # training needs its memory
            return made, np.arange(len(winner)), 0
        form = self.form if self.view == "selector" else "responses"
        encoded = encode_comparisons(self, form, votes.comparisons)
        fits = np.flatnonzero(encoded.both_kept()[votes.comparison])  # one order would teach a position
        refuse_too_long(len(fits), "vote", votes.counts.source, self.max_tokens)
        comparison, winner = np.array(votes.comparison)[fits], np.array(votes.winner)[fits]
        if self.view == "selector":
            return ChoiceExamples.from_votes(encoded, comparison, winner), fits, encoded.trimmed
        if self.view == "dpo":
            pairs = PreferredExamples(encoded, comparison, winner, first_index + fits)
            return pairs, fits, encoded.trimmed
        return ResponseExamples(encoded, 2 * comparison + winner), fits, encoded.trimmed

    def _to_examples(self, clients: Clients) -> Clients:
        """Return indices of examples for indices of votes; a selector that reads tokens has two examples per vote."""
        if self.examples_each == 1:
            return clients
        return {client: (2 * votes[:, None] + [0, 1]).reshape(-1) for client, votes in clients.items()}

    def _sort_lengths(self, examples: Examples) -> np.ndarray:
        """Return the lengths that sort examples, equal for both orders of a vote, so that these stay neighbours."""
        return examples.lengths.reshape(-1, self.examples_each).max(axis=1).repeat(self.examples_each)

    def _choose_template(self, format: Format) -> Template:
        if self.form == "features":
            return Template("")
        if self.view == "selector" and self.form == "pair":
            return Template.named(format.pair_template) if format.pair_template else Template("")
        if self.view == "selector":
            template = Template.named(format.choice_template, self.columns, asks="choice")
            check_choice(template)
        else:
            template = Template.named(format.generation_template, self.columns, asks="prompt")
            check_prompt(template, REPLIES)
        return template.trimming(format.trim)


def _check_form(format: Format, view: str) -> None:
    if format.form == "responses":
        raise ValueError("form='responses' is of completions: set form to choice, pair or features")
    if format.form == "features" and view != "selector":
        raise ValueError(f"form='features' has no text to write: set view='selector', not {view!r}")
    if format.form == "features" and format.twins_together:
        raise ValueError("form='features' has one example of a vote in no order: set twins_together=false")


def _drop_missing_owners(rows: Rows, columns: Mapping[str, str]) -> dict[str, str]:
    """Return the columns without client, category and group if the rows lack them, as aggregated labels do."""
    present = dict(columns)
    for name in {"client", "category", "group"} & set(columns):
        try:
            value_at(rows[0], columns[name])
        except (KeyError, IndexError, TypeError, ValueError):
            del present[name]
    return present


def make_encoder(name: str) -> Encoder:
    """Return the encoder of a folder or hub name, with its cache on disk, or the one that is named ``hashed``.

    Raises:
        ValueError: there is no name.
    """
    if not name:
        raise ValueError(
            f"data.encoder={name!r} must be the folder or hub name of a sentence encoder, or hashed"
        )
    if name == "hashed":
        return HashedEncoder()
    encoder = SentenceEncoder(name)
    encoder.setting = "encoder"  # for messages
    return encoder
