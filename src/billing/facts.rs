//! What each call used, from the run's own audit log, which may still be growing.
//!
//! **Invariant:** a log gives the same facts however it is read: whole or in pieces, cut anywhere.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufReader, Seek, SeekFrom};
use std::ops::Add;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::{Serialize, Serializer};

use super::Error;
use crate::audit::chain::{MAX_UNSETTLED, Why};
use crate::audit::read::{self, Admission, Broken, Entry, Event, Position, Session, Settlement};
use crate::audit::record::Outcome;
use crate::budget::{Amount, Nanodollars, Usage};
use crate::protocol::Route;

/// One call, as our own record has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Fact {
    /// The request's id, which LiteLLM knows as `litellm_call_id`.
    pub call_id: String,
    pub run: String,
    pub attempt: String,
    /// Who pays.
    pub account: String,
    /// What answered: `litellm`, `openai` or `anthropic`.
    pub upstream: String,
    pub route: String,
    pub model: Option<String>,
    pub stream: bool,
    pub outcome: Outcome,
    /// The status sent to the client; 0 where none was.
    pub status: u16,
    #[serde(flatten)]
    pub usage: Usage,
    /// By our own price table; zero where the model stands in none.
    #[serde(rename = "cost_usd")]
    pub cost: Nanodollars,
    /// What the upstream said with its answer that it cost.
    #[serde(rename = "reported_cost_usd", skip_serializing_if = "Option::is_none")]
    pub reported_cost: Option<Nanodollars>,
    #[serde(serialize_with = "rfc3339")]
    pub started: SystemTime,
    #[serde(serialize_with = "rfc3339")]
    pub settled: SystemTime,
}

/// Follows one run's log.
#[derive(Debug)]
pub struct Reader {
    path: PathBuf,
    file: Option<File>,
    position: Position,
    /// Of the process that writes now.
    session: Option<Session>,
    open: HashMap<String, Open>,
    last: SystemTime,
    /// Of the calls that are settled.
    charged: Nanodollars,
    /// Whether the last look found what cannot be read.
    is_broken: bool,
}

/// A call that has not ended.
#[derive(Debug)]
struct Open {
    seq: u64,
    admission: Admission,
    run: String,
    attempt: String,
    account: String,
    upstream: String,
    started: SystemTime,
}

impl Fact {
    /// Whether the account is charged for the call. A call that used nothing was refused by the upstream, or never reached it. A
    /// 5xx costs the run's budget its input, out of caution, and the provider sends no bill for it.
    pub fn is_billable(&self) -> bool {
        !self.usage.total().is_zero() && self.status < 500
    }

    /// Whether it used something, or is of a kind that does. Other calls come in any number, and are in no book.
    pub fn can_cost(&self) -> bool {
        let is_free = [Route::CountTokens, Route::Models, Route::Model]
            .iter()
            .any(|free| free.name() == self.route);
        self.is_billable() || !is_free
    }

    /// Whether LiteLLM says what it cost; otherwise our own price table does.
    pub fn is_billed_by_litellm(&self) -> bool {
        self.upstream == "litellm"
    }

    /// `run/attempt/call id`, by which a receipt refers to it.
    pub fn source_reference(&self) -> String {
        format!("{}/{}/{}", self.run, self.attempt, self.call_id)
    }

    /// What it should cost: by our own prices or, where we have none, by what came with the answer.
    pub fn expected_cost(&self) -> Option<Nanodollars> {
        if self.cost.is_zero() { self.reported_cost } else { Some(self.cost) }
    }
}

