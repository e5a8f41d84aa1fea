import json
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from chat_stub import ChatStub, Reply, refuse, say

from fedlight.datamodules.instructions.augmentation import settings_of
from fedlight.evaluation.tasks.sampling import Sampling
from fedlight.generators.chat_server import Sending
from fedlight.generators.endpoint import ChatEndpoint, TextGenerator

KEY = "sk-secret-123"
ONE_BY_ONE = Sending(wait_seconds=0.001, concurrent=1)


def endpoint(stub, tmp_path, **options):
    settings = {"api_key_variable": None, "sending": Sending(wait_seconds=0.001)}
    return ChatEndpoint(stub.base_url, "m", **{"cache": str(tmp_path / "answers"), **settings, **options})


def echo(body, number):
    return say(f" to {body['messages'][-1]['content']} ")


def test_answers_come_in_the_order_of_the_prompts_however_long_each_takes(tmp_path):
    def script(body, number):
        time.sleep(0.02 * (8 - int(body["messages"][-1]["content"])))
        return echo(body, number)

    with ChatStub(script) as stub:
        asking = endpoint(stub, tmp_path, sending=Sending(concurrent=4))
        assert asking.complete([str(i) for i in range(8)]) == [f"to {i}" for i in range(8)]
        assert 2 <= stub.most_under_way <= 4


def test_half_a_character_is_replaced_in_answers_and_on_disk(tmp_path):
    with ChatStub(lambda body, number: say("cut \ud83d")) as stub:
        for _ in range(2):  # of the server, then of the disk
            [answer] = endpoint(stub, tmp_path).complete(["a"])
            assert answer == "cut \ufffd"
            answer.encode()
        assert len(stub.bodies) == 1


def test_the_request_has_what_was_set_and_nothing_else(tmp_path):
    with ChatStub(echo) as stub:
        sampling = Sampling(temperature=0.5, max_new_tokens=9)
        endpoint(stub, tmp_path, system="be short", sampling=sampling).complete(["a"])
        more = {"stop": ["\n"], "seed": 3, "extra": {"max_tokens": None, "max_completion_tokens": 5}}
        endpoint(stub, tmp_path, **more).complete(["a"])
    assert stub.bodies[1].pop("seed") >= 0
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": "a"}]
    first = {"model": "m", "messages": messages, "temperature": 0.5, "top_p": 1.0, "max_tokens": 9}
    second = {"model": "m", "messages": messages[1:], "temperature": 0.7, "top_p": 1.0, "stop": ["\n"]}
    assert stub.bodies == [first, {**second, "max_completion_tokens": 5}]


def test_a_rerun_asks_nothing_and_needs_no_key(tmp_path, monkeypatch):
    monkeypatch.setenv("THE_KEY", KEY)
    with ChatStub(echo) as stub:
        first = endpoint(stub, tmp_path, api_key_variable="THE_KEY")
        answers = first.complete(["a", "b"])
        monkeypatch.delenv("THE_KEY")
        sending = Sending(timeout_seconds=9, concurrent=1)
        stub.base_url += "/"
        again = endpoint(stub, tmp_path, api_key_variable="THE_KEY", sending=sending)
        assert again.complete(["b", "a"]) == answers[::-1]
        assert len(stub.bodies) == 2
    assert (first.counts.asked, first.counts.cached) == (2, 0)
    assert (again.counts.asked, again.counts.cached, again.counts.prompt_tokens) == (0, 2, 0)


def test_what_was_answered_before_a_failure_is_not_asked_again(tmp_path):
    failing = [True]

    def script(body, number):
        return refuse(400) if body["messages"][-1]["content"] == "c" and failing[0] else echo(body, number)

    with ChatStub(script) as stub:
        asking = endpoint(stub, tmp_path, sending=ONE_BY_ONE)
        with pytest.raises(OSError, match="status 400"):
            asking.complete(["a", "b", "c", "d"])
        assert (stub.prompts, stub.most_under_way) == (["a", "b", "c"], 1)  # the error stops the rest
        failing[0] = False
        again = endpoint(stub, tmp_path, sending=ONE_BY_ONE)
        assert again.complete(["a", "b", "c"]) == ["to a", "to b", "to c"]
        assert stub.prompts == ["a", "b", "c", "c"]


