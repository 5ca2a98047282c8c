//! The protocol between both ends: requests, answers, events, and how they are recognised.
//!
//! The model's name in the body selects the answer, because every proxy passes it on unchanged. Every event has the
//! same length and contains the time when it was sent.

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

/// A request to the provider.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ProviderCall {
    /// One short answer.
    Unary,
    /// The head of the request as the provider received it.
    Echo,
    /// A stream of this many chunks with this interval (zero: at full speed).
    Stream { chunks: u32, interval: Duration },
}

impl ProviderCall {
    /// The model name that selects this answer.
    fn model(self) -> String {
        match self {
            Self::Unary => "bench-unary".to_owned(),
            Self::Echo => "bench-echo".to_owned(),
            Self::Stream { chunks, interval } => {
                format!("bench-stream-{chunks}-{}", interval.as_micros())
            }
        }
    }

    /// Reads the name from a body. A body that its reader has truncated is a long prompt: unary.
    pub(crate) fn of(body: &[u8]) -> Self {
        Self::parse(body).unwrap_or(Self::Unary)
    }

    fn parse(body: &[u8]) -> Option<Self> {
        let name = &body[memchr::memmem::find(body, b"\"bench-")? + 7..];
        let name = std::str::from_utf8(&name[..memchr::memchr(b'"', name)?]).ok()?;
        if name == "echo" {
            return Some(Self::Echo);
        }
        let (chunks, micros) = name.strip_prefix("stream-")?.split_once('-')?;
        let interval = Duration::from_micros(micros.parse().ok()?);
        Some(Self::Stream { chunks: chunks.parse().ok()?, interval })
    }
}

