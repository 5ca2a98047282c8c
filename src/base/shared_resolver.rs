//! The look-ups of hosts that the operator's settings name: the provider, servers of tools, webhooks, forges.
//!
//! A look-up holds a thread until this machine's resolver answers, also after its callers have left. The threads belong
//! to the whole process. So all clients of the process share the look-up of a host that has not ended: a silent resolver
//! holds one thread for each host, however many requests come and go.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, LazyLock};
use std::task::{Context, Poll};
use std::vec;

use futures_util::future::BoxFuture;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::connect::dns::Name;
use tower_service::Service;

use super::host_lookups::{HostLookups, RunLookups, system_lookup};

/// A connector to the hosts that settings name, for one client.
pub type SharedLookupConnector = HttpConnector<SharedResolver>;

/// A resolver for the connections of one client.
#[derive(Clone, Debug)]
pub struct SharedResolver(RunLookups);

impl SharedResolver {
    pub fn new() -> Self {
        let process = Arc::clone(&PROCESS_LOOKUPS);
        Self(RunLookups { process, run: Arc::from(""), lookup: system_lookup() })
    }

    /// Returns a connector with a new resolver, which also connects to the hosts of `https` URLs, because TLS is laid over
    /// its connections.
    pub fn connector() -> SharedLookupConnector {
        let mut connector = HttpConnector::new_with_resolver(Self::new());
        connector.enforce_http(false);
        connector
    }

    /// Returns the addresses of a host; there is at least one.
    ///
    /// # Errors
    /// Returns the resolver's error, or an error if too many look-ups have not ended.
    pub async fn resolve_host(&self, host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
        let found = self.0.find_all_addresses(host, port).await.map_err(io::Error::other)?;
        Ok(found.into_iter().map(|address| (address, port).into()).collect())
    }
}

impl Default for SharedResolver {
    fn default() -> Self {
        Self::new()
    }
}

impl Service<Name> for SharedResolver {
    type Response = vec::IntoIter<SocketAddr>;
    type Error = io::Error;
    type Future = BoxFuture<'static, io::Result<Self::Response>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let own = self.clone();
        // The connector sets the port.
        Box::pin(async move { Ok(own.resolve_host(name.as_str(), 0).await?.into_iter()) })
    }
}

/// The look-ups of all clients.
static PROCESS_LOOKUPS: LazyLock<Arc<HostLookups>> =
    LazyLock::new(|| Arc::new(HostLookups::new(MAX_LOOKUPS, MAX_LOOKUPS)));

/// The most look-ups that have not ended. Our choice: settings name few hosts, and one look-up serves all requests to a
/// host.
const MAX_LOOKUPS: usize = 64;

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Mutex, mpsc};
    use std::time::Duration;

    use super::super::host_lookups::HostLookup;
    use super::*;

    fn resolver(lookup: HostLookup) -> SharedResolver {
        let process = Arc::new(HostLookups::new(2, 2));
        SharedResolver(RunLookups { process, run: Arc::from(""), lookup })
    }

    /// G15: requests that give up on a silent resolver hold one thread together, and the next one gets the answer.
    #[tokio::test]
    async fn requests_to_a_silent_host_hold_one_thread() {
        let (answer, answered) = mpsc::channel();
        let (answered, started) = (Mutex::new(answered), Arc::new(AtomicUsize::new(0)));
        let own = Arc::clone(&started);
        let resolver = resolver(Arc::new(move |_, _| {
            own.fetch_add(1, Ordering::Relaxed);
            let () = answered.lock().unwrap().recv().unwrap();
            Ok(vec!["169.254.1.1".parse().unwrap()])
        }));
        for _ in 0..50 {
            let asked = resolver.clone().call("provider.example".parse().unwrap());
            assert!(tokio::time::timeout(Duration::from_millis(1), asked).await.is_err());
        }
        assert_eq!(started.load(Ordering::Relaxed), 1);
        // The look-up may end before the next request, which then begins another one.
        answer.send(()).unwrap();
        answer.send(()).unwrap();
        let found = resolver.resolve_host("provider.example", 4000).await.unwrap();
        assert_eq!(found, ["169.254.1.1:4000".parse().unwrap()]);
    }

    /// The error says what the resolver said.
    #[tokio::test]
    async fn a_failed_look_up_says_why() {
        let resolver = resolver(Arc::new(|_, _| Err(io::Error::other("no resolver"))));
        let error = resolver.resolve_host("provider.example", 4000).await.unwrap_err();
        let source = std::error::Error::source(error.get_ref().unwrap()).map(ToString::to_string);
        assert_eq!(
            (error.to_string(), source),
            ("`provider.example` cannot be looked up".into(), Some("no resolver".into()))
        );
    }
}
