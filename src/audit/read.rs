//! Reading a log: one checked record after another, in bounded memory.

use std::io::{self, BufRead, Read};

use serde::Deserialize;

use super::chain::{Chain, Hash, Why};
use super::record::{self, Finished, Outcome, Record as _};
use crate::budget::{Amount, Nanodollars, Usage};

/// Hands out the records of a log in order, each one proved to continue the chain.
#[derive(Debug)]
pub struct Reader<R> {
    from: R,
    chain: Chain,
    line: Vec<u8>,
    /// Where the next line begins.
    offset: u64,
}

/// One record.
#[derive(Debug)]
pub struct Entry {
    pub seq: u64,
    /// Where its line begins in the file.
    pub offset: u64,
    /// The hash of the record before it.
    pub(super) prev: Hash,
    pub time: String,
    pub run: String,
    /// The event by its name, known here or not.
    pub name: String,
    pub event: Event,
}

/// What a record says, as far as this version knows its event.
#[derive(Debug)]
pub enum Event {
    Started(Session),
    Opened(Connection),
    Admitted(Admission),
    Settled(Settlement),
    Refused(Refusal),
    Finished(Finished),
    Checkpoint(Checkpoint),
    Repaired(Repair),
    /// An event of a later version: chained like any other, counted, not understood.
    Other,
}

#[derive(Debug, Deserialize)]
pub struct Session {
    pub attempt: String,
    pub account: String,
    pub version: String,
    pub policy: String,
    pub public_key: String,
    pub resumed: bool,
    /// Not in the logs of the first versions, which were made for LiteLLM.
    #[serde(default = "litellm")]
    pub upstream: String,
}

/// Who connected; only [`Connection::repeats`] where the record stands for a crowd.
#[derive(Debug, Deserialize)]
pub struct Connection {
    pub pid: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub cgroup: Option<String>,
    #[serde(default = "once")]
    pub repeats: u64,
}

#[derive(Debug, Deserialize)]
pub struct Admission {
    pub request: String,
    pub route: String,
    pub model: Option<String>,
    pub stream: bool,
    pub reserved: Amount,
}

#[derive(Debug, Deserialize)]
pub struct Settlement {
    pub request: String,
    pub outcome: Outcome,
    pub status: u16,
    pub code: Option<String>,
    pub usage: Usage,
    pub charged: Amount,
    pub litellm_response_cost: Option<String>,
    pub reported_cost_usd: Option<Nanodollars>,
    pub duration_ms: f64,
}

#[derive(Debug, Deserialize)]
pub struct Refusal {
    /// Absent where the record stands for a flood.
    pub request: Option<String>,
    pub code: String,
    pub status: u16,
    pub route: Option<String>,
    pub model: Option<String>,
    #[serde(default = "once")]
    pub repeats: u64,
}

#[derive(Debug, Deserialize)]
pub struct Checkpoint {
    pub signature: String,
    pub public_key: String,
}

#[derive(Debug, Deserialize)]
pub struct Repair {
    pub torn_bytes: u64,
    pub kept_in: String,
}

/// The first place at which a log is not what was written.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("record {seq} (line {seq}, byte {offset}): {why}")]
pub struct Broken {
    /// The record that should stand here. Records count from 1, so this is also the line.
    pub seq: u64,
    /// Where its line begins.
    pub offset: u64,
    pub why: Why,
}

/// Why reading ended before the end.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Broken(#[from] Broken),
}

/// Where a reader stands: everything up to here is proved.
#[derive(Clone, Copy, Debug)]
pub struct Position {
    pub(super) chain: Chain,
    pub(super) offset: u64,
}

impl<R: BufRead> Reader<R> {
    pub fn new(from: R) -> Self {
        Self::at(from, Position::START)
    }

    /// Goes on where an earlier reader of the same log stood; `from` begins there.
    pub fn at(from: R, Position { chain, offset }: Position) -> Self {
        Self { from, chain, line: vec![], offset }
    }

    /// The next record; `None` at the end. After an error there is nothing more to ask for.
    pub fn entry(&mut self) -> Result<Option<Entry>, Error> {
        self.line.clear();
        let limit = MAX_LINE + 1;
        let length = self.from.by_ref().take(limit).read_until(b'\n', &mut self.line)?;
        if length == 0 {
            return Ok(None);
        }
        let Position { mut chain, offset } = self.position();
        let entry = follow(&mut chain, &self.line, offset).map_err(|why| Broken {
            seq: chain.next(),
            offset,
            why,
        })?;
        self.chain = chain;
        self.offset += length as u64;
        Ok(Some(entry))
    }

    /// The end of the last record that was handed out.
    pub fn position(&self) -> Position {
        Position { chain: self.chain, offset: self.offset }
    }
}

impl Position {
    /// Before the first record.
    pub const START: Self = Self { chain: Chain::START, offset: 0 };

    /// Where in the file that is.
    pub fn offset(&self) -> u64 {
        self.offset
    }
}

impl Event {
    fn parse(name: &str, line: &[u8]) -> serde_json::Result<Self> {
        Ok(match name {
            record::Session::EVENT => Self::Started(serde_json::from_slice(line)?),
            record::Opened::EVENT => Self::Opened(serde_json::from_slice(line)?),
            record::Admitted::EVENT => Self::Admitted(serde_json::from_slice(line)?),
            record::Settled::EVENT => Self::Settled(serde_json::from_slice(line)?),
            record::Refused::EVENT => Self::Refused(serde_json::from_slice(line)?),
            Finished::EVENT => Self::Finished(serde_json::from_slice(line)?),
            record::Checkpoint::EVENT => Self::Checkpoint(serde_json::from_slice(line)?),
            record::Repaired::EVENT => Self::Repaired(serde_json::from_slice(line)?),
            _ => Self::Other,
        })
    }
}

impl Entry {
    /// Says that this record is where the log goes wrong.
    pub(super) fn broken(&self, why: Why) -> Broken {
        Broken { seq: self.seq, offset: self.offset, why }
    }
}

fn follow(chain: &mut Chain, line: &[u8], offset: u64) -> Result<Entry, Why> {
    let Some((b'\n', content)) = line.split_last() else {
        return Err(cut(chain, line));
    };
    let (seq, prev) = (chain.next(), *chain.prev());
    let mut next = *chain;
    next.follow(content)?;
    let unreadable = |error: serde_json::Error| Why::Fields(error.to_string());
    let Head { time, run, event: name } = serde_json::from_slice(content).map_err(unreadable)?;
    let event = Event::parse(&name, content).map_err(unreadable)?;
    *chain = next;
    Ok(Entry { seq, offset, prev, time, run, name, event })
}

/// What to say of a line without an end.
fn cut(chain: &Chain, line: &[u8]) -> Why {
    if line.len() as u64 > MAX_LINE {
        Why::TooLong
    } else if chain.next() == 1 && !chain.could_begin_with(line) {
        // Nothing proves that this file is a log at all; it may be anything without a line feed.
        Why::Form
    } else {
        Why::Torn
    }
}

#[derive(Deserialize)]
struct Head {
    time: String,
    run: String,
    event: String,
}

fn once() -> u64 {
    1
}

fn litellm() -> String {
    "litellm".to_owned()
}

/// The longest line a reader takes, in bytes. Ours are under 8 KiB; the rest is room for later
/// events.
pub const MAX_LINE: u64 = 1 << 20;
