"""Client of a server in OpenAI's chat-completions format, over the ``openai`` package.

Format: https://platform.openai.com/docs/api-reference/chat. The package sends and receives; retries are counted here,
because an answer that is no chat completion is tried again as well, and because the waits are settings.
"""

import asyncio
import concurrent.futures
import email.utils
import ipaddress
import json
import math
import os
import random
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from fedlight.datamodules.rows.columns import replace_surrogates
from fedlight.support.checks import Settings, check_range, refuse_below

LONGEST_WAIT_SECONDS = 600.0
HEADERS = {"host", "content-length", "content-type", "accept", "accept-encoding", "connection"}
MISSING = "an endpoint is asked through the openai package: pip install 'fedlight[chat]'"


class Answer(NamedTuple):
    """Answer to one prompt; tokens are counted by the server."""

    text: str  # empty where there is none
    cut: bool = False  # whether it reached the most tokens that were asked for
    too_long: bool = False  # whether there is none: the prompt does not fit into the model
    prompt_tokens: int = 0
    completion_tokens: int = 0
    retries: int = 0  # failed tries before it


class TransientError(Exception):
    """Failure that may pass; ``seconds`` is how long the server asks to be left alone, None where it does not say."""

    def __init__(self, reason: str, seconds: float | None = None) -> None:
        super().__init__(reason)
        self.seconds = seconds


@dataclass(frozen=True)
class Sending(Settings):
    """How requests are sent, and tried again.

    Args:
        timeout_seconds: longest wait for one answer, above 0.
        retries: most further tries of one request, >= 0.
        wait_seconds: first wait between two tries, >= 0; each further one is twice as long.
        concurrent: requests under way at the same time, >= 1.

    Raises:
        ValueError: a setting is out of range.
    """

    timeout_seconds: float = 60.0
    retries: int = 6
    wait_seconds: float = 1.0
    concurrent: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_below(1, concurrent=self.concurrent)
        refuse_below(0, retries=self.retries)
        check_range("timeout_seconds", self.timeout_seconds, 0, math.inf, above_low=True)
        check_range("wait_seconds", self.wait_seconds, 0, math.inf)


