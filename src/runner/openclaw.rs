//! The files that `OpenClaw` reads: its settings, its prompt and the conversation before the prompt.
//!
//! `OpenClaw` is made for personal machines: it has tools for the web, timers, messengers and other machines, and
//! providers of its own. In a sandbox `OpenClaw` has a single provider, the run's gateway, the tools that work on
//! files, and the run's own tools.

use serde_json::{Value, json};

use super::conversation::{AgentFiles, AgentInvocation, ChatMessage, ChatRole};
use crate::tools::agent_modes::ToolGroup;
use crate::tools::connection_config::AGENT_PREFIX;

/// The error of a message that is longer than `OpenClaw` accepts.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the message has {length} bytes, and OpenClaw takes {MAX_MESSAGE_BYTES}; give less, or put the message into a file of the workspace"
)]
pub(super) struct MessageTooLongError {
    length: usize,
}

/// Returns the files that `OpenClaw` finds in its workspace. If the run has no message of a user, the workspace holds
/// the prompt already.
pub(super) fn workspace_files(agent: &AgentInvocation) -> Result<AgentFiles, MessageTooLongError> {
    let mut own = vec![(SETTINGS_PATH, format!("{:#}\n", settings_json(agent)))];
    if let Some((position, message)) = agent.last_user_message() {
        // The prompt is the last message of a user. All other messages go into a file that the prompt refers to.
        let before: Vec<_> =
            agent.messages.iter().enumerate().filter(|(at, _)| *at != position).collect();
        let mut prompt = message.to_owned();
        if !before.is_empty() {
            own.push((
                CONVERSATION_PATH,
                render_conversation(before.iter().map(|(_, message)| *message)),
            ));
            prompt = format!("{CONVERSATION_HINT}\n\n{message}");
        }
        if prompt.len() > MAX_MESSAGE_BYTES {
            return Err(MessageTooLongError { length: prompt.len() });
        }
        own.push((PROMPT_PATH, prompt));
    }
    Ok(AgentFiles { own, made: &[".openclaw/", ".openclaw-state/", ".cache/", ".npm/"] })
}

fn settings_json(agent: &AgentInvocation) -> Value {
    let claw = &agent.entry.openclaw;
    // OpenClaw takes its key from the settings, but the gateway adds the real key, so the placeholder is no secret. The
    // settings replace OpenClaw's own providers, so the run's gateway is the only provider.
    let mut deny: Vec<&str> = DENIED_TOOLS.to_vec();
    deny.extend(claw.deny.iter().map(String::as_str));
    // No person can be asked about what OpenClaw does by itself, so a mode that asks denies it.
    let own = [(ToolGroup::Commands, COMMAND_TOOLS.as_slice()), (ToolGroup::Files, &FILE_TOOLS)];
    let denied = own.into_iter().filter(|(group, _)| agent.entry.modes.restricts(*group));
    deny.extend(denied.flat_map(|(_, tools)| tools.iter().copied()));
    let mut allow: Vec<&str> = claw.allow.iter().map(String::as_str).collect();
    // The tools of the run are those of a server of MCP. A connection is no tool.
    let has_tools = agent.entry.tools.iter().any(|tool| !tool.starts_with(AGENT_PREFIX));
    if has_tools {
        allow.push(SERVER_TOOLS);
    }
    let mut settings = json!({
        "models": {
            "mode": "replace",
            "providers": {
                "cogni": {
                    "baseUrl": "http://localhost:8080/v1",
                    "api": "openai-completions",
                    "apiKey": "placeholder",
                    "models": models_json(agent),
                },
            },
        },
        "agents": {
            "defaults": {
                "model": { "primary": format!("cogni/{}", agent.model) },
                "workspace": "/workspace",
                "sandbox": { "mode": "off" },
                "skipBootstrap": true,
                "timeoutSeconds": agent.timeout.as_secs(),
            },
            "list": [{ "id": claw.agent, "default": true, "workspace": "/workspace" }],
        },
        "tools": { "elevated": { "enabled": false }, "allow": allow, "deny": deny },
        "cron": { "enabled": false },
        "gateway": { "mode": "local" },
    });
    if has_tools {
        // The model sees the run's tools themselves, and not a tool that searches for them.
        settings["tools"]["toolSearch"] = false.into();
        settings["mcp"]["servers"]["run"] = json!({
            "url": "http://localhost:8080/mcp",
            "transport": "streamable-http",
            "requestTimeoutMs": TOOL_TIMEOUT_MS,
        });
    }
    settings
}

/// Returns the list of models, the run's model first. The costs are zero, because the gateway accounts for the costs.
fn models_json(agent: &AgentInvocation) -> Vec<Value> {
    let other_models = agent.models.iter().filter(|model| **model != agent.model);
    let claw = &agent.entry.openclaw;
    let model = |id: &String| {
        json!({
            "id": id,
            "name": id,
            "reasoning": false,
            "input": ["text"],
            "contextWindow": claw.context_window,
            "maxTokens": claw.max_tokens,
            "cost": { "input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0 },
        })
    };
    std::iter::once(&agent.model).chain(other_models).map(model).collect()
}

fn render_conversation<'a>(messages: impl Iterator<Item = &'a ChatMessage>) -> String {
    let sections = messages.map(|ChatMessage { role, content }| {
        let heading = match role {
            ChatRole::System => "Instructions",
            ChatRole::User => "The user",
            ChatRole::Assistant => "You",
        };
        format!("\n## {heading}\n\n{content}\n")
    });
    format!("# What was said before\n{}", sections.collect::<String>())
}

/// The path of the settings, relative to the workspace.
const SETTINGS_PATH: &str = ".openclaw/openclaw.json";

/// The path of the prompt (the last message of a user), relative to the workspace. `PROMPT_FILE` names the same file.
pub(super) const PROMPT_PATH: &str = ".cogni/prompt.txt";

/// The path of the messages other than the prompt, relative to the workspace.
const CONVERSATION_PATH: &str = ".cogni/conversation.md";

/// The text before a prompt that has a conversation.
const CONVERSATION_HINT: &str = "(What was said before this is in `.cogni/conversation.md`, with your instructions. Read that file first, then do what follows.)";

/// The tools that need something that a sandbox lacks: a network, a display, other machines, a person to talk to, or a
/// process that outlives the run.
const DENIED_TOOLS: [&str; 8] = [
    "group:web",
    "browser",
    "cron",
    "gateway",
    "nodes",
    "sessions_send",
    "sessions_spawn",
    "message",
];

/// The tools of `OpenClaw` that run commands.
const COMMAND_TOOLS: [&str; 2] = ["exec", "process"];

/// The tools of `OpenClaw` that read or write files.
const FILE_TOOLS: [&str; 5] = ["apply_patch", "edit", "ls", "read", "write"];

/// The name by which the settings allow the tools of every server of MCP. The run's gateway is the only server.
const SERVER_TOOLS: &str = "bundle-mcp";

/// The time that a call of a tool may take, in milliseconds: longer than the run's gateway waits for a tool or a person.
const TOOL_TIMEOUT_MS: u32 = 660_000;

/// The maximum length of a message in bytes: `--message-file` of OpenClaw 2026.9.6 takes 4 MiB.
const MAX_MESSAGE_BYTES: usize = 4 << 20;
