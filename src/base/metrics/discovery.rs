//! The answer to Prometheus' `http_sd_configs`: the address of this listener and its labels.

use std::net::SocketAddr;

use serde::Serialize;

/// The target that an answer describes.
#[derive(Clone, Debug)]
pub struct ScrapeTarget {
    /// The address to scrape; `None` means the address of the request.
    pub address: Option<String>,
    /// The value of the label `service`.
    pub service: String,
}

#[derive(Serialize)]
struct ScrapeTargetGroup<'a> {
    targets: [&'a str; 1],
    labels: ScrapeTargetLabels<'a>,
}

#[derive(Serialize)]
struct ScrapeTargetLabels<'a> {
    instance: &'a str,
    service: &'a str,
}

impl ScrapeTarget {
    /// Renders the answer for a client that has connected to the address `local`.
    pub(super) fn render_targets(&self, local: SocketAddr) -> Vec<u8> {
        let local = SocketAddr::new(local.ip().to_canonical(), local.port()).to_string();
        let address = self.address.as_ref().unwrap_or(&local);
        let labels = ScrapeTargetLabels { instance: address, service: &self.service };
        serde_json::to_vec(&[ScrapeTargetGroup { targets: [address], labels }])
            .expect("texts can be written as JSON")
    }
}
