//! One request and its response, from first byte to last, settled exactly once.
//!
//! An exchange is in one state at a time ([`ExchangeState`]), and a state has the data that only this
//! state needs. Dropping a [`GatewayExchange`] settles the budget and writes the records, so a cancelled
//! call is accounted for like any other call.

mod budget_wait;
mod charge;
mod client_reply;
mod error_body;
mod observed_body;
mod pending_response;
mod provider_response;
mod report;
mod silence_timer;

use std::future::{Future, poll_fn};
use std::mem;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::Instant;

use bytes::Bytes;
use http::{Method, Response};

use super::admission::CallAdmission;
use super::audience::Audience;
use super::budget_headers;
use super::dropped_fields;
use super::limits::RequestPermit;
use super::policy::GatewayPolicy;
use super::read_body::{BodyReadError, IncomingRequestBody, RequestBody, scan_whole_body};
use super::rejection::CallRejection;
use super::{ReservedRequest, RunGateway};
use crate::base::cancel_watch::CancelWatch;
use crate::base::header_lines::HeaderLines;
use crate::base::rope::SplicedBytes;
use crate::gateway::run::RequestId;
use crate::gateway::upstream::headers::{ClientHead, UpstreamRequestHead};
use crate::gateway::upstream::{self, PendingAnswer, ProviderAnswer, UpstreamCall};
use crate::llm::budget::{
    BudgetAmount, BudgetReservation, OpenCallPermit, TokenUsage, UsageSource,
};
use crate::llm::protocol::{GatewayRoute, LlmProtocol};
use crate::llm::request::{FieldChange, FieldChangeKind, LlmCall, ScannedBody};
use crate::llm::response::UsageChunkMode;
use crate::telemetry::audit::AuditError;
use crate::telemetry::audit::records::CallOutcome;
use crate::telemetry::metrics::InFlightGuard;

pub(super) use budget_wait::UnfundedCall;
pub use client_reply::{ClientReply, ResponseBody};
pub use observed_body::ObservedBody;
pub(super) use pending_response::PendingResponse;
use provider_response::ProviderResponse;
pub use provider_response::ResponseBodyError;
use report::ExchangeEnd;

/// A request being served. The exchange lives in the response's body and ends with that body.
pub struct GatewayExchange {
    context: ExchangeContext,
    state: ExchangeState,
    _in_flight: InFlightGuard,
}

/// The part of an exchange that every state needs.
struct ExchangeContext {
    gateway: Arc<RunGateway>,
    /// The policy that was in force when the request arrived.
    policy: Arc<GatewayPolicy>,
    id: RequestId,
    method: Method,
    /// The ID of the calling process, if known.
    pid: Option<u32>,
    route: Option<GatewayRoute>,
    /// The recipient of a rejection: the client's protocol and family.
    audience: Audience,
    started: Instant,
    request_bytes: u64,
    model: Option<Arc<str>>,
    /// The rules that matched, or the rule that rejected the call.
    rules: Vec<Arc<str>>,
    /// The status that the client sees. 0 if the client got no response.
    status: u16,
    code: Option<&'static str>,
    /// `None` until something has ended the exchange.
    outcome: Option<CallOutcome>,
    response_bytes: u64,
    /// The watch that reports an operator's abort of the call. The calls of a task that serves one call after another
    /// share the watch.
    abort: Arc<CancelWatch>,
}

/// The progress of a request. Only the functions of this file change the state.
enum ExchangeState {
    /// No budget is reserved. If the exchange ends here, the request was rejected.
    Received,
    /// The admission is being written to the audit log. If the exchange ends here, the reservation is
    /// released; the audit log itself settles the record.
    Admitting(BudgetReservation),
    /// The admission is recorded and the call goes upstream. The response is there once the upstream has
    /// answered. If the exchange ends here, the call must be settled.
    Sent(BudgetReservation, SentCall, Option<Box<ProviderResponse>>),
    /// The admission was recorded, but the call never reached the upstream and its reservation was
    /// released. `None` if the call was not even sent.
    Undelivered(Option<SentCall>),
    /// The gateway itself answered the request.
    Answered,
}

/// The permits of a call that was admitted by its head. Only such a call may have its body read and its
/// budget reserved.
pub(super) struct EnteredCall {
    route: GatewayRoute,
    open_call: OpenCallPermit,
    request: RequestPermit,
}

