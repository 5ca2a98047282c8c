//! Reports of an exchange: the audit record, metrics, trace and access log of a call that has ended.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime};

use super::provider_response::ProviderResponse;
use super::{ExchangeContext, ReservedCall, SentCall};
use crate::gateway::pipeline::rejection::audit_outcome;
use crate::gateway::upstream::UpstreamError;
use crate::llm::budget::{BudgetAmount, BudgetReservation, Nanodollars, TokenUsage};
use crate::llm::protocol::GatewayRoute;
use crate::llm::response::MAX_REPORTED_TOKENS;
use crate::telemetry::access_log::AccessLogEntry;
use crate::telemetry::audit::records::{
    CallAdmittedRecord, CallOutcome, CallRefusedRecord, CallSettledRecord,
};
use crate::telemetry::{metrics, trace};

/// The end of an exchange, with the call and the response, if the exchange has come that far.
pub(super) struct ExchangeEnd<'a> {
    pub(super) outcome: CallOutcome,
    pub(super) now: Instant,
    /// The time from the start of the request to its end.
    pub(super) duration: Duration,
    pub(super) sent: Option<&'a SentCall>,
    pub(super) response: Option<&'a ProviderResponse>,
}

impl ExchangeEnd<'_> {
    /// Returns the call id and the cost of the response's headers, as LiteLLM sends them.
    fn litellm_headers(&self) -> (Option<&str>, Option<&str>) {
        let facts = self.response.map(|response| &response.facts);
        facts.map_or((None, None), |facts| {
            (facts.call_id.as_deref(), facts.response_cost.as_deref())
        })
    }

    /// Returns the cost that the body of the response reports.
    fn reported_cost(&self) -> Option<Nanodollars> {
        self.response?.observer.reported_cost()
    }

    fn first_byte(&self) -> Option<Duration> {
        self.response?.first_byte
    }
}

impl ExchangeContext {
    /// Charges a call for its usage, and reports the call.
    pub(super) fn settle_call(
        &self,
        reservation: BudgetReservation,
        end: &ExchangeEnd<'_>,
        usage: TokenUsage,
    ) {
        let reserved = reservation.granted_amount();
        let charged = reservation.settle_usage_at(&usage, end.now);
        self.record_settlement(end, usage, charged);
        // If a crash loses the settlement, the reservation is charged in its place. That would give a larger charge back
        // in part, so the settlement does not wait in the buffer.
        if !charged.is_within(&reserved) {
            self.gateway.run.audit.flush_buffered();
        }
        if usage.input.max(usage.output) >= MAX_REPORTED_TOKENS {
            tracing::warn!(
                request = self.id.as_str(),
                model = self.model.as_deref(),
                "the provider reports more tokens than a call can have; a billion are charged"
            );
        }
        self.emit_telemetry(end, Some(usage));
    }

    pub(super) fn record_settlement(
        &self,
        end: &ExchangeEnd<'_>,
        usage: TokenUsage,
        charged: BudgetAmount,
    ) {
        let (litellm_call_id, litellm_response_cost) = end.litellm_headers();
        self.gateway.run.audit.record_settlement(&CallSettledRecord {
            request: self.id.as_str(),
            outcome: end.outcome,
            status: self.status,
            code: self.code,
            usage,
            charged,
            response_bytes: self.response_bytes,
            frames: end.response.map_or(0, |response| response.frames),
            litellm_call_id,
            litellm_response_cost,
            reported_cost_usd: end.reported_cost(),
            first_byte_ms: end.first_byte().map(to_milliseconds),
            duration_ms: to_milliseconds(end.duration),
        });
    }

