import hashlib
from functools import partial

import numpy as np
import pytest
from scripted_generator import CLIENTS, Scripted
from scripted_model import ScriptedModel
from self_generating import ALPACA, rows
from synthetic_data import Listed, Scorer, make_data
from thread_team import on_team
from torch import nn

from fedlight import LESS, AugmentedInstructionDataModule, Lora, Sampling, SelfGeneration, SentenceEncoder
from fedlight.augmentation.less.example_gradients import ExampleGradients
from fedlight.augmentation.less.warm_up import WarmUp
from fedlight.augmentation.self_instruct import SelfInstruct
from fedlight.datamodules.instructions import Added, Augmentation
from fedlight.datamodules.synthesis import PseudoResponses
from fedlight.generators import LocalGenerator
from fedlight.processes import current_team


class Drawing(ScriptedModel, nn.Module):
    """Model whose answers follow from the prompt and the batch's seed alone."""

    def __init__(self):
        nn.Module.__init__(self)
        ScriptedModel.__init__(self)
        self.batches, self.scored = [], []

    def generate(self, prompts, n=1, *, seed, **others):
        self.batches.append(tuple(prompts))
        return [[self.answer(prompt, seed)] for prompt in prompts]

    def answer(self, prompt, seed):
        word = hashlib.blake2b(f"{seed} {prompt}".encode(), digest_size=4).hexdigest()
        return f"name a thing like {word}" if prompt.endswith(":") else f"Input: none\nResponse: {word}"

    def free_energies(self, prompts, answers, temperature):
        self.scored.append(len(prompts))
        return [-float(len(p) + 3 * len(answer)) for p, answer in zip(prompts, answers, strict=True)]


SYNTHESES = {
    "self": partial(SelfGeneration, number=5, batch_size=3, temperature=1.0),
    "pseudo": partial(PseudoResponses, batch_size=2),
}


@pytest.mark.parametrize("kind", SYNTHESES)
def test_candidates_follow_from_seed_and_rows_not_from_the_number_of_processes(monkeypatch, kind):
    def make(rank=0):
        synthesis, model = SYNTHESES[kind](), Drawing()
        found = synthesis.make({"a": rows(9), "b": rows(4, words="pear")}, ALPACA, model, seed=1)
        return found, synthesis.counts, synthesis.notes, model

    *alone, model = make()
    for size in (2, 3):
        on_each = on_team(monkeypatch, size, make)
        assert [found[:3] for found in on_each] == [tuple(alone)] * size
        batches = [batch for *_, own in on_each for batch in own.batches]
        assert sorted(batches) == sorted(model.batches)
        assert len(on_each[1][3].batches) >= len(batches) // size - 1  # they share them
        assert sorted(sum((own.scored for *_, own in on_each), [])) == sorted(model.scored)


@pytest.mark.usefixtures("any_text")
def test_a_rounds_candidates_are_written_by_one_process_and_read_by_it_for_all(
    monkeypatch, tmp_path, tiny_model
):
    """Also where a user's synthesis gives each process other candidates."""
    asked = []

    def synthesize(rank=0):
        folder = str(tmp_path / "made")
        data = make_data(tmp_path, tiny_model, synthesis=data_of[rank], synthesis_folder=folder)
        data.synthesize(0, ["c0", "c1"], Scorer())
        asked.append(rank)
        return {client: [one.fields for one in own] for client, own in data._pool.candidates.items()}

    data_of = [Listed((6, 2)), Listed((6, 2))]
    first = on_team(monkeypatch, 2, synthesize)
    assert first[0] == first[1]
    assert [len(own) for own in first[0].values()] == [6, 2]
    content = (tmp_path / "made" / "round_0000.jsonl").read_bytes()
    assert on_team(monkeypatch, 2, synthesize) == first
    assert [len(one.calls) for one in data_of] == [1, 1]  # the second time nobody makes any
    assert (tmp_path / "made" / "round_0000.jsonl").read_bytes() == content
    assert synthesize() == first[0]


@pytest.mark.usefixtures("any_text")
def test_the_global_model_scores_each_client_in_one_process(monkeypatch, tmp_path, tiny_model):
    def choose(rank=0):
        data, scorer = make_data(tmp_path, tiny_model, Listed((6, 5)), keep=3), Scorer([5.0, 1, 4, 2, 9, 3])
        data.synthesize(0, ["c0", "c1"], scorer)
        data.score_together(["c0", "c1"], scorer)
        for client in ("c0", "c1"):
            data.choose(client, Scorer())  # is not asked
        return {key: own.tolist() for key, own in data.plan.further.items()}, len(scorer.asked)

    chosen, asked = choose()
    assert asked == 2
    assert len(chosen["c0", "synthetic"]) == 3
    assert on_team(monkeypatch, 2, choose) == [(chosen, 1), (chosen, 1)]


@pytest.mark.usefixtures("any_text")
def test_what_a_private_model_could_not_score_is_counted_over_all_processes(
    monkeypatch, tmp_path, tiny_model
):
    def choose(rank):
        data = make_data(tmp_path, tiny_model, keep=3)
        data.synthesize(0, ["c0", "c1"], Scorer())
        if rank == 1:  # which trains the client
            data.choose("c0", Scorer([float("nan"), 3.0, 1.0, 5.0, 7.0, float("nan")]))
        for choices in current_team().gather(data.choices_made()):  # as at the end of a round
            data.add_choices(choices)
        return data.synthesis_metrics()["scores_not_finite"]

    assert on_team(monkeypatch, 2, choose) == [2, 2]


