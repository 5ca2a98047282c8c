//! The paths of a run's tools on its socket: `/tool/…` for [calls](super::exec_endpoint), `/mcp` for clients of
//! [MCP](super::mcp).

use super::run_tools::RunTools;
use crate::base::local_endpoint::{LocalEndpoint, LocalReplyFuture, LocalRequest};

impl LocalEndpoint for RunTools {
    fn handle_request<'a>(&'a self, request: LocalRequest<'a>) -> LocalReplyFuture<'a> {
        Box::pin(async move {
            match request.path.strip_prefix(MCP_PATH) {
                Some("") => self.handle_mcp(None, request).await,
                Some(rest) if rest.starts_with('/') => {
                    self.handle_mcp(Some(&rest[1..]), request).await
                }
                _ => self.handle_exec(request).await,
            }
        })
    }
}

/// The path of the endpoint for clients of MCP. Below it, each server has a path of its own.
const MCP_PATH: &str = "/mcp";
