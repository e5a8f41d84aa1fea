import json
from collections import Counter
from functools import partial

import pytest
import torch
from synthetic_data import OWN, Listed, Scorer, make_data
from torch import nn

from fedlight.datamodules.synthesis.record import Part, SynthesisRecord, state_digest
from fedlight.datamodules.synthesis.synthesis import Candidate, Dropped


@pytest.fixture
def build(tmp_path, causal):
    return partial(make_data, tmp_path, causal, synthesis_folder=str(tmp_path / "made"))


class Trained(Scorer):
    """With something that is trained."""

    def __init__(self, value=1.0):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        nn.init.constant_(self.layer.weight, value)
        nn.init.zeros_(self.layer.bias)


def synthesized(build, clients=("c0", "c1"), module=None, round_idx=3, sizes=(6, 2), **options):
    data = build(Listed(sizes=sizes), **options)
    data.synthesize(round_idx, clients, module or Trained())
    return data


def test_a_second_run_makes_nothing_and_has_the_same(build, tmp_path, caplog):
    first = synthesized(build, keep=2)
    second = synthesized(build, keep=4)  # what is kept of them does not change what is made
    assert (len(first.synthesis.calls), len(second.synthesis.calls)) == (1, 0)
    assert "round_0003.jsonl: candidates of an earlier run with the same settings and model" in caplog.text
    assert second.synthesis_metrics() == first.synthesis_metrics()
    ids = [[each.train_set[i]["ids"].tolist() for i in range(16)] for each in (first, second)]
    assert ids[0] == ids[1]
    (file,) = (tmp_path / "made").iterdir()
    head, *rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert (head["clients"], head["settings"]["round"]) == (["c0", "c1"], 3)
    assert head["counts"] == {"tried": 9, "survived": 8}
    assert rows[6] == {"client": "c1", "fields": {"instruction": "w20", "response": "y"}, "weight": 1.0}


def test_dropped_texts_are_in_the_file_with_their_reasons_and_are_no_candidates(build, tmp_path):
    class Dropping(Listed):
        def make(self, clients, *more):
            made = super().make(clients, *more)
            self.dropped = [Dropped("c1", {"instruction": "?!?"}, "no_letter")]
            return made

    for _ in range(2):  # the second run reads the file
        data = build(Dropping(sizes=(6, 2)))
        data.synthesize(3, ["c0", "c1"], Trained())
        assert data._parts[0].dropped == [Dropped("c1", {"instruction": "?!?"}, "no_letter")]
        assert [len(own) for own in data._parts[0].candidates.values()] == [6, 2]
    lines = (tmp_path / "made/round_0003.jsonl").read_text().splitlines()
    assert len(lines) == 1 + 8 + 1
    assert json.loads(lines[-1]) == {"client": "c1", "fields": {"instruction": "?!?"}, "dropped": "no_letter"}
    assert data.synthesis.calls == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sizes": (5, 5)}, "synthesis.sizes"),
        ({"seed": 1}, "seed"),
        ({"template": "{instruction} ANSWER:"}, "template"),
        ({"own": [*OWN[:7], {"instruction": "w9", "output": "z"}]}, "client rows"),
        ({"module": Trained(2.0)}, "model state"),
    ],
)
def test_what_changes_the_candidates_makes_them_anew(build, caplog, changes, named):
    synthesized(build)
    again = synthesized(build, **changes)
    assert len(again.synthesis.calls) == 1
    assert "round_0003.jsonl: its candidates are not used: made with other" in caplog.text
    assert named in caplog.text.partition("made with other ")[2].splitlines()[0]
    assert len(synthesized(build, **changes).synthesis.calls) == 0


@pytest.mark.parametrize(
    "damage",
    [
        *(lambda raw: raw[:-30], lambda raw: raw[:40], lambda raw: raw.replace(b"w2", b"w3")),
        lambda raw: raw.replace(b'"settings": {', b'"settings": null, "x": {'),
        lambda raw: b"[" * 100_000,
    ],
)
def test_a_damaged_file_is_said_and_made_anew(build, tmp_path, caplog, damage):
    synthesized(build)
    file = tmp_path / "made/round_0003.jsonl"
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    again = synthesized(build)
    assert len(again.synthesis.calls) == 1
    assert "its candidates are not used: damaged" in caplog.text
    assert file.read_bytes() == whole


