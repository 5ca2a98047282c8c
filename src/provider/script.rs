//! What the provider will do: a small language, spoken on the command line and in model names.
//!
//! ```text
//! script = [ knob *( ( "," / ";" ) knob ) ]
//! knob   = name "=" value
//! where  = "head" / "end" / number        ; so many content chunks have been sent
//! ```
//!
//! [`KNOBS`] lists the knobs. `%` begins a percent-escape (`%2c` is a comma), so that any text fits;
//! `;` separates as well as `,` does, for lists of models that use the comma themselves. A number past
//! the last chunk means after the last one, before what ends the stream. A unary answer has three
//! places: `head` is before its head, everything else is half-way through its body.
//!
//! A script prints as what it changes, and reads back as itself:
//!
//! ```
//! # use cogni_gateway::provider::Script;
//! let script: Script = "chunks=100, interval=20ms, fault=reset@3".parse()?;
//! assert_eq!(script.to_string(), "chunks=100,interval=20ms,fault=reset@3");
//! # Ok::<(), cogni_gateway::provider::script::Error>(())
//! ```

mod value;

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use value::Unfit;
pub use value::{Fault, Position, Report, Trouble};

/// How the provider answers. The default says five words, one chunk each, as fast as it can.
#[expect(clippy::struct_excessive_bools, reason = "each is a knob of its own")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Script {
    pub(super) text: String,
    pub(super) chunks: Option<u32>,
    pub(super) size: Option<u64>,
    pub(super) interval: Duration,
    pub(super) first_byte: Duration,
    pub(super) coalesce: u32,
    pub(super) split: u64,
    pub(super) stamps: bool,
    pub(super) usage: Report,
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
    pub(super) gate: Option<Position>,
    pub(super) fault: Option<Fault>,
}

/// One thing a script can set.
#[derive(Clone, Copy, Debug)]
pub struct Knob {
    pub name: &'static str,
    /// What it takes, as help and errors put it.
    pub takes: &'static str,
    pub meaning: &'static str,
}

/// What is wrong with a script.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("`{0}` is not `name=value`; a script looks like `chunks=3,interval=20ms`")]
    NotAKnob(String),
    #[error("`{0}` is not a knob; there are {names}", names = names())]
    Unknown(String),
    #[error("`{0}` is set twice; leave one out")]
    Twice(String),
    #[error("`{name}` is `{value}`; it takes {takes}{legend}", legend = legend(takes))]
    Value { name: &'static str, value: String, takes: &'static str },
    #[error("`{is}` tokens of {part} are more than all `{of}` of {whole}")]
    PartOverWhole { part: &'static str, is: u64, whole: &'static str, of: u64 },
}

impl Script {
    /// This script with the knobs of `text` turned.
    pub fn overlay(&self, text: &str) -> Result<Self, Error> {
        let mut script = self.clone();
        let mut turned = Vec::new();
        for part in text.split([',', ';']).map(str::trim).filter(|part| !part.is_empty()) {
            let (name, value) =
                part.split_once('=').ok_or_else(|| Error::NotAKnob(part.to_owned()))?;
            let knob = KNOBS.iter().find(|knob| knob.name == name);
            let knob = knob.ok_or_else(|| Error::Unknown(name.to_owned()))?;
            if turned.contains(&name) {
                return Err(Error::Twice(name.to_owned()));
            }
            turned.push(name);
            script.turn(name, value).map_err(|Unfit| Error::Value {
                name: knob.name,
                value: value.to_owned(),
                takes: knob.takes,
            })?;
        }
        script.check()
    }

    /// Sets one of [`KNOBS`].
    fn turn(&mut self, name: &str, value: &str) -> Result<(), Unfit> {
        match name {
            "text" => self.text = value::words(value)?,
            "chunks" => self.chunks = value::or_word("auto", value, value::number)?,
            "size" => self.size = value::or_word("auto", value, value::bytes)?,
            "interval" => self.interval = value::time(value)?,
            "first_byte" => self.first_byte = value::time(value)?,
            "coalesce" => self.coalesce = value::number(value).and_then(value::positive)?,
            "split" => self.split = value::bytes(value).and_then(value::positive)?,
            "stamps" => self.stamps = value::yes(value)?,
            "usage" => self.usage = Report::read(value)?,
            "input" => self.input = value::number(value)?,
            "output" => self.output = value::or_word("auto", value, value::number)?,
            "cached" => self.cached = value::number(value)?,
            "cache_write" => self.cache_write = value::number(value)?,
            "reasoning" => self.reasoning = value::number(value)?,
            "obey" => self.obey = value::yes(value)?,
            "status" => self.status = value::status(value)?,
            "retry_after" => self.retry_after = value::or_word("none", value, value::number)?,
            "should_retry" => self.should_retry = value::or_word("none", value, value::yes)?,
            "tool" => self.tool = value::or_word("none", value, value::words)?,
            "arguments" => self.arguments = value::json(value)?,
            "repeat" => self.repeat = value::yes(value)?,
            "echo" => self.echo = value::yes(value)?,
            "done" => self.done = value::yes(value)?,
            "gate" => self.gate = value::or_word("none", value, Position::read)?,
            "fault" => self.fault = value::or_word("none", value, Fault::read)?,
            _ => return Err(Unfit),
        }
        Ok(())
    }

