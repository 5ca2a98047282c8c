//! The headers that no client may set over a connection, whatever a list says.

use http::HeaderName;

/// Returns true for a header that no client may set: it carries a credential, frames the message, or is made here.
pub(super) fn is_reserved_header(name: &HeaderName) -> bool {
    let name = name.as_str();
    RESERVED_HEADERS.contains(&name)
        || RESERVED_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// The headers that no list can let pass.
const RESERVED_HEADERS: [&str; 26] = [
    "accept-encoding",
    "api-key",
    "authentication",
    "authorization",
    "connection",
    "content-length",
    "cookie",
    "cookie2",
    "expect",
    "forwarded",
    "host",
    "http2-settings",
    "if-range",
    "keep-alive",
    "max-forwards",
    "origin",
    "range",
    "referer",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "via",
    "x-api-key",
    "x-http-method",
    "x-original-url",
];

/// The beginnings of further such names.
const RESERVED_PREFIXES: [&str; 8] = [
    "proxy-",
    "sec-",
    "x-amz-",
    "x-forwarded-",
    "x-http-method-",
    "x-litellm-",
    "x-method-",
    "x-rewrite-",
];
