import asyncio
import email.utils
import re
import sys
import time
from contextlib import suppress

import pytest
from chat_stub import ChatStub, Reply, refuse, say
from refusals import refusal

from fedlight.generators import chat_server
from fedlight.generators.chat_server import ChatServer, Sending, TransientError

KEY = "sk-secret-123"


def answer_of(server):
    answers = {}
    server.ask({"name": {"model": "m", "messages": []}}, answers.__setitem__)
    return answers["name"]


def ask(stub, base_url=None, key=None, **options):
    sending = Sending(**{"retries": 3, "wait_seconds": 0.001, **options})
    return answer_of(ChatServer(base_url or stub.base_url, key, sending))


def answer_x(body, number):
    return say("x")


def fails_then_answers(*failures):
    return lambda body, number: failures[number] if number < len(failures) else say("fine")


NO_COMPLETIONS = (b'{"choices": []}', b'{"choices": [{"message": {"content": 7}}]}', b'["choices"]')


@pytest.mark.parametrize(
    "failure",
    [
        *map(refuse, (500, 503, 429, 408)),
        *map(Reply, (b"<html>busy</html>", *NO_COMPLETIONS)),
        *(Reply(say("half").content[:20], announced=400), Reply(b"", announced=10)),
    ],
    ids=str,
)
def test_what_may_pass_is_tried_again(failure):
    with ChatStub(fails_then_answers(failure, failure)) as stub:
        answer = ask(stub)
    assert (answer.text, answer.retries, len(stub.bodies)) == ("fine", 2, 3)
    assert (answer.prompt_tokens, answer.completion_tokens) == (7, 3)
    assert stub.paths == ["/v1/chat/completions"] * 3


def test_a_server_that_only_fails_is_given_up_in_one_line_after_the_retries():
    words = r"status 500 \(on fire indeed\), in try 4 of 4; what was answered"
    script = fails_then_answers(*[refuse(500, "on fire\nindeed")] * 9)
    with ChatStub(script) as stub, pytest.raises(OSError, match=words):
        ask(stub)
    assert len(stub.bodies) == 4


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (refuse(401, f"bad key {KEY}"), r"status 401 \(bad key \*\*\*\): check the key in THE_KEY"),
        (refuse(403), "check what the key in THE_KEY may do"),
        (refuse(404, "no model m"), r"status 404 \(no model m\): check base_url \(it often ends with /v1\)"),
        (refuse(400, "temperature"), "status 400 .* check base_url, model and extra"),
        (refuse(429, "pay", code="insufficient_quota"), "insufficient_quota.* check your account there"),
        (Reply(b"", 302, (("Location", "http://127.0.0.1:1/v1"),)), "set base_url to the server's own"),
        (Reply(b"plain words", 404), "plain words"),
    ],
)
def test_what_waiting_does_not_mend_ends_at_once_and_never_tells_the_key(reply, words, monkeypatch):
    monkeypatch.setenv("THE_KEY", KEY)
    with ChatStub(lambda body, number: reply) as stub, pytest.raises(OSError, match=words) as caught:
        ask(stub, key="THE_KEY")
    assert len(stub.bodies) == 1
    assert KEY not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert stub.headers[0]["Authorization"] == f"Bearer {KEY}"


def test_a_prompt_that_does_not_fit_into_the_model_has_no_answer():
    reply = refuse(400, "This model's maximum context length is 10 tokens", code="context_length_exceeded")
    with ChatStub(lambda body, number: reply) as stub:
        answer = ask(stub)
    assert (answer.text, answer.too_long, len(stub.bodies)) == ("", True, 1)


def test_a_server_that_hangs_is_not_waited_for_longer_than_asked():
    with ChatStub(fails_then_answers(Reply(hang=True))) as stub:
        begin = time.monotonic()
        assert ask(stub, timeout_seconds=0.4, retries=50).text == "fine"
        assert 0.4 <= time.monotonic() - begin < 30  # it hangs for 60


