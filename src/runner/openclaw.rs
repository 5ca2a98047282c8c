//! What `OpenClaw` reads: its settings, and what it is to answer.
//!
//! It is a program for machines that are somebody's: it has tools for the web, timers, messengers and other machines, and
//! providers of its own. Here it has one provider, which is the run's gateway, and the tools that work on files.

use serde_json::{Value, json};

use super::agent::{AgentFiles, AgentInvocation, ChatMessage, ChatRole};

/// What is too long for it.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the message has {given} bytes, and OpenClaw takes {MAX_MESSAGE_BYTES}; give less, or put it into a file of the workspace"
)]
pub(super) struct MessageTooLongError {
    given: usize,
}

/// The files that it finds. Where nothing is asked, the workspace has that already.
pub(super) fn workspace_files(agent: &AgentInvocation) -> Result<AgentFiles, MessageTooLongError> {
    let mut own = vec![(SETTINGS_PATH, format!("{:#}\n", settings_json(agent)))];
    if let Some((place, message)) = agent.last_user_message() {
        let before: Vec<_> =
            agent.messages.iter().enumerate().filter(|(at, _)| *at != place).collect();
        let mut prompt = message.to_owned();
        if !before.is_empty() {
            own.push((
                CONVERSATION_PATH,
                render_conversation(before.iter().map(|(_, message)| *message)),
            ));
            prompt = format!("{CONVERSATION_HINT}\n\n{message}");
        }
        if prompt.len() > MAX_MESSAGE_BYTES {
            return Err(MessageTooLongError { given: prompt.len() });
        }
        own.push((PROMPT_PATH, prompt));
    }
    Ok(AgentFiles { own, made: &[".openclaw/", ".openclaw-state/", ".cache/", ".npm/"] })
}

fn settings_json(agent: &AgentInvocation) -> Value {
    let claw = &agent.entry.openclaw;
    let mut deny: Vec<&str> = DENIED_TOOLS.to_vec();
    deny.extend(claw.deny.iter().map(String::as_str));
    json!({
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
        "tools": { "elevated": { "enabled": false }, "allow": claw.allow, "deny": deny },
        "cron": { "enabled": false },
        "gateway": { "mode": "local" },
    })
}

/// The run's model first; what they cost is nothing that it has to know.
fn models_json(agent: &AgentInvocation) -> Vec<Value> {
    let others = agent.models.iter().filter(|model| **model != agent.model);
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
    std::iter::once(&agent.model).chain(others).map(model).collect()
}

fn render_conversation<'a>(messages: impl Iterator<Item = &'a ChatMessage>) -> String {
    let said = messages.map(|ChatMessage { role, content }| {
        let who = match role {
            ChatRole::System => "Instructions",
            ChatRole::User => "The user",
            ChatRole::Assistant => "You",
        };
        format!("\n## {who}\n\n{content}\n")
    });
    format!("# What was said before\n{}", said.collect::<String>())
}

const SETTINGS_PATH: &str = ".openclaw/openclaw.json";

/// The last thing that a user has said, where `PROMPT_FILE` leads.
pub(super) const PROMPT_PATH: &str = ".cogni/prompt.txt";

const CONVERSATION_PATH: &str = ".cogni/conversation.md";

const CONVERSATION_HINT: &str = "(What was said before this is in `.cogni/conversation.md`, with your instructions. Read that file first, then do what follows.)";

/// Tools that need what a sandbox has not: a network, a display, other machines, somebody to talk to, or a process that
/// stays.
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

/// `--message-file` of 2026.9.6 takes 4 MiB.
const MAX_MESSAGE_BYTES: usize = 4 << 20;
