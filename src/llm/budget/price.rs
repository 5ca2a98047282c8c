//! Token prices: a table of prices by model, with a version that the maintainer of the table sets.
//!
//! The table only enforces budgets; the amount that is billed is LiteLLM's. The table's digest is
//! written to the audit log, so that an old charge can be recomputed.
//!
//! The built-in table is `config/prices.toml` in compiled form. Parsing the text would take half of
//! the time of a start.

mod built_in;

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};

use serde::{Deserialize, Serialize};

use super::cost::Nanodollars;
use super::usage::{TokenUsage, Tokens};
use crate::base::digest::sha256_hex;
use crate::base::regular_file::read_regular_file;

/// A table of prices by model.
#[derive(Debug)]
pub struct PriceTable {
    version: Cow<'static, str>,
    digest: Cow<'static, str>,
    models: PriceTableModels,
    unknown: UnknownPricePolicy,
    /// The result of the last look-up. Most calls of a run name one model.
    last: Mutex<Option<FoundPrice>>,
}

/// A model, and its price if the table has one.
#[derive(Debug)]
struct FoundPrice {
    model: Box<str>,
    price: Option<Arc<ModelPrice>>,
}

#[derive(Debug)]
enum PriceTableModels {
    /// The prices of [`built_in`], in its order. Each entry is filled at its first look-up.
    BuiltIn(Box<[OnceLock<Arc<ModelPrice>>]>),
    Read {
        models: BTreeMap<String, Arc<ModelPrice>>,
        /// Model families: names without their `*`, the longest first.
        families: Vec<(String, Arc<ModelPrice>)>,
    },
}

/// The source of the prices, and the treatment of a model without a price.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PriceConfig {
    /// The path of the price table. The built-in table is used if the path is absent.
    #[serde(skip_serializing)]
    pub file: Option<PathBuf>,
    pub unknown: UnknownPricePolicy,
}

/// The error for a price table that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PriceTableError {
    #[error("the price table `{}` cannot be read", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("the price table is not valid: {0}")]
    Invalid(#[from] toml::de::Error),
}

/// The error for a model without a price in a run that has a cost budget.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "model `{}` has no price, and this run has a cost budget; an operator can add the model to the price table or set `prices.unknown`",
    model.escape_debug()
)]
pub struct UnknownPriceError {
    model: Box<str>,
}

/// The price table as the file states it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawPriceTable {
    version: String,
    models: BTreeMap<String, Arc<ModelPrice>>,
}

/// The prices of a model's tokens, by kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "RawPrice")]
pub struct ModelPrice {
    base: TokenRates,
    /// The rates that apply instead if the input is longer than this number of tokens.
    long: Option<(Tokens, TokenRates)>,
}

/// The treatment of a model without a price, in a run that has a cost budget.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UnknownPricePolicy {
    /// The model cannot be used, because a budget that does not count the model's cost would limit
    /// nothing.
    #[default]
    Reject,
    /// The model costs nothing in this ledger. The token budgets still apply.
    TokensOnly,
    /// The model costs the price given here.
    #[serde(untagged)]
    Price(Arc<ModelPrice>),
}

/// The rates in nanodollars per million tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
struct TokenRates {
    input: u64,
    output: u64,
    cache_read: u64,
    cache_write: u64,
    cache_write_1h: u64,
    reasoning: u64,
    audio_input: u64,
    audio_output: u64,
    image_input: u64,
    video_input: u64,
    image_output: u64,
    video_output: u64,
}

/// A price as the file states it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawPrice {
    input: Nanodollars,
    #[serde(default)]
    output: Nanodollars,
    cache_read: Option<Nanodollars>,
    cache_write: Option<Nanodollars>,
    cache_write_1h: Option<Nanodollars>,
    reasoning: Option<Nanodollars>,
    audio_input: Option<Nanodollars>,
    audio_output: Option<Nanodollars>,
    image_input: Option<Nanodollars>,
    video_input: Option<Nanodollars>,
    image_output: Option<Nanodollars>,
    video_output: Option<Nanodollars>,
    /// The threshold of the long rates. Only allowed within `long`.
    above_input_tokens: Option<Tokens>,
    long: Option<Box<Self>>,
}

