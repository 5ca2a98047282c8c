//! Refusals: the reasons why a request over a connection was not sent, with the status and the text that the client reads.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderValue, Response, StatusCode, header};
use serde_json::{Value, json};

use crate::llm::budget::{BudgetError, ConnectionBudgetError};
use crate::telemetry::audit::AuditError;
use crate::telemetry::audit::connect_records::ConnectOutcome;
use crate::tools::config::LIST_RULE;

/// A reason why a request over a connection was not sent.
#[derive(Debug, thiserror::Error)]
pub enum ConnectRefusal {
    #[error("the path is not served; there are `GET /connect` and `/connect/NAME/PATH`")]
    NotServed,
    #[error("the request comes from a page of another origin")]
    ForeignOrigin,
    #[error("a connection carries no other protocol; send the request without `Upgrade`")]
    Upgrade,
    /// A layer does not name the connection. The message is the same for a connection that does not exist.
    #[error("this run may not use this connection; `GET /connect` names the ones that it may use")]
    NotGranted(ConnectDenial),
    /// No connection that every layer names has a tunnel to the address. The message is the same for an unknown address.
    #[error(
        "no connection of this run has a tunnel to this host and port; `GET /connect` names the tunnels that it may use"
    )]
    NoTunnel(ConnectDenial),
    #[error("the `CONNECT` request {0}; send `CONNECT HOST:PORT` without a body")]
    InvalidTunnel(&'static str),
    #[error("the request in the tunnel {0}; open a tunnel for each host")]
    TunnelMismatch(&'static str),
    #[error("this run or its gateway has too many tunnels open; close one, or try again")]
    TooManyTunnels,
    #[error("the path could be read in two ways: it {0}")]
    AmbiguousPath(&'static str),
    #[error("the connection's rules do not allow this request")]
    Denied(ConnectDenial),
    #[error(
        "the query has the parameter `{0}`, which carries a credential; leave it out, the host adds its own"
    )]
    ClientCredential(&'static str),
    #[error("the request cannot be signed for AWS: {0}")]
    Unsignable(Cow<'static, str>),
    #[error("the body has no announced length; send `content-length`")]
    LengthRequired,
    #[error("the body is longer than 1 MiB, the most that is signed for a service other than S3")]
    TooLarge,
    #[error(transparent)]
    Budget(#[from] ConnectionBudgetError),
    /// The text is for the operator.
    #[error("the connection's credential cannot be read")]
    Credential(String),
    #[error("too many programs that print credentials run at this time; try again")]
    Overloaded,
    #[error("this run or its gateway looks up too many hosts at this time; try again")]
    TooManyLookups,
    #[error("an operator has paused this run; try again later")]
    Paused,
    #[error("an operator has ended this run")]
    Ended,
    #[error("the audit log cannot be written")]
    Audit(#[from] AuditError),
}

/// A denial by a layer of the policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectDenial {
    /// `agent`, `run` or `connection`.
    pub layer: &'static str,
    /// The rule that decided: `granted` for a list that does not name the connection, `allow` if no rule allows the
    /// request, or the place of the rule, such as `deny[0]`.
    pub rule: Arc<str>,
}

impl ConnectRefusal {
    /// Returns the stable code that clients, metrics and the audit log receive.
    pub fn code(&self) -> &'static str {
        match self {
            Self::NotServed => "not_found",
            Self::ForeignOrigin => "foreign_origin",
            Self::Upgrade => "upgrade_refused",
            Self::NotGranted(_) | Self::NoTunnel(_) | Self::Denied(_) => "policy_denied",
            Self::InvalidTunnel(_) => "invalid_tunnel",
            Self::TunnelMismatch(_) => "tunnel_mismatch",
            Self::TooManyTunnels => "too_many_tunnels",
            Self::AmbiguousPath(_) => "ambiguous_path",
            Self::ClientCredential(_) => "client_credential",
            Self::Unsignable(_) => "unsignable_request",
            Self::LengthRequired => "length_required",
            Self::TooLarge => "request_too_large",
            Self::Budget(error) => error.code(),
            Self::Credential(_) => "credential_unavailable",
            Self::Overloaded | Self::TooManyLookups => "overloaded",
            Self::Paused => "run_paused",
            Self::Ended => "run_ended",
            Self::Audit(_) => "audit_unavailable",
        }
    }

    pub fn status(&self) -> StatusCode {
        match self {
            Self::NotServed => StatusCode::NOT_FOUND,
            Self::AmbiguousPath(_) | Self::InvalidTunnel(_) | Self::Unsignable(_) => {
                StatusCode::BAD_REQUEST
            }
            Self::TunnelMismatch(_) => StatusCode::MISDIRECTED_REQUEST,
            Self::LengthRequired => StatusCode::LENGTH_REQUIRED,
            Self::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::ForeignOrigin
            | Self::Upgrade
            | Self::NotGranted(_)
            | Self::NoTunnel(_)
            | Self::Denied(_)
            | Self::ClientCredential(_)
            | Self::Ended => StatusCode::FORBIDDEN,
            Self::Budget(error) if error.is_permanent() => StatusCode::PAYMENT_REQUIRED,
            Self::Budget(_)
            | Self::Overloaded
            | Self::TooManyLookups
            | Self::TooManyTunnels
            | Self::Paused => StatusCode::TOO_MANY_REQUESTS,
            Self::Credential(_) => StatusCode::BAD_GATEWAY,
            Self::Audit(_) => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    /// Returns the denial of the policy, if the policy decided.
    pub fn denial(&self) -> Option<&ConnectDenial> {
        match self {
            Self::NotGranted(denial) | Self::NoTunnel(denial) | Self::Denied(denial) => {
                Some(denial)
            }
            _ => None,
        }
    }

    /// Returns the delay after which the client may try again; `None` if the same request never succeeds.
    fn retry_delay(&self) -> Option<Duration> {
        match self {
            Self::Budget(ConnectionBudgetError::Run(BudgetError::Rate { retry_after, .. })) => {
                Some(*retry_after)
            }
            Self::Budget(error) if error.is_permanent() => None,
            Self::Budget(_)
            | Self::Overloaded
            | Self::TooManyLookups
            | Self::TooManyTunnels
            | Self::Paused
            | Self::Audit(_) => Some(RETRY_DELAY),
            _ => None,
        }
    }

    /// Returns the response to the client.
    pub(super) fn to_response(&self) -> Response<String> {
        let mut error = error_object(self.code(), &self.to_string());
        if let Some(denial) = self.denial() {
            // A client does not learn whose list does not name a connection, or which mode takes it away.
            let is_list = matches!(self, Self::NotGranted(_) | Self::NoTunnel(_));
            let (layer, rule) =
                if is_list { ("run", LIST_RULE) } else { (denial.layer, &*denial.rule) };
            error["layer"] = Value::from(layer);
            error["rule"] = Value::from(rule);
        }
        let mut response = error_response(self.status(), &error);
        let headers = response.headers_mut();
        match self.retry_delay() {
            Some(delay) => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from(delay.as_secs().max(1)));
            }
            None => {
                headers.insert("x-should-retry", HeaderValue::from_static("false"));
            }
        }
        response
    }
}

/// Returns the response, and its code, for a request that was admitted and has no answer that may pass.
pub(super) fn fault_response(outcome: ConnectOutcome) -> (Response<String>, &'static str) {
    let (status, code, message) = match outcome {
        ConnectOutcome::AddressRefused => (
            StatusCode::BAD_GATEWAY,
            "address_refused",
            "the connection's host has no address that the connection allows",
        ),
        ConnectOutcome::TimedOut => (
            StatusCode::GATEWAY_TIMEOUT,
            "upstream_timeout",
            "the connection's server does not answer in time",
        ),
        ConnectOutcome::BudgetCut => (
            StatusCode::PAYMENT_REQUIRED,
            "connection_byte_budget_exhausted",
            "the connection's byte budget ended in the middle of the request's body",
        ),
        ConnectOutcome::Denied => (
            StatusCode::FORBIDDEN,
            "policy_denied",
            "a rule about what the run has seen denies the rest of the request's body",
        ),
        ConnectOutcome::ClientGone => {
            (StatusCode::BAD_REQUEST, "client_gone", "the request's body broke off")
        }
        ConnectOutcome::CredentialEchoed => (
            StatusCode::BAD_GATEWAY,
            "credential_echoed",
            "the answer contains the connection's credential and was withheld",
        ),
        ConnectOutcome::EncodedResponse => (
            StatusCode::BAD_GATEWAY,
            "encoded_response",
            "the answer is encoded although no encoding was accepted, and was withheld",
        ),
        ConnectOutcome::ShutDown => {
            (StatusCode::SERVICE_UNAVAILABLE, "shut_down", "the run or its gateway ends")
        }
        _ => (
            StatusCode::BAD_GATEWAY,
            "upstream_failed",
            "the connection's server does not answer as it should",
        ),
    };
    (error_response(status, &error_object(code, message)), code)
}

fn error_object(code: &str, message: &str) -> Value {
    json!({"type": "connection_error", "code": code, "message": message})
}

fn error_response(status: StatusCode, error: &Value) -> Response<String> {
    let mut response = Response::new(json!({ "error": error }).to_string());
    *response.status_mut() = status;
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    response
}

/// The delay after which a client may retry a refusal that passes by itself.
const RETRY_DELAY: Duration = Duration::from_secs(1);
