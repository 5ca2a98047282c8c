//! One line of the access log as a JSON object, for readers that parse `LOG_FORMAT=json`.
//!
//! The keys are those of the text form, in the same order. Numbers are JSON numbers, and a missing value is `null`.

use std::time::Duration;

use super::entry::{AccessLogEntry, AccessLogRunFields};
use crate::base::sanitize::SanitizedText;
use crate::base::timestamp::TimestampFormatter;

impl AccessLogEntry<'_> {
    /// Appends the whole line as a JSON object with its line end. `clock` formats the time.
    pub(super) fn append_json_to(
        &self,
        constant: &AccessLogRunFields,
        clock: &mut TimestampFormatter,
        buffer: &mut Vec<u8>,
    ) {
        // The order of the calls below is the order of `FIELD_KEYS`.
        let mut line = JsonLineWriter(buffer);
        line.0.extend_from_slice(b"{\"time\":\"");
        line.0.extend_from_slice(clock.format_time(self.time));
        line.0.extend_from_slice(b"\",");
        line.0.extend_from_slice(constant.identity.as_bytes());
        line.push_text("method", Some(self.method));
        line.push_text("uri", self.uri);
        line.push_number("status", Some(self.status.into()));
        line.push_number("bytes", Some(self.bytes));
        line.push_number("request_bytes", Some(self.request_bytes));
        line.push_text("model", self.model);
        line.push_text("request_id", Some(self.request_id));
        line.push_text("litellm_call_id", self.litellm_call_id);
        line.push_decimal("litellm_response_cost", self.litellm_response_cost);
        line.push_seconds("upstream_time", self.upstream_time);
        line.push_seconds("first_byte_time", self.first_byte_time);
        line.push_seconds("request_time", Some(self.request_time));
        line.push_number("usage_input", self.usage.map(|usage| usage.input.0));
        line.push_number("usage_output", self.usage.map(|usage| usage.output.0));
        line.push_text("usage_source", self.usage.map(|usage| usage.source.as_str()));
        line.push_text("outcome", Some(self.outcome));
        line.push_text("trace_id", Some(&constant.trace));
        line.0.extend_from_slice(b"}\n");
    }
}

/// Adds the number of suppressed lines to the JSON line that was appended last.
pub(super) fn append_repeats(repeats: u64, buffer: &mut Vec<u8>) {
    // The closing brace and the line end are removed and written again behind the new field.
    buffer.truncate(buffer.len() - "}\n".len());
    let mut line = JsonLineWriter(buffer);
    line.push_number("repeats", Some(repeats));
    line.0.extend_from_slice(b"}\n");
}

/// Returns the members of a line that are equal in every line of a run: `"runId":…,"attempt":…`. An attempt that is a
/// whole number becomes a JSON number, as in the run's billing metadata.
pub(super) fn run_members(run: &str, attempt: &str) -> String {
    let mut members = b"\"runId\":".to_vec();
    let mut line = JsonLineWriter(&mut members);
    line.push_value(Some(run));
    match attempt.parse() {
        Ok(number) => line.push_number("attempt", Some(number)),
        Err(_) => line.push_text("attempt", Some(attempt)),
    }
    String::from_utf8(members).expect("JSON texts are written in ASCII")
}

/// A writer of members of an object. Each value has its own form, and no value needs an allocation.
struct JsonLineWriter<'a>(&'a mut Vec<u8>);

impl JsonLineWriter<'_> {
    fn push_key(&mut self, key: &str) {
        self.0.extend_from_slice(b",\"");
        self.0.extend_from_slice(key.as_bytes());
        self.0.extend_from_slice(b"\":");
    }

    fn push_text(&mut self, key: &str, text: Option<&str>) {
        self.push_key(key);
        self.push_value(text);
    }

    fn push_number(&mut self, key: &str, number: Option<u64>) {
        self.push_key(key);
        match number {
            Some(number) => {
                self.0.extend_from_slice(itoa::Buffer::new().format(number).as_bytes());
            }
            None => self.0.extend_from_slice(b"null"),
        }
    }

    /// Appends a number that an upstream has sent as text, and a text if it is no number in JSON.
    fn push_decimal(&mut self, key: &str, text: Option<&str>) {
        let is_number = |text: &&str| {
            text.len() <= SanitizedText::MAX_BYTES
                && text.bytes().all(|byte| byte.is_ascii_digit() || b"+-.eE".contains(&byte))
                && text.parse::<serde_json::Number>().is_ok()
        };
        match text.filter(is_number) {
            Some(number) => {
                self.push_key(key);
                self.0.extend_from_slice(number.as_bytes());
            }
            None => self.push_text(key, text),
        }
    }

    /// Appends seconds with three decimals.
    fn push_seconds(&mut self, key: &str, time: Option<Duration>) {
        let Some(time) = time else { return self.push_text(key, None) };
        self.push_number(key, Some(time.as_secs()));
        let millis = time.subsec_millis();
        let digit = |place: u32| b"0123456789"[(millis / place % 10) as usize];
        self.0.extend_from_slice(&[b'.', digit(100), digit(10), digit(1)]);
    }

    /// Appends a text, cut at [`SanitizedText::MAX_BYTES`], and `null` for a missing one. Characters other than plain
    /// ASCII are escaped, so that no text can end its line or move a terminal's cursor.
    fn push_value(&mut self, text: Option<&str>) {
        let Some(text) = text.filter(|text| !matches!(*text, "" | "-")) else {
            return self.0.extend_from_slice(b"null");
        };
        self.0.push(b'"');
        for character in text[..text.floor_char_boundary(SanitizedText::MAX_BYTES)].chars() {
            match character {
                '"' | '\\' => self.0.extend_from_slice(&[b'\\', character as u8]),
                ' '..='~' => self.0.push(character as u8),
                _ => self.push_escaped(character),
            }
        }
        self.0.push(b'"');
    }

    /// Appends the escape of a character, `\u` and four hexadecimal digits: twice for a character beyond U+FFFF.
    fn push_escaped(&mut self, character: char) {
        for unit in character.encode_utf16(&mut [0; 2]) {
            let digit = |shift: u32| b"0123456789abcdef"[usize::from(*unit >> shift & 15)];
            self.0.extend_from_slice(&[b'\\', b'u', digit(12), digit(8), digit(4), digit(0)]);
        }
    }
}
