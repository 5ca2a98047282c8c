//! Reads usage objects of the three protocols into one set of counts.
//!
//! All three protocols report running totals, never differences, and may repeat a part of the
//! totals. For each count the highest value wins, because the usage of one answer only grows. A
//! value that is not a whole number of at least zero is no count and is ignored.

mod fast_path;

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::llm::budget::{Nanodollars, TokenUsage, Tokens, UsageSource};
use crate::llm::protocol::LlmProtocol;

/// The counts in the protocol's own meaning.
#[derive(Debug, Default)]
pub(super) struct UsageAccumulator {
    input: Option<u64>,
    output: Option<u64>,
    cache_read: Option<u64>,
    cache_write: Option<u64>,
    cache_write_1h: Option<u64>,
    reasoning: Option<u64>,
    /// Counts that few answers have, boxed to keep the usual case small.
    rare: Option<Box<RareUsage>>,
    cost: Option<Nanodollars>,
}

/// The content of one usage object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ReportedUsage {
    input: Option<u64>,
    output: Option<u64>,
    total: Option<u64>,
    cache_read: Option<u64>,
    cache_write: Option<u64>,
    cache_write_1h: Option<u64>,
    reasoning: Option<u64>,
    media_input: MediaUsage,
    media_output: MediaUsage,
    extra: Option<UnsummedUsage>,
    cost: Option<Nanodollars>,
}

