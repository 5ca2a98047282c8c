//! Reads a usual usage object in one walk, without a parser.
//!
//! **Invariant:** if this module returns a result, the object is valid JSON and the parser returns
//! the same result.

use super::{MediaUsage, ReportedUsage};
use crate::base::json::JsonCursor;
use crate::llm::protocol::LlmProtocol;

/// Reads a usage object that has only whole numbers and details of whole numbers. Returns `None`
/// for any other object.
pub(super) fn read_usual_usage(protocol: LlmProtocol, usage: &[u8]) -> Option<ReportedUsage> {
    let (reported, length) = read_usual_prefix(protocol, usage)?;
    JsonCursor::new(&usage[length..]).expect_end()?;
    Some(reported)
}

/// Reads a usage object like [`read_usual_usage`] at the start of `text`, and returns its length, too.
pub(super) fn read_usual_prefix(
    protocol: LlmProtocol,
    text: &[u8],
) -> Option<(ReportedUsage, usize)> {
    let mut found = UsageMemberCounts::new();
    let mut cursor = JsonCursor::new(text);
    cursor.read_members(|key, value| {
        let name = match key {
            b"prompt_tokens" => UsageMember::PromptTokens,
            b"completion_tokens" => UsageMember::CompletionTokens,
            b"input_tokens" => UsageMember::InputTokens,
            b"output_tokens" => UsageMember::OutputTokens,
            b"total_tokens" => UsageMember::TotalTokens,
            b"cache_read_input_tokens" => UsageMember::CacheRead,
            b"cache_creation_input_tokens" => UsageMember::CacheWrite,
            b"prompt_tokens_details" => {
                return found.read_details(UsageDetailsMember::Prompt, value);
            }
            b"completion_tokens_details" => {
                return found.read_details(UsageDetailsMember::Completion, value);
            }
            b"input_tokens_details" => return found.read_details(UsageDetailsMember::Input, value),
            b"output_tokens_details" => {
                return found.read_details(UsageDetailsMember::Output, value);
            }
            b"cache_creation" => return found.read_details(UsageDetailsMember::CacheWrite, value),
            // These members contain more than counts, so the parser reads the object.
            b"iterations" | b"cost" => return None,
            _ => return value.skip_scalar(),
        };
        found.read_count(name, value)
    })?;
    Some((found.to_reported_usage(protocol)?, cursor.offset()))
}

/// A member that is a count.
#[derive(Clone, Copy)]
enum UsageMember {
    PromptTokens,
    CompletionTokens,
    InputTokens,
    OutputTokens,
    TotalTokens,
    CacheRead,
    CacheWrite,
    /// The first slot of the details of each [`UsageDetailsMember`].
    Details,
}

/// A member that contains details.
#[derive(Clone, Copy)]
enum UsageDetailsMember {
    Prompt,
    Completion,
    Input,
    Output,
    CacheWrite,
}

/// The counts by slot: first those of [`UsageMember`], then [`COUNTS_PER_DETAILS`] slots for each
/// details member.
struct UsageMemberCounts {
    counts: [Option<u64>; COUNT_SLOTS],
    /// One bit for each slot that was filled, even by null. The parser rejects a repeated member,
    /// so this walk must too.
    seen: u64,
    /// One bit for each details member that was read.
    seen_sides: u32,
}

impl UsageMemberCounts {
    fn new() -> Self {
        Self { counts: [None; COUNT_SLOTS], seen: 0, seen_sides: 0 }
    }

    fn read_count(&mut self, name: UsageMember, value: &mut JsonCursor<'_>) -> Option<()> {
        self.take_count(name as usize, value)
    }

