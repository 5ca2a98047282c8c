"""What a client meets: the fake provider, a real gateway above it, and a TCP port that leads to the run's socket."""

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
# Our own calls name a model that begins so, and are not counted. The rest of its name is a script.
OURS = "fake/"


class Provider:
    """`cogni-gateway provider` with a script, for as long as the block lasts."""

    def __init__(self, script):
        self.script = script

    def __enter__(self):
        arguments = [PROGRAM, "provider", "--script", self.script]
        self.process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        self.address = self.process.stdout.readline().rsplit("//", 1)[1].strip()
        return self

    def __exit__(self, *_):
        end(self.process)
        self.process.stdout.close()


class Gateway:
    """`cogni-gateway proxy` with some limits, for as long as the block lasts. Its files go when the block ends."""

    def __init__(self, provider, limits):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="run-", dir=KEPT))
        # From here, which is where we are: a socket's path may have 107 bytes, wherever this tree lies.
        self.socket = str((self.folder / "llm.sock").relative_to(ROOT))
        self.settings = {
            "SOCKET_PATH": self.socket,
            "LITELLM_HOST": provider.address,
            "LITELLM_MASTER_KEY": "sk-real",
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
        """Ends the process, so that all of its log is written."""
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

    def post(self, path, body):
        """A call of our own. Returns the connection and its response, which is not read yet."""
        connection = Connection(self.socket)
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        return connection, connection.getresponse()

    def refused(self):
        """The refusals that stand in the audit so far."""
        lines = (self.folder / "audit.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["event"] == "request.refused"]

    def requests(self):
        """Every request of the client's, from the access log: its pairs of key and value."""
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
    """Leads each connection to a free port on to a unix socket, as socat does in a sandbox."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, path):
        super().__init__(("127.0.0.1", 0), Passage)
        self.path = path


class Passage(socketserver.BaseRequestHandler):
    """One connection, both ways, until both ends have said all."""

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
    """What has just been killed may still write into it."""

    def is_gone():
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()

    patience(is_gone, lambda: f"{folder} does not go")


def patience(holds, otherwise):
    """Waits until `holds`; after a minute it fails with what `otherwise` says."""
    begun = time.monotonic()
    while not holds():
        assert time.monotonic() - begun < 60, otherwise()
        time.sleep(0.02)
