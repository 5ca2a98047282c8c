//! Writes the fields of frequent records without serde: the same bytes for a quarter of the instructions.
//!
//! Each call has two records, and serde spends most of its time on their forty keys, none of which needs an escape.
//! Here each key is a constant with the bytes around it. Unusual values (text with a character to escape, a negative or
//! huge time) are left to serde, so the two forms cannot differ there. All other records are rare, and serde writes
//! them.
//!
//! **Invariant:** the functions write byte for byte what serde writes (`audit::fields` in the tests compares both).

use serde::Serialize;

use super::records::{
    AuditRecord, CallAdmittedRecord, CallSettledRecord, MAX_TEXT_BYTES, round_milliseconds,
};
use crate::base::json::is_plain_text;
use crate::llm::budget::{BudgetAmount, Nanodollars, TokenUsage};

impl AuditRecord for CallAdmittedRecord<'_> {
    const EVENT: &'static str = "request.admitted";

    fn append_json(&self, line: &mut Vec<u8>) {
        append_admitted(self, line);
    }
}

impl AuditRecord for CallSettledRecord<'_> {
    const EVENT: &'static str = "request.settled";

    fn append_json(&self, line: &mut Vec<u8>) {
        append_settled(self, line);
    }
}

/// Appends fields of a JSON object. Each key is given with its quotes, its colon, and the comma or brace before it.
struct RecordFieldWriter<'a>(&'a mut Vec<u8>);

