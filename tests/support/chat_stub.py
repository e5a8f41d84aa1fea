"""A server in the chat-completions format on loopback, which answers, fails and dawdles as a test tells it."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple


class Reply(NamedTuple):
    """What the server does with one request."""

    content: bytes = b""
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()
    announced: int | None = None  # bytes that the header promises, where it lies
    drip_seconds: float = 0.0  # between two bytes
    hang: bool = False  # no answer at all


def say(text, finish="stop"):
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish}
    usage = {"prompt_tokens": 7, "completion_tokens": 3}
    return Reply(json.dumps({"choices": [choice], "usage": usage}).encode())


def refuse(status, message="no", code=None, **headers):
    return Reply(
        json.dumps({"error": {"message": message, "code": code}}).encode(), status, tuple(headers.items())
    )


def judge_spec(base_url, cache=None, sending=None, budget=None, **init):
    """Class path and arguments of a judge that asks a server, as recipes write them."""
    sent = {"base_url": base_url, "model": "judge", "api_key_variable": None, "cache": cache and str(cache)}
    sent |= {"sampling": {"temperature": 0}, "sending": sending or {}, "budget": budget or {}}
    endpoint = {"class_path": "fedlight.generators.endpoint.ChatEndpoint", "init_args": sent}
    return {
        "class_path": "fedlight.judges.chat_judge.ChatJudge",
        "init_args": {"endpoint": endpoint, **init},
    }


class ChatStub:
    """Use it in a ``with``; ``script`` gets a request's body and how many came before, and returns a `Reply`."""

    def __init__(self, script: Callable[[dict, int], Reply]) -> None:
        self.bodies: list[dict] = []
        self.headers: list[dict] = []
        self.paths: list[str] = []
        self.under_way = self.most_under_way = 0
        self._script, self._lock, self._over = script, threading.Lock(), threading.Event()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stub._serve(self, body)

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.base_url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    @property
    def prompts(self) -> list[str]:
        return [body["messages"][-1]["content"] for body in self.bodies]

    def __enter__(self) -> "ChatStub":
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *error) -> None:
        self._over.set()
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, handler, body) -> None:
        with self._lock:
            number = len(self.bodies)
            self.bodies.append(body)
            self.headers.append(dict(handler.headers))
            self.paths.append(handler.path)
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            try:
                reply = self._script(body, number)
            finally:  # before the answer is on its way: whoever has it may ask again at once
                with self._lock:
                    self.under_way -= 1
            if reply.hang:
                self._over.wait(60)
                return
            handler.send_response(reply.status)
            for name, value in reply.headers:
                handler.send_header(name.replace("_", "-"), value)
            handler.send_header("Content-Length", str(reply.announced or len(reply.content)))
            handler.end_headers()
            step = 1 if reply.drip_seconds else max(1, len(reply.content))
            for start in range(0, len(reply.content), step):
                handler.wfile.write(reply.content[start : start + step])
                handler.wfile.flush()
                self._over.wait(reply.drip_seconds)
        except (BrokenPipeError, ConnectionResetError):  # the client did not wait
            pass
