"""A service whose run has a tool that asks a person, and the person, who answers on the command line after some time."""

import glob
import json
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time

import servers

AGENT = "waiter"
# The agent of the run does nothing: the client takes its place on the run's socket.
ENTRY = f"""
name = "{AGENT}"
description = "waits"
version = "1"
tools = ["TOOL"]
setup = "messages"
argv = ["sh", "-c", "while :; do sleep 1; done"]
[limits]
max_runtime = "30m"
"""
CONFIG = """
access_log = "FOLDER/access.log"
[serve]
listen = "unix:FOLDER/api.sock"
state_dir = "FOLDER/state"
run_dir = "FOLDER/r"
agents_dir = "FOLDER/agents"
driver = "embedded"
grace = "1s"
[tools]
granted = ["TOOL"]
[[tools.rules]]
name = "ask"
tool = "TOOL"
approve = "ask"
[tools.approvals]
# For a client that is not told of the progress.
hold = "10m"
"""


class AskingService:
    """Runs `cogni-gateway serve` with one run for the duration of the block, and removes its files afterwards."""

    def __init__(self, provider, kind, tool):
        # The path of a socket is limited to 107 bytes.
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="cogni-mcp-", dir="/tmp"))
        self.config = self.folder / "serve.toml"
        self.config.write_text(self.fill(CONFIG, tool))
        (self.folder / "agents").mkdir()
        (self.folder / f"agents/{AGENT}.toml").write_text(self.fill(ENTRY, tool))
        self.api = f"unix:{self.folder}/api.sock"
        self.variables = {
            "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "LITELLM_HOST": provider.address,
            "LITELLM_MASTER_KEY": "sk-real",
            "UPSTREAM_KIND": kind,
        }

    def fill(self, text, tool):
        return text.replace("FOLDER", str(self.folder)).replace("TOOL", tool)

    def __enter__(self):
        # Nobody but root can limit what a sandbox takes, and the agent of this run takes nothing.
        command = [servers.PROGRAM, "serve", "--allow-unlimited", "--config", self.config]
        with open(self.folder / "said", "w") as said:
            self.process = subprocess.Popen(command, env=self.variables, stdout=said, stderr=said)
        try:
            servers.patience(self.is_ready, lambda: (self.folder / "said").read_text())
            self.start_run()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self.end()
        shutil.rmtree(self.folder, ignore_errors=True)

    def end(self):
        """Ends the process, so that the whole log of its run is written."""
        if self.process.poll() is None:
            if hasattr(self, "bridge"):
                self.bridge.shutdown()
                self.bridge.server_close()
            # The second signal ends the run, which does not end by itself.
            self.process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
            servers.end(self.process)

    def is_ready(self):
        assert self.process.poll() is None, (self.folder / "said").read_text()
        return "ready" in (self.folder / "said").read_text()

    def start_run(self):
        self.starter = self.mint("starter", "--allow-sandbox", "--agent", "*", "--account", "acct-1")
        self.reviewer = self.mint("reviewer", "--access", "approve")
        body = {"agent": AGENT, "model": "fake", "messages": [{"role": "user", "content": "wait"}]}
        connection = servers.Connection(f"{self.folder}/api.sock")
        token = self.starter.read_text().strip()
        headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}
        connection.request("POST", "/api/v1/runs", json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        assert answer.status < 300, text
        self.run = json.loads(text)["id"]
        pattern = f"{self.folder}/r/*/sock/llm.sock"
        servers.patience(lambda: glob.glob(pattern), lambda: f"there is no {pattern}")
        self.socket = glob.glob(pattern)[0]
        self.bridge = servers.Bridge(self.socket)
        self.url = f"http://127.0.0.1:{self.bridge.server_address[1]}"
        threading.Thread(target=self.bridge.serve_forever, daemon=True).start()

    def mint(self, name, *flags):
        """Returns the file with the token of a new grant."""
        file = self.folder / name
        file.write_text(self.command("grant", "mint", "--config", self.config, "--name", name, *flags))
        return file

    def command(self, *arguments):
        return subprocess.run([servers.PROGRAM, *arguments], env=self.variables, check=True, capture_output=True, text=True).stdout

    def approvals(self, *arguments):
        return self.command("approvals", *arguments, "--service", self.api, "--token-file", self.reviewer)

    def records(self):
        """Returns the records of the run, once the service has ended."""
        lines = (self.folder / f"state/audit/{self.run}.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


class Person(threading.Thread):
    """A person who approves the first question some seconds after it was asked."""

    def __init__(self, service, seconds):
        super().__init__(daemon=True)
        self.service, self.seconds = service, seconds
        self.fault = "no question was asked"

    def run(self):
        try:
            self.answer()
        except Exception as error:
            self.fault = f"the person cannot answer: {error!r} {getattr(error, 'stderr', '')}"

    def answer(self):
        # A slow agent takes minutes to its first call.
        for _ in range(600):
            if found := re.search(r"apr-\w+", self.service.approvals("list")):
                break
            time.sleep(0.5)
        else:
            return
        begun, question = time.monotonic(), found[0]
        digest = re.search(r"^digest +(\S+)$", self.service.approvals("show", question), re.MULTILINE)[1]
        time.sleep(max(0, self.seconds - (time.monotonic() - begun)))
        self.service.approvals("approve", question, "--digest", digest, "--reason", "the time is harmless")
        self.fault = None
