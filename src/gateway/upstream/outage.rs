//! The operator's log of upstream failures: at most one line a minute for each kind of failure, with its cause.
//!
//! Clients receive a code only. The upstream's address and the cause of the failure are reported to the operator.

use std::error::Error as StdError;
use std::fmt;
use std::io;

use super::{UpstreamError, UpstreamUrl};
use crate::base::log_line_limiter::LogLineLimiter;

/// The log of one upstream's failures. All workers of a process share one log.
#[derive(Debug)]
pub struct FailureLog {
    target: UpstreamUrl,
    lines: LogLineLimiter,
}

/// The reason why an upstream is not reached or does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureCause {
    /// The upstream's name has no address.
    Dns,
    /// No process listens at the upstream's port.
    Refused,
    /// There is no route to the upstream's address.
    NoRoute,
    /// The upstream's certificate is not accepted, or the upstream does not speak TLS.
    Tls,
    Timeout,
    /// The connection ended in the middle of a call.
    Closed,
    /// The upstream does not speak HTTP.
    NotHttp,
    Other,
}

/// An error for a name that has no address.
#[derive(Debug, thiserror::Error)]
#[error("the name has no address: {0}")]
pub(super) struct LookupError(pub(super) io::Error);

impl FailureLog {
    pub fn new(target: &UpstreamUrl) -> Self {
        Self { target: target.clone(), lines: LogLineLimiter::default() }
    }

    /// Logs a failed call. A run's deadline is no failure of the upstream and is not logged.
    pub fn failed(&self, error: &UpstreamError) {
        if matches!(error, UpstreamError::Deadline) {
            return;
        }
        let code = error.code();
        let Some(unlogged) = self.lines.count_event(code) else { return };
        let (upstream, cause) = (&self.target, FailureCause::of(error));
        let detail = innermost(error);
        let hint = cause.hint();
        tracing::warn!(%upstream, code, %cause, detail, more = unlogged, hint, "upstream failure");
    }

    /// Logs that the upstream does not accept the gateway's key.
    pub fn key_refused(&self, status: u16) {
        const CODE: &str = "upstream_auth";
        let Some(unlogged) = self.lines.count_event(CODE) else { return };
        let (upstream, hint) = (&self.target, KEY_HINT);
        tracing::warn!(%upstream, code = CODE, status, more = unlogged, hint, "upstream refuses the gateway's key");
    }
}

impl FailureCause {
    /// Returns the cause of a failed call, judged by the types of the errors in its source chain.
    pub fn of(error: &UpstreamError) -> Self {
        match error {
            UpstreamError::ConnectTimeout(_)
            | UpstreamError::FirstByteTimeout(_)
            | UpstreamError::IdleTimeout(_)
            | UpstreamError::Deadline => Self::Timeout,
            UpstreamError::Closed => Self::Closed,
            UpstreamError::Malformed(_) => Self::NotHttp,
            // The outer error says only that connecting failed. The first error in the chain with a known type decides.
            UpstreamError::Connect(_) => causes(error).find_map(Self::known).unwrap_or(Self::Other),
            UpstreamError::Io(_) | UpstreamError::Hyper(_) => {
                causes(error).find_map(Self::known).unwrap_or(Self::Closed)
            }
        }
    }

    fn known(error: &(dyn StdError + 'static)) -> Option<Self> {
        // hyper-util has no public type for a failed lookup, so its message decides.
        if error.is::<LookupError>() || error.to_string() == "dns error" {
            return Some(Self::Dns);
        }
        if error.is::<rustls::Error>() {
            return Some(Self::Tls);
        }
        match error.downcast_ref::<io::Error>()?.kind() {
            io::ErrorKind::ConnectionRefused => Some(Self::Refused),
            io::ErrorKind::HostUnreachable
            | io::ErrorKind::NetworkUnreachable
            | io::ErrorKind::NetworkDown
            | io::ErrorKind::AddrNotAvailable => Some(Self::NoRoute),
            io::ErrorKind::TimedOut => Some(Self::Timeout),
            _ => None,
        }
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Dns => "dns",
            Self::Refused => "connection_refused",
            Self::NoRoute => "no_route",
            Self::Tls => "tls",
            Self::Timeout => "timeout",
            Self::Closed => "closed",
            Self::NotHttp => "not_http",
            Self::Other => "other",
        }
    }

    /// Returns the advice for the operator.
    pub fn hint(self) -> &'static str {
        match self {
            Self::Dns => {
                "the upstream's name does not resolve here; check LITELLM_HOST and this machine's DNS"
            }
            Self::Refused => {
                "nothing listens at the upstream's port; start the upstream, or check LITELLM_HOST"
            }
            Self::NoRoute => {
                "there is no route to the upstream's address; check LITELLM_HOST and this machine's network"
            }
            Self::Tls => {
                "TLS fails; check the scheme in LITELLM_HOST, and set UPSTREAM_CA_FILE for a private authority"
            }
            Self::Timeout => {
                "the upstream does not answer in time; check its load, and any firewall in between"
            }
            Self::Closed => "the upstream has ended the connection; check the upstream's own log",
            Self::NotHttp => {
                "the server at the upstream's address does not speak HTTP; check LITELLM_HOST and its scheme"
            }
            Self::Other => "check LITELLM_HOST",
        }
    }
}

impl fmt::Display for FailureCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Iterates over an error and its causes, outermost first. The source of an I/O error skips the error that the I/O
/// error wraps, so that error is taken from `get_ref`.
fn causes<'e>(
    error: &'e (dyn StdError + 'static),
) -> impl Iterator<Item = &'e (dyn StdError + 'static)> {
    std::iter::successors(Some(error), |above| {
        let error: &'e (dyn StdError + 'static) = *above;
        let inner = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        inner.map(|inner| inner as &(dyn StdError + 'static)).or_else(|| error.source())
    })
}

/// Returns the message of the innermost cause. The errors above it only repeat that something failed.
pub(super) fn innermost(error: &(dyn StdError + 'static)) -> String {
    causes(error).last().map(ToString::to_string).unwrap_or_default()
}

/// The advice if the upstream does not accept the gateway's key.
pub(super) const KEY_HINT: &str =
    "the upstream does not accept the key; check LITELLM_MASTER_KEY or its file, and UPSTREAM_KIND";

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_cause_is_found_wherever_it_stands() {
        let io = |kind| io::Error::new(kind, "x");
        let tls = rustls::Error::General("no".to_owned());
        let causes = [
            (
                UpstreamError::Connect(io::Error::other(LookupError(io(io::ErrorKind::Other)))),
                "dns",
            ),
            (UpstreamError::Connect(io(io::ErrorKind::ConnectionRefused)), "connection_refused"),
            (UpstreamError::Connect(io(io::ErrorKind::NetworkUnreachable)), "no_route"),
            (UpstreamError::Connect(io::Error::other(io::Error::other(tls.clone()))), "tls"),
            (UpstreamError::Hyper(Box::new(io::Error::other(tls))), "tls"),
            (UpstreamError::ConnectTimeout(Duration::from_secs(5)), "timeout"),
            (UpstreamError::Closed, "closed"),
            (UpstreamError::Malformed("x"), "not_http"),
        ];
        for (error, cause) in causes {
            assert_eq!(FailureCause::of(&error).as_str(), cause, "{error:?}");
        }
    }
}
