//! The explanation of a request over a connection: the layer and the rule that decide, through the code of a real
//! request.

use std::fmt::{self, Display, Formatter};
use std::process::ExitCode;

use http::{Method, Request};
use serde::Serialize;

use crate::gateway::config::GatewayConfig;
use crate::gateway::pipeline::request_head::check_host;
use crate::llm::budget::Nanodollars;
use crate::runner::tool_opener::CompiledTools;
use crate::tools::connection::policy::{ConnectionHost, ConnectionPolicy};
use crate::tools::connection::refusal::ConnectRefusal;
use crate::tools::connection::{LIST_PATH, check_headers, split_path};

/// The answer of the gateway to a request over a connection, or for the list of connections.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct ConnectExplanation {
    /// The connection's name; empty for the list.
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
}

impl ConnectExplanation {
    /// Explains a request whose path belongs to connections; returns `None` for any other request, and for a run without
    /// tools and connections.
    ///
    /// # Errors
    /// Returns an error if the configuration of the connections is not valid.
    pub(super) fn explain_request(
        config: &GatewayConfig,
        request: &Request<()>,
    ) -> anyhow::Result<Option<Self>> {
        let (path, split) = (request.uri().path(), split_path(request.uri().path()));
        if config.tools.is_empty() || (split.is_none() && path != LIST_PATH) {
            return Ok(None);
        }
        let tools = CompiledTools::from_settings(&config.tools)?;
        let agent = config.tools.agent.as_deref();
        let host = ConnectionHost::for_check();
        let policy = ConnectionPolicy::compile_policy(&tools.config, agent, &host)?;
        let connection = split.map(|(name, _)| name.to_owned()).unwrap_or_default();
        // The order is that of a real request: the gateway's own check comes first.
        if let Err(rejection) = check_host(request) {
            let (code, message) = (Some(rejection.code()), Some(rejection.to_string()));
            return Ok(Some(Self { connection, code, message, ..Self::default() }));
        }
        let explained = match split {
            Some(split) => Self::explain_split(&policy, request, split),
            None => Self::explain_list(&policy, request),
        };
        Ok(Some(explained.unwrap_or_else(|refusal| Self {
            connection,
            // The operator may know whose list does not name the connection; the agent may not.
            layer: refusal.denial().map(|denial| denial.layer),
            rule: refusal.denial().map(|denial| denial.rule.to_string()),
            code: Some(refusal.code()),
            message: Some(refusal.to_string()),
            ..Self::default()
        })))
    }

    fn explain_split(
        policy: &ConnectionPolicy,
        request: &Request<()>,
        (name, path): (&str, &str),
    ) -> Result<Self, ConnectRefusal> {
        check_headers(request.headers())?;
        let asked = (path, request.uri().query());
        let (found, rule) = policy.check_request(name, request.method().as_str(), asked)?;
        Ok(Self {
            connection: name.to_owned(),
            allowed: true,
            layer: Some("connection"),
            rule: Some(rule.to_string()),
            price_usd: found.price,
            ..Self::default()
        })
    }

    fn explain_list(
        policy: &ConnectionPolicy,
        request: &Request<()>,
    ) -> Result<Self, ConnectRefusal> {
        check_headers(request.headers())?;
        if request.method() != Method::GET {
            return Err(ConnectRefusal::NotServed);
        }
        let listed = policy.listed_connections().map(|own| own.name.to_string()).collect();
        Ok(Self { allowed: true, listed: Some(listed), ..Self::default() })
    }

    pub(super) fn exit_code(&self) -> ExitCode {
        if self.allowed { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

impl Display for ConnectExplanation {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { connection, price_usd, .. } = self;
        match &**connection {
            "" => writeln!(f, "connections of the run")?,
            name => writeln!(f, "connection {name}")?,
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
