//! Plays a script: what is sent when, where the answer waits, and where it breaks.

use std::fmt::Write as _;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use rustix::time::{ClockId, clock_gettime};
use tokio::time::Instant;

use super::answer::Answer;
use super::body::{Broken, Pen};
use super::event::{Event, Part, filler_bytes};
use super::protocol::Protocol;
use super::record::{Ended, Ticket};
use super::script::{Fault, Position, Script, Trouble};
use super::socket::Breaker;
use crate::base::gate::Gate;

/// Where one answer waits and where it fails.
#[derive(Debug)]
pub(super) struct Course {
    wait: Option<Position>,
    fault: Option<Fault>,
    gate: Gate,
    /// None over HTTP/2, where a connection carries more answers than one: there every break is a
    /// reset of the stream.
    breaker: Option<Arc<Breaker>>,
}

/// Writes frames as the script cuts and joins them.
pub(super) struct Writer {
    pen: Pen,
    coalesce: u32,
    split: usize,
    held: BytesMut,
    events: u32,
    sequence: u64,
}

/// Writes a stream from the first event to the end of the body.
pub(super) async fn stream(
    protocol: Protocol,
    answer: Answer,
    course: Course,
    mut out: Writer,
    ticket: Ticket,
) -> Result<(), Broken> {
    let result = match events(protocol, &answer, &course, &mut out, &ticket).await {
        Ok(()) | Err(Trouble::Truncate) => Ok(()),
        Err(Trouble::Error) => {
            for event in protocol.failure(&answer) {
                out.event(&Event::new(&event, 0)).await;
            }
            Ok(())
        }
        Err(_) => Err(Broken),
    };
    out.flush().await;
    ticket.end(if result.is_ok() { Ended::Completed } else { Ended::Broken });
    result
}

/// The events, as far as the course goes.
async fn events(
    protocol: Protocol,
    answer: &Answer,
    course: &Course,
    out: &mut Writer,
    ticket: &Ticket,
) -> Result<(), Trouble> {
    for event in protocol.opening(answer) {
        out.event(&Event::new(&event, 0)).await;
    }
    let chunks: Vec<Event> = answer
        .content()
        .map(|(content, filler)| Event::new(&protocol.chunk(answer, &content), filler))
        .collect();
    let schedule = Schedule::new(&answer.script);
    for (sent, chunk) in (0..answer.chunks).zip(chunks.iter().cycle()) {
        course.pass(Position::Chunk(sent), out).await?;
        schedule.wait(sent, out).await;
        out.event(chunk).await;
        ticket.sent();
    }
    course.pass(Position::Chunk(answer.chunks), out).await?;
    for event in protocol.closing(answer) {
        out.event(&Event::new(&event, 0)).await;
    }
    course.pass(Position::End, out).await
}

/// Writes a unary body, in two halves where something happens between them.
pub(super) async fn unary(
    mut body: Bytes,
    course: Course,
    mut out: Writer,
    ticket: Ticket,
) -> Result<(), Broken> {
    if course.concerns(HALF) {
        out.frame(body.split_to(body.len() / 2)).await;
        if course.pass(HALF, &mut out).await.is_err() {
            ticket.end(Ended::Broken);
            return Err(Broken);
        }
    }
    // Nobody asks again after the last byte of a known length.
    out.last_frame(body).await;
    ticket.end(Ended::Completed);
    Ok(())
}

impl Course {
    /// The course of a stream of so many `chunks`, or of a unary answer.
    pub(super) fn new(
        script: &Script,
        chunks: Option<u32>,
        gate: Gate,
        breaker: Option<Arc<Breaker>>,
    ) -> Self {
        let place = |position| match (position, chunks) {
            (Position::Chunk(sent), Some(chunks)) => Position::Chunk(sent.min(chunks)),
            (Position::Chunk(_) | Position::End, None) => HALF,
            (position, _) => position,
        };
        let fault = script.fault.map(|fault| match (fault.trouble, chunks) {
            // A body cannot turn into an error half-way; a status can say it.
            (Trouble::Error, None) => Fault { at: Position::Head, ..fault },
            _ => Fault { at: place(fault.at), ..fault },
        });
        Self { wait: script.gate.map(place), fault, gate, breaker }
    }

