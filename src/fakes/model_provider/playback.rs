//! Plays a script: what is sent when, where the answer waits, and where it breaks.

use std::fmt::Write as _;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use rustix::time::{ClockId, clock_gettime};
use tokio::time::Instant;

use super::answer::ScriptedAnswer;
use super::breakable_socket::ConnectionBreaker;
use super::event::{EventPart, RenderedEvent, filler_bytes};
use super::generated_body::{BodyAbortedError, BodyWriter};
use super::protocol::ProviderProtocol;
use super::request_log::{AnswerEnd, RequestLogGuard};
use super::script::{AnswerPosition, FaultKind, ProviderScript, ScriptedFault};
use crate::base::response_gate::ResponseGate;

/// Where one answer waits and where it fails.
#[derive(Debug)]
pub(super) struct FaultPlan {
    wait: Option<AnswerPosition>,
    fault: Option<ScriptedFault>,
    gate: ResponseGate,
    /// None over HTTP/2, where a connection carries more answers than one: there every break is a
    /// reset of the stream.
    breaker: Option<Arc<ConnectionBreaker>>,
}

/// Writes frames as the script cuts and joins them.
pub(super) struct FrameWriter {
    pen: BodyWriter,
    coalesce: u32,
    split: usize,
    held: BytesMut,
    events: u32,
    sequence: u64,
}

/// Writes a stream from the first event to the end of the body.
pub(super) async fn play_stream(
    protocol: ProviderProtocol,
    answer: ScriptedAnswer,
    course: FaultPlan,
    mut out: FrameWriter,
    ticket: RequestLogGuard,
) -> Result<(), BodyAbortedError> {
    let result = match play_events(protocol, &answer, &course, &mut out, &ticket).await {
        Ok(()) | Err(FaultKind::Truncate) => Ok(()),
        Err(FaultKind::Error) => {
            for event in protocol.failure_events(&answer) {
                out.write_event(&RenderedEvent::new(&event, 0)).await;
            }
            Ok(())
        }
        Err(_) => Err(BodyAbortedError),
    };
    out.flush().await;
    ticket.set_end(if result.is_ok() { AnswerEnd::Completed } else { AnswerEnd::Broken });
    result
}

/// The events, as far as the course goes.
async fn play_events(
    protocol: ProviderProtocol,
    answer: &ScriptedAnswer,
    course: &FaultPlan,
    out: &mut FrameWriter,
    ticket: &RequestLogGuard,
) -> Result<(), FaultKind> {
    for event in protocol.opening_events(answer) {
        out.write_event(&RenderedEvent::new(&event, 0)).await;
    }
    let chunks: Vec<RenderedEvent> = answer
        .chunk_contents()
        .map(|(content, filler)| {
            RenderedEvent::new(&protocol.chunk_event(answer, &content), filler)
        })
        .collect();
    let schedule = WriteSchedule::new(&answer.script);
    for (sent, chunk) in (0..answer.chunks).zip(chunks.iter().cycle()) {
        course.apply_at(AnswerPosition::Chunk(sent), out).await?;
        schedule.wait_until_due(sent, out).await;
        out.write_event(chunk).await;
        ticket.count_chunk();
    }
    course.apply_at(AnswerPosition::Chunk(answer.chunks), out).await?;
    for event in protocol.closing_events(answer) {
        out.write_event(&RenderedEvent::new(&event, 0)).await;
    }
    course.apply_at(AnswerPosition::End, out).await
}

/// Writes a unary body, in two halves where something happens between them.
pub(super) async fn play_unary(
    mut body: Bytes,
    course: FaultPlan,
    mut out: FrameWriter,
    ticket: RequestLogGuard,
) -> Result<(), BodyAbortedError> {
    if course.applies_at(UNARY_MIDDLE) {
        out.send_frame(body.split_to(body.len() / 2)).await;
        if course.apply_at(UNARY_MIDDLE, &mut out).await.is_err() {
            ticket.set_end(AnswerEnd::Broken);
            return Err(BodyAbortedError);
        }
    }
    // Nobody asks again after the last byte of a known length.
    out.send_last_frame(body).await;
    ticket.set_end(AnswerEnd::Completed);
    Ok(())
}

impl FaultPlan {
    /// The course of a stream of so many `chunks`, or of a unary answer.
    pub(super) fn new(
        script: &ProviderScript,
        chunks: Option<u32>,
        gate: ResponseGate,
        breaker: Option<Arc<ConnectionBreaker>>,
    ) -> Self {
        let place = |position| match (position, chunks) {
            (AnswerPosition::Chunk(sent), Some(chunks)) => AnswerPosition::Chunk(sent.min(chunks)),
            (AnswerPosition::Chunk(_) | AnswerPosition::End, None) => UNARY_MIDDLE,
            (position, _) => position,
        };
        let fault = script.fault.map(|fault| match (fault.trouble, chunks) {
            // A body cannot turn into an error half-way; a status can say it.
            (FaultKind::Error, None) => ScriptedFault { at: AnswerPosition::Head, ..fault },
            _ => ScriptedFault { at: place(fault.at), ..fault },
        });
        Self { wait: script.gate.map(place), fault, gate, breaker }
    }

