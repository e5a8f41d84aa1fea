"""Tiny models and hand-made batches: a Llama and a BERT of two layers, and a byte-level tokenizer."""

import warnings
from pathlib import Path

import pytest
import torch
from text_batches import make_sft_batch

TEXTS = [
    "the cat sat on the mat. it was a nice mat: A warm and soft one.",
    "a dog ran to the park: B day after day, to chase the cat.",
    "### YOUR CHOICE: A\n### YOUR CHOICE: B\n",
]


def _tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=320, special_tokens=["<pad>", "</s>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>")


def make_llama(folder: Path, seed: int, **changes) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        **{
            **sizes,
            "vocab_size": 320,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "initializer_range": 0.3,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": 1,
            **changes,
        }
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return str(folder)


ENCODER = {
    **{"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "pad_token_id": 0},
}


def make_bert(folder: Path, with_pooler: bool = True) -> str:
    from transformers import BertConfig, BertModel

    torch.manual_seed(3)
    BertModel(BertConfig(**ENCODER), add_pooling_layer=with_pooler).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return str(folder)


def make_encoder(folder: Path, kind: str) -> str:
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(3)
    AutoModel.from_config(AutoConfig.for_model(kind, **ENCODER)).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def llama(tmp_path_factory) -> str:
    return make_llama(tmp_path_factory.mktemp("llama"), seed=0)


@pytest.fixture(scope="session")
def other_llama(tmp_path_factory) -> str:
    return make_llama(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="session")
def long_llama(tmp_path_factory) -> str:
    return make_llama(tmp_path_factory.mktemp("long"), seed=0, max_position_embeddings=512)


@pytest.fixture(scope="session")
def bert(tmp_path_factory) -> str:
    return make_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="session")
def bert_without_pooler(tmp_path_factory) -> str:
    return make_bert(tmp_path_factory.mktemp("headless"), with_pooler=False)


@pytest.fixture(scope="session")
def distilbert(tmp_path_factory) -> str:
    return make_encoder(tmp_path_factory.mktemp("distilbert"), "distilbert")


@pytest.fixture(scope="session")
def deberta(tmp_path_factory) -> str:
    return make_encoder(tmp_path_factory.mktemp("deberta"), "deberta-v2")


@pytest.fixture(scope="session")
def fnet(tmp_path_factory) -> str:
    return make_encoder(tmp_path_factory.mktemp("fnet"), "fnet")


@pytest.fixture
def loader():
    """Makes a loader of ready-made batches."""
    return lambda batches: torch.utils.data.DataLoader(batches, batch_size=None)


@pytest.fixture
def make_trainer(tmp_path):
    """A silent CPU trainer; further arguments go through."""
    import lightning

    # Most of these trainings have nothing to validate on. pytest takes the filter back after the test.
    warnings.filterwarnings("ignore", "You defined a `validation_step` but have no `val_dataloader`")

    def make(**arguments):
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
        plain = {"accelerator": "cpu", "enable_checkpointing": False, "default_root_dir": tmp_path}
        return lightning.Trainer(**{**quiet, **plain, "max_epochs": 2, **arguments})

    return make


@pytest.fixture
def trained(llama, make_trainer, loader, tmp_path):
    """A trained module and its checkpoint."""
    from fedlight.modules.sft import SFTModule

    module, trainer = SFTModule(llama, lr=1e-2), make_trainer()
    trainer.fit(module, loader([make_sft_batch()]))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    return module, tmp_path / "x.ckpt"


@pytest.fixture
def keep_every_epoch(tmp_path):
    """Saves ``{epoch}.ckpt`` at the end of each epoch; unlike ModelCheckpoint it has no state of its own."""
    import lightning

    class Keep(lightning.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")

    return Keep()