    /// Waits and fails before the response head, where the script says so.
    pub(super) async fn begin(&self) -> Result<(), Trouble> {
        if self.concerns(Position::Head) { self.happen(Position::Head).await } else { Ok(()) }
    }

    /// The same in the midst of an answer; what is held is sent first.
    async fn pass(&self, here: Position, out: &mut Writer) -> Result<(), Trouble> {
        if self.concerns(here) {
            out.flush().await;
            self.happen(here).await?;
        }
        Ok(())
    }

    fn concerns(&self, here: Position) -> bool {
        self.wait == Some(here) || self.fault.is_some_and(|fault| fault.at == here)
    }

    async fn happen(&self, here: Position) -> Result<(), Trouble> {
        if self.wait == Some(here) {
            self.gate.pass().await;
        }
        let Some(fault) = self.fault.filter(|fault| fault.at == here) else { return Ok(()) };
        match (fault.trouble, &self.breaker) {
            (Trouble::Stall, _) => pending().await,
            (Trouble::Reset, Some(breaker)) => breaker.reset(),
            (Trouble::Garbage, Some(breaker)) => breaker.garbage(),
            _ => (),
        }
        Err(fault.trouble)
    }
}

impl Writer {
    pub(super) fn new(pen: Pen, script: &Script) -> Self {
        Self {
            pen,
            coalesce: script.coalesce,
            split: usize::try_from(script.split).unwrap_or(usize::MAX),
            held: BytesMut::new(),
            events: 0,
            sequence: 0,
        }
    }

    async fn event(&mut self, event: &Event) {
        if let ([Part::Bytes(bytes)], 1) = (event.parts.as_slice(), self.coalesce) {
            return self.frame(bytes.clone()).await;
        }
        for part in &event.parts {
            match part {
                Part::Bytes(bytes) => self.held.extend_from_slice(bytes),
                Part::Stamp => self.print(format_args!("{:019}", monotonic_nanoseconds())),
                Part::Sequence => {
                    let sequence = self.sequence;
                    self.sequence += 1;
                    self.print(format_args!("{sequence}"));
                }
                Part::Filler(length) => self.filler(*length).await,
            }
        }
        self.events += 1;
        if self.events >= self.coalesce {
            self.flush().await;
        }
    }

    fn print(&mut self, text: std::fmt::Arguments<'_>) {
        self.held.write_fmt(text).expect("a buffer in memory takes all");
    }

    async fn filler(&mut self, mut length: u64) {
        self.flush().await;
        while length > 0 {
            let piece = filler_bytes(length);
            length -= piece.len() as u64;
            self.frame(piece).await;
        }
    }

    async fn flush(&mut self) {
        self.events = 0;
        let held = self.held.split().freeze();
        if !held.is_empty() {
            self.frame(held).await;
        }
    }

    async fn frame(&mut self, mut frame: Bytes) {
        while frame.len() > self.split {
            self.pen.send(frame.split_to(self.split)).await;
        }
        self.pen.send(frame).await;
    }

    async fn last_frame(&mut self, mut frame: Bytes) {
        while frame.len() > self.split {
            self.pen.send(frame.split_to(self.split)).await;
        }
        self.pen.leave(frame);
    }
}

/// When each write is due. Kept from the start of the content, whatever the client does: a late
/// chunk does not delay those after it, so that lag is measured and not hidden.
struct Schedule {
    start: Instant,
    interval: Duration,
    coalesce: u32,
}

impl Schedule {
    fn new(script: &Script) -> Self {
        Self { start: Instant::now(), interval: script.interval, coalesce: script.coalesce }
    }

    async fn wait(&self, sent: u32, out: &mut Writer) {
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
const HALF: Position = Position::Chunk(0);
