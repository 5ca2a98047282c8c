"""The servers of one test: the fake provider, a real gateway in front of it, and a TCP port that leads to the run's socket."""

import contextlib
import http.client
import json
import pathlib
import shlex
import shutil
import signal
import socket
import socketserver
import subprocess
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
KEPT = ROOT / "target/clients"
PROGRAM = ROOT / "target/debug/cogni-gateway"
ANSWER = "hello from the fake provider"
# The test's own calls name a model with this prefix, and are not counted. The rest of the name is a script.
OURS = "fake/"


class Provider:
    """Runs `cogni-gateway provider --strict` with a script for the duration of the block."""

    def __init__(self, script):
        self.script = script

    def __enter__(self):
        arguments = [PROGRAM, "provider", "--strict", "--script", self.script]
        self.process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        self.address = self.process.stdout.readline().rsplit("//", 1)[1].strip()
        return self

    def requests(self):
        """Returns the client's requests that have arrived."""
        connection = http.client.HTTPConnection(self.address, timeout=60)
        connection.request("GET", "/_seen")
        requests = json.load(connection.getresponse())["requests"]
        connection.close()
        return requests

    def __exit__(self, *_):
        end(self.process)
        self.process.stdout.close()


class Gateway:
    """Runs `cogni-gateway proxy` with some limits for the duration of the block, and removes its files afterwards."""

    def __init__(self, provider, kind, limits):
        self.kind = kind
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="run-", dir=KEPT))
        # The path is relative to the working directory, because a socket's path is limited to 107 bytes.
        self.socket = str((self.folder / "llm.sock").relative_to(ROOT))
        self.settings = {
            "SOCKET_PATH": self.socket,
            "LITELLM_HOST": provider.address,
            "LITELLM_MASTER_KEY": "sk-real",
            "UPSTREAM_KIND": kind,
            "RUN_ID": "run-1",
            "BILLING_ACCOUNT_ID": "acct-1",
            "AUDIT_LOG_PATH": str(self.folder / "audit.jsonl"),
            "ACCESS_LOG_PATH": str(self.folder / "access.log"),
            **limits,
        }

    def __enter__(self):
        with open(self.folder / "said", "w") as said:
            self.process = subprocess.Popen([PROGRAM, "proxy"], env=self.settings, cwd=ROOT, stdout=said, stderr=said)
        patience(self.is_ready, lambda: (self.folder / "said").read_text())
        self.bridge = Bridge(self.socket)
        self.url = f"http://127.0.0.1:{self.bridge.server_address[1]}"
        threading.Thread(target=self.bridge.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.end()
        remove(self.folder)

    def end(self):
        """Ends the process, so that its whole log is written."""
        if self.process.poll() is None:
            self.bridge.shutdown()
            self.bridge.server_close()
            end(self.process)

    def is_ready(self):
        assert self.process.poll() is None, (self.folder / "said").read_text()
        with contextlib.suppress(OSError):
            connection = Connection(self.socket)
            connection.request("GET", "/health")
            return connection.getresponse().status == 200

    def own_call(self, script="", **more):
        """Makes a call of the test's own. Returns the connection and its response, which is not read yet."""
        body = {"model": f"{OURS}{script}", "messages": [{"role": "user", "content": "hello"}], **more}
        if self.kind == "anthropic":
            return self.post("/v1/messages", body | {"max_tokens": 64})
        return self.post("/v1/chat/completions", body)

    def post(self, path, body):
        connection = Connection(self.socket)
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        return connection, connection.getresponse()

    def refused(self):
        """Returns the refusals in the audit log so far."""
        lines = (self.folder / "audit.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["event"] == "request.refused"]

    def requests(self):
        """Returns every request of the client from the access log, as pairs of key and value."""
        self.end()
        lines = (self.folder / "access.log").read_text().splitlines()
        requests = [dict(pair.split("=", 1) for pair in shlex.split(line)) for line in lines]
        return [request for request in requests if not request["model"].startswith(OURS) and request["uri"] != "/health"]


class Connection(http.client.HTTPConnection):
    """HTTP through a unix socket."""

    def __init__(self, path):
        super().__init__("localhost", timeout=60)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


class Bridge(socketserver.ThreadingTCPServer):
    """Forwards each connection to a free port to a unix socket, as socat does in a sandbox."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, path):
        super().__init__(("127.0.0.1", 0), Passage)
        self.path = path


class Passage(socketserver.BaseRequestHandler):
    """Forwards one connection in both directions until both ends are finished."""

    def handle(self):
        with socket.socket(socket.AF_UNIX) as inner, contextlib.suppress(OSError):
            inner.connect(self.server.path)
            back = threading.Thread(target=self.pass_on, args=(inner, self.request), daemon=True)
            back.start()
            self.pass_on(self.request, inner)
            back.join()

    @staticmethod
    def pass_on(source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


def end(process):
    process.send_signal(signal.SIGTERM)
    process.wait()


def remove(folder):
    """A process that was just killed may still write into the folder."""

    def is_gone():
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()

    patience(is_gone, lambda: f"{folder} does not go")


def patience(holds, otherwise):
    """Waits until `holds`; after a minute it fails with the text of `otherwise`."""
    begun = time.monotonic()
    while not holds():
        assert time.monotonic() - begun < 60, otherwise()
        time.sleep(0.02)
