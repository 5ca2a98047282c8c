//! A reference reader of responses that follows the specification without regard to speed: the WHATWG text line by
//! line, JSON as a tree, the whole response at once.

use cogni_gateway::llm::budget::{TokenUsage, Tokens, UsageSource};
use cogni_gateway::llm::protocol::{GatewayRoute, LlmProtocol};
use cogni_gateway::llm::response::{MAX_REPORTED_TOKENS, StreamEnd};
use serde_json::Value;

#[derive(Debug)]
pub(super) struct ExpectedUsage {
    pub(super) so_far: Option<TokenUsage>,
    pub(super) finish: StreamEnd,
    pub(super) passed: Vec<u8>,
}

/// A line with its line end, and without.
struct SseLine<'a> {
    whole: &'a [u8],
    text: &'a [u8],
}

pub(super) fn read_stream(route: GatewayRoute, hides: bool, stream: &[u8]) -> ExpectedUsage {
    let mark = if stream.starts_with(b"\xEF\xBB\xBF") { 3 } else { 0 };
    let mut model = ReferenceState::new(route);
    let mut passed = stream[..mark].to_vec();
    let mut lines = split_lines(&stream[mark..]).into_iter().peekable();
    while let Some(first) = lines.next() {
        // A comment or an empty line between events.
        if first.text.is_empty() || first.text.starts_with(b":") {
            passed.extend(first.whole);
            continue;
        }
        let mut event = vec![first];
        for line in lines.by_ref() {
            let is_last = line.text.is_empty();
            event.push(line);
            if is_last {
                break;
            }
        }
        let is_usage_chunk =
            dispatch_event(&event).is_some_and(|(name, data)| model.hear(&name, &data));
        if !(hides && is_usage_chunk && begins_without_choices(&event)) {
            passed.extend(event.iter().flat_map(|line| line.whole));
        }
    }
    ExpectedUsage {
        so_far: model.usage().map(|usage| count_without_output(route, usage)),
        finish: model.finish,
        passed,
    }
}

pub(super) fn read_body(route: GatewayRoute, body: &[u8]) -> ExpectedUsage {
    let mut model = ReferenceState::new(route);
    model.finish = StreamEnd::Terminated;
    let document: Value = serde_json::from_slice(body).unwrap();
    model.top_level(&document);
    if !document.is_object() {
        model.finish = StreamEnd::Unfinished;
    }
    ExpectedUsage {
        so_far: model.usage().map(|usage| count_without_output(route, usage)),
        finish: model.finish,
        passed: body.to_vec(),
    }
}

/// Embeddings and the other routes without a turn have no output, so all tokens are input.
fn count_without_output(route: GatewayRoute, usage: TokenUsage) -> TokenUsage {
    if route.counts_as_turn() {
        return usage;
    }
    let input = Tokens((usage.input.0 + usage.output.0).min(1_000_000_000));
    TokenUsage { input, output: Tokens::ZERO, ..usage }
}

fn split_lines(mut text: &[u8]) -> Vec<SseLine<'_>> {
    let mut lines = vec![];
    while !text.is_empty() {
        let end = text.iter().position(|byte| b"\r\n".contains(byte)).unwrap_or(text.len());
        let ended = match &text[end..] {
            [b'\r', b'\n', ..] => end + 2,
            [_, ..] => end + 1,
            [] => end,
        };
        lines.push(SseLine { whole: &text[..ended], text: &text[..end] });
        text = &text[ended..];
    }
    lines
}