impl PriceTable {
    /// Loads the table that the configuration names.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read or is not a valid price table.
    pub fn load_table(config: &PriceConfig) -> Result<Self, PriceTableError> {
        let Some(path) = &config.file else {
            return Ok(Self::built_in_table(config.unknown.clone()));
        };
        let text = read_regular_file(path, MAX_FILE_BYTES)
            .map_err(|source| PriceTableError::File { path: path.clone(), source })?;
        Self::parse_table(&text, config.unknown.clone())
    }

    /// Returns the built-in table, compiled from `config/prices.toml`.
    fn built_in_table(unknown: UnknownPricePolicy) -> Self {
        let models = PriceTableModels::BuiltIn(
            built_in::MODEL_PRICES.iter().map(|_| OnceLock::new()).collect(),
        );
        Self {
            version: Cow::Borrowed(built_in::PRICE_TABLE_VERSION),
            digest: Cow::Borrowed(built_in::PRICE_TABLE_DIGEST),
            models,
            unknown,
            last: Mutex::default(),
        }
    }

    /// Parses a table.
    ///
    /// # Errors
    /// Returns [`PriceTableError::Invalid`] with the line of the mistake if the text is not a valid
    /// price table.
    pub fn parse_table(text: &str, unknown: UnknownPricePolicy) -> Result<Self, PriceTableError> {
        let RawPriceTable { version, models } = toml::from_str(text)?;
        let family = |(name, price): (&String, &Arc<ModelPrice>)| {
            Some((name.strip_suffix('*')?.to_owned(), Arc::clone(price)))
        };
        let mut families: Vec<_> = models.iter().filter_map(family).collect();
        // The longest prefix comes first, so that the most specific family matches.
        families.sort_by_key(|(prefix, _)| Reverse(prefix.len()));
        let digest = sha256_hex(text.as_bytes()).into();
        Ok(Self {
            version: version.into(),
            digest,
            models: PriceTableModels::Read { models, families },
            unknown,
            last: Mutex::default(),
        })
    }

    /// Returns the price of a model, by the upstream's name of the model. Returns `None` if no
    /// price is known and none is required.
    ///
    /// # Errors
    /// Returns [`UnknownPriceError`] if no price is known, the run `counts_cost`, and the policy is
    /// [`UnknownPricePolicy::Reject`].
    pub fn price_for(
        &self,
        model: &str,
        counts_cost: impl FnOnce() -> bool,
    ) -> Result<Option<Arc<ModelPrice>>, UnknownPriceError> {
        match (self.find_price(model), &self.unknown) {
            (Some(price), _) => Ok(Some(price)),
            (None, UnknownPricePolicy::Price(price)) => Ok(Some(Arc::clone(price))),
            // Without a cost budget the price is only informative, so a missing one refuses
            // nothing.
            (None, UnknownPricePolicy::Reject) if counts_cost() => {
                Err(UnknownPriceError { model: model.into() })
            }
            (None, UnknownPricePolicy::Reject | UnknownPricePolicy::TokensOnly) => Ok(None),
        }
    }

    /// Returns true if a run with a cost budget can make no call whose cost is not counted.
    pub fn prices_every_model(&self) -> bool {
        self.unknown != UnknownPricePolicy::TokensOnly
    }

    /// Returns the price in the table. If the name is not in the table, the function tries the name
    /// without the provider's prefix (`openai/gpt-5`).
    pub fn find_price(&self, model: &str) -> Option<Arc<ModelPrice>> {
        let look_up = || {
            self.find_exact_price(model).or_else(|| self.find_exact_price(model.split_once('/')?.1))
        };
        // The workers of a run share the table. A worker does not wait for another one's look-up.
        let Ok(mut last) = self.last.try_lock() else { return look_up() };
        match &*last {
            Some(found) if *found.model == *model => found.price.clone(),
            _ => {
                let price = look_up();
                *last = Some(FoundPrice { model: model.into(), price: price.clone() });
                price
            }
        }
    }

