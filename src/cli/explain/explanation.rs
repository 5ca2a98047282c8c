//! The explanation of a request as a value: each step of the gateway, and its result.

use std::borrow::Cow;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request};
use serde::Serialize;

use super::explain_input::ExplainInput;
use super::remedy::remedy_for_code;
use crate::base::trace_context::TraceContext;
use crate::gateway::config::GatewayConfig;
use crate::gateway::pipeline::admission::CallAdmission;
use crate::gateway::pipeline::audience::Audience;
use crate::gateway::pipeline::local_response::{self, LocalAnswer, UnknownModelError};
use crate::gateway::pipeline::policy::GatewayPolicy;
use crate::gateway::pipeline::read_body;
use crate::gateway::pipeline::rejection::CallRejection;
use crate::gateway::pipeline::request_head;
use crate::gateway::run::RequestId;
use crate::gateway::upstream::headers::UpstreamRequestHead;
use crate::llm::budget::{BudgetAmount, BudgetLedger, BudgetStatus, Tokens};
use crate::llm::protocol::{GatewayRoute, LlmProtocol};
use crate::llm::request::{FieldChange, LlmCall};
use crate::telemetry::trace;

/// The configuration, the policy and the ledger that decide about a request.
#[derive(Clone, Copy)]
pub struct ExplainContext<'a> {
    pub config: &'a GatewayConfig,
    pub policy: &'a GatewayPolicy,
    pub ledger: &'a Arc<BudgetLedger>,
}

/// The gateway's treatment of a request.
#[derive(Debug, Serialize)]
pub struct RequestExplanation {
    pub method: String,
    pub path: String,
    /// The name of the route, if the path is a route; see `is_guessed`.
    pub route: Option<&'static str>,
    pub is_guessed: bool,
    pub outcome: ExplainOutcome,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refusal: Option<RefusalDetail>,
    /// The treatment of the query string, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub query: Option<HeaderDisposition>,
    pub headers: Vec<ExplainedHeader>,
    pub body: Vec<ExplainedField>,
    /// The names of the rules that matched.
    pub rules: Vec<Arc<str>>,
    /// The model, by the upstream's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<Box<str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserved: Option<BudgetAmount>,
    /// The estimate of the input. The reservation is larger: it holds the maximum that the input can be, or the rest of
    /// the budget if that is less.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub input_estimate: Option<Tokens>,
    /// The budget before the call.
    pub budget: BudgetStatus,
    /// The request that would be sent, with secrets masked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upstream: Option<String>,
}

/// The result for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ExplainOutcome {
    /// The request goes upstream.
    Admitted,
    /// The gateway answers the request itself.
    Answered,
    Refused,
}

/// The answer that the client would receive, and a remedy for the operator.
#[derive(Debug, Serialize)]
pub struct RefusalDetail {
    pub status: u16,
    pub code: &'static str,
    pub message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<&'static str>,
}

/// The treatment of a header.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct ExplainedHeader {
    pub name: String,
    pub what: HeaderDisposition,
    /// The value that goes upstream.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<Cow<'static, str>>,
}

/// The treatment of a header or of the query string.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum HeaderDisposition {
    /// The client's value goes upstream.
    Passed,
    /// The gateway's value, or a part of the client's, goes upstream.
    Overwritten,
    /// The gateway adds the header; the client did not send it.
    Set,
    /// The header does not go upstream.
    Dropped,
}

/// A field of the body that does not go upstream unchanged.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct ExplainedField {
    pub name: Cow<'static, str>,
    pub what: &'static str,
    pub why: &'static str,
}

impl HeaderDisposition {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Overwritten => "overwritten",
            Self::Set => "set",
            Self::Dropped => "dropped",
        }
    }
}

impl RequestExplanation {
    /// Takes a request through the gateway's steps until its end or the first refusal.
    pub fn explain_request(case: &ExplainContext<'_>, input: ExplainInput) -> Self {
        let ExplainInput { request, body, is_guessed } = input;
        let mut explanation = Self {
            method: request.method().to_string(),
            path: request.uri().to_string(),
            route: None,
            is_guessed,
            outcome: ExplainOutcome::Admitted,
            refusal: None,
            query: None,
            headers: vec![],
            body: vec![],
            rules: vec![],
            model: None,
            reserved: None,
            input_estimate: None,
            budget: case.ledger.budget_status(),
            upstream: None,
        };
        // 1. The path must be a route. Without a route the protocol is unknown, so the error has the format of chat
        //    completions.
        let route = match request_head::match_route(&request) {
            Ok(route) => route,
            Err(rejection) => {
                explanation.set_rejection(&rejection, LlmProtocol::Chat.into());
                return explanation;
            }
        };
        explanation.route = Some(route.name());
        // 2. Some routes are answered locally. All others go through the same checks as a served call.
        match local_response::match_local(case.policy, route, &request) {
            Some(LocalAnswer::UnknownModel(error)) => {
                let status = UnknownModelError::STATUS.as_u16();
                explanation.set_refusal(status, UnknownModelError::CODE, error.to_string());
            }
            Some(_) => explanation.outcome = ExplainOutcome::Answered,
            None => {
                if let Err(rejection) = explanation.trace_steps(case, route, &request, body) {
                    let audience = Audience::of(route.protocol(), &request);
                    explanation.set_rejection(&rejection, audience);
                }
            }
        }
        explanation
    }

