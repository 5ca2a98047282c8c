//! Reads usage objects of the three protocols into one set of counts.
//!
//! All three report running totals, never differences, and may repeat themselves in part: for each
//! count the highest value wins, because what one answer used only grows. What is not a whole number
//! of at least zero is no count, and is passed over.

mod fast_path;

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::llm::budget::{Nanodollars, TokenUsage, Tokens, UsageSource};
use crate::llm::protocol::LlmProtocol;

/// The counts as the protocol has them.
#[derive(Debug, Default)]
pub(super) struct UsageAccumulator {
    input: Option<u64>,
    output: Option<u64>,
    cache_read: Option<u64>,
    cache_write: Option<u64>,
    cache_write_1h: Option<u64>,
    reasoning: Option<u64>,
    /// What few answers have.
    rare: Option<Box<RareUsage>>,
    cost: Option<Nanodollars>,
}

/// What one usage object says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct ReportedUsage {
    input: Option<u64>,
    output: Option<u64>,
    total: Option<u64>,
    cache_read: Option<u64>,
    cache_write: Option<u64>,
    cache_write_1h: Option<u64>,
    reasoning: Option<u64>,
    audio_input: Option<u64>,
    audio_output: Option<u64>,
    extra: Option<UnsummedUsage>,
    cost: Option<Nanodollars>,
}

#[derive(Clone, Copy, Debug, Default)]
struct RareUsage {
    audio_input: u64,
    audio_output: u64,
    /// What stands beside the counts and is billed as well.
    extra: UnsummedUsage,
}

/// The sum of passes that Anthropic leaves out of its own sums: compaction, above all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct UnsummedUsage {
    input: u64,
    output: u64,
    cache_read: u64,
    cache_write: u64,
    cache_write_1h: u64,
}

impl UsageAccumulator {
    /// Reads what had been used when a message began: its output is not the answer's. Says no to what is not a usage
    /// object.
    pub(super) fn read_initial_usage(&mut self, protocol: LlmProtocol, usage: &[u8]) -> bool {
        let output = self.output;
        let is_read = self.read_usage(protocol, usage);
        self.output = output;
        is_read
    }

    /// Says no to what is not a usage object.
    pub(super) fn read_usage(&mut self, protocol: LlmProtocol, usage: &[u8]) -> bool {
        let Some(said) = fast_path::read_usual_usage(protocol, usage)
            .or_else(|| ReportedUsage::parse_usage(protocol, usage))
        else {
            return false;
        };
        self.read_rare_counts(
            said.audio_input.filter(|count| *count > 0),
            said.audio_output.filter(|count| *count > 0),
            said.extra,
        );
        keep_larger(&mut self.input, said.input);
        keep_larger(&mut self.output, said.whole_output(self.input));
        keep_larger(&mut self.cache_read, said.cache_read);
        keep_larger(&mut self.cache_write, said.cache_write);
        keep_larger(&mut self.cache_write_1h, said.cache_write_1h);
        keep_larger(&mut self.reasoning, said.reasoning);
        keep_larger(&mut self.cost, said.cost);
        true
    }