/// Returns whether the first `choices` in the event is empty, even on a line that is no field. The filter decides by
/// it, because a different beginning has been passed on before the event ends.
fn begins_without_choices(event: &[SseLine<'_>]) -> bool {
    let bytes: Vec<u8> = event.iter().flat_map(|line| line.whole).copied().collect();
    let key = b"\"choices\"";
    let Some(at) = bytes.windows(key.len()).position(|window| window == key) else { return true };
    let rest = bytes[at + key.len()..].iter().filter(|byte| !byte.is_ascii_whitespace());
    rest.take(3).eq(b":[]")
}

/// Returns the event's name and data.
fn dispatch_event(event: &[SseLine<'_>]) -> Option<(Vec<u8>, Vec<u8>)> {
    let mut name = vec![];
    let mut data = vec![];
    for line in event {
        let colon = line.text.iter().position(|byte| *byte == b':');
        let (field, value) = line.text.split_at(colon.unwrap_or(line.text.len()));
        let value = value.strip_prefix(b":").unwrap_or(value);
        let value = value.strip_prefix(b" ").unwrap_or(value);
        match field {
            b"event" => name = value.to_vec(),
            b"data" => {
                data.extend(value);
                data.push(b'\n');
            }
            _ => (),
        }
    }
    data.pop();
    (!data.is_empty()).then_some((name, data))
}

struct ReferenceState {
    protocol: LlmProtocol,
    finish: StreamEnd,
    input: Option<u64>,
    output: Option<u64>,
    cache_read: Option<u64>,
    cache_write: Option<u64>,
    cache_write_1h: Option<u64>,
    reasoning: Option<u64>,
}

impl ReferenceState {
    fn new(route: GatewayRoute) -> Self {
        Self {
            protocol: route.protocol(),
            finish: StreamEnd::Unfinished,
            input: None,
            output: None,
            cache_read: None,
            cache_write: None,
            cache_write_1h: None,
            reasoning: None,
        }
    }

    /// Reads an event, and returns whether it is the usage chunk.
    fn hear(&mut self, name: &[u8], data: &[u8]) -> bool {
        let json = serde_json::from_slice(data).unwrap_or(Value::Null);
        if self.protocol == LlmProtocol::Chat {
            if data == b"[DONE]" {
                self.end(StreamEnd::Terminated);
            } else if name == b"error" {
                self.end(StreamEnd::Errored);
                return false;
            }
            self.top_level(&json);
            return json["usage"].is_object() && json["choices"] == Value::Array(vec![]);
        }
        let mut compact = data.to_vec();
        compact.retain(|byte| !byte.is_ascii_whitespace());
        let name = match name {
            // This much is enough to recognise a cut error.
            b"" | b"message" if compact.starts_with(br#"{"type":"error""#) => "error",
            b"" | b"message" => json["type"].as_str().unwrap_or_default(),
            name => str::from_utf8(name).unwrap_or("unknown"),
        };
        match name {
            "error" => self.end(StreamEnd::Errored),
            "message_start" | "message_delta" | "" => self.payload(&json),
            "message_stop" | "response.completed" | "response.incomplete" | "response.failed" => {
                if json.is_object() {
                    self.end(StreamEnd::Terminated);
                }
                self.payload(&json);
            }
            _ => (),
        }
        false
    }

    fn payload(&mut self, json: &Value) {
        if json["message"]["usage"].is_object() {
            let output = self.output;
            self.count(&json["message"]["usage"]);
            self.output = output;
        }
        if json["response"]["usage"].is_null() {
            self.top_level(json);
        } else {
            self.top_level(&serde_json::json!({ "error": json["error"] }));
            self.count(&json["response"]["usage"]);
        }
    }

    fn top_level(&mut self, json: &Value) {
        if !json["error"].is_null() {
            self.end(StreamEnd::Errored);
        }
        self.count(&json["usage"]);
    }

    fn count(&mut self, usage: &Value) {
        let set = |count: &mut Option<u64>, value: &Value| *count = value.as_u64().max(*count);
        let (input, output) = match self.protocol {
            LlmProtocol::Chat => ("prompt_tokens", "completion_tokens"),
            LlmProtocol::Responses | LlmProtocol::Messages => ("input_tokens", "output_tokens"),
        };
        let details = |of: &str| &usage[format!("{of}_details")];
        let kept = |writes: &Value| {
            let times = ["ephemeral_5m_input_tokens", "ephemeral_1h_input_tokens"];
            let counts = times.iter().filter_map(|time| writes[time].as_u64());
            counts.reduce(u64::saturating_add)
        };
        let heard = details(input);
        let writes = [&usage["cache_creation"], &heard["cache_creation_token_details"]];
        let counts = [
            &usage["cache_creation_input_tokens"],
            &heard["cache_creation_tokens"],
            &heard["cache_write_tokens"],
        ];
        let counts = counts.into_iter().map(Value::as_u64);
        let write = counts.chain(writes.into_iter().map(kept)).max().flatten();
        let read = &usage["cache_read_input_tokens"];
        let read = if read.is_u64() { read } else { &heard["cached_tokens"] }.as_u64();
        let cached = read.unwrap_or(0).saturating_add(write.unwrap_or(0));
        let cached = if self.protocol == LlmProtocol::Messages { 0 } else { cached };
        // A missing total is the sum of its parts, if the other total is present.
        let is_counted = usage[input].is_u64() || usage[output].is_u64();
        let sum = |name: &str, least: u64| {
            let kinds = ["text", "audio", "image", "video", "reasoning"];
            let parts =
                kinds.iter().filter_map(|kind| details(name)[format!("{kind}_tokens")].as_u64());
            let parts = parts.fold(0, u64::saturating_add).max(least);
            match usage[name].as_u64() {
                None | Some(0) if is_counted && parts > 0 => Some(parts),
                reported => reported,
            }
        };
        self.input = self.input.max(sum(input, cached));
        let detail = &details(output)["reasoning_tokens"];
        let mut whole = sum(output, 0);
        let written = whole.unwrap_or(0);
        if let Some(reasoning) = detail.as_u64().filter(|reasoning| *reasoning > written) {
            whole = Some(written.saturating_add(reasoning));
        }
        let is_totalled = self.protocol != LlmProtocol::Messages;
        if let Some(total) = usage["total_tokens"].as_u64().filter(|_| is_totalled) {
            let rest = total.saturating_sub(self.input.unwrap_or(0));
            whole = whole.max(Some(rest).filter(|rest| *rest > 0));
        }
        self.output = self.output.max(whole);
        self.cache_read = self.cache_read.max(read);
        self.cache_write = self.cache_write.max(write);
        for writes in writes {
            set(&mut self.cache_write_1h, &writes["ephemeral_1h_input_tokens"]);
        }
        set(&mut self.reasoning, &details(output)["reasoning_tokens"]);
    }

    fn end(&mut self, finish: StreamEnd) {
        if self.finish != StreamEnd::Errored {
            self.finish = finish;
        }
    }

    fn usage(&self) -> Option<TokenUsage> {
        if self.input.is_none() && self.output.is_none() {
            return None;
        }
        let (read, write) = (self.cache_read.unwrap_or(0), self.cache_write.unwrap_or(0));
        let mut input = self.input.unwrap_or(0);
        if self.protocol == LlmProtocol::Messages {
            input = input.saturating_add(read).saturating_add(write);
        }
        let input = input.min(MAX_REPORTED_TOKENS.0);
        let output = self.output.unwrap_or(0).min(MAX_REPORTED_TOKENS.0);
        let read = read.min(input);
        let write = write.min(input - read);
        Some(TokenUsage {
            input: Tokens(input),
            output: Tokens(output),
            cache_read: Tokens(read),
            cache_write: Tokens(write),
            cache_write_1h: Tokens(self.cache_write_1h.unwrap_or(0).min(write)),
            reasoning: Tokens(self.reasoning.unwrap_or(0).min(output)),
            source: UsageSource::Provider,
            ..TokenUsage::default()
        })
    }
}
