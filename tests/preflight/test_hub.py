import io
import json

import pytest
from hub_stub import Repository, hub_stub

from fedlight.preflight.finding import State
from fedlight.preflight.hub import HEAD_BYTES, Hub
from fedlight.preflight.sources import check_models, check_rows, read_shape
from fedlight.preflight.stages import Model, RowSource


def parquet(rows):
    import pyarrow
    import pyarrow.parquet

    stream = io.BytesIO()
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, stream, compression="none", use_dictionary=False)
    return stream.getvalue()


LINES = b"".join(json.dumps({"question": "q", "answer": {"text": "a"}}).encode() + b"\n" for _ in range(3))
WHOLE = LINES * 1000
MAIN = {
    **{"config_name": "main", "download_size": 1000, "splits": [{"name": "train", "num_examples": 7}]},
    "features": [{"name": "turns", "list": [{"name": "text", "dtype": "string"}]}],
}
CARD = {"license": "mit", "dataset_info": [MAIN]}
WEIGHTS = {"config.json": b'{"model_type": "llama"}', "model.safetensors": bytes(5000)}
WEIGHTS["tokenizer.json"] = bytes(70)
WIDE, NESTED = parquet([{"x": str(n) * 30, "y": n} for n in range(9000)]), parquet([{"x": {"y": ["z"]}}])
HUB = {
    "models/o/open": Repository(WEIGHTS | {"copy/model.safetensors": bytes(9)}, {"license": "apache-2.0"}),
    "models/o/gated": Repository(WEIGHTS, gated=True),
    "models/o/pickled": Repository({"config.json": b"{}", "pytorch_model.bin": bytes(9)}),
    "datasets/o/lines": Repository({"train.jsonl": LINES, "data/test.csv": b"question,answer\n1,2\n"}),
    "datasets/o/whole": Repository({"train.jsonl": WHOLE}, ranged=False),
    "datasets/o/wide": Repository({"train.parquet": WIDE}),
    "datasets/o/listed": Repository({"rows.json": b'[{"a": 1}, {"a": '}),
    "datasets/o/card": Repository({}, CARD),
    "datasets/o/script": Repository({"script.py": b""}),
    "datasets/o/script@refs/convert/parquet": Repository({"one/train/0000.parquet": NESTED}),
}


@pytest.fixture(scope="module")
def served():
    with hub_stub(HUB) as stub:
        yield stub