    /// Waits and fails before the response head, where the script says so.
    pub(super) async fn apply_before_head(&self) -> Result<(), FaultKind> {
        if self.applies_at(AnswerPosition::Head) {
            self.trigger(AnswerPosition::Head).await
        } else {
            Ok(())
        }
    }

    /// The same in the midst of an answer; what is held is sent first.
    async fn apply_at(&self, here: AnswerPosition, out: &mut FrameWriter) -> Result<(), FaultKind> {
        if self.applies_at(here) {
            out.flush().await;
            self.trigger(here).await?;
        }
        Ok(())
    }

    fn applies_at(&self, here: AnswerPosition) -> bool {
        self.wait == Some(here) || self.fault.is_some_and(|fault| fault.at == here)
    }

    async fn trigger(&self, here: AnswerPosition) -> Result<(), FaultKind> {
        if self.wait == Some(here) {
            self.gate.wait_for_pass().await;
        }
        let Some(fault) = self.fault.filter(|fault| fault.at == here) else { return Ok(()) };
        match (fault.trouble, &self.breaker) {
            (FaultKind::Stall, _) => pending().await,
            (FaultKind::Reset, Some(breaker)) => breaker.break_with_reset(),
            (FaultKind::Garbage, Some(breaker)) => breaker.break_with_garbage(),
            _ => (),
        }
        Err(fault.trouble)
    }
}

impl FrameWriter {
    pub(super) fn new(pen: BodyWriter, script: &ProviderScript) -> Self {
        Self {
            pen,
            coalesce: script.coalesce,
            split: usize::try_from(script.split).unwrap_or(usize::MAX),
            held: BytesMut::new(),
            events: 0,
            sequence: 0,
        }
    }

    async fn write_event(&mut self, event: &RenderedEvent) {
        if let ([EventPart::Bytes(bytes)], 1) = (event.parts.as_slice(), self.coalesce) {
            return self.send_frame(bytes.clone()).await;
        }
        for part in &event.parts {
            match part {
                EventPart::Bytes(bytes) => self.held.extend_from_slice(bytes),
                EventPart::Stamp => {
                    self.buffer_text(format_args!("{:019}", monotonic_nanoseconds()));
                }
                EventPart::Sequence => {
                    let sequence = self.sequence;
                    self.sequence += 1;
                    self.buffer_text(format_args!("{sequence}"));
                }
                EventPart::Filler(length) => self.write_filler(*length).await,
            }
        }
        self.events += 1;
        if self.events >= self.coalesce {
            self.flush().await;
        }
    }

    fn buffer_text(&mut self, text: std::fmt::Arguments<'_>) {
        self.held.write_fmt(text).expect("a buffer in memory takes all");
    }

    async fn write_filler(&mut self, mut length: u64) {
        self.flush().await;
        while length > 0 {
            let piece = filler_bytes(length);
            length -= piece.len() as u64;
            self.send_frame(piece).await;
        }
    }

    async fn flush(&mut self) {
        self.events = 0;
        let held = self.held.split().freeze();
        if !held.is_empty() {
            self.send_frame(held).await;
        }
    }

    async fn send_frame(&mut self, mut frame: Bytes) {
        while frame.len() > self.split {
            self.pen.send(frame.split_to(self.split)).await;
        }
        self.pen.send(frame).await;
    }

    async fn send_last_frame(&mut self, mut frame: Bytes) {
        while frame.len() > self.split {
            self.pen.send(frame.split_to(self.split)).await;
        }
        self.pen.send_last(frame);
    }
}

/// When each write is due. Kept from the start of the content, whatever the client does: a late
/// chunk does not delay those after it, so that lag is measured and not hidden.
struct WriteSchedule {
    start: Instant,
    interval: Duration,
    coalesce: u32,
}

impl WriteSchedule {
    fn new(script: &ProviderScript) -> Self {
        Self { start: Instant::now(), interval: script.interval, coalesce: script.coalesce }
    }

    async fn wait_until_due(&self, sent: u32, out: &mut FrameWriter) {
        if self.interval.is_zero() || !sent.is_multiple_of(self.coalesce) {
            return;
        }
        out.flush().await;
        let due = self.start + self.interval * (sent / self.coalesce);
        // The timer rounds up to its next millisecond, even for what is due already.
        if due > Instant::now() {
            tokio::time::sleep_until(due).await;
        }
    }
}

/// The clock all processes of a machine share, so that a client can tell a chunk's age.
fn monotonic_nanoseconds() -> u128 {
    let now = clock_gettime(ClockId::Monotonic);
    Duration::try_from(now).map_or(0, |since_boot| since_boot.as_nanos())
}

/// The one place within a unary answer.
const UNARY_MIDDLE: AnswerPosition = AnswerPosition::Chunk(0);