/// A call whose budget is reserved, in the form in which it goes upstream.
pub(super) struct ReservedCall {
    route: GatewayRoute,
    permit: RequestPermit,
    /// The amount of the reservation.
    reserved: BudgetAmount,
    head: UpstreamRequestHead,
    body: SplicedBytes,
    is_stream: bool,
    choices: u32,
    usage_chunk: UsageChunkMode,
    changes: Vec<FieldChange>,
}

/// A call whose budget is reserved and whose admission is durable. Only this file makes such a call, and no other call
/// can be sent.
pub(super) struct AdmittedCall {
    /// Nothing is sent before the first poll.
    answer: PendingAnswer,
    usage_chunk: UsageChunkMode,
}

/// The result of an attempt to admit a call without a wait.
pub(super) enum AdmissionAttempt {
    Done(Result<AdmittedCall, CallRejection>),
    WaitsForDisk(ReservedCall),
}

/// A call that was admitted and sent upstream.
struct SentCall {
    route: GatewayRoute,
    sent: Instant,
    /// True if the client requested a stream.
    is_stream: bool,
    /// The number of answers that the model writes.
    choices: u32,
    /// The names of the fields that were not sent upstream, as the response header has them.
    dropped: Option<Box<str>>,
    /// The usage, if it is known although there is no response that reports it.
    known_usage: Option<TokenUsage>,
    /// The request's permit among those in flight, with the bytes of its body. Held until the exchange
    /// ends, drains included.
    permit: RequestPermit,
}

impl EnteredCall {
    pub(super) fn route(&self) -> GatewayRoute {
        self.route
    }
}

impl GatewayExchange {
    /// Begins the exchange of a request. `policy` is the policy in force, and `abort` the result of
    /// [`RunGateway::watch_abort`].
    pub(super) fn begin(
        gateway: Arc<RunGateway>,
        policy: Arc<GatewayPolicy>,
        abort: Arc<CancelWatch>,
        pid: Option<u32>,
        method: &Method,
    ) -> Box<Self> {
        let in_flight = gateway.metrics.track_request();
        let context = ExchangeContext {
            policy,
            gateway,
            id: RequestId::new(),
            method: method.clone(),
            pid,
            route: None,
            audience: LlmProtocol::Chat.into(),
            started: Instant::now(),
            request_bytes: 0,
            model: None,
            rules: vec![],
            status: 0,
            code: None,
            outcome: None,
            response_bytes: 0,
            abort,
        };
        Box::new(Self { context, state: ExchangeState::Received, _in_flight: in_flight })
    }

    pub(super) fn gateway(&self) -> &RunGateway {
        &self.context.gateway
    }

    pub(super) fn policy(&self) -> &Arc<GatewayPolicy> {
        &self.context.policy
    }

    pub(super) fn id(&self) -> &RequestId {
        &self.context.id
    }

    pub(super) fn set_route(&mut self, route: GatewayRoute, head: &impl ClientHead) {
        self.context.route = Some(route);
        self.context.audience = Audience::of(route.protocol(), head);
    }

    /// Admits the request by its head alone.
    pub(super) fn enter_call(&self, route: GatewayRoute) -> Result<EnteredCall, CallRejection> {
        // 1. The operator's switch, 2. the bound of requests in flight, 3. the budget. After a rejection, the
        // drop of an earlier step's permit releases that permit.
        let gateway = self.gateway();
        gateway.run.control.check_accepting()?;
        let request = gateway.capacity.admit_request()?;
        let open_call = self.call_admission().enter_call(route)?;
        Ok(EnteredCall { route, open_call, request })
    }

    /// Reads the body of a request that was admitted by its head. An abort of the run's calls ends the reading.
    pub(super) async fn read_body(
        &mut self,
        entered: &mut EnteredCall,
        body: &mut IncomingRequestBody<impl RequestBody>,
    ) -> Result<ScannedBody, CallRejection> {
        let ExchangeContext { policy, abort, .. } = &mut self.context;
        let body = {
            let read = body.read_body(entered.route, &policy.config, &mut entered.request);
            let mut read = pin!(read);
            // The body comes first: most bodies are there at once and need no wait for an abort.
            poll_fn(|cx| match read.as_mut().poll(cx) {
                Poll::Ready(body) => Poll::Ready(body.map_err(CallRejection::from)),
                Poll::Pending => abort.poll(cx).map(|()| Err(CallRejection::Aborted)),
            })
            .await?
        };
        self.context.request_bytes = body.len();
        Ok(body)
    }

