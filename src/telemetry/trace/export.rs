//! The queue of finished spans, and the thread that empties the queue.

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use super::QueuedSpan;
use super::collector::CollectorClient;
use crate::telemetry::metrics::SpanCounters;

/// A handle to the queue. The thread ends when the last handle is dropped.
#[derive(Clone, Debug)]
pub(super) struct SpanExporter(Arc<SpanExporterShared>);

#[derive(Debug)]
struct SpanExporterShared {
    queue: mpsc::Sender<QueuedSpan>,
    counts: SpanCounters,
    /// Cancelled when no further spans will come.
    closing: CancellationToken,
    /// Cancelled when the remaining spans are sent or abandoned.
    ended: CancellationToken,
}

impl SpanExporter {
    pub(super) fn start_thread(
        collector: CollectorClient,
        counts: SpanCounters,
    ) -> io::Result<Self> {
        let (queue, waiting) = mpsc::channel(MAX_QUEUED_SPANS);
        let (closing, ended) = (CancellationToken::new(), CancellationToken::new());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let work = run_export_loop(waiting, collector, counts.clone(), closing.clone());
        // The guard is moved into the thread: a panic there cancels the token, too, so `finish_export` cannot hang on
        // it.
        let until_ended = ended.clone().drop_guard();
        thread::Builder::new().name("otlp".to_owned()).spawn(move || {
            let _until_ended = until_ended;
            runtime.block_on(work);
        })?;
        Ok(Self(Arc::new(SpanExporterShared { queue, counts, closing, ended })))
    }

    /// Queues a span. If the queue is full, the span is counted as lost.
    pub(super) fn enqueue_span(&self, span: QueuedSpan) {
        if self.0.queue.try_send(span).is_err() {
            self.0.counts.overflowed.inc();
        }
    }

    /// Sends the waiting spans, for at most [`FINAL_FLUSH_TIMEOUT`].
    pub(super) async fn finish_export(&self) {
        self.0.closing.cancel();
        if timeout(FINAL_FLUSH_TIMEOUT, self.0.ended.cancelled()).await.is_err() {
            tracing::warn!("the collector has not taken the last spans in time");
        }
    }
}

async fn run_export_loop(
    mut waiting: mpsc::Receiver<QueuedSpan>,
    mut collector: CollectorClient,
    counts: SpanCounters,
    closing: CancellationToken,
) {
    let mut batch = Vec::with_capacity(MAX_BATCH_SPANS);
    // Each round sends one batch. The loop ends when a round finds no span.
    loop {
        // Closing interrupts the wait for more spans, but not a batch that is being sent. What was collected stays in
        // `batch`.
        if closing.run_until_cancelled(collect_batch(&mut waiting, &mut batch)).await.is_none() {
            while batch.len() < MAX_BATCH_SPANS
                && let Ok(span) = waiting.try_recv()
            {
                batch.push(span);
            }
        }
        // Either all handles are dropped, or the process closes and the queue is empty.
        if batch.is_empty() {
            return;
        }
        let spans = batch.len();
        // One try only: a retry would hold up the spans behind it, until the queue overflows.
        let taken = collector.send_batch(batch.drain(..)).await;
        counts.exported.inc_by(taken as u64);
        counts.refused.inc_by((spans - taken) as u64);
    }
}

/// Waits for a span, and then for a short time for further spans. Returns without a span if all handles are dropped.
async fn collect_batch(waiting: &mut mpsc::Receiver<QueuedSpan>, batch: &mut Vec<QueuedSpan>) {
    if waiting.recv_many(batch, MAX_BATCH_SPANS).await == 0 {
        return;
    }
    let until = Instant::now() + BATCH_INTERVAL;
    while batch.len() < MAX_BATCH_SPANS {
        let room = MAX_BATCH_SPANS - batch.len();
        match timeout_at(until, waiting.recv_many(batch, room)).await {
            Ok(1..) => (),
            // The senders are gone, or the interval is over.
            Ok(0) | Err(_) => return,
        }
    }
}

/// The largest number of waiting spans; further spans are lost. The value is OpenTelemetry's default, and about 2 MiB.
const MAX_QUEUED_SPANS: usize = 2048;

/// The largest number of spans in one request. The value is OpenTelemetry's default.
const MAX_BATCH_SPANS: usize = 512;

/// The time that a span waits for further spans. Our choice: a fifth of OpenTelemetry's default, for operators who
/// watch a run.
const BATCH_INTERVAL: Duration = Duration::from_secs(1);

/// The longest time that the end of the process waits for the collector. Our choice: together with the drain of eight
/// seconds, it fits into the ten seconds of `docker stop`.
const FINAL_FLUSH_TIMEOUT: Duration = Duration::from_secs(1);
