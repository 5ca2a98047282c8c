//! Reads the usage of each call from the run's own audit log, which may still be growing.
//!
//! **Invariant:** a log gives the same calls however it is read: whole or in pieces, cut anywhere.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufReader, Seek, SeekFrom};
use std::ops::Add;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::{Serialize, Serializer};

use super::BillingError;
use crate::base::timestamp;
use crate::llm::budget::{BudgetAmount, Nanodollars, TokenUsage, UsageSource};
use crate::llm::protocol::{GatewayRoute, is_failure_status};
use crate::telemetry::audit::chain::{ChainBreakReason, MAX_UNSETTLED_CALLS};
use crate::telemetry::audit::connect_records::ConnectOutcome;
use crate::telemetry::audit::read::{
    self, AuditAdmissionEvent, AuditConnectAdmissionEvent, AuditConnectSettlementEvent, AuditEntry,
    AuditEvent, AuditReadPosition, AuditSessionEvent, AuditSettlementEvent,
    AuditToolAdmissionEvent, AuditToolSettlementEvent, ChainBreakError,
};
use crate::telemetry::audit::records::CallOutcome;
use crate::telemetry::audit::tool_records::ToolOutcome;

/// The usage of one call of a model or a tool, or of one request over a connection, from the run's own audit log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CallUsage {
    /// The request's id, which is `litellm_call_id` in LiteLLM.
    pub call_id: String,
    pub run: String,
    pub attempt: String,
    /// The account that pays.
    pub account: String,
    /// The kind of the upstream: `litellm`, `openai` or `anthropic`; `tools` for a tool, which the gateway calls itself;
    /// `connections` for a request over a connection.
    pub upstream: String,
    /// The route of a model; `tool` for a tool; `connect` for a request over a connection.
    pub route: String,
    /// The name of the model, the tool or the connection.
    pub model: Option<String>,
    pub stream: bool,
    pub outcome: CallOutcome,
    /// The status sent to the client; 0 if none was sent.
    pub status: u16,
    #[serde(flatten)]
    pub usage: TokenUsage,
    /// The cost by our own price table; zero if the table does not have the model.
    #[serde(rename = "cost_usd")]
    pub cost: Nanodollars,
    /// The cost that the upstream reported with its answer.
    #[serde(rename = "reported_cost_usd", skip_serializing_if = "Option::is_none")]
    pub reported_cost: Option<Nanodollars>,
    #[serde(serialize_with = "serialize_rfc3339")]
    pub started: SystemTime,
    #[serde(serialize_with = "serialize_rfc3339")]
    pub settled: SystemTime,
}

/// A reader that follows one run's audit log.
#[derive(Debug)]
pub struct CallUsageReader {
    path: PathBuf,
    file: Option<File>,
    position: AuditReadPosition,
    /// The session record of the gateway process that writes the log now.
    session: Option<AuditSessionEvent>,
    open: HashMap<String, OpenCall>,
    last: SystemTime,
    /// The cost of the settled calls.
    charged: Nanodollars,
    /// True if the last read failed.
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
    /// Returns true if the account is charged for the call. A call without tokens was refused by the upstream, or never
    /// reached the upstream.
    ///
    /// A tool or a connection uses no tokens. Its price is in the operator's configuration.
    pub fn is_billable(&self) -> bool {
        if self.has_own_price() {
            return !self.cost.is_zero();
        }
        !self.usage.total_tokens().is_zero() && !self.has_failed_upstream()
    }

    /// Returns true if the provider itself answered that it had failed the call, and no output is known. The run's budget
    /// counts the input out of caution, but the provider sends no bill.
    ///
    /// The gateway's own 5xx (a deadline, a timeout, an answer that cannot be read) is no such answer: the provider may
    /// have done its work.
    fn has_failed_upstream(&self) -> bool {
        let is_upstreams = matches!(self.outcome, CallOutcome::Completed | CallOutcome::ClientGone);
        let is_caution = self.usage.source == UsageSource::Estimated && self.usage.output.is_zero();
        is_failure_status(self.status) && is_upstreams && is_caution
    }

    /// Returns true for a tool or a connection: the operator sets its price, and it uses no tokens.
    pub fn has_own_price(&self) -> bool {
        [TOOLS, CONNECTIONS].iter().any(|kind| self.upstream == kind.upstream)
    }

    /// Returns true if the call used tokens or its route can use tokens, and for a tool or a connection that has a price. Calls of the
    /// free routes are unlimited in number and are not recorded.
    pub fn can_cost(&self) -> bool {
        if self.has_own_price() {
            return self.is_billable();
        }
        let is_free = [GatewayRoute::CountTokens, GatewayRoute::Models, GatewayRoute::Model]
            .iter()
            .any(|free| free.name() == self.route);
        self.is_billable() || !is_free
    }

    /// Returns true if LiteLLM reports the call's cost; otherwise our own price table does.
    pub fn is_billed_by_litellm(&self) -> bool {
        self.upstream == "litellm"
    }

    /// Returns `run/attempt/call id`, by which a receipt refers to the call.
    pub fn source_reference(&self) -> String {
        format!("{}/{}/{}", self.run, self.attempt, self.call_id)
    }

