//! What tokens cost: a table of prices by model, versioned by whoever keeps it.
//!
//! The table only enforces budgets; what is billed is LiteLLM's to say. Its digest stands in the
//! audit, so that an old charge can be computed again.
//!
//! The table that is built in is `config/prices.toml` as the compiler likes it: to read the text would be half of what a
//! start costs.

mod built_in;

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::{fs, io};

use serde::{Deserialize, Serialize};

use super::cost::Nanodollars;
use super::usage::{Tokens, Usage};
use crate::base::hex;

/// Prices by model.
#[derive(Debug)]
pub struct Prices {
    version: Cow<'static, str>,
    digest: Cow<'static, str>,
    models: Models,
    unknown: Unknown,
}

#[derive(Debug)]
enum Models {
    /// Those of [`built_in`], in its order, each from when it was first looked up.
    BuiltIn(Box<[OnceLock<Arc<Price>>]>),
    Read {
        models: BTreeMap<String, Arc<Price>>,
        /// Names without their `*`, the longest first.
        families: Vec<(String, Arc<Price>)>,
    },
}

/// Where the prices are, and what to do about a model that has none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The table; without one, the one that is built in.
    #[serde(skip_serializing)]
    pub file: Option<PathBuf>,
    pub unknown: Unknown,
}

/// A table that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the price table `{}` cannot be read", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("the price table is not valid: {0}")]
    Invalid(#[from] toml::de::Error),
}

/// A model without a price, in a run that counts money.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "model `{}` has no price, and this run has a cost budget; an operator adds it to the price table or sets `prices.unknown`",
    model.escape_debug()
)]
pub struct Missing {
    model: Box<str>,
}

/// The table as the file has it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    version: String,
    models: BTreeMap<String, Arc<Price>>,
}

/// Dollars for a million tokens of each kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Written")]
pub struct Price {
    base: Rates,
    /// What a call costs instead once its input is longer than so many tokens.
    long: Option<(Tokens, Rates)>,
}

/// What a model without a price means for a run that has a cost budget.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unknown {
    /// It cannot be used: a budget that does not count is none.
    #[default]
    Reject,
    /// It costs nothing here; the token budgets still hold.
    TokensOnly,
    /// It costs what the price given with this says.
    #[serde(untagged)]
    Price(Arc<Price>),
}

/// Nanodollars for a million tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
struct Rates {
    input: u64,
    output: u64,
    cache_read: u64,
    cache_write: u64,
    cache_write_1h: u64,
    reasoning: u64,
    audio_input: u64,
    audio_output: u64,
}

/// A price as the file has it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    input: Nanodollars,
    #[serde(default)]
    output: Nanodollars,
    cache_read: Option<Nanodollars>,
    cache_write: Option<Nanodollars>,
    cache_write_1h: Option<Nanodollars>,
    reasoning: Option<Nanodollars>,
    audio_input: Option<Nanodollars>,
    audio_output: Option<Nanodollars>,
    /// Only within `long`.
    above_input_tokens: Option<Tokens>,
    long: Option<Box<Self>>,
}

impl Prices {
    /// The table that the configuration names.
    ///
    /// # Errors
    /// The file cannot be read, or is no table of prices.
    pub fn load(config: &Config) -> Result<Self, Error> {
        let Some(path) = &config.file else {
            return Ok(Self::built_in(config.unknown.clone()));
        };
        let text = fs::read_to_string(path)
            .map_err(|source| Error::File { path: path.clone(), source })?;
        Self::read(&text, config.unknown.clone())
    }

    /// The table that is built in: `config/prices.toml`.
    fn built_in(unknown: Unknown) -> Self {
        let models = Models::BuiltIn(built_in::PRICES.iter().map(|_| OnceLock::new()).collect());
        Self {
            version: Cow::Borrowed(built_in::VERSION),
            digest: Cow::Borrowed(built_in::DIGEST),
            models,
            unknown,
        }
    }

    /// Reads a table.
    ///
    /// # Errors
    /// What is wrong with it, and on which line.
    pub fn read(text: &str, unknown: Unknown) -> Result<Self, Error> {
        let File { version, models } = toml::from_str(text)?;
        let family = |(name, price): (&String, &Arc<Price>)| {
            Some((name.strip_suffix('*')?.to_owned(), Arc::clone(price)))
        };
        let mut families: Vec<_> = models.iter().filter_map(family).collect();
        families.sort_by_key(|(prefix, _)| Reverse(prefix.len()));
        let digest = hex::sha256(text.as_bytes()).into();
        Ok(Self {
            version: version.into(),
            digest,
            models: Models::Read { models, families },
            unknown,
        })
    }

