//! The output of a container, as an engine sends it to a client that is attached to the container.
//!
//! The engine keeps no copy of the output. What the container prints while no client is attached is lost, so a connection
//! that breaks cannot be replaced.

use std::pin::Pin;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};

use bollard::container::LogOutput;
use bollard::errors::Error as EngineError;
use futures_util::stream::Peekable;
use futures_util::{FutureExt, Stream, StreamExt};
use tokio::io::AsyncWrite;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::sandbox::output::{OutputCapture, OutputStream};

/// The frames of a container's output.
type FrameStream = Pin<Box<dyn Stream<Item = Result<LogOutput, EngineError>> + Send>>;

/// The attached output of a container.
pub(super) struct AttachedOutput {
    /// The lock lets a caller look at a slot that is not its own. No caller waits while it holds the lock.
    frames: Mutex<Peekable<FrameStream>>,
}

/// The end of a container's output.
#[derive(Debug)]
pub(super) struct OutputEnd {
    pub(super) at: Instant,
    /// The same moment by the machine's clock, which the engine reads, too.
    pub(super) time: SystemTime,
    /// The reason, if the output is known to be incomplete.
    pub(super) broken: Option<String>,
}

/// The place of an [`OutputEnd`], which is empty until the output ends.
#[derive(Debug, Default)]
pub(super) struct OutputEndSlot {
    end: OnceLock<OutputEnd>,
    ended: CancellationToken,
}

impl AttachedOutput {
    pub(super) fn new(frames: FrameStream) -> Self {
        Self { frames: Mutex::new(frames.peekable()) }
    }

    /// Returns true if the output has not ended, as far as this process knows without waiting. A frame that has arrived
    /// stays in the stream.
    pub(super) fn is_open(&self) -> bool {
        let mut frames = self.frames.lock().unwrap_or_else(PoisonError::into_inner);
        let first = Pin::new(&mut *frames).peek().now_or_never();
        !matches!(first, Some(None | Some(Err(_))))
    }

    /// Copies the output until its end, and puts the end into `slot`.
    pub(super) async fn copy_to<W: AsyncWrite + Unpin>(
        self,
        output: &mut OutputCapture<W>,
        slot: &OutputEndSlot,
    ) {
        let mut frames = self.frames.into_inner().unwrap_or_else(PoisonError::into_inner);
        let broken = loop {
            match frames.next().await {
                Some(Ok(LogOutput::StdErr { message })) => {
                    output.push(OutputStream::Stderr, &message).await;
                }
                Some(Ok(LogOutput::StdOut { message })) => {
                    output.push(OutputStream::Stdout, &message).await;
                }
                Some(Ok(LogOutput::StdIn { .. })) => (),
                // The client library returns the pieces of an incomplete frame as if they were a terminal's output, and
                // no sandbox has a terminal.
                Some(Ok(LogOutput::Console { .. })) => {
                    break Some("its last frame is incomplete".to_owned());
                }
                Some(Err(error)) => break Some(super::innermost(&error)),
                None => break None,
            }
        };
        slot.fill(OutputEnd { at: Instant::now(), time: SystemTime::now(), broken });
    }
}

impl OutputEndSlot {
    fn fill(&self, end: OutputEnd) {
        // The output ends once, so the slot is empty.
        let _ = self.end.set(end);
        self.ended.cancel();
    }

    /// Returns the end, or `None` if the output has not ended.
    pub(super) fn end(&self) -> Option<&OutputEnd> {
        self.end.get()
    }

    pub(super) async fn wait_ended(&self) {
        self.ended.cancelled().await;
    }
}

/// Parses a time of an engine: RFC 3339, in UTC or, by Podman, with the machine's offset.
pub(super) fn parse_engine_time(text: &str) -> Option<SystemTime> {
    if let Ok(time) = humantime::parse_rfc3339(text) {
        return Some(time);
    }
    let (local, offset) = text.split_at_checked(text.len().checked_sub("+00:00".len())?)?;
    let (hours, minutes) = offset.get(1..)?.split_once(':')?;
    let seconds = (hours.parse::<u64>().ok()? * 60 + minutes.parse::<u64>().ok()?) * 60;
    let (local, offset) =
        (humantime::parse_rfc3339(&format!("{local}Z")).ok()?, Duration::from_secs(seconds));
    match offset_sign(text)? {
        '+' => local.checked_sub(offset),
        _ => local.checked_add(offset),
    }
}

/// Returns the sign of a time's offset.
fn offset_sign(text: &str) -> Option<char> {
    text.chars().rev().nth("00:00".len()).filter(|sign| "+-".contains(*sign))
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use futures_util::stream;
    use tokio::io::sink;

    use super::*;

    fn attached(
        frames: impl Stream<Item = Result<LogOutput, EngineError>> + Send + 'static,
    ) -> AttachedOutput {
        AttachedOutput::new(Box::pin(frames))
    }

    fn stdout(text: &'static str) -> LogOutput {
        LogOutput::StdOut { message: Bytes::from_static(text.as_bytes()) }
    }

    /// R7: A look at a slot's output takes nothing away, and sees the end.
    #[tokio::test]
    async fn a_look_takes_nothing_from_the_output() {
        assert!(attached(stream::pending()).is_open());
        assert!(!attached(stream::empty()).is_open());
        let early = attached(stream::iter([Ok(stdout("early"))]).chain(stream::pending()));
        assert!(early.is_open() && early.is_open());
        let mut output = OutputCapture::new(64, sink());
        let slot = OutputEndSlot::default();
        assert!(early.copy_to(&mut output, &slot).now_or_never().is_none());
        assert_eq!(output.stdout.finish().text, "early");
        assert!(slot.end().is_none());
    }

    /// R5: An output that breaks is not taken for one that has ended.
    #[tokio::test]
    async fn a_broken_output_has_a_reason() {
        let cut = LogOutput::Console { message: Bytes::from_static(b"\x01\0\0") };
        let lost = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
        let error = EngineError::IOError { err: lost };
        for (last, is_broken) in [(None, false), (Some(Ok(cut)), true), (Some(Err(error)), true)] {
            let frames =
                attached(stream::iter([Some(Ok(stdout("text"))), last].into_iter().flatten()));
            let (mut output, slot) = (OutputCapture::new(64, sink()), OutputEndSlot::default());
            frames.copy_to(&mut output, &slot).await;
            assert_eq!(slot.end().map(|end| end.broken.is_some()), Some(is_broken));
            assert_eq!(output.stdout.finish().text, "text");
        }
    }

    #[test]
    fn times_of_engines_are_parsed() {
        let utc = parse_engine_time("2026-11-26T01:29:35.123456789Z");
        assert!(utc.is_some());
        for same in ["2026-11-26T02:59:35.123456789+01:30", "2026-11-25T20:29:35.123456789-05:00"] {
            assert_eq!(parse_engine_time(same), utc, "{same}");
        }
        for wrong in ["", "Z", "soon", "2026-11-26T01:29:35", "2026-11-26T01:29:35*01:00"] {
            assert_eq!(parse_engine_time(wrong), None, "{wrong}");
        }
    }
}