    /// Returns the expected cost: by our own prices or, if we have none, by the upstream's answer.
    pub fn expected_cost(&self) -> Option<Nanodollars> {
        if self.cost.is_zero() { self.reported_cost } else { Some(self.cost) }
    }
}

impl CallUsageReader {
    /// Creates a reader of a log. The log may be incomplete, or may not exist yet.
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

    /// Returns the calls that were settled since the last read. An incomplete last line is left for the next read.
    /// Blocks on the disk.
    ///
    /// # Errors
    /// Returns an error if the log cannot be read or is damaged. The calls before the damage are returned first, by an
    /// earlier call.
    pub fn read_new(&mut self) -> Result<Vec<CallUsage>, BillingError> {
        let mut facts = vec![];
        let read = self.read_entries(&mut facts);
        self.is_broken = read.is_err();
        match read {
            // An error behind new calls waits: the next read starts at the error, finds no call and returns the error.
            Err(source) if facts.is_empty() => {
                Err(BillingError::Log { path: self.path.clone(), source })
            }
            _ => Ok(facts),
        }
    }

    /// Returns the cost of the calls so far, as the run's budget counts it. An open call counts with its reservation.
    /// Returns `None` if the rest of the log cannot be read.
    pub fn charged(&self) -> Option<Nanodollars> {
        // An open call may still cost its whole reservation, so the sum is never too low.
        let reserved = self.open.values().map(|open| open.admission.reserved.cost);
        (!self.is_broken).then(|| reserved.fold(self.charged, Add::add))
    }

    /// Returns the remaining calls, and an error if the log cannot be read to its end. A call that never ended counts
    /// with its whole reservation, as it does when a gateway reopens the log. The log must have no writer any more.
    pub fn finish(mut self) -> (Vec<CallUsage>, Result<(), BillingError>) {
        let mut facts = vec![];
        let end = loop {
            match self.read_new() {
                // An empty read is the end of the log: a read stops early only at an error, and the next read returns
                // that error.
                Ok(more) if more.is_empty() => break Ok(()),
                Ok(more) => facts.extend(more),
                Err(error) => break Err(error),
            }
        };
        let mut open: Vec<_> = self.open.into_values().collect();
        // The map has no order; the order of admission makes the result the same for every read.
        open.sort_unstable_by_key(|open| open.seq);
        facts.extend(open.into_iter().map(|open| open.into_lost(self.last)));
        (facts, end)
    }

