"""Exported models: plain peft and transformers answer as the run did, and nothing of the machine or of a row is in them."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
from tiny_world import fedlight, refused

from fedlight.export import command, formats
from fedlight.export.opened import open_run
from fedlight.export.vote import Selectors

PROMPTS = ["POST : carla sounds longer bees\nCHOICE :", "POST : finn\nCHOICE :"]
PLAIN = """
import json, sys
sys.modules["fedlight"] = None  # an import of it would fail
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
*folders, prompts = map(json.loads, sys.argv[1:])
for model_folder, adapter_folder in folders:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    if adapter_folder:
        from peft import PeftModel
        model = PeftModel.from_pretrained(model, adapter_folder)
    model.eval()
    first = tokenizer("x")["input_ids"][:1]
    opening = first if first == [tokenizer.bos_token_id] else []
    found = []
    for prompt in prompts:
        ids = torch.tensor([opening + tokenizer(prompt, add_special_tokens=False)["input_ids"]])
        new = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False,
            repetition_penalty=1.0, pad_token_id=tokenizer.pad_token_id)
        found.append(tokenizer.decode(new[0, ids.shape[1]:], skip_special_tokens=True).strip())
    print(json.dumps(found))
"""


def answers_of_the_run(run):
    found = open_run(run).load().generate(PROMPTS, n=1, temperature=0.0, max_new_tokens=8)
    return [one for (one,) in found]


@pytest.fixture
def export(run, tmp_path):
    """Export the run in a form."""

    def export(form, *more, output="out"):
        return fedlight("export", str(run), "--format", form, f"--output={tmp_path / output}", *more)

    return export


def test_exporters_that_are_too_old_are_named_with_the_release_that_has_them(export, monkeypatch, tmp_path):
    monkeypatch.setattr("fedlight.export.formats.import_module", lambda name: object())
    assert "pip install --upgrade 'transformers>=5.23'" in refused(export("onnx"))
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    """Folder of exports of the run: one for each form, by its name."""
    folder = tmp_path_factory.mktemp("exported")
    for form in ("adapter", "merged"):
        done = fedlight("export", str(run), "--format", form, "--output", str(folder / form))
        assert done.code == 0, done.err
    return folder


@pytest.mark.slow
def test_plain_libraries_answer_as_the_run_did(run, base, exported):
    adapter, merged = (str(exported / form) for form in ("adapter", "merged"))
    # The adapter comes last: a merged model needs no peft.
    asked = [json.dumps(value) for value in ([merged, ""], [base, ""], [base, adapter], PROMPTS)]
    call = [sys.executable, "-c", PLAIN, *asked]
    plain = subprocess.run(call, capture_output=True, text=True, check=True, timeout=120)
    by_merged, untuned, by_adapter = map(json.loads, plain.stdout.splitlines()[-3:])
    expected = answers_of_the_run(run)
    assert by_merged == expected
    assert by_adapter == expected
    assert untuned != expected  # else nothing is shown


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of the exporters
@pytest.mark.parametrize(("form", "needs"), [("onnx", "onnxscript"), ("executorch", "executorch")])
@pytest.mark.slow
def test_exported_programs_answer_as_the_run_did_with_the_lines_of_their_card(
    run, export, form, needs, tmp_path
):
    pytest.importorskip(needs)
    if not hasattr(pytest.importorskip("transformers.exporters"), "ExportedModel"):
        pytest.skip("these exporters of transformers are too old")
    done = export(form)
    assert done.code == 0, done.err
    lines = (tmp_path / "out/README.md").read_text().partition("```python\n")[2].partition("```")[0]
    lines = lines.replace("FOLDER", str(tmp_path / "out")).replace("< 32", "< 8")
    asked = "".join(lines.replace('"Once upon a time"', repr(prompt)) for prompt in PROMPTS)
    call = [sys.executable, "-c", asked]
    plain = subprocess.run(call, capture_output=True, text=True, check=True, timeout=300)
    assert [line.strip() for line in plain.stdout.splitlines()[-2:]] == answers_of_the_run(run)
    assert b"secret-folder" not in b"".join(file.read_bytes() for file in (tmp_path / "out").iterdir())


@pytest.mark.parametrize("checkpoint", [[], ["--checkpoint=last"]], ids=["adapter", "checkpoint"])
def test_a_run_without_an_end_is_exported_and_said_to_have_none(run, checkpoint, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    assert "no record of an end" not in fedlight("export", str(copy), *checkpoint).err
    (copy / "run.json").unlink()  # as of a run that was killed in its first command, or goes on
    done = fedlight("export", str(copy), *checkpoint, f"--output={tmp_path / 'out'}")
    assert done.code == 0, done.err
    after = "after 1 round$" if checkpoint else "those that it had written at an end"
    assert re.search(f"copy has no record of an end: the weights are {after}", done.err, re.MULTILINE)


@pytest.mark.parametrize("form", formats.PACKAGES)
def test_an_exporter_that_is_not_installed_is_named(export, form, tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "find_spec", lambda name: None if name in formats.PACKAGES[form] else name)
    assert f"pip install 'fedlight[{form}]'" in refused(export(form))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["adapter", "merged"])
def test_no_folder_of_this_machine_and_no_row_is_in_an_export(run, exported, form):
    files = [path for path in (exported / form).rglob("*") if path.is_file()]
    assert len(files) >= 4
    data = b"".join(path.read_bytes() for path in files)
    assert b"secret-folder" not in data
    assert str(run.parent).encode() not in data
    card = (exported / form / "README.md").read_text()
    assert "FedAvg" in card
    assert "2 clients" in card or "4" in card
    assert "what color" not in card
    assert "repetition_penalty=1.0" in card  # without it the base's generation_config.json decides


def test_selectors_vote_as_the_run_would(base, selectors, exported_selectors):
    exported = Selectors(exported_selectors, base)
    assert len(exported.names) == 3
    module = open_run(selectors, "last").load()
    fields = dict.fromkeys(slots(exported.template), "apple")
    found = exported.log_probs(fields, *PAIR)
    for name, each in zip(module.adapter_names, found, strict=True):
        module.use_adapter(name)
        as_a, as_b = (shown(module, exported, fields, *pair) for pair in (PAIR, PAIR[::-1]))
        expected = (as_a[0] + as_b[1]) / 2, (as_a[1] + as_b[0]) / 2
        assert each == pytest.approx([one.item() for one in expected], abs=1e-5)
    votes = exported.vote(fields, *PAIR)
    assert sum(votes) <= 3
    assert exported.vote(fields, *PAIR[::-1]) == votes[::-1]  # in both orders, so no taste for a place
    assert len({round(first - second, 4) for first, second in found}) == 3  # three selectors, not one thrice


PAIR = "bees rambles", "carla sounds"


def shown(module, exported, fields, first, second):
    """Log-probabilities of both choices by the run's own module."""
    tokenizer = module.tokenizer
    text = exported.template.format(**fields, response_a=first, response_b=second)
    ids = tokenizer(f"{text} {exported.choices[0]}", add_special_tokens=False)["input_ids"]
    opening = tokenizer("x")["input_ids"][:1]
    prompt = (opening if opening == [tokenizer.bos_token_id] else []) + ids[:-1]
    texts = [f"{text} {choice}" for choice in exported.choices]
    tokens = [ids[-1] for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    with torch.no_grad():
        logits = module.network(input_ids=torch.tensor([prompt])).logits[0, -1]
    return logits[tokens].log_softmax(0)


def slots(template):
    import string

    names = {name for _, name, _, _ in string.Formatter().parse(template) if name}
    return names - {"response_a", "response_b"}


def test_what_cannot_be_exported_is_refused_with_its_remedy(export, tmp_path, monkeypatch):
    """And no repository is made for it."""
    monkeypatch.setattr(command, "make_repo", lambda *arguments: pytest.fail("a repository was made"))
    for folder in ("full", "empty"):
        (tmp_path / folder).mkdir()
    (tmp_path / "full/file").touch()
    assert "it is not empty" in refused(export("adapter", output="full"))
    assert "model='./nope': there is no such" in refused(export("adapter", "--model", "./nope"))
    assert "llama.cpp's own converter" in refused(export("gguf"))
    for push in ((), ("--push", "me/model")):
        assert "there is no such file" in refused(export("gguf", "--converter", "none.py", *push))
    assert refused(fedlight("export", str(tmp_path / "empty")))
    for form, option, of in (
        ("adapter", "--dtype=bf16", "--format merged"),
        ("merged", "--outtype=f32", "--format gguf"),
        ("adapter", "--public", "--push"),
    ):
        assert f"{option.partition('=')[0]} is for {of}" in refused(export(form, option))
    assert not (tmp_path / "out").exists()


@pytest.fixture
def convert(export, tmp_path):
    """Export to GGUF with a converter of these lines."""

    def convert(lines):
        (tmp_path / "convert.py").write_text(lines)
        return export("gguf", "--converter", str(tmp_path / "convert.py"))

    return convert


def test_a_converter_gets_the_merged_model(convert, tmp_path):
    lines = "import sys, shutil; shutil.copy(sys.argv[1] + '/model.safetensors', sys.argv[3])"
    lines += "; assert sys.argv[6:] == ['--model-name', 'base']"  # not that of a temporary folder
    done = convert(lines)
    assert done.code == 0, done.err
    assert [file.name for file in (tmp_path / "out").glob("*.gguf")] == ["base-f16.gguf"]


@pytest.mark.parametrize(
    ("lines", "seconds", "said"),
    [
        ("import sys; sys.exit('Model X is not supported')", 3600, "Model X is not supported"),
        ("import sentencepieces", 3600, "No module named 'sentencepieces'; pip install sentencepieces"),
        ("import time; time.sleep(60)", 1, "convert.py was stopped after"),
    ],
)
def test_a_converter_that_fails_or_hangs_is_told(convert, tmp_path, monkeypatch, lines, seconds, said):
    monkeypatch.setattr(formats, "HOURS", seconds / 3600)
    assert said in refused(convert(lines))
    assert not [*tmp_path.glob("out*")]


class Hub:
    """Stands for the hub's client."""

    def __init__(self, fails=False):
        self.calls, self.fails = [], fails

    def create_repo(self, repo, **how):
        self.calls.append((repo, how))
        if self.fails:
            raise RuntimeError("401 Unauthorized\nmore")

    def upload_folder(self, **how):
        self.calls.append(how)


def test_a_push_makes_a_private_repository_and_uploads_the_folder(tmp_path):
    api = Hub()
    address = command.push(tmp_path, "me/model", command.make_repo("me/model", False, api))
    assert address == "https://huggingface.co/me/model"
    assert api.calls[0] == ("me/model", {"private": True, "exist_ok": True})
    assert api.calls[1]["folder_path"] == tmp_path
    with pytest.raises(OSError, match="401 Unauthorized; log in"):
        command.make_repo("me/model", False, Hub(fails=True))
    with pytest.raises(ValueError, match="owner/name"):
        command.make_repo("../x", False, Hub())
