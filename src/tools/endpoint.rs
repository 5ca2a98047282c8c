//! The paths of a run's tools on its socket: `/tool/…` for [calls](super::exec_endpoint), `/mcp` for clients of
//! [MCP](super::mcp).

use super::run_tools::RunTools;
use crate::base::local_endpoint::{EndpointAnswerFuture, LocalEndpoint, LocalRequest};

impl LocalEndpoint for RunTools {
    fn handle_request<'a>(&'a self, request: LocalRequest<'a>) -> EndpointAnswerFuture<'a> {
        Box::pin(async move {
            match ToolPath::from(request.path) {
                ToolPath::Mcp(server) => self.handle_mcp(server, request).await,
                ToolPath::Exec => self.handle_exec(request).await.into(),
            }
        })
    }
}

/// The endpoint that a path belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolPath<'a> {
    Exec,
    /// The endpoint for clients of MCP, and the server whose own path it is.
    Mcp(Option<&'a str>),
}

impl<'a> From<&'a str> for ToolPath<'a> {
    fn from(path: &'a str) -> Self {
        match path.strip_prefix(MCP_PATH) {
            Some("") => Self::Mcp(None),
            Some(rest) => {
                rest.strip_prefix('/').map_or(Self::Exec, |server| Self::Mcp(Some(server)))
            }
            None => Self::Exec,
        }
    }
}

/// The path of the endpoint for clients of MCP. Below it, each server has a path of its own.
const MCP_PATH: &str = "/mcp";
