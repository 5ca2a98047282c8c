//! What Prometheus asks with `http_sd_configs`: where there is something to scrape, which is here.

use std::net::SocketAddr;

use serde::Serialize;

/// What an answer says of this process.
#[derive(Clone, Debug)]
pub struct Target {
    /// Where it is scraped; without one, where it was asked.
    pub address: Option<String>,
    /// What it is called in the label `service`.
    pub service: String,
}

#[derive(Serialize)]
struct Group<'a> {
    targets: [&'a str; 1],
    labels: Labels<'a>,
}

#[derive(Serialize)]
struct Labels<'a> {
    instance: &'a str,
    service: &'a str,
}

impl Target {
    /// The answer to who has asked at `asked`.
    pub(super) fn answer(&self, asked: SocketAddr) -> Vec<u8> {
        let asked = SocketAddr::new(asked.ip().to_canonical(), asked.port()).to_string();
        let address = self.address.as_ref().unwrap_or(&asked);
        let labels = Labels { instance: address, service: &self.service };
        serde_json::to_vec(&[Group { targets: [address], labels }])
            .expect("texts can be written as JSON")
    }
}
