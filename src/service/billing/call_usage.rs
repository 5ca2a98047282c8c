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

use super::BillingError;
use crate::llm::budget::{BudgetAmount, Nanodollars, TokenUsage};
use crate::llm::protocol::GatewayRoute;
use crate::telemetry::audit::chain::{ChainBreakReason, MAX_UNSETTLED_CALLS};
use crate::telemetry::audit::read::{
    self, AuditAdmissionEvent, AuditEntry, AuditEvent, AuditReadPosition, AuditSessionEvent,
    AuditSettlementEvent, ChainBreakError,
};
use crate::telemetry::audit::records::CallOutcome;

/// One call, as our own record has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CallUsage {
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
    pub outcome: CallOutcome,
    /// The status sent to the client; 0 where none was.
    pub status: u16,
    #[serde(flatten)]
    pub usage: TokenUsage,
    /// By our own price table; zero where the model stands in none.
    #[serde(rename = "cost_usd")]
    pub cost: Nanodollars,
    /// What the upstream said with its answer that it cost.
    #[serde(rename = "reported_cost_usd", skip_serializing_if = "Option::is_none")]
    pub reported_cost: Option<Nanodollars>,
    #[serde(serialize_with = "serialize_rfc3339")]
    pub started: SystemTime,
    #[serde(serialize_with = "serialize_rfc3339")]
    pub settled: SystemTime,
}

/// Follows one run's log.
#[derive(Debug)]
pub struct CallUsageReader {
    path: PathBuf,
    file: Option<File>,
    position: AuditReadPosition,
    /// Of the process that writes now.
    session: Option<AuditSessionEvent>,
    open: HashMap<String, OpenCall>,
    last: SystemTime,
    /// Of the calls that are settled.
    charged: Nanodollars,
    /// Whether the last look found what cannot be read.
    is_broken: bool,
}

/// A call that has not ended.
#[derive(Debug)]
struct OpenCall {
    seq: u64,
    admission: AuditAdmissionEvent,
    run: String,
    attempt: String,
    account: String,
    upstream: String,
    started: SystemTime,
}

impl CallUsage {
    /// Whether the account is charged for the call. A call that used nothing was refused by the upstream, or never reached it. A
    /// 5xx costs the run's budget its input, out of caution, and the provider sends no bill for it.
    pub fn is_billable(&self) -> bool {
        !self.usage.total_tokens().is_zero() && self.status < 500
    }

