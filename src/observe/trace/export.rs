//! The queue of finished spans, and the thread that empties it.

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use prometheus::IntCounter;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use super::Placed;
use super::collector::Collector;

/// A handle to the queue. When the last one is gone, so is the thread.
#[derive(Clone, Debug)]
pub(super) struct Exporter(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    queue: mpsc::Sender<Placed>,
    counts: Counts,
    /// Cancelled when what is waiting is the last there will be.
    closing: CancellationToken,
    /// Cancelled when that is sent or given up.
    ended: CancellationToken,
}

/// What becomes of spans.
#[derive(Clone, Debug)]
pub struct Counts {
    pub exported: IntCounter,
    /// Lost because too many were waiting.
    pub overflowed: IntCounter,
    /// Lost because the collector did not take them.
    pub refused: IntCounter,
}

impl Exporter {
    pub(super) fn start(collector: Collector, counts: Counts) -> io::Result<Self> {
        let (queue, waiting) = mpsc::channel(QUEUE);
        let (closing, ended) = (CancellationToken::new(), CancellationToken::new());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let work = work(waiting, collector, counts.clone(), closing.clone());
        let until_ended = ended.clone().drop_guard();
        thread::Builder::new().name("otlp".to_owned()).spawn(move || {
            let _until_ended = until_ended;
            runtime.block_on(work);
        })?;
        Ok(Self(Arc::new(Shared { queue, counts, closing, ended })))
    }

    /// Queues a span, or counts it as lost.
    pub(super) fn put(&self, span: Placed) {
        if self.0.queue.try_send(span).is_err() {
            self.0.counts.overflowed.inc();
        }
    }

    pub(super) async fn finish(&self) {
        self.0.closing.cancel();
        if timeout(LAST_SPANS, self.0.ended.cancelled()).await.is_err() {
            tracing::warn!("the collector has not taken the last spans in time");
        }
    }
}

async fn work(
    mut waiting: mpsc::Receiver<Placed>,
    mut collector: Collector,
    counts: Counts,
    closing: CancellationToken,
) {
    let mut batch = Vec::with_capacity(BATCH);
    loop {
        if closing.run_until_cancelled(gather(&mut waiting, &mut batch)).await.is_none() {
            while batch.len() < BATCH
                && let Ok(span) = waiting.try_recv()
            {
                batch.push(span);
            }
        }
        if batch.is_empty() {
            return;
        }
        let spans = batch.len();
        let taken = collector.send(batch.drain(..)).await;
        counts.exported.inc_by(taken as u64);
        counts.refused.inc_by((spans - taken) as u64);
    }
}

/// Waits for a span and then, not for long, for others. Gathers nothing once there are no more to come.
async fn gather(waiting: &mut mpsc::Receiver<Placed>, batch: &mut Vec<Placed>) {
    if waiting.recv_many(batch, BATCH).await == 0 {
        return;
    }
    let until = Instant::now() + INTERVAL;
    while batch.len() < BATCH {
        let room = BATCH - batch.len();
        match timeout_at(until, waiting.recv_many(batch, room)).await {
            Ok(1..) => (),
            Ok(0) | Err(_) => return,
        }
    }
}

/// Spans that wait; those that come then are lost. OpenTelemetry's default, and about 2 MiB.
const QUEUE: usize = 2048;

/// Spans in one request. OpenTelemetry's default.
const BATCH: usize = 512;

/// How long a span waits for others. Ours: a fifth of OpenTelemetry's default, for who watches a run.
const INTERVAL: Duration = Duration::from_secs(1);

/// How long the end of the process waits for the collector. Ours: with the drain of eight seconds it is within the ten
/// of `docker stop`.
const LAST_SPANS: Duration = Duration::from_secs(1);