def test_nor_is_one_that_sends_a_byte_now_and_then():
    slow = say("slow" * 200)._replace(drip_seconds=0.05)  # 45 seconds and more, but never 0.4 without a byte
    with ChatStub(lambda body, number: slow) as stub:
        begin = time.monotonic()
        with pytest.raises(OSError, match=r"no answer within timeout_seconds=0\.4"):
            ask(stub, timeout_seconds=0.4, retries=0)
        assert time.monotonic() - begin < 20


def test_the_server_says_how_long_to_wait_but_for_hours_nobody_waits():
    with ChatStub(fails_then_answers(refuse(429, Retry_After="0.3"))) as stub:
        begin = time.monotonic()
        assert ask(stub).text == "fine"
        assert time.monotonic() - begin >= 0.3
    script = fails_then_answers(refuse(429, "limit", Retry_After="7200"))
    with ChatStub(script) as stub, pytest.raises(OSError, match="asks to wait 7200 s"):
        ask(stub)


def test_the_first_failure_ends_the_requests_that_wait_or_are_under_way():
    def script(body, number):
        if body["which"] == "c":
            time.sleep(0.3)
            return refuse(400, "broken")
        return {"a": refuse(500), "b": Reply(hang=True)}.get(body["which"], say("too much"))

    kept = {}
    with ChatStub(script) as stub:
        sending, begin = Sending(retries=3, wait_seconds=30.0, concurrent=3), time.monotonic()
        server = ChatServer(stub.base_url, None, sending)
        with pytest.raises(OSError, match=r"400 \(broken\)"):
            server.ask({name: {"which": name} for name in "abcd"}, kept.__setitem__)
        assert time.monotonic() - begin < 20
        assert sorted(body["which"] for body in stub.bodies) == ["a", "b", "c"]
    assert not kept


def test_a_caller_that_has_an_event_loop_may_ask():
    async def cell():
        return ask(stub)

    with ChatStub(lambda body, number: say("fine")) as stub:
        assert asyncio.run(cell()).text == "fine"


def test_without_the_package_nothing_is_sent_and_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    missing = pytest.raises(ModuleNotFoundError, match=r"pip install 'fedlight\[chat\]'")
    with ChatStub(answer_x) as stub, missing:
        ask(stub)
    assert not stub.bodies


def test_a_server_that_is_not_there_is_refused_at_once():
    with ChatStub(answer_x) as stub:
        pass
    begin = time.monotonic()
    with pytest.raises(OSError, match=r"cannot be reached .*: check base_url and the network"):
        ask(stub, wait_seconds=30.0)
    assert time.monotonic() - begin < 25  # a second try would have waited for 30


def test_one_that_was_there_before_is_waited_for():
    with ChatStub(answer_x) as stub:
        server = ChatServer(stub.base_url, None, Sending(retries=2, wait_seconds=0.001))
        assert answer_of(server).text == "x"
    with pytest.raises(OSError, match=r"cannot be reached any more .*, in try 3 of 3"):
        answer_of(server)


