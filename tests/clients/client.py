"""The clients, with the way to configure each client's model address and to make it ask for one answer."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import typing

import install
from servers import ANSWER, ROOT

# A model that the price table knows.
MODEL = "gpt-5"
# The gateway's settings of a direct provider, by protocol.
KINDS = {"messages": "anthropic"}
PATIENCE_SECONDS = 400
HERE = pathlib.Path(__file__).parent


class Client(typing.NamedTuple):
    name: str
    # The client's package registry, and its name there; `java` for a program of the machine.
    package: str
    protocol: str
    # The client's arguments and variables, as a function of the gateway, an empty home directory and a question.
    command: typing.Callable
    # A text that the client's output contains if there is an answer.
    answer: str = ANSWER
    # The questions that the client can ask; one that streams each answer has no `plain`.
    questions: tuple = ("plain", "stream", "tool")
    # The name and the arguments of the tool that the model calls, and a text that shows the tool's result to the provider.
    tool: tuple = ("weather", {"city": "Ulm"}, "rain over Ulm")
    # The provider's script for each question, instead of a text or of the tool's call.
    scripts: typing.Mapping = {}
    # Whether the client makes calls that nobody asked for, as for a title.
    makes_side_calls: bool = False
    # Whether the client also meets each limit.
    meets_limits: bool = False

    def kind(self):
        """Returns the gateway's setting for the provider's kind."""
        return KINDS.get(self.protocol, "openai")

    def is_turn(self):
        """Returns whether the client's calls make a model generate."""
        return self.protocol != "embeddings"

    def calls_a_tool(self):
        """Returns whether the client calls the tool that the model asks for."""
        return "tool" in self.questions and "tool=" in self.script("tool")

    def tool_result(self):
        """Returns a text that is in the request with a tool's result."""
        return self.tool[2]

    def question_at_limits(self):
        """Returns the question that the client asks at each limit."""
        return "stream" if "stream" in self.questions else self.questions[0]

    def script(self, question):
        """Returns the provider's script for a question."""
        if question in self.scripts:
            return self.scripts[question]
        if question != "tool":
            return ""
        return tool_script(*self.tool[:2])


def tool_script(name, arguments):
    text = json.dumps(arguments)
    for letter in "%,;":
        text = text.replace(letter, f"%{ord(letter):02x}")
    return f"tool={name},arguments={text}"


def ask(client, gateway, home, question):
    """Returns a client's output until its end or until a timeout. All processes that it has started end with it."""
    arguments, variables = client.command(gateway, home, question)
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

    def command(gateway, _home, _question):
        socket = str(ROOT / gateway.socket)
        return [install.python(), ROOT / "tests/peers" / script, socket, MODEL, call], {}

    return command


def python(name, environment=None):
    """Returns the command for a client of ask.py, in the SDKs' environment or in one of its own."""

    def command(gateway, _home, question):
        program = install.venv(environment) / "python" if environment else install.python()
        return [program, HERE / "ask.py", name, question, gateway.url, MODEL], {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}

    return command


def node(name, packages):
    def command(gateway, _home, question):
        # The script is beside the packages, because node searches a module's imports from the module's own directory.
        script, own = install.npm(packages) / "ask.mjs", (HERE / "ask.mjs").read_bytes()
        # Other clients may be reading the script.
        if not script.exists() or script.read_bytes() != own:
            script.write_bytes(own)
        return [install.node(), script, name, question, gateway.url, MODEL], {}

    return command


def java(path):
    def command(gateway, _home, question):
        return [install.java(), "-XX:TieredStopAtLevel=1", HERE / "Ask.java", path, question, gateway.url, MODEL], {}

    return command


def openclaw(gateway, home, _question):
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


def codex(gateway, home, _question):
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