    fn read_details(&mut self, side: UsageDetailsMember, value: &mut JsonCursor<'_>) -> Option<()> {
        let bit = 1 << side as u32;
        if self.seen_sides & bit != 0 {
            return None;
        }
        self.seen_sides |= bit;
        if value.read_null() {
            return Some(());
        }
        let first = UsageMember::Details as usize + COUNTS_PER_DETAILS * side as usize;
        if let UsageDetailsMember::CacheWrite = side {
            return value.read_members(|key, value| match key {
                b"ephemeral_1h_input_tokens" => self.take_count(first, value),
                b"ephemeral_5m_input_tokens" => self.take_count(first + 1, value),
                _ => value.skip_scalar(),
            });
        }
        value.read_members(|key, value| match key {
            b"cached_tokens" => self.take_count(first, value),
            b"audio_tokens" => self.take_count(first + 1, value),
            b"reasoning_tokens" => self.take_count(first + 2, value),
            // A provider uses only one of these two names. Both fill one slot, so an object with
            // both goes to the parser.
            b"cache_creation_tokens" | b"cache_write_tokens" => self.take_count(first + 3, value),
            b"image_tokens" => self.take_count(first + 4, value),
            b"video_tokens" => self.take_count(first + 5, value),
            // The count is used only if the sum is missing. The slot finds a repeated member.
            b"text_tokens" => self.take_count(first + 6, value),
            _ => value.skip_scalar(),
        })
    }

    fn take_count(&mut self, place: usize, value: &mut JsonCursor<'_>) -> Option<()> {
        if self.seen & 1 << place != 0 {
            return None;
        }
        self.seen |= 1 << place;
        if !value.read_null() {
            self.counts[place] = Some(value.read_count()?);
        }
        Some(())
    }

    /// Returns the counts in the protocol's meaning. Returns `None` if a details member exists
    /// without its sum: the parser then adds up the details.
    fn to_reported_usage(&self, protocol: LlmProtocol) -> Option<ReportedUsage> {
        let count = |name: UsageMember| self.counts[name as usize];
        let detail = |side: UsageDetailsMember, at: usize| {
            self.counts[UsageMember::Details as usize + COUNTS_PER_DETAILS * side as usize + at]
        };
        let media = |side| {
            let [audio, image, video] = [1, 4, 5].map(|at| detail(side, at).unwrap_or(0));
            MediaUsage { audio, image, video }
        };
        let (input, output, input_side, output_side) = match protocol {
            LlmProtocol::Chat => (
                UsageMember::PromptTokens,
                UsageMember::CompletionTokens,
                UsageDetailsMember::Prompt,
                UsageDetailsMember::Completion,
            ),
            LlmProtocol::Responses | LlmProtocol::Messages => (
                UsageMember::InputTokens,
                UsageMember::OutputTokens,
                UsageDetailsMember::Input,
                UsageDetailsMember::Output,
            ),
        };
        let has_details = |side: UsageDetailsMember| self.seen_sides & 1 << side as u32 != 0;
        let is_missing = |sum: UsageMember, side: UsageDetailsMember| {
            count(sum).unwrap_or(0) == 0 && has_details(side)
        };
        if is_missing(input, input_side) || is_missing(output, output_side) {
            return None;
        }
        let (hour, short) =
            (detail(UsageDetailsMember::CacheWrite, 0), detail(UsageDetailsMember::CacheWrite, 1));
        let cache_write =
            count(UsageMember::CacheWrite).max(detail(input_side, 3)).max(super::add(hour, short));
        let cache_read = count(UsageMember::CacheRead).or(detail(input_side, 0));
        // In Messages the cache is not part of the input. In the other protocols it is, so an input
        // of zero needs the parser's rule.
        let is_cached = cache_read.max(cache_write).is_some_and(|cached| cached > 0);
        if is_cached && protocol != LlmProtocol::Messages && count(input).unwrap_or(0) == 0 {
            return None;
        }
        Some(ReportedUsage {
            input: count(input),
            output: count(output),
            total: count(UsageMember::TotalTokens).filter(|_| protocol != LlmProtocol::Messages),
            cache_read,
            cache_write,
            cache_write_1h: hour,
            reasoning: detail(output_side, 2),
            media_input: media(input_side),
            media_output: media(output_side),
            extra: None,
            cost: None,
        })
    }
}

/// The number of counts in each details member.
const COUNTS_PER_DETAILS: usize = 7;

