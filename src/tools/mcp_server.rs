//! A server of MCP whose tools a run may call: the host holds its credential, and the operator has pinned its tools.
//!
//! Before each call the server lists its tools, and the definition of the called one is compared with the
//! [lock file](lock_file). So a definition that has changed since the operator read it runs nothing.
//!
//! A server is an address, or a program in a sandbox of its own, which starts with the first call of a run.
//!
//! A server of the modern era (2026-07-28) gets requests that are complete in themselves. A server of the legacy era gets
//! one session for each run. The client declares no capabilities, so no server can ask the agent or a person anything.
//!
//! **Invariant:** a credential goes to its own server only, and no result that contains it reaches the agent.

mod answer;
mod command_client;
mod credential;
pub mod error;
pub mod foreign_schema;
mod http_client;
pub mod lock_file;
mod request;
mod result;
mod tool_list;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::Value;
use serde_json::value::RawValue;
use tokio::sync::Mutex;

use self::answer::McpAnswer;
use self::command_client::McpCommandClient;
use self::error::McpServerError;
use self::http_client::McpHttpClient;
use self::lock_file::definition_digest;
use self::request::{McpRequest, McpSession};
use self::tool_list::{MAX_LIST_VALUES, ToolListLimit, parse_definition};
use super::config::{McpServerConfig, ToolConfigError};
use super::definition::is_tool_name;
use super::pinned_tool::PinnedTool;
use super::program_error::ToolProgramError;
use super::run_credentials::RunCredentials;
use crate::base::log_line_limiter::LogLineLimiter;

pub use self::command_client::McpCommandHost;

/// A client of one server, for one run.
#[derive(Debug)]
pub struct McpServer {
    name: String,
    transport: McpTransport,
    timeout: Duration,
    /// The session of a legacy server, or the era of a modern one; `None` before the first call.
    session: Mutex<Option<Arc<McpSession>>>,
    next_id: AtomicU64,
    failure_lines: LogLineLimiter,
}

/// The way of messages to a server.
#[derive(Debug)]
enum McpTransport {
    Http(Box<McpHttpClient>),
    Command(Box<McpCommandClient>),
}

/// The reader of a list of tools.
#[derive(Clone, Copy)]
enum ListReader {
    /// The operator, who keeps the definitions.
    Operator,
    /// This process, which compares a definition and keeps nothing.
    Process,
}

impl McpTransport {
    /// Sends a request, or a notification if there is no id, and returns the answer.
    async fn post(
        &self,
        session: &McpSession,
        request: &McpRequest<'_>,
        id: Option<u64>,
        max_bytes: usize,
    ) -> Result<McpAnswer, McpServerError> {
        match self {
            Self::Http(client) => client.post(session, request, id, max_bytes).await,
            Self::Command(client) => client.post(session, request, id, max_bytes).await,
        }
    }
}

impl McpServer {
    /// Creates the client of a server. The server is asked at the first call only. `secrets` are the credentials that its
    /// answers are searched for, and `host` is the place for the program of a server that is one.
    ///
    /// # Errors
    /// Returns an error that names the key.
    pub fn new(
        name: &str,
        config: &McpServerConfig,
        secrets: &Arc<RunCredentials>,
        host: Option<&McpCommandHost>,
    ) -> Result<Self, ToolConfigError> {
        if !is_tool_name(name) || name.contains("__") || name == "core" {
            let problem = format!(
                "`{}` is not the name of a server; give small letters, digits, `-` and single `_`, and not `core`",
                name.escape_debug()
            );
            return Err(ToolConfigError::new("mcp", problem));
        }
        let wrong = |(key, problem)| ToolConfigError::new(format!("mcp.{name}.{key}"), problem);
        let transport = match (&config.url, config.sandbox_job().map_err(wrong)?) {
            (Some(url), None) => McpTransport::Http(Box::new(
                McpHttpClient::new(url, config, secrets).map_err(wrong)?,
            )),
            (None, Some(job)) => {
                let client = McpCommandClient::new((name, job), config, host.cloned(), secrets);
                McpTransport::Command(Box::new(client))
            }
            (Some(_), Some(_)) => {
                return Err(wrong((
                    "command".to_owned(),
                    "is given beside `url`; remove one".to_owned(),
                )));
            }
            (None, None) => {
                let problem = "is missing; give the server's address, or its program in `command`";
                return Err(wrong(("url".to_owned(), problem.to_owned())));
            }
        };
        Ok(Self {
            name: name.to_owned(),
            transport,
            timeout: config.timeout,
            session: Mutex::default(),
            next_id: AtomicU64::new(1),
            failure_lines: LogLineLimiter::default(),
        })
    }

