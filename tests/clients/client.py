"""The clients, with the way to configure each client's model address and to make it ask for one answer."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import typing

import install
from place import ROOT

# A model that the price table knows.
MODEL = "gpt-5"
PATIENCE_SECONDS = 400


class Client(typing.NamedTuple):
    name: str
    # The client's package registry, and its name there.
    package: str
    protocol: str
    # The client's arguments and variables, as a function of the gateway and an empty home directory.
    command: typing.Callable
    # A text that the client's output contains if there is an answer.
    answer: str = "hello from the fake provider"
    # Whether the client's calls make a model generate.
    is_turn: bool = True


def ask(client, gateway, home):
    """Returns a client's output until its end or until a timeout. All processes that it has started end with it."""
    arguments, variables = client.command(gateway, home)
    process = subprocess.Popen(
        arguments,
        cwd=home,
        env={"PATH": f"{install.node().parent}:/usr/bin:/bin", "HOME": str(home), "NO_COLOR": "1"} | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        text, _ = process.communicate(timeout=PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        end_all(home)
        text, _ = process.communicate()
    finally:
        end_all(home)
    return text


def end_all(home):
    """Ends the processes that a client has started, including detached ones, which are found by their working directory."""
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(process / "cwd").startswith(str(home)):
                os.kill(int(process.name), signal.SIGKILL)


def python_sdk(script, call):
    """Returns the command for the scripts that tests/gateway/peers.rs uses, too; they connect to the socket directly."""

    def command(gateway, _home):
        socket = str(ROOT / gateway.socket)
        return [install.python(), ROOT / "tests/peers" / script, socket, MODEL, call], {}

    return command


def node_sdk(call):
    def command(gateway, _home):
        # The script is beside the packages, because node searches a module's imports from the module's own directory.
        script = install.npm("sdk") / "sdk.mjs"
        script.write_bytes((pathlib.Path(__file__).parent / "sdk.mjs").read_bytes())
        return [install.node(), script, gateway.url, MODEL, call], {}

    return command


def openclaw(gateway, home):
    model = {"id": MODEL, "name": MODEL, "input": ["text"], "contextWindow": 200_000, "maxTokens": 8192}
    provider = {"baseUrl": f"{gateway.url}/v1", "api": "openai-completions", "apiKey": "placeholder", "models": [model]}
    defaults = {
        "model": {"primary": f"cogni/{MODEL}"},
        "workspace": str(home),
        "sandbox": {"mode": "off"},
        "skipBootstrap": True,
    }
    config = {
        "models": {"mode": "replace", "providers": {"cogni": provider}},
        "agents": {"defaults": defaults, "list": [{"id": "main", "default": True, "workspace": str(home)}]},
        "tools": {"deny": ["group:web", "browser", "cron", "gateway", "nodes", "message"]},
        "cron": {"enabled": False},
        "gateway": {"mode": "local"},
    }
    file = write(home / "openclaw.json", json.dumps(config))
    program = install.npm("openclaw") / "node_modules/openclaw/openclaw.mjs"
    arguments = ["agent", "--local", "--agent", "main", "--session-id", "s1", "--message", "hello", "--json"]
    variables = {
        "OPENCLAW_CONFIG_PATH": file,
        "OPENCLAW_STATE_DIR": str(home / "state"),
        "OPENCLAW_LOAD_SHELL_ENV": "0",
    }
    return [install.node(), program, *arguments], variables


def codex(gateway, home):
    lines = [
        f'model = "{MODEL}"',
        'model_provider = "cogni"',
        "[model_providers.cogni]",
        'name = "cogni"',
        f'base_url = "{gateway.url}/v1"',
        'env_key = "COGNI_KEY"',
        'wire_api = "responses"',
    ]
    write(home / ".codex/config.toml", "\n".join(lines))
    program = install.npm("codex") / "node_modules/.bin/codex"
    return [program, "exec", "--skip-git-repo-check", "say hello"], {"COGNI_KEY": "placeholder"}


def claude_code(gateway, _home):
    program = install.npm("claude") / "node_modules/.bin/claude"
    variables = {
        "ANTHROPIC_BASE_URL": gateway.url,
        "ANTHROPIC_API_KEY": "placeholder",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return [program, "-p", "say hello"], variables


def pi(gateway, home):
    model = {"id": MODEL, "name": MODEL, "input": ["text"], "contextWindow": 128_000, "maxTokens": 4096}
    model |= {"reasoning": False, "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}}
    provider = {"baseUrl": f"{gateway.url}/v1", "api": "openai-completions", "apiKey": "placeholder", "models": [model]}
    write(home / ".pi/agent/models.json", json.dumps({"providers": {"cogni": provider}}))
    package = install.npm("pi") / "node_modules/@earendil-works/pi-coding-agent"
    arguments = ["-p", "--provider", "cogni", "--model", MODEL, "say hello"]
    return [install.node(), package / "dist/cli.js", *arguments], {"PI_OFFLINE": "1"}


def ai_sdk(call):
    def command(gateway, _home):
        script = install.npm("ai") / "ai.mjs"
        script.write_bytes((pathlib.Path(__file__).parent / "ai.mjs").read_bytes())
        return [install.node(), script, gateway.url, MODEL, call], {}

    return command


def aider(gateway, _home):
    arguments = ["--model", f"openai/{MODEL}", "--message", "say hello", "--no-git", "--yes-always", "--map-tokens", "0"]
    quiet = ["--no-check-update", "--analytics-disable", "--no-show-model-warnings"]
    variables = {"OPENAI_API_BASE": f"{gateway.url}/v1", "OPENAI_API_KEY": "placeholder"}
    return [install.venv("aider") / "aider", *arguments, *quiet], variables


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


SDKS = [
    Client("OpenAI SDK, Python", "pypi:openai", "chat", python_sdk("openai_sdk.py", "chat_stream")),
    Client("OpenAI SDK, Python", "pypi:openai", "responses", python_sdk("openai_sdk.py", "responses_stream")),
    Client(
        "OpenAI SDK, Python", "pypi:openai", "embeddings", python_sdk("openai_sdk.py", "embeddings"), '"vectors": 1', False
    ),
    Client("Anthropic SDK, Python", "pypi:anthropic", "messages", python_sdk("anthropic_sdk.py", "messages_stream")),
    Client("OpenAI SDK, JavaScript", "npm:openai", "chat", node_sdk("chat")),
    Client("OpenAI SDK, JavaScript", "npm:openai", "responses", node_sdk("responses")),
    Client("OpenAI SDK, JavaScript", "npm:openai", "embeddings", node_sdk("embeddings"), "1 vector", False),
    Client("Anthropic SDK, JavaScript", "npm:@anthropic-ai/sdk", "messages", node_sdk("messages")),
    Client("Vercel AI SDK", "npm:ai", "chat", ai_sdk("chat")),
    Client("Vercel AI SDK", "npm:ai", "responses", ai_sdk("responses")),
]
AGENTS = [
    Client("OpenClaw", "npm:openclaw", "chat", openclaw),
    Client("Codex", "npm:@openai/codex", "responses", codex),
    Client("Claude Code", "npm:@anthropic-ai/claude-code", "messages", claude_code),
    Client("aider", "pypi:aider-chat", "chat", aider),
    Client("pi", "npm:@earendil-works/pi-coding-agent", "chat", pi),
]