class ChatServer:
    """Client of the server behind ``base_url``; ``outside`` is its host, None where it is this machine.

    ``api_key_variable`` is the environment variable that holds the key; None: no key is sent.

    Raises:
        ValueError: ``api_key_variable`` is no name, or ``base_url`` is no address of a server.
    """

    def __init__(self, base_url: str, api_key_variable: str | None, sending: Sending) -> None:
        if api_key_variable is not None and not (
            api_key_variable.isascii() and api_key_variable.isidentifier()
        ):
            raise ValueError(  # not repeated here: it may be the key
                "api_key_variable is not the name of an environment variable: give a name such as OPENAI_API_KEY; the key "
                "belongs into that variable, never into a config"
            )
        self.base_url, self.host = base_url.rstrip("/"), host_of(base_url)
        self.outside = None if is_this_machine(self.host) else self.host
        self.api_key_variable = api_key_variable
        self.sending = sending
        self._has_answered = False

    def check(self) -> None:
        """Raise ModuleNotFoundError without the package ``openai``, ValueError if the environment has no key."""
        try:
            import openai  # noqa: F401
        except ImportError:
            raise ModuleNotFoundError(MISSING) from None
        self._key()

    def ask(self, requests: Mapping[str, Mapping[str, Any]], keep: Callable[[str, Answer], None]) -> None:
        """Send requests (name -> JSON body) side by side, at most ``concurrent`` at a time; a failure ends all of them.

        ``keep`` is called with each name and answer as they come, in another thread, one call after the other.

        Raises:
            OSError: the server cannot be reached, refuses, or failed ``retries + 1`` times.
        """
        self.check()
        _in_own_loop(self._ask_all(requests, keep))

    async def _ask_all(
        self, requests: Mapping[str, Mapping[str, Any]], keep: Callable[[str, Answer], None]
    ) -> None:
        waiting = iter(requests.items())  # shared: each worker takes the next one
        async with self._client() as client:

            async def serve() -> None:
                for name, body in waiting:
                    keep(name, await self._ask(client, body))

            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(self.sending.concurrent, len(requests))):
                        group.create_task(serve())
            except BaseExceptionGroup as failed:
                raise failed.exceptions[0] from None  # a TaskGroup raises groups alone

    def _client(self) -> Any:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient, Timeout

        key = self._key()

        async def strip(request: Any) -> None:
            # The package adds the platform, and keys and accounts that it finds in the environment.
            for name in set(request.headers) - HEADERS:
                del request.headers[name]
            request.headers["User-Agent"] = "fedlight"
            if key:
                request.headers["Authorization"] = f"Bearer {key}"

        http_client = DefaultAsyncHttpxClient(
            follow_redirects=False,  # they would carry the key elsewhere
            trust_env=self.outside is not None,  # this machine is asked without a proxy
            event_hooks={"request": [strip]},
            # To connect takes less than the whole, so that an absent host is told from a slow one.
            timeout=Timeout(self.sending.timeout_seconds, connect=0.9 * self.sending.timeout_seconds),
        )
        return AsyncOpenAI(
            base_url=self.base_url, api_key=key or "none", max_retries=0, http_client=http_client
        )

    async def _ask(self, client: Any, body: Mapping[str, Any]) -> Answer:
        for tries in range(self.sending.retries + 1):
            try:
                return (await self._ask_once(client, body))._replace(retries=tries)
            except TransientError as failure:
                seconds = waiting_time(tries, self.sending.wait_seconds, failure.seconds)
                if tries == self.sending.retries or seconds > LONGEST_WAIT_SECONDS:
                    asked = f", and asks to wait {seconds:.0f} s" if seconds > LONGEST_WAIT_SECONDS else ""
                    raise OSError(
                        f"{self.base_url}: {failure}, in try {tries + 1} of {self.sending.retries + 1}{asked}; what was "
                        "answered is kept: give the same command again later, or raise retries or timeout_seconds"
                    ) from None
                await asyncio.sleep(seconds)
        raise AssertionError("unreachable")

    async def _ask_once(self, client: Any, body: Mapping[str, Any]) -> Answer:
        from openai import APIConnectionError, APIStatusError, APITimeoutError, HttpxBinaryResponseContent

        try:
            # The limit of the package holds between two bytes, this one for the whole answer, however slowly it drips.
            async with asyncio.timeout(self.sending.timeout_seconds):
                reply = await client.post(
                    "/chat/completions", cast_to=HttpxBinaryResponseContent, body=dict(body)
                )
        except APIStatusError as error:
            self._has_answered = True
            return self._refused(error.status_code, error.response.headers, error.response.content)
        except APIConnectionError as error:
            cause = error.__cause__
            if type(cause).__name__ in ("ConnectError", "ConnectTimeout"):
                raise self._unreachable(str(cause) or "no answer") from None
            if isinstance(error, APITimeoutError):
                raise self._too_slow() from None
            raise TransientError(f"the connection broke ({type(cause).__name__})") from None
        except TimeoutError:
            raise self._too_slow() from None
        self._has_answered = True
        return read_answer(reply.content)

    def _too_slow(self) -> TransientError:
        return TransientError(f"no answer within timeout_seconds={self.sending.timeout_seconds:g}")

    def _unreachable(self, reason: str) -> Exception:
        """Return what to raise: a server that has answered before is waited for, another is refused at once."""
        if self._has_answered:
            return TransientError(f"the server cannot be reached any more ({reason})")
        return OSError(f"{self.base_url} cannot be reached ({reason}): check base_url and the network")

    def _refused(self, status: int, headers: Mapping[str, str], content: bytes) -> Answer:
        message = self._message(content)
        low = message.lower()
        if status in (400, 413, 422) and ("context length" in low or "context_length" in low):
            return Answer("", too_long=True)
        if status in (408, 409, 425) or status >= 500 or (status == 429 and "insufficient_quota" not in low):
            raise TransientError(f"status {status}{message}", seconds_asked(headers.get("Retry-After")))
        remedy = {
            401: f"check the key in {self.api_key_variable}"
            if self.api_key_variable
            else "it wants a key: set api_key_variable",
            403: f"check what the key in {self.api_key_variable} may do",
            404: "check base_url (it often ends with /v1) and model",
            429: "check your account there",
        }.get(status, "check base_url, model and extra")
        if 300 <= status < 400:
            remedy = f"it points to {headers.get('Location', 'elsewhere')}: set base_url to the server's own address"
        raise OSError(f"{self.base_url} refuses with status {status}{message}: {remedy}")

    def _message(self, content: bytes) -> str:
        """Return the beginning of the server's message, in brackets, with the key taken out."""
        text = content[:10_000].decode(errors="replace")
        try:
            error = json.loads(content)["error"]
            text = f"{error['message']} {error.get('code') or ''}" if isinstance(error, dict) else str(error)
        except (ValueError, TypeError, KeyError):
            pass
        if key := self._key():
            text = text.replace(key, "***")
        return f" ({' '.join(text.split())[:200]})" if text.strip() else ""

    def _key(self) -> str | None:
        if self.api_key_variable is None:
            return None
        key = os.environ.get(self.api_key_variable, "").strip()
        if not key or not key.isascii() or not key.isprintable():
            state = "is not set" if not key else "is no key: it has characters that no header takes"
            raise ValueError(
                f"the environment variable {self.api_key_variable} {state}: put the key of {self.host} there, or set "
                "api_key_variable to null where the server wants none"
            )
        return key