    /// Returns the record of a call that is about to be sent.
    pub(super) fn admission_record(&self, call: &ReservedCall) -> CallAdmittedRecord<'_> {
        CallAdmittedRecord {
            request: self.id.as_str(),
            route: call.route.name(),
            model: self.model.as_deref(),
            rules: &self.rules,
            stream: call.is_stream,
            request_bytes: self.request_bytes,
            pid: self.pid,
            reserved: call.reserved,
        }
    }

    /// Records that the upstream has failed a call.
    pub(super) fn record_upstream_failure(&mut self, error: &UpstreamError) {
        self.code = Some(error.code());
        self.outcome = Some(audit_outcome(error));
        self.gateway.metrics.record_upstream_error(error.code());
        self.gateway.upstream.failures().failed(error);
    }

    pub(super) fn record_refusal(&self, outcome: CallOutcome) {
        let (gateway, status) = (&self.gateway, self.status);
        let code = self.code.unwrap_or(outcome.as_str());
        gateway.run.counts.refused.fetch_add(1, Ordering::Relaxed);
        gateway.metrics.record_refusal(&metrics::RefusedRequest {
            route: self.route,
            code,
            status,
        });
        // Without a code no rejection was sent: the client disconnected before the gateway could
        // answer, or a shutdown aborted the request.
        if self.code.is_none() && outcome == CallOutcome::ClientGone {
            gateway.metrics.record_client_gone();
        }
        gateway.run.audit.record_refusal(&CallRefusedRecord {
            request: self.id.as_str(),
            code,
            status,
            method: self.method.as_str(),
            route: self.route.map_or("-", GatewayRoute::name),
            model: self.model.as_deref(),
            rules: &self.rules,
            request_bytes: self.request_bytes,
            exhausted: gateway.run.ledger.exhausted_token().is_cancelled(),
            pid: self.pid,
        });
    }

    /// Emits the metrics and the trace, if a call was sent, and the access log entry of every request.
    pub(super) fn emit_telemetry(&self, end: &ExchangeEnd<'_>, usage: Option<TokenUsage>) {
        let (call_id, cost) = end.litellm_headers();
        if let Some(sent) = end.sent {
            self.emit_call(sent, end, usage);
        }
        self.gateway.access_log.write_entry(&AccessLogEntry {
            time: SystemTime::now(),
            method: self.method.as_str(),
            uri: self.route.map(GatewayRoute::path),
            status: if self.status == 0 { STATUS_CLIENT_CLOSED_REQUEST } else { self.status },
            bytes: self.response_bytes,
            request_bytes: self.request_bytes,
            model: self.model.as_deref(),
            request_id: self.id.as_str(),
            litellm_call_id: call_id,
            litellm_response_cost: cost,
            upstream_time: end.sent.map(|sent| end.now.duration_since(sent.sent)),
            first_byte_time: end.first_byte(),
            request_time: end.duration,
            usage: usage.as_ref(),
            outcome: self.code.unwrap_or(end.outcome.as_str()),
        });
    }

    /// Emits the metrics and the trace of a call that was sent.
    ///
    /// `usage` is missing if the call proved undelivered: such a call appears in the trace and not in
    /// the metrics of settled calls.
    fn emit_call(&self, sent: &SentCall, end: &ExchangeEnd<'_>, usage: Option<TokenUsage>) {
        let trace = self.gateway.run.trace.as_deref().filter(|trace| trace.is_recorded());
        if usage.is_none() && trace.is_none() {
            return;
        }
        let existing;
        let metered = end.response.and_then(|response| response.metered.as_ref());
        let model = if let Some(metered) = metered {
            metered
        } else {
            let name = self.model.as_deref().unwrap_or_default();
            existing = self.gateway.metrics.existing_model_metrics(name);
            &existing
        };
        let (_, header_cost) = end.litellm_headers();
        let settled = metrics::SettledCall {
            route: sent.route,
            model,
            status: self.status,
            outcome: end.outcome,
            usage: &usage.unwrap_or_default(),
            // LiteLLM reports its cost in the usage of the body or, otherwise, in a header.
            cost: end.reported_cost().or_else(|| header_cost.and_then(Nanodollars::parse)),
            request_bytes: self.request_bytes,
            response_bytes: self.response_bytes,
            first_byte: end.first_byte(),
            duration: end.duration,
            is_stream: end.response.map_or(sent.is_stream, |response| response.is_stream),
        };
        if usage.is_some() {
            self.gateway.metrics.record_settled_call(&settled);
        }
        if let Some(trace) = trace {
            trace.record_call(&trace::TracedCall {
                span: self.id.span_id(),
                request_id: self.id.as_str(),
                model: self.model.as_deref(),
                code: self.code,
                settled: &settled,
            });
        }
    }
}

fn to_milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

/// The status of nginx for a client that disconnected before the response. Log readers know this
/// status.
const STATUS_CLIENT_CLOSED_REQUEST: u16 = 499;