    /// What a model's tokens cost, by the upstream's name of the model; `None` where nobody knows
    /// and nobody has to.
    ///
    /// # Errors
    /// Nobody knows, and the run `counts_cost`.
    pub fn price(&self, model: &str, counts_cost: bool) -> Result<Option<Arc<Price>>, Missing> {
        match (self.find(model), &self.unknown) {
            (Some(price), _) => Ok(Some(price)),
            (None, Unknown::Price(price)) => Ok(Some(Arc::clone(price))),
            (None, Unknown::Reject) if counts_cost => Err(Missing { model: model.into() }),
            (None, Unknown::Reject | Unknown::TokensOnly) => Ok(None),
        }
    }

    /// Whether a run that counts money has no call whose cost is not counted.
    pub fn counts_every_model(&self) -> bool {
        self.unknown != Unknown::TokensOnly
    }

    /// The price in the table. A name that is not there is looked up once more without its
    /// provider's prefix (`openai/gpt-5`).
    pub fn find(&self, model: &str) -> Option<Arc<Price>> {
        self.find_exactly(model).or_else(|| self.find_exactly(model.split_once('/')?.1))
    }

    /// What the file calls this state of the table.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// SHA-256 of the file, in hexadecimal.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    fn find_exactly(&self, model: &str) -> Option<Arc<Price>> {
        match &self.models {
            Models::BuiltIn(prices) => {
                let place = built_in::NAMES.binary_search(&model).ok()?;
                Some(Arc::clone(prices[place].get_or_init(|| built_in::PRICES[place].into())))
            }
            Models::Read { models, families } => {
                let in_family = |(prefix, _): &&(String, _)| model.starts_with(prefix.as_str());
                let family = || families.iter().find(in_family).map(|(_, price)| price);
                models.get(model).or_else(family).cloned()
            }
        }
    }
}

impl Price {
    /// What a call costs that used so much, rounded up to the next billionth.
    ///
    /// A long input makes the whole call dearer, not only what is beyond the threshold: that is how
    /// Anthropic and Google bill it.
    pub fn cost(&self, usage: &Usage) -> Nanodollars {
        let rates = self.rates(usage.input);
        let fresh = usage.input.saturating_sub(usage.cache_read + usage.cache_write);
        // Sound that came from the cache is billed as such.
        let heard = usage.audio_input.min(fresh);
        let fresh = fresh.saturating_sub(heard);
        let write = usage.cache_write.saturating_sub(usage.cache_write_1h);
        let written = usage.output.saturating_sub(usage.reasoning);
        let spoken = usage.audio_output.min(written);
        let written = written.saturating_sub(spoken);
        sum(&[
            (fresh, rates.input),
            (usage.cache_read, rates.cache_read),
            (write, rates.cache_write),
            (usage.cache_write_1h, rates.cache_write_1h),
            (written, rates.output),
            (spoken, rates.audio_output),
            (heard, rates.audio_input),
            (usage.reasoning, rates.reasoning),
        ])
    }

    /// The most that a call of this size can cost, whatever part of it is cached or reasoning.
    pub fn most(&self, input: Tokens, output: Tokens) -> Nanodollars {
        let rates = self.rates(input);
        sum(&[(input, rates.dearest_input()), (output, rates.dearest_output())])
    }

    /// The most output that `money` pays for beside so much input.
    pub fn affordable(&self, money: Nanodollars, input: Tokens) -> Tokens {
        let rates = self.rates(input);
        let left = money.saturating_sub(self.most(input, Tokens::ZERO));
        let tokens = (u128::from(left.0) * MILLION).checked_div(rates.dearest_output().into());
        Tokens(tokens.map_or(u64::MAX, |tokens| u64::try_from(tokens).unwrap_or(u64::MAX)))
    }

    fn rates(&self, input: Tokens) -> &Rates {
        match &self.long {
            Some((threshold, rates)) if input > *threshold => rates,
            _ => &self.base,
        }
    }
}

impl Rates {
    /// In the order of the fields.
    const fn listed(rates: [u64; 8]) -> Self {
        let [input, output, cache_read, cache_write, cache_write_1h, ..] = rates;
        let [.., reasoning, audio_input, audio_output] = rates;
        Self {
            input,
            output,
            cache_read,
            cache_write,
            cache_write_1h,
            reasoning,
            audio_input,
            audio_output,
        }
    }

    fn dearest_input(&self) -> u64 {
        let cached = self.cache_read.max(self.cache_write).max(self.cache_write_1h);
        self.input.max(cached).max(self.audio_input)
    }

    fn dearest_output(&self) -> u64 {
        self.output.max(self.reasoning).max(self.audio_output)
    }
}

impl TryFrom<Written> for Price {
    type Error = &'static str;