    /// Scans the body of a request that was admitted by its head, if the body has arrived as a whole.
    pub(super) fn scan_whole_body(
        &mut self,
        entered: &mut EnteredCall,
        body: Bytes,
    ) -> Result<ScannedBody, CallRejection> {
        let EnteredCall { route, request, .. } = entered;
        let body = scan_whole_body(*route, body, &self.context.policy.config, request)?;
        self.context.request_bytes = body.len();
        Ok(body)
    }

    /// Adds the `traceparent` header, which names the call's span in the run's trace to the upstream.
    pub(super) fn set_traceparent(&self, head: &mut UpstreamRequestHead) {
        if let Some(trace) = &self.gateway().run.trace {
            head.set_traceparent(&self.policy().config.headers, trace.context(), self.id());
        }
    }

    /// Returns the policy, identity and ledger that decide whether the call is admitted.
    pub(super) fn call_admission(&self) -> CallAdmission<'_> {
        let run = &self.context.gateway.run;
        CallAdmission { policy: &self.context.policy, identity: &run.identity, ledger: &run.ledger }
    }

    /// Reserves the budget for a call, if the operator lets calls begin. The permit of the open call becomes
    /// part of the reservation. `rules` are the rules that matched.
    ///
    /// The caller must admit the call at once, with [`Self::admit_at_once`] or [`Self::admit_call`].
    pub(super) fn reserve_call(
        &mut self,
        entered: EnteredCall,
        head: UpstreamRequestHead,
        mut call: LlmCall,
        rules: Vec<Arc<str>>,
    ) -> Result<ReservedRequest, CallRejection> {
        let EnteredCall { route, open_call, request: permit } = entered;
        self.context.rules = rules;
        self.context.gateway.run.control.check_accepting()?;
        // The state is `Received` until the reservation exists, so an error here is recorded as a refusal.
        match self.call_admission().reserve_budget(open_call, route, &mut call) {
            Ok(reservation) => {
                let call = self.hold_reservation(reservation, (route, permit, head), call);
                Ok(ReservedRequest::Call(call))
            }
            Err(CallRejection::Budget(refusal)) if self.may_ask_about(&refusal) => {
                let unfunded = UnfundedCall { route, permit, head, call, refusal };
                Ok(ReservedRequest::Unfunded(Box::new(unfunded)))
            }
            Err(rejection) => {
                // The refusal's record names the model.
                self.context.model = call.model.take();
                Err(rejection)
            }
        }
    }

    /// Keeps the reservation of a call, and puts the call into the form in which it goes upstream.
    fn hold_reservation(
        &mut self,
        reservation: BudgetReservation,
        (route, permit, head): (GatewayRoute, RequestPermit, UpstreamRequestHead),
        mut call: LlmCall,
    ) -> ReservedCall {
        self.context.model = call.model.take();
        let reserved = reservation.granted_amount();
        // If the exchange is dropped before the admission is durable, `drop` finds this state and releases
        // the reservation.
        self.state = ExchangeState::Admitting(reservation);
        let changes = mem::take(&mut call.changes);
        let (is_stream, choices, usage_chunk) = (call.stream, call.choices, call.usage_chunk);
        let mut body = call.into_spliced();
        if self.context.gateway.run.audit.waits_for_disk() {
            body.release_read_buffer();
        }
        ReservedCall {
            route,
            permit,
            reserved,
            head,
            body,
            is_stream,
            choices,
            usage_chunk,
            changes,
        }
    }

    /// Admits a reserved call, if the admission does not wait for the disk. Otherwise the function does nothing and
    /// returns the call, which [`Self::admit_call`] admits.
    pub(super) fn admit_at_once(&mut self, call: ReservedCall) -> AdmissionAttempt {
        let audit = &self.context.gateway.run.audit;
        match audit.record_admission_at_once(&self.context.admission_record(&call)) {
            Some(recorded) => AdmissionAttempt::Done(self.finish_admission(call, recorded)),
            None => AdmissionAttempt::WaitsForDisk(call),
        }
    }

    /// Writes the admission of a reserved call to the audit log, and waits until the record is durable.
    pub(super) async fn admit_call(
        &mut self,
        call: Box<ReservedCall>,
    ) -> Result<AdmittedCall, CallRejection> {
        let audit = &self.context.gateway.run.audit;
        let recorded = audit.record_admission(&self.context.admission_record(&call)).await;
        self.finish_admission(*call, recorded)
    }

    /// Makes an admitted call of a reserved call whose admission was recorded.
    ///
    /// The operator must still let calls begin. If not, the record is settled as not sent.
    fn finish_admission(
        &mut self,
        call: ReservedCall,
        recorded: Result<(), AuditError>,
    ) -> Result<AdmittedCall, CallRejection> {
        let ExchangeState::Admitting(reservation) =
            mem::replace(&mut self.state, ExchangeState::Received)
        else {
            unreachable!("only this function ends the state, and it is called once");
        };
        if let Err(error) = recorded {
            reservation.release_unspent();
            return Err(error.into());
        }
        let gateway = &self.context.gateway;
        // The operator may have paused the run while the record was written; no call may go out after
        // that.
        if let Err(shut) = gateway.run.control.check_accepting() {
            reservation.release_unspent();
            // The record exists, so this call must be settled and not recorded as a refusal.
            self.state = ExchangeState::Undelivered(None);
            self.context.outcome = Some(CallOutcome::NotSent);
            return Err(shut.into());
        }
        // Nothing below can fail, so the counters include only admitted calls.
        gateway.run.counts.admitted.fetch_add(1, Ordering::Relaxed);
        let is_dropped = |change: &&FieldChange| change.what == FieldChangeKind::Dropped;
        for change in call.changes.iter().filter(is_dropped) {
            gateway.metrics.record_dropped_field(call.route, change.why.as_str());
        }
        let deadline = reservation.deadline().map(Into::into);
        let now = Instant::now();
        let sent = SentCall {
            route: call.route,
            sent: now,
            is_stream: call.is_stream,
            choices: call.choices,
            dropped: dropped_fields::named(&call.changes),
            known_usage: None,
            permit: call.permit,
        };
        self.state = ExchangeState::Sent(reservation, sent, None);
        let (head, body, begun) = (call.head, call.body, now.into());
        let answer = gateway.upstream.send_call(UpstreamCall { head, body, deadline, begun });
        Ok(AdmittedCall { answer, usage_chunk: call.usage_chunk })
    }

    /// Ends the exchange with a response of the gateway itself, which costs nothing.
    pub(super) fn finish_local(mut self: Box<Self>, response: &Response<Bytes>) {
        self.context.set_own_response(response);
        self.context.outcome = Some(CallOutcome::Completed);
        self.state = ExchangeState::Answered;
    }

    /// Ends the exchange with an error in the shape of the route's protocol.
    pub(super) fn finish_rejected(mut self: Box<Self>, rejection: &CallRejection) -> ClientReply {
        let context = &mut self.context;
        let response = rejection.to_response(context.audience);
        context.set_own_response(&response);
        context.code = Some(rejection.code());
        match rejection {
            CallRejection::UnreadableBody(BodyReadError::Interrupted(_))
                if context.early_end() == CallOutcome::ShutDown =>
            {
                // The shutdown closed the connection of an HTTP/2 request; the client did not leave.
                context.code = Some(CallOutcome::ShutDown.as_str());
            }
            CallRejection::Aborted => context.outcome = Some(CallOutcome::ShutDown),
            CallRejection::Rule(refusal) => context.rules = vec![refusal.rule_name()],
            CallRejection::UpstreamAuth => {
                context.outcome = Some(CallOutcome::UpstreamFailed);
                context.gateway.metrics.record_upstream_error(rejection.code());
                // The upstream's status shows that the upstream did nothing, so the call is charged no
                // tokens.
                if let ExchangeState::Sent(_, sent, _) = &mut self.state {
                    let source = UsageSource::Provider;
                    sent.known_usage = Some(TokenUsage { source, ..TokenUsage::default() });
                }
            }
            CallRejection::Upstream(error) => {
                context.record_upstream_failure(error);
                // A reservation may be released only if no byte reached the upstream. After any other
                // failure the provider may bill the call, so `drop` settles that call.
                if error.is_certainly_undelivered() {
                    self.release_undelivered();
                }
            }
            _ => {}
        }
        // The headers come last: a turn that was given back above is left again.
        let mut answer = ClientReply::own(response);
        self.add_budget_headers(&mut answer.fields);
        answer
    }

    /// Gives back the reservation of a call of which no byte reached the upstream.
    fn release_undelivered(&mut self) {
        self.state = match mem::replace(&mut self.state, ExchangeState::Received) {
            ExchangeState::Sent(reservation, sent, _) => {
                reservation.release_unspent();
                self.gateway().run.counts.unreached.fetch_add(1, Ordering::Relaxed);
                ExchangeState::Undelivered(Some(sent))
            }
            other => other,
        };
    }

    /// Passes the upstream's response to the client. The exchange ends when the response's body ends.
    fn stream_response(
        mut self: Box<Self>,
        usage_chunk: UsageChunkMode,
        mut answer: ProviderAnswer,
    ) -> ClientReply {
        let policy = &self.context.policy;
        let facts =
            policy.injected_headers.filter_response(&mut answer.fields, &policy.config.headers);
        // An encoded response can be neither counted nor redacted, so no byte of its body reaches the
        // client.
        if answer.status.is_success() && facts.is_encoded {
            return self.finish_rejected(
                &upstream::UpstreamError::Malformed(ENCODED_RESPONSE_MESSAGE).into(),
            );
        }
        let ExchangeState::Sent(reservation, sent, response) = &mut self.state else {
            unreachable!("only a call that was sent is answered");
        };
        let status = answer.status;
        let (mut fields, begun) =
            self.context.begin_response((reservation, sent), usage_chunk, answer, facts);
        *response = Some(begun);
        self.context.status = status.as_u16();
        self.add_budget_headers(&mut fields);
        ClientReply { status, fields, body: ResponseBody::Observed(ObservedBody::new(self)) }
    }

    /// Adds the headers with the budget that remains beside this call.
    ///
    /// The call's turn counts as spent. The call's tokens do not count, because their number is not
    /// known yet.
    fn add_budget_headers(&self, fields: &mut HeaderLines) {
        if !self.context.route.is_some_and(GatewayRoute::spends_tokens) {
            return;
        }
        let own = match &self.state {
            ExchangeState::Sent(reservation, ..) => {
                BudgetAmount { turns: 0, ..reservation.granted_amount() }
            }
            _ => BudgetAmount::default(),
        };
        budget_headers::insert_budget_headers(
            fields,
            &self.gateway().run.ledger.remainder_excluding(own),
        );
    }
}

