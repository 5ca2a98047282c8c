//! The methods that are served: the opening of each era, the list of tools, and a call.

use std::mem;

use http::HeaderMap;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::envelope::{CALL, DISCOVER, INITIALIZE};
use super::error::McpError;
use super::message::McpMessage;
use super::progress::{AcceptedCall, ProgressToken, answer_with_progress};
use super::reply::{result_reply, server_info};
use super::version::{MODERN_VERSION, McpEra, NEWEST_LEGACY_VERSION, SERVED_VERSIONS};
use crate::base::local_endpoint::{BodyShare, EndpointAnswer};
use crate::tools::definition::{ToolDefinition, ToolProgramKind};
use crate::tools::exec_request::{ToolArguments, ToolExecRequest};
use crate::tools::policy::GrantedTool;
use crate::tools::refusal::ToolRefusal;
use crate::tools::run_tools::{RunTools, ToolRequestFacts};

/// The thing that a request asks for, after the checks that need no state of the run.
pub(super) enum McpMethod {
    /// A call, and the token of a client that is told of its progress.
    Call(ToolExecRequest, Option<ProgressToken>),
    List,
    /// A request whose answer is the same for every run.
    Answer(Value),
}

impl McpMethod {
    /// Reads the method of a message and its parameters.
    pub(super) fn from_message(
        server: Option<&str>,
        era: McpEra,
        message: &McpMessage<'_>,
        headers: &HeaderMap,
    ) -> Result<Self, McpError> {
        Ok(match (era, message.method.as_str()) {
            (_, CALL) => {
                Self::Call(read_call(server, message)?, ProgressToken::read(message, headers)?)
            }
            // The list has one page, so no client has received a cursor.
            (_, "tools/list") if message.params.raw("cursor").is_some() => {
                return Err(McpError::InvalidParams("`cursor` is not one of this list".to_owned()));
            }
            (_, "tools/list") => Self::List,
            (McpEra::Modern, DISCOVER) => Self::Answer(discovery()),
            (McpEra::Legacy, INITIALIZE) => Self::Answer(initialization(message)?),
            (McpEra::Legacy, "ping") => Self::Answer(json!({})),
            _ => return Err(McpError::UnknownMethod(era)),
        })
    }
}

/// Reads the parameters of a call.
fn read_call(server: Option<&str>, message: &McpMessage<'_>) -> Result<ToolExecRequest, McpError> {
    let name = message.params.text("name").map_err(McpError::InvalidParams)?;
    let name = name.ok_or_else(|| McpError::InvalidParams("`name` is missing".to_owned()))?;
    let name = server.map_or_else(|| name.clone(), |server| full_name(server, &name));
    let arguments = message.params.raw("arguments").filter(|raw| raw.get() != "null");
    let arguments = ToolArguments::parse(arguments).map_err(ToolRefusal::from)?;
    Ok(ToolExecRequest::new_call(name, arguments)?)
}

impl RunTools {
    /// Runs the method of a request.
    pub(super) async fn run_method(
        &self,
        (server, era): (Option<&str>, McpEra),
        (method, id): (McpMethod, &RawValue),
        (facts, share): (&mut ToolRequestFacts, &BodyShare),
    ) -> EndpointAnswer {
        let result = match method {
            McpMethod::Call(request, token) => {
                let arguments = request.arguments.with_share(share);
                let request = ToolExecRequest { arguments, ..request };
                return self.call_tool((request, token), (id, era), facts).await;
            }
            McpMethod::List => self.list_mcp_tools(server, era).await,
            McpMethod::Answer(result) => result,
        };
        result_reply(id, era, result).into()
    }

    async fn list_mcp_tools(&self, server: Option<&str>, era: McpEra) -> Value {
        let offered = self.parts().offered_tools().await.into_iter();
        let tools: Vec<_> = offered.filter_map(|(tool, _)| tool_json(server, tool)).collect();
        let mut result = json!({ "tools": tools });
        if era == McpEra::Modern {
            allow_no_caching(&mut result);
        }
        result
    }

    async fn call_tool(
        &self,
        (request, token): (ToolExecRequest, Option<ProgressToken>),
        (id, era): (&RawValue, McpEra),
        facts: &mut ToolRequestFacts,
    ) -> EndpointAnswer {
        let request = ToolExecRequest { has_progress: token.is_some(), ..request };
        let accepted = AcceptedCall::new(request, (id, era), mem::take(facts));
        match token {
            // The box keeps the future of every other method small.
            None => Box::pin(accepted.run_to_reply(self.clone())).await.into(),
            Some(token) => answer_with_progress(self.clone(), accepted, token).await,
        }
    }
}

/// Returns the answer to `initialize`: the client's version if it is of the legacy era, else the newest of that era.
fn initialization(message: &McpMessage<'_>) -> Result<Value, McpError> {
    let version = message.params.text("protocolVersion").map_err(McpError::InvalidParams)?;
    let version = version
        .ok_or_else(|| McpError::InvalidParams("`protocolVersion` is missing".to_owned()))?;
    let is_legacy = version != MODERN_VERSION && SERVED_VERSIONS.contains(&version.as_str());
    let version = if is_legacy { &version } else { NEWEST_LEGACY_VERSION };
    Ok(json!({
        "protocolVersion": version,
        "capabilities": {"tools": {}},
        "serverInfo": server_info(),
    }))
}

fn discovery() -> Value {
    let mut result = json!({
        "supportedVersions": SERVED_VERSIONS,
        "capabilities": {"tools": {}},
    });
    allow_no_caching(&mut result);
    result
}

/// Marks a result as one run's own, which the next request may change.
fn allow_no_caching(result: &mut Value) {
    result["ttlMs"] = 0.into();
    result["cacheScope"] = "private".into();
}

/// Returns the tool as a client sees it; `None` if the tool is of another server.
fn tool_json(server: Option<&str>, tool: &GrantedTool) -> Option<Value> {
    let full = &*tool.definition.name;
    let name = match server {
        None => full,
        Some(server) => full.strip_prefix(server)?.strip_prefix(SEPARATOR)?,
    };
    Some(json!({
        "name": name,
        "description": tool.definition.description,
        "inputSchema": schema_json(&tool.definition),
    }))
}

/// Returns the schema of a tool's arguments. The schema of a tool of ours also says that an object has no other members,
/// as every call is checked.
fn schema_json(tool: &ToolDefinition) -> Value {
    let mut json = tool.parameters_json();
    if !matches!(tool.program, ToolProgramKind::Mcp(_)) {
        close_objects(&mut json);
    }
    json
}

fn close_objects(schema: &mut Value) {
    if schema["type"] == "object" {
        schema["additionalProperties"] = false.into();
    }
    for part in schema.get_mut("properties").and_then(Value::as_object_mut).into_iter().flatten() {
        close_objects(part.1);
    }
    if let Some(items) = schema.get_mut("items") {
        close_objects(items);
    }
}

fn full_name(server: &str, name: &str) -> String {
    format!("{server}{SEPARATOR}{name}")
}

/// The text between the server and the tool in a tool's full name.
const SEPARATOR: &str = "__";
