//! The explanation of a tool call: the layer that decides, through the code of a real call.

use std::fmt::{self, Display, Formatter};
use std::process::ExitCode;

use serde::Serialize;

use super::explain_input::ExplainInput;
use crate::gateway::config::GatewayConfig;
use crate::gateway::pipeline::request_head::check_target;
use crate::llm::budget::Nanodollars;
use crate::runner::tool_opener::{CompiledTools, identity_facts};
use crate::tools::exec_endpoint::check_origin;
use crate::tools::exec_request::ToolExecRequest;
use crate::tools::run_tools::check_call;

/// The answer of the policy to a tool call.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct ToolExplanation {
    pub tool: String,
    pub allowed: bool,
    /// The layer that decided: `agent`, `run`, `sandbox`, `tool`, or `approval` if a person has to decide; absent if the request itself is wrong.
    pub layer: Option<&'static str>,
    /// The rules that allow the call, or the rule that denies it.
    pub rules: Vec<String>,
    pub code: Option<&'static str>,
    pub message: Option<String>,
    pub price_usd: Nanodollars,
    /// The rule that asks a person before the call begins.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub asking_rule: Option<String>,
}

impl ToolExplanation {
    /// Explains a request to `/tool/exec`.
    ///
    /// # Errors
    /// Returns an error if the configuration of the tools is not valid.
    pub(super) fn explain_call(
        config: &GatewayConfig,
        input: &ExplainInput,
    ) -> anyhow::Result<Self> {
        let tools = CompiledTools::from_settings(&config.tools)?;
        let run = identity_facts(&config.identity);
        let request = ToolExecRequest::parse_body(&input.body, &run.id);
        let tool = request.as_ref().map_or("-", |request| &request.tool).to_owned();
        // The order is that of a real request: the gateway's own check of the target comes first.
        if let Err(rejection) = check_target(&input.request) {
            let (code, message) = (Some(rejection.code()), Some(rejection.to_string()));
            return Ok(Self { tool, code, message, ..Self::default() });
        }
        let checked = check_origin(input.request.headers()).and_then(|()| {
            let request = request?;
            let tool = check_call(&tools.policy, &run, &request)?;
            let rules = tool.rule_names().iter().map(ToString::to_string).collect();
            Ok((rules, tool.price, tool.asking_rule.as_deref().map(str::to_owned)))
        });
        Ok(match checked {
            Ok((rules, price_usd, asking_rule)) => {
                let layer = Some(if asking_rule.is_some() { "approval" } else { "tool" });
                let (code, message) = (None, None);
                Self { tool, allowed: true, layer, rules, code, message, price_usd, asking_rule }
            }
            // The operator may know whose list does not name the tool; the agent may not.
            Err(refusal) => Self {
                tool,
                allowed: false,
                layer: refusal.denial().map(|denial| denial.layer.as_str()),
                rules: refusal.denial().map(|denial| denial.rule.to_string()).into_iter().collect(),
                code: Some(refusal.code()),
                message: Some(refusal.to_string()),
                price_usd: Nanodollars::ZERO,
                asking_rule: None,
            },
        })
    }

    pub(super) fn exit_code(&self) -> ExitCode {
        if self.allowed { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

impl Display for ToolExplanation {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { tool, price_usd, .. } = self;
        writeln!(f, "tool      {tool}")?;
        let rules = if self.rules.is_empty() { "granted".into() } else { self.rules.join(", ") };
        match (self.layer, self.code) {
            (_, None) => {
                writeln!(f, "allowed   by every layer; rules: {rules}")?;
                if let Some(rule) = &self.asking_rule {
                    writeln!(f, "waits     until a person allows it: rule {rule}")?;
                }
                writeln!(f, "reserves  1 call, ${price_usd}")
            }
            (Some(layer), Some(code)) => {
                writeln!(f, "refused   {code}: layer {layer}, rule {rules}")?;
                writeln!(f, "          {}", self.message.as_deref().unwrap_or_default())
            }
            (None, Some(code)) => {
                writeln!(f, "refused   {code}")?;
                writeln!(f, "          {}", self.message.as_deref().unwrap_or_default())
            }
        }
    }
}
