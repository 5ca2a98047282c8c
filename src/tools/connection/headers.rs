//! The headers of a request and of its answer: the ones that pass.
//!
//! **Invariant:** a header of the client passes only if a list names it, and no list can name a header that carries a
//! credential. So the agent cannot use an account of its own at an allowed server.

use http::{HeaderMap, HeaderName, HeaderValue, Response, header};

use super::reserved_headers::{is_aws_header, is_reserved_header};
use crate::tools::run_credentials::EchoGuard;

/// Returns the client's headers that pass to the server, and the ones that are made here.
pub(super) fn forwarded_headers(
    client: &HeaderMap,
    listed: &[HeaderName],
    has_credential: bool,
) -> HeaderMap {
    let named = hop_names(client);
    let mut passed = HeaderMap::new();
    for (name, value) in client {
        if named.contains(name) {
            continue;
        }
        let is_listed = PASSED_HEADERS.contains(&name.as_str()) || listed.contains(name);
        // A client that asks for ranges could receive an echoed credential in pieces that no guard finds.
        let is_range = matches!(*name, header::RANGE | header::IF_RANGE) && !has_credential;
        // A header of AWS is on the list only of a connection that signs it.
        let is_allowed = !is_reserved_header(name) || is_aws_header(name);
        if (is_listed && is_allowed) || is_range {
            passed.append(name, value.clone());
        }
    }
    passed.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    passed
}

/// The reason why an answer must not pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AnswerFault {
    /// The answer is encoded, or switches the protocol.
    Encoded,
    /// A header contains the credential.
    Echoed,
}

/// Returns the headers of an answer that pass to the client.
///
/// # Errors
/// Returns an error if the guard cannot see the answer's body, or a header contains the credential.
pub(super) fn answered_headers<B>(
    answer: &Response<B>,
    (guard, has_credential): (Option<&EchoGuard>, bool),
) -> Result<HeaderMap, AnswerFault> {
    let headers = answer.headers();
    let is_plain = |name: HeaderName, plain: &[u8]| {
        headers.get_all(name).iter().all(|value| value.as_bytes().eq_ignore_ascii_case(plain))
    };
    // An encoded body would hide the credential. A server that has got none need not be read.
    let is_readable = is_plain(header::TRANSFER_ENCODING, b"chunked")
        && (!has_credential || is_plain(header::CONTENT_ENCODING, b"identity"));
    if !is_readable || answer.status().is_informational() {
        return Err(AnswerFault::Encoded);
    }
    let named = hop_names(headers);
    let mut passed = HeaderMap::new();
    for (name, value) in headers {
        if guard.is_some_and(|guard| guard.is_in_header(name, value)) {
            return Err(AnswerFault::Echoed);
        }
        if !DROPPED_ANSWER_HEADERS.contains(&name.as_str()) && !named.contains(name) {
            passed.append(name, value.clone());
        }
    }
    Ok(passed)
}

/// Returns the headers that `Connection` names. They belong to one connection, so they do not pass (RFC 9110, section
/// 7.6.1).
fn hop_names(headers: &HeaderMap) -> Vec<HeaderName> {
    headers
        .get_all(header::CONNECTION)
        .iter()
        .flat_map(|value| value.as_bytes().split(|byte| *byte == b','))
        .filter_map(|name| HeaderName::from_bytes(name.trim_ascii()).ok())
        .collect()
}

/// The headers of a client that pass. They say what the client wants, and not who it is.
const PASSED_HEADERS: [&str; 18] = [
    "accept",
    "accept-language",
    "cache-control",
    "content-encoding",
    "content-language",
    "content-type",
    "git-protocol",
    "idempotency-key",
    "if-match",
    "if-modified-since",
    "if-none-match",
    "if-unmodified-since",
    "npm-command",
    "pragma",
    "prefer",
    "user-agent",
    "x-github-api-version",
    "x-requested-with",
];

/// The headers of a server that do not pass: they belong to one connection, or give the agent a session of the host.
const DROPPED_ANSWER_HEADERS: [&str; 12] = [
    "alt-svc",
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authentication-info",
    "proxy-connection",
    "set-cookie",
    "set-cookie2",
    "strict-transport-security",
    "trailer",
    "transfer-encoding",
    "upgrade",
];