    /// A knob's value as it is written.
    fn show(&self, name: &str) -> String {
        let yes = |on| if on { "yes" } else { "no" }.to_owned();
        let time = |time| humantime::format_duration(time).to_string();
        match name {
            "text" => value::escape(&self.text),
            "chunks" => value::show_or("auto", self.chunks),
            "size" => value::show_or("auto", self.size),
            "interval" => time(self.interval),
            "first_byte" => time(self.first_byte),
            "coalesce" => self.coalesce.to_string(),
            "split" => self.split.to_string(),
            "stamps" => yes(self.stamps),
            "usage" => self.usage.as_str().to_owned(),
            "input" => self.input.to_string(),
            "output" => value::show_or("auto", self.output),
            "cached" => self.cached.to_string(),
            "cache_write" => self.cache_write.to_string(),
            "reasoning" => self.reasoning.to_string(),
            "obey" => yes(self.obey),
            "status" => self.status.to_string(),
            "retry_after" => value::show_or("none", self.retry_after),
            "should_retry" => self.should_retry.map_or_else(|| "none".to_owned(), yes),
            "tool" => value::show_or("none", self.tool.as_deref().map(value::escape)),
            "arguments" => value::escape(&self.arguments),
            "repeat" => yes(self.repeat),
            "echo" => yes(self.echo),
            "done" => yes(self.done),
            "gate" => value::show_or("none", self.gate),
            "fault" => value::show_or("none", self.fault),
            _ => String::new(),
        }
    }

    /// Refuses numbers of tokens that no provider could report.
    fn check(self) -> Result<Self, Error> {
        let over = |part, is: u64, whole, of: u64| {
            if is > of { Err(Error::PartOverWhole { part, is, whole, of }) } else { Ok(()) }
        };
        let cache = self.cached.saturating_add(self.cache_write);
        over("cached and cache_write", cache, "input", self.input)?;
        if let Some(output) = self.output {
            over("reasoning", self.reasoning, "output", output)?;
        }
        Ok(self)
    }
}

impl Default for Script {
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
            usage: Report::Yes,
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

impl FromStr for Script {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::default().overlay(text)
    }
}

impl fmt::Display for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let default = Self::default();
        let turned = KNOBS
            .iter()
            .map(|knob| (knob.name, self.show(knob.name)))
            .filter(|(name, value)| *value != default.show(name));
        for (i, (name, value)) in turned.enumerate() {
            write!(f, "{}{name}={value}", if i == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

/// The knobs and the words for their values as tables, for `--help`.
pub fn help() -> String {
    let knobs =
        KNOBS.map(|knob| format!("  {:<13}{:<26}{}\n", knob.name, knob.takes, knob.meaning));
    let words = WORDS.map(|(word, meaning)| format!("  {word:<13}{meaning}\n"));
    format!("{}\n{}", knobs.concat(), words.concat())
}

/// What the capital words in `takes` mean, for an error.
fn legend(takes: &str) -> String {
    let mut legend = String::new();
    for (word, meaning) in WORDS {
        if takes.split([' ', '@', ',']).any(|part| part == word) {
            legend.extend(["; ", word, " is ", meaning]);
        }
    }
    legend
}

fn names() -> String {
    KNOBS.map(|knob| knob.name).join(", ")
}

const fn knob(name: &'static str, takes: &'static str, meaning: &'static str) -> Knob {
    Knob { name, takes, meaning }
}

/// Every knob, in the order a script prints them.
pub const KNOBS: [Knob; 25] = [
    knob("text", "TEXT", "what the model says, one word a chunk, and over again"),
    knob("chunks", "N or auto", "content chunks in a stream (auto: one a word)"),
    knob("size", "BYTES or auto", "content of each chunk, filled with `x` (auto: the word)"),
    knob("interval", "TIME", "from chunk to chunk; a late one is made up for"),
    knob("first_byte", "TIME", "silence before the response begins"),
    knob("coalesce", "N, 1 at least", "events in one write (default 1)"),
    knob("split", "BYTES, 1 at least", "largest write (default 64KiB)"),
    knob("stamps", "yes or no", "begin each chunk with `t=` CLOCK_MONOTONIC nanoseconds"),
    knob("usage", "yes, none, finish, every", "where tokens are reported"),
    knob("input", "N", "input tokens, cached ones included"),
    knob("output", "N or auto", "output tokens, reasoning included (auto: one a chunk)"),
    knob("cached", "N", "input tokens read from a cache"),
    knob("cache_write", "N", "input tokens written to a cache"),
    knob("reasoning", "N", "output tokens spent on reasoning"),
    knob("obey", "yes or no", "stop at the request's limit of output tokens"),
    knob("status", "200 or 400 to 599", "answer with this status"),
    knob("retry_after", "SECONDS or none", "`retry-after` of an error status"),
    knob("should_retry", "yes, no or none", "`x-should-retry` of an error status"),
    knob("tool", "NAME or none", "ask for a tool, unless its result is there already"),
    knob("arguments", "JSON", "what the tool is asked for, in `chunks` pieces"),
    knob("repeat", "yes or no", "ask for the tool every time"),
    knob("echo", "yes or no", "say what the conversation ends with, instead of `text`"),
    knob("done", "yes or no", "send the last event: `[DONE]` or `message_stop`"),
    knob("gate", "WHERE or none", "wait there until the gate is opened"),
    knob("fault", "KIND@WHERE or none", "go wrong there"),
];

/// The words for values.
const WORDS: [(&str, &str); 9] = [
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