@pytest.fixture
def hub(served, monkeypatch, tmp_path):
    """Of this address, with an empty cache and no token."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", served[0])
    template = served[0] + "/{repo_id}/resolve/{revision}/{filename}"  # made of the endpoint at import
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "sets")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return Hub()


def model(hub, tmp_path, name):
    report = check_models({Model(name, False): ["stage"]}, hub, tmp_path)
    return report, report.findings[0]


def rows(hub, tmp_path, source, split="train", **columns):
    report = check_rows({RowSource(source, split, tuple(columns.items())): ["stage"]}, hub, tmp_path)
    return report, report.findings[0]


def test_a_model_that_is_there(hub, tmp_path):
    report, found = model(hub, tmp_path, "o/open")
    assert found.state is State.OK
    assert "0.0 MB of weights, to be fetched; license apache-2.0" in found.detail
    assert report.downloads == {"o/open": 5000 + 23 + 70}
    assert report.configs == {"o/open": b'{"model_type": "llama"}'}


def test_a_gated_model_without_and_with_a_token(hub, tmp_path, monkeypatch):
    _, found = model(hub, tmp_path, "o/gated")
    assert found.state is State.PROBLEM
    assert "without an account there is no access: accept its terms there and run `hf auth" in found.detail
    monkeypatch.setenv("HF_TOKEN", "wrong")
    assert "this account has no access" in model(Hub(), tmp_path, "o/gated")[1].detail
    monkeypatch.setenv("HF_TOKEN", "right")
    _, found = model(Hub(), tmp_path, "o/gated")
    assert found.state is State.OK
    assert found.detail.endswith("gated, and there is access")


@pytest.mark.parametrize(
    ("name", "words"),
    [("o/nowhere", "no such model at the hub: check the name"), ("o/pickled", "it has no .safetensors file")],
)
def test_a_model_that_cannot_be_had(hub, tmp_path, name, words):
    _, found = model(hub, tmp_path, name)
    assert (found.state, words in found.detail) == (State.PROBLEM, True)


@pytest.mark.parametrize(
    ("source", "split", "columns", "words"),
    [
        ("o/lines", "train", {"q": "question", "a": "answer.text"}, "there; columns question, answer.text"),
        ("o/lines", "test", {"response": "answer"}, "there; columns answer; its card names no license"),
        ("o/listed", "train", {"x": "a"}, "there; columns a"),
        ("o/card:main", "train", {"prompt": "turns.1.text"}, "7 rows; columns turns.1.text; license mit"),
        ("o/script:one", "train", {"prompt": "x.y.0"}, "there; columns x.y.0"),
    ],
)
def test_rows_that_are_there(hub, tmp_path, source, split, columns, words):
    report, found = rows(hub, tmp_path, source, split, **columns)
    assert (found.state, words in found.detail) == (State.OK, True), found.detail
    assert report.downloads[source] > 0


@pytest.mark.parametrize(
    ("source", "split", "columns", "words"),
    [
        ("o/lines", "train", {"a": "reply"}, "no column 'reply' (mapped to 'a'). The columns are: question"),
        ("o/lines", "validation", {}, "it has no split 'validation'; it has test, train"),
        ("o/card:other", "train", {}, "it has no configuration 'other'; it has main"),
        ("o/card:main", "test", {}, "it has no split 'test'; it has train"),
        ("o/script:two", "train", {}, "it has no configuration 'two'; it has one"),
        ("o/nowhere", "train", {}, "no such dataset at the hub"),
        ("nowhere.jsonl", "train", {}, "no such file"),
    ],
)
def test_rows_that_cannot_be_had(hub, tmp_path, source, split, columns, words):
    _, found = rows(hub, tmp_path, source, split, **columns)
    assert (found.state, words in found.detail) == (State.PROBLEM, True), found.detail


def test_a_hub_out_of_reach_is_asked_once(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    wanted = {RowSource(f"o/{name}", "train", ()): ["stage"] for name in "abc"}
    report = check_rows(wanted, hub, tmp_path)
    assert (report.findings, report.unasked) == ([], ["o/a", "o/b", "o/c"])
    assert hub.silent in ("ConnectError", "ConnectionError")  # of httpx, of requests
    assert check_models({Model("o/open", False): ["stage"]}, hub, tmp_path).unasked == ["o/open"]


def test_of_a_hub_out_of_reach_the_cache_counts(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("fedlight.preflight.sources._cached_weights", lambda name: 5000)
    cached = tmp_path / "sets/o___lines"
    cached.mkdir(parents=True)
    (cached / "rows.arrow").touch()
    _, found = rows(hub, tmp_path, "o/lines")
    said = f"in the cache, {cached}; its columns were not looked at"
    assert found == ("data o/lines, train", State.OK, said)
    _, found = model(hub, tmp_path, "o/open")
    assert found == ("model o/open", State.OK, "in the cache, 0.0 MB of weights")


def test_a_server_that_passes_over_the_range_is_read_as_far_as_needed(hub):
    of = hub.repository("o/whole", "dataset")
    assert hub.head(of, "dataset", "train.jsonl", size=1000) == WHOLE[:1000]
    with pytest.raises(ValueError, match="nowhere: the hub answers 404"):
        hub.head(of, "dataset", "nowhere")


def test_of_a_large_parquet_file_the_end_alone_is_fetched(hub, served):
    served[2].clear()
    shape = read_shape(hub, "o/wide", "", "train")[1]
    assert (shape.row, shape.size > 3 * HEAD_BYTES) == ({"x": None, "y": None}, True)
    assert sum(served[2]) <= HEAD_BYTES


def test_a_mistake_of_ours_is_no_unreachable_hub(hub, monkeypatch):
    def other_arguments(self, name):
        """As another version of the hub's client might have it."""

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", other_arguments)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        hub.repository("o/lines", "dataset")
    assert hub.silent is None


def test_nothing_large_is_fetched(served):
    assert not any(path.endswith((".safetensors", ".bin")) for path in served[1])
