//! The log of received requests: the last requests, their ends, and the connections.

use std::collections::VecDeque;
use std::fs::File;
use std::io::Write as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use http::request::Parts;
use serde::Serialize;
use serde_json::Value;
use tokio::sync::watch;

/// The maximum number of stored requests; older requests are only counted. Our choice.
pub const MAX_KEPT_REQUESTS: usize = 256;
/// The maximum length of a stored body. Of a longer body only the length is stored. Our choice.
pub const MAX_KEPT_BODY_BYTES: usize = 64 * 1024;

/// The provider's log. The tests and the control routes read it.
#[derive(Debug, Default)]
pub struct ProviderRequestLog {
    entries: Mutex<VecDeque<Arc<RequestLogEntry>>>,
    requests: AtomicU64,
    connections: AtomicU64,
    open: AtomicU64,
    closing: AtomicBool,
    changed: watch::Sender<()>,
    file: Mutex<Option<File>>,
}

/// A request with the state of its answer.
#[derive(Clone, Debug, Serialize)]
pub struct RecordedRequest {
    /// The number of the request, from 1.
    pub number: u64,
    pub method: String,
    /// The path and the query, as received.
    pub path: String,
    pub version: String,
    /// The headers in order of arrival, with repeated names together. hyper writes names in lower case.
    pub headers: Vec<(String, String)>,
    pub body_bytes: u64,
    /// The body as received, if it is text of at most [`MAX_KEPT_BODY_BYTES`] bytes.
    #[serde(skip)]
    pub text: Option<String>,
    /// The body, if it is JSON.
    pub body: Option<Value>,
    /// The status of the answer. `None` before a response head, and if the script breaks the connection before it.
    pub status: Option<u16>,
    /// The number of content chunks that the connection has received so far.
    pub sent: u64,
    pub ended: Option<AnswerEnd>,
}

/// The end of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AnswerEnd {
    /// The complete script was played, and the body ended in order.
    Completed,
    /// The script broke the connection.
    Broken,
    /// The client disconnected first.
    ClientLeft,
    /// The provider was shut down.
    ShutDown,
}

/// A request's entry in the log. An entry that is dropped without an end is recorded as a disconnect or a shutdown.
#[derive(Debug)]
pub(super) struct RequestLogGuard {
    seen: Arc<ProviderRequestLog>,
    entry: Arc<RequestLogEntry>,
}

/// A guard that counts a connection as open until it is dropped.
#[derive(Debug)]
pub(super) struct OpenConnectionGuard(Arc<ProviderRequestLog>);

#[derive(Debug)]
struct RequestLogEntry {
    number: u64,
    head: Parts,
    sent: AtomicU64,
    rest: Mutex<RequestLogState>,
}

#[derive(Debug, Default)]
struct RequestLogState {
    body: Option<Bytes>,
    body_bytes: u64,
    status: Option<u16>,
    ended: Option<AnswerEnd>,
}

impl ProviderRequestLog {
    /// Returns the last [`MAX_KEPT_REQUESTS`] requests, oldest first.
    pub fn requests(&self) -> Vec<RecordedRequest> {
        // The entries are cloned first, because formatting them takes longer than the lock should be held.
        let entries: Vec<_> = lock_mutex(&self.entries).iter().cloned().collect();
        entries.iter().map(|entry| entry.to_request()).collect()
    }

    /// Returns the newest request.
    pub fn last_request(&self) -> Option<RecordedRequest> {
        let entry = lock_mutex(&self.entries).back().cloned();
        entry.map(|entry| entry.to_request())
    }

    /// Returns the number of requests since the start, or since [`ProviderRequestLog::clear`].
    pub fn request_count(&self) -> u64 {
        self.requests.load(Relaxed)
    }

    /// Returns the number of accepted connections since the start, or since [`ProviderRequestLog::clear`].
    pub fn connection_count(&self) -> u64 {
        self.connections.load(Relaxed)
    }

    /// Returns the number of open connections.
    pub fn open_connections(&self) -> u64 {
        self.open.load(Relaxed)
    }

    /// Clears the requests and the counts. Running answers end without a record.
    pub fn clear(&self) {
        lock_mutex(&self.entries).clear();
        self.requests.store(0, Relaxed);
        self.connections.store(0, Relaxed);
        self.changed.send_replace(());
    }

    /// Waits until `holds` returns true. The function is called after each request, response head, end and connection,
    /// but not after each chunk.
    pub async fn wait_until(&self, mut holds: impl FnMut(&Self) -> bool) {
        // Subscribed before the first check, so that no change between check and wait is lost.
        let mut changes = self.changed.subscribe();
        while !holds(self) {
            // The call fails only after the sender is dropped, and `self` owns the sender.
            let _ = changes.changed().await;
        }
    }

