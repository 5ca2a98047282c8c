//! The headers that no client may set over a connection, whatever a list says.

use http::HeaderName;

/// Returns true for a header that no client may set: it carries a credential, frames the message, or is made here.
pub(super) fn is_reserved_header(name: &HeaderName) -> bool {
    let name = name.as_str();
    RESERVED_HEADERS.contains(&name)
        || CREDENTIAL_HEADERS.contains(&name)
        || RESERVED_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// Returns true for a usual header of API keys, which no client may set, and which a credential may use.
pub(super) fn is_credential_header(name: &HeaderName) -> bool {
    CREDENTIAL_HEADERS.contains(&name.as_str())
}

/// Returns true for a header that a client may set over a connection that signs for AWS, if the operator says so. The
/// others are made here, frame the body, or name an object that no rule has checked.
pub(super) fn is_aws_header(name: &HeaderName) -> bool {
    let name = name.as_str();
    name.starts_with("x-amz-")
        && !MADE_AWS_HEADERS.contains(&name)
        && !SOURCE_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// The headers of AWS that no list can let pass.
const MADE_AWS_HEADERS: [&str; 9] = [
    "x-amz-access-token",
    "x-amz-content-sha256",
    "x-amz-date",
    "x-amz-decoded-content-length",
    "x-amz-mfa",
    "x-amz-s3session-token",
    "x-amz-security-token",
    "x-amz-signature",
    "x-amz-trailer",
];

/// The beginnings of the headers with which S3 reads an object of another path.
const SOURCE_PREFIXES: [&str; 2] = ["x-amz-copy-source", "x-amz-rename-source"];

/// The usual headers of API keys and tokens.
const CREDENTIAL_HEADERS: [&str; 16] = [
    "api-key",
    "apikey",
    "client-cert",
    "dd-api-key",
    "dd-application-key",
    "deploy-token",
    "dpop",
    "job-token",
    "ocp-apim-subscription-key",
    "private-token",
    "x-access-token",
    "x-api-key",
    "x-auth-token",
    "x-goog-api-key",
    "x-gitlab-token",
    "x-vault-token",
];

/// The headers that no list can let pass.
const RESERVED_HEADERS: [&str; 25] = [
    "accept-encoding",
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
    "x-http-method",
    "x-original-host",
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