    /// The counts as we have them: the input includes the cache, and no part is more than its whole.
    /// `None` where none has been reported.
    pub(super) fn total_usage(&self, protocol: LlmProtocol) -> Option<TokenUsage> {
        let RareUsage { audio_input, audio_output, extra } =
            self.rare.as_deref().copied().unwrap_or_default();
        let cache_read = self.cache_read.unwrap_or(0);
        let cache_write = self.cache_write.unwrap_or(0);
        let input = match (protocol, self.input, self.output) {
            (_, None, None) => return None,
            // Anthropic leaves the cache out. LiteLLM has these counts in chat too, included.
            (LlmProtocol::Messages, input, _) => {
                input.unwrap_or(0).saturating_add(cache_read).saturating_add(cache_write)
            }
            (LlmProtocol::Chat | LlmProtocol::Responses, input, _) => input.unwrap_or(0),
        };
        let input = input.saturating_add(extra.input);
        let output = self.output.unwrap_or(0).saturating_add(extra.output);
        let cache_read = cache_read.saturating_add(extra.cache_read);
        let cache_write = cache_write.saturating_add(extra.cache_write);
        // No part is more than its whole, of the passes beside the counts neither.
        let cache_write_1h = self.cache_write_1h.unwrap_or(0).min(self.cache_write.unwrap_or(0));
        let cache_write_1h = cache_write_1h.saturating_add(extra.cache_write_1h);
        let cache_read = cache_read.min(input);
        let cache_write = cache_write.min(input - cache_read);
        Some(TokenUsage {
            input: Tokens(input),
            output: Tokens(output),
            cache_read: Tokens(cache_read),
            cache_write: Tokens(cache_write),
            cache_write_1h: Tokens(cache_write_1h.min(cache_write)),
            reasoning: Tokens(self.reasoning.unwrap_or(0).min(output)),
            audio_input: Tokens(audio_input.min(input)),
            audio_output: Tokens(audio_output.min(output)),
            source: UsageSource::Provider,
        })
    }

    /// The output that [`Self::total_usage`] tells.
    pub(super) fn total_output(&self) -> Tokens {
        if self.input.is_none() && self.output.is_none() {
            return Tokens::ZERO;
        }
        let extra = self.rare.as_ref().map_or(0, |rare| rare.extra.output);
        Tokens(self.output.unwrap_or(0).saturating_add(extra))
    }

    fn read_rare_counts(
        &mut self,
        heard: Option<u64>,
        spoken: Option<u64>,
        extra: Option<UnsummedUsage>,
    ) {
        if heard.is_none() && spoken.is_none() && extra.is_none() {
            return;
        }
        let rare = self.rare.get_or_insert_default();
        rare.audio_input = rare.audio_input.max(heard.unwrap_or(0));
        rare.audio_output = rare.audio_output.max(spoken.unwrap_or(0));
        rare.extra = rare.extra.max_per_count(extra.unwrap_or_default());
    }

    pub(super) fn reported_cost(&self) -> Option<Nanodollars> {
        self.cost
    }

    pub(super) fn has_output(&self) -> bool {
        self.output.is_some()
    }
}

impl ReportedUsage {
    /// All that was written, where `input` was read. OpenAI has the reasoning in the output; Gemini's and xAI's forms of
    /// its API leave the reasoning out, and have it in the total alone or in a detail above the output.
    fn whole_output(&self, input: Option<u64>) -> Option<u64> {
        let written = self.output.unwrap_or(0);
        let beside = self.reasoning.filter(|reasoning| *reasoning > written);
        let summed = beside.map(|reasoning| written.saturating_add(reasoning));
        let rest = self.total.map(|total| total.saturating_sub(input.unwrap_or(0)));
        // Embeddings have a total and no output.
        self.output.max(summed).max(rest.filter(|rest| *rest > 0))
    }

