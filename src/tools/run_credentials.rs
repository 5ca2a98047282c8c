//! The credentials of a run's servers, and the search for them in every answer to the run.
//!
//! A server may know the credential of another one: a mirror, a webhook or a log repeats what it was sent. So the answers
//! of connections and of servers of MCP are searched for the credentials of all of them, and for values that were
//! replaced while the run went on.
//!
//! **Invariant:** a value is known here before it is sent.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use bytes::Bytes;
use http::{HeaderName, HeaderValue};

use super::aws_credential::AwsCredential;
use super::config::{McpServerConfig, ToolConfig};
use super::connection_config::ConnectionCredentialConfig;
use super::credential_source::CredentialSource;
use super::header_secrets::list_header_secrets;
use crate::base::secret::SecretString;
use crate::base::secret_redactor::SecretRedactor;

/// The credentials that a run's servers have got or may get.
#[derive(Default)]
pub struct RunCredentials {
    /// The variables and files whose values the run may send.
    sources: Vec<CredentialSource>,
    /// Those of keys of AWS, whose values have more than one secret.
    aws_sources: Vec<CredentialSource>,
    known: Mutex<KnownSecrets>,
}

#[derive(Default)]
struct KnownSecrets {
    /// The values, the one that was used last at the end.
    values: VecDeque<SecretString>,
    /// The values that each connection and each server's program has got last. They are not forgotten.
    latest: BTreeMap<String, Vec<SecretString>>,
    /// The search for these values; `None` before it is needed again.
    search: Option<Arc<SecretSearch>>,
}

/// A search for all values that are known at one time.
struct SecretSearch {
    redactor: SecretRedactor,
    /// The secrets in small letters, because the names of headers are in small letters.
    folded: Vec<Vec<u8>>,
}

/// A search for the run's credentials in an answer, as it streams.
pub(super) struct EchoGuard {
    secrets: Arc<RunCredentials>,
    search: Arc<SecretSearch>,
    redactor: SecretRedactor,
}

impl RunCredentials {
    /// Creates the credentials of a run with a configuration. The value that a program prints is added when it is sent.
    pub fn for_config(config: &ToolConfig) -> Self {
        let of_servers = config.mcp.values().flat_map(McpServerConfig::credentials).cloned();
        let connections = config.connections.values().filter_map(|own| own.credential.as_ref());
        let (aws, others): (Vec<_>, Vec<_>) = connections.partition(|own| own.aws.is_some());
        let sources = others.into_iter().map(ConnectionCredentialConfig::source).chain(of_servers);
        let aws_sources = aws.into_iter().map(ConnectionCredentialConfig::source);
        Self {
            sources: sources.filter(CredentialSource::has_one_place).collect(),
            aws_sources: aws_sources.filter(CredentialSource::has_one_place).collect(),
            known: Mutex::default(),
        }
    }

    /// Adds a value that is about to be sent. Beyond the limits, the values that were used longest ago are forgotten.
    pub(super) fn add_value(&self, value: &SecretString) {
        self.lock().add_value(value);
    }

    /// Adds the values that a connection or a server's program is about to get. They are known until it gets others, so
    /// values that change with each request do not push out those of another owner.
    pub(super) fn add_latest(&self, owner: &str, values: &[&SecretString]) {
        let mut known = self.lock();
        let latest = values.iter().map(|value| (*value).clone());
        known.latest.insert(owner.to_owned(), latest.collect());
        for value in values {
            known.add_value(value);
        }
    }

    /// Returns a guard for one answer; `None` if no server of the run gets a credential.
    pub(super) fn guard_answer(self: &Arc<Self>) -> Option<EchoGuard> {
        // The values that another request may send while the answer comes. A value that cannot be read is not sent.
        for value in self.sources.iter().filter_map(|source| source.read_value().ok()) {
            self.add_value(&value);
        }
        for value in self.aws_sources.iter().filter_map(|source| source.read_value().ok()) {
            let parsed = AwsCredential::parse_valid(&value, SystemTime::now());
            for secret in parsed.iter().flat_map(AwsCredential::secrets) {
                self.add_value(secret);
            }
        }
        let search = self.current_search()?;
        let redactor = search.redactor.clone();
        Some(EchoGuard { secrets: Arc::clone(self), search, redactor })
    }

    /// Returns the search for all known values; `None` without any value.
    fn current_search(&self) -> Option<Arc<SecretSearch>> {
        let mut known = self.lock();
        if known.values.is_empty() {
            return None;
        }
        if known.search.is_none() {
            let search = SecretSearch::new(known.values.iter());
            known.search = Some(Arc::new(search));
        }
        known.search.clone()
    }

    fn lock(&self) -> MutexGuard<'_, KnownSecrets> {
        // No code under this lock panics, and no value may be lost.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl KnownSecrets {
    fn add_value(&mut self, value: &SecretString) {
        if let Some(place) = self.values.iter().position(|own| own == value) {
            // A value that is used again is forgotten later.
            let used = self.values.remove(place);
            self.values.extend(used);
            return;
        }
        self.values.push_back(value.clone());
        self.search = None;
        let bytes = |value: &SecretString| value.expose_secret().len();
        let mut sum: usize = self.values.iter().map(bytes).sum();
        while self.values.len() > MAX_VALUES || sum > MAX_VALUE_BYTES {
            // The newest value is about to be sent.
            let mut older = self.values.iter().take(self.values.len() - 1);
            let is_latest =
                |own: &SecretString| self.latest.values().flatten().any(|one| one == own);
            let Some(place) = older.position(|own| !is_latest(own)) else { break };
            sum -= self.values.remove(place).as_ref().map_or(0, bytes);
        }
    }
}

