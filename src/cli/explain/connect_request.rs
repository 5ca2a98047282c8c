//! The explanation of a request over a connection: the layer and the rule that decide, through the code of a real
//! request.

use std::fmt::{self, Display, Formatter};
use std::sync::Arc;

use anyhow::Context;
use http::{Request, header, request};
use serde::Serialize;

use super::explain_input::ExplainInput;
use super::explanation::ExplainContext;
use crate::gateway::pipeline::request_head::check_host;
use crate::llm::budget::{BudgetLedger, Nanodollars};
use crate::runner::tool_opener::CompiledTools;
use crate::tools::connection::AskedHead;
use crate::tools::connection::checked_request::{
    CheckedConnect, ConnectAsk, check_request, reserve_request,
};
use crate::tools::connection::policy::{ConnectionHost, ConnectionPolicy};
use crate::tools::connection::refusal::ConnectRefusal;
use crate::tools::connection::tunnel::check_tunnel_request;
use crate::tools::taint::TaintPolicy;

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

/// The parts of a run that decide about a request to its connections.
struct ConnectCase<'a> {
    policy: ConnectionPolicy,
    taint: Arc<TaintPolicy>,
    ledger: &'a Arc<BudgetLedger>,
}

impl ConnectExplanation {
    /// Explains a request whose path belongs to connections.
    ///
    /// # Errors
    /// Returns an error if the configuration of the connections is not valid.
    pub(super) fn explain_request(
        case: &ExplainContext<'_>,
        request: &Request<()>,
    ) -> anyhow::Result<Self> {
        Ok(ConnectCase::new(case)?.explain_request(request, None))
    }

    /// Explains a request for a tunnel, and the request in it.
    ///
    /// # Errors
    /// Returns an error if the configuration of the connections is not valid, or a tunnel has something else in it than a
    /// request.
    pub(super) fn explain_tunnel(
        case: &ExplainContext<'_>,
        input: &ExplainInput,
    ) -> anyhow::Result<Self> {
        let own = ConnectCase::new(case)?;
        let (head, ()) = input.request.clone().into_parts();
        let has_body = announced_length(&head) != Some(0);
        let tunnel = match check_tunnel_request(&own.policy, own.ledger, (&head, has_body)) {
            Ok(opened) => opened.name.to_string(),
            Err(refusal) => return Ok(Self::from_refusal(&refusal, String::new())),
        };
        // What follows the head of an opened tunnel is in the tunnel.
        if input.body.is_empty() {
            let (connection, allowed, is_tunnel) = (tunnel, true, true);
            return Ok(Self { connection, allowed, is_tunnel, ..Self::default() });
        }
        let inner = ExplainInput::parse(input.body.to_vec(), None)
            .context("what follows the `CONNECT` request is not a request")?;
        Ok(own.explain_request(&inner.request, Some(&tunnel)))
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
}

impl<'a> ConnectCase<'a> {
    fn new(case: &ExplainContext<'a>) -> anyhow::Result<Self> {
        let settings = &case.config.tools;
        let tools = CompiledTools::from_settings(settings)?;
        let (agent, host) = (tools.policy.agent(), ConnectionHost::for_check());
        let policy = ConnectionPolicy::compile_policy(&tools.config, agent, &host)?;
        Ok(Self { policy, taint: Arc::clone(tools.policy.taint()), ledger: case.ledger })
    }

    /// Explains a request, in the order of a real one: without a tunnel, the gateway's own check comes first.
    fn explain_request(&self, request: &Request<()>, tunnel: Option<&str>) -> ConnectExplanation {
        let named = ConnectionPolicy::named_connection(request.uri().path(), tunnel).to_owned();
        if let (None, Err(rejection)) = (tunnel, check_host(request)) {
            let (code, message) = (Some(rejection.code()), Some(rejection.to_string()));
            return ConnectExplanation {
                connection: named,
                code,
                message,
                ..ConnectExplanation::default()
            };
        }
        let (head, ()) = request.clone().into_parts();
        self.check_and_reserve(AskedHead { head: &head, tunnel })
            .unwrap_or_else(|refusal| ConnectExplanation::from_refusal(&refusal, named))
    }

    /// Takes a request through the steps of a real one, up to the credential, which is not read.
    fn check_and_reserve(
        &self,
        asked: AskedHead<'_>,
    ) -> Result<ConnectExplanation, ConnectRefusal> {
        let length = announced_length(asked.head);
        let allowed = ConnectExplanation { allowed: true, ..ConnectExplanation::default() };
        Ok(match check_request(&self.policy, asked, length)? {
            ConnectAsk::List => {
                let listed = self.policy.listed_connections().map(|own| own.name.to_string());
                ConnectExplanation { listed: Some(listed.collect()), ..allowed }
            }
            ConnectAsk::Certificate => ConnectExplanation { is_certificate: true, ..allowed },
            ConnectAsk::Send(checked) => {
                let CheckedConnect { connection, rule, .. } = *checked;
                let asked = (connection, length.unwrap_or_default());
                // The reservation is returned at once: an explanation spends nothing.
                reserve_request(self.ledger, &self.taint, asked)?.release_unspent();
                ConnectExplanation {
                    connection: connection.name.to_string(),
                    layer: Some("connection"),
                    rule: Some(rule.to_string()),
                    price_usd: connection.price,
                    ..allowed
                }
            }
        })
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
