"""Each kind of file that a run leaves, damaged in every way: whoever reads it next names it, or has the same as before.

A kind has a line in ``KINDS``: how such a file is made, and what is read of it next. Who adds a kind of file adds its
line.
"""

import shutil
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from damage import damaged
from memories import disk, saved

from fedlight.augmentation.less.less import ScoredBlocks
from fedlight.augmentation.self_instruct.tries import Try, open_record
from fedlight.callbacks.attacks.records import AttackTable
from fedlight.callbacks.export.prediction_writer import PredictionWriter
from fedlight.callbacks.loop.round_table import RoundTable
from fedlight.datamodules.instructions.augmentation import Added
from fedlight.datamodules.instructions.augmentation_record import AugmentationRecord
from fedlight.datamodules.synthesis.record import Part, SynthesisRecord
from fedlight.datamodules.synthesis.synthesis import Candidate
from fedlight.datamodules.vectors.embedding_cache import EmbeddingCache
from fedlight.generators.chat_server import Answer
from fedlight.generators.endpoint import AnswerCache
from fedlight.modules.language.adapter_folders import find_adapters
from fedlight.runs.run import Run
from fedlight.support.checkpoint_files import check_resumable
from fedlight.support.files import read_json, sealed, write_json

FLIPS = 40
ROWS = [
    {"round": number, "client": f"c{client}", "loss": 1 / (3 + number + client), "seconds": 0.1}
    for number in range(3)
    for client in range(3)
]


class Checkpoint:
    """Read by ``fedlight fit``, recipes, and the loop (tests/callbacks/loop/test_checkpoint_watch.py)."""

    def make(self, folder):
        state = {"state_dict": {"w": torch.arange(40.0)}, "optimizer_states": [], "epoch": 3}
        torch.save(state, folder / "x.ckpt")
        return folder / "x.ckpt"

    def read(self, folder):
        check_resumable(folder / "x.ckpt")
        content = torch.load(folder / "x.ckpt", weights_only=True)
        return content["state_dict"]["w"].tolist(), content["epoch"]


class Memory:
    def make(self, folder):
        memories = disk(folder)
        memories.save("a", {"w": torch.arange(40.0), "n": 3}, 0)
        self.state = saved(memories, 1)
        return next(folder.glob("*.pt"))

    def read(self, folder):
        memories = disk(folder)
        memories.load_state_dict({**self.state, "folder": str(folder)})
        found = memories.load("a")
        return found["w"].tolist(), found["n"]


class Adapter:
    """Weights or config of a PEFT folder, saved with checksums beside them."""

    def __init__(self, name):
        self.name = name

    def make(self, folder):
        from peft import LoraConfig, get_peft_model

        from fedlight.modules.language.adapter_folders import save_adapters

        torch.manual_seed(0)
        config = LoraConfig(r=2, target_modules=["0"])
        network = get_peft_model(torch.nn.Sequential(torch.nn.Linear(3, 3)), config)
        save_adapters(network, folder)
        return folder / self.name

    def read(self, folder):
        from peft import PeftModel

        (found,) = find_adapters(str(folder))
        network = PeftModel.from_pretrained(torch.nn.Sequential(torch.nn.Linear(3, 3)), found)
        config = network.peft_config["default"]
        weights = {name: value.tolist() for name, value in network.named_parameters() if "lora" in name}
        return config.r, config.lora_alpha, weights


class Sealed:
    """``done.json`` and ``settings.json`` of a stage."""

    def make(self, folder):
        write_json(folder / "done.json", sealed({"result": {"accuracy": 0.75}, "seconds": 17.25}))
        return folder / "done.json"

    def read(self, folder):
        return read_json(folder / "done.json", "do it again")["result"]


class Rounds:
    """``visits.csv``, ``groups.csv``, ``clients.csv``: a resumed run goes on with the rows of the rounds before."""

    def make(self, folder):
        table = RoundTable(folder / "visits.csv")
        for number in range(3):
            table.append([row for row in ROWS if row["round"] == number])
        self.state = table.state_before
        return table.file

    def read(self, folder):
        table = RoundTable(folder / "visits.csv")
        table.load_state_dict(self.state)
        table.restart()
        if not table.file.exists():
            return "gone"
        table.append([row for row in ROWS if row["round"] == 2])
        return table.file.read_text()