def _in_own_loop(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end in an event loop of another thread: the caller may have a running one, as in a notebook."""
    loop, done = asyncio.new_event_loop(), concurrent.futures.Future[None]()

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(work)
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, daemon=True).start()  # a daemon: an answer still due keeps no process alive
    try:
        done.result()
    except KeyboardInterrupt:
        loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
        raise


def read_answer(content: bytes) -> Answer:
    """Return the answer in a reply of the server; raise TransientError for a reply that is no chat completion."""
    try:
        reply = json.loads(content)
        choice = reply["choices"][0]
        text = choice["message"]["content"] or ""  # null where the server's filter took it
        cut = choice.get("finish_reason") == "length"
        used = reply.get("usage") or {}
        tokens = [int(used.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError):
        raise TransientError("the answer is no chat completion") from None
    if not isinstance(text, str):
        raise TransientError("the answer is no text")
    return Answer(replace_surrogates(text), cut, False, *tokens)


def waiting_time(tries: int, first: float, asked: float | None) -> float:
    """Return the seconds until the next try: twice as long each time, a minute at most, no less than the server asks for."""
    pause = min(first * 2**tries, 60.0)
    # A quarter more at random, so that many clients do not come back at the same moment.
    return max(pause, asked or 0.0) + random.uniform(0, 0.25) * pause


def seconds_asked(retry_after: str | None) -> float | None:
    """Return the seconds of a ``Retry-After`` header, a number or a date; None without one or where it is neither."""
    if retry_after is None:
        return None
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    except ValueError:
        return None


def host_of(base_url: str) -> str:
    """Return the host of a server's address; raise ValueError for another text and for one with a password or a query."""
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"base_url={base_url!r} is no address: give one such as http://localhost:8000/v1")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(
            "base_url has more than a host and a path: no user, password or query may stand in it, a key belongs into "
            "the environment variable that api_key_variable names"
        )
    return parts.hostname


def is_this_machine(host: str) -> bool:
    """Tell whether a host is this machine, so that nothing sent to it leaves."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
