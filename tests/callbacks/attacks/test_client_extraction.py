import random
from types import SimpleNamespace

import pytest
import torch
from attacked import fit, found, loop, make_data
from refusals import refusal

from fedlight import Lora, SFTModule
from fedlight.callbacks.attacks.client_extraction import ClientExtraction, _unwritten
from fedlight.datamodules.rows import Canaries
from fedlight.datamodules.text import Template

ROWS = {
    "a": [
        {"instruction": "who", "response": "born on 12.05.1987 with code RX-4711"},
        {"instruction": "and", "response": "was born on 13.06.1988"},
        {"instruction": "mobile 070 1111", "response": "call 555\n0100 or 070 1111"},
    ],
    "b": [
        {"instruction": "who", "response": "born on 01.01.1990 with code RX-4711"},
        {"instruction": "phone", "response": "070 1111 or 070 2222"},
    ],
    "c": [
        {"instruction": "and", "response": "code QY-99120"},
        {"instruction": "key", "response": "red blue"},
    ],
    "d": [{"instruction": "nothing", "response": "private 12"}],
}
PLANTED = {"c": ROWS["c"][1:]}


class Remembers:
    """Writes two texts in turn, by what it is asked."""

    def __init__(self, longest=10_000):
        self.asked, self.longest = [], longest

    def fits(self, prompts, new_tokens):
        return [len(prompt) + new_tokens <= self.longest for prompt in prompts]

    def generate(self, prompts, n, temperature, top_p, max_new_tokens, seed, stop, strip):
        [prompt] = prompts
        assert (temperature, top_p, stop, strip) == (0.5, 1.0, (), True)
        self.asked.append((prompt, n, seed))
        texts = {
            "born on": ["01.01.1990", "12.05.1987 and 01.01.1990"],
            "A: call": ["070 2222", "red blue 2"],
        }
        return [[texts.get(prompt, ["QY-991200"])[k % 2 if prompt in texts else 0] for k in range(n)]]

    def log_likelihoods(self, prompts, continuations):
        raise AssertionError


def prepared(rows=ROWS, client="a", context_words=2, samples=3, **settings):
    data = SimpleNamespace(client_rows=rows, planted=PLANTED, template=Template("Q: {instruction}\nA:"))
    return ready(
        data, None, client, context_words=context_words, temperature=0.5, samples=samples, **settings
    )


def ready(data, module, client="c0", **settings):
    attack = ClientExtraction(client, **settings)
    attack._reported = {None}
    attack.prepare(data, module)
    return attack


def test_by_hand():
    model = Remembers()
    metrics, records = prepared(batch_size=2).attack(model, None)
    # RX-4711 and 070 1111 of b are in rows of a as well; 12 has too few digits.
    victims = {"01.01.1990": ["b"], "070 2222": ["b"], "QY-99120": ["c"], "red blue": ["c"]}
    items = {record["item"]: record for record in records if "item" in record}
    assert {item: record["clients"] for item, record in items.items()} == victims
    recovered = {item for item, record in items.items() if record["recovered"]}
    assert recovered == {"01.01.1990", "070 2222", "red blue"}
    assert [item for item, record in items.items() if record["planted"]] == ["red blue"]
    # Of four items two follow "born on"; the other contexts follow by the alphabet, and there are two draws a context.
    asked = [prompt for prompt, _, _ in model.asked]
    assert asked == ["born on"] * 2 + ["A: call"] * 2 + ["with code"] * 2
    assert [n for _, n, _ in model.asked] == [2, 1] * 3
    assert len({seed for _, _, seed in model.asked}) == 6
    expected = {"coverage": 3 / 4, "efficiency": 3 / 9, "canaries": 1, "queries": 9, "left_out": 0}
    assert metrics == expected
    texts = [record for record in records if "text" in record]
    assert len(texts) == 9
    assert texts[1] == {"prefix": "born on", "text": "12.05.1987 and 01.01.1990", "items": ["01.01.1990"]}
    assert texts[-1]["items"] == []  # QY-991200 is another code


def test_the_most_frequent_contexts_alone_and_items_too_long():
    model = Remembers()
    metrics, _ = prepared(prefixes=1).attack(model, None)
    assert [prompt for prompt, _, _ in model.asked] == ["born on"]
    assert (metrics["coverage"], metrics["efficiency"], metrics["queries"]) == (1 / 4, 1 / 3, 3)
    none = prepared(max_new_tokens=50).attack(Remembers(longest=40), None)
    assert none == ({"queries": 0, "left_out": 4}, [])
    short = prepared(max_new_tokens=23).attack(Remembers(longest=40), None).metrics
    assert (short["left_out"], short["queries"]) == (2, 6)  # two items of 18 characters with their contexts


def test_neither_the_order_of_clients_nor_that_of_rows_matters():
    drawn = random.Random(0)
    clients = drawn.sample([*ROWS], len(ROWS))
    mixed = {client: drawn.sample(ROWS[client], len(ROWS[client])) for client in clients}
    results = [prepared(rows, client=None).attack(Remembers(), None) for rows in (ROWS, mixed)]
    assert results[0] == results[1]
    chosen = {prepared(client=None, seed=seed)._items[0].text for seed in range(20)}
    assert len(chosen) == 3  # d has no item


def test_the_whole_prompt_can_be_the_context():
    attack = prepared(context_words=None)
    assert [item.context for item in attack._items][:2] == [
        "Q: who\nA: born on",
        "Q: who\nA: born on 12.05.1987 with code",
    ]
    assert [item.written for item in attack._items][2:] == [" 13.06.1988", " 555\n0100"]


