//! One question to the model, and its answer: text as it comes, and the calls it makes.

use std::io::{self, BufReader, Read};
use std::time::{Duration, Instant};

use rustix::thread;
use rustix::time::Timespec;
use serde::Deserialize;
use serde_json::Value;

use super::conversation::Conversation;
use super::envelope::{Failure, Kind, Usage};
use super::event::Event;
use super::http::{self, Base, Response};
use super::sse::Events;

/// The model that is asked, and where.
#[derive(Clone, Debug)]
pub struct Model {
    pub name: String,
    base: Base,
    deadline: Instant,
}

/// What the model has answered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Round {
    pub text: String,
    pub calls: Vec<Call>,
    /// Why it stopped, in the provider's words.
    pub finish: String,
    pub usage: Usage,
}

/// A tool that the model calls for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Call {
    pub id: String,
    pub name: String,
    /// JSON, if the model is right.
    pub arguments: String,
}

impl Model {
    /// The model that the environment names.
    ///
    /// # Errors
    /// It names none, or no place that can be reached.
    pub fn new(
        variable: impl Fn(&str) -> Option<String>,
        deadline: Instant,
    ) -> Result<Self, Failure> {
        let given = |name| variable(name).filter(|value| !value.is_empty());
        let name = given("COGNI_MODEL").ok_or_else(|| {
            Failure::new(Kind::NoModel, "`COGNI_MODEL` is not set; give the model's name")
        })?;
        let url = given("OPENAI_BASE_URL").or_else(|| given("OPENAI_API_BASE"));
        let base = Base::parse(url.as_deref().unwrap_or(DEFAULT_URL))
            .map_err(|wrong| Failure::new(Kind::NoModel, format!("`OPENAI_BASE_URL`: {wrong}")))?;
        Ok(Self { name, base, deadline })
    }

