//! Reports of an exchange: the audit record, metrics, trace and access log of a call that has ended.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime};

use super::GatewayExchange;
use crate::gateway::upstream::headers::ResponseMetadata;
use crate::llm::budget::{BudgetAmount, Nanodollars, TokenUsage};
use crate::llm::protocol::GatewayRoute;
use crate::telemetry::access_log::AccessLogEntry;
use crate::telemetry::audit::records::{CallOutcome, CallRefusedRecord, CallSettledRecord};
use crate::telemetry::{metrics, trace};

impl GatewayExchange {
    pub(super) fn settle_call(&self, usage: TokenUsage, charged: BudgetAmount, now: Instant) {
        self.gateway.run.audit.record_settlement(&CallSettledRecord {
            request: self.id.as_str(),
            outcome: self.outcome,
            status: self.status,
            code: self.code,
            usage,
            charged,
            response_bytes: self.response_bytes,
            frames: self.frames,
            litellm_call_id: self.facts.call_id.as_deref(),
            litellm_response_cost: self.facts.response_cost.as_deref(),
            reported_cost_usd: self.cost,
            first_byte_ms: self.first_byte.map(to_milliseconds),
            duration_ms: to_milliseconds(now.duration_since(self.started)),
        });
    }

    pub(super) fn record_refusal(&self, code: &'static str) {
        let (gateway, status) = (&self.gateway, self.status);
        gateway.run.counts.refused.fetch_add(1, Ordering::Relaxed);
        gateway.metrics.record_refusal(&metrics::RefusedRequest {
            route: self.route,
            code,
            status,
        });
        // Without a code no rejection was sent: the client disconnected before the gateway could
        // answer, or a shutdown aborted the request.
        if self.code.is_none() && self.outcome == CallOutcome::ClientGone {
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
    pub(super) fn emit_telemetry(&self, usage: Option<TokenUsage>, now: Instant) {
        let duration = now.duration_since(self.started);
        let ResponseMetadata { call_id, response_cost } = &self.facts;
        let (call_id, cost) = (call_id.as_deref(), response_cost.as_deref());
        let trace = self.gateway.run.trace.as_deref().filter(|trace| trace.is_recorded());
        // `sent` is set only after admission. `usage` is missing if the call was sent but proved
        // undelivered: such a call appears in the trace and not in the metrics of settled calls.
        if let (Some(_), Some(route)) = (self.sent, self.route)
            && (usage.is_some() || trace.is_some())
        {
            let settled = metrics::SettledCall {
                route,
                model: &self.metered_model(),
                status: self.status,
                outcome: self.outcome,
                usage: &usage.unwrap_or_default(),
                // LiteLLM reports its cost in the usage of the body or, otherwise, in a header.
                cost: self.cost.or_else(|| cost.and_then(Nanodollars::parse)),
                request_bytes: self.request_bytes,
                response_bytes: self.response_bytes,
                first_byte: self.first_byte,
                duration,
                is_stream: self.is_stream,
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
        self.gateway.access_log.write_entry(&AccessLogEntry {
            time: SystemTime::now(),
            method: self.method.as_str(),
            route: self.route,
            status: if self.status == 0 { STATUS_CLIENT_CLOSED_REQUEST } else { self.status },
            bytes: self.response_bytes,
            request_bytes: self.request_bytes,
            model: self.model.as_deref(),
            request_id: self.id.as_str(),
            litellm_call_id: call_id,
            litellm_response_cost: cost,
            upstream_time: self.sent.map(|sent| now.duration_since(sent)),
            first_byte_time: self.first_byte,
            request_time: duration,
            usage: usage.as_ref(),
            outcome: self.code.unwrap_or(self.outcome.as_str()),
        });
    }
}

fn to_milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

/// The status of nginx for a client that disconnected before the response. Log readers know this
/// status.
const STATUS_CLIENT_CLOSED_REQUEST: u16 = 499;