def test_random_secrets_tell_what_is_written_by_chance():
    data = make_data(canaries=Canaries(repeats=2, length=3))
    data.setup("fit")
    attack = ready(data, None, samples=1)
    every = [" ".join(f"{number:03}") for number in range(1000)]
    held = [row["response"] for rows in data.planted.values() for row in rows]
    assert {*attack._random} <= {*every} - {*held}
    assert len(attack._random) > 500
    for said, chance in ((" , ".join(every), 1), (held[0], 0), (attack._random[0], 1 / len(attack._random))):
        model = Remembers()
        model.generate = lambda *_, said=said, **__: [[said]]
        metrics = attack.attack(model, None).metrics
        assert metrics["chance"] == pytest.approx(chance)
        assert metrics["canaries"] == metrics["coverage"] == (chance == 1)


def module_and_data(tiny_model, **settings):
    module, data = SFTModule(tiny_model, lora=Lora(dropout=0.1), seed=1), make_data(**settings)
    module.configure_model()
    data.setup("fit")
    return module, data


def test_what_the_attacker_trains_is_given_back_bit_for_bit(tiny_model):
    module, data = module_and_data(tiny_model, canaries=Canaries(number=3, length=3))
    module.train()
    weights = dict(module.named_parameters())
    trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
    for weight in trained.values():
        weight.grad = torch.ones_like(weight)
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    gradients = {name: weight.grad for name, weight in trained.items()}
    states = torch.get_rng_state(), random.getstate()
    losses = {}
    for steps in (0, 20):
        attack = ready(data, module, steps=steps, lr=0.01, batch_size=2, samples=2, max_new_tokens=3)
        pairs = [(item.context, item.written) for item in attack._items]

        def loss(prompts, *_, pairs=pairs, steps=steps, **__):
            scored = module.log_likelihoods([context for context, _ in pairs], [[text] for _, text in pairs])
            losses[steps] = sum(-text.log_prob for [text] in scored)
            return [["7 7 7"] * 2 for _ in prompts]

        module.generate, generate = loss, module.generate
        attack.attack(module, None)
        module.generate = generate
    assert losses[20] < 0.7 * losses[0]
    assert all(torch.equal(weight, before[name]) for name, weight in weights.items())
    assert all(weight.grad is gradients[name] for name, weight in trained.items())
    assert all((gradient == 1).all() for gradient in gradients.values())
    assert all(part.training for part in module.modules())
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()


@pytest.mark.parametrize(("steps", "lr"), [(4, 0.1), (4, 1e30), (1, 1e30)])  # the last step is looked at, too
def test_they_are_given_back_after_an_error_too(tiny_model, steps, lr):
    module, data = module_and_data(tiny_model)
    before = {name: weight.detach().clone() for name, weight in module.named_parameters()}
    attack = ready(data, module, steps=steps, lr=lr)
    module.generate = None
    error = "not callable" if lr < 1 else r"lr=1e\+30: the attacker's training diverged; lower it"
    with pytest.raises((TypeError, ValueError), match=error):
        attack.attack(module, None)
    assert all(torch.equal(weight, before[name]) for name, weight in module.named_parameters())


def test_a_run_has_the_same_weights_with_and_without_the_attack(tiny_model, tmp_path):
    settings = {"samples": 2, "max_new_tokens": 4, "before_training": True}
    ends = {}
    for name, callbacks in (
        ("without", []),
        ("asks", [ClientExtraction(**settings)]),
        ("trains", [ClientExtraction(steps=3, lr=0.1, **settings)]),
    ):
        module, _ = fit(tiny_model, tmp_path / name, loop(), *callbacks)
        ends[name] = module.state_dict()
    for name in ("asks", "trains"):
        assert all(torch.equal(weight, ends["without"][key]) for key, weight in ends[name].items())
        rows = found(tmp_path / name)
        assert list(rows) == [(number, "global") for number in range(4)]
        names = {"coverage", "efficiency", "canaries", "chance", "queries", "left_out"}
        assert {metric.split("/")[1] for metric in rows[1, "global"]} == names
    assert any(weight.abs().sum() for name, weight in ends["asks"].items() if "lora_B" in name)
    asked, trained = (
        (tmp_path / name / "attacks/round_3/client_extraction.jsonl").read_text()
        for name in ("asks", "trains")
    )
    assert asked != trained


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"targets": ["global", "uploads"]}, "a client sees the server's model alone; name global alone"),
        ({"prefixes": 0}, r"ClientExtraction\.prefixes=0 must be at least 1"),
        ({"context_words": 0}, r"ClientExtraction\.context_words=0 must be at least 1"),
        ({"steps": -1}, r"ClientExtraction\.steps=-1 must be at least 0"),
        ({"lr": 0}, r"ClientExtraction\.lr=0 must be in \(0, inf\)"),
        ({"temperature": 0}, r"ClientExtraction\.temperature=0 must be in \(0, inf\)"),
    ],
)
def test_settings_that_are_refused(settings, message):
    with refusal(message):
        ClientExtraction(**settings)


def test_clients_and_modules_that_are_refused():
    with refusal("client='d' is no client with private items; such are a, b, c"):
        prepared(client="d")
    with refusal(r"no client has private items: set data\.rows\.canaries"):
        prepared({"d": ROWS["d"]}, client=None)
    with refusal(r"no other client has private items that .* 'a' do not contain: set data"):
        prepared({"a": ROWS["a"], "d": ROWS["d"]}, client=None)
    with refusal("steps=1 needs a module with response_batch and example_losses"):
        ClientExtraction(steps=1).check_settings(Remembers(), make_data())
    ClientExtraction().check_settings(Remembers(), make_data())


def test_items_inside_of_the_attackers_own_texts_are_not_the_others():
    assert _unwritten(["555 0199", "4711 22"], ["call 555 0199 4711 now"]) == ["4711 22"]