class Attacks:
    def make(self, folder):
        table = AttackTable(folder / "attacks.csv", "extraction")
        for number in range(3):
            self.digest = table.digest
            table.put(number, {"global": {"exact": 1 / (3 + number)}})
        return table.file

    def read(self, folder):
        table = AttackTable(folder / "attacks.csv", "extraction")
        table.restart(1, self.digest)
        table.put(2, {"global": {"exact": 1 / 5}})
        return table.file.read_text()


class HalfPredictions:
    """``predictions.jsonl.partial``, or ``.progress`` beside it: a run goes on behind the whole batches, or begins anew."""

    def __init__(self, ending):
        self.ending = ending

    def make(self, folder):
        writer = self.writer(folder)
        text = "".join(f'{{"index": {n}, "logp": {1 / (n + 3)}}}\n' for n in range(4)).encode()
        writer._partial.write_bytes(text)
        writer._state = {"batches": 2, "bytes": len(text), "fingerprint": "ab"}
        writer._digest.update(text)
        writer._write_progress()
        self.whole = text
        return folder / f"predictions.jsonl.{self.ending}"

    def read(self, folder):
        writer = self.writer(folder)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            state = writer._read_progress()
        if state["batches"] == 0:
            return None  # all is predicted anew, which is said unless nothing is there
        assert not said
        return state, writer._partial.read_bytes()[: state["bytes"]]

    anew = staticmethod(lambda found: found is None)

    def writer(self, folder):
        import hashlib

        writer = PredictionWriter(str(folder / "predictions.jsonl"), ["logp"])
        writer._digest = hashlib.blake2b(digest_size=16)
        return writer


class Candidates:
    """What clients have made for themselves; None has them made again."""

    def __init__(self):
        self.settings = {"seed": 3, "round": 1}

    def make(self, folder):
        made = {"a": [Candidate({"instruction": "x", "output": f"{n}"}, 0.5) for n in range(3)]}
        part = Part(self.settings, ["a"], made, Counter(tried=9), Counter(kept=3))
        SynthesisRecord(folder).write(1, [part])
        return SynthesisRecord(folder).file(1)

    def read(self, folder):
        part, _ = SynthesisRecord(folder).find(1, self.settings, ["a"])
        return part and (part.candidates, part.counts, part.notes)

    anew = staticmethod(lambda found: found is None)


class LessScores:
    def make(self, folder):
        ScoredBlocks(folder).write(0, 0, np.arange(12.0, dtype=np.float32).reshape(4, 3))
        return folder / "0-0.npy"

    def read(self, folder):
        found = ScoredBlocks(folder).read(0, 0, (4, 3))
        return None if found is None else found.tolist()

    anew = staticmethod(lambda found: found is None)


class Tries:
    """Of Self-Instruct; batches that are cut off at the end are made again."""

    def make(self, folder):
        with open_record(str(folder), {"class": "SelfInstruct", "number": 3}, "ab") as record:
            for n in range(3):
                record.append([Try("c", n, "accepted", f"do {n}", f"done {n}")])
        return next(folder.iterdir())

    def read(self, folder):
        with open_record(str(folder), {"class": "SelfInstruct", "number": 3}, "ab") as record:
            have = len(record.batches)
            for n in range(have, 3):
                record.append([Try("c", n, "accepted", f"do {n}", f"done {n}")])
        with open_record(str(folder), {"class": "SelfInstruct", "number": 3}, "ab") as record:
            return record.batches


class AddedRows:
    """The record of an augmentation: one of its three files."""

    def __init__(self, name):
        self.name = name

    def make(self, folder):
        record = AugmentationRecord(folder)
        added = {"c": [Added({"response": f"{n}"}, n, 1 / (n + 3)) for n in range(3)]}
        record.write({"seed": 1}, {"c": [{"response": "own"}]}, added, ["s"] * 3, {"note": 1})
        return folder / self.name

    def read(self, folder):
        record = AugmentationRecord(folder)
        if record.why_not({"seed": 1}) is not None:
            return None
        return record.read(), record.private.read_text()

    anew = staticmethod(lambda found: found is None)


class AddedRowsForFigures(AddedRows):
    """The same, read for tables and figures."""

    def read(self, folder):
        record = AugmentationRecord(folder)
        record.refuse_damaged()
        return record.read(), record.private.read_text()


