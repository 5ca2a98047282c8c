//! One request and its response, from first byte to last, settled exactly once.
//!
//! Dropping a [`GatewayExchange`] settles the budget and writes the records, so a cancelled call is
//! accounted for like any other call.

mod charge;
mod error_body;
mod observed_body;
mod pending_response;
mod report;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Method, Response};

use super::RunGateway;
use super::admission::CallAdmission;
use super::audience::Audience;
use super::budget_headers;
use super::dropped_fields;
use super::limits::RequestPermit;
use super::local_response::{ClientReply, ResponseBody};
use super::policy::GatewayPolicy;
use super::read_body::{BodyReadError, IncomingRequestBody, RequestBody};
use super::rejection::{CallRejection, audit_outcome};
use crate::base::cancel_watch::CancelWatch;
use crate::base::header_lines::HeaderLines;
use crate::gateway::run::RequestId;
use crate::gateway::upstream::headers::{self, ClientHead, ResponseMetadata, UpstreamRequestHead};
use crate::gateway::upstream::redactor::SecretRedactor;
use crate::gateway::upstream::{self, ProviderAnswer};
use crate::llm::budget::{
    BudgetAmount, BudgetReservation, Nanodollars, OpenCallPermit, TokenUsage, Tokens, UsageSource,
};
use crate::llm::protocol::{GatewayRoute, LlmProtocol};
use crate::llm::request::{FieldChangeKind, LlmCall, ScannedBody};
use crate::llm::response::{CallAllowance, ResponseFormat, ResponseObserver, UsageChunkMode};
use crate::telemetry::audit::records::{CallAdmittedRecord, CallOutcome};
use crate::telemetry::metrics::{self, InFlightGuard};

use charge::SilenceTimer;
use error_body::UpstreamErrorBody;
pub use observed_body::{ObservedBody, ResponseBodyError};

/// A request being served. The exchange lives in the response's body and ends with that body.
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub struct GatewayExchange {
    gateway: Arc<RunGateway>,
    /// The policy that was in force when the request arrived.
    pub(super) policy: Arc<GatewayPolicy>,
    pub(super) id: RequestId,
    method: Method,
    /// The ID of the calling process, if known.
    pid: Option<u32>,
    route: Option<GatewayRoute>,
    /// The recipient of a rejection: the client's protocol and family.
    audience: Audience,
    started: Instant,
    request_bytes: u64,
    model: Option<Box<str>>,
    /// The rules that matched, or the rule that rejected the call.
    rules: Vec<Arc<str>>,
    stage: ExchangeStage,
    status: u16,
    code: Option<&'static str>,
    outcome: CallOutcome,
    facts: ResponseMetadata,
    first_byte: Option<Duration>,
    last_frame: Instant,
    response_bytes: u64,
    frames: u64,
    reported: Option<TokenUsage>,
    /// See [`ResponseObserver::output_lower_bound`].
    at_least: Tokens,
    /// See [`ResponseObserver::output_estimate`].
    estimate: Tokens,
    cost: Option<Nanodollars>,
    /// The time at which the call was sent upstream.
    sent: Option<Instant>,
    silence: SilenceTimer,
    /// The upstream's own status; `status` is the status that the client sees.
    upstream_status: Option<u16>,
    /// The names of the fields that were not sent upstream, as the response header has them.
    dropped: Option<Box<str>>,
    /// The number of answers that the model writes.
    choices: u32,
    is_stream: bool,
    /// True once the response has announced its own end.
    has_finished: bool,
    /// True if the response is complete and did not end with an error.
    is_whole: bool,
    /// True if the observer cannot read the response's format, or lost its place in the response.
    is_unreadable: bool,
    /// The model's metrics, set once the upstream has accepted the model's name.
    metered: Option<Arc<metrics::ModelMetrics>>,
    /// The watch that reports an operator's abort of the call.
    cut: CancelWatch,
    /// The request's permit among those in flight, with the bytes of its body. Held until the exchange
    /// ends, drains included.
    permit: Option<RequestPermit>,
    /// The redactor of the upstream's key, set if the response is an error or may become an error.
    redactor: Option<Box<SecretRedactor>>,
    /// The body of a response that is an error.
    error_body: Option<Box<UpstreamErrorBody>>,
    /// The estimated output tokens in the text of an error.
    error_tokens: Tokens,
    _in_flight: InFlightGuard,
}

