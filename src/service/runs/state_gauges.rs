//! The figures of the service's work and disks, which a scrape of the metrics reads.

use std::sync::Arc;

use super::{RunService, RunServiceInner};
use crate::base::disk::measure_space;
use crate::relay::delivery::DeliveryService;
use crate::relay::delivery::outbox::OutboxError;
use crate::telemetry::metrics::{ServiceStateGauges, WorkGauges};

impl RunService {
    /// Lets the metrics read the service's queue, work and disks at each scrape.
    pub(super) fn publish_gauges(&self) {
        let metrics = self.0.gateway_host.metrics();
        let queue = self.0.queue.clone();
        metrics.set_run_queue_source(move || queue.gauges());
        // A strong reference would keep the service alive, because the service has the metrics.
        let service = Arc::downgrade(&self.0);
        metrics.set_service_state_source(move || {
            service.upgrade().map(|service| service.read_state_gauges()).unwrap_or_default()
        });
    }
}

impl RunServiceInner {
    /// Reads the outbox and asks the file systems for their space. Blocks.
    fn read_state_gauges(&self) -> ServiceStateGauges {
        let relay = self.relay.load_full();
        let work = relay.and_then(|relay| {
            let read = read_work_gauges(&relay);
            read.inspect_err(|error| tracing::warn!(%error, "cannot count the relay's work")).ok()
        });
        let directories =
            [("run", &self.settings.host.run_dir), ("state", &self.settings.state_dir)];
        let disks = directories
            .into_iter()
            .filter_map(|(name, path)| Some((name, measure_space(path).ok()?)))
            .collect();
        ServiceStateGauges { work, disks }
    }
}

fn read_work_gauges(relay: &DeliveryService) -> Result<WorkGauges, OutboxError> {
    let undelivered = relay.outbox().undelivered_totals()?;
    let kept = relay.outbox().retained_totals(None)?;
    let limits = relay.retention_limits();
    Ok(WorkGauges {
        undelivered: undelivered.works,
        oldest_undelivered: undelivered.oldest_age(),
        kept: kept.works,
        kept_bytes: kept.bytes,
        max_kept: limits.works,
        max_kept_bytes: limits.bytes,
    })
}
