//! The body of an upstream's error on its way to the client: bounded, and charged if it is long.
//!
//! If LiteLLM cannot parse a model's output, LiteLLM puts that output into the message of an error. For
//! example, a forced tool call whose arguments end too early becomes a 500 with the arguments in the
//! message, and no report says what the arguments cost. So the gateway holds an error until the error
//! has ended, and truncates an error that is longer than errors usually are.
//!
//! **Invariant:** an error that is not longer than the limit passes byte for byte, and a longer JSON
//! error stays JSON.

use bytes::{Bytes, BytesMut};
use http::StatusCode;
use memchr::memmem;
use serde_json::json;

use crate::base::json::split_string;
use crate::llm::budget::Tokens;
use crate::llm::protocol::LlmProtocol;

/// The body of an error that has not ended.
pub(super) struct UpstreamErrorBody {
    protocol: LlmProtocol,
    status: StatusCode,
    is_json: bool,
    /// The beginning of the body, up to the limit.
    kept: BytesMut,
    /// The number of bytes beyond the limit, which were dropped.
    dropped: u64,
}

impl UpstreamErrorBody {
    pub(super) fn new(protocol: LlmProtocol, status: StatusCode, is_json: bool) -> Self {
        Self { protocol, status, is_json, kept: BytesMut::new(), dropped: 0 }
    }

    /// Appends one more frame.
    pub(super) fn push(&mut self, frame: &[u8]) {
        let room = MAX_ERROR_BYTES - self.kept.len();
        let (kept, dropped) = frame.split_at(room.min(frame.len()));
        self.kept.extend_from_slice(kept);
        self.dropped += dropped.len() as u64;
    }

    /// Returns the estimated output tokens in the body. Text beyond the usual length of an error may be
    /// model output.
    pub(super) fn tokens(&self) -> Tokens {
        let text = self.kept.len().saturating_sub(FREE_ERROR_BYTES) as u64;
        Tokens(text.div_ceil(BYTES_PER_TOKEN))
    }

    /// Returns the body that the client receives.
    pub(super) fn end(self) -> Bytes {
        if self.dropped == 0 {
            return self.kept.freeze();
        }
        let note = format!(" [cut by the gateway: {} more bytes]", self.dropped);
        if !self.is_json {
            return [&self.kept[..], note.as_bytes()].concat().into();
        }
        // The body is JSON without its end. A new error object carries the beginning of the old
        // message, so that the client can parse it.
        let message = message(&self.kept) + &note;
        let kind = match (self.status, self.protocol) {
            (StatusCode::TOO_MANY_REQUESTS, _) => "rate_limit_error",
            (status, _) if status.is_client_error() => "invalid_request_error",
            (_, LlmProtocol::Messages) => "api_error",
            _ => "server_error",
        };
        let error = json!({"type": kind, "message": message, "param": null, "code": CODE});
        let body = match self.protocol {
            LlmProtocol::Messages => json!({"type": "error", "error": error}),
            LlmProtocol::Chat | LlmProtocol::Responses => json!({"error": error}),
        };
        body.to_string().into()
    }
}

/// Returns the message of a truncated JSON error or, if no message is found, the whole text.
fn message(error: &[u8]) -> String {
    find_message(error).unwrap_or_else(|| String::from_utf8_lossy(error).into_owned())
}

fn find_message(error: &[u8]) -> Option<String> {
    let value = &error[memmem::find(error, MESSAGE)? + MESSAGE.len()..];
    let value = value.trim_ascii_start().strip_prefix(b":")?;
    let (inside, _) = split_string(value.trim_ascii_start().strip_prefix(b"\"")?);
    // The truncation may have split a character or an escape: drop up to `MAX_ESCAPE` bytes until the
    // text parses.
    let ends = (inside.len().saturating_sub(MAX_ESCAPE)..=inside.len()).rev();
    let mut texts = ends.filter_map(|end| str::from_utf8(&inside[..end]).ok());
    texts.find_map(|text| serde_json::from_str(&format!("\"{text}\"")).ok())
}

