"""A Hugging Face hub on loopback that knows a few models and data sets: their lists of files, cards, and first bytes."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


class Repository:
    """What the hub has of one name.

    Args:
        files: path -> content.
        card: the head of its README.
        gated: may it be read by the right token alone?
        ranged: are parts of its files given, or only whole ones?
    """

    def __init__(
        self, files: dict[str, bytes], card: dict | None = None, gated: bool = False, ranged: bool = True
    ) -> None:
        self.files, self.card, self.gated, self.ranged = files, card or {}, gated, ranged


@contextmanager
def hub_stub(
    repositories: dict[str, Repository], token: str = "right"
) -> Iterator[tuple[str, list[str], list[int]]]:
    """Serves ``models/NAME`` and ``datasets/NAME``, at a branch with ``@BRANCH`` behind it.

    Yields:
        The address, the paths that were asked for, and the bytes of each answer about a file.
    """
    asked: list[str] = []
    sent: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            """Nothing is printed."""

        def do_GET(self) -> None:
            """Lists of files, checks of access, and files."""
            path = unquote(urlsplit(self.path).path).strip("/")
            asked.append(path)
            if path.startswith("api/"):
                self._list(path.removeprefix("api/"))
            else:
                self._file(path)

        def _list(self, path: str) -> None:
            name, check, _ = path.partition("/auth-check")
            name, _, branch = name.removesuffix("/revision/main").partition("/revision/")
            found = repositories.get(name + (f"@{branch}" if branch else ""))
            if found is None:
                return self._answer(404, b"{}", "RevisionNotFound" if branch else "RepoNotFound")
            if check:
                allowed = not found.gated or self.headers.get("Authorization") == f"Bearer {token}"
                return self._answer(200, b"{}") if allowed else self._answer(403, b"{}", "GatedRepo")
            listed = [{"rfilename": file, "size": len(of), "blobId": "0"} for file, of in found.files.items()]
            about = {
                "id": name.partition("/")[2],
                "gated": "manual" if found.gated else False,
                "private": False,
            }
            info = {
                **about,
                "siblings": listed,
                "cardData": found.card,
                "tags": [],
                "downloads": 0,
                "likes": 0,
            }
            return self._answer(200, json.dumps(info).encode())

        def _file(self, path: str) -> None:
            kind = "datasets" if path.startswith("datasets/") else "models"
            name, _, rest = path.removeprefix("datasets/").partition("/resolve/")
            branch = next(
                (
                    key.partition("@")[2]
                    for key in repositories
                    if "@" in key and rest.startswith(key.partition("@")[2])
                ),
                "",
            )
            found = repositories[f"{kind}/{name}" + (f"@{branch}" if branch else "")]
            content = found.files.get(rest.removeprefix(branch or "main").lstrip("/"))
            if content is None:
                return self._answer(404, b"", "EntryNotFound")
            code = 200
            if found.ranged and "Range" in self.headers:
                first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
                code, content = 206, content[int(first) : int(last) + 1]
            sent.append(len(content))
            return self._answer(code, content)

        def _answer(self, code: int, content: bytes, error: str = "") -> None:
            self.send_response(code)
            if error:
                self.send_header("X-Error-Code", error)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked, sent
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
