//! Removes a hosted tool that requests no outside access. Such a tool's client sends it by default
//! and works without it.

use std::ops::Range;

use bytes::Bytes;
use memchr::memrchr;

use super::change::{FieldChangeKind, FieldChangeReason};
use super::{BodyPolicyError, LlmCall, ProviderCapability, editor};
use crate::base::json::{JsonDocument, JsonLimits, JsonScanner};

impl LlmCall {
    /// Drops the web search tool that begins at offset `at`, if the tool states that it reaches
    /// nothing outside.
    ///
    /// # Errors
    /// Returns [`BodyPolicyError::CapabilityNotGranted`] if the tool may reach outside, or if its
    /// end or its comma cannot be determined.
    pub(super) fn drop_search_without_reach(&mut self, at: u64) -> Result<(), BodyPolicyError> {
        let tools = self.draft.members().iter().position(|member| member.value.contains(&at));
        let place = tools.and_then(|tools| {
            let list = self.draft.members()[tools].value.clone();
            Some((tools, self.element(&list, at)?))
        });
        let Some((tools, place)) = place else { return Err(reaches_outside()) };
        if self.draft.members()[tools].entries == 1 {
            // Providers refuse a tool choice, or a limit on tool calls, in a request without tools.
            // So these fields are dropped with the last tool.
            let members = self.draft.members().iter().enumerate();
            let choices = members.filter(|(_, member)| member.key.as_str().is_some_and(is_choice));
            let choices: Vec<_> = choices.map(|(at, _)| at).collect();
            choices.into_iter().chain([tools]).for_each(|at| self.draft.drop_member(at));
        } else {
            self.draft.replace_range(place, Bytes::new());
        }
        self.record_change(
            "tools.web_search",
            FieldChangeKind::Dropped,
            FieldChangeReason::HostedTool,
        );
        Ok(())
    }

    /// Returns the bytes to remove for the element of `list` that begins at offset `at`: the
    /// element and its comma.
    ///
    /// Returns `None` if the tool may reach outside. Also returns `None` if the element is longer
    /// than [`editor::MAX_INSPECTED_BYTES`], or if the neighbouring comma is too far away.
    fn element(&self, list: &Range<u64>, at: u64) -> Option<Range<u64>> {
        let behind = self.draft.bytes_in(at..list.end.min(at + editor::MAX_INSPECTED_BYTES));
        let length = object_length(&behind)?;
        let tool = read(&behind[..length])?;
        let reach = tool.find_member("external_web_access")?;
        let (from, to) =
            (usize::try_from(reach.value.start).ok()?, usize::try_from(reach.value.end).ok()?);
        // Only the literal `false` counts. An absent, null or other value leaves the decision to
        // the provider.
        if behind[from..to] != *b"false" {
            return None;
        }
        // The comma behind the element is preferred. The last element has none, so the comma before
        // it is removed instead; otherwise two commas or a trailing comma would remain.
        let rest = &behind[length..];
        let blanks = rest.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
        let end = at + length as u64;
        if rest.get(blanks) == Some(&b',') {
            return Some(at..end + blanks as u64 + 1);
        }
        let before = self.draft.bytes_in(list.start.max(at.saturating_sub(LOOK_BACK))..at);
        let comma = memrchr(b',', &before)
            .filter(|comma| before[comma + 1..].iter().all(u8::is_ascii_whitespace));
        match comma {
            Some(comma) => Some(at - (before.len() - comma) as u64..end),
            // An only element has no comma. The caller then drops the whole list.
            None => before.trim_ascii_end().ends_with(b"[").then_some(at..end),
        }
    }
}

/// Returns the length of the object at the start of `text`. The scanner has already checked that
/// the JSON is valid.
fn object_length(text: &[u8]) -> Option<usize> {
    // Braces inside strings do not count, and an escaped quote does not end a string.
    let (mut depth, mut is_text, mut is_escaped) = (0_u32, false, false);
    for (at, byte) in text.iter().enumerate() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if is_text => is_escaped = true,
            b'"' => is_text = !is_text,
            _ if is_text => (),
            b'{' | b'[' => depth += 1,
            b'}' | b']' => {
                depth -= 1;
                if depth == 0 {
                    return Some(at + 1);
                }
            }
            _ => (),
        }
    }
    None
}

fn read(object: &[u8]) -> Option<JsonDocument> {
    let mut scanner = JsonScanner::new(JsonLimits::default());
    scanner.feed_frame(object).ok()?;
    scanner.finish_document().ok()
}

/// Returns true if a field restricts or counts the use of the request's tools.
fn is_choice(name: &str) -> bool {
    matches!(name, "tool_choice" | "parallel_tool_calls" | "max_tool_calls")
}

fn reaches_outside() -> BodyPolicyError {
    BodyPolicyError::CapabilityNotGranted {
        capability: ProviderCapability::WebSearch,
        field: "tools",
        detail: Some("web_search".into()),
    }
}

/// The number of bytes before an element that are searched for its comma. Our choice: more than one
/// line's indentation.
const LOOK_BACK: u64 = 256;
