//! Reads a unary JSON body that arrived in one frame. The result equals that of
//! [`json_usage`](super::json_usage), which reads frame by frame; this module needs one walk from
//! string to string.
//!
//! The usage report is found by its key at the top level, so the walk covers everything before the
//! report. A search from the end would be faster but would prove less. It would prove that the text
//! stands in the body. It would not prove that the text is the body's own report, and not one
//! inside a truncated body.
//!
//! **Invariant:** if this module accepts a body, the reading frame by frame finds the same. If it
//! declines a body, it has reported nothing.

use std::ops::Range;

use super::StreamEnd;
use super::answer_keys::{KEY_BYTES, MAX_USAGE_BYTES, has_text_under};
use super::report::ResponseReport;
use super::usage_counts::ReportedUsage;
use crate::base::json::{is_space, split_string};
use crate::llm::protocol::LlmProtocol;

/// The findings of a body's walk.
#[derive(Default)]
struct WholeBodyFindings {
    usage: Option<WholeBodyUsage>,
    has_error: bool,
    /// The length of the answer's texts, in bytes.
    texts: u64,
}

/// The usage report of a body.
#[expect(
    clippy::large_enum_variant,
    reason = "nearly every body has the usual report, and a box would be an allocation"
)]
enum WholeBodyUsage {
    /// A usual report, which the walk has read.
    Read(ReportedUsage),
    /// The place of another value.
    Place(Range<usize>),
}

/// The position of the walk in the top-level object.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WholeBodyPosition {
    Key,
    Value,
    /// The value of `usage`, which begins at this offset.
    Usage(usize),
}

/// Reads a body that is one object and nothing else. Returns `false` for any other body, after
/// reporting nothing.
pub(super) fn read_whole_body(bytes: &[u8], report: &mut ResponseReport) -> bool {
    // The walk only collects; the report is changed after the whole body is accepted.
    let Some(found) = scan_body(report.protocol(), bytes) else { return false };
    if found.has_error {
        report.on_end(StreamEnd::Errored);
    }
    report.count_text(found.texts);
    match found.usage {
        Some(WholeBodyUsage::Read(usage)) => report.add_usage(&usage),
        Some(WholeBodyUsage::Place(place)) => {
            report.parse_usage(&bytes[place]);
        }
        None => {}
    }
    report.on_end(StreamEnd::Terminated);
    true
}

fn scan_body(protocol: LlmProtocol, bytes: &[u8]) -> Option<WholeBodyFindings> {
    // If the frame is only the first part of a longer body, it rarely ends with the closing brace.
    bytes.trim_ascii_end().strip_suffix(b"}").filter(|_| bytes.len() <= MAX_WALK_BYTES)?;
    let mut found = WholeBodyFindings::default();
    // The opening brace is read below, so the depth starts at 1.
    let (mut place, mut depth) = (WholeBodyPosition::Key, 1_u32);
    // `is_answer`: the walk is in the value of a key that holds an answer. `is_text`: the last key
    // in that value has text under it.
    let (mut is_answer, mut is_text) = (false, false);
    let mut at = skip_space(bytes, 0);
    if bytes.get(at) != Some(&b'{') {
        return None;
    }
    at += 1;
    loop {
        match *bytes.get(at)? {
            b'"' => {
                let (inside, rest) = split_string(&bytes[at + 1..]);
                at = bytes.len() - rest.len();
                // If the string has no end, `rest` is empty and the look-up below fails, so the
                // body is declined.
                let next = skip_space(bytes, at);
                let is_key = *bytes.get(next)? == b':';
                if depth == 1 && place == WholeBodyPosition::Key {
                    if !is_key {
                        return None;
                    }
                    at = skip_space(bytes, next + 1);
                    let first = *bytes.get(at)?;
                    place = WholeBodyPosition::Value;
                    is_answer =
                        matches!(inside.first_chunk(), Some(b"choic" | b"conte" | b"outpu"));
                    if inside == b"usage" {
                        // A second report is ambiguous, so the frame-by-frame reader decides.
                        if found.usage.is_some() {
                            return None;
                        }
                        if let Some((usage, length)) = read_usual_usage(protocol, &bytes[at..]) {
                            found.usage = Some(WholeBodyUsage::Read(usage));
                            at += length;
                        } else {
                            place = WholeBodyPosition::Usage(at);
                        }
                    }
                    // The value `null` begins with `n` and states no error.
                    found.has_error |= inside == b"error" && first != b'n';
                } else if is_answer && is_key {
                    is_text = has_text_under(inside);
                } else if is_answer && is_text {
                    found.texts += inside.len() as u64;
                }
                continue;
            }
            b'{' | b'[' => depth += 1,
            b'}' | b']' if depth > 1 => depth -= 1,
            byte @ (b',' | b'}') if depth == 1 => {
                // A longer report is not read; the other reader then gives the same result.
                if let WholeBodyPosition::Usage(start) = place {
                    if at - start > MAX_USAGE_BYTES {
                        return None;
                    }
                    found.usage = Some(WholeBodyUsage::Place(start..at));
                }
                if byte == b'}' {
                    // If other bytes follow the object, the body is declined.
                    return (skip_space(bytes, at + 1) == bytes.len()).then_some(found);
                }
                place = WholeBodyPosition::Key;
            }
            b']' => return None,
            b':' if depth == 1 => return None,
            _ => (),
        }
        at += 1;
    }
}