    fn read_entries(&mut self, facts: &mut Vec<CallUsage>) -> Result<(), read::AuditReadError> {
        let Some(mut file) = self.open_file()? else { return Ok(()) };
        // The position is after the last complete record, so a record that was incomplete at the previous read is read
        // again.
        file.seek(SeekFrom::Start(self.position.offset()))?;
        let mut reader = read::AuditReader::resume_at(BufReader::new(&file), self.position);
        let end = loop {
            match reader.next_entry() {
                Ok(Some(entry)) => match self.apply_entry(entry) {
                    Ok(fact) => facts.extend(fact),
                    Err(error) => break Err(error),
                },
                // A torn last record is normal in a growing log: its writer has not finished the record yet.
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
        // The file is opened once, so that every read continues in the same file.
        if let Some(file) = self.file.take() {
            return Ok(Some(file));
        }
        match File::open(&self.path) {
            // The gateway creates the log when the run begins, which may be later than the first read.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            opened => opened.map(Some),
        }
    }

    fn apply_entry(
        &mut self,
        entry: AuditEntry,
    ) -> Result<Option<CallUsage>, read::AuditReadError> {
        // `last` becomes the end of calls that never settle. It never goes back, even if the wall clock did.
        let time = humantime::parse_rfc3339(&entry.time).unwrap_or(self.last);
        self.last = self.last.max(time);
        // The bound limits the memory for open calls; a log above the bound counts as damaged.
        if self.open.len() > MAX_UNSETTLED_CALLS {
            let AuditEntry { seq, offset, .. } = entry;
            return Err(
                ChainBreakError { seq, offset, why: ChainBreakReason::TooManyUnsettled }.into()
            );
        }
        let AuditEntry { seq, run, event, .. } = entry;
        match event {
            // A log may have several sessions: a later process that reopens the log starts a new one.
            AuditEvent::Started(session) => self.session = Some(session),
            AuditEvent::Admitted(admission) => {
                let open = self.open_call(seq, run, admission, time);
                self.open.insert(open.admission.request.clone(), open);
            }
            AuditEvent::ToolAdmitted(admission) => {
                let AuditToolAdmissionEvent { call, tool, reserved, .. } = admission;
                let open = self.open_priced(seq, run, (TOOLS, call, tool, reserved), time);
                self.open.insert(open.admission.request.clone(), open);
            }
            AuditEvent::ToolSettled(settlement) => {
                return Ok(Some(self.settle_tool_call(seq, run, settlement, time)));
            }
            AuditEvent::ConnectAdmitted(admission) => {
                let AuditConnectAdmissionEvent { request, connection, reserved, .. } = admission;
                let call = (CONNECTIONS, request, connection, reserved);
                let open = self.open_priced(seq, run, call, time);
                self.open.insert(open.admission.request.clone(), open);
            }
            AuditEvent::ConnectSettled(settlement) => {
                return Ok(Some(self.settle_connect(seq, run, settlement, time)));
            }
            // Only a settlement completes a call; other records change nothing here.
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

    /// Returns an open call that has a price instead of tokens.
    fn open_priced(
        &self,
        seq: u64,
        run: String,
        (kind, request, name, reserved): (PricedKind, String, String, BudgetAmount),
        started: SystemTime,
    ) -> OpenCall {
        let (route, model) = (kind.route.to_owned(), Some(name));
        let admission = AuditAdmissionEvent { request, route, model, stream: false, reserved };
        let upstream = kind.upstream.to_owned();
        OpenCall { upstream, ..self.open_call(seq, run, admission, started) }
    }

    fn settle_tool_call(
        &mut self,
        seq: u64,
        run: String,
        settled: AuditToolSettlementEvent,
        time: SystemTime,
    ) -> CallUsage {
        let AuditToolSettlementEvent { call, tool, outcome, charged, .. } = settled;
        let call = (TOOLS, call, tool, BudgetAmount::default());
        self.settle_priced((seq, run), call, (call_outcome(outcome), 0, charged.cost), time)
    }

    fn settle_connect(
        &mut self,
        seq: u64,
        run: String,
        settled: AuditConnectSettlementEvent,
        time: SystemTime,
    ) -> CallUsage {
        let outcome = connect_outcome(settled.outcome);
        let call = (CONNECTIONS, settled.request, settled.connection, BudgetAmount::default());
        self.settle_priced((seq, run), call, (outcome, settled.status, settled.charged.cost), time)
    }

    fn settle_priced(
        &mut self,
        (seq, run): (u64, String),
        call: (PricedKind, String, String, BudgetAmount),
        (outcome, status, cost): (CallOutcome, u16, Nanodollars),
        time: SystemTime,
    ) -> CallUsage {
        let open = self.open.remove(&call.1);
        let open = open.unwrap_or_else(|| self.open_priced(seq, run, call, time));
        self.charged = self.charged + cost;
        // The price is exact, so it is no estimate.
        let usage = TokenUsage { source: UsageSource::Provider, ..TokenUsage::default() };
        CallUsage { outcome, status, usage, cost, ..open.into_lost(time) }
    }

    fn settle_call(
        &mut self,
        seq: u64,
        run: String,
        settled: &AuditSettlementEvent,
        time: SystemTime,
    ) -> CallUsage {
        let open = self.open.remove(&settled.request).unwrap_or_else(|| {
            // A settlement without an admission is a fault of the gateway, but the call was charged all the same.
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
            // The defaults of a call without a settlement; `into_settled` replaces them.
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

/// Returns the outcome of a call to a model that is like the outcome of a tool.
fn call_outcome(outcome: ToolOutcome) -> CallOutcome {
    match outcome {
        ToolOutcome::Completed => CallOutcome::Completed,
        ToolOutcome::Failed => CallOutcome::UpstreamFailed,
        ToolOutcome::TimedOut => CallOutcome::UpstreamTimeout,
        ToolOutcome::OutputTooLarge => CallOutcome::CutOff,
        ToolOutcome::ShutDown => CallOutcome::ShutDown,
        ToolOutcome::Crashed => CallOutcome::Crashed,
        ToolOutcome::NotSent => CallOutcome::NotSent,
    }
}

/// Returns the outcome of a call to a model that is like the outcome of a request over a connection.
fn connect_outcome(outcome: ConnectOutcome) -> CallOutcome {
    match outcome {
        ConnectOutcome::Completed => CallOutcome::Completed,
        ConnectOutcome::UpstreamFailed | ConnectOutcome::AddressRefused => {
            CallOutcome::UpstreamFailed
        }
        ConnectOutcome::TimedOut => CallOutcome::UpstreamTimeout,
        ConnectOutcome::ClientGone => CallOutcome::ClientGone,
        ConnectOutcome::BudgetCut
        | ConnectOutcome::Denied
        | ConnectOutcome::CredentialEchoed
        | ConnectOutcome::EncodedResponse => CallOutcome::CutOff,
        ConnectOutcome::ShutDown => CallOutcome::ShutDown,
        ConnectOutcome::Crashed => CallOutcome::Crashed,
        ConnectOutcome::NotSent => CallOutcome::NotSent,
    }
}

/// The upstream and the route of calls with a price, in the billing store.
#[derive(Clone, Copy)]
struct PricedKind {
    upstream: &'static str,
    route: &'static str,
}

const TOOLS: PricedKind = PricedKind { upstream: "tools", route: "tool" };
const CONNECTIONS: PricedKind = PricedKind { upstream: "connections", route: "connect" };

pub(super) fn serialize_rfc3339<S: Serializer>(
    time: &SystemTime,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&timestamp::format_rfc3339_millis(*time))
}
