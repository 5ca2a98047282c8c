//! The provider's behaviour as a small language, for the command line and for model names.
//!
//! ```text
//! script = [ option *( ( "," / ";" ) option ) ]
//! option = name "=" value
//! where  = "head" / "end" / number        ; this many content chunks have been sent
//! ```
//!
//! [`SCRIPT_OPTIONS`] lists the options. `%` begins a percent-escape (`%2c` is a comma), so that any text is possible.
//! `;` separates options like `,` does, for lists of models that use the comma themselves. A number greater than the
//! number of chunks means the end of the content, before the closing events. A unary answer has two positions: `head`
//! is before its head, and every other position is in the middle of its body.
//!
//! A script prints the options that differ from the default, and parses back to the same script:
//!
//! ```
//! # use cogni_gateway::fakes::model_provider::ProviderScript;
//! let script: ProviderScript = "chunks=100, interval=20ms, fault=reset@3".parse()?;
//! assert_eq!(script.to_string(), "chunks=100,interval=20ms,fault=reset@3");
//! # Ok::<(), cogni_gateway::fakes::model_provider::script::ScriptError>(())
//! ```

mod value;

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use value::InvalidValueError;
pub use value::{AnswerPosition, FaultKind, ScriptedFault, UsageReporting};

/// The provider's behaviour. The default answers with five words, one chunk for each, without delays.
#[expect(clippy::struct_excessive_bools, reason = "each is an option of its own")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProviderScript {
    pub(super) text: String,
    pub(super) chunks: Option<u32>,
    pub(super) size: Option<u64>,
    pub(super) interval: Duration,
    pub(super) first_byte: Duration,
    pub(super) coalesce: u32,
    pub(super) split: u64,
    pub(super) stamps: bool,
    pub(super) usage: UsageReporting,
    pub(super) input: u64,
    pub(super) output: Option<u64>,
    pub(super) cached: u64,
    pub(super) cache_write: u64,
    pub(super) reasoning: u64,
    pub(super) obey: bool,
    pub(super) status: u16,
    pub(super) retry_after: Option<u32>,
    pub(super) should_retry: Option<bool>,
    pub(super) tool: Option<String>,
    pub(super) arguments: String,
    pub(super) repeat: bool,
    pub(super) echo: bool,
    pub(super) done: bool,
    pub(super) gate: Option<AnswerPosition>,
    pub(super) fault: Option<ScriptedFault>,
}

/// An option of a script.
#[derive(Clone, Copy, Debug)]
pub struct ScriptOption {
    pub name: &'static str,
    /// The accepted values, as help and errors state them.
    pub takes: &'static str,
    pub meaning: &'static str,
}

/// The reasons why a script is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScriptError {
    #[error("`{0}` is not `name=value`; a script looks like `chunks=3,interval=20ms`")]
    NotAnOption(String),
    #[error("`{0}` is not a script option; the options are {names}", names = option_names())]
    UnknownOption(String),
    #[error("`{0}` is set twice; leave one out")]
    DuplicateOption(String),
    #[error("`{name}` is `{value}`; it takes {takes}{legend}", legend = value_legend(takes))]
    InvalidValue { name: &'static str, value: String, takes: &'static str },
    #[error("`{is}` tokens of {part} are more than all `{of}` of {whole}")]
    PartOverWhole { part: &'static str, is: u64, whole: &'static str, of: u64 },
}

impl ProviderScript {
    /// Returns a copy of this script with the options of `text`.
    pub fn with_overrides(&self, text: &str) -> Result<Self, ScriptError> {
        let mut script = self.clone();
        let mut given = Vec::new();
        for part in text.split([',', ';']).map(str::trim).filter(|part| !part.is_empty()) {
            let (name, value) =
                part.split_once('=').ok_or_else(|| ScriptError::NotAnOption(part.to_owned()))?;
            let option = SCRIPT_OPTIONS.iter().find(|option| option.name == name);
            let option = option.ok_or_else(|| ScriptError::UnknownOption(name.to_owned()))?;
            // A repeated option is an error, because its first value would be lost silently.
            if given.contains(&name) {
                return Err(ScriptError::DuplicateOption(name.to_owned()));
            }
            given.push(name);
            script.set_option(name, value).map_err(|InvalidValueError| {
                ScriptError::InvalidValue {
                    name: option.name,
                    value: value.to_owned(),
                    takes: option.takes,
                }
            })?;
        }
        // The token counts are checked at the end, because their order in the text is free.
        script.validated()
    }