    /// Reads a usage object of any form.
    fn parse_usage(protocol: LlmProtocol, usage: &[u8]) -> Option<Self> {
        let counts: RawUsage<'_> = parse_object(usage)?;
        let (input, output, input_details, output_details) = match protocol {
            LlmProtocol::Chat => (
                counts.prompt_tokens,
                counts.completion_tokens,
                counts.prompt_tokens_details,
                counts.completion_tokens_details,
            ),
            LlmProtocol::Responses | LlmProtocol::Messages => (
                counts.input_tokens,
                counts.output_tokens,
                counts.input_tokens_details,
                counts.output_tokens_details,
            ),
        };
        let (input_details, output_details) =
            (parse_details(input_details), parse_details(output_details));
        let (input, output) = (parse_count(input), parse_count(output));
        let (written, written_1h) = cache_writes(counts.cache_creation);
        let (detailed, detailed_1h) = cache_writes(input_details.cache_creation_token_details);
        let cache_write = [
            parse_count(counts.cache_creation_input_tokens),
            parse_count(input_details.cache_creation_tokens),
            parse_count(input_details.cache_write_tokens),
            written,
            detailed,
        ];
        let cache_write = cache_write.into_iter().max().flatten();
        let cache_read = parse_count(counts.cache_read_input_tokens)
            .or(parse_count(input_details.cached_tokens));
        // Anthropic's cache is beside its input.
        let cached = cache_read.unwrap_or(0).saturating_add(cache_write.unwrap_or(0));
        let cached = if protocol == LlmProtocol::Messages { 0 } else { cached };
        let is_counted = input.is_some() || output.is_some();
        // In a Messages stream LiteLLM's figure leaves the input out.
        let cost = counts.cost.filter(|_| protocol != LlmProtocol::Messages);
        Some(Self {
            input: at_least(input, input_details.sum().max(cached), is_counted),
            output: at_least(output, output_details.sum(), is_counted),
            // Anthropic has none.
            total: parse_count(counts.total_tokens).filter(|_| protocol != LlmProtocol::Messages),
            cache_read,
            cache_write,
            cache_write_1h: written_1h.max(detailed_1h),
            reasoning: parse_count(output_details.reasoning_tokens),
            audio_input: parse_count(input_details.audio_tokens),
            audio_output: parse_count(output_details.audio_tokens),
            extra: counts.iterations.and_then(unsummed_usage),
            cost: cost.and_then(|cost| Nanodollars::parse(cost.get())),
        })
    }
}

impl UnsummedUsage {
    fn max_per_count(self, other: Self) -> Self {
        Self {
            input: self.input.max(other.input),
            output: self.output.max(other.output),
            cache_read: self.cache_read.max(other.cache_read),
            cache_write: self.cache_write.max(other.cache_write),
            cache_write_1h: self.cache_write_1h.max(other.cache_write_1h),
        }
    }
}

/// The sum of the passes that are not in the counts beside them. Those of type `message` are.
fn unsummed_usage(iterations: &RawValue) -> Option<UnsummedUsage> {
    let iterations: Vec<&RawValue> = serde_json::from_str(iterations.get()).ok()?;
    let mut extra = UnsummedUsage::default();
    for pass in
        iterations.iter().filter_map(|pass| parse_object::<RawUsagePass<'_>>(pass.get().as_bytes()))
    {
        if pass.r#type.is_none_or(|kind| kind.get() == "\"message\"") {
            continue;
        }
        let [input, output, read, write] = [
            pass.input_tokens,
            pass.output_tokens,
            pass.cache_read_input_tokens,
            pass.cache_creation_input_tokens,
        ]
        .map(|number| parse_count(number).unwrap_or(0));
        let (written, hour) = cache_writes(pass.cache_creation);
        let write = write.max(written.unwrap_or(0));
        let hour = hour.unwrap_or(0).min(write);
        let whole = input.saturating_add(read).saturating_add(write);
        extra.input = extra.input.saturating_add(whole);
        extra.output = extra.output.saturating_add(output);
        extra.cache_read = extra.cache_read.saturating_add(read);
        extra.cache_write = extra.cache_write.saturating_add(write);
        extra.cache_write_1h = extra.cache_write_1h.saturating_add(hour);
    }
    Some(extra)
}

/// The tokens that were written to a cache, by how long they stay there: the sum, and those of an hour.
fn cache_writes(writes: Option<&RawValue>) -> (Option<u64>, Option<u64>) {
    let writes =
        writes.and_then(|writes| parse_object::<RawCacheCreation<'_>>(writes.get().as_bytes()));
    let Some(writes) = writes else { return (None, None) };
    let (short, hour) = (
        parse_count(writes.ephemeral_5m_input_tokens),
        parse_count(writes.ephemeral_1h_input_tokens),
    );
    (add(short, hour), hour)
}

/// The sum of two counts, where one of them is there.
fn add(one: Option<u64>, other: Option<u64>) -> Option<u64> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.saturating_add(other)),
        (one, other) => one.or(other),
    }
}

