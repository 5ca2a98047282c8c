//! A request to a server, and the session that it belongs to.

use std::fmt::Write;

/// One request. The parameters are JSON texts, which are sent as they stand.
pub(super) struct McpRequest<'a> {
    pub(super) method: &'static str,
    /// The name that a header of the modern era repeats.
    pub(super) name: Option<&'a str>,
    pub(super) params: &'a [(&'a str, &'a str)],
}

/// The facts that every request to an open server has.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct McpSession {
    is_modern: bool,
    /// The version that the server has agreed to; `None` before that.
    pub(super) version: Option<String>,
    /// The id that a legacy server has given.
    pub(super) id: Option<String>,
    /// The number of the program that knows the session; 0 for a server that is an address.
    pub(super) program: u64,
}

impl McpRequest<'_> {
    /// Returns true if the request needs no open session.
    pub(super) fn opens_session(&self) -> bool {
        matches!(self.method, "server/discover" | "initialize")
    }

    /// Returns true if a server of the legacy era does not know the method.
    pub(super) fn may_be_unknown(&self) -> bool {
        self.method == "server/discover"
    }
}

impl McpSession {
    pub(super) fn modern() -> Self {
        Self { is_modern: true, version: Some(MODERN_VERSION.to_owned()), id: None, program: 0 }
    }

    pub(super) fn legacy(version: String, id: Option<String>, program: u64) -> Self {
        Self { is_modern: false, version: Some(version), id, program }
    }

    /// Creates the session of the first request to a legacy server.
    pub(super) fn unopened() -> Self {
        Self { is_modern: false, version: None, id: None, program: 0 }
    }

    /// Returns the headers of a request in this session.
    pub(super) fn headers<'a>(
        &'a self,
        request: &McpRequest<'a>,
    ) -> impl Iterator<Item = (&'static str, &'a str)> {
        let modern = |value: Option<&'a str>| value.filter(|_| self.is_modern);
        let version = self.version.as_deref().map(|version| ("mcp-protocol-version", version));
        let method = modern(Some(request.method)).map(|method| ("mcp-method", method));
        let name = modern(request.name).map(|name| ("mcp-name", name));
        let id = self.id.as_deref().map(|id| ("mcp-session-id", id));
        [version, method, name, id].into_iter().flatten()
    }

    /// Returns the body of a request in this session. Without an id, the request is a notification.
    pub(super) fn body(&self, request: &McpRequest<'_>, id: Option<u64>) -> String {
        let mut body = String::from(r#"{"jsonrpc":"2.0","#);
        if let Some(id) = id {
            // Writing to a string cannot fail.
            let _ = write!(body, r#""id":{id},"#);
        }
        let _ = write!(body, r#""method":"{}","params":{{"#, request.method);
        let mut separator = "";
        for (name, value) in request.params {
            let _ = write!(body, r#"{separator}"{name}":{value}"#);
            separator = ",";
        }
        if self.is_modern {
            let version = env!("CARGO_PKG_VERSION");
            let _ = write!(
                body,
                r#"{separator}"_meta":{{"io.modelcontextprotocol/protocolVersion":"{MODERN_VERSION}","io.modelcontextprotocol/clientCapabilities":{{}},"io.modelcontextprotocol/clientInfo":{{"name":"cogni-gateway","version":"{version}"}}}}"#
            );
        }
        body.push_str("}}");
        body
    }
}

/// The version of the modern era.
pub(super) const MODERN_VERSION: &str = "2026-07-28";

/// The version that a legacy server is offered.
pub(super) const NEWEST_LEGACY_VERSION: &str = "2025-11-25";

/// The versions of a legacy server that this client understands.
pub(super) const LEGACY_VERSIONS: [&str; 4] =
    [NEWEST_LEGACY_VERSION, "2025-06-18", "2025-03-26", "2024-11-05"];