/// The parts of the input or of the output that are no text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct MediaUsage {
    audio: u64,
    image: u64,
    video: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct RareUsage {
    media_input: MediaUsage,
    media_output: MediaUsage,
    /// Counts beside the main counts that the provider also charges.
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
    /// Reads the usage at the start of a message, whose output is not that of the answer. Returns
    /// `false` if `usage` is not a usage object.
    pub(super) fn read_initial_usage(&mut self, protocol: LlmProtocol, usage: &[u8]) -> bool {
        // The output at the start is a placeholder, so the previous value is restored.
        let output = self.output;
        let is_read = self.read_usage(protocol, usage);
        self.output = output;
        is_read
    }

    /// Reads a usage object. Returns `false` if `usage` is not a usage object.
    pub(super) fn read_usage(&mut self, protocol: LlmProtocol, usage: &[u8]) -> bool {
        // The fast path declines anything unusual, and the parser then decides.
        let Some(reported) = fast_path::read_usual_usage(protocol, usage)
            .or_else(|| ReportedUsage::parse_usage(protocol, usage))
        else {
            return false;
        };
        self.add_report(&reported);
        true
    }

    /// Adds the content of a usage object.
    pub(super) fn add_report(&mut self, reported: &ReportedUsage) {
        self.read_rare_counts(reported);
        keep_larger(&mut self.input, reported.input);
        keep_larger(&mut self.output, reported.whole_output(self.input));
        keep_larger(&mut self.cache_read, reported.cache_read);
        keep_larger(&mut self.cache_write, reported.cache_write);
        keep_larger(&mut self.cache_write_1h, reported.cache_write_1h);
        keep_larger(&mut self.reasoning, reported.reasoning);
        keep_larger(&mut self.cost, reported.cost);
    }

    /// Returns the counts in the gateway's meaning: the input includes the cache, and no part
    /// exceeds its whole. Returns `None` if neither
    /// input nor output was reported.
    pub(super) fn total_usage(&self, protocol: LlmProtocol) -> Option<TokenUsage> {
        let RareUsage { media_input, media_output, extra } =
            self.rare.as_deref().copied().unwrap_or_default();
        let cache_read = self.cache_read.unwrap_or(0);
        let cache_write = self.cache_write.unwrap_or(0);
        let input = match (protocol, self.input, self.output) {
            (_, None, None) => return None,
            // Anthropic leaves the cache out of its input. LiteLLM reports cache counts in chat
            // too, but there the input includes them.
            (LlmProtocol::Messages, input, _) => {
                input.unwrap_or(0).saturating_add(cache_read).saturating_add(cache_write)
            }
            (LlmProtocol::Chat | LlmProtocol::Responses, input, _) => input.unwrap_or(0),
        };
        let input = input.saturating_add(extra.input).min(MAX_REPORTED_TOKENS.0);
        let output = self.total_output().0;
        let cache_read = cache_read.saturating_add(extra.cache_read);
        let cache_write = cache_write.saturating_add(extra.cache_write);
        // No part may exceed its whole. The passes outside the counts are limited separately.
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
            audio_input: Tokens(media_input.audio.min(input)),
            audio_output: Tokens(media_output.audio.min(output)),
            image_input: Tokens(media_input.image.min(input)),
            video_input: Tokens(media_input.video.min(input)),
            image_output: Tokens(media_output.image.min(output)),
            video_output: Tokens(media_output.video.min(output)),
            source: UsageSource::Provider,
        })
    }

    /// Returns the output of [`Self::total_usage`].
    pub(super) fn total_output(&self) -> Tokens {
        if self.input.is_none() && self.output.is_none() {
            return Tokens::ZERO;
        }
        let extra = self.rare.as_ref().map_or(0, |rare| rare.extra.output);
        Tokens(self.output.unwrap_or(0).saturating_add(extra)).min(MAX_REPORTED_TOKENS)
    }

    /// Keeps the larger of each rare count. An answer without such counts allocates nothing.
    fn read_rare_counts(&mut self, reported: &ReportedUsage) {
        let ReportedUsage { media_input, media_output, extra, .. } = *reported;
        let has_media = [media_input, media_output] != [MediaUsage::default(); 2];
        if !has_media && extra.is_none() {
            return;
        }
        let rare = self.rare.get_or_insert_default();
        rare.media_input = rare.media_input.max_per_count(media_input);
        rare.media_output = rare.media_output.max_per_count(media_output);
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
    /// Reads a usual usage object at the start of `text`, and returns its length, too. Returns `None` for any other
    /// object and any other text.
    pub(super) fn read_usual(protocol: LlmProtocol, text: &[u8]) -> Option<(Self, usize)> {
        fast_path::read_usual_prefix(protocol, text)
    }

    /// Returns the whole output, given that `input` was read. OpenAI includes the reasoning in the
    /// output. The compatible APIs of Gemini and xAI leave the reasoning out of the output. They
    /// report it only in the total, or in a detail that exceeds the output.
    fn whole_output(&self, input: Option<u64>) -> Option<u64> {
        let written = self.output.unwrap_or(0);
        // A detail larger than the output cannot be a part of the output, so the two are added.
        let beside = self.reasoning.filter(|reasoning| *reasoning > written);
        let summed = beside.map(|reasoning| written.saturating_add(reasoning));
        let rest = self.total.map(|total| total.saturating_sub(input.unwrap_or(0)));
        // Embeddings report a total and no output, so a difference of zero is not an output.
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
        // Providers report the same cache writes under several names; the largest value counts.
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
        // Anthropic's cache is not part of its input, so it gives no lower bound for the input.
        let cached = cache_read.unwrap_or(0).saturating_add(cache_write.unwrap_or(0));
        let cached = if protocol == LlmProtocol::Messages { 0 } else { cached };
        let is_counted = input.is_some() || output.is_some();
        // In a Messages stream, LiteLLM's cost figure leaves the input out.
        let cost = counts.cost.filter(|_| protocol != LlmProtocol::Messages);
        Some(Self {
            input: at_least(input, input_details.sum().max(cached), is_counted),
            output: at_least(output, output_details.sum(), is_counted),
            // Anthropic reports no total.
            total: parse_count(counts.total_tokens).filter(|_| protocol != LlmProtocol::Messages),
            cache_read,
            cache_write,
            cache_write_1h: written_1h.max(detailed_1h),
            reasoning: parse_count(output_details.reasoning_tokens),
            media_input: input_details.media(),
            media_output: output_details.media(),
            extra: counts.iterations.and_then(unsummed_usage),
            cost: cost.and_then(|cost| Nanodollars::parse(cost.get())),
        })
    }
}