/// A sum that is reported, or that of its parts where the sum is missing or nothing. Parts alone are no report: what they
/// leave out is charged as reserved.
fn at_least(sum: Option<u64>, parts: u64, is_counted: bool) -> Option<u64> {
    let is_missing = sum.unwrap_or(0) == 0 && parts > 0 && is_counted;
    if is_missing { Some(parts) } else { sum }
}

/// Reads an object; serde alone would take an array for one, by position.
pub(super) fn parse_object<'a, T: Deserialize<'a>>(json: &'a [u8]) -> Option<T> {
    json.trim_ascii_start().starts_with(b"{").then(|| serde_json::from_slice(json).ok())?
}

/// A usage object of any protocol; each member's text, because one that is wrong spoils no other.
#[derive(Deserialize)]
struct RawUsage<'a> {
    #[serde(borrow)]
    prompt_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    prompt_tokens_details: Option<&'a RawValue>,
    #[serde(borrow)]
    completion_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    completion_tokens_details: Option<&'a RawValue>,
    #[serde(borrow)]
    input_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    input_tokens_details: Option<&'a RawValue>,
    #[serde(borrow)]
    output_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    output_tokens_details: Option<&'a RawValue>,
    #[serde(borrow)]
    total_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    cache_read_input_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    cache_creation_input_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    cache_creation: Option<&'a RawValue>,
    #[serde(borrow)]
    iterations: Option<&'a RawValue>,
    /// LiteLLM's own, in dollars.
    #[serde(borrow)]
    cost: Option<&'a RawValue>,
}

/// How long Anthropic keeps what was written to the cache.
#[derive(Deserialize)]
struct RawCacheCreation<'a> {
    #[serde(borrow)]
    ephemeral_5m_input_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    ephemeral_1h_input_tokens: Option<&'a RawValue>,
}

/// One of the passes that Anthropic made for a call.
#[derive(Deserialize)]
struct RawUsagePass<'a> {
    #[serde(borrow)]
    r#type: Option<&'a RawValue>,
    #[serde(borrow)]
    input_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    output_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    cache_read_input_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    cache_creation_input_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    cache_creation: Option<&'a RawValue>,
}

#[derive(Default, Deserialize)]
struct RawUsageDetails<'a> {
    #[serde(borrow)]
    audio_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    cached_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    reasoning_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    text_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    image_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    video_tokens: Option<&'a RawValue>,
    /// LiteLLM's name.
    #[serde(borrow)]
    cache_creation_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    cache_creation_token_details: Option<&'a RawValue>,
    /// `OpenRouter`'s name.
    #[serde(borrow)]
    cache_write_tokens: Option<&'a RawValue>,
}

impl RawUsageDetails<'_> {
    /// Sums the parts that have nothing in common: the cache is a part of each of them.
    fn sum(&self) -> u64 {
        let parts = [
            self.text_tokens,
            self.audio_tokens,
            self.image_tokens,
            self.video_tokens,
            self.reasoning_tokens,
        ];
        parts.into_iter().filter_map(parse_count).fold(0, u64::saturating_add)
    }
}

fn parse_details(details: Option<&RawValue>) -> RawUsageDetails<'_> {
    details.and_then(|details| parse_object(details.get().as_bytes())).unwrap_or_default()
}

fn parse_count(number: Option<&RawValue>) -> Option<u64> {
    number?.get().parse().ok()
}

fn keep_larger<T: Ord + Copy>(old: &mut Option<T>, new: Option<T>) {
    *old = (*old).max(new);
}

#[cfg(test)]
mod tests;
