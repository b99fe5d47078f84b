"""An imitation of the Hugging Face hub on 127.0.0.1, for the real clients: repositories of models and datasets, and what can go wrong there.

They read HF_ENDPOINT when they are imported, so conftest.py reserves a port before that; nothing listens there outside of `serving`.
"""

import atexit
import hashlib
import json
import re
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from typing import Literal
from urllib.parse import unquote, urlsplit

# What a path answers instead: a status with the hub's own code for it, half of a file, other bytes of the same length, or nothing at all.
Fault = tuple[int, str | None] | Literal["cut", "changed", "silent"]
GATED: Fault = (401, "GatedRepo")
LARGE = (".safetensors", ".parquet", ".gz")  # kept under their sha256, as the hub does


class Hub(ThreadingHTTPServer):
    """Repositories by `model:ID` or `dataset:ID`, faults by a pattern of the path, and the requests so far (`GET /path`)."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler, bind_and_activate=False)
        self.server_bind()
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer's own asks for this machine's name

    @contextmanager
    def serving(self) -> Iterator["Hub"]:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.faults: dict[str, Fault] = {}
        self.asked: list[str] = []
        self.over = threading.Event()
        self.server_activate()
        thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.over.set()
            self.shutdown()
            thread.join()
            self.socket.close()
            self.socket = socket.socket()
            self.server_bind()

    def fetched(self, suffix: str) -> int:
        """How often such files were fetched."""
        return sum(line.startswith("GET ") and line.endswith(suffix) for line in self.asked)


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(f"{self.command} {path}")
        asked = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        fault = next((fault for pattern, fault in self.server.faults.items() if re.search(pattern, path)), None)
        if fault == "silent":
            self.server.over.wait()
            self.close_connection = True
        elif isinstance(fault, tuple):
            self._send(status=fault[0], code=fault[1])
        else:
            self._answer(path, asked, fault)

    do_HEAD = do_POST = do_GET

    def _answer(self, path: str, asked: dict, fault: Fault | None) -> None:
        for key, files in self.server.repositories.items():
            kind, _, name = key.partition(":")
            api, raw = f"/api/{kind}s/{name}", f"/{'datasets/' if kind == 'dataset' else ''}{name}/resolve/"
            if path.startswith(raw):
                return self._file(*path.removeprefix(raw).split("/", 1), files, fault)
            if path == api or path.startswith(api + "/"):
                what, revision, folder = f"{path.removeprefix(api).lstrip('/')}//".split("/", 2)
                said = _tree(files, folder.strip("/"), "recursive=true" in self.path.lower())
                if what == "paths-info":
                    said = [entry for entry in _tree(files, "", True) if entry["path"] in asked["paths"]]
                elif what != "tree":
                    said = {"id": name, "sha": _commit(revision, files), "siblings": [], "private": False}
                return self._send(json.dumps(said).encode())
        return self._send(status=404, code="RepoNotFound")

    def _file(self, revision: str, name: str, files: dict[str, bytes], fault: Fault | None) -> None:
        head = {"X-Repo-Commit": _commit(revision, files)}
        if name not in files:
            return self._send(status=404, code="EntryNotFound", **head)
        content = files[name]
        first, last = 0, len(content) - 1
        if asked := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range") or ""):
            first, last = int(asked[1] or 0), min(int(asked[2] or last), last)
            head["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        sent = content[:-9] + bytes(9) if fault == "changed" else content
        head |= {"ETag": f'"{_digest(name, content)}"', "X-Linked-Size": str(len(content)), "Accept-Ranges": "bytes"}
        return self._send(sent[first : last + 1], 206 if asked else 200, cut=fault == "cut", **head)

    def _send(self, body: bytes = b"", status: int = 200, *, code: str | None = None, cut: bool = False, **head: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **({"X-Error-Code": code} if code else {}), **head}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)
            self.close_connection |= cut


def _commit(revision: str, files: dict[str, bytes]) -> str:
    return revision if len(revision) == 40 else hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


def _digest(name: str, content: bytes) -> str:
    """sha256 of a large file, git's name of a small one."""
    if name.endswith(LARGE):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _tree(files: dict[str, bytes], folder: str, recursive: bool) -> list[dict]:
    """The entries of a folder, folders included, as the hub lists them."""
    found = {}
    for path, content in files.items():
        digest = _digest(path, content)
        large = {"lfs": {"oid": digest, "size": len(content), "pointerSize": 130}} if path.endswith(LARGE) else {}
        found[path] = {"type": "file", "path": path, "size": len(content), "oid": digest[:40], **large}
        for parent in [*PurePosixPath(path).parents][:-1]:
            found[str(parent)] = {"type": "directory", "path": str(parent), "size": 0, "oid": "0" * 40}
    parents = {path: [str(parent) for parent in PurePosixPath(path).parents] for path in found}
    inside = folder or "."
    return [entry for path, entry in found.items() if inside in (parents[path] if recursive else parents[path][:1])]


HUB = Hub()
atexit.register(HUB.server_close)