const COUNT_SLOTS: usize = UsageMember::Details as usize + COUNTS_PER_DETAILS * 5;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::ReportedUsage;
    use super::read_usual_usage;
    use crate::llm::protocol::LlmProtocol;

    const PROTOCOLS: [LlmProtocol; 3] =
        [LlmProtocol::Chat, LlmProtocol::Responses, LlmProtocol::Messages];

    fn check(usage: &str) -> bool {
        let mut is_read = false;
        for protocol in PROTOCOLS {
            let said = read_usual_usage(protocol, usage.as_bytes());
            is_read = said.is_some();
            if is_read {
                assert_eq!(
                    said,
                    ReportedUsage::parse_usage(protocol, usage.as_bytes()),
                    "{protocol:?} {usage}"
                );
            }
        }
        is_read
    }

    /// G7: usage objects in the providers' usual forms are read without a parser.
    #[test]
    fn the_usual_usage_is_read_in_one_walk() {
        for usage in [
            r#"{"prompt_tokens":11,"completion_tokens":7,"total_tokens":18}"#,
            r#"{"completion_tokens":128,"prompt_tokens":2048,"total_tokens":2176,"completion_tokens_details":{"accepted_prediction_tokens":0,"audio_tokens":3,"reasoning_tokens":64,"rejected_prediction_tokens":null},"prompt_tokens_details":{"audio_tokens":0,"cached_tokens":1024}}"#,
            r#"{"prompt_tokens":300,"completion_tokens":1290,"completion_tokens_details":{"image_tokens":1290,"video_tokens":0},"prompt_tokens_details":{"text_tokens":42,"image_tokens":258,"video_tokens":null}}"#,
            r#"{ "prompt_tokens" : 11 , "prompt_tokens_details" : null , "completion_tokens" : null }"#,
            r#"{"input_tokens":11,"cache_creation_input_tokens":3,"cache_creation":{"ephemeral_5m_input_tokens":1,"ephemeral_1h_input_tokens":2},"cache_read_input_tokens":5,"output_tokens":7,"service_tier":"standard"}"#,
            r#"{"input_tokens":15,"input_tokens_details":{"cached_tokens":8},"output_tokens":6,"output_tokens_details":{"reasoning_tokens":5},"total_tokens":21}"#,
            "{}",
        ] {
            assert!(check(usage), "{usage}");
        }
        assert!(!check(r#"{"prompt_tokens":1,"cost":2}"#));
        assert!(!check(r#"{"input_tokens":1,"iterations":[]}"#));
        let repeated = r#"{"prompt_tokens":1,"prompt_tokens_details":{"cached_tokens":3,"text_tokens":1,"text_tokens":1}}"#;
        assert!(!check(repeated), "the parser refuses a repeated member");
    }

    fn usage() -> impl Strategy<Value = String> {
        let key = prop::sample::select(vec![
            "prompt_tokens",
            "completion_tokens",
            "input_tokens",
            "output_tokens",
            "cache_read_input_tokens",
            "cache_creation_input_tokens",
            "cached_tokens",
            "audio_tokens",
            "reasoning_tokens",
            "ephemeral_1h_input_tokens",
            "ephemeral_5m_input_tokens",
            "cache_creation_tokens",
            "cache_write_tokens",
            "text_tokens",
            "image_tokens",
            "video_tokens",
            "total_tokens",
            "x",
            "cost",
            "input_\\u0074okens",
        ]);
        let side = prop::sample::select(vec![
            "prompt_tokens_details",
            "completion_tokens_details",
            "input_tokens_details",
            "output_tokens_details",
            "cache_creation",
            "details",
        ]);
        let value = prop::sample::select(vec![
            "0",
            "7",
            "300",
            "null",
            "-1",
            "2.5",
            "1e3",
            "\"7\"",
            "007",
            "true",
            "18446744073709551615",
            "{}",
            "[]",
            "",
            "nul",
        ]);
        let value = prop_oneof![3 => (0_u64..900).prop_map(|count| count.to_string()), 1 => value.prop_map(str::to_owned)];
        let object = |members: Vec<(&str, String)>| {
            let members: Vec<_> =
                members.iter().map(|(key, value)| format!("\"{key}\":{value}")).collect();
            format!("{{{}}}", members.join(","))
        };
        let details = prop::collection::vec((key.clone(), value.clone()), 0..4).prop_map(object);
        let member = prop_oneof![2 => (key, value), 1 => (side, details)];
        prop::collection::vec(member, 0..7).prop_map(object)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]

        /// G7: the fast path returns the parser's result or declines.
        #[test]
        fn the_walk_agrees_with_the_parser(usage in usage()) {
            check(&usage);
            check(&usage[..usage.len() / 2]);
        }
    }
}