def test_a_generator_elsewhere_is_asked_once_for_all(monkeypatch, tmp_path):
    def augment(rank=0):
        generator = Scripted()
        made = SelfInstruct(4, generator, batch_size=3, folder=str(tmp_path / str(size)))
        return made.augment(CLIENTS, [], 0), generator.calls

    size = 1
    alone, calls = augment()
    size = 2
    (first, asked), (second, not_asked) = on_team(monkeypatch, 2, augment)
    assert first == second == alone
    assert (asked, not_asked) == (calls, [])
    (file,) = (tmp_path / "2").iterdir()
    assert file.read_bytes() == next((tmp_path / "1").iterdir()).read_bytes()
    assert on_team(monkeypatch, 2, augment) == [(alone, []), (alone, [])]  # the tries are in the file


def test_a_local_generators_batches_are_shared(monkeypatch, tiny_model):
    prompts = [f"w{number} " * (number + 1) for number in range(7)]

    def complete(rank=0):
        sampling = Sampling(max_new_tokens=3)
        generator = LocalGenerator(tiny_model, sampling=sampling, batch_size=2, device="cpu", keep_cut=True)
        answers = generator.complete(prompts)
        return answers, generator.usage()

    alone = complete()
    assert len(set(alone[0])) > 1
    assert on_team(monkeypatch, 2, complete) == [alone, alone]


def test_gradients_of_less_are_shared(monkeypatch, tiny_model, tmp_path):
    clients = {name: rows(5, words=word) for name, word in (("a", "w1 w2"), ("b", "w3 w4"), ("c", "w5 w6"))}
    public = rows(24, words="w7 w8")

    def augment(rank=0):
        less = LESS(
            tiny_model, 4, warmup=WarmUp(share=0.3, epochs=2), gradients=ExampleGradients(batch_size=4), dimension=256,
            lora=Lora(4, 512, 0.1), cache=str(tmp_path / str(size)), device="cpu",
        )  # fmt: skip
        return less.augment(clients, public, seed=3), less.record()

    size = 1
    alone = augment()
    size = 2
    assert on_team(monkeypatch, 2, augment) == [alone, alone]
    files = [{file.name: file.read_bytes() for file in (tmp_path / name).rglob("*.npy")} for name in "12"]
    assert files[0] == files[1] != {}


def test_texts_are_encoded_once_and_cached_by_one_process(monkeypatch, tmp_path):
    batches = []

    class Lengths(SentenceEncoder):
        identity = "lengths"

        def _encode_batch(self, texts):
            batches.append(texts)
            return np.array([[len(text), len(texts)] for text in texts], dtype=np.float32)

    texts = [f"{'x' * (number % 5)}{number}" for number in range(11)]

    def encode(rank=0):
        return Lengths("none", batch_size=2, cache=str(tmp_path / folder)).encode([*texts, texts[0]])

    folder = "alone"
    alone = encode()
    asked, batches[:] = sorted(batches), []
    folder = "team"
    for found in on_team(monkeypatch, 3, encode):
        assert np.array_equal(found, alone)
    assert sorted(batches) == asked
    assert len(list((tmp_path / folder).rglob("*.safetensors"))) == 1
    batches.clear()
    for found in on_team(monkeypatch, 2, encode):
        assert np.array_equal(found, alone)
    assert batches == []


class Random(Augmentation):
    """Gives other rows in each process, as a user's augmentation with a draw of its own might."""

    needs_public = False

    def augment(self, clients, public, seed):
        self.calls = getattr(self, "calls", 0) + 1
        drawn = np.random.default_rng().integers(10**9)
        rows = {client: {"instruction": f"w{drawn} {client}", "response": "y"} for client in clients}
        return {client: [Added(row, None, np.float64(0.5))] for client, row in rows.items()}


@pytest.mark.usefixtures("any_text")
def test_all_processes_have_the_added_rows_of_the_record(monkeypatch, tmp_path, tiny_model):
    augmentations = [Random(1), Random(1), Random(1)]

    def add(rank=0):
        data = make_data(
            tmp_path, tiny_model, kind=AugmentedInstructionDataModule, augmentation=augmentations[rank],
            augmentation_folder=str(tmp_path / "added"),
        )  # fmt: skip
        return {client: [row.fields["instruction"] for row in rows] for client, rows in data.added.items()}

    first = on_team(monkeypatch, 2, add)
    assert first[0] == first[1]
    assert [len(rows) for rows in first[0].values()] == [1, 1]
    files = {file.name: file.read_bytes() for file in (tmp_path / "added").iterdir()}
    assert len(files) == 3
    assert on_team(monkeypatch, 3, add) == first[:1] * 3
    assert [getattr(one, "calls", 0) for one in augmentations] == [1, 1, 0]
    assert {file.name: file.read_bytes() for file in (tmp_path / "added").iterdir()} == files
