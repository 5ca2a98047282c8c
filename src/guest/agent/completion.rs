//! One request to the model and its answer: the text as it arrives, and the calls that the model makes.

use std::io::{self, BufReader, Read};
use std::time::{Duration, Instant};

use rustix::thread;
use rustix::time::Timespec;
use serde::Deserialize;
use serde_json::Value;

use super::conversation::{AgentConversation, ModelToolCall};
use super::envelope::{AgentFailure, AgentFailureKind, ConversationUsage};
use super::event::ProgressEvent;
use super::http::{self, HttpResponse, LlmEndpoint};
use super::sse::SseReader;

/// The model, its endpoint, and the deadline of every request.
#[derive(Clone, Debug)]
pub struct ModelClient {
    pub name: String,
    base: LlmEndpoint,
    deadline: Instant,
}

/// The model's answer to one request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelCompletion {
    pub text: String,
    pub calls: Vec<ModelToolCall>,
    /// The reason why the model stopped, as the provider names it.
    pub finish: String,
    pub usage: ConversationUsage,
}

impl ModelClient {
    /// Reads the model's name and address from the environment.
    ///
    /// # Errors
    /// Returns `NoModel` if `COGNI_MODEL` is not set, or if the address is not one that a sandbox can reach.
    pub fn new(
        variable: impl Fn(&str) -> Option<String>,
        deadline: Instant,
    ) -> Result<Self, AgentFailure> {
        let non_empty = |name| variable(name).filter(|value| !value.is_empty());
        let name = non_empty("COGNI_MODEL").ok_or_else(|| {
            AgentFailure::new(
                AgentFailureKind::NoModel,
                "`COGNI_MODEL` is not set; give the model's name",
            )
        })?;
        // The second name is the one that older OpenAI clients read.
        let url = non_empty("OPENAI_BASE_URL").or_else(|| non_empty("OPENAI_API_BASE"));
        let base = LlmEndpoint::parse(url.as_deref().unwrap_or(DEFAULT_URL)).map_err(|wrong| {
            AgentFailure::new(AgentFailureKind::NoModel, format!("`OPENAI_BASE_URL`: {wrong}"))
        })?;
        Ok(Self { name, base, deadline })
    }