    /// Sets one of [`SCRIPT_OPTIONS`].
    fn set_option(&mut self, name: &str, value: &str) -> Result<(), InvalidValueError> {
        match name {
            "text" => self.text = value::parse_text(value)?,
            "chunks" => self.chunks = value::none_or_value("auto", value, value::parse_number)?,
            "size" => self.size = value::none_or_value("auto", value, value::parse_bytes)?,
            "interval" => self.interval = value::parse_duration(value)?,
            "first_byte" => self.first_byte = value::parse_duration(value)?,
            "coalesce" => {
                self.coalesce = value::parse_number(value).and_then(value::require_positive)?;
            }
            "split" => self.split = value::parse_bytes(value).and_then(value::require_positive)?,
            "stamps" => self.stamps = value::parse_yes_no(value)?,
            "usage" => self.usage = UsageReporting::parse(value)?,
            "input" => self.input = value::parse_number(value)?,
            "output" => self.output = value::none_or_value("auto", value, value::parse_number)?,
            "cached" => self.cached = value::parse_number(value)?,
            "cache_write" => self.cache_write = value::parse_number(value)?,
            "reasoning" => self.reasoning = value::parse_number(value)?,
            "obey" => self.obey = value::parse_yes_no(value)?,
            "status" => self.status = value::parse_status(value)?,
            "retry_after" => {
                self.retry_after = value::none_or_value("none", value, value::parse_number)?;
            }
            "should_retry" => {
                self.should_retry = value::none_or_value("none", value, value::parse_yes_no)?;
            }
            "tool" => self.tool = value::none_or_value("none", value, value::parse_text)?,
            "arguments" => self.arguments = value::parse_json(value)?,
            "repeat" => self.repeat = value::parse_yes_no(value)?,
            "echo" => self.echo = value::parse_yes_no(value)?,
            "done" => self.done = value::parse_yes_no(value)?,
            "gate" => self.gate = value::none_or_value("none", value, AnswerPosition::parse)?,
            "fault" => self.fault = value::none_or_value("none", value, ScriptedFault::parse)?,
            _ => return Err(InvalidValueError),
        }
        Ok(())
    }

    /// Formats an option's value as it is written in a script.
    fn format_option(&self, name: &str) -> String {
        let yes = |on| if on { "yes" } else { "no" }.to_owned();
        let time = |time| humantime::format_duration(time).to_string();
        match name {
            "text" => value::escape(&self.text),
            "chunks" => value::format_or_word("auto", self.chunks),
            "size" => value::format_or_word("auto", self.size),
            "interval" => time(self.interval),
            "first_byte" => time(self.first_byte),
            "coalesce" => self.coalesce.to_string(),
            "split" => self.split.to_string(),
            "stamps" => yes(self.stamps),
            "usage" => self.usage.as_str().to_owned(),
            "input" => self.input.to_string(),
            "output" => value::format_or_word("auto", self.output),
            "cached" => self.cached.to_string(),
            "cache_write" => self.cache_write.to_string(),
            "reasoning" => self.reasoning.to_string(),
            "obey" => yes(self.obey),
            "status" => self.status.to_string(),
            "retry_after" => value::format_or_word("none", self.retry_after),
            "should_retry" => self.should_retry.map_or_else(|| "none".to_owned(), yes),
            "tool" => value::format_or_word("none", self.tool.as_deref().map(value::escape)),
            "arguments" => value::escape(&self.arguments),
            "repeat" => yes(self.repeat),
            "echo" => yes(self.echo),
            "done" => yes(self.done),
            "gate" => value::format_or_word("none", self.gate),
            "fault" => value::format_or_word("none", self.fault),
            _ => String::new(),
        }
    }

    /// Refuses token counts that no provider could report.
    fn validated(self) -> Result<Self, ScriptError> {
        let over = |part, is: u64, whole, of: u64| {
            if is > of { Err(ScriptError::PartOverWhole { part, is, whole, of }) } else { Ok(()) }
        };
        let cache = self.cached.saturating_add(self.cache_write);
        over("cached and cache_write", cache, "input", self.input)?;
        if let Some(output) = self.output {
            over("reasoning", self.reasoning, "output", output)?;
        }
        Ok(self)
    }
}

impl Default for ProviderScript {
    fn default() -> Self {
        Self {
            text: "hello from the fake provider".to_owned(),
            chunks: None,
            size: None,
            interval: Duration::ZERO,
            first_byte: Duration::ZERO,
            coalesce: 1,
            split: 65_536,
            stamps: false,
            usage: UsageReporting::Yes,
            input: 11,
            output: None,
            cached: 0,
            cache_write: 0,
            reasoning: 0,
            obey: false,
            status: 200,
            retry_after: None,
            should_retry: None,
            tool: None,
            arguments: r#"{"command":"echo hello from the tool"}"#.to_owned(),
            repeat: false,
            echo: false,
            done: true,
            gate: None,
            fault: None,
        }
    }
}