@pytest.mark.parametrize(
    ("key", "fault"), [(None, "is not set"), ("  ", "is not set"), ("a\nb", "is no key")]
)
def test_without_a_key_nothing_is_sent(key, fault, monkeypatch):
    monkeypatch.delenv("THE_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("THE_KEY", key)
    with ChatStub(answer_x) as stub, refusal(f"environment variable THE_KEY {fault}"):
        ask(stub, key="THE_KEY")
    assert not stub.bodies


@pytest.mark.parametrize("reply", [say("fine"), refuse(401, f"bad key {KEY}")], ids=["answer", "refusal"])
def test_no_log_has_the_key_or_the_prompt(reply, monkeypatch, caplog):
    monkeypatch.setenv("THE_KEY", KEY)
    with ChatStub(lambda body, number: reply) as stub, caplog.at_level("DEBUG"), suppress(OSError):
        server = ChatServer(stub.base_url, "THE_KEY", Sending(retries=0, concurrent=1))
        server.ask({"name": {"messages": [{"role": "user", "content": "private words"}]}}, lambda *kept: None)
    assert stub.headers[0]["Authorization"] == f"Bearer {KEY}"
    logged = "\n".join(record.getMessage() for record in caplog.records)
    assert "POST" in logged
    assert KEY not in logged
    assert "private words" not in logged


@pytest.mark.parametrize("given", [KEY, "", "$THE_KEY", "THE KEY"])
def test_a_key_in_place_of_its_variable_is_refused_and_not_told(given):
    with pytest.raises(ValueError, match="not the name of an environment variable") as told:
        ChatServer("http://localhost/v1", given, Sending())
    assert KEY not in str(told.value)


@pytest.mark.parametrize("key", [None, "THE_KEY"])
def test_of_the_environment_the_named_key_alone_is_sent_and_nothing_of_the_machine(key, monkeypatch):
    for name in ("API_KEY", "ADMIN_KEY", "ORG_ID", "PROJECT_ID", "WEBHOOK_SECRET", "CUSTOM_HEADERS"):
        monkeypatch.setenv(f"OPENAI_{name}", f"X-Own: {KEY}")
    monkeypatch.setenv("HF_TOKEN", KEY)
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("THE_KEY", "sk-given")
    with ChatStub(answer_x) as stub:
        ask(stub, key=key)
    sent = {name.lower(): value for name, value in stub.headers[0].items()}
    assert KEY not in str(stub.headers)
    assert sent.pop("authorization", None) == ("Bearer sk-given" if key else None)
    assert sent.pop("user-agent") == "fedlight"
    plain = {"host", "content-type", "content-length", "accept", "accept-encoding", "connection"}
    assert set(sent) <= plain


def test_this_machine_is_asked_without_a_proxy(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with ChatStub(answer_x) as stub:
        assert ask(stub).text == "x"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"timeout_seconds": 0.0}, "timeout_seconds=0.0 must be in (0"),
        ({"wait_seconds": float("nan")}, "wait_seconds=nan must be in [0"),
        ({"retries": -1}, "retries=-1"),
        ({"base_url": "ftp://x/v1"}, "'ftp://x/v1' is no address"),
        ({"base_url": "localhost:8000"}, "is no address"),
        ({"base_url": f"https://me:{KEY}@host/v1"}, "no user, password or query"),
        ({"base_url": f"https://host/v1?key={KEY}"}, "no user, password or query"),
    ],
)
def test_bad_settings_are_refused(options, words):
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        ask(None, **{"base_url": "http://localhost/v1", **options})
    assert KEY not in str(caught.value)


def test_hosts():
    assert chat_server.host_of("https://api.example.com:8443/v1/") == "api.example.com"
    assert all(map(chat_server.is_this_machine, ("localhost", "127.0.0.1", "127.8.8.8", "::1")))
    assert not any(map(chat_server.is_this_machine, ("192.168.0.1", "example.com")))


def test_waits_double_up_to_a_minute_and_are_never_shorter_than_asked():
    waits = [chat_server.waiting_time(tries, 1.0, None) for tries in range(9)]
    for wait, own in zip(waits, [1, 2, 4, 8, 16, 32, 60, 60, 60], strict=True):
        assert own <= wait <= 1.25 * own
    assert 30 <= chat_server.waiting_time(0, 1.0, 30.0) <= 30.25


def test_dates_to_come_back_at():
    soon = email.utils.formatdate(time.time() + 2000, usegmt=True)
    assert 1900 <= chat_server.seconds_asked(soon) <= 2000
    assert [chat_server.seconds_asked(text) for text in (None, "-3", "tomorrow")] == [None, 0.0, None]


def test_an_answer_that_a_filter_took_is_empty():
    assert chat_server.read_answer(b'{"choices": [{"message": {"content": null}}]}').text == ""
    with pytest.raises(TransientError, match="no chat completion"):
        chat_server.read_answer(b'{"error": "x"}')
