//! `cogni-agent`: a small agent, which runs in the sandbox as a program of its own.
//!
//! It reads a conversation, asks the model that the run has, does what the model calls for with its one tool, and goes
//! on until the model has said what it wanted to say:
//!
//! - in: `/workspace/.cogni/messages.json`, see [`conversation`]; the model's name is in `COGNI_MODEL`;
//! - out: one line on standard output, the [`envelope`], whatever happens;
//! - meanwhile, on standard error: a line of JSON for each piece of text and each use of the tool, see [`event`]. A line
//!   that is no JSON is somebody else's, such as `cogni-init`'s.
//!
//! Reading order: [`options`] and [`conversation`] are what it starts with; [`completion`] is one question to the model, over
//! [`http`] and [`sse`]; [`exec`] is the tool; [`envelope`] is what comes of it.
//!
//! **Invariant:** nothing of the house is in here, and no runtime: the file that `cogni-init` is has this in it too.

pub mod completion;
pub mod conversation;
pub mod envelope;
pub mod event;
pub mod exec;
pub mod http;
pub mod options;
pub mod sse;

use std::env;
use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Instant;

use completion::{ModelClient, ModelCompletion, ModelToolCall};
use conversation::AgentConversation;
use envelope::{AgentFailure, AgentFailureKind, OutputEnvelope};
use event::ProgressEvent;
use options::{AgentCommand, AgentOptions};

/// Runs the program; `arguments` are those after its own name.
pub fn main(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    match options::parse(arguments) {
        Ok(AgentCommand::Print(text)) => print_to_stdout(&text),
        Ok(AgentCommand::Start(options)) => {
            let begun = Instant::now();
            let mut envelope = OutputEnvelope::default();
            envelope.error = run_conversation(&options, begun, &mut envelope).err();
            let printed = print_to_stdout(&envelope.to_line(begun.elapsed()));
            if envelope.error.is_some() { ExitCode::FAILURE } else { printed }
        }
        Err(wrong) => {
            let line = format!("cogni-agent: {wrong}; see `cogni-agent --help`\n");
            // There is nobody left to tell when this fails.
            let _ = io::stderr().write_all(line.as_bytes());
            ExitCode::from(EXIT_USAGE)
        }
    }
}

/// Asks until the model calls for nothing more.
fn run_conversation(
    options: &AgentOptions,
    begun: Instant,
    envelope: &mut OutputEnvelope,
) -> Result<(), AgentFailure> {
    let mut conversation = AgentConversation::read(&options.messages)?;
    let deadline = begun + options.timeout;
    let model = ModelClient::new(|name| env::var(name).ok(), deadline)?;
    envelope.model.clone_from(&model.name);
    for _ in 0..options.rounds {
        let ModelCompletion { text, calls, finish, usage } =
            model.complete(&conversation, &mut event::emit_event)?;
        envelope.add_round(&text, finish, usage);
        if calls.is_empty() {
            return Ok(());
        }
        conversation.push_assistant(&text, &calls);
        for call in &calls {
            let result = execute_tool_call(call, deadline);
            conversation.push_tool_result(&call.id, &result);
        }
    }
    let rounds = options.rounds;
    Err(AgentFailure::new(
        AgentFailureKind::TooManyRounds,
        format!("the model still calls for tools after {rounds} rounds; raise `--rounds`"),
    ))
}

/// What the model gets to read of its call. That a call makes no sense is for the model to know, and ends nothing.
fn execute_tool_call(call: &ModelToolCall, deadline: Instant) -> String {
    let asked = match exec::parse_call(&call.name, &call.arguments) {
        Ok(asked) => asked,
        Err(wrong) => return wrong.to_string(),
    };
    event::emit_event(&ProgressEvent::ToolCall { id: &call.id, argv: &asked.argv });
    let done = exec::run_tool(&asked, deadline);
    event::emit_event(&ProgressEvent::ToolResult { id: &call.id, exit_code: done.exit_code });
    done.to_string()
}

fn print_to_stdout(text: &str) -> ExitCode {
    match io::stdout().write_all(text.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// The exit status of every program for arguments that make no sense.
const EXIT_USAGE: u8 = 2;
