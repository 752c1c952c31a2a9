"""A tiny HTTP server on loopback that answers requests as a test tells it to: well, wrongly, late, or not at all."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODELS = {"object": "list", "data": [{"id": "m", "object": "model", "created": 1, "owned_by": "x"}]}


def chat(text: str, finish: str = "stop", **more: Any) -> dict[str, Any]:
    """A chat completion as vLLM sends it."""
    message = {"role": "assistant", "content": text} | more.pop("message", {})
    return {
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}, **more,
    }  # fmt: skip


@dataclass
class Fake:
    """What the server was asked, and what it does. ``reply`` gets the handler and the request's body."""

    reply: Callable[[Any, dict[str, Any]], None]
    gets: dict[str, tuple[int, str, str]] = field(default_factory=dict)
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    url: str = ""
    more: dict[str, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


def send(
    handler: Any, status: int, content: Any, kind: str = "application/json", headers: dict[str, str] | None = None
) -> None:
    """Answer with ``content``, as JSON unless it is bytes."""
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    handler.send_response(status)
    handler.send_header("Content-Type", kind)
    handler.send_header("Content-Length", str(len(data)))
    for name, value in (headers or {}).items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(data)


def error(status: int, message: str) -> Callable[[Any, dict[str, Any]], None]:
    """A reply that is vLLM's error body."""
    return lambda handler, body: send(handler, status, {"error": {"message": message, "type": "x", "code": status}})


def cut(handler: Any) -> None:
    """Break the connection."""
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True


@contextmanager
def serve(reply: Callable[[Any, dict[str, Any]], None], **gets: str) -> Iterator[Fake]:
    """Run the server; ``gets`` are texts by path (``metrics``, ``version``)."""
    fake = Fake(reply)
    fake.gets = {"/v1/models": (200, json.dumps(MODELS), "application/json")}
    fake.gets |= {f"/{name}": (200, text, "text/plain") for name, text in gets.items()}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            fake.headers.append({name.lower(): value for name, value in self.headers.items()})
            status, text, kind = fake.gets.get(self.path, (404, '{"detail": "Not Found"}', "application/json"))
            send(self, status, text.encode(), kind, fake.more if status == 302 else None)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with fake.lock:
                fake.headers.append({name.lower(): value for name, value in self.headers.items()})
                fake.asked.append(body)
                fake.at_once += 1
                fake.most_at_once = max(fake.most_at_once, fake.at_once)
            try:
                fake.reply(self, body)
            except OSError:
                self.close_connection = True
            finally:
                with fake.lock:
                    fake.at_once -= 1

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.block_on_close = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