@pytest.mark.parametrize(
    "change",
    [
        *({"sampling": Sampling(temperature=0.1)}, {"sampling": Sampling(top_p=0.9)}),
        *({"sampling": Sampling(max_new_tokens=7)}, {"seed": 1}, {"system": "s"}, {"stop": ["x"]}),
    ],
    ids=str,
)
def test_another_setting_asks_anew(change, tmp_path):
    with ChatStub(echo) as stub:
        endpoint(stub, tmp_path).complete(["a"])
        endpoint(stub, tmp_path, **change).complete(["a"])
        assert len(stub.bodies) == 2


def test_a_prompt_twice_is_drawn_twice_but_at_temperature_0_asked_once(tmp_path):
    with ChatStub(lambda body, number: say(f"draw {number}")) as stub:
        drawing = endpoint(stub, tmp_path, sending=ONE_BY_ONE)
        assert drawing.complete(["a", "a"]) == ["draw 0", "draw 1"]
        assert drawing.complete(["a", "a", "a"]) == ["draw 0", "draw 1", "draw 2"]
        assert drawing.complete(["a", "a"], draw=1) == ["draw 3", "draw 4"]
        assert drawing.complete(["a"]) + drawing.complete(["a"], draw=1) == ["draw 0", "draw 3"]
        greedy = endpoint(stub, tmp_path, sampling=Sampling(temperature=0.0))
        assert greedy.complete(["a", "a"]) + greedy.complete(["a"], draw=1) == ["draw 5"] * 3
        assert len(stub.bodies) == 6


def test_every_draw_has_its_seed(tmp_path):
    with ChatStub(echo) as stub:
        drawing = endpoint(stub, tmp_path, seed=5, sending=ONE_BY_ONE)
        drawing.complete(["a", "a"])
        drawing.complete(["a"], draw=1)
        seeds = [body["seed"] for body in stub.bodies]
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 2**31 for seed in seeds)


@pytest.mark.parametrize("damage", [b"", b"{", b'{"text": 7}', b'{"words": "x"}', b"[1]"])
def test_a_damaged_answer_on_disk_is_asked_for_again(damage, tmp_path):
    with ChatStub(echo) as stub:
        endpoint(stub, tmp_path).complete(["a"])
        (file,) = (tmp_path / "answers").rglob("*.json")
        whole = file.read_bytes()
        file.write_bytes(damage)
        assert endpoint(stub, tmp_path).complete(["a"]) == ["to a"]
        assert (len(stub.bodies), file.read_bytes()) == (2, whole)


def test_without_a_cache_everything_is_asked(tmp_path):
    with ChatStub(echo) as stub:
        asking = endpoint(stub, tmp_path, cache=None)
        assert asking.complete(["a"]) + asking.complete(["a"]) == ["to a", "to a"]
        assert len(stub.bodies) == 2
    assert not list(tmp_path.iterdir())


def test_the_disk_has_neither_key_nor_prompt_and_others_cannot_read_it(tmp_path, monkeypatch):
    monkeypatch.setenv("THE_KEY", KEY)
    with ChatStub(lambda body, number: say("fine")) as stub:
        asking = endpoint(stub, tmp_path, api_key_variable="THE_KEY")
        asking.complete(["my private row"])
    (file,) = (path for path in (tmp_path / "answers").rglob("*") if path.is_file())
    assert KEY not in file.read_text()
    assert "private" not in file.read_text()
    assert file.stat().st_mode & 0o077 == 0
    kept = repr((vars(asking), vars(asking._server), asking.settings()))
    assert KEY not in kept