/// Reads a usual usage report at the start of `text`. Returns the report, and its length with the white space up to the
/// byte that ends the member. Returns `None` if the report is unusual or long, or if the member does not end behind it.
fn read_usual_usage(protocol: LlmProtocol, text: &[u8]) -> Option<(ReportedUsage, usize)> {
    let (usage, length) = ReportedUsage::read_usual(protocol, text)?;
    let end = length + text[length..].iter().take_while(|byte| is_space(**byte)).count();
    let is_ended = matches!(text.get(end), Some(b',' | b'}')) && end <= MAX_USAGE_BYTES;
    is_ended.then_some((usage, end))
}

fn skip_space(bytes: &[u8], mut at: usize) -> usize {
    while bytes.get(at).is_some_and(u8::is_ascii_whitespace) {
        at += 1;
    }
    at
}

/// The maximum length of a body for this walk, in bytes. The walk reads numbers byte by byte;
/// [`json_usage`](super::json_usage) reads long lists of numbers, as embeddings are, faster in
/// blocks.
const MAX_WALK_BYTES: usize = 64 * 1024;

/// The other reader compares top-level keys by their first `KEY_BYTES` bytes. The literals in this
/// file have that length.
const _: () = assert!(KEY_BYTES == 5);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::read_whole_body;
    use crate::llm::protocol::GatewayRoute;
    use crate::llm::response::json_usage::JsonUsageScanner;
    use crate::llm::response::report::ResponseReport;

    /// Returns true if the body is read in one walk. Asserts that the reading frame by frame finds the same.
    fn check(route: GatewayRoute, bytes: &[u8]) -> bool {
        let mut whole = ResponseReport::new(route);
        let is_read = read_whole_body(bytes, &mut whole);
        // If the walk declined, this is the report in its initial state.
        let expected = format!("{whole:?}");
        let mut pieces = ResponseReport::new(route);
        if is_read {
            let mut body = JsonUsageScanner::default();
            bytes.chunks(1).for_each(|byte| body.read_frame(byte, &mut pieces));
        }
        assert_eq!(expected, format!("{pieces:?}"), "{}", bytes.escape_ascii());
        is_read
    }

    /// G7, G9: usual bodies are read in one walk.
    #[test]
    fn what_providers_answer_is_read_at_once() {
        for (route, body) in [
            (
                GatewayRoute::ChatCompletions,
                r#"{"id":"c","choices":[{"index":0,"message":{"role":"assistant","content":"a \"text\"\n","tool_calls":[{"function":{"name":"f","arguments":"{}"}}]},"finish_reason":"stop"}],"usage":{"prompt_tokens":11,"completion_tokens":7},"service_tier":null}"#,
            ),
            (
                GatewayRoute::Messages,
                "{ \"content\" : [ { \"type\" : \"text\" , \"text\" : \"hello\" } ] ,\n \"usage\" : { \"input_tokens\" : 3, \"output_tokens\": 2 } }\n",
            ),
            (
                GatewayRoute::Responses,
                r#"{"error":null,"output":[{"content":[{"type":"output_text","text":"hi"}]}],"usage":{"input_tokens":1,"output_tokens":1}}"#,
            ),
            (GatewayRoute::Messages, r#"{"type":"error","error":{"type":"overloaded_error"}}"#),
            (
                GatewayRoute::Embeddings,
                r#"{"data":[{"embedding":[-0.1,1e-9]}],"usage":{"prompt_tokens":8}}"#,
            ),
        ] {
            assert!(check(route, body.as_bytes()), "{body}");
            for cut in 0..body.len() {
                assert!(
                    !check(route, &body.as_bytes()[..cut]) || body[cut..].trim().is_empty(),
                    "{cut} of {body}"
                );
            }
        }
    }

    fn noise() -> impl Strategy<Value = String> {
        let piece = prop::sample::select(vec![
            "{",
            "}",
            "[",
            "]",
            ",",
            ":",
            "\"",
            "\\",
            " ",
            "\n",
            "7",
            "null",
            "\"usage\":",
            "\"error\":",
            "\"choices\":[",
            "\"content\":",
            "\"output\"",
            "\"text\":\"text\"",
            "\"c\":",
            "\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":2}",
            "{\"a\":",
        ]);
        prop::collection::vec(piece, 0..16).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

        /// G7: for any bytes, the walk finds what the reading byte by byte finds.
        #[test]
        fn it_reads_as_it_does_byte_by_byte_or_not_at_all(noise in noise()) {
            for body in [noise.clone(), format!("{{{noise}}}"), format!("{{\"content\":[{noise}],\"usage\":{{}}}}")] {
                check(GatewayRoute::ChatCompletions, body.as_bytes());
            }
        }
    }
}
