"""The agents that are clients of MCP, each with its settings for the server `run` and for a model."""

import json

import client
import install

# The tool that each run has, and its result's text.
TOOL = "core__get_current_time"
ANSWER = "unix_seconds"


def claude_code(served, _home, _question):
    program = install.npm("claude") / "node_modules/.bin/claude"
    config = {"mcpServers": {"run": {"type": "http", "url": f"{served.url}/mcp"}}}
    variables = {
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_API_KEY": "placeholder",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        # Otherwise the model must search for the tool first.
        "ENABLE_TOOL_SEARCH": "false",
    }
    # Without this format, the agent prints only the model's last answer.
    output = ["--output-format", "stream-json", "--verbose"]
    arguments = ["-p", "say hello", *output, "--mcp-config", json.dumps(config), "--allowedTools", f"mcp__run__{TOOL}"]
    return [program, *arguments], variables


def codex(served, home, question):
    command, variables = client.codex(served, home, question)
    lines = ["", "[mcp_servers.run]", f'url = "{served.url}/mcp"', f"tool_timeout_sec = {WAIT_SECONDS}"]
    with open(home / ".codex/config.toml", "a") as config:
        config.write("\n".join(lines))
    # Codex asks nobody here, which lets it ask the provider for searches, too. The run has not been granted those.
    flags = ["--dangerously-bypass-approvals-and-sandbox", "--config", 'web_search="disabled"']
    return [*command[:-1], *flags, command[-1]], variables


def openclaw(served, home, question):
    command, variables = client.openclaw(served, home, question)
    file = home / "openclaw.json"
    config = json.loads(file.read_text())
    # The fake provider repeats plain strings only.
    config["models"]["providers"]["cogni"]["models"][0]["compat"] = {"requiresStringContent": True}
    # Otherwise the model must search for the tool first.
    config["tools"]["toolSearch"] = False
    server = {"url": f"{served.url}/mcp", "transport": "streamable-http", "requestTimeoutMs": WAIT_SECONDS * 1000}
    config["mcp"] = {"servers": {"run": server}}
    file.write_text(json.dumps(config))
    return command, variables


# The longest wait of the gateway, and some time more.
WAIT_SECONDS = 660
# OpenClaw prints the model's answer only, which repeats the tool's result.
ECHO = {"tool": client.tool_script(f"run__{TOOL}", {}) + ",echo=yes"}
AGENTS = [
    client.Client("Claude Code", "npm:@anthropic-ai/claude-code", "messages", claude_code, tool=(f"mcp__run__{TOOL}", {}, "")),
    client.Client("Codex", "npm:@openai/codex", "responses", codex, tool=(f"mcp__run/{TOOL}", {}, "")),
    client.Client("OpenClaw", "npm:openclaw", "chat", openclaw, scripts=ECHO),
]
