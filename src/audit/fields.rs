//! Writing a record's fields by hand: the bytes that serde writes, for a quarter of the instructions.
//!
//! Each call has two records, and serde spends most of its time on their forty keys, none of which needs an escape. Here each
//! key stands with the bytes around it. Anything unusual (text with a character to escape, a negative or huge time) is left to
//! serde, so the two forms cannot differ there. The rest of the records are rare, and serde writes them.
//!
//! **Invariant:** what is written here is byte for byte what serde writes (`audit::fields` in the tests compares both).

use serde::Serialize;

use super::record::{Admitted, MAX_TEXT, Settled, rounded_milliseconds};
use crate::budget::{Amount, Nanodollars, Usage};

/// Appends fields of a JSON object. Each key comes with its quotes, its colon, and whatever stands before it.
struct FieldWriter<'a>(&'a mut Vec<u8>);

/// Appends an admission as a JSON object.
pub(super) fn append_admitted(record: &Admitted<'_>, line: &mut Vec<u8>) {
    let Admitted { request, route, model, rules, stream, request_bytes, pid, reserved } = record;
    let mut fields = FieldWriter(line);
    fields.short_text(r#"{"request":"#, request);
    fields.text(r#","route":"#, route);
    match model {
        Some(model) => fields.short_text(r#","model":"#, model),
        None => fields.raw(r#","model":null"#),
    }
    if !rules.is_empty() {
        fields.raw(r#","rules":"#);
        fields.other(rules);
    }
    fields.raw(if *stream { r#","stream":true"# } else { r#","stream":false"# });
    fields.number(r#","request_bytes":"#, *request_bytes);
    if let Some(pid) = pid {
        fields.number(r#","pid":"#, u64::from(*pid));
    }
    fields.raw(r#","reserved":"#);
    fields.amount(reserved);
    fields.raw("}");
}

/// Appends a settlement as a JSON object.
pub(super) fn append_settled(record: &Settled<'_>, line: &mut Vec<u8>) {
    // All of them, so that a new field does not compile until it is written, too.
    let Settled {
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
    let mut fields = FieldWriter(line);
    fields.short_text(r#"{"request":"#, request);
    fields.text(r#","outcome":"#, outcome.as_str());
    fields.number(r#","status":"#, u64::from(*status));
    if let Some(code) = code {
        fields.short_text(r#","code":"#, code);
    }
    fields.raw(r#","usage":"#);
    fields.usage(usage);
    fields.raw(r#","charged":"#);
    fields.amount(charged);
    fields.number(r#","response_bytes":"#, *response_bytes);
    fields.number(r#","frames":"#, *frames);
    if let Some(id) = litellm_call_id {
        fields.short_text(r#","litellm_call_id":"#, id);
    }
    if let Some(cost) = litellm_response_cost {
        fields.short_text(r#","litellm_response_cost":"#, cost);
    }
    if let Some(cost) = reported_cost_usd {
        fields.dollars(r#","reported_cost_usd":"#, *cost);
    }
    if let Some(first_byte) = first_byte_ms {
        fields.milliseconds(r#","first_byte_ms":"#, *first_byte);
    }
    fields.milliseconds(r#","duration_ms":"#, *duration_ms);
    fields.raw("}");
}

impl FieldWriter<'_> {
    fn raw(&mut self, text: &str) {
        self.0.extend_from_slice(text.as_bytes());
    }

    #[inline]
    fn number(&mut self, key: &str, number: u64) {
        self.raw(key);
        self.raw(itoa::Buffer::new().format(number));
    }

    #[inline]
    fn count(&mut self, key: &str, number: u64) {
        if number != 0 {
            self.number(key, number);
        }
    }

    /// Text from outside, cut to [`MAX_TEXT`].
    #[inline]
    fn short_text(&mut self, key: &str, text: &str) {
        let end =
            if text.len() > MAX_TEXT { text.floor_char_boundary(MAX_TEXT) } else { text.len() };
        self.text(key, &text[..end]);
    }

    #[inline]
    fn text(&mut self, key: &str, text: &str) {
        self.raw(key);
        // Without a branch for each byte, so that many are compared at once.
        let needs_escape = |byte: u8| byte < b' ' || byte == b'"' || byte == b'\\';
        if text.bytes().fold(false, |found, byte| found | needs_escape(byte)) {
            return self.other(text);
        }
        self.raw("\"");
        self.raw(text);
        self.raw("\"");
    }

    /// Whatever is not worth a form of its own.
    #[cold]
    fn other<T: Serialize + ?Sized>(&mut self, value: &T) {
        serde_json::to_writer(&mut *self.0, value).expect("a Vec has room");
    }

    fn dollars(&mut self, key: &str, amount: Nanodollars) {
        self.raw(key);
        self.raw("\"");
        amount.append_to(self.0);
        self.raw("\"");
    }

    fn amount(&mut self, amount: &Amount) {
        let Amount { turns, input, output, cost } = amount;
        self.number(r#"{"turns":"#, *turns);
        self.number(r#","input":"#, input.0);
        self.number(r#","output":"#, output.0);
        if !cost.is_zero() {
            self.dollars(r#","cost_usd":"#, *cost);
        }
        self.raw("}");
    }

    fn usage(&mut self, usage: &Usage) {
        let Usage {
            input,
            output,
            cache_read,
            cache_write,
            cache_write_1h,
            reasoning,
            audio_input,
            audio_output,
            source,
        } = usage;
        self.number(r#"{"input":"#, input.0);
        self.number(r#","output":"#, output.0);
        self.count(r#","cache_read":"#, cache_read.0);
        self.count(r#","cache_write":"#, cache_write.0);
        self.count(r#","cache_write_1h":"#, cache_write_1h.0);
        self.count(r#","reasoning":"#, reasoning.0);
        self.count(r#","audio_input":"#, audio_input.0);
        self.count(r#","audio_output":"#, audio_output.0);
        self.text(r#","source":"#, source.as_str());
        self.raw("}");
    }

    /// Milliseconds with up to three decimals, and one at least, as serde writes a float.
    fn milliseconds(&mut self, key: &str, milliseconds: f64) {
        self.raw(key);
        let micros = (milliseconds * 1000.0).round();
        // Up to fifteen digits a decimal is the shortest that a float is read from, so both forms agree.
        if micros.is_sign_negative() || micros.is_nan() || micros >= MAX_MICROS {
            return self.other(&rounded_milliseconds(milliseconds));
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a whole number from 0 to MAX_MICROS"
        )]
        let micros = micros as u64;
        self.raw(itoa::Buffer::new().format(micros / 1000));
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

/// The first number with sixteen digits.
const MAX_MICROS: f64 = 1e15;
