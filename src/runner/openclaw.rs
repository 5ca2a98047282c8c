//! What `OpenClaw` reads: its settings, and what it is to answer.
//!
//! It is a program for machines that are somebody's: it has tools for the web, timers, messengers and other machines, and
//! providers of its own. Here it has one provider, which is the run's gateway, and the tools that work on files.

use serde_json::{Value, json};

use super::agent::{Agent, Files, Message, Role};

/// What is too long for it.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the message has {given} bytes, and OpenClaw takes {MOST}; give less, or put it into a file of the workspace"
)]
pub(super) struct TooLong {
    given: usize,
}

/// The files that it finds. Where nothing is asked, the workspace has that already.
pub(super) fn files(agent: &Agent) -> Result<Files, TooLong> {
    let mut own = vec![(SETTINGS, format!("{:#}\n", settings(agent)))];
    if let Some((place, message)) = agent.last() {
        let before: Vec<_> =
            agent.messages.iter().enumerate().filter(|(at, _)| *at != place).collect();
        let mut prompt = message.to_owned();
        if !before.is_empty() {
            own.push((CONVERSATION, conversation(before.iter().map(|(_, message)| *message))));
            prompt = format!("{READ_FIRST}\n\n{message}");
        }
        if prompt.len() > MOST {
            return Err(TooLong { given: prompt.len() });
        }
        own.push((PROMPT, prompt));
    }
    Ok(Files { own, made: &[".openclaw/", ".openclaw-state/", ".cache/", ".npm/"] })
}

fn settings(agent: &Agent) -> Value {
    let claw = &agent.entry.openclaw;
    let mut deny: Vec<&str> = DENIED.to_vec();
    deny.extend(claw.deny.iter().map(String::as_str));
    json!({
        "models": {
            "mode": "replace",
            "providers": {
                "cogni": {
                    "baseUrl": "http://localhost:8080/v1",
                    "api": "openai-completions",
                    "apiKey": "placeholder",
                    "models": models(agent),
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
fn models(agent: &Agent) -> Vec<Value> {
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

fn conversation<'a>(messages: impl Iterator<Item = &'a Message>) -> String {
    let said = messages.map(|Message { role, content }| {
        let who = match role {
            Role::System => "Instructions",
            Role::User => "The user",
            Role::Assistant => "You",
        };
        format!("\n## {who}\n\n{content}\n")
    });
    format!("# What was said before\n{}", said.collect::<String>())
}

const SETTINGS: &str = ".openclaw/openclaw.json";

/// The last thing that a user has said, where `PROMPT_FILE` leads.
pub(super) const PROMPT: &str = ".cogni/prompt.txt";

const CONVERSATION: &str = ".cogni/conversation.md";

const READ_FIRST: &str = "(What was said before this is in `.cogni/conversation.md`, with your instructions. Read that file first, then do what follows.)";

/// Tools that need what a sandbox has not: a network, a display, other machines, somebody to talk to, or a process that
/// stays.
const DENIED: [&str; 8] = [
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
const MOST: usize = 4 << 20;