    /// Returns the version that the file states.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Returns the SHA-256 of the file, in hexadecimal.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// Returns the price of a name without any change to the name, from an entry or from a family.
    fn find_exact_price(&self, model: &str) -> Option<Arc<ModelPrice>> {
        match &self.models {
            PriceTableModels::BuiltIn(prices) => {
                let place = built_in::MODEL_NAMES.binary_search(&model).ok()?;
                Some(Arc::clone(prices[place].get_or_init(|| built_in::MODEL_PRICES[place].into())))
            }
            PriceTableModels::Read { models, families } => {
                let in_family = |(prefix, _): &&(String, _)| model.starts_with(prefix.as_str());
                let family = || families.iter().find(in_family).map(|(_, price)| price);
                models.get(model).or_else(family).cloned()
            }
        }
    }
}

impl ModelPrice {
    /// Returns the cost of a call with this usage, rounded up to the next billionth.
    ///
    /// A long input raises the rates of the whole call, not only of the part beyond the threshold.
    /// Anthropic and Google charge this way.
    pub fn call_cost(&self, usage: &TokenUsage) -> Nanodollars {
        // The usage is split into disjoint parts, each with one rate: text, sound, pictures and video that were read
        // fresh, and the cache; the same four that were written, and reasoning.
        let rates = self.rates_for(usage.input);
        // Media from the cache are charged as cached input, so media are limited to the fresh part.
        let mut text = usage.input.saturating_sub(usage.cache_read + usage.cache_write);
        let read = [usage.video_input, usage.audio_input, usage.image_input];
        let [video_input, audio_input, image_input] = read.map(|part| split_off(&mut text, part));
        let mut written = usage.output.saturating_sub(usage.reasoning);
        let made = [usage.video_output, usage.audio_output, usage.image_output];
        let [video_output, audio_output, image_output] =
            made.map(|part| split_off(&mut written, part));
        total_cost(&[
            (text, rates.input),
            (audio_input, rates.audio_input),
            (image_input, rates.image_input),
            (video_input, rates.video_input),
            (usage.cache_read, rates.cache_read),
            (usage.cache_write.saturating_sub(usage.cache_write_1h), rates.cache_write),
            (usage.cache_write_1h, rates.cache_write_1h),
            (written, rates.output),
            (audio_output, rates.audio_output),
            (image_output, rates.image_output),
            (video_output, rates.video_output),
            (usage.reasoning, rates.reasoning),
        ])
    }

    /// Returns the maximum cost of a call of this size, whatever part of it is cached or reasoning.
    pub fn max_cost(&self, input: Tokens, output: Tokens) -> Nanodollars {
        let rates = self.rates_for(input);
        total_cost(&[(input, rates.max_input_rate()), (output, rates.max_output_rate())])
    }

    /// Returns the maximum output that `money` pays for, beside this input.
    pub fn affordable_output(&self, money: Nanodollars, input: Tokens) -> Tokens {
        let rates = self.rates_for(input);
        // The input's maximum cost is set aside first. A rate of zero allows unlimited output.
        let left = money.saturating_sub(self.max_cost(input, Tokens::ZERO));
        let tokens = (u128::from(left.0) * u128::from(TOKENS_PER_PRICE_UNIT))
            .checked_div(rates.max_output_rate().into());
        Tokens(tokens.map_or(u64::MAX, |tokens| u64::try_from(tokens).unwrap_or(u64::MAX)))
    }

    fn rates_for(&self, input: Tokens) -> &TokenRates {
        match &self.long {
            Some((threshold, rates)) if input > *threshold => rates,
            _ => &self.base,
        }
    }
}

impl TokenRates {
    /// Creates rates from a list in the order of the fields.
    const fn from_list(rates: [u64; 12]) -> Self {
        let [input, output, cache_read, cache_write, cache_write_1h, reasoning, ..] = rates;
        let [.., audio_input, audio_output, image_input, video_input, image_output, video_output] =
            rates;
        Self {
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
        }
    }

