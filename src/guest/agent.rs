//! `cogni-agent`: a small agent that runs in the sandbox as a program of its own.
//!
//! The agent reads a conversation and asks the run's model. It executes the calls that the model makes with its one
//! tool. The agent repeats this until the model answers without a call:
//!
//! - input: `/workspace/.cogni/messages.json`, see [`conversation`]; the model's name is in `COGNI_MODEL`;
//! - output: one line on standard output, the [`envelope`], also after a failure;
//! - progress, on standard error: a line of JSON for each piece of text and each use of the tool, see [`event`]. A line
//!   that is not JSON comes from another program, such as `cogni-init`.
//!
//! Reading order: [`options`] and [`conversation`] are the input. [`completion`] is one request to the model, over
//! [`http`] and [`sse`]. [`exec`] is the tool, and [`envelope`] is the output.
//!
//! **Invariant:** these modules import no other module of the crate and no async runtime, because they are part of the
//! file `cogni-init`.

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

use completion::{ModelClient, ModelCompletion};
use conversation::{AgentConversation, ModelToolCall};
use envelope::{AgentFailure, AgentFailureKind, OutputEnvelope};
use event::ProgressEvent;
use options::{AgentCommand, AgentOptions};

/// Runs the program. `arguments` are the arguments after the program's name.
pub fn main(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    match options::parse(arguments) {
        Ok(AgentCommand::Print(text)) => print_to_stdout(&text),
        Ok(AgentCommand::Start(options)) => {
            let start = Instant::now();
            let mut envelope = OutputEnvelope::default();
            envelope.error = run_conversation(&options, start, &mut envelope).err();
            // The envelope is printed after a failure too: its reader always gets exactly one line.
            let printed = print_to_stdout(&envelope.to_line(start.elapsed()));
            if envelope.error.is_some() { ExitCode::FAILURE } else { printed }
        }
        Err(wrong) => {
            let line = format!("cogni-agent: {wrong}; see `cogni-agent --help`\n");
            // A failed write to standard error cannot be reported anywhere.
            let _ = io::stderr().write_all(line.as_bytes());
            ExitCode::from(EXIT_USAGE)
        }
    }
}

/// Asks the model until its answer contains no call, or until the limit of rounds.
fn run_conversation(
    options: &AgentOptions,
    start: Instant,
    envelope: &mut OutputEnvelope,
) -> Result<(), AgentFailure> {
    let mut conversation = AgentConversation::read(&options.messages)?;
    // One deadline covers the requests, the tools and the waiting between them.
    let deadline = start + options.timeout;
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
        // The calls run one after the other, because a later call may depend on the files of an earlier one.
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

/// Executes a call and returns the text that the model reads as the call's result. An invalid call does not end the
/// conversation: the model receives the error and can correct the call.
fn execute_tool_call(call: &ModelToolCall, deadline: Instant) -> String {
    let request = match exec::parse_call(&call.name, &call.arguments) {
        Ok(request) => request,
        Err(wrong) => return wrong.to_string(),
    };
    event::emit_event(&ProgressEvent::ToolCall { id: &call.id, argv: &request.argv });
    let result = exec::run_tool(&request, deadline);
    event::emit_event(&ProgressEvent::ToolResult { id: &call.id, exit_code: result.exit_code });
    result.to_string()
}

fn print_to_stdout(text: &str) -> ExitCode {
    match io::stdout().write_all(text.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// The exit status of every program for invalid arguments.
const EXIT_USAGE: u8 = 2;