/// The progress of a request.
enum ExchangeStage {
    /// No budget is reserved. If the exchange ends here, the request was rejected.
    Arrived,
    /// The request holds a permit among the open calls, and its body is being read. If the exchange
    /// ends here, the request was rejected.
    Entered(OpenCallPermit),
    /// The admission is being written to the audit log. If the exchange ends here, the reservation is
    /// released; the audit log itself settles the record.
    Admitting(BudgetReservation),
    /// The admission is recorded and the budget is reserved. If the exchange ends here, the call must
    /// be settled.
    Admitted(BudgetReservation),
    /// The admission was recorded, but the call never reached the upstream and its reservation was
    /// released.
    Undelivered,
    /// The gateway itself answered the request.
    Answered,
}

impl GatewayExchange {
    pub(super) fn begin(gateway: Arc<RunGateway>, pid: Option<u32>, method: &Method) -> Box<Self> {
        let in_flight = gateway.metrics.track_request();
        let cut = CancelWatch::new(gateway.run.control.abort_token());
        let now = Instant::now();
        Box::new(Self {
            policy: gateway.policy.load_full(),
            gateway,
            id: RequestId::new(),
            method: method.clone(),
            pid,
            route: None,
            audience: LlmProtocol::Chat.into(),
            started: now,
            request_bytes: 0,
            model: None,
            rules: vec![],
            stage: ExchangeStage::Arrived,
            status: 0,
            code: None,
            // The default outcome. A dropped exchange without another outcome means that the client
            // disconnected.
            outcome: CallOutcome::ClientGone,
            facts: ResponseMetadata::default(),
            first_byte: None,
            last_frame: now,
            response_bytes: 0,
            frames: 0,
            reported: None,
            at_least: Tokens::ZERO,
            estimate: Tokens::ZERO,
            cost: None,
            sent: None,
            silence: SilenceTimer::start_at(now),
            upstream_status: None,
            dropped: None,
            choices: 1,
            is_stream: false,
            has_finished: false,
            is_whole: false,
            is_unreadable: false,
            metered: None,
            cut,
            permit: None,
            redactor: None,
            error_body: None,
            error_tokens: Tokens::ZERO,
            _in_flight: in_flight,
        })
    }

    pub(super) fn gateway(&self) -> &RunGateway {
        &self.gateway
    }

    pub(super) fn set_route(&mut self, route: GatewayRoute, head: &impl ClientHead) {
        self.route = Some(route);
        self.audience = Audience::of(route.protocol(), head);
    }

    /// Admits the request by its head alone.
    pub(super) fn enter_call(&mut self, route: GatewayRoute) -> Result<(), CallRejection> {
        // 1. The operator's switch, 2. the bound of requests in flight, 3. the budget. After a rejection, the
        // drop of the exchange releases the permits of the earlier steps.
        self.gateway.run.control.check_accepting()?;
        self.permit = Some(self.gateway.capacity.admit_request()?);
        self.stage = ExchangeStage::Entered(self.call_admission().enter_call(route)?);
        Ok(())
    }

    /// Reads the body of a request that was admitted by its head.
    pub(super) async fn read_body(
        &mut self,
        route: GatewayRoute,
        body: &mut IncomingRequestBody<impl RequestBody>,
    ) -> Result<ScannedBody, BodyReadError> {
        let permit = self.permit.as_mut().expect("a request that was let in has a place");
        let body = body.read_body(route, &self.policy.config, permit).await?;
        self.request_bytes = body.len();
        Ok(body)
    }

    /// Removes the upstream's key from a frame of an error's body or of an error event.
    ///
    /// Redaction starts with the first frame that may belong to an error and continues to the end of
    /// the response. A frame that ends inside an event counts, because that event may become an error.
    fn redact_frame(&mut self, frame: Bytes, may_be_error: bool) -> Bytes {
        if may_be_error && self.redactor.is_none() {
            self.redact_errors();
        }
        match &mut self.redactor {
            Some(redactor) => redactor.redact_frame(&frame),
            None => frame,
        }
    }

    fn redact_errors(&mut self) {
        self.redactor = Some(Box::new(self.policy.overwrites.redactor()));
    }

    /// Releases the permit for the body's bytes, once the body is no longer held.
    fn release_body(&mut self) {
        if let Some(permit) = &mut self.permit {
            permit.release_bytes();
        }
    }