    fn max_input_rate(&self) -> u64 {
        let cached = self.cache_read.max(self.cache_write).max(self.cache_write_1h);
        let media = self.audio_input.max(self.image_input).max(self.video_input);
        self.input.max(cached).max(media)
    }

    fn max_output_rate(&self) -> u64 {
        let media = self.audio_output.max(self.image_output).max(self.video_output);
        self.output.max(self.reasoning).max(media)
    }
}

impl TryFrom<RawPrice> for ModelPrice {
    type Error = &'static str;

    fn try_from(written: RawPrice) -> Result<Self, &'static str> {
        let base = TokenRates::from(&written);
        if written.above_input_tokens.is_some() {
            return Err("`above_input_tokens` belongs into `long`");
        }
        let Some(long) = written.long else { return Ok(Self { base, long: None }) };
        match (long.above_input_tokens, &long.long) {
            (Some(threshold), None) => Ok(Self { base, long: Some((threshold, (&*long).into())) }),
            _ => Err("`long` needs `above_input_tokens`, and cannot contain another `long`"),
        }
    }
}

impl From<&RawPrice> for TokenRates {
    fn from(written: &RawPrice) -> Self {
        let RawPrice { input, output, .. } = *written;
        // A missing rate falls back to the rate of the whole that the part belongs to. No such rule is known for
        // pictures and video, so they cost the most that their side has.
        let cache_write = written.cache_write.unwrap_or(input);
        let reasoning = written.reasoning.unwrap_or(output);
        let audio_input = written.audio_input.unwrap_or(input);
        let audio_output = written.audio_output.unwrap_or(output);
        let (max_input, max_output) =
            (input.max(audio_input), output.max(audio_output).max(reasoning));
        Self {
            input: input.0,
            output: output.0,
            cache_read: written.cache_read.unwrap_or(input).0,
            cache_write: cache_write.0,
            cache_write_1h: written.cache_write_1h.unwrap_or(cache_write).0,
            reasoning: reasoning.0,
            audio_input: audio_input.0,
            audio_output: audio_output.0,
            image_input: written.image_input.unwrap_or(max_input).0,
            video_input: written.video_input.unwrap_or(max_input).0,
            image_output: written.image_output.unwrap_or(max_output).0,
            video_output: written.video_output.unwrap_or(max_output).0,
        }
    }
}

/// Takes at most `part` from `whole`, and returns the tokens that were taken.
fn split_off(whole: &mut Tokens, part: Tokens) -> Tokens {
    let part = part.min(*whole);
    *whole = whole.saturating_sub(part);
    part
}

/// Returns the sum of tokens times rate. Only the sum is rounded up, so a call is never undercharged.
fn total_cost(parts: &[(Tokens, u64)]) -> Nanodollars {
    let parts = parts.iter().map(|(tokens, rate)| u128::from(tokens.0) * u128::from(*rate));
    let total: u128 = parts.fold(0, u128::saturating_add);
    // Nearly every sum fits into 64 bits, and a division of 128 bits takes far longer.
    let Ok(small) = u64::try_from(total) else {
        let cost = total.div_ceil(TOKENS_PER_PRICE_UNIT.into());
        return Nanodollars(u64::try_from(cost).unwrap_or(u64::MAX));
    };
    Nanodollars(small.div_ceil(TOKENS_PER_PRICE_UNIT))
}

/// The number of tokens for which prices are quoted.
const TOKENS_PER_PRICE_UNIT: u64 = 1_000_000;

/// The largest price file. Our choice: ten times LiteLLM's table of all models.
const MAX_FILE_BYTES: u64 = 64 * 1024 * 1024;

#[cfg(test)]
mod tests {
    use std::fmt::Write;
    use std::fs;

    use super::*;