    /// Asks the model to continue the conversation. `listener` receives the text as it arrives.
    ///
    /// # Errors
    /// Returns an error if the gateway does not answer, refuses, or sends an incomplete answer.
    pub fn complete(
        &self,
        conversation: &AgentConversation,
        listener: &mut dyn FnMut(&ProgressEvent<'_>),
    ) -> Result<ModelCompletion, AgentFailure> {
        let request = conversation.to_request_body(&self.name);
        // At most one retry: a gateway that refuses twice is not going to accept soon.
        let mut may_wait = true;
        loop {
            let response =
                http::post_json(&self.base, "/chat/completions", &request, self.deadline)
                    .map_err(|error| self.unreachable_failure(&error))?;
            if response.status == 200 {
                return read_completion(BufReader::new(response.body), listener);
            }
            match retry_delay(&response).filter(|_| may_wait) {
                Some(pause) => sleep(pause),
                None => return Err(refusal_failure(response)),
            }
            may_wait = false;
        }
    }

    fn unreachable_failure(&self, error: &io::Error) -> AgentFailure {
        match error.kind() {
            io::ErrorKind::TimedOut => timeout_failure(),
            _ => AgentFailure::new(
                AgentFailureKind::Unreachable,
                format!("the LLM at `{}` does not answer: {error}", self.base.address),
            ),
        }
    }
}

/// Reads a streamed answer until its end.
///
/// # Errors
/// Returns an error if the stream breaks off, contains an error, or is not a valid answer.
pub fn read_completion(
    body: impl io::BufRead,
    listener: &mut dyn FnMut(&ProgressEvent<'_>),
) -> Result<ModelCompletion, AgentFailure> {
    let mut events = SseReader::new(body);
    let mut round = ModelCompletion::default();
    while let Some(data) = events.next_data().map_err(|error| broken_failure(&error))? {
        if data == "[DONE]" {
            break;
        }
        round.apply_chunk(&data, listener)?;
    }
    // A stream that just stops may have lost its last calls, so that its text must not count as an answer.
    if round.finish.is_empty() {
        return Err(AgentFailure::new(
            AgentFailureKind::BrokenAnswer,
            "the answer ended without a finish reason",
        ));
    }
    // Calls without a name are the gaps below an index that the provider skipped.
    round.calls.retain(|call| !call.name.is_empty());
    if round.finish == "length" && !round.calls.is_empty() {
        // The arguments of the last call are incomplete; executing them could do something that the model did not mean.
        let message = "the model's output was cut off in the middle of a call; give it more tokens";
        return Err(AgentFailure::new(AgentFailureKind::CutOff, message));
    }
    Ok(round)
}

impl ModelCompletion {
    fn apply_chunk(
        &mut self,
        data: &str,
        listener: &mut dyn FnMut(&ProgressEvent<'_>),
    ) -> Result<(), AgentFailure> {
        let chunk: CompletionChunk = serde_json::from_str(data)
            .map_err(|error| broken_failure(&io::Error::new(io::ErrorKind::InvalidData, error)))?;
        if let Some(error) = chunk.error {
            return Err(error_failure(&error, None));
        }
        if let Some(usage) = chunk.usage {
            self.usage =
                ConversationUsage { input: usage.prompt_tokens, output: usage.completion_tokens };
        }
        // A chunk that only reports usage has no choices.
        let Some(choice) = chunk.choices.into_iter().flatten().next() else { return Ok(()) };
        let delta = choice.delta.unwrap_or_default();
        if let Some(text) = delta.content.filter(|text| !text.is_empty()) {
            listener(&ProgressEvent::TextDelta { text: &text });
            self.text.push_str(&text);
        }
        for part in delta.tool_calls.into_iter().flatten() {
            self.add_call_part(part)?;
        }
        if let Some(finish) = choice.finish_reason {
            self.finish = finish;
        }
        Ok(())
    }

    /// Appends a part of a call. Some providers number the parts of a call; other providers only begin a new call with
    /// a new id.
    fn add_call_part(&mut self, part: ToolCallPart) -> Result<(), AgentFailure> {
        // A repeated id continues the last call.
        let is_new = part.id.as_ref().is_some_and(|id| {
            !id.is_empty() && self.calls.last().is_none_or(|call| call.id != *id)
        });
        // The index for a part without a number: the last call, or the one after the last if the id is new.
        let last =
            self.calls.len().saturating_sub(1) + usize::from(is_new && !self.calls.is_empty());
        let index = part.index.unwrap_or(last);
        // The index comes from the provider and sizes the vector below.
        if index >= MAX_TOOL_CALLS {
            return Err(AgentFailure::new(
                AgentFailureKind::BrokenAnswer,
                format!("the model makes more than {MAX_TOOL_CALLS} calls at a time"),
            ));
        }
        if self.calls.len() <= index {
            self.calls.resize_with(index + 1, ModelToolCall::default);
        }
        let call = &mut self.calls[index];
        if let Some(id) = part.id.filter(|id| !id.is_empty()) {
            call.id = id;
        }
        let function = part.function.unwrap_or_default();
        if call.name.is_empty() {
            call.name = function.name.unwrap_or_default();
        }
        // The arguments arrive in pieces, in order.
        call.arguments.push_str(&function.arguments.unwrap_or_default());
        Ok(())
    }
}

#[derive(Deserialize)]
struct CompletionChunk {
    choices: Option<Vec<CompletionChoice>>,
    usage: Option<ChunkUsage>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct CompletionChoice {
    delta: Option<CompletionDelta>,
    finish_reason: Option<String>,
}

#[derive(Default, Deserialize)]
struct CompletionDelta {
    content: Option<String>,
    tool_calls: Option<Vec<ToolCallPart>>,
}

#[derive(Deserialize)]
struct ToolCallPart {
    index: Option<usize>,
    id: Option<String>,
    function: Option<FunctionPart>,
}

#[derive(Default, Deserialize)]
struct FunctionPart {
    name: Option<String>,
    arguments: Option<String>,
}

#[derive(Deserialize)]
struct ChunkUsage {
    #[serde(default)]
    prompt_tokens: u64,
    #[serde(default)]
    completion_tokens: u64,
}

/// Returns the time to wait before a retry, if the gateway asks for a wait that is short enough.
fn retry_delay<R>(response: &HttpResponse<R>) -> Option<Duration> {
    if response.status != 429 || response.header("x-should-retry") == Some("false") {
        return None;
    }
    let seconds = response.header("retry-after")?.parse().ok()?;
    Some(Duration::from_secs(seconds)).filter(|pause| *pause <= MAX_RETRY_DELAY)
}

/// Builds the failure for an answer with an error status, from as much of the body as can be read.
fn refusal_failure<R: io::BufRead>(response: HttpResponse<R>) -> AgentFailure {
    let status = response.status;
    let mut body = vec![];
    // A body that breaks off may still contain a message in its first bytes.
    let _ = response.body.take(MAX_ERROR_BODY_BYTES).read_to_end(&mut body);
    match serde_json::from_slice::<Value>(&body) {
        Ok(mut body) => error_failure(&body["error"].take(), Some(status)),
        Err(_) => error_failure(&Value::Null, Some(status)),
    }
}

fn error_failure(error: &Value, status: Option<u16>) -> AgentFailure {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let message = text(&error["message"]).or_else(|| text(error)).unwrap_or_else(|| match status {
        Some(status) => format!("the gateway answers with status {status}"),
        None => "the provider failed in the middle of its answer".to_owned(),
    });
    let code = text(&error["code"]);
    AgentFailure { kind: AgentFailureKind::Refused, message, code, status }
}

fn broken_failure(error: &io::Error) -> AgentFailure {
    match error.kind() {
        io::ErrorKind::TimedOut => timeout_failure(),
        _ => AgentFailure::new(
            AgentFailureKind::BrokenAnswer,
            format!("the answer broke off: {error}"),
        ),
    }
}

fn timeout_failure() -> AgentFailure {
    AgentFailure::new(AgentFailureKind::Timeout, "the time is over; raise `--timeout`")
}

fn sleep(time: Duration) {
    let time = Timespec::try_from(time).expect("a pause is some seconds");
    // A signal ends the sleep early; the retry is then only sent earlier.
    let _ = thread::nanosleep(&time);
}

/// The LLM's address when the environment names none: the default address of `cogni-init`'s listener.
const DEFAULT_URL: &str = "http://localhost:8080/v1";

/// The maximum number of calls in one answer. Our choice: more than any model makes. It bounds the memory that a wrong
/// index can allocate.
const MAX_TOOL_CALLS: usize = 64;

/// The longest `Retry-After` that is waited for. Our choice: a waiting agent still occupies its sandbox.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(10);

/// The maximum number of bytes that are read of an error's body. Our choice.
const MAX_ERROR_BODY_BYTES: u64 = 64 << 10;