    /// Returns the definitions of all tools of the server, by their names.
    ///
    /// # Errors
    /// Returns an error if the server does not answer within its time, or its answer is not valid.
    pub async fn list_tools(&self) -> Result<BTreeMap<String, Value>, McpServerError> {
        let listing = async {
            let session = self.open_session().await?;
            let (mut tools, mut left_values) = (BTreeMap::new(), MAX_LIST_VALUES);
            let read = |name: Cow<'_, str>, definition: &RawValue| {
                tools.insert(name.into_owned(), parse_definition(definition, &mut left_values)?);
                Ok(ControlFlow::Continue(()))
            };
            self.read_list((&session, ListReader::Operator), read).await?;
            Ok(tools)
        };
        tokio::time::timeout(self.timeout, listing).await.unwrap_or(Err(McpServerError::TimedOut))
    }

    /// Calls a tool whose definition is still the pinned one. `arguments` is the client's own text. The result is JSON
    /// with the members `content` and `structuredContent` of the server's answer.
    ///
    /// # Errors
    /// Returns an error if the definition has changed, the tool fails, or the server does not answer as it should.
    pub async fn call_tool(
        &self,
        tool: &PinnedTool,
        arguments: &str,
        max_bytes: usize,
    ) -> Result<String, ToolProgramError> {
        let called = self.check_and_call(tool, arguments, max_bytes).await;
        called.map_err(|error| {
            self.log_failure(&tool.name, &error);
            error.into_program_error(max_bytes)
        })
    }

    /// Logs a failed call, at most once a minute for each kind of failure. The line has no text of the server's answer,
    /// which may repeat the agent's arguments. It may name addresses of the host's network, so only the operator sees it.
    fn log_failure(&self, tool: &str, error: &McpServerError) {
        let kind = error.kind();
        let Some(more) = self.failure_lines.count_event(kind) else { return };
        let (server, detail) = (&self.name, error.log_text());
        tracing::warn!(server, tool, kind, detail, more, "a call of a server's tool failed");
    }

    async fn check_and_call(
        &self,
        tool: &PinnedTool,
        arguments: &str,
        max_bytes: usize,
    ) -> Result<String, McpServerError> {
        let name = Value::from(tool.name.as_str()).to_string();
        let request = McpRequest {
            method: "tools/call",
            name: Some(&tool.name),
            params: &[("name", &name), ("arguments", arguments)],
        };
        let mut was_lost = false;
        // Each turn after a request that was not sent needs a program that another call has ended. The time of the call
        // bounds their number.
        let answer = loop {
            let session = match self.open_session().await {
                Err(McpServerError::NotSent) => continue,
                opened => opened?,
            };
            // 1. The definition, as the server gives it now.
            match self.find_digest(&session, &tool.name).await {
                Ok(current) if current.as_ref() == Some(&tool.digest) => {}
                Ok(_) => {
                    return Err(McpServerError::DefinitionChanged { tool: tool.name.clone() });
                }
                Err(error) => {
                    // The next turn, or the next call, asks again which era the server speaks.
                    self.forget_session(&session).await;
                    let is_unsent = matches!(error, McpServerError::NotSent);
                    // The server has forgotten the session, or was started anew. Nothing has been called yet, so another
                    // session changes nothing.
                    if is_unsent || (error.is_of_lost_session(&session) && !was_lost) {
                        was_lost |= !is_unsent;
                        continue;
                    }
                    return Err(error);
                }
            }
            // 2. The call. One that was sent is never sent again.
            match self.send_request(&session, &request, max_bytes).await {
                Err(McpServerError::NotSent) => self.forget_session(&session).await,
                answer => break answer?,
            }
        };
        // A server that repeats its credential must not give it to the agent, so the whole answer is checked, before a
        // part of it becomes the result or a text.
        result::read_call_result(&answer.into_result()?)
    }

    /// Forgets a session, unless another call has opened another one since.
    async fn forget_session(&self, session: &Arc<McpSession>) {
        let mut open = self.session.lock().await;
        open.take_if(|own| Arc::ptr_eq(own, session));
    }

    /// Returns the session, and opens it first if there is none.
    async fn open_session(&self) -> Result<Arc<McpSession>, McpServerError> {
        let mut open = self.session.lock().await;
        if let Some(session) = &*open {
            return Ok(Arc::clone(session));
        }
        let session = Arc::new(self.negotiate_session().await?);
        *open = Some(Arc::clone(&session));
        Ok(session)
    }

    /// Finds the era of the server: a server that does not discover as a modern one is greeted as a legacy one.
    async fn negotiate_session(&self) -> Result<McpSession, McpServerError> {
        let mut modern = McpSession::modern();
        let discover = McpRequest { method: "server/discover", name: None, params: &[] };
        match self.send_request(&modern, &discover, MAX_OPENING_BYTES).await {
            Err(error) if error.is_of_connection() => return Err(error),
            Ok(answer) => {
                modern.program = answer.program;
                let answer = answer.into_private_result();
                if answer.is_ok_and(|answer| result::serves_modern_version(&answer)) {
                    return Ok(modern);
                }
            }
            Err(_) => {}
        }
        let client = format!(
            r#"{{"name":"{}","version":"{}"}}"#,
            env!("CARGO_PKG_NAME"),
            env!("CARGO_PKG_VERSION")
        );
        let version = Value::from(request::NEWEST_LEGACY_VERSION).to_string();
        let initialize = McpRequest {
            method: "initialize",
            name: None,
            params: &[
                ("protocolVersion", &version),
                ("capabilities", "{}"),
                ("clientInfo", &client),
            ],
        };
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let greeting = McpSession::unopened();
        let answer =
            self.transport.post(&greeting, &initialize, Some(id), MAX_OPENING_BYTES).await?;
        let (session, program) = (answer.session.clone(), answer.program);
        let version = result::negotiated_version(&answer.into_private_result()?)?;
        let session = McpSession::legacy(version, session, program);
        let initialized =
            McpRequest { method: "notifications/initialized", name: None, params: &[] };
        self.transport.post(&session, &initialized, None, MAX_OPENING_BYTES).await?;
        Ok(session)
    }

    /// Returns the digest of a tool's definition, as the server gives it now. Only this definition is parsed, and no
    /// page behind it is asked for.
    async fn find_digest(
        &self,
        session: &McpSession,
        tool: &str,
    ) -> Result<Option<String>, McpServerError> {
        let (mut digest, mut left_values) = (None, MAX_LIST_VALUES);
        let read = |name: Cow<'_, str>, definition: &RawValue| {
            if name != tool {
                return Ok(ControlFlow::Continue(()));
            }
            digest = Some(definition_digest(&parse_definition(definition, &mut left_values)?));
            Ok(ControlFlow::Break(()))
        };
        self.read_list((session, ListReader::Process), read).await?;
        Ok(digest)
    }

    /// Hands the name and the definition of each tool to `read`, until `read` breaks off or the list ends.
    async fn read_list(
        &self,
        (session, reader): (&McpSession, ListReader),
        mut read: impl FnMut(Cow<'_, str>, &RawValue) -> Result<ControlFlow<()>, McpServerError> + Send,
    ) -> Result<(), McpServerError> {
        let (mut limit, mut cursor) = (ToolListLimit::new(), None);
        loop {
            let params = cursor.as_deref().map(|cursor: &str| ("cursor", cursor));
            let request =
                McpRequest { method: "tools/list", name: None, params: params.as_slice() };
            let max_bytes = limit.next_page_bytes()?;
            let answer = self.send_request(session, &request, max_bytes).await;
            let answer = answer.map_err(|error| match error {
                McpServerError::TooLarge => {
                    McpServerError::Malformed("a list of tools that is too large")
                }
                error => error,
            })?;
            let answer = match reader {
                ListReader::Operator => answer.into_result()?,
                ListReader::Process => answer.into_private_result()?,
            };
            let page = limit.read_page(answer.get())?;
            for (name, definition) in page.tools {
                if read(name, definition)?.is_break() {
                    return Ok(());
                }
            }
            let Some(next) = page.next_cursor else { return Ok(()) };
            cursor = Some(Value::from(next).to_string());
        }
    }

    async fn send_request(
        &self,
        session: &McpSession,
        request: &McpRequest<'_>,
        max_bytes: usize,
    ) -> Result<McpAnswer, McpServerError> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        self.transport.post(session, request, Some(id), max_bytes).await
    }
}

/// The largest answer to the requests that open a session, in bytes. Our choice: such an answer has a few KiB.
const MAX_OPENING_BYTES: usize = 256 * 1024;
