//! The queue of finished spans, and the thread that empties it.

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

/// A handle to the queue. When the last one is gone, so is the thread.
#[derive(Clone, Debug)]
pub(super) struct SpanExporter(Arc<SpanExporterShared>);

#[derive(Debug)]
struct SpanExporterShared {
    queue: mpsc::Sender<QueuedSpan>,
    counts: SpanCounters,
    /// Cancelled when what is waiting is the last there will be.
    closing: CancellationToken,
    /// Cancelled when that is sent or given up.
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
        let until_ended = ended.clone().drop_guard();
        thread::Builder::new().name("otlp".to_owned()).spawn(move || {
            let _until_ended = until_ended;
            runtime.block_on(work);
        })?;
        Ok(Self(Arc::new(SpanExporterShared { queue, counts, closing, ended })))
    }

    /// Queues a span, or counts it as lost.
    pub(super) fn enqueue_span(&self, span: QueuedSpan) {
        if self.0.queue.try_send(span).is_err() {
            self.0.counts.overflowed.inc();
        }
    }

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
    loop {
        if closing.run_until_cancelled(collect_batch(&mut waiting, &mut batch)).await.is_none() {
            while batch.len() < MAX_BATCH_SPANS
                && let Ok(span) = waiting.try_recv()
            {
                batch.push(span);
            }
        }
        if batch.is_empty() {
            return;
        }
        let spans = batch.len();
        let taken = collector.send_batch(batch.drain(..)).await;
        counts.exported.inc_by(taken as u64);
        counts.refused.inc_by((spans - taken) as u64);
    }
}

/// Waits for a span and then, not for long, for others. Gathers nothing once there are no more to come.
async fn collect_batch(waiting: &mut mpsc::Receiver<QueuedSpan>, batch: &mut Vec<QueuedSpan>) {
    if waiting.recv_many(batch, MAX_BATCH_SPANS).await == 0 {
        return;
    }
    let until = Instant::now() + BATCH_INTERVAL;
    while batch.len() < MAX_BATCH_SPANS {
        let room = MAX_BATCH_SPANS - batch.len();
        match timeout_at(until, waiting.recv_many(batch, room)).await {
            Ok(1..) => (),
            Ok(0) | Err(_) => return,
        }
    }
}

/// Spans that wait; those that come then are lost. OpenTelemetry's default, and about 2 MiB.
const MAX_QUEUED_SPANS: usize = 2048;

/// Spans in one request. OpenTelemetry's default.
const MAX_BATCH_SPANS: usize = 512;

/// How long a span waits for others. Ours: a fifth of OpenTelemetry's default, for who watches a run.
const BATCH_INTERVAL: Duration = Duration::from_secs(1);

/// How long the end of the process waits for the collector. Ours: with the drain of eight seconds it is within the ten
/// of `docker stop`.
const FINAL_FLUSH_TIMEOUT: Duration = Duration::from_secs(1);
