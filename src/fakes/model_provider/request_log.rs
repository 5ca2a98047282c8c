//! What the provider saw: the last requests, how each ended, and the connections they came over.

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

/// Requests that are kept; older ones are only counted.
pub const MAX_KEPT_REQUESTS: usize = 256;
/// Bodies up to this length are kept; of longer ones only the length.
pub const MAX_KEPT_BODY_BYTES: usize = 64 * 1024;

/// The provider's memory. Shared with whoever asks what reached it.
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

/// One request, as it was when it was asked for.
#[derive(Clone, Debug, Serialize)]
pub struct RecordedRequest {
    /// Counts from 1.
    pub number: u64,
    pub method: String,
    /// Path and query as they came.
    pub path: String,
    pub version: String,
    /// In the order they came, repeated names together; hyper writes names in lower case.
    pub headers: Vec<(String, String)>,
    pub body_bytes: u64,
    /// The body as it came, where it is text of at most [`MAX_KEPT_BODY_BYTES`] bytes.
    #[serde(skip)]
    pub text: Option<String>,
    /// The same, where it is JSON.
    pub body: Option<Value>,
    /// What was answered; none before a response head, and none where there was to be none.
    pub status: Option<u16>,
    /// Content chunks handed to the connection so far.
    pub sent: u64,
    pub ended: Option<AnswerEnd>,
}

/// How an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AnswerEnd {
    /// All the script has was handed over, and the body ended in order.
    Completed,
    /// The script broke the connection.
    Broken,
    /// The client left first.
    ClientLeft,
    /// The provider was shut down.
    ShutDown,
}

/// One request's place in the memory; what is not said before it is dropped never happened.
#[derive(Debug)]
pub(super) struct RequestLogGuard {
    seen: Arc<ProviderRequestLog>,
    entry: Arc<RequestLogEntry>,
}

/// Counts a connection as open until it is dropped.
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
    /// The last [`MAX_KEPT_REQUESTS`] requests, oldest first.
    pub fn requests(&self) -> Vec<RecordedRequest> {
        let entries: Vec<_> = lock_mutex(&self.entries).iter().cloned().collect();
        entries.iter().map(|entry| entry.to_request()).collect()
    }

    /// The newest request.
    pub fn last_request(&self) -> Option<RecordedRequest> {
        let entry = lock_mutex(&self.entries).back().cloned();
        entry.map(|entry| entry.to_request())
    }

    /// Requests since the start, or since [`ProviderRequestLog::clear`].
    pub fn request_count(&self) -> u64 {
        self.requests.load(Relaxed)
    }

    /// Connections accepted since the start, or since [`ProviderRequestLog::clear`].
    pub fn connection_count(&self) -> u64 {
        self.connections.load(Relaxed)
    }

    /// Connections open now.
    pub fn open_connections(&self) -> u64 {
        self.open.load(Relaxed)
    }

    /// Forgets the requests and the counts; answers under way end unrecorded.
    pub fn clear(&self) {
        lock_mutex(&self.entries).clear();
        self.requests.store(0, Relaxed);
        self.connections.store(0, Relaxed);
        self.changed.send_replace(());
    }

    /// Waits until `holds`, asked again after each request, response head, end, and connection, but
    /// not after each chunk.
    pub async fn wait_until(&self, mut holds: impl FnMut(&Self) -> bool) {
        let mut changes = self.changed.subscribe();
        while !holds(self) {
            // It fails when the sender is gone, and `self` holds it.
            let _ = changes.changed().await;
        }
    }

    /// The counts and the last `limit` requests, for `GET /_seen`.
    pub(super) fn summary_json(&self, limit: usize) -> Value {
        let mut requests = self.requests();
        requests.drain(..requests.len().saturating_sub(limit));
        serde_json::json!({
            "count": self.request_count(),
            "connections": { "accepted": self.connection_count(), "open": self.open_connections() },
            "requests": requests,
        })
    }

    /// Writes each request to `file` as a line of JSON when it has ended.
    pub(super) fn record_to(&self, file: File) {
        *lock_mutex(&self.file) = Some(file);
    }

    /// From here on, what is cut is cut by the provider.
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

    /// One `write` per line, so that lines of concurrent answers do not mix.
    fn write_record(&self, request: &RecordedRequest) {
        let mut file = lock_mutex(&self.file);
        let Some(open) = file.as_mut() else { return };
        let mut line = serde_json::to_vec(request).expect("a request has no map with other keys");
        line.push(b'\n');
        if let Err(error) = open.write_all(&line) {
            tracing::warn!(%error, "recording stops: the file cannot be written");
            *file = None;
        }
    }
}

impl RecordedRequest {
    /// The first value of a header; `name` in lower case.
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

    /// Says how it ended. Said once; what comes later is only the tidying up.
    pub(super) fn set_end(&self, ended: AnswerEnd) {
        {
            let mut rest = lock_mutex(&self.entry.rest);
            if rest.ended.is_some() {
                return;
            }
            rest.ended = Some(ended);
        }
        self.seen.changed.send_replace(());
        if lock_mutex(&self.seen.file).is_some() {
            self.seen.write_record(&self.entry.to_request());
        }
    }
}

impl Drop for RequestLogGuard {
    fn drop(&mut self) {
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

/// Locks are held for a few moves and a clone, so a poisoned one still holds whole values.
fn lock_mutex<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
