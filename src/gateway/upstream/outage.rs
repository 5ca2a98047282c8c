//! What the operator is told of an upstream that fails: a line a minute for each kind of failure, with its cause.
//!
//! Clients are told a code only: where the upstream is, and why it is not reached, is the operator's business.

use std::collections::BTreeMap;
use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::{UpstreamError, UpstreamUrl};

/// The failures of one upstream, for the log. All workers of a process share one.
#[derive(Debug)]
pub struct FailureLog {
    target: UpstreamUrl,
    told: Mutex<BTreeMap<&'static str, LoggedFailure>>,
}

/// A kind of failure that the log has had.
#[derive(Debug)]
struct LoggedFailure {
    at: Instant,
    /// Failures of this kind since then, which the log has not had.
    more: u64,
}

/// Why an upstream is not reached, or does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureCause {
    /// Its name has no address.
    Dns,
    /// Nothing listens at its port.
    Refused,
    /// There is no way to its address.
    NoRoute,
    /// Its certificate is not accepted, or it does not speak TLS.
    Tls,
    Timeout,
    /// The connection ended in the midst of a call.
    Closed,
    /// It does not speak HTTP.
    NotHttp,
    Other,
}

/// A name that has no address.
#[derive(Debug, thiserror::Error)]
#[error("the name has no address: {0}")]
pub(super) struct LookupError(pub(super) io::Error);

impl FailureLog {
    pub fn new(target: &UpstreamUrl) -> Self {
        Self { target: target.clone(), told: Mutex::default() }
    }

    /// Tells of a call that failed. A run's deadline is no failure of the upstream's.
    pub fn failed(&self, error: &UpstreamError) {
        if matches!(error, UpstreamError::Deadline) {
            return;
        }
        let code = error.code();
        let Some(more) = self.is_due(code) else { return };
        let (upstream, cause) = (&self.target, FailureCause::of(error));
        let detail = innermost(error);
        let hint = cause.hint();
        tracing::warn!(%upstream, code, %cause, detail, more, hint, "upstream failure");
    }

    /// Tells that the upstream does not accept our key.
    pub fn key_refused(&self, status: u16) {
        const CODE: &str = "upstream_auth";
        let Some(more) = self.is_due(CODE) else { return };
        let (upstream, hint) = (&self.target, KEY_HINT);
        tracing::warn!(%upstream, code = CODE, status, more, hint, "upstream refuses the gateway's key");
    }

    /// Returns how many failures of this kind the log has not had, where it is to have this one.
    fn is_due(&self, code: &'static str) -> Option<u64> {
        let now = Instant::now();
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        match told.get_mut(code) {
            Some(last) if now.duration_since(last.at) < TOLD_EVERY => {
                last.more += 1;
                None
            }
            last => {
                let more = last.map_or(0, |last| last.more);
                told.insert(code, LoggedFailure { at: now, more: 0 });
                Some(more)
            }
        }
    }
}

impl FailureCause {
    /// The cause of a failed call, by the types of what has led to it.
    pub fn of(error: &UpstreamError) -> Self {
        match error {
            UpstreamError::ConnectTimeout(_)
            | UpstreamError::FirstByteTimeout(_)
            | UpstreamError::IdleTimeout(_)
            | UpstreamError::Deadline => Self::Timeout,
            UpstreamError::Closed => Self::Closed,
            UpstreamError::Malformed(_) => Self::NotHttp,
            UpstreamError::Connect(_) => causes(error).find_map(Self::known).unwrap_or(Self::Other),
            UpstreamError::Io(_) | UpstreamError::Hyper(_) => {
                causes(error).find_map(Self::known).unwrap_or(Self::Closed)
            }
        }
    }

    fn known(error: &(dyn StdError + 'static)) -> Option<Self> {
        // hyper-util has no type for this one.
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

    /// What the operator can do about it.
    pub fn hint(self) -> &'static str {
        match self {
            Self::Dns => "its name does not resolve here; see LITELLM_HOST, and this machine's DNS",
            Self::Refused => "nothing listens at its port; start it, or see LITELLM_HOST",
            Self::NoRoute => {
                "there is no way to its address from here; see LITELLM_HOST, and this machine's network"
            }
            Self::Tls => {
                "TLS fails; see the scheme in LITELLM_HOST, and UPSTREAM_CA_FILE for a private authority"
            }
            Self::Timeout => {
                "it does not answer in time; see whether it is overloaded, or a firewall is in between"
            }
            Self::Closed => "it has ended the connection; see its own log",
            Self::NotHttp => {
                "what answers there does not speak HTTP; see LITELLM_HOST, and its scheme"
            }
            Self::Other => "see LITELLM_HOST",
        }
    }
}

impl fmt::Display for FailureCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// An error and all that has led to it. An I/O error hides the error that it was made of from `source`.
fn causes<'e>(
    error: &'e (dyn StdError + 'static),
) -> impl Iterator<Item = &'e (dyn StdError + 'static)> {
    std::iter::successors(Some(error), |above| {
        let error: &'e (dyn StdError + 'static) = *above;
        let inner = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        inner.map(|inner| inner as &(dyn StdError + 'static)).or_else(|| error.source())
    })
}

/// The first cause of an error, in its own words: those above it only say that there was one.
pub(super) fn innermost(error: &(dyn StdError + 'static)) -> String {
    causes(error).last().map(ToString::to_string).unwrap_or_default()
}

/// What to do where the upstream does not accept our key.
pub(super) const KEY_HINT: &str =
    "it does not accept the key; see LITELLM_MASTER_KEY, or its file, and UPSTREAM_KIND";

/// Ours: an operator who looks sees it, and a client that calls on cannot fill the log.
const TOLD_EVERY: Duration = Duration::from_mins(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_told_once_a_minute_and_kind() {
        let log = FailureLog::new(&UpstreamUrl::default());
        assert_eq!(log.is_due("upstream_closed"), Some(0));
        assert_eq!((log.is_due("upstream_closed"), log.is_due("upstream_auth")), (None, Some(0)));
        let mut told = log.told.lock().expect("nobody has panicked");
        let last = told.get_mut("upstream_closed").expect("it was told");
        last.at = last.at.checked_sub(TOLD_EVERY).expect("the clock has run so long");
        drop(told);
        assert_eq!(log.is_due("upstream_closed"), Some(1), "and how many were not told");
    }

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
            (UpstreamError::ConnectTimeout(TOLD_EVERY), "timeout"),
            (UpstreamError::Closed, "closed"),
            (UpstreamError::Malformed("x"), "not_http"),
        ];
        for (error, cause) in causes {
            assert_eq!(FailureCause::of(&error).as_str(), cause, "{error:?}");
        }
    }
}
