//! The explanation of a request over a connection: the layer and the rule that decide, through the code of a real
//! request.

use std::fmt::{self, Display, Formatter};
use std::process::ExitCode;

use http::Request;
use serde::Serialize;

use crate::gateway::config::GatewayConfig;
use crate::llm::budget::Nanodollars;
use crate::runner::tool_opener::CompiledTools;
use crate::tools::connection::policy::{ConnectionHost, ConnectionPolicy};
use crate::tools::connection::split_path;

/// The answer of the policy to a request over a connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct ConnectExplanation {
    pub connection: String,
    pub allowed: bool,
    /// The layer that decided: `agent`, `run` or `connection`; absent if the request itself is wrong.
    pub layer: Option<&'static str>,
    /// The rule that decided.
    pub rule: Option<String>,
    pub code: Option<&'static str>,
    pub message: Option<String>,
    pub price_usd: Nanodollars,
}

impl ConnectExplanation {
    /// Explains a request whose path belongs to a connection; returns `None` for any other request.
    ///
    /// # Errors
    /// Returns an error if the configuration of the connections is not valid.
    pub(super) fn explain_request(
        config: &GatewayConfig,
        request: &Request<()>,
    ) -> anyhow::Result<Option<Self>> {
        let Some((name, path)) = split_path(request.uri().path()) else { return Ok(None) };
        let tools = CompiledTools::from_settings(&config.tools)?;
        let agent = config.tools.agent.as_deref();
        let host = ConnectionHost::for_check();
        let policy = ConnectionPolicy::compile_policy(&tools.config, agent, &host)?;
        let (connection, method) = (name.to_owned(), request.method().as_str());
        let checked = policy.check_request(name, method, (path, request.uri().query()));
        Ok(Some(match checked {
            Ok((found, rule)) => Self {
                connection,
                allowed: true,
                layer: Some("connection"),
                rule: Some(rule.to_string()),
                code: None,
                message: None,
                price_usd: found.price,
            },
            // The operator may know whose list does not name the connection; the agent may not.
            Err(refusal) => Self {
                connection,
                allowed: false,
                layer: refusal.denial().map(|denial| denial.layer),
                rule: refusal.denial().map(|denial| denial.rule.to_string()),
                code: Some(refusal.code()),
                message: Some(refusal.to_string()),
                price_usd: Nanodollars::ZERO,
            },
        }))
    }

    pub(super) fn exit_code(&self) -> ExitCode {
        if self.allowed { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

impl Display for ConnectExplanation {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { connection, price_usd, .. } = self;
        writeln!(f, "connection {connection}")?;
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
