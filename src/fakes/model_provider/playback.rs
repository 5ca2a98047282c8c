//! Playback of a script: the frames and their times, the waits of an answer, and its failures.

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

/// The positions at which an answer waits and fails.
#[derive(Debug)]
pub(super) struct FaultPlan {
    wait: Option<AnswerPosition>,
    fault: Option<ScriptedFault>,
    gate: ResponseGate,
    /// `None` over HTTP/2, where a connection carries several answers. Every break is a reset of the stream there.
    breaker: Option<Arc<ConnectionBreaker>>,
}

/// A writer that cuts and joins frames as the script says.
pub(super) struct FrameWriter {
    body: BodyWriter,
    coalesce: u32,
    split: usize,
    pending: BytesMut,
    events: u32,
    sequence: u64,
}

/// Writes a stream from the first event to the end of the body.
pub(super) async fn play_stream(
    protocol: ProviderProtocol,
    answer: ScriptedAnswer,
    fault_plan: FaultPlan,
    mut out: FrameWriter,
    log_guard: RequestLogGuard,
) -> Result<(), BodyAbortedError> {
    let result = match play_events(protocol, &answer, &fault_plan, &mut out, &log_guard).await {
        // A truncated stream lacks its last events, but its HTTP body ends in order.
        Ok(()) | Err(FaultKind::Truncate) => Ok(()),
        Err(FaultKind::Error) => {
            for event in protocol.failure_events(&answer) {
                out.write_event(&RenderedEvent::new(&event, 0)).await;
            }
            Ok(())
        }
        Err(_) => Err(BodyAbortedError),
    };
    // The frames before a break are still sent.
    out.flush().await;
    log_guard.set_end(if result.is_ok() { AnswerEnd::Completed } else { AnswerEnd::Broken });
    result
}

/// Writes the events until the end or until the plan's failure.
async fn play_events(
    protocol: ProviderProtocol,
    answer: &ScriptedAnswer,
    fault_plan: &FaultPlan,
    out: &mut FrameWriter,
    log_guard: &RequestLogGuard,
) -> Result<(), FaultKind> {
    for event in protocol.opening_events(answer) {
        out.write_event(&RenderedEvent::new(&event, 0)).await;
    }
    // The distinct chunks are rendered once, and the stream repeats them.
    let chunks: Vec<RenderedEvent> = answer
        .chunk_contents()
        .map(|(content, filler)| {
            RenderedEvent::new(&protocol.chunk_event(answer, &content), filler)
        })
        .collect();
    // The clock starts with the content, so that the opening events do not count.
    let schedule = WriteSchedule::new(&answer.script);
    for (sent, chunk) in (0..answer.chunks).zip(chunks.iter().cycle()) {
        // The failure at position N comes after N chunks were sent.
        fault_plan.apply_at(AnswerPosition::Chunk(sent), out).await?;
        schedule.wait_until_due(sent, out).await;
        out.write_event(chunk).await;
        log_guard.count_chunk();
    }
    fault_plan.apply_at(AnswerPosition::Chunk(answer.chunks), out).await?;
    for event in protocol.closing_events(answer) {
        out.write_event(&RenderedEvent::new(&event, 0)).await;
    }
    fault_plan.apply_at(AnswerPosition::End, out).await
}

/// Writes a unary body, in two halves if a wait or a failure is planned between them.
pub(super) async fn play_unary(
    mut body: Bytes,
    fault_plan: FaultPlan,
    mut out: FrameWriter,
    log_guard: RequestLogGuard,
) -> Result<(), BodyAbortedError> {
    if fault_plan.applies_at(UNARY_MIDDLE) {
        // The first half is on the wire before the failure, so that the client has seen the head.
        out.send_frame(body.split_to(body.len() / 2)).await;
        if fault_plan.apply_at(UNARY_MIDDLE, &mut out).await.is_err() {
            log_guard.set_end(AnswerEnd::Broken);
            return Err(BodyAbortedError);
        }
    }
    // The connection never asks for another frame after the last byte of a known length.
    out.send_last_frame(body).await;
    log_guard.set_end(AnswerEnd::Completed);
    Ok(())
}