impl Reader {
    /// Begins to follow a log; it need not be there yet, nor be whole.
    pub fn open(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            file: None,
            position: Position::START,
            session: None,
            open: HashMap::new(),
            last: SystemTime::UNIX_EPOCH,
            charged: Nanodollars::ZERO,
            is_broken: false,
        }
    }

    /// The calls that have ended since the last time. A line that is still being written is left for the next. Blocks on
    /// the disk.
    ///
    /// # Errors
    /// The log cannot be read, or is not as it was written. What stands before the break is handed out first.
    pub fn read_new(&mut self) -> Result<Vec<Fact>, Error> {
        let mut facts = vec![];
        let read = self.read(&mut facts);
        self.is_broken = read.is_err();
        match read {
            Err(source) if facts.is_empty() => Err(Error::Log { path: self.path.clone(), source }),
            _ => Ok(facts),
        }
    }

    /// Returns what the calls have cost by now, as the run's budget counts them; a call that is not settled has cost what
    /// it has reserved. `None` where the rest of the log cannot be read.
    pub fn charged(&self) -> Option<Nanodollars> {
        let reserved = self.open.values().map(|open| open.admission.reserved.cost);
        (!self.is_broken).then(|| reserved.fold(self.charged, Add::add))
    }

    /// The rest, and whether it is all. What never ended is taken to have used everything that it had reserved, as it is
    /// when the log is taken up again: so this is only for a log that nobody writes any more.
    pub fn finish(mut self) -> (Vec<Fact>, Result<(), Error>) {
        let mut facts = vec![];
        let end = loop {
            match self.read_new() {
                Ok(more) if more.is_empty() => break Ok(()),
                Ok(more) => facts.extend(more),
                Err(error) => break Err(error),
            }
        };
        let mut open: Vec<_> = self.open.into_values().collect();
        open.sort_unstable_by_key(|open| open.seq);
        facts.extend(open.into_iter().map(|open| open.lost(self.last)));
        (facts, end)
    }

    fn read(&mut self, facts: &mut Vec<Fact>) -> Result<(), read::Error> {
        let Some(mut file) = self.file()? else { return Ok(()) };
        file.seek(SeekFrom::Start(self.position.offset()))?;
        let mut reader = read::Reader::at(BufReader::new(&file), self.position);
        let end = loop {
            match reader.entry() {
                Ok(Some(entry)) => match self.note(entry) {
                    Ok(fact) => facts.extend(fact),
                    Err(error) => break Err(error),
                },
                Ok(None) | Err(read::Error::Broken(Broken { why: Why::Torn, .. })) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        self.position = reader.position();
        self.file = Some(file);
        end
    }

    fn file(&mut self) -> io::Result<Option<File>> {
        if let Some(file) = self.file.take() {
            return Ok(Some(file));
        }
        match File::open(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            opened => opened.map(Some),
        }
    }

    fn note(&mut self, entry: Entry) -> Result<Option<Fact>, read::Error> {
        let time = humantime::parse_rfc3339(&entry.time).unwrap_or(self.last);
        self.last = self.last.max(time);
        if self.open.len() > MAX_UNSETTLED {
            let Entry { seq, offset, .. } = entry;
            return Err(Broken { seq, offset, why: Why::Unsettled }.into());
        }
        let Entry { seq, run, event, .. } = entry;
        match event {
            Event::Started(session) => self.session = Some(session),
            Event::Admitted(admission) => {
                let open = self.begin(seq, run, admission, time);
                self.open.insert(open.admission.request.clone(), open);
            }
            Event::Settled(settlement) => {
                return Ok(Some(self.settle(seq, run, &settlement, time)));
            }
            _ => (),
        }
        Ok(None)
    }

    fn begin(&self, seq: u64, run: String, admission: Admission, started: SystemTime) -> Open {
        let of = |field: fn(&Session) -> &String| self.session.as_ref().map(field).cloned();
        let attempt = of(|session| &session.attempt).unwrap_or_default();
        let account = of(|session| &session.account).unwrap_or_default();
        let upstream = of(|session| &session.upstream).unwrap_or_default();
        Open { seq, admission, run, attempt, account, upstream, started }
    }

    fn settle(&mut self, seq: u64, run: String, settled: &Settlement, time: SystemTime) -> Fact {
        let open = self.open.remove(&settled.request).unwrap_or_else(|| {
            // A fault of the gateway; what was charged without an admission was charged all the same.
            let (request, route) = (settled.request.clone(), "-".to_owned());
            let reserved = Amount::default();
            let admission = Admission { request, route, model: None, stream: false, reserved };
            self.begin(seq, run, admission, time)
        });
        self.charged = self.charged + settled.charged.cost;
        open.settled(settled, time)
    }
}

impl Open {
    fn settled(self, settled: &Settlement, time: SystemTime) -> Fact {
        let header = settled.litellm_response_cost.as_deref().and_then(Nanodollars::parse);
        Fact {
            outcome: settled.outcome,
            status: settled.status,
            usage: settled.usage,
            cost: settled.charged.cost,
            reported_cost: settled.reported_cost_usd.or(header),
            ..self.lost(time)
        }
    }

    fn lost(self, time: SystemTime) -> Fact {
        let Admission { request, route, model, stream, reserved } = self.admission;
        Fact {
            call_id: request,
            run: self.run,
            attempt: self.attempt,
            account: self.account,
            upstream: self.upstream,
            route,
            model,
            stream,
            outcome: Outcome::Crashed,
            status: 0,
            usage: Usage { input: reserved.input, output: reserved.output, ..Usage::default() },
            cost: reserved.cost,
            reported_cost: None,
            started: self.started,
            settled: time,
        }
    }
}

pub(super) fn rfc3339<S: Serializer>(time: &SystemTime, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&humantime::format_rfc3339_millis(*time))
}