    /// Returns the counts and the last `limit` requests, for `GET /_seen`.
    pub(super) fn summary_json(&self, limit: usize) -> Value {
        let mut requests = self.requests();
        requests.drain(..requests.len().saturating_sub(limit));
        serde_json::json!({
            "count": self.request_count(),
            "connections": { "accepted": self.connection_count(), "open": self.open_connections() },
            "requests": requests,
        })
    }

    /// Writes each request to `file` after its end, as a line of JSON.
    pub(super) fn record_to(&self, file: File) {
        *lock_mutex(&self.file) = Some(file);
    }

    /// Marks the shutdown: from here on the provider itself aborts answers.
    pub(super) fn mark_closing(&self) {
        self.closing.store(true, Relaxed);
    }

    pub(super) fn track_connection(self: &Arc<Self>) -> OpenConnectionGuard {
        self.connections.fetch_add(1, Relaxed);
        self.open.fetch_add(1, Relaxed);
        self.changed.send_replace(());
        OpenConnectionGuard(self.clone())
    }

    pub(super) fn track_request(self: &Arc<Self>, head: Parts) -> RequestLogGuard {
        // The number continues after an entry is dropped from the list.
        let number = self.requests.fetch_add(1, Relaxed) + 1;
        let entry = Arc::new(RequestLogEntry {
            number,
            head,
            sent: AtomicU64::new(0),
            rest: Mutex::default(),
        });
        {
            let mut entries = lock_mutex(&self.entries);
            if entries.len() == MAX_KEPT_REQUESTS {
                entries.pop_front();
            }
            entries.push_back(entry.clone());
        }
        self.changed.send_replace(());
        RequestLogGuard { seen: self.clone(), entry }
    }

    /// Writes a line with one `write`, so that lines of concurrent answers do not mix.
    fn write_record(&self, request: &RecordedRequest) {
        let mut file = lock_mutex(&self.file);
        let Some(open) = file.as_mut() else { return };
        let mut line = serde_json::to_vec(request).expect("a request has no map with other keys");
        line.push(b'\n');
        if let Err(error) = open.write_all(&line) {
            tracing::warn!(%error, "cannot write the record file; recording stops");
            // A full disk is reported once, and not for every request.
            *file = None;
        }
    }
}

impl RecordedRequest {
    /// Returns the first value of a header. `name` is in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(is, _)| is == name).map(|(_, value)| value.as_str())
    }
}

impl RequestLogGuard {
    pub(super) fn head(&self) -> &Parts {
        &self.entry.head
    }

    pub(super) fn set_body(&self, body: &Bytes) {
        let mut rest = lock_mutex(&self.entry.rest);
        rest.body_bytes = body.len() as u64;
        rest.body = Some(body.clone()).filter(|body| body.len() <= MAX_KEPT_BODY_BYTES);
    }

    pub(super) fn set_status(&self, status: http::StatusCode) {
        lock_mutex(&self.entry.rest).status = Some(status.as_u16());
        self.seen.changed.send_replace(());
    }

    pub(super) fn count_chunk(&self) {
        self.entry.sent.fetch_add(1, Relaxed);
    }

    /// Records the end of the answer. Only the first call counts; later calls come from the clean-up.
    pub(super) fn set_end(&self, ended: AnswerEnd) {
        {
            let mut rest = lock_mutex(&self.entry.rest);
            if rest.ended.is_some() {
                return;
            }
            rest.ended = Some(ended);
        }
        self.seen.changed.send_replace(());
        // The record is only built if a file is open.
        if lock_mutex(&self.seen.file).is_some() {
            self.seen.write_record(&self.entry.to_request());
        }
    }
}

impl Drop for RequestLogGuard {
    fn drop(&mut self) {
        // `set_end` ignores this call if the end is recorded already.
        let closing = self.seen.closing.load(Relaxed);
        self.set_end(if closing { AnswerEnd::ShutDown } else { AnswerEnd::ClientLeft });
    }
}

impl Drop for OpenConnectionGuard {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Relaxed);
        self.0.changed.send_replace(());
    }
}

impl RequestLogEntry {
    fn to_request(&self) -> RecordedRequest {
        let rest = lock_mutex(&self.rest);
        let body = rest.body.as_ref();
        let uri = &self.head.uri;
        let text =
            |value: &http::HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
        RecordedRequest {
            number: self.number,
            method: self.head.method.to_string(),
            path: uri.path_and_query().map_or_else(|| uri.to_string(), ToString::to_string),
            version: format!("{:?}", self.head.version),
            headers: self
                .head
                .headers
                .iter()
                .map(|(name, value)| (name.to_string(), text(value)))
                .collect(),
            body_bytes: rest.body_bytes,
            text: body.and_then(|body| std::str::from_utf8(body).ok()).map(ToOwned::to_owned),
            body: body.and_then(|body| serde_json::from_slice(body).ok()),
            status: rest.status,
            sent: self.sent.load(Relaxed),
            ended: rest.ended,
        }
    }
}

/// Locks a mutex. Each lock is held for a few moves and a clone, so that a poisoned lock still holds whole values.
fn lock_mutex<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