/// The longest error body that passes unchanged, in bytes. Our choice: errors of the providers are
/// under 1 KiB, those of LiteLLM under 2 KiB.
pub(super) const MAX_ERROR_BYTES: usize = 4096;

/// The length of an error, in bytes, that is not charged: an error's own text.
const FREE_ERROR_BYTES: usize = 512;

/// The estimate of bytes per token, the same as for any other text that was seen.
const BYTES_PER_TOKEN: u64 = 3;

/// The longest JSON escape of one character, in bytes: two escapes of six bytes.
const MAX_ESCAPE: usize = 12;

const MESSAGE: &[u8] = b"\"message\"";

const CODE: &str = "upstream_error_cut";

#[cfg(test)]
mod tests {
    use http::StatusCode;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::{MAX_ERROR_BYTES, UpstreamErrorBody};
    use crate::llm::budget::Tokens;
    use crate::llm::protocol::LlmProtocol;

    fn passed(protocol: LlmProtocol, body: &str, size: usize) -> (String, Tokens) {
        let mut error = UpstreamErrorBody::new(protocol, StatusCode::BAD_GATEWAY, true);
        body.as_bytes().chunks(size).for_each(|frame| error.push(frame));
        let tokens = error.tokens();
        (String::from_utf8(error.end().to_vec()).unwrap(), tokens)
    }

    /// G9: an ordinary error passes as it is and costs nothing.
    #[test]
    fn a_short_error_is_the_upstreams_own() {
        let body = json!({"error": {"message": "no such model", "code": "x"}}).to_string();
        assert_eq!(passed(LlmProtocol::Chat, &body, 7), (body, Tokens::ZERO));
        let body = json!({"error": {"message": "x".repeat(2000)}}).to_string();
        let tokens = Tokens((body.len() as u64 - 512).div_ceil(3));
        assert_eq!(passed(LlmProtocol::Chat, &body, 700), (body, tokens));
    }

    /// G9: an error that is not JSON is truncated as text.
    #[test]
    fn a_page_is_cut() {
        let mut error = UpstreamErrorBody::new(LlmProtocol::Chat, StatusCode::BAD_GATEWAY, false);
        error.push("<p>".repeat(5000).as_bytes());
        let page = error.end();
        assert!(page.len() < MAX_ERROR_BYTES + 100 && page.ends_with(b"10904 more bytes]"));
    }

    proptest! {
        /// G9: an error of any length is JSON of bounded length, with the beginning of its message.
        #[test]
        fn a_long_error_is_cut_and_stays_json(
            pieces in prop::collection::vec(prop::sample::select(vec!["\\", "\"", "\u{1}", "é", "😀", "a"]), 1..40),
            size in 1_usize..5000,
            protocol in prop::sample::select(vec![LlmProtocol::Chat, LlmProtocol::Responses, LlmProtocol::Messages]),
            is_ascii in any::<bool>(),
        ) {
            let text = pieces.concat().repeat(6000_usize.div_ceil(pieces.concat().len()));
            let mut body = json!({"error": {"message": text}}).to_string();
            if is_ascii {
                body = body.replace('é', "\\u00e9").replace('😀', "\\ud83d\\ude00");
            }
            let (passed, tokens) = passed(protocol, &body, size);
            let error: Value = serde_json::from_str(&passed).unwrap();
            let message = error["error"]["message"].as_str().unwrap();
            let (start, note) = message.rsplit_once(" [cut by the gateway: ").unwrap();
            prop_assert!(text.starts_with(start) && start.len() > 500, "{start}");
            prop_assert!(note.ends_with(" more bytes]"));
            prop_assert!(passed.len() < MAX_ERROR_BYTES + 300);
            prop_assert_eq!(error["type"] == "error", protocol == LlmProtocol::Messages);
            prop_assert_eq!(tokens, Tokens((MAX_ERROR_BYTES as u64 - 512).div_ceil(3)));
        }
    }
}