/// Appends an admission as a JSON object.
pub(super) fn append_admitted(record: &CallAdmittedRecord<'_>, line: &mut Vec<u8>) {
    let CallAdmittedRecord { request, route, model, rules, stream, request_bytes, pid, reserved } =
        record;
    let mut fields = RecordFieldWriter(line);
    fields.push_truncated_text(r#"{"request":"#, request);
    fields.push_word(r#","route":"#, route);
    match model {
        Some(model) => fields.push_truncated_text(r#","model":"#, model),
        None => fields.push_raw(r#","model":null"#),
    }
    if !rules.is_empty() {
        fields.push_raw(r#","rules":"#);
        fields.push_serialized(rules);
    }
    fields.push_raw(if *stream { r#","stream":true"# } else { r#","stream":false"# });
    fields.push_number(r#","request_bytes":"#, *request_bytes);
    if let Some(pid) = pid {
        fields.push_number(r#","pid":"#, u64::from(*pid));
    }
    fields.push_raw(r#","reserved":"#);
    fields.push_amount(reserved);
    fields.push_raw("}");
}

/// Appends a settlement as a JSON object.
pub(super) fn append_settled(record: &CallSettledRecord<'_>, line: &mut Vec<u8>) {
    // The pattern names all fields, so a new field does not compile until it is written, too.
    let CallSettledRecord {
        request,
        outcome,
        status,
        code,
        usage,
        charged,
        response_bytes,
        frames,
        litellm_call_id,
        litellm_response_cost,
        reported_cost_usd,
        first_byte_ms,
        duration_ms,
    } = record;
    let mut fields = RecordFieldWriter(line);
    fields.push_truncated_text(r#"{"request":"#, request);
    fields.push_word(r#","outcome":"#, outcome.as_str());
    fields.push_number(r#","status":"#, u64::from(*status));
    if let Some(code) = code {
        fields.push_truncated_text(r#","code":"#, code);
    }
    fields.push_raw(r#","usage":"#);
    fields.push_usage(usage);
    fields.push_raw(r#","charged":"#);
    fields.push_amount(charged);
    fields.push_number(r#","response_bytes":"#, *response_bytes);
    fields.push_number(r#","frames":"#, *frames);
    if let Some(id) = litellm_call_id {
        fields.push_truncated_text(r#","litellm_call_id":"#, id);
    }
    if let Some(cost) = litellm_response_cost {
        fields.push_truncated_text(r#","litellm_response_cost":"#, cost);
    }
    if let Some(cost) = reported_cost_usd {
        fields.push_dollars(r#","reported_cost_usd":"#, *cost);
    }
    if let Some(first_byte) = first_byte_ms {
        fields.push_milliseconds(r#","first_byte_ms":"#, *first_byte);
    }
    fields.push_milliseconds(r#","duration_ms":"#, *duration_ms);
    fields.push_raw("}");
}

impl RecordFieldWriter<'_> {
    fn push_raw(&mut self, text: &str) {
        self.0.extend_from_slice(text.as_bytes());
    }

    #[inline]
    fn push_number(&mut self, key: &str, number: u64) {
        self.push_raw(key);
        self.push_raw(itoa::Buffer::new().format(number));
    }

    #[inline]
    fn push_count(&mut self, key: &str, number: u64) {
        if number != 0 {
            self.push_number(key, number);
        }
    }

    /// Appends text from a client or an upstream, cut to [`MAX_TEXT_BYTES`].
    #[inline]
    fn push_truncated_text(&mut self, key: &str, text: &str) {
        let end = if text.len() > MAX_TEXT_BYTES {
            text.floor_char_boundary(MAX_TEXT_BYTES)
        } else {
            text.len()
        };
        self.push_text(key, &text[..end]);
    }

    #[inline]
    fn push_text(&mut self, key: &str, text: &str) {
        self.push_raw(key);
        if !is_plain_text(text.as_bytes()) {
            return self.push_serialized(text);
        }
        self.push_raw("\"");
        self.push_raw(text);
        self.push_raw("\"");
    }

    /// Appends a word of the gateway's own, which needs no escape.
    #[inline]
    fn push_word(&mut self, key: &str, word: &'static str) {
        self.push_raw(key);
        self.push_raw("\"");
        self.push_raw(word);
        self.push_raw("\"");
    }

    /// Appends a value as serde writes it, for rare values.
    #[cold]
    fn push_serialized<T: Serialize + ?Sized>(&mut self, value: &T) {
        serde_json::to_writer(&mut *self.0, value).expect("a Vec has room");
    }

    fn push_dollars(&mut self, key: &str, amount: Nanodollars) {
        self.push_raw(key);
        self.push_raw("\"");
        amount.append_to(self.0);
        self.push_raw("\"");
    }

    fn push_amount(&mut self, amount: &BudgetAmount) {
        let BudgetAmount { turns, input, output, cost } = amount;
        self.push_number(r#"{"turns":"#, *turns);
        self.push_number(r#","input":"#, input.0);
        self.push_number(r#","output":"#, output.0);
        if !cost.is_zero() {
            self.push_dollars(r#","cost_usd":"#, *cost);
        }
        self.push_raw("}");
    }

    fn push_usage(&mut self, usage: &TokenUsage) {
        let TokenUsage {
            input,
            output,
            cache_read,
            cache_write,
            cache_write_1h,
            reasoning,
            audio_input,
            audio_output,
            image_input,
            video_input,
            image_output,
            video_output,
            source,
        } = usage;
        self.push_number(r#"{"input":"#, input.0);
        self.push_number(r#","output":"#, output.0);
        self.push_count(r#","cache_read":"#, cache_read.0);
        self.push_count(r#","cache_write":"#, cache_write.0);
        self.push_count(r#","cache_write_1h":"#, cache_write_1h.0);
        self.push_count(r#","reasoning":"#, reasoning.0);
        self.push_count(r#","audio_input":"#, audio_input.0);
        self.push_count(r#","audio_output":"#, audio_output.0);
        self.push_count(r#","image_input":"#, image_input.0);
        self.push_count(r#","video_input":"#, video_input.0);
        self.push_count(r#","image_output":"#, image_output.0);
        self.push_count(r#","video_output":"#, video_output.0);
        self.push_word(r#","source":"#, source.as_str());
        self.push_raw("}");
    }

    /// Appends milliseconds with one to three decimals, as serde writes a float.
    fn push_milliseconds(&mut self, key: &str, milliseconds: f64) {
        self.push_raw(key);
        let micros = (milliseconds * 1000.0).round();
        // A decimal of at most fifteen digits is the shortest text that parses to its float, so both forms agree.
        if micros.is_sign_negative() || micros.is_nan() || micros >= MAX_EXACT_MICROS {
            return self.push_serialized(&round_milliseconds(milliseconds));
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a whole number from 0 to MAX_MICROS"
        )]
        let micros = micros as u64;
        self.push_raw(itoa::Buffer::new().format(micros / 1000));
        let digit = |place: u64| b"0123456789"[(micros / place % 10) as usize];
        let decimals = [b'.', digit(100), digit(10), digit(1)];
        let length = match decimals {
            [_, _, b'0', b'0'] => 2,
            [_, _, _, b'0'] => 3,
            _ => 4,
        };
        self.0.extend_from_slice(&decimals[..length]);
    }
}

/// The smallest whole number of sixteen digits.
const MAX_EXACT_MICROS: f64 = 1e15;