    /// Executes the same steps as `gateway::serve`, and records their results.
    fn trace_steps(
        &mut self,
        case: &ExplainContext<'_>,
        route: GatewayRoute,
        request: &Request<()>,
        body: Bytes,
    ) -> Result<(), CallRejection> {
        let ExplainContext { config, policy, ledger } = *case;
        // The order of these steps decides which refusal a client sees first, so that it must be the gateway's.
        request_head::check_head(request, &policy.config)?;
        let admission = CallAdmission { policy, identity: &config.identity, ledger };
        let entry = admission.enter_call(route)?;
        let (headers, injected_headers) =
            (&policy.config.headers, Arc::clone(&policy.injected_headers));
        let id = RequestId::new();
        let mut head = UpstreamRequestHead::new(route, request, headers, injected_headers, &id);
        if let Some(trace) = run_trace(config) {
            head.set_traceparent(headers, &trace, &id);
        }
        let mut call = LlmCall::default();
        if route.method() == http::Method::POST {
            let body = read_body::parse_body(route, body, &policy.config)?;
            (call, self.rules) = admission.check_body(body, &mut head)?;
        }
        // The reservation is returned at once: an explanation spends nothing.
        let reserved = admission.reserve_budget(entry, route, &mut call).map(|reservation| {
            let granted = (reservation.granted_amount(), reservation.input_estimate());
            reservation.release_unspent();
            granted
        });
        // The changes are recorded before a refusal by the budget is returned, so that the explanation shows them too.
        self.model = call.model.as_deref().map(Into::into);
        self.body = call.changes.iter().map(ExplainedField::from_change).collect();
        let body: Vec<u8> = call.into_body().iter().flatten().copied().collect();
        let sent = head.to_hyper_request(&config.upstream.url, body.len() as u64);
        // A query string is passed on as a whole or not at all.
        let is_sent = sent.uri().query().is_some();
        self.query = request
            .uri()
            .query()
            .map(|_| if is_sent { HeaderDisposition::Passed } else { HeaderDisposition::Dropped });
        self.headers = header_changes(request.headers(), sent.headers());
        self.upstream = Some(format_upstream_request(&head, sent.headers(), &body));
        let (reserved, input_estimate) = reserved?;
        (self.reserved, self.input_estimate) = (Some(reserved), Some(input_estimate));
        Ok(())
    }

    fn set_refusal(&mut self, status: u16, code: &'static str, message: String) {
        self.outcome = ExplainOutcome::Refused;
        // A refused request is not sent, whatever was prepared before the refusal.
        self.upstream = None;
        self.refusal = Some(RefusalDetail { status, code, message, remedy: remedy_for_code(code) });
    }

    fn set_rejection(&mut self, rejection: &CallRejection, audience: Audience) {
        let status = rejection.status(audience).as_u16();
        self.set_refusal(status, rejection.code(), rejection.to_string());
        if let CallRejection::Rule(refusal) = rejection {
            self.rules = vec![refusal.rule_name()];
        }
    }
}

impl ExplainedField {
    fn from_change(change: &FieldChange) -> Self {
        let (name, what, why) =
            (change.field.clone(), change.what.as_str(), change.why.description());
        Self { name, what, why }
    }
}

/// Returns the trace that the calls of a run name to the upstream.
fn run_trace(config: &GatewayConfig) -> Option<TraceContext> {
    let telemetry = &config.telemetry;
    let is_exported = telemetry.otlp_endpoint.is_some();
    trace::choose_context(config.identity.trace_context(), is_exported, telemetry.sample_ratio)
}

/// Compares the client's headers with the sent headers. The result is sorted by name.
fn header_changes(given: &HeaderMap, sent: &HeaderMap) -> Vec<ExplainedHeader> {
    let mut headers: Vec<_> = sent
        .iter()
        .map(|(name, value)| {
            let what = match given.get(name) {
                Some(given) if given == value => HeaderDisposition::Passed,
                Some(_) => HeaderDisposition::Overwritten,
                None => HeaderDisposition::Set,
            };
            ExplainedHeader {
                name: name.to_string(),
                what,
                value: Some(display_value(name.as_str(), value)),
            }
        })
        .collect();
    // `host` belongs to the connection, and is not the client's to choose.
    let dropped = given.keys().filter(|name| !sent.contains_key(*name) && *name != "host");
    headers.extend(dropped.map(|name| ExplainedHeader {
        name: name.to_string(),
        what: HeaderDisposition::Dropped,
        value: None,
    }));
    headers.sort_by(|one, other| one.name.cmp(&other.name));
    headers
}

fn display_value(name: &str, value: &HeaderValue) -> Cow<'static, str> {
    match name {
        // Headers with secrets are marked as sensitive where they are set.
        _ if value.is_sensitive() => Cow::Borrowed("[secret]"),
        "x-litellm-call-id" => Cow::Borrowed("[id of the request]"),
        "traceparent" => Cow::Borrowed("[span of the request]"),
        _ => Cow::Owned(String::from_utf8_lossy(value.as_bytes()).into_owned()),
    }
}

/// Formats the request as it would be sent. `sent` marks the secrets to mask.
fn format_upstream_request(head: &UpstreamRequestHead, sent: &HeaderMap, body: &[u8]) -> String {
    // The text comes from the real serialization, with the order and the spelling that would be sent.
    let head = head.to_http1_bytes(body.len() as u64);
    let lines = String::from_utf8_lossy(&head).replace('\r', "");
    let lines = lines.lines().map(|line| {
        let name = line.split_once(": ").map_or("", |(name, _)| name);
        sent.get(name)
            .map_or(line.to_owned(), |value| format!("{name}: {}", display_value(name, value)))
    });
    lines.collect::<Vec<_>>().join("\n") + "\n" + &String::from_utf8_lossy(body)
}