impl ExchangeContext {
    fn set_own_response(&mut self, response: &Response<impl AsRef<[u8]>>) {
        self.status = response.status().as_u16();
        self.response_bytes = response.body().as_ref().len() as u64;
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
}

impl Drop for GatewayExchange {
    fn drop(&mut self) {
        let context = &self.context;
        let outcome = context.outcome.unwrap_or_else(|| context.early_end());
        let now = Instant::now();
        let duration = now.duration_since(context.started);
        let mut end = ExchangeEnd { outcome, now, duration, sent: None, response: None };
        // Each state has one way to end. The reservation moves out of the state, so it is settled or
        // released exactly once.
        match mem::replace(&mut self.state, ExchangeState::Answered) {
            ExchangeState::Received => {
                context.record_refusal(outcome);
                context.emit_telemetry(&end, None);
            }
            ExchangeState::Admitting(reservation) => {
                reservation.release_unspent();
                context.record_refusal(outcome);
                context.emit_telemetry(&end, None);
            }
            ExchangeState::Answered => {
                context.gateway.metrics.record_local_answer(context.route, context.status);
                context.emit_telemetry(&end, None);
            }
            ExchangeState::Undelivered(sent) => {
                end.sent = sent.as_ref();
                context.gateway.metrics.record_local_answer(context.route, context.status);
                context.record_settlement(&end, TokenUsage::default(), BudgetAmount::default());
                context.emit_telemetry(&end, None);
            }
            ExchangeState::Sent(reservation, sent, response) => {
                (end.sent, end.response) = (Some(&sent), response.as_deref());
                let usage = match &response {
                    Some(response) => {
                        context.answered_usage((&sent, response), &reservation, (outcome, now))
                    }
                    None => context.unanswered_usage(&sent, &reservation, now),
                };
                context.settle_call(reservation, &end, usage);
            }
        }
    }
}

const ENCODED_RESPONSE_MESSAGE: &str =
    "an encoded response, although the gateway asked for `identity`";
