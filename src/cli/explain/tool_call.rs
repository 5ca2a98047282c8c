//! The explanation of a request to the tools: the layer that decides, through the code of a real request.

use std::fmt::{self, Display, Formatter};

use serde::Serialize;
use serde_json::Value;

use super::explain_input::ExplainInput;
use super::explanation::ExplainContext;
use crate::base::local_endpoint::LocalReply;
use crate::gateway::pipeline::rejection::CallRejection;
use crate::gateway::pipeline::tool_route::{check_tool_body, check_tool_head};
use crate::llm::budget::Nanodollars;
use crate::runner::tool_opener::{CompiledTools, describe_run};
use crate::sandbox::spec::MountAccess;
use crate::tools::agent_modes::AgentToolLayer;
use crate::tools::endpoint::ToolPath;
use crate::tools::exec_endpoint::{ExecRoute, check_origin};
use crate::tools::exec_request::ToolExecRequest;
use crate::tools::mcp;
use crate::tools::refusal::ToolRefusal;
use crate::tools::rule_facts::ToolRunFacts;
use crate::tools::run_tools::{check_budget, check_call};

/// The answer of the gateway to a request to the tools.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct ToolExplanation {
    /// The tool's name; empty for a request that is no call, or cannot be read.
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
    /// The tools that the list names; absent for any other request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub listed: Option<Vec<String>>,
}

/// The thing that a request asks for, after the checks of its form.
enum ToolAsk {
    Call(ToolExecRequest),
    List,
    /// A message of MCP that starts no call.
    Message,
}

/// The parts of a run that decide about a request to its tools.
struct ToolCase<'a> {
    case: &'a ExplainContext<'a>,
    tools: CompiledTools,
    run: ToolRunFacts,
}

impl ToolExplanation {
    /// Explains a request to the paths of the tools.
    ///
    /// # Errors
    /// Returns an error if the configuration of the tools is not valid.
    pub(super) fn explain_request(
        case: &ExplainContext<'_>,
        input: &ExplainInput,
    ) -> anyhow::Result<Self> {
        let CompiledTools { config, policy } = CompiledTools::from_settings(&case.config.tools)?;
        // A run of `serve` has a workspace, unless its agent's mode takes it away.
        let access =
            policy.agent().map_or(Some(MountAccess::ReadWrite), AgentToolLayer::workspace_access);
        let tools = CompiledTools { config, policy: policy.with_workspace(access) };
        let own =
            ToolCase { case, tools, run: describe_run(&case.config.identity, &case.config.tools) };
        Ok(match own.read_request(input) {
            Ok(ToolAsk::Call(request)) => own
                .check_call(&request)
                .unwrap_or_else(|refusal| Self { tool: request.tool, ..Self::from(&refusal) }),
            Ok(ToolAsk::List) => {
                let tools = own.tools.policy.listed_tools();
                let listed = tools.map(|tool| tool.definition.name.to_string()).collect();
                Self { allowed: true, listed: Some(listed), ..Self::default() }
            }
            Ok(ToolAsk::Message) => Self { allowed: true, ..Self::default() },
            Err(refused) => *refused,
        })
    }
}

impl ToolCase<'_> {
    /// Reads a request. The order of the checks is that of a real request: those of the gateway come first.
    fn read_request(&self, input: &ExplainInput) -> Result<ToolAsk, Box<ToolExplanation>> {
        let ExplainInput { request, body, .. } = input;
        check_tool_head(request, &self.case.policy.config)
            .map_err(|rejection| Box::new(ToolExplanation::from(&rejection)))?;
        check_tool_body(body).map_err(|reply| Box::new(ToolExplanation::from(&reply)))?;
        if let ToolPath::Mcp(server) = request.uri().path().into() {
            let call = mcp::read_call(server, (request.method(), request.headers()), body)
                .map_err(|reply| Box::new(ToolExplanation::from(&reply)))?;
            return Ok(call.map_or(ToolAsk::Message, ToolAsk::Call));
        }
        self.read_exec(input).map_err(|refusal| Box::new(ToolExplanation::from(&refusal)))
    }

    fn read_exec(&self, input: &ExplainInput) -> Result<ToolAsk, ToolRefusal> {
        let (request, target) = (&input.request, input.request.uri());
        check_origin(request.headers())?;
        match ExecRoute::match_request(request.method(), target.path(), target.query())? {
            ExecRoute::List => Ok(ToolAsk::List),
            ExecRoute::Call => {
                ToolExecRequest::parse_body(&input.body, &self.run.id).map(ToolAsk::Call)
            }
            // An explanation has no run with earlier calls.
            ExecRoute::Result(..) => Err(ToolRefusal::UnknownCall),
        }
    }

    /// Takes a call through the steps of a real one, up to the record of its admission.
    fn check_call(&self, request: &ToolExecRequest) -> Result<ToolExplanation, ToolRefusal> {
        let policy = &self.tools.policy;
        let tool = check_call(policy, &self.run, request)?;
        let asking_rule = check_budget(policy, tool, self.case.ledger)?;
        Ok(ToolExplanation {
            tool: request.tool.clone(),
            allowed: true,
            layer: Some(if asking_rule.is_some() { "approval" } else { "tool" }),
            rules: tool.rule_names().iter().map(ToString::to_string).collect(),
            price_usd: tool.price,
            asking_rule: asking_rule.as_deref().map(str::to_owned),
            ..ToolExplanation::default()
        })
    }
}

impl From<&ToolRefusal> for ToolExplanation {
    /// The operator may know whose list does not name the tool; the agent may not.
    fn from(refusal: &ToolRefusal) -> Self {
        Self {
            layer: refusal.denial().map(|denial| denial.layer.as_str()),
            rules: refusal.denial().map(|denial| denial.rule.to_string()).into_iter().collect(),
            code: Some(refusal.code()),
            message: Some(refusal.to_string()),
            ..Self::default()
        }
    }
}

impl From<&CallRejection> for ToolExplanation {
    fn from(rejection: &CallRejection) -> Self {
        let (code, message) = (Some(rejection.code()), Some(rejection.to_string()));
        Self { code, message, ..Self::default() }
    }
}

impl From<&LocalReply> for ToolExplanation {
    fn from(reply: &LocalReply) -> Self {
        let body: Value = serde_json::from_str(&reply.body).unwrap_or_default();
        let message = body["error"]["message"].as_str().map(str::to_owned);
        Self { code: reply.code, message, ..Self::default() }
    }
}

impl Display for ToolExplanation {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { tool, price_usd, .. } = self;
        match &**tool {
            "" => writeln!(f, "tools of the run")?,
            tool => writeln!(f, "tool      {tool}")?,
        }
        if let (None, "") = (self.code, &**tool) {
            match &self.listed {
                Some(listed) if listed.is_empty() => writeln!(f, "allowed   lists: none")?,
                Some(listed) => writeln!(f, "allowed   lists: {}", listed.join(", "))?,
                None => writeln!(f, "allowed   answered without a call")?,
            }
            return writeln!(f, "reserves  nothing");
        }
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
