"""A judge behind HTTP on this machine, for tests."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server(ThreadingHTTPServer):
    """Answers like a chat-completions API: by `script`, one entry a request, the last for ever.

    An entry is a status, the text of a reply, raw bytes of a body, (status, body), or "hang" (an
    answer that comes when the test is over).
    """

    daemon_threads = True
    request_queue_size = 128  # by default 5: a sixth connection at once tries again after a second

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.seen, self.headers_seen = [verdict(8)], [], []
        self.lock, self.over = threading.Lock(), threading.Event()
        self.together, self.most_together, self.barrier = 0, 0, None
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, request, client_address):
        """A client that hung up is what some tests are about."""


@contextmanager
def serving():
    """A server that answers until the block ends."""
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.over.set()
        server.shutdown()
        thread.join()


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        """Nothing on the screen."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.seen.append(body)
            server.headers_seen.append({k.lower(): v for k, v in self.headers.items()})
            step = server.script.pop(0) if len(server.script) > 1 else server.script[0]
            server.together += 1
            server.most_together = max(server.most_together, server.together)
        if server.barrier is not None:
            server.barrier.wait(20)
        if step == "hang":
            server.over.wait(60)
        with server.lock:
            server.together -= 1
        self.answer(step(body) if callable(step) else step)

    def answer(self, step):
        status, step = step if isinstance(step, tuple) else (200, step)
        status = step if isinstance(step, int) else status
        choice = {"message": {"content": step}, "finish_reason": "stop"}
        self.send(step if isinstance(step, bytes) else {"choices": [choice]}, status)

    def send(self, body, status):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("retry-after-ms", "1")  # the client would wait for seconds
        self.end_headers()
        self.wfile.write(data)


def verdict(score):
    return json.dumps({"reason": "so", "grade": score})
