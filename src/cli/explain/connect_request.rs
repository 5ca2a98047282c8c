//! The explanation of a request over a connection: the layer and the rule that decide, through the code of a real
//! request.

use std::fmt::{self, Display, Formatter};
use std::process::ExitCode;

use anyhow::Context;
use http::{Method, Request, header, request};
use serde::Serialize;

use super::explain_input::ExplainInput;
use crate::gateway::config::GatewayConfig;
use crate::gateway::pipeline::request_head::check_host;
use crate::llm::budget::Nanodollars;
use crate::runner::tool_opener::CompiledTools;
use crate::tools::connection::policy::{ConnectionHost, ConnectionPolicy};
use crate::tools::connection::refusal::ConnectRefusal;
use crate::tools::connection::tunnel::check_tunnel_head;
use crate::tools::connection::{CERTIFICATE_PATH, LIST_PATH, is_connect_path};

/// The answer of the gateway to a request over a connection, or for the list of connections.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct ConnectExplanation {
    /// The connection's name; empty for the list and the certificate.
    pub connection: String,
    pub allowed: bool,
    /// The layer that decided: `agent`, `run` or `connection`; absent if the request itself is wrong.
    pub layer: Option<&'static str>,
    /// The rule that decided.
    pub rule: Option<String>,
    pub code: Option<&'static str>,
    pub message: Option<String>,
    pub price_usd: Nanodollars,
    /// The connections that the list names; absent for a request over a connection.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub listed: Option<Vec<String>>,
    /// True if the answer is the certificate of the run's tunnels.
    #[serde(skip_serializing_if = "is_false")]
    pub is_certificate: bool,
    /// True if the request opens a tunnel, and the file has no request in it.
    #[serde(skip_serializing_if = "is_false")]
    pub is_tunnel: bool,
}

impl ConnectExplanation {
    /// Explains a request whose path belongs to connections, or a request for a tunnel and the request in it; returns
    /// `None` for any other request, and for a run without tools and connections.
    ///
    /// # Errors
    /// Returns an error if the configuration of the connections is not valid, or a tunnel has something else in it than a
    /// request.
    pub(super) fn explain_request(
        config: &GatewayConfig,
        input: &ExplainInput,
    ) -> anyhow::Result<Option<Self>> {
        let request = &input.request;
        let is_tunnel = *request.method() == Method::CONNECT;
        if config.tools.is_empty() || !(is_tunnel || is_connect_path(request.uri().path())) {
            return Ok(None);
        }
        let tools = CompiledTools::from_settings(&config.tools)?;
        let agent = config.tools.agent.as_deref();
        let host = ConnectionHost::for_check();
        let policy = ConnectionPolicy::compile_policy(&tools.config, agent, &host)?;
        if is_tunnel {
            let (head, ()) = request.clone().into_parts();
            return match Self::explain_tunnel(&policy, &head) {
                Ok(opened) if input.body.is_empty() => Ok(Some(opened)),
                Ok(Self { connection: tunnel, .. }) => {
                    let inner = ExplainInput::parse(input.body.to_vec(), None)
                        .context("what follows the `CONNECT` request is not a request")?;
                    Ok(Some(Self::explain_checked(&policy, &inner.request, Some(&tunnel))))
                }
                Err(refusal) => Ok(Some(Self::from_refusal(&refusal, String::new()))),
            };
        }
        Ok(Some(Self::explain_checked(&policy, request, None)))
    }

    /// Explains a request, in the order of a real one: the gateway's own check comes first.
    fn explain_checked(
        policy: &ConnectionPolicy,
        request: &Request<()>,
        tunnel: Option<&str>,
    ) -> Self {
        let named = ConnectionPolicy::named_connection(request.uri().path(), tunnel).to_owned();
        if let Err(rejection) = check_host(request) {
            let (code, message) = (Some(rejection.code()), Some(rejection.to_string()));
            return Self { connection: named, code, message, ..Self::default() };
        }
        let (head, ()) = request.clone().into_parts();
        Self::explain_head(policy, &head, tunnel)
            .unwrap_or_else(|refusal| Self::from_refusal(&refusal, named))
    }