    /// Adds the `traceparent` header, which names the call's span in the run's trace to the upstream.
    pub(super) fn set_traceparent(&self, head: &mut UpstreamRequestHead) {
        if let Some(trace) = &self.gateway.run.trace
            && self.policy.config.headers.traceparent
        {
            head.set_traceparent(&trace.traceparent(&self.id.span_id()));
        }
    }

    /// Returns the policy, identity and ledger that decide whether the call is admitted.
    pub(super) fn call_admission(&self) -> CallAdmission<'_> {
        let run = &self.gateway.run;
        CallAdmission { policy: &self.policy, identity: &run.identity, ledger: &run.ledger }
    }

    pub(super) fn set_matched_rules(&mut self, rules: Vec<Arc<str>>) {
        self.rules = rules;
    }

    /// Reserves the budget for the call and records the admission. Nothing may be sent upstream before
    /// this function returns `Ok`.
    ///
    /// The steps are:
    ///
    /// 1. Check that the operator lets calls begin.
    /// 2. Reserve the budget. The permit of the open call becomes part of the reservation.
    /// 3. Write the admission to the audit log and wait until the record is durable.
    /// 4. Check again that the operator lets calls begin. If not, settle the record as not sent.
    pub(super) async fn admit_call(
        &mut self,
        route: GatewayRoute,
        call: &mut LlmCall,
    ) -> Result<(), CallRejection> {
        self.gateway.run.control.check_accepting()?;
        let gateway = Arc::clone(&self.gateway);
        let ExchangeStage::Entered(entry) =
            std::mem::replace(&mut self.stage, ExchangeStage::Arrived)
        else {
            unreachable!("a call is admitted once, after it was let in");
        };
        // The stage is `Arrived` until the reservation exists, so an error here is recorded as a
        // refusal.
        let reservation = self.call_admission().reserve_budget(entry, route, call);
        // Take the model before `?`, because the refusal's record names the model.
        self.model = call.model.take();
        let reservation = reservation?;
        let reserved = reservation.granted_amount();
        // If the client disconnects during the await below, `drop` finds this stage and releases the
        // reservation.
        self.stage = ExchangeStage::Admitting(reservation);
        let record = CallAdmittedRecord {
            request: self.id.as_str(),
            route: route.name(),
            model: self.model.as_deref(),
            rules: &self.rules,
            stream: call.stream,
            request_bytes: self.request_bytes,
            pid: self.pid,
            reserved,
        };
        let admitted = gateway.run.audit.record_admission(&record).await;
        if let ExchangeStage::Admitting(reservation) =
            std::mem::replace(&mut self.stage, ExchangeStage::Arrived)
        {
            match admitted {
                // The operator may have paused the run while the record was written; no call may go out
                // after that.
                Ok(()) => match gateway.run.control.check_accepting() {
                    Ok(()) => self.stage = ExchangeStage::Admitted(reservation),
                    Err(shut) => {
                        reservation.release_unspent();
                        // The record exists, so this call must be settled and not recorded as a
                        // refusal.
                        self.stage = ExchangeStage::Undelivered;
                        self.outcome = CallOutcome::NotSent;
                        return Err(shut.into());
                    }
                },
                Err(error) => {
                    reservation.release_unspent();
                    return Err(error.into());
                }
            }
        }
        // Nothing below can fail, so the counters include only admitted calls.
        gateway.run.counts.admitted.fetch_add(1, Ordering::Relaxed);
        for change in call.changes.iter().filter(|change| change.what == FieldChangeKind::Dropped) {
            gateway.metrics.record_dropped_field(route, change.why.as_str());
        }
        self.dropped = dropped_fields::named(&call.changes);
        self.is_stream = call.stream;
        self.choices = call.choices;
        let now = Instant::now();
        self.sent = Some(now);
        self.silence = SilenceTimer::start_at(now);
        Ok(())
    }

    /// Ends the exchange with a response of the gateway itself, which costs nothing.
    pub(super) fn finish_local(mut self: Box<Self>, response: &Response<String>) {
        self.status = response.status().as_u16();
        self.response_bytes = response.body().len() as u64;
        self.outcome = CallOutcome::Completed;
        self.stage = ExchangeStage::Answered;
    }

    /// Ends the exchange with an error in the shape of the route's protocol.
    pub(super) fn finish_rejected(mut self: Box<Self>, rejection: &CallRejection) -> ClientReply {
        let response = rejection.to_response(self.audience);
        self.status = response.status().as_u16();
        self.response_bytes = response.body().len() as u64;
        self.code = Some(rejection.code());
        if let CallRejection::UnreadableBody(BodyReadError::Interrupted(_)) = rejection
            && self.early_end() == CallOutcome::ShutDown
        {
            // The shutdown closed the connection of an HTTP/2 request; the client did not leave.
            self.code = Some(CallOutcome::ShutDown.as_str());
        }
        if let CallRejection::Aborted = rejection {
            self.outcome = CallOutcome::ShutDown;
        }
        if let CallRejection::UpstreamAuth = rejection {
            self.outcome = CallOutcome::UpstreamFailed;
            self.gateway.metrics.record_upstream_error(rejection.code());
            // The upstream's status shows that the upstream did nothing, so the call is charged no
            // tokens.
            self.reported =
                Some(TokenUsage { source: UsageSource::Provider, ..TokenUsage::default() });
        }
        if let CallRejection::Rule(refusal) = rejection {
            self.rules = vec![refusal.rule_name()];
        }
        if let CallRejection::Upstream(error) = rejection {
            self.set_upstream_error(error);
            self.gateway.metrics.record_upstream_error(error.code());
            self.gateway.upstream.failures().failed(error);
            // A reservation may be released only if no byte reached the upstream. After any other
            // failure the provider may bill the call, so `drop` settles that call.
            if error.is_certainly_undelivered()
                && let ExchangeStage::Admitted(reservation) =
                    std::mem::replace(&mut self.stage, ExchangeStage::Undelivered)
            {
                reservation.release_unspent();
                self.gateway.run.counts.unreached.fetch_add(1, Ordering::Relaxed);
            }
        }
        // The headers come last: a turn that was given back above is left again.
        let mut answer = ClientReply::own(response);
        self.add_budget_headers(&mut answer.fields);
        answer
    }

    /// Passes the upstream's response to the client. The exchange ends when the response's body ends.
    fn stream_response(
        mut self: Box<Self>,
        usage_chunk: UsageChunkMode,
        answer: ProviderAnswer,
    ) -> ClientReply {
        let ProviderAnswer { status, mut fields, body } = answer;
        // An encoded response can be neither counted nor redacted, so no byte of its body reaches the
        // client.
        if status.is_success() && is_encoded(&fields) {
            return self.finish_rejected(
                &upstream::UpstreamError::Malformed(ENCODED_RESPONSE_MESSAGE).into(),
            );
        }
        self.status = status.as_u16();
        self.upstream_status = Some(self.status);
        if status.is_success()
            // A response of a free route does not prove that the model exists: any name gets one.
            && self.route.is_some_and(GatewayRoute::spends_tokens)
            && let Some(model) = &self.model
        {
            self.metered = Some(self.gateway.metrics.model_metrics(model));
        }
        let format = ResponseFormat::from_headers(
            fields.get("content-type"),
            fields.get("content-encoding"),
        );
        if status.is_client_error() || status.is_server_error() {
            self.redact_errors();
            let is_json = format == ResponseFormat::Json;
            let error_body = UpstreamErrorBody::new(self.audience.protocol, status, is_json);
            self.error_body = Some(Box::new(error_body));
        }
        // The order matters: remove headers that reflect the upstream's key first, before a value of
        // them reaches the records.
        self.policy.overwrites.remove_reflected(&mut fields);
        self.facts = headers::filter_for_client(&mut fields, &self.policy.config.headers);
        if let Some(dropped) = &self.dropped {
            fields.push(dropped_fields::NAME, dropped.as_bytes());
        }
        self.add_budget_headers(&mut fields);
        self.is_unreadable = format == ResponseFormat::Opaque;
        // A client that requested a stream may get one JSON body, for example an error.
        self.is_stream &= format != ResponseFormat::Json;
        let mut observer =
            ResponseObserver::new(self.route.unwrap_or(GatewayRoute::Models), format, usage_chunk);
        if let Some(allowance) = self.call_allowance() {
            observer = observer.with_allowance(allowance);
        }
        ClientReply {
            status,
            fields,
            body: ResponseBody::Observed(ObservedBody::new(body, observer, self)),
        }
    }

    /// Adds the headers with the budget that remains beside this call.
    ///
    /// The call's turn counts as spent. The call's tokens do not count, because their number is not
    /// known yet.
    fn add_budget_headers(&self, fields: &mut HeaderLines) {
        if !self.route.is_some_and(GatewayRoute::spends_tokens) {
            return;
        }
        let own = match &self.stage {
            ExchangeStage::Admitted(reservation) => {
                BudgetAmount { turns: 0, ..reservation.granted_amount() }
            }
            _ => BudgetAmount::default(),
        };
        budget_headers::insert_budget_headers(
            fields,
            &self.gateway.run.ledger.status_excluding(own),
        );
    }

    /// Returns the limits that the response must keep. `None` if no budget limits the output.
    fn call_allowance(&self) -> Option<CallAllowance> {
        let ExchangeStage::Admitted(reservation) = &self.stage else { return None };
        let (output, input) = (reservation.output_limit()?, reservation.granted_amount().input);
        Some(CallAllowance { input, output, cutoff: self.policy.config.cutoff })
    }

    fn set_upstream_error(&mut self, error: &upstream::UpstreamError) {
        self.code = Some(error.code());
        self.outcome = audit_outcome(error);
    }

    /// Counts a frame that the upstream sent.
    fn count_frame(&mut self, length: usize) {
        let now = Instant::now();
        // The first frame has no gap; the time before that frame is recorded as the time to the first
        // byte.
        let gap = self.first_byte.map(|_| now.duration_since(self.last_frame));
        let model = self.metered.as_deref();
        if gap.is_none() {
            let elapsed = now.duration_since(self.started);
            self.first_byte = Some(elapsed);
            if let Some(model) = model {
                model.record_first_byte(elapsed);
            }
        }
        self.gateway.metrics.record_frame(model, gap, length);
        self.last_frame = now;
        self.frames += 1;
        self.response_bytes += length as u64;
    }

    /// Returns the outcome of an exchange that is dropped before anything else has ended it.
    ///
    /// A forced shutdown drops calls as a disconnecting client does. Only the abort token tells the two
    /// cases apart.
    fn early_end(&self) -> CallOutcome {
        if self.gateway.tasks.abort_token().is_cancelled() {
            CallOutcome::ShutDown
        } else {
            CallOutcome::ClientGone
        }
    }

    fn metered_model(&self) -> Arc<metrics::ModelMetrics> {
        let seen = self.metered.clone();
        seen.unwrap_or_else(|| {
            self.gateway.metrics.existing_model_metrics(self.model.as_deref().unwrap_or_default())
        })
    }
}