class Vectors:
    """Of an encoder; what is not found is encoded again."""

    def __init__(self):
        self.texts = [f"text {n}" for n in range(5)]

    def make(self, folder):
        cache = EmbeddingCache(folder, "model x")
        cache.add(self.texts, np.arange(20, dtype=np.float32).reshape(5, 4))
        return next(cache.folder.glob("*.safetensors"))

    def read(self, folder):
        found = EmbeddingCache(folder, "model x").find(self.texts)
        return None if found is None or not found[1].all() else found[0].tolist()

    anew = staticmethod(lambda found: found is None)


class Answers:
    """Of a judge; what is not found is asked for again."""

    def make(self, folder):
        AnswerCache(str(folder)).write("ab12", Answer("yes, 17", prompt_tokens=3))
        return next(folder.rglob("*.json"))

    def read(self, folder):
        return AnswerCache(str(folder)).read(["ab12"]) or None

    anew = staticmethod(lambda found: found is None)


TABLES = {
    "clients.csv": "client,accuracy\na,0.25\nb,0.75\n",
    "data.csv": "client,label,split,rows\na,,train,17\n",
    "completions.jsonl": '{"prompt": "p", "completions": ["x", "y"]}\n',
    "metrics/version_0/metrics.csv": "epoch,step,val/loss\n0,3,0.25\n1,6,0.125\n",
}


class OnThePage:
    """What a report reads of a finished run; what is left out is named in ``faults``."""

    def __init__(self, name):
        self.name = name

    def make(self, folder):
        from fedlight.lightning_cli.run_record import recorded

        with recorded(folder, "fit", ["fit"], 0):
            for name, text in TABLES.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(text)
        write_json(folder / "results.json", sealed({"rows": [{"method": "a", "x": 0.25}]}))
        return folder / self.name

    def read(self, folder):
        run = Run(folder, "a", "a", folder)
        kind = Path(self.name).suffix.removeprefix(".")
        if self.name == "run.json":
            found = run.record().get("command"), run.record().get("state")
        else:
            found = getattr(run, kind)(self.name)
            found = found.get("rows", []) if kind == "json" else found
        if run.faults:
            (name,) = run.faults
            assert name == self.name
            raise ValueError(f"{name} {run.faults[name]}")
        return found


KINDS = {
    **{"checkpoint": Checkpoint(), "memory": Memory(), "adapter": Adapter("adapter_model.safetensors")},
    **{"adapter config": Adapter("adapter_config.json"), "adapter checksums": Adapter("checksums.json")},
    **{"done.json, settings.json": Sealed(), "visits.csv, groups.csv, clients.csv": Rounds()},
    **{"attacks.csv": Attacks(), "half predictions": HalfPredictions("partial")},
    **{"progress of predictions": HalfPredictions("progress"), "candidates": Candidates()},
    **{"scores of LESS": LessScores(), "tries of Self-Instruct": Tries()},
    **{f"added rows, {name}": AddedRows(name) for name in ("added.jsonl", "private.jsonl", "settings.json")},
    **{f"figures, {name}": AddedRowsForFigures(name) for name in ("added.jsonl", "private.jsonl")},
    **{"cache of vectors": Vectors(), "cache of answers": Answers()},
    **{f"page, {name}": OnThePage(name) for name in (*TABLES, "run.json", "results.json")},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_named_or_makes_no_difference(kind, tmp_path):
    of = KINDS[kind]
    good = tmp_path / "good"
    good.mkdir()
    file = of.make(good).relative_to(good)
    first = tmp_path / "first"
    shutil.copytree(good, first)
    expected = of.read(first)
    assert expected is not None
    found = Counter()
    for number, (what, content) in enumerate(damaged((good / file).read_bytes(), FLIPS)):
        folder = tmp_path / str(number)
        shutil.copytree(good, folder)
        (folder / file).write_bytes(content)
        result, said = None, None
        try:
            result = of.read(folder)
        except (ValueError, OSError) as error:
            said = str(error)
        if said is not None:
            found["named"] += 1
            assert said.strip(), what
            assert file.stem.split("-")[0] in said or "checksums.json" in said, (what, said)
        elif getattr(of, "anew", lambda _: False)(result):
            found["made anew"] += 1
        else:
            found["the same"] += 1
            assert result == expected, what
        shutil.rmtree(folder)
    assert found["named"] + found["made anew"] > 5, found