    fn try_from(written: Written) -> Result<Self, &'static str> {
        let base = Rates::from(&written);
        if written.above_input_tokens.is_some() {
            return Err("`above_input_tokens` belongs into `long`");
        }
        let Some(long) = written.long else { return Ok(Self { base, long: None }) };
        match (long.above_input_tokens, &long.long) {
            (Some(threshold), None) => Ok(Self { base, long: Some((threshold, (&*long).into())) }),
            _ => Err("`long` has to say `above_input_tokens`, and cannot hold another `long`"),
        }
    }
}

impl From<&Written> for Rates {
    fn from(written: &Written) -> Self {
        let Written { input, output, .. } = *written;
        let cache_write = written.cache_write.unwrap_or(input);
        Self {
            input: input.0,
            output: output.0,
            cache_read: written.cache_read.unwrap_or(input).0,
            cache_write: cache_write.0,
            cache_write_1h: written.cache_write_1h.unwrap_or(cache_write).0,
            reasoning: written.reasoning.unwrap_or(output).0,
            audio_input: written.audio_input.unwrap_or(input).0,
            audio_output: written.audio_output.unwrap_or(output).0,
        }
    }
}

fn sum(parts: &[(Tokens, u64)]) -> Nanodollars {
    let parts = parts.iter().map(|(tokens, rate)| u128::from(tokens.0) * u128::from(*rate));
    let total: u128 = parts.fold(0, u128::saturating_add);
    Nanodollars(u64::try_from(total.div_ceil(MILLION)).unwrap_or(u64::MAX))
}

/// Prices are quoted for a million tokens.
const MILLION: u128 = 1_000_000;

#[cfg(test)]
mod tests {
    use std::fmt::Write;

    use super::*;

    /// G9: what is built in is what the file says, in the order in which it is looked up.
    #[test]
    fn the_table_that_is_built_in_is_the_files() {
        let text = include_str!("../../config/prices.toml");
        let source = source(text);
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/budget/price/built_in.rs");
        if std::env::var_os("UPDATE_PRICES").is_some() {
            fs::write(path, &source).unwrap();
        }
        assert!(
            source == fs::read_to_string(path).unwrap(),
            "`config/prices.toml` has changed: run `UPDATE_PRICES=1 cargo nextest run --lib -E 'test(built_in)'`"
        );

        let read = Prices::read(text, Unknown::Reject).unwrap();
        let built_in = Prices::built_in(Unknown::Reject);
        assert_eq!((built_in.version(), built_in.digest()), (read.version(), read.digest()));
        for name in built_in::NAMES {
            assert_eq!(built_in.find(name), read.find(name), "{name}");
            assert_eq!(built_in.find(&format!("{name}~")), None);
        }
    }

    /// The table as the compiler likes it.
    fn source(text: &str) -> String {
        let File { version, models } = toml::from_str(text).unwrap();
        assert!(!models.keys().any(|name| name.ends_with('*')), "no family can be built in yet");
        let digest = hex::sha256(text.as_bytes());
        let mut source = format!(
            "//! The prices of `config/prices.toml`. A test of [`super`] writes this file.\n\n\
             use super::{{Price, Rates, Tokens}};\n\n\
             pub(super) const VERSION: &str = \"{version}\";\n\n\
             pub(super) const DIGEST: &str = \"{digest}\";\n\n\
             /// In the order of their bytes.\n#[rustfmt::skip]\n\
             pub(super) static NAMES: &[&str] = &[\n"
        );
        for name in models.keys() {
            writeln!(source, "    {name:?},").unwrap();
        }
        source += "];\n\n/// In the order of the names.\n#[rustfmt::skip]\npub(super) static PRICES: &[Price] = &[\n";
        for price in models.values() {
            let long = price.long.as_ref().map_or("None".to_owned(), |(threshold, rates)| {
                format!("Some((Tokens({}), {}))", grouped(threshold.0), listed(rates))
            });
            writeln!(source, "    Price {{ base: {}, long: {long} }},", listed(&price.base))
                .unwrap();
        }
        source + "];\n"
    }

    fn listed(rates: &Rates) -> String {
        let Rates { input, output, cache_read, cache_write, cache_write_1h, .. } = *rates;
        let Rates { reasoning, audio_input, audio_output, .. } = *rates;
        let [input, output] = [input, output].map(grouped);
        let caches = [cache_read, cache_write, cache_write_1h].map(grouped).join(", ");
        let others = [reasoning, audio_input, audio_output].map(grouped).join(", ");
        format!("Rates::listed([{input}, {output}, {caches}, {others}])")
    }

    /// A number in groups of three digits.
    fn grouped(number: u64) -> String {
        let digits = number.to_string();
        let groups: Vec<_> =
            digits.as_bytes().rchunks(3).rev().map(String::from_utf8_lossy).collect();
        groups.join("_")
    }
}