    /// Whether it used something, or is of a kind that does. Other calls come in any number, and are in no book.
    pub fn can_cost(&self) -> bool {
        let is_free = [GatewayRoute::CountTokens, GatewayRoute::Models, GatewayRoute::Model]
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

impl CallUsageReader {
    /// Begins to follow a log; it need not be there yet, nor be whole.
    pub fn open(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            file: None,
            position: AuditReadPosition::START,
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
    pub fn read_new(&mut self) -> Result<Vec<CallUsage>, BillingError> {
        let mut facts = vec![];
        let read = self.read_entries(&mut facts);
        self.is_broken = read.is_err();
        match read {
            Err(source) if facts.is_empty() => {
                Err(BillingError::Log { path: self.path.clone(), source })
            }
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
    pub fn finish(mut self) -> (Vec<CallUsage>, Result<(), BillingError>) {
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
        facts.extend(open.into_iter().map(|open| open.into_lost(self.last)));
        (facts, end)
    }

    fn read_entries(&mut self, facts: &mut Vec<CallUsage>) -> Result<(), read::AuditReadError> {
        let Some(mut file) = self.open_file()? else { return Ok(()) };
        file.seek(SeekFrom::Start(self.position.offset()))?;
        let mut reader = read::AuditReader::resume_at(BufReader::new(&file), self.position);
        let end = loop {
            match reader.next_entry() {
                Ok(Some(entry)) => match self.apply_entry(entry) {
                    Ok(fact) => facts.extend(fact),
                    Err(error) => break Err(error),
                },
                Ok(None)
                | Err(read::AuditReadError::Broken(ChainBreakError {
                    why: ChainBreakReason::Torn,
                    ..
                })) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        self.position = reader.position();
        self.file = Some(file);
        end
    }

    fn open_file(&mut self) -> io::Result<Option<File>> {
        if let Some(file) = self.file.take() {
            return Ok(Some(file));
        }
        match File::open(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            opened => opened.map(Some),
        }
    }

    fn apply_entry(
        &mut self,
        entry: AuditEntry,
    ) -> Result<Option<CallUsage>, read::AuditReadError> {
        let time = humantime::parse_rfc3339(&entry.time).unwrap_or(self.last);
        self.last = self.last.max(time);
        if self.open.len() > MAX_UNSETTLED_CALLS {
            let AuditEntry { seq, offset, .. } = entry;
            return Err(ChainBreakError { seq, offset, why: ChainBreakReason::Unsettled }.into());
        }
        let AuditEntry { seq, run, event, .. } = entry;
        match event {
            AuditEvent::Started(session) => self.session = Some(session),
            AuditEvent::Admitted(admission) => {
                let open = self.open_call(seq, run, admission, time);
                self.open.insert(open.admission.request.clone(), open);
            }
            AuditEvent::Settled(settlement) => {
                return Ok(Some(self.settle_call(seq, run, &settlement, time)));
            }
            _ => (),
        }
        Ok(None)
    }

    fn open_call(
        &self,
        seq: u64,
        run: String,
        admission: AuditAdmissionEvent,
        started: SystemTime,
    ) -> OpenCall {
        let of =
            |field: fn(&AuditSessionEvent) -> &String| self.session.as_ref().map(field).cloned();
        let attempt = of(|session| &session.attempt).unwrap_or_default();
        let account = of(|session| &session.account).unwrap_or_default();
        let upstream = of(|session| &session.upstream).unwrap_or_default();
        OpenCall { seq, admission, run, attempt, account, upstream, started }
    }

    fn settle_call(
        &mut self,
        seq: u64,
        run: String,
        settled: &AuditSettlementEvent,
        time: SystemTime,
    ) -> CallUsage {
        let open = self.open.remove(&settled.request).unwrap_or_else(|| {
            // A fault of the gateway; what was charged without an admission was charged all the same.
            let (request, route) = (settled.request.clone(), "-".to_owned());
            let reserved = BudgetAmount::default();
            let admission =
                AuditAdmissionEvent { request, route, model: None, stream: false, reserved };
            self.open_call(seq, run, admission, time)
        });
        self.charged = self.charged + settled.charged.cost;
        open.into_settled(settled, time)
    }
}

impl OpenCall {
    fn into_settled(self, settled: &AuditSettlementEvent, time: SystemTime) -> CallUsage {
        let header = settled.litellm_response_cost.as_deref().and_then(Nanodollars::parse);
        CallUsage {
            outcome: settled.outcome,
            status: settled.status,
            usage: settled.usage,
            cost: settled.charged.cost,
            reported_cost: settled.reported_cost_usd.or(header),
            ..self.into_lost(time)
        }
    }

    fn into_lost(self, time: SystemTime) -> CallUsage {
        let AuditAdmissionEvent { request, route, model, stream, reserved } = self.admission;
        CallUsage {
            call_id: request,
            run: self.run,
            attempt: self.attempt,
            account: self.account,
            upstream: self.upstream,
            route,
            model,
            stream,
            outcome: CallOutcome::Crashed,
            status: 0,
            usage: TokenUsage {
                input: reserved.input,
                output: reserved.output,
                ..TokenUsage::default()
            },
            cost: reserved.cost,
            reported_cost: None,
            started: self.started,
            settled: time,
        }
    }
}

pub(super) fn serialize_rfc3339<S: Serializer>(
    time: &SystemTime,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&humantime::format_rfc3339_millis(*time))
}
