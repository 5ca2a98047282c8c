//! The span of a call, after the OpenTelemetry conventions for generative AI (status: development).

use std::time::SystemTime;

use super::{FinishedSpan, SpanAttributeValue, TraceSpanKind};
use crate::base::sanitize::SanitizedText;
use crate::base::trace_context::SpanId;
use crate::llm::budget::UsageSource;
use crate::telemetry::audit::records::CallOutcome;
use crate::telemetry::metrics::{SettledCall, operation_name};

/// A call that went upstream and has ended.
#[derive(Clone, Copy, Debug)]
pub struct TracedCall<'a> {
    pub span: SpanId,
    /// The gateway's request id, which LiteLLM uses as its call id.
    pub request_id: &'a str,
    /// The model's name in the client's request.
    pub model: Option<&'a str>,
    /// The gateway's code for the reason why the call did not end well.
    pub code: Option<&'static str>,
    pub settled: &'a SettledCall<'a>,
}

impl TracedCall<'_> {
    pub(super) fn to_span(self, provider: &'static str) -> FinishedSpan {
        let SettledCall { route, status, outcome, duration, .. } = *self.settled;
        // Routes that no convention names keep the gateway's own name.
        let operation = operation_name(route).unwrap_or(route.name());
        // The model's name is the client's text, so control characters must not reach the collector.
        let model = self.model.map(|model| SanitizedText(model).to_text());
        let ended = SystemTime::now();
        let is_ok = self.settled.is_success();
        FinishedSpan {
            id: self.span,
            name: match &model {
                Some(model) => format!("{operation} {model}"),
                None => operation.to_owned(),
            },
            kind: TraceSpanKind::Client,
            started: ended.checked_sub(duration).unwrap_or(ended),
            ended,
            attributes: self.attributes(provider, operation, model.as_deref(), status),
            // The most precise cause: the gateway's code, else the upstream's status, else the outcome.
            error: (!is_ok).then(|| match self.code {
                Some(code) => code.into(),
                None if outcome == CallOutcome::Completed => status.to_string().into(),
                None => outcome.as_str().into(),
            }),
        }
    }

    fn attributes(
        &self,
        provider: &'static str,
        operation: &'static str,
        model: Option<&str>,
        status: u16,
    ) -> Vec<(&'static str, SpanAttributeValue)> {
        let SettledCall { usage, cost, first_byte, is_stream, .. } = self.settled;
        let mut attributes: Vec<(&str, SpanAttributeValue)> = Vec::with_capacity(14);
        attributes.extend([
            ("gen_ai.operation.name", operation.into()),
            ("gen_ai.provider.name", provider.into()),
            ("cogni.call.id", self.request_id.into()),
            ("cogni.route", self.settled.route.name().into()),
        ]);
        attributes.extend(model.map(|model| ("gen_ai.request.model", model.into())));
        // Status 0 means that the client left before a status was sent.
        if status != 0 {
            attributes.push(("http.response.status_code", u64::from(status).into()));
        }
        attributes.extend(
            [
                ("gen_ai.usage.input_tokens", usage.input),
                ("gen_ai.usage.output_tokens", usage.output),
                ("gen_ai.usage.cache_read.input_tokens", usage.cache_read),
                ("gen_ai.usage.cache_creation.input_tokens", usage.cache_write),
                ("gen_ai.usage.reasoning.output_tokens", usage.reasoning),
            ]
            .into_iter()
            // The conventions forbid reporting tokens that were only estimated.
            .filter(|(_, tokens)| usage.source != UsageSource::Estimated && !tokens.is_zero())
            .map(|(name, tokens)| (name, tokens.0.into())),
        );
        attributes.push(("cogni.usage.source", usage.source.as_str().into()));
        attributes.extend(cost.map(|cost| ("cogni.cost_usd", cost.to_dollars().into())));
        // A call that is not streamed has no first chunk.
        if let Some(first_byte) = first_byte.filter(|_| *is_stream) {
            let seconds = first_byte.as_secs_f64();
            attributes.push(("gen_ai.response.time_to_first_chunk", seconds.into()));
        }
        attributes
    }
}