def claude_code(gateway, _home, _question):
    program = install.npm("claude") / "node_modules/.bin/claude"
    variables = {
        "ANTHROPIC_BASE_URL": gateway.url,
        "ANTHROPIC_API_KEY": "placeholder",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return [program, "-p", "say hello"], variables


def pi(gateway, home, _question):
    model = {"id": MODEL, "name": MODEL, "input": ["text"], "contextWindow": 128_000, "maxTokens": 4096}
    model |= {"reasoning": False, "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}}
    provider = {"baseUrl": f"{gateway.url}/v1", "api": "openai-completions", "apiKey": "placeholder", "models": [model]}
    write(home / ".pi/agent/models.json", json.dumps({"providers": {"cogni": provider}}))
    package = install.npm("pi") / "node_modules/@earendil-works/pi-coding-agent"
    arguments = ["-p", "--provider", "cogni", "--model", MODEL, "say hello"]
    return [install.node(), package / "dist/cli.js", *arguments], {"PI_OFFLINE": "1"}


def aider(gateway, _home, _question):
    arguments = ["--model", f"openai/{MODEL}", "--message", "say hello", "--no-git", "--yes-always", "--map-tokens", "0"]
    quiet = ["--no-check-update", "--analytics-disable", "--no-show-model-warnings"]
    variables = {"OPENAI_API_BASE": f"{gateway.url}/v1", "OPENAI_API_KEY": "placeholder"}
    return [install.venv("aider") / "aider", *arguments, *quiet], variables


def is_edited(home):
    """Returns whether the edit in the model's answer is applied."""
    file = home / EDITED_FILE
    return file.exists() and OUTPUT in file.read_text()


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def opencode(gateway, home, _question):
    options = {"baseURL": f"{gateway.url}/v1", "apiKey": "placeholder"}
    write(home / ".config/opencode/opencode.json", json.dumps({"provider": {"openai": {"options": options}}}))
    program = install.npm("opencode") / "node_modules/.bin/opencode"
    return [program, "run", "--model", f"openai/{MODEL}", "say hello"], {"OPENCODE_DISABLE_AUTOUPDATE": "1"}


# An agent's shell: the command that the model asks for, and its output, which is not part of the command.
COMMAND, OUTPUT = "echo $((6000 + 789))", "6789"
# The answer of smolagents and of instructor is itself a call of a tool.
FINAL_ANSWER = tool_script("final_answer", {"answer": ANSWER})
SMOLAGENTS = {"plain": FINAL_ANSWER, "stream": FINAL_ANSWER}
INSTRUCTOR = dict.fromkeys(("plain", "tool"), tool_script("Answer", {"text": ANSWER}) + ",repeat=yes")
INSTRUCTOR |= {"stream": tool_script("PartialAnswer", {"text": ANSWER})}
# An agent that calls no tool writes its edits in its answer.
EDITED_FILE = "note.txt"
EDIT = f"{ANSWER}%0a%0a{EDITED_FILE}%0a```%0a<<<<<<< SEARCH%0a=======%0a{OUTPUT}%0a>>>>>>> REPLACE%0a```%0a"

SDKS = [
    Client("OpenAI SDK, Python", "pypi:openai", "chat", python("openai_chat"), meets_limits=True),
    Client("OpenAI SDK, Python", "pypi:openai", "responses", python("openai_responses"), meets_limits=True),
    Client(
        "OpenAI SDK, Python",
        "pypi:openai",
        "embeddings",
        python_sdk("openai_sdk.py", "embeddings"),
        '"vectors": 1',
        questions=("plain",),
        meets_limits=True,
    ),
    Client("Anthropic SDK, Python", "pypi:anthropic", "messages", python("anthropic_messages"), meets_limits=True),
    Client("OpenAI SDK, JavaScript", "npm:openai", "chat", node("openai_chat", "sdk"), meets_limits=True),
    Client("OpenAI SDK, JavaScript", "npm:openai", "responses", node("openai_responses", "sdk"), meets_limits=True),
    Client(
        "OpenAI SDK, JavaScript",
        "npm:openai",
        "embeddings",
        node("openai_embeddings", "sdk"),
        "1 vector",
        questions=("plain",),
        meets_limits=True,
    ),
    Client("Anthropic SDK, JavaScript", "npm:@anthropic-ai/sdk", "messages", node("anthropic_messages", "sdk"), meets_limits=True),
    Client("Java HttpClient", "java", "chat", java("/v1/chat/completions")),
    Client("Java HttpClient", "java", "responses", java("/v1/responses")),
    Client("Java HttpClient", "java", "messages", java("/v1/messages")),
    Client("LangChain", "pypi:langchain", "chat", python("langchain_chat")),
    Client("LangChain", "pypi:langchain", "responses", python("langchain_responses")),
    Client("LangChain", "pypi:langchain", "messages", python("langchain_messages")),
    Client("LiteLLM", "pypi:litellm", "chat", python("litellm_chat", "litellm")),
    Client("LiteLLM", "pypi:litellm", "responses", python("litellm_responses", "litellm")),
    Client("LiteLLM", "pypi:litellm", "messages", python("litellm_messages", "litellm")),
    Client("Vercel AI SDK", "npm:ai", "chat", node("ai_chat", "ai"), meets_limits=True),
    Client("Vercel AI SDK", "npm:ai", "responses", node("ai_responses", "ai"), meets_limits=True),
    Client("Vercel AI SDK", "npm:ai", "messages", node("ai_messages", "ai")),
    Client("openai-agents", "pypi:openai-agents", "chat", python("agents_chat")),
    Client("openai-agents", "pypi:openai-agents", "responses", python("agents_responses")),
    Client("pydantic-ai", "pypi:pydantic-ai-slim", "chat", python("pydantic_chat")),
    Client("pydantic-ai", "pypi:pydantic-ai-slim", "responses", python("pydantic_responses")),
    Client("pydantic-ai", "pypi:pydantic-ai-slim", "messages", python("pydantic_messages")),
    Client("smolagents", "pypi:smolagents", "chat", python("smolagents_chat"), scripts=SMOLAGENTS),
    Client("instructor", "pypi:instructor", "chat", python("instructor_chat", "instructor"), scripts=INSTRUCTOR),
    Client("instructor", "pypi:instructor", "messages", python("instructor_messages", "instructor"), scripts=INSTRUCTOR),
]
STREAMED = ("stream", "tool")
AGENTS = [
    Client(
        "OpenClaw",
        "npm:openclaw",
        "chat",
        openclaw,
        questions=STREAMED,
        tool=("exec", {"command": COMMAND}, OUTPUT),
        meets_limits=True,
    ),
    Client(
        "Codex",
        "npm:@openai/codex",
        "responses",
        codex,
        questions=STREAMED,
        tool=("exec_command", {"cmd": COMMAND}, OUTPUT),
        meets_limits=True,
    ),
    Client(
        "Claude Code",
        "npm:@anthropic-ai/claude-code",
        "messages",
        claude_code,
        questions=STREAMED,
        tool=("Bash", {"command": COMMAND, "description": "adds"}, OUTPUT),
        meets_limits=True,
    ),
    Client(
        "opencode",
        "npm:opencode-ai",
        "responses",
        opencode,
        questions=STREAMED,
        tool=("bash", {"command": COMMAND, "description": "adds"}, OUTPUT),
        makes_side_calls=True,
    ),
    Client("aider", "pypi:aider-chat", "chat", aider, questions=STREAMED, scripts={"tool": f"text={EDIT}"}, meets_limits=True),
    Client(
        "pi",
        "npm:@earendil-works/pi-coding-agent",
        "chat",
        pi,
        questions=STREAMED,
        tool=("bash", {"command": COMMAND}, OUTPUT),
        meets_limits=True,
    ),
]