impl Drop for GatewayExchange {
    fn drop(&mut self) {
        if self.outcome == CallOutcome::ClientGone {
            self.outcome = self.early_end();
        }
        let now = Instant::now();
        // Each stage has one way to end. The reservation moves out of the stage, so it is settled or
        // released exactly once.
        let usage = match std::mem::replace(&mut self.stage, ExchangeStage::Answered) {
            ExchangeStage::Arrived | ExchangeStage::Entered(_) => {
                self.record_refusal(self.code.unwrap_or(self.outcome.as_str()));
                None
            }
            ExchangeStage::Admitting(reservation) => {
                reservation.release_unspent();
                self.record_refusal(self.outcome.as_str());
                None
            }
            ExchangeStage::Answered => {
                self.gateway.metrics.record_local_answer(self.route, self.status);
                None
            }
            ExchangeStage::Undelivered => {
                self.gateway.metrics.record_local_answer(self.route, self.status);
                self.settle_call(TokenUsage::default(), BudgetAmount::default(), now);
                None
            }
            ExchangeStage::Admitted(reservation) => {
                let usage = self.usage_at(reservation.granted_amount(), now);
                let charged = reservation.settle_usage(&usage);
                self.settle_call(usage, charged, now);
                Some(usage)
            }
        };
        self.emit_telemetry(usage, now);
    }
}

/// Returns true if a response is encoded. The gateway sends `accept-encoding: identity`, so a response
/// must not be encoded.
fn is_encoded(fields: &HeaderLines) -> bool {
    fields.get_all("content-encoding").any(|encoding| !encoding.eq_ignore_ascii_case(b"identity"))
}

const ENCODED_RESPONSE_MESSAGE: &str =
    "an encoded response, although the gateway asked for `identity`";
