//! The paths of a run's tools on its socket: `/tool/…` for [calls](super::exec_endpoint), `/mcp` for clients of
//! [MCP](super::mcp).

use super::run_tools::RunTools;
use crate::base::local_endpoint::{LocalEndpoint, LocalReplyFuture, LocalRequest};

impl LocalEndpoint for RunTools {
    fn handle_request<'a>(&'a self, request: LocalRequest<'a>) -> LocalReplyFuture<'a> {
        Box::pin(async move {
            match match_mcp_path(request.path) {
                Some(server) => self.handle_mcp(server, request).await,
                None => self.handle_exec(request).await,
            }
        })
    }
}

/// Returns the server that a path for clients of MCP names, if it names one; `None` for a path that is not for them.
pub fn match_mcp_path(path: &str) -> Option<Option<&str>> {
    match path.strip_prefix(MCP_PATH)? {
        "" => Some(None),
        rest => rest.strip_prefix('/').map(Some),
    }
}

/// The path of the endpoint for clients of MCP. Below it, each server has a path of its own.
const MCP_PATH: &str = "/mcp";
