//! A reader for server-sent events that returns the data of each event.

use std::io::{self, BufRead, Read};

/// A reader that returns the data of one event after the other.
#[derive(Debug)]
pub struct SseReader<R> {
    source: R,
    line: Vec<u8>,
}

impl<R: BufRead> SseReader<R> {
    pub fn new(source: R) -> Self {
        Self { source, line: vec![] }
    }

    /// Returns the data of the next event that has data, or `None` at the end. An event without its final empty line is
    /// dropped.
    ///
    /// # Errors
    /// Returns an error if the source fails, or if an event is too long or is not UTF-8.
    pub fn next_data(&mut self) -> io::Result<Option<String>> {
        let mut data: Option<Vec<u8>> = None;
        while self.read_line()? {
            // An empty line ends an event. An event without data, such as a comment, is skipped.
            if self.line.is_empty() {
                match data.take() {
                    Some(data) => return String::from_utf8(data).map(Some).map_err(invalid_data),
                    None => continue,
                }
            }
            // The fields `event`, `id` and `retry` carry nothing that a completion needs.
            let Some(value) = self.line.strip_prefix(b"data:") else { continue };
            let value = value.strip_prefix(b" ").unwrap_or(value);
            let data = match &mut data {
                None => data.insert(vec![]),
                // Several `data:` lines of one event are joined by line feeds.
                Some(data) => {
                    data.push(b'\n');
                    data
                }
            };
            if data.len() + value.len() > MAX_EVENT_BYTES {
                return Err(invalid_data("an event is longer than 8 MiB"));
            }
            data.extend_from_slice(value);
        }
        Ok(None)
    }

    /// Reads the next line without its line end. Returns false if the stream ends before the line does.
    fn read_line(&mut self) -> io::Result<bool> {
        self.line.clear();
        let mut limited = self.source.by_ref().take(MAX_EVENT_BYTES as u64);
        limited.read_until(b'\n', &mut self.line)?;
        if self.line.pop() != Some(b'\n') {
            // The line was cut by the limit, and not by the end of the stream.
            let is_too_long = self.line.len() + 1 >= MAX_EVENT_BYTES;
            return if is_too_long {
                Err(invalid_data("a line is longer than 8 MiB"))
            } else {
                Ok(false)
            };
        }
        if self.line.last() == Some(&b'\r') {
            self.line.pop();
        }
        Ok(true)
    }
}

fn invalid_data(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

/// The maximum size of an event: the gateway's own limit.
const MAX_EVENT_BYTES: usize = 8 << 20;
