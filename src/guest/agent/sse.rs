//! Server-sent events: the data of each, one after the other.

use std::io::{self, BufRead, Read};

/// Reads the data of one event after the other.
#[derive(Debug)]
pub struct SseReader<R> {
    source: R,
    line: Vec<u8>,
}

impl<R: BufRead> SseReader<R> {
    pub fn new(source: R) -> Self {
        Self { source, line: vec![] }
    }

    /// The data of the next event that has any; `None` at the end. An event that the end cuts is none.
    ///
    /// # Errors
    /// The source fails, an event is too long, or is not UTF-8.
    pub fn next_data(&mut self) -> io::Result<Option<String>> {
        let mut data: Option<Vec<u8>> = None;
        while self.read_line()? {
            if self.line.is_empty() {
                match data.take() {
                    Some(data) => return String::from_utf8(data).map(Some).map_err(invalid_data),
                    None => continue,
                }
            }
            let Some(value) = self.line.strip_prefix(b"data:") else { continue };
            let value = value.strip_prefix(b" ").unwrap_or(value);
            let data = match &mut data {
                None => data.insert(vec![]),
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

    /// The next line, without its end; false where there is no whole one.
    fn read_line(&mut self) -> io::Result<bool> {
        self.line.clear();
        let mut limited = self.source.by_ref().take(MAX_EVENT_BYTES as u64);
        limited.read_until(b'\n', &mut self.line)?;
        if self.line.pop() != Some(b'\n') {
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

/// The gateway's own bound of an event.
const MAX_EVENT_BYTES: usize = 8 << 20;