    fn explain_tunnel(
        policy: &ConnectionPolicy,
        head: &request::Parts,
    ) -> Result<Self, ConnectRefusal> {
        // A real request has no body, as what follows its head is in the tunnel.
        check_tunnel_head(head, false)?;
        let opened = policy.check_tunnel(&head.uri)?;
        let connection = opened.name.to_string();
        Ok(Self { connection, allowed: true, is_tunnel: true, ..Self::default() })
    }

    fn explain_head(
        policy: &ConnectionPolicy,
        head: &request::Parts,
        tunnel: Option<&str>,
    ) -> Result<Self, ConnectRefusal> {
        let Some((name, path)) = policy.find_target(head, tunnel)? else {
            return Self::explain_own_answer(policy, head);
        };
        let asked = (path, head.uri.query());
        let (found, rule) = policy.check_request(name, head.method.as_str(), asked)?;
        found.check_signing(&head.headers, asked, announced_length(head))?;
        Ok(Self {
            connection: name.to_owned(),
            allowed: true,
            layer: Some("connection"),
            rule: Some(rule.to_string()),
            price_usd: found.price,
            ..Self::default()
        })
    }

    fn explain_own_answer(
        policy: &ConnectionPolicy,
        head: &request::Parts,
    ) -> Result<Self, ConnectRefusal> {
        let has_tunnels = policy.tunnelled_connections().next().is_some();
        match head.uri.path() {
            LIST_PATH if head.method == Method::GET => {
                let listed = policy.listed_connections().map(|own| own.name.to_string()).collect();
                Ok(Self { allowed: true, listed: Some(listed), ..Self::default() })
            }
            CERTIFICATE_PATH if head.method == Method::GET && has_tunnels => {
                Ok(Self { allowed: true, is_certificate: true, ..Self::default() })
            }
            _ => Err(ConnectRefusal::NotServed),
        }
    }

    fn from_refusal(refusal: &ConnectRefusal, connection: String) -> Self {
        Self {
            connection,
            // The operator may know whose list does not name the connection; the agent may not.
            layer: refusal.denial().map(|denial| denial.layer),
            rule: refusal.denial().map(|denial| denial.rule.to_string()),
            code: Some(refusal.code()),
            message: Some(refusal.to_string()),
            ..Self::default()
        }
    }

    pub(super) fn exit_code(&self) -> ExitCode {
        if self.allowed { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

/// Returns the length of a request's body, as its headers announce it; `None` for a body whose length they do not tell.
fn announced_length(head: &request::Parts) -> Option<u64> {
    match head.headers.get(header::CONTENT_LENGTH) {
        Some(length) => length.to_str().ok()?.parse().ok(),
        None => (!head.headers.contains_key(header::TRANSFER_ENCODING)).then_some(0),
    }
}

impl Display for ConnectExplanation {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { connection, price_usd, .. } = self;
        match &**connection {
            "" => writeln!(f, "connections of the run")?,
            name => writeln!(f, "connection {name}")?,
        }
        if self.is_certificate || self.is_tunnel {
            let what = if self.is_tunnel { "opens a tunnel" } else { "the certificate of tunnels" };
            writeln!(f, "allowed    {what}")?;
            return writeln!(f, "reserves   nothing");
        }
        if let Some(listed) = &self.listed {
            let listed = if listed.is_empty() { "none".to_owned() } else { listed.join(", ") };
            writeln!(f, "allowed    lists: {listed}")?;
            return writeln!(f, "reserves   nothing");
        }
        let rule = self.rule.as_deref().unwrap_or("-");
        let Some(code) = self.code else {
            writeln!(f, "allowed    by every layer; rule: {rule}")?;
            return writeln!(f, "reserves   1 request, ${price_usd}");
        };
        match self.layer {
            Some(layer) => writeln!(f, "refused    {code}: layer {layer}, rule {rule}")?,
            None => writeln!(f, "refused    {code}")?,
        }
        writeln!(f, "           {}", self.message.as_deref().unwrap_or_default())
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde hands a field by reference")]
fn is_false(flag: &bool) -> bool {
    !flag
}