def test_settings_are_what_the_answers_depend_on():
    asking = ChatEndpoint("https://api.example.com/v1", "m", extra={"a": 1}, sending=Sending(retries=2))
    expected = {"class": "ChatEndpoint", "base_url": "https://api.example.com/v1", "model": "m"}
    sampling = {"class": "Sampling", "temperature": 0.7, "top_p": 1.0, "max_new_tokens": 512}
    expected |= {"sampling": sampling, "stop": None, "seed": None, "system": None}
    assert asking.settings() == {**expected, "extra": {"a": 1}, "keep_cut": False}
    json.dumps(asking.settings())
    assert asking.sends_to == "api.example.com"
    assert ChatEndpoint("http://localhost:1/v1", "m").sends_to is None


def test_a_cut_answer_is_none_unless_it_is_kept(tmp_path):
    with ChatStub(lambda body, number: say("half a", finish="length")) as stub:
        asking = endpoint(stub, tmp_path)
        assert asking.complete(["a"]) == [""]
        assert endpoint(stub, tmp_path, keep_cut=True).complete(["a"]) == ["half a"]
        assert asking.usage()["cut"] == 1
        assert len(stub.bodies) == 1  # a matter of reading, not of asking


def test_what_is_counted(tmp_path):
    def script(body, number):
        too_long = body["messages"][-1]["content"] == "long"
        return refuse(500) if number == 0 else refuse(400, "context length") if too_long else echo(body, 0)

    with ChatStub(script) as stub:
        asking = endpoint(stub, tmp_path, sending=ONE_BY_ONE)
        assert asking.complete(["a", "long", "b"]) == ["to a", "", "to b"]
    counted = {"asked": 3, "cached": 0, "retries": 1, "cut": 0, "too_long": 1}
    assert asking.usage() == {**counted, "prompt_tokens": 14, "completion_tokens": 6}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((Sampling, {"temperature": -0.1}), (Sampling, {"top_p": 0.0}), (Sampling, {"max_new_tokens": 0})),
        *((Sending, {"concurrent": 0}), (partial(ChatEndpoint, "http://localhost/v1"), {"model": ""})),
    ],
)
def test_bad_settings_are_refused(kind, options):
    (name,) = options
    with pytest.raises(ValueError, match=name):
        kind(**options)


def test_nothing_asked_nothing_sent(tmp_path):
    with ChatStub(echo) as stub:
        assert endpoint(stub, tmp_path, api_key_variable="NO_SUCH_KEY").complete([]) == []
        assert not stub.bodies


def test_a_generator_of_ones_own_tells_its_settings():
    class Shouts(TextGenerator):
        without_effect = ("quiet",)

        def __init__(self, times: int, quiet: bool = False):
            self.times, self.quiet = times, quiet

        def complete(self, prompts, draw=0):
            return [prompt.upper() * self.times for prompt in prompts]

    assert Shouts(2).complete(["a"]) == ["AA"]
    assert Shouts(2).settings() == {"class": "Shouts", "times": 2} == settings_of(Shouts(2), ["quiet"])


def test_ctrl_c_does_not_wait_for_a_server_that_hangs(tmp_path):
    asked = threading.Event()

    def script(body, number):
        asked.set()
        return Reply(hang=True)

    with ChatStub(script) as stub:
        code = f"""
import signal
from fedlight.generators.endpoint import ChatEndpoint
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
ChatEndpoint({stub.base_url!r}, "m", api_key_variable=None, cache=None).complete(["a"])
"""
        root = Path(__file__).parents[2]
        process = subprocess.Popen([sys.executable, "-c", code], cwd=root, stderr=subprocess.PIPE)
        assert asked.wait(60)
        process.send_signal(signal.SIGINT)
        try:
            _, error = process.communicate(timeout=120)
        finally:
            process.kill()
    assert b"KeyboardInterrupt" in error
