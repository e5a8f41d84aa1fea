from contextlib import contextmanager

import pytest
import torch

from fedlight import Lora, Partition, SFTModule, SyntheticInstructionDataModule
from fedlight.datamodules.rows.split import Split
from fedlight.datamodules.synthesis.prompts import InstructionPrompt, ResponsePrompt, SelfGenerationPrompts
from fedlight.datamodules.synthesis.self_generation import NewInstructions, NewResponses, SelfGeneration

SHOWN, ASKED = "POST : {instruction} {input}\n", "POST : {instruction}\nCHOICE :"
FORMS = f"{SHOWN}CHOICE : {{response}}\n", f"{ASKED} {{response}}\n"
PROMPTS = SelfGenerationPrompts(
    InstructionPrompt("", SHOWN, "POST :", ("\nPOST",), "(?P<instruction>.*)"),
    ResponsePrompt("", *FORMS, ASKED, ("\nPOST",), "(?P<response>.*)"),
)


def make_data(model, folder):
    data = SyntheticInstructionDataModule(
        "toy:instructions?num_clients=3&client_rows=6",
        columns={"instruction": "instruction", "input": "input", "response": "output", "client": "client"},
        template="POST : {instruction} {input}\nCHOICE :",
        tokenizer=model,
        max_tokens=128,
        partition=Partition("client"),
        split=Split(val_share=0),
        batch_size=2,
        keep=2,
        synthesis=SelfGeneration(
            number=5,
            instructions=NewInstructions(demonstrations=2, max_new_tokens=6, min_words=1),
            responses=NewResponses(demonstrations=2, max_new_tokens=6),
            batch_size=3,
            **{"max_rouge_l": 1.0, "temperature": 3.0, "keep_cut": True, "prompts": PROMPTS},
        ),
        synthesis_folder=str(folder),
    )
    data.prepare_data()
    data.setup("fit")
    return data


@pytest.mark.parametrize("base", ["plain", "int8"])  # of int8 one client writes after the other
def test_candidates_are_those_of_one_client_after_the_other(base, tiny_model, tmp_path):
    module = SFTModule(tiny_model, base=base, dtype="fp32", lora=Lora(rank=2, dropout=0.1))
    module.configure_model()
    calls, write = [], module.causal_lm.generate
    module.causal_lm.generate = lambda **inputs: calls.append(len(inputs["input_ids"])) or write(**inputs)
    generator = torch.Generator().manual_seed(1)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    states = [{name: torch.randn(value.shape, generator=generator) / 4 for name, value in before.items()}] * 2

    @contextmanager
    def holding(state):
        module.load_state_dict(before | state)
        yield
        module.load_state_dict(before)

    one, other = make_data(tiny_model, tmp_path / "one"), make_data(tiny_model, tmp_path / "other")
    states = dict(zip(one.client_sizes(), [*states, {}], strict=True))
    for client, state in states.items():
        with holding(state):
            one.synthesize(2, [client], module)
    alone = len(calls)
    calls.clear()
    stream = torch.get_rng_state()
    other.synthesize_by_own_models(2, states, module, holding)
    assert torch.equal(torch.get_rng_state(), stream)
    assert alone > 6
    assert len(calls) == alone if base == "int8" else len(calls) < 0.6 * alone

    [file] = (tmp_path / "one").iterdir()
    assert (tmp_path / "other" / file.name).read_bytes() == file.read_bytes()
    assert len({str(part.candidates) for part in other._parts}) == 3
    assert one.synthesis_metrics() == other.synthesis_metrics()
    assert {client: other.num_synthetic(client) for client in states} == dict.fromkeys(states, 2)

    calls.clear()
    again = make_data(tiny_model, tmp_path / "other")
    again.synthesize_by_own_models(2, states, module, holding)  # read
    assert not calls
    assert again.synthesis_metrics() == one.synthesis_metrics()