/// A whole request whose body has about `size` bytes, as an SDK in a sandbox sends it, with three headers that a
/// gateway must overwrite.
pub(crate) fn client_request(call: ProviderCall, size: usize) -> Vec<u8> {
    let streaming = matches!(call, ProviderCall::Stream { .. });
    let mut body = format!(r#"{{"model":"{}","stream":{streaming},"#, call.model());
    if streaming {
        body.push_str(r#""stream_options":{"include_usage":true},"#);
    }
    body.push_str(r#""temperature":0.2,"max_tokens":10000000,"messages":["#);
    body.push_str(r#"{"role":"system","content":"You are a careful engineer."},"#);
    body.push_str(r#"{"role":"user","content":""#);
    let end = r#""}]}"#;
    while body.len() + LINE.len() + end.len() < size {
        body.push_str(LINE);
    }
    let missing = size.saturating_sub(body.len() + end.len());
    body.extend(std::iter::repeat_n('x', missing));
    body.push_str(end);
    let mut head = String::from(REQUEST_HEAD);
    write!(head, "Content-Length: {}\r\n\r\n", body.len()).expect("writing to a string");
    [head.into_bytes(), body.into_bytes()].concat()
}

/// A request without a body.
pub(crate) fn get_request(path: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nHost: localhost:8080\r\n\r\n").into_bytes()
}

/// A unary response with this body.
pub(crate) fn unary_answer(body: &[u8]) -> Vec<u8> {
    let head = format!("{RESPONSE_HEAD}content-type: application/json\r\n{UNARY_HEADERS}");
    let length = format!("content-length: {}\r\n\r\n", body.len());
    [head.as_bytes(), length.as_bytes(), body].concat()
}

/// The head of a streamed response.
pub(crate) fn stream_head() -> Vec<u8> {
    format!("{RESPONSE_HEAD}{STREAM_HEADERS}\r\n").into_bytes()
}

/// One content event as a chunk of the transfer coding; [`stamp`](Self::stamp) fills it in.
pub(crate) struct ContentEvent {
    frame: Vec<u8>,
    at: usize,
}

impl ContentEvent {
    pub(crate) fn new() -> Self {
        let length = BEFORE.len() + STAMP + AFTER.len();
        let mut frame = format!("{length:x}\r\n{BEFORE}").into_bytes();
        let at = frame.len();
        frame.resize(at + STAMP, b'0');
        frame.extend_from_slice(AFTER.as_bytes());
        frame.extend_from_slice(b"\r\n");
        Self { frame, at }
    }

    /// Returns the frame of event number `index`, sent at `now` (nanoseconds).
    pub(crate) fn stamp(&mut self, index: u32, now: u64) -> &[u8] {
        write_digits(&mut self.frame[self.at..self.at + INDEX], u64::from(index));
        write_digits(&mut self.frame[self.at + INDEX + 1..self.at + STAMP], now);
        self.frame[self.at + INDEX] = b' ';
        &self.frame
    }
}

/// Returns everything after the last content event: finish reason, usage, `[DONE]`, end of the message.
pub(crate) fn stream_end(chunks: u32) -> Vec<u8> {
    let mut end = vec![];
    for event in closing_events(chunks) {
        end.extend_from_slice(format!("{:x}\r\n{event}\r\n", event.len()).as_bytes());
    }
    end.extend_from_slice(b"0\r\n\r\n");
    end
}

/// Checks the events of one stream, in whatever pieces they arrive.
pub(crate) struct StreamTranscript {
    partial: Vec<u8>,
    seen: u32,
    chunks: u32,
    closing: Vec<u8>,
}

impl StreamTranscript {
    pub(crate) fn new(chunks: u32) -> Self {
        Self {
            partial: vec![],
            seen: 0,
            chunks,
            closing: closing_events(chunks).concat().into_bytes(),
        }
    }

    /// The number of content events so far.
    pub(crate) fn seen(&self) -> u32 {
        self.seen
    }

    /// Returns whether every chunk, the usage chunk and `[DONE]` have arrived, and nothing else.
    pub(crate) fn is_whole(&self) -> bool {
        self.seen == self.chunks && self.partial == self.closing
    }

    /// Calls `sink` with the sending time of each complete content event.
    pub(crate) fn read(&mut self, mut bytes: &[u8], mut sink: impl FnMut(u64)) -> Result<()> {
        while self.seen < self.chunks && self.partial.len() + bytes.len() >= EVENT {
            if self.partial.is_empty() {
                let (event, rest) = bytes.split_at(EVENT);
                sink(self.check(event)?);
                bytes = rest;
            } else {
                let (missing, rest) = bytes.split_at(EVENT - self.partial.len());
                let mut event = std::mem::take(&mut self.partial);
                event.extend_from_slice(missing);
                sink(self.check(&event)?);
                event.clear();
                self.partial = event;
                bytes = rest;
            }
            self.seen += 1;
        }
        self.partial.extend_from_slice(bytes);
        Ok(())
    }

    fn check(&self, event: &[u8]) -> Result<u64> {
        let (before, rest) = event.split_at(BEFORE.len());
        let (stamp, after) = rest.split_at(STAMP);
        let whole = before == BEFORE.as_bytes() && after == AFTER.as_bytes();
        ensure!(whole, "a damaged event: {}", String::from_utf8_lossy(event));
        let index = read_number(&stamp[..INDEX]).context("an event without its number")?;
        ensure!(index == u64::from(self.seen), "event {index} came as event {}", self.seen);
        read_number(&stamp[INDEX + 1..]).context("an event without its sending time")
    }
}

fn closing_events(chunks: u32) -> [String; 3] {
    let total = u64::from(chunks) + 512;
    [
        format!(
            "{ENVELOPE}\"choices\":[{{\"index\":0,\"delta\":{{}},\"finish_reason\":\"stop\"}}]}}\n\n"
        ),
        format!(
            "{ENVELOPE}\"choices\":[],\"usage\":{{\"prompt_tokens\":512,\
             \"completion_tokens\":{chunks},\"total_tokens\":{total}}}}}\n\n"
        ),
        "data: [DONE]\n\n".to_owned(),
    ]
}

fn write_digits(field: &mut [u8], mut value: u64) {
    for digit in field.iter_mut().rev() {
        *digit = b'0' + u8::try_from(value % 10).expect("less than ten");
        value /= 10;
    }
}

fn read_number(field: &[u8]) -> Option<u64> {
    let digit = |byte: &u8| char::from(*byte).to_digit(10).map(u64::from);
    field.iter().try_fold(0, |sum: u64, byte| Some(sum * 10 + digit(byte)?))
}

/// The width of the event's number.
const INDEX: usize = 8;
/// Number, space, nanoseconds.
const STAMP: usize = INDEX + 1 + 19;
const EVENT: usize = BEFORE.len() + STAMP + AFTER.len();

/// Source code, as prompts of coding agents contain: escapes in every line.
const LINE: &str = r#"    let value = map.get(\"key\").unwrap_or(&default); // line of a file\n"#;

const BEFORE: &str = concat!(
    "data: {\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion.chunk\",",
    "\"created\":1790000000,\"model\":\"bench\",",
    "\"choices\":[{\"index\":0,\"delta\":{\"content\":\""
);
const AFTER: &str = "\"},\"finish_reason\":null}]}\n\n";
const ENVELOPE: &str = concat!(
    "data: {\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion.chunk\",",
    "\"created\":1790000000,\"model\":\"bench\","
);

/// The answer to every unary call.
pub(crate) const ANSWER: &str = concat!(
    "{\"id\":\"chatcmpl-bench\",\"object\":\"chat.completion\",\"created\":1790000000,",
    "\"model\":\"bench\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"",
    "The map is read before it is filled. Move the call to `load` above the loop, and let the ",
    "loop borrow the finished map; the default is then needed in one place only. I would also ",
    "give the key a name, since three functions now spell it out.\",\"refusal\":null},",
    "\"logprobs\":null,\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":512,",
    "\"completion_tokens\":64,\"total_tokens\":576,\"prompt_tokens_details\":{\"cached_tokens\":0}}}"
);

/// The headers of the OpenAI Python SDK, and those that a dishonest agent would add.
const REQUEST_HEAD: &str = concat!(
    "POST /v1/chat/completions HTTP/1.1\r\n",
    "Host: localhost:8080\r\n",
    "Accept: application/json\r\n",
    "Accept-Encoding: gzip, deflate\r\n",
    "Connection: keep-alive\r\n",
    "Content-Type: application/json\r\n",
    "User-Agent: OpenAI/Python 3.54.0\r\n",
    "X-Stainless-Lang: python\r\n",
    "X-Stainless-Package-Version: 3.54.0\r\n",
    "X-Stainless-OS: Linux\r\n",
    "X-Stainless-Arch: x64\r\n",
    "X-Stainless-Runtime: CPython\r\n",
    "X-Stainless-Runtime-Version: 3.13.1\r\n",
    "X-Stainless-Async: false\r\n",
    "x-stainless-retry-count: 0\r\n",
    "Authorization: Bearer sk-spoofed\r\n",
    "x-litellm-end-user-id: spoofed\r\n",
    "x-litellm-spend-logs-metadata: {\"run_id\":\"spoofed\"}\r\n",
);

/// The headers that LiteLLM sends with every answer (the longer ones among some thirty).
const RESPONSE_HEAD: &str = concat!(
    "HTTP/1.1 200 OK\r\n",
    "date: Tue, 10 Nov 2026 09:00:00 GMT\r\n",
    "server: uvicorn\r\n",
    "x-litellm-call-id: 0199a3b2-7c41-7d10-9d3e-5f2b8c6a1e47\r\n",
    "x-litellm-model-id: 7d0c5d9f3c1e4b0aa6f2f0a1c9e8b7d6\r\n",
    "x-litellm-model-api-base: http://10.0.0.7:8000/v1\r\n",
    "x-litellm-version: 1.106.2\r\n",
    "x-litellm-key-spend: 0.0\r\n",
    "x-litellm-response-duration-ms: 812.4\r\n",
    "x-litellm-overhead-duration-ms: 3.1\r\n",
    "x-litellm-attempted-retries: 0\r\n",
    "llm_provider-x-request-id: req_7d0c5d9f3c1e4b0aa6f2f0a1c9e8b7d6\r\n",
);
const UNARY_HEADERS: &str = "x-litellm-response-cost: 2.5e-05\r\n";
const STREAM_HEADERS: &str = concat!(
    "content-type: text/event-stream; charset=utf-8\r\n",
    "cache-control: no-cache\r\n",
    "x-accel-buffering: no\r\n",
    "transfer-encoding: chunked\r\n",
);
