//! A reader for the events of a run as the service sends them (server-sent events, WHATWG HTML).

use anyhow::bail;
use bytes::{Buf, BytesMut};
use http::Response;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde_json::{Value, json};

/// An event.
#[derive(Debug, Default)]
pub(super) struct ReceivedEvent {
    pub(super) id: Option<u64>,
    pub(super) name: String,
    pub(super) data: Value,
}

/// The stream of a run's events. The service writes it, so that lines end with `\n` and the data of an event is one
/// line of JSON.
pub(super) struct RunEventStream {
    body: Incoming,
    buffer: BytesMut,
    /// The number of bytes at the buffer's start that contain no line end.
    searched: usize,
}

impl ReceivedEvent {
    pub(super) fn to_json(&self) -> Value {
        json!({"id": self.id, "event": self.name, "data": self.data})
    }

    fn is_empty(&self) -> bool {
        self.name.is_empty() && self.data.is_null()
    }

    fn read(&mut self, line: &str) {
        match line.split_once(':') {
            Some(("id", id)) => self.id = id.trim().parse().ok(),
            Some(("event", name)) => name.trim().clone_into(&mut self.name),
            Some(("data", data)) => self.data = serde_json::from_str(data).unwrap_or_default(),
            _ => (),
        }
    }
}

impl RunEventStream {
    pub(super) fn new(response: Response<Incoming>) -> Self {
        Self { body: response.into_body(), buffer: BytesMut::new(), searched: 0 }
    }

    /// Returns the next event, or `None` at the end of the stream, even if the stream broke off.
    pub(super) async fn next(&mut self) -> anyhow::Result<Option<ReceivedEvent>> {
        let mut event = ReceivedEvent::default();
        loop {
            while let Some(line) = self.line() {
                // An empty line ends an event. Comments, which keep the connection open, leave the event empty.
                if !line.is_empty() {
                    event.read(&line);
                } else if !event.is_empty() {
                    return Ok(Some(event));
                }
            }
            // The buffer holds an incomplete line here.
            if self.buffer.len() > MAX_LINE {
                bail!("an event of the service is longer than {MAX_LINE} bytes");
            }
            match self.body.frame().await {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.buffer.extend_from_slice(&data);
                    }
                }
                // The caller reconnects in both cases.
                Some(Err(_)) | None => return Ok(None),
            }
        }
    }

    fn line(&mut self) -> Option<String> {
        let Some(at) = memchr::memchr(b'\n', &self.buffer[self.searched..]) else {
            // The next search starts after the bytes that were searched already.
            self.searched = self.buffer.len();
            return None;
        };
        let line = self.buffer.split_to(self.searched + at);
        self.buffer.advance(1);
        self.searched = 0;
        Some(String::from_utf8_lossy(&line).trim_end_matches('\r').to_owned())
    }
}

/// The maximum length of a line. Our choice: longer than any event of the service.
const MAX_LINE: usize = 8 << 20;