impl FaultPlan {
    /// Creates the plan for a stream of `chunks` chunks, or for a unary answer.
    pub(super) fn new(
        script: &ProviderScript,
        chunks: Option<u32>,
        gate: ResponseGate,
        breaker: Option<Arc<ConnectionBreaker>>,
    ) -> Self {
        // A position after the last chunk is the end of the content; a unary answer has only one position.
        let place = |position| match (position, chunks) {
            (AnswerPosition::Chunk(sent), Some(chunks)) => AnswerPosition::Chunk(sent.min(chunks)),
            (AnswerPosition::Chunk(_) | AnswerPosition::End, None) => UNARY_MIDDLE,
            (position, _) => position,
        };
        let fault = script.fault.map(|fault| match (fault.kind, chunks) {
            // A body that has begun cannot become an error, but a status can report one.
            (FaultKind::Error, None) => ScriptedFault { at: AnswerPosition::Head, ..fault },
            _ => ScriptedFault { at: place(fault.at), ..fault },
        });
        Self { wait: script.gate.map(place), fault, gate, breaker }
    }

    /// Waits and fails before the response head, if the script demands it.
    pub(super) async fn apply_before_head(&self) -> Result<(), FaultKind> {
        if self.applies_at(AnswerPosition::Head) {
            self.trigger(AnswerPosition::Head).await
        } else {
            Ok(())
        }
    }

    /// Waits and fails at a position of the answer. Frames that are held back are sent first.
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

    // The wait comes before the failure if both are at one position.
    async fn trigger(&self, here: AnswerPosition) -> Result<(), FaultKind> {
        if self.wait == Some(here) {
            self.gate.wait_for_pass().await;
        }
        let Some(fault) = self.fault.filter(|fault| fault.at == here) else { return Ok(()) };
        match (fault.kind, &self.breaker) {
            // Only the client or the shutdown ends a stall.
            (FaultKind::Stall, _) => pending().await,
            (FaultKind::Reset, Some(breaker)) => breaker.break_with_reset(),
            (FaultKind::Garbage, Some(breaker)) => breaker.break_with_garbage(),
            _ => (),
        }
        Err(fault.kind)
    }
}

impl FrameWriter {
    pub(super) fn new(body: BodyWriter, script: &ProviderScript) -> Self {
        Self {
            body,
            coalesce: script.coalesce,
            split: usize::try_from(script.split).unwrap_or(usize::MAX),
            pending: BytesMut::new(),
            events: 0,
            sequence: 0,
        }
    }

    async fn write_event(&mut self, event: &RenderedEvent) {
        // The usual case needs no copy: the event is one piece of bytes, and events are not joined.
        if let ([EventPart::Bytes(bytes)], 1) = (event.parts.as_slice(), self.coalesce) {
            return self.send_frame(bytes.clone()).await;
        }
        for part in &event.parts {
            match part {
                EventPart::Bytes(bytes) => self.pending.extend_from_slice(bytes),
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
        // Events are held back until enough of them are joined.
        if self.events >= self.coalesce {
            self.flush().await;
        }
    }

    fn buffer_text(&mut self, text: std::fmt::Arguments<'_>) {
        self.pending.write_fmt(text).expect("a buffer in memory takes all");
    }

    async fn write_filler(&mut self, mut length: u64) {
        // Filler may be too large for the buffer.
        self.flush().await;
        while length > 0 {
            let piece = filler_bytes(length);
            length -= piece.len() as u64;
            self.send_frame(piece).await;
        }
    }

    async fn flush(&mut self) {
        self.events = 0;
        let held = self.pending.split().freeze();
        if !held.is_empty() {
            self.send_frame(held).await;
        }
    }

    async fn send_frame(&mut self, mut frame: Bytes) {
        while frame.len() > self.split {
            self.body.send(frame.split_to(self.split)).await;
        }
        self.body.send(frame).await;
    }

    async fn send_last_frame(&mut self, mut frame: Bytes) {
        while frame.len() > self.split {
            self.body.send(frame.split_to(self.split)).await;
        }
        self.body.send_last(frame);
    }
}

/// The due time of each write, counted from the start of the content. A late chunk does not delay later chunks, so that
/// a client measures the lag.
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
        // Joined events are written together, so that only the first event of a write has a due time.
        if self.interval.is_zero() || !sent.is_multiple_of(self.coalesce) {
            return;
        }
        out.flush().await;
        let due = self.start + self.interval * (sent / self.coalesce);
        // The timer rounds up to its next millisecond, even for a time that has passed already.
        if due > Instant::now() {
            tokio::time::sleep_until(due).await;
        }
    }
}

/// Reads the clock that all processes of a machine share, so that a client can compute a chunk's age.
fn monotonic_nanoseconds() -> u128 {
    let now = clock_gettime(ClockId::Monotonic);
    Duration::try_from(now).map_or(0, |since_boot| since_boot.as_nanos())
}

/// The only position within a unary answer.
const UNARY_MIDDLE: AnswerPosition = AnswerPosition::Chunk(0);