impl FromStr for ProviderScript {
    type Err = ScriptError;

    fn from_str(text: &str) -> Result<Self, ScriptError> {
        Self::default().with_overrides(text)
    }
}

impl fmt::Display for ProviderScript {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let default = Self::default();
        let changed = SCRIPT_OPTIONS
            .iter()
            .map(|option| (option.name, self.format_option(option.name)))
            .filter(|(name, value)| *value != default.format_option(name));
        for (i, (name, value)) in changed.enumerate() {
            write!(f, "{}{name}={value}", if i == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

/// Returns tables of the options and of the words for their values, for `--help`.
pub fn options_help() -> String {
    let options = SCRIPT_OPTIONS
        .map(|option| format!("  {:<13}{:<26}{}\n", option.name, option.takes, option.meaning));
    let words = VALUE_KINDS.map(|(word, meaning)| format!("  {word:<13}{meaning}\n"));
    format!("{}\n{}", options.concat(), words.concat())
}

/// Returns the meaning of the capital words in `takes`, for an error.
fn value_legend(takes: &str) -> String {
    let mut legend = String::new();
    for (word, meaning) in VALUE_KINDS {
        if takes.split([' ', '@', ',']).any(|part| part == word) {
            legend.extend(["; ", word, " is ", meaning]);
        }
    }
    legend
}

fn option_names() -> String {
    SCRIPT_OPTIONS.map(|option| option.name).join(", ")
}

const fn script_option(
    name: &'static str,
    takes: &'static str,
    meaning: &'static str,
) -> ScriptOption {
    ScriptOption { name, takes, meaning }
}

/// Every option, in the order in which a script prints them.
pub const SCRIPT_OPTIONS: [ScriptOption; 25] = [
    script_option("text", "TEXT", "what the model says, one word a chunk, and over again"),
    script_option("chunks", "N or auto", "content chunks in a stream (auto: one a word)"),
    script_option(
        "size",
        "BYTES or auto",
        "content of each chunk, filled with `x` (auto: the word)",
    ),
    script_option("interval", "TIME", "from chunk to chunk; a late one is made up for"),
    script_option("first_byte", "TIME", "silence before the response begins"),
    script_option("coalesce", "N, 1 at least", "events in one write (default 1)"),
    script_option("split", "BYTES, 1 at least", "largest write (default 64KiB)"),
    script_option("stamps", "yes or no", "begin each chunk with `t=` CLOCK_MONOTONIC nanoseconds"),
    script_option("usage", "yes, none, finish, every", "where tokens are reported"),
    script_option("input", "N", "input tokens, cached ones included"),
    script_option("output", "N or auto", "output tokens, reasoning included (auto: one a chunk)"),
    script_option("cached", "N", "input tokens read from a cache"),
    script_option("cache_write", "N", "input tokens written to a cache"),
    script_option("reasoning", "N", "output tokens spent on reasoning"),
    script_option("obey", "yes or no", "stop at the request's limit of output tokens"),
    script_option("status", "200 or 400 to 599", "answer with this status"),
    script_option("retry_after", "SECONDS or none", "`retry-after` of an error status"),
    script_option("should_retry", "yes, no or none", "`x-should-retry` of an error status"),
    script_option(
        "tool",
        "[SPACE/]NAME or none",
        "ask for a tool, unless its result is there already",
    ),
    script_option("arguments", "JSON", "what the tool is asked for, in `chunks` pieces"),
    script_option("repeat", "yes or no", "ask for the tool every time"),
    script_option("echo", "yes or no", "say what the conversation ends with, instead of `text`"),
    script_option("done", "yes or no", "send the last event: `[DONE]` or `message_stop`"),
    script_option("gate", "WHERE or none", "wait there until the gate is opened"),
    script_option("fault", "KIND@WHERE or none", "go wrong there"),
];

/// The words for values, with their meaning.
const VALUE_KINDS: [(&str, &str); 9] = [
    ("N", "a whole number"),
    ("BYTES", "a size of at most 1GiB, as in `200` or `64KiB`"),
    ("TIME", "a time of at most a day, as in `20ms`"),
    ("SECONDS", "a whole number"),
    ("NAME", "not empty; escapes as in TEXT"),
    ("TEXT", "not empty; `%2c` is a comma, `%3b` a semicolon, `%25` a percent sign"),
    ("JSON", "a JSON document; escapes as in TEXT"),
    ("KIND", "error, truncate, close, reset, garbage or stall"),
    ("WHERE", "head, end, or how many content chunks have been sent"),
];