    /// Asks the model to go on. `listener` is told its text as it comes.
    ///
    /// # Errors
    /// There is no answer, or not all of it.
    pub fn ask(
        &self,
        conversation: &Conversation,
        listener: &mut dyn FnMut(&Event<'_>),
    ) -> Result<Round, Failure> {
        let request = conversation.request(&self.name);
        let mut may_wait = true;
        loop {
            let response = http::post(&self.base, "/chat/completions", &request, self.deadline)
                .map_err(|error| self.unreachable(&error))?;
            if response.status == 200 {
                return read(BufReader::new(response.body), listener);
            }
            match pause(&response).filter(|_| may_wait) {
                Some(pause) => sleep(pause),
                None => return Err(refusal(response)),
            }
            may_wait = false;
        }
    }

    fn unreachable(&self, error: &io::Error) -> Failure {
        match error.kind() {
            io::ErrorKind::TimedOut => timeout(),
            _ => Failure::new(
                Kind::Unreachable,
                format!("the LLM at `{}` does not answer: {error}", self.base.address),
            ),
        }
    }
}

/// Reads an answer to its end.
///
/// # Errors
/// It breaks off, is an error, or makes no sense.
pub fn read(
    body: impl io::BufRead,
    listener: &mut dyn FnMut(&Event<'_>),
) -> Result<Round, Failure> {
    let mut events = Events::new(body);
    let mut round = Round::default();
    while let Some(data) = events.read().map_err(|error| broken(&error))? {
        if data == "[DONE]" {
            break;
        }
        round.take(&data, listener)?;
    }
    if round.finish.is_empty() {
        return Err(Failure::new(Kind::BrokenAnswer, "the answer ended before its end"));
    }
    round.calls.retain(|call| !call.name.is_empty());
    if round.finish == "length" && !round.calls.is_empty() {
        let message = "the model's output was cut off in the middle of a call; give it more tokens";
        return Err(Failure::new(Kind::CutOff, message));
    }
    Ok(round)
}

impl Round {
    fn take(&mut self, data: &str, listener: &mut dyn FnMut(&Event<'_>)) -> Result<(), Failure> {
        let chunk: Chunk = serde_json::from_str(data)
            .map_err(|error| broken(&io::Error::new(io::ErrorKind::InvalidData, error)))?;
        if let Some(error) = chunk.error {
            return Err(told(&error, None));
        }
        if let Some(usage) = chunk.usage {
            self.usage = Usage { input: usage.prompt_tokens, output: usage.completion_tokens };
        }
        let Some(choice) = chunk.choices.into_iter().flatten().next() else { return Ok(()) };
        let delta = choice.delta.unwrap_or_default();
        if let Some(text) = delta.content.filter(|text| !text.is_empty()) {
            listener(&Event::TextDelta { text: &text });
            self.text.push_str(&text);
        }
        for part in delta.tool_calls.into_iter().flatten() {
            self.add(part)?;
        }
        if let Some(finish) = choice.finish_reason {
            self.finish = finish;
        }
        Ok(())
    }

    /// Some providers number the parts of a call, some only begin a new one with a new id.
    fn add(&mut self, part: CallPart) -> Result<(), Failure> {
        let is_new = part.id.as_ref().is_some_and(|id| {
            !id.is_empty() && self.calls.last().is_none_or(|call| call.id != *id)
        });
        let last =
            self.calls.len().saturating_sub(1) + usize::from(is_new && !self.calls.is_empty());
        let index = part.index.unwrap_or(last);
        if index >= MOST_CALLS {
            return Err(Failure::new(
                Kind::BrokenAnswer,
                format!("the model makes more than {MOST_CALLS} calls at a time"),
            ));
        }
        if self.calls.len() <= index {
            self.calls.resize_with(index + 1, Call::default);
        }
        let call = &mut self.calls[index];
        if let Some(id) = part.id.filter(|id| !id.is_empty()) {
            call.id = id;
        }
        let function = part.function.unwrap_or_default();
        if call.name.is_empty() {
            call.name = function.name.unwrap_or_default();
        }
        call.arguments.push_str(&function.arguments.unwrap_or_default());
        Ok(())
    }
}

#[derive(Deserialize)]
struct Chunk {
    choices: Option<Vec<Choice>>,
    usage: Option<ChunkUsage>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Choice {
    delta: Option<Delta>,
    finish_reason: Option<String>,
}

#[derive(Default, Deserialize)]
struct Delta {
    content: Option<String>,
    tool_calls: Option<Vec<CallPart>>,
}

#[derive(Deserialize)]
struct CallPart {
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

/// How long to wait, where the gateway says that waiting helps, and not for long.
fn pause<R>(response: &Response<R>) -> Option<Duration> {
    if response.status != 429 || response.header("x-should-retry") == Some("false") {
        return None;
    }
    let seconds = response.header("retry-after")?.parse().ok()?;
    Some(Duration::from_secs(seconds)).filter(|pause| *pause <= LONGEST_PAUSE)
}

/// What a gateway says that does not answer.
fn refusal<R: io::BufRead>(response: Response<R>) -> Failure {
    let status = response.status;
    let mut body = vec![];
    // Whatever of it can be read is better than nothing.
    let _ = response.body.take(LONGEST_REFUSAL).read_to_end(&mut body);
    match serde_json::from_slice::<Value>(&body) {
        Ok(mut body) => told(&body["error"].take(), Some(status)),
        Err(_) => told(&Value::Null, Some(status)),
    }
}

fn told(error: &Value, status: Option<u16>) -> Failure {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let message = text(&error["message"]).or_else(|| text(error)).unwrap_or_else(|| match status {
        Some(status) => format!("the gateway answers with status {status}"),
        None => "the provider failed in the middle of its answer".to_owned(),
    });
    let code = text(&error["code"]);
    Failure { kind: Kind::Refused, message, code, status }
}

fn broken(error: &io::Error) -> Failure {
    match error.kind() {
        io::ErrorKind::TimedOut => timeout(),
        _ => Failure::new(Kind::BrokenAnswer, format!("the answer broke off: {error}")),
    }
}

fn timeout() -> Failure {
    Failure::new(Kind::Timeout, "the time is over; raise `--timeout`")
}

fn sleep(time: Duration) {
    let time = Timespec::try_from(time).expect("a pause is some seconds");
    // Cut short by a signal it only leads to an earlier question.
    let _ = thread::nanosleep(&time);
}

const DEFAULT_URL: &str = "http://localhost:8080/v1";

/// More than any model makes; it bounds what a wrong index may ask of the memory.
const MOST_CALLS: usize = 64;

/// An agent that waits holds its sandbox.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

const LONGEST_REFUSAL: u64 = 64 << 10;