    /// The table remembers the last look-up, also one without a result. No other name gets its price.
    #[test]
    fn a_price_is_that_of_its_model_in_any_order() {
        let text = "version = \"1\"\n[models.\"a-*\"]\ninput = 1\noutput = 2\n[models.b]\ninput = 3\noutput = 4\n";
        let table = PriceTable::parse_table(text, UnknownPricePolicy::Reject).unwrap();
        let names = ["b", "b", "x/b", "none", "none", "a-1", "a-2", "b", "", "none"];
        for name in names {
            let price = table.find_price(name).map(|price| price.base.input);
            let fresh = PriceTable::parse_table(text, UnknownPricePolicy::Reject).unwrap();
            assert_eq!(price, fresh.find_price(name).map(|price| price.base.input), "{name}");
        }
    }

    /// G9: the built-in table equals the file, in the order that the look-up needs.
    #[test]
    fn the_table_that_is_built_in_is_the_files() {
        let text = include_str!("../../../config/prices.toml");
        let source = built_in_source(text);
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/llm/budget/price/built_in.rs");
        if std::env::var_os("UPDATE_PRICES").is_some() {
            fs::write(path, &source).unwrap();
        }
        assert!(
            source == fs::read_to_string(path).unwrap(),
            "`config/prices.toml` has changed: run `UPDATE_PRICES=1 cargo nextest run --lib -E 'test(built_in)'`"
        );

        let read = PriceTable::parse_table(text, UnknownPricePolicy::Reject).unwrap();
        let built_in = PriceTable::built_in_table(UnknownPricePolicy::Reject);
        assert_eq!((built_in.version(), built_in.digest()), (read.version(), read.digest()));
        for name in built_in::MODEL_NAMES {
            assert_eq!(built_in.find_price(name), read.find_price(name), "{name}");
            assert_eq!(built_in.find_price(&format!("{name}~")), None);
        }
    }

    /// Returns the source text of `built_in.rs` for a price file.
    fn built_in_source(text: &str) -> String {
        let RawPriceTable { version, models } = toml::from_str(text).unwrap();
        assert!(!models.keys().any(|name| name.ends_with('*')), "no family can be built in yet");
        let digest = sha256_hex(text.as_bytes());
        let mut source = format!(
            "//! The prices of `config/prices.toml`. A test of [`super`] writes this file.\n\n\
             use super::{{ModelPrice, TokenRates, Tokens}};\n\n\
             pub(super) const PRICE_TABLE_VERSION: &str = \"{version}\";\n\n\
             pub(super) const PRICE_TABLE_DIGEST: &str =\n    \"{digest}\";\n\n\
             /// The models' names, in the order of their bytes.\n#[rustfmt::skip]\n\
             pub(super) static MODEL_NAMES: &[&str] = &[\n"
        );
        for name in models.keys() {
            writeln!(source, "    {name:?},").unwrap();
        }
        source += "];\n\n/// The models' prices, in the order of the names.\n#[rustfmt::skip]\npub(super) static MODEL_PRICES: &[ModelPrice] = &[\n";
        for price in models.values() {
            let long = price.long.as_ref().map_or("None".to_owned(), |(threshold, rates)| {
                format!("Some((Tokens({}), {}))", grouped(threshold.0), list_source(rates))
            });
            writeln!(
                source,
                "    ModelPrice {{ base: {}, long: {long} }},",
                list_source(&price.base)
            )
            .unwrap();
        }
        source + "];\n"
    }

    fn list_source(rates: &TokenRates) -> String {
        let TokenRates { input, output, cache_read, cache_write, cache_write_1h, .. } = *rates;
        let TokenRates { reasoning, audio_input, audio_output, image_input, .. } = *rates;
        let TokenRates { video_input, image_output, video_output, .. } = *rates;
        let text = [input, output, cache_read, cache_write, cache_write_1h, reasoning];
        let media =
            [audio_input, audio_output, image_input, video_input, image_output, video_output];
        let rates = [text, media].concat().into_iter().map(grouped).collect::<Vec<_>>();
        format!("TokenRates::from_list([{}])", rates.join(", "))
    }

    /// A number in groups of three digits.
    fn grouped(number: u64) -> String {
        let digits = number.to_string();
        let groups: Vec<_> =
            digits.as_bytes().rchunks(3).rev().map(String::from_utf8_lossy).collect();
        groups.join("_")
    }
}