impl MediaUsage {
    fn max_per_count(self, other: Self) -> Self {
        Self {
            audio: self.audio.max(other.audio),
            image: self.image.max(other.image),
            video: self.video.max(other.video),
        }
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

/// Returns the sum of the passes outside the main counts. Passes of type `message` are inside the
/// main counts.
fn unsummed_usage(iterations: &RawValue) -> Option<UnsummedUsage> {
    let iterations: Vec<&RawValue> = serde_json::from_str(iterations.get()).ok()?;
    let mut extra = UnsummedUsage::default();
    for pass in
        iterations.iter().filter_map(|pass| parse_object::<RawUsagePass<'_>>(pass.get().as_bytes()))
    {
        // A pass without a type counts as a `message`, so no token is charged twice.
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
        // Anthropic's input of a pass excludes the cache; the gateway's input includes it.
        let whole = input.saturating_add(read).saturating_add(write);
        extra.input = extra.input.saturating_add(whole);
        extra.output = extra.output.saturating_add(output);
        extra.cache_read = extra.cache_read.saturating_add(read);
        extra.cache_write = extra.cache_write.saturating_add(write);
        extra.cache_write_1h = extra.cache_write_1h.saturating_add(hour);
    }
    Some(extra)
}

/// Returns the tokens written to a cache: the sum over both lifetimes, and those with a lifetime of
/// one hour.
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

/// Returns the sum of two counts, or the only count that exists.
fn add(one: Option<u64>, other: Option<u64>) -> Option<u64> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.saturating_add(other)),
        (one, other) => one.or(other),
    }
}

/// Returns the reported sum, or the sum of its parts if the reported sum is missing or zero. Parts
/// alone are no report: without any reported count, the call is charged as reserved.
fn at_least(sum: Option<u64>, parts: u64, is_counted: bool) -> Option<u64> {
    let is_missing = sum.unwrap_or(0) == 0 && parts > 0 && is_counted;
    if is_missing { Some(parts) } else { sum }
}

/// Parses a JSON object. Without the check of the first byte, serde would also accept an array, by
/// position.
pub(super) fn parse_object<'a, T: Deserialize<'a>>(json: &'a [u8]) -> Option<T> {
    json.trim_ascii_start().starts_with(b"{").then(|| serde_json::from_slice(json).ok())?
}

/// A usage object of any protocol. Each member is kept as text, so that an invalid member does not
/// invalidate the others.
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
    /// LiteLLM's own cost figure, in dollars.
    #[serde(borrow)]
    cost: Option<&'a RawValue>,
}

/// The cache writes, by the lifetime of the entries at Anthropic.
#[derive(Deserialize)]
struct RawCacheCreation<'a> {
    #[serde(borrow)]
    ephemeral_5m_input_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    ephemeral_1h_input_tokens: Option<&'a RawValue>,
}

/// One pass that Anthropic made for a call.
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
    /// LiteLLM's name for cache writes.
    #[serde(borrow)]
    cache_creation_tokens: Option<&'a RawValue>,
    #[serde(borrow)]
    cache_creation_token_details: Option<&'a RawValue>,
    /// `OpenRouter`'s name for cache writes.
    #[serde(borrow)]
    cache_write_tokens: Option<&'a RawValue>,
}

impl RawUsageDetails<'_> {
    /// Returns the sum of the disjoint parts. Cached tokens are a part of each of them and are not
    /// added.
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

    fn media(&self) -> MediaUsage {
        let count = |tokens| parse_count(tokens).unwrap_or(0);
        MediaUsage {
            audio: count(self.audio_tokens),
            image: count(self.image_tokens),
            video: count(self.video_tokens),
        }
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

/// The most input or output tokens of a report that count, a billion. Our choice: ten times what the largest body can
/// have, and little enough that sums of charges stay exact in each record and in the databases.
pub const MAX_REPORTED_TOKENS: Tokens = Tokens(1_000_000_000);

#[cfg(test)]
mod tests;