impl SecretSearch {
    /// Creates a search for values: a value itself is searched for, and each secret that the text of a header has.
    fn new<'a>(values: impl Iterator<Item = &'a SecretString>) -> Self {
        let secrets = values.flat_map(|value| {
            let mut secrets = list_header_secrets(value);
            secrets.push(value.clone());
            secrets
        });
        let secrets: Vec<_> = secrets.collect();
        let folded =
            |secret: &SecretString| secret.expose_secret().to_ascii_lowercase().into_bytes();
        Self {
            redactor: SecretRedactor::for_keys(&secrets),
            folded: secrets.iter().map(folded).collect(),
        }
    }
}

impl EchoGuard {
    /// Returns the part of the body so far that may pass, or `None` if the body contains a credential.
    pub(super) fn pass_frame(&mut self, frame: Bytes) -> Option<Bytes> {
        // A value that was replaced since the last frame may come back in this one.
        if let Some(search) = self.secrets.current_search()
            && !Arc::ptr_eq(&search, &self.search)
        {
            self.redactor.replace_secrets(&search.redactor);
            self.search = search;
        }
        self.redactor.pass_frame(frame)
    }

    /// Returns the bytes that were held back. The body has ended.
    pub(super) fn pass_rest(mut self) -> Bytes {
        self.redactor.take_rest()
    }

    /// Returns true if a header contains a credential, in its name or its value.
    pub(super) fn is_in_header(&self, name: &HeaderName, value: &HeaderValue) -> bool {
        let name = name.as_str().as_bytes();
        let is_named = |secret: &Vec<u8>| {
            secret.len() <= name.len() && memchr::memmem::find(name, secret).is_some()
        };
        self.search.folded.iter().any(is_named) || self.contains_secret(value.as_bytes())
    }

    /// Returns true if a whole text contains a credential.
    pub(super) fn contains_secret(&self, text: &[u8]) -> bool {
        self.redactor.contains_secret(text)
    }
}

impl fmt::Debug for RunCredentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RunCredentials")
    }
}

/// The most values that a run's answers are searched for. Our choice: all connections of a run, three times replaced.
const MAX_VALUES: usize = 256;

/// The most bytes of these values together. Our choice: a token has at most some kilobytes.
const MAX_VALUE_BYTES: usize = 256 * 1024;

#[cfg(test)]
mod tests {
    use super::*;

    fn secrets(values: impl IntoIterator<Item = String>) -> Arc<RunCredentials> {
        let secrets = Arc::new(RunCredentials::default());
        values.into_iter().for_each(|value| secrets.add_value(&SecretString::new(value)));
        secrets
    }

    fn is_known(secrets: &Arc<RunCredentials>, value: &str) -> bool {
        secrets.guard_answer().is_some_and(|guard| guard.contains_secret(value.as_bytes()))
    }

    /// A value that is first sent while an answer streams is found in its later frames, and in what was held back.
    #[test]
    fn a_stream_is_searched_for_a_value_that_is_new() {
        let secrets = secrets(["first-secret-value".to_owned()]);
        let mut guard = secrets.guard_answer().unwrap();
        let pass = |guard: &mut EchoGuard, text: &'static str| guard.pass_frame(text.into());
        assert_eq!(pass(&mut guard, "a second-secret\n").unwrap(), "a second-secret\n");
        assert_eq!(pass(&mut guard, "then first-").unwrap(), "");
        secrets.add_value(&SecretString::new("first-other-value"));
        secrets.add_value(&SecretString::new("second-secret"));
        // What was held back may begin the new value, too.
        assert_eq!(pass(&mut guard, "othe").unwrap(), "");
        assert!(pass(&mut guard, "r-value").is_none());
        let mut guard = secrets.guard_answer().unwrap();
        assert!(pass(&mut guard, "told: second-secret").is_none());
        assert!(pass(&mut guard, "x").is_none(), "nothing passes behind it");
    }

    /// A connection that gets another value with each request does not push out the value that another one has got last.
    #[test]
    fn each_connections_last_value_is_known() {
        let value = |number: usize| format!("secret-value-{number:04}");
        let secrets = secrets([value(7000)]);
        let get = |owner: &str, number: usize| {
            secrets.add_latest(owner, &[&SecretString::new(value(number))]);
        };
        get("quiet", 8000);
        get("quiet", 8001);
        (0..2 * MAX_VALUES).for_each(|number| get("busy", number));
        let numbers = [7000, 8000, 8001, 0, 2 * MAX_VALUES - 1];
        let known = numbers.map(|number| is_known(&secrets, &value(number)));
        assert_eq!(known, [false, false, true, false, true]);
        assert_eq!(secrets.lock().values.len(), MAX_VALUES);
    }

    /// Beyond the limits the values that were used longest ago are forgotten, and never the last one.
    #[test]
    fn the_values_that_were_used_last_are_known() {
        let value = |number: usize| format!("secret-value-{number:04}");
        let secrets = secrets((0..MAX_VALUES).map(value));
        assert!(is_known(&secrets, &value(0)));
        secrets.add_value(&SecretString::new(value(0)));
        secrets.add_value(&SecretString::new(value(9999)));
        let known = [0, 1, 2, 9999].map(|number| is_known(&secrets, &value(number)));
        assert_eq!(known, [true, false, true, true]);
        // A long value that does not repeat itself, as credentials do not.
        let parts: Vec<_> = (0..MAX_VALUE_BYTES / 6).map(|number| format!("{number:06}")).collect();
        let long = parts.join("x");
        secrets.add_value(&SecretString::new(&*long));
        assert!(is_known(&secrets, &long) && !is_known(&secrets, &value(9999)));
    }
}