def test_a_killed_writer_leaves_nothing_that_looks_whole(build, tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("os.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            synthesized(build)
    assert not (tmp_path / "made/round_0003.jsonl").exists()
    assert len(synthesized(build).synthesis.calls) == 1


def on_base(bits):
    module = Trained()
    module.base_bits = bits
    return module


@pytest.mark.parametrize(
    ("make", "values", "named"),
    [(Trained, (1.0, 2.0, 3.0), "model state"), (on_base, (16, 8, 4), "base bits")],
)
def test_parts_of_one_round_stand_in_one_file(build, caplog, make, values, named):
    """Of clients with other weights, as FewFedPIT has them, and on bases of devices."""

    def both(*values):
        data = build(Listed())
        for client, value in zip(("c0", "c1"), values, strict=True):
            data.synthesize(0, [client], make(value))
        return data

    first, again = both(*values[:2]), both(*values[:2])
    assert (len(first.synthesis.calls), len(again.synthesis.calls)) == (2, 0)
    assert "not used" not in caplog.text
    assert again.synthesis_metrics() == first.synthesis_metrics()
    assert len(both(values[0], values[2]).synthesis.calls) == 1
    assert f"made with other {named}" in caplog.text


def test_a_file_of_another_run_for_other_clients_is_said(build, caplog):
    synthesized(build, clients=["c0"])
    synthesized(build, clients=["c1"], seed=1)
    assert "its candidates are not used: made with other client rows, seed" in caplog.text


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_made(tmp_path, causal):
    (tmp_path / "file").touch()
    data = make_data(tmp_path, causal, synthesis_folder=str(tmp_path / "file" / "made"))
    with pytest.raises(OSError, match=r"synthesis_folder=.*made cannot be written \("):
        data.synthesize(0, ["c0"], Trained())
    assert data.synthesis.calls == []


def test_a_folder_in_place_of_a_file_is_refused_before_anything_is_made(build, tmp_path):
    (tmp_path / "made/round_0003.jsonl").mkdir(parents=True)
    data = build(Listed())
    with pytest.raises(OSError, match=r"round_0003.jsonl is a folder, where a file is to be written: move"):
        data.synthesize(3, ["c0"], Trained())
    assert data.synthesis.calls == []


def test_without_a_trainer_or_a_folder_nothing_is_written(tmp_path, causal):
    before = set(tmp_path.rglob("*"))
    data = make_data(tmp_path, causal)
    data.synthesize(0, ["c0"], Trained())
    assert set(tmp_path.rglob("*")) - before == {tmp_path / "own.jsonl"}


def test_a_part_comes_back_as_it_was_written(tmp_path):
    record = SynthesisRecord(tmp_path)
    fields = {"instruction": "line\u2028 break\x85 é", "response": "1\n2"}
    settings, candidates = {"seed": 0, "nested": {"a": [1, (2,)]}}, {"b": [Candidate(fields, 0.1)], "a": []}
    part = Part(settings, ["b", "a"], candidates, Counter(tried=3, refusal=2), Counter(fewer=1))
    record.write(0, [part])
    found, why_not = record.find(0, part.settings, ["b", "a"])
    assert why_not == ""
    assert (found.candidates, found.counts, found.notes) == (part.candidates, part.counts, part.notes)
    assert record.find(0, part.settings, ["a", "b"]) == (None, "")
    assert record.find(1, part.settings, ["a", "b"]) == (None, "")


def test_the_digest_of_a_model_is_that_of_all_that_it_computes_with():
    def digest(**changes):
        model = Trained(changes.get("value", 1.0))
        model.frozen = nn.Linear(1, 1, dtype=changes.get("dtype", torch.float32)).requires_grad_(False)
        model.base = {"model": changes.get("model", "here"), "checksum": changes.get("checksum", "1f")}
        return state_digest(model)

    assert digest() == digest() == digest(model="elsewhere")  # a model may move
    others = [digest(value=2.0), digest(dtype=torch.bfloat16), digest(checksum="2f")]
    assert len({digest(), *others}) == 4
    assert state_digest(nn.Linear(1, 1, dtype=torch.bfloat16)) != ""
